"""BertEncoder: the transformer encoder of BERT, from tokens to sentence embeddings, on packed tokens."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cupynorm import _install
from cupynorm._dtypes import Dtype, compute_dtype, dtype_name, dtype_of
from cupynorm._options import boolean, choice, eps_of, plainly
from cupynorm.bert import device_steps
from cupynorm.bert import host_steps as steps
from cupynorm.call.arguments import array_of_list, check_dtype, check_elements
from cupynorm.call.subclasses import check_subclass
from cupynorm.ops.heads import add_qkv_bias, merge_heads
from cupynorm.runtime import devices
from cupynorm.tools.files import FileError

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Pooling = Literal["mean", "cls"]
DeviceName = Literal["auto", "cpu", "gpu"]
POOLINGS = ("mean", "cls")

SCORE_BYTES = 32 << 20  # of the scores of attention that exist at the same time, unless one sequence has more
LEAST_NORM = 1e-12  # what a pooled row is divided by if its own norm is less
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_python": "none"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The shape of an encoder, and its arithmetic.

    hidden: elements of a token, heads * head size. ffn: the width between the two products of the feed-forward step.
    vocabulary, positions, types: rows of the three tables of embeddings. norm: "post" is LayerNorm(x + f(x)), as in BERT;
    "pre" is x + f(LayerNorm(x)), with one more LayerNorm after the last layer. approximate: GELU by the distribution
    function ("none") or by its tanh form ("tanh"). eps: of every LayerNorm. dtype: of matrices and of what lies between
    the steps; sums, scores, statistics, biases, gamma and beta are in float32 (float64 for float64).

    Raises ValueError for sizes below 1, a hidden that is no multiple of heads, an eps that is negative or not finite, and
    unknown names; TypeError for a dtype that is not supported, an eps that is no number and names that are no str.
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
            raise ValueError(f"hidden is {self.hidden}: no multiple of {self.heads} heads")
        for name, known in {"norm": ("post", "pre"), "approximate": ("none", "tanh")}.items():
            choice(name, getattr(self, name), known, f"use {' or '.join(known)}")
        eps_of(self.eps)
        dtype_of(self.dtype)

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    def shapes(self) -> dict[str, Shape]:
        """Return the names of all weights, as Hugging Face's BERT has them (without "bert."), with their shapes.

        A matrix is [out, in]. With norm="pre", a sublayer's LayerNorm is the one before it, and encoder.LayerNorm the last.
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


class _Dense(NamedTuple):
    weight: Array  # [out, in]
    bias: Array


class _Norm(NamedTuple):
    gamma: Array
    beta: Array


class _Layer(NamedTuple):
    """A layer's weights; each norm is the one that follows the sum after its sublayer, wherever it was named."""

    qkv: _Dense
    attention: _Dense
    after_attention: _Norm
    wide: _Dense
    ffn: _Dense
    after_ffn: _Norm


class _Bucket(NamedTuple):
    """Sequences of one length that lie side by side among the packed tokens."""

    start: int  # the first one's first token
    sequences: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.sequences * self.length


class _Packed(NamedTuple):
    """Which tokens are computed, and how they lie: those that are kept only, the shortest sequences first."""

    shape: tuple[int, int]  # of the batch as it was given
    rows: Array  # of each packed token: its sequence
    columns: Array  # of each packed token: its place in the sequence, which is its position
    order: Array  # the sequences, as they are packed
    lengths: Array  # of those
    where: Array | None = None  # [batch, 1, seq, seq], where the mask is no matter of packing

    @property
    def starts(self) -> Array:
        """The first packed token of each packed sequence."""
        starts: Array = np.cumsum(self.lengths) - self.lengths
        return starts

    def buckets(self) -> list[_Bucket]:
        """Return the lengths that there are, with their sequences; no sequence of length 0 is in any."""
        found, start = [], 0
        for length, count in zip(*np.unique(self.lengths, return_counts=True), strict=True):
            if length:
                found.append(_Bucket(start, int(count), int(length)))
                start = found[-1].stop
        return found

    def numbers(self, bucket: device_steps.Bucket) -> device_steps.Numbers:
        """Return what a device's graph reads of the places of tokens."""
        made = device_steps.Numbers.of(bucket)
        made.lengths[: self.lengths.size], made.begin[: self.lengths.size] = self.lengths, self.starts
        made.start[self.order], made.count[self.order] = self.starts, self.lengths
        if not bucket.whole:
            at = np.arange(self.rows.size)
            sequences = np.repeat(np.arange(self.lengths.size), self.lengths)
            made.places[: at.size] = sequences * bucket.length + at - self.starts[sequences]
            made.rows[made.places[: at.size]] = at
        return made


