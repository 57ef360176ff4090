"""Exit statuses, and the one line on standard error that explains them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm.tools import files
from tests import SLOW
from tests.cli import invoke, shell, start


def test_a_gpu_that_is_demanded_and_missing_is_status_3(no_device, source):
    for arguments in (
        ("selftest", "--gpu"),
        ("run", "softmax", source, "-o", source.with_name("out.npy"), "--device", "gpu"),
        ("run", "softmax", source, "-o", source.with_name("out.npy"), "--plan", "warp"),
        ("explain", "softmax", "--shape", "4,4", "--dtype", "float16"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stderr) == (3, "Error: there is none\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "Missing argument 'OP'"),
        (("explain", "soft", "--shape", "4", "--dtype", "float16"), "'soft' is not one of layer_norm"),
        (("explain", "softmax/causle", "--shape", "4", "--dtype", "float16"), "did you mean softmax/causal"),
        (("bench", "--ops", "layernorm"), "did you mean layer_norm"),
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
            ("explain", "softmax", "--shape", "4,4", "--axis", "2", "--dtype", "float16", "--device", "t4"),
            "axis 2",
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


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"cos\nsystem\n(S'true'\ntR."])
def test_a_bad_input_is_status_4_in_a_real_process(tmp_path, content):
    if content is not None:
        (tmp_path / "in.npy").write_bytes(content)

    done = start("run", "softmax", "in.npy", "-o", "out.npy", cwd=tmp_path)

    assert done.returncode == 4
    assert done.stderr.startswith("Error: in.npy: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.npy").exists()


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


# a line of bash, its exit status, and words on its standard error
ENDS = [
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
]
# One of each status ends a process of its own; all do with CUPYNORM_SLOW=1.
IN_A_PROCESS = {
    "cupynorm run softmax missing.npy -o out.npy",
    "cupynorm run layer_norm in.npy -o out.npy --device cpu --eps -1",
    "cupynorm run softmax in.npy -o out.npy --device cpu --dtype bfloat16",
}


@pytest.mark.parametrize(("line", "status", "words"), ENDS, ids=lambda each: str(each)[:60])
def test_each_end_has_its_status_and_names_file_or_option(source, monkeypatch, line, status, words):
    np.save(source.parent / "empty.npy", np.empty((5, 0), "f4"))
    if SLOW or line in IN_A_PROCESS:
        (source.parent / "ml_dtypes.py").write_text("raise ImportError('it is not installed')")
        done = shell(line, source.parent)
        code = done.returncode
        assert "Traceback" not in done.stderr
    else:  # a process takes half a second
        monkeypatch.chdir(source.parent)
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        done = invoke(*shlex.split(line)[1:])
        code = done.exit_code
        assert isinstance(done.exception, SystemExit)

    assert code == status, done.stderr
    assert words in done.stderr
    assert not (source.parent / "out.npy").exists()


def test_the_ends_that_a_process_comes_to_have_all_statuses():
    assert sorted(status for line, status, _ in ENDS if line in IN_A_PROCESS) == [1, 2, 4]
