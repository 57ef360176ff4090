"""What every public function checks before anything runs, for device and host arrays alike."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm import _device
from cupynorm._dtypes import Dtype, compute_dtype, dtype_name, dtype_of
from cupynorm.functors import View

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cupynorm._plan import Plan


class Call(NamedTuple):
    """A checked call: nothing in it can fail any more, and nothing has been written yet."""

    on_device: bool
    device: int  # the device's number; -1 on the host
    x: Any
    out: Any
    axes: int  # trailing axes that are normalised
    columns: Mapping[str, Any]

    @property
    def compute(self) -> Dtype:
        """The type of arithmetic and of statistics."""
        return compute_dtype(self.x.dtype, self.out.dtype)

    def empty_statistic(self) -> Any:
        """Allocate one statistic: x's shape without the normalised axes."""
        shape = self.x.shape[: self.x.ndim - self.axes]
        if self.on_device:
            with _device.cupy().cuda.Device(self.device):
                return _device.empty(shape, self.compute)
        return np.empty(shape, self.compute)


def check(
    x: Any,
    *,
    axis: int | tuple[int, ...],
    out: Any,
    dtype: Any,
    plan: str | Plan | None,
    columns: Mapping[str, Any] | None = None,
) -> Call:
    """Check one call of a row op, and allocate the output if it was not given."""
    on_device = _kind("x", x)
    columns = {name: array for name, array in (columns or {}).items() if array is not None}
    for name, array in {"out": out, **columns}.items():
        if array is not None and _kind(name, array) is not on_device:
            raise TypeError(
                f"x is {_place(on_device)} and {name} is {_place(not on_device)}: "
                "move one with cupy.asarray or cupy.asnumpy, nothing is copied behind your back"
            )
    if plan is not None and not on_device:
        raise ValueError(f"plan={plan!r} chooses a kernel: x is a NumPy array, computed on the CPU")
    _check_dtype("x", x)
    axes = trailing_axes(axis, x.shape)
    shape = x.shape[x.ndim - axes :]
    if 0 in shape:
        raise ValueError(f"x has shape {x.shape}: the normalised axes are empty")
    for name, array in columns.items():
        _check_dtype(name, array)
        try:
            view(array).broadcast_to(shape)
        except ValueError:
            raise ValueError(
                f"{name} has shape {array.shape}, the normalised axes of x have {shape}: "
                f"it must have that shape or broadcast to it"
            ) from None
    asked = None if dtype is None else dtype_of(dtype)
    device = -1
    if on_device:
        device = x.device.id
        for name, array in {"out": out, **columns}.items():
            if array is not None and array.device.id != device:
                raise ValueError(f"x is on device {device} and {name} on device {array.device.id}")
        for name, array in {"x": x, "out": out, **columns}.items():
            if array is not None and array.data.ptr % array.dtype.itemsize:
                raise ValueError(
                    f"{name} starts at an address that is no multiple of its {array.dtype.itemsize} bytes"
                )
        if x.size and not view(x).split(axes)[1].is_contiguous():
            raise ValueError(_not_contiguous("x", x, axes))
    if out is None:
        out = _allocate(on_device, device, x.shape, asked or x.dtype)
    else:
        _check_out(out, x, axes, asked, columns, on_device)
    return Call(on_device, device, x, out, axes, columns)


def check_eps(eps: float) -> float:
    """Return eps as a float; ValueError if it is negative or not a number."""
    value = float(eps)
    if not value >= 0 or math.isinf(value):
        raise ValueError(f"eps is {eps}: it must be 0 or a positive finite number")
    return value


def view(array: Any) -> View:
    """Describe a device or host array."""
    pointer = array.data.ptr if _device.is_device_array(array) else array.__array_interface__["data"][0]
    return View(pointer, array.shape, array.strides, array.dtype)


def _kind(name: str, array: object) -> bool:
    """Return True for a CuPy array and False for a NumPy array; TypeError for anything else."""
    if _device.is_device_array(array):
        return True
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array: masks are not looked at, so give {name}.filled(...) or {name}.data"
        )
    if isinstance(array, np.ndarray):
        return False
    raise TypeError(
        f"{name} is a {type(array).__module__}.{type(array).__qualname__}: give a NumPy or a CuPy array "
        "(numpy.asarray, cupy.asarray, or cupy.from_dlpack make one)"
    )


