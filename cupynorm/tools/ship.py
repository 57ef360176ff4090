"""Makes the rules that ship from recorded searches: a rule stays where it earns more than the noise. Needs no device.

The planner itself is asked what it would do with a rule left out or changed, and the searches how fast that was. So
this holds for every kind of list, however a rule is looked up in it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm.plan.config import Plan
from cupynorm.plan.limits import Limits
from cupynorm.plan.problem import Problem
from cupynorm.tools import bench, rule_plans
from cupynorm.tools.results import NOISE, Point
from cupynorm.tools.rule_plans import Chosen, Content, Row
from cupynorm.tools.search import Search

HOW_TO = "docs/add-gpu-data.md"
LEAST_POINTS = 2  # of a rule that may be left out, unless it holds one width only
# Numbers of rows, for each multiprocessor, for which a row is to be summed in the same order.
ROWS_PER_SM = (1, 8, 62, 192, 372)


class Seen(NamedTuple):
    """A point of a search, as the planner takes it. shares: of the copy rate, by plan; 0: it cannot run."""

    point: Point
    problem: Problem
    limits: Limits
    shares: Mapping[Plan, float]
    source: str


class Move(NamedTuple):
    """A change of the rules: names of those that are left out, and what others are instead."""

    without: tuple[str, ...] = ()
    changed: Mapping[str, Row] = {}


class Earned(NamedTuple):
    """What a row of the file earns at a point, by its number: its share, less that without the row.

    share_without: None where the plan without the row was not timed. number: None where the row changes no point.
    """

    gain: float = -math.inf
    number: int | None = None
    share_without: float | None = None


@dataclasses.dataclass(frozen=True)
class Shipped:
    """The rules that ship, as JSON, and what has become of those before.

    points, unknown: how many points counted, and how many did not, since what the planner chooses there was not timed.
    before, after: the geometric mean of the shares. slower: points where a plan that no list of rules leads to was
    faster by more than the noise.
    """

    told: Mapping[str, Any]
    rules_before: int
    left_out: Sequence[str]
    changed: Mapping[str, str]
    not_measured: Sequence[str]
    points: int
    unknown: int
    before: float
    after: float
    slower: int

    @property
    def text(self) -> str:
        """The file's text."""
        return rule_plans.text_of(self.told)

    def summary(self) -> dict[str, Any]:
        """Return the fields but for the rules, for JSON."""
        fields = dataclasses.asdict(self)
        del fields["told"]
        return {"rules": len(self.told["rules"]), **fields}

    def lines(self) -> Iterator[str]:
        """Give lines to print."""
        yield f"{self.rules_before} rules before, {len(self.told['rules'])} now; by {self.points} points"
        if self.unknown:
            yield f"not counted: {self.unknown} points, since what the planner chooses there was not timed"
        yield f"share of the copy rate: {self.before:.4f} before, {self.after:.4f} now (geometric mean)"
        yield f"a plan that no rule leads to is faster by more than {NOISE} at {self.slower} points"
        for name in self.left_out:
            yield f"left out: {name}"
        for old, new in self.changed.items():
            yield f"changed: {old} is {new}"
        for name in self.not_measured:
            yield f"kept, not measured: {name}"


def ship(
    content: Content, searches: Sequence[Search], progress: Callable[[int, int], None] = lambda *_: None
) -> Shipped:
    """Return the fewest rules that are found with which no point is slower than now by more than the noise.

    Raises ValueError where the searches are of several architectures.
    """
    architectures = {search.limits.compute_capability for search in searches}
    if len(architectures) != 1:
        raise ValueError(
            f"the searches are of {', '.join(sorted(architectures))}: give those of one architecture"
        )
    content = Content({**content.told, "architecture": architectures.pop()}, content.file)
    seen = [each for search in searches for each in _seen(search)]
    shipping = _Shipping(content, seen)
    shipping.improve()
    shipping.leave_out(progress)
    return shipping.finished({_source_name(search): _source(search) for search in searches})


