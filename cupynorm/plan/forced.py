"""Plans that somebody made: launched as they are, or refused with the reason where a kernel would go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    ALIGNED,
    AT_USE,
    BOTH,
    BOUNDS,
    CONVERTED,
    CONVERTED_ELEMENTS,
    CUT,
    IN_REGISTERS,
    LINE_BYTES,
    MAX_CTAS,
    MAX_FUSED_THREAD_BYTES,
    MAX_ROWS_SIDE_BY_SIDE,
    MAX_THREAD_BYTES,
    ONE_BLOCK_PER_ROW,
    PER_ROW,
    UNALIGNED,
    UNALIGNED_APART,
    VARIANTS,
    WARP,
    DoesNotFitError,
    Plan,
)
from cupynorm.plan.partition import (
    alignment_period,
    blocks_of,
    in_registers,
    is_power_of_two,
    most_elements,
    shared_bytes,
    threads_with_vectors,
)
from cupynorm.plan.variants import across, cached, grid, ring, staged, stretch, summed, tiled, tiles
from cupynorm.plan.variants.fused_cluster import has_static_room
from cupynorm.plan.variants.registers import may_persist

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits
    from cupynorm.plan.problem import Problem

FORCED = "asked for"


def check_numbers(problem: Problem, limits: Limits, plan: Plan) -> None:
    """Raise DoesNotFitError, naming the field, for a plan that no problem of these types can have."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(plan, name)
        if not least <= value <= most:
            raise DoesNotFitError(f"plan: {name} is {value}, {least} to {most} is allowed")
    if plan.variant not in VARIANTS:
        raise DoesNotFitError(f"plan: variant is {plan.variant!r}: use {', '.join(VARIANTS)}")
    if not plan.waves >= 0:
        raise DoesNotFitError(f"plan: waves is {plan.waves}, 0 or more is allowed")
    if not is_power_of_two(plan.vector):
        raise DoesNotFitError(f"plan: vector is {plan.vector}, a power of two is allowed")
    if plan.block % WARP:
        raise DoesNotFitError(f"plan: block is {plan.block}, a multiple of {WARP} is allowed")
    most = (MAX_FUSED_THREAD_BYTES if problem.fused else MAX_THREAD_BYTES) // problem.value_bytes
    if plan.across and plan.waits:
        most = max(most, tiles.most_numbers(problem))
    rows = plan.rows_per_group
    # row_together holds vectors of one row while it reduces, and one vector of each row while it writes
    held = max(plan.vectors, rows) if plan.kernel == "row_together" else plan.vectors * rows
    held = rows if plan.kernel == "row_ring" else held  # of what waits in shared memory a chunk at a time
    if plan.vector * held > most:
        where = " where something is fused" if problem.fused else ""
        raise DoesNotFitError(
            f"plan: vector x vectors x rows_per_group is {plan.vector} x {plan.vectors} x {rows}, "
            f"{most} elements of a thread are allowed{where}"
        )
    most = most_elements(problem)
    if (
        problem.column_sums and plan.stages and not plan.waits
    ):  # rows wait in shared memory, and sums alone in registers
        most *= problem.fields
    if problem.fused and plan.group and not plan.across and plan.vector * plan.vectors > most:
        raise DoesNotFitError(
            f"plan: vector x vectors is {plan.vector} x {plan.vectors}, {most} elements of a thread are allowed "
            "where something is fused"
        )
    if plan.block * plan.min_blocks > limits.threads_per_sm:
        raise DoesNotFitError(
            f"plan: block x min_blocks is {plan.block} x {plan.min_blocks}, "
            f"{limits.threads_per_sm} threads of a multiprocessor are allowed on {limits.name}"
        )


def finished(question: Question, forced: Plan) -> Plan | None:
    """Return a plan for the effective problem with its launch; None where the kernel cannot hold such rows."""
    problem = question.problem
    if problem.across or forced.across:
        if forced.kernel == "row_ring":
            return ring.finished(question, forced, FORCED, forced.waves or ONE_BLOCK_PER_ROW)
        if forced.kernel == "row_stretch":
            return stretch.finished(question, forced, FORCED)
        both = problem.across > 0 and forced.across > 0
        return (
            across.finished(question, forced, FORCED) if both and across.is_sound(problem, forced) else None
        )
    if forced.kernel == "row_tiled":
        return tiled.finished(question, forced, FORCED)
    fits = (
        problem.vector % forced.vector == 0
        and (forced.vector == problem.vector or not problem.unaligned)
        and forced.unaligned == problem.unaligned
        and forced.alignment_period == alignment_period(problem, forced.rows_per_group)
        and (forced.kernel == "row_registers" or not problem.column_sums)
        and _is_sound(problem, question.limits, forced)
    )
    return _FINISHED[forced.kernel](question, forced) if fits else None


def _finished_in_registers(question: Question, forced: Plan) -> Plan | None:
    problem = question.problem
    plan = in_registers(problem, forced)
    fits = (
        forced.block % forced.group == 0
        and forced.alignment_period > 0  # of a group of several rows it must be known
        and plan.vectors == forced.vectors
        and (not forced.stages or forced.vector * problem.load_bytes == ACCESS_BYTES)
        and plan.shared_bytes <= question.limits.shared_bytes_per_block
        and (
            not forced.waits
            or (problem.column_sums > 0 and forced.stages > 0 and forced.waits in (IN_REGISTERS, CUT))
        )
        and (forced.waits != CUT or summed.has_room_to_cut(problem, forced))
    )
    waves = forced.waves or ONE_BLOCK_PER_ROW
    if problem.column_sums:
        return summed.finished(question, plan, FORCED) if fits else None
    return with_grid(question, plan, blocks_of(problem, plan), FORCED, waves) if fits else None


