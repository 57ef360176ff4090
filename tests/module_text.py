"""Takes the text of a module apart, so that several kernels can be compiled together."""

from __future__ import annotations

import re
from collections.abc import Iterable

# All that a text of runtime.compiler.text() consists of: such texts can be joined, and no others.
PART = re.compile(
    r"(?P<comment>//.*\n)|(?P<include>#include <.*>\n)|(?P<line>static_assert\(.*\);\n)"
    r"|(?P<functions>namespace cupynorm \{\n(?:.*\n)*?\}  // namespace cupynorm\n)"
)


def parts_of(code: str) -> list[re.Match[str]] | None:
    """Take a text apart; None if it has anything that PART does not know."""
    found, at = [], 0
    while at < len(code):
        part = PART.match(code, at)
        if part is None:
            return None
        found.append(part)
        at = part.end()
    return found


def joined(texts: Iterable[str]) -> str:
    """Return one text with all that these consist of; texts of what is fused may define the same functions."""
    found: dict[str, None] = {}
    for text in dict.fromkeys(texts):
        parts = parts_of(text)
        found |= dict.fromkeys([text] if parts is None else [part[0] for part in parts])
    return "".join(found)
