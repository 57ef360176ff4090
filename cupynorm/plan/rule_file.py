"""How rules are written in data/sm_NN.json, and which file an architecture is planned by."""

from __future__ import annotations

import functools
import json
import math
import os
from typing import TYPE_CHECKING, Any

from cupynorm.plan.rule_types import (
    CachedRule,
    ClusterRule,
    Crossover,
    FixedRule,
    RegisterRule,
    SharedRule,
    TilingRule,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupynorm.plan.rule_types import Rule


SCHEMA = 1
DATA = os.path.join(os.path.dirname(__file__), "data")  # noqa: PTH118, PTH120  pathlib would have to be imported
MEASURED = "90"  # whose data other architectures are planned by, until they have data of their own

Kind = tuple[int, int]
List = tuple[str, "str | None", Kind]  # what the rules of a list are, its table, and the kind that it is for

# The tables of Rules, by what their rules are.
TABLES = {
    "registers": "register_rules",
    "fixed": "fixed_rules",
    "cached": "cached_rules",
    "cluster": "cluster_rules",
}
_RULES: dict[str, Any] = {
    "registers": RegisterRule,
    "fixed": FixedRule,
    "cached": CachedRule,
    "cluster": ClusterRule,
    "cluster shared": SharedRule,
    "cluster tiling": TilingRule,
}
# Keys of a row that are no fields of its rule: the table that it is in, where it comes from, and, if no search says so,
# why `cupynorm tune --ship` has to leave it as it is (keep). share, share_without: shares of the copy rate that were
# measured at the point `at`, by the rule, and by what is chosen without it.
_OF_TABLES = {
    "rule",
    "table",
    "parameters",
    "bytes",
    "source",
    "note",
    "share",
    "share_without",
    "at",
    "keep",
}


@functools.cache
def _present() -> frozenset[str]:
    files = os.listdir(DATA)  # noqa: PTH208
    return frozenset(each[len("sm_") : -len(".json")] for each in files if each.startswith("sm_"))


def planned_by(architecture: str) -> str:
    """Return the architecture whose file an architecture is planned by: its own where there is one."""
    return architecture if architecture in _present() else MEASURED


def file_of(architecture: str) -> str:
    """Return the file in the package that rules_of() takes the rules from."""
    return f"plan/data/sm_{planned_by(architecture)}.json"


def content_of(architecture: str) -> dict[str, Any]:
    """Return what that file says, with where each rule comes from."""
    name = os.path.basename(file_of(architecture))  # noqa: PTH119
    with open(os.path.join(DATA, name), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        told: dict[str, Any] = json.load(file)
    return told


def kinds_of(row: Mapping[str, Any]) -> list[Kind]:
    """Return the kinds that a rule of a file is for: each number of parameters with each number of bytes."""
    parameters, sizes = (
        each if isinstance(each, list) else [each] for each in (row["parameters"], row["bytes"])
    )
    return [(number, size) for number in parameters for size in sizes]


def lists_of(row: Mapping[str, Any]) -> list[List]:
    """Return the lists that a rule of a file is in: among the rules of one, the planner looks one up."""
    return [(row["rule"].partition(" ")[0], row.get("table"), kind) for kind in kinds_of(row)]


def query_of(each: List) -> tuple[str, Any]:
    """Return the table of Rules that has a list, and its key there."""
    what, table, kind = each
    return TABLES[what], kind if table is None else (table, kind)


def list_of(name: str, key: Any) -> List:
    """Return the list that a table of Rules has under a key."""
    (what,) = (each for each, table in TABLES.items() if table == name)
    return (what, *key) if isinstance(key[0], str) else (what, None, key)


class Table(dict[Any, list[Any]]):
    """Rules by their keys. A process asks for few, so each list stays rows of the file until it is asked for.

    Making 470 of them took 1.4 ms of a process's first call.
    """

    def __getitem__(self, key: Any) -> list[Any]:
        """Return the rules of a key. Raises KeyError if there are none, TypeError for names that no rule has."""
        found = super().__getitem__(key)
        if isinstance(found[0], dict):
            found = self[key] = [_rule(each) for row in found for each in _each_of(row)]
        return found

    def get(self, key: Any, default: Any = ()) -> Any:
        """Return the rules of a key, or the default."""
        found = super().get(key)
        return default if found is None else self[key]


def _each_of(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a row for each number of vectors of a thread that a row is for."""
    vectors = row.get("vectors")
    return [{**row, "vectors": each} for each in vectors] if isinstance(vectors, list) else (row,)


def _rule(row: Mapping[str, Any]) -> Rule:
    """Make a rule of a row. Values are given in order, which takes a third of the time that names take."""
    kind = _RULES[row["rule"]]
    names = kind._fields
    if not row.keys() <= _OF_TABLES.union(names):
        raise TypeError(
            f"{row.get('id', 'a rule')}: no rule has {sorted(row.keys() - _OF_TABLES.union(names))}"
        )
    defaults = kind._field_defaults
    rule: Rule = kind(*[row[name] if name in row else defaults[name] for name in names])
    return rule if rule.row_bytes is not None else rule._replace(row_bytes=math.inf)


def crossovers_of(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, Kind | int | None], tuple[Crossover, ...]]:
    """Return the crossovers of a file by what they say, and by what they are for: see Rules.crossover."""
    found: dict[tuple[str, Kind | int | None], tuple[Crossover, ...]] = {}
    for row in rows:
        kind = (row["parameters"], row["bytes"]) if "parameters" in row else row.get("bytes")
        where = (row["what"], kind)
        found[where] = (*found.get(where, ()), _crossover(row))
    return found


def _crossover(row: Mapping[str, Any]) -> Crossover:
    least = row["from"] if "from" in row else row["above"] + 1
    least_rows, kept = row.get("min_rows", 0), row.get("kept", 1.0)
    return Crossover(least, row.get("up_to", math.inf), row.get("access_bytes"), least_rows, kept)


def by_bytes(value: Any) -> Any:
    """Return a JSON object with whole numbers for keys, and a list as a tuple."""
    if isinstance(value, dict):
        return {int(key): each for key, each in value.items()}
    return tuple(value) if isinstance(value, list) else value
