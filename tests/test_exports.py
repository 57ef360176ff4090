"""What `import cupynorm` gives, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cupynorm
from cupynorm import catalog


def test_all_is_sorted_and_complete() -> None:
    public = [
        name
        for name, value in vars(cupynorm).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]

    assert cupynorm.__all__ == sorted(cupynorm.__all__)
    assert set(cupynorm.__all__) == set(public)


@pytest.mark.parametrize("name", cupynorm.__all__)
def test_what_is_public_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(cupynorm, name))


def test_every_op_is_public() -> None:
    for op in catalog.OPS:
        assert getattr(cupynorm, op.name) is op.function


def test_options_are_keyword_only() -> None:
    for op in catalog.OPS:
        parameters = inspect.signature(op.function).parameters.values()
        by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
        positional = [each.name for each in parameters if each.kind not in by_name]

        assert positional == ["x", *op.parameters]


@pytest.mark.parametrize("statement", ["import cupynorm", "import cupynorm.cli"])
def test_import_brings_no_cupy(statement: str) -> None:
    loaded = modules_after(statement)

    assert loaded.isdisjoint({"cupy", "cupy_backends", "cuda", "scipy"})


def test_import_brings_no_click() -> None:
    assert "click" not in modules_after("import cupynorm")


def modules_after(statement: str) -> set[str]:
    """Return the top-level packages that a new interpreter has loaded after a statement."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    checkout = Path(cupynorm.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())
