"""The benchmark without a device: times by a clock of its own, points, targets, files, plots, and the command."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynorm import cli
from cupynorm.catalog import forms, op_table
from cupynorm.runtime import devices, nvrtc
from cupynorm.tools import bench, bench_points, buffers, host_calls, peers, plots, results, saved, timing
from cupynorm.tools.results import Measured, Point, Report, Timing
from tests import command_runner
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

OPS = [op.name for op in op_table.OPS]
DTYPES = ("float16", "bfloat16", "float32")
H200 = Path(__file__).parents[2] / "benchmarks" / "h200"


class Clock:
    """A device that does nothing but take time: at once, or in a graph when that is launched."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: float | None = None

    def spend(self, seconds: float) -> None:
        if self.captured is None:
            self.now += seconds
        else:
            self.captured += seconds


class Graph:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def launch(self, _stream: Any) -> None:
        self.clock.spend(self.seconds)


class Stream:
    def __init__(self, clock: Clock, **_: Any) -> None:
        self.clock, self.ptr = clock, 7

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        self.clock.captured = 0.0

    def end_capture(self) -> Graph:
        seconds, self.clock.captured = self.clock.captured, None
        assert seconds is not None
        return Graph(self.clock, seconds)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, math.nan

    def record(self, _stream: Any) -> None:
        self.at = self.clock.now


class Pointer:
    def __init__(self, memory: np.ndarray, at: int = 0) -> None:
        self.memory, self.at, self.ptr = memory, at, at

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.memory, self.at + more)

    def copy_from_device_async(self, source: Pointer, size: int) -> None:
        assert source.at + size <= source.memory.size
        assert self.at + size <= self.memory.size
        self.memory[self.at : self.at + size] = source.memory[source.at : source.at + size]

    def memset_async(self, value: int, size: int, _stream: Any) -> None:
        self.memory[self.at : self.at + size] = value


class Array:
    def __init__(self, shape: Any, dtype: Any, memptr: Pointer | None = None) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.data = memptr or Pointer(np.zeros(self.nbytes, np.uint8))
        assert self.data.at + self.nbytes <= self.data.memory.size

    def get(self) -> np.ndarray:
        return self.data.memory[self.data.at :][: self.nbytes].view(self.dtype).reshape(self.shape)


@pytest.fixture
def clock(monkeypatch):
    """A clock, behind as much of CuPy as the benchmark uses."""
    clock = Clock()

    def asarray(host: np.ndarray) -> Array:
        made = Array(host.shape, host.dtype)
        made.get()[...] = host
        return made

    cuda = types.SimpleNamespace(
        Stream=lambda **options: Stream(clock, **options),
        Event=lambda: Event(clock),
        get_elapsed_time=lambda begin, end: (end.at - begin.at) * 1e3,
        get_current_stream=lambda: Stream(clock),
        runtime=types.SimpleNamespace(driverGetVersion=lambda: 13020),
    )
    module = types.SimpleNamespace(
        __version__="14.2.0",
        cuda=cuda,
        ndarray=Array,
        empty=Array,
        asarray=asarray,
        RawKernel=lambda code, name, options=(): lambda *_: clock.spend(1e-4 if name == "hold" else 2e-6),
        get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
    )
    monkeypatch.setattr(devices, "cupy", lambda: module)
    timing.kernel.cache_clear()
    yield clock
    timing.kernel.cache_clear()


def taking(clock: Clock, seconds: float):
    return lambda i: clock.spend(seconds)


# ---- time


def test_a_time_is_that_of_one_call_without_what_holds_the_device_up(clock):
    times = timing.time_interleaved({"one": taking(clock, 3e-6), "two": taking(clock, 5e-6)}, 4, calls=8)

    assert times["one"].median == pytest.approx(3e-6)
    assert times["two"].median == pytest.approx(5e-6)
    assert times["one"].low == pytest.approx(times["one"].high)


def test_every_set_is_visited_before_and_inside_the_graph(clock):
    visited = []

    timing.time_interleaved({"one": visited.append}, 3, calls=6)

    assert visited == [0, 1, 2] + [0, 1, 2] * 2


def test_a_contender_that_fails_leaves_the_others_alone(clock):
    def fail(i):
        raise ValueError("a reason\nand a long text")

    notes: dict[str, str] = {}
    times = timing.time_interleaved({"bad": fail, "good": taking(clock, 1e-6)}, 2, notes=notes)

    assert list(times) == ["good"]
    assert notes == {"bad": "ValueError: a reason"}
    with pytest.raises(ValueError, match="a reason"):
        timing.time_interleaved({"bad": fail}, 2)


def test_a_contender_that_cannot_be_captured_is_timed_by_its_launches(clock):
    def run(i):
        if clock.captured is not None:
            raise RuntimeError("not while capturing")
        clock.spend(4e-6)

    notes: dict[str, str] = {}
    times = timing.time_interleaved({"one": run}, 2, notes=notes)

    assert times["one"].median == pytest.approx(4e-6)
    assert notes["one"] == "its launches are timed, not a graph: RuntimeError: not while capturing"


@pytest.mark.parametrize(("seconds", "launches"), [(math.inf, 21), (1.0, 21), (1e-9, 6)])
def test_what_is_slow_is_replayed_less_often(clock, monkeypatch, seconds, launches):
    launched = []
    monkeypatch.setattr(Graph, "launch", lambda self, _: launched.append(clock.spend(self.seconds)))

    timing.time_interleaved({"one": taking(clock, 1e-3)}, 2, replays=21, calls=2, seconds=seconds)

    assert len(launched) == launches + 2  # one uploads, one says how long it takes


def test_quartiles():
    assert timing.timing_of([1, 2, 3, 4, 5, 6, 7]) == Timing(4, 2, 6)
    assert timing.timing_of([3]) == Timing(3, 3, 3)


