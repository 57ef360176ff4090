"""The plans that a file of rules gives, and those that it would give with rules left out or changed. No device."""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import heapq
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm.plan.choose import choose
from cupynorm.plan.config import MOST_REGISTERS, ONE_BLOCK_PER_ROW, DoesNotFitError, Plan
from cupynorm.plan.limits import Limits, active_blocks
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import Kind, Rules, kinds_of, parse

Row = dict[str, Any]
List = tuple[str, str | None, Kind]  # what the rules of a list are, its table, and the kind that it is for
# A rule of one of these holds rows up to its own row_bytes from where the one before it ends.
INTERVALS = ("registers", "cached", "cluster")
FIRST_IS_TAKEN = ("registers", "cached")  # the first rule that is long enough decides, whether or not it fits
WHOLE_BLOCK_REGISTERS = {4: 64, 8: 128}  # a guess, by bytes of the compute type
SIZE_BESIDE = {2: 4, 4: 2}  # bytes of elements whose rules are tried for each other
# What says which rows a rule is for and where it comes from. All else are its numbers.
IDENTITY = (
    "id",
    "rule",
    "table",
    "parameters",
    "bytes",
    "row_bytes",
    "above",
    "unaligned",
    "many",
    "min_rows",
)
ORIGIN = ("source", "note", "share", "share_without", "at")
NEXT = 4  # how many rules down the list are tried in a rule's place
BEFORE = 2  # and how many up the list, as if they held rows so long
# Crossovers that decide how a call is written in C++, before its device is known: no data but those of the measured
# architecture are asked for them.
IN_SOURCE = "unaligned"


