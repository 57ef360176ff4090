"""Time what no row kernel can beat: kernels that read rows, synchronize the threads of each, and write them.

They do no arithmetic.

    python benchmarks/limits.py --json limits.json [--only few wide odd long]

Beside a copy of the same bytes and our own call, in one run. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import dtype_of
from cupynorm.call.view import View
from cupynorm.catalog import forms
from cupynorm.invoke import row_ops
from cupynorm.lower.row import RowOp, row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import DoesNotFitError, Plan
from cupynorm.runtime import compiler, devices, nvrtc
from cupynorm.tools import bench, buffers
from cupynorm.tools import timing as timed
from cupynorm.tools.results import COPY, OURS, Point

VECTOR_BYTES = 16  # of an access
# our kernel and plan, with an op without arithmetic, and with one that has no parameters either
BARE = ("bare", "bare, no parameters")
WARP = 32
MEETINGS = ("kAlone", "kStates", "kBarrier", "kRead")
MESSAGE_BYTES = 32  # that a block sends to each other one
SMS = 132  # of an H200
LEAST_BLOCK, MOST_BLOCK = 128, 1024  # threads
ROOM, STATIC, LEAST_KEPT = 227 << 10, 3 << 10, 16 << 10  # bytes of shared memory
STAGED_ROW_BYTES = 128 << 10
MOST_FEW = 64  # rows
RESIDENT_THREADS = (2048, 1536, 1024, 512)  # of a multiprocessor
MEET = RowOp("meet", "limits.cu", "Meet", lambda *_: None, has_eps=True)
MEET_COLUMNS = {n: dataclasses.replace(MEET, columns=("gamma", "beta")[:n]) for n in range(3)}
OPS = ("softmax", "rms_norm", "layer_norm")
LONG = (16384, 32768, 65536)  # columns that one block's threads can hold
MIDDLE_FLOATS = ((49152, 32), (49152, 768), (49152, 16384), (24576, 32768))
CLASSES = {
    "small": [Point(op, "float16", 49152, cols) for cols in (32, 64, 128, 1024) for op in OPS],
    "middle": [
        *(Point(op, "float16", 49152, cols) for cols in (512, 768, 2048) for op in OPS),
        *(Point("layer_norm", "float32", rows, cols) for rows, cols in MIDDLE_FLOATS),
        Point("layer_norm", "bfloat16", 49152, 32768),
    ],
    "odd": [
        *(Point(op, "float16", 8192, cols) for cols in (33, 127, 1000, 1023, 5001) for op in OPS),
        *(Point(op, "float32", 8192, cols) for cols in (33, 127, 1023) for op in OPS),
        *(Point(op, "float16", 8192, 1024, 1) for op in OPS),
        *(Point(op, dtype, 8192, 50257) for dtype in ("float16", "float32") for op in OPS),
    ],
    "wide": [
        *(Point(op, "float16", 4096, cols) for cols in (65536, 131072, 262144) for op in OPS),
        *(Point(op, "float32", 4096, cols) for cols in (65536, 131072) for op in OPS),
        *(Point(op, "float32", 2048, 262144) for op in OPS),
    ],
    "few": [
        *(Point(op, "float16", rows, 1 << 16) for rows in (1, 16, 64) for op in OPS),
        *(Point(op, "float16", rows, 1 << 20) for rows in (1, 16, 64) for op in OPS),
        *(Point(op, "float16", rows, 1 << 24) for rows in (1, 16) for op in OPS),
        *(Point(op, "float32", rows, 1 << 16) for rows in (1, 16, 64) for op in OPS),
        *(Point(op, "float32", rows, 1 << 20) for rows in (1, 16, 64) for op in OPS),
        *(Point(op, "float32", rows, 1 << 24) for rows in (1, 16) for op in OPS),
    ],
    "fused": [
        *(Point("softmax/lengths", dtype, 49152, 128) for dtype in ("float16", "float32")),
        *(Point("add_layer_norm", "float16", *shape) for shape in ((49152, 128), (49152, 3072), (4096, 768))),
        *(
            Point(f"softmax/{mask}", dtype, 49152, cols)
            for mask in ("ragged", "causal")
            for dtype in ("float16", "float32")
            for cols in (128, 512, 1024, 2048, 4096, 8192)
        ),
        *(Point("add_layer_norm/sum", "float16", 49152, cols) for cols in (128, 768, 1536, 4096, 8192)),
        *(Point("add_layer_norm/sum", "float32", 49152, cols) for cols in (2048, 4096, 8192)),
        *(Point("layer_norm/int8", "float16", 49152, cols) for cols in (128, 768, 1536, 3072, 8192)),
    ],
    "long": [
        *(Point(f"softmax/{mask}", "float16", 4096, cols) for mask in ("ragged", "causal") for cols in LONG),
        *(
            Point(f"softmax/{mask}", "float32", 4096, cols)
            for mask in ("ragged", "causal")
            for cols in LONG[:-1]
        ),
        *(Point(form, "float16", 4096, LONG[0]) for form in ("add_layer_norm/sum", "layer_norm/int8")),
    ],
}
# the dtype of parameters, where it is not x's
WEIGHTS = {Point("add_layer_norm", "float16", 4096, 768): "float32"}


class Traffic(NamedTuple):
    """What a form moves beside x: arrays of its shape and parameters that are read, and how often threads meet.

    sums: the sum is stored; bytes_each: results take one byte an element; ends: how much of a row is read, kWhole
    (all), kLength (up to a length, which is read first) or kDiagonal.
    """

    beside: int = 0
    columns: tuple[str, ...] = ()
    sums: bool = False
    bytes_each: bool = False
    meets: int = 1
    ends: str = "kWhole"


FUSED = {
    "softmax/lengths": Traffic(meets=2, ends="kLength"),
    "softmax/ragged": Traffic(meets=2, ends="kLength"),
    "softmax/causal": Traffic(meets=2, ends="kDiagonal"),
    "add_layer_norm": Traffic(1, ("bias", "gamma", "beta")),
    "add_layer_norm/sum": Traffic(1, ("bias", "gamma", "beta"), sums=True),
    "layer_norm/int8": Traffic(0, ("gamma", "beta"), bytes_each=True, meets=2),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One way to move rows: a kernel, its launch, and what its threads do between loads and stores."""

    meeting: str
    text: str
    expression: str
    grid: tuple[int, int]
    block: int
    shared_bytes: int = 0
    cluster: int = 1
    cooperative: bool = False
    packed: bool = False  # takes one struct, as the package's kernels do
    anywhere: bool = False  # its arguments count a row's bytes, not vectors
    access: int = 0  # of what is fused: bytes of x that a thread reads at once


