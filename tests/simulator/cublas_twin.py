"""Stand-in for what cupynorm uses of CuPy's cuBLAS: column-major, on addresses, summed in float64 and rounded once."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cupynorm._dtypes import dtype_of

TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}  # cudaDataType
SCALARS = {68: ctypes.c_float, 70: ctypes.c_double}  # cublasComputeType_t


def setMathMode(handle: int, mode: int) -> None:  # noqa: N802
    """Take any mode."""


def _matrix(at: int, kind: int, rows: int, cols: int, leading: int) -> Any:
    """Return a view of a column-major matrix; its columns are `leading` elements apart."""
    if leading < rows:
        raise ValueError(f"CUBLAS_STATUS_INVALID_VALUE: columns of {rows} elements are {leading} apart")
    dtype = dtype_of(TYPES[kind])
    count = rows + (cols - 1) * leading
    whole = np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(at), dtype)
    return np.lib.stride_tricks.as_strided(whole, (rows, cols), (dtype.itemsize, leading * dtype.itemsize))


def gemmEx(  # noqa: N802
    handle: int, of_a: int, of_b: int, m: int, n: int, k: int, alpha: int,
    a: int, type_a: int, lda: int, b: int, type_b: int, ldb: int, beta: int,
    c: int, type_c: int, ldc: int, compute: int, algorithm: int,
) -> None:  # fmt: skip
    """Write alpha op(a) op(b) to c; beta must be 0."""
    shape = of_a, of_b, m, n, k, alpha
    gemmStridedBatchedEx(
        handle, *shape, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc, 0, 1, compute, algorithm
    )


def gemmStridedBatchedEx(  # noqa: N802
    handle: int, of_a: int, of_b: int, m: int, n: int, k: int, alpha: int,
    a: int, type_a: int, lda: int, step_a: int, b: int, type_b: int, ldb: int, step_b: int, beta: int,
    c: int, type_c: int, ldc: int, step_c: int, count: int, compute: int, algorithm: int,
) -> None:  # fmt: skip
    """Write alpha op(a) op(b) to c for `count` matrices, so many elements apart; beta must be 0."""
    del handle, algorithm
    scale, zero = (SCALARS[compute].from_address(each).value for each in (alpha, beta))
    if zero:
        raise NotImplementedError(f"beta is {zero}")
    for i in range(count):
        left, right, out = (
            _matrix(at + i * step * dtype_of(TYPES[kind]).itemsize, kind, *shape)
            for at, step, kind, shape in (
                (a, step_a, type_a, (k, m, lda) if of_a else (m, k, lda)),
                (b, step_b, type_b, (n, k, ldb) if of_b else (k, n, ldb)),
                (c, step_c, type_c, (m, n, ldc)),
            )
        )
        left, right = (left.T if of_a else left), (right.T if of_b else right)
        out[...] = (scale * (left.astype(np.float64) @ right.astype(np.float64))).astype(out.dtype)
