"""docs/json.md: what every command prints with --json has the keys and the kinds that stand there, and no others."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynorm import cli, embedding
from cupynorm.plan.choose import choose
from cupynorm.plan.limits import RECORDED, active_blocks
from cupynorm.plan.problem import Problem
from cupynorm.runtime import tuned_plans
from cupynorm.tools import tune
from tests import command_runner

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "json.md").read_text("utf-8")
KINDS: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "text": str,
    "flag": bool,
    "object": dict,
    "null": type(None),
}


def documented(command: str, table: int = 0) -> dict[str, str]:
    """Return a table of a command's section: what each place holds."""
    section = re.search(rf"^## {command}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, command
    tables = re.split(r"^\| key \| holds \|.*$", section[1], flags=re.MULTILINE)[1:]
    return dict(re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", tables[table], re.MULTILINE))


def places(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """Return every place of a document with what stands there: members by their keys, entries of lists as []."""
    found = [(place, value)] if place else []
    if isinstance(value, dict):
        found += [each for key in value for each in places(value[key], f"{place}.{key}".lstrip("."))]
    elif isinstance(value, list):
        found += [each for entry in value for each in places(entry, f"{place}[]")]
    return found


def pattern(place: str) -> re.Pattern[str]:
    # a key may hold a dot: a file's name, a version
    return re.compile(re.escape(place).replace(r"\*", r"[^\[\]]*"))


def faults(document: Any, table: dict[str, str]) -> list[str]:
    """Return what differs between a document and a table: places that are not there, of another kind, or missing."""
    found = []
    kinds = {name: tuple(KINDS[each] for each in holds.split(" or ")) for name, holds in table.items()}
    objects = [name for name, holds in table.items() if "object" in holds]
    above = {
        name[:at] for name in table for at in (match.start() for match in re.finditer(r"\.|\[\]", name)) if at
    }
    above |= {name.removesuffix("[]") for name in table}
    for place, value in places(document):
        if any(re.match(pattern(name).pattern + r"[.\[]", place) for name in objects):
            continue
        exact = [name for name in table if pattern(name).fullmatch(place)]
        best = min(exact, key=lambda name: name.count("*"), default=None)
        if best is not None:
            expected = kinds[best]
            fits = isinstance(value, expected) and (not isinstance(value, bool) or bool in expected)
            found += [] if fits else [f"{place}: {value!r} is no {table[best]}"]
        elif not (isinstance(value, (dict, list)) and any(pattern(name).fullmatch(place) for name in above)):
            found.append(f"{place} is not documented")
    there = [place for place, _ in places(document)]
    for name in table:
        if not any(pattern(name).fullmatch(place) for place in there):
            parent = re.sub(r"(\.[^.\[]*|\[\])$", "", name)
            empty = [
                place
                for place, value in places(document)
                if (value in ([], None) or (value == {} and name.endswith(".*")))
                and (pattern(parent).fullmatch(place) or name.startswith(place))
            ]
            found += [] if empty else [f"{name} is documented, and missing"]
    return found


def test_the_check_finds_what_differs() -> None:
    table = {"a": "integer", "b[].c": "text or null", "d": "object", "e.*": "flag"}
    right = {"a": 1, "b": [{"c": "x"}, {"c": None}], "d": {"any": [1, {"x": 2}]}, "e": {"f.g": True}}

    assert faults(right, table) == []
    assert faults({**right, "b": [], "e": {}}, table) == []
    assert faults({**right, "a": True}, table) == ["a: True is no integer"]
    assert faults({**right, "b": [{"c": 1}]}, table) == ["b[].c: 1 is no text or null"]
    assert faults({**right, "more": 1}, table) == ["more is not documented"]
    assert faults({**right, "b": [{"c": "x", "y": 1}]}, table) == ["b[].y is not documented"]
    assert faults({name: right[name] for name in "bde"}, table) == ["a is documented, and missing"]
    assert faults({**right, "b": [{}]}, table) == ["b[].c is documented, and missing"]


def document(*arguments: object) -> Any:
    """Return what a command prints with --json: one document, and nothing else on standard output."""
    done = command_runner().invoke(cli.cli, [*map(str, arguments), "--json"])
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    assert found["schema"] == 1
    return found


def test_every_command_with_json_has_its_section() -> None:
    with_json = {
        name
        for name, command in cli.cli.commands.items()
        if any("--json" in each.opts for each in command.params)
    }

    assert (
        set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
        == with_json
        == {*cli.cli.commands} - {"completion"}
    )
    assert all(
        each.is_flag for name in with_json for each in cli.cli.commands[name].params if "--json" in each.opts
    )


def test_run(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((4, 8), np.float32))

    told = document("run", "layer_norm", tmp_path / "in.npy", "-o", tmp_path / "out.npy", "--stats")

    assert faults(told, documented("run")) == []


def test_embed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = embedding.Report("o.npy", "m", 3, 12, 4, "float32", "mean", True, "cpu", 0, 1, 0.5)
    monkeypatch.setattr(embedding, "embed_file", lambda *_, **__: report)

    told = document("embed", tmp_path / "in.txt", "-o", tmp_path / "o.npy", "--model", tmp_path)

    assert faults(told, documented("embed")) == []


@pytest.mark.parametrize("op", ["softmax", "layer_norm/int8", "bias_gelu", "split_heads"])
def test_explain(op: str) -> None:
    told = document("explain", op, "--shape", "4096,768", "--dtype", "float16", "--device", "h100")

    assert faults(told, documented("explain")) == []


def test_info_and_doctor() -> None:
    told = document("info")
    told["devices"] = [{"number": 0, **told["recorded"]["h200"]}]
    told["tuned"]["tables"] = [{"file": "a.json", "entries": 2, "device": "h200", "sm_count": 132}]

    assert faults(told, documented("info")) == []
    assert faults(document("doctor"), documented("doctor")) == []


def test_selftest() -> None:
    assert faults(document("selftest", "--cpu", "--quick"), documented("selftest")) == []


def test_bench(tmp_path: Path) -> None:
    source = CHECKOUT / "benchmarks" / "h200" / "2026-11-22.json"

    told = document("bench", "--from", source, "--save", tmp_path / "again.json")

    assert faults(told, documented("bench")) == []
    assert json.loads((tmp_path / "again.json").read_text()) == told
    tables = document("bench", "--from", CHECKOUT / "benchmarks" / "h200" / "2026-11-22-plans.json")
    assert faults(tables, {"schema": "integer", **documented("bench", 1)}) == []


def test_tune(tuned_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tuned_plans.Place("a device", "90", 132, "580", "abc")
    plan = choose(
        Problem(64, 1024, 8, 2, 4),
        RECORDED["h200"],
        lambda each: active_blocks(RECORDED["h200"], each.block, 32, each.shared_bytes),
    )
    found = tune.Result(
        tune.points(("softmax",), ("float16",), (1024,), (64,))[0],
        plan,
        math.nan,
        plan,
        0.9,
        3,
        {"spills": 2},
    )
    monkeypatch.setattr(tune, "here", lambda: place)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: iter([found]))
    monkeypatch.setattr(tune, "most_candidates", lambda *_: 7)
    few = ("tune", "softmax", "--dtypes", "float16", "--cols", "1024", "--rows", "64")

    whole = documented("tune")
    assert faults(document(*few), whole) == []
    dry = {name: holds for name, holds in whole.items() if not name.startswith(("results", "left_out"))}
    assert faults(document(*few, "--dry-run"), dry | documented("tune", 1)) == []
    assert faults(document("tune", "--clear"), documented("tune", 2)) == []
