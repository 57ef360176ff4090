"""The one road from arrays to a launch: run() and what it remembers; explain() stops before the launch."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm import _ask, _compile, _device, _tuned
from cupynorm._arguments import Call, check, check_eps, view
from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm._expression import DeviceFunction, Expression, traced
from cupynorm._extras import CheckedExtras, Extras
from cupynorm._limits import Limits
from cupynorm._mask import Mask
from cupynorm._mask import twin as mask_twin
from cupynorm._philox import Dropout
from cupynorm._plan import Occupancy, Plan, Problem, choose
from cupynorm._remembered import (
    ALIGNMENT,
    Calls,
    Given,
    OfThread,
    Remembered,
    add,
    again,
    elsewhere,
    launcher,
    layout,
    remembered,
)
from cupynorm.functors import (
    EMPTY,
    POINTER,
    Struct,
    View,
    affine_store,
    arguments,
    column,
    direct,
    fused_load,
    fused_store,
    kept,
    lie,
    operand,
    pack_width,
    scaled_store,
    value,
)
from cupynorm.reference import LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cupynorm._remembered import Launch

Function = Expression | DeviceFunction
Operand = View | float | Dropout
IDENTITY = Expression(1, (), (0,))


@dataclasses.dataclass(frozen=True)
class RowOp:
    """An op as the kernels know it: kernels/<source> holds struct <struct>.

    reference(x, gamma, beta, axes, eps, out, *stats) does the same on the host; extras= says what is fused around it.
    columns: parameters of the normalised axes that it takes. stats: statistics that it can save. has_eps: whether it takes eps.
    """

    name: str
    source: str
    struct: str
    reference: Callable[..., None]
    columns: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    has_eps: bool = False

    def twin(self, compute: Dtype, stats: Sequence[int], eps: float) -> Struct:
        """Twin of the op's struct: a pointer for each statistic (0: not wanted), then eps."""
        fields: list[tuple[str, Any]] = [(name, POINTER) for name in self.stats]
        values: list[Any] = list(stats) or [0] * len(self.stats)
        if self.has_eps:
            fields.append(("eps", compute))
            values.append(eps)
        spelling = f"cupynorm::{self.struct}<{cpp(compute)}>"
        if not fields:
            return Struct(spelling, EMPTY, (0,))
        return Struct(spelling, np.dtype(fields, align=True), tuple(values))


class Spelled(NamedTuple):
    """A problem with the functors that fit it."""

    problem: Problem
    op: Struct
    load: Struct
    store: Struct
    arguments: Struct
    text: str

    @property
    def kind(self) -> str:
        """What the kernel is made for, in C++: the op and its functors, without a plan's numbers."""
        return f"{self.op.cpp}, {self.load.cpp}, {self.store.cpp}"

    def expression(self, plan: Plan) -> str:
        """Write the kernel's name with its template arguments, as NVRTC's demangler would."""
        numbers = ", ".join(map(_compile.spell, plan.template))
        numbers = f"cupynorm::{'Registers' if plan.group else 'Staged'}<{numbers}>"
        return f"cupynorm::{plan.kernel}<{self.kind}, {numbers}>"


def spelled(
    op: RowOp,
    x: View,
    y: View,
    axes: int,
    columns: Mapping[str, View],
    stats: Sequence[int] = (),
    eps: float = 0.0,
) -> Spelled:
    """Turn views into the problem and its structs."""
    shape = x.shape[len(x.shape) - axes :]
    rows, cols = math.prod(x.shape[: len(x.shape) - axes]), math.prod(shape)
    compute = compute_dtype(x.dtype, y.dtype)
    twin = op.twin(compute, stats, eps)
    load = direct("DirectLoad", x.split(axes)[0])
    gamma, beta = (column(columns.get(name), shape) for name in ("gamma", "beta"))
    store = affine_store(y.split(axes)[0], gamma, beta)
    whole = arguments(twin, load, store, rows, cols)
    pack, lies = pack_width(x, y, axes), lie(x, y, axes)
    problem = Problem(
        rows,
        cols,
        pack,
        x.dtype.itemsize,
        compute.itemsize,
        tuple(each.dtype.itemsize for each in columns.values()),
        *(lies if pack < lies.widest else (pack, 0, 1)),
    )
    return Spelled(
        problem, twin, load, store, whole, _compile.text(op.source, whole.cpp, whole.dtype.itemsize)
    )


