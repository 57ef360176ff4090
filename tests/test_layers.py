"""Imports of the package go downwards only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cupynorm

PACKAGE = Path(cupynorm.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# A module imports from layers above its own in this table, or from its own layer what stands before it there.
LAYERS = [
    [
        "_install",
        "_json",
        "_values",
        "_options",
        "_dtypes",
        "_limits",
        "_tables",
        "_plan",
        "_philox",
        "_special",
        "reference",
    ],
    [
        "_ask",
        "_cache",
        "_cubins",
        "_device",
        "_subclasses",
        "_uploads",
        "_compile",
        "_nvrtc",
        "_blas",
        "_blaslt",
    ],
    ["_expression", "functions"],
    ["functors", "_arguments", "_quantize", "_mask", "_extras", "_remembered", "_tuned"],
    ["_row", "_around"],
    [
        "_elementwise",
        "norm",
        "softmax",
        "add_norm",
        "elementwise",
        "_heads",
        "heads",
        "_attention",
        "_few",
        "_encoder_host",
        "_encoder_device",
    ],
    ["_fuse", "fusion"],
    ["__init__"],
    [
        "catalog",
        "forms",
        "explain",
        "testing",
        "environment",
        "files",
        "results",
        "plots",
        "saved",
        "peers",
        "bench",
        "tune",
        "encoder",
        "embedding",
    ],
    ["cli"],
    ["__main__"],
]
ORDER = [module for layer in LAYERS for module in layer]

# The only module that imports each of these, at whatever depth; the standard library and NumPy are free.
DOORS = {
    "click": ["cli"],
    "cuda": ["_nvrtc", "environment"],
    "cupy": ["_device"],
    "cupy_backends": ["_device"],
    "ml_dtypes": ["_dtypes"],
    "safetensors": ["encoder"],
    "tokenizers": ["embedding"],
}


def imported(module: str) -> set[str]:
    """Return what a module imports anywhere in its text: the package's modules by their stems, others by their top names."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            stem = rest.partition(".")[0]
            found.add(top if top != "cupynorm" else stem if stem in MODULES else "__init__")
    return found


def test_every_module_has_its_place() -> None:
    assert sorted(ORDER) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    own = imported(module) & set(ORDER)

    assert own <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("package", DOORS)
def test_what_is_optional_has_one_door(package: str) -> None:
    importing = [module for module in MODULES if package in imported(module)]

    assert importing == DOORS[package]
