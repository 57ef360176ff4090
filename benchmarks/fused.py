"""Device time of masked, fused and quantised ops beside copies of the bytes that must move.

python benchmarks/fused.py [--json FILE] [--only NAME]    needs a GPU; run from the repository's root. Each line: the case, its
time, and its share of the copy rate. benchmarks/elementwise.py has what is no row op, and PyTorch beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import cupynorm
from cupynorm import bench

ROWS = 49152
COLS = (128, 512, 1024, 2048, 4096, 8192)
KEPT = 0.8  # of a mask


class Case(NamedTuple):
    """Arrays by name for one call, the call itself (options: of every function, such as plan=), and the bytes that must move.

    Of x and what is loaded beside it all that is kept (what lengths and causal masks drop need not be read), every byte of a
    mask, parameters once, and all of each result.
    """

    name: str
    make: Callable[[Any, np.random.Generator], dict[str, Any]]
    call: Callable[..., Any]
    moved: int
    target: float


def masked(dtype: str, cols: int) -> Iterator[Case]:
    """Softmax with a byte mask of x's shape, with lengths, and causal."""
    size = np.dtype(dtype).itemsize
    queries = min(cols, 1024)
    batch = ROWS // queries

    def base(cp: Any, random: np.random.Generator) -> dict[str, Any]:
        return {
            "x": normal(cp, random, (batch, queries, cols), dtype),
            "y": cp.empty((batch, queries, cols), dtype),
        }

    def with_mask(cp: Any, random: np.random.Generator) -> dict[str, Any]:
        return base(cp, random) | {"where": cp.asarray(random.random((batch, queries, cols)) < KEPT)}

    def with_lengths(lengths: np.ndarray) -> Callable[[Any, np.random.Generator], dict[str, Any]]:
        return lambda cp, random: base(cp, random) | {"lengths": cp.asarray(lengths)}

    rows = batch * queries
    whole = np.full((batch, 1), cols, np.int32)
    ragged = np.random.default_rng(1).integers(1, cols + 1, (batch, 1), np.int32)
    yield Case(
        f"softmax where {dtype} {rows} x {cols}",
        with_mask,
        lambda a, **options: cupynorm.softmax(a["x"], where=a["where"], scale=0.125, out=a["y"], **options),
        rows * cols * (2 * size + 1),
        0.95,
    )
    for name, lengths in (("lengths", whole), ("ragged lengths", ragged)):
        yield Case(
            f"softmax {name} {dtype} {rows} x {cols}",
            with_lengths(lengths),
            lambda a, **options: cupynorm.softmax(
                a["x"], lengths=a["lengths"], scale=0.125, out=a["y"], **options
            ),
            (rows * cols + queries * int(lengths.sum())) * size,
            0.95,
        )
    if queries == cols:
        yield Case(
            f"softmax causal {dtype} {rows} x {cols}",
            base,
            lambda a, **options: cupynorm.softmax(a["x"], causal=True, scale=0.125, out=a["y"], **options),
            rows * (cols * size + (cols + 1) * size // 2),
            0.95,
        )


def sums(dtype: str, cols: int) -> Iterator[Case]:
    """add_layer_norm with bias, with and without the sum."""
    size = np.dtype(dtype).itemsize

    def make(cp: Any, random: np.random.Generator) -> dict[str, Any]:
        found = {name: normal(cp, random, (ROWS, cols), dtype) for name in ("x", "r")}
        found |= {name: normal(cp, random, (cols,), dtype) for name in ("b", "g", "h")}
        return found | {"y": cp.empty((ROWS, cols), dtype)}

    yield Case(
        f"add_layer_norm {dtype} {ROWS} x {cols}",
        make,
        lambda a, **options: cupynorm.add_layer_norm(
            a["x"], a["r"], a["g"], a["h"], bias=a["b"], return_sum=False, out=a["y"], **options
        ),
        (3 * ROWS + 3) * cols * size,
        0.98,
    )
    yield Case(
        f"add_layer_norm, sum {dtype} {ROWS} x {cols}",
        make,
        lambda a, **options: cupynorm.add_layer_norm(
            a["x"], a["r"], a["g"], a["h"], bias=a["b"], out=a["y"], **options
        ),
        (4 * ROWS + 3) * cols * size,
        0.98,
    )
    scaled = cupynorm.fuse(cupynorm.layer_norm, load=lambda x, r: x * 0.5 + r)
    yield Case(
        f"fuse one multiply-add {dtype} {ROWS} x {cols}",
        make,
        lambda a, **options: scaled(a["x"], a["r"], gamma=a["g"], beta=a["h"], out=a["y"], **options),
        (3 * ROWS + 2) * cols * size,
        0.96,
    )


def quantized(dtype: str, cols: int) -> Iterator[Case]:
    """layer_norm to a byte an element, with a scale for each row and with one for all."""
    size = np.dtype(dtype).itemsize

    def make(cp: Any, random: np.random.Generator) -> dict[str, Any]:
        found = {"x": normal(cp, random, (ROWS, cols), dtype), "q": cp.empty((ROWS, cols), "int8")}
        return found | {name: normal(cp, random, (cols,), dtype) for name in ("g", "h")}

    for kind, holder in (("int8", "int8"), ("float8_e4m3fn", "uint8")):  # CuPy has no float8
        for name, scale in (("a scale a row", None), ("one scale", 0.03)):
            what = cupynorm.Quantize(kind, scale)
            yield Case(
                f"layer_norm to {kind}, {name} {dtype} {ROWS} x {cols}",
                make,
                lambda a, what=what, holder=holder, **options: cupynorm.layer_norm(
                    a["x"], a["g"], a["h"], quantize=what, out=a["q"].view(holder), **options
                ),
                ROWS * cols * (size + 1) + (ROWS * 4 if scale is None else 0) + 2 * cols * size,
                0.93,
            )


def cases(dtype: str, cols: int) -> Iterator[Case]:
    """All of one dtype and width."""
    yield from masked(dtype, cols)
    yield from sums(dtype, cols)
    yield from quantized(dtype, cols)


def normal(cp: Any, random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Normal numbers, repeated from a million of them."""
    count = int(np.prod(shape))
    some = cp.asarray(random.standard_normal(min(count, 1 << 20)).astype(dtype))
    return cp.resize(some, count).reshape(shape)


def measure(case: Case) -> dict[str, Any]:
    """Time a case over rotating buffers."""
    import cupy as cp  # noqa: PLC0415  --help works without it

    random = np.random.default_rng(0)
    first = case.make(cp, random)
    count = bench.sets_for(sum(each.nbytes for each in first.values()))
    sets = [first, *({name: each.copy() for name, each in first.items()} for _ in range(count - 1))]
    half = -(-case.moved // 2 // 256) * 256
    memory = cp.empty((count, 2, half), cp.uint8)
    results = [None] * count  # kept, so that no call writes to memory that the one before has left in L2

    def ours(i: int) -> None:
        results[i] = case.call(sets[i])

    runs = {"cupynorm": ours, **bench.copy_runs([(each[0], each[1]) for each in memory])}
    notes: dict[str, str] = {}
    calls = max(count, min(64, int(2e9 // case.moved) // count * count))
    times = bench.time_interleaved(runs, count, replays=9, calls=calls, notes=notes)
    copy = min(each.median for name, each in times.items() if name.startswith("copy"))
    found = {name: {"seconds": each.median, "share": copy / each.median} for name, each in times.items()}
    return {"case": case.name, "bytes": case.moved, "target": case.target, "times": found, "notes": notes}


def once(case: Case) -> None:
    """Call a case on one set of arrays."""
    import cupy as cp  # noqa: PLC0415

    case.call(case.make(cp, np.random.default_rng(0)))
    cp.cuda.get_current_stream().synchronize()


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--cols", type=int, nargs="*", default=COLS)
    parser.add_argument("--dtypes", nargs="*", default=("float16", "float32"))
    parser.add_argument(
        "--once", action="store_true", help="call each once: what is compiled stays in the cache"
    )
    options = parser.parse_args()
    found = []
    for dtype in options.dtypes:
        for cols in options.cols:
            for case in cases(dtype, cols):
                if options.only not in case.name:
                    continue
                try:
                    if options.once:
                        once(case)
                        continue
                    one = measure(case)
                except Exception as error:  # noqa: BLE001  one case leaves the others alone
                    print(f"{case.name:55} {type(error).__name__}: {str(error)[:150]}", flush=True)
                    continue
                found.append(one)
                times = one["times"]
                if "cupynorm" not in times:
                    print(f"{case.name:55} {one['notes']}", flush=True)
                    continue
                share = times["cupynorm"]["share"]
                verdict = "met" if share >= case.target else f"{case.target} wanted"
                print(
                    f"{case.name:55} {times['cupynorm']['seconds'] * 1e6:9.1f} us  {share:.3f}  {verdict}",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")


main()
