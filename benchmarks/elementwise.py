# ruff: noqa: SLF001  what the package's own bench is made of
"""Time the elementwise ops beside copies of the same bytes, and beside PyTorch where it is installed; print shares of the copy.

python benchmarks/elementwise.py [--ops bias_gelu,swiglu] [--dtypes float16] [--cols 128,8192] [--rows 49152] [--tiles]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import cupynorm
from cupynorm import _device, _elementwise, _row, bench, peers
from cupynorm._dtypes import dtype_of

COLS = (128, 256, 512, 768, 1024, 2048, 4096, 8192)
P, SEED = 0.1, 7
OURS = "cupynorm"
# rows of a thread x threads of a block, for --tiles
TILES = tuple((rows, threads) for rows in (1, 2, 4) for threads in (128, 256))


class Op(NamedTuple):
    """One op: ours, and PyTorch's. halves: x's columns for each of the result's; biased: whether it is timed with a bias."""

    ours: Callable[..., Any]
    torch: Callable[[Any, Any, Any], Any]  # of torch.nn.functional, x and bias
    halves: int = 1
    biased: bool = True


OPS: dict[str, Op] = {
    "bias_gelu": Op(cupynorm.bias_gelu, lambda f, x, b: f.gelu(x + b)),
    "bias_gelu_tanh": Op(
        functools.partial(cupynorm.bias_gelu, approximate="tanh"),
        lambda f, x, b: f.gelu(x + b, approximate="tanh"),
    ),
    "bias_silu": Op(cupynorm.bias_silu, lambda f, x, b: f.silu(x + b)),
    "geglu": Op(cupynorm.geglu, lambda f, x, b: _gated(f.gelu, x + b), halves=2),
    "swiglu": Op(cupynorm.swiglu, lambda f, x, _: _gated(f.silu, x), halves=2, biased=False),
    "dropout": Op(
        lambda x, _, **options: cupynorm.dropout(x, P, seed=SEED, **options),
        lambda f, x, _: f.dropout(x, P),
        biased=False,
    ),
}


def _gated(activation: Callable[[Any], Any], x: Any) -> Any:
    gate, value = x.chunk(2, dim=-1)
    return activation(gate) * value


class Buffers(NamedTuple):
    """One set to rotate among: what is read and written, and as many bytes to copy."""

    x: Any
    y: Any
    bias: Any
    copy: tuple[Any, Any]


def buffers(op: Op, rows: int, cols: int, dtype: Any) -> tuple[list[Buffers], int]:
    """Allocate the sets; return them and the bytes that a call must move."""
    module = _device.cupy()
    size, width = dtype.itemsize, op.halves * cols
    moved = rows * (width + cols) * size + (width * size if op.biased else 0)
    half = -(-moved // 2 // bench.ALIGNMENT) * bench.ALIGNMENT
    at_y = -(-rows * width * size // bench.ALIGNMENT) * bench.ALIGNMENT
    memory_bytes = max(2 * half, at_y + rows * cols * size)
    pattern = bench._pattern(dtype)
    bias = module.empty(width, dtype) if op.biased else None
    if bias is not None:
        bench._fill(bias, pattern)
    found = []
    for _ in range(bench.sets_for(moved)):
        memory = module.empty(memory_bytes, np.uint8)
        x = module.ndarray((rows, width), dtype, memptr=memory.data)
        y = module.ndarray((rows, cols), dtype, memptr=memory.data + at_y)
        bench._fill(x, pattern)
        copy = tuple(module.ndarray((half,), np.uint8, memptr=memory.data + at) for at in (0, half))
        found.append(Buffers(x, y, bias, (copy[0], copy[1])))
    module.cuda.get_current_stream().synchronize()
    return found, moved


def forced(run: Callable[[int], None], rows: int, threads: int) -> Callable[[int], None]:
    """Return the same launches with other tiles: what they remember is their own."""
    known: dict[Any, Any] = {}

    def launch(i: int) -> None:
        calls = _row._thread.calls
        before = _elementwise.ROWS, _elementwise.THREADS, calls.each
        _elementwise.ROWS, _elementwise.THREADS, calls.each = rows, threads, known
        try:
            run(i)
        finally:
            _elementwise.ROWS, _elementwise.THREADS, calls.each = before

    return launch


def contenders(op: Op, sets: Sequence[Buffers], *, every_tile: bool) -> dict[str, Callable[[int], None]]:
    """Return what is timed."""

    def ours(i: int) -> None:
        op.ours(sets[i].x, sets[i].bias, out=sets[i].y)

    runs: dict[str, Callable[[int], None]] = {OURS: ours, **bench.copy_runs([each.copy for each in sets])}
    if every_tile:
        runs |= {f"{rows} rows, {threads} threads": forced(ours, rows, threads) for rows, threads in TILES}
    if importlib.util.find_spec("torch"):
        import torch  # noqa: PLC0415  a second, and not everyone has it

        given = [(peers._tensor(s.x), None if s.bias is None else peers._tensor(s.bias)) for s in sets]
        function = functools.partial(op.torch, torch.nn.functional)
        runs["torch"] = peers._on_this_stream(peers._allocating(function, given))
    return runs


def measure(name: str, dtype_name: str, rows: int, cols: int, *, every_tile: bool) -> dict[str, Any]:
    """Time one op at one shape; shares are those of the best copy's time."""
    sets, moved = buffers(OPS[name], rows, cols, dtype_of(dtype_name))
    notes: dict[str, str] = {}
    runs = contenders(OPS[name], sets, every_tile=every_tile)
    calls = bench._calls_for(moved, len(sets))
    timings = bench.time_interleaved(runs, len(sets), calls=calls, seconds=bench.REPLAY_SECONDS, notes=notes)
    copy = min(each.median for contender, each in timings.items() if contender.startswith("copy"))
    del runs, sets
    peers.forget()
    return {
        "op": name,
        "dtype": dtype_name,
        "rows": rows,
        "cols": cols,
        "copy TB/s": moved / copy / 1e12,
        "shares": {
            each: copy / timing.median for each, timing in timings.items() if not each.startswith("copy")
        },
        "notes": notes,
    }


def main() -> None:
    """Print a line for each point; --json FILE keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--dtypes", default="float16,bfloat16,float32")
    parser.add_argument("--cols", default=",".join(map(str, COLS)))
    parser.add_argument("--rows", type=int, default=49152)
    parser.add_argument(
        "--tiles", action="store_true", help="time other rows a thread and threads a block, too"
    )
    parser.add_argument("--json")
    asked = parser.parse_args()
    found = []
    for name in asked.ops.split(","):
        for dtype in asked.dtypes.split(","):
            for cols in map(int, asked.cols.split(",")):
                point = measure(name, dtype, asked.rows, cols, every_tile=asked.tiles)
                found.append(point)
                shares = "  ".join(f"{each} {share:.3f}" for each, share in point["shares"].items())
                noted = "".join(f"  [{each}: {note}]" for each, note in point["notes"].items())
                print(
                    f"{name:15} {dtype:9} {cols:6}  copy {point['copy TB/s']:.2f} TB/s  {shares}{noted}",
                    flush=True,
                )
        ours = [point["shares"].get(OURS, math.nan) for point in found if point["op"] == name]
        print(f"{name:15} least share {min(ours):.3f}")
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:  # noqa: PTH123  a path as it was given
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
