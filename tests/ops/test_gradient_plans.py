"""plan= of gradients and losses: every variant, on the simulator, beside NumPy arrays; and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.call import asking
from cupynorm.call.arguments import view
from cupynorm.invoke import bound_calls, row_ops
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.lower.gradients import statistics_spec
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.plan.choose import choose
from cupynorm.plan.config import VARIANTS, Plan, room_bytes
from cupynorm.plan.limits import RECORDED
from tests import SLOW, simulator
from tests.gradient_calls import NAMES, WIDTHS, assert_near, calls, normal
from tests.simulator import cupy, simulated  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def on_device(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: cupy.asarray(each) for name, each in arrays.items()}


# Half of the variants for each function, others for the next: tests/kernels/test_backward.py has each op in each of
# them. All with CUPYNORM_SLOW=1.
HELD = [
    (name, variant)
    for (i, name), (k, variant) in itertools.product(enumerate(NAMES), enumerate(VARIANTS))
    if SLOW or (i + k) % 4 < 2
]


@pytest.mark.parametrize(("name", "variant"), HELD)
def test_every_variant_gives_what_the_host_gives(name: str, variant: str) -> None:
    # rows in whole vectors of halves, or rows of floats that begin anywhere
    which = (NAMES.index(name) + VARIANTS.index(variant)) % 2
    cols, dtype = WIDTHS[variant][which], ("float16", "float32")[which]
    function, arrays, options = calls(cols, dtype)[name]
    with row_ops.observed() as plans:
        found = function(**on_device(arrays), **options, plan=variant)
        again = function(**on_device(arrays), **options, plan=variant)

    assert plans[-1].variant == variant
    for results in (found, again):
        assert_near(name, results, function(**arrays, **options))


@pytest.mark.parametrize(("cols", "dtype"), [(4096, "float16"), (4101, "float64")])
def test_messages_in_room_of_their_own_are_those_of_the_rows_at_hand(cols: int, dtype: str) -> None:
    """Blocks that share rows meet after eight of them, and use the same room again."""
    x, labels = (5 * normal(19, cols)).astype(dtype), np.arange(19) * 100
    x[3], x[11, 7] = -np.inf, np.nan
    digits = 1e-12 if dtype == "float64" else 2e-5
    for rows in (slice(None), slice(None, None, -1), slice(9)):
        part, of_part = x[rows].copy(), labels[rows].copy()
        given = cupy.asarray(part)

        lse = cupynorm.logsumexp(given, plan="split")
        loss = cupynorm.cross_entropy(given, cupy.asarray(of_part), z_loss=1e-3, plan="split")

        np.testing.assert_allclose(lse.get(), cupynorm.logsumexp(part), rtol=digits)
        expected = cupynorm.cross_entropy(part, of_part, z_loss=1e-3)
        np.testing.assert_allclose(loss.get(), expected, rtol=digits, atol=digits)


def test_statistics_of_few_long_rows_are_found_by_the_whole_device() -> None:
    long = np.empty((1, 1 << 22), np.float16)
    _, spec = asking.specs_of(lambda: cupynorm.layer_norm_backward(long, long, parameters=False))
    assert choose(spec.problem, RECORDED["h200"], lambda plan: max(1, plan.min_blocks)).variant == "split"
    x = cupy.asarray(3 + normal(9, 4101).astype(np.float32))
    mean, rstd = (cupy.empty((9,), np.float32) for _ in range(2))
    room = cupy.empty((room_bytes(9, 4101) // 4,), np.float32)
    stats = view(mean), view(rstd)
    pointer = view(room).pointer
    spec = statistics_spec(LAYER_NORM, view(x), 1, stats, 1e-5, np.dtype(np.float32), pointer)

    row_ops.launch(0, spec, "split", Arrays({}))

    wide = x.get().astype(np.float64)
    np.testing.assert_allclose(mean.get(), wide.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(rstd.get(), 1 / np.sqrt(wide.var(-1) + 1e-5), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_plan_is_launched_as_it_is(name: str) -> None:
    function, arrays, options = calls(1000, "float32")[name]
    with row_ops.observed() as plans:
        function(**on_device(arrays), **options, plan="block")
    block, group = plans[-1].block, plans[-1].group
    wanted = dataclasses.replace(plans[-1], block=group if block > group else 2 * block, min_blocks=1)

    with row_ops.observed() as plans:
        found = function(**on_device(arrays), **options, plan=wanted)

    assert (plans[-1].block, plans[-1].min_blocks) == (wanted.block, 1)
    assert_near(name, found, function(**arrays, **options))


@pytest.mark.parametrize("name", NAMES)
def test_calls_with_other_plans_are_other_calls(name: str) -> None:
    """One that was made before, without a plan or with another, must not answer for it."""
    function, arrays, options = calls(1000, "float16")[name]
    given = on_device(arrays)
    chosen: list[Plan] = []
    for plan in (None, "uncached", "block", None, "uncached"):
        with row_ops.observed() as plans:
            for _ in range(2):
                function(**given, **options, plan=plan)
        chosen.append(plans[-1])

    assert [each.variant for each in chosen[1:3]] == ["uncached", "block"]
    assert (chosen[0], chosen[1]) == (chosen[3], chosen[4])
    calls_of_one_thread = bound_calls.thread.calls.bound
    before = len(calls_of_one_thread)
    for plan in (None, "uncached", "uncached", None, chosen[1], chosen[1]):
        function(**given, **options, plan=plan)
    assert len(calls_of_one_thread) - before == 3


def test_statistics_that_are_not_given_have_a_plan_of_their_own() -> None:
    function, arrays, options = calls(1000, "float16")["layer_norm_backward, statistics"]
    with row_ops.observed() as plans:
        function(**on_device(arrays), **options)
        function(**on_device(arrays), **options, plan="uncached")

    statistics, gradient, own, forced = plans
    assert own == statistics
    assert gradient.variant != forced.variant == "uncached"


@pytest.mark.parametrize("name", NAMES)
def test_on_numpy_arrays_a_plan_is_refused(name: str) -> None:
    function, arrays, options = calls(8, "float32")[name]
    x = {"softmax_backward": "y", "log_softmax_backward": "y", "cross_entropy": "logits"}.get(
        name.partition(",")[0], "s" if name.startswith("add") else "y" if name.endswith("_y") else "x"
    )
    with pytest.raises(ValueError, match=f"^plan='warp' chooses a kernel: {x} is a NumPy array"):
        function(**arrays, **options, plan="warp")
    for plan in (3, ["warp"], b"warp"):
        with pytest.raises(TypeError, match=r"^plan is .*: give the name of a variant"):
            function(**arrays, **options, plan=plan)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_plan_or_holds_no_row_is_refused_on_a_device(name: str) -> None:
    function, arrays, options = calls(4096, "float16")[name]
    given = on_device(arrays)
    for _ in range(2):
        function(**given, **options)
        for plan in (3, ["warp"], b"warp"):
            with pytest.raises(TypeError, match=r"^plan is .*: give the name of a variant"):
                function(**given, **options, plan=plan)
        with pytest.raises(ValueError, match="plan 'warps' is not a variant: use warp"):
            function(**given, **options, plan="warps")
        with pytest.raises(ValueError, match="variant 'warp' cannot hold a row of 4096 columns"):
            function(**given, **options, plan="warp")


def test_a_plan_that_is_refused_has_added_nothing() -> None:
    function, arrays, _ = calls(4096, "float16")["layer_norm_backward"]
    given, total = on_device(arrays), cupy.asarray(np.ones(4096, np.float32))

    with pytest.raises(ValueError, match="cannot hold a row"):
        function(**given, add_to=(total, None), plan="warp")

    np.testing.assert_array_equal(total.get(), 1)


def test_without_rows_there_is_nothing_to_force() -> None:
    empty = cupy.empty((0, 8), np.float32)

    dx, dgamma, _ = cupynorm.layer_norm_backward(empty, empty, plan="warp")

    assert dx.shape == (0, 8)
    np.testing.assert_array_equal(dgamma.get(), 0)
    assert cupynorm.softmax_backward(empty, empty, plan="warp").shape == (0, 8)
    assert cupynorm.logsumexp(empty, plan="warp").shape == (0,)
    with pytest.raises(TypeError, match="plan is 3"):
        cupynorm.logsumexp(empty, plan=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("offset", [0, 3])
def test_rows_that_are_only_read_begin_anywhere_where_nothing_waits(dtype: str, offset: int) -> None:
    x, labels = (5 * normal(7, 3001)).astype(dtype), np.array([0, 3000, 2999, 7, 8, 1500, 3000])
    room = cupy.asarray(np.zeros(7 * 3001 + 3, dtype))
    given = room[offset : offset + 7 * 3001].reshape(7, 3001)
    given[...] = cupy.asarray(x)

    lse = cupynorm.logsumexp(given, plan="uncached")
    loss = cupynorm.cross_entropy(given, cupy.asarray(labels), plan="uncached")

    np.testing.assert_allclose(lse.get(), cupynorm.logsumexp(x), rtol=2e-5)
    np.testing.assert_allclose(loss.get(), cupynorm.cross_entropy(x, labels), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("cols", "dtype"), [(3000, "float16"), (4096, "float32"), (12000, "float32")])
def test_a_fusions_gradient_takes_sums_in_its_pass_with_the_plan_that_was_chosen_for_that(
    cols: int, dtype: str
) -> None:
    """Whether sums fit is asked of the kernel that takes them: it has other operands in shared memory."""
    h200 = RECORDED["h200"]
    fusion = cupynorm.fuse(
        cupynorm.layer_norm, load=lambda x, b, r: x * b + r, store=lambda y, g, h: y * g + h
    )
    x, column = np.empty((5000, cols), dtype), np.empty(cols, dtype)

    def call() -> Any:
        return fusion.backward(x, x, column, x, column, x, gamma=column, beta=column)

    first, *_ = asking.specs_of(call, h200)
    plan = choose(first.problem, h200, lambda each: each.min_blocks)
    again, *_ = asking.specs_of(call, h200, plan)

    assert "row_summed" in first.name
    assert again.problem == first.problem
