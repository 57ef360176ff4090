"""Row ops in the kernels' terms, with what is computed around them (lower/around.py)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from cupynorm._dtypes import Dtype, is_integer
from cupynorm._values import NamedTuple
from cupynorm.call.masks import Mask
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.host.reference import LARGEST
from cupynorm.lower.around import Around, Function, Label, Operand, RowSums
from cupynorm.lower.expressions import IDENTITY, Expression
from cupynorm.lower.masks import mask_struct
from cupynorm.lower.mirrors import (
    Struct,
    arguments,
    column,
    direct_load,
    fused_load,
    fused_store,
    kept,
    kept_anywhere,
    label_counts,
    label_mask,
    labelled,
    no_store,
    operand,
    roomy,
    scaled_store,
    summed_arguments,
    value,
)
from cupynorm.lower.row import ROW_KERNEL, SUMMED_APART_KERNEL, SUMMED_KERNEL, RowOp, types_of
from cupynorm.lower.spec import KernelSpec
from cupynorm.lower.vectors import (
    Vectors,
    across_width,
    adjoins_next,
    begins_whole,
    common_alignment,
    is_in_runs,
    is_per_row,
    is_stretch,
    lies_alike,
    prefetched_bytes,
    run_width,
    vector_width,
)
from cupynorm.plan.config import DOUBLE_BYTES, HALF_BYTES
from cupynorm.plan.lowering import numbers
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupynorm.lower.row_groups import RowGroups
    from cupynorm.lower.vectors import RowAlignment

NUMBERS = numbers().fused


class _Setting(NamedTuple):
    """What loads, stores and their operands are lowered with. written: the arrays that results go to.

    anywhere: rows are unaligned, as the first result is.
    """

    x: View
    axes: int
    cols: int
    compute: Dtype
    vectors: Vectors
    written: Sequence[View]
    anywhere: bool

    def operand(self, given: Operand) -> Struct:
        """Return the struct that loads an operand."""
        if isinstance(given, Dropout):
            if self.vectors.across:
                return kept_anywhere(given, _numbers(self.x), self.axes)
            whole = not self.anywhere or begins_whole(self.written[0], self.vectors.width)
            return kept(given, self.cols, whole=whole)
        if isinstance(given, Label):
            return label_mask(given.labels, self.cols, nan=given.nan)
        if not isinstance(given, View):
            return value(given, self.compute)
        return operand(given, self.axes, self.vectors, constant=given not in self.written)


def fused_spec(
    op: RowOp,
    x: View,
    axes: int,
    columns: Mapping[str, View],
    stats: Sequence[int],
    eps: float | tuple[float, ...],
    compute: Dtype,
    what: Around,
) -> KernelSpec:
    """Lower a row op with what is computed around it.

    Where a row's elements lie apart from one another, in x or in a result, all of them are accessed one by one; in
    vectors where they lie in runs.
    """
    shape = x.shape[len(x.shape) - axes :]
    rows, cols = math.prod(x.shape[: len(x.shape) - axes]), math.prod(shape)
    mirror = op.mirror(compute, stats, eps)
    gamma, beta = (column(columns.get(name), shape) for name in ("gamma", "beta"))
    numbered = stats or what.sums is not None  # rows, by their places
    apart = lies_apart(x, axes, *_written(what))
    in_runs = apart and what.sums is None and all(is_in_runs(each, axes) for each in (x, *_written(what)))
    apart = apart and not in_runs
    order = tuple(range(len(x.shape) - axes)) if numbered or apart else _order(x, axes, what)
    x, what = x.reordered(order), _loaded(x, what).reordered(order)
    written = _written(what) or (x,)  # nothing is: rows are cut as x is aligned
    problem = _problem(
        x, written, axes, compute, columns, what, apart=apart, in_runs=in_runs, rounds=op.rounds
    )
    vectors = _vectors(problem, written[0], short=bool(columns), apart=apart)
    vectors = vectors._replace(in_runs=in_runs, shifted=x if problem.shifted else None)
    anywhere = vectors.like is not None
    setting = _Setting(x, axes, cols, compute, vectors, written, anywhere)
    load, of_load = _load_of(setting, what, order)
    store, of_store = _store_of(setting, what, gamma, beta)
    functions = [*of_load, *of_store]
    load, store = _with_label(what, load, store, cols, compute)
    store = roomy(store) if problem.room else store
    whole = arguments(mirror, load, store, rows, cols)
    problem = dataclasses.replace(
        problem,
        fields=op.fields,
        late_exponential=op.late_exponential,
        early_exponential=op.early_exponential,
        rounds=op.rounds,
        sums_of_bytes=op.sums_of_bytes,
        row_numbers=op.row_numbers,
        waits_as_loaded=_waits_as_loaded(what, axes),
        holds_operands=op.of_sums and problem.in_steps and _may_hold_operands(what, axes),
        extra_registers=problem.extra_registers + op.registers + sum(map(_registers_of, functions)),
        staged_operand_bytes=_staged_bytes(what, axes, vectors, order),
    )
    texts = [each.struct_text(_name_of(each)) for each in functions]
    types = types_of(mirror, load, store)
    if what.sums is not None:
        name = SUMMED_APART_KERNEL if apart else SUMMED_KERNEL
        return _with_sums(op, KernelSpec("", name, types, whole, problem), what.sums, texts)
    header = "row/variants_apart.cuh" if apart else "row/variants.cuh"
    text = compiler.text(op.source, whole.cpp, whole.dtype.itemsize, texts, header=header)
    return KernelSpec(text, ROW_KERNEL, types, whole, problem)


def _written(what: Around) -> tuple[View, ...]:
    """Return the arrays that are written, those of results first."""
    return what.outs if what.loaded is None else (*what.outs, what.loaded)


def _vectors(problem: Problem, first: View, *, short: bool, apart: bool) -> Vectors:
    """Return the vectors that rows are accessed in, which begin as those of the first result. short: as in Vectors."""
    worked = problem
    if problem.unaligned:
        from cupynorm.plan.choose import effective  # noqa: PLC0415  the planner is loaded by the first call that needs it

        worked = effective(problem)
    anywhere = bool(worked.unaligned)
    return Vectors(
        1 if apart else worked.vector,
        first if anywhere else None,
        short=short or not anywhere,
        across=apart,
    )


def _name_of(function: Function) -> str:
    return f"Function_{function.key}"


def _load_of(setting: _Setting, what: Around, order: Sequence[int]) -> tuple[Struct, list[Function]]:
    """Return what loads x, and the functions that it calls."""
    x, axes, vectors = setting.x, setting.axes, setting.vectors
    if what.is_direct and not vectors.across:
        return direct_load(x, axes), []
    masked = (
        mask_struct(what.mask, setting.vectors, order)
        if what.counted is None
        else label_counts(what.counted.labels, what.counted.ignored, setting.cols)
    )
    function = what.load or IDENTITY
    operands = [setting.operand(each) for each in what.load_operands]
    load = fused_load(x, axes, _name_of(function), masked, what.loaded, operands, vectors)
    return load, [function]


def _store_of(setting: _Setting, what: Around, gamma: Struct, beta: Struct) -> tuple[Struct, list[Function]]:
    """Return what stores results, with affine parameters, and the functions that it calls."""
    axes, vectors = setting.axes, setting.vectors
    if what.scales:
        limit = LARGEST[what.outs[0].dtype.name]
        store = scaled_store(what.outs[0], axes, gamma, beta, what.scales, limit, setting.compute, vectors)
        return store, []
    if not what.outs:
        return no_store(setting.x.split(axes)[0], what.room), []
    function = what.store or IDENTITY
    operands = [setting.operand(each) for each in what.store_operands]
    store = fused_store(what.outs, axes, _name_of(function), gamma, beta, operands, vectors)
    return store, [function]


def _with_sums(op: RowOp, spec: KernelSpec, sums: RowSums, texts: Sequence[str]) -> KernelSpec:
    """Return a row op's kernel, still without a text, with sums over rows in the same pass."""
    problem = dataclasses.replace(spec.problem, row_groups=sums.groups.groups)
    pointers = [each.pointer for each in sums.partial]
    whole = summed_arguments(spec.params, pointers, sums.groups)
    header = "row/summed_apart.cuh" if problem.across else "row/summed.cuh"
    text = compiler.text(op.source, whole.cpp, whole.dtype.itemsize, texts, header=header)
    types = f"{spec.types}, {sums.of_load}, {sums.of_store}"
    return spec._replace(text=text, types=types, params=whole, problem=problem)


