"""shared of rows whose elements lie apart, but that are stretches of memory with their neighbours: row_stretch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AT_USE,
    CONVERTED,
    HALF_BYTES,
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
    better = better and _is_large(problem, numbers.least_bytes)
    plan = _cut(question)
    if not (asked or (better and _fills_the_device(question, plan))):
        return None
    return finished(question, plan, WHY)


def _fills_the_device(question: Question, plan: Plan) -> bool:
    """Say whether there are enough blocks, of which several run at once as far as shared memory goes."""
    problem, numbers = question.problem, question.rules.stretches
    enough = _blocks(problem, plan) >= numbers.fewest * question.limits.sm_count
    return enough and _at_once(question, plan) >= (1 if _may_be_alone(problem) else numbers.resident)


def _may_be_alone(problem: Problem) -> bool:
    """Say whether one block of a multiprocessor is better than what there is elsewhere.

    So it is where that would access single elements, if there is much to load or to store for each step, and for pairs
    of numbers that are given.
    """
    if not problem.output_bytes or _are_computed_pairs(problem):
        return False
    wide = problem.load_bytes == problem.compute_bytes
    if problem.vector == 1:
        return wide or bool(problem.load_operands)
    return wide and problem.fields > 1


def _are_computed_pairs(problem: Problem) -> bool:
    """Say whether elements are pairs that are computed from several arrays, such as gamma."""
    return problem.fields > 1 and len(problem.load_operands) > 1


def _is_large(problem: Problem, least_bytes: int) -> bool:
    """Say whether a stretch that does not adjoin the next one, so that a block has no other, is large enough."""
    if problem.adjoining_stretches:
        return True
    stretch_bytes = problem.across * problem.cols * problem.load_bytes
    return stretch_bytes >= least_bytes and (problem.vector == 1 or problem.load_bytes > HALF_BYTES)


def _at_once(question: Question, plan: Plan) -> int:
    """Return for how many blocks the shared memory of a multiprocessor has room."""
    limits = question.limits
    return limits.shared_bytes_per_sm // (plan.shared_bytes + limits.reserved_shared_bytes)


def _leaves_gaps(question: Question) -> bool:
    """Say whether threads that have neighbouring rows would access single elements, or tiles that are not whole."""
    problem = question.problem
    of_statistics, of_results = question.rules.stretches.whole[problem.load_bytes]
    widest = (of_results if problem.output_bytes else of_statistics) // problem.load_bytes
    tile = power_of_two_to(min(widest, problem.across)) if widest else 0
    return tile > 0 and (problem.vector == 1 or problem.across % tile > 0)


def _cut(question: Question) -> Plan:
    """Return which rows a block has and how many threads share each."""
    problem, numbers = question.problem, question.rules.stretches
    few, many, most = numbers.blocks
    each = problem.across * problem.cols * max(problem.load_bytes, problem.output_bytes)
    tables = max(1, min(many // problem.across, numbers.tables, numbers.bytes // max(1, each)))
    tables = tables if problem.adjoining_stretches else 1
    rows = problem.across * tables
    block = few if each <= numbers.bytes and 2 * rows <= few else many
    plan = _of_block(question, tables, block)
    at_once = _at_once(question, plan)
    converted = _with_shared_memory(problem, replace(plan, parameter_cache=CONVERTED))
    if problem.parameter_bytes and _at_once(question, converted) == at_once:
        plan = converted
    short = problem.slot_bytes <= ACCESS_BYTES
    stores = problem.output_bytes > 0 and (problem.fields == 1 or _are_computed_pairs(problem))
    if short and stores and at_once <= numbers.few_at_once:
        larger = _of_block(question, tables, most, plan.parameter_cache)
        plan = larger if _at_once(question, larger) == at_once else plan
    return plan


def _of_block(question: Question, tables: int, block: int, parameter_cache: int = AT_USE) -> Plan:
    problem, numbers = question.problem, question.rules.stretches
    plan = replace(
        PLAIN,
        variant="shared",
        vectors=numbers.elements,
        group=block // (problem.across * tables),
        rows_per_group=tables,
        parameter_cache=parameter_cache,
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
    needed = slots * problem.slot_bytes + held
    if plan.parameter_cache == CONVERTED:
        needed += in_accesses(problem.cols * len(problem.parameter_bytes) * problem.compute_bytes)
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
    alone = alone and not (plan.full or plan.stages) and plan.waits == NOWHERE
    alone = alone and (
        plan.parameter_cache == AT_USE
        or (plan.parameter_cache == CONVERTED and bool(problem.parameter_bytes))
    )
    alone = alone and (problem.adjoining_stretches or plan.rows_per_group == 1)
    down = plan.block // rows if 0 < rows <= MAX_BLOCK else 0
    shares = plan.across == problem.across and down == plan.group > 0 and (down > 1 or rows >= WARP)
    return alone and shares
