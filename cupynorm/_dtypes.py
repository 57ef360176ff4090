"""Element types: NumPy's dtype, its name in C++, and the type that arithmetic is done in."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupynorm._options import shown
from cupynorm._values import NamedTuple

Dtype = np.dtype[Any]
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
LEAST_NORMAL = 2.0**-126  # of float32 and bfloat16: a device takes for 0 what is less, read or computed


class ElementType(NamedTuple):
    """An element type that the kernels know."""

    dtype: Dtype
    cpp: str


@functools.cache
def _types() -> dict[str, ElementType]:
    types = {
        "float16": ElementType(np.dtype(np.float16), "cupynorm::half"),
        "float32": ElementType(FLOAT32, "float"),
        "float64": ElementType(FLOAT64, "double"),
    }
    try:
        import ml_dtypes  # noqa: PLC0415  optional: only bfloat16 needs it
    except ImportError:
        return types
    return types | {"bfloat16": ElementType(np.dtype(ml_dtypes.bfloat16), "cupynorm::bfloat16")}


def __getattr__(name: str) -> Any:
    if name == "DTYPES":  # depends on installed packages, so it is computed when first asked for
        return {name: each.dtype for name, each in _types().items()}
    raise AttributeError(name)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Dtype) -> str:
    """Return the name of a supported dtype; TypeError says which there are."""
    name = dtype.name
    # a structured or byte-swapped dtype may share its name with a supported one
    if name in _types() and dtype.isnative and dtype == _types()[name].dtype:
        return name
    what = f"{dtype.str} (byte-swapped)" if not dtype.isnative else str(dtype)
    raise TypeError(f"dtype {what} is not supported: use {', '.join(sorted(_types()))}")


class MissingPackageError(TypeError):
    """A dtype needs a package that is not installed."""


def conversion(name: str, dtype: Dtype) -> str:
    """Return the advice of an error about an array of another dtype: the call that converts it, where one fits."""
    if not dtype.isnative and dtype.newbyteorder("=") in (each.dtype for each in _types().values()):
        return f'; {name}.astype("={dtype.str[1:]}") is a copy in the native byte order'
    if dtype.kind == "c":
        return f"; {name}.real, {name}.imag and abs({name}) are"
    if dtype.kind not in "biufOmM":
        return ""
    wanted = "float32" if dtype.itemsize <= 2 else "float64"  # noqa: PLR2004  float32 holds all integers of 16 bits
    return f'; {name}.astype("{wanted}") is a copy that is'


def dtype_of(what: Any, name: str = "dtype") -> Dtype:
    """Return the supported dtype that `what` means: a dtype, a scalar type, or a name, "bfloat16" included.

    TypeError, which names the supported ones, for anything else. name: the name of the option.
    """
    if isinstance(what, str) and what == "bfloat16":
        if "bfloat16" not in _types():
            raise MissingPackageError(f"{name} bfloat16 needs the package ml_dtypes: pip install ml_dtypes")
        return _types()["bfloat16"].dtype
    dtype = _understood(what)
    if dtype is None:
        raise TypeError(f"{name} is {shown(what)}, which is no dtype: use {', '.join(sorted(_types()))}")
    dtype_name(dtype)
    return dtype


def _understood(what: Any) -> Dtype | None:
    """Return NumPy's dtype of a name, a type or a dtype; None for anything else, also what NumPy would guess at."""
    if not isinstance(what, (str, type, np.dtype)):
        return None
    try:
        return np.dtype(what)
    except Exception:  # noqa: BLE001  NumPy parses names: TypeError, SyntaxError, ValueError
        return None


QUANTIZED = (
    "int8",
    "float8_e4m3fn",
    "float8_e5m2",
)  # what results may be stored in, and nothing is read from


def device_dtype(quantized: Dtype) -> Dtype:
    """Return the dtype of a device array that holds such results: CuPy has no float8, so their bits come as uint8."""
    return np.dtype(np.uint8) if quantized.name.startswith("float8_") else quantized


def quantized_dtype(what: Any, name: str = "dtype") -> Dtype:
    """Return the quantised dtype that `what` means: a dtype, a scalar type, or one of the names in QUANTIZED.

    TypeError for anything else. name: the name of the option.
    """
    if isinstance(what, str) and what.startswith("float8_") and what in QUANTIZED:
        try:
            import ml_dtypes  # noqa: PLC0415  optional: NumPy has no float8
        except ImportError:
            raise MissingPackageError(
                f"{name} {what} needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        what = getattr(ml_dtypes, what)
    dtype = _understood(what)
    if dtype is None:
        raise TypeError(f"{name} is {shown(what)}, which is no dtype: use {', '.join(QUANTIZED)}")
    if dtype.name not in QUANTIZED:
        raise TypeError(f"{name} is {dtype}, which no quantised result can have: use {', '.join(QUANTIZED)}")
    return dtype


def cpp(dtype: Dtype) -> str:
    """Return the C++ name of a dtype."""
    return _types()[dtype_name(dtype)].cpp


_OTHERS = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "cupynorm::int64",
    "uint64": "unsigned long long",
    "float8_e4m3fn": "cupynorm::float8_e4m3fn",
    "float8_e5m2": "cupynorm::float8_e5m2",
}


def cpp_of_element(dtype: Dtype) -> str:
    """Return the C++ name of a dtype, also of those of operands and quantised results only: bool, integers, float8."""
    return _OTHERS.get(dtype.name) or cpp(dtype)


INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32")  # what is converted as it is loaded


def is_integer(dtype: Dtype) -> bool:
    """Say whether a dtype that was checked is one of INTEGERS, in any byte order."""
    return dtype.kind in "biu"


def input_dtype(dtype: Dtype, *, on_device: bool, any_integer: bool = False) -> None:
    """TypeError for what is no input of a row op: a supported dtype or an integer; in any byte order on the host.

    any_integer: whether others than INTEGERS will do, as they do for operands.
    """
    native = dtype if on_device or dtype.isnative else dtype.newbyteorder("=")
    if native.isnative and is_integer(native) and (any_integer or native.name in INTEGERS):
        return
    try:
        dtype_name(native)
    except TypeError:
        known = sorted(_types()) + (["bool", "integers"] if any_integer else list(INTEGERS))
        what = f"dtype {dtype.str} (byte-swapped)" if not native.isnative else f"dtype {dtype}"
        raise TypeError(f"{what} is not supported: use {', '.join(known)}") from None


def result_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype of a result by default, given x's: its own, in the native byte order, or that of arithmetic."""
    return compute_dtype(dtype) if is_integer(dtype) else dtype.newbyteorder("=")


def compute_dtype(*dtypes: Dtype) -> Dtype:
    """Return the type of arithmetic and statistics: float64 if any of `dtypes` is, or is int32, else float32."""
    wide = any(dtype.type in {np.float64, np.int32} for dtype in dtypes)
    return np.dtype(np.float64 if wide else np.float32)
