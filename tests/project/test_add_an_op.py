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
    r"(Create|At\s+the\s+end\s+of|Below\s+the\s+line\s+`([^`]+)`\s+of)\s+`([^`]+)`"
    r"(?:(?!\n\n).)*?:\n\n```\w+\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# the self-test of a device, of the new op alone and at three widths
ON_THE_SIMULATOR = """
import json
import pytest
from cupynorm.plan.config import VARIANTS
from tests import simulator
with pytest.MonkeyPatch.context() as monkeypatch:
    simulator.install(monkeypatch)
    from cupynorm.catalog import op_table
    from cupynorm.tools import selftest
    monkeypatch.setattr(selftest, "OPS", (op_table.op("l2_norm"),))
    monkeypatch.setattr(selftest, "QUICK", {1: "one", 1001: "odd", 2056: "more than a warp holds"})
    monkeypatch.setattr(selftest.forms, "FORMS", {})
    monkeypatch.setattr(selftest, "_processors", lambda: 1)
    results = list(selftest.run())
print(json.dumps([[each.variant, each.dtype, each.shape[-1], each.ok, each.note] for each in results]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout in which every step of the page has been taken."""
    folder = tmp_path_factory.mktemp("copy")
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("cupynorm", "kernels", "tests/simulator"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "tests/__init__.py"):
        shutil.copy(CHECKOUT / name, folder / name)
    for how, below, name, block in STEP.findall(TEXT):
        file = folder / name
        assert file.exists() == (how != "Create"), name
        text = file.read_text("utf-8") if file.exists() else ""
        line = " ".join(below.split())
        if line:
            assert text.count(f"{line}\n") == 1, line
            text = text.replace(f"{line}\n", f"{line}\n{block}")
        else:
            text = f"{text}\n\n{block}".lstrip("\n")
        file.write_text(text, "utf-8")
    return folder


def run(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "CUPYNORM_CACHE_DIR": str(copy / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_of_code_belongs_to_a_step() -> None:
    assert len(STEP.findall(TEXT)) == len(re.findall(r"^```(?:cuda|python)$", TEXT, re.MULTILINE)) >= 4


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
