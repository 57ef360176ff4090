"""`cupynorm tune` without a device: the search, on the simulator with a clock of its own, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import cli
from cupynorm.catalog import forms, op_table
from cupynorm.catalog.gradient_forms import GRADIENTS as GRADIENT_FORMS
from cupynorm.catalog.statistic_forms import STATISTICS
from cupynorm.invoke import row_ops
from cupynorm.plan.config import Plan
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices, tuned_plans
from cupynorm.tools import bench, buffers, peers, testing, timing, tune
from cupynorm.tools.candidates import candidates
from cupynorm.tools.results import Point, Timing
from tests import SLOW, command_runner
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

pytestmark = pytest.mark.usefixtures("tuned_cache")

POINT = Point("softmax", "float32", 6, 40)
BEFORE, FASTER = 10e-6, 5e-6
GRADIENTS = [name for name in forms.TUNED if not forms.form(name).alone]


# ---- the search


class Timer:
    """In place of the clock: each plan takes what `seconds` says, and copies half of what the table's plan takes."""

    def __init__(self) -> None:
        self.seconds: Any = lambda plan: BEFORE
        self.rounds: list[list[Plan | str]] = []
        self.failing: set[Plan] = set()

    def __call__(self, runs: Any, _sets: int, *, notes: Any, **_: Any) -> dict[str, Timing]:
        found = {}
        self.rounds.append([getattr(run, "plan", name) for name, run in runs.items()])
        for name, run in runs.items():
            if name.startswith("copy"):
                seconds = BEFORE / 2
            elif run.plan in self.failing:
                notes[name] = "CUDADriverError: too much asked for"
                continue
            else:
                seconds = self.seconds(run.plan)
            found[name] = Timing(seconds, seconds, seconds)
        return found


@pytest.fixture
def timer(simulated, monkeypatch):
    """A simulated device that computes results; how long that takes is made up."""
    timer = Timer()

    def sets(*_):
        return [buffers.Set({"x": "x", "y": "y"}, ("source", "target"))]

    def ours(op, inputs, plan):
        return types.SimpleNamespace(plan=plan)

    monkeypatch.setattr(timing, "time_interleaved", timer)
    monkeypatch.setattr(buffers, "allocate", sets)
    monkeypatch.setattr(bench, "ours", ours)
    monkeypatch.setattr(peers, "forget", lambda: None)
    monkeypatch.setattr(tune, "MOST_CANDIDATES", 8)
    return timer


def table_plan(point: Point = POINT) -> Plan:
    what = bench.lowered(point)
    return tuned_plans.portable(row_ops.prepare(0, what, None, tuned=False).plan)


def every_candidate() -> list[Plan]:
    return candidates(bench.lowered(POINT).problem, devices.present_limits(), tune.MOST_CANDIDATES)


def faster_than(before: Plan, seconds: float, variant: str = "block") -> Any:
    return lambda plan: seconds if plan.variant == variant and plan != before else BEFORE


def test_the_fastest_plan_is_kept_and_the_dispatcher_prefers_it(timer, simulated):
    before = table_plan()
    timer.seconds = faster_than(before, FASTER)

    (result,) = tune.tune([POINT])

    assert result.changed
    assert (tuned_plans.portable(result.before), result.after.variant) == (before, "block")
    assert (result.before_share, result.share) == pytest.approx((0.5, 1.0))
    host = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    y = cupynorm.softmax(simulated.cupy.asarray(host))
    assert [each.plan.variant for each in row_ops._launches.values()] == ["block"]
    np.testing.assert_allclose(simulated.cupy.asnumpy(y), cupynorm.softmax(host), rtol=1e-6)


# of each kind one; the others with CUPYNORM_SLOW=1
SAMPLED = (
    "add_layer_norm_backward",
    "softmax_backward/where",
    "cross_entropy/grad",
    "logsumexp",
    "standardize/omit",
)


@pytest.mark.parametrize("name", GRADIENTS if SLOW else SAMPLED)
def test_a_gradients_fastest_plan_is_kept_and_its_calls_take_it(timer, simulated, name):
    point = Point(name, "float32", 6, 40)
    before = table_plan(point)
    other = "cluster" if "_norm" in name else "uncached"  # sums of parameters wait in registers as rows do
    timer.seconds = faster_than(before, FASTER, other)

    (result,) = tune.tune([point])

    assert result.changed
    assert result.refused == {}
    assert (tuned_plans.portable(result.before), result.after.variant) == (before, other)
    assert (result.before_share, result.share) == pytest.approx((0.5, 1.0))
    what, host = forms.form(name), forms.inputs(forms.form(name), 6, 40, "float32")
    given = {each: simulated.cupy.asarray(array) for each, array in host.items()}
    with row_ops.observed() as plans:
        found = what.call(given)
        what.call(given, plan="block")
    assert [plan.variant for plan in plans] == [other, "block"]
    results = found if isinstance(found, tuple) else (found,)
    testing.assert_form_close(what, [simulated.cupy.asnumpy(each) for each in results], what.right(host))


