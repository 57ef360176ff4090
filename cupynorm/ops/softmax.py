"""softmax and log_softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from cupynorm.call.quantize import Quantize, quantize_option
from cupynorm.invoke import row_calls
from cupynorm.lower.row import RowOp
from cupynorm.ops.signatures import with_signature_of
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from cupynorm.call.masks import MaskOptions
    from cupynorm.invoke.shortcuts import Given


def _on_host(x: Any, _gamma: Any, _beta: Any, axes: int, _eps: float, out: Any, **extras: Any) -> None:
    from cupynorm.host import ops  # noqa: PLC0415  which `import cupynorm` need not wait for

    ops.softmax(x, axes, out, **extras)


def _log_on_host(x: Any, _gamma: Any, _beta: Any, axes: int, _eps: float, out: Any, **extras: Any) -> None:
    from cupynorm.host import ops  # noqa: PLC0415

    ops.log_softmax(x, axes, out, **extras)


SOFTMAX = RowOp("softmax", "ops/softmax.cuh", "Softmax", _on_host, row_numbers=4)
LOG_SOFTMAX = RowOp("log_softmax", "ops/softmax.cuh", "LogSoftmax", _log_on_host, row_numbers=4)


MASK_ARRAYS = frozenset({"where", "bias", "lengths"})  # the keywords that are arrays
WHOLE = frozenset({"where", "bias"})  # those that broadcast to x's shape


def _log_softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    scale: float | None = None,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    causal: bool = False,
    causal_offset: int | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    bias: Any = None,
    nan: str = "propagate",
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Declare the signature of log_softmax."""