@pytest.mark.parametrize("size", [1, 500_000, 6 << 20, 100 << 20, 1 << 28, 6 << 30])
def test_a_graph_visits_all_sets_equally_often_and_is_neither_short_nor_long(size):
    sets = buffers.sets_for(size)
    calls = buffers.calls_for(size, sets)

    assert calls % sets == 0
    assert calls <= buffers.MOST_CALLS
    assert sets == buffers.MOST_SETS or sets * size >= buffers.ROTATION_BYTES
    assert calls == buffers.MOST_CALLS or calls * size >= buffers.GRAPH_BYTES


# ---- points


def test_the_default_sweep_is_the_table():
    found = bench_points.points(OPS, DTYPES)

    assert len(found) == len(set(found))
    assert {each.op for each in found} == set(OPS)
    assert Point("softmax", "float16", 49152, 32768) in found
    assert Point("softmax", "float32", 24576, 32768) in found
    assert Point("softmax", "float32", 2048, 262144) in found
    assert Point("layer_norm", "bfloat16", 8192, 50257) in found
    assert any(each.offset for each in found)
    few = {(each.rows, each.cols) for each in found if each.kind == "few" and each.dtype == "float16"}
    assert {(1, 1 << 16), (64, 1 << 24)} <= few
    assert not any(each.kind == "few" for each in found if each.dtype == "bfloat16")
    assert all(
        2 * each.rows * each.cols * (4 if each.dtype == "float32" else 2) <= bench_points.LARGEST_BYTES
        for each in found
    )


def test_torch_compile_is_not_everywhere_by_default():
    found = [each for each in bench_points.points(OPS, DTYPES) if bench_points.is_compiled_by_default(each)]

    assert 80 < len(found) < 120
    assert {each.dtype for each in found} == {"float16", "float32"}
    assert {each.op for each in found} == set(OPS)


def test_rows_and_columns_that_are_given_are_combined():
    found = bench_points.points(["softmax"], ["float16"], rows=(3, 5), cols=(64, 70000), offset=2)
    default = bench_points.points(["softmax"], ["float16"], cols=(64, 70000))

    assert [(each.rows, each.cols, each.offset) for each in found] == [
        (3, 64, 2),
        (5, 64, 2),
        (3, 70000, 2),
        (5, 70000, 2),
    ]
    assert [each.rows for each in default] == [49152, 4096]
    assert len(bench_points.points(["softmax"], ["float16"], quick=True)) == len(bench_points.QUICK)


def test_forms_have_points_of_their_own_and_come_with_what_they_are_to_be_as_fast_as():
    fused = bench_points.points(["layer_norm/fuse"], ["float16"])
    heads = bench_points.points(["merge_heads"], [], quick=True)

    assert [(each.op, each.rows, each.cols) for each in fused] == [
        (op, rows, cols)
        for op in ("layer_norm", "layer_norm/fuse")
        for rows, columns in (
            (49152, (128, 512, 1024, 2048, 4096, 8192)),
            (4096, (16384, 20480, 32768, 50257, 131072)),
        )
        for cols in columns
    ]
    assert [(each.rows, each.cols) for each in heads] == [(4096, 768)] * 2
    assert [each.cols for each in bench_points.points(["softmax/bias"], ["float32"], quick=True)] == [1024]
    given = bench_points.points(["layer_norm/fuse", "layer_norm"], ["float16"], cols=(64,))
    assert [each.op for each in given] == ["layer_norm/fuse", "layer_norm"]
    assert not any(map(bench_points.is_compiled_by_default, fused[11:]))
    by_default = bench_points.points(list(forms.FORMS), [])
    assert {each.dtype for each in by_default if each.op == "softmax"} == {"float16", "bfloat16", "float32"}
    assert {each.dtype for each in by_default if each.op == "dropout"} == {"float16", "float32"}
    assert {each.op for each in by_default} == set(forms.FORMS)


def test_every_point_has_one_target():
    for each in bench_points.points(OPS, DTYPES):
        assert sum(target.covers(each) for target in results.TARGETS) == 1, each


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((49152, 64, 0), "32, 64"),
        ((49152, 256, 0), "128, 256"),
        ((49152, 16384, 0), "512 to 16384"),
        ((49152, 32768, 0), "32768"),
        ((4096, 65536, 0), "65536 to 262144"),
        ((8192, 1000, 0), "odd or misaligned, >= 1000"),
        ((8192, 1024, 1), "odd or misaligned, >= 1000"),
        ((8192, 127, 0), "odd or misaligned, < 1000"),
        ((64, 65536, 0), "1 to 64 rows x 64K to 16M"),
    ],
)
def test_target(shape, columns):
    assert results.target_of(Point("softmax", "float16", *shape)).columns == columns


# ---- one point


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("rows", "cols"), [(70, 33), (1, 1 << 16)])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm/sum", "layer_norm/int8", "softmax/where"])
def test_buffers_are_filled_apart_and_the_copy_spares_what_is_read(
    clock, monkeypatch, name, rows, cols, offset
):
    monkeypatch.setattr(buffers, "ROTATION_BYTES", 1 << 20)
    monkeypatch.setattr(buffers, "PATTERN", 1 << 10)
    point = Point(name, "float16", rows, cols, offset)
    moved = forms.form(name).bytes_moved(rows, cols, "float16")

    sets = buffers.allocate(point, moved)

    assert len(sets) == buffers.sets_for(moved)
    pattern = np.random.default_rng(0).standard_normal(1 << 10).astype(np.float16)
    memory = set()
    for each in sets:
        arrays = dict(each.arrays)
        y = arrays.pop("y")
        source, target = each.copy
        assert source.data.ptr + source.nbytes <= target.data.ptr
        assert moved <= source.nbytes + target.nbytes < moved + 4 * buffers.ALIGNMENT
        assert y.data.ptr % buffers.ALIGNMENT == 2 * offset
        y.get()[...] = 0
        target.get()[...] = 0
        for which, array in arrays.items():
            if which == "where":
                assert 0.5 < array.get().mean() < 0.9
            else:
                np.testing.assert_array_equal(array.get().ravel(), np.resize(pattern, array.get().size))
            if array.get().ndim > 1:
                assert array.data.ptr % buffers.ALIGNMENT == 2 * offset
                memory.add(array.data.ptr)
    assert len(memory) == len(sets) * sum(array.get().ndim > 1 for array in arrays.values())
    gammas = {each.arrays["gamma"].data.ptr for each in sets if "gamma" in each.arrays}
    assert len(gammas) == ("gamma" in arrays) * (len(sets) if rows == 1 else len(gammas))


