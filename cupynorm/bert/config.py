"""The sizes and options of a BERT encoder, and the names and shapes of its weights."""

from __future__ import annotations

import dataclasses
from typing import Literal

from cupynorm._dtypes import dtype_of
from cupynorm._options import choice, eps_of, plainly

Shape = tuple[int, ...]
Pooling = Literal["mean", "cls"]
POOLINGS = ("mean", "cls")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and options of a BERT encoder.

    Parameters
    ----------
    hidden : int
        Elements of a token: heads * head size.
    heads : int
        Heads of the attention.
    layers : int
        Layers of the encoder.
    ffn : int
        Width between the two products of the feed-forward step.
    vocabulary, positions : int
        Rows of the tables of word and position embeddings.
    types : int, default 2
        Rows of the table of token type embeddings.
    norm : {"post", "pre"}, default "post"
        "post" is LayerNorm(x + f(x)), as in BERT; "pre" is x + f(LayerNorm(x)), with a final LayerNorm after the last
        layer.
    approximate : {"none", "tanh"}, default "none"
        GELU by the normal distribution function, or by its tanh approximation.
    eps : float, default 1e-12
        Added to the variance in every LayerNorm.
    dtype : str, default "float32"
        The dtype of matrices and of results between steps: float16, bfloat16, float32 or float64. Sums, scores,
        statistics, biases, gamma and beta are float32 (float64 for float64).

    Raises
    ------
    ValueError
        For sizes below 1, a hidden that is not a multiple of heads, an eps that is negative or not finite, and unknown
        names.
    TypeError
        For a dtype that is not supported, an eps that is not a number, and names that are not strings.

    Examples
    --------
    >>> config = EncoderConfig(hidden=384, heads=12, layers=6, ffn=1536, vocabulary=30522, positions=512)
    >>> config.head_size
    32
    >>> config.shapes()["encoder.layer.0.intermediate.dense.weight"]
    (1536, 384)
    """

    hidden: int
    heads: int
    layers: int
    ffn: int
    vocabulary: int
    positions: int
    types: int = 2
    norm: Literal["post", "pre"] = "post"
    approximate: Literal["none", "tanh"] = "none"
    eps: float = 1e-12
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "layers", "ffn", "vocabulary", "positions", "types"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {plainly(value)}: it must be an integer, at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}: not a multiple of {self.heads} heads")
        for name, known in {"norm": ("post", "pre"), "approximate": ("none", "tanh")}.items():
            choice(name, getattr(self, name), known, f"use {' or '.join(known)}")
        eps_of(self.eps)
        dtype_of(self.dtype)

    @property
    def head_size(self) -> int:
        """Elements of a head: hidden / heads."""
        return self.hidden // self.heads

    def shapes(self) -> dict[str, Shape]:
        """Return the names of all weights with their shapes.

        Returns
        -------
        dict of str to tuple of int
            The names are those of Hugging Face's BERT, without "bert.". A matrix is [out, in]. With ``norm="pre"``, the
            LayerNorm of a sublayer is the one before it, and "encoder.LayerNorm" is the last one.
        """
        n, wide = self.hidden, self.ffn
        shapes: dict[str, Shape] = {
            "embeddings.word_embeddings.weight": (self.vocabulary, n),
            "embeddings.position_embeddings.weight": (self.positions, n),
            "embeddings.token_type_embeddings.weight": (self.types, n),
            **_norm_shapes("embeddings.LayerNorm", n),
        }
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            for name in ("query", "key", "value"):
                shapes |= _dense_shapes(f"{at}.attention.self.{name}", n, n)
            shapes |= _dense_shapes(f"{at}.attention.output.dense", n, n)
            shapes |= _norm_shapes(f"{at}.attention.output.LayerNorm", n)
            shapes |= _dense_shapes(f"{at}.intermediate.dense", wide, n)
            shapes |= _dense_shapes(f"{at}.output.dense", n, wide)
            shapes |= _norm_shapes(f"{at}.output.LayerNorm", n)
        if self.norm == "pre":
            shapes |= _norm_shapes("encoder.LayerNorm", n)
        return shapes


def _dense_shapes(name: str, out: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out, columns), f"{name}.bias": (out,)}


def _norm_shapes(name: str, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (columns,), f"{name}.bias": (columns,)}
