"""Rows of which an odd number are neighbours in memory, two of a thread, on the device, beside float64 of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.plan.config import Plan
from tests.tilings_apart import tiling_apart

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "uint8": 4e-5}


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    x = np.random.default_rng(seed + sum(shape)).standard_normal(shape) + 1
    return (x * 20 + 100).astype(np.uint8) if dtype == "uint8" else x.astype(dtype_of(dtype))


def check(
    xp: Any, call: Any, x: Any, axis: int, dtype: str, *, plan: Plan | None = None, **options: Any
) -> None:
    """Compare a call of threads that have two rows with that in float64; of arrays at an odd address, too."""
    right = call(x.astype(np.float64), axis=axis, **options)
    to = {name: xp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in options.items()}
    in_place = call is not cupynorm.moments
    room = xp.empty(x.size + 1, x.dtype)
    for offset in (0, 1):
        given = room[offset : offset + x.size].reshape(x.shape)
        given[...] = xp.asarray(x)
        if in_place:
            to["out"] = given
        with row_ops.observed() as plans:
            found = call(given, axis=axis, plan=plan, **to)
        assert {plan.vector for plan in plans} == {2}, plans
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, right)), strict=True)
        for got, wanted in pairs:
            scale = max(1.0, float(np.abs(wanted).max(initial=0)))
            np.testing.assert_allclose(
                xp.asnumpy(got).astype(np.float64), wanted, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale
            )


@pytest.mark.small
@pytest.mark.parametrize(
    "plan", [tiling_apart(2, 18, 32, 128), tiling_apart(2, 9, 32, 128, 2)], ids=["block", "cluster"]
)
@pytest.mark.parametrize(("shape", "axis"), [((3, 70, 63), 1), ((3, 71, 189), 1), ((70, 127), 0)], ids=str)
def test_small_rows(xp: Any, shape: tuple[int, ...], axis: int, plan: Plan) -> None:
    check(xp, cupynorm.softmax, drawn(shape, "float16"), axis, "float16", plan=plan)
    check(xp, cupynorm.moments, drawn(shape, "float16"), axis, "float16", plan=plan)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((160, 1000, 101), 1), ((9, 1000, 1001), 1), ((1000, 20_001), 0), ((9, 4096, 301), 1)],
    ids=str,
)
def test_what_is_chosen(cuda: Any, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x = drawn(shape, dtype)
    check(cuda, cupynorm.softmax, x, axis, dtype)
    check(cuda, cupynorm.softmax, x, axis, dtype, where=np.random.default_rng(2).random(shape) < 0.7)
    check(cuda, cupynorm.standardize, x, axis, dtype)
    check(cuda, cupynorm.moments, x, axis, dtype)


def test_bytes(cuda: Any) -> None:
    check(cuda, cupynorm.moments, drawn((120, 1000, 301), "uint8"), 1, "uint8")
