"""`cupynorm run`. tests/tools/test_files.py tests the files, tests/bert/test_embedding.py tests `cupynorm embed`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupynorm.tools import environment, files
from tests.cli import invoke, start


def test_a_cpu_machine_without_cupy_runs_files_and_selftest(source):
    without = "import sys; sys.modules['cupy'] = None; from cupynorm.cli import main; main()"

    done = start("run", "softmax", source, "-o", source.with_name("out.npy"), program=("-c", without))

    assert done.returncode == 0
    if environment.is_gpu_wanted():
        assert done.stderr.count("no usable GPU, so this ran on the CPU: CuPy is needed") == 1
    else:
        assert "GPU" not in done.stderr
    np.testing.assert_allclose(np.load(source.with_name("out.npy")).sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--axis", "2"), 2, "axis 2"),
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