def test_a_gradient_whose_result_is_off_does_not_win(timer, monkeypatch):
    """Sums of parameters are compared, too."""
    point = Point("layer_norm_backward", "float32", 6, 40)
    timer.seconds = faster_than(table_plan(point), FASTER)
    original = testing.assert_close

    def off(y, expected, **how):
        if y.ndim == 1 and [each.plan.variant for each in row_ops._launches.values()][-1] == "block":
            raise AssertionError("off")
        original(y, expected, **how)

    monkeypatch.setattr(testing, "assert_close", off)

    (result,) = tune.tune([point])

    assert not result.changed
    assert result.refused["wrong result"] > 0


def test_what_has_no_variants_or_no_gamma_of_its_own_is_refused():
    with pytest.raises(
        ValueError, match=r"'geglu_backward' has no plan that could be tuned: use layer_norm,"
    ):
        tune.points(["geglu_backward"])
    with pytest.raises(ValueError, match=r"gamma_dtype: cross_entropy is measured with parameters of x's"):
        tune.points(["layer_norm", "cross_entropy"], weights="float32")
    assert tune.points(["cross_entropy"], ["float16"], [64], [3]) == [
        Point("cross_entropy", "float16", 3, 64)
    ]


def test_exactly_what_has_variants_can_be_tuned():
    plain = [name for name in forms.FORMS if forms.form(name).alone]
    of_gradients = [
        each.name
        for each in (*GRADIENT_FORMS, *STATISTICS)
        if isinstance(bench.lowered(Point(each.name, "float32", 8, 64)).problem, Problem)
    ]
    assert list(forms.TUNED) == plain + of_gradients


def test_the_tables_plan_is_in_every_round_and_rounds_get_smaller(timer, monkeypatch):
    before = table_plan()
    monkeypatch.setattr(tune, "GOING_ON", 4)
    monkeypatch.setattr(tune, "FINALISTS", 2)
    timer.seconds = lambda plan: BEFORE / 4 if plan != before else BEFORE

    (result,) = tune.tune([POINT])

    plans = [[each for each in entries if isinstance(each, Plan)] for entries in timer.rounds]
    assert [len(each) for each in plans] == [8, 5, 3]
    assert all(each[0] == before for each in plans)
    assert [any(isinstance(each, str) for each in entries) for entries in timer.rounds] == [
        False,
        False,
        True,
    ]
    assert result.tried == 8


@pytest.mark.parametrize(("seconds", "changed"), [(BEFORE / 1.005, False), (BEFORE / 1.02, True)])
def test_a_plan_that_is_faster_by_noise_only_is_not_taken(timer, seconds, changed):
    timer.seconds = faster_than(table_plan(), seconds)

    (result,) = tune.tune([POINT])

    assert result.changed is changed
    assert len(tuned_plans.read(tune.here())) == changed


def test_what_was_better_once_and_is_no_longer_is_taken_out(timer):
    timer.seconds = faster_than(table_plan(), FASTER)
    assert [each.changed for each in tune.tune([POINT])] == [True]
    timer.seconds = lambda plan: BEFORE

    assert [each.changed for each in tune.tune([POINT])] == [False]

    assert tuned_plans.read(tune.here()) == {}


def test_what_was_found_earlier_is_tried_again(timer):
    before = table_plan()
    odd = dataclasses.replace(before, block=1024, min_blocks=1)
    what, limits = bench.lowered(POINT), devices.present_limits()
    key = tuned_plans.key_of(what.types, what.problem, limits)
    tuned_plans.store(tune.here(), {key: tuned_plans.Entry(odd, 0.5, "2026-01-01")})
    timer.seconds = lambda plan: FASTER if plan == odd else BEFORE

    (result,) = tune.tune([POINT])

    assert tuned_plans.portable(result.after) == odd


def test_a_plan_whose_result_is_off_does_not_win(timer, monkeypatch):
    timer.seconds = faster_than(table_plan(), FASTER)
    original = testing.assert_close

    def off(y, expected, **how):
        if [each.plan.variant for each in row_ops._launches.values()][-1] == "block":
            raise AssertionError("off")
        original(y, expected, **how)

    monkeypatch.setattr(testing, "assert_close", off)

    (result,) = tune.tune([POINT])

    assert not result.changed
    assert result.refused["wrong result"] > 0


