"""CUDA text -> a library for this CPU: g++, with a cache on disk keyed by everything that goes in."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.module_text import parts_of

from . import elf

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HERE = Path(__file__).parent
SHARED_EXTENT = 232448 + 4096  # the largest opt-in limit, and room to see what is written behind it
KEPT_DAYS = 14  # a library that nobody has loaded for so long is removed

# One contract: the generated part may rely on nothing but simulator.h.
PROLOGUE = """
#line 1 "simulator_entry.cpp"
thread_local unsigned char shared_memory[{extent}] __attribute__((aligned(16)));
{bounds}
#define SIMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
SIMULATOR_EXPORT unsigned char* simulator_shared() {{ return shared_memory; }}
"""
ENTRY = """
SIMULATOR_EXPORT void simulator_entry_{key}(void** arguments) {{ simulator::call(&{name}, arguments); }}
SIMULATOR_EXPORT int simulator_sizes_{key}(int* bytes) {{ return simulator::sizes(&{name}, bytes); }}
SIMULATOR_EXPORT int simulator_bounds_{key}() {{ return {bound}; }}
"""
BOUNDS = re.compile(
    r"(?P<template>template\s*<[^;{}]*?>\s*)?__global__\s+void\s+"
    r"__launch_bounds__\((?P<bound>(?:[^()]|\([^()]*\))*)\)\s*"
    r"(?P<name>\w+)\s*\("
)


class CompileError(Exception):
    """g++ refused the text; the message is its log."""


def why_not() -> str | None:
    """Say why the simulator cannot run here, or None if it can."""
    if platform.system() != "Linux":
        return "the simulator needs Linux: it finds shared memory as a thread-local segment of an ELF library"
    if shutil.which(compiler()) is None:
        return f"the simulator needs {compiler()}, which is not installed: apt-get install g++"
    return None


def compiler() -> str:
    """Return the compiler's command: CUPYNORM_SIMULATOR_CXX, else g++."""
    return os.environ.get("CUPYNORM_SIMULATOR_CXX", "g++")


def sanitizer() -> str:
    """Return CUPYNORM_SIMULATOR_SANITIZE: "", "undefined" or "address"."""
    chosen = os.environ.get("CUPYNORM_SIMULATOR_SANITIZE", "")
    if chosen not in {"", "undefined", "address"}:
        raise ValueError(f"CUPYNORM_SIMULATOR_SANITIZE is {chosen!r}: use undefined, address, or nothing")
    return chosen


@functools.cache
def _version(command: str) -> tuple[int, ...]:
    answer = _run([command, "-dumpfullversion", "-dumpversion"]).stdout
    return tuple(int(part) for part in answer.strip().split("."))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    environment.pop("LD_PRELOAD", None)  # libasan is for this process, not for the compiler
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@functools.cache
def _folder(asked: str | None) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(asked) if asked else Path(base) / "cupynorm-simulator"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            _forget_old(folder)
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="cupynorm-simulator-"))


