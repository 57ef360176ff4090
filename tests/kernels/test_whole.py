"""Rows apart that are whole: every thread has as many elements as any other, and nothing is asked for each of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from cupynorm._values import replace
from cupynorm.call.view import View
from cupynorm.lower.around import Around
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.row import RowOp
from cupynorm.lower.spec import KernelSpec
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.ops.softmax import LOG_SOFTMAX, SOFTMAX
from cupynorm.plan.choose import choose
from cupynorm.plan.config import WHOLE_COLUMNS, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.runtime import nvrtc
from tests import SLOW, simulator
from tests.build_gate import chosen, compile_together, compiled, disassemble, nvdisasm, spills
from tests.kernels.test_across import DIGITS, drawn, expected, run, spec_of
from tests.simulator import simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


# one element of a row, parts that are no power of two, one warp, clusters; gamma and beta that have no room in shared
# memory. The last tile has rows for some of its threads only.
@pytest.mark.parametrize(
    ("cols", "plan"),
    [
        (8, tiling_apart(4, 1, 4, 32)),
        (96, tiling_apart(4, 12, 4, 32)),
        (192, tiling_apart(2, 24, 8, 64)),
        (256, tiling_apart(4, 16, 16, 128, 2)),
        (2 * WHOLE_COLUMNS, tiling_apart(1, 32, 1, 64)),
    ],
)
@pytest.mark.parametrize("dtype", [*DIGITS] if SLOW else ["float16", "bfloat16", "float32"])
def test_whole_rows_are_right(dtype: str, cols: int, plan: Plan) -> None:
    host = drawn((2, cols, plan.vector * plan.across + 4), dtype)
    for op in (LAYER_NORM, RMS_NORM, SOFTMAX) if SLOW else (LAYER_NORM, SOFTMAX):
        if dtype == "float64":
            plan = dataclasses.replace(plan, vector=1)
        found, taken = run(op, host, plan)
        assert taken.full
        np.testing.assert_allclose(found, expected(op, host), rtol=4 * DIGITS[dtype], atol=DIGITS[dtype])


@pytest.mark.parametrize("offset", [-60000.0, -1000.0, 0.0, 60000.0])
def test_a_shift_of_halves_changes_no_softmax(offset: float) -> None:
    # 2^(x log2(e) - max): the maximum, once rounded, is the same number everywhere
    host = (np.random.default_rng(0).integers(-4, 4, (1, 256, 64)) * 32.0 + offset).astype(np.float16)
    found, plan = run(SOFTMAX, host, tiling_apart(4, 16, 16, 128, 2))
    assert plan.full
    np.testing.assert_allclose(found, expected(SOFTMAX, host), rtol=1e-3, atol=1e-7)


def test_infinite_and_missing_halves_are_as_for_numpy() -> None:
    host = drawn((1, 256, 64), "float16")
    host[0, 3, 0] = np.inf
    host[0, 5, 1] = np.nan
    host[0, :, 2] = -np.inf
    host[0, ::3, 3] = -np.inf
    with np.errstate(invalid="ignore"):
        wanted = expected(SOFTMAX, host)[0]
    found, plan = run(SOFTMAX, host, tiling_apart(4, 16, 16, 128, 2))
    assert plan.full
    assert np.isnan(found[0, 1]).all()
    assert np.isnan(found[0, 2]).all()
    assert np.isnan(found[0, 0, 3])
    assert not np.any(found[0, 3, ::3])
    np.testing.assert_allclose(found[0, 3:], wanted[3:], rtol=8e-3, atol=2e-3)


def test_a_row_of_one_number_has_no_deviation() -> None:
    host = np.full((1, 256, 64), 1000, np.float16)
    found, _ = run(LAYER_NORM, host, tiling_apart(4, 16, 16, 128, 2))
    np.testing.assert_array_equal(found[0], np.tile(found[0, 0], (64, 1)))
    np.testing.assert_allclose(found, expected(LAYER_NORM, host), rtol=1e-3)


# plans that share a multiprocessor between so many blocks, and instructions of an element for all of a kernel's code.
# Before: one block, for 218 registers, and 41 instructions; three, and 31; two, and 29. With a look at each element 33,
# 22 and 26
IN_STEPS = [(LAYER_NORM, "float32", 2, 22), (SOFTMAX, "float32", 2, 17), (SOFTMAX, "float16", 2, 16)]
# numbers of a thread, registers and instructions of an element; before, 126 and 20, 128 and 19
OF_EACH_ELEMENT = [
    (LAYER_NORM, "float16", 128, 128, 15.5),
    (SOFTMAX, "float16", 128, 128, 14.0),
    (LOG_SOFTMAX, "float16", 128, 128, 17.5),
    (LAYER_NORM, "float32", 64, 128, 17.5),
    (SOFTMAX, "float32", 64, 128, 14.5),
]
IN_THE_GRID = [
    *itertools.product(
        ((LAYER_NORM, "float32"), (SOFTMAX, "float32"), (LAYER_NORM, "float16")), (10000, 16384)
    )
]
NEIGHBOURS = [*itertools.product(("float16", "float32"), (128, 1000, 4096))]

needs_nvrtc = pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
needs_disassembler = pytest.mark.skipif(
    nvrtc.available(13) is None or nvdisasm() is None, reason="no NVRTC 13, or no disassembler"
)


def of_parts(spec: KernelSpec) -> KernelSpec:
    """Return a call as of parts of wider rows' neighbours, which no ring has (docs/notes/094)."""
    return spec._replace(problem=replace(spec.problem, stretches=()))


