"""The README: short, with a plot, the two commands and an example. Its code is run by test_docs.py."""

from __future__ import annotations

import re

import cupynorm
from tests.pages import CHECKOUT, blocks, commands

README = CHECKOUT / "README.md"
TEXT = README.read_text("utf-8")


def test_it_is_read_in_two_minutes() -> None:
    assert len(TEXT.splitlines()) <= 130


def test_it_begins_with_a_sentence_and_a_plot() -> None:
    title, sentence, plot, *_ = re.split(r"\n{2,}", TEXT)

    assert title == "# cupynorm"
    assert sentence.count(".") == 1
    target = re.fullmatch(r"!\[[^\]]+\]\(([^)]+)\)", plot)
    assert target
    assert (README.parent / target[1]).is_file()


def test_the_first_commands_are_two_scripts() -> None:
    first, *_ = (block for block in blocks(README) if block.language == "sh")

    assert [line for _, line in commands(first)] == ["scripts/demo", "scripts/test"]


def test_there_is_an_example_and_it_is_short() -> None:
    (example,) = (block for block in blocks(README) if block.language == "python")

    assert len(example.text.splitlines()) <= 15


def test_every_public_function_is_in_the_table() -> None:
    for name in cupynorm.__all__:
        if name.islower():
            assert f"`{name}`" in TEXT, name


def test_every_page_of_the_documents_is_one_or_two_links_away() -> None:
    assert "(docs/README.md)" in TEXT