def _of_groups(groups: RowGroups, alignment: RowAlignment) -> RowAlignment | None:
    """Return the alignment of a group's rows; None where they have several."""
    return alignment if alignment.period and groups.interleaved % alignment.period == 0 else None


def lies_apart(x: View, axes: int, *written: View) -> bool:
    """Say whether a row's elements do not lie next to one another in one of the arrays."""
    return not all(each.split(axes)[1].is_contiguous() for each in (x, *written))


def _across(x: View, axes: int) -> int:
    """Return how many rows lie next to one another, element by element; 1 if none do."""
    extents, strides = x.split(axes)[0].collapsed()
    return extents[-1] if strides[-1] == 1 else 1


def _may_be_shifted(x: View, what: Around, axes: int) -> bool:
    """Say whether two neighbouring rows may be accessed at once where they are aligned, in x and what is written.

    Threads that share a row draw a dropout together, by the rows that their lanes have (kernels/row/drawn.cuh).
    """
    drawn = any(isinstance(each, Dropout) for each in what.operands)
    odd = x.dtype.itemsize <= HALF_BYTES and across_width(x, axes) == 1 and not drawn
    return odd and all(lies_alike(each, x, axes) for each in (x, *_written(what)))


def _stretches(x: View, what: Around, axes: int) -> tuple[tuple[int, ...], bool]:
    """Return what Problem says of stretches: kernels/row/stretch.cuh.

    Operands and a mask's bytes come as stretches if their elements lie anywhere (Scattered); the others are the same
    for all rows, or for all of a row.
    """
    asked = any(each is not None for each in (what.counted, what.labelled, what.sums))
    if asked or what.scales or len(what.outs) > 1 or any(isinstance(each, Dropout) for each in what.operands):
        return (), False
    where = None if what.mask is None else what.mask.views().get("where")
    beside = [each for each in (*what.load_operands, where) if isinstance(each, View)]
    loaded = [x, *(each for each in beside if not (is_per_row(each, axes) or _is_along(each, axes)))]
    results, across = _written(what), _across(x, axes)
    if not all(is_stretch(each, axes, across) for each in (*loaded, *results)):
        return (), False
    sizes = [each.dtype.itemsize for each in (*loaded, *results)]
    if what.outs and what.outs[0].dtype.itemsize == x.dtype.itemsize:
        del sizes[len(loaded)]  # the result has the places of x
    return tuple(sizes), all(adjoins_next(each, axes, across) for each in (*loaded, *results))


