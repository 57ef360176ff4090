"""Public docstrings: sections that editors and reference pages know, every parameter, examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import pytest

import cupynorm

FUNCTIONS = [name for name in cupynorm.__all__ if inspect.isfunction(getattr(cupynorm, name))]
WITH_EXAMPLES = [*FUNCTIONS, "Quantize"]


def section(text: str, title: str) -> str:
    """Return what stands under a title."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {title}"
    return found[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_and_result_is_described(name: str) -> None:
    function = getattr(cupynorm, name)
    text = inspect.getdoc(function) or ""

    heads = re.findall(r"^(\S.*?)(?: : .*)?$", section(text, "Parameters"), re.MULTILINE)
    described = [each for head in heads for each in head.split(", ")]

    assert sorted(described) == sorted(inspect.signature(function).parameters)
    assert len(described) == len(set(described))
    for title in ("Returns", "Raises", "Examples"):
        assert section(text, title).strip()


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str) -> None:
    runner, found = doctest.DocTestRunner(), []
    examples: Any = doctest.DocTestFinder(recurse=False).find(getattr(cupynorm, name), name, globs={})
    for each in examples:
        runner.run(each, out=found.append)

    assert runner.summarize(verbose=False).attempted > 1
    assert not runner.failures, "".join(found)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_lines_are_no_longer_than_a_screen(name: str) -> None:
    text = inspect.getdoc(getattr(cupynorm, name)) or ""

    assert max(map(len, text.splitlines())) <= 120
