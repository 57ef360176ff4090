"""The one road from arrays to a launch: run() and what it remembers; explain() stops before the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm._options import boolean, eps_of
from cupynorm._values import NamedTuple, dataclass
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.invoke.bound_calls import (
    ALIGNMENT,
    Calls,
    Given,
    OfThread,
    Remembered,
    add,
    elsewhere,
    launcher,
    layout,
    remembered,
)
from cupynorm.lower.mirrors import (
    EMPTY,
    POINTER,
    Struct,
    View,
    affine_store,
    arguments,
    column,
    direct,
    lie,
    pack_width,
)
from cupynorm.plan.config import CONVERTED, DoesNotFitError, Plan, check_plan
from cupynorm.plan.limits import PLAIN_SHARED_BYTES, STATIC_SHARED_BYTES, Limits
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices, tuned_plans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cupynorm.plan.base import Occupancy


@dataclass(frozen=True)
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
        numbers = ", ".join(map(compiler.spell, plan.template))
        return f"cupynorm::{plan.kernel}<{self.kind}, cupynorm::{plan.shape}<{numbers}>>"


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
        problem, twin, load, store, whole, compiler.text(op.source, whole.cpp, whole.dtype.itemsize)
    )


class Prepared(NamedTuple):
    """A loaded kernel, and the plan that it was compiled and is launched by."""

    kernel: compiler.Kernel
    plan: Plan


_lock = threading.RLock()  # a signal handler may run where it is held
_launches: dict[tuple[Any, ...], Prepared] = {}
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
    if kind is None and devices.is_device_array(x):
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
    words, launch = call.words, call.launches[calls.stream(device).ptr]
    # from the first word to the launch: no call, loop or branch (devices.launch_of)
    if stats:
        words[call.x_at] = source
        words[call.y_at] = target
        words[call.first_at] = first
        words[call.last_at] = last
        status = launch()
    else:
        words[call.x_at] = source
        words[call.y_at] = target
        status = launch()
    if status:
        error = devices.launch_error(status)
        if not devices.refuses_plan(error):
            raise error
        return _run_checked(op, x, gamma, beta, axis, eps, y, dtype, return_stats, plan, key)
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
    exact = eps_of(eps) if op.has_eps else 0.0
    return_stats = boolean("return_stats", return_stats)
    columns = {"gamma": gamma, "beta": beta} if op.columns else None
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan, columns=columns)
    scale, shift = call.columns.get("gamma"), call.columns.get("beta")
    if call.on_device and (is_number(gamma) or is_number(beta)):
        return run(op, x, scale, shift, axis, eps, call.out, dtype, return_stats, plan)
    stats = [call.empty_statistic() for _ in op.stats] if return_stats else []
    if not call.on_device:
        asking.answer(lambda: _spelled_call(op, call, (), exact))
        if x.size:  # without rows there is nothing to do, however long they would be
            op.reference(x, scale, shift, call.axes, exact, call.out, *stats)
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
    module = devices.cupy()
    x, y = view(call.x), view(call.out)
    what = _spelled_call(op, call, [array.data.ptr for array in stats], eps)
    with module.cuda.Device(call.device):
        _thread.calls.prepare(call.device)

        def launched(found: Prepared) -> Remembered:
            known = remembered(
                given,
                launcher(found.kernel.pointer, found.plan),
                what.arguments,
                x,
                y,
                layout(call.out),
                op.stats if stats else (),
                x.shape[: len(x.shape) - call.axes],
                call.compute,
            )
            known.launches.once()
            _thread.calls.plans.append(found.plan)
            return known

        return launch_what_fits(call.device, what, given.plan, launched)


Launched = TypeVar("Launched")


def launch_what_fits(
    device: int, what: Spelled, wanted: str | Plan | None, launch: Callable[[Prepared], Launched]
) -> Launched:
    """Return launch(found) of what is prepared for a problem; of another plan where our share of the device refuses that.

    `device` must be current.
    """
    found = prepared(device, what, wanted)
    while True:
        try:
            return launch(found)
        except Exception as error:  # noqa: BLE001  what is no refusal is raised again
            found = _less_shared(device, what, wanted, found.plan, error)


def _less_shared(
    device: int, what: Spelled, wanted: str | Plan | None, refused: Plan, error: Exception
) -> Prepared:
    """Return a launch whose blocks need not all run at once, or are in no clusters, where our share of the device refuses that.

    It is the problem's from then on. Raises RuntimeError where what was asked for needs that, and any other error again.
    """
    at_once = refused.cooperative and devices.refuses_cooperation(error)
    if not at_once and not (refused.cluster > 1 and devices.refuses_clusters(error)):
        raise error
    blocks = refused.grid if at_once else refused.cluster
    why = f"the device does not run {blocks} blocks at once ({error}), as in a green context or with MPS"
    try:
        found = _prepare(device, what, wanted, cooperative=False, clusters=at_once)
    except DoesNotFitError:
        raise RuntimeError(f"{why}: the plan that was asked for needs that") from error
    with _lock:
        add(_launches, _key_of(device, what, wanted), found)
    if not _refusal_told.is_set():
        _refusal_told.set()
        warnings.warn(
            f"{why}: variant {found.plan.variant} is used instead of {refused.variant}, without blocks that wait for "
            "one another. Such calls may be slower, and round otherwise; this is said once",
            stacklevel=6,
        )
    return found


_refusal_told = threading.Event()


@contextlib.contextmanager
def observed() -> Iterator[Sequence[Plan]]:
    """Give a list that gets the plan of each row op that this thread launches meanwhile; a call that is made again adds none."""
    before, _thread.calls = _thread.calls, Calls()
    try:
        yield _thread.calls.plans
    finally:
        _thread.calls = before


def calls_of_thread() -> Calls:
    """Return what this thread remembers."""
    return _thread.calls


def kernel_of(device: int, what: Spelled, plan: Plan) -> compiler.Kernel:
    """Compile and load a plan's kernel, ready to be launched with its shared memory and in its clusters."""
    shared = plan.shared_bytes or plan.row_shared_bytes
    little = plan.parameter_cache == CONVERTED and shared <= PLAIN_SHARED_BYTES - STATIC_SHARED_BYTES
    # more of L1 for shared memory costs those that want little of it 0.02 to 0.09 of the copy rate
    shared_limit = devices.limits_of(device).shared_bytes_per_block if shared and not little else 0
    return compiler.kernel(device, what.text, what.expression(plan), shared_limit, plan.cluster)