class BertEncoder:
    """A transformer encoder (Vaswani et al. 2017; Devlin et al. 2018), with weights that are held once.

    weights: what config.shapes() names, as NumPy arrays of float16, bfloat16, float32 or float64; others are ignored. Matrices
    are held in config.dtype, and not copied if they have it; vectors in float32 (float64 for float64). Raises ValueError that
    lists every weight that is missing or has another shape, by name.

    Only tokens that a mask or lengths keep are computed: the products take them packed, as [tokens, hidden], and attention takes
    the sequences of each length together. On a CPU, a float16 or bfloat16 encoder is slower than a float32 one.

    device: "cpu"; "gpu", the current CUDA device, to which weights are copied once; or "auto", "gpu" where one can be
    used. An encoder on a GPU takes hidden states and gives results as CuPy arrays, on the caller's stream, and waits
    for nothing. Tokens, types, masks and lengths are NumPy arrays all the same: they say what is to be computed.
    There it rounds numbers of tokens up, by 6 % at most, and keeps a CUDA graph for each such shape of a batch, the
    64 used last (to drop one, it waits for the call before). In float16 and bfloat16, attention is one kernel from
    sm_80 on if head size is a multiple of 16, 128 at most; otherwise scores are in memory, 32 MiB at a time, and
    sequences are padded there. Calls of several threads or streams come one after the other. A signal handler may
    call the encoder that it interrupts: such calls have a workspace of 32 MiB and graphs of their own. While a graph
    is made, what a handler raises (Ctrl-C) is raised when that is done. NoDeviceError if there is no such device.

    On a GPU, at the fifth batch of one shape, its large products are timed in the ways that cublasLt knows, once in a process:
    that call waits for the device, takes memory for one product more, and gives it back. Only ways that leave the bits of
    cuBLAS's own choice are taken; where cublasLt cannot be loaded, or memory is short, that choice stays. So the same call gives
    the same bits in every process with the same GPU and libraries. A text's last bits may follow how many tokens are computed
    with it, since products then add up in another order, on a CPU too; what the other texts say has no part in them.
    """

    def __init__(
        self, config: EncoderConfig, weights: Mapping[str, Any], *, device: DeviceName = "cpu"
    ) -> None:
        self.config = config
        self._runner: device_steps.Runner | None = None
        on_device = _on_device(device)
        if config.layers > max(1, len(weights)):  # each has 16: so many names are not even written down
            raise ValueError(
                f"weights do not fit: there are {len(weights)}, too few for {config.layers} layers"
            )
        problems = [
            problem
            for name, shape in config.shapes().items()
            for problem in [_problem(name, weights.get(name), shape)]
            if problem
        ]
        if problems:
            raise ValueError("weights do not fit: " + "; ".join(problems))
        self._dtype: Dtype = dtype_of(config.dtype)
        if on_device:
            self._runner = device_steps.Runner(self._dtype, config.hidden)
        self._words, self._positions, self._types = (
            self._matrix(weights, f"embeddings.{name}_embeddings.weight")
            for name in ("word", "position", "token_type")
        )
        self._embedding_norm = self._norm(weights, "embeddings.LayerNorm")
        at = [f"encoder.layer.{number}" for number in range(config.layers)]
        names = [
            f"{each}.{name}" for each in at for name in ("attention.output.LayerNorm", "output.LayerNorm")
        ]
        norms = [self._norm(weights, name) for name in names]
        self._first_norm = None
        if config.norm == "pre":  # the norm after one sum is that before the next sublayer
            self._first_norm, *norms = [*norms, self._norm(weights, "encoder.LayerNorm")]
        self._layers = [
            _Layer(
                qkv=self._dense(
                    weights, *(f"{each}.attention.self.{name}" for name in ("query", "key", "value"))
                ),
                attention=self._dense(weights, f"{each}.attention.output.dense"),
                after_attention=norms[2 * number],
                wide=self._dense(weights, f"{each}.intermediate.dense"),
                ffn=self._dense(weights, f"{each}.output.dense"),
                after_ffn=norms[2 * number + 1],
            )
            for number, each in enumerate(at)
        ]

    @classmethod
    def from_safetensors(
        cls, folder: str | os.PathLike[str], *, dtype: str = "float32", device: DeviceName = "cpu"
    ) -> BertEncoder:
        """Load a BERT of Hugging Face's: config.json and model.safetensors of a folder, with or without "bert." before the names.

        Weights of any floating dtype become `dtype`, on `device` (see the class). What stands on top of the encoder (pooler,
        heads of tasks) is ignored. Needs the package safetensors; no other.

        Raises FileError, which names the folder or the file, if one of them is missing or damaged, the architecture is another
        one than BERT's encoder, or weights are missing or have another shape (all of them are listed); ImportError without
        safetensors.
        """
        _on_device(device)  # what is wrong with it is no file's fault
        folder = Path(folder)
        config = _read_config(folder, dtype)
        path = folder / "model.safetensors"
        weights = _read_weights(path, config)
        try:
            return cls(config, weights, device=device)
        except ValueError as error:
            raise FileError(f"{path}: {error}") from None

    def forward(self, hidden: Any, *, mask: Any = None, lengths: Any = None) -> Any:
        """Return the last layer's hidden states for those of the embeddings: [batch, seq, hidden] in and out.

        mask: [batch, seq] or [batch, seq, seq], bool or integers 0 and 1; True keeps. The first says which tokens there are;
        the second which token (last axis) each token (the axis before) looks at. lengths: [batch] integers, the leading
        tokens that there are. Without either, all. Tokens that are not there are not computed: their rows are 0.
        A token that looks at nothing takes nothing from attention.

        norm="post": a = LayerNorm(x + attention(x)), y = LayerNorm(a + ffn(a)); norm="pre": a = x + attention(LayerNorm(x)),
        y = a + ffn(LayerNorm(a)), and LayerNorm of the last y. attention is softmax(q k^T / sqrt(head size)) v by heads;
        ffn(x) is gelu(x W^T + b) V^T + c (Vaswani et al. 2017; "pre": Xiong et al. 2020).

        hidden is any of float16, bfloat16, float32 and float64; what comes back has the encoder's dtype.

        Raises TypeError for other arrays and dtypes, and arrays of another kind than the encoder's device has; ValueError for
        shapes and values that do not fit and for both mask and lengths.
        """
        self._check_kind(hidden)
        check_dtype("hidden", hidden)
        if hidden.ndim != 3 or hidden.shape[2] != self.config.hidden:  # noqa: PLR2004  batch, seq, hidden
            raise ValueError(
                f"hidden has shape {hidden.shape}: it must be (batch, seq, {self.config.hidden})"
            )
        if self._runner is not None:
            return self._forward_on_device(self._runner, hidden, mask, lengths)
        packed = _pack(hidden.shape[:2], mask, lengths)
        y = np.zeros(hidden.shape, self._dtype)
        rows, columns = packed.rows, packed.columns
        x = hidden[rows, columns].astype(self._dtype, copy=False)
        y[rows, columns] = self._run(x, _HostSteps(self._dtype, packed))
        return y

    def look_up(self, tokens: Any, types: Any = None) -> Any:
        """Return the hidden states that forward() takes: [batch, seq] integers give [batch, seq, hidden], in the encoder's dtype.

        LayerNorm(word[token] + position[place] + type[type]) (Devlin et al. 2018). types: [batch, seq] integers; without them 0.
        Tokens and types are NumPy arrays; what comes back is of the encoder's device.

        Raises ValueError for tokens or types out of range, which it names, and for more tokens than the encoder has positions.
        """
        tokens = _integers("tokens", tokens)
        if tokens.ndim != 2:  # noqa: PLR2004  batch, seq
            raise ValueError(f"tokens has shape {tokens.shape}: it must be (batch, seq)")
        packed = _pack(tokens.shape, None, None)
        words, kinds = self._checked(tokens, types, packed)
        shape = (*tokens.shape, self.config.hidden)
        if self._runner is not None:
            with self._runner.on_device():
                if not tokens.size:
                    return devices.empty(shape, self._dtype)
                numbers = words, packed.columns, kinds
                norm = device_steps.embeddings(self._tables, numbers, self._embedding_norm, self.config.eps)
                return norm.reshape(shape)
        y = np.empty(shape, self._dtype)
        y[packed.rows, packed.columns] = self._embeddings(words, kinds, packed)
        return y

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Where the encoder is."""
        return "cpu" if self._runner is None else "gpu"

    def release(self) -> None:
        """Give back the memory of all graphs; later calls make new ones. On a CPU, nothing is held.

        In a signal handler that has interrupted a call of the encoder, this is done when that call ends.
        """
        if self._runner is not None:
            self._runner.release()

    def embed(
        self,
        tokens: Any,
        *,
        types: Any = None,
        mask: Any = None,
        lengths: Any = None,
        pooling: Pooling = "mean",
        normalize: bool = True,
    ) -> Any:
        """Return one embedding a sequence: [batch, hidden], in float32 (float64 for a float64 encoder).

        tokens: an array [batch, seq] of integers, with mask or lengths as in forward() where sequences are shorter; or a list of
        sequences of integers, of any lengths, which takes neither. types: as tokens; without them 0. pooling: the mean over
        a sequence's tokens, or its first token's hidden state ("cls"). normalize: divide by the Euclidean norm. A
        sequence without tokens gives zeros. An encoder on a GPU gives a CuPy array.

        Raises ValueError for tokens or types out of range, which it names, sequences longer than the encoder has positions, an
        unknown pooling, and where forward() does; TypeError for what are no integers in NumPy arrays or lists.
        """
        choice("pooling", pooling, POOLINGS, "use mean or cls")
        normalize = boolean("normalize", normalize)
        if isinstance(tokens, (list, tuple)):
            if mask is not None or lengths is not None:
                raise ValueError("a list of sequences says how long each is: give neither mask nor lengths")
            tokens, lengths = _side_by_side("tokens", tokens)
            if types is not None:
                types, of_types = _side_by_side("types", types)
                if not np.array_equal(lengths, of_types):
                    raise ValueError(
                        "types are not as many as tokens: each sequence must have one for each token"
                    )
        else:
            tokens = _integers("tokens", tokens)
        if tokens.ndim != 2:  # noqa: PLR2004  batch, seq
            raise ValueError(f"tokens has shape {tokens.shape}: it must be (batch, seq)")
        packed = _pack(tokens.shape, mask, lengths)
        words, kinds = self._checked(tokens, types, packed)
        if self._runner is not None:
            return self._embed_on_device(self._runner, words, kinds, packed, pooling, normalize=normalize)
        hidden = self._run(self._embeddings(words, kinds, packed), _HostSteps(self._dtype, packed))
        return self._pool(hidden, packed, pooling, normalize=normalize)

    def _checked(self, tokens: Array, types: Any, packed: _Packed) -> tuple[Array, Array]:
        """Return the packed tokens and their types, all in range."""
        rows, columns = packed.rows, packed.columns
        if columns.size and columns.max() >= self.config.positions:
            raise ValueError(
                f"a sequence has {columns.max() + 1} tokens: the encoder has {self.config.positions} positions"
            )
        flat = tokens[rows, columns]
        _check_range("token", flat, packed, self.config.vocabulary, "the vocabulary has")
        if types is None:
            return flat, np.zeros_like(flat)
        types = _integers("types", types)
        if types.shape != tokens.shape:
            raise ValueError(f"types has shape {types.shape}, tokens has {tokens.shape}")
        kinds = types[rows, columns]
        _check_range("type", kinds, packed, self.config.types, "types are")
        return flat, kinds

    def _embeddings(self, words: Array, kinds: Array, packed: _Packed) -> Array:
        """Return the packed tokens' embeddings."""
        total = self._words[words].astype(compute_dtype(self._dtype))
        total += self._positions[packed.columns]
        total += self._types[kinds]
        return steps.layer_norm(total, *self._embedding_norm, self.config.eps).astype(self._dtype, copy=False)

    @property
    def _tables(self) -> tuple[Any, Any, Any]:
        return self._words, self._positions, self._types

    def _forward_on_device(self, runner: device_steps.Runner, hidden: Any, mask: Any, lengths: Any) -> Any:
        batch, seq, _ = hidden.shape
        bucket, packed, there, back = None, None, None, None
        if (
            mask is None and lengths is None and hidden.size
        ):  # nothing to look at: the usual case of short calls
            bucket = device_steps.whole_bucket(batch, seq)
        if bucket is None:
            packed = _pack((batch, seq), mask, lengths)
        with runner.on_device():
            y = devices.empty(hidden.shape, self._dtype)
        if packed is not None:
            if not packed.rows.size:
                if y.size:
                    y.fill(0)
                return y
            bucket = device_steps.bucket_of(packed.lengths, packed.where is not None)
            if not bucket.whole or packed.rows.size != batch * seq:
                flat = packed.rows * seq + packed.columns
                there, back = np.full(bucket.tokens, -1, np.int32), np.full(batch * seq, -1, np.int32)
                there[: flat.size] = flat
                back[flat] = np.arange(flat.size)
        assert bucket is not None  # noqa: S101  either is
        return runner.run(
            "forward",
            bucket,
            lambda of, x: self._run(x, of),
            None if packed is None else packed.numbers(bucket),
            None if packed is None else packed.where,
            lambda to: device_steps.copied(hidden, to, there),
            lambda x: device_steps.copied(x, y, back),
        )

    def _embed_on_device(
        self,
        runner: device_steps.Runner,
        words: Array,
        kinds: Array,
        packed: _Packed,
        pooling: Pooling,
        *,
        normalize: bool,
    ) -> Any:
        compute, least = compute_dtype(self._dtype), LEAST_NORM if normalize else None
        with runner.on_device():
            y = devices.empty((packed.shape[0], self.config.hidden), compute)
        if not packed.rows.size:
            if y.size:
                y.fill(0)
            return y
        bucket = device_steps.bucket_of(packed.lengths, packed.where is not None)
        numbers = packed.numbers(bucket)
        for to, given in zip(numbers[-3:], (words, packed.columns, kinds), strict=True):
            to[: given.size] = given
        if pooling == "cls":
            np.minimum(numbers.count, 1, out=numbers.count)

        def calculate(of: Any, _: Any) -> Any:
            x = of.layer_norm(of.look_up(self._tables), *self._embedding_norm, self.config.eps)
            return of.pool(self._run(x, of), least)

        return runner.run(
            ("embed", normalize),
            bucket,
            calculate,
            numbers,
            packed.where,
            None,
            lambda x: device_steps.copied(x[: packed.shape[0]], y, None),
        )

    def _run(self, x: Any, of: _HostSteps | device_steps.Steps) -> Any:
        """Put packed tokens, [tokens, hidden], through all layers, by the steps of a device or of the host."""
        config = self.config
        if isinstance(of, device_steps.Steps) and of.takes_few(config.hidden, config.ffn, config.heads):
            return self._run_few(x, of)
        total: Any = x
        if self._first_norm is not None:
            x = of.layer_norm(x, *self._first_norm, config.eps)
        for layer in self._layers:
            context = of.attention(x, *layer.qkv, config.heads)
            branch = of.linear(context, layer.attention.weight)
            x, total = self._add(of, branch, x, total, layer.attention.bias, layer.after_attention)
            wide = of.linear(x, layer.wide.weight)
            wide = of.bias_gelu(wide, layer.wide.bias, approximate=config.approximate)
            branch = of.linear(wide, layer.ffn.weight)
            x, total = self._add(of, branch, x, total, layer.ffn.bias, layer.after_ffn)
        return x

    def _run_few(self, total: Any, of: device_steps.Steps) -> Any:
        """The same in 5 launches a layer: a sum's norm is computed by the product it goes into, which keeps it as a residual."""
        config = self.config
        post, norm = config.norm == "post", self._first_norm
        for layer in self._layers:
            keep = post and norm is not None
            qkv, x = of.product(total, layer.qkv.weight, norm=norm, eps=config.eps, keep=keep)
            context = of.attend(qkv, layer.qkv.bias, config.heads)
            residual = x if keep else total
            total, _ = of.product(
                context, layer.attention.weight, bias=layer.attention.bias, residual=residual
            )
            wide, x = of.product(
                *(total, layer.wide.weight),
                norm=layer.after_attention,
                eps=config.eps,
                keep=post,
                bias=layer.wide.bias,
                gelu=config.approximate,
            )
            residual = x if post else total
            total, _ = of.product(wide, layer.ffn.weight, bias=layer.ffn.bias, residual=residual)
            norm = layer.after_ffn
        return total if norm is None else of.layer_norm(total, *norm, config.eps)

    def _add(
        self,
        of: _HostSteps | device_steps.Steps,
        branch: Any,
        x: Any,
        total: Any,
        bias: Any,
        norm: _Norm,
    ) -> tuple[Any, Any]:
        """Return the norm of branch + bias + the residual, and the sum: the residual is the last sum, or the last norm of it."""
        pre = self.config.norm == "pre"
        residual = total if pre else x
        return of.add_layer_norm(branch, residual, *norm, bias=bias, eps=self.config.eps, return_sum=pre)

    def _pool(self, hidden: Array, packed: _Packed, pooling: Pooling, *, normalize: bool) -> Array:
        compute = compute_dtype(self._dtype)
        pooled = np.zeros((packed.shape[0], self.config.hidden), compute)
        there = packed.lengths > 0
        order, starts, lengths = packed.order[there], packed.starts[there], packed.lengths[there]
        if order.size:
            if pooling == "cls":
                pooled[order] = hidden[starts]
            else:
                sums = np.add.reduceat(hidden.astype(np.float64), starts, axis=0)
                pooled[order] = sums / lengths[:, np.newaxis]
        if normalize:
            norms = np.sqrt(np.square(pooled, dtype=np.float64).sum(axis=1, keepdims=True))
            pooled = (pooled / np.maximum(norms, LEAST_NORM)).astype(compute)
        return pooled

    def _norm(self, weights: Mapping[str, Any], name: str) -> _Norm:
        return _Norm(self._vector(weights, f"{name}.weight"), self._vector(weights, f"{name}.bias"))

    def _dense(self, weights: Mapping[str, Any], *names: str) -> _Dense:
        """Return one product's weights, or those of several that are done as one."""
        matrices = [np.ascontiguousarray(weights[f"{name}.weight"], self._dtype) for name in names]
        vectors = [
            np.ascontiguousarray(weights[f"{name}.bias"], compute_dtype(self._dtype)) for name in names
        ]
        matrix, vector = matrices[0], vectors[0]
        if len(names) > 1:
            matrix, vector = np.concatenate(matrices), np.concatenate(vectors)
        return _Dense(self._placed(matrix), self._placed(vector))

    def _matrix(self, weights: Mapping[str, Any], name: str) -> Any:
        return self._placed(np.ascontiguousarray(weights[name], self._dtype))

    def _placed(self, array: Array) -> Any:
        """Return weights where the encoder is."""
        return array if self._runner is None else devices.cupy().asarray(array)

    def _vector(self, weights: Mapping[str, Any], name: str) -> Any:
        """Return a bias, a gamma or a beta, in float32 (float64).

        In bfloat16 they would cost MiniLM's embeddings more digits than all its matrices do, and save nothing.
        """
        return self._placed(np.ascontiguousarray(weights[name], compute_dtype(self._dtype)))

    def _check_kind(self, hidden: object) -> None:
        """Refuse hidden states that do not lie where the encoder is."""
        if self._runner is None:
            _on_host("hidden", hidden)
        elif not devices.is_device_array(hidden):
            raise TypeError(
                "hidden is no CuPy array, and the encoder is on a GPU: cupy.asarray(hidden) copies it"
            )
        elif hidden.device.id != self._runner.device:  # type: ignore[attr-defined]  # a CuPy array
            raise ValueError(f"hidden is not on device {self._runner.device}, where the encoder is")
        else:
            check_subclass("hidden", hidden, on_device=True)
            check_elements("hidden", hidden)


