"""Activations with a bias or a gate, and dropout: what stands between the products of a transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._options import choice, finite
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check_each, is_number, view
from cupynorm.host import reference
from cupynorm.host.philox import PROBABILITY
from cupynorm.host.philox import dropout as checked_dropout
from cupynorm.invoke import bound_calls, one_kernel
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
    from collections.abc import Mapping, Sequence

    from cupynorm.invoke.bound_calls import Signature

GELUS = {"none": "gelu", "tanh": "gelu_tanh"}  # which of reference.ACTIVATIONS is meant
GATES = ("first", "second")


def bias_gelu(x: Any, bias: Any, *, approximate: str = "none", out: Any = None, dtype: Any = None) -> Any:
    """Return g(x + bias), where g(z) = z * Phi(z) with the normal distribution Phi (Hendrycks and Gimpel 2016).

    approximate="tanh": g(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))), as in BERT's and GPT-2's code.

    x is an array as in layer_norm, of at least one axis; bias has the shape of x's last axis or broadcasts to it, and
    any dtype that x may have, or is a number, both as gamma in layer_norm; None is no bias. What comes back is of x's
    kind and shape, and of the dtype of `out`, else `dtype`, else x's; arithmetic is as in layer_norm, with one
    rounding. `out` may be x itself. g(-inf) is nan, as in PyTorch.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.

    Raises TypeError for arrays of another kind or dtype; ValueError for a bias or `out` that does not fit, or an `approximate`
    of another name.
    """
    return _with_bias(x, bias, _gelu(approximate), out, dtype)


def bias_silu(x: Any, bias: Any, *, out: Any = None, dtype: Any = None) -> Any:
    """Return s(x + bias), where s(z) = z / (1 + exp(-z)) (Elfwing, Uchibe and Doya 2017; also called swish).

    Arrays, dtypes, `out` and errors are as in bias_gelu. s(-inf) is nan, as in PyTorch.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    return _with_bias(x, bias, "silu", out, dtype)


