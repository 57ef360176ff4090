"""Rows of which an odd number are neighbours in memory, two of a thread, on the device, beside float64 of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "uint8": 4e-5}


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    x = np.random.default_rng(seed + sum(shape)).standard_normal(shape) + 1
    return (x * 20 + 100).astype(np.uint8) if dtype == "uint8" else x.astype(dtype_of(dtype))


def check(xp: Any, call: Any, x: Any, axis: int, dtype: str, *others: Any, **options: Any) -> None:
    """Compare a call with that in float64: of an aligned array, and at an odd address, where its result is aligned."""
    wide = [each.astype(np.float64) for each in (*others, x)]
    right = call(*wide, axis=axis, **options)
    room = xp.empty(x.size + 1, x.dtype)
    for offset in (0, 1):
        given = room[offset : offset + x.size].reshape(x.shape)
        given[...] = xp.asarray(x)
        to = {
            name: xp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in options.items()
        }
        with row_ops.observed() as plans:
            found = call(*map(xp.asarray, others), given, axis=axis, **to)
        assert offset or {plan.vector for plan in plans} == {2}, plans
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, right)), strict=True)
        for got, wanted in pairs:
            scale = max(1.0, float(np.abs(wanted).max(initial=0)))
            np.testing.assert_allclose(
                xp.asnumpy(got).astype(np.float64), wanted, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale
            )


@pytest.mark.small
@pytest.mark.parametrize(("shape", "axis"), [((3, 70, 63), 1), ((3, 40, 189), 1), ((70, 125), 0)], ids=str)
def test_small_rows(xp: Any, shape: tuple[int, ...], axis: int) -> None:
    check(xp, cupynorm.softmax, drawn(shape, "float16"), axis, "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 128, 101), 1), ((3, 1000, 1001), 1), ((130, 20_001), 0), ((9, 4096, 301), 1), ((3, 16384, 63), 1)],
    ids=str,
)
def test_every_length(cuda: Any, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x, dy = drawn(shape, dtype), drawn(shape, dtype, 1)
    kept = np.random.default_rng(2).random(shape) < 0.7
    check(cuda, cupynorm.softmax, x, axis, dtype)
    check(cuda, cupynorm.standardize, x, axis, dtype, where=kept)
    check(cuda, cupynorm.moments, x, axis, dtype)
    check(cuda, cupynorm.softmax_backward, x, axis, dtype, dy)


@pytest.mark.parametrize("across", [33, 101])
def test_tables(cuda: Any, across: int) -> None:
    check(cuda, cupynorm.moments, drawn((400_003, across), "float16"), 0, "float16")


def test_bytes(cuda: Any) -> None:
    check(cuda, cupynorm.moments, drawn((20, 1000, 301), "uint8"), 1, "uint8")
