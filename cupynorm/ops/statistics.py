"""standardize, normalize and rescale."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from cupynorm._options import boolean, eps_of, eps_within, plainly, within
from cupynorm.call.missing import PROPAGATE
from cupynorm.call.statistics import Missing, StatisticCall, check_elements_result, number
from cupynorm.host import statistics
from cupynorm.invoke import statistic_calls
from cupynorm.invoke.step_calls import Implementation
from cupynorm.invoke.steps import Steps
from cupynorm.lower.statistics import NORMALIZE, RESCALE, STANDARDIZE
from cupynorm.plan.config import Plan


@overload
def standardize(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    ddof: float = 0,
    eps: float = 0.0,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    weights: Any = None,
    nan: str = PROPAGATE,
    return_stats: Literal[False] = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any: ...


@overload
def standardize(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    ddof: float = 0,
    eps: float = 0.0,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    weights: Any = None,
    nan: str = PROPAGATE,
    return_stats: Literal[True],
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any, Any]: ...


def standardize(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    ddof: float = 0,
    eps: float = 0.0,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    weights: Any = None,
    nan: str = PROPAGATE,
    return_stats: bool = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return z-scores: (x - mean) / sqrt(var + eps), with var = sum((x - mean)^2) / (count - ddof) of each row.

    With eps=0 that is (x - x.mean(axis)) / x.std(axis, ddof=ddof), and scipy.stats.zscore.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    axis : int, tuple of int, or None, default -1
        The axes of a row, in any order; None for all. Results have x's order in memory.
    ddof : float, default 0
        What is subtracted from the number of elements: 1 for the standard deviation of a sample.
    eps : float, default 0.0
        Added to the variance; not negative. 1e-5 makes it layer_norm's result.
    where : array of bool or uint8, optional
        Broadcasts to x's shape; what is False or 0 does not count, and its result is 0.
    lengths : array or list of int, optional
        A row has its first `lengths` elements only; as in softmax.
    left_padded : bool, default False
        A row has its last `lengths` elements instead.
    weights : array, optional
        How often an element counts; broadcasts to x's shape, of float16, bfloat16, float32, float64, bool or any
        integers. An element of weight 0 does not count, but has a z-score. A negative weight is a ValueError on the
        host; a device does not look for it.
    nan : {"propagate", "omit", "raise"}, default "propagate"
        "propagate": a row that holds nan gives nan throughout. "omit": nan does not count, and stays nan. "raise": an
        element that counts and is nan is a ValueError, for NumPy arrays.
    return_stats : bool, default False
        Return mean and std = sqrt(var) as well.
    out, dtype, plan
        As in layer_norm.

    Returns
    -------
    array or tuple of array
        y, of x's shape; with return_stats=True: (y, mean, std). Both have x's shape without the axes of a row, in the
        type of arithmetic.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    A constant row gives nan (0 / 0), and so does one of which no more than `ddof` elements count, or that holds an
    infinity. A mean that is far larger than the deviations costs no digits. Deviations whose squares float32 does not
    hold, below 1e-19 or above 1e19, need dtype=numpy.float64 on a device.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import standardize
    >>> z, mean, std = standardize(np.array([[1.0, 2.0, 3.0]]), ddof=1, return_stats=True)
    >>> z.tolist(), mean.tolist(), std.tolist()
    ([[-1.0, 0.0, 1.0]], [2.0], [1.0])
    >>> standardize(np.array([[1.0, np.nan, 3.0]]), nan="omit").tolist()
    [[-1.0, nan, 1.0]]
    """
    missing = Missing(where, lengths, left_padded, weights, nan)

    def check(given: statistic_calls.Given) -> StatisticCall:
        rows = STANDARDIZE.stats if boolean("return_stats", return_stats) else ()
        exact, freedom = eps_of(eps), number("ddof", ddof)
        call = check_elements_result(
            *given[:2], axis=given.axis, rows=rows, **given.outs, dtype=dtype, plan=plan
        )
        return call._replace(numbers=(eps_within(call.compute, exact), freedom))

    options = (ddof, eps, return_stats, dtype)
    return statistic_calls.run(
        "standardize", x, missing, axis, {"out": out}, options, check, STANDARDIZED, plan
    )


def _standardize(call: StatisticCall) -> None:
    eps, ddof = call.numbers
    statistics.standardize(
        call.x,
        call.axes,
        eps,
        ddof,
        call.out,
        call.rows.get("mean"),
        call.rows.get("std"),
        call.keeping(),
    )


STANDARDIZED = Implementation(
    statistic_calls.statistic_parts,
    lambda call: statistic_calls.statistic_steps(STANDARDIZE, (), call),
    _standardize,
)


