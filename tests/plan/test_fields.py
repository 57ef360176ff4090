"""Plans of ops whose elements are several numbers: they ask for the registers and the shared memory of all of them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import (
    MAX_FUSED_THREAD_BYTES,
    PLAIN,
    ROOM_BYTES,
    ROOM_ROWS,
    VARIANTS,
    DoesNotFitError,
    Plan,
    room_bytes,
)
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.partition import computed_bytes, words
from cupynorm.plan.problem import Problem
from tests.build_gate import GRADIENTS, ODD_COLS, WHOLE_COLS

WIDTHS = [*(1 << power for power in range(0, 25, 4)), 77, 1001, 1 << 24, (1 << 17) + 1]


def planned(problem: Problem, device: str, variant: str | Plan | None) -> Plan:
    return choose(problem, RECORDED[device], lambda plan: max(1, plan.min_blocks), variant)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "kind", ["softmax backward, causal", "layer_norm backward", "cross_entropy", "logsumexp"]
)
def test_every_width_has_a_plan_whose_numbers_fit(kind: str, dtype: str) -> None:
    for base, cols in itertools.product((WHOLE_COLS, ODD_COLS), WIDTHS):
        lowered = GRADIENTS[kind].spec(dtype, base).problem
        problem = dataclasses.replace(lowered, rows=300, cols=cols, vector=math.gcd(lowered.vector, cols))
        assert problem.fields == (1 if kind == "logsumexp" else 2)
        for device, variant in itertools.product(("h200", "t4"), (None, *VARIANTS)):
            try:
                plan = planned(problem, device, variant)
            except DoesNotFitError:
                assert variant is not None
                continue
            held = plan.vector * plan.vectors * plan.rows_per_group * problem.value_bytes
            assert held <= MAX_FUSED_THREAD_BYTES
            assert plan.shared_bytes <= RECORDED[device].shared_bytes_per_block
            again = planned(problem, device, plan)  # and is accepted when it is asked for
            assert dataclasses.replace(again, why="", rule="") == dataclasses.replace(plan, why="", rule="")


def test_two_numbers_take_twice_the_room_of_one() -> None:
    two = dataclasses.replace(GRADIENTS["softmax backward"].spec("float16", WHOLE_COLS).problem, cols=4096)
    one = dataclasses.replace(two, fields=1)

    assert words(two, 8, cached=False) == 2 * words(one, 8, cached=False) == 16
    assert computed_bytes(two, 8) == 2 * computed_bytes(one, 8) - 512  # of a mask's bits, which may be there


def test_the_grid_shares_rows_of_which_nothing_is_stored_where_messages_have_room() -> None:
    problem = dataclasses.replace(
        GRADIENTS["logsumexp"].spec("float32", WHOLE_COLS).problem, rows=1, cols=1 << 22
    )

    plan = planned(problem, "h200", None)

    assert (plan.variant, plan.kernel) == ("split", "row_reread")
    assert plan.grid >= RECORDED["h200"].sm_count
    without = dataclasses.replace(problem, outputs=0)
    assert planned(without, "h200", None).variant != "split"
    with pytest.raises(DoesNotFitError):
        planned(without, "h200", "split")


@pytest.mark.parametrize("device", RECORDED)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_messages_of_any_plan_fit_their_room(device: str, rows: int) -> None:
    lowered = GRADIENTS["logsumexp"].spec("float16", WHOLE_COLS).problem
    for cols, vector in itertools.product((127, 128, 1000, 4096, 1 << 17, 1 << 26), (1, 8)):
        problem = dataclasses.replace(lowered, rows=rows, cols=cols, vector=vector)
        for block, min_blocks in ((128, 16), (256, 8), (512, 1)):
            forced = dataclasses.replace(
                PLAIN, variant="split", vector=vector, block=block, min_blocks=min_blocks
            )
            try:
                plan = planned(problem, device, forced)
            except DoesNotFitError:
                continue
            at_once = min(rows, ROOM_ROWS)
            assert at_once * plan.ctas_per_row * ROOM_BYTES <= room_bytes(rows, cols)
