"""Rules: what was measured to be best, read from data/sm_NN.json. Here is what its numbers mean, and none of them."""

from __future__ import annotations

import functools
import json
import math
import os
from typing import TYPE_CHECKING, Any

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cupynorm.plan.problem import Problem

SCHEMA = 1
DATA = os.path.join(os.path.dirname(__file__), "data")  # noqa: PTH118, PTH120  pathlib would have to be imported
MEASURED = "90"  # whose data other architectures are planned by, until they have data of their own

Kind = tuple[int, int]
List = tuple[str, "str | None", Kind]  # what the rules of a list are, its table, and the kind that it is for


class RegisterRule(NamedTuple):
    """How rows of up to `row_bytes` are held in registers.

    thread_bytes: of a row and of what is loaded with it. block: threads of a block at least. resident_threads: of a
    multiprocessor. parameter_cache: as in Plan, as far as registers allow. rows: that a group holds at once.
    extra_registers: the rule was compiled for its architecture and did not spill with fused arithmetic that needs so
    many registers, for a row of a power of two of vectors; 0: not checked, registers are estimated.
    """

    id: str
    row_bytes: float
    thread_bytes: int
    block: int
    resident_threads: int
    parameter_cache: int = 0
    rows: int = 1
    extra_registers: int = 0


