"""block, cluster, split, uncached of rows whose elements lie apart from one another: row_across.

A thread has some neighbouring rows, and a warp so many threads side by side that it accesses whole lines; the other
threads share these rows. They wait in registers of one block, of the blocks of a cluster, or of as many blocks of the
grid as hold a row, or nowhere.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import LocalBytes, Question, all_at_once, with_grid, without_spills
from cupynorm.plan.config import (
    ACCESS_BYTES,
    CUT,
    EVENLY,
    HALF_BYTES,
    IN_REGISTERS,
    MAX_CTAS,
    MAX_NUMBERS_ACROSS,
    MAX_PACKED_ACROSS,
    MAX_ROWS_OF_WORD,
    MOST_ROW_NUMBERS,
    NOWHERE,
    NUMBERS_OF_SUMS,
    ONE_BLOCK_PER_ROW,
    PARTS_ACROSS,
    REGISTER_BYTES,
    SECTOR_BYTES,
    WARP,
    WHOLE_COLUMNS,
    Plan,
)
from cupynorm.plan.partition import is_power_of_two, power_of_two_to
from cupynorm.plan.variants.across_grid import (
    again_over_the_grid,
    held_over_the_grid,
    share_of_the_grid,
)
from cupynorm.plan.variants.ring import ring
from cupynorm.plan.variants.stretch import stretch
from cupynorm.plan.variants.tiles import (
    KINDS,
    MORE_IF_SPILLED,
    WEIGHTED,
    as_even,
    blocks_of_a_row,
    bytes_beside,
    elements_held,
    elements_of,
    fill_the_device,
    in_parts,
    is_even,
    is_in_warps,
    kinds_of,
    lanes_of,
    may_be_shifted,
    most_numbers,
    part_of,
    reduction_slots,
    registers_of,
    shifted_is_better,
    tiles_of,
    tiling,
    vector_of,
    waits_packed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynorm.plan.problem import Problem

VARIANTS_ACROSS = ("block", "cluster", "split", "uncached")  # and shared, if neighbours are a stretch
WHY = "rows whose elements lie apart: the first tiling in turn that holds a row"
WITH_SUMS = "rows whose elements lie apart, with sums over rows: the first tiling in turn that holds a row"
OVER_THE_GRID = (
    "rows whose elements lie apart: each waits in registers of as many blocks of the grid as hold it"
)
SHARED_AND_READ = (
    "long rows whose elements lie apart, of which clusters would leave much of the device idle: "
    "blocks of the grid share them"
)
READ_ONCE, READ_TWICE = ", and read them once", ", and read them once for each pass over them"


def across(question: Question, variant: str | None = None, *, cooperative: bool = True) -> Plan | None:
    """Return the first plan in turn that can be launched, or the first of a variant; None if there is none.

    cooperative: whether its blocks may have to run all at once. A plan whose compiled kernel spills even with one block
    a multiprocessor is taken if the next ones spill, too, or read the row again, which takes longer, and if it spills
    with half as many rows of a thread; a few bytes cost less than another tiling.
    """
    if variant in {None, "shared"}:
        together = stretch(question, asked=variant is not None)
        if together is not None:
            return together
    if variant in {None, "shared", "cluster"}:
        in_ring = ring(question, variant)
        if in_ring is not None or variant == "shared":
            return in_ring
    found = (
        finished(question, plan, _why(question.problem, plan))
        for plan in tilings(question, variant)
        if variant in {None, plan.variant} and (cooperative or not plan.cooperative)
    )
    few = question.rules.apart.few_local_bytes
    plans = list(itertools.islice((plan for plan in found if plan is not None), 1))
    if plans and question.local_bytes(plans[0]) > few:
        more = itertools.islice((plan for plan in found if plan is not None), MORE_IF_SPILLED)
        plans += [plan for plan in more if plan.waits or plan.variant == plans[0].variant]
        if all(question.local_bytes(plan) > few for plan in plans):
            plans += filter(None, [_with_fewer_rows(question, plans[0])])
    return min(plans, key=lambda plan: question.local_bytes(plan) > few, default=None)


def _with_fewer_rows(question: Question, plan: Plan) -> Plan | None:
    """Return a plan of rows in registers with half as many rows of a thread, and twice as many threads side by side."""
    if not plan.waits or plan.vector == 1:
        return None
    half = replace(plan, vector=plan.vector // 2, vectors=2 * plan.vectors, across=2 * plan.across)
    return finished(question, replace(half, group=plan.group // 2), plan.why)


def _why(problem: Problem, plan: Plan) -> str:
    if plan.variant != "split":
        return WHY
    if plan.waits:
        return OVER_THE_GRID
    return SHARED_AND_READ + (READ_TWICE if problem.output_bytes or problem.rounds else READ_ONCE)


def tilings(question: Question, variant: str | None = None) -> Iterator[Plan]:
    """Give plans without their launch, best first: those that hold a row in registers, then nowhere.

    variant: whose plans are among them; None for all. Rows that may be shifted are cut as those of an even number of
    neighbours are, as long as that was measured to be better, and waits in no registers over the grid.
    """
    if question.problem.shifted:
        yield from _shifted(question, variant)
    yield from _tilings(question, variant)


def _shifted(question: Question, variant: str | None) -> Iterator[Plan]:
    over_the_grid = False
    for plan in _tilings(as_even(question), variant):
        if plan.waits and plan.variant == "split":
            over_the_grid = True
        # rows that blocks of the grid can hold, one of a thread, are not read twice instead
        elif (over_the_grid and not plan.waits) or not shifted_is_better(question, plan):
            return
        else:
            yield plan


def _tilings(question: Question, variant: str | None) -> Iterator[Plan]:
    if question.problem.room and variant in {None, "split"}:
        asked = variant is not None
        again = [*again_over_the_grid(question, asked=asked)]
        if question.problem.output_bytes:
            yield from held_over_the_grid(question, asked=asked, may_read_again=bool(again))
        yield from again
    ctas = [1 << power for power in range(question.max_ctas.bit_length())]
    if variant is None:
        yield from _only_read(question, ctas)
    else:
        ctas = ctas[1:] if variant == "cluster" else ctas[:1]
    yield from _as_measured(question, ctas)
    if ctas[:1] == [1]:
        yield from _alone(question)
    for kind in (_in_registers, _again):
        yield from kind(question, ctas)


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows."""
    problem = question.problem
    if plan.variant == "split" and plan.waits:  # as many blocks as hold a row
        plan = replace(plan, ctas_per_row=math.ceil(problem.cols / (plan.vectors * plan.group)))
    part = math.ceil(problem.cols / plan.ctas_per_row)  # as row_across cuts a row
    if plan.waits:
        if plan.vectors * plan.group < part:
            return None
        even = is_even(problem, plan.ctas_per_row, plan.group, plan.vectors)
        plan = replace(plan, waits=EVENLY if even else IN_REGISTERS)
    if problem.column_sums and plan.waits != EVENLY:
        return None
    tiles = tiles_of(problem, plan)
    full = plan.waits > 0 and plan.vectors * plan.group * plan.ctas_per_row == problem.cols
    turns = 2 if problem.rounds or problem.column_sums else 1
    slots = reduction_slots(plan, turns * plan.ctas_per_row * (plan.cluster > 1))
    needed = slots * (problem.slot_bytes + ACCESS_BYTES * problem.has_scales)
    whole = plan.waits == EVENLY and problem.in_steps
    if whole and plan.vectors * plan.group <= WHOLE_COLUMNS:  # gamma and beta, converted
        needed += plan.vectors * plan.group * len(problem.parameter_bytes) * problem.compute_bytes
    needed += problem.column_sums * plan.vectors * (plan.block + plan.block // WARP) * problem.compute_bytes
    plan = replace(plan, full=full, shared_bytes=needed)
    tiles = problem.row_groups if problem.column_sums else tiles
    if plan.variant == "split":
        return _all_over_the_grid(question, plan, tiles, reason)
    wide = problem.cols >= question.rules.apart.summed_one_wave
    one_wave = problem.column_sums and (wide or problem.epilogue_operands)
    waves = 1.0 if one_wave else ONE_BLOCK_PER_ROW
    return with_grid(question, plan, tiles * plan.ctas_per_row, reason, waves)


def _all_over_the_grid(question: Question, plan: Plan, tiles: int, reason: str) -> Plan | None:
    """Return a plan of blocks of the grid that share rows with its launch: as many groups as run at once."""
    if plan.shared_bytes > question.limits.shared_bytes_per_block:
        return None
    plan = without_spills(question, plan)
    resident = question.occupancy(plan)
    groups = min(tiles, question.limits.sm_count * resident // plan.ctas_per_row)
    return all_at_once(question, plan, groups * plan.ctas_per_row, resident, reason) if groups else None


def summed(question: Question, variant: str | None = None, *, cooperative: bool = True) -> Plan | None:
    """Return the first plan in turn that holds rows and sums of their columns (row_summed_apart); None if none does.

    A group of rows goes to one block, else to those of a cluster, of which there are more where groups are few, else to
    blocks of the grid, if these may have to run all at once (cooperative). A few bytes that a thread spills cost less
    than a block of a multiprocessor.
    """
    problem = question.problem
    if not problem.in_steps:
        return None
    question = question._replace(local_bytes=_more_than_a_few(question))
    more = bool(problem.epilogue_operands) or problem.column_sums > problem.fields
    rows = question.rules.apart.summed
    for size, fewest, most, vector, block, width, elements, blocks, most_ctas, of_more in rows:
        fits = size == problem.load_bytes and fewest <= problem.cols <= most and not problem.vector % vector
        if not fits or of_more != more or problem.across * size < SECTOR_BYTES:
            continue
        lanes = min(width // (size * vector), power_of_two_to(problem.across // vector))
        down = block // lanes
        for shared_by, ctas in _shared_by(question, down * elements, blocks, most_ctas):
            if variant not in {None, shared_by} or (shared_by == "split" and not cooperative):
                continue
            part = math.ceil(math.ceil(problem.cols / ctas) / down)
            plan = tiling(question, lanes, ctas, shared_by, block, part, IN_REGISTERS, vector)
            plan = replace(plan, variant=shared_by, min_blocks=blocks)
            found = finished(question, plan, WITH_SUMS)
            if found is not None:
                return found
    return None


def _shared_by(question: Question, cols: int, blocks: int, most_ctas: int) -> Iterator[tuple[str, int]]:
    """Give which blocks may share a row with sums, by their variant, and how many, best first.

    cols: of a row that a block holds at most. blocks: of a multiprocessor. most_ctas: of a cluster.
    """
    problem, sms = question.problem, question.limits.sm_count
    most_ctas = min(most_ctas, question.max_ctas)
    may = [1 << power for power in range(most_ctas.bit_length()) if problem.cols <= cols << power]
    enough = [ctas for ctas in may if ctas * problem.row_groups >= sms]
    for ctas in (*enough[:1], *may[:1]):
        yield "cluster" if ctas > 1 else "block", ctas
    least, at_once = max(2, math.ceil(problem.cols / cols)), sms * blocks
    if least <= at_once:
        yield "split", share_of_the_grid(question, least, problem.row_groups, at_once)


def _more_than_a_few(question: Question) -> LocalBytes:
    def local_bytes(plan: Plan) -> int:
        spilled = question.local_bytes(plan)
        return spilled if spilled > question.rules.apart.few_local_bytes else 0

    return local_bytes


def is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan that somebody made asks for nothing that the kernel would do wrong."""
    alone = plan.rows_per_group == plan.alignment_period == 1 and not plan.unaligned
    alone = alone and not (plan.stages or plan.parameter_cache or plan.row_shared_bytes)
    alone = alone and (not problem.column_sums or (problem.in_steps and plan.variant != "uncached"))
    shape = plan.block // plan.across == plan.group > 0
    if is_power_of_two(plan.across):
        shape = shape and is_power_of_two(plan.block)
    else:
        shape = shape and plan.variant == "split" and not plan.waits
    if problem.rounds and not is_in_warps(plan):  # no warp waits for others, whose rows may have more rounds
        shape = shape and is_power_of_two(plan.across) and plan.group == plan.ctas_per_row == 1
    if problem.in_steps and problem.may_drop:
        shape = shape and plan.vector <= MAX_ROWS_OF_WORD
    most = most_numbers(problem) if plan.waits else MAX_NUMBERS_ACROSS
    shape = shape and plan.vector * plan.vectors <= most
    shape = shape and (problem.vector % plan.vector == 0 or (problem.shifted and may_be_shifted(plan)))
    clusters = (plan.ctas_per_row > 1) == (plan.variant == "cluster") and plan.ctas_per_row <= MAX_CTAS
    either = plan.variant in {"cluster", "split"}
    waits = plan.waits != CUT and (either or (plan.waits == NOWHERE) == (plan.variant == "uncached"))
    return alone and shape and waits and (problem.room if plan.variant == "split" else clusters)


def _as_measured(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give the tiling that a search found for such rows, if there is one."""
    problem = question.problem
    if problem.epilogue_operands or (problem.has_scales and not problem.in_steps):
        return
    kinds, measured = kinds_of(problem), question.rules.apart.measured
    for size, fewest, most, vector, block, width, most_ctas, blocks, whole, kind in measured:
        if size != problem.load_bytes or not fewest <= problem.cols <= most or problem.vector % vector:
            continue
        if KINDS[kind] not in kinds:
            continue
        odd = vector == 1 < question.rules.apart.max_vector[size]  # if no even number of rows are neighbours
        if odd and problem.vector > 1:
            continue
        lanes = width // (size * vector)
        elements = question.rules.apart.odd_elements[problem.output_bytes > 0]
        numbers = problem.fields if KINDS[kind] == WEIGHTED else 1  # of an element
        room = block // lanes * (elements if odd else most_numbers(problem) // vector // numbers)
        may = [each for each in ctas if each <= most_ctas and each * room >= problem.cols]
        fewest_ctas = math.ceil(problem.cols / room)
        if (
            may
            and problem.in_steps
            and fewest_ctas < may[0]
            and fill_the_device(question, fewest_ctas, blocks)
        ):
            may = [fewest_ctas, *may]
        beside = min(lanes, WARP) * vector  # rows that a warp has side by side
        if not may or beside > problem.across:  # fewer neighbours are no such rows
            continue
        tiles = math.ceil(problem.rows / (lanes * vector))
        for each in may[:2]:  # with more blocks if the fewest spill
            if most_ctas > 1 and tiles * each < question.limits.sm_count:
                continue  # so few rows that others of the tilings take more blocks
            part = part_of(problem, each, block // lanes, vector)
            even = problem.in_steps and is_even(problem, each, block // lanes, part)
            if part * vector > MAX_NUMBERS_ACROSS and not problem.in_steps:
                continue  # they are computed in parts, which takes more instructions there
            if part * vector == MAX_PACKED_ACROSS and not even:
                continue  # as many numbers spill where some are not there
            if whole and not even:
                continue
            plan = tiling(question, lanes, each, "block", block, part, IN_REGISTERS, vector)
            yield replace(plan, min_blocks=blocks or plan.min_blocks)
    if problem.rounds:
        yield from _for_rounds(question, ctas)


def _for_rounds(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give the tilings that were measured to be best where an op goes through further rounds."""
    problem = question.problem
    if problem.doubles or problem.load_operands:
        return
    for size, fewest, most, vector, block, lanes, shared, blocks in question.rules.rounds.apart:
        if size != problem.load_bytes or not fewest <= problem.cols <= most or problem.vector % vector:
            continue
        if shared not in ctas or lanes * vector > problem.across:
            continue
        tiles = math.ceil(problem.rows / (lanes * vector))
        if block > WARP and tiles * shared < question.limits.sm_count:
            continue  # so few rows that others of the tilings take more blocks
        part = math.ceil(math.ceil(problem.cols / shared) / (block // lanes))
        yield replace(
            tiling(question, lanes, shared, "block", block, part, IN_REGISTERS, vector), min_blocks=blocks
        )


def _alone(question: Question) -> Iterator[Plan]:
    """Give the tiling of rows that are so short that one thread has all elements of some: none waits for another."""
    problem, numbers = question.problem, question.rules.apart
    even_block, odd_block, most_cols, least_beside, blocks_if_packed = numbers.alone
    if problem.cols > most_cols or problem.across * problem.load_bytes < least_beside:
        return
    vector = wanted = vector_of(question)
    if not problem.output_bytes:  # else neighbouring threads would store their statistics far apart
        vector = wanted = min(vector, max(1, numbers.alone_statistics // problem.compute_bytes))
    block = odd_block if vector == 1 < numbers.max_vector[problem.load_bytes] else even_block
    each = problem.fields * REGISTER_BYTES + bytes_beside(problem)
    most = numbers.numbers[problem.compute_bytes] * REGISTER_BYTES // each
    packed = problem.in_steps and problem.direct_load and each == REGISTER_BYTES
    packed = packed and most_numbers(problem) == MAX_PACKED_ACROSS and not problem.early_exponential
    while vector > 1 and vector * problem.cols > (MAX_PACKED_ACROSS if packed else most):
        vector //= 2
    if vector < wanted and problem.load_operands and (vector == 1 or problem.fields == 1):
        return  # more threads of a row, which have room for wider accesses, are better
    if vector * problem.cols <= most:
        yield tiling(question, block, 1, "block", block, problem.cols, IN_REGISTERS, vector)
    elif packed and vector * in_parts(problem.cols) <= MAX_PACKED_ACROSS:
        parts = any(problem.cols % part == 0 for part in range(PARTS_ACROSS, 2 * PARTS_ACROSS + 1))
        elements = problem.cols if parts else in_parts(problem.cols)
        plan = tiling(question, block, 1, "block", block, elements, IN_REGISTERS, vector)
        yield replace(plan, min_blocks=blocks_if_packed)


def _in_registers(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    problem, numbers, limits = question.problem, question.rules.apart, question.limits
    most = numbers.numbers[problem.compute_bytes]
    most = min(most, question.rules.rounds.elements) if problem.rounds else most
    found = [(block, width, most_ctas) for block, width, most_ctas in numbers.tilings[problem.load_bytes]]
    alone = [(found[0][0], numbers.alone_width, 1)]
    for block, width, most_ctas in (*alone, *found):
        lanes = lanes_of(question, width)
        elements = elements_held(question, min(most, limits.registers_per_sm // (2 * block)))
        least = math.ceil(problem.cols / (block // lanes * elements))
        may = [each for each in ctas if least <= each <= max(most_ctas, ctas[0])]
        if may and problem.load_operands and ctas[0] <= least < may[0]:
            plan = tiling(question, lanes, least, "block", block, elements, IN_REGISTERS)
            may = [least, *may] if fill_the_device(question, least, plan.min_blocks) else may
        for each in blocks_of_a_row(question, lanes * vector_of(question), may):
            part = math.ceil(math.ceil(problem.cols / each) / (block // lanes))
            part = in_parts(part) if waits_packed(problem) and part > PARTS_ACROSS else part
            if (
                problem.rounds
                and registers_of(question, part, vector_of(question)) * block > limits.registers_per_sm
            ):
                continue
            yield tiling(question, lanes, each, "block", block, part, IN_REGISTERS)


def _only_read(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give the plan of long rows of which no element is stored: they wait nowhere, and many blocks load at once."""
    problem, numbers = question.problem, question.rules.apart
    fewest, fewest_of_large, fewest_of_pairs, fewest_of_intervals, blocks = numbers.only_read
    asks = problem.interval_mask and problem.load_bytes == HALF_BYTES  # of each element whether it is kept
    if problem.row_numbers == MOST_ROW_NUMBERS or (asks and problem.row_numbers < NUMBERS_OF_SUMS):
        fewest = fewest_of_large
    elif asks:  # but of those in rounds that lie within the interval
        fewest = fewest_of_intervals
    elif problem.fields > 1:
        fewest = fewest_of_pairs
    if problem.output_bytes or problem.rounds or problem.cols < fewest:
        return
    block, width = numbers.loops
    lanes = lanes_of(question, width)
    elements = elements_of(question, numbers.again[problem.compute_bytes])
    for each in blocks_of_a_row(question, lanes * vector_of(question), ctas, blocks):
        yield tiling(question, lanes, each, "uncached", block, elements, NOWHERE)


def _again(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give plans whose rows wait nowhere: threads go through their part of a row twice, some elements at a time."""
    problem, numbers = question.problem, question.rules.apart
    block, width = numbers.loops
    lanes = lanes_of(question, width)
    elements = elements_of(question, numbers.again[problem.compute_bytes])
    for least in range(len(ctas)):
        for each in blocks_of_a_row(question, lanes * vector_of(question), ctas[least:]):
            yield tiling(question, lanes, each, "uncached", block, elements, NOWHERE)
