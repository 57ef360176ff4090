"""A share of a device (a green context, a client of MPS) may refuse to run all blocks of a kernel at once."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.plan.choose import choose
from cupynorm.plan.config import Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.runtime import devices
from tests import simulator
from tests.simulator import simulated
from tests.simulator.machine import machine

__all__ = ["simulated"]  # a fixture

TOO_LARGE, NOT_SUPPORTED = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "CUDA_ERROR_NOT_SUPPORTED"
# "split" on a device without clusters, and clusters that claim their rows on one with them
SPLIT, CLAIMS = (1, 300_000), (7, 8193)


def rows(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def normed(x: Any, **given: Any) -> Any:
    """Return LayerNorm of x, with parameters of its dtype."""
    xp = simulator.cupy
    cols = x.shape[-1]
    return cupynorm.layer_norm(x, xp.asarray(rows((1, cols))[0]), xp.asarray(rows((1, cols))[0]), **given)


def planned() -> list[Plan]:
    return [found.plan for found in row_ops._launches.values()]


def refuse_clusters(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver refuse every launch in clusters."""
    cluster = simulated.driver._cluster

    def refuse(function: Any, grid: Any) -> int:
        width: int = cluster(function, grid)
        if width > 1:
            raise simulated.driver.CUDADriverError(
                "CUDA_ERROR_INVALID_CLUSTER_SIZE: cluster misconfiguration"
            )
        return width

    monkeypatch.setattr(simulated.driver, "_cluster", refuse)


@pytest.mark.parametrize("status", [TOO_LARGE, NOT_SUPPORTED])
@pytest.mark.parametrize(("device", "shape"), [("a100", SPLIT), ("h200", CLAIMS)])
def test_rows_that_blocks_share_are_computed_without_waiting(
    monkeypatch: pytest.MonkeyPatch, device: str, shape: tuple[int, int], status: str
) -> None:
    simulated = simulator.install(monkeypatch, device)
    x = simulated.cupy.asarray(rows(shape))
    usual = normed(x)
    assert [plan.cooperative for plan in planned()] == [True]
    row_ops.forget()
    machine.share_refusal = status

    with pytest.warns(UserWarning, match="at once .*green context or with MPS") as told:
        y = normed(x)

    asnumpy = simulated.cupy.asnumpy
    np.testing.assert_allclose(asnumpy(y), asnumpy(usual), rtol=2e-3, atol=1e-3)
    assert [plan.cooperative for plan in planned()] == [False]
    assert len(told) == 1


