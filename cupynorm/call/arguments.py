"""Checks that every public function makes before anything runs, on device arrays and on host arrays."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import (
    Dtype,
    compute_dtype,
    conversion,
    device_dtype,
    dtype_name,
    dtype_of,
    input_dtype,
    result_dtype,
)
from cupynorm._options import plainly, shown
from cupynorm._values import NamedTuple
from cupynorm.call.axes import axes_of, memory_order
from cupynorm.call.subclasses import check_subclass
from cupynorm.call.view import Argument, View
from cupynorm.plan.config import check_plan
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Call(NamedTuple):
    """A checked call: nothing in it can fail any more, and nothing has been written yet."""

    on_device: bool
    device: int  # the device's number; -1 on the host
    x: Any
    out: Any
    axes: int  # trailing axes that are normalised
    columns: Mapping[str, Any]  # arrays, of no more axes than the normalised ones

    @property
    def compute(self) -> Dtype:
        """The type of arithmetic and of statistics."""
        return compute_dtype(self.x.dtype, self.out.dtype)

    def empty_statistic(self) -> Any:
        """Allocate one statistic: x's shape without the normalised axes."""
        return self.empty(self.x.shape[: self.x.ndim - self.axes], self.compute)

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> Any:
        """Allocate an array where x is."""
        return allocate(self.on_device, self.device, shape, dtype)

    def empty_like_x(self, dtype: Dtype) -> Any:
        """Allocate an array of x's shape, in x's order in memory."""
        return allocate(self.on_device, self.device, self.x.shape, dtype, like=self.x)


def check(
    x: Any,
    *,
    axis: int | tuple[int, ...] | None,
    out: Any,
    dtype: Any,
    plan: Any,
    columns: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    quantized: Dtype | None = None,
    may_be: Collection[str] = ("x", "residual"),
    wide: Collection[Any] = (),
) -> Call:
    """Check one call of a row op, and allocate the output if it was not given.

    others: arrays of which everything but the dtype and shape is checked here. may_be: those of the arrays that `out`
    may be itself. quantized: the result's dtype, if it is one of _dtypes.QUANTIZED. wide: those of the others that make
    arithmetic float64 if they are.
    """
    others = others or {}
    columns = {name: array for name, array in (columns or {}).items() if array is not None}
    on_device = check_kinds(x, {"out": out, **columns, **others}, columns)
    check_forced(plan, "x", on_device=on_device)
    check_input("x", x, on_device=on_device)
    axes = trailing_axes(axis, x.shape)
    shape = x.shape[x.ndim - axes :]
    if 0 in shape:
        raise ValueError(f"x has shape {x.shape}: the normalised axes are empty")
    columns = check_columns(columns, shape, "the normalised axes of x have")
    asked = asked_dtype(dtype, quantized)
    if on_device and asked is not None and quantized is not None:
        asked = device_dtype(asked)
    device = check_places(x, {"out": out, **columns, **others}) if on_device else -1
    result = out.dtype if out is not None else asked
    columns = with_arrays(columns, x, shape, (result, *(each.dtype for each in wide)), device)
    if out is None:
        out = allocate(on_device, device, x.shape, asked or result_dtype(x.dtype), like=x)
    else:
        read = {"x": x, **columns, **others}
        check_out(out, x.shape, asked, read, on_device, quantized=quantized is not None, may_be=may_be)
    return Call(on_device, device, x, out, axes, columns)


def check_forced(plan: Any, name_of_x: str, *, on_device: bool) -> None:
    """TypeError for what is no plan, ValueError for one on the host, where there are no kernels."""
    check_plan(plan)
    if plan is not None and not on_device:
        raise ValueError(f"plan={plan!r} chooses a kernel: {name_of_x} is a NumPy array, computed on the CPU")


