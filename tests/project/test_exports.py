"""What `import cupynorm` gives, and what it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cupynorm
from cupynorm.catalog import op_table
from cupynorm.catalog.forms import FORMS


def test_all_is_sorted_and_complete() -> None:
    public = [
        name
        for name in dir(cupynorm)
        if not name.startswith("_")
        and name != "TYPE_CHECKING"
        and not inspect.ismodule(getattr(cupynorm, name))
    ]

    assert cupynorm.__all__ == sorted(cupynorm.__all__)
    assert set(cupynorm.__all__) == set(public)


def test_what_comes_later_is_what_type_checkers_see() -> None:
    tree = ast.parse(Path(cupynorm.__file__).read_text("utf-8"))
    (block,) = (each for each in tree.body if isinstance(each, ast.If))
    seen = {}
    for each in block.body:
        assert isinstance(each, ast.ImportFrom)
        for alias in each.names:
            seen[alias.name] = str(each.module).removeprefix("cupynorm").lstrip(".") or alias.name

    assert seen == {name: module for module, names in cupynorm._LATER.items() for name in names or (module,)}


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'cupynorm' has no attribute 'batch_norm'"):
        cupynorm.batch_norm  # noqa: B018
    with pytest.raises(ImportError, match="batch_norm"):
        from cupynorm import batch_norm  # noqa: F401


def test_a_row_op_waits_for_nothing_else() -> None:
    code = "import cupynorm, sys; print(*sys.modules)"

    loaded = set(run(code).split())

    assert "cupynorm.invoke.row_ops" in loaded
    later = {
        "catalog",
        "bert",
        "tools",
        "host",
        "host.reference",
        "call.masks",
        "call.extras",
        *cupynorm._LATER,
    }
    later |= {
        "invoke.fused_calls",
        "lower.fused",
        "lower.elementwise",
        "lower.heads",
        "runtime.nvrtc",
        "encoder",
        "embedding",
        "cli",
    }
    assert loaded.isdisjoint({f"cupynorm.{each}" for each in later} | {"json", "subprocess"})


@pytest.mark.parametrize(
    "first", ["import cupynorm.ops.fusion", "from cupynorm import *", "import cupynorm.ops.softmax"]
)
def test_public_functions_stand_whatever_is_imported_first(first: str) -> None:
    code = (
        f"{first}\nimport cupynorm\nprint(*(getattr(cupynorm, name).__name__ for name in cupynorm.__all__))"
    )

    assert run(code).split() == cupynorm.__all__


def test_every_public_function_is_in_the_catalog() -> None:
    elsewhere = {
        "fuse": "the form layer_norm/fuse is one of its calls",
        "install": "computes nothing",
        "sigma_clip": "how often it goes through a row depends on the data; statistic_calls.py has its tests",
    }
    functions = {name for name in cupynorm.__all__ if inspect.isfunction(getattr(cupynorm, name))}

    assert functions - {name.partition("/")[0] for name in FORMS} == set(elsewhere)


@pytest.mark.parametrize("name", cupynorm.__all__)
def test_what_is_public_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(cupynorm, name))


def test_whatever_takes_an_out_says_whose_it_is_meanwhile() -> None:
    functions = [getattr(cupynorm, name) for name in cupynorm.__all__]
    takers = [
        each for each in functions if inspect.isfunction(each) and "out" in inspect.signature(each).parameters
    ]
    said = "Until the call has finished on its stream, nobody else may write to `out` or read from it."

    assert len(takers) > 10
    assert not [
        each.__name__
        for each in (*takers, cupynorm.fuse)
        if said not in " ".join((inspect.getdoc(each) or "").split())
    ]


def test_every_op_is_public() -> None:
    for op in op_table.OPS:
        assert getattr(cupynorm, op.name) is op.function


def test_options_are_keyword_only() -> None:
    for op in op_table.OPS:
        parameters = inspect.signature(op.function).parameters.values()
        by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
        positional = [each.name for each in parameters if each.kind not in by_name]

        # of softmax, what x is divided by follows from the axis alone
        assert positional == ["x", *(op.parameters or ["axis"])]


@pytest.mark.parametrize("statement", ["import cupynorm", "import cupynorm.cli"])
def test_import_brings_no_cupy(statement: str) -> None:
    loaded = modules_after(statement)

    assert loaded.isdisjoint({"cupy", "cupy_backends", "cuda", "scipy"})


def test_import_brings_no_click() -> None:
    assert "click" not in modules_after("import cupynorm")


def modules_after(statement: str) -> set[str]:
    """Return the top-level packages that a new interpreter has loaded after a statement."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(run(code).split())


def run(code: str) -> str:
    """Return what a new interpreter prints."""
    checkout = Path(cupynorm.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True
    )
    return done.stdout
