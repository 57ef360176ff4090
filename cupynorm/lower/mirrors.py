"""Host twins of kernels/cupynorm/functors.cuh and of the ops: how each struct is spelled, laid out and filled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, cpp, cpp_of_element
from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.host.philox import Dropout

POINTER = np.dtype(np.uint64)
ONE_STRIDE = np.dtype([("stride", np.int64, (1,))], align=True)
EMPTY = np.dtype([("none", np.uint8)])  # C++ gives an empty struct one byte
ACCESS_BYTES = 16  # the widest access
LARGEST_PLACE = 2**31 - 1  # that 32 bits count
LEAST_COPIED_BYTES = 4  # of a copy from global to shared memory that takes no register


class View(NamedTuple):
    """An array as a kernel sees it: pointer in bytes, strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype

    def split(self, axes: int) -> tuple[View, View]:
        """Return the leading axes and the `axes` trailing ones, as two views of the same first element."""
        at = len(self.shape) - axes
        leading = View(self.pointer, self.shape[:at], self.strides[:at], self.dtype)
        return leading, View(self.pointer, self.shape[at:], self.strides[at:], self.dtype)

    def reordered(self, order: Sequence[int]) -> View:
        """Return the view with its leading axes in this order."""
        rest = range(len(order), len(self.shape))
        shape, strides = (
            tuple(each[axis] for axis in (*order, *rest)) for each in (self.shape, self.strides)
        )
        return View(self.pointer, shape, strides, self.dtype)

    def collapsed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return extents and strides, in elements, with neighbouring axes that can be one made one; never none."""
        extents: list[int] = []
        strides: list[int] = []
        for extent, stride_bytes in zip(self.shape, self.strides, strict=True):
            if extent == 1:
                continue
            stride = stride_bytes // self.dtype.itemsize
            if extents and strides[-1] == stride * extent:
                extents[-1] *= extent
                strides[-1] = stride
            else:
                extents.append(extent)
                strides.append(stride)
        return (tuple(extents), tuple(strides)) if extents else ((1,), (0,))

    def is_contiguous(self) -> bool:
        """Say whether the elements lie next to each other in C order."""
        extents, strides = self.collapsed()
        return len(extents) == 1 and (extents[0] == 1 or strides[0] == 1)

    def broadcast_to(self, shape: tuple[int, ...]) -> View:
        """Return the view stretched to `shape`, as NumPy broadcasts; ValueError if it cannot be."""
        missing = len(shape) - len(self.shape)
        if missing < 0 or any(
            have not in (1, want) for have, want in zip(self.shape, shape[missing:], strict=True)
        ):
            raise ValueError(f"shape {self.shape} does not broadcast to {shape}")
        strides = tuple(
            0 if have != want else stride
            for have, want, stride in zip(self.shape, shape[missing:], self.strides, strict=True)
        )
        return View(self.pointer, shape, (0,) * missing + strides, self.dtype)


class Struct(NamedTuple):
    """A C++ struct passed by value: its spelling, its layout (align=True), and its values in order."""

    cpp: str
    dtype: Dtype
    values: tuple[Any, ...]


def strided(view: View) -> Struct:
    """Twin of Strided: where index i of the view's axes, flattened, lies."""
    extents, strides = view.collapsed()
    axes = len(extents)
    if axes == 1:
        return Struct("1", ONE_STRIDE, (strides,))
    fields = [("extent", np.int64), ("stride", np.int64), ("multiplier", np.uint32), ("shift", np.uint32)]
    dtype = np.dtype([(name, kind, (axes,)) for name, kind in fields], align=True)
    return Struct(str(axes), dtype, (extents, strides, *zip(*map(division, extents), strict=True)))


def strided64(view: View) -> Struct:
    """The same, spelled as a whole type."""
    index = strided(view)
    return index._replace(cpp=f"cupynorm::Strided<{index.cpp}>")


def strided32(view: View) -> Struct:
    """Twin of Strided32; of Strided where places or how many there are do not fit in 32 bits, and for doubles.

    With doubles the compiler then orders otherwise, and spills (bias and a band, sm_90).
    """
    extents, strides = view.collapsed()
    reach = sum(max(1, extent - 1) * abs(stride) for extent, stride in zip(extents, strides, strict=True))
    if max(math.prod(extents), reach) > LARGEST_PLACE or view.dtype == np.float64:
        return strided64(view)
    axes = len(extents)
    fields = [("extent", np.uint32), ("stride", np.int32), ("multiplier", np.uint32), ("shift", np.uint32)]
    dtype = np.dtype([(name, kind, (axes,)) for name, kind in fields], align=True)
    repeats = "true" if axes > 1 and strides[-1] == 0 else "false"
    values = (extents, strides, *zip(*map(division, extents), strict=True))
    return Struct(f"cupynorm::Strided32<{axes}, {repeats}>", dtype, values)