class _Launch(NamedTuple):
    kernel: _compile.Kernel
    plan: Plan


_lock = threading.Lock()
_launches: dict[tuple[int, Problem, str, str, str | Plan | None], _Launch] = {}
_thread = OfThread()


def run(
    op: RowOp,
    x: Any,
    gamma: Any,
    beta: Any,
    axis: int | tuple[int, ...],
    eps: float,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
) -> Any:
    """Run one call of a public function: arguments, result and errors are those of norm.layer_norm.

    A launch is on the arrays' device and that device's current stream; nothing is synchronised. What this thread launched
    before is launched again with other pointers and no checks: all that these and the choice of a kernel look at is in `key`,
    or is compared with what was remembered. Whatever differs is looked up by its layouts, then checked like a first call.
    """
    # written out, and with few words for it: a function called here costs as much as the comparison of two shapes
    calls = _thread.calls
    kind = calls.kind
    if kind is None and _device.is_device_array(x):
        kind = calls.begin()
    if type(x) is not kind:
        return _run_checked(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, None)
    shape = x.shape
    source = x.data.ptr
    # _c_contiguous, where true, says all that strides say, for a third of the time
    strides = x._c_contiguous or x.strides  # noqa: SLF001
    scale = None if gamma is None else id(gamma)
    shift = None if beta is None else id(beta)
    key: Any = (op.name, shape, strides, x.dtype, source & ALIGNMENT, scale, shift, out is None)
    device = 0
    if calls.several:
        device = x.data.device_id
        key += (device,)
    call = calls.same.get(key)
    if (
        call is None
        or call.axis is not axis
        or call.eps is not eps
        or call.dtype is not dtype
        or call.return_stats is not return_stats
        or call.plan is not plan
        # one of one axis has but one shape; of a CuPy array nothing else can change
        or (
            gamma is not None
            and (
                call.gamma() is not gamma
                or (gamma.ndim != call.gamma_ndim and gamma.shape != call.gamma_shape)
            )
        )
        or (
            beta is not None
            and (call.beta() is not beta or (beta.ndim != call.beta_ndim and beta.shape != call.beta_shape))
        )
        or (
            out is not None
            and (
                type(out) is not kind
                or out.shape != shape
                or out.dtype is not call.y_dtype
                or (out._c_contiguous or out.strides) != call.y_strides  # noqa: SLF001
            )
        )
        or (calls.several and elsewhere(device, gamma, beta, out))
    ):
        call = calls.find(op.name, Given(x, gamma, beta, axis, eps, out, dtype, return_stats, plan), key)
        if call is None:
            return _run_checked(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, key)
    if out is None:
        y = kind(shape, call.y_code)
        target = y.data.ptr
        fits = not target & ALIGNMENT
    else:
        y = out
        target = y.data.ptr
        low, high = call.near
        distance = target - source
        fits = target & ALIGNMENT == call.y_bits and (not low < distance < high or distance == call.distance)
        for low, high in call.columns_near:
            fits = fits and not low < target < high
    if not fits:
        return _run_checked(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, key)
    stats = [kind(call.stats_shape, call.stats_code) for _ in op.stats] if return_stats else None
    if stats:
        first, last = stats[0].data.ptr, stats[-1].data.ptr
    stream = calls.stream(device).ptr
    words = call.words
    # no other call stands between the words and their launch: a signal handler that runs there might set them too
    for launch in call.launches:
        words[call.x_at] = source
        words[call.y_at] = target
        if stats:
            words[call.first_at] = first
            words[call.last_at] = last
        launch(stream, call.address, 0)
    return (y, *stats) if stats else y


