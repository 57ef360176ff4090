"""How many threads of a block merge what its warps, and a cluster's blocks, know of rows apart, on the simulator."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from cupynorm.invoke import row_ops
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.plan.config import DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from tests import simulator
from tests.kernels.test_across import DIGITS, drawn, expected, run
from tests.simulator import simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a device that holds 16 blocks at once."""
    small = dataclasses.replace(RECORDED["h200"], sm_count=16, blocks_per_sm=1)
    monkeypatch.setitem(RECORDED, "small", small)
    simulator.install(monkeypatch, "small")
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    row_ops.forget()


def held(cols: int, vector: int, lanes: int, block: int, ctas: int) -> Plan:
    group = block // lanes
    return tiling_apart(vector, math.ceil(math.ceil(cols / ctas) / group), lanes, block, ctas)


# one thread for each row or for many, some for each, and as many as there are warps or blocks; whole rounds of columns
# (128), and blocks of a cluster without a column (45)
@pytest.mark.parametrize("cols", [128, 45])
@pytest.mark.parametrize(
    ("vector", "lanes", "block", "ctas"),
    [
        (4, 32, 64, 4),
        (4, 32, 128, 1),
        (4, 16, 128, 2),
        (4, 16, 128, 8),
        (4, 8, 256, 1),
        (2, 4, 64, 16),
        (4, 4, 32, 4),
    ],
)
def test_rows_are_whole(vector: int, lanes: int, block: int, ctas: int, cols: int) -> None:
    host = drawn((2, cols, vector * lanes * 2 + 4), "float16")
    for op in (LAYER_NORM, SOFTMAX):
        found, plan = run(op, host, held(cols, vector, lanes, block, ctas))
        assert plan.kernel == "row_across"
        digits = DIGITS["float16"]
        np.testing.assert_allclose(found, expected(op, host), rtol=4 * digits, atol=digits)


def test_rows_of_16_bits_wait_two_in_a_register() -> None:
    found, plan = run(SOFTMAX, drawn((1, 250, 96), "float16"), held(250, 4, 4, 32, 1))
    assert plan.vector * plan.vectors == 128
    np.testing.assert_allclose(found, expected(SOFTMAX, drawn((1, 250, 96), "float16")), rtol=8e-3, atol=2e-3)
    with pytest.raises(DoesNotFitError, match="64 elements"):
        run(SOFTMAX, drawn((1, 250, 96), "float32"), held(250, 4, 4, 32, 1))
