"""Files on disk that are found by a key: compiled kernels, so that a new process neither loads the compiler nor waits.

A cache is a matter of speed only: whatever is wrong with the folder or a file in it is a miss, never an error.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple
from cupynorm.runtime import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Cubin", "folder", "key", "load", "store", "usage", "why_unusable"]

FORMAT = "1"  # of the files, and of what goes into a key
MAGIC = b"\x93cupynorm cubin 1\n"  # starts with no letter: neither an ELF nor a PTX does that
CHECKSUM_BYTES = 32
MOST_BYTES = 256 << 20
DAY = 86400
UNUSED_SECONDS = 90 * DAY
ABANDONED_SECONDS = 3600  # no writer takes that long: it has died
SUFFIX, PLAN_SUFFIX, DIGEST_SUFFIX, UNFINISHED = ".cubin", ".plan", ".digest", ".new"


class Cubin(NamedTuple):
    """A compiled module with one kernel."""

    image: bytes
    lowered_name: str  # the kernel's, as the driver knows it
    compiler: str  # who made it, for those who look into the file


def folder() -> Path:
    """Return the folder that holds the files."""
    return cache_folder.folder() / "cubins"


def key(*parts: str) -> str:
    """Return the name of a cubin compiled from these parts."""
    import hashlib  # noqa: PLC0415  4 ms, which `import cupynorm` need not wait for

    return hashlib.sha256("\0".join((FORMAT, *parts)).encode()).hexdigest()


def why_unusable() -> str:
    """Say why the folder is not used; empty where it can be, also if it does not exist yet.

    A cubin is code that runs: no other user but root may be able to write it.
    """
    return cache_folder.why_unusable(folder())


def load(key: str) -> Cubin | None:
    """Return the cubin stored under this key; None if there is none that is complete and can be trusted."""
    body = load_body(key, SUFFIX, MAGIC)
    return None if body is None else _decode(body)


def load_body(key: str, suffix: str, magic: bytes) -> bytes | None:
    """Return what store_body() has kept; None if there is nothing that is complete and can be trusted."""
    if why_unusable():
        return None
    path = folder() / (key + suffix)
    try:
        data, used = cache_folder.read(path)
    except OSError:
        return None
    start = len(magic) + CHECKSUM_BYTES
    body = data[start:]
    if data[: len(magic)] != magic or data[len(magic) : start] != _checksum(key, body):
        return None
    if time.time() - used > DAY:
        with contextlib.suppress(OSError):  # read-only, or pruned by somebody else
            os.utime(path)
    return body


def store(key: str, cubin: Cubin) -> bool:
    """Keep a cubin, in one step that no reader sees half done; say whether it was kept."""
    return store_body(key, SUFFIX, MAGIC, _encode(cubin))


def store_body(key: str, suffix: str, magic: bytes, body: bytes) -> bool:
    """Keep a file in the same way: magic, checksum of the rest, body."""
    if why_unusable():
        return False
    home = folder()
    unfinished = home / (key + "." + os.urandom(8).hex() + UNFINISHED)
    try:
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
            file.write(magic + _checksum(key, body) + body)
        unfinished.replace(home / (key + suffix))
    except OSError:  # unwritable, full, or on Windows open in another process
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return False
    _prune()
    return True


def usage() -> tuple[int, int]:
    """Return how many compiled kernels there are, and the bytes of all files."""
    sizes = {path: status.st_size for path, status in _files()}
    return sum(not path.endswith((PLAN_SUFFIX, DIGEST_SUFFIX)) for path in sizes), sum(sizes.values())


def _checksum(key: str, body: bytes) -> bytes:
    import hashlib  # noqa: PLC0415

    return hashlib.sha256(key.encode() + body).digest()  # with the key: a file under another name is foreign


def _encode(cubin: Cubin) -> bytes:
    """Lay out a body: two lengths of 4 bytes, name, compiler, image."""
    texts = [each.encode() for each in (cubin.lowered_name, cubin.compiler)]
    return b"".join([*(len(each).to_bytes(4, "little") for each in texts), *texts, cubin.image])


def _decode(body: bytes) -> Cubin:
    name = 8 + int.from_bytes(body[:4], "little")
    compiler = name + int.from_bytes(body[4:8], "little")
    return Cubin(body[compiler:], body[8:name].decode(), body[name:compiler].decode())


def _files() -> Iterator[tuple[str, os.stat_result]]:
    """Give path and status of every file of ours; those that vanish meanwhile are left out."""
    with contextlib.suppress(OSError), os.scandir(folder()) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, PLAN_SUFFIX, DIGEST_SUFFIX, UNFINISHED)):
                with contextlib.suppress(OSError):
                    yield entry.path, entry.stat(follow_symlinks=False)


def _prune() -> None:
    """Remove files that were not used for long, then the least recently used until the rest fits."""
    now = time.time()
    total = 0
    for path, status in sorted(_files(), key=lambda each: -each[1].st_mtime):
        total += status.st_size
        longest = ABANDONED_SECONDS if path.endswith(UNFINISHED) else UNUSED_SECONDS
        if total > MOST_BYTES or now - status.st_mtime > longest:
            total -= status.st_size
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
