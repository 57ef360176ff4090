"""A .npy file in, its rows through an op, a .npy file out: block by block, so that no file is too large."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import math
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, dtype_name, dtype_of
from cupynorm.call.arguments import trailing_axes
from cupynorm.invoke import row_ops
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cupynorm.catalog.op_table import Op

    Array = np.ndarray[Any, Any]

BLOCK_BYTES = 64 << 20  # of the wider of input and output; the op may need several times as much
STANDARD = Path("-")  # standard input as a source, standard output as a target
SPOOLED_BYTES = 1 << 20  # that are copied at a time
MOST_BYTES = 2**63  # an array has fewer
MOST_AXES = 64  # of an array of NumPy's
RAW_TYPES = ("|V2", "<u2", ">u2")  # what holds bfloat16 in a .npy file: NumPy saves the first


class FileError(Exception):
    """A file that cannot be read or written. The message names it."""


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error


class Source:
    """A .npy file, read by blocks of rows. Header, dtype and size are checked first; nothing is unpickled.

    `-` is standard input, which may be a pipe: its blocks are read in their order, and its size shows at the end. dtype is what
    read() returns: big-endian files are swapped, and raw two-byte elements become bfloat16 if `bfloat16` says so.
    Raises FileError.
    """

    def __init__(self, path: Path, *, bfloat16: bool = False) -> None:
        self.path = path
        self._is_pipe = path == STANDARD
        with _naming(path):
            if self._is_pipe:
                self._file: Any = open(0, "rb", closefd=False)  # noqa: SIM115  it is closed by close()
            else:
                if not stat.S_ISREG(path.stat().st_mode):
                    raise FileError(f"{path}: is not a regular file")
                self._file = path.open("rb")
        try:
            self.shape, self._fortran, self._stored = self._header()
            self.is_raw = self._stored.str in RAW_TYPES
            self.dtype = self._native_dtype(bfloat16=bfloat16)
            self.bytes = math.prod(self.shape) * self._stored.itemsize
            if self._is_pipe:
                self._check_bytes()
            if self._is_pipe and self._fortran:
                self._spool()
            self._check_size()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, start: int, stop: int, axes: int) -> Array:
        """Return rows start to stop, flattened over the leading axes, as (stop - start, *trailing axes)."""
        at = len(self.shape) - axes
        leading, trailing = self.shape[:at] or (1,), self.shape[at:]
        with _naming(self.path):
            if self._fortran:
                try:
                    mapped = np.memmap(self._file, self._stored, "r", self._offset, self.shape, "F")
                except ValueError as error:
                    raise FileError(f"{self.path}: became shorter while it was read") from error
                block = mapped.reshape(leading + trailing, order="F")[
                    np.unravel_index(np.arange(start, stop), leading)
                ]
            else:  # read, not mapped: a file that shrinks meanwhile is an error here, and a crash when mapped
                row_bytes = math.prod(trailing) * self._stored.itemsize
                raw = np.empty((stop - start) * row_bytes, np.uint8)
                if not self._is_pipe:
                    self._file.seek(self._offset + start * row_bytes)
                if self._file.readinto(raw.data) != raw.size:
                    how = "ends too soon" if self._is_pipe else "became shorter while it was read"
                    raise FileError(f"{self.path}: {how}")
                block = raw.view(self._stored).reshape(stop - start, *trailing)
        native = self._stored.newbyteorder("=")
        rows: Array = np.ascontiguousarray(block.astype(native, copy=False)).view(self.dtype)
        return rows

    def read_whole(self) -> Array:
        """Return the whole array."""
        rows: Array = self.read(0, 1, len(self.shape))[0]
        return rows

    def _header(self) -> tuple[tuple[int, ...], bool, Dtype]:
        if self._file.peek(4)[:4] == b"PK\x03\x04":
            raise FileError(f"{self.path}: is a zip archive, such as .npz: save its array as .npy first")
        try:
            version = np.lib.format.read_magic(self._file)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"its format has version {version}")
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(self._file)
        except OSError:
            raise
        except Exception as error:  # a header may hold anything: whatever it breaks, it is the file's fault
            raise FileError(f"{self.path}: is not a .npy file, or is damaged ({error})") from error
        self._offset = 0 if self._is_pipe else self._file.tell()
        if len(shape) > MOST_AXES:
            raise FileError(f"{self.path}: has {len(shape)} axes, {MOST_AXES} at most are possible")
        if any(type(extent) is not int for extent in shape):
            raise FileError(f"{self.path}: is damaged: its header says shape {shape} of {dtype}")
        if not shape:
            raise FileError(
                f"{self.path}: holds a single number (a 0-d array): there is no axis to normalise"
            )
        if min(shape) < 0:
            raise FileError(f"{self.path}: is damaged: its header says shape {shape}")
        return shape, fortran and len(shape) > 1, dtype

    def _native_dtype(self, *, bfloat16: bool) -> Dtype:
        if self._stored.hasobject:
            raise FileError(f"{self.path}: holds pickled Python objects, which are never loaded")
        if self.is_raw and bfloat16:
            return dtype_of("bfloat16")
        if self._stored.str == "|V2":
            raise FileError(
                f"{self.path}: holds raw two-byte elements (V2), as NumPy saves bfloat16: "
                "give --input-dtype bfloat16"
            )
        native = self._stored.newbyteorder("=")
        try:
            dtype_name(native)
        except TypeError as error:
            raise FileError(f"{self.path}: {error}") from None
        return native

    def _spool(self) -> None:
        """Copy the array from a pipe into a file without a name: rows in Fortran order do not come one after the other.

        Nothing behind the array is waited for.
        """
        with _naming(self.path), contextlib.ExitStack() as unfinished:
            file = unfinished.enter_context(tempfile.TemporaryFile())
            left = self.bytes
            while left and (piece := self._file.read(min(left, SPOOLED_BYTES))):
                file.write(piece)
                left -= len(piece)
            file.seek(0)
            unfinished.pop_all()  # close() closes it from here on
        self._file, self._is_pipe = file, False

    def _check_size(self) -> None:
        if self._is_pipe:
            return
        needed = self._offset + self.bytes
        with _naming(self.path):
            there = os.fstat(self._file.fileno()).st_size
        if there < needed:
            raise FileError(
                f"{self.path}: is truncated: shape {self.shape} of {self._stored} needs {needed} bytes, "
                f"it has {there}"
            )
        self._check_bytes()

    def _check_bytes(self) -> None:
        if math.prod(max(1, extent) for extent in self.shape) * self._stored.itemsize >= MOST_BYTES:
            raise FileError(f"{self.path}: is damaged: its header says shape {self.shape} of {self._stored}")


def npy_header(shape: tuple[int, ...], dtype: Dtype) -> bytes:
    """Return what a .npy file of an array in C order begins with."""
    head = io.BytesIO()
    told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, told)
    return head.getvalue()


class Target:
    """A .npy file, written in C order under a temporary name in the same folder until publish() renames it.

    Its space is taken up front. What a killed process has left in that folder is removed: its lock is free. With force, what is
    replaced gives its permissions. bfloat16 is stored as NumPy stores it, as raw two-byte elements (V2).
    Raises FileError.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Dtype, *, force: bool) -> None:
        self.path = path
        self._force = force
        self._temporary = path.parent / f".cupynorm-{secrets.token_hex(8)}.tmp"
        _remove_abandoned(path.parent)
        size = self.bytes = math.prod(shape) * dtype.itemsize
        with _naming(path):
            mode = mode_of(path) if force else None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._file = os.fdopen(open_like(self._temporary, flags, mode), "wb")
        try:
            _try_lock(self._file)
            with _naming(path):
                free = shutil.disk_usage(path.parent).free
                if free < size:
                    raise FileError(f"{path}: needs {size} bytes, its disk has {free} left")
                self._file.write(npy_header(shape, dtype))
                self._file.flush()
                _allocate(self._file.fileno(), self._file.tell() + size)
        except BaseException:
            self.discard()
            raise

    def write(self, block: Array) -> None:
        """Append a block of rows."""
        with _naming(self.path):
            self._file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def sync(self) -> None:
        """Wait until everything is on the disk. Nothing can be written any more.

        The file stays open until it has its name: without its lock another process would take it for abandoned.
        """
        with _naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            if sys.platform == "win32":  # which has no such locks, and renames no open file
                self._file.close()

    def publish(self) -> None:
        """Give the file its name. Without force, a file that has got that name meanwhile is left alone."""
        with _naming(self.path):
            if self._force:
                mode = mode_of(self.path)
                if mode is not None:
                    with contextlib.suppress(OSError):  # some file systems have no permissions
                        self._temporary.chmod(mode)
                self._temporary.replace(self.path)
            else:
                self._publish_new()
            self._file.close()
            with contextlib.suppress(OSError):  # some file systems cannot
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    def _publish_new(self) -> None:
        try:
            os.link(self._temporary, self.path)  # unlike a rename, it never replaces
        except FileExistsError:
            raise FileError(f"{self.path}: was made by someone else meanwhile: --force replaces it") from None
        except OSError:  # a file system without links: take the name first, then replace our own empty file
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            try:
                self._temporary.replace(self.path)
            except OSError:
                self.path.unlink()
                raise
        else:
            self._temporary.unlink()

    def discard(self) -> None:
        """Remove what has not been published."""
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails once more
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


