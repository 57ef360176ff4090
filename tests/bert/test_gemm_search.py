"""Large products: which of cublasLt's algorithms is kept. Here cublasLt is a class that computes with NumPy."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import dtype_of
from cupynorm.bert import gemm, gemm_search, runner
from cupynorm.bert.device_steps import differ
from cupynorm.bert.gemm import Blas, Product
from cupynorm.bert.runner import Runner
from tests.simulator import cublas, simulated

__all__ = ["simulated"]

CUBLAS = -1
SAME, OTHER, NOTHING, REFUSED, BROKEN = (
    "the bits of cuBLAS",
    "other bits",
    "nothing",
    "not supported",
    "broken",
)


class Lt:
    """cublasLt with algorithms of these kinds."""

    def __init__(self, *kinds: str, status: int = 0) -> None:
        self.kinds, self.status, self.last = kinds, status, CUBLAS
        self.made: dict[int, Any] = {}

    def _create(self, made: Any, *values: Any) -> int:
        number = len(self.made) + 1
        self.made[number] = [each.value for each in values], {}
        made._obj.value = number
        return 0

    def _set(self, of: Any, attribute: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        self.made[of.value][1][attribute] = value._obj.value
        return 0

    cublasLtMatmulDescCreate = cublasLtMatrixLayoutCreate = cublasLtMatmulPreferenceCreate = _create  # noqa: N815
    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set  # noqa: N815

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:  # noqa: N802
        del self.made[preference.value]
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        preference, most, found, count = arguments[-4:]
        assert self.made[preference.value][1] == {gemm_search.MOST_WORKSPACE: gemm.WORKSPACE_BYTES}
        for number in range(min(most, len(self.kinds))):
            found[number].algorithm[0] = number
        count._obj.value = min(most, len(self.kinds))
        return self.status

    def cublasLtMatmul(self, *arguments: Any) -> int:  # noqa: N802
        _, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, *_ = arguments
        self.last = algorithm[0]
        kind = self.kinds[self.last]
        if kind in {REFUSED, BROKEN}:
            return {REFUSED: gemm_search.NOT_SUPPORTED, BROKEN: 14}[kind]
        if kind == NOTHING:
            return 0
        (compute, _), transposed = self.made[operation.value]
        left, right, out = (self.made[each.value][0] for each in (of_a, of_b, of_d))
        assert left[1] == left[3] == right[1]
        assert (c.value, of_c.value) == (d.value, of_d.value)
        cublas.gemmEx(
            *(0, transposed[gemm_search.TRANSPOSE_A], 0, out[1], out[2], left[1], alpha.value),
            *(a.value, left[0], left[3], b.value, right[0], right[3], beta.value),
            *(d.value, out[0], out[3], compute, 0),
        )
        if kind == OTHER:
            ctypes.c_ubyte.from_address(d.value + 2).value ^= 1
        return 0


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the ways in which products are faster: none is known yet."""
    known: dict[Any, Any] = {}
    for module in (gemm, gemm_search, runner):
        monkeypatch.setattr(module, "faster", known)
    return known


def blas_with(simulated: Any, lt: Any) -> Blas:
    made = Blas()
    made.lt, made.workspace = lt, simulated.cupy.empty(16, "u1")
    return made


def take(monkeypatch: pytest.MonkeyPatch, lt: Lt, times: dict[int, float]) -> None:
    """Let algorithms take so many milliseconds."""

    def milliseconds(call: Any) -> float:
        lt.last = CUBLAS
        call()
        return times[lt.last]

    monkeypatch.setattr(gemm_search, "_captured", lambda call, count: call)
    monkeypatch.setattr(gemm_search, "_milliseconds", milliseconds)


PRODUCT = Product(6, 16, 9, "float16", gemm.ALIGNED)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_fastest_with_the_bits_of_cublas_is_kept(simulated, faster, monkeypatch, dtype):
    lt = Lt(SAME, OTHER, REFUSED, SAME, NOTHING, SAME)
    blas, product = blas_with(simulated, lt), PRODUCT._replace(dtype=dtype)
    take(monkeypatch, lt, {CUBLAS: 10, 0: 9, 1: 1, 3: 5, 4: 1, 5: 6})

    gemm_search.measure(blas, product, differ)

    x, weight = (
        simulated.cupy.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype_of(dtype)))
        for shape in ((6, 16), (9, 16))
    )
    out, wanted = (simulated.cupy.empty((6, 9), dtype_of(dtype)) for _ in range(2))
    faster[blas.device, product._replace(aligned=Product.of(x, weight, out).aligned)] = faster[0, product]
    lt.last = CUBLAS
    blas.linear(x, weight, out)
    assert lt.last == 3
    assert not blas.asked
    blas.linear_by_cublas(x, weight, wanted)
    assert simulated.cupy.asnumpy(out).tobytes() == simulated.cupy.asnumpy(wanted).tobytes()


@pytest.mark.parametrize(
    ("kinds", "times"),
    [
        ([SAME, SAME], {CUBLAS: 10, 0: 10, 1: 9.9}),  # a hundredth is noise
        ([OTHER, OTHER], {CUBLAS: 10}),
        ([], {CUBLAS: 10}),
    ],
)
def test_where_nothing_is_faster_it_stays_with_cublas(simulated, faster, monkeypatch, kinds, times):
    lt = Lt(*kinds)
    take(monkeypatch, lt, times)

    gemm_search.measure(blas_with(simulated, lt), PRODUCT, differ)

    assert faster == {(0, PRODUCT): None}


