"""Defines right results: errors, tolerances, and inputs at which ops are likely to fail."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import dtype_name, dtype_of, quantized_dtype
from cupynorm.catalog import forms
from cupynorm.catalog.bounds import STEPS, TOLERANCES
from cupynorm.host.reference import LARGEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cupynorm.catalog.bounds import Right
    from cupynorm.catalog.form import Form
    from cupynorm.catalog.op_table import Op

    Array = np.ndarray[Any, Any]

# Values are computed in float32 before they are quantised: their error, relative to the row's largest, per STEPS.
FLOAT_ERROR = 2.0**-19
# Smallest normal number of a float8, below which steps do not shrink, relative to its largest number.
LEAST_NORMAL = {"float8_e4m3fn": 2.0**-6 / 448, "float8_e5m2": 2.0**-14 / 57344}


def error(actual: Array, expected: Array, axes: int = 1) -> float:
    """Return the worst row's |actual - expected| / |expected|.

    Rows are the last `axes` axes, and |.| is the Euclidean norm.

    The error is infinite if nan or inf are at other places than expected. Half of the smallest number of actual's dtype
    does not count, because rounding cannot avoid it: 1 / 131072 is subnormal in float16.
    """
    a, e = _comparable(actual, expected, axes)
    return _row_error(a, e, actual.dtype)[1]


def assert_close(
    actual: Array,
    expected: Array,
    *,
    axes: int = 1,
    dtype: Any = None,
    scale: Array | None = None,
    allowed: Array | None = None,
) -> None:
    """Raise AssertionError, which names the worst element, unless every row and every element is within its tolerance.

    The tolerance is that of actual's dtype, or of `dtype`, which may be a quantised one. An element may be off by
    tolerance * (|element| + scale). The default scale is the row's root mean square; pass another one if the error
    depends on the size of the inputs. With `allowed`, an element may be off by that.
    """
    tolerance = STEPS.get(dtype) or TOLERANCES[dtype_name(actual.dtype if dtype is None else dtype_of(dtype))]
    a, e = _comparable(actual, expected, axes)
    differ = _pattern(a) != _pattern(e)
    if differ.any():
        worst = int(np.argmax(differ))
        raise AssertionError(
            f"{np.count_nonzero(differ)} of {e.size} differ in nan or inf, {_at(actual, a, e, worst)}"
        )
    given = allowed is not None
    off, allowed = _off_and_allowed(actual, a, e, tolerance, scale, allowed)
    if (off > allowed).any():
        worst = int(np.argmax(np.divide(off, allowed, out=np.where(off > 0, np.inf, 0.0), where=allowed > 0)))
        count = np.count_nonzero(off > allowed)
        raise AssertionError(
            f"{count} of {e.size} off by more than allowed, {_at(actual, a, e, worst, allowed)}"
        )
    row, value = _row_error(a, e, actual.dtype)
    if scale is None and not given and value > tolerance:
        raise AssertionError(f"row {row} has relative error {value:.3g}, allowed is {tolerance:g}")


def excess(actual: Array, right: Right) -> float:
    """Return the largest error of an element as a multiple of what assert_right() allows.

    It is infinite if nan or inf are at other places than expected.
    """
    a, e = _comparable(_rows_last(actual, right), _rows_last(right.exact, right), 1)
    if (_pattern(a) != _pattern(e)).any():
        return math.inf
    tolerance = TOLERANCES[dtype_name(actual.dtype)]
    off, allowed = _off_and_allowed(actual, a, e, tolerance, None, right.allowed(actual.dtype))
    return float(
        np.divide(off, allowed, out=np.where(off > 0, np.inf, 0.0), where=allowed > 0).max(initial=0)
    )


def assert_right(actual: Array, right: Right) -> None:
    """Raise AssertionError unless a result is within its bounds (catalog/bounds.py)."""
    exact = _rows_last(right.exact, right)
    assert_close(_rows_last(actual, right), exact, allowed=right.allowed(actual.dtype))


def _rows_last(array: Array, right: Right) -> Array:
    return array if right.axis == -1 else np.moveaxis(array, right.axis, -1)


def _off_and_allowed(
    actual: Array, a: Array, e: Array, tolerance: float, scale: Array | None, allowed: Array | None = None
) -> tuple[Array, Array]:
    """Return how far each element is off, and how far it may be; a, e: what is compared, as rows of float64."""
    finite = np.isfinite(e)
    size = np.where(finite, e, 0.0)
    span = np.sqrt((size * size).mean(axis=1, keepdims=True)) if e.size else size
    spread = (
        span if scale is None else np.broadcast_to(scale, actual.shape).reshape(e.shape).astype(np.float64)
    )
    if allowed is None:
        allowed = tolerance * (np.abs(size) + spread)
    allowed = np.where(finite, allowed.reshape(e.shape), 0.0) + _unavoidable(actual.dtype)
    return np.abs(np.where(finite, a, 0.0) - size), allowed


def assert_statistics_close(op: Op, actual: Sequence[Array], expected: Sequence[Array]) -> None:
    """Raise AssertionError if mean or rstd is off. The error of a mean is relative to its row's standard deviation."""
    scales = {"mean": 1 / expected[-1], "rstd": np.abs(expected[-1])} if op.stats else {}
    for name, got, want in zip(op.stats, actual, expected, strict=True):
        try:
            assert_close(got, want, axes=got.ndim, scale=scales[name])
        except AssertionError as fault:
            raise AssertionError(f"{name}: {fault}") from None


