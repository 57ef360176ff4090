"""Name expression -> kernel: the text, its options, and one loaded function per device."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from cupynorm._values import NamedTuple
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.runtime import cubins, devices
from cupynorm.runtime.devices import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    File = tuple[str, int, tuple[int, int], int]  # name, size, times of the last changes, number

__all__ = [
    "CompileError",
    "Kernel",
    "Kernels",
    "digest",
    "kernel",
    "kernels_dir",
    "options",
    "template_argument",
    "text",
    "time_saving_options",
]

STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
LOCAL_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_SHAPE = (11, 12, 13)  # CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, _HEIGHT, _DEPTH
LARGE_CLUSTERS_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
PORTABLE_CLUSTER = 8  # blocks that every device with clusters takes
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
# With any of these on, CuPy compiles otherwise than compile_cubin does, or is to keep nothing on disk.
CUPY_SWITCHES = (
    "CUPY_CACHE_IN_MEMORY",
    "CUPY_COMPILE_WITH_PTX",
    "CUPY_CUDA_COMPILE_WITH_DEBUG",
    "CUPY_NVRTC_USE_PCH",
)
# Options that save compile time and change no instruction, each with the first version of NVRTC that knows it.
TIME_SAVING_OPTIONS = (
    # leaves out textures and the runtime's functions, which our kernels do not use: saves 4 to 5 ms of the 90 to 120 ms
    # that an op's first kernel takes
    ((12, 4), "--minimal"),
)
# What CuPy adds to our options, and so we do where we compile ourselves.
FLUSH_TO_ZERO, DEFAULT_DEVICE = CUPY_OPTIONS = ("-ftz=true", "-default-device")
NVRTC_WHEELS = {12: "nvidia_cuda_nvrtc_cu12", 13: "nvidia_cuda_nvrtc"}
DIGEST_MAGIC = b"\x93cupynorm digest 1\n"
# A file that has just been written may be written again at the same time, by a file system's clock.
SETTLED_NS = 2 * 10**9


@functools.cache
def kernels_dir() -> Path:
    """Return the folder of CUDA sources: beside this file in a wheel, at the top of a checkout."""
    from pathlib import Path  # noqa: PLC0415  10 ms, which `import cupynorm` need not wait for

    package = Path(__file__).resolve().parents[1]
    packaged = package / "kernels"
    return packaged if packaged.is_dir() else package.parent / "kernels"


@functools.cache
def digest() -> str:
    """Return a hash of all files of kernels/.

    It is part of every module's text, so that caches of kernels, which do not look into headers, notice an edit.
    """
    return digest_of(str(kernels_dir()), (".cu", ".cuh"))


def digest_of(folder: str, endings: tuple[str, ...]) -> str:
    """Return a hash of the files in a folder, and in those within it, whose names end so.

    It is kept beside the kernels by the files' names, sizes, times and numbers, as git does it: to read all files takes
    a process's first call 2 ms more.
    """
    files = sorted(_files_of(folder, folder, endings))
    key = ""
    if (
        os.name == "posix" and compiles_itself()
    ):  # elsewhere a file's number and the time of its last change say less
        key = cubins.key("digest", folder, repr(files))
        known = cubins.load_body(key, cubins.DIGEST_SUFFIX, DIGEST_MAGIC)
        if known is not None:
            return known.decode()
    found = _digest_of_contents(folder, [name for name, *_ in files])
    last = max((max(times) for _, _, times, _ in files), default=0)
    if key and last < time.time_ns() - SETTLED_NS:
        cubins.store_body(key, cubins.DIGEST_SUFFIX, DIGEST_MAGIC, found.encode())
    return found


def _files_of(folder: str, within: str, endings: tuple[str, ...]) -> Iterator[File]:
    with os.scandir(within) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_of(folder, entry.path, endings)
            elif entry.name.endswith(endings):
                about = entry.stat()
                name = entry.path[len(folder) :]
                yield name, about.st_size, (about.st_mtime_ns, about.st_ctime_ns), about.st_ino


def _digest_of_contents(folder: str, names: Sequence[str]) -> str:
    import hashlib  # noqa: PLC0415  4 ms, likewise

    hashed = hashlib.sha256()
    for name in names:  # without pathlib, which takes 0.6 ms more in a process's first call
        with open(folder + name, "rb", buffering=0) as file:  # noqa: PTH123
            hashed.update(f"{name}\0".encode() + file.read() + b"\0")
    return hashed.hexdigest()[:16]


def options() -> tuple[str, ...]:
    """Return the compiler's options, the same for every module. CuPy adds -ftz=true and -default-device to them."""
    return (f"-I{kernels_dir()}", "--std=c++17")


