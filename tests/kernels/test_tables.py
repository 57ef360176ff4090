"""Long rows of tables, which blocks of the grid share and read again, on the simulator; their kernels compiled."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.call import asking
from cupynorm.invoke import row_ops
from cupynorm.plan.config import NOWHERE, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.rules import rules_of
from cupynorm.runtime import nvrtc
from tests import SLOW, simulator
from tests.build_gate import begins_too_soon, chosen, code_of, compile_first_choices, endless_waits
from tests.simulator import cupy, simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart

RNG = np.random.default_rng(74)
ROUNDED: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def shared(vector: int, lanes: int, parts: int, *, block: int = 64, elements: int = 2) -> Plan:
    return tiling_apart(vector, elements, lanes, block, parts, variant="split", waits=NOWHERE)


# columns, and how they are shared: lanes of a warp, of half of one (some are left over), of no power of two; tiles of
# several, of which the last is not full; more parts than there are rows for
TILINGS = [
    (12, shared(4, 4, 3), 500),
    (12, shared(4, 3, 3), 500),
    (30, shared(2, 15, 3), 300),
    (33, shared(1, 33, 2), 150),
    (10, shared(2, 4, 2), 77),
    (66, shared(2, 11, 2, block=96), 100),
    (8, shared(2, 4, 9), 150),
]


def agrees(found: Any, wanted: Any, near: dict[str, Any]) -> None:
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
    for got, right in pairs:
        assert (got is None) == (right is None)
        if got is not None:
            np.testing.assert_allclose(got.get().astype(np.float64), right.astype(np.float64), **near)


def run(function: Any, arrays: Any, axis: Any, plan: Plan, **options: Any) -> Any:
    """Call on the device by a plan, which one of the launches must have."""

    def device(each: Any) -> Any:
        return cupy.asarray(each) if isinstance(each, np.ndarray) else each

    with row_ops.observed() as plans:
        given = {name: device(each) for name, each in options.items()}
        found = function(*map(device, arrays), axis=axis, plan=plan, **given)
    assert ("split", NOWHERE, plan.across) in [(each.variant, each.waits, each.across) for each in plans]
    return found


def name_of(given: Any) -> str:
    return f"{given.across} lanes, {given.ctas_per_row} blocks" if isinstance(given, Plan) else str(given)


@pytest.mark.parametrize(
    ("cols", "plan", "rows"), TILINGS if SLOW else [TILINGS[at] for at in (0, 2, 5)], ids=name_of
)
def test_every_form(cols: int, plan: Plan, rows: int) -> None:
    x, r = (RNG.standard_normal((rows, cols)).astype(np.float32) for _ in range(2))
    g, where = np.linspace(0.5, 2, rows).astype(np.float32), RNG.random(x.shape) < 0.8
    gaps, y = np.where(where, x, np.nan).astype(np.float32), cupynorm.softmax(x, axis=0)
    lengths = RNG.integers(1, rows + 1, cols)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
        (cupynorm.softmax, (x,), {"where": where}, ROUNDED),
        (cupynorm.log_softmax, (x,), {"lengths": lengths}, ROUNDED),
        (cupynorm.layer_norm, (x, g, g), {"where": where, "return_stats": True}, ROUNDED),
        (cupynorm.rms_norm, (x, g), {"quantize": "int8"}, {"atol": 1}),
        (cupynorm.add_layer_norm, (x, r, g), {"return_sum": True}, ROUNDED),
        (cupynorm.standardize, (gaps,), {"nan": "omit", "return_stats": True}, ROUNDED),
        (cupynorm.softmax_backward, (r, y), {}, ROUNDED),
        (cupynorm.layer_norm_backward, (r, x, g), {}, {"rtol": 1e-4, "atol": 1e-4}),
        (cupynorm.moments, (gaps,), {"nan": "omit"}, ROUNDED),
        (cupynorm.moments, (x,), {"order": 4}, {"rtol": 2e-4, "atol": 2e-4}),
        (cupynorm.moments, (x,), {"weights": RNG.random((rows, 1)).astype(np.float32)}, ROUNDED),
        (cupynorm.logsumexp, (x,), {}, ROUNDED),
        (cupynorm.rescale, (x,), {}, ROUNDED),
    ]
    some = calls if SLOW or plan.across == 15 else calls[cols % 3 :: 3]
    for function, arrays, options, near in some:
        found = run(function, arrays, 0, plan, **options)
        agrees(found, function(*arrays, axis=0, **options), near)


@pytest.mark.parametrize(
    ("cols", "plan", "rows"), [each for each in TILINGS if each[1].across == 4], ids=name_of
)
def test_rounds(cols: int, plan: Plan, rows: int) -> None:
    x = RNG.standard_normal((rows, cols)).astype(np.float32)
    few = dataclasses.replace(plan, vector=2)

    agrees(run(cupynorm.sigma_clip, (x, 2.0), 0, few), cupynorm.sigma_clip(x, 2.0, axis=0), ROUNDED)


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", *(["int16", "int32"] if SLOW else [])])
def test_every_size_of_elements(dtype: str) -> None:
    x = (RNG.standard_normal((3, 140, 12)) * 20 + 50).astype(dtype)
    near = {"float16": 2e-3, "float64": 1e-12}.get(dtype, 2e-5)
    for lanes, vector in ((3, 4), (6, 2), (5, 1)):
        if dtype == "float64" and vector > 2:
            continue
        found = run(cupynorm.standardize, (x,), 1, shared(vector, lanes, 2))
        wide = x.astype(np.float64)
        wanted = (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True)
        np.testing.assert_allclose(found.get().astype(np.float64), wanted, rtol=4 * near, atol=4 * near)
        mean, variance = run(cupynorm.moments, (x,), 1, shared(vector, lanes, 2))[:2]
        np.testing.assert_allclose(mean.get().astype(np.float64), wide.mean(1), rtol=near)
        np.testing.assert_allclose(variance.get().astype(np.float64), wide.var(1), rtol=4 * near)


def test_groups_of_blocks_go_on_to_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are read again meet twice, others once: messages take the places of earlier ones."""
    few = dataclasses.replace(RECORDED["h200"], sm_count=6, blocks_per_sm=1)
    monkeypatch.setattr(simulator.machine, "limits", lambda device=None: few)
    x = RNG.standard_normal((7, 90, 12)).astype(np.float32)
    wide = x.astype(np.float64)
    for plan in (shared(2, 6, 3), shared(4, 1, 3)):
        found = run(cupynorm.standardize, (x,), 1, plan)
        wanted = (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True)
        np.testing.assert_allclose(found.get(), wanted, **ROUNDED)
        np.testing.assert_allclose(run(cupynorm.moments, (x,), 1, plan)[0].get(), wide.mean(1), **ROUNDED)