def _finished_by_whole_blocks(question: Question, forced: Plan) -> Plan | None:
    if forced.variant == "split":
        return grid.finished_in_shared_memory(question, forced, FORCED)
    if forced.variant == "shared" and shared_bytes(question.problem) > forced.row_shared_bytes:
        return None
    return staged.finished(question, forced, FORCED)


_FINISHED: dict[str, Callable[[Question, Plan], Plan | None]] = {
    "row_registers": _finished_in_registers,
    "row_spread": lambda question, forced: grid.finished_one_row(question, forced, FORCED),
    "row_together": lambda question, forced: grid.finished_side_by_side(question, forced, FORCED),
    "row_reread": lambda question, forced: grid.finished_reread(question, forced, FORCED),
    "row_computed": lambda question, forced: staged.finished_computed(question, forced, FORCED),
    "row_cached": lambda question, forced: cached.finished(question, forced, FORCED),
    "row_staged": _finished_by_whole_blocks,
}


# ---- what kernels ask for


def _is_sound(problem: Problem, limits: Limits, plan: Plan) -> bool:
    """Say whether a plan asks for nothing that its kernel would do wrong."""
    return (
        _shares_rows_soundly(plan)
        and _keeps_rows_soundly(problem, limits, plan)
        and _caches_parameters_soundly(problem, plan)
        and (not plan.persistent or may_persist(problem, plan))
    )


def _shares_rows_soundly(plan: Plan) -> bool:
    """Say whether so many threads and blocks can share a row."""
    if plan.variant == "cluster":
        fits = 1 < plan.ctas_per_row <= MAX_CTAS and is_power_of_two(plan.ctas_per_row)
        fits = fits and plan.rows_per_group == 1 and plan.group in (0, plan.block)
    elif plan.variant == "split":
        fits = plan.group in (0, plan.block) and plan.rows_per_group <= MAX_ROWS_SIDE_BY_SIDE
        fits = fits and (plan.kernel == "row_staged" or is_power_of_two(plan.block))
    else:
        fits = plan.ctas_per_row == 1 and (plan.group > 0) == (plan.variant in ("warp", "block"))
    # warps meet in slots, of which there may be more; lanes only in powers of two
    fits = fits and (plan.group % WARP == 0 or WARP % plan.group == 0)
    # blocks that share a row meet among their warps in between
    return fits and (plan.block > WARP or plan.variant not in {"cluster", "split"})


def _keeps_rows_soundly(problem: Problem, limits: Limits, plan: Plan) -> bool:
    """Say whether shared memory that a row waits in is asked for where the kernel has it, and in whole accesses."""
    fits = (
        plan.row_shared_bytes % ACCESS_BYTES == 0 and plan.row_shared_bytes <= limits.shared_bytes_per_block
    )
    may = plan.group == 0 and plan.variant not in ("cached", "uncached") and plan.unaligned != UNALIGNED_APART
    fits = fits and (plan.row_shared_bytes == 0 or may)
    if problem.fused:
        copied = problem.copies_rows and (plan.variant != "split" or problem.room)
        fits = fits and (plan.row_shared_bytes == 0 or copied)
        fits = fits and (plan.variant != "split" or plan.kernel in ("row_reread", "row_staged"))
        # a scale of each row is stored beside its bytes: blocks that read a row twice do not tell one another its
        # largest
        fits = fits and not (problem.has_scales and plan.variant == "cluster" and plan.group == 0)
        fits = fits and has_static_room(problem, plan)
    staged_row = plan.kernel == "row_staged" and plan.variant in ("shared", "cluster", "uncached")
    return fits and (
        not staged_row or plan.block == threads_with_vectors(problem, plan.ctas_per_row, plan.block)
    )


def _caches_parameters_soundly(problem: Problem, plan: Plan) -> bool:
    """Say whether the kernel has such a parameter cache and such stages for such rows."""
    # clusters of unaligned rows have a dynamic scheduler with converted parameters alone, also where there are none
    has_any = bool(problem.parameter_bytes) or (problem.fused and plan.parameter_cache == CONVERTED)
    fits = plan.parameter_cache == AT_USE or (has_any and plan.group > 0)
    # only what is in registers has rows on their way
    fits = fits and (plan.stages == 0 or plan.kernel == "row_registers") and _holds_edges(plan)
    alone = plan.ctas_per_row == 1 and plan.stages == 0
    may_convert = (plan.dynamic and plan.unaligned == UNALIGNED) or (alone and not problem.fused)
    fits = fits and (plan.parameter_cache != BOTH or (plan.kernel == "row_registers" and not plan.unaligned))
    return fits and (plan.parameter_cache != CONVERTED or may_convert)


def _holds_edges(plan: Plan) -> bool:
    """Say whether the first threads of a row in registers hold what is around its vectors: as registers.cuh asserts."""
    if plan.kernel != "row_registers" or plan.unaligned == ALIGNED:
        return plan.ctas_per_row == 1 or plan.kernel != "row_registers" or plan.block > WARP
    by_lines = plan.parameter_cache == CONVERTED and plan.ctas_per_row > 1
    first = LINE_BYTES // ACCESS_BYTES * plan.vector if by_lines else plan.vector
    holds = plan.group >= max(2 * plan.vector - 2, first - 1)
    holds = holds and plan.group * plan.vector % CONVERTED_ELEMENTS == 0
    per_row = plan.parameter_cache in (AT_USE, PER_ROW, CONVERTED)
    same_alignment = plan.rows_per_group == 1 or (plan.stages == 0 and per_row)
    return holds and same_alignment and (plan.unaligned == UNALIGNED or plan.stages == 0)