def _softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    scale: float | None = None,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    causal: bool = False,
    causal_offset: int | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    bias: Any = None,
    nan: str = "propagate",
    quantize: str | Quantize | None = None,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Declare the signature of softmax."""


@overload
def softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    quantize: None = None,
    **mask: Unpack[MaskOptions],
) -> Any: ...


@overload
def softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    quantize: str,
    **mask: Unpack[MaskOptions],
) -> tuple[Any, Any]: ...


@overload
def softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    quantize: str | Quantize | None = None,
    **mask: Unpack[MaskOptions],
) -> Any: ...


@with_signature_of(_softmax)
def softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    **options: Any,
) -> Any:
    """Turn rows into probabilities: exp(z - max) / sum(exp(z - max)) over the kept elements of the normalised axes.

    z = x * scale + bias. An element is kept if every mask that is given keeps it. Why max is subtracted: Blanchard,
    Higham and Higham 2021, "Accurately computing the log-sum-exp and softmax functions".

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    axis : int, tuple of int, or None, default -1
        The normalised axes, in any order; None for all. One axis with lengths, causal, causal_offset or window, whose
        queries are along the last of the other axes. Results have x's order in memory.
    scale : float, optional
        z = x * scale + bias; a finite number.
    where : array of bool or uint8, optional
        Broadcasts to x's shape; True or non-zero keeps.
    lengths : array or list of int, optional
        Broadcasts to x's shape without `axis` (lengths[:, None, None] for one a batch of (batch, head, query, key)): a
        row keeps its first `lengths` elements. A length below 0 or above the row's is a ValueError on the
        host, and is taken as 0 or all on a device. A list is host data: it is checked as such, and each call on a
        device copies it there on the current stream, waiting for nothing; while a graph is captured that is a
        ValueError.
    left_padded : bool, default False
        A row keeps its last `lengths` elements instead.
    causal : bool, default False
        Query i keeps the keys j <= i, the diagonal from the top left, as in PyTorch and JAX. Keys are along `axis`.
        Numbers are refused: a flag of 0 or 1 is no offset.
    causal_offset : int, optional
        Query i keeps the keys j <= i + causal_offset, without causal=True, too. keys - queries is the diagonal into
        the bottom right, as in FlashAttention.
    window : int or tuple of int or None, optional
        (left, right): query i keeps i + offset - left <= j <= i + offset + right, where offset is causal_offset, else
        0. None is no bound on that side; one number stands for both sides.
    bias : array, optional
        Broadcasts to x's shape; of float16, bfloat16, float32 or float64.
    nan : {"propagate", "omit", "raise"}, default "propagate"
        "omit": nan takes no part and stays nan; not with quantize. "raise": a nan that is kept is a ValueError, for
        NumPy arrays.
    quantize : str or Quantize, optional
        As in layer_norm.
    out, dtype, plan
        As in layer_norm.

    Returns
    -------
    array or tuple of array
        y, of x's shape; with quantize="...": (q, scales).

    Raises
    ------
    TypeError
        As layer_norm does, and for a mask or option of another dtype or kind.
    ValueError
        As layer_norm does, and for a mask that does not broadcast, or an option that is out of range.
    CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    A dropped element is exactly 0, whatever x and bias hold there, in a row with nothing kept too. A row of which only
    -inf is kept gives nan, as in NumPy; so does a row that keeps +inf or nan, and no other row. docs/masks.md has the
    conventions of other libraries.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import softmax
    >>> softmax(np.array([[0.0, 0.0, 5.0]]), where=np.array([True, True, False])).tolist()
    [[0.5, 0.5, 0.0]]
    >>> softmax(np.zeros((2, 2)), causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    if not options:
        return row_calls.run(SOFTMAX, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
    return run_with_options(SOFTMAX, x, axis, out, dtype, plan, options)


@with_signature_of(_log_softmax)
def log_softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    **options: Any,
) -> Any:
    """Return the logarithm of softmax without its underflow: z - max - log(sum(exp(z - max))) over the kept elements.

    z = x * scale + bias. An element is kept if every mask that is given keeps it. max is subtracted for the reasons
    that softmax cites.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    axis : int, tuple of int, or None, default -1
        As in softmax.
    scale, where, lengths, left_padded, causal, causal_offset, window, bias, nan
        As in softmax.
    out, dtype, plan
        As in layer_norm.

    Returns
    -------
    array
        y, of x's shape. A dropped element is exactly -inf.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As softmax does.

    Notes
    -----
    Special values are those of softmax.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import log_softmax
    >>> log_softmax(np.array([[0.0, -1000.0]])).tolist()
    [[0.0, -1000.0]]
    """
    if not options:
        return row_calls.run(LOG_SOFTMAX, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
    return run_with_options(LOG_SOFTMAX, x, axis, out, dtype, plan, options)


def run_with_options(
    op: RowOp,
    x: Any,
    axis: int | tuple[int, ...] | None,
    out: Any,
    dtype: Any,
    plan: str | Plan | None,
    options: Mapping[str, Any],
) -> Any:
    """Run a call with options; they may say nothing, such as where=None."""
    if "nan" in options:
        from cupynorm.ops import softmax_nan  # noqa: PLC0415  which most calls do not need

        return softmax_nan.run(run_with_options, op, x, axis, out, dtype, plan, options)
    options_key: Any = ()
    operands: tuple[Any, ...] = ()
    only = ""
    if len(options) == 1:  # as a rule, and sooner without a loop
        (only,) = options
    if only in MASK_ARRAYS:
        options_key, operands = only, (options[only],)
    else:
        for name, value in options.items():
            if name in MASK_ARRAYS:
                options_key += (name,)
                operands += (value,)
            elif name == "quantize" and op is SOFTMAX:
                if value is not None:
                    option, scale = quantize_option(value)
                    options_key += (name, option)
                    operands += (scale,)
            elif type(value) is tuple:
                options_key += (name, value, *map(type, value))
            else:  # 0.0 and -0.0 are equal, 1 and True as well
                kind = type(value)
                options_key += (name, repr(value) if kind is float and not value else value, kind)
    return row_calls.run(
        op,
        x,
        None,
        None,
        axis,
        0.0,
        out,
        dtype,
        False,  # noqa: FBT003
        plan,
        options_key,
        operands,
        (),
        _run_checked,
        options,
    )


def _run_checked(given: Given, signature: Any) -> Any:
    """Run a call with options, with all checks. given.unchecked: the options."""
    from cupynorm.invoke import fused_calls  # noqa: PLC0415

    options = dict(given.unchecked)
    quantize = options.pop("quantize", None) if given.op is SOFTMAX else None
    arrays = MASK_ARRAYS if quantize is None else MASK_ARRAYS | {"quantize"}
    names = [fused_calls.SCALE if name == "quantize" else name for name in given.unchecked if name in arrays]
    transposition = row_calls.transposition_for(given)
    if transposition is not None:
        turned = {
            name: transposition.apply(each) if name in WHOLE else each
            for name, each in given.unchecked.items()
        }
        whole = [name in WHOLE for name in names]
        return row_calls.run_transposed(given, signature, transposition, whole, unchecked=turned)
    return fused_calls.run_masked(given, options, quantize, names, signature)
