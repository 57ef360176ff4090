"""Row ops from arrays to a launch: shortcuts to bound calls, and plans with their kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

from cupynorm._dtypes import Dtype
from cupynorm._options import boolean, eps_of
from cupynorm._values import NamedTuple, dataclass
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import (
    ALIGNMENT,
    Arrays,
    BoundCall,
    Calls,
    add,
    alias_window,
    axis_option,
    bound_call,
    elsewhere,
    launches_of,
    layout,
)
from cupynorm.lower.row import RowOp, row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import CONVERTED, DoesNotFitError, Plan, check_plan
from cupynorm.plan.limits import PLAIN_SHARED_BYTES, STATIC_SHARED_BYTES, Limits
from cupynorm.runtime import compiler, devices, tuned_plans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cupynorm.plan.base import Occupancy
    from cupynorm.runtime.devices import Binding


class Prepared(NamedTuple):
    """A loaded kernel, and the plan that it was compiled and is launched by."""

    kernel: compiler.Kernel
    plan: Plan


_lock = threading.RLock()  # a signal handler may run where it is held
_launches: dict[tuple[Any, ...], Prepared] = {}


@dataclass(slots=True, eq=False, repr=False)
class Shortcut:
    """A bound call of a row op alone, with the very options, gamma and beta of its callers: run() compares identities.

    words: hold the addresses of this gamma and beta.
    *_at: the word that an address goes to, -1 for none; first and last are those of the op's one or two statistics.
    parameters_near: pairs of addresses; an `out` strictly between them may share memory with gamma or beta.
    """

    axis: int | tuple[int, ...]
    eps: float
    dtype: Any
    return_stats: bool
    plan: str | Plan | None
    words: array[int]
    parameters: array[int]
    launches: devices.Launches
    kernel: compiler.Kernel
    x_at: int
    y_at: int
    first_at: int
    last_at: int
    gamma: Callable[[], Any]
    gamma_ndim: int  # 1 or, for several axes, -1
    gamma_shape: tuple[int, ...]
    beta: Callable[[], Any]
    beta_ndim: int
    beta_shape: tuple[int, ...]
    parameters_near: tuple[tuple[int, int], ...]
    y_dtype: Dtype | None  # of an `out`, as all of y_
    y_strides: tuple[int, ...] | bool  # True: contiguous
    y_bits: int  # of its address
    y_code: Any  # the dtype of a result of our own
    stats_shape: tuple[int, ...]
    stats_code: Any
    near: tuple[int, int]  # strictly between these distances from x, an `out` may share memory with it ...
    distance: int  # ... and here it was found that it may: it is x, or lies between x's rows


X, GAMMA, BETA, OUT, MADE = range(5)  # the sources of a row op's call


def shortcut_to(
    call: BoundCall,
    x: Any,
    gamma: Any,
    beta: Any,
    axis: int | tuple[int, ...],
    eps: float,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
) -> Shortcut:
    """Return the shortcut to a bound call. Weak references: no array is kept alive, nor taken for a later one."""
    kernel = call.kernels[0]
    words, parameters, launches = launches_of(kernel.words[:], kernel.bind)
    known: dict[str, Any] = {}
    for source, (name, each) in enumerate((("gamma", gamma), ("beta", beta)), GAMMA):
        known |= {name: _nothing, f"{name}_ndim": -1, f"{name}_shape": ()}
        if each is not None:
            ndim = 1 if each.ndim == 1 else -1
            known |= {name: weakref.ref(each), f"{name}_ndim": ndim, f"{name}_shape": each.shape}
            words[call.word_of(source)] = each.data.ptr
    near, distance, parameters_near = (0, 0), 0, []
    if out is not None:
        y = view(out)
        near, distance = alias_window(y, view(x)), y.pointer - x.data.ptr
        for each in (gamma, beta):
            if each is not None:
                low, high = alias_window(y, view(each))
                parameters_near.append((each.data.ptr + low, each.data.ptr + high))
    first_stat = MADE if out is not None else MADE + 1
    stats = call.allocated[first_stat - MADE :]
    return Shortcut(
        axis=axis,
        eps=eps,
        dtype=dtype,
        return_stats=return_stats,
        plan=plan,
        words=words,
        parameters=parameters,
        launches=launches,
        kernel=kernel.kernel,
        x_at=call.word_of(X),
        y_at=call.word_of(MADE if out is None else OUT),
        first_at=call.word_of(first_stat),
        last_at=call.word_of(first_stat + len(stats) - 1),
        **known,
        parameters_near=tuple(parameters_near),
        y_dtype=None if out is None else out.dtype,
        y_strides=True if out is None else layout(out),
        y_bits=0 if out is None else out.data.ptr & ALIGNMENT,
        y_code=call.allocated[0][1] if out is None else None,
        stats_shape=stats[0][0] if stats else (),
        stats_code=stats[0][1] if stats else None,
        near=near,
        distance=distance,
    )


def _nothing() -> None:
    """Stand for a reference to no array."""


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

    A launch is on the arrays' device and that device's current stream; nothing is synchronised. A call that this thread
    made before is launched again with other addresses and without checks: all that checks and the choice of a kernel
    depend on is in `key`, or is compared with the shortcut. A call without a shortcut is looked up by its signature, and
    checked if it is not found.
    """
    # everything is written out here: to call a function costs as much as to compare two shapes
    calls = bound_calls.thread.calls
    kind = calls.kind
    if kind is None and devices.is_device_array(x):
        kind = calls.begin()
    if type(x) is not kind:
        return _run_checked(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, None, None)
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
    call = calls.shortcuts.get(key)
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
        return _run_by_signature(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, key)
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
        for low, high in call.parameters_near:
            fits = fits and not low < target < high
    if not fits:
        return _run_by_signature(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, key)
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
        return _run_by_signature(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, key)
    return (y, *stats) if stats else y


