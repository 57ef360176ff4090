"""Problem -> Plan: which variant runs, with which template arguments and launch. Integers only: no array, no device.

The rule begins as that of OneFlow's articles on LayerNorm and softmax: a row waits in registers while it fits there, else in
shared memory unless the occupancy query says that no block fits, else nowhere. Where rows are long, several blocks share one:
those of a cluster, or of the whole grid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cupynorm._options import shown
from cupynorm._values import dataclass
from cupynorm.plan.limits import STATIC_SHARED_BYTES, Limits, active_blocks
from cupynorm.plan.tables import (
    ACCESS_BYTES,
    CACHED,
    CACHED_LEAST_BYTES,
    CLUSTER_SHARES,
    CLUSTERS,
    DOUBLES_CACHED,
    DOUBLES_SHARED,
    FULL,
    FUSED_CLUSTER_BYTES,
    FUSED_HELD,
    FUSED_PEELED_LEAST_BYTES,
    HELD,
    MANY_ROWS,
    NARROW_HELD,
    NEVER,
    ONE_SCALE_HELD,
    PEELED,
    PEELED_HELD,
    PEELED_LEAST_BYTES,
    PEELED_ROW_BYTES,
    PEELED_SHORT_BYTES,
    PEELED_SHORT_ROWS,
    QUANTIZED_HELD,
    RAGGED,
    RAGGED_ROW_BYTES,
    SHARED_OUT_BYTES,
    SHARED_OUT_PEELED_BYTES,
    Held,
    Kept,
    Ragged,
    Spread,
)

VARIANTS = ("warp", "block", "cached", "cluster", "split", "shared", "uncached")

FUSED_VARIANTS = ("warp", "block", "cluster", "uncached")

WARP = 32
# No loop over rows, but where something is kept for a block's next ones, or on its way: a loop measured 2 to 8 % slower.
ONE_BLOCK_PER_ROW = math.inf
MAX_GRID = 2**31 - 1
MOST_CLAIMED = 2**30  # rows: claims are counted in 31 bits, and blocks ask for a few more than there are
MAX_BLOCK = 1024
# The most threads of shared, split and uncached, by bytes of the compute type.
WHOLE_BLOCK = {4: 1024, 8: 256}
# That a thread of warp and block holds, by bytes of the compute type: no spill up to there.
MOST_ELEMENTS = {4: 32, 8: 16}
MOST_PEELED_ELEMENTS = {2: 40, 4: 32, 8: 16}  # by bytes of an element
MOST_FUSED_PEELED_ELEMENTS = {2: 32, 4: 20, 8: 8}
# What a thread wants beside its values, by (bytes of the compute type, hoist) ...
OTHER_REGISTERS = {(4, 0): 32, (4, 1): 24, (8, 0): 48, (8, 1): 48}
# ... and more, where its last pack may be missing and parameters are hoisted, and where rows begin anywhere.
RAGGED_REGISTERS = {4: 16, 8: 24}
PEELED_REGISTERS = {4: 0, 8: 56}
LENT = 4  # hoist: parameters as numbers in shared memory
OF_LENT = 8  # registers for where they are, of each row of a group
MANY_PACKS = 4  # of a thread
APART_PACKS = 3  # of a thread that has all accesses to the parameters of odd rows on their way
FEW_VALUES = 16  # of a thread, without parameters: 8 registers less will do
# Of plans for what is computed on the way: threads of a block of cluster and uncached, and registers more for the former.
CLUSTER_REGISTERS = 16
ONE_SHOT_BLOCK = {4: 512, 8: 256}
FUSED_BLOCK = 256
# That a thread holds at most where a row is no power of two threads' and something is computed on the way, by bytes of an element
# and whether parameters must be put together, too.
FULLEST_ELEMENTS = {(2, False): 32, (2, True): 24, (4, False): 20, (4, True): 20, (8, False): 8, (8, True): 8}
LEAST_THREAD_BYTES = 32  # of a row that a thread holds, if FUSED_HELD has more
# Registers for the arithmetic, with which sm_90 does with 8 less, and with which it still does without those of addresses.
LEAST_OTHERS, FEW_OTHERS = 16, 24
OF_ALONE = 8  # registers for what is computed of the element that is in no pack, and for each array beside x
FEW_REGISTERS, MOST_LOADED = 64, 48  # of a thread, and words on their way to it with which so few will do
# Of a thread; of more, quantised, the compiler wants 8 registers more, and floats as many again for each of the two.
CROWDED_ELEMENTS, CROWDED_FLOATS = 24, 20
AMPERE, HOPPER = 80, 90  # before the first the compiler wants 16 registers more; the second brought clusters
# That the values and parameters of a thread take: with more, too few threads keep memory busy.
MOST_HOISTED_WORDS = 32
MOST_FEW_WORDS = 64  # the same where rows are so few that threads have all the registers they want
LEAST_NARROW_PACKS = 4  # of a thread
MOST_NARROW_WORDS = 52  # in narrow accesses, of which there are more
LINE_BYTES = 128  # of the level-1 cache: parts of rows may begin at one
# That a thread of shared, split and uncached reads at a time, by bytes of an element.
CHUNK_ELEMENTS = {2: 16, 4: 16, 8: 2}
PEELED_HOIST_ELEMENTS = {2: 16, 4: 8, 8: 4}


# A warp takes rows of as many threads as it has lanes, at so many bytes each.
WARP_THREAD_BYTES = 32
# Of a multiprocessor, where rows wait in shared memory: 20001 columns of half 0.905 to 0.923 of the copy rate.
SHARED_THREADS = 1280
# Of a multiprocessor, where parameters are wider than x, or for another architecture: the compiler wants more registers then.
ROOMY_THREADS = 1024
FEW_THREADS = 512  # either, of blocks that meet
MOST_CACHED_COLS = 2**31 - 1  # the kernel counts them in 32 bits
MOST_CACHED_PACKS = 4  # of a thread at a time
MOST_PARTS = 16
# Of clusters that hold rows in registers: what a thread wants beside its values, up to how many values it wants 4 more, from how
# many on, where rows are claimed, 8 more, and threads of a block at most; in 16 bits, where LayerNorm takes both sums in one pass
# or parameters lie as numbers in shared memory, the compiler does with less. Of those that hold them in shared memory: blocks on
# a multiprocessor and threads of a block at most.
SPREAD_OUT_REGISTERS, FEW_SPREAD_OUT, MANY_SPREAD_OUT, SPREAD_OUT_BLOCK = 40, 40, 48, 896
SPREAD_LEAST_REGISTERS = 32
KEPT_BLOCKS, KEPT_BLOCK = 8, 512
LEAST_WAVES = 0.75  # of the blocks that there is room for, where rows that begin alike are a block's
LARGE_CLUSTERS = {"90", "100", "103"}  # compute capabilities that take more than 8 blocks in one
# Where rows are fewer than multiprocessors, as many blocks as can be share one from so many bytes on: those of a cluster, each
# thread with few registers, or for more bytes those of the grid.
FEW_ROW_BYTES = 32 << 10
FEW_CLUSTER_BYTES = 1 << 20
# Of rows that begin at packs, threads of a block where they hold so many elements at most; else of more threads.
FEWEST_BLOCK, FEW_ELEMENTS, FEW_BLOCK = 128, 16, 256
FEW_OTHER_REGISTERS = 36  # that such a thread wants beside its values and parameters
# Of clusters with rows on their way around which something is computed: registers that a thread wants beside its values, with
# arithmetic that takes so many, and threads of a block at least.
SENT_REGISTERS, SENT_OTHERS, LEAST_SENT_BLOCK = 40, 21, 96
ENOUGH_IN_WORK_BYTES = 120 << 10  # of rows on a multiprocessor, read and written: more keep memory no busier
# Where there are more rows than clusters fit: packs of a thread, and, of half as many packs, blocks on a multiprocessor.
CROWDED_PACKS, CROWDED_BLOCKS = 8, 5
# Of split, on a multiprocessor: while one waits for others, the other moves. 0.45 against 0.37 at 64 rows of 2^20 columns.
SPLIT_BLOCKS = 2
# Of a row in the registers of the whole grid: its bytes, threads of a block, what a thread wants beside its values.
SPREAD_ROW_BYTES, SPREAD_BLOCK, SPREAD_REGISTERS = (1 << 20, 4 << 20), 512, 56
# Of rows that are read twice, side by side: so many at least, and at a time; packs of a thread, threads of a block.
TOGETHER_LEAST_ROWS, TOGETHER_ROWS, TOGETHER_PACKS, TOGETHER_BLOCK = 4, 8, 4, 512
LETTERS_BYTES = 32  # of what a block tells another
# So many rows at once, if there are as many, that have a parameter and do not fit: each of its reads then serves all of them.
LONG_ROWS = 16
# From so many bytes of rows on, with 4 bytes an element or one parameter, one block of all threads: RMSNorm of 16 x 2^20 columns
# 0.70 to 0.74 in 4 bytes, 0.72 to 0.74 in 2, LayerNorm in 4 0.61 to 0.64. One row alone is better in two.
WHOLE_BLOCK_BYTES = 32 << 20
# Of a part, what does not fit into shared memory is read again, and L2 still has it: so much more than fits saves a round.
SPLIT_OVERFLOW = 1.25


@dataclass(frozen=True)
class Problem:
    """What is to be launched.

    rows x cols elements; `pack` neighbouring elements can be moved at once (columns, strides and every pointer's alignment
    allow it); shared memory would hold `load_bytes` an element; arithmetic is in `compute_bytes`. `columns`: bytes of
    an element of each of the columns' parameters, such as gamma.

    Where something is computed on the way (io/fused.cuh), rows wait in registers, and go through shared memory on their
    way to them at most: `fused`. `beside`: bytes of an element of each array that is loaded with x; `ahead`: of each that the
    results need, loaded with it; `stored`: of the results; `results`: how many arrays are written; `direct`: nothing is loaded
    but x, as it is; `others`: registers for the arithmetic; `bounded`: a mask keeps an interval of each row's columns; `sent`:
    bytes of an element beside x's that go through shared memory where rows are sent ahead.

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
    fused: bool = False
    beside: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    stored: int = 0
    results: int = 1
    direct: bool = True
    others: int = 0
    bounded: bool = False
    sent: int = 0

    @property
    def peeled(self) -> Problem:
        """The problem as it is worked on: with the widest packs, if the elements around them are worth it."""
        table = FUSED_PEELED_LEAST_BYTES if self.fused else PEELED_LEAST_BYTES.get(self.kind, {})
        least = table.get(self.pack * self.load_bytes, PEELED_ROW_BYTES)
        shortest, longest = (math.inf, 0) if self.fused else PEELED_SHORT_BYTES.get(self.kind, (math.inf, 0))
        short = shortest <= self.cols * self.load_bytes <= longest and self.period > 0
        short = short and self.rows >= PEELED_SHORT_ROWS.get(self.kind, 0)
        if self.peel and (short or self.cols * self.load_bytes >= least):
            return dataclasses.replace(self, pack=self.widest)
        return dataclasses.replace(self, peel=0)

    @property
    def kind(self) -> tuple[int, int]:
        """The key of the tables below."""
        return min(2, len(self.columns)), self.held_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row for the tables below."""
        return self.cols * self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of an element for the tables below: as loaded, or a double's if that is what it becomes."""
        return max(self.load_bytes, self.compute_bytes if self.compute_bytes == 8 else 0)  # noqa: PLR2004


