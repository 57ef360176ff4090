"""standardize, normalize, rescale and moments: definitions, missing and special values, layouts, and every error."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm, moments, normalize, rescale, sigma_clip, standardize
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.call import asking
from cupynorm.host import reference
from cupynorm.lower.statistics import SPARE_STEPS
from cupynorm.plan.config import VARIANTS
from cupynorm.plan.limits import RECORDED
from cupynorm.tools.testing import TOLERANCES
from tests.gradient_calls import WIDTHS
from tests.simulator import simulated
from tests.statistic_calls import KINDS, OPS, assert_medians, assert_near, hard_rows, has, of_kind

__all__ = ["simulated"]  # a fixture

every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(actual: Any, expected: Any, size: float = 1.0) -> None:
    """Compare with numbers of about this size, by actual's dtype."""
    tolerance = 2 * TOLERANCES[actual.dtype.name]
    np.testing.assert_allclose(actual.astype(np.float64), expected, tolerance, tolerance * size)


def of_rows(x: Any) -> Any:
    return x.astype(np.longdouble if x.dtype == np.float64 else np.float64)


@every_dtype
@pytest.mark.parametrize("ddof", [0, 1, 2.5])
def test_standardize_is_the_definition(dtype: str, ddof: float) -> None:
    x = 3 + 2 * normal(4, 3, 33, dtype=dtype_of(dtype))
    wide = of_rows(x)

    z, mean, std = standardize(x, ddof=ddof, eps=0.5, return_stats=True)

    apart = wide - wide.mean(-1, keepdims=True)
    variance = (apart**2).sum(-1, keepdims=True) / (33 - ddof)
    assert (z.dtype, mean.dtype) == (x.dtype, np.float64 if dtype == "float64" else np.float32)
    close(z, (apart / np.sqrt(variance + 0.5)).astype(np.float64))
    close(mean, wide.mean(-1).astype(np.float64), 3)
    close(std, np.sqrt(variance)[..., 0].astype(np.float64))


@every_dtype
@pytest.mark.parametrize("order", [1, 2, np.inf])
def test_normalize_is_the_definition(dtype: str, order: float) -> None:
    x = normal(4, 3, 33, dtype=dtype_of(dtype))
    wide = x.astype(np.float64).reshape(4, 99)

    y, norms = normalize(x, order, axis=(-2, -1), return_norms=True)

    expected = np.linalg.norm(wide, order, axis=-1)
    close(y, (wide / expected[:, None]).reshape(x.shape))
    close(norms, expected)


@every_dtype
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 5), (1, -1)])
def test_rescale_is_the_definition(dtype: str, low: float, high: float) -> None:
    x = normal(4, 33, dtype=dtype_of(dtype))
    wide = x.astype(np.float64)

    y, smallest, largest = rescale(x, low, high, return_range=True)

    least, most = wide.min(-1), wide.max(-1)
    close(y, low + (high - low) * (wide - least[:, None]) / (most - least)[:, None], 5)
    assert np.array_equal(smallest, least)
    assert np.array_equal(largest, most)
    assert np.array_equal(y[np.arange(4), wide.argmin(-1)], np.full(4, low))
    assert np.array_equal(y[np.arange(4), wide.argmax(-1)], np.full(4, high))


@every_dtype
def test_moments_are_the_definitions(dtype: str) -> None:
    x = np.exp(normal(4, 3, 33)).astype(dtype_of(dtype))
    wide = x.astype(np.float64)

    mean, variance, skewness, kurtosis = moments(x, order=4, ddof=1)

    apart = wide - wide.mean(-1, keepdims=True)
    second, third, fourth = ((apart**power).mean(-1) for power in (2, 3, 4))
    close(mean, wide.mean(-1))
    close(variance, wide.var(-1, ddof=1), 4)
    close(skewness, third / second**1.5, 4)
    close(kurtosis, fourth / second**2 - 3, 16)
    assert [each.shape for each in moments(x, order=3, axis=(-2, -1), keepdims=True)] == [(4, 1, 1)] * 3
    assert [each.shape for each in moments(x)] == [(4, 3)] * 2


