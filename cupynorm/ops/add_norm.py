"""Norms of sums: what stands between the layers of a transformer, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from cupynorm.call.quantize import Quantize
from cupynorm.ops.add_norm_calls import ALPHA, NO_DROPOUT, run
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupynorm.ops.norm import NormOptions

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
    alpha: float = ALPHA,
    eps: float = 1e-5,
    return_sum: bool = True,
    dropout: float = NO_DROPOUT,
    seed: int | None = None,
    offset: int = 0,
    axis: int | tuple[int, ...] | None = -1,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Add a residual and normalise the sum, in one pass: (layer_norm(s, gamma, beta), s).

    s = dropout(x + bias) + alpha * residual. This is what stands between two products of a transformer: pre-norm
    networks go on with (y, s), post-norm ones with y, and leave s unwritten by return_sum=False.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    residual : array
        Of x's shape, in any dtype that x may have.
    gamma, beta : array or float, optional
        As in layer_norm.
    bias : array or float, optional
        Has the shape of the normalised axes, or broadcasts to it, as gamma and beta do.
    alpha : float, default 1.0
        Factor of the residual; finite.
    axis : int, tuple of int, or None, default -1
        As in layer_norm.
    eps : float, default 1e-5
        As in layer_norm.
    return_sum : bool, default True
        Return s, too, in x's dtype (of integers: float32, of int32 float64), rounded once. s is not rounded before it
        is normalised.
    dropout : float, default 0.0
        p of cupynorm.dropout, 0 to 1; 0 drops nothing, and any other needs a seed.
    seed, offset : int, optional
        As in cupynorm.dropout.
    out, dtype, return_stats, quantize, plan
        As in layer_norm. `out` may be x or residual itself.

    Returns
    -------
    array or tuple of array
        Those that are asked for of (y, scales, s, mean, rstd).

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does, for residual and bias too.

    Notes
    -----
    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import add_layer_norm
    >>> y, s = add_layer_norm(np.array([[1.0, 2.0, 3.0]]), np.array([[0.0, 0.0, 3.0]]), eps=0)
    >>> s.tolist(), y.round(4).tolist()
    ([[1.0, 2.0, 6.0]], [[-0.9258, -0.4629, 1.3887]])
    """
    return run(
        LAYER_NORM,
        x,
        residual,
        gamma,
        beta,
        bias,
        alpha,
        eps,
        return_sum,
        dropout,
        seed,
        offset,
        axis,
        out,
        dtype,
        return_stats,
        quantize,
        plan,
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
    alpha: float = ALPHA,
    eps: float = 1e-6,
    return_sum: bool = True,
    dropout: float = NO_DROPOUT,
    seed: int | None = None,
    offset: int = 0,
    axis: int | tuple[int, ...] | None = -1,
    out: Any = None,
    dtype: Any = None,
    return_stats: bool = False,
    quantize: str | Quantize | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Add a residual and normalise the sum, in one pass: (rms_norm(s, gamma), s).

    s = dropout(x + bias) + alpha * residual.

    Parameters
    ----------
    x, residual, gamma, bias, alpha, return_sum, dropout, seed, offset
        As in add_layer_norm.
    axis : int, tuple of int, or None, default -1
        As in layer_norm.
    eps : float, default 1e-6
        As in rms_norm.
    out, dtype, return_stats, quantize, plan
        As in layer_norm. `out` may be x or residual itself.

    Returns
    -------
    array or tuple of array
        Those that are asked for of (y, scales, s, rstd).

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does, for residual and bias too.

    Notes
    -----
    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import add_rms_norm
    >>> add_rms_norm(np.array([[1.0, 2.0]]), np.array([[2.0, 2.0]]), return_sum=False).round(4).tolist()
    [[0.8485, 1.1314]]
    """
    return run(
        RMS_NORM,
        x,
        residual,
        gamma,
        None,
        bias,
        alpha,
        eps,
        return_sum,
        dropout,
        seed,
        offset,
        axis,
        out,
        dtype,
        return_stats,
        quantize,
        plan,
    )
