"""softmax, log_softmax and logsumexp with the signatures and defaults of scipy.special, for NumPy and CuPy arrays.

    from cupynorm.scipy_special import logsumexp, softmax

`axis=None`, the default of all three, is the whole array. install() puts them where CuPy's are.
"""

from __future__ import annotations

import functools
import importlib
import operator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm import _dtypes
from cupynorm._options import shown
from cupynorm.call.arguments import check_dtype
from cupynorm.ops import losses
from cupynorm.ops import softmax as exponentials
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["install", "log_softmax", "logsumexp", "softmax"]

Axis = int | tuple[int, ...] | None


def softmax(x: Any, axis: Axis = None) -> Any:
    """Return exp(x) / sum(exp(x)) over some axes, as scipy.special.softmax does.

    Parameters
    ----------
    x : array_like
        A CuPy array of a dtype that cupynorm.softmax takes, or what numpy.asarray makes a real array of; integers and
        booleans become float64.
    axis : int or tuple of int, optional
        The axes that sums go over; default: all of them.

    Returns
    -------
    array
        Of x's shape and dtype; of NumPy's scalar type for a number.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As cupynorm.softmax does.

    Notes
    -----
    Complex numbers and an empty tuple of axes are refused. CuPy arrays of integers give float32, or float64 if they are
    of int32. A row that holds +inf or nan is nan throughout; in log_softmax SciPy gives -inf beside +inf.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm.scipy_special import softmax
    >>> softmax([[0.0, 0.0], [0.0, 0.0]]).tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    return _elementwise(exponentials.softmax, x, axis)


def log_softmax(x: Any, axis: Axis = None) -> Any:
    """Return the logarithm of softmax without its underflow, as scipy.special.log_softmax does.

    Parameters
    ----------
    x, axis
        As in softmax.

    Returns
    -------
    array
        Of x's shape and dtype; of NumPy's scalar type for a number.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As cupynorm.log_softmax does.

    Notes
    -----
    Those of softmax.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm.scipy_special import log_softmax
    >>> log_softmax([1000.0, 1.0]).tolist()
    [0.0, -999.0]
    """
    return _elementwise(exponentials.log_softmax, x, axis)


def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,  # noqa: FBT001, FBT002  SciPy's signature
    return_sign: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Return log(sum(b * exp(a))) over some axes, as scipy.special.logsumexp does.

    Parameters
    ----------
    a : array_like
        As x in softmax.
    axis : int or tuple of int, optional
        As in softmax.
    b : array_like, optional
        What exponentials are multiplied with; a and b broadcast to one shape. Default: 1.
    keepdims : bool, default False
        Keep the axes that sums go over, with one element each.
    return_sign : bool, default False
        Return the logarithm of the sum's size, and its sign.

    Returns
    -------
    array or tuple of array
        Of a's and b's common dtype, where Python's numbers take an array's; with return_sign=True: (logarithm, sign).

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As cupynorm.logsumexp does.

    Notes
    -----
    A sum of nothing is 0, and its logarithm -inf. Nothing is what b multiplies with 0, too, even inf and nan, and also
    where that is all there is, which SciPy takes for nan. With keepdims=True a number gives a number, and SciPy's (1,).
    Further notes are those of softmax. On NumPy arrays what is near to 0 has all its digits, as in SciPy
    1.15 and newer: log1p is taken of what the largest terms leave.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm.scipy_special import logsumexp
    >>> float(logsumexp([0.0, -40.0]))
    4.248354255291589e-18
    >>> [float(each) for each in logsumexp([1.0, 1.0], b=[1.0, -1.0], return_sign=True)]
    [-inf, 0.0]
    """
    x = _array("a", a)
    factor = None if b is None else _array("b", b)
    if factor is not None:
        kind = _common_dtype(a, b)
        x, factor = (each if each.dtype == kind else each.astype(kind) for each in (x, factor))
        try:
            shape = np.broadcast_shapes(x.shape, factor.shape)
        except ValueError:
            raise ValueError(
                f"b has shape {factor.shape}, a has {x.shape}: they must broadcast to one shape"
            ) from None
        x = _stretched(x, shape)
    x, axes, number = _prepared(x, axis)
    if factor is not None:
        factor = _stretched(factor, x.shape)
    at = x.ndim - len(axes)
    kept = tuple(1 if each in axes else extent for each, extent in enumerate(x.shape))
    if not x.size:
        rows = tuple(extent for each, extent in enumerate(x.shape) if each not in axes)
        dtype = _dtypes.result_dtype(x.dtype)
        size, sign = (_module(x).full(rows, each, dtype) for each in (-np.inf, 0.0))
    else:
        last, others = _last(x, axes), {} if factor is None else {"b": _last(factor, axes)}
        on_device = devices.is_device_array(x)
        found = losses.logsumexp(
            last,
            tuple(range(at, x.ndim)),
            **others,
            return_sign=return_sign or not on_device,
            dtype=_dtypes.result_dtype(x.dtype),
        )
        size, sign = found if isinstance(found, tuple) else (found, None)
        if not on_device and not return_sign:
            size[...] = np.where(sign < 0, np.nan, size)
    results = [size, sign] if return_sign else [size]
    if keepdims:
        results = [each.reshape(() if number else kept) for each in results]
    if number or not results[0].ndim:
        results = [_number(each) for each in results]
    return tuple(results) if return_sign else results[0]


