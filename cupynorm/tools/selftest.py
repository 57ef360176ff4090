"""A self-test of every op and form on this machine, by comparison with float64."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import selectors
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from cupynorm import _dtypes
from cupynorm._dtypes import dtype_name, dtype_of
from cupynorm.catalog import forms
from cupynorm.catalog.bounds import TOLERANCES
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.invoke import row_ops
from cupynorm.plan.config import VARIANTS, DoesNotFitError
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices
from cupynorm.tools import explain
from cupynorm.tools.testing import (
    QUICK,
    Case,
    assert_close,
    assert_form_close,
    assert_statistics_close,
    error,
    form_error,
    inputs,
    rows_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

    from cupynorm.catalog.form import Arrays, Form

    Array = np.ndarray[Any, Any]

FORM_ROWS, FORM_COLS = 29, (33, 1024)  # of forms, and of plain ops with mixed dtypes


@dataclasses.dataclass(frozen=True)
class Result:
    """A comparison. variant: a forced plan's, "chosen" if the planner chose, or "numpy"."""

    op: str
    variant: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    tolerance: float
    ok: bool
    note: str


QUICK_DTYPES = ("float16", "float32")  # of a quick self-test; forms have the first one only
QUICK_COLS = (33, 1024, 20000)  # of QUICK


@dataclasses.dataclass(frozen=True)
class _OpCheck:
    """A call of a plain op to compare. variant: as in Result."""

    op: Op
    rows: int
    cols: int
    dtype: str
    variant: str
    reason: str
    y_dtype: str | None = None
    parameter_dtype: str | None = None

    @property
    def group(self) -> tuple[str, ...]:
        """The key of calls that may have the same kernels."""
        return self.op.name, self.dtype, self.variant

    def prepare(self, device: int) -> None:
        """Compile and load the kernels that run() will launch."""
        wanted = self.variant if self.variant in VARIANTS else None
        row_ops.prepared(
            device, explain.op_spec(self.op.row, (self.rows, self.cols), *self._dtypes()), wanted
        )

    def run(self) -> Result | None:
        """Run the call and compare. None if the variant cannot hold the row."""
        case = inputs(
            self.op,
            self.rows,
            self.cols,
            self.dtype,
            parameter_dtype=self.parameter_dtype,
            reason=self.reason,
        )
        return _compare(self.op, case, self.variant, self.y_dtype)

    def _dtypes(self) -> tuple[Any, Any, Any]:
        """Return the dtypes of x, y and the parameters."""
        names = self.dtype, self.y_dtype or self.dtype, self.parameter_dtype or self.dtype
        x, y, parameters = map(dtype_of, names)
        return x, y, parameters


@dataclasses.dataclass(frozen=True)
class _FormCheck:
    """A call of a form to compare."""

    what: Form
    cols: int
    dtype: str
    on_device: bool

    @property
    def group(self) -> tuple[str, ...]:
        """The key of calls that may have the same kernels."""
        return self.what.name, self.dtype

    def prepare(self, device: int) -> None:
        """Compile and load the kernels that run() will launch."""
        limits = devices.limits_of(device)
        for spec in explain.form_specs(self.what, FORM_ROWS, self.cols, self.dtype, limits=limits):
            if isinstance(spec.problem, Problem):
                row_ops.prepared(device, spec, None)
            else:
                explain.load(spec, device)

    def run(self) -> Result:
        """Run the call and compare."""
        return _compare_form(self.what, self.cols, self.dtype, on_device=self.on_device)


def run(
    cpu: bool = False,  # noqa: FBT001, FBT002
    *,
    quick: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Result]:
    """Compare every op, dtype and variant that can hold the row with float64, then every form.

    cpu: test NumPy arrays. quick: test ops in float16 and float32 with the plans that calls choose, and forms in
    float16 at one odd width. On a device, all kernels are compiled first, several at once; progress(stage, done, total)
    has the stages "compile" and "compare". A call that raises gives a Result with ok=False; only NoDeviceError is
    raised.
    """
    device = None if cpu else devices.present_device()
    checks = list(_checks(cpu=cpu, quick=quick))
    begin: Callable[..., None] = (lambda: None) if device is None else partial(_begin_thread, device)
    with _threads(_processors(), begin) as pool:
        if device is not None:
            _prepare_all(pool, checks, device, progress, quick=quick)
        for done, result in enumerate(pool.map(_run, checks), 1):
            progress("compare", done, len(checks))
            if result is not None:
                yield result


def _run(check: _OpCheck | _FormCheck) -> Result | None:
    return check.run()


