"""Losses on NumPy arrays: float64 arithmetic in blocks of rows, each result rounded once, as in reference.py.

Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.host.reference import Masking, _blocks, _columns, _of_columns, _round, _Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.host.reference import Index

Array = np.ndarray[Any, Any]


@np.errstate(all="ignore")
def logsumexp(x: Array, axes: int, out: Array, mask: Masking | None = None) -> None:
    """Write log(sum(exp(x))) over the last `axes` axes to out, -inf where nothing is kept.

    It is m + log(sum(exp(x - m))) with the row's maximum m, or with 0 where that is not finite. out has one element
    a row; it may have axes of one element in place of the reduced ones.
    """
    for rows in _blocks(x, axes):
        rows.mask(mask)
        pivot = _pivot(rows.max())
        rows.apply(np.subtract, pivot)
        _store(rows, out, pivot + np.log(rows.sum(np.exp)))


class Target(NamedTuple):
    """The target distribution of each row: q_i = weight_i * ((1 - smoothing) * [i == label] + smoothing / classes).

    labels: int64, of the rows' shape, 0 where `ignored` says that a row does not count. weight: None is 1 for all.
    """

    labels: Array
    ignored: Array
    weight: Array | None
    smoothing: float


@np.errstate(all="ignore")
def cross_entropy(
    x: Array, target: Target, z_loss: float, loss: Array, grad: Array | None, dloss: Any
) -> None:
    """Write sum_i q_i (lse - x_i) + z_loss * lse^2 to loss, and dloss times its gradient to grad; 0 where ignored.

    lse = logsumexp(x), and the gradient is (Q + 2 * z_loss * lse) * p - q with Q = sum_i q_i and p = softmax(x). A term
    of q_i = 0 counts as 0, also where x_i is -inf. grad may be x itself.
    """
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
        _store(rows, loss, np.where(ignored, 0.0, values + z_loss * lse**2))
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


def _pivot(largest: Array) -> Array:
    """Return what may be subtracted from a row so that its exponentials do not overflow: its maximum, if finite."""
    return np.where(np.isfinite(largest), largest, 0.0)


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
