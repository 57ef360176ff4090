"""Calls that a thread has made before: what launching one again takes, and what makes it the same call."""

from __future__ import annotations

import array
import dataclasses
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype
from cupynorm._values import NamedTuple, dataclass
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynorm.lower.mirrors import Struct, View
    from cupynorm.plan.config import Plan
    from cupynorm.runtime.devices import Binding

MOST = 1024  # that a thread remembers, about 4 KB each; the oldest is dropped
ALIGNMENT = 15  # the bits of a pointer that checks and pack widths look at: no access is wider than 16 bytes


def launcher(function: int, plan: Plan) -> Binding:
    """Return a kernel's binding, as devices.launch_of does."""
    split = plan.variant == "split"
    grid = (plan.grid // plan.ctas_per_row, plan.ctas_per_row, 1) if split else (plan.grid, 1, 1)
    return devices.launch_of(
        function, grid, (plan.block, 1, 1), plan.shared_bytes, cooperative=plan.cooperative
    )


class Given(NamedTuple):
    """The arguments of one call, as the caller gave them."""

    x: Any
    gamma: Any
    beta: Any
    axis: int | tuple[int, ...]
    eps: float
    out: Any
    dtype: Any
    return_stats: bool
    plan: str | Plan | None

    def arrays(self) -> list[Any]:
        """Return the arrays among them."""
        return [each for each in (self.x, self.gamma, self.beta, self.out) if each is not None]

    def alike(self, op: str) -> tuple[Any, ...]:
        """Return what calls have in common whose checks come out the same and that run the same kernel.

        Types are in it because -1.0 and (-1.0,) name no axis, although they equal -1 and (-1,).
        """
        types = map(type, self.axis if isinstance(self.axis, tuple) else (self.axis,))
        switch = (self.return_stats, type(self.return_stats))
        options = (self.axis, *types, self.eps, type(self.eps), self.dtype, *switch, self.plan)
        return (
            op,
            self.x.data.device_id,
            options,
            self.gamma is None,
            self.beta is None,
            *((each.shape, each.strides, each.dtype, each.data.ptr & ALIGNMENT) for each in self.arrays()),
        )


def layout(given: Any) -> tuple[int, ...] | bool:
    """Return an array's strides, or True where they follow from its shape."""
    return given._c_contiguous or given.strides  # type: ignore[no-any-return]  # noqa: SLF001


@dataclass(slots=True, eq=False, repr=False)
class Remembered:
    """A call that was checked and planned: it may be launched again with another x, and another `out` of y's layout.

    `words` are the kernel's one parameter, `parameters` the list with its address, which `launches` are bound to; how
    words are written and launched is said at devices.launch_of. *_at: which word a pointer is, -1 for none; first and
    last are those of the op's one or two statistics. columns_near: addresses strictly between which an `out` may
    share memory with gamma or beta.
    """

    axis: int | tuple[int, ...]
    eps: float
    dtype: Any
    return_stats: bool
    plan: str | Plan | None
    bind: Binding
    words: array.array[int]
    parameters: array.array[int]
    launches: devices.Launches
    x_at: int
    y_at: int
    gamma_at: int
    beta_at: int
    first_at: int
    last_at: int
    gamma: Callable[[], Any]
    gamma_ndim: int  # 1 or, for several axes, -1
    gamma_shape: tuple[int, ...]
    beta: Callable[[], Any]
    beta_ndim: int
    beta_shape: tuple[int, ...]
    columns_near: tuple[tuple[int, int], ...]
    y: View  # its pointer is that of the first call
    y_dtype: Dtype
    y_strides: tuple[int, ...] | bool  # True: contiguous
    y_bits: int  # of its pointer
    y_code: Any  # its dtype
    stats_shape: tuple[int, ...]
    stats_code: Any
    near: tuple[int, int]  # strictly between these distances from x, an `out` may share memory with it ...
    distance: int  # ... and here it was found that it may: it is x, or lies between x's rows

    def with_columns(self, given: Given) -> Remembered:
        """Return the call for another gamma and beta, and options that are equal."""
        words = self.words[:]
        if given.gamma is not None:
            words[self.gamma_at] = given.gamma.data.ptr
        if given.beta is not None:
            words[self.beta_at] = given.beta.data.ptr
        return dataclasses.replace(
            self,
            **parameters_of(words, self.bind),
            **_columns(given, self.y),
            axis=given.axis,
            eps=given.eps,
            dtype=given.dtype,
            return_stats=given.return_stats,
            plan=given.plan,
        )


def remembered(
    given: Given,
    bind: Binding,
    arguments: Struct,
    x: View,
    y: View,
    y_strides: tuple[int, ...] | bool,  # noqa: FBT001
    stats: Sequence[str],
    stats_shape: tuple[int, ...],
    stats_dtype: Dtype,
) -> Remembered:
    """Return a checked and planned call. stats: names of the statistics that are written."""
    struct = arguments.dtype
    to = ("to",) if word_of(struct, "store", "to") >= 0 else ()
    return Remembered(
        axis=given.axis,
        eps=given.eps,
        dtype=given.dtype,
        return_stats=given.return_stats,
        plan=given.plan,
        bind=bind,
        **parameters_of(array.array("Q", np.array([arguments.values], dtype=struct).tobytes()), bind),
        x_at=word_of(struct, "load", "pointer"),
        y_at=word_of(struct, "store", *to, "pointer"),
        gamma_at=word_of(struct, "store", "affine", "gamma", "pointer"),
        beta_at=word_of(struct, "store", "affine", "beta", "pointer"),
        first_at=word_of(struct, "op", stats[0]) if stats else -1,
        last_at=word_of(struct, "op", stats[-1]) if stats else -1,
        **_columns(given, y),
        y=y,
        y_dtype=y.dtype,
        y_strides=y_strides,
        y_bits=y.pointer & ALIGNMENT,
        y_code=code_of(y.dtype),
        stats_shape=stats_shape,
        stats_code=code_of(stats_dtype),
        near=near_of(y, x.shape, x.strides, x.dtype),
        distance=y.pointer - x.pointer,
    )


def parameters_of(words: array.array[int], bind: Binding) -> dict[str, Any]:
    """Return the words of a kernel's one parameter, the list with their address, and the launches that read both."""
    parameters = array.array("Q", [words.buffer_info()[0]])
    launches = devices.Launches(bind, parameters.buffer_info()[0])
    return {"words": words, "parameters": parameters, "launches": launches}


def word_of(dtype: Dtype, *path: str) -> int:
    """Return which 8-byte word of a struct a member is; -1 where the struct has none of that name."""
    offset = 0
    for name in path:
        if dtype.fields is None or name not in dtype.fields:
            return -1
        dtype, at = dtype.fields[name][:2]
        offset += at
    return offset // 8


def code_of(dtype: Dtype) -> Any:
    """Return what CuPy takes for a dtype, and understands 0.2 us sooner."""
    return dtype.char if dtype.isbuiltin == 1 else dtype


def _columns(given: Given, y: View) -> dict[str, Any]:
    """Return what is to be known of gamma and beta. Weak references: no array is kept alive, nor taken for a later one."""
    known: dict[str, Any] = {"columns_near": ()}
    for name, each in (("gamma", given.gamma), ("beta", given.beta)):
        known |= {name: _nothing, f"{name}_ndim": -1, f"{name}_shape": ()}
        if each is not None:
            low, high = near_of(y, each.shape, each.strides, each.dtype)
            ndim = 1 if each.ndim == 1 else -1
            known |= {name: weakref.ref(each), f"{name}_ndim": ndim, f"{name}_shape": each.shape}
            known["columns_near"] += ((each.data.ptr + low, each.data.ptr + high),)
    return known


def _nothing() -> None:
    """Stand for a reference to no array."""


def near_of(y: View, shape: Sequence[int], strides: Sequence[int], dtype: Dtype) -> tuple[int, int]:
    """Return two distances in bytes: y shares no memory with such an array if it is not strictly between them from there."""
    low, high = _extent(shape, strides, dtype)
    y_low, y_high = _extent(y.shape, y.strides, y.dtype)
    return low - y_high, high - y_low


def _extent(shape: Sequence[int], strides: Sequence[int], dtype: Dtype) -> tuple[int, int]:
    """Return the lowest byte of an array and the one behind its highest, counted from its pointer."""
    steps = [stride * (extent - 1) for extent, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + dtype.itemsize


class Again(NamedTuple):
    """A call with something fused that was launched: another of the same key differs in pointers and in a dropout's place only.

    made: shapes and dtypes of what the call allocates. slots: words of the kernel's parameter, and the number among the pointers
    of what goes there: those of the arrays that were given, of those that are made, then seed and offset.
    """

    words: array.array[int]
    parameters: array.array[int]
    launches: devices.Launches
    made: tuple[tuple[tuple[int, ...], Any], ...]
    slots: tuple[tuple[int, int], ...]
    holds: Any  # what the key names by its id

    def run(self, kind: Any, stream: int, pointers: list[int], place: tuple[int, int]) -> list[Any] | None:
        """Launch it with other pointers; return what was made.

        None if that lies otherwise than the first call's, or this share of the device refuses the call's plan.
        """
        made = [kind(shape, code) for shape, code in self.made]
        pointers += [each.data.ptr for each in made]
        if any(each & ALIGNMENT for each in pointers[len(pointers) - len(made) :]):
            return None
        pointers += place
        words, launch = self.words, self.launches[stream]
        filled = words[:]
        for at, source in self.slots:
            filled[at] = pointers[source]
        # from here to the launch: no call, loop or branch (devices.launch_of)
        words[:] = filled
        status = launch()
        if status:
            error = devices.launch_error(status)
            if devices.refuses_plan(error):
                return None
            raise error
        return made


def again(
    bind: Binding,
    arguments: Struct,
    given: Sequence[Any],
    made: Sequence[Any],
    place: tuple[int, int] | None,
    holds: Any,
) -> Again | None:
    """Return a launched call; None if what it made is not aligned. given: arrays of the call, None where there is none."""
    pointers = [0 if each is None else each.data.ptr for each in (*given, *made)]
    if any(each.data.ptr & ALIGNMENT for each in made):
        return None
    words = array.array("Q", np.array([arguments.values], dtype=arguments.dtype).tobytes())
    slots = []
    for offset, name in _words_of(arguments.dtype):
        if name in _PLACE:
            slots.append((offset // 8, len(pointers) + _PLACE.index(name)))
        elif words[offset // 8] and words[offset // 8] in pointers:
            slots.append((offset // 8, pointers.index(words[offset // 8])))
    if place is None:
        slots = [slot for slot in slots if slot[1] < len(pointers)]
    allocated = tuple((each.shape, code_of(each.dtype)) for each in made)
    return Again(**parameters_of(words, bind), made=allocated, slots=tuple(slots), holds=holds)


_PLACE = ("seed", "offset")


def _words_of(dtype: Dtype, base: int = 0, name: str = "") -> list[tuple[int, str]]:
    """Return the offsets and names of all unsigned words of a struct: its pointers, and a dropout's numbers."""
    if dtype.fields is None:
        return [(base, name)] if dtype == np.uint64 else []
    fields = ((each, *dtype.fields[each][:2]) for each in dtype.names or ())
    return [found for each, of, offset in fields for found in _words_of(of, base + offset, each)]


class Calls:
    """What one thread remembers.

    kind: the type of device arrays, None before the first came. stream: gives a device's current stream. several: there is
    more than one device. same: by the key of _row.run; holds for one gamma and beta. alike: by Given.alike. each, heads: those of
    _elementwise and _heads, by their own keys. fused: calls with something fused, by key(). plans: the newest plans of row ops
    that were launched for the first time.
    """

    __slots__ = ("_ready", "alike", "each", "fused", "heads", "kind", "plans", "same", "several", "stream")

    def __init__(self) -> None:
        self.kind: Any = None
        self.stream: Any = None
        self.several = True
        self.same: dict[Any, Remembered] = {}
        self.alike: dict[Any, Remembered] = {}
        self.each: dict[Any, Any] = {}
        self.heads: dict[Any, Any] = {}
        self.fused: dict[Any, Again] = {}
        self.plans: deque[Plan] = deque(maxlen=MOST)
        self._ready: set[int] = set()

    def begin(self) -> Any:
        """Learn what CuPy has, once a device array came; return the type of device arrays."""
        module = devices.cupy()
        self.several = module.cuda.runtime.getDeviceCount() > 1
        self.stream = module.cuda.get_current_stream
        self.kind = module.ndarray  # the last: where it is known, a call looks at the others
        return self.kind

    def prepare(self, device: int) -> None:
        """Give this thread the context of the current device, `device`: the driver launches nothing without one."""
        if device not in self._ready:
            devices.cupy().cuda.runtime.memGetInfo()  # any call of the runtime does it, and CuPy makes this one
            self._ready.add(device)

    def key(self, given: Sequence[Any], written: bool, options: Any) -> tuple[Any, list[int]] | None:  # noqa: FBT001
        """Return what says that calls with something fused are alike, and the arrays' pointers; None if it cannot be said.

        given: arrays, None where there is none, the first one x. written: one of them is, so how far they are apart counts.
        """
        kind = self.kind or (self.begin() if devices.is_device_array(given[0]) else None)
        pointers: list[int] = []
        layouts: list[Any] = []
        for each in given:
            if each is None:
                pointers.append(0)
                layouts.append(None)
            elif type(each) is kind:
                pointers.append(each.data.ptr)
                layouts.append((each.shape, layout(each), each.dtype, pointers[-1] & ALIGNMENT))
            else:
                return None
        if kind is None or (self.several and elsewhere(given[0].data.device_id, *given)):
            return None
        apart = [each - pointers[0] for each in pointers] if written else map(pointers.index, pointers)
        return (options, given[0].data.device_id, *layouts, *apart), pointers

    def find(self, op: str, given: Given, key: Any) -> Remembered | None:
        """Return a call of the same layouts, with gamma and beta put in, and remember that under `key`."""
        if any(type(each) is not self.kind for each in given.arrays()):
            return None
        if self.several and elsewhere(given.x.data.device_id, given.gamma, given.beta, given.out):
            return None
        try:
            found = self.alike.get(given.alike(op))
        except TypeError:  # an option that does not hash
            return None
        if found is None:
            return None
        found = found.with_columns(given)
        add(self.same, key, found)
        return found

    def add(self, op: str, given: Given, key: Any, call: Remembered) -> None:
        """Remember a call that was launched."""
        if any(type(each) is not self.kind for each in given.arrays()):
            return
        try:
            add(self.alike, given.alike(op), call)
        except TypeError:
            return
        add(self.same, key, call)


class OfThread(threading.local):
    """Each thread's own Calls: parameters are set in place, so no two threads may share them."""

    def __init__(self) -> None:
        self.calls = Calls()


def add(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember a value; the oldest makes room for it. A signal handler may add another in between."""
    excess = len(known) - MOST + 1
    if excess > 0:
        for oldest in [*known][:excess]:  # a list: an iterator would notice what a handler adds
            known.pop(oldest, None)
    known[key] = value


def elsewhere(device: int, *arrays: Any) -> bool:
    """Say whether this is not the current device, or a device array lies on another."""
    if devices.cupy().cuda.runtime.getDevice() != device:
        return True
    return any(each is not None and each.data.device_id != device for each in arrays)
