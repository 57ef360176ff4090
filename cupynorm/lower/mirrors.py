"""Host mirrors of the structs in kernels/io and of the ops: the C++ name, the layout and the values of each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, cpp, cpp_of_element
from cupynorm._values import NamedTuple
from cupynorm.call.view import ROOM, Argument, View
from cupynorm.lower.vectors import Vectors, aligned_elements, is_per_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.host.philox import Dropout
    from cupynorm.lower.row_groups import RowGroups

POINTER = np.dtype(np.uint64)
ONE_STRIDE = np.dtype([("stride", np.int64, (1,))], align=True)
EMPTY = np.dtype([("none", np.uint8)])  # C++ gives an empty struct one byte
LARGEST_OFFSET = 2**31 - 1  # in a signed integer of 32 bits


class Struct(NamedTuple):
    """A C++ struct passed by value: its C++ name, its layout (align=True), and its values in order."""

    cpp: str
    dtype: Dtype
    values: tuple[Any, ...]


def strided(view: View) -> Struct:
    """Return the mirror of Strided: the offset of index i of the view's axes, flattened."""
    extents, strides = view.collapsed()
    axes = len(extents)
    if axes == 1:
        return Struct("1", ONE_STRIDE, (strides,))
    fields = [("extent", np.int64), ("stride", np.int64), ("multiplier", np.uint32), ("shift", np.uint32)]
    dtype = np.dtype([(name, kind, (axes,)) for name, kind in fields], align=True)
    return Struct(str(axes), dtype, (extents, strides, *zip(*map(division, extents), strict=True)))


def strided64(view: View) -> Struct:
    """Return the same with the name of the whole type."""
    index = strided(view)
    return index._replace(cpp=f"cupynorm::Strided<{index.cpp}>")


def strided32(view: View) -> Struct:
    """Return the mirror of Strided32, or of Strided for doubles and where offsets or extents do not fit in 32 bits.

    With doubles and 32-bit offsets the compiler reorders instructions and spills (bias and a band, sm_90).
    """
    extents, strides = view.collapsed()
    reach = sum(max(1, extent - 1) * abs(stride) for extent, stride in zip(extents, strides, strict=True))
    if max(math.prod(extents), reach) > LARGEST_OFFSET or view.dtype == np.float64:
        return strided64(view)
    axes = len(extents)
    fields = [("extent", np.uint32), ("stride", np.int32), ("multiplier", np.uint32), ("shift", np.uint32)]
    dtype = np.dtype([(name, kind, (axes,)) for name, kind in fields], align=True)
    repeats = "true" if axes > 1 and strides[-1] == 0 else "false"
    values = (extents, strides, *zip(*map(division, extents), strict=True))
    return Struct(f"cupynorm::Strided32<{axes}, {repeats}>", dtype, values)


def division(divisor: int) -> tuple[int, int]:
    """Return multiplier and shift, so that n // divisor is (n * multiplier // 2**32 + n) >> shift.

    n and divisor are below 2**31.
    """
    if divisor >= 1 << 31:
        return 0, 0  # never used: such a divisor has 64-bit indices
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor) // divisor + 1, shift)


def direct(name: str, rows: View) -> Struct:
    """Return the mirror of DirectLoad and DirectStore."""
    index = strided(rows)
    dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
    return Struct(
        f"cupynorm::{name}<{cpp_of_element(rows.dtype)}, {index.cpp}>", dtype, (rows.pointer, index.values)
    )


def direct_load(x: View, axes: int) -> Struct:
    """Return the mirror of DirectLoad, of rows that may lie in runs."""
    rows, cols = x.split(axes)
    if cols.is_contiguous():
        return direct("DirectLoad", rows)
    index, apart = strided(rows), columns_apart(x, axes)
    dtype = np.dtype([("cols", apart.dtype), ("pointer", POINTER), ("rows", index.dtype)], align=True)
    type_name = f"cupynorm::DirectLoad<{cpp_of_element(x.dtype)}, {index.cpp}, {apart.cpp}>"
    return Struct(type_name, dtype, (apart.values, x.pointer, index.values))


ADJACENT = Struct("cupynorm::Adjacent", EMPTY, (0,))


def columns_apart(view: View, axes: int) -> Struct:
    """Return how far a view's columns lie from the first of their row: the mirror of Strided32 or Strided."""
    return strided32(view.split(axes)[1])