def _is_along(each: View, axes: int) -> bool:
    return each.split(axes)[1].is_contiguous()


def _numbers(x: View) -> View:
    """Return the numbers of x's elements, in C order, as the places of a view."""
    strides = [1]
    for extent in reversed(x.shape[1:]):
        strides.append(strides[-1] * extent)
    return View(0, x.shape, tuple(reversed(strides)), np.dtype(np.uint8))


def _with_label(
    what: Around, load: Struct, store: Struct, cols: int, compute: Dtype
) -> tuple[Struct, Struct]:
    """Return a load and a store that know each row's label if there are any, the latter if anything is stored."""
    if what.labelled is None:
        return load, store
    labels, ignored, part = what.labelled
    around = labelled("LabelledLoad", load, labels, ignored, cols)
    if not what.outs:
        return around, store
    return around, labelled("LabelledStore", store, labels, ignored, cols, part, compute)


def _loaded(x: View, what: Around) -> Around:
    """Return the same with a function of x if that holds integers: padding is none, so they are not loaded directly."""
    return what._replace(load=what.load or IDENTITY) if is_integer(x.dtype) else what


def _waits_as_loaded(what: Around, axes: int) -> bool:
    """Say whether what the op is given takes few steps, of x and numbers of its row: kWaitsAsLoaded of a Load."""
    return _has_few_steps(what) and all(_is_of_row(each, axes) for each in what.load_operands)


def _may_hold_operands(what: Around, axes: int) -> bool:
    """Say whether it takes few steps, of x and operands of each element as well: kMayHoldOperands of a Load."""
    of_elements = not all(_is_of_row(each, axes) for each in what.load_operands)
    return _has_few_steps(what) and of_elements and what.mask is None and what.loaded is None


def _has_few_steps(what: Around) -> bool:
    function = what.load or IDENTITY
    return isinstance(function, Expression) and function.has_few_steps


