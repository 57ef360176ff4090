"""What one commit answers to scripts/same: its kernels, compiled, and its plans. Runs in a process of that commit.

python same_answers.py kernels|plans OUT --cache FOLDER, in the commit's tree, with that tree on PYTHONPATH.
Everything that knows the commit's modules is in its tests/same_adapter.py; here is what is alike for all commits.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import same_adapter as commit

# A module costs 50 ms before its first kernel, so kernels share one; their machine code is the same as alone.
KERNELS_PER_MODULE = 16
KEPT_DAYS = 30
NOP = 0x918  # the opcode, in the lowest 12 bits of an instruction's 16 bytes
PROCESSES = len(os.sched_getaffinity(0))
TOLD_EVERY = 500  # kernels


def tell(what: str) -> None:
    """Say how far this is, to whoever waits."""
    print(f"    {what}", file=sys.stderr, flush=True)


def pool() -> Any:
    """Return a pool with a process for each core. They are forked, so the commit's modules are imported once."""
    return multiprocessing.get_context("fork").Pool(PROCESSES)


# --- machine code ----------------------------------------------------------------------------------------------------


def code_of(image: bytes, name: str) -> tuple[bytes, bytes]:
    """Return a kernel's instructions and its literal constants, from a module's ELF file."""
    (headers,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, headers + i * size) for i in range(count)]
    code, constants = b"", b""
    for section in sections:
        start = sections[names][4] + section[0]
        kind = image[start : image.index(b"\0", start)].decode()
        content = image[section[4] : section[4] + section[5]]
        if kind == f".text.{name}":
            code = content
        elif kind.startswith(".nv.constant") and kind.endswith(f".{name}") and kind[12] != "0":
            constants += content  # bank 0 holds the arguments, which come with the launch
    if not code:
        raise KeyError(f"the module has no kernel {name}")
    return code, constants


def instructions(code: bytes) -> int:
    """Count a kernel's instructions, without those that only fill its end."""
    return sum(word & 0xFFF != NOP for word, _ in struct.iter_unpack("<QQ", code))


# --- what a kernel's text includes -----------------------------------------------------------------------------------

INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.MULTILINE)
PRAGMA = re.compile(r"^\s*#\s*pragma.*$", re.MULTILINE)
END = "#pragma same_end_of_a_file"


class Sources:
    """The CUDA sources, by name, without comments, so that a commit that only rewords them compiles nothing again."""

    def __init__(self, folder: Path) -> None:
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.cu*"))}
        texts = _without_comments([path.read_text("utf-8") for path in files.values()])
        self._texts = dict(zip(files, texts, strict=True))
        self._reached: dict[tuple[str, ...], str] = {}

    def digest(self, text: str) -> str:
        """Return a hash of all that a module's text includes, directly or not."""
        roots = tuple(INCLUDE.findall(text))
        if roots not in self._reached:
            found: dict[str, str] = {}
            waiting = list(roots)
            while waiting:
                name = waiting.pop()
                if name not in found:
                    if (
                        name not in self._texts
                    ):  # perhaps relative to the file that includes it: take all files
                        found = self._texts
                        break
                    found[name] = self._texts[name]
                    waiting += INCLUDE.findall(found[name])
            self._reached[roots] = _hash(*itertools.chain(*sorted(found.items())))
        return self._reached[roots]


def _without_comments(texts: Sequence[str]) -> list[str]:
    """Return sources without comments where g++ is there to find them, else as they are.

    Nothing is expanded and no condition is decided. g++ keeps all directives but #pragma once. It takes as long to
    start as for all of them, so they are one input, with a line of ours behind each.
    """
    known = [shutil.which("g++") is not None and "__LINE__" not in text for text in texts]
    given = [text for text, each in zip(texts, known, strict=True) if each]
    command = ["g++", "-fpreprocessed", "-dD", "-E", "-P", "-x", "c++", "-"]
    joined = "".join(f"{text}\n{END}\n" for text in given)
    done = (
        subprocess.run(command, input=joined, capture_output=True, text=True, check=False) if given else None
    )
    found = done.stdout.split(f"{END}\n") if done and not done.returncode else []
    if len(found) != len(given) + 1:  # a comment or a text without an end: each alone, if there are several
        return [each for text in texts for each in _without_comments([text])] if len(texts) > 1 else [*texts]
    bare = iter(found)
    return [
        "\n".join((*PRAGMA.findall(text), next(bare))) if each else text
        for text, each in zip(texts, known, strict=True)
    ]


