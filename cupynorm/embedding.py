"""Texts in, one embedding a text out: a model's folder with its tokenizer, and files of texts, resumed where a run ended."""

from __future__ import annotations

import array
import contextlib
import csv
import dataclasses
import hashlib
import itertools
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cupynorm import _install
from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm._options import boolean, choice, integer, plainly, shown
from cupynorm.encoder import POOLINGS, BertEncoder, DeviceName, Pooling, read_json
from cupynorm.runtime import devices
from cupynorm.tools.files import (
    STANDARD,
    FileError,
    Pipe,
    Target,
    _allocate,
    _check_target,
    _naming,
    check_standard_output,
    mode_of,
    npy_header,
    open_like,
)

Array = np.ndarray[Any, Any]
Empty = Literal["error", "zeros"]

GROUP = 1024  # texts that are tokenised at a time: what the tokenizer returns is large
WINDOW = 2048  # texts that are sorted by length together, and written together
BATCH_TOKENS = 4096  # of a batch, unless one text has more: on a CPU, less is slower and more no faster
DEVICE_BATCH_TOKENS = 32768  # the same on a GPU: enough to fill one
# What would be taken for plain lines, and what to do about it.
UNREAD = {
    ".json": "write one object a line, as .jsonl has them",
    ".tsv": "write it with commas, as .csv",
    ".parquet": "write its column of texts as .csv or .jsonl",
    ".arrow": "write its column of texts as .csv or .jsonl",
    ".xlsx": "save the sheet as .csv",
    ".gz": "unpack it",
    ".zip": "unpack it",
    ".npy": "write its texts as lines",
}
MOST_CELL = 1 << 30  # characters of a .csv's cell; the csv module allows 131072 unless it is told
SCHEMA = 2  # of the note beside an unfinished file, and of what its digest covers


class Tokens(NamedTuple):
    """The tokens of many texts, one after the other. A text without any is an empty one."""

    flat: Array
    starts: Array  # of each text, and the end
    truncated: int  # texts that were

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> Array:
        """Return the number of tokens of each text."""
        return np.diff(self.starts)

    def of(self, text: int) -> Array:
        """Return one text's tokens."""
        tokens: Array = self.flat[self.starts[text] : self.starts[text + 1]]
        return tokens


