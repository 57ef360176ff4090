"""Which subclasses of NumPy's and CuPy's arrays are taken as plain arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupynorm.runtime import devices

# What a subclass may define itself: how it is made, copied, printed, hashed and stored.
HARMLESS = {
    *(
        "__new__",
        "__init__",
        "__init_subclass__",
        "__class_getitem__",
        "__array_finalize__",
        "__array_priority__",
    ),
    *(
        "__copy__",
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "__setstate__",
        "__getstate__",
        "__sizeof__",
    ),
    *("__repr__", "__str__", "__format__", "__dir__", "__hash__", "__doc__", "__module__", "__dict__"),
    *("__weakref__", "__slots__", "__del__", "__annotations__", "__qualname__", "__orig_bases__"),
    *("__static_attributes__", "__firstlineno__"),  # every class that Python 3.13 compiles has these
}
# With these, CuPy hands a computation over to the subclass; its plain arrays have neither.
HOOKS = ("__cupy_override_elementwise_kernel__", "__cupy_override_reduction_kernel__")
KNOWN = (np.memmap, np.recarray)  # which override how an array is indexed and wrapped, and change no number


def check_subclass(name: str, array: Any, *, on_device: bool) -> None:
    """TypeError, which names the remedy, for an array of a subclass that computes otherwise than a plain array.

    One property decides, for every array argument of every public function: whether the subclass, or a base of it
    that comes before the plain array, overrides anything that the plain array defines (operators, indexing,
    attributes, methods, __array_ufunc__, __array_function__, __array_wrap__), beyond how it is made, copied,
    printed and stored. A class that does keeps something beside the numbers, such as a mask or a unit, or gives
    operations another meaning, as numpy.matrix does; that would be lost without a word. One that does not is taken,
    and so are numpy.memmap and numpy.recarray. Results are plain arrays; an `out` comes back as it was given.
    """
    overridden = _overridden(type(array))  # type: ignore[arg-type]  # every type hashes
    if overridden is None:
        return
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    masks = "; where=~x.mask leaves out what is masked, in functions that take where" if name == "x" else ""
    if isinstance(array, np.ma.MaskedArray):
        # a filled copy would get the result of `out`, and the caller's array nothing
        remedy = "out.data" if name == "out" else f"{name}.filled(...) or {name}.data"
        raise TypeError(f"{name} is a masked array: masks are not looked at, so give {remedy}{masks}")
    if on_device:
        remedy = f"{name}.view(cupy.ndarray) is a plain array of the same memory, if it has memory of its own"
    elif hasattr(type(array), "unmasked"):
        remedy = f"give {name}.unmasked{masks}"
    else:
        remedy = f"numpy.asarray({name}) is a plain array of the same memory"
    raise TypeError(
        f"{name} is a {kind}, whose {overridden} is not the plain array's and would be lost: {remedy}"
    )


@functools.lru_cache(maxsize=256)
def _overridden(kind: type) -> str | None:
    """Return something of the plain array that a subclass overrides; None if there is nothing."""
    plain: type = np.ndarray
    if kind is not plain and devices.is_device_type(kind):
        plain = devices.cupy().ndarray
    for base in kind.__mro__ if issubclass(kind, plain) else ():
        if base is plain:
            break
        if base in KNOWN:
            continue
        for name in vars(base):
            if name in HOOKS or (name not in HARMLESS and hasattr(plain, name)):
                return name
    return None
