"""The caller's stream and device, CUDA graphs, threads: nothing waits, nothing is mixed up."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.invoke import row_ops
from cupynorm.plan.config import PLAIN
from cupynorm.runtime import compiler
from cupynorm.tools.testing import assert_close, inputs
from tests.gpu.agree import run

if TYPE_CHECKING:
    from collections.abc import Callable

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("kind", ["blocking", "non_blocking", "per_thread"])
def test_runs_on_the_callers_stream(cuda: Any, op: Op, kind: str) -> None:
    case = inputs(op, 29, 100, "float32")
    streams = {
        "blocking": cuda.cuda.Stream,
        "non_blocking": lambda: cuda.cuda.Stream(non_blocking=True),
        "per_thread": lambda: cuda.cuda.Stream.ptds,
    }
    stream = streams[kind]()

    with stream:
        y = run(cuda, op, case)
        stream.synchronize()
        host = cuda.asnumpy(y, stream=stream)

    assert_close(host, op.reference(case.x, **case.parameters)[0])


@every_op
def test_waits_for_what_the_stream_did_before(cuda: Any, op: Op) -> None:
    case = inputs(op, 512, 4096, "float32")
    source = cuda.asarray(case.x)
    x = cuda.zeros_like(source)
    out = cuda.empty_like(source)
    parameters = {name: cuda.asarray(array) for name, array in case.parameters.items()}
    op.function(x, **parameters, out=out)
    stream = cuda.cuda.Stream(non_blocking=True)
    cuda.cuda.Device().synchronize()

    with stream:
        for _ in range(200):  # long enough for a launch on another stream to come first
            x[...] = 0
        x[...] = source
        op.function(x, **parameters, out=out)
        x[...] = 0
    stream.synchronize()

    assert_close(cuda.asnumpy(out), op.reference(case.x, **case.parameters)[0])


@every_op
@pytest.mark.parametrize("cols", [100, 20000])
def test_can_be_captured_into_a_graph(cuda: Any, op: Op, cols: int) -> None:
    case = inputs(op, 16, cols, "float16")
    x = cuda.zeros(case.x.shape, np.float16)
    out = cuda.empty_like(x)
    parameters = {name: cuda.asarray(array) for name, array in case.parameters.items()}
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        op.function(x, **parameters, out=out)  # compiles and asks for the plan: not possible inside a capture
        stream.synchronize()
        stream.begin_capture()
        op.function(x, **parameters, out=out)
        graph = stream.end_capture()
    x[...] = cuda.asarray(case.x)
    out[...] = 0
    cuda.cuda.Device().synchronize()

    graph.launch(stream)
    stream.synchronize()

    assert_close(cuda.asnumpy(out), op.reference(case.x, **case.parameters)[0])


CLAIMS = dataclasses.replace(
    PLAIN,
    variant="cluster",
    vector=4,
    vectors=8,
    group=128,
    parameter_cache=2,
    ctas_per_row=4,
    stages=1,
    block=128,
)
# Each of its own way to hold a row, so of its own place that waits for the kernel before.
CHAINS = {
    "registers": ((4096, 64), "float16", None),
    "cluster": ((3, 16384), "float32", "cluster"),
    "cached": ((300, 16384), "float32", "cached"),
    "shared": ((300, 8200), "float32", "shared"),
    "uncached": ((300, 8200), "float32", "uncached"),
    "split": ((3, 16384), "float32", "split"),
    "claims": ((1000, 16384), "float32", CLAIMS),
}


@pytest.mark.parametrize("captured", [False, True], ids=["called", "captured"])
@pytest.mark.parametrize("chain", CHAINS)
def test_each_kernel_waits_for_the_one_before(cuda: Any, chain: str, captured: bool) -> None:
    shape, dtype, plan = CHAINS[chain]
    x = cuda.asarray(np.random.default_rng(0).standard_normal(shape).astype(dtype))
    heads = x.reshape(shape[0], 8, shape[1] // 8) if chain == "registers" else None
    left, right = cuda.empty_like(x), cuda.empty_like(x)
    bias = cuda.full(shape[1], 0.125, np.float32)
    cuda.cuda.Device().synchronize()  # the stream below waits for no other

    def run_chain(wait: Callable[[], Any]) -> None:
        source, target = x, left
        for step in range(12):
            if heads is not None and step % 3 == 1:
                cupynorm.bias_gelu(source, bias, out=target)
            elif heads is not None and step % 3 == 2:
                cupynorm.split_heads(source[None], heads=8, out=target.reshape(1, 8, shape[0], -1))
            else:
                cupynorm.layer_norm(source, bias, bias, out=target, plan=plan)
            wait()
            source, target = target, right if target is left else left

    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        run_chain(stream.synchronize)
        wanted = left.copy(), right.copy()
        if captured:
            stream.begin_capture()
            run_chain(lambda: None)
            graph = stream.end_capture()
        for _ in range(20):
            left[...] = right[...] = 0
            if captured:
                graph.launch(stream)
            else:
                run_chain(lambda: None)
            stream.synchronize()

            assert bool((left == wanted[0]).all())
            assert bool((right == wanted[1]).all())


@pytest.mark.parametrize("captured", [False, True], ids=["called", "captured"])
def test_launches_side_by_side_claim_their_own_rows(cuda: Any, captured: bool) -> None:
    """Each has a counter of its own, in several streams at once and in graphs that are launched while others run."""
    x = cuda.asarray(np.random.default_rng(0).standard_normal((1000, 16384)).astype(np.float32))
    gamma = cuda.full(16384, 0.5, np.float32)
    wanted = cupynorm.layer_norm(x, gamma, gamma, plan="uncached")
    streams = [cuda.cuda.Stream(non_blocking=True) for _ in range(4)]
    outs = [cuda.empty_like(x) for _ in streams]
    graphs = []
    for stream, out in zip(streams, outs, strict=True):
        with stream:
            cupynorm.layer_norm(x, gamma, gamma, out=out, plan=CLAIMS)
            stream.synchronize()
            if captured:
                stream.begin_capture()
                cupynorm.layer_norm(x, gamma, gamma, out=out, plan=CLAIMS)
                graphs.append(stream.end_capture())

    for _ in range(20):
        for out in outs:
            out[...] = 0
        cuda.cuda.Device().synchronize()
        for number, (stream, out) in enumerate(zip(streams, outs, strict=True)):
            with stream:
                if captured and number % 2:
                    graphs[number].launch(stream)
                else:
                    cupynorm.layer_norm(x, gamma, gamma, out=out, plan=CLAIMS)
        cuda.cuda.Device().synchronize()

        for out in outs:
            assert float(cuda.abs(out - wanted).max()) < 1e-5


@pytest.mark.small
@every_op
def test_with_out_nothing_is_allocated(cuda: Any, op: Op) -> None:
    x = cuda.ones((29, 100), np.float32)
    out = cuda.empty_like(x)
    op.function(x, out=out)
    pool = cuda.get_default_memory_pool()
    used, total = pool.used_bytes(), pool.total_bytes()

    op.function(x, out=out)

    assert (pool.used_bytes(), pool.total_bytes()) == (used, total)


@every_op
def test_runs_on_the_arrays_device_and_leaves_the_current_one(cuda: Any, op: Op) -> None:
    if cuda.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    case = inputs(op, 29, 100, "float32")
    with cuda.cuda.Device(1):
        x = cuda.asarray(case.x)
        parameters = {name: cuda.asarray(array) for name, array in case.parameters.items()}
        cuda.cuda.Device(1).synchronize()

    with cuda.cuda.Device(0):
        y = op.function(x, **parameters)

        assert cuda.cuda.runtime.getDevice() == 0
    assert y.device.id == 1
    with cuda.cuda.Device(1):
        assert_close(cuda.asnumpy(y), op.reference(case.x, **case.parameters)[0])
    with pytest.raises(ValueError, match="device"), cuda.cuda.Device(0):
        op.function(x, out=cuda.empty(x.shape, x.dtype))


@pytest.mark.parametrize("same", [True, False], ids=["the same shape", "different shapes"])
def test_eight_threads_may_start_at_once(cuda: Any, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    cols = [100] * 8 if same else [33, 64, 100, 1025, 2048, 5000, 20000, 70000]
    work = [(op, inputs(op, 7, n, "float16")) for n, op in zip(cols, OPS * 2, strict=True)]
    if same:
        work = [work[0]] * 8
    begin = threading.Barrier(8)
    faults: list[BaseException] = []

    def start(op: Op, case: Any) -> None:
        try:
            begin.wait()
            with cuda.cuda.Stream(non_blocking=True) as stream:
                for _ in range(3):
                    y = run(cuda, op, case)
                    stream.synchronize()
                    assert_close(cuda.asnumpy(y), op.reference(case.x, **case.parameters)[0])
        except BaseException as fault:  # noqa: BLE001  a thread's exception would be lost
            faults.append(fault)

    monkeypatch.setattr(compiler, "_kernels", compiler.Kernels())  # as in a new process
    row_ops.forget()
    threads = [threading.Thread(target=start, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not faults, faults
