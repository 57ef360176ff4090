"""Ops on each element of device arrays: from a checked call to a launch, and launching it again.

Twin of kernels/elementwise/elementwise.cuh: its structs are spelled and filled here, its kernel's numbers chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm.call.arguments import Call, view
from cupynorm.host import philox
from cupynorm.host.philox import Dropout
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import (
    ALIGNMENT,
    add,
    code_of,
    elsewhere,
    layout,
    near_of,
    parameters_of,
    word_of,
)
from cupynorm.lower.mirrors import Struct, View, arguments, column, direct
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from cupynorm.invoke.bound_calls import Calls
    from cupynorm.plan.limits import Limits

KERNEL = "elementwise/elementwise.cuh"
PACK_BYTES = 16  # of the wider of two types
THREADS = 256  # of a block, at most
ROWS = 2  # of a thread where there is a bias: it is fetched and converted once for both
MOST_BLOCKS = 65535  # of a grid along y and z
INT = 1 << 31


class Each(NamedTuple):
    """What is done to each element: an activation of reference.ACTIVATIONS after a bias, with a gate perhaps; or dropout."""

    activation: str | None = None
    bias: Any = None
    gate: str | None = None  # "first" or "second": the half of x's last axis that goes through the activation
    dropout: Dropout | None = None


class Tiles(NamedTuple):
    """How a kernel's blocks cover the results: numbers of each_element, and its launch.

    A block is `block` = (packs across, rows / `rows`); `grid` are such blocks along the columns, and twice along the rows.
    """

    pack: int
    rows: int
    peel: int
    long: bool
    grid: tuple[int, int, int]
    block: tuple[int, int]

    @property
    def template(self) -> tuple[int, int, int, bool]:
        """The kernel's template arguments behind its types."""
        return self.pack, self.rows, self.peel, self.long


