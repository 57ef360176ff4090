"""Any axis: a call along other axes than the last is the same call on views whose normalised axes are the last."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupynorm._options import plainly, shown
from cupynorm._values import NamedTuple
from cupynorm.runtime import devices

Axis = int | tuple[int, ...] | None


def axes_of(axis: Any, shape: tuple[int, ...], name: str = "x") -> tuple[int, ...]:
    """Return the axes of the array called `name` that `axis` names, in their order: all of them for None.

    TypeError unless it is None, an integer, or a tuple of integers; ValueError if an axis is not there or named twice.
    """
    ndim = len(shape)
    if axis is None:
        if not ndim:
            raise ValueError(f"axis is None, which is all axes: {name} has 0 axes")
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    wanted = []
    for each in given:
        if isinstance(each, bool) or not isinstance(each, (int, np.integer)):
            raise TypeError(
                f"axis is {shown(axis)}: give an integer, a tuple of integers such as (-2, -1), or None for all axes"
            )
        number = int(each)
        if not -ndim <= number < ndim:
            raise ValueError(f"axis {plainly(number)} is out of range: {name} has {ndim} axes, shape {shape}")
        wanted.append(number % ndim)
    if not wanted:
        raise ValueError("axis is empty: name at least one axis")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"axis {axis} names an axis of {name} twice; {name} has {ndim} axes")
    return tuple(sorted(wanted))


def check_one_axis(axis: Any, x: Any) -> None:
    """ValueError if `axis` names several axes of x, whose two halves lie along one."""
    if is_array(x) and (axis is None or len(axes_of(axis, x.shape)) > 1):
        raise ValueError(f"axis is {shown(axis)}, several axes: name the one along which x's two halves lie")


class Transposition(NamedTuple):
    """How arrays of x's shape are transposed so that its normalised axes are the last; both groups keep their order.

    order: x's axes, as the transposed arrays have them. inverse: the order that turns back. axis: the normalised axes
    of what has been transposed; the same object for each call along these axes, as shortcuts look for that. name: what
    the caller calls x.
    """

    order: tuple[int, ...]
    inverse: tuple[int, ...]
    axis: tuple[int, ...]
    name: str = "x"

    def apply(self, array: Any) -> Any:
        """Return a view of an array that has x's shape or broadcasts to it; all else as it is."""
        if not is_array(array):
            return array
        missing = len(self.order) - array.ndim
        if missing < 0:  # the checks will say so
            return array
        return (array[(None,) * missing] if missing else array).transpose(self.order)

    def undo(self, array: Any, like: Any = None) -> Any:
        """Return the view of a result in x's orientation; with fewer axes, as `like` has, if that is given."""
        found = array.transpose(self.inverse)
        if like is None or found.ndim == like.ndim:
            return found
        return found[(*(0,) * (found.ndim - like.ndim), ...)]  # without ... NumPy copies a single element

    def tell(self, error: ValueError) -> None:
        """Let an error about shapes say that transposed arrays have their axes in another order than the caller's."""
        if any(words in str(error) for words in (" shape", "last axis")):
            order = f"{self.name} has its axes in the order {self.order}, the normalised ones last"
            error.args = (f"{error} (here {order})",)


def is_array(given: object) -> bool:
    """Say whether this is an array of NumPy or on a device."""
    return isinstance(given, np.ndarray) or devices.is_device_array(given)


def transposition_of(axis: Any, x: Any, name: str = "x") -> Transposition | None:
    """Return how x is to be transposed; None if its normalised axes are the last ones, or if it is no array."""
    if not is_array(x):
        return None  # the checks will say so
    ndim = x.ndim
    known = type(axis) is int and -ndim <= axis < ndim
    return _transposition((axis % ndim,) if known else axes_of(axis, x.shape, name), ndim, name)


@functools.cache
def _transposition(axes: tuple[int, ...], ndim: int, name: str) -> Transposition | None:
    if axes == tuple(range(ndim - len(axes), ndim)):
        return None
    order = (*(at for at in range(ndim) if at not in axes), *axes)
    inverse = tuple(order.index(each) for each in range(ndim))
    return Transposition(order, inverse, _last_axes(len(axes)), name)


@functools.cache
def _last_axes(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def memory_order(array: Any) -> tuple[int, ...]:
    """Return the axes of an array from the one with the longest steps on; C order's own where steps are equal."""
    steps = [
        abs(step) if extent > 1 else None for step, extent in zip(array.strides, array.shape, strict=True)
    ]
    longest = [0] * array.ndim
    last = max((step for step in steps if step is not None), default=0)
    for at, step in enumerate(steps):  # an axis of one element stays where it is
        last = last if step is None else step
        longest[at] = last
    return tuple(sorted(range(array.ndim), key=lambda at: -longest[at]))
