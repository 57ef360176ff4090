"""standardize, normalize, rescale, moments and sigma_clip."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from cupynorm._options import boolean, choice, eps_of, eps_within, integer, plainly, within
from cupynorm.call.arguments import view
from cupynorm.call.missing import OMIT, PROPAGATE
from cupynorm.call.statistics import (
    Missing,
    StatisticCall,
    check_elements_result,
    check_rows_results,
    number,
)
from cupynorm.host import statistics
from cupynorm.invoke import gradient_calls
from cupynorm.invoke.gradient_calls import Implementation, Parts, Steps
from cupynorm.lower.statistics import (
    CLIP_ON_CHIP,
    MOMENTS,
    NORMALIZE,
    PROGRESS,
    RESCALE,
    STANDARDIZE,
    clip_on_chip_spec,
    clip_pass_spec,
    statistic_spec,
)
from cupynorm.plan.config import BYTE_BITS, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cupynorm.call.view import View
    from cupynorm.lower.row import RowOp


def _parts(call: StatisticCall) -> Parts:
    """Return the arrays of a call."""
    read = {"x": call.x, "weights": call.weights}
    read |= {name: None if call.mask is None else getattr(call.mask, name) for name in ("where", "lengths")}
    written = {} if call.out is None else {"out": call.out}
    return Parts(read, {**written, **call.rows}, call.results)


def _steps(op: RowOp, own: tuple[int, ...], call: StatisticCall) -> Steps:
    """Return the kernels of a call. own: the struct's template arguments behind that which says what counts."""
    steps = Steps(call.device, call.compute)
    if not call.x.size:
        return steps
    x = view(call.x, "x")
    rows = x.shape[: len(x.shape) - call.axes]
    places = {name: steps.numbers(name, each, rows).pointer for name, each in call.rows.items()}
    steps.specs.append(
        statistic_spec(
            op,
            (call.counts, *own),
            x,
            None if call.out is None else view(call.out, "out"),
            call.axes,
            call.mask,
            None if call.weights is None else view(call.weights, "weights").broadcast_to(x.shape),
            [places.get(name, 0) for name in op.stats],
            call.numbers,
            call.compute,
            omit=call.nan == OMIT,
            room=steps.messages(x.shape, call.axes) if call.out is None else 0,
        )
    )
    steps.add_rounding()
    return steps


# what lies along the axes of x; results with one number a row do so only where these axes are kept
ELEMENTS = dict.fromkeys(("x", "where", "weights", "out"), "x")
ROWS_KEPT = ELEMENTS | dict.fromkeys(MOMENTS.stats, "x")


class Given(NamedTuple):
    """The arrays of a call, and its axes, as they are checked: transposed where these were others than the last."""

    x: Any
    missing: Missing
    axis: Any
    outs: Mapping[str, Any]


def _run(
    function: str,
    x: Any,
    missing: Missing,
    axis: Any,
    outs: Mapping[str, Any],
    options: tuple[Any, ...],
    check: Callable[[Given], StatisticCall],
    implementation: Implementation,
    plan: str | Plan | None,
    whole: Mapping[str, str] = ELEMENTS,
) -> Any:
    arrays = {"x": x, "where": missing.where, "lengths": missing.lengths, "weights": missing.weights, **outs}
    key = gradient_calls.option_keys(*options, missing.left_padded, missing.nan)

    def checked(arrays: Mapping[str, Any], axis: Any) -> StatisticCall:
        counts = missing._replace(where=arrays["where"], weights=arrays["weights"])
        return check(Given(arrays["x"], counts, axis, {name: arrays[name] for name in outs}))

    return gradient_calls.run(
        function, arrays, key, checked, implementation, plan=plan, axis=axis, whole=whole
    )


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

    def check(given: Given) -> StatisticCall:
        rows = STANDARDIZE.stats if boolean("return_stats", return_stats) else ()
        exact, freedom = eps_of(eps), number("ddof", ddof)
        call = check_elements_result(
            *given[:2], axis=given.axis, rows=rows, **given.outs, dtype=dtype, plan=plan
        )
        return call._replace(numbers=(eps_within(call.compute, exact), freedom))

    options = (ddof, eps, return_stats, dtype)
    return _run("standardize", x, missing, axis, {"out": out}, options, check, STANDARDIZED, plan)


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


