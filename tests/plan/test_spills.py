"""A plan whose compiled kernel spills is stepped down, and only as far as that helps."""

from __future__ import annotations

import dataclasses

import pytest

from cupynorm.plan.base import Question, without_spills
from cupynorm.plan.choose import choose
from cupynorm.plan.config import PLAIN, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of

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
        left = H200.registers_per_sm // (plan.block * plan.min_blocks) // 8 * 8
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


def test_local_memory_that_is_no_spill_costs_no_blocks() -> None:
    compiler = Compiler(32, other_bytes=128)
    assert stepped_down(compiler) == KERNEL
    assert compiler.asked == [12, 10]


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
