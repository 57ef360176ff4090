"""Texts to tokens: a model's tokenizer, its pooling, and batches of texts of similar length."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupynorm import _install
from cupynorm.bert.checkpoint import read_json
from cupynorm.bert.config import Pooling
from cupynorm.npy.paths import FileError

Array = np.ndarray[Any, Any]

GROUP = 1024  # texts tokenised at a time: the tokenizer's results are large


class Tokens(NamedTuple):
    """The tokens of many texts in one array. An empty text has none."""

    flat: Array
    starts: Array  # the first token of each text, and the end of the last one
    truncated: int  # the number of texts that were truncated

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> Array:
        """Return the number of tokens of each text."""
        return np.diff(self.starts)

    def of(self, text: int) -> Array:
        """Return one text's tokens."""
        tokens: Array = self.flat[self.starts[text] : self.starts[text + 1]]
        return tokens


def tokenized(
    tokenizer: Any,
    texts: Iterable[tuple[str, str]],
    *,
    truncate: bool,
    most: int,
    vocabulary: int,
    empty: str,
) -> Tokens:
    """Return the tokens of texts, at most `most` per text. Each text comes with the name that errors give it."""
    tokenizer.no_padding()
    if truncate:
        tokenizer.enable_truncation(most)
    else:
        tokenizer.no_truncation()
    flat, starts, truncated = array.array("i"), array.array("q", [0]), 0
    source = iter(texts)
    while group := list(itertools.islice(source, GROUP)):
        for name, text in group:
            _check_text(name, text)
        found = tokenizer.encode_batch_fast([text for _, text in group])
        for (name, _), each in zip(group, found, strict=True):
            ids = each.ids
            if len(ids) > most:
                raise ValueError(
                    f"{name} has {len(ids)} tokens, the most possible is {most}: shorten it, or let it be truncated"
                )
            if all(each.special_tokens_mask):
                if empty == "error":
                    raise ValueError(f"{name} is empty: it holds no words")
                ids = []
            elif max(ids) >= vocabulary:
                raise ValueError(
                    f"{name} has token {max(ids)}, and the vocabulary {vocabulary}: tokenizer.json is another model's"
                )
            truncated += bool(each.overflowing)
            flat.extend(ids)
            starts.append(len(flat))
    return Tokens(np.asarray(flat, np.int32), np.asarray(starts, np.int64), truncated)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is a {type(text).__qualname__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        raise ValueError(f"{name} is not valid text: it holds a lone surrogate") from error


def batches(lengths: Array, most: int) -> Iterator[slice]:
    """Split sorted lengths into slices of at most `most` tokens, or of one text that has more."""
    first, held = 0, 0
    for at, length in enumerate(lengths.tolist()):
        if at > first and held + length > most:
            yield slice(first, at)
            first, held = at, 0
        held += length
    if len(lengths):
        yield slice(first, len(lengths))


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer that a tokenizer.json holds. Raises FileError, and ImportError without tokenizers."""
    try:
        import tokenizers  # noqa: PLC0415  optional
    except ImportError as error:
        raise ImportError(
            f"tokenising texts needs the package tokenizers: {_install.pip_install('text')}"
        ) from error
    if not path.is_file():
        raise FileError(f"{path}: does not exist")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise FileError(f"{path}: is not a tokenizer, or is damaged ({error})") from error


def read_modules(folder: Path) -> tuple[Path, Pooling, bool]:
    """Return the encoder's folder, the pooling, and whether to normalise, as modules.json says. Raises FileError."""
    path = folder / "modules.json"
    if not path.exists():
        return folder, "mean", True
    try:
        modules = read_json(path, list)
        kinds = [(str(each["type"]).rpartition(".")[2], folder / str(each["path"])) for each in modules]
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: is not a list of modules with type and path") from error
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise FileError(
            f"{path}: lists {', '.join(names)}: only Transformer, Pooling and Normalize are supported, in that order"
        )
    return kinds[0][1], _read_pooling(kinds[1][1] / "config.json"), "Normalize" in names


def _read_pooling(path: Path) -> Pooling:
    found = read_json(path)
    modes = [
        name.removeprefix("pooling_mode_")
        for name, on in found.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    if isinstance(found.get("pooling_mode"), str):
        modes = [found["pooling_mode"]]
    known: dict[str, Pooling] = {"mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
    if len(modes) != 1 or modes[0] not in known:
        raise FileError(
            f"{path}: pools by {', '.join(modes) or 'nothing'}: only mean or cls, one of them, is supported"
        )
    return known[modes[0]]
