"""Stand-in for the part of CuPy that cupynorm uses. "Device memory" is guarded host memory, for kernels only."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np

from . import driver_twin, engine
from .build import CompileError, Library
from .machine import MAX_BLOCK, MAX_GRID, STATIC_LIMIT, machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

__version__ = "14.2.0"
MEMORY = 1 << 34  # what each device says it has


class MemoryPointer(NamedTuple):
    """Where an array begins. memory: what holds the bytes of an allocation."""

    ptr: int
    device: Any
    device_id: int
    memory: Any = None

    def __add__(self, offset: int) -> MemoryPointer:  # type: ignore[override]
        return self._replace(ptr=self.ptr + offset)

    def copy_from_host_async(self, source: int, size: int) -> None:
        """Copy at once."""
        machine.order.note(machine.stream, "copy")
        ctypes.memmove(self.ptr, source, size)

    def copy_from_device_async(self, source: MemoryPointer, size: int) -> None:
        """Copy at once."""
        ctypes.memmove(self.ptr, source.ptr, size)

    def memset_async(self, value: int, size: int) -> None:
        """Set bytes at once."""
        ctypes.memset(self.ptr, value, size)


class ndarray(np.ndarray):  # noqa: N801
    """A device array. Made by empty, zeros, asarray and place; views of it are device arrays too."""

    _device: int

    def __array_finalize__(self, source: Any) -> None:
        self._device = getattr(source, "_device", machine.current)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Its pointer, as .data.ptr."""
        return MemoryPointer(self.__array_interface__["data"][0], self.device, self._device)

    def __new__(
        cls, shape: int | Sequence[int], dtype: Any = float, memptr: MemoryPointer | None = None
    ) -> Self:
        """Allocate on the current device, poison until somebody writes; or take memory that is allocated."""
        if memptr is None:
            return cast("Self", _new(shape, dtype))
        first = memptr.ptr - memptr.memory.data.ptr
        made = np.ndarray(shape, dtype, memptr.memory.view(np.ndarray), first).view(ndarray)
        made._device = memptr.device_id
        return cast("Self", made)

    @property
    def _c_contiguous(self) -> bool:
        return self.flags.c_contiguous

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The device it is on."""
        return Device(self._device)

    def get(self) -> np.ndarray:
        """Return a copy on the host."""
        return np.array(self, subok=False, copy=True)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "a device array of the simulator computes only in kernels: look at it with cupy.asnumpy"
        )

    __array_ufunc__ = _refuse
    __array_function__ = _refuse

    def __repr__(self) -> str:
        return f"simulated {self.get()!r} on device {self._device}"

    __str__ = __repr__


ndarray.__module__ = "cupy"  # the product looks there before it imports CuPy
ndarray.__qualname__ = "ndarray"


def _new(shape: int | Sequence[int], dtype: Any, misalign: int = 0) -> ndarray:
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    allocator = getattr(_own, "allocator", None)
    memory = engine.allocate(nbytes, misalign) if allocator is None else allocator(nbytes)
    made = np.asarray(memory).view(dtype).reshape(shape).view(ndarray)
    made._device = machine.current
    return made


def _alloc(size: int) -> MemoryPointer:
    memory = _new((size,), np.uint8)
    return MemoryPointer(memory.data.ptr, memory.device, memory._device, memory)


def empty(shape: int | Sequence[int], dtype: Any = float) -> ndarray:
    """Allocate on the current device: poison until somebody writes."""
    return _new(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any = float) -> ndarray:
    """Allocate zeros on the current device."""
    made = _new(shape, dtype)
    made[...] = 0
    return made


def place(x: Any, misalign: int = 0) -> ndarray:
    """Copy to the current device, `misalign` bytes off the allocator's alignment. Not CuPy's: tests need it."""
    x = np.asarray(x)
    made = _new(x.shape, x.dtype, misalign)
    made[...] = x
    return made


def empty_like(x: ndarray) -> ndarray:
    """Allocate an array of x's shape and dtype on the current device."""
    return _new(x.shape, x.dtype)


def _as_strided(x: ndarray, shape: Sequence[int], strides: Sequence[int]) -> ndarray:
    made = np.lib.stride_tricks.as_strided(x.view(np.ndarray), shape, strides).view(ndarray)
    made._device = x._device
    return made


def asarray(x: Any, dtype: Any = None) -> ndarray:
    """Copy to the current device, unless it is a device array already."""
    if isinstance(x, ndarray) and (dtype is None or x.dtype == np.dtype(dtype)):
        return x
    return place(np.asarray(x.get() if isinstance(x, ndarray) else x, dtype=dtype))