class Chosen(NamedTuple):
    """A plan without its launch, and the id of the rule that decided; "" where none did."""

    plan: Plan
    rule: str


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of a rule or of a crossover, which has no id."""
    if "id" in row:
        return str(row["id"])
    words = [f"{key} {row[key]}" for key in ("parameters", "bytes", "access_bytes") if key in row]
    return ", ".join([f"crossover {row['what']}", *words])


def is_for(crossover: Row, kind: Kind) -> bool:
    """Say whether a crossover is for problems of this number of parameters and bytes of an element."""
    parameters, size = kind
    return crossover.get("bytes") in {None, size} and crossover.get("parameters") in {None, parameters}


def lists_of(row: Row) -> list[List]:
    """Return the lists that a rule is in: among the rules of one, the planner looks one up."""
    return [(row["rule"].partition(" ")[0], row.get("table"), kind) for kind in kinds_of(row)]


def numbers_of(row: Row) -> Row:
    """Return what a rule says about how rows are held, without which rows these are."""
    return {key: value for key, value in row.items() if key not in {*IDENTITY, *ORIGIN}}


def longest_of(row: Row) -> float:
    """Return the bytes of the longest row that a rule is for."""
    return math.inf if row["row_bytes"] is None else float(row["row_bytes"])


def with_numbers_of(row: Row, other: Row) -> Row:
    """Return a rule for the rows of one, with the numbers of another."""
    mine = {key: value for key, value in row.items() if key in {*IDENTITY, *ORIGIN}}
    return {**mine, **numbers_of(other)}


class Content:
    """The content of a file of rules, from which others are made. Its rows are never changed.

    told: as JSON. file: its name, for messages.
    """

    def __init__(self, told: Mapping[str, Any], file: str) -> None:
        self.told, self.file = told, file

    @property
    def rows(self) -> list[Row]:
        """The rules, in order."""
        found: list[Row] = self.told["rules"]
        return found

    @property
    def crossovers(self) -> list[Row]:
        """The crossovers."""
        found: list[Row] = self.told["crossovers"]
        return found

    @functools.cached_property
    def rules(self) -> Rules:
        """The same as the planner takes it."""
        return parse(self.told, self.file)

    @functools.cached_property
    def by_name(self) -> dict[str, Row]:
        """The rules and crossovers by their names."""
        return {name_of(row): row for row in (*self.rows, *self.crossovers)}

    def but(
        self,
        without: Collection[str] = (),
        changed: Mapping[str, Row] | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> Content:
        """Return the same without rows of these names, and with other rows in place of some rules.

        instead: names of rules that are left out, and of those that take their places in the lists that they were in.
        Raises ValueError where the rules that are left cannot be in the order of all lists.
        """
        changed = changed or {}
        rules = [changed.get(row["id"], row) for row in self.rows if row["id"] not in without]
        if instead:
            rules = self._in_order(rules, instead)
        crossovers = [row for row in self.crossovers if name_of(row) not in without]
        return Content({**self.told, "rules": rules, "crossovers": crossovers}, self.file)

    def _in_order(self, rules: Sequence[Row], instead: Mapping[str, str]) -> list[Row]:
        """Return rules in the order that each of their lists had."""
        by_name = {row["id"]: row for row in rules}
        order = graphlib.TopologicalSorter[str](dict.fromkeys(by_name, ()))
        for rows in self.lists.values():
            names = [name for row in rows if (name := instead.get(row["id"], row["id"])) in by_name]
            for one, next_one in itertools.pairwise(names):
                order.add(next_one, one)
        try:
            order.prepare()
        except graphlib.CycleError:
            raise ValueError(f"no order of the rules has {instead} in the places of their lists") from None
        every, place = list(by_name), {name: number for number, name in enumerate(by_name)}
        ready, ordered = list[int](), list[Row]()
        while order.is_active():
            for name in order.get_ready():
                heapq.heappush(ready, place[name])
            name = every[heapq.heappop(ready)]
            ordered.append(by_name[name])
            order.done(name)
        return ordered

    def choose(self, problem: Problem, limits: Limits) -> Chosen | None:
        """Return what is chosen for a problem; None where the rules that are left are too few for an answer."""
        occupancy = functools.partial(guessed_occupancy, problem, limits)
        try:
            found = choose(problem, limits, occupancy, rules=self.rules)
        except (DoesNotFitError, KeyError, IndexError):  # a list without rules
            return None
        # as tuned_plans.portable() has it, in a tenth of the time
        plan = dataclasses.replace(found, grid=0, resident_blocks=0, waves=ONE_BLOCK_PER_ROW, rule="", why="")
        return Chosen(plan, found.rule)

    def before(self, rule: str, kind: Kind) -> list[str]:
        """Return the rules up a kind's list whose rows could be as long as those of a rule, the nearest first."""
        turn = self._turns.get((rule, kind), [])
        return turn[: turn.index(rule)][::-1] if turn else []

    def after(self, rule: str, kind: Kind) -> list[str]:
        """Return the rules down a kind's list whose rows could be as short as those of a rule, the nearest first."""
        turn = self._turns.get((rule, kind), [])
        return turn[turn.index(rule) + 1 :] if turn else []

    @functools.cached_property
    def _turns(self) -> dict[tuple[str, Kind], list[str]]:
        """The names of the rules of a kind of which one ends where the next begins, for each of them."""
        found: dict[tuple[Any, ...], list[str]] = {}
        for row in self.rows:
            for each in lists_of(row):
                if each[0] in INTERVALS:
                    found.setdefault((*each, row["rule"], row.get("unaligned", False)), []).append(row["id"])
        return {(name, key[2]): names for key, names in found.items() for name in names}

    def elsewhere(self, rule: Row, row_bytes: int) -> Iterator[Row]:
        """Give the rules that hold rows so long in the lists of one more or less parameter, or of 2 for 4 bytes."""
        for what, table, (parameters, size) in lists_of(rule):
            others = [(each, size) for each in (parameters - 1, parameters + 1)]
            others += [(parameters, SIZE_BESIDE[size])] if size in SIZE_BESIDE else []
            for kind in others:
                for row in self.lists.get((what, table, kind), ()):
                    same = all(row.get(key, False) == rule.get(key, False) for key in ("rule", "unaligned"))
                    if same and row.get("above", 0) < row_bytes <= longest_of(row):
                        yield row
                        break

    @functools.cached_property
    def lists(self) -> dict[List, list[Row]]:
        """The rules of each list, in order."""
        found: dict[List, list[Row]] = {}
        for row in self.rows:
            for each in lists_of(row):
                found.setdefault(each, []).append(row)
        return found


