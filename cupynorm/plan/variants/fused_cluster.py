"""cluster, where something is fused: a dynamic scheduler, whose next row is on its way through shared memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AT_USE,
    BOTH,
    CONVERTED,
    FLOAT_BYTES,
    MAX_CTAS,
    MAX_FUSED_ELEMENTS,
    MAX_TWO_REDUCTIONS_BLOCK,
    REGISTER_BYTES,
    SCHEDULERS,
    SHARED,
    SHARED_OF_VECTORS,
    WARP,
    Plan,
)
from cupynorm.plan.limits import STATIC_SHARED_BYTES, active_blocks
from cupynorm.plan.partition import blocks_of, by_whole_blocks, line_vectors, most_elements, words
from cupynorm.plan.variants.registers import may_persist

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem

SPILLED = "with parameters at use: registers are spilled where they wait"
STAGED_AHEAD = "of all tilings of a cluster the one with the most rows in work"


def with_smaller_vectors(question: Question) -> Question:
    """Return the question in vectors of which each affine parameter takes one access.

    Two accesses of neighbouring threads would leave half of each line to the other. Where parameters wait for all of a
    block's rows it does not matter.
    """
    problem = question.problem
    widest = max(problem.parameter_bytes, default=1)
    affine = problem.fused and not problem.unaligned and problem.fusion == "affine"
    if not affine or widest * problem.vector <= ACCESS_BYTES:
        return question
    return question._replace(problem=replace(problem, vector=max(1, ACCESS_BYTES // widest)))


def _crossover(problem: Problem) -> str:
    """Return the name of the crossover from which on clusters are better."""
    around = problem.fusion
    if problem.output_bytes == 1:
        around = "quantized" if problem.parameter_bytes else "quantized alone"
    elif problem.is_of_pairs:
        around = "gradient"
    return f"cluster, {around}" + (", unaligned" if problem.unaligned else "")


def prefers_clusters(question: Question) -> bool:
    """Say whether clusters whose next rows are on their way are better than what one block could hold, too."""
    return question.rules.is_better(_crossover(question.problem), question.problem)


def prefetched(question: Question) -> Plan | None:
    """Return the best of all tilings, by their worth; parameters at use where none has room for them.

    Shared memory alone is tried first, then shared memory and registers (docs/notes/068).
    """
    problem = question.problem
    if not question.can_stage or problem.doubles:
        return None
    dynamic = CONVERTED if problem.unaligned else AT_USE  # what a dynamic scheduler needs at least
    cached = CONVERTED if problem.unaligned else SHARED if problem.parameter_bytes else AT_USE
    # measured where instructions count: docs/notes/066, "Warps for each scheduler"
    even = problem.output_bytes == 1 or (bool(problem.parameter_bytes) and not problem.unaligned)
    both = (BOTH,) if cached == SHARED else ()
    for cache in dict.fromkeys((cached, *both, dynamic)):
        best, most = None, (0.0, 0.0, -math.inf)
        for plan in _tilings(question, cache):
            # threads of unaligned rows cost more where instructions count: of equal tilings one of fewer threads
            few = problem.unaligned > 0 and (problem.interval_mask or problem.has_scales)
            balance = _balance(plan) if even else 1.0
            worth = _worth(question, plan), balance, -plan.block if few else plan.block
            if worth > most:
                best, most = plan, worth
        if best is not None:
            reason = STAGED_AHEAD
            if prefers_clusters(question) and not question.small_batch:
                reason = question.named(f"crossover {_crossover(problem)!r}") + f": {STAGED_AHEAD}"
            return _with_registers(
                question, with_grid(question, best, blocks_of(problem, best), reason), reason
            )
    return None


def _with_registers(question: Question, plan: Plan | None, reason: str) -> Plan | None:
    """Return the plan, with parameters at use where registers are spilled in which parameters wait (docs/notes/054)."""
    if plan is None or plan.parameter_cache != BOTH or not question.local_bytes(plan):
        return plan
    problem = question.problem
    tiling = by_whole_blocks(
        problem, plan.ctas_per_row, plan.block, stages=plan.stages, parameter_cache=AT_USE
    )
    tiling = replace(tiling, min_blocks=plan.min_blocks)
    at_use = with_grid(question, tiling, blocks_of(problem, tiling), f"{reason}, {SPILLED}")
    found = filter(None, (plan, at_use))
    return min(found, key=question.local_bytes)


def _tilings(question: Question, cache: int) -> list[Plan]:
    """Return a plan for each number of blocks of a cluster and of a thread's vectors that can hold a row."""
    problem = question.problem
    measured = question.rules.fused_clusters.max_elements[problem.element_bytes]
    most = min(most_elements(problem), measured) // problem.vector
    tried = (
        _tiling(question, ctas, vectors, cache)
        for ctas in question.rules.fused_clusters.shares
        if ctas <= question.max_ctas
        for vectors in range(1, most + 1)
    )
    return [each for each in tried if each is not None]


