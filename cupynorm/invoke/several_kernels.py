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
    from cupynorm.lower.spec import KernelSpec


def launch(device: int, specs: Sequence[KernelSpec], arrays: Arrays) -> BoundCall:
    """Launch the kernels of a checked call in their order, on the device's current stream; return it as it is bound.

    Each is launched before the next one is planned, so none runs twice if our part of the device refuses another.
    """
    with devices.cupy().cuda.Device(device):
        bound_calls.thread.calls.prepare(device)
        return bound_call(device, arrays, [_launched(device, spec, arrays) for spec in specs])


def _launched(device: int, spec: KernelSpec, arrays: Arrays) -> Launch:
    """Launch one kernel; return what bound_call takes."""

    def once(launch: Launch) -> Launch:
        bound_call(device, arrays, [launch]).once()
        return launch

    if not isinstance(spec.problem, Problem):
        return once(one_kernel.prepared(device, spec))
    return row_ops.launch_what_fits(
        device,
        spec,
        None,
        lambda found: once((found.kernel, row_ops.launcher(found.kernel.pointer, found.plan), spec.params)),
    )
