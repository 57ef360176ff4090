"""What others say of the same functions: ONNX's node tests, astropy's sigma_clip, NumPy's nan functions."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupynorm import log_softmax, moments, normalize, rescale, sigma_clip, softmax, standardize
from tests.call.test_axes import FEW, laid_out, lies_as, places, written_to
from tests.simulator import simulated

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["simulated"]  # a fixture

# ---- ONNX: node tests of Softmax-13 and LogSoftmax-13

ROWS = np.abs(np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32))
LARGE = np.array([[0, 1, 2, 3], [10000, 10001, 10002, 10003]], np.float32)
NODES: dict[str, tuple[Any, dict[str, int], Any]] = {
    "example": (np.array([[-1, 0, 1]], np.float32), {}, [[0.09003057, 0.24472848, 0.66524094]]),
    "large_number": (LARGE, {}, [[0.032058604, 0.08714432, 0.23688284, 0.6439143]] * 2),
    "axis_0": (ROWS, {"axis": 0}, None),
    "axis_1": (ROWS, {"axis": 1}, None),
    "axis_2": (ROWS, {"axis": 2}, None),
    "negative_axis": (ROWS, {"axis": -1}, None),
    "default_axis": (ROWS, {}, None),
}
EXAMPLES_OF_LOGARITHMS = {
    "example": [[-2.4076061, -1.407606, -0.407606]],
    "large_number": [[-3.4401896, -2.4401896, -1.4401896, -0.44018966]] * 2,
}


def by_the_specification(x: Any, axis: int = -1) -> Any:
    """Return ReduceMax, Sub, Exp, ReduceSum and Div, as ONNX defines Softmax."""
    powers = np.exp(x - x.max(axis=axis, keepdims=True), dtype=np.float64)
    return powers / powers.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("name", NODES)
def test_onnx_nodes(name: str, simulated: Any) -> None:
    x, axis, told = NODES[name]
    wanted = by_the_specification(x, **axis)
    device = simulated.cupy.asarray(x)

    if told is not None:
        np.testing.assert_allclose(wanted, told, rtol=1e-6)
        np.testing.assert_allclose(log_softmax(x, **axis), EXAMPLES_OF_LOGARITHMS[name], rtol=1e-6)
    np.testing.assert_allclose(softmax(x, **axis), wanted, rtol=1e-6)
    np.testing.assert_allclose(log_softmax(x, **axis), np.log(wanted), rtol=1e-6)
    np.testing.assert_allclose(softmax(device, **axis).get(), wanted, rtol=2e-6)
    np.testing.assert_allclose(log_softmax(device, **axis).get(), np.log(wanted), rtol=2e-6)


# ---- astropy


@pytest.fixture
def astropys() -> Iterator[Any]:
    module = pytest.importorskip("astropy.stats", reason="astropy is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nan, which it masks, and of rows that are empty
        yield module


def with_outliers(*shape: int, dtype: str = "float64", seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    x = random.normal(100, 3, shape)
    x[random.random(shape) < 0.04] *= 30
    x[random.random(shape) < 0.02] = np.nan
    x[random.random(shape) < 0.01] = -np.inf
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("centre", ["mean", "median"])
@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (2, 1), None], ids=str)
@pytest.mark.parametrize(("below", "above", "rounds"), [(3, 3, 5), (2, 4, 1), (1.5, 2.5, 3)])
def test_astropys_sigma_clip(
    astropys: Any, dtype: str, centre: str, axis: Any, below: float, above: float, rounds: int
) -> None:
    x = with_outliers(24, 30, 36, dtype=dtype)
    x[:, 3, :] = np.nan

    theirs = astropys.sigma_clip(
        x,
        sigma_lower=below,
        sigma_upper=above,
        maxiters=rounds,
        cenfunc=centre,
        axis=(0, 1, 2) if axis is None else axis,  # with None it returns what is left, without its places
        masked=False,
    )
    ours, mean, std = sigma_clip(
        x,
        sigma_lower=below,
        sigma_upper=above,
        iterations=rounds,
        centre=centre,
        axis=axis,
        return_stats=True,
    )

    np.testing.assert_array_equal(ours, theirs)
    wide = theirs.astype(np.float64)
    np.testing.assert_allclose(mean, np.nanmean(wide, axis=axis), rtol=1e-6)
    np.testing.assert_allclose(std, np.nanstd(wide, axis=axis), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, (0, 1)], ids=str)
def test_astropys_sigma_clip_on_a_device(astropys: Any, axis: Any, simulated: Any) -> None:
    x = with_outliers(20, 6, 7, dtype="float32")

    theirs = astropys.sigma_clip(x, sigma=2, maxiters=2, cenfunc="mean", axis=axis, masked=False)
    ours = sigma_clip(simulated.cupy.asarray(x), 2, 2, axis).get()

    np.testing.assert_array_equal(ours, theirs)


# ---- NumPy: any layout, axes and dtype

DTYPES = ["float64", "float32", "float16", "uint8", "int8", "int16", "bool", ">f4", ">i2"]


@st.composite
def given_arrays(draw: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Draw x of any dtype that lies in any way, the same in float64, and what of it counts."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    x = laid_out(draw, shape, dtype=dtype)
    if dtype.kind == "f" and x.size and x.flags.writeable:
        x[laid_out(draw, shape) > 1] = np.nan
    where = laid_out(draw, shape) > draw(st.sampled_from([-9.0, -0.5]))
    return x, x.astype(np.float64), where


def near(found: Any, wanted: Any, dtype: Any, size: float = 1.0) -> None:
    assert found.shape == wanted.shape
    digits = {"float64": 1e-9, "float16": 2e-3}.get(np.dtype(dtype).name, 2e-5)
    np.testing.assert_allclose(found, wanted, digits, digits * size)


@FEW
@given(st.data(), places())
def test_numpys_nan_functions(data: Any, place: Any) -> None:
    shape, axis, axes = place
    x, wide, where = data.draw(given_arrays(shape))
    out = written_to(data.draw, shape)
    options: dict[str, Any] = {"axis": axis, "where": where, "nan": "omit"}
    gaps = np.where(where, wide, np.nan)
    eps = 0.25

    z, mean, std = standardize(x, eps=eps, out=out, return_stats=True, **options)
    _, variance, skewness, kurtosis = moments(x, order=4, **options)
    y, norms = normalize(x, 1, return_norms=True, **options)
    scaled, least, most = rescale(x, -1, 1, return_range=True, **options)

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of rows of which nothing counts
        along: dict[str, Any] = {"axis": axes, "keepdims": True}
        apart = gaps - np.nanmean(gaps, **along)
        second = np.nanmean(apart**2, **along)
        near(mean, np.nanmean(gaps, axis=axes), mean.dtype, 100)
        near(variance, np.nanvar(gaps, axis=axes), variance.dtype, 100)
        near(std, np.nanstd(gaps, axis=axes), std.dtype, 100)
        some = second.squeeze(axes) > 1e-6  # of a constant row nothing but rounding is left
        third, fourth = (np.nanmean(apart**power, **along) for power in (3, 4))
        near(skewness[some], (third / second**1.5).squeeze(axes)[some], mean.dtype, 100)
        near(kurtosis[some], (fourth / second**2 - 3).squeeze(axes)[some], mean.dtype, 100)
        near(least, np.nanmin(gaps, axis=axes), least.dtype)
        near(most, np.nanmax(gaps, axis=axes), most.dtype)
        near(
            z, np.where(where, apart / np.sqrt(second + eps), 0), x.dtype if x.dtype.kind == "f" else "f4", 10
        )
        total = np.nansum(np.abs(gaps), **along)
        near(norms, total.squeeze(axes), norms.dtype, 100)
        near(y, np.where(where, gaps / np.where(total == 0, 1, total), 0), y.dtype)
        low, high = np.nanmin(gaps, **along), np.nanmax(gaps, **along)
        wanted = np.where(high == low, -1 + 0 * gaps, 2 * (gaps - low) / (high - low) - 1)
        near(scaled, np.where(where, wanted, 0), scaled.dtype, 10)
    assert out is None or z is out
    for each in (y, scaled):
        lies_as(each, x)
