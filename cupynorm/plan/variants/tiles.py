"""Tiles of rows whose elements lie apart: rows and elements of a thread, threads side by side, blocks of a row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question
from cupynorm.plan.config import (
    HALF_BYTES,
    LEAST_SMS_OF_PART,
    MAX_NUMBERS_ACROSS,
    MAX_PACKED_ACROSS,
    MOST_ROW_NUMBERS,
    PART_NUMBERS,
    PARTS_ACROSS,
    PLAIN,
    REGISTER_BYTES,
    SPARE_ELEMENTS,
    WARP,
    Plan,
)
from cupynorm.plan.partition import is_power_of_two, power_of_two_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.plan.problem import Problem

MORE_IF_SPILLED = 2  # plans that are compiled because the first one spills
SHIFTED = 2  # neighbouring rows of a thread that are aligned together in its columns only
WEIGHTED = "in steps, weighted sums"
FOR_CLUSTERS = "pairs as loaded, in place of clusters"
FOR_CLUSTERS_GAMMA = "pairs as loaded and more operands, in place of clusters"
# what a row of `measured` or `over_the_grid` is for, by its last number
KINDS = (
    "all",
    "in steps, x alone, a small state",
    "not in steps",
    "in steps, x alone",
    "in steps, masked",
    "in steps, operands",
    "in steps, pairs",
    "x alone or masked, as loaded",
    "rounds",
    "nothing stored",
    "in steps, no operands, a large state",
    WEIGHTED,
    FOR_CLUSTERS,
    FOR_CLUSTERS_GAMMA,
)


def kinds_of(problem: Problem) -> set[str]:
    """Return which of KINDS a problem is of."""
    if problem.rounds:
        return {"rounds"}
    found = {"all"}
    if problem.in_steps and problem.load_operands:
        found.add("in steps, pairs" if problem.fields > 1 else "in steps, operands")
        if problem.is_weighted:
            found.add(WEIGHTED)
    elif problem.in_steps and problem.may_drop:
        found.add("in steps, masked")
    elif problem.in_steps:
        found.add("in steps, x alone")
        if problem.row_numbers < MOST_ROW_NUMBERS:
            found.add("in steps, x alone, a small state")
    elif problem.fields == 1 and not problem.has_scales:
        found.add("not in steps")
    alone = not problem.load_operands and problem.waits_as_loaded and problem.fields == 1
    if alone and (problem.in_steps or not problem.may_drop):
        found.add("x alone or masked, as loaded")
    if problem.in_steps and not problem.load_operands and problem.row_numbers == MOST_ROW_NUMBERS:
        found.add("in steps, no operands, a large state")
    if problem.output_bytes == 0:
        found.add("nothing stored")
    return found


def most_numbers(problem: Problem) -> int:
    """Return how many numbers of rows in registers a thread may have: more where they wait two in a register.

    So do those beside sums over rows, or they are computed a part at a time all the same.
    """
    if problem.column_sums:
        return MAX_PACKED_ACROSS
    packed = (problem.waits_as_loaded or problem.holds_operands) and problem.load_bytes == HALF_BYTES
    return MAX_PACKED_ACROSS if packed else MAX_NUMBERS_ACROSS


def vector_of(question: Question) -> int:
    """Return how many neighbouring rows a thread has."""
    problem = question.problem
    most = question.rules.apart.max_vector[problem.load_bytes]
    return min(problem.vector, most, *((question.rules.rounds.apart_vector,) if problem.rounds else ()))


def lanes_of(question: Question, width: int) -> int:
    """Return how many threads lie side by side: their rows take `width` bytes, or are as many as neighbour."""
    problem, vector = question.problem, vector_of(question)
    wanted = max(1, width // (problem.load_bytes * vector))
    return power_of_two_to(min(max(1, problem.across // vector), wanted, WARP))


def elements_of(question: Question, numbers: int, vector: int = 0) -> int:
    """Return how many elements of each row a thread has of so many numbers: fewer with what is loaded beside x."""
    problem, vector = question.problem, vector or vector_of(question)
    each = problem.fields * REGISTER_BYTES + bytes_beside(problem)
    return max(1, numbers * REGISTER_BYTES // (vector * each))


def elements_held(question: Question, numbers: int) -> int:
    """Return the same where rows wait in registers: more of those that wait as they were loaded, two in a register."""
    problem, vector = question.problem, vector_of(question)
    if not waits_packed(problem):
        return elements_of(question, numbers)
    room = numbers * REGISTER_BYTES // (vector * (problem.load_bytes + bytes_beside(problem)))
    return max(PARTS_ACROSS, min(room, MAX_NUMBERS_ACROSS // vector) // PARTS_ACROSS * PARTS_ACROSS)


def part_of(problem: Problem, ctas: int, group: int, vector: int) -> int:
    """Return how many elements of each row a thread has, where so many blocks and threads of each share a row.

    More than MAX_NUMBERS_ACROSS numbers are computed in parts of equal length, and so is what waits with operands.
    """
    part = math.ceil(math.ceil(problem.cols / ctas) / group)
    in_equal_parts = part * vector > MAX_NUMBERS_ACROSS or problem.holds_operands
    return in_parts(part) if in_equal_parts else part


def in_parts(elements: int) -> int:
    """Round elements up to what is computed in parts of PARTS_ACROSS or a multiple."""
    return math.ceil(elements / PARTS_ACROSS) * PARTS_ACROSS


def waits_packed(problem: Problem) -> bool:
    """Say whether x waits two elements in a register, and something that is loaded waits beside it."""
    packed = most_numbers(problem) == MAX_PACKED_ACROSS and not problem.holds_operands
    return bool(problem.load_operands) and packed


def bytes_beside(problem: Problem) -> int:
    """Return the bytes of registers that are loaded beside an element of x, where that does not come in batches."""
    loaded = 0 if problem.in_steps else sum(problem.load_operands)
    return loaded + sum(max(REGISTER_BYTES, size) for size in problem.epilogue_operands)


def is_in_warps(plan: Plan) -> bool:
    """Say whether lanes of a warp that share rows are `across` lanes apart (kInWarps of Across and Ring)."""
    return plan.across <= WARP and is_power_of_two(plan.across)


def reduction_slots(plan: Plan, messages: int) -> int:
    """Return how many Slots the reductions of a block's rows have room for (ReductionPlaces in row/apart.cuh).

    messages: of each row, from the blocks of a cluster.
    """
    of_row = (
        plan.block // WARP if is_in_warps(plan) else plan.block // plan.across
    )  # kSlots of Across and Ring
    shared = plan.variant in {"cluster", "split"} or of_row > 1
    return plan.across * plan.vector * (messages + of_row + 1) * shared


def is_even(problem: Problem, ctas: int, group: int, elements: int) -> bool:
    """Say whether each thread that shares a row has one of its elements at least, and all but SPARE_ELEMENTS."""
    least = problem.cols // ctas
    return max(1, elements - SPARE_ELEMENTS) * group <= least


def as_even(question: Question) -> Question:
    """Return a question of rows that may be shifted as one of the next even number of neighbours."""
    problem = question.problem
    across = problem.across + problem.across % SHIFTED
    rows = problem.rows // problem.across * across
    return question._replace(
        problem=replace(problem, shifted=False, vector=SHIFTED, across=across, rows=rows)
    )


def may_be_shifted(plan: Plan) -> bool:
    """Say whether a kernel is right whose threads have two rows that are aligned together in their columns only."""
    lanes = plan.across >= WARP and is_power_of_two(plan.across)
    return plan.vector == SHIFTED and plan.group % SHIFTED == 0 and lanes and plan.variant != "split"


def shifted_is_better(question: Question, plan: Plan) -> bool:
    """Say whether threads that have two rows so are better than those that have one: as far as that was measured."""
    problem, (fewest, share, most_cols) = question.problem, question.rules.apart.shifted
    tiles = tiles_of(problem, plan)
    places = tiles * plan.across * plan.vector
    fits = may_be_shifted(plan) and problem.across >= fewest and problem.rows >= share * places
    fits = fits and not problem.load_operands
    if not plan.waits:  # timed where blocks fill the device
        return fits and tiles * plan.ctas_per_row >= question.limits.sm_count * plan.min_blocks
    large = problem.may_drop and problem.row_numbers == MOST_ROW_NUMBERS
    several = plan.ctas_per_row > 1 and problem.cols <= most_cols and problem.load_bytes == HALF_BYTES
    return fits and several and not large


def is_shifted(problem: Problem, plan: Plan) -> bool:
    """Say whether threads have neighbouring rows that are not aligned together in all columns: kIsOfShifted."""
    return problem.shifted and plan.vector == SHIFTED


def tiles_of(problem: Problem, plan: Plan) -> int:
    """Return how many tiles there are. A shifted one has a row less than places, and only rows that are neighbours."""
    rows = plan.across * plan.vector
    if not is_shifted(problem, plan):
        return math.ceil(problem.rows / rows)
    return problem.rows // problem.across * math.ceil(problem.across / (rows - 1))


def blocks_of_a_row(question: Question, rows: int, each: Sequence[int], blocks: int = 1) -> list[int]:
    """Return how many blocks share so many rows, of those that may: more where too few rows are left for the device.

    blocks: how many each multiprocessor shall have.
    """
    problem, numbers = question.problem, question.rules.apart
    tiles, parts = math.ceil(problem.rows / rows), problem.cols // numbers.least_part
    enough = [ctas for ctas in each if ctas * tiles >= blocks * question.limits.sm_count or 2 * ctas > parts]
    return enough[:1] or [*each[-1:]]


def fill_the_device(question: Question, ctas: int, resident: int) -> bool:
    """Say whether clusters of so many blocks leave few multiprocessors idle: each is within a part of the device."""
    blocks = LEAST_SMS_OF_PART * resident
    return blocks // ctas * ctas >= question.rules.apart.filled * blocks


def tiling(
    question: Question,
    lanes: int,
    ctas: int,
    variant: str,
    block: int,
    elements: int,
    waits: int,
    vector: int = 0,
) -> Plan:
    """Return a plan of blocks that share rows so, without its launch: as many a multiprocessor as registers allow.

    lanes: threads side by side. elements: of each row that a thread has, or loads at a time. vector: rows of a thread;
    0: as many as are best.
    """
    limits, vector = question.limits, vector or vector_of(question)
    needed = registers_of(question, elements, vector)
    resident = max(1, min(limits.threads_per_sm // block, limits.registers_per_sm // (needed * block)))
    return replace(
        PLAIN,
        variant="cluster" if ctas > 1 else variant,
        vector=vector,
        vectors=elements,
        group=block // lanes,
        ctas_per_row=ctas,
        block=block,
        across=lanes,
        waits=waits,
        min_blocks=min(resident, limits.blocks_per_sm),
    )


def registers_of(question: Question, elements: int, vector: int) -> int:
    """Return how many registers a thread wants that loads so many elements of each of its rows at a time."""
    problem, numbers = question.problem, question.rules.apart
    each, part = problem.value_bytes, 0
    if waits_packed(problem):
        each, part = problem.load_bytes, PART_NUMBERS
    held = vector * elements * (each + bytes_beside(problem)) // REGISTER_BYTES
    rounds = question.rules.rounds.apart_row_registers * problem.compute_bytes // REGISTER_BYTES
    rounds *= problem.rounds
    return numbers.registers + part + vector * (numbers.row_registers + rounds) + held
