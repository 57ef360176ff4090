"""shared and uncached: a whole block goes through a row, which waits in shared memory, or nowhere and is read twice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    FIELDS_SHARED_BYTES,
    HALF_BYTES,
    MAX_BLOCK,
    ONE_BLOCK_PER_ROW,
    PLAIN,
    ROUNDS_SHARED_BYTES,
    SCHEDULERS,
    UNALIGNED_APART,
    WARP,
    Plan,
)
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.plan.partition import (
    computed_bytes,
    power_of_two_to,
    shared_bytes,
    threads_with_vectors,
)
from cupynorm.plan.registers import registers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.plan.problem import Problem
    from cupynorm.plan.rule_types import Rule

COMPUTED = "a block's shared memory holds what was computed of the row"


def shared(question: Question) -> Plan | None:
    """Return the plan of a block of as many threads as fill a multiprocessor beside the rows that it holds."""
    problem, limits, numbers = question.problem, question.limits, question.rules.staged
    if problem.fused:
        return _computed(question)
    row_shared_bytes = limits.shared_bytes_per_block
    needed = shared_bytes(problem)
    if needed > row_shared_bytes or problem.unaligned == UNALIGNED_APART:
        return None
    at_once = max(1, limits.shared_bytes_per_sm // (needed + limits.reserved_shared_bytes))
    block = power_of_two_to(min(numbers.threads, limits.threads_per_sm) // at_once)
    if question.small_batch:
        block = MAX_BLOCK
    most = (numbers.affine_block if problem.parameter_bytes else numbers.block)[problem.compute_bytes]
    block = threads_with_vectors(problem, 1, min(max(block, numbers.min_block), most))
    plan = chunked(question, "shared", block, row_shared_bytes)
    return finished(question, plan, "a block's shared memory holds the row, and no variant before it does")


def prefers_shared(question: Question) -> bool:
    """Say whether a mask drops so much of each row that one block for each is better than several.

    What is dropped is written, and nothing else: blocks that share a row would wait for those that have what is kept.
    """
    problem = question.problem
    if not (problem.band_cols and _is_simple(question, unaligned=True)):
        return False
    return question.rules.is_better("shared, band" + (", unaligned" if problem.unaligned else ""), problem)


def _computed(question: Question) -> Plan | None:
    """Return the plan of fused rows that wait as they were computed: as many threads as registers allow."""
    problem, limits, numbers = question.problem, question.limits, question.rules.staged
    needed = computed_bytes(problem, problem.vector) + limits.reserved_shared_bytes + STATIC_SHARED_BYTES
    at_once = max(1, min(limits.shared_bytes_per_sm // needed, limits.blocks_per_sm))
    if problem.band_cols and _is_simple(question, unaligned=True):
        return _of_band(question, at_once)
    simple = _is_simple(question)
    model = question.rules.registers
    each = model.computed if simple else model.computed_beside
    tight = problem.unaligned or problem.extra_registers > model.few
    each = model.computed_at_most if problem.doubles or tight else each
    unit = SCHEDULERS * WARP
    most = min(limits.registers_per_sm // each, limits.threads_per_sm)
    vectors = 2 if simple else 1
    loading = math.ceil(problem.vectors / vectors / unit) * unit  # threads that load a row at once
    fewer = max(unit, most // at_once // unit * unit)  # the one of two sizes that leaves more threads in work
    block = max(fewer, fewer + unit, key=lambda size: size * min(at_once, most // size))
    block = max(numbers.min_block, min(block, loading, MAX_BLOCK))
    plan = chunked(question, "shared", block, 0, vectors=vectors)
    plan = replace(plan, min_blocks=max(1, min(at_once, most // block)))
    return finished_computed(question, plan, COMPUTED)


def _of_band(question: Question, at_once: int) -> Plan | None:
    """Return the plan of rows of which a band is kept, of which `at_once` fit: threads enough to write the others.

    Where little is kept, a block has one row: what it writes of the others hides that it waits for what is kept.
    """
    problem, numbers = question.problem, question.rules.staged

    def chosen(tried: Sequence[Sequence[int]]) -> tuple[int, int]:
        block, most = next((each[1:] for each in tried if problem.row_bytes <= each[0]), tried[-1][1:])
        return block, min(at_once, most, question.limits.threads_per_sm // block)

    block, blocks = chosen(numbers.band_blocks)
    alone = blocks > 1 and problem.band_share <= numbers.band_alone
    if alone:
        block, blocks = chosen(numbers.band_blocks_alone)
    plan = chunked(question, "shared", block, 0, vectors=1)
    plan = replace(plan, min_blocks=blocks, waves=ONE_BLOCK_PER_ROW if alone else 1.0)
    share = f"{COMPUTED}; its mask keeps {problem.band_share:.0%} of it at most"
    return finished_computed(question, plan, share)


def _is_simple(question: Question, *, unaligned: bool = False) -> bool:
    """Say whether a thread has registers for two vectors on their way. unaligned: those of unaligned rows suffice."""
    problem = question.problem
    beside = (*problem.parameter_bytes, *problem.load_operands, *problem.epilogue_operands)
    few = problem.extra_registers <= question.rules.registers.few
    crowded = problem.doubles or problem.has_scales or (problem.unaligned > 0 and not unaligned)
    crowded = crowded or problem.fields > 1
    return few and not (beside or crowded)


def finished_computed(question: Question, plan: Plan, reason: Rule | str) -> Plan | None:
    """Return a plan of fused rows that wait in shared memory with its launch: of as many blocks as run at once.

    Where the plan says how many waves of them there are, of as many.
    """
    problem, limits = question.problem, question.limits
    needed = computed_bytes(problem, plan.vector)
    # States of five doubles in static shared memory, of 32 warps and of the next row; of seven where there are rounds
    beside = FIELDS_SHARED_BYTES if problem.fields > 1 and problem.doubles else 0
    beside = ROUNDS_SHARED_BYTES[problem.compute_bytes] if problem.rounds else beside
    fits = needed + beside <= limits.shared_bytes_per_block
    fits = fits and problem.fused and problem.unaligned != UNALIGNED_APART
    if not fits or plan.block < 2 * plan.vector - 2:
        return None
    plan = replace(plan, shared_bytes=needed)
    return with_grid(question, plan, problem.rows, reason, plan.waves or 1.0)


def uncached(question: Question) -> Plan | None:
    """Return the plan that every row fits: nothing waits."""
    problem, limits, numbers = question.problem, question.limits, question.rules.staged
    block = numbers.fused_block if problem.fused else numbers.whole_block[problem.compute_bytes]
    plan = chunked(question, "uncached", threads_with_vectors(problem, 1, block), 0)
    if problem.fused:
        needed = registers(question, plan.vectors * plan.vector, full=False, cached=False)
        blocks = max(1, limits.registers_per_sm // (needed * block))
        # Two vectors of eight elements with a dropout take 114 registers on sm_90. Told that it may have 128, NVRTC
        # 13.5 spills, there alone: other architectures and other vectors keep two blocks and more.
        much = problem.extra_registers > question.rules.registers.few
        whole = plan.vector * HALF_BYTES == ACCESS_BYTES and plan.vectors > 1 and not problem.unaligned
        if much and whole and question.measured and problem.element_bytes == HALF_BYTES:
            blocks = 1
        plan = replace(plan, min_blocks=blocks)
    return finished(question, plan, "no other variant holds the row")


def streamed(question: Question) -> Plan | None:
    """Return the plan of long rows that are only read: many loads are on their way, and nothing waits."""
    problem, numbers, vectors = question.problem, question.rules.streamed, stream_vectors(question)
    most = power_of_two_to(max(WARP, problem.vectors // (numbers.rounds * vectors)))
    plan = chunked(question, "uncached", threads_with_vectors(problem, 1, min(numbers.block, most)), 0)
    plan = replace(plan, vectors=vectors, min_blocks=stream_blocks(question, plan.block))
    return finished(question, plan, "rows that are only read are a stream, of which nothing waits")


def stream_vectors(question: Question) -> int:
    """Return how many vectors of a stream a thread has on their way."""
    return max(1, question.rules.streamed.elements // question.problem.vector)


def stream_blocks(question: Question, block: int) -> int:
    """Return how many blocks of a stream a multiprocessor has."""
    threads = min(question.rules.streamed.threads, question.limits.threads_per_sm)
    return min(threads // block, question.limits.blocks_per_sm)


def may_stream(problem: Problem) -> bool:
    """Say whether a stream can read the rows: nothing is written for their elements, and accesses are whole."""
    return problem.only_reads and problem.fields == 1 and problem.vector_bytes == ACCESS_BYTES


def prefers_stream(question: Question) -> bool:
    """Say whether rows of which only numbers are kept are long enough to be read as a stream."""
    problem = question.problem
    if not may_stream(problem):
        return False
    others = problem.load_bytes == 1 or problem.unaligned > 0
    return question.rules.is_better("streamed, others" if others else "streamed", problem)


def chunked(question: Question, variant: str, block: int, row_shared_bytes: int, *, vectors: int = 0) -> Plan:
    """Return a plan whose threads read a chunk of a row at a time, of `vectors` vectors at most if that is given."""
    problem, numbers = question.problem, question.rules.staged
    elements = numbers.chunk_elements[problem.element_bytes] // problem.fields
    most = max(1, min(numbers.chunk_vectors, elements // problem.vector))
    return replace(
        PLAIN,
        variant=variant,
        vector=problem.vector,
        vectors=min(vectors, most) if vectors else most,
        unaligned=problem.unaligned,
        block=block,
        row_shared_bytes=row_shared_bytes,
    )


def finished(question: Question, plan: Plan, reason: Rule | str) -> Plan | None:
    """Return a plan with its shared memory and its launch."""
    problem = question.problem
    needed = min(plan.row_shared_bytes, shared_bytes(problem, plan.ctas_per_row))
    plan = replace(plan, shared_bytes=needed)
    blocks = problem.rows * plan.ctas_per_row
    return with_grid(question, plan, blocks, reason, plan.waves or ONE_BLOCK_PER_ROW)