class _HostSteps:
    """The steps between packed tokens on NumPy arrays; those of _encoder_device by name."""

    linear = staticmethod(steps.linear)
    layer_norm = staticmethod(steps.layer_norm)
    add_layer_norm = staticmethod(steps.add_layer_norm)
    bias_gelu = staticmethod(steps.bias_gelu)

    def __init__(self, dtype: Dtype, packed: _Packed) -> None:
        self._dtype, self._packed = dtype, packed

    def attention(self, x: Array, weight: Array, bias: Array, heads: int) -> Array:
        """Return softmax(q k^T / sqrt(head size)) v, by heads and sequences, without the product that follows."""
        scale = (x.shape[1] // heads) ** -0.5
        qkv = steps.linear(x, weight)
        context = np.empty_like(x)
        for bucket in self._slices(heads):
            part = slice(bucket.start, bucket.stop)
            shape = (bucket.sequences, bucket.length, -1)
            q, k, v = add_qkv_bias(qkv[part].reshape(shape), bias, heads=heads)
            where = self._packed.where
            if where is not None:  # then nothing is packed, and sequence i begins at token i * seq
                first = bucket.start // bucket.length
                where = where[first : first + bucket.sequences]
            scores = steps.matmul(q, k.swapaxes(-1, -2))
            weights = steps.masked_softmax(scores, scale, where, self._dtype)
            merge_heads(steps.matmul(weights, v), out=context[part].reshape(shape))
        return context

    def _slices(self, heads: int) -> Iterator[_Bucket]:
        """Cut buckets where their scores would take too much memory at a time."""
        for bucket in self._packed.buckets():
            of_one = heads * bucket.length**2 * compute_dtype(self._dtype).itemsize
            step = max(1, SCORE_BYTES // of_one)
            for first in range(0, bucket.sequences, step):
                count = min(step, bucket.sequences - first)
                yield _Bucket(bucket.start + first * bucket.length, count, bucket.length)


def _on_device(device: str) -> bool:
    """Say whether the GPU is meant. NoDeviceError if it is, by name, and there is none."""
    choice("device", device, ("auto", "cpu", "gpu"), "use auto, cpu or gpu")
    if device == "cpu":
        return False
    try:
        devices.present_device()
    except devices.NoDeviceError:
        if device == "gpu":
            raise
        return False
    return True


def _problem(name: str, array: Any, shape: Shape) -> str | None:
    """Say what is wrong with a weight, if anything is."""
    if array is None:
        return f"{name} is missing"
    if not isinstance(array, np.ndarray):
        return f"{name} is no NumPy array"
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


def _on_host(name: str, array: object) -> None:
    """Refuse what is no NumPy array."""
    if devices.is_device_array(array):
        raise TypeError(f"{name} is a CuPy array, on a device: give a NumPy array (cupy.asnumpy makes one)")
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__module__}.{type(array).__qualname__}: give a NumPy array"
        )
    check_subclass(name, array, on_device=False)


