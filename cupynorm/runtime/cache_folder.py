"""The folder in which cupynorm keeps files between processes."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def folder() -> Path:
    """Return CUPYNORM_CACHE_DIR, else cupynorm in the user's folder for caches. Nothing is made there yet.

    A user without a home gets a path that is not absolute; nobody should keep anything there.
    """
    from pathlib import Path  # noqa: PLC0415  10 ms, which `import cupynorm` need not wait for

    chosen = os.environ.get("CUPYNORM_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))  # noqa: PTH100, PTH111  no home: Path raises
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117  XDG: a relative one is to be ignored
        base = os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base, "cupynorm")


def holds(name: str) -> bool:
    """Say whether there is something of this name in the folder."""
    return os.path.lexists(folder() / name)


def why_unusable(path: Path) -> str:
    """Say why a folder is not used; empty where it can be, also if it does not exist yet.

    Files in it decide which code runs, so no other user may be able to write them. The exception is root, who could
    anyway, and may fill a folder for everyone.
    """
    if not path.is_absolute():
        return f"{path} is not absolute: this user has no home"
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder"
    return _foreign(path, status)


def read(path: Path) -> tuple[bytes, float]:
    """Return a file's contents and modification time; OSError if it cannot be read or others could have written it."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        reason = "" if stat.S_ISREG(status.st_mode) else f"{path} is not a regular file"
        reason = reason or _foreign(path, status)
        if reason:
            raise PermissionError(reason)
        return file.read(), status.st_mtime


def _foreign(path: Path, status: os.stat_result) -> str:
    """Say why somebody else could have written a file or a folder; empty if nobody could."""
    if os.name != "posix":
        return ""
    if status.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to user {status.st_uid}"
    return f"{path} can be written by others" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
