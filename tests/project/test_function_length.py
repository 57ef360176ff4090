"""Functions are short enough to be read at once; those that are not are listed here, each with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
MOST_OF_PYTHON = 60  # lines of a body, without its docstring
MOST_OF_CUDA = 150  # lines of a body

# what stands in brackets before a name, and is no list of parameters
NO_FUNCTION = re.compile(r"__launch_bounds__\(.*?\)\s*(?=\w)|__align__\(\w+\)", re.DOTALL)
ONE_LOOP = "one loop whose steps share most of what a thread holds in registers"
LONGER = {
    "cupynorm/call/gradients.py: check_norm_gradient": "a list of checks, one after the other",
    "cupynorm/host/compiled/loops.py: apart": "numba compiles it into one loop, with the functions inside",
    "cupynorm/host/compiled/loops.py: side_by_side": "numba compiles it into one loop, with the functions inside",
    "cupynorm/invoke/bound_calls.py: again": "the way of each call, where every call of a function counts",
    "cupynorm/invoke/row_calls.py: run": "the way of each plain call, where every call of a function counts",
    "cupynorm/tools/files.py: run": "what it opens stays open in one ExitStack until the targets are complete",
    "kernels/bert/attention.cuh: attend": ONE_LOOP,
    "kernels/bert/attention.cuh: attend_together": ONE_LOOP,
    "kernels/row/any_rows.cuh: go_through_any_rows": ONE_LOOP,
    "kernels/row/computed.cuh: row_computed": ONE_LOOP,
    "kernels/row/registers.cuh: row_registers": ONE_LOOP,
    "kernels/row/reread.cuh: row_reread": ONE_LOOP,
    "kernels/row/staged.cuh: row_staged": ONE_LOOP,
    "kernels/row/summed.cuh: row_summed": ONE_LOOP,
}


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each function, and the lines of its body without its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, *others = node.body
            if ast.get_docstring(node) is not None and others:
                first = others[0]
            yield node.name, node.body[-1].end_lineno - first.lineno + 1  # type: ignore[operator]


def without_comments(text: str) -> str:
    """Return C++ with spaces in place of comments, literals and directives, line by line."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    text = re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", blank, text, flags=re.DOTALL
    )
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)


def cuda_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each function that is in no other, and the lines of its body."""
    code = without_comments(text)
    last, inside = 0, []  # the functions, or "" for a namespace, a struct or a part of a function
    starts = []
    for found in re.finditer(r"[{};]", code):
        if found[0] == "{":
            head = code[last : found.start()]
            names = re.findall(r"(\w+)\s*\(", NO_FUNCTION.sub("", head))
            inside.append(names[0] if names and not any(inside) else "")
            starts.append(found.start())
        elif found[0] == "}":
            name, start = inside.pop(), starts.pop()
            if name:
                yield name, code.count("\n", start, found.end()) + 1
        last = found.end()


def longer_than_the_limit() -> set[str]:
    """Return the functions that are, as `file: name`."""
    found = set()
    for folder in ("benchmarks", "cupynorm", "scripts"):
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            for name, lines in python_functions(path.read_text("utf-8")):
                if lines > MOST_OF_PYTHON:
                    found.add(f"{path.relative_to(CHECKOUT).as_posix()}: {name}")
    for path in sorted((CHECKOUT / "kernels").rglob("*.cuh")):
        for name, lines in cuda_functions(path.read_text("utf-8")):
            if lines > MOST_OF_CUDA:
                found.add(f"{path.relative_to(CHECKOUT).as_posix()}: {name}")
    return found


def test_no_other_function_is_long() -> None:
    assert not longer_than_the_limit() - LONGER.keys()


def test_what_is_listed_is_long_still() -> None:
    assert not LONGER.keys() - longer_than_the_limit()


def test_lines_of_functions_are_counted() -> None:
    python = 'def f():\n    """Says.\n\n    More.\n    """\n    a = 1\n\n    return a\n\n\ndef g(): ...\n'
    cuda = """
template <int k>
__global__ void __launch_bounds__(k, k > 1 ? f(1) : 2)
    row(const A a) {  // { is no bracket
  const char* text = "{";
  if (a) {
    b();
  }
}
struct __align__(8) S {
  int one() { return 1; }
};
"""

    assert list(python_functions(python)) == [("f", 3), ("g", 1)]
    assert list(cuda_functions(cuda)) == [("row", 6), ("one", 1)]
