"""Lowers losses: cross_entropy, alone or with its gradient, and logsumexp."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cupynorm._values import replace
from cupynorm.call.view import View
from cupynorm.lower.around import Around, Counted, Label, Labelled, Operand, masked, scaling
from cupynorm.lower.backward import (
    CROSS_ENTROPY,
    LABEL_CROSS_ENTROPY,
    LOGSUMEXP,
    OMITTING_LOGSUMEXP,
    SIGNED_LOGSUMEXP,
    SMOOTH_CROSS_ENTROPY,
)
from cupynorm.lower.expressions import Expression
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.tracing import traced
from cupynorm.plan.config import FLOAT_BYTES

if TYPE_CHECKING:
    from cupynorm._dtypes import Dtype
    from cupynorm.call.masks import Mask
    from cupynorm.lower.spec import KernelSpec

MOST_COUNTED = 1 << 24  # columns that a State of floats counts one by one


@functools.cache
def _of_loss(*, weight: bool, smooth: bool) -> Expression:
    """Return x and q, the target of its class: of x, label (0 or 1), weight, and what of a target is on and off it."""

    def of(x: Any, label: Any, *others: Any) -> Any:
        q = label * others[-2] + others[-1] if smooth else label
        return x, (q * others[0] if weight else q)

    return traced(of, 2 + weight + 2 * smooth)


def cross_entropy_spec(
    logits: View,
    labels: View,
    ignored: int | None,
    weight: View | None,
    smoothing: float,
    z_loss: float,
    loss: int,
    grad: View | None,
    dloss: View | float,
    compute: Dtype,
    room: int = 0,
) -> KernelSpec:
    """Lower cross_entropy. loss: the pointer of one number a row. grad: where the gradient goes; None: nowhere.

    room: the pointer of where messages lie without a gradient. weight: stretched to logits' shape. ignored: a label
    that labels' dtype holds, or None.
    """
    multiplied = grad is not None and not (type(dloss) is float and dloss == 1)
    what = Around(
        () if grad is None else (grad,),
        counted=None if ignored is None else Counted(labels, ignored),
        store=scaling(scale=multiplied, bias=False),
        store_operands=(dloss,) * multiplied,
        room=room,
    )
    if weight is None and not smoothing:
        what = what._replace(labelled=Labelled(labels, ignored))
        return fused_spec(LABEL_CROSS_ENTROPY, logits, 1, {}, (loss, 0), z_loss, compute, what)
    spread = smoothing / logits.shape[-1]
    counts = logits.shape[-1] <= MOST_COUNTED and compute.itemsize == FLOAT_BYTES
    if weight is None and counts:
        what = what._replace(labelled=Labelled(labels, ignored, 1 - smoothing))
        numbers = (z_loss, smoothing, spread)
        return fused_spec(SMOOTH_CROSS_ENTROPY, logits, 1, {}, (loss, 0), numbers, compute, what)
    operands: list[Operand] = [Label(labels, nan=True)]
    operands += [] if weight is None else [weight]
    if smoothing:
        operands += [1 - smoothing, spread]
    load = _of_loss(weight=weight is not None, smooth=smoothing != 0)
    what = what._replace(load=load, load_operands=tuple(operands))
    return fused_spec(CROSS_ENTROPY, logits, 1, {}, (loss, 0), z_loss, compute, what)


@functools.cache
def _with_factor(*, scale: bool, bias: bool) -> Expression:
    """Return x * scale + bias and b, of x, of those of both that there are, and of b."""

    def of(x: Any, *others: Any) -> Any:
        if scale:
            x = x * others[0]
        return (x + others[scale] if bias else x), others[-1]

    return traced(of, 2 + scale + bias)


def logsumexp_spec(
    x: View,
    axes: int,
    mask: Mask | None,
    lse: int,
    compute: Dtype,
    room: int = 0,
    *,
    factor: View | None = None,
    sign: int = 0,
    omit: bool = False,
) -> KernelSpec:
    """Lower logsumexp. lse, sign: the pointers of one number a row. room: that of where messages lie.

    factor: what exponentials are multiplied with, stretched to x's shape. omit: whether nan is left out.
    """
    what = Around((), room=room)
    what = what if mask is None else masked(what, mask)
    if factor is None and not sign:
        op = OMITTING_LOGSUMEXP if omit else LOGSUMEXP
        return fused_spec(op, x, axes, {}, (lse,), 0.0, compute, what)
    scale, bias = mask is not None and mask.scale != 1, mask is not None and mask.bias is not None
    operands: list[Operand] = [*what.load_operands, 1.0 if factor is None else factor]
    what = what._replace(load=_with_factor(scale=scale, bias=bias), load_operands=tuple(operands))
    op = replace(SIGNED_LOGSUMEXP, options=(int(omit),))
    return fused_spec(op, x, axes, {}, (lse, sign), 0.0, compute, what)
