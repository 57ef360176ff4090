"""Conversions of 16 bits by integers, against NumPy's and ml_dtypes' own: every number, and every tie between two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import dtype_of, quantized_dtype
from cupynorm.host import conversions, reference

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def narrowed(values: Any, dtype: Any) -> Any:
    """Convert an array, past the size from which on integers do it."""
    times = conversions.FEW // values.size + 2
    many = np.tile(values, times)
    target = np.empty(many.shape, dtype)
    conversions.narrow(many, target)
    assert np.array_equal(target.view(np.uint16), np.tile(target[: values.size], times).view(np.uint16))
    return target[: values.size]


def widened(part: Any) -> Any:
    out = np.full(part.size, 7, np.float32)
    conversions.widen(part, out)
    return out.reshape(part.shape)


def same(found: Any, expected: Any) -> bool:
    """Say whether two arrays have the same bits, or are nan."""
    return bool(
        (
            ((found == expected) & (np.signbit(found) == np.signbit(expected)))
            | (np.isnan(found) & np.isnan(expected))
        ).all()
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("which", ["all", "finite", "apart", "swapped"])
def test_every_number_of_16_bits_is_widened(dtype: str, which: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    part = HALVES.view(dtype_of(dtype))
    part = {
        "all": part,
        "finite": part[np.isfinite(part.astype(np.float32))],
        "apart": part[::3],
        "swapped": part.reshape(256, 256).T,
    }[which]

    assert same(widened(part), part.astype(np.float32))


@np.errstate(all="ignore")
def test_every_float16_and_every_tie_is_narrowed_to_nearest_even() -> None:
    held = HALVES[np.isfinite(HALVES)].astype(np.float32)
    middle = (np.sort(held)[:-1] + np.sort(held)[1:]) / 2  # exact
    edges = np.array([65519.996, 65520, 65535.996, -65520, 0.0, -0.0, 2.0**-25, 2.0**-26], np.float32)
    for values in (
        held,
        np.abs(held),
        middle,
        np.nextafter(middle, np.float32(np.inf)),
        np.nextafter(middle, np.float32(-np.inf)),
        edges,
    ):
        assert same(narrowed(values, np.float16), values.astype(np.float16))


@np.errstate(all="ignore")
def test_what_float16_does_not_hold_is_narrowed_as_numpy_does() -> None:
    values = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)

    assert same(narrowed(values, np.float16), values.astype(np.float16))
    assert same(
        narrowed(np.array([65536, -1e5, 131071], np.float32), np.float16), np.array([np.inf, -np.inf, np.inf])
    )
    assert same(narrowed(np.array([np.inf, 1], np.float32), np.float16), np.array([np.inf, 1]))


def test_values_are_left_as_they_are_and_targets_may_lie_anywhere() -> None:
    values = np.random.default_rng(2).standard_normal((100, 100)).astype(np.float32)
    before, target = values.copy(), np.zeros((100, 200), np.float16)

    conversions.narrow(values, target[:, ::2])

    assert np.array_equal(values, before)
    assert np.array_equal(target[:, ::2], values.astype(np.float16))
    assert not target[:, 1::2].any()


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_quantised_numbers_are_the_nearest(name: str, wide: Any) -> None:
    pytest.importorskip("ml_dtypes")
    dtype = quantized_dtype(name)
    random = np.random.default_rng(3)
    values = random.standard_normal(40000) * 2.0 ** random.integers(-20, 18, 40000)
    if name == "int8":
        values = np.concatenate([values, np.arange(-300, 300) / 2])
    else:
        rungs = np.sort(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64))
        rungs = rungs[np.isfinite(rungs)]
        values = np.concatenate([values, rungs, (rungs[1:] + rungs[:-1]) / 2])
    values = np.concatenate([values, [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e-30]]).astype(wide)[None]
    rounded, found = np.empty_like(values), np.empty(values.shape, dtype)

    conversions.round_quantized(values, dtype, rounded)
    conversions.narrow(rounded, found)

    expected = reference._nearest(values.astype(np.float64), dtype)
    assert np.array_equal(found.astype(np.float64), expected.astype(np.float64), equal_nan=True)
    conversions.round_quantized(values, dtype, values)
    assert np.array_equal(values, rounded, equal_nan=True)