def _hash(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


# --- the cache -------------------------------------------------------------------------------------------------------


class Store:
    """Compiled kernels in one file, by all that they depend on."""

    def __init__(self, folder: Path) -> None:
        self._file = sqlite3.connect(folder / "kernels.sqlite", timeout=60)
        columns = "key TEXT PRIMARY KEY, used REAL, numbers TEXT, code BLOB"
        self._file.execute(f"CREATE TABLE IF NOT EXISTS kernels ({columns})")

    def find(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the numbers of those that are there."""
        known = {
            key: json.loads(text) for key, text in self._file.execute("SELECT key, numbers FROM kernels")
        }
        return {key: known[key] for key in keys if key in known}

    def add(self, key: str, numbers: dict[str, Any], code: bytes) -> None:
        """Keep a kernel."""
        row = (key, time.time(), json.dumps(numbers), zlib.compress(code, 1))
        self._file.execute("INSERT OR REPLACE INTO kernels VALUES (?, ?, ?, ?)", row)
        self._file.commit()

    def close(self, used: Iterable[str]) -> None:
        """Note which kernels were used, and drop those that were not for a month."""
        now = time.time()
        self._file.executemany("UPDATE kernels SET used = ? WHERE key = ?", ((now, key) for key in used))
        self._file.execute("DELETE FROM kernels WHERE used < ?", (now - KEPT_DAYS * 86400,))
        self._file.commit()
        self._file.close()


def python_digest(*more: str) -> str:
    """Hash all Python code of this commit and of this tool that a list of kernels or plans could depend on."""
    files = [*Path("cupynorm").rglob("*"), *Path("tests").glob("*.py"), Path(__file__)]
    texts = [path.read_bytes().decode("latin-1") for path in sorted(files) if path.suffix in {".py", ".json"}]
    return _hash(sys.version, *more, *texts)


def _drop_old(folder: Path) -> None:
    for path in folder.iterdir():
        if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
            path.unlink(missing_ok=True)


def _write(path: Path, lines: Iterable[str]) -> None:
    """Write lines, compressed; whoever looks meanwhile sees no half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    with gzip.open(draft, "wt", compresslevel=1) as file:
        file.writelines(f"{line}\n" for line in lines)
    draft.replace(path)


# --- kernels ---------------------------------------------------------------------------------------------------------


def _list(part: str) -> list[str]:
    listed = []
    for kernel in commit.kernels(part):
        lines = [line for line in kernel.text.splitlines() if not line.startswith("// cupynorm ")]
        listed.append(json.dumps({**kernel._asdict(), "text": "\n".join(lines) + "\n"}, sort_keys=True))
    return listed


def listed_kernels(cache: Path, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Return the commit's kernels, listed once for the same Python code."""
    digest = python_digest()
    files = {part: cache / "lists" / f"{_hash(digest, part)}.json.gz" for part in parts}
    missing = [part for part in parts if not files[part].exists()]
    if missing:
        with pool() as workers:
            for part, listed in zip(missing, workers.imap(_list, missing), strict=True):
                _write(files[part], listed)
    _drop_old(cache / "lists")
    for path in files.values():
        os.utime(path)
        with gzip.open(path, "rt") as file:
            yield from map(json.loads, file)


def batches(kernels: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Put kernels together that one module may hold: texts that only include the same, or the very same text."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        lines = kernel["text"].splitlines()
        plain = all(line.startswith(("#include ", "//", "static_assert(")) for line in lines if line)
        includes = "\n".join(line for line in lines if line.startswith("#include "))
        groups[kernel["arch"], includes if plain else kernel["text"]].append(kernel)
    size = max(1, min(KERNELS_PER_MODULE, math.ceil(len(kernels) / PROCESSES / 4)))
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


Built = tuple[str, dict[str, Any], bytes]  # key, numbers, instructions


def build(batch: Sequence[dict[str, Any]]) -> list[Built]:
    """Compile one module. If that fails, compile each of its kernels alone, so that the others have results."""
    text = "".join(dict.fromkeys(kernel["text"] for kernel in batch))
    try:
        made = commit.compile_together(text, [each["expression"] for each in batch], batch[0]["arch"])
    except RuntimeError as error:
        if len(batch) > 1:
            return [built for kernel in batch for built in build([kernel])]
        return [(batch[0]["key"], {"error": str(error)[:2000]}, b"")]
    found = []
    for kernel, each in zip(batch, made, strict=True):
        code, constants = code_of(each.image, each.name)
        numbers = {
            "code": hashlib.sha256(code + b"\0" + constants).hexdigest()[:32],
            "instructions": instructions(code),
            "registers": each.registers,
            "local_bytes": each.local_bytes,
            "static_shared_bytes": each.shared_bytes,
        }
        found.append((kernel["key"], numbers, code))
    return found


def answer_kernels(cache: Path, parts: Sequence[str], only: str) -> Iterator[str]:
    """Give each kernel's label, plan and what the compiler made of it. What is not in the cache is compiled."""
    sources, compiler = Sources(commit.sources()), commit.compiler()
    kernels = [each for each in listed_kernels(cache, parts) if re.search(only, each["label"])]
    for each in kernels:
        includes = sources.digest(each["text"])
        each["key"] = _hash(includes, compiler, each["text"], each["expression"], each["arch"])
    store = Store(cache)
    known = store.find(each["key"] for each in kernels)
    missing = {each["key"]: each for each in kernels if each["key"] not in known}
    tell(f"{len(missing)} of {len({each['key'] for each in kernels})} kernels are to be compiled")
    if missing:
        with pool() as workers:
            for built in workers.imap_unordered(build, batches(list(missing.values()))):
                for key, numbers, code in built:
                    known[key] = numbers
                    if "error" not in numbers:
                        store.add(key, numbers, code)
                    if len(known) % TOLD_EVERY == 0:
                        tell(f"{len(known)} kernels")
    store.close(known)
    for each in kernels:
        numbers = known[each["key"]]
        if "error" not in numbers:
            shared = each["shared_bytes"] + numbers["static_shared_bytes"]
            blocks = commit.resident_blocks(each["block"], numbers["registers"], shared)
            numbers = {**numbers, "shared_bytes": shared, "resident_blocks": blocks}
        names = ("label", "key", "block", "plan", "call", "arch", "expression")
        yield json.dumps({**{name: each[name] for name in names}, **numbers})


# --- plans -----------------------------------------------------------------------------------------------------------

# calls of public functions with the parameters' dtype, None for that of x
FORMS = (
    *(("layer_norm", None), ("layer_norm", "float32"), ("layer_norm", "none")),
    *(("rms_norm", None), ("rms_norm", "float32"), ("softmax", None), ("log_softmax", None)),
    *((f"softmax/{mask}", None) for mask in ("where", "lengths", "causal", "bias")),
    *((f"add_layer_norm{how}", None) for how in ("", "/sum", "/dropout")),
    *(("add_rms_norm", None), ("add_rms_norm/sum", None)),
    *(("layer_norm/int8", None), ("layer_norm/int8/scale", None), ("rms_norm/int8", None)),
    *(("softmax/int8", None), ("layer_norm/fuse", None), ("bias_gelu", None), ("geglu", None)),
)
DTYPES = ("float16", "float32", "float64")  # bfloat16 is planned as float16
ROWS = (1, 16, 100, 8192, 49152)
SIDE_BY_SIDE = (
    30,
    65536,
)  # rows that are neighbours in memory, whose elements lie apart, and columns of these
SIDE_BY_SIDE_COLS = (1, 77, 100, 320, 1000, 5001, 50257, 300000)
# Forms that are planned at these columns only: along the last axis and along others.
FURTHER = (
    *("softmax_backward", "cross_entropy/grad", "logsumexp"),
    *("moments", "standardize", "standardize/where"),
)
NEIGHBOURS, TABLES = (64, 33), 128  # rows of a table that are neighbours along a middle axis, and tables
LARGEST_BYTES = 2 << 30  # of x: a further result of a call is allocated, though not touched
USUAL_COLS = (77, 100, 320, 768, 1000, 1600, 2560, 3000, 5001, 5120, 17408, 20480, 50257, 128256, 300000)
RANDOM_COLS = 6


def cols() -> list[int]:
    """Return powers of two from 1 to 2**24, some numbers beside them, widths of models, and some random ones."""
    dice = random.Random(0)  # noqa: S311  the same for every commit
    found = {1 << power for power in range(25)} | set(USUAL_COLS)
    found |= {(1 << power) + 1 for power in range(5, 18, 2)} | {(1 << power) - 1 for power in range(6, 18, 2)}
    found |= {int(2 ** dice.uniform(3, 19)) for _ in range(RANDOM_COLS)}
    found |= {8 * int(2 ** dice.uniform(3, 16)) for _ in range(RANDOM_COLS)}
    return sorted(found)


def calls(only: str = "") -> Iterator[dict[str, Any]]:
    """Return what is planned: every form, dtype, width and number of rows in aligned arrays; some at other places.

    only: a regular expression that a call's label must hold, such as "layer_norm float16 49152 x 1024 + 0".
    """
    for each in _all_calls():
        if re.search(only, "{form} {dtype} {rows} x {cols} + {offset}".format(**{"offset": 0, **each})):
            yield each


def _all_calls() -> Iterator[dict[str, Any]]:
    kinds = [
        (form, dtype, None if parameters == "none" else parameters or dtype)
        for (form, parameters), dtype in itertools.product(FORMS, DTYPES)
    ]
    for (form, dtype, given), width in itertools.product(dict.fromkeys(kinds), cols()):
        yield from _calls_of({"form": form, "dtype": dtype, "parameters": given, "cols": width})
    for form, dtype, width in itertools.product(FURTHER, DTYPES, SIDE_BY_SIDE_COLS):
        yield from _calls_of({"form": form, "dtype": dtype, "parameters": dtype, "cols": width})


def _calls_of(what: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give calls of so many columns, of several numbers of rows that lie in several ways."""
    width, size = what["cols"], {"float16": 2, "float32": 4, "float64": 8}[what["dtype"]]
    most = max(1, LARGEST_BYTES // (width * size))
    for rows in dict.fromkeys(min(each, most) for each in ROWS):
        yield {**what, "rows": rows}
    for place in ({"offset": 1}, {"offset": 1, "apart": True}, {"gap": 1}, {"gap": 16 // size}):
        yield {**what, "rows": min(4096, most), **place}
    if width in SIDE_BY_SIDE_COLS:
        for rows in dict.fromkeys(min(each, most) for each in SIDE_BY_SIDE):
            yield {**what, "rows": rows, "transposed": True}
        for each in NEIGHBOURS if width > 1 else ():
            yield {**what, "rows": each * max(1, min(TABLES, most // each)), "neighbours": each}


CALLS_AT_ONCE = 200


def _plan(some: Sequence[dict[str, Any]]) -> list[str]:
    known = set(commit.Call._fields)
    none = {"none": {"error": "this commit does not know such calls"}}
    plans = (commit.plans(commit.Call(**each)) if known >= set(each) else none for each in some)
    return [
        "\t".join(json.dumps(what, sort_keys=True) for what in pair) for pair in zip(some, plans, strict=True)
    ]


def answer_plans(cache: Path, only: str) -> Path:
    """Plan all calls, once for the same Python code; return the file with a line for each: call, tab, plans."""
    path = cache / "plans" / f"{python_digest('plans', only)}.json.gz"
    if not path.exists():
        each = list(calls(only))
        some = [each[i : i + CALLS_AT_ONCE] for i in range(0, len(each), CALLS_AT_ONCE)]
        with pool() as workers:
            _write(path, itertools.chain.from_iterable(workers.imap(_plan, some)))
    os.utime(path)
    _drop_old(path.parent)
    return path


def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=("kernels", "plans"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    asked.cache.mkdir(exist_ok=True)
    if asked.question == "plans":
        shutil.copyfile(answer_plans(asked.cache, asked.only), asked.out)
        return
    parts = [part for part in commit.parts() if not asked.part or part.startswith(tuple(asked.part))]
    if not parts:
        sys.exit(f"no part begins with {' or '.join(asked.part)}: there are {', '.join(commit.parts())}")
    _write(asked.out, answer_kernels(asked.cache, parts, asked.only))


if __name__ == "__main__":
    main()