def check_each(
    x: Any,
    *,
    out: Any,
    dtype: Any,
    columns: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    axis: Any = -1,
    halves: bool = False,
    may_be: Collection[str] = ("x",),
    wide: Collection[Any] = (),
) -> Call:
    """Check one call of an op on each element, and allocate the output if it was not given.

    columns: parameters of x's last axes, which `axis` names; None for an op that has no axis. others: arrays of which
    everything but the dtype and shape is checked here. halves: the result has half of x's last axis, and `out` shares
    no memory with x. may_be: those of the arrays that `out` may be itself. wide: as in check().
    """
    axes = 0 if columns is None else 1
    others = {name: array for name, array in (others or {}).items() if array is not None}
    columns = {name: array for name, array in (columns or {}).items() if array is not None}
    on_device = check_kinds(x, {"out": out, **columns, **others}, columns)
    check_dtype("x", x)
    if axes and x.ndim == 0:
        raise ValueError("x has 0 axes: give one of at least 1")
    axes = axes and trailing_axes(axis, x.shape)
    shape = half(x.shape) if halves else x.shape
    of_columns = x.shape[x.ndim - axes :]
    columns = check_columns(
        columns, of_columns, "the last axis of x has" if axes == 1 else f"the last {axes} axes of x have"
    )
    asked = asked_dtype(dtype, None)
    device = check_places(x, {"out": out, **columns, **others}) if on_device else -1
    result = out.dtype if out is not None else asked
    columns = with_arrays(columns, x, of_columns, (result, *(each.dtype for each in wide)), device)
    if out is None:
        out = allocate(on_device, device, shape, asked or x.dtype, like=x)
    else:
        check_out(out, shape, asked, {"x": x, **columns, **others}, on_device, may_be=may_be)
    return Call(on_device, device, x, out, axes, columns)


