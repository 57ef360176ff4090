"""Rows in runs, along several axes that are no neighbours in memory: on the simulator, against float64 arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.lower import fused
from cupynorm.plan.config import VARIANTS
from cupynorm.plan.variants import grid
from cupynorm.runtime import nvrtc
from tests import SLOW, build_gate, simulator
from tests.kernels.test_any_axis import agrees
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

RANDOM = np.random.default_rng(37)


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def drawn(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((4, 3, 8), (0, 2), "float32"),
        ((4, 3, 16), (0, 2), "float16"),
        ((5, 3, 7), (0, 2), "float32"),
        ((2, 3, 4, 3, 6), (0, 2, 4), "float64"),
    ],
)
def test_ops(shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> None:
    of_row = tuple(shape[each] for each in axis)
    x, g, b = drawn(*shape, dtype=dtype), drawn(*of_row), drawn(*of_row, dtype=dtype)

    agrees(cupynorm.softmax, x, axis=axis, dtype=dtype)
    agrees(cupynorm.layer_norm, x, g, b, axis=axis, return_stats=True, dtype=dtype)
    agrees(cupynorm.moments, x, axis=axis, order=3, dtype=dtype)
    where = RANDOM.random(shape) < 0.7
    agrees(cupynorm.standardize, x, axis=axis, where=where, dtype=dtype)
    agrees(cupynorm.add_rms_norm, x, drawn(*shape, dtype=dtype), g, axis=axis, dtype=dtype)


def test_gradients_and_fusions() -> None:
    shape, axis = (4, 3, 8), (0, 2)
    x, dy, g = drawn(*shape), drawn(*shape), drawn(4, 8)
    gated = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * 0.5 + t, store=lambda y, t: y * t)

    agrees(cupynorm.layer_norm_backward, dy, x, g, axis=axis)
    agrees(cupynorm.add_rms_norm_backward, dy, drawn(*shape), x, g, axis=axis)
    agrees(cupynorm.softmax_backward, dy, cupynorm.softmax(x, axis=axis), axis=axis)
    agrees(cupynorm.add_layer_norm, x, dy, g, g, axis=axis, dropout=0.3, seed=3)
    agrees(gated, x, drawn(*shape), drawn(*shape), axis=axis)
    agrees(cupynorm.logsumexp, x, axis=axis)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_holds_rows_in_runs(variant: str) -> None:
    shape, axis = (16, 3, 64), (0, 2)
    x, r, g, b = drawn(*shape), drawn(*shape), drawn(16, 64), drawn(16, 64)
    where = RANDOM.random((16, 1, 64)) < 0.7
    forced = {"plan": variant}

    def planned(op: Any, *arrays: Any, **options: Any) -> Any:
        device = not isinstance(arrays[0], np.ndarray)
        with row_ops.observed() as plans:
            found = op(*arrays, axis=axis, **options, **(forced if device else {}))
        assert not device or [each.variant for each in plans] == [variant]
        return found

    agrees(lambda *a: planned(cupynorm.add_layer_norm, *a), x, r, g, b)
    agrees(lambda a, w: planned(cupynorm.softmax, a, where=w), x, where)
    agrees(lambda a, w: planned(cupynorm.standardize, a, weights=w), x, np.abs(drawn(*shape)))

    found, scales = cupynorm.layer_norm(cupy.asarray(x), axis=axis, quantize="int8", plan=variant)
    right, wanted = cupynorm.layer_norm(x, axis=axis, quantize="int8")
    np.testing.assert_allclose(scales.get(), wanted, rtol=1e-5)
    assert np.max(np.abs(found.get().astype(int) - right)) <= 1


@pytest.mark.parametrize("variant", ["split", "uncached", None])
def test_in_place(variant: str | None) -> None:
    x = drawn(8, 3, 128, dtype="float16")
    found = cupy.asarray(x)

    cupynorm.softmax(found, axis=(0, 2), out=found, plan=variant)

    wanted = cupynorm.softmax(x.astype(np.float64), axis=(0, 2))
    np.testing.assert_allclose(found.get(), wanted, rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize(("shape", "last"), [((6, 3, 388), {1, 4}), ((5, 3, 644), {2, 3})])
def test_a_threads_last_batch_of_vectors_may_be_shorter(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], last: set[int]
) -> None:
    """Where split reads a row twice: one block has all of it, its threads `last` vectors in their last batch."""
    monkeypatch.setattr(grid, "ROOM_BLOCKS", 1)
    x, r, g = drawn(*shape), drawn(*shape), drawn(shape[0], shape[2])
    where = RANDOM.random(shape) < 0.7
    options = {"axis": (0, 2), "plan": "split"}
    on_device = tuple(map(cupy.asarray, (x, r, g, where)))

    with row_ops.observed() as plans:
        scaled = cupynorm.standardize(on_device[0], where=on_device[3], **options)
        added = cupynorm.add_layer_norm(*on_device[:3], return_sum=False, **options)
        mean, variance = cupynorm.moments(on_device[0], **options)

    for plan in plans:
        assert (plan.kernel, plan.vectors, plan.ctas_per_row) == ("row_reread", 4, 1)
        vectors = shape[0] * shape[2] // plan.vector
        assert {(vectors - 1 - thread) // plan.block % 4 + 1 for thread in range(plan.block)} == last
    wide = x.astype(np.float64)
    wanted = cupynorm.standardize(wide, where=where, axis=(0, 2))
    np.testing.assert_allclose(scaled.get(), wanted, rtol=2e-5, atol=2e-5)
    wanted = cupynorm.add_layer_norm(wide, r.astype(np.float64), g, return_sum=False, axis=(0, 2))
    np.testing.assert_allclose(added.get(), wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(mean.get(), wide.mean((0, 2)), atol=1e-6)
    np.testing.assert_allclose(variance.get(), wide.var((0, 2)), rtol=1e-5)


def test_groups_of_blocks_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows in four groups of blocks, which read them twice, or in two that read them once, for statistics."""
    monkeypatch.setattr(grid, "_groups", lambda question: 4 if question.problem.output_bytes else 2)
    x, axis = drawn(8, 7, 512), (0, 2)
    where = RANDOM.random(x.shape) < 0.7
    on_device, kept = cupy.asarray(x), cupy.asarray(where)

    with row_ops.observed() as plans:
        scaled = cupynorm.standardize(on_device, where=kept, axis=axis, plan="split")
        bytes_, scales = cupynorm.layer_norm(on_device, axis=axis, quantize="int8", plan="split")
        mean, variance = cupynorm.moments(cupy.asarray(x.reshape(4, 14, 512)), axis=axis, plan="split")

    assert [(each.kernel, each.grid // each.ctas_per_row) for each in plans] == [
        ("row_reread", 4),
        ("row_reread", 4),
        ("row_reread", 2),
    ]
    assert all(each.ctas_per_row > 1 for each in plans)
    wide = x.astype(np.float64)
    wanted = cupynorm.standardize(wide, where=where, axis=axis)
    np.testing.assert_allclose(scaled.get(), wanted, rtol=2e-5, atol=2e-5)
    right, wanted = cupynorm.layer_norm(x, axis=axis, quantize="int8")
    np.testing.assert_allclose(scales.get(), wanted, rtol=1e-5)
    assert np.max(np.abs(bytes_.get().astype(int) - right)) <= 1
    wide = wide.reshape(4, 14, 512)
    np.testing.assert_allclose(mean.get(), wide.mean(axis), atol=1e-6)
    np.testing.assert_allclose(variance.get(), wide.var(axis), rtol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_in_runs_wait_in_shared_memory_of_the_grid(
    monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    """Three rows are in work at once, of which blocks hold parts, and read the rest again."""
    chunked = grid.staged.chunked
    monkeypatch.setattr(grid.staged, "chunked", lambda *a, **o: chunked(*a[:3], min(a[3], 1024), **o))
    monkeypatch.setattr(grid, "_most_rows_at_once", lambda *_: 3)
    x, g, b = drawn(24, 7, 512), drawn(24, 512), drawn(24, 512)
    found, parameters = cupy.asarray(x), {"gamma": cupy.asarray(g), "beta": cupy.asarray(b)}

    with row_ops.observed() as plans:
        found = cupynorm.layer_norm(
            found, **parameters, axis=(0, 2), out=found if in_place else None, plan="split"
        )

    (plan,) = plans
    assert (plan.kernel, plan.grid // plan.ctas_per_row) == ("row_staged", 3)
    assert 1 < plan.ctas_per_row < x[:, 0].nbytes / plan.row_shared_bytes
    wanted = cupynorm.layer_norm(x.astype(np.float64), g, b, axis=(0, 2))
    np.testing.assert_allclose(found.get(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cols", [4096, 4099])
def test_few_long_rows_have_room_for_messages_as_rows_in_runs_have(
    monkeypatch: pytest.MonkeyPatch, cols: int
) -> None:
    monkeypatch.setattr(fused, "NUMBERS", fused.NUMBERS._replace(long_bytes=4096))
    x, r, g = drawn(5, cols), drawn(5, cols), drawn(cols)
    where = RANDOM.random(x.shape) < 0.7
    on_device = tuple(map(cupy.asarray, (x, r, g, where)))

    with row_ops.observed() as plans:
        alone = cupynorm.standardize(on_device[0], plan="split")
        scaled = cupynorm.standardize(on_device[0], where=on_device[3], plan="split")
        added, total = cupynorm.add_layer_norm(*on_device[:3], plan="split")

    assert [each.kernel for each in plans] == ["row_staged", "row_reread", "row_reread"]
    assert all(each.grid > each.ctas_per_row > 1 for each in plans)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(alone.get(), cupynorm.standardize(wide), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(scaled.get(), cupynorm.standardize(wide, where=where), rtol=2e-5, atol=2e-5)
    wanted, sums = cupynorm.add_layer_norm(wide, r.astype(np.float64), g)
    np.testing.assert_allclose(added.get(), wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(total.get(), sums, rtol=1e-6)


@pytest.mark.parametrize(("end", "vector"), [(32, 4), (30, 2), (31, 1)])
def test_a_part_of_each_image(end: int, vector: int) -> None:
    images = cupy.asarray(drawn(4, 12, 40))
    part = images[:, 2:10, 8:end]

    with row_ops.observed() as plans:
        found = cupynorm.standardize(part, axis=(1, 2))

    assert plans[-1].vector == vector
    assert not plans[-1].across
    wanted = cupynorm.standardize(part.get().astype(np.float64), axis=(1, 2))
    np.testing.assert_allclose(found.get(), wanted, rtol=2e-5, atol=2e-5)
    untouched = np.ones((12, 40), bool)
    untouched[2:10, 8:end] = False
    before = images.get()
    cupynorm.standardize(part, axis=(1, 2), out=part)
    np.testing.assert_array_equal(images.get()[:, untouched], before[:, untouched])
    np.testing.assert_allclose(part.get(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("run", [1, 2, 3, 6, 12])
def test_vectors_are_no_longer_than_runs(run: int) -> None:
    x = cupy.asarray(drawn(16, 3, run))

    with row_ops.observed() as plans:
        cupynorm.rescale(x, axis=(0, 2))

    assert plans[-1].vector == np.gcd(4, run)
    assert bool(plans[-1].across) == (run == 1)  # one axis then, with even distances


def test_rows_that_begin_anywhere() -> None:
    x = drawn(5, 3, 33)[:, :, 1:]

    agrees(cupynorm.softmax, x, axis=(0, 2))
    agrees(cupynorm.sigma_clip, x, axis=(0, 2), sigma=1.5)
    agrees(cupynorm.moments, x, axis=(0, 2), order=4)


COMPILED = [
    (arch, device, dtype)
    for arch, device in (("90", "h200"), ("80", "a100"))
    for dtype in ("float16", "float32", "float64")
    if SLOW or (arch, dtype) in {("90", "float16"), ("90", "float64"), ("80", "float32")}
]


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("arch", "device", "dtype"), COMPILED)
def test_no_kernel_spills_that_is_chosen_when_the_compiler_was_asked(
    arch: str, device: str, dtype: str
) -> None:
    variants = (None, "block", "split", "uncached", *(("cluster",) if arch == "90" else ()))
    specs = [kind.spec(dtype, 3 * 8192 // np.dtype(dtype).itemsize) for kind in build_gate.IN_RUNS.values()]
    calls = [*itertools.product(specs, (device,), variants)]
    build_gate.compile_first_choices(calls, arch)
    for spec, *_, variant in calls:
        plan, kernel = build_gate.chosen(spec, device, arch, variant)
        assert not build_gate.spills(kernel), plan
        code = build_gate.code_of(kernel, arch)
        assert not build_gate.begins_too_soon(code, arch)
        assert not build_gate.stalls_a_cluster(code, arch)
