"""How rows were measured to be best held: what planner.py chooses from.

Measured on an H200 (docs/notes). Other GPUs take them by the rules of planner.py, and `cupynorm tune` measures there.
The keys are (how many parameters of the columns the op has, bytes of an element).
"""

from __future__ import annotations

from cupynorm._values import NamedTuple

ACCESS_BYTES = 16  # the widest
MOST_ROW = 1 << 40  # bytes: as long as the threads that are named with it hold it


class Held(NamedTuple):
    """How rows of up to `row_bytes` are spread over threads.

    thread_bytes: of a row. block: threads of a block at least. resident_threads: of a multiprocessor. hoist: as in Plan, as
    far as registers allow. rows: that a group holds at once. others: with arithmetic that takes so many registers, no more, all
    of this was compiled for sm_90, of a power of two of packs, and did not spill; 0: registers are estimated.
    """

    row_bytes: int
    thread_bytes: int
    block: int
    resident_threads: int
    hoist: int = 0
    rows: int = 1
    others: int = 0


# By (how many parameters of the columns the op has, bytes of an element), the first that can hold a row; what is behind the last
# is better held by shared memory, or by several blocks. H200, docs/notes/002: few bytes a thread and many threads,
# parameters fetched with the row while that takes no threads away.
_PLAIN_HALVES = (Held(8 << 10, 32, 128, 1536), Held(16 << 10, 64, 256, 1024), Held(32 << 10, 64, 512, 1024))
_PLAIN_FLOATS = (
    Held(4 << 10, 32, 128, 1280),
    Held(8 << 10, 128, 256, 1024),
    Held(32 << 10, 64, 256, 1024),
    Held(128 << 10, 128, 256, 1024),
)
_DOUBLES = (Held(8 << 10, 32, 128, 1280, 1), Held(16 << 10, 64, 256, 1024, 1), Held(64 << 10, 64, 256, 1024))
HELD = {
    (0, 2): _PLAIN_HALVES,
    (1, 2): (
        Held(2 << 10, 32, 128, 1280, 1),
        Held(4 << 10, 64, 128, 1024),
        Held(32 << 10, 64, 256, 1024),
    ),
    (2, 2): (
        Held(2 << 10, 32, 64, 1152, 1),
        Held(4 << 10, 64, 64, 1024),
        Held(32 << 10, 64, 256, 1024),
    ),
    (0, 4): _PLAIN_FLOATS,
    (1, 4): (
        Held(8 << 10, 32, 128, 1280, 1),
        Held(16 << 10, 32, 256, 1024, 1),
        Held(32 << 10, 64, 256, 1024),
        Held(128 << 10, 128, 256, 1024),
    ),
    (2, 4): (
        Held(128, 32, 128, 1536),
        Held(2 << 10, 32, 128, 1280, 1),
        Held(8 << 10, 32, 128, 1536),
        Held(16 << 10, 64, 256, 1024),
        Held(128 << 10, 128, 256, 1024),
    ),
    (0, 8): _DOUBLES,
    (1, 8): _DOUBLES,
    (2, 8): _DOUBLES,
}
# The same where something is computed on the way, by (what, bytes of an element): without parameters, with a mask that keeps an
# interval of each row, with parameters, and with them and more than one result. thread_bytes: of a row and of all that is loaded
# with it. H200, docs/notes/034: more elements a thread than above, so that what each thread does once counts less.
_MASKED_HALVES = (
    Held(128, 32, 256, 1536),
    Held(256, 48, 256, 1536, others=24),
    Held(512, 32, 256, 1536),
    Held(1 << 10, 64, 64, 1536),
    Held(4 << 10, 64, 64, 1024),
    Held(8 << 10, 128, 128, 1024),
    Held(32 << 10, 128, 256, 1024),
)
FUSED_HELD = {
    ("masked", 2): _MASKED_HALVES,
    ("masked", 4): (
        Held(512, 32, 128, 1536),
        Held(4 << 10, 40, 128, 2048, others=16),
        Held(8 << 10, 80, 128, 1152),
        Held(16 << 10, 80, 256, 768),
        Held(32 << 10, 128, 512, 1024),
        Held(128 << 10, 160, 256, 1024),
    ),
    ("bounded", 2): _MASKED_HALVES,
    ("bounded", 4): (
        Held(512, 32, 128, 1536),
        Held(2 << 10, 40, 128, 2048, others=16),
        Held(4 << 10, 80, 64, 1024),
        Held(8 << 10, 80, 128, 1152),
        Held(16 << 10, 80, 256, 768),
        Held(32 << 10, 80, 512, 1536, others=16),
        Held(128 << 10, 160, 256, 1024),
    ),
    ("scaled", 2): (
        Held(255, 96, 64, 1024, 1),
        Held(256, 96, 128, 1024, 1, others=13),
        Held(1 << 10, 96, 128, 768, 1),
        Held(2 << 10, 96, 128, 1024, 1, others=13),
        Held(4 << 10, 96, 64, 1024, 1),
        Held(8 << 10, 192, 128, 896, others=13),
        Held(32 << 10, 192, 256, 768),
    ),
    ("scaled", 4): (
        Held(1 << 10, 96, 128, 896, 1),
        Held(4 << 10, 96, 128, 1024, 1, others=13),
        Held(8 << 10, 96, 256, 1024, others=29),
        Held(16 << 10, 192, 256, 768),
        Held(128 << 10, 192, 256, 1024, others=29),
    ),
    ("summed", 2): (
        Held(255, 96, 64, 1024, 1),
        Held(256, 96, 128, 1024, 1, others=21),
        Held(1 << 10, 96, 64, 1024, 1),
        Held(2 << 10, 96, 128, 1024, 1, others=21),
        Held(4 << 10, 96, 64, 1024, 1),
        Held(8 << 10, 192, 256, 512),
        Held(32 << 10, 192, 256, 1024),
    ),
    ("summed", 4): (
        Held(1 << 10, 96, 128, 896, 1),
        Held(4 << 10, 96, 128, 1024, 1, others=21),
        Held(8 << 10, 192, 128, 768, 1, others=21),
        Held(16 << 10, 192, 512, 512),
        Held(128 << 10, 192, 256, 1024),
    ),
}
# To a byte an element, by (how many parameters, bytes of an element). Few bytes are moved for each element, so that instructions
# limit, and in 16 bits with two parameters a block that goes through many rows saves more of them than it loses. In float of
# 32 KB it needs fewer registers.
_QUANTIZED_HALVES = (
    Held(512, 32, 256, 1024, 3),
    Held(4 << 10, 64, 128, 640, 3, others=8),
    Held(6 << 10, 64, 128, 768, 2),
    Held(8 << 10, 64, 128, 640, 3, others=8),
)
QUANTIZED_HELD = {
    (0, 2): (
        Held(256, 32, 128, 896, rows=2),
        Held(4 << 10, 64, 64, 640),
        Held(8 << 10, 64, 128, 640),
        Held(32 << 10, 64, 256, 768),
    ),
    (0, 4): (
        Held(512, 32, 128, 896),
        Held(8 << 10, 64, 128, 1280),
        Held(16 << 10, 64, 256, 768),
        Held(128 << 10, 128, 256, 1024),
    ),
    (1, 2): (
        Held(256, 32, 128, 1024),
        Held(2 << 10, 64, 128, 768),
        Held(4 << 10, 64, 128, 768, 1, others=8),
        Held(6 << 10, 64, 128, 768, 2),
        Held(8 << 10, 64, 256, 768, 3, others=8),
        Held(32 << 10, 64, 256, 768, 2),
    ),
    (1, 4): (
        Held(512, 32, 128, 768),
        Held(2 << 10, 64, 64, 1024, others=8),
        Held(4 << 10, 64, 64, 640),
        Held(16 << 10, 128, 128, 640),
        Held(128 << 10, 128, 256, 768, others=8),
    ),
    (2, 2): (*_QUANTIZED_HALVES, Held(12 << 10, 64, 256, 768, 2), Held(32 << 10, 64, 512, 1024, 2, others=8)),
    (2, 4): (
        Held(512, 32, 128, 768, 1, rows=2),
        Held(2 << 10, 64, 64, 1024, others=8),
        Held(4 << 10, 128, 128, 640),
        Held(16 << 10, 128, 128, 640, 1, others=8),
        Held(32 << 10, 128, 512, 512, 2),
        Held(128 << 10, 128, 64, 1024),
    ),
}
# The same where nothing but those bytes is written: the scale is given. LayerNorm in 16 bits of 8192 columns 0.96, as above 0.93
# to 0.945, where with a scale of each row it is 0.92 to 0.94 and as above 0.94.
ONE_SCALE_HELD = {(2, 2): (*_QUANTIZED_HALVES, Held(32 << 10, 64, 256, 768, 2))}
# Of rows in accesses of fewer than 16 bytes that begin at one. H200: more elements a thread than above, and few of rows of up to
# 256 bytes: 33 columns of half 0.76 to 0.79, 601 of float 0.79 to 0.90, 1500 of half 0.84 to 0.92.
NARROW_HELD = {
    (0, 2): (Held(256, 16, 128, 1280), Held(32 << 10, 48, 128, 1024)),
    (1, 2): (Held(256, 16, 128, 1280, 1), Held(32 << 10, 48, 128, 1024)),
    (2, 2): (
        Held(66, 16, 64, 1280),
        Held(130, 16, 256, 1536, 1),
        Held(256, 16, 128, 1152, 1),
        Held(4 << 10, 48, 64, 768, 1),
        Held(32 << 10, 64, 256, 1024),
    ),
    (0, 4): (Held(8 << 10, 32, 128, 1280), Held(64 << 10, 48, 128, 1280)),
    (1, 4): (Held(512, 32, 128, 1280, 1), Held(64 << 10, 48, 128, 1280, 1)),
    (2, 4): (
        Held(132, 32, 64, 1024, 1),
        Held(512, 32, 128, 1280, 1),
        Held(1900, 68, 64, 512, 1),
        Held(2100, 68, 64, 768),
        Held(4100, 68, 64, 512, 1),
        Held(9 << 10, 68, 128, 896, 1),
        Held(64 << 10, 48, 128, 1280),
    ),
}
# Where rows begin anywhere, packs with single elements around them are better than narrow accesses: from so many bytes of a row
# on, by the same and by bytes of an access. A warp's accesses of 4 or 8 bytes fill whole lines, too, and parameters then need
# not be put together.
PEELED_ROW_BYTES = 16 << 10
PEELED_LEAST_BYTES: dict[tuple[int, int], dict[int, int]] = {
    (0, 2): {2: 192, 4: 512, 8: 3 << 10},
    (1, 2): {2: 192, 4: 2 << 10, 8: 4 << 10},
    (2, 2): {2: 192, 4: 4 << 10, 8: 4 << 10},
    (0, 4): {4: 1 << 10, 8: 1 << 10},
    (1, 4): {},
    (2, 4): {4: 9 << 10},
}
# And shorter ones, from, to, whose parameters wait as numbers: LayerNorm in float of 127 columns 0.896 to 0.924.
PEELED_SHORT_BYTES = {(2, 4): (256, 1100), (2, 2): (1551, 2062)}
# From so many rows on: 2048 rows of 900 columns have 1.02 in accesses of 8 bytes.
PEELED_SHORT_ROWS = {(2, 2): 4096}
# The same where something is computed on the way: for all.
FUSED_PEELED_LEAST_BYTES = {2: 128}
# Of such rows, where PEELED has no entry: how many bytes a thread holds, and threads resident.
PEELED_HELD = {
    (0, 2): (Held(32 << 10, 80, 128, 768),),
    (1, 2): (Held(32 << 10, 80, 128, 768),),
    (2, 2): (Held(32 << 10, 48, 256, 1024, 2),),
    (0, 4): (Held(128 << 10, 80, 256, 1024),),
    (1, 4): (Held(128 << 10, 80, 256, 768),),
    (2, 4): (Held(64 << 10, 80, 256, 1024),),
    (0, 8): _DOUBLES,
    (1, 8): _DOUBLES,
    (2, 8): _DOUBLES,
}


