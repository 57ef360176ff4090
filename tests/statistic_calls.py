"""Calls of statistic ops of each kind, for tests of what must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupynorm import moments, normalize, rescale, sigma_clip, standardize

ROWS = 6
OPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "standardize": (standardize, {"ddof": 1, "return_stats": True}),
    "normalize, 1": (normalize, {"ord": 1, "return_norms": True}),
    "normalize, 2": (normalize, {"ord": 2, "return_norms": True}),
    "normalize, inf": (normalize, {"ord": np.inf, "return_norms": True}),
    "rescale": (rescale, {"low": -1, "high": 2, "return_range": True}),
    "moments": (moments, {"ddof": 1}),
    "moments, 4": (moments, {"order": 4}),
}
KINDS = ("plain", "nan", "omit", "where", "lengths", "left, omit", "weights", "all")
# how far float32 may be off, beside numbers of size 1, and float16
TOLERANCE = {"float16": 2e-3, "float32": 2e-5, "float64": 1e-11}


def of_kind(kind: str, cols: int, dtype: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return x, and the keywords that say what counts. Some rows have nothing or one element that does."""
    random = np.random.default_rng([seed, cols])
    x = (random.standard_normal((ROWS, cols)) * 3 + (5 if dtype == "float16" else 1000)).astype(dtype)
    gaps = x.copy()
    gaps[random.random(x.shape) < 0.1] = np.nan
    gaps[1], gaps[2, 1:], gaps[5] = np.nan, np.nan, x[5]
    where = random.random(x.shape) < 0.6
    where[3] = False
    lengths = np.array([0, 1, cols // 2, cols, cols // 3, cols - 1])
    weights = (random.random(x.shape) * 2 * (random.random(x.shape) < 0.7)).astype(dtype)
    weights[4] = 0
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (x, {}),
        "nan": (gaps, {}),
        "omit": (gaps, {"nan": "omit"}),
        "where": (gaps, {"where": where}),
        "lengths": (x, {"lengths": lengths}),
        "left, omit": (gaps, {"lengths": lengths, "left_padded": True, "nan": "omit"}),
        "weights": (x, {"weights": weights}),
        "all": (gaps, {"weights": weights, "where": where, "nan": "omit"}),
    }
    return kinds[kind]


def has(name: str, kind: str) -> bool:
    """Say whether an op has this kind of call."""
    return name != "rescale" or kind not in {"weights", "all"}


def assert_near(found: Any, expected: Any, dtype: str, what: Any = "") -> None:
    """Compare results in their order. Numbers of rows are compared by their own size, elements by 1."""
    for place, (ours, wanted) in enumerate(zip(found, expected, strict=True)):
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        tolerance = TOLERANCE[dtype if ours.ndim > 1 else str(ours.dtype)]
        np.testing.assert_allclose(
            ours.astype(np.float64),
            wanted.astype(np.float64),
            tolerance,
            4 * tolerance,
            err_msg=f"{what}, result {place}",
        )


def hard_rows(count: int, dtype: str = "float32") -> Any:
    """Return rows, of which some elements count, that make a search for a median slow, or end it at once."""
    at, random = np.arange(count), np.random.default_rng(count)
    powers = np.ldexp(1.0, (at * 118 // max(1, count - 1)) - 60)  # whose squares float32 holds
    rows = [
        np.full(count, 3.0),
        np.where(at % 3 == 0, -1.0, 2.0),
        np.where(at == 0, 1e18, random.normal(size=count)),
        powers,
        -powers,
        np.where(at % 2, powers, -powers),
        at - 0.4 * count,
        at[::-1] * 1e-3,
        1e7 + random.integers(0, 4, count),
        np.where(at < count // 2, -0.0, 0.0),
        random.integers(-2, 3, count) * 1e-20,
        np.exp(random.normal(size=count) * 9),
        random.integers(-3, 4, count) * 1e-40,  # subnormal in float32
        np.where(at % 5 == 0, np.nan, np.where(at % 7 == 0, np.inf, random.normal(size=count))),
        np.where(at < 1, 5.0, np.nan),
        np.where(at < 2, at + 5.0, -np.inf),
        np.where(at < 3, 5.0 - at, np.nan),
        np.full(count, np.nan),
    ]
    sorted_rows = np.array(rows).astype(dtype)
    return np.concatenate((sorted_rows, random.permuted(sorted_rows, axis=1)))


def assert_medians(cupy: Any, x: Any, plan: str | None, axis: int) -> None:
    """Compare both bounds that sigma=0 leaves with the middle element, or half of each of two; subnormal may be 0."""
    found = sigma_clip(cupy.asarray(x), 0, 1, axis, centre="median", plan=plan, return_bounds=True)
    rows = np.moveaxis(x, axis, -1)
    expected, half = np.full(rows.shape[:-1], np.nan, x.dtype), x.dtype.type(0.5)
    for row in np.ndindex(expected.shape):
        some = np.sort(rows[row][np.isfinite(rows[row])])
        if some.size % 2:
            expected[row] = some[some.size // 2]
        elif some.size:
            expected[row] = half * some[some.size // 2 - 1] + half * some[some.size // 2]
    for bound in found[1:]:
        np.testing.assert_allclose(bound.get(), expected, rtol=0, atol=np.finfo(np.float32).tiny)
