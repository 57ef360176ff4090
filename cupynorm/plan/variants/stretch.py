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

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem

WHY = "rows whose elements lie apart: those that are neighbours come and go as one stretch of memory"


def stretch(question: Question, *, asked: bool) -> Plan | None:
    """Return the plan of rows that wait in shared memory; None where others are better, unless it is asked for."""
    problem, numbers = question.problem, question.rules.stretches
    if not _can_be(problem) or problem.across > numbers.block:
        return None
    few, many = numbers.neighbours
    each = problem.across * problem.cols * max(problem.load_bytes, problem.output_bytes)
    most = min(numbers.block // problem.across, numbers.tables)
    tables = max(1, min(most, numbers.bytes // max(1, each)))
    plan = replace(
        PLAIN,
        variant="shared",
        vectors=numbers.elements,
        group=numbers.block // (problem.across * tables),
        rows_per_group=tables,
        block=numbers.block,
        across=problem.across,
        min_blocks=numbers.threads // numbers.block,
    )
    enough = _blocks(problem, plan) >= numbers.blocks * question.limits.sm_count
    better = few <= problem.across <= many and problem.cols >= numbers.columns and enough
    better = better and _stretch_bytes(problem, plan) <= numbers.most_bytes
    return finished(question, plan, WHY) if better or asked else None


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows."""
    problem = question.problem
    if not (_can_be(problem) and _is_sound(problem, plan)):
        return None
    rows = plan.across * plan.rows_per_group
    slots = rows * (plan.group + 1) * (plan.group > 1)
    held = _stretch_bytes(problem, plan)
    needed = slots * in_accesses(problem.message_numbers * problem.compute_bytes) + held
    plan = replace(plan, row_shared_bytes=held, shared_bytes=needed)
    return with_grid(question, plan, _blocks(problem, plan), reason)


def _blocks(problem: Problem, plan: Plan) -> int:
    return math.ceil(problem.rows / (plan.across * plan.rows_per_group))


def _stretch_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes of a block's stretches, which begin and end anywhere in an access; and of their results."""
    elements = plan.across * plan.rows_per_group * problem.cols
    sizes = {problem.load_bytes, problem.output_bytes} - {0}  # those of one size have the same places
    return sum((elements * size // ACCESS_BYTES + 2) * ACCESS_BYTES for size in sizes)


def _can_be(problem: Problem) -> bool:
    return problem.stretch and not (problem.rounds or problem.column_sums) and problem.fields == 1


def _is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan asks for nothing that the kernel would do wrong."""
    rows = plan.across * plan.rows_per_group
    alone = plan.vector == plan.ctas_per_row == plan.alignment_period == 1 and not plan.unaligned
    alone = alone and not (plan.full or plan.stages or plan.parameter_cache) and plan.waits == NOWHERE
    down = plan.block // rows if 0 < rows <= MAX_BLOCK else 0
    shares = plan.across == problem.across and down == plan.group > 0 and (down > 1 or rows >= WARP)
    return alone and shares
