"""Losses on a device: from checked calls to their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm.call.arguments import view
from cupynorm.call.missing import OMIT
from cupynorm.call.view import View
from cupynorm.invoke.step_calls import Parts, of_mask
from cupynorm.invoke.steps import Steps
from cupynorm.lower.losses import cross_entropy_spec, logsumexp_spec

if TYPE_CHECKING:
    from cupynorm.call.losses import CrossEntropyCall, LogSumExpCall


def cross_entropy_steps(call: CrossEntropyCall) -> Steps:
    """Return the kernels of a checked call of cross_entropy."""
    steps = Steps(call.device, call.compute)
    if not call.logits.size:
        return steps
    logits, rows = view(call.logits, "logits"), call.labels.shape
    ignored, held = call.ignore_index, np.iinfo(call.labels.dtype)
    if ignored is not None and not held.min <= ignored <= held.max:
        ignored = None
    weight = None if call.weight is None else view(call.weight, "weight").broadcast_to(logits.shape)
    dloss = call.dloss
    if not isinstance(dloss, float):
        given = view(dloss, "dloss").broadcast_to(rows)
        dloss = View(given.pointer, logits.shape, (*given.strides, 0), given.dtype)
    loss = steps.numbers("out", call.loss, rows)
    steps.specs.append(
        cross_entropy_spec(
            logits,
            view(call.labels, "labels"),
            ignored,
            weight,
            call.label_smoothing,
            call.z_loss,
            loss.pointer,
            None if call.grad is None else view(call.grad, "grad"),
            dloss,
            call.compute,
            steps.messages(logits.shape, 1) if call.grad is None else 0,
        )
    )
    steps.add_rounding()
    return steps


def logsumexp_steps(call: LogSumExpCall) -> Steps:
    """Return the kernels of a checked call of logsumexp."""
    compute = compute_dtype(call.x.dtype, call.out.dtype)
    steps = Steps(call.device, compute)
    if call.x.size:
        x = view(call.x, "x")
        rows = x.shape[: len(x.shape) - call.axes]
        steps.specs.append(
            logsumexp_spec(
                x,
                call.axes,
                call.mask,
                steps.numbers("out", call.out, rows).pointer,
                compute,
                factor=None if call.b is None else view(call.b, "b").broadcast_to(x.shape),
                sign=0 if call.sign is None else steps.numbers("sign", call.sign, rows).pointer,
                omit=call.nan == OMIT,
                room=steps.messages(x.shape, call.axes),
            )
        )
        steps.add_rounding()
    return steps


def cross_entropy_parts(call: CrossEntropyCall) -> Parts:
    """Return the arrays of cross_entropy."""
    read = {name: getattr(call, name) for name in ("logits", "labels", "weight")}
    read["dloss"] = None if isinstance(call.dloss, float) else call.dloss
    results = (call.loss,) if call.grad is None else (call.loss, call.grad)
    return Parts(read, {"out": call.loss, "grad": call.grad}, results)


def logsumexp_parts(call: LogSumExpCall) -> Parts:
    """Return the arrays of logsumexp."""
    results = (call.out,) if call.sign is None else (call.out, call.sign)
    read = {"x": call.x, "b": call.b, **of_mask(call.mask)}
    return Parts(read, {"out": call.out, "sign": call.sign}, results)
