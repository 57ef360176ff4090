"""A plan whose compiled kernel spills is stepped down, and only as far as that helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from cupynorm import sigma_clip
from cupynorm.call import asking
from cupynorm.plan.base import Question, registers_left, without_spills
from cupynorm.plan.choose import choose
from cupynorm.plan.config import AT_USE, BOTH, PLAIN, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of
from cupynorm.runtime import nvrtc
from cupynorm.runtime.compiler import options
from tests.build_gate import FUSED

H200 = RECORDED["h200"]
HALVES = Problem(8192, 1024, 8, 2, 4, (2, 2))
KERNEL = dataclasses.replace(PLAIN, variant="block", block=128, group=128, min_blocks=12)


def occupancy(plan: Plan) -> int:
    return plan.min_blocks


class Compiler:
    """Stands in for a compiler whose kernels want so many registers; notes for how many blocks it is asked."""

    def __init__(self, wanted: int, other_bytes: int = 0) -> None:
        self.wanted = wanted
        self.other_bytes = other_bytes
        self.asked: list[int] = []

    def __call__(self, plan: Plan) -> int:
        self.asked.append(plan.min_blocks)
        warps = -(-plan.block * plan.min_blocks // 128)  # of each of four schedulers
        left = H200.registers_per_sm // (128 * warps) // 8 * 8
        return self.other_bytes + 4 * max(0, self.wanted - left)


def stepped_down(compiler: Compiler, plan: Plan = KERNEL) -> Plan:
    return without_spills(Question(HALVES, H200, rules_of("90"), occupancy, compiler), plan)


@pytest.mark.parametrize(
    ("wanted", "blocks", "asked"),
    [
        (40, 12, [12]),  # it fits: the compiler is asked once
        (48, 10, [12, 10]),  # 11 blocks would leave a thread no register more than 12 do
        (64, 8, [12, 10, 9, 8]),
    ],
)
def test_as_many_blocks_as_leave_registers_enough(wanted: int, blocks: int, asked: list[int]) -> None:
    compiler = Compiler(wanted)
    assert stepped_down(compiler) == dataclasses.replace(KERNEL, min_blocks=blocks)
    assert compiler.asked == asked


@pytest.mark.parametrize(
    ("block", "most", "wanted", "asked"),
    [
        (64, 12, 88, [12, 10]),  # each scheduler has 6 of 22 warps, as of 24
        (96, 4, 200, [4, 2]),  # and 3 of 9, as of 12
    ],
)
def test_a_number_of_blocks_that_leaves_a_scheduler_as_many_warps_is_not_compiled(
    block: int, most: int, wanted: int, asked: list[int]
) -> None:
    compiler = Compiler(wanted)
    narrow = dataclasses.replace(KERNEL, block=block, group=32, min_blocks=most)
    assert stepped_down(compiler, narrow).min_blocks == asked[-1]
    assert compiler.asked == asked


GREEDY = """
template <int kBlock, int kBlocks>
__global__ void __launch_bounds__(kBlock, kBlocks) greedy(const float* x, float* y) {
  float value[250], sum = 0;
#pragma unroll
  for (int i = 0; i < 250; ++i) value[i] = x[threadIdx.x + i * 1024];
#pragma unroll
  for (int i = 0; i < 250; ++i) sum += value[i] * value[i];
#pragma unroll
  for (int i = 0; i < 250; ++i) y[threadIdx.x + i * 1024] = value[i] * sum + value[(i * 7 + 3) % 250];
}
"""


def test_the_compiler_leaves_a_thread_as_many_registers_as_are_counted() -> None:
    if not nvrtc.majors() or "90" not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip("no NVRTC for sm_90 is installed")
    launches = [(32, 21), (64, 9), (64, 11), (64, 12), (96, 3), (96, 7), (128, 5), (160, 3), (352, 1)]
    names = [f"greedy<{block}, {blocks}>" for block, blocks in launches]
    kernels = nvrtc.compile_all(GREEDY, names, options(), "90")
    assert [each.registers for each in kernels] == [registers_left(H200, *each) for each in launches]


def test_local_memory_that_is_no_spill_costs_no_blocks() -> None:
    compiler = Compiler(32, other_bytes=128)
    assert stepped_down(compiler) == KERNEL
    assert compiler.asked == [12, 10, 9]


def test_a_step_that_spills_more_is_not_the_last() -> None:
    spilled = {12: 32, 10: 40, 9: 0}  # moments of order 4 with a mask, bfloat16 (docs/notes/054)
    found = without_spills(
        Question(HALVES, H200, rules_of("90"), occupancy, lambda plan: spilled[plan.min_blocks]), KERNEL
    )
    assert found.min_blocks == 9


def test_one_block_is_not_compiled_again() -> None:
    compiler = Compiler(80)
    alone = dataclasses.replace(KERNEL, block=1024, group=1024, min_blocks=1)
    assert stepped_down(compiler, alone) == alone
    assert compiler.asked == [1]


def test_a_chosen_plan_says_why_it_has_fewer_blocks() -> None:
    usual = choose(HALVES, H200, occupancy)
    left = H200.registers_per_sm // (usual.block * usual.min_blocks) // 8 * 8
    plan = choose(HALVES, H200, occupancy, local_bytes=Compiler(left + 1))
    assert plan.min_blocks < usual.min_blocks
    assert plan.why == (
        f"{usual.why}, with {plan.min_blocks} blocks a multiprocessor: "
        f"registers are spilled with {usual.min_blocks}"
    )
    same = ("grid", "resident_blocks", "waves", "min_blocks", "rule", "why")
    kept = {name: getattr(usual, name) for name in same}
    assert dataclasses.replace(plan, **kept) == usual


def test_a_plan_that_was_asked_for_is_launched_as_it_is() -> None:
    usual = choose(HALVES, H200, occupancy)
    compiler = Compiler(255)
    assert choose(HALVES, H200, occupancy, usual, local_bytes=compiler).min_blocks == usual.min_blocks
    assert compiler.asked == []


def planned(problem: Problem, local_bytes: Callable[[Plan], int], variant: str | None = None) -> Plan:
    return choose(problem, H200, occupancy, variant, local_bytes=local_bytes)


def test_parameters_that_wait_in_registers_are_loaded_at_use_where_registers_are_spilled() -> None:
    spec = FUSED["add_layer_norm, bias, dropout"].spec("float32", 48)
    problem = dataclasses.replace(spec.problem, rows=256, cols=262144)
    waiting = planned(problem, lambda _: 0)

    at_use = planned(problem, lambda plan: 8 * (plan.parameter_cache == BOTH))

    assert waiting.parameter_cache == BOTH
    assert at_use.parameter_cache == AT_USE
    assert at_use.why == f"{waiting.why}, with parameters at use: registers are spilled where they wait"
    same = ("variant", "vector", "vectors", "group", "ctas_per_row", "block", "stages", "min_blocks")
    assert all(getattr(at_use, name) == getattr(waiting, name) for name in same)
    assert planned(problem, lambda _: 8) == waiting  # which is no better


def test_a_block_of_the_grid_has_a_warp_less_for_each_scheduler_where_registers_are_spilled() -> None:
    problem = Problem(64, 1 << 22, 4, 4, 4, (4,))
    whole = planned(problem, lambda _: 0, "split")

    fewer = planned(problem, lambda plan: 4 * (plan.block == 1024), "split")

    assert (whole.kernel, whole.block, fewer.block) == ("row_staged", 1024, 896)
    assert planned(problem, lambda _: 4, "split") == whole


def test_a_thread_has_half_as_many_rows_apart_where_every_tiling_spills() -> None:
    x = np.lib.stride_tricks.as_strided(np.zeros(2, np.int32), (64, 1024, 512), (2097152, 2048, 4))
    a100 = RECORDED["a100"]
    spec = asking.specs_of(lambda: sigma_clip(x, axis=1, centre="median"), a100)[0]
    several = choose(spec.problem, a100, occupancy)

    single = choose(spec.problem, a100, occupancy, local_bytes=lambda plan: 168 * (plan.vector > 1))

    assert (several.vector, several.vectors, several.across) == (2, 8, 4)
    assert (single.vector, single.vectors, single.across) == (1, 16, 8)
    assert (single.block, single.waits, single.variant) == (several.block, several.waits, several.variant)
    assert choose(spec.problem, a100, occupancy, local_bytes=lambda _: 64) == several  # a few bytes cost less
