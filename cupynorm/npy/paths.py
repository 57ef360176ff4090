"""File names from the user: errors that name them, and `-` for the standard streams."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STANDARD = Path("-")  # standard input as a source, standard output as a target


class FileError(Exception):
    """A file cannot be read or written. The message names it."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a FileError that names `path`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error


def check_standard_output() -> None:
    """Raise ValueError if standard output is a terminal."""
    if os.isatty(1):
        raise ValueError("output: standard output is a terminal, and .npy files are binary: redirect it")


def check_target(path: Path, sources: list[Path], *, force: bool) -> None:
    """Raise FileError if `path` must not be written: it is an input, exists without `force`, or is no regular file."""
    if not os.path.lexists(path):  # a dangling link counts as an existing file
        return
    for source in sources:
        if source != STANDARD and path.exists() and path.samefile(source):
            raise FileError(f"{path}: is the input as well: give the output another name")
    if not force:
        raise FileError(f"{path}: exists already: --force replaces it")
    # A link to a file is replaced, never the file that it points to. A link to a device such as /dev/stdout is kept.
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: is not a regular file")
