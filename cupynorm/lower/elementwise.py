"""Lowers ops on each element: host mirror of kernels/elementwise/elementwise.cuh, and the layout of its blocks."""

from __future__ import annotations

import functools
import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm.call.view import Argument, View
from cupynorm.host import philox
from cupynorm.host.philox import Dropout
from cupynorm.lower.mirrors import Struct, arguments, column, direct
from cupynorm.lower.row import types_of
from cupynorm.lower.spec import KernelSpec
from cupynorm.runtime import compiler

if TYPE_CHECKING:
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

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    def summary(self) -> dict[str, Any]:
        """Return what explain shows of it."""
        return self._asdict()


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


class ElementwiseProblem(NamedTuple):
    """What tiles are chosen from. most_rows: of a thread."""

    rows: int
    cols: int
    pack: int
    peel: int
    most_rows: int

    def plan(self, limits: Limits) -> Tiles:
        """Choose how blocks of a device cover the results."""
        resident = limits.sm_count * limits.threads_per_sm
        return tiles(self.rows, self.cols, self.pack, self.peel, self.most_rows, resident)

    def summary(self) -> dict[str, int]:
        """Return what explain shows of it."""
        return {"rows": self.rows, "cols": self.cols, "pack": self.pack}


def elementwise_spec(each: Each, x: View, y: View, bias: View | None) -> KernelSpec:
    """Lower an op on each element. bias: of each; y has half of x's last axis where there is a gate."""
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
    problem = ElementwiseProblem(rows, cols, pack, peel, most_rows)
    return KernelSpec(
        text, "cupynorm::each_element<{types}, {numbers}>", types_of(op, load, store), whole, problem
    )


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
    """Return the kernel's kPeel: 0 where rows are whole packs, 1 where x lies in its packs as y does, 2 otherwise."""
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
    keys = RoundKeys(round_keys(drop.seed))
    keys.argument = "keys"
    offset, threshold = Argument(drop.offset, "offset"), Argument(drop.threshold, "threshold")
    factor = Factor(drop.factor)
    factor.argument = f"factor {compute.name}"
    values = (offset, keys, threshold, factor)
    spelling = f"cupynorm::Drop<{cpp(compute)}, {compiler.spell(whole)}>"
    return Struct(spelling, np.dtype(members, align=True), values)


class Factor(float):
    """What is kept is multiplied by it. argument: as that of Argument."""

    argument: str


class RoundKeys(tuple[int, ...]):  # noqa: SLOT001  which a tuple subclass cannot have
    """The keys of all rounds. argument: as that of Argument."""

    argument: str


# The scalars of a dropout: its offset, round_keys(), and threshold_and_factors(). A kernel uses one of the two factors.
DROPOUT_SCALARS = ("offset", "keys", "threshold", "factor float32", "factor float64")


@functools.lru_cache(maxsize=256)
def threshold_and_factors(p: float) -> tuple[int, ...]:
    """Return the threshold, then the factor as float32 and as float64, each in a word of its own."""
    drop = Dropout(p, 0, 0)
    single = np.array([drop.factor, 0], np.float32).view(np.uint64)
    double = np.array([drop.factor]).view(np.uint64)
    return drop.threshold, int(single[0]), int(double[0])


@functools.lru_cache(maxsize=256)
def round_keys(seed: int) -> array[int]:
    """Return the key of each of Philox's rounds, its two words in one."""
    low, high = seed & philox.WORD, seed >> philox.BITS
    keys = []
    for i in range(philox.ROUNDS):
        first, second = ((k + i * w) & philox.WORD for k, w in zip((low, high), philox.WEYL, strict=True))
        keys.append(first | second << philox.BITS)
    return array("Q", keys)
