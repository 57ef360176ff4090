"""shared and uncached: a whole block goes through a row, which waits in shared memory, or nowhere and is read twice."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import MAX_BLOCK, ONE_BLOCK_PER_ROW, PLAIN, UNALIGNED_APART, Plan
from cupynorm.plan.partition import power_of_two_to, shared_bytes, threads_with_vectors
from cupynorm.plan.registers import registers

if TYPE_CHECKING:
    from cupynorm.plan.rules import Rule


def shared(question: Question) -> Plan | None:
    """Return the plan of a block of as many threads as fill a multiprocessor beside the rows that it holds."""
    problem, limits, numbers = question.problem, question.limits, question.rules.staged
    row_shared_bytes = limits.shared_bytes_per_block
    needed = shared_bytes(problem)
    if needed > row_shared_bytes or problem.unaligned == UNALIGNED_APART or problem.fused:
        return None
    at_once = max(1, limits.shared_bytes_per_sm // (needed + limits.reserved_shared_bytes))
    block = power_of_two_to(min(numbers.threads, limits.threads_per_sm) // at_once)
    if question.small_batch:
        block = MAX_BLOCK
    most = (numbers.affine_block if problem.parameter_bytes else numbers.block)[problem.compute_bytes]
    block = threads_with_vectors(problem, 1, min(max(block, numbers.min_block), most))
    plan = chunked(question, "shared", block, row_shared_bytes)
    return finished(question, plan, "a block's shared memory holds the row, and no variant before it does")


def uncached(question: Question) -> Plan | None:
    """Return the plan that every row fits: nothing waits."""
    problem, limits, numbers = question.problem, question.limits, question.rules.staged
    block = numbers.fused_block if problem.fused else numbers.whole_block[problem.compute_bytes]
    plan = chunked(question, "uncached", threads_with_vectors(problem, 1, block), 0)
    if problem.fused:
        needed = registers(question, plan.vectors * plan.vector, full=False, cached=False)
        plan = dataclasses.replace(plan, min_blocks=max(1, limits.registers_per_sm // (needed * block)))
    return finished(question, plan, "no other variant holds the row")


def chunked(question: Question, variant: str, block: int, row_shared_bytes: int, *, vectors: int = 0) -> Plan:
    """Return a plan whose threads read a chunk of a row at a time, of `vectors` vectors at most if that is given."""
    problem, numbers = question.problem, question.rules.staged
    most = max(1, min(numbers.chunk_vectors, numbers.chunk_elements[problem.element_bytes] // problem.vector))
    return dataclasses.replace(
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
    plan = dataclasses.replace(plan, shared_bytes=needed)
    blocks = problem.rows * plan.ctas_per_row
    return with_grid(question, plan, blocks, reason, plan.waves or ONE_BLOCK_PER_ROW)
