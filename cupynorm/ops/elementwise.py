"""Activations with a bias or a gate, and dropout: what stands between the products of a transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._options import choice, finite
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check_each, is_number, view
from cupynorm.call.axes import check_one_axis
from cupynorm.host import activations, reference
from cupynorm.host.philox import PROBABILITY
from cupynorm.host.philox import dropout as checked_dropout
from cupynorm.invoke import one_kernel, row_calls
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.lower.elementwise import (
    DROPOUT_SCALARS,
    Each,
    elementwise_spec,
    round_keys,
    threshold_and_factors,
)
from cupynorm.lower.spec import KernelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.invoke.bound_calls import Signature
    from cupynorm.invoke.shortcuts import Given

GELUS = {"none": "gelu", "tanh": "gelu_tanh"}  # which of reference.ACTIVATIONS is meant
GATES = ("first", "second")
ACTIVATION, DROPOUT = row_calls.Named("activation"), row_calls.Named("dropout")


def bias_gelu(
    x: Any,
    bias: Any,
    *,
    axis: int | tuple[int, ...] | None = -1,
    approximate: str = "none",
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return g(x + bias), where g(z) = z * Phi(z) with the normal distribution's Phi (Hendrycks and Gimpel 2016).

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, of any shape with at least one axis.
    bias : array or float or None
        Has the shape of the axes that `axis` names or broadcasts to it, in any dtype that x may have; None is no bias.
    axis : int, tuple of int, or None, default -1
        The axes along which the bias lies, in any order; None for all. The result has x's order in memory.
    approximate : str, default "none"
        "tanh": g(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))), as in BERT's and GPT-2's code.
    out : array, optional
        Where the result is written, of the result's shape and x's kind; may be x itself.
    dtype : dtype, optional
        The result's; default: that of `out`, else x's.

    Returns
    -------
    array
        Of x's kind and shape. Arithmetic is as in layer_norm, with one rounding.

    Raises
    ------
    TypeError
        For arrays of another kind or dtype.
    ValueError
        For a bias or `out` that does not fit, or an `approximate` of another name.

    Notes
    -----
    g(-inf) is nan, as in PyTorch.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import bias_gelu
    >>> bias_gelu(np.array([[0.0, 1.0]]), np.array([1.0, 1.0])).round(4).tolist()
    [[0.8413, 1.9545]]
    """
    return _with_bias(x, bias, axis, _gelu(approximate), out, dtype)


