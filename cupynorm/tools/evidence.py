"""What was measured of plans at points, gathered from recorded searches and from a sweep of the benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cupynorm.plan.config import Plan
from cupynorm.plan.limits import Limits
from cupynorm.plan.problem import Problem
from cupynorm.tools import bench, rule_plans, search
from cupynorm.tools.results import Point, Report
from cupynorm.tools.rule_plans import Content
from cupynorm.tools.search import Search

HOW_TO = "docs/add-gpu-data.md"
SWEEP = "sweep"  # the source of points that no search has


class Evidence(NamedTuple):
    """What was measured at a point.

    shares: of the copy rate, by plan; 0: it cannot run. source: the search that has the point, of several the last.
    in_sweep: whether the benchmark's sweep has it.
    """

    point: Point
    problem: Problem
    limits: Limits
    shares: Mapping[Plan, float]
    source: str
    in_sweep: bool = False

    @property
    def best(self) -> float:
        """The largest share."""
        return max(self.shares.values())


def gather(content: Content, searches: Sequence[Search], sweep: Report | None = None) -> list[Evidence]:
    """Return what searches have measured at each point, and the points of a sweep that they have not.

    At the latter the present plan has the share that the sweep tells, of whatever plan it was then, and no other plan
    has one: so rules that change it are not taken.
    """
    recorded: dict[tuple[Point, Limits], dict[str, Mapping[Plan, float]]] = {}
    for each in searches:
        for at in each.points:
            if any(share for share, *_ in at.plans.values()):  # else nothing ran there, for whatever reason
                # Where a kernel spills, the planner may launch another one in its place: which was timed is not known.
                least = 0.0 if "spills" in at.refused else -1.0
                shares = {plan: median for plan, (median, *_) in at.plans.items() if median > least}
                recorded.setdefault((at.point, each.limits), {})[source_name(each)] = shares
    in_sweep = {each.point for each in sweep.points} if sweep else set(search.known_points())
    found = []
    for (point, limits), shares_of in recorded.items():
        problem = rule_plans.one_by_one(bench.lowered(point).problem)
        chosen = content.choose(problem, limits)
        known = together(list(shares_of.values()), chosen.plan if chosen else None)
        found.append(Evidence(point, problem, limits, known, list(shares_of)[-1], point in in_sweep))
    searched = {point for point, _ in recorded}
    limits = searches[0].limits
    for measured in sweep.points if sweep else ():
        point = measured.point
        problem = rule_plans.one_by_one(bench.lowered(point).problem)
        if point not in searched and isinstance(problem, Problem) and measured.share() > 0:
            chosen = content.choose(problem, limits)
            if chosen:
                shares = {chosen.plan: measured.share()}
                found.append(Evidence(point, problem, limits, shares, SWEEP, in_sweep=True))
    return found


def together(every: Sequence[Mapping[Plan, float]], base: Plan | None) -> Mapping[Plan, float]:
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


def source_name(search: Search) -> str:
    """Return the name under which a file of rules tells of a search."""
    return f"search {search.file.rpartition('/')[2].removesuffix('.json')}"


def source(search: Search) -> dict[str, str]:
    """Return what a file of rules tells of a search."""
    return {
        "device": search.about["device"]["name"],
        "date": search.about["date"][:10],
        "file": search.file,
        "note": HOW_TO,
        "what": f"each rule beside its neighbours and the planner without it, at {len(search.points)} points",
    }
