"""cached: a row is read twice, the second time from the level-1 cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AMPERE,
    MAX_CACHED_COLS,
    MAX_CACHED_VECTORS,
    ONE_BLOCK_PER_ROW,
    PLAIN,
    WARP,
    Plan,
)
from cupynorm.plan.registers import registers

if TYPE_CHECKING:
    from cupynorm.plan.rule_types import Rule


def best_cached(question: Question) -> Plan | None:
    """Return the plan where rows were measured to be faster so, on devices with room for all that are in work."""
    problem, rules = question.problem, question.rules
    in_warps = problem.row_bytes % (WARP * ACCESS_BYTES) == 0
    better = rules.is_better("cached" if in_warps else "cached ragged", problem)
    if not better or problem.row_bytes > rules.cached_rules[problem.kind][-1].row_bytes:
        return None
    if question.architecture < AMPERE:
        return None
    plan = cached(question)
    room = question.limits.shared_bytes_per_sm  # which is cut from the same memory
    return plan if plan is not None and plan.min_blocks * problem.row_bytes <= room else None


def cached(question: Question) -> Plan | None:
    """Return the plan of the rule that is long enough, or of the last one."""
    problem, limits = question.problem, question.limits
    rules = question.rules.cached_rules[problem.kind]
    rule = next((each for each in rules if problem.row_bytes <= each.row_bytes), rules[-1])
    iterations = math.ceil(problem.vectors / rule.vectors / rule.block)
    block = math.ceil(problem.vectors / rule.vectors / iterations / WARP) * WARP
    threads = min(rule.resident_threads, limits.threads_per_sm)
    if problem.wide_parameters or not question.measured:
        threads = min(threads, question.rules.staged.roomy_threads)
    plan = replace(
        PLAIN,
        variant="cached",
        vector=problem.vector,
        vectors=rule.vectors,
        block=block,
        min_blocks=max(1, min(threads // block, limits.blocks_per_sm)),
    )
    if problem.fused:
        plan = _fused(question, plan)
    return finished(question, plan, rule)


def _fused(question: Question, plan: Plan) -> Plan:
    """Return a plan with no more vectors and blocks than registers hold with what is computed on the way."""
    problem, limits, numbers = question.problem, question.limits, question.rules.staged
    one = problem.doubles or problem.extra_registers > question.rules.registers.few
    vectors = 1 if one else min(plan.vectors, 2)
    block = min(plan.block, numbers.fused_block)
    needed = registers(question, vectors * plan.vector, full=False, cached=False)
    resident = max(1, min(plan.min_blocks, limits.registers_per_sm // (needed * block)))
    return replace(plan, vectors=vectors, block=block, min_blocks=resident)


def late_exponential(question: Question) -> Plan | None:
    """Return the plan of rows whose results take exponentials late: each thread reads all that it has at once."""
    problem, limits, numbers = question.problem, question.limits, question.rules.late_exponential
    block = math.ceil(problem.vectors / numbers.vectors / WARP) * WARP
    threads = min(numbers.threads, limits.threads_per_sm)
    blocks = max(1, min(threads // block, limits.blocks_per_sm))
    plan = replace(
        PLAIN,
        variant="cached",
        vector=problem.vector,
        vectors=numbers.vectors,
        block=block,
        min_blocks=blocks,
    )
    return finished(question, plan, "results take exponentials, and the cache holds rows meanwhile")


def prefers_late_exponential(question: Question) -> bool:
    """Say whether rows are kept in the cache rather than as numbers in registers, which exponentials then wait for."""
    problem = question.problem
    whole = problem.vector_bytes == ACCESS_BYTES and not problem.unaligned
    # what it was measured with: a pair of arrays, and no mask
    pairs = problem.fields > 1 and len(problem.load_operands) == 1
    plain = problem.late_exponential and whole and pairs and not problem.interval_mask
    return plain and question.measured and question.rules.is_better("cached, late exponential", problem)


def finished(question: Question, plan: Plan, reason: Rule | str) -> Plan | None:
    """Return a plan with its launch; None where the kernel cannot hold such rows."""
    problem = question.problem
    # where something is fused, rows that do not begin at 16 bytes are in narrower vectors
    wide = problem.fused or plan.vector * problem.load_bytes == ACCESS_BYTES
    if problem.unaligned or not wide or plan.vectors > MAX_CACHED_VECTORS or problem.cols > MAX_CACHED_COLS:
        return None
    return with_grid(question, plan, problem.rows, reason, plan.waves or ONE_BLOCK_PER_ROW)
