"""Gradients of arrays that were broadcast: sums over what they were broadcast along, in a fixed order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupynorm.host.column_sums import add_rows
from cupynorm.host.reference import _round
from cupynorm.host.space import Space

Array = np.ndarray[Any, Any]

# Elements of float64 that are added at a time, of rows in one piece, and of rows that are turned first: new memory for
# a whole block takes more than the sum.
ROOM, TURNED_ROOM = 1 << 16, 1 << 15
LEAST_COLUMNS, MOST_COLUMNS = 1 << 8, 1 << 13  # of these, where they do not fit


class BroadcastSum:
    """The sum, in float64, of an array of shape `whole`, over the axes along which one of `shape` is broadcast to it.

    Columns are the last `axes` axes. First each row is summed, then rows are added one after another, in C order, to
    what the sum starts with. So the sum has the same bits however rows are cut into tiles, or into several sums, each
    of which starts with the one before it.
    """

    def __init__(
        self, shape: tuple[int, ...], whole: tuple[int, ...], axes: int, start: Array | None
    ) -> None:
        missing = len(whole) - len(shape)
        own = (1,) * missing + shape[max(0, -missing) :]  # further axes of `shape` have one element
        self._total = np.zeros(own) if start is None else start.astype(np.float64).reshape(own)
        first_column = len(whole) - axes
        alone = [axis for axis, extent in enumerate(own) if extent == 1]
        self._columns = tuple(axis for axis in alone if axis >= first_column)
        self._rows = tuple(axis for axis in alone if axis < first_column)
        self._space = Space(self._total.dtype)
        self._order = (*self._rows, *(axis for axis in range(len(whole)) if axis not in self._rows))

    @property
    def sums_columns(self) -> bool:
        """Whether rows are summed, too."""
        return bool(self._columns)

    def add(self, values: Array, tile: tuple[slice, ...], space: Space | None = None) -> None:
        """Add a tile of the array: the slices of all of its axes, or of the first ones.

        space: has room to work in, of float64; None: the sum has its own.
        """
        self._space = self._space if space is None else space.other("wide", self._total.dtype)
        first = next((axis for axis in self._rows if values.shape[axis] > 1), None)
        apart = len(self._rows) > 1 and not values.flags.c_contiguous  # then only a copy has one axis of rows
        if first is not None and apart and values.size // values.shape[first] >= TURNED_ROOM:
            for begin in range(values.shape[first]):
                self._add(values[(slice(None),) * first + (slice(begin, begin + 1),)], tile)
        else:
            self._add(values, tile)

    def _add(self, values: Array, tile: tuple[slice, ...]) -> None:
        if self._columns:
            values = values.sum(axis=self._columns, keepdims=True, dtype=np.float64)
        index = tuple(
            slice(None) if extent == 1 else part
            for extent, part in zip(self._total.shape, tile, strict=False)
        )
        part = self._total[index].transpose(self._order)
        rows = values.transpose(self._order).reshape(math.prod(values.shape[axis] for axis in self._rows), -1)
        total = part.reshape(-1).copy()
        most = ROOM if rows.strides[-1] == rows.itemsize else TURNED_ROOM
        needed, width = min(most, rows.size), max(1, total.size)
        if rows.size > most:
            width = min(width, MOST_COLUMNS, max(LEAST_COLUMNS, most // len(rows)))
        held = self._space.take("room", needed)
        for first in range(0, total.size, width):
            columns = rows[:, first : first + width]
            together = max(1, needed // columns.shape[1])
            for begin in range(0, len(rows), together):
                some = columns[begin : begin + together]
                room = held[: some.size].reshape(some.shape)
                np.copyto(room, some, casting="unsafe")
                add_rows(total[first : first + width], room)
        part[...] = total.reshape(part.shape)

    def store(self, out: Array) -> None:
        """Write the sum, rounded once."""
        out[...] = _round(self._total, out.dtype).reshape(out.shape)