array = asarray


def asnumpy(x: Any) -> np.ndarray:
    """Copy to the host."""
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


class Device:
    """A device; inside `with` it is the current one."""

    def __init__(self, id: int | None = None) -> None:  # noqa: A002
        self.id = machine.current if id is None else id
        self._before: list[int] = []

    def __enter__(self) -> Self:
        if not 0 <= self.id < len(machine.devices):
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._before.append(machine.current)
        machine.current = self.id
        return self

    def __exit__(self, *_: object) -> None:
        machine.current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def use(self) -> None:
        """Make it the current device."""
        machine.current = self.id

    def synchronize(self) -> None:
        """Wait for nothing: launches here end before they return."""

    @property
    def compute_capability(self) -> str:
        """Two digits: "90"."""
        return machine.limits(self.id).compute_capability

    @property
    def attributes(self) -> dict[str, int]:
        """CuPy's names for cudaDeviceGetAttribute."""
        limits = machine.limits(self.id)
        capability = int(limits.compute_capability)
        return {
            "ComputeCapabilityMajor": capability // 10,
            "ComputeCapabilityMinor": capability % 10,
            "L2CacheSize": limits.l2_bytes,
            "MaxBlockDimX": MAX_BLOCK,
            "MaxBlocksPerMultiprocessor": limits.blocks_per_sm,
            "MaxGridDimX": MAX_GRID[0],
            "MaxGridDimY": MAX_GRID[1],
            "MaxGridDimZ": MAX_GRID[2],
            "MaxRegistersPerBlock": limits.registers_per_sm,
            "MaxRegistersPerMultiprocessor": limits.registers_per_sm,
            "MaxSharedMemoryPerBlock": STATIC_LIMIT,
            "MaxSharedMemoryPerBlockOptin": machine.opt_in_bytes(self.id),
            "MaxSharedMemoryPerMultiprocessor": limits.shared_bytes_per_sm,
            "MaxThreadsPerBlock": MAX_BLOCK,
            "MaxThreadsPerMultiProcessor": limits.threads_per_sm,
            "MultiProcessorCount": limits.sm_count,
            "ReservedSharedMemoryPerBlock": limits.reserved_shared_bytes,
            "WarpSize": 32,
        }


class Stream:
    """A stream; inside `with` it is the current one. Launches on any other are refused: they would be out of order."""

    _numbers = iter(range(1 << 20, 1 << 30))

    def __init__(self, *, null: bool = False, non_blocking: bool = False) -> None:
        del non_blocking
        self.ptr = 0 if null else next(Stream._numbers)
        self._before: list[int] = []

    @classmethod
    def of(cls, ptr: int) -> Stream:
        """Return the stream of a handle."""
        found = cls(null=True)
        found.ptr = ptr
        return found

    def __enter__(self) -> Self:
        self._before.append(machine.stream)
        machine.stream = self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        machine.stream = self._before.pop()

    def synchronize(self) -> None:
        """Wait for nothing: launches here end before they return. The order of what was noted is that of a device."""
        machine.order.host |= machine.order.of(self.ptr)

    def wait_event(self, event: Event) -> None:
        """Wait for nothing, likewise."""
        machine.order.streams[self.ptr] = machine.order.of(self.ptr) | event.marked

    def is_capturing(self) -> bool:
        """Say whether launches are noted, or a test says so."""
        return machine.capturing or machine.captured is not None

    def begin_capture(self) -> None:
        """Note launches instead of running them."""
        if machine.stream != self.ptr:
            raise CUDARuntimeError("the simulator captures the current stream only")
        machine.captured = Graph()

    def end_capture(self) -> Graph:
        """Return the launches that were noted."""
        graph, machine.captured = machine.captured, None
        if graph is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not capturing")
        return graph


