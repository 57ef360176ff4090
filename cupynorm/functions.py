"""The functions that a fusion may use: on traced values, on NumPy arrays and on numbers.

On arrays and numbers they are NumPy's: exp to gelu are computed in float64 (longdouble stays longdouble) and rounded once
to the argument's dtype, float64 for integers; abs, minimum, maximum, clip, relu and where keep the dtype that NumPy
gives them. Floating warnings are off. Each raises TypeError for arrays of another kind, CuPy's included: on a device
they are for functions that cupynorm.fuse traces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm._dtypes import dtype_name, dtype_of
from cupynorm._options import choice
from cupynorm.call.subclasses import check_subclass
from cupynorm.host.reference import _round
from cupynorm.lower import tracing
from cupynorm.lower.tracing import OPERATIONS, Traced
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
    """Return e to the power of x."""
    return _computed("exp", x)


def log(x: Any) -> Any:
    """Return the natural logarithm of x: -inf for 0, nan below."""
    return _computed("log", x)


def sqrt(x: Any) -> Any:
    """Return the square root of x: nan below 0."""
    return _computed("sqrt", x)


def rsqrt(x: Any) -> Any:
    """Return 1 / sqrt(x): inf for 0, nan below."""
    return _computed("rsqrt", x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of x."""
    return _computed("tanh", x)


def erf(x: Any) -> Any:
    """Return the error function of x: 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x.

    On arrays by Cody's rational approximations (1969, Mathematics of Computation 23), in float64 also for longdouble.
    """
    return _computed("erf", x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return _computed("sigmoid", x)


def silu(x: Any) -> Any:
    """Return x * sigmoid(x) (Elfwing, Uchibe and Doya 2017); nan for -inf, as in PyTorch."""
    return _computed("silu", x)


def gelu(x: Any, *, approximate: str = "none") -> Any:
    """Return x * (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel 2016); nan for -inf, as in PyTorch.

    With approximate="tanh" x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2, the form of the same paper that
    differs by up to 5e-4. On a device the relative error in float32 is 1e-6 down to x = -2 and 1e-5 at -13.
    """
    choice("approximate", approximate, ("none", "tanh"), "use 'none' or 'tanh'")
    return _computed("gelu" if approximate == "none" else "gelu_tanh", x)


def relu(x: Any) -> Any:
    """Return x where it is positive, else 0; nan of nan."""
    return maximum(x, 0)


def abs(x: Any) -> Any:  # noqa: A001  the name that Python and NumPy have for it
    """Return x without its sign."""
    return _chosen("abs", x)


def minimum(a: Any, b: Any) -> Any:
    """Return the smaller of both; nan if either is nan."""
    return _chosen("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """Return the larger of both; nan if either is nan."""
    return _chosen("maximum", a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    """Return minimum(maximum(x, low), high); a bound that is None is none. nan of nan."""
    given = {name: each for name, each in (("x", x), ("low", low), ("high", high)) if each is not None}
    if not any(isinstance(each, Traced) for each in given.values()):
        for name, each in given.items():
            _array("clip", each, name)
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b. A number is a condition that holds where it is not 0."""
    return _chosen("where", condition, a, b)


def cast(x: Any, dtype: Any) -> Any:
    """Return x rounded to float16, bfloat16, float32 or float64, to nearest even.

    On arrays the result has this dtype. In a fusion the value is rounded and goes on in the compute type, so that rounding
    to what this is, or to more, does nothing. Raises TypeError for other dtypes.
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
    # NumPy would return a subclass for one; numbers stay as they are, because their types are weaker than arrays'
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
