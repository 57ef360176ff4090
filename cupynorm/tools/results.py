"""Results of a benchmark: points and their shares of the copy rate, targets, tables and files. Needs no device."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynorm.catalog.form import LONG, Targets
from cupynorm.catalog.forms import FORMS
from cupynorm.tools import documents

if TYPE_CHECKING:
    from cupynorm.catalog.form import Form

OURS = "cupynorm"  # and "cupynorm <variant>" where a variant was forced
COPY = "copy"  # prefix of contenders that only copy the same number of bytes
NOISE = 0.01  # two rates this close are equal
# A point with at most FEW_ROWS rows, but at least FEW_COLS columns, has too few rows to fill the device.
FEW_ROWS, FEW_COLS = 64, 65536
EVEN_COLS = 16  # columns that are not a multiple make rows that are not whole sectors
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over samples, and the quartiles around it."""

    median: float
    low: float
    high: float

    def rate(self, bytes_moved: int) -> float:
        """Return bytes per second at the median."""
        return bytes_moved / self.median


@dataclasses.dataclass(frozen=True)
class Point:
    """A shape of an op to time. offset: elements by which x and y are away from an aligned address."""

    op: str
    dtype: str
    rows: int
    cols: int
    offset: int = 0

    @property
    def kind(self) -> str:
        """The kind of its target: "even", "odd" (or misaligned) or "few" (rows)."""
        if self.rows <= FEW_ROWS and self.cols >= FEW_COLS:
            return "few"
        return "odd" if self.offset or self.cols % EVEN_COLS else "even"

    @property
    def shape(self) -> str:
        """The shape, to be printed."""
        return f"{self.rows} x {self.cols}" + (f" +{self.offset}" if self.offset else "")

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times at a point. notes: for some contenders, why there is no time, or what the time means."""

    point: Point
    bytes_moved: int
    timings: Mapping[str, Timing]
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def copy(self) -> float:
        """Seconds of the fastest copy; nan if there was none."""
        return min(
            (each.median for name, each in self.timings.items() if name.startswith(COPY)), default=math.nan
        )

    def share(self, name: str = OURS) -> float:
        """Return a contender's share of the copy rate; nan if it was not timed."""
        return self.copy / self.timings[name].median if name in self.timings else math.nan

    def fastest_peer(self, recorded: Mapping[Point, Mapping[str, float]] | None = None) -> tuple[str, float]:
        """Return the fastest peer and its share, including `recorded` ones; ("", nan) if there is none."""
        shares = {name: self.share(name) for name in self.timings if not name.startswith((OURS, COPY))}
        for name, share in (recorded or {}).get(self.point, {}).items():
            shares[f"{name} (recorded)"] = share
        best = max(shares, key=lambda name: shares[name], default="")
        return best, shares.get(best, math.nan)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON. Times are in seconds."""
        times = {
            name: {**dataclasses.asdict(each), "share": self.share(name)}
            for name, each in self.timings.items()
        }
        return {
            **dataclasses.asdict(self.point),
            "bytes": self.bytes_moved,
            "share": self.share(),
            "times": times,
            "plan": dict(self.plan),
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Measured:
        """Return what as_dict() described."""
        timings = {
            name: Timing(each["median"], each["low"], each["high"]) for name, each in entry["times"].items()
        }
        point = Point(*(entry[field.name] for field in dataclasses.fields(Point)))
        return cls(point, entry["bytes"], timings, entry["plan"], entry["notes"])


@dataclasses.dataclass(frozen=True)
class Target:
    """The least share of the copy rate at points of a kind, with `least` to `most` columns."""

    columns: str
    share: float
    kind: str
    least: int
    most: float = math.inf

    def covers(self, point: Point) -> bool:
        """Return whether this is the target of a point."""
        return point.kind == self.kind and self.least <= point.cols <= self.most


TARGETS = (  # of plain row ops; forms.py has those of other forms
    Target("32, 64", 0.93, "even", 1, 64),
    Target("128, 256", 0.96, "even", 65, 256),
    Target("512 to 16384", 0.98, "even", 257, 16384),
    Target("32768", 0.97, "even", 16385, 32768),
    Target("65536 to 262144", 0.95, "even", 32769),
    Target("odd or misaligned, >= 1000", 0.93, "odd", 1000),
    Target("odd or misaligned, < 1000", 0.90, "odd", 1, 999),
    Target("1 to 64 rows x 64K to 16M", 0.85, "few", 1),
)
LONG_TARGETS = {"even": 0.93, "odd": 0.90}  # of forms at form.LONG's widths, by kind
MEAN_TARGET = 0.98  # the geometric mean of all shares
HOST_TARGETS = {  # seconds per call, on an H200's host
    "layer_norm(x, gamma, beta)": 5.0e-6,
    "layer_norm(x, gamma, beta, out=y)": 3.8e-6,
    "softmax(x)": 4.6e-6,
    "softmax(x, out=y)": 3.8e-6,
    "first call, cold cache": 0.2,
    "first call, warm cache": 0.01,
    "first call of a fusion, cold cache": 0.3,
}


def target_of(point: Point) -> Target | None:
    """Return the target of a point; None if there is none, or if it depends on another point."""
    form = FORMS.get(point.op)
    if form is None or form.alone:
        return next(each for each in TARGETS if each.covers(point))
    if form.target is None or form.beside:
        return None
    if isinstance(form.target, Targets):
        share = form.target.at(point.cols, point.dtype, odd=point.kind == "odd")
        return Target(form.name, share, point.kind, 1)
    long = point.cols >= LONG[0][1]
    share = min(form.target, LONG_TARGETS.get(point.kind, 1.0)) if long else form.target
    return Target(form.name, share, point.kind, 1)


def _alone(points: Iterable[Measured]) -> list[Measured]:
    """Return the points of plain ops, which the table of targets is about."""
    return [each for each in points if each.point.op not in FORMS or FORMS[each.point.op].alone]


@dataclasses.dataclass(frozen=True)
class HostTime:
    """Seconds of the host per call."""

    call: str
    contender: str
    timing: Timing

    def missed(self) -> bool:
        """Return whether this is our time and exceeds its target."""
        return self.contender == OURS and self.timing.median > HOST_TARGETS.get(self.call, math.inf)


Recorded = Mapping[Point, Mapping[str, float]]  # peers' shares of the copy rate, measured elsewhere


def missed(measured: Measured, recorded: Recorded | None = None) -> list[str]:
    """Return the targets that a point misses, and by how much."""
    if OURS not in measured.timings:
        return [f"not timed: {measured.notes.get(OURS, 'no reason known')}"]
    found = []
    share, target = measured.share(), target_of(measured.point)
    if target is not None and share < target.share:
        found.append(f"{target.share} wanted")
    name, best = measured.fastest_peer(recorded)
    if share < best * (1 - NOISE):
        found.append(f"{share / best:.2f} of {name}")
    return found


def mean_share(points: Iterable[Measured]) -> float:
    """Return the geometric mean of our shares at points of plain ops."""
    shares = [each.share() for each in _alone(points) if OURS in each.timings]
    return math.exp(sum(map(math.log, shares)) / len(shares)) if shares else math.nan


WIDTH = max(map(len, FORMS))  # of the first column
HEADER = (
    f"{'op':<{WIDTH}} {'dtype':<9} {'rows x columns':<18} {'us':>9} {'+-':>5} {'TB/s':>6} {'copy':>6} {'share':>6}"
    f"  {'fastest peer':<22}  targets"
)


def line(measured: Measured, recorded: Recorded | None = None) -> str:
    """Return a point as a line under HEADER. +-: half the distance between the quartiles, in percent."""
    point, bytes_moved = measured.point, measured.bytes_moved
    ours = measured.timings.get(OURS, Timing(math.nan, math.nan, math.nan))
    spread = (ours.high - ours.low) / 2 / ours.median
    name, best = measured.fastest_peer(recorded)
    peer = f"{name} {best:.2f}" if name else "-"
    return (
        f"{point.op:<{WIDTH}} {point.dtype:<9} {point.shape:<18} {ours.median * 1e6:>9.2f} {spread:>5.1%} "
        f"{ours.rate(bytes_moved) / 1e12:>6.3f} {bytes_moved / measured.copy / 1e12:>6.3f} {measured.share():>6.3f}"
        f"  {peer:<22}  {'; '.join(missed(measured, recorded)) or 'met'}"
    )


def target_table(points: Sequence[Measured], recorded: Recorded | None = None) -> list[str]:
    """Return a table of the smallest share of each op over dtypes and shapes, and one of forms, with their targets."""
    alone = _alone(points)
    tables = [_table_of_ops(alone, recorded)] if alone else []
    forms = [each for each in points if each not in alone]
    tables += [_table_of_forms(forms, alone)] if forms else []
    return [line for number, table in enumerate(tables) for line in ([""] * bool(number) + table)]


def _table_of_forms(points: Sequence[Measured], alone: Sequence[Measured]) -> list[str]:
    """Return a line for each form: the smallest share over dtypes, by columns."""
    cols = sorted({each.point.cols for each in points})
    lines = [
        f"| form | at least | {' | '.join(map(str, cols))} | |",
        f"| --- | --- |{' --- |' * (len(cols) + 1)}",
    ]
    for name in dict.fromkeys(each.point.op for each in points):
        own = [each for each in points if each.point.op == name]
        least = [
            min((each.share() for each in own if each.point.cols == width), default=math.nan)
            for width in cols
        ]
        cells = ["-" if math.isnan(each) else f"{each:.3f}" for each in least]
        form = FORMS[name]
        wanted = "-" if form.target is None else f"{form.target}" + f" of {form.beside}" * bool(form.beside)
        lines.append(f"| {name} | {wanted} | {' | '.join(cells)} | {_met_of_form(own, form, alone)} |")
    return lines


def _met_of_form(own: Sequence[Measured], form: Form, alone: Sequence[Measured]) -> str:
    if form.target is None:
        return ""
    shares = {each.point: each.share() for each in alone}
    wanted = []
    for each in own:
        plain = shares.get(dataclasses.replace(each.point, op=form.beside), math.nan) if form.beside else 1.0
        target = target_of(each.point)  # none beside another form
        least = (
            target.share if target else form.target * plain if isinstance(form.target, float) else math.nan
        )
        if not math.isnan(least):
            wanted.append((each.share(), least))
    return _met(sum(not share >= least for share, least in wanted), len(wanted))  # nan counts as below


def _table_of_ops(points: Sequence[Measured], recorded: Recorded | None) -> list[str]:
    ops = list(dict.fromkeys(each.point.op for each in points))
    lines = [f"| columns | at least | {' | '.join(ops)} | |", f"| --- | --- |{' --- |' * (len(ops) + 1)}"]
    for target in TARGETS:
        covered = [each for each in points if target.covers(each.point)]
        cells = []
        for op in ops:
            worst = min((each.share() for each in covered if each.point.op == op), default=math.nan)
            cells.append("-" if math.isnan(worst) else f"{worst:.3f}")
        below = sum(not each.share() >= target.share for each in covered)  # nan counts as below
        lines.append(
            f"| {target.columns} | {target.share} | {' | '.join(cells)} | {_met(below, len(covered))} |"
        )
    compared = [each for each in points if each.fastest_peer(recorded)[0]]
    behind = sum(not each.share() >= each.fastest_peer(recorded)[1] * (1 - NOISE) for each in compared)
    mean = mean_share(points)
    lines.append("")
    lines.append(f"never below the fastest peer ({NOISE:.0%} is noise): {_met(behind, len(compared))}")
    lines.append(
        f"geometric mean of {len(points)} shares: {mean:.3f}, at least {MEAN_TARGET}: "
        f"{'met' if mean >= MEAN_TARGET else 'missed'}"
    )
    return lines


def _met(below: int, count: int) -> str:
    if not count:
        return "not measured"
    return f"missed at {below} of {count}" if below else f"met at {count}"


def host_table(times: Sequence[HostTime]) -> list[str]:
    """Return a table of the host's microseconds per call."""
    lines = [f"{'call':<36} {'contender':<12} {'us':>10} {'quartiles':>21}  target"]
    for each in times:
        timing, wanted = each.timing, HOST_TARGETS.get(each.call)
        verdict = ""
        if each.contender == OURS and wanted is not None:
            verdict = f"{wanted * 1e6:g}: {'missed' if each.missed() else 'met'}"
        quartiles = f"{timing.low * 1e6:.2f} to {timing.high * 1e6:.2f}"
        lines.append(
            f"{each.call:<36} {each.contender:<12} {timing.median * 1e6:>10.2f} {quartiles:>21}  {verdict}"
        )
    return lines


