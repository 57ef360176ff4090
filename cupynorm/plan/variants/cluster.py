"""cluster: the blocks of a cluster share a row, in their registers or in their shared memory."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, blocks_at_once, grid_unit, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AT_USE,
    CONVERTED,
    HALF_BYTES,
    SHARED,
    UNALIGNED,
    UNALIGNED_APART,
    WARP,
    Plan,
)
from cupynorm.plan.limits import STATIC_SHARED_BYTES, active_blocks
from cupynorm.plan.partition import (
    blocks_of,
    by_whole_blocks,
    in_registers,
    line_vectors,
    power_of_two_from,
    power_of_two_to,
    shared_bytes,
    threads_with_vectors,
    words,
)
from cupynorm.plan.registers import registers
from cupynorm.plan.rule_types import ClusterRule, SharedRule, TilingRule
from cupynorm.plan.variants import staged
from cupynorm.plan.variants.fused_cluster import prefetched, with_smaller_vectors
from cupynorm.plan.variants.registers import can_cache, loaded_with, may_persist

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem

ONE_SHOT = "the fewest blocks of a cluster whose registers hold the row and what is loaded with it"
AT_ONCE = "few rows in registers of clusters: as many blocks as run at once, or the fewest that hold the rows"
STREAMED = "few rows that are only read are streams of the blocks of a cluster, of which nothing waits"
SMALL_BATCH = "fewer rows than multiprocessors: a cluster of many blocks for each row"


def cluster(question: Question) -> Plan | None:
    """Return the plan of two blocks or more for each row, however short it is."""
    if question.problem.fused:
        plan = None if question.small_batch else prefetched(question)
        return plan or one_shot(with_smaller_vectors(question))
    plan = small_batch(question) if question.small_batch else None
    return plan or by_rule(question, 2)


def by_rule(question: Question, least: int = 1) -> Plan | None:
    """Return the plan of the first rule that can hold a row, by `least` blocks or more."""
    for rule in question.rules.cluster_rules[question.problem.kind]:
        if question.problem.row_bytes > rule.row_bytes:
            continue
        if isinstance(rule, SharedRule):
            plan = in_shared_memory(question, rule, least)
        elif isinstance(rule, TilingRule):
            plan = _by_tiling_rule(question, rule)
        else:
            plan = _by_register_rule(question, rule, least)
        if plan is not None:
            return plan
    return None


def copied(question: Question) -> Plan | None:
    """Return the plan of fused rows that lie in a cluster's shared memory as they were loaded, as those of an op alone.

    By the rules that hold for aligned rows, too: one for unaligned ones alone was worse (docs/notes/062).
    """
    for rule in question.rules.cluster_rules[question.problem.kind]:
        if isinstance(rule, SharedRule) and rule.aligned and question.problem.row_bytes <= rule.row_bytes:
            plan = in_shared_memory(question, rule, 2)
            if plan is not None:
                return plan
    return None


def prefers_copied(question: Question) -> bool:
    """Say whether fused rows, of which x alone is loaded, are better copied to shared memory than held in registers."""
    problem = question.problem
    what = "copied" + (", unaligned" if problem.unaligned else "")
    return problem.copies_rows and question.rules.is_better(what, problem)


def copied_unprefetched(question: Question) -> Plan | None:
    """Return the same plan for rows that no cluster would prefetch: their vectors are short, or they are few.

    Of few rows several waves of clusters must come: the blocks of the whole grid share them otherwise.
    """
    problem, limits = question.problem, question.limits
    if not (problem.room and problem.copies_rows and (question.small_batch or not question.can_stage)):
        return None
    plan = copied(question)
    if plan is None or not question.small_batch:
        return plan
    least = question.rules.clusters.few_copied_blocks * limits.sm_count
    return plan if problem.rows * plan.ctas_per_row >= least else None


# ---- rows in registers


def _by_register_rule(question: Question, rule: ClusterRule, least: int) -> Plan | None:
    problem = question.problem
    if not least <= rule.ctas <= question.max_ctas or problem.row_bytes <= rule.above:
        return None
    if rule.unaligned not in {None, problem.unaligned > 0}:
        return None
    if not question.can_stage if rule.stages else problem.wide_parameters:
        return None
    return _launched(question, in_cluster_registers(question, rule), rule)


def _launched(question: Question, plan: Plan | None, rule: ClusterRule | TilingRule) -> Plan | None:
    """Return a plan of rows in registers with its launch; None where too few blocks would have rows."""
    problem = question.problem
    plan = plan and with_grid(question, plan, blocks_of(problem, plan), rule)
    if plan is None or not plan.persistent:
        return plan
    # however many rows there are: a block goes through rows of one alignment, which may leave too many blocks without
    # any
    most = blocks_at_once(question.limits, plan)
    unit = grid_unit(problem, plan)
    return plan if most // unit * unit > question.rules.clusters.least_waves * most else None


def _by_tiling_rule(question: Question, rule: TilingRule) -> Plan | None:
    """Return the plan of the tiling of the most worth, of those that can be launched."""
    if rule.unaligned not in {None, question.problem.unaligned > 0} or not question.can_stage:
        return None
    tried = (_launched(question, plan, rule) for plan in tilings(question, rule))
    return next(filter(None, tried), None)


def tilings(question: Question, rule: TilingRule) -> list[Plan]:
    """Return a plan for each number of blocks of a cluster and of a thread's vectors; the best first.

    Of as good ones that of fewer vectors comes first, and that with a second row on its way, which is tried only where
    a multiprocessor has one block, whose next row would else be waited for.
    """
    powers = range(1, len(rule.worths) + 1)
    ctas = [1 << power for power in powers if 1 << power <= question.max_ctas]
    every = itertools.product(ctas, range(rule.least_vectors, rule.vectors + 1), (2, 1))
    exact = (ClusterRule(rule.id, rule.row_bytes, *each, unaligned=None, fewer=0) for each in every)
    found = filter(None, (in_cluster_registers(question, each) for each in exact))
    held = (plan for plan in found if plan.vectors >= rule.least_vectors)
    tried = [plan for plan in held if plan.stages == 1 or plan.min_blocks == 1]
    return sorted(tried, key=lambda plan: _worth(question.problem, plan, rule), reverse=True)


def _worth(problem: Problem, plan: Plan, rule: TilingRule) -> float:
    """Return how good a tiling is: by the bytes of rows in work on a multiprocessor, and by its threads and blocks.

    Places of threads that are empty count less: others have the issue slots then (docs/notes/081).
    """
    ctas = plan.ctas_per_row
    memory = min(plan.min_blocks / ctas * problem.row_bytes, rule.busy_bytes)
    each = line_vectors(problem, ctas)[1] if problem.unaligned else math.ceil(problem.vectors / ctas)
    filled = math.pow(each / (plan.block * plan.vectors), rule.filled)
    threads = min(plan.min_blocks * plan.block, rule.busy_threads)
    blocks = math.sqrt(min(plan.min_blocks, rule.busy_blocks))
    return rule.worths[ctas.bit_length() - 2] * memory * filled * threads * blocks


def in_cluster_registers(question: Question, rule: ClusterRule) -> Plan | None:
    """Return the plan that leaves the fewest places of threads empty; of as many, that of the fewest threads."""
    problem = question.problem
    share = math.ceil(problem.vectors / rule.ctas)
    best, fewest = None, math.inf
    least = rule.vectors - rule.fewer
    cache = AT_USE
    if problem.parameter_bytes and rule.stages:
        cache = CONVERTED if problem.unaligned and rule.ctas > 1 else SHARED
    # one less than `fewer` says, if of a thread's vectors more than the last would be missing else
    for vectors in range(rule.vectors, max(0, least - 1 - bool(rule.unaligned)), -1):
        if vectors < least and best is not None:
            break
        block = max(2, math.ceil(share / vectors / WARP)) * WARP
        if block > question.rules.clusters.max_block:
            continue
        plan = by_whole_blocks(problem, rule.ctas, block, rule.stages, cache)
        resident = _resident(question, plan) if not rule.stages or may_persist(problem, plan) else 0
        if resident and plan.vectors <= rule.vectors and plan.vectors * block < fewest:
            best, fewest = replace(plan, min_blocks=resident), plan.vectors * block
    return best


def _resident(question: Question, plan: Plan) -> int:
    """Return how many blocks of a cluster a multiprocessor holds; 0 if a thread would have too few registers."""
    problem, limits, model = question.problem, question.limits, question.rules.registers
    values = words(problem, plan.vectors * plan.vector, cached=False)
    measured, converted = question.measured, plan.parameter_cache == CONVERTED
    few = measured and problem.element_bytes == HALF_BYTES and bool(problem.parameter_bytes)
    needed = values + (model.cluster_rows_few if few else model.cluster_rows)
    needed += model.mixed_types * (not problem.same_types)
    needed += model.step * (plan.dynamic and values > model.cluster_large)
    if not converted or not measured:
        needed += model.step * (problem.unaligned > 0)
        needed += model.cluster_small_more * (values <= model.cluster_small and not few)
    if not measured or problem.doubles:
        needed += model.cluster + model.step * problem.doubles
    if plan.shared_bytes > limits.shared_bytes_per_block:
        return 0
    return active_blocks(limits, plan.block, needed, plan.shared_bytes + STATIC_SHARED_BYTES)


def one_shot(question: Question) -> Plan | None:
    """Return the fewest blocks whose registers hold a row and what is loaded with it; many where rows are few."""
    numbers, compute = question.rules.clusters, question.problem.compute_bytes
    most = numbers.one_shot_block[compute]
    block = numbers.small_batch_block[compute] if question.small_batch else most
    # larger blocks hold more; where so many threads have too few registers for one vector of each, smaller ones do
    larger = [each for each in (2 * block,) if each <= most]
    smaller = [block >> halved for halved in range(1, block.bit_length()) if block >> halved >= WARP]
    tried = (_one_shot(question, each) for each in (block, *larger, *smaller))
    return next(filter(None, tried), None)


def _one_shot(question: Question, block: int) -> Plan | None:
    problem, limits, rules = question.problem, question.limits, question.rules
    numbers = rules.clusters
    most = rules.tile.max_elements[problem.compute_bytes] // max(problem.fields, loaded_with(problem))
    ctas, blocks = numbers.one_shot_ctas, numbers.one_shot_blocks
    if question.small_batch:
        blocks = numbers.small_batch_blocks
        at_once = blocks * limits.sm_count // problem.rows
        # half of what a thread may have, or a vector while there are multiprocessors without a block
        roomy = max(problem.cols // (block * most // 2), limits.sm_count // problem.rows)
        roomy = min(roomy, problem.vectors // block)
        ctas = power_of_two_to(max(ctas, min(question.max_ctas, at_once, roomy)))
    while 1 < ctas <= question.max_ctas:
        plan = by_whole_blocks(problem, ctas, block)
        elements = plan.vectors * plan.vector
        if elements <= max(most, problem.vector):
            needed = rules.registers.cluster + registers(question, elements, full=plan.full, cached=False)
            if needed * block <= limits.registers_per_sm:
                fewest = needed
                if question.small_batch:  # so that blocks of all rows run at once: as few as simple ops take
                    fewest = elements * problem.fields + rules.registers.small_batch_fused
                room = min(limits.registers_per_sm // fewest, limits.threads_per_sm)
                resident = max(1, min(blocks, room // block))
                plan = replace(plan, min_blocks=resident)
                reason = AT_ONCE if question.small_batch else ONE_SHOT
                return with_grid(question, plan, blocks_of(problem, plan), reason)
        ctas *= 2
    return None


def streamed(question: Question) -> Plan | None:
    """Return the plan of few long rows that are only read, a chunk at a time: nothing waits."""
    numbers = question.rules.clusters
    ctas, block = numbers.few_read_ctas, numbers.few_read_block
    if ctas > question.max_ctas:
        return None
    plan = staged.chunked(question, "cluster", block, 0)
    vectors, blocks = staged.stream_vectors(question), staged.stream_blocks(question, block)
    plan = replace(plan, vectors=vectors, ctas_per_row=ctas, min_blocks=blocks)
    return staged.finished(question, plan, STREAMED)


def prefers_streamed(question: Question) -> bool:
    """Say whether few rows that are only read are enough for clusters of few blocks that stream them."""
    problem, numbers = question.problem, question.rules.clusters
    if not staged.may_stream(problem):
        return False
    chunk = numbers.few_read_ctas * numbers.few_read_block * staged.stream_vectors(question)
    # of chunks that are not whole, some loads would be waited for one by one
    whole = problem.vectors % chunk == 0 and not problem.unaligned
    enough = problem.rows >= numbers.few_read_rows * question.limits.sm_count
    return whole and enough and question.rules.is_better("streamed, few", problem)


# ---- rows in shared memory


def in_shared_memory(question: Question, rule: SharedRule, least: int) -> Plan | None:
    """Return the plan of `least` blocks at least whose shares of a row fill a multiprocessor's shared memory."""
    problem, limits, numbers = question.problem, question.limits, question.rules.clusters
    if not (rule.aligned or problem.unaligned) or question.max_ctas == 1:
        return None
    if problem.unaligned == UNALIGNED_APART:
        return None
    ctas = max(least, power_of_two_from(math.ceil(problem.row_bytes / rule.part_bytes)))
    if ctas > question.max_ctas:
        return None
    beside = limits.reserved_shared_bytes + STATIC_SHARED_BYTES
    share = shared_bytes(problem, ctas) + beside
    resident = min(limits.shared_bytes_per_sm // share, numbers.max_shared_blocks)
    if not resident:
        return None
    # as much as there is room for: one kernel for many widths
    row_shared_bytes = min(limits.shared_bytes_per_sm // resident - beside, limits.shared_bytes_per_block)
    row_shared_bytes = row_shared_bytes // ACCESS_BYTES * ACCESS_BYTES
    waits = ctas > 1 and bool(problem.parameter_bytes)
    threads = min(rule.threads, limits.threads_per_sm)
    if waits or not question.measured:
        few = waits and (not question.measured or problem.wide_parameters)
        staged_numbers = question.rules.staged
        threads = min(threads, staged_numbers.few_threads if few else staged_numbers.roomy_threads)
    block = threads_with_vectors(problem, ctas, max(2, threads // resident // WARP) * WARP)
    if not question.measured:
        resident = max(1, resident - 1)
    variant, block = "cluster" if ctas > 1 else "shared", min(block, numbers.max_shared_block)
    plan = staged.chunked(question, variant, block, row_shared_bytes, vectors=rule.vectors)
    plan = replace(plan, ctas_per_row=ctas, min_blocks=resident)
    return staged.finished(question, plan, rule)


# ---- small batches: fewer rows than multiprocessors


def small_batch(question: Question) -> Plan | None:
    """Return a plan where as many multiprocessors as can be work on a row, and each row has a cluster of its own."""
    problem, limits, numbers = question.problem, question.limits, question.rules.small_batch
    most = question.max_ctas
    if most == 1 or problem.doubles:
        return None
    share = math.ceil(problem.cols / most)
    # without parameters, and with few elements for each thread, more blocks work side by side
    least, large = numbers.min_block * numbers.elements, numbers.block * numbers.elements
    roomy = least < share <= large and not problem.parameter_bytes and not problem.unaligned
    crowded_rows = numbers.crowded_roomy_rows if roomy else numbers.crowded_rows
    crowded = problem.rows * most > crowded_rows * limits.sm_count
    if problem.unaligned:
        few = min(most, numbers.unaligned_ctas[problem.kind[0]])  # parameters are read again for each row
        plan = _small(question, few if crowded else most)
    else:
        plan = None if crowded else _small(question, most)
        blocks = plan.min_blocks * limits.sm_count if plan else 0
        part, whole = numbers.filled_roomy if roomy else numbers.filled
        if plan is None or blocks * part // whole // plan.ctas_per_row < problem.rows:
            plan = _crowded(question) or plan
    return plan and with_grid(question, plan, blocks_of(problem, plan), SMALL_BATCH)


def _small(question: Question, ctas: int) -> Plan | None:
    """Return the plan of few bytes a thread."""
    problem, limits, rules = question.problem, question.limits, question.rules
    numbers = rules.small_batch
    share = math.ceil(problem.vectors / ctas)
    vectors = rules.tile.max_elements[problem.compute_bytes] // problem.vector
    block = max(numbers.block, power_of_two_from(math.ceil(share / vectors)))
    # several blocks on a multiprocessor share its issue slots
    one = len(problem.parameter_bytes) == 1
    pays = one or (problem.parameter_bytes and problem.element_bytes == HALF_BYTES)
    several = pays and problem.rows * ctas > limits.sm_count
    elements = math.ceil(share / numbers.min_block) * problem.vector
    if elements <= (numbers.elements_of_several if several else numbers.elements) and not problem.unaligned:
        block = numbers.min_block
    # fetched with the row, parameters cost nobody a place
    elif not _fetches(question, share, block) and _fetches(question, share, 2 * block):
        block *= 2
    most = numbers.max_block
    fits = block <= most or (share <= most * numbers.crowded_vectors and not problem.unaligned)
    return _in_clusters(question, ctas, min(block, most)) if fits else None


def _crowded(question: Question) -> Plan | None:
    """Return the plan of more bytes a thread, so that rows are in work together."""
    problem, limits, numbers = question.problem, question.limits, question.rules.small_batch
    vectors, most = problem.vectors, question.max_ctas
    least = numbers.min_block * numbers.crowded_vectors
    ctas = min(most, max(2, power_of_two_from(math.ceil(vectors / least))))
    at_once = numbers.crowded_blocks * limits.sm_count
    while 2 * ctas <= most and 2 * ctas * problem.rows <= at_once and vectors >= ctas * least:
        ctas *= 2
    threads = power_of_two_from(math.ceil(vectors / ctas / numbers.crowded_vectors))
    block = max(numbers.min_block, threads)
    return _in_clusters(question, ctas, block, crowded=True) if block <= numbers.max_block else None


def _fetches(question: Question, share: int, block: int) -> bool:
    """Say whether a thread has registers for the parameters of its share of a row."""
    problem, numbers = question.problem, question.rules.small_batch
    needed = words(problem, math.ceil(share / block) * problem.vector, cached=True)
    few = needed <= numbers.words and block <= numbers.max_block
    return bool(problem.parameter_bytes) and few and not problem.unaligned


def _in_clusters(question: Question, ctas: int, block: int, *, crowded: bool = False) -> Plan:
    """Return the plan of clusters of so many blocks, as many of them on a multiprocessor as have registers."""
    problem = question.problem
    plan = by_whole_blocks(problem, ctas, block)
    elements = plan.vectors * plan.vector
    if problem.unaligned:
        return replace(plan, parameter_cache=int(can_cache(question, elements)))
    # not if too few threads are left
    cached = _fetches(question, math.ceil(problem.vectors / ctas), block)
    least = question.rules.staged.few_threads
    cached = cached and (not crowded or _resident_small(question, plan, cached=True) * block > least)
    resident = max(1, _resident_small(question, plan, cached=cached))
    return replace(plan, parameter_cache=int(cached), min_blocks=resident)


def _resident_small(question: Question, plan: Plan, *, cached: bool) -> int:
    problem, limits, model = question.problem, question.limits, question.rules.registers
    needed = model.small_batch + words(problem, plan.vectors * plan.vector, cached=cached)
    needed += 0 if plan.full else model.ragged[problem.compute_bytes]
    needed += 0 if question.measured else model.cluster
    by_registers = limits.registers_per_sm // (needed * plan.block)
    most = question.rules.clusters.max_shared_blocks
    return min(by_registers, limits.threads_per_sm // plan.block, most)


def prefers_cluster(question: Question) -> bool:
    """Say whether blocks of a cluster are better for a row that one block could hold, too."""
    problem, rules = question.problem, question.rules
    if problem.unaligned == UNALIGNED and problem.parameter_bytes and question.max_ctas > 1:
        return rules.is_better("cluster unaligned", problem)
    ragged = problem.row_bytes % (WARP * ACCESS_BYTES) != 0
    return rules.is_better("cluster", problem) or (ragged and rules.is_better("cluster ragged", problem))


def without_scheduler(question: Question, plan: Plan) -> Plan | None:
    """Return a plan with a cluster for each row, for where not all blocks can run at once; None if it has no clusters.

    Nothing is kept for other rows then, and no row is taken from a counter.
    """
    if plan.variant != "cluster":
        return None
    plan = in_registers(question.problem, replace(plan, parameter_cache=AT_USE, stages=0))
    reason = f"{plan.why}, without what needs all blocks to run at once"
    found = with_grid(question, plan, blocks_of(question.problem, plan), reason)
    return found and replace(found, rule=plan.rule)