def _run_checked(
    op: RowOp,
    x: Any,
    gamma: Any,
    beta: Any,
    axis: int | tuple[int, ...],
    eps: float,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
    key: Any,
) -> Any:
    """Run one call with all checks; remember it where `key` says under what run() will look for it."""
    exact = check_eps(eps) if op.has_eps else 0.0
    columns = {"gamma": gamma, "beta": beta} if op.columns else None
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan, columns=columns)
    stats = [call.empty_statistic() for _ in op.stats] if return_stats else []
    if not call.on_device:
        _ask.answer(lambda: _spelled_call(op, call, (), exact))
        op.reference(x, gamma, beta, call.axes, exact, call.out, *stats)
    elif x.size:
        given = Given(x, gamma, beta, axis, eps, out, dtype, return_stats, plan)
        launched = _launch(op, call, stats, exact, given)
        # an output of our own is aligned, unless the allocator is not CuPy's
        if key is not None and (out is not None or not launched.y_bits):
            _thread.calls.add(op.name, given, key, launched)
    return (call.out, *stats) if stats else call.out


def _spelled_call(op: RowOp, call: Call, stats: Sequence[int], eps: float) -> Spelled:
    columns = {name: view(array) for name, array in call.columns.items()}
    return spelled(op, view(call.x), view(call.out), call.axes, columns, stats, eps)


def _launch(op: RowOp, call: Call, stats: Sequence[Any], eps: float, given: Given) -> Remembered:
    """Launch a checked call that has rows; return how to do it again."""
    module = _device.cupy()
    x, y = view(call.x), view(call.out)
    what = _spelled_call(op, call, [array.data.ptr for array in stats], eps)
    with module.cuda.Device(call.device):
        _thread.calls.prepare(call.device)
        found = _prepared(call.device, what, given.plan)
        known = remembered(
            given,
            [launcher(found.kernel.pointer, found.plan)],
            what.arguments,
            x,
            y,
            layout(call.out),
            op.stats if stats else (),
            x.shape[: len(x.shape) - call.axes],
            call.compute,
        )
        stream = module.cuda.get_current_stream().ptr
        for launch in known.launches:
            launch(stream, known.address, 0)
    return known


def run_fused(
    op: RowOp,
    x: Any,
    gamma: Any,
    beta: Any,
    axis: int | tuple[int, ...],
    eps: float,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
    extras: Extras,
) -> Any:
    """Run one call with something fused around it. Results: y, scales of rows, the sum, statistics; those that are asked for."""
    given = [x, gamma, beta, out, *extras.given()]
    options = (op.name, axis, type(axis), eps, type(eps), dtype, return_stats, plan, extras.options())
    drop = None if extras.add is None else extras.add.dropout
    place = None if drop is None else (drop.seed, drop.offset)
    calls = _thread.calls
    try:
        known = calls.key(given, out is not None, options)
        found = None if known is None else calls.fused.get(known[0])
    except TypeError:  # an option that does not hash
        known = found = None
    if known is not None and found is not None:
        stream = calls.stream(x.data.device_id).ptr
        made = found.run(calls.kind, stream, known[1], place or (0, 0))
        if made is not None:
            results = (*made,) if out is None else (out, *made)
            return results if len(results) > 1 else results[0]
    exact = check_eps(eps) if op.has_eps else 0.0
    columns = {"gamma": gamma, "beta": beta} if op.columns else {}
    if extras.add is not None:
        columns["bias"] = extras.add.bias
    call = check(
        x,
        axis=axis,
        out=out,
        dtype=dtype,
        plan=plan,
        columns=columns,
        others=extras.arrays(),
        quantized=extras.dtype,
    )
    fused = extras.checked(call)
    stats = [call.empty_statistic() for _ in op.stats] if return_stats else []
    results = (call.out, *fused.results, *stats)
    if not call.on_device:
        _ask.answer(lambda: _spelled_fused(op, call, (), exact, fused))
        op.reference(x, gamma, beta, call.axes, exact, call.out, *stats, extras=fused.on_host())
    elif x.size:
        spelling = _spelled_fused(op, call, [array.data.ptr for array in stats], exact, fused)
        launched = launch_around(call.device, spelling, plan)
        if known is not None:
            remember(known[0], launched, given, results if out is None else results[1:], place, None)
    return results if len(results) > 1 else call.out


