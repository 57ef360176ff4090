"""Bound calls: calls that a thread has made before, launched again with other addresses and without checks."""

from __future__ import annotations

import array
import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype
from cupynorm._values import NamedTuple, dataclass, replace
from cupynorm.call.arguments import view
from cupynorm.call.axes import memory_order
from cupynorm.call.view import ROOM
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cupynorm.call.view import View
    from cupynorm.lower.mirrors import Struct
    from cupynorm.plan.config import Plan
    from cupynorm.runtime.compiler import Kernel
    from cupynorm.runtime.devices import Binding

    Signature = tuple[Any, ...]

ANYWHERE = 1 << 64  # beyond every distance between two addresses
NO_ARRAY = (None,)
MOST = 1024  # bound calls that a thread keeps, about 4 KB each; the oldest is dropped
# The bits of an address that checks and vector widths look at: no access is wider than 16 bytes.
ALIGNMENT = 15
PART = 512  # bytes, as CuPy's pool hands them out: each array of an allocation that several share begins at a multiple
# Bytes up to which a call's results share one allocation, which takes longer than all else of an array, and up to which
# its workspace is there, too. Whoever keeps one of them keeps the memory of the others.
SMALL = 1 << 16


class Made(NamedTuple):
    """How a call allocates one of its results.

    shape: in C order, as it lies in memory. axes: how they are moved then; None for not at all. at: where it begins in
    the memory that small results share; None for memory of its own.
    """

    shape: tuple[int, ...]
    code: Any  # of the dtype, as code_of() gives it
    axes: tuple[int, ...] | None
    at: int | None


class Launch(NamedTuple):
    """A kernel, how it is launched, its parameter, and how many bytes of ROOM it needs."""

    kernel: Kernel
    bind: Binding
    params: Struct
    room_bytes: int = 0


class Arrays(NamedTuple):
    """The arrays of one call, each under the name of its argument (see Argument).

    given: the arrays that the caller passed, in the order of the signature; None where one was not passed.
    written: which of these are outputs.
    made: the results that the call allocates and returns, in this order.
    workspace: what the call allocates for its own kernels and does not return.
    scalars: names of the numbers that differ from call to call.
    holds: an object that must stay alive because the signature names it by its id.
    results: picks what the caller gets from a tuple of the given arrays, those that are made, and None; or None, where
    the caller knows.
    """

    given: Mapping[str, Any]
    written: tuple[str, ...] = ()
    made: Mapping[str, Any] = {}
    workspace: Mapping[str, Any] = {}
    scalars: Sequence[str] = ()
    holds: Any = None
    results: Any = None


class KernelLaunch(NamedTuple):
    """One launch of a bound call.

    words: the kernel's one parameter, as 8-byte words. parameters: the list with its address, which the driver reads.
    bind, launches: bind the kernel to a stream and to `parameters`; devices.launch_of says how words may be written.
    argument_words: pairs of a word (or a slice of words) and the source that goes there.
    kernel: is held so that it stays loaded.
    """

    kernel: Kernel
    bind: Binding
    words: array.array[int]
    parameters: array.array[int]
    launches: devices.Launches
    argument_words: tuple[tuple[Any, int], ...]


def kernel_launch(
    kernel: Kernel, bind: Binding, params: Struct, sources: Sequence[str | None]
) -> KernelLaunch:
    """Return a launch whose words are those of `params`. sources: the names of what may be put there."""
    words = array.array("Q", np.array([params.values], dtype=params.dtype).tobytes())
    slots = tuple(
        (at, sources.index(name))
        for at, name in _arguments_of(params.dtype, params.values)
        if name != ROOM or name in sources
    )
    return KernelLaunch(kernel, bind, *launches_of(words, bind), slots)


def launches_of(
    words: array.array[int], bind: Binding
) -> tuple[array.array[int], array.array[int], devices.Launches]:
    """Return the words of a kernel's one parameter, the list with their address, and the launches that read both."""
    parameters = array.array("Q", [words.buffer_info()[0]])
    return words, parameters, devices.Launches(bind, parameters.buffer_info()[0])


