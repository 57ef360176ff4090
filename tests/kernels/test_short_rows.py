"""Short rows whose elements lie apart, on the simulator: one thread has all elements of a row, or a few have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.plan.config import EVENLY, Plan
from tests import simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart

DIGITS = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12, "uint16": 2e-5, "uint8": 2e-5}
CALLS: dict[str, Any] = {
    "softmax": lambda x, **o: cupynorm.softmax(x, axis=1, **o),
    "layer_norm": lambda x, **o: cupynorm.layer_norm(x, *columns(x), axis=1, **o),
    "standardize": lambda x, **o: cupynorm.standardize(x, axis=1, **o),
    "moments": lambda x, **o: cupynorm.moments(x, axis=1, **o),
    "sigma_clip": lambda x, **o: cupynorm.sigma_clip(
        x, 1.5, 5, axis=1, centre="mean", return_stats=True, **o
    ),
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


def tiling(cols: int, vector: int, lanes: int, down: int, ctas: int = 1) -> Plan:
    return tiling_apart(vector, -(-cols // (down * ctas)), lanes, lanes * down, ctas)


def drawn(dtype: str, *shape: int) -> Any:
    rng = np.random.default_rng(sum(shape))
    if dtype.startswith("u"):
        return rng.integers(0, 200, shape).astype(dtype)
    return (rng.standard_normal(shape) + 1).astype(dtype_of(dtype))


def compare(name: str, x: Any, plan: Plan | None, digits: float, **options: Any) -> Plan:
    """Compare a call along the middle axis by a plan with that of the same numbers in float64."""
    given = {each: cupy.asarray(value) for each, value in options.items()}
    call = CALLS[name]
    with row_ops.observed() as plans:
        found = call(cupy.asarray(x), plan=plan, **given)
    wanted = call(x.astype(np.float64), **options)
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
    for got, right in pairs:
        if right is not None:
            numbers = cupy.asnumpy(got).astype(np.float64)
            np.testing.assert_allclose(numbers, right, rtol=digits, atol=digits * 10)
    return plans[-1]


# neighbouring rows of a thread, threads side by side, and threads of a block that share a row; columns; blocks
TILINGS = {
    "one row, whole": (1, 128, 1, 5, 1),
    "two rows, whole": (2, 64, 1, 10, 1),
    "vectors of 16 bytes": (4, 256, 1, 3, 1),
    "two columns": (2, 128, 1, 2, 1),
    "two threads of a warp": (2, 16, 2, 21, 1),
    "two warps": (2, 32, 2, 30, 1),
    "two times two warps": (1, 64, 2, 9, 1),
    "of a cluster": (1, 64, 4, 43, 2),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", TILINGS)
def test_one_thread_has_whole_rows_or_few_share_them(name: str, call: str) -> None:
    vector, lanes, down, cols, ctas = TILINGS[name]
    inner = lanes * vector + 4 * vector  # some warps have rows for a part of their threads, or for none
    plan = tiling(cols, vector, lanes, down, ctas)
    for dtype in ("float32", "uint16") if call in {"moments", "standardize", "sigma_clip"} else ("float16",):
        x = drawn(dtype, 2, cols, inner)
        if call == "sigma_clip" and lanes > 32 and down > 1:
            continue  # refused: tests/plan/test_forced_numbers.py
        taken = compare(call, x, plan, DIGITS[dtype])
        assert (taken.waits, taken.grid) == (EVENLY, ctas * -(-2 * inner // (vector * lanes)))


# kinds of rows that have tilings of their own: columns, neighbours, and threads side by side and down that are expected
@pytest.mark.parametrize(
    ("call", "dtype", "cols", "inner", "lanes", "down"),
    [
        (
            "standardize",
            "float16",
            29,
            36,
            128,
            1,
        ),  # two numbers in a register, in parts that end behind the row
        ("softmax", "float16", 21, 24, 128, 1),
        ("softmax", "float32", 10, 9, 256, 1),
        ("moments", "uint16", 50, 68, 32, 2),
        ("moments", "float16", 40, 66, 32, 2),
        ("standardize", "float16", 100, 66, 32, 4),
        ("standardize", "float32", 70, 65, 128, 4),
        ("moments", "float32", 150, 33, 64, 8),
        ("sigma_clip", "float32", 100, 66, 32, 4),
        ("sigma_clip", "uint16", 120, 66, 8, 4),
    ],
)
def test_the_tilings_that_are_chosen(
    call: str, dtype: str, cols: int, inner: int, lanes: int, down: int
) -> None:
    taken = compare(call, drawn(dtype, 3, cols, inner), None, DIGITS[dtype])

    assert (taken.across, taken.group) == (lanes, down)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cols", [7, 30, 50])
def test_masks(cols: int, dtype: str) -> None:
    x = drawn(dtype, 2, cols, 72)
    where = np.random.default_rng(cols).random(x.shape) < 0.7
    where[0, :, 0] = False
    where[1, 0] = where[0, 0, 1:] = True
    for call in ("standardize", "softmax"):
        found = CALLS[call](cupy.asarray(x), where=cupy.asarray(where))
        wanted = CALLS[call](x.astype(np.float64), where=where)
        digits = DIGITS[dtype]
        np.testing.assert_allclose(cupy.asnumpy(found).astype(np.float64), wanted, rtol=digits, atol=digits)
