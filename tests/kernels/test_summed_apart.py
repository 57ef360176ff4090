"""Sums over rows in the pass that gives a norm's gradient along another axis: on the simulator, by the formulas."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.invoke import row_ops
from cupynorm.lower import row_groups
from cupynorm.lower.backward import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cupynorm.lower.gradients import Added, Normed, ParameterSums, norm_gradient
from cupynorm.lower.row_groups import row_groups_apart
from cupynorm.lower.sums import nowhere
from cupynorm.plan.config import EVENLY, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.rules import rules_of
from cupynorm.runtime import nvrtc
from tests import SLOW, simulator
from tests.build_gate import (
    begins_too_soon,
    chosen,
    code_of,
    compile_first_choices,
    endless_waits,
    stalls_a_cluster,
)
from tests.simulator import cupy, simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    # few rows in several groups of several tiles
    few = row_groups.NUMBERS._replace(apart_groups=[(8192, 3)], min_rows_apart=1)
    monkeypatch.setattr(row_groups, "NUMBERS", few)
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

    def found(self, **options: Any) -> tuple[tuple[Any, ...], Sequence[Plan]]:
        """Return what the device gives, as float64, and the plans of its kernels."""
        dy, x, gamma, mean, rstd = map(cupy.asarray, (self.dy, self.x, self.gamma, self.mean, self.rstd))
        float_gamma = gamma.astype(compute_dtype(self.x.dtype, self.x.dtype))  # whose gradient is not rounded
        with row_ops.observed() as plans:
            if self.rms:
                of: tuple[Any, ...] = cupynorm.rms_norm_backward(dy, x, float_gamma, rstd, axis=1, **options)
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


def tiling(vector: int, elements: int, lanes: int, block: int, ctas: int = 1, *, variant: str = "") -> Plan:
    return tiling_apart(vector, elements, lanes, block, ctas, variant=variant, waits=EVENLY)


def in_one_pass(plans: Sequence[Plan]) -> bool:
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
    # blocks of the grid; threads side by side of two warps, with neighbours of an odd number
    ((3, 190, 36), tiling(4, 6, 8, 64, 5, variant="split")),
    ((1, 45, 67), tiling(1, 6, 64, 256, 2)),
]


@pytest.mark.parametrize(
    ("shape", "plan", "dtype"),
    [
        (shape, plan, dtype)
        for at, (shape, plan) in enumerate(PLANS)
        for dtype in ([*DIGITS] if SLOW else [("float16", "float32")[at % 2]])
    ],
)
def test_dx_and_sums_in_one_pass_are_right(shape: tuple[int, int, int], plan: Plan, dtype: str) -> None:
    for rms in (False, True):
        given = Given(shape, dtype, rms=rms)
        if dtype == "float64":
            plan = dataclasses.replace(plan, vector=1)
        found, plans = given.found(plan=plan)
        assert in_one_pass(plans)
        assert plans[0].across == plan.across
        given.assert_right(found, given.expected())


@pytest.mark.parametrize(("shape", "plan"), PLANS[2:6:3])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_of_norms_of_sums_in_one_pass_are_right(
    dtype: str, shape: tuple[int, int, int], plan: Plan
) -> None:
    given = Given(shape, dtype)
    ds = np.random.default_rng(7).standard_normal(shape).astype(dtype)
    dy, x, gamma, mean, rstd, more = map(
        cupy.asarray, (given.dy, given.x, given.gamma.astype(np.float32), given.mean, given.rstd, ds)
    )
    bias = cupy.asarray(np.zeros(shape[1], np.float32))
    options: dict[str, Any] = {"axis": 1, "plan": plan, "alpha": 0.5}
    with row_ops.observed() as plans:
        found: tuple[Any, ...] = cupynorm.add_layer_norm_backward(
            dy, more, x, gamma, mean, rstd, bias=bias, **options
        )
    assert in_one_pass(plans)
    of_norm, dgamma, dbeta = given.expected()
    dx = of_norm + ds
    dx_found, dresidual, *sums_found = (each.get().astype(np.float64) for each in found)
    given.assert_right((dx_found, *sums_found), (dx, dgamma, dbeta, dx.sum((0, 2))))
    np.testing.assert_allclose(dresidual, dx / 2, rtol=DIGITS[dtype], atol=4 * DIGITS[dtype])

    with row_ops.observed() as plans:
        found = cupynorm.add_rms_norm_backward(dy, more, x, gamma, rstd, axis=1, plan=plan)
    assert in_one_pass(plans)
    rms = Given(shape, dtype, rms=True)
    rms.x, rms.rstd = given.x, given.rstd
    rms.mean = np.zeros_like(given.mean)
    of_norm, dgamma, _ = rms.expected()
    rms.assert_right(
        (found[0].get().astype(np.float64), found[2].get().astype(np.float64)), (of_norm + ds, dgamma)
    )


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        # threads draw for one another, words that begin anywhere in a block; or each for itself
        ((3, 190, 36), tiling(2, 6, 8, 64, 4, variant="split")),
        ((2, 12, 75), tiling(1, 6, 64, 128)),
    ],
)
def test_a_dropout_of_results_beside_sums_drops_what_it_drops_elsewhere(
    shape: tuple[int, int, int], plan: Plan
) -> None:
    given = Given(shape, "float32")
    arrays = given.dy, given.x, given.gamma, given.mean, given.rstd
    options: dict[str, Any] = {"axis": 1, "bias": np.zeros(shape[1], np.float32), "dropout": 0.3, "seed": 5}
    with row_ops.observed() as plans:
        dy, x, *of_rows = map(cupy.asarray, arrays)
        options["bias"] = cupy.asarray(options["bias"])
        found = cupynorm.add_layer_norm_backward(dy, None, x, *of_rows, plan=plan, **options)
    assert in_one_pass(plans)
    dy, x, *of_rows = arrays
    options["bias"] = options["bias"].get()
    for ours, theirs in zip(
        found, cupynorm.add_layer_norm_backward(dy, None, x, *of_rows, **options), strict=True
    ):
        np.testing.assert_allclose(ours.get(), theirs, rtol=2e-5, atol=2e-4)


def test_results_and_what_is_added_to() -> None:
    given = Given((2, 96, 72), "float16")
    dy, gamma, beta, rstd = map(cupy.asarray, (given.dy, given.gamma, given.beta, given.rstd))
    wide = (given.x - given.mean[:, None]).astype(np.float64) * given.rstd[:, None]
    y = (wide * given.gamma[:, None] + given.beta[:, None]).astype(np.float16)
    before = np.linspace(-3, 3, 96).astype(np.float32)
    total = cupy.asarray(before)
    with row_ops.observed() as plans:
        dx, dgamma, dbeta = cupynorm.layer_norm_backward_from_y(
            dy, cupy.asarray(y), gamma, beta, rstd, axis=1, add_to=(total, None)
        )
    assert in_one_pass(plans)
    # by what y was rounded to
    h = (y.astype(np.float64) - given.beta[:, None]) / given.gamma.astype(np.float64)[:, None]
    of_y, of_gamma, of_beta = given.expected(h / given.rstd[:, None] + given.mean.astype(np.float64)[:, None])
    assert dgamma is total
    given.assert_right((dx.get(), total.get()), (of_y, before + of_gamma))
    np.testing.assert_allclose(dbeta.get().astype(np.float64), of_beta, rtol=2e-3, atol=2e-3)


def test_bits_of_sums_do_not_depend_on_how_many_blocks_share_a_row() -> None:
    given, alone = Given((3, 192, 36), "float32"), tiling(2, 12, 8, 128)
    found, _ = given.found(plan=alone)
    for ctas in (2, 4):
        shared = dataclasses.replace(alone, variant="cluster", ctas_per_row=ctas, vectors=12 // ctas)
        others, plans = given.found(plan=shared)
        assert in_one_pass(plans)
        for ours, theirs in zip(found[1:], others[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("variant", ["cluster", "split"])
def test_bits_of_sums_do_not_depend_on_how_many_blocks_a_device_holds(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three tiles, in the first three of five groups: for some clusters or groups of blocks, which go on, or for five
    monkeypatch.setattr(row_groups, "NUMBERS", row_groups.NUMBERS._replace(apart_groups=[(8192, 5)]))
    given, plan = Given((1, 800, 88), "float32"), tiling(2, 13, 16, 256, 4, variant=variant)
    plan, bits = dataclasses.replace(plan, min_blocks=6), set()
    for sms in (1, 132):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(RECORDED, "few", dataclasses.replace(RECORDED["h200"], sm_count=sms))
            simulator.install(patch, "few")
            found, plans = given.found(plan=plan)
        assert (plans[0].grid < 20) == (sms == 1)
        bits.add(tuple(each.tobytes() for each in found))
    assert len(bits) == 1


def test_other_rows_take_a_pass_of_their_own() -> None:
    # as of a few columns of single halves
    given = Given((3, 40, 19), "float16")
    found, plans = given.found()
    assert not in_one_pass(plans)
    given.assert_right(found, given.expected())
    given = Given((2, 96, 72), "float32")
    found, plans = given.found(plan="uncached")
    assert not in_one_pass(plans)
    given.assert_right(found, given.expected())


def test_a_forced_tiling_without_an_element_for_each_thread_takes_a_pass_of_its_own() -> None:
    given = Given((2, 8, 40), "float32")
    found, plans = given.found(plan=tiling(2, 1, 4, 64))
    assert not in_one_pass(plans)
    given.assert_right(found, given.expected())


def spec_of(shape: tuple[int, int, int], dtype: str, form: str) -> Any:
    """Lower a gradient with all its sums along the middle axis: of a form in COMPILED."""
    (outer, cols, inner), kind = shape, dtype_of(dtype)
    compute = compute_dtype(kind, kind)
    size, wide, whole = kind.itemsize, compute.itemsize, (outer, inner, cols)

    def large(at: int) -> View:
        return View(at << 30, whole, (cols * inner * size, size, inner * size), kind)

    def per_row(at: int) -> View:
        return View(at << 30, whole, (inner * wide, wide, 0), compute)

    def column(at: int) -> View:
        return View(at << 30, whole, (0, 0, size), kind)

    rms, from_y, adds, drops = (form == each for each in ("rms_norm", "from_y", "add_layer_norm", "dropout"))
    mean = None if rms or from_y else per_row(4)
    what = Normed(large(1), large(2), column(3), column(8) if from_y else None, mean, per_row(5), from_y)
    groups = row_groups_apart(outer * inner, cols)
    place = nowhere(groups.groups, cols, compute)
    places = ParameterSums(groups, place, None if rms else place, place if adds else None)
    added = Added(large(6), 0.5, None, large(9)) if adds else None
    added = Added(None, 1.0, Dropout(0.1, 5, 0), large(9)) if drops else added
    op = RMS_NORM_BACKWARD if rms else LAYER_NORM_BACKWARD
    return norm_gradient(op, what, large(7), 1, compute, added, places)


DEVICES = {"90": "h200", "80": "a100"}
COMPILED = [
    ((16, 21, 4096), "float16", "layer_norm", "90"),
    ((16, 40, 4096), "bfloat16", "rms_norm", "90"),
    ((16, 96, 4096), "float16", "from_y", "90"),
    ((16, 96, 4096), "float16", "add_layer_norm", "90"),
    ((16, 96, 4098), "float16", "layer_norm", "90"),
    ((16, 768, 4096), "float16", "layer_norm", "90"),
    ((16, 1000, 4096), "bfloat16", "layer_norm", "90"),
    ((16, 192, 4096), "float32", "layer_norm", "90"),
    ((16, 192, 4096), "float16", "from_y", "90"),
    ((16, 300, 4096), "float32", "add_layer_norm", "90"),
    ((16, 1000, 4096), "float32", "from_y", "90"),
    ((16, 96, 4097), "float32", "rms_norm", "90"),
    ((16, 96, 4096), "float64", "layer_norm", "90"),
    ((16, 3000, 1024), "float16", "layer_norm", "90"),
    ((16, 4096, 1024), "float16", "dropout", "90"),
    ((16, 768, 361), "float16", "rms_norm", "90"),
    ((16, 96, 4096), "float16", "layer_norm", "80"),
    ((16, 40, 4096), "float32", "add_layer_norm", "80"),
]


@functools.cache
def compile_all_together() -> None:
    for arch, device in DEVICES.items():
        specs = (spec_of(*call) for *call, on in COMPILED if on == arch)
        compile_first_choices(((spec, device, None) for spec in specs), arch, 13)


@pytest.mark.skipif(nvrtc.available(13) is None, reason="no NVRTC 13")
@pytest.mark.parametrize(("shape", "dtype", "form", "arch"), COMPILED)
def test_plans_keep_their_numbers_in_registers(
    shape: tuple[int, int, int], dtype: str, form: str, arch: str
) -> None:
    compile_all_together()
    plan, kernel = chosen(spec_of(shape, dtype, form), DEVICES[arch], arch, major=13)
    assert plan.block * plan.min_blocks >= 256  # threads of a multiprocessor
    assert kernel.stack_bytes <= rules_of(arch).apart.few_local_bytes * (form == "from_y" or shape[1] > 1536)
    code = code_of(kernel, arch)
    assert not begins_too_soon(code, arch)
    assert not stalls_a_cluster(code, arch)
    assert not endless_waits(kernel)
