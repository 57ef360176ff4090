"""Rows whose elements lie apart, and blocks of the whole grid that share them: held in registers, or read again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question
from cupynorm.plan.config import (
    IN_REGISTERS,
    LINE_BYTES,
    NOWHERE,
    REGISTER_BYTES,
    SECTOR_BYTES,
    WARP,
    Plan,
)
from cupynorm.plan.partition import is_power_of_two, power_of_two_to
from cupynorm.plan.variants.tiles import (
    FOR_CLUSTERS,
    FOR_CLUSTERS_GAMMA,
    KINDS,
    MORE_IF_SPILLED,
    elements_held,
    elements_of,
    kinds_of,
    lanes_of,
    most_numbers,
    part_of,
    tiling,
    vector_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def held_over_the_grid(question: Question, *, asked: bool, may_read_again: bool) -> Iterator[Plan]:
    """Give plans of rows in registers of as many blocks of the grid as hold one, which meet in memory.

    asked: also where they are not said to be better. may_read_again: whether blocks of the grid may read rows again.
    """
    problem, numbers = question.problem, question.rules.apart
    kinds = kinds_of(problem) | _in_place_of_clusters(question)
    for size, fewest, most, block, width, blocks, tiles, kind in numbers.over_the_grid:
        asked_of_each = problem.interval_mask and not problem.in_steps
        better = fewest <= problem.cols <= most and not (problem.rounds or asked_of_each)
        if size != problem.load_bytes or not (asked or (better and KINDS[kind] in kinds)):
            continue
        lanes, vector, room = (
            lanes_of(question, width),
            vector_of(question),
            _most_elements_over_the_grid(question),
        )
        least = math.ceil(problem.cols / (block // lanes * room))
        if asked and least == 1 and problem.cols > 1:
            least = 2
        all_tiles, at_once = math.ceil(problem.rows / (lanes * vector)), question.limits.sm_count * blocks
        if not asked and all_tiles < tiles * (at_once // least):  # too few for blocks that go through tiles
            continue
        fewest_blocks, fewest_tiles = numbers.held_over_the_grid
        better_again = (
            may_read_again and least >= fewest_blocks and at_once // least < all_tiles < fewest_tiles
        )
        if better_again and not asked:
            continue  # blocks wait for one another for longer than it takes to read rows again
        ctas = share_of_the_grid(question, least, all_tiles, at_once)
        part = part_of(problem, ctas, block // lanes, vector)
        plan = tiling(question, lanes, ctas, "split", block, part, IN_REGISTERS, vector)
        yield replace(plan, variant="split", min_blocks=blocks)


def _in_place_of_clusters(question: Question) -> set[str]:
    """Return of which KINDS pairs are that clusters share, too: of threads that access all they may, in whole lines."""
    problem = question.problem
    widest = vector_of(question) == question.rules.apart.max_vector[problem.load_bytes]
    whole = problem.across * problem.load_bytes >= 2 * LINE_BYTES
    if not (problem.holds_operands and problem.fields > 1 and widest and whole and question.max_ctas > 1):
        return set()
    return {FOR_CLUSTERS} | ({FOR_CLUSTERS_GAMMA} if len(problem.load_operands) > 1 else set())


def _most_elements_over_the_grid(question: Question) -> int:
    """Return how many elements of each row a thread may have: fewer where what is asked of each takes registers."""
    problem = question.problem
    if problem.rounds:
        return elements_of(question, question.rules.rounds.elements)
    if not problem.in_steps:
        return elements_held(question, question.rules.apart.over_the_grid_any[problem.load_bytes])
    each = problem.fields * (1 + len(problem.epilogue_operands))
    return most_numbers(problem) // vector_of(question) // each


def share_of_the_grid(question: Question, least: int, tiles: int, at_once: int) -> int:
    """Return how many of the blocks that run at once share a tile: `least`, and more where some would be left over."""
    groups = max(1, min(tiles, at_once // least))
    return max(least, min(at_once // groups, question.problem.cols // question.rules.apart.least_part))


def again_over_the_grid(question: Question, *, asked: bool) -> Iterator[Plan]:
    """Give plans of rows that wait nowhere, of which blocks of the whole grid read parts, and meet in memory.

    asked: also where they are not said to be better.
    """
    problem, numbers = question.problem, question.rules.apart
    most_vector, usual, fewer, most_elements = numbers.again_over_the_grid[problem.load_bytes]
    if problem.rounds:
        most_vector = min(most_vector, question.rules.rounds.apart_vector)
    vector = min(problem.vector, most_vector)
    lanes, blocks = _stretch(question, vector)
    tiles = math.ceil(problem.rows / (lanes * vector))
    ctas = _share_that_fills(question, tiles) if asked or _leave_idle(question) else 0
    ctas = ctas or (share_of_the_grid(question, 1, tiles, question.limits.sm_count) if asked else 0)
    if not ctas:
        return
    for block in blocks:
        wanted = (usual if block <= numbers.stretches[0] else fewer) * REGISTER_BYTES // problem.compute_bytes
        elements = min(most_elements, elements_of(question, wanted, vector))
        for each in {max(1, elements >> power): None for power in range(MORE_IF_SPILLED + 1)}:
            plan = tiling(question, lanes, ctas, "split", block, each, NOWHERE, vector)
            yield replace(plan, variant="split", min_blocks=1)


def _share_that_fills(question: Question, tiles: int) -> int:
    """Return how many blocks of the grid share a tile, so that few are left over; 0 if too many are.

    Groups of blocks go through one tile each, or through several.
    """
    sms, parts = question.limits.sm_count, question.problem.cols // question.rules.apart.least_part
    least = question.rules.apart.filled * min(sms, tiles * parts)
    for turns in range(1, question.rules.apart.most_turns + 1):
        ctas = share_of_the_grid(question, 1, math.ceil(tiles / turns), sms)
        if ctas > 1 and tiles * ctas >= turns * least:
            return ctas
    return 0


def _leave_idle(question: Question) -> bool:
    """Say whether clusters that read rows again would leave multiprocessors idle, for longer than the grid meets."""
    problem, numbers = question.problem, question.rules.apart
    fewest_read, least_bytes, blocks_read, fewest_stored, blocks_stored = numbers.left_idle
    tiles = math.ceil(problem.rows / (lanes_of(question, numbers.loops[1]) * vector_of(question)))
    blocks = tiles * question.max_ctas / question.limits.sm_count
    if problem.output_bytes or problem.rounds:
        return problem.cols >= fewest_stored and blocks < blocks_stored
    long = problem.cols >= fewest_read and problem.rows * problem.cols * problem.load_bytes >= least_bytes
    return long and blocks < blocks_read


def _stretch(question: Question, vector: int) -> tuple[int, Sequence[int]]:
    """Return how many threads lie side by side, and how many a block has that accesses whole stretches of memory.

    All rows that are neighbours are a block's, or an even share of them. Each of its accesses to them begins at a line,
    or at a sector, if a block has so many threads. The last number is for devices with less shared memory.
    """
    problem, (usual, enough, most, most_lanes) = question.problem, question.rules.apart.stretches
    neighbours = max(1, problem.across // vector)
    if problem.rounds:  # warps go through as many rounds as their rows ask for
        return power_of_two_to(min(neighbours, WARP)), (usual,)
    lanes = math.ceil(neighbours / math.ceil(neighbours / most_lanes))
    if lanes <= WARP and is_power_of_two(lanes):
        return lanes, (usual,)
    width, fewest = lanes * vector * problem.load_bytes, usual // lanes * lanes
    threads = fewest
    for size in (LINE_BYTES, SECTOR_BYTES):
        unit = size // math.gcd(size, width) * lanes
        if unit <= most:
            threads = usual // unit * unit
            threads = threads if threads >= enough else most // unit * unit
            break
    blocks = (math.ceil(each / WARP) * WARP for each in (threads, fewest))
    return lanes, tuple(dict.fromkeys(blocks))
