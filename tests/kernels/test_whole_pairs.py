"""Gradients of rows apart that wait as pairs, as loaded: on the simulator, against float64 of NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.invoke import row_ops
from cupynorm.lower.backward import LOG_SOFTMAX_BACKWARD
from cupynorm.plan.config import EVENLY, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.runtime import nvrtc
from tests import simulator
from tests.build_gate import code_of, compile_first_choices, compiled, nvdisasm
from tests.plan.test_pairs import of_norm, of_softmax, planned
from tests.sampling import in_pairs
from tests.simulator import cupy, simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
# columns; neighbouring rows and elements of a thread, threads side by side, threads of a block, blocks of a row
# (0: of the grid); how many tiles of such rows
TILINGS = {
    "one row, one element": (8, (1, 1, 8, 64, 1), 2),
    "a part that is shorter": (90, (2, 24, 8, 32, 1), 2),
    "a cluster": (250, (4, 16, 16, 128, 2), 2),
    "a cluster, one row": (120, (1, 32, 16, 64, 1), 2),
    "parts of one element": (101, (2, 13, 8, 64, 1), 2),
    "the grid": (400, (4, 12, 16, 64, 0), 14),
    "the grid, all elements": (384, (4, 12, 16, 64, 0), 14),
    "the grid, two blocks": (250, (2, 16, 8, 64, 0), 44),
}
CALLS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "layer_norm without gamma")


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    # few multiprocessors, so that blocks of the grid go through several tiles
    monkeypatch.setitem(RECORDED, "few", dataclasses.replace(RECORDED["h200"], sm_count=2))
    return simulator.install(monkeypatch, "few")


def plan_of(cols: int, numbers: tuple[int, ...], dtype: str) -> Plan:
    vector, elements, lanes, block, ctas = numbers
    group, size = block // lanes, dtype_of(dtype).itemsize
    elements = min(elements, {2: 96, 4: 32, 8: 16}[size] // vector)
    least = -(-cols // (elements * group))
    shared = least if ctas else max(2, least)
    variant = "" if ctas else "split"
    share = -(-cols // shared)
    plan = tiling_apart(vector, -(-share // group), lanes, block, shared, variant=variant)
    return dataclasses.replace(plan, vector=1) if size == 8 else plan


class Given:
    """Arrays of [outer, cols, inner]; a thread has all of its rows or none."""

    def __init__(self, cols: int, numbers: tuple[int, ...], tiles: int, dtype: str) -> None:
        kind, beside = dtype_of(dtype), numbers[0] * numbers[2]
        shape = (tiles // 2, cols, beside + 4)
        rng = np.random.default_rng(cols)
        self.dy = rng.standard_normal(shape).astype(kind)
        self.x = rng.standard_normal(shape).astype(kind)
        self.y = rng.uniform(0, 2 / cols, shape).astype(kind)
        self.gamma = rng.uniform(0.5, 2, cols).astype(kind)
        rows, compute = (shape[0], shape[2]), compute_dtype(kind, kind)
        self.mean, self.rstd = (
            rng.standard_normal(rows).astype(compute),
            rng.uniform(0.5, 2, rows).astype(compute),
        )

    def call(self, name: str, of: Any, **options: Any) -> Any:
        """Return the gradient along the middle axis. of: what becomes of each array first."""
        options["axis"] = 1
        dy, x, y, gamma, mean, rstd = map(of, (self.dy, self.x, self.y, self.gamma, self.mean, self.rstd))
        if name == "softmax":
            return cupynorm.softmax_backward(dy, y, **options)
        if name == "log_softmax":
            return cupynorm.log_softmax_backward(dy, x, **options)
        if name == "rms_norm":
            return cupynorm.rms_norm_backward(dy, x, gamma, rstd, parameters=False, **options)[0]
        gamma = None if name == "layer_norm without gamma" else gamma
        return cupynorm.layer_norm_backward(dy, x, gamma, mean, rstd, parameters=False, **options)[0]


def agrees(given: Given, name: str, plan: Plan, dtype: str, **options: Any) -> Plan:
    """Compare a call's result, and return its plan."""
    with row_ops.observed() as plans:
        found = cupy.asnumpy(given.call(name, cupy.asarray, plan=plan, **options))
    assert [each.waits for each in plans] == [EVENLY], plans
    wanted = given.call(name, lambda each: each.astype(np.float64))
    scale = float(np.abs(wanted).max())
    np.testing.assert_allclose(
        found.astype(np.float64), wanted, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale
    )
    return plans[0]


