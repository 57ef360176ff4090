"""In which vectors rows are accessed: as wide as pointers, strides and columns allow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._dtypes import Dtype
from cupynorm._values import NamedTuple
from cupynorm.call.view import View
from cupynorm.plan.config import ACCESS_BYTES, REGISTER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_COPIED_BYTES = 4  # of an asynchronous copy (cp.async)
WORDS = 4  # of a block of Philox


def across_width(each: View, axes: int) -> int:
    """Return how many neighbouring rows one access can move an element of each of: strides and the pointer allow it."""
    rows, cols = each.split(axes)
    extents, strides = rows.collapsed()
    if strides[-1] != 1:
        return 1
    others = (*strides[:-1], *cols.collapsed()[1])
    most = max(1, ACCESS_BYTES // each.dtype.itemsize)
    return math.gcd(most, extents[-1], each.pointer // each.dtype.itemsize, *others)


def is_stretch(each: View, axes: int, across: int) -> bool:
    """Say whether so many neighbouring rows are one stretch of memory."""
    (extents, strides), (lengths, steps) = (part.collapsed() for part in each.split(axes))
    return extents[-1] == across and strides[-1] == 1 and (lengths, steps) == (lengths[:1], (across,))


def adjoins_next(each: View, axes: int, across: int) -> bool:
    """Say whether such stretches lie next to one another."""
    outer, lengths = each.split(axes)[0].collapsed()[1][:-1], each.split(axes)[1].collapsed()[0]
    return outer in ((), (across * lengths[0],))


def lies_alike(each: View, like: View, axes: int) -> bool:
    """Say whether an access can move two elements of an array wherever one can move the same two elements of `like`.

    Rows that are neighbours in `like` are neighbours in it, too, and both begin at an even element, or both at an odd
    one. A kernel has no access of two elements of more than REGISTER_BYTES each.
    """
    (extents, strides), (wanted, steps) = (one.split(axes)[0].collapsed() for one in (each, like))
    neighbours = strides[-1] == steps[-1] == 1 and extents[-1] % wanted[-1] == 0
    small = each.dtype.itemsize <= REGISTER_BYTES
    return neighbours and small and _misalignment(each, 0, 2) == _misalignment(like, 0, 2)


def is_in_runs(each: View, axes: int) -> bool:
    """Say whether rows consist of runs of elements that lie next to one another: along the last of several axes."""
    return each.split(axes)[1].collapsed()[1][-1] == 1


def run_width(most: int, axes: int, *views: View) -> int:
    """Return how many elements of a run one access may move in each array, at each multiple of so many columns.

    most: as many at most, and a divisor of it.
    """
    for each in views:
        extents, strides = each.split(axes)[1].collapsed()
        most = math.gcd(most, extents[-1], *strides[:-1])
    return most


def is_per_row(stretched: View, axes: int) -> bool:
    """Say whether an array stretched to x's shape has one element for each row."""
    cols = stretched.split(axes)[1]
    return not any(stride for stride, extent in zip(cols.strides, cols.shape, strict=True) if extent > 1)


def prefetched_bytes(stretched: View, axes: int, vectors: Vectors) -> int:
    """Return the bytes of an element of an operand that is prefetched (kPrefetchBytes in C++); of others 0."""
    cols = stretched.split(axes)[1]
    along = not is_per_row(stretched, axes)
    size = stretched.dtype.itemsize
    if (
        not along
        or not (vectors.lie_in_runs(stretched, axes) or cols.is_contiguous())
        or vectors.access_of(stretched, axes) * size < LEAST_COPIED_BYTES
    ):
        return 0
    return size