def _is_of_row(given: Operand, axes: int) -> bool:
    return is_per_row(given, axes) if isinstance(given, View) else not isinstance(given, (Dropout, Label))


def _in_steps(x: View, what: Around, axes: int) -> bool:
    """Say whether all that elements lying apart are computed from, and all results, lie at even distances: kInSteps."""
    arrays = [x, *what.outs, *(each for each in what.load_operands if isinstance(each, View))]
    if what.loaded is not None:
        arrays.append(what.loaded)
    if what.mask is not None:
        where = what.mask.views().get("where")
        arrays += [] if where is None or is_per_row(where, axes) else [where]
    # a dropout is drawn for steps (row/drawn.cuh): of what is loaded where no sum over rows is taken, else of results
    lacking = Label if what.sums is None else (Dropout, Label)
    loaded = not any(isinstance(each, lacking) for each in what.load_operands)
    stored = all(_is_of_row(each, axes) for each in what.store_operands)
    if what.sums is not None:  # the kernel has steps of what the results are computed from, too
        arrays += [each for each in what.store_operands if isinstance(each, View)]
        stored = not any(isinstance(each, Label) for each in what.store_operands)
    return loaded and stored and all(_is_even(each, axes) for each in arrays)


def _is_even(each: View, axes: int) -> bool:
    """Say whether the elements of a row of an array are at one distance from one another."""
    return len(each.split(axes)[1].collapsed()[0]) == 1


def _problem(
    x: View,
    written: Sequence[View],
    axes: int,
    compute: Dtype,
    columns: Mapping[str, View],
    what: Around,
    *,
    apart: bool,
    in_runs: bool,
    rounds: bool,
) -> Problem:
    """Return the problem, without what else the op says and the registers of the functions."""
    vector = vector_width(x, written[0], axes, *written[1:])
    if in_runs:
        vector = run_width(vector, axes, x, *written)
    drops, labels = (any(isinstance(each, kind) for each in what.operands) for kind in (Dropout, Label))
    cols = math.prod(x.shape[len(x.shape) - axes :])
    alignment = None if in_runs else common_alignment(x, written, axes)
    if what.sums is not None and alignment is not None:
        alignment = _of_groups(what.sums.groups, alignment)
    where = () if what.mask is None or what.mask.where is None else (what.mask.views()["where"],)
    in_steps = apart and not rounds and _in_steps(x, what, axes)
    given = what.load_operands if in_steps else (*what.load_operands, *where)  # in steps a mask waits as bits
    load_operands = _bytes_of(given, axes, apart=apart)
    is_interval = what.mask is not None and what.mask.is_structural
    doubles = compute.itemsize == DOUBLE_BYTES
    of_interval = NUMBERS.interval_of_doubles if doubles else NUMBERS.interval
    problem = Problem(
        math.prod(x.shape[: len(x.shape) - axes]),
        cols,
        vector,
        x.dtype.itemsize,
        compute.itemsize,
        tuple(each.dtype.itemsize for each in columns.values()),
        *(alignment if alignment is not None and vector < alignment.widest else (vector, 0, 1)),
        fused=True,
        load_operands=load_operands,
        epilogue_operands=_bytes_of(what.store_operands, axes, apart=apart),
        output_bytes=max((each.dtype.itemsize for each in what.outs), default=0),
        outputs=len(what.outs) + (what.loaded is not None) + bool(what.scales) + bool(what.room),
        direct_load=what.is_direct,
        extra_registers=NUMBERS.dropout * drops
        + NUMBERS.label * labels
        + NUMBERS.ignored * (what.labelled is not None and what.counted is not None)
        + NUMBERS.scales * bool(what.scales)
        + NUMBERS.result * max(0, len(what.outs) - 1)
        + NUMBERS.loaded * (what.loaded is not None)
        + of_interval * (is_interval and (bool(load_operands) or doubles)),
        interval_mask=is_interval,
        in_steps=in_steps,
        column_sums=0 if what.sums is None else len(what.sums.partial),
        band_cols=what.mask.band_cols if what.mask is not None and what.mask.has_band else 0,
        masked=bool(columns) and (what.mask is not None or what.counted is not None),
        most_kept=_most_kept(what.mask) if what.counted is None else cols,
    )
    if not apart:
        few = problem.rows < NUMBERS.few_rows and cols * x.dtype.itemsize >= NUMBERS.long_bytes
        room = what.sums is None and bool(what.outs) and (in_runs or few)
        return dataclasses.replace(problem, room=room)
    stretches, adjoining = _stretches(x, what, axes) if in_steps else ((), False)
    return dataclasses.replace(
        problem,
        vector=across_width(x, axes),
        widest_vector=0,
        unaligned=0,
        alignment_period=1,
        across=_across(x, axes),
        stretches=stretches,
        adjoining_stretches=adjoining,
        shifted=in_steps and what.sums is None and _may_be_shifted(x, what, axes),
        room=True,
    )


