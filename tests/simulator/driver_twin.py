"""Stand-in for cupy_backends.cuda.api.driver: the calls that cupynorm makes, with the errors a device would give."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from cupynorm.plan import limits
from cupynorm.runtime import devices

from . import engine
from .build import Library
from .machine import MAX_BLOCK, MAX_GRID, REGISTERS, STATIC_LIMIT, machine

if TYPE_CHECKING:
    from typing import Any

MAX_THREADS_PER_BLOCK, SHARED_SIZE_BYTES, LOCAL_SIZE_BYTES, NUM_REGS = 0, 1, 3, 4
MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
REQUIRED_CLUSTER_WIDTH, REQUIRED_CLUSTER_HEIGHT, REQUIRED_CLUSTER_DEPTH = CLUSTER_SHAPE = 11, 12, 13
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
PTX_VERSION, BINARY_VERSION = 5, 6
NUMBERS = {
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": 912,
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": 720,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
}
CLUSTER_CAPABILITY = 90  # the first that has clusters
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16


class CUDADriverError(RuntimeError):
    """An error of a driver call: CUDA's name for it and what was wrong, or its number, as the driver gives it."""

    def __init__(self, what: str | int) -> None:
        super().__init__(what)
        self.status = what if isinstance(what, int) else NUMBERS.get(what.partition(":")[0], 1)


class Function:
    """A kernel as one device has loaded it."""

    def __init__(self, library: Library, device: int) -> None:
        self.library = library
        self.device = device
        self.registers = min(REGISTERS, machine.limits(device).registers_per_sm // library.max_threads)
        self.attributes = {
            MAX_DYNAMIC_SHARED_SIZE_BYTES: STATIC_LIMIT - library.static_shared_bytes,
            **dict.fromkeys(CLUSTER_SHAPE, 0),
            NON_PORTABLE_CLUSTER_SIZE_ALLOWED: 0,
        }

    @property
    def static_shared_bytes(self) -> int:
        """What its __shared__ variables take."""
        return self.library.static_shared_bytes


_functions: dict[int, Function] = {}
_numbers = itertools.count(1 << 40)  # no address, so that a handle used as one shows


def load(library: Library) -> int:
    """Load a kernel on the current device; gives its handle."""
    handle = next(_numbers)
    _functions[handle] = Function(library, machine.current)
    return handle


def _function(handle: int) -> Function:
    found = _functions.get(handle)
    if found is None or found.device != machine.current:
        raise CUDADriverError(
            f"CUDA_ERROR_INVALID_HANDLE: {handle} is not a function of device {machine.current}"
        )
    return found


def _invalid(what: str) -> CUDADriverError:
    return CUDADriverError(f"CUDA_ERROR_INVALID_VALUE: invalid argument: {what}")


def funcSetAttribute(f: int, attribute: int, value: int) -> None:  # noqa: N802
    """Set a function's attribute on the current device."""
    function = _function(f)
    if attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES:
        most = machine.opt_in_bytes() - function.static_shared_bytes
        if not 0 <= value <= most:
            raise _invalid(
                f"{value} bytes of dynamic shared memory, the device has {most} beside the static ones"
            )
    elif attribute in CLUSTER_SHAPE or attribute == NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
        _check_cluster(function, attribute, value)
    elif attribute != PREFERRED_SHARED_MEMORY_CARVEOUT:
        raise _invalid(f"attribute {attribute} cannot be set")
    function.attributes[attribute] = value


def _check_cluster(function: Function, attribute: int, value: int) -> None:
    """Refuse what no launch could use. A device looks at the shape only when it launches, and says less."""
    capability = int(machine.limits().compute_capability)
    if capability < CLUSTER_CAPABILITY:
        raise _invalid(f"attribute {attribute}, a device of compute capability {capability} has no clusters")
    portable = not function.attributes[NON_PORTABLE_CLUSTER_SIZE_ALLOWED]
    widest = PORTABLE_CLUSTER if portable else LARGEST_CLUSTER
    most = widest if attribute == REQUIRED_CLUSTER_WIDTH else 1
    if not 0 <= value <= most:
        raise _invalid(f"attribute {attribute} is {value}, 0 to {most} is allowed")


def funcGetAttribute(attribute: int, f: int) -> int:  # noqa: N802
    """Return a function's attribute."""
    function = _function(f)
    known = {
        MAX_THREADS_PER_BLOCK: function.library.max_threads,
        SHARED_SIZE_BYTES: function.static_shared_bytes,
        LOCAL_SIZE_BYTES: 0,
        NUM_REGS: function.registers,
        PREFERRED_SHARED_MEMORY_CARVEOUT: -1,
        **dict.fromkeys((PTX_VERSION, BINARY_VERSION), int(machine.limits().compute_capability)),
    }
    return {**known, **function.attributes}[attribute]


def occupancyMaxActiveBlocksPerMultiprocessor(f: int, block: int, shared_bytes: int) -> int:  # noqa: N802
    """Return how many blocks an SM holds at once; 0 for a block that cannot be launched."""
    function = _function(f)
    if (
        not 0 < block <= function.library.max_threads
        or shared_bytes > function.attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES]
    ):
        return 0
    shared = shared_bytes + function.static_shared_bytes
    return limits.active_blocks(machine.limits(), block, function.registers, shared)


