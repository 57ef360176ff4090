"""Time what no kernel of a gradient or a loss can beat: kernels that move the same rows, and compute nothing.

    python benchmarks/limits_of_gradients.py --json limits.json [--ops softmax_backward] [--cols 128] [--dtypes float16]

Beside a copy of the same bytes and our own call, in one run. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import limits

from cupynorm._dtypes import dtype_of
from cupynorm.catalog import forms
from cupynorm.lower.row_groups import row_groups
from cupynorm.runtime import devices
from cupynorm.tools import bench, buffers
from cupynorm.tools import timing as timed
from cupynorm.tools.results import OURS, Point

if TYPE_CHECKING:
    from collections.abc import Iterator

SMS = limits.SMS
VECTOR_BYTES, LINE_BYTES, WARP = 16, 128, 32
MOST_BYTES = 5 << 30  # that a call moves
ROWS = 49152
COLS = (128, 1024, 4096, 8192, 32768, 1001, 50257)
SHAPES = ((1_000_000, 128), (64, 65536))
DTYPES = ("float16", "float32")


class Moves(NamedTuple):
    """How much an op reads and writes: whole arrays, sums over rows, and single numbers of each row.

    meets: the threads of a row tell one another something. gate: x and its gradient have two halves.
    """

    read: int
    written: int
    sums: int = 0
    numbers: int = 0
    result: bool = False
    meets: bool = True
    gate: bool = False


OPS = {
    "layer_norm_backward": Moves(2, 1, sums=2, numbers=2),
    "rms_norm_backward": Moves(2, 1, sums=1, numbers=1),
    "bias_gelu_backward": Moves(2, 1, sums=1, meets=False),
    "softmax_backward": Moves(2, 1),
    "log_softmax_backward": Moves(2, 1),
    "logsumexp": Moves(1, 0, result=True),
    "cross_entropy": Moves(1, 0, result=True),
    "cross_entropy/grad": Moves(1, 1, result=True),
    "geglu_backward": Moves(3, 2, meets=False, gate=True),
    "swiglu_backward": Moves(3, 2, meets=False, gate=True),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to move the rows: a kernel, what its argument says beside the arrays, and its launch."""

    kind: str
    expression: str
    grid: int
    block: int
    numbers: tuple[tuple[str, int], ...]
    finish: bool = False  # a second kernel adds up the groups' sums

    @property
    def name(self) -> str:
        """What results call it."""
        return f"{self.kind}: {self.expression.partition('<')[2]} {dict(self.numbers)} {self.grid}"


