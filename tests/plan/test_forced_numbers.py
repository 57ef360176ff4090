"""Plans that somebody made: refused with the field's name, or launched as asked for. Integers only."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cupynorm
from cupynorm.plan.choose import choose
from cupynorm.plan.config import BOUNDS, PLAIN, VARIANTS, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

H200 = RECORDED["h200"]
PROBLEM = Problem(4096, 1000, 8, 2, 4, (2, 2))
PROBLEMS = (
    PROBLEM,
    Problem(3, 1001, 1, 2, 4, (2,), 8, 1, 8),
    Problem(3, 1001, 1, 4, 4, (), 4, 2, 0),
    Problem(64, 65536, 2, 8, 8, (8, 8)),
    Problem(7, 1 << 20, 8, 2, 4, (4, 4)),
    Problem(
        512,
        777,
        1,
        2,
        4,
        (2, 2),
        8,
        1,
        8,
        fused=True,
        load_operands=(2,),
        output_bytes=2,
        direct_load=False,
        extra_registers=13,
    ),
)


def occupancy(plan: Plan) -> int:
    return plan.min_blocks * (H200.sm_count if plan.cluster > 1 else 1)


GOOD = choose(PROBLEM, H200, occupancy)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", [-1, 1 << 40, "8", None, 1.5, True, b"1", [8]], ids=repr)
def test_a_number_out_of_bounds_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, DoesNotFitError), match=rf"plan: {name} is .*(allowed|expected)"):
        choose(PROBLEM, H200, occupancy, dataclasses.replace(GOOD, **{name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "warp", "vectors": 1024, "group": 1}, "vectors is 1024, 1 to 128 is allowed"),
        ({"vector": 0}, "vector is 0, 1 to 16 is allowed"),
        ({"vectors": 0}, "vectors is 0, 1 to 128 is allowed"),
        ({"block": 0}, "block is 0, 32 to 1024 is allowed"),
        ({"block": 100}, "block is 100, a multiple of 32 is allowed"),
        ({"vector": 3}, "vector is 3, a power of two is allowed"),
        ({"vectors": 125, "group": 1}, "8 x 125 x 1, 128 elements of a thread are allowed"),
        ({"vectors": 8, "rows_per_group": 4}, "8 x 8 x 4, 128 elements of a thread are allowed"),
        (
            {"block": 1024, "min_blocks": 3},
            "1024 x 3, 2048 threads of a multiprocessor are allowed on h200",
        ),
        ({"variant": "fast"}, "variant is 'fast': use warp, block"),
        ({"variant": 3}, "variant is 3, a str is expected"),
        ({"full": 1}, "full is 1, a bool is expected"),
        ({"waves": "1"}, "waves is '1', a float is expected"),
        ({"waves": -0.5}, "waves is -0.5, 0 or more is allowed"),
        ({"waves": float("nan")}, "waves is nan, 0 or more is allowed"),
    ],
    ids=str,
)
def test_what_no_kernel_could_do_is_refused_with_what_is_allowed(changes: Any, message: str) -> None:
    with pytest.raises((TypeError, DoesNotFitError), match=message):
        choose(PROBLEM, H200, occupancy, dataclasses.replace(GOOD, **changes))


@pytest.mark.parametrize(
    ("parameters", "vectors", "most", "outputs"), [((), 5, 32, 1), ((2, 2), 6, 40, 1), ((2, 2), 9, 64, 2)]
)
def test_a_mask_has_a_bit_for_each_element_of_a_thread(
    parameters: tuple[int, ...], vectors: int, most: int, outputs: int
) -> None:
    """Ops with affine parameters are rarely masked."""
    plan = dataclasses.replace(GOOD, variant="warp", vectors=vectors, group=32, parameter_cache=0)
    problem = dataclasses.replace(PROBLEM, cols=256 * vectors, parameter_bytes=parameters, fused=True)
    problem = dataclasses.replace(problem, output_bytes=3 - outputs, outputs=outputs)

    with pytest.raises(DoesNotFitError, match=f"{most} elements of a thread are allowed where something"):
        choose(problem, H200, occupancy, plan)
    choose(
        dataclasses.replace(problem, cols=8 * 32 * (vectors - 1)),
        H200,
        occupancy,
        dataclasses.replace(plan, vectors=vectors - 1),
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: f"{each.rows} x {each.cols}")
def test_what_was_chosen_may_be_asked_for(problem: Problem) -> None:
    plan = choose(problem, H200, occupancy)

    again = choose(problem, H200, occupancy, plan)

    assert again.template == plan.template


def test_a_thread_holds_less_where_each_element_has_a_users_instructions() -> None:
    doubles = Problem(4096, 4096, 2, 8, 8, fused=True, output_bytes=8, direct_load=False, extra_registers=32)
    plan = dataclasses.replace(PLAIN, variant="block", vector=2, vectors=4, group=512, block=512)
    choose(doubles, H200, occupancy, dataclasses.replace(plan, rows_per_group=4))

    with pytest.raises(
        DoesNotFitError, match="2 x 4 x 8, 32 elements of a thread are allowed where something"
    ):
        choose(doubles, H200, occupancy, dataclasses.replace(plan, rows_per_group=8))


HALVES = Problem(29, 4097, 1, 2, 4, (2,), 8, 1, 8)  # rows of halves that begin anywhere


@pytest.mark.parametrize(
    ("cols", "changes"),
    [
        # the first threads of a group hold what is around the packs: 7 elements before and 7 behind
        (127, {"variant": "warp", "vectors": 2, "group": 8, "block": 128}),
        (96, {"variant": "warp", "vectors": 3, "group": 4, "block": 128}),
        # blocks that share a row meet among their warps in between
        (4097, {"variant": "split", "block": 32, "row_shared_bytes": 113664, "ctas_per_row": 2}),
        (4097, {"variant": "cluster", "vectors": 8, "group": 32, "block": 32, "ctas_per_row": 2}),
        (4097, {"variant": "cluster", "block": 32, "row_shared_bytes": 16384, "ctas_per_row": 2}),
    ],
)
def test_a_plan_that_the_kernel_asserts_against_is_refused_before_it_is_compiled(
    cols: int, changes: dict[str, Any]
) -> None:
    wanted = dataclasses.replace(PLAIN, vector=8, unaligned=1, **changes)

    with pytest.raises(DoesNotFitError):
        choose(dataclasses.replace(HALVES, cols=cols), H200, occupancy, wanted)


@pytest.mark.parametrize("known", [False, True], ids=["alone", "after the right one"])
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"vector": [8]}, r"plan: vector is \[8\], an int is expected"),
        ({"variant": ["warp"]}, r"plan: variant is \['warp'\], a str is expected"),
        ({"full": {}}, "plan: full is {}, a bool is expected"),
        (["warp"], r"plan is \['warp'\] \(a list\): give the name of a variant"),
        (3, r"plan is 3 \(an int\): give the name of a variant"),
    ],
    ids=str,
)
def test_a_plan_of_another_kind_is_named_in_a_call(
    simulated: Any, wanted: Any, message: str, known: bool
) -> None:
    x = simulated.cupy.asarray(np.ones((7, 40), np.float32))
    plan = choose(Problem(7, 40, 4, 4, 4), H200, occupancy)
    if known:
        cupynorm.softmax(x, plan=plan)
    wanted = dataclasses.replace(plan, **wanted) if isinstance(wanted, dict) else wanted

    for function in (cupynorm.softmax, lambda x, plan: cupynorm.softmax(x, scale=2.0, plan=plan)):
        with pytest.raises(TypeError, match=message):
            function(x, plan=wanted)


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 32, 64, 96, 128, 256, 512, 1000, 1024, 4096, 65536, 1 << 33]),
    st.integers(-2, 1 << 20),
)


@example(PROBLEM, "cached", {"rows_per_group": 2, "vectors": 16, "block": 64}, "split")
@example(PROBLEMS[2], None, {"rows_per_group": 2, "vectors": 16, "group": 16, "alignment_period": 0}, None)
@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(PROBLEMS),
    st.sampled_from([None, *VARIANTS]),
    st.dictionaries(st.sampled_from([*BOUNDS]), NUMBERS, min_size=1, max_size=4),
    st.sampled_from([None, *VARIANTS]),
)
def test_any_plan_is_refused_as_not_fitting_or_asks_for_a_bounded_kernel(
    problem: Problem, origin: str | None, changes: dict[str, int], variant: str | None
) -> None:
    try:
        plan = choose(problem, H200, occupancy, origin)
    except DoesNotFitError:
        return
    plan = dataclasses.replace(plan, **changes, **({"variant": variant} if variant else {}))
    begin = time.perf_counter()
    try:
        found = choose(problem, H200, occupancy, plan)
    except DoesNotFitError:
        found = None
    assert time.perf_counter() - begin < 1
    if found is not None:
        rows = found.rows_per_group  # row_together has all vectors of one row, or one vector of each
        held = max(found.vectors, rows) if found.kernel == "row_together" else found.vectors * rows
        assert found.vector * held * problem.compute_bytes <= 512
        assert 1 <= found.grid <= 2**31 - 1
        assert found.shared_bytes <= H200.shared_bytes_per_block
        if found.kernel == "row_registers" and found.unaligned:  # Registers' assertions in registers.cuh
            assert found.group >= 2 * found.vector - 2
            assert found.group * found.vector % 8 == 0
            assert not found.full


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 8, "vectors": 16, "block": 64},  # 7 elements before the first vector, and 7 behind the last
    ],
    ids=str,
)
def test_the_first_threads_of_an_unaligned_row_hold_what_is_around_its_vectors(
    changes: dict[str, int],
) -> None:
    problem = PROBLEMS[1]
    plan = choose(problem, H200, occupancy, "block")
    plan = dataclasses.replace(
        plan, variant="warp", rows_per_group=1, alignment_period=1, parameter_cache=0, stages=0, **changes
    )

    with pytest.raises(DoesNotFitError, match="cannot hold a row of 1001 columns"):
        choose(problem, H200, occupancy, plan)
