"""NVRTC without a device and without CuPy: text -> cubin, and the assembler's report."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cupynorm.runtime.compiler import CompileError, time_saving_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CompileError", "Cubin", "available", "compile", "compile_all", "majors", "supported_archs"]

MAJORS = (13, 12)  # newest first
# What CuPy adds to the options of every module: without them this would compile other code than is launched.
AS_CUPY = ("--device-as-default-execution-space", "-ftz=true")


@dataclasses.dataclass(frozen=True)
class Cubin:
    """One kernel of a compiled module.

    Bytes of stack and spills are per thread; shared_bytes is static and per block.
    """

    image: bytes = dataclasses.field(repr=False)  # the module's ELF, to its last byte
    ptx: str = dataclasses.field(repr=False)  # the module's
    log: str = dataclasses.field(repr=False, compare=False)  # the module's; it holds compile times
    lowered_name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


def available(major: int | None = None) -> tuple[int, int] | None:
    """Return the version of NVRTC, of this major or the newest, as (major, minor); None if there is none."""
    for each in MAJORS if major is None else (major,):
        library = _library(each)
        if library is not None:
            return _version(library)
    return None


def majors() -> tuple[int, ...]:
    """Return the majors that are installed, newest first."""
    return tuple(each for each in MAJORS if _library(each) is not None)


@functools.cache
def supported_archs(major: int | None = None) -> tuple[str, ...]:
    """Return the architectures that NVRTC compiles for, as ("75", ..., "120"), of this major or of any installed."""
    found: set[int] = set()
    for each in majors() if major is None else (major,):
        library = _need(each)
        count = ctypes.c_int()
        _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        _check(library, library.nvrtcGetSupportedArchs(numbers))
        found.update(numbers)
    return tuple(map(str, sorted(found)))


def compile(  # noqa: A001  a module of its own: _nvrtc.compile reads well
    text: str,
    name_expression: str,
    options: Sequence[str] = (),
    arch: str = "90",
    *,
    major: int | None = None,
) -> Cubin:
    """Compile one kernel of `text` as CuPy would, for real architecture sm_<arch>.

    Without `major`, the newest NVRTC that knows `arch`. Raises CompileError with the log, or if there is no such NVRTC.
    """
    return compile_all(text, (name_expression,), options, arch, major=major)[0]


def compile_all(
    text: str,
    name_expressions: Sequence[str],
    options: Sequence[str] = (),
    arch: str = "90",
    *,
    major: int | None = None,
) -> tuple[Cubin, ...]:
    """Compile several kernels of `text` into one module; one Cubin for each, in order, all with the module's image."""
    library = _need(major if major is not None else _major_for(arch))
    asked = (
        f"-arch=sm_{arch}",
        *AS_CUPY,
        *options,
        *time_saving_options(_version(library)),
        "--ptxas-options=-v",
    )
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"cupynorm_module.cu", 0, None, None
        ),
    )
    try:
        for expression in name_expressions:
            _check(library, library.nvrtcAddNameExpression(program, expression.encode()))
        status = library.nvrtcCompileProgram(
            program, len(asked), (ctypes.c_char_p * len(asked))(*(option.encode() for option in asked))
        )
        log = _bytes(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompileError(log.strip() or _message(library, status))
        image = _bytes(library, "CUBIN", program)
        ptx = _bytes(library, "PTX", program).rstrip(b"\0").decode(errors="replace")
        resources = _resources(log)
        kernels = []
        for expression in name_expressions:
            name = ctypes.c_char_p()
            _check(library, library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name)))
            lowered = (name.value or b"").decode()
            kernels.append(Cubin(image, ptx, log, lowered, *resources[lowered]))
        return tuple(kernels)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _major_for(arch: str) -> int | None:
    return next((each for each in majors() if arch.rstrip("af") in supported_archs(each)), None)


class _Resources(NamedTuple):
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers.*")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def _resources(log: str) -> dict[str, _Resources]:
    """Read the assembler's report: for each entry, the frames of all its functions added up, then its resources.

    ptxas info : Compiling entry function 'NAME' for 'sm_90'
    ptxas info : Function properties for NAME
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info : Used 32 registers, used 1 barriers, 256 bytes smem
    """
    found = {}
    _, *sections = _ENTRY.split(log)
    for name, section in zip(sections[::2], sections[1::2], strict=True):
        frames = [tuple(map(int, frame)) for frame in _STACK.findall(section)]
        used = _USED.search(section)
        if not frames or used is None:
            raise RuntimeError(f"the assembler's report on {name} is not understood:\n{section}")
        stack, stores, loads = map(sum, zip(*frames, strict=True))
        shared = _SHARED.search(used[0])
        found[name] = _Resources(int(used[1]), stack, stores, loads, int(shared[1]) if shared else 0)
    return found


def _found_by_pathfinder() -> str | None:
    """Return the NVRTC that NVIDIA's cuda.pathfinder finds, as CuPy does, whose wheels bring it; None without it.

    It knows wheels, conda, toolkits and Windows, but returns one library, of any major version: this module searches
    for the others.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415  optional: it comes with CuPy

        return str(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception:  # noqa: BLE001  not installed, or nothing found: it has an error type of its own
        return None


def _is_of_major(path: str, major: int) -> bool:
    """Say whether a library's name is that of a major: libnvrtc.so.12, libnvrtc.so.12.9.86, nvrtc64_120_0.dll."""
    return re.match(rf"libnvrtc\.so\.{major}(\.|$)|nvrtc64_{major}\d_", Path(path).name) is not None


def _candidates(major: int) -> Iterator[str]:
    found_by_pathfinder = _found_by_pathfinder()
    if found_by_pathfinder is not None and _is_of_major(found_by_pathfinder, major):
        yield found_by_pathfinder
    name = f"libnvrtc.so.{major}"
    folders: list[Path] = []
    # NVIDIA's wheels share the package "nvidia", which has no __init__: it may have several folders
    spec = importlib.util.find_spec("nvidia")
    for found in (spec and spec.submodule_search_locations) or ():
        folders += [Path(found, f"cu{major}", "lib"), Path(found, "cuda_nvrtc", "lib")]
    folders.append(Path(sys.prefix, "lib"))  # conda
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable], "lib64"))
    for folder in folders:
        path = folder / name
        if path.is_file():
            yield str(path)
    yield name  # wherever the loader looks
    yield f"/usr/local/cuda/lib64/{name}"


@functools.cache
def _library(major: int) -> ctypes.CDLL | None:
    for candidate in _candidates(major):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(candidate)
    return None


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    numbers = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(*map(ctypes.byref, numbers)))
    return numbers[0].value, numbers[1].value


def _need(major: int | None) -> ctypes.CDLL:
    library = None
    if major is not None:
        library = _library(major)
    elif majors():
        library = _library(majors()[0])  # let it say itself that it does not know the architecture
    if library is None:
        raise CompileError(
            f"NVRTC {major or ''} is not installed: pip install nvidia-cuda-nvrtc-cu12 (CUDA 12) or "
            "nvidia-cuda-nvrtc (13)"
        )
    return library


def _message(library: ctypes.CDLL, status: int) -> str:
    text = library.nvrtcGetErrorString
    text.restype = ctypes.c_char_p
    return f"NVRTC: {(text(status) or b'').decode()} ({status})"


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise CompileError(_message(library, status))


def _bytes(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, held))
    return held.raw
