"""Lowers gradients: which two numbers of an element a backward op is given, what is done with its result, and sums.

Formulas, with g = dy * gamma and h = (x - mean) * rstd, where means are over the columns of a row:
layer_norm: dx = rstd * (g - mean(g) - h * mean(g * h)); rms_norm, of mean 0: dx = rstd * (g - h * mean(g * h)).
softmax: dx = scale * y * (dy - sum(dy * y)); log_softmax: dx = scale * (dy - exp(y) * sum(dy)).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.lower.around import Around, Operand, RowSums
from cupynorm.lower.backward import FIELD_SUMS
from cupynorm.lower.expressions import Expression
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.layouts import (
    Halves,
    Moved,
    Span,
    adjacent,
    elements_of_access,
    in_memory_order,
    in_pieces,
    moved,
    spans_of,
)
from cupynorm.lower.row import RowOp
from cupynorm.lower.sums import NUMBERS, Further, Result, Sums
from cupynorm.lower.tracing import apply, traced
from cupynorm.plan.config import ACCESS_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm._dtypes import Dtype
    from cupynorm.call.masks import Mask
    from cupynorm.lower.row_groups import RowGroups
    from cupynorm.lower.spec import KernelSpec


def statistics_spec(
    op: RowOp, x: View, axes: int, stats: Sequence[View], eps: float, compute: Dtype, room: int = 0
) -> KernelSpec:
    """Lower the statistics of a norm's forward op: x is read, nothing else is written. room: as in Around."""
    return fused_spec(op, x, axes, {}, [each.pointer for each in stats], eps, compute, Around((), room=room))


class Normed(NamedTuple):
    """What a norm's backward is given, each view stretched to x's shape; None for what there is not.

    x: what was normalised, or with `from_result` its result. mean: None for RMSNorm.
    """

    dy: View
    x: View
    gamma: View | None
    beta: View | None
    mean: View | None
    rstd: View
    from_result: bool = False

    @property
    def is_given(self) -> tuple[bool, bool, bool, bool, bool]:
        """Which formula it takes: whether there are gamma, beta, mean, x is the result, and gamma's type is float16."""
        half = self.from_result and self.gamma is not None and self.gamma.dtype == np.float16
        return self.gamma is not None, self.beta is not None, self.mean is not None, self.from_result, half


@functools.cache
def _of_norm(
    is_given: tuple[bool, bool, bool, bool, bool], sums: tuple[bool, bool], *, op: bool
) -> tuple[Expression, tuple[str, ...]]:
    """Return a function of dy and others, and the names of those.

    It gives what a norm's backward op is given, g and h, if it is for the op; and behind them of which rows there are
    sums: dy * h for dgamma and dy for dbeta, as far as these are wanted.
    """
    gamma, beta, mean, from_result, half = is_given
    names = ["x"]
    if from_result:
        names += ["beta"] * beta + ["gamma"] * gamma
    else:
        names += ["mean"] * mean + ["rstd"]
        names += ["gamma"] * (gamma and op)

    def of(dy: Any, *others: Any) -> tuple[Any, ...]:
        given = dict(zip(names, others, strict=True))
        h = given["x"]
        if from_result:
            h = h - given["beta"] if beta else h
            if gamma:  # the reciprocal is the same for all rows
                h = h * (apply("half_reciprocal", given["gamma"]) if half else 1 / given["gamma"])
        else:
            h = (h - given["mean"] if mean else h) * given["rstd"]
        element = (dy * given["gamma"] if gamma else dy, h) if op else ()
        wanted = zip((dy * h, dy), sums, strict=True)
        return (*element, *(each for each, is_wanted in wanted if is_wanted))

    return traced(of, 1 + len(names)), tuple(names)


class Added(NamedTuple):
    """The sum that a norm normalised: dropout(x + bias) + alpha * residual, and the gradients that its backward gives.

    ds: the gradient that reaches the sum itself, None for none. dresidual: where the residual's goes.
    """

    ds: View | None
    alpha: float
    dropout: Dropout | None
    dresidual: View | None


