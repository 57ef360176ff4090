"""The command line: what it prints, where, and the exit status."""

from __future__ import annotations

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm import cli
from cupynorm.catalog import forms, op_table
from cupynorm.plan import config
from cupynorm.runtime import devices, nvrtc
from cupynorm.tools import environment, files, testing
from cupynorm.tools.environment import Finding
from cupynorm.tools.testing import Result
from tests import command_runner


def invoke(*arguments, **options):
    return command_runner().invoke(cli.cli, [str(each) for each in arguments], **options)


def start(*arguments, program=("-m", "cupynorm"), stderr=subprocess.PIPE, cwd=None, env=None):
    """Run a Python of its own."""
    root = str(Path(cupynorm.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


@pytest.fixture
def no_device(monkeypatch):
    def none(*_):
        raise devices.NoDeviceError("there is none")

    for name in ("cupy", "present_device", "present_limits"):
        monkeypatch.setattr(devices, name, none)
    monkeypatch.setattr(environment, "is_gpu_wanted", lambda: True)


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=(64, 32)).astype("f4"))
    return tmp_path / "in.npy"


def test_help_names_every_command_and_what_the_exit_status_means():
    result = invoke("--help")

    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in ("info", "doctor", "selftest", "explain", "run"))
    assert "Exit status: 0 well" in result.stdout
    assert "..." not in result.stdout.partition("\n")[2]  # no summary is cut off


@pytest.mark.parametrize("name", list(cli.cli.commands))
def test_every_command_has_help(name):
    result = invoke(name, "--help")

    assert result.exit_code == 0
    assert all(
        option.help
        for option in cli.cli.commands[name].params
        if option.param_type_name == "option" and option.name != "device"
    )


def test_version():
    assert invoke("--version").stdout == f"cupynorm {cupynorm.__version__}\n"


@pytest.mark.parametrize("what", ["import cupynorm", "from cupynorm import cli; cli.main()"])
def test_neither_the_import_nor_help_imports_cupy(what):
    check = (
        "import atexit, sys; sys.argv = ['cupynorm', '--help']\n"
        "atexit.register(lambda: print([name for name in sys.modules if name.partition('.')[0] == 'cupy']))\n"
    )

    done = start(program=("-c", check + what))

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")


def test_a_cpu_machine_without_cupy_runs_files_and_selftest(source):
    without = "import sys; sys.modules['cupy'] = None; from cupynorm.cli import main; main()"

    done = start("run", "softmax", source, "-o", source.with_name("out.npy"), program=("-c", without))

    assert done.returncode == 0
    if environment.is_gpu_wanted():
        assert done.stderr.count("no usable GPU, so this ran on the CPU: CuPy is needed") == 1
    else:
        assert "GPU" not in done.stderr
    np.testing.assert_allclose(np.load(source.with_name("out.npy")).sum(1), 1, rtol=1e-6)


def test_info_prints_sections_or_json(monkeypatch):
    told = environment.info()
    told["devices"] = [{"number": 0, "name": "a device"}]
    monkeypatch.setattr(environment, "info", lambda: json.loads(json.dumps(told)))

    assert json.loads(invoke("info", "--json").stdout) == json.loads(json.dumps(told))
    text = invoke("info").stdout
    assert "device 0\n  name  a device\n" in text
    assert f"cupynorm     {cupynorm.__version__}" in text
    assert "h200, h100, a100, t4, rtx4090" in text


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