def test_plans_that_spill_do_not_compile_or_do_not_run_are_refused(timer, monkeypatch):
    before = table_plan()
    timer.seconds = lambda plan: BEFORE if plan == before else FASTER
    original = compiler.kernel

    def kernel(device, code, expression, limit, cluster):
        kept = "row_staged" in expression and "0, 1, 0, " not in expression  # shared and split
        if kept or "row_cached" in expression:
            raise devices.CompileError("no")
        found = original(device, code, expression, limit, cluster)
        return found._replace(local_bytes=8) if "row_registers" in expression else found

    timer.failing = {plan for plan in every_candidate() if plan.variant == "uncached"}
    monkeypatch.setattr(compiler, "kernel", kernel)

    (result,) = tune.tune([POINT])

    assert not result.changed
    assert set(result.refused) == {"spills", "not compiled (CompileError)", "not launched"}
    assert math.isfinite(result.before_share)


def test_if_nothing_can_be_timed_the_reason_is_told(timer):
    timer.failing = {table_plan(), *every_candidate()}

    with pytest.raises(
        RuntimeError, match="nothing could be timed at softmax float32 6 x 40: CUDADriverError"
    ):
        list(tune.tune([POINT]))


def test_no_point_is_started_when_the_time_is_over(timer, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(now))
    points = [POINT, dataclasses.replace(POINT, cols=48), dataclasses.replace(POINT, cols=56)]

    assert [each.point for each in tune.tune(points, seconds=15)] == points[:1]


