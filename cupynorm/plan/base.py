"""The question that is put to every variant, and the launch that follows from its answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple, replace
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AMPERE,
    HOPPER,
    LARGE_CLUSTERS,
    MAX_CTAS,
    MAX_DYNAMIC_ROWS,
    MAX_GRID,
    MOST_REGISTERS,
    ONE_BLOCK_PER_ROW,
    PORTABLE_CTAS,
    REGISTER_UNIT,
    SCHEDULERS,
    UNALIGNED_APART,
    WARP,
    Plan,
)
from cupynorm.plan.rule_types import FixedRule

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits
    from cupynorm.plan.problem import Problem
    from cupynorm.plan.rule_types import Rule
    from cupynorm.plan.rules import Rules

# (plan without its grid) -> blocks that a multiprocessor holds at once, or, of clusters, how many the device does; 0:
# it cannot be launched.
Occupancy = Callable[[Plan], int]
# (plan without its grid) -> bytes of local memory of a thread of its compiled kernel: of what registers do not hold.
LocalBytes = Callable[[Plan], int]
# After so many steps in vain fewer blocks are no longer tried: a compiler may spill more with a few registers more.
STEPS_IN_VAIN = 2


def none_known(plan: Plan) -> int:  # noqa: ARG001  a LocalBytes
    """Stand in for the compiler where no kernel is compiled, or where a plan is launched as it was asked for."""
    return 0


class Question(NamedTuple):
    """A question to a variant: a plan for a problem, on a device, by the rules of its architecture."""

    problem: Problem
    limits: Limits
    rules: Rules
    occupancy: Occupancy
    local_bytes: LocalBytes = none_known

    @property
    def architecture(self) -> int:
        """The compute capability as a number."""
        return int(self.limits.compute_capability)

    @property
    def measured(self) -> bool:
        """Whether the rules were measured on this architecture's own devices."""
        return self.limits.compute_capability == self.rules.architecture

    @property
    def small_batch(self) -> bool:
        """Whether several multiprocessors should work on a row, since there are too few rows to fill the device."""
        numbers = self.rules.small_batch
        few = self.problem.rows < numbers.rows * self.limits.sm_count
        return few and self.problem.row_bytes >= numbers.row_bytes

    @property
    def narrow(self) -> bool:
        """Whether rows are moved in accesses of fewer than 16 bytes."""
        problem = self.problem
        return problem.vector_bytes < ACCESS_BYTES and not (problem.unaligned or problem.fused)

    @property
    def whole_vectors(self) -> bool:
        """Whether rows begin at 16-byte vectors, of numbers that take no more registers than floats."""
        problem = self.problem
        return problem.vector_bytes == ACCESS_BYTES and not problem.unaligned and not problem.doubles

    @property
    def can_stage(self) -> bool:
        """Whether rows can be on their way through shared memory: 16-byte vectors, from sm_80 on."""
        whole = self.problem.vector_bytes == ACCESS_BYTES and self.problem.unaligned != UNALIGNED_APART
        return whole and self.architecture >= AMPERE

    @property
    def max_ctas(self) -> int:
        """How many blocks a cluster may have; 1 where there are no clusters."""
        if self.architecture < HOPPER:
            return 1
        return MAX_CTAS if self.limits.compute_capability in LARGE_CLUSTERS else PORTABLE_CTAS

    def why(self, reason: Rule | str) -> str:
        """Return in words what decided: a rule and the file that has it, or what is given as it is."""
        return reason if isinstance(reason, str) else self.named(f"rule {reason.id}")

    def named(self, what: str) -> str:
        """Return in words what has decided of the file of rules."""
        stands_in = "" if self.measured else f", which stands in for sm_{self.limits.compute_capability}"
        return f"{what} of {self.rules.file}{stands_in}"


Variant = Callable[[Question], "Plan | None"]


