"""Ops that have no variants: from a lowered call, of one kernel or of several, to its first launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import Arrays, BoundCall, Launch, bound_call
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from cupynorm.lower.spec import KernelSpec


def launch(device: int, spec: KernelSpec, arrays: Arrays) -> BoundCall:
    """Launch a checked call that has elements, on the device's current stream; return it as it is bound."""
    with devices.cupy().cuda.Device(device):
        bound_calls.thread.calls.prepare(device)
        bound = bound_call(device, arrays, [prepared(device, spec)])
        bound.once()
    return bound


def prepared(device: int, spec: KernelSpec) -> Launch:
    """Compile and load the kernel of a call; return what bound_call takes. `device` must be current."""
    plan = spec.problem.plan(devices.limits_of(device))
    kernel = compiler.kernel(device, spec.text, spec.expression(plan), 0)
    return Launch(kernel, devices.launch_of(kernel.pointer, plan.grid, (*plan.block, 1), 0), spec.params)
