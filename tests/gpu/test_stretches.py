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


def wide(given: Any) -> Any:
    is_number = isinstance(given, np.ndarray) and given.dtype != bool
    return given.astype(np.float64) if is_number and given.dtype.kind not in "ui" else given


def placed(xp: Any, given: Any, offset: int) -> Any:
    """Give an array on the device, `offset` elements behind a whole access."""
    if not isinstance(given, np.ndarray):
        return given
    place = xp.empty(given.size + offset, given.dtype)[offset:].reshape(given.shape)
    place[...] = xp.asarray(given)
    return place


def check(xp: Any, call: Any, x: Any, dtype: str, offset: int = 0, *beside: Any, **options: Any) -> None:
    """Compare a call whose rows are stretches with that in float64, of arrays some elements behind an access."""
    right = call(x.astype(np.float64), *map(wide, beside), axis=1, **options)
    given = [placed(xp, each, offset + at) for at, each in enumerate((x, *beside))]
    to = {name: placed(xp, each, offset + 2) for name, each in options.items()}
    with row_ops.observed() as plans:
        found = call(*given, axis=1, plan="shared", **to)
    assert {plan.kernel for plan in plans} == {"row_stretch"}, plans
    digits = DIGITS.get(dtype, 1e-5)
    for got, wanted in zip(results(found), results(right), strict=True):
        if wanted is None:
            continue
        scale = max(
            1.0, float(np.abs(wanted, where=np.isfinite(wanted), out=np.zeros(wanted.shape)).max(initial=0))
        )
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


WHERE = {
    "of each element": (5, 70, 33),
    "of each element of a table": (70, 33),
    "of each column": (70, 1),
    "of each column of an outer index": (5, 70, 1),
    "of each row": (5, 1, 33),
}


@pytest.mark.small
@pytest.mark.parametrize("shape", WHERE.values(), ids=WHERE)
def test_masks(xp: Any, shape: tuple[int, ...]) -> None:
    where = np.random.default_rng(len(shape)).random(shape) < 0.7
    where[..., -1] = False  # rows of which nothing is kept, where it is not one for all of them
    where[..., 0, 0] = True
    for dtype, offset in (("float16", 1), ("float32", 2)):
        x = drawn((5, 70, 33), dtype)
        check(xp, cupynorm.softmax, x, dtype, offset, where=where)
        check(xp, cupynorm.normalize, x, dtype, offset, where=where)


@pytest.mark.small
def test_lengths_bands_and_nan(xp: Any) -> None:
    x = drawn((5, 70, 33), "float16")
    random = np.random.default_rng(1)
    lengths, where = random.integers(0, 71, (5, 33)), random.random(x.shape) < 0.7
    check(xp, cupynorm.softmax, x, "float16", 1, lengths=lengths)
    check(xp, cupynorm.log_softmax, x, "float16", 2, lengths=lengths, where=where, left_padded=True)
    check(xp, cupynorm.softmax, x, "float16", 3, causal=True, bias=drawn((70, 33), "float32"))
    x[random.random(x.shape) < 0.1] = np.nan
    check(xp, cupynorm.standardize, x, "float16", 1, nan="omit")
    check(xp, cupynorm.softmax, x, "float16", 2, nan="omit", where=where)


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_operands_and_gradients(xp: Any, dtype: str) -> None:
    shape = (5, 70, 33)
    x, other = (drawn(shape, dtype)[::step].copy() for step in (1, -1))
    gamma, weights = drawn((70, 1), dtype)[:, 0].copy(), np.abs(other)
    of_rows = tuple(drawn((5, 33), dtype_of_rows) + 2 for dtype_of_rows in ("float32", "float32"))
    check(xp, cupynorm.softmax_backward, x, dtype, 1, other)
    check(xp, cupynorm.softmax_backward, x, dtype, 2, other, where=x > 1, scale=0.5)
    backward = functools.partial(cupynorm.layer_norm_backward, parameters=False)
    check(xp, backward, x, dtype, 3, other, gamma, *of_rows)
    check(xp, cupynorm.add_layer_norm, x, dtype, 1, other, gamma, gamma)
    check(xp, cupynorm.add_rms_norm, x, dtype, 2, other, return_sum=False)
    check(xp, cupynorm.moments, x, dtype, 3, weights=weights)


@pytest.mark.small
def test_outer_indices_that_lie_apart(xp: Any) -> None:
    """Stretches that do not adjoin are a block's each, in all arrays; of adjoining ones a block has several."""
    x = drawn((6, 70, 33), "float16")
    for step, tables in ((2, 1), (1, 3)):
        with row_ops.observed() as plans:
            found = cupynorm.softmax(xp.asarray(x)[::step], axis=1, plan="shared")
        assert plans[-1].rows_per_group == tables
        np.testing.assert_allclose(
            xp.asnumpy(found), cupynorm.softmax(x[::step].astype(np.float64), axis=1), atol=4e-3
        )


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
    wide = drawn((3, 40, 68), "float32")
    where, wide = (xp.asarray(each) for each in (wide > 0, wide))
    for given, options in (
        (x[:, :, :33], {}),
        (x[:, ::2], {}),
        (x, {"where": where[:, :, ::2]}),
        (x, {"bias": wide[:, :, :34]}),
        (x, {"out": wide[:, :, 34:]}),
    ):
        with pytest.raises(DoesNotFitError, match="next to one another"):
            cupynorm.softmax(given, axis=1, plan="shared", **options)


def test_large_arrays(cuda: Any) -> None:
    for shape in ((4096, 64, 33), (1024, 512, 33), (512, 1000, 17), (2000, 300, 9)):
        for dtype in ("float32", "float16", "uint16"):
            check(cuda, cupynorm.standardize, drawn(shape, dtype), dtype)
