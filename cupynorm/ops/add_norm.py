"""Norms of sums: what stands between the layers of a transformer, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from cupynorm._options import boolean, finite
from cupynorm.call.extras import Add, Extras, quantize_of
from cupynorm.call.quantize import Quantize
from cupynorm.host.philox import PROBABILITY
from cupynorm.host.philox import dropout as checked_dropout
from cupynorm.invoke import fused_calls
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM, NormOptions
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AddOptions(NormOptions, total=False):
    """The keywords of a norm of a sum on which the number of its results does not depend."""

    bias: Any
    alpha: float
    dropout: float
    seed: int | None
    offset: int


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> Any: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any, Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any, Any]: ...


@overload
def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_sum: bool = True,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    **others: Unpack[AddOptions],
) -> Any: ...


def add_layer_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    eps: float = 1e-5,
    return_sum: bool = True,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    axis: int | tuple[int, ...] = -1,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return layer_norm(s, gamma, beta) and the sum s = dropout(x + bias) + alpha * residual that it is taken of.

    What a transformer's layer does between two products: pre-norm networks go on with (y, s), post-norm ones with y, and leave s
    unwritten by return_sum=False. s is not rounded before it is normalised, and is returned in x's dtype, rounded once.

    residual has x's shape and any dtype that x may have; bias has the shape of the normalised axes or broadcasts to it, as
    gamma and beta do; alpha is a finite number. Dropout is that of cupynorm.dropout with p=dropout, seed and offset;
    the default drops nothing, and any other needs a seed. `out` may be x or residual itself.

    Axes, eps, dtypes, `out`, `quantize`, `plan` and errors are as in layer_norm. The results, of which those stand that are
    asked for: (y, scales, s, mean, rstd).

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    extras = _adding(residual, bias, alpha, dropout, seed, offset, return_sum, quantize)
    return fused_calls.run_fused(
        LAYER_NORM, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, extras
    )


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> Any: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[True] = True,
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: Literal[False],
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[AddOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    return_sum: bool = True,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    **others: Unpack[AddOptions],
) -> Any: ...


def add_rms_norm(
    x: Any,
    residual: Any,
    gamma: Any = None,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    eps: float = 1e-6,
    return_sum: bool = True,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    axis: int | tuple[int, ...] = -1,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return rms_norm(s, gamma) and the sum s = dropout(x + bias) + alpha * residual that it is taken of.

    All is as in add_layer_norm. The results: (y, scales, s, rstd), of which those stand that are asked for.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    extras = _adding(residual, bias, alpha, dropout, seed, offset, return_sum, quantize)
    return fused_calls.run_fused(RMS_NORM, x, gamma, None, axis, eps, out, dtype, return_stats, plan, extras)


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
    drop = None
    if finite("dropout", p, PROBABILITY) != 0:
        if seed is None and 0 < p <= 1:
            raise ValueError(f"dropout={p} needs a seed: what is dropped follows from seed and offset alone")
        drop = checked_dropout(p, 0 if seed is None else seed, offset, "dropout")
    return Extras(
        add=Add(residual, bias, finite("alpha", alpha), drop, boolean("return_sum", return_sum)),
        quantize=quantize_of(quantize),
    )
