"""What is computed around an op, in its one kernel: masks, sums, quantising, a user's functions; from a call to its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._options import boolean, eps_of
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.call.extras import CheckedExtras, Extras, quantize_of
from cupynorm.call.masks import asked_of, with_lengths
from cupynorm.call.quantize import Quantize
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import add, again, launcher
from cupynorm.lower.fused import around, fused_spec
from cupynorm.lower.mirrors import (
    Struct,
)
from cupynorm.lower.row import RowOp
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.planner import Plan
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupynorm.runtime.devices import Binding


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
    of_axis = tuple(map(type, axis)) if type(axis) is tuple else type(axis)
    switch = (return_stats, type(return_stats))
    options = (op.name, axis, of_axis, eps, type(eps), dtype, switch, plan, extras.options())
    drop = None if extras.add is None else extras.add.dropout
    place = None if drop is None else (drop.seed, drop.offset)
    calls = row_ops.calls_of_thread()
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
    exact = eps_of(eps) if op.has_eps else 0.0
    return_stats = boolean("return_stats", return_stats)
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
    scale, shift = call.columns.get("gamma"), call.columns.get("beta")
    if call.on_device and any(map(is_number, columns.values())):
        extras = extras.with_bias(call.columns.get("bias"))
        return run_fused(op, x, scale, shift, axis, eps, call.out, dtype, return_stats, plan, extras)
    fused = extras.with_bias(call.columns.get("bias")).checked(call)
    stats = [call.empty_statistic() for _ in op.stats] if return_stats else []
    results = (call.out, *fused.results, *stats)
    if not call.on_device:
        asking.answer(lambda: _lowered(op, call, (), exact, fused))
        if x.size:
            op.reference(x, scale, shift, call.axes, exact, call.out, *stats, extras=fused.on_host())
    elif x.size:
        spec = _lowered(op, call, [array.data.ptr for array in stats], exact, fused)
        launched = launch_around(call.device, spec, plan)
        if known is not None:
            remember(known[0], launched, given, results if out is None else results[1:], place, None)
    return results if len(results) > 1 else call.out


def quantising(quantize: str | Quantize) -> Extras:
    """Return what quantize= says."""
    return Extras(quantize=quantize_of(quantize))


def run_masked(
    op: RowOp,
    x: Any,
    axis: int | tuple[int, ...],
    out: Any,
    dtype: Any,
    plan: str | Plan | None,
    options: Mapping[str, Any],
    quantize: str | Quantize | None,
) -> Any:
    """Run a call of softmax or log_softmax with options; they may say nothing, such as where=None."""
    asked, how = asked_of(op.name, options), quantize_of(quantize)
    if asked is None and how is None:
        return row_ops.run(op, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
    extras = Extras(masked=None if asked is None else with_lengths(asked, x), quantize=how)
    return run_fused(op, x, None, None, axis, 0.0, out, dtype, False, plan, extras)  # noqa: FBT003


def remember(
    key: Any,
    launched: tuple[Binding, Struct],
    given: Sequence[Any],
    made: Sequence[Any],
    place: tuple[int, int] | None,
    holds: Any,
) -> None:
    """Remember a call with something fused, for this thread, until another of the same key comes."""
    call = again(*launched, given, made, place, holds)
    if call is not None:
        add(row_ops.calls_of_thread().fused, key, call)


def _lowered(op: RowOp, call: Call, stats: Sequence[int], eps: float, fused: CheckedExtras) -> KernelSpec:
    """Lower a checked call with something fused around it."""
    columns = {name: view(array) for name, array in call.columns.items() if name != "bias"}
    return fused_spec(op, view(call.x), call.axes, columns, stats, eps, call.compute, around(call, fused))


def launch_around(device: int, spec: KernelSpec, plan: str | Plan | None) -> tuple[Binding, Struct]:
    """Launch an op with what is computed around it, on rows that there are; return its binding and parameter."""
    module = devices.cupy()
    with module.cuda.Device(device):
        row_ops.calls_of_thread().prepare(device)
        arguments = np.array([spec.params.values], dtype=spec.params.dtype)
        pointer = np.array([arguments.ctypes.data], np.uint64)

        def launched(found: row_ops.Prepared) -> Binding:
            bind = launcher(found.kernel.pointer, found.plan)
            devices.launch_once(bind, pointer.ctypes.data)
            return bind

        bind = row_ops.launch_what_fits(device, spec, plan, launched)
    return bind, spec.params
