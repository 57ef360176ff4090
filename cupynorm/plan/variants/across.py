"""block, cluster, shared, uncached of rows whose elements lie apart from one another: row_across and row_tiles.

A thread has some neighbouring rows, and a warp so many threads side by side that it accesses whole lines; the other
threads share these rows. They wait in registers of one block or of the blocks of a cluster (row/across.cuh), in their
shared memory (row/tiles.cuh), or nowhere (row/across.cuh).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    BYTE_BITS,
    IN_REGISTERS,
    IN_SHARED_MEMORY,
    MAX_NUMBERS_ACROSS,
    MAX_PACKED_ACROSS,
    MESSAGE_NUMBERS,
    NOWHERE,
    PLAIN,
    REGISTER_BYTES,
    WARP,
    Plan,
)
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.plan.partition import in_accesses, is_power_of_two, power_of_two_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynorm.plan.problem import Problem

VARIANTS_ACROSS = ("block", "cluster", "shared", "uncached")
MORE_IF_SPILLED = 2  # plans that are compiled because the first one spills
PACKED_BYTES = 2  # of elements that wait two in a register
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
    fewest, most = question.rules.apart.tiles_between[question.problem.load_bytes]
    kinds = [_as_measured, _in_registers, _again]
    if not question.problem.rounds:  # row_tiles has none
        kinds.insert(0 if fewest <= question.problem.cols <= most else len(kinds), _in_tiles)
    for kind in kinds:
        yield from kind(question, ctas)


def finished(question: Question, plan: Plan, reason: str) -> Plan | None:
    """Return a plan with its shared memory and its launch; None if its kernel cannot hold such rows."""
    problem = question.problem
    part = math.ceil(problem.cols / plan.ctas_per_row)  # as row_across cuts a row
    if plan.waits == IN_REGISTERS and plan.vectors * plan.group < part:
        return None
    rows, several = plan.across * plan.vector, plan.ctas_per_row > 1
    tiles = math.ceil(problem.rows / rows)
    if plan.waits == IN_SHARED_MEMORY:
        plan = replace(plan, full=False, shared_bytes=_tile_bytes(problem, plan))
        return _in_even_turns(with_grid(question, plan, tiles * plan.ctas_per_row, reason), tiles)
    full = plan.waits == IN_REGISTERS and plan.vectors * plan.group * plan.ctas_per_row == problem.cols
    turns = 2 if problem.rounds else 1
    slots = rows * (turns * plan.ctas_per_row * several + plan.block // WARP + 1)
    # what is told of a row in further rounds is no part of row_numbers
    numbers = MESSAGE_NUMBERS if problem.rounds else problem.row_numbers
    needed = slots * in_accesses(numbers * problem.compute_bytes) * (several or plan.block > WARP)
    needed += slots * ACCESS_BYTES * problem.has_scales * (several or plan.block > WARP)
    plan = replace(plan, full=full, shared_bytes=needed)
    return with_grid(question, plan, tiles * plan.ctas_per_row, reason)


def _tile_bytes(problem: Problem, plan: Plan) -> int:
    """Return the shared memory of row_tiles: what waits of a tile, what is reduced, and what is known of its rows."""
    places = math.ceil(math.ceil(problem.cols / plan.ctas_per_row) / plan.group) * plan.block
    rows, several = plan.across * plan.vector, plan.ctas_per_row > 1
    slots = rows * (2 * plan.ctas_per_row * several + plan.block // WARP)
    needed = in_accesses(places * _vector_bytes(problem, plan.vector))
    needed += (slots + rows) * in_accesses(problem.row_numbers * problem.compute_bytes)
    return needed + (slots + rows) * ACCESS_BYTES * problem.has_scales


def _in_even_turns(plan: Plan | None, tiles: int) -> Plan | None:
    """Return a plan whose blocks have as many tiles each as they can: with more blocks some would have one more."""
    if plan is None:
        return None
    at_once = plan.grid // plan.ctas_per_row
    grid = math.ceil(tiles / math.ceil(tiles / at_once)) * plan.ctas_per_row
    return replace(plan, grid=grid, waves=plan.waves * grid / plan.grid)


def is_sound(problem: Problem, plan: Plan) -> bool:
    """Say whether a plan that somebody made asks for nothing that the kernel would do wrong."""
    alone = plan.rows_per_group == plan.alignment_period == 1 and not plan.unaligned
    alone = alone and plan.stages <= (plan.waits == IN_SHARED_MEMORY)
    alone = alone and not (problem.rounds and plan.waits == IN_SHARED_MEMORY)  # row_tiles has none
    alone = alone and not (plan.parameter_cache or plan.row_shared_bytes or problem.column_sums)
    shape = plan.across * plan.group == plan.block and is_power_of_two(plan.across)
    shape = shape and is_power_of_two(plan.block)
    shape = shape and plan.vector * plan.vectors <= most_numbers(problem, plan)
    shape = shape and problem.vector % plan.vector == 0
    clusters = (plan.ctas_per_row > 1) == (plan.variant == "cluster") and is_power_of_two(plan.ctas_per_row)
    waits = {"block": IN_REGISTERS, "shared": IN_SHARED_MEMORY, "uncached": NOWHERE}.get(plan.variant)
    return alone and shape and clusters and plan.waits == (plan.waits if waits is None else waits)


def most_numbers(problem: Problem, plan: Plan) -> int:
    """Return how many numbers a thread may have at a time: more where they wait two in a register."""
    packed = problem.waits_as_loaded and problem.load_bytes == PACKED_BYTES and not problem.has_scales
    return MAX_PACKED_ACROSS if packed and plan.waits == IN_REGISTERS else MAX_NUMBERS_ACROSS


def _vector(question: Question) -> int:
    """Return how many neighbouring rows a thread has."""
    problem = question.problem
    most = question.rules.apart.max_vector[problem.load_bytes]
    return min(problem.vector, most, *((question.rules.rounds.apart_vector,) if problem.rounds else ()))


def _lanes(question: Question, width: int) -> int:
    """Return how many threads lie side by side: their rows take `width` bytes, or are as many as neighbour."""
    problem, vector = question.problem, _vector(question)
    wanted = max(1, width // (problem.load_bytes * vector))
    return power_of_two_to(min(max(1, problem.across // vector), wanted, WARP))


def _lanes_of_a_tile(problem: Problem, vector: int, width: int) -> int:
    """Return how many threads lie side by side in a tile: those of whole accesses also where their rows are apart."""
    wanted, beside = max(1, width // (problem.load_bytes * vector)), problem.across // vector
    if problem.load_bytes * vector == ACCESS_BYTES:
        beside = problem.rows // vector
    return power_of_two_to(min(max(1, beside), wanted, WARP))


def _elements(question: Question, numbers: int) -> int:
    """Return how many elements of each row a thread has of so many numbers: fewer with what is loaded beside x."""
    problem = question.problem
    beside = len(problem.load_operands) + len(problem.epilogue_operands)
    return max(1, numbers // (problem.fields * _vector(question)) // (1 + beside))


def _blocks_of_a_row(question: Question, rows: int, each: Sequence[int]) -> list[int]:
    """Return how many blocks share so many rows, of those that may: more where too few rows are left for the device."""
    problem, numbers = question.problem, question.rules.apart
    tiles, parts = math.ceil(problem.rows / rows), problem.cols // numbers.least_part
    enough = [ctas for ctas in each if ctas * tiles >= question.limits.sm_count or 2 * ctas > parts]
    return enough[:1] or [*each[-1:]]


def _as_measured(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give the tiling that a search found for such rows, if there is one."""
    problem = question.problem
    beside = problem.load_operands or problem.epilogue_operands or problem.may_drop or problem.has_scales
    if beside or problem.rounds or problem.fields > 1:
        return
    for size, fewest, most, vector, block, width, each, blocks in question.rules.apart.measured:
        if size != problem.load_bytes or not fewest <= problem.cols <= most or problem.vector % vector:
            continue
        lanes = width // (size * vector)
        tiles = math.ceil(problem.rows / (lanes * vector))
        # fewer rows side by side, or too few for the device, are no rows such as those
        if each in ctas and lanes * vector <= problem.across and tiles * each >= question.limits.sm_count:
            part = math.ceil(math.ceil(problem.cols / each) / (block // lanes))
            plan = _tiling(question, lanes, each, "block", block, part, IN_REGISTERS, vector)
            yield replace(plan, min_blocks=blocks)


def _in_registers(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    problem, numbers, limits = question.problem, question.rules.apart, question.limits
    most = numbers.numbers[problem.compute_bytes]
    most = min(most, question.rules.rounds.elements) if problem.rounds else most
    found = [(block, width, most_ctas) for block, width, most_ctas in numbers.tilings[problem.load_bytes]]
    alone = [(found[0][0], numbers.alone_width, 1)]
    for block, width, most_ctas in (*alone, *found):
        lanes = _lanes(question, width)
        elements = _elements(question, min(most, limits.registers_per_sm // (2 * block)))
        least = math.ceil(problem.cols / (block // lanes * elements))
        may = [each for each in ctas if least <= each <= max(most_ctas, ctas[0])]
        for each in _blocks_of_a_row(question, lanes * _vector(question), may):
            part = math.ceil(math.ceil(problem.cols / each) / (block // lanes))
            if (
                problem.rounds
                and _registers(question, part, _vector(question)) * block > limits.registers_per_sm
            ):
                continue
            yield _tiling(question, lanes, each, "block", block, part, IN_REGISTERS)


def _in_tiles(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give plans whose rows wait in shared memory: with the fewest blocks that hold tiles of at most so many bytes."""
    problem, numbers, limits = question.problem, question.rules.apart, question.limits
    # what comes beside x has an address for each of a thread's rows, and registers for each element
    beside = len(problem.load_operands) + len(problem.epilogue_operands) + problem.may_drop
    vector = min(problem.vector, (numbers.max_vector if beside else numbers.tile_vector)[problem.load_bytes])
    elements = numbers.tile_numbers[problem.compute_bytes] // (problem.fields * vector * (1 + beside))
    elements = max(1, elements)
    for block, width, most_bytes, most_ctas in numbers.tiles[problem.load_bytes]:
        lanes = _lanes_of_a_tile(problem, vector, width)
        plans = {
            each: _tiling(question, lanes, each, "shared", block, elements, IN_SHARED_MEMORY, vector)
            for each in ctas
            if each <= max(most_ctas, ctas[0])
        }
        most = min(most_bytes, limits.shared_bytes_per_block)
        may = [each for each, plan in plans.items() if _tile_bytes(problem, plan) <= most]
        for each in _blocks_of_a_row(question, lanes * vector, may):
            yield plans[each]


def _again(question: Question, ctas: Sequence[int]) -> Iterator[Plan]:
    """Give plans whose rows wait nowhere: threads go through their part of a row twice, some elements at a time."""
    problem, numbers = question.problem, question.rules.apart
    block, width = numbers.loops
    lanes = _lanes(question, width)
    elements = _elements(question, numbers.again[problem.compute_bytes])
    for least in range(len(ctas)):
        for each in _blocks_of_a_row(question, lanes * _vector(question), ctas[least:]):
            yield _tiling(question, lanes, each, "uncached", block, elements, NOWHERE)


def _tiling(
    question: Question,
    lanes: int,
    ctas: int,
    variant: str,
    block: int,
    elements: int,
    waits: int,
    vector: int = 0,
) -> Plan:
    limits, vector = question.limits, vector or _vector(question)
    tiles = waits == IN_SHARED_MEMORY
    needed = _registers(question, elements, vector, tiles=tiles)
    resident = max(1, min(limits.threads_per_sm // block, limits.registers_per_sm // (needed * block)))
    plan = replace(
        PLAIN,
        variant="cluster" if ctas > 1 else variant,
        vector=vector,
        vectors=elements,
        group=block // lanes,
        ctas_per_row=ctas,
        block=block,
        across=lanes,
        waits=waits,
        stages=int(tiles),
    )
    if tiles:
        held = _tile_bytes(question.problem, plan) + STATIC_SHARED_BYTES
        resident = max(1, min(resident, limits.shared_bytes_per_sm // held))
    return replace(plan, min_blocks=min(resident, limits.blocks_per_sm))


def _registers(question: Question, elements: int, vector: int, *, tiles: bool = False) -> int:
    """Return how many registers a thread wants that loads so many elements of each of its rows at a time."""
    problem, numbers = question.problem, question.rules.apart
    loaded = sum(max(REGISTER_BYTES, size) for size in (*problem.load_operands, *problem.epilogue_operands))
    each = (problem.value_bytes + loaded) // REGISTER_BYTES
    rounds = question.rules.rounds.apart_row_registers * problem.compute_bytes // REGISTER_BYTES
    rounds *= problem.rounds
    few = numbers.tile_registers[problem.compute_bytes] if tiles else numbers.registers
    return few + vector * (numbers.row_registers + rounds + elements * each)


def _vector_bytes(problem: Problem, vector: int) -> int:
    """Return the bytes of neighbouring rows' elements that wait in shared memory, with what a mask keeps of them."""
    each = problem.load_bytes if problem.waits_as_loaded else problem.value_bytes
    return vector * each + problem.may_drop * math.ceil(vector / BYTE_BITS)