class FixedRule(NamedTuple):
    """How rows of more than `above` and up to `row_bytes` are held by threads of exactly `vectors` vectors each.

    warps: by any number of warps, not only by a power of two of threads. many: only where a multiprocessor has many
    rows to go through (true), or few (false). min_rows: only where a multiprocessor has so many. Both choose a launch
    only: a rule that takes the other rows has the same vectors, so that each row is summed in the same order. spills:
    its kernel was timed with the registers that it spills, and is faster so than with fewer blocks. The rest as in
    RegisterRule.
    """

    id: str
    vectors: int
    row_bytes: float
    block: int
    resident_threads: int
    parameter_cache: int = 0
    rows: int = 1
    above: int = 0
    many: bool | None = None
    warps: bool = False
    min_rows: int = 0
    spills: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether the rule is for many or for few rows only."""
        return self.many is not None or self.min_rows > 0


class CachedRule(NamedTuple):
    """How rows of up to `row_bytes` are read twice, the second time from the level-1 cache.

    vectors: of a thread, at a time. block: threads of a block at most; no more than take the row in whole rounds.
    resident_threads: of a multiprocessor, while it caches all their rows.
    """

    id: str
    row_bytes: float
    vectors: int
    block: int
    resident_threads: int


class ClusterRule(NamedTuple):
    """How rows of more than `above` and up to `row_bytes` lie in registers: of `ctas` blocks of a cluster, or of one.

    vectors: of a thread, or up to `fewer` less if that leaves fewer places of threads empty. stages: as in Plan. Each
    block has as many warps as that takes, and a multiprocessor as many blocks as it has registers and shared memory
    for. unaligned: for rows that are unaligned as y's are (true), that are aligned (false), or both (null).
    """

    id: str
    row_bytes: float
    ctas: int
    vectors: int
    stages: int
    unaligned: bool | None = False
    above: int = 0
    fewer: int = 2


class SharedRule(NamedTuple):
    """How rows of up to `row_bytes` lie in a cluster's shared memory: the fewest blocks, of `part_bytes` each at most.

    A multiprocessor has as many blocks as its shared memory holds shares, of so many threads that these are `threads`
    in all. aligned: whether aligned rows are held so, too.
    """

    id: str
    row_bytes: float
    threads: int
    vectors: int
    part_bytes: int
    aligned: bool = True


Rule = RegisterRule | FixedRule | CachedRule | ClusterRule | SharedRule


class Crossover(NamedTuple):
    """From how many bytes of a row on, and up to how many, something is better.

    access_bytes: of an access without head and tail elements; None: of any. min_rows: from so many rows on. kept: of
    rows of which a mask keeps such a share at most, on average.
    """

    least: int
    most: float = math.inf
    access_bytes: int | None = None
    min_rows: int = 0
    kept: float = 1.0


# What crossovers say, by `what`.
CROSSOVERS = {
    "cached": "the level-1 cache is better than registers, for rows of whole warps' accesses",
    "cached ragged": "the same for other rows",
    "cluster": "blocks of a cluster are better than one",
    "cluster ragged": "the same for rows that are not whole warps' accesses",
    "cluster unaligned": "the same for unaligned rows",
    "cluster, masked": "clusters whose next rows are on their way are better than one block, with a mask",
    "cluster, interval": "the same with a mask of an interval",
    "cluster, affine": "the same with affine parameters",
    "cluster, quantized": "the same for results of one byte, with affine parameters",
    "cluster, quantized alone": "the same for results of one byte, without",
    "cluster, gradient": "the same for gradients of softmax, which hold two numbers for each element",
    "shared, band": "one block's shared memory is better for what a causal mask or a window keeps",
    "cached, late exponential": "the level-1 cache is better than registers, where pairs wait for an exponential each",
    "copied": "fused rows of which x alone is loaded are better copied to a cluster's shared memory",
    "streamed": "rows that are only read are better read as a stream, of which nothing waits",
    "unaligned": "16-byte vectors with head and tail elements are better than narrow accesses",
    "unaligned short": "the same for short rows",
    "unaligned, sums": "the same where sums over rows are taken in the same pass",
    "split by whole blocks": "all rows together: blocks of all threads are better where the whole grid shares rows",
}


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


class Staged(NamedTuple):
    """Rows that a whole block goes through: shared, uncached, and what split has of them.

    Attributes
    ----------
    whole_block, fused_block
        Threads of a block; fused_block where something is fused.
    chunk_elements, chunk_vectors
        That a thread reads at a time.
    band_threads, band_block, short_band_block, short_band_bytes
        Rows in shared memory, of which a causal mask or a window keeps a part: the most threads of a multiprocessor;
        threads of a block; threads of a block for rows of at most short_band_bytes.
    band_alone
        Such rows have a block each where no more than this share of a row is kept.
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
    band_threads: int
    band_block: int
    short_band_block: int
    short_band_bytes: int
    band_alone: float


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
    """

    elements: int
    lanes: int
    max_block: int
    threads: int
    apart_vector: int
    apart_row_registers: int


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


class Clusters(NamedTuple):
    """Rows of clusters.

    Attributes
    ----------
    max_block, max_shared_block, max_shared_blocks
        Threads of a block that holds a part of a row in registers, in shared memory; blocks of a multiprocessor then.
    least_waves
        Waves of the blocks that there is room for, at least, where a block has rows of one alignment.
    one_shot_block, one_shot_ctas, one_shot_small_batch_ctas, one_shot_blocks
        Fused calls: threads of a block, blocks of a cluster at least (where rows are few), and blocks of a
        multiprocessor.
    """

    max_block: int
    max_shared_block: int
    max_shared_blocks: int
    least_waves: float
    one_shot_block: Mapping[int, int]
    one_shot_ctas: int
    one_shot_small_batch_ctas: int
    one_shot_blocks: int


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


class ColumnSums(NamedTuple):
    """Rows whose sums over rows are taken in the same pass (variants/summed.py).

    Attributes
    ----------
    blocks
        Threads of a block of several rows, all of which are tried.
    large_block, large_block_vectors
        More threads of such a block have too few registers for doubles, and for more vectors of a thread than these.
    clusters
        What a cluster's tiling is worth, of that of one block.
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
        of a multiprocessor, and where a row with stages waits (`waits` of a Plan).
    """

    blocks: Sequence[int]
    large_block: int
    large_block_vectors: int
    clusters: float
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


class Apart(NamedTuple):
    """Rows whose elements lie apart from one another (variants/across.py).

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
        side, blocks of a cluster at most, of which the fewest are taken that hold a row, blocks of a multiprocessor, 1
        if it is for rows that are whole (kernels/row/whole.cuh), and what it is for: a number of KINDS.
    over_the_grid
        Where blocks of the grid share rows, best first: bytes of an element of x, the fewest and the most columns that
        it is for, threads of a block, bytes of neighbouring rows side by side, blocks of a multiprocessor, how many
        tiles each group of blocks has at least, and what it is for: a number of KINDS.
    over_the_grid_any
        Numbers that a thread then holds at most where a row's elements are not at even distances, or something is asked
        of each, by bytes of an element of x.
    filled
        The share of a device's multiprocessors that clusters must have at once where their blocks are no power of two.
    few_local_bytes
        Bytes of registers that a thread may spill, which cost less than another tiling.
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
    over_the_grid: Sequence[Sequence[int]]
    over_the_grid_any: Mapping[int, int]
    filled: float
    few_local_bytes: int


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
    vectors, part_vectors
        That a thread reads at a time, and that it has of a block's part where that is short.
    overflow
        Shared memory that rows take, of what there is: what does not fit is read again.
    in_registers_bytes, in_registers_block, in_registers_blocks
        One row in registers: its bytes from .. to, threads of a block, blocks of a multiprocessor.
    two_pass_min_rows, two_pass_rows, two_pass_vectors, two_pass_block
        Rows that are read twice, side by side: from so many on, so many at a time; vectors of a thread, threads of a
        block.
    long_rows
        At once, of rows that do not fit.
    """

    blocks: int
    block: Mapping[int, int]
    crowded_block: Mapping[int, int]
    min_block: int
    vectors: int
    part_vectors: int
    overflow: float
    in_registers_bytes: tuple[int, int]
    in_registers_block: int
    in_registers_blocks: int
    two_pass_min_rows: int
    two_pass_rows: int
    two_pass_vectors: int
    two_pass_block: int
    long_rows: int


class RegisterModel(NamedTuple):
    """How many registers a thread wants beside its values, as the compiler was seen to want them (registers.py).

    Attributes
    ----------
    at_use, cached
        With parameters fetched at use, and cached in registers, by bytes of the compute type.
    ragged, unaligned
        More, where a thread's last vector may be missing, and for unaligned rows.
    step
        What one more thing to keep takes.
    mixed_types, before_ampere, converted, edge
        More: where parameters have another type than x; on older devices; for where converted parameters lie; for an
        element that is in no vector, and for each operand.
    addresses, many_addresses
        More where a thread has many vectors: as a rule, and with much arithmetic.
    passing_words
        Words of a vector of parameters: more pass through registers of their own.
    loaded_bytes
        Bytes of x and its operands on their way, for each register; the rest of it has their addresses.
    narrow, few
        Extra registers up to which arithmetic is cheap.
    crowded_elements, crowded_floats
        Elements of a thread from which on the compiler wants more.
    few_values
        Up to which it wants less.
    full_block, loaded_words
        Registers for a block of all threads, and registers on their way with which they do.
    cluster
        More of a cluster, elsewhere than where the rules were measured.
    cluster_rows, cluster_rows_few, cluster_small, cluster_small_more, cluster_large
        Registers for rows in the registers of clusters; up to how many values they want so many more, and from how many
        on more.
    staged, staged_arithmetic, staged_alone
        Registers for fused rows on their way through shared memory, with arithmetic that takes so many; where nothing
        is loaded beside x, but a mask keeps an interval or each row has a scale.
    small_batch, one_row
        Registers for small batches, and for one row in the registers of the grid.
    computed, computed_beside, computed_at_most
        All registers of a thread of fused rows that wait as they were computed: where x alone is loaded, with operands
        or parameters, and where more is computed, of unaligned rows, or of doubles.
    function_at_once
        Registers in use at once by a function whose steps take more than `few`: in 16 bits.
    """

    at_use: Mapping[int, int]
    cached: Mapping[int, int]
    ragged: Mapping[int, int]
    unaligned: Mapping[int, int]
    step: int
    mixed_types: int
    before_ampere: int
    converted: int
    edge: int
    addresses: int
    many_addresses: int
    passing_words: int
    loaded_bytes: int
    narrow: int
    few: int
    crowded_elements: int
    crowded_floats: int
    few_values: int
    full_block: int
    loaded_words: int
    cluster: int
    cluster_rows: int
    cluster_rows_few: int
    cluster_small: int
    cluster_small_more: int
    cluster_large: int
    staged: int
    staged_arithmetic: int
    small_batch: int
    one_row: int
    staged_alone: int
    computed: int
    computed_beside: int
    computed_at_most: int
    function_at_once: int


SECTIONS: dict[str, Any] = {
    "tile": Tile,
    "staged": Staged,
    "streamed": Streamed,
    "rounds": Rounds,
    "late_exponential": LateExponential,
    "clusters": Clusters,
    "fused_clusters": FusedClusters,
    "column_sums": ColumnSums,
    "apart": Apart,
    "small_batch": SmallBatch,
    "split": Split,
    "registers": RegisterModel,
}


class Rules(NamedTuple):
    """All that was measured on one architecture. file: its file in the package."""

    architecture: str
    file: str
    tile: Tile
    staged: Staged
    streamed: Streamed
    rounds: Rounds
    late_exponential: LateExponential
    clusters: Clusters
    fused_clusters: FusedClusters
    column_sums: ColumnSums
    apart: Apart
    small_batch: SmallBatch
    split: Split
    registers: RegisterModel
    crossovers: Mapping[tuple[str, Kind | int | None], tuple[Crossover, ...]]
    register_rules: Mapping[tuple[str, Kind], Sequence[RegisterRule]]
    fixed_rules: Mapping[tuple[str, Kind], Sequence[FixedRule]]
    cached_rules: Mapping[Kind, Sequence[CachedRule]]
    cluster_rules: Mapping[Kind, Sequence[ClusterRule | SharedRule]]

    def crossover(
        self, what: str, kind: Kind | int | None, access_bytes: int | None = None
    ) -> Crossover | None:
        """Return the first crossover of a kind, for accesses of so many bytes; None if there is none.

        kind: affine parameters and bytes of an element, the bytes alone, or None where it is the same for all.
        """
        found = self.crossovers.get((what, kind), ())
        return next((each for each in found if each.access_bytes in {None, access_bytes}), None)

    def is_better(self, what: str, problem: Problem) -> bool:
        """Say whether a row is beyond the crossover of its kind, or of the bytes of its elements."""
        found = self.crossover(what, problem.kind) or self.crossover(what, problem.element_bytes)
        if found is None:
            return False
        return found.least <= problem.row_bytes <= found.most and problem.band_share <= found.kept

    def every_rule(self) -> Iterator[Rule]:
        """Yield all rules. Raises TypeError for names that no rule has."""
        tables: tuple[Any, ...] = (
            self.register_rules,
            self.fixed_rules,
            self.cached_rules,
            self.cluster_rules,
        )
        for table in tables:
            for key in table:
                yield from table[key]

    def register_rule(self, table: str, problem: Problem) -> RegisterRule | None:
        """Return the first rule of a table that can hold a row; None if none can, or where there is no such table."""
        rules = self.register_rules.get((table, problem.kind), ())
        return next((rule for rule in rules if problem.row_bytes <= rule.row_bytes), None)

    def has_register_rules(self, table: str, kind: Kind) -> bool:
        """Say whether there is such a table."""
        return (table, kind) in self.register_rules

    def but(
        self,
        lists: Mapping[List, Sequence[Mapping[str, Any]]],
        crossovers: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rules:
        """Return the same with other rows of a file in these lists, and all other crossovers if they are given."""
        changed: dict[str, Any] = {}
        for each, rows in lists.items():
            name, key = query_of(each)
            table = changed.setdefault(name, _Table(getattr(self, name)))
            if rows:
                table[key] = list(rows)
            else:  # as where the file has no such rule
                table.pop(key, None)
        if crossovers is not None:
            changed["crossovers"] = _crossovers(crossovers)
        return self._replace(**changed)


def rules_of(architecture: str) -> Rules:
    """Return the rules of a compute capability such as "90"; those of the measured architecture where it has none."""
    return _read(architecture if architecture in _present() else MEASURED)


@functools.cache
def _present() -> frozenset[str]:
    files = os.listdir(DATA)  # noqa: PTH208
    return frozenset(each[len("sm_") : -len(".json")] for each in files if each.startswith("sm_"))


@functools.cache
def _read(architecture: str) -> Rules:
    return parse(content_of(architecture), file_of(architecture))


def file_of(architecture: str) -> str:
    """Return the file in the package that rules_of() takes the rules from."""
    return f"plan/data/sm_{architecture if architecture in _present() else MEASURED}.json"


def content_of(architecture: str) -> dict[str, Any]:
    """Return what that file says, with where each rule comes from."""
    name = os.path.basename(file_of(architecture))  # noqa: PTH119
    with open(os.path.join(DATA, name), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        told: dict[str, Any] = json.load(file)
    return told


def kinds_of(row: Mapping[str, Any]) -> list[Kind]:
    """Return the kinds that a rule of a file is for: each number of parameters with each number of bytes."""
    parameters, sizes = (
        each if isinstance(each, list) else [each] for each in (row["parameters"], row["bytes"])
    )
    return [(number, size) for number in parameters for size in sizes]


def lists_of(row: Mapping[str, Any]) -> list[List]:
    """Return the lists that a rule of a file is in: among the rules of one, the planner looks one up."""
    return [(row["rule"].partition(" ")[0], row.get("table"), kind) for kind in kinds_of(row)]


def query_of(each: List) -> tuple[str, Any]:
    """Return the table of Rules that has a list, and its key there."""
    what, table, kind = each
    return _TABLES[what], kind if table is None else (table, kind)


def list_of(name: str, key: Any) -> List:
    """Return the list that a table of Rules has under a key."""
    (what,) = (each for each, table in _TABLES.items() if table == name)
    return (what, *key) if isinstance(key[0], str) else (what, None, key)


def parse(told: Mapping[str, Any], file: str) -> Rules:
    """Turn a file's content into rules. Raises ValueError for another schema, TypeError for unknown sections."""
    if told["schema"] != SCHEMA:
        raise ValueError(f"the rules have schema {told['schema']}, {SCHEMA} is expected")
    sections = {
        name: made(**{key: _by_bytes(value) for key, value in told[name].items()})
        for name, made in SECTIONS.items()
    }
    tables: dict[str, Any] = {name: _Table() for name in _TABLES.values()}
    for row in told["rules"]:
        for each in lists_of(row):
            name, key = query_of(each)
            tables[name].setdefault(key, []).append(row)
    return Rules(
        architecture=told["architecture"],
        file=file,
        **sections,
        crossovers=_crossovers(told["crossovers"]),
        **tables,
    )


