"""The plans that a file of rules gives, and those that it would give with rules left out or changed. No device."""

from __future__ import annotations

import bisect
import functools
import graphlib
import heapq
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm._values import replace
from cupynorm.plan.choose import choose
from cupynorm.plan.config import MOST_REGISTERS, ONE_BLOCK_PER_ROW, DoesNotFitError, Plan
from cupynorm.plan.limits import Limits, active_blocks
from cupynorm.plan.problem import Problem
from cupynorm.plan.rule_file import Kind, List, kinds_of, list_of, lists_of, query_of
from cupynorm.plan.rules import Rules, parse

Row = dict[str, Any]
Query = tuple[str, Any]  # a table of Rules, and the key that the planner asks it for
ASKED = ("crossovers", "register_rules", "fixed_rules", "cached_rules", "cluster_rules")
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
ORIGIN = ("source", "note", "keep", "share", "share_without", "at")
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
        self._told, self.file = told, file
        self._derived = False  # by but()
        self.touched: list[Query] = []  # by but(): queries whose answers may differ from the other content's
        self._made: dict[str, Row] = {}  # rows that but() was given: equal ones are one object
        self._answers: dict[Query, tuple[list[Row], list[float], dict[int, tuple[int, ...]]]] = {}

    @property
    def told(self) -> dict[str, Any]:
        """The content as JSON."""
        return {**self._told, "rules": self.rows, "crossovers": self.crossovers}

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The rules, in order. Raises ValueError where no order of them is that of all lists."""
        found: list[Row] = self._told["rules"]
        return self._in_order(found) if self._derived else found

    @functools.cached_property
    def crossovers(self) -> list[Row]:
        """The crossovers."""
        found: list[Row] = self._told["crossovers"]
        return found

    @functools.cached_property
    def rules(self) -> Rules:
        """The same as the planner takes it."""
        return parse(self._told, self.file)

    @functools.cached_property
    def by_name(self) -> dict[str, Row]:
        """The rules and crossovers by their names."""
        return {name_of(row): row for row in (*self.rows, *self.crossovers)}

    @functools.cached_property
    def lists(self) -> dict[List, list[Row]]:
        """The rules of each list, in order."""
        found: dict[List, list[Row]] = {}
        for row in self.rows:
            for each in lists_of(row):
                found.setdefault(each, []).append(row)
        return found

    def but(
        self,
        without: Collection[str] = (),
        changed: Mapping[str, Row] | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> Content:
        """Return the same without rows of these names, and with other rows in place of some rules.

        instead: names of rules that are left out, and of those that take their places in the lists that they were in.
        """
        new = {name: self._made.setdefault(repr(row), row) for name, row in (changed or {}).items()}
        old = [self.by_name[name] for name in (*without, *new)]
        lists = {}
        for each in dict.fromkeys(each for row in old if "id" in row for each in lists_of(row)):
            names = ((instead or {}).get(row["id"], row["id"]) for row in self.lists[each])
            rows = [new.get(name, self.by_name[name]) for name in names if name not in without]
            lists[each] = [row for row in rows if row["id"] not in new or each[2] in kinds_of(row)]
        crossovers = self.crossovers
        if not all("id" in row for row in old):
            crossovers = [row for row in crossovers if name_of(row) not in without]
        rows = [new.get(row["id"], row) for row in self.rows if row["id"] not in without]
        found = Content({**self._told, "rules": rows}, self.file)
        found._derived, found._made = True, self._made
        found.crossovers = crossovers
        found.lists = {each: rows for each, rows in (self.lists | lists).items() if rows}
        found.rules = self.rules.but(lists, None if crossovers is self.crossovers else crossovers)
        found.touched = [query_of(each) for each in lists]
        if crossovers is not self.crossovers:
            keys = {*self.rules.crossovers, *found.rules.crossovers}
            before, after = self.rules.crossovers, found.rules.crossovers
            found.touched += [("crossovers", key) for key in keys if before.get(key) != after.get(key)]
        return found

    def _in_order(self, rules: Sequence[Row]) -> list[Row]:
        """Return rules in the order that each of their lists has."""
        place = {row["id"]: number for number, row in enumerate(rules)}
        order = graphlib.TopologicalSorter[str](dict.fromkeys(place, ()))
        for rows in self.lists.values():
            for one, next_one in itertools.pairwise(rows):
                order.add(next_one["id"], one["id"])
        try:
            order.prepare()
        except graphlib.CycleError as error:
            raise ValueError(f"no order of the rules is that of all lists: {error.args[1]}") from None
        ready, ordered = list[int](), list[Row]()
        while order.is_active():
            for name in order.get_ready():
                heapq.heappush(ready, place[name])
            ordered.append(rules[heapq.heappop(ready)])
            order.done(ordered[-1]["id"])
        return ordered

    def answer(self, query: Query, row_bytes: int) -> tuple[Any, ...]:
        """Return the identities of the rows that a query of the planner's can find for a row so long.

        From a list these are the rules for such rows, and the first and the last one, which stand in where no rule is.
        """
        table, key = query
        if table == "crossovers":
            return self.rules.crossovers.get(key, ())
        if query not in self._answers:
            rows = self.lists.get(list_of(table, key), [])
            ends = sorted({end for row in rows for end in (row.get("above", 0), longest_of(row))})
            self._answers[query] = rows, ends, {}
        rows, ends, found = self._answers[query]
        place = bisect.bisect_left(ends, row_bytes)
        if place not in found:
            held = [row for row in rows if row.get("above", 0) < row_bytes <= longest_of(row)]
            if rows and lists_of(rows[0])[0][0] in FIRST_IS_TAKEN:
                held = held[:1]
            found[place] = tuple(id(row) for row in (*rows[:1], *held, *rows[-1:]))
        return found[place]

    def choose(self, problem: Problem, limits: Limits, rules: Rules | None = None) -> Chosen | None:
        """Return what is chosen for a problem; None where the rules that are left are too few for an answer."""
        occupancy = functools.partial(guessed_occupancy, problem, limits)
        try:
            found = choose(problem, limits, occupancy, rules=rules or self.rules)
        except (DoesNotFitError, KeyError, IndexError):  # a list without rules
            return None
        # what tuned_plans.portable() returns, in a tenth of the time
        plan = replace(found, grid=0, resident_blocks=0, waves=ONE_BLOCK_PER_ROW, rule="", why="")
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


class Recorded:
    """A table of the planner's rules that notes which of its keys are asked for."""

    def __init__(self, name: str, table: Mapping[Any, Any], queries: dict[Query, None]) -> None:
        self._name, self._table, self._queries = name, table, queries

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the entry of a key, or the default."""
        self._queries[self._name, key] = None
        return self._table.get(key, default)

    def __getitem__(self, key: Any) -> Any:
        """Return the entry of a key. Raises KeyError."""
        self._queries[self._name, key] = None
        return self._table[key]

    def __contains__(self, key: Any) -> bool:
        """Say whether there is a key."""
        self._queries[self._name, key] = None
        return key in self._table


class Planner:
    """Plans one problem by many contents that were made from one another, and remembers what they answered.

    The planner asks a few lists of rules and crossovers, and what it asks next follows from the answers. So the same
    answers to the same queries lead to the same plan.
    """

    def __init__(self, problem: Problem, limits: Limits) -> None:
        self.problem, self._limits = problem, limits
        self.known: dict[tuple[Query, ...], dict[tuple[Any, ...], Chosen | None]] = {}

    def choose(self, content: Content) -> tuple[Chosen | None, tuple[Query, ...]]:
        """Return what is chosen, and the queries that led there."""
        row_bytes = self.problem.row_bytes
        for queries, known in self.known.items():
            answers = tuple([content.answer(query, row_bytes) for query in queries])
            if answers in known:
                return known[answers], queries
        asked: dict[Query, None] = {}
        tables: dict[str, Any] = {name: Recorded(name, getattr(content.rules, name), asked) for name in ASKED}
        chosen = content.choose(self.problem, self._limits, content.rules._replace(**tables))
        queries = tuple(asked)
        answers = tuple([content.answer(query, row_bytes) for query in queries])
        self.known.setdefault(queries, {})[answers] = chosen
        return chosen, queries


def one_by_one(problem: Any) -> Any:
    """Return what rules are asked for a problem: the same rows with gaps, so that no crossover moves them together.

    Narrow rows without gaps that come and go together (plan/variants/tiled.py) ask no rule. Those with gaps, and those
    of fused calls, need theirs all the same; they are timed on rows without gaps. A problem that is none stays.
    """
    return replace(problem, adjoining=False) if isinstance(problem, Problem) else problem


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
        if not crossover["what"].startswith(IN_SOURCE) and is_for(crossover, problem.kind):
            yield f"without {name}", content.but([name])


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
