"""Measures what each shipped rule earns: its plan beside those of its neighbours and of the planner without it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cupynorm._dtypes import dtype_of
from cupynorm.catalog import forms
from cupynorm.catalog.form import Form
from cupynorm.invoke import row_ops
from cupynorm.plan.config import ACCESS_BYTES, DOUBLE_BYTES, Plan
from cupynorm.plan.limits import Limits
from cupynorm.plan.rule_file import List, kinds_of, lists_of
from cupynorm.runtime import compiler, cubins, devices, tuned_plans
from cupynorm.tools import bench, bench_points, buffers, peers, rule_plans, timing
from cupynorm.tools.results import COPY, Point
from cupynorm.tools.rule_plans import Content
from cupynorm.tools.tune import usable

SCHEMA = 1
KIND = "search of rules"
# An op or form for each list of rules, by what it is computed with: affine parameters, masks, sums, bytes.
FORMS = (
    *("softmax", "rms_norm", "layer_norm", "softmax/where", "softmax/lengths", "softmax/int8"),
    *("add_rms_norm", "add_rms_norm/sum", "add_layer_norm", "add_layer_norm/sum"),
    *("rms_norm/int8", "layer_norm/int8", "layer_norm/int8/scale"),
)
PLAIN_DTYPES, FUSED_DTYPES = ("float16", "float32", "float64"), ("float16", "float32")
# Numbers of rows: the most that move MOVED_BYTES, but no fewer than every multiprocessor needs some of.
ROWS = (49152, 24576, 12288, 8192, 4096, 2048, 1024, 512, 264)
MOVED_BYTES = 400 << 20
FEW_ROWS = 8192  # that rules for few rows are for
LONGEST_ROW_BYTES = 4 << 20  # of rules without an end
# Which of a rule's widths, in ascending order, are measured: for all rules the first of these, then the next.
PARTS = (0.7, 0.2, 0.95, 0.45)
# Widths that the sweep has not, and ops that are measured there.
BETWEEN = (
    *(48, 77, 96, 200, 384, 511, 640, 1001, 1280, 1536, 2049, 3000, 3072, 4097, 5120, 7168),
    *(10000, 14336, 20001, 24000, 30000, 50304, 100000, 128256),
)
BETWEEN_OPS = ("softmax", "rms_norm", "layer_norm")
HALVES_LAST = "bfloat16"  # which the rules of float16 are for, too: measured last
WIDTH_PARTS = (0.1, 0.4, 0.7, 1.0)  # of the range of a rule: where points are looked for
REPLAYS = 9
COMPILED_AT_ONCE = 15  # processes, and one of the host's cores is left for the one that measures
AHEAD = 200  # points whose kernels are compiled meanwhile
PATIENCE = 120  # seconds that one kernel may take, with those before it

# What plans of recordings from before rows apart do not have: they are of rows that are contiguous.
LATER_FIELDS = {"across": 0, "waits": 0}


@dataclasses.dataclass(frozen=True)
class Shares:
    """The shares of the copy rate that were measured at a point: the median and the quartiles of each plan.

    All three are 0 for a plan that cannot run, or spills. refused: the reasons, and how many plans each refused.
    """

    point: Point
    plans: Mapping[Plan, tuple[float, float, float]]
    how: Mapping[Plan, str]
    refused: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        names = ("share", "low", "high")
        plans = [
            {
                "how": self.how[plan],
                **{name: round(each, 4) for name, each in zip(names, shares, strict=True)},
                "plan": tuned_plans.plan_as_dict(plan),
            }
            for plan, shares in self.plans.items()
        ]
        return {**dataclasses.asdict(self.point), "plans": plans, "refused": dict(self.refused)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Shares:
        """Return what as_dict() described. Raises KeyError, TypeError or ValueError for anything else."""
        plans: dict[Plan, tuple[float, float, float]] = {}
        how: dict[Plan, str] = {}
        for each in told["plans"]:
            plan = tuned_plans.plan_from({**LATER_FIELDS, **each["plan"]})
            if plan is None:
                raise ValueError(f"{each['plan']} is no plan of this version")
            plans[plan] = (float(each["share"]), float(each["low"]), float(each["high"]))
            how[plan] = str(each["how"])
        point = Point(*(told[field.name] for field in dataclasses.fields(Point)))
        forms.form(point.op)
        return cls(point, plans, how, told["refused"])


@dataclasses.dataclass(frozen=True)
class Search:
    """A recorded search. about: all but its points, as in the file."""

    about: Mapping[str, Any]
    points: Sequence[Shares]
    file: str

    @property
    def limits(self) -> Limits:
        """What the device allows that it ran on."""
        return Limits(**self.about["limits"])


def read(path: Path) -> Search:
    """Return a recorded search. Raises ValueError where a file is none, OSError where it cannot be read."""
    try:
        told = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    kind = told.get("kind") if isinstance(told, dict) else type(told).__name__
    if kind != KIND:
        raise ValueError(f"{path} is {kind!r}: a file that `cupynorm tune --search` has written is expected")
    if told.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {told.get('schema')!r}, {SCHEMA} is expected")
    try:
        about = {name: value for name, value in told.items() if name != "points"}
        search = Search(about, [Shares.from_dict(each) for each in told["points"]], path.as_posix())
        _ = search.limits, about["date"], about["device"]["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or no search of rules: {type(error).__name__}: {error}"
        ) from error
    return search


# ---- which points


def points(
    content: Content,
    limits: Limits,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    each: Callable[..., Iterable[Any]] = map,
) -> list[Point]:
    """Return the points that tell what each rule earns, the most telling first, of the given forms and dtypes.

    First come known_points() and powers of two, which are what people have. Then comes one point for each rule, then
    another width for each, and so on: a search that is cut short has seen all lists of rules then, and not some of them
    well. each: map, or the same of several processes.
    """
    held: dict[str, list[Point]] = {}
    of_forms = [
        (op, dtype)
        for op in ops or FORMS
        for dtype in (PLAIN_DTYPES if forms.form(op).alone else FUSED_DTYPES)
        if not dtypes or dtype in dtypes
    ]
    for found in each(partial(held_by_rules, content.told, content.file, limits), of_forms):
        for rule, at in found.items():
            held.setdefault(rule, []).extend(at)
    rules = [row["id"] for row in content.rows if row["id"] in held]
    place: dict[str, int] = {}
    seen: dict[List, int] = {}
    for rule in rules:
        table, *_ = lists_of(content.by_name[rule])
        place[rule] = seen[table] = seen.get(table, 0) + 1
    # doubles are asked for less often, and are timed last
    doubles = {row["id"]: all(size == DOUBLE_BYTES for _, size in kinds_of(row)) for row in content.rows}
    rules.sort(key=lambda rule: (doubles[rule], place[rule]))
    besides = [
        point
        for point in known_points()
        if (not ops or point.op in ops) and (not dtypes or point.dtype in dtypes)
    ]
    halves = [point for point in besides if point.dtype == HALVES_LAST]
    chosen = dict.fromkeys(point for point in besides if point.dtype != HALVES_LAST)
    for rule in rules:
        chosen.update(dict.fromkeys(_powers_of_two(held[rule])))
    for part in PARTS:
        for rule in rules:
            at = held[rule]
            chosen[at[min(len(at) - 1, int(part * len(at)))]] = None
    return list(chosen | dict.fromkeys(halves))


def known_points() -> list[Point]:
    """Return the points of the benchmark's sweep, plain ops first, and widths between those that it has."""
    plain = [name for name in forms.FORMS if forms.form(name).alone]
    between = [
        Point(op, dtype, _rows_for(op, dtype, cols), cols)
        for op in BETWEEN_OPS
        for dtype in bench_points.FEW_DTYPES
        for cols in BETWEEN
    ]
    fused = [name for name in FORMS if name not in plain]
    return list(dict.fromkeys([*bench_points.points(plain, ()), *between, *bench_points.points(fused, ())]))