class _Table(dict[Any, list[Any]]):
    """Rules by their keys. A process asks for few, so each list stays rows of the file until it is asked for.

    Making 470 of them took 1.4 ms of a process's first call.
    """

    def __getitem__(self, key: Any) -> list[Any]:
        """Return the rules of a key. Raises KeyError if there are none, TypeError for names that no rule has."""
        found = super().__getitem__(key)
        if isinstance(found[0], dict):
            found = self[key] = [_rule(row) for row in found]
        return found

    def get(self, key: Any, default: Any = ()) -> Any:
        """Return the rules of a key, or the default."""
        found = super().get(key)
        return default if found is None else self[key]


# The tables of Rules, by what their rules are.
_TABLES = {
    "registers": "register_rules",
    "fixed": "fixed_rules",
    "cached": "cached_rules",
    "cluster": "cluster_rules",
}
_RULES: dict[str, Any] = {
    "registers": RegisterRule,
    "fixed": FixedRule,
    "cached": CachedRule,
    "cluster": ClusterRule,
    "cluster shared": SharedRule,
}
# Keys of a row that are no fields of its rule: the table that it is in, where it comes from, and, if no search says so,
# why `cupynorm tune --ship` has to leave it as it is (keep). share, share_without: shares of the copy rate that were
# measured at the point `at`, by the rule, and by what is chosen without it.
_OF_TABLES = {
    "rule",
    "table",
    "parameters",
    "bytes",
    "source",
    "note",
    "share",
    "share_without",
    "at",
    "keep",
}