@dataclass(frozen=True)
class Plan:
    """What will be launched.

    variant: where a row waits: one of VARIANTS. pack: elements moved by one instruction.
    packs: packs that a thread holds (of one row; a chunk in shared, split and uncached). group: threads of a block that share a
    row; 0 is the whole block. rows_per_group: rows that a group holds at once. full: the packs of all threads are exactly the
    row. hoist: the columns' parameters wait in registers (1) or, for all rows of a block, in shared memory (2), in registers (3)
    or, as numbers, in shared memory (4).
    peel: rows begin anywhere; the elements around their packs go one by one (1; 2: x lies in other packs than y).
    period: rows so far apart begin alike. parts: blocks that share a row. stages: 0, or how many rows (of a group) are on
    their way through shared memory. grid, block: blocks, and threads a block. kept_bytes: shared memory that a block
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
        """The kernel of kernels/row that holds a row so."""
        if self.variant == "cached":
            return "row_cached"
        if self.variant == "split" and self.group:
            return "row_spread"
        if self.variant == "split" and self.rows_per_group > 1:
            return "row_together"
        return "row_registers" if self.group else "row_staged"

    @property
    def shape(self) -> str:
        """The kernel's struct of numbers: how a row lies in threads."""
        return self.kernel.removeprefix("row_").capitalize()

    @property
    def template(self) -> tuple[int | bool, ...]:
        """The numbers among the kernel's template arguments, in order."""
        if self.variant == "cached":
            return (self.pack, self.packs, self.block, self.least_blocks)
        if self.kernel == "row_spread":
            return (self.pack, self.packs, self.hoist, self.block, self.least_blocks)
        if self.kernel == "row_together":
            return (self.pack, self.packs, self.rows_per_group, self.block, self.least_blocks)
        if not self.group:
            parts = 0 if self.variant == "split" else self.parts  # a grid's are known at the launch only
            return (self.pack, self.packs, self.peel, parts, self.kept_bytes, self.block, self.least_blocks)
        held = (self.pack, self.packs, self.group, self.rows_per_group, self.full, self.hoist, self.peel)
        return (*held, self.period, self.parts, self.block, self.least_blocks, self.stages)

    @property
    def persistent(self) -> bool:
        """Whether blocks go through many rows, since something is kept for the next ones or on its way."""
        return self.stages > 0 or self.hoist in (2, 3)

    @property
    def claims(self) -> bool:
        """Whether clusters claim their next rows as they come to them; all of them then run at once."""
        return self.persistent and self.parts > 1 and (not self.peel or self.hoist == LENT)

    @property
    def cooperative(self) -> bool:
        """Whether all blocks must run at once: they wait for one another, or share a counter."""
        return self.variant == "split" or self.claims

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
Candidate = Callable[["Problem", Limits, Occupancy], "Plan | None"]


class DoesNotFitError(ValueError):
    """A variant that was asked for cannot hold the row."""


def choose(
    problem: Problem,
    limits: Limits,
    occupancy: Occupancy,
    wanted: str | Plan | None = None,
    *,
    cooperative: bool = True,
) -> Plan:
    """Return the plan for `problem`: the first of VARIANTS that can hold a row, or what is `wanted`.

    `wanted` names a variant, or is a Plan, of which the template arguments and the block are kept, and the waves as a bound.
    cooperative: whether its blocks may have to run all at once. Raises DoesNotFitError, a ValueError, if `wanted` is
    unknown or cannot hold the row so, TypeError if it is no plan.
    """
    check_plan(wanted)
    if isinstance(wanted, Plan):
        as_wanted = _as_wanted(problem, limits, occupancy, wanted)
        if as_wanted.cooperative and not cooperative:
            raise DoesNotFitError(f"the blocks of {wanted} must all run at once")
        return as_wanted
    if wanted is not None and wanted not in VARIANTS:
        raise DoesNotFitError(f"plan {wanted!r} is not a variant: use {', '.join(VARIANTS)}")
    if wanted is not None and problem.fused and wanted not in FUSED_VARIANTS:
        *others, last = FUSED_VARIANTS
        raise DoesNotFitError(
            f"variant {wanted!r} runs an op alone: with a mask, a sum, quantised results or functions around it "
            f"use {', '.join(others)} or {last}"
        )
    for candidate in _in_turn(problem, limits) if wanted is None else (_CANDIDATE[wanted],):
        # doubles in clusters have no registers for the elements around their packs
        doubles = candidate in (_one_shot, _cluster) and problem.compute_bytes == 8  # noqa: PLR2004
        worked = _narrowed(_worked_on(problem, candidate is _uncached or doubles), candidate)
        plan = candidate(worked, limits, occupancy)
        if plan is not None and plan.cooperative and not cooperative:
            plan = _without_claims(worked, limits, occupancy, plan)
        if plan is not None:
            return plan
    raise DoesNotFitError(_does_not_fit(problem, limits, f"variant {wanted!r}"))


