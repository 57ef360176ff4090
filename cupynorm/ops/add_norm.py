"""Norms of sums: what stands between the layers of a transformer, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from cupynorm._options import boolean, finite
from cupynorm.call.extras import Add, Extras, dropout_of, quantize_of
from cupynorm.call.quantize import Quantize, quantize_option
from cupynorm.invoke import fused_calls, row_calls
from cupynorm.invoke.shortcuts import Given
from cupynorm.lower.row import RowOp
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


WORDS = 1 << 64  # seeds and offsets that there are
ALPHA, NO_DROPOUT = 1.0, 0.0  # defaults: run() is told of a sum without options in one word


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
    return _run(
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
    return _run(
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


def _run(
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
            if type(seed) is type(offset) is int and 0 <= seed < WORDS and 0 <= offset < WORDS:
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