def assert_form_close(what: Form, results: Sequence[Array], expected: Sequence[Right]) -> None:
    """Raise AssertionError unless a form's results are within their bounds. expected: what.right() of its arrays."""
    if what.quantized:
        y, span = _dequantised(what, results, expected[0].exact)
        assert_close(y, expected[0].exact, dtype=what.quantized, scale=span)
        if len(results) > 1:
            largest = np.abs(expected[0].exact).max(axis=-1) / LARGEST[what.quantized]
            assert_close(results[1].reshape(-1, 1), largest.reshape(-1, 1))
        return
    for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        try:
            assert_right(got, wanted)
        except AssertionError as fault:
            name = f"result {number}" if wanted.terms is None else wanted.terms.result
            raise AssertionError(f"{name}: {fault}" if len(results) > 1 else str(fault)) from None


def form_error(what: Form, results: Sequence[Array], expected: Sequence[Right]) -> tuple[float, float]:
    """Return the worst error and its tolerance, of the result that comes nearest to its own or exceeds it.

    It is of rows; of elements if the results are quantised; for gradients and losses, a multiple of an element's bound,
    and the tolerance is 1.
    """
    if not what.quantized:
        found = [
            (
                error(_rows_last(each, wanted), _rows_last(wanted.exact, wanted)),
                TOLERANCES[dtype_name(each.dtype)],
            )
            if wanted.terms is None
            else (excess(each, wanted), 1.0)
            for each, wanted in zip(results, expected, strict=True)
        ]
        return max(found, key=lambda each: each[0] / each[1])
    exact = expected[0].exact
    y, span = _dequantised(what, results, exact)
    off, allowed = np.abs(y - exact), np.abs(exact) + span
    return float(np.divide(off, allowed, out=np.zeros_like(off), where=off > 0).max(initial=0)), STEPS[
        what.quantized
    ]


def _dequantised(what: Form, results: Sequence[Array], expected: Array) -> tuple[Array, Array]:
    """Return the values of quantised results, and the size below which their absolute error no longer shrinks.

    Below that size the steps of the dtype are constant, or the error of float32, in which values are computed, is
    larger. CuPy has no float8, so such results arrive as bytes.
    """
    name = what.quantized
    scale = np.float64(results[1][..., None] if len(results) > 1 else forms.SCALES[name])
    y = results[0].view(quantized_dtype(name)).astype(np.float64) * scale
    least = scale * LARGEST[name] * LEAST_NORMAL.get(name, 1.0)
    return y, least + FLOAT_ERROR * np.abs(expected).max(axis=-1, keepdims=True, initial=0) + np.zeros_like(y)