def _without_claims(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    """Return a plan with as many clusters as rows: nothing is kept for other rows, and none is claimed."""
    if plan.variant != "cluster":
        return None
    if problem.fused:
        return _one_shot(_narrowed(problem), limits, occupancy)
    plan = _registers_plan(problem, dataclasses.replace(plan, hoist=0, stages=0))
    return _with_grid(problem, plan, _blocks(problem, plan), limits, occupancy(plan))


def _worked_on(problem: Problem, in_packs: bool) -> Problem:  # noqa: FBT001
    """Return the problem as a candidate works on it. in_packs: what is fused around it lets no row begin anywhere."""
    return dataclasses.replace(problem, peel=0) if problem.fused and in_packs else problem.peeled


def _narrowed(problem: Problem, candidate: Candidate | None = None) -> Problem:
    """Return the problem in packs of which each parameter of the columns takes one access.

    Two accesses of neighbouring threads would leave half of each line to the other (H200, 768 columns in 16 bits with parameters
    in 32: 0.81 to 0.90 of the copy rate at 4096 rows). Where those wait for all of a block's rows it does not matter.
    """
    widest = max(problem.columns, default=1)
    if (
        not problem.fused
        or candidate is _sent_ahead
        or problem.peel
        or _what(problem) != "scaled"
        or widest * problem.pack <= ACCESS_BYTES
    ):
        return problem
    return dataclasses.replace(problem, pack=max(1, ACCESS_BYTES // widest))


def _in_turn(problem: Problem, limits: Limits) -> tuple[Candidate, ...]:
    """Return what to try, best first."""
    few = _has_few_rows(problem, limits)
    if problem.fused:
        peeled = _narrowed(problem.peeled)
        narrow = _group(peeled, _thread_bytes(peeled, _held(peeled))) <= WARP
        least = FUSED_CLUSTER_BYTES.get((_around(problem), problem.held_bytes), NEVER)[peeled.peel > 0]
        long = peeled.row_bytes >= least
        first = (_one_shot,) * few or (_sent_ahead,) * long
        return (*(_warp,) * narrow, *first, _block, _sent_ahead, _one_shot, _uncached)
    if few:
        longest = FEW_CLUSTER_BYTES // (2 if problem.rows == 1 else 1)
        first = (_few_rows, _split) if problem.row_bytes <= longest else (_split, _few_rows, _shared_out)
        return (*first, _best_cached, _block, _shared, _uncached)
    # a warp holds more than what is best for it: from there on a block is better
    ragged = _ragged(problem.peeled, limits)
    group = ragged[1] if ragged is not None else _group(problem.peeled, _warp_thread_bytes(problem.peeled))
    held = (_warp, _block) if group <= WARP else (_best_cached, _block)
    if _gains_by_sharing(problem.peeled, limits):
        return (_shared_out, *held, _shared, _split, _uncached)
    return (*held, _shared_out, _shared, _split, _uncached)


def _gains_by_sharing(problem: Problem, limits: Limits) -> bool:
    """Say whether blocks of a cluster are better for a row that one block could hold, too."""
    if problem.peel == 1 and problem.columns and _most_parts(limits) > 1:
        return problem.row_bytes > SHARED_OUT_PEELED_BYTES.get(problem.kind, math.inf)
    least = SHARED_OUT_BYTES.get(problem.kind, math.inf)
    if len(problem.columns) > 1 and problem.held_bytes == 4:  # noqa: PLR2004
        return problem.row_bytes > least
    return problem.row_bytes > least and problem.row_bytes % (WARP * ACCESS_BYTES) != 0


def _has_few_rows(problem: Problem, limits: Limits) -> bool:
    """Say whether several multiprocessors should work on a row."""
    return problem.rows < limits.sm_count and problem.row_bytes >= FEW_ROW_BYTES


def _does_not_fit(problem: Problem, limits: Limits, what: str) -> str:
    return (
        f"{what} cannot hold a row of {problem.cols} columns, {problem.load_bytes} bytes each, "
        f"in packs of {problem.pack}, on {limits.name}"
    )


# The least and the most that a Plan's numbers may be, whatever the problem; what a kernel asks for beyond that is in _is_sound.
BOUNDS: dict[str, tuple[int, int]] = {
    "pack": (1, 16),
    "packs": (1, 128),
    "group": (0, MAX_BLOCK),
    "rows_per_group": (1, 8),
    "hoist": (0, LENT),
    "peel": (0, 2),
    "period": (0, 16),
    "parts": (1, 1 << 16),
    "stages": (0, 6),
    "grid": (0, MAX_GRID),
    "block": (WARP, MAX_BLOCK),
    "kept_bytes": (0, 1 << 20),
    "shared_bytes": (0, 1 << 20),
    "least_blocks": (1, 32),
    "resident_blocks": (0, MAX_GRID),
}
# Bytes of values that a thread may hold, of the compute type. Half of its registers: twice as many and the compiler, which then
# spills, takes up to 4 seconds; so it takes 1.6 at most.
MOST_THREAD_BYTES = 512
# The same where something is fused, of which each element has instructions of its own: with 512, a user's function on
# doubles took 4 seconds.
MOST_FUSED_THREAD_BYTES = 256
# Of a row, that a thread may hold where something is fused, with parameters of the columns or without: a mask has a bit for each.
MOST_FUSED_ELEMENTS = {True: 40, False: 32}


# Types of a Plan's fields: a bool is no int here, since it is spelled otherwise in C++.
KINDS: dict[str, type] = {"variant": str, **dict.fromkeys(BOUNDS, int), "full": bool, "waves": float}
ARTICLES = {str: "a", int: "an", bool: "a", float: "a"}


def check_plan(wanted: object) -> None:
    """Raise TypeError, naming the field, for what is neither None, a name nor a Plan of such values as a plan has."""
    if not isinstance(wanted, Plan):
        if wanted is not None and not isinstance(wanted, str):
            variants = ", ".join(map(repr, VARIANTS))
            raise TypeError(
                f"plan is {shown(wanted)}: give the name of a variant ({variants}) or a cupynorm.Plan"
            )
        return
    for name, expected in KINDS.items():
        value = getattr(wanted, name)
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise TypeError(
                f"plan: {name} is {value!r}, {ARTICLES[expected]} {expected.__name__} is expected"
            )


def _check_numbers(problem: Problem, limits: Limits, plan: Plan) -> None:
    """Raise DoesNotFitError, naming the field, for a plan that no problem of these types can have."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(plan, name)
        if not least <= value <= most:
            raise DoesNotFitError(f"plan: {name} is {value}, {least} to {most} is allowed")
    if plan.variant not in VARIANTS:
        raise DoesNotFitError(f"plan: variant is {plan.variant!r}: use {', '.join(VARIANTS)}")
    if not plan.waves >= 0:
        raise DoesNotFitError(f"plan: waves is {plan.waves}, 0 or more is allowed")
    for name in ("pack", "block"):
        value, unit = getattr(plan, name), WARP if name == "block" else 1
        if value % unit or (unit == 1 and not _is_power_of_two(value)):
            raise DoesNotFitError(
                f"plan: {name} is {value}, {'a multiple of 32' if unit > 1 else 'a power of two'} is allowed"
            )
    most = (MOST_FUSED_THREAD_BYTES if problem.fused else MOST_THREAD_BYTES) // problem.compute_bytes
    if plan.pack * plan.packs * plan.rows_per_group > most:
        where = " where something is fused" if problem.fused else ""
        raise DoesNotFitError(
            f"plan: pack x packs x rows_per_group is {plan.pack} x {plan.packs} x {plan.rows_per_group}, "
            f"{most} elements of a thread are allowed{where}"
        )
    elements = plan.pack * plan.packs
    most = MOST_FUSED_ELEMENTS[bool(problem.columns)]
    if problem.fused and plan.group and elements > most:
        raise DoesNotFitError(
            f"plan: pack x packs is {plan.pack} x {plan.packs}, {most} elements of a thread are allowed "
            "where something is fused"
        )
    if plan.block * plan.least_blocks > limits.threads_per_sm:
        raise DoesNotFitError(
            f"plan: block x least_blocks is {plan.block} x {plan.least_blocks}, "
            f"{limits.threads_per_sm} threads of a multiprocessor are allowed on {limits.name}"
        )


def _as_wanted(problem: Problem, limits: Limits, occupancy: Occupancy, wanted: Plan) -> Plan:
    _check_numbers(problem, limits, wanted)
    wanted = dataclasses.replace(wanted, shared_bytes=0)  # follows from the rest
    in_packs = wanted.variant == "uncached" or (wanted.variant == "cluster" and not wanted.peel)
    peeled = _worked_on(problem, in_packs)
    fits = (
        peeled.pack % wanted.pack == 0
        and (wanted.pack == peeled.pack or not peeled.peel)
        and (wanted.peel, wanted.period) == (peeled.peel, _period(peeled, wanted.rows_per_group))
        and _is_sound(peeled, limits, wanted)
    )
    chosen = None
    if fits and wanted.variant == "split" and wanted.kernel != "row_staged":
        chosen = (_spread_plan if wanted.group else _together_plan)(peeled, limits, occupancy, wanted)
    elif fits and wanted.group:
        plan = _registers_plan(peeled, wanted)
        fits = (
            wanted.block % wanted.group == 0
            and plan.packs == wanted.packs
            and (not wanted.stages or wanted.pack * problem.load_bytes == ACCESS_BYTES)
            and plan.shared_bytes <= limits.shared_bytes_per_block
        )
        if fits:
            blocks, waves = _blocks(peeled, plan), wanted.waves or ONE_BLOCK_PER_ROW
            chosen = _with_grid(peeled, plan, blocks, limits, occupancy(plan), waves)
    elif fits and wanted.variant == "split":
        chosen = _split_plan(peeled, limits, occupancy, wanted)
    elif fits and wanted.variant == "cached":
        chosen = _cached_plan(peeled, limits, occupancy, wanted)
    elif fits and (wanted.variant != "shared" or shared_bytes_of(peeled) <= wanted.kept_bytes):
        chosen = _staged_plan(peeled, limits, occupancy, wanted)
    if chosen is None:
        raise DoesNotFitError(_does_not_fit(problem, limits, f"{wanted}"))
    return chosen


def _is_sound(problem: Problem, limits: Limits, plan: Plan) -> bool:
    """Say whether a plan that somebody made asks for nothing that its kernel would do wrong."""
    if plan.variant == "cluster":
        shares = 1 < plan.parts <= MOST_PARTS and _is_power_of_two(plan.parts)
        shares = shares and plan.rows_per_group == 1 and plan.group in (0, plan.block)
    elif plan.variant == "split":
        shares = plan.group in (0, plan.block) and plan.rows_per_group <= TOGETHER_ROWS
        shares = shares and (plan.kernel == "row_staged" or _is_power_of_two(plan.block))
    else:
        shares = plan.parts == 1 and (plan.group > 0) == (plan.variant in ("warp", "block"))
    # warps meet in slots, of which there may be more; lanes only in powers of two
    shares = shares and (plan.group % WARP == 0 or WARP % plan.group == 0)
    # blocks that share a row meet among their warps in between
    shares = shares and (plan.block > WARP or plan.variant not in {"cluster", "split"})
    keeps = plan.kept_bytes % ACCESS_BYTES == 0 and plan.kept_bytes <= limits.shared_bytes_per_block
    in_packs = plan.group == 0 and plan.variant not in ("cached", "uncached") and plan.peel < 2  # noqa: PLR2004
    keeps = keeps and (plan.kept_bytes == 0 or in_packs)
    if problem.fused:
        keeps = keeps and plan.variant in FUSED_VARIANTS and plan.kept_bytes == 0
        # a scale of each row is stored beside its bytes: blocks that read a row twice do not tell one another its largest
        keeps = keeps and not (_has_scales(problem) and plan.variant == "cluster" and plan.group == 0)
        keeps = keeps and _has_static_room(problem, plan)
    staged = plan.group == 0 and plan.variant in ("shared", "cluster", "uncached")
    keeps = keeps and (not staged or plan.block == _held_around(problem, plan.parts, plan.block))
    # where rows of a cluster begin anywhere, each claims its next ones with LENT alone, also without parameters
    has_columns = bool(problem.columns) or (problem.fused and plan.hoist == LENT)
    hoists = plan.hoist in range(LENT + 1) and (plan.hoist == 0 or (has_columns and plan.group > 0))
    # only what is in registers has rows on their way
    hoists = hoists and (plan.stages == 0 or plan.kernel == "row_registers") and _holds_around(plan)
    alone = plan.parts == 1 and plan.stages == 0
    claims = plan.claims and plan.peel == 1
    hoists = hoists and (plan.hoist != LENT or claims or (alone and not problem.fused))
    return shares and keeps and hoists and (not plan.persistent or _may_persist(problem, plan))


def _holds_around(plan: Plan) -> bool:
    """Say whether the first threads of a row in registers hold what is around its packs: twin of Registers' assertions."""
    if plan.kernel != "row_registers" or not plan.peel:
        return plan.parts == 1 or plan.kernel != "row_registers" or plan.block > WARP
    first = LINE_BYTES // ACCESS_BYTES * plan.pack if plan.hoist == LENT and plan.parts > 1 else plan.pack
    holds = plan.group >= max(2 * plan.pack - 2, first - 1) and plan.group * plan.pack % 8 == 0
    alike = plan.rows_per_group == 1 or (plan.stages == 0 and plan.hoist % LENT < 2)  # noqa: PLR2004
    return holds and alike and (plan.peel == 1 or plan.stages == 0)


def _may_persist(problem: Problem, plan: Plan) -> bool:
    """Say whether what is kept for a block's next rows, or on its way, is theirs."""
    if not plan.peel:
        return True  # else they must begin alike
    if plan.claims:
        # threads hold what is before a row's first line, of warps with a pack at least; a thread's last pack alone may be missing
        line, (least, _) = LINE_BYTES // problem.load_bytes, _lent_packs(problem, plan.parts)
        holds = plan.group >= line - 1 and least > (line - 2) // WARP * WARP
        return plan.peel == 1 and holds and plan.group * (plan.packs - 1) <= least
    return problem.period > 0 and plan.rows_per_group == 1 and not (plan.stages and plan.peel > 1)


def _held_around(problem: Problem, parts: int, block: int) -> int:
    """Return how many threads a block of shared, cluster or uncached may have, of `block` at most.

    From 9 packs' elements on they hold what is before a row's first line, and packs are counted from there (kUnit in staged.cuh).
    Each of their warps counts from an element of its first pack (LayerNorm), so they must all have one; else there are fewer.
    """
    threads = 9 * problem.pack
    if not problem.peel or problem.cols // problem.pack // parts >= threads + LINE_BYTES // ACCESS_BYTES:
        return block
    # of a cluster, what is behind all packs is another block's: one warp holds the rest
    if parts > 1 and threads <= 2 * WARP:
        return block
    return min(block, max(1, (threads - 1) // WARP) * WARP)


def shared_bytes_of(problem: Problem) -> int:
    """Return the shared memory that a row takes, in whole 16-byte accesses."""
    return _part_bytes(problem, 1)


def _part_bytes(problem: Problem, parts: int) -> int:
    """Return the shared memory that the largest of so many parts of a row takes, in whole 16-byte accesses.

    Parts of rows that begin anywhere are cut in lines, of which the last has what is left over: twin of part_of in staged.cuh.
    """
    packs = math.ceil(problem.cols // problem.pack / parts)
    if problem.peel:
        line = LINE_BYTES // (problem.pack * problem.load_bytes)
        packs = (problem.cols // problem.pack // line // parts + 1) * line
    return -(-packs * problem.pack * problem.load_bytes // ACCESS_BYTES) * ACCESS_BYTES


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def _power_of_two_from(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _power_of_two_to(value: int) -> int:
    return 1 << max(1, value).bit_length() - 1


def _is_narrow(problem: Problem) -> bool:
    """Say whether rows are moved in accesses of fewer than 16 bytes."""
    return problem.pack * problem.load_bytes < ACCESS_BYTES and not (problem.peel or problem.fused)


def _held(problem: Problem) -> Held | None:
    table = (PEELED_HELD if problem.peel else HELD)[problem.kind]
    if _is_narrow(problem):
        table = NARROW_HELD.get(problem.kind, table)
    if problem.fused and problem.held_bytes < 8:  # noqa: PLR2004
        table = _fused_held(problem)
    return next((held for held in table if problem.row_bytes <= held.row_bytes), None)


def _fused_held(problem: Problem) -> tuple[Held, ...]:
    what = _what(problem)
    if what == "quantized" or (problem.stored == 1 and problem.direct):
        alone = ONE_SCALE_HELD if problem.results == 1 else {}
        return alone.get(problem.kind, QUANTIZED_HELD[problem.kind])
    return FUSED_HELD["summed" if what == "scaled" and problem.results > 1 else what, problem.held_bytes]


def _what(problem: Problem) -> str:
    """Return what is computed on the way, as FUSED_HELD names it, or "quantized": with parameters, to a byte an element."""
    if not problem.columns:
        return "bounded" if problem.bounded else "masked"
    return "quantized" if problem.stored == 1 else "scaled"


def _around(problem: Problem) -> str:
    """Return what is computed on the way, as FUSED_CLUSTER_BYTES names it."""
    if problem.stored == 1:
        return "quantized"
    return "scaled" if problem.columns else _what(problem)


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
    share = (
        _lent_packs(problem, plan.parts)[1] if plan.claims and plan.peel else math.ceil(whole / plan.parts)
    )
    packs = max(1, math.ceil(share / plan.group))
    full = not problem.peel and plan.parts * plan.group * packs == whole
    sent_bytes = ACCESS_BYTES + plan.pack * problem.sent
    rows = plan.stages * plan.rows_per_group * packs * plan.block * sent_bytes
    columns = 0
    if plan.hoist == 2:  # noqa: PLR2004
        struct_bytes = sum(max(4, size * plan.pack) for size in problem.columns)  # of whole words
        columns = packs * plan.block * (-(-struct_bytes // ACCESS_BYTES) * ACCESS_BYTES)
    elif plan.hoist == LENT:
        columns = _lent_bytes(problem, plan.pack, plan.parts)
    return dataclasses.replace(plan, packs=packs, full=full, shared_bytes=rows + columns)


def _lent_packs(problem: Problem, parts: int) -> tuple[int, int]:
    """Return the fewest and most packs of a part where rows are cut in lines and lent numbers are a block's: twin of share_of."""
    line = LINE_BYTES // problem.load_bytes
    each, longer = divmod((problem.cols - line + 1) // line, parts)
    packs = line // problem.pack  # of a line
    last = problem.cols // problem.pack - packs * (each * (parts - 1) + longer)
    return packs * each, max(packs * (each + (longer > 0)), last)


def _lent_bytes(problem: Problem, pack: int, parts: int = 1) -> int:
    """Return the shared memory of a block's converted parameters, with the room behind each vector: twin of ConvertedLayout."""
    if not problem.columns:
        return 0
    number = problem.compute_bytes * len(problem.columns)
    if parts > 1 and problem.columns == (2, 2):
        number = sum(problem.columns)  # as they are
    room = 1 if problem.peel else ACCESS_BYTES // number if pack * number > ACCESS_BYTES else 0
    cols = problem.cols
    if parts > 1:  # what is around the packs of its part is a block's as well, wherever the row begins
        cols = _lent_packs(problem, parts)[1] * pack + LINE_BYTES // problem.load_bytes
    return -(-(cols + cols // pack * room) * number // ACCESS_BYTES) * ACCESS_BYTES


def _blocks(problem: Problem, plan: Plan) -> int:
    """Return how many blocks hold all rows."""
    apart = plan.period * plan.rows_per_group
    rows = math.ceil(problem.rows / apart) * apart if plan.peel else problem.rows
    return math.ceil(rows / (plan.block // plan.group * plan.rows_per_group)) * plan.parts


def _in_registers(
    problem: Problem, limits: Limits, occupancy: Occupancy, variant: str, group: int, held: Held | Ragged
) -> Plan | None:
    packs = math.ceil(problem.cols // problem.pack / group)
    elements = packs * problem.pack
    measured = isinstance(held, Ragged)
    if elements > _most_elements(problem) and not measured:
        return None
    seen = isinstance(held, Held) and _was_compiled(problem, limits, held, group)
    most = MOST_ELEMENTS[problem.compute_bytes] // (1 if problem.fused else 2)
    fits = (measured or held.rows * elements <= most) and problem.compute_bytes < 8  # noqa: PLR2004
    rows = held.rows if fits and (problem.period or not problem.peel) else 1
    block = max(1, held.block // group) * group
    plan = dataclasses.replace(
        PLAIN,
        variant=variant,
        pack=problem.pack,
        group=group,
        rows_per_group=rows,
        peel=problem.peel,
        period=_period(problem, rows),
        block=block,
    )
    if held.hoist in (2, 3):  # for all rows of a block, which are on their way while others are in work
        # in registers only where there is room for them
        hoist = held.hoist if seen or _can_hoist(problem, elements) else 2
        plan = dataclasses.replace(plan, hoist=hoist, stages=int(_can_stage(problem, limits)))
        # where columns lie anywhere, the accesses to all of them are on their way at once
        apart = APART_PACKS + problem.fused
        computed = problem.fused and not problem.direct
        if computed or not _may_persist(problem, plan) or (problem.peel and elements > apart * problem.pack):
            plan = dataclasses.replace(plan, hoist=0, stages=0)
    crowded = problem.peel and (problem.fused or elements > PEELED_HOIST_ELEMENTS[problem.held_bytes])
    if held.hoist == LENT and _lent_bytes(problem, problem.pack) <= limits.shared_bytes_per_block:
        plan = dataclasses.replace(plan, hoist=LENT)
    if held.hoist == 1 and (measured or seen or (_can_hoist(problem, elements) and not crowded)):
        plan = dataclasses.replace(plan, hoist=1)
    plan = _registers_plan(problem, plan)
    registers = _registers(problem, limits, elements, full=plan.full, hoist=plan.hoist % 2 == 1)
    registers += (rows - 1) * (elements // 2 if problem.fused else elements + 1)
    registers += OF_LENT * rows * (plan.hoist == LENT)
    if seen or (measured and int(limits.compute_capability) == HOPPER and _alike(problem)):
        registers = min(registers, limits.registers_per_sm // held.resident_threads)
    if registers * block > limits.registers_per_sm:
        return None
    threads = min(held.resident_threads, limits.threads_per_sm, limits.registers_per_sm // registers)
    plan = dataclasses.replace(plan, least_blocks=max(1, threads // block))
    return _with_grid(problem, plan, _blocks(problem, plan), limits, occupancy(plan))


def _was_compiled(problem: Problem, limits: Limits, held: Held, group: int) -> bool:
    """Say whether so many threads are those that `held` was seen to give enough registers."""
    packs = problem.cols // problem.pack
    full = not problem.peel and packs % group == 0 and _is_power_of_two(packs)
    few = packs // group * problem.pack * problem.held_bytes <= _thread_bytes(problem, held)
    wide = problem.pack * problem.load_bytes == ACCESS_BYTES and _alike(problem)
    little = 0 < held.others >= problem.others
    return full and few and wide and little and int(limits.compute_capability) == HOPPER


def _alike(problem: Problem) -> bool:
    """Say whether all that a kernel reads has x's type: what was measured was so."""
    return all(size == problem.load_bytes for size in problem.columns)


def _can_hoist(problem: Problem, elements: int) -> bool:
    """Say whether a thread that holds so many elements has room for their columns' parameters in registers."""
    most = MOST_NARROW_WORDS if _is_narrow(problem) else MOST_HOISTED_WORDS
    return bool(problem.columns) and _words(problem, elements, hoist=True) <= most


def _can_stage(problem: Problem, limits: Limits) -> bool:
    """Say whether rows can be on their way through shared memory: packs of 16 bytes, from sm_80 on."""
    whole = problem.pack * problem.load_bytes == ACCESS_BYTES and problem.peel < 2  # noqa: PLR2004
    return whole and int(limits.compute_capability) >= AMPERE


def _most_elements(problem: Problem) -> int:
    if problem.peel:
        return (MOST_FUSED_PEELED_ELEMENTS if problem.fused else MOST_PEELED_ELEMENTS)[problem.held_bytes]
    return MOST_ELEMENTS[problem.compute_bytes]


def _words(problem: Problem, elements: int, *, hoist: bool) -> int:
    """Return how many registers the values of a thread take, with the parameters as they were loaded if they are hoisted."""
    values = elements * problem.compute_bytes // 4
    if hoist:
        values += elements // problem.pack * sum(max(1, size * problem.pack // 4) for size in problem.columns)
    return values


def _words_loaded(problem: Problem, elements: int) -> int:
    """Return how many registers x and all that is loaded with it take on their way; a third of that is for addresses."""
    return elements * (problem.load_bytes + sum((*problem.beside, *problem.ahead))) // 3


def _registers(problem: Problem, limits: Limits, elements: int, *, full: bool, hoist: bool) -> int:
    """Return how many registers keep a thread of so many elements from spilling.

    Those of the values and of what else the compiler was seen to want; the build gate compiles the extremes of every type
    and architecture to hold this.
    """
    values, hopper = _words(problem, elements, hoist=hoist), int(limits.compute_capability) == HOPPER
    others = OTHER_REGISTERS[problem.compute_bytes, int(hoist)]
    if not full:
        ragged = RAGGED_REGISTERS[problem.compute_bytes]
        if hoist:
            others += ragged // 2 if problem.peel or problem.held_bytes == 2 else ragged  # noqa: PLR2004
        else:
            others += 8 if problem.peel else max(8, values // 2 - 8)
    others += 8 * (hoist and elements > CROWDED_ELEMENTS and not hopper)
    if problem.peel:
        others += PEELED_REGISTERS[problem.compute_bytes]
    if problem.fused:
        others += 8 * (problem.compute_bytes == 8)  # noqa: PLR2004
        # what is on its way need not wait for the arithmetic, nor that for it
        if problem.peel:
            others += OF_ALONE * (1 + len(problem.beside) + len(problem.ahead))
        if _what(problem) == "quantized":
            floats = problem.held_bytes == 4  # noqa: PLR2004
            others += 8 * (1 + floats) * (elements > CROWDED_ELEMENTS)
            others += 8 * (floats and elements > CROWDED_FLOATS)
        if not hopper:
            others += 8 if elements // problem.pack <= MANY_PACKS else 16
        others += problem.others + elements * sum(problem.ahead) // 4
        others = max(others, _words_loaded(problem, elements) - elements * problem.compute_bytes // 4)
    if not hoist:  # the parameters pass through registers, a pack at a time
        others += max(0, 2 * (sum(size * problem.pack // 4 for size in problem.columns) - 8))
    # and as many addresses; sm_90 makes do without them where rows are full
    many = elements // problem.pack > MANY_PACKS and not hoist and (problem.fused or not problem.peel)
    many = many and problem.pack * problem.load_bytes > 4  # noqa: PLR2004
    four = problem.held_bytes == 4 or (problem.fused and problem.pack == 4)  # noqa: PLR2004
    plain = problem.others <= FEW_OTHERS
    if many and not (full and four and plain and hopper):
        others += 24 if plain else 32
    simple = problem.fused and bool(problem.columns) and problem.others <= LEAST_OTHERS
    if hopper and simple and full and not hoist:
        # 64 registers, and so 1024 threads: 4096 rows of 768 columns are then all in work at once, 0.76 to 0.90 of the copy rate
        others -= 8 * (problem.held_bytes == 2 and values <= CROWDED_ELEMENTS)  # noqa: PLR2004
    if int(limits.compute_capability) < AMPERE:
        others += 16
    elif full and not (problem.columns or problem.beside) and problem.compute_bytes == 4:  # noqa: PLR2004
        others -= 8 * (values <= FEW_VALUES or (problem.fused and not many))
    registers = -(-(values + others) // 8) * 8
    sums = problem.fused and _what(problem) == "scaled" and not (full or hoist or problem.peel)
    sums = sums and problem.held_bytes == 2 and values <= CROWDED_ELEMENTS and problem.others <= FEW_OTHERS  # noqa: PLR2004
    sums = sums and elements // problem.pack <= MANY_PACKS and _words_loaded(problem, elements) <= MOST_LOADED
    # 1024 threads: add_layer_norm of 3000 columns 0.92 to 0.94, with the sum 0.91 to 0.957
    return min(registers, FEW_REGISTERS) if sums and hopper else registers


def _group(problem: Problem, thread_bytes: int) -> int:
    """Return how many threads share a row, so that each holds about thread_bytes of it."""
    packs = max(1, problem.cols // problem.pack)
    packs_per_thread = max(1, thread_bytes // (problem.pack * problem.held_bytes))
    group = _power_of_two_from(math.ceil(packs / packs_per_thread))
    half = group // 2
    fits = half > 0 and math.ceil(packs / half) * problem.pack <= _most_elements(problem)
    whole = packs % group != 0 and fits and packs % half == 0
    if whole and packs_per_thread <= MANY_PACKS and not problem.peel:
        group = half  # those hold the row without a gap: 0.95 against 0.67 at 768 columns
    # to bytes a thread's own work counts most: 3072 columns in 96 threads instead of 128, 0.90 to 0.946
    few = problem.fused and _what(problem) == "quantized" and packs < group * packs_per_thread
    if problem.fused and (packs % group or few):
        group = _fullest(problem, group, packs)
    return max(group, _least_group(problem))


def _fullest(problem: Problem, group: int, packs: int) -> int:
    """Return how many threads leave the fewest places empty, of those the fewest: what each does once counts less then.

    H200, 16 bits: 5120 columns in 160 threads instead of 256, add_layer_norm 0.75 to 1.0, softmax with a byte mask 0.69 to 1.0;
    1000 columns in 32 threads instead of 64: 0.80 to 0.97, 0.92 to 0.98. But add_layer_norm of 3000 in 128 threads of 3 packs,
    not in 96 of 4: 0.94, not 0.88.
    """
    most = FULLEST_ELEMENTS[problem.held_bytes, problem.peel > 0 and bool(problem.columns)]
    least = max(1, 2 * problem.pack - 2 if problem.peel else 1)
    # a thread's own work counts little already
    spread = _what(problem) == "scaled" and math.ceil(packs / group) >= MANY_PACKS - 1
    for each in (*(1 << p for p in range(WARP.bit_length() - 1)), *range(WARP, MAX_BLOCK + 1, WARP)):
        held = math.ceil(packs / each)
        places, fewest = each * held, group * math.ceil(packs / group)
        too_many = held * problem.pack > most or each < least
        if not too_many and (places < fewest or (places == fewest and each < group and not spread)):
            group = each
    return group


def _ragged(problem: Problem, limits: Limits) -> tuple[Ragged, int] | None:
    """Return how a row is spread, and over how many threads: one that begins anywhere, or that fills no power of two of threads.

    Or one that does, in FULL. None where HELD is better.
    """
    if problem.fused or _is_narrow(problem):
        return None
    packs, least = problem.cols // problem.pack, math.inf
    table = PEELED if problem.peel else RAGGED
    if not problem.peel:
        held = _held(problem)
        if held is not None:
            usual = _group(problem, held.thread_bytes)
            least = usual * math.ceil(packs / usual)
        if least == packs:
            table = FULL if _alike(problem) else {}
    best = None
    many = problem.rows >= MANY_ROWS * limits.sm_count
    for ragged in table.get(problem.kind, ()):
        if not ragged.above < problem.row_bytes <= ragged.row_bytes or ragged.many not in {None, many}:
            continue
        if problem.rows < ragged.least_rows * limits.sm_count:
            continue
        least_threads = math.ceil(packs / ragged.packs)
        group = math.ceil(least_threads / WARP) * WARP if ragged.warps else _power_of_two_from(least_threads)
        group = max(group, _least_group(problem))
        places = group * ragged.packs
        if group <= MAX_BLOCK and math.ceil(packs / group) == ragged.packs and places <= least:
            best, least = (ragged, group), places - 1
    return best


def _least_group(problem: Problem) -> int:
    """Return how many threads a row that begins anywhere takes at least.

    Those around the packs are one for each of the first threads; a thread's packs of parameters are whole accesses apart.
    """
    return max(_power_of_two_from(2 * problem.pack - 2), 8 // problem.pack) if problem.peel else 1


def _warp(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    ragged = _ragged(problem, limits)
    if ragged is not None and ragged[1] <= WARP:
        return _in_registers(problem, limits, occupancy, "warp", ragged[1], ragged[0])
    held = _held(problem)
    group = min(WARP, _group(problem, _warp_thread_bytes(problem)))
    held = held or HELD[problem.kind][0]
    return _in_registers(problem, limits, occupancy, "warp", group, held)


def _block(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    ragged = _ragged(problem, limits)
    if ragged is not None and ragged[1] > WARP:
        return _in_registers(problem, limits, occupancy, "block", ragged[1], ragged[0])
    held = _held(problem)
    if held is None:
        return None
    group = max(2 * WARP, _group(problem, _thread_bytes(problem, held)))
    while group <= MAX_BLOCK:
        plan = _in_registers(problem, limits, occupancy, "block", group, held)
        if plan is not None or not problem.fused:
            return plan
        group *= 2  # with what is loaded beside x, registers may be too few
    return None


def _thread_bytes(problem: Problem, held: Held | None) -> int:
    """Return how many bytes of a row a thread holds."""
    if held is None:
        return WARP_THREAD_BYTES
    if _is_narrow(problem):
        return max(held.thread_bytes, LEAST_NARROW_PACKS * problem.pack * problem.held_bytes)
    if not problem.fused:
        return held.thread_bytes
    # what is wider than x are parameters as a rule, which come from a cache
    beside = sum(size for size in (*problem.beside, *problem.ahead) if size <= problem.load_bytes)
    each = held.thread_bytes * problem.load_bytes // (problem.load_bytes + beside)
    most = MOST_ELEMENTS[problem.compute_bytes] * problem.load_bytes
    least = LEAST_THREAD_BYTES if held.thread_bytes > LEAST_THREAD_BYTES else 0
    return min(most, max(each, least))


def _warp_thread_bytes(problem: Problem) -> int:
    """The same, of rows that a warp can hold."""
    own = problem.fused or _is_narrow(problem)
    return _thread_bytes(problem, _held(problem)) if own else WARP_THREAD_BYTES


def _sent_ahead(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """Clusters that claim their rows, of which the next one is on its way: of all tilings the best by _worth."""
    if not _can_stage(problem, limits) or problem.compute_bytes == 8:  # noqa: PLR2004
        return None
    best, most = None, (0.0, 0)
    keeps = LENT if problem.peel else 2 if problem.columns else 0
    for hoist in dict.fromkeys((keeps, LENT if problem.peel else 0)):
        for parts in CLUSTER_SHARES:
            for packs in range(1, MOST_FUSED_ELEMENTS[bool(problem.columns)] // problem.pack + 1):
                plan = parts <= _most_parts(limits) and _of_sent_ahead(problem, limits, parts, packs, hoist)
                worth = _worth(problem, plan) if plan else 0.0
                if plan and (worth, plan.block) > most:
                    best, most = plan, (worth, plan.block)
        if best is not None:
            break
    return best and _with_grid(problem, best, _blocks(problem, best), limits, occupancy(best))


def _worth(problem: Problem, plan: Plan) -> float:
    """Return how good a tiling is: the bytes of rows in work on a multiprocessor, up to what keeps memory busy.

    Among those that have as much, few large blocks are better where a row's blocks meet once and do little, else more blocks:
    while some wait, others compute. At 114 points of 9 forms, 8001 to 262144 columns, with 5 to 20 tilings each, this one was
    0.012 of the copy rate below the best on average (H200).
    """
    share = CLUSTER_SHARES[plan.parts]
    written = problem.stored * (1 if problem.stored == 1 else problem.results)
    each = problem.load_bytes + sum((*problem.beside, *problem.ahead)) + written
    worth = min(plan.least_blocks * share / plan.parts * problem.cols * each, ENOUGH_IN_WORK_BYTES)
    if _has_scales(problem):
        return float(worth * plan.least_blocks**0.1 * plan.packs**0.05)
    little = bool(problem.columns) and problem.others <= SENT_OTHERS
    return float(worth * plan.least_blocks ** (-0.05 if little else 0.1))


def _has_scales(problem: Problem) -> bool:
    """Say whether rows have a scale of each, which is found with a second reduction, and stored beside their bytes."""
    return problem.stored == 1 and problem.results > 1


def _of_sent_ahead(problem: Problem, limits: Limits, parts: int, packs: int, hoist: int) -> Plan | None:
    """Return a plan of so many packs of a thread and blocks of a cluster, with as many of these on a multiprocessor as fit."""
    whole = problem.cols // problem.pack
    each = _lent_packs(problem, parts)[1] if problem.peel else math.ceil(whole / parts)
    block = math.ceil(each / packs / WARP) * WARP
    if not LEAST_SENT_BLOCK <= block <= SPREAD_OUT_BLOCK:
        return None
    plan = dataclasses.replace(
        PLAIN,
        variant="cluster",
        pack=problem.pack,
        peel=problem.peel,
        parts=parts,
        block=block,
        group=block,
        stages=1,
        hoist=hoist,
    )
    plan = _registers_plan(problem, plan)
    if plan.packs != packs or not _may_persist(problem, plan):
        return None
    registers = _registers_ahead(problem, limits, packs * problem.pack)
    shared_bytes = plan.shared_bytes + STATIC_SHARED_BYTES
    resident = active_blocks(limits, block, registers, shared_bytes)
    if (
        not resident
        or plan.shared_bytes > limits.shared_bytes_per_block
        or not _has_static_room(problem, plan)
    ):
        return None
    return dataclasses.replace(plan, least_blocks=resident)


def _has_static_room(problem: Problem, plan: Plan) -> bool:
    """Say whether what a cluster's blocks tell one another fits into STATIC_SHARED_BYTES: not both reductions' of many warps."""
    return not (_has_scales(problem) and plan.parts == MOST_PARTS and plan.block > SPREAD_BLOCK)


def _registers_ahead(problem: Problem, limits: Limits, elements: int) -> int:
    """Return how many registers keep a thread of so many elements, of rows that are sent ahead, from spilling."""
    registers = elements + SENT_REGISTERS + 2 * max(0, problem.others - SENT_OTHERS)
    registers += elements * sum(problem.ahead) // 4
    registers += max(0, 2 * (sum(size * problem.pack // 4 for size in problem.columns) - 8))
    if problem.bounded:
        registers += OF_ALONE * problem.peel + 2 * OF_ALONE * bool(problem.beside)
    if problem.columns and problem.held_bytes == 4:  # noqa: PLR2004
        registers += 8 * (elements > CROWDED_FLOATS)
        registers += 16 * (elements > CROWDED_ELEMENTS and (problem.peel > 0 or problem.others > SENT_OTHERS))
    return registers + (0 if int(limits.compute_capability) == HOPPER else CLUSTER_REGISTERS)


def _loaded_with(problem: Problem) -> int:
    """Return how many times x's bytes a thread loads, as a power of two."""
    return _power_of_two_to(1 + sum((*problem.beside, *problem.ahead)) // problem.load_bytes)


def _one_shot(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """The fewest blocks of a cluster whose registers hold a row and what is loaded with it; many where rows are few."""
    block = ONE_SHOT_BLOCK[problem.compute_bytes]
    most = MOST_ELEMENTS[problem.compute_bytes] // _loaded_with(problem)
    parts = min(8, _most_parts(limits)) if _has_few_rows(problem, limits) else 2
    while 1 < parts <= _most_parts(limits):
        plan = dataclasses.replace(
            PLAIN,
            variant="cluster",
            pack=problem.pack,
            peel=problem.peel,
            parts=parts,
            block=block,
            group=block,
        )
        plan = _registers_plan(problem, plan)
        elements = plan.packs * plan.pack
        if elements <= max(most, problem.pack):
            registers = CLUSTER_REGISTERS + _registers(problem, limits, elements, full=plan.full, hoist=False)
            plan = dataclasses.replace(
                plan, least_blocks=max(1, min(2, limits.registers_per_sm // (registers * block)))
            )
            if registers * block <= limits.registers_per_sm:
                return _with_grid(problem, plan, _blocks(problem, plan), limits, occupancy(plan))
        parts *= 2
    return None


def _best_cached(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """Only rows that were measured to be faster so, on devices that can be asked to keep them, with room for all at once."""
    table = CACHED.get(problem.kind)
    if table is None or int(limits.compute_capability) < AMPERE:
        return None
    in_warps = problem.row_bytes % (WARP * ACCESS_BYTES) == 0
    least = CACHED_LEAST_BYTES[problem.kind] if in_warps else 1 + RAGGED_ROW_BYTES[problem.kind]
    if not least <= problem.row_bytes <= table[-1].row_bytes:
        return None
    plan = _cached(problem, limits, occupancy)
    room = limits.shared_bytes_per_sm  # which is cut from the same memory
    return plan if plan is not None and plan.least_blocks * problem.row_bytes <= room else None


def _cached(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    table = CACHED.get(problem.kind, DOUBLES_CACHED)
    waiting = next((each for each in table if problem.row_bytes <= each.row_bytes), table[-1])
    packs = problem.cols // problem.pack
    turns = math.ceil(packs / waiting.packs / waiting.block)
    block = math.ceil(packs / waiting.packs / turns / WARP) * WARP
    threads = min(waiting.resident_threads, limits.threads_per_sm)
    if _has_wide_columns(problem) or int(limits.compute_capability) != HOPPER:
        threads = min(threads, ROOMY_THREADS)
    plan = dataclasses.replace(
        PLAIN,
        variant="cached",
        pack=problem.pack,
        packs=waiting.packs,
        block=block,
        least_blocks=max(1, min(threads // block, limits.blocks_per_sm)),
    )
    return _cached_plan(problem, limits, occupancy, plan)


def _cached_plan(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    in_packs = plan.pack * problem.load_bytes == ACCESS_BYTES and not problem.peel
    if problem.fused or not in_packs or plan.packs > MOST_CACHED_PACKS or problem.cols > MOST_CACHED_COLS:
        return None
    waves = plan.waves or ONE_BLOCK_PER_ROW
    return _with_grid(problem, plan, problem.rows, limits, occupancy(plan), waves)


def _cluster(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """Blocks of a cluster share a row, however short it is."""
    if problem.fused:
        ahead = None if _has_few_rows(problem, limits) else _sent_ahead(problem, limits, occupancy)
        return ahead or _one_shot(_narrowed(problem), limits, occupancy)
    plan = _few_rows(problem, limits, occupancy) if _has_few_rows(problem, limits) else None
    return plan or _shared_out(problem, limits, occupancy, 2)


def _shared_out(problem: Problem, limits: Limits, occupancy: Occupancy, least: int = 1) -> Plan | None:
    """Return the plan of the first entry of CLUSTERS that can hold a row, by `least` blocks or more."""
    for shared in CLUSTERS.get(problem.kind, DOUBLES_SHARED):
        if problem.row_bytes > shared.row_bytes:
            continue
        if isinstance(shared, Kept):
            plan = kept_by_cluster(problem, limits, occupancy, shared, least)
        else:
            plan = _held_by_cluster(problem, limits, occupancy, shared, least)
        if plan is not None:
            return plan
    return None


def _most_parts(limits: Limits) -> int:
    """Return how many blocks a cluster may have."""
    if int(limits.compute_capability) < HOPPER:
        return 1
    return MOST_PARTS if limits.compute_capability in LARGE_CLUSTERS else MOST_PARTS // 2


def _few_rows(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """As many multiprocessors as can be work on a row, in registers, and each row goes through a cluster of its own."""
    most = _most_parts(limits)
    if most == 1 or problem.compute_bytes == 8:  # noqa: PLR2004
        return None
    share = math.ceil(problem.cols / most)
    # without parameters, and with 16 elements for each of 256 threads, more blocks work side by side: softmax of 32 x 65536 0.75
    # to 0.84, of floats 0.80 to 0.90
    sixteen = FEWEST_BLOCK * FEW_ELEMENTS < share <= FEW_BLOCK * FEW_ELEMENTS
    roomy = sixteen and not problem.columns and not problem.peel
    crowded = problem.rows * most > (4 if roomy else 2) * limits.sm_count
    if problem.peel:
        few = 2 if len(problem.columns) > 1 else min(most, 8)  # since parameters are read again for each row
        plan = _few_cluster(problem, limits, few if crowded else most)
    else:
        plan = None if crowded else _few_cluster(problem, limits, most)
        blocks = plan.least_blocks * limits.sm_count if plan else 0
        if plan is None or blocks * (6 if roomy else 5) // 6 // plan.parts < problem.rows:
            plan = _crowded_cluster(problem, limits) or plan
    return plan and _with_grid(problem, plan, _blocks(problem, plan), limits, occupancy(plan))


def _few_cluster(problem: Problem, limits: Limits, parts: int) -> Plan | None:
    """Few bytes a thread: 16 elements of 128 threads, or 256 threads or more."""
    share = math.ceil(problem.cols // problem.pack / parts)
    packs = MOST_ELEMENTS[problem.compute_bytes] // problem.pack
    block = max(FEW_BLOCK, _power_of_two_from(math.ceil(share / packs)))
    # several blocks on a multiprocessor share its issue slots: RMSNorm of 16 x 65536 0.83 to 0.89, in float 0.81 to 0.845
    pays = len(problem.columns) == 1 or (problem.columns and problem.held_bytes == 2)  # noqa: PLR2004
    several = pays and problem.rows * parts > limits.sm_count
    few = math.ceil(share / FEWEST_BLOCK) * problem.pack <= (2 if several else 1) * FEW_ELEMENTS
    if few and not problem.peel:
        block = FEWEST_BLOCK
    # fetched with the row, parameters cost nobody a place: LayerNorm in float of 1 x 131072 0.53 to 0.61 by twice the threads
    elif not _fetches(problem, share, block) and _fetches(problem, share, 2 * block):
        block *= 2
    most = MAX_BLOCK // 2  # for all threads of a block 64 registers are too few
    fits = block <= most or (share <= most * CROWDED_PACKS and not problem.peel)
    return _of_few(problem, limits, parts, min(block, most)) if fits else None


def _crowded_cluster(problem: Problem, limits: Limits) -> Plan | None:
    """More bytes a thread, so that rows are in work together: softmax of 64 x 65536 0.81 to 0.84, of floats 0.95 to 0.99."""
    packs, most = problem.cols // problem.pack, _most_parts(limits)
    parts = min(most, max(2, _power_of_two_from(math.ceil(packs / (FEWEST_BLOCK * CROWDED_PACKS)))))
    at_once = CROWDED_BLOCKS * limits.sm_count
    while (
        2 * parts <= most
        and 2 * parts * problem.rows <= at_once
        and packs >= parts * FEWEST_BLOCK * CROWDED_PACKS
    ):
        parts *= 2
    block = max(FEWEST_BLOCK, _power_of_two_from(math.ceil(packs / parts / CROWDED_PACKS)))
    return _of_few(problem, limits, parts, block, crowded=True) if block <= MAX_BLOCK // 2 else None


def _fetches(problem: Problem, share: int, block: int) -> bool:
    """Say whether a thread has registers for the parameters of its share of a row."""
    words = _words(problem, math.ceil(share / block) * problem.pack, hoist=True)
    return bool(problem.columns) and words <= MOST_FEW_WORDS and block <= MAX_BLOCK // 2 and not problem.peel


def _of_few(problem: Problem, limits: Limits, parts: int, block: int, *, crowded: bool = False) -> Plan:
    """Return the plan of clusters of so many blocks, as many of them on a multiprocessor as have registers."""
    plan = dataclasses.replace(
        PLAIN, variant="cluster", pack=problem.pack, peel=problem.peel, parts=parts, block=block, group=block
    )
    plan = _registers_plan(problem, plan)
    elements = plan.packs * plan.pack
    if problem.peel:
        return dataclasses.replace(plan, hoist=int(_can_hoist(problem, elements)))

    def resident(*, hoist: bool) -> int:
        needed = FEW_OTHER_REGISTERS + _words(problem, elements, hoist=hoist)
        needed += 0 if plan.full else RAGGED_REGISTERS[problem.compute_bytes]
        needed += 0 if int(limits.compute_capability) == HOPPER else CLUSTER_REGISTERS
        return min(limits.registers_per_sm // (needed * block), limits.threads_per_sm // block, KEPT_BLOCKS)

    # not if too few threads are left: RMSNorm in float of 64 x 131072 0.76 against 0.845
    hoist = _fetches(problem, math.ceil(problem.cols // problem.pack / parts), block)
    hoist = hoist and (not crowded or resident(hoist=True) * block > FEW_THREADS)
    return dataclasses.replace(plan, hoist=int(hoist), least_blocks=max(1, resident(hoist=hoist)))


def _held_by_cluster(
    problem: Problem, limits: Limits, occupancy: Occupancy, spread: Spread, least: int
) -> Plan | None:
    if not least <= spread.parts <= _most_parts(limits) or problem.row_bytes <= spread.above:
        return None
    if spread.peels not in {None, problem.peel > 0}:
        return None
    if not _can_stage(problem, limits) if spread.stages else _has_wide_columns(problem):
        return None
    plan = spread_out(problem, limits, spread)
    plan = plan and _with_grid(problem, plan, _blocks(problem, plan), limits, occupancy(plan))
    if plan is None or plan.claims or plan.waves > LEAST_WAVES or plan.grid == _blocks(problem, plan):
        return plan
    return None  # rows that begin alike leave too many blocks without any


def spread_out(problem: Problem, limits: Limits, spread: Spread) -> Plan | None:
    """Return the plan that leaves the fewest places of threads empty; of as many, that of the fewest threads."""
    share = math.ceil(problem.cols // problem.pack / spread.parts)
    best, fewest = None, math.inf
    least = spread.packs - spread.fewer
    # one less than `fewer` says, if of a thread's packs more than the last would be missing else
    for packs in range(spread.packs, max(0, least - 1 - bool(spread.peels)), -1):
        if packs < least and best is not None:
            break
        warps = math.ceil(share / packs / WARP)
        block = max(2, warps) * WARP
        plan = dataclasses.replace(
            PLAIN,
            variant="cluster" if spread.parts > 1 else "block",
            pack=problem.pack,
            peel=problem.peel,
            parts=spread.parts,
            block=block,
            group=block,
            stages=spread.stages,
            hoist=(LENT if problem.peel and spread.parts > 1 else 2)
            if problem.columns and spread.stages
            else 0,
        )
        plan = _registers_plan(problem, plan)
        resident = _resident(problem, limits, plan) if not spread.stages or _may_persist(problem, plan) else 0
        if resident and plan.packs <= spread.packs and plan.packs * block < fewest:
            best, fewest = dataclasses.replace(plan, least_blocks=resident), plan.packs * block
    return best


def _resident(problem: Problem, limits: Limits, plan: Plan) -> int:
    """Return how many blocks of a cluster in registers a multiprocessor holds; 0 if a thread would have too few of them."""
    values = plan.packs * plan.pack * problem.compute_bytes // 4
    measured = int(limits.compute_capability) == HOPPER
    few = measured and problem.held_bytes == 2 and (len(problem.columns) > 1 or plan.hoist == LENT)  # noqa: PLR2004
    needed = values + (SPREAD_LEAST_REGISTERS if few else SPREAD_OUT_REGISTERS)
    needed += 32 * (not _alike(problem))
    needed += 8 * (plan.claims and values > MANY_SPREAD_OUT)
    if plan.hoist != LENT or not measured:
        needed += 8 * (problem.peel > 0) + 4 * (values <= FEW_SPREAD_OUT and not few)
    if not measured or problem.compute_bytes == 8:  # noqa: PLR2004
        needed += CLUSTER_REGISTERS + 8 * (problem.compute_bytes == 8)  # noqa: PLR2004
    if plan.block > SPREAD_OUT_BLOCK or plan.shared_bytes > limits.shared_bytes_per_block:
        return 0
    return active_blocks(limits, plan.block, needed, plan.shared_bytes + STATIC_SHARED_BYTES)


def kept_by_cluster(
    problem: Problem, limits: Limits, occupancy: Occupancy, kept: Kept, least: int
) -> Plan | None:
    """Return the plan of `least` blocks at least whose shares of a row fill a multiprocessor's shared memory."""
    if not (kept.aligned or problem.peel) or _most_parts(limits) == 1 or problem.peel == 2:  # noqa: PLR2004
        return None
    parts = max(least, _power_of_two_from(math.ceil(problem.row_bytes / kept.share_bytes)))
    if parts > _most_parts(limits):
        return None
    beside = limits.reserved_shared_bytes + STATIC_SHARED_BYTES
    resident = min(limits.shared_bytes_per_sm // (_part_bytes(problem, parts) + beside), KEPT_BLOCKS)
    if not resident:
        return None
    # as many as there is room for: one kernel for many widths
    kept_bytes = min(limits.shared_bytes_per_sm // resident - beside, limits.shared_bytes_per_block)
    kept_bytes = kept_bytes // ACCESS_BYTES * ACCESS_BYTES
    elsewhere, meets = int(limits.compute_capability) != HOPPER, parts > 1 and problem.columns
    threads = min(kept.threads, limits.threads_per_sm)
    if elsewhere or meets:
        few = meets and (elsewhere or _has_wide_columns(problem))
        threads = min(threads, FEW_THREADS if few else ROOMY_THREADS)
    block = _held_around(problem, parts, max(2, threads // resident // WARP) * WARP)
    if elsewhere:
        resident = max(1, resident - 1)
    plan = _staged(
        problem, "cluster" if parts > 1 else "shared", min(block, KEPT_BLOCK), kept_bytes, packs=kept.packs
    )
    return _staged_plan(
        problem, limits, occupancy, dataclasses.replace(plan, parts=parts, least_blocks=resident)
    )


def _staged(problem: Problem, variant: str, block: int, kept_bytes: int, *, packs: int = 0) -> Plan:
    most = max(1, min(4, CHUNK_ELEMENTS[problem.held_bytes] // problem.pack))
    return dataclasses.replace(
        PLAIN,
        variant=variant,
        pack=problem.pack,
        packs=min(packs, most) if packs else most,
        peel=problem.peel,
        block=block,
        kept_bytes=kept_bytes,
    )


def _staged_plan(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    plan = dataclasses.replace(plan, shared_bytes=min(plan.kept_bytes, _part_bytes(problem, plan.parts)))
    waves = plan.waves or ONE_BLOCK_PER_ROW
    return _with_grid(problem, plan, problem.rows * plan.parts, limits, occupancy(plan), waves)


def _shared(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    shared_bytes = shared_bytes_of(problem)
    kept_bytes = limits.shared_bytes_per_block
    if shared_bytes > kept_bytes or problem.peel == 2 or problem.fused:  # noqa: PLR2004
        return None
    # as many threads as fill the multiprocessor beside the rows that its shared memory holds
    at_once = max(1, limits.shared_bytes_per_sm // (shared_bytes + limits.reserved_shared_bytes))
    block = _power_of_two_to(min(SHARED_THREADS, limits.threads_per_sm) // at_once)
    if problem.rows <= limits.sm_count:
        block = MAX_BLOCK
    most = WHOLE_BLOCK[problem.compute_bytes] // (2 if problem.columns and problem.compute_bytes == 4 else 1)  # noqa: PLR2004
    block = _held_around(problem, 1, min(max(block, 128), most))
    return _staged_plan(problem, limits, occupancy, _staged(problem, "shared", block, kept_bytes))


def _uncached(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    block = FUSED_BLOCK if problem.fused else WHOLE_BLOCK[problem.compute_bytes]
    plan = _staged(problem, "uncached", _held_around(problem, 1, block), 0)
    if problem.fused:
        registers = _registers(problem, limits, plan.packs * plan.pack, full=False, hoist=False)
        plan = dataclasses.replace(plan, least_blocks=max(1, limits.registers_per_sm // (registers * block)))
    return _staged_plan(problem, limits, occupancy, plan)


def _split(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """As many blocks as the device holds at once share the rows; all of them run, for they wait for one another."""
    if problem.fused:
        return None
    return (
        _spread(problem, limits, occupancy)
        or _together(problem, limits, occupancy)
        or _kept_by_grid(problem, limits, occupancy)
    )


def _has_wide_columns(problem: Problem) -> bool:
    """Say whether a parameter's element takes more registers than one of x."""
    return any(size > problem.load_bytes for size in problem.columns)


def _in_whole_packs(problem: Problem) -> bool:
    """Say whether rows begin at packs of 16 bytes, of numbers that take no more registers than floats."""
    whole = problem.pack * problem.load_bytes == ACCESS_BYTES
    return whole and not problem.peel and problem.compute_bytes == 4  # noqa: PLR2004


def _spread(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """The only row, in the registers of blocks of the whole grid."""
    least, most = SPREAD_ROW_BYTES
    if problem.rows > 1 or not least <= problem.row_bytes <= most:
        return None
    parts = limits.sm_count
    if problem.cols // problem.pack <= parts * SPREAD_BLOCK:  # a pack a thread: few blocks meet sooner
        parts //= 2
    elements = math.ceil(problem.cols // problem.pack / parts / SPREAD_BLOCK) * problem.pack
    # the next kernel's blocks find room beside these, and are there when they end: LayerNorm in 16 bits 0.58 to 0.615
    beside = _can_hoist(problem, elements) and int(limits.compute_capability) == HOPPER
    plan = dataclasses.replace(
        PLAIN,
        variant="split",
        pack=problem.pack,
        parts=parts,
        block=SPREAD_BLOCK,
        group=SPREAD_BLOCK,
        least_blocks=2 if beside else 1,
    )
    return _spread_plan(problem, limits, occupancy, plan)


def _spread_plan(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    packs = math.ceil(problem.cols // problem.pack / plan.parts / plan.block)
    elements = packs * problem.pack
    if not _in_whole_packs(problem) or elements > MOST_ELEMENTS[problem.compute_bytes]:
        return None
    if plan.block > SPREAD_BLOCK and packs > MANY_PACKS:
        return None
    words = _words(problem, elements, hoist=True)
    hoist = bool(problem.columns) and (SPREAD_REGISTERS + words) * plan.block <= limits.registers_per_sm
    plan = dataclasses.replace(plan, packs=packs, hoist=int(hoist))
    return _all_at_once(problem, limits, occupancy, plan, problem.rows * plan.parts)


def _fits(problem: Problem, limits: Limits) -> bool:
    """Say whether the shared memory of all multiprocessors holds a row."""
    return problem.row_bytes <= limits.sm_count * limits.shared_bytes_per_sm


def _together(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """Rows side by side, read twice: gamma and beta, once for all of them, where the chip cannot hold a row."""
    if not problem.columns or problem.rows < TOGETHER_LEAST_ROWS or _fits(problem, limits):
        return None
    plan = dataclasses.replace(
        PLAIN,
        variant="split",
        pack=problem.pack,
        packs=TOGETHER_PACKS,
        rows_per_group=TOGETHER_ROWS,
        parts=limits.sm_count,
        block=TOGETHER_BLOCK,
    )
    return _together_plan(problem, limits, occupancy, plan)


def _together_plan(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    if not _in_whole_packs(problem):
        return None
    return _all_at_once(problem, limits, occupancy, plan, plan.parts)


def _all_at_once(
    problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan, grid: int
) -> Plan | None:
    """Return a plan whose blocks all run at once, for they wait for one another, with room for letters among their results."""
    room = (problem.cols // plan.parts) * min(problem.load_bytes, 2) - LINE_BYTES
    resident = occupancy(plan)
    if room < plan.parts * LETTERS_BYTES + ACCESS_BYTES or grid > limits.sm_count * resident:
        return None
    return dataclasses.replace(
        plan, grid=grid, resident_blocks=resident, waves=grid / (limits.sm_count * resident)
    )


def _kept_by_grid(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    """Parts of rows in shared memory, as far as they fit."""
    plain = _in_whole_packs(problem) and _alike(problem) and int(limits.compute_capability) == HOPPER
    much = problem.rows > 1 and problem.rows * problem.row_bytes >= WHOLE_BLOCK_BYTES
    whole = plain and much and (problem.held_bytes == 4 or len(problem.columns) == 1)  # noqa: PLR2004
    resident = SPLIT_BLOCKS if int(limits.compute_capability) >= AMPERE and not whole else 1
    crowded = (
        problem.peel
        or _has_wide_columns(problem)
        or (problem.columns and int(limits.compute_capability) != HOPPER)
    )
    block = min(
        WHOLE_BLOCK[problem.compute_bytes] // (4 if crowded else 1 if whole else 2),
        limits.threads_per_sm // resident,
    )
    room = limits.shared_bytes_per_sm // resident - limits.reserved_shared_bytes - STATIC_SHARED_BYTES
    kept_bytes = min(room, limits.shared_bytes_per_block) // ACCESS_BYTES * ACCESS_BYTES
    if problem.peel == 2:  # noqa: PLR2004
        kept_bytes = 0
    one = problem.peel or (problem.held_bytes > 2 and problem.columns)  # noqa: PLR2004  with more it would spill
    packs = 1 if one and not plain else 2
    plan = _staged(problem, "split", block, kept_bytes, packs=packs)
    plan = dataclasses.replace(plan, least_blocks=resident)
    # where a block's part is short, few threads do
    each = problem.cols // problem.pack // _parts_of_split(problem, limits, plan)
    return _split_plan(
        problem,
        limits,
        occupancy,
        dataclasses.replace(plan, block=max(4 * WARP, min(block, _power_of_two_from(each // 4)))),
    )


def _rows_of_split(problem: Problem, limits: Limits, plan: Plan) -> int:
    """Return how many rows are in work at once."""
    blocks = limits.sm_count * plan.least_blocks
    least = (
        math.ceil(shared_bytes_of(problem) / (SPLIT_OVERFLOW * plan.kept_bytes))
        if plan.kept_bytes
        else blocks
    )
    rows = min(problem.rows, max(1, blocks // least))
    long = problem.rows >= LONG_ROWS and not _fits(problem, limits)
    if problem.columns and long and _in_whole_packs(problem):
        rows = LONG_ROWS
    return math.ceil(problem.rows / math.ceil(problem.rows / rows))  # all rounds alike


def _parts_of_split(problem: Problem, limits: Limits, plan: Plan) -> int:
    """Return how many blocks share a row: all, or, where a row is short, one on each multiprocessor."""
    rows = _rows_of_split(problem, limits, plan)
    parts = max(1, limits.sm_count * plan.least_blocks // rows)
    if 2 * _part_bytes(problem, parts) <= plan.kept_bytes:
        parts = max(1, min(parts, limits.sm_count // rows))
    return parts


def _split_plan(problem: Problem, limits: Limits, occupancy: Occupancy, plan: Plan) -> Plan | None:
    # a block has a pack for each thread, and room for every block's letters among its results, of 2 bytes an element at least
    letters_bytes = 8 * problem.compute_bytes
    most = min(problem.cols // problem.pack // plan.block, math.isqrt(2 * problem.cols // letters_bytes) - 1)
    if most < 1:
        return None
    at_once, parts = _rows_of_split(problem, limits, plan), min(most, _parts_of_split(problem, limits, plan))
    # in place they lie where x was, which must not be read again
    if problem.peel < 2 and plan.kept_bytes < parts * letters_bytes + 16:  # noqa: PLR2004
        return None
    plan = dataclasses.replace(
        plan, parts=parts, shared_bytes=min(plan.kept_bytes, _part_bytes(problem, parts))
    )
    resident = occupancy(plan)
    if resident < plan.least_blocks:  # all must run at once
        return None
    grid = at_once * parts
    return dataclasses.replace(
        plan, grid=grid, resident_blocks=resident, waves=grid / (limits.sm_count * resident)
    )


def _with_grid(
    problem: Problem,
    plan: Plan,
    blocks: int,
    limits: Limits,
    resident: int,
    waves: float = ONE_BLOCK_PER_ROW,
) -> Plan | None:
    if resident == 0 or (plan.claims and problem.rows > MOST_CLAIMED):
        return None
    at_once = resident * plan.parts if plan.cluster > 1 else limits.sm_count * resident
    waves = min(1.0, waves) if plan.persistent else waves
    grid = int(max(1, min(blocks, at_once * waves, MAX_GRID)))
    unit = plan.parts
    # a group's next rows begin as its first
    if plan.persistent and plan.peel and not plan.claims and grid < blocks:
        rows = 1 if plan.parts > 1 else plan.block // plan.group
        unit *= problem.period // math.gcd(problem.period, rows)
    grid = grid // unit * unit
    return (
        dataclasses.replace(plan, grid=grid, resident_blocks=resident, waves=grid / at_once) if grid else None
    )


_CANDIDATE: dict[str, Candidate] = {
    "warp": _warp,
    "block": _block,
    "cached": _cached,
    "cluster": _cluster,
    "split": _split,
    "shared": _shared,
    "uncached": _uncached,
}
