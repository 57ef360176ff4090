"""The tables of tuned plans: their contents, when they apply, concurrent writers, and their use by the dispatcher."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.lower.spec import KernelSpec
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.plan.choose import choose
from cupynorm.plan.config import VARIANTS, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices, tuned_plans
from cupynorm.tools import explain
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

pytestmark = pytest.mark.usefixtures("tuned_cache")

H200 = RECORDED["h200"]
PROBLEM = Problem(49152, 1024, 8, 2, 4)
KIND = "cupynorm::Softmax<float>, load, store"


def plan_for(problem: Problem = PROBLEM, variant: str | None = None) -> Plan:
    return choose(problem, H200, lambda plan: 2, variant)


@pytest.fixture
def place():
    return tuned_plans.place(H200, "580.159.04")


def entry(plan: Plan) -> tuned_plans.Entry:
    return tuned_plans.Entry(tuned_plans.portable(plan), 0.97, "2026-01-01T00:00:00+00:00")


def keep(place: tuned_plans.Place, plan: Plan, problem: Problem = PROBLEM, kind: str = KIND) -> Path:
    return tuned_plans.store(place, {tuned_plans.key_of(kind, problem, H200): entry(plan)})


def find(place: tuned_plans.Place, problem: Problem = PROBLEM, kind: str = KIND) -> Plan | None:
    return tuned_plans.find(place, H200, kind, problem)


# ---- the file


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_stored_comes_back_for_any_number_of_rows(place, variant):
    plan = plan_for(variant=variant)
    keep(place, plan)

    found = find(place, dataclasses.replace(PROBLEM, rows=10**6))

    assert found is not None
    assert found.template == plan.template
    more = choose(dataclasses.replace(PROBLEM, rows=10**6), H200, lambda plan: 2, found)
    assert dataclasses.replace(more, grid=0, waves=0) == dataclasses.replace(plan, grid=0, waves=0)
    assert choose(PROBLEM, H200, lambda plan: 2, found) == plan


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 1},
        {"cols": 1032},
        {"vector": 4},
        {"load_bytes": 4},
        {"compute_bytes": 8},
        {"parameter_bytes": (2,)},
    ],
)
def test_another_problem_has_no_plan(place, other):
    keep(place, plan_for())

    assert find(place) is not None
    assert find(place, dataclasses.replace(PROBLEM, **other)) is None
    assert find(place, kind="cupynorm::LogSoftmax<float>, load, store") is None


@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [
        (1, 1 << 20, "few 128"),
        (2, 1 << 20, "few 64"),
        (16, 1 << 20, "few 8"),
        (64, 1 << 20, "few 2"),
        (66, 1 << 20, "few 2"),
        (67, 1 << 20, "few 1"),
        (131, 1 << 20, "few 1"),
        (132, 64, "part"),
        (33791, 64, "part"),
        (33792, 64, "full"),  # 132 x 2048 threads, 16 bytes each
        (132, 1 << 20, "full"),
        (10**9, 64, "full"),
    ],
)
def test_rows_are_of_a_class(rows, cols, expected):
    assert tuned_plans.rows_class(dataclasses.replace(PROBLEM, rows=rows, cols=cols), H200) == expected


def test_entries_are_merged_replaced_and_taken_out(place):
    wide = dataclasses.replace(PROBLEM, cols=2048)
    keep(place, plan_for())
    keep(place, plan_for(wide), wide)
    assert find(place) is not None
    assert find(place, wide) is not None

    keep(place, plan_for(variant="shared"))
    tuned_plans.store(place, {tuned_plans.key_of(KIND, wide, H200): None})

    assert find(place).variant == "shared"
    assert find(place, wide) is None


WRITER = """
import dataclasses, sys
from cupynorm.runtime import tuned_plans
from tests.runtime.test_tuned_plans import H200, PROBLEM, keep, plan_for
place = tuned_plans.place(H200, "580.159.04")
for cols in map(int, sys.argv[1:]):
    problem = dataclasses.replace(PROBLEM, cols=cols)
    keep(place, plan_for(problem), problem)
