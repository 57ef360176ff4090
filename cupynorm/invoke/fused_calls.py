"""Row ops with something fused around them, in one kernel: masks, sums, quantisation; from a call to its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._options import boolean, eps_of
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.call.extras import CheckedExtras, Extras, quantize_of
from cupynorm.call.masks import asked_of, with_lengths
from cupynorm.call.quantize import Quantize
from cupynorm.invoke import bound_calls, row_ops
from cupynorm.invoke.bound_calls import Arrays, axis_option
from cupynorm.lower.fused import around, fused_spec
from cupynorm.lower.row import RowOp
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import Plan
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MASK_ARRAYS = {"where", "bias", "lengths"}  # keywords of softmax
SCALE = "quantize.scale"


def quantize_option(quantize: Any) -> tuple[Any, Any]:
    """Return what a signature has of quantize=, and the array that it holds, None if there is none."""
    if not isinstance(quantize, Quantize):
        return (quantize, type(quantize)), None
    scale = quantize.scale
    if type(scale) is not float and (isinstance(scale, np.ndarray) or devices.is_device_array(scale)):
        return quantize.dtype, scale
    return (quantize.dtype, scale), None


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
    arrays = {"x": x, "out": out}
    said = [op.name, axis if type(axis) is int else axis_option(axis), dtype, plan]
    for name, value in options.items():
        kind = type(value)
        said.append(name)
        if name in MASK_ARRAYS:
            arrays[name] = value
        elif kind is tuple:
            said += (value, *map(type, value))
        else:  # 0.0 and -0.0 are equal, 1 and True as well
            said += (repr(value) if kind is float and not value else value, kind)
    if quantize is not None:
        option, arrays[SCALE] = quantize_option(quantize)
        said.append(option)
    signature, made = bound_calls.thread.calls.again((*arrays.values(),), (*said,))
    if made is not None:
        results = (*made,) if out is None else (out, *made)
        return results if len(results) > 1 else results[0]
    asked, how = asked_of(op.name, options), quantize_of(quantize)
    if asked is None and how is None:
        return row_ops.run(op, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
    if asked is not None and isinstance(asked.lengths, (list, tuple)):
        # host data, which is looked at: then the call is one with an array
        listed = with_lengths(asked, x).lengths
        return run_masked(op, x, axis, out, dtype, plan, {**options, "lengths": listed}, quantize)
    extras = Extras(masked=asked, quantize=how)
    return run_checked(op, arrays, axis, 0.0, dtype, False, plan, extras, (*said,), signature)  # noqa: FBT003


def run_quantized(
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
    quantize: str | Quantize,
) -> Any:
    """Run a call of a norm whose result is quantised."""
    option, scale = quantize_option(quantize)
    arrays = {"x": x, "gamma": gamma, "beta": beta, "out": out, SCALE: scale}
    of_axis = axis if type(axis) is int else axis_option(axis)
    said = (op.name, of_axis, eps, type(eps), dtype, return_stats, type(return_stats), plan, option)
    signature, made = bound_calls.thread.calls.again((*arrays.values(),), said)
    if made is not None:
        results = (*made,) if out is None else (out, *made)
        return results if len(results) > 1 else results[0]
    extras = Extras(quantize=quantize_of(quantize))
    return run_checked(op, arrays, axis, eps, dtype, return_stats, plan, extras, said, signature)


def run_checked(
    op: RowOp,
    arrays: dict[str, Any],
    axis: int | tuple[int, ...],
    eps: float,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
    extras: Extras,
    said: tuple[Any, ...],
    signature: Any,
) -> Any:
    """Run one call with something fused around it with all checks; keep it under `signature`.

    Results: y, scales of rows, the sum, statistics; those that are asked for. arrays, said: the arrays and the options of
    the signature.
    """
    x: Any = arrays["x"]
    gamma, beta, out = (arrays.get(name) for name in ("gamma", "beta", "out"))
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
    extras = extras.with_bias(call.columns.get("bias"))
    drop = None if extras.add is None else extras.add.dropout
    calls = bound_calls.thread.calls
    if call.on_device and any(map(is_number, columns.values())):
        arrays = {**arrays, **call.columns, "out": call.out}
        numbers = () if drop is None else (drop.seed, drop.offset)
        signature, others = calls.again((*arrays.values(),), said, numbers)
        if others is not None:
            return (call.out, *others) if others else call.out
        out = call.out
    fused = extras.checked(call)
    stats = {name: call.empty_statistic() for name in op.stats} if return_stats else {}
    results = (call.out, *fused.results.values(), *stats.values())
    if not call.on_device:
        asking.answer(lambda: _lowered(op, call, (), exact, fused))
        if x.size:
            scale, shift = call.columns.get("gamma"), call.columns.get("beta")
            op.reference(x, scale, shift, call.axes, exact, call.out, *stats.values(), extras=fused.on_host())
    elif x.size:
        pointers = [view(each, name).pointer for name, each in stats.items()]
        made = {**fused.results, **stats} if out is not None else {"out": call.out, **fused.results, **stats}
        scalars = () if drop is None else ("seed", "offset")
        roles = Arrays(arrays, ("out",), made, scalars=scalars)
        bound = row_ops.launch(call.device, _lowered(op, call, pointers, exact, fused), plan, roles)
        calls.add(signature, bound, made)
    return results if len(results) > 1 else call.out


def _lowered(op: RowOp, call: Call, stats: Sequence[int], eps: float, fused: CheckedExtras) -> KernelSpec:
    """Lower a checked call with something fused around it."""
    columns = {name: view(array, name) for name, array in call.columns.items() if name != "bias"}
    what = around(call, fused)
    return fused_spec(op, view(call.x, "x"), call.axes, columns, stats, eps, call.compute, what)
