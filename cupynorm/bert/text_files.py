"""Reads texts from files of lines, .jsonl and .csv."""

from __future__ import annotations

import csv
import json
import stat
from collections.abc import Iterator
from pathlib import Path

from cupynorm.npy.paths import STANDARD, FileError, naming

# Formats that must not be read as lines, and what to do instead.
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
MOST_CELL = 1 << 30  # characters of a .csv's cell; the csv module's own limit is 131072


def read_texts(path: Path, field: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the texts of a UTF-8 file, each with its place, such as "line 7".

    Parameters
    ----------
    path : pathlib.Path
        .jsonl and .ndjson hold one object a line, .csv has the names of its columns in the first line, and any other
        file holds one text a line. Formats of tables and archives, such as .json, .tsv and .parquet, are refused. `-`
        is standard input, read as lines.
    field : str, optional
        The field of each object, or the column; default "text".

    Yields
    ------
    tuple of str
        The place and the text. An empty line is a text in a file of lines, and is skipped in the other formats.

    Raises
    ------
    FileError
        If the file cannot be read, or does not hold a text where it should.
    ValueError
        If a field is given for a file of lines. It is raised at once, not by the iterator.
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
            f"field: {path} is read as lines, which have no field {field!r}; .jsonl and .csv have fields"
        )
    return ((f"line {number}", line.removesuffix("\n").removesuffix("\r")) for number, line in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a file's lines with their ends, numbered from 1."""
    with naming(path):
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
            raise FileError(f"{path}: line {number} is not valid JSON ({error})") from error
        if not isinstance(found, dict) or not isinstance(found.get(field), str):
            raise FileError(f"{path}: line {number} is not an object with a text as {field!r}")
        yield f"line {number}", found[field]


def _cells(path: Path, field: str) -> Iterator[tuple[str, str]]:
    rows = csv.reader((line for _, line in _lines(path)), strict=True)
    before = csv.field_size_limit(MOST_CELL)  # a setting of the whole process, restored at the end
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
        raise FileError(f"{path}: line {rows.line_num} is not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(before)
