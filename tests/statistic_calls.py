"""Calls of statistic ops of each kind, for tests of what must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupynorm import moments, normalize, rescale, standardize

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
