"""One batch of an encoder on a device: its shape bucket, its index tensors, and its graph's input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm.bert import device_steps
from cupynorm.bert.buckets import bucket_of, whole_bucket
from cupynorm.bert.host_steps import MIN_NORM
from cupynorm.bert.layers import run_layers
from cupynorm.bert.packing import Packed, pack
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from cupynorm.bert.config import EncoderConfig, Pooling
    from cupynorm.bert.runner import Runner
    from cupynorm.bert.weights import Weights

    Array = np.ndarray[Any, Any]


def forward(
    runner: Runner,
    config: EncoderConfig,
    weights: Weights,
    hidden: Any,
    mask: Any,
    lengths: Any,
) -> Any:
    """Return the last layer's hidden states: CuPy arrays [batch, seq, hidden] in and out."""
    batch, seq, _ = hidden.shape
    bucket, packed, sources, targets = None, None, None, None
    if mask is None and lengths is None and hidden.size:  # short calls usually need no index tensors at all
        bucket = whole_bucket(batch, seq)
    if bucket is None:
        packed = pack((batch, seq), mask, lengths)
    with runner.on_device():
        y = devices.empty(hidden.shape, runner.dtype)
    if packed is not None:
        if not packed.rows.size:
            if y.size:
                y.fill(0)
            return y
        bucket = bucket_of(packed.lengths, packed.where is not None)
        if not bucket.whole or packed.rows.size != batch * seq:
            flat = packed.rows * seq + packed.columns
            sources, targets = np.full(bucket.tokens, -1, np.int32), np.full(batch * seq, -1, np.int32)
            sources[: flat.size] = flat
            targets[flat] = np.arange(flat.size)
    assert bucket is not None  # noqa: S101  it is one of the two above
    return runner.run(
        "forward",
        bucket,
        lambda steps, x: run_layers(config, weights, x, steps),
        None if packed is None else packed.numbers(bucket),
        None if packed is None else packed.where,
        lambda to: device_steps.copied(hidden, to, sources),
        lambda x: device_steps.copied(x, y, targets),
    )


def embed(
    runner: Runner,
    config: EncoderConfig,
    weights: Weights,
    tokens: tuple[Array, Array],
    packed: Packed,
    pooling: Pooling,
    *,
    normalize: bool,
) -> Any:
    """Return one row per sequence, a CuPy array. tokens: the packed tokens and their types."""
    least = MIN_NORM if normalize else None
    with runner.on_device():
        y = devices.empty((packed.shape[0], config.hidden), compute_dtype(runner.dtype))
    if not packed.rows.size:
        if y.size:
            y.fill(0)
        return y
    bucket = bucket_of(packed.lengths, packed.where is not None)
    numbers = packed.numbers(bucket)
    words, kinds = tokens
    for to, given in zip(numbers[-3:], (words, packed.columns, kinds), strict=True):
        to[: given.size] = given
    if pooling == "cls":
        np.minimum(numbers.count, 1, out=numbers.count)

    def calculate(steps: Any, _: Any) -> Any:
        x = steps.layer_norm(steps.look_up(weights.tables), *weights.embedding_norm, config.eps)
        return steps.pool(run_layers(config, weights, x, steps), least)

    return runner.run(
        ("embed", normalize),
        bucket,
        calculate,
        numbers,
        packed.where,
        None,
        lambda x: device_steps.copied(x[: packed.shape[0]], y, None),
    )