def _integers(name: str, array: object) -> Array:
    _on_host(name, array)
    found: Array = array  # type: ignore[assignment]  # looked at by _on_host
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {found.dtype}: give integers")
    return found


def _array_of(name: str, given: Any) -> Any:
    """Return an array of a list's or tuple's integers, else what was given."""
    return array_of_list(name, given) if isinstance(given, (list, tuple)) else given


def _side_by_side(name: str, sequences: Sequence[Any]) -> tuple[Array, Array]:
    """Return sequences as [batch, longest], padded with 0, and their lengths."""
    arrays = [_array_of(f"{name}[{at}]", each) for at, each in enumerate(sequences)]
    for at, each in enumerate(arrays):
        if each.ndim != 1:
            raise ValueError(f"{name}[{at}] has shape {each.shape}: a list holds sequences of integers")
        if each.size and each.dtype.kind not in "iu":
            raise TypeError(f"{name}[{at}] has dtype {each.dtype}: give integers")
    lengths = np.array([each.size for each in arrays], np.intp)
    padded = np.zeros((len(arrays), max(lengths, default=0)), np.int64)
    for row, each in zip(padded, arrays, strict=True):
        row[: each.size] = each
    return padded, lengths


def _pack(shape: Shape, mask: Any, lengths: Any) -> _Packed:
    """Check mask and lengths, and say which tokens are computed and in what order."""
    batch, seq = shape
    if mask is not None and lengths is not None:
        raise ValueError("mask and lengths were given: give one of them")
    keep, where = np.ones((batch, seq), np.bool_), None
    if lengths is not None:
        keep = np.arange(seq) < _check_lengths(lengths, batch, seq)[:, np.newaxis]
    elif mask is not None:
        kept = _check_mask(mask, batch, seq)
        if kept.ndim == 2:  # noqa: PLR2004  batch, seq
            keep = kept
        else:
            where = kept[:, np.newaxis]
    counts = keep.sum(axis=1)
    order = np.argsort(counts, kind="stable")
    places, columns = np.nonzero(keep[order])
    return _Packed((batch, seq), order[places], columns, order, counts[order], where)