def _options_told() -> tuple[str, ...]:
    """Return all that decides on the compiler's options, except its version, which is known once it is loaded."""
    return (*options(), *CUPY_OPTIONS, *map(str, TIME_SAVING_OPTIONS))


def time_saving_options(version: tuple[int, int]) -> tuple[str, ...]:
    """Return those of TIME_SAVING_OPTIONS that this version of NVRTC knows: it refuses others."""
    return tuple(option for since, option in TIME_SAVING_OPTIONS if version >= since)


def template_argument(value: object) -> str:
    """Write a template argument in C++."""
    if isinstance(value, bool):  # before int: True is an int too, and "True" is not C++
        return "true" if value else "false"
    return str(value)


def text(
    source: str,
    arguments: str,
    size: int,
    fused: Sequence[str] | None = None,
    *,
    header: str = "row/variants.cuh",
) -> str:
    """Return the text of a module: the headers, and a guard against host and device layouts that differ.

    fused: the functions of a fused Load and Store in C++, where there are any.
    """
    more = "" if fused is None else "".join(("#include <io/fused.cuh>\n", *dict.fromkeys(fused)))
    return (
        f"// cupynorm {digest()}\n"
        f"#include <{header}>\n#include <{source}>\n{more}"
        f'static_assert(sizeof({arguments}) == {size}, "Arguments: host and device layouts differ");\n'
    )


class Kernel(NamedTuple):
    """A loaded kernel: the driver's handle, and the kernel's resources."""

    pointer: int
    registers: int
    local_bytes: int
    module: Any  # keeps the function loaded


# Seconds to wait for another thread that compiles the same kernel, which is then compiled here, too.
PATIENCE = 60.0


class Wanted(NamedTuple):
    """The source and the launch settings of a kernel: two that differ in any of it are two loaded functions.

    shared_limit: the dynamic shared memory that a launch may ask for; 0 is the driver's own limit. accelerated: with
    instructions that no later architecture has (sm_90a).
    """

    device: int
    code: str
    expression: str
    shared_limit: int = 0
    cluster: int = 1
    accelerated: bool = False


class Kernels:
    """Loaded kernels, which are unloaded with this object. Entered, it takes what this thread loads.

    Code that loads, launches and unloads kernels of its own (`tune`) enters one, in each of its threads. Other threads
    do not see these kernels, so that only their owner's CUDA graphs can use them.
    """

    def __init__(self) -> None:
        self._found: dict[Wanted, Kernel] = {}
        # one for each kernel: different ones compile at once
        self._loading: dict[Wanted, Any] = {}
        # both may be taken again by their own thread: by a call that a signal handler makes while a kernel is compiled
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        _thread.entered.append(self)

    def __exit__(self, *_: object) -> None:
        _thread.entered.pop()

    def get(self, wanted: Wanted) -> Kernel | None:
        """Return a kernel if it is here."""
        return self._found.get(wanted)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(tuple(self._found.values()))

    def load(self, wanted: Wanted) -> Kernel:
        """Return a kernel, loaded once however many threads ask for it."""
        with self._lock:
            loading = self._loading.setdefault(wanted, threading.RLock())
        # who holds it may have been interrupted by a signal handler that waits for this thread
        mine = loading.acquire(timeout=PATIENCE)
        try:
            found = self._found.get(wanted)
            if found is None:
                # where another came between, its kernel stays: it may be in use
                found = self._found.setdefault(wanted, _load(wanted))
        finally:
            if mine:
                loading.release()
        return found


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[Kernels] = []


