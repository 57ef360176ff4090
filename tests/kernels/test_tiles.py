"""Rows apart that wait in shared memory, on the simulator: tile after tile, and with what is fused around an op."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.lower.row import RowOp
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.ops.softmax import LOG_SOFTMAX, SOFTMAX
from cupynorm.plan.config import IN_SHARED_MEMORY, PLAIN, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.variants import across
from cupynorm.runtime import compiler, nvrtc
from tests import simulator
from tests.kernels.test_across import DIGITS, drawn, expected, run
from tests.simulator import cupy

if TYPE_CHECKING:
    from collections.abc import Callable

RANDOM = np.random.default_rng(41)


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a device that holds 16 blocks at once; rows wait in shared memory alone."""
    small = dataclasses.replace(RECORDED["h200"], sm_count=16, blocks_per_sm=1)
    monkeypatch.setitem(RECORDED, "small", small)
    simulator.install(monkeypatch, "small")
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    for kind in ("_as_measured", "_in_registers", "_again"):
        monkeypatch.setattr(across, kind, lambda *_: iter(()))
    row_ops.forget()


def tile(vector: int, lanes: int, block: int, ctas: int, *, elements: int = 2, turns: bool = True) -> Plan:
    return dataclasses.replace(
        PLAIN,
        variant="cluster" if ctas > 1 else "shared",
        vector=vector,
        vectors=elements,
        group=block // lanes,
        across=lanes,
        block=block,
        ctas_per_row=ctas,
        waits=IN_SHARED_MEMORY,
        stages=int(turns),
    )