def geglu(
    x: Any,
    bias: Any = None,
    *,
    approximate: str = "none",
    gate: str = "first",
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return gelu(a) * b, where a is the gate and b the other half of x + bias.

    Shazeer 2020, "GLU Variants Improve Transformer".

    The last axis of x has 2n elements, that of the result n. gate="first": a is the first half, as in Megatron, Transformer
    Engine and vLLM (gelu_and_mul), whose weights are laid out so; gate="second": the second one, as in diffusers' GEGLU,
    and where torch.nn.functional.glu has its sigmoid. bias has 2n elements, in x's order, or broadcasts to them.

    Arrays, dtypes, approximate and errors are as in bias_gelu; `out` shares no memory with x, and an odd last axis or another
    `gate` is a ValueError.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    return _gated(x, bias, _gelu(approximate), gate, out, dtype)


def swiglu(x: Any, bias: Any = None, *, gate: str = "first", out: Any = None, dtype: Any = None) -> Any:
    """Return silu(a) * b, where a is the gate and b the other half of x + bias (Shazeer 2020).

    All is as in geglu. gate="first" is the order of Llama's fused weights in vLLM (silu_and_mul), Megatron and xFormers.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    return _gated(x, bias, "silu", gate, out, dtype)


def dropout(x: Any, p: float, *, seed: int, offset: int = 0, out: Any = None, dtype: Any = None) -> Any:
    """Return x / (1 - p) where it is kept, and exactly 0 where it is dropped, whatever x holds there (Srivastava et al. 2014).

    What is dropped is a function of seed, offset and an element's index i in C order alone: the same on every device,
    for every shape of as many elements, layout and dtype. No mask is stored: the gradient is dropout(dy, p) of the same
    seed and offset. Element i is dropped if its word < floor(p * 2^32). The word is number i % 4 of the four that Philox4x32-10
    (Salmon et al. 2011) makes of the counter (c mod 2^32, c div 2^32, 0, 0) with c = (offset + i div 4) mod 2^64, and
    of the key (seed mod 2^32, seed div 2^32). So a call uses the counters offset to offset + ceil(x.size / 4) - 1, and the
    next one of the same seed begins behind them.

    p is 0 to 1; at 1 all is dropped. seed and offset are 0 to 2^64 - 1. x is an array of any shape; dtypes, `out` and errors
    are as in bias_gelu.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    drop = checked_dropout(p if type(p) is float else finite("p", p, PROBABILITY), seed, offset)
    words = (drop.offset, round_keys(drop.seed), *threshold_and_factors(drop.p))
    signature, made = bound_calls.thread.calls.again((x, out), ("dropout", dtype), words)
    if made is not None:
        return made[0] if out is None else out
    call = check_each(x, out=out, dtype=dtype)
    return _run(call, Each(dropout=drop), {"x": x, "out": out}, DROPOUT_SCALARS, signature)


def _gelu(approximate: str) -> str:
    """Return which of reference.ACTIVATIONS is meant."""
    if type(approximate) is str and approximate in GELUS:
        return GELUS[approximate]
    return GELUS[choice("approximate", approximate, tuple(GELUS), "use 'none' or 'tanh'")]


def _with_bias(x: Any, bias: Any, activation: str, out: Any, dtype: Any) -> Any:
    calls = bound_calls.thread.calls
    signature, made = calls.again((x, bias, out), (activation, None, dtype))
    if made is not None:
        return made[0] if out is None else out
    call = check_each(x, out=out, dtype=dtype, columns={"bias": bias}, least_axes=1)
    if call.on_device and is_number(bias):
        return _with_bias(x, call.columns["bias"], activation, call.out, dtype)
    return _run(call, Each(activation, bias), {"x": x, "bias": bias, "out": out}, (), signature)


def _gated(x: Any, bias: Any, activation: str, gate: str, out: Any, dtype: Any) -> Any:
    if type(gate) is not str or gate not in GATES:
        choice("gate", gate, GATES, "use 'first' or 'second', the half that goes through the activation")
    calls = bound_calls.thread.calls
    signature, made = calls.again((x, bias, out), (activation, gate, dtype))
    if made is not None:
        return made[0] if out is None else out
    call = check_each(x, out=out, dtype=dtype, columns={"bias": bias}, least_axes=1, halves=True)
    if call.on_device and is_number(bias):
        return _gated(x, call.columns["bias"], activation, gate, call.out, dtype)
    return _run(call, Each(activation, bias, gate), {"x": x, "bias": bias, "out": out}, (), signature)


def _run(
    call: Call, each: Each, given: Mapping[str, Any], scalars: Sequence[str], signature: Signature | None
) -> Any:
    """Run a checked call of an op on each element. given, scalars: as the signature has them."""
    if call.x.size == 0:
        return call.out
    if call.on_device:
        made = {"out": call.out} if given["out"] is None else {}
        one_kernel.launch(
            call.device, _lowered(call, each), Arrays(given, ("out",), made, scalars=scalars), signature
        )
    else:
        _compute(call, each)
    return call.out


def _lowered(call: Call, each: Each) -> KernelSpec:
    bias = call.columns.get("bias")
    return elementwise_spec(
        each, view(call.x, "x"), view(call.out, "out"), None if bias is None else view(bias, "bias")
    )


def _compute(call: Call, each: Each) -> None:
    """Compute a checked call on NumPy arrays."""
    x, out = call.x, call.out
    given = call.columns.get("bias")
    asking.answer(lambda: _lowered(call, each))
    if each.dropout is not None:
        reference.dropout(x, each.dropout, out)
    elif each.gate is None:
        reference.bias_activation(x, given, str(each.activation), out)
    else:
        cols = out.shape[-1]
        shift = None if given is None else np.broadcast_to(given, (2 * cols,))
        halves = [
            (x[..., half], None if shift is None else shift[half]) for half in (np.s_[:cols], np.s_[cols:])
        ]
        gate, value = halves if each.gate == "first" else halves[::-1]
        reference.gated(*gate, *value, str(each.activation), out)