def store_to(out: View, axes: int, vectors: Vectors) -> Struct:
    """Return the mirror of DirectStore, or of ApartStore."""
    if not vectors.across and out.split(axes)[1].is_contiguous():
        return direct("DirectStore", out.split(axes)[0])
    index, cols = strided(out.split(axes)[0]), columns_apart(out, axes)
    dtype = np.dtype([("cols", cols.dtype), ("pointer", POINTER), ("rows", index.dtype)], align=True)
    across = vectors.rows_of(out, axes)
    widths = f"{across}, {vectors.width}" if vectors.width > 1 else f"{across}"
    type_name = f"cupynorm::ApartStore<{cpp_of_element(out.dtype)}, {index.cpp}, {cols.cpp}, {widths}>"
    return Struct(type_name, dtype, (cols.values, out.pointer, index.values))


def no_store(rows: View, room: int) -> Struct:
    """Return the mirror of NoStore. rows: those of x, for their alignment. room: the pointer of where messages lie."""
    of = direct("NoStore", rows)
    dtype = np.dtype(
        [*((name, of.dtype[name]) for name in of.dtype.names or ()), ("room", POINTER)], align=True
    )
    return of._replace(dtype=dtype, values=(*of.values, room))


def roomy(store: Struct) -> Struct:
    """Return the mirror of RoomyStore: another Store, and the address of room for messages, which its launch knows."""
    dtype = np.dtype([("inner", store.dtype), ("room", POINTER)], align=True)
    return Struct(f"cupynorm::RoomyStore<{store.cpp}>", dtype, (store.values, Argument(0, ROOM)))


def column(parameter: View | None, shape: tuple[int, ...]) -> Struct:
    """Return the mirror of NoColumn, Column or StridedColumn: a parameter that broadcasts to `shape`."""
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
    """Return the mirror of AffineStore, or of DirectStore if there is neither gamma nor beta."""
    to = direct("DirectStore", rows)
    if gamma.dtype == beta.dtype == EMPTY:
        return to
    affine = affine_columns(gamma, beta)
    dtype = np.dtype([("to", to.dtype), ("affine", affine.dtype)], align=True)
    type_name = f"cupynorm::AffineStore<{cpp(rows.dtype)}, {strided(rows).cpp}, {affine.cpp}>"
    return Struct(type_name, dtype, (to.values, affine.values))


def affine_columns(gamma: Struct, beta: Struct) -> Struct:
    """Return the mirror of AffineColumns, named by its two template arguments."""
    dtype = np.dtype([("gamma", gamma.dtype), ("beta", beta.dtype)], align=True)
    return Struct(f"{gamma.cpp}, {beta.cpp}", dtype, (gamma.values, beta.values))


def operand(stretched: View, axes: int, vectors: Vectors, *, constant: bool) -> Struct:
    """Return the mirror of AlongRows, AlongColumns, PerRow or Scattered: an array stretched to x's shape.

    constant: no result is written to this array.
    """
    rows, cols = stretched.split(axes)
    element = cpp_of_element(stretched.dtype)
    if is_per_row(stretched, axes):
        return per_row(rows)
    if cols.is_contiguous():
        width = vectors.access_of(stretched, axes)
        if not any(stride for stride, extent in zip(rows.strides, rows.shape, strict=True) if extent > 1):
            type_name = f"cupynorm::AlongColumns<{element}, {width}, {'true' if constant else 'false'}>"
            return Struct(type_name, np.dtype([("pointer", POINTER)], align=True), (stretched.pointer,))
        index = strided32(rows) if vectors.short else strided64(rows)
        dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
        type_name = f"cupynorm::AlongRows<{element}, {index.cpp}, {width}, {'true' if constant else 'false'}>"
        return Struct(type_name, dtype, (stretched.pointer, index.values))
    if vectors.lie_in_runs(stretched, axes):
        return _along_runs(stretched, axes, vectors.access_of(stretched, axes), constant=constant)
    index, columns = strided(rows), strided32(cols)
    dtype = np.dtype(
        [("pointer", POINTER), ("rows", index.dtype), ("cols", columns.dtype)],
        align=True,
    )
    across = vectors.rows_of(stretched, axes)
    type_name = f"cupynorm::Scattered<{element}, {index.cpp}, {columns.cpp}, {across}>"
    return Struct(type_name, dtype, (stretched.pointer, index.values, columns.values))


def _along_runs(stretched: View, axes: int, width: int, *, constant: bool) -> Struct:
    """Return the mirror of AlongRows whose columns are in runs, of which an access moves `width` elements."""
    rows, cols = stretched.split(axes)
    index, columns = strided64(rows), strided32(cols)
    dtype = np.dtype([("cols", columns.dtype), ("pointer", POINTER), ("rows", index.dtype)], align=True)
    of = f"{cpp_of_element(stretched.dtype)}, {index.cpp}, {width}, {'true' if constant else 'false'}"
    values = (columns.values, stretched.pointer, index.values)
    return Struct(f"cupynorm::AlongRows<{of}, {columns.cpp}>", dtype, values)