def test_every_form_has_its_arrays(clock, monkeypatch):
    monkeypatch.setattr(buffers, "ROTATION_BYTES", 1 << 10)
    monkeypatch.setattr(buffers, "PATTERN", 1 << 6)
    for name, what in forms.FORMS.items():
        given = what.given(8, 64, np.dtype(np.float32))

        (first, *_) = buffers.allocate(Point(name, "float32", 8, 64), what.bytes_moved(8, 64, "float32"))

        assert {name: (each.shape, each.dtype) for name, each in first.arrays.items()} == {
            name: (each.shape, each.dtype)
            for name, each in given.items()
            if each.holds != "result" or name == "y"
        }
        if name.endswith("/lengths"):
            assert (first.arrays["lengths"].get() == 64).all()
        if name.endswith("/ragged"):
            np.testing.assert_array_equal(first.arrays["lengths"].get(), forms.ragged(1, 64))


@pytest.mark.parametrize("rows", [7, 70])
def test_gradients_are_measured_with_statistics_and_results_of_their_rows(clock, monkeypatch, rows):
    monkeypatch.setattr(buffers, "ROTATION_BYTES", 1 << 10)
    monkeypatch.setattr(buffers, "PATTERN", 1 << 10)  # 31 rows

    def arrays(name):
        sets = buffers.allocate(Point(name, "float32", rows, 33), 4 * rows * 33)
        return {key: each.get().astype(np.float64) for key, each in sets[-1].arrays.items()}

    given = arrays("layer_norm_backward")
    assert abs(np.corrcoef(given["dy"].ravel(), given["x"].ravel())[0, 1]) < 0.2
    np.testing.assert_allclose(given["mean"], given["x"].mean(-1), atol=1e-6)
    np.testing.assert_allclose(given["rstd"], 1 / np.sqrt(given["x"].var(-1) + 1e-5), rtol=1e-6)
    given = arrays("rms_norm_backward_from_y")
    np.testing.assert_allclose(np.square(given["x"] / given["gamma"]).mean(-1), 1, rtol=1e-4)
    for mask in ("", "/lengths"):
        np.testing.assert_allclose(arrays("softmax_backward" + mask)["x"].sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(np.exp(arrays("log_softmax_backward" + mask)["x"]).sum(-1), 1, rtol=1e-5)
    given = arrays("softmax_backward/where")
    np.testing.assert_allclose((given["x"] * given["where"]).sum(-1), 1, rtol=1e-5)


def test_parameters_may_have_a_dtype_of_their_own(clock, monkeypatch):
    monkeypatch.setattr(buffers, "ROTATION_BYTES", 1 << 16)
    monkeypatch.setattr(buffers, "PATTERN", 1 << 6)

    sets = buffers.allocate(Point("layer_norm", "float16", 70, 33), 70 * 33 * 4, np.dtype(np.float32))

    pattern = np.random.default_rng(0).standard_normal(1 << 6).astype(np.float32)
    for each in sets:
        assert each.arrays["x"].dtype == np.float16
        for name in ("gamma", "beta"):
            np.testing.assert_array_equal(each.arrays[name].get(), pattern[:33])


class Result(np.ndarray):
    """What a contender wrote, as memory that can be set to bytes."""

    @property
    def data(self):  # type: ignore[override]
        return Pointer(self)


def written(values, count: int = 4):
    return np.resize(np.asarray(values, np.float16), count).view(Result)


@pytest.mark.parametrize(
    ("theirs", "note"),
    [
        ([1.0, 2.0], ""),
        ([1.001, 2.0], ""),
        ([1.0, 3.0], "RuntimeError: its result is off by 0.45"),
        ([np.nan, 2.0], "RuntimeError: its result is off by inf"),
        (None, "RuntimeError: its graph writes nothing"),
    ],
)
def test_a_graph_that_is_empty_or_wrong_has_no_time(clock, monkeypatch, theirs, note):
    class Writing(Graph):
        def launch(self, stream):
            super().launch(stream)
            for write in self.writes:
                write()

    def contender(values):
        memory = written([7.0])

        def run(i):
            clock.spend(1e-6)
            if values is not None:
                pending.append(lambda: memory.__setitem__(slice(None), written(values)))
            return memory

        return run

    pending: list[Any] = []

    def end_capture(self):
        seconds, self.clock.captured = self.clock.captured, None
        graph = Writing(self.clock, seconds)
        graph.writes = pending[:]
        pending.clear()
        return graph

    monkeypatch.setattr(Stream, "end_capture", end_capture)
    monkeypatch.setattr(
        Stream, "begin_capture", lambda self: (pending.clear(), setattr(clock, "captured", 0.0))
    )
    monkeypatch.setattr(devices.cupy(), "asnumpy", np.asarray, raising=False)
    notes: dict[str, str] = {}

    found = timing.time_interleaved(
        {"cupynorm": contender([1.0, 2.0]), "torch": contender(theirs)},
        2,
        notes=notes,
        check=bench._Agreement(forms.form("softmax"), np.dtype(np.float16)),
    )

    assert notes == ({"torch": note} if note else {})
    assert list(found) == ["cupynorm", "torch"][: 1 + (not note)]


def test_what_draws_other_numbers_is_not_compared():
    agreement = bench._Agreement(forms.form("dropout"), np.dtype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "cupy", lambda: types.SimpleNamespace(asnumpy=np.asarray))

        found = [
            agreement(name, np.full(8, value, np.uint8)) for name, value in (("a", 1), ("b", 2), ("c", 255))
        ]

    assert found == ["", "", "its graph writes nothing"]


def test_a_point_is_measured_beside_copies_peers_and_variants(clock, monkeypatch):
    monkeypatch.setattr(buffers, "ROTATION_BYTES", 1 << 16)
    monkeypatch.setattr(
        bench, "ours", lambda op, inputs, plan: taking(clock, 2.5e-6 if plan is None else 9e-6)
    )
    monkeypatch.setattr(bench, "planned", lambda point: {"variant": "warp"})

    def contender(name, op, inputs):
        if name == "triton":
            raise ValueError("too wide")
        return taking(clock, 5e-6)

    monkeypatch.setattr(peers, "contender", contender)
    monkeypatch.setattr(timing, "_check", lambda *_: None)  # nothing here writes anything
    found = bench.measure(Point("softmax", "float16", 64, 64), ["torch", "triton"], ["block"])

    assert list(found.timings) == ["cupynorm", "cupynorm block", "copy (driver)", *KERNEL_COPIES, "torch"]
    assert found.copy == 0  # the driver's copy takes no time here
    assert found.plan == {"variant": "warp"}
    assert found.notes == {"triton": "ValueError: too wide"}


KERNEL_COPIES = ["copy (1 x 128)", "copy (1 x 256)", "copy (2 x 128)"]


def test_ours_writes_to_y_in_the_variant_that_is_forced(monkeypatch):
    called = []
    what = types.SimpleNamespace(call=lambda arrays, **options: called.append((arrays, options)))

    bench.ours(what, [{"x": "x", "y": "y"}], "block")(0)

    assert called == [({"x": "x", "y": "y"}, {"out": "y", "plan": "block"})]


def test_a_point_without_memory_or_plan_says_so(clock, monkeypatch):
    def none(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(buffers, "allocate", none)

    found = bench.measure(Point("softmax", "float16", 64, 64))

    assert not found.timings
    assert results.missed(found) == ["not timed: MemoryError: out of memory"]
    assert "not timed" in results.line(found)


def test_a_sweep_ends_in_time_and_leaves_torch_compile_out(monkeypatch):
    asked = []

    def measure(point, names, variants, *, replays):
        asked.append(names)
        return Measured(point, 1, {})

    monkeypatch.setattr(bench, "measure", measure)
    points = [Point("softmax", "bfloat16", 8, 64), Point("softmax", "float16", 49152, 64)]

    list(bench.sweep(points, ["torch", "compile"]))
    list(bench.sweep(points, ["compile"], everywhere=True))

    assert asked == [["torch"], ["torch", "compile"], ["compile"], ["compile"]]
    assert not list(bench.sweep(points, [], seconds=-1))


def test_a_sweep_names_the_point_that_lost_the_device(monkeypatch):
    def measure(*_, **__):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(bench, "measure", measure)

    with pytest.raises(RuntimeError, match="failed since softmax float16 8 x 64: RuntimeError: an illegal"):
        list(bench.sweep([Point("softmax", "float16", 8, 64)], []))


def test_the_plan_is_known_without_an_array_and_is_that_of_a_call(simulated):
    from cupynorm import softmax
    from cupynorm.invoke import row_ops

    plan = bench.planned(Point("softmax", "float32", 6, 40))
    softmax(simulated.cupy.asarray(np.zeros((6, 40), np.float32)))

    assert [each.plan.as_dict() for each in row_ops._launches.values()] == [plan]
    assert bench.planned(Point("softmax", "float32", 6, 40, 1))["vector"] == 1


def test_few_points_are_not_compiled_ahead(monkeypatch):
    monkeypatch.setattr(bench, "ProcessPoolExecutor", None)

    bench.compile_ahead(bench_points.points(["softmax"], ["float16"], cols=(64,)))


def test_many_points_are_compiled_ahead_in_processes(monkeypatch):
    compiled = []

    class Pool:
        def __init__(self, processes, **_):
            assert processes == 2

        def map(self, function, points, **_):
            yield from map(function, points)
            raise TimeoutError

        def shutdown(self, **_): ...

    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(bench, "planned", compiled.append)
    points = bench_points.points(["softmax"], ["float16"])

    bench.compile_ahead(points, 2)

    assert compiled == points


def test_what_does_not_compile_ahead_is_left_to_who_measures_it(monkeypatch):
    monkeypatch.setattr(bench, "planned", lambda point: 1 / 0)

    assert bench._compile_one(Point("softmax", "float16", 8, 64)) is None


# ---- peers


def test_missing_peers_say_what_they_need(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "triton" else name)

    assert peers.missing() == {"compile": "triton not installed", "triton": "triton not installed"}


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_composition_for_cupy_is_the_op(monkeypatch, op, dtype):
    monkeypatch.setattr(devices, "cupy", lambda: np)
    rng = np.random.default_rng(0)
    entry = op_table.op(op)
    x = rng.standard_normal((4, 40)).astype(dtype)
    columns = {name: rng.standard_normal(40).astype(dtype) for name in entry.parameters}

    (run,) = peers.calls("cupy", forms.form(op), {"x": x, **columns, "y": None}).values()

    assert run().dtype == dtype
    np.testing.assert_allclose(run(), entry.reference(x, **columns)[0], rtol=2e-3, atol=2e-3)


class Tensor:
    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape

    def view(self, dtype: str) -> Tensor:
        return Tensor(self.array.view(dtype))

    def numel(self) -> int:
        return int(self.array.size)


@pytest.fixture
def torch(monkeypatch, clock):
    """As much of PyTorch as the peers use; it notes on which stream it was called."""
    streams: list[int] = []

    @contextlib.contextmanager
    def stream(ptr):
        streams.append(ptr)
        yield

    def softmax(x, axis, out=None):
        value = np.exp(x.array) / np.exp(x.array).sum(axis, keepdims=True)
        if out is None:
            return Tensor(value)
        out.array[...] = value
        return out

    module: Any = types.ModuleType("torch")
    module.streams = streams
    module.float32 = "f4"
    module.softmax = module.log_softmax = softmax
    module.nn = types.SimpleNamespace(
        functional=types.SimpleNamespace(
            layer_norm=lambda x, shape, gamma, beta, eps: Tensor(x.array * gamma.array + beta.array),
            rms_norm=lambda x, shape, gamma, eps: Tensor(x.array * gamma.array),
        )
    )
    module.compile = lambda function, dynamic: function
    module.cuda = types.SimpleNamespace(
        ExternalStream=lambda ptr, device: ptr, stream=stream, empty_cache=lambda: streams.append(-1)
    )
    module.from_dlpack = Tensor
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(devices, "present_device", lambda: 0)
    return module


def arrays_of(op: str) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    return {"x": x, **dict(zip(op_table.op(op).parameters, x, strict=False)), "y": np.zeros_like(x)}


def test_torch_writes_to_y_on_the_current_stream_where_it_can(torch):
    sets = [arrays_of("softmax"), arrays_of("softmax")]

    peers.contender("torch", forms.form("softmax"), sets)(1)

    np.testing.assert_allclose(sets[1]["y"].sum(1), 1, rtol=1e-6)
    assert not sets[0]["y"].any()
    assert torch.streams == [7]


@pytest.mark.parametrize("name", ["torch", "compile"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_torch_allocates_where_it_must(torch, name, op):
    sets = [arrays_of(op)]

    run = peers.contender(name, forms.form(op), sets)
    run(0)
    run(0)

    assert not sets[0]["y"].any()
    assert torch.streams == [7, 7]


def test_triton_launches_a_program_a_row(torch, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append((grid, arguments[2:], options))

    monkeypatch.setattr(peers, "_triton_kernels", lambda: {"softmax": Kernel()})

    peers.contender("triton", forms.form("softmax"), [arrays_of("softmax")])(0)

    assert launched == [((3,), (8,), {"block": 8, "num_warps": 4})]
    with pytest.raises(ValueError, match="65536 columns"):
        peers._triton_function("softmax", 65537)


def test_triton_kernels_are_one_for_each_op(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(jit=lambda kernel: kernel))
    monkeypatch.setitem(sys.modules, "triton.language", types.SimpleNamespace(constexpr=int))

    assert list(peers._triton_kernels.__wrapped__()) == OPS


def test_host_calls_are_those_that_a_peer_offers(torch, monkeypatch):
    monkeypatch.setattr(peers, "_triton_kernels", lambda: {"softmax": None})

    def calls(name: str, op: str) -> dict[str, Any]:
        return peers.calls(name, forms.form(op), arrays_of(op))

    assert list(calls("torch", "softmax")) == ["", "out"]
    assert list(calls("torch", "layer_norm")) == [""]
    assert list(calls("compile", "softmax")) == [""]
    assert list(calls("triton", "softmax")) == ["out"]
    calls("torch", "softmax")["out"]()


@pytest.mark.parametrize(
    ("name", "form"), [("cupy", "bias_gelu"), ("triton", "softmax/where"), ("torch", "layer_norm/int8")]
)
def test_a_peer_without_such_a_thing_is_left_out(torch, name, form):
    assert peers.contender(name, forms.form(form), []) is None


def test_memory_goes_back_after_each_point(torch, monkeypatch):
    reset = []
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.SimpleNamespace(reset=lambda: reset.append(1)))

    peers.forget()

    assert torch.streams == [-1]
    assert reset == [1]


# ---- the host


def test_host_times_are_of_ours_the_peers_and_the_bare_launch(clock, monkeypatch):
    def calls(name, op, arguments):
        if op.name == "softmax":
            raise RuntimeError("no")
        return {"": lambda: None}

    monkeypatch.setattr(host_calls, "BATCH", 2)
    monkeypatch.setattr(host_calls, "_host_arrays", lambda parameters: arrays_of("layer_norm"))
    monkeypatch.setattr(host_calls, "_bare_launch", lambda: lambda: None)
    monkeypatch.setattr(host_calls, "_first_call", lambda what, folder: 0.15)
    monkeypatch.setattr(peers, "calls", calls)
    notes: dict[str, str] = {}

    found = list(host_calls.host_times(["torch"], notes))

    assert [(each.call, each.contender) for each in found] == [
        ("layer_norm(x, gamma, beta)", "cupynorm"),
        ("one launch", "driver"),
        ("layer_norm(x, gamma, beta)", "torch"),
        ("layer_norm(x, gamma, beta, out=y)", "cupynorm"),
        ("softmax(x)", "cupynorm"),
        ("softmax(x, out=y)", "cupynorm"),
        ("first call, cold cache", "cupynorm"),
        ("first call, warm cache", "cupynorm"),
        ("first call of a fusion, cold cache", "cupynorm"),
        ("first call of a fusion, warm cache", "cupynorm"),
    ]
    assert notes == {"torch softmax": "RuntimeError: no"}
    assert [each.missed() for each in found[-4:]] == [False, True, False, False]
    text = "\n".join(results.host_table(found))
    assert "10000: missed" in text
    assert "200000: met" in text


def test_a_first_call_that_fails_has_no_time(monkeypatch, tmp_path):
    monkeypatch.setattr(host_calls, "FIRST_CALL", "import sys; sys.exit(1)")

    assert math.isnan(host_calls._first_call("first call", str(tmp_path)))


def test_a_first_call_is_a_new_process_with_that_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(
        host_calls, "FIRST_CALL", "import os, cupynorm; print(len(os.environ['CUPY_CACHE_DIR']))"
    )

    assert host_calls._first_call("first call", str(tmp_path)) == len(str(tmp_path))


@pytest.mark.parametrize("what", host_calls.FIRST_CALLS)
def test_a_first_call_is_a_call(what):
    import cupynorm

    exec(host_calls.FIRST_CALLS[what], {"cupynorm": cupynorm, "x": np.ones((3, 4), np.float16)})  # noqa: S102


# ---- results


def measured(share=1.0, peer=None, point=None, **timings) -> Measured:
    times = {"cupynorm": 1e-3 / share, "copy (driver)": 2e-3, "copy (1 x 128)": 1e-3}
    if peer is not None:
        times["torch"] = 1e-3 / peer
    found = {name: Timing(each, each * 0.99, each * 1.01) for name, each in times.items()}
    point = point or Point("softmax", "float16", 49152, 1024)
    return Measured(point, 4_000_000_000, found, {"variant": "block"}, {"triton": "a note"})


def report() -> Report:
    ops = ("layer_norm", "softmax")
    points = [
        measured(0.9 + cols / 1e6, 0.5, Point(op, dtype, 49152, cols))
        for op in ops
        for dtype in ("float16", "float32")
        for cols in (64, 1024, 32768)
    ]
    host = [results.HostTime("softmax(x)", "cupynorm", Timing(4e-6, 3e-6, 5e-6))]
    return Report({"date": "2026-01-01", "versions": {}, "device": {"name": "a device"}}, points, host, 3)


def test_the_copy_is_the_best_of_all():
    found = measured(0.5, 0.25)

    assert found.copy == 1e-3
    assert found.share() == 0.5
    assert found.share("torch") == 0.25
    assert math.isnan(found.share("cupy"))


def test_long_rows_of_forms_have_targets_of_their_own():
    def share(op, cols):
        return results.target_of(Point(op, "float16", 4096, cols)).share

    assert (share("softmax/where", 8192), share("softmax/where", 16384)) == (0.95, 0.93)
    assert (share("add_layer_norm", 4096), share("add_layer_norm", 50257)) == (0.98, 0.9)
    assert share("layer_norm/int8", 50257) == 0.9


@pytest.mark.parametrize(
    ("op", "dtype", "cols", "wanted"),
    [
        ("layer_norm_backward", "float16", 128, 0.85),
        ("layer_norm_backward", "float32", 128, 0.90),
        ("rms_norm_backward", "bfloat16", 8192, 0.95),
        ("add_layer_norm_backward", "float32", 77, 0.90),
        ("add_layer_norm_backward", "float32", 1001, 0.88),
        ("softmax_backward/where", "float16", 32768, 1.02),
        ("cross_entropy/grad", "float16", 50257, 0.95),
        ("logsumexp", "float32", 50257, 0.97),
    ],
)
def test_gradients_and_losses_have_targets_by_columns(op, dtype, cols, wanted):
    assert results.target_of(Point(op, dtype, 49152, cols)).share == wanted


@pytest.mark.parametrize(
    ("share", "peer", "expected"),
    [
        (0.99, None, []),
        (0.97, None, ["0.98 wanted"]),
        (0.985, 0.99, []),  # noise
        (0.98, 1.4, ["0.70 of torch"]),
        (0.5, 1.0, ["0.98 wanted", "0.50 of torch"]),
    ],
)
def test_missed_targets_say_by_how_much(share, peer, expected):
    assert results.missed(measured(share, peer)) == expected


def test_forced_variants_are_no_peers():
    found = measured(0.99)
    found = Measured(found.point, 1, {**found.timings, "cupynorm warp": Timing(1e-9, 1e-9, 1e-9)})

    assert results.missed(found) == []


def test_peers_of_another_run_count_by_their_share(tmp_path):
    path = tmp_path / "peers.json"
    entry = {
        "op": "softmax",
        "dtype": "float16",
        "rows": 49152,
        "cols": 1024,
        "copy": 4.0,
        "quack": 5.0,
        "torch": 1.0,
    }
    path.write_text(json.dumps([entry]))

    recorded = results.read_recorded(path)

    assert measured(1.0).fastest_peer(recorded) == ("quack (recorded)", 1.25)
    assert results.missed(measured(1.0), recorded) == ["0.80 of quack (recorded)"]
    path.write_text("{}x")
    with pytest.raises(ValueError, match="not a record of peers"):
        results.read_recorded(path)


def test_a_line_fits_under_the_header():
    text = results.line(measured(0.97, 0.5))

    assert text.startswith(f"{'softmax':<{results.WIDTH}} float16   49152 x 1024")
    assert "3.880  4.000  0.970  torch 0.50" in text
    assert text.endswith("0.98 wanted")
    assert results.line(measured(0.99)).endswith("  met")
    assert results.HEADER.index("targets") == text.index("0.98 wanted")


def test_the_table_of_targets_has_the_worst_of_each_op():
    lines = results.target_table(report().points)

    assert lines[0] == "| columns | at least | layer_norm | softmax | |"
    assert "| 32, 64 | 0.93 | 0.900 | 0.900 | missed at 4 of 4 |" in lines
    assert "| 32768 | 0.97 | 0.933 | 0.933 | missed at 4 of 4 |" in lines
    assert "| 128, 256 | 0.96 | - | - | not measured |" in lines
    assert "never below the fastest peer (1% is noise): met at 12" in lines
    assert lines[-1].startswith("geometric mean of 12 shares: 0.911, at least 0.98: missed")


def test_forms_have_a_table_of_their_own():
    points = [
        measured(share, None, Point(op, "float16", 49152, cols))
        for op, share in (
            ("layer_norm", 0.9),
            ("layer_norm/fuse", 0.89),
            ("softmax/where", 0.94),
            ("dropout", 0.9),
        )
        for cols in (128, 1024)
    ]

    lines = results.target_table(points)

    assert lines[-5:] == [
        "| form | at least | 128 | 1024 | |",
        "| --- | --- | --- | --- | --- |",
        "| layer_norm/fuse | 0.98 of layer_norm | 0.890 | 0.890 | met at 2 |",
        "| softmax/where | 0.95 | 0.940 | 0.940 | missed at 2 of 2 |",
        "| dropout | - | 0.900 | 0.900 |  |",
    ]
    assert lines[0] == "| columns | at least | layer_norm | |"
    assert results.target_table(points[2:])[2].endswith("| not measured |")
    assert results.missed(points[2]) == results.missed(points[6]) == []
    assert results.missed(points[4]) == ["0.95 wanted"]
    assert results.mean_share(points) == pytest.approx(0.9)


def test_the_last_lines_count_what_is_missed_and_name_the_worst():
    points = [measured(0.99), measured(0.6, None, Point("rms_norm", "float32", 8192, 33))]

    assert results.last_lines(points) == [
        "targets missed: at 1 of 2 points",
        "worst point: rms_norm float32 8192 x 33: 0.600 of the copy rate (target 0.9)",
    ]
    assert results.last_lines([]) == ["nothing was measured"]


def test_a_report_comes_back_from_json(tmp_path):
    path = tmp_path / "bench.json"
    results.write_json(path, report())

    assert saved.read(path) == report()
    told = json.loads(path.read_text())
    assert told["schema"] == 1
    assert told["points"][0]["times"]["torch"]["share"] == 0.5
    assert [each.name for each in tmp_path.iterdir()] == ["bench.json"]


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "bench.json"
    results.write_json(path, Report({}, [Measured(Point("softmax", "float16", 1, 1), 4, {})]))

    assert "NaN" not in path.read_text()
    assert math.isnan(saved.read(path).points[0].share())


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": 2}', '{"schema": 1}'])
def test_what_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "bench.json").write_text(text)

    with pytest.raises(ValueError, match="report of cupynorm bench"):
        saved.read(tmp_path / "bench.json")


def test_csv_has_a_line_for_each_contender(tmp_path):
    results.write_csv(tmp_path / "bench.csv", [measured(0.5)])

    lines = (tmp_path / "bench.csv").read_text().splitlines()

    assert lines[0] == ",".join(results.CSV_FIELDS)
    assert len(lines) == 4
    expected = "softmax,float16,49152,1024,0,4000000000,cupynorm,2000.0000,1980.0000,2020.0000,2.0000,0.5000"
    assert lines[1] == expected


# ---- the command


def invoke(*arguments: object) -> Any:
    return command_runner().invoke(cli.cli, ["bench", *map(str, arguments)])


@pytest.fixture
def machine(monkeypatch):
    """A machine that finds the shares of report() and one point more than there is time for."""
    about = {"date": "2026-01-01", "versions": {"cupy": "14.2"}, "device": {"name": "a device"}}
    asked: dict[str, Any] = {}

    def sweep(points, names, variants, **options):
        asked.update(points=points, names=names, variants=variants, **options)
        yield from (measured(0.97, 0.5, each) for each in points[:2])

    monkeypatch.setattr(bench, "new_report", lambda: Report(dict(about)))
    monkeypatch.setattr(bench, "compile_ahead", lambda points: None)
    monkeypatch.setattr(bench, "sweep", sweep)
    monkeypatch.setattr(peers, "missing", lambda: {"triton": "triton not installed"})
    return asked


def test_without_a_device_the_exit_status_is_3(monkeypatch):
    def none():
        raise devices.NoDeviceError("there is none")

    monkeypatch.setattr(devices, "present_limits", none)

    result = invoke()

    assert result.exit_code == 3
    assert "there is none" in result.stderr


def test_lines_files_and_what_was_left_out(machine, tmp_path):
    result = invoke(
        *("--ops", "softmax", "--dtypes", "float16", "--cols", "64,128,256"),
        *(
            "--save",
            tmp_path / "b.json",
            "--csv",
            tmp_path / "b.csv",
            "--targets",
            "--variants",
            "warp,block",
        ),
    )

    assert result.exit_code == 0, result.output
    header, first, _, *rest = result.stdout.splitlines()
    assert header == results.HEADER
    assert first.startswith(f"{'softmax':<{results.WIDTH}} float16   49152 x 64")
    assert "left out: 1 points" in rest
    assert "| 32, 64 | 0.93 | 0.970 | met at 1 |" in rest
    assert rest[-1].startswith("worst point: softmax float16 49152 x 64: 0.970")
    assert result.stderr.count("from here on, triton: a note") == 1
    assert "torch.compile is measured at some shapes only" in result.stderr
    assert machine["names"] == ["cupy", "torch", "compile"]
    assert machine["variants"] == ("warp", "block")
    assert machine["everywhere"] is False
    assert len(saved.read(tmp_path / "b.json").points) == 2
    assert len((tmp_path / "b.csv").read_text().splitlines()) == 1 + 2 * 4


@pytest.mark.parametrize(
    ("options", "names", "everywhere"),
    [
        (("--only-ours",), [], False),
        (("--peers", "none"), [], False),
        (("--peers", "torch,cupy"), ["cupy", "torch"], False),
        (("--peers", "compile"), ["compile"], True),
        (("--peers", "all"), ["cupy", "torch", "compile"], True),
    ],
)
def test_peers_are_chosen(machine, options, names, everywhere):
    assert invoke(*options, "--quick").exit_code == 0
    assert (machine["names"], machine["everywhere"]) == (names, everywhere)
    assert {each.dtype for each in machine["points"]} == {"float16", "float32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--peers", "triton"), "triton cannot be measured: triton not installed"),
        (("--peers", "jax"), "'jax' is not one of default, all, none, cupy"),
        (("--ops", "softmax,gelu"), "'gelu' is not one of layer_norm"),
        (("--cols", "0"), "below 1"),
        (("--json", "b.json"), "takes no file: --save b.json writes one"),
        (("--json=b.json", "--quick"), "takes no file: --save b.json writes one"),
    ],
)
def test_wrong_usage(machine, options, message):
    result = invoke(*options)

    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recorded", __file__), "not a record of peers"),
        (("--from", __file__), "report of cupynorm bench"),
    ],
)
def test_a_file_that_is_not_understood_is_an_unusable_one(machine, options, message):
    result = invoke(*options)

    assert (result.exit_code, result.stdout) == (4, "")
    assert message in result.stderr


