"""Times ops at points beside their peers and copies of the same bytes."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import numpy as np

import cupynorm
from cupynorm._dtypes import Dtype, dtype_of
from cupynorm.call.view import View
from cupynorm.catalog import forms, op_table
from cupynorm.catalog.form import Arrays, Form
from cupynorm.invoke import row_ops
from cupynorm.lower.row import row_spec
from cupynorm.plan.config import Plan
from cupynorm.plan.limits import Limits
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices
from cupynorm.tools import buffers, explain, peers, results, testing, timing
from cupynorm.tools.bench_points import is_compiled_by_default
from cupynorm.tools.peers import Run
from cupynorm.tools.results import OURS, Measured, Point, Report, Timing

COMPARED = 1 << 16  # elements of each contender's result
# Largest difference from our result, relative to its length as a vector: peers may round intermediate results.
AGREE = {"float16": 0.02, "bfloat16": 0.1, "float32": 1e-3, "float64": 1e-6}


class _Agreement:
    """Checks that each contender writes its result, and that it agrees with ours, which is the first one checked."""

    def __init__(self, what: Form, dtype: Dtype) -> None:
        self._dtype, self._compared = dtype, what.torch is not None and not what.random
        self._ours: Any = None

    def __call__(self, name: str, memory: Any) -> str:
        found = devices.cupy().asnumpy(memory[: COMPARED * self._dtype.itemsize])
        if (found == timing.POISON).all():
            return "its graph writes nothing"
        if name.startswith(results.COPY) or not self._compared:
            return ""
        values = found.view(self._dtype)[None]
        if self._ours is None:
            self._ours = values.astype(np.float64)
        off = testing.error(values, self._ours)
        return "" if off <= AGREE[self._dtype.name] else f"its result is off by {off:.2g}"


def measure(
    point: Point,
    contenders: Sequence[str] = (),
    variants: Sequence[str] = (),
    *,
    replays: int = timing.REPLAYS,
) -> Measured:
    """Time an op at a point, interleaved with peers, with forced variants and with copies of the same bytes."""
    what, dtype = forms.form(point.op), dtype_of(point.dtype)
    bytes_moved = what.bytes_moved(point.rows, point.cols, dtype)
    notes: dict[str, str] = {}
    timings: dict[str, Timing] = {}
    plan: dict[str, Any] = {}
    try:
        sets = buffers.allocate(point, bytes_moved)
        arrays = [each.arrays for each in sets]
        runs = {OURS: ours(what, arrays, None)}
        runs.update({f"{OURS} {variant}": ours(what, arrays, variant) for variant in variants})
        runs.update(timing.copy_runs([each.copy for each in sets]))
        for name in contenders:
            try:
                run = peers.contender(name, what, arrays)
                runs.update({name: run} if run else {})
            except Exception as error:  # noqa: BLE001  a peer's faults are its own
                notes[name] = timing.one_line(error)
        timings = timing.time_interleaved(
            runs,
            len(sets),
            replays=replays,
            calls=buffers.calls_for(bytes_moved, len(sets)),
            seconds=timing.REPLAY_SECONDS,
            notes=notes,
            check=_Agreement(what, dtype),
        )
        try:
            plan = planned(point)
        except Exception as error:  # noqa: BLE001  such as a CompileError, which `ours` has met, too
            notes["plan"] = timing.one_line(error)
    except MemoryError as error:  # CuPy's, too
        notes[OURS] = timing.one_line(error)
    finally:
        runs, sets, arrays = {}, [], []
        peers.forget()
    return Measured(point, bytes_moved, timings, plan, notes)


def ours(what: Form, sets: Sequence[Arrays], plan: str | Plan | None) -> Run:
    """Return the contender that calls a form, with a forced plan if there is one."""
    options = {} if plan is None else {"plan": plan}
    return peers.allocating(lambda arrays: what.call(arrays, out=arrays["y"], **options), sets)


def planned(point: Point) -> dict[str, Any]:
    """Return the plan at a point, and compile and load its kernels. No device array is needed."""
    device = devices.present_device()
    plans = []
    for what in kernels_at(point, devices.limits_of(device)):
        if isinstance(what.problem, Problem):
            plans.append(row_ops.prepare(device, what, None).plan.as_dict())
        else:
            plans.append(explain.load(what, device))
    return plans[0]


def kernels_at(point: Point, limits: Limits | None = None) -> tuple[Any, ...]:
    """Return the lowered kernels of a call at a point; the one that has variants first. limits: as explain has them."""
    what = forms.form(point.op)
    if what.alone:
        return (lowered(point),)
    return explain.form_specs(
        what, point.rows, point.cols, dtype_of(point.dtype), point.offset, limits=limits
    )


def lowered(point: Point, weights: Dtype | None = None, limits: Limits | None = None) -> Any:
    """Return a point's lowered call: of several kernels, the first of kernels_at().

    weights: the dtype of a plain op's parameters; default: x's.
    """
    dtype, what = dtype_of(point.dtype), forms.form(point.op)
    if not what.alone:
        return kernels_at(point, limits)[0]
    weights, op = weights or dtype, op_table.op(point.op)
    pointer = point.offset * dtype.itemsize
    x = View(pointer, (point.rows, point.cols), (point.cols * dtype.itemsize, dtype.itemsize), dtype)
    column = View(0, (point.cols,), (weights.itemsize,), weights)
    return row_spec(op.row, x, x, 1, dict.fromkeys(op.parameters, column))


def _compile_one(point: Point) -> None:
    with contextlib.suppress(Exception):  # measuring the point will report the same error
        planned(point)


@contextlib.contextmanager
def processes(count: int) -> Iterator[Executor | None]:
    """Yield processes that compile kernels, or None where there are none, or their kernels would not be found here."""
    if count < 1 or not compiler.keeps_on_disk():
        yield None
        return
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def compile_ahead(wanted: Sequence[Point], count: int | None = None, seconds: float = 90) -> None:
    """Compile the points' kernels into the cache on disk, in several processes at once."""
    count = count or min(8, (os.cpu_count() or 2) // 2, len(wanted) // 8)
    with processes(count if count > 1 else 0) as pool, contextlib.suppress(Exception):  # it only saves time
        for _ in pool.map(_compile_one, wanted, timeout=seconds, chunksize=2) if pool else ():
            pass


def sweep(
    wanted: Sequence[Point],
    contenders: Sequence[str],
    variants: Sequence[str] = (),
    *,
    everywhere: bool = False,
    replays: int = timing.REPLAYS,
    seconds: float = math.inf,
) -> Iterator[Measured]:
    """Measure points one after the other, until `seconds` have passed.

    torch.compile is measured where is_compiled_by_default() says so, or at all points with `everywhere`.
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
            raise RuntimeError(f"the device has failed since {point}: {timing.one_line(error)}") from error


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
