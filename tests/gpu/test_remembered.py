"""Repeated calls on a device, where the simulator has no model: contexts of threads, graphs, streams, memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm_backward
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.tools.testing import assert_close, inputs
from tests.gpu.agree import run

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.mark.small
@every_op
def test_again_has_the_same_bits(xp: Any, op: Op) -> None:
    case = inputs(op, 29, 100, "float16")

    first, second, third = (xp.asnumpy(run(xp, op, case)) for _ in range(3))

    assert first.tobytes() == second.tobytes() == third.tobytes()
    assert_close(third, op.reference(case.x, **case.parameters)[0])


def test_results_of_a_repeated_call_are_arrays_as_cupys_own(cuda: Any) -> None:
    x, gamma = cuda.ones((29, 96), np.float16), cuda.ones(96, np.float32)
    layer_norm_backward(x, x, gamma)

    found = layer_norm_backward(x, x, gamma)

    for made, like in zip(found, (x, gamma, gamma), strict=True):
        own = cuda.empty(like.shape, like.dtype)
        assert type(made) is type(own)
        for each in ("shape", "strides", "dtype", "size", "nbytes", "ndim", "base", "flags", "device"):
            assert str(getattr(made, each)) == str(getattr(own, each))
        assert (made + made).tolist() == (2 * made.get()).tolist()


@every_op
def test_a_thread_that_never_called_cuda_may_launch(cuda: Any, op: Op) -> None:
    case = inputs(op, 29, 100, "float32")
    x, out = cuda.asarray(case.x), cuda.empty(case.x.shape, np.float32)
    parameters = {name: cuda.asarray(array) for name, array in case.parameters.items()}
    op.function(x, **parameters, out=out)
    out[...] = 0
    cuda.cuda.Device().synchronize()
    faults: list[BaseException] = []

    def start() -> None:
        try:
            for _ in range(3):
                op.function(x, **parameters, out=out)
        except BaseException as fault:  # noqa: BLE001  a thread's exception would be lost
            faults.append(fault)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert not faults, faults
    assert_close(cuda.asnumpy(out), op.reference(case.x, **case.parameters)[0])


@every_op
def test_a_remembered_call_can_be_captured_with_its_own_output(cuda: Any, op: Op) -> None:
    case = inputs(op, 16, 1000, "float16")
    x = cuda.zeros(case.x.shape, np.float16)
    parameters = {name: cuda.asarray(array) for name, array in case.parameters.items()}
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(3):
            y = op.function(x, **parameters)
        stream.synchronize()
        stream.begin_capture()
        y = op.function(x, **parameters)
        graph = stream.end_capture()
    x[...] = cuda.asarray(case.x)
    cuda.cuda.Device().synchronize()

    graph.launch(stream)
    stream.synchronize()

    assert_close(cuda.asnumpy(y), op.reference(case.x, **case.parameters)[0])


@every_op
def test_each_call_is_on_the_stream_of_its_moment(cuda: Any, op: Op) -> None:
    case = inputs(op, 29, 100, "float32")
    x, out = cuda.asarray(case.x), cuda.empty(case.x.shape, np.float32)
    op.function(x, out=out)
    stream = cuda.cuda.Stream(non_blocking=True)
    cuda.cuda.Device().synchronize()

    with stream:
        stream.begin_capture()  # a launch on any other stream would not be in the graph
        op.function(x, out=out)
        graph = stream.end_capture()
    out[...] = 0
    cuda.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()

    assert_close(cuda.asnumpy(out), op.reference(case.x)[0])
