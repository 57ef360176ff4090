"""shared, cluster of rows whose elements lie apart, of which tiles come through a ring in shared memory: row_ring."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    MAX_CTAS,
    MEGABYTE,
    NOWHERE,
    ONE_BLOCK_PER_ROW,
    PLAIN,
    Plan,
)
from cupynorm.plan.partition import is_power_of_two
from cupynorm.plan.sections.tilings import RingTiling
from cupynorm.plan.variants.tiles import reduction_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.plan.problem import Problem

EITHER = 2  # RingTiling.parameters: with them or without
WHY = "rows whose elements lie apart: they wait in shared memory, and the next tiles are on their way there"


def ring(question: Question, variant: str | None) -> Plan | None:
    """Return the plan of rows that wait in a ring of shared memory; None where others are better.

    variant: "shared" asks for one block, "cluster" for several, whether it is better or not; None for the best.
    """
    problem = question.problem
    if not _can_be(problem) or question.max_ctas == 1:
        return None
    for tiling in (RingTiling(*numbers) for numbers in question.rules.rings.tilings):
        if problem.load_bytes != tiling.bytes or not (variant or _is_better(question, tiling)):
            continue
        for plan in _cut(question, tiling):
            if variant not in {None, plan.variant} or not (variant or _fills_the_device(question, plan)):
                continue
            found = finished(question, plan, WHY)
            if found is not None:
                return found
    return None


def _is_better(question: Question, tiling: RingTiling) -> bool:
    """Say whether rows were faster so, on a device whose memory is as wide."""
    problem, numbers = question.problem, question.rules.rings
    of_kind = tiling.parameters in {EITHER, len(problem.parameter_bytes) > 0}
    wide = question.limits.l2_bytes >= tiling.l2_megabytes * MEGABYTE
    return (
        of_kind
        and wide
        and tiling.first <= problem.cols <= tiling.last
        and problem.row_numbers <= numbers.row_numbers
    )


def _cut(question: Question, tiling: RingTiling) -> Iterator[Plan]:
    """Give plans of a tiling, the fewest blocks of a row first."""
    problem, lanes = question.problem, tiling.width // ACCESS_BYTES
    vector, down = ACCESS_BYTES // problem.load_bytes, tiling.block // lanes
    if problem.vector % vector or problem.across * problem.load_bytes < tiling.width:
        return
    for power in range(min(tiling.most_ctas, question.max_ctas).bit_length()):
        ctas = 1 << power
        each = math.ceil(math.ceil(problem.cols / ctas) / down)
        chunks = math.ceil(each / tiling.elements)
        if chunks > tiling.most_chunks:
            continue
        plan = replace(
            PLAIN,
            variant="cluster" if ctas > 1 else "shared",
            vector=vector,
            vectors=chunks * tiling.elements,
            group=down,
            rows_per_group=tiling.elements,
            block=tiling.block,
            across=lanes,
            ctas_per_row=ctas,
            min_blocks=tiling.blocks,
        )
        limits = question.limits
        room = limits.shared_bytes_per_sm // tiling.blocks - limits.reserved_shared_bytes
        room = min(room, limits.shared_bytes_per_block) - _bytes_beside(problem, plan)
        stages = min(
            room // _chunk_bytes(plan), chunks * question.rules.rings.tiles, question.rules.rings.stages
        )
        if stages > chunks:
            yield replace(plan, stages=stages)


def _fills_the_device(question: Question, plan: Plan) -> bool:
    """Say whether each group of blocks has enough tiles to go through."""
    groups = question.limits.sm_count * plan.min_blocks / plan.ctas_per_row
    return _tiles(question.problem, plan) >= question.rules.rings.fewest * groups


def finished(question: Question, plan: Plan, reason: str, waves: float = ONE_BLOCK_PER_ROW) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows.

    waves: of all blocks that run at once, how many are launched and go through tiles.
    """
    problem = question.problem
    if not (_can_be(problem) and _is_sound(problem, plan)):
        return None
    held = plan.stages * _chunk_bytes(plan)
    plan = replace(plan, row_shared_bytes=held, shared_bytes=held + _bytes_beside(problem, plan))
    return with_grid(question, plan, _tiles(problem, plan) * plan.ctas_per_row, reason, waves)


def _tiles(problem: Problem, plan: Plan) -> int:
    return math.ceil(problem.rows / (plan.across * plan.vector))


def _chunk_bytes(plan: Plan) -> int:
    return plan.rows_per_group * plan.block * ACCESS_BYTES


def _bytes_beside(problem: Problem, plan: Plan) -> int:
    """Return the bytes of reductions, and of what is stored with a column."""
    columns = plan.vectors * plan.group * len(problem.parameter_bytes) * problem.compute_bytes
    return _slots(plan) * problem.slot_bytes + columns


def _slots(plan: Plan) -> int:
    """Return how many Slots the reductions have room for (OwnedPlaces in row/owned_rows.cuh)."""
    return reduction_slots(plan, int(plan.ctas_per_row > 1))


def _can_be(problem: Problem) -> bool:
    """Say whether rows are plain ones, of which nothing but x is loaded and y stored, in elements of the same size."""
    beside = problem.load_operands or problem.epilogue_operands or problem.has_scales or problem.may_drop
    plain = (
        problem.across > 0
        and problem.stretches == (problem.load_bytes,)
        and not (beside or problem.rounds or problem.column_sums)
    )
    return plain and problem.fields == problem.outputs == 1 and problem.output_bytes == problem.load_bytes


def _is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan asks for nothing that the kernel would do wrong."""
    alone = plan.alignment_period == 1 and not (plan.unaligned or plan.full or plan.parameter_cache)
    alone = alone and plan.waits == NOWHERE and plan.rows_per_group > 0
    access = plan.vector * problem.load_bytes == ACCESS_BYTES and problem.vector % plan.vector == 0
    shape = (
        is_power_of_two(plan.across)
        and is_power_of_two(plan.block)
        and plan.block // plan.across == plan.group > 0
    )
    chunks = plan.vectors // plan.rows_per_group
    held = plan.vectors % plan.rows_per_group == 0 and plan.stages > chunks
    held = held and plan.vectors * plan.group * plan.ctas_per_row >= problem.cols
    clusters = (plan.ctas_per_row > 1) == (plan.variant == "cluster") and plan.ctas_per_row <= MAX_CTAS
    owned = plan.across * plan.vector % plan.ctas_per_row == 0  # as many rows by each block
    owned = owned and _slots(plan) > 0
    return alone and access and shape and held and clusters and owned