class Waiting(NamedTuple):
    """How rows of up to `row_bytes` are read twice, the second time from the level-1 cache.

    packs: of 16 bytes, of a thread, at a time. block: threads of a block at most; no more than take the row in whole turns.
    resident_threads: of a multiprocessor, while it caches all their rows.
    """

    row_bytes: int
    packs: int
    block: int
    resident_threads: int


# Rows of fewer bytes are as fast or faster in registers, by (how many parameters of the columns the op has, bytes of an element):
# softmax in 16 bits of 2048 columns 0.97 to 1.005 from the cache, 1.01 in registers.
CACHED_LEAST_BYTES = {
    (0, 2): (4 << 10) + 1,
    (1, 2): 4 << 10,
    (2, 2): 6 << 10,
    (0, 4): 4 << 10,
    (1, 4): 6 << 10,
    (2, 4): 6 << 10,
}
# By the same, the first that is long enough; longer rows than the last are better in shared memory. H200: 1.00 to 1.016 of the
# copy rate, 0.03 more than in registers, where a block's threads take all of a row at once; in two turns 0.02 to 0.1 less.
CACHED: dict[tuple[int, int], tuple[Waiting, ...]] = {
    (0, 2): (
        Waiting(4 << 10, 2, 128, 1280),
        Waiting(8 << 10, 4, 128, 1280),
        Waiting(16 << 10, 4, 256, 1024),
        Waiting(32 << 10, 2, 512, 1536),
        Waiting(40 << 10, 2, 1024, 1024),
        Waiting(48 << 10, 3, 512, 1024),
        Waiting(60 << 10, 2, 640, 1024),
        Waiting(64 << 10, 2, 1024, 1024),
    ),
    (1, 2): (
        Waiting(4 << 10, 2, 128, 1280),
        Waiting(8 << 10, 2, 256, 2048),
        Waiting(13 << 10, 3, 288, 1024),
        Waiting(16 << 10, 2, 512, 2048),
        Waiting(32 << 10, 4, 512, 1024),
        Waiting(64 << 10, 4, 1024, 2048),
    ),
    (2, 2): (
        Waiting(8 << 10, 4, 128, 1024),
        Waiting(16 << 10, 4, 256, 1024),
        Waiting(24 << 10, 4, 512, 1536),
        Waiting(28 << 10, 4, 512, 1792),
        Waiting(32 << 10, 4, 512, 1536),
        Waiting(41 << 10, 4, 1024, 2048),
    ),
    (0, 4): (
        Waiting(4 << 10, 2, 128, 1024),
        Waiting(8 << 10, 2, 256, 1536),
        Waiting(13 << 10, 3, 288, 1024),
        Waiting(32 << 10, 2, 512, 1536),
        Waiting(64 << 10, 4, 1024, 1024),
        Waiting(80 << 10, 3, 1024, 1024),
    ),
    (1, 4): (
        Waiting(8 << 10, 2, 256, 2048),
        Waiting(16 << 10, 2, 512, 2048),
        Waiting(32 << 10, 4, 512, 1024),
        Waiting(64 << 10, 2, 1024, 1024),
    ),
    (2, 4): (
        Waiting(8 << 10, 2, 256, 2048),
        Waiting(13 << 10, 3, 288, 1024),
        Waiting(16 << 10, 2, 256, 1280),
        Waiting(32 << 10, 4, 512, 1536),
    ),
}
DOUBLES_CACHED = (Waiting(32 << 10, 1, 256, 256),)