def last_lines(points: Sequence[Measured], recorded: Recorded | None = None) -> list[str]:
    """Return the summary: how many targets are missed, and the worst point."""
    if not points:
        return ["nothing was measured"]
    short = sum(bool(missed(each, recorded)) for each in points)
    timed = [each for each in points if OURS in each.timings]
    lines = [f"targets missed: at {short} of {len(points)} points"]
    if timed:
        worst = min(timed, key=lambda each: each.share())
        target = target_of(worst.point)
        wanted = f" (target {target.share})" if target else ""
        lines.append(f"worst point: {worst.point}: {worst.share():.3f} of the copy rate{wanted}")
    return lines


@dataclasses.dataclass
class Report:
    """A whole run: the machine, and the results so far."""

    about: dict[str, Any]
    points: list[Measured] = dataclasses.field(default_factory=list)
    host: list[HostTime] = dataclasses.field(default_factory=list)
    left_out: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "schema": SCHEMA,
            **self.about,
            "left_out": self.left_out,
            "geometric_mean": mean_share(self.points),
            "points": [each.as_dict() for each in self.points],
            "host": [dataclasses.asdict(each) for each in self.host],
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Report:
        """Return what as_dict() described. Raises ValueError if it has another schema."""
        if told.get("schema") != SCHEMA:
            raise ValueError(f"schema is {told.get('schema')!r}, this version reads {SCHEMA}")
        derived = ("schema", "left_out", "geometric_mean", "points", "host")
        host = [HostTime(each["call"], each["contender"], Timing(**each["timing"])) for each in told["host"]]
        return cls(
            about={name: value for name, value in told.items() if name not in derived},
            points=[Measured.from_dict(each) for each in told["points"]],
            host=host,
            left_out=told["left_out"],
        )


