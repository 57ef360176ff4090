"""Rows whose elements lie apart, but that are one stretch of memory with their neighbours, beside float64 of NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of as known
from cupynorm.invoke import row_ops
from cupynorm.plan.config import DoesNotFitError

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-11}
CALLS = [
    cupynorm.softmax,
    cupynorm.log_softmax,
    cupynorm.standardize,
    cupynorm.moments,
    functools.partial(cupynorm.moments, order=4),
    functools.partial(cupynorm.normalize, ord=1),
    cupynorm.rescale,
    cupynorm.logsumexp,
]
SHAPES = [(3, 70, 33), (9, 41, 9), (5, 67, 3), (2, 50, 95), (1, 300, 15), (7, 3, 65), (4, 33, 8)]


def dtype_of(name: str) -> Any:
    return known(name) if name in {"float16", "bfloat16", "float32", "float64"} else np.dtype(name)


def drawn(shape: tuple[int, ...], dtype: str) -> Any:
    x = np.random.default_rng(sum(shape)).standard_normal(shape) + 1
    integers = dtype_of(dtype).kind in "ui"
    return (x * 20 + 100 if integers else x).astype(dtype_of(dtype))


def results(found: Any) -> Any:
    return found if isinstance(found, tuple) else (found,)


def check(xp: Any, call: Any, x: Any, dtype: str, offset: int = 0, **options: Any) -> None:
    """Compare a call whose rows are stretches with that in float64, of an array `offset` elements behind an access."""
    right = call(x.astype(np.float64), axis=1, **options)
    room = xp.empty(x.size + offset, x.dtype)
    given = room[offset:].reshape(x.shape)
    given[...] = xp.asarray(x)
    to = {name: xp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in options.items()}
    with row_ops.observed() as plans:
        found = call(given, axis=1, plan="shared", **to)
    assert {plan.kernel for plan in plans} == {"row_stretch"}, plans
    digits = DIGITS.get(dtype, 1e-5)
    for got, wanted in zip(results(found), results(right), strict=True):
        scale = max(1.0, float(np.abs(wanted).max(initial=0)))
        np.testing.assert_allclose(
            xp.asnumpy(got).astype(np.float64), wanted, rtol=digits, atol=digits * scale
        )


@pytest.mark.small
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_op(xp: Any, shape: tuple[int, ...]) -> None:
    for number, call in enumerate(CALLS):
        check(xp, call, drawn(shape, "float32"), "float32", number % 4)


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "uint8", "int16", "uint16", "int32"])
def test_every_dtype(xp: Any, dtype: str) -> None:
    for offset, shape in enumerate(SHAPES[:4]):
        check(xp, cupynorm.standardize, drawn(shape, dtype), dtype, offset)
        check(xp, cupynorm.moments, drawn(shape, dtype), dtype, offset + 3)


@pytest.mark.small
def test_parameters_and_results_elsewhere(xp: Any) -> None:
    shape = (5, 70, 33)
    gamma, beta = (drawn((shape[1], seed), "float16")[:, 0].copy() for seed in (1, 2))
    check(xp, cupynorm.layer_norm, drawn(shape, "float16"), "float16", gamma=gamma, beta=beta)
    out = xp.empty(5 * 70 * 33 + 3, np.float16)[3:].reshape(shape)  # not aligned as x is
    x = drawn(shape, "float16")
    found = cupynorm.softmax(xp.asarray(x), axis=1, plan="shared", out=out)
    np.testing.assert_allclose(xp.asnumpy(found), cupynorm.softmax(x.astype(np.float64), axis=1), atol=4e-3)


@pytest.mark.small
def test_special_values(xp: Any) -> None:
    x = drawn((3, 40, 33), "float32")
    x[0, 3, 2], x[1, :, 5], x[2, 7, 9] = np.nan, 4.0, np.inf
    for call in (cupynorm.softmax, cupynorm.standardize, cupynorm.rescale):
        with np.errstate(all="ignore"):
            right = call(x, axis=1)
        found = xp.asnumpy(call(xp.asarray(x), axis=1, plan="shared"))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(right))
        kept = np.isfinite(right)
        np.testing.assert_allclose(found[kept], right[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.small
def test_what_is_no_stretch_is_refused(xp: Any) -> None:
    x = xp.asarray(drawn((3, 40, 34), "float32"))
    with row_ops.observed() as plans:
        cupynorm.softmax(x, axis=1, plan="shared")
    for change in ({"across": 17}, {"group": 3}, {"rows_per_group": 1}, {"vector": 2}, {"waits": 1}):
        with pytest.raises(DoesNotFitError):
            cupynorm.softmax(x, axis=1, plan=dataclasses.replace(plans[-1], **change))
    for given, options in (
        (x[:, :, :33], {}),
        (x[:, ::2], {}),
        (x, {"where": xp.asarray(drawn((3, 40, 34), "float32") > 0)}),
    ):
        with pytest.raises(DoesNotFitError, match="next to one another"):
            cupynorm.softmax(given, axis=1, plan="shared", **options)


def test_large_arrays(cuda: Any) -> None:
    for shape in ((4096, 64, 33), (1024, 512, 33), (512, 1000, 17), (2000, 300, 9)):
        for dtype in ("float32", "float16", "uint16"):
            check(cuda, cupynorm.standardize, drawn(shape, dtype), dtype)
