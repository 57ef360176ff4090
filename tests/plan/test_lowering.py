"""The numbers of data/lowering.json: each is read, and says where it was measured; none stands in the code."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from cupynorm.plan import lowering
from cupynorm.plan.lowering import numbers

CHECKOUT = Path(__file__).parents[2]
TOLD = json.loads(Path(lowering.FILE).read_text("utf-8"))


def test_the_file_is_read_whole() -> None:
    found = numbers()

    assert set(TOLD) == {"schema", "sources", "sections", *found._fields}
    for name in found._fields:
        assert getattr(found, name)._asdict() == TOLD[name]


def test_every_section_says_where_it_was_measured() -> None:
    assert set(TOLD["sections"]) == set(numbers()._fields)
    assert {each for sources in TOLD["sections"].values() for each in sources} == set(TOLD["sources"])
    for source in TOLD["sources"].values():
        assert set(source) == {"device", "date", "file", "note", "what"}
        assert (CHECKOUT / source["file"]).is_file(), source["file"]
        assert (CHECKOUT / source["note"]).is_file(), source["note"]


# What cupynorm/lower knows of kernels and hardware: threads of a block, lanes of a warp, blocks of a grid along y.
FACTS = {
    "sums.py": {"THREADS", "LANES", "MOST_ROWS_UNALIGNED", "MAX_GROUPS"},
    "row_groups.py": {"INTERLEAVED"},
    "fused.py": set[str](),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_was_measured_stands_in_no_code(name: str) -> None:
    tree = ast.parse((CHECKOUT / "cupynorm" / "lower" / name).read_text("utf-8"))
    numbers_of = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(
            isinstance(each, ast.Constant) and type(each.value) in {int, float}
            for each in ast.walk(node.value)
        )
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    assert numbers_of - {"IDENTITY", "NO_SUM"} == FACTS[name]
