"""JSON files of measurements: a report of `cupynorm bench`, or lists of other measurements, shown as tables."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from cupynorm.tools.results import Report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclasses.dataclass
class Tables:
    """A file that is not a report: lists of entries, by their names in the file ("" for the whole file)."""

    about: dict[str, Any]
    lists: dict[str, list[dict[str, Any]]]

    def chosen(self, wanted: Mapping[str, Any]) -> Tables:
        """Return the tables with only the entries whose op, dtype, cols and rows are among the wanted ones."""

        def keeps(entry: Mapping[str, Any]) -> bool:
            return all(not names or entry.get(field) in names for field, names in wanted.items())

        return Tables(
            self.about, {name: [e for e in entries if keeps(e)] for name, entries in self.lists.items()}
        )

    def lines(self) -> list[str]:
        """Return lines to print: for each table a title, the names of the columns, and a line for each entry."""
        found: list[str] = []
        for name, entries in self.lists.items():
            found += [f"{name or 'entries'}: {len(entries)}"]
            found += _table([_flat(each) for each in entries])
            found.append("")
        return found[:-1]


def read(path: Path) -> Report | Tables:
    """Return a JSON file of measurements. Raises ValueError if it holds neither a report nor lists of entries."""
    try:
        told = json.loads(path.read_text("utf-8"))
        if isinstance(told, dict) and {"points", "host"} <= set(told):
            return Report.from_dict(told)
        lists = _lists_of(told)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a report of cupynorm bench: {error}") from error
    if not lists:
        raise ValueError(f"{path} is neither a report of cupynorm bench nor a list of measurements")
    about = {} if isinstance(told, list) else {k: v for k, v in told.items() if k not in lists}
    return Tables({**about, **about.pop("about", {})}, lists)


ABOUT = ("about", "device", "versions", "limits")  # entries that describe the machine


def _lists_of(told: Any) -> dict[str, list[dict[str, Any]]]:
    named = {"": told} if isinstance(told, list) else told if isinstance(told, dict) else {}
    found = {name: _entries(value) for name, value in named.items() if name not in ABOUT}
    return {name: entries for name, entries in found.items() if entries}


def _entries(value: Any) -> list[dict[str, Any]]:
    """Return a list of entries as it is, named entries with their names, one entry as a list; [] for anything else."""
    if isinstance(value, list):
        return value if all(isinstance(each, dict) for each in value) else []
    if not isinstance(value, dict):
        return []
    if all(isinstance(each, dict) for each in value.values()):
        return [{"name": name, **each} for name, each in value.items()]
    return [value]


def _flat(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return an entry's cells by the names of their columns, one for each number of a group; without notes."""
    cells: dict[str, str] = {}
    for name, value in entry.items():
        text = _cell(value)
        if name == "notes":
            continue
        if text:
            cells[name] = text
        elif isinstance(value, dict):
            cells.update({f"{name}: {key}": cell for key, each in value.items() if (cell := _cell(each))})
    return cells


def _cell(value: Any) -> str:
    """Return a value in a few words; empty if it holds several numbers, or nothing.

    A time gives its median, a plan its variant, and its share if it has one. A list of plans gives the first, which is
    the best.
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, dict):
        words = [_cell(value[key]) for key in ("share", "median", "variant") if key in value]
        return " ".join(words)
    if isinstance(value, list) and value:
        pair = all(isinstance(each, (str, float, int)) for each in value)
        return " ".join(map(_cell, value)) if pair else _cell(value[0])
    return ""


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in rows)) for name in columns}
    return [
        "  ".join(text.ljust(widths[name]) for name, text in line).rstrip()
        for line in (
            [(name, name) for name in columns],
            *([(name, row.get(name, "-")) for name in columns] for row in rows),
        )
    ]
