"""CUDA text -> a library for this CPU: g++, with a cache on disk keyed by everything that goes in."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
SHARED_EXTENT = 232448 + 4096  # the largest opt-in limit, and room to see what is written behind it
KEPT_DAYS = 14  # a library that nobody has loaded for so long is removed

# One contract: the generated part may rely on nothing but simulator.h.
ENTRY = """
#line 1 "simulator_entry.cpp"
thread_local unsigned char shared_memory[{extent}] __attribute__((aligned(16)));
{bounds}
#define SIMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
SIMULATOR_EXPORT void simulator_entry(void** arguments) {{ simulator::call(&{name}, arguments); }}
SIMULATOR_EXPORT unsigned char* simulator_shared() {{ return shared_memory; }}
SIMULATOR_EXPORT int simulator_sizes(int* bytes) {{ return simulator::sizes(&{name}, bytes); }}
SIMULATOR_EXPORT int simulator_bounds() {{ return {bound}; }}
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
    for path in folder.glob("*.so"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def cache() -> Path:
    """Return the folder of compiled libraries: CUPYNORM_SIMULATOR_CACHE, else one under the user's cache folder."""
    return _folder(os.environ.get("CUPYNORM_SIMULATOR_CACHE"))


LIBRARY = ("-shared", "-Wl,--as-needed")  # with these g++ would link a header that it compiles ahead


def _flags(sanitize: str) -> list[str]:
    flags = ["-fPIC", "-pthread", "-Og", "-w", "-fvisibility=hidden"]
    # nvcc has no type-based aliasing; without contraction no bit depends on this CPU's fused multiply-add
    flags += ["-fno-strict-aliasing", "-ffp-contract=off"]
    if sanitize == "address":
        flags += ["-g1", "-fsanitize=address", "-fsanitize-recover=address"]
    return flags


def _kernel_flags(sanitize: str) -> list[str]:
    # a misaligned access is a fault on the device, and nothing on x86: always checked
    checks = "undefined,float-cast-overflow" if sanitize == "undefined" else "alignment"
    flags = [f"-fsanitize={checks}", "-fno-sanitize=vptr", f"-fno-sanitize-recover={checks}"]
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


def _headers(options: Iterable[str]) -> list[tuple[str, str]]:
    """Read every file below the -I folders and in this one: what the text may include."""
    files = []
    for option in (*options, f"-I{HERE}"):
        if option.startswith("-I"):
            folder = Path(option[2:])
            files += [
                (str(path), path.read_text())
                for path in sorted(folder.rglob("*.cu*")) + sorted(folder.rglob("*.h"))
            ]
    return files


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


def library(code: str, name: str, options: Iterable[str] = ()) -> Path:
    """Compile the kernel that `name` (a name expression) is in `code`. Raises CompileError with the log."""
    sanitize = sanitizer()
    linked = engine(sanitize)
    given = [option.replace("--std=", "-std=") for option in options]
    headers = _headers(given)
    bounds, bound = _bounds(name, code, tuple(text for _, text in headers))
    text = f'#include "simulator.h"\n#line 1 "kernel.cu"\n{code}\n'
    text += ENTRY.format(extent=SHARED_EXTENT, name=name, bounds=bounds, bound=bound)
    flags = ["-std=c++17", *_flags(sanitize), *_kernel_flags(sanitize)]
    passed = [option for option in given if option.startswith(("-I", "-D", "-std="))]
    version = _key(*(part for pair in headers for part in pair))
    key = _key(text, linked.name, *flags, *passed, version)
    ahead = [f'#include "{HERE / "simulator.h"}"', *(line for line in COMMON if line in code)]
    folder = _header("\n".join(ahead), tuple(passed), version, *flags)
    # $ORIGIN: the folder may be moved as a whole
    link = [f"-L{linked.parent}", f"-l:{linked.name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined"]
    return _compile(text, [*flags, f"-I{folder}", f"-I{HERE}", *passed], key, link)


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


class Library:
    """A loaded kernel: its entry, and what a launch of it must know."""

    def __init__(self, code: str, name: str, options: Iterable[str]) -> None:
        if sanitizer() == "address" and not hasattr(ctypes.CDLL(None), "__asan_init"):
            raise RuntimeError(
                "libasan must be loaded first: start Python with simulator.sanitized_environment()"
            )
        path = library(code, name, options)
        self._loaded = ctypes.CDLL(str(path))
        self.launch: Any = ctypes.CDLL(str(engine(sanitizer()))).simulator_launch
        self.entry = ctypes.cast(self._loaded.simulator_entry, ctypes.c_void_p).value
        self.shared = ctypes.cast(self._loaded.simulator_shared, ctypes.c_void_p).value
        self.max_threads = int(self._loaded.simulator_bounds())
        sizes = (ctypes.c_int * 64)()
        count = self._loaded.simulator_sizes(sizes)
        self.parameter_bytes = tuple(sizes[:count])
        self.static_shared_bytes = _thread_local_bytes(path) - SHARED_EXTENT


def _thread_local_bytes(path: Path) -> int:
    """Read the size of an ELF library's thread-local segment (64 bits, this machine's byte order)."""
    image = path.read_bytes()
    table = int.from_bytes(image[32:40], "little")
    size, count = (int.from_bytes(image[at : at + 2], "little") for at in (54, 56))
    for at in range(table, table + size * count, size):
        if int.from_bytes(image[at : at + 4], "little") == 7:
            return int.from_bytes(image[at + 40 : at + 48], "little")
    return 0
