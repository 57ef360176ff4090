"""The functions that a fusion may use: on traced values, NumPy arrays and numbers.

In a function that `cupynorm.fuse` traces, they become part of the kernel. On NumPy arrays and numbers they compute at
once:

- exp, log, sqrt, rsqrt, tanh, erf, sigmoid, silu and gelu compute in float64 (longdouble stays longdouble) and round
  once, to the argument's dtype, or to float64 for integers and bool;
- abs, minimum, maximum, clip, relu and where return the dtype that NumPy gives them.

Floating-point warnings are off. All of them raise TypeError for other arrays, CuPy's included, and for dtypes that are
not real.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm._dtypes import dtype_name, dtype_of
from cupynorm._options import choice
from cupynorm.call.subclasses import check_subclass
from cupynorm.host.reference import _round
from cupynorm.lower import tracing
from cupynorm.lower.operations import OPERATIONS
from cupynorm.lower.tracing import Traced
from cupynorm.runtime import devices

__all__ = [
    "abs",
    "cast",
    "clip",
    "erf",
    "exp",
    "gelu",
    "log",
    "maximum",
    "minimum",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sqrt",
    "tanh",
    "where",
]


def exp(x: Any) -> Any:
    """Return e to the power of x.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Examples
    --------
    >>> exp(np.array([0.0, 1.0]))
    array([1.        , 2.71828183])
    """
    return _computed("exp", x)


def log(x: Any) -> Any:
    """Return the natural logarithm of x.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. 0 gives -inf, negative numbers give nan.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Examples
    --------
    >>> log(np.array([1.0, 0.0]))
    array([  0., -inf])
    """
    return _computed("log", x)


def sqrt(x: Any) -> Any:
    """Return the square root of x.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. Negative numbers give nan.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Examples
    --------
    >>> sqrt(np.array([9.0, 16.0]))
    array([3., 4.])
    """
    return _computed("sqrt", x)


def rsqrt(x: Any) -> Any:
    """Return the reciprocal square root of x: 1 / sqrt(x).

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. 0 gives inf, negative numbers give nan.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Examples
    --------
    >>> rsqrt(np.array([4.0, 0.0]))
    array([0.5, inf])
    """
    return _computed("rsqrt", x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of x.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Examples
    --------
    >>> tanh(np.array([0.0, 1.0]))
    array([0.        , 0.76159416])
    """
    return _computed("tanh", x)


def erf(x: Any) -> Any:
    """Return the error function of x: 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Notes
    -----
    Arrays are computed by rational approximations [1]_, in float64 also for longdouble.

    References
    ----------
    .. [1] Cody, "Rational Chebyshev approximations for the error function", Mathematics of Computation 23, 1969.

    Examples
    --------
    >>> erf(np.array([0.0, 1.0]))
    array([0.        , 0.84270079])
    """
    return _computed("erf", x)


def sigmoid(x: Any) -> Any:
    """Return the logistic function of x: 1 / (1 + exp(-x)).

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Examples
    --------
    >>> sigmoid(np.array([0.0, 2.0]))
    array([0.5       , 0.88079708])
    """
    return _computed("sigmoid", x)


def silu(x: Any) -> Any:
    """Return x * sigmoid(x) [1]_.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. -inf gives nan, as in PyTorch.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    References
    ----------
    .. [1] Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation", 2017.

    Examples
    --------
    >>> silu(np.array([0.0, 2.0]))
    array([0.        , 1.76159416])
    """
    return _computed("silu", x)


def gelu(x: Any, *, approximate: str = "none") -> Any:
    """Return the Gaussian error linear unit of x [1]_.

    That is x * (1 + erf(x / sqrt(2))) / 2, or with ``approximate="tanh"``
    x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2, which differs by up to 5e-4.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. -inf gives nan, as in PyTorch.
    approximate : {"none", "tanh"}, default "none"
        The formula.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype of x; float64 for integers and bool.

    Raises
    ------
    ValueError
        For an unknown formula.

    Notes
    -----
    On a device, the relative error in float32 is 1e-6 down to x = -2 and 1e-5 at -13.

    References
    ----------
    .. [1] Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.

    Examples
    --------
    >>> gelu(np.array([0.0, 2.0]))
    array([0.        , 1.95449974])
    """
    choice("approximate", approximate, ("none", "tanh"), "use 'none' or 'tanh'")
    return _computed("gelu" if approximate == "none" else "gelu_tanh", x)


def relu(x: Any) -> Any:
    """Return x where it is positive, else 0.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. nan gives nan.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype that NumPy gives it.

    Examples
    --------
    >>> relu(np.array([-2.0, 3.0]))
    array([0., 3.])
    """
    return maximum(x, 0)


