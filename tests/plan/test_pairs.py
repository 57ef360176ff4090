"""Gradients of rows that lie apart: which of them wait as pairs as they were loaded, and how many a thread has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.call.masks import Mask
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.lower.backward import LAYER_NORM_BACKWARD, LOG_SOFTMAX_BACKWARD, SOFTMAX_BACKWARD
from cupynorm.lower.gradients import Normed, norm_gradient, softmax_gradient
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.choose import choose
from cupynorm.plan.config import EVENLY, PARTS_ACROSS, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem

NEIGHBOURS = 1024


def view(cols: int, dtype: str, *, apart: bool = True, outer: int = 64, neighbours: int = NEIGHBOURS) -> View:
    """Return x's view of outer x cols x neighbours, with the middle axis last, or that with its rows contiguous."""
    kind = dtype_of(dtype)
    strides = (cols * neighbours, 1, neighbours) if apart else (cols * neighbours, cols, 1)
    return View(0, (outer, neighbours, cols), tuple(kind.itemsize * each for each in strides), kind)


def of_softmax(cols: int, dtype: str = "float16", op: Any = SOFTMAX_BACKWARD, **options: Any) -> KernelSpec:
    shape = {name: options.pop(name) for name in ("apart", "outer", "neighbours") if name in options}
    x = view(cols, dtype, **shape)
    given = {"mask": None, "dropout": None, **options}
    return softmax_gradient(
        op, x, x, (x,), 1, compute_dtype(x.dtype, x.dtype), given["mask"], given["dropout"]
    )


def of_norm(cols: int, dtype: str = "float16", *, from_result: bool = False, **shape: Any) -> KernelSpec:
    x = view(cols, dtype, **shape)
    neighbours = x.shape[1]
    compute = compute_dtype(x.dtype, x.dtype)
    of_rows = x._replace(strides=(neighbours * 4, 4, 0), dtype=compute)
    gamma = x._replace(strides=(0, 0, x.dtype.itemsize))
    return norm_gradient(
        LAYER_NORM_BACKWARD, Normed(x, x, gamma, None, of_rows, of_rows, from_result), x, 1, compute
    )


def planned(problem: Problem, forced: str | None = None, device: str = "h100") -> Plan:
    return choose(problem, RECORDED[device], lambda plan: plan.min_blocks, forced)


def test_pairs_wait_that_take_few_steps_from_two_arrays() -> None:
    cols = 4096
    masked = Mask((64, NEIGHBOURS, cols), 1, lengths=np.zeros((64, NEIGHBOURS), np.int32))
    waiting = [of_softmax(cols), of_softmax(cols, op=LOG_SOFTMAX_BACKWARD), of_norm(cols)]
    others = [
        of_softmax(cols, apart=False),
        of_softmax(cols, mask=masked),
        of_softmax(cols, dropout=Dropout(0.1, 7, 0)),
        of_norm(cols, from_result=True),  # with a division
    ]

    assert [each.problem.holds_operands for each in waiting] == [True] * 3
    assert [each.problem.holds_operands for each in others] == [False] * 4


@pytest.mark.parametrize("lowered", [of_softmax, of_norm])
@pytest.mark.parametrize("cols", [3000, 4096, 10000, 16384])
def test_half_as_many_blocks_share_rows_of_halves_that_wait_as_they_were_loaded(
    lowered: Any, cols: int
) -> None:
    halves, floats = (planned(lowered(cols, dtype).problem) for dtype in ("float16", "float32"))

    assert (halves.variant, halves.waits) == ("split", EVENLY)
    assert halves.vectors % PARTS_ACROSS == 0  # computed in equal parts
    assert halves.vector * halves.vectors > floats.vector * floats.vectors


MANY = 160  # outer rows: tiles for each group of blocks to go through
FEWEST = {  # columns from which on blocks of the grid share a row, in place of a cluster's
    ("softmax", "float16"): 1025,
    ("softmax", "float32"): 1281,
    ("norm", "float16"): 897,
    ("norm", "float32"): 1281,
}


@pytest.mark.parametrize(("op", "dtype"), FEWEST)
def test_blocks_of_the_grid_share_pairs_of_more_columns_than_a_few_clusters_hold(op: str, dtype: str) -> None:
    lowered, fewest = {"softmax": of_softmax, "norm": of_norm}[op], FEWEST[op, dtype]
    below = planned(lowered(fewest - 1, dtype, outer=MANY).problem)

    assert below.variant == "cluster"
    for cols in (fewest, 1500, 2048, 2049, 4096):
        plan = planned(lowered(cols, dtype, outer=MANY).problem)

        assert (plan.variant, plan.waits) == ("split", EVENLY)
        assert plan.vectors == 16  # elements of each row, so that few blocks share it: more would spill


@pytest.mark.parametrize("lowered", [of_softmax, of_norm])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        {"outer": 2},  # fewer tiles than make it worth while
        {"neighbours": 1001},  # fewer rows of a thread
        {"outer": 2000, "neighbours": 32},  # less than 256 bytes side by side
    ],
)
def test_other_pairs_of_as_many_columns_stay_in_clusters(lowered: Any, dtype: str, shape: Any) -> None:
    assert planned(lowered(1500, dtype, **{"outer": MANY, **shape}).problem).variant == "cluster"


def test_pairs_are_shared_over_the_grid_later_where_there_are_no_clusters() -> None:
    below, above = (planned(of_softmax(cols, outer=MANY).problem, device="a100") for cols in (2048, 2049))

    assert below.variant != above.variant == "split"
