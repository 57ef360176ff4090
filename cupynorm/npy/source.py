"""Reads a .npy file, or a pipe that carries one, by blocks of rows."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, dtype_name, dtype_of, input_dtype
from cupynorm.npy.paths import STANDARD, FileError, naming

if TYPE_CHECKING:
    from pathlib import Path

    Array = np.ndarray[Any, Any]

COPIED_BYTES = 1 << 20  # per read, when a pipe is copied to a temporary file
MOST_BYTES = 2**63  # NumPy arrays are smaller
MOST_AXES = 64  # of a NumPy array
RAW_TYPES = ("|V2", "<u2", ">u2")  # how .npy files store bfloat16; NumPy itself writes the first


class Source:
    """A .npy file that is read by blocks of rows. Its header, dtype and size are checked first; nothing is unpickled.

    `-` is standard input, which may be a pipe: its blocks must be read in order, and a wrong size is noticed at the end
    only. `dtype` is what read() returns: big-endian elements are swapped, and raw two-byte elements become bfloat16
    with `bfloat16`. integers: whether it may hold what row ops convert as they read it. Raises FileError.
    """

    def __init__(self, path: Path, *, bfloat16: bool = False, integers: bool = False) -> None:
        self.path = path
        self._is_pipe = path == STANDARD
        with naming(path):
            if self._is_pipe:
                self._file: Any = open(0, "rb", closefd=False)  # noqa: SIM115  close() closes it
            else:
                if not stat.S_ISREG(path.stat().st_mode):
                    raise FileError(f"{path}: is not a regular file")
                self._file = path.open("rb")
        try:
            self.shape, self._fortran, self._stored = self._header()
            self.is_raw = self._stored.str in RAW_TYPES
            self.dtype = self._native_dtype(bfloat16=bfloat16, integers=integers)
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
        with naming(self.path):
            if self._fortran:
                try:
                    mapped = np.memmap(self._file, self._stored, "r", self._offset, self.shape, "F")
                except ValueError as error:
                    raise FileError(f"{self.path}: became shorter while it was read") from error
                block = mapped.reshape(leading + trailing, order="F")[
                    np.unravel_index(np.arange(start, stop), leading)
                ]
            else:  # not mapped: reading a file that shrinks raises an error, a mapping of it would crash
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
        except Exception as error:  # a damaged header may raise anything
            raise FileError(f"{self.path}: is not a .npy file, or is damaged ({error})") from error
        self._offset = 0 if self._is_pipe else self._file.tell()
        if len(shape) > MOST_AXES:
            raise FileError(f"{self.path}: has {len(shape)} axes, the most possible is {MOST_AXES}")
        if any(type(extent) is not int for extent in shape):
            raise FileError(f"{self.path}: is damaged: its header says shape {shape} of {dtype}")
        if not shape:
            raise FileError(
                f"{self.path}: holds a single number (a 0-d array): there is no axis to normalise"
            )
        if min(shape) < 0:
            raise FileError(f"{self.path}: is damaged: its header says shape {shape}")
        return shape, fortran and len(shape) > 1, dtype

    def _native_dtype(self, *, bfloat16: bool, integers: bool) -> Dtype:
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
            if integers:
                input_dtype(native, on_device=True)
            else:
                dtype_name(native)
        except TypeError as error:
            raise FileError(f"{self.path}: {error}") from None
        return native

    def _spool(self) -> None:
        """Copy the array from a pipe to an unnamed temporary file, because rows in Fortran order are not contiguous.

        Reads no further than the end of the array.
        """
        with naming(self.path), contextlib.ExitStack() as unfinished:
            file = unfinished.enter_context(tempfile.TemporaryFile())
            left = self.bytes
            while left and (piece := self._file.read(min(left, COPIED_BYTES))):
                file.write(piece)
                left -= len(piece)
            file.seek(0)
            unfinished.pop_all()  # from now on, close() closes it
        self._file, self._is_pipe = file, False

    def _check_size(self) -> None:
        if self._is_pipe:
            return
        needed = self._offset + self.bytes
        with naming(self.path):
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
