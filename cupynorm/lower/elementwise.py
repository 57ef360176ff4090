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
from cupynorm.lower.expressions import Expression
from cupynorm.lower.layouts import Halves, adjacent, in_memory_order, stretched
from cupynorm.lower.mirrors import Struct, arguments, column, direct
from cupynorm.lower.row import types_of
from cupynorm.lower.spec import KernelSpec
from cupynorm.lower.sums import Sums, sum_specs
from cupynorm.lower.tracing import apply, traced
from cupynorm.runtime import compiler

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits

KERNEL = "elementwise/elementwise.cuh"
VECTOR_BYTES = 16  # of a vector of the wider of two types
THREADS = 256  # threads of a block, at most
ROWS = 2  # rows of a thread where there is a bias, which is loaded and converted once for both
MOST_BLOCKS = 65535  # blocks of a grid along y and z
INT = 1 << 31


class Each(NamedTuple):
    """An op on each element: dropout, or an activation of reference.ACTIVATIONS with an optional bias and gate."""

    activation: str | None = None
    bias: Any = None
    gate: str | None = None  # "first" or "second": the half of x's last axis that goes through the activation
    dropout: Dropout | None = None


class Tiles(NamedTuple):
    """How a kernel's blocks cover the results: numbers of each_element, and its launch.

    block: threads along the columns, one for each vector, and along the rows, one for each `rows` rows. grid: blocks
    along the columns, and in two dimensions along the rows.
    """

    vector: int
    rows: int
    unaligned: int
    long: bool
    grid: tuple[int, int, int]
    block: tuple[int, int]

    @property
    def template(self) -> tuple[int, int, int, bool]:
        """The kernel's template arguments behind its types."""
        return self.vector, self.rows, self.unaligned, self.long

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    def summary(self) -> dict[str, Any]:
        """Return what explain shows of it."""
        return self._asdict()


