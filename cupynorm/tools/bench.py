"""Device time of the ops beside their peers' and a copy's of the same bytes: CUDA graphs over rotating buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import gc
import importlib.metadata
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import cupynorm
from cupynorm._dtypes import Dtype, dtype_of
from cupynorm.call.view import View
from cupynorm.catalog import forms, op_table
from cupynorm.catalog.forms import Arrays, Form, Given
from cupynorm.invoke import row_ops
from cupynorm.lower.row import row_spec
from cupynorm.plan.config import Plan
from cupynorm.plan.problem import Problem
from cupynorm.runtime import devices
from cupynorm.tools import explain, peers, results, testing
from cupynorm.tools.peers import Run
from cupynorm.tools.results import OURS, HostTime, Measured, Point, Report, Timing

ROTATION_BYTES = 512 << 20  # buffers are visited in turn until this much was touched: several times any L2
GRAPH_BYTES = 3 << 29  # what a graph moves at least, where its buffers are large: 0.4 ms on an H200
MOST_SETS, MOST_CALLS = 512, 1024  # of a graph: with more, capturing takes longer than measuring
LARGEST_BYTES = 6 << 30  # of x and y: the default sweep halves its rows until they fit
ALIGNMENT = 256  # of every buffer, in bytes
REPLAYS, LEAST_REPLAYS = 21, 5
POISON = 0xFF  # a nan of every float
REPLAY_SECONDS = 0.04  # for each contender: slow ones are replayed less often
HOLD_CYCLES = 300_000  # 150 us on an H200: what the host needs at most to enqueue a replay
ROTATED_SHARE = 0.01  # parameters that are more of the bytes than this rotate as x does; smaller ones stay in L2 in real use, too
PATTERN = 1 << 20  # different numbers in x
COMPARED = 1 << 16  # elements of a contender's result
AGREE = {
    "float16": 0.02,
    "bfloat16": 0.1,
    "float32": 1e-3,
    "float64": 1e-6,
}  # of their length: peers may round on the way


def sets_for(bytes_of_one: int) -> int:
    """Return how many buffer sets of this size to rotate among, so that none is still in L2 when its turn comes."""
    return max(2, min(MOST_SETS, math.ceil(ROTATION_BYTES / max(1, bytes_of_one))))


def _calls_for(bytes_of_one: int, sets: int) -> int:
    """Return how many calls a graph holds: whole turns of the sets, long enough that its start does not count."""
    turns = math.ceil(GRAPH_BYTES / max(1, bytes_of_one * sets))
    return sets * max(1, min(turns, MOST_CALLS // sets))


# ---- time


class _Calls:
    """In place of a graph, for a contender that cannot be captured: its calls, as the host makes them."""

    def __init__(self, run: Run, sets: int, calls: int) -> None:
        self._run, self._sets, self._calls = run, sets, calls

    def launch(self, stream: Any) -> None:  # noqa: ARG002  a graph's signature; the stream is the current one
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
    """Time several contenders in turns, so that clocks and neighbours treat all alike.

    Each is called once on every set, to compile and to warm the pools, and is then captured into one graph of `calls`
    launches, which is replayed between two events. A replay's time / calls is one sample. Contenders that take
    more than `seconds` for all replays get fewer of them, but LEAST_REPLAYS.

    With `notes`, a contender that raises gets an entry there, and no time; without, the exception goes through.
    check: given a name and the bytes of what its graph alone has written, says what is wrong; then the contender raises that.
    """
    module = devices.cupy()
    stream = module.cuda.Stream(non_blocking=True)
    calls = max(sets, 10) if calls is None else calls
    with stream:
        graphs: dict[str, Any] = {}
        for name, run in runs.items():
            try:
                graphs[name], written = _graph(stream, name, run, sets, calls, notes)
                _sample(stream, graphs[name])  # the driver uploads a graph when it is first launched
                stream.synchronize()
                if check is not None and written is not None:
                    _check(stream, name, graphs[name], written, check)
            except Exception as error:
                graphs.pop(name, None)
                if notes is None:
                    raise
                notes[name] = _one_line(error)
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
    return {name: _timing(values) for name, values in samples.items()}


def _graph(
    stream: Any, name: str, run: Run, sets: int, calls: int, notes: dict[str, str] | None
) -> tuple[Any, Any]:
    """Return a graph of calls, and what the last one writes; None for the latter where there is no graph."""
    for i in range(sets):
        run(i)
    stream.synchronize()
    stream.begin_capture()
    try:
        for i in range(calls):
            written = run(i % sets)
    except Exception as error:
        with contextlib.suppress(Exception):  # what was invalid before is reported there again
            stream.end_capture()
        if notes is None:
            raise
        notes[name] = f"its launches are timed, not a graph: {_one_line(error)}"
        return _Calls(run, sets, calls), None
    return stream.end_capture(), written


def _check(stream: Any, name: str, graph: Any, written: Any, check: Callable[[str, Any], str]) -> None:
    """Replay a graph whose result was overwritten before. One that was captured on another stream is empty."""
    memory = peers.memory_of(written)
    memory.data.memset_async(POISON, memory.nbytes, stream)
    graph.launch(stream)
    stream.synchronize()
    fault = check(name, memory)
    if fault:
        raise RuntimeError(fault)


class _Agreement:
    """Says which contenders write nothing, or something else than ours, which is the first of them."""

    def __init__(self, what: Form, dtype: Dtype) -> None:
        self._dtype, self._compared = dtype, what.torch is not None and not what.random
        self._ours: Any = None

    def __call__(self, name: str, memory: Any) -> str:
        found = devices.cupy().asnumpy(memory[: COMPARED * self._dtype.itemsize])
        if (found == POISON).all():
            return "its graph writes nothing"
        if name.startswith(results.COPY) or not self._compared:
            return ""
        values = found.view(self._dtype)[None]
        if self._ours is None:
            self._ours = values.astype(np.float64)
        off = testing.error(values, self._ours)
        return "" if off <= AGREE[self._dtype.name] else f"its result is off by {off:.2g}"


def _sample(stream: Any, graph: Any) -> tuple[Any, Any]:
    """Enqueue a replay between two events.

    The device is held up meanwhile: the first event would else be stamped before the host has launched the graph.
    """
    begin, end = devices.cupy().cuda.Event(), devices.cupy().cuda.Event()
    _kernel(HOLD, "hold")((1,), (1,), (np.int64(HOLD_CYCLES),))
    begin.record(stream)
    graph.launch(stream)
    end.record(stream)
    return begin, end


def _elapsed(stream: Any, events: tuple[Any, Any]) -> float:
    stream.synchronize()
    return float(devices.cupy().cuda.get_elapsed_time(*events)) / 1e3


def _timing(samples: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
    return Timing(median, low, high)


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text.splitlines()[0][:200]


HOLD = r"""
extern "C" __global__ void hold(long long cycles) {
  for (long long begin = clock64(); clock64() - begin < cycles;) {}
}
"""

COPY = r"""
extern "C" __global__ void copy(const uint4* x, uint4* y, long long packs) {
  // PACKS packs a thread in flight; the block covers them contiguously
  long long base = (long long)blockIdx.x * blockDim.x * PACKS + threadIdx.x;
  uint4 v[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) if (base + i * blockDim.x < packs) v[i] = x[base + i * blockDim.x];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) if (base + i * blockDim.x < packs) y[base + i * blockDim.x] = v[i];
}
"""
# (packs a thread, threads a block), without cache hints: of 50 forms the fastest on an H200, 4.26 TB/s at 1.6 GB; which of
# the three differs by size. The driver's own copy is as fast up to there, and falls to two thirds above.
COPIES = ((1, 128), (1, 256), (2, 128))


@functools.cache
def _kernel(code: str, name: str, *options: str) -> Any:
    return devices.cupy().RawKernel(code, name, options=options)


def copy_runs(buffers: Sequence[tuple[Any, Any]]) -> dict[str, Run]:
    """Return the ways to copy that the limit is the best of: the driver's, and kernels of 16-byte accesses."""

    def driver(i: int) -> Any:
        x, y = buffers[i]
        y.data.copy_from_device_async(x.data, x.nbytes)
        return y

    def kernel(packs: int, block: int, i: int) -> Any:
        x, y = buffers[i]
        count = x.nbytes // 16
        grid = -(-count // (packs * block))
        _kernel(COPY, "copy", f"-DPACKS={packs}")((grid,), (block,), (x, y, np.int64(count)))
        return y

    kernels = {
        f"copy ({packs} x {block})": functools.partial(kernel, packs, block) for packs, block in COPIES
    }
    return {"copy (driver)": driver, **kernels}


# ---- points

COLS = (32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
WIDE = 65536  # from there on:
ROWS, WIDE_ROWS = 49152, 4096
ODD_COLS = (33, 127, 1000, 1023, 5001, 50257)
ODD = (*((8192, cols, 0) for cols in ODD_COLS), (8192, 1024, 1))
FEW = tuple((rows, cols, 0) for cols in (1 << 16, 1 << 20, 1 << 24) for rows in (1, 16, 64))
FEW_DTYPES = ("float16", "float32")
ALL_DTYPES = ("float16", "bfloat16", "float32")
QUICK_COLS = 1024  # of what is not an op alone
QUICK = (
    (ROWS, 64, 0),
    (ROWS, 1024, 0),
    (ROWS, 8192, 0),
    (WIDE_ROWS, 65536, 0),
    (8192, 1023, 0),
    (1, 1 << 20, 0),
)

# Where torch.compile is measured by default, for it takes seconds to compile: float16 and float32 at these shapes.
COMPILED_DTYPES = ("float16", "float32")
COMPILED_FEW = ((1, 1 << 20), (1, 1 << 24), (16, 1 << 20), (64, 1 << 20), (64, 65536))
COMPILED_WIDE = (64, 256, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, *ODD_COLS)
COMPILED_COLS = {
    "layer_norm": COMPILED_WIDE,
    "rms_norm": (128, 768, 1024, 4096, 8192),
    "softmax": COMPILED_WIDE,
    "log_softmax": (128, 768, 1024, 4096, 8192),
}


def is_compiled_by_default(point: Point) -> bool:
    """Say whether torch.compile is measured there unless it was asked for by name."""
    if point.dtype not in COMPILED_DTYPES or point.offset:
        return False
    if point.kind == "few":
        return point.op == "softmax" and (point.rows, point.cols) in COMPILED_FEW
    return point.cols in COMPILED_COLS.get(point.op, ())


def points(
    ops: Sequence[str],
    dtypes: Sequence[str],
    rows: Sequence[int] = (),
    cols: Sequence[int] = (),
    *,
    offset: int = 0,
    quick: bool = False,
) -> list[Point]:
    """Return what to measure: every combination of rows and cols if either is given, else the default sweep.

    Where rows are not given there are 49152, 4096 from 65536 columns on, and half as many until x and y are 6 GiB at most.
    Forms of ops have few shapes of their own, and are measured with what they are to be as fast as. Without dtypes, ops alone
    are measured in those of 2 and 4 bytes, forms and quick ones in float16 and float32.
    """
    found = []
    besides = [forms.form(op).beside for op in ops]
    for op in (*(each for each in besides if each and each not in ops), *ops):
        what = forms.form(op)
        for dtype in dtypes or (FEW_DTYPES if quick or not what.alone else ALL_DTYPES):
            size = dtype_of(dtype).itemsize
            if rows or cols or offset:
                shapes = [
                    (each or _rows_for(width, size), width, offset)
                    for width in cols or COLS
                    for each in rows or (0,)
                ]
            elif not (what.alone and op in ops):
                own = forms.EVEN + forms.LONG if what.alone else what.shapes
                shapes = [(_halved(rows, width, size), width, 0) for rows, width in own]
                shapes = [each for each in shapes if len(shapes) == 1 or each[1] == QUICK_COLS or not quick]
            elif quick:
                shapes = list(QUICK)
            else:
                shapes = [(_rows_for(width, size), width, 0) for width in COLS]
                shapes += ODD + (FEW if dtype in FEW_DTYPES else ())
                shapes = [(_halved(each, width, size), width, off) for each, width, off in shapes]
            found += [Point(op, dtype, *shape) for shape in shapes]
    return list(dict.fromkeys(found))


def _rows_for(cols: int, size: int) -> int:
    return _halved(WIDE_ROWS if cols >= WIDE else ROWS, cols, size)


def _halved(rows: int, cols: int, size: int) -> int:
    while rows > 1 and 2 * rows * cols * size > LARGEST_BYTES:
        rows //= 2
    return rows


# ---- one point


@dataclasses.dataclass(frozen=True)
class Set:
    """Arrays of one call, and as many bytes to copy: source and target lie in the memory of x and y."""

    arrays: Arrays
    copy: tuple[Any, Any]


def _sets(point: Point, bytes_moved: int, weights: Dtype | None = None) -> list[Set]:
    """Allocate the sets to rotate among, and fill what is read. weights: the dtype of parameters of columns, if it is not x's.

    One block of memory for each set: what is read from its start, what is written behind. The copy goes from the first to
    the second, and leaves the first as it was.
    """
    module = devices.cupy()
    dtype = dtype_of(point.dtype)
    given = forms.form(point.op).given(point.rows, point.cols, dtype)
    columns = {
        name: each._replace(dtype=weights or each.dtype)
        for name, each in given.items()
        if each.holds != "result" and len(each.shape) == 1
    }
    read = {name: each for name, each in given.items() if each.holds != "result" and name not in columns}
    written = {"y": given["y"]}  # further results are what calls allocate
    shift = point.offset * dtype.itemsize
    half = _aligned(bytes_moved // 2 + shift)
    behind = max(half, _extent(read, shift))
    one = behind + max(half, _extent(written, shift))
    count = sets_for(bytes_moved)
    column_bytes = _extent(columns, 0)
    rotated = sum(each.bytes for each in columns.values()) > ROTATED_SHARE * bytes_moved
    arena = module.empty(count * one, np.uint8)
    apart = module.empty((count if rotated else 1) * column_bytes, np.uint8)
    patterns = {name: _pattern(each, point.cols) for name, each in (read | columns).items()}
    found = []
    for i in range(count):
        own = column_bytes * (i if rotated else 0)
        arrays = {
            **_placed(read, arena, one * i, shift, patterns),
            **_placed(columns, apart, own, 0, patterns if i == 0 or rotated else {}),
            **_placed(written, arena, one * i + behind, shift, {}),
        }
        ends = (
            module.ndarray((half,), np.dtype(np.uint8), memptr=arena.data + one * i + at)
            for at in (0, behind)
        )
        source, target = ends
        found.append(Set({name: arrays[name] for name in given if name in arrays}, (source, target)))
    module.cuda.get_current_stream().synchronize()  # they are used on another stream
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _extent(given: Mapping[str, Given], shift: int) -> int:
    """Return the bytes that arrays take one behind the other."""
    return sum(_aligned(each.bytes + shift) for each in given.values())


def _placed(
    given: Mapping[str, Given], memory: Any, at: int, shift: int, patterns: Mapping[str, Any]
) -> Arrays:
    """Return arrays in the memory from `at` on, each `shift` bytes behind an aligned address, and filled with their patterns."""
    found: Arrays = {}
    for name, each in given.items():
        array = devices.cupy().ndarray(each.shape, each.dtype, memptr=memory.data + at + shift)
        if name in patterns:
            _fill(array, patterns[name])
        found[name] = array
        at += _aligned(each.bytes + shift)
    return found


def _pattern(given: Given, cols: int) -> Any:
    """Return bytes of what an array holds, on the device. Zeros would cost less power than the numbers that people have."""
    if given.holds == "lengths":
        numbers: Any = np.full(PATTERN, cols)
    elif given.holds == "ragged":
        numbers = forms.ragged(given.shape[0], cols).reshape(-1)
    elif given.holds == "mask":
        numbers = np.random.default_rng(0).random(PATTERN) < forms.KEPT
    else:
        numbers = _normal(PATTERN)
    return devices.cupy().asarray(numbers.astype(given.dtype).view(np.uint8))


@functools.cache
def _normal(count: int) -> Any:
    return np.random.default_rng(0).standard_normal(count)


def _fill(array: Any, pattern: Any) -> None:
    """Repeat the pattern by copies that double what is there: every CuPy can do that, in every dtype."""
    done = min(array.nbytes, pattern.nbytes)
    array.data.copy_from_device_async(pattern.data, done)
    while done < array.nbytes:
        more = min(done, array.nbytes - done)
        (array.data + done).copy_from_device_async(array.data, more)
        done += more


def measure(
    point: Point, contenders: Sequence[str] = (), variants: Sequence[str] = (), *, replays: int = REPLAYS
) -> Measured:
    """Time an op at a point, interleaved with peers, with forced variants and with copies of the same bytes."""
    what, dtype = forms.form(point.op), dtype_of(point.dtype)
    bytes_moved = what.bytes_moved(point.rows, point.cols, dtype)
    notes: dict[str, str] = {}
    timings: dict[str, Timing] = {}
    plan: dict[str, Any] = {}
    try:
        sets = _sets(point, bytes_moved)
        arrays = [each.arrays for each in sets]
        runs = {OURS: _ours(what, arrays, None)}
        runs.update({f"{OURS} {variant}": _ours(what, arrays, variant) for variant in variants})
        runs.update(copy_runs([each.copy for each in sets]))
        for name in contenders:
            try:
                run = peers.contender(name, what, arrays)
                runs.update({name: run} if run else {})
            except Exception as error:  # noqa: BLE001  a peer's faults are its own
                notes[name] = _one_line(error)
        timings = time_interleaved(
            runs,
            len(sets),
            replays=replays,
            calls=_calls_for(bytes_moved, len(sets)),
            seconds=REPLAY_SECONDS,
            notes=notes,
            check=_Agreement(what, dtype),
        )
        try:
            plan = planned(point)
        except Exception as error:  # noqa: BLE001  such as CompileError, which its own contender has met, too
            notes["plan"] = _one_line(error)
    except MemoryError as error:  # CuPy's, too
        notes[OURS] = _one_line(error)
    finally:
        runs, sets, arrays = {}, [], []
        peers.forget()
    return Measured(point, bytes_moved, timings, plan, notes)


def _ours(what: Form, sets: Sequence[Arrays], plan: str | Plan | None) -> Run:
    options = {} if plan is None else {"plan": plan}
    return peers.allocating(lambda arrays: what.call(arrays, out=arrays["y"], **options), sets)


def planned(point: Point) -> dict[str, Any]:
    """Return the plan at a point, with its kernel compiled and loaded. No device array is needed."""
    device, what = devices.present_device(), _spec(point)
    if isinstance(what.problem, Problem):
        return row_ops._prepare(device, what, None).plan.as_dict()  # noqa: SLF001  run() without its launch
    return explain.load(what, device)


def _spec(point: Point, weights: Dtype | None = None) -> Any:
    """Return a point's problem and structs. weights: the parameters' dtype, if it is not x's; of an op alone."""
    dtype, what = dtype_of(point.dtype), forms.form(point.op)
    if not what.alone:
        return explain.form_spec(what, point.rows, point.cols, dtype, point.offset)
    weights, op = weights or dtype, op_table.op(point.op)
    pointer = point.offset * dtype.itemsize
    x = View(pointer, (point.rows, point.cols), (point.cols * dtype.itemsize, dtype.itemsize), dtype)
    column = View(0, (point.cols,), (weights.itemsize,), weights)
    return row_spec(op.row, x, x, 1, dict.fromkeys(op.parameters, column))


def _compile_one(point: Point) -> None:
    with contextlib.suppress(Exception):  # whoever measures it will see it, and say so
        planned(point)


def compile_ahead(wanted: Sequence[Point], processes: int | None = None, seconds: float = 90) -> None:
    """Compile the points' kernels into CuPy's cache on disk, in several processes at once."""
    processes = processes or min(8, (os.cpu_count() or 2) // 2, len(wanted) // 8)
    if processes < 2:  # noqa: PLR2004
        return
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    with contextlib.suppress(Exception):  # nothing depends on it
        for _ in pool.map(_compile_one, wanted, timeout=seconds, chunksize=2):
            pass
    pool.shutdown(wait=True, cancel_futures=True)


def sweep(
    wanted: Sequence[Point],
    contenders: Sequence[str],
    variants: Sequence[str] = (),
    *,
    everywhere: bool = False,
    replays: int = REPLAYS,
    seconds: float = math.inf,
) -> Iterator[Measured]:
    """Measure points one after the other, until `seconds` have passed.

    torch.compile is left out where is_compiled_by_default() says so, unless `everywhere`.
    """
    end = time.monotonic() + seconds
    for point in wanted:
        if time.monotonic() > end:
            return
        names = [
            name for name in contenders if name != "compile" or everywhere or is_compiled_by_default(point)
        ]
        try:
            yield measure(point, names, variants, replays=replays)
        except Exception as error:
            raise RuntimeError(f"the device is lost since {point}: {_one_line(error)}") from error


# ---- the host

BATCH, BATCHES = 200, 31  # calls between synchronisations: fewer than a stream's queue holds
HOST_SHAPE = (128, 1024)
PROCESSES = 5  # for each kind of first call
FIRST_CALL = """
import time, cupy
x = cupy.zeros((64, 1024), "e")
cupy.cuda.get_current_stream().synchronize()
begin = time.perf_counter()
import cupynorm
CALL
print(time.perf_counter() - begin)
"""
FIRST_CALLS = {
    "first call": "cupynorm.layer_norm(x, x[0], x[0])",
    "first call of a fusion": "cupynorm.fuse(cupynorm.layer_norm, load=lambda x, r: x * 0.5 + r)(x, x, gamma=x[0])",
}
LAUNCH = "driver"  # a contender that checks nothing and launches nothing
NOTHING = 'extern "C" __global__ void nothing(long long) {}'


def host_times(contenders: Sequence[str], notes: dict[str, str]) -> Iterator[HostTime]:
    """Time calls on the host, contenders in turns; then the first call of a new process. Failures go to `notes`."""
    for op_name in ("layer_norm", "softmax"):
        op = op_table.op(op_name)
        label = ", ".join(("x", *op.parameters))
        arrays = _host_arrays(op.parameters)
        x, y, *columns = (arrays[name] for name in ("x", "y", *op.parameters))
        found: dict[tuple[str, str], Callable[[], Any]] = {
            ("", OURS): functools.partial(op.function, x, *columns),
            ("out", OURS): functools.partial(op.function, x, *columns, out=y),
        }
        if op.parameters:
            found["", LAUNCH] = _bare_launch()
        for name in contenders:
            try:
                calls = peers.calls(name, forms.form(op_name), arrays)
                for call in calls.values():
                    call()
                found.update({(what, name): call for what, call in calls.items()})
            except Exception as error:  # noqa: BLE001  a peer's faults are its own
                notes[f"{name} {op_name}"] = _one_line(error)
        for (what, name), timing in sorted(_time_host(found).items(), key=lambda item: item[0][0]):
            called = f"{op_name}({label}{', out=y' if what else ''})"
            yield HostTime("one launch" if name == LAUNCH else called, name, timing)
    for what in FIRST_CALLS:
        cold, warm = [], []
        for _ in range(PROCESSES):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(_first_call(what, folder))
                warm.append(_first_call(what, folder))
        yield HostTime(f"{what}, cold cache", OURS, _timing(cold))
        yield HostTime(f"{what}, warm cache", OURS, _timing(warm))


def _host_arrays(parameters: Sequence[str]) -> Arrays:
    module = devices.cupy()
    x = module.asarray(np.random.default_rng(0).standard_normal(HOST_SHAPE).astype(np.float16))
    columns = {name: x[row] for row, name in enumerate(parameters)}
    return {"x": x, **columns, "y": module.empty(HOST_SHAPE, np.float16)}


def _bare_launch() -> Callable[[], Any]:
    kernel = _kernel(NOTHING, "nothing")
    kernel((1,), (32,), (np.int64(0),))
    value = np.zeros(1, np.int64)
    parameters = np.array([value.ctypes.data], np.uint64)
    stream = devices.cupy().cuda.get_current_stream().ptr
    launch, pointer, address = devices.driver().launchKernel, kernel.kernel.ptr, parameters.ctypes.data

    def bare(_keep: Any = (value, parameters)) -> None:
        launch(pointer, 1, 1, 1, 32, 1, 1, 0, stream, address, 0)

    return bare


def _time_host(calls: Mapping[tuple[str, str], Callable[[], Any]]) -> dict[tuple[str, str], Timing]:
    stream = devices.cupy().cuda.get_current_stream()
    samples: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for batch in range(BATCHES + 2):
            for name, call in calls.items():
                stream.synchronize()
                begin = time.perf_counter()
                for _ in range(BATCH):
                    call()
                seconds = (time.perf_counter() - begin) / BATCH
                if batch > 1:  # the first two warm up
                    samples[name].append(seconds)
    finally:
        gc.enable()
    stream.synchronize()
    return {name: _timing(values) for name, values in samples.items()}


def _first_call(what: str, cache: str) -> float:
    """Return how long a new process takes from CuPy's import and a context to its first launch."""
    environment = {**os.environ, "CUPY_CACHE_DIR": cache, "CUPYNORM_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    path = os.pathsep.join([str(Path(cupynorm.__file__).parents[1]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(  # noqa: S603  this interpreter, a program of ours
        [sys.executable, "-c", FIRST_CALL.replace("CALL", FIRST_CALLS[what])],
        env={**environment, "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        check=False,
    )
    return float(done.stdout) if done.returncode == 0 else math.nan


# ---- the whole


def new_report() -> Report:
    """Return an empty report of this machine. Raises NoDeviceError."""
    limits = devices.present_limits()
    versions = {
        "cupynorm": cupynorm.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    versions["cupy"] = devices.cupy().__version__
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    version = devices.cupy().cuda.runtime.driverGetVersion()
    versions["driver_cuda"] = f"{version // 1000}.{version % 1000 // 10}"
    versions["driver"] = devices.driver_version()
    about = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "device": {
            "name": limits.name,
            "compute_capability": limits.compute_capability,
            "sm_count": limits.sm_count,
            "l2_bytes": limits.l2_bytes,
        },
    }
    return Report(about)