def _seen(search: Search) -> Iterator[Seen]:
    for each in search.points:
        if any(share for share, *_ in each.plans.values()):  # else nothing ran there, for whatever reason
            problem = bench.lowered(each.point).problem
            shares = {plan: shares[0] for plan, shares in each.plans.items()}
            yield Seen(each.point, problem, search.limits, shares, _source_name(search))


def _source_name(search: Search) -> str:
    return f"search {search.file.rpartition('/')[2].removesuffix('.json')}"


def _source(search: Search) -> dict[str, str]:
    return {
        "device": search.about["device"]["name"],
        "date": search.about["date"][:10],
        "file": search.file,
        "note": HOW_TO,
        "what": f"each rule beside its neighbours and the planner without it, at {len(search.points)} points",
    }


class _Shipping:
    """Changes rules step by step. reference: the share that each point must keep, but for the noise."""

    def __init__(self, content: Content, seen: Sequence[Seen]) -> None:
        self.first = self.content = content
        chosen = [content.choose(each.problem, each.limits) for each in seen]
        known = [
            (each, found)
            for each, found in zip(seen, chosen, strict=True)
            if found and found.plan in each.shares
        ]
        self.unknown = len(seen) - len(known)
        self.seen = [each for each, _ in known]
        self.chosen = [found for _, found in known]
        self.before = [each.shares[found.plan] for each, found in known]
        self.reference = list(self.before)
        self.orders: dict[Problem, int] = {}  # how many there are of a row, whatever the number of rows
        self.measured = collections.Counter(found.rule for found in self.chosen)

    # ---- moves

    def improve(self) -> None:
        """Move the ends of rules to where a neighbour is faster by more than the noise."""
        for row in list(self.content.rows):
            for move in list(self._shifts(row["id"])):
                self._take(move, faster=True)

    def leave_out(self, progress: Callable[[int, int], None]) -> None:
        """Leave out what earns no more than the noise, the least first, until there is nothing left to leave out."""
        names = [*(row["id"] for row in self.content.rows), *map(rule_plans.name_of, self.content.crossovers)]
        names.sort(key=lambda name: self._earned(name).gain)
        again = True
        while again:
            again = False
            for done, name in enumerate(names):
                if name in self.content.by_name and self._may_go(name):
                    again |= any(self._take(move) for move in self._removals(name))
                progress(done + 1, len(names))

    def _shifts(self, name: str) -> Iterator[Move]:
        """Give moves of a rule's end to measured widths, up to the ends of those before and after it."""
        if name not in self.content.by_name:
            return
        row = self.content.by_name[name]
        after = self.content.after(name)
        if not after or row["row_bytes"] is None:
            return
        least = max((self._end(each) for each in self.content.before(name)[:1]), default=0)
        most = self._end(after[0])
        mine = [number for number, chosen in enumerate(self.chosen) if chosen.rule in {name, after[0]}]
        if not any(self._slower(number) for number in mine):
            return
        widths = {self.seen[number].problem.row_bytes for number in mine}
        for width in sorted(widths):
            if least < width < most and width != row["row_bytes"]:
                yield Move(changed={name: {**row, "row_bytes": width}})

    def _end(self, name: str) -> float:
        longest = self.content.by_name[name]["row_bytes"]
        return math.inf if longest is None else float(longest)

    def _removals(self, name: str) -> Iterator[Move]:
        """Give moves that leave a rule out: its rows go to those down the list, or to the one before it."""
        yield Move((name,))
        for before in self.content.before(name)[:1]:
            longer = {**self.content.by_name[before], "row_bytes": self.content.by_name[name]["row_bytes"]}
            yield Move((name,), {before: longer})

    def _may_go(self, name: str) -> bool:
        row = self.content.by_name[name]
        if "id" not in row:
            return bool(self._changed_by(Move((name,))))
        one_width = row["row_bytes"] is not None and row.get("above", 0) >= row["row_bytes"] - row["bytes"]
        return self.measured[name] >= (1 if one_width else LEAST_POINTS)

    # ---- what a move comes to

    def _near(self, move: Move) -> list[int]:
        """Return the points that a move may matter for, those that its rows decide first."""
        names = (*move.without, *move.changed)
        parameters, size = rule_plans.kind_of(self.content.by_name[names[0]])
        least, most = self._reach(move)
        near = [
            number
            for number, seen in enumerate(self.seen)
            if size in {None, seen.problem.element_bytes} and parameters in {None, seen.problem.kind[0]}
            if least < seen.problem.row_bytes <= most
        ]
        return sorted(near, key=lambda number: self.chosen[number].rule not in names)

    def _reach(self, move: Move) -> tuple[float, float]:
        """Return of more than how many bytes, and up to how many, rows are that a move may matter for."""
        least, most = math.inf, 0.0
        for name in (*move.without, *move.changed):
            row = self.content.by_name[name]
            table = self.content.tables[rule_plans.table_of(row)] if "id" in row else []
            # the first and the last of a list stand in where no rule holds a row
            if not table or row in (table[0], table[-1]):
                return 0, math.inf
            before = table[table.index(row) - 1]["id"] if row["rule"] in rule_plans.FIRST_IS_TAKEN else None
            least = min(least, self._end(before) if before else row.get("above", 0))
            new = move.changed.get(name, row)["row_bytes"]
            most = max(most, self._end(name), math.inf if new is None else new)
        return least, most

    def _changed_by(self, move: Move) -> dict[int, Chosen | None]:
        """Return the points whose plan a move changes, and the new one."""
        content = self.content.but(*move)
        found = {}
        for number in self._near(move):
            chosen = content.choose(self.seen[number].problem, self.seen[number].limits)
            if chosen is None or chosen.plan != self.chosen[number].plan:
                found[number] = chosen
        return found

    def _take(self, move: Move, *, faster: bool = False) -> bool:
        """Make a move if no point becomes slower by more than the noise. faster: and some is faster by more."""
        if any(each not in self.content.by_name for each in (*move.without, *move.changed)):
            return False
        content, near = self.content.but(*move), self._near(move)
        chosen: dict[int, Chosen] = {}
        gained = False
        for number in near:
            seen = self.seen[number]
            found = content.choose(seen.problem, seen.limits)
            share = seen.shares.get(found.plan) if found else None
            if found is None or share is None or share < self.reference[number] - NOISE:
                return False
            gained |= share > self._share(number) + NOISE
            chosen[number] = found
        # of a kind with rules for many or for few rows, another may decide for other numbers of rows
        kind = rule_plans.kind_of(self.content.by_name[(*move.without, *move.changed)[0]])
        by_rows = any(
            rule_plans.kind_of(row) == kind and ("many" in row or "min_rows" in row)
            for row in self.content.rows
        )
        changed = [number for number in near if by_rows or chosen[number].plan != self.chosen[number].plan]
        if (faster and not gained) or not self._same_order(content, changed):
            return False
        self.content = content
        for number, found in chosen.items():
            self.chosen[number] = found
            if faster:
                self.reference[number] = max(self.reference[number], self._share(number))
        return True

    def _share(self, number: int) -> float:
        return self.seen[number].shares[self.chosen[number].plan]

    def _slower(self, number: int) -> bool:
        """Say whether some plan is faster at a point, by more than the noise."""
        return max(self.seen[number].shares.values()) > self._share(number) + NOISE

    def _same_order(self, content: Content, numbers: Sequence[int]) -> bool:
        """Say whether rows are still summed in an order that does not depend on how many there are."""
        found: dict[Problem, int] = {}
        for number in numbers:
            seen = self.seen[number]
            problem = dataclasses.replace(seen.problem, rows=0)
            if seen.problem.fused or problem in found:
                continue
            if problem not in self.orders:
                self.orders[problem] = len(self._orders(seen, self.content))
            found[problem] = len(self._orders(seen, content))
            if found[problem] > self.orders[problem]:
                return False
        self.orders.update(found)
        return True

    @staticmethod
    def _orders(seen: Seen, content: Content) -> set[tuple[Any, ...]]:
        """Return the orders in which a row is summed, of several numbers of rows: of small batches none."""
        found = set()
        small = content.rules.small_batch
        for per_sm in ROWS_PER_SM:
            if per_sm < small.rows and seen.problem.row_bytes >= small.row_bytes:
                continue
            problem = dataclasses.replace(seen.problem, rows=per_sm * seen.limits.sm_count)
            chosen = content.choose(problem, seen.limits)
            found.add(order_of_summation(chosen.plan) if chosen else ())
        return found

    def _earned(self, name: str) -> Earned:
        """Return what a row of the file earns at the point that gains most by it."""
        row = self.content.by_name[name]
        most = Earned()
        content = self.content.but([name])
        for number in self._near(Move((name,))):
            if "id" in row and self.chosen[number].rule != name:
                break  # those that it decides come first
            seen = self.seen[number]
            found = content.choose(seen.problem, seen.limits)
            if found is None or found.plan != self.chosen[number].plan:
                share = seen.shares.get(found.plan) if found else None
                earned = Earned(self._share(number) - (share or 0.0), number, share)
                most = max(most, earned, key=lambda each: each.gain)
        return most

    # ---- the file

    def finished(self, sources: Mapping[str, Mapping[str, str]]) -> Shipped:
        """Return the rules with where they come from."""
        rows = [self._told(row) for row in self.content.rows]
        crossovers = [self._told(row) for row in self.content.crossovers]
        changed = _renamed(rows, self.first)
        told = {**self.content.told, "rules": rows, "crossovers": crossovers}
        every = {**told["sources"], **sources}
        used = {row["source"] for row in (*rows, *crossovers)} | set(told["sections"].values())
        told["sources"] = {name: each for name, each in every.items() if name in used}
        decided = {chosen.rule for chosen in self.chosen}
        return Shipped(
            told=told,
            rules_before=len(self.first.rows),
            left_out=[name for name in self.first.by_name if name not in self.content.by_name],
            changed=changed,
            not_measured=[row["id"] for row in self.content.rows if row["id"] not in decided],
            points=len(self.seen),
            unknown=self.unknown,
            before=_mean(self.before),
            after=_mean([self._share(number) for number in range(len(self.seen))]),
            slower=sum(map(self._slower, range(len(self.seen)))),
        )

    def _told(self, row: Row) -> Row:
        """Return a row with what it earns, where that was measured."""
        _, number, share_without = self._earned(rule_plans.name_of(row))
        if number is None:
            return row
        seen = self.seen[number]
        return {
            **{
                key: value
                for key, value in row.items()
                if key not in {"share", "share_without", "at", "source"}
            },
            "share": self._share(number),
            "share_without": share_without,
            "at": str(seen.point),
            "source": seen.source,
        }