def tiles(rows: int, cols: int, vector: int, unaligned: int, most_rows: int, resident: int) -> Tiles:
    """Choose how blocks cover rows and columns of results.

    most_rows: rows that a thread may have. resident: threads that the device holds at once; a thread has one row where
    there is less work than that.
    """
    vectors = -(-(cols + (vector - 1 if unaligned else 0)) // vector)
    pieces = -(-vectors // THREADS)
    across = -(-vectors // pieces)
    if pieces > 1:  # whole warps: in a row of many blocks it is the last one that is not full
        across = -(-across // 32) * 32
        pieces = -(-vectors // across)
    down = min(rows, THREADS // across)
    held = most_rows if rows * vectors >= most_rows * resident else 1
    groups = -(-rows // (down * held))
    deep = -(-groups // MOST_BLOCKS)
    grid = (pieces, -(-groups // deep), deep)
    # the last block counts elements past the end, too
    reach = max(grid[0] * across * vector, grid[1] * grid[2] * down * held)
    return Tiles(vector, held, unaligned, reach >= INT, grid, (across, down))


class ElementwiseProblem(NamedTuple):
    """The problem for which tiles are chosen. most_rows: rows of a thread, at most."""

    rows: int
    cols: int
    vector: int
    unaligned: int
    most_rows: int

    def plan(self, limits: Limits) -> Tiles:
        """Choose how blocks of a device cover the results."""
        resident = limits.sm_count * limits.threads_per_sm
        return tiles(self.rows, self.cols, self.vector, self.unaligned, self.most_rows, resident)

    def summary(self) -> dict[str, int]:
        """Return what explain shows of it."""
        return {"rows": self.rows, "cols": self.cols, "vector": self.vector}


def elementwise_spec(each: Each, x: View, y: View, bias: View | None, axes: int = 1) -> KernelSpec:
    """Lower an op on each element.

    bias: of each, along the last `axes` axes. y has half of x's last axis where there is a gate.
    """
    if bias is None and each.gate is None:
        if each.dropout is None:  # nor does a result depend on the order of axes
            x, y = in_memory_order((x, y), 2)
        x, y = _joined(x, y)
    elif axes > 1 or not all(one.split(1)[1].is_contiguous() for one in (x, y)):
        return _in_any_layout(each, x, y, None if bias is None else stretched(bias, x.shape, axes))
    axes = min(1, len(x.shape))
    width, cols = x.shape[-1], y.shape[-1]
    rows = math.prod(y.shape) // cols
    compute = compute_dtype(x.dtype, y.dtype)
    widest = VECTOR_BYTES // max(x.dtype.itemsize, y.dtype.itemsize)
    # four elements share one call of Philox
    vector = widest if each.dropout is None else max(4, widest)
    unaligned = _unaligned(x, y, vector)
    if each.dropout is not None:
        op = _drop(each.dropout, compute, whole=unaligned == 0)
    else:
        op = _activate(each, y.dtype, compute, column(bias, (width,)))
    load, store = direct("DirectLoad", x.split(axes)[0]), direct("DirectStore", y.split(axes)[0])
    whole = arguments(op, load, store, rows, cols)
    text = compiler.text(KERNEL, whole.cpp, whole.dtype.itemsize, header="io/affine.cuh")
    most_rows = 1 if bias is None or unaligned else ROWS
    problem = ElementwiseProblem(rows, cols, vector, unaligned, most_rows)
    return KernelSpec(
        text, "cupynorm::each_element<{types}, {numbers}>", types_of(op, load, store), whole, problem
    )


def _in_any_layout(each: Each, x: View, y: View, bias: View | None) -> KernelSpec:
    """Lower an activation with a bias or a gate whose axes come in memory in another order, or with other steps.

    bias: stretched to x's shape. It is a function of operands, as a gradient is, of which nothing is added up.
    """
    halves, arrays = Halves(each.gate, y.shape[-1]), [x] if bias is None else [x, bias]
    steps = [halves.step(array) for array in arrays]
    y, x, *others = in_memory_order([y, *map(halves.cut, arrays)], 2)
    beside = adjacent((x, y))
    if beside and each.gate is None and not any(others[0].strides[:-1]):
        last = View(others[0].pointer, x.shape[-1:], others[0].strides[-1:], others[0].dtype)
        return elementwise_spec(each, x, y, last)
    operands = [
        part for array, step in zip((x, *others), steps, strict=True) for part in halves.parts(array, step)
    ]
    function = of_activation(str(each.activation), gate=each.gate is not None, bias=bias is not None)
    what = Sums(function, tuple(operands), y.shape, 1, (None,), (y,), 0 if beside else 1)
    return sum_specs(what, compute_dtype(x.dtype, y.dtype), ())[0]


@functools.cache
def of_activation(activation: str, *, gate: bool, bias: bool) -> Expression:
    """Return an activation's result as a function of x and bias; of a gate that of a, b and their biases."""

    def of(x: Any, *others: Any) -> Any:
        if not gate:
            return apply(activation, x + others[0])
        b, *shift = others
        return apply(activation, x + shift[0]) * (b + shift[1]) if bias else apply(activation, x) * b

    return traced(of, (1 + gate) * (1 + bias))


def _joined(x: View, y: View) -> tuple[View, View]:
    """Return both with those trailing axes joined that are contiguous in both: no result depends on the column."""
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


def _unaligned(x: View, y: View, vector: int) -> int:
    """Return the kernel's kUnaligned: 0 for aligned rows, 1 for unaligned ones whose x is aligned as y, else 2."""
    width, cols = x.shape[-1], y.shape[-1]
    # a vector is moved in accesses of 16 bytes at most
    of_x, of_y = (min(vector, VECTOR_BYTES // each.dtype.itemsize) for each in (x, y))
    whole = all(start == 0 and not any(steps) for start, _, steps in (_starts(x, of_x), _starts(y, of_y)))
    if whole and cols % vector == 0:
        return 0
    # a gate's other half begins where the first one ends
    same_alignment = (
        of_x <= of_y and _starts(x, of_x) == _starts(y, of_x) and (width == cols or cols % of_x == 0)
    )
    return 1 if same_alignment else 2


FUNCTIONS = {"gelu_tanh": "cupynorm::GeluTanh", "silu": "cupynorm::Silu"}
GATES = {None: 0, "first": 1, "second": 2}


def _activate(each: Each, result: Dtype, compute: Dtype, bias: Struct) -> Struct:
    """Return the mirror of Activate."""
    if each.activation == "gelu":
        function = f"cupynorm::Gelu<{cpp(result)}, {compiler.template_argument(each.gate is not None)}>"
    else:
        function = FUNCTIONS[str(each.activation)]
    type_name = f"cupynorm::Activate<{cpp(compute)}, {function}, {bias.cpp}, {GATES[each.gate]}>"
    return Struct(type_name, np.dtype([("bias", bias.dtype)], align=True), (bias.values,))


def _drop(drop: Dropout, compute: Dtype, *, whole: bool) -> Struct:
    """Return the mirror of Drop."""
    members: list[Any] = [("offset", np.uint64), ("keys", np.uint64, (philox.ROUNDS,))]
    members += [("threshold", np.uint64), ("factor", compute)]
    keys = RoundKeys(round_keys(drop.seed))
    keys.argument = "keys"
    offset, threshold = Argument(drop.offset, "offset"), Argument(drop.threshold, "threshold")
    factor = Factor(drop.factor)
    factor.argument = f"factor {compute.name}"
    values = (offset, keys, threshold, factor)
    type_name = f"cupynorm::Drop<{cpp(compute)}, {compiler.template_argument(whole)}>"
    return Struct(type_name, np.dtype(members, align=True), values)


class Factor(float):
    """The factor of kept elements. argument: as that of Argument."""

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