def tiles(rows: int, cols: int, pack: int, peel: int, most_rows: int, resident: int) -> Tiles:
    """Choose how blocks cover so many rows and columns of results.

    most_rows: that a thread may have. resident: threads that the device holds at once; with fewer, a thread has one row.
    """
    packs = -(-(cols + (pack - 1 if peel else 0)) // pack)
    pieces = -(-packs // THREADS)
    across = -(-packs // pieces)
    if pieces > 1:  # whole warps: in a row of many blocks it is the last one that is not full
        across = -(-across // 32) * 32
        pieces = -(-packs // across)
    down = min(rows, THREADS // across)
    held = most_rows if rows * packs >= most_rows * resident else 1
    groups = -(-rows // (down * held))
    deep = -(-groups // MOST_BLOCKS)
    grid = (pieces, -(-groups // deep), deep)
    # what the last block reaches is counted, too
    reach = max(grid[0] * across * pack, grid[1] * grid[2] * down * held)
    return Tiles(pack, held, peel, reach >= INT, grid, (across, down))


class Spelled(NamedTuple):
    """What is to be launched, but for the device: the arguments, and what `tiles` asks."""

    arguments: Struct
    kind: str  # the kernel's types
    text: str
    rows: int
    cols: int
    pack: int
    peel: int
    most_rows: int  # of a thread

    def tiles(self, limits: Limits) -> Tiles:
        """Choose how blocks of a device cover the results."""
        resident = limits.sm_count * limits.threads_per_sm
        return tiles(self.rows, self.cols, self.pack, self.peel, self.most_rows, resident)

    def expression(self, chosen: Tiles) -> str:
        """Write the kernel's name with its template arguments."""
        numbers = ", ".join(map(compiler.spell, chosen.template))
        return f"cupynorm::each_element<{self.kind}, {numbers}>"


def spelled(each: Each, x: View, y: View, bias: View | None) -> Spelled:
    """Turn views into the kernel's structs. bias: of each; y has half of x's last axis where there is a gate."""
    if bias is None and each.gate is None:
        x, y = _joined(x, y)
    axes = min(1, len(x.shape))
    width, cols = x.shape[-1], y.shape[-1]
    rows = math.prod(y.shape) // cols
    compute = compute_dtype(x.dtype, y.dtype)
    widest = PACK_BYTES // max(x.dtype.itemsize, y.dtype.itemsize)
    # four elements share one call of Philox
    pack = widest if each.dropout is None else max(4, widest)
    peel = _peel(x, y, pack)
    if each.dropout is not None:
        op = _drop(each.dropout, compute, whole=peel == 0)
    else:
        op = _activate(each, y.dtype, compute, column(bias, (width,)))
    load, store = direct("DirectLoad", x.split(axes)[0]), direct("DirectStore", y.split(axes)[0])
    whole = arguments(op, load, store, rows, cols)
    text = compiler.text(KERNEL, whole.cpp, whole.dtype.itemsize, header="io/affine.cuh")
    most_rows = 1 if bias is None or peel else ROWS
    return Spelled(whole, f"{op.cpp}, {load.cpp}, {store.cpp}", text, rows, cols, pack, peel, most_rows)


def _joined(x: View, y: View) -> tuple[View, View]:
    """Return both with as many trailing axes made one as lie contiguous in both: nothing depends on the column."""
    ndim = len(x.shape)
    at = next(at for at in range(ndim + 1) if all(v.split(ndim - at)[1].is_contiguous() for v in (x, y)))
    found = []
    for each in (x, y):
        shape = (*each.shape[:at], math.prod(each.shape[at:]))
        found.append(View(each.pointer, shape, (*each.strides[:at], each.dtype.itemsize), each.dtype))
    return found[0], found[1]


def _starts(each: View, unit: int) -> tuple[Any, ...]:
    """Return where rows begin, modulo a number of elements: the first one, and how far the others are from it."""
    extents, strides = each.split(1)[0].collapsed()
    steps = tuple(stride % unit if extent > 1 else 0 for extent, stride in zip(extents, strides, strict=True))
    return each.pointer // each.dtype.itemsize % unit, extents, steps


def _peel(x: View, y: View, pack: int) -> int:
    """Return the kernel's kUnaligned: 0 where rows are whole packs, 1 where x lies in its packs as y does, 2 otherwise."""
    width, cols = x.shape[-1], y.shape[-1]
    # a pack is moved in accesses of 16 bytes at most
    of_x, of_y = (min(pack, PACK_BYTES // each.dtype.itemsize) for each in (x, y))
    whole = all(start == 0 and not any(steps) for start, _, steps in (_starts(x, of_x), _starts(y, of_y)))
    if whole and cols % pack == 0:
        return 0
    # a gate's other half begins where the first one ends
    alike = of_x <= of_y and _starts(x, of_x) == _starts(y, of_x) and (width == cols or cols % of_x == 0)
    return 1 if alike else 2


FUNCTIONS = {"gelu_tanh": "cupynorm::GeluTanh", "silu": "cupynorm::Silu"}
GATES = {None: 0, "first": 1, "second": 2}


def _activate(each: Each, result: Dtype, compute: Dtype, bias: Struct) -> Struct:
    """Twin of Activate."""
    if each.activation == "gelu":
        function = f"cupynorm::Gelu<{cpp(result)}, {compiler.spell(each.gate is not None)}>"
    else:
        function = FUNCTIONS[str(each.activation)]
    spelling = f"cupynorm::Activate<{cpp(compute)}, {function}, {bias.cpp}, {GATES[each.gate]}>"
    return Struct(spelling, np.dtype([("bias", bias.dtype)], align=True), (bias.values,))


def _drop(drop: Dropout, compute: Dtype, *, whole: bool) -> Struct:
    """Twin of Drop."""
    members: list[Any] = [("offset", np.uint64), ("keys", np.uint64, (philox.ROUNDS,))]
    members += [("threshold", np.uint64), ("factor", compute)]
    values = (drop.offset, tuple(_round_keys(drop.seed)), drop.threshold, drop.factor)
    spelling = f"cupynorm::Drop<{cpp(compute)}, {compiler.spell(whole)}>"
    return Struct(spelling, np.dtype(members, align=True), values)


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> array[int]:
    """Return the key of each of Philox's rounds, its two words in one."""
    low, high = seed & philox.WORD, seed >> philox.BITS
    keys = []
    for i in range(philox.ROUNDS):
        first, second = ((k + i * w) & philox.WORD for k, w in zip((low, high), philox.WEYL, strict=True))
        keys.append(first | second << philox.BITS)
    return array("Q", keys)


@functools.lru_cache(maxsize=256)
def _threshold_and_factor(p: float, compute: str) -> array[int]:
    """Return the last two words of Drop."""
    drop = Dropout(p, 0, 0)
    factor = np.zeros(8 // np.dtype(compute).itemsize, compute)
    factor[0] = drop.factor
    return array("Q", [drop.threshold, int(factor.view(np.uint64)[0])])


@dataclasses.dataclass(slots=True, eq=False, repr=False)  # its other methods would be written at import
class Known:
    """A call that was launched: it may be launched again with other pointers, and another dropout.

    `words` are the kernel's one parameter, the rest of it as in _remembered.Remembered. drop_at: where Drop begins, -1 for none.
    """

    words: array[int]
    parameters: array[int]
    launches: devices.Launches
    x_at: int
    y_at: int
    bias_at: int
    drop_at: int
    compute: str
    shape: tuple[int, ...]
    code: Any
    bits: int  # of y's pointer
    near: tuple[int, int]  # strictly between these distances from x, y may share memory with it ...
    distance: int  # ... and here it was found that it may
    bias_near: tuple[int, int]  # and with the bias


def again(each: Each, x: Any, out: Any, dtype: Any) -> Any:
    """Do what this thread has done before to arrays that lie alike; return the result, None if there was no such call.

    Nothing is checked but what a key does not hold: that `out` shares no memory with what is read.
    """
    calls = row_ops._thread.calls  # noqa: SLF001  the thread's, and what forget() drops with all else
    if calls.kind is None and devices.is_device_array(x):
        calls.begin()
    bias, drop = each.bias, each.dropout
    key = _key(calls, each, x, out, dtype)
    try:
        found: Known | None = calls.each.get(key)
    except TypeError:  # a dtype that does not hash
        return None
    if found is None or (calls.several and elsewhere(key[0], bias, out)):
        return None
    y = calls.kind(found.shape, found.code) if out is None else out
    source, target = x.data.ptr, y.data.ptr
    low, high = found.near
    distance = target - source
    fits = target & ALIGNMENT == found.bits
    fits = fits and (out is None or not low < distance < high or distance == found.distance)
    if bias is not None:
        shift = bias.data.ptr
        low, high = found.bias_near
        fits = fits and not low < target - shift < high
    if not fits:
        return None
    words, launch = found.words, found.launches[calls.stream(key[0]).ptr]
    filled = words[:]
    filled[found.x_at] = source
    filled[found.y_at] = target
    if bias is not None:
        filled[found.bias_at] = shift
    if drop is not None:
        at = found.drop_at
        filled[at] = drop.offset
        filled[at + 1 : at + 11] = _round_keys(drop.seed)
        filled[at + 11 : at + 13] = _threshold_and_factor(drop.p, found.compute)
    # from here to the launch: no call, loop or branch (devices.launch_of)
    words[:] = filled
    status = launch()
    if status:
        raise devices.launch_error(status)
    return y


def _key(calls: Calls, each: Each, x: Any, out: Any, dtype: Any) -> Any:
    """Return all that the checks and the choice of a kernel look at, but for overlaps; None for what is not remembered."""
    kind, bias = calls.kind, each.bias
    if (
        kind is None
        or type(x) is not kind
        or (bias is not None and type(bias) is not kind)
        or (out is not None and type(out) is not kind)
    ):
        return None
    # of dropout, its numbers change from call to call
    what = each.activation, each.gate
    of_bias = of_out = None
    if bias is not None:
        of_bias = bias.shape, layout(bias), bias.dtype, bias.data.ptr & ALIGNMENT
    if out is not None:
        of_out = out.shape, layout(out), out.dtype, out.data.ptr & ALIGNMENT
    device = x.data.device_id if calls.several else 0
    return device, what, x.shape, layout(x), x.dtype, x.data.ptr & ALIGNMENT, of_bias, of_out, dtype


def launch(call: Call, each: Each, out: Any, dtype: Any) -> None:
    """Launch a checked call that has elements, and remember it. out, dtype: as the caller gave them."""
    module = devices.cupy()
    calls = row_ops._thread.calls  # noqa: SLF001
    x, y = view(call.x), view(call.out)
    bias = None if each.bias is None else view(call.columns["bias"])
    what = spelled(each, x, y, bias)
    with module.cuda.Device(call.device):
        calls.prepare(call.device)
        chosen = what.tiles(devices.limits_of(call.device))
        kernel = compiler.kernel(call.device, what.text, what.expression(chosen), 0)
        bind = devices.launch_of(kernel.pointer, chosen.grid, (*chosen.block, 1), 0)
        struct = what.arguments.dtype
        known = Known(
            **parameters_of(array("Q", np.array([what.arguments.values], dtype=struct).tobytes()), bind),
            x_at=word_of(struct, "load", "pointer"),
            y_at=word_of(struct, "store", "pointer"),
            bias_at=-1 if bias is None else word_of(struct, "op", "bias", "pointer"),
            drop_at=-1 if each.dropout is None else word_of(struct, "op", "offset"),
            compute=compute_dtype(x.dtype, y.dtype).char,
            shape=y.shape,
            code=code_of(y.dtype),
            bits=y.pointer & ALIGNMENT,
            near=near_of(y, x.shape, x.strides, x.dtype),
            distance=y.pointer - x.pointer,
            bias_near=(0, 0) if bias is None else near_of(y, bias.shape, bias.strides, bias.dtype),
        )
        known.launches.once()
    key = _key(calls, each, call.x, out, dtype)
    if key is not None:
        try:
            add(calls.each, key, known)
        except TypeError:  # a dtype that does not hash
            return
