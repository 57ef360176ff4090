"""Problem -> Plan: the first variant in turn that can hold a row, or the plan that was forced. Numbers only.

The order begins as that of OneFlow's articles on LayerNorm and softmax: a row waits in registers while it fits there,
else in shared memory unless the occupancy query says that no block fits, else nowhere. Where rows are long, several
blocks share one: those of a cluster, or of the whole grid.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import LocalBytes, Occupancy, Question, Variant, none_known
from cupynorm.plan.config import (
    ALIGNED,
    UNALIGNED_APART,
    VARIANTS,
    WARP,
    DoesNotFitError,
    Plan,
    check_plan,
)
from cupynorm.plan.rule_file import MEASURED
from cupynorm.plan.rules import rules_of
from cupynorm.plan.variants import cached, cluster, fused_cluster, grid, registers, staged, summed
from cupynorm.plan.variants.fused_cluster import with_smaller_vectors

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits
    from cupynorm.plan.problem import Problem
    from cupynorm.plan.rules import Rules

CANDIDATES: dict[str, Variant] = {
    "warp": registers.warp,
    "block": registers.block,
    "cached": cached.cached,
    "cluster": cluster.cluster,
    "split": grid.split,
    "shared": staged.shared,
    "uncached": staged.uncached,
}
ON_THE_CHIP = ("warp", "block", "cluster", "shared")  # of contiguous rows: where further rounds find them
CLUSTERS_IF_FUSED = {cluster.one_shot, cluster.cluster}
STREAMS = {staged.uncached, staged.streamed}
AT_VECTORS_IF_FUSED = {cached.cached, cached.late_exponential, *STREAMS}


def choose(
    problem: Problem,
    limits: Limits,
    occupancy: Occupancy,
    forced: str | Plan | None = None,
    *,
    cooperative: bool = True,
    local_bytes: LocalBytes = none_known,
    rules: Rules | None = None,
) -> Plan:
    """Return the plan for `problem`: the first variant in turn that can hold a row, or what is `forced`.

    `forced` names a variant, or is a Plan, of which the template arguments and the block are kept, and the waves as a
    bound. cooperative: whether its blocks may have to run all at once. local_bytes: asks the compiled kernel whether
    registers are spilled, which a plan that is not forced avoids. rules: others than those of the device's
    architecture, but for where unaligned rows are worth 16-byte vectors, which is the same for all. Raises
    DoesNotFitError, a ValueError, if `forced` is unknown or cannot hold the row so, TypeError if it is no plan.
    """
    check_plan(forced)
    asked_for = isinstance(forced, Plan)  # it is launched as it was found to be best, spills or not
    question = Question(
        problem,
        limits,
        rules or rules_of(limits.compute_capability),
        occupancy,
        none_known if asked_for else local_bytes,
    )
    if problem.across and not isinstance(forced, Plan):
        return _across(question, forced, cooperative=cooperative)
    name = forced.variant if isinstance(forced, Plan) else forced
    if problem.rounds and not problem.across and name is not None and name not in ON_THE_CHIP:
        raise DoesNotFitError(
            _does_not_fit(question, f"variant {name!r}, which keeps no row for further rounds,")
        )
    if isinstance(forced, Plan):
        plan = _forced(question, forced)
        if plan.cooperative and not cooperative:
            raise DoesNotFitError(f"the blocks of {forced} must all run at once")
        return plan
    for variant in in_order(question) if forced is None else (_named(problem, forced),):
        # doubles in clusters have no registers for head and tail elements
        doubles = problem.doubles and variant in CLUSTERS_IF_FUSED
        asked = effective_question(
            question,
            vectors_only=doubles
            or (variant in AT_VECTORS_IF_FUSED and not (problem.only_reads and variant in STREAMS))
            or _needs_equal_alignment(question, variant),
            smaller_vectors=variant is not fused_cluster.prefetched,
        )
        found = variant(asked)
        if found is not None and found.cooperative and not cooperative:
            found = _without_scheduler(asked, found)
        if found is not None:
            return found
    raise DoesNotFitError(_does_not_fit(question, f"variant {forced!r}"))


def _across(question: Question, name: str | None, *, cooperative: bool) -> Plan:
    """Return the plan of rows whose elements lie apart from one another. name: of a variant, where one is forced."""
    from cupynorm.plan.variants import across  # noqa: PLC0415  of no use to rows along the last axis

    if name is not None and name not in VARIANTS:
        raise DoesNotFitError(f"plan {name!r} is not a variant: use {', '.join(VARIANTS)}")
    may = (*across.VARIANTS_ACROSS, *(("shared",) if question.problem.stretches else ()))
    if name is not None and name not in may:
        raise DoesNotFitError(
            f"variant {name!r} needs rows whose elements lie next to one another: use {', '.join(may)}"
        )
    if question.problem.column_sums:
        found = across.summed(question, name, cooperative=cooperative)
    else:
        found = across.across(question, name, cooperative=cooperative)
    if found is None:
        raise DoesNotFitError(_does_not_fit(question, f"variant {name!r}"))
    return found


def _without_scheduler(question: Question, plan: Plan) -> Plan | None:
    if question.problem.fused and plan.variant == "cluster":
        return cluster.one_shot(with_smaller_vectors(question))
    return cluster.without_scheduler(question, plan)


def _named(problem: Problem, name: str) -> Variant:
    if name not in VARIANTS:
        raise DoesNotFitError(f"plan {name!r} is not a variant: use {', '.join(VARIANTS)}")
    return functools.partial(summed.summed, variant=name) if problem.column_sums else CANDIDATES[name]


def _forced(question: Question, forced: Plan) -> Plan:
    from cupynorm.plan import forced as forced_plans  # noqa: PLC0415  of no use to a plan that is chosen

    forced_plans.check_numbers(question.problem, question.limits, forced)
    anywhere = ("cluster", "shared", *(("uncached",) if question.problem.only_reads else ()))
    at_vectors = forced.variant in ("cached", "uncached") and forced.variant not in anywhere
    at_vectors = at_vectors or (forced.variant in anywhere and not forced.unaligned)
    asked = _at_vectors(question, vectors_only=at_vectors)
    plan = forced_plans.finished(
        asked, replace(forced, shared_bytes=0, rule="")
    )  # what follows from the rest, and what decided where the plan was chosen
    if plan is None:
        raise DoesNotFitError(_does_not_fit(question, f"{forced}"))
    return plan


def _needs_equal_alignment(question: Question, variant: Variant) -> bool:
    """Say whether x is aligned otherwise than y, which the variant has no 16-byte vectors for."""
    return variant is staged.shared and question.problem.unaligned == UNALIGNED_APART


def _does_not_fit(question: Question, what: str) -> str:
    problem = question.problem
    return (
        f"{what} cannot hold a row of {problem.cols} columns, {problem.load_bytes} bytes each, "
        f"in vectors of {problem.vector}, on {question.limits.name}"
    )


# ---- the problem as a variant works on it


def effective(problem: Problem) -> Problem:
    """Return the problem as it is worked on: unaligned rows in the widest vectors where head and tail are worth it.

    How a call is written in C++ depends on this, before its device is known: the same rules hold for every device.
    """
    if not problem.unaligned:
        return problem
    rules = rules_of(MEASURED)
    bytes_of_row = problem.cols * problem.load_bytes
    fused = "unaligned, sums" if problem.column_sums else "unaligned, fused"
    what, kind = (fused, None) if problem.fused else ("unaligned", problem.kind)
    found = rules.crossover(what, kind, problem.vector_bytes) or rules.crossover(what, None)
    short = None if problem.fused else rules.crossover("unaligned short", problem.kind)
    known = problem.alignment_period > 0
    worth = known and short is not None and problem.rows >= short.min_rows
    worth = worth and short is not None and short.least <= bytes_of_row <= short.most
    if worth or (found is not None and bytes_of_row >= found.least):
        return replace(problem, vector=problem.widest_vector)
    return replace(problem, unaligned=ALIGNED)


def _at_vectors(question: Question, *, vectors_only: bool) -> Question:
    """Return the question about the effective problem. vectors_only: fused rows begin at vectors."""
    problem = question.problem
    if problem.fused and vectors_only:
        return question._replace(problem=replace(problem, unaligned=ALIGNED))
    return question._replace(problem=effective(problem))


def effective_question(
    question: Question, *, vectors_only: bool = False, smaller_vectors: bool = True
) -> Question:
    """Return the question as a variant is asked. smaller_vectors: as by with_smaller_vectors()."""
    asked = _at_vectors(question, vectors_only=vectors_only)
    return with_smaller_vectors(asked) if smaller_vectors else asked


# ---- the order of variants


def in_order(question: Question) -> tuple[Variant, ...]:
    """Return what to try, best first."""
    if question.problem.rounds:
        return _for_rounds(question)
    asked, problem = effective_question(question), question.problem
    if problem.column_sums:
        return (summed.summed,)
    if problem.fused:
        bytes_a_thread = registers.thread_bytes(asked, registers.register_rule(asked))
        fits_warp = registers.group_of(asked, bytes_a_thread) <= WARP
        one_warp = (registers.warp,) if fits_warp else ()
        clusters: tuple[Variant, ...] = (cluster.one_shot,) if question.small_batch else ()
        if question.small_batch and cluster.prefers_streamed(asked):
            clusters = (cluster.streamed, *clusters)
        if not question.small_batch and fused_cluster.prefers_clusters(asked):
            clusters = (fused_cluster.prefetched,)
        if not question.small_batch and cluster.prefers_copied(asked):
            clusters = (cluster.copied, *clusters)
        if not question.small_batch and staged.prefers_shared(asked):
            clusters = (staged.shared, *clusters)
        if question.small_batch and problem.room and cluster.prefers_copied(asked):
            clusters = (cluster.copied_unprefetched, *clusters)
        rest: tuple[Variant, ...] = (
            registers.block,
            fused_cluster.prefetched,
            cluster.copied_unprefetched,
            cluster.one_shot,
        )
        # few rows that no cluster holds
        last = (grid.split_for_more_threads, staged.uncached) if question.small_batch else (staged.uncached,)
        if not question.small_batch and staged.prefers_stream(asked):
            rest = (staged.streamed, *rest)
            clusters = ()
        if not question.small_batch and cached.prefers_late_exponential(asked):
            rest = (cached.late_exponential, *rest)
        return (*one_warp, *clusters, *rest, *last)
    if question.small_batch:
        return (
            *_for_small_batch(question),
            cached.best_cached,
            registers.block,
            staged.shared,
            staged.uncached,
        )
    # a warp holds more than what is best for it: from there on a block is better
    fixed = registers.fixed_rule(asked)
    group = fixed[1] if fixed is not None else registers.group_of(asked, registers.warp_thread_bytes(asked))
    one_block = (registers.warp if group <= WARP else cached.best_cached, registers.block)
    if cluster.prefers_cluster(asked):
        return (cluster.by_rule, *one_block, staged.shared, grid.split, staged.uncached)
    return (*one_block, cluster.by_rule, staged.shared, grid.split, staged.uncached)


def _for_rounds(question: Question) -> tuple[Variant, ...]:
    """Return where a row can wait for further rounds: in registers of as few threads as hold it, if they can be few."""
    asked = effective_question(question)
    group = registers.group_of(asked, registers.warp_thread_bytes(asked))
    if question.small_batch:
        return (cluster.one_shot, registers.block, staged.shared)
    one_block = (*((registers.warp,) if group <= WARP else ()), registers.block)
    if group <= question.rules.rounds.max_block:
        return (*one_block, fused_cluster.prefetched, cluster.one_shot, staged.shared)
    return (fused_cluster.prefetched, cluster.one_shot, staged.shared, registers.block)


def _for_small_batch(question: Question) -> tuple[Variant, ...]:
    """Return how several blocks share a row where there are fewer rows than multiprocessors."""
    problem, numbers = question.problem, question.rules.small_batch
    longest = numbers.cluster_bytes_of_one_row if problem.rows == 1 else numbers.cluster_bytes
    if problem.row_bytes <= longest:
        return (cluster.small_batch, grid.split)
    return (grid.split, cluster.small_batch, cluster.by_rule)