def remember(
    key: Any,
    launched: tuple[Launch, Struct],
    given: Sequence[Any],
    made: Sequence[Any],
    place: tuple[int, int] | None,
    holds: Any,
) -> None:
    """Remember a call with something fused, for this thread, until another of the same key comes."""
    call = again(*launched, given, made, place, holds)
    if call is not None:
        add(_thread.calls.fused, key, call)


def calls_of_thread() -> Calls:
    """Return what this thread remembers."""
    return _thread.calls


def _spelled_fused(op: RowOp, call: Call, stats: Sequence[int], eps: float, fused: CheckedExtras) -> Spelled:
    """Turn a checked call with something fused around it into the problem and its structs."""
    columns = {name: view(array) for name, array in call.columns.items() if name != "bias"}
    return spelled_around(op, view(call.x), call.axes, columns, stats, eps, call.compute, around(call, fused))


class Around(NamedTuple):
    """What is computed around an op, in terms of views: results go to outs, what was loaded to `loaded`.

    An operand is an array stretched to x's shape, a number, or a dropout, which is 1 where it keeps and 0 where it drops.
    scales: where those of rows are written, which their results are divided by; 0: nowhere.
    """

    outs: tuple[View, ...]
    load: Function | None = None
    load_operands: tuple[Operand, ...] = ()
    mask: Mask | None = None
    loaded: View | None = None
    store: Function | None = None
    store_operands: tuple[Operand, ...] = ()
    scales: int = 0


@functools.cache
def _adding(*, bias: bool, dropout: bool) -> Function:
    """Return dropout(x + bias) + alpha * residual, of x, residual, alpha; then of bias; of what is kept and its factor."""

    def add(x: Any, residual: Any, alpha: Any, *others: Any) -> Any:
        shift, kept, factor = (*others[:bias], *(None,) * (not bias), *others[bias:], *(None, None))[:3]
        total = x if shift is None else x + shift
        if kept is not None:
            total = np.where(kept != 0, total * factor, 0.0)
        return total + alpha * residual

    count = 3 + bias + 2 * dropout
    return traced(add, count)


@functools.cache
def _scaling(*, scale: bool, bias: bool) -> Function:
    """Return x * scale + bias, of x and of those of both that there are."""

    def of(x: Any, *others: Any) -> Any:
        if scale:
            x = x * others[0]
        return x + others[scale] if bias else x

    return traced(of, 1 + scale + bias)


@functools.cache
def _dividing() -> Function:
    """Return y / scale."""
    return traced(lambda y, scale: y / scale, 2)


