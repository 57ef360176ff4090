"""Rows along the first axis of a table: which blocks share them, and where they wait."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import LINE_BYTES, NOWHERE, SECTOR_BYTES, WARP, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of

H100 = RECORDED["h200"]


def table(rows: int, cols: int, load_bytes: int = 4, **others: Any) -> Problem:
    """Return the problem of a table with so many rows and columns, which are the columns and rows of a plan."""
    vector = math.gcd(cols, 16 // load_bytes)
    given = {"fused": True, "across": cols, "room": True, "in_steps": True, "waits_as_loaded": True}
    return Problem(cols, rows, vector, load_bytes, 4, **{**given, "output_bytes": 4, **others})


def chosen(problem: Problem, variant: str | Plan | None = None, **options: Any) -> Plan:
    return choose(problem, H100, lambda plan: plan.min_blocks, variant, **options)


def is_shared_and_read_again(plan: Plan) -> bool:
    return plan.variant == "split" and plan.waits == NOWHERE


# c, lanes, threads of a block: whole lines, sectors, or neither
@pytest.mark.parametrize(
    ("cols", "vector", "lanes", "block", "size"),
    [
        (8, 4, 2, 512, LINE_BYTES),
        (13, 1, 13, 832, LINE_BYTES),
        (30, 2, 15, 480, LINE_BYTES),
        (33, 1, 33, 800, SECTOR_BYTES),
        (100, 4, 25, 800, LINE_BYTES),
        (500, 4, 125, 512, SECTOR_BYTES),
        (2000, 4, 250, 512, SECTOR_BYTES),
        (211, 1, 211, 448, 4),
    ],
)
def test_blocks_access_whole_stretches_of_memory(
    cols: int, vector: int, lanes: int, block: int, size: int
) -> None:
    plan = chosen(table(400_000, cols))

    assert is_shared_and_read_again(plan)
    assert (plan.vector, plan.across, plan.block) == (vector, lanes, block)
    assert plan.group * lanes * vector * 4 % size == 0
    assert plan.block - plan.group * lanes < max(lanes, WARP)  # few threads are left over
    assert plan.grid >= 0.9 * H100.sm_count


@pytest.mark.parametrize(
    ("rows", "cols", "reads_again"),
    [
        (8000, 500, False),  # in registers of a cluster
        (30_000, 100, False),  # of 33 blocks
        (50_000, 100, True),
        (100_000, 8, False),  # of all blocks at once
        (100_000, 32, False),
        (100_000, 100, True),
        (100_000, 500, True),
        (66_000, 1152, False),  # many tiles, one after the other
        (140_000, 8, True),
        (200_000, 4096, True),
    ],
)
def test_rows_wait_where_it_is_better(rows: int, cols: int, reads_again: bool) -> None:
    plan = chosen(table(rows, cols))

    assert is_shared_and_read_again(plan) == reads_again
    assert reads_again == ("leave much of the device idle" in plan.why)


@pytest.mark.parametrize(
    ("rows", "cols", "shared"),
    [(5999, 500, False), (6000, 500, True), (8000, 8, False), (70_000, 8, True), (20_000, 3000, False)],
)
def test_rows_that_are_only_read_are_read_once(rows: int, cols: int, shared: bool) -> None:
    plan = chosen(table(rows, cols, output_bytes=0))

    assert is_shared_and_read_again(plan) == shared
    assert plan.waits == NOWHERE
    assert shared == plan.why.endswith("read them once")


@pytest.mark.parametrize("load_bytes", [1, 2, 4, 8])
def test_every_number_of_them_decides_a_plan(load_bytes: int) -> None:
    vector, usual, fewer, elements = rules_of("90").apart.again_over_the_grid[load_bytes]
    wide = chosen(table(1_000_000, 64, load_bytes))
    one = chosen(table(1_000_000, 61, load_bytes))
    large = chosen(table(1_000_000, 100, load_bytes))

    assert wide.vector == vector
    assert wide.vectors == min(elements, usual // vector)
    assert one.vector == 1
    assert one.vectors == min(elements, usual if one.block <= 512 else fewer)
    assert large.vectors == min(elements, (usual if large.block <= 512 else fewer) // large.vector)


@pytest.mark.parametrize(("outer", "ctas"), [(1, 132), (2, 66), (23, 11), (45, 8), (60, 2)])
def test_few_blocks_are_left_over(outer: int, ctas: int) -> None:
    problem = table(300_000, 8)
    plan = chosen(dataclasses.replace(problem, rows=8 * outer))

    assert is_shared_and_read_again(plan)
    assert plan.ctas_per_row == ctas
    groups = plan.grid // ctas
    assert outer * ctas >= 0.9 * H100.sm_count * math.ceil(outer / groups)


def test_without_cooperation_or_room_clusters_share_them() -> None:
    assert chosen(table(400_000, 30), cooperative=False).variant == "cluster"
    assert chosen(table(400_000, 30, room=False)).variant == "cluster"


def test_blocks_of_fewer_threads_are_for_less_shared_memory() -> None:
    small = dataclasses.replace(H100, shared_bytes_per_block=101_376)
    found = choose(table(400_000, 100), small, lambda plan: plan.min_blocks)

    assert is_shared_and_read_again(found)
    assert (found.across, found.block) == (25, 512)
    assert found.shared_bytes <= small.shared_bytes_per_block


def test_fewer_elements_are_loaded_at_a_time_where_they_spill() -> None:
    found = chosen(table(400_000, 64), local_bytes=lambda plan: 100 * (plan.vectors > 4))

    assert is_shared_and_read_again(found)
    assert found.vectors == 4


def test_rounds_need_lanes_of_a_warp() -> None:
    plan = chosen(table(400_000, 30, rounds=True))

    assert is_shared_and_read_again(plan)
    assert plan.across in {1, 2, 4, 8, 16, 32}
    apart = chosen(table(400_000, 30))
    with pytest.raises(DoesNotFitError):
        chosen(table(400_000, 30, rounds=True), apart)


def test_a_plan_that_was_chosen_can_be_forced() -> None:
    for cols in (8, 13, 30, 33, 100, 500):
        plan = chosen(table(400_000, cols))
        assert chosen(table(400_000, cols), plan) == plan


def test_any_number_of_lanes_is_for_rows_of_the_grid_that_wait_nowhere() -> None:
    plan = chosen(table(400_000, 30))
    for variant, ctas in (("uncached", 1), ("cluster", 4)):
        forced = plan.as_dict() | {"variant": variant, "ctas_per_row": ctas}
        with pytest.raises(DoesNotFitError):
            chosen(table(400_000, 30), Plan(**forced))
