"""The page that adds an op says the truth: its blocks are applied to a copy of the checkout, which tests the op."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupynorm.plan.planner import VARIANTS
from tests.simulator import build

CHECKOUT = Path(__file__).parents[1]
PAGE = CHECKOUT / "docs" / "adding-an-op.md"
# The self-test of the new op alone, on the simulator: three widths in place of all.
SELF_TEST = """
import json
import pytest
from tests import simulator
with pytest.MonkeyPatch.context() as monkeypatch:
    simulator.install(monkeypatch)
    from cupynorm.catalog import op_table
    from cupynorm.tools import testing
    monkeypatch.setattr(testing, "OPS", (op_table.op("l1_normalize"),))
    monkeypatch.setattr(testing, "QUICK", {1: "one", 1001: "odd", 2056: "more than a warp holds"})
    monkeypatch.setattr(testing.forms, "FORMS", {})
    monkeypatch.setattr(testing, "_processors", lambda: 1)
    results = list(testing.selftest())
print(json.dumps([[each.variant, each.dtype, each.shape[-1], each.ok, each.note] for each in results]))
"""


def apply(block: str, kind: str, checkout: Path) -> None:
    """Write a new file, or put a block's lines with a + before or between those that it quotes."""
    first, _, rest = block.partition("\n")
    name = re.match(r"(?://|#|\+\+\+) (\S+)$", first)
    assert name, f"a block does not say its file: {first}"
    file = checkout / name[1]
    if kind != "diff":
        assert not file.exists()
        file.write_text(rest)
        return
    lines = rest.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line.startswith(" "))
    new = "".join(line[1:] for line in lines)
    text = file.read_text("utf-8")
    assert text.count(old) == 1, f"{name[1]}: what is quoted stands there {text.count(old)} times"
    file.write_text(text.replace(old, new))


def run(*arguments: str, checkout: Path) -> str:
    """Run Python in a checkout and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(bool(build.why_not()), reason=f"the simulator: {build.why_not()}")
def test_the_page_leads_to_an_op_that_passes_its_self_test_in_every_variant(tmp_path: Path) -> None:
    for each in ("cupynorm", "kernels", "tests"):
        shutil.copytree(CHECKOUT / each, tmp_path / each, ignore=shutil.ignore_patterns("__pycache__"))
    for kind, block in re.findall(
        r"^```(cpp|python|diff)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        apply(block, kind, tmp_path)

    results = json.loads(run("-c", SELF_TEST, checkout=tmp_path).splitlines()[-1])
    assert [each for each in results if not each[3]] == []
    assert {variant for variant, *_ in results} == {*VARIANTS, "chosen"}
    assert {dtype for _, dtype, *_ in results} >= {"float16", "bfloat16", "float32", "float64"}
    shape = ("--shape", "49152,1024", "--dtype", "float16", "--device", "h200", "--json")
    explained = json.loads(run("-m", "cupynorm", "explain", "l1_normalize", *shape, checkout=tmp_path))
    assert explained["plan"]["variant"] in VARIANTS
    on_host = "import cupynorm, numpy; print(cupynorm.l1_normalize(numpy.array([[1.0, -3.0]])).tolist())"
    assert json.loads(run("-c", on_host, checkout=tmp_path)) == [[0.25, -0.75]]