def _most_kept(mask: Mask | None) -> int:
    """Return the columns that a row keeps at most, no fewer than 1; 0: not an interval (kInterval of a Load)."""
    if mask is None:
        return 0
    whole_rows = mask.where is not None and is_per_row(mask.views()["where"], mask.axes)
    return max(1, mask.most_band_cols) if mask.is_structural or whole_rows else 0


def _is_of_columns(stretched: View, axes: int) -> bool:
    """Say whether an operand has the same elements for every row (kOfColumns in C++)."""
    rows = stretched.split(axes)[0]
    return not any(stride for stride, extent in zip(rows.strides, rows.shape, strict=True) if extent > 1)


def _staged_bytes(what: Around, axes: int, vectors: Vectors, order: Sequence[int]) -> int:
    """Return the bytes of an element that go through shared memory with x's where rows are prefetched."""
    staged = [each for each in what.load_operands if isinstance(each, View)]
    if what.sums is not None:  # what the results are computed from, too; threads keep what all rows share
        staged += [each for each in what.store_operands if isinstance(each, View)]
        staged = [each for each in staged if not _is_of_columns(each, axes)]
    if what.mask is not None and what.mask.where is not None:
        staged.append(what.mask.views()["where"].reordered(order))
    return sum(prefetched_bytes(each, axes, vectors) for each in staged)


def _order(x: View, axes: int, what: Around) -> tuple[int, ...]:
    """Return in which order to go through x's leading axes: rows that share one of an operand follow one another.

    In C order a bias of every query for all batches comes from memory again for each of them, where L2 does not hold
    it. Rows keep their places where their number says something: a dropout's words, scales, the query of a band.
    """
    leading = len(x.shape) - axes
    order = tuple(range(leading))
    mask = what.mask
    numbered = bool(what.scales) or any(isinstance(each, Dropout) for each in what.operands)
    if numbered or (mask is not None and mask.has_band):
        return order
    views = [each for each in what.operands if isinstance(each, View)]
    views += [] if mask is None or mask.where is None else [mask.views()["where"]]
    most = 0
    for each in views:
        if not any(each.strides[leading:]):
            continue
        shared = [axis for axis in range(leading) if x.shape[axis] > 1 and each.strides[axis] == 0]
        if not shared:
            continue
        inner = [axis for axis in range(shared[0], leading) if axis not in shared]
        count = math.prod(x.shape[axis] for axis in inner) * math.prod(x.shape[leading:])
        between = count * sum(one.dtype.itemsize for one in (x, each, *what.outs))
        if between > NUMBERS.forgotten_bytes and count * each.dtype.itemsize > most:
            most = count * each.dtype.itemsize
            order = (*(axis for axis in range(leading) if axis not in shared), *shared)
    return order


def _registers_of(function: Function) -> int:
    """Guess how many registers the arithmetic on one vector takes."""
    steps = len(function.steps) if isinstance(function, Expression) else 2 * NUMBERS.function
    return min(NUMBERS.function, 2 * function.inputs + steps)


def _bytes_of(operands: Sequence[Operand], axes: int, *, apart: bool) -> tuple[int, ...]:
    """Return the bytes of an element of each array that is loaded along the rows: a register's, if it takes one alone.

    apart: rows lie apart, and an element of several may come in one access.
    """

    def of(each: View) -> int:
        packed = each.split(axes)[1].is_contiguous() or (apart and across_width(each, axes) > 1)
        return each.dtype.itemsize if packed else max(each.dtype.itemsize, 4)

    return tuple(of(each) for each in operands if isinstance(each, View) and any(each.split(axes)[1].strides))
