"""Rows apart whose neighbours are odd in number, two of a thread, on the simulator: against float64 of NumPy arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.lower.row import RowOp
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.plan.choose import choose
from cupynorm.plan.config import EVENLY, IN_REGISTERS, NOWHERE, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.variants.tiles import tiles_of
from tests import simulator
from tests.kernels.test_across import spec_of
from tests.simulator import cupy, simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}
# columns, elements of a thread, threads side by side, threads of a block, blocks of a row
TILINGS = {
    "a block": (29, (8, 32, 128, 1)),
    "a cluster": (40, (5, 32, 128, 2)),
    "two warps side by side": (9, (5, 64, 128, 1)),
    "full": (32, (8, 32, 128, 1)),
}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def tiling(cols: int, numbers: tuple[int, ...]) -> Plan:
    _, lanes, block, ctas = numbers
    group = block // lanes
    return tiling_apart(2, math.ceil(math.ceil(cols / ctas) / group), lanes, block, ctas)


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
@pytest.mark.parametrize("name", ["a block", "a cluster"])
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


def placed(host: Any, offset: int = 0, gap: int = 0, sign: int = 1) -> Any:
    """Return an array on the device: `offset` elements from an aligned place, `gap` between columns, or backwards."""
    *outer, cols, inner = host.shape
    room = cupy.empty(host.size + gap * host.size // inner + offset, host.dtype)
    found = room[offset:].reshape((*outer, cols, inner + gap))[..., :inner][:, ::sign]
    found[...] = cupy.asarray(host)
    return found


# of x, of the result and of a mask; whether two rows of x and of the result are then aligned together
@pytest.mark.parametrize("name", ["a block", "a cluster", "nowhere"])
@pytest.mark.parametrize(
    ("x_at", "y_at", "mask_at", "inner", "two"),
    [
        ({"offset": 1}, {"offset": 1}, {}, 65, True),
        ({"offset": 1}, {"offset": 3}, {"offset": 1}, 66, True),
        ({"gap": 2}, {"gap": 4}, {"gap": 1}, 65, True),
        ({"sign": -1}, {"gap": 2}, {"sign": -1}, 65, True),
        ({"offset": 1}, {}, {"offset": 1}, 65, False),
        ({"gap": 1}, {}, {}, 65, False),
    ],
    ids=str,
)
def test_arrays_that_lie_otherwise(
    name: str, x_at: dict[str, int], y_at: dict[str, int], mask_at: dict[str, int], inner: int, two: bool
) -> None:
    """Where x and the result differ a thread has one row; where another array does, its elements come one by one."""
    cols = 29
    shape = (2, cols, inner)
    x, other, kept = drawn(shape, "float16"), drawn(shape, "float16", 1), mask_of(drawn(shape, "float16"))
    y = placed(np.zeros(shape, np.float16), **y_at)
    if name == "nowhere":
        plan = tiling_apart(2 if two else 1, 3, 32, 128, variant="uncached", waits=NOWHERE)
    else:
        plan = tiling(*TILINGS[name])
        plan = plan if two else dataclasses.replace(plan, vector=1)
    given = placed(x, **x_at)
    check(
        cupynorm.softmax(given, where=placed(kept, **mask_at), axis=1, plan=plan, out=y),
        cupynorm.softmax(exact(x), where=kept, axis=1),
        "float16",
    )
    found = scaled_and_added(given, placed(other, **mask_at), axis=1, plan=plan, out=y)
    check(found, scaled_and_added(exact(x), exact(other), axis=1), "float16")
    if two:
        with pytest.raises(DoesNotFitError):
            cupynorm.softmax(given, axis=1, plan=plan, out=placed(x, offset=1 - x_at.get("offset", 0) % 2))
        found = cupynorm.standardize(given, axis=1, plan=plan, out=given)  # in place
        check(found, cupynorm.standardize(exact(x), axis=1), "float16")


# blocks of a row, threads side by side, threads of a block, neighbours; more elements than there are where rows wait
@pytest.mark.parametrize(
    ("variant", "ctas", "lanes", "block", "inner"),
    [
        ("uncached", 1, 32, 128, 65),
        ("cluster", 3, 32, 128, 65),
        ("uncached", 1, 64, 256, 129),
        ("block", 1, 32, 128, 65),
    ],
)
def test_rows_of_which_something_is_asked(
    variant: str, ctas: int, lanes: int, block: int, inner: int
) -> None:
    """They wait nowhere, or in registers of threads that lack many elements."""
    waits = NOWHERE if variant == "uncached" else IN_REGISTERS
    plan = tiling_apart(2, 3 if waits == NOWHERE else 30, lanes, block, ctas, variant=variant, waits=waits)
    if variant == "cluster":
        plan = dataclasses.replace(plan, vectors=16)
    x = drawn((3, 95, inner), "float16")
    other = drawn(x.shape, "float16", 1)
    with row_ops.observed() as plans:
        calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
            (cupynorm.softmax, (x,), {"where": mask_of(x)}),
            (cupynorm.moments, (x,), {"order": 4}),
            (cupynorm.softmax_backward, (other, x), {}),
            (cupynorm.add_layer_norm, (x, other), {}),
        )
        for call, arrays, options in calls:
            given = {key: on_device(each) for key, each in options.items()}
            found = call(*map(on_device, arrays), axis=1, plan=plan, **given)
            check(found, call(*map(exact, arrays), axis=1, **options), "float16")
    assert {(each.vector, each.waits) for each in plans} == {(2, waits)}


@pytest.mark.parametrize("name", ["a block", "a cluster"])
def test_bytes(name: str) -> None:
    x = drawn((3, TILINGS[name][0], 67), "uint8")
    plan = tiling(*TILINGS[name])
    wide = x.astype(np.float64)
    check(
        cupynorm.standardize(cupy.asarray(x), axis=1, plan=plan),
        cupynorm.standardize(wide, axis=1),
        "float32",
    )
    check(cupynorm.moments(cupy.asarray(x), axis=1, plan=plan), cupynorm.moments(wide, axis=1), "float32")
    with pytest.raises(DoesNotFitError):  # of 8 bytes there is no access of one or two
        cupynorm.standardize(cupy.asarray(x), axis=1, plan=plan, dtype="float64")
    halves = drawn(x.shape, "float16")
    q, scales = cupynorm.layer_norm(cupy.asarray(halves), axis=1, plan=plan, quantize="int8")
    right = cupynorm.layer_norm(exact(halves), axis=1)
    found = cupy.asnumpy(q).astype(np.float64) * cupy.asnumpy(scales).astype(np.float64).reshape(3, 1, 67)
    np.testing.assert_allclose(found, right, atol=0.51 * np.abs(right).max() / 127)


# blocks of the grid: a thread without rows of an outer index's last tile may have rows of the next; all columns of a
# thread, which are not aligned alike; half of a warp's lanes, whose columns are not
@pytest.mark.parametrize(
    "plan",
    [
        tiling_apart(2, 4, 32, 128, 3, variant="split", waits=NOWHERE),
        tiling_apart(2, 4, 32, 128, 3, variant="split"),
        tiling_apart(2, 45, 32, 32),
        tiling_apart(2, 6, 16, 128),
    ],
    ids=["the grid", "the grid, in registers", "all columns", "few lanes"],
)
def test_what_threads_with_two_rows_cannot_do(plan: Plan) -> None:
    x = cupy.asarray(drawn((3, 45, 65), "float16"))
    with pytest.raises(DoesNotFitError):
        cupynorm.softmax(x, axis=1, plan=plan)


# what was measured to be better: clusters that hold a row, and rows that wait nowhere; no float of 32 bits, no pairs,
# and no tiles that half of the threads would have nothing of
@pytest.mark.parametrize(
    ("op", "shape", "dtype", "vector"),
    [
        (SOFTMAX, (64, 1000, 1001), "float16", 2),
        (LAYER_NORM, (8, 4096, 1001), "bfloat16", 2),
        (SOFTMAX, (64, 1000, 101), "float16", 2),
        (SOFTMAX, (1, 1000, 65537), "float16", 2),
        (SOFTMAX, (64, 1000, 1002), "float16", 2),
        (SOFTMAX, (64, 1000, 65), "float16", 1),
        (SOFTMAX, (64, 1000, 127), "float16", 1),
        (SOFTMAX, (64, 128, 1001), "float16", 1),
        (SOFTMAX, (64, 16384, 1001), "float16", 1),
        (SOFTMAX, (64, 1000, 1001), "float32", 1),
    ],
)
def test_threads_have_two_rows_where_that_is_better(
    op: RowOp, shape: tuple[int, int, int], dtype: str, vector: int
) -> None:
    spec = spec_of(op, shape, dtype)
    plan = choose(spec.problem, RECORDED["h200"], lambda plan: plan.min_blocks)
    assert spec.problem.shifted == (dtype != "float32" and shape[-1] % 2 == 1)
    assert plan.vector == vector
    assert plan.variant == "split" or tiles_of(spec.problem, plan) * plan.ctas_per_row == plan.grid


# a T4 has no clusters: blocks of its grid hold long rows; of 3579 neighbours there are too few tiles to fill it
@pytest.mark.parametrize(("cols", "neighbours", "waits"), [(50257, 21365, True), (300000, 3579, False)])
def test_rows_that_the_grid_shares_are_not_left_to_single_blocks(
    cols: int, neighbours: int, *, waits: bool
) -> None:
    spec = spec_of(LAYER_NORM, (1, cols, neighbours), "float16")
    plan = choose(spec.problem, RECORDED["t4"], lambda plan: plan.min_blocks)
    assert spec.problem.shifted
    assert (plan.variant, plan.vector, plan.waits > 0) == ("split", 1, waits)