def _powers_of_two(held: Sequence[Point]) -> list[Point]:
    """Return the first and the last of a rule's points whose columns are a power of two."""
    found = [point for point in held if point.cols.bit_count() == 1 and not point.offset]
    return [found[0], found[-1]] if found else []


def held_by_rules(
    told: Mapping[str, Any], file: str, limits: Limits, of_form: tuple[str, str]
) -> dict[str, list[Point]]:
    """Return the points of a form and dtype that each rule of a file decides, in the order of their widths."""
    content, (op, dtype) = Content(told, file), of_form
    held: dict[str, list[Point]] = {}
    kind = bench.lowered(Point(op, dtype, FEW_ROWS, 64)).problem.kind
    for point in _points_of(content, op, dtype, kind):
        chosen = content.choose(rule_plans.one_by_one(bench.lowered(point).problem), limits)
        if chosen is not None and chosen.rule:
            held.setdefault(chosen.rule, []).append(point)
    return held


def _points_of(content: Content, op: str, dtype: str, kind: tuple[int, int]) -> Iterator[Point]:
    """Give points of a form in the order of their widths."""
    size = dtype_of(dtype).itemsize
    rules = [row for row in content.rows if kind in kinds_of(row)]
    widths = _widths(rules, size)
    for cols in sorted(widths):
        rows = _rows_for(op, dtype, cols)
        numbers = {rows}
        for row in rules:
            if ("many" in row or "min_rows" in row) and row.get("above", 0) < cols * size <= row["row_bytes"]:
                numbers |= {ROWS[0], FEW_ROWS}
        for offset in (0, 1):
            if offset and (not forms.form(op).alone or cols * size % ACCESS_BYTES):
                continue
            for each in sorted(numbers):
                yield Point(op, dtype, each, cols, offset)


