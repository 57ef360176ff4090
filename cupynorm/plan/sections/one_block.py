"""What was measured of rows that one block holds, or reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Tile(NamedTuple):
    """What a thread of warp and block holds.

    Attributes
    ----------
    max_elements, max_unaligned_elements, max_fused_unaligned_elements, max_grouped_elements
        Elements of a row at most; the last where a group holds several rows.
    full_elements, full_unaligned_elements
        The same where threads are counted to leave few places empty.
    thread_bytes, min_thread_bytes
        Bytes of a row where a warp holds it, and at least where operands are loaded with it.
    max_summed_bytes
        The same of bytes that are only added up.
    many_vectors, affine_vectors, min_narrow_vectors
        Vectors from which on their addresses count; from which on a thread's own work counts little, with affine
        parameters; narrow accesses at least.
    vectors_in_flight, fused_vectors_in_flight
        Vectors of unaligned rows whose parameters are all on their way.
    parameter_words, narrow_parameter_words
        Registers of values and cached parameters with which enough threads stay.
    unaligned_cache_elements
        Up to which parameters of unaligned rows are cached.
    many_rows
        That a multiprocessor goes through, where a rule asks for many or few.
    few_block_threads
        Threads that rows take of a multiprocessor, which has fewer than many_rows, up to which a few_block holds.
    """

    max_elements: Mapping[int, int]
    max_unaligned_elements: Mapping[int, int]
    max_fused_unaligned_elements: Mapping[int, int]
    max_grouped_elements: Mapping[int, int]
    full_elements: Mapping[int, int]
    full_unaligned_elements: Mapping[int, int]
    thread_bytes: int
    min_thread_bytes: int
    many_vectors: int
    affine_vectors: int
    min_narrow_vectors: int
    vectors_in_flight: int
    fused_vectors_in_flight: int
    parameter_words: int
    narrow_parameter_words: int
    unaligned_cache_elements: Mapping[int, int]
    many_rows: int
    max_summed_bytes: int
    few_block_threads: int


class NarrowFused(NamedTuple):
    """Rows with something fused that are moved in accesses of fewer than 16 bytes.

    Attributes
    ----------
    least_vectors, most_vectors
        Accesses of a row for which this holds.
    vectors_of_thread, threads
        Accesses of a thread at most, and threads of a row at least.
    """

    least_vectors: int
    most_vectors: int
    vectors_of_thread: int
    threads: int


class Tiled(NamedTuple):
    """Narrow rows that come and go together.

    Attributes
    ----------
    elements
        Of a row, that a thread holds at most, by bytes of an element: in vectors of one element, of two and of four.
    alone, lanes
        Columns up to which a lane has whole rows, and how many lanes share longer ones, at least.
    blocks
        Threads of a block where lanes have whole rows, and elsewhere.
    few
        Blocks of a multiprocessor, of fewer than which they are small ones, where more lanes share a row.
    threads
        Threads of a multiprocessor for which registers are kept few enough.
    """

    elements: Mapping[int, Sequence[int]]
    alone: int
    lanes: int
    blocks: Sequence[int]
    few: int
    threads: int


class Staged(NamedTuple):
    """Rows that a whole block goes through: shared, uncached, and what split has of them.

    Attributes
    ----------
    whole_block, fused_block
        Threads of a block; fused_block where something is fused.
    chunk_elements, chunk_vectors
        That a thread reads at a time.
    band_blocks
        Rows in shared memory, of which a causal mask or a window keeps a part: up to how many bytes of a row, threads
        of a block, and blocks of a multiprocessor at most. The last is for all longer rows, too.
    band_alone, band_blocks_alone
        Such rows have a block each where no more than this share of a row is kept; blocks then.
    threads, block, affine_block, min_block
        Rows in shared memory: threads of a multiprocessor; the most threads of a block without parameters, and with
        them; the fewest.
    roomy_threads, few_threads
        Threads of a multiprocessor where the compiler wants more registers; few_threads where its blocks also wait for
        one another.
    """

    whole_block: Mapping[int, int]
    fused_block: int
    chunk_elements: Mapping[int, int]
    chunk_vectors: int
    threads: int
    block: Mapping[int, int]
    affine_block: Mapping[int, int]
    min_block: int
    roomy_threads: int
    few_threads: int
    band_blocks: Sequence[Sequence[int]]
    band_alone: float
    band_blocks_alone: Sequence[Sequence[int]]


class Streamed(NamedTuple):
    """Rows of which only numbers are kept, as uncached reads them.

    Attributes
    ----------
    block, threads
        Threads of a block, and of a multiprocessor, at most.
    elements
        That a thread reads at a time.
    rounds
        In which a row is read at least: of shorter rows, blocks have fewer threads.
    """

    block: int
    threads: int
    elements: int
    rounds: int


class Rounds(NamedTuple):
    """Rows that an op goes through in several rounds while they are on the chip.

    Attributes
    ----------
    elements
        A thread has so many elements of a row, if the row is long enough: reductions cost as much for fewer.
    lanes
        The fewest threads of a row: they access whole sectors.
    max_block
        Threads of a block, so that a multiprocessor holds several; longer rows are for clusters.
    threads
        Threads of a multiprocessor, which suffice to fill it.
    apart_vector, apart_row_registers
        For rows whose elements lie apart from one another: the most neighbouring rows of a thread, and the registers
        that the state of each row's rounds takes.
    apart
        Tilings of such rows that are better than those of other ops, for arithmetic in float, best first: bytes of an
        element of x, the fewest and the most columns that it is for, neighbouring rows of a thread, threads of a block,
        how many lie side by side, blocks of a cluster, and blocks of a multiprocessor.
    """

    elements: int
    lanes: int
    max_block: int
    threads: int
    apart_vector: int
    apart_row_registers: int
    apart: Sequence[Sequence[int]]


class LateExponential(NamedTuple):
    """Rows whose results take an exponential of each element once their sums are known, as cached reads them.

    Attributes
    ----------
    vectors
        Vectors of a thread: all threads together read a row at once.
    threads
        Threads of a multiprocessor.
    """

    vectors: int
    threads: int
