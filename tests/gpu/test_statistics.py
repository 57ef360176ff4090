"""Statistic ops through every variant on the device, beside NumPy arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm, log_softmax, logsumexp, moments, rms_norm, sigma_clip, softmax, standardize
from cupynorm.plan.config import VARIANTS
from tests.gradient_calls import WIDTHS
from tests.statistic_calls import KINDS, OPS, ROWS, assert_medians, assert_near, hard_rows, has, of_kind

MISSING = ("omit", "where", "lengths", "left, omit")
CALLS = [pair for pair in itertools.product(OPS, KINDS) if has(*pair)]


def check(xp: Any, name: str, kind: str, variant: str, cols: int, dtype: str) -> None:
    function, options = OPS[name]
    x, missing = of_kind(kind, cols, dtype)
    given = {key: xp.asarray(each) if isinstance(each, np.ndarray) else each for key, each in missing.items()}

    found = function(xp.asarray(x), **options, **given, plan=variant)

    expected = function(x, **options, **missing)
    assert_near([each.get() for each in found], expected, dtype, (name, kind, variant, cols))


@pytest.mark.small
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_every_variant(xp: Any, name: str, kind: str, variant: str) -> None:
    """Rows in whole vectors of halves, and rows of floats that begin anywhere."""
    plain = kind in {"plain", "nan", "omit"} and not name.startswith("moments")
    for cols, dtype in zip(WIDTHS[variant], ("float16", "float32"), strict=True):
        whole = cols + 3 if plain and variant == "cached" and dtype == "float32" else cols
        check(xp, name, kind, variant, whole, dtype)


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize(("name", "kind"), CALLS)
@pytest.mark.parametrize(("cols", "dtype"), [(1 << 15, "float32"), (100_003, "float16"), (20_000, "float64")])
def test_long_rows(cuda: Any, name: str, kind: str, variant: str, cols: int, dtype: str) -> None:
    check(cuda, name, kind, variant, cols, dtype)


@pytest.mark.parametrize("cols", [1 << 22, (1 << 24) + 3])
def test_a_mean_far_larger_than_the_deviations(cuda: Any, cols: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, cols)) + 1e7
    x32 = x.astype(np.float32)

    mean, variance, skewness, kurtosis = (each.get() for each in moments(cuda.asarray(x32), order=4))
    z = standardize(cuda.asarray(x32)).get()

    expected = moments(x32, order=4, dtype=np.float64)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-7)
    np.testing.assert_allclose(variance, expected[1], rtol=2e-5)
    np.testing.assert_allclose(skewness, expected[2], atol=2e-5)
    np.testing.assert_allclose(kurtosis, expected[3], atol=1e-4)
    np.testing.assert_allclose(z, standardize(x32), atol=2e-5)


@pytest.mark.small
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp, layer_norm, rms_norm])
def test_what_does_not_count(xp: Any, function: Any, kind: str, variant: str) -> None:
    cols = WIDTHS[variant][0]
    x, options = of_kind(kind, cols, "float32")
    given = {key: xp.asarray(each) if isinstance(each, np.ndarray) else each for key, each in options.items()}

    found = function(xp.asarray(x), **given, plan=variant).get()

    np.testing.assert_allclose(found, function(x, **options), 2e-5, 2e-5)


@pytest.mark.small
@pytest.mark.parametrize("variant", VARIANTS)
def test_logsumexp_with_factors(xp: Any, variant: str) -> None:
    cols = WIDTHS[variant][0] // 2
    x, options = of_kind("weights", cols, "float32")
    b = options["weights"] - np.float32(0.5)

    found = logsumexp(xp.asarray(x), b=xp.asarray(b), return_sign=True, plan=variant)

    for ours, wanted in zip(found, logsumexp(x, b=b, return_sign=True), strict=True):
        np.testing.assert_allclose(ours.get(), wanted, 2e-5, 2e-5)


AGAIN = {"cached", "split", "uncached"}  # a kernel for each round


def is_undecided(row: Any, centre: str, sigma: float = 3.0, iterations: int | None = 10) -> bool:
    """Say whether in some round an element is so near to a bound that rounding decides whether it is kept.

    In a device's float32 a bound is off by some of its last bits, and what is kept decides on all later rounds.
    """
    kept = row.astype(np.float64)
    for _ in range(iterations or 100):
        kept = kept[np.isfinite(kept)]
        deviation = kept.std() if kept.size else 0.0
        if deviation == 0:
            return False
        middle = np.median(kept) if centre == "median" else kept.mean()
        from_bound = np.abs(np.abs(kept - middle) - sigma * deviation)
        if from_bound.min() < 4 * np.spacing(np.float32(np.abs(kept).max())):
            return True
        left = kept[np.abs(kept - middle) <= sigma * deviation]
        if left.size == kept.size:
            return False
        kept = left
    return False


def check_clipped(
    xp: Any, x: Any, where: Any = None, *, axis: int = -1, plan: Any = None, **options: Any
) -> None:
    """Compare with NumPy arrays: rows of which rounding does not decide what is kept."""
    given = {} if where is None else {"where": where}
    on_device = {name: xp.asarray(each) for name, each in given.items()}
    asked = {"return_bounds": True, "return_stats": True, "axis": axis, **options}

    found = [each.get() for each in sigma_clip(xp.asarray(x), plan=plan, **on_device, **asked)]

    expected = sigma_clip(x, **given, **asked)
    rows = np.moveaxis(x if where is None else np.where(where, x, np.nan), axis, -1)
    decided = ~np.apply_along_axis(is_undecided, -1, rows, **{"centre": "mean", **options})
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.shape == x.shape:
            np.testing.assert_array_equal(*(np.moveaxis(each, axis, -1)[decided] for each in (ours, theirs)))
        else:
            np.testing.assert_allclose(ours[decided], theirs[decided], 2e-5, 2e-5)


@pytest.mark.small
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("centre", ["mean", "median"])
def test_sigma_clip(xp: Any, centre: str, variant: str) -> None:
    rounds = 1 if centre == "median" and variant in AGAIN else 10
    for cols, dtype in zip(WIDTHS[variant], ("float16", "float32"), strict=True):
        whole = cols + 3 if variant == "cached" and dtype == "float32" else cols
        x, options = of_kind("where", whole, dtype)
        x[:, ::9] *= 30
        check_clipped(xp, x, options["where"], plan=variant, centre=centre, iterations=rounds)
        check_clipped(xp, x, plan=variant, centre=centre, iterations=rounds)


@pytest.mark.small
@pytest.mark.parametrize("variant", ["block", "cluster", "uncached"])
@pytest.mark.parametrize("centre", ["mean", "median"])
def test_sigma_clip_along_another_axis(xp: Any, centre: str, variant: str) -> None:
    x, options = of_kind("where", 60 * 20, "float32")
    cube, where = (each.reshape(6, 60, 20) for each in (x, options["where"]))
    check_clipped(xp, cube, where, axis=1, plan=variant, centre=centre, sigma=1.5)
    check_clipped(xp, cube.astype(np.float16), axis=1, plan=variant, centre=centre)


@pytest.mark.parametrize("centre", ["mean", "median"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "edge", [1, 2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
)
def test_sigma_clip_at_the_edges_of_plans(cuda: Any, edge: int, dtype: str, centre: str) -> None:
    for cols in {max(1, edge - 1), edge, edge + 1}:
        x, options = of_kind("where", cols, dtype)
        x[:, ::9] *= 30
        check_clipped(cuda, x, centre=centre)
        check_clipped(cuda, x, options["where"], centre=centre, sigma=1.5)
        check_clipped(cuda, x, centre=centre, iterations=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cols", [1, 2, 31, 128, 1000, 4096, 16384, 100_000, 1 << 20])
def test_medians_of_hard_rows(cuda: Any, cols: int, dtype: str) -> None:
    assert_medians(cuda, hard_rows(cols, dtype), None, -1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cols", [1, 2, 3, 10, 16, 17, 32, 33, 64, 100, 128, 300, 400, 2000])
def test_medians_of_hard_columns(cuda: Any, cols: int, dtype: str) -> None:
    """Of which a thread, a warp, or several have all elements; as many as all blocks of a device take, and few."""
    columns = hard_rows(cols, dtype).T
    for times in (2, 300):
        assert_medians(cuda, np.tile(columns, (1, times)), None, 0)


@pytest.mark.parametrize("cols", [1 << 19, (1 << 20) + 1, 1 << 22])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sigma_clip_of_rows_that_no_chip_holds(cuda: Any, cols: int, dtype: str) -> None:
    x, _ = of_kind("plain", cols, dtype)
    x[:, ::9] *= 30
    check_clipped(cuda, x)
    check_clipped(cuda, x, centre="median", iterations=2)
    check_clipped(cuda, x.reshape(2, -1, 3), axis=1)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32"])
def test_sigma_clip_of_integers(cuda: Any, dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (6, 5000)).astype(dtype)
    check_clipped(cuda, x, sigma=1.5)
    check_clipped(cuda, x.reshape(6, 50, 100), axis=1, sigma=1.2, centre="median")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_moments_of_bytes(xp: Any, dtype: str, variant: str) -> None:
    """Sums of bytes are exact: of the largest ones, of those that differ by one, and of a constant row."""
    cols = WIDTHS[variant][0]
    random = np.random.default_rng(cols)
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    x = random.integers(low, high, (ROWS, cols), endpoint=True)
    x[0], x[1], x[2, ::2], x[3] = high, low, high, high - (np.arange(cols) == cols // 2)
    x = x.astype(dtype)

    found = moments(xp.asarray(x), plan=variant)

    for ours, wanted in zip(found, (x.mean(1, np.float64), x.var(1, np.float64)), strict=True):
        np.testing.assert_allclose(ours.get(), wanted, 1e-6, 1e-7 * high)
    assert not found[1].get()[:2].any()
