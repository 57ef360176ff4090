"""Row ops from a problem to a launch: plans with their kernels, and other ones where a device refuses them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from cupynorm._values import NamedTuple
from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import Arrays, BoundCall, Calls, Launch, add, bound_call
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import CONVERTED, DoesNotFitError, Plan, check_plan
from cupynorm.plan.limits import PLAIN_SHARED_BYTES, STATIC_SHARED_BYTES, Limits
from cupynorm.plan.problem import messages_bytes
from cupynorm.runtime import cache_folder, chosen_plans, compiler, devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynorm.plan.base import LocalBytes, Occupancy
    from cupynorm.runtime.devices import Binding
    from cupynorm.runtime.tuned_plans import Place


class Prepared(NamedTuple):
    """A loaded kernel, and the plan that it was compiled and is launched by."""

    kernel: compiler.Kernel
    plan: Plan


_lock = threading.RLock()  # a signal handler may run where it is held


_launches: dict[tuple[Any, ...], Prepared] = {}


def launch(device: int, spec: KernelSpec, forced: str | Plan | None, arrays: Arrays) -> BoundCall:
    """Launch a checked call of a row op on rows that there are; return it as it is bound."""
    calls = bound_calls.thread.calls
    with devices.cupy().cuda.Device(device):
        calls.prepare(device)

        def launched(found: Prepared) -> BoundCall:
            bound = bound_call(device, arrays, [launch_of(found, spec)])
            bound.once()
            calls.plans.append(found.plan)
            return bound

        return launch_what_fits(device, spec, forced, launched)


def launch_of(found: Prepared, spec: KernelSpec) -> Launch:
    """Return the launch of what was prepared for a problem, as bound_call takes it."""
    binding = launcher(found.kernel.pointer, found.plan)
    return Launch(found.kernel, binding, spec.params, messages_bytes(spec.problem, found.plan))


def launcher(function: int, plan: Plan) -> Binding:
    """Return a kernel's binding, as devices.launch_of does."""
    split = plan.variant == "split"
    grid = (plan.grid // plan.ctas_per_row, plan.ctas_per_row, 1) if split else (plan.grid, 1, 1)
    return devices.launch_of(
        function, grid, (plan.block, 1, 1), plan.shared_bytes, cooperative=plan.cooperative
    )


Launched = TypeVar("Launched")


class NeedsClustersError(RuntimeError):
    """Our part of the device runs no clusters, or not so many blocks at once, and no other plan fits.

    why: what it refuses.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: the plan that was asked for needs that")
        self.why = why


def launch_what_fits(
    device: int, spec: KernelSpec, forced: str | Plan | None, launch: Callable[[Prepared], Launched]
) -> Launched:
    """Return launch(found) of what is prepared for a problem; of another plan if our part of the device refuses it.

    `device` must be current.
    """
    found = prepared(device, spec, forced)
    while True:
        try:
            return launch(found)
        except Exception as error:  # noqa: BLE001  what is no refusal is raised again
            found = _replan_after_refusal(device, spec, forced, found.plan, error)


def _replan_after_refusal(
    device: int, spec: KernelSpec, forced: str | Plan | None, refused: Plan, error: Exception
) -> Prepared:
    """Return a launch without cooperative blocks, or without clusters, if our part of the device refuses them.

    It is the problem's from then on. Raises RuntimeError where what was asked for needs that, and any other error
    again.
    """
    at_once = refused.cooperative and devices.refuses_cooperation(error)
    if not at_once and not (refused.cluster > 1 and devices.refuses_clusters(error)):
        raise error
    blocks = refused.grid if at_once else refused.cluster
    why = f"the device does not run {blocks} blocks at once ({error}), as in a green context or with MPS"
    try:
        found = prepare(device, spec, forced, cooperative=False, clusters=at_once)
    except DoesNotFitError:
        raise NeedsClustersError(why) from error
    with _lock:
        add(_launches, _key_of(device, spec, forced), found)
    warn_of_refusal(
        f"{why}: variant {found.plan.variant} is used instead of {refused.variant}, without blocks that wait "
        "for one another"
    )
    return found


def warn_of_refusal(what: str) -> None:
    """Warn once that our part of the device refuses launches."""
    if not _refusal_told.is_set():
        _refusal_told.set()
        warnings.warn(
            f"{what}. Such calls may be slower, and round otherwise; this is said once", stacklevel=6
        )


_refusal_told = threading.Event()


@contextlib.contextmanager
def observed() -> Iterator[Sequence[Plan]]:
    """Yield a list that gets the plan of each row op that this thread launches meanwhile; warm calls add none."""
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
    # a larger part of L1 set aside for shared memory slows down kernels that want little of it (docs/notes/047)
    shared_limit = devices.limits_of(device).shared_bytes_per_block if shared and not little else 0
    return compiler.kernel(device, spec.text, spec.expression(plan), shared_limit, plan.cluster)


def _key_of(device: int, spec: KernelSpec, forced: str | Plan | None) -> tuple[Any, ...]:
    return (device, spec.problem, spec.params.cpp, forced, compiler.owner())


def prepared(device: int, spec: KernelSpec, forced: str | Plan | None) -> Prepared:
    """Return what prepare() gives, made once for each problem, parameter, forced plan and owner of kernels."""
    check_plan(forced)  # a key hashes
    key = _key_of(device, spec, forced)
    found = _launches.get(key)
    if found is None:
        found = prepare(device, spec, forced)
        with _lock:
            add(_launches, key, found)
    return found


def prepare(
    device: int,
    spec: KernelSpec,
    forced: str | Plan | None,
    *,
    tuned: bool = True,
    cooperative: bool = True,
    clusters: bool = True,
) -> Prepared:
    """Compile and load the kernel of the plan for a problem.

    A plan that follows from the rules is kept on disk. One that was asked for, or tuned, or that our part of the device
    has forced, is not. cooperative, clusters: whether its blocks may have to run all at once, and may be in clusters.
    """
    limits = devices.limits_of(device)
    answers: list[tuple[Plan, int]] = []

    def load(plan: Plan) -> compiler.Kernel:
        return kernel_of(device, spec, plan)

    def occupancy(plan: Plan) -> int:
        if plan.cluster > 1 and not clusters:
            return 0
        found = _resident_blocks(load(plan), plan)
        answers.append((plan, found))
        return found

    def local_bytes(plan: Plan) -> int:
        return load(plan).local_bytes

    if not cooperative:
        from cupynorm.plan.choose import choose  # noqa: PLC0415  loaded by the first call that needs it

        plan = choose(spec.problem, limits, occupancy, forced, cooperative=False, local_bytes=local_bytes)
        return Prepared(load(plan), plan)
    key = None
    if forced is None and not (tuned and _tuned(spec, limits)):
        key = chosen_plans.key(spec.text, spec.name, spec.types, spec.problem, limits)
    found = None if key is None else _remembered(key, load)
    if found is not None:
        return found
    plan, _ = choose_plan(spec, limits, occupancy, local_bytes, forced, tuned=tuned)
    if key is not None and _depends_on_key_alone(plan, answers):
        chosen_plans.store(key, plan)
    return Prepared(load(plan), plan)


def _resident_blocks(kernel: compiler.Kernel, plan: Plan) -> int:
    """Ask the driver how many blocks of a plan a multiprocessor holds at once, or of clusters, how many our device."""
    if plan.cluster > 1:
        return devices.active_clusters(kernel.pointer, plan.cluster, plan.block, plan.shared_bytes)
    driver = devices.driver()
    return int(
        driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.pointer, plan.block, plan.shared_bytes)
    )


def _remembered(key: str, load: Callable[[Plan], compiler.Kernel]) -> Prepared | None:
    """Return what an earlier process chose, if the driver still holds as many blocks of it at once; else None.

    So clusters are counted anew: a green context, which the limits do not show, may hold fewer of them, or more.
    """
    plan = chosen_plans.load(key)
    if plan is None:
        return None
    kernel = load(plan)
    return Prepared(kernel, plan) if _resident_blocks(kernel, plan) == plan.resident_blocks else None


def _depends_on_key_alone(plan: Plan, answers: Sequence[tuple[Plan, int]]) -> bool:
    """Say whether a plan is what any process would choose that holds as many blocks of it at once.

    answers: how many blocks of each plan that was tried there are at once. It is not so where clusters of another one
    were counted, since they may be more elsewhere.
    """

    def launch(each: Plan) -> tuple[Any, ...]:
        return each.kernel, each.template, each.block, each.shared_bytes, each.cluster

    own = [found for tried, found in answers if launch(tried) == launch(plan)]
    others = [tried for tried, _ in answers if launch(tried) != launch(plan)]
    return own[-1:] == [plan.resident_blocks] and all(tried.cluster == 1 for tried in others)


def choose_plan(
    spec: KernelSpec,
    limits: Limits,
    occupancy: Occupancy,
    local_bytes: LocalBytes,
    forced: str | Plan | None,
    *,
    tuned: bool = True,
) -> tuple[Plan, str]:
    """Return the plan and its source: "forced" (by plan=), "tuned" (by `cupynorm tune`) or "rules" (of plan/data).

    tuned: whether what was found may be taken; the limits are then those of a device that is here.
    """
    from cupynorm.plan.choose import choose  # noqa: PLC0415  as in prepare()

    if forced is not None:
        plan = choose(spec.problem, limits, occupancy, forced, local_bytes=local_bytes)
        numbers = f"; its numbers: {plan.why}" if plan.rule else ""
        asked = (
            "the call gives all numbers of a plan"
            if isinstance(forced, Plan)
            else "the call names the variant"
        )
        return dataclasses.replace(plan, why=f"{asked}{numbers}"), "forced"
    known = _tuned(spec, limits) if tuned else None
    if known is not None:
        found, place = known
        try:
            plan = choose(spec.problem, limits, occupancy, found)
            return dataclasses.replace(plan, why="`cupynorm tune` found it on this device"), "tuned"
        except Exception as error:  # noqa: BLE001  whatever a file holds, it makes no call fail
            warnings.warn(f"{place.file}: a tuned plan is not used: {error}", stacklevel=2)
    return choose(spec.problem, limits, occupancy, local_bytes=local_bytes), "rules"


def _tuned(spec: KernelSpec, limits: Limits) -> tuple[Plan, Place] | None:
    """Return the plan that `cupynorm tune` found for a problem, and where; None if there is none."""
    if not cache_folder.holds("tuned"):
        return None
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415  only who has tuned waits for it

    if not tuned_plans.switched_on():
        return None
    place = tuned_plans.place(limits, devices.driver_version())
    found = tuned_plans.find(place, limits, spec.types, spec.problem)
    return None if found is None else (found, place)


def forget() -> None:
    """Drop every bound call, plan and table of tuned plans, of all threads.

    Kernels stay loaded, since a CUDA graph may hold them: a call that is made again finds them.
    """
    with _lock:
        bound_calls.forget()
        _launches.clear()
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415  as in _tuned()

    tuned_plans.forget()
