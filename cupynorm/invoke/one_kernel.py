"""Ops that have one kernel and no variants: from a lowered call to its first launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import Arrays, BoundCall, bound_call
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from cupynorm.lower.spec import KernelSpec


def launch(device: int, spec: KernelSpec, arrays: Arrays) -> BoundCall:
    """Launch a checked call that has elements, on the device's current stream; return it as it is bound."""
    with devices.cupy().cuda.Device(device):
        bound_calls.thread.calls.prepare(device)
        plan = spec.problem.plan(devices.limits_of(device))
        kernel = compiler.kernel(device, spec.text, spec.expression(plan), 0)
        binding = devices.launch_of(kernel.pointer, plan.grid, (*plan.block, 1), 0)
        bound = bound_call(device, arrays, [(kernel, binding, spec.params)])
        bound.once()
    return bound