def test_what_was_refused_is_said_and_tried_once(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = simulated.cupy.asarray(rows(CLAIMS))
    machine.share_refusal = TOO_LARGE
    tried: list[Any] = []
    original = simulated.driver.launchCooperativeKernel
    monkeypatch.setattr(
        simulated.driver, "launchCooperativeKernel", lambda *given: tried.append(given) or original(*given)
    )
    with pytest.warns(UserWarning, match="at once"):
        expected = normed(x)
    assert len(tried) == 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = normed(x)  # a remembered call
        copied = normed(x, out=simulated.cupy.empty(x.shape, x.dtype))
        assert len(tried) == 1
        normed(simulated.cupy.asarray(rows((8, 8193))))  # other rows, whose plan is refused as well

    assert len(tried) == 2
    for each in (again, copied):
        np.testing.assert_array_equal(simulated.cupy.asnumpy(each), simulated.cupy.asnumpy(expected))


def test_a_call_that_ran_on_the_whole_device_runs_on_a_share_of_it(simulated: Any) -> None:
    x = simulated.cupy.asarray(rows(CLAIMS))
    gamma, beta = (simulated.cupy.asarray(rows((1, CLAIMS[1]))[0]) for _ in range(2))
    expected = [cupynorm.layer_norm(x, gamma, beta) for _ in range(2)][-1]
    machine.share_refusal = TOO_LARGE

    with pytest.warns(UserWarning, match="at once"):
        y = cupynorm.layer_norm(x, gamma, beta)

    asnumpy = simulated.cupy.asnumpy
    np.testing.assert_allclose(asnumpy(y), asnumpy(expected), rtol=2e-3, atol=1e-3)
    np.testing.assert_array_equal(asnumpy(cupynorm.layer_norm(x, gamma, beta)), asnumpy(y))


def test_sums_beside_rows_that_blocks_share_take_a_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = simulator.install(monkeypatch, "a100")  # without clusters
    dy, x = (simulated.cupy.asarray(rows((2, 1000, 32))) for _ in range(2))
    gamma = simulated.cupy.asarray(rows((1, 1000))[0])
    usual = cupynorm.layer_norm_backward(dy, x, gamma, axis=1)
    assert "split" in {plan.variant for plan in planned()}
    row_ops.forget()
    machine.share_refusal = TOO_LARGE

    with pytest.warns(UserWarning, match="at once .*: sums of parameters take a pass of their own"):
        found = cupynorm.layer_norm_backward(dy, x, gamma, axis=1)

    for ours, theirs in zip(found, usual, strict=True):
        np.testing.assert_allclose(ours.get(), theirs.get(), rtol=2e-3, atol=2e-3)


def test_a_plan_that_was_asked_for_is_not_replaced(simulated: Any) -> None:
    x = simulated.cupy.asarray(rows(CLAIMS))
    normed(x)
    (plan,) = planned()
    machine.share_refusal = TOO_LARGE

    with pytest.raises(RuntimeError, match="does not run .* blocks at once .*asked for needs that"):
        normed(x, plan=plan)
    with pytest.raises(RuntimeError, match="does not run .* blocks at once .*asked for needs that"):
        normed(simulated.cupy.asarray(rows((2, 1 << 18))), plan="split")
    with pytest.warns(UserWarning, match="variant cluster is used instead of cluster"):
        normed(x, plan="cluster")


def test_other_errors_of_a_launch_are_not_taken_for_a_refusal(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: lambda *_: 719)

    with pytest.raises(devices.driver().CUDADriverError, match="719"):
        normed(simulated.cupy.asarray(rows(CLAIMS)))


PROBLEMS = [
    Problem(rows_, cols // vector * vector, vector, size, max(4, size), columns, **alignment)
    for rows_ in (1, 7, 40, 131, 4096)
    for cols in (1000, 16384, 50257, 300_000, 1 << 22)
    for size in (2, 4, 8)
    for columns in ((), (size,), (size, size))
    for vector, alignment in ((16 // size, {}), (1, {"widest_vector": 16 // size, "unaligned": 1}))
]


@pytest.mark.parametrize("device", RECORDED)
def test_every_row_has_a_plan_whose_blocks_do_not_wait_for_one_another(device: str) -> None:
    limits = RECORDED[device]

    def occupancy(plan: Plan) -> int:
        return plan.min_blocks * (limits.sm_count // plan.cluster if plan.cluster > 1 else 1)

    for problem in PROBLEMS:
        plan = choose(problem, limits, occupancy, cooperative=False)

        assert not plan.cooperative, problem
        # it is one that might have been asked for
        again = choose(problem, limits, occupancy, dataclasses.replace(plan, waves=0.0))
        assert again.template == plan.template, (problem, plan)


@pytest.mark.parametrize("cooperation", ["", TOO_LARGE])
def test_clusters_that_no_group_of_multiprocessors_holds_are_left_out(
    monkeypatch: pytest.MonkeyPatch, cooperation: str
) -> None:
    simulated = simulator.install(monkeypatch, "h200")
    x = simulated.cupy.asarray(rows(CLAIMS))
    usual = normed(x)
    row_ops.forget()
    machine.share_refusal = cooperation
    refuse_clusters(simulated, monkeypatch)

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        y = normed(x)

    asnumpy = simulated.cupy.asnumpy
    np.testing.assert_allclose(asnumpy(y), asnumpy(usual), rtol=2e-3, atol=1e-3)
    assert [(plan.cooperative, plan.cluster) for plan in planned()] == [(False, 1)]


FUSED = {
    "sum": lambda x: cupynorm.add_layer_norm(x, x, return_sum=False),
    "int8": lambda x: cupynorm.layer_norm(x, quantize="int8")[0],
    "mask": lambda x: cupynorm.softmax(x, lengths=[3, 9, x.shape[1]]),
    "fuse": cupynorm.fuse(cupynorm.rms_norm, load=lambda x: 2 * x),
}


@pytest.mark.parametrize("known", [False, True], ids=["at first", "after the whole device"])
@pytest.mark.parametrize("name", FUSED)
def test_clusters_of_fused_calls_are_left_out_as_well(
    monkeypatch: pytest.MonkeyPatch, name: str, known: bool
) -> None:
    simulated = simulator.install(monkeypatch, "h200")
    x = simulated.cupy.asarray(rows((3, 65536)))
    usual = FUSED[name](x)
    assert [plan.cluster > 1 for plan in planned()] == [True]
    if not known:
        row_ops.forget()
    refuse_clusters(simulated, monkeypatch)

    with pytest.warns(UserWarning, match="blocks at once"):
        first = FUSED[name](x)
    again = FUSED[name](x)

    asnumpy = simulated.cupy.asnumpy
    assert [plan.cluster for plan in planned()] == [1]
    for y in (first, again):
        np.testing.assert_allclose(asnumpy(y), asnumpy(usual), rtol=2e-3, atol=1)