def in_registers(spec: KernelSpec) -> Plan:
    return choose(of_parts(spec).problem, RECORDED["h200"], lambda plan: plan.min_blocks)


def first_choice(op: RowOp, shape: tuple[int, int, int], dtype: str) -> tuple[KernelSpec, Plan]:
    """Return a lowered call, and the plan that is chosen before the compiler is asked."""
    spec = spec_of(op, shape, dtype)
    return spec, in_registers(spec)


def neighbours(dtype: str, cols: int) -> tuple[KernelSpec, Plan]:
    """Return a call whose threads store eight bytes of neighbouring rows, and its plan."""
    spec, plan = first_choice(SOFTMAX, (16, cols, 1 << 11), dtype)
    return spec, dataclasses.replace(plan, vector=8 // np.dtype(dtype).itemsize, vectors=16)


@functools.cache
def compile_all_together(major: int) -> None:
    """Compile for the tests below: compiler and disassembler need as long to start as for a kernel or two."""
    calls = [first_choice(op, (16, cols, 1024), dtype) for (op, dtype), cols in IN_THE_GRID]
    calls += itertools.starmap(neighbours, NEIGHBOURS)
    if major == nvrtc.majors()[0]:
        calls += [first_choice(op, (1, 1000, 1 << 15), dtype) for op, dtype, *_ in IN_STEPS]
        calls += [first_choice(op, (1, 1024, 1 << 15), dtype) for op, dtype, *_ in OF_EACH_ELEMENT]
    for _ in compile_together([(spec.text, spec.expression(plan)) for spec, plan in calls], "90", major):
        pass


@needs_disassembler
@pytest.mark.parametrize(("op", "dtype", "blocks", "instructions"), IN_STEPS)
def test_other_rows_have_addresses_in_steps(op: Any, dtype: str, blocks: int, instructions: float) -> None:
    compile_all_together(13)
    plan, kernel = chosen(of_parts(spec_of(op, (1, 1000, 1 << 15), dtype)), "h200", "90", major=13)
    assert not plan.full
    assert plan.min_blocks >= blocks
    code = disassemble(kernel.image)[kernel.lowered_name]
    assert len(code.instructions) <= instructions * plan.vector * plan.vectors


@needs_disassembler
@pytest.mark.parametrize(("op", "dtype", "numbers", "registers", "instructions"), OF_EACH_ELEMENT)
def test_few_instructions_are_issued_for_each_element(
    op: Any, dtype: str, numbers: int, registers: int, instructions: float
) -> None:
    compile_all_together(13)
    spec, plan = first_choice(op, (1, 1024, 1 << 15), dtype)
    assert plan.full
    assert plan.vector * plan.vectors == numbers
    kernel = compiled(spec, plan, "90", 13)
    assert not spills(kernel)
    assert kernel.registers <= registers
    code = disassemble(kernel.image)[kernel.lowered_name]
    assert len(code.instructions) <= instructions * numbers


@needs_nvrtc
@pytest.mark.parametrize(("call", "cols"), IN_THE_GRID)
def test_rows_that_the_grid_shares_have_registers_enough(call: tuple[Any, str], cols: int) -> None:
    # a thread holds 64 numbers in its 128 registers, so values that all tiles share are computed again for each tile
    spec, plan = first_choice(call[0], (16, cols, 1024), call[1])
    assert (plan.variant, plan.block, plan.vectors) == ("split", 512, 32)
    for major in nvrtc.majors():
        compile_all_together(major)
        assert not spills(compiled(spec, plan, "90", major)), major


@needs_nvrtc
@pytest.mark.skipif(nvdisasm() is None, reason="no disassembler")
@pytest.mark.parametrize(("dtype", "cols"), NEIGHBOURS)
def test_neighbouring_rows_are_stored_at_once(dtype: str, cols: int) -> None:
    # the compiler takes plain stores apart whose addresses are in steps: twice as many, each of half a sector
    spec, plan = neighbours(dtype, cols)
    for major in nvrtc.majors():
        compile_all_together(major)
        kernel = compiled(spec, plan, "90", major)
        memory = disassemble(kernel.image)[kernel.lowered_name].accesses
        found = {width: count for (kind, width), count in memory.items() if kind == "STG"}
        # over the grid: with the next tile's loads between them and without; and a message, and the first counter
        assert found == ({8: 32, 16: 1, 4: 1} if plan.variant == "split" else {8: 16})


@pytest.mark.parametrize(
    (
        "dtype",
        "cols",
        "tile",
    ),  # neighbouring rows and elements of a thread, threads of a block, blocks of a row
    [
        ("float16", 128, (4, 32, 128, 1)),
        ("float16", 8192, (2, 64, 256, 16)),
        ("float16", 1000, (2, 64, 256, 2)),
        ("float32", 128, (2, 32, 128, 1)),
        ("float32", 8192, (2, 32, 256, 16)),
        ("float32", 5000, (2, 32, 256, 10)),
    ],
)
def test_measured_tilings_are_for_whole_rows(dtype: str, cols: int, tile: tuple[int, ...]) -> None:
    spec = spec_of(LAYER_NORM, (1, cols, 1 << (15 if cols < 2048 else 12)), dtype)
    plan = in_registers(spec)
    assert (plan.vector, plan.vectors, plan.block, plan.ctas_per_row) == tile


@pytest.mark.parametrize(
    ("dtype", "cols", "tile"),
    [
        ("float16", 3000, (4, 32, 512, 6, 132)),
        ("float16", 8192, (4, 32, 512, 16, 128)),
        ("float32", 5000, (2, 32, 512, 10, 130)),
        # of 49 blocks that hold a row, two groups leave 34 multiprocessors idle
        ("float16", 50000, (4, 24, 512, 66, 132)),
        ("float32", 50000, (2, 24, 512, 66, 132)),
    ],
)
def test_the_grid_shares_rows_that_are_many(dtype: str, cols: int, tile: tuple[int, ...]) -> None:
    plans = [in_registers(spec_of(LAYER_NORM, (outer, cols, 1 << 15), dtype)) for outer in (3, 4, 9)]
    assert {plan.variant for plan in plans} == {"split"}
    assert {(plan.vector, plan.vectors, plan.block, plan.ctas_per_row, plan.grid) for plan in plans} == {tile}


def test_measured_tilings_are_not_for_columns_at_several_distances() -> None:
    kind = np.dtype(np.float16)
    x = View(
        1 << 20, (6, 2048, 4, 256), (1 << 20, 2, 6 << 20, 4096), kind
    )  # axes 0 and 2 of (4, 6, 256, 2048)
    spec = fused_spec(
        SOFTMAX, x, 2, {}, [], 0.0, np.dtype(np.float32), Around((x._replace(pointer=1 << 40),))
    )
    assert not spec.problem.in_steps
    assert choose(spec.problem, RECORDED["h200"], lambda plan: plan.min_blocks).vector == 4


def test_what_asks_for_each_element_is_not_whole() -> None:
    # two axes of columns that no single distance joins
    from cupynorm import softmax
    from tests.simulator import cupy

    host = np.random.default_rng(0).standard_normal((4, 6, 32, 8)).astype(np.float16)
    found = softmax(cupy.asarray(host), axis=(0, 2)).get().astype(np.float64)
    powers = np.exp(host.astype(np.float64))
    np.testing.assert_allclose(found, powers / powers.sum((0, 2), keepdims=True), rtol=8e-3, atol=2e-3)
