"""Statistic ops through every variant on the device, beside NumPy arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm, log_softmax, logsumexp, moments, rms_norm, sigma_clip, softmax, standardize
from cupynorm.plan.config import VARIANTS
from tests.gradient_calls import WIDTHS
from tests.statistic_calls import KINDS, OPS, assert_near, has, of_kind

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


@pytest.mark.small
@pytest.mark.parametrize("variant", VARIANTS)
def test_sigma_clip(xp: Any, variant: str) -> None:
    x, options = of_kind("where", WIDTHS[variant][0] // 2, "float32")
    x[:, ::9] *= 30

    found = sigma_clip(
        xp.asarray(x), where=xp.asarray(options["where"]), return_bounds=True, return_stats=True, plan=variant
    )

    expected = sigma_clip(x, **options, return_bounds=True, return_stats=True)
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.get(), wanted, 2e-5, 2e-5)