@contextlib.contextmanager
def _threads(count: int, begin: Callable[[], None]) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads. After an interruption, running tasks are awaited and the others are cancelled."""
    pool = ThreadPoolExecutor(count, initializer=begin)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _checks(*, cpu: bool, quick: bool) -> Iterator[_OpCheck | _FormCheck]:
    dtypes = [each for each in _dtypes.DTYPES if not quick or each in QUICK_DTYPES]
    variants = ("numpy",) if cpu else ("chosen",) if quick else VARIANTS
    widths = {cols: reason for cols, reason in QUICK.items() if not quick or cols in QUICK_COLS}
    for op in OPS:
        for dtype in dtypes:
            for cols, reason in widths.items():
                for variant in variants:
                    yield _OpCheck(op, rows_for(cols), cols, dtype, variant, reason)
        # mixed precision: parameters in float32, and a result of another dtype than the input
        for dtype, y_dtype in (("float16", "float32"), ("float32", "float16")):
            variant = "numpy" if cpu else "chosen"
            yield _OpCheck(op, FORM_ROWS, 768, dtype, variant, "mixed dtypes", y_dtype, "float32")
    for what in forms.FORMS.values():
        for dtype in () if what.alone or what.missing else dtypes[: 1 if quick else None]:
            for cols in FORM_COLS[:1] if quick else FORM_COLS:
                yield _FormCheck(what, cols, dtype, not cpu)


LEAST_PROCESSORS = 4  # with fewer, starting other processes takes as long as it saves
NVRTC_THREADS = 3  # threads of a process for which NVRTC compiles concurrently; further ones wait
CALLS_PER_PROCESS = 14  # processes that start together wait for one another's CUDA contexts: docs/notes/046


def _prepare_all(
    pool: ThreadPoolExecutor,
    checks: Sequence[_OpCheck | _FormCheck],
    device: int,
    progress: Callable[[str, int, int], None],
    *,
    quick: bool,
) -> None:
    """Compile the checks' kernels, as many at once as there are processors, and load them.

    NVRTC compiles for a few threads of a process only, so further processes compile into the cache on disk, if there is
    one. Errors are ignored here: the check will meet the same error and report it.
    """
    processors = _processors()
    if processors >= LEAST_PROCESSORS and compiler.keeps_on_disk():
        count = min(processors - NVRTC_THREADS, len(checks) // CALLS_PER_PROCESS)
        _compile_with_processes(pool, checks, device, progress, quick=quick, count=count)
    pending = [pool.submit(check.prepare, device) for check in checks]
    for done, _ in enumerate(as_completed(pending), 1):
        progress("compile", done, len(pending))


def _compile_with_processes(
    pool: ThreadPoolExecutor,
    checks: Sequence[_OpCheck | _FormCheck],
    device: int,
    progress: Callable[[str, int, int], None],
    *,
    quick: bool,
    count: int,
) -> None:
    """Fill the cache on disk by a few threads and `count` processes. Their errors are ignored.

    All of them read the numbers of groups of calls, two bytes each, from one pipe, and write a byte for each call to
    their own.
    """
    groups = _groups(checks)
    taken, given = os.pipe()
    os.write(given, b"".join(at.to_bytes(2, "little") for at in range(len(groups))))
    os.close(given)
    processes = [_begin_process(device, taken, quick=quick) for _ in range(count if sys.executable else 0)]
    done = 0
    try:
        with selectors.DefaultSelector() as working, contextlib.ExitStack() as open_pipes:
            for each in processes:
                working.register(cast("IO[bytes]", each.stdout), selectors.EVENT_READ)
            for _ in range(NVRTC_THREADS):
                dots, write = os.pipe()
                pipe = open_pipes.enter_context(os.fdopen(dots, "rb", buffering=0))
                working.register(pipe, selectors.EVENT_READ)
                thread = pool.submit(_prepare_groups, groups, device, taken, write)
                thread.add_done_callback(partial(_close, write))
            while working.get_map():
                for ready, _ in working.select():
                    finished = os.read(ready.fd, 4096)
                    if not finished:
                        working.unregister(ready.fileobj)
                    done += len(finished)
                    # one step is left for loading them
                    progress("compile", min(done, len(checks) - 1), len(checks))
    finally:
        while os.read(taken, 4096):  # after an interruption, leave no numbers to the processes
            pass
        os.close(taken)
        for each in processes:
            each.kill()
            each.communicate()


def _begin_process(device: int, taken: int, *, quick: bool) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from cupynorm.tools import selftest; "
        "selftest.prepare_groups(int(sys.argv[1]), quick=sys.argv[2] == 'quick')"
    )
    folder = str(Path(__file__).resolve().parents[2])
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(  # noqa: S603  our own code
        [sys.executable, "-c", code, str(device), "quick" if quick else "whole"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=taken,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _close(pipe: int, _thread: Future[None]) -> None:
    """Close a thread's pipe, which tells the reader that the thread has ended."""
    os.close(pipe)


