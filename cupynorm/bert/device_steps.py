"""The encoder's steps on a device, by kernels and cuBLAS. host_steps.py has them for NumPy arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm.bert import few_tokens, packed_attention
from cupynorm.bert.buckets import Bucket, Numbers
from cupynorm.invoke import head_calls
from cupynorm.lower.mirrors import POINTER, Struct
from cupynorm.lower.vectors import aligned_elements
from cupynorm.ops.add_norm import add_layer_norm
from cupynorm.ops.elementwise import bias_gelu
from cupynorm.ops.heads import add_qkv_bias, merge_heads
from cupynorm.ops.norm import layer_norm
from cupynorm.ops.softmax import softmax
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynorm.bert.gemm import Blas

BLOCK = 256  # kEncoderBlock
MOST_BLOCKS = 2048  # blocks of a grid-stride loop
# Attention computes so many bytes of scores at a time: they stay in an H200's L2 cache until they are read.
SCORE_BYTES = 32 << 20


class Steps:
    """The steps between packed tokens of one bucket; those of host_steps.HostSteps by name, and attention."""

    def __init__(
        self, blas: Blas, dtype: Dtype, device: int, bucket: Bucket, numbers: Numbers, where: Any
    ) -> None:
        self._blas, self._dtype, self._device = blas, dtype, device
        self._bucket, self._numbers, self._where = bucket, numbers, where

    def linear(self, x: Any, weight: Any) -> Any:
        """Return x weight^T."""
        y = devices.empty((x.shape[0], weight.shape[0]), x.dtype)
        self._blas.linear(x, weight, y)
        return y

    def layer_norm(self, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        """Return LayerNorm of the rows of x, in the encoder's dtype."""
        return layer_norm(x, gamma, beta, eps=eps, dtype=self._dtype)

    def add_layer_norm(
        self, x: Any, residual: Any, gamma: Any, beta: Any, *, bias: Any, eps: float, return_sum: bool
    ) -> tuple[Any, Any]:
        """Return LayerNorm(x + bias + residual) and, if it is asked for, x + bias + residual."""
        made = add_layer_norm(x, residual, gamma, beta, bias=bias, eps=eps, return_sum=return_sum)
        return made if return_sum else (made, None)

    def bias_gelu(self, x: Any, bias: Any, *, approximate: str) -> Any:
        """Return GELU(x + bias), in place."""
        return bias_gelu(x, bias, approximate=approximate, out=x)

    def attention(self, x: Any, weight: Any, bias: Any, heads: int) -> Any:
        """Return softmax(q k^T / sqrt(head size)) v, by heads and sequences, without the product that follows.

        One launch without padding where attention.cuh supports the shapes; otherwise two products, with the scores in
        memory between them.
        """
        bucket, blas = self._bucket, self._blas
        hidden = x.shape[1]
        shape = (bucket.sequences, heads, bucket.length, hidden // heads)
        qkv = self.linear(x, weight)
        if self._attends(heads, shape[3]):
            return self.attend(qkv, bias, heads)
        if bucket.whole:
            parts = add_qkv_bias(qkv.reshape(*shape[::2], 3 * hidden), bias, heads=heads)
        else:
            parts = devices.empty((3, *shape), x.dtype)
            head_calls.split_packed(qkv, bias, self._numbers.rows, heads, parts)
        del qkv
        q, k, v = parts
        context = devices.empty(shape, x.dtype)
        compute = compute_dtype(x.dtype)
        for sequences, of_heads, rows in pieces(*shape[:3], compute.itemsize):
            some = q[sequences, of_heads, rows]
            scores = devices.empty((*some.shape[:3], bucket.length), compute)
            blas.products(some, k[sequences, of_heads], scores, transposed=True, alpha=shape[3] ** -0.5)
            weights = softmax(scores, dtype=x.dtype, **self._masks(sequences, rows))
            blas.products(weights, v[sequences, of_heads], context[sequences, of_heads, rows])
        if bucket.whole:
            return merge_heads(context).reshape(-1, hidden)
        return head_calls.merge_packed(context, self._numbers.places, devices.empty(x.shape, x.dtype))

    def _attends(self, heads: int, head_size: int) -> bool:
        bucket, limits = self._bucket, devices.limits_of(self._device)
        fits = packed_attention.fits(self._dtype, head_size, heads, bucket.sequences, limits)
        return fits and not bucket.looks

    def attend(self, qkv: Any, bias: Any, heads: int) -> Any:
        """Return attention in one launch."""
        bucket = self._bucket
        spans = None if bucket.whole else (self._numbers.begin, self._numbers.lengths)
        out = devices.empty((qkv.shape[0], qkv.shape[1] // 3), qkv.dtype)
        return packed_attention.attend(qkv, bias, heads, bucket.sequences, bucket.length, out, spans)

    def takes_few(self, hidden: int, wide: int, heads: int) -> bool:
        """Say whether there are so few tokens that `product` and `attend` are the fastest."""
        limits = devices.limits_of(self._device)
        fits = few_tokens.fits(self._dtype, self._bucket.tokens, hidden, wide, limits)
        return fits and self._attends(heads, hidden // heads)

    def product(self, x: Any, weight: Any, *, keep: bool = False, **options: Any) -> tuple[Any, Any]:
        """Return what few_tokens.multiply gives and, if it is to be kept, LayerNorm of x."""
        y = devices.empty((x.shape[0], weight.shape[0]), x.dtype)
        normed = devices.empty(x.shape, x.dtype) if keep else None
        return few_tokens.multiply(x, weight, y, normed=normed, **options), normed

    def _masks(self, sequences: slice, rows: slice) -> dict[str, Any]:
        if self._bucket.looks:
            return {"where": self._where[sequences, :, rows]}
        if self._bucket.whole:
            return {}
        return {"lengths": self._numbers.lengths[sequences].reshape(-1, 1, 1)}

    def look_up(self, tables: tuple[Any, Any, Any]) -> Any:
        """Return the sums of the packed tokens' embeddings, in float32 (float64)."""
        return look_up(tables, self._numbers.token, self._numbers.place, self._numbers.type)

    def pool(self, x: Any, least: float | None) -> Any:
        """Return the mean of each sequence's tokens, in float32 (float64), normalized unless `least` is None."""
        numbers = self._numbers
        out = devices.empty((self._bucket.sequences, x.shape[1]), compute_dtype(x.dtype))
        vector = math.gcd(_widest(x.dtype), x.shape[1], aligned_elements(x.data.ptr, x.dtype))
        fields = [(name, POINTER) for name in ("x", "y", "start", "count")]
        dtype = np.dtype([*fields, ("vectors", np.int64), ("most", out.dtype)], align=True)
        pointers = (x.data.ptr, out.data.ptr, numbers.start.data.ptr, numbers.count.data.ptr)
        kinds = f"{cpp(x.dtype)}, {cpp(out.dtype)}"
        whole = Struct(
            f"cupynorm::Pool<{kinds}>", dtype, (*pointers, x.shape[1] // vector, 1 / (least or 1.0))
        )
        _launch(
            f"cupynorm::pool<{vector}, {compiler.template_argument(least is not None)}, {kinds}>",
            whole,
            out.shape[0],
        )
        return out


def pieces(sequences: int, heads: int, length: int, itemsize: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut attention into sequences, heads and queries whose scores are in memory together."""
    of_one = length * length * itemsize
    if heads * of_one <= SCORE_BYTES:
        step = SCORE_BYTES // (heads * of_one)
        for first in range(0, sequences, step):
            yield slice(first, min(first + step, sequences)), slice(None), slice(None)
        return
    together = max(1, SCORE_BYTES // of_one)
    queries = min(length, max(1, SCORE_BYTES // (length * itemsize)))
    for sequence in range(sequences):
        for first in range(0, heads, together):
            for row in range(0, length, queries):
                end = slice(first, min(first + together, heads))
                yield slice(sequence, sequence + 1), end, slice(row, min(row + queries, length))


def look_up(tables: tuple[Any, Any, Any], token: Any, place: Any, type_: Any) -> Any:
    """Return words[token] + places[place] + types[type], in float32 (float64). Nothing is checked."""
    words = tables[0]
    compute = compute_dtype(words.dtype)
    cols = words.shape[1]
    y = devices.empty((len(token), cols), compute)
    aligned = (aligned_elements(each.data.ptr, each.dtype) for each in tables)
    vector = math.gcd(_widest(words.dtype), cols, *aligned)
    fields = [(name, POINTER) for name in ("words", "places", "types", "token", "place", "type", "y")]
    dtype = np.dtype([*fields, ("tokens", np.int64), ("vectors", np.int64)], align=True)
    pointers = tuple(each.data.ptr for each in (*tables, token, place, type_, y))
    kinds = f"{cpp(words.dtype)}, {cpp(compute)}"
    whole = Struct(f"cupynorm::LookUp<{kinds}>", dtype, (*pointers, len(token), cols // vector))
    _launch(f"cupynorm::look_up<{vector}, {kinds}>", whole, -(-len(token) * (cols // vector) // BLOCK))
    return y


def embeddings(
    tables: tuple[Any, Any, Any], numbers: tuple[np.ndarray[Any, Any], ...], norm: tuple[Any, Any], eps: float
) -> Any:
    """Return LayerNorm of the sums of the tables' rows of these numbers, in the tables' dtype."""
    total = look_up(tables, *(uploaded(each.astype(np.int32)) for each in numbers))
    return layer_norm(total, *norm, eps=eps, dtype=tables[0].dtype)


def differ(x: Any, y: Any) -> bool:
    """Say whether arrays of the same size differ in a bit, and wait for the answer.

    Bytes after the last whole vector of 16 bytes are not compared.
    """
    found = uploaded(np.zeros(1, np.int32))
    dtype = np.dtype([*((name, POINTER) for name in ("x", "y", "found")), ("vectors", np.int64)], align=True)
    vectors = x.nbytes // 16
    whole = Struct("cupynorm::Differ", dtype, (x.data.ptr, y.data.ptr, found.data.ptr, vectors))
    _launch("cupynorm::differ<4>", whole, min(-(-vectors // BLOCK), MOST_BLOCKS))
    return bool(devices.cupy().asnumpy(found)[0])


def _widest(dtype: Dtype) -> int:
    return 16 // dtype.itemsize


def _launch(expression: str, arguments: Struct, grid: int) -> None:
    """Launch a kernel of bert/encoder.cuh on the current device and stream."""
    device = devices.present_device()
    text = compiler.text("bert/encoder.cuh", arguments.cpp, arguments.dtype.itemsize)
    pointer = compiler.kernel(device, text, expression, 0).pointer
    held = np.array([arguments.values], dtype=arguments.dtype)
    parameters = np.array([held.ctypes.data], np.uintp)
    devices.launch_early(pointer, (grid, 1, 1), BLOCK, 0, parameters.ctypes.data)


def upload(to: Any, array: np.ndarray[Any, Any]) -> None:
    """Copy to a contiguous array on the device. The driver has read all of `array` when this returns."""
    if array.nbytes:
        to.data.copy_from_host_async(array.ctypes.data, array.nbytes)


def uploaded(array: np.ndarray[Any, Any]) -> Any:
    """Return a copy on the current device."""
    made = devices.empty(array.shape, array.dtype)
    upload(made, np.ascontiguousarray(array))
    return made


def copied(x: Any, out: Any, rows: np.ndarray[Any, Any] | None) -> Any:
    """Write hidden states x, or the rows of x with these numbers, to out in out's dtype. -1 gives a row of zeros."""
    return head_calls.gather(x, None if rows is None else uploaded(rows), out) if out.size else out
