"""Large products by cublasLt: the fastest of its algorithms whose results have the bits of cuBLAS's.

cuBLAS takes the algorithm that cublasLt's heuristic names first; others in its list are up to 20 % faster
(docs/notes/043). The fastest is found by measuring, so the next process may take another. The results are the same:
algorithms that add up in another order are not eligible.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import compute_dtype, dtype_name, dtype_of
from cupynorm.bert.gemm import (
    ALIGNED,
    SUMMED_IN,
    TRANSPOSED,
    TYPES,
    WORKSPACE_BYTES,
    Blas,
    Product,
    check,
    faster,
    scalars,
)
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# The products that are measured: large ones in 16 bits, where another algorithm is reliably faster. In float32
# measuring takes longer and gains next to nothing (docs/notes/043).
LEAST_OPERATIONS, DTYPES = 10**10, ("float16", "bfloat16")
ALGORITHMS = 8  # algorithms to try, the heuristic's first ones
SAMPLES = 7  # samples of each algorithm
SAMPLE_OPERATIONS = 15 * 10**10  # operations of a sample: long beside the start of a kernel
WORTH = 0.98  # an algorithm is taken if its time is at most this share of cuBLAS's
PATTERN = 131_071  # elements after which scratch data repeats itself; a prime, so that rows do so late

TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
MOST_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
NOT_SUPPORTED = 15  # cublasStatus_t
OUT_OF_MEMORY = 2  # cudaError_t

_POINTER = ctypes.c_void_p


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Described:
    """A product as cublasLt describes it, kept while the process lives.

    It is column-major, as in gemm.py: weight x^T gives out^T.
    """

    def __init__(self, lt: Any, product: Product) -> None:
        self._lt = lt
        summed = dtype_name(compute_dtype(dtype_of(product.dtype)))
        self._operation = self._made(
            "MatmulDesc", ctypes.c_int(SUMMED_IN[summed]), ctypes.c_int(TYPES[summed])
        )
        self._put("MatmulDesc", self._operation, TRANSPOSE_A, ctypes.c_int(TRANSPOSED))
        self._weight, self._x, self._out = (
            self._made(
                "MatrixLayout", ctypes.c_int(TYPES[product.dtype]), *map(ctypes.c_int64, (rows, cols, rows))
            )
            for rows, cols in (
                (product.deep, product.wide),
                (product.deep, product.tokens),
                (product.wide, product.tokens),
            )
        )

    def algorithms(self, handle: int) -> list[Algorithm]:
        """Return the algorithms that the heuristic advises, best guess first."""
        preference = self._made("MatmulPreference")
        self._put("MatmulPreference", preference, MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES))
        found, count = (_Heuristic * ALGORITHMS)(), ctypes.c_int(0)
        status = self._lt.cublasLtMatmulAlgoGetHeuristic(
            _POINTER(handle),
            self._operation,
            *(self._weight, self._x, self._out, self._out),
            preference,
            *(ALGORITHMS, found, ctypes.byref(count)),
        )
        self._checked("cublasLtMatmulPreferenceDestroy", preference)
        if status != NOT_SUPPORTED:  # then it knows none
            check("cublasLtMatmulAlgoGetHeuristic", status)
        return [Algorithm(self, each.algorithm) for each in found[: count.value] if not each.status]

    def multiply(self, blas: Blas, algorithm: Any, x: Any, weight: Any, out: Any) -> int:
        """Write x weight^T to out; return the status."""
        one, zero, _, _ = scalars(x.dtype, 1.0)
        status = self._lt.cublasLtMatmul(
            *(_POINTER(blas.handle), self._operation, _POINTER(one)),
            *(_POINTER(weight.data.ptr), self._weight, _POINTER(x.data.ptr), self._x, _POINTER(zero)),
            *(_POINTER(out.data.ptr), self._out, _POINTER(out.data.ptr), self._out),
            *(algorithm, _POINTER(blas.workspace.data.ptr), ctypes.c_size_t(WORKSPACE_BYTES)),
            _POINTER(blas.stream),
        )
        return int(status)

    def _made(self, kind: str, *values: Any) -> Any:
        made = _POINTER()
        self._checked(f"cublasLt{kind}Create", ctypes.byref(made), *values)
        return made

    def _put(self, kind: str, of: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._checked(f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), size)

    def _checked(self, name: str, *arguments: Any) -> None:
        check(name, getattr(self._lt, name)(*arguments))


class Algorithm(NamedTuple):
    """One way to do a product."""

    of: Described
    words: Any  # cublasLtMatmulAlgo_t

    def runs(self, blas: Blas, x: Any, weight: Any, out: Any) -> bool:
        """Write x weight^T to out; say whether the device can."""
        status = self.of.multiply(blas, self.words, x, weight, out)
        if status != NOT_SUPPORTED:
            check("cublasLtMatmul", status)
        return not status

    def linear(self, blas: Blas, x: Any, weight: Any, out: Any) -> None:
        """Write x weight^T to out."""
        check("cublasLtMatmul", self.of.multiply(blas, self.words, x, weight, out))


def unmeasured(blas: Blas, products: Iterable[Product]) -> list[Product]:
    """Return those that are worth measuring, and were not yet in this process; none where cublasLt is not to be had."""
    if blas.lt is None:
        return []
    large = (
        each
        for each in products
        if each.operations >= LEAST_OPERATIONS and each.dtype in DTYPES and each.aligned == ALIGNED
    )
    return [each for each in large if (blas.device, each) not in faster]


def measure(blas: Blas, product: Product, differ: Callable[[Any, Any], bool]) -> None:
    """Find out how a product is done fastest, on the stream of blas, which is the current one; waits for it.

    It allocates the operands and twice the result, and frees them. If there is too little memory, cuBLAS does the
    product.
    """
    faster[blas.device, product] = None
    cuda = devices.cupy().cuda
    with cuda.using_allocator(_allocate):
        try:
            x, weight, wanted, out = _scratch(product)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            return
        blas.linear_by_cublas(x, weight, wanted)
        same = []
        for each in Described(blas.lt, product).algorithms(blas.handle):
            _clear(out)
            if each.runs(blas, x, weight, out) and not differ(wanted, out):
                same.append(each)
        ways = [Blas.linear_by_cublas, *(each.linear for each in same)]
        count = max(2, SAMPLE_OPERATIONS // product.operations)
        best = fastest(in_turns([functools.partial(way, blas, x, weight, out) for way in ways], count))
    faster[blas.device, product] = same[best - 1] if best else None


def fastest(times: Sequence[float]) -> int:
    """Return the index of the least time, unless the first is nearly as little."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < WORTH * times[0] else 0


