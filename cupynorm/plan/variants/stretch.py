"""shared of rows whose elements lie apart, but that are stretches of memory with their neighbours: row_stretch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    MAX_BLOCK,
    NOWHERE,
    PLAIN,
    WARP,
    Plan,
    in_accesses,
)
from cupynorm.plan.partition import power_of_two_to

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem

WHY = "rows whose elements lie apart: those that are neighbours come and go as one stretch of memory"


def stretch(question: Question, *, asked: bool) -> Plan | None:
    """Return the plan of rows that wait in shared memory; None where others are better, unless it is asked for."""
    problem, numbers = question.problem, question.rules.stretches
    if not _can_be(problem) or problem.across > max(numbers.blocks):
        return None
    few, many = numbers.neighbours
    better = few <= problem.across <= many and problem.cols >= numbers.columns and _leaves_gaps(question)
    results = problem.output_bytes not in {0, problem.load_bytes}
    better = better and not problem.interval_mask and len(problem.stretches) == 1 + results
    plan = _cut(question)
    if not (asked or (better and _fills_the_device(question, plan))):
        return None
    return finished(question, plan, WHY)


def _fills_the_device(question: Question, plan: Plan) -> bool:
    """Say whether there are enough blocks, of which several run at once as far as shared memory goes."""
    numbers, limits = question.rules.stretches, question.limits
    at_once = limits.shared_bytes_per_sm // (plan.shared_bytes + limits.reserved_shared_bytes)
    enough = _blocks(question.problem, plan) >= numbers.fewest * limits.sm_count
    return enough and at_once >= numbers.resident


def _leaves_gaps(question: Question) -> bool:
    """Say whether threads that have neighbouring rows would access single elements, or tiles that are not whole."""
    problem = question.problem
    widest = question.rules.stretches.whole[problem.load_bytes] // problem.load_bytes
    tile = power_of_two_to(min(widest, problem.across)) if widest else 0
    return tile > 0 and (problem.vector == 1 or problem.across % tile > 0)


def _cut(question: Question) -> Plan:
    """Return which rows a block has and how many threads share each."""
    problem, numbers = question.problem, question.rules.stretches
    few, many = numbers.blocks
    each = problem.across * problem.cols * max(problem.load_bytes, problem.output_bytes)
    tables = max(1, min(many // problem.across, numbers.tables, numbers.bytes // max(1, each)))
    tables = tables if problem.adjoining_stretches else 1
    rows = problem.across * tables
    block = few if each <= numbers.bytes and 2 * rows <= few else many
    plan = replace(
        PLAIN,
        variant="shared",
        vectors=numbers.elements,
        group=block // rows,
        rows_per_group=tables,
        block=block,
        across=problem.across,
        min_blocks=numbers.threads // block,
    )
    return _with_shared_memory(problem, plan)


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows."""
    problem = question.problem
    if not (_can_be(problem) and _is_sound(problem, plan)):
        return None
    return with_grid(question, _with_shared_memory(problem, plan), _blocks(problem, plan), reason)


def _with_shared_memory(problem: Problem, plan: Plan) -> Plan:
    slots = plan.across * plan.rows_per_group * (plan.group + 1) * (plan.group > 1)
    held = _stretch_bytes(problem, plan)
    needed = slots * in_accesses(problem.message_numbers * problem.compute_bytes) + held
    needed += in_accesses(
        problem.cols * len(problem.parameter_bytes) * problem.compute_bytes
    )  # gamma and beta
    return replace(plan, row_shared_bytes=held, shared_bytes=needed)


def _blocks(problem: Problem, plan: Plan) -> int:
    return math.ceil(problem.rows / (plan.across * plan.rows_per_group))


def _stretch_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes of a block's stretches, which begin and end anywhere in an access."""
    elements = plan.across * plan.rows_per_group * problem.cols
    return sum((elements * size // ACCESS_BYTES + 2) * ACCESS_BYTES for size in problem.stretches)


def _can_be(problem: Problem) -> bool:
    return bool(problem.stretches) and not (problem.rounds or problem.column_sums)


def _is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan asks for nothing that the kernel would do wrong."""
    rows = plan.across * plan.rows_per_group
    alone = plan.vector == plan.ctas_per_row == plan.alignment_period == 1 and not plan.unaligned
    alone = alone and not (plan.full or plan.stages or plan.parameter_cache) and plan.waits == NOWHERE
    alone = alone and (problem.adjoining_stretches or plan.rows_per_group == 1)
    down = plan.block // rows if 0 < rows <= MAX_BLOCK else 0
    shares = plan.across == problem.across and down == plan.group > 0 and (down > 1 or rows >= WARP)
    return alone and shares
