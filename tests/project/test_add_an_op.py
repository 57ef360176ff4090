"""docs/add-an-op.md: its steps, done in a copy of the package, give an op that passes the self-test and compiles."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupynorm.plan.config import VARIANTS
from tests import simulator

CHECKOUT = Path(__file__).parents[2]
TEXT = (CHECKOUT / "docs" / "add-an-op.md").read_text("utf-8")
STEP = re.compile(
    r"(?P<how>Create|At\s+the\s+end\s+of"
    r"|(?:Above|Below|In\s+place\s+of)\s+the\s+line\s+(?P<tick>``?) ?(?P<line>.+?) ?(?P=tick)\s+of)"
    r"\s+`(?P<file>[^`]+)`(?:(?!\n\n).)*?:\n\n(?P<fence>```+)\w+\n(?P<block>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
STEPS = [*STEP.finditer(TEXT)]
# the self-test of a device, of the new op alone and at three widths; at first to see which kernels it needs, so that
# they are compiled together
ON_THE_SIMULATOR = """
import json
import pytest
from cupynorm.plan.config import VARIANTS
from tests import simulator
from tests.simulator import build
def run():
    simulator.install(monkeypatch)
    from cupynorm.catalog import op_table
    from cupynorm.tools import selftest
    monkeypatch.setattr(selftest, "OPS", (op_table.op("l2_norm"),))
    monkeypatch.setattr(selftest, "QUICK", {1: "one", 1001: "odd", 2056: "more than a warp holds"})
    monkeypatch.setattr(selftest.forms, "FORMS", {})
    monkeypatch.setattr(selftest, "_processors", lambda: 1)
    return list(selftest.run())
with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(build, "rehearsed", [])
    run()
    wanted = build.rehearsed
build.together(wanted)
with pytest.MonkeyPatch.context() as monkeypatch:
    results = run()
print(json.dumps([[each.variant, each.dtype, each.shape[-1], each.ok, each.note] for each in results]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout in which every step of the page has been taken."""
    folder = tmp_path_factory.mktemp("copy")
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("benchmarks", "cupynorm", "docs", "kernels", "scripts", "tests"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", *(page.name for page in CHECKOUT.glob("*.md"))):
        shutil.copy(CHECKOUT / name, folder / name)
    for step in STEPS:
        take(step, folder / step["file"])
    return folder


def take(step: re.Match[str], file: Path) -> None:
    """Change a file as a step of the page says."""
    how, block = " ".join(step["how"].split()), step["block"]
    assert file.exists() == (how != "Create"), file
    lines = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
    if step["line"] is None:
        lines += ["\n", "\n", block] if lines else [block]
    else:
        places = [i for i, line in enumerate(lines) if line.strip() == " ".join(step["line"].split())]
        assert len(places) == 1 or "__all__" in TEXT[step.start() : step.start("block")]
        at = places[0]  # __all__ comes before other lists of names
        lines[at : at + 1] = {
            "Above": [block, "\n\n" * (file.suffix == ".py"), lines[at]],
            "Below": [lines[at], block],
            "In": [block],
        }[how.split()[0]]
    file.write_text("".join(lines), "utf-8")


def run(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "CUPYNORM_CACHE_DIR": str(copy / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_of_code_belongs_to_a_step() -> None:
    outside = re.sub(r"^````\w+\n.*?^````$", "```text", TEXT, flags=re.MULTILINE | re.DOTALL)

    assert len(STEPS) == len(re.findall(r"^```(?:cuda|python|text)$", outside, re.MULTILINE)) >= 4


def test_formatter_linter_and_types_are_content(copy: Path) -> None:
    changed = sorted({step["file"] for step in STEPS if step["file"].endswith(".py")})

    run(copy, "-m", "ruff", "format", "--check", *changed)
    run(copy, "-m", "ruff", "check", *changed)
    run(copy, "-m", "mypy", *changed)


def test_the_tests_that_look_at_every_op_pass(copy: Path) -> None:
    files = [
        f"tests/project/test_{name}.py" for name in ("docs", "docstrings", "exports", "readme", "typing")
    ]

    files += ["tests/ops/test_fusion.py", "tests/catalog/test_op_table.py"]

    # examples and commands of other pages run here already
    run(
        copy,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not command_runs and not results_of",
        *files,
    )


def test_the_self_test_passes(copy: Path) -> None:
    (line,) = re.findall(r"^cupynorm (selftest .*)$", TEXT, re.MULTILINE)

    found = json.loads(run(copy, "-m", "cupynorm", *shlex.split(line), "--json"))

    assert found["faults"] == 0
    assert any(each["op"] == "l2_norm" for each in found["results"])


def test_its_kernel_compiles_without_a_spill(copy: Path) -> None:
    (line,) = re.findall(r"^cupynorm (explain .*)$", TEXT, re.MULTILINE)

    found = json.loads(run(copy, "-m", "cupynorm", *shlex.split(line), "--json"))

    assert "L2Norm<float>" in found["kernel"]
    if found["registers"] is None:
        pytest.skip("NVRTC, which compiles it, is not installed")
    assert 0 < found["registers"] <= 128


def test_every_variant_passes_the_self_test_of_a_device(copy: Path) -> None:
    simulator.skip_if_missing()

    results = json.loads(run(copy, "-c", ON_THE_SIMULATOR).splitlines()[-1])

    assert [each for each in results if not each[3]] == []
    assert {variant for variant, *_ in results} == {*VARIANTS, "chosen"}
    assert {dtype for _, dtype, *_ in results} >= {"float16", "bfloat16", "float32", "float64"}