def _forget_old(folder: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86400
    for path in (*folder.glob("*.so"), *folder.glob(f"*{STATIC}")):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def cache() -> Path:
    """Return the folder of compiled libraries: CUPYNORM_SIMULATOR_CACHE, else one under the user's cache folder."""
    return _folder(os.environ.get("CUPYNORM_SIMULATOR_CACHE"))


MOST_TOGETHER = 64  # kernels in one text
SECTIONS = ("-ffunction-sections", "-fdata-sections")  # so that elf.py sees which of them needs what
STATIC = ".static"  # a file with the bytes of static shared memory of one kernel of several
LIBRARY = ("-shared", "-Wl,--as-needed")  # with these g++ would link a header that it compiles ahead


def _flags(sanitize: str) -> list[str]:
    flags = ["-fPIC", "-pthread", "-Og", "-w", "-fvisibility=hidden"]
    # nvcc has no type-based aliasing; without contraction no bit depends on this CPU's fused multiply-add
    flags += ["-fno-strict-aliasing", "-ffp-contract=off"]
    if sanitize == "address":
        flags += ["-g1", "-fsanitize=address", "-fsanitize-recover=address"]
    return flags


def _kernel_flags(sanitize: str, *, tells: bool) -> list[str]:
    # a misaligned access is a fault on the device, and nothing on x86: always checked
    checks = "undefined,float-cast-overflow" if sanitize == "undefined" else "alignment"
    flags = [f"-fsanitize={checks}", "-fno-sanitize=vptr", f"-fno-sanitize-recover={checks}"]
    if not sanitize:  # what no kernel has and g++ would provide for, in each of thousands of small functions
        flags += ["-fno-exceptions", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]
    if not sanitize and not tells:
        flags.append("-fsanitize-undefined-trap-on-error")
    if _version(compiler()) >= (12,):
        flags.append("-ftrivial-auto-var-init=pattern")  # what was never set is not 0 by luck
    return flags


def _compile(text: str, flags: list[str], key: str, suffix: Iterable[str] = ()) -> Path:
    """Compile into the cache, unless it is there. Safe against other processes: a library is renamed when complete."""
    library = cache() / f"{key}.so"
    if library.exists():
        os.utime(library)
        return library
    with tempfile.TemporaryDirectory(dir=cache()) as scratch:
        source, result = Path(scratch) / "text.cpp", Path(scratch) / "result.so"
        source.write_text(text)
        done = _run([compiler(), *LIBRARY, *flags, str(source), "-o", str(result), *suffix])
        if done.returncode:
            raise CompileError(done.stderr.replace(f"{scratch}/", ""))
        result.replace(library)
    return library


@functools.cache
def _header(text: str, options: tuple[str, ...], version: str, *flags: str) -> Path:
    """Return a folder with `text` precompiled as simulator.h, half of a kernel's compile time; only g++ finds it.

    version: a digest of all that the text may include.
    """
    folder = cache() / f"header-{_key(text, version, str(_version(compiler())), *options, *flags)}"
    compiled = folder / "simulator.h.gch"
    if not compiled.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            source, result = Path(scratch) / "header.h", Path(scratch) / compiled.name
            source.write_text(text)
            done = _run(
                [
                    compiler(),
                    *flags,
                    f"-I{HERE}",
                    *options,
                    "-x",
                    "c++-header",
                    str(source),
                    "-o",
                    str(result),
                ]
            )
            if not done.returncode:
                result.replace(compiled)
    return folder


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def engine(sanitize: str) -> Path:
    """Return the compiled engine, which every kernel's library is linked with."""
    flags = ["-std=c++17", *_flags(sanitize), "-O2"]  # after -Og: compiled once, it runs in every launch
    flags += os.environ.get("CUPYNORM_SIMULATOR_CXXFLAGS", "").split()
    text = '#line 1 "engine.cpp"\n' + (HERE / "engine.cpp").read_text()
    key = _key(text, (HERE / "simulator.h").read_text(), str(_version(compiler())), *flags)
    return _compile(text, [*flags, f"-I{HERE}"], f"engine-{key}")


def _headers(options: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Read every file below the -I folders and in this one: what the text may include."""
    folders = [option[2:] for option in (*options, f"-I{HERE}") if option.startswith("-I")]
    found = []
    for folder in folders:
        for root, _, names in os.walk(folder):
            paths = (f"{root}/{name}" for name in names if name.endswith((".cu", ".cuh", ".h")))
            found += [(path, *_state(path)) for path in paths]
    return _read(tuple(sorted(found)))


def _state(path: str) -> tuple[int, int, int]:
    """Return what differs after a file was written."""
    state = os.stat(path)  # noqa: PTH116  of each header for each kernel: a Path takes as long again
    return state.st_ino, state.st_mtime_ns, state.st_size


@functools.lru_cache(maxsize=8)
def _read(files: tuple[tuple[str, int, int, int], ...]) -> tuple[tuple[str, str], ...]:
    """Read files, once for each state that they are in."""
    return tuple((path, Path(path).read_text()) for path, *_ in files)


@functools.lru_cache(maxsize=8)
def _version_of(headers: tuple[tuple[str, str], ...]) -> str:
    return _key(*(part for pair in headers for part in pair))


def _first(arguments: str) -> str:
    """Give the first of some C++ arguments: up to a comma outside all brackets."""
    depth = 0
    for at, each in enumerate(arguments):
        depth += (each in "(<[{") - (each in ")>]}")
        if each == "," and depth == 0:
            return arguments[:at]
    return arguments


@functools.lru_cache(maxsize=8)
def _bounds_in(texts: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Give the template line and the first of the __launch_bounds__ of each kernel, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for each in (each for text in texts for each in BOUNDS.finditer(text)):
        found.setdefault(each["name"], (each["template"] or "", _first(each["bound"])))
    return found


def _bounds(name: str, code: str, headers: tuple[str, ...]) -> tuple[str, str]:
    """Give C++ that holds a kernel's __launch_bounds__, and the expression that asks for it."""
    named = re.match(r"(?P<space>(?:\w+::)*)(?P<name>\w+)\s*(?P<arguments><.*>)?$", name, re.DOTALL)
    if named is None:
        return "", "1024"
    # the headers' are read once for all kernels that include them
    found = _bounds_in((code,)).get(named["name"]) or _bounds_in(headers).get(named["name"])
    if found is None:
        return "", "1024"
    template, bound = found
    inside = named["space"].removesuffix("::")
    held = f"{template}struct {named['name']}_bounds {{ static constexpr int value = ({bound}); }};"
    text_of_it = f"namespace {inside} {{ {held} }}" if inside else held
    return text_of_it, f"{named['space']}{named['name']}_bounds{named['arguments'] or ''}::value"


COMMON = ("#include <row/variants.cuh>",)  # what many kernels include first


class Wanted(NamedTuple):
    """A kernel that is to be compiled, and all that decides on what comes out."""

    code: str
    name: str
    passed: tuple[str, ...]  # options
    bounds: str  # C++ that holds its launch bounds, and the expression that asks for them
    bound: str
    version: str  # a digest of all that the code may include
    key: str

    @property
    def parts(self) -> list[re.Match[str]] | None:
        """What the code consists of; None if it cannot be joined with others, or leaves out what it needs."""
        needed = re.findall(r"\bFunction_\w+", self.name)
        return parts_of(self.code) if all(f"struct {each} {{" in self.code for each in needed) else None

    @property
    def includes(self) -> tuple[str, ...]:
        """The lines of a text of several kernels that include headers."""
        return tuple(part[0] for part in self.parts or () if part["include"])

    @property
    def path(self) -> Path:
        return cache() / f"{self.key}.so"


def wanted(code: str, name: str, options: Iterable[str] = ()) -> Wanted:
    """Say what compiling the kernel that `name` (a name expression) is in `code` would take."""
    given = [option.replace("--std=", "-std=") for option in options]
    headers = _headers(given)
    bounds, bound = _bounds(name, code, tuple(text for _, text in headers))
    passed = tuple(option for option in given if option.startswith(("-I", "-D", "-std=")))
    version = _version_of(headers)
    key = _key(
        code, name, bounds, bound, PROLOGUE, ENTRY, engine(sanitizer()).name, *_all_flags(), *passed, version
    )
    return Wanted(code, name, passed, bounds, bound, version, key)


def _all_flags(*, tells: bool = False) -> list[str]:
    """Return what g++ is asked for; tells: a misaligned access says where it is.

    Else it is a trap, for which g++ needs a sixth less. engine.py runs what met one again, with a kernel that tells.
    """
    sanitize = sanitizer()
    return ["-std=c++17", *_flags(sanitize), *_kernel_flags(sanitize, tells=tells)]


def _text(codes: Iterable[str], kernels: Iterable[Wanted]) -> str:
    kernels = tuple(kernels)
    return "".join(
        [
            '#include "simulator.h"\n',
            *(f'#line 1 "kernel.cu"\n{code}\n' for code in codes),
            PROLOGUE.format(
                extent=SHARED_EXTENT, bounds="\n".join(dict.fromkeys(each.bounds for each in kernels))
            ),
            *(ENTRY.format(key=each.key, name=each.name, bound=each.bound) for each in kernels),
        ]
    )


def _all_options(code: str, kernel: Wanted, flags: list[str]) -> list[str]:
    """Return what g++ is called with for a text of such kernels."""
    ahead = [f'#include "{HERE / "simulator.h"}"', *(line for line in COMMON if line in code)]
    folder = _header("\n".join(ahead), kernel.passed, kernel.version, *flags)
    return [*flags, f"-I{folder}", f"-I{HERE}", *kernel.passed]


def _link() -> list[str]:
    linked = engine(sanitizer())
    # $ORIGIN: the folder may be moved as a whole
    return [f"-L{linked.parent}", f"-l:{linked.name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined"]


def library(code: str, name: str, options: Iterable[str] = (), *, tells: bool = False) -> Path:
    """Compile the kernel that `name` (a name expression) is in `code`. Raises CompileError with the log.

    tells: as _all_flags() says.
    """
    one = wanted(code, name, options)
    if tells:
        one = one._replace(key=f"{one.key}_tells")
    if one.path.exists():
        os.utime(one.path)
        return one.path
    alone.append(one)
    return _compile(_text([code], [one]), _all_options(code, one, _all_flags(tells=tells)), one.key, _link())


def together(kernels: Sequence[Wanted]) -> None:
    """Compile kernels in one go, into a library each: half of the work is what they share.

    If a text of many fails, so do those of kernels that include the same, or they are compiled; where one fails too,
    none of its kernels is there, and library() says why. Those that were wanted with other flags than there are now
    (tests set them) are left out.
    """
    alike: dict[tuple[object, ...], dict[str, Wanted]] = {}
    for each in kernels:
        if each.parts and not each.path.exists() and each == wanted(each.code, each.name, each.passed):
            alike.setdefault((each.passed, each.version), {})[each.key] = each
    for group in alike.values():
        waiting = sorted(group.values(), key=lambda each: each.includes)  # so that chunks share headers
        several = math.ceil(len(waiting) / MOST_TOGETHER)
        ends = [i * len(waiting) // several for i in range(several + 1)]
        for begin, end in itertools.pairwise(ends):
            chunk = waiting[begin:end]
            some = [each for each in chunk if not each.path.exists()]  # another process may have made some
            if some and not _compile_together(some):
                _compile_those_that_include_the_same(some)


def _compile_those_that_include_the_same(kernels: Sequence[Wanted]) -> None:
    texts = [[*group] for _, group in itertools.groupby(kernels, lambda each: each.includes)]
    for some in texts if len(texts) > 1 else ():
        _compile_together(some)


def _compile_together(kernels: Sequence[Wanted]) -> bool:
    """Compile kernels as one text; say whether g++ took it."""
    parts = (part for each in kernels for part in each.parts or ())
    code = "".join(dict.fromkeys(part[0] for part in parts if not part["comment"]))
    options = _all_options(code, kernels[0], _all_flags())
    with tempfile.TemporaryDirectory(dir=cache()) as scratch:
        source, made = Path(scratch, "text.cpp"), Path(scratch, "made.o")
        source.write_text(_text([code], kernels))
        if _run([compiler(), *options, *SECTIONS, "-c", str(source), "-o", str(made)]).returncode:
            return False
        result = Path(scratch, "result.so")
        if _run([compiler(), *LIBRARY, str(made), "-o", str(result), *_link()]).returncode:
            return False
        entries = [f"simulator_entry_{each.key}" for each in kernels]
        needed = elf.thread_local_bytes(made.read_bytes(), entries, "simulator_shared")
        for each, entry in zip(kernels, entries, strict=True):  # one library under many names
            each.path.with_suffix(STATIC).write_text(str(needed[entry] - SHARED_EXTENT))
            with contextlib.suppress(FileExistsError):
                each.path.hardlink_to(result)
    return True


def prebuild(kernels: Iterable[tuple[str, str]], options: Iterable[str] = (), processes: int = 2) -> None:
    """Compile many (code, name) before they are needed, `processes` at a time; what is in the cache costs nothing."""
    options = tuple(options)
    engine(sanitizer())  # once, not in every thread
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for done in [pool.submit(library, code, name, options) for code, name in kernels]:
            done.result()


def place_of(library: str, offset: str) -> str:
    """Give file:line of an address in a compiled library, or nothing where binutils does not say."""
    if shutil.which("addr2line") is None:
        return ""
    place = _run(["addr2line", "-e", library, offset]).stdout.strip()
    return "" if place.startswith("?") else place


# Where rehearsal.py wants to know which kernels tests need: a Library then is one that cannot be launched.
rehearsed: list[Wanted] | None = None
alone: list[Wanted] = []  # what this process compiled without others


class Library:
    """A loaded kernel: its entry, and what a launch of it must know."""

    def __init__(self, code: str, name: str, options: Iterable[str], *, tells: bool = False) -> None:
        self._made_of = code, name, tuple(options)
        if rehearsed is not None:
            rehearsed.append(wanted(*self._made_of))
            self.entry, self.max_threads, self.parameter_bytes, self.static_shared_bytes = None, 1024, (), 0
            return
        if sanitizer() == "address" and not hasattr(ctypes.CDLL(None), "__asan_init"):
            raise RuntimeError(
                "libasan must be loaded first: start Python with simulator.sanitized_environment()"
            )
        path = library(*self._made_of, tells=tells)
        self._loaded = ctypes.CDLL(str(path))
        # of the engine that this library is linked with: of two folders each has one, and a process may load both
        self.launch: Any = self._loaded.simulator_launch
        self.entry = ctypes.cast(self._of_kernel("entry", path), ctypes.c_void_p).value
        self.shared = ctypes.cast(self._loaded.simulator_shared, ctypes.c_void_p).value
        self.max_threads = int(self._of_kernel("bounds", path)())
        sizes = (ctypes.c_int * 64)()
        count = self._of_kernel("sizes", path)(sizes)
        self.parameter_bytes = tuple(sizes[:count])
        self.static_shared_bytes = _static_shared_bytes(path)

    def that_tells(self) -> Library:
        """Return the same kernel, of which a misaligned access says where it is."""
        return Library(*self._made_of, tells=True)

    def _of_kernel(self, what: str, path: Path) -> Any:
        return getattr(self._loaded, f"simulator_{what}_{path.stem}")


def _static_shared_bytes(path: Path) -> int:
    """Return what a kernel's static __shared__ variables take; in a library of several kernels, beside it."""
    with contextlib.suppress(FileNotFoundError):
        return int(path.with_suffix(STATIC).read_text())
    return elf.segment_bytes(path.read_bytes()) - SHARED_EXTENT
