"""Unaligned rows with sums over rows beside them whose first and last vectors are cut, on the simulator."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.plan.choose import choose
from cupynorm.plan.config import CUT, IN_REGISTERS, DoesNotFitError
from cupynorm.plan.limits import RECORDED
from cupynorm.tools import bench
from cupynorm.tools.results import Point
from tests.kernels.test_summed import (  # noqa: F401  and fixtures
    Given,
    assert_right,
    plan_of,
    run,
    small_groups,
    twins,
)
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

# rows, columns, elements before each row, vectors of a thread, threads of a row and of a block, blocks of a cluster
CUTS = [
    (40, 1001, 0, 2, 64, 128, 1),
    (23, 1001, 3, 2, 64, 64, 1),
    (17, 3051, 1, 2, 64, 64, 4),
    (33, 300, 5, 2, 32, 128, 1),
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("small_groups")
def test_vectors_that_begin_before_a_row_or_end_behind_it(cut: tuple[int, ...]) -> None:
    """What is beside a row in memory is neither added up nor overwritten: that is the next row, or nan."""
    rows, cols, skip, vectors, group, block, ctas = cut
    for dtype, ds in (("float16", True), ("float32", False)):
        given = Given.of(rows, cols // (1 if dtype == "float16" else 2) | 1, dtype, skip)
        for each in (given.dy, given.x, given.ds):
            if skip:
                each.base[:, :skip] = np.nan
        plan = plan_of(rows, given.x.shape[1], dtype, "cluster" if ctas > 1 else "block", ds, True)
        if not plan.unaligned:
            continue  # short rows of floats are moved one by one
        how = {"vectors": vectors, "group": group, "block": block, "ctas_per_row": ctas}
        found = run(given, dataclasses.replace(plan, **how, stages=1, waits=CUT, min_blocks=1), ds=ds)

        assert found.plan.waits == CUT
        assert_right(given, found, dtype, ds=ds)


def test_a_row_that_has_no_place_for_another_vector_is_not_cut() -> None:
    """Nor are rows cut of which a block has several."""
    limits = RECORDED["h200"]
    for cols, places, waits in (
        (7001, 896, CUT),
        (8191, 1024, IN_REGISTERS),
        (1001, 128, IN_REGISTERS),
    ):
        problem = bench.lowered(Point("layer_norm_backward", "float16", 49152, cols), limits=limits).problem
        plan = choose(problem, limits, lambda each: each.min_blocks)
        assert (plan.vectors * plan.group, plan.waits) == (places, waits)
        full = (cols + 14) // 8 > places
        with pytest.raises(DoesNotFitError) if full else contextlib.nullcontext():
            choose(problem, limits, lambda each: each.min_blocks, dataclasses.replace(plan, waits=CUT))


@pytest.mark.parametrize("other", ["x", "gamma"])
def test_where_an_array_cannot_be_cut_elements_beside_vectors_are_taken_one_by_one(other: str) -> None:
    """x is aligned otherwise than dy and dx, or gamma's elements are no neighbours: the plan does not know of it."""
    given = Given.of(9, 1001, "float16")
    dy, mean, rstd = (cupy.asarray(each) for each in (given.dy, given.mean, given.rstd))
    room = cupy.asarray(np.zeros(9 * 1001 + 3, np.float16))
    x = room[3:].reshape(9, 1001) if other == "x" else cupy.empty((9, 1001), np.float16)
    x[...] = cupy.asarray(given.x)
    gamma = cupy.asarray(np.repeat(given.gamma, 2))[::2] if other == "gamma" else cupy.asarray(given.gamma)

    plan = plan_of(9, 1001, "float16", "block", False, True)
    plan = dataclasses.replace(plan, vectors=2, group=64, block=64, stages=1, waits=CUT, min_blocks=1)

    with row_ops.observed() as plans:
        found = cupynorm.layer_norm_backward(dy, x, gamma, mean, rstd, plan=plan)

    assert plans[-1].waits == CUT
    expected = cupynorm.layer_norm_backward(given.dy, given.x, given.gamma, given.mean, given.rstd)
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.get(), reference, rtol=4e-3, atol=4e-3)
