"""The encoder's steps on NumPy arrays, with arguments as kernels take them: a device needs other steps, and no other encoder.

float16 and bfloat16 are computed in float32, float64 in float64; what comes back has x's dtype unless the step says
otherwise. Nothing is checked here.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype
from cupynorm.host import reference

Array = np.ndarray[Any, Any]

BLOCK = 1 << 16  # elements of a step's temporaries: what a core's L2 cache holds
REACH, STEPS = (
    14,
    256,
)  # of the table below: Phi(-14) is less than float32's least number; 256 steps to each unit


def linear(x: Array, weight: Array) -> Array:
    """Return x weight^T: [tokens, in] and [out, in] give [tokens, out]. A bias is added by the step that follows."""
    compute = compute_dtype(x.dtype)
    y: Array = x.astype(compute, copy=False) @ weight.T.astype(compute, copy=False)
    return y.astype(x.dtype, copy=False)


def matmul(a: Array, b: Array) -> Array:
    """Return the products of two stacks of matrices as they were summed, in float32 (float64 for float64)."""
    compute = compute_dtype(a.dtype, b.dtype)
    y: Array = a.astype(compute, copy=False) @ b.astype(compute, copy=False)
    return y


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    """Return LayerNorm of the rows of x, as cupynorm.layer_norm does."""
    y = np.empty_like(x)
    reference.layer_norm(x, gamma, beta, 1, eps, y)
    return y


def add_layer_norm(
    x: Array, residual: Array, gamma: Array, beta: Array, *, bias: Array, eps: float, return_sum: bool
) -> tuple[Array, Array | None]:
    """Return LayerNorm(x + bias + residual) and, if it is asked for, x + bias + residual, each rounded once from the same sum."""
    compute = compute_dtype(x.dtype)
    total = np.add(x, residual, dtype=compute, casting="same_kind")
    total += bias.astype(compute, copy=False)
    y = np.empty(x.shape, x.dtype)
    reference.layer_norm(total, gamma, beta, 1, eps, y)
    return y, total.astype(x.dtype, copy=False) if return_sum else None


def bias_gelu(x: Array, bias: Array, *, approximate: str) -> Array:
    """Return GELU(x + bias), with the distribution function ("none") or its tanh form ("tanh").

    Hendrycks and Gimpel 2016, "Gaussian Error Linear Units": x Phi(x), about x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    """
    gelu = _gelu_tanh if approximate == "tanh" else _gelu
    shift = bias.astype(compute_dtype(x.dtype), copy=False)
    y = np.empty_like(x)
    rows = max(1, BLOCK // max(1, x.shape[-1]))
    for start in range(0, len(x), rows):
        block = slice(start, start + rows)
        y[block] = gelu(x[block] + shift)
    return y


@np.errstate(invalid="ignore", over="ignore")
def _gelu(x: Array) -> Array:
    # Phi's Taylor series of third order about the nearest of a table's points: its next term is below 1e-12
    rows = _phi()
    at = np.clip(x, -REACH, REACH) * STEPS
    near = np.rint(at)
    index = near.astype(np.int32) + REACH * STEPS
    away = (at - near) * x.dtype.type(1 / STEPS)
    phi: Array = rows[3].astype(x.dtype).take(index, mode="clip")
    for row in rows[2::-1]:
        phi *= away
        phi += row.astype(x.dtype).take(index, mode="clip")
    phi *= x
    return phi


@functools.cache
def _phi() -> Array:
    """Return, at each point t of the table, the coefficients of Phi(t + d) in powers of d up to the third."""
    points = np.arange(-REACH * STEPS, REACH * STEPS + 1) / STEPS
    values = np.array(
        [math.erfc(-t / math.sqrt(2)) / 2 for t in points]
    )  # erfc keeps the digits of small ones
    density = np.exp(-points * points / 2) / math.sqrt(2 * math.pi)
    return np.stack([values, density, -points * density / 2, (points * points - 1) * density / 6])


@np.errstate(over="ignore")
def _gelu_tanh(x: Array) -> Array:
    kind = x.dtype.type
    inner = x * x
    inner *= kind(0.044715)
    inner += kind(1)
    inner *= x
    inner *= kind(math.sqrt(2 / math.pi))
    y: Array = np.tanh(inner, out=inner)
    y += kind(1)
    y *= x
    y *= kind(0.5)
    return y


def masked_softmax(x: Array, scale: float, where: Array | None, dtype: Dtype) -> Array:
    """Return softmax(scale * x) over the last axis, where True keeps; what is dropped is 0, also in a row with nothing kept."""
    y: Array = x * x.dtype.type(scale)
    if where is not None:
        np.copyto(y, -np.inf, where=~where)
    top = y.max(axis=-1, keepdims=True, initial=-np.inf)
    top[np.isneginf(top)] = 0
    y -= top
    np.exp(y, out=y)
    total = y.sum(axis=-1, keepdims=True)
    total[total == 0] = 1
    y /= total
    return y.astype(dtype, copy=False)
