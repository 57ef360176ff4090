"""Rows of a NumPy array, a block after another, in float32 or float64: what the fast ops on NumPy arrays are made of.

A block has as many bytes as one of reference.py, and stays in a core's cache from its load to its store, so only x and
the result cross to memory. It is read where it lies, and computed where the result will be, if both have the type of
arithmetic. Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import FLOAT64
from cupynorm.host import reference
from cupynorm.host.conversions import FEW, narrow, round_quantized, widen
from cupynorm.host.reference import LARGEST, _tiles
from cupynorm.host.row_sums import joined, row_sums
from cupynorm.host.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynorm.host.philox import Dropout
    from cupynorm.host.reference import Adding, Index, Masking, Quantizing

    Step = Callable[["Array", "Array", Index], None]

Array = np.ndarray[Any, Any]

WIDE = 512  # columns from which on a broadcast operand is read where it lies, rather than by NumPy's buffers
EXACT = 1 << 16  # elements that are converted to float64 at a time
# The least scale of a row that has all digits: its largest element / scale is within the range of the dtype.
LEAST_SCALE = 2.0**-126
BUFFER = 8192  # elements of NumPy's buffers: a row of more is read where it lies


class Rows:
    """Some rows of x: what they are made from (`source`), and what has been made of them.

    Steps wait until somebody asks for values. Where `kept` they are taken once, else again in every pass: then the rows
    are one row, which comes in pieces, and has no place to stay. home: the result, if values may be computed there.
    """

    __slots__ = (
        "_home",
        "_nan",
        "_prepare",
        "_source",
        "_steps",
        "_values",
        "_x",
        "at",
        "axes",
        "kept",
        "pieces",
        "space",
        "whole",
    )

    def __init__(
        self, x: Array, at: Index, pieces: Sequence[Index], axes: int, space: Space, home: Array | None
    ) -> None:
        self.at = at
        self.pieces = pieces
        self.space = space
        self.whole = len(pieces) == 1
        self.kept = self.whole or home is not None
        self._x = x
        self.axes = axes
        self._home = home
        self._prepare: list[Step] = []
        self._nan: dict[int, Array] = {}
        self._steps: list[Step] = []
        self._source: Array | None = None
        self._values: list[Array | None] = [None] * len(pieces)

    def index(self, piece: Index) -> tuple[Any, ...]:
        """Return where a piece of these rows is in x."""
        return (*self.at, ..., *piece)

    def shaped(self, values: Array, piece: Index) -> Array:
        """Return a piece of values in the shape that it has in x."""
        found: Array = values.reshape(self._x[self.index(piece)].shape)
        return found

    def tile(self, piece: Index) -> Index:
        """Return where a piece is in x, a slice for each axis."""
        between = (slice(None),) * (self._x.ndim - len(self.at) - self.axes)
        return (*self.at, *between, *piece)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of x's part without the last axes."""
        shape: tuple[int, ...] = self._x[self.at].shape
        return shape[: len(shape) - self.axes]

    def source(self, piece: Index) -> Array:
        """Return a piece of x, prepared, as rows x columns: to be read."""
        values: Array
        if self._source is not None:
            return self._source
        part = self._x[self.index(piece)]
        axes = part.ndim - self.axes
        flat = (math.prod(part.shape[:axes]), math.prod(part.shape[axes:]))
        if part.dtype == self.space.dtype and part.flags.c_contiguous:
            values = part.reshape(flat)
            if self._prepare:
                prepared = self.space.take("source", *flat)
                np.copyto(prepared, values)
                values = prepared
        elif part.size <= FEW:
            values = part.astype(self.space.dtype, order="C").reshape(flat)
        else:
            values = self.space.take("source", *flat)
            widen(part, values)
        for step in self._prepare:
            step(values, values, piece)
        if self.whole:
            self._source = values
        return values

    def seen(self, piece: Index) -> Array:
        """Return the same, which may lie apart: to be read."""
        return self.source(piece)

    def each(self) -> Iterator[tuple[Index, Array]]:
        """Yield each piece and its elements, rows x columns, after all steps so far. To be gone through to the end."""
        steps = self._steps
        if self.kept:
            self._steps = []
        for number, piece in enumerate(self.pieces):
            yield piece, self._advance(number, steps)

    def values(self) -> Array:
        """Return the elements of whole rows after all steps so far."""
        held = self._values[0]
        return self.source(self.pieces[0]) if held is None else held

    def _advance(self, number: int, steps: Sequence[Step]) -> Array:
        held, piece = self._values[number], self.pieces[number]
        values: Array = self.source(piece) if held is None else held
        if steps:
            target = self._target(piece, values) if held is None else held
            for step in steps:
                step(values, target, piece)
                values = target
            if self.kept:
                self._values[number] = target
        return values

    def _target(self, piece: Index, values: Array) -> Array:
        if self._home is None:
            return self.space.take("target", *values.shape)
        home: Array = self._home[self.index(piece)].reshape(values.shape)
        return home

    def reset(self) -> None:
        """Forget what was made of the source."""
        self._steps = []
        self._values = [None] * len(self.pieces)

    def again(self, which: Array) -> Rows:
        """Return those of the rows that are to be made from their source once more: a copy, or all of them."""
        if not self.whole or which.all():
            self.reset()
            return self
        return rows_of(self.source(self.pieces[0])[which], self.space.dtype)

    def put(self, which: Array, made: Rows) -> None:
        """Take over what was made of those rows."""
        if made is not self:
            self.values()[which] = made.values()

    def then(self, step: Step) -> None:
        """Let elements go through step(elements, where to write them, their columns)."""
        if self.whole:
            self._advance(0, (step,))
        else:
            self._steps.append(step)

    def apply(self, step: np.ufunc, operand: Array | None = None) -> None:
        """Replace every element by step(element), or by step(element, its row's operand)."""
        operands = () if operand is None else (operand.astype(self.space.dtype)[:, None],)
        if not self.whole:
            self.then(lambda values, out, _: step(values, *operands, out=out))
            return
        held = values = self._values[0]
        if held is None or values is None:
            values = self.source(self.pieces[0])
            held = self._values[0] = self._target(self.pieces[0], values)
        step(values, *operands, out=held)

    def step_rows(self, step: np.ufunc, values: Array, of_rows: Array, out: Array) -> None:
        """Write step(element, its row's operand) to out."""
        step(values, of_rows[:, None], out=out)

    def apply_columns(self, step: np.ufunc, operand: Array | None) -> None:
        """Replace every element by step(element, the column's operand); None: leave them."""
        if operand is not None:
            self.then(
                lambda values, out, piece: self.step_columns(step, values, self.columns(operand, piece), out)
            )

    def step_columns(self, step: np.ufunc, values: Array, columns: Array, out: Array) -> None:
        """Write step(element, the column's operand) to out, several rows at once where they are narrow.

        NumPy would stretch the operand once more for each.
        """
        rows, cols = values.shape
        together = BUFFER // cols + 1
        whole = rows // together * together
        if cols >= WIDE or not whole:
            step(values, columns, out=out)
            return
        cut = (-1, together * cols)
        step(
            values[:whole].reshape(cut), self.space.repeated(columns, together), out=out[:whole].reshape(cut)
        )
        if whole < rows:
            step(values[whole:], columns, out=out[whole:])

    def columns(self, operand: Array, piece: Index) -> Array:
        """Return the elements of what columns_of() gave for the columns of a piece."""
        if self.whole:
            return operand
        found: Array = operand[piece].astype(self.space.dtype, copy=False).reshape(-1)
        return found

    def along(self, of_rows: Array) -> Array:
        """Return a number of each row so that it broadcasts to values."""
        return of_rows[:, None]

    def places(self, row: Array, column: Array) -> tuple[Array, ...]:
        """Return where the elements of these rows and columns are in values."""
        return row, column

    def column(self, share: float) -> Array:
        """Return one element of each row: the first (0), the last (1), or one that lies between."""
        values = self.source(self.pieces[int(share * (len(self.pieces) - 1))])
        found = values[:, int(share * (values.shape[1] - 1))]
        return found if self.whole else found.copy()

    def max(self) -> Array:
        """Return the maximum of each row; nan where the row has one."""
        if self.whole:
            return np.asarray(np.maximum.reduce(self.values(), axis=1))
        return joined(np.maximum, [values.max(axis=1) for _, values in self.each()])

    def sum(self) -> Array:
        """Return the sum of each row, in float64."""
        if self.whole:
            return row_sums(self.values())
        return joined(np.add, [row_sums(values) for _, values in self.each()])

    def exact_sum(self) -> Array:
        """Return the sum of each row, in which float32 values are added up in float64."""
        wide = self.space.other("wide", FLOAT64)
        parts = []
        for _, values in self.each():
            together = max(1, EXACT // values.shape[1])
            found = []
            for begin in range(0, len(values), together):
                some = values[begin : begin + together]
                room = wide.take("room", *some.shape)
                np.copyto(room, some)
                found.append(row_sums(room))
            parts.append(np.concatenate(found))
        return joined(np.add, parts)

    def sum_of_squares(self) -> Array:
        """Return the sum of the squares of each row, in float64."""
        if self.whole:
            return row_sums(self.values(), self.values())
        return joined(np.add, [row_sums(values, values) for _, values in self.each()])

    def sums_of(self, step: np.ufunc, *, largest: bool = False) -> tuple[Array, Array]:
        """Return the sum over each row of step(element), which is not negative, in float64; elements are lost.

        largest: and the largest of these, or what takes less time: twice their mean, weighted by themselves. Where that
        is below half of the sum, so is the largest.
        """
        self.apply(step)
        total = self.sum()
        return total, 2 * self.sum_of_squares() / total if largest else total

    def sums(self, values: Array, others: Array | None = None, before: Array | None = None) -> Array:
        """Return the sum of each row of a piece, or of its products with another's elements, in float64.

        before: what the pieces before it have, if there are any.
        """
        found = row_sums(values, others)
        return found if before is None else before + found

    def reduced(self, step: np.ufunc, values: Array) -> Array:
        """Return the maximum or minimum of each row of a piece."""
        return np.asarray(step.reduce(values, axis=1))

    def prepare(self, step: Step) -> None:
        """Let the source go through a step; before anything is made of it."""
        self._prepare.append(step)

    def mask(self, mask: Masking | None) -> None:
        """Scale, add the bias, and put -inf where elements are dropped, whatever stood there; before all else."""
        if mask is None:
            return

        def step(values: Array, out: Array, piece: Index) -> None:
            if mask.scale != 1:
                np.multiply(values, self.space.dtype.type(mask.scale), out=out)
            if mask.bias is not None:
                self._with_elements(np.add, out, mask.bias, piece)
            self._put(out, piece, mask, -np.inf)

        self.prepare(step)

    def drop_nan(self) -> None:
        """Put -inf in place of nan, and note where it was; before all else but a mask."""

        def step(values: Array, out: Array, piece: Index) -> None:
            self._nan[self.start(piece)] = nan = np.isnan(values)
            np.copyto(out, -np.inf, where=nan)

        self.prepare(step)

    def restore_nan(self) -> None:
        """Put nan where drop_nan() has found it."""
        self.then(lambda _, out, piece: np.copyto(out, np.nan, where=self._nan[self.start(piece)]))

    def drop_from_source(self, mask: Masking | None, fill: float) -> None:
        """Put `fill` into the source where elements are dropped."""
        if mask is not None:
            self.prepare(lambda _, out, piece: self._put(out, piece, mask, fill))

    def drop(self, mask: Masking | None, fill: float) -> None:
        """Put `fill` where elements are dropped."""
        if mask is not None:
            self.then(lambda _, out, piece: self._put(out, piece, mask, fill))

    def _put(self, values: Array, piece: Index, mask: Masking, fill: float) -> None:
        if mask.where is not None:
            kept = _each_once(mask.where[self.index(piece)])
            self._fill(values, kept != 0, piece, fill)
        if mask.begin is not None and mask.end is not None:
            start, stop, _ = piece[-1].indices(self._x.shape[-1])
            begin, end = (
                np.clip(bound[self.at].reshape(-1) - start, 0, stop - start)
                for bound in (mask.begin, mask.end)
            )
            if stop - start < WIDE:
                column = np.arange(stop - start, dtype=np.int32)
                begin, end = (bound.astype(np.int32)[:, None] for bound in (begin, end))
                np.copyto(values, fill, where=(column < begin) | (column >= end))
                return
            for row, first, last in zip(values, begin.tolist(), end.tolist(), strict=True):
                row[:first] = fill
                row[last:] = fill

    def _fill(self, values: Array, kept: Array, piece: Index, fill: float) -> None:
        """Put `fill` where `kept` does not hold, by their bits: NumPy's copyto takes 3 ns where masks are random."""
        words = np.dtype(f"i{values.itemsize}")
        ones = -kept.astype(words)  # all bits, or none
        shaped = values.view(words).reshape(self._x[self.index(piece)].shape)
        np.bitwise_and(shaped, ones, out=shaped)
        if fill:
            bits = values.dtype.type(fill).view(words)
            np.bitwise_or(shaped, ~ones & bits, out=shaped)

    def _with_elements(
        self, step: np.ufunc, out: Array, operand: Array, piece: Index, factor: float = 1.0
    ) -> None:
        """Replace every element by step(element, factor * the operand's element); the operand has x's shape."""
        part = _each_once(operand[self.index(piece)])
        if part.dtype != self.space.dtype:
            wide = self.space.take("operand", 1, part.size)
            widen(part, wide)
            part = wide.reshape(part.shape)
        if factor != 1:
            part = part * self.space.dtype.type(factor)
        shaped = out.reshape(self._x[self.index(piece)].shape)
        step(shaped, part, out=shaped)

    def add(self, add: Adding | None) -> None:
        """Replace every element by dropout(element + the column's bias) + alpha * residual; write that to sum_out."""
        if add is None:
            return
        columns = columns_of(add.bias, self._x.shape, self.axes, self.space.dtype)

        def step(values: Array, out: Array, piece: Index) -> None:
            if columns is not None:
                np.add(values, self.columns(columns, piece), out=out)
            if add.dropout is not None:
                self._drop_out(out, piece, add.dropout)
            self._with_elements(np.add, out, add.residual, piece, add.alpha)
            if add.sum_out is not None:
                self.write(add.sum_out, piece, out)

        self.prepare(step)

    def drop_out(self, drop: Dropout) -> None:
        """Multiply kept elements by the dropout's factor, and set the others to 0."""
        self.prepare(lambda _, out, piece: self._drop_out(out, piece, drop))

    def _drop_out(self, values: Array, piece: Index, drop: Dropout) -> None:
        kept = drop.kept(self.start(piece), values.size).reshape(values.shape)
        np.multiply(values, values.dtype.type(drop.factor), out=values)
        self._fill(values, kept.reshape(self._x[self.index(piece)].shape), piece, 0.0)

    def start(self, piece: Index) -> int:
        """Return the place of a piece's first element in x's C order."""
        at = [each.start or 0 for each in self.at]
        at += [0] * (self._x.ndim - len(at))
        for axis, each in zip(range(-len(piece), 0), piece, strict=True):
            at[axis] = each.start or at[axis]
        place = 0
        for index, extent in zip(at, self._x.shape, strict=True):
            place = place * extent + index
        return place

    def store(self, out: Array) -> None:
        """Write the elements, rounded once."""
        for number, (piece, values) in enumerate(self.each()):
            if self._home is not out or self._values[number] is None:  # else they are there
                self.write(out, piece, values)

    def quantize(self, out: Array, how: Quantizing | None) -> None:
        """Divide elements by their scale, and round them to numbers of out's dtype; write rows' own scales."""
        if how is None:
            return
        scale: Any = how.scale
        within = False
        if scale is None:
            sizes = [
                self.reduced(np.maximum, np.abs(values, out=self.space.take("sizes", *values.shape)))
                for _, values in self.each()
            ]
            largest = joined(np.maximum, sizes).astype(np.float64)
            self.store_statistic(how.scales, largest / LARGEST[out.dtype.name])
            # elements are divided by the stored scale, by which the caller will multiply them
            scale = how.scales[self.at].astype(np.float64).reshape(-1)  # type: ignore[index]
            within = bool((np.isfinite(scale) & ((scale >= LEAST_SCALE) | (scale == 0))).all())
        else:
            scale = np.full(math.prod(self.extents), scale)
        self.apply(np.divide, np.where(scale == 0, np.inf, scale))
        self.then(lambda values, room, _: round_quantized(values, out.dtype, room, within=within))

    def write(self, out: Array, piece: Index, values: Array) -> None:
        """Write the elements of a piece, rounded once."""
        narrow(values, out[self.index(piece)], self.space.scratch)

    def store_statistic(self, out: Array | None, values: Array) -> None:
        """Write one value a row, if anybody asked for it."""
        if out is not None:
            out[self.at] = values.reshape(out[self.at].shape)


def rows_of(values: Array, dtype: np.dtype[Any]) -> Rows:
    """Return rows x columns that are in memory as one block."""
    return Rows(values, _whole(1), [_whole(1)], 1, Space(dtype), None)


def _whole(axes: int) -> Index:
    return (slice(None),) * axes


def _cut(shape: tuple[int, ...], limit: int) -> Sequence[Index]:
    """Return the tiles of at most `limit` elements that an array of this shape is cut into."""
    return [_whole(len(shape))] if math.prod(shape) <= limit else list(_tiles(shape, limit))


def _each_once(part: Array) -> Array:
    """Return what a broadcast array holds, each element once, with as many axes."""
    return part[tuple(slice(1) if stride == 0 else slice(None) for stride in part.strides)]


def columns_of(
    parameter: Array | None, shape: tuple[int, ...], axes: int, dtype: np.dtype[Any]
) -> Array | None:
    """Return gamma or beta: where rows are whole, one element per column in the type of arithmetic, else stretched."""
    if parameter is None:
        return None
    trailing = shape[len(shape) - axes :]
    stretched = parameter if parameter.shape == trailing else np.broadcast_to(parameter, trailing)
    whole = stretched.size * dtype.itemsize <= reference.BLOCK * 8
    return stretched.astype(dtype, copy=False).reshape(-1) if whole else stretched
