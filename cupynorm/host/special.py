"""erf and erfc on NumPy arrays in float64, which NumPy does not have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# W. J. Cody 1969, "Rational Chebyshev approximations for the error function", Mathematics of Computation 23, with the
# coefficients of his CALERF (netlib, specfun), highest power first: numerator and denominator for each interval.
_NEAR = 0.46875  # erf(x) / x of x^2 up to here
_NEAR_P = (
    1.85777706184603153e-1,
    3.16112374387056560e0,
    1.13864154151050156e2,
    3.77485237685302021e2,
    3.20937758913846947e3,
)
_NEAR_Q = (
    1.0,
    2.36012909523441209e1,
    2.44024637934444173e2,
    1.28261652607737228e3,
    2.84423683343917062e3,
)
_MIDDLE = 4.0  # exp(x^2) erfc(x) of x up to here
_MIDDLE_P = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_MIDDLE_Q = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
_FAR_P = (  # (1 / sqrt(pi) - x exp(x^2) erfc(x)) x^2 of 1 / x^2 beyond
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_FAR_Q = (
    1.0,
    2.56852019228982242e0,
    1.87295284992346725e0,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)
_LAST = 28.0  # erfc is 0 in float64 from here on


@np.errstate(all="ignore")
def erf(x: Array) -> Array:
    """Return 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x, to a few units of float64's last place."""
    x = np.asarray(x, np.float64)
    near = np.abs(x) <= _NEAR
    y: Array = np.empty_like(x)
    y[near] = _near(x[near])
    y[~near] = np.copysign(1 - _tail(np.abs(x[~near])), x[~near])
    return y


@np.errstate(all="ignore")
def erfc(x: Array) -> Array:
    """Return 1 - erf(x), relatively exact however small it is."""
    x = np.asarray(x, np.float64)
    near = np.abs(x) <= _NEAR
    y: Array = np.empty_like(x)
    y[near] = 1 - _near(x[near])
    rest = x[~near]
    tail = _tail(np.abs(rest))
    y[~near] = np.where(rest < 0, 2 - tail, tail)
    return y


def _near(x: Array) -> Array:
    return x * _ratio(_NEAR_P, _NEAR_Q, x * x)


def _tail(a: Array) -> Array:
    """Return erfc of numbers above _NEAR; nan of nan."""
    a = np.minimum(a, _LAST)
    # in two factors: the rounding of a^2 would be multiplied by a^2
    high = np.trunc(a * 16) / 16
    y: Array = np.exp(-high * high) * np.exp((high - a) * (high + a))
    far = a > _MIDDLE
    y[~far] *= _ratio(_MIDDLE_P, _MIDDLE_Q, a[~far])
    inverse = 1 / (a[far] * a[far])
    y[far] *= (1 / math.sqrt(math.pi) - inverse * _ratio(_FAR_P, _FAR_Q, inverse)) / a[far]
    return y


def _ratio(over: tuple[float, ...], under: tuple[float, ...], x: Array) -> Array:
    """Return one polynomial over another, without temporaries."""
    values = []
    for coefficients in (over, under):
        value = np.full_like(x, coefficients[0])
        for coefficient in coefficients[1:]:
            value *= x
            value += coefficient
        values.append(value)
    return values[0] / values[1]
