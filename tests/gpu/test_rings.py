"""Rows whose elements lie apart, of which tiles come through a ring in shared memory, beside float64 of NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from tests.gpu.agree import pairs_where_simulated

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}
CALLS = [
    cupynorm.softmax,
    cupynorm.log_softmax,
    cupynorm.standardize,
    functools.partial(cupynorm.normalize, ord=1),
    functools.partial(cupynorm.normalize, ord=np.inf),
    cupynorm.rescale,
]
# outer, columns, neighbours: one chunk and several, a last one that is not whole, fewer columns than threads share them
SHAPES = [(2, 100, 520), (1, 257, 528), (3, 5, 520), (1, 130, 1024), (1, 513, 520)]
VARIANTS = ("shared", "cluster")


def drawn(shape: tuple[int, ...], dtype: str) -> Any:
    x = np.random.default_rng(sum(shape)).standard_normal(shape) * 2 + 1
    return x.astype(dtype_of(dtype))


def check(xp: Any, call: Any, x: Any, variant: Any, *operands: Any, **options: Any) -> Any:
    """Compare a call with that in float64; return its plan."""
    right = call(x.astype(np.float64), *(each.astype(np.float64) for each in operands), axis=1, **options)
    with row_ops.observed() as plans:
        found = call(xp.asarray(x), *map(xp.asarray, operands), axis=1, plan=variant, **options)
    assert [plan.kernel for plan in plans] == ["row_ring"], plans
    assert found.dtype == x.dtype
    digits = DIGITS[x.dtype.name]
    scale = max(1.0, float(np.abs(right).max(initial=0)))
    np.testing.assert_allclose(xp.asnumpy(found).astype(np.float64), right, rtol=digits, atol=digits * scale)
    return plans[0]


@pytest.mark.small
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_op(xp: Any, shape: tuple[int, ...]) -> None:
    for each, variant, number in pairs_where_simulated(SHAPES, VARIANTS, range(len(CALLS))):
        if each == shape:
            check(xp, CALLS[number], drawn(shape, ("float32", "float16")[number % 2]), variant)


@pytest.mark.small
@pytest.mark.parametrize("dtype", [*DIGITS])
def test_parameters_of_every_dtype(xp: Any, dtype: str) -> None:
    for each, variant, shape in pairs_where_simulated(DIGITS, VARIANTS, SHAPES[:3]):
        if each == dtype:
            gamma, beta = drawn((shape[1],), dtype), drawn((shape[1],), "float32")
            check(xp, cupynorm.layer_norm, drawn(shape, dtype), variant, gamma, beta)
            check(xp, cupynorm.rms_norm, drawn(shape, dtype), variant, gamma)


@pytest.mark.small
def test_as_many_blocks_as_a_cluster_may_have(xp: Any) -> None:
    """Each owns some of a tile's rows, of which all tell it, and tells all."""
    x, gamma = drawn((1, 300, 520), "float16"), drawn((300,), "float16")
    plan = check(xp, cupynorm.rms_norm, x, "cluster", gamma)
    plan = dataclasses.replace(plan, ctas_per_row=16, vectors=plan.rows_per_group, waves=1e-6)
    assert check(xp, cupynorm.layer_norm, x, plan, gamma, gamma).grid == 16
    check(xp, cupynorm.softmax, x, plan)


@pytest.mark.small
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_that_go_through_many_tiles(xp: Any, variant: str) -> None:
    """A ring is full and empty again, of chunks that are no multiple of a tile's."""
    for dtype, shape in (("float16", (2, 300, 1000)), ("float32", (3, 270, 520))):
        x, gamma = drawn(shape, dtype), drawn((shape[1],), dtype)
        plan = check(xp, cupynorm.rms_norm, x, variant, gamma)
        tiles = -(-shape[0] * shape[2] // (plan.across * plan.vector))
        assert tiles >= 7
        few = dataclasses.replace(plan, waves=1e-6)
        assert check(xp, cupynorm.rms_norm, x, few, gamma).grid == plan.ctas_per_row
        check(xp, cupynorm.softmax, x, few)
        check(
            xp,
            cupynorm.standardize,
            x,
            dataclasses.replace(few, stages=few.vectors // few.rows_per_group + 2),
        )