def _comparable(actual: Array, expected: Array, axes: int) -> tuple[Array, Array]:
    """Return both as rows x columns of float64. Values that overflow actual's dtype are expected to be infinite."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.shape}")
    cols = math.prod(actual.shape[actual.ndim - axes :])
    shape = (actual.size // max(1, cols), cols)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = expected.astype(actual.dtype).astype(np.float64)
    wide = np.where(np.isfinite(rounded), expected, rounded)
    return actual.astype(np.float64).reshape(shape), wide.astype(np.float64).reshape(shape)


def _pattern(values: Array) -> Array:
    """Return 0 for finite, 1 for inf, -1 for -inf, 2 for nan."""
    return np.where(np.isnan(values), 2, np.where(np.isinf(values), np.sign(values), 0))


def _unavoidable(dtype: Any) -> float:
    if dtype_name(dtype) == "bfloat16":
        return 2.0**-134
    return float(np.finfo(dtype).smallest_subnormal) / 2


def _row_error(a: Array, e: Array, dtype: Any) -> tuple[int, float]:
    """Return the worst row and its error."""
    if not e.size:
        return 0, 0.0
    finite = np.isfinite(e)
    off = np.maximum(np.abs(np.where(finite, a, 0.0) - np.where(finite, e, 0.0)) - _unavoidable(dtype), 0)
    off, size = (np.linalg.norm(each, axis=1) for each in (off, np.where(finite, e, 0.0)))
    ratio = np.divide(off, size, out=np.where(off > 0, np.inf, 0.0), where=size > 0)
    ratio[(_pattern(a) != _pattern(e)).any(axis=1)] = math.inf
    worst = int(np.argmax(ratio))
    return worst, float(ratio[worst])


def _at(actual: Array, a: Array, e: Array, worst: int, allowed: Array | None = None) -> str:
    index = tuple(int(i) for i in np.unravel_index(worst, actual.shape))
    bound = "" if allowed is None else f", allowed is {allowed.flat[worst]:.3g}"
    return f"the worst at {index}: {a.flat[worst]:.9g}, expected {e.flat[worst]:.9g}{bound}"


@dataclasses.dataclass(frozen=True)
class Case:
    """An input of an op: x of rows x columns, the parameters that the op takes, and the reason for this shape."""

    reason: str
    x: Array
    parameters: Mapping[str, Array]


# The kinds of rows of an input, in turn. -inf is for softmax only: it makes a norm's row nan, which hides all other
# errors.
NORM_ROWS = ("normal", "offset", "constant", "range")
SOFTMAX_ROWS = (*NORM_ROWS, "half -inf", "all but one -inf", "all -inf")


def inputs(
    op: Op, rows: int, cols: int, dtype: Any, *, parameter_dtype: Any = None, reason: str = ""
) -> Case:
    """Return rows of every kind in turn, with gamma and beta. The same arguments give the same numbers."""
    dtype = dtype_of(dtype)
    random = np.random.default_rng([rows, cols])
    x = random.standard_normal((rows, cols))
    kinds = NORM_ROWS if op.parameters else SOFTMAX_ROWS
    for row in range(min(rows, 64)):  # further rows are normal
        kind = kinds[row % len(kinds)]
        if kind == "offset":  # E[x^2] - E[x]^2 in float32 would have no right digit
            x[row] = 1000 + 0.1 * x[row]
        elif kind == "constant":
            x[row] = 3
        elif kind == "range":  # exp underflows in softmax, and a few elements dominate in norms
            x[row] *= 10 ** random.uniform(-3, 3, cols)
        elif kind == "half -inf":
            x[row, random.permutation(cols)[: cols // 2]] = -np.inf
        elif kind == "all but one -inf":
            x[row, np.arange(cols) != random.integers(cols)] = -np.inf
        elif kind == "all -inf":
            x[row] = -np.inf
    weights = dtype if parameter_dtype is None else dtype_of(parameter_dtype)
    parameters = {name: random.standard_normal(cols).astype(weights) for name in op.parameters}
    return Case(reason, x.astype(dtype), parameters)


QUICK = {
    1: "one column",
    33: "one more than a warp, odd",
    1024: "whole vectors, the widest row that a warp holds",
    1025: "one more, and vectors of one",
    20000: "more than registers hold in most dtypes",
}
MORE = {
    2: "one pair",
    7: "odd, less than a vector",
    8: "one vector of half",
    257: "odd, padded in every lane",
    4100: "vectors of float that do not fill the last thread",
    16384: "the widest row that registers hold",
    50257: "a prime vocabulary",
    65536: "half fits shared memory, float does not",
    131072: "longer than shared memory in every dtype",
}
MANY = 10000  # columns from which on a few rows are enough


def cases(op: Op, dtype: Any, *, quick: bool = False) -> Iterator[Case]:
    """Yield deterministic inputs at the widths where kernels change; about 14, or 5 if quick."""
    for cols, reason in (QUICK if quick else QUICK | MORE).items():
        yield inputs(op, rows_for(cols), cols, dtype, reason=reason)


def rows_for(cols: int) -> int:
    """Return how many rows of this width a test needs."""
    return 29 if cols < MANY else 7
