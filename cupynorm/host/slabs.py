"""Rows whose elements lie apart in memory, while rows are neighbours: computed as they lie.

A block is outer x columns x inner: rows that are neighbours (inner), with their columns one after another, and that
several times (outer) where there is a further axis. It comes in pieces of columns, each of which a cache holds. So
every step and every sum goes along memory, and nothing is transposed. Methods are those of Rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import FLOAT64
from cupynorm.host.conversions import FEW, narrow, widen
from cupynorm.host.row_sums import joined
from cupynorm.host.rows import EXACT, WIDE, Rows, _cut, _whole, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.host.reference import Index
    from cupynorm.host.rows import Step
    from cupynorm.host.space import Space

Array = np.ndarray[Any, Any]

# Sums: CHAIN elements in the type of arithmetic, of every EACH-th column, then EACH of these likewise, then all in
# float64. With several columns side by side, steps are long where rows are few.
EACH = 8
CHAIN = 16  # each of its sums is written and read once more (docs/notes/060)
# Pieces have a multiple of so many columns, so that the order of summation follows from the columns alone.
COLUMNS = CHAIN * EACH
WIDER = 4  # caches that a piece takes: long steps along memory win more than a cache does (docs/notes/060)
FEW_ROWS = 256  # of a block that has no place in the result: 1 KiB of float32 is read at a time
MOST_ELEMENTS = 1 << 22  # of such a block, whose memory is kept
RUN = 1 << 13  # bytes to which an operand of rows is repeated: runs cost, but longer ones leave the L1 cache
RESHAPES_VIEWS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # whether reshape() takes copy=False


class Slab(Rows):
    """Some neighbouring rows of x, as outer x columns x inner. Neither masks nor arrays of x's shape beside it."""

    __slots__ = ("_inner", "_room")

    def __init__(
        self, x: Array, at: Index, pieces: Sequence[Index], axes: int, space: Space, home: Array | None
    ) -> None:
        super().__init__(x, at, pieces, axes, space, home)
        self._inner = _inner(x, axes)
        if home is not None and self._lying(home, pieces[0]) is None:
            self._home = None
        self.kept = True
        self._room: list[Array | None] = [None] * len(pieces)  # of pieces that have no place in the result

    def _lying(self, array: Array, piece: Index) -> Array | None:
        """Return a piece of an array of x's shape as outer x columns x inner; None if that takes a copy."""
        return _laid(array[self.index(piece)], self._inner, self.axes)

    def shaped(self, values: Array, piece: Index) -> Array:
        """Return a piece of values in the shape that it has in x."""
        turned = _turned(self._x[self.index(piece)], self._inner, self.axes)
        return _turned(values.reshape(turned.shape), self.axes, self._inner)

    def seen(self, piece: Index) -> Array:
        """Return a piece of x where it lies, if it can be read there, else what source() does."""
        if self._source is None and self._x.dtype == self.space.dtype:
            found = self._lying(self._x, piece)
            if found is not None:
                return found
        return self.source(piece)

    def source(self, piece: Index) -> Array:
        """Return a piece of x as outer x columns x inner, in one block of memory."""
        if self._source is not None:
            return self._source
        inner = self._inner
        part = _turned(self._x[self.index(piece)], inner, self.axes)
        shape = _three(part.shape, inner, self.axes)
        values = self.space.take("source", *shape)
        if part.size <= FEW:
            np.copyto(values.reshape(part.shape), part, casting="unsafe")
        else:
            widen(part, values)
        if self.whole:
            self._source = values
        return values

    def values(self) -> Array:
        """Return the elements of whole rows after all steps so far."""
        return self._advance(0, self._taken())

    def _taken(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps

    def then(self, step: Step) -> None:
        """Let elements go through step(elements, where to write them, their columns), when they are asked for."""
        self._steps.append(step)

    def _advance(self, number: int, steps: Sequence[Step]) -> Array:
        held, piece = self._values[number], self.pieces[number]
        values = self.seen(piece) if held is None else held
        if steps:
            target = self._place(number, values) if held is None else held
            for step in steps:
                step(values, target, piece)
                values = target
            self._values[number] = target
        return values

    def _place(self, number: int, values: Array) -> Array:
        if self._home is not None:
            found = self._lying(self._home, self.pieces[number])
            if found is not None:
                return found
        if self.whole:
            return self.space.take("target", *values.shape)
        room = self._room[number]
        if room is None:
            room = self._room[number] = np.empty(values.shape, self.space.dtype)
        return room

    def store(self, out: Array) -> None:
        """Write the elements, rounded once; by the last step itself where nothing is to be rounded."""
        steps = self._steps
        if not steps or out is self._home or out.dtype != self.space.dtype:
            super().store(out)
            return
        self._steps = []
        for number, piece in enumerate(self.pieces):
            target = self._lying(out, piece)
            if target is None:
                self.write(out, piece, self._advance(number, steps))
            else:
                steps[-1](self._advance(number, steps[:-1]), target, piece)

    def write(self, out: Array, piece: Index, values: Array) -> None:
        """Write the elements of a piece, rounded once."""
        target = _turned(out[self.index(piece)], self._inner, self.axes)
        narrow(np.ascontiguousarray(values), target, self.space.scratch)

    def apply(self, step: np.ufunc, operand: Array | None = None) -> None:
        """Replace every element by step(element), or by step(element, its row's operand)."""
        if operand is None:
            self.then(lambda values, out, _: step(values, out=out))
            return
        of_rows = operand.astype(self.space.dtype)
        self.then(lambda values, out, _: self.step_rows(step, values, of_rows, out))

    def step_rows(self, step: np.ufunc, values: Array, of_rows: Array, out: Array) -> None:
        """Write step(element, its row's operand) to out, of several columns at once where rows are few."""
        outer, cols, rows = values.shape
        operand = of_rows.reshape(outer, 1, rows)
        together = _together(outer, cols, rows * values.itemsize)
        whole = cols // together * together
        apart = outer > 1 and whole < cols
        if (
            together == 1
            or values.size <= FEW
            or (apart and cols * rows <= FEW)
            or not (values.flags.c_contiguous and out.flags.c_contiguous)
        ):
            step(values, operand, out=out)
            return
        several = self.space.take("several", outer, together, rows)
        np.copyto(several, operand)
        cut = (-1, together * rows)
        if whole == cols:
            step(values.reshape(outer, *cut), several.reshape(outer, 1, -1), out=out.reshape(outer, *cut))
            return
        # one after another: NumPy computes what has gaps, and is its own result, in memory that it fetches
        for given, each, target in zip(values, several, out, strict=True):
            step(given[:whole].reshape(cut), each.reshape(-1), out=target[:whole].reshape(cut))
        step(values[:, whole:], operand, out=out[:, whole:])

    def step_columns(self, step: np.ufunc, values: Array, columns: Array, out: Array) -> None:
        """Write step(element, the column's operand) to out."""
        outer, cols, rows = values.shape
        if rows >= WIDE or (outer == 1 and rows >= COLUMNS):
            step(values, columns[:, None], out=out)
            return
        several = self.space.take("columns", cols, rows)  # else NumPy begins anew with every column
        np.copyto(several, columns[:, None])
        step(values, several, out=out)

    def columns(self, operand: Array, piece: Index) -> Array:
        """Return the elements of what columns_of() gave for the columns of a piece."""
        shape = self._x.shape[self._x.ndim - self.axes :]
        found: Array = operand.reshape(shape)[piece].astype(self.space.dtype, copy=False).reshape(-1)
        return found

    def along(self, of_rows: Array) -> Array:
        """Return a number of each row so that it broadcasts to values."""
        return of_rows.reshape(self.seen(self.pieces[0]).shape[0], 1, -1)

    def places(self, row: Array, column: Array) -> tuple[Array, ...]:
        """Return where the elements of these rows and columns are in values."""
        outer, inner = np.divmod(row, self.seen(self.pieces[0]).shape[2])
        return outer, column, inner

    def column(self, share: float) -> Array:
        """Return one element of each row: the first (0), the last (1), or one that lies between."""
        shape = self._x.shape[self._x.ndim - self.axes :]
        at: tuple[Any, ...] = np.unravel_index(int(share * (math.prod(shape) - 1)), shape)
        index: Any = (*self.at, ..., *at)
        found: Array = self._x[index].astype(self.space.dtype).reshape(-1)
        return found

    def max(self) -> Array:
        """Return the maximum of each row; nan where the row has one."""
        return joined(np.maximum, [self.reduced(np.maximum, values) for _, values in self.each()])

    def sum(self) -> Array:
        """Return the sum of each row, in float64."""
        total: Array | None = None
        for _, values in self.each():
            total = column_sums(values, None, total, self.space)
        return np.asarray(total)

    def exact_sum(self) -> Array:
        """Return the sum of each row, in which float32 values are added up in float64."""
        wide = self.space.other("wide", FLOAT64)
        total: Array | None = None
        for _, values in self.each():
            outer, cols, inner = values.shape
            together = max(COLUMNS, EXACT // (outer * inner) // COLUMNS * COLUMNS)
            for begin in range(0, cols, together):
                some = values[:, begin : begin + together]
                room = wide.take("room", *some.shape)
                np.copyto(room, some)
                total = column_sums(room, None, total, wide)
        return np.asarray(total)

    def sum_of_squares(self) -> Array:
        """Return the sum of the squares of each row, in float64."""
        total: Array | None = None
        for _, values in self.each():
            total = column_sums(values, values, total, self.space)
        return np.asarray(total)

    def sums_of(self, step: np.ufunc, *, largest: bool = False) -> tuple[Array, Array]:
        """Return the sum over each row of step(element), in float64, and the largest; elements are not kept."""
        total: Array | None = None
        most: list[Array] = []
        last: Step = lambda values, out, _: step(values, out=out)  # noqa: E731
        steps = [*self._taken(), last]
        for piece in self.pieces:
            values = self._passed(piece, steps)
            total = column_sums(values, None, total, self.space)
            if largest:
                most.append(self.reduced(np.maximum, values))
        found = np.asarray(total)
        return found, joined(np.maximum, most).astype(np.float64) if largest else found

    def _passed(self, piece: Index, steps: Sequence[Step]) -> Array:
        """Return a piece of x after some steps, in memory that the next piece takes."""
        values = self.seen(piece)
        room = self.space.take("passing", *values.shape)
        for step in steps:
            step(values, room, piece)
            values = room
        return values

    def sums(self, values: Array, others: Array | None = None, before: Array | None = None) -> Array:
        """Return the sum of each row of a piece, or of its products with another's elements, in float64."""
        return column_sums(values, others, before, self.space)

    def reduced(self, step: np.ufunc, values: Array) -> Array:
        """Return the maximum or minimum of each row of a piece."""
        outer, cols, rows = values.shape
        whole = cols // EACH * EACH
        if rows >= WIDE or not whole:
            return np.asarray(step.reduce(values, axis=1)).reshape(-1)
        found = step.reduce(values[:, :whole].reshape(outer, -1, EACH * rows), axis=1)
        both = np.concatenate((found.reshape(outer, EACH, rows), values[:, whole:]), axis=1)
        return np.asarray(step.reduce(both, axis=1)).reshape(-1)

    def again(self, which: Array) -> Rows:
        """Return those of the rows that are to be made from their source once more: a copy, or all of them."""
        if which.all():
            self.reset()
            return self
        parts = [self._some(self.seen(piece), which) for piece in self.pieces]
        return rows_of(np.ascontiguousarray(np.concatenate(parts, axis=1)), self.space.dtype)

    def put(self, which: Array, made: Rows) -> None:
        """Take over what was made of those rows."""
        if made is self:
            return
        rows, begin = made.values(), 0
        for _, values in self.each():
            outer, inner = np.divmod(np.flatnonzero(which), values.shape[2])
            values[outer, :, inner] = rows[:, begin : begin + values.shape[1]]
            begin += values.shape[1]

    @staticmethod
    def _some(values: Array, which: Array) -> Array:
        outer, inner = np.divmod(np.flatnonzero(which), values.shape[2])
        found: Array = values[outer, :, inner]
        return found


class Passing(Slab):
    """The same, of which nothing is kept: each pass begins with x, and only what it reads crosses to memory."""

    __slots__ = ()

    def __init__(
        self, x: Array, at: Index, pieces: Sequence[Index], axes: int, space: Space, home: Array | None
    ) -> None:
        super().__init__(x, at, pieces, axes, space, home)
        self.kept = False

    def _advance(self, number: int, steps: Sequence[Step]) -> Array:
        return self._passed(self.pieces[number], steps)


def _inner(x: Array, axes: int) -> int:
    """Return how many of the axes before the last `axes` have smaller steps than these."""
    at = x.ndim - axes
    steps = x.strides
    least = min([abs(step) for step, extent in zip(steps[at:], x.shape[at:], strict=True) if extent > 1])
    count = 0
    while count < at and 0 < abs(steps[at - 1 - count]) < least:
        count += 1
    return count


def _turned(part: Array, inner: int, axes: int) -> Array:
    """Return a view of x's part with its inner axes last."""
    if inner == axes == 1:
        return part.swapaxes(-1, -2)
    at, count = part.ndim - axes - inner, part.ndim
    return part.transpose((*range(at), *range(at + inner, count), *range(at, at + inner)))


def _three(shape: tuple[int, ...], inner: int, axes: int) -> tuple[int, int, int]:
    """Return the shape of outer x columns x inner, given that of what is turned."""
    at = len(shape) - inner - axes
    return math.prod(shape[:at]), math.prod(shape[at : at + axes]), math.prod(shape[at + axes :])


def _reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    """Return a view of another shape. Raises ValueError or AttributeError where only a copy has it."""
    if RESHAPES_VIEWS:
        return np.reshape(array, shape, copy=False)
    found: Array = array.view()
    found.shape = shape
    return found


def _laid(part: Array, inner: int, axes: int) -> Array | None:
    """Return a view of x's part as outer x columns x inner; None if its strides do not fit together."""
    turned = _turned(part, inner, axes)
    if turned.ndim == 2 and inner == axes == 1:  # noqa: PLR2004
        return turned[None] if turned.strides[1] == turned.itemsize or turned.shape[1] == 1 else None
    try:
        found = _reshaped(turned, _three(turned.shape, inner, axes))
    except (ValueError, AttributeError):
        return None
    return found if found.shape[2] == 1 or found.strides[2] == found.itemsize else None


def _together(outer: int, cols: int, row: int) -> int:
    """Return of how many columns, of `row` bytes each, a run is: of RUN bytes at most, but of one column at least.

    Where there are several outer ones, a divisor of the columns leaves no gaps.
    """
    most = min(cols, max(1, RUN // row))
    if outer == 1:
        return most
    return next((each for each in range(most, most // 2, -1) if cols % each == 0), most)


def column_sums(values: Array, others: Array | None, before: Array | None, space: Space) -> Array:
    """Return the sum of each row, or of its products with another's elements, in float64.

    Both are outer x columns x inner. before: what is added to, the sums of COLUMNS times any number of columns. The
    order of summation depends on the number of columns alone. space: has room for what lies between.
    """
    outer, cols, rows = values.shape
    if rows == 1:  # NumPy would take one axis for one row, and add up in another order
        twice = None if others is None else np.repeat(others, 2, axis=2)
        start = None if before is None else np.repeat(before, 2)
        return column_sums(np.repeat(values, 2, axis=2), twice, start, space)[::2]
    total: Any = 0.0 if before is None else before.reshape(outer, rows)
    several, beside = divmod(cols, COLUMNS)
    groups = [(several, COLUMNS), (1, beside // EACH * EACH)]  # how many, and of how many columns
    groups = [(number, columns) for number, columns in groups if number and columns]
    count, begin, at = sum(number for number, _ in groups), 0, 0
    if groups:
        parts = space.take("parts", outer, count, EACH, rows)
        for number, columns in groups:
            end, shape = begin + number * columns, (outer, number, -1, EACH, rows)
            some, part = values[:, begin:end].reshape(shape), parts[:, at : at + number]
            if others is None:
                np.add.reduce(some, axis=2, out=part)
            else:
                np.einsum("akcer,akcer->aker", some, others[:, begin:end].reshape(shape), out=part)
            begin, at = end, at + number
        sums = np.add.reduce(parts, axis=2, out=space.take("sums", outer, count, rows))
        found = space.other("wide", FLOAT64).take("sums", outer, count, rows)
        np.copyto(found, sums)
        if before is not None:
            found[:, 0] += total
        total = np.add.reduce(found, axis=1)
    if begin == cols:
        return np.asarray(total).reshape(-1)
    rest = values[:, begin:].astype(np.float64)
    total = total + (rest if others is None else rest * others[:, begin:]).sum(axis=1)
    return np.asarray(total).reshape(-1)


def lie_apart(x: Array, axes: int) -> bool:
    """Say whether x's rows are neighbours in memory, and their elements are not."""
    at = x.ndim - axes
    if not at or math.prod(x.shape[at:]) == 1:
        return False
    inner = _inner(x, axes)
    return inner > 0 and _laid(x[(slice(1),) * (at - inner)], inner, axes) is not None


def slabs_of(
    x: Array, axes: int, limit: int, most: int, *, stays: bool
) -> tuple[Sequence[Index], Sequence[Index]]:
    """Return the blocks that x is cut into, and the pieces, of about `limit` elements, that each comes in.

    most: elements of a block that comes in one piece. stays: whether values have a place in the result, or need none.
    """
    at = x.ndim - axes
    leading, trailing, inner = x.shape[:at], x.shape[at:], _inner(x, axes)
    rows, cols = math.prod(leading[at - inner :]), math.prod(trailing)
    most *= WIDER
    if rows * cols <= most:
        return _cut(leading, most // cols // rows * rows), [_whole(axes)]
    if not stays:
        width = max(FEW_ROWS, most // cols)
        if width * cols <= MOST_ELEMENTS:
            return _cut(leading, width), [_whole(axes)]
        width = max(COLUMNS, MOST_ELEMENTS // cols)
    else:
        width = max(1, WIDER * limit // COLUMNS)
    width = min(width, rows)
    together = WIDER * limit // width // COLUMNS * COLUMNS if axes == 1 else COLUMNS
    return _cut(leading, width), _cut(trailing, max(COLUMNS, together))
