"""Rows whose elements lie apart from one another, on the simulator: how row_across holds and reduces them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.call.arguments import view
from cupynorm.call.masks import Mask
from cupynorm.call.view import View
from cupynorm.invoke import bound_calls, row_ops
from cupynorm.lower.around import Around
from cupynorm.lower.backward import PAIR, SOFTMAX_BACKWARD
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.row import RowOp
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.plan.config import EVENLY, IN_REGISTERS, NOWHERE, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.variants.across import VARIANTS_ACROSS
from cupynorm.runtime import nvrtc
from tests import SLOW, simulator
from tests.build_gate import (
    begins_too_soon,
    chosen,
    code_of,
    compile_first_choices,
    endless_waits,
    spills,
    stalls_a_cluster,
)
from tests.sampling import in_pairs
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

EPS = 1e-5
DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "float64": 1e-13}
# outer axes, the axis, inner axes: whole and odd vectors of neighbouring rows, more of them than a block has; rows of
# one round and of several
SHAPES = [(1, 5, 7), (3, 40, 9), (2, 129, 64), (1, 1000, 6), (1, 2500, 3)]


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def launch(spec: Any, wanted: str | Plan | None) -> Plan:
    """Launch a lowered call; return its plan."""
    plans = []

    def once(found: Any) -> None:
        plans.append(found.plan)
        bound_calls.bound_call(0, bound_calls.Arrays({}), [row_ops.launch_of(found, spec)]).once()

    row_ops.launch_what_fits(0, spec, wanted, once)
    return plans[0]


def drawn(shape: tuple[int, int, int], dtype: str) -> Any:
    """Draw an array; its middle axis is the row."""
    rng = np.random.default_rng(sum(shape))
    return (rng.standard_normal(shape) + 1).astype(dtype_of(dtype))


def run(op: RowOp, host: Any, wanted: str | Plan | None, *, gap: int = 0) -> tuple[Any, Plan]:
    """Normalise along the middle axis, with parameters; return results as float64, and the plan.

    gap: elements between rows of the last axis.
    """
    (outer, cols, inner), kind = host.shape, host.dtype
    wide = cupy.empty((outer, cols, inner + gap), kind)
    wide[:, :, :inner] = host
    x, y = wide[:, :, :inner].transpose(0, 2, 1), cupy.empty(host.shape, kind).transpose(0, 2, 1)
    parameters = {name: cupy.asarray(np.linspace(0.5, 2, cols).astype(kind)) for name in op.columns}
    compute = compute_dtype(kind, kind)
    stats = [cupy.empty((outer, inner), compute) for _ in op.stats]
    columns = {name: view(each) for name, each in parameters.items()}
    pointers = [view(each).pointer for each in stats]
    spec = fused_spec(op, view(x), 1, columns, pointers, EPS, compute, Around((view(y),)))
    plan = launch(spec, wanted)
    rows = host.transpose(0, 2, 1).astype(np.float64)
    if op is LAYER_NORM:
        np.testing.assert_allclose(stats[0].get(), rows.mean(-1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stats[1].get(), 1 / np.sqrt(rows.var(-1) + EPS), rtol=1e-5)
    return y.get().astype(np.float64), plan


def expected(op: RowOp, host: Any) -> Any:
    """Return the same by the formula."""
    x = host.transpose(0, 2, 1).astype(np.float64)
    if op is SOFTMAX:
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    gamma = np.linspace(0.5, 2, x.shape[-1]).astype(host.dtype).astype(np.float64)
    if op is RMS_NORM:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gamma
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * gamma + gamma


CALLS = in_pairs(
    (None, *VARIANTS_ACROSS),
    [each for each in DIGITS if SLOW or each != "bfloat16"],
    (LAYER_NORM, SOFTMAX, *((RMS_NORM,) if SLOW else ())),
    SHAPES,
)


@pytest.mark.parametrize("variant", [None, *VARIANTS_ACROSS])
def test_every_variant_is_right(variant: str | None) -> None:
    seen = set()
    for _, dtype, op, shape in (each for each in CALLS if each[0] == variant):
        host = drawn(shape, dtype)
        try:
            found, plan = run(op, host, variant)
        except DoesNotFitError:
            assert (variant, shape[1] > 1000) == ("block", True) or variant == "cluster", shape
            continue
        assert variant in {None, plan.variant}
        np.testing.assert_allclose(found, expected(op, host), rtol=4 * DIGITS[dtype], atol=DIGITS[dtype])
        seen.add((plan.vector > 1, dtype == "float64"))
    assert {each for each in seen if each[1]} == {(False, True)}  # as RULES say for 8 bytes
    assert variant is None or (True, False) in seen


def tile_of(
    op: RowOp, dtype: str, variant: str, cols: int, blocks: int, *, inner: int = 8
) -> tuple[Any, Any, Plan]:
    """Run a plan of 16 threads a column and eight elements of each thread; return both results and the plan."""
    host = drawn((2, cols, inner), dtype)
    _, plan = run(op, host, "uncached")
    forced = dataclasses.replace(
        plan,
        variant=variant,
        vector=2,
        vectors=8,
        group=16,
        across=4,
        block=64,
        waits=IN_REGISTERS,
        ctas_per_row=blocks,
        min_blocks=1,
    )
    found, taken = run(op, host, forced)
    return found, expected(op, host), taken


# A thread has all of its eight elements but four: from 64 columns of a block on. All are there at 128.
@pytest.mark.parametrize(("variant", "blocks"), [("block", 1), ("cluster", 3), ("split", 3)])
@pytest.mark.parametrize("op", [LAYER_NORM, SOFTMAX], ids=lambda op: op.name)
def test_threads_that_have_most_of_their_elements(op: RowOp, variant: str, blocks: int) -> None:
    for (k, dtype), (i, of_a_block) in itertools.product(
        enumerate(("float16", "float32")), enumerate((16, 63, 64, 65, 79, 80, 81, 127, 128))
    ):
        if not SLOW and (i + (op is SOFTMAX)) % 2 == k:
            continue  # each number of columns in both dtypes: of one op in this one, of the other in that one
        for cols in {of_a_block * blocks, of_a_block * blocks - (blocks > 1)}:
            if variant == "split" and math.ceil(cols / 128) != blocks:
                continue  # it takes no more blocks than hold a row
            found, right, plan = tile_of(op, dtype, variant, cols, blocks)
            assert plan.waits == (EVENLY if cols // blocks >= 64 else IN_REGISTERS), cols
            np.testing.assert_allclose(found, right, rtol=4 * DIGITS[dtype], atol=DIGITS[dtype])


def test_blocks_of_the_grid_go_on_to_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # five groups of three blocks for six tiles, so that a message takes the place of the last but one
    few = dataclasses.replace(RECORDED["h200"], sm_count=1)
    monkeypatch.setattr(simulator.machine, "limits", lambda device=None: few)
    for op, dtype, cols in itertools.product((LAYER_NORM, SOFTMAX), ("float16", "float32"), (384, 300)):
        found, right, plan = tile_of(op, dtype, "split", cols, 3, inner=24)
        assert plan.grid < 6 * plan.ctas_per_row
        np.testing.assert_allclose(found, right, rtol=4 * DIGITS[dtype], atol=DIGITS[dtype])


def test_room_for_messages_is_asked_for_by_each_call() -> None:
    from cupynorm import softmax

    host = drawn((1, 300, 8), "float32")[0]
    x, out = cupy.asarray(host), cupy.empty(host.shape, host.dtype)
    for _ in range(3):  # the first is bound
        out[...] = 0
        softmax(x, axis=0, out=out, plan="split")
        powers = np.exp(host.astype(np.float64))
        np.testing.assert_allclose(out.get(), powers / powers.sum(0), rtol=1e-5)


def test_rows_that_are_only_read_are_shared_by_the_grid_and_wait_nowhere() -> None:
    from cupynorm import logsumexp

    host = drawn((1, 300, 8), "float32")[0]
    with row_ops.observed() as plans:
        found = logsumexp(cupy.asarray(host), axis=0, plan="split")

    assert [(plan.variant, plan.waits) for plan in plans] == [("split", NOWHERE)]
    np.testing.assert_allclose(found.get(), np.log(np.exp(host.astype(np.float64)).sum(0)), rtol=1e-5)


def test_every_form_of_the_grid() -> None:
    import cupynorm

    rng = np.random.default_rng(5)
    x, r = (rng.standard_normal((300, 12)).astype(np.float32) for _ in range(2))
    g, where = np.linspace(0.5, 2, 300).astype(np.float32), rng.random(x.shape) < 0.8
    gaps = np.where(where, x, np.nan).astype(np.float32)
    y = cupynorm.softmax(x, axis=0)
    lengths = rng.integers(1, 301, 12)
    rounded = {"rtol": 2e-5, "atol": 2e-5}
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, float]]] = [
        (cupynorm.softmax, (x,), {"where": where}, rounded),
        (cupynorm.log_softmax, (x,), {"lengths": lengths}, rounded),
        (cupynorm.layer_norm, (x, g, g), {"where": where, "return_stats": True}, rounded),
        (cupynorm.rms_norm, (x, g), {"quantize": "int8"}, {"atol": 1}),
        (cupynorm.add_layer_norm, (x, r, g), {"return_sum": True}, rounded),
        (cupynorm.standardize, (gaps,), {"nan": "omit"}, rounded),
        (cupynorm.sigma_clip, (x, 2.0), {}, rounded),
        (cupynorm.softmax_backward, (r, y), {}, rounded),
        (cupynorm.layer_norm_backward, (r, x, g), {}, {"rtol": 1e-4, "atol": 1e-4}),
    ]
    for function, arrays, options, near in calls:
        with row_ops.observed() as plans:
            given = {name: cupy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
            on_device = [cupy.asarray(each) if isinstance(each, np.ndarray) else each for each in arrays]
            found = function(*on_device, axis=0, plan="split", **given)
        assert "split" in [plan.variant for plan in plans], function.__name__
        wanted = function(*arrays, axis=0, **options)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
        for got, right in pairs:
            np.testing.assert_allclose(got.get().astype(np.float64), right.astype(np.float64), **near)


@pytest.mark.parametrize("gap", [1, 3, 4])
def test_rows_of_any_stride(gap: int) -> None:
    for dtype, op in itertools.product(("float16", "float32"), (LAYER_NORM, SOFTMAX)):
        host = drawn((2, 70, 20), dtype)
        found, _ = run(op, host, None, gap=gap)
        np.testing.assert_allclose(found, expected(op, host), rtol=4 * DIGITS[dtype], atol=DIGITS[dtype])


def test_numbers_that_nobody_chooses() -> None:
    # fewer threads than a warp has lanes side by side, or more; rows that end in the middle of a round
    host = drawn((2, 77, 64), "float32")
    _, plan = run(LAYER_NORM, host, None)
    for across, vector, block, waits, ctas in itertools.product(
        (1, 8, 32), (1, 4), (64,), (NOWHERE, IN_REGISTERS), (1, 4)
    ):
        group = block // across
        elements = math.ceil(math.ceil(77 / ctas) / group) if waits == IN_REGISTERS else 2
        if elements * vector > 32:
            continue
        names = {IN_REGISTERS: "block", NOWHERE: "uncached"}
        forced = dataclasses.replace(
            plan,
            variant="cluster" if ctas > 1 else names[waits],
            vector=vector,
            vectors=elements,
            group=group,
            across=across,
            block=block,
            waits=waits,
            ctas_per_row=ctas,
            min_blocks=1,
        )
        found, taken = run(LAYER_NORM, host, forced)
        assert taken.template[:3] == (vector, elements, across)
        np.testing.assert_allclose(found, expected(LAYER_NORM, host), rtol=2e-5, atol=4e-6)


def test_a_mean_far_from_zero_keeps_its_digits() -> None:
    host = (np.random.default_rng(0).standard_normal((1, 200, 16)) * 0.1 + 1000).astype(np.float32)
    for variant in VARIANTS_ACROSS:
        found, _ = run(LAYER_NORM, host, variant)
        np.testing.assert_allclose(found, expected(LAYER_NORM, host), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["warp", "cached", "shared"])
def test_a_variant_for_contiguous_rows_is_refused_by_name(name: str) -> None:
    with pytest.raises(DoesNotFitError, match="next to one another"):
        run(SOFTMAX, drawn((1, 5, 7), "float32"), name, gap=1)


@pytest.mark.parametrize(
    "change", [{"across": 3}, {"waits": 3}, {"vectors": 1}, {"ctas_per_row": 2}, {"across": 0}]
)
def test_a_plan_that_would_go_wrong_is_refused(change: dict[str, int]) -> None:
    host = drawn((1, 500, 8), "float32")
    _, plan = run(SOFTMAX, host, "block")
    with pytest.raises(DoesNotFitError):
        run(SOFTMAX, host, dataclasses.replace(plan, **change))


def spec_of(op: RowOp, shape: tuple[int, int, int], dtype: str) -> Any:
    """Lower a call on arrays that nobody allocates."""
    (outer, cols, inner), kind = shape, dtype_of(dtype)
    strides = (cols * inner * kind.itemsize, kind.itemsize, inner * kind.itemsize)
    x = View(1 << 20, (outer, inner, cols), strides, kind)
    columns = {name: View(1 << 30, (cols,), (kind.itemsize,), kind) for name in op.columns}
    what = Around((x._replace(pointer=1 << 40),))
    return fused_spec(op, x, 1, columns, [0] * len(op.stats), EPS, compute_dtype(kind, kind), what)


# on each architecture both calls and both shapes, of a row in a block and of one in several
DEVICES = {"90": "h200", "80": "a100", "75": "t4"}
BUILT = in_pairs(DEVICES, ((LAYER_NORM, "float16"), (SOFTMAX, "float64")), ((64, 32, 512), (4, 4096, 1024)))


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", DEVICES)
def test_every_kernel_compiles_without_a_spill(arch: str) -> None:
    seen = set()
    specs = [spec_of(op, shape, dtype) for on, (op, dtype), shape in BUILT if on == arch]
    calls = [*itertools.product(specs, (DEVICES[arch],), VARIANTS_ACROSS)]
    compile_first_choices(calls, arch)
    for spec, device, variant in calls:
        try:
            plan, kernel = chosen(spec, device, arch, variant)
        except DoesNotFitError:
            continue
        assert not spills(kernel), (plan, spills(kernel))
        assert not endless_waits(kernel)
        code = code_of(kernel, arch)
        assert not begins_too_soon(code, arch)
        assert not stalls_a_cluster(code, arch)
        seen.add(variant)
    assert seen == {*VARIANTS_ACROSS} - ({"cluster"} if arch != "90" else set())


# tables of few neighbours: blocks of both sizes
STRETCHES = [
    ("90", LAYER_NORM, "float16", 512),
    ("80", SOFTMAX, "float32", 64),
    ("75", LAYER_NORM, "float16", 64),
]


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("arch", "op", "dtype", "cols"), STRETCHES)
def test_rows_with_their_neighbours_compile_without_a_spill(
    arch: str, op: RowOp, dtype: str, cols: int
) -> None:
    plan, kernel = chosen(spec_of(op, (4096, cols, 33), dtype), DEVICES[arch], arch)
    assert plan.kernel == "row_stretch"
    assert not spills(kernel), (plan, spills(kernel))
    assert not endless_waits(kernel)
    assert not begins_too_soon(code_of(kernel, arch), arch)


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("arch", "dtype"), [("90", "float16"), ("80", "float32"), ("100", "float16")])
def test_what_is_loaded_beside_them_is_read_from_shared_memory(arch: str, dtype: str) -> None:
    """The simulator cannot tell: it finds an element of an operand at its own address, too."""
    shape, kind = (300, 33, 100), dtype_of(dtype)
    x, y, dx = (
        View(at << 40, shape, (3300 * kind.itemsize, kind.itemsize, 33 * kind.itemsize), kind)
        for at in range(3)
    )
    mask = Mask(shape, 1, where=np.ones((300, 100, 33), np.bool_).transpose(0, 2, 1))
    spec = fused_spec(
        SOFTMAX_BACKWARD,
        x,
        1,
        {},
        (),
        0.0,
        compute_dtype(kind, kind),
        Around((dx,), PAIR, (y,), mask),
    )
    plan, kernel = chosen(spec, DEVICES.get(arch, "h200"), arch, "shared")
    assert plan.kernel == "row_stretch"
    assert not spills(kernel), (plan, spills(kernel))
    loads = [each for each in code_of(kernel, arch).instructions if each.startswith(("LDG.", "LD."))]
    assert not loads