def abs(x: Any) -> Any:  # noqa: A001  the name that Python and NumPy have for it
    """Return the absolute value of x.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype that NumPy gives it.

    Examples
    --------
    >>> abs(np.array([-2.0, 3.0]))
    array([2., 3.])
    """
    return _chosen("abs", x)


def minimum(a: Any, b: Any) -> Any:
    """Return the smaller of a and b.

    Parameters
    ----------
    a, b : traced value, numpy.ndarray or number
        Real numbers. If either is nan, the result is nan.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype that NumPy gives it.

    Examples
    --------
    >>> minimum(np.array([1.0, 3.0]), 2.0)
    array([1., 2.])
    """
    return _chosen("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """Return the larger of a and b.

    Parameters
    ----------
    a, b : traced value, numpy.ndarray or number
        Real numbers. If either is nan, the result is nan.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype that NumPy gives it.

    Examples
    --------
    >>> maximum(np.array([1.0, 3.0]), 2.0)
    array([2., 3.])
    """
    return _chosen("maximum", a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    """Return x limited to the interval from low to high: minimum(maximum(x, low), high).

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers. nan gives nan.
    low, high : traced value, numpy.ndarray, number or None
        The bounds; None is no bound.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype that NumPy gives it.

    Examples
    --------
    >>> clip(np.array([-5.0, 0.5, 5.0]), 0, 1)
    array([0. , 0.5, 1. ])
    """
    given = {name: each for name, each in (("x", x), ("low", low), ("high", high)) if each is not None}
    if not any(isinstance(each, Traced) for each in given.values()):
        for name, each in given.items():
            _array("clip", each, name)
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b.

    Parameters
    ----------
    condition : traced value, numpy.ndarray or number
        A number holds where it is not 0.
    a, b : traced value, numpy.ndarray or number
        Real numbers.

    Returns
    -------
    traced value, numpy.ndarray or number
        In the dtype that NumPy gives it.

    Examples
    --------
    >>> where(np.array([True, False]), 1.0, 2.0)
    array([1., 2.])
    """
    return _chosen("where", condition, a, b)


def cast(x: Any, dtype: Any) -> Any:
    """Return x rounded to a dtype, to nearest even.

    Parameters
    ----------
    x : traced value, numpy.ndarray or number
        Real numbers.
    dtype : str or numpy.dtype
        float16, bfloat16, float32 or float64.

    Returns
    -------
    traced value, numpy.ndarray or number
        On arrays and numbers, in that dtype. In a fusion, the rounded value continues in the compute type, so that
        rounding to the compute type or a wider one does nothing.

    Raises
    ------
    TypeError
        For other dtypes.

    Examples
    --------
    >>> cast(np.array([1 / 3]), "float16")
    array([0.3333], dtype=float16)
    """
    target = dtype_of(dtype)
    if isinstance(x, Traced):
        name = dtype_name(target)
        return x if name == "float64" else tracing.apply(f"cast_{name}", x)
    array = _array("cast", x)
    with np.errstate(all="ignore"):
        return _round(_wide(array), target).astype(target)[()]


def _computed(name: str, x: Any) -> Any:
    """Compute one function of one argument."""
    if isinstance(x, Traced):
        return tracing.apply(name, x)
    array = _array(name, x)
    wide = _wide(array)
    dtype = np.dtype(np.float64) if array.dtype.kind in "biu" else array.dtype
    with np.errstate(all="ignore"):
        return _round(np.asarray(OPERATIONS[name].compute(wide)), dtype).astype(dtype)[()]


def _chosen(name: str, *values: Any) -> Any:
    """Apply a function whose results are among its arguments."""
    if any(isinstance(value, Traced) for value in values):
        return tracing.apply(name, *values)
    for argument, value in zip(
        _ARGUMENTS.get(name, ("a", "b") if len(values) > 1 else ("x",)), values, strict=True
    ):
        _array(name, value, argument)
    # NumPy would return subclasses as such. Numbers stay Python numbers, whose types are weaker than arrays'.
    plain = [np.asarray(value) if isinstance(value, np.ndarray) else value for value in values]
    with np.errstate(all="ignore"):
        return OPERATIONS[name].compute(*plain)


_ARGUMENTS = {"where": ("condition", "a", "b")}


def _array(name: str, x: Any, argument: str = "x") -> np.ndarray[Any, Any]:
    if devices.is_device_array(x):
        raise TypeError(
            f"{name} was given a CuPy array: on a device it runs inside a function that cupynorm.fuse traces"
        )
    if isinstance(x, np.ndarray):
        check_subclass(argument, x, on_device=False)
    array = np.asarray(x)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(
            f"{name} was given {type(x).__qualname__} of dtype {array.dtype}: give real numbers, NumPy arrays of them, "
            "or traced values"
        )
    return array


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.longdouble if array.dtype == np.longdouble else np.float64)
