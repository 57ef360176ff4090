"""Rows that are one stretch of memory with their neighbours: where they come so, and how blocks are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import AT_USE, CONVERTED, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of

H100 = RECORDED["h200"]
NUMBERS = rules_of("90").stretches


def planned(
    outer: int, cols: int, across: int, load_bytes: int = 4, device: str = "h200", **others: Any
) -> Plan:
    given = {
        "fused": True,
        "in_steps": True,
        "room": True,
        "adjoining_stretches": True,
        "output_bytes": load_bytes,
        **others,
    }
    given.setdefault("stretches", (load_bytes, *({given["output_bytes"]} - {0, load_bytes})))
    vector = next(width for width in (4, 2, 1) if across % width == 0 and width * load_bytes <= 8)
    problem = Problem(outer * across, cols, vector, load_bytes, 4, **{"across": across, **given})
    return choose(problem, RECORDED[device], lambda plan: plan.min_blocks)


def is_stretch(*shape: Any, **others: Any) -> bool:
    return planned(*shape, **others).kernel == "row_stretch"


@pytest.mark.parametrize(
    ("across", "of_halves", "of_floats"),
    [
        (7, 0, 0),
        (8, 0, 0),
        (9, 1, 1),
        (12, 1, 1),
        (16, 0, 0),
        (24, 1, 1),
        (32, 0, 0),
        (33, 1, 1),
        (64, 0, 0),
        (95, 1, 1),
        (97, 0, 0),
    ],
)
def test_neighbours_that_leave_gaps(across: int, of_halves: int, of_floats: int) -> None:
    assert is_stretch(8192, 256, across, 2) == of_halves
    assert is_stretch(8192, 256, across, 4) == of_floats


def test_what_was_not_measured_stays_as_it_was() -> None:
    assert is_stretch(8192, 256, 33)
    assert not is_stretch(8192, 256, 33, 1)
    assert not is_stretch(8192, 256, 33, 8)
    assert not is_stretch(8192, 256, 33, stretches=())
    assert not is_stretch(8192, NUMBERS.columns - 1, 33)


def test_few_outer_indices_stay_as_they_were() -> None:
    for cols in (40, 256, 512):
        for device in ("h200", "a100"):
            enough = NUMBERS.fewest * RECORDED[device].sm_count
            assert not is_stretch(enough - 1, cols, 65, device=device)
    assert is_stretch(NUMBERS.fewest * H100.sm_count, 256, 65)


def test_several_blocks_run_at_once() -> None:
    """As many bytes as a multiprocessor has: results of another size than elements have places of their own.

    Of numbers of 4 bytes one block is enough, if there are results.
    """
    for device, load_bytes, output_bytes in itertools.product(("h200", "a100", "t4"), (2, 4), (0, 2, 4)):
        alone = load_bytes == 4 and output_bytes > 0
        most = RECORDED[device].shared_bytes_per_sm // (1 if alone else NUMBERS.resident)
        for cols in (40, 128, 512, 900, 2000):
            plan = planned(8192, cols, 33, load_bytes, device, output_bytes=output_bytes)
            if plan.kernel == "row_stretch":
                needed = plan.shared_bytes + RECORDED[device].reserved_shared_bytes
                assert needed <= most
                assert plan.shared_bytes >= 33 * cols * sum({load_bytes, output_bytes})
            else:
                tables = 3 if cols == 40 else 1
                assert tables * 33 * cols * sum({load_bytes, output_bytes}) > most - 10_000
    assert is_stretch(4096, 512, 33, 2, output_bytes=4)


# each of the best that was timed: small stretches have blocks of few threads, of which more run at once
@pytest.mark.parametrize(
    ("cols", "across", "size", "output", "tables", "block"),
    [
        (512, 33, 2, 2, 1, 256),
        (512, 33, 4, 4, 1, 256),
        (64, 33, 2, 2, 3, 256),
        (64, 33, 4, 4, 1, 128),
        (64, 33, 2, 4, 1, 128),
        (300, 9, 2, 2, 3, 128),
        (300, 9, 4, 4, 1, 128),
        (300, 9, 2, 4, 1, 128),
        (1000, 17, 4, 4, 1, 256),
    ],
)
def test_how_a_block_is_cut(cols: int, across: int, size: int, output: int, tables: int, block: int) -> None:
    plan = planned(20000, cols, across, size, output_bytes=output)

    assert (plan.rows_per_group, plan.block, plan.group) == (tables, block, block // (across * tables))
    assert plan.grid == -(-20000 // tables)


# (outer, columns, neighbours), what is loaded beside x, and more of a problem; what was best on an H200
@pytest.mark.parametrize(
    ("shape", "size", "beside", "more", "found"),
    [
        ((2400, 512, 33), 2, (1,), {}, True),  # a mask
        ((2400, 256, 48), 2, (1,), {}, False),
        ((2400, 256, 24), 2, (2, 2), {"load_operands": (2,)}, True),  # a sum that is stored
        ((2400, 1024, 24), 2, (2, 2), {"load_operands": (2,)}, False),
        ((1200, 1000, 33), 2, (2, 2), {"load_operands": (2,)}, True),
        ((2400, 512, 33), 4, (4,), {"load_operands": (4,), "fields": 2}, True),  # pairs
        ((2400, 1024, 24), 4, (4,), {"load_operands": (4,), "fields": 2}, True),
        ((2400, 512, 33), 4, (4,), {"load_operands": (4, 4), "fields": 2}, False),
        ((2400, 256, 33), 4, (4,), {"load_operands": (4, 4), "fields": 2}, True),
        ((2400, 512, 33), 4, (1,), {"output_bytes": 0}, True),
        ((2400, 1000, 33), 4, (1,), {"output_bytes": 0}, False),
        ((20000, 64, 33), 2, (1,), {"adjoining_stretches": False}, False),
        ((20000, 300, 9), 2, (1,), {"adjoining_stretches": False}, True),
    ],
)
def test_what_is_loaded_beside_them(
    shape: tuple[int, int, int], size: int, beside: tuple[int, ...], more: dict[str, Any], *, found: bool
) -> None:
    assert is_stretch(*shape, size, stretches=(size, *beside), **more) == found


def test_parameters_wait_where_they_cost_no_block() -> None:
    for cols, across, cache in ((512, 33, CONVERTED), (1000, 17, AT_USE)):
        plan = planned(8192, cols, across, parameter_bytes=(4, 4), row_numbers=2)
        bare = planned(8192, cols, across, row_numbers=2)
        assert plan.parameter_cache == cache
        assert plan.shared_bytes - bare.shared_bytes in {0, 8 * cols}


@pytest.mark.parametrize(
    ("beside", "more", "block"),
    [
        ((), {}, 256),
        ((4, 4), {}, 512),
        ((4, 4), {"row_numbers": 6}, 256),
        ((4, 4), {"output_bytes": 0}, 256),
        ((4, 4), {"fields": 2, "load_operands": (4,)}, 256),
    ],
)
def test_few_blocks_have_many_threads(beside: tuple[int, ...], more: dict[str, Any], block: int) -> None:
    given = {"row_numbers": 2, **more}
    assert planned(8192, 256, 33, stretches=(4, *beside), **given).block == block
