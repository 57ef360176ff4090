"""Another stream writes to the `out` of a `split` call, over the messages between its blocks: no kernel may hang.

Each case runs in a process of its own: where x itself is `out` the kernel may have to stop, which destroys the context.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SECONDS = 120  # of which a wait that is given up takes one or a few
CODE = """
import sys, time
import cupy
import numpy as np
import cupynorm

case = sys.argv[1]
shape, plan, dtype = ((1, 1 << 20), None, np.float16) if case == "many blocks" else ((3, 16384), "split", np.float32)
x = cupy.asarray(np.random.default_rng(0).standard_normal(shape).astype(dtype))
out = x if case == "in place" else cupy.empty_like(x)
wanted = cupynorm.softmax(x, plan=plan)
one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
graphs = []
for stream in (one, two):
    with stream:
        cupynorm.softmax(x, out=out, plan=plan)
    stream.synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(50):
            cupynorm.softmax(x, out=out, plan=plan)
        graphs.append(stream.end_capture())
cupy.cuda.Device().synchronize()
end = time.time() + 4
while time.time() < end:
    for _ in range(20):
        if case == "two graphs":
            graphs[0].launch(one)
            graphs[1].launch(two)
            continue
        with one:
            cupynorm.softmax(x, out=out, plan=plan)
        with two:
            if case in ("a fill", "in place"):
                out.fill(0)
            else:
                cupynorm.softmax(x, out=out, plan=plan)
    cupy.cuda.Device().synchronize()
if case in ("the same call", "two graphs", "many blocks"):
    # what was read again was added up in another order
    cupy.testing.assert_allclose(out, wanted, rtol=1e-3 if dtype == np.float16 else 1e-5)
"""


def run(case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, case], capture_output=True, text=True, check=False, timeout=SECONDS
    )


@pytest.mark.parametrize("case", ["the same call", "two graphs", "a fill", "many blocks"])
def test_a_second_writer_does_no_harm_where_x_is_not_out(cuda: Any, case: str) -> None:
    done = run(case)

    assert done.returncode == 0, done.stderr


def test_a_second_writer_where_x_itself_is_out_at_most_stops_the_call_and_is_named(cuda: Any) -> None:
    done = run("in place")

    stopped = (
        "cudaErrorLaunchFailure" in done.stderr or "CUDA_ERROR_LAUNCH_FAILED" in done.stderr
    )  # CuPy's, or a launch's
    named = "something else wrote to it before the call had finished" in done.stderr
    assert done.returncode == 0 or (stopped and (named or "launch_error" not in done.stderr)), done.stderr