class Ragged(NamedTuple):
    """How rows of more than `above` and up to `row_bytes` are spread that fill no power of two of threads.

    packs: of a thread. many: only where a multiprocessor has many rows to go through (True), or few (False); least_rows: only
    where it has so many. warps: by any number of warps, not a power of two of threads. The rest as in Held.
    """

    packs: int
    row_bytes: int
    block: int
    resident_threads: int
    hoist: int = 0
    rows: int = 1
    above: int = 0
    many: bool | None = None
    warps: bool = False
    least_rows: int = 0


# Rows that begin at packs: the entry that leaves the fewest places of threads empty, where it leaves no more than HELD does; of
# as many, the first. H200, 49152 rows: 3 packs for 600 columns in 16 bits, 96 places instead of 128: LayerNorm 0.64 to 0.93,
# softmax 0.80 to 0.98; 5 for 5000, 640 instead of 768: LayerNorm 0.82 to 0.98. Ahead of CACHED, where rows begin within a
# line of the cache: softmax in 16 bits of 2200, 5000, 7000 columns 0.77 to 0.99, 0.74 to 0.97, 0.67 to 0.99.
RAGGED: dict[tuple[int, int], tuple[Ragged, ...]] = {
    (0, 2): (
        Ragged(6, 24 << 10, 128, 768, above=16 << 10),
        Ragged(6, 40 << 10, 64, 768, above=24 << 10, warps=True),
        Ragged(3, 32 << 10, 128, 1152),
        Ragged(4, 32 << 10, 128, 1024, above=2 << 10),
        Ragged(5, 40 << 10, 128, 1024, above=2 << 10),
        Ragged(6, 24 << 10, 128, 768, above=2 << 10),
    ),
    (1, 2): (
        Ragged(1, 160, 128, 1280, rows=2),
        Ragged(2, 2 << 10, 128, 896, 1, rows=2, above=1536, many=False),
        Ragged(3, 2 << 10, 128, 768, 1, above=160),
        Ragged(6, 24 << 10, 128, 768, above=8 << 10),
        Ragged(3, 32 << 10, 128, 1024, above=2 << 10),
        Ragged(4, 32 << 10, 128, 1024, above=2 << 10),
        Ragged(5, 32 << 10, 128, 768, above=2 << 10),
        Ragged(6, 24 << 10, 128, 640, above=2 << 10),
    ),
    (2, 2): (
        Ragged(4, 2 << 10, 64, 768, 1, above=512, many=True),
        Ragged(4, 2 << 10, 64, 512, 1),
        Ragged(3, 200, 64, 768, 1, above=80),
        Ragged(2, 160, 128, 1024, rows=2),
        Ragged(3, 2 << 10, 128, 1280, above=160),
        Ragged(8, (20 << 10) - 1, 64, 640, above=16 << 10, warps=True),
        Ragged(8, 32 << 10, 64, 576, above=20 << 10, warps=True),
        Ragged(5, 32 << 10, 64, 896, above=24 << 10, warps=True),
        Ragged(7, 24 << 10, 128, 640, above=4 << 10, warps=True),
        Ragged(4, 32 << 10, 128, 1024, above=2 << 10),
        Ragged(6, 8 << 10, 64, 640, above=2 << 10),
        Ragged(6, 24 << 10, 128, 768, above=8 << 10),
        Ragged(5, 24 << 10, 64, 896, above=1300),
        Ragged(3, 24 << 10, 128, 1152, above=2 << 10),
    ),
    (0, 4): (
        Ragged(2, 192, 128, 1280, rows=2),
        Ragged(3, 8 << 10, 128, 1280, above=192),
        Ragged(6, 128 << 10, 128, 1024, above=2 << 10),
        Ragged(5, 128 << 10, 128, 1024, above=2 << 10),
        Ragged(8, 64 << 10, 128, 1024, above=4 << 10),
        Ragged(7, 128 << 10, 128, 1024, above=2 << 10),
        Ragged(8, 128 << 10, 128, 1024, above=96 << 10),
        Ragged(4, 64 << 10, 128, 1280, above=4 << 10),
    ),
    (1, 4): (
        Ragged(3, 6 << 10, 128, 768, 1),
        Ragged(5, 80 << 10, 128, 1024, above=6 << 10),
        Ragged(6, 64 << 10, 128, 1024, above=6 << 10),
        Ragged(7, 64 << 10, 128, 1024, above=6 << 10),
        Ragged(4, 64 << 10, 128, 1024, above=6 << 10),
        Ragged(6, 96 << 10, 128, 1024, above=80 << 10),
    ),
    (2, 4): (
        Ragged(4, 4 << 10, 64, 640, 1),
        Ragged(2, 112, 64, 1024, rows=2),
        Ragged(3, 2 << 10, 128, 768, 1, above=112),
        Ragged(5, 80 << 10, 64, 1024, above=1536),
        Ragged(3, 8 << 10, 128, 1280, above=2 << 10),
        Ragged(4, 64 << 10, 128, 1024, above=4 << 10),
        Ragged(6, 64 << 10, 128, 1024, above=2 << 10),
        Ragged(7, 64 << 10, 128, 1024, above=2 << 10),
        Ragged(7, 52 << 10, 64, 896, above=8 << 10, warps=True),
        Ragged(6, 96 << 10, 128, 1024, above=80 << 10),
    ),
}
# Rows that fill every place of their threads, and parameters of x's type, where that is better than HELD. H200, 49152 rows,
# before / as built in, kernels beginning early: RMSNorm in 16 bits of 32 / 128 columns 1.02 to 1.14, 1.04 to 1.05; softmax in 16
# bits of 32 / 64 / 128 1.12 to 1.15, 1.07 to 1.09, 1.05 to 1.07, in float of 64 / 128 1.05 to 1.08, 1.02 to 1.04; LayerNorm in 16
# bits of 1024 / 2048 0.988 to 1.00, 0.994 to 1.005, in float of 768 0.987 to 1.00. What shares a thread among rows only where
# those are many. LayerNorm of 32 columns is better by HELD: in 16 bits 1.04 against 0.98 by two rows.
FULL: dict[tuple[int, int], tuple[Ragged, ...]] = {
    (0, 2): (
        Ragged(2, 64, 64, 2048),
        Ragged(2, 128, 128, 2048, above=64),
        Ragged(2, 512, 64, 1280, rows=2, above=128, many=True),
        Ragged(4, 1 << 10, 64, 1280, above=512, many=True),
    ),
    (1, 2): (
        Ragged(2, 256, 128, 768, 1),
        Ragged(3, 1536, 512, 1024, 1, above=1535),
    ),
    (2, 2): (
        Ragged(1, 128, 64, 768, 4, rows=4, above=64, many=True),
        Ragged(2, 1 << 10, 64, 640, 1, rows=2, above=128, many=True),
        Ragged(3, 1536, 64, 896, 1, above=1535),
        Ragged(4, 2 << 10, 128, 768, 1, above=2047, many=True),
        Ragged(4, 4 << 10, 64, 768, 1, above=4095),
    ),
    (0, 4): (
        Ragged(2, 512, 64, 1024, rows=2, above=128, many=True),
        Ragged(2, 1 << 10, 64, 1536, rows=2, above=512, many=True),
        Ragged(4, 2 << 10, 64, 1280, above=1 << 10, many=True),
    ),
    (1, 4): (
        Ragged(2, 128, 128, 1280),
        Ragged(2, 512, 128, 1280, 1, rows=2, above=128, many=True),
        Ragged(4, 1 << 10, 64, 1280, 1, above=512, many=True),
    ),
    (2, 4): (
        Ragged(2, 256, 64, 768, 4, rows=4, above=128, many=True),
        Ragged(3, 3 << 10, 128, 768, 1, above=3071),
    ),
}
# Bytes of a row up to which one that fills no whole warps is better in registers: LayerNorm of 3200 columns in 16 bits 0.77 to
# 0.98, of 1600 in float 0.88 to 0.99, softmax of 8000 in 16 bits 0.82 to 0.99, of 12000 in float 0.92 to 0.98.
RAGGED_ROW_BYTES = {
    (0, 2): 40 << 10,
    (1, 2): 32 << 10,
    (2, 2): 30 << 10,
    (0, 4): 80 << 10,
    (1, 4): 80 << 10,
    (2, 4): 80 << 10,
}
# Rows that begin anywhere: the same; what is not here is in PEELED_HELD. gamma and beta of 16 bits lie otherwise than x, and to
# put them together costs 11 instructions a pack. While rows are few (8192 of 1023 columns), what is left of the last turn counts:
# then it is done once for all rows of a block, which are on their way while others are in work. Else more packs a thread win:
# LayerNorm, 49152 rows of 601 / 1023 / 3001 columns 0.55 / 0.85 / 0.86 to 0.86 / 0.915 / 0.93. H200, 8192 rows: softmax of 601
# columns 0.71 to 0.97, RMSNorm of 3001 0.85 to 0.93 and of 7001 0.83 to 0.935; LayerNorm in float of 7001 0.83 to 0.94.
PEELED: dict[tuple[int, int], tuple[Ragged, ...]] = {
    (0, 2): (
        Ragged(1, 288, 256, 1536),
        Ragged(2, 2100, 128, 1024, rows=2),
        Ragged(8, 32 << 10, 64, 512, above=24 << 10, warps=True),
        Ragged(4, 32 << 10, 128, 896),
        Ragged(5, 41 << 10, 128, 1024, above=32 << 10),
        Ragged(3, 32 << 10, 128, 1024),
        Ragged(5, 32 << 10, 128, 768),
        Ragged(6, 24 << 10, 64, 640, above=2 << 10),
        Ragged(2, 32 << 10, 128, 1024, above=2100),
    ),
    (1, 2): (
        Ragged(1, 288, 128, 896, 1, rows=2, many=True),
        Ragged(1, 288, 256, 1280),
        Ragged(2, 640, 128, 1152, 4, above=288),
        Ragged(2, 1100, 128, 1024, rows=2, above=640),
        Ragged(5, 1282, 128, 768, 4, above=1100),
        Ragged(4, 2052, 128, 768, 4, above=2000),
        Ragged(2, 2100, 128, 896, 1, rows=2, above=1100),
        Ragged(3, 3074, 256, 1024, 4, above=2100),
        Ragged(2, 5 << 10, 128, 896, rows=2, above=2100),
        Ragged(3, 32 << 10, 128, 1024),
        Ragged(4, 32 << 10, 128, 1024),
        Ragged(5, 32 << 10, 128, 768),
    ),
    (2, 2): (
        Ragged(1, 288, 128, 896, 1, rows=2, many=True),
        Ragged(1, 288, 256, 1024, 1, many=False),
        Ragged(2, 640, 128, 896, 4, rows=2, above=288, many=True),
        Ragged(2, 640, 128, 1024, 4, above=288),
        Ragged(2, 1100, 64, 768, 1, rows=2, above=640),
        Ragged(5, 1282, 96, 768, 4, above=1100),
        Ragged(4, 2062, 512, 1024, 4, above=1550, many=False, least_rows=16),
        Ragged(4, 6200, 64, 896, above=2000, many=True),
        Ragged(6, 6200, 64, 640, above=2000, many=True),
        Ragged(5, 6200, 64, 640, above=1100, many=True),
        Ragged(3, 2000, 128, 1024),
        Ragged(4, 2000, 64, 896),
        Ragged(5, 2000, 128, 512, 1),
        Ragged(2, 4 << 10, 128, 1024, 3, above=2000),
        Ragged(2, 32 << 10, 256, 1024, 2, above=4 << 10),
        Ragged(3, 32 << 10, 128, 1024, 2, above=2000),
    ),
    (0, 4): (
        Ragged(2, 2 << 10, 128, 1280, rows=2),
        Ragged(8, 32 << 10, 128, 768),
        Ragged(8, 64 << 10, 64, 960, above=48 << 10, warps=True),
        Ragged(4, 64 << 10, 128, 1024),
        Ragged(6, 32 << 10, 128, 768),
        Ragged(7, 32 << 10, 128, 768),
        Ragged(5, 80 << 10, 128, 1024),
        Ragged(3, 64 << 10, 128, 1152),
        Ragged(8, 128 << 10, 128, 1024, above=80 << 10),
    ),
    (1, 4): (
        Ragged(5, 24 << 10, 128, 768, 1, above=16 << 10, many=False),
        Ragged(5, 80 << 10, 128, 1024),
        Ragged(7, 32 << 10, 128, 768),
        Ragged(6, 32 << 10, 128, 768),
        Ragged(4, 64 << 10, 128, 1024),
        Ragged(8, 32 << 10, 128, 768),
        Ragged(3, 64 << 10, 128, 1024, above=32 << 10),
        Ragged(8, 128 << 10, 128, 1024, above=80 << 10),
    ),
    (2, 4): (
        Ragged(3, 700, 128, 1024, 1, above=256),
        Ragged(2, 576, 128, 1152, 4),
        Ragged(4, 1100, 128, 1152, 4, above=576),
        Ragged(4, 20 << 10, 128, 1024, above=1100),
        Ragged(7, 33 << 10, 64, 960, above=30 << 10, warps=True),
        Ragged(4, 64 << 10, 128, 1024, above=33 << 10),
        Ragged(5, 64 << 10, 128, 1024, above=1100),
        Ragged(6, 32 << 10, 128, 768, above=1100),
        Ragged(7, 32 << 10, 128, 768, above=1100),
        Ragged(3, 64 << 10, 128, 1152, above=1100),
    ),
}
MANY_ROWS = 192  # of a multiprocessor


