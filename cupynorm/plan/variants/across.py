"""block, cluster, shared, uncached of rows whose elements lie apart from one another: row_across of row/across.cuh.

A thread has some neighbouring rows, and a warp so many threads side by side that it accesses whole lines; the other
threads share these rows. They wait in registers of one block or of the blocks of a cluster, in shared memory, or
nowhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    IN_REGISTERS,
    IN_SHARED_MEMORY,
    MESSAGE_NUMBERS,
    NOWHERE,
    PLAIN,
    REGISTER_BYTES,
    WARP,
    Plan,
)
from cupynorm.plan.partition import in_accesses, is_power_of_two, power_of_two_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.plan.problem import Problem

VARIANTS_ACROSS = ("block", "cluster", "shared", "uncached")
WHY = "rows whose elements lie apart: the first tiling in turn that holds a row"
MAX_NUMBERS = 64  # of a thread: a bit for each (row/across.cuh)


def across(question: Question, variant: str | None = None) -> Plan | None:
    """Return the first plan in turn that can be launched, or the first of a variant; None if there is none."""
    found = (finished(question, plan, WHY) for plan in tilings(question) if variant in {None, plan.variant})
    return next((plan for plan in found if plan is not None), None)


def tilings(question: Question) -> Iterator[Plan]:
    """Give plans without their launch, best first: those that hold a row in registers, in shared memory, nowhere."""
    places = [(lanes, ctas) for lanes in _lanes(question) for ctas in _blocks_of_a_row(question, lanes)]
    for lanes, ctas in places:
        yield from _in_registers(question, lanes, ctas)
    for lanes, ctas in places:
        yield from _in_shared_memory(question, lanes, ctas)
    lanes = _lanes(question)[-1]
    for ctas in _blocks_of_a_row(question, lanes):
        yield _again(question, lanes, ctas, "uncached")


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
    needed += messages * MESSAGE_NUMBERS * problem.compute_bytes * (2 if problem.has_scales else 1)
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
    shape = shape and plan.vector * plan.vectors <= MAX_NUMBERS and problem.vector % plan.vector == 0
    clusters = (plan.ctas_per_row > 1) == (plan.variant == "cluster") and is_power_of_two(plan.ctas_per_row)
    waits = {"block": IN_REGISTERS, "shared": IN_SHARED_MEMORY, "uncached": NOWHERE}.get(plan.variant)
    return alone and shape and clusters and plan.waits == (plan.waits if waits is None else waits)


def _vector(question: Question) -> int:
    """Return how many neighbouring rows a thread has."""
    problem = question.problem
    return min(problem.vector, question.rules.apart.max_vector[problem.load_bytes])


def _lanes(question: Question) -> list[int]:
    """Return how many threads may lie side by side: their rows are as many as neighbour one another, or a line's."""
    problem, vector = question.problem, _vector(question)
    found = (max(1, size // (problem.load_bytes * vector)) for size in question.rules.apart.widths)
    neighbours = max(1, problem.across // vector)
    return list(dict.fromkeys(power_of_two_to(min(neighbours, each, WARP)) for each in found))


def _blocks_of_a_row(question: Question, lanes: int) -> list[int]:
    """Return how many blocks may share a row, best first: more where there are too few rows to fill the device."""
    problem = question.problem
    least = question.rules.apart.least_part
    each = [1 << power for power in range(question.max_ctas.bit_length())]
    tiles, most = math.ceil(problem.rows / (lanes * _vector(question))), max(1, problem.cols // least)
    enough = [ctas for ctas in each if ctas * tiles >= question.limits.sm_count or 2 * ctas > most]
    return enough + [ctas for ctas in reversed(each) if ctas not in enough]


def _in_registers(question: Question, lanes: int, ctas: int) -> Iterator[Plan]:
    problem, numbers, vector = question.problem, question.rules.apart, _vector(question)
    part = math.ceil(problem.cols / ctas)
    for held in numbers.elements[problem.compute_bytes]:
        most = max(1, held // (problem.fields * vector))
        for block in numbers.blocks[problem.compute_bytes]:
            elements = math.ceil(part / (block // lanes))
            if elements <= most:
                yield _tiling(question, lanes, ctas, "block", block, elements, IN_REGISTERS)
                return


def _in_shared_memory(question: Question, lanes: int, ctas: int) -> Iterator[Plan]:
    problem, limits = question.problem, question.limits
    room = limits.shared_bytes_per_sm // question.rules.apart.shared_blocks - limits.reserved_shared_bytes
    plan = _again(question, lanes, ctas, "shared")
    places = math.ceil(math.ceil(problem.cols / ctas) / plan.group) * plan.block * plan.vector
    if places * _waiting_bytes(problem) <= min(room, limits.shared_bytes_per_block):
        yield plan


def _again(question: Question, lanes: int, ctas: int, variant: str) -> Plan:
    """Return a plan whose threads go through their part of a row, some elements at a time."""
    problem, numbers = question.problem, question.rules.apart
    elements = max(1, numbers.again[problem.compute_bytes] // (problem.fields * _vector(question)))
    part = math.ceil(problem.cols / ctas)
    each = numbers.blocks[problem.compute_bytes]
    block = next((size for size in each if elements * (size // lanes) >= part), each[-1])
    waits = IN_SHARED_MEMORY if variant == "shared" else NOWHERE
    return _tiling(question, lanes, ctas, variant, block, elements, waits)


def _tiling(
    question: Question, lanes: int, ctas: int, variant: str, block: int, elements: int, waits: int
) -> Plan:
    problem, numbers, limits = question.problem, question.rules.apart, question.limits
    vector = _vector(question)
    loaded = sum(max(REGISTER_BYTES, size) for size in (*problem.load_operands, *problem.epilogue_operands))
    each = problem.value_bytes + problem.load_bytes + loaded
    needed = numbers.registers + vector * (numbers.row_registers + elements * each // REGISTER_BYTES)
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


def _waiting_bytes(problem: Problem) -> int:
    """Return the bytes of an element that waits in shared memory, with a byte of whether it is kept (WaitingRow)."""
    masked = not (problem.direct_load or problem.parameter_bytes)
    return (problem.load_bytes if problem.waits_as_loaded else problem.value_bytes) + masked
