"""Row ops with something fused around them, in one kernel: masks, sums, quantisation; from a call to its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm._options import boolean, eps_of, eps_within
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.call.extras import CheckedExtras, Extras, quantize_of
from cupynorm.call.masks import asked_of, with_lengths
from cupynorm.invoke import row_calls, row_ops
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.invoke.shortcuts import Given
from cupynorm.lower.around import around
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.row import RowOp
from cupynorm.lower.spec import KernelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCALE = "quantize.scale"


def run_masked(
    given: Given, options: Mapping[str, Any], quantize: Any, names: Sequence[str], signature: Any
) -> Any:
    """Run a call of softmax or log_softmax with options, with all checks.

    names: of the arrays among the options and quantize, which are given.operands. given.unchecked: the options and
    quantize together.
    """
    op, x, _, _, axis, eps, out, dtype, return_stats, plan, *more, _ = given
    options_key, operands, scalars, run_with_checks, unchecked = more
    asked, how = asked_of(op.name, options), quantize_of(quantize)
    if asked is None and how is None:
        return row_calls.run_alone(given, signature)
    if asked is not None and isinstance(asked.lengths, (list, tuple)):
        # host data, which is looked at: then the call is one with an array
        listed = with_lengths(asked, x).lengths
        operands = [listed if name == "lengths" else each for name, each in zip(names, operands, strict=True)]
        more = [options_key, operands, scalars, run_with_checks, {**unchecked, "lengths": listed}]
        return row_calls.run(op, x, None, None, axis, eps, out, dtype, return_stats, plan, *more)
    return run_checked(given, names, Extras(masked=asked, quantize=how), signature)


def run_quantized(given: Given, signature: Any) -> Any:
    """Run a call of a norm whose result is quantised, with all checks. given.unchecked: how."""
    return run_checked(given, (SCALE,), Extras(quantize=quantize_of(given.unchecked)), signature)


def run_checked(given: Given, names: Sequence[str], extras: Extras, signature: Any) -> Any:
    """Run one call with something fused around it with all checks; keep it under `signature`.

    Results: y, scales of rows, the sum, statistics; those that are asked for. names: of given.operands.
    """
    op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, *_ = given
    others = dict(zip(names, given.operands, strict=True))
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
    if call.on_device and any(map(is_number, columns.values())):
        found = dict(call.columns)
        checked_gamma, checked_beta = found.pop("gamma", None), found.pop("beta", None)
        again = given._replace(
            gamma=checked_gamma,
            beta=checked_beta,
            out=call.out,
            return_stats=return_stats,
            operands=(*{**others, **found}.values(),),
        )
        return row_calls.run(*again[:-1])
    exact = eps_within(call.compute, exact)
    extras = extras.with_bias(call.columns.get("bias"))
    fused = extras.checked(call)
    stats = {name: call.empty_statistic() for name in op.stats} if return_stats else {}
    results = (call.out, *fused.results.values(), *stats.values())
    if not call.on_device:
        asking.answer(lambda: _lowered(op, call, (), exact, fused))
        if x.size:
            columns = {name: call.columns.get(name) for name in ("gamma", "beta")}
            op.reference(
                x, *columns.values(), call.axes, exact, call.out, *stats.values(), extras=fused.on_host()
            )
    elif x.size:
        pointers = [view(each, name).pointer for name, each in stats.items()]
        made = {**fused.results, **stats} if out is not None else {"out": call.out, **fused.results, **stats}
        scalars = ("seed", "offset") if given.scalars else ()
        roles = Arrays(
            {"x": x, "gamma": gamma, "beta": beta, "out": out, **others}, ("out",), made, scalars=scalars
        )
        bound = row_ops.launch(call.device, _lowered(op, call, pointers, exact, fused), plan, roles)
        given.keep(signature, bound, made)
    return results if len(results) > 1 else call.out


def _lowered(op: RowOp, call: Call, stats: Sequence[int], eps: float, fused: CheckedExtras) -> KernelSpec:
    """Lower a checked call with something fused around it."""
    columns = {name: view(array, name) for name, array in call.columns.items() if name != "bias"}
    what = around(call, fused)
    return fused_spec(op, view(call.x, "x"), call.axes, columns, stats, eps, call.compute, what)
