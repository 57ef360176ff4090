"""Sums over rows in the pass that gives a norm's gradient along another axis, on the simulator, against the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.invoke import row_ops
from cupynorm.lower import sums
from cupynorm.plan.config import EVENLY, PLAIN, DoesNotFitError, Plan
from tests import SLOW, simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    # few rows in several groups of several tiles
    few = {"apart_groups": [[8192, 3]], "min_rows_apart": 1}
    monkeypatch.setattr(sums, "NUMBERS", sums.NUMBERS._replace(**few))
    return simulated


class Given:
    """Arrays of [outer, cols, inner], normalised along the middle axis, and what the formulas give of them."""

    def __init__(self, shape: tuple[int, int, int], dtype: str, *, rms: bool = False) -> None:
        rng, kind = np.random.default_rng(sum(shape)), dtype_of(dtype)
        compute = compute_dtype(kind, kind)
        self.rms, self.dtype = rms, dtype
        self.dy, self.x = (rng.standard_normal(shape).astype(kind) for _ in range(2))
        self.gamma, self.beta = (rng.uniform(0.5, 2, shape[1]).astype(kind) for _ in range(2))
        wide = self.x.astype(np.float64)
        self.mean = (wide.mean(1) * (not rms)).astype(compute)
        self.rstd = (1 / np.sqrt((wide * wide).mean(1) if rms else wide.var(1))).astype(compute)

    def expected(self, x: Any = None) -> tuple[Any, ...]:
        """Return dx, dgamma and dbeta. x: what was normalised, if it is not self.x."""
        dy, gamma = self.dy.astype(np.float64), self.gamma.astype(np.float64)[:, None]
        h = ((self.x if x is None else x) - self.mean.astype(np.float64)[:, None]) * self.rstd[:, None]
        g = dy * gamma
        of_g = 0.0 if self.rms else g.mean(1, keepdims=True)
        dx = self.rstd[:, None] * (g - of_g - h * (g * h).mean(1, keepdims=True))
        return dx, (dy * h).sum((0, 2)), dy.sum((0, 2))

    def found(self, **options: Any) -> tuple[tuple[Any, ...], list[Plan]]:
        """Return what the device gives, as float64, and the plans of its kernels."""
        dy, x, gamma, mean, rstd = map(cupy.asarray, (self.dy, self.x, self.gamma, self.mean, self.rstd))
        float_gamma = gamma.astype(compute_dtype(self.x.dtype, self.x.dtype))  # whose gradient is not rounded
        with row_ops.observed() as plans:
            if self.rms:
                of = cupynorm.rms_norm_backward(dy, x, float_gamma, rstd, axis=1, **options)
            else:
                of = cupynorm.layer_norm_backward(dy, x, float_gamma, mean, rstd, axis=1, **options)
        return tuple(None if each is None else each.get().astype(np.float64) for each in of), plans

    def assert_right(self, found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
        dx, *of_parameters = found
        digits, exact = DIGITS[self.dtype], 1e-12 if self.dtype == "float64" else 2e-5
        np.testing.assert_allclose(dx, expected[0], rtol=digits, atol=4 * digits)
        rows = self.x.size / self.x.shape[1]
        for ours, reference in zip(of_parameters, expected[1:], strict=False):
            np.testing.assert_allclose(ours, reference, rtol=exact, atol=exact * np.sqrt(rows) * 4)


def tiling(vector: int, elements: int, lanes: int, block: int, ctas: int = 1) -> Plan:
    return dataclasses.replace(
        PLAIN,
        variant="cluster" if ctas > 1 else "block",
        vector=vector,
        vectors=elements,
        group=block // lanes,
        across=lanes,
        block=block,
        ctas_per_row=ctas,
        waits=EVENLY,
    )


def in_one_pass(plans: list[Plan]) -> bool:
    """Say whether sums were taken with dx: then there is one kernel with a plan."""
    return len(plans) == 1


# one element, one warp, whole and uneven shares of threads and of a cluster's blocks, and the last tile with rows for
# some threads only; a tile that reaches into the next outer index
PLANS = [
    ((2, 8, 20), tiling(4, 1, 4, 32)),
    ((3, 21, 24), tiling(2, 6, 8, 32)),
    ((2, 96, 72), tiling(4, 12, 4, 32)),
    ((5, 93, 28), tiling(2, 6, 8, 128)),
    ((2, 130, 40), tiling(1, 9, 8, 128)),
    ((2, 192, 36), tiling(4, 6, 4, 64, 2)),
    ((3, 190, 36), tiling(2, 13, 8, 64, 2)),
    ((2, 50, 50), tiling(2, 4, 16, 64, 4)),
]


@pytest.mark.parametrize(("shape", "plan"), PLANS)
@pytest.mark.parametrize("dtype", [*DIGITS] if SLOW else ["float16", "float32"])
def test_dx_and_sums_in_one_pass_are_right(
    dtype: str, shape: tuple[int, int, int], plan: Plan
) -> None:
    for rms in (False, True):
        given = Given(shape, dtype, rms=rms)
        if dtype == "float64":
            plan = dataclasses.replace(plan, vector=1)
        found, plans = given.found(plan=plan)
        assert in_one_pass(plans)
        assert plans[0].across == plan.across
        given.assert_right(found, given.expected())