class Graph:
    """Launches that were captured, and the pools' memory that was allocated while they were."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.memory: list[Memory] = []

    def launch(self, stream: Any) -> None:
        """Run them. Memory that went back to the device meanwhile is a fault."""
        machine.order.note(stream.ptr, "graph")
        if any(each.freed for each in self.memory):
            raise engine.SimulatorError(
                "illegal memory access: a graph's memory was given back to the device"
            )
        for each in self.launches:
            each()


class Event:
    """A mark in a stream."""

    def __init__(self, *, disable_timing: bool = False) -> None:
        del disable_timing
        self.marked: frozenset[int] = frozenset()

    def record(self, stream: Any) -> None:
        """Mark what the stream did so far."""
        self.marked = machine.order.of(stream.ptr)

    def synchronize(self) -> None:
        """Wait for nothing: launches here end before they return. The order of what was noted is that of a device."""
        machine.order.host |= self.marked


class Memory:
    """Memory of no pool; machine.room bounds it."""

    def __init__(self, size: int) -> None:
        if size > machine.room:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", OUT_OF_MEMORY)
        machine.room -= size
        self.bytes, self.freed = engine.allocate(size), False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Where it is: an array of it keeps it."""
        return self.bytes.__array_interface__

    def free(self) -> None:
        """Give it back. It stays readable here: who uses it is told by other means."""
        machine.room += 0 if self.freed else self.bytes.nbytes
        self.freed = True

    def __del__(self) -> None:
        if hasattr(self, "bytes"):
            self.free()


class _Lent:
    """Memory that a pool gave to an array, which keeps this; it goes back when that is dropped."""

    def __init__(self, free: list[Memory], memory: Memory) -> None:
        self._free, self._memory = free, memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.bytes.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


class MemoryPool:
    """A pool as CuPy's: short of memory, it gives back all that is free, and tries again."""

    def __init__(self, allocator: Any = Memory) -> None:
        self._allocator, self._free = allocator, list[Memory]()

    def malloc(self, size: int) -> _Lent:
        """Give memory that was freed or, where there is none of this size, new."""
        found = next((each for each in self._free if each.bytes.nbytes == size), None)
        if found is not None:
            self._free.remove(found)
        else:
            found = self._new(size)
        if machine.captured is not None:
            machine.captured.memory.append(found)
        return _Lent(self._free, found)

    def _new(self, size: int) -> Memory:
        try:
            return self._allocator(size)
        except CUDARuntimeError:
            self.free_all_blocks()
        try:
            return self._allocator(size)
        except CUDARuntimeError as error:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes") from error

    def free_all_blocks(self) -> None:
        """Give the device what no array has."""
        while self._free:
            self._free.pop().free()


class CUDARuntimeError(RuntimeError):
    """An error of the runtime, by CUDA's name."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class OutOfMemoryError(MemoryError):
    """A pool's."""


OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_own = threading.local()


@contextlib.contextmanager
def _using_allocator(allocator: Any) -> Iterator[None]:
    """Allocate what this thread makes from there."""
    before = getattr(_own, "allocator", None)
    _own.allocator = allocator
    try:
        yield
    finally:
        _own.allocator = before


class CompileException(Exception):  # noqa: N818
    """The compiler refused the text; the message is its log."""


def _properties(device: int) -> dict[str, Any]:
    limits = machine.limits(device)
    attributes = Device(device).attributes
    return {
        "name": limits.name.encode(),
        "major": attributes["ComputeCapabilityMajor"],
        "minor": attributes["ComputeCapabilityMinor"],
        "l2CacheSize": limits.l2_bytes,
        "maxBlocksPerMultiProcessor": limits.blocks_per_sm,
        "maxGridSize": MAX_GRID,
        "maxThreadsPerBlock": MAX_BLOCK,
        "maxThreadsPerMultiProcessor": limits.threads_per_sm,
        "multiProcessorCount": limits.sm_count,
        "regsPerBlock": limits.registers_per_sm,
        "regsPerMultiprocessor": limits.registers_per_sm,
        "reservedSharedMemPerBlock": limits.reserved_shared_bytes,
        "sharedMemPerBlock": STATIC_LIMIT,
        "sharedMemPerBlockOptin": attributes["MaxSharedMemoryPerBlockOptin"],
        "sharedMemPerMultiprocessor": limits.shared_bytes_per_sm,
        "totalGlobalMem": MEMORY,
        "warpSize": 32,
    }


def _attribute(number: int, device: int) -> int:
    """Stand-in for cudaDeviceGetAttribute, by the numbers of its header."""
    return Device(device).attributes[_ATTRIBUTES[number]]


_ATTRIBUTES = {
    8: "MaxSharedMemoryPerBlock",
    10: "WarpSize",
    16: "MultiProcessorCount",
    38: "L2CacheSize",
    39: "MaxThreadsPerMultiProcessor",
    75: "ComputeCapabilityMajor",
    76: "ComputeCapabilityMinor",
    81: "MaxSharedMemoryPerMultiprocessor",
    82: "MaxRegistersPerMultiprocessor",
    97: "MaxSharedMemoryPerBlockOptin",
    106: "MaxBlocksPerMultiprocessor",
    111: "ReservedSharedMemoryPerBlock",
}


def _current_stream(device_id: int = -1) -> Any:
    return Stream.of(machine.stream)


