"""block, cluster, shared, uncached of rows whose elements lie apart from one another: row_across of row/across.cuh.

A block has some neighbouring rows side by side, so that a warp accesses whole lines, and its threads share each of
them. A row waits in registers of one block or of the blocks of a cluster, in shared memory, or nowhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import MESSAGE_NUMBERS, PLAIN, REGISTER_BYTES, Plan
from cupynorm.plan.partition import in_accesses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.plan.problem import Problem

VARIANTS_ACROSS = ("block", "cluster", "shared", "uncached")
WHY = "rows whose elements lie apart: the first tiling in turn that holds a row"


def across(question: Question, variant: str | None = None) -> Plan | None:
    """Return the first plan in turn that can be launched, or the first of a variant; None if there is none."""
    found = (finished(question, plan, WHY) for plan in tilings(question) if variant in {None, plan.variant})
    return next((plan for plan in found if plan is not None), None)


def tilings(question: Question) -> Iterator[Plan]:
    """Give plans without their launch, best first: those that hold a row in registers, in shared memory, nowhere."""
    for width in _widths(question):
        for ctas in _blocks_of_a_row(question, width):
            yield from _in_registers(question, width, ctas)
    for width in _widths(question):
        for ctas in _blocks_of_a_row(question, width):
            yield from _in_shared_memory(question, width, ctas)
    width = _widths(question)[-1]
    for ctas in _blocks_of_a_row(question, width):
        yield _uncached(question, width, ctas)


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows."""
    problem, limits = question.problem, question.limits
    part = _part(problem, plan.ctas_per_row)
    needed = 0
    if plan.row_shared_bytes:
        places = math.ceil(part / plan.group) * plan.block
        needed = in_accesses(places * _waiting_bytes(problem))
        if needed > plan.row_shared_bytes:
            return None
    elif plan.full and plan.vectors * plan.group < part:
        return None
    messages = plan.block * (plan.group > 1) + plan.ctas_per_row * plan.across * (plan.ctas_per_row > 1)
    needed += messages * MESSAGE_NUMBERS * problem.compute_bytes * (2 if problem.has_scales else 1)
    if needed > limits.shared_bytes_per_block:
        return None
    plan = replace(plan, shared_bytes=needed)
    tiles = math.ceil(problem.rows / plan.across)
    return with_grid(question, plan, tiles * plan.ctas_per_row, reason)


def is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan that somebody made asks for nothing that the kernel would do wrong."""
    alone = plan.vector == plan.rows_per_group == plan.alignment_period == 1 and not plan.unaligned
    alone = alone and not plan.stages and not plan.parameter_cache and not problem.column_sums
    shape = plan.group > 0 and plan.across * plan.group == plan.block and plan.vectors <= MAX_ELEMENTS
    clusters = (plan.ctas_per_row > 1) == (plan.variant == "cluster")
    waits = {
        "block": plan.full and not plan.row_shared_bytes,
        "shared": plan.row_shared_bytes > 0 and not plan.full,
        "uncached": not plan.full and not plan.row_shared_bytes,
        "cluster": not (plan.full and plan.row_shared_bytes),
    }
    return alone and shape and clusters and waits.get(plan.variant, False)


MAX_ELEMENTS = 32  # of a thread: a bit for each (row/across.cuh)


def _part(problem: Problem, ctas: int) -> int:
    """Return the columns of the largest of so many parts of a row, as row_across cuts it."""
    return math.ceil(problem.cols / ctas)


def _widths(question: Question) -> list[int]:
    """Return how many rows to have side by side: as many as neighbour one another, but no more than a line has."""
    problem = question.problem
    found = (max(1, size // problem.load_bytes) for size in question.rules.apart.widths)
    return list(dict.fromkeys(min(problem.across, each) for each in found))


def _blocks_of_a_row(question: Question, width: int) -> list[int]:
    """Return how many blocks may share a row, best first: more where there are too few rows to fill the device."""
    problem = question.problem
    least = question.rules.apart.least_part
    each = [1 << power for power in range(question.max_ctas.bit_length())]
    tiles, most = math.ceil(problem.rows / width), max(1, problem.cols // least)
    enough = [ctas for ctas in each if ctas * tiles >= question.limits.sm_count or 2 * ctas > most]
    return enough + [ctas for ctas in reversed(each) if ctas not in enough]


def _in_registers(question: Question, width: int, ctas: int) -> Iterator[Plan]:
    problem, numbers = question.problem, question.rules.apart
    part = _part(problem, ctas)
    for elements in numbers.elements[problem.compute_bytes]:
        held = max(1, elements // problem.fields)
        plan = _tiling(question, width, ctas, min(held, part), math.ceil(part / held))
        if plan.block <= numbers.block[problem.compute_bytes]:
            yield replace(plan, variant="cluster" if ctas > 1 else "block", full=True)
            return


def _in_shared_memory(question: Question, width: int, ctas: int) -> Iterator[Plan]:
    problem, limits, numbers = question.problem, question.limits, question.rules.apart
    room = limits.shared_bytes_per_sm // numbers.shared_blocks - limits.reserved_shared_bytes
    plan = _again(question, width, ctas)
    places = math.ceil(_part(problem, ctas) / plan.group) * plan.block
    needed = in_accesses(places * _waiting_bytes(problem))
    if needed <= min(room, limits.shared_bytes_per_block):
        yield replace(plan, variant="cluster" if ctas > 1 else "shared", row_shared_bytes=needed)


def _uncached(question: Question, width: int, ctas: int) -> Plan:
    return replace(_again(question, width, ctas), variant="cluster" if ctas > 1 else "uncached")


def _again(question: Question, width: int, ctas: int) -> Plan:
    """Return a plan whose threads go through their part of a row, some elements at a time."""
    problem, numbers = question.problem, question.rules.apart
    each = max(1, numbers.again[problem.compute_bytes] // problem.fields)
    threads = max(1, numbers.block[problem.compute_bytes] // width)
    needed = math.ceil(_part(problem, ctas) / each)
    return _tiling(question, width, ctas, each, min(threads, needed))


def _tiling(question: Question, width: int, ctas: int, elements: int, group: int) -> Plan:
    """Return a plan of so many threads for each row, with more rows side by side where these are few threads."""
    problem, numbers, limits = question.problem, question.rules.apart, question.limits
    while width * group < numbers.least_block and width < problem.rows:
        width *= 2
    block = width * group
    needed = numbers.registers + elements * (problem.value_bytes + _loaded_bytes(problem)) // REGISTER_BYTES
    resident = max(1, min(limits.threads_per_sm // max(1, block), limits.registers_per_sm // (needed * block)))
    return replace(
        PLAIN,
        vectors=elements,
        group=group,
        ctas_per_row=ctas,
        block=block,
        across=width,
        min_blocks=min(resident, limits.blocks_per_sm),
    )


def _loaded_bytes(problem: Problem) -> int:
    """Return the bytes of registers that hold what is loaded with an element: each in a register of its own."""
    beside = (problem.load_bytes, *problem.load_operands, *problem.epilogue_operands)
    return sum(max(REGISTER_BYTES, size) for size in beside)


def _waiting_bytes(problem: Problem) -> int:
    """Return the bytes of an element that waits in shared memory, with a byte of whether it is kept (WaitingRow)."""
    masked = not (problem.direct_load or problem.parameter_bytes)
    return (problem.load_bytes if problem.waits_as_loaded else problem.value_bytes) + masked
