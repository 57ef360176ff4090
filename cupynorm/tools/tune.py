"""Finds the fastest plans on this device: compiles candidates, times them in turns, checks and stores them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cupynorm._dtypes import Dtype, dtype_of
from cupynorm.catalog import forms, op_table
from cupynorm.catalog.form import Form
from cupynorm.invoke import row_ops
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import Plan
from cupynorm.runtime import compiler, devices, tuned_plans
from cupynorm.tools import bench, bench_points, buffers, peers, testing, timing
from cupynorm.tools.candidates import candidates
from cupynorm.tools.results import COPY, NOISE, Point, Timing

COLS = (*(each for each in bench_points.COLS if each <= bench_points.WIDE), *bench_points.ODD_COLS)
MOST_CANDIDATES = 64  # per point; compiling one takes a tenth of a second
# All candidates are replayed FIRST times; the best GOING_ON are replayed SECOND times; the best FINALISTS are then
# timed in full.
FIRST, GOING_ON = 3, 16
SECOND, FINALISTS = 9, 6
CHECKED_ROWS, CHECKED_ELEMENTS = 67, 1 << 22  # upper bounds for the comparison with float64


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found at a point.

    before: the built-in plan. after: the fastest plan, which differs only if it is faster by more than NOISE. Shares
    are fractions of the rate at which the same bytes are copied, or nan if the plan was not timed. tried: the number of
    plans that were timed. refused: the reasons why others were not, with their numbers.
    """

    point: Point
    before: Plan
    before_share: float
    after: Plan
    share: float
    tried: int
    refused: Mapping[str, int]

    @property
    def changed(self) -> bool:
        """Whether a better plan was found than the rules of plan/data give."""
        return tuned_plans.portable(self.before) != tuned_plans.portable(self.after)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {**dataclasses.asdict(self), "changed": self.changed}


def usable(
    device: int, what: KernelSpec, plans: Sequence[Plan], refused: dict[str, int], workers: int
) -> list[Plan]:
    """Compile plans concurrently, and return those that compile and do not spill."""
    kernels = compiler.owner() or contextlib.nullcontext()

    def fault(plan: Plan) -> str:
        with kernels, devices.cupy().cuda.Device(device):
            try:
                kernel = row_ops.kernel_of(device, what, plan)
            except Exception as error:  # noqa: BLE001  a candidate's faults are its own
                return f"not compiled ({type(error).__name__})"
        return "spills" if kernel.local_bytes else ""

    with ThreadPoolExecutor(workers) as pool:  # the compiler releases the interpreter lock
        faults = list(pool.map(fault, plans))
    for each in filter(None, faults):
        refused[each] = refused.get(each, 0) + 1
    return [plan for plan, each in zip(plans, faults, strict=True) if not each]


