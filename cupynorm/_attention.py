"""The device's side of attention.cu: attention over packed tokens in one launch, where the tensor cores' instructions fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupynorm import _compile, _device
from cupynorm._dtypes import cpp, dtype_name
from cupynorm._limits import Limits
from cupynorm.functors import POINTER, Struct

BLOCK = 128  # kAttentionBlock
OLDEST = 80  # compute capability: mma of 16 x 8 x 16, bfloat16, and copies that go ahead
WIDEST = 128  # head size
ROWS = 64  # queries of a block, for each tile of a warp


def fits(dtype: Any, size: int, limits: Limits) -> bool:
    """Say whether attend() can do heads of this size."""
    kinds = {"float16", "bfloat16"}
    return (
        dtype_name(dtype) in kinds
        and size % 16 == 0
        and size <= WIDEST
        and int(limits.compute_capability) >= OLDEST
    )


def expression(dtype: Any, size: int, tiles: int) -> str:
    """Write the kernel's name. So many keys at a time as two times both tiles take 48 KiB at most."""
    keys = 64 if size <= 64 else 32  # noqa: PLR2004  explained above
    return f"cupynorm::attend<{cpp(dtype)}, {size}, {keys}, {tiles}>"


def tiles_of_a_warp(sequences: int, heads: int, length: int, size: int, sm_count: int) -> int:
    """Return 2 where that leaves two blocks for each multiprocessor: keys are then read half as often; else 1."""
    blocks = sequences * heads * -(-length // (2 * ROWS))
    return 2 if size <= 64 and length > ROWS and blocks >= 2 * sm_count else 1  # noqa: PLR2004  registers


def attend(
    qkv: Any,
    bias: Any,
    heads: int,
    sequences: int,
    length: int,
    out: Any,
    spans: tuple[Any, Any] | None = None,
) -> Any:
    """Write softmax(q k^T / sqrt(head size)) v to out, [tokens, hidden]; nothing is checked.

    qkv: [tokens, 3 * hidden] without its bias, a float32 one. spans: first tokens and lengths of the sequences, `length` at
    most; rows of `out` that are no sequence's stay as they are. Without, each has `length` tokens.
    """
    hidden = out.shape[1]
    size = hidden // heads
    device = _device.present_device()
    fields = [(name, POINTER) for name in ("qkv", "bias", "context", "start", "length")]
    dtype = np.dtype([*fields, ("columns", np.int64), ("each", np.int32), ("scale", np.float32)], align=True)
    begin, lengths = (0, 0) if spans is None else (each.data.ptr for each in spans)
    scale = size**-0.5 * math.log2(math.e)
    pointers = (qkv.data.ptr, bias.data.ptr, out.data.ptr, begin, lengths)
    whole = Struct(f"cupynorm::Attention<{cpp(qkv.dtype)}>", dtype, (*pointers, hidden, length, scale))
    limits = _device.limits_of(device)
    tiles = tiles_of_a_warp(sequences, heads, length, size, limits.sm_count)
    text = _compile.text("attention.cu", whole.cpp, whole.dtype.itemsize)
    pointer = _compile.kernel(device, text, expression(qkv.dtype, size, tiles), 0).pointer
    held = np.array([whole.values], dtype=whole.dtype)
    parameters = np.array([held.ctypes.data], np.uintp)
    grid = (sequences, heads, -(-length // (tiles * ROWS)))
    stream = _device.cupy().cuda.get_current_stream().ptr
    _device.driver().launchKernel(pointer, *grid, BLOCK, 1, 1, 0, stream, parameters.ctypes.data, 0)
    return out