def streams(moves: Moves, row_bytes: int, rows: int) -> Iterator[Way]:
    """The arrays from their begin to their end."""
    vectors = rows * row_bytes // VECTOR_BYTES
    for each, block in ((1, 128), (1, 256), (2, 128), (4, 128)):
        shape = f"{moves.read}, {moves.written}, {each}, {block}"
        yield Way(
            "stream",
            f"cupynorm::move_stream<{shape}>",
            -(-vectors // (each * block)),
            block,
            (("vectors", vectors),),
        )


class Tiling(NamedTuple):
    """How threads share rows. ahead: rows on their way beside the one in work; lanes: of a tile, 0 for a whole row."""

    vectors: int
    block: int
    resident: int
    ahead: int
    lanes: int = 0


TILINGS_OF_SUMS = (
    Tiling(2, 512, 1, 1),
    Tiling(2, 512, 1, 2),
    Tiling(2, 256, 2, 2),
    Tiling(1, 256, 4, 1),
    Tiling(1, 256, 2, 3),
    Tiling(1, 512, 2, 1),
)
TILINGS_OF_COLUMNS = (Tiling(1, 256, 3, 3, 32), Tiling(1, 256, 4, 2, 32), Tiling(1, 256, 2, 3, 256))
TILINGS_OF_ROWS = (Tiling(1, 128, 12, 1), Tiling(2, 128, 10, 1), Tiling(2, 256, 5, 1), Tiling(4, 512, 2, 1))


def ways_at(point: Point) -> list[Way]:
    """Return every way to move the rows of a point that is tried."""
    moves, row_bytes = OPS[point.op], point.cols * dtype_of(point.dtype).itemsize
    found = list(streams(moves, row_bytes, point.rows))
    if moves.sums:
        tilings = TILINGS_OF_SUMS if moves.meets else TILINGS_OF_COLUMNS
        for tiling in tilings:
            found += _summed(point, moves, tiling)
    else:
        for tiling in TILINGS_OF_ROWS:
            found += _alone(point, moves, tiling)
    return list(dict.fromkeys(each for each in found if each is not None))


def _summed(point: Point, moves: Moves, tiling: Tiling) -> Iterator[Way | None]:
    """Groups of rows whose columns' sums a thread keeps: with a second launch, without one, and in one launch."""
    unit = VECTOR_BYTES if moves.meets else LINE_BYTES
    rows = Rows.of(point, moves, tiling, unit)
    if rows is None:
        return
    if tiling.lanes:  # as our kernel cuts them
        cut = bench.lowered(point).problem.tiles
        first = (cut.groups, cut.rows_of_group, cut.period)
    elif rows.parts == 1:
        first = rows.in_groups(row_groups(point.rows, point.cols).groups)
        if first[0] < 0.9 * rows.at_once or first[0] > rows.at_once:
            first = rows.in_groups(rows.at_once)
    else:  # whole turns
        turns = max(1, row_groups(point.rows, point.cols).groups // rows.at_once)
        first = rows.in_groups(rows.at_once * turns)
    yield rows.way(first, "two launches", finish=True)
    if moves.meets:
        yield rows.way((first[0], first[1], first[0]), "two launches, all interleaved", finish=True)
    if tiling in (TILINGS_OF_SUMS[0], TILINGS_OF_SUMS[3], TILINGS_OF_COLUMNS[0]):
        yield rows.way(first, "no second launch")
        yield rows.way(first, "one launch", last=True)
    if moves.meets and not rows.aligned:
        at_lines = Rows.of(point, moves, tiling, LINE_BYTES)
        if at_lines is not None:
            yield at_lines.way((first[0], first[1], first[0]), "two launches, at lines", finish=True)


def _alone(point: Point, moves: Moves, tiling: Tiling) -> Iterator[Way | None]:
    """Each row for itself: a block ends with its rows."""
    for unit in (VECTOR_BYTES, LINE_BYTES):
        rows = Rows.of(point, moves, tiling, unit)
        if rows is not None and (unit == VECTOR_BYTES or not rows.aligned):
            yield rows.way(
                (-(-point.rows // rows.side), rows.side, 1), "rows" + ", at lines" * (unit == LINE_BYTES)
            )


@dataclasses.dataclass(frozen=True)
class Rows:
    """How threads share the rows of a point: `group` of them, in each of `parts` blocks, or `side` rows of a block."""

    point: Point
    moves: Moves
    tiling: Tiling
    unit: int
    aligned: bool
    row_vectors: int
    group: int
    parts: int
    side: int
    resident: int

    @staticmethod
    def of(point: Point, moves: Moves, tiling: Tiling, unit: int) -> Rows | None:
        """Return it; None if it has no room."""
        row_bytes = point.cols * dtype_of(point.dtype).itemsize
        aligned = row_bytes % (VECTOR_BYTES if moves.meets else unit) == 0
        vectors = row_bytes // VECTOR_BYTES if aligned else -(-(row_bytes + unit - 1) // VECTOR_BYTES)
        group, parts = -(-vectors // tiling.vectors), 1
        if tiling.lanes:
            group = min(tiling.lanes, 1 << (vectors - 1).bit_length())
            parts = -(-vectors // (group * tiling.vectors))
        elif group > tiling.block:
            parts = -(-group // tiling.block)
            group = -(-vectors // tiling.vectors // parts)
        group = 1 << (group - 1).bit_length() if group <= WARP else -(-group // WARP) * WARP
        side = tiling.block // group
        if side == 0 or (side > 1 and tiling.block % group and moves.meets):
            return None
        wide = VECTOR_BYTES // dtype_of(point.dtype).itemsize
        registers = tiling.vectors * (4 * moves.read * (tiling.ahead + 1) + moves.sums * wide)
        registers += 32 if aligned else 64
        resident = min(tiling.resident, (1 << 16) // (registers * tiling.block))
        if resident == 0:
            return None
        return Rows(point, moves, tiling, unit, aligned, vectors, group, parts, side, resident)

    @property
    def at_once(self) -> int:
        """How many groups of rows run at once."""
        return max(1, SMS * self.resident // self.parts)

    def in_groups(self, wanted: int) -> tuple[int, int, int]:
        """Return the number of groups, their rows, and how many lie interleaved: 8, as in our kernel, or 1."""
        interleaved = 1 if wanted % 8 else 8
        each = -(-self.point.rows // wanted)
        return -(-self.point.rows // (each * interleaved)) * interleaved, each, interleaved

    def way(
        self, groups: tuple[int, int, int], kind: str, *, finish: bool = False, last: bool = False
    ) -> Way:
        """Return a way to move them in groups."""
        moves, tiling = self.moves, self.tiling
        size = dtype_of(self.point.dtype).itemsize
        flags = [str(each).lower() for each in (moves.result, moves.meets, self.aligned, last)]
        shape = (
            moves.read, moves.written, moves.sums, moves.numbers, flags[0], tiling.vectors, tiling.ahead, tiling.block,
            self.resident, *flags[1:3], VECTOR_BYTES // size if moves.sums else 4, flags[3],
        )  # fmt: skip
        numbers = {
            "group": self.group,
            "tiles": self.parts,
            "tile_vectors": self.group * tiling.vectors,
            "row_vectors": self.row_vectors,
            "unit": self.unit,
            "rows_of_group": groups[1],
            "groups": groups[0],
            "interleaved": groups[2],
        }
        at_once = groups[0] if tiling.lanes or not moves.sums else min(groups[0], self.at_once)
        expression = f"cupynorm::move_rows<cupynorm::Moving<{', '.join(map(str, shape))}>>"
        return Way(kind, expression, at_once * self.parts, tiling.block, (*numbers.items(),), finish)


FINISH_LANES = 8
FINISH = f"cupynorm::add_partial_sums<{FINISH_LANES}>"
ARRAYS = [
    ("read", np.uint64, 3),
    ("written", np.uint64, 2),
    ("numbers", np.uint64, 2),
    *((name, np.uint64) for name in ("result", "partial", "sums", "ended", "ends")),
    ("read_pitch", np.int64, 3),
    ("written_pitch", np.int64, 2),
    ("rows", np.int64),
]
NUMBERS = (
    "row_bytes", "group", "tiles", "tile_vectors", "row_vectors", "unit", "rows_of_group", "groups", "interleaved",
    "zero",
)  # fmt: skip
ARGUMENT = np.dtype([*ARRAYS, *((name, np.int32) for name in NUMBERS)], align=True)


def kernel_text() -> str:
    """Return what is compiled: the kernels, and that their argument is what ARGUMENT says."""
    source = Path(__file__).with_suffix(".cu").read_text("utf-8").replace("#pragma once", "")
    size = f"sizeof(cupynorm::RowsMoved) == {ARGUMENT.itemsize}"
    return f'// limits\n{source}\nstatic_assert({size}, "RowsMoved: host and device layouts differ");\n'


class Room:
    """Arrays that all ways at a point share: partial sums, their sums, the count of ended blocks, results."""

    def __init__(self, point: Point, ways: list[Way]) -> None:
        cupy, size = devices.cupy(), dtype_of(point.dtype).itemsize
        groups = (
            max((dict(way.numbers).get("groups", 0) for way in ways), default=0) if OPS[point.op].sums else 0
        )
        words = 4 * (point.cols + 2 * LINE_BYTES // size)
        self.partial = cupy.empty(max(1, OPS[point.op].sums * groups * words), np.uint8)
        self.sums = cupy.empty(max(1, OPS[point.op].sums * words), np.uint8)
        self.ended = cupy.zeros(1, np.uint32)
        self.result = cupy.empty(point.rows, np.float32)


def argument(point: Point, way: Way, each: Any, room: Room, ends: int = 0) -> Any:
    """Return the struct RowsMoved of a set's arrays."""
    moves, row_bytes = OPS[point.op], point.cols * dtype_of(point.dtype).itemsize
    found = np.zeros(1, ARGUMENT)
    x, dy, y = (each[name].data.ptr if name in each else 0 for name in ("x", "dy", "y"))
    streamed = way.kind == "stream"
    half = point.rows * row_bytes if streamed else row_bytes
    pitch = 2 * row_bytes if moves.gate else row_bytes
    if moves.gate:
        found["read"], found["written"] = (dy, x, x + half), (y, y + half)
        found["read_pitch"], found["written_pitch"] = (row_bytes, pitch, pitch), (pitch, pitch)
    else:
        target = each["grad"].data.ptr if "grad" in each else y
        found["read"] = (x, 0, 0) if moves.read == 1 else (dy, x, 0)
        found["written"] = (target if moves.written else 0, 0)
        found["read_pitch"], found["written_pitch"] = row_bytes, row_bytes
    stats = [each[name].data.ptr for name in ("rstd", "mean") if name in each][: moves.numbers]
    found["numbers"] = (*stats, 0, 0)[:2]
    found["result"] = y if moves.result else room.result.data.ptr
    found["partial"], found["sums"] = room.partial.data.ptr, room.sums.data.ptr
    found["ended"], found["ends"] = room.ended.data.ptr, ends
    found["rows"], found["row_bytes"] = point.rows, row_bytes
    for name, number in way.numbers:
        if name in NUMBERS:
            found[name] = number
    return found


def runs_of(point: Point, way: Way, built: Any, arrays: list[Any], room: Room, ends: int = 0) -> Any:
    """Return what launches a way on set i."""
    function = limits.loaded(*built[way.expression], 0, 1)[1].ptr
    launches = [devices.launch_of(function, (way.grid, 1, 1), (way.block, 1, 1), 0)]
    row_words = 0
    if way.finish:
        row_words = dict(way.numbers)["row_vectors"] * VECTOR_BYTES // dtype_of(point.dtype).itemsize // 4
        second = limits.loaded(*built[FINISH], 0, 1)[1].ptr
        grid = (-(-row_words // FINISH_LANES), OPS[point.op].sums, 1)
        launches.append(devices.launch_of(second, grid, (256, 1, 1), 0))
    beside = np.array([dict(way.numbers).get("vectors", row_words)], np.int64)
    kept, addresses = [], []
    for each in arrays:
        struct = argument(point, way, each, room, ends)
        pointers = (ctypes.c_void_p * 2)(struct.ctypes.data, beside.ctypes.data)
        kept.append((struct, pointers, beside))
        addresses.append(ctypes.addressof(pointers))

    def run(i: int) -> Any:
        for launch in launches:
            devices.launch_once(launch, addresses[i])
        if way.kind == "stream" and not OPS[point.op].written:
            return None  # nothing to check
        return kept and arrays[i].get("grad", arrays[i]["y"])

    return run


def fault_of(name: str, memory: Any) -> str:
    """Say so if a way has left a word of its result as it was."""
    words = memory[: memory.size // 4 * 4].view(np.uint32)
    return "leaves elements" if name.isdigit() and (words == np.uint32(0xFFFFFFFF)).any() else ""


def rows_at(op: str, dtype: str, cols: int) -> int:
    """Return how many rows are measured: fewer where so many would be more than MOST_BYTES."""
    one = forms.form(op).bytes_moved(1024, cols, dtype_of(dtype)) / 1024
    rows = ROWS
    while rows * one > MOST_BYTES:
        rows //= 2
    return rows


def measure(point: Point, ways: list[Way], built: Any, replays: int, *, spread: bool) -> dict[str, Any]:
    """Time copies, our call and each way in turns."""
    what, dtype = forms.form(point.op), dtype_of(point.dtype)
    moved = what.bytes_moved(point.rows, point.cols, dtype)
    sets = buffers.allocate(point, moved)
    arrays, notes = [each.arrays for each in sets], {}
    runs = {OURS: bench.ours(what, arrays, None), **timed.copy_runs([each.copy for each in sets])}
    if point.op == "cross_entropy/grad":
        for each in arrays:
            each["grad"] = devices.cupy().empty((point.rows, point.cols), dtype)
    room = Room(point, ways)
    names = {str(i): way for i, way in enumerate(ways)}
    for name, way in names.items():
        if isinstance(built[way.expression], str):
            notes[way.name] = built[way.expression][:200]
        else:
            runs[name] = runs_of(point, way, built, arrays, room)
    calls = buffers.calls_for(moved, len(sets))
    every = timed.time_interleaved(
        runs, len(sets), replays=replays, calls=calls, seconds=0.012, notes=notes, check=fault_of
    )
    copy, found = limits.beside_copies(point, every, moved, notes)
    found["ways"] = [
        {"kind": way.kind, "name": way.name, "share": copy / every[name].median}
        for name, way in names.items()
        if name in every
    ]
    if spread:
        found["ends"] = {
            way.name: ends_of(point, way, built, arrays, room)
            for way in ways
            if way.kind.startswith("two launches") and not isinstance(built[way.expression], str)
        }
    return found


def ends_of(point: Point, way: Way, built: Any, arrays: list[Any], room: Room) -> list[float]:
    """Return when a launch's blocks end before the last one does, in microseconds: quartiles, and the first one."""
    ends = devices.cupy().zeros(way.grid, np.uint64)
    run = runs_of(point, way, built, arrays, room, ends.data.ptr)
    for i in range(len(arrays)):
        run(i)
    at = np.sort(ends.get().astype(np.int64))
    return [round(float(at[-1] - np.quantile(at, part)) / 1e3, 2) for part in (0, 0.25, 0.5, 0.75)]


def best_of(found: dict[str, Any]) -> dict[str, float]:
    """Return the best share of each kind."""
    best: dict[str, float] = {}
    for each in found["ways"]:
        best[each["kind"]] = max(best.get(each["kind"], 0.0), each["share"])
    return best


def line(found: dict[str, Any]) -> str:
    """Say a point's shares in a line."""
    shares = ", ".join(f"{kind} {share:.3f}" for kind, share in best_of(found).items())
    return (
        f"{found['op']} {found['dtype']} {found['rows']} x {found['cols']}: copy {found['copy_us']:.1f} us, "
        f"ours {found['share']:.3f}, {shares}"
    )


def points_of(ops: list[str], dtypes: list[str], cols: list[int]) -> list[Point]:
    """Return what is measured."""
    found = [
        Point(op, dtype, rows_at(op, dtype, each), each) for each in cols for op in ops for dtype in dtypes
    ]
    if set(cols) == set(COLS):
        found += [Point(op, dtype, *shape) for shape in SHAPES for op in ops for dtype in dtypes]
    return found


def main() -> None:
    """Measure, print a line a point, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ops", nargs="*", choices=tuple(OPS), default=[*OPS])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--cols", nargs="*", type=int, default=[*COLS])
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--spread", action="store_true", help="when blocks end, too")
    parser.add_argument("--compile-only", action="store_true")
    asked = parser.parse_args()
    points = points_of(asked.ops, asked.dtypes, asked.cols)
    ways = {point: ways_at(point) for point in points}
    begin = time.monotonic()
    text = kernel_text()
    kernels = [limits.Kernel("", text, FINISH, (1, 1), 256)]
    kernels += [
        limits.Kernel("", text, way.expression, (1, 1), way.block) for each in ways.values() for way in each
    ]
    built = {expression: made for (_, expression), made in limits.build_all(kernels).items()}
    print(f"{len(built)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    if asked.compile_only:
        for expression, made in built.items():
            if isinstance(made, str):
                print(expression, made[:600])
        return
    bench.compile_ahead(points)
    print(f"ours compiled after {time.monotonic() - begin:.0f} s", flush=True)
    results = []
    for point in points:
        if time.monotonic() - begin > asked.seconds:
            break
        results.append(measure(point, ways[point], built, asked.replays, spread=asked.spread))
        devices.cupy().get_default_memory_pool().free_all_blocks()
        print(line(results[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