@pytest.mark.parametrize("schedule", range(6))
def test_blocks_may_come_in_any_order(monkeypatch: pytest.MonkeyPatch, schedule: int) -> None:
    """The counter at which they meet is 0 before any of them arrives there."""
    monkeypatch.setattr(simulator.settings, "schedules", (schedule,))
    x = RNG.standard_normal((200, 12)).astype(np.float32)
    found = run(cupynorm.softmax, (x,), 0, shared(4, 3, 5))
    np.testing.assert_allclose(found.get(), cupynorm.softmax(x.astype(np.float64), axis=0), **ROUNDED)
    agrees(run(cupynorm.logsumexp, (x,), 0, shared(4, 3, 5)), cupynorm.logsumexp(x, axis=0), ROUNDED)


def test_results_may_take_the_place_of_x() -> None:
    host = RNG.standard_normal((200, 15)).astype(np.float32)
    x = cupy.asarray(host)
    plan = shared(1, 15, 3)

    first = cupynorm.standardize(x, axis=0, out=x, plan=plan).get()

    wide = host.astype(np.float64)
    np.testing.assert_allclose(first, (wide - wide.mean(0)) / wide.std(0), **ROUNDED)
    again = cupy.asarray(host)
    assert (cupynorm.standardize(again, axis=0, out=again, plan=plan).get() == first).all()