def in_turns(calls: Sequence[Callable[[], None]], count: int) -> list[float]:
    """Return the milliseconds of `count` calls of each: medians of samples.

    Samples of all calls are taken in turns, so that clocks and other processes affect them equally.
    """
    replays = [_captured(call, count) for call in calls]
    samples = [[_milliseconds(each) for each in replays] for _ in range(SAMPLES + 1)]
    return [statistics.median(each) for each in zip(*samples[1:], strict=True)]


def _captured(call: Callable[[], None], count: int) -> Callable[[], None]:
    """Return a graph of `count` calls: separate calls would measure the host."""
    stream = devices.cupy().cuda.get_current_stream()
    stream.begin_capture()
    try:
        for _ in range(count):
            call()
    finally:
        graph = stream.end_capture()
    return functools.partial(graph.launch, stream)


def _milliseconds(call: Callable[[], None]) -> float:
    cuda = devices.cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(begin, end))


def _allocate(size: int) -> Any:
    """Give memory of no pool: it goes back when it is dropped."""
    cuda = devices.cupy().cuda
    return cuda.MemoryPointer(cuda.Memory(size), 0)


def _scratch(product: Product) -> tuple[Any, Any, Any, Any]:
    """Return operands, and room for two results, whose bits are all set."""
    dtype, (tokens, deep, wide) = dtype_of(product.dtype), product[:3]
    operands, results = ((tokens, deep), (wide, deep)), ((tokens, wide),) * 2
    x, weight, wanted, out = (devices.empty(shape, dtype) for shape in (*operands, *results))
    pattern = _pattern(product.dtype)
    _fill(x, pattern)
    _fill(weight, pattern[::-1])
    _clear(wanted)
    return x, weight, wanted, out


@functools.cache
def _pattern(dtype: str) -> np.ndarray[Any, Any]:
    """Return numbers of many sizes: where they are added up in another order, some sums are rounded in another way."""
    random = np.random.default_rng(0)
    pattern = random.standard_normal(PATTERN) * np.exp2(random.uniform(-6, 0, PATTERN))
    return pattern.astype(dtype_of(dtype))


def _fill(array: Any, pattern: np.ndarray[Any, Any]) -> None:
    """Fill with a pattern, over and over."""
    held = np.ascontiguousarray(pattern[: array.size])
    array.data.copy_from_host_async(held.ctypes.data, held.nbytes)
    filled = held.nbytes
    while filled < array.nbytes:
        more = min(filled, array.nbytes - filled)
        (array.data + filled).copy_from_device_async(array.data, more)
        filled += more


def _clear(array: Any) -> None:
    array.data.memset_async(0xFF, array.nbytes)
