"""Colours, progress bars, notes, and --quiet."""

from __future__ import annotations

import os
import pty

import pytest

from cupynorm.tools import environment
from cupynorm.tools.environment import Finding
from tests.cli import invoke, start


@pytest.mark.parametrize(
    ("environ", "color"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_colors_are_for_terminals_and_no_color_is_kept(monkeypatch, environ, color):
    monkeypatch.setattr(environment, "findings", lambda: iter([Finding("cache", "ok", "well")]))
    monkeypatch.delenv("NO_COLOR", raising=False)

    assert "\x1b[" not in invoke("doctor", env=environ).stdout
    assert ("\x1b[" in invoke("doctor", env=environ, color=True).stdout) is color


BARS = {
    "softmax": "sys.argv = 'cupynorm run softmax in.npy -o out.npy --device cpu --force'.split()",
    "compare": "sys.argv = 'cupynorm selftest --cpu --quick'.split()",
}


@pytest.mark.parametrize("label", BARS)
def test_a_bar_moves_on_a_terminal_only(source, label):
    program = (
        "-c",
        f"import sys; from cupynorm import cli; {BARS[label]}; cli.main()",
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