def with_grid(
    question: Question,
    plan: Plan,
    blocks: int,
    reason: Rule | str,
    waves: float = ONE_BLOCK_PER_ROW,
) -> Plan | None:
    """Return a plan with its launch, of so many blocks or of `waves` of them; None if it cannot be launched."""
    problem, limits = question.problem, question.limits
    if plan.shared_bytes > limits.shared_bytes_per_block:
        return None
    asked = plan
    if not (question.measured and isinstance(reason, FixedRule) and reason.spills):
        plan = without_spills(question, plan)
    resident = question.occupancy(plan)
    if resident == 0 or (plan.dynamic and problem.rows > MAX_DYNAMIC_ROWS):
        return None
    plan = replace(plan, resident_blocks=resident)
    at_once = blocks_at_once(limits, plan)
    waves = min(1.0, waves) if plan.persistent else waves
    most = int(max(1, min(at_once * waves, MAX_GRID)))
    unit = grid_unit(problem, plan)
    if plan.persistent:  # a forced plan's waves may come from a call of too few rows for one turn
        most = max(most, min(unit, int(at_once)))
    if most < unit:
        return None  # also where no block has a next row: whether a plan fits does not depend on the number of rows
    grid = blocks if blocks <= most else most // unit * unit
    why = question.why(reason)
    if plan.min_blocks < asked.min_blocks:
        why += (
            f", with {plan.min_blocks} blocks a multiprocessor: registers are spilled with {asked.min_blocks}"
        )
    rule = "" if isinstance(reason, str) else reason.id
    return replace(plan, grid=grid, waves=grid / at_once, rule=rule, why=why)


def without_spills(question: Question, plan: Plan) -> Plan:
    """Return a plan with as few blocks a multiprocessor as its kernel needs to keep its values in registers.

    The compiled kernel is asked. It is compiled again for fewer blocks only where each thread then has more registers,
    and as long as one of two such steps helps: local memory may also hold what no register can, such as an array whose
    elements are chosen at run time. Where a row's elements lie apart, a few bytes cost less than the second of two
    blocks, and with weights than the third of three. How a row is summed does not depend on it.
    """
    few = question.rules.apart.block_local_bytes if question.problem.across else 0
    most = 2 if question.problem.is_weighted else 1
    kept, spilled = plan, question.local_bytes(plan)
    fewer, in_vain = plan, 0
    while spilled and in_vain < STEPS_IN_VAIN:
        blocks = _blocks_with_more_registers(question.limits, fewer)
        if blocks == 0 or (blocks <= most and spilled <= few):
            break
        fewer = replace(fewer, min_blocks=blocks)
        less, in_vain = question.local_bytes(fewer), in_vain + 1
        if less < spilled:
            kept, spilled, in_vain = fewer, less, 0
    return kept


def _blocks_with_more_registers(limits: Limits, plan: Plan) -> int:
    """Return the most blocks below a plan's that leave a thread more registers; 0 if it has all it can have."""
    now = registers_left(limits, plan.block, plan.min_blocks)
    tried = range(plan.min_blocks - 1, 0, -1)
    return next((blocks for blocks in tried if registers_left(limits, plan.block, blocks) > now), 0)


def registers_left(limits: Limits, block: int, blocks: int) -> int:
    """Return how many registers a thread may have so that a multiprocessor holds so many blocks.

    Those of the scheduler that has the most warps: of 22 warps 6, as of 24.
    """
    warps = math.ceil(max(1, blocks) * math.ceil(block / WARP) / SCHEDULERS)
    of_warp = limits.registers_per_sm // SCHEDULERS // warps
    return min(MOST_REGISTERS, of_warp // (WARP * REGISTER_UNIT) * REGISTER_UNIT)


def blocks_at_once(limits: Limits, plan: Plan) -> int:
    """Return how many blocks of a plan the device holds at once, by its resident blocks."""
    if plan.cluster > 1:
        return plan.resident_blocks * plan.ctas_per_row
    return limits.sm_count * plan.resident_blocks


def grid_unit(problem: Problem, plan: Plan) -> int:
    """Return what a grid is a multiple of, in blocks, so that a block's next rows are aligned as its first."""
    if not (plan.persistent and plan.unaligned) or plan.dynamic:
        return plan.ctas_per_row
    rows = 1 if plan.ctas_per_row > 1 else plan.block // plan.group
    return plan.ctas_per_row * (problem.alignment_period // math.gcd(problem.alignment_period, rows))


def all_at_once(question: Question, plan: Plan, grid: int, resident: int, reason: str) -> Plan | None:
    """Return a plan whose blocks all run at once, as they wait for one another; None if the device cannot hold them."""
    at_once = question.limits.sm_count * resident
    if not resident or grid > at_once:
        return None
    return replace(plan, grid=grid, resident_blocks=resident, waves=grid / at_once, why=question.why(reason))
