"""Numbers as parameters, lists of lengths, packed records and subclasses, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import add_layer_norm, bias_gelu, layer_norm, rms_norm, softmax

small = pytest.mark.small
ROWS, COLS = 33, 257


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@small
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("number", [0.5, 0.1, -3])
def test_numbers_are_parameters(xp: Any, dtype: Any, number: float) -> None:
    host = normal(ROWS, COLS, dtype=dtype)
    x, wide = xp.asarray(host), host.astype(np.float64)
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if dtype == np.float16 else {"rtol": 1e-5, "atol": 1e-5}
    calls = [
        (layer_norm(x, number, number), layer_norm(wide, number, number)),
        (layer_norm(x, number, number), layer_norm(wide, number, number)),
        (rms_norm(x, np.float32(number)), rms_norm(wide, float(np.float32(number)))),
        (add_layer_norm(x, x, number, bias=number)[0], add_layer_norm(wide, wide, number, bias=number)[0]),
        (bias_gelu(x, number), bias_gelu(wide, number)),
    ]
    for got, expected in calls:
        assert got.dtype == dtype
        np.testing.assert_allclose(xp.asnumpy(got).astype(np.float64), expected, **tolerance)


@small
def test_a_parameter_with_a_leading_axis_is_the_same_without(xp: Any) -> None:
    x, gamma = xp.asarray(normal(ROWS, COLS)), xp.asarray(normal(COLS, seed=1))
    expected = xp.asnumpy(layer_norm(x, gamma, gamma))

    for _ in range(3):
        got = layer_norm(x, gamma.reshape(1, COLS), gamma.reshape(1, 1, COLS))
        np.testing.assert_array_equal(xp.asnumpy(got), expected)


@small
def test_a_list_of_lengths_is_uploaded(xp: Any) -> None:
    host = normal(4, COLS)
    for lengths in ([0, 1, 200, COLS], (5, 6, 7, 8)):
        got = softmax(xp.asarray(host), lengths=lengths)
        np.testing.assert_allclose(
            xp.asnumpy(got), softmax(host, lengths=np.array(lengths)), rtol=1e-5, atol=1e-7
        )


@small
def test_a_subclass_of_device_arrays_is_taken_if_it_overrides_nothing(xp: Any) -> None:
    class Named(xp.ndarray):  # type: ignore[misc,name-defined]
        name = "x"

    class Units(xp.ndarray):  # type: ignore[misc,name-defined]
        def __mul__(self, other: Any) -> Any:
            raise NotImplementedError

    x = xp.asarray(normal(ROWS, COLS))
    np.testing.assert_array_equal(xp.asnumpy(softmax(x.view(Named))), xp.asnumpy(softmax(x)))
    with pytest.raises(TypeError, match=r"x is a .*Units, whose __mul__ .*x\.view\(cupy\.ndarray\)"):
        softmax(x.view(Units))
    np.testing.assert_array_equal(xp.asnumpy(softmax(x.view(Units).view(xp.ndarray))), xp.asnumpy(softmax(x)))


def test_fields_of_packed_records_are_refused(cuda: Any) -> None:
    memory = cuda.zeros(ROWS * 5 * 8, cuda.uint8)

    class Field:
        """What another library gives of an array of records of 5 bytes."""

        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (ROWS, 8),
            "typestr": "<f4",
            "data": (memory.data.ptr, False),
            "strides": (40, 5),
            "version": 3,
        }

    field = cuda.asarray(Field())
    for call in (softmax, layer_norm, rms_norm):
        with pytest.raises(ValueError, match=r"x has strides \(40, 5\), no multiple of .*ascontiguousarray"):
            call(field)
    x = cuda.asarray(normal(ROWS, 8))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gamma has strides \(5,\), no multiple of"):
            layer_norm(x, field[0])
        layer_norm(x, x[0])


def test_a_number_may_be_read_on_every_stream_at_once(cuda: Any) -> None:
    host = normal(64, 4096)
    streams = [cuda.cuda.Stream(non_blocking=True) for _ in range(4)]
    expected = rms_norm(host, 0.123)
    x = cuda.asarray(host)
    cuda.cuda.runtime.deviceSynchronize()
    results = []
    for _ in range(8):
        for stream in streams:
            with stream:
                results.append(rms_norm(x, 0.123))
    cuda.cuda.runtime.deviceSynchronize()

    for each in results:
        np.testing.assert_allclose(cuda.asnumpy(each), expected, rtol=2e-5, atol=1e-6)


def test_a_number_in_a_captured_graph_and_a_list_refused_there(cuda: Any) -> None:
    host = normal(ROWS, COLS)
    x, y = cuda.asarray(host), cuda.empty((ROWS, COLS), cuda.float32)
    stream = cuda.cuda.Stream(non_blocking=True)
    cuda.cuda.runtime.deviceSynchronize()
    with stream:
        rms_norm(x, 0.321, out=y)
        softmax(x, lengths=[3] * ROWS, out=y)
        stream.begin_capture()
        rms_norm(x, 0.321, out=y)
        with pytest.raises(ValueError, match="lengths is a list, .*a graph is captured: give a CuPy array"):
            softmax(x, lengths=[3] * ROWS, out=y)
        graph = stream.end_capture()
        y.fill(0)
        cuda.get_default_memory_pool().free_all_blocks()
        graph.launch(stream)
        stream.synchronize()

    np.testing.assert_allclose(cuda.asnumpy(y), rms_norm(host, 0.321), rtol=2e-5, atol=1e-6)
