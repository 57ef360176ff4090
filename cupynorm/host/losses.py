"""Losses on NumPy arrays: in blocks of rows, each result rounded once.

They compute as ops.py does, cross_entropy with weights and smoothing in float64, as reference.py. Nothing is checked
here; floating warnings are off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.host import compiled
from cupynorm.host.blocks import each_block
from cupynorm.host.ops import powers, sums_of_powers, type_of_arithmetic
from cupynorm.host.reference import Masking, _blocks, _columns, _of_columns, _round, _Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.host.reference import Index
    from cupynorm.host.rows import Rows

Array = np.ndarray[Any, Any]


def logsumexp(x: Array, axes: int, out: Array, mask: Masking | None = None, *, omit: bool = False) -> None:
    """Write log(sum(exp(x))) over the last `axes` axes to out, -inf where nothing is kept. omit: nan is not.

    It is m + log(sum(exp(x - m))) with the row's maximum m, or with 0 where that will do or m is not finite. out has
    one element a row; it may have axes of one element in place of the reduced ones.
    """
    if (
        mask is None
        and not omit
        and out.dtype == x.dtype
        and compiled.run("logsumexp", x, axes, None, statistics=(out,))
    ):
        return

    def work(rows: Rows) -> None:
        rows.mask(mask)
        if omit:
            rows.drop_nan()
        pivot, total = sums_of_powers(rows)
        found = np.log(total)
        if pivot is not None:
            found = np.where(np.isfinite(pivot), pivot + found, pivot)
        rows.store_statistic(out, _round(found, out.dtype))

    reads = () if mask is None else (mask.where, mask.bias, mask.begin, mask.end)
    dtype, alone = type_of_arithmetic(x, out), mask is None and not omit
    each_block(x, axes, dtype, work, reads=reads, alone=alone, kept=False)


@np.errstate(all="ignore")
def signed_logsumexp(
    x: Array,
    axes: int,
    out: Array,
    mask: Masking | None,
    b: Array | None,
    sign: Array | None,
    *,
    omit: bool = False,
) -> None:
    """Write log(sum(b * exp(x))) to out, and with `sign` the logarithm of the sum's size, and its sign to that.

    b broadcasts to x's shape; None is 1. What has b = 0 counts for nothing, whatever x is.
    """
    factor = np.broadcast_to(np.ones(1) if b is None else b, x.shape)
    for rows in _blocks(x, axes):
        rows.mask(mask)

        def drop(values: Array, piece: Index, rows: _Rows = rows) -> None:
            np.copyto(values, -np.inf, where=_elements(rows, factor, piece, values) == 0)
            if omit:
                np.copyto(values, -np.inf, where=np.isnan(values))

        rows._then(drop)  # noqa: SLF001
        largest = rows.max()
        pivot = np.where(np.isfinite(largest), largest, 0.0)
        rows.apply(np.subtract, pivot)
        top: Any = 0.0  # of the largest terms, and of the others
        rest: Any = 0.0
        for values, piece in _pieces(rows):
            terms = _product(_elements(rows, factor, piece, values), np.exp(values))
            terms = np.where(np.isneginf(values), 0.0, terms)
            largest_ones = values == 0
            top = top + np.where(largest_ones, terms, 0.0).sum(axis=1)
            rest = rest + np.where(largest_ones, 0.0, terms).sum(axis=1)
        total = top + rest
        # what lies near to 0 keeps its digits
        near = np.abs(rest) < 0.5 * np.abs(top)
        logarithm = np.log(np.where(near, np.abs(top), np.abs(total))) + np.log1p(
            np.where(near, rest / top, 0.0)
        )
        found = (logarithm if sign is not None else np.where(total < 0, np.nan, logarithm)) + pivot
        _store(rows, out, np.where(np.isnan(largest), np.nan, found))
        if sign is not None:
            _store(rows, sign, np.sign(total))


def _elements(rows: _Rows, operand: Array, piece: Index, like: Array) -> Array:
    """Return what an operand of x's shape holds for a piece, as rows x columns."""
    part = operand[rows._index(piece)]  # noqa: SLF001
    return np.asarray(part.astype(np.float64).reshape(like.shape))


class Target(NamedTuple):
    """The target distribution of each row: q_i = weight_i * ((1 - smoothing) * [i == label] + smoothing / classes).

    labels: int64, of the rows' shape, 0 where `ignored` says that a row does not count. weight: None is 1 for all.
    """

    labels: Array
    ignored: Array
    weight: Array | None
    smoothing: float


