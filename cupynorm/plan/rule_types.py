"""What a rule of data/sm_NN.json is, and a crossover: the fields of each, and what they mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RegisterRule(NamedTuple):
    """How rows of up to `row_bytes` are held in registers.

    thread_bytes: of a row and of what is loaded with it. block: threads of a block at least. resident_threads: of a
    multiprocessor. parameter_cache: as in Plan, as far as registers allow. rows: that a group holds at once.
    extra_registers: the rule was compiled for its architecture and did not spill with fused arithmetic that needs so
    many registers, for a row of a power of two of vectors; 0: not checked, registers are estimated. few_block: threads
    of a block where rows take few threads of a multiprocessor; 0: as many as elsewhere.
    """

    id: str
    row_bytes: float
    thread_bytes: int
    block: int
    resident_threads: int
    parameter_cache: int = 0
    rows: int = 1
    extra_registers: int = 0
    few_block: int = 0


class FixedRule(NamedTuple):
    """How rows of more than `above` and up to `row_bytes` are held by threads of exactly `vectors` vectors each.

    A file may list several numbers of vectors, and has a rule for each then. warps: by any number of warps, not only by
    a power of two of threads. many: only where a multiprocessor has many rows to go through (true), or few (false).
    min_rows: only where a multiprocessor has so many. Both choose a launch only: a rule that takes the other rows has
    the same vectors, so that each row is summed in the same order. spills: its kernel was timed with the registers that
    it spills, and is faster so than with fewer blocks. registers_beside: that a thread has beside those of its values;
    resident_threads are no more than have so many then. 0: as many as resident_threads says. The rest as in
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
    registers_beside: int = 0

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


class TilingRule(NamedTuple):
    """How rows of up to `row_bytes` lie in registers of a cluster: of all tilings in the one of the most worth.

    least_vectors, vectors: of a thread, at least and at most. worths: of clusters of 2, 4, 8 and 16 blocks beside one
    another. busy_bytes: of rows in work on a multiprocessor; more keep memory no busier. busy_threads, busy_blocks:
    likewise. filled: the exponent of the share of places of threads that have a vector. variants/cluster.py says how a
    tiling's worth follows. unaligned: as in ClusterRule.
    """

    id: str
    row_bytes: float
    least_vectors: int
    vectors: int
    worths: Sequence[float]
    busy_bytes: int
    busy_threads: int
    busy_blocks: int
    filled: float
    unaligned: bool | None = False


Rule = RegisterRule | FixedRule | CachedRule | ClusterRule | SharedRule | TilingRule


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
    "tiled": "narrow rows without gaps are better moved together than one by one",
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
    "streamed, others": "the same of rows of bytes, and of rows that begin anywhere",
    "streamed, few": "the same of few rows, which few blocks share",
    "unaligned": "16-byte vectors with head and tail elements are better than narrow accesses",
    "unaligned short": "the same for short rows",
    "unaligned, sums": "the same where sums over rows are taken in the same pass",
    "split by whole blocks": "all rows together: blocks of all threads are better where the whole grid shares rows",
}