def test_scipys_functions_agree() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    x = np.exp(normal(5, 40))
    x[0, ::7] = np.nan
    x[3, 1:] = np.nan

    for nan in ("propagate", "omit"):
        _, _, skewness, kurtosis = moments(x, order=4, nan=nan)
        z = standardize(x, ddof=1, nan=nan)
        with np.errstate(all="ignore"):
            many = [0, 1, 2, 4]  # SciPy warns of one element
            np.testing.assert_allclose(skewness[many], stats.skew(x[many], axis=-1, nan_policy=nan))
            np.testing.assert_allclose(kurtosis[many], stats.kurtosis(x[many], axis=-1, nan_policy=nan))
            np.testing.assert_allclose(
                z[many], stats.zscore(x[many], axis=-1, ddof=1, nan_policy=nan), atol=1e-14
            )


@pytest.mark.parametrize("ddof", [0, 1])
def test_missing_values_are_those_of_numpys_nan_functions(ddof: int) -> None:
    x, options = of_kind("all", 40, "float64")
    kept = options["where"] & ~np.isnan(x)
    gaps = np.where(kept, x, np.nan)

    mean, variance = moments(x, where=options["where"], nan="omit", ddof=ddof)
    z = standardize(x, where=options["where"], nan="omit", ddof=ddof)
    y, norms = normalize(x, 1, where=options["where"], nan="omit", return_norms=True)
    _, low, high = rescale(x, where=options["where"], nan="omit", return_range=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of rows of which nothing is kept
        np.testing.assert_allclose(mean, np.nanmean(gaps, -1))
        np.testing.assert_allclose(variance, np.nanvar(gaps, -1, ddof=ddof), rtol=1e-12)
        expected = (x - np.nanmean(gaps, -1, keepdims=True)) / np.nanstd(gaps, -1, ddof=ddof, keepdims=True)
        np.testing.assert_allclose(low, np.nanmin(gaps, -1))
        np.testing.assert_allclose(high, np.nanmax(gaps, -1))
    np.testing.assert_allclose(z, np.where(options["where"], expected, 0), rtol=1e-9)
    total = np.nansum(np.abs(gaps), -1)
    np.testing.assert_allclose(norms, total)
    divided = x / np.where(total == 0, 1, total)[:, None]
    np.testing.assert_allclose(y, np.where(options["where"], divided, 0))


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("order", [1, 2, np.inf])
def test_elements_of_weight_0_may_have_any_size(order: float, axis: int, simulated: Any) -> None:
    x = np.array([[-2.5, 1.5, 3, 0], [1, np.inf, 3, 4], [1e-30, np.inf, 1e30, -7]], np.float32)
    weights = np.array([[0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]], np.float32)
    cupy = simulated.cupy
    placed = [cupy.asarray(each) for each in (x, weights)]

    expected = normalize(x, order, axis, weights=weights, return_norms=True)
    found = normalize(placed[0], order, axis, weights=placed[1], return_norms=True)

    nothing = np.broadcast_to(~weights.any(axis, keepdims=True), x.shape)
    np.testing.assert_array_equal(expected[0][nothing], x[nothing])
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.get(), wanted, rtol=1e-6)


def test_weights_count_as_often_as_they_say() -> None:
    x, times = normal(3, 20), np.random.default_rng(1).integers(0, 4, (3, 20))
    repeated = [np.repeat(row, count) for row, count in zip(x, times, strict=True)]

    found = moments(x, weights=times.astype(np.float64), order=4, ddof=1)
    z, mean, std = standardize(x, weights=times.astype(np.float32), ddof=1, return_stats=True)
    _, norms = normalize(x, weights=times.astype(np.float64), return_norms=True)

    for row, some in enumerate(repeated):
        for ours, wanted in zip(found, moments(some, order=4, ddof=1), strict=True):
            assert ours[row] == pytest.approx(wanted)
        assert std[row] == pytest.approx(some.std(ddof=1))
        np.testing.assert_allclose(z[row], (x[row] - some.mean()) / some.std(ddof=1))
        assert norms[row] == pytest.approx(np.linalg.norm(some))
    assert np.allclose(mean, found[0])


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-7)])
def test_a_mean_far_larger_than_the_deviations(dtype: str, rtol: float, simulated: Any) -> None:
    x = (normal(3, 1000) + (1e7 if dtype == "float32" else 1e12)).astype(dtype)
    wide = (x - x[:, :1]).astype(np.float64)

    for array in (x, simulated.cupy.asarray(x)):
        _, variance = moments(array)
        z = standardize(array, where=simulated.cupy.asarray(x > 0) if array is not x else x > 0)
        variance, z = (np.asarray(getattr(each, "get", lambda each=each: each)()) for each in (variance, z))

        np.testing.assert_allclose(variance, wide.var(-1), rtol=2 * rtol)
        apart = wide - wide.mean(-1, keepdims=True)
        np.testing.assert_allclose(z, apart / wide.std(-1, keepdims=True), atol=10 * rtol)


