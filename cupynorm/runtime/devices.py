"""The device: its limits, and the only door to CuPy."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.plan.limits import RECORDED, STATIC_SHARED_BYTES, Limits, active_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Launch = Callable[[], int | None]
    Binding = Callable[[int, int], Launch]


__all__ = ["RECORDED", "CompileError", "Limits", "NoDeviceError", "active_blocks"]


class NoDeviceError(RuntimeError):
    """A CUDA device was needed and none can be used."""


class CompileError(RuntimeError):
    """The compiler refused a kernel; the message is its log, with file and line."""


@functools.cache
def cupy() -> ModuleType:
    """Import CuPy when it is first needed.

    Raises NoDeviceError if it is not installed, does not load, or is not for CUDA.
    """
    try:
        import cupy  # noqa: PLC0415  a quarter of a second, and not everyone has it
    except ImportError as error:
        raise NoDeviceError(
            f"CuPy is needed for device arrays and does not import ({error}): "
            "`cupynorm doctor` says what to install"
        ) from error
    except OSError as error:  # CuPy makes its cache folder when it is imported
        raise NoDeviceError(
            f"CuPy does not import ({error}): set CUPY_CACHE_DIR to a folder that you can write"
        ) from error
    if cupy.cuda.runtime.is_hip:
        raise NoDeviceError(
            f"CuPy {cupy.__version__} is built for ROCm, AMD's GPUs; cupynorm's kernels are CUDA, for NVIDIA's: "
            "`cupynorm doctor` says what to install"
        )
    return cupy  # type: ignore[no-any-return]


@functools.cache
def driver() -> ModuleType:
    """CuPy's binding of the CUDA driver: a launch through it costs 3 us, through RawKernel 5 us (H200's host)."""
    cupy()
    from cupy_backends.cuda.api import driver  # noqa: PLC0415

    return driver  # type: ignore[no-any-return]


@functools.cache
def cublas() -> ModuleType:
    """CuPy's binding of cuBLAS."""
    cupy()
    from cupy_backends.cuda.libs import cublas  # noqa: PLC0415

    return cublas  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def is_device_type(kind: type) -> bool:
    """Say whether a type is that of CuPy arrays, or a subclass of it."""
    if not any(base.__module__.partition(".")[0] == "cupy" for base in kind.__mro__):
        return False
    return issubclass(kind, cupy().ndarray)


def is_device_array(x: object) -> bool:
    """Say whether x is a CuPy array, without importing CuPy for what cannot be one."""
    return is_device_type(type(x))  # type: ignore[arg-type]  # every type hashes


def present_device() -> int:
    """Return the current device's number. Raises NoDeviceError where there is none."""
    try:
        return int(cupy().cuda.runtime.getDevice())
    except NoDeviceError:
        raise
    except Exception as error:  # CuPy's own error type cannot be named without CuPy
        raise NoDeviceError(f"no CUDA device can be used ({error}): `cupynorm doctor` says why") from error


# cudaDeviceAttr, whose numbers CUDA keeps. CuPy's Device.attributes asks for all that there are.
ATTRIBUTES = {
    "MultiProcessorCount": 16,
    "L2CacheSize": 38,
    "MaxThreadsPerMultiProcessor": 39,
    "ComputeCapabilityMajor": 75,
    "ComputeCapabilityMinor": 76,
    "MaxSharedMemoryPerMultiprocessor": 81,
    "MaxRegistersPerMultiprocessor": 82,
    "MaxSharedMemoryPerBlockOptin": 97,
    "MaxBlocksPerMultiprocessor": 106,
    "ReservedSharedMemoryPerBlock": 111,
}


@functools.cache
def limits_of(device: int) -> Limits:
    """Ask a device for its limits."""
    runtime = cupy().cuda.runtime

    def ask(name: str) -> int:
        return int(runtime.deviceGetAttribute(ATTRIBUTES[name], device))

    return Limits(
        name=name_of(device),
        compute_capability=f"{ask('ComputeCapabilityMajor')}{ask('ComputeCapabilityMinor')}",
        sm_count=ask("MultiProcessorCount"),
        threads_per_sm=ask("MaxThreadsPerMultiProcessor"),
        blocks_per_sm=ask("MaxBlocksPerMultiprocessor"),
        registers_per_sm=ask("MaxRegistersPerMultiprocessor"),
        shared_bytes_per_sm=ask("MaxSharedMemoryPerMultiprocessor"),
        shared_bytes_per_block=ask("MaxSharedMemoryPerBlockOptin") - STATIC_SHARED_BYTES,
        reserved_shared_bytes=ask("ReservedSharedMemoryPerBlock"),
        l2_bytes=ask("L2CacheSize"),
    )


def name_of(device: int) -> str:
    """Ask the driver for a device's name: CuPy reads all properties of the device for it, a millisecond more."""
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    try:
        library = _driver_library()
        if not library.cuDeviceGet(ctypes.byref(number), device) and not library.cuDeviceGetName(
            name, len(name), number
        ):
            return name.value.decode()
    except OSError:  # a driver under another name
        pass
    return str(cupy().cuda.runtime.getDeviceProperties(device)["name"].decode())


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which the value's first words are used."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


