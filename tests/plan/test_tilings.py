"""Rules that say how a tiling is found: clusters by the worth of each, and several numbers of vectors of a thread."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from cupynorm._values import replace
from cupynorm.plan.base import Question, none_known
from cupynorm.plan.choose import choose, effective_question
from cupynorm.plan.config import Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rule_file import content_of
from cupynorm.plan.rule_types import TilingRule
from cupynorm.plan.rules import parse, rules_of
from cupynorm.plan.variants import cluster
from cupynorm.tools.rule_plans import guessed_occupancy

H200 = RECORDED["h200"]
EVERY = TilingRule("tried", math.inf, 1, 8, (1.0, 1.0, 1.0, 1.0), 1 << 40, 1 << 20, 1, 0.5)
ALIGNED = Problem(1024, 65536, 4, 4, 4, (4, 4))
UNALIGNED = Problem(1024, 65537, 1, 4, 4, (4, 4), widest_vector=4, unaligned=1, alignment_period=4)


def question(problem: Problem) -> Question:
    occupancy = functools.partial(guessed_occupancy, problem, H200)
    return effective_question(Question(problem, H200, rules_of("90"), occupancy, none_known))


def planned(problem: Problem, device: str = "h200") -> Plan:
    limits = RECORDED[device]
    return choose(problem, limits, functools.partial(guessed_occupancy, problem, limits))


@pytest.mark.parametrize("problem", [ALIGNED, UNALIGNED])
def test_each_tiling_holds_a_row_and_no_number_of_vectors_is_left_out(problem: Problem) -> None:
    asked = question(problem)
    found = cluster.tilings(asked, EVERY._replace(least_vectors=3))

    assert {each.ctas_per_row for each in found} == {4, 8, 16}  # two blocks have too few registers
    assert {each.vectors for each in found} == set(range(3, 9))
    assert all(each.ctas_per_row * each.block * each.vectors >= asked.problem.vectors for each in found)
    assert all(each.stages == 1 or each.min_blocks == 1 for each in found)


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_what_clusters_are_worth_decides_how_many_blocks_they_have(power: int) -> None:
    worths = tuple(1.0 if each == power else 1e-9 for each in range(1, 5))

    best, *_ = cluster.tilings(question(replace(ALIGNED, cols=32768)), EVERY._replace(worths=worths))

    assert best.ctas_per_row == 1 << power


def test_more_bytes_in_work_are_better_until_they_keep_memory_busy() -> None:
    bounded = EVERY._replace(least_vectors=3, busy_threads=32)
    many, *_, least = cluster.tilings(question(ALIGNED), bounded)
    enough, *_ = cluster.tilings(question(ALIGNED), bounded._replace(busy_bytes=1))

    assert many.min_blocks / many.ctas_per_row > least.min_blocks / least.ctas_per_row
    assert enough.full  # then only empty places tell tilings apart
    assert not least.full


def test_more_threads_and_blocks_are_better_until_they_are_busy() -> None:
    bounded = EVERY._replace(least_vectors=3, busy_bytes=1)
    by_threads, *_ = cluster.tilings(question(ALIGNED), bounded)
    by_blocks, *_ = cluster.tilings(question(ALIGNED), bounded._replace(busy_threads=32, busy_blocks=32))
    others = cluster.tilings(question(ALIGNED), bounded)

    assert by_threads.min_blocks * by_threads.block >= 0.9 * max(
        each.min_blocks * each.block for each in others
    )
    assert by_blocks.min_blocks == max(each.min_blocks for each in others)


@pytest.mark.parametrize("problem", [ALIGNED, UNALIGNED])
def test_a_long_row_of_a_norm_takes_the_best_tiling_where_there_are_clusters(problem: Problem) -> None:
    plan, without = planned(problem), planned(problem, "a100")

    rule = next(
        each
        for each in rules_of("90").cluster_rules[problem.kind]
        if isinstance(each, TilingRule) and each.unaligned == (problem.unaligned > 0)
    )
    best, *_ = cluster.tilings(question(problem), rule)
    assert plan.rule == rule.id
    assert (plan.ctas_per_row, plan.block, plan.vectors, plan.stages) == (
        best.ctas_per_row,
        best.block,
        best.vectors,
        best.stages,
    )
    assert without.variant != "cluster"


ROW = {
    "id": "several",
    "rule": "fixed",
    "table": "ragged",
    "parameters": 0,
    "bytes": 2,
    "row_bytes": 1 << 20,
    "block": 128,
    "resident_threads": 1024,
}


def ragged_plan(cols: int, *rows: dict[str, object]) -> Plan:
    told = content_of("90")
    others = [each for each in told["rules"] if each["rule"] != "fixed"]
    rules = parse({**told, "rules": [*others, *rows]}, str(Path("changed")))
    problem = Problem(49152, cols, 8, 2, 4)
    return choose(problem, H200, functools.partial(guessed_occupancy, problem, H200), rules=rules)


@pytest.mark.parametrize("cols", [1272, 1528, 2552, 3064])
def test_a_rule_that_lists_numbers_of_vectors_is_a_rule_for_each_in_that_order(cols: int) -> None:
    together = ragged_plan(cols, {**ROW, "vectors": [6, 5, 3]})
    apart = ragged_plan(cols, *({**ROW, "vectors": vectors} for vectors in (6, 5, 3)))

    assert together == apart
    assert together.rule == "several"
    assert together.vectors in {3, 5, 6}


@pytest.mark.parametrize(("beside", "blocks"), [(0, 8), (20, 8), (32, 7), (56, 5)])
def test_registers_beside_the_values_bound_the_threads_of_a_multiprocessor(beside: int, blocks: int) -> None:
    plan = ragged_plan(1272, {**ROW, "vectors": 5, "registers_beside": beside})

    assert (plan.vectors, plan.block, plan.min_blocks) == (5, 128, blocks)  # 40 values of a thread


@pytest.mark.parametrize(("rows", "block"), [(8192, 128), (24576, 128), (25344, 256), (49152, 256)])
def test_few_narrow_rows_have_smaller_blocks_and_are_summed_in_the_same_order(rows: int, block: int) -> None:
    plan = planned(Problem(rows, 33, 1, 2, 4, (2,)))

    assert (plan.block, plan.group, plan.vectors, plan.vector) == (block, 8, 5, 1)


def test_empty_places_count_as_much_as_a_rule_says() -> None:
    bounded = EVERY._replace(least_vectors=3, busy_bytes=1, busy_threads=32)
    full, *_ = cluster.tilings(question(ALIGNED), bounded)
    any_of_them, *_ = cluster.tilings(question(ALIGNED), bounded._replace(filled=0.0))

    assert full.full
    assert (any_of_them.ctas_per_row, any_of_them.vectors) == (
        4,
        5,
    )  # the fewest of those that have the registers


@pytest.mark.parametrize(("cols", "block"), [(2**19, 256), (2**20, 256), (2**21, 512)])
def test_one_row_of_the_grid_has_few_warps_where_they_have_few_vectors(cols: int, block: int) -> None:
    assert planned(Problem(1, cols, 8, 2, 4)).block == block


@pytest.mark.parametrize(("parameters", "block"), [((), 1024), ((4,), 1024), ((4, 4), 896)])
def test_the_grid_s_blocks_leave_registers_for_two_affine_parameters(
    parameters: tuple[int, ...], block: int
) -> None:
    assert planned(Problem(16, 2**20, 4, 4, 4, parameters)).block == block
