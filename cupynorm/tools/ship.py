"""Makes the rules that ship from recorded searches: a rule stays where it earns more than the noise. Needs no device.

The planner itself is asked what it would do with a rule left out or changed, and the searches how fast that was. So
this holds for every kind of list, however a rule is looked up in it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm.plan.config import Plan
from cupynorm.plan.limits import Limits
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import Kind, kinds_of
from cupynorm.runtime import tuned_plans
from cupynorm.tools import bench, rule_plans, search
from cupynorm.tools.results import NOISE, Point, Report
from cupynorm.tools.rule_plans import Chosen, Content, Row, longest_of
from cupynorm.tools.search import Search

HOW_TO = "docs/add-gpu-data.md"
LEAST_POINTS = 2  # of a rule that may be left out, unless it holds one width only
# Numbers of rows, for each multiprocessor, for which a row is to be summed in the same order.
ROWS_PER_SM = (1, 8, 62, 192, 372)
MEAN_PART = 0.3  # of the tolerance of a point: how far the geometric mean of the sweep may fall
LEAST_SHARE = 1e-3  # stands for that of a plan that cannot run
BY_RANGE = ("fixed",)  # rules of these say where they begin, too
NEEDED = ("cached", "cluster")  # lists that a plan can be asked for by name: one rule of each is kept
CURVE_STEP = 50  # rules
TOGETHER = 12  # moves


class Seen(NamedTuple):
    """A point of searches, as the planner takes it. shares: of the copy rate, by plan; 0: it cannot run."""

    point: Point
    problem: Problem
    limits: Limits
    shares: Mapping[Plan, float]
    source: str
    of_sweep: bool = False


class Move(NamedTuple):
    """A change of the rules: names of those that are left out, what others are instead, and whose places they take."""

    without: tuple[str, ...] = ()
    changed: Mapping[str, Row] = {}
    instead: Mapping[str, str] = {}


class Effect(NamedTuple):
    """What a move does.

    loss, loss_of_sweep: the sums, over all points and over those of the sweep, of the logarithms of the shares before
    over those after it. chosen: what is chosen after it, by the numbers of the points.
    """

    loss: float
    loss_of_sweep: float
    chosen: Mapping[int, Chosen]


class Step(NamedTuple):
    """How far rules have been left out: how many there are, the geometric mean of a sweep, and its deepest fall."""

    rules: int
    mean: float
    worst: float


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

    merged: rules whose rows are now held by another one, for several kinds.
    curve: how the sweep fell while rules were left out.
    points, unknown: how many points counted, and how many did not, since what the planner chooses there was not timed.
    before, after: the geometric mean of the shares. slower: points where a plan that no list of rules leads to was
    faster by more than the noise.
    """

    told: Mapping[str, Any]
    rules_before: int
    left_out: Sequence[str]
    merged: Mapping[str, str]
    curve: Sequence[Step]
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
        fields["curve"] = [step._asdict() for step in self.curve]
        return {"rules": len(self.told["rules"]), **fields}

    def lines(self) -> Iterator[str]:
        """Give lines to print."""
        yield f"{self.rules_before} rules before, {len(self.told['rules'])} now; by {self.points} points"
        if self.unknown:
            yield f"not counted: {self.unknown} points, since what the planner chooses there was not timed"
        yield f"share of the copy rate: {self.before:.4f} before, {self.after:.4f} now (geometric mean)"
        yield f"a plan that no rule leads to is faster by more than {NOISE} at {self.slower} points"
        for step in self.curve:
            yield f"the sweep with {step.rules} rules: {step.mean:.4f}, no point lower by more than {step.worst:.4f}"
        for name in self.left_out:
            yield f"left out: {name}"
        for name, other in self.merged.items():
            yield f"merged: {name} with {other}"
        for old, new in self.changed.items():
            yield f"changed: {old} is {new}"
        for name in self.not_measured:
            yield f"kept, not measured: {name}"


