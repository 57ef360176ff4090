"""Device memory and launches: guarded allocations, adversarial schedules, and what is compared after them."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from .build import SHARED_EXTENT, place_of, sanitizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .build import Library

    Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

GUARD = 4096  # bytes of poison before and behind each allocation
POISON = 0xFF  # nan in every floating type, and no kernel computes that nan
ALIGNMENT = 512  # what the device's allocator gives


# libasan's words for a place in a library that was loaded after its first report
UNRESOLVED = re.compile(r"\((?P<library>\S+\.so)\+(?P<offset>0x[0-9a-f]+)\)")


TRAP = "misaligned access,"  # how engine.cpp begins where the kernel does not tell what and where


class SimulatorError(RuntimeError):
    """A fault of a kernel or of its launch."""


def _schedules() -> tuple[str | int, ...]:
    given = os.environ.get("CUPYNORM_SIMULATOR_SCHEDULES", "forward,reverse")
    return tuple(name if name in {"forward", "reverse"} else int(name) for name in given.split(","))


@dataclasses.dataclass
class Settings:
    """How launches run: under each schedule in turn, on the same input; all must leave the same bits behind."""

    schedules: tuple[str | int, ...] = dataclasses.field(
        default_factory=_schedules
    )  # "forward", "reverse", or a seed
    os_threads: int = (
        2  # that run at the same time: there are more, one for each block of a cluster, which take turns
    )
    # what another stream writes to an array whenever all blocks of a cooperative launch wait for one another
    beside: tuple[Bytes, bytes] | None = None


settings = Settings()


class _Allocation:
    """One guarded piece of memory. Knows its owner weakly: it must not outlive the arrays on it."""

    def __init__(self, raw: Bytes, start: int, nbytes: int) -> None:
        self._owner = weakref.ref(raw)
        self.start, self.nbytes = start, nbytes

    def raw(self) -> Bytes | None:
        return self._owner()

    def payload(self) -> Bytes | None:
        raw = self.raw()
        return None if raw is None else raw[self.start : self.start + self.nbytes]

    def check(self) -> str | None:
        """Say what was written outside, and put the guard back."""
        raw = self.raw()
        if raw is None:
            return None
        for place, guard in (
            ("before the start", raw[: self.start][::-1]),
            ("past the end", raw[self.start + self.nbytes :]),
        ):
            changed = np.flatnonzero(guard != POISON)
            if len(changed):
                guard[...] = POISON
                return (
                    f"out-of-bounds write: {len(changed)} bytes {place} of an allocation of {self.nbytes} bytes, "
                    f"the nearest {changed[0] + 1} bytes away"
                )
        return None


_allocations: list[_Allocation] = []
_one_at_a_time = threading.Lock()


def _live() -> Iterator[_Allocation]:
    _allocations[:] = [each for each in _allocations if each.raw() is not None]
    yield from _allocations


def allocate(nbytes: int, misalign: int = 0) -> Bytes:
    """Return poisoned bytes, `misalign` bytes off the device's alignment, between guards that every launch checks."""
    raw = np.full(nbytes + 2 * GUARD + ALIGNMENT + misalign, POISON, np.uint8)
    address = raw.__array_interface__["data"][0]
    start = GUARD + -(address + GUARD) % ALIGNMENT + misalign
    _allocations.append(_Allocation(raw, start, nbytes))
    if sanitizer() == "address":  # reads of the guards are reported too
        forbid: Any = ctypes.CDLL(None)["__asan_poison_memory_region"]
        for first, last in ((0, start), (start + nbytes, len(raw))):
            forbid(ctypes.c_void_p(address + first), ctypes.c_size_t(last - first))
    return raw[start : start + nbytes]