@functools.cache
def _after_norm(*, ds: bool, dropout: bool, dresidual: bool, dbias: bool) -> Expression:
    """Return what is done with the op's result: of it, rstd, ds, a dropout with its factor, and alpha.

    It gives dx, the residual's gradient, and dx once more if there is a sum of it.
    """

    def of(d: Any, rstd: Any, *others: Any) -> Any:
        left = list(others)
        total = d * rstd
        if ds:
            total = total + left.pop(0)
        dx = total
        if dropout:
            kept, factor = left.pop(0), left.pop(0)
            dx = np.where(kept != 0, total * factor, 0.0)
        return dx, *((total * left.pop(0),) if dresidual else ()), *((dx,) if dbias else ())

    return traced(of, 2 + ds + 2 * dropout + dresidual)


class ParameterSums(NamedTuple):
    """Which sums over rows are taken in the pass that gives dx, and where those of each group of rows go."""

    groups: RowGroups
    dgamma: View | None
    dbeta: View | None
    dbias: View | None

    @property
    def of_load(self) -> tuple[bool, bool]:
        """Which of them are of what the op is given."""
        return self.dgamma is not None, self.dbeta is not None

    @property
    def partial(self) -> tuple[View, ...]:
        """The places of those that there are."""
        return tuple(each for each in (self.dgamma, self.dbeta, self.dbias) if each is not None)


def norm_gradient(
    op: RowOp,
    what: Normed,
    dx: View,
    axes: int,
    compute: Dtype,
    added: Added | None = None,
    sums: ParameterSums | None = None,
) -> KernelSpec:
    """Lower the gradient of a norm's input, in one pass over dy and x; with `sums` of its parameters, too."""
    of_load = (False, False) if sums is None else sums.of_load
    load, names = _of_norm(what.is_given, of_load, op=True)
    outs: tuple[View, ...] = (dx,)
    store_operands: list[Operand] = [what.rstd]
    how = {"ds": False, "dropout": False, "dresidual": False}
    if added is not None:
        how = {name: getattr(added, name) is not None for name in how}
        store_operands += [] if added.ds is None else [added.ds]
        store_operands += [] if added.dropout is None else [added.dropout, added.dropout.factor]
        if added.dresidual is not None:
            outs += (added.dresidual,)
            store_operands.append(added.alpha)
    around = Around(
        outs,
        load=load,
        load_operands=tuple(getattr(what, name) for name in names),
        store=_after_norm(**how, dbias=sums is not None and sums.dbias is not None),
        store_operands=tuple(store_operands),
        sums=None
        if sums is None
        else RowSums(sums.partial, sums.groups, sum(of_load), int(sums.dbias is not None)),
    )
    return fused_spec(op, what.dy, axes, {}, (), 0.0, compute, around)


def norm_sums(what: Normed, axes: int, dgamma: Result | None, dbeta: Result | None) -> Sums:
    """Return the sums over rows that are the gradients of gamma and beta, in a pass of their own."""
    function, names = _of_norm(what.is_given, (True, True), op=False)
    operands = (what.dy, *(getattr(what, name) for name in names))
    return Sums(function, operands, what.dy.shape, axes, (dgamma, dbeta))


def axes_inside(x: View, axes: int) -> int:
    """Return along how many of the leading axes a column's elements lie next to one another, where rows lie apart.

    0: rows are contiguous, or so few elements lie there that threads side by side better have one of each column.
    """
    leading, columns = x.split(axes)
    count, step = 0, x.dtype.itemsize
    for extent, stride in zip(reversed(leading.shape), reversed(leading.strides), strict=True):
        if stride != step and extent > 1:
            break
        count, step = count + 1, step * extent
    inside = math.prod(leading.shape[len(leading.shape) - count :])
    return 0 if columns.is_contiguous() or inside < NUMBERS.min_inside else count