PTX_VERSION, BINARY_VERSION = 5, 6  # CU_FUNC_ATTRIBUTE_*, as 10 * major + minor
# CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE and CUDA_ERROR_NOT_SUPPORTED: a share of a device may refuse a cooperative
# launch, because the limits that it reports are those of the whole device
REFUSES_COOPERATION = {720, 801}
REFUSES_CLUSTERS = {
    912
}  # CUDA_ERROR_INVALID_CLUSTER_SIZE: a share may have no group of multiprocessors that holds a cluster
# CUDA_ERROR_ILLEGAL_INSTRUCTION and CUDA_ERROR_LAUNCH_FAILED: what every call gives after a kernel has stopped itself
STOPPED = {715, 719}
WHY_STOPPED = (
    "an earlier kernel stopped the device. One of cupynorm does so where out is x and something else wrote to it "
    "before the call had finished on its stream"
)
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
BEGIN_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
EARLY_SINCE, EARLY_CUDA = 90, 12030  # compute capability; CUDA of the driver, for graphs
MOST_STREAMS = 64  # whose launches a bound call keeps


@functools.cache
def _driver_library() -> ctypes.CDLL:
    """Return the driver itself, for the calls that CuPy has no binding of."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def launch_of(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    *,
    cooperative: bool = False,
) -> Binding:
    """Return a function that binds a kernel of the current device to a stream and to its parameters, a void*[] address.

    cooperative: all of its blocks run at the same time, or none. From sm_90 on the kernel is launched with programmatic
    dependent launch, in a graph, too (early_launches): it may begin before the kernel before it has ended, and waits
    for its end itself (pdl_wait).

    The binding returns a launch, which takes no arguments and returns the driver's status, or None where CuPy has
    checked it: ``status = launch()``, and then `launch_error(status)` is raised unless it is 0 or None.

    Signal handlers. A thread's bound calls write their pointers into parameters that the next call of the same
    kind writes, too. CPython runs signal handlers, which may make such a call, when a Python function is entered,
    after a call has returned, and at jumps (3.10: at those that go forwards as well). So between the first word that
    is written and the launch there is no call, no loop and no branch, and the launch is one call of a C function: no
    Python function, lambda or method. Everything else comes before: allocations, the stream's launch, and filling a
    copy of the words where that takes a loop, which is then assigned at once (``words[:] = copy``).
    tests/invoke/test_signal_handlers.py interrupts calls at all of these places.
    """
    early = early_launches() and _compiled_for(function) >= EARLY_SINCE
    return (_early if early else _in_turn)(function, grid, block, shared_bytes, cooperative=cooperative)


def early_switched_on() -> bool:
    """Say whether early launches are allowed: unless CUPYNORM_EARLY is 0."""
    return os.environ.get("CUPYNORM_EARLY") != "0"


def early_launches() -> bool:
    """Say whether kernels use programmatic dependent launch: not if CUPYNORM_EARLY is 0, nor on older devices."""
    if not early_switched_on():
        return False
    return int(present_limits().compute_capability) >= EARLY_SINCE and driver_cuda() >= EARLY_CUDA


def _compiled_for(function: int) -> int:
    """Return the architecture that a loaded kernel was compiled for: PTX of an older one has no wait in it."""
    return min(int(driver().funcGetAttribute(each, function)) for each in (PTX_VERSION, BINARY_VERSION))


def _in_turn(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    *,
    cooperative: bool = False,
) -> Binding:
    """Return the binding of a kernel that begins when the kernel before has ended."""
    call, extra = (driver().launchCooperativeKernel, ()) if cooperative else (driver().launchKernel, (0,))

    def bind(stream: int, parameters: int) -> Launch:
        return functools.partial(call, function, *grid, *block, shared_bytes, stream, parameters, *extra)

    return bind


def _early(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    *,
    cooperative: bool = False,
) -> Binding:
    """Return the binding of a kernel that may begin early."""
    call = _launch_kernel_ex()
    wanted = (BEGIN_EARLY, COOPERATIVE) if cooperative else (BEGIN_EARLY,)
    attributes = (_LaunchAttribute * len(wanted))(*(_LaunchAttribute(each, 0, (1,)) for each in wanted))

    def bind(stream: int, parameters: int) -> Launch:
        config = _LaunchConfig(grid, block, shared_bytes, stream, attributes, len(attributes))
        # of numbers ctypes would make pointers in each call, for 0.1 us; what is at an address here is not read
        there = (ctypes.byref(ctypes.c_char.from_address(each)) for each in (function, parameters))
        return functools.partial(call, ctypes.byref(config), *there, None)

    return bind


def refuses_clusters(error: Exception) -> bool:
    """Say whether an error of a launch means that a cluster of its blocks does not fit here."""
    return getattr(error, "status", None) in REFUSES_CLUSTERS


def refuses_cooperation(error: Exception) -> bool:
    """Say whether an error of a launch means that its blocks cannot all run at once here."""
    return getattr(error, "status", None) in REFUSES_COOPERATION


def refuses_plan(error: Exception) -> bool:
    """Say whether an error of a launch means that another plan may run here."""
    return refuses_clusters(error) or refuses_cooperation(error)


def launch_error(status: int) -> Exception:
    """Return the error of a launch that gave a status."""
    error: Exception = driver().CUDADriverError(status)
    if status in STOPPED:
        error.args = (f"{error}: {WHY_STOPPED}",)
    return error


class Launches(dict[int, "Launch"]):
    """Launches of one kernel with one list of parameters, by stream. A stream's is made when it is first asked for."""

    __slots__ = ("_address", "_bind")

    def __init__(self, bind: Binding, address: int) -> None:
        self._bind, self._address = bind, address

    def __missing__(self, stream: int) -> Launch:
        if len(self) >= MOST_STREAMS:
            self.clear()
        made = self[stream] = self._bind(stream, self._address)
        return made

    def once(self) -> None:
        """Launch on the current stream, outside a bound call that is made again. Raises the driver's error."""
        status = self[cupy().cuda.get_current_stream().ptr]()
        if status:
            raise launch_error(status)


