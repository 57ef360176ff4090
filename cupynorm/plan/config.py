"""Plan: what will be launched, as a kernel's template numbers and its launch. Facts of hardware and kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from cupynorm._options import shown
from cupynorm._values import dataclass

VARIANTS = ("warp", "block", "cached", "cluster", "split", "shared", "uncached")

# Bytes of an element.
HALF_BYTES, FLOAT_BYTES, DOUBLE_BYTES = 2, 4, 8
MEGABYTE = 1 << 20

# Facts of CUDA devices.
WARP = 32
MAX_BLOCK = 1024  # threads of a block
MAX_GRID = 2**31 - 1  # blocks of a grid
ACCESS_BYTES = 16  # the widest access
SECTOR_BYTES = 32  # of a line: what memory moves at least
LINE_BYTES = 128  # of the level-1 cache: a block's part of an unaligned row may begin at a line
REGISTER_BYTES = 4
MOST_REGISTERS = 255  # of a thread
BYTE_BITS = 8
REGISTER_UNIT = 8  # registers of a thread that are given out together: 256 for each warp
# Multiprocessors of a GPC, within which a cluster runs: 16 or 18 of an H100 and an H200.
LEAST_SMS_OF_PART = 16
AMPERE, HOPPER = 80, 90  # compute capabilities that brought asynchronous copies, and clusters
MAX_CTAS, PORTABLE_CTAS = 16, 8  # blocks of a cluster: at most, and on every device that has clusters
LARGE_CLUSTERS = {"90", "100", "103"}  # compute capabilities that take MAX_CTAS blocks in a cluster

# Facts of the kernels.
MAX_DYNAMIC_ROWS = 2**30  # the scheduler counts in 31 bits, and blocks ask for a few more rows than there are
MAX_CACHED_COLS = 2**31 - 1  # row_cached counts columns in 32 bits
MAX_CACHED_VECTORS = 4  # that a thread of row_cached loads at a time
MAX_ROWS_SIDE_BY_SIDE = 8  # that one block of row_together reads
FIELDS_SHARED_BYTES = 512  # static ones of States of five doubles (CrossEntropy), beyond STATIC_SHARED_BYTES
# static ones of States of seven numbers and of what steps find (ClipOnChip), beyond STATIC_SHARED_BYTES
ROUNDS_SHARED_BYTES = {4: 1024, 8: 4096}
SCHEDULERS = 4  # of a multiprocessor: each has registers of its own, so blocks are of whole warps for each
MIN_REREAD_BLOCK = 128  # threads of row_reread, whose vectors of results have room for a message
# As many vectors of threads hold what is before a row's first line themselves (kUnit in staged.cuh).
EDGE_VECTORS = 9
# The vectors of a group whose parameters are converted have a multiple of so many elements.
CONVERTED_ELEMENTS = 8
MAX_NUMBERS_ACROSS = 64  # numbers that a thread of row_across has at a time: a bit for each
MAX_PACKED_ACROSS = 128  # the same where they wait two in a register
# Neighbouring rows of a thread where a mask has a byte of each in a word (kernels/io/masks.cuh).
MAX_ROWS_OF_WORD = 4
COUNTER_BYTES = 128  # of each group of blocks that share rows over the grid: kCounterBytes in row/meeting.cuh
WHOLE_COLUMNS = 1024  # of a block, whose gamma and beta wait in shared memory: as in row/whole_tile.cuh
PART_NUMBERS = 32  # that a thread computes at a time where they wait two in a register
# Elements of a row that are then computed at a time, where a thread has more than MAX_NUMBERS_ACROSS.
PARTS_ACROSS = 4
MOST_ROW_NUMBERS = 8  # in an op's State and pivot, or in its Row
NUMBERS_OF_SUMS = 5  # in the state of sums of deviations; exponentials have fewer
MESSAGE_NUMBERS = 8  # room of what a block of a grid tells another, in numbers of the compute type
MESSAGE_BYTES = 32  # the same where the row waits in registers, or is read twice side by side
# Threads of MAX_CTAS blocks for whose two reductions static shared memory has room.
MAX_TWO_REDUCTIONS_BLOCK = 512
RESULT_BYTES = 2  # of an element of the results among which messages lie, at least
# The most that messages have room for where they have memory of their own: bytes of a message, rows that blocks share
# before they meet (kMost in row/reread.cuh), and blocks that share the rows in work.
ROOM_BYTES, ROOM_ROWS, ROOM_BLOCKS = 96, 8, 1024

# Rows of a block that come and go as one stretch of memory: so many, or a multiple (kRows in kernels/row/tiled.cuh).
TILE_ROWS = 8

# Where a block keeps affine parameters. AT_USE: nowhere, they are loaded when they are used. PER_ROW: in registers,
# loaded with each row. SHARED, REGISTERS: loaded once for all rows. CONVERTED: in shared memory, in the compute type,
# where every thread finds those of any column. BOTH: loaded once for all rows, those of a thread's first vectors, one
# of SHARED_OF_VECTORS (kVectorsOfOneShared in kernels/row/columns.cuh), in shared memory, the others in registers.
AT_USE, PER_ROW, SHARED, REGISTERS, CONVERTED, BOTH = range(6)
SHARED_OF_VECTORS = 4

# Where rows wait whose elements lie apart. EVENLY: in registers of threads of which each has all of its elements but
# SPARE_ELEMENTS, and one at least. Where prefetched rows wait with sums over rows beside them; CUT: in registers, with
# vectors that may begin before an unaligned row, or end behind it.
NOWHERE, IN_REGISTERS, EVENLY, CUT = range(4)
SPARE_ELEMENTS = 4  # kSpare in kernels/row/apart.cuh

# Whether rows begin at vectors: all do; they do not, but x is aligned as y is; they do not, and x is aligned otherwise.
ALIGNED, UNALIGNED, UNALIGNED_APART = range(3)

ONE_BLOCK_PER_ROW = math.inf  # waves: as many as there are rows


def in_accesses(size: int) -> int:
    """Round bytes up to whole 16-byte accesses."""
    return -(-size // ACCESS_BYTES) * ACCESS_BYTES


def room_bytes(rows: int, cols: int) -> int:
    """Return how much room blocks may need that share such rows and read them twice; 0 where no blocks share one.

    As GridMeeting in kernels/row/meeting.cuh: a counter of each group of blocks, and two sets of each block's messages.
    """
    blocks = min(rows * (cols // MIN_REREAD_BLOCK), ROOM_BLOCKS)
    return blocks * (COUNTER_BYTES + 2 * ROOM_ROWS * ROOM_BYTES)


@dataclass(frozen=True)
class Plan:
    """What will be launched.

    Attributes
    ----------
    variant
        Where a row waits between its statistics and its result: one of VARIANTS.
    vector, vectors
        Elements that one access moves, and accesses that a thread holds (of one row; a chunk in shared, split,
        uncached).
    group, rows_per_group
        Threads of a block that share a row (0: the whole block), and rows that they hold at once.
    full
        The vectors of all threads are exactly the row.
    parameter_cache
        Where affine parameters wait: AT_USE, PER_ROW, SHARED, REGISTERS, CONVERTED or BOTH.
    unaligned, alignment_period
        Rows do not begin at vectors: head and tail elements go one by one (1; 2: x is aligned otherwise than y), and
        rows this far apart have the same alignment.
    ctas_per_row
        Blocks that share a row.
    stages
        0, or how many rows (of a group) are on their way through shared memory; of rows whose elements lie apart, how
        many chunks a ring in shared memory has room for.
    grid, block
        Blocks, and threads a block.
    row_shared_bytes, shared_bytes
        Shared memory that a block may keep a row in, or all of its rows where they come and go together (`warp`), and
        all dynamic shared memory of a block.
    min_blocks
        The compiler keeps registers few enough for so many blocks on a multiprocessor.
    across, waits
        For rows whose elements lie apart from one another: how many threads lie side by side, each with `vector`
        neighbouring rows, and `vectors` elements of each at a time; and where rows wait: NOWHERE,
        IN_REGISTERS or EVENLY. Without stages, in `shared`, all neighbours lie side by side, and a block has
        rows_per_group times so many. With stages a thread has `vectors` elements of a row and takes rows_per_group of
        them at a time, a chunk. 0: rows are contiguous. IN_REGISTERS and CUT say of prefetched rows with sums over rows
        beside them that they wait there (StagedRegisters and CutRegisters in kernels/row/summed_shapes.cuh).
    resident_blocks, waves
        Blocks that a multiprocessor holds at once (clusters: that the device does), and grid / what the device holds
        at once.
    rule, why
        The id of the rule that decided, "" where none did; in words that rule, or what else decided. Plans that differ
        in nothing else are equal.
    """

    variant: str
    vector: int
    vectors: int
    group: int
    rows_per_group: int
    full: bool
    parameter_cache: int
    unaligned: int
    alignment_period: int
    ctas_per_row: int
    stages: int
    grid: int
    block: int
    row_shared_bytes: int
    shared_bytes: int
    min_blocks: int
    resident_blocks: int
    waves: float
    across: int = 0
    waits: int = 0
    rule: str = dataclasses.field(default="", compare=False, repr=False)
    why: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def kernel(self) -> str:
        """The kernel of kernels/row that runs such a plan."""
        if self.across or self.variant == "cached":
            apart = "row_stretch" if self.variant == "shared" else "row_across"
            return ("row_ring" if self.stages else apart) if self.across else "row_cached"
        if self.variant == "split" and self.group:
            return "row_spread"
        if self.variant == "split" and self.rows_per_group > 1:
            return "row_together"
        if self.variant == "split" and not self.row_shared_bytes and self.unaligned != UNALIGNED_APART:
            return "row_reread"
        by_shared_bytes = {("shared", False): "row_computed", ("warp", True): "row_tiled"}
        found = by_shared_bytes.get((self.variant, bool(self.row_shared_bytes)))
        if found is not None:
            return found
        return "row_registers" if self.group else "row_staged"

    @property
    def shape(self) -> str:
        """The kernel's struct of template numbers."""
        if self.kernel == "row_registers" and self.waits:
            return "CutRegisters" if self.waits == CUT else "StagedRegisters"
        return self.kernel.removeprefix("row_").capitalize()

    @property
    def template(self) -> tuple[int | bool, ...]:
        """The numbers among the kernel's template arguments, in order."""
        launch = (self.block, self.min_blocks)
        tile = (self.vector, self.vectors)
        ctas = 0 if self.variant == "split" else self.ctas_per_row  # a grid's are known at the launch only
        others: dict[str, tuple[int | bool, ...]] = {
            "row_across": (self.across, self.full, self.waits, ctas),
            "row_cached": (),
            "row_spread": (self.parameter_cache,),
            "row_together": (self.rows_per_group,),
            "row_reread": (self.unaligned,),
            "row_computed": (self.unaligned,),
            "row_tiled": (self.group,),
        }
        if self.kernel == "row_stretch":
            converts = self.parameter_cache == CONVERTED
            return (self.vectors, self.across, self.rows_per_group, converts, *launch)
        if self.kernel == "row_ring":
            chunks = (self.rows_per_group, self.vectors // self.rows_per_group)
            return (self.vector, *chunks, self.across, self.stages, self.ctas_per_row, *launch)
        if self.kernel in others:
            return (*tile, *others[self.kernel], *launch)
        if self.kernel == "row_staged":
            return (*tile, self.unaligned, ctas, self.row_shared_bytes, *launch)
        rows = (self.group, self.rows_per_group, self.full, self.parameter_cache, self.unaligned)
        return (*tile, *rows, self.alignment_period, self.ctas_per_row, *launch, self.stages)

    @property
    def persistent(self) -> bool:
        """Whether blocks go through many rows, since something is kept for the next ones or on its way."""
        return self.stages > 0 or self.parameter_cache in (SHARED, REGISTERS, BOTH)

    @property
    def dynamic(self) -> bool:
        """Whether clusters take their next rows from a counter (a dynamic scheduler); all of them then run at once."""
        scheduled = not self.unaligned or self.parameter_cache == CONVERTED
        return self.persistent and self.ctas_per_row > 1 and scheduled and not self.across

    @property
    def cooperative(self) -> bool:
        """Whether all blocks must run at once: they wait for one another, or share a counter."""
        return self.variant == "split" or self.dynamic

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.ctas_per_row if self.variant == "cluster" else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dataclasses.asdict(self)


# What a plan is where nothing else is said.
PLAIN = Plan(
    variant="",
    vector=1,
    vectors=1,
    group=0,
    rows_per_group=1,
    full=False,
    parameter_cache=AT_USE,
    unaligned=ALIGNED,
    alignment_period=1,
    ctas_per_row=1,
    stages=0,
    grid=0,
    block=0,
    row_shared_bytes=0,
    shared_bytes=0,
    min_blocks=1,
    resident_blocks=0,
    waves=0.0,
)


class DoesNotFitError(ValueError):
    """A plan or variant that was asked for cannot hold the row."""


# The least and the most that a Plan's numbers may be, whatever the problem; forced.py has what a kernel asks for
# beyond that.
BOUNDS: dict[str, tuple[int, int]] = {
    "vector": (1, 16),
    "vectors": (1, 128),
    "group": (0, MAX_BLOCK),
    "rows_per_group": (1, 8),
    "parameter_cache": (AT_USE, BOTH),
    "unaligned": (ALIGNED, UNALIGNED_APART),
    "alignment_period": (0, 16),
    "ctas_per_row": (1, 1 << 16),
    "stages": (0, 16),
    "grid": (0, MAX_GRID),
    "block": (WARP, MAX_BLOCK),
    "row_shared_bytes": (0, 1 << 20),
    "shared_bytes": (0, 1 << 20),
    "min_blocks": (1, 32),
    "across": (0, MAX_BLOCK),
    "waits": (NOWHERE, CUT),
    "resident_blocks": (0, MAX_GRID),
}

# Bytes of values that a thread may hold, of the compute type: half of its registers. With twice as many the compiler,
# which then spills, takes up to 4 seconds, so 1.6 at most.
MAX_THREAD_BYTES = 512
# The same where something is fused, of which each element has instructions of its own.
MAX_FUSED_THREAD_BYTES = 256
# Elements of a row that a thread may hold where something is fused, with affine parameters (or Problem.only_scaled) or
# without: a mask has a bit for each. And numbers of pairs of them (Problem.is_of_pairs), and elements where results
# are bytes, with parameters, but without a mask or operands.
MAX_FUSED_ELEMENTS = {True: 40, False: 32}
MAX_ALONE_ELEMENTS = 64

# kernels/row/summed.cuh: sets of mailboxes of a cluster's blocks, and the most numbers of a message.
MAILBOXES = 4
NUMBERS_OF_SLOT = 3

# Types of a Plan's fields. A bool is not taken for an int, since C++ writes it differently.
TYPES: dict[str, type] = {"variant": str, **dict.fromkeys(BOUNDS, int), "full": bool, "waves": float}
ARTICLES = {str: "a", int: "an", bool: "a", float: "a"}


def check_plan(forced: object) -> None:
    """Raise TypeError, naming the field, for what is neither None, a name nor a Plan of such values as a plan has."""
    if not isinstance(forced, Plan):
        if forced is not None and not isinstance(forced, str):
            variants = ", ".join(map(repr, VARIANTS))
            raise TypeError(
                f"plan is {shown(forced)}: give the name of a variant ({variants}) or a cupynorm.Plan"
            )
        return
    for name, expected in TYPES.items():
        value = getattr(forced, name)
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise TypeError(
                f"plan: {name} is {value!r}, {ARTICLES[expected]} {expected.__name__} is expected"
            )
