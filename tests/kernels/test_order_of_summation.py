"""Plans that sum a row in the same order give it the same bits: rules for many and for few rows rest on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.catalog import op_table
from cupynorm.plan.config import AT_USE, CONVERTED, ONE_BLOCK_PER_ROW, PER_ROW, PLAIN, REGISTERS, SHARED, Plan
from tests.plan.test_properties import order_of_summation
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

ROWS = 21
HALVES = dataclasses.replace(PLAIN, vector=8, waves=ONE_BLOCK_PER_ROW)
FLOATS = dataclasses.replace(PLAIN, vector=4, waves=ONE_BLOCK_PER_ROW)


def launches(plan: Plan, *others: dict[str, Any]) -> list[Plan]:
    return [plan, *(dataclasses.replace(plan, **each) for each in others)]


CASES = {
    "rows of a group, parameters converted": (
        ("layer_norm", "float16", 64),
        launches(
            dataclasses.replace(HALVES, variant="warp", group=8, block=64, full=True, parameter_cache=AT_USE),
            {"parameter_cache": CONVERTED, "rows_per_group": 4},
            {"parameter_cache": PER_ROW, "rows_per_group": 2, "block": 128},
        ),
    ),
    "two rows of a group": (
        ("softmax", "float32", 128),
        launches(
            dataclasses.replace(FLOATS, variant="warp", vectors=2, group=16, block=128, full=True),
            {"rows_per_group": 2, "block": 64},
        ),
    ),
    "rows that no thread fills": (
        ("rms_norm", "float16", 1000),
        launches(
            dataclasses.replace(HALVES, variant="block", vectors=2, group=64, block=128),
            {"rows_per_group": 2, "parameter_cache": PER_ROW},
            {"block": 64, "parameter_cache": SHARED, "stages": 1},
        ),
    ),
    "unaligned rows": (
        ("layer_norm", "float16", 1001),
        launches(
            dataclasses.replace(HALVES, variant="warp", vectors=4, group=32, block=64, unaligned=1),
            {"parameter_cache": CONVERTED, "block": 512},
            {"parameter_cache": REGISTERS, "stages": 1, "block": 256},
        ),
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_plans_of_one_order_of_summation_give_the_same_bits(what: str, simulated: Any) -> None:
    (name, dtype, cols), plans = CASES[what]
    op, kind = op_table.op(name), dtype_of(dtype)
    random = np.random.default_rng(cols)
    x = simulated.cupy.asarray(random.normal(1, 2, (ROWS, cols)).astype(kind))
    parameters = {
        each: simulated.cupy.asarray(random.normal(0, 1, cols).astype(kind)) for each in op.row.columns
    }

    results = [op.function(x, **parameters, plan=plan) for plan in plans]

    assert len({order_of_summation(plan) for plan in plans}) == 1
    assert len({simulated.cupy.asnumpy(y).tobytes() for y in results}) == 1


def test_another_order_shows_in_the_bits(simulated: Any) -> None:
    random = np.random.default_rng(0)
    x = simulated.cupy.asarray(random.normal(1, 2, (ROWS, 64)).astype(np.float32))
    one = dataclasses.replace(FLOATS, variant="warp", vectors=2, group=8, block=64, full=True)
    other = dataclasses.replace(one, vectors=1, group=16)

    results = [cupynorm.layer_norm(x, plan=each) for each in (one, other)]

    assert order_of_summation(one) != order_of_summation(other)
    assert not np.array_equal(*map(simulated.cupy.asnumpy, results))
