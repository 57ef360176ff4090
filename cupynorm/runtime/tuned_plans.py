"""The plans that `cupynorm tune` found on this machine: a table for each kind of device, in the user's cache folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import typing
import warnings
from typing import TYPE_CHECKING, Any

from cupynorm._values import dataclass
from cupynorm.plan.config import ONE_BLOCK_PER_ROW, Plan
from cupynorm.plan.problem import Problem
from cupynorm.runtime import cache_folder, compiler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from cupynorm.plan.limits import Limits

SCHEMA = 2  # 1: plans and problems had other names
# Fields of a Plan that depend on the number of rows and on the device, and the reason: choose() computes them anew.
OF_A_LAUNCH = ("grid", "resident_blocks", "waves", "rule", "why")
# Rows keep a device busy when every thread that it holds has one access of 16 bytes.
BYTES_A_THREAD = 16


@dataclass(frozen=True)
class Place:
    """The setting of a table: another device, driver or text of kernels/ may have another best plan."""

    device: str
    compute_capability: str
    sm_count: int
    driver: str
    digest: str

    @property
    def file(self) -> Path:
        """The table's file."""
        words = (str(each) for each in dataclasses.astuple(self))
        name = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in word) for word in words)
        return folder() / f"{name}.json"


@dataclass(frozen=True)
class Entry:
    """A plan that was the fastest. share: of the rate at which the same bytes are copied. date: of the measurement."""

    plan: Plan
    share: float
    date: str


_lock = threading.RLock()  # a signal handler may run where it is held
_tables: dict[Path, dict[str, Entry]] = {}


def folder() -> Path:
    """Return the tables' folder; a path that is not absolute where there is no home, and nothing is read or kept."""
    return cache_folder.folder() / "tuned"


def why_unusable() -> str:
    """Say why the folder is not used: somebody else could have written it. Empty where it can be."""
    return cache_folder.why_unusable(folder())


def switched_on() -> bool:
    """Say whether tables are read: unless CUPYNORM_TUNED is 0."""
    return os.environ.get("CUPYNORM_TUNED") != "0"


def place(limits: Limits, driver: str) -> Place:
    """Return the present place: device, driver and kernels."""
    return Place(limits.name, limits.compute_capability, limits.sm_count, driver, compiler.digest())


def rows_class(problem: Problem, limits: Limits) -> str:
    """Return the class of numbers of rows for which one measurement stands.

    "few n": fewer rows than multiprocessors, with n multiprocessors for each row, rounded down to a power of two.
    "part": rows for all multiprocessors, but too few to give each thread of the device an access. "full": more, where
    only the grid grows.
    """
    if problem.rows < limits.sm_count:
        return f"few {1 << (limits.sm_count // max(1, problem.rows)).bit_length() - 1}"
    full = problem.rows * problem.row_bytes >= limits.sm_count * limits.threads_per_sm * BYTES_A_THREAD
    return "full" if full else "part"


def key_of(kernel: str, problem: Problem, limits: Limits) -> str:
    """Return what a plan is kept under. kernel: the op, Load and Store in C++, which name the dtypes."""
    numbers = {**dataclasses.asdict(problem), "rows": rows_class(problem, limits)}
    return "; ".join([kernel, *(f"{name}={value}" for name, value in numbers.items())])


def find(where: Place, limits: Limits, kernel: str, problem: Problem) -> Plan | None:
    """Return the plan that was found for a problem, for choose() to make a launch of; None if there is none.

    A table is read once in a process.
    """
    if not switched_on():
        return None
    file = where.file
    if not file.is_absolute():  # a user without a home has no tables
        return None
    with _lock:
        if file not in _tables:
            _tables[file] = _read(file, where)
        entry = _tables[file].get(key_of(kernel, problem, limits))
    return entry.plan if entry else None