@pytest.mark.parametrize(
    ("environ", "color"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_colors_are_for_terminals_and_no_color_is_kept(monkeypatch, environ, color):
    monkeypatch.setattr(environment, "findings", lambda: iter([Finding("cache", "ok", "well")]))
    monkeypatch.delenv("NO_COLOR", raising=False)

    assert "\x1b[" not in invoke("doctor", env=environ).stdout
    assert ("\x1b[" in invoke("doctor", env=environ, color=True).stdout) is color


RESULTS = (
    Result("softmax", "warp", "float32", (29, 33), 2e-7, 1e-6, ok=True, note="odd"),
    Result("softmax", "warp", "float32", (29, 64), 3e-7, 1e-6, ok=True, note=""),
    Result("rms_norm", "shared", "float16", (7, 20000), math.inf, 1e-3, ok=False, note="boom"),
)


def test_selftest_prints_a_line_for_each_group_and_fails_on_a_fault(monkeypatch, no_device):
    asked = []
    monkeypatch.setattr(
        testing, "selftest", lambda *, cpu, quick, progress: asked.append((cpu, quick)) or iter(RESULTS)
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
    monkeypatch.setattr(testing, "selftest", lambda **_: iter(RESULTS[:2]))

    result = invoke("selftest", "--cpu")

    assert (result.exit_code, result.stderr) == (0, "")


def test_selftest_of_nothing_is_no_success(monkeypatch):
    monkeypatch.setattr(testing, "selftest", lambda **_: iter(()))

    assert invoke("selftest", "--cpu").exit_code == 1


def test_selftest_passes_on_the_cpu():
    done = start("selftest", "--cpu", "--json")

    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["faults"] == 0
    assert {each["op"] for each in told["results"]} == set(forms.FORMS)


def test_a_gpu_that_is_demanded_and_missing_is_status_3(no_device, source):
    for arguments in (
        ("selftest", "--gpu"),
        ("run", "softmax", source, "-o", source.with_name("out.npy"), "--device", "gpu"),
        ("run", "softmax", source, "-o", source.with_name("out.npy"), "--plan", "warp"),
        ("explain", "softmax", "--shape", "4,4", "--dtype", "float16"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stderr) == (3, "Error: there is none\n")


@pytest.fixture
def no_compiler(monkeypatch):
    """Recorded limits and bounds are enough for a plan, and a test of the command needs no compiler."""
    monkeypatch.setattr(nvrtc, "available", lambda: None)


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
    assert f"variant          {told['plan']['variant']}\n" in text
    assert told["kernel"] in text


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "Missing argument 'OP'"),
        (("explain", "soft", "--shape", "4", "--dtype", "float16"), "'soft' is not one of layer_norm"),
        (("explain", "softmax", "--dtype", "float16"), "--shape"),
        (("explain", "softmax", "--shape", "4x4", "--dtype", "float16"), "not a list of integers"),
        (("explain", "softmax", "--shape", "", "--dtype", "float16"), "not a list of integers"),
        (("explain", "softmax", "--shape", "4", "--dtype", "int8"), "int8"),
        (
            ("explain", "softmax", "--shape", "4", "--dtype", "float16", "--device", "tpu"),
            "'tpu' is not one of",
        ),
        (
            ("explain", "softmax", "--shape", "4", "--dtype", "float16", "--plan", "fast"),
            "'fast' is not one of",
        ),
        (("explain", "softmax", "--shape", "0,4", "--dtype", "float16", "--device", "t4"), "empty"),
        (("explain", "softmax", "--shape=-4,4", "--dtype", "float16", "--device", "t4"), "below 0"),
        (
            ("explain", "softmax", "--shape", "4,4", "--axis", "0", "--dtype", "float16", "--device", "t4"),
            "axis 0",
        ),
        (
            (
                "explain",
                "softmax",
                "--shape",
                "4,9999999",
                "--dtype",
                "float16",
                "--plan",
                "warp",
                "--device",
                "t4",
            ),
            "warp",
        ),
        (("completion", "csh"), "csh"),
        (("nonsense",), "nonsense"),
    ],
)
def test_wrong_usage_is_status_2(no_compiler, arguments, words):
    result = invoke(*arguments)

    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--axis", "0"), 2, "axis 0"),
        (("--eps", "0.1"), 2, "softmax takes no eps"),
        (("--eps", "small"), 2, "small"),
        (("--dtype", "int8"), 2, "int8"),
        (("--input-dtype", "bfloat16"), 2, "no raw two-byte elements"),
        (("--plan", "warp", "--device", "cpu"), 2, "plan"),
        (("--gamma", "in.npy"), 2, "softmax takes no gamma"),
        (("-o", "in.npy", "--force"), 4, "in.npy: is the input as well"),
        (("-o", "nowhere/out.npy"), 4, "nowhere/out.npy: No such file"),
        (("-o", "old.npy"), 4, "old.npy: exists already: --force replaces it"),
    ],
)
def test_run_says_what_is_wrong_in_one_line_and_leaves_nothing(source, monkeypatch, options, status, words):
    monkeypatch.chdir(source.parent)
    Path("old.npy").write_bytes(b"precious")

    result = invoke("run", "softmax", "in.npy", "-o", "out.npy", "--device", "cpu", *options)

    assert result.exit_code == status
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert sorted(path.name for path in Path().iterdir()) == ["in.npy", "old.npy"]
    assert Path("old.npy").read_bytes() == b"precious"


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"cos\nsystem\n(S'true'\ntR."])
def test_a_bad_input_is_status_4_in_a_real_process(tmp_path, content):
    if content is not None:
        (tmp_path / "in.npy").write_bytes(content)

    done = start("run", "softmax", "in.npy", "-o", "out.npy", cwd=tmp_path)

    assert done.returncode == 4
    assert done.stderr.startswith("Error: in.npy: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.npy").exists()