def test_a_status_is_told(simulated, faster):
    with pytest.raises(RuntimeError, match="cublasLtMatmulAlgoGetHeuristic gave status 7"):
        gemm_search.measure(blas_with(simulated, Lt(SAME, status=7)), PRODUCT, differ)
    with pytest.raises(RuntimeError, match="cublasLtMatmul gave status 14"):
        gemm_search.measure(blas_with(simulated, Lt(SAME, BROKEN)), PRODUCT, differ)


def test_no_memory_leaves_a_product_to_cublas_and_other_errors_are_told(simulated, faster, monkeypatch):
    def fail(status: int) -> Any:
        error = simulated.cupy.runtime.CUDARuntimeError("cudaError")
        error.status = status
        raise error

    blas = blas_with(simulated, Lt(SAME))
    monkeypatch.setattr(gemm_search, "_scratch", lambda product: fail(gemm_search.OUT_OF_MEMORY))
    gemm_search.measure(blas, PRODUCT, differ)
    assert faster == {(0, PRODUCT): None}

    monkeypatch.setattr(gemm_search, "_scratch", lambda product: fail(700))
    with pytest.raises(simulated.cupy.runtime.CUDARuntimeError):
        gemm_search.measure(blas, PRODUCT, differ)


def test_only_large_products_that_are_not_known_yet_are_measured(simulated, faster):
    tokens = math.ceil(gemm_search.LEAST_OPERATIONS / (2 * 768 * 768))
    large = Product(tokens, 768, 768, "float16", gemm.ALIGNED)
    known, small = large._replace(tokens=2 * tokens), large._replace(tokens=tokens - 1)
    askew, single = large._replace(aligned=16), large._replace(dtype="float32")
    faster[0, known] = None
    asked = [large, known, small, askew, single]

    assert gemm_search.unmeasured(blas_with(simulated, Lt()), asked) == [large]
    assert gemm_search.unmeasured(blas_with(simulated, None), asked) == []  # where cublasLt cannot be loaded


def test_a_runner_measures_what_is_not_known_and_says_whether_anything_is_faster(
    simulated, faster, monkeypatch
):
    monkeypatch.setattr(gemm_search, "LEAST_OPERATIONS", 1)
    runner = Runner(dtype_of("float16"), 16)
    runner.blas = blas_with(simulated, Lt(SAME))
    stream, other = simulated.cupy.cuda.get_current_stream(), PRODUCT._replace(tokens=7)
    take(monkeypatch, runner.blas.lt, {CUBLAS: 10, 0: 10})

    assert not runner._measure([PRODUCT], stream)
    assert faster == {(0, PRODUCT): None}
    take(monkeypatch, runner.blas.lt, {CUBLAS: 10, 0: 5})
    assert not runner._measure([PRODUCT], stream)  # it is known: nothing is
    assert runner._measure([PRODUCT, other], stream)
    assert faster[0, PRODUCT] is None
    assert faster[0, other] is not None


def test_a_pool_is_told_of_every_allocation_that_failed(simulated, monkeypatch):
    def fail(size: int) -> Any:
        raise simulated.cupy.runtime.CUDARuntimeError(f"cudaErrorMemoryAllocation: {size} bytes")

    runner = Runner(dtype_of("float16"), 16)
    for name in ("Memory", "MemoryPointer"):
        monkeypatch.setattr(simulated.cupy.cuda, name, fail, raising=False)

    with pytest.raises(simulated.cupy.runtime.CUDARuntimeError):
        runner._allocate(512)

    assert runner._short_of_memory  # so graphs, whose memory it gives back then, are dropped


def test_scratch_data_is_of_many_sizes_and_the_same_in_every_process(simulated, monkeypatch):
    pattern = gemm_search._pattern("float16")[:7]
    monkeypatch.setattr(gemm_search, "_pattern", lambda dtype: pattern)

    x, weight, wanted, out = map(simulated.cupy.asnumpy, gemm_search._scratch(PRODUCT))

    assert (x.shape, weight.shape, wanted.shape, out.shape) == ((6, 16), (9, 16), (6, 9), (6, 9))
    flat = x.ravel()
    np.testing.assert_array_equal(flat[7:], flat[:-7])
    assert len(set(flat[:7].tolist())) == 7
    assert set(wanted.tobytes()) == {0xFF}


@pytest.mark.parametrize(("times", "best"), [([10, 9, 8], 2), ([10, 9.9], 0), ([10], 0), ([10, 12], 0)])
def test_cublas_stays_unless_it_is_surely_slower(times, best):
    assert gemm_search.fastest(times) == best


def test_samples_are_taken_in_turns_and_the_median_counts(monkeypatch):
    samples = {"a": iter([99, 5, 1, 1, 9, 1]), "b": iter([99, 2, 7, 2, 2, 2])}
    calls = []

    def milliseconds(call: Any) -> float:
        calls.append(call)
        return next(samples[call])

    monkeypatch.setattr(gemm_search, "SAMPLES", 5)
    monkeypatch.setattr(gemm_search, "_captured", lambda call, count: call)
    monkeypatch.setattr(gemm_search, "_milliseconds", milliseconds)

    assert gemm_search.in_turns(["a", "b"], 3) == [1, 2]
    assert calls == ["a", "b"] * (1 + gemm_search.SAMPLES)