class Vectors(NamedTuple):
    """The vectors of a row, of `width` elements each.

    like: None where vectors begin at multiples of `width`; otherwise a view, and they begin where its vectors do.
    short: offsets of operands' rows are computed in 32 bits. The compiler then orders the loads of unaligned rows
    better for norms, but worse for softmax (docs/notes/047, "Fused calls").
    realigned: what is not aligned to a whole vector takes two accesses, instead of several of fewer elements.
    across: an access may move an element of several neighbouring rows, whose own elements lie apart.
    shifted: None, or x where its neighbouring rows do not come in whole vectors, but two of them may be accessed at
    once wherever they are aligned (kernels/row/own_rows.cuh), in all arrays that lie as x does.
    in_runs: not all of a row's elements lie next to one another, but those of each vector.
    """

    width: int
    like: View | None = None
    short: bool = True
    realigned: bool = False
    across: bool = False
    in_runs: bool = False
    shifted: View | None = None

    def rows_of(self, stretched: View, axes: int) -> int:
        """Return of how many neighbouring rows one access can move an element; 0: of two, where x's are aligned."""
        if not self.across:
            return 1
        if self.shifted is None:
            return across_width(stretched, axes)
        return 0 if lies_alike(stretched, self.shifted, axes) else 1

    def lie_in_runs(self, stretched: View, axes: int) -> bool:
        """Say whether an operand has runs, and none ends within a vector: x's may be longer than the operand's."""
        extents, _ = stretched.split(axes)[1].collapsed()
        return self.in_runs and is_in_runs(stretched, axes) and extents[-1] % self.width == 0

    def access_of(self, stretched: View, axes: int) -> int:
        """Return how many elements one access to an operand's vector moves; 0 if it is unaligned and takes two."""
        widest = max(1, ACCESS_BYTES // stretched.dtype.itemsize)
        if self.like is None:
            found = math.gcd(self.width, widest, *_starts(stretched, axes))
            found = run_width(found, axes, stretched) if self.in_runs else found
            return 0 if self.realigned and found < min(self.width, widest) else found
        same = _misalignment(stretched, axes, self.width) == _misalignment(self.like, axes, self.width)
        return min(self.width, widest) if same else 0


def begins_whole(y: View, vector: int) -> bool:
    """Say whether every vector that is aligned in y begins at a multiple of its elements, or of four, in all of y."""
    unit = min(vector, WORDS) * y.dtype.itemsize
    return y.is_contiguous() and y.pointer % unit == 0


def aligned_elements(pointer: int, dtype: Dtype) -> int:
    """Return how many elements, a power of two, one access of at most 16 bytes at this pointer may move."""
    return max(1, math.gcd(pointer, ACCESS_BYTES) // dtype.itemsize)


def vector_width(x: View, y: View, axes: int, *others: View) -> int:
    """Return the widest vector, in elements, that columns, row strides and all pointers allow.

    It has at most 16 bytes in the widest of the types: every access then fills whole sectors.
    """
    cols = math.prod(x.split(axes)[1].shape)
    starts = (start for each in (x, y, *others) for start in _starts(each, axes))
    return math.gcd(_widest(x, y, *others), cols, *starts)


def _widest(*each: View) -> int:
    """Return the elements of the widest vector, 8 at most: what is loaded as bytes becomes numbers of 4."""
    return ACCESS_BYTES // max(2, *(one.dtype.itemsize for one in each))


def _starts(each: View, axes: int) -> tuple[int, ...]:
    """Return where the first row begins and how far the others are from one another, in elements."""
    extents, strides = each.split(axes)[0].collapsed()
    offset = each.pointer // each.dtype.itemsize if each.pointer % each.dtype.itemsize == 0 else 1
    return (offset, *(stride for extent, stride in zip(extents, strides, strict=True) if extent > 1))


def _misalignment(each: View, axes: int, widest: int) -> tuple[int, ...]:
    """Return how far rows begin from a vector, axis by axis: x and y may collapse to different axes."""
    leading = each.split(axes)[0]
    steps = (stride for extent, stride in zip(leading.shape, leading.strides, strict=True) if extent > 1)
    return tuple(at // each.dtype.itemsize % widest for at in (each.pointer, *steps))


class RowAlignment(NamedTuple):
    """How rows are aligned to vectors of `widest` elements: plan.Problem has fields of the same meaning."""

    widest: int
    unaligned: int
    period: int


def common_alignment(x: View, written: Sequence[View], axes: int) -> RowAlignment | None:
    """Return the alignment of rows where every array that is written is aligned as x; else None."""
    found = {row_alignment(x, y, axes) for y in written}
    one = found.pop()
    return one if not found and one.unaligned == 1 else None


def row_alignment(x: View, y: View, axes: int) -> RowAlignment:
    """Return the alignment of unaligned rows. Every pointer and stride is a multiple of the element size."""
    widest = _widest(x, y)
    steps = [step % widest for step in _starts(y, axes)[1:]]
    of_x, of_y = (_misalignment(each, axes, widest) for each in (x, y))
    period = 1 if not steps else widest // math.gcd(widest, steps[0]) if len(steps) == 1 else 0
    return RowAlignment(widest, 1 if of_x == of_y else 2, period)


def adjoining(x: View, y: View, axes: int) -> bool:
    """Say whether rows lie next to one another without a gap, in both x and y, and both begin at a whole access."""
    cols = math.prod(x.split(axes)[1].shape)

    def without_gaps(each: View) -> bool:
        extents, strides = each.split(axes)[0].collapsed()
        return (
            each.pointer % ACCESS_BYTES == 0 and len(extents) == 1 and (extents[0] == 1 or strides[0] == cols)
        )

    return x.dtype.itemsize == y.dtype.itemsize and without_gaps(x) and without_gaps(y)