def division(divisor: int) -> tuple[int, int]:
    """Return multiplier and shift, so that n // divisor is (n * multiplier // 2**32 + n) >> shift; both are below 2**31."""
    if divisor >= 1 << 31:
        return 0, 0  # which nobody will divide by so
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor) // divisor + 1, shift)


def direct(name: str, rows: View) -> Struct:
    """Twin of DirectLoad and DirectStore."""
    index = strided(rows)
    dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
    return Struct(
        f"cupynorm::{name}<{cpp_of_element(rows.dtype)}, {index.cpp}>", dtype, (rows.pointer, index.values)
    )


def column(parameter: View | None, shape: tuple[int, ...]) -> Struct:
    """Twin of NoColumn, Column and StridedColumn: a parameter of the normalised axes, which have `shape`."""
    if parameter is None:
        return Struct("cupynorm::NoColumn", EMPTY, (0,))
    stretched = parameter.broadcast_to(shape)
    if stretched.is_contiguous():
        width = aligned_elements(parameter.pointer, parameter.dtype)
        dtype = np.dtype([("pointer", POINTER)], align=True)
        return Struct(f"cupynorm::Column<{cpp(parameter.dtype)}, {width}>", dtype, (parameter.pointer,))
    index = strided(stretched)
    dtype = np.dtype([("pointer", POINTER), ("cols", index.dtype)], align=True)
    values = (parameter.pointer, index.values)
    return Struct(f"cupynorm::StridedColumn<{cpp(parameter.dtype)}, {index.cpp}>", dtype, values)


def affine_store(rows: View, gamma: Struct, beta: Struct) -> Struct:
    """Twin of AffineStore; of DirectStore if there is neither gamma nor beta."""
    to = direct("DirectStore", rows)
    if gamma.dtype == beta.dtype == EMPTY:
        return to
    affine = affine_columns(gamma, beta)
    dtype = np.dtype([("to", to.dtype), ("affine", affine.dtype)], align=True)
    spelling = f"cupynorm::AffineStore<{cpp(rows.dtype)}, {strided(rows).cpp}, {affine.cpp}>"
    return Struct(spelling, dtype, (to.values, affine.values))


def affine_columns(gamma: Struct, beta: Struct) -> Struct:
    """Twin of AffineColumns, spelled as its two template arguments."""
    dtype = np.dtype([("gamma", gamma.dtype), ("beta", beta.dtype)], align=True)
    return Struct(f"{gamma.cpp}, {beta.cpp}", dtype, (gamma.values, beta.values))


def operand(stretched: View, axes: int, packs: Packs, *, constant: bool) -> Struct:
    """Twin of AlongRows, AlongColumns, PerRow and Scattered: an array stretched to x's shape. constant: no result goes there."""
    rows, cols = stretched.split(axes)
    element = cpp_of_element(stretched.dtype)
    if not any(stride for stride, extent in zip(cols.strides, cols.shape, strict=True) if extent > 1):
        return per_row(rows)
    if cols.is_contiguous():
        width = packs.access_of(stretched, axes)
        if not any(stride for stride, extent in zip(rows.strides, rows.shape, strict=True) if extent > 1):
            spelling = f"cupynorm::AlongColumns<{element}, {width}, {'true' if constant else 'false'}>"
            return Struct(spelling, np.dtype([("pointer", POINTER)], align=True), (stretched.pointer,))
        index = strided32(rows) if packs.short else strided64(rows)
        dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
        spelling = f"cupynorm::AlongRows<{element}, {index.cpp}, {width}, {'true' if constant else 'false'}>"
        return Struct(spelling, dtype, (stretched.pointer, index.values))
    index, columns = strided(rows), strided(cols)
    dtype = np.dtype(
        [("pointer", POINTER), ("rows", index.dtype), ("cols", columns.dtype)],
        align=True,
    )
    spelling = f"cupynorm::Scattered<{element}, {index.cpp}, {columns.cpp}>"
    return Struct(spelling, dtype, (stretched.pointer, index.values, columns.values))


