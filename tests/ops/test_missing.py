"""What does not count: nan= of softmax and logsumexp, masks and nan= of the norms; and SciPy's b and return_sign."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm, log_softmax, logsumexp, rms_norm, softmax
from cupynorm.host import reference
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

ROWS, COLS = 6, 77
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((ROWS, COLS)) * 3
GAPS = X.copy()
GAPS[0, ::3], GAPS[1], GAPS[2, 1:] = np.nan, np.nan, np.nan
WHERE = RANDOM.random(X.shape) < 0.5
WHERE[3] = False
LENGTHS = np.array([0, 1, COLS // 2, COLS, 3, COLS - 1])
GAMMA, BETA = RANDOM.standard_normal((2, COLS))
KEPT: dict[str, tuple[Any, dict[str, Any], Any]] = {  # x, keywords, what they do not drop
    "omit": (GAPS, {"nan": "omit"}, np.ones_like(WHERE)),
    "where": (X, {"where": WHERE}, WHERE),
    "where, nan": (GAPS, {"where": WHERE}, WHERE),
    "where, omit": (GAPS, {"where": WHERE, "nan": "omit"}, WHERE),
    "lengths, omit": (GAPS, {"lengths": LENGTHS, "nan": "omit"}, np.arange(COLS) < LENGTHS[:, None]),
    "left": (X, {"lengths": LENGTHS, "left_padded": True}, np.arange(COLS) >= COLS - LENGTHS[:, None]),
}
every_kind = pytest.mark.parametrize("kind", KEPT)
SIMULATED = ("omit", "where, nan", "lengths, omit")  # with g++ each takes half a second; tests/gpu has all


def on_device(cupy: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cupy.asarray(each) if isinstance(each, np.ndarray) else each for name, each in options.items()
    }


def counts(kind: str) -> tuple[Any, dict[str, Any], Any, Any]:
    """Return x, keywords, what they do not drop, and what counts."""
    x, options, there = KEPT[kind]
    return x, options, there, there & ~(np.isnan(x) & ("nan" in options))


@np.errstate(all="ignore")
def normed(x: Any, counted: Any, *, centred: bool) -> tuple[Any, Any]:
    """Return the norm without parameters of what counts, and rstd."""
    count = counted.sum(-1, keepdims=True).astype(float)
    mean = np.where(counted, x, 0).sum(-1, keepdims=True) / count if centred else np.zeros((ROWS, 1))
    rstd = 1 / np.sqrt(np.where(counted, (x - mean) ** 2, 0).sum(-1, keepdims=True) / count + 1e-3)
    return (x - mean) * rstd, rstd[:, 0]


@every_kind
def test_norms_of_what_counts(kind: str, simulated: Any) -> None:
    wide, options, there, counted = counts(kind)
    dtype = "float32" if kind in SIMULATED else "float64"
    cupy, x = simulated.cupy, wide.astype(dtype)
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for function, columns in ((layer_norm, (GAMMA, BETA)), (rms_norm, (GAMMA,))):
        y, rstd = normed(x.astype(float), counted, centred=function is layer_norm)
        y = np.where(there, y, 0) * GAMMA + (BETA if function is layer_norm else 0)

        found = function(x, *columns, eps=1e-3, return_stats=True, **options)
        both = [found]
        if kind in SIMULATED:
            given = [cupy.asarray(each) for each in (x, *columns)]
            theirs = function(*given, eps=1e-3, return_stats=True, **on_device(cupy, options))
            both.append([each.get() for each in theirs])

        for results in both:
            np.testing.assert_allclose(results[0], y, tolerance, tolerance)
            np.testing.assert_allclose(results[-1], rstd, tolerance)


@every_kind
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_softmax_of_what_counts(function: Any, kind: str, simulated: Any) -> None:
    x, options, there, counted = counts(kind)
    expected = function(np.where(counted, x, -np.inf))
    expected = np.where(np.isnan(x), np.nan, expected) if "nan" in options else function(x, **options)
    expected = np.where(there, expected, 0 if function is softmax else -np.inf)

    np.testing.assert_allclose(function(x, **options), expected, 1e-12, 1e-12)
    if kind in SIMULATED:
        theirs = function(simulated.cupy.asarray(x), **on_device(simulated.cupy, options)).get()
        np.testing.assert_allclose(theirs, expected, 1e-12, 1e-12)


@every_kind
def test_logsumexp_of_what_counts(kind: str, simulated: Any) -> None:
    x, options, _, counted = counts(kind)
    expected = logsumexp(np.where(counted, x, -np.inf))

    np.testing.assert_allclose(logsumexp(x, **options), expected, 1e-12)
    if kind in SIMULATED:
        theirs = logsumexp(simulated.cupy.asarray(x), **on_device(simulated.cupy, options)).get()
        np.testing.assert_allclose(theirs, expected, 1e-12)


def test_pieces_of_long_rows_remember_their_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        (function, {**options})
        for function in (softmax, log_softmax, logsumexp, layer_norm, rms_norm)
        for options in ({"nan": "omit"}, {"nan": "omit", "where": WHERE})
    ]
    whole = [function(GAPS, **options) for function, options in calls]
    signed = logsumexp(X, b=BETA, return_sign=True)
    monkeypatch.setattr(reference, "BLOCK", 16)

    for (function, options), expected in zip(calls, whole, strict=True):
        np.testing.assert_allclose(function(GAPS, **options), expected, 1e-12, 1e-12)
    for found, expected in zip(logsumexp(X, b=BETA, return_sign=True), signed, strict=True):
        np.testing.assert_allclose(found, expected, 1e-12)


B = RANDOM.standard_normal(X.shape)
B[RANDOM.random(X.shape) < 0.3] = 0
SPECIAL = X.copy()
SPECIAL[2, 5], SPECIAL[3], SPECIAL[4, 7], SPECIAL[5, 9] = np.inf, -np.inf, np.nan, np.nan
B[2, 5], B[4, 7], B[5, 9] = -1, 0, 1


@pytest.mark.parametrize("options", [{"b": B}, {"return_sign": True}, {"b": B, "return_sign": True}])
def test_scipys_logsumexp(options: dict[str, Any], simulated: Any) -> None:
    special = pytest.importorskip("scipy.special", reason="scipy is not installed")
    with np.errstate(all="ignore"):
        expected = special.logsumexp(SPECIAL, axis=-1, **options)

    ours = logsumexp(SPECIAL, **options)
    theirs = logsumexp(simulated.cupy.asarray(SPECIAL), **on_device(simulated.cupy, options))

    both = ours if isinstance(ours, tuple) else (ours,)
    device = theirs if isinstance(theirs, tuple) else (theirs,)
    for found, device_found, wanted in zip(
        both, device, expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        np.testing.assert_allclose(found, wanted, 1e-12)
        np.testing.assert_allclose(device_found.get(), wanted, 1e-12)


def test_a_factor_comes_behind_scale_bias_and_mask(simulated: Any) -> None:
    options: dict[str, Any] = {"scale": 0.5, "bias": BETA, "where": WHERE, "b": B, "keepdims": True}
    z = X * 0.5 + BETA
    total = np.where(WHERE, B * np.exp(z), 0).sum(-1, keepdims=True)

    size, sign = logsumexp(X, return_sign=True, **options)
    theirs = logsumexp(simulated.cupy.asarray(X), return_sign=True, **on_device(simulated.cupy, options))

    with np.errstate(all="ignore"):
        np.testing.assert_allclose(size, np.log(np.abs(total)), 1e-12)
    assert np.array_equal(sign, np.sign(total))
    for found, wanted in zip(theirs, (size, sign), strict=True):
        np.testing.assert_allclose(found.get(), wanted, 1e-12)


@pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp, layer_norm, rms_norm])
def test_nan_may_be_refused(function: Any, simulated: Any) -> None:
    kept = ~np.isnan(GAPS)

    np.testing.assert_array_equal(function(X, nan="raise"), function(X))
    np.testing.assert_array_equal(function(GAPS, nan="raise", where=kept), function(GAPS, where=kept))
    np.testing.assert_array_equal(function(X, nan="propagate"), function(X))
    with pytest.raises(ValueError, match="x holds nan"):
        function(GAPS, nan="raise")
    with pytest.raises(ValueError, match='nan="raise" is for NumPy arrays'):
        function(simulated.cupy.asarray(X), nan="raise")
    with pytest.raises(ValueError, match=re.escape('nan is \'skip\': use "propagate", "omit" or "raise"')):
        function(X, nan="skip")
    with pytest.raises(TypeError, match="unexpected keyword argument 'wher'"):
        function(X, nan="omit", wher=kept)


@pytest.mark.parametrize("function", [softmax, log_softmax, layer_norm, rms_norm])
def test_nan_is_looked_for_before_anything_is_written(function: Any) -> None:
    x = GAPS.copy()

    with pytest.raises(ValueError, match="x holds nan"):
        function(x, nan="raise", out=x)

    np.testing.assert_array_equal(x, GAPS)


@pytest.mark.parametrize(
    ("function", "x", "options"),
    [
        (softmax, np.full((2, 3), -np.inf), {}),
        (log_softmax, np.full((2, 3), -np.inf), {}),
        (layer_norm, np.ones((2, 3)), {"eps": 0}),
        (rms_norm, np.zeros((2, 3)), {"eps": 0}),
    ],
)
def test_a_nan_that_a_function_makes_in_place_is_none_of_x(function: Any, x: Any, options: Any) -> None:
    y = function(x, nan="raise", out=x, **options)

    assert np.isnan(y).all()


def test_a_nan_that_does_not_count_in_logsumexp_is_not_refused() -> None:
    x = np.array([[1.0, np.nan], [1.0, 2.0]])

    by_mask = logsumexp(x, where=~np.isnan(x), b=np.array(-1.0), nan="raise")
    by_factor = logsumexp(x, b=np.where(np.isnan(x), 0.0, -1.0), nan="raise")

    assert np.isnan(by_mask).all()  # logarithms of negative sums
    assert np.isnan(by_factor).all()
    with pytest.raises(ValueError, match="x holds nan"):
        logsumexp(x, b=np.array([0.0, 1.0]), nan="raise")


@pytest.mark.parametrize("function", [softmax, layer_norm, rms_norm])
def test_nan_has_no_quantised_result(function: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape("quantize='int8' and nan=\"omit\": nan has no quantised result")
    ):
        function(X, nan="omit", quantize="int8")


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_what_a_mask_keeps_is_quantised(function: Any, simulated: Any) -> None:
    cupy = simulated.cupy

    q, scales = function(X, GAMMA, where=WHERE, quantize="int8")
    theirs = function(cupy.asarray(X), cupy.asarray(GAMMA), where=cupy.asarray(WHERE), quantize="int8")

    expected = function(X, GAMMA, where=WHERE)
    np.testing.assert_allclose(q * scales[:, None], expected, atol=0.51 * np.nanmax(scales))
    assert np.abs(theirs[0].get().astype(int) - q).max() <= 1
    np.testing.assert_allclose(theirs[1].get(), scales, 1e-6)


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_numbers_and_lists(function: Any, simulated: Any) -> None:
    x = simulated.cupy.asarray(X)
    expected = function(X, 2.0, lengths=LENGTHS)

    for _ in range(2):
        np.testing.assert_allclose(function(x, 2.0, lengths=LENGTHS.tolist()).get(), expected, 1e-12, 1e-12)
    np.testing.assert_array_equal(function(X, 2.0, lengths=LENGTHS.tolist()), expected)
    np.testing.assert_array_equal(function(X, where=None, lengths=None), function(X))


@pytest.mark.parametrize("cols", [9, 6])
def test_operands_may_have_shorter_runs_than_x(cols: int, simulated: Any) -> None:
    """A vector of x, of which the first axis lies backwards and the others together, has an operand's two columns."""
    x = np.ascontiguousarray(RANDOM.standard_normal((7, 10, cols)).astype(np.float32)[::-1])
    bias = RANDOM.standard_normal((7, 1, cols)).astype(np.float32)
    place = simulated.cupy.asarray

    for function, options in (
        (softmax, {"bias": bias}),
        (softmax, {"where": bias > 0}),
        (layer_norm, {"where": bias > 0}),
    ):
        given = {name: place(each) for name, each in options.items()}
        found = function(place(x)[::-1], axis=None, **given).get()
        np.testing.assert_allclose(found, function(x[::-1], axis=None, **options), 2e-5, 2e-5)