def _key_of(device: int, what: Spelled, wanted: str | Plan | None) -> tuple[Any, ...]:
    return (device, what.problem, what.op.cpp, what.arguments.cpp, wanted, compiler.owner())


def prepared(device: int, what: Spelled, wanted: str | Plan | None) -> Prepared:
    """Return what _prepare() gives, made once for each problem, spelling and wish, and for each owner of kernels."""
    check_plan(wanted)  # a key hashes
    key = _key_of(device, what, wanted)
    found = _launches.get(key)
    if found is None:
        found = _prepare(device, what, wanted)
        with _lock:
            add(_launches, key, found)
    return found


def _prepare(
    device: int,
    what: Spelled,
    wanted: str | Plan | None,
    *,
    tuned: bool = True,
    cooperative: bool = True,
    clusters: bool = True,
) -> Prepared:
    """Compile and load the kernel of the plan for a problem.

    cooperative, clusters: whether its blocks may have to run all at once, and may be in clusters.
    """
    from cupynorm.plan.choose import choose  # noqa: PLC0415  the planner is loaded by the first call that needs it

    limits = devices.limits_of(device)

    def load(plan: Plan) -> compiler.Kernel:
        return kernel_of(device, what, plan)

    def occupancy(plan: Plan) -> int:
        if plan.cluster > 1:
            if not clusters:
                return 0
            return devices.active_clusters(load(plan).pointer, plan.cluster, plan.block, plan.shared_bytes)
        return int(
            devices.driver().occupancyMaxActiveBlocksPerMultiprocessor(
                load(plan).pointer, plan.block, plan.shared_bytes
            )
        )

    if cooperative:
        plan, _ = _choose(what, limits, occupancy, wanted, tuned=tuned)
    else:
        plan = choose(what.problem, limits, occupancy, wanted, cooperative=False)
    return Prepared(load(plan), plan)


def _choose(
    what: Spelled, limits: Limits, occupancy: Occupancy, wanted: str | Plan | None, *, tuned: bool = True
) -> tuple[Plan, str]:
    """Return the plan and its source: "wanted", "tuned" (`cupynorm tune` found it) or "table" (by the rules of plan/data).

    tuned: whether what was found may be taken; the limits are then those of a device that is here.
    """
    from cupynorm.plan.choose import choose  # noqa: PLC0415  as in _prepare()

    if wanted is not None:
        return choose(what.problem, limits, occupancy, wanted), "wanted"
    if tuned and tuned_plans.switched_on():
        place = tuned_plans.place(limits, devices.driver_version())
        found = tuned_plans.find(place, limits, what.kind, what.problem)
        if found is not None:
            try:
                plan = choose(what.problem, limits, occupancy, found)
                return dataclasses.replace(plan, why="`cupynorm tune` found it on this device"), "tuned"
            except Exception as error:  # noqa: BLE001  whatever a file holds, it makes no call fail
                warnings.warn(f"{place.file}: a tuned plan is not used: {error}", stacklevel=2)
    return choose(what.problem, limits, occupancy), "table"


def forget() -> None:
    """Drop every remembered call, plan and table of tuned plans, of all threads.

    Kernels stay loaded, since a CUDA graph may hold them: a call that is made again finds them.
    """
    global _thread  # noqa: PLW0603
    with _lock:
        _thread = OfThread()
        _launches.clear()
    tuned_plans.forget()