def normalize(
    x: Any,
    ord: float = 2,  # noqa: A002  NumPy's name for it
    axis: int | tuple[int, ...] | None = -1,
    *,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    weights: Any = None,
    nan: str = PROPAGATE,
    return_norms: bool = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Divide rows by their norm: x / (sum(|x|^ord))^(1 / ord), or x / max(|x|) for ord=inf.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    ord : {1, 2, inf}, default 2
        The norm: the sum of the magnitudes, the root of the sum of the squares, or the largest magnitude.
    axis : int, tuple of int, or None, default -1
        The axes of a row, in any order; None for all. Results have x's order in memory.
    where, lengths, left_padded, nan
        As in standardize.
    weights : array, optional
        How often an element counts in the norm; as in standardize. With ord=inf, weights other than 0 are all alike.
    return_norms : bool, default False
        Return the norms as well.
    out, dtype, plan
        As in layer_norm.

    Returns
    -------
    array or tuple of array
        y, of x's shape; with return_norms=True: (y, norms). The norms have x's shape without the axes of a row, in the
        type of arithmetic.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    A row of zeros, or of which nothing counts, stays as it is, as in scikit-learn; its norm is 0. Rows of tiny or huge
    numbers are computed as multiples of a power of two, so that squares neither vanish nor overflow. A row with an
    infinity has the norm inf: it gives nan there and 0 elsewhere.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import normalize
    >>> normalize(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    >>> normalize(np.array([[1.0, 3.0]]), 1).tolist(), normalize(np.array([[-2.0, 1.0]]), np.inf).tolist()
    ([[0.25, 0.75]], [[-1.0, 0.5]])
    """
    missing = Missing(where, lengths, left_padded, weights, nan)

    def check(given: statistic_calls.Given) -> StatisticCall:
        order = _order(ord)
        rows = NORMALIZE.stats if boolean("return_norms", return_norms) else ()
        call = check_elements_result(
            *given[:2], axis=given.axis, rows=rows, **given.outs, dtype=dtype, plan=plan
        )
        return call._replace(numbers=(float(order),))

    options = (ord, return_norms, dtype)
    return statistic_calls.run("normalize", x, missing, axis, {"out": out}, options, check, NORMALIZED, plan)


def _order(given: Any) -> int:
    """Return 1, 2, or 0 for the largest magnitude."""
    known = {1: 1, 2: 2, np.inf: 0}
    if not isinstance(given, (int, float, np.integer, np.floating)) or isinstance(given, bool):
        raise TypeError(f"ord is {plainly(given)}: use 1, 2 or numpy.inf")
    if float(given) not in known:
        raise ValueError(f"ord is {plainly(given)}: use 1, 2 or numpy.inf")
    return known[float(given)]


def _normalize_steps(call: StatisticCall) -> Steps:
    return statistic_calls.statistic_steps(NORMALIZE, (int(call.numbers[0]),), call._replace(numbers=()))


def _normalize(call: StatisticCall) -> None:
    statistics.normalize(
        call.x, call.axes, int(call.numbers[0]), call.out, call.rows.get("norm"), call.keeping()
    )


NORMALIZED = Implementation(statistic_calls.statistic_parts, _normalize_steps, _normalize)


def rescale(
    x: Any,
    low: float = 0.0,
    high: float = 1.0,
    axis: int | tuple[int, ...] | None = -1,
    *,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    nan: str = PROPAGATE,
    return_range: bool = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Scale rows so that they reach from `low` to `high`: low + (high - low) * (x - min) / (max - min).

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    low, high : float, default 0.0 and 1.0
        What a row's smallest and largest element become; within the type of arithmetic. high may be less than low.
    axis : int, tuple of int, or None, default -1
        The axes of a row, in any order; None for all. Results have x's order in memory.
    where, lengths, left_padded, nan
        As in standardize.
    return_range : bool, default False
        Return the smallest and the largest element of each row as well.
    out, dtype, plan
        As in layer_norm.

    Returns
    -------
    array or tuple of array
        y, of x's shape; with return_range=True: (y, smallest, largest), both of x's shape without the axes of a row,
        in the type of arithmetic.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    A constant row becomes `low`. A row of which nothing counts is nan, except where it is dropped. The results of the
    smallest and the largest element are `low` and `high` to the last bit, unless the result's type rounds these.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import rescale
    >>> rescale(np.array([[1.0, 2.0, 5.0], [7.0, 7.0, 7.0]]), -1, 1).tolist()
    [[-1.0, -0.5, 1.0], [-1.0, -1.0, -1.0]]
    """
    missing = Missing(where, lengths, left_padded, None, nan)

    def check(given: statistic_calls.Given) -> StatisticCall:
        rows = RESCALE.stats if boolean("return_range", return_range) else ()
        numbers = (number("low", low), number("high", high))
        call = check_elements_result(
            *given[:2],
            axis=given.axis,
            rows=rows,
            **given.outs,
            dtype=dtype,
            plan=plan,
            numbers=numbers,
        )
        within(call.compute, low=numbers[0], high=numbers[1])
        return call

    options = (low, high, return_range, dtype)
    return statistic_calls.run("rescale", x, missing, axis, {"out": out}, options, check, RESCALED, plan)


def _rescale(call: StatisticCall) -> None:
    low, high = call.numbers
    smallest, largest = (call.rows.get(name) for name in RESCALE.stats)
    statistics.rescale(call.x, call.axes, low, high, call.out, smallest, largest, call.keeping())


RESCALED = Implementation(
    statistic_calls.statistic_parts, lambda call: statistic_calls.statistic_steps(RESCALE, (), call), _rescale
)
