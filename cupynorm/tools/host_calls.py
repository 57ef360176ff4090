"""Time of calls on the host: the first call of a process, and calls in a loop."""

from __future__ import annotations

import functools
import gc
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupynorm
from cupynorm.catalog import forms, op_table
from cupynorm.catalog.form import Arrays
from cupynorm.runtime import devices
from cupynorm.tools import peers, timing
from cupynorm.tools.results import OURS, HostTime, Timing

BATCH = 200  # calls between synchronisations, fewer than fit into a stream's queue
BATCHES = 31
HOST_SHAPE = (128, 1024)
PROCESSES = 5  # per kind of first call
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
LAUNCH = "driver"  # a contender that checks nothing and launches an empty kernel
NOTHING = 'extern "C" __global__ void nothing(long long) {}'


def host_times(contenders: Sequence[str], notes: dict[str, str]) -> Iterator[HostTime]:
    """Time calls on the host, contenders in turns, then first calls in new processes. Failures go to `notes`."""
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
                notes[f"{name} {op_name}"] = timing.one_line(error)
        for (what, name), found_timing in sorted(_time_host(found).items(), key=lambda item: item[0][0]):
            called = f"{op_name}({label}{', out=y' if what else ''})"
            yield HostTime("one launch" if name == LAUNCH else called, name, found_timing)
    for what in FIRST_CALLS:
        cold, warm = [], []
        for _ in range(PROCESSES):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(_first_call(what, folder))
                warm.append(_first_call(what, folder))
        yield HostTime(f"{what}, cold cache", OURS, timing.timing_of(cold))
        yield HostTime(f"{what}, warm cache", OURS, timing.timing_of(warm))


def _host_arrays(parameters: Sequence[str]) -> Arrays:
    module = devices.cupy()
    x = module.asarray(np.random.default_rng(0).standard_normal(HOST_SHAPE).astype(np.float16))
    columns = {name: x[row] for row, name in enumerate(parameters)}
    return {"x": x, **columns, "y": module.empty(HOST_SHAPE, np.float16)}


def _bare_launch() -> Callable[[], Any]:
    kernel = timing.kernel(NOTHING, "nothing")
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
    return {name: timing.timing_of(values) for name, values in samples.items()}


def _first_call(what: str, cache: str) -> float:
    """Return the seconds from `import cupynorm` to the first launch, in a new process that has a context already."""
    environment = {**os.environ, "CUPY_CACHE_DIR": cache, "CUPYNORM_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
    path = os.pathsep.join([str(Path(cupynorm.__file__).parents[1]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(  # noqa: S603  this interpreter and our own code
        [sys.executable, "-c", FIRST_CALL.replace("CALL", FIRST_CALLS[what])],
        env={**environment, "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        check=False,
    )
    return float(done.stdout) if done.returncode == 0 else math.nan
