"""Lowers sums over rows, such as the gradient of gamma: mirrors of kernels/row/column_sums.cuh, and its launches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, cpp, cpp_of_element
from cupynorm._values import NamedTuple
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.lower.expressions import IDENTITY, Expression
from cupynorm.lower.layouts import Moved, elements_of_access
from cupynorm.lower.mirrors import (
    EMPTY,
    POINTER,
    Struct,
    direct,
    kept,
    operand,
    strided,
    strided64,
    struct_list,
    value,
)
from cupynorm.lower.spec import KernelSpec
from cupynorm.lower.vectors import Vectors, is_per_row
from cupynorm.plan.config import ACCESS_BYTES, FLOAT_BYTES, LINE_BYTES
from cupynorm.plan.lowering import numbers
from cupynorm.runtime import compiler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.plan.limits import Limits

SOURCE, UNALIGNED_SOURCE = "row/column_sums.cuh", "row/unaligned_sums.cuh"
KERNEL, UNALIGNED_KERNEL = (
    f"cupynorm::{name}<{{types}}, {{numbers}}>" for name in ("sum_columns", "sum_unaligned_columns")
)
THREADS = 256  # of a block
LANES = 32  # threads side by side along a row, at most
MOST_ROWS_UNALIGNED = 1 << 30  # are counted in 32 bits
NUMBERS = numbers().sums
MAX_GROUPS = 65535  # of a grid along y


class Result(NamedTuple):
    """Where the sum of each column goes: from column `first` of an array on. adds: it is added to what is there."""

    to: View
    adds: bool = False
    first: int = 0


class Further(NamedTuple):
    """An array from column `first` of its rows on, which reach as far behind that as others do."""

    array: View
    first: int

    @property
    def view(self) -> View:
        """The same as a view; its pointer is no longer known to be an argument of the call."""
        pointer = self.array.pointer + self.first * self.array.strides[-1]
        return self.array._replace(pointer=pointer)


Operand = View | Further | Moved | float | Dropout


class Sums(NamedTuple):
    """Sums over rows of what a function of operands gives.

    operands: arrays stretched to one shape, of which the last `axes` axes are the columns, or numbers, or a dropout.
    function: gives a number for each of results, of all operands. results: of the columns' shape; None: nobody asked.
    elements: arrays of that one shape which the first of these numbers are written to, too.
    pieces: 0, or the elements of a vector in which columns are read and written that do not all lie next to one
    another: every vector's do, in all arrays that are read by rows, and in all that are written.
    """

    function: Expression
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    axes: int
    results: tuple[Result | None, ...]
    elements: tuple[View | Further | Moved, ...] = ()
    pieces: int = 0

    @property
    def rows(self) -> int:
        """How many numbers are added up for each column."""
        return math.prod(self.shape[: len(self.shape) - self.axes])

    @property
    def cols(self) -> int:
        """How many columns there are."""
        return math.prod(self.shape[len(self.shape) - self.axes :])


class SumTiles(NamedTuple):
    """How a kernel's blocks cover rows and columns. It depends on no device, and so neither do the sums' bits.

    lanes: threads side by side along a row, of `vector` columns each. width: elements of one store. groups: of rows.
    tiles: of columns. rows_in_flight: rows whose loads a thread issues before it waits for the first. period, unit: of
    unaligned rows, which have a kernel of their own: the rows of a group are `period` apart, and vectors are counted
    from a multiple of `unit` elements; 0: all rows are aligned. blocks: of a multiprocessor, for which the compiler
    leaves registers in that kernel; 0: a thread takes as many as it wants.
    """

    lanes: int
    vector: int
    width: int
    groups: int
    rows_of_group: int
    tiles: int
    rows_in_flight: int
    period: int = 1
    unit: int = 0
    blocks: int = 0

    @property
    def template(self) -> tuple[int, ...]:
        """The kernel's template arguments behind its types."""
        if self.unit:
            return THREADS, self.lanes, self.vector, self.rows_in_flight, self.blocks
        return THREADS, self.lanes, self.vector, self.width, self.rows_in_flight

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks along the columns, and groups of rows."""
        return self.tiles, self.groups, 1

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block."""
        return THREADS, 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    def summary(self) -> dict[str, Any]:
        """Return what explain shows of it."""
        return self._asdict()