STANDARDIZED = Implementation(_parts, lambda call: _steps(STANDARDIZE, (), call), _standardize)


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

    def check(given: Given) -> StatisticCall:
        order = _order(ord)
        rows = NORMALIZE.stats if boolean("return_norms", return_norms) else ()
        call = check_elements_result(
            *given[:2], axis=given.axis, rows=rows, **given.outs, dtype=dtype, plan=plan
        )
        return call._replace(numbers=(float(order),))

    options = (ord, return_norms, dtype)
    return _run("normalize", x, missing, axis, {"out": out}, options, check, NORMALIZED, plan)


def _order(given: Any) -> int:
    """Return 1, 2, or 0 for the largest magnitude."""
    known = {1: 1, 2: 2, np.inf: 0}
    if not isinstance(given, (int, float, np.integer, np.floating)) or isinstance(given, bool):
        raise TypeError(f"ord is {plainly(given)}: use 1, 2 or numpy.inf")
    if float(given) not in known:
        raise ValueError(f"ord is {plainly(given)}: use 1, 2 or numpy.inf")
    return known[float(given)]


def _normalize_steps(call: StatisticCall) -> Steps:
    return _steps(NORMALIZE, (int(call.numbers[0]),), call._replace(numbers=()))


def _normalize(call: StatisticCall) -> None:
    statistics.normalize(
        call.x, call.axes, int(call.numbers[0]), call.out, call.rows.get("norm"), call.keeping()
    )


NORMALIZED = Implementation(_parts, _normalize_steps, _normalize)


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

    def check(given: Given) -> StatisticCall:
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
    return _run("rescale", x, missing, axis, {"out": out}, options, check, RESCALED, plan)


def _rescale(call: StatisticCall) -> None:
    low, high = call.numbers
    smallest, largest = (call.rows.get(name) for name in RESCALE.stats)
    statistics.rescale(call.x, call.axes, low, high, call.out, smallest, largest, call.keeping())


RESCALED = Implementation(_parts, lambda call: _steps(RESCALE, (), call), _rescale)


def moments(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    order: int = 2,
    ddof: float = 0,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    weights: Any = None,
    nan: str = PROPAGATE,
    keepdims: bool = False,
    out: tuple[Any, ...] | None = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, ...]:
    """Return mean and variance of each row, and skewness and kurtosis where asked; x is read once.

    variance = sum((x - mean)^2) / (count - ddof), as numpy.var. With m_k = mean((x - mean)^k), skewness is
    m_3 / m_2^1.5 and kurtosis m_4 / m_2^2 - 3, as scipy.stats.skew and kurtosis by default. Partial results are merged
    by the formulas of Chan et al. 1979 and Pebay 2008, around means, in units of the standard deviation.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    axis : int, tuple of int, or None, default -1
        The axes of a row, in any order; None for all.
    order : {2, 3, 4}, default 2
        How many moments: 2 for mean and variance, 3 for the skewness, too, 4 for the kurtosis, too.
    ddof : float, default 0
        As in standardize; of the variance alone.
    where, lengths, left_padded, weights, nan
        As in standardize.
    keepdims : bool, default False
        Keep the axes of a row, with one element each.
    out : tuple of array, optional
        Where the results are written, as many as there are; None for one that is to be allocated. They share no memory
        with what is read.
    dtype : dtype, optional
        The results'; default: float64 for an x of float64, and float32 for others. Arithmetic is in float64 if it is.
    plan : str or Plan, optional
        As in layer_norm.

    Returns
    -------
    tuple of array
        (mean, variance), (mean, variance, skewness) or (mean, variance, skewness, kurtosis), of x's shape without the
        axes of a row.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    Too few elements give nan: none for the mean, no more than `ddof` for the variance. A constant row has no skewness
    and no kurtosis: nan. So have all moments of a row that holds an infinity.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import moments
    >>> [each.round(4).tolist() for each in moments(np.array([[1.0, 1.0, 1.0, 5.0]]), order=3)]
    [[2.0], [3.0], [1.1547]]
    >>> mean, variance = moments(np.array([1.0, 3.0, np.nan]), nan="omit", ddof=1)
    >>> float(mean), float(variance)
    (2.0, 2.0)
    """
    missing = Missing(where, lengths, left_padded, weights, nan)

    def check(given: Given) -> StatisticCall:
        views = tuple(given.outs.values())
        return check_rows_results(
            *given[:2],
            axis=given.axis,
            rows=MOMENTS.stats[: _count(order)],
            keepdims=keepdims,
            out=views[:several] if 0 <= several <= len(views) else out,
            dtype=dtype,
            plan=plan,
            numbers=(number("ddof", ddof),),
        )

    outs = dict(
        zip(MOMENTS.stats, (*(out if isinstance(out, (tuple, list)) else ()), *NO_OUTS), strict=False)
    )
    # what is no tuple must not be taken for None, which a call before may have had
    several = len(out) if isinstance(out, (tuple, list)) else -1 if out is None else -2
    options = (order, ddof, keepdims, dtype, several)
    whole = ROWS_KEPT if boolean("keepdims", keepdims) else ELEMENTS
    return tuple(_run("moments", x, missing, axis, outs, options, check, COUNTED, plan, whole))


