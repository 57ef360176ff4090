"""CUDA graphs that callers capture: what they hold stays as it was."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.tools import tune
from cupynorm.tools.results import Point


def captured(cuda: Any, x: Any, out: Any) -> tuple[Any, Any]:
    """Return a graph of one softmax, and its stream."""
    stream = cuda.cuda.Stream(non_blocking=True)
    cuda.cuda.Device().synchronize()
    with stream:
        cupynorm.softmax(x, out=out)
        stream.synchronize()
        stream.begin_capture()
        cupynorm.softmax(x, out=out)
        return stream.end_capture(), stream


def overwrite_code(cuda: Any) -> None:
    """Load kernels where others may have been."""
    place = cuda.empty(32, np.int32)
    for i in range(8):
        text = f'extern "C" __global__ void other{i}(int* p) {{ p[threadIdx.x] = {i}; }}'
        cuda.RawKernel(text, f"other{i}")((1,), (32,), (place,))


def replayed(cuda: Any, graph: Any, stream: Any, out: Any) -> Any:
    """Return what a replay writes."""
    out.fill(0)
    cuda.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    return out.get()


def test_a_graph_is_right_after_all_that_was_remembered_is_forgotten(cuda: Any) -> None:
    x = cuda.asarray(np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32))
    out = cuda.empty_like(x)
    expected = cupynorm.softmax(x).get()
    graph, stream = captured(cuda, x, out)

    row_ops.forget()
    gc.collect()
    overwrite_code(cuda)

    assert np.array_equal(replayed(cuda, graph, stream, out), expected)


def test_a_graph_is_right_after_its_shape_was_tuned(cuda: Any, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "MOST_CANDIDATES", 6)
    x = cuda.asarray(np.random.default_rng(0).standard_normal((4096, 1000)).astype(np.float32))
    out = cuda.empty_like(x)
    expected = cupynorm.softmax(x).get()
    graph, stream = captured(cuda, x, out)

    list(tune.tune([Point("softmax", "float32", 4096, 1000)]))
    gc.collect()
    overwrite_code(cuda)

    assert np.array_equal(replayed(cuda, graph, stream, out), expected)