def bias_silu(
    x: Any,
    bias: Any,
    *,
    axis: int | tuple[int, ...] | None = -1,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return s(x + bias), where s(z) = z / (1 + exp(-z)) (Elfwing, Uchibe and Doya 2017; also called swish).

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, of any shape with at least one axis.
    bias : array or float or None
        Has the shape of the axes that `axis` names or broadcasts to it, in any dtype that x may have; None is no bias.
    axis : int, tuple of int, or None, default -1
        The axes along which the bias lies, in any order; None for all. The result has x's order in memory.
    out, dtype
        As in bias_gelu.

    Returns
    -------
    array
        Of x's kind and shape.

    Raises
    ------
    TypeError, ValueError
        As bias_gelu does.

    Notes
    -----
    s(-inf) is nan, as in PyTorch.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import bias_silu
    >>> bias_silu(np.array([0.0, 1.0]), None).round(4).tolist()
    [0.0, 0.7311]
    """
    return _with_bias(x, bias, axis, "silu", out, dtype)


def geglu(
    x: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    approximate: str = "none",
    gate: str = "first",
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return gelu(a) * b, where a is the gate and b the other half of x + bias.

    Shazeer 2020, "GLU Variants Improve Transformer".

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, with 2n elements along `axis`.
    bias : array or float, optional
        2n elements in x's order, or broadcasting to them.
    axis : int, default -1
        The axis along which the two halves of x lie, and the bias. The result has x's order in memory.
    approximate : str, default "none"
        As in bias_gelu.
    gate : str, default "first"
        "first": a is the first half, as in Megatron, Transformer Engine and vLLM (gelu_and_mul), whose weights are
        laid out so. "second": the second one, as in diffusers' GEGLU, and where torch.nn.functional.glu has its
        sigmoid.
    out : array, optional
        Where the result is written; it shares no memory with x.
    dtype : dtype, optional
        The result's; default: that of `out`, else x's.

    Returns
    -------
    array
        Of x's kind, and of its shape with n elements along `axis`.

    Raises
    ------
    TypeError
        As bias_gelu does.
    ValueError
        As bias_gelu does, and for an odd axis, several axes or another `gate`.

    Notes
    -----
    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import geglu
    >>> geglu(np.array([[1.0, 10.0]])).round(4).tolist()
    [[8.4134]]
    """
    return _gated(x, bias, axis, _gelu(approximate), gate, out, dtype)


def swiglu(
    x: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    gate: str = "first",
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return silu(a) * b, where a is the gate and b the other half of x + bias (Shazeer 2020).

    Parameters
    ----------
    x, bias, axis, out, dtype
        As in geglu.
    gate : str, default "first"
        As in geglu. "first" is the order of Llama's fused weights in vLLM (silu_and_mul), Megatron and xFormers.

    Returns
    -------
    array
        Of x's kind, and of its shape with n elements along `axis`.

    Raises
    ------
    TypeError, ValueError
        As geglu does.

    Notes
    -----
    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import swiglu
    >>> swiglu(np.array([[1.0, 10.0]])).round(4).tolist()
    [[7.3106]]
    """
    return _gated(x, bias, axis, "silu", gate, out, dtype)


def dropout(x: Any, p: float, *, seed: int, offset: int = 0, out: Any = None, dtype: Any = None) -> Any:
    """Return x / (1 - p) where it is kept, and exactly 0 where it is dropped (Srivastava et al. 2014).

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, of any shape. Whatever it holds where it is
        dropped, nan too, the result is 0 there.
    p : float
        The share that is dropped, 0 to 1; at 1 all is dropped.
    seed, offset : int
        0 to 2^64 - 1. Together with an element's index in C order they alone decide which elements are dropped.
    out, dtype
        As in bias_gelu.

    Returns
    -------
    array
        Of x's kind and shape.

    Raises
    ------
    TypeError, ValueError
        As bias_gelu does, and for p, seed or offset out of range.

    Notes
    -----
    It has no axis: x and `out` may have any strides, and the result has x's order in memory. The same elements are
    dropped on every device, in every layout and dtype, and in every shape of the same size. No
    mask is stored: the gradient is dropout(dy, p) of the same seed and offset. Element i is dropped if its word <
    floor(p * 2^32). The word is number i % 4 of the four that Philox4x32-10 (Salmon et al. 2011) makes of the counter
    (c mod 2^32, c div 2^32, 0, 0) with c = (offset + i div 4) mod 2^64, and of the key (seed mod 2^32, seed div 2^32).
    So a call uses the counters offset to offset + ceil(x.size / 4) - 1, and the next one of the same seed begins behind
    them.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import dropout
    >>> y = dropout(np.ones(1000), 0.5, seed=1)
    >>> sorted(set(y.tolist())), bool(0.45 < (y == 0).mean() < 0.55)
    ([0.0, 2.0], True)
    """
    drop = checked_dropout(p if type(p) is float else finite("p", p, PROBABILITY), seed, offset)
    words = (drop.offset, round_keys(drop.seed), *threshold_and_factors(drop.p))
    return row_calls.run(
        DROPOUT,
        x,
        None,
        None,
        -1,
        None,
        out,
        dtype,
        False,  # noqa: FBT003
        None,
        (),
        (),
        words,
        _run_dropout,
        drop,
    )


def _run_dropout(given: Given, signature: Signature | None) -> Any:
    """Run a call of dropout with all checks; keep it. given.unchecked: the checked dropout."""
    call = check_each(given.x, out=given.out, dtype=given.dtype)
    return _run(call, Each(dropout=given.unchecked), given, DROPOUT_SCALARS, signature)


def _gelu(approximate: str) -> str:
    """Return which of reference.ACTIVATIONS is meant."""
    if type(approximate) is str and approximate in GELUS:
        return GELUS[approximate]
    return GELUS[choice("approximate", approximate, tuple(GELUS), "use 'none' or 'tanh'")]


def _gate(gate: str) -> str:
    """Return which half of x is the gate."""
    if type(gate) is str and gate in GATES:
        return gate
    return choice("gate", gate, GATES, "use 'first' or 'second', the half that goes through the activation")


def _gated(x: Any, bias: Any, axis: Any, activation: str, gate: str, out: Any, dtype: Any) -> Any:
    return _with_bias(x, bias, axis, activation, out, dtype, _gate(gate))


def _with_bias(
    x: Any, bias: Any, axis: Any, activation: str, out: Any, dtype: Any, gate: str | None = None
) -> Any:
    options_key = (activation, gate)
    return row_calls.run(
        ACTIVATION,
        x,
        bias,
        None,
        axis,
        None,
        out,
        dtype,
        False,  # noqa: FBT003
        None,
        options_key,
        (),
        (),
        _run_with_bias,
    )


def _run_with_bias(given: Given, signature: Signature | None) -> Any:
    """Run a call with a bias, and perhaps a gate, with all checks; keep it."""
    (activation, gate), x, bias, dtype = given.options_key, given.x, given.gamma, given.dtype
    if gate is not None:
        check_one_axis(given.axis, x)
    transposition = row_calls.transposition_for(given)
    if transposition is not None:
        return row_calls.run_transposed(given, signature, transposition)
    columns, halves = {"bias": bias}, gate is not None
    call = check_each(x, out=given.out, dtype=dtype, columns=columns, axis=given.axis, halves=halves)
    if call.on_device and is_number(bias):
        return _with_bias(x, call.columns["bias"], given.axis, activation, call.out, dtype, gate)
    return _run(call, Each(activation, bias, gate), given, (), signature)


def _run(call: Call, each: Each, given: Given, scalars: Sequence[str], signature: Signature | None) -> Any:
    """Run a checked call of an op on each element, and keep it. scalars: the names of given.scalars."""
    if call.x.size == 0:
        return call.out
    if call.on_device:
        arrays = {"x": given.x, "bias": given.gamma, "beta": None, "out": given.out}
        made = {"out": call.out} if given.out is None else {}
        roles = Arrays(arrays, ("out",), made, scalars=scalars)
        given.keep(signature, one_kernel.launch(call.device, _lowered(call, each), roles), made)
    else:
        _compute(call, each)
    return call.out


def _lowered(call: Call, each: Each) -> KernelSpec:
    bias = call.columns.get("bias")
    x, out = view(call.x, "x"), view(call.out, "out")
    return elementwise_spec(each, x, out, None if bias is None else view(bias, "bias"), max(1, call.axes))


def _compute(call: Call, each: Each) -> None:
    """Compute a checked call on NumPy arrays."""
    x, out = call.x, call.out
    given = call.columns.get("bias")
    asking.answer(lambda: _lowered(call, each))
    if each.dropout is not None:
        reference.dropout(x, each.dropout, out)
    elif each.gate is None:
        activations.bias_activation(x, given, str(each.activation), out, call.axes)
    else:
        cols = out.shape[-1]
        shift = None if given is None else np.broadcast_to(given, (2 * cols,))
        halves = [
            (x[..., half], None if shift is None else shift[half]) for half in (np.s_[:cols], np.s_[cols:])
        ]
        gate, value = halves if each.gate == "first" else halves[::-1]
        activations.gated(*gate, *value, str(each.activation), out)
