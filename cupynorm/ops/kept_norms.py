"""layer_norm and rms_norm of what counts in a row: where=, lengths=, left_padded= and nan=."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm._options import plainly
from cupynorm._values import replace
from cupynorm.call.extras import Extras, quantize_of
from cupynorm.call.masks import Asked, with_lengths
from cupynorm.call.missing import OMIT, PROPAGATE, RAISE, nan_policy
from cupynorm.call.quantize import quantize_option
from cupynorm.call.statistics import MARKED_COUNT, NUMBERS_COUNT
from cupynorm.host import statistics
from cupynorm.host.keeping import refusing
from cupynorm.host.reference import ALONE
from cupynorm.invoke import fused_calls, row_calls
from cupynorm.lower.row import RowOp
from cupynorm.lower.statistics import OF_MASK
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cupynorm.invoke.shortcuts import Given
    from cupynorm.plan.config import Plan

KEYWORDS = ("where", "lengths", "left_padded", "nan")


def _kept(name: str, source: str, struct: str, *, centred: bool) -> dict[str, RowOp]:
    """Return the ops of a norm: of what a mask keeps, and of what is not nan."""

    def on_host(omit: bool) -> Any:  # noqa: FBT001
        def run(
            x: Any, gamma: Any, beta: Any, axes: int, eps: float, out: Any, *stats: Any, extras: Any = None
        ) -> None:
            statistics.kept_norm(
                x,
                gamma,
                beta,
                axes,
                eps,
                out,
                stats,
                ALONE if extras is None else extras,
                centred=centred,
                omit=omit,
            )

        return run

    marked = RowOp(
        f"{name}, masked",
        source,
        struct,
        on_host(omit=False),
        columns=("gamma", "beta") if centred else ("gamma",),
        stats=("mean", "rstd") if centred else ("rstd",),
        has_eps=True,
        options=(MARKED_COUNT,),
        registers=OF_MASK,
    )
    numbers = replace(
        marked, name=f"{name}, nan omitted", reference=on_host(omit=True), options=(NUMBERS_COUNT,)
    )
    return {PROPAGATE: marked, OMIT: numbers}


OPS = {
    "layer_norm": _kept("layer_norm", "ops/moments.cuh", "KeptLayerNorm", centred=True),
    "rms_norm": _kept("rms_norm", "ops/kept_rms_norm.cuh", "KeptRmsNorm", centred=False),
}


def run(
    op: RowOp,
    x: Any,
    gamma: Any,
    beta: Any,
    axis: int | tuple[int, ...] | None,
    eps: float,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
    missing: Mapping[str, Any],
    quantize: Any,
) -> Any:
    """Run a call of a norm with keywords that say what counts; they may say nothing, such as where=None."""
    for name in missing:
        if name not in KEYWORDS:
            raise TypeError(f"{op.name}() got an unexpected keyword argument {name!r}")
    nan = nan_policy(missing.get("nan", PROPAGATE), on_device=devices.is_device_array(x))
    if quantize is not None and nan != PROPAGATE:
        raise ValueError(f'quantize={plainly(quantize)} and nan="{nan}": nan has no quantised result')
    asked = Asked(**{name: each for name, each in missing.items() if name != "nan"})
    if isinstance(asked.lengths, (list, tuple)) and type(axis) is int and axis == -1:
        asked = with_lengths(asked, x)
    more: tuple[Any, ...] = ()
    if asked.says_nothing and quantize is None:
        wanted = OPS[op.name][OMIT] if nan == OMIT else op
    else:
        wanted = op if asked.says_nothing else OPS[op.name][OMIT if nan == OMIT else PROPAGATE]
        names = [name for name in ("where", "lengths") if getattr(asked, name) is not None]
        key: tuple[Any, ...] = (*names, asked.left_padded, type(asked.left_padded))
        operands = tuple(getattr(asked, name) for name in names)
        if quantize is not None:
            option, scale = quantize_option(quantize)
            key, operands = (*key, option), (*operands, scale)
            names.append(fused_calls.SCALE)
        unchecked = (names, None if asked.says_nothing else asked, quantize)
        more = (key, operands, (), _run_checked, unchecked)
    if nan == RAISE:
        wanted = replace(wanted, reference=refusing(wanted.reference))
    return row_calls.run(wanted, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, *more)


def _run_checked(given: Given, signature: Any) -> Any:
    """Run a call with all checks. given.unchecked: the names of its operands, its mask and how it is quantised."""
    names, asked, quantize = given.unchecked
    transposition = row_calls.transposition_for(given)
    if transposition is not None:
        turned = None if asked is None else asked._replace(where=transposition.apply(asked.where))
        whole = [name == "where" for name in names]
        return row_calls.run_transposed(
            given, signature, transposition, whole, unchecked=(names, turned, quantize)
        )
    if asked is not None and isinstance(asked.lengths, (list, tuple)):
        # host data, which is looked at: then the call is one with an array
        asked = with_lengths(asked, given.x)
        operands = [
            asked.lengths if name == "lengths" else each
            for name, each in zip(names, given.operands, strict=True)
        ]
        return row_calls.run(*given._replace(operands=operands, unchecked=(names, asked, quantize))[:-1])
    return fused_calls.run_checked(
        given, names, Extras(masked=asked, quantize=quantize_of(quantize)), signature
    )
