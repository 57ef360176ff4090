"""Makes the rules that ship from recorded searches: a rule stays where it earns more than the noise. Needs no device.

The planner itself is asked what it would do with a rule left out or changed, and the searches how fast that was. So
this holds for every kind of list, however a rule is looked up in it. What may be done follows from the rules and the
searches alone, and not from what was done before: rules that were made so stay as they are when they are made again.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm._values import replace
from cupynorm.plan.config import ACCESS_BYTES, Plan
from cupynorm.plan.limits import RECORDED, Limits
from cupynorm.plan.problem import Problem
from cupynorm.plan.rule_file import Kind, kinds_of
from cupynorm.tools import evidence, rule_moves, rule_plans
from cupynorm.tools.evidence import Evidence
from cupynorm.tools.results import NOISE, Report
from cupynorm.tools.rule_moves import Move
from cupynorm.tools.rule_plans import Chosen, Content, Planner, Query, Row
from cupynorm.tools.search import LONGEST_ROW_BYTES, Search
from cupynorm.tools.shipped import Means, Shipped, renamed

LEAST_POINTS = 2  # of a rule that may be left out, unless it holds one width only
# Numbers of rows, for each multiprocessor, for which a row is to be summed in the same order.
ROWS_PER_SM = (1, 8, 62, 192, 372)
SMALL_BATCH_ROWS = 64  # of which no search measures plans
MEAN_PART = 0.3  # of the tolerance of a point: how far below the best the geometric mean of the sweep may lie
LEAST_SHARE = 1e-3  # stands for that of a plan that cannot run


class Effect(NamedTuple):
    """What a move leads to: the rules after it, the plans that differ, and what is lost by them.

    chosen: by the numbers of points. loss, loss_of_sweep: the sums, over all points and over those of the sweep, of the
    logarithms of the shares before over those after it.
    """

    content: Content
    chosen: Mapping[int, Chosen]
    loss: float
    loss_of_sweep: float


def ship(
    content: Content,
    searches: Sequence[Search],
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    sweep: Report | None = None,
    tolerance: float = NOISE,
) -> Shipped:
    """Return the fewest rules that are found with which points stay as fast as they are, but for a tolerance.

    A point may fall to `tolerance` below the fastest plan that was timed there, and where it is lower already, not at
    all; the geometric mean of the sweep likewise to MEAN_PART of it below that of the fastest plans. A rule that says
    why it has to stay (`keep`) stays.

    sweep: what `cupynorm bench` has measured; default: the points of the searches that the benchmark has. Raises
    ValueError where the searches are of several architectures.
    """
    architectures = {search.limits.compute_capability for search in searches}
    if len(architectures) != 1:
        raise ValueError(
            f"the searches are of {', '.join(sorted(architectures))}: give those of one architecture"
        )
    crossovers = rule_moves.for_any_parameters(content.crossovers)
    told = {**content.told, "architecture": architectures.pop(), "crossovers": crossovers}
    content = Content(told, content.file)
    shipping = Shipping(content, evidence.gather(content, searches, sweep), tolerance)
    shipping.run(progress)
    return shipping.finished({evidence.source_name(each): evidence.source(each) for each in searches})


class Shipping:
    """Changes rules step by step."""

    def __init__(self, content: Content, seen: Sequence[Evidence], tolerance: float = NOISE) -> None:
        self.first = self.content = content
        chosen = [content.choose(each.problem, each.limits) for each in seen]
        known = [
            each for each, found in zip(seen, chosen, strict=True) if found and found.plan in each.shares
        ]
        self.unknown, self.seen, self.tolerance = len(seen) - len(known), known, tolerance
        self.widths = [each.problem.row_bytes for each in known]
        self.planners: dict[tuple[Any, ...], Planner] = {}
        self.chosen: list[Chosen] = []
        self.asking: dict[Query, set[int]] = {}  # the points whose plans follow from a query's answer
        for number in range(len(known)):
            found, queries = self._plan(content, number)
            if found is not None:
                self.chosen.append(found)
            for query in queries:
                self.asking.setdefault(query, set()).add(number)
        self.measured = collections.Counter(found.rule for found in self.chosen)
        self.first_chosen = list(self.chosen)
        self.before = [self._share(number) for number in range(len(known))]
        self.of_kind: dict[Kind, list[int]] = {}
        for number, each in enumerate(known):
            self.of_kind.setdefault(each.problem.kind, []).append(number)
        by_width = sorted(range(len(known)), key=self.widths.__getitem__)
        self.longest = {_layout(known[number].problem): number for number in by_width}
        own = {content.rules.architecture, *(each.limits.compute_capability for each in known)}
        self.others = [each for each in RECORDED.values() if each.compute_capability not in own]
        self.merged: dict[str, str] = {}
        self.count = itertools.count()  # of as small a loss, the move that was found first
        in_sweep = [number for number, each in enumerate(known) if each.in_sweep]
        best = math.fsum(_log(known[number].best) for number in in_sweep)
        now = math.fsum(_log(self.before[number]) for number in in_sweep)
        # How much the sweep may still lose, as a sum of logarithms.
        self.spare = max(0.0, now - best + MEAN_PART * tolerance * len(in_sweep))

    def run(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Make moves until there is none left that may be made."""
        changed = True
        while changed:
            changed = self._leave_out(progress)
            changed = self._move_ends() or changed

    def _move_ends(self) -> bool:
        """Move the ends of rules to where a neighbour is faster by more than the noise."""
        moved = False
        for name in [row["id"] for row in self.content.rows]:
            for move in list(self._end_moves(name)):
                effect = self.effect(move)
                if effect is not None and any(
                    self.seen[number].shares[found.plan] > self._share(number) + NOISE
                    for number, found in effect.chosen.items()
                ):
                    moved = self.take(move, effect) or moved
        return moved

    def _end_moves(self, name: str) -> Iterator[Move]:
        kind, *_ = kinds_of(self.content.by_name[name])
        names = {name, *self.content.after(name, kind)[:1]}
        mine = [number for number in self.of_kind.get(kind, ()) if self.chosen[number].rule in names]
        widths = sorted({self.seen[number].problem.row_bytes for number in mine})
        slower = {self.seen[number].problem.row_bytes for number in mine if self._slower(number)}
        return rule_moves.end_moves(self.content, name, widths, slower)

    def _leave_out(self, progress: Callable[[int, int], None]) -> bool:
        """Leave out, or merge, rule after rule, the smallest loss first, until every move left would cost too much.

        What a move costs is found again when its turn comes, since others were made before it.
        """
        waiting: list[tuple[float, int, Move]] = []
        self._weigh(self.content.by_name, waiting)
        taken = False
        while waiting:
            loss, _, move = heapq.heappop(waiting)
            effect = self.effect(move)
            if effect is None:
                continue
            if waiting and effect.loss > max(loss, waiting[0][0]):
                heapq.heappush(waiting, (effect.loss, next(self.count), move))
            elif self.take(move, effect):
                taken = True
                self._weigh(move.changed, waiting)
                progress(len(self.first.rows) - len(self.content.rows), len(self.first.rows))
        return taken

    def _weigh(self, names: Iterable[str], waiting: list[tuple[float, int, Move]]) -> None:
        """Put the moves that leave these rows, or others in favour of them, out into a heap, by what is lost."""
        may_go = {row["id"] for row in self.content.rows if self._may_go(row["id"])}
        for name in names:
            is_rule = "id" in self.content.by_name[name]
            goes = name in may_go if is_rule else self._may_go(name)
            moves = list(rule_moves.removals(self.content, name)) if goes else []
            if is_rule:
                moves += rule_moves.merges(self.content, name, may_go)
            for move in moves:
                effect = self.effect(move)
                if effect is not None:
                    heapq.heappush(waiting, (effect.loss, next(self.count), move))

    def _may_go(self, name: str) -> bool:
        """Say whether enough was measured of a row."""
        row = self.content.by_name[name]
        if "id" not in row:
            after = Move((name,)).applied(self.content)
            return after is not None and any(
                found is None or found.plan != self.chosen[number].plan
                for number, found in self._changed(after, ())
            )
        size = max(size for _, size in kinds_of(row))
        one_width = row["row_bytes"] is not None and row.get("above", 0) >= row["row_bytes"] - size
        return self.measured[name] >= (1 if one_width else LEAST_POINTS)

    # ---- what a move comes to

    def _plan(
        self,
        content: Content,
        number: int,
        rows: int | None = None,
        cols: int | None = None,
        limits: Limits | None = None,
    ) -> tuple[Chosen | None, tuple[Query, ...]]:
        """Return what is chosen at a point, or there for other rows or on another device, and the queries for it."""
        key = (number, rows, cols, limits)
        if key not in self.planners:
            seen = self.seen[number]
            problem = replace(seen.problem, rows=rows or seen.problem.rows, cols=cols or seen.problem.cols)
            self.planners[key] = Planner(problem, limits or seen.limits)
        return self.planners[key].choose(content)

    def _near(self, content: Content, names: Collection[str]) -> list[int]:
        """Return the points to whose queries the rules give other answers, those that some rules decide first."""
        found = set()
        for query in content.touched:
            differ: dict[int, bool] = {}  # by the bytes of a row
            for number in self.asking.get(query, ()):
                width = self.widths[number]
                if width not in differ:
                    differ[width] = content.answer(query, width) != self.content.answer(query, width)
                if differ[width]:
                    found.add(number)
        return sorted(found, key=lambda number: (self.chosen[number].rule not in names, number))

    def _changed(self, content: Content, names: Collection[str]) -> Iterator[tuple[int, Chosen | None]]:
        """Give the points where something else is chosen by other rules, and what; see _near()."""
        for number in self._near(content, names):
            found, _ = self._plan(content, number)
            if found != self.chosen[number]:
                yield number, found

    def effect(self, move: Move) -> Effect | None:
        """Return what a move does; None if it cannot be made, or some point would fall too far."""
        content = move.applied(self.content)
        if content is None:
            return None
        chosen: dict[int, Chosen] = {}
        losses = {False: 0.0, True: 0.0}
        for number, found in self._changed(content, move.names):
            seen = self.seen[number]
            share = seen.shares.get(found.plan) if found else None
            if found is None or share is None:
                return None
            chosen[number] = found
            if found.plan != self.chosen[number].plan:
                before = self._share(number)
                if not share or share < min(before, seen.best - self.tolerance):
                    return None
                losses[seen.in_sweep] += _log(before) - _log(share)
        return Effect(content, chosen, sum(losses.values()), losses[True])

    def take(self, move: Move, effect: Effect) -> bool:
        """Make a move, unless the mean of the sweep falls too far, or an order of summation would depend on rows."""
        if effect.loss_of_sweep > max(0.0, self.spare):
            return False
        try:
            _ = effect.content.rows
        except ValueError:  # they have no order
            return False
        kinds = move.kinds(self.content, self.of_kind)
        # A kind may have rules for many or for few rows: then another one may decide for other numbers of rows.
        by_rows = any(
            ("many" in row or "min_rows" in row) and kinds & set(kinds_of(row)) for row in self.content.rows
        )
        numbers = self._near(effect.content, ()) if by_rows else list(effect.chosen)
        if not (self._same_order(effect.content, numbers) and self._same_unmeasured(move, effect.content)):
            return False
        self.merged.update(move.instead)
        for number in self._near(effect.content, ()):
            for query in self._plan(self.content, number)[1]:
                self.asking[query].discard(number)
            for query in self._plan(effect.content, number)[1]:
                self.asking.setdefault(query, set()).add(number)
        self.content = effect.content
        for number, found in effect.chosen.items():
            self.chosen[number] = found
        self.measured = collections.Counter(found.rule for found in self.chosen)
        self.spare -= effect.loss_of_sweep
        return True

    def _share(self, number: int) -> float:
        return self.seen[number].shares[self.chosen[number].plan]

    def _slower(self, number: int) -> bool:
        """Say whether some plan is faster at a point, by more than the noise."""
        return self.seen[number].best > self._share(number) + NOISE

    def _same_order(self, content: Content, numbers: Sequence[int]) -> bool:
        """Say whether rows are summed in no more orders, by how many there are, than they are now."""
        return all(
            len(self._orders(content, number)) <= len(self._orders(self.content, number))
            for number in numbers
            if not self.seen[number].problem.fused
        )

    def _same_unmeasured(self, move: Move, content: Content) -> bool:
        """Say whether plans stay that no search speaks about: of small batches, and of rows longer than all measured.

        The latter on all recorded devices that take these rules.
        """
        probes: set[tuple[int, int | None, int | None, Limits | None]] = set()
        small = content.rules.small_batch.row_bytes
        for number in self._near(content, ()):
            if self.widths[number] >= small:
                probes.add((number, SMALL_BATCH_ROWS, None, None))
        rows = [*(self.content.by_name[name] for name in move.names), *move.changed.values()]
        ends = {row["row_bytes"] or LONGEST_ROW_BYTES for row in rows if "id" in row}
        for number in {self.longest[_layout(self.seen[each].problem)] for each in self._asking(content)}:
            problem, longest = self.seen[number].problem, self.widths[number]
            unit = ACCESS_BYTES // problem.load_bytes  # as many columns as a rule takes, aligned as these are
            for end in ends:
                cols = (end // problem.element_bytes - problem.cols) // unit * unit + problem.cols
                if cols * problem.element_bytes > longest:
                    for limits in (None, *self.others):
                        probes |= {(number, None, cols, limits), (number, SMALL_BATCH_ROWS, cols, limits)}
        return all(
            _plan_of(self._plan(content, *each)[0]) == _plan_of(self._plan(self.content, *each)[0])
            for each in probes
        )

    def _asking(self, content: Content) -> set[int]:
        """Return the points whose plans follow from lists or crossovers that the rules have changed."""
        return {number for query in content.touched for number in self.asking.get(query, ())}

    def _orders(self, content: Content, number: int) -> set[tuple[Any, ...]]:
        """Return the orders in which a row is summed, of several numbers of rows: of small batches none."""
        seen, small = self.seen[number], content.rules.small_batch
        found = (
            self._plan(content, number, per_sm * seen.limits.sm_count)[0]
            for per_sm in ROWS_PER_SM
            if per_sm >= small.rows or seen.problem.row_bytes < small.row_bytes
        )
        return {order_of_summation(each.plan) if each else () for each in found}

    # ---- the file

    def finished(self, sources: Mapping[str, Mapping[str, str]]) -> Shipped:
        """Return the rules with where they come from."""
        self._narrow()
        rows = [self._told(row) for row in self.content.rows]
        crossovers = [self._told(row) for row in self.content.crossovers]
        changed = renamed(rows, self.first)
        told = {**self.content.told, "rules": rows, "crossovers": crossovers}
        every = {**sources, **told["sources"]}  # what was written about a search by hand stays
        used = {row["source"] for row in (*rows, *crossovers)}.union(*told["sections"].values())
        told["sources"] = {name: each for name, each in every.items() if name in used}
        merged = self._merged()
        gone = [name for name in self.first.by_name if name not in self.content.by_name]
        return Shipped(
            told=told,
            rules_before=len(self.first.rows),
            left_out=[name for name in gone if name not in merged],
            merged={name: changed.get(kept, kept) for name, kept in merged.items()},
            changed=changed,
            not_measured=[row["id"] for row in self.content.rows if not self.measured[row["id"]]],
            kept={name: row["keep"] for name, row in self.content.by_name.items() if "keep" in row},
            all=self._means(range(len(self.seen))),
            sweep=self._means([number for number, seen in enumerate(self.seen) if seen.in_sweep]),
            unknown=self.unknown,
            slower=sum(map(self._slower, range(len(self.seen)))),
        )

    def _means(self, numbers: Sequence[int]) -> Means:
        return Means.of(
            [self.before[number] for number in numbers], [self._share(number) for number in numbers]
        )

    def _narrow(self) -> None:
        """Take kinds out of merged rules whose rows others have come to hold since they were merged."""
        merged = self._merged()
        points = list(zip(self.seen, self.first_chosen, self.chosen, strict=True))
        for row in self.content.rows:
            measured = {
                seen.problem.kind
                for seen, first, _ in points
                if merged.get(first.rule, first.rule) == row["id"]
            }
            deciding = {seen.problem.kind for seen, _, now in points if now.rule == row["id"]}
            left = [kind for kind in kinds_of(row) if kind in deciding or kind not in measured]
            narrower = rule_moves.of_kinds(row, left) if left else None
            if narrower is not None and len(left) < len(kinds_of(row)):
                move = Move(changed={row["id"]: narrower})
                effect = self.effect(move)
                if effect is not None and all(
                    found.plan == self.chosen[number].plan for number, found in effect.chosen.items()
                ):
                    self.take(move, effect)

    def _merged(self) -> dict[str, str]:
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
        """Return a row with what it earns at the point that gains most by it, where that was measured."""
        without = self.content.but([rule_plans.name_of(row)])
        most = None
        for number, found in self._changed(without, ()):
            if "id" in row and self.chosen[number].rule != row["id"]:
                continue
            if self.seen[number].source == evidence.SWEEP:  # whose share may be that of another plan
                continue
            share = self.seen[number].shares.get(found.plan) if found else None
            if found is None or found.plan != self.chosen[number].plan:
                gain = self._share(number) - (share or 0.0)
                if most is None or (share is not None, gain) > most[0]:  # what was measured tells more
                    most = (share is not None, gain), number, share
        if most is None:
            return row
        _, number, share_without = most
        return {
            **{each: row[each] for each in row if each not in {"share", "share_without", "at", "source"}},
            "share": round(self._share(number), 4),
            "share_without": share_without and round(share_without, 4),
            "at": str(self.seen[number].point),
            "source": self.seen[number].source,
        }


def _layout(problem: Problem) -> Problem:
    """Return a problem without its size: rows of one layout have plans in common."""
    return replace(problem, rows=0, cols=0, alignment_period=0, band_cols=0, most_kept=0)


def _plan_of(chosen: Chosen | None) -> Plan | None:
    return chosen and chosen.plan


def order_of_summation(plan: Plan) -> tuple[Any, ...]:
    """Return what decides in which order a row is summed: which elements a thread has, and which threads meet.

    Not how many rows a group holds at once, where parameters wait, what is on its way, nor how many groups a block has.
    """
    held = (plan.kernel, plan.vector, plan.vectors, plan.unaligned, plan.ctas_per_row)
    if plan.kernel == "row_registers":
        by_lines = plan.dynamic and plan.unaligned > 0  # a row is then cut at lines, not at vectors
        return (*held, plan.group, plan.full, by_lines)
    return (*held, plan.block)


def _log(share: float) -> float:
    return math.log(max(share, LEAST_SHARE))
