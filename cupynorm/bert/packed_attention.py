"""Launches of bert/attention.cuh: attention over packed tokens in one launch, by the tensor cores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import cpp, dtype_name
from cupynorm.lower.mirrors import POINTER, Struct
from cupynorm.plan.limits import Limits
from cupynorm.runtime import compiler, devices

BLOCK = 128  # kAttentionBlock
GROUP = 128  # kGroup
TURNS = 3  # kGroupTurns
ALIGNMENT = 1024  # where its swizzle begins
# head sizes that warpgroups multiply: their swizzles are for rows of 64 and 128 bytes
GROUPED = (32, 64)
# Keys from which on TMA loads are faster than copies by threads. With fewer they are slower, because the first TMA load
# takes longer to arrive (docs/notes/039).
BOXED_FROM = 384
OLDEST = 80  # compute capability: mma of 16 x 8 x 16, bfloat16, and asynchronous copies
WIDEST = 128  # head size
MOST = 65535  # blocks along y and z
# Least bytes of dynamic shared memory: kernels overlap on a multiprocessor only if all of them divide its memory in the
# same way.
CARVED = 1
MOST_PLACES = 2**32  # elements of one sequence in qkv: warpgroup kernels have 32-bit offsets
ROWS = 64  # queries of a block for each tile; also the keys that a warpgroup multiplies at a time


def fits(dtype: Any, size: int, heads: int, sequences: int, limits: Limits) -> bool:
    """Say whether attend() supports these shapes."""
    kinds = {"float16", "bfloat16"}
    return (
        dtype_name(dtype) in kinds
        and max(heads, sequences) <= MOST
        and size % 16 == 0
        and size <= WIDEST
        and int(limits.compute_capability) >= OLDEST
    )


class Plan(NamedTuple):
    """Which kernel, and how it is launched."""

    expression: str
    block: int
    rows: int  # queries of a block
    shared_bytes: int = 0  # of dynamic shared memory
    accelerated: bool = False  # by instructions of sm_90a alone
    boxed: bool = False  # keys and values come in boxes of the whole qkv


def by_warps(dtype: Any, size: int, tiles: int) -> Plan:
    """Return the kernel whose warps multiply. Two stages of keys and values take 48 KiB at most."""
    keys = 64 if size <= 64 else 32  # noqa: PLR2004  explained above
    return Plan(f"cupynorm::attend<{cpp(dtype)}, {size}, {keys}, {tiles}>", BLOCK, tiles * ROWS)


def by_group(dtype: Any, size: int, *, boxed: bool = False) -> Plan:
    """Return the kernel that multiplies by warpgroup. boxed: TMA loads keys and values, by boxes as wide as a head."""
    name = f"cupynorm::attend_by_{'boxes' if boxed else 'group'}<{cpp(dtype)}, {size}>"
    shared_bytes = 2 * TURNS * ROWS * size * 2 + ALIGNMENT  # keys and values
    return Plan(name, GROUP, ROWS, shared_bytes, accelerated=True, boxed=boxed)


def choose(
    dtype: Any,
    size: int,
    sequences: int,
    heads: int,
    length: int,
    limits: Limits,
    local_bytes: Callable[[Plan], int] = lambda _: 0,
    *,
    accelerated: bool,
) -> Plan:
    """Return the kernel to launch: by warpgroup where there is one, but not for short calls, since it starts slowly.

    A sequence of more than MOST_PLACES elements goes to the kernel whose warps multiply: it counts them in 64 bits.
    local_bytes: asks the compiled kernel of two tiles whether registers are spilled, as some compute capabilities do.
    """
    busy = sequences * heads * -(-length // ROWS) >= 2 * limits.sm_count
    long = length > (ROWS if busy else 2 * ROWS)
    counts = 3 * heads * size * length <= MOST_PLACES
    if accelerated and limits.compute_capability == "90" and size in GROUPED and long and counts:
        return by_group(dtype, size, boxed=size == devices.BOX_COLS and length >= BOXED_FROM)
    # two tiles where that leaves two blocks for each multiprocessor: keys are then read half as often
    blocks = sequences * heads * -(-length // (2 * ROWS))
    two = size <= 64 and length > ROWS and blocks >= 2 * limits.sm_count  # noqa: PLR2004  registers
    return by_warps(dtype, size, 2 if two and not local_bytes(by_warps(dtype, size, 2)) else 1)


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

    qkv: [tokens, 3 * hidden] before its bias, which is float32, is added. spans: the first token and the length of
    each sequence, `length` at most; rows of `out` outside all sequences are not written. Without spans, each sequence
    has `length` tokens.
    """
    hidden = out.shape[1]
    size = hidden // heads
    device = devices.present_device()
    fields = [(name, POINTER) for name in ("qkv", "bias", "context", "start", "length")]
    dtype = np.dtype([*fields, ("columns", np.int64), ("each", np.int32), ("scale", np.float32)], align=True)
    begin, lengths = (0, 0) if spans is None else (each.data.ptr for each in spans)
    scale = size**-0.5 * math.log2(math.e)
    pointers = (qkv.data.ptr, bias.data.ptr, out.data.ptr, begin, lengths)
    unboxed = Struct(f"cupynorm::Attention<{cpp(qkv.dtype)}>", dtype, (*pointers, hidden, length, scale))
    accelerated, limits = compiler.compiles_itself(), devices.limits_of(device)

    def kernel_of(plan: Plan, arguments: Struct) -> compiler.Kernel:
        text = compiler.text("bert/attention.cuh", arguments.cpp, arguments.dtype.itemsize)
        shared_bytes = max(CARVED, plan.shared_bytes)
        return compiler.kernel(device, text, plan.expression, shared_bytes, accelerated=plan.accelerated)

    def local_bytes(plan: Plan) -> int:
        return kernel_of(plan, unboxed).local_bytes

    call = qkv.dtype, size, sequences, heads, length, limits
    plan = choose(*call, local_bytes, accelerated=accelerated)
    whole = unboxed
    if plan.boxed:
        boxes = devices.box_map(qkv.data.ptr, len(qkv), 3 * hidden, dtype_name(qkv.dtype), ROWS)
        dtype = np.dtype([("boxes", np.uint64, boxes.shape), ("a", dtype), ("unused", np.int32, (2,))])
        name = f"cupynorm::BoxedAttention<{cpp(qkv.dtype)}>"
        whole = Struct(name, dtype, (boxes, whole.values, (0, 0)))
    pointer = kernel_of(plan, whole).pointer
    held = np.array([whole.values], dtype=whole.dtype)
    parameters = np.array([held.ctypes.data], np.uintp)
    grid = (-(-length // plan.rows), heads, sequences)  # neighbours read the same keys and values
    devices.launch_early(pointer, grid, plan.block, plan.shared_bytes, parameters.ctypes.data)
    return out