def _check_lengths(lengths: Any, batch: int, seq: int) -> Array:
    found = _integers("lengths", _array_of("lengths", lengths))
    if found.shape != (batch,):
        raise ValueError(f"lengths has shape {found.shape}, the batch has {batch} sequences")
    if found.size and not 0 <= found.min() <= found.max() <= seq:
        wrong = int(np.argmax((found < 0) | (found > seq)))
        raise ValueError(f"lengths[{wrong}] is {found[wrong]}: sequences have 0 to {seq} tokens")
    return found


def _check_mask(mask: Any, batch: int, seq: int) -> Array:
    """Return a mask of either form as bool."""
    _on_host("mask", mask)
    allowed = (batch, seq), (batch, seq, seq)
    if mask.shape not in allowed:
        raise ValueError(f"mask has shape {mask.shape}: it must be {allowed[0]} or {allowed[1]}")
    if mask.dtype.kind not in "biu":
        raise TypeError(f"mask has dtype {mask.dtype}: give bool, or integers 0 and 1; True keeps")
    if mask.dtype.kind != "b" and mask.size and not 0 <= mask.min() <= mask.max() <= 1:
        raise ValueError(f"mask has values from {mask.min()} to {mask.max()}: give bool, or integers 0 and 1")
    kept: Array = mask.astype(np.bool_, copy=False)
    return kept


