"""Gradients of activations with a bias or a gate. Dropout's needs none of its own: it is dropout(dy), as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm.call.axes import check_one_axis
from cupynorm.call.elementwise_gradients import ActivationGradientCall, check_activation_gradient
from cupynorm.host import activations
from cupynorm.host.broadcast_sums import BroadcastSum
from cupynorm.invoke import gradient_calls, step_calls
from cupynorm.ops.elementwise import _gate, _gelu

if TYPE_CHECKING:
    from collections.abc import Mapping


def bias_gelu_backward(
    dy: Any,
    x: Any,
    bias: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    approximate: str = "none",
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
) -> tuple[Any, Any]:
    """Return the gradients of bias_gelu: dx = dy * g'(x + bias), and dbias, the sum of dx over the other axes.

    g'(z) = Phi(z) + z * phi(z) with the normal distribution's Phi and its density phi; with approximate="tanh" it is
    the derivative of that formula.

    Parameters
    ----------
    dy : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, of the result's shape: the gradient that arrives
        there.
    x, bias, axis, approximate
        As in bias_gelu.
    out : array, optional
        Where dx is written, of x's shape; may be dy or x itself.
    dtype : dtype, optional
        That of dx; default: that of `out`, else x's.
    add_to : array, optional
        An array of the bias's shape, of any of these dtypes, that dbias is added to and that is returned in its place.

    Returns
    -------
    tuple of array
        (dx, dbias). dbias has the shape and dtype of the bias: of one that is broadcast it is summed over what was
        broadcast, of a number it has no axes and the dtype of arithmetic. None without a bias.

    Raises
    ------
    TypeError
        For arrays of another kind or dtype.
    ValueError
        For a shape that does not fit, an `out` or add_to that shares memory, or an `approximate` of another name.

    Notes
    -----
    On the host dbias is summed in float64, row after row in C order, from what add_to holds on, and rounded once. So
    with an add_to of float64, rows that are cut into several calls give the bits of one call. On a device it is summed
    in the type of arithmetic, in an order that follows from the shape alone: the bits are the same from run to run and
    on every device.

    Where x + bias is inf or -inf, dx is nan, as in PyTorch.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import bias_gelu_backward
    >>> dx, dbias = bias_gelu_backward(np.ones((2, 2)), np.array([[0.0, 1.0], [0.0, 2.0]]), np.zeros(2))
    >>> dx.round(4).tolist(), dbias.round(4).tolist()
    ([[0.5, 1.0833], [0.5, 1.0852]], [1.0, 2.1685])
    """
    return _backward("bias_gelu_backward", dy, x, bias, axis, _gelu(approximate), None, out, dtype, add_to)


def bias_silu_backward(
    dy: Any,
    x: Any,
    bias: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
) -> tuple[Any, Any]:
    """Return the gradients of bias_silu: dx = dy * s'(x + bias), and dbias, the sum of dx over the other axes.

    s'(z) = p + z * p * (1 - p) with p = 1 / (1 + exp(-z)).

    Parameters
    ----------
    dy, out, dtype, add_to
        As in bias_gelu_backward.
    x, bias, axis
        As in bias_silu.

    Returns
    -------
    tuple of array
        (dx, dbias), as bias_gelu_backward does.

    Raises
    ------
    TypeError, ValueError
        As bias_gelu_backward does.

    Notes
    -----
    As in bias_gelu_backward.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import bias_silu_backward
    >>> dx, dbias = bias_silu_backward(np.ones((2, 1)), np.array([[0.0], [1.0]]), np.zeros(1))
    >>> dx.round(4).tolist(), dbias.round(4).tolist()
    ([[0.5], [0.9277]], [1.4277])
    """
    return _backward("bias_silu_backward", dy, x, bias, axis, "silu", None, out, dtype, add_to)


def geglu_backward(
    dy: Any,
    x: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    approximate: str = "none",
    gate: str = "first",
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
) -> tuple[Any, Any]:
    """Return the gradients of geglu with respect to x and bias.

    With the halves a (the gate) and b of x + bias: da = dy * b * gelu'(a), db = dy * gelu(a). dbias is the sum of dx
    over the other axes.

    Parameters
    ----------
    dy : array
        As in bias_gelu_backward; it has n elements along `axis`.
    x, bias, axis, approximate, gate
        As in geglu; x has 2n elements along `axis`.
    out : array, optional
        Where dx is written, of x's shape; may be x itself.
    dtype, add_to
        As in bias_gelu_backward.

    Returns
    -------
    tuple of array
        (dx, dbias), as bias_gelu_backward does.

    Raises
    ------
    TypeError, ValueError
        As bias_gelu_backward does, and ValueError for an odd axis of x, several axes or another `gate`.

    Notes
    -----
    As in bias_gelu_backward.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import geglu_backward
    >>> dx, dbias = geglu_backward(np.ones((1, 1)), np.array([[1.0, 10.0]]))
    >>> dx.round(4).tolist(), dbias
    ([[10.8332, 0.8413]], None)
    """
    return _gated("geglu_backward", dy, x, bias, axis, _gelu(approximate), gate, out, dtype, add_to)


def swiglu_backward(
    dy: Any,
    x: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    gate: str = "first",
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
) -> tuple[Any, Any]:
    """Return the gradients of swiglu with respect to x and bias.

    With the halves a (the gate) and b of x + bias: da = dy * b * silu'(a), db = dy * silu(a). dbias is the sum of dx
    over the other axes.

    Parameters
    ----------
    dy, out, dtype, add_to
        As in geglu_backward.
    x, bias, axis, gate
        As in swiglu.

    Returns
    -------
    tuple of array
        (dx, dbias), as bias_gelu_backward does.

    Raises
    ------
    TypeError, ValueError
        As geglu_backward does.

    Notes
    -----
    As in bias_gelu_backward.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import swiglu_backward
    >>> dx, dbias = swiglu_backward(np.ones((1, 1)), np.array([[1.0, 10.0]]))
    >>> dx.round(4).tolist(), dbias
    ([[9.2767, 0.7311]], None)
    """
    return _gated("swiglu_backward", dy, x, bias, axis, "silu", gate, out, dtype, add_to)


def _gated(
    name: str,
    dy: Any,
    x: Any,
    bias: Any,
    axis: Any,
    activation: str,
    gate: Any,
    out: Any,
    dtype: Any,
    add_to: Any,
) -> tuple[Any, Any]:
    return _backward(name, dy, x, bias, axis, activation, _gate(gate), out, dtype, add_to)


def _backward(
    name: str,
    dy: Any,
    x: Any,
    bias: Any,
    axis: Any,
    activation: str,
    gate: str | None,
    out: Any,
    dtype: Any,
    add_to: Any,
) -> tuple[Any, Any]:
    """Run one call. name: the function's."""
    arrays = (dy, x, bias, out, add_to)
    results, signature = step_calls.again(name, arrays, axis, (activation, gate, dtype))
    if results is not None:
        return results  # type: ignore[no-any-return]

    def check(own: Mapping[str, Any], own_axis: Any) -> ActivationGradientCall:
        if gate is not None:
            check_one_axis(axis, x)
        return check_activation_gradient(
            own["dy"],
            own["x"],
            bias,
            activation,
            gate,
            axis=own_axis,
            out=own["out"],
            dtype=dtype,
            add_to=add_to,
        )

    return step_calls.run_checked(  # type: ignore[no-any-return]
        signature,
        dict(zip(ARRAYS, arrays, strict=True)),
        check,
        IMPLEMENTATION,
        axis=axis,
        whole=WHOLE,
    )


ARRAYS = ("dy", "x", "bias", "out", "dbias")
WHOLE = dict.fromkeys(("x", "dy", "out"), "x")


def _on_host(call: ActivationGradientCall) -> None:
    """Compute a checked call on NumPy arrays."""
    dbias, total = call.dbias, None
    if not call.x.size:
        if dbias is not None and not call.adds:
            dbias[...] = 0
        return
    if dbias is not None:
        total = BroadcastSum(dbias.shape, call.x.shape, call.axes, dbias if call.adds else None)
    if call.gate is None:
        activations.bias_activation_backward(
            call.dy, call.x, call.bias, call.activation, call.dx, total, axes=call.axes
        )
    else:
        first = call.gate == "first"
        activations.gated_backward(
            call.dy, call.x, call.bias, call.activation, call.dx, total, gate_first=first
        )
    if total is not None:
        total.store(dbias)


IMPLEMENTATION = step_calls.Implementation(
    gradient_calls.activation_parts, gradient_calls.activation_steps, _on_host
)