class Pipe:
    """Standard output in a Target's place: what is written is out at once, and cannot be taken back."""

    def __init__(self, shape: tuple[int, ...], dtype: Dtype) -> None:
        self.bytes = math.prod(shape) * dtype.itemsize
        self._write(memoryview(npy_header(shape, dtype)))

    def write(self, block: Array) -> None:
        """Append a block of rows."""
        self._write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def _write(self, data: memoryview) -> None:
        """Write without a buffer: one that cannot be emptied would be tried, and fail, again at the end."""
        with _naming(STANDARD):
            while data:
                data = data[os.write(1, data) :]

    def sync(self) -> None:
        """Do nothing: everything is out."""

    def publish(self) -> None:
        """Do nothing: everything is out."""

    def discard(self) -> None:
        """Do nothing: what is out is out."""


TEMPORARY = re.compile(r"\.cupynorm-[0-9a-f]{16}\.tmp")
YOUNG_SECONDS = 10.0  # between a file's beginning and its lock there is a moment


def mode_of(path: Path) -> int | None:
    """Return the permission bits of a regular file that will be replaced. A link has none that matter."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_mode & 0o777 if stat.S_ISREG(found.st_mode) else None


def open_like(path: Path, flags: int, mode: int | None) -> int:
    """Open or create a file that will replace one of that mode: who may not read that one may not read it either."""
    if mode is None:
        return os.open(path, flags, 0o666)
    descriptor = os.open(path, flags, mode | 0o600)  # its owner writes it
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # a file system without permissions, or another user's file
            os.fchmod(descriptor, mode | 0o600)
    return descriptor


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed, however its process ends; say whether that could be done."""
    if sys.platform == "win32":
        return False
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or the file system has no locks
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files of ours whose processes were killed: nobody holds their locks."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not TEMPORARY.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                mine = os.name != "posix" or found.st_uid == os.geteuid()
                if not (
                    stat.S_ISREG(found.st_mode) and mine and time.time() - found.st_mtime > YOUNG_SECONDS
                ):
                    continue
                with open(entry.path, "rb") as file:  # noqa: PTH123
                    if _try_lock(file):
                        os.unlink(entry.path)  # noqa: PTH108