def _rule(row: Mapping[str, Any]) -> Rule:
    """Make a rule of a row. Values are given in order, which takes a third of the time that names take."""
    kind = _RULES[row["rule"]]
    names = kind._fields
    if not row.keys() <= _OF_TABLES.union(names):
        raise TypeError(
            f"{row.get('id', 'a rule')}: no rule has {sorted(row.keys() - _OF_TABLES.union(names))}"
        )
    defaults = kind._field_defaults
    rule: Rule = kind(*[row[name] if name in row else defaults[name] for name in names])
    return rule if rule.row_bytes is not None else rule._replace(row_bytes=math.inf)


def _crossovers(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, Kind | int | None], tuple[Crossover, ...]]:
    found: dict[tuple[str, Kind | int | None], tuple[Crossover, ...]] = {}
    for row in rows:
        kind = (row["parameters"], row["bytes"]) if "parameters" in row else row.get("bytes")
        where = (row["what"], kind)
        found[where] = (*found.get(where, ()), _crossover(row))
    return found


def _crossover(row: Mapping[str, Any]) -> Crossover:
    least = row["from"] if "from" in row else row["above"] + 1
    least_rows, kept = row.get("min_rows", 0), row.get("kept", 1.0)
    return Crossover(least, row.get("up_to", math.inf), row.get("access_bytes"), least_rows, kept)


def _by_bytes(value: Any) -> Any:
    """Return a JSON object with whole numbers for keys, and a list as a tuple."""
    if isinstance(value, dict):
        return {int(key): each for key, each in value.items()}
    return tuple(value) if isinstance(value, list) else value