def _renamed(rows: list[Row], first: Content) -> dict[str, str]:
    """Name rules whose end has moved after the new one; return old names and new ones."""
    changed: dict[str, str] = {}
    for row in rows:
        if row["row_bytes"] != first.by_name[row["id"]]["row_bytes"]:
            base = row["id"].rpartition("-to-")[0] + f"-to-{row['row_bytes'] or 'any'}"
            taken = {each["id"] for each in rows} - {row["id"]}
            numbered = (base, *(f"{base}-{number}" for number in range(2, len(rows) + 2)))
            old = row["id"]
            row["id"] = next(name for name in numbered if name not in taken)
            changed[old] = row["id"]
    return changed


def order_of_summation(plan: Plan) -> tuple[Any, ...]:
    """Return what decides in which order a row is summed: which elements a thread has, and which threads meet.

    Not how many rows a group holds at once, where parameters wait, what is on its way, nor how many groups a block has.
    """
    held = (plan.kernel, plan.vector, plan.vectors, plan.unaligned, plan.ctas_per_row)
    if plan.kernel == "row_registers":
        by_lines = plan.dynamic and plan.unaligned > 0  # a row is then cut at lines, not at vectors
        return (*held, plan.group, plan.full, by_lines)
    return (*held, plan.block)


def _mean(shares: Sequence[float]) -> float:
    """Return the geometric mean; nan of none."""
    logs = [math.log(each) for each in shares if each > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
