"""Which elements of NumPy arrays count in a statistic, and how much; for computing in float64, in blocks of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import is_integer
from cupynorm._values import NamedTuple
from cupynorm.host.reference import _blocks, _round
from cupynorm.host.row_sums import joined

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

    def __init__(self, rows: _Rows, keeping: Keeping, room: dict[str, Array]) -> None:
        self.rows = rows
        self._keeping = keeping
        self._room = room
        self._held: tuple[Array, Array] | None = None
        self._bounds: tuple[Array, Array] | None = None

    def take(self, name: str, like: Array) -> Array:
        """Return room for as many numbers as `like` has; the same at each call of this name."""
        held = self._room.get(name)
        if held is None or held.size < like.size:
            held = self._room[name] = np.empty(like.size)
        return held[: like.size].reshape(like.shape)

    def each(self) -> Iterator[tuple[Array, Array]]:
        """Yield the elements of each piece, with 0 for those that do not count, and their weights."""
        if self._held is not None:
            yield self._held
            return
        pieces = self.rows._pieces  # noqa: SLF001
        for piece, values in zip(pieces, self.rows._each(), strict=True):  # noqa: SLF001
            found = self._counted(piece, values)
            if len(pieces) == 1:
                self._held = found
            yield found

    def _counted(self, piece: Index, values: Array) -> tuple[Array, Array]:
        mask, weights, omit, _ = self._keeping
        found, counted = self.take("weights", values), self.take("counted", values)
        found[...] = 1.0
        if weights is not None:
            found[...] = weights[self.rows._index(piece)].reshape(values.shape)  # noqa: SLF001
        if mask is not None:
            self.rows._put(found, piece, mask, 0.0)  # noqa: SLF001
        if omit:
            np.copyto(found, 0.0, where=np.isnan(values))
        if self._bounds is not None:
            low, high = (each[:, None] for each in self._bounds)
            np.copyto(found, 0.0, where=~((values >= low) & (values <= high)))
        np.copyto(counted, values)
        np.copyto(counted, 0.0, where=found == 0)
        return counted, found

    def within(self, low: Array, high: Array) -> None:
        """Let nothing count but what is within its row's bounds."""
        self._bounds, self._held = (low, high), None

    def median(self) -> Array:
        """Return the median of each row's elements that count; nan where none does."""
        parts = [(values.copy(), weights.copy()) for values, weights in self.each()]
        values, weights = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        values[weights == 0] = np.inf
        values.sort(axis=1)
        count = (weights != 0).sum(axis=1)
        middle = [
            np.take_along_axis(values, np.maximum(at, 0)[:, None], 1)[:, 0]
            for at in ((count - 1) // 2, count // 2)
        ]
        return np.where(count == 0, np.nan, 0.5 * middle[0] + 0.5 * middle[1])

    def write_clipped(self, out: Array) -> None:
        """Write all elements, and nan in place of what does not count."""
        for piece, values in zip(self.rows._pieces, self.rows._each(), strict=True):  # noqa: SLF001
            _, weights = self._counted(piece, values)
            target = out[self.rows._index(piece)]  # noqa: SLF001
            target[...] = _round(np.where(weights == 0, np.nan, values), out.dtype).reshape(target.shape)

    def count(self) -> Array:
        """Return the sum of the weights of each row."""
        return joined(np.add, [weights.sum(axis=1) for _, weights in self.each()])

    def total(self, of: Callable[[Array], tuple[Array, Array | None]]) -> Array:
        """Return the sum over each row of weight * a * b, where of(elements) gives a, and b or None for 1."""

        def each(values: Array, weights: Array) -> Array:
            a, b = of(values)
            if b is None:
                return np.asarray(np.vecdot(a, weights))
            np.multiply(a, weights, out=(product := self.take("product", values)))
            return np.asarray(np.vecdot(product, b))

        return joined(np.add, [each(values, weights) for values, weights in self.each()])

    def first(self) -> Array:
        """Return the first element of each row that counts; 0 where none does."""
        found, seen = np.zeros(1), np.zeros(1, bool)
        for values, weights in self.each():
            counts = weights != 0
            at = counts.argmax(axis=1)[:, None]
            own = np.take_along_axis(values, at, axis=1)[:, 0]  # 0 where nothing counts
            found = np.where(seen, found, own)
            seen = seen | np.take_along_axis(counts, at, axis=1)[:, 0]
        return found

    def largest(self, of: np.ufunc) -> Array:
        """Return the largest that a function gives for an element that counts; -inf where none does."""

        def each(values: Array, weights: Array) -> Array:
            of(values, out=(found := self.take("product", values)))
            np.copyto(found, -np.inf, where=weights == 0)
            return np.asarray(found.max(axis=1))

        return joined(np.maximum, [each(values, weights) for values, weights in self.each()])

    def write(self, out: Array, of: Callable[[Array], Array]) -> None:
        """Write a function of all elements, rounded once; 0 where the mask drops."""
        for piece, values in zip(self.rows._pieces, self.rows._each(), strict=True):  # noqa: SLF001
            result = of(values)
            if self._keeping.mask is not None:
                self.rows._put(result, piece, self._keeping.mask, 0.0)  # noqa: SLF001
            target = out[self.rows._index(piece)]  # noqa: SLF001
            target[...] = _round(result, out.dtype).reshape(target.shape)

    def replace(self, origin: Array, rest: Array, factor: Array) -> None:
        """Replace every element by (element - origin - rest) * factor, its row's, and by 0 where the mask drops."""
        self._held = None

        def step(values: Array, piece: Index) -> None:
            for operand, each in ((np.subtract, origin), (np.subtract, rest), (np.multiply, factor)):
                operand(values, each[:, None], out=values)
            if self._keeping.mask is not None:
                self.rows._put(values, piece, self._keeping.mask, 0.0)  # noqa: SLF001

        self.rows._then(step)  # noqa: SLF001

    def write_row(self, out: Array | None, values: Array) -> None:
        """Write one number a row, rounded once, if anybody asked for it."""
        if out is not None:
            self.rows.store_statistic(out, _round(values, out.dtype))


def each_kept(x: Array, axes: int, keeping: Keeping) -> Iterator[KeptRows]:
    """Yield the rows of x, a block after another, which share their room."""
    room: dict[str, Array] = {}
    for rows in _blocks(x, axes):
        yield KeptRows(rows, keeping, room)


def refuse_nan(x: Array, axes: int, keeping: Keeping) -> None:
    """ValueError if an element that counts is nan and must not be."""
    if not keeping.refuse or not x.size or is_integer(x.dtype):
        return
    for rows in each_kept(x, axes, keeping):
        for values, _ in rows.each():
            if np.isnan(values).any():
                raise ValueError('x holds nan, and nan="raise" asks for an error')


def refusing(run: Callable[..., None]) -> Callable[..., None]:
    """Return what an op does on NumPy arrays, and a ValueError before it writes where an element that counts is nan."""

    def checked(x: Array, gamma: Any, beta: Any, axes: int, *others: Any, **extras: Any) -> None:
        refuse_nan(x, axes, Keeping(extras["extras"].mask if extras else None, refuse=True))
        run(x, gamma, beta, axes, *others, **extras)

    return checked


def rounded_towards(end: float, bounds: Array, dtype: np.dtype[Any]) -> Array:
    """Return bounds rounded to `dtype` towards an infinity: elements of that type lie within both or neither."""
    nearest = bounds.astype(dtype)
    outside = nearest < bounds if end > 0 else nearest > bounds
    return np.where(outside, np.nextafter(nearest, dtype.type(end)), nearest)
