"""`cupynorm completion`, and what completion offers."""

from __future__ import annotations

import pytest

from tests.cli import invoke, start


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_says_what_to_put_where(shell):
    text = invoke("completion", shell).stdout

    assert f"_CUPYNORM_COMPLETE={shell}_source cupynorm" in text
    assert text.startswith("# put this line into ~/.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cupynorm run lay", ["layer_norm"]),
        ("cupynorm explain softmax --device h", ["h200", "h100"]),
        ("cupynorm sel", ["selftest"]),
    ],
)
def test_completion_knows_the_library(words, expected):
    done = start(
        env={
            "_CUPYNORM_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
    )

    assert [line.partition(",")[2] for line in done.stdout.split()] == expected
