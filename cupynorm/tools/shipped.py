"""The rules that ship: as the text of a file, and what has become of those before, for people and as JSON."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm.tools import rule_plans
from cupynorm.tools.results import NOISE
from cupynorm.tools.rule_plans import Content, Row


class Means(NamedTuple):
    """Geometric means of shares before and now, and the deepest fall of a point; nan of no points."""

    points: int
    before: float
    after: float
    worst: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Means:
        """Return those of some points."""
        falls = (one - other for one, other in zip(before, after, strict=True))
        return cls(len(after), _mean(before), _mean(after), max(falls, default=math.nan))


@dataclasses.dataclass(frozen=True)
class Shipped:
    """The rules that ship, as JSON, and what has become of those before.

    merged: rules whose rows are now held by another one, for several kinds. changed: new names of rules that have
    another end or other kinds. unknown: points that do not count, since what the planner chooses there was not timed.
    slower: points where a plan that no list of rules leads to was faster by more than the noise.
    """

    told: Mapping[str, Any]
    rules_before: int
    left_out: Sequence[str]
    merged: Mapping[str, str]
    changed: Mapping[str, str]
    not_measured: Sequence[str]
    kept: Mapping[str, str]
    all: Means
    sweep: Means
    unknown: int
    slower: int

    @property
    def text(self) -> str:
        """The file's text."""
        return rule_plans.text_of(self.told)

    def summary(self) -> dict[str, Any]:
        """Return the fields but for the rules, for JSON."""
        fields = dataclasses.asdict(self)
        del fields["told"]
        means = {
            name: getattr(self, name)._asdict() if getattr(self, name).points else None for name in MEANS
        }
        return {"rules": len(self.told["rules"]), **fields, **means}

    def lines(self) -> Iterator[str]:
        """Give lines to print."""
        yield f"{self.rules_before} rules before, {len(self.told['rules'])} now"
        if self.unknown:
            yield f"not counted: {self.unknown} points, since what the planner chooses there was not timed"
        for name in MEANS:
            means = getattr(self, name)
            if means.points:
                yield (
                    f"{name}: {means.points} points, share of the copy rate {means.before:.4f} before, "
                    f"{means.after:.4f} now (geometric mean); none has lost more than {means.worst:.4f}"
                )
        yield f"a plan that no rule leads to is faster by more than {NOISE} at {self.slower} points"
        for name in self.left_out:
            yield f"left out: {name}"
        for name, other in self.merged.items():
            yield f"merged: {name} with {other}"
        for old, new in self.changed.items():
            yield f"changed: {old} is {new}"
        for name in self.not_measured:
            yield f"kept, not measured: {name}"
        for name, why in self.kept.items():
            yield f"kept: {name}: {why}"


MEANS = ("all", "sweep")


def renamed(rows: list[Row], first: Content) -> dict[str, str]:
    """Name rules whose end or kinds have changed after the new ones; return old names and new ones."""
    changed: dict[str, str] = {}
    for row in rows:
        old, before = row["id"], first.by_name[row["id"]]
        if any(row[key] != before[key] for key in ("row_bytes", "parameters", "bytes")):
            stem = re.sub(r"(-p\d+-b\d+)?-to-\w+(-\d+)?$", "", old)
            parameters, sizes = _digits(row["parameters"]), _digits(row["bytes"])
            base = f"{stem}-p{parameters}-b{sizes}-to-{row['row_bytes'] or 'any'}"
            taken = {each["id"] for each in rows} - {old}
            numbered = (base, *(f"{base}-{number}" for number in range(2, len(rows) + 2)))
            row["id"] = next(name for name in numbered if name not in taken)
            changed[old] = row["id"]
    return changed


def _digits(value: int | Sequence[int]) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def _mean(shares: Sequence[float]) -> float:
    """Return the geometric mean of those that are not 0; nan of none."""
    logs = [math.log(each) for each in shares if each > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