_thread = _Thread()
# Never emptied: a CUDA graph may hold any kernel that was launched, and it cannot be asked which.
_kernels = Kernels()


def owner() -> Kernels | None:
    """Return the Kernels that this thread has entered; None if its kernels stay loaded."""
    return _thread.entered[-1] if _thread.entered else None


def kernel(
    device: int, code: str, expression: str, shared_limit: int, cluster: int = 1, *, accelerated: bool = False
) -> Kernel:
    """Load from disk, or compile and load; remembered per device, safe to call from several threads.

    The arguments are those of Wanted. `device` must be current. Raises CompileError with the compiler's log, which
    names the kernel's file and line.
    """
    wanted = Wanted(device, code, expression, shared_limit, cluster, accelerated)
    found = _kernels.get(wanted)
    if found is not None:
        return found
    where = owner() or _kernels
    return where.get(wanted) or where.load(wanted)


def _load(wanted: Wanted) -> Kernel:
    preparation = ""
    if wanted.shared_limit or wanted.cluster > 1:
        preparation = f"// for {wanted.shared_limit} bytes of shared memory, clusters of {wanted.cluster}\n"
    try:
        pointer, module = load_function(
            wanted.code, wanted.expression, accelerated=wanted.accelerated, preparation=preparation
        )
    except Exception as error:
        if type(error).__name__ != "CompileException":  # CuPy's; it cannot be named without CuPy
            raise
        raise CompileError(f"{wanted.expression}\n{error}") from error
    driver = devices.driver()
    if wanted.shared_limit:  # a launch that asks for less keeps its own figure
        most = devices.limits_of(wanted.device).shared_bytes_per_block + STATIC_SHARED_BYTES
        most -= driver.funcGetAttribute(STATIC_SHARED, pointer)
        driver.funcSetAttribute(pointer, MAX_DYNAMIC_SHARED, min(wanted.shared_limit, most))
        driver.funcSetAttribute(pointer, SHARED_CARVEOUT, 100)
    if wanted.cluster > PORTABLE_CLUSTER:
        driver.funcSetAttribute(pointer, LARGE_CLUSTERS_ALLOWED, 1)
    if wanted.cluster > 1:  # each launch is in clusters then
        for attribute, extent in zip(CLUSTER_SHAPE, (wanted.cluster, 1, 1), strict=True):
            driver.funcSetAttribute(pointer, attribute, extent)
    registers, local_bytes = (driver.funcGetAttribute(each, pointer) for each in (REGISTERS, LOCAL_BYTES))
    return Kernel(pointer, registers, local_bytes, module)


def compiles_itself() -> bool:
    """Say whether kernels are compiled here, not through CuPy's RawModule, which knows nothing accelerated."""
    return all(os.environ.get(switch, "0") in {"", "0"} for switch in CUPY_SWITCHES)


def keeps_on_disk() -> bool:
    """Say whether compiled kernels are kept in our cache of cubins, where another process finds them."""
    return compiles_itself() and not cubins.why_unusable()


def load_function(
    code: str, expression: str, *, accelerated: bool = False, preparation: str = ""
) -> tuple[int, Any]:
    """Return a function's handle and what keeps it loaded, through our cache of cubins.

    Each call loads a module of its own, since a function's attributes are set for all who share it. preparation: a line
    of C++ that says for what.

    CuPy's RawModule has a cache as well, but loads NVRTC and compiles an empty file before it looks there: 14 ms on an
    H200's host. It stays the way out where CuPy is another than we know, or told to compile otherwise.
    """
    if not compiles_itself():
        return load_function_by_cupy(code, expression, preparation=preparation)
    try:
        key = key_of(code, expression, accelerated=accelerated)
        cubin = cubins.load(key)
        if cubin is not None:
            try:
                return _loaded(cubin)
            except Exception:  # noqa: BLE001  CuPy's error: an older driver than the one it was compiled beside
                cubin = None
        cubin = compile_cubin(code, expression, accelerated=accelerated)
        found = _loaded(cubin)
    except Exception as error:
        if accelerated or type(error).__name__ == "CompileException":
            raise
        return load_function_by_cupy(
            code, expression, preparation=preparation
        )  # it reports the fault, if there is one
    if cubin.image.startswith(b"\x7fELF"):  # the driver caches compiled PTX itself
        cubins.store(key, cubin)
    return found


