"""What type checkers and help() see: resolvable hints, results that follow from options, and explicit keywords."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import cupynorm
from cupynorm import embedding, encoder, functions

CHECKOUT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parents[1] / "data" / "user_code.py"


def public() -> dict[str, Any]:
    """Return all public functions and classes, with the classes' own methods and properties."""
    found = {name: getattr(cupynorm, name) for name in cupynorm.__all__}
    found |= {f"functions.{name}": getattr(functions, name) for name in functions.__all__}
    modules = {
        "encoder": (encoder, ["BertEncoder", "EncoderConfig"]),
        "embedding": (embedding, ["TextEncoder"]),
    }
    for module, (where, names) in modules.items():
        found |= {f"{module}.{name}": getattr(where, name) for name in names}
    for name, each in list(found.items()):
        if not inspect.isclass(each):
            continue
        for member, value in vars(each).items():
            if member.startswith("_") and member not in {"__init__", "__call__"}:
                continue
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function) and function.__module__.startswith("cupynorm"):
                found[f"{name}.{member}"] = function
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_hints_can_be_resolved(name: str) -> None:
    each = PUBLIC[name]

    hints = typing.get_type_hints(each)

    if inspect.isfunction(each) and each.__qualname__ != "_init":  # that of _values.dataclass
        parameters = inspect.signature(each).parameters
        assert set(parameters) - {"self", "cls"} <= set(hints), "a parameter without a hint"


def test_hints_can_be_resolved_by_who_imports_one_module_alone() -> None:
    code = "from cupynorm.{0} import {1}; import typing; typing.get_type_hints({1})"
    for module, name in [
        ("ops.norm", "layer_norm"),
        ("ops.softmax", "softmax"),
        ("ops.add_norm", "add_rms_norm"),
    ]:
        subprocess.run([sys.executable, "-c", code.format(module, name)], cwd=CHECKOUT, check=True)


@pytest.mark.parametrize("function", [cupynorm.softmax, cupynorm.log_softmax])
def test_softmaxs_keywords_are_explicit(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    expected = [
        "x",
        "axis",
        "out",
        "dtype",
        "scale",
        "where",
        "lengths",
        "left_padded",
        "causal",
        "causal_offset",
    ]
    expected += ["window", "bias", "nan", *["quantize"] * (function is cupynorm.softmax), "plan"]

    assert sorted(parameters) == sorted(expected)
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    with pytest.raises(TypeError, match=r"softmax\(\) got an unexpected keyword argument 'casual'"):
        function(None, casual=True)


def test_defaults_in_the_signature_are_what_is_not_given() -> None:
    import numpy as np

    x = np.linspace(-1, 1, 12).reshape(3, 4)
    for function in (cupynorm.softmax, cupynorm.log_softmax):
        defaults = {
            each.name: each.default
            for each in inspect.signature(function).parameters.values()
            if each.default is not inspect.Parameter.empty
        }
        np.testing.assert_array_equal(function(x, **defaults), function(x))


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(cupynorm.__file__).parent / "py.typed").read_bytes() == b""


@pytest.mark.slow
def test_a_strict_type_checker_takes_right_calls_and_reports_wrong_ones(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    code = SAMPLE.read_text("utf-8")
    (tmp_path / SAMPLE.name).write_text(code, "utf-8")
    options = [
        "--strict",
        "--follow-imports=silent",
        "--config-file=",
        "--no-error-summary",
        "--show-error-codes",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={tmp_path / 'cache'}", SAMPLE.name],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )

    reported = {
        (int(line), code)
        for line, code in re.findall(
            rf"^{SAMPLE.name}:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE
        )
    }
    wanted = {
        (number, found[1])
        for number, line in enumerate(code.splitlines(), 1)
        if (found := re.search(r"# wrong: ([\w-]+)$", line))
    }
    assert wanted <= reported, done.stdout + done.stderr
    assert {line for line, _ in reported} == {line for line, _ in wanted}, done.stdout + done.stderr
