"""The search of rules without a device: its points and plans, and what it records with a clock of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

from cupynorm import cli
from cupynorm.plan.config import PLAIN, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.rule_file import content_of, file_of, kinds_of
from cupynorm.runtime import devices
from cupynorm.tools import bench, bench_points, buffers, peers, rule_plans, search, timing
from cupynorm.tools.results import Point, Timing
from tests import command_runner
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

H200 = RECORDED["h200"]
CONTENT = rule_plans.read(content_of("90"), file_of("90"))
POINT = Point("layer_norm", "float16", 4096, 65536)
SMALL = [Point("softmax", "float32", 600, cols) for cols in (40, 48, 56)]
COPY_SECONDS = 5e-6


# ---- points and plans


def test_every_form_and_most_rules_have_points() -> None:
    held = {
        rule
        for op, dtype in (("softmax", "float16"), ("rms_norm/int8", "float32"))
        for rule in search.held_by_rules(CONTENT.told, CONTENT.file, H200, (op, dtype))
    }

    kinds = {kind for each in held for kind in kinds_of(CONTENT.by_name[each])}
    assert kinds >= {(0, 2), (1, 4)}
    lists = (CONTENT.lists["fixed", table, (0, 2)] for table in ("full", "ragged"))
    assert {row["id"] for rows in lists for row in rows} <= held


def test_rules_of_narrow_rows_have_points_though_rows_without_gaps_come_in_tiles() -> None:
    held = search.held_by_rules(CONTENT.told, CONTENT.file, H200, ("layer_norm", "float16"))

    tiled = [
        point
        for points in held.values()
        for point in points
        if CONTENT.choose(bench.lowered(point).problem, H200).plan.kernel == "row_tiled"
    ]
    assert tiled


def test_the_sweep_comes_first_then_powers_of_two_then_each_rule_in_turn() -> None:
    points = search.points(CONTENT, H200, ["softmax"], ["float16"])

    known = [point for point in search.known_points() if (point.op, point.dtype) == ("softmax", "float16")]
    assert set(bench_points.points(["softmax"], ["float16"])) <= set(known)
    assert points[: len(known)] == known
    rest = list(itertools.dropwhile(lambda point: point.cols.bit_count() == 1, points[len(known) :]))
    chosen = [CONTENT.choose(rule_plans.one_by_one(bench.lowered(point).problem), H200) for point in rest]
    turns: list[set[str | None]] = [set()]
    for name in (each.rule for each in chosen if each is not None):
        if name in turns[-1]:
            turns.append(set())
        turns[-1].add(name)
    assert 1 < len(turns) <= len(search.PARTS)
    assert len(points) == len(set(points))
    assert points == search.points(CONTENT, H200, ["softmax"], ["float16"])


def test_points_of_bfloat16_come_last() -> None:
    dtypes = [point.dtype for point in search.points(CONTENT, H200, ["rms_norm"], ["float16", "bfloat16"])]

    assert dtypes == sorted(dtypes, reverse=True)
    assert set(dtypes) == {"float16", "bfloat16"}


def test_contenders_are_the_rules_neighbours_and_what_is_chosen_without_rules() -> None:
    point = Point("rms_norm", "float32", 4096, 8192)
    found = rule_plans.contenders(CONTENT, bench.lowered(point).problem, H200)

    first, *others = found.values()
    assert first == "rule cached-p1-b24-to-32768"
    assert "cached-p01-b4-to-16384 for longer rows" in others
    assert "with the numbers of cached-p2-b24-to-32768" in others
    assert any(each.startswith("without cached-p1-b24-to-32768") for each in others)
    assert "without crossover cached, bytes 4" in others
    plan = next(iter(found))
    assert (plan.grid, plan.why) == (0, "")


def test_a_list_without_rules_gives_no_answer_and_no_error() -> None:
    problem = bench.lowered(POINT).problem
    clusters = [row["id"] for row in CONTENT.rows if row["rule"].startswith("cluster")]

    assert CONTENT.but(clusters).choose(problem, H200) is None


# ---- what is recorded


class Timer:
    """In place of the clock: each plan takes as long as its number among those of a point says."""

    def __init__(self) -> None:
        self.points = 0
        self.failing = False

    def __call__(self, runs: Any, _sets: int, *, notes: Any, **_: Any) -> dict[str, Timing]:
        self.points += 1
        found = {}
        for number, name in enumerate(runs):
            seconds = COPY_SECONDS * (1 if name.startswith("copy") else 1.25 + number)
            if self.failing and number == 0:
                notes[name] = "CUDADriverError: too much asked for"
                continue
            found[name] = Timing(seconds, seconds / 2, seconds * 2)
        return found


@pytest.fixture
def timer(simulated, monkeypatch):
    """A simulated device; nothing is compiled, and how long a plan takes is made up."""
    timer = Timer()
    report = types.SimpleNamespace(about={"date": "2026-11-23", "device": {"name": "h200"}, "versions": {}})
    monkeypatch.setattr(timing, "time_interleaved", timer)
    monkeypatch.setattr(
        buffers, "allocate", lambda *_: [buffers.Set({"x": "x", "y": "y"}, ("source", "target"))]
    )
    monkeypatch.setattr(bench, "ours", lambda form, arrays, plan: types.SimpleNamespace(plan=plan))
    monkeypatch.setattr(bench, "new_report", lambda: report)
    monkeypatch.setattr(peers, "forget", lambda: None)
    monkeypatch.setattr(search, "usable", lambda device, spec, plans, refused, workers: plans)
    monkeypatch.setattr(search, "points", lambda *_: list(SMALL))
    return timer


def run(file: Path, **options: Any) -> list[tuple[int, int]]:
    return list(search.search(file, CONTENT, processes=0, **options))


def test_narrow_rows_without_gaps_are_timed_as_rules_say(timer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(search, "points", lambda *_: [Point("layer_norm", "float16", 49152, 77)])

    run(tmp_path / "search.json")

    (found,) = search.read(tmp_path / "search.json").points
    assert next(iter(found.how.values())).startswith("rule narrow")
    assert {plan.kernel for plan in found.plans} == {"row_registers"}


def test_a_file_is_whole_after_each_point_and_tells_what_was_measured(timer, tmp_path) -> None:
    file = tmp_path / "search.json"
    seen = []

    for done, every in search.search(file, CONTENT, processes=0):
        seen.append((done, every))
        assert len(search.read(file).points) == done

    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    told = search.read(file)
    assert [each.point for each in told.points] == SMALL
    assert (told.about["rules"], told.about["date"], told.limits) == (CONTENT.file, "2026-11-23", H200)
    first = told.points[0]
    assert len(first.plans) > 1
    assert next(iter(first.plans.values())) == (0.8, 0.4, 1.6)
    assert list(first.how.values()) == list(
        rule_plans.contenders(CONTENT, bench.lowered(SMALL[0]).problem, H200).values()
    )
    assert dataclasses.asdict(SMALL[0]).items() <= json.loads(file.read_text())["points"][0].items()


def test_a_search_is_gone_on_with(timer, tmp_path, monkeypatch) -> None:
    file = tmp_path / "search.json"
    now = iter([0.0, *(1.0 for _ in range(3)), *(9.0 for _ in range(99))])
    with monkeypatch.context() as patched:
        patched.setattr(search.time, "monotonic", lambda: next(now))
        assert run(file, seconds=5)[-1] == (1, 3)

    assert run(file) == [(1, 3), (2, 3), (3, 3)]

    assert timer.points == 3
    assert [each.point for each in search.read(file).points] == SMALL
    assert run(file) == [(3, 3)]


def test_a_plan_that_fails_is_told(timer, tmp_path) -> None:
    timer.failing = True

    run(tmp_path / "search.json")

    (first, *_) = search.read(tmp_path / "search.json").points
    assert first.refused == {"CUDADriverError: too much asked for": 1}


def test_a_point_that_does_not_fit_memory_is_told(timer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(buffers, "allocate", lambda *_: (_ for _ in ()).throw(MemoryError("2 GB")))

    run(tmp_path / "search.json")

    (first, *_) = search.read(tmp_path / "search.json").points
    assert (first.plans, list(first.refused)) == ({}, ["MemoryError: 2 GB"])


def test_a_search_of_other_kernels_is_not_gone_on_with(timer, tmp_path) -> None:
    file = tmp_path / "search.json"
    run(file)
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "digest": "others"}))

    with pytest.raises(ValueError, match="recorded with other digest: others, not .*give another file"):
        run(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is 'list': a file that `cupynorm tune --search` has written is expected"),
        ('{"schema": 1, "points": []}', "is None: a file that"),
        ('{"kind": "search of rules", "schema": 9}', "has schema 9, 1 is expected"),
        (
            '{"kind": "search of rules", "schema": 1, "points": [{}]}',
            "is damaged, or no search of rules: KeyError: 'plans'",
        ),
        (
            '{"kind": "search of rules", "schema": 1, "points": []}',
            "is damaged, or no search of rules: KeyError: 'limits'",
        ),
    ],
)
def test_what_is_no_search_is_refused_with_what_it_is(text: str, message: str, tmp_path) -> None:
    file = tmp_path / "search.json"
    file.write_text(text)

    with pytest.raises(ValueError, match=message):
        search.read(file)


# ---- kernels that others compile


class Pool:
    """Processes that run nothing, and remember what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def submit(self, function: Any, *job: str) -> Any:
        assert function is search.compile_one
        self.asked.append(job)
        done = search.concurrent.futures.Future()
        done.set_result(None)
        return done


