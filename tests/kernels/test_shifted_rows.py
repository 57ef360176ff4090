"""Rows apart whose neighbours are odd in number, two of a thread, on the simulator: against float64 of NumPy arrays."""

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

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}
# columns, elements of a thread, threads side by side, threads of a block, blocks of a row (0: of the grid)
TILINGS = {
    "a block": (29, (8, 32, 128, 1)),
    "a cluster": (40, (5, 32, 128, 2)),
    "two warps side by side": (9, (5, 64, 128, 1)),
    "the grid": (45, (4, 32, 128, 0)),
    "full": (32, (8, 32, 128, 1)),
}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def tiling(cols: int, numbers: tuple[int, ...]) -> Plan:
    elements, lanes, block, ctas = numbers
    group = block // lanes
    variant = "split" if ctas == 0 else ""
    ctas = ctas or -(-cols // (elements * group))
    return tiling_apart(2, -(-(-(-cols // ctas)) // group), lanes, block, ctas, variant=variant)


def on_device(each: Any) -> Any:
    return cupy.asarray(each) if isinstance(each, np.ndarray) else each


def exact(each: Any) -> Any:
    return each.astype(np.float64) if isinstance(each, np.ndarray) and each.dtype.kind in "fV" else each


def check(found: Any, wanted: Any, dtype: str) -> None:
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
    for got, right in pairs:
        scale = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0)))
        np.testing.assert_allclose(
            cupy.asnumpy(got).astype(np.float64), right, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale
        )


def compare(call: Any, arrays: tuple[Any, ...], dtype: str, name: str, **options: Any) -> None:
    """Compare a call along the middle axis, by a plan of two rows a thread, with that of float64."""
    plan = tiling(*TILINGS[name])
    with row_ops.observed() as plans:
        given = {key: on_device(each) for key, each in options.items()}
        found = call(*map(on_device, arrays), axis=1, plan=plan, **given)
    assert [(each.vector, each.waits) for each in plans] == [(2, EVENLY)], plans
    wanted = call(*map(exact, arrays), axis=1, **{key: exact(each) for key, each in options.items()})
    check(found, wanted, dtype)


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    x = np.random.default_rng(seed + sum(shape)).standard_normal(shape) + 1
    return (x * 20 + 100).astype(dtype) if dtype == "uint8" else x.astype(dtype_of(dtype))


@pytest.mark.parametrize("inner", [3, 63, 65, 129, 191])
@pytest.mark.parametrize("name", TILINGS)
def test_odd_neighbours(name: str, inner: int) -> None:
    """Fewer than a tile has, as many, more; an odd number of columns and of outer indices."""
    x = drawn((3, TILINGS[name][0], inner), "float16")
    compare(cupynorm.softmax, (x,), "float16", name)
    compare(cupynorm.layer_norm, (x,), "float16", name)


def mask_of(x: Any) -> Any:
    kept = np.random.default_rng(7).random(x.shape) < 0.6
    kept[0, :, 0] = False
    kept[0, :, 1] = True
    kept[1, :-1, 2] = False
    return kept


scaled_and_added = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * 0.5 + t)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["a block", "a cluster", "the grid"])
def test_forms(name: str, dtype: str) -> None:
    cols, _ = TILINGS[name]
    shape = (3, cols, 65)
    x, other = drawn(shape, dtype), drawn(shape, dtype, 1)
    gamma = np.linspace(0.5, 2, cols).astype(np.float32)
    lengths = np.random.default_rng(7).integers(0, cols + 1, (3, 65)).astype(np.int32)
    compare(cupynorm.softmax, (x,), dtype, name, where=mask_of(x))
    compare(cupynorm.standardize, (x,), dtype, name, where=mask_of(x))
    compare(cupynorm.layer_norm, (x, gamma, gamma), dtype, name, where=mask_of(x))
    compare(cupynorm.log_softmax, (x,), dtype, name, lengths=np.maximum(lengths, 1))
    compare(cupynorm.moments, (x,), dtype, name)
    compare(cupynorm.logsumexp, (x,), dtype, name)
    compare(cupynorm.softmax_backward, (other, x), dtype, name)
    compare(cupynorm.add_layer_norm, (x, other, gamma, gamma), dtype, name)
    compare(scaled_and_added, (x, other), dtype, name)


# an array of x's shape that lies otherwise: the address of its first element, its columns, its outer indices
@pytest.mark.parametrize("name", ["a block", "the grid", "nowhere"])
def test_what_lies_otherwise_is_loaded_one_by_one(name: str) -> None:
    pass


def test_integers() -> None:
    pass