def read_recorded(path: Path) -> dict[Point, dict[str, float]]:
    """Return peers' shares from a JSON list of {op, dtype, rows, cols, copy, <peer>: ...}, rates in one unit."""
    fields = ("op", "dtype", "rows", "cols")
    found: dict[Point, dict[str, float]] = {}
    try:
        for each in json.loads(path.read_text("utf-8")):
            point = Point(*(each[name] for name in fields))
            found[point] = {
                name: rate / each["copy"]
                for name, rate in each.items()
                if name not in (*fields, "copy") and isinstance(rate, float)
            }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a record of peers: {error}") from error
    return found


def json_of(report: Report) -> str:
    """Return a report as a JSON document, with null for nan and infinities."""
    return documents.text(report.as_dict(), indent=1) + "\n"


def write_json(path: Path, report: Report) -> None:
    """Write a report atomically: readers see the old file or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json_of(report), "utf-8")
    unfinished.replace(path)


CSV_FIELDS = (
    *(field.name for field in dataclasses.fields(Point)),
    *("bytes", "contender", "median_us", "low_us", "high_us", "tb_per_s", "share"),
)


def write_csv(path: Path, points: Iterable[Measured]) -> None:
    """Write one line for each contender at each point."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_FIELDS)
        for each in points:
            for name, timing in each.timings.items():
                times = (f"{value * 1e6:.4f}" for value in (timing.median, timing.low, timing.high))
                rate = f"{timing.rate(each.bytes_moved) / 1e12:.4f}"
                point = dataclasses.astuple(each.point)
                writer.writerow([*point, each.bytes_moved, name, *times, rate, f"{each.share(name):.4f}"])
