"""What counts as right: errors, tolerances, messages, and inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupynorm._dtypes import DTYPES
from cupynorm.catalog.bounds import TOLERANCES, Right
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.tools.testing import (
    assert_close,
    assert_statistics_close,
    cases,
    error,
    excess,
    inputs,
)

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def test_error_is_that_of_the_worst_row() -> None:
    expected = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]])
    actual = expected + np.array([[0, 0.5], [0.5, 0], [0, 0]])

    assert error(actual, expected) == pytest.approx(0.1)
    assert error(expected, expected) == 0
    assert error(actual[:0], expected[:0]) == 0


def test_error_takes_rows_of_several_axes() -> None:
    expected = np.array([[[3.0], [4.0]]])
    actual = np.array([[[3.0], [4.5]]])

    assert error(actual, expected, axes=2) == pytest.approx(0.1)
    assert error(actual, expected, axes=1) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (np.nan, 1.0),
        (np.nan, np.inf),
        (np.inf, np.nan),
        (np.inf, -np.inf),
        (-np.inf, 1.0),
        (1.0, np.nan),
        (1.0, np.inf),
    ],
)
def test_error_is_infinite_where_nan_or_infinity_differ(right: float, wrong: float) -> None:
    expected = np.array([[1.0, right], [1.0, 1.0]])
    actual = np.array([[1.0, wrong], [1.0, 1.0]])

    assert error(expected, expected) == 0
    assert error(actual, expected) == math.inf
    with pytest.raises(AssertionError, match=r"1 of 4 differ in nan or inf, the worst at \(0, 1\)"):
        assert_close(actual, expected)


def test_an_error_that_no_rounding_avoids_does_not_count() -> None:
    expected = np.full((1, 131072), 1 / 131070)
    nearest = expected.astype(np.float16)
    next_one = nearest + np.float16(2**-24)

    assert nearest[0, 0] != expected[0, 0]
    assert error(nearest, expected) == 0
    assert_close(nearest, expected)
    assert error(next_one, expected) > TOLERANCES["float16"]
    with pytest.raises(AssertionError, match="131072 of 131072 off by more than allowed"):
        assert_close(next_one, expected)


def test_what_the_dtype_cannot_hold_is_expected_to_be_infinite() -> None:
    expected = np.array([[7e4, 1.0]])

    assert error(np.array([[np.inf, 1]], np.float16), expected) == 0
    assert error(np.array([[65504, 1]], np.float16), expected) == math.inf


def test_a_row_that_ought_to_be_zero_must_be() -> None:
    assert error(np.array([[0.0, 0.0]]), np.zeros((1, 2))) == 0
    assert error(np.array([[0.0, 1e-30]]), np.zeros((1, 2))) == math.inf


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_tolerance_follows_the_dtype(dtype: str) -> None:
    expected = np.linspace(1, 2, 64).reshape(4, 16)
    kind = DTYPES[dtype]

    assert_close(expected.astype(kind), expected)
    with pytest.raises(AssertionError):
        assert_close((expected * (1 + 8 * TOLERANCES[dtype])).astype(kind), expected)


def test_a_looser_dtype_can_be_asked_for() -> None:
    expected = np.ones((2, 3))

    assert_close(expected * 1.0005, expected, dtype="float16")
    with pytest.raises(AssertionError):
        assert_close(expected * 1.0005, expected)


def test_the_message_names_the_worst_element() -> None:
    expected = np.ones((3, 4), np.float32)
    actual = expected.copy()
    actual[1, 2], actual[2, 0] = 1.5, 1.25

    with pytest.raises(
        AssertionError,
        match=r"2 of 12 off by more than allowed, the worst at \(1, 2\): 1.5, expected 1, allowed is 2e-06",
    ):
        assert_close(actual, expected)


def test_a_row_that_is_off_everywhere_is_found_though_no_element_is() -> None:
    expected = np.ones((3, 4), np.float32)
    actual = expected.copy()
    actual[2] *= 1 + 1.7e-6

    with pytest.raises(AssertionError, match=r"row 2 has relative error 1.\d+e-06, allowed is 1e-06"):
        assert_close(actual, expected)


def test_the_excess_of_an_element_is_1_at_the_edge_of_what_is_allowed() -> None:
    expected = np.ones((3, 8))
    for off, found in (
        (0.0, 0.0),
        (2e-6, 1.0),
        (1e-5, 5.0),
    ):  # float32: 1e-6 * (|element| + root mean square)
        y = expected.copy()
        y[1, 2] += off
        assert excess(y.astype(np.float32), Right(expected)) == pytest.approx(found, rel=0.05)
    y[0, 0] = np.nan
    assert excess(y.astype(np.float32), Right(expected)) == np.inf
    assert excess(np.zeros((0, 8), np.float32), Right(np.zeros((0, 8)))) == 0


def test_shapes_must_be_equal() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2, 3\), expected \(3, 2\)"):
        error(np.ones((2, 3)), np.ones((3, 2)))


def test_a_mean_near_zero_is_measured_by_its_rows_spread() -> None:
    expected = (np.ones((2, 2)), np.array([1e-9, 1000.0]), np.array([1.0, 10.0]))
    near = (np.array([1.5e-7, 1000.0], np.float32), np.array([1, 10], np.float32))

    assert_statistics_close(OPS[0], near, expected[1:])
    with pytest.raises(AssertionError, match=r"mean: 1 of 2 off by more than allowed, the worst at \(0,\)"):
        assert_statistics_close(OPS[0], (np.array([1e-5, 1000], np.float32), near[1]), expected[1:])
    with pytest.raises(AssertionError, match="rstd"):
        assert_statistics_close(OPS[0], (near[0], near[1] * np.float32(1.001)), expected[1:])
    assert_statistics_close(OPS[2], (), ())


@every_op
def test_inputs_are_the_same_at_each_call_and_hold_every_kind_of_row(op: Op) -> None:
    one, two = inputs(op, 30, 50, "float16"), inputs(op, 30, 50, "float16")

    assert np.array_equal(one.x, two.x)
    assert set(one.parameters) == set(op.parameters)
    assert all(np.array_equal(one.parameters[name], two.parameters[name]) for name in op.parameters)
    x = one.x.astype(np.float64)
    assert (x[1] > 990).all()
    assert (x[2] == 3).all()
    assert np.abs(x[3]).max() > 50
    lost = np.isneginf(x).sum(axis=1)
    assert lost[4:7].tolist() == ([0, 0, 0] if op.parameters else [25, 49, 50])
    assert not np.isnan(x).any()


@every_op
def test_every_case_has_its_reason(op: Op) -> None:
    few, all_of_them = list(cases(op, "float32", quick=True)), list(cases(op, "float32"))

    assert {case.x.shape for case in few} < {case.x.shape for case in all_of_them}
    assert all(case.reason for case in all_of_them)
