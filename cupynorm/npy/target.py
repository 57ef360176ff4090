"""Writes a .npy file: under a temporary name until it is complete, or to standard output."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import secrets
import shutil
import stat
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.npy.locks import try_lock
from cupynorm.npy.paths import STANDARD, FileError, naming

if TYPE_CHECKING:
    from pathlib import Path

    from cupynorm._dtypes import Dtype

    Array = np.ndarray[Any, Any]

TEMPORARY = re.compile(r"\.cupynorm-[0-9a-f]{16}\.tmp")
YOUNG_SECONDS = 10.0  # a younger temporary file may not have taken its lock yet


def npy_header(shape: tuple[int, ...], dtype: Dtype) -> bytes:
    """Return the header of a .npy file that holds an array in C order."""
    head = io.BytesIO()
    told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, told)
    return head.getvalue()


class Target:
    """A .npy file in C order, written under a temporary name in the same folder until publish() renames it.

    Its disk space is allocated first. Temporary files that killed processes left in the folder, whose locks are free,
    are removed. With `force`, the new file takes the permissions of the one it replaces. bfloat16 is stored as NumPy
    stores it, as raw two-byte elements (V2). Raises FileError.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Dtype, *, force: bool) -> None:
        self.path = path
        self._force = force
        self._temporary = path.parent / f".cupynorm-{secrets.token_hex(8)}.tmp"
        _remove_abandoned(path.parent)
        size = self.bytes = math.prod(shape) * dtype.itemsize
        with naming(path):
            mode = mode_of(path) if force else None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._file = os.fdopen(open_like(self._temporary, flags, mode), "wb")
        try:
            try_lock(self._file)
            with naming(path):
                free = shutil.disk_usage(path.parent).free
                if free < size:
                    raise FileError(f"{path}: needs {size} bytes, its disk has {free} left")
                self._file.write(npy_header(shape, dtype))
                self._file.flush()
                allocate(self._file.fileno(), self._file.tell() + size)
        except BaseException:
            self.discard()
            raise

    def write(self, block: Array) -> None:
        """Append a block of rows."""
        with naming(self.path):
            self._file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def sync(self) -> None:
        """Wait until everything is on the disk. Nothing can be written after this.

        The file stays open, and locked, until it is renamed: otherwise another process would consider it abandoned.
        """
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            if sys.platform == "win32":  # which has no such locks and cannot rename an open file
                self._file.close()

    def publish(self) -> None:
        """Give the file its name. Without `force`, a file that was created under that name in the meantime is kept."""
        with naming(self.path):
            if self._force:
                mode = mode_of(self.path)
                if mode is not None:
                    with contextlib.suppress(OSError):  # some file systems have no permissions
                        self._temporary.chmod(mode)
                self._temporary.replace(self.path)
            else:
                self._publish_new()
            self._file.close()
            with contextlib.suppress(OSError):  # some file systems cannot sync folders
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    def _publish_new(self) -> None:
        try:
            os.link(self._temporary, self.path)  # unlike a rename, it never replaces
        except FileExistsError:
            raise FileError(
                f"{self.path}: was created by another process in the meantime: --force replaces it"
            ) from None
        except OSError:  # a file system without links: create an empty file exclusively, then replace it
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            try:
                self._temporary.replace(self.path)
            except OSError:
                self.path.unlink()
                raise
        else:
            self._temporary.unlink()

    def discard(self) -> None:
        """Remove the temporary file."""
        with contextlib.suppress(OSError):  # closing flushes, which fails again if the disk is full
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


class Pipe:
    """Standard output with the interface of Target. Written bytes cannot be taken back."""

    def __init__(self, shape: tuple[int, ...], dtype: Dtype) -> None:
        self.bytes = math.prod(shape) * dtype.itemsize
        self._write(memoryview(npy_header(shape, dtype)))

    def write(self, block: Array) -> None:
        """Append a block of rows."""
        self._write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def _write(self, data: memoryview) -> None:
        """Write without a buffer: Python would try to flush one again, and fail again, at exit."""
        with naming(STANDARD):
            while data:
                data = data[os.write(1, data) :]

    def sync(self) -> None:
        """Do nothing: everything is written."""

    def publish(self) -> None:
        """Do nothing: everything is written."""

    def discard(self) -> None:
        """Do nothing: output cannot be taken back."""


def mode_of(path: Path) -> int | None:
    """Return the permission bits of a regular file that will be replaced; None for anything else, links included."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_mode & 0o777 if stat.S_ISREG(found.st_mode) else None


def open_like(path: Path, flags: int, mode: int | None) -> int:
    """Open or create a file that will replace one of that mode: nobody else may read it."""
    if mode is None:
        return os.open(path, flags, 0o666)
    descriptor = os.open(path, flags, mode | 0o600)  # the owner must be able to write
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # a file system without permissions, or another user's file
            os.fchmod(descriptor, mode | 0o600)
    return descriptor


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of killed processes: those whose locks nobody holds."""
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
                    if try_lock(file):
                        os.unlink(entry.path)  # noqa: PTH108


def allocate(descriptor: int, size: int) -> None:
    """Allocate disk space now, where the system can, so that a full disk is noticed before hours of work."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
