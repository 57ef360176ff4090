"""Changes that the rules of a file may go through: a rule ends elsewhere, goes, or becomes one with another."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cupynorm.plan.rule_file import Kind, kinds_of, lists_of
from cupynorm.tools.rule_plans import (
    FIRST_IS_TAKEN,
    IN_SOURCE,
    ORIGIN,
    Content,
    Row,
    is_for,
    longest_of,
    numbers_of,
)

BY_RANGE = ("fixed",)  # rules of these say where they begin, too
PARAMETERS = {0, 1, 2}  # how many affine parameters a row op may have
NEEDED = ("cached", "cluster")  # lists that a plan can be asked for by name: one rule of each is kept


class Move(NamedTuple):
    """A change of the rules: names of those that are left out, what others are instead, and whose places they take."""

    without: tuple[str, ...] = ()
    changed: Mapping[str, Row] = {}
    instead: Mapping[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The rules that it is about."""
        return *self.without, *self.changed

    def kinds(self, content: Content, every: Collection[Kind]) -> set[Kind]:
        """Return the kinds of problems, among some, that it may matter for."""
        rows = [*(content.by_name[name] for name in self.names), *self.changed.values()]
        return {
            kind
            for row in rows
            for kind in every
            if (kind in kinds_of(row) if "id" in row else is_for(row, kind))
        }

    def applied(self, content: Content) -> Content | None:
        """Return the rules after it; None where it cannot be made, or where a rule says that it has to stay."""
        if any(name not in content.by_name or "keep" in content.by_name[name] for name in self.names):
            return None
        found = content.but(*self)
        for each in {each for row in self.changed.values() for each in lists_of(row)}:
            ends = [longest_of(row) for row in found.lists[each]]
            if each[0] in FIRST_IS_TAKEN and any(one >= other for one, other in itertools.pairwise(ends)):
                return None  # nothing would be left to the second one
        if any(each[0] in NEEDED and each not in found.lists for each in content.lists):
            return None
        return found


def of_kinds(row: Row, kinds: Sequence[Kind]) -> Row | None:
    """Return a row for these kinds; None if they are not each of some numbers of parameters with each of some sizes."""
    parameters, sizes = (sorted(set(each)) for each in zip(*kinds, strict=True))
    if not len(set(kinds)) == len(kinds) == len(parameters) * len(sizes):
        return None
    return {
        **row,
        "parameters": parameters if len(parameters) > 1 else parameters[0],
        "bytes": sizes if len(sizes) > 1 else sizes[0],
    }


