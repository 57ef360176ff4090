"""What holds for every plan, over random problems and devices: with rules of their own, and without."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupynorm.plan.choose import choose, effective
from cupynorm.plan.config import (
    BOUNDS,
    MAX_DYNAMIC_ROWS,
    VARIANTS,
    WARP,
    DoesNotFitError,
    Plan,
    check_plan,
)
from cupynorm.plan.limits import RECORDED, Limits, active_blocks
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of
from cupynorm.tools.ship import order_of_summation

# Recorded devices, and what the rules know nothing of: newer ones, and parts of one.
DEVICES = {
    **RECORDED,
    "a later one": dataclasses.replace(RECORDED["h200"], name="b200", compute_capability="100", sm_count=148),
    "small clusters": dataclasses.replace(RECORDED["rtx4090"], name="rtx5090", compute_capability="120"),
    "a part": dataclasses.replace(RECORDED["h200"], name="part", sm_count=16),
}
FEWEST = 128  # threads of a row, at most, that it is given however short it is
GROUP = 16  # multiprocessors that a cluster stays within


def occupancy_on(limits: Limits) -> Any:
    """Stand in for the driver: 64 registers a thread, or as few as the plan's blocks leave."""

    def occupancy(plan: Plan) -> int:
        registers = min(64, limits.registers_per_sm // (plan.block * plan.min_blocks) // 8 * 8)
        resident = active_blocks(limits, plan.block, registers, plan.shared_bytes)
        return (
            resident if plan.cluster == 1 else limits.sm_count // GROUP * (GROUP * resident // plan.cluster)
        )

    return occupancy


SIZES = st.sampled_from([1, 2, 4])
ROWS = st.one_of(
    st.integers(1, 300),
    st.sampled_from([131, 132, 1024, 4096, 25344, 49152, 10**6, 2**31]),
)
COLS = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 1 << 25),
    st.builds(lambda power, more: (1 << power) + more, st.integers(0, 24), st.sampled_from([0, 1, 8])),
    st.builds(lambda width, unit: width * unit, st.integers(1, 300), st.sampled_from([64, 256, 1024])),
)


