"""layer_norm and rms_norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from cupynorm.call.quantize import Quantize
from cupynorm.invoke import row_ops
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _on_host(
    x: Any, gamma: Any, beta: Any, axes: int, eps: float, out: Any, *stats: Any, **extras: Any
) -> None:
    from cupynorm.host import reference  # noqa: PLC0415  which `import cupynorm` need not wait for

    reference.layer_norm(x, gamma, beta, axes, eps, out, *stats, **extras)


def _rms_on_host(
    x: Any, gamma: Any, _: Any, axes: int, eps: float, out: Any, *stats: Any, **extras: Any
) -> None:
    from cupynorm.host import reference  # noqa: PLC0415

    reference.rms_norm(x, gamma, axes, eps, out, *stats, **extras)


LAYER_NORM = row_ops.RowOp(
    "layer_norm",
    "layer_norm.cu",
    "LayerNorm",
    _on_host,
    columns=("gamma", "beta"),
    stats=("mean", "rstd"),
    has_eps=True,
)
RMS_NORM = row_ops.RowOp(
    "rms_norm",
    "rms_norm.cu",
    "RmsNorm",
    _rms_on_host,
    columns=("gamma",),
    stats=("rstd",),
    has_eps=True,
)


class NormOptions(TypedDict, total=False):
    """The keywords of a norm on which the number of its results does not depend."""

    axis: int | tuple[int, ...]
    eps: float
    out: Any
    dtype: Any
    plan: str | Plan | None


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[NormOptions],
) -> Any: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[NormOptions],
) -> tuple[Any, Any]: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[NormOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[NormOptions],
) -> tuple[Any, Any, Any, Any]: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    **others: Unpack[NormOptions],
) -> Any: ...


def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-5,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return (x - mean) / sqrt(var + eps) * gamma + beta over the normalised axes (Ba, Kiros and Hinton 2016).

    x is a CuPy or NumPy array of float16, bfloat16, float32 or float64 and of any shape; `axis` names one or several trailing
    axes. var is the biased variance. gamma and beta have the shape of the normalised axes or broadcast to it, leading axes
    of one element, as in (1, D), aside, and any of those dtypes; or they are numbers, each of which is copied to a device
    once and kept there as an array. What comes back is of x's kind, has x's shape, and the dtype of `out`, else `dtype`,
    else x's.
    Arithmetic is in float32 (float64 if x or the result is float64), and each element is rounded once.

    With return_stats: (y, mean, rstd), where rstd = 1 / sqrt(var + eps); both have x's shape without the normalised axes, in
    float32 (float64). `out` may be x itself. An x without rows gives an empty result. `plan` forces a variant
    ("warp", "block", "cached", "cluster", "split", "shared", "uncached") on a device; of a call with anything fused into it
    cached, shared and split hold no row.

    With quantize=, the dtype of the result is "int8", "float8_e4m3fn" or "float8_e5m2". Given as that name, each row has its
    own scale, and (q, scales) comes back, before statistics; given as cupynorm.Quantize(name, scale), which see, q alone.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.

    Raises TypeError for arrays of another kind or dtype, of both kinds in one call, or of a subclass that overrides what arrays
    do (numpy.ma.MaskedArray, numpy.matrix, units; numpy.memmap is taken); ValueError for shapes, strides, axes, eps,
    devices or an `out` that do not fit; CompileError with the compiler's log; NoDeviceError.
    """
    if quantize is not None:
        from cupynorm.invoke import fused_calls  # noqa: PLC0415

        extras = fused_calls.quantising(quantize)
        return fused_calls.run_fused(
            LAYER_NORM, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, extras
        )
    return row_ops.run(LAYER_NORM, x, gamma, beta, axis, eps, out, dtype, return_stats, plan)


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[NormOptions],
) -> Any: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[NormOptions],
) -> tuple[Any, Any]: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[NormOptions],
) -> tuple[Any, Any]: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[NormOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    **others: Unpack[NormOptions],
) -> Any: ...


def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-6,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return x / sqrt(mean(x^2) + eps) * gamma over the normalised axes (Zhang and Sennrich 2019).

    Arrays, dtypes, axes, `out`, `quantize`, `plan` and errors are as in layer_norm. With return_stats: (y, rstd), where
    rstd = 1 / sqrt(mean(x^2) + eps).

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    if quantize is not None:
        from cupynorm.invoke import fused_calls  # noqa: PLC0415

        extras = fused_calls.quantising(quantize)
        return fused_calls.run_fused(
            RMS_NORM, x, gamma, None, axis, eps, out, dtype, return_stats, plan, extras
        )
    return row_ops.run(RMS_NORM, x, gamma, None, axis, eps, out, dtype, return_stats, plan)
