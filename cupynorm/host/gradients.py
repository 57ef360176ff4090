"""Gradients of norms and softmax on NumPy arrays, in blocks of rows, each result rounded once.

Arithmetic is that of ops.py where of softmax only dx is wanted, and for norms of no sum; else it is in float64, as in
reference.py. Sums over rows are in float64. A result may be one of the arrays that are read. Nothing is checked here;
floating warnings are off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.host import compiled, reference
from cupynorm.host.blocks import each_block
from cupynorm.host.broadcast_sums import BroadcastSum
from cupynorm.host.losses import _pieces
from cupynorm.host.ops import standardise, subtract_exactly, type_of_arithmetic
from cupynorm.host.reference import _blocks, _columns, _round, _standardise
from cupynorm.host.rows import Rows, columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.host.philox import Dropout
    from cupynorm.host.reference import Index, Masking, _Rows

Array = np.ndarray[Any, Any]


class Sum(NamedTuple):
    """Where the gradient of a parameter goes, which is summed over all along which the parameter is broadcast.

    adds: to what `out` holds.
    """

    out: Any
    adds: bool


class AddGradient(NamedTuple):
    """What else there is to the gradient of a norm of s = dropout(x + bias) + alpha * residual.

    ds: the gradient that arrives at s itself; None is none. dresidual: where alpha times the gradient of s goes; None:
    nowhere. dbias: where the gradient of x goes, summed over the rows.
    """

    ds: Any
    alpha: float
    dropout: Dropout | None
    dresidual: Any
    dbias: Sum | None


class NormGradient(NamedTuple):
    """A gradient of layer_norm (centred), or of rms_norm, over the last `axes` axes.

    x: the input, or the result if from_y: then rstd is given, and beta is looked at. gamma and beta have no more axes
    than the normalised ones. mean, rstd: of x's shape without the normalised axes; None: computed from x and eps.
    dx: where the gradient of x goes, or with `add` that of the sum's x.
    """

    dy: Any
    x: Any
    axes: int
    centred: bool
    from_y: bool
    gamma: Any
    beta: Any
    mean: Any
    rstd: Any
    eps: float
    dx: Any
    dgamma: Sum | None
    dbeta: Sum | None
    add: AddGradient | None


def norm(what: NormGradient) -> None:
    """Write rstd * (g - mean(g) - z * mean(g * z)), where g = dy * gamma, and z is the normalised x; of all rows.

    Means are over a row; mean(g) is 0 in rms_norm. The gradients of gamma and beta are the sums of dy * z and dy.
    """
    cols = math.prod(what.x.shape[what.x.ndim - what.axes :])
    if what.add is None and cols <= reference.BLOCK:
        _norm_alone(what, cols)
    else:
        _norm_in_float64(what)


def _norm_alone(what: NormGradient, cols: int) -> None:
    """Do so in the type of arithmetic, of no sum and of rows that fit into a block; sums over rows are in float64."""
    axes, shape = what.axes, what.x.shape
    dtype = type_of_arithmetic(what.dy, what.x, what.dx)
    scale, shift = (columns_of(each, shape, axes, dtype) for each in (what.gamma, what.beta))
    dgamma, dbeta = (_total(each, shape, axes) for each in (what.dgamma, what.dbeta))

    def work(rows: Rows) -> None:
        slope = type(rows)(what.dy, rows.at, rows.pieces, axes, rows.space.other("slope", dtype), None)
        rstd = _normalise_alone(what, rows, cols, scale, shift)

        def scaled(piece: Index) -> Array:
            given = slope.seen(piece)
            if scale is None:
                return given
            room = slope.space.take("scaled", *given.shape)
            slope.step_columns(np.multiply, given, slope.columns(scale, piece), room)
            return room

        along: Array | None = None
        level: Array | None = None
        for piece, z in rows.each():
            given, tile = slope.seen(piece), rows.tile(piece)
            if dgamma is not None:
                products = np.multiply(given, z, out=rows.space.take("products", *z.shape))
                dgamma.add(rows.shaped(products, piece), tile, rows.space)
            if dbeta is not None:
                dbeta.add(rows.shaped(given, piece), tile, rows.space)
            g = scaled(piece)
            along = rows.sums(g, z, along)
            if what.centred:
                level = rows.sums(g, None, level)
        rows.apply(np.multiply, np.asarray(along) / cols)
        rows.then(lambda values, out, piece: _subtract_from(g if rows.whole else scaled(piece), values, out))
        if level is not None:
            rows.apply(np.subtract, level / cols)
        rows.apply(np.multiply, rstd)
        rows.store(what.dx)

    reads = (what.dy, what.gamma, what.beta, what.mean, what.rstd)
    alike = _lie_alike(what.dy, what.x)
    in_order = dgamma is not None or dbeta is not None
    each_block(what.x, axes, dtype, work, what.dx, reads, alone=alike, in_order=in_order)
    for total, target in ((dgamma, what.dgamma), (dbeta, what.dbeta)):
        _store(total, target)


def _subtract_from(whole: Array, values: Array, out: Array) -> None:
    np.subtract(whole, values, out=out)


def _normalise_alone(
    what: NormGradient, rows: Rows, cols: int, scale: Array | None, shift: Array | None
) -> Array:
    """Replace rows of x, or of y, by the normalised ones; return each row's 1 / deviation."""
    if not what.from_y and what.rstd is None:
        exactly = what.dgamma is not None
        return standardise(rows, cols, what.eps, centred=what.centred, exactly=exactly)[1]
    rstd = np.asarray(what.rstd[rows.at]).astype(np.float64).reshape(-1)
    if what.from_y:
        rows.apply_columns(np.subtract, shift)
        rows.apply_columns(np.divide, scale)
        return rstd
    if what.mean is not None:
        subtract_exactly(rows, np.asarray(what.mean[rows.at]).astype(np.float64).reshape(-1))
    rows.apply(np.multiply, rstd)
    return rstd


