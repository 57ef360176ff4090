"""Statistic ops on NumPy arrays: standardize, normalize, rescale and moments.

Where all elements count, rows go through the blocks of rows.py in the type of arithmetic; else, and for moments, they
are computed in float64. Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import FLOAT32, FLOAT64
from cupynorm._values import NamedTuple
from cupynorm.host import compiled
from cupynorm.host.blocks import each_block
from cupynorm.host.keeping import ALL, Keeping, KeptRows, each_kept, refuse_nan, rounded_towards
from cupynorm.host.ops import (
    LEAST_SQUARES,
    MOST_SQUARES,
    _centre,
    subtract_means,
    type_of_arithmetic,
)
from cupynorm.host.reference import _columns, _round
from cupynorm.host.row_sums import joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cupynorm.host.reference import Extras
    from cupynorm.host.rows import Rows

Array = np.ndarray[Any, Any]


def _freedom(count: Any, ddof: float) -> Any:
    """Return count - ddof, nan where that is not positive."""
    freedom = np.asarray(count - ddof, np.float64)
    return np.where(freedom > 0, freedom, np.nan)


@np.errstate(all="ignore")
def standardize(
    x: Array,
    axes: int,
    eps: float,
    ddof: float,
    out: Array,
    mean: Array | None = None,
    std: Array | None = None,
    keeping: Keeping = ALL,
) -> None:
    """Write (x - mean) / sqrt(var + eps) to out, with var = sum((x - mean)^2) / (count - ddof); std is sqrt(var)."""
    if keeping is not ALL:
        refuse_nan(x, axes, keeping)
        for kept in each_kept(x, axes, keeping):
            _standardize_kept(kept, eps, ddof, out, mean, std)
        return
    cols = math.prod(x.shape[x.ndim - axes :])
    freedom = float(_freedom(cols, ddof))
    if compiled.run("standardize", x, axes, out, (cols, eps, freedom), statistics=(mean, std)):
        return

    def work(rows: Rows) -> None:
        middle, squares = _centre(rows, cols, centred=True)
        rows.apply(np.multiply, 1 / np.sqrt(squares / freedom + eps))
        if rows.space.dtype == FLOAT32:
            _standardize_again(rows, cols, freedom, eps, middle, squares)
        rows.store(out)
        rows.store_statistic(mean, np.where(np.isnan(squares), np.nan, middle))
        rows.store_statistic(std, np.sqrt(squares / freedom))

    each_block(x, axes, type_of_arithmetic(x, out), work, out, alone=True)


def _standardize_kept(
    kept: KeptRows, eps: float, ddof: float, out: Array, mean: Array | None, std: Array | None
) -> None:
    of_rows = _centred(kept)
    variance = of_rows.squares / _freedom(of_rows.counted, ddof)
    factor = (1 / np.sqrt(variance + eps))[:, None]

    def scores(values: Array) -> Array:
        apart = of_rows.apart(values, kept.take("apart", values))
        return np.asarray(np.multiply(apart, factor, out=apart))

    kept.write(out, scores)
    kept.write_row(mean, of_rows.mean)
    kept.write_row(std, np.sqrt(variance))


def _standardize_again(
    rows: Rows, cols: int, freedom: float, eps: float, middle: Array, squares: Array
) -> None:
    """Compute rows of float32 again whose squares overflowed or vanished, as multiples of a power of two."""
    good = (squares < MOST_SQUARES) & (squares >= cols * LEAST_SQUARES)
    if np.count_nonzero(good) == good.size:
        return
    bad = ~good
    some = rows.again(bad)
    scale = _scales(some)
    found, sums = _centre(some, cols, scale, centred=True)
    some.apply(np.multiply, 1 / np.sqrt(sums / freedom + eps * scale * scale))
    middle[bad], squares[bad] = found / scale, sums / (scale * scale)
    rows.put(bad, some)


def _scales(rows: Rows) -> Array:
    """Return for each row a power of two by which its largest element comes near 1; 1 if that is not finite."""
    largest = _largest(rows)
    most = 126 if rows.space.dtype == FLOAT32 else 1000
    exponent = np.where(np.isfinite(largest), np.clip(np.frexp(largest)[1], -most, most), 0)
    return np.asarray(np.ldexp(1.0, -exponent))


class Centred(NamedTuple):
    """Statistics of rows: how many elements count, the mean in two parts, and the sum of squares of deviations.

    origin + rest is the mean: rounded to one number, it would lose digits that small deviations have. The origin is an
    element, so that a constant row has no deviations at all.
    """

    counted: Array
    origin: Array
    rest: Array
    squares: Array

    @property
    def mean(self) -> Array:
        """The mean; nan where nothing counts, or where it is not finite."""
        mean = self.origin + self.rest
        return np.where(np.isfinite(mean), mean, np.nan)

    def apart(self, values: Array, room: Array) -> Array:
        """Return the deviations of elements, in `room`."""
        np.subtract(values, self.origin[:, None], out=room)
        return np.subtract(room, self.rest[:, None], out=room)


def _centred(kept: KeptRows) -> Centred:
    """Return the statistics of some rows."""
    counted, origin = kept.count(), kept.first()
    share = 1 / np.where(counted == 0, np.nan, counted)

    def from_origin(values: Array) -> tuple[Array, Array | None]:
        return np.subtract(values, origin[:, None], out=kept.take("apart", values)), None

    def squares_of(values: Array) -> tuple[Array, Array | None]:
        apart = found.apart(values, kept.take("apart", values))
        return apart, apart

    found = Centred(counted, origin, kept.total(from_origin) * share, np.full(counted.shape, np.nan))
    squares = kept.total(squares_of)
    return found._replace(squares=np.where(counted == 0, np.nan, squares))


@np.errstate(all="ignore")
def moments(x: Array, axes: int, ddof: float, results: Mapping[str, Array], keeping: Keeping = ALL) -> None:
    """Write mean, variance, skewness and kurtosis, those that there are in `results`.

    variance = sum((x - mean)^2) / (count - ddof); of the others, which are biased, the third and fourth power of
    deviations / sqrt(variance with ddof=0) in the mean, less 3 for the kurtosis of a normal distribution.
    """
    if keeping is not ALL:
        refuse_nan(x, axes, keeping)
        for kept in each_kept(x, axes, keeping):
            of_rows = _centred(kept)
            kept.write_row(results["mean"], of_rows.mean)
            kept.write_row(results["variance"], of_rows.squares / _freedom(of_rows.counted, ddof))
            if len(results) > 2:  # noqa: PLR2004
                for (_, out), each in zip(
                    [*results.items()][2:], _higher_of_kept(kept, of_rows), strict=False
                ):
                    kept.write_row(out, each)
        return
    cols = math.prod(x.shape[x.ndim - axes :])
    freedom = float(_freedom(cols, ddof))

    higher = len(results) > 2  # noqa: PLR2004

    def work(rows: Rows) -> None:
        least, most = SAFE_SQUARES[rows.space.dtype, higher]
        mean, squares, *sums = _deviation_sums(rows, cols, higher=higher)
        shape = _shape(squares, sums, cols)
        good = (squares >= cols * least) & (squares < most)
        if np.count_nonzero(good) < good.size:
            bad = ~good
            some = rows.again(bad)
            scale = _scales(some)
            again, of_squares, *sums = _deviation_sums(some, cols, scale, higher=higher)
            mean[bad], squares[bad] = again / scale, of_squares / (scale * scale)
            for each, part in zip(shape, _shape(of_squares, sums, cols), strict=True):
                each[bad] = part
        found = [np.where(np.isnan(squares), np.nan, mean), squares / freedom, *shape]
        for each, out in zip(found, results.values(), strict=False):
            rows.store_statistic(out, _round(each, out.dtype))

    each_block(x, axes, type_of_arithmetic(x, *results.values()), work, alone=True, kept=False)


# Of rows, by the type of arithmetic and whether fourth powers are summed up, too: the mean square below which terms
# that count vanish, and the sum of squares beyond which a sum overflows.
SAFE_SQUARES = {
    (FLOAT32, False): (LEAST_SQUARES, MOST_SQUARES),
    (FLOAT32, True): (1e-15, 1e18),
    (FLOAT64, False): (1e-280, 1e300),
    (FLOAT64, True): (1e-140, 1e150),
}


def _deviation_sums(rows: Rows, cols: int, scale: Array | None = None, *, higher: bool) -> list[Array]:
    """Return the means of rows, and the sums of their deviations' squares; `higher`: and of third and fourth powers.

    scale: by which rows are multiplied first.
    """
    mean = subtract_means(rows, cols, scale)
    if not higher:
        return [mean, rows.sum_of_squares()]
    sums: list[Array | None] = [None] * 3
    for _, values in rows.each():
        squares = np.square(values, out=rows.space.take("squares", *values.shape))
        factors = None, values, squares
        sums = [rows.sums(squares, each, sum_) for each, sum_ in zip(factors, sums, strict=True)]
    return [mean, *map(np.asarray, sums)]


def _shape(squares: Array, sums: Sequence[Array], cols: int) -> list[Array]:
    """Return skewness and kurtosis, given the sums of deviations' powers: the second, and others; [] without these."""
    if not sums:
        return []
    third, fourth = sums
    square = np.where(squares > 0, squares, np.nan)
    return [third * math.sqrt(cols) / (square * np.sqrt(square)), fourth * cols / (square * square) - 3]


