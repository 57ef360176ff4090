"""Advisory locks on open files. The system releases them when the process ends, however it ends. Windows has none."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from cupynorm.npy.paths import FileError

if TYPE_CHECKING:
    from pathlib import Path


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed. Return False if another process holds it, or there are no locks here."""
    if sys.platform == "win32":
        return False
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


def lock(file: IO[bytes], path: Path) -> None:
    """Lock a file until it is closed. Raises FileError, which names `path`, if another process holds it."""
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(f"{path}: another process is writing it") from None