class RawModule:
    """CUDA text and the kernels named in it; compiled when the first is asked for, as CuPy does."""

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        name_expressions: Iterable[str] = (),
    ) -> None:
        if backend != "nvrtc":
            raise ValueError(f"backend {backend!r} is not simulated")
        self.code, self.options, self.name_expressions = code, tuple(options), tuple(name_expressions)

    def get_function(self, name: str) -> RawKernel:
        """Return a kernel by its name expression."""
        if self.name_expressions and name not in self.name_expressions:
            raise driver_twin.CUDADriverError(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
        return RawKernel(self.code, name, self.options)


class RawKernel:
    """A kernel, loaded on each device when it is first needed there."""

    def __init__(self, code: str, name: str, options: Sequence[str] = ()) -> None:
        self.code, self.name, self.options = code, name, tuple(options)
        self._handles: dict[int, int] = {}

    @property
    def kernel(self) -> Any:
        """The current device's function; its handle is .ptr."""
        if machine.current not in self._handles:
            try:
                library = Library(self.code, self.name, self.options)
            except CompileError as error:
                raise CompileException(str(error)) from error
            if library.static_shared_bytes > STATIC_LIMIT:
                raise CompileException(
                    f"{self.name} has {library.static_shared_bytes} bytes of static shared memory, "
                    f"{STATIC_LIMIT} at most"
                )
            self._handles[machine.current] = driver_twin.load(library)
        return types.SimpleNamespace(ptr=self._handles[machine.current])

    def _attribute(self, number: int) -> int:
        return driver_twin.funcGetAttribute(number, self.kernel.ptr)

    @property
    def num_regs(self) -> int:
        """A guess: nothing here allocates registers."""
        return self._attribute(driver_twin.NUM_REGS)

    @property
    def local_size_bytes(self) -> int:
        """Nothing spills here."""
        return self._attribute(driver_twin.LOCAL_SIZE_BYTES)

    @property
    def shared_size_bytes(self) -> int:
        """What its static __shared__ variables take."""
        return self._attribute(driver_twin.SHARED_SIZE_BYTES)

    @property
    def max_threads_per_block(self) -> int:
        """Its __launch_bounds__, else 1024."""
        return self._attribute(driver_twin.MAX_THREADS_PER_BLOCK)

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """What a launch may ask for."""
        return self._attribute(driver_twin.MAX_DYNAMIC_SHARED_SIZE_BYTES)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        driver_twin.funcSetAttribute(self.kernel.ptr, driver_twin.MAX_DYNAMIC_SHARED_SIZE_BYTES, value)

    @property
    def attributes(self) -> dict[str, int]:
        """CuPy's names."""
        names = (
            "num_regs",
            "local_size_bytes",
            "shared_size_bytes",
            "max_threads_per_block",
            "max_dynamic_shared_size_bytes",
        )
        return {name: getattr(self, name) for name in names}

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        """Launch; device arrays cross as pointers, NumPy scalars and size-one arrays by value."""
        held = [np.array([x.data.ptr]) if isinstance(x, ndarray) else np.array(x, ndmin=1) for x in args]
        parameters = np.array([x.ctypes.data for x in held], np.uintp)
        shape = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
        driver_twin.launchKernel(
            self.kernel.ptr, *shape, shared_mem, machine.stream, parameters.ctypes.data, 0
        )


lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=_as_strided))
runtime = types.SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    getDevice=lambda: machine.current,
    getDeviceCount=lambda: len(machine.devices),
    deviceGetAttribute=_attribute,
    getDeviceProperties=_properties,
    setDevice=lambda device: Device(device).use(),
    memGetInfo=lambda: (1 << 33, MEMORY),
    runtimeGetVersion=lambda: 12090,
    driverGetVersion=lambda: 13000,
    deviceSynchronize=lambda: machine.order.synchronize(),  # noqa: PLW0108  which order it is may change
    is_hip=False,
)
cuda = types.SimpleNamespace(
    Device=Device,
    Event=Event,
    Memory=Memory,
    MemoryPointer=lambda memory, offset: memory,
    MemoryPool=MemoryPool,
    alloc=_alloc,
    memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    Stream=Stream,
    using_allocator=_using_allocator,
    compiler=types.SimpleNamespace(CompileException=CompileException),
    device=types.SimpleNamespace(get_cublas_handle=lambda: 1),
    nvrtc=types.SimpleNamespace(getVersion=lambda: (12, 9)),
    get_current_stream=_current_stream,
    is_available=lambda: True,
    runtime=runtime,
)