@functools.cache
def _launch_kernel_ex() -> Callable[..., int]:
    """Return the driver's call. It takes pointers as ctypes has them (byref): a number would be cut to 32 bits."""
    call = _driver_library().cuLaunchKernelEx
    call.restype = ctypes.c_int
    return call


@functools.cache
def driver_cuda() -> int:
    """Return the CUDA version of the driver, as 12040 for 12.4."""
    return int(cupy().cuda.runtime.driverGetVersion())


def launch_early(
    function: int, grid: tuple[int, int, int], block: int, shared_bytes: int, parameters: int
) -> None:
    """Launch a kernel on the current device and stream, once. parameters: the address of void*[]."""
    launch_once(launch_of(function, grid, (block, 1, 1), shared_bytes), parameters)


def launch_once(bind: Binding, parameters: int) -> None:
    """Launch a kernel on the current stream, with parameters that are this launch's own."""
    Launches(bind, parameters).once()


BOX_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
BOX_MAP_WORDS = 16  # of CUtensorMap
BOX_COLS = 64  # elements of 2 bytes: the width that its swizzle is made for


def box_map(pointer: int, rows: int, cols: int, dtype: str, box_rows: int) -> np.ndarray[Any, Any]:
    """Return the words of a kernel's TensorMap: a contiguous matrix in 16 bits, in boxes of box_rows x 64 elements."""
    words = np.zeros(2 * BOX_MAP_WORDS, np.uint64)
    # the driver wants them at a multiple of 64 bytes
    words = words[-words.ctypes.data % 64 // 8 :][:BOX_MAP_WORDS]
    status = _driver_library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(words.ctypes.data),
        BOX_TYPES[dtype],
        2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(cols, rows),
        (ctypes.c_uint64 * 1)(2 * cols),
        (ctypes.c_uint32 * 2)(BOX_COLS, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        *(0, 3, 2, 0),  # no interleaving, a swizzle of 128 bytes, 128 at a time to L2, 0 for elements outside
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled gave status {status}: its header, cuda.h, names it")
    return words


def active_clusters(function: int, cluster: int, block: int, shared_bytes: int) -> int:
    """Return how many clusters of a kernel the current device holds at once; 0 if it cannot be launched.

    This is less than the multiprocessors divided by the cluster's size: a cluster stays within a group of up to 18 of
    them, and groups differ in size.
    """
    attribute = _LaunchAttribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1))
    config = _LaunchConfig((cluster, 1, 1), (block, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1)
    count = ctypes.c_int(0)
    status = _driver_library().cuOccupancyMaxActiveClusters(
        ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)
    )
    return 0 if status else count.value


def present_limits() -> Limits:
    """Return the limits of the current device."""
    return limits_of(present_device())


@functools.cache
def driver_version() -> str:
    """Return the driver's version, such as "580.159.04"; where only its CUDA is told, that: "CUDA 13.0"."""
    import re  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415  10 ms, which `import cupynorm` need not wait for

    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        text = ""
    found = re.search(r"Module\D*(\d+\.[\d.]+)", text)
    if found:
        return found[1]
    version = cupy().cuda.runtime.driverGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def array_maker() -> Callable[..., Any]:
    """Return what makes a CuPy array of a shape, a dtype, and memory that is allocated, else new memory.

    CuPy's own class does the same by way of two Python methods, which take half of the time of an array (note 004).
    """
    kind = cupy().ndarray
    base = kind.__base__
    if not hasattr(base, "_init"):
        return kind  # type: ignore[no-any-return]
    blank, fill = base.__new__, base._init  # noqa: SLF001

    def make(shape: tuple[int, ...], dtype: Any, memory: Any = None) -> Any:
        array = blank(kind)
        fill(array, shape, dtype, memory)
        return array

    return make


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Allocate a C-contiguous device array on the current device."""
    return cupy().empty(shape, dtype)