def test_kernels_are_compiled_once_and_ahead(monkeypatch) -> None:
    pool: Any = Pool()
    monkeypatch.setattr(search, "AHEAD", 1)
    points = [POINT, dataclasses.replace(POINT, cols=32760), dataclasses.replace(POINT, rows=2048)]
    ahead = search._Ahead(CONTENT, H200, points, pool)

    plans = ahead.compiled(0, math.inf)

    spec = bench.lowered(POINT)
    assert plans == rule_plans.contenders(CONTENT, spec.problem, H200)
    asked = len(pool.asked)
    assert {(spec.text, spec.expression(plan)) for plan in plans} < set(pool.asked)
    ahead.compiled(1, math.inf)
    assert len(pool.asked) == asked  # the third point needs those of the first
    assert len(pool.asked) == len(set(pool.asked))
    assert all(isinstance(plan, Plan) for plan in ahead.compiled(2, math.inf))


# ---- the command


def test_the_command_records_a_search(timer, tmp_path) -> None:
    file = tmp_path / "search.json"

    result = command_runner().invoke(cli.cli, ["tune", "--search", str(file), "--forms", "softmax", "--json"])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"schema": 1, "file": str(file), "points": 3, "left_out": 0}
    assert f"{len(CONTENT.rows)} rules of plan/data/sm_90.json, h200" in result.stderr
    again = command_runner().invoke(cli.cli, ["tune", "--search", str(file)])
    assert again.stdout == f"3 of 3 points are in {file}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--search", "a.json", "--cols", "8"], "--cols cannot be given with --search"),
        (["--search", "a.json", "softmax"], "OP cannot be given with --search"),
        (["--ship", "a.json", "--seconds", "9"], "--seconds cannot be given with --ship"),
        (["--ship", "a.json"], "--ship needs --out"),
        (["--out", "a.json"], "--out needs --search or --ship"),
    ],
)
def test_options_that_say_nothing_are_refused(options: list[str], message: str) -> None:
    result = command_runner().invoke(cli.cli, ["tune", *options])

    assert result.exit_code == 2
    assert message in result.stderr


def test_without_a_device_there_is_no_search(tmp_path, monkeypatch) -> None:
    def none(*_: Any) -> None:
        raise devices.NoDeviceError("there is none")

    monkeypatch.setattr(devices, "present_limits", none)

    result = command_runner().invoke(cli.cli, ["tune", "--search", str(tmp_path / "search.json")])

    assert result.exit_code == 3
    assert not (tmp_path / "search.json").exists()


def test_recordings_from_before_rows_apart_are_read() -> None:
    plan = dataclasses.replace(PLAIN, variant="warp", vector=8, vectors=2, group=32, block=128)
    shares = search.Shares(POINT, {plan: (1.0, 1.0, 1.0)}, {plan: "near"}, {})
    told = shares.as_dict()
    for name in search.LATER_FIELDS:
        del told["plans"][0]["plan"][name]

    assert search.Shares.from_dict(told).as_dict() == shares.as_dict()