def _higher_of_kept(kept: KeptRows, of_rows: Centred) -> list[Array]:
    """Return skewness and kurtosis."""
    squares = np.where(of_rows.squares > 0, of_rows.squares, np.nan)
    one_over_unit = (1 / np.sqrt(squares))[:, None]

    def power(values: Array, of: int) -> tuple[Array, Array | None]:
        apart = of_rows.apart(values, kept.take("apart", values))
        np.multiply(apart, one_over_unit, out=apart)
        square = np.square(apart, out=kept.take("square", values))
        return square, square if of == 4 else apart  # noqa: PLR2004

    third, fourth = (kept.total(functools.partial(power, of=each)) for each in (3, 4))
    return [third * np.sqrt(of_rows.counted), fourth * of_rows.counted - 3]


@np.errstate(all="ignore")
def normalize(
    x: Array, axes: int, order: int, out: Array, norm: Array | None = None, keeping: Keeping = ALL
) -> None:
    """Write x / norm to out, and x where the norm is 0. order: 1, 2, or 0 for the largest magnitude."""
    if keeping is not ALL:
        refuse_nan(x, axes, keeping)
        for kept in each_kept(x, axes, keeping):
            _normalize_kept(kept, order, out, norm)
        return
    if compiled.run(f"normalize/{order}", x, axes, out, statistics=(norm,)):
        return

    def work(rows: Rows) -> None:
        low, high = SAFE_NORMS[rows.space.dtype]
        size = _norms(rows, order)
        safe = (size > low) & (size < high)
        rows.apply(np.divide, np.where(safe, size, 1.0))
        if np.count_nonzero(safe) < safe.size:
            bad = ~safe
            some = rows.again(bad)
            scale = _scales(some)
            some.apply(np.multiply, scale)
            scaled = _norms(some, order)
            some.apply(np.divide, np.where(scaled == 0, 1.0, scaled))
            size[bad] = scaled / scale
            rows.put(bad, some)
        rows.store(out)
        rows.store_statistic(norm, size)

    each_block(x, axes, type_of_arithmetic(x, out), work, out, alone=True)


