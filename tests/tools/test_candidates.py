"""Candidates for `cupynorm tune`: the planner takes each of them, and they differ in all that may matter."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from cupynorm.catalog import forms
from cupynorm.plan.choose import choose
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.runtime import tuned_plans
from cupynorm.tools import bench, tune
from cupynorm.tools.candidates import candidates
from cupynorm.tools.results import Point
from cupynorm.tools.rule_plans import guessed_occupancy

pytestmark = pytest.mark.usefixtures("tuned_cache")

PROBLEMS = [
    Problem(rows, cols, vector, load, compute, columns)
    for rows in (1, 49152)
    for cols, vector in ((1, 1), (40, 8), (768, 8), (1000, 8), (1023, 1), (8192, 8), (50257, 1), (1 << 20, 8))
    for load, compute in ((2, 4), (4, 4), (8, 8))
    for columns in ((), (load, load), (4,))
    if vector * max(load, 2) <= 16
]


@pytest.mark.parametrize("device", RECORDED)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_candidate_can_be_chosen(problem: Problem, device: str) -> None:
    limits = RECORDED[device]

    found = candidates(problem, limits, tune.MOST_CANDIDATES)

    assert 0 < len(found) <= tune.MOST_CANDIDATES
    assert len(found) == len(set(found))
    for plan in found:
        chosen = choose(problem, limits, lambda each: each.min_blocks, plan)
        assert tuned_plans.portable(chosen) == plan
        if plan.group:
            assert plan.min_blocks * plan.block <= max(limits.threads_per_sm, plan.block)
            assert plan.min_blocks <= limits.blocks_per_sm


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_what_the_table_takes_is_the_first_candidate(problem: Problem) -> None:
    limits = RECORDED["h200"]

    first, *_ = candidates(problem, limits, tune.MOST_CANDIDATES)

    table = choose(problem, limits, functools.partial(guessed_occupancy, problem, limits))
    assert first == tuned_plans.portable(table)


@pytest.mark.parametrize(
    ("op", "dtype", "cols"), [("layer_norm", "float16", 77), ("layer_norm", "float32", 33)]
)
def test_narrow_rows_without_gaps_are_tried_as_rules_say_and_in_tiles(op: str, dtype: str, cols: int) -> None:
    limits = RECORDED["h200"]
    problem = bench.lowered(Point(op, dtype, 49152, cols)).problem
    asked = dataclasses.replace(problem, adjoining=False)

    found = candidates(problem, limits, tune.MOST_CANDIDATES)

    by_rule = choose(asked, limits, functools.partial(guessed_occupancy, asked, limits))
    tile, second, *others = found
    assert (tile.kernel, by_rule.kernel) == ("row_tiled", "row_registers")
    assert second == tuned_plans.portable(by_rule)
    assert {each.kernel for each in others} >= {"row_tiled", "row_registers"}
    near = [each for each in others if (each.vectors, each.group) == (by_rule.vectors, by_rule.group)]
    assert len(near) > 1


def test_candidates_differ_in_all_that_may_matter() -> None:
    found = candidates(Problem(49152, 1024, 8, 2, 4, (2, 2)), RECORDED["h200"], 64)

    for field in ("variant", "vectors", "group", "rows_per_group", "parameter_cache", "block", "min_blocks"):
        assert len({getattr(plan, field) for plan in found}) > 1, field
    assert not any(
        plan.parameter_cache for plan in candidates(Problem(49152, 1024, 8, 2, 4), RECORDED["h200"], 64)
    )


def test_no_more_candidates_than_asked_for() -> None:
    assert len(candidates(Problem(49152, 1024, 8, 2, 4), RECORDED["h200"], 5)) == 5


def test_rows_too_long_for_registers_are_tried_in_shared_memory_and_without() -> None:
    found = candidates(Problem(4096, 65536, 8, 2, 4), RECORDED["h200"], 64)

    assert {plan.variant for plan in found} == {"cached", "cluster", "split", "shared", "uncached"}
    assert {plan.block for plan in found} > {128, 256, 512, 1024}


def test_clusters_are_tried_that_fill_a_multiprocessor() -> None:
    """In registers, which they claim their rows for, and in shared memory."""
    found = candidates(Problem(4096, 65536, 8, 2, 4, (2, 2)), RECORDED["h200"], 64)

    claims = {
        (plan.ctas_per_row, plan.vectors, plan.block, plan.min_blocks) for plan in found if plan.dynamic
    }
    kept = {
        (plan.ctas_per_row, plan.block, plan.min_blocks)
        for plan in found
        if plan.cluster > 1 and plan.row_shared_bytes
    }
    assert claims > {(2, 8, 512, 1), (8, 4, 256, 3), (16, 8, 64, 8), (8, 5, 224, 3)}
    assert kept == {(8, 128, 8), (4, 160, 6), (2, 320, 3)}


GRADIENTS = [name for name in forms.TUNED if not forms.form(name).alone]


@pytest.mark.parametrize(("rows", "cols"), [(8192, 64), (8192, 1001), (4096, 20480), (4, 1 << 17)])
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_candidate_of_a_gradient_can_be_chosen(name: str, rows: int, cols: int) -> None:
    for dtype, device in (("float16", "h200"), ("float32", "a100")):
        limits = RECORDED[device]
        problem = bench.lowered(Point(name, dtype, rows, cols), limits=limits).problem

        found = candidates(problem, limits, tune.MOST_CANDIDATES)

        # long rows with sums over rows have one tiling
        assert (0 if problem.column_sums else 4) < len(found) <= tune.MOST_CANDIDATES
        table = choose(problem, limits, functools.partial(guessed_occupancy, problem, limits))
        assert found[0] == tuned_plans.portable(table)
        assert len({plan.variant for plan in found}) > 1 or problem.column_sums  # which wait in registers
        for plan in found:
            assert tuned_plans.portable(choose(problem, limits, lambda each: each.min_blocks, plan)) == plan


def test_what_waits_as_it_was_computed_is_tried_with_other_blocks() -> None:
    problem = bench.lowered(Point("softmax_backward", "float16", 4096, 16384)).problem

    found = candidates(problem, RECORDED["h200"], tune.MOST_CANDIDATES)

    computed = {(plan.block, plan.vectors) for plan in found if plan.kernel == "row_computed"}
    assert len({block for block, _ in computed}) > 1
    assert len({vectors for _, vectors in computed}) > 1
