"""Checks of a call of the gradient of an activation: from a user's arrays to a checked call."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype
from cupynorm._values import NamedTuple
from cupynorm.call.arguments import (
    allocate,
    check_dtype,
    check_each,
    check_kind,
    check_out,
    gradient_of,
    half,
    is_number,
)


class ActivationGradientCall(NamedTuple):
    """A checked call of the gradient of activation(x + bias), or of a gate's.

    dx may be dy or x itself, of a gate x only. dbias shares memory with nothing that is read.
    """

    on_device: bool
    device: int  # -1 on the host
    dy: Any
    x: Any
    axes: int  # trailing axes along which the bias, or the gate's halves, lie
    bias: Any  # None, or an array that broadcasts to these axes
    activation: str
    gate: str | None
    dx: Any
    dbias: Any  # where the bias's gradient goes, in the bias's shape; None without a bias
    adds: bool  # to what dbias holds

    @property
    def compute(self) -> Dtype:
        """The type of arithmetic."""
        return compute_dtype(self.dy.dtype, self.x.dtype, self.dx.dtype)


def check_activation_gradient(
    dy: Any,
    x: Any,
    bias: Any,
    activation: str,
    gate: str | None,
    *,
    axis: Any = -1,
    out: Any,
    dtype: Any,
    add_to: Any,
) -> ActivationGradientCall:
    """Check a call of the gradient of an activation, and allocate its results if they were not given."""
    check_kind("dy", dy)  # None is no array to check_each
    may_be = ("x", "dy") if gate is None else ("x",)
    call = check_each(
        x,
        out=out,
        dtype=dtype,
        columns={"bias": bias},
        others={"dy": dy, "add_to": add_to},
        axis=axis,
        may_be=may_be,
        wide=(dy,),
    )
    check_dtype("dy", dy)
    shape = x.shape if gate is None else half(x.shape)
    if dy.shape != shape:
        raise ValueError(f"dy has shape {dy.shape}, the result of an x of shape {x.shape} has {shape}")
    dbias = None
    if bias is None:
        if add_to is not None:
            raise ValueError("add_to is given without a bias, whose gradient would be added to it")
    elif add_to is None:
        dbias = allocate(call.on_device, call.device, *gradient_of(bias, compute_dtype(x.dtype)))
    else:
        named = np.empty(()) if is_number(bias) else bias  # of the bias's shape
        _check_add_to(add_to, named, {"dy": dy, "x": x}, on_device=call.on_device)
        dbias = add_to
    columns = call.columns.get("bias")
    return ActivationGradientCall(
        call.on_device,
        call.device,
        dy,
        x,
        call.axes,
        columns,
        activation,
        gate,
        call.out,
        dbias,
        add_to is not None,
    )


def _check_add_to(add_to: Any, bias: Any, others: dict[str, Any], *, on_device: bool) -> None:
    read = {"bias": bias, **others}
    check_out(add_to, bias.shape, None, read, on_device, name="add_to", may_be=())
