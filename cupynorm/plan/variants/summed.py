"""warp, block, cluster, where sums over rows are taken in the same pass: row_summed of kernels/row/summed.cuh.

A row waits in the registers of a group of threads, and so do the sums of its columns. The next row is on its way
meanwhile, in registers as well; or the next few are, in shared memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    ALIGNED,
    AMPERE,
    AT_USE,
    MAX_BLOCK,
    MAX_CTAS,
    PLAIN,
    REGISTER_BYTES,
    WARP,
    Plan,
)
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
    alone = plan.rows_per_group == 1 and plan.parameter_cache == AT_USE
    too_many = not plan.stages and _column_bytes(problem, plan) > question.rules.column_sums.shared_bytes
    if not alone or too_many:
        return None
    if plan.stages:  # sums are added up where the rows were
        plan = dataclasses.replace(plan, shared_bytes=max(plan.shared_bytes, _column_bytes(problem, plan)))
    # a block goes from group to group, each of which has rows of one alignment
    question = question._replace(problem=dataclasses.replace(problem, alignment_period=1))
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
        least = 4 * WARP if ctas > 1 else 2 * WARP if variant == "block" else least_group(problem)
        each = itertools.product(range(1, min(numbers.max_vectors, most) + 1), blocks or numbers.blocks)
        for plan in dict.fromkeys(_tiling(problem, ctas, *how, least) for how in each):
            if plan is None or _column_bytes(problem, plan) > numbers.shared_bytes:
                continue
            for stages in range(_most_stages(question, plan), -1, -1):
                staged = in_registers(problem, dataclasses.replace(plan, stages=stages))
                if staged.shared_bytes > limits.shared_bytes_per_block:
                    continue
                shared = max(_column_bytes(problem, plan), staged.shared_bytes) + STATIC_SHARED_BYTES
                resident = active_blocks(limits, plan.block, _registers(problem, numbers, staged), shared)
                if resident:
                    yield dataclasses.replace(staged, min_blocks=resident)
                    break
        ctas *= 2


def _most_stages(question: Question, plan: Plan) -> int:
    """Return how many rows are on their way in shared memory where it has room: copies are of whole accesses."""
    problem, numbers = question.problem, question.rules.column_sums
    whole = plan.vector * problem.load_bytes == ACCESS_BYTES and not plan.unaligned and plan.ctas_per_row == 1
    if not whole or int(question.limits.compute_capability) < AMPERE:
        return 0
    return next((stages for up_to, stages in numbers.stages if problem.cols <= up_to), 0)


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
    on_the_way = _loaded_bytes(problem)
    if plan.stages:
        beside += model.staged_registers
        on_the_way -= problem.load_bytes + problem.staged_operand_bytes
    return beside + elements * (numbers + on_the_way) // REGISTER_BYTES


def _loaded_bytes(problem: Problem) -> int:
    return problem.load_bytes + sum((*problem.load_operands, *problem.epilogue_operands))


def _worth(question: Question, plan: Plan) -> tuple[float, int, int, int]:
    """Return how good a tiling is: bytes on their way to a multiprocessor, less those of places without an element.

    Groups of rows that are no whole number of turns leave blocks without work in the last one; and each turn begins
    with a load that nothing overlaps. The device's own number of multiprocessors has no say: sums would differ.
    """
    problem = question.problem
    numbers = question.rules.column_sums
    filled = problem.vectors / (plan.ctas_per_row * plan.group * plan.vectors)
    reached = numbers.reached_by_clusters if plan.ctas_per_row > 1 else numbers.multiprocessors
    most = max(1, plan.min_blocks * (reached // plan.ctas_per_row))
    turns = math.ceil(problem.row_groups / most)
    at_once = problem.row_groups / turns
    rows = at_once * (plan.block // plan.group) / numbers.multiprocessors
    on_the_way = rows * problem.cols * _loaded_bytes(problem) * max(1, plan.stages)
    busy = at_once / min(most, problem.row_groups)
    worth = min(on_the_way, numbers.busy_bytes) * math.sqrt(min(1.0, filled)) * busy
    blocks = 0
    if plan.ctas_per_row > 1:  # while one block of a multiprocessor waits for its cluster another has work
        worth *= numbers.clusters
        blocks = plan.min_blocks
    # where few threads share a row, or the next row takes registers, vectors are costly
    more_vectors = plan.vectors if plan.stages or blocks else -plan.vectors
    return worth, blocks, -turns, more_vectors