def for_any_parameters(crossovers: Sequence[Row]) -> list[Row]:
    """Return crossovers with one in place of those that say the same for several numbers of affine parameters.

    No plan changes: the planner takes that of a problem's own number first, so each number must have one.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    numbers: dict[tuple[Any, ...], set[int]] = {}
    for row in crossovers:
        if "parameters" in row and not row["what"].startswith(IN_SOURCE):
            whole = row["what"], row["bytes"]
            says = {key: each for key, each in row.items() if key not in {"parameters", *ORIGIN}}
            alike.setdefault((whole, repr(sorted(says.items()))), []).append(row)
            numbers.setdefault(whole, set()).add(row["parameters"])
    found = list(crossovers)
    for (whole, _), rows in sorted(alike.items(), key=lambda item: -len(item[1])):
        if len(rows) > 1 and numbers.pop(whole, None) == PARAMETERS:  # one for each size
            first = {key: each for key, each in rows[0].items() if key != "parameters"}
            first |= (
                {"note": "; ".join(row["note"] for row in rows if "note" in row)} if "note" in first else {}
            )
            found = [first if row is rows[0] else row for row in found if row not in rows[1:]]
    return found


def end_moves(content: Content, name: str, widths: Sequence[int], slower: Collection[int]) -> Iterator[Move]:
    """Give moves of a rule's end, up to the ends of those before and after it.

    widths: of the rows, in bytes, that were measured of this rule and the next one, in ascending order. slower: those
    where another plan is faster. Rows between two measured ones stay with the rule that they had.
    """
    row = content.by_name[name]
    kind, *others = kinds_of(row)
    after = content.after(name, kind)
    if others or not after or row["row_bytes"] is None:
        return
    before = content.before(name, kind)[:1]
    least = longest_of(content.by_name[before[0]]) if before else 0
    most, end = longest_of(content.by_name[after[0]]), row["row_bytes"]
    _, size = kind
    ends = {width for width in slower if width > end}  # now the last of its rows
    ends |= {
        width - size for width in slower if width <= end and width != widths[0]
    }  # now the next rule's first
    for moved in sorted(ends):
        if least < moved < most:
            yield Move(changed={name: {**row, "row_bytes": moved}})


def removals(content: Content, name: str) -> Iterator[Move]:
    """Give moves that leave a row out: what it held goes to rules down the list, or to a neighbour."""
    yield Move((name,))
    row = content.by_name[name]
    if "id" not in row:
        return
    before = {each for kind in kinds_of(row) for each in content.before(name, kind)[:1]}
    if before:
        yield Move(
            (name,), {each: {**content.by_name[each], "row_bytes": row["row_bytes"]} for each in before}
        )
    if row["rule"] not in BY_RANGE:
        return
    least, most = row.get("above", 0), longest_of(row)
    beside = {other["id"]: other for each in lists_of(row) for other in content.lists[each]}
    for other in beside.values():
        if other["id"] == name or not _alike(row, other):
            continue
        if least <= longest_of(other) < most:
            yield Move((name,), {other["id"]: {**other, "row_bytes": row["row_bytes"]}})
        if least < other.get("above", 0) <= most:
            yield Move((name,), {other["id"]: _above(other, least)})


def merges(content: Content, name: str, may_go: Collection[str]) -> Iterator[Move]:
    """Give moves by which a rule's numbers hold the rows of a rule for other kinds, too, or the other's its own.

    may_go: rules whose numbers may be given up.
    """
    row = content.by_name[name]
    for other in content.rows:
        kinds = kinds_of(row) + kinds_of(other)
        if not _alike(row, other) or not _overlap(content, row, other):
            continue
        merged_kinds = of_kinds({}, kinds)
        if merged_kinds is None:
            continue
        same = numbers_of(row) == numbers_of(other)
        without_parameters = any(parameters == 0 for parameters, _ in kinds)
        for kept, gone in ((row, other), (other, row)):
            if (without_parameters and kept.get("parameter_cache")) or not (same or gone["id"] in may_go):
                continue
            ends = dict.fromkeys((kept["row_bytes"], gone["row_bytes"]))
            begins = dict.fromkeys((kept.get("above", 0), gone.get("above", 0)))
            for end, above in itertools.product(ends, begins):
                merged = {**_above(kept, above), "row_bytes": end, **merged_kinds}
                yield Move((gone["id"],), {kept["id"]: merged}, {gone["id"]: kept["id"]})


def _above(row: Row, above: int) -> Row:
    """Return a rule for rows of more than so many bytes."""
    return {
        **{key: each for key, each in row.items() if key != "above"},
        **({"above": above} if above else {}),
    }


def _alike(row: Row, other: Row) -> bool:
    """Say whether two rules differ in their kinds, ranges and numbers alone."""
    keys = ("rule", "table", "unaligned", "many", "min_rows")
    return all(row.get(key) == other.get(key) for key in keys)


def _overlap(content: Content, row: Row, other: Row) -> bool:
    return max(_least(content, row), _least(content, other)) < min(longest_of(row), longest_of(other))


def _least(content: Content, row: Row) -> float:
    """Return of more than how many bytes rows are that a rule is for."""
    before = (content.before(row["id"], kind)[:1] for kind in kinds_of(row))
    ends = [longest_of(content.by_name[name]) for names in before for name in names]
    return max(float(row.get("above", 0)), min(ends, default=0.0))
