"""Problem -> Plan: which variant runs, with which template arguments and launch. Integers only: no array, no device.

The rule begins as that of OneFlow's articles on LayerNorm and softmax: a row waits in registers while it fits there, else in
shared memory unless the occupancy query says that no block fits, else nowhere. Where rows are long, several blocks share one:
those of a cluster, or, where rows are fewer than multiprocessors, of the whole grid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cupynorm._limits import STATIC_SHARED_BYTES, Limits

VARIANTS = ("warp", "block", "cluster", "split", "shared", "uncached")

WARP = 32
# Of shared and uncached: blocks of a grid, in multiples of what the device holds at once.
WAVES = 32
# Of warp, block and cluster: no loop over rows, unless they are staged. A loop measured 2 to 5 % slower on an H200.
ONE_BLOCK_PER_ROW = math.inf
MAX_GRID = 2**31 - 1
MAX_BLOCK = 1024
# The most threads of shared, split and uncached, by bytes of the compute type.
WHOLE_BLOCK = {4: 1024, 8: 256}
# That a thread of warp and block holds, by bytes of the compute type: no spill up to there.
MOST_ELEMENTS = {4: 32, 8: 16}
MOST_PEELED_ELEMENTS = {2: 40, 4: 32, 8: 16}  # by bytes of an element
# What a thread wants beside its values, by (bytes of the compute type, hoist) ...
OTHER_REGISTERS = {(4, 0): 32, (4, 1): 24, (8, 0): 48, (8, 1): 48}
# ... and more, where its last pack may be missing and parameters are hoisted, and where rows begin anywhere.
RAGGED_REGISTERS = {4: 16, 8: 24}
PEELED_REGISTERS = {4: 0, 8: 56}
MANY_PACKS = 4  # of a thread
AMPERE, HOPPER = 80, 90  # before the first the compiler wants 16 registers more; the second brought clusters
# That the values and parameters of a thread take: with more, too few threads keep memory busy.
MOST_HOISTED_WORDS = 32
ACCESS_BYTES = 16  # the widest
# That a thread of shared, split and uncached reads at a time, by bytes of an element.
CHUNK_ELEMENTS = {2: 16, 4: 16, 8: 2}
# Where rows begin anywhere, packs with single elements around them are better than narrow accesses: than those of 2 bytes from so
# many packs on; than those of 4 and 8 in long rows only: a warp's accesses of 4 bytes fill whole lines (fp32, LayerNorm: 0.90
# against 0.85 at 1023 columns, 0.68 against 0.93 at 5001).
LEAST_PEELED_PACKS = 8
NARROW_BYTES = 2
PEELED_ACCESS_BYTES = 8
PEELED_ROW_BYTES = 16 << 10
# Rows that begin alike and are in work at once, where no parameters take registers, too. With 4 bytes an element 0.97 against
# 0.92 at 1023 columns.
PEELED_ROWS = {2: 1, 4: 2, 8: 1}
# With parameters, 4 bytes an element: twice as many bytes a thread, and no hoisting then: 0.85 against 0.77 at 1023 columns.
PEELED_THREAD_BYTES = 64
PEELED_HOIST_ELEMENTS = {2: 16, 4: 8, 8: 4}


@dataclasses.dataclass(frozen=True)
class Held:
    """How rows of up to `row_bytes` are spread over threads: bytes a thread, and threads resident on a multiprocessor."""

    row_bytes: int
    thread_bytes: int
    resident_threads: int


# Measured on an H200 (benchmarks/NOTES.md): few bytes a thread and many threads, as long as one block can hold the row.
HELD = (
    Held(row_bytes=8 << 10, thread_bytes=32, resident_threads=1280),
    Held(row_bytes=64 << 10, thread_bytes=64, resident_threads=1024),
)
# 4 bytes an element: 0.97 against 0.86 at 16384 columns, 0.93 against 0.72 at 32768
HELD_FLOATS = (
    Held(row_bytes=8 << 10, thread_bytes=32, resident_threads=1280),
    Held(row_bytes=32 << 10, thread_bytes=64, resident_threads=1024),
    Held(row_bytes=128 << 10, thread_bytes=128, resident_threads=1024),
)
# Where parameters must pass through too, 16 bits of each: 0.98 against 0.94 at 2048 columns
HELD_WITH_COLUMNS = (
    Held(row_bytes=2 << 10, thread_bytes=32, resident_threads=1280),
    Held(row_bytes=64 << 10, thread_bytes=64, resident_threads=1024),
)
# Up to there hoisting measured better, by bytes of an element.
HOISTED_ROW_BYTES = {2: 2 << 10, 4: 16 << 10, 8: 16 << 10}


@dataclasses.dataclass(frozen=True)
class Shared:
    """How rows of up to `row_bytes` are shared out among the blocks of a cluster.

    block: threads of a block. packs: of a thread. stages, hoist: as in Plan. resident: blocks of a multiprocessor.
    """

    row_bytes: int
    block: int
    packs: int
    stages: int
    hoist: int
    resident: int = 1

    @property
    def share_bytes(self) -> int:
        """Bytes of a row that a block holds at most."""
        return self.block * self.packs * ACCESS_BYTES


MOST_PARTS = 16
LARGE_CLUSTERS = {"90", "100", "103"}  # compute capabilities that take more than 8 blocks in one
MOST_SHARED = 1 << 40  # bytes of a row: as long as a cluster holds it
# How clusters share rows, by (the op has parameters of the columns, bytes of an element): the first that can hold a row. H200:
# without parameters 0.92 to 0.93 of the copy rate at 65536 to 262144 columns; with them 0.88 to 0.94 up to 131072, since
# parameters kept in shared memory are not read again from L2 for each row: that alone took it to 0.75.
CLUSTERS = {
    (False, 2): (
        Shared(row_bytes=64 << 10, block=256, packs=8, stages=0, hoist=0, resident=2),
        Shared(row_bytes=128 << 10, block=1024, packs=4, stages=2, hoist=0),
        Shared(row_bytes=MOST_SHARED, block=512, packs=8, stages=2, hoist=0),
    ),
    (False, 4): (
        Shared(row_bytes=256 << 10, block=512, packs=4, stages=4, hoist=0),
        Shared(row_bytes=MOST_SHARED, block=512, packs=8, stages=2, hoist=0),
    ),
    (True, 2): (
        Shared(row_bytes=64 << 10, block=512, packs=4, stages=3, hoist=2),
        Shared(row_bytes=MOST_SHARED, block=256, packs=8, stages=4, hoist=2),
        Shared(row_bytes=MOST_SHARED, block=512, packs=8, stages=2, hoist=0),
        Shared(row_bytes=MOST_SHARED, block=512, packs=4, stages=2, hoist=0),
    ),
    (True, 4): (
        Shared(row_bytes=256 << 10, block=512, packs=4, stages=4, hoist=2),
        Shared(row_bytes=MOST_SHARED, block=256, packs=8, stages=3, hoist=2),
        Shared(row_bytes=MOST_SHARED, block=512, packs=8, stages=0, hoist=0),
    ),
    (False, 8): (Shared(row_bytes=MOST_SHARED, block=256, packs=8, stages=0, hoist=0),),
    (True, 8): (Shared(row_bytes=MOST_SHARED, block=256, packs=8, stages=0, hoist=0),),
}
# Rows of no more bytes are better held by one block, by bytes of an element.
BLOCK_ROW_BYTES = {2: 32 << 10, 4: 128 << 10}
# Where rows are fewer than multiprocessors, as many blocks as can be share one from so many bytes on.
FEW_ROW_BYTES = 32 << 10
FEW_BLOCK = 256
# Of split, on a multiprocessor: while one waits for others, the other moves. 0.45 against 0.37 at 64 rows of 2^20 columns.
SPLIT_BLOCKS = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be launched.

    rows x cols elements; `pack` neighbouring elements can be moved at once (columns, strides and every pointer's alignment
    allow it); shared memory would hold `load_bytes` an element; arithmetic is in `compute_bytes`. `columns`: bytes of
    an element of each of the columns' parameters, such as gamma.

    Where rows begin at no pack of 16 bytes, `widest` is what such a pack would have; `peel`: 1 if x lies in packs as y does, else
    2; `period`: so many rows further a row begins as this one does, 0 if that cannot be said.
    """

    rows: int
    cols: int
    pack: int
    load_bytes: int
    compute_bytes: int
    columns: tuple[int, ...] = ()
    widest: int = 0
    peel: int = 0
    period: int = 1

    @property
    def peeled(self) -> Problem:
        """The problem as it is worked on: with the widest packs, if the elements around them are worth it."""
        access = self.pack * self.load_bytes
        long = access <= PEELED_ACCESS_BYTES and self.cols * self.load_bytes >= PEELED_ROW_BYTES
        narrow = access <= NARROW_BYTES and self.cols >= LEAST_PEELED_PACKS * self.widest
        if self.peel and (narrow or long):
            return dataclasses.replace(self, pack=self.widest)
        return dataclasses.replace(self, peel=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of an element for the tables below: as loaded, or a double's if that is what it becomes."""
        return max(self.load_bytes, self.compute_bytes if self.compute_bytes == 8 else 0)  # noqa: PLR2004


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be launched.

    variant: where a row waits: one of VARIANTS. pack: elements moved by one instruction.
    packs: packs that a thread holds (of one row; a chunk in shared, split and uncached). group: threads of a block that share a
    row; 0 is the whole block. rows_per_group: rows that a group holds at once. full: the packs of all threads are exactly the
    row. hoist: the columns' parameters wait in registers (1) or, for all rows of a block, in shared memory (2).
    peel: rows begin anywhere; the elements around their packs go one by one (1; 2: x lies in other packs than y).
    period: rows so far apart begin alike. parts: blocks that share a row. stages: 0, or how many rows (of a group) are on
    their way through shared memory or in work. grid, block: blocks, and threads a block. kept_bytes: shared memory that a block
    may keep a row in. shared_bytes: dynamic shared memory of a block. least_blocks: registers are kept few enough for so many
    blocks on a multiprocessor. resident_blocks: blocks that a multiprocessor holds at once (clusters: that the device does).
    waves: grid / what the device holds at once.
    """

    variant: str
    pack: int
    packs: int
    group: int
    rows_per_group: int
    full: bool
    hoist: int
    peel: int
    period: int
    parts: int
    stages: int
    grid: int
    block: int
    kept_bytes: int
    shared_bytes: int
    least_blocks: int
    resident_blocks: int
    waves: float

    @property
    def kernel(self) -> str:
        """The kernel of kernels/cupynorm that holds a row so."""
        return "row_registers" if self.group else "row_staged"

    @property
    def template(self) -> tuple[int | bool, ...]:
        """The numbers among the kernel's template arguments, in order."""
        if not self.group:
            staged = (self.pack, self.packs, self.peel, self.variant == "split", self.kept_bytes)
            return (*staged, self.block, self.least_blocks)
        held = (self.pack, self.packs, self.group, self.rows_per_group, self.full, self.hoist, self.peel)
        return (*held, self.period, self.parts, self.block, self.least_blocks, self.stages)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.parts if self.variant == "cluster" else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dataclasses.asdict(self)


# (plan without grid) -> blocks that a multiprocessor holds at once, or, of clusters, how many the device does; 0: it cannot be
# launched.
Occupancy = Callable[[Plan], int]


class DoesNotFitError(ValueError):
    """A variant that was asked for cannot hold the row."""


def choose(problem: Problem, limits: Limits, occupancy: Occupancy, wanted: str | Plan | None = None) -> Plan:
    """Return the plan for `problem`: the first of VARIANTS that can hold a row, or what is `wanted`.

    `wanted` names a variant, or is a Plan, of which the template arguments and the block are kept, and the waves as a bound.
    Raises DoesNotFitError, a ValueError, if it is unknown or cannot hold the row.
    """
    if isinstance(wanted, Plan):
        return _as_wanted(problem, limits, occupancy, wanted)
    if wanted is not None and wanted not in VARIANTS:
        raise DoesNotFitError(f"plan {wanted!r} is not a variant: use {', '.join(VARIANTS)}")
    for variant in _in_turn(problem, limits) if wanted is None else (wanted,):
        plan = _CANDIDATE[variant](problem.peeled, limits, occupancy)
        if plan is not None:
            return plan
    raise DoesNotFitError(_does_not_fit(problem, limits, f"variant {wanted!r}"))


def _in_turn(problem: Problem, limits: Limits) -> tuple[str, ...]:
    """Return the variants to try, best first."""
    row_bytes = problem.cols * problem.held_bytes
    if problem.rows < limits.sm_count and row_bytes >= FEW_ROW_BYTES:
        # with parameters, 64 rows are better read twice by a block each: 0.52 against 0.43, fp32, 2^20 columns
        split = problem.rows * (4 if problem.columns else 1) < limits.sm_count
        return ("cluster", *(("split",) if split else ()), "block", "shared", "uncached")
    # a warp holds more than what is best for it: from there on a block is better
    narrow = _group(problem.peeled, HELD[0].thread_bytes) <= WARP
    held = ("warp", "block") if narrow else ("block",)
    if problem.peeled.peel == 1:  # clusters copy nothing ahead then: 0.62 against 0.82 at 50257 columns
        return (*held, "shared", "cluster", "uncached")
    if row_bytes > BLOCK_ROW_BYTES.get(problem.held_bytes, math.inf):
        return ("cluster", *held, "shared", "uncached")
    return (*held, "cluster", "shared", "uncached")


def _kind(problem: Problem) -> tuple[bool, int]:
    return bool(problem.columns), problem.held_bytes


def _does_not_fit(problem: Problem, limits: Limits, what: str) -> str:
    return (
        f"{what} cannot hold a row of {problem.cols} columns, {problem.load_bytes} bytes each, "
        f"in packs of {problem.pack}, on {limits.name}"
    )


def _as_wanted(problem: Problem, limits: Limits, occupancy: Occupancy, wanted: Plan) -> Plan:
    peeled = problem.peeled
    fits = (
        wanted.variant in VARIANTS
        and wanted.block % WARP == 0
        and peeled.pack % wanted.pack == 0
        and (wanted.pack == peeled.pack or not peeled.peel)
        and (wanted.peel, wanted.period) == (peeled.peel, _period(peeled, wanted.rows_per_group))
        and _is_sound(peeled, limits, wanted)
    )
    chosen = None
    if fits and wanted.group:
        plan = _registers_plan(peeled, wanted)
        fits = (
            wanted.block % wanted.group == 0
            and plan.packs == wanted.packs
            and (not wanted.stages or wanted.pack * problem.load_bytes == ACCESS_BYTES)
            and plan.shared_bytes <= limits.shared_bytes_per_block
        )
        if fits:
            blocks = _blocks(peeled, plan)
            chosen = _with_grid(plan, blocks, limits, occupancy(plan), wanted.waves or WAVES)
    elif fits and wanted.variant == "split":
        chosen = _split_plan(peeled, limits, occupancy, wanted)
    elif fits:
        shared_bytes = shared_bytes_of(peeled) if wanted.variant == "shared" else 0
        if shared_bytes <= wanted.kept_bytes:
            plan = dataclasses.replace(wanted, shared_bytes=shared_bytes)
            chosen = _with_grid(plan, problem.rows, limits, occupancy(plan), wanted.waves or WAVES)
    if chosen is None:
        raise DoesNotFitError(_does_not_fit(problem, limits, f"{wanted}"))
    return chosen


def _is_sound(problem: Problem, limits: Limits, plan: Plan) -> bool:
    """Say whether a plan that somebody made asks for nothing that its kernel would do wrong."""
    if plan.variant == "cluster":
        shares = 1 < plan.parts <= MOST_PARTS and plan.parts & (plan.parts - 1) == 0
        shares = shares and plan.rows_per_group == 1 and plan.group == plan.block
    else:
        shares = plan.parts == 1 or plan.variant == "split"
    keeps = plan.kept_bytes % ACCESS_BYTES == 0 and plan.kept_bytes <= limits.shared_bytes_per_block
    keeps = keeps and (plan.kept_bytes == 0 or plan.variant in ("shared", "split"))
    hoists = plan.hoist == 0 or (bool(problem.columns) and plan.group > 0)
    return shares and keeps and hoists and (plan.group > 0) == (plan.variant in ("warp", "block", "cluster"))


def shared_bytes_of(problem: Problem) -> int:
    """Return the shared memory that a row takes, in whole 16-byte accesses."""
    return -(-problem.cols * problem.load_bytes // 16) * 16


def _power_of_two_from(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _held(problem: Problem) -> Held | None:
    row_bytes = problem.cols * problem.held_bytes
    table = HELD_FLOATS if problem.held_bytes == 4 else HELD  # noqa: PLR2004
    if problem.columns and problem.held_bytes == 2:  # noqa: PLR2004
        table = HELD_WITH_COLUMNS
    return next((held for held in table if row_bytes <= held.row_bytes), None)


def _period(problem: Problem, rows_per_group: int) -> int:
    """Return the period that a kernel is built for: rows that are in work one at a time need none."""
    return problem.period if problem.peel and rows_per_group > 1 else 1


# What a plan is where nothing else is said.
PLAIN = Plan(
    variant="",
    pack=1,
    packs=1,
    group=0,
    rows_per_group=1,
    full=False,
    hoist=0,
    peel=0,
    period=1,
    parts=1,
    stages=0,
    grid=0,
    block=0,
    kept_bytes=0,
    shared_bytes=0,
    least_blocks=1,
    resident_blocks=0,
    waves=0.0,
)


def _registers_plan(problem: Problem, plan: Plan) -> Plan:
    """Return a plan in registers with all that follows from the problem and from how many threads and blocks share a row."""
    whole = problem.cols // problem.pack if problem.peel else problem.cols // plan.pack
    share = math.ceil(whole / plan.parts)
    packs = max(1, math.ceil(share / plan.group))
    full = not problem.peel and plan.parts * plan.group * packs == whole
    rows = plan.stages * plan.rows_per_group * packs * plan.block * ACCESS_BYTES
    columns = 0
    if plan.hoist == 2:  # noqa: PLR2004
        # a struct of gamma and beta, both of words; one that is absent takes a word, too
        struct_bytes = sum(max(4, size * plan.pack) for size in problem.columns)
        struct_bytes += 4 * (len(problem.columns) == 1)
        columns = packs * plan.block * (-(-struct_bytes // ACCESS_BYTES) * ACCESS_BYTES)
    return dataclasses.replace(plan, packs=packs, full=full, shared_bytes=rows + columns)


def _blocks(problem: Problem, plan: Plan) -> int:
    """Return how many blocks hold all rows."""
    apart = plan.period * plan.rows_per_group
    rows = math.ceil(problem.rows / apart) * apart if plan.peel else problem.rows
    return math.ceil(rows / (plan.block // plan.group * plan.rows_per_group)) * plan.parts


def _in_registers(
    problem: Problem, limits: Limits, occupancy: Occupancy, variant: str, group: int, resident_threads: int
) -> Plan | None:
    packs = math.ceil(problem.cols // problem.pack / group)
    elements = packs * problem.pack
    if elements > _most_elements(problem):
        return None
    alike = problem.peel and problem.period and not problem.columns
    rows = PEELED_ROWS[problem.held_bytes] if alike else 1
    if rows * elements > MOST_ELEMENTS[problem.compute_bytes] // 2 or problem.compute_bytes == 8:  # noqa: PLR2004
        rows = 1
    block = max(128 if elements * problem.held_bytes <= HELD[0].thread_bytes else 256, group)
    row_bytes = problem.cols * problem.held_bytes
    hoist = bool(problem.columns) and row_bytes <= HOISTED_ROW_BYTES[problem.held_bytes]
    hoist = hoist and _words(problem, elements, hoist=True) <= MOST_HOISTED_WORDS
    hoist = hoist and not (problem.peel and elements > PEELED_HOIST_ELEMENTS[problem.held_bytes])
    full = not problem.peel and group * elements == problem.cols
    registers = _registers(problem, limits, elements, full=full, hoist=hoist)
    registers += (rows - 1) * (elements + 1)
    if registers * block > limits.registers_per_sm:
        return None
    threads = min(resident_threads, limits.threads_per_sm, limits.registers_per_sm // registers)
    plan = dataclasses.replace(
        PLAIN,
        variant=variant,
        pack=problem.pack,
        group=group,
        rows_per_group=rows,
        hoist=int(hoist),
        peel=problem.peel,
        period=_period(problem, rows),
        block=block,
        least_blocks=max(1, threads // block),
    )
    plan = _registers_plan(problem, plan)
    return _with_grid(plan, _blocks(problem, plan), limits, occupancy(plan), ONE_BLOCK_PER_ROW)


def _most_elements(problem: Problem) -> int:
    if problem.peel:
        return MOST_PEELED_ELEMENTS[problem.held_bytes]
    return MOST_ELEMENTS[problem.compute_bytes]


def _words(problem: Problem, elements: int, *, hoist: bool) -> int:
    """Return how many registers the values of a thread take, with the parameters as they were loaded if they are hoisted."""
    values = elements * problem.compute_bytes // 4
    if hoist:
        values += elements // problem.pack * sum(max(1, size * problem.pack // 4) for size in problem.columns)
    return values


def _registers(problem: Problem, limits: Limits, elements: int, *, full: bool, hoist: bool) -> int:
    """Return how many registers keep a thread of so many elements from spilling.

    Those of the values and of what else the compiler was seen to want; the build gate compiles the extremes of every type
    and architecture to hold this.
    """
    values = _words(problem, elements, hoist=hoist)
    others = OTHER_REGISTERS[problem.compute_bytes, int(hoist)]
    if not full:
        ragged = RAGGED_REGISTERS[problem.compute_bytes]
        others += (ragged // 2 if problem.peel else ragged) if hoist else max(8, values // 2 - 8)
    if problem.peel:
        others += PEELED_REGISTERS[problem.compute_bytes]
    if not hoist:  # the parameters pass through registers, a pack at a time
        others += max(0, 2 * (sum(size * problem.pack // 4 for size in problem.columns) - 8))
    # and as many addresses; sm_90 makes do without them where rows are full
    many = elements // problem.pack > MANY_PACKS and not hoist and not problem.peel
    if many and not (full and problem.held_bytes == 4 and int(limits.compute_capability) == HOPPER):  # noqa: PLR2004
        others += 24
    if int(limits.compute_capability) < AMPERE:
        others += 16
    return -(-(values + others) // 8) * 8


def _group(problem: Problem, thread_bytes: int) -> int:
    """Return how many threads share a row, so that each holds about thread_bytes of it."""
    packs = max(1, problem.cols // problem.pack)
    packs_per_thread = max(1, thread_bytes // (problem.pack * problem.held_bytes))
    group = _power_of_two_from(math.ceil(packs / packs_per_thread))
    half = group // 2
    fits = half > 0 and math.ceil(packs / half) * problem.pack <= _most_elements(problem)
    if packs % group != 0 and fits and packs_per_thread <= MANY_PACKS and not problem.peel:
        # ragged rows: half the threads if those hold the row without a gap (768 columns: 0.95 against 0.67), or if, in 16 bits
        # with parameters, merging unequal parts is what costs most (1000 columns: 0.90 against 0.75)
        halved = packs % half == 0 or (problem.columns and problem.held_bytes == 2)  # noqa: PLR2004
        group = half if halved else group
    if problem.peel and fits and half * math.ceil(packs / half) < group * math.ceil(packs / group):
        group = half  # fewer threads that hold less than others: 0.94 against 0.85 at 5001 columns
    # those around the packs are one for each of the first threads
    return max(group, _power_of_two_from(2 * problem.pack - 2)) if problem.peel else group


def _warp(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    group = min(WARP, _group(problem, HELD[0].thread_bytes))
    return _in_registers(problem, limits, occupancy, "warp", group, HELD[0].resident_threads)


def _block(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    held = _held(problem)
    if held is None:
        return None
    thread_bytes = held.thread_bytes
    if problem.peel and problem.columns and problem.held_bytes == 4:  # noqa: PLR2004
        thread_bytes = max(thread_bytes, PEELED_THREAD_BYTES)
    group = max(2 * WARP, _group(problem, thread_bytes))
    return (
        _in_registers(problem, limits, occupancy, "block", group, held.resident_threads)
        if group <= MAX_BLOCK
        else None
    )


def _cluster(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """Blocks of a cluster share a row, in registers; the rows to come are on their way through shared memory."""
    if int(limits.compute_capability) < HOPPER:
        return None
    row_bytes = problem.cols * problem.held_bytes
    plain = dataclasses.replace(PLAIN, variant="cluster", pack=problem.pack, peel=problem.peel)
    most_parts = MOST_PARTS if limits.compute_capability in LARGE_CLUSTERS else MOST_PARTS // 2
    if problem.rows < limits.sm_count and row_bytes >= FEW_ROW_BYTES and problem.compute_bytes == 4:  # noqa: PLR2004
        # as many multiprocessors as can be work on a row, and each row goes through a cluster of its own
        parts = most_parts if problem.rows * most_parts <= 2 * limits.sm_count else MOST_PARTS // 2
        share = math.ceil(problem.cols // problem.pack / parts)
        most = MOST_ELEMENTS[problem.compute_bytes] // problem.pack
        block = max(FEW_BLOCK, _power_of_two_from(math.ceil(share / most)))
        if block <= (FEW_BLOCK if parts < MOST_PARTS else MAX_BLOCK // 2):
            plan = dataclasses.replace(plain, parts=parts, block=block, group=block)
            plan = _registers_plan(problem, plan)
            return _with_grid(plan, _blocks(problem, plan), limits, occupancy(plan), ONE_BLOCK_PER_ROW)
    wide = any(size > problem.load_bytes for size in problem.columns)  # they take more registers than x
    for shared in CLUSTERS.get(_kind(problem), ()):
        if row_bytes > shared.row_bytes or (wide and shared.hoist == 0 and shared.packs > MANY_PACKS):
            continue
        parts = max(2, _power_of_two_from(math.ceil(row_bytes / shared.share_bytes)))
        if parts > most_parts:
            continue
        staged = (
            bool(shared.stages) and not problem.peel and problem.pack * problem.load_bytes == ACCESS_BYTES
        )
        plan = dataclasses.replace(
            plain,
            parts=parts,
            block=shared.block,
            group=shared.block,
            stages=shared.stages if staged else 0,
            hoist=shared.hoist if staged else 0,
            least_blocks=1 if problem.peel else shared.resident,
        )
        plan = _registers_plan(problem, plan)
        if plan.packs > shared.packs or plan.shared_bytes > limits.shared_bytes_per_block:
            continue
        waves = 1.0 if staged else ONE_BLOCK_PER_ROW
        chosen = _with_grid(plan, _blocks(problem, plan), limits, occupancy(plan), waves)
        if chosen is not None:
            return chosen
    return None


def _staged(problem: Problem, variant: str, block: int, kept_bytes: int, shared_bytes: int) -> Plan:
    chunk = CHUNK_ELEMENTS[problem.held_bytes]
    return dataclasses.replace(
        PLAIN,
        variant=variant,
        pack=problem.pack,
        packs=max(1, min(4, chunk // problem.pack)),
        peel=problem.peel,
        block=block,
        kept_bytes=kept_bytes,
        shared_bytes=shared_bytes,
    )


def _shared(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    shared_bytes = shared_bytes_of(problem)
    kept_bytes = limits.shared_bytes_per_block
    if shared_bytes > kept_bytes or problem.peel == 2:  # noqa: PLR2004
        return None
    # as many threads as fill the multiprocessor beside the rows that its shared memory holds
    at_once = max(1, limits.shared_bytes_per_sm // (shared_bytes + limits.reserved_shared_bytes))
    block = _power_of_two_from(min(1024, limits.threads_per_sm) // at_once + 1) // 2
    if at_once == 1 and not problem.columns:
        block = 512  # 0.72 against 0.58 at 50257 columns of 4 bytes; with parameters the other way round
    if problem.rows <= limits.sm_count:
        block = MAX_BLOCK
    block = min(max(block, 128), WHOLE_BLOCK[problem.compute_bytes])
    plan = _staged(problem, "shared", block, kept_bytes, shared_bytes)
    return _with_grid(plan, problem.rows, limits, occupancy(plan))


def _uncached(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    plan = _staged(problem, "uncached", WHOLE_BLOCK[problem.compute_bytes], 0, 0)
    return _with_grid(plan, problem.rows, limits, occupancy(plan))


def _split(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """As many blocks as the device holds at once share the rows; all of them run, for they wait for one another."""
    # what each leaves for the others must fit into the packs of its own, which hold 2 bytes an element at least
    needed = math.ceil(4 * problem.compute_bytes / (2 * problem.pack))
    if problem.pack < 2 or problem.cols // problem.pack - 1 < needed:  # noqa: PLR2004
        return None
    block = WHOLE_BLOCK[problem.compute_bytes] // 2
    resident = SPLIT_BLOCKS if int(limits.compute_capability) >= AMPERE else 1
    room = limits.shared_bytes_per_sm // resident - limits.reserved_shared_bytes - STATIC_SHARED_BYTES
    kept_bytes = min(room, limits.shared_bytes_per_block) // ACCESS_BYTES * ACCESS_BYTES
    plan = _staged(problem, "split", block, 0 if problem.peel == 2 else kept_bytes, 0)  # noqa: PLR2004
    packs = max(1, plan.packs // 2) if problem.peel else plan.packs  # with more it would spill
    plan = dataclasses.replace(plan, packs=packs, least_blocks=resident)
    return _split_plan(problem, limits, occupancy, plan)


def _split_plan(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    blocks = limits.sm_count * plan.least_blocks
    row_bytes = shared_bytes_of(problem)
    least = math.ceil(row_bytes / plan.kept_bytes) if plan.kept_bytes else blocks
    most = max(1, problem.cols // problem.pack // plan.block)  # a block has a pack for each thread
    # no more than multiprocessors where fewer hold the row: a barrier of fewer is quicker
    parts = min(blocks, most, max(least, min(blocks // problem.rows, limits.sm_count), 1))
    at_once = min(problem.rows, blocks // parts)
    share = (math.ceil(problem.cols / parts) + problem.pack) * problem.load_bytes
    shared_bytes = min(plan.kept_bytes, -(-share // ACCESS_BYTES) * ACCESS_BYTES)
    plan = dataclasses.replace(plan, parts=parts, shared_bytes=shared_bytes)
    resident = occupancy(plan)
    if resident < plan.least_blocks:  # all must run at once
        return None
    grid = at_once * parts
    return dataclasses.replace(
        plan, grid=grid, resident_blocks=resident, waves=grid / (limits.sm_count * resident)
    )


def _with_grid(plan: Plan, blocks: int, limits: Limits, resident: int, waves: float = WAVES) -> Plan | None:
    if resident == 0:
        return None
    at_once = resident * plan.parts if plan.cluster > 1 else limits.sm_count * resident
    grid = int(max(1, min(blocks, at_once * waves, MAX_GRID)))
    grid = max(plan.parts, grid // plan.parts * plan.parts)
    return dataclasses.replace(plan, grid=grid, resident_blocks=resident, waves=grid / at_once)


_CANDIDATE: dict[str, Callable[[Problem, Limits, Occupancy], Plan | None]] = {
    "warp": _warp,
    "block": _block,
    "cluster": _cluster,
    "split": _split,
    "shared": _shared,
    "uncached": _uncached,
}
