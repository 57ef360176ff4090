"""Every Python example of the pages in docs/ that needs no device and no model runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCKS = [
    (page, page.read_text("utf-8").count("\n", 0, match.start()) + 2, match[1])
    for page in PAGES
    for match in re.finditer(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if "import cupy\n" not in match[1] and "embedding" not in match[1]
]


@pytest.mark.parametrize(
    ("page", "line", "text"), BLOCKS, ids=[f"{page.stem} line {line}" for page, line, _ in BLOCKS]
)
def test_an_example_runs(page: Path, line: int, text: str) -> None:
    exec(compile("\n" * (line - 1) + text, page, "exec"), {"__name__": "__main__"})  # noqa: S102


def test_there_are_ten_fusions() -> None:
    assert sum(page.stem == "fusions" for page, _, _ in BLOCKS) == 10