def _tiling(question: Question, ctas: int, vectors: int, cache: int) -> Plan | None:
    """Return a plan of so many vectors of a thread, with as many blocks on a multiprocessor as fit."""
    problem, limits, rules = question.problem, question.limits, question.rules
    each = line_vectors(problem, ctas)[1] if problem.unaligned else math.ceil(problem.vectors / ctas)
    block = math.ceil(each / vectors / WARP) * WARP
    if not rules.fused_clusters.min_block <= block <= rules.clusters.max_block:
        return None
    plan = by_whole_blocks(problem, ctas, block, stages=1, parameter_cache=cache)
    if plan.vectors != vectors or not may_persist(problem, plan):
        return None
    elements = vectors * problem.vector
    shared = plan.shared_bytes + STATIC_SHARED_BYTES
    resident = active_blocks(limits, block, _registers(question, elements, cache), shared)
    few = problem.is_of_pairs or (problem.has_scales and not problem.parameter_bytes)
    if resident == 1 and ctas == question.max_ctas and few:
        # while the only block waits a multiprocessor does nothing: as few registers as such an op compiles with
        fewest = elements * problem.fields + rules.registers.staged_alone
        resident = active_blocks(limits, block, fewest, shared)
    fits = plan.shared_bytes <= limits.shared_bytes_per_block and has_static_room(problem, plan)
    return replace(plan, min_blocks=resident) if resident and fits else None


def _worth(question: Question, plan: Plan) -> float:
    """Return how good a tiling is: the bytes of rows in work on a multiprocessor, up to what keeps memory busy.

    Where these are equal: few large blocks if a row's blocks meet once and do little, else more of them, because while
    some wait, others compute.
    """
    problem, numbers = question.problem, question.rules.fused_clusters
    if problem.rounds:  # the fewer blocks meet in each round the better
        filled = min(1.0, plan.min_blocks * plan.block / question.rules.rounds.threads)
        return filled * min(1.0, plan.min_blocks / 2) / plan.ctas_per_row
    written = problem.output_bytes * (1 if problem.output_bytes == 1 else problem.outputs)
    each = problem.load_bytes + sum((*problem.load_operands, *problem.epilogue_operands)) + written
    reached = numbers.shares[plan.ctas_per_row]
    worth = min(plan.min_blocks * reached / plan.ctas_per_row * problem.cols * each, numbers.busy_bytes)
    little = problem.extra_registers <= question.rules.registers.staged_arithmetic
    if problem.has_scales:
        worth *= numbers.full if plan.full else 1.0
        return float(worth * plan.min_blocks**numbers.by_blocks * plan.vectors**numbers.by_vectors)
    if problem.interval_mask and problem.element_bytes != FLOAT_BYTES:
        blocks = min(plan.min_blocks, numbers.busy_blocks)
        return float(worth * math.sqrt(reached) * blocks**numbers.by_blocks)
    wide = problem.element_bytes == FLOAT_BYTES and len(problem.parameter_bytes) == 1
    edges = problem.unaligned > 0 and len(problem.parameter_bytes) > 1 and problem.output_bytes > 1
    if edges or not (little or wide):  # instructions take the time: threads that have nothing to do cost it
        threads = plan.min_blocks * plan.block
        worth *= reached * math.sqrt(_filled(problem, plan)) * min(1.0, threads / numbers.busy_threads)
        worth *= numbers.full_of_much if plan.full and not little else 1.0
        if edges:
            return float(worth * min(plan.min_blocks, numbers.busy_blocks) ** numbers.by_blocks)
    light = bool(problem.parameter_bytes) and little
    return float(worth * plan.min_blocks ** (numbers.by_blocks_of_little if light else numbers.by_blocks))


def _balance(plan: Plan) -> float:
    """Return how evenly a multiprocessor's warps are spread over its schedulers."""
    warps = plan.min_blocks * plan.block // WARP
    return warps / (math.ceil(warps / SCHEDULERS) * SCHEDULERS)


def _filled(problem: Problem, plan: Plan) -> float:
    """Return the share of all threads' vectors that there are."""
    ctas = plan.ctas_per_row
    each = line_vectors(problem, ctas)[1] if problem.unaligned else math.ceil(problem.vectors / ctas)
    return each / (plan.block * plan.vectors)


def has_static_room(problem: Problem, plan: Plan) -> bool:
    """Say whether static shared memory holds what a cluster's blocks tell one another in all their reductions."""
    large = plan.ctas_per_row == MAX_CTAS and plan.block > MAX_TWO_REDUCTIONS_BLOCK
    return not ((problem.has_scales or problem.fields > 1 or problem.rounds) and large)


def _registers(question: Question, elements: int, cache: int = SHARED) -> int:
    """Return how many registers keep a thread of so many elements from spilling."""
    problem, model = question.problem, question.rules.registers
    if cache == BOTH:
        vectors = elements // problem.vector
        others = (vectors - vectors // SHARED_OF_VECTORS) * problem.vector
        each = words(problem, others, cached=True) - words(problem, others, cached=False)
        return elements * problem.fields + each + model.staged_both
    more = problem.extra_registers - model.staged_arithmetic
    alone = not (problem.load_operands or problem.epilogue_operands)
    alone = alone and (problem.interval_mask or (problem.has_scales and bool(problem.parameter_bytes)))
    beside = model.staged_alone if alone else model.staged
    if problem.only_scaled:
        beside = model.staged_scaled
    needed = elements * problem.fields + beside + 2 * max(0, more)
    needed += elements * sum(problem.epilogue_operands) // REGISTER_BYTES
    passing = sum(size * problem.vector // REGISTER_BYTES for size in problem.parameter_bytes)
    needed += max(0, 2 * (passing - model.passing_words))
    if elements > MAX_FUSED_ELEMENTS[True]:
        needed += model.step
    if problem.interval_mask:
        needed += 2 * model.edge * bool(problem.load_operands)
        few = alone and problem.element_bytes != FLOAT_BYTES
        needed += model.edge * (problem.unaligned > 0 and not few)
    if problem.parameter_bytes and problem.element_bytes == FLOAT_BYTES:
        needed += model.step * (elements > model.crowded_floats)
        needed += 2 * model.step * (elements > model.crowded_elements and (problem.unaligned > 0 or more > 0))
    return needed if question.measured else needed + model.cluster