def norm_sums_inside(
    what: Normed, axes: int, inside: int, sums: Sequence[View | None], compute: Dtype, room: int
) -> KernelSpec:
    """Lower those parts of norm_sums() that lie next to one another: along the last `inside` of the leading axes.

    sums: where those of gamma and beta go, of the other leading axes' and the columns' shape. room: as in Around.
    """
    rank = len(what.dy.shape)
    leading = rank - axes
    order = (*range(leading - inside), *range(leading, rank), *range(leading - inside, leading))
    function, names = _of_norm(what.is_given, (True, True), op=False)
    operands = tuple(getattr(what, name).reordered(order) for name in names)
    around = Around((), load=function, load_operands=operands, room=room)
    stats = [0 if each is None else each.pointer for each in sums]
    return fused_spec(FIELD_SUMS, what.dy.reordered(order), inside, {}, stats, 0.0, compute, around)


@functools.cache
def _of_softmax(*, dropout: bool) -> Expression:
    """Return what the op is given: dy, which may go through a dropout, and y."""

    def of(dy: Any, y: Any, *others: Any) -> Any:
        return np.where(others[0] != 0, dy * others[1], 0.0) if dropout else dy, y

    return traced(of, 2 + 2 * dropout)


@functools.cache
def _scaled(*, scale: bool, both: bool) -> Expression:
    def of(d: Any, *scales: Any) -> Any:
        scaled = d * scales[0] if scale else d
        return (scaled, d) if both else scaled

    return traced(of, 1 + scale)


def softmax_gradient(
    op: RowOp,
    dy: View,
    y: View,
    outs: tuple[View, ...],
    axes: int,
    compute: Dtype,
    mask: Mask | None,
    dropout: Dropout | None,
) -> KernelSpec:
    """Lower the gradient of softmax's or log_softmax's input. outs: where it goes, and perhaps it without the scale."""
    scale = 1.0 if mask is None else mask.scale
    around = Around(
        outs,
        load=_of_softmax(dropout=dropout is not None),
        load_operands=(y,) if dropout is None else (y, dropout, dropout.factor),
        mask=mask,
        store=_scaled(scale=scale != 1, both=len(outs) > 1),
        store_operands=(scale,) * (scale != 1),
    )
    return fused_spec(op, dy, axes, {}, (), 0.0, compute, around)


def _slope(activation: str, z: Any) -> Any:
    """Return the derivative of an activation: formulas of cupynorm.host.elementwise_gradients."""
    if activation != "gelu_tanh":
        return apply(f"{activation}_slope", z)
    inner = apply("minimum", apply("maximum", z, -FAR), FAR)
    square = inner * inner
    scale = 2 * math.sqrt(2 / math.pi)
    u, slope_of_u = scale * (inner + 0.044715 * inner * square), scale * (1 + 3 * 0.044715 * square)
    return apply("sigmoid", u) + z * (apply("sigmoid", u) * apply("sigmoid", -u) * slope_of_u)


FAR = 1e3  # from here on, tanh is 1 to the last bit


@functools.cache
def _of_activation(activation: str, *, gate: bool, bias: bool) -> Expression:
    """Return dx as a function of dy, x and bias; of a gate both halves of dx, of dy, a, b and their biases."""

    def of(dy: Any, x: Any, *others: Any) -> Any:
        if not gate:
            return dy * _slope(activation, x + others[0] if bias else x)
        a, b = x, others[0]
        if bias:
            a, b = a + others[1], b + others[2]
        # in this order the product overflows only where dx does
        return dy * _slope(activation, a) * b, dy * apply(activation, a)

    return traced(of, (2 + gate) + bias * (1 + gate))


