"""How a row is cut among threads and blocks: the same arithmetic as in the kernels, whose names stand beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AT_USE,
    BOTH,
    BYTE_BITS,
    CONVERTED,
    CONVERTED_ELEMENTS,
    EDGE_VECTORS,
    HALF_BYTES,
    LINE_BYTES,
    MAX_ALONE_ELEMENTS,
    MAX_FUSED_ELEMENTS,
    PLAIN,
    REGISTER_BYTES,
    SHARED,
    SHARED_OF_VECTORS,
    WARP,
    in_accesses,
)

if TYPE_CHECKING:
    from cupynorm.plan.config import Plan
    from cupynorm.plan.problem import Problem


def is_power_of_two(value: int) -> bool:
    """Say whether a positive number is a power of two."""
    return value & (value - 1) == 0


def power_of_two_from(value: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << max(0, value - 1).bit_length()


def power_of_two_to(value: int) -> int:
    """Return the largest power of two that is no more."""
    return 1 << max(1, value).bit_length() - 1


def most_elements(problem: Problem) -> int:
    """Return how many elements of a row a thread may hold in registers where something is fused."""
    if problem.is_of_pairs:
        return MAX_ALONE_ELEMENTS // problem.fields
    alone = not (problem.masked or problem.load_operands or problem.epilogue_operands)
    quantized = alone and problem.output_bytes == 1 and problem.parameter_bytes
    more = bool(problem.parameter_bytes) or problem.only_scaled
    most = MAX_ALONE_ELEMENTS if quantized else MAX_FUSED_ELEMENTS[more]
    return most // problem.fields


def alignment_period(problem: Problem, rows_per_group: int) -> int:
    """Return the period that a kernel is built for: rows that are in work one at a time need none."""
    return problem.alignment_period if problem.unaligned and rows_per_group > 1 else 1


def least_group(problem: Problem) -> int:
    """Return how many threads an unaligned row takes at least.

    Head and tail elements are one for each of the first threads; a thread's vectors of parameters are whole accesses
    apart.
    """
    if not problem.unaligned:
        return 1
    return max(power_of_two_from(2 * problem.vector - 2), CONVERTED_ELEMENTS // problem.vector)


def shared_bytes(problem: Problem, parts: int = 1) -> int:
    """Return the shared memory of the largest of so many parts of a row (part_of in staged.cuh).

    Parts of unaligned rows are cut in lines, of which the last part has what is left over.
    """
    vectors = math.ceil(problem.vectors / parts)
    if problem.unaligned:
        line = LINE_BYTES // problem.vector_bytes
        vectors = (problem.vectors // line // parts + 1) * line
    return in_accesses(vectors * problem.vector_bytes)


def computed_bytes(problem: Problem, vector: int) -> int:
    """Return the shared memory of a row that waits as it was loaded or computed (WaitingRow in computed.cuh)."""
    element = problem.load_bytes if problem.waits_as_loaded else problem.value_bytes
    # a bit for each element, in whole bytes
    bits = problem.may_drop * math.ceil(vector / BYTE_BITS)
    places = problem.cols // vector  # as places_of in computed.cuh
    if problem.most_kept:
        places = min(places, (problem.most_kept + 2 * vector - 2) // vector)
    if problem.most_kept or problem.unaligned:
        places += LINE_BYTES // ACCESS_BYTES - 1
    return in_accesses(places * (vector * element + bits))


def line_vectors(problem: Problem, parts: int) -> tuple[int, int]:
    """Return the fewest and most vectors of a part of an unaligned row, cut in lines (share_of in registers.cuh)."""
    line = LINE_BYTES // problem.load_bytes
    each, longer = divmod((problem.cols - line + 1) // line, parts)
    vectors = line // problem.vector  # of a line
    last = problem.vectors - vectors * (each * (parts - 1) + longer)
    return vectors * each, max(vectors * (each + (longer > 0)), last)


def converted_bytes(problem: Problem, vector: int, parts: int = 1) -> int:
    """Return the shared memory of a block's converted parameters (ParametersConverted in converted_columns.cuh).

    That is with the room behind each vector, which keeps neighbouring threads out of one bank.
    """
    if not problem.parameter_bytes:
        return 0
    number = problem.compute_bytes * len(problem.parameter_bytes)
    if parts > 1 and problem.parameter_bytes == (HALF_BYTES, HALF_BYTES):
        number = sum(problem.parameter_bytes)  # as they are
    room = 1 if problem.unaligned else ACCESS_BYTES // number if vector * number > ACCESS_BYTES else 0
    cols = problem.cols
    if parts > 1:  # head and tail of its part are a block's as well, however the row is aligned
        cols = line_vectors(problem, parts)[1] * vector + LINE_BYTES // problem.load_bytes
    return in_accesses((cols + cols // vector * room) * number)


def threads_with_vectors(problem: Problem, parts: int, block: int) -> int:
    """Return how many threads a block of shared, cluster or uncached may have, of `block` at most.

    Each warp of LayerNorm takes its shift from an element of its first vector, so every warp must have one. Blocks of
    fewer threads than EDGE_VECTORS vectors have elements count from the row's begin, others from its first line.
    """
    threads = EDGE_VECTORS * problem.vector
    if not problem.unaligned or problem.vectors // parts >= threads + LINE_BYTES // ACCESS_BYTES:
        return block
    if (
        parts > 1 and threads <= 2 * WARP
    ):  # what is behind all vectors is another block's: one warp holds the rest
        return block
    return min(block, max(1, (threads - 1) // WARP) * WARP)


def in_registers(problem: Problem, plan: Plan) -> Plan:
    """Return a plan in registers with what follows from the problem and from the threads that share a row."""
    whole = problem.vectors if problem.unaligned else problem.cols // plan.vector
    parts = plan.ctas_per_row
    lines = plan.dynamic and plan.unaligned
    share = line_vectors(problem, parts)[1] if lines else math.ceil(whole / parts)
    vectors = max(1, math.ceil(share / plan.group))
    full = not problem.unaligned and parts * plan.group * vectors == whole
    prefetched_bytes = ACCESS_BYTES + plan.vector * problem.staged_operand_bytes
    rows = plan.stages * plan.rows_per_group
    rows += problem.column_sums > 0 and rows > 0  # one waits there while the next is summarised
    rows *= vectors * plan.block * prefetched_bytes
    parameters = 0
    if plan.parameter_cache in (SHARED, BOTH):
        struct_bytes = sum(
            max(REGISTER_BYTES, size * plan.vector) for size in problem.parameter_bytes
        )  # of whole words
        held = vectors if plan.parameter_cache == SHARED else vectors // SHARED_OF_VECTORS
        parameters = held * plan.block * in_accesses(struct_bytes)
    elif plan.parameter_cache == CONVERTED:
        parameters = converted_bytes(problem, plan.vector, parts)
    return replace(plan, vectors=vectors, full=full, shared_bytes=rows + parameters)


def by_whole_blocks(
    problem: Problem, ctas: int, block: int, stages: int = 0, parameter_cache: int = AT_USE
) -> Plan:
    """Return the plan of rows in the registers of all threads of so many blocks: of a cluster, or of one."""
    plan = replace(
        PLAIN,
        variant="cluster" if ctas > 1 else "block",
        vector=problem.vector,
        unaligned=problem.unaligned,
        ctas_per_row=ctas,
        block=block,
        group=block,
        stages=stages,
        parameter_cache=parameter_cache,
    )
    return in_registers(problem, plan)


def blocks_of(problem: Problem, plan: Plan) -> int:
    """Return how many blocks hold all rows of a plan in registers."""
    unit = plan.alignment_period * plan.rows_per_group
    rows = math.ceil(problem.rows / unit) * unit if plan.unaligned else problem.rows
    return math.ceil(rows / (plan.block // plan.group * plan.rows_per_group)) * plan.ctas_per_row


def words(problem: Problem, elements: int, *, cached: bool) -> int:
    """Return the registers of a thread's values; if cached, with the parameters as they were loaded."""
    values = elements * problem.value_bytes // REGISTER_BYTES
    if cached:
        each = sum(max(1, size * problem.vector // REGISTER_BYTES) for size in problem.parameter_bytes)
        values += elements // problem.vector * each
    return values
