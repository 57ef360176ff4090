"""warp, block, cluster, where sums over rows are taken in the same pass: row_summed of kernels/row/summed.cuh.

The sums of a row's columns are in registers of a group of threads. The row waits there, too, with the next on its way,
or the next few on their way in shared memory; or it waits in shared memory itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AMPERE,
    AT_USE,
    CUT,
    IN_REGISTERS,
    MAILBOXES,
    MAX_BLOCK,
    MAX_CTAS,
    MEGABYTE,
    NOWHERE,
    NUMBERS_OF_SLOT,
    PLAIN,
    REGISTER_BYTES,
    UNALIGNED,
    UNALIGNED_APART,
    WARP,
    Plan,
    in_accesses,
)
from cupynorm.plan.limits import STATIC_SHARED_BYTES, active_blocks
from cupynorm.plan.partition import (
    alignment_period,
    in_registers,
    least_group,
    power_of_two_from,
)
from cupynorm.plan.variants.fused_cluster import has_static_room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynorm.plan.problem import Problem
    from cupynorm.plan.sections.tilings import ColumnSums

WHY = "sums over rows beside the row in registers: the tiling with the most bytes on their way"
WHY_MEASURED = "sums over rows beside the row: the tiling that was measured as the best"


def summed(question: Question, variant: str | None = None) -> Plan | None:
    """Return the best of all tilings, or of those of a variant; None if a row and its sums have no place."""
    found = [each for each in tilings(question, variant) if variant in {None, each.variant}]
    found.sort(key=lambda each: _worth(question, each), reverse=True)
    measured = (finished(question, each, WHY_MEASURED) for each in _measured(question, variant))
    launches = itertools.chain(measured, (finished(question, each, WHY) for each in found))
    return next((each for each in launches if each is not None), None)


def _measured(question: Question, variant: str | None) -> Iterator[Plan]:
    """Give the tiling that a search found for such rows, if there is one and it has room."""
    problem = question.problem
    if variant is not None:
        return
    operands = len(problem.load_operands), len(problem.epilogue_operands)
    kind = [problem.load_bytes, problem.column_sums, *operands, problem.unaligned]
    measured = question.rules.column_sums.measured
    for *of_kind, fewest, most, vectors, block, ctas, stages, blocks, waits, l2_megabytes in measured:
        wide = question.limits.l2_bytes >= l2_megabytes * MEGABYTE
        if of_kind != kind or not (wide and fewest <= problem.cols <= most):
            continue
        plan = (
            _tiling(problem, ctas, vectors, block, least_group(problem))
            if ctas <= question.max_ctas
            else None
        )
        if plan is None or stages > _most_stages(question, plan):
            continue
        plan = in_registers(problem, dataclasses.replace(plan, stages=stages, min_blocks=blocks, waits=waits))
        plan = _cut(problem, plan)
        if max(_column_bytes(problem, plan), plan.shared_bytes) <= question.limits.shared_bytes_per_block:
            yield plan


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its launch: blocks for all groups of rows, but no more than the device holds at once."""
    problem = question.problem
    alone = plan.rows_per_group == 1 and plan.parameter_cache == AT_USE
    too_many = not plan.stages and _column_bytes(problem, plan) > question.rules.column_sums.shared_bytes
    if plan.stages:  # sums are added up where the rows were
        plan = dataclasses.replace(plan, shared_bytes=max(plan.shared_bytes, _column_bytes(problem, plan)))
    if not alone or too_many or (plan.stages and _told_bytes(problem, plan) > STATIC_SHARED_BYTES):
        return None
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
    problem = question.problem
    numbers = question.rules.column_sums
    most = max(1, numbers.max_elements[problem.compute_bytes] // problem.vector)  # of rows in registers
    most_staged = max(most, numbers.staged_elements[problem.compute_bytes] // problem.vector)
    ctas = 1
    while ctas <= min(question.max_ctas, MAX_CTAS):
        least = (
            numbers.cluster_threads if ctas > 1 else 2 * WARP if variant == "block" else least_group(problem)
        )
        each = itertools.product(
            range(1, min(numbers.max_vectors, most_staged) + 1), blocks or numbers.blocks
        )
        for plan in dict.fromkeys(_tiling(problem, ctas, *how, least) for how in each):
            if plan is None or not has_static_room(problem, plan):
                continue
            crowded = problem.doubles or plan.vectors > numbers.large_block_vectors
            if crowded and plan.group < plan.block > numbers.large_block:
                continue
            stages = _most_stages(question, plan)
            if plan.vectors > (most_staged if stages else most):
                continue
            found = list(_staged(question, plan, stages, NOWHERE))
            if plan.vectors <= most:
                found += _staged(question, plan, min(stages, numbers.stages_of_registers), IN_REGISTERS)
                if not found:
                    found = [each for each in (_resident(question, plan),) if each is not None]
            yield from found
        ctas *= 2


def _staged(question: Question, plan: Plan, most: int, waits: int) -> Iterator[Plan]:
    """Give a tiling with the most rows on their way that have room, and with fewer where more blocks have room so."""
    blocks = 0
    for stages in range(most, 0, -1):
        found = _resident(question, dataclasses.replace(plan, stages=stages, waits=waits))
        if found is not None and found.min_blocks > blocks:
            blocks = found.min_blocks
            yield found


def _resident(question: Question, plan: Plan) -> Plan | None:
    """Return a tiling with its blocks; None if it has no room."""
    problem, limits, numbers = question.problem, question.limits, question.rules.column_sums
    plan = in_registers(problem, plan)
    columns = _column_bytes(problem, plan)
    shared = max(columns, plan.shared_bytes)
    if (not plan.stages and columns > numbers.shared_bytes) or shared > limits.shared_bytes_per_block:
        return None
    plan = _cut(problem, plan)
    registers = _registers(problem, numbers, plan)
    resident = active_blocks(limits, plan.block, registers, shared + STATIC_SHARED_BYTES)
    return dataclasses.replace(plan, min_blocks=resident) if resident else None


def has_room_to_cut(problem: Problem, plan: Plan) -> bool:
    """Say whether a thread has a place for each vector of an unaligned row that any of its columns is in."""
    vectors = (problem.cols + 2 * (plan.vector - 1)) // plan.vector
    return problem.unaligned == UNALIGNED and vectors <= plan.ctas_per_row * plan.group * plan.vectors


def _cut(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with vectors that are cut where it has prefetched rows in registers, and room for that.

    Where a block has several rows that is slower by up to .017 of the copy rate (docs/notes/079).
    """
    alone = plan.block == plan.group
    cut = plan.stages > 0 and plan.waits == IN_REGISTERS and alone and has_room_to_cut(problem, plan)
    return dataclasses.replace(plan, waits=CUT) if cut else plan


def _told_bytes(problem: Problem, plan: Plan) -> int:
    """Return the static shared memory for what warps and blocks tell one another of rows in shared memory."""
    slot = NUMBERS_OF_SLOT * problem.compute_bytes
    slots = power_of_two_from(math.ceil(plan.group / WARP)) * (plan.block // plan.group) * (plan.group > WARP)
    mailboxes = (
        MAILBOXES * (plan.ctas_per_row * in_accesses(slot) + 2 * ACCESS_BYTES) * (plan.ctas_per_row > 1)
    )
    return 2 * slots * slot + mailboxes


def _most_stages(question: Question, plan: Plan) -> int:
    """Return how many rows are on their way in shared memory where it has room: copies are of whole accesses."""
    problem, numbers = question.problem, question.rules.column_sums
    whole = plan.vector * problem.load_bytes == ACCESS_BYTES and plan.unaligned != UNALIGNED_APART
    whole = whole and _told_bytes(problem, plan) <= STATIC_SHARED_BYTES
    return numbers.stages if whole and int(question.limits.compute_capability) >= AMPERE else 0


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
    """Return how many registers a thread wants: for sums, what all rows share, and where rows wait or come there."""
    elements = plan.vectors * plan.vector
    each = problem.column_sums * problem.compute_bytes + _loaded_bytes(problem)
    edges = plan.unaligned > 0
    if plan.stages:
        each -= min(_loaded_bytes(problem), problem.load_bytes + problem.staged_operand_bytes)
    if plan.waits or not plan.stages:
        each += problem.fields * problem.compute_bytes
    if plan.waits:
        beside = model.row_registers + elements // 2 + model.row_unaligned_registers * edges
        beside *= problem.compute_bytes // REGISTER_BYTES
    elif plan.stages:
        beside = model.staged_registers + plan.vector + model.staged_unaligned_registers * edges
    else:
        beside = model.registers + model.unaligned_registers * edges
    beside += model.cluster_registers * (plan.ctas_per_row > (MAX_CTAS // 2 if plan.waits else 1))
    return beside + elements * each // REGISTER_BYTES


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
    threads = at_once * plan.ctas_per_row * plan.block / numbers.multiprocessors
    worth = min(on_the_way, numbers.busy_bytes) * math.sqrt(min(1.0, filled)) * busy
    if plan.stages:
        worth *= math.sqrt(min(1.0, threads / numbers.busy_threads))
        worth *= 1.0 if plan.waits else numbers.converted_twice
    blocks = 0
    if plan.ctas_per_row > 1:  # while one block of a multiprocessor waits for its cluster another has work
        worth *= numbers.large_clusters if plan.ctas_per_row == MAX_CTAS else numbers.clusters
        blocks = plan.min_blocks if not plan.waits else 0
    # where few threads share a row, or the next row takes registers, vectors are costly
    more_vectors = plan.vectors if plan.stages or blocks else -plan.vectors
    return worth, blocks, -turns, more_vectors
