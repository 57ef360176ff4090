"""What right means: tolerances, errors, inputs that look for faults, and a self-test of every op on this machine."""

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

import numpy as np

from cupynorm import _dtypes
from cupynorm._dtypes import dtype_name, dtype_of, quantized_dtype
from cupynorm.catalog import forms
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.host.reference import LARGEST
from cupynorm.invoke import row_ops
from cupynorm.plan.config import VARIANTS, DoesNotFitError
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices
from cupynorm.tools import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cupynorm.catalog.forms import Arrays, Form

    Array = np.ndarray[Any, Any]

# By the result's dtype: a few of its roundings. What is float64 on either side is computed in float64.
TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
# Of quantised results: half a step, of the largest number in int8 and of the number itself in a float8.
STEPS = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
# What is quantised is computed in float32: so far off, of a row's largest, for each of STEPS.
FLOAT_ERROR = 2.0**-19
# Where a float8's steps stop to shrink, of its largest number.
LEAST_NORMAL = {"float8_e4m3fn": 2.0**-6 / 448, "float8_e5m2": 2.0**-14 / 57344}


def error(actual: Array, expected: Array, axes: int = 1) -> float:
    """Return the worst row's |actual - expected| / |expected|, as lengths of vectors over the last `axes` axes.

    Infinite where nan or inf stand in one and not in the other. What no rounding to actual's dtype can avoid,
    half of its smallest number, does not count: 1 / 131072 is subnormal in float16.
    """
    a, e = _comparable(actual, expected, axes)
    return _row_error(a, e, actual.dtype)[1]


def assert_close(
    actual: Array, expected: Array, *, axes: int = 1, dtype: Any = None, scale: Array | None = None
) -> None:
    """Raise AssertionError, naming the worst element, unless every row and every element is as near as its dtype asks for.

    The tolerance is that of actual's dtype, or of `dtype` if given: a quantised one's name, too. An element may be off by
    tolerance * (its size + scale), where scale is its row's root mean square; give another where the inputs' size rules.
    """
    tolerance = STEPS.get(dtype) or TOLERANCES[dtype_name(actual.dtype if dtype is None else dtype_of(dtype))]
    a, e = _comparable(actual, expected, axes)
    differ = _pattern(a) != _pattern(e)
    if differ.any():
        worst = int(np.argmax(differ))
        raise AssertionError(
            f"{np.count_nonzero(differ)} of {e.size} not nan or inf alike, {_at(actual, a, e, worst)}"
        )
    finite = np.isfinite(e)
    size = np.where(finite, e, 0.0)
    span = np.sqrt((size * size).mean(axis=1, keepdims=True)) if e.size else size
    spread = (
        span if scale is None else np.broadcast_to(scale, actual.shape).reshape(e.shape).astype(np.float64)
    )
    allowed = tolerance * (np.abs(size) + spread) + _unavoidable(actual.dtype)
    off = np.abs(np.where(finite, a, 0.0) - size)
    if (off > allowed).any():
        worst = int(np.argmax(np.divide(off, allowed, out=np.where(off > 0, np.inf, 0.0), where=allowed > 0)))
        count = np.count_nonzero(off > allowed)
        raise AssertionError(
            f"{count} of {e.size} off by more than allowed, {_at(actual, a, e, worst, allowed)}"
        )
    row, value = _row_error(a, e, actual.dtype)
    if scale is None and value > tolerance:
        raise AssertionError(f"row {row} has relative error {value:.3g}, allowed is {tolerance:g}")


def assert_statistics_close(op: Op, actual: Sequence[Array], expected: Sequence[Array]) -> None:
    """Raise AssertionError if mean or rstd is off. A mean is as exact as its row is wide, however near to 0."""
    scales = {"mean": 1 / expected[-1], "rstd": np.abs(expected[-1])} if op.stats else {}
    for name, got, want in zip(op.stats, actual, expected, strict=True):
        try:
            assert_close(got, want, axes=got.ndim, scale=scales[name])
        except AssertionError as fault:
            raise AssertionError(f"{name}: {fault}") from None