def test_run_reports_on_standard_error_and_json_on_standard_output(source, no_device):
    target = source.with_name("out.npy")

    text = invoke("run", "layer_norm", source, "-o", target, "--stats", "--dtype", "float16")
    assert (text.exit_code, text.stdout) == (0, "")
    assert "no usable GPU, so this ran on the CPU: there is none" in text.stderr
    assert "layer_norm: 64 x 32, float32 -> float16, on cpu: " in text.stderr
    assert (
        f"wrote {target}, {target.with_name('out.mean.npy')}, {target.with_name('out.rstd.npy')}"
        in text.stderr
    )

    told = invoke("run", "layer_norm", source, "-o", target, "--force", "--json")
    assert told.stderr == ""
    report = json.loads(told.stdout)
    assert (report["schema"], report["op"], report["device"], report["plan"]) == (
        1,
        "layer_norm",
        "cpu",
        None,
    )
    assert report["outputs"] == [str(target)]


def test_run_names_the_variant_of_a_device(source, monkeypatch):
    report = files.Report(
        "softmax", "a device", "", {"variant": "warp"}, 64, 32, "float32", "float32", ("o",), 9, 1.0
    )
    monkeypatch.setattr(files, "run", lambda *_, **__: report)

    assert "on a device, variant warp: 1.000 s" in invoke("run", "softmax", source, "-o", "o").stderr


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory"),
        (cupynorm.CompileError("row.cuh(3): error: no"), 1, "row.cuh(3): error: no"),
    ],
)
def test_other_ends_have_a_message_and_a_status(source, monkeypatch, error, status, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(files, "run", fail)

    result = invoke("run", "softmax", source, "-o", "out.npy")

    assert result.exit_code == status
    assert words in result.stderr


def test_what_nobody_expects_keeps_its_traceback(source, monkeypatch):
    monkeypatch.setattr(files, "run", lambda *_, **__: 1 / 0)

    assert isinstance(invoke("run", "softmax", source, "-o", "out.npy").exception, ZeroDivisionError)


BARS = {
    "softmax": "sys.argv = 'cupynorm run softmax in.npy -o out.npy --device cpu --force'.split()",
    "compare": "sys.argv = 'cupynorm selftest --cpu --quick'.split()",
}


@pytest.mark.parametrize("label", BARS)
def test_a_bar_moves_on_a_terminal_only(source, label):
    program = (
        "-c",
        f"import sys; from cupynorm import cli; from cupynorm.tools import testing; {BARS[label]}; cli.main()",
    )
    ours, theirs = pty.openpty()
    try:
        start(program=program, cwd=source.parent, stderr=theirs)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    plain = start(program=program, cwd=source.parent).stderr
    ours, theirs = pty.openpty()
    try:
        start(
            "-q",
            program=(program[0], program[1].replace("'cupynorm ", "'cupynorm -q ")),
            cwd=source.parent,
            stderr=theirs,
        )
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
    finally:
        os.close(ours)
        os.close(theirs)

    assert f"{label}  [" in shown
    assert "\r" in shown.replace("\r\n", "")
    assert "[" not in plain
    assert "\r" not in plain


@pytest.mark.parametrize("before", [True, False])
def test_quiet_leaves_results_and_errors_only(source, no_device, before):
    def quiet(name, *rest):
        return invoke(*(("-q", name) if before else (name,)), *rest, *(() if before else ("--quiet",)))

    done = quiet("run", "softmax", source, "-o", source.with_name("out.npy"))
    again = quiet("run", "softmax", source, "-o", source.with_name("out.npy"))
    tested = quiet("selftest", "--quick")

    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert again.exit_code == 4
    assert "exists already" in again.stderr
    assert (tested.exit_code, tested.stderr) == (0, "")
    assert tested.stdout.endswith("0 faults\n")


@pytest.mark.parametrize("name", [name for name in cli.cli.commands if name != "completion"])
def test_every_command_that_tells_something_has_quiet_and_json(name):
    text = invoke(name, "--help").stdout

    assert "-q, --quiet" in text
    assert "  --json " in text


@pytest.mark.parametrize(
    ("name", "label", "names"),
    [
        ("run", "op", [op.name for op in op_table.OPS]),
        ("explain", "op", list(forms.FORMS)),
        ("explain", "device", list(devices.RECORDED)),
        ("explain", "variant", config.VARIANTS),
        ("tune", "op", [op.name for op in op_table.OPS]),
        ("bench", "op", list(forms.FORMS)),
        ("bench", "peer", ["cupy", "torch", "compile", "triton"]),
    ],
)
def test_help_names_ops_devices_variants_and_peers(name, label, names):
    section = invoke(name, "--help").stdout.partition("\nNames:\n")[2]

    words = " ".join(section.split())
    assert ", ".join(names) in words
    assert f"  {label} " in section


def test_a_note_about_a_missing_gpu_comes_once_and_only_where_one_is_missed(source, no_device, monkeypatch):
    commands = (
        ("run", "softmax", source, "-o", source.with_name("out.npy"), "--force"),
        ("selftest", "--quick"),
    )
    for command in commands:
        assert invoke(*command).stderr.count("there is none") == 1
    monkeypatch.setattr(environment, "is_gpu_wanted", lambda: False)
    for command in commands:
        assert "there is none" not in invoke(*command).stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_says_what_to_put_where(shell):
    text = invoke("completion", shell).stdout

    assert f"_CUPYNORM_COMPLETE={shell}_source cupynorm" in text
    assert text.startswith("# put this line into ~/.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cupynorm run lay", ["layer_norm"]),
        ("cupynorm explain softmax --device h", ["h200", "h100"]),
        ("cupynorm sel", ["selftest"]),
    ],
)
def test_completion_knows_the_library(words, expected):
    done = start(
        env={
            "_CUPYNORM_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
    )

    assert [line.partition(",")[2] for line in done.stdout.split()] == expected


def test_main_leaves_signals_alone_that_somebody_handles(monkeypatch):
    import signal

    handled = []
    monkeypatch.setattr(cli, "cli", lambda **_: handled.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    assert handled == [signal.SIG_IGN]


# ---- how it ends


def shell(line, folder, **env):
    root = str(Path(cupynorm.__file__).parents[1])
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line.replace('cupynorm', f'{sys.executable} -m cupynorm')}"],
        env={**os.environ, "PYTHONPATH": root, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "line",
    [
        "cupynorm info --json > /dev/full",
        "cupynorm --version > /dev/full",
        "cupynorm run --help > /dev/full",
        "cupynorm run softmax in.npy -o out.npy --device cpu --json > /dev/full",
        "cupynorm run softmax in.npy -o - --device cpu > /dev/full",
        # from Python 3.13 on, or in development mode, what a file object still holds at its end is not lost silently
        "PYTHONDEVMODE=1 cupynorm run softmax in.npy -o - --device cpu > /dev/full",
    ],
)
def test_a_full_standard_output_is_status_4_and_one_line(source, line):
    done = shell(line, source.parent)

    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "line", ["cupynorm info | head -1", "cupynorm run softmax in.npy -o - --device cpu | head -c 10"]
)
def test_a_pipe_that_is_closed_ends_without_a_traceback(source, line):
    done = shell(line, source.parent)

    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.fixture