class TextEncoder:
    """A sentence encoder: a tokenizer, BERT's encoder, pooling, and L2 normalisation where the model has it.

    `load` reads one from a folder; `embed` takes texts.
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
        """Load config.json, model.safetensors and tokenizer.json of a folder; see BertEncoder.from_safetensors.

        pooling and normalize: None is what modules.json says, as sentence-transformers writes it; without that file, "mean" and
        True. device: as BertEncoder has it; embeddings are NumPy arrays all the same. Needs the packages tokenizers and
        safetensors (the extra `text`), and ImportError says so.

        Raises FileError for files that are missing, damaged, or of a model with other parts than those; TypeError for a dtype
        that is not supported.
        """
        folder = Path(folder)
        inner, told_pooling, told_normalize = _modules(folder)
        encoder = BertEncoder.from_safetensors(inner, dtype=dtype, device=device)
        tokenizer = _tokenizer(inner / "tokenizer.json")
        return cls(
            encoder,
            tokenizer,
            pooling=told_pooling if pooling is None else pooling,
            normalize=told_normalize if normalize is None else normalize,
        )

    def embed(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        max_tokens: int | None = None,
        empty: Empty = "error",
    ) -> Array:
        """Return one row a text: [texts, hidden], in float32 (float64 for a float64 encoder).

        A text of more than max_tokens (the encoder's positions, if None) is an error, or loses its end with `truncate`. So is
        a text without any words, or `empty="zeros"` makes its row 0.

        Raises ValueError for such texts, which it names, and TypeError for what are no texts. All are checked before any
        is computed.
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

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of embeddings."""
        return compute_dtype(dtype_of(self.encoder.config.dtype))

    def tokenize(
        self, texts: Iterable[tuple[str, str]], *, truncate: bool, max_tokens: int | None, empty: Empty
    ) -> Tokens:
        """Return the tokens of texts, each of which comes with what an error calls it. Raises ValueError, as embed does."""
        choice("empty", empty, ("error", "zeros"), "use error or zeros")
        truncate = boolean("truncate", truncate)
        positions, vocabulary = self.encoder.config.positions, self.encoder.config.vocabulary
        most = positions if max_tokens is None else integer("max_tokens", max_tokens)
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if not special < most <= positions:
            raise ValueError(
                f"max_tokens is {plainly(most)}: it must be {special + 1} to {positions}, the encoder's positions"
            )
        self._tokenizer.no_padding()
        if truncate:
            self._tokenizer.enable_truncation(most)
        else:
            self._tokenizer.no_truncation()
        flat, starts, truncated = array.array("i"), array.array("q", [0]), 0
        source = iter(texts)
        while group := list(itertools.islice(source, GROUP)):
            for name, text in group:
                _check_text(name, text)
            found = self._tokenizer.encode_batch_fast([text for _, text in group])
            for (name, _), each in zip(group, found, strict=True):
                ids = each.ids
                if len(ids) > most:
                    raise ValueError(
                        f"{name} has {len(ids)} tokens, at most {most} are possible: shorten it, or let it be truncated"
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

    def window(self, tokens: Tokens, start: int, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield the embeddings of some texts in batches of similar length, with the texts' places from `start` on."""
        lengths = tokens.lengths()[start:stop]
        order = np.argsort(lengths, kind="stable")
        pending: list[tuple[Array, Any]] = []
        for batch in _batches(lengths[order], self.batch_tokens):
            places = order[batch]
            embedded = self.encoder.embed(
                [tokens.of(int(start + place)) for place in places],
                pooling=self.pooling,
                normalize=self.normalize,
            )
            if self.encoder.device == "cpu":
                yield places + start, embedded
            else:  # the next batch is packed while a device computes this one
                pending.append((places + start, embedded))
        for places, embedded in pending:
            yield places, devices.cupy().asnumpy(embedded)

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch at most, unless one text has more."""
        return BATCH_TOKENS if self.encoder.device == "cpu" else DEVICE_BATCH_TOKENS


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is a {type(text).__qualname__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may spell halves of characters
        raise ValueError(f"{name} is no text: it holds a lone surrogate") from error


def _batches(lengths: Array, most: int) -> Iterator[slice]:
    """Cut sorted lengths into slices of at most so many tokens, or of one text."""
    first, held = 0, 0
    for at, length in enumerate(lengths.tolist()):
        if at > first and held + length > most:
            yield slice(first, at)
            first, held = at, 0
        held += length
    if len(lengths):
        yield slice(first, len(lengths))


def _tokenizer(path: Path) -> Any:
    try:
        import tokenizers  # noqa: PLC0415  optional: only texts need it
    except ImportError as error:
        raise ImportError(
            f"texts are taken apart by the package tokenizers: {_install.pip_install('text')}"
        ) from error
    if not path.is_file():
        raise FileError(f"{path}: there is none")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise FileError(f"{path}: is no tokenizer, or is damaged ({error})") from error


def _modules(folder: Path) -> tuple[Path, Pooling, bool]:
    """Return where the encoder lies, how it is pooled, and whether that is normalised, as modules.json says."""
    path = folder / "modules.json"
    if not path.exists():
        return folder, "mean", True
    try:
        modules = read_json(path, list)
        kinds = [(str(each["type"]).rpartition(".")[2], folder / str(each["path"])) for each in modules]
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: is no list of modules with type and path") from error
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise FileError(
            f"{path}: lists {', '.join(names)}: only Transformer, Pooling and Normalize are known, in that order"
        )
    return kinds[0][1], _pooling(kinds[1][1] / "config.json"), "Normalize" in names


def _pooling(path: Path) -> Pooling:
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
            f"{path}: pools by {', '.join(modes) or 'nothing'}: only mean or cls, one of them, is known"
        )
    return known[modes[0]]


def read_texts(path: Path, field: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each with its place, such as "line 7".

    .jsonl and .ndjson: the `field` of each line's object; .csv: the column `field`, which the first line names; .json, .tsv,
    .parquet and other formats of tables or archives are refused; anything else: the lines. `field` is "text" if None. An
    empty line is a text, but no object and no row. `-` is standard input, of lines. UTF-8 only.
    Raises FileError, and at once ValueError for a `field` where there are only lines.
    """
    kind = path.suffix.lower()
    if kind in UNREAD:
        raise FileError(f"{path}: {UNREAD[kind]}; .jsonl, .ndjson, .csv and files of lines are read")
    if kind in {".jsonl", ".ndjson"}:
        return _objects(path, field or "text")
    if kind == ".csv":
        return _cells(path, field or "text")
    if field is not None:
        raise ValueError(
            f"field: {path} is read by lines, which have no field {field!r}: .jsonl and .csv have"
        )
    return ((f"line {number}", line.removesuffix("\n").removesuffix("\r")) for number, line in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a file's lines with their ends, numbered from 1."""
    with _naming(path):
        if path != STANDARD and not stat.S_ISREG(path.stat().st_mode):
            raise FileError(f"{path}: is not a regular file")
        with open(0, "rb", closefd=False) if path == STANDARD else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise FileError(f"{path}: line {number} is not UTF-8 ({error.reason})") from error
                yield number, line


def _objects(path: Path, field: str) -> Iterator[tuple[str, str]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path}: line {number} is no JSON ({error})") from error
        if not isinstance(found, dict) or not isinstance(found.get(field), str):
            raise FileError(f"{path}: line {number} is no object with a text as {field!r}")
        yield f"line {number}", found[field]


def _cells(path: Path, field: str) -> Iterator[tuple[str, str]]:
    rows = csv.reader((line for _, line in _lines(path)), strict=True)
    before = csv.field_size_limit(MOST_CELL)  # of the whole process: it is put back at the end
    try:
        names = next(rows, [])
        if field not in names:
            raise FileError(f"{path}: has no column {field!r}, it has {', '.join(names) or 'none'}")
        column = names.index(field)
        for row in rows:
            if not row:
                continue
            if len(row) <= column:
                raise FileError(
                    f"{path}: line {rows.line_num} has {len(row)} columns, {field!r} is number {column + 1}"
                )
            yield f"line {rows.line_num}", row[column]
    except csv.Error as error:
        raise FileError(f"{path}: line {rows.line_num} is no CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


@dataclasses.dataclass(frozen=True)
class Report:
    """What embed_file() did."""

    output: str
    model: str
    texts: int
    tokens: int
    columns: int
    dtype: str  # of the output
    pooling: str
    normalize: bool
    device: str  # "cpu" or "gpu"
    truncated: int  # texts that were
    resumed: int  # texts that an earlier run had done
    seconds: float  # from the first text computed to the last one on the disk

    @property
    def texts_per_second(self) -> float:
        """Texts of this run, a second."""
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
    """Embed the texts of `source` with the model of `folder` into the .npy file `target`, one row a text, in their order.

    Everything is read and checked first; the tokens of all texts are held, 4 bytes each. Rows are written window by window to
    target.part, with a note of what they are in target.part.json; at the end that file gets its name, and the note goes. A run
    that ends before leaves both if a window was done, and the next one with the same texts, model and options goes on from
    there: what it writes has the bits of a run that was not ended. Rows that are there are trusted only with the checksum that
    the note has of them. `-` as source or target is standard input, of lines, or standard output, which cannot be resumed.
    `device`: as TextEncoder.load has it. Only one process writes a target at a time (on Windows nobody looks). `force`
    replaces a target, and a part that is not this run's. `progress` is told texts done and texts in all.

    Raises FileError for files that are no good, a text in them that embed() refuses, an existing target, or a part of another
    run; ValueError and ImportError as TextEncoder.load and embed do.
    """
    if source != STANDARD:
        with _naming(source):
            source.stat()
    if target == STANDARD:
        check_standard_output()
    else:
        _check_target(target, [source], force=force)
    model = TextEncoder.load(folder, dtype=dtype, pooling=pooling, normalize=normalize, device=device)
    texts = read_texts(source, field)
    options: dict[str, Any] = {"truncate": truncate, "max_tokens": max_tokens, "empty": empty}
    model.tokenize((), **options)  # its options are checked before its texts
    try:
        tokens = model.tokenize(texts, **options)
    except ValueError as error:
        raise FileError(f"{source}: {error}") from error
    told = _digest(model, folder, tokens)
    with contextlib.ExitStack() as stack:
        shape = len(tokens), model.encoder.config.hidden
        piped = target == STANDARD
        part = (
            _PipedPart(shape, model.dtype) if piped else _Part(target, shape, model.dtype, told, force=force)
        )
        stack.callback(part.leave)
        resumed = part.done
        if resumed:
            progress(resumed, len(tokens))
        started = time.perf_counter()
        for start in range(resumed, len(tokens), WINDOW):
            stop = min(start + WINDOW, len(tokens))
            rows = np.empty((stop - start, model.encoder.config.hidden), model.dtype)
            done = start
            for places, embedded in model.window(tokens, start, stop):
                rows[places - start] = embedded
                done += len(places)
                progress(done, len(tokens))
            part.append(rows)
        part.sync()
        seconds = time.perf_counter() - started
        part.publish()
    return Report(
        output=str(target),
        model=str(folder),
        texts=len(tokens),
        tokens=len(tokens.flat),
        columns=model.encoder.config.hidden,
        dtype=model.dtype.name,
        pooling=model.pooling,
        normalize=model.normalize,
        device=model.encoder.device,
        truncated=tokens.truncated,
        resumed=resumed,
        seconds=seconds,
    )


def unfinished(target: Path) -> tuple[int, int] | None:
    """Return how many texts of how many an ended run has left for the next one, if any."""
    note, part = _beside(target)
    try:
        told = json.loads(note.read_text("utf-8"))
        done, texts = int(told["done"]), int(told["texts"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (done, texts) if done and part.exists() else None


def _beside(target: Path) -> tuple[Path, Path]:
    return target.with_name(f"{target.name}.part.json"), target.with_name(f"{target.name}.part")


def _digest(model: TextEncoder, folder: Path, tokens: Tokens) -> str:
    """Return a digest of all that the embeddings depend on."""
    config = model.encoder.config
    options = [SCHEMA, dataclasses.asdict(config), model.pooling, model.normalize, WINDOW, model.batch_tokens]
    if model.encoder.device != "cpu":  # whose bits are others
        options.append(model.encoder.device)
    digest = hashlib.sha256(json.dumps(options).encode())
    path = _modules(folder)[0] / "model.safetensors"
    with _naming(path), path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    for each in (tokens.starts, tokens.flat):
        digest.update(each.data)
    return digest.hexdigest()


class _Part(Target):
    """A target whose rows lie beside it until it is published, with a note that lets another process go on.

    A window's rows are on the disk before the note counts them.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: np.dtype[Any], digest: str, *, force: bool
    ) -> None:
        self.path = path
        self.done = 0
        self._force = force
        self._note, self._temporary = _beside(path)
        self._told: dict[str, Any] = {"schema": SCHEMA, "digest": digest, "texts": shape[0]}
        self._written = hashlib.sha256()  # over the rows that are done
        self._row_bytes = shape[1] * dtype.itemsize
        self.bytes = math.prod(shape) * dtype.itemsize
        head = npy_header(shape, dtype)
        with _naming(self._temporary):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
            mode = mode_of(path) if force else None
            self._file = os.fdopen(open_like(self._temporary, flags, mode), "wb")
        try:
            size = self._take()
            self.done = self._ready(size, len(head), len(head) + self.bytes)
        except BaseException:  # what is there may be another's
            self._file.close()
            raise
        try:
            self._begin(head)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the file. What is done stays for the next run; a part with nothing done goes."""
        if self.done:
            with contextlib.suppress(OSError):  # closing flushes, and a full disk fails once more
                self._file.close()
        else:
            self.discard()

    def append(self, rows: Array) -> None:
        """Write rows, and count them."""
        self.write(rows)
        self._written.update(np.ascontiguousarray(rows).data.cast("B"))
        with _naming(self._temporary):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._count(self.done + len(rows))

    def publish(self) -> None:
        """Give the file its name, and remove the note."""
        super().publish()
        with contextlib.suppress(OSError):
            self._note.unlink()

    def discard(self) -> None:
        """Remove the part and its note."""
        super().discard()
        with contextlib.suppress(OSError):
            self._note.unlink()

    def _take(self) -> int:
        """Keep other processes out; return the size of what is there."""
        with _naming(self._temporary):
            found = os.fstat(self._file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise FileError(f"{self._temporary}: is not a regular file")
            _lock(self._file, self._temporary)
            return os.fstat(self._file.fileno()).st_size

    def _ready(self, size: int, head: int, whole: int) -> int:
        """Return how many rows there are already. What an earlier run has left is another's unless its note says otherwise."""
        if not size:
            return 0
        told = self._read_note()
        problem = None
        if told is None:
            problem = "is there, without a note of what it is"
        elif {name: told.get(name) for name in self._told} != self._told:
            problem = "is the unfinished run of other texts, another model or other options"
        elif not isinstance(told.get("done"), int) or not 0 <= told["done"] <= self._told["texts"]:
            problem = "has a note that is damaged"
        elif told["done"] and size < whole:
            problem = "became shorter"
        elif told["done"] and told.get("written") != self._read_back(head, told["done"]):
            problem = "holds other rows than its note says were written"
        if problem is None and told is not None:
            return int(told["done"])
        if not self._force:
            raise FileError(f"{self._temporary}: {problem}: --force begins anew")
        self._written = hashlib.sha256()
        return 0

    def _read_back(self, head: int, rows: int) -> str:
        """Return the checksum of so many rows as they lie in the file, and go on counting from there."""
        self._written = hashlib.sha256()
        left = rows * self._row_bytes
        with _naming(self._temporary), self._temporary.open("rb") as file:
            file.seek(head)
            while left and (piece := file.read(min(left, 1 << 22))):
                self._written.update(piece)
                left -= len(piece)
        return self._written.hexdigest()

    def _begin(self, head: bytes) -> None:
        """Make room for all rows, and go where the next one will be."""
        with _naming(self._temporary):
            if not self.done:
                self._count(0)
                self._file.truncate(0)
            self._file.write(head)
            self._file.flush()
            _allocate(self._file.fileno(), len(head) + self.bytes)
            self._file.seek(len(head) + self.done * self._row_bytes)

    def _read_note(self) -> dict[str, Any] | None:
        try:
            told = json.loads(self._note.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return told if isinstance(told, dict) else None

    def _count(self, done: int) -> None:
        """Replace the note at once, by one that counts so many rows."""
        new = self._note.with_name(f"{self._note.name}.new")
        with _naming(self._note):
            try:
                with new.open("w", encoding="utf-8") as file:
                    json.dump({**self._told, "done": done, "written": self._written.hexdigest()}, file)
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(self._note)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
        self.done = done


class _PipedPart(Pipe):
    """Standard output in a part's place: what is out cannot be resumed."""

    done = 0

    def append(self, rows: Array) -> None:
        """Write rows."""
        self.write(rows)

    def leave(self) -> None:
        """Do nothing: what is out is out."""


def _lock(file: Any, path: Path) -> None:
    """Keep other processes out until the file is closed, however this one ends."""
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(f"{path}: another process is writing it") from None