def key_of(code: str, expression: str, *, accelerated: bool = False) -> str:
    """Return the key of a kernel in our cache of cubins, for the current device."""
    return cubins.key(code, expression, *what_compiles(), "a" if accelerated else "")


def what_compiles() -> tuple[str, ...]:
    """Return all that a kernel's machine code depends on, beside its text and its name, on the current device."""
    return (*_options_told(), *_compiled_for())


def load_function_by_cupy(
    code: str, expression: str, *, accelerated: bool = False, preparation: str = ""
) -> tuple[int, Any]:
    """Return the same through CuPy's RawModule, which has its own cache on disk."""
    del accelerated
    # CuPy gives everyone with the same text the same module
    module = devices.cupy().RawModule(
        code=code + preparation, options=options(), name_expressions=(expression,)
    )
    return module.get_function(expression).kernel.ptr, module


def compile_cubin(code: str, expression: str, *, accelerated: bool = False) -> cubins.Cubin:
    """Compile for the current device, as RawModule would but for its empty file and its cache.

    By CuPy's NVRTC, not by _nvrtc: that takes the newest one installed, whose cubins the driver need not know.
    """
    cuda = devices.cupy().cuda
    numbers = cuda.nvrtc.getVersion()
    version = "NVRTC " + ".".join(map(str, numbers))
    asked = (*options(), FLUSH_TO_ZERO, *time_saving_options(numbers))
    if accelerated:
        return cubins.Cubin(*_compile_accelerated(code, expression, asked), version)
    image, names = cuda.compiler.compile_using_nvrtc(
        code, asked, name_expressions=(expression,), cache_in_memory=True
    )
    return cubins.Cubin(image, names[expression], version)


def _compile_accelerated(code: str, expression: str, asked: tuple[str, ...]) -> tuple[bytes, str]:
    """Return an image and the kernel's name in it. CuPy's own compile functions never choose this architecture."""
    nvrtc = devices.cupy().cuda.nvrtc
    arch = f"-arch=sm_{devices.present_limits().compute_capability}a"
    program = nvrtc.createProgram(code, "cupynorm.cu", (), ())
    try:
        nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, (*asked, DEFAULT_DEVICE, arch))
        return nvrtc.getCUBIN(program), nvrtc.getLoweredName(program, expression)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{expression}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _loaded(cubin: cubins.Cubin) -> tuple[int, Any]:
    module = devices.cupy().cuda.function.Module()
    module.load(cubin.image)
    function = module.get_function(cubin.lowered_name)
    return function.ptr, function


def _compiled_for() -> tuple[str, ...]:
    build = devices.driver().get_build_version()
    return (
        devices.present_limits().compute_capability,
        devices.cupy().__version__,
        str(build),
        _nvrtc_wheel(build // 1000),
        os.environ.get("CUDA_PATH", ""),
    )


@functools.cache
def _nvrtc_wheel(major: int) -> str:
    """Return the version of the wheel that brings NVRTC; empty if there is none.

    NVRTC itself cannot be asked without loading it, which takes longer than everything else. So a toolkit of the system
    that is updated in place goes unnoticed, and kernels that the old one compiled stay in use: they are as right as
    before.
    """
    prefix, suffix = f"{NVRTC_WHEELS.get(major)}-", ".dist-info"
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208
        except OSError:  # none, or an archive
            continue
        for name in names:  # importlib.metadata would sort all of them: a millisecond
            if name.startswith(prefix) and name.endswith(suffix):
                return f"Version: {name[len(prefix) : -len(suffix)]}"
    return ""