def _prepare_groups(
    groups: Sequence[Sequence[_OpCheck | _FormCheck]], device: int, numbers: int, dots: int
) -> None:
    """Compile the groups whose numbers a file descriptor gives; write a dot to another one for each call."""
    while number := os.read(numbers, 2):
        for check in groups[int.from_bytes(number, "little")]:
            with contextlib.suppress(Exception):  # the check itself will report it
                check.prepare(device)
            os.write(dots, b".")


def _groups(checks: Iterable[_OpCheck | _FormCheck]) -> list[list[_OpCheck | _FormCheck]]:
    """Return checks grouped by what they have in common, the largest groups first."""
    groups: dict[tuple[str, ...], list[_OpCheck | _FormCheck]] = {}
    for check in checks:
        groups.setdefault(check.group, []).append(check)
    return sorted(groups.values(), key=len, reverse=True)


def prepare_groups(device: int, *, quick: bool) -> None:
    """Compile the groups whose numbers standard input gives, and print a dot for each call, in another process."""
    _begin_thread(device)
    _prepare_groups(_groups(_checks(cpu=False, quick=quick)), device, 0, 1)


def _processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _begin_thread(device: int) -> None:
    """Make a device current in a new thread. Without a launch before, asking for occupancy needs its context."""
    devices.cupy().cuda.Device(device).use()
    row_ops.calls_of_thread().prepare(device)


def _compare(op: Op, case: Case, variant: str, y_dtype: str | None = None) -> Result | None:
    """Run a case. None if the variant cannot hold the row."""
    x_dtype = dtype_name(case.x.dtype)
    options: dict[str, Any] = {"dtype": y_dtype} if y_dtype else {}
    if op.stats:
        options["return_stats"] = True
    if variant in VARIANTS:
        options["plan"] = variant
    tolerance = TOLERANCES[y_dtype or x_dtype]
    worst, fault = math.inf, ""
    try:
        results = _call(op, case, on_device=variant != "numpy", **options)
        expected = op.reference(case.x, **case.parameters)
        worst = error(results[0], expected[0])
        assert_close(results[0], expected[0])
        assert_statistics_close(op, results[1:], expected[1:])
    except DoesNotFitError:
        return None
    except devices.NoDeviceError:
        raise
    except Exception as exception:  # noqa: BLE001  the self-test reports it and continues
        fault = _message(exception)
    dtypes = f"{x_dtype} -> {y_dtype}" if y_dtype else x_dtype
    note = fault or case.reason
    return Result(op.name, variant, dtypes, case.x.shape, worst, tolerance, not fault, note)


def _compare_form(what: Form, cols: int, dtype: str, *, on_device: bool) -> Result:
    """Run a form's call and return its Result."""
    worst, tolerance, fault = math.inf, TOLERANCES[dtype], ""
    given = forms.inputs(what, FORM_ROWS, cols, dtype)
    try:
        results = _results(what, given, on_device=on_device)
        expected = what.right(given)
        worst, tolerance = form_error(what, results, expected)
        assert_form_close(what, results, expected)
    except devices.NoDeviceError:
        raise
    except Exception as exception:  # noqa: BLE001  the self-test reports it and continues
        fault = _message(exception)
    variant = "chosen" if on_device else "numpy"
    note = fault or f"{cols} columns"
    return Result(what.name, variant, dtype, given["x"].shape, worst, tolerance, not fault, note)


def _results(what: Form, given: Arrays, *, on_device: bool) -> tuple[Array, ...]:
    """Call a form on the host or the device; host arrays in and out."""
    if on_device:
        module = devices.cupy()
        given = {name: module.asarray(each) for name, each in given.items()}
    results = what.call(given)
    results = results if isinstance(results, tuple) else (results,)
    return tuple(map(devices.cupy().asnumpy, results)) if on_device else results


def _message(exception: Exception) -> str:
    kind = "" if isinstance(exception, AssertionError) else f"{type(exception).__name__}: "
    return f"{kind}{exception}"


def _call(op: Op, case: Case, *, on_device: bool, **options: Any) -> tuple[Array, ...]:
    """Call an op on the host or the device; host arrays in and out."""
    if on_device:
        module = devices.cupy()
        parameters = {name: module.asarray(array) for name, array in case.parameters.items()}
        results = op.function(module.asarray(case.x), **parameters, **options)
        return tuple(module.asnumpy(each) for each in (results if op.stats else (results,)))
    results = op.function(case.x, **case.parameters, **options)
    return tuple(results) if op.stats else (results,)