def activation_sums(
    dy: View,
    x: View,
    bias: View | None,
    dx: View,
    activation: str,
    gate: str | None,
    to: Sequence[Result | None],
) -> Sums:
    """Return the gradient of an activation, whose sums over rows are its bias's.

    bias: stretched to x's last axis. to: where the sums go, of a gate those of a and of b.
    """
    function = _of_activation(activation, gate=gate is not None, bias=bias is not None)
    shape, cols = dy.shape, dy.shape[-1]
    halves = [0] if gate is None else [0, cols] if gate == "first" else [cols, 0]

    def parts(array: View) -> list[View | Further]:
        strides = (0,) * (len(shape) - len(array.strides)) + array.strides
        part = View(array.pointer, shape, strides, array.dtype)
        return [Further(part, first) if first else part for first in halves]

    operands = (dy, *parts(x), *(() if bias is None else parts(bias)))
    return Sums(function, operands, shape, 1, tuple(to), tuple(parts(dx)))


def activation_sums_in_any_layout(
    dy: View, x: View, bias: View | None, dx: View, dbias: View | None, activation: str, gate: str | None
) -> list[tuple[Sums, View | None]]:
    """Return the same of arrays whose axes come in memory in another order, or with other steps; without results.

    bias, dbias: stretched to x's shape. There may be two sums, each of a part of the rows. With each comes dbias
    stretched to its columns, of a gate with both halves as a first axis.
    """
    halves = Halves(gate, dy.shape[-1])
    arrays = [x, dx, *(each for each in (bias, dbias) if each is not None)]
    steps = [halves.step(each) for each in arrays]
    views = in_memory_order([dy, *map(halves.cut, arrays)], 3)
    cut = dbias is not None and not views[-1].strides[-1]
    extent = views[0].shape[-1]
    spans = spans_of(extent) if cut else [Span(0, extent, 0)]
    what = _Activation(activation, halves, steps, has_bias=bias is not None, has_dbias=dbias is not None)
    return [_activation_sums_of_span(what, views, span) for span in spans]


class _Activation(NamedTuple):
    """The gradient of an activation or a gate in any layout. steps: of each array, to the second half."""

    activation: str
    halves: Halves
    steps: list[int]
    has_bias: bool
    has_dbias: bool


def _activation_sums_of_span(what: _Activation, views: list[View], span: Span) -> tuple[Sums, View | None]:
    """Return the sums of a span of the last axis. views: dy, x, dx, then bias and dbias where they are there."""
    firsts = [span.first * each.strides[-1] // each.dtype.itemsize for each in views]
    views = [each._replace(shape=(*each.shape[:-1], span.cols)) for each in views]
    own: list[int] = []
    if what.has_dbias:  # rows are what it was broadcast along
        own = [at for at, step in enumerate(views[-1].strides[:-1]) if step]
        if span.piece:
            views = [in_pieces(each, span.piece) for each in views]
        rest = (at for at in range(len(views[0].shape) - 1) if at not in own)
        order = (*rest, *own)
        views = [each.reordered(order) for each in views]
    axes = len(own) + 1
    dy = moved(views[0], firsts[0])
    parts = [
        what.halves.parts(each, step, first)
        for each, step, first in zip(views[1:], what.steps, firsts[1:], strict=True)
    ]
    pieces = 0
    if own or not adjacent(views[:3]):
        along = [each if isinstance(each, Moved) else Moved(each, 0) for each in (dy, *parts[0], *parts[1])]
        most = min(ACCESS_BYTES // each.array.dtype.itemsize for each in along)
        pieces = math.gcd(*(elements_of_access(each.array, each.first, most) for each in along))
    gate = what.halves.gate is not None
    function = _of_activation(what.activation, gate=gate, bias=what.has_bias)
    operands = (dy, *parts[0], *(parts[2] if what.has_bias else []))
    results = (None,) * len(parts[1])
    sums = Sums(function, operands, views[0].shape, axes, results, tuple(parts[1]), pieces)
    if not what.has_dbias:
        return sums, None
    columns = views[-1].split(axes)[1]
    if gate:
        columns = View(
            columns.pointer,
            (2, *columns.shape),
            (what.steps[-1] * columns.dtype.itemsize, *columns.strides),
            columns.dtype,
        )
    return sums, columns