def cross_entropy(
    x: Array, target: Target, z_loss: float, loss: Array, grad: Array | None, dloss: Any
) -> None:
    """Write sum_i q_i (lse - x_i) + z_loss * lse^2 to loss, and dloss times its gradient to grad; 0 where ignored.

    lse = logsumexp(x), and the gradient is (Q + 2 * z_loss * lse) * p - q with Q = sum_i q_i and p = softmax(x). A term
    of q_i = 0 counts as 0, also where x_i is -inf. grad may be x itself.
    """
    if target.smoothing and target.weight is not None:
        _in_float64(x, target, z_loss, loss, grad, dloss)
        return
    classes = x.shape[-1]
    weight = None if target.weight is None else np.broadcast_to(target.weight, (classes,))
    factor = np.broadcast_to(np.asarray(dloss, np.float64), x.shape[:-1])
    spread = target.smoothing / classes

    def work(rows: Rows) -> None:
        labels, ignored, dy = (
            np.reshape(each[rows.at], -1) for each in (target.labels, target.ignored, factor)
        )
        of_label = np.full(labels.shape, 1 - target.smoothing)
        if weight is not None:
            of_label = of_label * weight[labels].astype(np.float64)
        part = x[rows.at]
        at_label = np.take_along_axis(part, labels.reshape((*part.shape[:-1], 1)), -1).astype(np.float64)
        of_all = rows.sum() if spread else np.zeros(labels.shape)
        pivot, total = sums_of_powers(rows) if grad is None else powers(rows)
        lse = np.log(total)
        if pivot is not None:
            lse = pivot + lse
        found = _product(of_label, lse - at_label.reshape(-1))
        if spread:
            found += spread * (classes * lse - of_all)
        found = np.where(ignored, 0.0, found + z_loss * lse * lse)
        rows.store_statistic(loss, _round(found, loss.dtype))
        if grad is None:
            return
        rows.apply(np.multiply, dy * (of_label + target.smoothing + 2 * z_loss * lse) / total)
        if spread:
            rows.apply(np.subtract, dy * spread)
        taken = (dy * of_label).astype(rows.space.dtype)

        def take(values: Array, out: Array, piece: Index) -> None:
            if values is not out:
                np.copyto(out, values)
            row, column = _inside(labels, out, piece)
            out[rows.places(row, column)] -= taken[row]
            if ignored.any():
                np.copyto(out, 0.0, where=rows.along(ignored))

        rows.then(take)
        rows.store(grad)

    results = (loss,) if grad is None else (loss, grad)
    kept = grad is not None
    each_block(x, 1, type_of_arithmetic(x, *results), work, grad, (target.weight,), alone=True, kept=kept)


@np.errstate(all="ignore")
def _in_float64(x: Array, target: Target, z_loss: float, loss: Array, grad: Array | None, dloss: Any) -> None:
    classes = x.shape[-1]
    weight = None if target.weight is None else _columns(target.weight, x.shape, 1)
    factor = np.broadcast_to(np.asarray(dloss, np.float64), x.shape[:-1])
    spread = target.smoothing / classes  # what every class has of the target, before its weight
    total = float(classes) if weight is None else float(weight.sum(dtype=np.float64))
    of_all = np.broadcast_to(spread, (classes,)) if weight is None else spread * weight.astype(np.float64)
    for rows in _blocks(x, 1):
        labels, ignored, dy = (
            np.reshape(each[rows._rows], -1)  # noqa: SLF001
            for each in (target.labels, target.ignored, factor)
        )
        of_label = np.full(labels.shape, 1 - target.smoothing)
        if weight is not None:
            of_label = of_label * weight[labels]
        largest = rows.max()
        rows.apply(np.subtract, largest)
        log_sum = np.log(rows.sum(np.exp))
        lse = largest + log_sum
        values = _product(of_label, log_sum - _of_labels(rows, labels))
        if spread:
            values += spread * (total * log_sum - _weighted_sum(rows, weight))
        _store(rows, loss, np.where(ignored, 0.0, values + z_loss * lse * lse))
        if grad is None:
            continue
        rows.apply(np.subtract, log_sum)
        rows.apply(np.exp)
        rows.apply(np.multiply, of_label + spread * total + 2 * z_loss * lse)
        if spread:
            rows.apply_columns(np.subtract, of_all)
        _subtract_at(rows, labels, of_label)
        rows.apply(np.multiply, dy)
        _put_rows(rows, ignored)
        rows.store(grad)


def _product(factor: Array, values: Array) -> Array:
    """Return factor * values, and 0 where the factor is 0, whatever the value."""
    return np.where(factor == 0, 0.0, factor * values)


def _store(rows: _Rows, out: Array, values: Array) -> None:
    """Write one number a row, rounded once."""
    rows.store_statistic(out, _round(values, out.dtype))


def _pieces(rows: _Rows) -> Iterator[tuple[Array, Index]]:
    """Yield the pieces of rows, each as rows x columns, and the columns that it has."""
    return zip(rows._each(), rows._pieces, strict=True)  # noqa: SLF001


def _inside(labels: Array, values: Array, piece: Index) -> tuple[Array, Array]:
    """Return the rows whose label is among a piece's columns, and the label's column in the piece."""
    columns = labels - (piece[-1].start or 0)
    row = np.flatnonzero((columns >= 0) & (columns < values.shape[1]))
    return row, columns[row]


def _of_labels(rows: _Rows, labels: Array) -> Array:
    """Return each row's element at its label."""
    found = np.empty(labels.shape)
    for values, piece in _pieces(rows):
        row, column = _inside(labels, values, piece)
        found[row] = values[row, column]
    return found


def _weighted_sum(rows: _Rows, weight: Array | None) -> Array:
    """Return each row's sum of weight * element; an element whose weight is 0 does not count, whatever it is."""
    total: Any = 0.0
    for values, piece in _pieces(rows):
        total = total + (values if weight is None else _product(_of_columns(weight, piece), values)).sum(
            axis=1
        )
    return np.asarray(total)


def _subtract_at(rows: _Rows, labels: Array, amount: Array) -> None:
    """Subtract a number of each row from its element at its label."""

    def step(values: Array, piece: Index) -> None:
        row, column = _inside(labels, values, piece)
        values[row, column] -= amount[row]

    rows._then(step)  # noqa: SLF001


def _put_rows(rows: _Rows, ignored: Array) -> None:
    """Put 0 into whole rows, whatever stands there."""
    rows._then(lambda values, _: np.copyto(values, 0.0, where=ignored[:, None]))  # noqa: SLF001
