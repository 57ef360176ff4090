"""Short rows whose elements lie apart, on the simulator: one thread has all elements of a row, or a few threads have."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.plan.config import EVENLY, IN_REGISTERS, PLAIN, Plan
from tests import simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

DIGITS = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12, "uint16": 2e-5, "uint8": 2e-5}
CALLS = {
    "softmax": lambda x, **o: cupynorm.softmax(x, axis=1, **o),
    "layer_norm": lambda x, **o: cupynorm.layer_norm(x, *columns(x), axis=1, **o),
    "standardize": lambda x, **o: cupynorm.standardize(x, axis=1, **o),
    "moments": lambda x, **o: cupynorm.moments(x, axis=1, **o),
    "sigma_clip": lambda x, **o: cupynorm.sigma_clip(x, 1.5, 5, axis=1, centre="mean", return_stats=True, **o),
}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def columns(x: Any) -> tuple[Any, Any]:
    """Return gamma and beta of rows along the middle axis, where x is."""
    given = np.linspace(0.5, 2, x.shape[1]).astype(np.float32)
    each = cupy.asarray(given) if isinstance(x, cupy.ndarray) else given
    return each, each


def tiling(cols: int, vector: int, lanes: int, down: int) -> Plan:
    return dataclasses.replace(
        PLAIN,
        variant="block",
        vector=vector,
        vectors=-(-cols // down),
        group=down,
        across=lanes,
        block=lanes * down,
        waits=IN_REGISTERS,
    )


def drawn(dtype: str, *shape: int) -> Any:
    rng = np.random.default_rng(sum(shape))
    if dtype.startswith("u"):
        return rng.integers(0, 200, shape).astype(dtype)
    return (rng.standard_normal(shape) + 1).astype(dtype_of(dtype))


def compare(name: str, x: Any, plan: Plan, digits: float, **options: Any) -> Plan:
    """Compare a call along the middle axis by a forced plan with that of the same numbers in float64."""
    given = {each: cupy.asarray(value) for each, value in options.items()}
    call: Any = CALLS[name]
    with row_ops.observed() as plans:
        found = call(cupy.asarray(x), plan=plan, **given)
    wanted = call(x.astype(np.float64), **options)
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
    for got, right in pairs:
        if right is not None:
            numbers = cupy.asnumpy(got).astype(np.float64)
            np.testing.assert_allclose(numbers, right, rtol=digits, atol=digits * 10)
    return plans[-1]


# neighbouring rows of a thread, threads side by side, and threads that share a row; columns
TILINGS = {
    "one row, whole": (1, 128, 1, 5),
    "two rows, whole": (2, 64, 1, 10),
    "vectors of 16 bytes": (4, 256, 1, 3),
    "two columns": (2, 128, 1, 2),
    "two threads of a warp": (2, 16, 2, 21),
    "two warps": (2, 32, 2, 30),
    "two times two warps": (1, 64, 2, 9),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", TILINGS)
def test_one_thread_has_whole_rows_or_few_share_them(name: str, call: str) -> None:
    vector, lanes, down, cols = TILINGS[name]
    inner = lanes * vector + 4 * vector  # some warps have rows for a part of their threads, or for none
    plan = tiling(cols, vector, lanes, down)
    for dtype in ("float32", "uint16") if call in {"moments", "standardize", "sigma_clip"} else ("float16",):
        x = drawn(dtype, 2, cols, inner)
        if call == "sigma_clip" and lanes > 32 and down > 1:
            continue  # refused: tests/plan/test_forced_numbers.py
        taken = compare(call, x, plan, DIGITS[dtype])
        assert (taken.waits, taken.grid) == (EVENLY, -(-2 * inner // (vector * lanes)))