def assert_form_close(what: Form, results: Sequence[Array], expected: Sequence[Array]) -> None:
    """Raise AssertionError unless results of a form's call are what its reference gives, as near as their dtypes ask for."""
    if what.quantized:
        y, span = _dequantised(what, results, expected[0])
        assert_close(y, expected[0], dtype=what.quantized, scale=span)
        if len(results) > 1:
            largest = np.abs(expected[0]).max(axis=-1) / LARGEST[what.quantized]
            assert_close(results[1].reshape(-1, 1), largest.reshape(-1, 1))
        return
    for got, wanted in zip(results, expected, strict=True):
        assert_close(got, wanted)


def form_error(what: Form, results: Sequence[Array], expected: Sequence[Array]) -> tuple[float, float]:
    """Return how far results are off at worst, and the tolerance: of rows, or of quantised elements and half of their steps."""
    if not what.quantized:
        return max(map(error, results, expected)), TOLERANCES[dtype_name(results[0].dtype)]
    y, span = _dequantised(what, results, expected[0])
    off, allowed = np.abs(y - expected[0]), np.abs(expected[0]) + span
    return float(np.divide(off, allowed, out=np.zeros_like(off), where=off > 0).max(initial=0)), STEPS[
        what.quantized
    ]


def _dequantised(what: Form, results: Sequence[Array], expected: Array) -> tuple[Array, Array]:
    """Return what quantised results stand for, and the size below which they are no finer. CuPy's float8 are bits.

    Their steps become no smaller there, or what is quantised is itself off by more: it is computed in float32.
    """
    name = what.quantized
    scale = np.float64(results[1][..., None] if len(results) > 1 else forms.SCALES[name])
    y = results[0].view(quantized_dtype(name)).astype(np.float64) * scale
    least = scale * LARGEST[name] * LEAST_NORMAL.get(name, 1.0)
    return y, least + FLOAT_ERROR * np.abs(expected).max(axis=-1, keepdims=True, initial=0) + np.zeros_like(y)


def _comparable(actual: Array, expected: Array, axes: int) -> tuple[Array, Array]:
    """Return both as rows x columns of float64. What actual's dtype cannot hold is expected to be infinite."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.shape}")
    cols = math.prod(actual.shape[actual.ndim - axes :])
    shape = (actual.size // max(1, cols), cols)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = expected.astype(actual.dtype).astype(np.float64)
    wide = np.where(np.isfinite(rounded), expected, rounded)
    return actual.astype(np.float64).reshape(shape), wide.astype(np.float64).reshape(shape)


def _pattern(values: Array) -> Array:
    """Return 0 for finite, 1 for inf, -1 for -inf, 2 for nan."""
    return np.where(np.isnan(values), 2, np.where(np.isinf(values), np.sign(values), 0))


def _unavoidable(dtype: Any) -> float:
    if dtype_name(dtype) == "bfloat16":
        return 2.0**-134
    return float(np.finfo(dtype).smallest_subnormal) / 2


def _row_error(a: Array, e: Array, dtype: Any) -> tuple[int, float]:
    """Return the worst row and its error."""
    if not e.size:
        return 0, 0.0
    finite = np.isfinite(e)
    off = np.maximum(np.abs(np.where(finite, a, 0.0) - np.where(finite, e, 0.0)) - _unavoidable(dtype), 0)
    off, size = (np.linalg.norm(each, axis=1) for each in (off, np.where(finite, e, 0.0)))
    ratio = np.divide(off, size, out=np.where(off > 0, np.inf, 0.0), where=size > 0)
    ratio[(_pattern(a) != _pattern(e)).any(axis=1)] = math.inf
    worst = int(np.argmax(ratio))
    return worst, float(ratio[worst])


def _at(actual: Array, a: Array, e: Array, worst: int, allowed: Array | None = None) -> str:
    index = tuple(int(i) for i in np.unravel_index(worst, actual.shape))
    bound = "" if allowed is None else f", allowed is {allowed.flat[worst]:.3g}"
    return f"the worst at {index}: {a.flat[worst]:.9g}, expected {e.flat[worst]:.9g}{bound}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One input of an op: x of rows x columns, gamma and beta as the op takes them, and why this one."""

    reason: str
    x: Array
    parameters: Mapping[str, Array]