def value(number: float, compute: Dtype) -> Struct:
    """Return the mirror of Value."""
    return Struct(f"cupynorm::Value<{cpp(compute)}>", np.dtype([("value", compute)], align=True), (number,))


def per_row(stretched: View) -> Struct:
    """Return the mirror of PerRow: one element a row."""
    index = strided32(stretched)
    dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
    type_name = f"cupynorm::PerRow<{cpp_of_element(stretched.dtype)}, {index.cpp}>"
    return Struct(type_name, dtype, (stretched.pointer, index.values))


def label_mask(labels: View, cols: int, *, nan: bool) -> Struct:
    """Return the mirror of LabelMask: 1 in the column of a row's label, else 0. labels: integers, one a row.

    nan: a label that is no column makes its row nan.
    """
    of = per_row(labels)
    dtype = np.dtype(
        [*((name, of.dtype[name]) for name in of.dtype.names or ()), ("cols", np.int64)], align=True
    )
    return Struct(_of_labels("LabelMask", of, ", true" if nan else ", false"), dtype, (*of.values, cols))


def label_counts(labels: View, ignored: int, cols: int) -> Struct:
    """Return the mirror of a Mask that keeps the rows whose label is another than `ignored`: of LabelCounts."""
    of = per_row(labels)
    names = of.dtype.names or ()
    dtype = np.dtype([*((name, of.dtype[name]) for name in names), ("ignored", labels.dtype)], align=True)
    where = np.dtype([("bytes", dtype)], align=True)
    whole = np.dtype([("structure", EMPTY), ("where", where), ("cols", np.int64)], align=True)
    type_name = f"cupynorm::Mask<cupynorm::AllColumns, cupynorm::Where<{_of_labels('LabelCounts', of)}>>"
    return Struct(type_name, whole, ((0,), ((*of.values, ignored),), cols))


def labelled(
    name: str,
    of: Struct,
    labels: View,
    ignored: int | None,
    cols: int,
    part: float = 1.0,
    compute: Dtype | None = None,
) -> Struct:
    """Return the mirror of LabelledLoad or LabelledStore, of RowLabel around another Load or Store.

    labels: integers, one a row. ignored: a label that does not count, or None. part: of PartLabel, where it is not 1.
    """
    rows = per_row(labels)
    names = rows.dtype.names or ()
    label = np.dtype(
        [*((each, rows.dtype[each]) for each in names), ("ignored", labels.dtype), ("cols", np.int64)],
        align=True,
    )
    row_label = _of_labels("RowLabel", rows, ", false" if ignored is None else ", true")
    of_label: tuple[Any, ...] = (*rows.values, ignored or 0, cols)
    if part != 1 and compute is not None:
        label = np.dtype([("label", label), ("part", compute)], align=True)
        row_label, of_label = f"cupynorm::PartLabel<{cpp(compute)}, {row_label}>", (of_label, part)
    dtype = np.dtype([("inner", of.dtype), ("label", label)], align=True)
    values = (of.values, of_label)
    return Struct(f"cupynorm::{name}<{of.cpp}, {row_label}>", dtype, values)


def _of_labels(name: str, of: Struct, more: str = "") -> str:
    """Return a type with the template arguments of a PerRow."""
    return f"cupynorm::{name}<{of.cpp.partition('<')[2].removesuffix('>')}{more}>"


def kept(drop: Dropout, cols: int, *, whole: bool) -> Struct:
    """Return the mirror of DropoutMask. whole: vectors begin as begins_whole() says."""
    names = ("seed", "offset", "threshold", "cols")
    dtype = np.dtype([(name, np.int64 if name == "cols" else np.uint64) for name in names], align=True)
    seed, offset = Argument(drop.seed, "seed"), Argument(drop.offset, "offset")
    return Struct(
        f"cupynorm::DropoutMask<{'true' if whole else 'false'}>", dtype, (seed, offset, drop.threshold, cols)
    )


def kept_anywhere(drop: Dropout, numbers: View, axes: int) -> Struct:
    """Return the mirror of DropoutAnywhere. numbers: those of the elements, as a view's places, of x's shape."""
    rows, cols = (strided64(each) for each in numbers.split(axes))
    of = kept(drop, 0, whole=True)
    names = ("seed", "offset", "threshold")
    dropped = np.dtype([(name, np.uint64) for name in names], align=True)
    dtype = np.dtype([("dropped", dropped), ("rows", rows.dtype), ("cols", cols.dtype)], align=True)
    return Struct(
        f"cupynorm::DropoutAnywhere<{rows.cpp}, {cols.cpp}>",
        dtype,
        (of.values[: len(names)], rows.values, cols.values),
    )