def _check_range(name: str, values: Array, packed: _Packed, count: int, has: str) -> None:
    """Name the first value out of range, and where it was given."""
    wrong = (values < 0) | (values >= count)
    if wrong.any():
        at = int(np.argmax(wrong))
        place = f"[{packed.rows[at]}, {packed.columns[at]}]"
        raise ValueError(f"{name} {values[at]} at {place}: {has} {count}, from 0 on")


def _read_config(folder: Path, dtype: str) -> EncoderConfig:
    """Read config.json; refuse what is no BERT encoder."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise FileError(f"{folder}: is no folder: give the one that holds config.json and model.safetensors")
    found = read_json(path)
    kind = found.get("model_type")
    if kind != "bert":  # a class of another name may hold one: its tensors are looked at
        raise FileError(f"{path}: is a model of type {kind!r}: only BERT's encoder, 'bert', is known")
    told: dict[str, tuple[Any, list[Any]]] = {
        "hidden_act": (found.get("hidden_act"), list(ACTIVATIONS)),
        "position_embedding_type": (found.get("position_embedding_type") or "absolute", ["absolute"]),
        "is_decoder": (found.get("is_decoder") or False, [False]),
        "add_cross_attention": (found.get("add_cross_attention") or False, [False]),
    }
    for name, (value, known) in told.items():
        if value not in known:
            raise FileError(f"{path}: {name} is {value!r}: only {', '.join(map(str, known))} is known")
    sizes = {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "layers": "num_hidden_layers",
        "ffn": "intermediate_size",
        "vocabulary": "vocab_size",
        "positions": "max_position_embeddings",
        "types": "type_vocab_size",
        "eps": "layer_norm_eps",
    }
    missing = [name for name in sizes.values() if name not in found]
    if missing:
        raise FileError(f"{path}: has no {', '.join(missing)}")
    values: dict[str, Any] = {name: found[theirs] for name, theirs in sizes.items()}
    values["approximate"] = ACTIVATIONS[found["hidden_act"]]
    dtype_of(dtype)  # what is wrong with it is no file's fault
    try:
        return EncoderConfig(**values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise FileError(f"{path}: {error}") from None


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the object (or list) that a JSON file holds. Raises FileError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is no JSON ({error})") from error
    if not isinstance(found, kind):
        raise FileError(f"{path}: holds no JSON {'object' if kind is dict else kind.__name__}")
    return found


FLOATS = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}  # as safetensors names them


def _read_weights(path: Path, config: EncoderConfig) -> dict[str, Array]:
    """Return a file's tensors by BERT's names, without a prefix. Nothing is read before the file's header fits the config."""
    try:
        import safetensors  # noqa: PLC0415  optional: only weights in files need it
    except ImportError as error:
        raise ImportError(
            f"weights are read by the package safetensors: {_install.pip_install('text')}"
        ) from error
    if not path.is_file():
        raise FileError(f"{path}: there is none{_instead(path.parent)}")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            names = [*file.keys()]
            prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
            bare = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            ours = {
                name: _renamed(each)
                for name, each in bare.items()
                if each.startswith(("embeddings.", "encoder."))
            }
            _check_layers(path, config, ours.values())
            known = config.shapes()  # what else there is, such as numbered positions, is no weight
            ours = {name: each for name, each in ours.items() if each in known}
            _check_dtypes(path, {name: file.get_slice(name).get_dtype() for name in ours})
            weights = {each: file.get_tensor(name) for name, each in ours.items()}
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is no safetensors file, or is damaged ({error})") from error
    _warn_of_what_is_not_finite(path, weights)
    return weights


