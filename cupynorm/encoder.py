"""BertEncoder: BERT's transformer encoder, from tokens or hidden states to hidden states or sentence embeddings.

Only the tokens that exist are computed. `cupynorm.embedding` adds tokenizers, texts and files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cupynorm._dtypes import Dtype, dtype_of
from cupynorm._options import boolean, choice
from cupynorm.bert import checkpoint, device_batches, device_steps, host_steps
from cupynorm.bert import weights as weight_arrays
from cupynorm.bert.config import POOLINGS, EncoderConfig, Pooling
from cupynorm.bert.layers import run_layers
from cupynorm.bert.packing import Packed, check_host_array, check_range, integers, pack, padded
from cupynorm.bert.runner import Runner
from cupynorm.call.arguments import check_dtype, check_elements
from cupynorm.call.subclasses import check_subclass
from cupynorm.npy.paths import FileError
from cupynorm.runtime import devices

__all__ = ["BertEncoder", "DeviceName", "EncoderConfig", "FileError", "Pooling"]

Array = np.ndarray[Any, Any]
DeviceName = Literal["auto", "cpu", "gpu"]


class BertEncoder:
    """A transformer encoder with the layers of BERT [1]_ [2]_, or with the LayerNorm before each sublayer [3]_.

    With ``norm="post"``, a layer computes ``a = LayerNorm(x + attention(x))`` and ``y = LayerNorm(a + ffn(a))``; with
    ``norm="pre"``, ``a = x + attention(LayerNorm(x))`` and ``y = a + ffn(LayerNorm(a))``, and the last y passes another
    LayerNorm. ``attention`` is ``softmax(q k^T / sqrt(head size)) v`` by heads, and ``ffn(x)`` is
    ``gelu(x W^T + b) V^T + c``.

    Parameters
    ----------
    config : EncoderConfig
        Sizes, the place of the LayerNorms, GELU's formula, and the dtype of matrices.
    weights : mapping of str to numpy.ndarray
        The arrays that ``config.shapes()`` names, in float16, bfloat16, float32 or float64; others are ignored.
        Matrices are converted to ``config.dtype``, and are not copied if they have it already; vectors are converted to
        float32 (float64 for a float64 encoder).
    device : {"cpu", "gpu", "auto"}, default "cpu"
        "gpu" is the current CUDA device, to which the weights are copied once; "auto" is "gpu" if one can be used, else
        "cpu".

    Raises
    ------
    ValueError
        If weights are missing, are not NumPy arrays, or have another shape. The message lists all of them by name.
    NoDeviceError
        If ``device="gpu"`` and there is no usable device.

    Notes
    -----
    Only tokens that a mask or lengths keep are computed. Matrix products take them packed, as [tokens,
    hidden], and attention takes the sequences of each length together.

    An encoder on a GPU takes hidden states and returns results as CuPy arrays, on the caller's stream, without
    synchronising. Tokens, types, masks and lengths are NumPy arrays all the same. On a CPU, float16 and bfloat16 are
    slower than float32.

    **Graphs.** On a GPU, the number of tokens is rounded up by 6 % at most, and the encoder keeps a CUDA graph for each
    such shape of a batch, the 64 used last. To drop one, it waits for the previous call. In float16 and bfloat16, from
    compute capability 8.0 on, attention is one kernel if the head size is a multiple of 16 and at most 128. Otherwise
    scores are stored, 32 MiB at a time, and sequences are padded for it.

    **Threads and signals.** Calls of several threads or streams run one after the other. A signal handler may call the
    encoder that it interrupts; such calls have a workspace of 32 MiB and graphs of their own. An exception that a
    handler raises while a graph is captured, such as KeyboardInterrupt, is raised when the capture is complete.

    **Reproducibility.** The same call gives the same bits in every process with the same GPU and libraries. At the
    fifth batch of one shape, the large products are timed with each algorithm of cublasLt, once per process: that call
    waits for the device, and needs memory for one more product meanwhile. Only algorithms that give the bits of
    cuBLAS's own choice are taken. Without cublasLt or enough memory, cuBLAS's choice stays. The last bits of an
    embedding may depend on the number of tokens in the batch, because products then add up in another order, on a CPU
    too, but never on the contents of the other texts.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017.
    .. [2] Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2018.
    .. [3] Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020.

    Examples
    --------
    >>> import numpy as np
    >>> config = EncoderConfig(hidden=8, heads=2, layers=1, ffn=16, vocabulary=10, positions=4)
    >>> random = np.random.default_rng(0)
    >>> weights = {name: random.normal(0, 0.1, shape) for name, shape in config.shapes().items()}
    >>> encoder = BertEncoder(config, weights)
    >>> encoder.embed([[1, 2, 3], [4]]).shape
    (2, 8)
    """

    def __init__(
        self, config: EncoderConfig, weights: Mapping[str, Any], *, device: DeviceName = "cpu"
    ) -> None:
        self.config = config
        self._runner: Runner | None = None
        on_device = _on_device(device)
        weight_arrays.check_weights(config, weights)
        self._dtype: Dtype = dtype_of(config.dtype)
        if on_device:
            self._runner = Runner(self._dtype, config.hidden)
        self._weights = weight_arrays.converted(
            config, weights, devices.cupy().asarray if on_device else lambda array: array
        )

    @classmethod
    def from_safetensors(
        cls, folder: str | os.PathLike[str], *, dtype: str = "float32", device: DeviceName = "cpu"
    ) -> BertEncoder:
        """Load a BERT model from a folder in Hugging Face's format. Needs the package safetensors.

        Parameters
        ----------
        folder : str or os.PathLike
            The folder that holds config.json and model.safetensors. Tensors may have the prefix "bert."; those on top
            of the encoder, such as a pooler or a classifier, are ignored.
        dtype : str, default "float32"
            The dtype of the encoder's matrices. Weights of any floating dtype are converted.
        device : {"cpu", "gpu", "auto"}, default "cpu"
            As for the class.

        Returns
        -------
        BertEncoder
            An encoder with the model's weights.

        Raises
        ------
        FileError
            If a file is missing or damaged, the architecture is not that of BERT's encoder, or weights are missing or
            have another shape. The message names the folder or file, and all of those weights.
        ImportError
            If safetensors is not installed.
        NoDeviceError
            If ``device="gpu"`` and there is no usable device.
        """
        _on_device(device)  # raises here, before files are looked at
        folder = Path(folder)
        config = checkpoint.read_config(folder, dtype)
        path = folder / "model.safetensors"
        weights = checkpoint.read_weights(path, config)
        try:
            return cls(config, weights, device=device)
        except ValueError as error:
            raise FileError(f"{path}: {error}") from None

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """The device on which the encoder computes."""
        return "cpu" if self._runner is None else "gpu"

    def release(self) -> None:
        """Free the memory of all CUDA graphs; later calls capture new ones. Does nothing on a CPU.

        Notes
        -----
        If a signal handler calls this while it interrupts a call of the encoder, the memory is freed when
        that call ends.
        """
        if self._runner is not None:
            self._runner.release()

    def forward(self, hidden: Any, *, mask: Any = None, lengths: Any = None) -> Any:
        """Return the last layer's hidden states, given those of the embeddings.

        Parameters
        ----------
        hidden : array of shape (batch, seq, hidden)
            float16, bfloat16, float32 or float64; a CuPy array on the encoder's device if that is a GPU, else a NumPy
            array. `look_up` returns such an array.
        mask : numpy.ndarray of shape (batch, seq) or (batch, seq, seq), optional
            bool, or integers 0 and 1; True keeps. The first shape says which tokens exist. The second says which tokens
            (last axis) each token (the axis before) attends to; all of them exist.
        lengths : array or sequence of (batch,) integers, optional
            The number of leading tokens that exist. Give either mask or lengths; without both, all tokens exist.

        Returns
        -------
        array of shape (batch, seq, hidden)
            In the encoder's dtype, of the same kind as ``hidden``. Rows of tokens that do not exist are 0; they are not
            computed. The attention of a token that attends to nothing is 0.

        Raises
        ------
        TypeError
            For arrays and dtypes that are not supported, and for arrays of another kind than the encoder's device has.
        ValueError
            For shapes and values that do not fit, and if both mask and lengths are given.
        """
        self._check_hidden(hidden)
        if self._runner is not None:
            return device_batches.forward(self._runner, self.config, self._weights, hidden, mask, lengths)
        packed = pack(hidden.shape[:2], mask, lengths)
        y = np.zeros(hidden.shape, self._dtype)
        rows, columns = packed.rows, packed.columns
        x = hidden[rows, columns].astype(self._dtype, copy=False)
        y[rows, columns] = self._run_on_host(x, packed)
        return y

    def look_up(self, tokens: Any, types: Any = None) -> Any:
        """Return the hidden states that `forward` takes: LayerNorm(word[token] + position[place] + type[type]).

        Parameters
        ----------
        tokens : numpy.ndarray of shape (batch, seq)
            Integers.
        types : numpy.ndarray of shape (batch, seq), optional
            Integers; default 0.

        Returns
        -------
        array of shape (batch, seq, hidden)
            In the encoder's dtype: a CuPy array if the encoder is on a GPU, else a NumPy array.

        Raises
        ------
        TypeError
            For arrays that are not integers, or not NumPy arrays.
        ValueError
            For tokens or types out of range, which the message names, and for more tokens than the encoder has
            positions.
        """
        tokens = _token_array(tokens)
        packed = pack(tokens.shape, None, None)
        words, kinds = self._packed_tokens(tokens, types, packed)
        shape = (*tokens.shape, self.config.hidden)
        if self._runner is not None:
            with self._runner.on_device():
                if not tokens.size:
                    return devices.empty(shape, self._dtype)
                indices = words, packed.columns, kinds
                tables, norm = self._weights.tables, self._weights.embedding_norm
                return device_steps.embeddings(tables, indices, norm, self.config.eps).reshape(shape)
        y = np.empty(shape, self._dtype)
        y[packed.rows, packed.columns] = self._embeddings_on_host(words, kinds, packed)
        return y

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
        """Return one embedding per sequence of tokens.

        Parameters
        ----------
        tokens : numpy.ndarray of shape (batch, seq), or list of sequences of integers
            An array takes mask or lengths where sequences are shorter than seq. Sequences in a list may have any
            lengths.
        types : like tokens, optional
            The type of each token; default 0.
        mask, lengths : optional
            As for `forward`; only if tokens is an array.
        pooling : {"mean", "cls"}, default "mean"
            The mean of a sequence's hidden states, or the hidden state of its first token.
        normalize : bool, default True
            Divide each embedding by its Euclidean norm.

        Returns
        -------
        array of shape (batch, hidden)
            float32, or float64 for a float64 encoder: a CuPy array if the encoder is on a GPU, else a NumPy array. The
            embedding of a sequence without tokens is 0.

        Raises
        ------
        TypeError
            For tokens or types that are not integers in NumPy arrays or lists.
        ValueError
            For tokens or types out of range, which the message names, for sequences longer than the encoder has
            positions, for an unknown pooling, and where `forward` raises it.
        """
        choice("pooling", pooling, POOLINGS, "use mean or cls")
        normalize = boolean("normalize", normalize)
        if isinstance(tokens, (list, tuple)):
            if mask is not None or lengths is not None:
                raise ValueError("a list of sequences gives their lengths: pass neither mask nor lengths")
            tokens, lengths = padded("tokens", tokens)
            if types is not None:
                types, type_lengths = padded("types", types)
                if not np.array_equal(lengths, type_lengths):
                    raise ValueError("types and tokens differ in length: each token must have one type")
        tokens = _token_array(tokens)
        packed = pack(tokens.shape, mask, lengths)
        words, kinds = self._packed_tokens(tokens, types, packed)
        if self._runner is not None:
            return device_batches.embed(
                *(self._runner, self.config, self._weights, (words, kinds), packed, pooling),
                normalize=normalize,
            )
        hidden = self._run_on_host(self._embeddings_on_host(words, kinds, packed), packed)
        return host_steps.pool(hidden, packed, pooling, normalize=normalize)

    def _packed_tokens(self, tokens: Array, types: Any, packed: Packed) -> tuple[Array, Array]:
        """Return the packed tokens and their types, all in range."""
        rows, columns = packed.rows, packed.columns
        if columns.size and columns.max() >= self.config.positions:
            raise ValueError(
                f"a sequence has {columns.max() + 1} tokens: the encoder has {self.config.positions} positions"
            )
        words = tokens[rows, columns]
        check_range("token", words, packed, self.config.vocabulary, "the vocabulary has")
        if types is None:
            return words, np.zeros_like(words)
        types = integers("types", types)
        if types.shape != tokens.shape:
            raise ValueError(f"types has shape {types.shape}, tokens has {tokens.shape}")
        kinds = types[rows, columns]
        check_range("type", kinds, packed, self.config.types, "types are")
        return words, kinds

    def _embeddings_on_host(self, words: Array, kinds: Array, packed: Packed) -> Array:
        indices, weights = (words, packed.columns, kinds), self._weights
        return host_steps.embeddings(
            weights.tables, indices, weights.embedding_norm, self.config.eps, self._dtype
        )

    def _run_on_host(self, x: Array, packed: Packed) -> Array:
        steps = host_steps.HostSteps(self._dtype, packed)
        y: Array = run_layers(self.config, self._weights, x, steps)
        return y

    def _check_hidden(self, hidden: Any) -> None:
        """Raise TypeError or ValueError for hidden states that the encoder cannot take."""
        if self._runner is None:
            check_host_array("hidden", hidden)
        elif not devices.is_device_array(hidden):
            raise TypeError(
                "hidden is not a CuPy array, and the encoder is on a GPU: cupy.asarray(hidden) copies it"
            )
        elif hidden.device.id != self._runner.device:
            raise ValueError(f"hidden is not on device {self._runner.device}, where the encoder is")
        else:
            check_subclass("hidden", hidden, on_device=True)
            check_elements("hidden", hidden)
        check_dtype("hidden", hidden)
        if hidden.ndim != 3 or hidden.shape[2] != self.config.hidden:  # noqa: PLR2004  batch, seq, hidden
            raise ValueError(
                f"hidden has shape {hidden.shape}: it must be (batch, seq, {self.config.hidden})"
            )


def _token_array(tokens: object) -> Array:
    """Return tokens if they are a NumPy array [batch, seq] of integers."""
    found = integers("tokens", tokens)
    if found.ndim != 2:  # noqa: PLR2004  batch, seq
        raise ValueError(f"tokens has shape {found.shape}: it must be (batch, seq)")
    return found


def _on_device(device: str) -> bool:
    """Return whether to compute on the GPU. Raises NoDeviceError if it was asked for by name and there is none."""
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