def _arguments_of(dtype: Dtype, values: Any, base: int = 0) -> Iterator[tuple[Any, str]]:
    """Yield the word, or the slice of words, and the name of each argument among the values of a struct."""
    name = getattr(values, "argument", None)
    if name is not None:
        at = base // 8
        yield at if dtype.itemsize <= 8 else slice(at, at + dtype.itemsize // 8), name  # noqa: PLR2004  bytes of a word
    elif dtype.fields is not None:
        for each, value in zip(dtype.names or (), values, strict=True):
            of, offset = dtype.fields[each][:2]
            yield from _arguments_of(of, value, base + offset)


@dataclass(slots=True, eq=False, repr=False)
class BoundCall:
    """A call that was checked, lowered, planned and compiled. It can be launched again for arrays of the same layout.

    What a launch writes into words comes from a list of sources: the addresses of the given arrays (a small number in
    place of one that is not there), of the results that the call makes, and of its workspace, then its scalars.

    windows: (written, other, low, high, apart) for each output that was given and each other given array, both as
    indices of sources. If the output's distance from the other array is strictly between low and high, they may share
    memory, and the call must be checked; except at the distance `apart`, which was checked. Where the two overlap or
    interleave at that distance, low and high admit no other one.
    """

    kernels: tuple[KernelLaunch, ...]
    launches: tuple[
        tuple[array.array[int], devices.Launches, tuple[tuple[Any, int], ...]], ...
    ]  # of the kernels
    device: int
    allocated: tuple[Made, ...]
    shared: int  # bytes of the memory that small results share, a small workspace behind them
    room: int  # bytes of its workspace
    room_at: int | None  # where it begins in the shared memory; None for memory of its own
    parts: tuple[int, ...]  # where its arrays begin in it
    windows: tuple[tuple[int, int, int, int, int], ...]
    holds: Any
    results: Any  # as in Arrays
    first_room: Any = None  # of the first launch
    shortcut: Any = None  # the last that was made to it (shortcuts.Shortcut)
    gone: int = 0  # how often its gamma or beta was gone at the next call

    def once(self) -> None:
        """Launch what it was bound to, before anything else is. Raises the driver's error."""
        for each in self.kernels:
            each.launches.once()
        self.first_room = None

    def fits(self, sources: Sequence[int]) -> bool:
        """Say whether arrays at these addresses share no memory but where the bound ones do."""
        return not any(
            low < sources[written] - sources[other] < high and sources[written] - sources[other] != apart
            for written, other, low, high, apart in self.windows
        )

    def making(self, made: Sequence[Any]) -> BoundCall:
        """Return the call that gives its results as these views of what it has made."""
        return replace(self, allocated=allocations(made)[0], shortcut=None, gone=0)

    def word_of(self, source: int) -> int:
        """Return which word of its first kernel a source goes to; -1 for none."""
        return next((at for at, index in self.kernels[0].argument_words if index == source), -1)


def bound_call(device: int, arrays: Arrays, launches: Sequence[Launch]) -> BoundCall:
    """Bind a checked call to kernels and their parameters."""
    room_bytes = max((each.room_bytes for each in launches), default=0)
    first_room: Any = None
    if room_bytes:
        first_room = devices.cupy().empty(room_bytes, "B")
        arrays = arrays._replace(workspace={**arrays.workspace, ROOM: first_room})
    given = (None if each is None else name for name, each in arrays.given.items())
    sources = [*given, *arrays.made, *arrays.workspace, *arrays.scalars]
    views = [None if each is None else view(each) for each in arrays.given.values()]
    windows = []
    for at, name in enumerate(arrays.given):
        y = views[at]
        if y is None or name not in arrays.written:
            continue
        for other, x in enumerate(views):
            if x is not None and other != at:
                low, high = alias_window(y, x)
                apart = y.pointer - x.pointer
                if low < apart < high:
                    low, high = -ANYWHERE, ANYWHERE
                windows.append((at, other, low, high, apart))
    kernels = tuple(kernel_launch(each.kernel, each.bind, each.params, sources) for each in launches)
    if room_bytes:
        for kernel in kernels:
            for at, source in kernel.argument_words:
                if sources[source] == ROOM:
                    kernel.words[at] = first_room.data.ptr
    parts, room = places_of(each.nbytes for each in arrays.workspace.values())
    allocated, shared = allocations((*arrays.made.values(),))
    room_at = shared if shared and room <= SMALL else None
    return BoundCall(
        kernels=kernels,
        launches=tuple((each.words, each.launches, each.argument_words) for each in kernels),
        device=device,
        allocated=allocated,
        shared=shared if room_at is None else shared + room,
        room=room,
        room_at=room_at,
        parts=parts,
        windows=tuple(windows),
        holds=arrays.holds,
        results=arrays.results,
        first_room=first_room,
    )


def places_of(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return where arrays of so many bytes begin in memory that they share, and the bytes of all that memory."""
    *starts, end = itertools.accumulate((-(-size // PART) * PART for size in sizes), initial=0)
    return tuple(starts), end


def allocations(made: Sequence[Any]) -> tuple[tuple[Made, ...], int]:
    """Return how a call allocates results like these, and the bytes that the small ones share."""
    sizes = [each.nbytes if each.nbytes <= SMALL else 0 for each in made]
    if sum(size > 0 for size in sizes) == 1:  # it has nothing to share with
        sizes = [0] * len(sizes)
    starts, shared = places_of(sizes)
    each_one = zip(made, sizes, starts, strict=True)
    return tuple(allocation(each, start if size else None) for each, size, start in each_one), shared


def allocation(made: Any, at: int | None) -> Made:
    """Return how a call allocates a result like this one, which begins at byte `at` of shared memory."""
    order = memory_order(made)
    shape = tuple(made.shape[axis] for axis in order)
    moved = order != tuple(range(len(order)))
    axes = tuple(order.index(axis) for axis in range(len(order))) if moved else None
    return Made(shape, code_of(made.dtype), axes, at)


def code_of(dtype: Dtype) -> Any:
    """Return what CuPy takes for a dtype, and understands 0.2 us sooner."""
    return dtype.char if dtype.isbuiltin == 1 else dtype


def alias_window(y: View, x: View) -> tuple[int, int]:
    """Return two distances in bytes: y shares no memory with x if it does not lie strictly between them from there."""
    low, high = _extent(x)
    y_low, y_high = _extent(y)
    return low - y_high, high - y_low


def _extent(each: View) -> tuple[int, int]:
    """Return the lowest byte of an array and the one behind its highest, counted from its pointer."""
    steps = [stride * (extent - 1) for extent, stride in zip(each.shape, each.strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(
        step for step in steps if step > 0
    ) + each.dtype.itemsize


def layout(given: Any) -> tuple[int, ...] | bool:
    """Return an array's strides, or True where they follow from its shape."""
    return given._c_contiguous or given.strides  # type: ignore[no-any-return]  # noqa: SLF001


def axis_option(axis: Any) -> Any:
    """Return an axis as a signature has it: -1.0 and (-1.0,) name no axis, although they equal -1 and (-1,)."""
    if type(axis) is int:
        return axis
    return (axis, type(axis), *(map(type, axis) if isinstance(axis, tuple) else ()))


class Calls:
    """The bound calls of one thread.

    kind: the type of device arrays; None until the first one comes.
    array: makes one, as devices.array_maker() says.
    allocate: returns a pointer to so many bytes of new memory.
    stream: returns a device's current stream.
    several: whether there is more than one device.
    bound: the bound calls by signature.
    shortcuts: those of row_calls.run, by its own keys.
    plans: the newest plans of row ops that were launched for the first time.
    """

    __slots__ = ("_ready", "allocate", "array", "bound", "kind", "plans", "several", "shortcuts", "stream")

    def __init__(self) -> None:
        self.kind: Any = None
        self.array: Any = None
        self.allocate: Any = None
        self.stream: Any = None
        self.several = True
        self.bound: dict[Signature, BoundCall] = {}
        self.shortcuts: dict[Any, Any] = {}
        self.plans: deque[Plan] = deque(maxlen=MOST)
        self._ready: set[int] = set()

    def begin(self) -> Any:
        """Learn what CuPy has, once a device array came; return the type of device arrays."""
        module = devices.cupy()
        self.several = module.cuda.runtime.getDeviceCount() > 1
        self.stream = module.cuda.get_current_stream
        self.allocate = module.cuda.alloc
        self.array = devices.array_maker()
        self.kind = module.ndarray  # the last: where it is known, a call looks at the others
        return self.kind

    def prepare(self, device: int) -> None:
        """Give this thread the context of the current device, `device`: the driver launches nothing without one."""
        if device not in self._ready:
            devices.cupy().cuda.runtime.memGetInfo()  # any call of the runtime does it, and CuPy makes this one
            self._ready.add(device)

    def again(  # noqa: C901, PLR0911, PLR0912, PLR0915  one function: a call of another takes as long as two arrays
        self, arrays: Sequence[Any], options: tuple[Any, ...], scalars: Sequence[Any] = ()
    ) -> tuple[Any, list[Any] | None]:
        """Launch a call if one with its signature is bound. Return the bound call, and the results that it made.

        If nothing was launched, return the signature and None; the caller then checks the call and binds it.

        The signature holds all that checks, lowering and planning look at: the options; shape, layout, dtype and low
        address bits of each array; the device. Where outputs lie otherwise to the inputs than in the call that is bound
        under these, it also says which arrays have the same address. It is None for a call that cannot be bound: arrays
        that are no plain CuPy arrays or are not on the current device, and options that do not hash.

        arrays: in the order of Arrays.given; x comes first.
        options: these begin with the name of the op. They hold types where equal values differ in meaning: 1 and 1.0
        equal True and have its hash.
        scalars: in the order of Arrays.scalars.
        """
        kind = self.kind
        if kind is None:
            if not devices.is_device_array(arrays[0]):
                return None, None
            kind = self.begin()
        key: tuple[Any, ...] = (options,)
        sources: list[Any] = []
        for each in arrays:
            if each is None:
                key += NO_ARRAY
                sources.append(len(sources))  # no array's address
            elif type(each) is kind:
                pointer = each.data.ptr
                sources.append(pointer)
                # _c_contiguous, where true, says all that strides say, for a third of the time
                key += (each.shape, each._c_contiguous or each.strides, each.dtype, pointer & ALIGNMENT)  # noqa: SLF001
            else:
                return None, None
        if self.several:
            device = arrays[0].data.device_id
            if elsewhere(device, *arrays):
                return None, None
            key += (device,)
        try:
            call = self.bound.get(key)
        except TypeError:
            return None, None
        if call is None:
            return key, None
        for written, other, low, high, apart in call.windows:
            if low < sources[written] - sources[other] < high and sources[written] - sources[other] != apart:
                key = (*key, (*map(sources.index, sources),))
                call = self.bound.get(key)
                if call is None or not call.fits(sources):
                    return key, None
                break
        made = []
        array = self.array
        if call.shared:
            small = self.allocate(call.shared)
            start = small.ptr
        for shape, code, axes, at in call.allocated:
            if at is None:
                each = array(shape, code)
                pointer = each.data.ptr
            else:
                each = array(shape, code, small + at)
                pointer = start + at
            if pointer & ALIGNMENT:  # the allocator is not CuPy's
                return key, None
            made.append(each if axes is None else each.transpose(axes))
            sources.append(pointer)
        if call.parts:
            if call.room_at is None:
                room = self.allocate(call.room)
                pointer = room.ptr
            else:
                pointer = start + call.room_at
            if pointer & ALIGNMENT:
                return key, None
            sources += [pointer + part for part in call.parts]
        if scalars:
            sources += scalars
        stream = self.stream(call.device).ptr
        for words, launches, slots in call.launches:
            launch = launches[stream]
            filled = words[:]
            for at, source in slots:
                filled[at] = sources[source]
            # from here to the launch: no call, loop or branch (devices.launch_of)
            words[:] = filled
            status = launch()
            if status:
                error = devices.launch_error(status)
                # this share of the device refuses it; what has been launched already must not be launched again
                if devices.refuses_plan(error) and launches is call.launches[0][1]:
                    return key, None
                raise error
        return call, made

    def add(self, signature: Signature | None, call: BoundCall, made: Mapping[str, Any]) -> bool:
        """Keep a call that was launched, if that can be; say whether. made: what it has allocated."""
        # the next one's are aligned, unless the allocator is not CuPy's
        if signature is None or any(each.data.ptr & ALIGNMENT for each in made.values()):
            return False
        add(self.bound, signature, call)
        return True


class PerThread(threading.local):
    """Each thread's own Calls: parameters are set in place, so no two threads may share them."""

    def __init__(self) -> None:
        self.calls = Calls()


thread = PerThread()


def forget() -> None:
    """Drop the bound calls of all threads."""
    global thread  # noqa: PLW0603
    thread = PerThread()


def add(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; the oldest make room for it. A signal handler may add another in between."""
    excess = len(known) - MOST + 1
    if excess > 0:
        excess += MOST // 8  # some at once: to list them takes 5 us
        for oldest in [*known][:excess]:  # a list: an iterator would notice what a handler adds
            known.pop(oldest, None)
    known[key] = value


def elsewhere(device: int, *arrays: Any) -> bool:
    """Say whether this is not the current device, or a device array lies on another."""
    if devices.cupy().cuda.runtime.getDevice() != device:
        return True
    return any(each is not None and each.data.device_id != device for each in arrays)