# lanes that share no row, and all of them; one warp, and several; fewer threads than columns, and more; blocks of a
# cluster without a column
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_block_has_many_tiles(dtype: str) -> None:
    most = {"float16": 8, "float32": 4, "float64": 2}[dtype]
    for (lanes, block, ctas, tiles), vector in itertools.product(
        [(1, 64, 1, 39), (32, 32, 1, 19), (4, 128, 1, 35), (2, 64, 2, 21), (8, 64, 4, 11), (4, 32, 16, 5)],
        (most, 1),
    ):
        inner = (vector * lanes * tiles // 2 - lanes) // most * most
        host = drawn((2, 19 if lanes > 4 else 45, max(inner, most)), dtype)
        for op in (LAYER_NORM, SOFTMAX):
            found, plan = run(op, host, tile(vector, lanes, block, ctas))
            assert plan.kernel == "row_tiles"
            assert plan.grid < -(-2 * inner // (vector * lanes)) * ctas or inner < most
            np.testing.assert_allclose(found, expected(op, host), rtol=4 * DIGITS[dtype], atol=DIGITS[dtype])


def test_turns_are_even() -> None:
    host = drawn((1, 100, 3000), "float32")
    _, plan = run(SOFTMAX, host, tile(4, 4, 64, 1))
    tiles = -(-3000 // 16)
    assert plan.grid < tiles
    assert plan.grid * -(-tiles // plan.grid) - tiles < plan.grid / 2
    _, plan = run(SOFTMAX, host, tile(4, 4, 64, 1, turns=False))
    assert plan.grid == tiles


def test_a_block_gives_the_same_bits_with_any_number_of_turns() -> None:
    host = drawn((1, 150, 640), "float16")
    each = [run(op, host, tile(8, 4, 64, ctas, turns=turns))[0].tobytes()
            for op, ctas in ((LAYER_NORM, 1), (SOFTMAX, 4)) for turns in (False, True)]  # fmt: skip
    assert each[0] == each[1]
    assert each[2] == each[3]


# --- with something fused


def on_device(call: Callable[..., Any], *arrays: Any, wanted: str | None, **options: Any) -> tuple[Any, ...]:
    """Make a call of device arrays, whose rows wait in shared memory; return the results as float64."""

    def given(each: Any) -> Any:
        return cupy.asarray(each) if isinstance(each, np.ndarray) else each

    with row_ops.observed() as plans:
        found = call(*map(given, arrays), **{key: given(each) for key, each in options.items()}, plan=wanted)
    assert {plan.waits for plan in plans} == {IN_SHARED_MEMORY}
    assert {plan.variant for plan in plans} == {wanted or "shared"}
    found = found if isinstance(found, tuple) else (found,)
    return tuple(cupy.asnumpy(each).astype(np.float64) for each in found if each is not None)


def agrees(call: Callable[..., Any], *arrays: Any, digits: float = 2e-5, **options: Any) -> None:
    """Compare such a call with that of the same numbers in float64."""

    def exact(each: Any) -> Any:
        numbers = isinstance(each, np.ndarray) and each.dtype not in (np.bool_, np.int64)
        return each.astype(np.float64) if numbers else each

    right = call(*map(exact, arrays), **{key: exact(each) for key, each in options.items()})
    right = [each for each in (right if isinstance(right, tuple) else (right,)) if each is not None]
    for wanted in (None, "cluster"):
        found = on_device(call, *arrays, wanted=wanted, **options)
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=digits, atol=digits)


SHAPE = (7, 37, 16)


def numbers(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(dtype_of(dtype))


@pytest.mark.parametrize(("axis", "dtype"), [(0, "float16"), (1, "bfloat16"), (1, "float32")])
def test_masks(axis: int, dtype: str) -> None:
    x, where = numbers(*SHAPE, dtype=dtype), RANDOM.random(SHAPE) < 0.7
    where[0, 0] = where[:, 0, 0] = True
    digits = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}[dtype]
    others = tuple(extent for at, extent in enumerate(SHAPE) if at != axis)

    agrees(cupynorm.log_softmax, x, axis=axis, where=where, bias=numbers(37, 1), scale=0.5, digits=2 * digits)
    agrees(cupynorm.softmax, x, axis=axis, where=where, digits=digits)
    agrees(cupynorm.softmax, x, axis=axis, lengths=RANDOM.integers(1, SHAPE[axis] + 1, others), digits=digits)
    agrees(cupynorm.softmax, x, axis=axis, causal=True, digits=digits)


def test_sums_and_dropout() -> None:
    x, r, g, b = numbers(*SHAPE), numbers(*SHAPE), numbers(37), numbers(37)

    agrees(cupynorm.add_layer_norm, x, r, g, b, axis=1, return_stats=True)
    agrees(cupynorm.add_rms_norm, x, r, g, axis=1, dropout=0.3, seed=3)


def test_gradients() -> None:
    x, dy = numbers(*SHAPE), numbers(*SHAPE)

    agrees(cupynorm.softmax_backward, dy, cupynorm.softmax(x, axis=1), axis=1)


def test_fusions() -> None:
    fusion = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * t, store=lambda y, s: y + s)

    agrees(fusion, numbers(*SHAPE), numbers(37, 1), numbers(16), axis=1)


def test_statistics() -> None:
    x = numbers(*SHAPE)
    x[RANDOM.random(SHAPE) < 0.1] = np.nan

    agrees(cupynorm.standardize, x, axis=1, nan="omit", return_stats=True)
    agrees(cupynorm.standardize, numbers(*SHAPE), axis=0, weights=np.abs(numbers(*SHAPE)))
    agrees(cupynorm.rescale, numbers(*SHAPE), axis=1)
    agrees(cupynorm.normalize, numbers(*SHAPE), axis=1)
    agrees(cupynorm.logsumexp, numbers(*SHAPE), axis=1)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_quantised_results(kind: str) -> None:
    x = numbers(*SHAPE)
    exact, right = cupynorm.layer_norm(x, axis=1), cupynorm.layer_norm(x, axis=1, quantize=kind)[1]

    for wanted in ("shared", "cluster"):
        y, scales = cupynorm.layer_norm(cupy.asarray(x), axis=1, quantize=kind, plan=wanted)

        found, each = cupy.asnumpy(y), cupy.asnumpy(scales)
        np.testing.assert_allclose(each, right, rtol=1e-5)
        found = found if kind == "int8" else found.view(ml_dtypes.float8_e4m3fn)
        wide = np.expand_dims(each.astype(np.float64), 1)
        step = 0.5 * wide if kind == "int8" else 2.0**-4 * np.abs(exact) + 2.0**-10 * wide
        assert (np.abs(found.astype(np.float64) * wide - exact) <= step * 1.001 + 1e-5).all()


# --- what the planner takes for granted


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("op", [LAYER_NORM, RMS_NORM, SOFTMAX, LOG_SOFTMAX], ids=lambda op: op.name)
def test_what_is_known_of_a_row_has_the_room_that_is_planned(op: RowOp) -> None:
    room = f"{op.row_numbers} * sizeof(double)"
    text = (
        f"#include <row/variants_apart.cuh>\n#include <{op.source}>\nusing Op = cupynorm::{op.struct}<double>;\n"
        f"static_assert(sizeof(cupynorm::Slot<Op>) <= {room});\nstatic_assert(sizeof(Op::Row) <= {room});\n"
        "template <int> __global__ void nothing() {}\n"
    )
    nvrtc.compile(text, "nothing<0>", compiler.options(), "90")
