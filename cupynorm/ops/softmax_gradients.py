"""Gradients of softmax and log_softmax, with every mask."""

from __future__ import annotations

from typing import Any

from cupynorm.call.gradients import GradientCall, check_softmax_gradient
from cupynorm.host import gradients
from cupynorm.invoke import gradient_calls, step_calls
from cupynorm.plan.config import Plan


def softmax_backward(
    dy: Any,
    y: Any,
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
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    return_dbias: bool = False,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return the gradient of softmax with respect to x: scale * dz, where dz = y * (dy - sum(dy * y)), from its result.

    dz is the gradient of z = x * scale + bias. The sum is over the kept elements of the normalised axes. A dropped
    element has a gradient of exactly 0, whatever dy and y hold there.

    Parameters
    ----------
    dy : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64: the gradient that arrives at y, of its shape.
    y : array
        The result of softmax.
    axis : int, tuple of int, or None, default -1
        As in softmax.
    scale, where, lengths, left_padded, causal, causal_offset, window
        As they were in softmax.
    bias : array, optional
        As in softmax; only its shape and dtype matter, and only with return_dbias=True.
    dropout, seed, offset
        Those of a ``cupynorm.dropout(y, dropout, seed=seed, offset=offset)`` that dy has yet to be taken through, as in
        attention; y is the result of softmax before it. Default: none.
    return_dbias : bool, default False
        Return the gradient of the bias as well.
    out : array, optional
        Where dx is written, of y's shape and of any dtype; may be dy or y itself.
    dtype : dtype, optional
        That of dx; default: that of `out`, else y's.
    add_to : array, optional
        An array of the bias's shape that dbias is added to, and that is returned in its place. With return_dbias=True
        only.
    plan : str or Plan, optional
        As in softmax, for the kernel that writes dx; the one that sums dbias has no variants.

    Returns
    -------
    array or tuple of array
        dx, of y's shape; with return_dbias=True: (dx, dbias). dbias is dz summed over all along which the bias is
        broadcast, and has the bias's shape and dtype.

    Raises
    ------
    TypeError
        For arrays of another kind or dtype, a mask or option of another dtype or kind, and a plan that is none.
    ValueError
        For a shape that does not fit, an option that is out of range, an `out` or add_to that shares memory, a
        dbias without a bias, or a plan that cannot hold the row, or for NumPy arrays.

    Notes
    -----
    Each element is rounded once. On the host arithmetic is in float64; without dbias and dropout all but sums is in
    float32, unless an array is float64. dbias is summed in float64, a row's elements first, then row after row in C
    order, from what add_to holds on.

    A row with nothing kept has a gradient of 0. nan or inf in a dropped place stays out of the row if the mask is given
    here. A mask may be left out where dy is finite: y is 0 where it dropped.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import softmax_backward
    >>> y, dy = np.array([[0.5, 0.5, 0.0]]), np.array([[1.0, 0.0, np.nan]])
    >>> softmax_backward(dy, y, where=np.array([True, True, False])).tolist()
    [[0.25, -0.25, 0.0]]
    >>> dx, dbias = softmax_backward(dy, y, lengths=[2], scale=2.0, bias=np.zeros(1), return_dbias=True)
    >>> dx.tolist(), dbias.tolist()
    ([[0.5, -0.5, 0.0]], [0.0])
    """
    options = (scale, left_padded, causal, causal_offset, window)
    masks = (where, lengths, bias)
    drop = (dropout, seed, offset)
    return _run("softmax_backward", dy, y, axis, options, masks, drop, return_dbias, out, dtype, add_to, plan)


def log_softmax_backward(
    dy: Any,
    y: Any,
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
    return_dbias: bool = False,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return the gradient of log_softmax with respect to x: scale * dz, where dz = dy - exp(y) * sum(dy).

    As in softmax_backward, sums are over kept elements, and dropped ones have a gradient of exactly 0.

    Parameters
    ----------
    dy : array
        The gradient that arrives at y, of its shape.
    y : array
        The result of log_softmax.
    axis : int, tuple of int, or None, default -1
        As in log_softmax.
    scale, where, lengths, left_padded, causal, causal_offset, window
        As they were in log_softmax.
    bias, return_dbias, out, dtype, add_to, plan
        As in softmax_backward.

    Returns
    -------
    array or tuple of array
        dx, of y's shape; with return_dbias=True: (dx, dbias).

    Raises
    ------
    TypeError, ValueError
        As softmax_backward does.

    Notes
    -----
    As in softmax_backward, but a mask must be given here: the sum of dy is over what it keeps.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import log_softmax_backward
    >>> y = np.log(np.array([[0.25, 0.75]]))
    >>> log_softmax_backward(np.array([[1.0, 0.0]]), y).round(6).tolist()
    [[0.75, -0.75]]
    """
    options = (scale, left_padded, causal, causal_offset, window)
    masks = (where, lengths, bias)
    drop = (0.0, None, 0)
    return _run(
        "log_softmax_backward", dy, y, axis, options, masks, drop, return_dbias, out, dtype, add_to, plan
    )


def _run(
    function: str,
    dy: Any,
    y: Any,
    axis: int | tuple[int, ...] | None,
    options: tuple[Any, ...],
    masks: tuple[Any, Any, Any],
    drop: tuple[float, int | None, int],
    return_dbias: bool,  # noqa: FBT001
    out: Any,
    dtype: Any,
    add_to: Any,
    plan: str | Plan | None,
) -> Any:
    """Run one call. options, masks: the values of OPTIONS and MASKS. drop: p, seed and offset of a dropout."""
    arrays = (dy, y, *masks, out, add_to)
    scalars = step_calls.scalars_of(*drop)
    key = (plan, dtype, return_dbias, type(return_dbias), *map(type, drop), *(drop[:1] if scalars else drop))
    scale, left_padded, causal, causal_offset, window = options
    if not (scale is causal_offset is window is None and left_padded is causal is False):
        key += step_calls.option_keys(*options)
    results, signature = step_calls.again(function, arrays, axis, key, scalars)
    if results is not None:
        return results
    return step_calls.run_checked(
        signature,
        dict(zip(ARRAYS, arrays, strict=True)),
        lambda own, axis: check_softmax_gradient(
            function,
            own["dy"],
            own["y"],
            dict(zip(OPTIONS, options, strict=True)) | {name: own[name] for name in MASKS},
            log=function == "log_softmax_backward",
            **dict(zip(("dropout", "seed", "offset"), drop, strict=True)),
            return_dbias=return_dbias,
            axis=axis,
            out=own["out"],
            dtype=dtype,
            add_to=own["dbias"],
            plan=plan,
        ),
        IMPLEMENTATION,
        axis,
        WHOLE,
        "y",
        scalars,
        plan,
    )


def _on_host(call: GradientCall) -> None:
    """Compute a checked call on NumPy arrays."""
    gradients.softmax(call.what, None if call.mask is None else call.mask.on_host())


WHOLE = dict.fromkeys(("y", "dy", "where", "bias", "out"), "y") | {"dbias": "bias"}
OPTIONS = ("scale", "left_padded", "causal", "causal_offset", "window")
MASKS = ("where", "lengths", "bias")
ARRAYS = ("dy", "y", *MASKS, "out", "dbias")
IMPLEMENTATION = step_calls.Implementation(
    gradient_calls.softmax_parts, gradient_calls.softmax_steps, _on_host
)
