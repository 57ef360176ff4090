"""nan, infinities, the largest numbers and constant rows: what float64 gives, and in their own row only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm
from cupynorm._dtypes import dtype_of
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.tools.testing import Case, assert_close, inputs
from tests.gpu.agree import VARIANTS, run

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
widths = pytest.mark.parametrize(
    "cols", [pytest.param(cols, marks=pytest.mark.small) for cols in (4, 37, 64)] + [500]
)


def special(op: Op, cols: int, dtype: str) -> Case:
    """Return rows with special values, each between two ordinary ones."""
    case = inputs(op, 23, cols, "float64")
    x = np.random.default_rng(cols).standard_normal((23, cols))
    x[1, 0] = x[3, -1] = x[5, cols // 2] = np.nan
    x[7, 1] = x[9, 0] = np.inf
    x[11, 1] = x[13, -1] = -np.inf
    x[15] = -np.inf
    x[17] = np.inf
    x[19, 0], x[19, 1] = np.inf, -np.inf
    if (
        op.row.name in {"softmax", "log_softmax"} or dtype == "float16"
    ):  # the square of a larger one overflows float
        largest = 65504.0 if dtype == "float16" else 3.38e38
        x[21] = largest
        x[21, : cols // 2] = -largest if op.parameters else 0
    parameters = {name: array.astype(dtype_of(dtype)) for name, array in case.parameters.items()}
    return Case("special values", x.astype(dtype_of(dtype)), parameters)


@every_op
@every_variant
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@widths
def test_special_values_are_those_of_float64_and_stay_in_their_row(
    xp: Any, op: Op, variant: str, dtype: str, cols: int
) -> None:
    case = special(op, cols, dtype)

    y = xp.asnumpy(run(xp, op, case, plan=variant))

    assert_close(y, op.reference(case.x, **case.parameters)[0])
    assert np.isfinite(y[::2].astype(np.float64)).all()


@pytest.mark.small
@pytest.mark.parametrize("op", OPS[2:], ids=lambda op: op.name)
@every_variant
def test_a_row_of_only_minus_infinity_is_nan(xp: Any, op: Op, variant: str) -> None:
    x = np.full((3, 40), -np.inf, np.float32)
    x[1] = 1

    y = xp.asnumpy(op.function(xp.asarray(x), plan=variant))

    assert np.isnan(y[[0, 2]]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.small
@every_variant
@pytest.mark.parametrize("cols", [1, 3, 64, 129, 700, 4397])
@pytest.mark.parametrize("value", [0.1, -3e4, 1e-3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_constant_rows_are_beta_to_the_bit(
    xp: Any, variant: str, cols: int, value: float, dtype: str
) -> None:
    """Each warp counts from an element of its own, those too that hold only what is around a row's vectors."""
    x = np.full((5, cols), value, dtype)
    gamma, beta = np.random.default_rng(cols).standard_normal((2, cols)).astype(dtype)

    y, mean, rstd = layer_norm(
        xp.asarray(x), xp.asarray(gamma), xp.asarray(beta), plan=variant, return_stats=True
    )

    assert np.array_equal(xp.asnumpy(y), np.broadcast_to(beta, x.shape))
    assert np.array_equal(xp.asnumpy(mean), x[:, 0].astype(np.float32))
    assert np.allclose(xp.asnumpy(rstd), 1e5**0.5, rtol=1e-6)


@pytest.mark.small
@every_variant
def test_without_eps_a_row_without_spread_is_nan(xp: Any, variant: str) -> None:
    x = np.zeros((3, 40), np.float32)
    x[1] = np.arange(40)
    device = xp.asarray(x)

    for op in OPS[:2]:
        y = xp.asnumpy(op.function(device, eps=0, plan=variant))

        assert np.isnan(y[[0, 2]]).all(), op.name
        assert_close(y[1], op.reference(x[1], eps=0)[0])


@every_variant
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cols", [1024, 1025])  # vectors of several elements, and of one
@pytest.mark.parametrize("where", [0, 32, -1])
def test_one_large_element_costs_the_others_no_digits(
    xp: Any, variant: str, dtype: str, cols: int, where: int
) -> None:
    x = np.random.default_rng(cols).standard_normal((5, cols)).astype(dtype)
    x[:, where] = 1000
    if variant == "warp" and cols > 1024:
        pytest.skip("a warp cannot hold the row")

    y = xp.asnumpy(layer_norm(xp.asarray(x), plan=variant))

    assert_close(y, OPS[0].reference(x)[0])


@pytest.mark.small
@every_variant
@pytest.mark.parametrize("cols", [8, 37, 129])
def test_softmax_rows_sum_to_one_and_ignore_a_shift(xp: Any, variant: str, cols: int) -> None:
    op = OPS[2]
    x = np.random.default_rng(cols).integers(-50, 50, (9, cols)).astype(np.float32)

    y, shifted = (xp.asnumpy(op.function(xp.asarray(each), plan=variant)) for each in (x, x + 512))

    assert np.allclose(y.sum(axis=1, dtype=np.float64), 1, rtol=1e-6)
    assert np.array_equal(y, shifted)  # integers: the shift is exact, and so are the differences