def around(call: Call, fused: CheckedExtras) -> Around:
    """Say of checked extras what is computed."""
    shape, out = call.x.shape, view(call.out)
    if fused.quantize is not None:
        out = out._replace(dtype=fused.quantize.dtype)  # the array itself may hold bits only
    what = Around((out,))
    if fused.mask is not None:
        mask = fused.mask
        bias = mask.views().get("bias")
        scaled = mask.scale != 1
        operands: list[Operand] = [mask.scale] * scaled
        operands += [] if bias is None else [bias]
        what = what._replace(
            mask=mask, load=_scaling(scale=scaled, bias=bias is not None), load_operands=tuple(operands)
        )
    if fused.add is not None:
        residual, shift, alpha, drop, _ = fused.add
        operands = [view(residual), alpha]
        operands += [] if shift is None else [view(shift).broadcast_to(shape)]
        operands += [] if drop is None else [drop, drop.factor]
        what = what._replace(
            load=_adding(bias=shift is not None, dropout=drop is not None),
            load_operands=tuple(operands),
            loaded=None if fused.total is None else view(fused.total),
        )
    if fused.quantize is not None:
        scale = fused.quantize.scale
        if fused.quantize.per_row:
            what = what._replace(scales=view(fused.scales).pointer)
        else:
            given = (
                view(scale.reshape(())).broadcast_to(shape)
                if _device.is_device_array(scale)
                else float(scale)
            )
            what = what._replace(store=_dividing(), store_operands=(given,))
    return what


def spelled_around(
    op: RowOp,
    x: View,
    axes: int,
    columns: Mapping[str, View],
    stats: Sequence[int],
    eps: float,
    compute: Dtype,
    what: Around,
) -> Spelled:
    """Turn views and what is computed around the op into the problem and its structs."""
    shape = x.shape[len(x.shape) - axes :]
    rows, cols = math.prod(x.shape[: len(x.shape) - axes]), math.prod(shape)
    twin = op.twin(compute, stats, eps)
    gamma, beta = (column(columns.get(name), shape) for name in ("gamma", "beta"))
    written = what.outs if what.loaded is None else (*what.outs, what.loaded)
    pack = pack_width(x, written[0], axes, *written[1:])
    functions: list[Function] = []

    def operand_of(given: Operand) -> Struct:
        if isinstance(given, Dropout):
            return kept(given, cols)
        if not isinstance(given, View):
            return value(given, compute)
        return operand(given, axes, pack, constant=given not in written)

    def name_of(function: Function | None) -> str:
        functions.append(function or IDENTITY)
        return f"Function_{functions[-1].key}"

    masked = mask_twin(what.mask, pack)
    load = direct("DirectLoad", x.split(axes)[0])
    if what.load is not None or what.mask is not None or what.loaded is not None:
        operands = [operand_of(each) for each in what.load_operands]
        load = fused_load(x, axes, name_of(what.load), masked, what.loaded, operands)
    if what.scales:
        limit = LARGEST[what.outs[0].dtype.name]
        store = scaled_store(what.outs[0], axes, gamma, beta, what.scales, limit, compute)
    else:
        operands = [operand_of(each) for each in what.store_operands]
        store = fused_store(what.outs, axes, name_of(what.store), gamma, beta, operands)
    whole = arguments(twin, load, store, rows, cols)
    where = () if what.mask is None or what.mask.where is None else (what.mask.views()["where"],)
    drops = any(isinstance(each, Dropout) for each in what.load_operands)
    problem = Problem(
        rows,
        cols,
        pack,
        x.dtype.itemsize,
        compute.itemsize,
        tuple(each.dtype.itemsize for each in columns.values()),
        *(pack, 0, 1),
        fused=True,
        beside=_bytes_of((*what.load_operands, *where), axes),
        ahead=_bytes_of(what.store_operands, axes),
        others=OF_DROPOUT * drops + OF_SCALES * bool(what.scales) + sum(map(_registers_of, functions)),
    )
    texts = [each.struct_text(f"Function_{each.key}") for each in functions]
    text = _compile.text(op.source, whole.cpp, whole.dtype.itemsize, texts)
    return Spelled(problem, twin, load, store, whole, text)


# Registers that a dropout's random words take while they are made, and what finds a row's largest result.
OF_DROPOUT = 16
OF_SCALES = 16


def _registers_of(function: Function) -> int:
    """Guess how many registers the arithmetic on one pack takes."""
    steps = len(function.steps) if isinstance(function, Expression) else 2 * MOST_OF_FUNCTION
    return min(MOST_OF_FUNCTION, 2 * function.inputs + steps)


