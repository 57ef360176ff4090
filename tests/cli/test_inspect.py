"""`cupynorm info`, `doctor`, `selftest` and `explain`."""

from __future__ import annotations

import json
import math
import re

import pytest

import cupynorm
from cupynorm.catalog import forms, op_table
from cupynorm.plan import config
from cupynorm.runtime import devices
from cupynorm.tools import environment, selftest
from cupynorm.tools.environment import Finding
from cupynorm.tools.selftest import Result
from tests.cli import invoke, start


def test_info_prints_sections_or_json(monkeypatch):
    told = environment.info()
    told["devices"] = [{"number": 0, "name": "a device"}]
    monkeypatch.setattr(environment, "info", lambda: json.loads(json.dumps(told)))

    assert json.loads(invoke("info", "--json").stdout) == json.loads(json.dumps(told))
    text = invoke("info").stdout
    assert "device 0\n  name  a device\n" in text
    assert f"cupynorm     {cupynorm.__version__}" in text
    assert ", ".join(devices.RECORDED) in text


def test_info_says_why_there_is_no_device(no_device):
    assert "none  there is none" in invoke("info").stdout


@pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("warning", 0), ("fault", 1)])
def test_doctor_fails_only_on_a_fault(monkeypatch, status, exit_code):
    found = [Finding("cache", "ok", "well"), Finding("driver", status, "it is so", "type this")]
    monkeypatch.setattr(environment, "findings", lambda: iter(found))

    text = invoke("doctor")
    assert text.exit_code == exit_code
    assert f"{status:<7}  driver: it is so\n         -> type this\n" in text.stdout

    told = invoke("doctor", "--json")
    assert told.exit_code == exit_code
    assert json.loads(told.stdout) == {
        "schema": 1,
        "faults": exit_code,
        "findings": [
            {"check": "cache", "status": "ok", "message": "well", "fix": ""},
            {"check": "driver", "status": status, "message": "it is so", "fix": "type this"},
        ],
    }


def test_doctor_runs_here():
    done = start("doctor", "--json")

    assert done.returncode in (0, 1)
    assert json.loads(done.stdout)["schema"] == 1
    assert "Traceback" not in done.stderr


RESULTS = (
    Result("softmax", "warp", "float32", (29, 33), 2e-7, 1e-6, ok=True, note="odd"),
    Result("softmax", "warp", "float32", (29, 64), 3e-7, 1e-6, ok=True, note=""),
    Result("rms_norm", "shared", "float16", (7, 20000), math.inf, 1e-3, ok=False, note="boom"),
)


def test_selftest_prints_a_line_for_each_group_and_fails_on_a_fault(monkeypatch, no_device):
    asked = []
    monkeypatch.setattr(
        selftest, "run", lambda *, cpu, quick, progress: asked.append((cpu, quick)) or iter(RESULTS)
    )

    text = invoke("selftest")
    invoke("selftest", "--quick")

    assert asked == [(True, False), (True, True)]
    assert text.exit_code == 1
    assert "no usable GPU, so this tests the CPU: there is none" in text.stderr
    _, softmax, rms_norm, fault, total = text.stdout.splitlines()
    assert " ".join(softmax.split()) == "ok softmax warp float32 2 3.00e-07 1.00e-06 29 x 64"
    assert " ".join(rms_norm.split()) == "fault rms_norm shared float16 1 inf 1.00e-03 7 x 20000"
    assert fault == "fault  rms_norm shared float16 (7, 20000): boom"
    assert total == "cpu: 3 cases, 1 faults"

    told = json.loads(invoke("selftest", "--json").stdout)
    assert (told["schema"], told["device"], told["cases"], told["faults"]) == (1, "cpu", 3, 1)
    assert told["results"][2]["error"] is None  # JSON has no infinity
    assert told["results"][0]["shape"] == [29, 33]


def test_selftest_says_nothing_of_a_gpu_if_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda **_: iter(RESULTS[:2]))

    result = invoke("selftest", "--cpu")

    assert (result.exit_code, result.stderr) == (0, "")


def test_selftest_of_nothing_is_no_success(monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda **_: iter(()))

    assert invoke("selftest", "--cpu").exit_code == 1


def test_selftest_passes_on_the_cpu():
    done = start("selftest", "--cpu", "--json")

    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["faults"] == 0
    assert {each["op"] for each in told["results"]} == set(forms.FORMS)


@pytest.mark.parametrize("device", list(devices.RECORDED))
@pytest.mark.parametrize("op", [op.name for op in op_table.OPS])
def test_explain_shows_the_plan_for_a_recorded_device(no_compiler, op, device):
    arguments = ("explain", op, "--shape", "49152,1024", "--dtype", "float16", "--device", device)

    told = json.loads(invoke(*arguments, "--json").stdout)
    assert told["schema"] == 1
    assert (told["op"], told["device"]) == (op, device)
    assert (told["problem"]["rows"], told["problem"]["cols"]) == (49152, 1024)
    assert told["plan"]["variant"] in config.VARIANTS
    assert told["bytes_moved"] >= 2 * 49152 * 1024 * 2

    text = invoke(*arguments).stdout
    assert re.search(rf"^  variant +{told['plan']['variant']}$", text, re.MULTILINE)
    assert told["kernel"] in text
    assert re.search(r"^  waves +[\d.]{1,6}$", text, re.MULTILINE)  # and not all digits of a double
    if told["without"] is not None:
        plan = told["without"]["plan"]
        said = f"  without it +{plan['variant']}, {plan['vectors']} vectors of {plan['vector']} in each of"
        assert re.search(said, text)


def test_explain_passes_its_options_on(no_compiler):
    told = json.loads(
        invoke(
            *("explain", "layer_norm", "--shape", "64,8,128", "--axis", "-2,-1", "--dtype", "float32"),
            *(
                "--out-dtype",
                "float16",
                "--gamma-dtype",
                "float64",
                "--plan",
                "uncached",
                "--device",
                "t4",
                "--json",
            ),
        ).stdout
    )

    assert told["problem"]["cols"] == 1024
    assert told["plan"]["variant"] == "uncached"
    assert told["bytes_moved"] == 64 * 1024 * (4 + 2) + 2 * 1024 * 8


SUM = ("explain", "add_layer_norm/sum", "--shape", "64,256", "--dtype", "float16", "--device", "h200")


def test_explain_leaves_out_a_bias_that_the_call_may_go_without(no_compiler):
    whole, told = (json.loads(invoke(*SUM, *more, "--json").stdout) for more in ((), ("--without", "bias")))

    assert whole["bytes_moved"] - told["bytes_moved"] == 256 * 2
    assert len(whole["problem"]["load_operands"]) == len(told["problem"]["load_operands"]) + 1


@pytest.mark.parametrize(("op", "name"), [("add_layer_norm", "gamma"), ("softmax", "x")])
def test_explain_refuses_to_leave_out_what_a_call_needs(no_compiler, op, name):
    result = invoke("explain", op, *SUM[2:], "--without", name)

    assert result.exit_code != 0
    assert f"{op} cannot go without '{name}'" in result.stderr


def test_explain_tells_of_a_problem_what_most_do_not_have(no_compiler):
    told, text = json.loads(invoke(*SUM, "--json").stdout), invoke(*SUM).stdout

    problem = re.search(r"^problem\n(.*?)^plan$", text, re.MULTILINE | re.DOTALL)[1]
    assert {"rows", "cols", "fused", "outputs"} <= {line.split()[0] for line in problem.splitlines()}
    assert told["problem"]["rounds"] is False
    assert "rounds" not in problem
