"""Device time of contenders that run in turns, by CUDA graphs between events, and the copies to compare with."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupynorm.runtime import devices
from cupynorm.tools import peers
from cupynorm.tools.peers import Run
from cupynorm.tools.results import Timing

REPLAYS, LEAST_REPLAYS = 21, 5
REPLAY_SECONDS = 0.04  # for each contender: slow ones are replayed less often
POISON = 0xFF  # a byte whose repetition is a nan in every float dtype
HOLD_CYCLES = 300_000  # 150 us on an H200: the host needs at most this long to enqueue a replay


class _Calls:
    """Stands in for the graph of a contender that cannot be captured: the host makes its calls."""

    def __init__(self, run: Run, sets: int, calls: int) -> None:
        self._run, self._sets, self._calls = run, sets, calls

    def launch(self, stream: Any) -> None:  # noqa: ARG002  the signature of a graph; the stream is the current one
        for i in range(self._calls):
            self._run(i % self._sets)


def time_interleaved(
    runs: Mapping[str, Run],
    sets: int,
    *,
    replays: int = REPLAYS,
    calls: int | None = None,
    seconds: float = math.inf,
    notes: dict[str, str] | None = None,
    check: Callable[[str, Any], str] | None = None,
) -> dict[str, Timing]:
    """Time several contenders in turns, so that clock changes and other users of the machine affect all equally.

    Each is called once on every set, which compiles it and warms the memory pools. It is then captured into a graph of
    `calls` launches, which is replayed between two events: a replay's time / calls is one sample. Contenders that would
    take more than `seconds` for all replays get fewer, but at least LEAST_REPLAYS.

    With `notes`, a contender that raises gets an entry there, and no time; without, the exception is raised. `check`
    takes a name and the memory that only its graph has written, and returns its fault, or "".
    """
    module = devices.cupy()
    stream = module.cuda.Stream(non_blocking=True)
    calls = max(sets, 10) if calls is None else calls
    with stream:
        graphs: dict[str, Any] = {}
        for name, run in runs.items():
            try:
                graphs[name], written = _graph(stream, name, run, sets, calls, notes)
                _sample(stream, graphs[name])  # the driver uploads a graph at its first launch
                stream.synchronize()
                if check is not None and written is not None:
                    _check(stream, name, graphs[name], written, check)
            except Exception as error:
                graphs.pop(name, None)
                if notes is None:
                    raise
                notes[name] = one_line(error)
                stream.synchronize()  # if that fails too, the device is lost
        every: dict[str, int] = {}
        for name, graph in graphs.items():
            once = _elapsed(stream, _sample(stream, graph))
            wanted = min(
                replays, max(LEAST_REPLAYS, int(seconds / max(once, 1e-9)) if seconds < math.inf else replays)
            )
            every[name] = max(1, replays // wanted)
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(replays):
            pending = {name: _sample(stream, graphs[name]) for name in graphs if turn % every[name] == 0}
            for name, events in pending.items():
                samples[name].append(_elapsed(stream, events) / calls)
    return {name: timing_of(values) for name, values in samples.items()}


def _graph(
    stream: Any, name: str, run: Run, sets: int, calls: int, notes: dict[str, str] | None
) -> tuple[Any, Any]:
    """Return a graph of calls, and the array that the last one writes; None for the array if there is no graph."""
    for i in range(sets):
        run(i)
    stream.synchronize()
    stream.begin_capture()
    try:
        for i in range(calls):
            written = run(i % sets)
    except Exception as error:
        with contextlib.suppress(Exception):  # it would report the same failure again
            stream.end_capture()
        if notes is None:
            raise
        notes[name] = f"its launches are timed, not a graph: {one_line(error)}"
        return _Calls(run, sets, calls), None
    return stream.end_capture(), written


def _check(stream: Any, name: str, graph: Any, written: Any, check: Callable[[str, Any], str]) -> None:
    """Overwrite the result, replay the graph, and check. A graph is empty if the work went to another stream."""
    memory = peers.memory_of(written)
    memory.data.memset_async(POISON, memory.nbytes, stream)
    graph.launch(stream)
    stream.synchronize()
    fault = check(name, memory)
    if fault:
        raise RuntimeError(fault)


def _sample(stream: Any, graph: Any) -> tuple[Any, Any]:
    """Enqueue a replay between two events.

    A kernel keeps the device busy meanwhile. Otherwise the first event would be recorded before the host has launched
    the graph.
    """
    begin, end = devices.cupy().cuda.Event(), devices.cupy().cuda.Event()
    kernel(HOLD, "hold")((1,), (1,), (np.int64(HOLD_CYCLES),))
    begin.record(stream)
    graph.launch(stream)
    end.record(stream)
    return begin, end


def _elapsed(stream: Any, events: tuple[Any, Any]) -> float:
    stream.synchronize()
    return float(devices.cupy().cuda.get_elapsed_time(*events)) / 1e3


def timing_of(samples: Sequence[float]) -> Timing:
    """Return the median of samples and the quartiles around it."""
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
    return Timing(median, low, high)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type."""
    text = f"{type(error).__name__}: {error}".strip()
    return text.splitlines()[0][:200]


HOLD = r"""
extern "C" __global__ void hold(long long cycles) {
  for (long long begin = clock64(); clock64() - begin < cycles;) {}
}
"""

COPY = r"""
extern "C" __global__ void copy(const uint4* x, uint4* y, long long vectors) {
  // each thread has VECTORS vectors in flight; a block's vectors are contiguous
  long long base = (long long)blockIdx.x * blockDim.x * VECTORS + threadIdx.x;
  uint4 v[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) if (base + i * blockDim.x < vectors) v[i] = x[base + i * blockDim.x];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) if (base + i * blockDim.x < vectors) y[base + i * blockDim.x] = v[i];
}
"""
# (vectors per thread, threads per block), without cache hints. These three were the fastest of 50 kernels on an H200,
# each at some sizes: 4.26 TB/s at 1.6 GB. The driver's own copy is as fast up to that size, and has two thirds of the
# rate above it.
COPIES = ((1, 128), (1, 256), (2, 128))


@functools.cache
def kernel(code: str, name: str, *options: str) -> Any:
    """Return a kernel of CuPy's, compiled once."""
    return devices.cupy().RawKernel(code, name, options=options)


def copy_runs(buffers: Sequence[tuple[Any, Any]]) -> dict[str, Run]:
    """Return the contenders whose best is the limit: the driver's copy, and kernels with 16-byte accesses."""

    def driver(i: int) -> Any:
        x, y = buffers[i]
        y.data.copy_from_device_async(x.data, x.nbytes)
        return y

    def ours(vectors: int, block: int, i: int) -> Any:
        x, y = buffers[i]
        count = x.nbytes // 16
        grid = -(-count // (vectors * block))
        kernel(COPY, "copy", f"-DVECTORS={vectors}")((grid,), (block,), (x, y, np.int64(count)))
        return y

    kernels = {
        f"copy ({vectors} x {block})": functools.partial(ours, vectors, block) for vectors, block in COPIES
    }
    return {"copy (driver)": driver, **kernels}