def _allocate(descriptor: int, size: int) -> None:
    """Take the space now, where the system can: a full disk is then found before hours of work."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


@dataclasses.dataclass(frozen=True)
class Report:
    """What run() did, and where."""

    op: str
    device: str  # "cpu", or the device's name
    note: str  # why not on a device, where that was not asked for
    plan: dict[str, Any] | None
    rows: int
    cols: int
    input_dtype: str
    dtype: str
    outputs: tuple[str, ...]
    bytes_moved: int  # read and written, in the files
    seconds: float  # from the first block read to the last one on the disk

    @property
    def bytes_per_second(self) -> float:
        """Bytes of files, a second."""
        return self.bytes_moved / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the rate, for JSON."""
        return {**dataclasses.asdict(self), "bytes_per_second": self.bytes_per_second}


def run(
    op: Op,
    source: Path,
    target: Path,
    *,
    axis: int | tuple[int, ...] = -1,
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
    """Put `source` through `op` into `target`, and with `stats` its statistics into files beside that.

    `-` as source or target is standard input or output, which may be pipes.
    `bfloat16`: raw two-byte elements of the files are bfloat16. `progress` is told rows done and rows in all.
    A forced plan demands a device. Nothing is at `target` unless everything went well. Raises FileError,
    NoDeviceError, ValueError for options that the op does not take, and what the op raises.
    """
    given = {
        name: path for name, path in {"x": source, "gamma": gamma, "beta": beta}.items() if path is not None
    }
    _check_options(op, given, eps=eps, stats=stats)
    if list(given.values()).count(STANDARD) > 1:
        raise ValueError("- is standard input, and is one array only")
    if target == STANDARD and stats:
        raise ValueError(
            "stats: standard output (-) has no name for the files of the statistics: give an output with one"
        )
    if target == STANDARD:
        check_standard_output()
    statistics = op.stats if stats else ()
    paths = [target, *(target.with_name(f"{target.stem}.{name}.npy") for name in statistics)]
    with contextlib.ExitStack() as stack:
        sources = {
            name: stack.enter_context(contextlib.closing(Source(path, bfloat16=bfloat16)))
            for name, path in given.items()
        }
        for path in paths:
            if path != STANDARD:
                _check_target(path, list(given.values()), force=force)
        if bfloat16 and not any(each.is_raw for each in sources.values()):
            raise ValueError(
                f"bfloat16: {source} holds no raw two-byte elements, which could be read as bfloat16"
            )

        x = sources.pop("x")
        axes = trailing_axes(axis, x.shape)
        leading, trailing = x.shape[: len(x.shape) - axes], x.shape[len(x.shape) - axes :]
        rows, cols = math.prod(leading), math.prod(trailing)
        if not cols:
            raise FileError(
                f"{source}: has shape {x.shape}: its rows are empty, and have nothing to normalise"
            )
        y_dtype = dtype_of(dtype) if dtype else x.dtype
        where, note = choose_device("gpu" if plan and device == "auto" else device)
        keywords: dict[str, Any] = {"axis": tuple(range(-axes, 0)), "dtype": y_dtype, "plan": plan}
        keywords |= {"return_stats": True} if stats else {}
        keywords |= {} if eps is None else {"eps": eps}
        parameters = {name: each.read_whole() for name, each in sources.items()}
        compute = _on(where, op.function, parameters, keywords)
        compute(np.empty((0, *trailing), x.dtype))  # every check, and nothing computed

        targets: list[Target | Pipe] = []
        kinds = [(x.shape, y_dtype), *[(leading, compute_dtype(x.dtype, y_dtype))] * len(statistics)]
        for path, (shape, kind) in zip(paths, kinds, strict=True):
            made = Pipe(shape, kind) if path == STANDARD else Target(path, shape, kind, force=force)
            targets.append(made)
            stack.callback(targets[-1].discard)
        started = time.perf_counter()
        launched = None
        step = max(1, BLOCK_BYTES // (cols * max(x.dtype.itemsize, y_dtype.itemsize)))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            with row_ops.observed() as plans:
                results = compute(x.read(start, stop, axes))
            if start == 0 and plans:  # the last block, of fewer rows, may have another
                launched = plans[-1].as_dict()
            for each, result in zip(targets, results, strict=True):
                each.write(result)
            progress(stop, rows)
        for each in targets:
            each.sync()
        seconds = time.perf_counter() - started
        for each in reversed(targets):  # the main file last: where it is, the others are
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


def _on(
    where: str, function: Callable[..., Any], parameters: dict[str, Array], keywords: dict[str, Any]
) -> Callable[[Array], tuple[Array, ...]]:
    """Return `function` from host block to host results, computed on the CPU or on the present device."""
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


def check_standard_output() -> None:
    """Raise ValueError where standard output would show a .npy file to a person."""
    if os.isatty(1):
        raise ValueError("output: standard output is a terminal, which .npy files do not suit: redirect it")


def _check_target(path: Path, sources: list[Path], *, force: bool) -> None:
    if not os.path.lexists(path):  # a link to nowhere is there, too
        return
    for source in sources:
        if source != STANDARD and path.exists() and path.samefile(source):
            raise FileError(f"{path}: is the input as well: give the output another name")
    if not force:
        raise FileError(f"{path}: exists already: --force replaces it")
    # a link is replaced, never the file that it leads to; one such as /dev/stdout stays
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: is not a regular file")


def choose_device(asked: Literal["auto", "gpu", "cpu"]) -> tuple[str, str]:
    """Return "cpu" or the present device's name, and why it is not a device, if one was to be expected here."""
    if asked == "cpu":
        return "cpu", ""
    try:
        return devices.present_limits().name, ""
    except devices.NoDeviceError as error:
        if asked == "gpu":
            raise
        from cupynorm.tools.environment import is_gpu_wanted  # noqa: PLC0415  20 ms, needed only here

        return "cpu", str(error) if is_gpu_wanted() else ""
