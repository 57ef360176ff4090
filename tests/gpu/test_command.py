"""The command on a device: the self-test with empty caches in its time; CuPy's functions as a peer of the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cupynorm
from cupynorm.catalog import forms
from cupynorm.tools import bench
from cupynorm.tools.results import Point

ENOUGH_PROCESSORS = 12  # for the times that the self-test is to keep


@pytest.mark.slow
@pytest.mark.parametrize(("options", "seconds"), [((), 20), (("--quick",), 5)], ids=["whole", "quick"])
def test_the_self_test_keeps_its_time_with_empty_caches(
    cuda: Any, tmp_path: Path, options: tuple[str, ...], seconds: float
) -> None:
    del cuda
    environment = {
        **os.environ,
        "CUPYNORM_CACHE_DIR": str(tmp_path),
        "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
    }
    environment["PYTHONPATH"] = str(Path(cupynorm.__file__).parents[1])

    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "cupynorm", "selftest", "--gpu", "--json", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - begin

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    told = json.loads(done.stdout)
    assert told["faults"] == 0
    assert {each["op"] for each in told["results"]} == set(forms.FORMS)
    assert any((tmp_path / "cubins").iterdir())  # they were compiled, and kept
    if len(os.sched_getaffinity(0)) >= ENOUGH_PROCESSORS:
        assert took < seconds


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cupys_own_functions_are_a_peer(cuda: Any, op: str, dtype: str) -> None:
    del cuda

    found = bench.measure(Point(op, dtype, 4096, 1024), ["cupy"], replays=5)

    # CuPy's log_softmax looks at numbers on the host, which no graph can hold
    assert [*found.notes] == (["cupy"] if op == "log_softmax" else [])
    assert 0 < found.share("cupy") < found.share()