def ship(
    content: Content,
    searches: Sequence[Search],
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    sweep: Report | None = None,
    tolerance: float = NOISE,
) -> Shipped:
    """Return the fewest rules that are found with which no point is slower than now by more than a tolerance.

    sweep: what `cupynorm bench` has measured. Its points may not fall either, nor their geometric mean by more than
    MEAN_PART of the tolerance; without it, those of the searches that the benchmark has. Raises ValueError where the
    searches are of several architectures.
    """
    architectures = {search.limits.compute_capability for search in searches}
    if len(architectures) != 1:
        raise ValueError(
            f"the searches are of {', '.join(sorted(architectures))}: give those of one architecture"
        )
    content = Content({**content.told, "architecture": architectures.pop()}, content.file)
    shipping = _Shipping(content, _seen(content, searches, sweep), tolerance)
    shipping.improve()
    shipping.leave_out(progress)
    return shipping.finished({_source_name(search): _source(search) for search in searches})


def _seen(content: Content, searches: Sequence[Search], sweep: Report | None) -> list[Seen]:
    """Return what was measured at each point. Of a sweep's points that were not searched, the present plan is known."""
    recorded: dict[tuple[Point, Limits], dict[str, Mapping[Plan, float]]] = {}
    for each in searches:
        for at in each.points:
            if any(share for share, *_ in at.plans.values()):  # else nothing ran there, for whatever reason
                # of a kernel that spills, the planner launches another, or has timed it so: it is not known here
                least = 0.0 if "spills" in at.refused else -1.0
                shares = {plan: median for plan, (median, *_) in at.plans.items() if median > least}
                recorded.setdefault((at.point, each.limits), {})[_source_name(each)] = shares
    in_sweep = {each.point for each in sweep.points} if sweep else set(search.known_points())
    limits = searches[0].limits
    for measured in sweep.points if sweep else ():
        if (
            not any(point == measured.point for point, _ in recorded)
            and measured.plan
            and measured.share() > 0
        ):
            problem = bench.lowered(measured.point).problem
            chosen = content.choose(problem, limits) if isinstance(problem, Problem) else None
            if chosen and tuned_plans.plan_as_dict(chosen.plan).items() <= measured.plan.items():
                recorded[measured.point, limits] = {"sweep": {chosen.plan: measured.share()}}
    found = []
    for (point, limits), shares_of in recorded.items():
        problem = bench.lowered(point).problem
        chosen = content.choose(problem, limits)
        known = _together(list(shares_of.values()), chosen.plan if chosen else None)
        found.append(Seen(point, problem, limits, known, list(shares_of)[-1], point in in_sweep))
    return found