def test_clipped_is_what_lies_beyond_the_bounds() -> None:
    x = (1e7 + np.random.default_rng(0).integers(-3, 4, (2000, 8))).astype(np.float32)

    y, low, high = sigma_clip(x, 2, centre="median", return_bounds=True)

    np.testing.assert_array_equal(~np.isnan(y), (low[:, None] <= x) & (x <= high[:, None]))


@pytest.mark.parametrize("kind", ["", "nan", "where", "weights"])
def test_a_row_with_an_infinity_has_no_moments(kind: str, simulated: Any) -> None:
    inf, nan = np.inf, np.nan
    rows = np.array([[1, inf, 2, 3], [1, 2, 3, -inf], [-inf, inf, 1, 2], [inf, nan, inf, nan]], np.float32)
    cupy = simulated.cupy

    for place, axis in ((np.asarray, -1), (cupy.asarray, -1), (cupy.asarray, 0)):
        x = rows if axis == -1 else rows.T.copy()
        kept: dict[str, Any] = {kind: "omit" if kind == "nan" else place(~np.isnan(x))} if kind else {}
        results = [
            *moments(place(x), axis, order=4, **kept),
            *standardize(place(x), axis, return_stats=True, **kept)[1:],
        ]
        if kind in {"nan", "where"}:
            results += layer_norm(place(x), axis=axis, return_stats=True, **kept)[1:]
        for each in results:
            assert np.isnan(cupy.asnumpy(each)).all(), each


@pytest.mark.parametrize("ddof", [0, -1])
def test_a_row_of_which_nothing_counts_has_no_moments(ddof: float, simulated: Any) -> None:
    rows = np.array([[np.nan] * 4, [1, np.nan, 3, np.nan]], np.float32)
    cupy = simulated.cupy

    for place, axis in ((np.asarray, -1), (cupy.asarray, -1), (cupy.asarray, 0)):
        x = place(rows if axis == -1 else rows.T.copy())
        mean, variance = moments(x, axis, ddof=ddof, nan="omit")
        _, again, std = standardize(x, axis, ddof=ddof, nan="omit", return_stats=True)
        for found, wanted in (
            (mean, 2),
            (again, 2),
            (variance, 2 / (2 - ddof)),
            (std, (2 / (2 - ddof)) ** 0.5),
        ):
            np.testing.assert_allclose(cupy.asnumpy(found).ravel(), [np.nan, wanted], 1e-6)


@pytest.mark.parametrize("cols", [12, 130])
def test_elements_of_weight_0_keep_their_digits(cols: int, simulated: Any) -> None:
    """Also where a thread has no other ones."""
    x = (1e7 + normal(4, cols)).astype(np.float32)
    weights = np.zeros(x.shape, np.float32)
    weights[:, 2], weights[:, 5] = 1, 3
    x[:, 2] += 4  # or the deviation could be 0
    x[1, 7] = np.inf
    place = simulated.cupy.asarray

    expected = standardize(x, weights=weights)
    for plan in (None, "uncached"):
        found = standardize(place(x), weights=place(weights), plan=plan).get()
        np.testing.assert_allclose(found, expected, 2e-5)
    found = standardize(place(x.T.copy()), axis=0, weights=place(weights.T.copy())).get()
    np.testing.assert_allclose(found.T, expected, 2e-5)


