"""How a call of a norm of a sum runs, from its arguments on."""

from __future__ import annotations

from typing import Any

from cupynorm._options import boolean, finite
from cupynorm.call.extras import Add, Extras, dropout_of, quantize_of
from cupynorm.call.quantize import Quantize, quantize_option
from cupynorm.host.philox import SEEDS
from cupynorm.invoke import fused_calls, row_calls
from cupynorm.invoke.shortcuts import Given
from cupynorm.lower.row import RowOp
from cupynorm.plan.config import Plan

ALPHA, NO_DROPOUT = 1.0, 0.0  # defaults: run() is told of a sum without options in one word


def run(
    op: RowOp,
    x: Any,
    residual: Any,
    gamma: Any,
    beta: Any,
    bias: Any,
    alpha: float,
    eps: float,
    return_sum: bool,  # noqa: FBT001
    p: float,
    seed: int | None,
    offset: int,
    axis: int | tuple[int, ...] | None,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    quantize: str | Quantize | None,
    plan: str | Plan | None,
) -> Any:
    """Run a call of add_layer_norm or add_rms_norm."""
    options_key: Any = "no sum" if return_sum is False else "sum"
    operands: tuple[Any, ...] = (residual,) if bias is None else (residual, bias)
    scalars: tuple[int, ...] = ()
    unchecked: tuple[Any, ...] = (ALPHA, NO_DROPOUT, None, 0, return_sum, None)
    usual = alpha is ALPHA and p is NO_DROPOUT and quantize is None
    if not (usual and (return_sum is True or return_sum is False)):
        option = scale = None
        if quantize is not None:
            option, scale = quantize_option(quantize)
        # 0.0 and -0.0 are equal
        of_alpha = repr(alpha) if type(alpha) is float and not alpha else alpha
        options_key = (option, of_alpha, type(alpha), p, type(p), return_sum, type(return_sum))
        operands = (residual, bias, scale)
        if not (type(p) in {float, int} and p == 0):  # a dropout: its seed and offset are others in each call
            if type(seed) is type(offset) is int and 0 <= seed < SEEDS and 0 <= offset < SEEDS:
                scalars = (seed, offset)
            else:
                add = _adding(residual, bias, alpha, p, seed, offset, return_sum, quantize).add
                drop = None if add is None else add.dropout
                scalars = () if drop is None else (drop.seed, drop.offset)
                seed, offset = scalars or (seed, offset)
        unchecked = (alpha, p, seed, offset, return_sum, quantize)
    return row_calls.run(
        op,
        x,
        gamma,
        beta,
        axis,
        eps,
        out,
        dtype,
        return_stats,
        plan,
        options_key,
        operands,
        scalars,
        _run_checked,
        unchecked,
    )


def _run_checked(given: Given, signature: Any) -> Any:
    """Run a call of add_layer_norm or add_rms_norm with all checks."""
    transposition = row_calls.transposition_for(given)
    if transposition is not None:
        whole = (True, False, False)[: len(given.operands)]
        return row_calls.run_transposed(given, signature, transposition, whole)
    residual, bias = (*given.operands, None)[:2]
    extras = _adding(residual, bias, *given.unchecked)
    names = ("residual", "bias", fused_calls.SCALE)[: len(given.operands)]
    return fused_calls.run_checked(given, names, extras, signature)


def _adding(
    residual: Any,
    bias: Any,
    alpha: float,
    p: float,
    seed: int | None,
    offset: int,
    return_sum: bool,  # noqa: FBT001
    quantize: str | Quantize | None,
) -> Extras:
    """Return the extras that add_layer_norm and add_rms_norm have in common."""
    if residual is None:
        raise TypeError("residual is None: give the array that is added, or use layer_norm or rms_norm")
    drop = dropout_of(p, seed, offset)
    return Extras(
        add=Add(residual, bias, finite("alpha", alpha), drop, boolean("return_sum", return_sum)),
        quantize=quantize_of(quantize),
    )
