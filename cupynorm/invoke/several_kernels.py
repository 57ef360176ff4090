"""Calls of several kernels, such as a gradient and the sums of its parameters: from lowered calls to their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm.invoke import bound_calls, one_kernel, row_ops
from cupynorm.invoke.bound_calls import Arrays, BoundCall, bound_call
from cupynorm.plan.problem import Problem
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.invoke.bound_calls import Launch
    from cupynorm.invoke.row_ops import Prepared
    from cupynorm.lower.spec import KernelSpec
    from cupynorm.plan.config import Plan


def row_kernel(specs: Sequence[KernelSpec]) -> KernelSpec | None:
    """Return the kernel that a plan is for: the last that has variants, behind one for statistics; None for none."""
    return next((spec for spec in reversed(specs) if isinstance(spec.problem, Problem)), None)


def launch(
    device: int, specs: Sequence[KernelSpec], arrays: Arrays, forced: str | Plan | None = None
) -> BoundCall:
    """Launch the kernels of a checked call in their order, on the device's current stream; return it as it is bound.

    Each is launched before the next one is planned, so none runs twice if our part of the device refuses another.
    forced: the plan of row_kernel(). It is refused before anything is launched, which may have added to a sum.
    """
    calls, row_spec = bound_calls.thread.calls, None if forced is None else row_kernel(specs)
    with devices.cupy().cuda.Device(device):
        calls.prepare(device)
        if row_spec is not None:
            row_ops.prepared(device, row_spec, forced)
        launches = [_launched(device, spec, arrays, forced if spec is row_spec else None) for spec in specs]
        return bound_call(device, arrays, launches)


def _launched(device: int, spec: KernelSpec, arrays: Arrays, forced: str | Plan | None) -> Launch:
    """Launch one kernel; return what bound_call takes."""

    def once(launch: Launch) -> Launch:
        bound_call(device, arrays, [launch]).once()
        return launch

    if not isinstance(spec.problem, Problem):
        return once(one_kernel.prepared(device, spec))

    def planned(found: Prepared) -> Launch:
        launch = once(row_ops.launch_of(found, spec))
        bound_calls.thread.calls.plans.append(found.plan)
        return launch

    return row_ops.launch_what_fits(device, spec, forced, planned)