def half(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one of the two halves that the last axis of x holds; ValueError if it is odd."""
    if shape[-1] % 2:
        raise ValueError(f"x has shape {shape}: its last axis holds two halves, so it must be even")
    return (*shape[:-1], shape[-1] // 2)


def is_number(given: object) -> bool:
    """Say whether a parameter of columns is given as one number: Python's, NumPy's, or a NumPy array of no axes."""
    if isinstance(given, np.ndarray):
        return type(given) is np.ndarray and given.ndim == 0 and given.dtype.kind in "iuf"
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def gradient_of(parameter: Any, arithmetic: Dtype) -> tuple[tuple[int, ...], Dtype]:
    """Return the shape and dtype of a parameter's gradient: the parameter's, or of a number none and `arithmetic`.

    An array of no axes has a dtype of its own, on either side, although is_number() takes NumPy's for a number.
    """
    if not is_number(parameter):
        return parameter.shape, parameter.dtype
    own = isinstance(parameter, np.ndarray) and parameter.dtype.type in {np.float16, np.float32, np.float64}
    return (), np.dtype(parameter.dtype.type) if own else arithmetic


ADVICE = "move one with cupy.asarray or cupy.asnumpy, "


def check_kinds(
    x: Any,
    arrays: Mapping[str, Any],
    may_be_numbers: Collection[str] = (),
    *,
    name_of_x: str = "x",
    advice: str = ADVICE,
) -> bool:
    """Return whether x and all of the arrays are on a device; TypeError if some are and some are not.

    may_be_numbers: those that need not be arrays.
    """
    on_device = check_kind(name_of_x, x)
    for name, array in arrays.items():
        if array is None or (name in may_be_numbers and is_number(array)):
            continue
        if check_kind(name, array) is not on_device:
            raise TypeError(
                f"{name_of_x} is {_place(on_device)} and {name} is {_place(not on_device)}: "
                f"{advice}nothing is copied behind your back"
            )
    return on_device


def check_columns(columns: Mapping[str, Any], shape: tuple[int, ...], whose: str) -> dict[str, Any]:
    """Return the parameters, without leading axes of one element that `shape` does not have; numbers as they are."""
    found = {}
    for name, given in columns.items():
        if is_number(given):
            found[name] = given
            continue
        check_dtype(name, given)
        extra = _extra(given.shape, len(shape))
        array = given[(0,) * extra] if extra else given
        try:
            view(array).broadcast_to(shape)
        except ValueError:
            raise ValueError(
                f"{name} has shape {given.shape}, {whose} {shape}: it must have that shape or broadcast to it"
            ) from None
        found[name] = array
    return found


def column(given: Any, x: Any, result: Dtype | None, whose: str) -> Any:
    """Return a bias of x's last axis as an array of at most one axis. result: the result's dtype, None for x's."""
    device = int(x.device.id) if devices.is_device_array(x) else -1
    found = check_columns({"bias": given}, x.shape[-1:], whose)
    return with_arrays(found, x, x.shape[-1:], (result,), device)["bias"]


def _extra(shape: tuple[int, ...], axes: int) -> int:
    """Return how many leading axes of one element an array has beyond `axes`."""
    extra = max(0, len(shape) - axes)
    return extra if all(extent == 1 for extent in shape[:extra]) else 0


def with_arrays(
    columns: Mapping[str, Any], x: Any, shape: tuple[int, ...], others: Collection[Dtype | None], device: int
) -> dict[str, Any]:
    """Return the parameters with arrays in place of numbers: of `shape` on a device, without axes on the host.

    Such an array has x's dtype if that holds the number exactly, else the dtype of arithmetic; float64 if not even that
    holds it. others: the dtypes that decide that of arithmetic beside x's; None is none.
    """
    found = dict(columns)
    for name, given in columns.items():
        if not is_number(given):
            continue
        try:
            value = float(given)
        except OverflowError:
            raise ValueError(f"{name} is {plainly(given)}: it is beyond what float64 holds") from None
        if device < 0:
            found[name] = np.array(value)
            continue
        arithmetic = compute_dtype(x.dtype, *(each for each in others if each is not None))
        with np.errstate(over="ignore"):
            for dtype in (result_dtype(x.dtype), arithmetic):
                held = float(dtype.type(value))
                if held == value or math.isnan(value):
                    break
        if math.isinf(held) and not math.isinf(value):
            dtype = np.dtype(np.float64)
        from cupynorm.call import uploads  # noqa: PLC0415  which `import cupynorm` need not wait for

        found[name] = uploads.filled(value, shape, dtype, device, name)
    return found


def check_places(x: Any, arrays: Mapping[str, Any], name_of_x: str = "x") -> int:
    """Return x's device; ValueError if another array is on another device, or has elements that no kernel can read."""
    device = int(x.device.id)
    for name, array in arrays.items():
        if array is not None and not is_number(array) and array.device.id != device:
            raise ValueError(f"{name_of_x} is on device {device} and {name} on device {array.device.id}")
    for name, array in {name_of_x: x, **arrays}.items():
        if array is not None and not is_number(array):
            check_elements(name, array)
    return device


def check_elements(name: str, array: Any) -> None:
    """ValueError if an element of a device array begins at no multiple of its size, where no kernel can read it."""
    size = array.dtype.itemsize
    if array.data.ptr % size:
        raise ValueError(f"{name} starts at an address that is no multiple of its {size} bytes")
    if any(step % size for step, extent in zip(array.strides, array.shape, strict=True) if extent > 1):
        raise ValueError(
            f"{name} has strides {array.strides}, no multiple of its elements' {size} bytes, as fields of packed "
            "records have: copy it where it is made, before it comes to the device (numpy.ascontiguousarray)"
        )


def asked_dtype(dtype: Any, quantized: Dtype | None) -> Dtype | None:
    """Return the result's dtype that the call asks for; None: for none. ValueError if dtype= and quantize= both do."""
    if dtype is None:
        return quantized
    if quantized is not None:
        raise ValueError(
            f"dtype={plainly(dtype)} and quantize name two dtypes of the result: give one of them"
        )
    return dtype_of(dtype)


def view(array: Any, argument: str = "") -> View:
    """Describe a device or host array. argument: its name in the call."""
    pointer = array.data.ptr if devices.is_device_array(array) else array.__array_interface__["data"][0]
    if argument:
        pointer = Argument(pointer, argument)
    return View(pointer, array.shape, array.strides, array.dtype)


def check_kind(name: str, array: object) -> bool:
    """Return True for a CuPy array and False for a NumPy array; TypeError for anything else.

    Subclasses of both are taken where check_subclass takes them.
    """
    on_device = devices.is_device_array(array)
    if on_device or isinstance(array, np.ndarray):
        check_subclass(name, array, on_device=on_device)
        return on_device
    raise TypeError(
        f"{name} is a {type(array).__module__}.{type(array).__qualname__}: give a NumPy or a CuPy array "
        "(numpy.asarray, cupy.asarray, or cupy.from_dlpack make one)"
    )


def _place(on_device: bool) -> str:  # noqa: FBT001
    return "a CuPy array (on a device)" if on_device else "a NumPy array (on the host)"


def check_dtype(name: str, array: Any) -> None:
    """TypeError that names the array if its dtype is not supported."""
    try:
        dtype_name(array.dtype)
    except TypeError as error:
        raise TypeError(f"{name}: {error}{conversion(name, array.dtype)}") from None


def check_input(name: str, array: Any, *, on_device: bool, any_integer: bool = False) -> None:
    """TypeError that names the array if a row op does not read its dtype. any_integer: as in input_dtype()."""
    try:
        input_dtype(array.dtype, on_device=on_device, any_integer=any_integer)
    except TypeError as error:
        raise TypeError(f"{name}: {error}{conversion(name, array.dtype)}") from None


def array_of_list(name: str, given: list[Any] | tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Return an array of a list of integers, of int64 if there are none; TypeError for lists that make no array."""
    try:
        made = np.asarray(given)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} is {shown(given)}: its parts differ in length; give integers") from None
    return made if made.size or made.dtype != np.float64 else made.astype(np.int64)


def trailing_axes(axis: Any, shape: tuple[int, ...], name: str = "x") -> int:
    """Return how many trailing axes of the array called `name` `axis` names. Raises as axes_of() does.

    Arrays along other axes have been transposed before (call/axes.py).
    """
    ndim = len(shape)
    if type(axis) is int and ndim and axis in (-1, ndim - 1):
        return 1
    found = axes_of(axis, shape, name)
    if found != tuple(range(ndim - len(found), ndim)):
        raise ValueError(f"axis {axis} of {name}, which has {ndim} axes: these are not the last ones")
    return len(found)


def allocate(
    on_device: bool,  # noqa: FBT001
    device: int,
    shape: tuple[int, ...],
    dtype: Dtype,
    *,
    like: Any = None,
) -> Any:
    """Allocate an array on a device, or on the host. like: an array of that shape, whose order in memory it gets."""
    if like is not None and not like.flags.c_contiguous:
        order = memory_order(like)
        made = allocate(on_device, device, tuple(shape[axis] for axis in order), dtype)
        return made.transpose([order.index(axis) for axis in range(len(order))])
    if not on_device:
        return np.empty(shape, dtype)
    with devices.cupy().cuda.Device(device):
        return devices.empty(shape, dtype)


def check_out(
    out: Any,
    shape: tuple[int, ...],
    asked: Dtype | None,
    read: Mapping[str, Any],
    on_device: bool,  # noqa: FBT001
    *,
    quantized: bool = False,
    name: str = "out",
    may_be: Collection[str] = ("x", "residual"),
) -> None:
    """Check an `out` against the result's shape and dtype, and against the arrays that are read, x first.

    name: its name in the call. may_be: those of the arrays that it may be itself, where they have its shape: each of
    their elements is read before the result there is written.
    """
    if not quantized:
        check_dtype(name, out)
    first = next(iter(read))
    whose = first if read[first].shape == shape else "the result"
    asks = "quantize" if quantized else "dtype"
    check_result(out, shape, asked, on_device, whose=whose, asks=asks, name=name)
    if out.size == 0:
        return
    here = view(out)
    reach = out.dtype.itemsize  # in bytes: on the host, strides need be no multiple of an element
    for stride, extent in sorted((abs(s), e) for s, e in zip(out.strides, out.shape, strict=True) if e > 1):
        if stride < reach:
            raise ValueError(
                f"{name} has shape {out.shape} and strides {out.strides}: its elements overlap one another"
            )
        reach = stride * (extent - 1) + reach
    itself = {each for each in may_be if each in read and read[each].shape == shape}
    shared = sharing(here, {each: view(array) for each, array in read.items()}, itself)
    if shared is not None:
        advice = f" in part: give {shared} itself, or other memory" if shared in itself else ""
        raise ValueError(f"{name} and {shared} share memory{advice}")


def check_result(
    out: Any,
    shape: tuple[int, ...],
    asked: Dtype | None,
    on_device: bool,  # noqa: FBT001
    *,
    whose: str = "the result",
    asks: str = "dtype",
    name: str = "out",
) -> None:
    """ValueError for an `out` of another shape or dtype, or a read-only one. whose: names the array of that shape."""
    if out.shape != shape:
        raise ValueError(f"{name} has shape {out.shape}, {whose} has {shape}")
    if asked is not None and out.dtype != asked:
        raise ValueError(f"{name} has dtype {out.dtype}, {asks} asks for {asked}")
    if not on_device and not out.flags.writeable:
        raise ValueError(f"{name} is read-only")


def sharing(written: View, others: Mapping[str, View], itself: Collection[str] = ()) -> str | None:
    """Return the first of the others that shares memory with `written`; None if none does.

    itself: those that may be the very same view.
    """
    for name, other in others.items():
        if not (name in itself and written == other) and _overlap(written, other):
            return name
    return None


def _overlap(a: View, b: View) -> bool:
    """Say whether two views share a byte. NumPy solves it exactly; it never looks at the memory itself."""
    try:
        # numpy's stub knows two values of max_work
        return bool(np.shares_memory(_shadow(a), _shadow(b), max_work=100_000))  # type: ignore[arg-type]
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
