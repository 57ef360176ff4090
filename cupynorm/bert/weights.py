"""An encoder's weights: checked against its config, converted, and placed where it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import compute_dtype, dtype_name, dtype_of
from cupynorm.bert.config import EncoderConfig, Shape
from cupynorm.call.subclasses import check_subclass

Array = np.ndarray[Any, Any]


class Dense(NamedTuple):
    """A matrix product with a bias: y = x weight^T + bias."""

    weight: Array  # [out, in]
    bias: Array


class Norm(NamedTuple):
    """The parameters of a LayerNorm."""

    gamma: Array
    beta: Array


class Layer(NamedTuple):
    """A layer's weights. Each Norm is the one that follows the sum after its sublayer, whatever its name."""

    qkv: Dense
    attention: Dense
    after_attention: Norm
    wide: Dense
    ffn: Dense
    after_ffn: Norm


class Weights(NamedTuple):
    """All weights, on the host or on a device. first_norm: the LayerNorm before the first layer, with norm="pre"."""

    words: Array  # [vocabulary, hidden]
    positions: Array  # [positions, hidden]
    types: Array  # [types, hidden]
    embedding_norm: Norm
    first_norm: Norm | None
    layers: tuple[Layer, ...]

    @property
    def tables(self) -> tuple[Array, Array, Array]:
        """The three tables of embeddings."""
        return self.words, self.positions, self.types


def check_weights(config: EncoderConfig, weights: Mapping[str, Any]) -> None:
    """Raise ValueError, which lists every weight that is missing or unusable."""
    if config.layers > max(1, len(weights)):  # a layer has 16 weights: do not even list so many names
        raise ValueError(f"weights do not fit: there are {len(weights)}, too few for {config.layers} layers")
    problems = [
        problem
        for name, shape in config.shapes().items()
        for problem in [_problem(name, weights.get(name), shape)]
        if problem
    ]
    if problems:
        raise ValueError("weights do not fit: " + "; ".join(problems))


def _problem(name: str, array: Any, shape: Shape) -> str | None:
    """Describe the fault of a weight; None if it is usable."""
    if array is None:
        return f"{name} is missing"
    if not isinstance(array, np.ndarray):
        return f"{name} is not a NumPy array"
    try:
        check_subclass(name, array, on_device=False)
    except TypeError as error:
        return str(error)
    if array.shape != shape:
        return f"{name} has shape {array.shape}, not {shape}"
    try:
        dtype_name(array.dtype)
    except TypeError as error:
        return f"{name}: {error}"
    return None


def converted(config: EncoderConfig, weights: Mapping[str, Any], placed: Callable[[Array], Any]) -> Weights:
    """Return checked weights in the dtypes of the config. `placed` puts a host array where the encoder computes."""
    dtype = dtype_of(config.dtype)
    compute = compute_dtype(dtype)

    def matrix(name: str) -> Any:
        return placed(np.ascontiguousarray(weights[name], dtype))

    # In bfloat16, vectors would cost MiniLM's embeddings more digits than all its matrices do, and save nothing.
    def vector(name: str) -> Any:
        return placed(np.ascontiguousarray(weights[name], compute))

    def norm(name: str) -> Norm:
        return Norm(vector(f"{name}.weight"), vector(f"{name}.bias"))

    def dense(name: str) -> Dense:
        return Dense(matrix(f"{name}.weight"), vector(f"{name}.bias"))

    def joined(*names: str) -> Dense:
        matrices = [np.ascontiguousarray(weights[f"{name}.weight"], dtype) for name in names]
        vectors = [np.ascontiguousarray(weights[f"{name}.bias"], compute) for name in names]
        return Dense(placed(np.concatenate(matrices)), placed(np.concatenate(vectors)))

    words, positions, types = (
        matrix(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type")
    )
    embedding_norm = norm("embeddings.LayerNorm")
    prefixes = [f"encoder.layer.{number}" for number in range(config.layers)]
    norms = [
        norm(f"{prefix}.{name}")
        for prefix in prefixes
        for name in ("attention.output.LayerNorm", "output.LayerNorm")
    ]
    first_norm = None
    if config.norm == "pre":  # the norm after a sum is the one before the next sublayer
        first_norm, *norms = [*norms, norm("encoder.LayerNorm")]
    layers = tuple(
        Layer(
            qkv=joined(*(f"{prefix}.attention.self.{name}" for name in ("query", "key", "value"))),
            attention=dense(f"{prefix}.attention.output.dense"),
            after_attention=norms[2 * number],
            wide=dense(f"{prefix}.intermediate.dense"),
            ffn=dense(f"{prefix}.output.dense"),
            after_ffn=norms[2 * number + 1],
        )
        for number, prefix in enumerate(prefixes)
    )
    return Weights(words, positions, types, embedding_norm, first_norm, layers)