def active_clusters(function: int, cluster: int, block: int, shared_bytes: int) -> int:
    """Return how many clusters the device would hold at once if its multiprocessors were one group."""
    resident = occupancyMaxActiveBlocksPerMultiprocessor(function, block, shared_bytes)
    return machine.limits().sm_count * resident // cluster


def launchKernel(  # noqa: N802
    f: int,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared_bytes: int,
    stream: int,
    parameters: int,
    extra: int,
) -> None:
    """Run a kernel to its end. `parameters` is the address of void*[], as for cuLaunchKernel."""
    if extra:
        raise _invalid("`extra` is not supported")
    _launch(_function(f), (gx, gy, gz), (bx, by, bz), shared_bytes, stream, parameters)


def box_map(pointer: int, rows: int, cols: int, dtype: str, box_rows: int) -> np.ndarray[Any, Any]:
    """Return the words of the stand-in's TensorMap, in place of box_map of devices.py."""
    del dtype
    return np.array([pointer, cols, rows, box_rows, *[0] * 12], np.uint64)


def launchCooperativeKernel(  # noqa: N802
    f: int,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared_bytes: int,
    stream: int,
    parameters: int,
) -> None:
    """Run a kernel whose blocks are alive all at once, so that they may wait for one another."""
    room = (
        occupancyMaxActiveBlocksPerMultiprocessor(f, bx * by * bz, shared_bytes) * machine.limits().sm_count
    )
    if gx * gy * gz > room > 0:
        raise CUDADriverError(
            f"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: too many blocks in cooperative launch: {gx * gy * gz}, "
            f"the device holds {room} at once"
        )
    if machine.share_refusal:
        raise CUDADriverError(
            f"{machine.share_refusal}: a share of the device does not run all blocks at once"
        )
    _launch(_function(f), (gx, gy, gz), (bx, by, bz), shared_bytes, stream, parameters, cooperative=True)


def address(pointer: Any) -> int:
    """Return the address that the package gives the driver as a pointer of ctypes; 0 for None."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def launch_kernel_ex(*pointers: Any) -> int:
    """Stand-in for cuLaunchKernelEx, which the package calls without CuPy. What a device would refuse raises as above.

    Errors whose number the package looks at are returned, as by a device.
    """
    config, function, parameters, extra = map(address, pointers)
    if extra:
        raise _invalid("`extra` is not supported")
    told = devices._LaunchConfig.from_address(config)
    attributes = {each.id: each.value[0] for each in told.attributes[: told.attribute_count]}
    shape = (*told.grid, *told.block, told.shared_bytes, told.stream or 0, parameters)
    if attributes.pop(devices.BEGIN_EARLY, 0) != 1 or set(attributes) - {devices.COOPERATIVE}:
        raise _invalid(f"launch attributes {attributes}")
    try:
        if attributes.get(devices.COOPERATIVE):
            launchCooperativeKernel(function, *shape)
        else:
            launchKernel(function, *shape, 0)
    except CUDADriverError as error:
        if error.status not in NUMBERS.values():
            raise
        return error.status
    return 0


def _launch(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    stream: int,
    parameters: int,
    *,
    cooperative: bool = False,
) -> None:
    library = function.library
    if stream != machine.stream:
        raise CUDADriverError(
            f"CUDA_ERROR_INVALID_HANDLE: stream {stream} is not the current one, {machine.stream}"
        )
    threads = math.prod(block)
    if (
        min(*grid, *block) < 1
        or threads > MAX_BLOCK
        or any(g > m for g, m in zip(grid, MAX_GRID, strict=True))
    ):
        raise _invalid(f"grid {grid}, block {block}")
    if threads > library.max_threads:
        raise _invalid(f"block of {threads} threads, __launch_bounds__ allows {library.max_threads}")
    if shared_bytes > function.attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES]:
        most = function.attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES]
        raise _invalid(
            f"{shared_bytes} bytes of dynamic shared memory, the function's attribute allows {most}"
        )
    cluster = _cluster(function, grid)
    pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
    values = [ctypes.string_at(pointers[i], size) for i, size in enumerate(library.parameter_bytes)]
    launch = functools.partial(
        engine.launch, library, grid, block, shared_bytes, values, cluster=cluster, cooperative=cooperative
    )
    if machine.captured is not None:
        machine.captured.launches.append(launch)
    else:
        machine.order.note(stream, "launch")
        launch()


def _cluster(function: Function, grid: tuple[int, int, int]) -> int:
    """Return how many blocks along x form a cluster."""
    shape = tuple(function.attributes[each] for each in CLUSTER_SHAPE)
    if not any(shape):
        return 1
    width = shape[0]
    portable = not function.attributes[NON_PORTABLE_CLUSTER_SIZE_ALLOWED]
    if not all(shape) or grid[0] % width or (portable and width > PORTABLE_CLUSTER):
        raise CUDADriverError(
            f"CUDA_ERROR_INVALID_CLUSTER_SIZE: cluster misconfiguration: clusters {shape} in a grid {grid}"
        )
    return width