"""


def test_writers_at_the_same_time_lose_nothing(place, tuned_cache):
    every = [8 * number for number in range(1, 81)]
    root = str(Path(cupynorm.__file__).parents[1])

    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, *map(str, every[first::4])], env={**os.environ, "PYTHONPATH": root}
        )
        for first in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [find(place, dataclasses.replace(PROBLEM, cols=cols)) for cols in every]
    assert None not in found
    assert not list(tuned_cache.glob("tuned/*.tmp"))


def test_an_interrupted_write_leaves_the_table_as_it_was(place, monkeypatch, tuned_cache):
    keep(place, plan_for())

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", interrupt)
        with pytest.raises(KeyboardInterrupt):
            keep(place, plan_for(variant="shared"))

    assert find(place) == tuned_plans.portable(plan_for())
    assert not list(tuned_cache.glob("tuned/*.tmp"))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "7",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"schema": 2', '"schema": 1'),
        lambda text: text.replace("580.159.04", "999.1"),
        lambda text: text.replace('"entries": {', '"entries": 7, "x": {'),
        lambda text: text.replace('"vector": 8', '"vector": "8, evil()"'),
        lambda text: text.replace('"vector": 8', '"vector": -8'),
        lambda text: text.replace('"vector": 8', '"vector": true'),
        lambda text: text.replace('"full": true', '"full": 1'),
        lambda text: text.replace('"vector": 8', '"vector": 8, "cluster_of_old": 2'),
        lambda text: text.replace('"vector": 8,', ""),
        lambda text: text.replace('"share": 0.97', '"share": "much"'),
    ],
)
def test_a_file_that_cannot_be_used_is_one_warning_that_names_it(place, change):
    file = keep(place, plan_for())
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))

    with pytest.warns(UserWarning, match="is not used") as told:
        assert find(place) is None
    assert find(place) is None

    assert len(told) == 1
    assert str(file) in str(told[0].message)
    with pytest.warns(UserWarning, match="is not used"):
        keep(place, plan_for())
    assert find(place) is not None


def test_bytes_that_are_no_text_are_a_warning(place):
    file = keep(place, plan_for())
    file.write_bytes(b"\xff\xfe\x00")

    with pytest.warns(UserWarning, match="is not used"):
        assert find(place) is None


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs permissions that hold")
def test_a_file_that_may_not_be_read_is_a_warning(place):
    keep(place, plan_for()).chmod(0)

    with pytest.warns(UserWarning, match="Permission"):
        assert find(place) is None


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
@pytest.mark.parametrize("which", ["folder", "file", "link"])
def test_what_others_could_have_written_is_not_used_and_not_written_to(place, which, tmp_path):
    file = keep(place, plan_for())
    if which == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        (file if which == "file" else file.parent).chmod(0o777)

    with pytest.warns(UserWarning, match="is not used"):
        assert find(place) is None

    if which == "folder":
        assert tuned_plans.why_unusable() == f"{file.parent} can be written by others"
        with pytest.raises(PermissionError, match="can be written by others: make it yours alone"):
            keep(place, plan_for())


def test_another_device_driver_or_text_has_another_table(place, monkeypatch):
    keep(place, plan_for())
    before = {each.file for each in (place,)}
    monkeypatch.setattr(compiler, "digest", lambda: "another")

    others = [
        tuned_plans.place(H200, "580.159.04"),
        tuned_plans.place(H200, "580.1"),
        tuned_plans.place(dataclasses.replace(H200, name="h200 MIG 1g.18gb"), "580.159.04"),
        tuned_plans.place(dataclasses.replace(H200, sm_count=16), "580.159.04"),
    ]

    assert len(before | {each.file for each in others}) == 5
    assert [find(each) for each in others] == [None] * 4


def test_a_table_is_read_once(place, monkeypatch):
    file = keep(place, plan_for())
    assert find(place) is not None
    file.unlink()

    assert find(place) is not None
    row_ops.forget()
    assert find(place) is None


def test_it_can_be_switched_off(place, monkeypatch):
    keep(place, plan_for())

    monkeypatch.setenv("CUPYNORM_TUNED", "0")
    assert find(place) is None
    monkeypatch.setenv("CUPYNORM_TUNED", "1")
    assert find(place) is not None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CUPYNORM_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a/tuned"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/cupynorm/tuned"),
        ({"HOME": "/home/me"}, "/home/me/.cache/cupynorm/tuned"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="Windows has a folder of its own")
def test_the_folder_is_the_users_cache(monkeypatch, variables, expected):
    for name in ("CUPYNORM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert str(tuned_plans.folder()) == expected


def test_without_a_home_there_are_no_plans_and_none_can_be_kept(place, monkeypatch):
    for name in ("CUPYNORM_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where nobody has a home

    assert find(place) is None
    assert tuned_plans.tables() == []
    with pytest.raises(OSError, match="set CUPYNORM_CACHE_DIR"):
        keep(place, plan_for())


def test_tables_are_listed_and_cleared(place, tuned_cache):
    file = keep(place, plan_for())
    (tuned_cache / "tuned" / "torn.json").write_text("{")

    assert [(each["file"], each["entries"]) for each in tuned_plans.tables()] == [
        (str(file), 1),
        (str(tuned_cache / "tuned" / "torn.json"), 0),
    ]
    assert len(tuned_plans.clear()) == 2
    assert tuned_plans.tables() == []
    assert find(place) is None
    assert tuned_plans.clear() == []


def test_fields_of_a_launch_are_fields_of_a_plan():
    assert set(tuned_plans.OF_A_LAUNCH) <= {field.name for field in dataclasses.fields(Plan)}
    assert tuned_plans.portable(plan_for()).waves == math.inf
    with pytest.raises(ValueError, match="cannot be kept"):
        tuned_plans.portable(dataclasses.replace(plan_for(), vectors="2"))


# ---- the dispatcher


def what_of(simulated: Any, rows: int, cols: int) -> tuple[KernelSpec, Any]:
    from cupynorm.tools import bench
    from cupynorm.tools.results import Point

    return bench.lowered(Point("softmax", "float32", rows, cols)), devices.present_limits()


def tuned_for(simulated: Any, rows: int, cols: int, variant: str) -> Plan:
    """Keep a plan of another variant for softmax, as if it had been the fastest."""
    what, limits = what_of(simulated, rows, cols)
    plan = choose(what.problem, limits, lambda plan: 1, variant)
    place = tuned_plans.place(limits, devices.driver_version())
    tuned_plans.store(place, {tuned_plans.key_of(what.types, what.problem, limits): entry(plan)})
    return plan


def launched() -> list[Plan]:
    return [each.plan for each in row_ops._launches.values()]


@pytest.mark.parametrize("rows", [6, 8])
def test_the_dispatcher_prefers_what_was_found(simulated, rows):
    tuned_for(simulated, 6, 40, "block")
    host = np.random.default_rng(0).standard_normal((rows, 40)).astype(np.float32)

    y = cupynorm.softmax(simulated.cupy.asarray(host))

    assert [plan.variant for plan in launched()] == ["block"]
    np.testing.assert_allclose(simulated.cupy.asnumpy(y), cupynorm.softmax(host), rtol=1e-6)


def test_a_plan_that_is_asked_for_reads_no_table(simulated, monkeypatch):
    tuned_for(simulated, 6, 40, "block")
    monkeypatch.setattr(tuned_plans, "find", lambda *_: pytest.fail("the table was asked"))

    cupynorm.softmax(simulated.cupy.asarray(np.ones((6, 40), np.float32)), plan="warp")

    assert [plan.variant for plan in launched()] == ["warp"]


def test_a_call_that_is_remembered_asks_no_table(simulated, monkeypatch):
    x = simulated.cupy.asarray(np.ones((6, 40), np.float32))
    cupynorm.softmax(x)
    monkeypatch.setattr(tuned_plans, "find", lambda *_: pytest.fail("the table was asked"))
    monkeypatch.setattr(tuned_plans, "place", lambda *_: pytest.fail("the table was asked"))

    cupynorm.softmax(x)


def test_switched_off_the_table_of_the_package_chooses(simulated, monkeypatch):
    tuned_for(simulated, 6, 40, "block")
    monkeypatch.setenv("CUPYNORM_TUNED", "0")
    monkeypatch.setattr(tuned_plans, "_read", lambda *_: pytest.fail("a file was read"))

    cupynorm.softmax(simulated.cupy.asarray(np.ones((6, 40), np.float32)))

    assert [plan.variant for plan in launched()] == ["warp"]


@pytest.mark.parametrize("change", [{"vectors": 7}, {"vector": 0}, {"group": 96}, {"variant": "nowhere"}])
def test_a_plan_that_does_not_fit_is_a_warning_and_the_call_runs(simulated, change):
    what, limits = what_of(simulated, 6, 40)
    plan = dataclasses.replace(choose(what.problem, limits, lambda plan: 1, "block"), **change)
    place = tuned_plans.place(limits, devices.driver_version())
    tuned_plans.store(place, {tuned_plans.key_of(what.types, what.problem, limits): entry(plan)})
    x = simulated.cupy.asarray(np.ones((6, 40), np.float32))

    with pytest.warns(UserWarning, match="a tuned plan is not used") as told:
        y = cupynorm.softmax(x)

    assert len(told) == 1
    assert str(place.file) in str(told[0].message)
    assert [plan.variant for plan in launched()] == ["warp"]
    np.testing.assert_allclose(simulated.cupy.asnumpy(y), 1 / 40, rtol=1e-6)


def test_a_torn_file_does_not_stop_a_call(simulated):
    tuned_for(simulated, 6, 40, "block")
    tuned_plans.place(devices.present_limits(), devices.driver_version()).file.write_text("{")

    with pytest.warns(UserWarning, match="is not used"):
        cupynorm.softmax(simulated.cupy.asarray(np.ones((6, 40), np.float32)))

    assert [plan.variant for plan in launched()] == ["warp"]


def test_explain_says_where_the_plan_comes_from(simulated):
    tuned_for(simulated, 6, 40, "block")

    found = {
        "tuned": explain.explain(SOFTMAX, (6, 40), "float32"),
        "rules": explain.explain(SOFTMAX, (6, 41), "float32"),
        "forced": explain.explain(SOFTMAX, (6, 40), "float32", plan="shared"),
    }

    assert {name: each.source for name, each in found.items()} == {name: name for name in found}
    assert found["tuned"].plan.variant == "block"
    assert found["forced"].why == "the call names the variant"  # and not that no other variant holds the row
    assert explain.explain(SOFTMAX, (6, 40), "float32", device="h200").source == "rules"
    assert explain.explain(LAYER_NORM, (6, 40), "float32").source == "rules"


def test_the_drivers_version_is_asked_of_linux_or_of_cuda(simulated, monkeypatch):
    monkeypatch.setattr(
        Path, "read_text", lambda *_: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  x"
    )
    assert devices.driver_version.__wrapped__() == "580.1.2"

    def none(*_):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", none)
    assert devices.driver_version.__wrapped__() == "CUDA 13.0"
