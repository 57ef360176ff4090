"""What was measured of rows that several blocks share: those of a cluster, or of the whole grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Clusters(NamedTuple):
    """Rows of clusters.

    Attributes
    ----------
    max_block, max_shared_block, max_shared_blocks
        Threads of a block that holds a part of a row in registers, in shared memory; blocks of a multiprocessor then.
    least_waves
        Waves of the blocks that there is room for, at least, where a block has rows of one alignment.
    few_copied_blocks
        Blocks for each multiprocessor, at least, where a small batch of fused rows lies in shared memory of clusters.
    one_shot_block, one_shot_ctas, one_shot_blocks
        Fused calls: threads of a block, blocks of a cluster at least, and blocks of a multiprocessor.
    small_batch_block, small_batch_blocks
        The same where rows are few: threads of a block, and blocks of a multiprocessor, which all rows take together.
    few_read_ctas, few_read_block, few_read_rows
        Few rows that are only read: blocks of a cluster and their threads, and rows for each multiprocessor, at least.
    """

    max_block: int
    max_shared_block: int
    max_shared_blocks: int
    least_waves: float
    few_copied_blocks: int
    one_shot_block: Mapping[int, int]
    one_shot_ctas: int
    one_shot_blocks: int
    small_batch_block: Mapping[int, int]
    small_batch_blocks: int
    few_read_ctas: int
    few_read_block: int
    few_read_rows: float


class FusedClusters(NamedTuple):
    """Clusters of fused calls whose next rows are on their way (variants/fused_cluster.py).

    Attributes
    ----------
    shares
        By blocks of a cluster: the part of a device's multiprocessors that such clusters reach, since those of a
        graphics processing cluster are not always a multiple.
    min_block, max_elements
        Threads of a block at least; elements of a thread at most, by bytes of one.
    busy_bytes
        Bytes that a multiprocessor's rows read and write: more keep memory no busier.
    by_blocks, by_blocks_of_little, by_vectors
        Exponents by which a tiling is valued: of the blocks of a multiprocessor, as a rule and with parameters and
        little arithmetic; of the vectors of a thread, where each row has a scale.
    busy_threads, busy_blocks
        Fewer threads do not keep the issue slots of a multiprocessor busy, where arithmetic is what takes the time;
        more blocks of it are no better where a mask keeps an interval.
    full, full_of_much
        What it is worth that all threads have all of their vectors, where rows have scales, and where much is computed.
    """

    shares: Mapping[int, float]
    min_block: int
    max_elements: Mapping[int, int]
    busy_bytes: int
    by_blocks: float
    by_blocks_of_little: float
    by_vectors: float
    busy_threads: int
    busy_blocks: int
    full: float
    full_of_much: float


class SmallBatch(NamedTuple):
    """Too few rows to fill the device. Only for these may the order of summation depend on the number of rows.

    Attributes
    ----------
    rows
        For each multiprocessor: fewer are a small batch.
    row_bytes
        From which several blocks share a row of a small batch.
    cluster_bytes, cluster_bytes_of_one_row
        Up to which they are those of a cluster.
    min_block, block, max_block
        Threads: the fewest, as a rule, and the most that have registers enough.
    elements, elements_of_several
        Elements of a thread up to which blocks are min_block; the same where several blocks share the issue slots of a
        multiprocessor.
    words
        Registers of a thread's values and parameters.
    crowded_rows, crowded_roomy_rows
        Blocks for each multiprocessor from which on clusters are smaller; where rows have room.
    filled, filled_roomy
        A part of the clusters that there is room for, as numerator and denominator: more rows than that are crowded.
    unaligned_ctas
        Blocks of a crowded cluster of unaligned rows, by the number of parameters.
    crowded_vectors, crowded_blocks
        Vectors of a thread, and blocks for each multiprocessor, where clusters are crowded.
    """

    rows: int
    row_bytes: int
    cluster_bytes: int
    cluster_bytes_of_one_row: int
    min_block: int
    block: int
    max_block: int
    elements: int
    elements_of_several: int
    words: int
    crowded_rows: int
    crowded_roomy_rows: int
    filled: tuple[int, int]
    filled_roomy: tuple[int, int]
    unaligned_ctas: Mapping[int, int]
    crowded_vectors: int
    crowded_blocks: int


class Split(NamedTuple):
    """Rows that the whole grid shares.

    Attributes
    ----------
    blocks, block, crowded_block, min_block
        Blocks of a multiprocessor, and their threads: as a rule, where the compiler wants more registers, and at least.
    whole_affine_block
        Threads of one block of a multiprocessor at most, where there are two affine parameters: more would spill.
    vectors, part_vectors
        That a thread reads at a time, and that it has of a block's part where that is short.
    overflow
        Shared memory that rows take, of what there is: what does not fit is read again.
    again_rows, again_bytes, again_alone
        Rows that are read twice, one by each group of blocks, where messages have room of their own: how many may
        always be in work at once, the bytes of more, and what it is worth to have one, as nobody works while it meets.
    in_registers_bytes, in_registers_block, in_registers_blocks
        One row in registers: its bytes from .. to, threads of a block, where they have few vectors then and where they
        would have many, and blocks of a multiprocessor.
    two_pass_min_rows, two_pass_rows, two_pass_vectors, two_pass_block
        Rows that are read twice, side by side: from so many on, so many at a time; vectors of a thread, threads of a
        block.
    long_rows
        At once, of rows that do not fit.
    """

    blocks: int
    block: Mapping[int, int]
    crowded_block: Mapping[int, int]
    whole_affine_block: int
    min_block: int
    vectors: int
    part_vectors: int
    overflow: float
    again_rows: int
    again_bytes: int
    again_alone: float
    in_registers_bytes: tuple[int, int]
    in_registers_block: tuple[int, int]
    in_registers_blocks: int
    two_pass_min_rows: int
    two_pass_rows: int
    two_pass_vectors: int
    two_pass_block: int
    long_rows: int
