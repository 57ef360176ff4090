"""warp, block, cluster, where sums over rows are taken in the same pass: row_summed of kernels/row/summed.cuh.

A row waits in the registers of a group of threads, and so do the sums of its columns. The next row is on its way
meanwhile, in registers as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import ALIGNED, AT_USE, MAX_BLOCK, MAX_CTAS, PLAIN, REGISTER_BYTES, WARP, Plan
from cupynorm.plan.limits import STATIC_SHARED_BYTES, active_blocks
from cupynorm.plan.partition import alignment_period, in_registers, least_group, power_of_two_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynorm.plan.problem import Problem
    from cupynorm.plan.rules import ColumnSums

WHY = "sums over rows beside the row in registers: the tiling with the most bytes on their way"


def summed(question: Question, variant: str | None = None) -> Plan | None:
    """Return the best of all tilings, or of those of a variant; None if a row and its sums have no place."""
    found = [each for each in tilings(question, variant) if variant in {None, each.variant}]
    found.sort(key=lambda each: _worth(question, each), reverse=True)
    launches = (finished(question, each, WHY) for each in found)
    return next((each for each in launches if each is not None), None)


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its launch: blocks for all groups of rows, but no more than the device holds at once."""
    problem = question.problem
    alone = plan.rows_per_group == 1 and not plan.stages and plan.parameter_cache == AT_USE
    if not alone or _column_bytes(problem, plan) > question.rules.column_sums.shared_bytes:
        return None
    return with_grid(question, plan, problem.row_groups * plan.ctas_per_row, reason, waves=1.0)


def tilings(
    question: Question, variant: str | None = None, blocks: Sequence[int] | None = None
) -> Iterator[Plan]:
    """Give a plan for each number of blocks that share a row, and of a thread's vectors, that has room.

    variant: `block` takes more threads for a row than it may need. blocks: threads of a block of several rows; default:
    as the rules have it.
    """
    problem, limits = question.problem, question.limits
    if problem.unaligned and not problem.alignment_period:
        problem = dataclasses.replace(problem, unaligned=ALIGNED)
    numbers = question.rules.column_sums
    most = max(1, numbers.max_elements[problem.compute_bytes] // problem.vector)
    ctas = 1
    while ctas <= min(question.max_ctas, MAX_CTAS):
        least = 2 * WARP if ctas > 1 or variant == "block" else least_group(problem)
        each = itertools.product(range(1, min(numbers.max_vectors, most) + 1), blocks or numbers.blocks)
        for plan in dict.fromkeys(_tiling(problem, ctas, *how, least) for how in each):
            if plan is None or _column_bytes(problem, plan) > numbers.shared_bytes:
                continue
            needed = _registers(problem, numbers, plan)
            shared = _column_bytes(problem, plan) + STATIC_SHARED_BYTES
            resident = active_blocks(limits, plan.block, needed, shared)
            if resident:
                yield dataclasses.replace(plan, min_blocks=resident)
        ctas *= 2


def _tiling(problem: Problem, ctas: int, vectors: int, most: int, least: int) -> Plan | None:
    """Return a plan without its registers; None if so many vectors of a thread do not make such a row.

    most: threads of a block of several rows. least: threads that share a row.
    """
    threads = math.ceil(math.ceil(problem.vectors / ctas) / vectors)
    group = math.ceil(threads / WARP) * WARP if threads > WARP else power_of_two_from(max(1, threads))
    group = max(group, least)
    if group > MAX_BLOCK:
        return None
    block = group if ctas > 1 else max(1, most // group) * group
    variant = "cluster" if ctas > 1 else "block" if group > WARP else "warp"
    plan = dataclasses.replace(
        PLAIN,
        variant=variant,
        vector=problem.vector,
        group=group,
        unaligned=problem.unaligned,
        alignment_period=alignment_period(problem, 1),
        ctas_per_row=ctas,
        block=block,
    )
    plan = in_registers(problem, plan)
    return plan if plan.vectors == vectors else None


def _column_bytes(problem: Problem, plan: Plan) -> int:
    """Return the static shared memory in which several rows of a block add up their sums."""
    if plan.block == plan.group:
        return 0
    return plan.block * (plan.vectors * plan.vector + bool(plan.unaligned)) * problem.compute_bytes


def _registers(problem: Problem, model: ColumnSums, plan: Plan) -> int:
    """Return how many registers a thread wants for its elements, their sums, and the next row on its way."""
    elements = plan.vectors * plan.vector
    numbers = (problem.fields + problem.column_sums) * problem.compute_bytes
    beside = model.registers + model.unaligned_registers * (plan.unaligned > 0)
    beside += model.cluster_registers * (plan.ctas_per_row > 1)
    return beside + elements * (numbers + _loaded_bytes(problem)) // REGISTER_BYTES


def _loaded_bytes(problem: Problem) -> int:
    return problem.load_bytes + sum((*problem.load_operands, *problem.epilogue_operands))


def _worth(question: Question, plan: Plan) -> tuple[float, int, int]:
    """Return how good a tiling is: bytes on their way to a multiprocessor, less those of places without an element."""
    problem = question.problem
    numbers = question.rules.column_sums
    filled = problem.vectors / (plan.ctas_per_row * plan.group * plan.vectors)
    rows = plan.min_blocks * (plan.block // plan.group)
    on_the_way = rows * problem.cols / plan.ctas_per_row * _loaded_bytes(problem)
    worth = min(on_the_way, numbers.busy_bytes) * math.sqrt(min(1.0, filled))
    return worth * (numbers.clusters if plan.ctas_per_row > 1 else 1), -plan.ctas_per_row, -plan.vectors
