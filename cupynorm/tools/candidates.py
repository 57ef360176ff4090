"""Plans that are worth measuring for a problem: what the planner would choose, and what is like it. Needs no device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from cupynorm.plan.base import Question
from cupynorm.plan.choose import choose, effective
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AT_USE,
    HOPPER,
    MAX_BLOCK,
    MOST_REGISTERS,
    ONE_BLOCK_PER_ROW,
    PER_ROW,
    PLAIN,
    VARIANTS,
    WARP,
    DoesNotFitError,
    Plan,
)
from cupynorm.plan.limits import Limits
from cupynorm.plan.problem import Problem
from cupynorm.plan.rule_types import ClusterRule, SharedRule
from cupynorm.plan.rules import rules_of
from cupynorm.plan.variants import summed
from cupynorm.plan.variants.cluster import in_cluster_registers, in_shared_memory
from cupynorm.runtime import tuned_plans
from cupynorm.tools.rule_plans import guessed_occupancy, one_by_one

MOST_VECTORS = 8  # per thread, or as many as make the most elements that the rules allow
BLOCKS = (64, 128, 256, 512, 1024)
RESIDENT_THREADS = (768, 1024, 1280, 1536, 2048)  # per multiprocessor
# Most elements per thread, by bytes of the compute type: twice what the rules take.
TRIED_ELEMENTS = {4: 64, 8: 32}
LEAST_REGISTERS = 12  # that a thread needs besides its elements
# Rows with fewer bytes gain nothing from the L1 cache, and nothing from shared memory or from being read twice.
CACHED_ROW_BYTES = 2 << 10
SHARED_ROW_BYTES = 16 << 10
CTAS = (8, 4, 16, 2)  # blocks per cluster
SHARE_BYTES = (16 << 10, 112 << 10)  # of a row per block of a cluster: least and most


def candidates(problem: Problem, limits: Limits, most: int) -> list[Plan]:
    """Return plans that are worth measuring, the most promising first. All are valid, and none is certain to spill.

    The planner's choice comes first, then what it would choose if rows had gaps, and for each variant; then the plans
    nearest to the first two: other groups, blocks, rows at a time, numbers of resident threads, and cached parameters
    if the op has any.
    """
    occupancy = functools.partial(guessed_occupancy, problem, limits)
    found: dict[Plan, None] = {}

    def add(plans: Iterable[Plan | str | None], room: int) -> None:
        for plan in plans:
            if room <= 0:
                return
            with contextlib.suppress(DoesNotFitError):
                usable = tuned_plans.portable(choose(problem, limits, occupancy, plan))
                choose(problem, limits, occupancy, usable)
                room -= usable not in found
                found[usable] = None

    by_rules = _by_rules(problem, limits)
    add((None, *by_rules, *VARIANTS), most)
    worked = effective(problem)
    if problem.column_sums:
        add(_with_sums(worked, limits), most - len(found))
        return list(found)
    distances = [_distance(worked, limits, origin) for origin in (next(iter(found)), *by_rules)]
    nearest = sorted(_in_registers(worked, limits), key=lambda plan: min(far(plan) for far in distances))
    wide = problem.row_bytes > SHARED_ROW_BYTES
    rest = [*_clusters(worked, limits), *_whole_block(worked, limits)] if wide else []
    if problem.row_bytes >= CACHED_ROW_BYTES:
        rest = [*_cached(worked, limits), *rest]
    add(nearest, most - len(found) - min(len(rest), most // 2))
    add(rest, most - len(found))
    add(nearest, most - len(found))
    return list(found)[:most]


def _by_rules(problem: Problem, limits: Limits) -> list[Plan]:
    """Return what rules say of rows without gaps, for which the planner may choose a tile instead."""
    if not problem.adjoining:
        return []
    asked = one_by_one(problem)
    occupancy = functools.partial(guessed_occupancy, asked, limits)
    return [tuned_plans.portable(choose(asked, limits, occupancy))]


def _with_sums(problem: Problem, limits: Limits) -> Iterator[Plan]:
    question = Question(problem, limits, rules_of(limits.compute_capability), lambda plan: plan.min_blocks)
    for variant in (None, "block"):
        for plan in summed.tilings(question, variant, BLOCKS):
            for resident in {plan.min_blocks, max(1, plan.min_blocks // 2)}:
                yield dataclasses.replace(plan, min_blocks=resident)


def _in_registers(problem: Problem, limits: Limits) -> Iterator[Plan]:
    most_elements = rules_of(limits.compute_capability).tile.max_elements[problem.compute_bytes]
    yield from _tiles(problem)
    for vector in {problem.vector, problem.vector if problem.unaligned else max(1, problem.vector // 2)}:
        for group in (1 << power for power in range(MAX_BLOCK.bit_length())):
            vectors = math.ceil(problem.cols // vector / group)
            most = max(MOST_VECTORS, most_elements // vector)
            if 1 <= vectors <= most and vectors * vector <= TRIED_ELEMENTS[problem.compute_bytes]:
                yield from _launches(problem, limits, vector, vectors, group)


def _tiles(problem: Problem) -> Iterator[Plan]:
    """Yield tiles of narrow rows without gaps: the planner refuses them for others."""
    most = TRIED_ELEMENTS[problem.compute_bytes]
    vector = math.gcd(problem.cols, ACCESS_BYTES // problem.load_bytes)
    for group in (1 << power for power in range(WARP.bit_length())):
        vectors = math.ceil(problem.cols / (vector * group))
        for block in BLOCKS if problem.adjoining and vectors * vector <= most else ():
            yield dataclasses.replace(
                EMPTY_PLAN,
                variant="warp",
                vector=vector,
                vectors=vectors,
                group=group,
                block=block,
                row_shared_bytes=ACCESS_BYTES,
                min_blocks=max(1, min(RESIDENT_THREADS) // block),
            )


def _launches(problem: Problem, limits: Limits, vector: int, vectors: int, group: int) -> Iterator[Plan]:
    for rows in (1, 2):
        if rows > 1 and problem.unaligned and not problem.alignment_period:
            continue
        for cache in (AT_USE, PER_ROW) if problem.parameter_bytes else (AT_USE,):
            needed = LEAST_REGISTERS + rows * vectors * vector * problem.value_bytes // 4
            cached = sum(max(1, size * vector // 4) for size in problem.parameter_bytes)
            needed += vectors * cached if cache else 0
            for block in (each for each in BLOCKS if each >= group):
                bound = min(limits.threads_per_sm, limits.blocks_per_sm * block)
                for least in sorted({max(1, min(threads, bound) // block) for threads in RESIDENT_THREADS}):
                    given = limits.registers_per_sm // (least * block)
                    if needed > min(given, MOST_REGISTERS):
                        continue
                    yield dataclasses.replace(
                        EMPTY_PLAN,
                        variant="warp" if group <= WARP else "block",
                        vector=vector,
                        vectors=vectors,
                        group=group,
                        rows_per_group=rows,
                        parameter_cache=cache,
                        unaligned=problem.unaligned,
                        alignment_period=problem.alignment_period if problem.unaligned and rows > 1 else 1,
                        block=block,
                        min_blocks=least,
                    )


def _clusters(problem: Problem, limits: Limits) -> Iterator[Plan]:
    """Yield clusters, the most promising first.

    Rows are in registers with one row prefetched, in shared memory, then in registers with two rows or none prefetched.
    """
    if int(limits.compute_capability) < HOPPER:
        return
    question = Question(
        problem,
        limits,
        rules_of(limits.compute_capability),
        functools.partial(guessed_occupancy, problem, limits),
    )
    yield from _in_cluster_registers(question, 1)
    yield from _in_cluster_shared_memory(question)
    for stages in (2, 0):
        yield from _in_cluster_registers(question, stages)


def _in_cluster_registers(question: Question, stages: int) -> Iterator[Plan]:
    for vectors, ctas in itertools.product((8, 5, 4, 6, 3), CTAS):
        plan = in_cluster_registers(question, ClusterRule("tried", math.inf, ctas, vectors, stages, fewer=0))
        if plan is not None:
            yield plan


def _in_cluster_shared_memory(question: Question) -> Iterator[Plan]:
    threads = question.rules.staged.roomy_threads
    for vectors, ctas in itertools.product((4, 2), CTAS):
        share = math.ceil(question.problem.row_bytes / ctas)
        if SHARE_BYTES[0] <= share <= SHARE_BYTES[1]:
            rule = SharedRule("tried", math.inf, threads, vectors, share)
            plan = in_shared_memory(question, rule, ctas)
            if plan is not None:
                yield dataclasses.replace(plan, waves=ONE_BLOCK_PER_ROW)


def _cached(problem: Problem, limits: Limits) -> Iterator[Plan]:
    for vectors, threads in itertools.product((4, 2, 1), RESIDENT_THREADS[1:]):
        whole = math.ceil(problem.cols / problem.vector / vectors / WARP)
        for block in {min(warps * WARP, MAX_BLOCK) for warps in (whole, math.ceil(whole / 2))}:
            yield dataclasses.replace(
                EMPTY_PLAN,
                variant="cached",
                vector=problem.vector,
                vectors=vectors,
                block=block,
                min_blocks=max(1, min(threads // block, limits.blocks_per_sm)),
            )


def _whole_block(problem: Problem, limits: Limits) -> Iterator[Plan]:
    most = rules_of(limits.compute_capability).staged.whole_block[problem.compute_bytes]
    # what was computed of a row waits in as much as it takes, and registers say how many blocks there are
    waiting = 0 if problem.fused else limits.shared_bytes_per_block
    for vectors in (4, 2, 1, 8):
        for variant in ("shared", "uncached"):
            for block in (each for each in BLOCKS if 2 * WARP < each <= most):
                resident = limits.threads_per_sm // 2 // block if problem.fused else 1
                yield dataclasses.replace(
                    EMPTY_PLAN,
                    variant=variant,
                    vector=problem.vector,
                    vectors=vectors,
                    unaligned=problem.unaligned,
                    block=block,
                    min_blocks=max(1, resident),
                    row_shared_bytes=waiting if variant == "shared" else 0,
                )


EMPTY_PLAN = dataclasses.replace(PLAIN, waves=ONE_BLOCK_PER_ROW)  # choose() completes it


def _distance(problem: Problem, limits: Limits, origin: Plan) -> Any:
    """Return a function that says how far a plan in registers is from the planner's choice."""
    if not origin.group:
        threads = min(1024, limits.threads_per_sm)
        block = 512
        elements = max(1, min(TRIED_ELEMENTS[problem.compute_bytes], problem.cols // MAX_BLOCK))
    else:
        threads, block = origin.min_blocks * origin.block, origin.block
        elements = origin.vectors * origin.vector

    def distance(plan: Plan) -> float:
        gap = plan.group * plan.vectors * plan.vector - problem.cols
        return (
            abs(math.log2(plan.vectors * plan.vector / elements))
            + abs(math.log2(plan.block / block)) / 2
            + abs(plan.min_blocks * plan.block - threads) / 512
            + (plan.rows_per_group - 1)
            + (plan.parameter_cache != origin.parameter_cache) / 2
            + 2 * (plan.vector != problem.vector)
            + 2 * gap / problem.cols
        )

    return distance
