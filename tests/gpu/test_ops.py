"""Every op of the catalog in every dtype at every edge, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import dtype_of
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.plan.config import VARIANTS, DoesNotFitError
from cupynorm.tools.testing import Case, assert_close, assert_statistics_close, inputs
from tests.gpu.agree import DTYPES, check, run
from tests.shapes import COLUMNS, ROWS, SMALL

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def small(values: Any, few: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.small if value in few else ()) for value in values]


@every_op
@every_dtype
@pytest.mark.parametrize("cols", small(COLUMNS, SMALL))
def test_agrees_with_float64_at_the_edges(xp: Any, op: Op, dtype: str, cols: int) -> None:
    check(xp, op, inputs(op, 29 if cols < 10000 else 7, cols, dtype))


@every_op
@pytest.mark.parametrize("rows", small(ROWS, (0, 1, 3)))
@pytest.mark.parametrize("cols", [4, 100])
def test_any_number_of_rows(xp: Any, op: Op, rows: int, cols: int) -> None:
    check(xp, op, inputs(op, rows, cols, "float16"))


def sweep(xp: Any, op: Op, dtype: str, widths: range, plan: str | None = None) -> None:
    """Compare at each width, on columns of one input: making inputs would take longer than the op."""
    whole = inputs(op, 6, widths[-1], dtype)
    faults = []
    for cols in widths:
        parameters = {name: array[:cols].copy() for name, array in whole.parameters.items()}
        try:
            check(xp, op, Case("", whole.x[:, :cols].copy(), parameters), plan=plan)
        except DoesNotFitError:
            continue
        except AssertionError as fault:
            faults.append(f"{cols} columns: {fault}")
    assert not faults, f"{len(faults)} of {len(widths)} widths\n" + "\n".join(faults[:20])


@every_op
@every_dtype
def test_widths_in_between(xp: Any, op: Op, dtype: str) -> None:
    sweep(xp, op, dtype, range(5, 4101, 585))


@pytest.mark.slow
@every_op
@every_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_width_up_to_4100(xp: Any, op: Op, dtype: str, variant: str) -> None:
    sweep(xp, op, dtype, range(1, 4101), variant)


@pytest.mark.small
@every_op
@every_dtype
def test_statistics_are_right_and_do_not_change_the_result(xp: Any, op: Op, dtype: str) -> None:
    if not op.stats:
        pytest.skip(f"{op.name} has no statistics")
    case = inputs(op, 29, 100, dtype)
    want = op.reference(case.x, **case.parameters)

    y, *stats = (xp.asnumpy(each) for each in run(xp, op, case, return_stats=True))

    assert np.array_equal(y, xp.asnumpy(run(xp, op, case)), equal_nan=True)
    assert {each.dtype.name for each in stats} == {"float64" if dtype == "float64" else "float32"}
    assert {each.shape for each in stats} == {(29,)}
    assert_statistics_close(op, stats, want[1:])


@every_op
@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_goes_in_and_any_comes_out(xp: Any, op: Op, dtype: str, y_dtype: str) -> None:
    case = inputs(op, 11, 72, dtype, parameter_dtype="float32")

    check(xp, op, case, dtype=dtype_of(y_dtype))


@pytest.mark.parametrize("op", [op for op in OPS if op.parameters], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_have_a_dtype_of_their_own(xp: Any, op: Op, dtype: str) -> None:
    check(xp, op, inputs(op, 11, 72, "float16", parameter_dtype=dtype))


@pytest.mark.small
@pytest.mark.parametrize("names", [(), ("gamma",), ("beta",)], ids=lambda names: "+".join(names) or "neither")
def test_gamma_and_beta_may_be_left_out(xp: Any, names: tuple[str, ...]) -> None:
    op = OPS[0]
    case = inputs(op, 5, 40, "float16")

    check(xp, op, Case("", case.x, {name: case.parameters[name] for name in names}))


@pytest.mark.small
@every_op
def test_one_row_without_a_batch(xp: Any, op: Op) -> None:
    case = inputs(op, 1, 40, "float32")

    check(xp, op, Case("", case.x[0], case.parameters))


@pytest.mark.small
@every_op
def test_eps_and_several_axes(xp: Any, op: Op) -> None:
    case = inputs(op, 6, 4 * 5 * 6, "float32")
    x = case.x.reshape(2, 3, 4, 5, 6)
    parameters = {name: array.reshape(4, 5, 6) for name, array in case.parameters.items()}
    eps = {"eps": 0.5} if op.row.has_eps else {}

    y = run(xp, op, Case("", x, parameters), axis=(-1, -3, 3), **eps)

    assert_close(xp.asnumpy(y), op.reference(x, **parameters, axes=3, **eps)[0], axes=3)
