"""logsumexp, and cross_entropy with its gradient."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from cupynorm._options import boolean
from cupynorm.call.arguments import is_number
from cupynorm.call.losses import (
    CrossEntropyCall,
    LogSumExpCall,
    check_cross_entropy,
    check_logsumexp,
    is_ignored,
)
from cupynorm.call.missing import OMIT, PROPAGATE, RAISE
from cupynorm.host import losses
from cupynorm.host.keeping import Keeping, refuse_nan
from cupynorm.invoke import loss_calls, step_calls
from cupynorm.plan.config import Plan


def logsumexp(
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
    b: Any = None,
    nan: str = PROPAGATE,
    return_sign: bool = False,
    keepdims: bool = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return log(sum(exp(z))) over the kept elements of the reduced axes: max + log(sum(exp(z - max))), so no overflow.

    z = x * scale + bias. An element is kept if every mask that is given keeps it. softmax is exp(z - logsumexp). With b
    it is log(sum(b * exp(z))). Why max is subtracted: Blanchard, Higham and Higham 2021, "Accurately computing the
    log-sum-exp and softmax functions".

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    axis : int, tuple of int, or None, default -1
        The reduced axes, in any order; None for all. One axis with lengths, causal, causal_offset or window.
    scale, where, lengths, left_padded, causal, causal_offset, window, bias
        As in softmax.
    b : array, optional
        What exponentials are multiplied with, as in SciPy; broadcasts to x's shape, of float16, bfloat16, float32,
        float64, bool or any integers. An element of b = 0 counts for nothing, whatever x holds.
    nan : {"propagate", "omit", "raise"}, default "propagate"
        "omit": nan counts for nothing; "raise": a nan that counts is a ValueError, for NumPy arrays.
    return_sign : bool, default False
        Return the logarithm of the sum's size, and its sign: 1, -1, or 0 for a sum of 0. Without it the logarithm of a
        negative sum is nan.
    keepdims : bool, default False
        Keep the reduced axes, with one element each.
    out : array, optional
        Where the result is written; it shares no memory with what is read.
    dtype : dtype, optional
        The result's; default: that of `out`, else float64 for an x of float64 and float32 for others.
    plan : str or Plan, optional
        As in softmax.

    Returns
    -------
    array or tuple of array
        Of x's kind, and of its shape without the reduced axes; with return_sign=True: (logarithm, sign).

    Raises
    ------
    TypeError, ValueError
        As softmax does.

    Notes
    -----
    A row with nothing kept is -inf, and so is one of which only -inf is kept. A row that keeps nan is nan; else one
    that keeps +inf is +inf. What is dropped may hold anything.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import logsumexp
    >>> logsumexp(np.log([[1.0, 2.0, 5.0]])).round(6).tolist() == np.log([8.0]).round(6).tolist()
    True
    >>> logsumexp(np.array([[1000.0, 3.0]]), where=np.array([False, True])).tolist()
    [3.0]
    >>> size, sign = logsumexp(np.log([2.0, 3.0]), b=np.array([1.0, -1.0]), return_sign=True)
    >>> float(size.round(6)), float(sign)
    (0.0, -1.0)
    """
    arrays = (x, where, lengths, bias, b, out)
    others = (scale, left_padded, causal, causal_offset, window)
    key: tuple[Any, ...] = (plan, dtype, nan, keepdims, type(keepdims), return_sign, type(return_sign))
    if not (scale is causal_offset is window is None and left_padded is causal is False):
        key += step_calls.option_keys(*others)
    results, signature = step_calls.again("logsumexp", arrays, axis, key)
    if results is not None:
        return results
    options = {
        "scale": scale,
        "where": where,
        "lengths": lengths,
        "left_padded": left_padded,
        "causal": causal,
        "causal_offset": causal_offset,
        "window": window,
        "bias": bias,
    }
    return step_calls.run_checked(
        signature,
        dict(zip(("x", "where", "lengths", "bias", "b", "out"), arrays, strict=True)),
        lambda own, axis: check_logsumexp(
            own["x"],
            options | {name: own[name] for name in ("where", "bias")},
            axis=axis,
            keepdims=keepdims,
            out=own["out"],
            dtype=dtype,
            plan=plan,
            b=own["b"],
            return_sign=return_sign,
            nan=nan,
        ),
        LOGSUMEXP,
        plan=plan,
        axis=axis,
        whole=ROWS_KEPT if boolean("keepdims", keepdims) else ELEMENTS,
    )


@overload
def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_grad: Literal[False] = False,
    axis: int = -1,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any: ...


@overload
def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_grad: Literal[True],
    dloss: Any = None,
    grad: Any = None,
    axis: int = -1,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any]: ...