def _normalize_kept(kept: KeptRows, order: int, out: Array, norm: Array | None) -> None:
    largest = np.maximum(kept.largest(np.abs), 0.0)
    unit = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    by = unit[:, None]
    size = largest / unit

    def sizes(values: Array) -> tuple[Array, Array | None]:
        size = np.divide(values, by, out=kept.take("apart", values))
        np.abs(size, out=size)
        return size, size if order == 2 else None  # noqa: PLR2004

    if order:
        size = kept.total(sizes)
    if order == 2:  # noqa: PLR2004
        size = np.sqrt(size)
    divisor = np.where(size == 0, 1.0, size)[:, None]
    kept.write(out, lambda values: values / by / divisor)
    kept.write_row(norm, size * unit)


# Norms between which no square that counts has vanished, and no sum has overflowed.
SAFE_NORMS = {FLOAT32: (1e-15, 1e18), FLOAT64: (1e-140, 1e150)}


def _norms(rows: Rows, order: int) -> Array:
    """Return the norm of each row as it is now."""
    if order == 2:  # noqa: PLR2004
        return np.sqrt(rows.sum_of_squares())
    if order == 0:
        return _largest(rows)
    total: Array | None = None
    for each in _sizes(rows):
        total = rows.sums(each, before=total)
    return np.asarray(total)