@st.composite
def problems(draw: Any, *, fused: bool | None = None) -> Problem:
    """Draw a problem that a call can have."""
    load_bytes = draw(st.sampled_from([2, 2, 4, 4, 8]))
    compute_bytes = 8 if load_bytes == 8 else draw(st.sampled_from([4, 4, 4, 8]))
    rows, cols, widest = draw(ROWS), draw(COLS), 16 // load_bytes
    parameters = draw(st.sampled_from([0, 1, 2]))
    parameter_bytes = (draw(st.sampled_from([load_bytes, load_bytes, 2, 4, 8])),) * parameters
    vector = math.gcd(cols, widest, draw(st.sampled_from([widest, widest, widest, 1, 2, 4])))
    lies: dict[str, int] = {"widest_vector": vector}
    if vector < widest and draw(st.booleans()):
        period = draw(st.sampled_from([0, 1, widest // vector]))
        lies = {
            "widest_vector": widest,
            "unaligned": draw(st.sampled_from([1, 1, 2])),
            "alignment_period": period,
        }
    around: dict[str, Any] = {}
    if draw(st.booleans()) if fused is None else fused:
        around = {
            "fused": True,
            "load_operands": tuple(draw(st.lists(SIZES, max_size=2))),
            "epilogue_operands": tuple(draw(st.lists(SIZES, max_size=1))),
            "output_bytes": draw(SIZES),
            "outputs": draw(st.sampled_from([1, 1, 2])),
            "direct_load": draw(st.booleans()),
            "extra_registers": draw(st.sampled_from([0, 8, 13, 16, 24, 40])),
            "interval_mask": draw(st.booleans()),
        }
        if around["load_operands"]:
            around["direct_load"] = False
    return Problem(rows, cols, vector, load_bytes, compute_bytes, parameter_bytes, **lies, **around)


def assert_holds_rows(problem: Problem, plan: Plan) -> None:
    """Every element has its place, and only a thread's last vector may be missing.

    So no warp is idle where a thread holds several vectors. Where it holds one, no half of a block's threads is;
    clusters of fused calls and of small batches have blocks of a fixed size.
    """
    vectors = problem.cols // plan.vector
    if plan.kernel == "row_registers":
        share = math.ceil(vectors / plan.ctas_per_row)
        assert plan.group * plan.vectors >= share
        assert plan.full == (plan.ctas_per_row * plan.group * plan.vectors == vectors and not plan.unaligned)
        assert plan.block % plan.group == 0
        if not plan.unaligned:
            assert plan.group * (plan.vectors - 1) < share
            assert plan.group <= FEWEST or plan.group // 2 < share or plan.variant == "cluster"
    if plan.kernel == "row_spread":
        assert plan.ctas_per_row * plan.group * plan.vectors >= vectors
    if plan.kernel == "row_computed":
        assert plan.shared_bytes >= problem.cols // plan.vector * plan.vector * problem.load_bytes
    elif plan.variant == "shared":
        assert plan.row_shared_bytes >= plan.shared_bytes >= problem.cols * problem.load_bytes


def assert_device_takes(limits: Limits, problem: Problem, plan: Plan) -> None:
    """The launch is one that the device allows."""
    check_plan(plan)
    for name, (least, most) in BOUNDS.items():
        assert least <= getattr(plan, name) <= most, name
    assert plan.block % WARP == 0
    assert plan.block * plan.min_blocks <= limits.threads_per_sm
    assert plan.shared_bytes <= limits.shared_bytes_per_block
    assert plan.grid % plan.ctas_per_row == 0
    assert plan.cluster == 1 or int(limits.compute_capability) >= 90
    assert plan.cluster <= (16 if limits.compute_capability in {"90", "100"} else 8)
    if plan.cooperative:
        assert plan.waves <= 1
    # blocks of row_computed go through many rows
    if not plan.persistent and plan.variant != "split" and plan.kernel != "row_computed":
        groups = (
            plan.block // plan.group * plan.rows_per_group if plan.group and plan.ctas_per_row == 1 else 1
        )
        assert plan.grid // plan.ctas_per_row * groups >= min(problem.rows, (2**31 - 1) // plan.ctas_per_row)


WIDER_PARAMETERS = Problem(  # which shared memory of some devices has no room for
    1000, 6153, 1, 2, 4, (4, 4), widest_vector=8, unaligned=1, alignment_period=8
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=250, deadline=None)
@given(problem=problems())
@example(problem=WIDER_PARAMETERS)
def test_every_problem_has_a_plan_that_its_kernel_and_device_can_run(device: str, problem: Problem) -> None:
    limits = DEVICES[device]
    occupancy = occupancy_on(limits)

    plan = choose(problem, limits, occupancy)

    assert_holds_rows(problem, plan)
    assert_device_takes(limits, problem, plan)
    assert plan == choose(problem, limits, occupancy)
    assert plan.variant in VARIANTS
    assert plan.unaligned in {0, effective(problem).unaligned}
    assert plan.why


@settings(max_examples=500, deadline=None)
@given(problem=problems(), device=st.sampled_from([*DEVICES]), variant=st.sampled_from([None, *VARIANTS]))
@example(  # rows that are read twice, side by side
    problem=Problem(4, 16777056, 8, 2, 4, (2,), 8), device="h200", variant=None
)
def test_a_plan_that_was_chosen_is_accepted_when_it_is_forced(
    problem: Problem, device: str, variant: str | None
) -> None:
    limits = DEVICES[device]
    occupancy = occupancy_on(limits)
    try:
        plan = choose(problem, limits, occupancy, variant)
    except DoesNotFitError:
        assert variant is not None
        return

    again = choose(problem, limits, occupancy, plan)

    assert again.template == plan.template
    assert again.why == "asked for"
    assert_holds_rows(problem, plan)
    assert_device_takes(limits, problem, plan)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), device=st.sampled_from([*DEVICES]))
def test_where_blocks_cannot_all_run_at_once_no_plan_needs_it(problem: Problem, device: str) -> None:
    limits = DEVICES[device]

    plan = choose(problem, limits, occupancy_on(limits), cooperative=False)

    assert not plan.cooperative
    assert_holds_rows(problem, plan)
    assert_device_takes(limits, problem, plan)


@settings(max_examples=300, deadline=None)
@given(
    problem=problems(), device=st.sampled_from([*DEVICES]), refused=st.sets(st.sampled_from(VARIANTS[:-1]))
)
def test_a_variant_that_the_driver_refuses_gives_way_to_another(
    problem: Problem, device: str, refused: set[str]
) -> None:
    limits = DEVICES[device]
    occupancy = occupancy_on(limits)

    plan = choose(problem, limits, lambda plan: 0 if plan.variant in refused else occupancy(plan))

    assert plan.variant not in refused


@settings(max_examples=200, deadline=None)
@given(problem=problems(fused=False))
def test_few_long_rows_are_shared_by_several_blocks(problem: Problem) -> None:
    few = dataclasses.replace(problem, rows=7, cols=max(problem.cols, 1 << 17) // 8 * 8, vector=1)
    few = dataclasses.replace(few, unaligned=0, alignment_period=1)
    limits = RECORDED["h200"]

    assert choose(few, limits, occupancy_on(limits)).ctas_per_row > 1


@settings(max_examples=200, deadline=None)
@given(problem=problems(), device=st.sampled_from([*DEVICES]), more=st.integers(1, 1000))
def test_where_a_multiprocessor_has_many_rows_more_of_them_change_the_grid_alone(
    problem: Problem, device: str, more: int
) -> None:
    limits = DEVICES[device]
    many = dataclasses.replace(problem, rows=200 * limits.sm_count)

    plan = choose(many, limits, occupancy_on(limits))
    longer = choose(dataclasses.replace(many, rows=many.rows + more), limits, occupancy_on(limits))

    assert longer.template == plan.template


# ---- the order of summation does not depend on the number of rows

SLOW = bool(os.environ.get("CUPYNORM_SLOW"))
FEW_ROWS = (1, 2, 8, 16, 64)
ENOUGH_ROWS = (107, 108, 132, 148, 264, 1000, 2000, 4096, 8192, 25344, 49152, 200_000)


def orders(problem: Problem, limits: Limits, rows: Iterable[int]) -> set[tuple[Any, ...]]:
    """Return the orders of summation of so many rows, without those of small batches, whose rows blocks share."""
    occupancy = occupancy_on(limits)
    numbers = rules_of(limits.compute_capability).small_batch
    few = numbers.rows * limits.sm_count if problem.row_bytes >= numbers.row_bytes else 0
    # one row has no next one that may be aligned otherwise
    one = min(1, problem.alignment_period)
    asked = (
        dataclasses.replace(
            problem, rows=each, alignment_period=one if each == 1 else problem.alignment_period
        )
        for each in rows
        if few <= each <= MAX_DYNAMIC_ROWS  # more rows that clusters share take some 10 TB
    )
    return {order_of_summation(choose(each, limits, occupancy)) for each in asked}


def another_order_pays(problem: Problem) -> bool:
    """Say whether few rows may be summed in another order than many, since one for both would cost more than 0.01.

    LayerNorm of 64 and of 776 to 3100 halves, softmax of 512 floats: what it would cost is in the notes of plan/data.
    """
    if problem.kind == (2, 2):
        return problem.row_bytes == 2 * 64 or 2 * 776 <= problem.row_bytes <= 2 * 3100
    return problem.kind == (0, 4) and problem.row_bytes == 4 * 512


@settings(max_examples=500, deadline=None)
@given(
    problem=problems().filter(lambda problem: not another_order_pays(problem)),
    device=st.sampled_from([*DEVICES]),
    rows=st.sets(st.one_of(ROWS, st.sampled_from(ENOUGH_ROWS)), min_size=2, max_size=5),
)
def test_the_order_of_summation_depends_on_the_number_of_rows_in_small_batches_only(
    problem: Problem, device: str, rows: set[int]
) -> None:
    assert len(orders(problem, DEVICES[device], rows)) <= 1


WIDTHS = sorted(
    {
        *(1 << power for power in range(3, 21)),
        *(shape + more for power in range(5, 18) for shape in (1 << power,) for more in (-1, 1)),
        *range(80, 4700, 60),
        *(100, 127, 150, 203, 384, 511, 900, 1001, 1031, 1501, 1538, 2002, 3001, 3074, 5001, 7001, 9002),
        *(10_001, 12_288, 20_001, 30_000, 50_257, 100_003, 128_256, 151_936, 1_000_000),
    }
)


@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_of_every_rule_are_summed_in_the_same_order_however_many_there_are(
    parameters: int, size: int
) -> None:
    widest = 16 // size
    found: list[str] = []
    for device, cols, offset in itertools.product(
        ("h200", "a100", "t4") if SLOW else ("h200",), WIDTHS, (0, 1, 2)
    ):
        vector = math.gcd(cols, widest, offset or widest)
        lies = {"widest_vector": widest, "unaligned": 1, "alignment_period": widest // vector}
        problem = Problem(1, cols, vector, size, max(4, size), (size,) * parameters)
        if vector < widest:
            problem = dataclasses.replace(problem, **lies)
        if (
            not another_order_pays(problem)
            and len(orders(problem, DEVICES[device], (*FEW_ROWS, *ENOUGH_ROWS))) > 1
        ):
            found.append(f"{device}, {cols} columns in vectors of {vector}")

    assert not found
