"""Public docstrings have the sections of NumPy's style, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from types import ModuleType
from typing import Any

import pytest

from cupynorm import embedding, encoder, functions
from cupynorm.bert import config

MODULES = (functions, encoder, embedding, config)


def public() -> dict[str, Any]:
    """Return the functions and classes of the documented modules, and the classes' own public methods."""
    found = {f"functions.{name}": getattr(functions, name) for name in functions.__all__}
    found |= {"encoder.EncoderConfig": encoder.EncoderConfig, "embedding.embed_file": embedding.embed_file}
    found |= {"embedding.read_texts": embedding.read_texts}
    for each in (encoder.BertEncoder, encoder.EncoderConfig, embedding.TextEncoder):
        found[f"{each.__name__}"] = each
        for name, value in vars(each).items():
            function = getattr(value, "__func__", value)
            if not name.startswith("_") and inspect.isfunction(function):
                found[f"{each.__name__}.{name}"] = function
    return found


PUBLIC = public()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    failed, _ = doctest.testmod(module)

    assert failed == 0


def test_there_is_an_example_for_each_function_of_a_fusion() -> None:
    assert [
        name for name in functions.__all__ if f">>> {name}(" not in PUBLIC[f"functions.{name}"].__doc__
    ] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_and_results_are_described(name: str) -> None:
    each = PUBLIC[name]
    text = inspect.getdoc(each) or ""
    parameters = set(inspect.signature(each).parameters) - {"self", "cls"}

    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+$|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^([\w, ]+?)(?: :.*)?$", section[1] if section else "", re.MULTILINE)
    described = {word.strip() for line in lines for word in line.split(",")}

    assert parameters <= described
    if inspect.isfunction(each) and inspect.signature(each).return_annotation not in {"None", None}:
        assert re.search(r"^(Returns|Yields)\n-+$", text, re.MULTILINE)
