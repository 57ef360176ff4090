"""A new process takes kernels and plans from disk, on a real device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cupynorm

PROCESS = """
import pathlib, cupy, numpy
x = cupy.asarray(numpy.random.default_rng(0).random((64, 1024)))  # copied: a kernel of CuPy would load NVRTC
import cupynorm
from cupynorm.runtime import compiler
from cupynorm.runtime import cubins
y = cupynorm.softmax(x).get()
held = list(compiler._kernels)
import sys
print("cupynorm.plan.choose" in sys.modules)
print("libnvrtc" in pathlib.Path("/proc/self/maps").read_text())
print(hash(y.sum()), y[0, :4], [each[1:3] for each in held], cubins.usage()[0] == len(held))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_process_loads_neither_planner_nor_compiler_and_gets_the_same(
    cuda: Any, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "CUPYNORM_CACHE_DIR": str(tmp_path),
        "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
    }

    said = [
        subprocess.run(
            [sys.executable, "-c", PROCESS],
            cwd=Path(cupynorm.__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]

    assert [each[:2] for each in said] == [
        ["True", "True"],
        ["False", "False"],
    ]  # the planner, and the compiler
    assert said[0][2] == said[1][2]
    assert said[1][2].endswith("True")