def _run_by_signature(
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
    """Run one call of device arrays that no shortcut is for, and make one: run() will look for it under `key`."""
    calls = bound_calls.thread.calls
    options = (op.name, axis_option(axis), eps, type(eps), dtype, return_stats, type(return_stats), plan)
    signature, made = calls.again((x, gamma, beta, out), options)
    if made is None:
        return _run_checked(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, key, signature)
    bound = calls.bound.get(signature)  # type: ignore[arg-type]  # what was made has a signature
    if bound is not None:  # unless a signal handler dropped it meanwhile
        found = shortcut_to(bound, x, gamma, beta, axis, eps, out, dtype, return_stats, plan)
        add(calls.shortcuts, key, found)
    results = (*made,) if out is None else (out, *made)
    return results if len(results) > 1 else results[0]


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
    signature: Any,
) -> Any:
    """Run one call with all checks; keep it under its signature, and a shortcut to it under run()'s `key`."""
    exact = eps_of(eps) if op.has_eps else 0.0
    return_stats = boolean("return_stats", return_stats)
    columns = {"gamma": gamma, "beta": beta} if op.columns else None
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan, columns=columns)
    scale, shift = call.columns.get("gamma"), call.columns.get("beta")
    if call.on_device and (is_number(gamma) or is_number(beta)):
        return run(op, x, scale, shift, axis, eps, call.out, dtype, return_stats, plan)
    stats = {name: call.empty_statistic() for name in op.stats} if return_stats else {}
    if not call.on_device:
        asking.answer(lambda: _lowered(op, call, {}, exact))
        if x.size:  # without rows there is nothing to do, however long they would be
            op.reference(x, scale, shift, call.axes, exact, call.out, *stats.values())
    elif x.size:
        made = stats if out is not None else {"out": call.out, **stats}
        given = {"x": x, "gamma": gamma, "beta": beta, "out": out}
        bound = launch(call.device, _lowered(op, call, stats, exact), plan, Arrays(given, ("out",), made))
        calls = bound_calls.thread.calls
        if calls.add(signature, bound, made):
            found = shortcut_to(bound, x, gamma, beta, axis, eps, out, dtype, return_stats, plan)
            add(calls.shortcuts, key, found)
    return (call.out, *stats.values()) if stats else call.out


def _lowered(op: RowOp, call: Call, stats: Mapping[str, Any], eps: float) -> KernelSpec:
    columns = {name: view(each, name) for name, each in call.columns.items()}
    pointers = [view(each, name).pointer for name, each in stats.items()]
    return row_spec(op, view(call.x, "x"), view(call.out, "out"), call.axes, columns, pointers, eps)


def launch(device: int, spec: KernelSpec, wanted: str | Plan | None, arrays: Arrays) -> BoundCall:
    """Launch a checked call of a row op on rows that there are; return it as it is bound."""
    calls = bound_calls.thread.calls
    with devices.cupy().cuda.Device(device):
        calls.prepare(device)

        def launched(found: Prepared) -> BoundCall:
            binding = launcher(found.kernel.pointer, found.plan)
            bound = bound_call(device, arrays, [(found.kernel, binding, spec.params)])
            bound.once()
            calls.plans.append(found.plan)
            return bound

        return launch_what_fits(device, spec, wanted, launched)