def test_plots_without_matplotlib_are_refused_at_once(machine, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    result = invoke("--plot", tmp_path / "a.png")

    assert result.exit_code == 2
    assert "pip install 'matplotlib>=3.9'" in result.stderr
    assert not machine


def test_plots_are_written_and_their_suffix_is_checked(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "figure_class", object)
    monkeypatch.setattr(plots, "plot", lambda path, *_: [path] if path.write_text("drawn") else [])

    result = invoke("--quick", "--plot", tmp_path / "a.png", "--plot", tmp_path / "b.svg")

    assert result.exit_code == 0
    assert (tmp_path / "a.png").exists()
    assert (tmp_path / "b.svg").exists()
    assert invoke("--plot", "a.gif").exit_code == 2


def test_a_folder_that_is_not_there_is_known_before_anything_is_measured(machine, tmp_path):
    result = invoke("--save", tmp_path / "none" / "b.json")

    assert result.exit_code == 4
    assert not machine
    assert invoke("--from", tmp_path / "none.json").exit_code == 4


def test_what_ends_it_loses_nothing(machine, monkeypatch, tmp_path):
    def sweep(points, *_, **__):
        yield measured(0.97, None, points[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "sweep", sweep)

    result = invoke("--save", tmp_path / "b.json")

    assert result.exit_code == 130
    assert len(saved.read(tmp_path / "b.json").points) == 1


def test_results_are_shown_again_without_a_device(tmp_path):
    results.write_json(tmp_path / "b.json", report())

    again = ("--csv", tmp_path / "again.csv", "--save", tmp_path / "again.json")
    result = invoke(
        "--from", tmp_path / "b.json", "--ops", "softmax", "--cols", "64,1024", "--targets", *again
    )

    assert result.exit_code == 0, result.output
    assert {each.point.op for each in saved.read(tmp_path / "again.json").points} == {"softmax"}
    assert "softmax" in (tmp_path / "again.csv").read_text()
    assert result.stdout.count(f"{'softmax':<{results.WIDTH}} float") == 4
    assert "layer_norm" not in result.stdout
    assert "softmax(x)" in result.stdout
    assert "left out: 3 points" in result.stdout


def test_json_is_one_document_on_standard_output_and_what_save_writes(machine, tmp_path):
    told = invoke("--quick", "--json", "--save", tmp_path / "b.json", "--targets")

    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert document == json.loads((tmp_path / "b.json").read_text())
    assert document["schema"] == 1
    assert len(document["points"]) == 2
    again = invoke("--from", tmp_path / "b.json", "--json")
    assert json.loads(again.stdout) == document


@pytest.mark.parametrize("path", sorted(H200.glob("*.json")), ids=lambda path: path.name)
def test_every_file_of_results_is_shown_by_the_command(path):
    text, told = invoke("--from", path), invoke("--from", path, "--json")

    assert (text.exit_code, told.exit_code) == (0, 0), text.output
    assert len(text.stdout.splitlines()) > 10
    assert json.loads(told.stdout)["schema"] == 1


def test_files_without_points_are_filtered_as_others_and_cannot_be_drawn(tmp_path):
    source = H200 / "2026-11-22-plans.json"

    some = invoke("--from", source, "--ops", "softmax", "--dtypes", "float16", "--cols", "1024")

    assert some.exit_code == 0
    assert "holds no points of cupynorm bench" in some.stderr
    title, _, *rest = some.stdout.splitlines()
    assert title == f"entries: {len(rest)}"
    assert all(re.match(r"softmax +float16 +\d+ +1024 ", each) for each in rest)
    for option in ("--save", "--csv", "--recorded"):
        extra = [option, H200 / "2026-11-22.csv"] if option == "--recorded" else [option, tmp_path / "a"]
        assert invoke("--from", source, *extra).exit_code in (2, 4)
    refused = invoke("--from", source, "--targets")
    assert refused.exit_code == 2
    assert "--targets needs them" in refused.stderr


def test_the_host_table_alone_or_with_the_sweep(machine, monkeypatch):
    def host_times(names, notes):
        notes["torch softmax"] = "a reason"
        return iter(report().host)

    monkeypatch.setattr(host_calls, "host_times", host_times)

    alone, both = invoke("--host-only"), invoke("--host", "--quick")

    assert "torch softmax: a reason" in alone.stderr
    assert "4.6: met" in alone.stdout
    assert "worst point" not in alone.stdout
    assert "worst point" in both.stdout


def test_a_report_says_what_it_ran_on(clock, monkeypatch):
    from cupynorm.plan.limits import RECORDED

    monkeypatch.setattr(devices, "present_limits", lambda: RECORDED["h200"])

    about = bench.new_report().about

    assert about["device"]["sm_count"] == 132
    assert about["versions"]["cupy"] == "14.2.0"
    assert about["versions"]["driver_cuda"] == "13.2"


def test_the_copies_that_bench_makes_compile(monkeypatch):
    if not nvrtc.majors():
        pytest.skip("NVRTC is not installed")
    asked = []
    monkeypatch.setattr(timing, "kernel", lambda *given: asked.append(given) or (lambda *_: None))
    x = types.SimpleNamespace(nbytes=1 << 20, data=types.SimpleNamespace(copy_from_device_async=print))
    runs = timing.copy_runs([(x, x)])
    for name, run in runs.items():
        if "driver" not in name:
            run(0)

    assert len(asked) == len(timing.COPIES)
    for code, name, *options in asked:
        assert nvrtc.compile(code, name, options).image
