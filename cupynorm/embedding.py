"""Sentence embeddings of texts: a model's folder with its tokenizer, and files of texts.

`TextEncoder` embeds lists of texts; `embed_file` embeds a file, and continues where an interrupted run stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm._options import boolean, choice, integer, plainly, shown
from cupynorm.bert.config import POOLINGS
from cupynorm.bert.resume import SCHEMA, Part, PipedPart, unfinished
from cupynorm.bert.text import Tokens, batches, load_tokenizer, read_modules, tokenized
from cupynorm.bert.text_files import read_texts
from cupynorm.encoder import BertEncoder, DeviceName, Pooling
from cupynorm.npy.paths import STANDARD, FileError, check_standard_output, check_target, naming
from cupynorm.runtime import devices

__all__ = ["FileError", "Report", "TextEncoder", "Tokens", "embed_file", "read_texts", "unfinished"]

Array = np.ndarray[Any, Any]
Empty = Literal["error", "zeros"]

WINDOW = 2048  # texts that are sorted by length together, and written together
BATCH_TOKENS = 4096  # of a batch on a CPU, unless one text has more: fewer are slower, more are no faster
DEVICE_BATCH_TOKENS = 32768  # of a batch on a GPU: enough to fill one


class TextEncoder:
    """A sentence encoder: a tokenizer, BERT's encoder, pooling, and optionally L2 normalisation.

    Parameters
    ----------
    encoder : BertEncoder
        The encoder.
    tokenizer : tokenizers.Tokenizer
        Its tokenizer. Its padding and truncation are changed.
    pooling : {"mean", "cls"}
        As for `BertEncoder.embed`.
    normalize : bool
        Divide each embedding by its Euclidean norm.

    Raises
    ------
    ValueError
        For an unknown pooling.

    Examples
    --------
    `load` reads a model from a folder; `embed` takes texts::

        model = TextEncoder.load("all-MiniLM-L6-v2")
        rows = model.embed(["The whale swam away.", "He sold his house."])  # (2, 384), float32
    """

    def __init__(self, encoder: BertEncoder, tokenizer: Any, *, pooling: Pooling, normalize: bool) -> None:
        self.encoder = encoder
        choice("pooling", pooling, POOLINGS, "use mean or cls")
        self.pooling = pooling
        self.normalize = boolean("normalize", normalize)
        self._tokenizer = tokenizer

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        device: DeviceName = "cpu",
    ) -> TextEncoder:
        """Load a model from a folder. Needs the packages tokenizers and safetensors: the extra `text`.

        Parameters
        ----------
        folder : str or os.PathLike
            The folder that holds config.json, model.safetensors and tokenizer.json. A modules.json that
            sentence-transformers wrote says where they are.
        dtype : str, default "float32"
            As for `BertEncoder.from_safetensors`.
        pooling : {"mean", "cls"}, optional
            Default: what modules.json says; "mean" without that file.
        normalize : bool, optional
            Default: what modules.json says; True without that file.
        device : {"cpu", "gpu", "auto"}, default "cpu"
            Where to compute, as for `BertEncoder`. Embeddings are NumPy arrays in any case.

        Returns
        -------
        TextEncoder
            A sentence encoder with the model's weights.

        Raises
        ------
        FileError
            For files that are missing, damaged, or of a model that has other parts.
        ImportError
            If one of the packages is not installed.
        TypeError
            For a dtype that is not supported.
        NoDeviceError
            If ``device="gpu"`` and there is no usable device.
        """
        folder = Path(folder)
        inner, default_pooling, default_normalize = read_modules(folder)
        encoder = BertEncoder.from_safetensors(inner, dtype=dtype, device=device)
        tokenizer = load_tokenizer(inner / "tokenizer.json")
        return cls(
            encoder,
            tokenizer,
            pooling=default_pooling if pooling is None else pooling,
            normalize=default_normalize if normalize is None else normalize,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of embeddings."""
        return compute_dtype(dtype_of(self.encoder.config.dtype))

    @property
    def batch_tokens(self) -> int:
        """The most tokens of a batch, unless one text has more."""
        return BATCH_TOKENS if self.encoder.device == "cpu" else DEVICE_BATCH_TOKENS

    def embed(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        max_tokens: int | None = None,
        empty: Empty = "error",
    ) -> Array:
        """Return one embedding per text.

        Parameters
        ----------
        texts : sequence of str
            All texts are checked before any is computed.
        truncate : bool, default False
            Truncate texts of more than max_tokens tokens, which are errors otherwise.
        max_tokens : int, optional
            The most tokens of a text, special tokens included; default: the encoder's positions.
        empty : {"error", "zeros"}, default "error"
            A text without words is an error, or its row is 0.

        Returns
        -------
        numpy.ndarray of shape (texts, hidden)
            float32, or float64 for a float64 encoder.

        Raises
        ------
        ValueError
            For texts that are too long or empty, which the message names.
        TypeError
            If texts is not a list of strings.
        """
        if isinstance(texts, (str, bytes)):
            raise TypeError("texts is one string: give a list of them")
        if not hasattr(texts, "__iter__"):
            raise TypeError(f"texts is {shown(texts)}: give a list of strings")
        named = ((f"text {at}", text) for at, text in enumerate(texts))
        tokens = self.tokenize(named, truncate=truncate, max_tokens=max_tokens, empty=empty)
        rows = np.empty((len(tokens), self.encoder.config.hidden), self.dtype)
        for start in range(0, len(tokens), WINDOW):
            stop = min(start + WINDOW, len(tokens))
            for batch, embedded in self.window(tokens, start, stop):
                rows[batch] = embedded
        return rows

    def tokenize(
        self, texts: Iterable[tuple[str, str]], *, truncate: bool, max_tokens: int | None, empty: Empty
    ) -> Tokens:
        """Return the tokens of texts.

        Parameters
        ----------
        texts : iterable of tuple of str
            The name of each text in error messages, and the text.
        truncate, max_tokens, empty
            As for `embed`.

        Returns
        -------
        Tokens
            The tokens of all texts.

        Raises
        ------
        ValueError, TypeError
            As `embed` does.
        """
        choice("empty", empty, ("error", "zeros"), "use error or zeros")
        truncate = boolean("truncate", truncate)
        positions, vocabulary = self.encoder.config.positions, self.encoder.config.vocabulary
        most = positions if max_tokens is None else integer("max_tokens", max_tokens)
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if not special < most <= positions:
            raise ValueError(
                f"max_tokens is {plainly(most)}: it must be {special + 1} to {positions}, the encoder's positions"
            )
        return tokenized(
            self._tokenizer, texts, truncate=truncate, most=most, vocabulary=vocabulary, empty=empty
        )

    def window(self, tokens: Tokens, start: int, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield the embeddings of texts start to stop in batches of similar length.

        Parameters
        ----------
        tokens : Tokens
            What `tokenize` returned.
        start, stop : int
            The first text, and the one after the last.

        Yields
        ------
        tuple of numpy.ndarray
            The numbers of the batch's texts, and their embeddings.
        """
        lengths = tokens.lengths()[start:stop]
        order = np.argsort(lengths, kind="stable")
        pending: list[tuple[Array, Any]] = []
        for batch in batches(lengths[order], self.batch_tokens):
            places = order[batch]
            embedded = self.encoder.embed(
                [tokens.of(int(start + place)) for place in places],
                pooling=self.pooling,
                normalize=self.normalize,
            )
            if self.encoder.device == "cpu":
                yield places + start, embedded
            else:  # the host packs the next batch while the device computes this one
                pending.append((places + start, embedded))
        for places, embedded in pending:
            yield places, devices.cupy().asnumpy(embedded)


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of embed_file()."""

    output: str
    model: str
    texts: int
    tokens: int
    columns: int
    dtype: str  # of the output
    pooling: str
    normalize: bool
    device: str  # "cpu" or "gpu"
    truncated: int  # texts that were truncated
    resumed: int  # texts that an earlier run had finished
    seconds: float  # from the first batch until the last row is on the disk

    @property
    def texts_per_second(self) -> float:
        """Texts of this run per second."""
        return (self.texts - self.resumed) / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the rate, for JSON."""
        return {**dataclasses.asdict(self), "texts_per_second": self.texts_per_second}


def embed_file(
    folder: Path,
    source: Path,
    target: Path,
    *,
    field: str | None = None,
    dtype: str = "float32",
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    truncate: bool = False,
    max_tokens: int | None = None,
    empty: Empty = "error",
    force: bool = False,
    device: DeviceName = "auto",
    progress: Callable[[int, int], None] = lambda done, texts: None,  # noqa: ARG005
) -> Report:
    """Embed the texts of a file into a .npy file, one row per text, in their order.

    Parameters
    ----------
    folder : pathlib.Path
        The model's folder, as for `TextEncoder.load`.
    source : pathlib.Path
        The file of texts, as for `read_texts`; `-` is standard input, read as lines.
    target : pathlib.Path
        The .npy file to write; `-` is standard output.
    field : str, optional
        As for `read_texts`.
    dtype, pooling, normalize, device
        As for `TextEncoder.load`; the default device is "auto".
    truncate, max_tokens, empty
        As for `TextEncoder.embed`.
    force : bool, default False
        Replace an existing target, and discard the unfinished file of another run.
    progress : callable, optional
        Called with the finished texts and all texts.

    Returns
    -------
    Report
        What was done, and how fast.

    Raises
    ------
    FileError
        For files that cannot be read or written, a text that `TextEncoder.embed` refuses, an existing target, or an
        unfinished file of another run.
    ValueError, ImportError, NoDeviceError
        As `TextEncoder.load` and `TextEncoder.embed` do.

    Notes
    -----
    The whole source is read and checked first; the tokens of all texts are held in memory, 4 bytes each.
    Rows are written in windows to target.part, and target.part.json describes them. When all rows are written,
    target.part is renamed to target and the description is removed. An interrupted run leaves both files if it has
    finished a window; the next run with the same texts, model and options continues from there, and its output has the
    bits of an uninterrupted run. Finished rows are trusted only if their checksum is the one in the description.
    Standard output cannot be continued.

    Only one process can write a target at a time; on Windows this is not checked.
    """
    if source != STANDARD:
        with naming(source):
            source.stat()
    if target == STANDARD:
        check_standard_output()
    else:
        check_target(target, [source], force=force)
    model = TextEncoder.load(folder, dtype=dtype, pooling=pooling, normalize=normalize, device=device)
    texts = read_texts(source, field)
    options: dict[str, Any] = {"truncate": truncate, "max_tokens": max_tokens, "empty": empty}
    model.tokenize((), **options)  # checks the options before the texts
    try:
        tokens = model.tokenize(texts, **options)
    except ValueError as error:
        raise FileError(f"{source}: {error}") from error
    digest = _digest(model, folder, tokens)
    shape = len(tokens), model.encoder.config.hidden
    with contextlib.ExitStack() as stack:
        part = (
            PipedPart(shape, model.dtype)
            if target == STANDARD
            else Part(target, shape, model.dtype, digest, force=force)
        )
        stack.callback(part.leave)
        resumed = part.done
        if resumed:
            progress(resumed, len(tokens))
        started = time.perf_counter()
        for start in range(resumed, len(tokens), WINDOW):
            part.append(_rows_of_window(model, tokens, start, progress))
        part.sync()
        seconds = time.perf_counter() - started
        part.publish()
    return Report(
        output=str(target),
        model=str(folder),
        texts=len(tokens),
        tokens=len(tokens.flat),
        columns=shape[1],
        dtype=model.dtype.name,
        pooling=model.pooling,
        normalize=model.normalize,
        device=model.encoder.device,
        truncated=tokens.truncated,
        resumed=resumed,
        seconds=seconds,
    )


def _rows_of_window(
    model: TextEncoder, tokens: Tokens, start: int, progress: Callable[[int, int], None]
) -> np.ndarray[Any, Any]:
    """Return the embeddings of the window of texts from `start` on, in the order of the texts."""
    stop = min(start + WINDOW, len(tokens))
    rows = np.empty((stop - start, model.encoder.config.hidden), model.dtype)
    done = start
    for places, embedded in model.window(tokens, start, stop):
        rows[places - start] = embedded
        done += len(places)
        progress(done, len(tokens))
    return rows


def _digest(model: TextEncoder, folder: Path, tokens: Tokens) -> str:
    """Return a digest of everything that the embeddings depend on."""
    config = model.encoder.config
    options = [SCHEMA, dataclasses.asdict(config), model.pooling, model.normalize, WINDOW, model.batch_tokens]
    if model.encoder.device != "cpu":  # a GPU gives other bits
        options.append(model.encoder.device)
    digest = hashlib.sha256(json.dumps(options).encode())
    path = read_modules(folder)[0] / "model.safetensors"
    with naming(path), path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    for each in (tokens.starts, tokens.flat):
        digest.update(each.data)
    return digest.hexdigest()