def test_several_axes_are_one() -> None:
    x = RNG.standard_normal((2, 5, 7, 12)).astype(np.float32)
    found = run(cupynorm.standardize, (x,), (0, 1, 2), shared(4, 3, 2))

    wide = x.astype(np.float64)
    wanted = (wide - wide.mean((0, 1, 2))) / wide.std((0, 1, 2))
    np.testing.assert_allclose(found.get(), wanted, **ROUNDED)


def test_a_mean_far_from_zero_keeps_its_digits() -> None:
    x = (RNG.standard_normal((400, 15)) * 0.1 + 1000).astype(np.float32)
    wide = x.astype(np.float64)
    for plan in (shared(1, 15, 3), shared(1, 8, 3)):
        found = run(cupynorm.layer_norm, (x,), 0, plan)
        wanted = (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 1e-5)
        np.testing.assert_allclose(found.get(), wanted, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x = RNG.standard_normal((120, 12)).astype(np.float32)
    x[70, 3], x[71, 4] = np.nan, np.inf
    found = run(cupynorm.softmax, (x,), 0, shared(4, 3, 3)).get()

    assert np.isnan(found[:, 3:5]).all()
    others = np.delete(np.arange(12), [3, 4])
    np.testing.assert_allclose(
        found[:, others], cupynorm.softmax(x[:, others].astype(np.float64), axis=0), **ROUNDED
    )


def calls_of(dtype: str, rows: int, cols: int) -> list[Any]:
    x, columns = np.empty((rows, cols), dtype), np.ones(rows, dtype)
    calls: list[Any] = [
        lambda: cupynorm.standardize(x, axis=0),
        lambda: cupynorm.moments(x, axis=0, nan="omit"),
        lambda: cupynorm.layer_norm(x, columns, columns, axis=0),
        lambda: cupynorm.softmax(x, axis=0),
    ]
    if SLOW:
        calls += [
            lambda: cupynorm.rescale(x, axis=0),
            lambda: cupynorm.normalize(x, axis=0),
            lambda: cupynorm.moments(x, axis=0, order=4),
            lambda: cupynorm.layer_norm(x, columns, columns, axis=0, where=np.empty(x.shape, np.bool_)),
            lambda: cupynorm.rms_norm(x, columns, axis=0, quantize="int8"),
            lambda: cupynorm.sigma_clip(x, axis=0),
        ]
    return calls


COMPILED = [("90", "h200", 13), ("90", "h200", 100), ("80", "a100", 8)]
if SLOW:
    COMPILED = [(*each, cols) for each in (("90", "h200"), ("80", "a100")) for cols in (8, 13, 100)]


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("arch", "device", "cols"), COMPILED)
def test_what_is_chosen_compiles_without_a_spill_that_costs_anything(
    arch: str, device: str, cols: int
) -> None:
    limits, few = RECORDED[device], rules_of("90").apart.few_local_bytes
    dtypes = ("float16", "float32", "float64") if SLOW else ("float32",)
    calls = itertools.chain.from_iterable(calls_of(dtype, 1 << 20, cols) for dtype in dtypes)
    specs = [asking.specs_of(call, limits, None)[0] for call in calls]
    compile_first_choices([(spec, device, None) for spec in specs], arch)
    for spec in specs:
        plan, kernel = chosen(spec, device, arch)
        assert (plan.variant, plan.waits) == ("split", NOWHERE)
        assert kernel.stack_bytes <= few, plan
        assert not endless_waits(kernel)
        assert not begins_too_soon(code_of(kernel, arch), arch)


def test_any_number_of_elements_and_blocks() -> None:
    """Parts may be empty, or end in the middle of a round."""
    for rows, parts in itertools.product((2, 3, 31, 33), (1, 2, 5)):
        x = RNG.standard_normal((rows, 6)).astype(np.float32)
        found = run(cupynorm.softmax, (x,), 0, shared(2, 3, parts))
        np.testing.assert_allclose(found.get(), cupynorm.softmax(x.astype(np.float64), axis=0), **ROUNDED)