@np.errstate(all="ignore")
def _norm_in_float64(what: NormGradient) -> None:
    axes, shape = what.axes, what.x.shape
    cols = math.prod(shape[len(shape) - axes :])
    scale, shift = _columns(what.gamma, shape, axes), _columns(what.beta, shape, axes)
    add = AddGradient(None, 1.0, None, None, None) if what.add is None else what.add
    targets = (what.dgamma, what.dbeta, add.dbias)
    dgamma, dbeta, dbias = sums = [_total(each, shape, axes) for each in targets]
    for slope, rows in zip(_blocks(what.dy, axes), _blocks(what.x, axes), strict=True):
        rstd = _normalise(what, rows, cols, scale, shift)
        for values, normalised, piece in _together(slope, rows):
            _add(dgamma, slope, piece, values, normalised)
            _add(dbeta, slope, piece, values)
        slope.apply_columns(np.multiply, scale)
        along = _product_sum(slope, rows) / cols
        level = slope.sum() / cols if what.centred else np.zeros_like(along)
        for values, normalised, piece in _together(slope, rows):
            found = rstd[:, None] * (values - level[:, None] - normalised * along[:, None])
            if add.ds is not None:
                found += add.ds[slope._index(piece)].astype(np.float64).reshape(found.shape)  # noqa: SLF001
            if add.dresidual is not None:
                _write(add.dresidual, slope, piece, add.alpha * found)
            if add.dropout is not None:
                start = slope._start(piece)  # noqa: SLF001
                kept = add.dropout.kept(start, found.size).reshape(found.shape)
                found = np.where(kept, found * add.dropout.factor, 0.0)
            _add(dbias, slope, piece, found)
            _write(what.dx, slope, piece, found)
    for total, target in zip(sums, targets, strict=True):
        _store(total, target)


class SoftmaxGradient(NamedTuple):
    """A gradient of softmax, or of log_softmax, over the last `axes` axes.

    y: the result. dropout: of the result, which dy has not been through yet. dbias: where the gradient of a bias goes,
    which broadcasts to y's shape.
    """

    dy: Any
    y: Any
    axes: int
    log: bool
    dropout: Dropout | None
    dx: Any
    dbias: Sum | None


def softmax(what: SoftmaxGradient, mask: Masking | None) -> None:
    """Write scale * y * (dy - sum(dy * y)), or for log_softmax scale * (dy - exp(y) * sum(dy)); 0 where dropped.

    Nothing that stands in a dropped place counts. The gradient of the bias is the sum of the same without scale.
    """
    if what.dbias is None and what.dropout is None:
        _softmax_alone(what, mask)
    else:
        _softmax_in_float64(what, mask)


def _softmax_alone(what: SoftmaxGradient, mask: Masking | None) -> None:
    """Do so in the type of arithmetic, where only dx is wanted, of a dy that is given.

    Sums of products are off by some roundings of the sum of their sizes, as bounds.py allows.
    """
    name = "log_softmax_backward" if what.log else "softmax_backward"
    if mask is None and compiled.run(name, what.y, what.axes, what.dx, others=what.dy):
        return
    scale = 1.0 if mask is None else mask.scale
    reads = () if mask is None else (mask.where, mask.begin, mask.end)
    dtype = type_of_arithmetic(what.dy, what.y, what.dx)

    def work(rows: Rows) -> None:
        slope = type(rows)(what.dy, rows.at, rows.pieces, what.axes, rows.space.other("slope", dtype), None)
        for each in (slope, rows):
            each.drop_from_source(mask, 0.0)
        sums: Array | None = None
        for piece in rows.pieces:
            sums = rows.sums(slope.seen(piece), None if what.log else rows.seen(piece), sums)
        total = np.asarray(sums).astype(dtype)

        def step(p: Array, out: Array, piece: Index) -> None:
            given = slope.seen(piece)
            if what.log:
                rows.step_rows(np.multiply, p, total, p)  # exponentials, which are ours; out may be dy
                np.subtract(given, p, out=out)
            else:
                rows.step_rows(np.subtract, given, total, out)
                np.multiply(out, p, out=out)
            if scale != 1:
                np.multiply(out, dtype.type(scale), out=out)

        if what.log:
            rows.apply(np.exp)
        rows.then(step)
        rows.drop(mask, 0.0)  # in a row with a nan, what is dropped would be nan by now
        rows.store(what.dx)

    alone = mask is None and _lie_alike(what.dy, what.y)
    each_block(what.y, what.axes, dtype, work, what.dx, (what.dy, *reads), alone=alone)