MOST_OF_FUNCTION = 32


def _bytes_of(operands: Sequence[Operand], axes: int) -> tuple[int, ...]:
    """Return the bytes of an element of each array that is loaded along the rows."""
    return tuple(
        max(each.dtype.itemsize, 4 if not each.split(axes)[1].is_contiguous() else 0)
        for each in operands
        if isinstance(each, View) and any(each.split(axes)[1].strides)
    )


def launch_around(device: int, spelling: Spelled, plan: str | Plan | None) -> tuple[Launch, Struct]:
    """Launch an op with what is computed around it, on rows that there are; return the launch and its parameter."""
    module = _device.cupy()
    with module.cuda.Device(device):
        _thread.calls.prepare(device)
        found = _prepared(device, spelling, plan)
        arguments = np.array([spelling.arguments.values], dtype=spelling.arguments.dtype)
        pointer = np.array([arguments.ctypes.data], np.uint64)
        launch = launcher(found.kernel.pointer, found.plan)
        launch(module.cuda.get_current_stream().ptr, pointer.ctypes.data, 0)
    return launch, spelling.arguments


def kernel_of(device: int, what: Spelled, plan: Plan) -> _compile.Kernel:
    """Compile and load a plan's kernel, ready to be launched with its shared memory and in its clusters."""
    shared = plan.shared_bytes or plan.kept_bytes
    shared_limit = _device.limits_of(device).shared_bytes_per_block if shared else 0
    return _compile.kernel(device, what.text, what.expression(plan), shared_limit, plan.cluster)


def _prepared(device: int, what: Spelled, wanted: str | Plan | None) -> _Launch:
    """Return what _prepare() gives, made once for each problem, spelling and wish."""
    key = (device, what.problem, what.op.cpp, what.arguments.cpp, wanted)
    found = _launches.get(key)
    if found is None:
        found = _prepare(device, what, wanted)
        with _lock:
            add(_launches, key, found)
    return found


def _prepare(device: int, what: Spelled, wanted: str | Plan | None, *, tuned: bool = True) -> _Launch:
    limits = _device.limits_of(device)

    def load(plan: Plan) -> _compile.Kernel:
        return kernel_of(device, what, plan)

    def occupancy(plan: Plan) -> int:
        if plan.cluster > 1:
            return _device.active_clusters(load(plan).pointer, plan.cluster, plan.block, plan.shared_bytes)
        return int(
            _device.driver().occupancyMaxActiveBlocksPerMultiprocessor(
                load(plan).pointer, plan.block, plan.shared_bytes
            )
        )

    plan, _ = _choose(what, limits, occupancy, wanted, tuned=tuned)
    return _Launch(load(plan), plan)


def _choose(
    what: Spelled, limits: Limits, occupancy: Occupancy, wanted: str | Plan | None, *, tuned: bool = True
) -> tuple[Plan, str]:
    """Return the plan and its source: "wanted", "tuned" (`cupynorm tune` found it) or "table" (that of _plan.py).

    tuned: whether what was found may be taken; the limits are then those of a device that is here.
    """
    if wanted is not None:
        return choose(what.problem, limits, occupancy, wanted), "wanted"
    if tuned and _tuned.switched_on():
        place = _tuned.place(limits, _device.driver_version())
        found = _tuned.find(place, limits, what.kind, what.problem)
        if found is not None:
            try:
                return choose(what.problem, limits, occupancy, found), "tuned"
            except Exception as error:  # noqa: BLE001  whatever a file holds, it makes no call fail
                warnings.warn(f"{place.file}: a tuned plan is not used: {error}", stacklevel=2)
    return choose(what.problem, limits, occupancy), "table"


def forget() -> None:
    """Drop every remembered call, plan, table of tuned plans and kernel, of all threads."""
    global _thread  # noqa: PLW0603
    with _lock:
        _thread = OfThread()
        _launches.clear()
    _compile.forget()
    _tuned.forget()