def contenders(content: Content, problem: Problem, limits: Limits) -> dict[Plan, str]:
    """Return the plans that any shorter list of rules may lead to, and how, the planner's own choice first.

    By the rules down the list from the one that decides, as if those before were left out; by those up the list, as if
    they held longer rows; with the numbers of the rules for rows of this length of other kinds; without the whole list;
    and without each crossover of the problem's kind.
    """
    first = content.choose(problem, limits)
    if first is None:
        return {}
    found = {first.plan: f"rule {first.rule}" if first.rule else "no rule"}
    for how, less in _changed(content, problem, first.rule):
        chosen = less.choose(problem, limits)
        if chosen is not None:
            found.setdefault(chosen.plan, how)
    without: list[str] = []
    rule = first.rule
    while rule and len(without) < NEXT:
        without.append(rule)
        chosen = content.but(without).choose(problem, limits)
        if chosen is None:
            break
        found.setdefault(chosen.plan, f"without {', '.join(without)}")
        rule = chosen.rule
    return found


def _changed(content: Content, problem: Problem, rule: str) -> Iterator[tuple[str, Content]]:
    if rule:
        row = content.by_name[rule]
        for each in content.before(rule, problem.kind)[:BEFORE]:
            longer = {**content.by_name[each], "row_bytes": row["row_bytes"]}
            yield f"{each} for longer rows", content.but([rule], {each: longer})
        for other in content.elsewhere(row, problem.row_bytes):
            yield f"with the numbers of {other['id']}", content.but((), {rule: with_numbers_of(row, other)})
        (own,) = (each for each in lists_of(row) if each[2] == problem.kind)
        yield "without the list of the rule", content.but([each["id"] for each in content.lists[own]])
    for crossover in content.crossovers:
        name = name_of(crossover)
        if not crossover["what"].startswith(IN_SOURCE) and _is_for(crossover, problem):
            yield f"without {name}", content.but([name])


def _is_for(row: Row, problem: Problem) -> bool:
    """Say whether a crossover may be asked for a problem of this kind."""
    fused = row.get("parameters") is None
    return problem.fused == fused and is_for(row, problem.kind)


def read(told: Any, file: str) -> Content:
    """Return the content of a file of rules. Raises ValueError for anything else."""
    try:
        content = Content(told, file)
        list(content.rules.every_rule())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is no file of rules such as cupynorm/plan/data/sm_90.json: {type(error).__name__}: {error}"
        ) from error
    return content


# ---- occupancy without a compiler


def guessed_occupancy(problem: Problem, limits: Limits, plan: Plan) -> int:
    """Estimate the occupancy. Only whether it is 0 matters here."""
    if plan.group:
        registers = min(MOST_REGISTERS, limits.registers_per_sm // (plan.block * plan.min_blocks))
    else:
        registers = WHOLE_BLOCK_REGISTERS[problem.compute_bytes]
    resident = active_blocks(limits, plan.block, registers, plan.shared_bytes)
    return limits.sm_count * resident // plan.cluster if plan.cluster > 1 else resident


# ---- the text of a file


def text_of(told: Mapping[str, Any]) -> str:
    """Return a file's text, with a line for each number and each rule: what has changed can be seen line by line."""
    parts = []
    for name, value in told.items():
        if isinstance(value, dict):
            lines = [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
            inner = ",\n".join(f"    {each}" for each in lines)
            parts.append(f"  {json.dumps(name)}: {{\n{inner}\n  }}")
        elif isinstance(value, list):
            inner = ",\n".join(f"    {json.dumps(each)}" for each in value)
            parts.append(f"  {json.dumps(name)}: [\n{inner}\n  ]")
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