def _together(every: Sequence[Mapping[Plan, float]], base: Plan | None) -> Mapping[Plan, float]:
    """Return the shares at a point that several searches measured: relative to one plan, which each of them timed."""
    with_base = [each for each in every if base is not None and each.get(base)]
    if base is None or len(with_base) < 2:  # noqa: PLR2004
        return with_base[0] if with_base else every[0]
    level = statistics.fmean(each[base] for each in with_base)
    plans = dict.fromkeys(plan for each in with_base for plan in each)
    return {
        plan: level * statistics.fmean(each[plan] / each[base] for each in with_base if plan in each)
        for plan in plans
    }


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

    def __init__(self, content: Content, seen: Sequence[Seen], tolerance: float = NOISE) -> None:
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
        self.first_chosen = list(self.chosen)
        self.before = [each.shares[found.plan] for each, found in known]
        self.reference = list(self.before)
        self.orders: dict[Problem, int] = {}  # how many there are of a row, whatever the number of rows
        self.measured = collections.Counter(found.rule for found in self.chosen)
        self.of_sweep = sum(each.of_sweep for each in self.seen)
        self.tolerance, self.mean_tolerance = tolerance, tolerance * MEAN_PART
        self.of_kind: dict[Kind, list[int]] = {}
        for number, each in enumerate(self.seen):
            self.of_kind.setdefault(each.problem.kind, []).append(number)
        self.steps = [Step(len(content.rows), self._mean_of_sweep(), 0.0)]
        self.merged: dict[str, str] = {}

    # ---- moves

    def improve(self) -> None:
        """Move the ends of rules to where a neighbour is faster by more than the noise."""
        for row in list(self.content.rows):
            for move in list(self._shifts(row["id"])):
                guess = self._effect(move, guess=True)
                effect = self._effect(move) if guess and any(self._gains(guess)) else None
                if effect is not None and self._take(move, effect):
                    for number in effect.chosen:
                        self.reference[number] = max(self.reference[number], self._share(number))

    def leave_out(self, progress: Callable[[int, int], None]) -> None:
        """Leave out, or merge, rule after rule, the smallest loss first, until every move left would cost too much.

        What a move costs is found again when its turn comes, since others were made before it: for rules that are left
        out by the points that they decide. A rule may matter for others, too, so that all points are looked at again
        after each TOGETHER moves: those with which some point falls are taken back, and made one by one.
        """
        names = [*(row["id"] for row in self.content.rows), *map(rule_plans.name_of, self.content.crossovers)]
        taken = -1
        while taken:
            taken = 0
            waiting: list[tuple[float, int, Move]] = []
            count = itertools.count()  # of as small a loss, the move that was found first
            for name in names:
                self._weigh(self._moves(name), waiting, count)
            while waiting:
                before, moves = self._state(), self._take_some(waiting, count, TOGETHER)
                if not self._settled():
                    self._restore(before)
                    for move in moves:
                        effect = self._effect(move)
                        if effect is not None and self._take(move, effect):
                            taken += 1
                else:
                    taken += len(moves)
                progress(len(self.first.rows) - len(self.content.rows), len(self.first.rows))
            names = list(self.content.by_name)

    def _take_some(
        self, waiting: list[tuple[float, int, Move]], count: Iterator[int], most: int
    ) -> list[Move]:
        """Make the moves of the smallest loss; return those that were made."""
        made: list[Move] = []
        while waiting and len(made) < most:
            loss, _, move = heapq.heappop(waiting)
            effect = self._effect(move, guess=not move.changed)
            if effect is None:
                continue
            if waiting and effect.loss > max(loss, waiting[0][0]):
                heapq.heappush(waiting, (effect.loss, next(count), move))
            elif self._take(move, effect):
                made.append(move)
                for name in move.changed:
                    self._weigh(self._moves(name), waiting, count)
        return made

    def _settled(self) -> bool:
        """Look at all points; say whether none falls by more than the tolerance, nor the mean of the sweep too far."""
        for number, seen in enumerate(self.seen):
            found = self.content.choose(seen.problem, seen.limits)
            if found is None or found.plan not in seen.shares:
                return False
            self.chosen[number] = found
            if self._share(number) < self.reference[number] - self.tolerance:
                return False
        return self._lost() <= self.mean_tolerance * self.of_sweep

    def _state(self) -> tuple[Any, ...]:
        return self.content, list(self.chosen), self.measured.copy(), dict(self.merged), list(self.steps)

    def _restore(self, state: tuple[Any, ...]) -> None:
        self.content, self.chosen, self.measured, self.merged, self.steps = state

    def _weigh(
        self, moves: Iterator[Move], waiting: list[tuple[float, int, Move]], count: Iterator[int]
    ) -> None:
        for move in moves:
            effect = self._effect(move, guess=True)
            if effect is not None:
                heapq.heappush(waiting, (effect.loss, next(count), move))

    def _shifts(self, name: str) -> Iterator[Move]:
        """Give moves of a rule's end to measured widths, up to the ends of those before and after it."""
        if name not in self.content.by_name:
            return
        row = self.content.by_name[name]
        kind, *others = kinds_of(row)
        after = self.content.after(name, kind)
        if others or not after or row["row_bytes"] is None:
            return
        by_name = self.content.by_name
        least = max((longest_of(by_name[each]) for each in self.content.before(name, kind)[:1]), default=0)
        most = longest_of(by_name[after[0]])
        mine = [number for number, chosen in enumerate(self.chosen) if chosen.rule in {name, after[0]}]
        if not any(self._slower(number) for number in mine):
            return
        widths = sorted({self.seen[number].problem.row_bytes for number in mine})
        slower = {self.seen[number].problem.row_bytes for number in mine if self._slower(number)}
        # up to a width that another plan is better for, or down to the one before it
        ends = {width for width in slower if width > row["row_bytes"]}
        ends |= {
            one for one, width in itertools.pairwise(widths) if width in slower and width <= row["row_bytes"]
        }
        for width in sorted(ends):
            if least < width < most and width != row["row_bytes"]:
                yield Move(changed={name: {**row, "row_bytes": width}})

    def _moves(self, name: str) -> Iterator[Move]:
        """Give moves that leave one row less, by leaving out this one or another in favour of it."""
        if name not in self.content.by_name:
            return
        if self._may_go(name):
            yield from self._removals(name)
        if "id" in self.content.by_name[name]:
            yield from self._merges(name)

    def _removals(self, name: str) -> Iterator[Move]:
        """Give moves that leave a row out: what it held goes to rules down the list, or to a neighbour."""
        yield Move((name,))
        row = self.content.by_name[name]
        if "id" not in row:
            return
        before = {each for kind in kinds_of(row) for each in self.content.before(name, kind)[:1]}
        if before:
            longer = {each: {**self.content.by_name[each], "row_bytes": row["row_bytes"]} for each in before}
            yield Move((name,), longer)
        if row["rule"] not in BY_RANGE:
            return
        least, most = row.get("above", 0), longest_of(row)
        beside = (each for list_ in rule_plans.lists_of(row) for each in self.content.lists[list_])
        for other in {each["id"]: each for each in beside}.values():
            if other["id"] == name or not _alike(row, other):
                continue
            if least <= longest_of(other) < most:
                yield Move((name,), {other["id"]: {**other, "row_bytes": row["row_bytes"]}})
            if least < other.get("above", 0) <= most:
                wider = {key: value for key, value in other.items() if key != "above"}
                yield Move((name,), {other["id"]: {**wider, "above": least} if least else wider})

    def _merges(self, name: str) -> Iterator[Move]:
        """Give moves by which a rule's numbers hold the rows of a rule for other kinds, too, or the other's its own."""
        row = self.content.by_name[name]
        for other in self.content.rows:
            kinds = kinds_of(row) + kinds_of(other)
            of_kinds = _of_kinds({}, kinds)
            if of_kinds is None or not _alike(row, other) or not self._overlap(row, other):
                continue
            without_parameters = any(parameters == 0 for parameters, _ in kinds)
            for kept, gone in ((row, other), (other, row)):
                same = rule_plans.numbers_of(kept) == rule_plans.numbers_of(gone)
                if (without_parameters and kept.get("parameter_cache")) or not (
                    same or self._may_go(gone["id"])
                ):
                    continue
                for one, two in dict.fromkeys(itertools.product((0, 1), repeat=2)):
                    ends = (kept, gone)[one]["row_bytes"], (kept, gone)[two].get("above", 0)
                    if (one and ends[0] == kept["row_bytes"]) or (two and ends[1] == kept.get("above", 0)):
                        continue  # the same once more
                    merged = {key: each for key, each in kept.items() if key != "above"}
                    merged |= {"row_bytes": ends[0], **of_kinds} | ({"above": ends[1]} if ends[1] else {})
                    yield Move((gone["id"],), {kept["id"]: merged}, {gone["id"]: kept["id"]})

    def _overlap(self, row: Row, other: Row) -> bool:
        least = max(self._least(row), self._least(other))
        return least < min(longest_of(row), longest_of(other))

    def _least(self, row: Row) -> float:
        """Return of more than how many bytes rows are that a rule is for."""
        before = (self.content.before(row["id"], kind)[:1] for kind in kinds_of(row))
        ends = [longest_of(self.content.by_name[name]) for names in before for name in names]
        return max(float(row.get("above", 0)), min(ends, default=0.0))

    def _may_go(self, name: str) -> bool:
        row = self.content.by_name[name]
        if "id" not in row:
            return bool(self._changed_by(Move((name,))))
        size = max(size for _, size in kinds_of(row))
        one_width = row["row_bytes"] is not None and row.get("above", 0) >= row["row_bytes"] - size
        return self.measured[name] >= (1 if one_width else LEAST_POINTS)

    # ---- what a move comes to

    def _near(self, move: Move) -> list[int]:
        """Return the points that a move may matter for, those that its rows decide first."""
        names = {*move.without, *move.changed}
        least, most = self._reach(move)
        near = [
            number
            for kind in self._kinds_of(move)
            for number in self.of_kind.get(kind, ())
            if least < self.seen[number].problem.row_bytes <= most
        ]
        return sorted(near, key=lambda number: self.chosen[number].rule not in names)

    def _kinds_of(self, move: Move) -> set[Kind]:
        """Return the kinds of problems that a move may matter for."""
        rows = [
            *(self.content.by_name[name] for name in (*move.without, *move.changed)),
            *move.changed.values(),
        ]
        rules = {kind for row in rows if "id" in row for kind in kinds_of(row)}
        others = [row for row in rows if "id" not in row]
        return rules | {kind for kind in self.of_kind for row in others if rule_plans.is_for(row, kind)}

    def _reach(self, move: Move) -> tuple[float, float]:
        """Return of more than how many bytes, and up to how many, rows are that a move may matter for."""
        least, most = math.inf, 0.0
        for name in (*move.without, *move.changed):
            row = self.content.by_name[name]
            for each in rule_plans.lists_of(row) if "id" in row else [None]:
                rows = self.content.lists[each] if each else []
                # the first and the last of a list stand in where no rule holds a row
                if not rows or row in (rows[0], rows[-1]):
                    return 0, math.inf
                before = rows[rows.index(row) - 1] if row["rule"] in rule_plans.FIRST_IS_TAKEN else None
                changed = move.changed.get(name, row)
                above = min(row.get("above", 0), changed.get("above", 0))
                least = min(least, longest_of(before) if before else above)
                most = max(most, longest_of(row), longest_of(changed))
        return least, most

    def _decided(self, move: Move) -> list[int]:
        """Return the points that the rules of a move decide."""
        names = {*move.without, *move.changed}
        return [
            number
            for kind in self._kinds_of(move)
            for number in self.of_kind.get(kind, ())
            if self.chosen[number].rule in names
        ]

    def _changed_by(self, move: Move) -> dict[int, Chosen | None]:
        """Return the points whose plan a move changes, and the new one."""
        content = self.content.but(*move)
        found = {}
        for number in self._near(move):
            chosen = content.choose(self.seen[number].problem, self.seen[number].limits)
            if chosen is None or chosen.plan != self.chosen[number].plan:
                found[number] = chosen
        return found

    def _effect(self, move: Move, *, guess: bool = False) -> Effect | None:
        """Return what a move does; None if it cannot be made, or some point falls by more than the tolerance.

        guess: by the points alone that its rules decide now, which is a tenth of the work.
        """
        if any(each not in self.content.by_name for each in (*move.without, *move.changed)):
            return None
        if move.instead and not _ascend(self.content, move):
            return None
        try:
            content = self.content.but(*move)
        except ValueError:
            return None
        gone = (self.content.by_name[name] for name in move.without)
        lists = {each for row in gone if "id" in row for each in rule_plans.lists_of(row)}
        if any(each[0] in NEEDED and each not in content.lists for each in lists):
            return None
        chosen: dict[int, Chosen] = {}
        losses = {False: 0.0, True: 0.0}
        for number in self._decided(move) if guess else self._near(move):
            seen = self.seen[number]
            found = content.choose(seen.problem, seen.limits)
            if found is not None and found.plan == self.chosen[number].plan:
                chosen[number] = found
                continue
            share = seen.shares.get(found.plan) if found else None
            if found is None or not share or share < self.reference[number] - self.tolerance:
                return None
            chosen[number] = found
            losses[seen.of_sweep] += math.log(max(self._share(number), LEAST_SHARE) / share)
        return Effect(sum(losses.values()), losses[True], chosen)

    def _gains(self, effect: Effect) -> Iterator[bool]:
        for number, found in effect.chosen.items():
            yield self.seen[number].shares[found.plan] > self._share(number) + NOISE

    def _take(self, move: Move, effect: Effect) -> bool:
        """Make a move, unless the mean of the sweep falls too far, or an order of summation would depend on rows."""
        if (
            effect.loss_of_sweep > 0
            and self._lost() + effect.loss_of_sweep > self.mean_tolerance * self.of_sweep
        ):
            return False
        content = self.content.but(*move)
        # of a kind with rules for many or for few rows, another may decide for other numbers of rows
        kinds = self._kinds_of(move)
        by_rows = any(
            ("many" in row or "min_rows" in row) and kinds & set(kinds_of(row)) for row in self.content.rows
        )
        chosen = effect.chosen
        changed = [number for number in chosen if by_rows or chosen[number].plan != self.chosen[number].plan]
        if not self._same_order(content, changed):
            return False
        for gone, kept in move.instead.items():
            self.measured[kept] += self.measured[gone]
            self.merged[gone] = kept
        self.content = content
        for number, found in chosen.items():
            self.chosen[number] = found
        self.steps.append(Step(len(content.rows), self._mean_of_sweep(), self._worst()))
        return True

    def _lost(self) -> float:
        """Return how much the sweep has lost so far, as a sum of logarithms."""
        return math.fsum(
            math.log(max(before, LEAST_SHARE) / max(self._share(number), LEAST_SHARE))
            for number, before in enumerate(self.before)
            if self.seen[number].of_sweep
        )

    def _mean_of_sweep(self) -> float:
        return _mean([self._share(number) for number, seen in enumerate(self.seen) if seen.of_sweep])

    def _worst(self) -> float:
        falls = [
            before - self._share(number)
            for number, before in enumerate(self.before)
            if self.seen[number].of_sweep
        ]
        return max(falls, default=math.nan)

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
        self._narrow()
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
            left_out=[
                name
                for name in self.first.by_name
                if name not in self.content.by_name and name not in self._last()
            ],
            merged={gone: changed.get(kept, kept) for gone, kept in self._last().items()},
            curve=_thinned(self.steps),
            changed=changed,
            not_measured=[row["id"] for row in self.content.rows if row["id"] not in decided],
            points=len(self.seen),
            unknown=self.unknown,
            before=_mean(self.before),
            after=_mean([self._share(number) for number in range(len(self.seen))]),
            slower=sum(map(self._slower, range(len(self.seen)))),
        )

    def _narrow(self) -> None:
        """Take kinds out of merged rules whose rows others have come to hold since they were merged."""
        last = self._last()
        for row in self.content.rows:
            measured = {
                self.seen[number].problem.kind
                for number, chosen in enumerate(self.first_chosen)
                if last.get(chosen.rule, chosen.rule) == row["id"]
            }
            deciding = {
                self.seen[number].problem.kind
                for number, chosen in enumerate(self.chosen)
                if chosen.rule == row["id"]
            }
            left = [kind for kind in kinds_of(row) if kind in deciding or kind not in measured]
            if left and len(left) < len(kinds_of(row)):
                narrower = _of_kinds(row, left)
                if narrower is None:
                    continue
                move = Move(changed={row["id"]: narrower})
                effect = self._effect(move)
                if effect is not None and all(
                    found.plan == self.chosen[number].plan for number, found in effect.chosen.items()
                ):
                    self._take(move, effect)

    def _last(self) -> dict[str, str]:
        """Return the rules that were merged, and the one that holds their rows in the end; none that went later."""
        found = {}
        for gone, kept in self.merged.items():
            last = kept
            while last in self.merged:
                last = self.merged[last]
            if last in self.content.by_name:
                found[gone] = last
        return found

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
            "share": round(self._share(number), 4),
            "share_without": share_without and round(share_without, 4),
            "at": str(seen.point),
            "source": seen.source,
        }