def test_rows_are_halved_until_they_fit_memory_within_their_class(timer, monkeypatch):
    asked = []

    def sets(point, *_):
        asked.append(point.rows)
        if point.rows > 60_000:
            raise MemoryError
        return [buffers.Set({"x": "x", "y": "y"}, ("source", "target"))]

    monkeypatch.setattr(buffers, "allocate", sets)

    (result,) = tune.tune([dataclasses.replace(POINT, rows=200_000)])

    assert asked == [200_000, 100_000, 50_000]
    assert result.point.rows == 50_000
    monkeypatch.setattr(buffers, "allocate", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        list(tune.tune([POINT]))


def test_parameters_of_another_dtype_are_another_entry(timer):
    point = Point("layer_norm", "float16", 6, 40)
    timer.seconds = lambda plan: FASTER if plan.variant == "block" else BEFORE

    list(tune.tune([point], weights="float32"))
    list(tune.tune([point]))

    keys = list(tuned_plans.read(tune.here()))
    assert len(keys) == 2
    assert sum("Column<float" in key for key in keys) == 1


def test_points_are_combinations_or_the_default():
    assert tune.points(["softmax"], ["float16"], [64, 128], [3]) == [
        Point("softmax", "float16", 3, 64),
        Point("softmax", "float16", 3, 128),
    ]
    default = tune.points()
    assert {each.op for each in default} == {op.name for op in op_table.OPS}
    assert {each.cols for each in default} == set(tune.COLS)


# ---- the command


def invoke(*arguments: object) -> Any:
    return command_runner().invoke(cli.cli, ["tune", *map(str, arguments)])


ONE = ("softmax", "--dtypes", "float32", "--cols", 40, "--rows", 6)


def test_the_command_prints_before_and_after_and_where_it_is_kept(timer, tuned_cache):
    timer.seconds = faster_than(table_plan(), FASTER)

    result = invoke(*ONE)

    assert result.exit_code == 0, result.output
    header, line, *_, last = result.stdout.splitlines()
    assert header == f"op           {tune.HEADER}"
    assert line.startswith("softmax      float32   6 x 40             warp ")
    assert " 0.50  block " in line
    assert line.endswith(" 1.00")
    file = tune.here().file
    assert last == f"1 of 1 plans are better than the built-in ones, and kept in {file}"
    assert str(file).startswith(str(tuned_cache))
    assert "1 points, h200" in result.stderr


def test_columns_stay_below_their_names_where_ops_have_long_ones(timer):
    result = invoke("softmax", "add_layer_norm_backward", "--dtypes", "float32", "--cols", 40, "--rows", 6)

    header, *lines = result.stdout.splitlines()[:3]
    at = header.index("dtype")
    assert [line[at:].split()[0] for line in (header, *lines)] == ["dtype", "float32", "float32"]
    assert lines[1].startswith("add_layer_norm_backward float32   6 x 40 ")


def test_a_gamma_of_another_dtype_is_for_row_ops_alone(timer):
    result = invoke("rms_norm_backward", "--gamma-dtype", "float32")

    assert result.exit_code == 2
    assert "--gamma-dtype: rms_norm_backward is measured with parameters of x's dtype" in result.stderr


def test_json_tells_everything(timer):
    timer.seconds = lambda plan: BEFORE

    told = json.loads(invoke(*ONE, "--json").stdout)

    (entry,) = told["results"]
    assert (told["schema"], told["device"], told["left_out"]) == (1, "h200", 0)
    assert entry["point"] == dataclasses.asdict(POINT)
    assert entry["changed"] is False
    assert entry["before"] == entry["after"]
    assert invoke(*ONE).stdout.splitlines()[1].split()[-3:] == ["the", "same", "0.50"]


def test_a_dry_run_measures_and_writes_nothing(timer, tuned_cache):
    result = invoke(*ONE, "--dry-run")
    told = json.loads(invoke(*ONE, "--dry-run", "--json").stdout)

    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "softmax float32 6 x 40: 8 candidates"
    assert f"1 points; what is found would be kept in {tune.here().file}" in result.stdout
    assert told["points"] == [{**dataclasses.asdict(POINT), "candidates": 8}]
    assert timer.rounds == []
    assert not list(tuned_cache.iterdir())


def test_an_interruption_keeps_what_was_found(timer, monkeypatch):
    before = table_plan()
    timer.seconds = faster_than(before, FASTER)
    original = tune.measure

    def measure(point, weights):
        if point.cols == 48:
            raise KeyboardInterrupt
        return original(point, weights)

    monkeypatch.setattr(tune, "measure", measure)
    result = invoke("softmax", "--dtypes", "float32", "--cols", "40,48", "--rows", 6)

    assert result.exit_code == 130
    assert "left out: 1 points" in result.stdout
    assert "interrupted" in result.stderr
    assert len(tuned_plans.read(tune.here())) == 1


def test_clear_removes_every_table_and_needs_no_device(timer, monkeypatch, tuned_cache):
    timer.seconds = faster_than(table_plan(), FASTER)
    invoke(*ONE)

    def none(*_):
        raise devices.NoDeviceError("there is none")

    monkeypatch.setattr(devices, "present_limits", none)
    result = invoke("--clear")

    assert result.exit_code == 0
    assert result.stdout == f"removed 1 tables with 1 plans from {tuned_plans.folder()}\n"
    assert json.loads(invoke("--clear", "--json").stdout) == {"schema": 1, "removed": []}
    assert not list(tuned_cache.glob("tuned/*.json"))


def test_info_says_where_the_tables_are_and_how_much_they_hold(timer, monkeypatch):
    timer.seconds = faster_than(table_plan(), FASTER)
    invoke(*ONE)

    text = command_runner().invoke(cli.cli, ["info"]).stdout
    told = json.loads(command_runner().invoke(cli.cli, ["info", "--json"]).stdout)["tuned"]

    assert f"{tune.here().file.name}  1 plans" in text
    assert (told["folder"], told["used"]) == (str(tuned_plans.folder()), True)
    assert [each["entries"] for each in told["tables"]] == [1]
    monkeypatch.setenv("CUPYNORM_TUNED", "0")
    assert "no: CUPYNORM_TUNED is 0" in command_runner().invoke(cli.cli, ["info"]).stdout


def test_without_a_device_the_exit_status_is_3(monkeypatch):
    def none():
        raise devices.NoDeviceError("there is none")

    monkeypatch.setattr(devices, "present_limits", none)
    result = invoke(*ONE)

    assert (result.exit_code, result.stderr) == (3, "Error: there is none\n")


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(timer, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path / "file"))

    result = invoke(*ONE)

    assert result.exit_code == 4
    assert str(tmp_path / "file") in result.stderr
    assert result.stdout == ""
    assert timer.rounds == []


def test_wrong_usage_is_2():
    assert invoke("max").exit_code == 2
    assert "'max' is not one of layer_norm" in invoke("max").stderr


def test_explain_shows_the_source(timer):
    timer.seconds = faster_than(table_plan(), FASTER)
    invoke(*ONE)

    told = command_runner().invoke(
        cli.cli, ["explain", "softmax", "--shape", "6,40", "--dtype", "float32", "--json"]
    )

    assert json.loads(told.stdout)["source"] == "tuned"


def test_explain_shows_that_a_gradient_is_tuned(timer):
    timer.seconds = faster_than(table_plan(Point("rms_norm_backward", "float32", 6, 40)), FASTER)
    invoke("rms_norm_backward", *ONE[1:])

    told = command_runner().invoke(
        cli.cli, ["explain", "rms_norm_backward", "--shape", "6,40", "--dtype", "float32", "--json"]
    )

    assert json.loads(told.stdout)["source"] == "tuned"
    assert json.loads(told.stdout)["plan"]["variant"] == "block"
