"""split: as many blocks as the device holds at once share the rows, and wait for one another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, all_at_once
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AMPERE,
    HALF_BYTES,
    LINE_BYTES,
    MAX_BLOCK,
    MESSAGE_BYTES,
    MESSAGE_NUMBERS,
    MIN_REREAD_BLOCK,
    PLAIN,
    RESULT_BYTES,
    ROOM_BLOCKS,
    ROOM_ROWS,
    SCHEDULERS,
    UNALIGNED_APART,
    WARP,
    Plan,
)
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.plan.partition import power_of_two_from, power_of_two_to, shared_bytes, words
from cupynorm.plan.registers import registers
from cupynorm.plan.variants import staged
from cupynorm.plan.variants.registers import can_cache

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem

ONE_ROW = "one row, which the registers of the whole grid hold"
SIDE_BY_SIDE = (
    "no grid's shared memory holds a row, and rows that are read twice side by side share their parameters"
)
REREAD = "few long rows, of which all blocks of the grid read a part of each twice"
WORTH_MEETING = 2  # times the threads: as blocks that meet wait for one another
SHARED_MEMORY = "more than a cluster holds: parts of rows in the shared memory of the whole grid"


def split(question: Question) -> Plan | None:
    """Return the plan of the whole grid, in registers, twice from memory, or in shared memory."""
    problem = question.problem
    if problem.fused:
        kept = problem.room and problem.copies_rows and _fits(question)
        return (_in_shared_memory(question) if kept else None) or _reread(question)
    return _one_row(question) or _side_by_side(question) or _in_shared_memory(question)


def _reread(question: Question) -> Plan | None:
    """Return the plan of fused rows that all blocks share and read twice, with what they are computed from."""
    problem, limits, numbers = question.problem, question.limits, question.rules.split
    each = problem.vectors // limits.sm_count
    block = max(numbers.min_block, min(numbers.block[problem.compute_bytes], power_of_two_to(each)))
    plan = staged.chunked(question, "split", block, 0)
    needed = registers(question, plan.vectors * plan.vector, full=False, cached=False)
    resident = max(1, min(numbers.blocks, limits.registers_per_sm // (needed * block)))
    return finished_reread(question, replace(plan, min_blocks=resident))


def finished_reread(question: Question, plan: Plan, reason: str = REREAD) -> Plan | None:
    """Return a plan of fused rows read twice with as many blocks as have a vector for each thread, and its launch."""
    problem, limits = question.problem, question.limits
    # the vectors of unaligned rows are counted from the first whole one
    vectors = problem.cols // plan.vector - bool(problem.unaligned)
    groups = _groups(question)
    ctas = min(limits.sm_count * plan.min_blocks // groups, vectors // plan.block)
    if not problem.fused or problem.unaligned == UNALIGNED_APART:
        return None
    if not problem.outputs:  # among which the blocks' messages lie; room for them counts as one
        return None
    if _has_room(problem):
        ctas = min(ctas, ROOM_BLOCKS // groups)
    if plan.block < MIN_REREAD_BLOCK or ctas < 1:
        return None
    plan = replace(plan, ctas_per_row=ctas)
    return all_at_once(question, plan, groups * ctas, question.occupancy(plan), reason)


def _has_room(problem: Problem) -> bool:
    """Say whether the messages of blocks have room of their own: kHasRoom of a Store."""
    return problem.room or not problem.output_bytes


def _groups(question: Question) -> int:
    """Return how many rows are in work at once, each of a group of blocks: 1 where messages lie among results.

    Of rows that are read twice so many that some groups work while others meet, and that few have none in the end; of
    rows that are read once so many that each group meets once.
    """
    problem, numbers = question.problem, question.rules.split
    if not _has_room(problem):
        return 1
    most = min(question.limits.sm_count, ROOM_BLOCKS)
    if not problem.output_bytes:
        return min(math.ceil(problem.rows / ROOM_ROWS), most)
    bytes_of_row = problem.cols * (problem.load_bytes + sum(problem.load_operands))
    most = min(problem.rows, most, max(numbers.again_rows, numbers.again_bytes // bytes_of_row))

    def busy(groups: int) -> float:
        rounds = math.ceil(problem.rows / groups)
        return problem.rows / (rounds * groups) * (numbers.again_alone if groups == 1 else 1)

    return max(range(most, 0, -1), key=busy)


def split_for_more_threads(question: Question) -> Plan | None:
    """Return the plan of fused rows where it has several times as many threads in work as a block for each row has."""
    plan = split(question)
    alone = question.problem.rows * question.rules.staged.fused_block
    return plan if plan is not None and plan.grid * plan.block >= WORTH_MEETING * alone else None


def _one_row(question: Question) -> Plan | None:
    """Return the plan of the only row, in the registers of blocks of the whole grid."""
    problem, limits, numbers = question.problem, question.limits, question.rules.split
    least, most = numbers.in_registers_bytes
    if problem.rows > 1 or not least <= problem.row_bytes <= most:
        return None
    ctas = limits.sm_count
    small, block = numbers.in_registers_block
    if problem.vectors <= ctas * block:  # a vector a thread: few blocks meet sooner
        ctas //= 2
    if math.ceil(problem.vectors / ctas / small) <= question.rules.tile.many_vectors:  # so do few warps
        block = small
    elements = math.ceil(problem.vectors / ctas / block) * problem.vector
    # the next kernel's blocks find room beside these, and are there when they end
    beside = can_cache(question, elements) and question.measured
    plan = replace(
        PLAIN,
        variant="split",
        vector=problem.vector,
        ctas_per_row=ctas,
        block=block,
        group=block,
        min_blocks=numbers.in_registers_blocks if beside else 1,
    )
    return finished_one_row(question, plan)


def finished_one_row(question: Question, plan: Plan, reason: str = ONE_ROW) -> Plan | None:
    """Return a plan in the registers of the whole grid with what follows from the problem."""
    problem, limits, rules = question.problem, question.limits, question.rules
    vectors = math.ceil(problem.vectors / plan.ctas_per_row / plan.block)
    elements = vectors * problem.vector
    if not question.whole_vectors or elements > rules.tile.max_elements[problem.compute_bytes]:
        return None
    if plan.block > rules.split.in_registers_block[-1] and vectors > rules.tile.many_vectors:
        return None
    needed = rules.registers.one_row + words(problem, elements, cached=True)
    cached = bool(problem.parameter_bytes) and needed * plan.block <= limits.registers_per_sm
    plan = replace(plan, vectors=vectors, parameter_cache=int(cached))
    return _with_room(question, plan, problem.rows * plan.ctas_per_row, reason)


def _side_by_side(question: Question) -> Plan | None:
    """Return the plan of rows read twice, side by side, where the chip cannot hold one: parameters once for all."""
    problem, numbers = question.problem, question.rules.split
    if not problem.parameter_bytes or problem.rows < numbers.two_pass_min_rows or _fits(question):
        return None
    plan = replace(
        PLAIN,
        variant="split",
        vector=problem.vector,
        vectors=numbers.two_pass_vectors,
        rows_per_group=numbers.two_pass_rows,
        ctas_per_row=question.limits.sm_count,
        block=numbers.two_pass_block,
    )
    return finished_side_by_side(question, plan)


def finished_side_by_side(question: Question, plan: Plan, reason: str = SIDE_BY_SIDE) -> Plan | None:
    """Return a plan of rows side by side with its launch."""
    if not question.whole_vectors:
        return None
    return _with_room(question, plan, plan.ctas_per_row, reason)


def _with_room(question: Question, plan: Plan, grid: int, reason: str) -> Plan | None:
    """Return the plan if there is room for the blocks' messages among their results."""
    problem = question.problem
    room = (problem.cols // plan.ctas_per_row) * min(problem.load_bytes, RESULT_BYTES) - LINE_BYTES
    if room < plan.ctas_per_row * MESSAGE_BYTES + ACCESS_BYTES:
        return None
    return all_at_once(question, plan, grid, question.occupancy(plan), reason)


def _fits(question: Question) -> bool:
    """Say whether the shared memory of all multiprocessors holds a row."""
    return question.problem.row_bytes <= question.limits.sm_count * question.limits.shared_bytes_per_sm


def _in_shared_memory(question: Question) -> Plan | None:
    """Return the plan of parts of rows in shared memory, as far as they fit."""
    problem, limits, numbers = question.problem, question.limits, question.rules.split
    plain = question.whole_vectors and problem.same_types and question.measured
    crossover = question.rules.crossover_for("split by whole blocks", problem)
    filled = not question.small_batch
    much = crossover is not None and (filled or problem.rows * problem.row_bytes >= crossover.least)
    whole = plain and much and problem.rows > 1
    resident = numbers.blocks if question.architecture >= AMPERE and not whole else 1
    crowded = (
        problem.unaligned or problem.wide_parameters or (problem.parameter_bytes and not question.measured)
    )
    blocks = question.rules.staged.whole_block if whole else numbers.block
    block = (numbers.crowded_block if crowded else blocks)[problem.compute_bytes]
    if whole and len(problem.parameter_bytes) > 1:
        block = min(block, numbers.whole_affine_block)
    block = min(block, limits.threads_per_sm // resident)
    room = limits.shared_bytes_per_sm // resident - limits.reserved_shared_bytes - STATIC_SHARED_BYTES
    row_shared_bytes = min(room, limits.shared_bytes_per_block) // ACCESS_BYTES * ACCESS_BYTES
    if problem.unaligned == UNALIGNED_APART:
        row_shared_bytes = 0
    # of wider elements or of unaligned rows more would spill
    one = problem.unaligned or (problem.element_bytes > HALF_BYTES and problem.parameter_bytes)
    vectors = 1 if one and not plain else numbers.vectors
    plan = staged.chunked(question, "split", block, row_shared_bytes, vectors=vectors)
    plan = replace(plan, min_blocks=resident)
    # where a block's part is short, few threads do
    each = problem.vectors // _ctas_per_row(question, plan)
    block = max(numbers.min_block, min(block, power_of_two_from(each // numbers.part_vectors)))
    found = finished_in_shared_memory(question, replace(plan, block=block))
    if found is None or block < MAX_BLOCK or not question.local_bytes(found):
        return found
    # a warp less for each scheduler leaves a thread more registers
    fewer = finished_in_shared_memory(question, replace(plan, block=block - SCHEDULERS * WARP))
    return min(filter(None, (found, fewer)), key=question.local_bytes)


def _most_rows_at_once(question: Question, plan: Plan) -> int:
    problem, limits, numbers = question.problem, question.limits, question.rules.split
    blocks = limits.sm_count * plan.min_blocks
    least = blocks
    if plan.row_shared_bytes:
        least = math.ceil(shared_bytes(problem) / (numbers.overflow * plan.row_shared_bytes))
    rows = min(problem.rows, max(1, blocks // least))
    long = problem.rows >= numbers.long_rows and not _fits(question)
    if problem.parameter_bytes and long and question.whole_vectors:
        rows = numbers.long_rows
    return rows


def _rows_at_once(question: Question, plan: Plan) -> int:
    """Return how many rows are in work at once, so that all rounds are alike."""
    rows = question.problem.rows
    return math.ceil(rows / math.ceil(rows / _most_rows_at_once(question, plan)))


def _ctas_per_row(question: Question, plan: Plan) -> int:
    """Return how many blocks share a row: all, or, where a row is short, one on each multiprocessor."""
    # what is left of the last round must not change how many blocks share a row, except in small batches
    at_once = _rows_at_once if question.small_batch else _most_rows_at_once
    rows, limits = at_once(question, plan), question.limits
    ctas = max(1, limits.sm_count * plan.min_blocks // rows)
    if 2 * shared_bytes(question.problem, ctas) <= plan.row_shared_bytes:
        ctas = max(1, min(ctas, limits.sm_count // rows))
    return ctas


def finished_in_shared_memory(question: Question, plan: Plan, reason: str = SHARED_MEMORY) -> Plan | None:
    """Return a plan of rows in the shared memory of the whole grid with what follows from the problem."""
    problem = question.problem
    # a block has a vector for each thread, and room for every other block's message, which lies among its results else
    message_bytes = MESSAGE_NUMBERS * problem.compute_bytes
    most = problem.vectors // plan.block
    rows = _rows_at_once(question, plan)
    if problem.room:
        most = min(most, ROOM_BLOCKS // rows)
    else:
        most = min(most, math.isqrt(RESULT_BYTES * problem.cols // message_bytes) - 1)
    if most < 1:
        return None
    ctas = min(most, _ctas_per_row(question, plan))
    # in place they lie where x was, which must not be read again
    apart = problem.unaligned == UNALIGNED_APART or problem.room
    if not apart and plan.row_shared_bytes < ctas * message_bytes + ACCESS_BYTES:
        return None
    needed = min(plan.row_shared_bytes, shared_bytes(problem, ctas))
    plan = replace(plan, ctas_per_row=ctas, shared_bytes=needed)
    resident = question.occupancy(plan)
    if resident < plan.min_blocks:  # all must run at once
        return None
    return all_at_once(question, plan, rows * ctas, resident, reason)
