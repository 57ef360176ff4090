"""Quantised results on the device: the nearest numbers there are, by enumeration, and scales of rows and of all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupynorm import Quantize, add_layer_norm, layer_norm, rms_norm, softmax
from cupynorm._dtypes import DTYPES, QUANTIZED, device_dtype, quantized_dtype
from cupynorm.plan.config import PLAIN, VARIANTS
from tests.call.test_quantized import LARGEST, ladder, nearest, values_of
from tests.gpu.agree import DTYPES as NAMES

small = pytest.mark.small
RANDOM = np.random.default_rng(9)


def normal(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(DTYPES[dtype])


def stored(xp: Any, q: Any, name: str) -> Any:
    """Bring a result to the host; CuPy has no float8, so a device holds their bits."""
    wanted = quantized_dtype(name)
    assert q.dtype == device_dtype(wanted)
    return xp.asnumpy(q).view(wanted)


def assert_nearest(q: Any, wanted: Any, name: str) -> None:
    """Each is the nearest to what was to be stored, or, where float32 cannot tell which is, one of the two."""
    got = values_of(q)
    assert q.dtype == quantized_dtype(name)
    cannot_tell = 2e-5 * np.abs(wanted) + 1e-5 * LARGEST[name]
    least, most = nearest(wanted - cannot_tell, name), nearest(wanted + cannot_tell, name)
    assert ((least <= got) & (got <= most)).all(), (got, wanted)


CALLS: dict[str, Any] = {
    "layer_norm": lambda xp, x, **options: layer_norm(
        x, xp.asarray(np.linspace(-2, 2, x.shape[-1])), xp.asarray(np.ones(x.shape[-1])), **options
    ),
    "rms_norm": lambda _, x, **options: rms_norm(x, **options),
    "softmax": lambda _, x, **options: softmax(x, **options),
    "masked softmax": lambda _, x, **options: softmax(x, causal_offset=3, **options),
    "add_layer_norm": lambda _, x, **options: add_layer_norm(x, x, alpha=-0.5, return_sum=False, **options),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
every_dtype = pytest.mark.parametrize("name", QUANTIZED)


@small
@every_call
@every_dtype
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("cols", [13, 64])
def test_scales_of_rows(xp: Any, call: Any, name: str, dtype: str, cols: int) -> None:
    x = normal(5, cols, dtype=dtype)
    y = call(np, x.astype(np.float64))

    q, scales = call(xp, xp.asarray(x), quantize=name)

    got, host = xp.asnumpy(scales), np.abs(y).max(axis=1) / LARGEST[name]
    assert got.dtype == (np.float64 if dtype == "float64" else np.float32)
    np.testing.assert_allclose(got, host, rtol=3e-6)
    assert_nearest(stored(xp, q, name), y / got.astype(np.float64)[:, None], name)


@small
@every_dtype
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cols", [48, 1000, 333])
def test_every_variant(xp: Any, name: str, variant: str, cols: int) -> None:
    x = normal(4, cols)
    y = CALLS["layer_norm"](np, x.astype(np.float64))

    q, scales = CALLS["layer_norm"](xp, xp.asarray(x), quantize=name, plan=variant)

    got = xp.asnumpy(scales)
    np.testing.assert_allclose(got, np.abs(y).max(axis=1) / LARGEST[name], rtol=3e-6)
    assert_nearest(stored(xp, q, name), y / got.astype(np.float64)[:, None], name)


@small
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize(
    ("rows_per_group", "parameter_cache", "stages"),
    [(1, 0, 1), (1, 1, 2), (1, 2, 0), (1, 2, 1), (1, 3, 1), (2, 0, 0), (2, 1, 0), (2, 3, 0), (2, 2, 1)],
)
def test_groups_that_hold_several_rows_and_blocks_that_go_through_many(
    xp: Any, name: str, scale: float | None, rows_per_group: int, parameter_cache: int, stages: int
) -> None:
    """With a grid so small that each block has many rows, at the end fewer than it can hold."""
    x = normal(67, 256, dtype="float16")
    y = CALLS["layer_norm"](np, x.astype(np.float64))
    plan = dataclasses.replace(
        PLAIN,
        variant="warp",
        vector=8,
        vectors=2,
        group=16,
        rows_per_group=rows_per_group,
        parameter_cache=parameter_cache,
    )
    plan = dataclasses.replace(plan, stages=stages, block=64, waves=0.002, full=True)

    result = CALLS["layer_norm"](xp, xp.asarray(x), quantize=Quantize(name, scale), plan=plan)

    q, by = (result, scale) if scale else (result[0], xp.asnumpy(result[1]).astype(np.float64)[:, None])
    assert_nearest(stored(xp, q, name), y / by, name)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("cols", [1024, 4096, 8192, 32768, 65536, 100003, 262144])
def test_rows_around_the_edges_of_variants(xp: Any, name: str, rows: int, cols: int) -> None:
    x = normal(rows, cols, dtype="float16")
    y = rms_norm(x.astype(np.float64))

    q, scales = rms_norm(xp.asarray(x), quantize=name)

    got = xp.asnumpy(scales)
    np.testing.assert_allclose(got, np.abs(y).max(axis=1) / LARGEST[name], rtol=3e-6)
    assert_nearest(stored(xp, q, name), y / got.astype(np.float64)[:, None], name)


@small
@every_call
@every_dtype
@pytest.mark.parametrize("kind", ["number", "array"])
def test_one_scale_for_all_saturates(xp: Any, call: Any, name: str, kind: str) -> None:
    x = normal(6, 40)
    y, scale = call(np, x.astype(np.float64)), 0.2 / LARGEST[name]
    given = scale if kind == "number" else xp.asarray(np.array([scale]))

    q = call(xp, xp.asarray(x), quantize=Quantize(name, given))

    assert_nearest(stored(xp, q, name), y / scale, name)
    assert not np.isnan(values_of(stored(xp, q, name))).any()


@small
@every_dtype
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cols", [1, 2, 4])
def test_rounding_is_to_nearest_even(xp: Any, name: str, dtype: str, cols: int) -> None:
    """Values on and between all numbers, by a sum that is kept in no other way than through beta."""
    rungs, _ = ladder(name)
    middles = (rungs[1:] + rungs[:-1]) / 2
    values = np.concatenate(
        [rungs, middles, [rungs[-1] * 1.01, rungs[-1] * 8, rungs[0] * 8, np.inf, -np.inf]]
    )
    values = np.resize(values, -(-values.size // cols) * cols).astype(dtype)
    exact = values.astype(np.float64)

    for start in range(
        0, values.size, 4 * cols
    ):  # rows of zeros are normed to zeros, and beta is what is left
        beta = values[start : start + 4 * cols]
        q = layer_norm(
            xp.asarray(np.zeros((1, beta.size), dtype)), beta=xp.asarray(beta), quantize=Quantize(name, 1.0)
        )
        got = values_of(stored(xp, q, name))[0]
        assert np.array_equal(got, nearest(exact[start : start + 4 * cols], name))


@small
@every_dtype
@pytest.mark.parametrize("variant", [None, "uncached"])
def test_rows_of_zeros_nan_and_inf(xp: Any, name: str, variant: str | None) -> None:
    x = normal(3, 40)
    x[0], x[1, 5], x[2, 7] = 0, np.nan, np.inf

    q, scales = rms_norm(xp.asarray(x), quantize=name, plan=variant)

    expected = [np.asarray(each) for each in rms_norm(x, quantize=name)]
    np.testing.assert_array_equal(xp.asnumpy(scales), expected[1])
    np.testing.assert_array_equal(values_of(stored(xp, q, name)), values_of(expected[0]))


@small
def test_results_of_several_kinds_come_in_their_order(xp: Any) -> None:
    x, r = normal(4, 24), normal(4, 24)
    expected = add_layer_norm(x, r, quantize="int8", return_stats=True)

    got = add_layer_norm(xp.asarray(x), xp.asarray(r), quantize="int8", return_stats=True)

    assert [each.shape for each in got] == [each.shape for each in expected]
    for one, want in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(xp.asnumpy(one), want, rtol=2e-6, atol=1e-6)
