"""What users write: read by test_typing.py, which asks a strict type checker about it. It is never run."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import assert_type

import cupynorm
from cupynorm import (
    Quantize,
    add_layer_norm,
    add_rms_norm,
    cross_entropy,
    layer_norm,
    layer_norm_backward,
    log_softmax,
    logsumexp,
    rms_norm,
    softmax,
)

x = np.zeros((2, 3, 4), np.float32)
gamma = np.ones(4, np.float32)
flag = bool(x.size)

# results follow from return_stats and quantize
assert_type(layer_norm(x, gamma), Any)
assert_type(layer_norm(x, gamma, gamma, return_stats=True), tuple[Any, Any, Any])
assert_type(layer_norm(x, quantize="int8"), tuple[Any, Any])
assert_type(layer_norm(x, quantize="int8", return_stats=True), tuple[Any, Any, Any, Any])
assert_type(layer_norm(x, quantize=Quantize("int8", 0.5)), Any)
assert_type(layer_norm(x, return_stats=flag), Any)
assert_type(rms_norm(x, gamma, return_stats=True), tuple[Any, Any])
assert_type(rms_norm(x, gamma, quantize="int8", return_stats=True), tuple[Any, Any, Any])
assert_type(softmax(x), Any)
assert_type(softmax(x, quantize="float8_e5m2"), tuple[Any, Any])
assert_type(softmax(x, -1, causal=True, quantize=None), Any)
assert_type(add_layer_norm(x, x), tuple[Any, Any])
assert_type(add_layer_norm(x, x, return_sum=False), Any)
assert_type(add_layer_norm(x, x, return_stats=True), tuple[Any, Any, Any, Any])
assert_type(add_layer_norm(x, x, return_sum=False, return_stats=True), tuple[Any, Any, Any])
assert_type(add_layer_norm(x, x, quantize="int8"), tuple[Any, Any, Any])
assert_type(add_layer_norm(x, x, quantize="int8", return_sum=False), tuple[Any, Any])
assert_type(add_layer_norm(x, x, quantize=Quantize("int8", 1.0)), Any)
assert_type(add_rms_norm(x, x), tuple[Any, Any])
assert_type(add_rms_norm(x, x, return_stats=True), tuple[Any, Any, Any])
assert_type(add_rms_norm(x, x, return_sum=flag), Any)
y, mean, rstd = layer_norm(x, gamma, 0.5, axis=(-2, -1), eps=1e-6, return_stats=True)
q, scales = rms_norm(x, 1.0, quantize="int8")

# every keyword
softmax(
    x,
    axis=-1,
    out=x,
    dtype="float32",
    plan=None,
    scale=0.125,
    where=x > 0,
    lengths=[1, 2, 3],
    left_padded=True,
    causal=True,
    causal_offset=2,
    window=(4, None),
    bias=x,
    quantize=None,
)
log_softmax(x, -1, scale=2, causal_offset=-1, window=3, plan="warp")
add_layer_norm(
    x, x, gamma, gamma, bias=gamma, alpha=0.5, eps=1e-6, dropout=0.1, seed=1, offset=2, out=x, plan=None
)
cupynorm.dropout(x, 0.1, seed=1)
cupynorm.bias_gelu(x, gamma, axis=None, approximate="tanh")
cupynorm.bias_silu_backward(x, x, gamma, axis=(0, 1), add_to=gamma)
cupynorm.swiglu(x, axis=1, gate="second")
assert_type(cross_entropy(x, x, plan="warp"), Any)
assert_type(cross_entropy(x, x, return_grad=True, dloss=0.5, grad=x, plan=None), tuple[Any, Any])
logsumexp(x, causal=True, keepdims=True, plan="block")
layer_norm_backward(x, x, gamma, axis=-1, eps=1e-6, parameters=False, out=x, add_to=None, plan="shared")
fused = cupynorm.fuse(layer_norm, load=lambda x, r: x + r)
fused(x, x, gamma=gamma)

# what is wrong
one, two = layer_norm(x, return_stats=True)  # wrong: misc
print(layer_norm(x, quantize="int8").shape)  # wrong: attr-defined
layer_norm(x, gama=gamma)  # wrong: call-overload
layer_norm(x, gamma, gamma, -1)  # wrong: call-overload
layer_norm(x, eps="1e-5")  # wrong: call-overload
rms_norm(x, return_stats=1)  # wrong: call-overload
softmax(x, causal=3)  # wrong: call-overload
softmax(x, causal_offset="3")  # wrong: call-overload
softmax(x, casual=True)  # wrong: call-overload
softmax(x, quantize=8)  # wrong: call-overload
softmax(x, quantize="int8").sum()  # wrong: attr-defined
log_softmax(x, quantize="int8")  # wrong: call-arg
log_softmax(x, causal=1)  # wrong: arg-type
log_softmax(x, -1, x)  # wrong: call-arg
add_layer_norm(x)  # wrong: call-overload
add_rms_norm(x, x, dropout="much")  # wrong: call-overload
cupynorm.dropout(x, 0.1)  # wrong: call-arg
layer_norm_backward(x, x, plan=3)  # wrong: arg-type
cross_entropy(x, x, plan=b"warp")  # wrong: call-overload
cupynorm.bias_gelu(x, None, approximate=True)  # wrong: arg-type
cupynorm.geglu(x, axis=(0, 1))  # wrong: arg-type