def _largest(rows: Rows) -> Array:
    """Return the largest magnitude of each row, nan where one is."""
    return joined(np.maximum, [rows.reduced(np.maximum, each) for each in _sizes(rows)]).astype(np.float64)


def _sizes(rows: Rows) -> Iterator[Array]:
    """Yield the magnitudes of each piece; each takes the place of the one before."""
    for _, values in rows.each():
        yield np.abs(values, out=rows.space.take("sizes", *values.shape))


@np.errstate(all="ignore")
def rescale(
    x: Array,
    axes: int,
    low: float,
    high: float,
    out: Array,
    smallest: Array | None = None,
    largest: Array | None = None,
    keeping: Keeping = ALL,
) -> None:
    """Write low + (high - low) * (x - smallest) / (largest - smallest) to out, and low for a constant row."""
    if keeping is not ALL:
        refuse_nan(x, axes, keeping)
        for kept in each_kept(x, axes, keeping):
            _rescale_kept(kept, low, high, out, smallest, largest)
        return
    if compiled.run("rescale", x, axes, out, (1.0, low, high), statistics=(smallest, largest)):
        return

    def work(rows: Rows) -> None:
        least = joined(np.minimum, [rows.reduced(np.minimum, each) for _, each in rows.each()])
        most = rows.max()
        width = most - least
        rows.apply(np.subtract, least)
        rows.apply(np.divide, np.where(width == 0, 1.0, width))
        finite = np.isfinite(width)
        if np.count_nonzero(finite) < finite.size:
            bad = ~finite
            some = rows.again(bad)
            _shares_of_halves(some, least[bad], most[bad])
            rows.put(bad, some)
        _scale_shares(rows, low, high)
        rows.store(out)
        rows.store_statistic(smallest, least)
        rows.store_statistic(largest, most)

    each_block(x, axes, type_of_arithmetic(x, out), work, out, alone=True)


def _shares_of_halves(rows: Rows, least: Array, most: Array) -> None:
    """Replace elements by (element - least) / (most - least), where that difference is not finite."""
    half = 0.5 * least
    rows.apply(np.multiply, np.full(least.shape, 0.5))
    rows.apply(np.subtract, half)
    rows.apply(np.divide, 0.5 * most - half)


def _scale_shares(rows: Rows, low: float, high: float) -> None:
    """Replace elements by low + (high - low) * element."""
    kind = rows.space.dtype.type

    def scale(values: Array, out: Array, _: object) -> None:
        rest = rows.space.take("rest", *values.shape)
        np.multiply(values, kind(-low), out=rest)
        rest += kind(low)
        np.multiply(values, kind(high), out=out)
        np.add(out, rest, out=out)

    if low:
        rows.then(scale)
    elif high != 1:
        rows.then(lambda values, out, _: np.multiply(values, kind(high), out=out))


