"""The question that is put to every variant, and the launch that follows from its answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AMPERE,
    HOPPER,
    LARGE_CLUSTERS,
    MAX_CTAS,
    MAX_DYNAMIC_ROWS,
    MAX_GRID,
    ONE_BLOCK_PER_ROW,
    PORTABLE_CTAS,
    UNALIGNED_APART,
    Plan,
)

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits
    from cupynorm.plan.problem import Problem
    from cupynorm.plan.rules import Rule, Rules

# (plan without its grid) -> blocks that a multiprocessor holds at once, or, of clusters, how many the device does; 0:
# it cannot be launched.
Occupancy = Callable[[Plan], int]


class Question(NamedTuple):
    """A question to a variant: a plan for a problem, on a device, by the rules of its architecture."""

    problem: Problem
    limits: Limits
    rules: Rules
    occupancy: Occupancy

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
        if isinstance(reason, str):
            return reason
        stands_in = "" if self.measured else f", which stands in for sm_{self.limits.compute_capability}"
        return f"rule {reason.id} of {self.rules.file}{stands_in}"


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
    resident = question.occupancy(plan)
    if resident == 0 or (plan.dynamic and problem.rows > MAX_DYNAMIC_ROWS):
        return None
    plan = dataclasses.replace(plan, resident_blocks=resident)
    at_once = blocks_at_once(limits, plan)
    waves = min(1.0, waves) if plan.persistent else waves
    most = int(max(1, min(at_once * waves, MAX_GRID)))
    unit = blocks_of_one_turn(problem, plan)
    if most < unit:
        return None  # also where no block has a next row: whether a plan fits does not depend on the number of rows
    grid = blocks if blocks <= most else most // unit * unit
    return dataclasses.replace(plan, grid=grid, waves=grid / at_once, why=question.why(reason))


def blocks_at_once(limits: Limits, plan: Plan) -> int:
    """Return how many blocks of a plan the device holds at once, by its resident blocks."""
    if plan.cluster > 1:
        return plan.resident_blocks * plan.ctas_per_row
    return limits.sm_count * plan.resident_blocks


def blocks_of_one_turn(problem: Problem, plan: Plan) -> int:
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
    return dataclasses.replace(
        plan, grid=grid, resident_blocks=resident, waves=grid / at_once, why=question.why(reason)
    )
