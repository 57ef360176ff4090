"""Rows whose elements lie apart, of which tiles come through a ring in shared memory: where they do, and how."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import ACCESS_BYTES, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of
from cupynorm.plan.sections.tilings import RingTiling

NUMBERS = rules_of("90").rings
TILINGS = [RingTiling(*numbers) for numbers in NUMBERS.tilings]


def problem_of(rows: int, cols: int, load_bytes: int, *, across: int = 0, **others: Any) -> Problem:
    given: dict[str, Any] = {
        "fused": True,
        "in_steps": True,
        "room": True,
        "stretches": (load_bytes,),
        "direct_load": True,
        "row_numbers": 4,
    }
    given |= {
        "output_bytes": load_bytes,
        "across": across or rows,
        "waits_as_loaded": load_bytes == 2,
        **others,
    }
    return Problem(rows, cols, ACCESS_BYTES // load_bytes, load_bytes, 4, **given)


def planned(*shape: Any, device: str = "h200", forced: Any = None, **others: Any) -> Plan:
    return choose(problem_of(*shape, **others), RECORDED[device], lambda plan: plan.min_blocks, forced)


def parameters_of(tiling: RingTiling) -> tuple[int, ...]:
    return (tiling.bytes, tiling.bytes) if tiling.parameters else ()


def test_devices_of_narrower_memory_have_rings_where_these_were_faster_there_too() -> None:
    kernels = {
        cols: planned(1 << 17, cols, 4, device="h100").kernel for cols in (1024, 2048, 4096, 8192, 16384)
    }
    assert [cols for cols, kernel in kernels.items() if kernel == "row_ring"] == [2048, 4096, 16384]


def test_states_of_many_numbers_leave_too_little_room() -> None:
    assert planned(1 << 17, 4096, 4, row_numbers=6).kernel == "row_across"


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_is_reached_and_its_ring_has_room(tiling: RingTiling) -> None:
    device = "h200" if tiling.l2_megabytes else "h100"
    limits = RECORDED[device]
    for cols in (tiling.first, (tiling.first + tiling.last) // 2, tiling.last):
        plan = planned(1 << 17, cols, tiling.bytes, parameter_bytes=parameters_of(tiling), device=device)
        assert plan.kernel == "row_ring"
        assert (plan.block, plan.min_blocks) == (tiling.block, tiling.blocks)
        assert plan.across * ACCESS_BYTES == tiling.width
        assert plan.stages > plan.vectors // plan.rows_per_group
        assert plan.vectors * plan.group * plan.ctas_per_row >= cols
        each = plan.shared_bytes + limits.reserved_shared_bytes
        assert each * plan.min_blocks <= limits.shared_bytes_per_sm


@pytest.mark.parametrize(
    "others",
    [
        {"stretches": ()},
        {"masked": True},
        {"load_operands": (4,)},
        {"epilogue_operands": (4,)},
        {"outputs": 2},
        {"rounds": True},
        {"output_bytes": 2},
        {"output_bytes": 0},
        {"fields": 2},
    ],
    ids=str,
)
def test_what_is_not_plain_comes_otherwise(others: dict[str, Any]) -> None:
    assert planned(1 << 17, 4096, 4).kernel == "row_ring"
    assert planned(1 << 17, 4096, 4, **others).kernel != "row_ring"


def test_where_it_does_not_pay() -> None:
    assert planned(1 << 17, 256, 4).kernel != "row_ring"
    assert planned(1 << 17, 16385, 4).kernel != "row_ring"
    assert planned(1 << 17, 4096, 4, across=32).kernel != "row_ring"  # no whole tile side by side
    assert planned(1 << 17, 4096, 4, device="a100").kernel != "row_ring"


def test_few_rows_do_not_take_it() -> None:
    kernels = [planned(64 * tiles, 4096, 4).kernel for tiles in (1, 16, 47, 48, 400)]
    first = kernels.index("row_ring")
    assert 0 < first < len(kernels)
    assert all((kernel == "row_ring") == (i >= first) for i, kernel in enumerate(kernels))


def test_forced_plans_that_the_kernel_would_do_wrong() -> None:
    plan = planned(1 << 17, 4096, 4)
    assert planned(1 << 17, 4096, 4, forced=plan) == plan
    wrong: list[dict[str, Any]] = [
        {"stages": plan.vectors // plan.rows_per_group},
        {"vectors": plan.vectors - plan.rows_per_group},
        {"rows_per_group": 3},
        {"vector": 2},
        {"group": plan.group // 2},
        {"variant": "shared"},
        {"vector": 4, "across": 2, "group": plan.block // 2},  # fewer rows than blocks that own some
        {"ctas_per_row": plan.ctas_per_row // 2},
        {"waits": 1},
    ]
    for changed in wrong:
        with pytest.raises(DoesNotFitError):
            planned(1 << 17, 4096, 4, forced=dataclasses.replace(plan, **changed))


def test_tilings_do_not_hide_one_another() -> None:
    """Only those of devices of wider memory stand before others of the same rows."""
    for one, other in itertools.combinations(TILINGS, 2):
        either = 2 in (one.parameters, other.parameters) or one.parameters == other.parameters
        if one.bytes == other.bytes and either and one.l2_megabytes <= other.l2_megabytes:
            assert one.last < other.first or other.last < one.first