def launcher(function: int, plan: Plan) -> Binding:
    """Return a kernel's binding, as devices.launch_of does."""
    split = plan.variant == "split"
    grid = (plan.grid // plan.ctas_per_row, plan.ctas_per_row, 1) if split else (plan.grid, 1, 1)
    return devices.launch_of(
        function, grid, (plan.block, 1, 1), plan.shared_bytes, cooperative=plan.cooperative
    )


Launched = TypeVar("Launched")


def launch_what_fits(
    device: int, spec: KernelSpec, wanted: str | Plan | None, launch: Callable[[Prepared], Launched]
) -> Launched:
    """Return launch(found) of what is prepared for a problem; of another plan where our share of the device refuses that.

    `device` must be current.
    """
    found = prepared(device, spec, wanted)
    while True:
        try:
            return launch(found)
        except Exception as error:  # noqa: BLE001  what is no refusal is raised again
            found = _less_shared(device, spec, wanted, found.plan, error)


def _less_shared(
    device: int, spec: KernelSpec, wanted: str | Plan | None, refused: Plan, error: Exception
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
        found = _prepare(device, spec, wanted, cooperative=False, clusters=at_once)
    except DoesNotFitError:
        raise RuntimeError(f"{why}: the plan that was asked for needs that") from error
    with _lock:
        add(_launches, _key_of(device, spec, wanted), found)
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
    thread = bound_calls.thread
    before, thread.calls = thread.calls, Calls()
    try:
        yield thread.calls.plans
    finally:
        thread.calls = before


def calls_of_thread() -> Calls:
    """Return the bound calls of this thread."""
    return bound_calls.thread.calls


def kernel_of(device: int, spec: KernelSpec, plan: Plan) -> compiler.Kernel:
    """Compile and load a plan's kernel, ready to be launched with its shared memory and in its clusters."""
    shared = plan.shared_bytes or plan.row_shared_bytes
    little = plan.parameter_cache == CONVERTED and shared <= PLAIN_SHARED_BYTES - STATIC_SHARED_BYTES
    # more of L1 for shared memory costs those that want little of it 0.02 to 0.09 of the copy rate
    shared_limit = devices.limits_of(device).shared_bytes_per_block if shared and not little else 0
    return compiler.kernel(device, spec.text, spec.expression(plan), shared_limit, plan.cluster)


def _key_of(device: int, spec: KernelSpec, wanted: str | Plan | None) -> tuple[Any, ...]:
    return (device, spec.problem, spec.params.cpp, wanted, compiler.owner())


def prepared(device: int, spec: KernelSpec, wanted: str | Plan | None) -> Prepared:
    """Return what _prepare() gives, made once for each problem, spelling and wish, and for each owner of kernels."""
    check_plan(wanted)  # a key hashes
    key = _key_of(device, spec, wanted)
    found = _launches.get(key)
    if found is None:
        found = _prepare(device, spec, wanted)
        with _lock:
            add(_launches, key, found)
    return found


def _prepare(
    device: int,
    spec: KernelSpec,
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
        return kernel_of(device, spec, plan)

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
        plan, _ = _choose(spec, limits, occupancy, wanted, tuned=tuned)
    else:
        plan = choose(spec.problem, limits, occupancy, wanted, cooperative=False)
    return Prepared(load(plan), plan)


def _choose(
    spec: KernelSpec, limits: Limits, occupancy: Occupancy, wanted: str | Plan | None, *, tuned: bool = True
) -> tuple[Plan, str]:
    """Return the plan and its source: "wanted", "tuned" (`cupynorm tune` found it) or "table" (by the rules of plan/data).

    tuned: whether what was found may be taken; the limits are then those of a device that is here.
    """
    from cupynorm.plan.choose import choose  # noqa: PLC0415  as in _prepare()

    if wanted is not None:
        return choose(spec.problem, limits, occupancy, wanted), "wanted"
    if tuned and tuned_plans.switched_on():
        place = tuned_plans.place(limits, devices.driver_version())
        found = tuned_plans.find(place, limits, spec.types, spec.problem)
        if found is not None:
            try:
                plan = choose(spec.problem, limits, occupancy, found)
                return dataclasses.replace(plan, why="`cupynorm tune` found it on this device"), "tuned"
            except Exception as error:  # noqa: BLE001  whatever a file holds, it makes no call fail
                warnings.warn(f"{place.file}: a tuned plan is not used: {error}", stacklevel=2)
    return choose(spec.problem, limits, occupancy), "table"


def forget() -> None:
    """Drop every bound call, plan and table of tuned plans, of all threads.

    Kernels stay loaded, since a CUDA graph may hold them: a call that is made again finds them.
    """
    with _lock:
        bound_calls.forget()
        _launches.clear()
    tuned_plans.forget()