def test_tiny_and_huge_rows() -> None:
    x = np.array([[3e-30, 4e-30], [3e30, -4e30], [3e-42, 4e-42]], np.float32)

    for order, expected in ((2, [0.6, 0.8]), (1, [3 / 7, 4 / 7]), (np.inf, [0.75, 1.0])):
        y, norms = normalize(x, order, return_norms=True)
        np.testing.assert_allclose(np.abs(y[:2]), [expected] * 2, rtol=1e-6)
        np.testing.assert_allclose(np.abs(y[2]), expected, rtol=1e-3)  # 3e-42 has three digits
        np.testing.assert_allclose(norms[0], np.linalg.norm([3.0, 4.0], order) * 1e-30, rtol=1e-6)
    np.testing.assert_allclose(standardize(x[:2]), [[-1, 1], [1, -1]], rtol=1e-6)
    np.testing.assert_allclose(
        normalize(np.array([[3e200, 4e200], [3e-200, 4e-200]])), [[0.6, 0.8]] * 2, rtol=1e-15
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_values(dtype: str, simulated: Any) -> None:
    x = np.array([[0, 0, 0], [5, 5, 5], [np.inf, 1, 2], [np.nan, 1, 2], [-np.inf, np.inf, 1]], dtype)
    nan = np.nan
    expected = {
        standardize: [[nan] * 3] * 5,
        normalize: [[0] * 3, [3**-0.5] * 3, [nan, 0, 0], [nan] * 3, [nan, nan, 0]],
        rescale: [[0] * 3, [0] * 3, [nan, 0, 0], [nan] * 3, [nan, nan, nan]],
    }
    for function, wanted in expected.items():
        for array in (x, simulated.cupy.asarray(x)):
            y = function(array)
            y = y if array is x else y.get()
            if function is rescale:  # whose infinite rows are nan or low
                np.testing.assert_array_equal(y[:2], wanted[:2])
                assert np.isnan(y[2, 0])
                assert np.isnan(y[3]).all()
                continue
            np.testing.assert_allclose(y, wanted, rtol=1e-6)
    for array in (x, simulated.cupy.asarray(x)):
        found = [each if array is x else each.get() for each in moments(array, order=4)]
        np.testing.assert_array_equal(found[0], [0, 5, nan, nan, nan])
        np.testing.assert_array_equal(found[1], [0, 0, nan, nan, nan])
        assert np.isnan(found[2]).all()
        assert np.isnan(found[3]).all()


def test_too_few_elements_are_nan() -> None:
    x = np.array([[1.0, 2.0, 3.0]])

    assert np.isnan(standardize(x, ddof=3)).all()
    assert np.isnan(moments(x, ddof=4)[1]).all()
    assert [float(each[0]) for each in moments(x, ddof=2)] == [2.0, 2.0]
    mean, variance = moments(x, where=np.zeros(3, bool))
    assert np.isnan([mean, variance]).all()
    assert standardize(x, where=np.zeros(3, bool)).tolist() == [[0.0] * 3]
    assert normalize(x, lengths=[0], return_norms=True)[1].tolist() == [0.0]


def test_nan_may_be_refused() -> None:
    x = np.array([[1.0, np.nan, 3.0]])

    for function in (standardize, normalize, rescale, moments):
        with pytest.raises(ValueError, match="x holds nan"):
            function(x, nan="raise")
        function(x, nan="raise", where=~np.isnan(x))


def test_eps_makes_it_layer_norm() -> None:
    x = normal(4, 50, dtype=np.float32)

    np.testing.assert_allclose(standardize(x, eps=1e-5), layer_norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_several_pieces_and_layouts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, options = of_kind(kind, 64, "float64")
    calls = {name: call for name, call in OPS.items() if has(name, kind)}
    whole = {name: function(x, **own, **options) for name, (function, own) in calls.items()}
    monkeypatch.setattr(reference, "BLOCK", 16)

    for name, (function, own) in calls.items():
        strided = np.asfortranarray(x)[:, ::-1][:, ::-1]
        assert_near(function(strided, **own, **options), whole[name], "float64", name)


def test_out_may_be_x_and_results_have_the_dtype_asked_for() -> None:
    x = normal(3, 20, dtype=np.float32)
    for function in (standardize, normalize, rescale):
        expected, same = function(x), x.copy()
        assert function(same, out=same) is same
        np.testing.assert_array_equal(same, expected)
        assert function(x, dtype=np.float64).dtype == np.float64
        np.testing.assert_allclose(function(x, dtype="float64"), function(x.astype(np.float64)), rtol=1e-15)
    mean = np.empty(3, np.float16)
    found = moments(x, out=(mean, None))
    assert found[0] is mean
    np.testing.assert_allclose(mean, x.mean(-1), rtol=1e-3)
    assert [each.dtype for each in moments(x, dtype=np.float64)] == [np.float64] * 2


def test_no_rows() -> None:
    x = np.empty((0, 5))

    assert standardize(x).shape == (0, 5)
    assert [each.shape for each in moments(x, order=4)] == [(0,)] * 4


def clipped(x: Any, kept: Any, below: float, above: float, iterations: int, centre: Any) -> Any:
    """Sigma clipping of rows, as it is told in words."""
    kept = kept & np.isfinite(x)
    for _ in range(min(iterations, x.shape[-1])):
        for row, keeps in zip(x, kept, strict=True):
            some = row[keeps].astype(np.float64)
            if some.size:
                middle, std = centre(some), some.std()
                np.logical_and(keeps, row >= middle - below * std, out=keeps)
                np.logical_and(keeps, row <= middle + above * std, out=keeps)
    return np.where(kept, x, np.nan)


def outliers(dtype: str = "float32", cols: int = 300, rows: tuple[int, ...] = (5,)) -> Any:
    x = (normal(*rows, cols) * 3 + 100).astype(dtype)
    x[..., ::17] *= 20
    few = x.reshape(-1, cols)
    few[1, :5], few[2, 3], few[3], few[4] = np.nan, np.inf, 7, np.nan
    return x


@pytest.mark.parametrize("centre", ["mean", "median"])
@pytest.mark.parametrize(("below", "above", "iterations"), [(3, 3, 10), (2, 5, 10), (3, 3, 1)])
def test_sigma_clip_is_what_its_words_say(centre: str, below: float, above: float, iterations: int) -> None:
    x, where = outliers(), np.random.default_rng(2).random((5, 300)) < 0.9
    expected = clipped(x, where, below, above, iterations, getattr(np, centre))

    found = sigma_clip(
        x,
        sigma_lower=below,
        sigma_upper=above,
        iterations=iterations,
        centre=centre,
        where=where,
        return_bounds=True,
        return_stats=True,
    )

    y, low, high, mean, std = found
    np.testing.assert_array_equal(y, expected)
    inside = where & (x >= low[:, None]) & (x <= high[:, None])
    np.testing.assert_array_equal(~np.isnan(y), inside)
    for row in range(4):
        some = expected[row][~np.isnan(expected[row])].astype(np.float64)
        assert [mean[row], std[row]] == pytest.approx([some.mean(), some.std()], rel=1e-6)
    assert np.isnan([each[4] for each in (low, high, mean, std)]).all()


# Of the kernels that hold a row for all rounds one of each, and of those that read it in each round; halves lie on, and
# odd widths across, the edges of vectors, threads and blocks.
CLIPPED = [
    ("mean", "warp", 77, "float32"),
    ("median", "warp", 64, "float16"),
    ("mean", "block", 1001, "float16"),
    ("median", "block", 1024, "float32"),
    ("mean", "cluster", 4101, "float32"),
    ("median", "cluster", 4096, "float16"),
    ("mean", "shared", 1024, "float16"),
    ("median", "shared", 1001, "float32"),
    ("median", "shared", 128, "float64"),
    ("mean", "split", 4101, "float32"),
    ("median", "uncached", 300, "float16"),
    ("mean", "cached", 1024, "float32"),
]
EVERYTHING: dict[str, Any] = {"return_bounds": True, "return_stats": True}


def same_clipped(cupy: Any, x: Any, where: Any = None, *, axis: int = -1, **options: Any) -> Any:
    """Compare a device's sigma_clip with the words and with NumPy arrays; return what it keeps."""
    given = {} if where is None else {"where": where}
    on_device = {name: cupy.asarray(each) for name, each in given.items()}
    plan = options.pop("plan", None)
    found = sigma_clip(cupy.asarray(x), axis=axis, plan=plan, **on_device, **EVERYTHING, **options)
    expected = sigma_clip(x, axis=axis, **given, **EVERYTHING, **options)
    rows = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    kept = np.ones(rows.shape, bool) if where is None else np.moveaxis(where, axis, -1).reshape(rows.shape)
    sigma, centre = options.get("sigma", 3.0), getattr(np, options.get("centre", "mean"))
    words = clipped(rows, kept, sigma, sigma, options.get("iterations", 10), centre)
    y = found[0].get()
    np.testing.assert_array_equal(np.moveaxis(y, axis, -1).reshape(rows.shape), words)
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(ours.get().astype(np.float64), wanted.astype(np.float64), 1e-5, 1e-6)
    return y


@pytest.mark.parametrize(("centre", "plan", "cols", "dtype"), CLIPPED)
def test_a_device_clips_the_same(centre: str, plan: str, cols: int, dtype: str, simulated: Any) -> None:
    x, where = outliers(dtype, cols), np.random.default_rng(2).random((5, cols)) < 0.9
    again = plan in {"split", "uncached", "cached"}  # a kernel for each step of a search
    iterations = 1 if centre == "median" and again else 10

    for _ in range(1 if again else 2):  # the second call is launched by its signature
        same_clipped(simulated.cupy, x, where, centre=centre, plan=plan, iterations=iterations)
    if plan == "warp":
        same_clipped(simulated.cupy, x, centre=centre, plan=plan)


@pytest.mark.parametrize(
    ("centre", "plan", "cols", "dtype"),
    [
        ("mean", "cluster", 300, "float16"),
        ("median", "block", 37, "float32"),
        ("mean", "block", 61, "float32"),
    ],
)
def test_a_device_clips_the_same_along_another_axis(
    centre: str, plan: str, cols: int, dtype: str, simulated: Any
) -> None:
    x = np.moveaxis(outliers(dtype, cols, rows=(2, 10)), 1, 2)
    where = np.random.default_rng(2).random(x.shape) < 0.9

    same_clipped(simulated.cupy, x, where if plan != "block" else None, axis=1, centre=centre, plan=plan)


@pytest.mark.parametrize("centre", ["mean", "median"])
def test_rounds_end(centre: str, simulated: Any) -> None:
    """Rows of which nothing is left, that are all equal, or from which every round takes something."""
    x = np.zeros((7, 64), np.float32)
    x[0, ::2] = 1  # with sigma=0 nothing is left
    x[1] = 3
    x[2] = 1.5 ** np.arange(64, dtype=np.float32)
    x[3] = normal(64, dtype=np.float32)
    x[4], x[5, :63], x[6, ::2] = np.nan, np.inf, -np.inf
    y = same_clipped(simulated.cupy, x, centre=centre, sigma=0)
    assert np.isnan(y[0]).all()
    for iterations in (1, 2, 100_000_000):
        y = same_clipped(simulated.cupy, x, centre=centre, sigma=1.5, iterations=iterations)
        np.testing.assert_array_equal(y[1], x[1])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 63, 64])