def as_any_user():
    """What stands before a command so that permissions hold for it, for root, too."""
    if os.geteuid() != 0:
        return ""
    if shutil.which("setpriv") is None:
        pytest.skip("root may read and write everything, and there is no setpriv that takes this from it")
    return "setpriv --bounding-set=-all --inh-caps=-all "


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("cupynorm run softmax secret -o out.npy --device cpu", "secret"),
        ("cupynorm run layer_norm in.npy --gamma secret -o out.npy --device cpu", "secret"),
        ("cupynorm run softmax in.npy -o closed/out.npy --device cpu", "closed/out.npy"),
        ("cupynorm bench --from secret", "secret"),
    ],
)
def test_a_file_that_may_not_be_read_or_written_is_status_4(source, as_any_user, line, names):
    source.with_name("secret").touch(0)
    source.with_name("closed").mkdir(0o500)

    done = shell(as_any_user + line, source.parent)

    assert (done.returncode, done.stderr) == (4, f"Error: {names}: Permission denied\n")


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("cupynorm run softmax missing.npy -o out.npy", 4, "missing.npy: No such file"),
        ("cupynorm run softmax in.npy -o nowhere/out.npy --device cpu", 4, "nowhere/out.npy: No such file"),
        ("cupynorm run softmax in.npy -o . --force --device cpu", 4, "is not a regular file"),
        (
            "cupynorm run softmax empty.npy -o out.npy --device cpu",
            4,
            "empty.npy: has shape (5, 0): its rows are empty",
        ),
        ("cupynorm bench --from in.npy", 4, "in.npy"),
        ("cupynorm run layer_norm in.npy -o out.npy --device cpu --eps -1", 2, "--eps: eps"),
        (f"cupynorm run layer_norm in.npy -o out.npy --device cpu --eps 1{'0' * 400}", 2, "--eps: eps"),
        ("cupynorm run layer_norm in.npy -o out.npy --device cpu --axis 5", 2, "--axis: axis"),
        (
            f"cupynorm run layer_norm in.npy -o out.npy --device cpu --axis 1{'0' * 400}",
            2,
            "--axis: axis an int of 1329 bits is out of range",
        ),
        (
            "cupynorm run softmax in.npy -o out.npy --device cpu --gamma in.npy",
            2,
            "Error: --gamma: softmax takes no",
        ),
        (
            "cupynorm run softmax in.npy -o out.npy --device cpu --eps 1",
            2,
            "Error: --eps: softmax takes no eps",
        ),
        ("cupynorm run softmax in.npy -o out.npy --device cpu --stats", 2, "Error: --stats: softmax has no"),
        (
            "cupynorm run softmax in.npy -o out.npy --device cpu --input-dtype bfloat16",
            2,
            "Error: --input-dtype: in.npy holds no raw two-byte elements",
        ),
        ("cupynorm run softmax in.npy -o - --json", 2, "Error: --output: - and --json both want"),
        ("cupynorm run layer_norm in.npy -o - --stats", 2, "Error: --stats: standard output (-) has no name"),
        (
            f"cupynorm explain softmax --shape 4,1{'0' * 400} --dtype float16 --device h200",
            2,
            "Error: --shape: shape (4, 1000000",
        ),
        (
            "cupynorm explain softmax --shape 99999999999,99999999999 --dtype float16 --device h200",
            2,
            "Error: --shape: shape (99999999999, 99999999999) of float16 has 2**63 bytes or more",
        ),
        (
            "cupynorm explain softmax/causal --shape 99999999999,99999999999 --dtype float16 --device h200",
            2,
            "Error: --shape: shape (99999999999, 99999999999) of float16 has 2**63 bytes or more",
        ),
        ("cupynorm bench --from nowhere.json", 4, "Error: nowhere.json: No such file or directory"),
        (
            "cupynorm run layer_norm in.npy -o out.npy --device cpu --gamma in.npy",
            2,
            "--gamma: gamma has shape",
        ),
        (
            "cupynorm explain softmax --shape 64,1000000 --dtype float16 --device h200 --plan warp",
            2,
            "--plan: variant",
        ),
        (
            "cupynorm run softmax in.npy -o out.npy --device cpu --dtype bfloat16",
            1,
            "needs the package ml_dtypes",
        ),
    ],
    ids=lambda each: str(each)[:60],
)
def test_each_end_has_its_status_and_names_file_or_option(source, line, status, words):
    np.save(source.parent / "empty.npy", np.empty((5, 0), "f4"))
    (source.parent / "ml_dtypes.py").write_text("raise ImportError('it is not installed')")

    done = shell(line, source.parent)

    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (source.parent / "out.npy").exists()
