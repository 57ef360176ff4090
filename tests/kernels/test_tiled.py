"""Narrow rows without gaps, which come and go as one stretch of memory: on the simulator, beside float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.plan.choose import choose
from cupynorm.plan.config import DoesNotFitError
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from tests import simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

RANDOM = np.random.default_rng(82)
ULPS = {"float16": 2e-3, "float32": 2e-6}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def drawn(*shape: int, dtype: str) -> Any:
    return (RANDOM.standard_normal(shape) * 2 + 1).astype(dtype)


def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
    wide = x.astype(np.float64)
    return (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * gamma + beta


def close(found: Any, wanted: Any, dtype: str) -> None:
    np.testing.assert_allclose(found.get().astype(np.float64), wanted, rtol=ULPS[dtype], atol=4 * ULPS[dtype])


def tile_of(x: Any) -> Any:
    """Return the plan of a LayerNorm with both parameters."""
    ones = cupy.asarray(np.ones(x.shape[1], x.dtype))
    with row_ops.observed() as plans:
        cupynorm.layer_norm(cupy.asarray(x), ones, ones)
    return plans[-1]


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (1, 5, "float16"),  # less than a block's rows, and no whole access at the end
        (37, 33, "float16"),
        (64, 77, "float16"),  # whole blocks
        (35, 78, "float16"),  # vectors of two elements
        (70, 20, "float16"),  # of four
        (23, 77, "float32"),
        (41, 6, "float32"),
    ],
)
def test_ops(rows: int, cols: int, dtype: str) -> None:
    x, gamma, beta = drawn(rows, cols, dtype=dtype), drawn(cols, dtype=dtype), drawn(cols, dtype="float32")
    on_device = cupy.asarray(x)

    with row_ops.observed() as plans:
        y, mean, rstd = cupynorm.layer_norm(
            on_device, cupy.asarray(gamma), cupy.asarray(beta), return_stats=True
        )
        tile = plans[-1]
        soft = cupynorm.softmax(on_device, plan=tile)
        cupynorm.rms_norm(on_device, cupy.asarray(gamma), eps=1e-5, out=on_device, plan=tile)

    assert {plan.kernel for plan in plans} == {"row_tiled"}
    wide = x.astype(np.float64)
    close(y, layer_norm(x, gamma.astype(np.float64), beta.astype(np.float64)), dtype)
    np.testing.assert_allclose(mean.get(), wide.mean(-1), atol=1e-5)
    np.testing.assert_allclose(rstd.get(), 1 / np.sqrt(wide.var(-1) + 1e-5), rtol=1e-4)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    close(soft, powers / powers.sum(-1, keepdims=True), dtype)
    close(on_device, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * gamma, dtype)


@pytest.mark.parametrize("group", [1, 2, 8, 32])
def test_any_number_of_lanes(group: int) -> None:
    x = drawn(29, 77, dtype="float16")
    on_device = cupy.asarray(x)
    with row_ops.observed() as plans:
        cupynorm.softmax(on_device)
    plan = dataclasses.replace(
        plans[-1], group=group, vectors=-(-77 // group), block=max(32, 8 * group), min_blocks=1
    )

    with row_ops.observed() as plans:
        found = cupynorm.softmax(on_device, plan=plan)

    assert (plans[-1].kernel, plans[-1].group) == ("row_tiled", group)
    powers = np.exp(x.astype(np.float64))
    close(found, powers / powers.sum(-1, keepdims=True), "float16")


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"), [(37, 33, "float16"), (1, 5, "float16"), (23, 77, "float32")]
)
def test_what_lies_behind_the_last_result_stays(rows: int, cols: int, dtype: str) -> None:
    x = drawn(rows, cols, dtype=dtype)
    room = cupy.asarray(np.full(x.size + 16, 7, dtype))

    with row_ops.observed() as plans:
        cupynorm.layer_norm(cupy.asarray(x), out=room[: x.size].reshape(x.shape), plan=tile_of(x))

    assert plans[-1].kernel == "row_tiled"
    np.testing.assert_array_equal(room.get()[x.size :], 7)
    close(room[: x.size].reshape(x.shape), layer_norm(x, 1, 0), dtype)


@pytest.mark.parametrize("where", ["a gap", "an odd address", "results with a gap"])
def test_rows_with_gaps_are_moved_one_by_one(where: str) -> None:
    x = drawn(20, 77, dtype="float16")
    room = cupy.asarray(np.zeros((20, 88), np.float16))
    at = {"a gap": (slice(None), slice(77)), "an odd address": (slice(None), slice(77))}
    given = cupy.asarray(x)
    out = None
    if where == "results with a gap":
        out = room[:, :77]
    elif where == "a gap":
        given = room[at[where]]
        given[:] = x
    else:
        flat = cupy.asarray(np.zeros(1 + x.size, np.float16))
        given = flat[1:].reshape(x.shape)
        given[:] = x

    with row_ops.observed() as plans:
        found = cupynorm.softmax(given, out=out)

    assert plans[-1].kernel == "row_registers"
    powers = np.exp(x.astype(np.float64))
    close(found, powers / powers.sum(-1, keepdims=True), "float16")


H200 = RECORDED["h200"]


def planned(cols: int, load_bytes: int = 2, parameters: int = 2, **given: Any) -> Any:
    widest = 16 // load_bytes
    vector = int(np.gcd(cols, widest))
    lies = {} if vector == widest else {"widest_vector": widest, "unaligned": 1, "alignment_period": 8}
    problem = Problem(
        49152, cols, vector, load_bytes, 4, (load_bytes,) * parameters, **{"adjoining": True, **lies, **given}
    )
    return choose(problem, H200, lambda plan: plan.min_blocks)


def test_rows_of_whole_accesses_and_wide_rows_are_not_tiled() -> None:
    assert planned(77).kernel == "row_tiled"
    assert planned(80).kernel == "row_registers"
    assert planned(77, adjoining=False).kernel == "row_registers"
    assert planned(1001).kernel == "row_registers"


def test_a_tile_is_in_whole_accesses() -> None:
    for cols in range(1, 120):
        for load_bytes in (2, 4):
            plan = planned(cols, load_bytes)
            if plan.kernel != "row_tiled":
                continue
            rows = plan.block // plan.group
            assert plan.row_shared_bytes == rows * cols * load_bytes
            assert plan.row_shared_bytes % 16 == 0
            assert plan.shared_bytes - plan.row_shared_bytes in range(8 * cols, 8 * cols + 16)
            assert plan.grid * rows >= 49152 > (plan.grid - 1) * rows


@pytest.mark.parametrize(
    "change",
    [{"vectors": 9}, {"block": 96}, {"parameter_cache": 1}, {"vector": 2, "vectors": 5}, {"stages": 1}],
)
def test_plans_that_the_kernel_would_do_wrong_are_refused(change: dict[str, int]) -> None:
    plan = dataclasses.replace(planned(77), **change)
    problem = Problem(49152, 77, 1, 2, 4, (2, 2), 8, 1, 8, adjoining=True)

    with pytest.raises(DoesNotFitError, match="cannot hold"):
        choose(problem, H200, lambda plan: plan.min_blocks, plan)