def struct_list(name: str, each: Sequence[Struct]) -> Struct:
    """Return the mirror of Operands or Outputs: a list, in which each struct stands beside the rest."""
    type_name = f"cupynorm::{name}<{', '.join(one.cpp for one in each)}>"
    dtype, values = EMPTY, (0,)
    for one in reversed(each):
        dtype = np.dtype([("first", one.dtype), ("rest", dtype)], align=True)
        values = (one.values, values)  # type: ignore[assignment]
    return Struct(type_name, dtype, values)


def fused_load(
    x: View,
    axes: int,
    function: str,
    masked: Struct,
    keep: View | None,
    operands: Sequence[Struct],
    vectors: Vectors,
) -> Struct:
    """Return the mirror of FusedLoad. keep: an array to which the computed values are written, too."""
    index, given = strided(x.split(axes)[0]), struct_list("Operands", operands)
    keeping = Struct("cupynorm::NoStoreComputed", EMPTY, (0,))
    if keep is not None:
        to = store_to(keep, axes, vectors)
        type_name = f"cupynorm::StoreComputed<{to.cpp}>"
        keeping = Struct(type_name, np.dtype([("to", to.dtype)], align=True), (to.values,))
    apart = vectors.across or not x.split(axes)[1].is_contiguous()
    cols = columns_apart(x, axes) if apart else ADJACENT
    fields = [
        ("pointer", POINTER),
        ("rows", index.dtype),
        ("mask", masked.dtype),
        ("keeping", keeping.dtype),
        ("operands", given.dtype),
    ]
    values: tuple[Any, ...] = (x.pointer, index.values, masked.values, keeping.values, given.values)
    if apart:  # an empty base takes no room
        fields, values = [("cols", cols.dtype), *fields], (cols.values, *values)
    type_name = (
        f"cupynorm::FusedLoad<{cpp_of_element(x.dtype)}, {index.cpp}, cupynorm::{function}, {masked.cpp}, "
        f"{keeping.cpp}, {given.cpp}, {cols.cpp}>"
    )
    if vectors.shifted is not None:
        type_name = f"cupynorm::ShiftedLoad<{type_name}>"
    return Struct(type_name, np.dtype(fields, align=True), values)


def fused_store(
    outs: Sequence[View],
    axes: int,
    function: str,
    gamma: Struct,
    beta: Struct,
    operands: Sequence[Struct],
    vectors: Vectors,
) -> Struct:
    """Return the mirror of FusedStore."""
    to = struct_list("Outputs", [store_to(out, axes, vectors) for out in outs])
    affine, given = affine_columns(gamma, beta), struct_list("Operands", operands)
    dtype = np.dtype(
        [("to", to.dtype), ("affine", affine.dtype), ("operands", given.dtype)],
        align=True,
    )
    type_name = f"cupynorm::FusedStore<cupynorm::{function}, {affine.cpp}, {to.cpp}, {given.cpp}>"
    return Struct(type_name, dtype, (to.values, affine.values, given.values))


def scaled_store(
    out: View,
    axes: int,
    gamma: Struct,
    beta: Struct,
    scales: int,
    limit: float,
    compute: Dtype,
    vectors: Vectors,
) -> Struct:
    """Return the mirror of ScaledStore.

    scales: the pointer of the rows' scales. limit: the largest number that is stored.
    """
    to, affine = store_to(out, axes, vectors), affine_columns(gamma, beta)
    dtype = np.dtype(
        [("to", to.dtype), ("affine", affine.dtype), ("scales", POINTER), ("limit", compute)], align=True
    )
    type_name = f"cupynorm::ScaledStore<{cpp(compute)}, {to.cpp}, {affine.cpp}>"
    return Struct(type_name, dtype, (to.values, affine.values, scales, limit))


def arguments(op: Struct, load: Struct, store: Struct, rows: int, cols: int) -> Struct:
    """Return the mirror of Arguments: the one argument of every row kernel."""
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
    type_name = f"cupynorm::Arguments<{op.cpp}, {load.cpp}, {store.cpp}>"
    return Struct(type_name, dtype, (load.values, store.values, rows, cols, op.values))


def summed_arguments(of: Struct, partial: Sequence[int], groups: RowGroups) -> Struct:
    """Return the mirror of SummedArguments: those of a row kernel, and a pointer of each sum's partial sums."""
    places = [(f"partial{at}", POINTER) for at in range(len(partial))]
    dtype = np.dtype(
        [
            ("of", of.dtype),
            *((name, np.int64) for name in ("rows_of_group", "groups", "interleaved")),
            *places,
        ],
        align=True,
    )
    types = of.cpp.partition("<")[2].removesuffix(">")
    type_name = f"cupynorm::SummedArguments<{types}, {len(partial)}>"
    return Struct(
        type_name, dtype, (of.values, groups.rows_of_group, groups.groups, groups.interleaved, *partial)
    )
