"""The peers of a benchmark: the same ops in CuPy, PyTorch, torch.compile and Triton, on the same memory."""

# ruff: noqa: ANN001, ANN202  (kernels in Triton's language)

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np

from cupynorm.runtime import devices

if TYPE_CHECKING:
    from cupynorm.catalog.form import Arrays, Form

PEERS = ("cupy", "torch", "compile", "triton")
NEEDS = {
    "cupy": ("cupyx",),
    "torch": ("torch",),
    "compile": ("torch", "triton"),
    "triton": ("torch", "triton"),
}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}
TRITON_COLS = 65536  # a program holds the whole row, and spills heavily if it is longer

# Launches once with buffer set i, on CuPy's current stream, and returns the array that it writes.
Run = Callable[[int], Any]


def missing() -> dict[str, str]:
    """Return the peers that cannot be measured here, and what they need."""
    found = {}
    for name, packages in NEEDS.items():
        absent = [each for each in packages if importlib.util.find_spec(each) is None]
        if absent:
            found[name] = f"{' and '.join(absent)} not installed"
    return found


def contender(name: str, what: Form, sets: Sequence[Arrays]) -> Run | None:
    """Return a peer's launch of a form over sets of arrays; None if the peer does not have the form.

    A peer that cannot write to y allocates its result, which is kept until its set's next turn, so that results rotate
    as y does. Errors of the peer are raised as they are.
    """
    if name == "cupy":
        composed = _cupy_function(what.name)
        return composed and allocating(composed, sets)
    if name == "triton" and not what.alone:
        return None
    if what.torch is None:
        return None
    shared = [{key: _tensor(array) for key, array in each.items()} for each in sets]
    if name == "triton":
        launch = _triton_function(what.name, shared[0]["x"].shape[-1])
        return _on_this_stream(lambda i: launch(shared[i]))
    if name == "compile":
        return _on_this_stream(allocating(_compiled(what), [_read(each) for each in shared]))
    return _on_this_stream(
        allocating(functools.partial(what.torch, importlib.import_module("torch")), shared)
    )


def calls(name: str, what: Form, arrays: Arrays) -> dict[str, Callable[[], Any]]:
    """Return the calls that a user would make, by name, for host times, on the default stream of CuPy and PyTorch."""
    if name == "cupy":
        composed = _cupy_function(what.name)
        return {} if composed is None else {"": functools.partial(composed, arrays)}
    shared = {key: _tensor(array) for key, array in arrays.items()}
    if name == "compile":
        return {"": functools.partial(_compiled(what), _read(shared))}
    if name == "triton":
        return {"out": functools.partial(_triton_function(what.name, shared["x"].shape[-1]), shared)}
    function = functools.partial(what.torch or _nothing, importlib.import_module("torch"))
    found: dict[str, Callable[[], Any]] = {"": functools.partial(function, _read(shared))}
    if set(shared) == {"x", "y"}:
        found["out"] = functools.partial(function, shared)
    return found


def _read(arrays: Arrays) -> Arrays:
    """Return the arrays without y: results get memory of their own."""
    return {name: each for name, each in arrays.items() if name != "y"}


def _nothing(*_: Any) -> None:
    raise ValueError("PyTorch has no such thing")


def forget() -> None:
    """Free memory and compiled code, so that one point does not affect the next."""
    module = devices.cupy()
    module.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if "torch._dynamo" in sys.modules:
        sys.modules[
            "torch._dynamo"
        ].reset()  # otherwise compiled calls fall back to eager mode after a few shapes
    if torch is not None:
        torch.cuda.empty_cache()


def allocating(function: Callable[[Arrays], Any], sets: Sequence[Arrays]) -> Run:
    """Return a launch that keeps its results until their set's next turn."""
    kept: list[Any] = [None] * len(sets)

    def run(i: int) -> Any:
        kept[i] = None  # the next line reuses its memory
        kept[i] = function(sets[i])
        return kept[i]

    return run


def memory_of(results: Any) -> Any:
    """Return the first of a contender's results as a flat CuPy array of bytes, over the same memory."""
    first = results[0] if isinstance(results, tuple) else results
    if hasattr(first, "untyped_storage"):  # PyTorch's
        torch = importlib.import_module("torch")
        first = devices.cupy().from_dlpack(first.contiguous().view(torch.uint8))
    return first.reshape(-1).view(np.uint8)


def _on_this_stream(run: Run) -> Run:
    """Make CuPy's current stream PyTorch's current one, which Triton and compiled code use, too."""
    torch = importlib.import_module("torch")
    module = devices.cupy()

    def there(i: int) -> Any:
        stream = torch.cuda.ExternalStream(
            module.cuda.get_current_stream().ptr, device=devices.present_device()
        )
        with torch.cuda.stream(stream):
            return run(i)

    return there


