"""Empty arrays take no time and no memory, however long their other axes are; shapes are as for other calls."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupynorm
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

LONG = 2**34
SECONDS, BYTES = 5.0, 1 << 24  # the first call of all imports what it needs
ROW_SHAPES = [(0, LONG), (3, 0, 5), (0, 3, 5), (LONG, 0, 4)]
EACH_SHAPES = [*ROW_SHAPES, (LONG, 0), (0,), (0, 0), (3, 5, 0)]


class Arrays:
    """Arrays for a call, of NumPy or of the stand-in for CuPy. None of them has memory for more than one element."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def empty(self, *shape: int) -> Any:
        return self.module.empty(shape, np.float32)

    def wide(self, *shape: int, dtype: Any = np.float32) -> Any:
        """Give an array of one element that is stretched by strides of 0."""
        one = self.module.asarray(np.ones((1,) * len(shape), dtype))
        return np.lib.stride_tricks.as_strided(one, shape, [0] * len(shape), subok=True)


FUSED = cupynorm.fuse(cupynorm.softmax, load=lambda x, b: x + b)
SEVERAL = cupynorm.fuse(cupynorm.layer_norm, store=lambda y: (y, y * 2), keep_loaded=False)
ROW_CALLS: dict[str, Callable[[Arrays, Any], Any]] = {
    "softmax": lambda a, x: cupynorm.softmax(x),
    "softmax, causal": lambda a, x: cupynorm.softmax(x, causal=True, scale=0.5),
    "softmax, lengths": lambda a, x: cupynorm.softmax(x, lengths=a.wide(*x.shape[:-1], dtype=np.int32)),
    "softmax, where": lambda a, x: cupynorm.softmax(x, where=a.wide(*x.shape, dtype=bool)),
    "log_softmax": lambda a, x: cupynorm.log_softmax(x),
    "log_softmax, bias": lambda a, x: cupynorm.log_softmax(x, bias=a.wide(x.shape[-1])),
    "layer_norm": lambda a, x: cupynorm.layer_norm(x, a.wide(x.shape[-1]), a.wide(x.shape[-1])),
    "rms_norm": lambda a, x: cupynorm.rms_norm(x, a.wide(x.shape[-1])),
    "rms_norm, one scale": lambda a, x: cupynorm.rms_norm(x, quantize=cupynorm.Quantize("int8", 0.5)),
    "fuse": lambda a, x: FUSED(x, a.wide(x.shape[-1])),
}
EACH_CALLS: dict[str, Callable[[Arrays, Any], Any]] = {
    "bias_gelu": lambda a, x: cupynorm.bias_gelu(x, a.wide(x.shape[-1])),
    "bias_silu": lambda a, x: cupynorm.bias_silu(x, None),
    "dropout": lambda a, x: cupynorm.dropout(x, 0.5, seed=1),
}


@pytest.fixture(params=["numpy", "cupy"])
def arrays(request: Any, simulated: Any) -> Arrays:
    return Arrays(np if request.param == "numpy" else simulated.cupy)


def measured(call: Callable[[], Any]) -> Any:
    """Return what a call returns; it must be quick and allocate little."""
    tracemalloc.start()
    try:
        begin = time.perf_counter()
        found = call()
        took = time.perf_counter() - begin
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < SECONDS
    assert most < BYTES
    return found


@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("name", ROW_CALLS)
def test_a_row_op_of_no_rows_is_done_at_once(arrays: Arrays, name: str, shape: tuple[int, ...]) -> None:
    x = arrays.empty(*shape)

    y = measured(lambda: ROW_CALLS[name](arrays, x))

    assert type(y) is type(x)
    assert y.shape == shape


@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_statistics_scales_and_sums_of_no_rows_have_their_shapes(
    arrays: Arrays, shape: tuple[int, ...]
) -> None:
    x, cols = arrays.empty(*shape), shape[-1]
    gamma, rows = arrays.wide(cols), shape[:-1]

    def shapes(call: Callable[[], Any]) -> list[tuple[int, ...]]:
        return [each.shape for each in measured(call)]

    assert shapes(lambda: cupynorm.layer_norm(x, gamma, return_stats=True)) == [shape, rows, rows]
    assert shapes(lambda: cupynorm.rms_norm(x, quantize="int8", return_stats=True)) == [shape, rows, rows]
    assert shapes(lambda: cupynorm.softmax(x, quantize="int8")) == [shape, rows]
    added = shapes(
        lambda: cupynorm.add_layer_norm(x, x, gamma, bias=gamma, dropout=0.5, seed=1, quantize="int8")
    )
    assert added == [shape, rows, shape]
    assert shapes(lambda: cupynorm.add_rms_norm(x, x, gamma, return_stats=True)) == [shape, shape, rows]
    assert shapes(lambda: SEVERAL(x)) == [shape, shape]


@pytest.mark.parametrize("shape", EACH_SHAPES, ids=str)
@pytest.mark.parametrize("name", EACH_CALLS)
def test_an_elementwise_op_of_no_elements_is_done_at_once(
    arrays: Arrays, name: str, shape: tuple[int, ...]
) -> None:
    x = arrays.empty(*shape)

    assert measured(lambda: EACH_CALLS[name](arrays, x)).shape == shape


@pytest.mark.parametrize("shape", [(0, LONG), (LONG, 0), (0,), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("function", [cupynorm.geglu, cupynorm.swiglu])
def test_a_gate_of_no_elements_is_done_at_once(arrays: Arrays, function: Any, shape: tuple[int, ...]) -> None:
    x = arrays.empty(*shape)

    y = measured(lambda: function(x, arrays.wide(shape[-1])))

    assert y.shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize("shape", [(0, LONG, 6), (LONG, 0, 6), (2, 0, 3 * LONG), (3, 0, 6), (0, 6)], ids=str)
def test_heads_of_no_elements_are_done_at_once(arrays: Arrays, shape: tuple[int, ...]) -> None:
    x = arrays.empty(*shape)
    *leading, seq, cols = shape
    bias = arrays.wide(cols)

    qkv = measured(lambda: cupynorm.add_qkv_bias(x, bias, heads=1))
    apart = measured(lambda: cupynorm.split_heads(x, bias, heads=2))
    back = measured(lambda: cupynorm.merge_heads(apart))

    assert qkv.shape == (3, *leading, 1, seq, cols // 3)
    assert apart.shape == (*leading, 2, seq, cols // 2)
    assert back.shape == shape


@pytest.mark.parametrize("shape", [(0,), (LONG, 0), (3, 5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", sorted({*ROW_CALLS} - {"softmax, lengths", "softmax, causal"}))
def test_rows_without_columns_are_refused_at_once(arrays: Arrays, name: str, shape: tuple[int, ...]) -> None:
    x = arrays.empty(*shape)

    def refused() -> None:
        with pytest.raises(ValueError, match="the normalised axes are empty"):
            ROW_CALLS[name](arrays, x)

    measured(refused)