def _place(on_device: bool) -> str:  # noqa: FBT001
    return "a CuPy array (on a device)" if on_device else "a NumPy array (on the host)"


def _check_dtype(name: str, array: Any) -> None:
    try:
        dtype_name(array.dtype)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def trailing_axes(axis: int | tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return how many trailing axes `axis` names; ValueError if they are not the trailing ones."""
    ndim = len(shape)
    if type(axis) is int and ndim and axis in (-1, ndim - 1):
        return 1
    given = axis if isinstance(axis, tuple) else (axis,)
    wanted = []
    for each in given:
        number = operator.index(each)
        if not -ndim <= number < ndim:
            raise ValueError(f"axis {number} is out of range: x has {ndim} axes, shape {shape}")
        wanted.append(number % ndim)
    if not wanted:
        raise ValueError("axis is empty: name at least one axis")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"axis {axis} names an axis of x twice; x has {ndim} axes")
    if sorted(wanted) != list(range(ndim - len(wanted), ndim)):
        raise ValueError(
            f"axis {axis} of an x of {ndim} axes: only trailing axes, such as -1 or (-2, -1), can be normalised; "
            "move the axes to the end (moveaxis) and copy"
        )
    return len(wanted)


def _not_contiguous(name: str, array: Any, axes: int) -> str:
    return (
        f"{name} has shape {array.shape} and strides {array.strides}: the last {axes} axes must be contiguous "
        f"(rows may lie anywhere); cupy.ascontiguousarray({name}) makes a copy that is"
    )


def _allocate(on_device: bool, device: int, shape: tuple[int, ...], dtype: Dtype) -> Any:  # noqa: FBT001
    if not on_device:
        return np.empty(shape, dtype)
    with _device.cupy().cuda.Device(device):
        return _device.empty(shape, dtype)


def _check_out(
    out: Any,
    x: Any,
    axes: int,
    asked: Dtype | None,
    columns: Mapping[str, Any],
    on_device: bool,  # noqa: FBT001
) -> None:
    _check_dtype("out", out)
    if out.shape != x.shape:
        raise ValueError(f"out has shape {out.shape}, x has {x.shape}")
    if asked is not None and out.dtype != asked:
        raise ValueError(f"out has dtype {out.dtype}, dtype asks for {asked}")
    if not on_device and not out.flags.writeable:
        raise ValueError("out is read-only")
    if out.size == 0:
        return
    here = view(out)
    if on_device and not here.split(axes)[1].is_contiguous():
        raise ValueError(_not_contiguous("out", out, axes))
    extents, strides = here.collapsed()
    reach = 1
    for stride, extent in sorted((abs(s), e) for s, e in zip(strides, extents, strict=True) if e > 1):
        if stride < reach:
            raise ValueError(
                f"out has shape {out.shape} and strides {out.strides}: its elements overlap one another"
            )
        reach = stride * (extent - 1) + reach
    same = here == view(x)
    for name, array in {"x": x, **columns}.items():
        if name == "x" and same:
            continue
        if _overlap(here, view(array)):
            raise ValueError(
                f"out and {name} share memory" + (" in part: give x itself, or other memory" * (name == "x"))
            )


def _overlap(a: View, b: View) -> bool:
    """Say whether two views share a byte. NumPy solves it exactly; it never looks at the memory itself."""
    try:
        return bool(np.shares_memory(_shadow(a), _shadow(b), max_work=100_000))  # type: ignore[arg-type]  # numpy's stub knows two values of it
    except np.exceptions.TooHardError:
        return True


class _Shadow:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _shadow(what: View) -> np.ndarray[Any, Any]:
    """Return a NumPy array with the view's addresses, which must not be read."""
    interface = {
        "data": (what.pointer, True),
        "shape": what.shape,
        "strides": what.strides,
        "typestr": f"|V{what.dtype.itemsize}",
        "version": 3,
    }
    return np.asarray(_Shadow(interface))
