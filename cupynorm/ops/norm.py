"""layer_norm and rms_norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from cupynorm.call.quantize import Quantize, quantize_option
from cupynorm.invoke import row_calls
from cupynorm.lower.row import RowOp
from cupynorm.ops.signatures import with_signature_of
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import Unpack

    from cupynorm.invoke.shortcuts import Given

    class NormOptions(TypedDict, total=False):
        """The keywords of a norm on which the number of its results does not depend."""

        axis: int | tuple[int, ...] | None
        eps: float
        out: Any
        dtype: Any
        plan: str | Plan | None

    class KeptOptions(NormOptions, total=False):
        """The same with those that say what counts."""

        where: Any
        lengths: Any
        left_padded: bool
        nan: str


def _on_host(
    x: Any, gamma: Any, beta: Any, axes: int, eps: float, out: Any, *stats: Any, **extras: Any
) -> None:
    from cupynorm.host import ops  # noqa: PLC0415  which `import cupynorm` need not wait for

    ops.layer_norm(x, gamma, beta, axes, eps, out, *stats, **extras)


def _rms_on_host(
    x: Any, gamma: Any, _: Any, axes: int, eps: float, out: Any, *stats: Any, **extras: Any
) -> None:
    from cupynorm.host import ops  # noqa: PLC0415

    ops.rms_norm(x, gamma, axes, eps, out, *stats, **extras)


LAYER_NORM = RowOp(
    "layer_norm",
    "ops/layer_norm.cuh",
    "LayerNorm",
    _on_host,
    columns=("gamma", "beta"),
    stats=("mean", "rstd"),
    has_eps=True,
    row_numbers=4,
)
RMS_NORM = RowOp(
    "rms_norm",
    "ops/rms_norm.cuh",
    "RmsNorm",
    _rms_on_host,
    columns=("gamma",),
    stats=("rstd",),
    has_eps=True,
    row_numbers=4,
)


def _layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-5,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    nan: str = "propagate",
    plan: str | Plan | None = None,
) -> Any:
    """Declare the signature of layer_norm."""


def _rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-6,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    nan: str = "propagate",
    plan: str | Plan | None = None,
) -> Any:
    """Declare the signature of rms_norm."""


def _run_quantized(given: Given, signature: Any) -> Any:
    """Run a call whose result is quantised, with all checks."""
    from cupynorm.invoke import fused_calls  # noqa: PLC0415

    transposition = row_calls.transposition_for(given)
    if transposition is not None:
        return row_calls.run_transposed(given, signature, transposition)
    return fused_calls.run_quantized(given, signature)


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[KeptOptions],
) -> Any: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[KeptOptions],
) -> tuple[Any, Any]: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[KeptOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[KeptOptions],
) -> tuple[Any, Any, Any, Any]: ...


@overload
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    **others: Unpack[KeptOptions],
) -> Any: ...


@with_signature_of(_layer_norm)
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-5,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
    **missing: Any,
) -> Any:
    """Normalise rows to mean 0 and variance 1, then scale and shift: (x - mean) / sqrt(var + eps) * gamma + beta.

    Ba, Kiros and Hinton 2016, "Layer Normalization". var is the biased variance.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    gamma, beta : array or float, optional
        Scale and shift, of the shape of the normalised axes or broadcasting to it, of float16, bfloat16, float32 or
        float64. Leading axes of one element, as in (1, D), are dropped. A number is copied to a device once and kept
        there.
    axis : int, tuple of int, or None, default -1
        The normalised axes, in any order; None for all. Results have x's order in memory.
    eps : float, default 1e-5
        Added to the variance; not negative.
    out : array, optional
        Where the result is written, of x's shape and kind and of any dtype; may be x itself.
    dtype : dtype, optional
        The result's; default: that of `out`, else x's; of integers float32, of int32 float64.
    return_stats : bool, default False
        Return mean and rstd = 1 / sqrt(var + eps) as well.
    quantize : str or Quantize, optional
        "int8", "float8_e4m3fn" or "float8_e5m2": the result is quantised with a scale for each row, and the scales
        come back too. With ``cupynorm.Quantize(name, scale)`` the scale is given, and the quantised result comes
        alone.
    where : array of bool or uint8, optional
        Broadcasts to x's shape; what is False or 0 counts for nothing. Its result is that of the mean: 0, or beta.
    lengths : array or list of int, optional
        A row has its first `lengths` elements only; as in softmax.
    left_padded : bool, default False
        A row has its last `lengths` elements instead.
    nan : {"propagate", "omit", "raise"}, default "propagate"
        "omit": nan counts for nothing and stays nan; not with quantize. "raise": a nan that counts is a ValueError, for
        NumPy arrays.
    plan : str or Plan, optional
        Force a variant on a device: "warp", "block", "cached", "cluster", "split", "shared" or "uncached", or a whole
        plan. By default the planner chooses.

    Returns
    -------
    array or tuple of array
        y, of x's shape; or the tuple of those that are asked for of (y, scales, mean, rstd). Statistics and scales
        have x's shape without the normalised axes, in the type of arithmetic.

    Raises
    ------
    TypeError
        For arrays of another kind or dtype, of both kinds in one call, or of a subclass that changes what arrays do
        (numpy.ma.MaskedArray, numpy.matrix, arrays with units; numpy.memmap is taken).
    ValueError
        For shapes, strides, axes, eps, devices or an `out` that do not fit.
    CompileError
        If the compiler refuses the kernel; the message is its log.
    NoDeviceError
        If a device array is given and no device can be used.

    Notes
    -----
    Arithmetic is in float32, in float64 if x or the result is float64; each element is rounded once. The variance is
    never computed as E[x^2] - E[x]^2, so a large mean costs no digits. An x without rows gives an empty result.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import layer_norm
    >>> layer_norm(np.array([[1.0, 2.0, 3.0]]), eps=0).round(4).tolist()
    [[-1.2247, 0.0, 1.2247]]
    >>> y, mean, rstd = layer_norm(np.array([[1.0, 3.0]]), eps=0, return_stats=True)
    >>> mean.tolist(), rstd.tolist()
    ([2.0], [1.0])
    """
    if not missing and quantize is None:
        return row_calls.run(LAYER_NORM, x, gamma, beta, axis, eps, out, dtype, return_stats, plan)
    if missing:
        from cupynorm.ops import kept_norms  # noqa: PLC0415  which most calls do not need

        return kept_norms.run(
            LAYER_NORM, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, missing, quantize
        )
    option, scale = quantize_option(quantize)
    return row_calls.run(
        LAYER_NORM,
        x,
        gamma,
        beta,
        axis,
        eps,
        out,
        dtype,
        return_stats,
        plan,
        (option,),
        (scale,),
        (),
        _run_quantized,
        quantize,
    )


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: None = None,
    **others: Unpack[KeptOptions],
) -> Any: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[False] = False,
    quantize: str,
    **others: Unpack[KeptOptions],
) -> tuple[Any, Any]: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[True],
    quantize: None = None,
    **others: Unpack[KeptOptions],
) -> tuple[Any, Any]: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: Literal[True],
    quantize: str,
    **others: Unpack[KeptOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    **others: Unpack[KeptOptions],
) -> Any: ...


@with_signature_of(_rms_norm)
def rms_norm(
    x: Any,
    gamma: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-6,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
    **missing: Any,
) -> Any:
    """Divide rows by their root mean square, then scale: x / sqrt(mean(x^2) + eps) * gamma.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", with eps under the root.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    gamma : array or float, optional
        Scale, as in layer_norm.
    axis : int, tuple of int, or None, default -1
        The normalised axes, in any order; None for all. Results have x's order in memory.
    eps : float, default 1e-6
        Added to the mean of the squares; not negative.
    out, dtype, quantize, plan, where, lengths, left_padded, nan
        As in layer_norm.
    return_stats : bool, default False
        Return rstd = 1 / sqrt(mean(x^2) + eps) as well.

    Returns
    -------
    array or tuple of array
        y, of x's shape; or the tuple of those that are asked for of (y, scales, rstd).

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    Arithmetic is that of layer_norm.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import rms_norm
    >>> rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), eps=0).round(4).tolist()
    [[0.8485, 2.2627]]
    """
    if not missing and quantize is None:
        return row_calls.run(RMS_NORM, x, gamma, None, axis, eps, out, dtype, return_stats, plan)
    if missing:
        from cupynorm.ops import kept_norms  # noqa: PLC0415  as in layer_norm

        return kept_norms.run(
            RMS_NORM, x, gamma, None, axis, eps, out, dtype, return_stats, plan, missing, quantize
        )
    option, scale = quantize_option(quantize)
    return row_calls.run(
        RMS_NORM,
        x,
        gamma,
        None,
        axis,
        eps,
        out,
        dtype,
        return_stats,
        plan,
        (option,),
        (scale,),
        (),
        _run_quantized,
        quantize,
    )
