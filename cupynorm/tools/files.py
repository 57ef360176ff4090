"""Runs an op over a .npy file, block by block, into another .npy file. Files may be larger than memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cupynorm._dtypes import compute_dtype, dtype_of, result_dtype
from cupynorm.call.axes import axes_of
from cupynorm.invoke import row_ops
from cupynorm.npy.paths import STANDARD, FileError, check_standard_output, check_target
from cupynorm.npy.source import Source
from cupynorm.npy.target import Pipe, Target
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cupynorm.catalog.op_table import Op

    Array = np.ndarray[Any, Any]

BLOCK_BYTES = (
    64 << 20
)  # of a block of the input or output, whichever is wider; the op may need several times as much


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of run(): its work and its device."""

    op: str
    device: str  # "cpu", or the device's name
    note: str  # why no device was used, if one was expected
    plan: dict[str, Any] | None
    rows: int
    cols: int
    input_dtype: str
    dtype: str
    outputs: tuple[str, ...]
    bytes_moved: int  # read from and written to files
    seconds: float  # from reading the first block until the last one is on the disk

    @property
    def bytes_per_second(self) -> float:
        """Bytes of files per second."""
        return self.bytes_moved / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the rate, for JSON."""
        return {**dataclasses.asdict(self), "bytes_per_second": self.bytes_per_second}


def run(
    op: Op,
    source: Path,
    target: Path,
    *,
    axis: int | tuple[int, ...] | None = -1,
    dtype: str | None = None,
    bfloat16: bool = False,
    gamma: Path | None = None,
    beta: Path | None = None,
    eps: float | None = None,
    force: bool = False,
    device: Literal["auto", "gpu", "cpu"] = "auto",
    stats: bool = False,
    plan: str | None = None,
    progress: Callable[[int, int], None] = lambda done, rows: None,  # noqa: ARG005
) -> Report:
    """Apply `op` to the rows of `source` and write `target`; with `stats`, write the statistics to files beside it.

    Along other axes than the last, all of x is read at once. `-` as source or target is standard input or output, which
    may be pipes. x may hold integers, as the op's x may. `bfloat16`: the files' raw two-byte elements are bfloat16.
    `progress` is called with the rows done and all rows. A forced plan needs a device. `target` appears only when the
    run was successful.

    One function of over 60 lines, because what it opens stays open in one ExitStack until the targets are complete.

    Raises FileError, NoDeviceError, ValueError for options that the op does not take, and whatever the op raises.
    """
    given = {
        name: path for name, path in {"x": source, "gamma": gamma, "beta": beta}.items() if path is not None
    }
    _check_options(op, given, eps=eps, stats=stats)
    _check_streams(given, target, stats=stats)
    statistics = op.stats if stats else ()
    paths = [target, *(target.with_name(f"{target.stem}.{name}.npy") for name in statistics)]
    with contextlib.ExitStack() as stack:  # until it ends sources are open, and targets not yet complete
        sources = {
            name: stack.enter_context(
                contextlib.closing(Source(path, bfloat16=bfloat16, integers=name == "x"))
            )
            for name, path in given.items()
        }
        for path in paths:
            if path != STANDARD:
                check_target(path, list(given.values()), force=force)
        if bfloat16 and not any(each.is_raw for each in sources.values()):
            raise ValueError(f"bfloat16: {source} holds no raw two-byte elements to read as bfloat16")

        x = sources.pop("x")
        over = axes_of(axis, x.shape)
        leading = tuple(extent for at, extent in enumerate(x.shape) if at not in over)
        trailing = tuple(x.shape[at] for at in over)
        whole = over != tuple(range(len(x.shape) - len(over), len(x.shape)))
        rows, cols = math.prod(leading), math.prod(trailing)
        if not cols:
            raise FileError(f"{source}: has shape {x.shape}: its rows are empty")
        y_dtype = dtype_of(dtype) if dtype else result_dtype(x.dtype)
        where, note = choose_device("gpu" if plan and device == "auto" else device)
        axes = len(over)
        keywords: dict[str, Any] = {"dtype": y_dtype, "plan": plan}
        keywords["axis"] = over if whole else tuple(range(-axes, 0))
        keywords |= {"return_stats": True} if stats else {}
        keywords |= {} if eps is None else {"eps": eps}
        parameters = {name: each.read_whole() for name, each in sources.items()}
        compute = _on(where, op.function, parameters, keywords)
        # no rows: runs every check and computes nothing
        empty = (
            tuple(extent if at in over else 0 for at, extent in enumerate(x.shape))
            if whole
            else (0, *trailing)
        )
        compute(np.empty(empty, x.dtype))

        targets: list[Target | Pipe] = []
        kinds = [(x.shape, y_dtype), *[(leading, compute_dtype(x.dtype, y_dtype))] * len(statistics)]
        for path, (shape, kind) in zip(paths, kinds, strict=True):
            made = Pipe(shape, kind) if path == STANDARD else Target(path, shape, kind, force=force)
            targets.append(made)
            stack.callback(targets[-1].discard)
        started = time.perf_counter()
        step = max(1, BLOCK_BYTES // (cols * max(x.dtype.itemsize, y_dtype.itemsize)))
        step = rows if whole else step  # rows whose elements lie apart are read together
        launched = None
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = x.read_whole() if whole else x.read(start, stop, axes)
            plan_of_block = _write_block(compute, block, targets)
            if start == 0:  # the last block may be shorter and have another plan
                launched = plan_of_block
            progress(stop, rows)
        for each in targets:
            each.sync()
        seconds = time.perf_counter() - started
        for each in reversed(targets):  # the main file last: its presence implies the others
            each.publish()
    return Report(
        op=op.name,
        device=where,
        note=note,
        plan=launched,
        rows=rows,
        cols=cols,
        input_dtype=x.dtype.name,
        dtype=y_dtype.name,
        outputs=tuple(map(str, paths)),
        bytes_moved=x.bytes + sum(each.bytes for each in targets),
        seconds=seconds,
    )


def _check_streams(given: dict[str, Path], target: Path, *, stats: bool) -> None:
    """Check what is read from standard input and written to standard output."""
    if list(given.values()).count(STANDARD) > 1:
        raise ValueError("- is standard input, which holds one array only")
    if target == STANDARD and stats:
        raise ValueError(
            "stats: standard output (-) has no name to derive the statistics' files from: give an output file"
        )
    if target == STANDARD:
        check_standard_output()


def _write_block(
    compute: Callable[[Array], tuple[Array, ...]], x: Array, targets: list[Target | Pipe]
) -> dict[str, Any] | None:
    """Compute a block of rows and write its results; return the plan that was launched, if one was."""
    with row_ops.observed() as plans:
        results = compute(x)
    for each, result in zip(targets, results, strict=True):
        each.write(result)
    return plans[-1].as_dict() if plans else None


def _on(
    where: str, function: Callable[..., Any], parameters: dict[str, Array], keywords: dict[str, Any]
) -> Callable[[Array], tuple[Array, ...]]:
    """Return a function from a host block to host results, computed by the CPU or the current device."""
    if where == "cpu":
        move = fetch = np.asarray
    else:
        move, fetch = devices.cupy().asarray, devices.cupy().asnumpy
    moved = {name: move(each) for name, each in parameters.items()}

    def compute(block: Array) -> tuple[Array, ...]:
        results = function(move(block), **moved, **keywords)
        return tuple(map(fetch, results if isinstance(results, tuple) else (results,)))

    return compute


def _check_options(op: Op, given: dict[str, Path], *, eps: float | None, stats: bool) -> None:
    for name in given:
        if name != "x" and name not in op.parameters:
            raise ValueError(f"{name}: {op.name} takes no {name}")
    if eps is not None and not op.row.has_eps:
        raise ValueError(f"eps: {op.name} takes no eps")
    if stats and not op.stats:
        raise ValueError(f"stats: {op.name} has no statistics to save")


def choose_device(asked: Literal["auto", "gpu", "cpu"]) -> tuple[str, str]:
    """Return "cpu" or the current device's name, and why no device is used, if this machine seems to have one."""
    if asked == "cpu":
        return "cpu", ""
    try:
        return devices.present_limits().name, ""
    except devices.NoDeviceError as error:
        if asked == "gpu":
            raise
        from cupynorm.tools.environment import is_gpu_wanted  # noqa: PLC0415  its import takes 20 ms

        return "cpu", str(error) if is_gpu_wanted() else ""