def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_grad: bool = False,
    dloss: Any = None,
    grad: Any = None,
    axis: int = -1,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return the cross entropy of each row of logits and its label, and its gradient where asked.

    loss = sum_i q_i (lse - x_i) + z_loss * lse^2, where x is a row of logits, lse = logsumexp(x), and
    q_i = weight_i * ((1 - label_smoothing) * [i == label] + label_smoothing / classes).
    The gradient with respect to the row is (Q + 2 * z_loss * lse) * softmax(x) - q, where Q = sum_i q_i.
    label_smoothing is that of Szegedy et al. 2016, "Rethinking the Inception architecture for computer vision", z_loss
    that of Chowdhery et al. 2022, "PaLM: Scaling language modeling with pathways".

    Parameters
    ----------
    logits : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32; `axis` has
        the classes, up to 2^24 of them.
    labels : array
        The class of each row: integers of any width, of logits' shape without `axis`, 0 to classes - 1, or
        ignore_index.
    weight : array or float, optional
        One number a class, or broadcasting to that; of float16, bfloat16, float32 or float64. Default: 1.
    ignore_index : int, optional
        Rows of this label do not count: their loss and gradient are exactly 0, whatever their logits hold. PyTorch's
        default is -100; here nothing is ignored unless it is given.
    label_smoothing : float, default 0.0
        0 to 1: the part of the target that is spread over all classes (Szegedy et al. 2016, section 7).
    z_loss : float, default 0.0
        0 or positive: factor of lse^2, which keeps lse near 0; 1e-4 in PaLM (Chowdhery et al. 2022, section 5).
    return_grad : bool, default False
        Return the gradient as well.
    dloss : array or float, optional
        What arrives at each loss: the gradient is multiplied with it. An array broadcasts to the loss's shape. Default:
        1, which gives the gradient of the sum of all losses. With return_grad=True only.
    grad : array, optional
        Where the gradient is written, of logits' shape; may be logits itself. Default: an array of logits' dtype (of
        integers: float32, of int32 float64). With return_grad=True only.
    axis : int, default -1
        The axis of the classes, any one.
    out : array, optional
        Where the loss is written; it shares no memory with what is read.
    dtype : dtype, optional
        The loss's; default: that of `out`, else float64 for logits of float64 and float32 for others.
    plan : str or Plan, optional
        As in softmax.

    Returns
    -------
    array or tuple of array
        The loss, of labels' shape; with return_grad=True: (loss, gradient).

    Raises
    ------
    TypeError
        For arrays of another kind or dtype, labels that are no integers, and a plan that is none.
    ValueError
        For shapes that do not fit, a label out of range, an option out of range, or a plan that cannot hold the row,
        or for NumPy arrays.

    Notes
    -----
    Nothing is reduced. With n = (labels != ignore_index).sum(), the mean is loss.sum() / n, and its gradient comes with
    dloss=1 / n. PyTorch's mean with `weight` divides by weight[labels] summed over those rows instead; its weight and
    label_smoothing enter the sum as they do here.

    A term with q_i = 0 is 0, also where a logit is -inf; with q_i > 0 the loss is then inf. A row that holds nan, +inf,
    or only -inf gives nan, unless it is ignored, and no other row does.

    On a device labels are not looked at: one out of range gives nan as loss and gradient of its row. A row of only -inf
    whose weights leave nothing of its target has loss and gradient 0 there.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import cross_entropy
    >>> logits, labels = np.log([[1.0, 1.0, 2.0], [3.0, 4.0, 1.0]]), np.array([2, -1])
    >>> loss, gradient = cross_entropy(logits, labels, ignore_index=-1, return_grad=True)
    >>> loss.round(4).tolist(), gradient.round(4).tolist()
    ([0.6931, 0.0], [[0.25, 0.25, -0.5], [0.0, 0.0, 0.0]])
    """
    number, array = (None, dloss) if dloss is None or not is_number(dloss) else (dloss, None)
    arrays = (logits, labels, weight, array, out, grad)
    key: tuple[Any, ...] = (plan, dtype, ignore_index, type(ignore_index), return_grad, type(return_grad))
    key += step_calls.option_keys(label_smoothing, z_loss, number)
    results, signature = step_calls.again("cross_entropy", arrays, axis, key)
    if results is not None:
        return results
    return step_calls.run_checked(
        signature,
        dict(zip(("logits", "labels", "weight", "dloss", "out", "grad"), arrays, strict=True)),
        lambda own, axis: check_cross_entropy(
            own["logits"],
            labels,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            return_grad=return_grad,
            dloss=dloss,
            grad=own["grad"],
            axis=axis,
            out=out,
            dtype=dtype,
            plan=plan,
        ),
        CROSS_ENTROPY,
        plan=plan,
        axis=axis,
        whole=LOGITS,
        called="logits",
    )


def _cross_entropy(call: CrossEntropyCall) -> None:
    """Compute a checked call of cross_entropy on NumPy arrays."""
    if not call.logits.size:
        return
    ignored = is_ignored(call.labels, call.ignore_index)
    labels = np.where(ignored, 0, call.labels).astype(np.int64)
    target = losses.Target(labels, ignored, call.weight, call.label_smoothing)
    losses.cross_entropy(call.logits, target, call.z_loss, call.loss, call.grad, call.dloss)


def _logsumexp(call: LogSumExpCall) -> None:
    """Compute a checked call of logsumexp on NumPy arrays."""
    if not call.x.size:
        return
    mask, omit = None if call.mask is None else call.mask.on_host(), call.nan == OMIT
    weights = None if call.b is None else np.broadcast_to(call.b, call.x.shape)
    refuse_nan(call.x, call.axes, Keeping(mask, weights, refuse=call.nan == RAISE))
    if call.b is None and call.sign is None:
        losses.logsumexp(call.x, call.axes, call.out, mask, omit=omit)
    else:
        losses.signed_logsumexp(call.x, call.axes, call.out, mask, call.b, call.sign, omit=omit)


# what lies along the axes of x; a result with one number a row does so only where these axes are kept
ELEMENTS = dict.fromkeys(("x", "where", "bias", "b"), "x")
ROWS_KEPT = ELEMENTS | {"out": "x", "sign": "x"}
LOGITS = {"logits": "logits", "grad": "logits"}
CROSS_ENTROPY = step_calls.Implementation(
    loss_calls.cross_entropy_parts, loss_calls.cross_entropy_steps, _cross_entropy
)
LOGSUMEXP = step_calls.Implementation(loss_calls.logsumexp_parts, loss_calls.logsumexp_steps, _logsumexp)
