"""What cupynorm is measured against: the same ops through CuPy, PyTorch, torch.compile and Triton, on the same memory."""

# ruff: noqa: ANN001, ANN202  (kernels in Triton's language)

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

import numpy as np

from cupynorm import _device

PEERS = ("cupy", "torch", "compile", "triton")
NEEDS = {
    "cupy": ("cupyx",),
    "torch": ("torch",),
    "compile": ("torch", "triton"),
    "triton": ("torch", "triton"),
}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}
TRITON_COLS = 65536  # a program holds the whole row: beyond that it spills without end

Run = Callable[[int], None]  # launches once, on buffer set i, on CuPy's current stream


class Buffers(NamedTuple):
    """The arrays of one call: what is read, what is written, and the op's parameters in order."""

    x: Any
    y: Any
    columns: tuple[Any, ...]


def missing() -> dict[str, str]:
    """Return the peers that cannot be measured here, and what they need."""
    found = {}
    for name, packages in NEEDS.items():
        absent = [each for each in packages if importlib.util.find_spec(each) is None]
        if absent:
            found[name] = f"{' and '.join(absent)} not installed"
    return found


def contender(name: str, op: str, sets: Sequence[Buffers]) -> Run:
    """Return a peer's launch of an op over buffer sets.

    Where a peer cannot write to y, it allocates, and its results are kept until their set's next turn: they then
    rotate as y does. Whatever it raises is its own.
    """
    if name == "cupy":
        return _allocating(_cupy_function(op), [(each.x, *each.columns) for each in sets])
    shared = [Buffers(_tensor(each.x), _tensor(each.y), tuple(map(_tensor, each.columns))) for each in sets]
    inputs = [(each.x, *each.columns) for each in shared]
    if name == "compile":
        return _on_this_stream(_allocating(_compiled_function(op), inputs))
    if name == "triton":
        launch = _triton_function(op, shared[0].x.shape[-1])
        return _on_this_stream(lambda i: launch(shared[i].x, shared[i].y, *shared[i].columns))
    function = _torch_function(op)
    if not shared[0].columns:
        return _on_this_stream(lambda i: function(shared[i].x, out=shared[i].y))
    return _on_this_stream(_allocating(function, inputs))


def calls(name: str, op: str, buffers: Buffers) -> dict[str, Callable[[], Any]]:
    """Return what a user would call, as {what: call}, for host times; on the default stream of CuPy and PyTorch alike."""
    if name == "cupy":
        return {"": functools.partial(_cupy_function(op), buffers.x, *buffers.columns)}
    x, y, columns = _tensor(buffers.x), _tensor(buffers.y), tuple(map(_tensor, buffers.columns))
    if name == "compile":
        return {"": functools.partial(_compiled_function(op), x, *columns)}
    if name == "triton":
        return {"out": functools.partial(_triton_function(op, x.shape[-1]), x, y, *columns)}
    function = _torch_function(op)
    found: dict[str, Callable[[], Any]] = {"": functools.partial(function, x, *columns)}
    if not columns:
        found["out"] = functools.partial(function, x, out=y)
    return found


def forget() -> None:
    """Give memory and compiled code back, so that one point does not weigh on the next."""
    module = _device.cupy()
    module.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # or compiled calls fall back to eager after a few shapes
    if torch is not None:
        torch.cuda.empty_cache()


def _allocating(function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> Run:
    kept: list[Any] = [None] * len(inputs)

    def run(i: int) -> None:
        kept[i] = None  # its memory is what the next line gets
        kept[i] = function(*inputs[i])

    return run


def _on_this_stream(run: Run) -> Run:
    """Make CuPy's current stream PyTorch's, which Triton and compiled code ask for, too."""
    torch = importlib.import_module("torch")
    module = _device.cupy()

    def there(i: int) -> None:
        stream = torch.cuda.ExternalStream(
            module.cuda.get_current_stream().ptr, device=_device.present_device()
        )
        with torch.cuda.stream(stream):
            run(i)

    return there


def _tensor(array: Any) -> Any:
    """Return a tensor of the array's memory. As integers: not every DLPack of CuPy and PyTorch knows bfloat16."""
    torch = importlib.import_module("torch")
    integers = array.view(np.dtype(f"i{array.dtype.itemsize}"))
    return torch.from_dlpack(integers).view(getattr(torch, array.dtype.name))


def _cupy_function(op: str) -> Callable[..., Any]:
    """Return what a user of CuPy writes: cupyx's softmax, or the formula, in float32 where x is of half precision."""
    module = _device.cupy()
    if op in {"softmax", "log_softmax"}:
        return functools.partial(getattr(importlib.import_module("cupyx.scipy.special"), op), axis=-1)
    eps = EPS[op]

    def wide(x: Any) -> Any:
        return x if x.dtype.itemsize >= np.dtype(np.float32).itemsize else x.astype(np.float32)

    def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
        y = wide(x)
        y = y - y.mean(axis=-1, keepdims=True)
        y = y / module.sqrt((y * y).mean(axis=-1, keepdims=True) + eps)
        return (y * wide(gamma) + wide(beta)).astype(x.dtype, copy=False)

    def rms_norm(x: Any, gamma: Any) -> Any:
        y = wide(x)
        y = y / module.sqrt((y * y).mean(axis=-1, keepdims=True) + eps)
        return (y * wide(gamma)).astype(x.dtype, copy=False)

    functions: dict[str, Callable[..., Any]] = {"layer_norm": layer_norm, "rms_norm": rms_norm}
    return functions[op]


def _torch_function(op: str) -> Callable[..., Any]:
    torch = importlib.import_module("torch")
    functional = torch.nn.functional

    def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
        return functional.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)

    def rms_norm(x: Any, gamma: Any) -> Any:
        return functional.rms_norm(x, x.shape[-1:], gamma, 1e-6)

    def softmax(x: Any, out: Any = None) -> Any:
        return torch.softmax(x, -1, out=out)

    def log_softmax(x: Any, out: Any = None) -> Any:
        return torch.log_softmax(x, -1, out=out)

    functions: dict[str, Callable[..., Any]] = {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "softmax": softmax,
        "log_softmax": log_softmax,
    }
    return functions[op]


def _compiled_function(op: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = importlib.import_module("torch").compile(
        _torch_function(op), dynamic=False
    )
    return compiled


def _triton_function(op: str, cols: int) -> Callable[..., Any]:
    """Return a launch of one program a row: the row is loaded once, in a block of the next power of two."""
    if cols > TRITON_COLS:
        raise ValueError(f"a program holds rows of up to {TRITON_COLS} columns")
    kernel = _triton_kernels()[op]
    block = 1 << (cols - 1).bit_length()
    # a program's threads, as Triton's tutorials and Liger choose them
    warps = next((warps for least, warps in ((32768, 32), (8192, 16), (2048, 8)) if block >= least), 4)

    def launch(x: Any, y: Any, *columns: Any) -> None:
        kernel[(x.numel() // cols,)](x, y, *columns, cols, block=block, num_warps=warps)

    return launch


@functools.cache
@no_type_check  # Triton reads this text: it allows no annotation but its own
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