def sent_bytes(stretched: View, axes: int, packs: Packs) -> int:
    """Return the bytes of an element of an operand that are copied ahead through shared memory: kSent of its struct."""
    cols = stretched.split(axes)[1]
    along = any(stride for stride, extent in zip(cols.strides, cols.shape, strict=True) if extent > 1)
    size = stretched.dtype.itemsize
    if not along or not cols.is_contiguous() or packs.access_of(stretched, axes) * size < LEAST_COPIED_BYTES:
        return 0
    return size


class Packs(NamedTuple):
    """Where the packs of a row lie: `pack` elements each, which begin at multiples of so many, or, in `like`, wherever its do.

    short: operands' rows are found in 32 bits. Where rows of softmax begin anywhere, loads are then ordered worse (197 columns in
    16 bits, a byte mask 0.83 to 0.67 of the copy rate), those of norms are not (1001: 0.76 to 0.79).
    """

    pack: int
    like: View | None = None
    short: bool = True

    def access_of(self, stretched: View, axes: int) -> int:
        """Return how many elements one access to an operand's pack moves; 0: it lies anywhere, and takes two."""
        widest = max(1, ACCESS_BYTES // stretched.dtype.itemsize)
        if self.like is None:
            return math.gcd(self.pack, widest, *_starts(stretched, axes))
        alike = _apart(stretched, axes, self.pack) == _apart(self.like, axes, self.pack)
        return min(self.pack, widest) if alike else 0


def value(number: float, compute: Dtype) -> Struct:
    """Twin of Value."""
    return Struct(f"cupynorm::Value<{cpp(compute)}>", np.dtype([("value", compute)], align=True), (number,))


def per_row(stretched: View) -> Struct:
    """Twin of PerRow: one element a row."""
    index = strided32(stretched)
    dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
    spelling = f"cupynorm::PerRow<{cpp_of_element(stretched.dtype)}, {index.cpp}>"
    return Struct(spelling, dtype, (stretched.pointer, index.values))


def kept(drop: Dropout, cols: int, *, whole: bool) -> Struct:
    """Twin of Kept. whole: packs lie at multiples of their elements in all of x."""
    names = ("seed", "offset", "threshold", "cols")
    dtype = np.dtype([(name, np.int64 if name == "cols" else np.uint64) for name in names], align=True)
    return Struct(
        f"cupynorm::Kept<{'true' if whole else 'false'}>",
        dtype,
        (drop.seed, drop.offset, drop.threshold, cols),
    )


def in_turn(name: str, each: Sequence[Struct]) -> Struct:
    """Twin of Operands and Outputs: a list, each of them beside the rest."""
    spelling = f"cupynorm::{name}<{', '.join(one.cpp for one in each)}>"
    dtype, values = EMPTY, (0,)
    for one in reversed(each):
        dtype = np.dtype([("first", one.dtype), ("rest", dtype)], align=True)
        values = (one.values, values)  # type: ignore[assignment]
    return Struct(spelling, dtype, values)


def fused_load(
    x: View, axes: int, function: str, masked: Struct, keep: View | None, operands: Sequence[Struct]
) -> Struct:
    """Twin of FusedLoad. keep: where what is computed goes, too."""
    index, given = strided(x.split(axes)[0]), in_turn("Operands", operands)
    keeping = Struct("cupynorm::NotKept", EMPTY, (0,))
    if keep is not None:
        to = direct("DirectStore", keep.split(axes)[0])
        spelling = to.cpp.replace("DirectStore", "KeptIn")
        keeping = Struct(spelling, np.dtype([("to", to.dtype)], align=True), (to.values,))
    dtype = np.dtype(
        [
            ("pointer", POINTER),
            ("rows", index.dtype),
            ("mask", masked.dtype),
            ("keeping", keeping.dtype),
            ("operands", given.dtype),
        ],
        align=True,
    )
    spelling = (
        f"cupynorm::FusedLoad<{cpp(x.dtype)}, {index.cpp}, cupynorm::{function}, {masked.cpp}, "
        f"{keeping.cpp}, {given.cpp}>"
    )
    values = (x.pointer, index.values, masked.values, keeping.values, given.values)
    return Struct(spelling, dtype, values)


def fused_store(
    outs: Sequence[View], axes: int, function: str, gamma: Struct, beta: Struct, operands: Sequence[Struct]
) -> Struct:
    """Twin of FusedStore."""
    to = in_turn("Outputs", [direct("DirectStore", out.split(axes)[0]) for out in outs])
    affine, given = affine_columns(gamma, beta), in_turn("Operands", operands)
    dtype = np.dtype(
        [("to", to.dtype), ("affine", affine.dtype), ("operands", given.dtype)],
        align=True,
    )
    spelling = f"cupynorm::FusedStore<cupynorm::{function}, {affine.cpp}, {to.cpp}, {given.cpp}>"
    return Struct(spelling, dtype, (to.values, affine.values, given.values))


def scaled_store(
    out: View, axes: int, gamma: Struct, beta: Struct, scales: int, limit: float, compute: Dtype
) -> Struct:
    """Twin of ScaledStore. scales: where those of the rows go; limit: the largest number that is stored."""
    to, affine = direct("DirectStore", out.split(axes)[0]), affine_columns(gamma, beta)
    dtype = np.dtype(
        [("to", to.dtype), ("affine", affine.dtype), ("scales", POINTER), ("limit", compute)], align=True
    )
    arguments = to.cpp.partition("<")[2].removesuffix(">")
    spelling = f"cupynorm::ScaledStore<{cpp(compute)}, {arguments}, {affine.cpp}>"
    return Struct(spelling, dtype, (to.values, affine.values, scales, limit))


def aligned_elements(pointer: int, dtype: Dtype) -> int:
    """Return how many elements, a power of two, one access of at most 16 bytes at this pointer may move."""
    return max(1, math.gcd(pointer, 16) // dtype.itemsize)


def pack_width(x: View, y: View, axes: int, *others: View) -> int:
    """Return the widest pack, in elements, that columns, row strides and all pointers allow.

    A pack of the widest of the types is at most 16 bytes: every access then fills whole sectors.
    """
    cols = math.prod(x.split(axes)[1].shape)
    starts = (start for each in (x, y, *others) for start in _starts(each, axes))
    return math.gcd(_widest(x, y, *others), cols, *starts)


def _widest(*each: View) -> int:
    return ACCESS_BYTES // max(one.dtype.itemsize for one in each)


def _starts(each: View, axes: int) -> tuple[int, ...]:
    """Return where the first row begins and how far the others are from one another, in elements."""
    extents, strides = each.split(axes)[0].collapsed()
    offset = each.pointer // each.dtype.itemsize if each.pointer % each.dtype.itemsize == 0 else 1
    return (offset, *(stride for extent, stride in zip(extents, strides, strict=True) if extent > 1))


def _apart(each: View, axes: int, widest: int) -> tuple[int, ...]:
    """Return how far rows begin from a pack, axis by axis: x and y may be collapsed each in its own way."""
    leading = each.split(axes)[0]
    steps = (stride for extent, stride in zip(leading.shape, leading.strides, strict=True) if extent > 1)
    return tuple(at // each.dtype.itemsize % widest for at in (each.pointer, *steps))


class Lie(NamedTuple):
    """How rows lie in packs of the `widest` kind, as _plan.Problem has it."""

    widest: int
    peel: int
    period: int


def lie_together(x: View, written: Sequence[View], axes: int) -> Lie | None:
    """Return how rows lie where all that is written lies in packs as x does; None if it does not."""
    found = {lie(x, y, axes) for y in written}
    one = found.pop()
    return one if not found and one.peel == 1 else None


def lie(x: View, y: View, axes: int) -> Lie:
    """Return how rows lie that begin at no such pack. Every pointer and stride is one of whole elements."""
    widest = _widest(x, y)
    steps = [step % widest for step in _starts(y, axes)[1:]]
    of_x, of_y = (_apart(each, axes, widest) for each in (x, y))
    period = 1 if not steps else widest // math.gcd(widest, steps[0]) if len(steps) == 1 else 0
    return Lie(widest, 1 if of_x == of_y else 2, period)


def arguments(op: Struct, load: Struct, store: Struct, rows: int, cols: int) -> Struct:
    """Twin of Arguments: the one argument of every row kernel."""
    dtype = np.dtype(
        [
            ("load", load.dtype),
            ("store", store.dtype),
            ("rows", np.int64),
            ("cols", np.int64),
            ("op", op.dtype),
        ],
        align=True,
    )
    spelling = f"cupynorm::Arguments<{op.cpp}, {load.cpp}, {store.cpp}>"
    return Struct(spelling, dtype, (load.values, store.values, rows, cols, op.values))