class SumProblem(NamedTuple):
    """The problem of one launch, with its answer."""

    rows: int
    cols: int
    tiles: SumTiles

    def plan(self, _limits: Limits) -> SumTiles:
        """Return how blocks cover rows and columns."""
        return self.tiles

    def summary(self) -> dict[str, int]:
        """Return what explain shows of it."""
        return {"rows": self.rows, "cols": self.cols}


def tiles_of(
    rows: int,
    cols: int,
    vector: int,
    width: int,
    compute: Dtype,
    most_lanes: int,
    blocks: int | None,
    loads: tuple[int, int] | None = None,
) -> SumTiles:
    """Choose how blocks cover rows and columns; about `blocks` of them where there are rows enough.

    blocks: None for as many as there are rows for. loads: rows in flight times bytes of `compute`, and how often a
    group has so many, at least; default: as the rules have it.
    """
    vectors = -(-cols // vector)
    lanes = min(most_lanes, 1 << (vectors - 1).bit_length())
    tiles = -(-vectors // lanes)
    bytes_in_flight, batches = loads or (NUMBERS.bytes_in_flight, NUMBERS.min_batches)
    in_flight = bytes_in_flight // compute.itemsize
    batch = THREADS // lanes * in_flight
    most = MAX_GROUPS if blocks is None else -(-blocks // tiles)
    wanted = max(1, min(most, rows // (batch * batches)))
    # whole batches, as rows that are left are loaded one by one
    rows_of_group = max(1, rows if wanted == 1 else -(-rows // (wanted * batch)) * batch)
    groups = max(1, -(-rows // rows_of_group))
    return SumTiles(lanes, vector, width, groups, rows_of_group, tiles, in_flight)


def first_tiles(what: Sums, compute: Dtype) -> SumTiles:
    """Return how blocks cover the elements."""
    if what.pieces:
        tiles = tiles_of(what.rows, what.cols, what.pieces, what.pieces, compute, LANES, NUMBERS.blocks)
        # the places of single elements take registers, and so do doubles: the compiler spills (sm_90)
        some = 1 if compute == np.float64 else 2 if what.pieces == 1 else tiles.rows_in_flight
        return tiles._replace(rows_in_flight=min(some, tiles.rows_in_flight))
    arrays = [_view(each) for each in (*what.operands, *what.elements) if isinstance(each, ARRAYS)]
    along = [each for each in arrays if not is_per_row(each, what.axes)]
    widest = max((each.dtype.itemsize for each in along), default=ACCESS_BYTES)
    vector = min(ACCESS_BYTES // widest, 1 << (what.cols.bit_length() - 1))
    if found := _unaligned_tiles(what, compute, vector):
        return found
    width = min(
        (Vectors(vector).access_of(_view(each), what.axes) for each in what.elements),
        default=1,
    )
    both, blocks, loads = _of_both_halves(what), _most_blocks(what), None
    # groups of few rows, as nothing is added up, or as rows have one tile and several arrays are written
    if blocks is None or (len(what.elements) > 1 and not both and what.cols <= LANES * vector):
        loads = NUMBERS.short_bytes_in_flight, NUMBERS.short_min_batches
    elif compute.itemsize == 2 * widest and _is_narrow(what):
        blocks, loads = NUMBERS.narrow_blocks, (NUMBERS.narrow_bytes_in_flight, NUMBERS.min_batches)
    tiles = tiles_of(what.rows, what.cols, vector, width, compute, LANES, blocks, loads)
    # two accesses, or sums of both halves of a gate, take as many more registers
    if both or any(_in_two(each, what, vector) for each in arrays):
        return tiles._replace(rows_in_flight=max(1, tiles.rows_in_flight // 2))
    return tiles


def _most_blocks(what: Sums) -> int | None:
    """Return how many blocks there are at most; None if nothing is added up: the more, the nearer what they move."""
    if not any(what.results):
        return None
    return NUMBERS.blocks_with_elements if what.elements else NUMBERS.blocks


def _is_narrow(what: Sums) -> bool:
    """Say whether rows of 16 bits that are written and added up are so narrow that all blocks should run at once.

    Partial sums cost the more the more groups there are.
    """
    least, most = NUMBERS.narrow_cols
    fewest_rows, most_rows = NUMBERS.narrow_rows
    return len(what.elements) == 1 and least <= what.cols <= most and fewest_rows <= what.rows <= most_rows


def _of_both_halves(what: Sums) -> bool:
    return len(what.elements) > 1 and sum(each is not None for each in what.results) > 1


def _unaligned_tiles(what: Sums, compute: Dtype, vector: int) -> SumTiles | None:
    """Return how blocks cover elements that are written, where rows are not aligned to vectors.

    So are rows that begin at vectors, but not at lines of memory, if they are added up.

    None where rows are aligned, where too few have the same alignment, and where arrays are not moved in vectors.
    """
    if not what.elements or vector == 1 or any(isinstance(each, Dropout) for each in what.operands):
        return None
    anchor, *others = (_view(each) for each in (*what.elements, *what.operands) if isinstance(each, ARRAYS))
    others = [each for each in others if not is_per_row(each, what.axes)]
    arrays = [each for each in (anchor, *others) if any(each.strides[: len(each.strides) - what.axes])]
    extents, strides = anchor.split(what.axes)[0].collapsed()
    scattered = not all(each.split(what.axes)[1].is_contiguous() for each in (anchor, *others))
    whole = all(Vectors(vector, realigned=True).access_of(each, what.axes) for each in arrays)
    if scattered or len(extents) > 1 or what.rows > MOST_ROWS_UNALIGNED:
        return None
    line, like = LINE_BYTES // anchor.dtype.itemsize, Vectors(vector, like=anchor)
    if whole and (not any(what.results) or strides[0] % line == 0):
        return None
    apart = any(not like.access_of(each, what.axes) for each in arrays)
    # wide tiles where arrays differ in alignment, since only the ends of a tile then share lines with others
    lanes = NUMBERS.apart_lanes if apart else LANES
    found = []
    at_lines = NUMBERS.min_rows_of_vectors if whole else NUMBERS.min_rows_at_lines
    for unit, least in ((line, at_lines), (vector, NUMBERS.min_rows_at_vectors)):
        period = unit // math.gcd(unit, strides[0])
        if what.rows >= least * period:
            found.append(_tiles_of_alignment(what, compute, vector, unit, period, lanes, apart=apart))
    # at lines, unless more threads would be idle
    best = min(found, key=lambda each: each.lanes * each.tiles, default=None)
    return best if best is None or best.unit == line or not whole else None


def _tiles_of_alignment(
    what: Sums, compute: Dtype, vector: int, unit: int, period: int, most_lanes: int, *, apart: bool
) -> SumTiles:
    """Choose how blocks cover rows of which every period-th has the same alignment. apart: as in _unaligned_loads()."""
    vectors = -(-(what.cols + unit - 1) // vector)  # with what may be before the row's first column
    lanes = min(most_lanes, 1 << (vectors - 1).bit_length())
    while lanes > LANES and vectors < NUMBERS.lanes_in_use * (-(-vectors // lanes) * lanes):
        lanes //= 2
    in_flight, batches, of_multiprocessor = _unaligned_loads(what, compute, vector, lanes, apart=apart)
    tiles, rows = -(-vectors // lanes), -(-what.rows // period)
    batch = THREADS // lanes * in_flight
    least = max(batch * batches, NUMBERS.min_rows_summed if any(what.results) else 1)
    blocks = _most_blocks(what)
    most = MAX_GROUPS // period if blocks is None else -(-blocks // (tiles * period))
    wanted = max(1, min(most, rows // least))
    rows_of_group = -(-rows // (wanted * batch)) * batch
    groups = period * -(-rows // rows_of_group)
    return SumTiles(
        lanes, vector, vector, groups, rows_of_group, tiles, in_flight, period, unit, of_multiprocessor
    )


def _unaligned_loads(
    what: Sums, compute: Dtype, vector: int, lanes: int, *, apart: bool
) -> tuple[int, int, int]:
    """Return for unaligned rows how many are in flight, how often at least a group has so many, and SumTiles.blocks.

    apart: arrays differ in alignment. In 16 bits much is computed for few bytes, so many threads matter most.
    """
    summed, several = any(what.results), len(what.elements) > 1
    bytes_in_flight = NUMBERS.bytes_in_flight // (1 + (apart or _of_both_halves(what)))
    found = bytes_in_flight, NUMBERS.min_batches, 0
    if compute.itemsize == FLOAT_BYTES and vector * compute.itemsize == 2 * ACCESS_BYTES:
        many = what.rows * what.cols >= NUMBERS.min_elements_apart
        if apart and many and not summed and lanes < NUMBERS.apart_lanes:
            found = NUMBERS.halves_apart
        elif summed and not (apart or several):
            found = NUMBERS.halves_summed
    bytes_in_flight, batches, blocks = found
    return max(1, bytes_in_flight // compute.itemsize), batches, blocks


def _in_two(each: View, what: Sums, vector: int) -> bool:
    """Say whether vectors of an array take two accesses, as they begin anywhere."""
    along = not is_per_row(each, what.axes) and each.split(what.axes)[1].is_contiguous()
    return along and vector > 1 and Vectors(vector, realigned=True).access_of(each, what.axes) == 0


ARRAYS = (View, Further, Moved)


def _view(each: View | Further | Moved) -> View:
    return each if isinstance(each, View) else each.view


def partial_shape(what: Sums, compute: Dtype) -> tuple[int, int] | None:
    """Return the shape of each result's partial sums, in the type of arithmetic; None if one launch does it all."""
    groups = first_tiles(what, compute).groups
    return None if groups == 1 or not any(what.results) else (groups, what.cols)


def nowhere(groups: int, cols: int, compute: Dtype) -> View:
    """Return partial sums that have no place yet, to ask about a kernel that writes some."""
    return View(0, (groups, cols), (cols * compute.itemsize, compute.itemsize), compute)


def sums_of_groups(partial: Sequence[View], results: Sequence[Result]) -> KernelSpec:
    """Lower the sums of all groups' sums. partial: for each result an array [groups, cols] of the arithmetic's type."""
    count, (groups, cols), compute = len(partial), partial[0].shape, partial[0].dtype
    what = Sums(Expression(count, (), (*range(count),)), (*partial,), (groups, cols), 1, tuple(results))
    vector = min(ACCESS_BYTES // compute.itemsize, 1 << (cols.bit_length() - 1))
    lanes = min(NUMBERS.last_lanes, max(NUMBERS.min_last_lanes, 1 << (2 * THREADS // groups).bit_length()))
    tiles = tiles_of(groups, cols, vector, 1, compute, lanes, 1)
    in_flight = min(NUMBERS.last_in_flight, -(-groups // (THREADS // tiles.lanes)))
    tiles = tiles._replace(rows_in_flight=in_flight)
    return _spec(what, compute, tiles, [_final(each) for each in results])


def broadcast_sums(columns: View, to: Result) -> Sums:
    """Return the sums of one number a column over the columns along which a parameter was broadcast.

    columns: of the normalised axes' shape. to: the parameter's gradient, stretched to that shape.
    """
    axes = range(len(columns.shape))
    kept = [at for at in axes if to.to.strides[at] or columns.shape[at] == 1]
    summed = [at for at in axes if at not in kept]
    moved = columns.reordered((*summed, *kept))
    target = View(
        to.to.pointer,
        tuple(to.to.shape[at] for at in kept),
        tuple(to.to.strides[at] for at in kept),
        to.to.dtype,
    )
    return Sums(IDENTITY, (moved,), moved.shape, len(kept), (to._replace(to=target),))


def sum_specs(what: Sums, compute: Dtype, partial: Sequence[View]) -> list[KernelSpec]:
    """Lower sums over rows: one launch, or two if there are partial sums.

    partial: an array of partial_shape() for each result that is asked for; none if that is None.
    """
    if not what.rows:  # the sums are 0, and no array has a first element
        zeros = Expression(1, (), (0,) * len(what.results))
        what = what._replace(function=zeros, operands=(0.0,), elements=())
    tiles = first_tiles(what, compute)
    asked = tuple(each for each in what.results if each is not None)
    if not partial:
        return [_spec(what, compute, tiles, [_final(each) for each in what.results])]
    left = list(partial)
    targets = [_partial(left.pop(0)) if each is not None else NO_SUM for each in what.results]
    return [_spec(what, compute, tiles, targets), sums_of_groups(partial, asked)]


NO_SUM = Struct("cupynorm::NoSum", EMPTY, (0,))


def _partial(where: View) -> Struct:
    """Return the mirror of PartialSum."""
    dtype = np.dtype([("pointer", POINTER)], align=True)
    return Struct(f"cupynorm::PartialSum<{cpp(where.dtype)}>", dtype, (where.pointer,))


def _final(result: Result | None) -> Struct:
    """Return the mirror of FinalSum, or of NoSum."""
    if result is None:
        return NO_SUM
    index = strided(result.to)
    dtype = np.dtype([("pointer", POINTER), ("cols", index.dtype), ("first", np.int64)], align=True)
    adds = compiler.template_argument(result.adds)
    type_name = f"cupynorm::FinalSum<{cpp(result.to.dtype)}, {index.cpp}, {adds}>"
    return Struct(type_name, dtype, (result.to.pointer, index.values, result.first))


def _elements(what: Sums, like: Vectors | None) -> Struct:
    """Return the mirror of Elements. like: the vectors of unaligned rows."""
    types: list[str] = []
    dtype, values = EMPTY, (0,)
    for each in reversed(what.elements):
        array, first = (each, 0) if isinstance(each, View) else each
        to = direct("DirectStore", array.split(what.axes)[0])
        if what.pieces:
            to, first = _piece_store(array, first, what.axes), 0
        elif like is not None and not like.access_of(_view(each), what.axes):
            to = to._replace(cpp=f"cupynorm::AlignedOtherwise<{to.cpp}>")
        dtype = np.dtype([("to", to.dtype), ("first", np.int64), ("rest", dtype)], align=True)
        values = (to.values, first, values)  # type: ignore[assignment]
        types.insert(0, to.cpp)
    return Struct(f"cupynorm::Elements<{', '.join(types)}>", dtype, values)


def _moved(of: Struct, given: Moved) -> Struct:
    """Return the mirror of Moved around an operand, or the operand where it is not moved."""
    of = of._replace(values=(given.array.pointer, *of.values[1:]))
    if not given.first:
        return of
    dtype = np.dtype([("operand", of.dtype), ("first", np.int64)], align=True)
    return Struct(f"cupynorm::Moved<{of.cpp}>", dtype, (of.values, given.first))


def _of_pieces(given: View | Further | Moved, what: Sums) -> Struct:
    """Return the mirror of InPieces; of an operand that has one element a row, or whose columns lie apart, its own."""
    array, first = (given, 0) if isinstance(given, View) else given
    last, size = array.strides[-1], array.dtype.itemsize
    short = what.pieces == 1 or last in {0, size}
    if is_per_row(array, what.axes) or not short:
        of = operand(array, what.axes, Vectors(1), constant=False)
        return _moved(of, Moved(array, first))
    rows, cols = (strided64(each) for each in array.split(what.axes))
    repeated = last == 0 and what.pieces > 1
    width = 0 if repeated else elements_of_access(array, first, min(what.pieces, ACCESS_BYTES // size))
    same = not any(array.strides[: len(array.strides) - what.axes])
    dtype = np.dtype(
        [("pointer", POINTER), ("first", np.int64), ("rows", rows.dtype), ("cols", cols.dtype)], align=True
    )
    types = f"{cpp_of_element(array.dtype)}, {rows.cpp}, {cols.cpp}"
    type_name = f"cupynorm::InPieces<{types}, {width}, {compiler.template_argument(same)}>"
    return Struct(type_name, dtype, (array.pointer, first, rows.values, cols.values))


def _piece_store(array: View, first: int, axes: int) -> Struct:
    """Return the mirror of PieceStore."""
    rows, cols = (strided64(each) for each in array.split(axes))
    dtype = np.dtype(
        [("pointer", POINTER), ("first", np.int64), ("rows", rows.dtype), ("cols", cols.dtype)], align=True
    )
    type_name = f"cupynorm::PieceStore<{cpp_of_element(array.dtype)}, {rows.cpp}, {cols.cpp}>"
    return Struct(type_name, dtype, (array.pointer, first, rows.values, cols.values))


def _spec(what: Sums, compute: Dtype, tiles: SumTiles, targets: Sequence[Struct]) -> KernelSpec:
    """Lower one launch."""
    target = struct_list("SumTargets", targets)
    vectors = Vectors(tiles.vector, realigned=True)
    if tiles.unit:
        vectors = Vectors(tiles.vector, like=_view(what.elements[0]))

    def operand_of(given: Operand) -> Struct:
        if isinstance(given, Dropout):
            return kept(given, what.cols, whole=False)
        if not isinstance(given, ARRAYS):
            return value(given, compute)
        if what.pieces:
            return _of_pieces(given, what)
        # What takes two accesses is loaded as if it could be written: ptxas moves other loads behind the first row's
        # stores, and only one row is in flight.
        whole = not what.elements or vectors.access_of(_view(given), what.axes) > 0
        of = operand(_view(given), what.axes, vectors, constant=whole and given not in what.elements)
        if isinstance(given, View):
            return of
        moved = given
        if isinstance(given, Further) and is_per_row(given.array, what.axes):
            # one element for both halves, or for each
            moved = Moved(given.array, given.first * given.array.strides[-1] // given.array.dtype.itemsize)
        if isinstance(moved, Moved):
            return _moved(of, moved)
        of = of._replace(values=(given.array.pointer, *of.values[1:]))
        dtype = np.dtype([("operand", of.dtype), ("first", np.int64)], align=True)
        return Struct(f"cupynorm::Further<{of.cpp}>", dtype, (of.values, given.first))

    operands = struct_list("Operands", [operand_of(each) for each in what.operands])
    elements = _elements(what, vectors if tiles.unit else None)
    members = [("operands", operands.dtype), ("elements", elements.dtype), ("targets", target.dtype)]
    numbers = {"rows": what.rows, "cols": what.cols, "rows_of_group": tiles.rows_of_group}
    arguments, source, name = "SumArguments", SOURCE, KERNEL
    if tiles.unit:
        numbers.update(period=tiles.period, unit=tiles.unit)
        arguments, source, name = "UnalignedSumArguments", UNALIGNED_SOURCE, UNALIGNED_KERNEL
    structs = f"{operands.cpp}, {elements.cpp}, {target.cpp}"
    dtype = np.dtype([*members, *((each, np.int64) for each in numbers)], align=True)
    values = (operands.values, elements.values, target.values, *numbers.values())
    whole = Struct(f"cupynorm::{arguments}<{structs}>", dtype, values)
    function = f"Function_{what.function.key}"
    texts = [what.function.struct_text(function)]
    text = compiler.text(source, whole.cpp, whole.dtype.itemsize, texts, header="io/fused.cuh")
    types = f"{cpp(compute)}, cupynorm::{function}, {len(what.results)}, {structs}"
    return KernelSpec(text, name, types, whole, SumProblem(what.rows, what.cols, tiles))
