"""warp of narrow rows without gaps: those of a block come and go as one stretch of memory (kernels/row/tiled.cuh)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    ALIGNED,
    DOUBLE_BYTES,
    HALF_BYTES,
    PLAIN,
    TILE_ROWS,
    WARP,
    Plan,
    in_accesses,
)
from cupynorm.plan.partition import is_power_of_two

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem

CROSSOVER = "tiled"


def tiled(question: Question) -> Plan | None:
    """Return the plan of a few lanes for each narrow row; None where rows are better moved one by one."""
    problem, numbers = question.problem, question.rules.tiled
    if not _can_be(problem) or not question.rules.is_better(CROSSOVER, problem):
        return None
    vector, whole = _vector(problem), problem.cols <= numbers.alone
    group = 1 if whole else numbers.lanes
    most = numbers.elements[problem.element_bytes][vector.bit_length() - 1]
    while math.ceil(problem.cols / (vector * group)) * vector > most:
        group *= 2
    small, block = numbers.blocks
    few = group > numbers.lanes and problem.rows * group < numbers.few * question.limits.sm_count * block
    if whole or (few and small % (TILE_ROWS * group) == 0):  # which lanes share a row stays the same
        block = small
    plan = replace(
        PLAIN,
        variant="warp",
        vector=vector,
        vectors=math.ceil(problem.cols / (vector * group)),
        group=group,
        block=block,
        min_blocks=numbers.threads // block,
    )
    return finished(question, plan, question.named(f"crossover {CROSSOVER!r}"))


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with the shared memory of its tile, and its launch; None where it cannot be."""
    problem = question.problem
    if not _can_be(problem) or not _is_sound(problem, plan):
        return None
    rows = plan.block // plan.group
    row_shared_bytes = rows * problem.cols * problem.load_bytes
    numbers_bytes = problem.cols * problem.compute_bytes * len(problem.parameter_bytes)
    plan = replace(
        plan,
        row_shared_bytes=row_shared_bytes,
        shared_bytes=row_shared_bytes + in_accesses(numbers_bytes),
    )
    return with_grid(question, plan, math.ceil(problem.rows / rows), reason)


def _can_be(problem: Problem) -> bool:
    """Say whether rows can come as one stretch of memory: they are moved one by one in less than 16 bytes."""
    narrow = _vector(problem) * problem.load_bytes < ACCESS_BYTES
    return (
        problem.adjoining and narrow and not problem.fused and HALF_BYTES <= problem.load_bytes < DOUBLE_BYTES
    )


def _vector(problem: Problem) -> int:
    """Return how many elements one access moves: rows are moved from where they begin, wherever that is."""
    return math.gcd(problem.cols, ACCESS_BYTES // problem.load_bytes)


def _is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether the kernel computes such rows rightly in such groups: as kernels/row/tiled.cuh asserts."""
    alone = plan.rows_per_group == 1 and plan.ctas_per_row == 1 and plan.alignment_period == 1
    alone = alone and not (plan.full or plan.parameter_cache or plan.stages or plan.across or plan.waits)
    lanes = 0 < plan.group <= WARP and is_power_of_two(plan.group)
    holds = plan.vectors == math.ceil(problem.cols / (plan.vector * max(1, plan.group)))
    tile = lanes and plan.block % (TILE_ROWS * plan.group) == 0
    return alone and tile and holds and plan.vector == _vector(problem) and plan.unaligned == ALIGNED
