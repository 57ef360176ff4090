"""A .npy file of rows whose writing can be continued by another process after an interruption.

OUTPUT.part holds the finished rows, and OUTPUT.part.json, the note, says what they are and how many. The rows of a
window are on the disk before the note counts them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from cupynorm.npy.locks import lock
from cupynorm.npy.paths import FileError, naming
from cupynorm.npy.target import Pipe, Target, allocate, mode_of, npy_header, open_like

Array = np.ndarray[Any, Any]

SCHEMA = 2  # of the note, and of what its digest covers


def unfinished(target: Path) -> tuple[int, int] | None:
    """Return how many texts an interrupted run has finished, and how many it has; None if there is no such run."""
    note, part = _beside(target)
    try:
        told = json.loads(note.read_text("utf-8"))
        done, texts = int(told["done"]), int(told["texts"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (done, texts) if done and part.exists() else None


def _beside(target: Path) -> tuple[Path, Path]:
    """Return the names of the note and of the part."""
    return target.with_name(f"{target.name}.part.json"), target.with_name(f"{target.name}.part")


class Part(Target):
    """A target whose finished rows stay in a part, with a note, until it is published.

    `digest` identifies the rows: a part with another digest is not continued. `done` is the number of finished rows.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: np.dtype[Any], digest: str, *, force: bool
    ) -> None:
        self.path = path
        self.done = 0
        self._force = force
        self._note, self._temporary = _beside(path)
        self._told: dict[str, Any] = {"schema": SCHEMA, "digest": digest, "texts": shape[0]}
        self._written = hashlib.sha256()  # of the finished rows
        self._row_bytes = shape[1] * dtype.itemsize
        self.bytes = math.prod(shape) * dtype.itemsize
        head = npy_header(shape, dtype)
        with naming(self._temporary):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
            mode = mode_of(path) if force else None
            self._file = os.fdopen(open_like(self._temporary, flags, mode), "wb")
        try:
            size = self._take()
            self.done = self._ready(size, len(head), len(head) + self.bytes)
        except BaseException:  # the part may belong to another run: keep it
            self._file.close()
            raise
        try:
            self._begin(head)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the file. Finished rows stay for the next run; a part without any is removed."""
        if self.done:
            with contextlib.suppress(OSError):  # closing flushes, which fails again if the disk is full
                self._file.close()
        else:
            self.discard()

    def append(self, rows: Array) -> None:
        """Write rows, and count them in the note when they are on the disk."""
        self.write(rows)
        self._written.update(np.ascontiguousarray(rows).data.cast("B"))
        with naming(self._temporary):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._count(self.done + len(rows))

    def publish(self) -> None:
        """Give the file its name, and remove the note."""
        super().publish()
        with contextlib.suppress(OSError):
            self._note.unlink()

    def discard(self) -> None:
        """Remove the part and its note."""
        super().discard()
        with contextlib.suppress(OSError):
            self._note.unlink()

    def _take(self) -> int:
        """Lock the part, and return its size."""
        with naming(self._temporary):
            found = os.fstat(self._file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise FileError(f"{self._temporary}: is not a regular file")
            lock(self._file, self._temporary)
            return os.fstat(self._file.fileno()).st_size

    def _ready(self, size: int, head: int, whole: int) -> int:
        """Return how many rows are finished. A part is continued only if its note says that it belongs to this run."""
        if not size:
            return 0
        told = self._read_note()
        problem = None
        if told is None:
            problem = "exists, without a note that says what it is"
        elif {name: told.get(name) for name in self._told} != self._told:
            problem = "belongs to an unfinished run with other texts, another model or other options"
        elif not isinstance(told.get("done"), int) or not 0 <= told["done"] <= self._told["texts"]:
            problem = "has a note that is damaged"
        elif told["done"] and size < whole:
            problem = "became shorter"
        elif told["done"] and told.get("written") != self._read_back(head, told["done"]):
            problem = "does not hold the rows that its note describes"
        if problem is None and told is not None:
            return int(told["done"])
        if not self._force:
            raise FileError(f"{self._temporary}: {problem}: --force starts again")
        self._written = hashlib.sha256()
        return 0

    def _read_back(self, head: int, rows: int) -> str:
        """Return the checksum of the first rows of the file, and continue the checksum from there."""
        self._written = hashlib.sha256()
        left = rows * self._row_bytes
        with naming(self._temporary), self._temporary.open("rb") as file:
            file.seek(head)
            while left and (piece := file.read(min(left, 1 << 22))):
                self._written.update(piece)
                left -= len(piece)
        return self._written.hexdigest()

    def _begin(self, head: bytes) -> None:
        """Allocate space for all rows, and move to the end of the finished ones."""
        with naming(self._temporary):
            if not self.done:
                self._count(0)
                self._file.truncate(0)
            self._file.write(head)
            self._file.flush()
            allocate(self._file.fileno(), len(head) + self.bytes)
            self._file.seek(len(head) + self.done * self._row_bytes)

    def _read_note(self) -> dict[str, Any] | None:
        try:
            told = json.loads(self._note.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return told if isinstance(told, dict) else None

    def _count(self, done: int) -> None:
        """Replace the note atomically by one that counts so many rows."""
        new = self._note.with_name(f"{self._note.name}.new")
        with naming(self._note):
            try:
                with new.open("w", encoding="utf-8") as file:
                    json.dump({**self._told, "done": done, "written": self._written.hexdigest()}, file)
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(self._note)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
        self.done = done


class PipedPart(Pipe):
    """Standard output with the interface of Part. It cannot be continued."""

    done = 0

    def append(self, rows: Array) -> None:
        """Write rows."""
        self.write(rows)

    def leave(self) -> None:
        """Do nothing: output cannot be taken back."""
