"""Checks of a call of logsumexp or cross_entropy: from a user's arrays to a checked call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, dtype_of, result_dtype
from cupynorm._options import boolean, eps_of, finite, integer, plainly, within
from cupynorm._values import NamedTuple
from cupynorm.call.arguments import (
    allocate,
    check_columns,
    check_dtype,
    check_forced,
    check_input,
    check_kind,
    check_kinds,
    check_out,
    check_places,
    is_number,
    sharing,
    trailing_axes,
    view,
    with_arrays,
)
from cupynorm.call.masks import Asked, Mask, _check_broadcast, mask_of, with_lengths
from cupynorm.call.missing import PROPAGATE, nan_policy

if TYPE_CHECKING:
    from collections.abc import Mapping


class LogSumExpCall(NamedTuple):
    """A checked call of logsumexp. out: one number a row, of any shape with as many elements as there are rows."""

    on_device: bool
    device: int  # -1 on the host
    x: Any
    axes: int  # trailing axes that are reduced
    mask: Mask | None
    out: Any
    b: Any = None  # what exponentials are multiplied with, broadcasts to x's shape
    sign: Any = None  # where the signs of the sums go, of out's shape; None: nowhere
    nan: str = PROPAGATE


class CrossEntropyCall(NamedTuple):
    """A checked call of cross_entropy; classes are the last axis of logits, and rows its other axes.

    grad may be logits itself, and shares memory with nothing else that is read; loss shares memory with nothing.
    """

    on_device: bool
    device: int  # -1 on the host
    logits: Any
    labels: Any  # of an integer dtype, one for each row
    weight: Any  # None, or an array that broadcasts to one number a class
    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    dloss: Any  # what the gradient is multiplied with: a float, or an array that broadcasts to loss
    loss: Any
    grad: Any  # None where nobody asks

    @property
    def classes(self) -> int:
        """How many numbers a row has."""
        return int(self.logits.shape[-1])

    @property
    def compute(self) -> Dtype:
        """The type of arithmetic."""
        written = [each.dtype for each in (self.loss, self.grad) if each is not None]
        return compute_dtype(self.logits.dtype, *written)


def check_logsumexp(
    x: Any,
    options: Mapping[str, Any],
    *,
    axis: int | tuple[int, ...] | None,
    keepdims: Any,
    out: Any,
    dtype: Any,
    plan: Any,
    b: Any = None,
    return_sign: Any = False,
    nan: Any = PROPAGATE,
) -> LogSumExpCall:
    """Check a call of logsumexp, and allocate its results if they were not given. options: the keywords of a mask."""
    asked = with_lengths(Asked(**options), x)
    others = {**asked.arrays(), **({} if b is None else {"b": b})}
    on_device = check_kinds(x, {"out": out, **others})
    check_forced(plan, "x", on_device=on_device)
    check_input("x", x, on_device=on_device)
    axes = trailing_axes(axis, x.shape)
    at = x.ndim - axes
    if 0 in x.shape[at:]:
        raise ValueError(f"x has shape {x.shape}: the reduced axes are empty")
    wanted = None if dtype is None else dtype_of(dtype)
    rows = x.shape[:at] + (1,) * (axes if boolean("keepdims", keepdims) else 0)
    device = check_places(x, {"out": out, **others}) if on_device else -1
    mask = None if asked.says_nothing else mask_of(asked, x.shape, axes)
    nan = nan_policy(nan, on_device=on_device)
    if b is not None:
        check_input("b", b, on_device=on_device, any_integer=True)
        _check_broadcast("b", b, x.shape, "x")
    out = _result(out, rows, wanted, {"x": x, **others}, on_device, device)
    if mask is not None:
        within(compute_dtype(x.dtype, out.dtype), scale=mask.scale)
    sign = allocate(on_device, device, rows, out.dtype) if boolean("return_sign", return_sign) else None
    return LogSumExpCall(on_device, device, x, axes, mask, out, b, sign, nan)


def check_cross_entropy(
    logits: Any,
    labels: Any,
    *,
    weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    return_grad: Any,
    dloss: Any,
    grad: Any,
    axis: Any,
    out: Any,
    dtype: Any,
    plan: Any,
) -> CrossEntropyCall:
    """Check a call of cross_entropy, and allocate its results if they were not given."""
    columns = {} if weight is None else {"weight": weight}
    given = {"labels": labels, **columns, "dloss": dloss, "grad": grad, "out": out}
    on_device = check_kinds(logits, given, {"weight", "dloss"}, name_of_x="logits")
    check_kind("labels", labels)  # None is no array to the line above
    check_forced(plan, "logits", on_device=on_device)
    check_input("logits", logits, on_device=on_device)
    axes = trailing_axes(axis, logits.shape, "logits")
    if axes != 1:
        raise ValueError(f"axis {axis} names {axes} axes of logits: classes lie along one axis")
    *leading, classes = logits.shape
    rows = tuple(leading)
    if not classes:
        raise ValueError(f"logits has shape {logits.shape}: there are no classes")
    ignored = (
        None if ignore_index is None else integer("ignore_index", ignore_index, "give an integer or None")
    )
    smoothing = finite("label_smoothing", label_smoothing, "it must be 0 to 1")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is {plainly(label_smoothing)}: it must be 0 to 1")
    z = eps_of(z_loss, "z_loss")
    wanted = None if dtype is None else dtype_of(dtype)
    columns = check_columns(columns, (classes,), "the classes of logits have")
    device = check_places(logits, given, "logits") if on_device else -1
    _check_labels(labels, rows, classes, ignored, on_device=on_device)
    factor = _check_dloss(dloss, rows)
    read = {"logits": logits, "labels": labels}
    read |= {name: each for name, each in columns.items() if not is_number(each)}
    if not isinstance(factor, float):
        read["dloss"] = factor
    if boolean("return_grad", return_grad):
        grad = _gradient(grad, logits, read, on_device, device)
    else:
        for name, each in (("grad", grad), ("dloss", dloss)):
            if each is not None:
                raise ValueError(f"{name} is given, and return_grad is False: give return_grad=True as well")
    loss = _result(out, rows, wanted, read, on_device, device)
    both = out is not None and grad is not None and loss.size and grad.size
    if both and sharing(view(loss), {"grad": view(grad)}) is not None:
        raise ValueError("out and grad share memory")
    written = (loss.dtype, None if grad is None else grad.dtype)
    columns = with_arrays(columns, logits, (classes,), written, device)
    call = CrossEntropyCall(
        on_device,
        device,
        logits,
        labels,
        columns.get("weight"),
        ignored,
        smoothing,
        z,
        factor,
        loss,
        grad,
    )
    within(call.compute, z_loss=z, dloss=factor if isinstance(factor, float) else None)
    return call


def _result(
    out: Any,
    rows: tuple[int, ...],
    wanted: Dtype | None,
    read: Mapping[str, Any],
    on_device: bool,  # noqa: FBT001
    device: int,
) -> Any:
    """Return where one number a row is written. By default it has the dtype of statistics: of arithmetic."""
    first = next(iter(read.values()))
    if out is None:
        return allocate(on_device, device, rows, wanted or compute_dtype(first.dtype))
    check_out(out, rows, wanted, read, on_device, may_be=())
    return out


def _gradient(
    grad: Any,
    logits: Any,
    read: Mapping[str, Any],
    on_device: bool,  # noqa: FBT001
    device: int,
) -> Any:
    """Return where the gradient is written."""
    if grad is None:
        return allocate(on_device, device, logits.shape, result_dtype(logits.dtype), like=logits)
    check_out(grad, logits.shape, None, read, on_device, name="grad", may_be=("logits",))
    return grad


def _check_labels(
    labels: Any, rows: tuple[int, ...], classes: int, ignored: int | None, *, on_device: bool
) -> None:
    """Check labels: TypeError for another dtype than an integer one, ValueError for another shape or out of range.

    On a device their values are not looked at: that would wait for the device.
    """
    dtype = labels.dtype
    if dtype.kind not in "iu":
        raise TypeError(f"labels has dtype {dtype}: use an integer dtype")
    if labels.shape != rows:
        raise ValueError(f"labels has shape {labels.shape}, logits without its last axis has {rows}")
    if on_device or not labels.size:
        return
    wrong = ~is_ignored(labels, ignored) & ((labels < 0) | (labels >= classes))
    if wrong.any():
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        other = "" if ignored is None else f", or ignore_index, {plainly(ignored)}"
        where = f" at {at}" if at else ""
        raise ValueError(
            f"labels holds {labels[at]}{where}: logits has {classes} classes, use 0 to {classes - 1}{other}"
        )


def is_ignored(labels: Any, ignored: int | None) -> Any:
    """Say of each label of the host whether it is the one that is ignored."""
    return np.zeros(labels.shape, bool) if ignored is None else np.asarray(labels == ignored)


def _check_dloss(dloss: Any, rows: tuple[int, ...]) -> Any:
    """Return what the gradient is multiplied with, as a float or an array that broadcasts to one number a row."""
    if dloss is None:
        return 1.0
    if is_number(dloss):
        return finite("dloss", dloss[()] if isinstance(dloss, np.ndarray) else dloss)
    check_kind("dloss", dloss)
    check_dtype("dloss", dloss)
    try:
        view(dloss).broadcast_to(rows)
    except ValueError:
        raise ValueError(
            f"dloss has shape {dloss.shape}, the loss has {rows}: it must have that shape or broadcast to it"
        ) from None
    return dloss
