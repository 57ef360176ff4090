"""The row ops on NumPy arrays, as calls run them: in float32, or in float64 if x or the result is.

What they compute is written as a formula in reference.py, of the same names and arguments; here it is written so that
NumPy is fast, with the error bounds of docs/numerics.md. Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import FLOAT32, FLOAT64, compute_dtype
from cupynorm.host import compiled
from cupynorm.host.blocks import each_block
from cupynorm.host.reference import ALONE
from cupynorm.host.rows import columns_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynorm.host.reference import Extras
    from cupynorm.host.rows import Rows

Array = np.ndarray[Any, Any]

# Sums of exponentials without a pivot between which no digit is lost: neither have the largest ones been flushed to
# 0, nor has the sum, or the largest one's square, overflowed.
LEAST_SUM, MOST_SUM = 0.1, 1e18
# What log_softmax loses by the rounding of log(sum), up to half a unit, is seen from 8 on (without a pivot, results are
# -0.7 and lower), unless results are as low: they are log(largest / sum) at most, or so much and lower in the mean.
LARGE_SUM = math.exp(8)
# Sums of squares between which none overflowed, and none that counts was flushed to 0, in float32.
LEAST_SQUARES, MOST_SQUARES = 1e-30, 1e38


def layer_norm(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    axes: int,
    eps: float,
    out: Array,
    mean: Array | None = None,
    rstd: Array | None = None,
    extras: Extras = ALONE,
) -> None:
    """Write (x - mean) / sqrt(var + eps) * gamma + beta to out, as reference.layer_norm does."""
    cols = math.prod(x.shape[x.ndim - axes :])
    if extras is ALONE and compiled.run(
        "layer_norm", x, axes, out, (cols, eps), scale=gamma, shift=beta, statistics=(mean, rstd)
    ):
        return
    dtype = _arithmetic(x, out, extras)
    scale, shift = (columns_of(each, x.shape, axes, dtype) for each in (gamma, beta))

    def work(rows: Rows) -> None:
        rows.add(extras.add)
        mean_of_rows, factor = standardise(rows, cols, eps, centred=True)
        rows.apply_columns(np.multiply, scale)
        rows.apply_columns(np.add, shift)
        rows.quantize(out, extras.quantize)
        rows.store(out)
        rows.store_statistic(mean, mean_of_rows)
        rows.store_statistic(rstd, factor)

    _run(x, axes, dtype, out, work, extras, gamma, beta)


def rms_norm(
    x: Array,
    gamma: Array | None,
    axes: int,
    eps: float,
    out: Array,
    rstd: Array | None = None,
    extras: Extras = ALONE,
) -> None:
    """Write x / sqrt(mean(x^2) + eps) * gamma to out, as reference.rms_norm does."""
    cols = math.prod(x.shape[x.ndim - axes :])
    if extras is ALONE and compiled.run(
        "rms_norm", x, axes, out, (cols, eps), scale=gamma, statistics=(rstd,)
    ):
        return
    dtype = _arithmetic(x, out, extras)
    scale = columns_of(gamma, x.shape, axes, dtype)

    def work(rows: Rows) -> None:
        rows.add(extras.add)
        _, factor = standardise(rows, cols, eps, centred=False)
        rows.apply_columns(np.multiply, scale)
        rows.quantize(out, extras.quantize)
        rows.store(out)
        rows.store_statistic(rstd, factor)

    _run(x, axes, dtype, out, work, extras, gamma)


def softmax(x: Array, axes: int, out: Array, extras: Extras = ALONE, *, omit: bool = False) -> None:
    """Write exp(x) / sum(exp(x)) to out, and 0 where a mask drops, as reference.softmax does. omit: nan stays as it is.

    With `omit` nothing is quantised.
    """
    if extras is ALONE and not omit and compiled.run("softmax", x, axes, out):
        return

    def work(rows: Rows) -> None:
        rows.mask(extras.mask)
        if omit:
            rows.drop_nan()
        _, total = powers(rows)
        rows.apply(np.divide, total)
        if omit:
            rows.restore_nan()
        if extras.mask is not None and (omit or not _all_positive(total)):
            rows.drop(extras.mask, 0.0)
        rows.quantize(out, extras.quantize)
        rows.store(out)

    _run(x, axes, _arithmetic(x, out, extras), out, work, extras, alone=not omit)


def log_softmax(x: Array, axes: int, out: Array, extras: Extras = ALONE, *, omit: bool = False) -> None:
    """Write x - log(sum(exp(x))) to out, and -inf where a mask drops, as reference.log_softmax does.

    omit: nan stays as it is.
    """
    if extras is ALONE and not omit and compiled.run("log_softmax", x, axes, out):
        return

    def work(rows: Rows) -> None:
        rows.mask(extras.mask)
        if omit:
            rows.drop_nan()
        pivot, total, largest = powers_with_largest(rows)
        rows.reset()
        if pivot is not None:
            rows.apply(np.subtract, pivot)
        log_total = np.log(total)
        rows.apply(np.subtract, log_total)
        large = total > LARGE_SUM
        if np.count_nonzero(large):
            large &= largest * largest > total
            rows.apply(np.subtract, np.where(large, log_total - log_total.astype(rows.space.dtype), 0.0))
        if omit:
            rows.restore_nan()
        if extras.mask is not None and (omit or not _all_positive(total)):
            rows.drop(extras.mask, -np.inf)
        rows.store(out)

    _run(x, axes, _arithmetic(x, out, extras), out, work, extras, alone=not omit)


def _all_positive(total: Array) -> bool:
    """Say whether no row of exponentials has nothing kept, or a nan: else what is dropped is not what it should be."""
    return bool((total > 0).all())


def _run(
    x: Array,
    axes: int,
    dtype: np.dtype[Any],
    out: Array,
    work: Callable[[Rows], None],
    extras: Extras,
    *reads: Array | None,
    alone: bool = True,
) -> None:
    mask, add, _ = extras
    if mask is not None:
        reads += (mask.where, mask.bias, mask.begin, mask.end)
    if add is not None:
        reads += (add.residual, add.bias, add.sum_out)
    each_block(x, axes, dtype, work, out, reads, alone=alone and mask is None and add is None)


def _arithmetic(x: Array, out: Array, extras: Extras) -> np.dtype[Any]:
    """Return the type of arithmetic: float64 for sums, too, whose rounding would cost their deviations their digits."""
    if extras.add is not None:
        return FLOAT64
    return type_of_arithmetic(x) if extras.quantize is not None else type_of_arithmetic(x, out)


def type_of_arithmetic(*arrays: Array) -> np.dtype[Any]:
    """Return float64 if any array is, or holds int32, else float32."""
    return compute_dtype(*[each.dtype for each in arrays])


def powers(rows: Rows) -> tuple[Array | None, Array]:
    """Replace elements by exp(element - pivot); return each row's pivot, 0 or its maximum, and the sum of its powers.

    exp(x) / sum(exp(x)) needs no pivot where nothing overflows, and where what is flushed to 0 is so small that it does
    not count: two passes are saved. Which rows need one depends on each row alone, so that a row has the same bits in
    any company. The pivots are None where all of them are 0.
    """
    rows.apply(np.exp)
    total = rows.sum()
    good = (total >= LEAST_SUM) & (total <= MOST_SUM)
    return _with_pivots(rows, good, total), total


def powers_with_largest(rows: Rows) -> tuple[Array | None, Array, Array]:
    """Return what sums_of_powers() does, and the largest power, as sums_of() has it; 0 where there is a pivot.

    There is one where an element may have half of the sum: its logarithm is near to 0, and needs all its digits.
    """
    total, largest = rows.sums_of(np.exp, largest=True)
    good = (largest < 0.5 * (total - LEAST_SUM)) & (total <= MOST_SUM)
    pivots = _with_pivots(rows, good, total, kept=False)
    return pivots, total, largest if pivots is None else np.where(pivots == 0, largest, 0.0)


def sums_of_powers(rows: Rows) -> tuple[Array | None, Array]:
    """Return what powers() does; what is left of the elements is not to be looked at before reset()."""
    total, _ = rows.sums_of(np.exp)
    good = (total >= LEAST_SUM) & (total <= MOST_SUM)
    return _with_pivots(rows, good, total, kept=False), total


def _with_pivots(rows: Rows, good: Array, total: Array, *, kept: bool = True) -> Array | None:
    """Compute rows that are not good again, with a pivot; write their sums to total, return the pivots, or None.

    kept: whether elements are asked for, too.
    """
    if np.count_nonzero(good) == good.size:
        return None
    bad = ~good
    pivot = np.zeros(total.shape)
    some = rows.again(bad)
    pivot[bad], total[bad] = _powers_from_maximum(some, kept=kept)
    if kept:
        rows.put(bad, some)
    return pivot


def _powers_from_maximum(rows: Rows, *, kept: bool) -> tuple[Array, Array]:
    largest = rows.max()
    rows.apply(np.subtract, largest)
    if not kept:
        return largest.astype(np.float64), rows.sums_of(np.exp)[0]
    rows.apply(np.exp)
    return largest.astype(np.float64), rows.sum()


def standardise(
    rows: Rows, cols: int, eps: float, *, centred: bool, exactly: bool = False
) -> tuple[Array, Array]:
    """Replace rows by (x - mean) / sqrt(var + eps); return mean and 1 / sqrt(var + eps). The mean is 0 if not centred.

    x is counted from one of the row's elements. Differences of near numbers are exact, so a mean far larger than the
    deviations costs no digits. exactly: elements near the mean have all digits, too.
    """
    mean, squares = _centre(rows, cols, centred=centred, exactly=exactly)
    factor = 1 / np.sqrt(squares / cols + eps)
    rows.apply(np.multiply, factor)
    if rows.space.dtype == FLOAT32:
        good = squares < MOST_SQUARES
        if eps < LEAST_SQUARES:
            good &= squares >= cols * LEAST_SQUARES
        if np.count_nonzero(good) < good.size:
            bad = ~good
            some = rows.again(bad)
            mean[bad], factor[bad] = _standardise_scaled(some, cols, eps, centred=centred, exactly=exactly)
            rows.put(bad, some)
    return mean, factor


def _standardise_scaled(
    rows: Rows, cols: int, eps: float, *, centred: bool, exactly: bool
) -> tuple[Array, Array]:
    """Do the same with rows that are multiplied by a power of two first, so that their largest element is near 1."""
    rows.apply(np.abs)
    largest = rows.max().astype(np.float64)
    rows.reset()
    exponent = np.where(np.isfinite(largest), np.clip(np.frexp(largest)[1], -126, 126), 0)
    scale = np.ldexp(1.0, -exponent)
    mean, squares = _centre(rows, cols, scale, centred=centred, exactly=exactly)
    factor = 1 / np.sqrt(squares / cols + eps * scale * scale)
    rows.apply(np.multiply, factor)
    return mean / scale, factor * scale


def subtract_exactly(rows: Rows, mean: Array) -> None:
    """Subtract a float64 number of each row in two parts: what is left has all digits, however little it is."""
    high = mean.astype(rows.space.dtype).astype(np.float64)
    rows.apply(np.subtract, high)
    rest = mean - high
    if np.count_nonzero(rest):
        rows.apply(np.subtract, rest)


def _centre(
    rows: Rows, cols: int, scale: Array | None = None, *, centred: bool, exactly: bool = False
) -> tuple[Array, Array]:
    """Multiply rows by a scale, and subtract their means, if centred; return the means, and the sums of squares."""
    if centred and exactly and rows.space.dtype == FLOAT32:
        if scale is not None:
            rows.apply(np.multiply, scale)
        mean = rows.exact_sum() / cols
        subtract_exactly(rows, mean)
        return mean, rows.sum_of_squares()
    if centred:
        mean = subtract_means(rows, cols, scale)
        return mean, rows.sum_of_squares()
    if scale is not None:
        rows.apply(np.multiply, scale)
    squares = rows.sum_of_squares()
    return np.zeros(squares.shape), squares


def subtract_means(rows: Rows, cols: int, scale: Array | None = None) -> Array:
    """Multiply rows by a scale, and subtract their means, which are returned."""
    pivot = _pivots(rows)
    if scale is not None:
        rows.apply(np.multiply, scale)
        pivot = pivot * scale
    rows.apply(np.subtract, pivot)
    rest = rows.sum() / cols
    rows.apply(np.subtract, rest)
    return np.asarray(rest + pivot)


def _pivots(rows: Rows) -> Array:
    """Return an element of each row to count from: the middle one of three, since an outlier would cost digits."""
    one, two, three = (rows.column(share) for share in (0.0, 0.5, 1.0))
    return np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))
