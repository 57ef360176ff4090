"""moments: mean, variance, skewness and kurtosis."""

from __future__ import annotations

from typing import Any

from cupynorm._options import boolean, integer, plainly
from cupynorm.call.missing import PROPAGATE
from cupynorm.call.statistics import Missing, StatisticCall, check_rows_results, number
from cupynorm.host import statistics
from cupynorm.invoke import statistic_calls
from cupynorm.invoke.step_calls import Implementation
from cupynorm.lower.statistics import MOMENTS
from cupynorm.plan.config import Plan


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

    def check(given: statistic_calls.Given) -> StatisticCall:
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
    whole = statistic_calls.ROWS_KEPT if boolean("keepdims", keepdims) else statistic_calls.ELEMENTS
    return tuple(statistic_calls.run("moments", x, missing, axis, outs, options, check, COUNTED, plan, whole))


NO_OUTS = (None,) * len(MOMENTS.stats)


def _count(order: Any) -> int:
    found = integer("order", order, "use 2, 3 or 4")
    if found not in (2, 3, 4):
        raise ValueError(f"order is {plainly(order)}: use 2, 3 or 4")
    return found


def _moments(call: StatisticCall) -> None:
    if call.x.size:
        statistics.moments(call.x, call.axes, call.numbers[0], call.rows, call.keeping())


COUNTED = Implementation(
    statistic_calls.statistic_parts,
    lambda call: statistic_calls.statistic_steps(MOMENTS, (len(call.rows),), call),
    _moments,
)