def test_a_median_is_that_of_numpy(count: int, simulated: Any) -> None:
    """Of even and odd counts; numbers of either sign, zeros of both, equal ones."""
    random = np.random.default_rng(count)
    x = np.full((8, 64), np.nan, np.float32)
    x[0, :count], x[1, :count], x[2, :count] = -0.0, random.integers(-2, 3, count), random.normal(size=count)
    x[3, -count:], x[4, :count] = 1e30 * random.normal(size=count), -np.exp(random.normal(size=count) * 20)
    x[5, :count], x[6, : count // 2], x[7, :count] = (
        np.arange(count),
        -0.0,
        np.where(np.arange(count) % 2, 0.0, -0.0),
    )
    x[6, count // 2 : count] = 0.0

    _, low, high = sigma_clip(simulated.cupy.asarray(x), 1, 1, centre="median", return_bounds=True)

    with np.errstate(over="ignore"):
        middle = np.nanmedian(x.astype(np.float64), -1)
    std = np.nanstd(x.astype(np.float64), -1)
    narrow = std < 1e18  # whose squares float32 holds
    off = 2e-6 * (np.abs(middle) + std + 1)
    assert (np.abs(low.get() - (middle - std)) <= off)[narrow].all()
    assert (np.abs(high.get() - (middle + std)) <= off)[narrow].all()
    alone = sigma_clip(simulated.cupy.asarray(x), 0, 1, centre="median", return_bounds=True)[1].get()
    np.testing.assert_array_equal(alone[narrow], middle[narrow].astype(np.float32))


@pytest.mark.parametrize(
    ("plan", "cols", "dtype"),
    [
        ("warp", 61, "float32"),
        ("warp", 128, "float64"),
        ("block", 1024, "float32"),
        ("cluster", 4096, "float32"),
        ("shared", 1001, "float32"),
        ("uncached", 300, "float32"),
        ("uncached", 40, "float64"),
    ],
)
def test_medians_of_hard_rows(plan: str, cols: int, dtype: str, simulated: Any) -> None:
    assert_medians(simulated.cupy, hard_rows(cols, dtype), plan, -1)


@pytest.mark.parametrize("cols", [1, 2, 5, 16, 31, 60])
def test_medians_of_hard_columns(cols: int, simulated: Any) -> None:
    """Short columns, of which a thread has all elements and sorts them, and some that two threads share."""
    x = np.tile(hard_rows(cols).T, (1, 4))[:, :64]

    assert_medians(simulated.cupy, x, None, 0)
    if cols > 2:
        x = (normal(cols, 64) * 20 + 100).clip(0).astype("uint16")
        x[cols // 2, ::3] = 4000
        same_clipped(simulated.cupy, x, axis=0, centre="median", sigma=1.9)


def test_rows_that_no_chip_holds_are_read_in_each_round() -> None:
    def kernels(cols: int, device: str = "h200", **options: Any) -> int:
        x = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (8, cols), (4 * cols, 4))
        return len(asking.specs_of(lambda: sigma_clip(x, **options), RECORDED[device], options.get("plan")))

    assert [kernels(cols) for cols in (64, 4096, 1 << 16)] == [1, 1, 1]
    assert kernels(1 << 21) == 11
    assert kernels(1 << 21, iterations=2, centre="median") == 2 * (1 + 32 + SPARE_STEPS) + 1
    assert kernels(1 << 14, "a100") == 1
    assert kernels(1 << 16, "a100") == 11


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_a_device_clips_integers(dtype: str, simulated: Any) -> None:
    x = np.random.default_rng(3).integers(90, 110, (5, 64)).astype(dtype)
    x[:, ::17] = 127

    same_clipped(simulated.cupy, x, sigma=2)


def test_sigma_clip_refuses_what_it_cannot_do() -> None:
    x = outliers()

    for options, kind, message in (
        ({"sigma": -1}, ValueError, "sigma is -1"),
        ({"sigma_upper": "3"}, TypeError, "sigma_upper is '3'"),
        ({"iterations": 0}, ValueError, "iterations is 0: give an integer of 1 or more"),
        ({"centre": "mode"}, ValueError, 'centre is \'mode\': use "mean" or "median"'),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            sigma_clip(x, **options)


# One of each that the kernels tell apart; tests/gpu has all of them with all variants.
SIMULATED = [
    ("standardize", "plain", "block"),
    ("standardize", "nan", "cached"),
    ("standardize", "omit", "cluster"),
    ("standardize", "where", "split"),
    ("standardize", "all", "uncached"),
    ("normalize, 1", "left, omit", "shared"),
    ("normalize, 2", "lengths", "cluster"),
    ("normalize, inf", "nan", "split"),
    ("normalize, inf", "weights", "block"),
    ("rescale", "where", "block"),
    ("moments", "plain", "split"),
    ("moments", "weights", "cached"),
    ("moments, 4", "lengths", "block"),
    ("moments, 4", "all", "warp"),
    ("moments, 4", "plain", "shared"),
    ("moments, 4", "plain", "split"),
]


@pytest.mark.parametrize(("name", "kind", "variant"), SIMULATED)
def test_a_device_gives_the_same(name: str, kind: str, variant: str, simulated: Any) -> None:
    asarray = simulated.cupy.asarray
    number = SIMULATED.index((name, kind, variant))
    cols, dtype = WIDTHS[variant][number % 2], ("float16", "float32")[number % 2]
    if variant == "cached":
        cols, dtype = 1000, "float16"
    function, options = OPS[name]
    x, missing = of_kind(kind, cols, dtype)
    given = {key: asarray(each) if isinstance(each, np.ndarray) else each for key, each in missing.items()}

    for _ in range(2):  # the second call is launched by its signature
        found = function(asarray(x), **options, **given, plan=variant)
        assert_near([each.get() for each in found], function(x, **options, **missing), dtype)


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_device_gives_the_same_along_another_axis(name: str, simulated: Any) -> None:
    function, options = OPS[name]
    x = normal(2, 40, 6, dtype=np.float32) + np.float32(3)

    found = function(simulated.cupy.asarray(x), **options, axis=1)

    assert_near([each.get() for each in found], function(x, **options, axis=1), "float32")


def test_every_variant_occurs() -> None:
    assert {variant for *_, variant in SIMULATED} == set(VARIANTS)
    assert {name for name, *_ in SIMULATED} == set(OPS)
    assert {kind for _, kind, _ in SIMULATED} == set(KINDS)


def test_a_device_writes_where_it_is_told(simulated: Any) -> None:
    cupy = simulated.cupy
    x = normal(4, 48, dtype=np.float32)
    on_device, out = cupy.asarray(x), [cupy.empty(4, np.float16), None, cupy.empty((8,), np.float32)[::2]]

    found = moments(on_device, order=3, out=tuple(out))
    y = standardize(on_device, out=on_device)

    assert found[0] is out[0]
    assert found[2] is out[2]
    for ours, wanted in zip(found, moments(x, order=3), strict=True):
        np.testing.assert_allclose(ours.get().astype(np.float32), wanted, rtol=1e-3, atol=1e-4)
    assert y is on_device
    np.testing.assert_allclose(y.get(), standardize(x), rtol=1e-5, atol=1e-6)


X = np.ones((2, 3), np.float32)
ERRORS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (standardize, {"eps": -1}, ValueError, "eps is -1: it must be 0 or a positive finite number"),
    (standardize, {"ddof": "1"}, TypeError, "ddof is '1'"),
    (standardize, {"nan": "drop"}, ValueError, 'nan is \'drop\': use "propagate", "omit" or "raise"'),
    (standardize, {"nan": True}, TypeError, "nan is True"),
    (standardize, {"return_stats": 1}, TypeError, "return_stats is 1: use True or False"),
    (standardize, {"weights": np.ones(4)}, ValueError, "weights has shape (4,), x has (2, 3)"),
    (standardize, {"weights": np.ones(3, complex)}, TypeError, "weights: dtype complex128 is not supported"),
    (
        standardize,
        {"weights": np.array([1, 2, -3])},
        ValueError,
        "weights holds -3: use numbers of 0 or more",
    ),
    (moments, {"weights": np.float16(-0.5).reshape(1)}, ValueError, "weights holds -0.5: use numbers of 0"),
    (standardize, {"where": np.ones(3)}, TypeError, "where has dtype float64"),
    (standardize, {"lengths": [1, 4]}, ValueError, "lengths holds 4"),
    (standardize, {"plan": "warp"}, ValueError, "x is a NumPy array"),
    (standardize, {"out": np.empty((2, 2))}, ValueError, "out has shape (2, 2)"),
    (normalize, {"ord": 3}, ValueError, "ord is 3: use 1, 2 or numpy.inf"),
    (normalize, {"ord": "2"}, TypeError, "ord is '2': use 1, 2 or numpy.inf"),
    (normalize, {"ord": True}, TypeError, "ord is True: use 1, 2 or numpy.inf"),
    (rescale, {"low": np.inf}, ValueError, "low is inf: it must be finite"),
    (rescale, {"low": 1e39}, ValueError, 'low is 1e+39, beyond float32: give dtype="float64"'),
    (rescale, {"high": None}, TypeError, "high is None: give a number"),
    (moments, {"order": 5}, ValueError, "order is 5: use 2, 3 or 4"),
    (moments, {"order": 2.0}, TypeError, "order is 2.0: use 2, 3 or 4"),
    (
        moments,
        {"out": X},
        TypeError,
        "out is a numpy.ndarray: give a tuple of 2, (mean, variance), None where",
    ),
    (
        moments,
        {"out": (None,)},
        ValueError,
        "out has 1 entries: give a tuple of 2, (mean, variance), None where",
    ),
    (moments, {"out": (np.empty(3), None)}, ValueError, "out of mean has shape (3,), the result has (2,)"),
    (moments, {"out": (X[:, 0], None)}, ValueError, "out of mean and x share memory"),
]


@pytest.mark.parametrize(("function", "options", "kind", "message"), ERRORS)
def test_errors_say_what_came_and_what_is_allowed(
    function: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        function(X, **options)


def test_two_results_share_no_memory() -> None:
    both = np.empty(2, np.float32)

    with pytest.raises(ValueError, match="out of variance and out of mean share memory"):
        moments(X, out=(both, both))


def test_a_device_does_not_look_for_nan(simulated: Any) -> None:
    with pytest.raises(ValueError, match='nan="raise" is for NumPy arrays'):
        standardize(simulated.cupy.asarray(X), nan="raise")
