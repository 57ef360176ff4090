"""What was measured of kernels whose tilings are weighed against one another, and tilings that a search found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ColumnSums(NamedTuple):
    """Rows whose sums over rows are taken in the same pass (variants/summed.py).

    Attributes
    ----------
    blocks
        Threads of a block of several rows, all of which are tried.
    large_block, large_block_vectors
        More threads of such a block have too few registers for doubles, and for more vectors of a thread than these.
    clusters, large_clusters
        What a cluster's tiling is worth, of that of one block; and where it has as many blocks as may be, of which
        fewer multiprocessors are reached.
    multiprocessors, reached_by_clusters
        For which tilings are weighed; on so many of them clusters run: some have too few neighbours left.
    cluster_threads
        Threads of a cluster's block, at least.
    stages, stages_of_registers
        Rows on their way in shared memory, at most; and where rows wait in registers.
    converted_twice
        What a tiling is worth whose rows wait in shared memory, of that of one whose rows wait in registers.
    max_vectors, max_elements, staged_elements
        Vectors and elements of a row that a thread has, at most; elements by bytes of the compute type, and the same
        where rows wait in shared memory.
    registers, unaligned_registers, cluster_registers
        Registers of a thread beside its elements, their sums and the next row; how many more unaligned rows take, and
        how many more clusters.
    staged_registers, staged_unaligned_registers
        The same where rows wait in shared memory, without those of a vector's elements.
    row_registers, row_unaligned_registers
        The same where rows on their way in shared memory wait in registers; small clusters take no more.
    busy_bytes, busy_threads
        Bytes on their way to a multiprocessor, and threads of it that compute: more keep memory no busier.
    shared_bytes
        Static shared memory in which the rows of a block add up their sums, at most.
    measured
        Tilings that a search found to be better than the best by these numbers: bytes of an element of x, sums,
        operands before and behind the op, `unaligned` of a Plan (such rows take more registers), and the fewest and the
        most columns that it is for; then vectors of a thread, threads of a block, blocks of a cluster, stages, blocks
        of a multiprocessor, and where a row with stages waits (`waits` of a Plan); and of the device's L2 cache, at
        least how many megabytes, which say how fast memory is: an H200 has 60, an H100 50.
    """

    blocks: Sequence[int]
    large_block: int
    large_block_vectors: int
    clusters: float
    large_clusters: float
    multiprocessors: int
    reached_by_clusters: int
    cluster_threads: int
    stages: int
    stages_of_registers: int
    converted_twice: float
    max_vectors: int
    max_elements: Mapping[int, int]
    staged_elements: Mapping[int, int]
    registers: int
    unaligned_registers: int
    cluster_registers: int
    staged_registers: int
    staged_unaligned_registers: int
    row_registers: int
    row_unaligned_registers: int
    busy_bytes: int
    busy_threads: int
    shared_bytes: int
    measured: Sequence[Sequence[int]]


class Stretches(NamedTuple):
    """Rows that lie apart, but are stretches of memory with their neighbours (variants/stretch.py).

    Attributes
    ----------
    neighbours
        How many rows are neighbours, at least and at most, where that is better than what `apart` has.
    whole
        By the bytes of an element, those of the widest tile of neighbours, for statistics alone and for results: where
        these are accessed in vectors and are whole tiles, they are left to `apart`; 0: they always are.
    columns
        The fewest columns.
    tables, bytes, least_bytes
        How many stretches a block has at most, and their bytes, of more than one; and those of one, at least, where
        stretches do not adjoin.
    blocks, few_at_once, elements
        Threads of a block: the few where its stretches have no more than those bytes and two threads share a row, the
        many, and the most where only so few blocks of a multiprocessor have room, and an element is one number. How
        many elements of a row each takes at a time.
    threads
        Threads of a multiprocessor for which registers are kept few enough.
    fewest, resident
        The fewest blocks, for each multiprocessor, and how many must run at once there, where one is not enough.
    """

    neighbours: Sequence[int]
    whole: Mapping[int, Sequence[int]]
    columns: int
    tables: int
    bytes: int
    least_bytes: int
    blocks: Sequence[int]
    few_at_once: int
    elements: int
    threads: int
    fewest: int
    resident: int


class RingTiling(NamedTuple):
    """A tiling of rows that wait in a ring, for elements of so many bytes and rows of `first` to `last` columns.

    parameters: whether it is for rows with affine parameters: 0, 1, or 2 for both. width: bytes side by side. block,
    blocks: threads, and blocks of a multiprocessor. elements, most_chunks: of a row that a thread takes at a time, and
    how often at most. most_ctas: blocks of a cluster. l2_megabytes: of the device's L2 cache, at least: each channel of
    memory has a part of it, and where there are more of them, more bytes have to be on their way.
    """

    bytes: int
    parameters: int
    first: int
    last: int
    width: int
    block: int
    blocks: int
    elements: int
    most_chunks: int
    most_ctas: int
    l2_megabytes: int


class Rings(NamedTuple):
    """Rows that lie apart, and wait in a ring of shared memory (variants/ring.py).

    Attributes
    ----------
    tilings
        The numbers of a RingTiling each; the first in turn that holds a row is taken.
    tiles, stages
        How many tiles a ring has room for at most, and chunks.
    fewest
        The fewest tiles that each group of blocks goes through.
    row_numbers
        The most numbers of a row's State (Problem.row_numbers): what blocks tell one another takes the ring's room.
    """

    tilings: Sequence[Sequence[int]]
    tiles: int
    stages: int
    fewest: int
    row_numbers: int


class Apart(NamedTuple):
    """Rows whose elements lie apart from one another (variants/across.py, tiles.py, across_grid.py).

    Attributes
    ----------
    max_vector
        Neighbouring rows of a thread, at most, by bytes of an element of x.
    numbers, again
        Numbers of the compute type that a thread holds of its rows, or loads at a time where rows wait nowhere, by
        bytes of that type.
    tilings
        What is tried, best first, by bytes of an element of x: threads of a block, bytes of neighbouring rows that it
        has side by side, and how many blocks of a cluster share rows at most.
    alone_width
        The same bytes where one block has room for the row so.
    loops
        Threads of a block, and bytes side by side, where rows wait nowhere.
    least_part
        Columns of a block, where several share a row only to fill the device.
    registers, row_registers
        Registers of a thread beside its elements, and for each of its rows.
    measured
        Tilings that a search found to be better than `tilings`: bytes of an element of x, the fewest and the most
        columns that it is for, neighbouring rows of a thread, threads of a block, bytes of neighbouring rows side by
        side, blocks of a cluster at most, of which the fewest are taken that hold a row, blocks of a multiprocessor (0:
        as many as there are registers for), 1 if it is for rows that are whole (kernels/row/whole.cuh), and what it is
        for: a number of KINDS. With one row of a thread, where two fit an access, it is for rows of which no even
        number are neighbours.
    alone
        Rows of which one thread has all elements: threads of a block, of which none waits for another, and the same
        where no even number of rows are neighbours; the most columns; bytes that neighbour in memory, at least; and
        blocks of a multiprocessor where more numbers wait, two in a register.
    alone_statistics
        Bytes of a statistic of neighbouring rows that such a thread stores, where nothing else is stored.
    odd_elements
        Elements of a thread at most by `measured`, where no even number of rows are neighbours: where nothing is stored
        but statistics, and else.
    over_the_grid
        Where blocks of the grid share rows, best first: bytes of an element of x, the fewest and the most columns that
        it is for, threads of a block, bytes of neighbouring rows side by side, blocks of a multiprocessor, how many
        tiles each group of blocks has at least, and what it is for: a number of KINDS.
    over_the_grid_any
        Numbers that a thread then holds at most where a row's elements are not at even distances, or something is asked
        of each, by bytes of an element of x.
    summed
        Where sums over rows are taken in the same pass, best first: bytes of an element of x, the fewest and the most
        columns that it is for, neighbouring rows of a thread, threads of a block, bytes of neighbouring rows side by
        side, elements of each row that a thread has at most, blocks of a multiprocessor, blocks of a cluster at most,
        before blocks of the grid share rows, and 1 where results have operands of their own, or there are more sums
        than an element has fields.
    summed_one_wave
        From how many columns on there are no more of these blocks than run at once, as where results have operands of
        their own: a group of rows has one or two tiles, and the first one of a block's next group is on its way while
        this one's results are stored.
    held_over_the_grid
        From how many blocks on that hold a row it is read again instead of waiting in their registers, unless the
        blocks that run at once hold all rows, or there are so many tiles.
    again_over_the_grid
        Where blocks of the grid share rows that wait nowhere, by bytes of an element of x: neighbouring rows of a
        thread at most, floats that it loads at a time, the same in blocks of more threads than usual, and elements of
        each row at most.
    stretches
        Threads of such a block: as usual, how many of these are enough, and at most, where more of them access whole
        lines or sectors of memory; and how many lie side by side at most.
    most_turns
        How many tiles each group of these blocks goes through at most, so that few blocks are left over.
    left_idle
        Where that is better than clusters. For rows that are only read: the fewest columns, bytes of x, and how many
        blocks of clusters for each multiprocessor are enough; of others: the fewest columns, and such blocks.
    filled
        The share of a device's multiprocessors that clusters must have at once where their blocks are no power of two,
        and that blocks of the grid must have.
    only_read
        From how many columns on rows of which no element is stored wait nowhere; the same of ops with a large state,
        and of exponentials of 16 bits of which a mask keeps an interval; where an element is two numbers; of such sums
        of 16 bits; and how many blocks for each multiprocessor then load them at least, if they are long enough.
    shifted
        Where a thread takes two neighbouring rows of an odd number: the fewest neighbours, the share of all places of
        tiles that have a row, and the most columns of rows that wait in registers.
    few_local_bytes, block_local_bytes
        Bytes of registers that a thread may spill, which cost less than another tiling, and less than the second of two
        blocks of a multiprocessor.
    """

    max_vector: Mapping[int, int]
    numbers: Mapping[int, int]
    again: Mapping[int, int]
    tilings: Mapping[int, Sequence[Sequence[int]]]
    alone_width: int
    loops: Sequence[int]
    least_part: int
    registers: int
    row_registers: int
    measured: Sequence[Sequence[int]]
    alone: Sequence[int]
    alone_statistics: int
    odd_elements: Sequence[int]
    over_the_grid: Sequence[Sequence[int]]
    over_the_grid_any: Mapping[int, int]
    summed: Sequence[Sequence[int]]
    summed_one_wave: int
    held_over_the_grid: Sequence[int]
    again_over_the_grid: Mapping[int, Sequence[int]]
    stretches: Sequence[int]
    most_turns: int
    left_idle: Sequence[int]
    filled: float
    only_read: Sequence[int]
    shifted: Sequence[float]
    few_local_bytes: int
    block_local_bytes: int
