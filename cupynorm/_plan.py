"""Problem -> Plan: which variant runs, with which template arguments and launch. Integers only: no array, no device.

The rule is that of OneFlow's articles on LayerNorm and softmax: a row waits in registers while it fits there, else in shared
memory unless the occupancy query says that no block fits, else nowhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cupynorm._limits import Limits

VARIANTS = ("warp", "block", "shared", "uncached")

WARP = 32
# Of shared and uncached: blocks of a grid, in multiples of what the device holds at once.
WAVES = 32
# Of warp and block: no loop over rows. A loop measured 2 to 5 % slower on an H200.
ONE_BLOCK_PER_ROW = math.inf
MAX_GRID = 2**31 - 1
MAX_BLOCK = 1024
# The most threads of shared and uncached, by bytes of the compute type.
WHOLE_BLOCK = {4: 1024, 8: 256}
# That a thread of warp and block holds, by bytes of the compute type: no spill up to there.
MOST_ELEMENTS = {4: 32, 8: 16}
# What a thread wants beside its values, by (bytes of the compute type, hoist) ...
OTHER_REGISTERS = {(4, False): 32, (4, True): 24, (8, False): 48, (8, True): 48}
# ... and more, where its last pack may be missing and parameters are hoisted.
RAGGED_REGISTERS = {4: 16, 8: 24}
MANY_PACKS = 4  # of a thread
AMPERE = 80  # before it the compiler wants 16 registers more
# That the values and parameters of a thread take: with more, too few threads keep memory busy.
MOST_HOISTED_WORDS = 32
ACCESS_BYTES = 16  # the widest
# That a thread of shared and uncached reads at a time, by bytes of an element.
CHUNK_ELEMENTS = {2: 16, 4: 16, 8: 2}


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
# Where parameters must pass through too, 16 bits of each: 0.98 against 0.94 at 2048 columns
HELD_WITH_COLUMNS = (
    Held(row_bytes=2 << 10, thread_bytes=32, resident_threads=1280),
    Held(row_bytes=64 << 10, thread_bytes=64, resident_threads=1024),
)
# Up to there hoisting measured better, by bytes of an element.
HOISTED_ROW_BYTES = {2: 2 << 10, 4: 16 << 10, 8: 16 << 10}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be launched.

    rows x cols elements; `pack` neighbouring elements can be moved at once (columns, strides and every pointer's alignment
    allow it); shared memory would hold `load_bytes` an element; arithmetic is in `compute_bytes`. `columns`: bytes of
    an element of each of the columns' parameters, such as gamma.
    """

    rows: int
    cols: int
    pack: int
    load_bytes: int
    compute_bytes: int
    columns: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        """Bytes of an element for the tables below: as loaded, or a double's if that is what it becomes."""
        return max(self.load_bytes, self.compute_bytes if self.compute_bytes == 8 else 0)  # noqa: PLR2004


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be launched.

    variant: where a row waits: "warp", "block", "shared" or "uncached". pack: elements moved by one instruction.
    packs: packs that a thread holds (of one row; a chunk in shared and uncached). group: threads that share a row; 0 is
    the whole block. rows_per_group: rows that a group holds at once. full: group x packs x pack is exactly the number of
    columns. hoist: the columns' parameters wait in registers too. stages: 0, or how many rows (of a group) are on their
    way through shared memory or in work. grid, block: blocks, and threads a block. shared_bytes: dynamic shared memory of
    a block. least_blocks: registers are kept few enough for so many blocks on a multiprocessor. resident_blocks: blocks
    that a multiprocessor holds at once. waves: grid / (multiprocessors x resident_blocks).
    """

    variant: str
    pack: int
    packs: int
    group: int
    rows_per_group: int
    full: bool
    hoist: bool
    stages: int
    grid: int
    block: int
    shared_bytes: int
    least_blocks: int
    resident_blocks: int
    waves: float

    @property
    def kernel(self) -> str:
        """The kernel of kernels/cupynorm/row.cuh that holds a row so."""
        return "row_registers" if self.group else f"row_{self.variant}"

    @property
    def template(self) -> tuple[int | bool, ...]:
        """The numbers among the kernel's template arguments, in order."""
        if not self.group:
            return (self.pack, self.packs)
        held = (self.pack, self.packs, self.group, self.rows_per_group, self.full, self.hoist)
        return (*held, self.block, self.least_blocks, self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dataclasses.asdict(self)


# (plan without grid) -> blocks that a multiprocessor holds at once; 0: it cannot be launched.
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
    for variant in _in_turn(problem) if wanted is None else (wanted,):
        plan = _CANDIDATE[variant](problem, limits, occupancy)
        if plan is not None:
            return plan
    raise DoesNotFitError(_does_not_fit(problem, limits, f"variant {wanted!r}"))


def _in_turn(problem: Problem) -> tuple[str, ...]:
    """Return the variants to try. A warp holds more than what is best for it: from there on a block is better."""
    narrow = _group(problem, HELD[0].thread_bytes) <= WARP
    return VARIANTS if narrow else tuple(variant for variant in VARIANTS if variant != "warp")


def _does_not_fit(problem: Problem, limits: Limits, what: str) -> str:
    return (
        f"{what} cannot hold a row of {problem.cols} columns, {problem.load_bytes} bytes each, "
        f"in packs of {problem.pack}, on {limits.name}"
    )


def _as_wanted(problem: Problem, limits: Limits, occupancy: Occupancy, wanted: Plan) -> Plan:
    packs = problem.cols // wanted.pack
    fits = wanted.variant in VARIANTS and problem.pack % wanted.pack == 0 and wanted.block % WARP == 0
    if wanted.group:
        fits = fits and wanted.block % wanted.group == 0 and wanted.packs == math.ceil(packs / wanted.group)
        staged_bytes = wanted.stages * wanted.rows_per_group * wanted.packs * wanted.block * ACCESS_BYTES
        fits = (
            fits
            and (not wanted.stages or wanted.pack * problem.load_bytes == ACCESS_BYTES)
            and staged_bytes <= limits.shared_bytes_per_block
        )
        plan = dataclasses.replace(
            wanted, full=wanted.group * wanted.packs == packs, shared_bytes=staged_bytes
        )
        blocks = math.ceil(problem.rows / (plan.block // plan.group * plan.rows_per_group))
    else:
        shared_bytes = shared_bytes_of(problem) if wanted.variant == "shared" else 0
        fits = fits and shared_bytes <= limits.shared_bytes_per_block
        plan = dataclasses.replace(wanted, shared_bytes=shared_bytes)
        blocks = problem.rows
    chosen = _with_grid(plan, blocks, limits, occupancy(plan), wanted.waves or WAVES) if fits else None
    if chosen is None:
        raise DoesNotFitError(_does_not_fit(problem, limits, f"{wanted}"))
    return chosen


def shared_bytes_of(problem: Problem) -> int:
    """Return the shared memory that a row takes, in whole 16-byte accesses."""
    return -(-problem.cols * problem.load_bytes // 16) * 16


def _power_of_two_from(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _held(problem: Problem) -> Held | None:
    row_bytes = problem.cols * problem.held_bytes
    table = HELD_WITH_COLUMNS if problem.columns and problem.held_bytes == 2 else HELD  # noqa: PLR2004
    return next((held for held in table if row_bytes <= held.row_bytes), None)


def _in_registers(
    problem: Problem, limits: Limits, occupancy: Occupancy, variant: str, group: int, resident_threads: int
) -> Plan | None:
    packs = math.ceil(problem.cols // problem.pack / group)
    elements = packs * problem.pack
    if elements > MOST_ELEMENTS[problem.compute_bytes]:
        return None
    block = max(128 if elements * problem.held_bytes <= HELD[0].thread_bytes else 256, group)
    full = group * elements == problem.cols
    row_bytes = problem.cols * problem.held_bytes
    hoist = bool(problem.columns) and row_bytes <= HOISTED_ROW_BYTES[problem.held_bytes]
    hoist = hoist and _words(problem, elements, hoist=True) <= MOST_HOISTED_WORDS
    registers = _registers(problem, limits, elements, full=full, hoist=hoist)
    if registers * block > limits.registers_per_sm:
        return None
    threads = min(resident_threads, limits.threads_per_sm, limits.registers_per_sm // registers)
    plan = Plan(
        variant=variant,
        pack=problem.pack,
        packs=packs,
        group=group,
        rows_per_group=1,
        full=full,
        hoist=hoist,
        stages=0,
        grid=0,
        block=block,
        shared_bytes=0,
        least_blocks=max(1, threads // block),
        resident_blocks=0,
        waves=0.0,
    )
    blocks = math.ceil(problem.rows / (block // group))
    return _with_grid(plan, blocks, limits, occupancy(plan), ONE_BLOCK_PER_ROW)


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
    others = OTHER_REGISTERS[problem.compute_bytes, hoist]
    if not full:
        others += RAGGED_REGISTERS[problem.compute_bytes] if hoist else max(8, values // 2 - 8)
    if not hoist:  # the parameters pass through registers, a pack at a time
        others += max(0, 2 * (sum(size * problem.pack // 4 for size in problem.columns) - 8))
    if elements // problem.pack > MANY_PACKS and not hoist:  # and as many addresses
        others += 24
    if int(limits.compute_capability) < AMPERE:
        others += 16
    return -(-(values + others) // 8) * 8


def _group(problem: Problem, thread_bytes: int) -> int:
    """Return how many threads share a row, so that each holds about thread_bytes of it."""
    packs = problem.cols // problem.pack
    packs_per_thread = max(1, thread_bytes // (problem.pack * problem.held_bytes))
    group = _power_of_two_from(math.ceil(packs / packs_per_thread))
    half = group // 2
    fits = half > 0 and math.ceil(packs / half) * problem.pack <= MOST_ELEMENTS[problem.compute_bytes]
    if packs % group == 0 or not fits or packs_per_thread > MANY_PACKS:
        return group
    # ragged rows: half the threads if those hold the row without a gap (768 columns: 0.95 against 0.67), or if, in 16 bits
    # with parameters, merging unequal parts is what costs most (1000 columns: 0.90 against 0.75)
    return half if packs % half == 0 or (problem.columns and problem.held_bytes == 2) else group  # noqa: PLR2004


def _warp(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    group = min(WARP, _group(problem, HELD[0].thread_bytes))
    return _in_registers(problem, limits, occupancy, "warp", group, HELD[0].resident_threads)


def _block(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    held = _held(problem)
    if held is None:
        return None
    group = max(2 * WARP, _group(problem, held.thread_bytes))
    return (
        _in_registers(problem, limits, occupancy, "block", group, held.resident_threads)
        if group <= MAX_BLOCK
        else None
    )


def _whole_block(problem: Problem, variant: str, block: int, shared_bytes: int) -> Plan:
    chunk = CHUNK_ELEMENTS[problem.held_bytes]
    return Plan(
        variant=variant,
        pack=problem.pack,
        packs=max(1, min(4, chunk // problem.pack)),
        group=0,
        rows_per_group=1,
        full=False,
        hoist=False,
        stages=0,
        grid=0,
        block=block,
        shared_bytes=shared_bytes,
        least_blocks=1,
        resident_blocks=0,
        waves=0.0,
    )


def _shared(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    shared_bytes = shared_bytes_of(problem)
    if shared_bytes > limits.shared_bytes_per_block:
        return None
    plan = _largest_block(problem, limits, occupancy, "shared", shared_bytes)
    return plan and _with_grid(plan, problem.rows, limits, plan.resident_blocks)


def _uncached(problem: Problem, limits: Limits, occupancy: Occupancy) -> Plan | None:
    plan = _largest_block(problem, limits, occupancy, "uncached", 0)
    return plan and _with_grid(plan, problem.rows, limits, plan.resident_blocks)


def _largest_block(
    problem: Problem, limits: Limits, occupancy: Occupancy, variant: str, shared_bytes: int
) -> Plan | None:
    """Of 128, 256, 512 and 1024 threads: most active blocks, then the largest. With rows <= SMs, the largest that fits."""
    best = None
    most = 0
    for block in (1024, 512, 256, 128):
        if block > WHOLE_BLOCK[problem.compute_bytes]:
            continue
        plan = _whole_block(problem, variant, block, shared_bytes)
        resident = occupancy(plan)
        # uncached: its rows wait nowhere, so threads are what keeps memory busy, not blocks
        weight = resident * block if variant == "uncached" else resident
        if weight > most:
            best, most = dataclasses.replace(plan, resident_blocks=resident), weight
            if problem.rows <= limits.sm_count:
                break
    return best


def _with_grid(plan: Plan, blocks: int, limits: Limits, resident: int, waves: float = WAVES) -> Plan | None:
    if resident == 0:
        return None
    at_once = limits.sm_count * resident
    grid = int(max(1, min(blocks, at_once * waves, MAX_GRID)))
    return dataclasses.replace(plan, grid=grid, resident_blocks=resident, waves=grid / at_once)


_CANDIDATE: dict[str, Callable[[Problem, Limits, Occupancy], Plan | None]] = {
    "warp": _warp,
    "block": _block,
    "shared": _shared,
    "uncached": _uncached,
}