def _check_layers(path: Path, config: EncoderConfig, names: Iterable[str]) -> None:
    """Raise FileError unless the file has tensors of as many layers as config.json says."""
    numbered = (name.removeprefix("encoder.layer.") for name in names if name.startswith("encoder.layer."))
    layers = len({each.partition(".")[0] for each in numbered})
    if layers != config.layers:
        raise FileError(f"{path}: has tensors of {layers} layers, and config.json says {config.layers}")


def _check_dtypes(path: Path, dtypes: Mapping[str, str]) -> None:
    """Raise FileError for tensors that are no floats of 16, 32 or 64 bits, such as float8."""
    others = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if others:
        raise FileError(
            f"{path}: {_some(others)}: weights may be {', '.join(FLOATS.values())}; "
            "convert them with the library that quantised them"
        )
    if "BF16" in dtypes.values():
        dtype_of("bfloat16")  # raises ImportError, or TypeError, where ml_dtypes is missing


def _warn_of_what_is_not_finite(path: Path, weights: Mapping[str, Array]) -> None:
    """Warn once, naming the tensors, of NaN or infinite weights: every embedding would be NaN."""
    # a sum is one pass without a temporary; where it overflows, each element is looked at
    bad = [name for name, each in weights.items() if not np.isfinite(each.sum(dtype=np.float64))]
    bad = [name for name in bad if not np.isfinite(weights[name].astype(np.float64)).all()]
    if bad:
        warnings.warn(
            f"{path}: {_some(bad)} hold NaN or infinity: what is computed with them is no number",
            RuntimeWarning,
            stacklevel=4,
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _renamed(name: str) -> str:
    """Return a tensor's name as it is today: weights that came from TensorFlow call LayerNorm's gamma and beta."""
    if "LayerNorm." in name:
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name


def _instead(folder: Path) -> str:
    """Say what else holds weights there."""
    for name, what in {
        "model.safetensors.index.json": "weights in several files are not supported",
        "pytorch_model.bin": "pickled weights are never loaded",
    }.items():
        if (folder / name).exists():
            return f", but {name}: {what}"
    return ""
