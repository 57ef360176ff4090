"""Matrix products on a device by cuBLAS, summed in float32 (float64 for float64). Row-major; nothing is checked here.

cuBLAS knows column-major matrices only: a row-major one is its transpose there, so operands change places.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any, NamedTuple

from cupynorm._dtypes import compute_dtype, dtype_name
from cupynorm.runtime import devices

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType
SUMMED_IN = {"float32": 68, "float64": 70}  # cublasComputeType_t
AS_IS, TRANSPOSED = 0, 1  # cublasOperation_t
DEFAULT_ALGORITHM = -1
SUMS_IN_FULL = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: no partial sums in half precision
WORKSPACE_BYTES = 32 << 20  # NVIDIA's advice for sm_90
ALIGNED = 256  # bytes: the most that cuBLAS looks at

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_SHAPE = (_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER)
_ONE = (*_SHAPE, *(_POINTER, _INT, _INT) * 2, _POINTER, _POINTER, _INT, _INT, _INT, _INT)
_MANY = (
    *_SHAPE,
    *(_POINTER, _INT, _INT, _LONG) * 2,
    *(_POINTER, _POINTER, _INT, _INT, _LONG, _INT, _INT, _INT),
)


class Product(NamedTuple):
    """x weight^T: [tokens, deep] times [wide, deep] transposed gives [tokens, wide].

    All have one dtype and are aligned to `aligned` bytes.
    """

    tokens: int
    deep: int
    wide: int
    dtype: str
    aligned: int

    @classmethod
    def of(cls, x: Any, weight: Any, out: Any) -> Product:
        """Return what linear() is asked for."""
        at = x.data.ptr | weight.data.ptr | out.data.ptr | ALIGNED
        tokens, deep = x.shape
        return cls(tokens, deep, weight.shape[0], dtype_name(x.dtype), at & -at)

    @property
    def operations(self) -> int:
        """Return its multiplications and additions."""
        return 2 * self.tokens * self.deep * self.wide


# (device, product): a function linear(blas, x, weight, out) that is faster than cuBLAS and gives the same bits, or None
faster: dict[tuple[int, Product], Any] = {}


class Blas:
    """Products on one device, in the stream that begin() was told last. Not for several threads at a time.

    It has a handle and a workspace of its own: cuBLAS would allocate inside each node of a graph, and CuPy's binding
    resets the workspace with every call. That binding is used only where cuBLAS cannot be called without it.
    """

    def __init__(self) -> None:
        self._binding = devices.cublas()
        self._library = library("cublas")
        self.lt = library("cublasLt") if self._library else None
        self.device = devices.present_device()
        self.stream = 0
        self.asked: set[Product] = set()  # of linear() since begin(), and done by cuBLAS's own choice
        if self._library is None:
            self.handle = int(devices.cupy().cuda.device.get_cublas_handle())
        else:
            self.handle = int(self._binding.create())
            self._binding.setMathMode(self.handle, SUMS_IN_FULL)
            self.workspace = devices.cupy().empty(WORKSPACE_BYTES, "u1")

    def begin(self, stream: int) -> None:
        """Do what follows in a stream; it is the current one."""
        self.stream = stream
        self.asked.clear()
        if self._library is not None:
            self._binding.setStream(self.handle, stream)
            workspace = _POINTER(self.workspace.data.ptr)
            check(
                "cublasSetWorkspace",
                self._library.cublasSetWorkspace_v2(
                    _POINTER(self.handle), workspace, ctypes.c_size_t(WORKSPACE_BYTES)
                ),
            )

    def linear(self, x: Any, weight: Any, out: Any) -> None:
        """Write x weight^T to out in the fastest way known: x is [tokens, in], weight [out, in]; all have one dtype."""
        product = Product.of(x, weight, out)
        known = faster.get((self.device, product))
        if known is None:
            self.asked.add(product)
            self.linear_by_cublas(x, weight, out)
        else:
            known.linear(self, x, weight, out)

    def linear_by_cublas(self, x: Any, weight: Any, out: Any) -> None:
        """Do the same by cuBLAS's own choice."""
        tokens, wide = out.shape
        deep = x.shape[-1]
        one, zero, compute, _ = scalars(x.dtype, 1.0)
        kind, of_out = TYPES[dtype_name(x.dtype)], TYPES[dtype_name(out.dtype)]
        self._call(
            "cublasGemmEx",
            "gemmEx",
            _ONE,
            (TRANSPOSED, AS_IS, wide, tokens, deep, one),
            (weight.data.ptr, kind, deep, x.data.ptr, kind, deep, zero),
            (out.data.ptr, of_out, wide, compute, DEFAULT_ALGORITHM),
        )

    def products(self, a: Any, b: Any, out: Any, *, transposed: bool = False, alpha: float = 1.0) -> None:
        """Write alpha a b to out, for stacks of matrices; transposed: alpha a b^T."""
        rows, cols = out.shape[-2:]
        deep = a.shape[-1]
        one, zero, compute, _ = scalars(a.dtype, alpha)
        kind, of_out = TYPES[dtype_name(a.dtype)], TYPES[dtype_name(out.dtype)]
        self._call(
            "cublasGemmStridedBatchedEx",
            "gemmStridedBatchedEx",
            _MANY,
            (TRANSPOSED if transposed else AS_IS, AS_IS, cols, rows, deep, one),
            (b.data.ptr, kind, b.shape[-1], deep * cols, a.data.ptr, kind, deep, rows * deep, zero),
            (out.data.ptr, of_out, cols, rows * cols),
            (math.prod(out.shape[:-2]), compute, DEFAULT_ALGORITHM),
        )

    def _call(self, symbol: str, name: str, types: tuple[Any, ...], *arguments: tuple[Any, ...]) -> None:
        flat = [each for group in arguments for each in group]
        if self._library is None:
            getattr(self._binding, name)(self.handle, *flat)
        else:
            function = getattr(self._library, symbol)
            function.argtypes = types
            check(symbol, function(self.handle, *flat))


@functools.cache
def scalars(dtype: Any, alpha: float) -> tuple[int, int, int, Any]:
    """Return the addresses of alpha and of 0 for cuBLAS, the type of sums, and the array of both numbers."""
    compute = dtype_name(compute_dtype(dtype))
    kind = ctypes.c_double if compute == "float64" else ctypes.c_float
    kept = (kind * 2)(alpha, 0.0)
    at = ctypes.addressof(kept)
    return at, at + ctypes.sizeof(kind), SUMMED_IN[compute], kept


@functools.cache
def library(name: str) -> Any:
    """Return the cuBLAS (cublasLt) that CuPy has loaded; None where it goes by another name than we know."""
    if os.name == "nt":
        return None
    major = int(devices.driver().get_build_version()) // 1000
    try:
        return ctypes.CDLL(f"lib{name}.so.{major}")
    except OSError:
        return None


def check(name: str, status: int) -> None:
    """Raise RuntimeError where a function of that name gave a status."""
    if status:
        raise RuntimeError(f"{name} gave status {status}: cuBLAS's header, cublas_api.h, names it")