class Spread(NamedTuple):
    """How rows of up to `row_bytes` lie in the registers of `parts` blocks: of a cluster, or one alone.

    packs: of a thread, or up to `fewer` less if that leaves fewer places of threads empty. stages: as in Plan. Each block has so
    many warps as that takes, and a multiprocessor so many blocks as it has registers and shared memory for. peels: for rows that
    begin anywhere, as y's do (True), that begin at packs (False), or both (None). above: for rows of more than so many bytes.
    """

    row_bytes: int
    parts: int
    packs: int
    stages: int
    peels: bool | None = False
    above: int = 0
    fewer: int = 2


class Kept(NamedTuple):
    """The same, where a block keeps its share in shared memory: as few parts as are needed for share_bytes at most.

    A multiprocessor has so many blocks as its shared memory holds shares, of so many threads that these are `threads` in all.
    aligned: whether rows that begin at packs are held so, too.
    """

    row_bytes: int
    threads: int
    packs: int
    share_bytes: int
    aligned: bool = True


# How clusters share rows, by (how many parameters, bytes of an element): the first that can hold a row. In registers the next row
# is on its way, and parameters stay in shared memory for all rows of a block, since read again from L2 for each they alone take
# it to 0.6 to 0.9 of the copy rate; blocks claim their rows as they come to them. Without parameters rows in blocks of their own,
# several on a multiprocessor, are as fast, and better where they fill 16 or 32 KB of each. H200, 200 MB to 1 GB, 30 widths
# (docs/notes/013): 0.95 to 0.99 at powers of two, 0.85 to 0.98 between.
_KEPT_LONG = (
    Kept(row_bytes=MOST_ROW, threads=1024, packs=4, share_bytes=100 << 10),
    Kept(row_bytes=MOST_ROW, threads=512, packs=4, share_bytes=220 << 10),
)
_KEPT_HALVES = (Kept(row_bytes=MOST_ROW, threads=1024, packs=4, share_bytes=64 << 10), *_KEPT_LONG)
_KEPT_FLOATS = (Kept(row_bytes=MOST_ROW, threads=800, packs=4, share_bytes=66 << 10), *_KEPT_LONG)
CLUSTERS: dict[tuple[int, int], tuple[Spread | Kept, ...]] = {
    (0, 2): (
        Kept(row_bytes=64 << 10, threads=1024, packs=2, share_bytes=64 << 10),
        Spread(row_bytes=104 << 10, parts=8, packs=5, stages=1),
        Kept(row_bytes=104 << 10, threads=1280, packs=2, share_bytes=50 << 10, aligned=False),
        Kept(row_bytes=132 << 10, threads=1024, packs=2, share_bytes=33 << 10),
        Spread(row_bytes=210 << 10, parts=8, packs=5, stages=1, fewer=0),
        Kept(row_bytes=310 << 10, threads=1024, packs=2, share_bytes=38 << 10),
        Spread(row_bytes=420 << 10, parts=8, packs=7, stages=2, fewer=0),
        Kept(row_bytes=530 << 10, threads=800, packs=2, share_bytes=33 << 10),
        *_KEPT_HALVES,
    ),
    (0, 4): (
        Kept(row_bytes=264 << 10, threads=1280, packs=4, share_bytes=33 << 10),
        Spread(row_bytes=400 << 10, parts=8, packs=5, stages=2),
        Kept(row_bytes=530 << 10, threads=1280, packs=4, share_bytes=33 << 10),
        Spread(row_bytes=820 << 10, parts=8, packs=7, stages=1, fewer=0),
        Kept(row_bytes=1 << 20, threads=1280, packs=4, share_bytes=64 << 10, aligned=False),
        *_KEPT_FLOATS,
    ),
    (1, 2): (
        Spread(row_bytes=25 << 10, parts=2, packs=4, stages=2, peels=True, fewer=0),
        Spread(row_bytes=30 << 10, parts=2, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=36 << 10, parts=4, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=42 << 10, parts=2, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=52 << 10, parts=4, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=66 << 10, parts=4, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=84 << 10, parts=8, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=110 << 10, parts=8, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=150 << 10, parts=8, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=220 << 10, parts=16, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=264 << 10, parts=8, packs=6, stages=1, peels=True, fewer=0),
        Spread(row_bytes=330 << 10, parts=16, packs=6, stages=1, peels=True, fewer=0),
        Spread(row_bytes=440 << 10, parts=16, packs=5, stages=2, peels=True, fewer=0),
        Spread(row_bytes=530 << 10, parts=8, packs=7, stages=1, peels=True, fewer=0),
        Spread(row_bytes=640 << 10, parts=16, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=860 << 10, parts=16, packs=5, stages=2, peels=True, fewer=0),
        Spread(row_bytes=104 << 10, parts=8, packs=6, stages=1, fewer=1),
        Spread(row_bytes=132 << 10, parts=8, packs=7, stages=1, fewer=0),
        Spread(row_bytes=210 << 10, parts=8, packs=5, stages=1, fewer=0),
        Spread(row_bytes=264 << 10, parts=4, packs=8, stages=1, above=(256 << 10) - 1, fewer=0),
        Spread(row_bytes=264 << 10, parts=8, packs=8, stages=1, fewer=0),
        Spread(row_bytes=310 << 10, parts=16, packs=8, stages=1, fewer=0),
        Spread(row_bytes=410 << 10, parts=16, packs=5, stages=2, fewer=0),
        Spread(row_bytes=530 << 10, parts=8, packs=8, stages=1, fewer=0),
        Spread(row_bytes=820 << 10, parts=16, packs=5, stages=2, fewer=0),
        Spread(row_bytes=MOST_ROW, parts=16, packs=8, stages=1),
        *_KEPT_HALVES,
    ),
    (1, 4): (
        Spread(row_bytes=42 << 10, parts=2, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=50 << 10, parts=8, packs=3, stages=2, peels=True, fewer=0),
        Spread(row_bytes=72 << 10, parts=4, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=84 << 10, parts=8, packs=2, stages=1, peels=True, fewer=0),
        Spread(row_bytes=130 << 10, parts=8, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=170 << 10, parts=16, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=220 << 10, parts=8, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=320 << 10, parts=16, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=440 << 10, parts=16, packs=3, stages=2, peels=True, fewer=0),
        Spread(row_bytes=640 << 10, parts=16, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=860 << 10, parts=16, packs=7, stages=1, peels=True, fewer=0),
        Spread(row_bytes=1040 << 10, parts=16, packs=7, stages=2, peels=True, fewer=0),
        Spread(row_bytes=1600 << 10, parts=16, packs=7, stages=1, peels=True, fewer=0),
        Spread(row_bytes=132 << 10, parts=4, packs=4, stages=1, fewer=0),
        Spread(row_bytes=150 << 10, parts=8, packs=4, stages=1, fewer=0),
        Spread(row_bytes=210 << 10, parts=8, packs=5, stages=2, fewer=0),
        Spread(row_bytes=264 << 10, parts=8, packs=4, stages=1, fewer=0),
        Spread(row_bytes=410 << 10, parts=8, packs=5, stages=2, fewer=0),
        Spread(row_bytes=530 << 10, parts=8, packs=8, stages=1, fewer=1),
        Spread(row_bytes=820 << 10, parts=8, packs=7, stages=1, fewer=0),
        Spread(row_bytes=MOST_ROW, parts=16, packs=5, stages=2),
        *_KEPT_FLOATS,
    ),
    (2, 2): (
        Spread(row_bytes=16 << 10, parts=2, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=26 << 10, parts=2, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=36 << 10, parts=2, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=44 << 10, parts=4, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=70 << 10, parts=4, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=88 << 10, parts=4, packs=6, stages=1, peels=True, fewer=0),
        Spread(row_bytes=104 << 10, parts=2, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=150 << 10, parts=8, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=220 << 10, parts=16, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=264 << 10, parts=8, packs=6, stages=1, peels=True, fewer=0),
        Spread(row_bytes=340 << 10, parts=16, packs=7, stages=1, peels=True, fewer=0),
        Spread(row_bytes=440 << 10, parts=8, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=530 << 10, parts=8, packs=7, stages=1, peels=True, fewer=0),
        Spread(row_bytes=700 << 10, parts=16, packs=7, stages=1, peels=True, fewer=0),
        Spread(row_bytes=860 << 10, parts=16, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=50 << 10, parts=8, packs=4, stages=1, fewer=0),
        Spread(row_bytes=76 << 10, parts=8, packs=3, stages=1, fewer=0),
        Spread(row_bytes=104 << 10, parts=8, packs=4, stages=1, fewer=0),
        Spread(row_bytes=120 << 10, parts=8, packs=5, stages=1, fewer=0),
        Spread(row_bytes=132 << 10, parts=8, packs=3, stages=1, fewer=0),
        Spread(row_bytes=210 << 10, parts=16, packs=4, stages=1, fewer=0),
        Spread(row_bytes=264 << 10, parts=8, packs=6, stages=1, fewer=0),
        Spread(row_bytes=340 << 10, parts=16, packs=4, stages=1, fewer=0),
        Spread(row_bytes=410 << 10, parts=8, packs=4, stages=2, fewer=0),
        Spread(row_bytes=530 << 10, parts=8, packs=6, stages=1, fewer=0),
        Spread(row_bytes=820 << 10, parts=16, packs=5, stages=1, fewer=0),
        Spread(row_bytes=288 << 10, parts=8, packs=8, stages=1),
        Spread(row_bytes=320 << 10, parts=16, packs=8, stages=1),
        Spread(row_bytes=450 << 10, parts=8, packs=8, stages=2),
        Spread(row_bytes=560 << 10, parts=8, packs=8, stages=1),
        Spread(row_bytes=MOST_ROW, parts=16, packs=8, stages=1),
        Spread(row_bytes=64 << 10, parts=1, packs=8, stages=1, peels=None),
        *_KEPT_HALVES,
    ),
    (2, 4): (
        Spread(row_bytes=44 << 10, parts=4, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=50 << 10, parts=2, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=60 << 10, parts=4, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=72 << 10, parts=8, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=84 << 10, parts=8, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=104 << 10, parts=8, packs=3, stages=1, peels=True, fewer=0),
        Spread(row_bytes=140 << 10, parts=8, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=170 << 10, parts=8, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=205 << 10, parts=4, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=300 << 10, parts=16, packs=4, stages=1, peels=True, fewer=0),
        Spread(row_bytes=420 << 10, parts=8, packs=5, stages=2, peels=True, fewer=0),
        Spread(row_bytes=640 << 10, parts=16, packs=5, stages=1, peels=True, fewer=0),
        Spread(row_bytes=860 << 10, parts=16, packs=5, stages=2, peels=True, fewer=0),
        Spread(row_bytes=1040 << 10, parts=16, packs=8, stages=1, peels=True, fewer=0),
        Spread(row_bytes=66 << 10, parts=4, packs=3, stages=1, fewer=0),
        Spread(row_bytes=100 << 10, parts=4, packs=4, stages=1, fewer=0),
        Spread(row_bytes=150 << 10, parts=8, packs=3, stages=1, fewer=0),
        Spread(row_bytes=210 << 10, parts=8, packs=5, stages=1, fewer=0),
        Spread(row_bytes=264 << 10, parts=8, packs=4, stages=1, fewer=0),
        Spread(row_bytes=410 << 10, parts=8, packs=5, stages=2, fewer=0),
        Spread(row_bytes=530 << 10, parts=8, packs=8, stages=1, fewer=1),
        Spread(row_bytes=600 << 10, parts=8, packs=8, stages=1),
        Spread(row_bytes=820 << 10, parts=16, packs=5, stages=2, fewer=0),
        Spread(row_bytes=900 << 10, parts=16, packs=8, stages=2),
        Spread(row_bytes=MOST_ROW, parts=16, packs=8, stages=1),
        *_KEPT_FLOATS,
    ),
}
# Where something is computed on the way, rows of so many bytes are better in clusters, by (what, bytes of an element): of rows
# that begin at packs, and of those that begin anywhere. Softmax with a byte mask in 16 bits of 12288 columns 0.943 to 0.98 of the
# copy rate, of 10240 0.995 to 0.978, with lengths of 16384 0.949 to 0.925; add_layer_norm with the sum of 12288 0.848 to 0.913,
# of 10240 0.959 to 0.90, in float of 10240 0.956 to 0.93, in 16 bits of 8001 0.83 to 0.90, of 12289 0.69 to 0.93; LayerNorm to
# int8 in 16 bits of 16384 0.831 and 0.828 at 4096 rows, 0.907 in clusters at 49152.
FUSED_CLUSTER_BYTES = {
    ("masked", 2): (24 << 10, 24 << 10),
    ("masked", 4): (40 << 10, 31 << 10),
    ("bounded", 2): ((32 << 10) + 1, 24 << 10),
    ("bounded", 4): (40 << 10, 31 << 10),
    ("scaled", 2): (24 << 10, 15 << 10),
    ("scaled", 4): (48 << 10, 31 << 10),
    ("quantized", 2): (32 << 10, (32 << 10) + 1),
    ("quantized", 4): (48 << 10, 48 << 10),
}
NEVER = (MOST_ROW, MOST_ROW)
# The share of a device's multiprocessors that clusters of so many blocks reach: those of a GPC are not always a multiple.
CLUSTER_SHARES = {2: 1.0, 4: 0.94, 8: 0.92, 16: 0.85}
DOUBLES_SHARED = tuple(Spread(parts * (32 << 10), parts, 8, 0, peels=None) for parts in (1, 2, 4, 8, 16))
# Of a row, by the same: from there on blocks of a cluster are better than one, if the row fills no whole warps, or, of floats
# with two parameters, always. LayerNorm in 16 bits of 24000 columns 0.85 to 0.92, in float of 12288 0.977 to 0.985, of 16384 0.97
# to 0.99, softmax in 16 bits of 30000 0.91 to 0.95.
SHARED_OUT_BYTES = {(0, 2): 44 << 10, (1, 2): 44 << 10, (2, 2): 44 << 10, (2, 4): 47 << 10}
# The same of rows that begin anywhere, as y's do, whose parameters are then numbers in shared memory. LayerNorm in 16 bits of
# 7001 columns 0.81 to 0.875, in float of 10001 0.875 to 0.95, RMSNorm in 16 bits of 12001 0.86 to 0.93, in float of 10001 0.96
# to 0.97.
SHARED_OUT_PEELED_BYTES = {(1, 2): 22 << 10, (1, 4): 38 << 10, (2, 2): 9 << 10, (2, 4): 32 << 10}
