"""The documents, and the blocks of code that stand in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "benchmarks/*.md", "docs/**/*.md")
    for path in CHECKOUT.glob(pattern)
    if not path.name.startswith(".")
)


class Block(NamedTuple):
    """A fenced block of code: the line of its first line, counted from 1, and the language of its fence."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """What a test of it is called."""
        return f"{self.page.relative_to(CHECKOUT)} line {self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands(block: Block) -> list[tuple[str, str]]:
    """Return (where, line) of each command of a block for a shell: without comments, continued lines joined."""
    joined = re.sub(r"(\|\s*|\\)\n", lambda match: match[1].rstrip("\\\n").rstrip() + " ", block.text)
    lines = [line.partition("  #")[0].strip() for line in joined.splitlines()]
    return [(f"{block.name}: {line}", line) for line in lines if line]


def run_in_a_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line as a reader would, in an empty folder; `cupynorm` and `python3` are this checkout and this Python."""
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in (("cupynorm", " -m cupynorm"), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n', "utf-8")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(CHECKOUT),
        "CUPYNORM_CACHE_DIR": str(folder / "cache"),
    }
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