NO_OUTS = (None,) * len(MOMENTS.stats)


def _count(order: Any) -> int:
    found = integer("order", order, "use 2, 3 or 4")
    if found not in (2, 3, 4):
        raise ValueError(f"order is {plainly(order)}: use 2, 3 or 4")
    return found


def _moments(call: StatisticCall) -> None:
    if call.x.size:
        statistics.moments(call.x, call.axes, call.numbers[0], call.rows, call.keeping())


COUNTED = Implementation(_parts, lambda call: _steps(MOMENTS, (len(call.rows),), call), _moments)


def sigma_clip(
    x: Any,
    sigma: float = 3.0,
    iterations: int = 10,
    axis: int | tuple[int, ...] | None = -1,
    *,
    sigma_lower: float | None = None,
    sigma_upper: float | None = None,
    centre: str = "mean",
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    return_bounds: bool = False,
    return_stats: bool = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return x with nan in place of outliers: of what is farther than sigma standard deviations from its row's centre.

    In each round, mean (or median) and standard deviation are those of what the rounds before have left.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    sigma : float, default 3.0
        How many standard deviations from the centre an element may be.
    iterations : int, default 10
        How many rounds at most; 1 or more.
    axis : int, tuple of int, or None, default -1
        As in standardize.
    sigma_lower, sigma_upper : float, optional
        The same for elements below and above the centre; default: sigma.
    centre : {"mean", "median"}, default "mean"
        What deviations are taken from: the mean, or the middle element, or the mean of the two middle ones.
    where, lengths, left_padded
        As in standardize; what they drop is nan in the result.
    return_bounds : bool, default False
        Return the bounds of each row as well: what lies between them, these included, is kept.
    return_stats : bool, default False
        Return mean and standard deviation of what is kept as well.
    out, dtype, plan
        As in layer_norm. Where each round is a kernel, the plan is that of the one that writes the result; a row is not
        kept for several rounds by the variants "cached", "split" and "uncached".

    Returns
    -------
    array or tuple of array
        y, of x's shape; or the tuple of those that are asked for of (y, low, high, mean, std), which have x's shape
        without the axes of a row, in the type of arithmetic.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    nan and infinities never count, and are nan in the result. Bounds never widen from round to round, so that what is
    kept is what lies between the last ones, these included. In a row of which nothing counts bounds, mean and std are
    nan. Rounds end when nothing was left out. On a device a row is read once where the chip holds it; longer rows, of
    hundreds of thousands of elements, are read by a kernel for each round, and for each of up to 32 steps (64 in
    float64) of a search for a median.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import sigma_clip
    >>> x = np.array([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 90.0])
    >>> y, mean, std = sigma_clip(x, sigma=2, return_stats=True)
    >>> y.tolist(), float(mean), float(std)
    ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, nan], 1.5, 0.5)
    """
    missing = Missing(where, lengths, left_padded, None, PROPAGATE)
    below = sigma if sigma_lower is None else sigma_lower
    above = sigma if sigma_upper is None else sigma_upper
    optional = {"sigma_lower": sigma_lower, "sigma_upper": sigma_upper}

    def check(given: Given) -> StatisticCall:
        names = ("sigma" if each is None else name for name, each in optional.items())
        limits = [(name, eps_of(each, name)) for name, each in zip(names, (below, above), strict=True)]
        rounds = integer("iterations", iterations, "give an integer of 1 or more")
        if rounds < 1:
            raise ValueError(f"iterations is {plainly(iterations)}: give an integer of 1 or more")
        middle = choice("centre", centre, ("mean", "median"), 'use "mean" or "median"')
        rows = (("low", "high") if boolean("return_bounds", return_bounds) else ()) + (
            ("mean", "std") if boolean("return_stats", return_stats) else ()
        )
        call = check_elements_result(
            *given[:2],
            axis=given.axis,
            rows=rows,
            **given.outs,
            dtype=dtype,
            plan=plan,
            numbers=(*(each for _, each in limits), float(rounds), float(middle == "median")),
        )
        for name, each in limits:
            within(call.compute, **{name: each})
        return call._replace(nan=OMIT, plan=plan)

    options = (below, above, iterations, centre, return_bounds, return_stats, dtype)
    return _run("sigma_clip", x, missing, axis, {"out": out}, options, check, CLIPPED, plan)


def _clip_steps(call: StatisticCall, *, clusters: bool = True) -> Steps:
    """Return the kernel of sigma_clip, or several where rows do not fit on the chip.

    clusters: whether the device runs them.
    """
    below, above, rounds, median = call.numbers
    steps = Steps(call.device, call.compute)
    if not call.x.size:
        return steps
    x = view(call.x, "x")
    rows = x.shape[: len(x.shape) - call.axes]
    places = {name: steps.numbers(name, each, rows).pointer for name, each in call.rows.items()}
    stats = tuple(places.get(name, 0) for name in CLIP_ON_CHIP.stats)
    spec = clip_on_chip_spec(
        x,
        view(call.out, "out"),
        call.axes,
        call.mask,
        stats,
        (below, above, rounds),
        call.compute,
        median=bool(median),
    )
    if steps.fits(spec.problem, call.plan, clusters=clusters):
        steps.specs.append(spec)
        if clusters:
            steps.otherwise = functools.partial(_clip_steps, call, clusters=False)
            steps.differently = "sigma_clip reads such rows in each round"
    else:
        _add_clip_passes(steps, call, x, stats)
    steps.add_rounding()
    return steps


def _add_clip_passes(steps: Steps, call: StatisticCall, x: View, stats: tuple[int, ...]) -> None:
    """Add a kernel for each round, or for each step of a search for medians, and one that writes what is kept."""
    *numbers, median = call.numbers
    limits = (numbers[0], numbers[1], numbers[2])
    rows = x.shape[: len(x.shape) - call.axes]
    messages = steps.messages(x.shape, call.axes)
    rooms = [steps.room(f"progress {at}", (*rows, PROGRESS)) for at in range(2)]
    common = (x, call.axes, call.mask, limits, call.compute)
    # of each round the statistics, a step for each bit of a number, and the element above the middle
    passes = int(limits[2]) * (1 if not median else 2 + BYTE_BITS * call.compute.itemsize)
    before: View | None = None
    for at in range(passes):
        after = rooms[at % 2]
        pointers = (0 if before is None else before.pointer, after.pointer, 0, 0, 0, 0)
        steps.specs.append(clip_pass_spec(*common, None, before, pointers, messages, median=bool(median)))
        before = after
    last = (0 if before is None else before.pointer, 0, *stats)
    steps.specs.append(clip_pass_spec(*common, view(call.out, "out"), before, last, median=bool(median)))


def _clip(call: StatisticCall) -> None:
    below, above, rounds, median = call.numbers
    centre = "median" if median else "mean"
    statistics.sigma_clip(
        call.x, call.axes, (below, above), int(rounds), centre, call.out, call.rows, call.keeping()
    )


CLIPPED = Implementation(_parts, _clip_steps, _clip)