def _elementwise(function: Callable[..., Any], given: Any, axis: Axis) -> Any:
    """Return what a function of rows gives over any axes."""
    x, axes, number = _prepared(_array("x", given), axis)
    if not x.size:
        return x.copy()
    at = x.ndim - len(axes)
    y = function(_last(x, axes), tuple(range(at, x.ndim)))
    y = y.transpose(np.argsort(_order(x.ndim, axes)).tolist())
    return _number(y) if number else y


def _array(name: str, given: Any) -> Any:
    """Return an array of floats: a CuPy array as it is, or NumPy's of anything else. name: the argument's."""
    if devices.is_device_array(given):
        return given
    x = np.asarray(given)
    x = x.astype(np.float64 if x.dtype.kind in "biu" else x.dtype.newbyteorder("="), copy=False)
    check_dtype(name, x)
    return x


def _common_dtype(*given: Any) -> _dtypes.Dtype:
    """Return the dtype of floats that all convert to. Python's numbers have none, so that an array's stays."""
    arrays = [each if devices.is_device_array(each) else np.asarray(each) for each in given]
    kinds = [
        each if type(each) in (bool, int, float) else array.dtype
        for each, array in zip(given, arrays, strict=True)
    ]
    found = np.result_type(*kinds)
    return np.dtype(np.float64) if found.kind in "biu" else found


def _number(x: Any) -> Any:
    """Return one number: NumPy's scalar, or CuPy's array of no axes."""
    return x.reshape(()) if devices.is_device_array(x) else x.reshape(())[()]


def _module(x: Any) -> Any:
    return devices.cupy() if devices.is_device_array(x) else np


def _stretched(x: Any, shape: tuple[int, ...]) -> Any:
    return x if x.shape == shape else _module(x).broadcast_to(x, shape)


def _prepared(x: Any, axis: Axis) -> tuple[Any, tuple[int, ...], bool]:
    """Return an array of one axis or more, the axes by number in ascending order, and whether it was a number."""
    number = x.ndim == 0
    if number:
        x = x.reshape(1)
        axis = None if axis in (0, -1, ()) else axis
    if axis is None:
        return x, tuple(range(x.ndim)), number
    wanted = axis if isinstance(axis, tuple) else (axis,)
    if any(isinstance(each, (bool, np.bool_)) for each in wanted):
        raise TypeError(f"axis is {axis}: give an integer, a tuple of integers, or None for all axes")
    given = tuple(map(operator.index, wanted))
    for each in given:
        if not -x.ndim <= each < x.ndim:
            raise np.exceptions.AxisError(each, x.ndim)
    axes = tuple(sorted({each % x.ndim for each in given}))
    if len(axes) < len(given):
        raise ValueError(f"axis {axis} names an axis twice")
    return x, axes, number


def _last(x: Any, axes: tuple[int, ...]) -> Any:
    """Return x with these axes last."""
    return x.transpose(_order(x.ndim, axes))


def _order(ndim: int, axes: tuple[int, ...]) -> list[int]:
    """Return all axes, with these last."""
    return [*(each for each in range(ndim) if each not in axes), *axes]


class Installed:
    """What install() has put in place; undo(), or the end of a with block, puts back what was there."""

    def __init__(self, module: Any) -> None:
        missing = [name for name in FUNCTIONS if not hasattr(module, name)]
        if missing:
            given = f"the module {module.__name__}" if isinstance(module, ModuleType) else shown(module)
            raise TypeError(
                f"module is {given}, without {', '.join(missing)}: give a module that has {', '.join(FUNCTIONS)}"
            )
        self._module = module
        self._before = {name: getattr(module, name) for name in FUNCTIONS}
        for name, function in FUNCTIONS.items():
            setattr(module, name, _beside(function, self._before[name]))

    def undo(self) -> None:
        """Put CuPy's functions back; nothing the second time."""
        for name, function in self._before.items():
            setattr(self._module, name, function)
        self._before = {}

    def __enter__(self) -> Installed:  # noqa: PYI034  typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
}


def _beside(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return ours for CuPy arrays of the dtypes that it takes, and theirs for all else."""

    @functools.wraps(ours)
    def function(*given: Any, **named: Any) -> Any:
        arrays = [each for each in (*given, *named.values()) if devices.is_device_array(each)]
        known = _dtypes.DTYPES.values()
        fits = arrays and all(each.dtype in known for each in arrays)
        return (ours if fits else theirs)(*given, **named)

    return function


def install(module: Any = None) -> Installed:
    """Put softmax, log_softmax and logsumexp in the place of those of cupyx.scipy.special, for CuPy arrays.

    Calls by way of the module are cupynorm's from then on, in the whole process. Arrays of other dtypes, such as
    complex ones and integers, are left to CuPy's functions, and so is what is no CuPy array.

    Parameters
    ----------
    module : module, optional
        Where the three names are replaced; default: cupyx.scipy.special. A module that has imported them by name needs
        a call of its own.

    Returns
    -------
    Installed
        Its undo() puts CuPy's functions back; so does the end of a with block.

    Raises
    ------
    ImportError
        If CuPy is not installed.
    TypeError
        If the module does not have the three names.

    Notes
    -----
    Nested calls are undone in reverse order.

    Examples
    --------
    >>> from cupynorm import install
    >>> def probabilities(x):
    ...     import cupyx.scipy.special
    ...
    ...     with install():
    ...         return cupyx.scipy.special.softmax(x, axis=-1)
    """
    return Installed(importlib.import_module("cupyx.scipy.special") if module is None else module)