# Which rows an input holds, in turns. -inf makes a norm's row nan, which hides everything else: softmax only.
NORM_ROWS = ("normal", "offset", "constant", "range")
SOFTMAX_ROWS = (*NORM_ROWS, "half -inf", "all but one -inf", "all -inf")


def inputs(
    op: Op, rows: int, cols: int, dtype: Any, *, parameter_dtype: Any = None, reason: str = ""
) -> Case:
    """Return rows of every kind in turns, with gamma and beta; the same at each call."""
    dtype = dtype_of(dtype)
    random = np.random.default_rng([rows, cols])
    x = random.standard_normal((rows, cols))
    kinds = NORM_ROWS if op.parameters else SOFTMAX_ROWS
    for row in range(min(rows, 64)):  # then normal ones: enough is enough
        kind = kinds[row % len(kinds)]
        if kind == "offset":  # E[x^2] - E[x]^2 in float32 has no digit left
            x[row] = 1000 + 0.1 * x[row]
        elif kind == "constant":
            x[row] = 3
        elif kind == "range":  # for softmax exp underflows, for norms few elements rule
            x[row] *= 10 ** random.uniform(-3, 3, cols)
        elif kind == "half -inf":
            x[row, random.permutation(cols)[: cols // 2]] = -np.inf
        elif kind == "all but one -inf":
            x[row, np.arange(cols) != random.integers(cols)] = -np.inf
        elif kind == "all -inf":
            x[row] = -np.inf
    weights = dtype if parameter_dtype is None else dtype_of(parameter_dtype)
    parameters = {name: random.standard_normal(cols).astype(weights) for name in op.parameters}
    return Case(reason, x.astype(dtype), parameters)


QUICK = {
    1: "one column",
    33: "one more than a warp, odd",
    1024: "whole packs, the last width that a warp holds",
    1025: "one more, and packs of one",
    20000: "more than registers hold in most types",
}
MORE = {
    2: "one pair",
    7: "odd, less than a pack",
    8: "one pack of half",
    257: "odd, padded in every lane",
    4100: "packs of float that do not fill the last thread",
    16384: "the last width that registers hold",
    50257: "a prime vocabulary",
    65536: "half fits shared memory, float does not",
    131072: "longer than shared memory in every type",
}
MANY = 10000  # columns from which few rows are enough
FORM_ROWS, FORM_COLS = 29, (33, 1024)  # of what is not an op alone


def cases(op: Op, dtype: Any, *, quick: bool = False) -> Iterator[Case]:
    """Yield deterministic inputs at the widths where kernels change; about 14, or 5 if quick."""
    for cols, reason in (QUICK if quick else QUICK | MORE).items():
        yield inputs(op, _rows_for(cols), cols, dtype, reason=reason)


def _rows_for(cols: int) -> int:
    return 29 if cols < MANY else 7


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison of the self-test. variant: as in plan=, "chosen" where the dispatcher chose, or "numpy"."""

    op: str
    variant: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    tolerance: float
    ok: bool
    note: str


QUICK_DTYPES = ("float16", "float32")  # of a quick self-test; forms in the first of them only
QUICK_COLS = (33, 1024, 20000)  # of QUICK


@dataclasses.dataclass(frozen=True)
class _OpCheck:
    """A call of an op alone that the self-test compares. variant: as in Result."""

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
        """What calls have in common that may have kernels in common."""
        return self.op.name, self.dtype, self.variant

    def prepare(self, device: int) -> None:
        """Compile and load what run() will launch."""
        wanted = self.variant if self.variant in VARIANTS else None
        row_ops.prepared(
            device, explain.op_spec(self.op.row, (self.rows, self.cols), *self._dtypes()), wanted
        )

    def run(self) -> Result | None:
        """Run the call; None if the variant cannot hold the row."""
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
    """A form's call that the self-test compares."""

    what: Form
    cols: int
    dtype: str
    on_device: bool

    @property
    def group(self) -> tuple[str, ...]:
        """What calls have in common that may have kernels in common."""
        return self.what.name, self.dtype

    def prepare(self, device: int) -> None:
        """Compile and load what run() will launch."""
        spec = explain.form_spec(self.what, FORM_ROWS, self.cols, self.dtype)
        if isinstance(spec.problem, Problem):
            row_ops.prepared(device, spec, None)
        else:
            explain.load(spec, device)

    def run(self) -> Result:
        """Run the call."""
        return _compare_form(self.what, self.cols, self.dtype, on_device=self.on_device)


def selftest(
    cpu: bool = False,  # noqa: FBT001, FBT002
    *,
    quick: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Result]:
    """Compare every op, dtype and variant that can hold the row with float64, then every other form.

    cpu: by NumPy. quick: ops in float16 and float32 as calls choose their plans, and forms in float16 at one odd width.
    progress(stage, done, total) is called as it goes: on a device all kernels are compiled first, several at once (stage
    "compile"), then the calls are compared (stage "compare"). Yields as it goes. A call that raises is a Result with
    ok=False, but NoDeviceError is raised.
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
    """Give a pool of threads. After an interruption, what they have begun is awaited, and no more."""
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
                    yield _OpCheck(op, _rows_for(cols), cols, dtype, variant, reason)
        # half in and out, with float weights: what mixed-precision training has; and narrow in, wide out
        for dtype, y_dtype in (("float16", "float32"), ("float32", "float16")):
            variant = "numpy" if cpu else "chosen"
            yield _OpCheck(op, FORM_ROWS, 768, dtype, variant, "mixed dtypes", y_dtype, "float32")
    for what in forms.FORMS.values():
        for dtype in () if what.alone or what.missing else dtypes[: 1 if quick else None]:
            for cols in FORM_COLS[:1] if quick else FORM_COLS:
                yield _FormCheck(what, cols, dtype, not cpu)


LEAST_PROCESSORS = 4  # with fewer, other processes would take as long to begin as they save
NVRTC_THREADS = 3  # of one process, for which NVRTC works at once; more wait


def _prepare_all(
    pool: ThreadPoolExecutor,
    checks: Sequence[_OpCheck | _FormCheck],
    device: int,
    progress: Callable[[str, int, int], None],
    *,
    quick: bool,
) -> None:
    """Compile the checks' kernels, as many at once as there are processors, and load them.

    NVRTC works for a few threads of a process at once, so that further processes compile into the cache on disk where there is
    one. What cannot be prepared is left alone here: the check will meet the same error, and report it.
    """
    processors = _processors()
    if processors >= LEAST_PROCESSORS and compiler.keeps_on_disk():
        _compile_with_processes(pool, checks, device, progress, quick=quick, count=processors - NVRTC_THREADS)
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
    """Let a few threads and `count` processes fill the cache on disk. What fails in one of them is left to the caller.

    All take the numbers of groups of calls from one pipe, two bytes each, whoever comes first, and write a byte for each call.
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
                    progress(
                        "compile", min(done, len(checks) - 1), len(checks)
                    )  # they are still to be loaded
    finally:
        while os.read(taken, 4096):  # after an interruption there is no more to take
            pass
        os.close(taken)
        for each in processes:
            each.kill()
            each.communicate()


def _begin_process(device: int, taken: int, *, quick: bool) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from cupynorm.tools import testing; "
        "testing.prepare_groups(int(sys.argv[1]), quick=sys.argv[2] == 'quick')"
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
    """Say to the other end of a pipe that its thread has ended, however it did."""
    os.close(pipe)


def _prepare_groups(
    groups: Sequence[Sequence[_OpCheck | _FormCheck]], device: int, numbers: int, dots: int
) -> None:
    """Compile groups whose numbers come from a file descriptor; write a dot to another for each call that is prepared."""
    while number := os.read(numbers, 2):
        for check in groups[int.from_bytes(number, "little")]:
            with contextlib.suppress(Exception):  # the check itself will report it
                check.prepare(device)
            os.write(dots, b".")


def _groups(checks: Iterable[_OpCheck | _FormCheck]) -> list[list[_OpCheck | _FormCheck]]:
    """Return checks by op, dtype and variant, which have kernels in common; those of most checks first."""
    groups: dict[tuple[str, ...], list[_OpCheck | _FormCheck]] = {}
    for check in checks:
        groups.setdefault(check.group, []).append(check)
    return sorted(groups.values(), key=len, reverse=True)


def prepare_groups(device: int, *, quick: bool) -> None:
    """Compile the groups of a self-test's calls whose numbers come on standard input; print a dot for each call that is prepared.

    It is what other processes run.
    """
    _begin_thread(device)
    _prepare_groups(_groups(_checks(cpu=False, quick=quick)), device, 0, 1)


def _processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _begin_thread(device: int) -> None:
    """Make a device, and its context, those of a new thread: occupancy is asked for without a launch before it."""
    devices.cupy().cuda.Device(device).use()
    row_ops.calls_of_thread().prepare(device)


def _compare(op: Op, case: Case, variant: str, y_dtype: str | None = None) -> Result | None:
    """Run one case; None if the variant cannot hold the row."""
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
    except Exception as exception:  # noqa: BLE001  a self-test reports what fails and goes on
        fault = _told(exception)
    dtypes = f"{x_dtype} -> {y_dtype}" if y_dtype else x_dtype
    note = fault or case.reason
    return Result(op.name, variant, dtypes, case.x.shape, worst, tolerance, not fault, note)


def _compare_form(what: Form, cols: int, dtype: str, *, on_device: bool) -> Result:
    """Run a form's call and return its Result."""
    worst, tolerance, fault = math.inf, TOLERANCES[dtype], ""
    given = forms.inputs(what, FORM_ROWS, cols, dtype)
    try:
        results = _results(what, given, on_device=on_device)
        expected = what.reference(given)
        worst, tolerance = form_error(what, results, expected)
        assert_form_close(what, results, expected)
    except devices.NoDeviceError:
        raise
    except Exception as exception:  # noqa: BLE001  a self-test reports what fails and goes on
        fault = _told(exception)
    variant = "chosen" if on_device else "numpy"
    note = fault or f"{cols} columns"
    return Result(what.name, variant, dtype, given["x"].shape, worst, tolerance, not fault, note)


def _results(what: Form, given: Arrays, *, on_device: bool) -> tuple[Array, ...]:
    """Call a form with host arrays, on the host or on the device; host arrays come back."""
    if on_device:
        module = devices.cupy()
        given = {name: module.asarray(each) for name, each in given.items()}
    results = what.call(given)
    results = results if isinstance(results, tuple) else (results,)
    return tuple(map(devices.cupy().asnumpy, results)) if on_device else results


def _told(exception: Exception) -> str:
    kind = "" if isinstance(exception, AssertionError) else f"{type(exception).__name__}: "
    return f"{kind}{exception}"


def _call(op: Op, case: Case, *, on_device: bool, **options: Any) -> tuple[Array, ...]:
    """Run the op on the host or on the device; host arrays come back."""
    if on_device:
        module = devices.cupy()
        parameters = {name: module.asarray(array) for name, array in case.parameters.items()}
        results = op.function(module.asarray(case.x), **parameters, **options)
        return tuple(module.asnumpy(each) for each in (results if op.stats else (results,)))
    results = op.function(case.x, **case.parameters, **options)
    return tuple(results) if op.stats else (results,)