def _renamed(rows: list[Row], first: Content) -> dict[str, str]:
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


def _of_kinds(row: Row, kinds: Sequence[Kind]) -> Row | None:
    """Return a row for these kinds; None if they are not each of some numbers of parameters with each of some sizes."""
    parameters, sizes = (sorted(set(each)) for each in zip(*kinds, strict=True))
    if not len(set(kinds)) == len(kinds) == len(parameters) * len(sizes):
        return None
    return {
        **row,
        "parameters": parameters if len(parameters) > 1 else parameters[0],
        "bytes": sizes if len(sizes) > 1 else sizes[0],
    }


def _digits(value: int | Sequence[int]) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def _thinned(steps: Sequence[Step]) -> list[Step]:
    """Return the first step, the first at each multiple of CURVE_STEP rules, and the last."""
    found = dict.fromkeys([steps[0]])
    for step in steps:
        if step.rules % CURVE_STEP == 0 and not any(each.rules == step.rules for each in found):
            found[step] = None
    return list(found | {steps[-1]: None})


def _alike(row: Row, other: Row) -> bool:
    """Say whether two rules differ in their kinds, ranges and numbers alone."""
    keys = ("rule", "table", "unaligned", "many", "min_rows")
    return all(row.get(key) == other.get(key) for key in keys)


def _ascend(content: Content, move: Move) -> bool:
    """Say whether, where the first rule that is long enough is taken, each is longer than the one before."""
    for row in move.changed.values():
        for each in rule_plans.lists_of(row) if row["rule"] in rule_plans.FIRST_IS_TAKEN else ():
            names = [move.instead.get(other["id"], other["id"]) for other in content.lists[each]]
            place = names.index(row["id"])
            if any(longest_of(content.by_name[name]) >= longest_of(row) for name in names[:place]):
                return False
            if any(longest_of(content.by_name[name]) <= longest_of(row) for name in names[place + 1 :]):
                return False
    return True


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