def _lie_alike(one: Array, other: Array) -> bool:
    """Say whether two arrays of one shape have one dtype and the same strides."""
    return one.dtype == other.dtype and one.strides == other.strides


@np.errstate(all="ignore")
def _softmax_in_float64(what: SoftmaxGradient, mask: Masking | None) -> None:
    scale = 1.0 if mask is None else mask.scale
    dbias = _total(what.dbias, what.y.shape, what.axes)
    for slope, rows in zip(_blocks(what.dy, what.axes), _blocks(what.y, what.axes), strict=True):
        if what.dropout is not None:
            slope.drop_out(what.dropout)
        slope.drop(mask, 0.0)
        if what.log:
            rows.apply(np.exp)
        rows.drop(mask, 0.0)
        total = (slope.sum() if what.log else _product_sum(slope, rows))[:, None]
        for values, p, piece in _together(slope, rows):
            found = values - p * total if what.log else p * (values - total)
            if mask is not None:  # in a row with a nan, what is dropped would be nan by now
                slope._put(found, piece, mask, 0.0)  # noqa: SLF001
            _add(dbias, slope, piece, found)
            _write(what.dx, slope, piece, scale * found)
    _store(dbias, what.dbias)


def _normalise(what: NormGradient, rows: _Rows, cols: int, scale: Array | None, shift: Array | None) -> Array:
    """Replace rows of x, or of y, by the normalised ones; return each row's 1 / deviation."""
    if what.from_y:
        if shift is not None:
            rows.apply_columns(np.subtract, shift)
        rows.apply_columns(np.divide, scale)
        return _of_rows(what.rstd, rows)
    if what.rstd is None:
        return _standardise(rows, cols, what.eps, centred=what.centred)[1]
    if what.mean is not None:
        rows.apply(np.subtract, _of_rows(what.mean, rows))
    factor = _of_rows(what.rstd, rows)
    rows.apply(np.multiply, factor)
    return factor


def _of_rows(statistic: Array, rows: _Rows) -> Array:
    """Return a statistic of these rows."""
    found: Array = np.asarray(statistic[rows._rows]).astype(np.float64).reshape(-1)  # noqa: SLF001
    return found


def _together(slope: _Rows, rows: _Rows) -> Iterator[tuple[Array, Array, Index]]:
    """Yield the pieces of two arrays, and the columns that they have."""
    for (values, piece), (others, _) in zip(_pieces(slope), _pieces(rows), strict=True):
        yield values, others, piece


def _product_sum(slope: _Rows, rows: _Rows) -> Array:
    """Return each row's sum of the products of two arrays' elements."""
    parts = ((values * others).sum(axis=1) for values, others, _ in _together(slope, rows))
    return slope._total(np.add, parts)  # noqa: SLF001


def _write(out: Array, rows: _Rows, piece: Index, values: Array) -> None:
    """Write a piece, rounded once."""
    target = out[rows._index(piece)]  # noqa: SLF001
    target[...] = _round(values, out.dtype).reshape(target.shape)


def _total(target: Sum | None, shape: tuple[int, ...], axes: int) -> BroadcastSum | None:
    """Begin the sum of an array of this shape over all along which a parameter is broadcast; None if nobody asks."""
    if target is None:
        return None
    return BroadcastSum(target.out.shape, shape, axes, target.out if target.adds else None)


def _add(total: BroadcastSum | None, rows: _Rows, piece: Index, *factors: Array) -> None:
    """Add a piece of some rows, or the product of two, to a sum, if there is one."""
    if total is None:
        return
    x, first = rows._x, rows._rows  # noqa: SLF001
    values = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    between = (slice(None),) * (x.ndim - len(first) - len(piece))
    total.add(values.reshape(x[rows._index(piece)].shape), (*first, *between, *piece))  # noqa: SLF001


def _store(total: BroadcastSum | None, target: Sum | None) -> None:
    """Write a sum, rounded once."""
    if total is not None and target is not None:
        total.store(target.out)