class _Check:
    """Compares the results of a plan at a point with float64, by the table of catalog/bounds.py."""

    def __init__(self, what: Form, point: Point, weights: Dtype) -> None:
        rows = max(1, min(point.rows, CHECKED_ROWS, CHECKED_ELEMENTS // point.cols))
        if what.alone:
            op = op_table.op(what.name)
            case = testing.inputs(op, rows, point.cols, point.dtype, parameter_dtype=weights)
            given = {"x": case.x, **case.parameters}
        else:
            given = forms.inputs(what, rows, point.cols, point.dtype)
        self._what = what
        self._given = {name: devices.cupy().asarray(each) for name, each in given.items()}
        self._expected = what.right(given)

    def passes(self, plan: Plan) -> bool:
        found = self._what.call(self._given, plan=plan)
        results = [devices.cupy().asnumpy(each) for each in (found if type(found) is tuple else (found,))]
        try:
            testing.assert_form_close(self._what, results, self._expected)
        except AssertionError:
            return False
        return True


def measure(point: Point, weights: Any = None, *, workers: int | None = None) -> tuple[Result, str]:
    """Find the fastest plan at a point; also return the key to store it under. weights: the parameters' dtype.

    All candidates are replayed a few times, the best of them again and more often, always in turns with the built-in
    plan, and at the end with copies of the same bytes. Plans with a wrong result are dropped before that. Kernels that
    were loaded for this are unloaded afterwards; those that were loaded before stay.
    """
    try:
        with compiler.Kernels():
            return _measure(point, weights, workers)
    finally:
        row_ops.forget()  # cached calls of kernels that are now unloaded


def _measure(point: Point, weights: Any, workers: int | None) -> tuple[Result, str]:
    what, dtype = forms.form(point.op), dtype_of(weights or point.dtype)
    device = devices.present_device()
    limits = devices.limits_of(device)
    spec = bench.lowered(point, dtype, limits)
    chosen = row_ops.prepare(device, spec, None, tuned=False)
    before = tuned_plans.portable(chosen.plan)
    earlier = tuned_plans.find(
        tuned_plans.place(limits, devices.driver_version()), limits, spec.types, spec.problem
    )
    refused: dict[str, int] = {}
    others = dict.fromkeys(
        [*([earlier] if earlier else []), *candidates(spec.problem, limits, MOST_CANDIDATES)]
    )
    others.pop(before, None)
    plans = [before, *usable(device, spec, list(others), refused, workers or _workers())]
    try:
        best, shares = _fastest(what, point, dtype, plans, refused)
    finally:
        peers.forget()
    after = best if shares[best] > shares.get(before, 0.0) * (1 + NOISE) else before
    rule, why = chosen.plan.rule, chosen.plan.why
    if after != before:
        rule, why = "", "the fastest of the plans that were tried"
    result = Result(
        point,
        chosen.plan,
        shares.get(before, math.nan),
        dataclasses.replace(row_ops.prepare(device, spec, after).plan, why=why, rule=rule),
        shares.get(after, math.nan),
        len(plans),
        refused,
    )
    return result, tuned_plans.key_of(spec.types, spec.problem, limits)


def _workers() -> int:
    return min(16, os.cpu_count() or 1)


def _fastest(
    what: Form, point: Point, weights: Dtype, plans: Sequence[Plan], refused: dict[str, int]
) -> tuple[Plan, dict[Plan, float]]:
    """Return the fastest plan with a right result, and the finalists' shares. The first plan is always a finalist."""
    before = plans[0]
    if what.alone:
        op = op_table.op(what.name)
        moved = op.bytes_moved(
            point.rows, point.cols, point.dtype, parameter_dtype=weights if op.parameters else None
        )
        sets = buffers.allocate(point, moved, weights)
    else:
        moved = what.bytes_moved(point.rows, point.cols, point.dtype)
        sets = buffers.allocate(point, moved)
    arrays = [each.arrays for each in sets]
    calls = buffers.calls_for(moved, len(sets))
    check = _Check(what, point, weights)
    notes: dict[str, str] = {}

    def times(some: Sequence[Plan], replays: int, others: Mapping[str, Any] | None = None) -> Any:
        runs = {str(number): bench.ours(what, arrays, plan) for number, plan in enumerate(some)}
        timings: dict[str, Timing] = timing.time_interleaved(
            {**runs, **(others or {})},
            len(sets),
            replays=replays,
            calls=calls,
            seconds=timing.REPLAY_SECONDS,
            notes=notes,
        )
        found = {
            plan: timings[str(number)].median for number, plan in enumerate(some) if str(number) in timings
        }
        copies = [each.median for name, each in timings.items() if name.startswith(COPY)]
        return found, min(copies, default=math.nan)

    def best_of(found: Mapping[Plan, float], count: int) -> list[Plan]:
        ranked = sorted((plan for plan in found if plan != before), key=found.__getitem__)
        return [before, *ranked[:count]]

    first, _ = times(plans, FIRST)
    going_on = [plan for plan in best_of(first, GOING_ON)[1:] if check.passes(plan)]
    wrong = min(GOING_ON, len(first) - (before in first)) - len(going_on)
    if wrong:
        refused["wrong result"] = wrong
    if len(first) < len(plans):
        refused["not launched"] = len(plans) - len(first)
    second, _ = times([before, *going_on], SECOND)
    last, copy = times(
        best_of(second, FINALISTS), timing.REPLAYS, timing.copy_runs([each.copy for each in sets])
    )
    if not last:
        raise RuntimeError(f"nothing could be timed at {point}: {'; '.join(sorted(set(notes.values())))}")
    return min(last, key=last.__getitem__), {plan: copy / seconds for plan, seconds in last.items()}


def points(
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    cols: Sequence[int] = (),
    rows: Sequence[int] = (),
    *,
    weights: Any = None,
) -> list[Point]:
    """Return the points to tune: all combinations of what is given. Defaults are row ops alone, as in the benchmark.

    Raises ValueError for what cannot be tuned, and where weights (as in tune()) are given and not all ops are alone.
    """
    for op in ops:
        if op not in forms.TUNED:
            raise ValueError(f"{op!r} has no plan that could be tuned: use {', '.join(forms.TUNED)}")
        if weights is not None and not forms.form(op).alone:
            raise ValueError(f"gamma_dtype: {op} is measured with parameters of x's dtype")
    return bench_points.points(
        ops or [op.name for op in op_table.OPS],
        dtypes or ("float16", "bfloat16", "float32"),
        rows,
        cols or COLS,
    )


def most_candidates(point: Point, weights: Any = None) -> int:
    """Return how many plans would be compiled at a point on the current device."""
    limits = devices.present_limits()
    what = bench.lowered(point, dtype_of(weights or point.dtype), limits)
    return len(candidates(what.problem, limits, MOST_CANDIDATES))


def here() -> tuned_plans.Place:
    """Return the device and versions that the current table is valid for. Raises NoDeviceError."""
    return tuned_plans.place(devices.present_limits(), devices.driver_version())


def tune(wanted: Sequence[Point], *, weights: Any = None, seconds: float = math.inf) -> Iterator[Result]:
    """Tune points one after the other until `seconds` have passed, and store each result before it is yielded.

    weights: the dtype of gamma and beta of row ops; default: x's. Raises OSError, before anything is measured, if the
    table cannot be written.
    """
    end = time.monotonic() + seconds
    place = here()
    tuned_plans.store(place, {})
    for point in wanted:
        if time.monotonic() > end:
            return
        result, key = _measure_what_fits(point, weights)
        date = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        entry = tuned_plans.Entry(result.after, result.share, date) if result.changed else None
        tuned_plans.store(place, {key: entry})
        yield result


def _measure_what_fits(point: Point, weights: Any) -> tuple[Result, str]:
    """Measure a point; if memory runs out, measure it with fewer rows, as long as the stored plan is valid for both."""
    limits = devices.present_limits()

    def kind(point: Point) -> str:
        return tuned_plans.rows_class(bench.lowered(point, limits=limits).problem, limits)

    while True:
        try:
            return measure(point, weights)
        except MemoryError:  # CuPy's, too
            fewer = dataclasses.replace(point, rows=point.rows // 2)
            if not fewer.rows or kind(fewer) != kind(point):
                raise
            point = fewer


HEADER = (
    f"{'dtype':<9} {'rows x columns':<18} {'plan before':<34} {'share':>5}  {'plan after':<34} {'share':>5}"
)
OP_WIDTH = 12  # columns of a terminal for the op's name, at least
LEGEND = (
    "plans: variant, elements per vector x vectors per thread, threads per row (-: the block), "
    "threads per block x min_blocks"
)


def lines(results: Sequence[Result], width: int = 0) -> list[str]:
    """Return results as lines, with one above that names their columns. width: of the longest op's name."""
    width = max(width, OP_WIDTH)
    return [f"{'op':<{width}} {HEADER}", *(f"{each.point.op:<{width}} {_line(each)}" for each in results)]


def _line(result: Result) -> str:
    """Return a result as a line under HEADER."""
    point = result.point
    after = brief(result.after) if result.changed else "the same"
    return (
        f"{point.dtype:<9} {point.shape:<18} {brief(result.before):<34} "
        f"{result.before_share:>5.2f}  {after:<34} {result.share:>5.2f}"
    )


def brief(plan: Plan) -> str:
    """Return a plan in a few words."""
    rows = f", {plan.rows_per_group} rows" if plan.rows_per_group > 1 else ""
    cache = ", parameters cached" if plan.parameter_cache else ""
    tile = f"{plan.vector}x{plan.vectors} {plan.group or '-'}"
    return f"{plan.variant} {tile} {plan.block}x{plan.min_blocks}{rows}{cache}"
