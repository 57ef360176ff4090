"""block, cluster, shared, uncached of rows whose elements lie apart from one another: row_across of row/across.cuh.

A thread has some neighbouring rows, and a warp so many threads side by side that it accesses whole lines; the other
threads share these rows. They wait in registers of one block or of the blocks of a cluster, in shared memory, or
nowhere.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    IN_REGISTERS,
    IN_SHARED_MEMORY,
    MAX_NUMBERS_ACROSS,
    MESSAGE_NUMBERS,
    NOWHERE,
    PLAIN,
    REGISTER_BYTES,
    ROUNDS_ELEMENTS,
    ROUNDS_ROW_REGISTERS,
    ROUNDS_VECTOR,
    WARP,
    Plan,
)
from cupynorm.plan.partition import in_accesses, is_power_of_two, power_of_two_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynorm.plan.problem import Problem

VARIANTS_ACROSS = ("block", "cluster", "shared", "uncached")
MORE_IF_SPILLED = 2  # plans that are compiled because the first one spills
WHY = "rows whose elements lie apart: the first tiling in turn that holds a row"


def across(question: Question, variant: str | None = None) -> Plan | None:
    """Return the first plan in turn that can be launched, or the first of a variant; None if there is none.

    One whose compiled kernel spills even with one block a multiprocessor is taken if the next ones spill, too, or read
    the row again, which takes longer.
    """
    found = (
        finished(question, plan, WHY)
        for plan in tilings(question, variant)
        if variant in {None, plan.variant}
    )
    plans = list(itertools.islice((plan for plan in found if plan is not None), 1))
    if plans and question.local_bytes(plans[0]):
        more = itertools.islice((plan for plan in found if plan is not None), MORE_IF_SPILLED)
        plans += [plan for plan in more if plan.waits]
    return min(plans, key=lambda plan: question.local_bytes(plan) > 0, default=None)


def tilings(question: Question, variant: str | None = None) -> Iterator[Plan]:
    """Give plans without their launch, best first: those that hold a row in registers, in shared memory, nowhere.

    variant: whose plans are among them; None for all.
    """
    ctas = [1 << power for power in range(question.max_ctas.bit_length())]
    if variant is not None:
        ctas = ctas[1:] if variant == "cluster" else ctas[:1]
    yield from _in_registers(question, ctas)
    yield from _again(question, ctas, IN_SHARED_MEMORY)
    yield from _again(question, ctas, NOWHERE)


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows."""
    problem = question.problem
    part = math.ceil(problem.cols / plan.ctas_per_row)  # as row_across cuts a row
    if plan.waits == IN_REGISTERS and plan.vectors * plan.group < part:
        return None
    full = plan.waits == IN_REGISTERS and plan.vectors * plan.group * plan.ctas_per_row == problem.cols
    needed = 0
    if plan.waits == IN_SHARED_MEMORY:
        needed = in_accesses(
            math.ceil(part / plan.group) * plan.block * plan.vector * _waiting_bytes(problem)
        )
    rows, several = plan.across * plan.vector, plan.ctas_per_row > 1
    messages = rows * (
        plan.ctas_per_row * several + (plan.block // WARP + 1) * (several or plan.block > WARP)
    )
    twice = problem.has_scales or problem.rounds
    needed += messages * MESSAGE_NUMBERS * problem.compute_bytes * (2 if twice else 1)
    plan = replace(plan, full=full, shared_bytes=needed)
    tiles = math.ceil(problem.rows / rows)
    return with_grid(question, plan, tiles * plan.ctas_per_row, reason)


def is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan that somebody made asks for nothing that the kernel would do wrong."""
    alone = plan.rows_per_group == plan.alignment_period == 1 and not plan.unaligned
    alone = alone and not (
        plan.stages or plan.parameter_cache or plan.row_shared_bytes or problem.column_sums
    )
    shape = plan.across * plan.group == plan.block and is_power_of_two(plan.across)
    shape = shape and plan.vector * plan.vectors <= MAX_NUMBERS_ACROSS and problem.vector % plan.vector == 0
    clusters = (plan.ctas_per_row > 1) == (plan.variant == "cluster") and is_power_of_two(plan.ctas_per_row)
    waits = {"block": IN_REGISTERS, "shared": IN_SHARED_MEMORY, "uncached": NOWHERE}.get(plan.variant)
    return alone and shape and clusters and plan.waits == (plan.waits if waits is None else waits)


def _vector(question: Question) -> int:
    """Return how many neighbouring rows a thread has."""
    problem = question.problem
    most = question.rules.apart.max_vector[problem.load_bytes]
    return min(problem.vector, most, *((ROUNDS_VECTOR,) if problem.rounds else ()))


def _lanes(question: Question, width: int) -> int:
    """Return how many threads lie side by side: their rows take `width` bytes, or are as many as neighbour."""
    problem, vector = question.problem, _vector(question)
    wanted = max(1, width // (problem.load_bytes * vector))
    return power_of_two_to(min(max(1, problem.across // vector), wanted, WARP))


def _elements(question: Question, numbers: int) -> int:
    """Return how many elements of each row a thread has of so many numbers: fewer with what is loaded beside x."""
    problem = question.problem
    beside = len(problem.load_operands) + len(problem.epilogue_operands)
    return max(1, numbers // (problem.fields * _vector(question)) // (1 + beside))


def _blocks_of_a_row(question: Question, lanes: int, each: Sequence[int]) -> list[int]:
    """Return how many blocks share a row, of those that may: more where there are too few rows to fill the device."""
    problem, numbers = question.problem, question.rules.apart
    tiles, parts = math.ceil(problem.rows / (lanes * _vector(question))), problem.cols // numbers.least_part
    enough = [ctas for ctas in each if ctas * tiles >= question.limits.sm_count or 2 * ctas > parts]
    return enough[:1] or [*each[-1:]]


def _in_registers(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    problem, numbers, limits = question.problem, question.rules.apart, question.limits
    most = numbers.numbers[problem.compute_bytes]
    most = min(most, ROUNDS_ELEMENTS) if problem.rounds else most
    found = [(block, width, most_ctas) for block, width, most_ctas in numbers.tilings[problem.load_bytes]]
    alone = [(found[0][0], numbers.alone_width, 1)]
    for block, width, most_ctas in (*alone, *found):
        lanes = _lanes(question, width)
        elements = _elements(question, min(most, limits.registers_per_sm // (2 * block)))
        least = math.ceil(problem.cols / (block // lanes * elements))
        may = [each for each in ctas if least <= each <= max(most_ctas, ctas[0])]
        for each in _blocks_of_a_row(question, lanes, may):
            part = math.ceil(math.ceil(problem.cols / each) / (block // lanes))
            if problem.rounds and _registers(question, part) * block > limits.registers_per_sm:
                continue
            yield _tiling(question, lanes, each, "block", block, part, IN_REGISTERS)


def _again(question: Question, ctas: Sequence[int], waits: int) -> Iterator[Plan]:
    """Give plans whose threads go through their part of a row, some elements at a time."""
    problem, limits, numbers = question.problem, question.limits, question.rules.apart
    block, width = numbers.loops
    lanes = _lanes(question, width)
    elements = _elements(question, numbers.again[problem.compute_bytes])
    room = limits.shared_bytes_per_sm // numbers.shared_blocks - limits.reserved_shared_bytes
    for least in range(len(ctas)):
        variant = "shared" if waits else "uncached"
        for each in _blocks_of_a_row(question, lanes, ctas[least:]):
            plan = _tiling(question, lanes, each, variant, block, elements, waits)
            places = math.ceil(math.ceil(problem.cols / each) / plan.group) * plan.block * plan.vector
            if not waits or places * _waiting_bytes(problem) <= min(room, limits.shared_bytes_per_block):
                yield plan


def _tiling(
    question: Question, lanes: int, ctas: int, variant: str, block: int, elements: int, waits: int
) -> Plan:
    limits, vector, needed = question.limits, _vector(question), _registers(question, elements)
    resident = max(1, min(limits.threads_per_sm // block, limits.registers_per_sm // (needed * block)))
    return replace(
        PLAIN,
        variant="cluster" if ctas > 1 else variant,
        vector=vector,
        vectors=elements,
        group=block // lanes,
        ctas_per_row=ctas,
        block=block,
        across=lanes,
        waits=waits,
        min_blocks=min(resident, limits.blocks_per_sm),
    )


def _registers(question: Question, elements: int) -> int:
    """Return how many registers a thread wants that loads so many elements of each of its rows at a time."""
    problem, numbers = question.problem, question.rules.apart
    loaded = sum(max(REGISTER_BYTES, size) for size in (*problem.load_operands, *problem.epilogue_operands))
    each = (problem.value_bytes + loaded) // REGISTER_BYTES
    rounds = ROUNDS_ROW_REGISTERS * problem.compute_bytes // REGISTER_BYTES if problem.rounds else 0
    return numbers.registers + _vector(question) * (numbers.row_registers + rounds + elements * each)


def _waiting_bytes(problem: Problem) -> int:
    """Return the bytes of an element that waits in shared memory, with a byte of whether it is kept (WaitingRow)."""
    return (problem.load_bytes if problem.waits_as_loaded else problem.value_bytes) + problem.may_drop
