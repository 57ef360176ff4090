"""Which elements of NumPy arrays count in a statistic, and how much; for computing in float64, in blocks of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.host.reference import _blocks, _round

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cupynorm.host.reference import Index, Masking, _Rows

Array = np.ndarray[Any, Any]


class Keeping(NamedTuple):
    """What counts: elements that the mask keeps, as often as their weights say; `omit`: nan does not.

    weights: stretched to x's shape; None is 1 for all. refuse: an element that counts and is nan is a ValueError.
    """

    mask: Masking | None = None
    weights: Array | None = None
    omit: bool = False
    refuse: bool = False


ALL = Keeping()


class KeptRows:
    """Some rows of x in float64, and the weight of each element."""

    def __init__(self, rows: _Rows, keeping: Keeping) -> None:
        self._rows = rows
        self._keeping = keeping

    def each(self) -> Iterator[tuple[Index, Array, Array]]:
        """Yield each piece, its elements with 0 for those that do not count, and their weights."""
        for piece, values in zip(self._rows._pieces, self._rows._each(), strict=True):  # noqa: SLF001
            weights = self._weights(piece, values)
            yield piece, np.where(weights == 0, 0.0, values), weights

    def _weights(self, piece: Index, values: Array) -> Array:
        mask, weights, omit, _ = self._keeping
        found = np.ones(values.shape)
        if weights is not None:
            part = weights[self._rows._index(piece)]  # noqa: SLF001
            found *= part.astype(np.float64).reshape(values.shape)
        if mask is not None:
            self._rows._put(found, piece, mask, 0.0)  # noqa: SLF001
        if omit:
            found[np.isnan(values)] = 0.0
        return found

    def total(self, of: Callable[[Array, Array], Array]) -> Array:
        """Return the sum over each row of a function of elements and their weights."""
        return np.asarray(sum(of(values, weights).sum(axis=1) for _, values, weights in self.each()))

    def first(self) -> Array:
        """Return the first element of each row that counts; 0 where none does."""
        found, seen = np.zeros(1), np.zeros(1, bool)
        for _, values, weights in self.each():
            counts = weights != 0
            at = counts.argmax(axis=1)[:, None]
            own = np.take_along_axis(values, at, axis=1)[:, 0]  # 0 where nothing counts
            found = np.where(seen, found, own)
            seen = seen | np.take_along_axis(counts, at, axis=1)[:, 0]
        return found

    def largest(self, of: Callable[[Array], Array], least: float) -> Array:
        """Return the largest that a function gives for an element that counts; `least` where none does."""
        found: Any = least
        for _, values, weights in self.each():
            each = np.where(weights == 0, least, of(values)).max(axis=1)
            found = np.maximum(found, each)
        return np.asarray(found)

    def write(self, out: Array, of: Callable[[Array], Array]) -> None:
        """Write a function of all elements, rounded once; 0 where the mask drops."""
        for piece, values in zip(self._rows._pieces, self._rows._each(), strict=True):  # noqa: SLF001
            result = of(values)
            if self._keeping.mask is not None:
                self._rows._put(result, piece, self._keeping.mask, 0.0)  # noqa: SLF001
            target = out[self._rows._index(piece)]  # noqa: SLF001
            target[...] = _round(result, out.dtype).reshape(target.shape)

    def write_row(self, out: Array | None, values: Array) -> None:
        """Write one number a row, rounded once, if anybody asked for it."""
        if out is not None:
            self._rows.store_statistic(out, _round(values, out.dtype))


def each_kept(x: Array, axes: int, keeping: Keeping) -> Iterator[KeptRows]:
    """Yield the rows of x, a block after another."""
    for rows in _blocks(x, axes):
        yield KeptRows(rows, keeping)


def refuse_nan(x: Array, axes: int, keeping: Keeping) -> None:
    """ValueError if an element that counts is nan and must not be."""
    if not keeping.refuse or not x.size:
        return
    for rows in each_kept(x, axes, keeping):
        for _, values, _ in rows.each():
            if np.isnan(values).any():
                raise ValueError('x holds nan, and nan="raise" asks for an error')