def _widths(rules: Sequence[rule_plans.Row], size: int) -> set[int]:
    """Return numbers of columns within what rules of a kind may hold: whole accesses, powers of two and odd ones."""
    widths = {1 << power for power in range(3, 21) if (1 << power) * size <= LONGEST_ROW_BYTES}
    ends: dict[tuple[Any, ...], float] = {}
    for row in rules:
        table = lists_of(row)[0][:2]  # of any kind: these are one kind's
        longest = row["row_bytes"] or LONGEST_ROW_BYTES
        least = row.get("above", 0 if row["rule"] == "fixed" else ends.get(table, 0))
        ends[table] = max(longest, ends.get(table, 0))
        for part in WIDTH_PARTS:
            cols = int(least + part * (longest - least)) // size
            access = ACCESS_BYTES // size
            widths |= {cols, cols - 1 | 1, cols // access * access, cols // 64 * 64, cols // 256 * 256}
            widths |= {cols // 2 * 2, cols // access * access - access}
    return {each for each in widths if 1 <= each <= LONGEST_ROW_BYTES // size}


def _rows_for(op: str, dtype: str, cols: int) -> int:
    moved = forms.form(op).bytes_moved(FEW_ROWS, cols, dtype) / FEW_ROWS
    return next((rows for rows in ROWS if rows * moved <= MOVED_BYTES), ROWS[-1])


# ---- the search


def search(
    path: Path,
    content: Content,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    *,
    seconds: float = math.inf,
    processes: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Measure points until `seconds` have passed, and keep each in a file; yield how many it has, and of how many.

    A file that is there is gone on with. Raises ValueError if that is of another device, version or file of rules.
    """
    end = time.monotonic() + seconds
    about, limits = _about(content), devices.present_limits()
    done: set[Point] = set()
    if path.exists():
        earlier = read(path)
        for name in ("limits", "digest", "rules"):
            if earlier.about.get(name) != about[name]:
                raise ValueError(
                    f"{path} was recorded with other {name}: {earlier.about.get(name)}, not {about[name]}; "
                    "give another file"
                )
        done = {each.point for each in earlier.points}
    else:
        path.write_text(_text(about, []), "utf-8")
    if processes is None:
        processes = min(COMPILED_AT_ONCE, (os.cpu_count() or 1) - 1)
    with bench.processes(processes) as pool:
        wanted = points(content, limits, ops, dtypes, pool.map if pool else map)
        left = [point for point in wanted if point not in done]
        count, every = len(done), len(done) + len(left)
        yield count, every
        ahead = _Ahead(content, limits, left, pool)
        for number, point in enumerate(left):
            how = ahead.compiled(number, end)
            if time.monotonic() > end:
                return
            _add(path, measure(point, how), first=count == 0)
            count += 1
            yield count, every


def measure(point: Point, how: Mapping[Plan, str]) -> Shares:
    """Time plans at a point in turns, with copies of the same bytes. how: what leads to each, as contenders() says."""
    refused: dict[str, int] = {}
    shares: dict[Plan, tuple[float, float, float]] = {}
    device, form = devices.present_device(), forms.form(point.op)
    try:
        with compiler.Kernels():
            plans = usable(device, bench.lowered(point), list(how), refused, 1)
            timed = _timed(point, form, plans, refused) if plans else {}
        shares = {plan: timed.get(plan, (0.0, 0.0, 0.0)) for plan in how}
    except MemoryError as error:  # CuPy's, too
        refused[timing.one_line(error)] = len(how)
    finally:
        row_ops.forget()  # cached calls of kernels that are now unloaded
        peers.forget()
    return Shares(point, shares, {plan: how[plan] for plan in shares}, refused)


def _timed(
    point: Point, form: Form, plans: Sequence[Plan], refused: dict[str, int]
) -> dict[Plan, tuple[float, float, float]]:
    moved = form.bytes_moved(point.rows, point.cols, dtype_of(point.dtype))
    sets = buffers.allocate(point, moved)
    notes: dict[str, str] = {}
    arrays = [each.arrays for each in sets]
    runs = {str(number): bench.ours(form, arrays, plan) for number, plan in enumerate(plans)}
    timings = timing.time_interleaved(
        {**runs, **timing.copy_runs([each.copy for each in sets])},
        len(sets),
        replays=REPLAYS,
        calls=buffers.calls_for(moved, len(sets)),
        seconds=timing.REPLAY_SECONDS,
        notes=notes,
    )
    copy = min((each.median for name, each in timings.items() if name.startswith(COPY)), default=math.nan)
    for name in runs:
        if name not in timings:
            why = notes.get(name, "not launched")
            refused[why] = refused.get(why, 0) + 1
    times = {plan: timings[str(number)] for number, plan in enumerate(plans) if str(number) in timings}
    return {plan: (copy / each.median, copy / each.high, copy / each.low) for plan, each in times.items()}


def _about(content: Content) -> dict[str, Any]:
    """Return what a file says beside its points. Raises NoDeviceError."""
    limits = devices.present_limits()
    report = bench.new_report().about
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "date": report["date"],
        "device": report["device"],
        "versions": report["versions"],
        "limits": dataclasses.asdict(limits),
        "digest": compiler.digest(),
        "rules": content.file,
    }


# ---- the file: a line for each point, and whole after each


def _text(about: Mapping[str, Any], entries: Sequence[Shares]) -> str:
    head = json.dumps(about, indent=2).removesuffix("\n}")
    lines = ",\n".join(json.dumps(each.as_dict()) for each in entries)
    return f'{head},\n  "points": [\n{lines}{END}'


END = "\n]}\n"


def _add(path: Path, found: Shares, *, first: bool) -> None:
    """Write a point in place of the end, and the end again."""
    line = json.dumps(found.as_dict())
    with path.open("r+b") as file:
        file.seek(-len(END), os.SEEK_END)
        file.write(f"{'' if first else ',' + chr(10)}{line}{END}".encode())


# ---- kernels are compiled ahead, by other processes


class _Ahead:
    """Plans points, and has their kernels compiled, some way ahead of where they are timed."""

    def __init__(
        self,
        content: Content,
        limits: Limits,
        wanted: Sequence[Point],
        pool: concurrent.futures.Executor | None,
    ) -> None:
        self._content, self._limits, self._wanted, self._pool = content, limits, wanted, pool
        self._planned: list[dict[Plan, str]] = []
        self._waiting: list[list[concurrent.futures.Future[None]]] = []
        self._jobs: dict[tuple[str, str], concurrent.futures.Future[None]] = {}

    def compiled(self, number: int, end: float) -> dict[Plan, str]:
        """Return the plans of a point, compiled into the cache on disk unless `end` comes before."""
        while len(self._planned) <= min(number + AHEAD * bool(self._pool), len(self._wanted) - 1):
            self._plan(self._wanted[len(self._planned)])
        patience = max(0.0, min(PATIENCE, end - time.monotonic()))
        concurrent.futures.wait(self._waiting[number], timeout=patience)
        return self._planned[number]

    def _plan(self, point: Point) -> None:
        spec = bench.lowered(point)
        plans = rule_plans.contenders(self._content, rule_plans.one_by_one(spec.problem), self._limits)
        waiting = []
        for plan in plans if self._pool else ():
            job = (spec.text, spec.expression(plan))
            if job not in self._jobs:
                self._jobs[job] = self._pool.submit(compile_one, *job)  # type: ignore[union-attr]
            waiting.append(self._jobs[job])
        self._planned.append(plans)
        self._waiting.append(waiting)


def compile_one(text: str, expression: str) -> None:
    """Compile a kernel into the cache on disk without loading it: another process is timing."""
    key = compiler.key_of(text, expression)
    if cubins.load(key) is None:
        with contextlib.suppress(Exception):  # measuring the point will report the same error
            cubins.store(key, compiler.compile_cubin(text, expression))
