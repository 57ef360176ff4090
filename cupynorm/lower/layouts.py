"""Layouts of arrays of one shape that a function of each element is given: its axes may come in any order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from cupynorm.call.view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

# Columns of a piece: for each of them sums are kept, and of fewer than the least not every warp has a row of its own.
MOST_IN_PIECE, LEAST_IN_PIECE = 1024, 64
VECTOR = 8  # elements, at most


class Moved(NamedTuple):
    """An array `first` elements behind its pointer on, wherever its elements lie."""

    array: View
    first: int

    @property
    def view(self) -> View:
        """The same as a view; its pointer is no longer known to be an argument of the call."""
        return self.array._replace(pointer=self.array.pointer + self.first * self.array.dtype.itemsize)


def moved(view: View, first: int) -> View | Moved:
    """Return an array from element `first` on."""
    return Moved(view, first) if first else view


class Halves(NamedTuple):
    """The two halves of arrays along their last axis, the gate's first; or the arrays themselves.

    gate: "first" or "second" half; None for no halves. cols: elements of a half.
    """

    gate: str | None
    cols: int

    def cut(self, array: View) -> View:
        """Return the first half of an array."""
        if self.gate is None:
            return array
        return View(array.pointer, (*array.shape[:-1], self.cols), array.strides, array.dtype)

    def step(self, array: View) -> int:
        """Return how many elements behind the first half the second one begins."""
        return self.cols * array.strides[-1] // array.dtype.itemsize

    def parts(self, half: View, step: int, first: int = 0) -> list[View | Moved]:
        """Return both halves from element `first` on, the gate first.

        half: the first one, its axes in any order. step: as step() gives it.
        """
        begin = moved(half, first)
        if self.gate is None:
            return [begin]
        both: list[View | Moved] = [begin, Moved(half, step + first)]
        return both if self.gate == "first" else both[::-1]


def stretched(parameter: View, shape: tuple[int, ...], axes: int) -> View:
    """Return a parameter of the last `axes` axes of a shape as a view of that shape."""
    return parameter.broadcast_to(shape[len(shape) - axes :]).broadcast_to(shape)


def in_memory_order(views: Sequence[View], leading: int) -> list[View]:
    """Return views of one shape with their axes in the order that they have in memory, and joined where all allow it.

    The order is that of the first `leading` views: the longest steps come first, C order's own where steps are equal.
    """
    shape = views[0].shape
    axes = [at for at, extent in enumerate(shape) if extent != 1]
    axes.sort(key=lambda at: -sum(abs(each.strides[at]) // each.dtype.itemsize for each in views[:leading]))
    extents: list[int] = []
    steps: list[tuple[int, ...]] = []
    for at in axes:
        step = tuple(each.strides[at] for each in views)
        if steps and steps[-1] == tuple(one * shape[at] for one in step):
            extents[-1] *= shape[at]
            steps[-1] = step
        else:
            extents.append(shape[at])
            steps.append(step)
    if not extents:
        extents, steps = (
            [1],
            [(*(each.dtype.itemsize for each in views[:leading]), *(0,) * len(views[leading:]))],
        )
    return [
        View(each.pointer, tuple(extents), tuple(step[number] for step in steps), each.dtype)
        for number, each in enumerate(views)
    ]


def adjacent(views: Sequence[View]) -> bool:
    """Say whether the elements of the last axis lie next to one another in each view."""
    return all(each.strides[-1] == each.dtype.itemsize for each in views)


class Span(NamedTuple):
    """Elements `first` to `first + cols - 1` of an axis, which are cut into pieces of one length."""

    first: int
    cols: int
    piece: int


def spans_of(cols: int) -> list[Span]:
    """Return an axis as spans whose pieces divide them: one, or a second one for what the longest pieces leave."""
    unit = math.gcd(cols, VECTOR)
    lengths = range(min(cols, MOST_IN_PIECE) // unit * unit, 0, -unit)
    length = next(each for each in lengths if cols % each == 0)
    if length >= LEAST_IN_PIECE or cols <= MOST_IN_PIECE:
        return [Span(0, cols, length if length >= LEAST_IN_PIECE else cols)]
    rest = cols % MOST_IN_PIECE
    return [Span(0, cols - rest, MOST_IN_PIECE), Span(cols - rest, rest, rest)]


def in_pieces(view: View, piece: int) -> View:
    """Return a view whose last axis is two: the pieces, and what is in each."""
    *strides, last = view.strides
    shape = (*view.shape[:-1], view.shape[-1] // piece, piece)
    return View(view.pointer, shape, (*strides, last * piece, last), view.dtype)


def elements_of_access(view: View, first: int, most: int) -> int:
    """Return how many elements one access may move at every multiple of so many along the last axis; at most `most`.

    first: how many elements behind the pointer the view begins.
    """
    size = view.dtype.itemsize
    if view.strides[-1] != size and view.shape[-1] > 1:
        return 1
    steps = (stride // size for stride in view.strides[:-1])
    return math.gcd(most, view.shape[-1], view.pointer // size + first, *steps)