@pytest.mark.parametrize("case", in_pairs(TILINGS, DIGITS, CALLS), ids=" ".join)
def test_gradients(case: tuple[str, str, str]) -> None:
    name, dtype, call = case
    cols, numbers, tiles = TILINGS[name]
    plan = agrees(Given(cols, numbers, tiles, dtype), call, plan_of(cols, numbers, dtype), dtype)
    if plan.variant == "split":
        assert 2 * plan.grid <= tiles * plan.ctas_per_row  # blocks go on to further tiles


@pytest.mark.parametrize("place", ["dy", "y"])
@pytest.mark.parametrize("name", ["a cluster", "the grid, two blocks"])
def test_results_in_the_place_of_either_array(name: str, place: str) -> None:
    cols, numbers, tiles = TILINGS[name]
    given = Given(cols, numbers, tiles, "float16")
    wanted = given.call("softmax", lambda each: each.astype(np.float64))[:, :, : numbers[0] * numbers[2]]
    arrays = {
        each: cupy.asarray(getattr(given, each)[:, :, : wanted.shape[2]].copy()) for each in ("dy", "y")
    }
    found = cupynorm.softmax_backward(
        **arrays, axis=1, out=arrays[place], plan=plan_of(cols, numbers, "float16")
    )
    assert found is arrays[place]
    np.testing.assert_allclose(cupy.asnumpy(found).astype(np.float64), wanted, rtol=4e-3, atol=1e-5)


def test_operands_of_single_numbers_wait_where_blocks_of_the_grid_go_through_tiles() -> None:
    cols, numbers, tiles = TILINGS["the grid, two blocks"]
    given = Given(cols, numbers, tiles, "float16")
    for function in (cupynorm.add_layer_norm, cupynorm.add_rms_norm):
        wanted = function(given.x.astype(np.float64), given.dy.astype(np.float64), axis=1, return_sum=False)
        arrays = map(cupy.asarray, (given.x, given.dy))
        found = function(*arrays, axis=1, return_sum=False, plan=plan_of(cols, numbers, "float16"))
        np.testing.assert_allclose(cupy.asnumpy(found).astype(np.float64), wanted, rtol=4e-3, atol=4e-3)


def test_infinite_and_missing_numbers_stay_in_their_rows() -> None:
    cols, numbers, tiles = TILINGS["the grid, two blocks"]
    given = Given(cols, numbers, tiles, "float16")
    given.dy[0, 3, 0], given.dy[15, 5, 1], given.x[7, :, 2], given.x[-1, 0, 3] = (
        np.inf,
        np.nan,
        -np.inf,
        np.inf,
    )
    with np.errstate(invalid="ignore"):
        wanted = given.call("log_softmax", lambda each: each.astype(np.float64))
    found = given.call("log_softmax", cupy.asarray, plan=plan_of(cols, numbers, "float16"))
    found = cupy.asnumpy(found).astype(np.float64)
    assert np.isnan(wanted).sum() > cols
    np.testing.assert_allclose(found, wanted, rtol=4e-3, atol=4e-3 * float(np.abs(given.dy[1]).sum(0).max()))


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
def test_pairs_of_halves_take_a_register_each_and_none_is_spilled() -> None:
    specs = [
        of_softmax(16384),
        of_softmax(16384, "bfloat16", LOG_SOFTMAX_BACKWARD),
        of_norm(16384),
        of_norm(4096, "float32"),
    ]
    compile_first_choices([(spec, "h100", None) for spec in specs], "90")
    for spec in specs:
        plan = planned(spec.problem)
        kernel = compiled(spec, plan, "90")
        pairs = plan.vector * plan.vectors
        assert (plan.variant, pairs) == ("split", 32 if spec.problem.load_bytes == 4 else 64)
        assert (kernel.stack_bytes, kernel.registers <= 128) == (0, True)  # as numbers they took 128 alone


@pytest.mark.skipif(
    nvrtc.available(13) is None or nvdisasm() is None, reason="no NVRTC 13, or no disassembler"
)
@pytest.mark.parametrize("cols", [4096, 16384])
def test_blocks_of_the_grid_load_both_arrays_of_the_next_tile_as_they_store(cols: int) -> None:
    spec = of_softmax(cols, "float32")
    plan = planned(spec.problem)
    code = code_of(compiled(spec, plan, "90", 13), "90")
    assert plan.vector == 2
    # of the first tile, and of any next one, and one of a message; 3 of each element where y came with its tile
    assert code.accesses["LDG", 8] == 2 * 2 * plan.vectors + 1
