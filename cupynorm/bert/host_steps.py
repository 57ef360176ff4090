"""The encoder's steps on NumPy arrays. device_steps.py has the same steps by the same names for a device.

float16 and bfloat16 are computed in float32, float64 in float64. Results have x's dtype unless a step says otherwise.
Arguments are not checked here.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype
from cupynorm.bert.packing import Packed, SameLength
from cupynorm.host import reference
from cupynorm.ops.heads import add_qkv_bias, merge_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.bert.weights import Norm

Array = np.ndarray[Any, Any]

SCORE_BYTES = 32 << 20  # bound on the attention scores that exist at a time, unless one sequence has more
MIN_NORM = 1e-12  # a pooled row is divided by its norm, or by this if that is smaller
BLOCK = 1 << 16  # elements of a step's temporaries: they fit a core's L2 cache
REACH = 14  # _phi() covers -14 to 14: Phi(-14) is below float32's smallest number
STEPS = 256  # points of _phi() per unit


def linear(x: Array, weight: Array) -> Array:
    """Return x weight^T: [tokens, in] and [out, in] give [tokens, out]. The next step adds the bias."""
    compute = compute_dtype(x.dtype)
    y: Array = x.astype(compute, copy=False) @ weight.T.astype(compute, copy=False)
    return y.astype(x.dtype, copy=False)


def matmul(a: Array, b: Array) -> Array:
    """Return the products of two stacks of matrices in the compute type: float32, or float64 for float64."""
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
    """Return LayerNorm(x + bias + residual) and, with return_sum, x + bias + residual. Each is rounded once."""
    compute = compute_dtype(x.dtype)
    total = np.add(x, residual, dtype=compute, casting="same_kind")
    total += bias.astype(compute, copy=False)
    y = np.empty(x.shape, x.dtype)
    reference.layer_norm(total, gamma, beta, 1, eps, y)
    return y, total.astype(x.dtype, copy=False) if return_sum else None


def bias_gelu(x: Array, bias: Array, *, approximate: str) -> Array:
    """Return GELU(x + bias), with the distribution function ("none") or its tanh form ("tanh").

    Hendrycks and Gimpel 2016, "Gaussian Error Linear Units": x Phi(x), about x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715
    x^3))).
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
    # third-order Taylor series of Phi about the nearest point of the table; the next term is below 1e-12
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
    values = np.array([math.erfc(-t / math.sqrt(2)) / 2 for t in points])  # erfc is accurate for small values
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
    """Return softmax(scale * x) over the last axis, of what `where` keeps. The rest is 0, even in an empty row."""
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


def embeddings(
    tables: tuple[Array, Array, Array],
    indices: tuple[Array, Array, Array],
    norm: Norm,
    eps: float,
    dtype: Dtype,
) -> Array:
    """Return LayerNorm of the sums of one row of each table, for each token."""
    (words, positions, types), (word, position, type_) = tables, indices
    total = words[word].astype(compute_dtype(dtype))
    total += positions[position]
    total += types[type_]
    return layer_norm(total, *norm, eps).astype(dtype, copy=False)


def pool(hidden: Array, packed: Packed, pooling: str, *, normalize: bool) -> Array:
    """Return one row per sequence: the mean of its tokens, or the first ("cls"). A sequence without tokens gives 0."""
    compute = compute_dtype(hidden.dtype)
    pooled = np.zeros((packed.shape[0], hidden.shape[1]), compute)
    nonempty = packed.lengths > 0
    order, starts, lengths = packed.order[nonempty], packed.starts[nonempty], packed.lengths[nonempty]
    if order.size:
        if pooling == "cls":
            pooled[order] = hidden[starts]
        else:
            sums = np.add.reduceat(hidden.astype(np.float64), starts, axis=0)
            pooled[order] = sums / lengths[:, np.newaxis]
    if normalize:
        norms = np.sqrt(np.square(pooled, dtype=np.float64).sum(axis=1, keepdims=True))
        pooled = (pooled / np.maximum(norms, MIN_NORM)).astype(compute)
    return pooled


class HostSteps:
    """The steps of one batch of packed tokens on NumPy arrays, with the interface of device_steps.Steps."""

    linear = staticmethod(linear)
    layer_norm = staticmethod(layer_norm)
    add_layer_norm = staticmethod(add_layer_norm)
    bias_gelu = staticmethod(bias_gelu)

    def __init__(self, dtype: Dtype, packed: Packed) -> None:
        self._dtype, self._packed = dtype, packed

    def attention(self, x: Array, weight: Array, bias: Array, heads: int) -> Array:
        """Return softmax(q k^T / sqrt(head size)) v, by heads and sequences, without the product that follows."""
        scale = (x.shape[1] // heads) ** -0.5
        qkv = linear(x, weight)
        context = np.empty_like(x)
        for group in self._groups(heads):
            part = slice(group.start, group.stop)
            shape = (group.sequences, group.length, -1)
            q, k, v = add_qkv_bias(qkv[part].reshape(shape), bias, heads=heads)
            where = self._packed.where
            if where is not None:  # then all tokens are packed, and sequence i begins at token i * seq
                first = group.start // group.length
                where = where[first : first + group.sequences]
            scores = matmul(q, k.swapaxes(-1, -2))
            weights = masked_softmax(scores, scale, where, self._dtype)
            merge_heads(matmul(weights, v), out=context[part].reshape(shape))
        return context

    def _groups(self, heads: int) -> Iterator[SameLength]:
        """Yield sequences of one length, split so that their scores stay below SCORE_BYTES."""
        for group in self._packed.groups():
            bytes_of_one = heads * group.length**2 * compute_dtype(self._dtype).itemsize
            step = max(1, SCORE_BYTES // bytes_of_one)
            for first in range(0, group.sequences, step):
                count = min(step, group.sequences - first)
                yield SameLength(group.start + first * group.length, count, group.length)