class _Launch(ctypes.Structure):
    """Launch of engine.cpp, member for member."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("shared_extent", ctypes.c_uint),
        ("schedule", ctypes.c_uint),
        ("os_threads", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("beside_to", ctypes.c_void_p),
        ("beside_from", ctypes.c_char_p),
        ("beside_bytes", ctypes.c_uint64),
    )


def _number(schedule: str | int) -> int:
    return schedule + 2 if isinstance(schedule, int) else ("forward", "reverse").index(schedule)


def launch(
    library: Library,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    parameters: Sequence[bytes],
    *,
    cluster: int = 1,
    cooperative: bool = False,
) -> None:
    """Run a kernel to its end, once for each schedule. Raises SimulatorError with the report.

    `cluster` is how many blocks along x form one. The blocks of a cooperative launch are alive all at once.
    After it, every live allocation is looked at: for writes outside, and for bits that depend on the schedule.
    """
    if library.entry is None:
        return  # in a rehearsal
    buffers = [
        ctypes.create_string_buffer(each + bytes(-len(each) % 16), len(each) + 16) for each in parameters
    ]
    arguments = (ctypes.c_void_p * max(len(buffers), 1))(*(_aligned(buffer) for buffer in buffers))
    wanted = _Launch(
        library.entry,
        library.shared,
        ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)),
        tuple(grid),
        tuple(block),
        shared_bytes,
        SHARED_EXTENT,
        0,
        settings.os_threads,
        cluster,
        cooperative,
        *_beside(),
    )
    with _one_at_a_time:  # what one launch restores, another may be writing
        before = _snapshot() if len(settings.schedules) > 1 else []
        expected: list[tuple[_Allocation, bytes]] = []
        for schedule in settings.schedules:
            if expected:
                _restore(before)
            wanted.schedule = _number(schedule)
            try:
                _run(library, wanted, schedule)
            except SimulatorError as error:
                if not str(error).startswith(TRAP):
                    raise
                _restore(before)
                _tell(library, wanted, schedule, error)
            if expected:
                _compare(expected, settings.schedules[0], schedule)
            elif before:
                expected = _snapshot()


def _beside() -> tuple[int | None, bytes | None, int]:
    """Return what settings.beside says, in the words of _Launch."""
    if settings.beside is None:
        return None, None, 0
    place, content = settings.beside
    assert place.nbytes == len(content)
    return place.__array_interface__["data"][0], content, len(content)


def _aligned(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Move a parameter to the alignment that the compiler expects of it."""
    address = ctypes.addressof(buffer)
    shift = -address % 16
    if shift:
        ctypes.memmove(address + shift, address, len(buffer) - 16)
    return address + shift


def _resolve(found: re.Match[str]) -> str:
    return place_of(found["library"], found["offset"]) or found[0]


def _run(library: Library, wanted: _Launch, schedule: str | int) -> None:
    report = ctypes.create_string_buffer(4096)
    failed = library.launch(ctypes.byref(wanted), report, ctypes.c_size_t(len(report)))
    if failed:
        text = UNRESOLVED.sub(_resolve, report.value.decode(errors="replace"))
        raise SimulatorError(f"{text} (schedule {schedule})")
    if sanitizer() == "address":
        return
    for allocation in _live():
        fault = allocation.check()
        if fault:
            raise SimulatorError(f"{fault} (schedule {schedule})")


def _tell(library: Library, wanted: _Launch, schedule: str | int, met: SimulatorError) -> None:
    """Run a launch again that has met a trap. Raises SimulatorError, which says of which access."""
    again = library.that_tells()
    wanted.entry, wanted.shared = again.entry, again.shared
    try:
        _run(again, wanted, schedule)
    except SimulatorError as error:
        raise error from None
    raise met


def _snapshot() -> list[tuple[_Allocation, bytes]]:
    return [(each, payload.tobytes()) for each in _live() if (payload := each.payload()) is not None]


def _restore(saved: list[tuple[_Allocation, bytes]]) -> None:
    for allocation, content in saved:
        payload = allocation.payload()
        if payload is not None:
            payload[...] = np.frombuffer(content, np.uint8)


def _compare(expected: list[tuple[_Allocation, bytes]], first: str | int, second: str | int) -> None:
    for allocation, content in expected:
        payload = allocation.payload()
        if payload is None or payload.tobytes() == content:
            continue
        changed = np.flatnonzero(payload != np.frombuffer(content, np.uint8))
        raise SimulatorError(
            f"race: schedules {first} and {second} leave different bits: {len(changed)} of the "
            f"{allocation.nbytes} bytes of an allocation, the first at byte {changed[0]}"
        )