def forget() -> None:
    """Forget all tables that were read."""
    with _lock:
        _tables.clear()


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that a table keeps."""
    return {name: value for name, value in plan.as_dict().items() if name not in OF_A_LAUNCH}


@functools.cache
def _types() -> dict[str, Any]:
    every = typing.get_type_hints(Plan)
    names = (field.name for field in dataclasses.fields(Plan))
    return {name: every[name] for name in names if name not in OF_A_LAUNCH}


def plan_from(kept: object) -> Plan | None:
    """Return what plan_as_dict() told; None if the fields are not exactly a Plan's, in name, type and sign.

    The fields become C++ text, so nothing but names of variants and numbers may pass.
    """
    types = _types()
    if not isinstance(kept, dict) or set(kept) != set(types):
        return None
    for name, value in kept.items():
        if type(value) is not types[name] or (isinstance(value, (int, float)) and value < 0):
            return None
    return Plan(**kept, grid=0, resident_blocks=0, waves=ONE_BLOCK_PER_ROW)


def portable(plan: Plan) -> Plan:
    """Return a plan as it comes out of a table: for choose() to make a launch of, whatever the number of rows."""
    found = plan_from(plan_as_dict(plan))
    if found is None:
        raise ValueError(f"{plan} cannot be kept in a table")
    return found


def read(where: Place) -> dict[str, Entry]:
    """Return the table's entries. What cannot be used is left out, with one warning."""
    return _read(where.file, where)


def _read(file: Path, where: Place) -> dict[str, Entry]:
    reason = why_unusable()
    if reason:
        _warn(file, reason, "make it yours alone, or set CUPYNORM_CACHE_DIR")
        return {}
    try:
        text = cache_folder.read(file)[0].decode("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _warn(file, str(error))
        return {}
    import json  # noqa: PLC0415  only who has tuned waits for it

    try:
        told = json.loads(text)
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema {told['schema']}, {SCHEMA} is expected")
        if told["place"] != dataclasses.asdict(where):
            raise ValueError(f"it is for {told['place']}")
        kept = dict(told["entries"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _warn(file, f"it is damaged, or no file of tuned plans ({type(error).__name__}: {error})")
        return {}
    entries = {key: _entry_from(each) for key, each in kept.items()}
    found = {key: entry for key, entry in entries.items() if entry}
    if len(found) < len(entries):
        _warn(file, f"{len(entries) - len(found)} of {len(entries)} entries are not of this cupynorm")
    return found


def _entry_from(kept: Any) -> Entry | None:
    try:
        plan = plan_from(kept["plan"])
        return Entry(plan, float(kept["share"]), str(kept["date"])) if plan else None
    except (TypeError, KeyError, ValueError):
        return None


def _warn(
    file: Path, why: str, remedy: str = "`cupynorm tune` writes it anew, and --clear removes it"
) -> None:
    warnings.warn(f"{file} is not used: {why}; {remedy}", stacklevel=2)


def store(where: Place, entries: Mapping[str, Entry | None]) -> Path:
    """Merge entries into the table, safely beside other writers; None removes one. Raises OSError.

    A reader sees the old table or the new one: the file is replaced as a whole.
    """
    import json  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    file = where.file
    if not file.is_absolute():
        raise FileNotFoundError(
            "there is no home folder: set CUPYNORM_CACHE_DIR to a folder that you can write"
        )
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = why_unusable()
    if reason:
        raise PermissionError(f"{reason}: make it yours alone, or set CUPYNORM_CACHE_DIR")
    with _alone(file.parent):
        merged = {**read(where), **entries}
        kept = {
            key: {"plan": plan_as_dict(entry.plan), "share": entry.share, "date": entry.date}
            for key, entry in sorted(merged.items())
            if entry
        }
        told = {"schema": SCHEMA, "place": dataclasses.asdict(where), "entries": kept}
        handle, name = tempfile.mkstemp(dir=file.parent, prefix="writing-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(told, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, file)  # noqa: PTH105  a Path would have to be made of it
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108  likewise
            raise
    with _lock:
        _tables.pop(file, None)
    return file


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Keep other writers out. The system gives the lock back when its holder ends, however that ends."""
    with (where / "lock").open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt  # noqa: PLC0415

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl  # noqa: PLC0415

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tables() -> list[dict[str, Any]]:
    """Return every table of the folder, of whatever device: its file, its place and how many entries it has."""
    import json  # noqa: PLC0415

    found: list[dict[str, Any]] = []
    for file in sorted(folder().glob("*.json")) if folder().is_absolute() else ():
        try:
            told = json.loads(file.read_text("utf-8"))
            found.append({"file": str(file), **told["place"], "entries": len(told["entries"])})
        except (OSError, ValueError, TypeError, KeyError):
            found.append({"file": str(file), "entries": 0})
    return found


def clear() -> list[dict[str, Any]]:
    """Remove every table, and return them. Raises OSError."""
    removed = tables()
    if removed:
        with _alone(folder()):
            for file in folder().glob("*.json"):
                file.unlink(missing_ok=True)
    forget()
    return removed