def _tensor(array: Any) -> Any:
    """Return a tensor of the array's memory. It crosses as integers: not every version's DLPack supports bfloat16."""
    torch = importlib.import_module("torch")
    integers = array.view(np.dtype(f"i{array.dtype.itemsize}"))
    return torch.from_dlpack(integers).view(getattr(torch, array.dtype.name))


def _cupy_function(name: str) -> Callable[[Arrays], Any] | None:
    """Return what a user of CuPy writes: cupyx's softmax, or the formula, in float32 if x has half precision."""
    module = devices.cupy()

    def special(a: Arrays) -> Any:
        return getattr(importlib.import_module("cupyx.scipy.special"), name)(a["x"], axis=-1)

    def wide(x: Any) -> Any:
        return x if x.dtype.itemsize >= np.dtype(np.float32).itemsize else x.astype(np.float32)

    def layer_norm(a: Arrays) -> Any:
        y = wide(a["x"])
        y = y - y.mean(axis=-1, keepdims=True)
        y = y / module.sqrt((y * y).mean(axis=-1, keepdims=True) + EPS[name])
        return (y * wide(a["gamma"]) + wide(a["beta"])).astype(a["x"].dtype, copy=False)

    def rms_norm(a: Arrays) -> Any:
        y = wide(a["x"])
        y = y / module.sqrt((y * y).mean(axis=-1, keepdims=True) + EPS[name])
        return (y * wide(a["gamma"])).astype(a["x"].dtype, copy=False)

    functions: dict[str, Callable[[Arrays], Any]] = {
        "softmax": special,
        "log_softmax": special,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
    }
    return functions.get(name)


def _compiled(what: Form) -> Callable[[Arrays], Any]:
    torch, function = importlib.import_module("torch"), what.torch or _nothing

    def given(a: Arrays) -> Any:
        return function(torch, a)

    compiled: Callable[[Arrays], Any] = torch.compile(given, dynamic=False)
    return compiled


def _triton_function(op: str, cols: int) -> Callable[[Arrays], Any]:
    """Return a launch of one program per row, which loads the row once, in a block of the next power of two."""
    if cols > TRITON_COLS:
        raise ValueError(f"a program holds rows of up to {TRITON_COLS} columns")
    try:
        kernel = _triton_kernels()[op]
    except KeyError:
        raise ValueError(f"there is no Triton kernel of {op} to compare with") from None
    block = 1 << (cols - 1).bit_length()
    # threads per program as in Triton's tutorials and Liger
    warps = next((warps for least, warps in ((32768, 32), (8192, 16), (2048, 8)) if block >= least), 4)

    def launch(a: Arrays) -> Any:
        columns = [each for name, each in a.items() if name not in {"x", "y"}]
        kernel[(a["x"].numel() // cols,)](a["x"], a["y"], *columns, cols, block=block, num_warps=warps)
        return a["y"]

    return launch


@functools.cache
@no_type_check  # Triton parses this text and allows only its own annotations
def _triton_kernels() -> dict[str, Any]:
    jit = importlib.import_module("triton").jit
    tl = importlib.import_module("triton.language")

    @jit
    def layer_norm(x, y, gamma, beta, cols, block: tl.constexpr):  # type: ignore[name-defined]
        at = tl.arange(0, block)
        row = tl.program_id(0).to(tl.int64) * cols
        inside = at < cols
        v = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - tl.sum(v, 0) / cols, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / cols + 1e-5)
        scale = tl.load(gamma + at, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row + at, v * scale + shift, mask=inside)

    @jit
    def rms_norm(x, y, gamma, cols, block: tl.constexpr):  # type: ignore[name-defined]
        at = tl.arange(0, block)
        row = tl.program_id(0).to(tl.int64) * cols
        inside = at < cols
        v = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / cols + 1e-6)
        scale = tl.load(gamma + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row + at, v * scale, mask=inside)

    @jit
    def softmax(x, y, cols, block: tl.constexpr):  # type: ignore[name-defined]
        at = tl.arange(0, block)
        row = tl.program_id(0).to(tl.int64) * cols
        inside = at < cols
        v = tl.load(x + row + at, mask=inside, other=-float("inf")).to(tl.float32)
        v = tl.exp(v - tl.max(v, 0))
        tl.store(y + row + at, v / tl.sum(v, 0), mask=inside)

    @jit
    def log_softmax(x, y, cols, block: tl.constexpr):  # type: ignore[name-defined]
        at = tl.arange(0, block)
        row = tl.program_id(0).to(tl.int64) * cols
        inside = at < cols
        v = tl.load(x + row + at, mask=inside, other=-float("inf")).to(tl.float32)
        v = v - tl.max(v, 0)
        tl.store(y + row + at, v - tl.log(tl.sum(tl.exp(v), 0)), mask=inside)

    return {"layer_norm": layer_norm, "rms_norm": rms_norm, "softmax": softmax, "log_softmax": log_softmax}
