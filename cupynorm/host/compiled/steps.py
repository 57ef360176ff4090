"""The arithmetic of each op, as small functions that numba compiles into the loops of loops.py.

The formulas are those of reference.py. float32 rows are summed in float64, except sums of exponentials and of products.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.host.compiled.exponential import exp, piece

LESS = 2.0**-64  # by which sums of as many float64 as there may be are finite


class Steps(NamedTuple):
    """The steps of an op over one row, as functions for numba. None: the op has no such step.

    v is an element, less the row's `origin` if elements are counted from one of them (`from_one`), and w the element
    of another array. first(v, w) gives two terms, of which s and t are the sums, or the `maxima`, over the row; the
    second one counts where they are a `pair`. second(v, w, a) gives a term of the sum u, with a = one(s, t, numbers).
    Then b = two(s, t, u, numbers), and an element of the result is result(v, w, a, b, numbers), with second()'s term as
    v if that is `kept`, then by gamma and plus beta if it may be `scaled`. told(origin, s, t, u, b, numbers) are two
    statistics. wide: v, w, a and b are float64, else of the type of the elements; s, t, u and numbers are float64.
    """

    wide: bool
    from_one: bool = False
    maxima: bool = False
    pair: bool = False
    first: Any = None
    one: Any = None
    second: Any = None
    kept: bool = False
    two: Any = None
    result: Any = None
    told: Any = None
    scaled: bool = False


@piece
def value(v, w):
    return v, 0.0


@piece
def both_ways(v, w):
    return v, -v


@piece
def magnitude(v, w):
    return abs(v), 0.0


@piece
def magnitude_and_less(v, w):
    return abs(v), abs(v) * LESS


@piece
def product(v, w):
    return v * w, 0.0


@piece
def other(v, w):
    return w, 0.0


@piece
def mean(s, t, numbers):
    return s / numbers[0]


@piece
def itself(s, t, numbers):
    return s


@piece
def safe_scale(s, t, numbers):
    """Return 1, or the power of two by which the largest magnitude comes near 1, where squares may not be finite."""
    if s == 0 or 1e-140 < s < 1e150 or s == np.inf:  # noqa: PLR2004
        return 1.0
    return math.ldexp(1.0, min(max(-math.frexp(s)[1], -1000), 1000))


@piece
def one_or_less(s, t, numbers):
    return LESS if s == np.inf else 1.0


@piece
def least_itself(s, t, numbers):
    return -t


@piece
def half_of_least(s, t, numbers):
    return -0.5 * t


@piece
def square(v, w, a):
    return v * v


@piece
def square_from_mean(v, w, a):
    return (v - a) * (v - a)


@piece
def power(v, w, a):
    return exp(v - a)


@piece
def scaled_square(v, w, a):
    return v * a * (v * a)


@piece
def rstd(s, t, u, numbers):
    return 1 / math.sqrt(u / numbers[0] + numbers[1])


@piece
def rstd_of_freedom(s, t, u, numbers):
    return 1 / math.sqrt(u / numbers[2] + numbers[1])


@piece
def reciprocal(s, t, u, numbers):
    return 1 / u


@piece
def logarithm(s, t, u, numbers):
    return math.log(u)


@piece
def log_sum(s, t, u, numbers):
    if s != s or t != t:  # noqa: PLR0124  nan
        return np.nan
    return s + math.log(u) if abs(s) < np.inf else s


@piece
def first_itself(s, t, u, numbers):
    return s


@piece
def over_first(s, t, u, numbers):
    return 1.0 if s == 0 else 1 / s


@piece
def over_root(s, t, u, numbers):
    return 1.0 if u == 0 else 1 / math.sqrt(u)


@piece
def finite_sum(s, t, u, numbers):
    return t if s == np.inf else s


@piece
def scaled_root(s, t, u, numbers):
    return math.sqrt(u)


@piece
def over_width(s, t, u, numbers):
    return 1.0 if s + t == 0 else 1 / (s + t)


@piece
def half_width(s, t, u, numbers):
    return 0.5 * s + 0.5 * t


@piece
def standardised(v, w, a, b, numbers):
    return (v - a) * b


@piece
def times(v, w, a, b, numbers):
    return v * b


@piece
def less_both(v, w, a, b, numbers):
    return v - a - b


@piece
def divided(v, w, a, b, numbers):
    return v if b == 0 else v / b


@piece
def scaled_and_divided(v, w, a, b, numbers):
    return v if b == 0 else v * a / b


@piece
def rescaled(v, w, a, b, numbers):
    share = (v - a) * b
    return share * numbers[2] + (numbers[1] - share * numbers[1])


@piece
def rescaled_halves(v, w, a, b, numbers):
    share = (0.5 * v - a) / (1.0 if b == 0 else b)
    return share * numbers[2] + (numbers[1] - share * numbers[1])


@piece
def slope_of_softmax(v, w, a, b, numbers):
    return (w - a) * v


@piece
def slope_of_log_softmax(v, w, a, b, numbers):
    return w - exp(v) * a


@piece
def mean_and_rstd(origin, s, t, u, b, numbers):
    return origin + s / numbers[0], b


@piece
def mean_and_std(origin, s, t, u, b, numbers):
    return (origin + s / numbers[0] if u == u else np.nan), math.sqrt(u / numbers[2])  # noqa: PLR0124


@piece
def of_second(origin, s, t, u, b, numbers):
    return b, b


@piece
def first_told(origin, s, t, u, b, numbers):
    return s, s


@piece
def root_told(origin, s, t, u, b, numbers):
    return math.sqrt(u), u


@piece
def without_scale(origin, s, t, u, b, numbers):
    return b / safe_scale(s, t, numbers), b


@piece
def extremes(origin, s, t, u, b, numbers):
    return (-t, s) if s == s and t == t else (np.nan, np.nan)  # noqa: PLR0124


NORM = Steps(
    wide=True,
    first=value,
    one=mean,
    second=square_from_mean,
    two=rstd,
    result=standardised,
    told=mean_and_rstd,
    scaled=True,
)
STANDARDIZE = NORM._replace(two=rstd_of_freedom, told=mean_and_std, scaled=False)
LARGEST = Steps(wide=True, maxima=True, first=magnitude, told=first_told)
EXTREMES = Steps(wide=True, maxima=True, pair=True, first=both_ways, told=extremes)
POWERS = Steps(
    wide=False,
    maxima=True,
    first=value,
    one=itself,
    second=power,
    kept=True,
    two=reciprocal,
    result=times,
)
LOGARITHMS = POWERS._replace(kept=False, two=logarithm, result=less_both)
STEPS = {
    "layer_norm": NORM,
    "rms_norm": Steps(wide=True, second=square, two=rstd, result=times, told=of_second, scaled=True),
    "standardize": STANDARDIZE,
    "normalize/0": LARGEST._replace(two=over_first, result=times),
    "normalize/1": Steps(wide=True, first=magnitude, two=over_first, result=times, told=first_told),
    "normalize/2": Steps(wide=True, second=square, two=over_root, result=times, told=root_told),
    "rescale": EXTREMES._replace(one=least_itself, two=over_width, result=rescaled),
    "softmax": POWERS,
    "log_softmax": LOGARITHMS,
    "logsumexp": LOGARITHMS._replace(pair=True, first=both_ways, two=log_sum, result=None, told=of_second),
    "softmax_backward": Steps(wide=False, first=product, one=itself, result=slope_of_softmax),
    "log_softmax_backward": Steps(wide=False, first=other, one=itself, result=slope_of_log_softmax),
}
# Of float64 sums and differences may not be finite, or have lost all digits; those of float32 are in float64.
OF_FLOAT64 = {
    "layer_norm": NORM._replace(from_one=True),
    "standardize": STANDARDIZE._replace(from_one=True),
    "normalize/0": LARGEST._replace(two=first_itself, result=divided),
    "rescale": EXTREMES._replace(one=half_of_least, two=half_width, result=rescaled_halves),
    "normalize/1": Steps(
        wide=True,
        pair=True,
        first=magnitude_and_less,
        one=one_or_less,
        two=finite_sum,
        result=scaled_and_divided,
        told=first_told,
    ),
    "normalize/2": Steps(
        wide=True,
        maxima=True,
        first=magnitude,
        one=safe_scale,
        second=scaled_square,
        two=scaled_root,
        result=scaled_and_divided,
        told=without_scale,
    ),
}


def steps_of(name: str, dtype: np.dtype[Any]) -> Steps:
    """Return the steps of an op for one dtype."""
    return OF_FLOAT64.get(name, STEPS[name]) if dtype.itemsize == 8 else STEPS[name]  # noqa: PLR2004


@piece
def no_terms(v, w):
    return v, v


@piece
def no_term(v, w, a):
    return v


@piece
def no_first(s, t, numbers):
    return 0.0


@piece
def no_second(s, t, u, numbers):
    return 0.0


@piece
def no_result(v, w, a, b, numbers):
    return v


@piece
def nothing_told(origin, s, t, u, b, numbers):
    return 0.0, 0.0


NONE = Steps(
    wide=False,
    first=no_terms,
    one=no_first,
    second=no_term,
    two=no_second,
    result=no_result,
    told=nothing_told,
)