def skeletons(rows: int, row_bytes: int, columns: int) -> Iterator[Kernel]:
    """Rows in registers: of threads of a block, of the blocks of a cluster, or, of one row, of the whole grid's."""
    vectors = row_bytes // VECTOR_BYTES
    for each, block in itertools.product((1, 2, 3, 4, 8), (64, 128, 256, 512, 1024)):
        resident = _resident(each * 4 * (1 + columns) + 24, block)
        group = vectors // each
        if group * each == vectors and 0 < group <= block and group & (group - 1) == 0:
            grid = (math.ceil(rows * group / block), 1)
            for meeting in MEETINGS[:2]:
                yield _skeleton(meeting, group, each, 1, columns, block, resident, grid)
        for parts in (2, 4, 8, 16):
            if block * each * parts == vectors:
                for meeting in MEETINGS[:2]:
                    yield _skeleton(meeting, block, each, parts, columns, block, resident, (rows * parts, 1))
    yield from _odd_clusters(rows, vectors, columns)
    if rows == 1:
        yield from _of_the_grid(vectors, columns)


def _resident(registers: int, block: int) -> int:
    threads = next((t for t in RESIDENT_THREADS if t * registers <= 1 << 16), block)
    return min(32, max(1, threads // block))


def anywhere(point: Point, columns: int) -> Iterator[Kernel]:
    """Unaligned rows, in the registers of a block's threads."""
    element = dtype_of(point.dtype).itemsize
    vectors = point.cols * element // VECTOR_BYTES
    for each, block in itertools.product((1, 2, 3, 4, 5, 7), (64, 128, 256, 512, 1024)):
        group = max(2 * (VECTOR_BYTES // element - 1), math.ceil(vectors / each))
        group = 1 << (group - 1).bit_length()
        registers = each * (4 + 6 * columns) + 28
        if group > block or (each > 1 and group * (each - 1) >= vectors) or registers * block > 1 << 16:
            continue
        resident = _resident(registers, block)
        grid = (math.ceil(point.rows * group / block), 1)
        for meeting in MEETINGS[:2]:
            yield _skeleton(meeting, group, each, 1, columns, block, resident, grid, element)


def _odd_clusters(rows: int, vectors: int, columns: int) -> Iterator[Kernel]:
    """Clusters of 3 and 6 blocks, of which a group of 16 or 18 multiprocessors takes more than of 4 or 8."""
    for each, parts in itertools.product((1, 2, 4, 8), (3, 6)):
        block = math.ceil(vectors / parts / each / WARP) * WARP
        if LEAST_BLOCK <= block <= MOST_BLOCK:
            for meeting in MEETINGS[:2]:
                resident = max(1, MOST_BLOCK // block)
                yield _skeleton(meeting, block, each, parts, columns, block, resident, (rows * parts, 1))


def _of_the_grid(vectors: int, columns: int) -> Iterator[Kernel]:
    for each, block, parts in itertools.product((1, 2, 4, 8), (256, 512, 1024), (SMS // 2, SMS, 2 * SMS)):
        held = math.ceil(vectors / parts)
        if math.ceil(held / block) == each and parts * MESSAGE_BYTES <= held * VECTOR_BYTES:
            for meeting in MEETINGS:
                yield _skeleton(meeting, block, each, 0, columns, block, max(1, parts // SMS), (1, parts))


def _skeleton(
    meeting: str,
    group: int,
    vectors: int,
    parts: int,
    columns: int,
    block: int,
    resident: int,
    grid: tuple[int, int],
    element: int = 0,
) -> Kernel:
    shape = f"{group}, {vectors}, {parts}, cupynorm::{meeting}, {columns}, {block}, {resident}"
    expression = f"cupynorm::skeleton<cupynorm::Skeleton<{shape}>>"
    if element:
        expression = f"cupynorm::skeleton_anywhere<cupynorm::Skeleton<{shape}>, {element}>"
    made = Kernel(meeting, "", expression, grid, block, cluster=max(1, parts), cooperative=parts == 0)
    return dataclasses.replace(made, anywhere=element > 0)


def fused_skeletons(point: Point) -> Iterator[Kernel]:
    """Rows in registers with what a form reads and stores beside x; parameters in accesses of 16 bytes at most."""
    traffic, size = FUSED[point.op], dtype_of(point.dtype).itemsize
    ratio = dtype_of(WEIGHTS.get(point, point.dtype)).itemsize // size
    access = VECTOR_BYTES // ratio
    vectors = point.cols * size // access
    for each, block in itertools.product((1, 2, 3, 4, 6, 8), (64, 128, 192, 256, 512, 1024)):
        group = vectors // each
        whole = group % WARP == 0 or WARP % group == 0
        if group * each != vectors or block % group or not whole or group // WARP & (group // WARP - 1):
            continue
        registers = each * (access // 4) * (1 + traffic.beside + len(traffic.columns) * ratio) + 24
        threads = min(1 << 11, (1 << 16) // registers)
        if block > max(threads, 2 * group):
            continue
        for ends, meets in itertools.product(sorted({traffic.ends, "kWhole"}), (traffic.meets, 0)):
            if meets or ends == traffic.ends:
                stored, resident = access // (1 + traffic.bytes_each), max(1, min(32, threads // block))
                moved = (access, traffic.beside, len(traffic.columns), access * ratio, stored, traffic.sums)
                shape = (
                    group,
                    each,
                    *(str(n).lower() for n in moved),
                    meets,
                    f"cupynorm::{ends}",
                    block,
                    resident,
                )
                numbers = ", ".join(map(str, shape))
                meeting = ("kStates" if meets else "kAlone") + " up to an end" * (ends != "kWhole")
                expression = f"cupynorm::fused_skeleton<cupynorm::FusedSkeleton<{numbers}>>"
                grid = (math.ceil(point.rows * group / block), 1)
                yield Kernel(meeting, "", expression, grid, block, access=access)


def staged(what: KernelSpec, rows: int, row_bytes: int) -> Iterator[Kernel]:
    """Rows in the shared memory of clusters or the grid, by the package's own kernels with an op without arithmetic."""
    for block, resident, parts in itertools.product((128, 256, 512), (1, 2, 3, 4, 5, 6), (2, 4, 8, 16)):
        kept = row_bytes // parts
        fills = ROOM // 2 <= (kept + STATIC) * resident <= ROOM and block * resident >= MOST_BLOCK // 2
        if kept >= LEAST_KEPT and fills:
            yield _staged(what, (4, 2, 0, parts, kept, block, resident), (rows * parts, 1), parts)
    if rows > MOST_FEW:
        return
    forms_of_a_grid = ((256, 1), (256, 2), (512, 1), (512, 2), (1024, 1))
    for (block, resident), at_once in itertools.product(forms_of_a_grid, (1, 2, 4, 8, 16)):
        parts = SMS * resident // at_once
        most = (ROOM - STATIC * resident) // resident // VECTOR_BYTES * VECTOR_BYTES
        kept = min(most, math.ceil(row_bytes / parts / VECTOR_BYTES) * VECTOR_BYTES)
        if at_once <= rows and 2 * block * VECTOR_BYTES <= kept and parts * MESSAGE_BYTES <= kept:
            yield _staged(what, (4, 2, 0, 0, kept, block, resident), (at_once, parts), 0)


def _staged(what: KernelSpec, shape: tuple[int, ...], grid: tuple[int, int], parts: int) -> Kernel:
    numbers = ", ".join(map(str, shape))
    expression = f"cupynorm::row_staged<{what.types}, cupynorm::Staged<{numbers}>>"
    kept, block = shape[4], shape[5]
    return Kernel("kStates", what.text, expression, grid, block, kept, max(1, parts), parts == 0, packed=True)


def empty_spec(
    rows: int, row_bytes: int, columns: int, x: int = 0, y: int = 0, parameters: tuple[int, ...] = (0, 0)
) -> Any:
    """Return the spec of the op without arithmetic, on rows of floats of as many bytes."""
    single, cols = dtype_of("float32"), row_bytes // 4
    ends = (View(at, (rows, cols), (row_bytes, 4), single) for at in (x, y))
    op = MEET_COLUMNS[columns]
    views = {name: View(at, (cols,), (4,), single) for name, at in zip(op.columns, parameters, strict=False)}
    found = row_spec(op, *ends, 1, views, (), 0.0)
    source = Path(__file__).with_suffix(".cu").read_text("utf-8")
    return found._replace(text=found.text.replace("#include <limits.cu>", source.replace("#pragma once", "")))


def addresses_of(each: Any) -> list[int]:
    """Return the addresses of x, y, gamma and beta of a set, 0 for those that it does not have."""
    return [each[name].data.ptr if name in each else 0 for name in ("x", "y", "gamma", "beta")]


def empty_spec_at(point: Point, each: Any, columns: int) -> Any:
    """Return the same on a set's arrays, and its argument."""
    at = addresses_of(each)
    row_bytes = point.cols * dtype_of(point.dtype).itemsize
    what = empty_spec(point.rows, row_bytes, columns, at[0], at[1], tuple(at[2:]))
    return what, np.array([what.params.values], what.params.dtype)


def columns_of(point: Point) -> int:
    """Return how many affine parameters an op has."""
    return OPS.index(point.op)


def kernels_at(point: Point) -> list[Kernel]:
    """Return every way to move the rows of a point that is tried."""
    bare = "// limits\n#include <row/variants.cuh>\n" + Path(__file__).with_suffix(".cu").read_text("utf-8")
    if point.op in FUSED:
        fused = [dataclasses.replace(each, text=bare) for each in fused_skeletons(point)]
        return list(dict.fromkeys(fused))
    row_bytes, columns = point.cols * dtype_of(point.dtype).itemsize, columns_of(point)
    what = empty_spec(point.rows, row_bytes, columns)
    odd = row_bytes % VECTOR_BYTES or point.offset
    made = [] if odd else list(skeletons(point.rows, row_bytes, columns))
    found = [dataclasses.replace(each, text=bare) for each in made or anywhere(point, columns)]
    if odd:
        return list(dict.fromkeys(found))
    if row_bytes >= STAGED_ROW_BYTES:
        found += staged(what, point.rows, row_bytes)
    return list(dict.fromkeys(found))


def build(job: tuple[str, str]) -> tuple[bytes, str] | str:
    """Compile a kernel: its image and name, or what the compiler says."""
    try:
        made = nvrtc.compile(*job, compiler.options(), "90")
    except nvrtc.CompileError as error:
        return str(error)
    return (made.image, made.lowered_name) if made.spill_store_bytes == 0 else "spills"


def build_all(kernels: list[Kernel]) -> dict[tuple[str, str], tuple[bytes, str] | str]:
    """Compile what is needed, on all cores."""
    jobs = list(dict.fromkeys((each.text, each.expression) for each in kernels))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(jobs, pool.map(build, jobs, chunksize=2), strict=True))


@functools.cache
def loaded(image: bytes, name: str, shared_bytes: int, cluster: int) -> Any:
    """Load a kernel, and allow what its launch asks for."""
    module = devices.cupy().cuda.function.Module()
    module.load(image)
    function, driver = module.get_function(name), devices.driver()
    if shared_bytes:
        driver.funcSetAttribute(function.ptr, compiler.MAX_DYNAMIC_SHARED, shared_bytes)
        driver.funcSetAttribute(function.ptr, compiler.SHARED_CARVEOUT, 100)
    if cluster > compiler.PORTABLE_CLUSTER:
        driver.funcSetAttribute(function.ptr, compiler.LARGE_CLUSTERS_ALLOWED, 1)
    if cluster > 1:
        for attribute, extent in zip(compiler.CLUSTER_SHAPE, (cluster, 1, 1), strict=True):
            driver.funcSetAttribute(function.ptr, attribute, extent)
    return module, function


def fused_arrays(point: Point, row_vectors: int, arrays: Any) -> Any:
    """Return the argument of fused_skeleton."""
    names = ("x", "residual", *FUSED[point.op].columns)
    names = (*names, *("",) * (5 - len(names)), "lengths", "y", "sum")
    fields = [(f"array{i}", np.uint64) for i in range(len(names))]
    fields += [(name, np.int32) for name in ("rows", "row_vectors", "queries", "vector", "zero")]
    at = [arrays[name].data.ptr if name in arrays else 0 for name in names]
    numbers = (point.rows, row_vectors, point.cols.bit_length() - 1, point.cols // row_vectors, 0)
    return np.array([(*at, *numbers)], np.dtype(fields, align=True))


def runs_of(kernel: Kernel, image: bytes, name: str, point: Point, arrays: list[Any]) -> Any:
    """Return what launches a kernel on set i."""
    function = loaded(image, name, kernel.shared_bytes, kernel.cluster)[1].ptr
    row_bytes = point.cols * dtype_of(point.dtype).itemsize
    kept, addresses = [], []
    for each in arrays:
        if kernel.access:
            if FUSED[point.op].sums and "sum" not in each:
                each["sum"] = devices.cupy().empty_like(each["y"])
            block = fused_arrays(point, row_bytes // kernel.access, each)
            values = ((ctypes.c_char * block.nbytes).from_buffer(block),)
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(values[0]))
            kept.append((values, pointers, block))
            addresses.append(ctypes.addressof(pointers))
            continue
        values: tuple[Any, ...]
        if kernel.packed:
            _, block = empty_spec_at(point, each, columns_of(point))
            values = ((ctypes.c_char * block.nbytes).from_buffer(block),)
        else:
            numbers = (point.rows, row_bytes if kernel.anywhere else row_bytes // VECTOR_BYTES, 0)
            values = (*map(ctypes.c_uint64, addresses_of(each)), *map(ctypes.c_int, numbers))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        kept.append((values, pointers))
        addresses.append(ctypes.addressof(pointers))
    # as the package's kernels are: they begin before the one before them has ended
    bind = devices.launch_of(
        function, (*kernel.grid, 1), (kernel.block, 1, 1), kernel.shared_bytes, cooperative=kernel.cooperative
    )

    def run(i: int) -> Any:
        devices.launch_once(bind, addresses[i])
        return kept and arrays[i]["y"]

    return run


def house(point: Point, arrays: list[Any], columns: int) -> Any:
    """Return a launch of our own kernel on set i, as planned at a point, with the op without arithmetic; or None."""
    row_bytes = point.cols * dtype_of(point.dtype).itemsize
    if row_bytes % 4 or point.offset:
        return None
    plan = Plan(**bench.planned(point))
    wanted = dataclasses.replace(plan, vector=max(1, plan.vector * dtype_of(point.dtype).itemsize // 4))
    if columns == 0:
        wanted = dataclasses.replace(wanted, parameter_cache=0)
    kept, addresses, device = [], [], devices.present_device()
    for each in arrays:
        what, block = empty_spec_at(point, each, columns)
        try:
            found = row_ops.prepared(device, what, wanted)
        except DoesNotFitError:
            return None
        pointer = np.array([block.ctypes.data], np.uint64)
        kept.append((block, pointer))
        addresses.append(pointer.ctypes.data)
    launch = row_ops.launcher(found.kernel.pointer, found.plan)

    def run(i: int) -> Any:
        devices.launch_once(launch, addresses[i])
        return kept and arrays[i]["y"]

    return run


def beside_copies(
    point: Point, every: dict[str, Any], moved: int, notes: dict[str, str]
) -> tuple[float, dict[str, Any]]:
    """Return the seconds of the best copy, and what is told of a point: how long that took, and our share of it."""
    copy = min(timing.median for name, timing in every.items() if name.startswith(COPY))
    told = {"copy_us": copy * 1e6, "bytes": moved, "notes": notes, "share": copy / every[OURS].median}
    return copy, {**dataclasses.asdict(point), **told}


def measure(point: Point, kernels: list[Kernel], built: Any, replays: int) -> dict[str, Any]:
    """Time copies, our call and each kernel in turns; the best of each meeting."""
    what, dtype = forms.form(point.op), dtype_of(point.dtype)
    moved = what.bytes_moved(point.rows, point.cols, dtype)
    given = dtype_of(WEIGHTS[point]) if point in WEIGHTS else None
    sets = buffers.allocate(point, moved, given)
    arrays, notes = [each.arrays for each in sets], {}
    runs = {OURS: bench.ours(what, arrays, None), **timed.copy_runs([each.copy for each in sets])}
    if point.op not in FUSED:
        counts = (columns_of(point), *((0,) if columns_of(point) and point.rows > MOST_FEW else ()))
        bare = {name: house(point, arrays, count) for name, count in zip(BARE, counts, strict=False)}
        runs.update({name: run for name, run in bare.items() if run is not None})
    for number, kernel in enumerate(kernels):
        made = built[kernel.text, kernel.expression]
        if isinstance(made, str):
            notes[str(number)] = made[:400]
            continue
        runs[str(number)] = runs_of(kernel, *made, point, arrays)
    calls = buffers.calls_for(moved, len(sets))
    every = timed.time_interleaved(runs, len(sets), replays=replays, calls=calls, seconds=0.02, notes=notes)
    copy, found = beside_copies(point, every, moved, notes)
    found["house"] = {name: copy / every[name].median for name in BARE if name in every}
    forms_of: dict[str, list[dict[str, Any]]] = {}
    for number, kernel in enumerate(kernels):
        if str(number) in every:
            as_dict = {k: v for k, v in dataclasses.asdict(kernel).items() if k not in {"text", "meeting"}}
            as_dict["share"] = copy / every[str(number)].median
            forms_of.setdefault(kernel.meeting, []).append(as_dict)
    found["kernels"] = {k: sorted(v, key=lambda each: -each["share"])[:1] for k, v in forms_of.items()}
    return found


def line(found: dict[str, Any]) -> str:
    """Say a point's shares in a line."""
    best = " ".join(
        f"{meeting[1:].lower()} {each[0]['share']:.3f}" for meeting, each in found["kernels"].items()
    )
    bare = "".join(f"its kernel {name} {share:.3f}, " for name, share in found.get("house", {}).items())
    return (
        f"{found['op']} {found['dtype']} {found['rows']} x {found['cols']}: copy {found['copy_us']:.2f} us, "
        f"ours {found['share']:.3f}, {bare}{best}"
    )


def main() -> None:
    """Measure, print a line a point, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(CLASSES), default=tuple(CLASSES))
    parser.add_argument("--ops", nargs="*", choices=OPS, default=OPS)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--compile-only", action="store_true")
    asked = parser.parse_args()
    points = [
        point for name in asked.only for point in CLASSES[name] if point.op in FUSED or point.op in asked.ops
    ]
    kernels = {point: kernels_at(point) for point in points}
    begin = time.time()
    built = build_all([each for found in kernels.values() for each in found])
    print(f"{len(built)} kernels compiled in {time.time() - begin:.0f} s", flush=True)
    if asked.compile_only:
        for (_, expression), made in built.items():
            if isinstance(made, str):
                print(expression, made[:300])
        return
    results = []
    for point in points:
        results.append(measure(point, kernels[point], built, asked.replays))
        print(line(results[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