def _rescale_kept(
    kept: KeptRows, low: float, high: float, out: Array, smallest: Array | None, largest: Array | None
) -> None:
    least, most = -kept.largest(np.negative), kept.largest(np.positive)
    nothing = np.isposinf(least) & np.isneginf(most)
    least, most = (np.where(nothing, np.nan, each) for each in (least, most))
    half = 0.5 * least
    width = 0.5 * most - half
    divisor = np.where(width == 0, 1.0, width)[:, None]

    def result(values: Array) -> Array:
        share = (0.5 * values - half[:, None]) / divisor
        return np.asarray(share * high + (low - share * low))

    kept.write(out, result)
    kept.write_row(smallest, least)
    kept.write_row(largest, most)


@np.errstate(all="ignore")
def kept_norm(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    axes: int,
    eps: float,
    out: Array,
    stats: Sequence[Array | None],
    extras: Extras,
    *,
    centred: bool,
    omit: bool,
) -> None:
    """Write layer_norm (centred) or rms_norm of what counts to out; what the mask drops is 0 before gamma and beta.

    stats: where mean, if centred, and rstd go.
    """
    scale, shift = _columns(gamma, x.shape, axes), _columns(beta, x.shape, axes)
    for kept in each_kept(x, axes, Keeping(extras.mask, omit=omit)):
        if centred:
            of_rows = _centred(kept)
        else:
            counted = kept.count()
            zero = np.zeros(counted.shape)
            squares = kept.total(lambda values: (values, values))
            of_rows = Centred(counted, zero, zero, squares)
        rstd = 1 / np.sqrt(of_rows.squares / np.where(of_rows.counted == 0, np.nan, of_rows.counted) + eps)
        found = (of_rows.mean, rstd) if centred else (rstd,)
        for each, place in zip(found, stats, strict=False):
            kept.write_row(place, each)
        kept.replace(of_rows.origin, of_rows.rest, rstd)
        kept.rows.apply_columns(np.multiply, scale)
        kept.rows.apply_columns(np.add, shift)
        kept.rows.store(out, extras.quantize)


@np.errstate(all="ignore")
def sigma_clip(
    x: Array,
    axes: int,
    limits: tuple[float, float],
    iterations: int,
    centre: str,
    out: Array,
    results: Mapping[str, Array],
    keeping: Keeping,
) -> None:
    """Write x to out, and nan for what is farther from the centre than `limits` standard deviations, time and again.

    results: where low, high, mean and std go, those that are asked for: the bounds, and statistics of what is kept.
    """
    kind = type_of_arithmetic(x, out)
    most = float(np.finfo(kind).max)
    for kept in each_kept(x, axes, keeping):
        low: Array = np.full(kept.count().shape, -most)
        high: Array = np.full(low.shape, most)
        kept.within(low, high)
        for _ in range(iterations):
            found = _centred(kept)
            middle = found.mean if centre == "mean" else kept.median()
            std = np.sqrt(found.squares / found.counted)
            before = low, high
            low = np.where(np.isnan(middle), np.nan, np.fmax(low, middle - limits[0] * std))
            high = np.where(np.isnan(middle), np.nan, np.fmin(high, middle + limits[1] * std))
            kept.within(low, high)
            if all(np.array_equal(*each, equal_nan=True) for each in zip(before, (low, high), strict=True)):
                break
        found = _centred(kept)
        statistics = {
            "low": rounded_towards(np.inf, low, kind),
            "high": rounded_towards(-np.inf, high, kind),
            "mean": found.mean,
            "std": np.sqrt(found.squares / found.counted),
        }
        for name, place in results.items():
            kept.write_row(place, statistics[name])
        kept.write_clipped(out)
