"""Imports of the package go downwards only."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import cupynorm

PACKAGE = Path(cupynorm.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = list(FILES)

# What a package, or a module that is in none, may import: itself, and what stands before it.
ORDER = [
    "_install",
    "_options",
    "_values",
    "_dtypes",
    "npy",
    "plan",
    "host",
    "runtime",
    "call",
    "lower",
    "invoke",
    "functions",
    "ops",
    "scipy_special",
    "__init__",
    "catalog",
    "bert",
    "tools",
    "encoder",
    "embedding",
    "cli",
    "__main__",
]

# The only modules, or packages, that import each of these, at whatever depth. The standard library and NumPy are free.
DOORS = {
    "click": ["cli"],
    "cuda": ["runtime.nvrtc", "tools.environment"],
    "cupy": ["runtime.devices"],
    "cupy_backends": ["runtime.devices"],
    "ml_dtypes": ["_dtypes"],
    "numba": ["host.compiled"],
    "safetensors": ["bert.checkpoint"],
    "tokenizers": ["bert.text"],
}


@functools.cache
def imported(module: str) -> frozenset[str]:
    """Return all imports of a module: the package's modules by their paths, others by their top names."""
    found = set()
    path = FILES[module]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            found.add(top if top != "cupynorm" else module_of(rest))
    return frozenset(found)


def module_of(name: str) -> str:
    """Return the module that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


def place(module: str) -> int:
    """Return where a module's package stands in the order."""
    return ORDER.index(module.partition(".")[0])


def test_every_package_has_its_place() -> None:
    assert sorted(ORDER) == sorted({module.partition(".")[0] for module in MODULES})


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    own = imported(module) & set(MODULES)

    assert all(place(each) <= place(module) for each in own), own


def test_modules_of_a_package_do_not_import_in_circles() -> None:
    found = {module: imported(module) & set(MODULES) for module in MODULES}
    while found:
        free = {module for module, needs in found.items() if not needs - {module}}
        assert free, f"in a circle: {sorted(found)}"
        found = {module: needs - free for module, needs in found.items() if module not in free}


def door_of(module: str, doors: list[str]) -> str:
    """Return the door that a module is, or is in; else the module."""
    return next((door for door in doors if f"{module}.".startswith(f"{door}.")), module)


@pytest.mark.parametrize("package", DOORS)
def test_what_is_optional_has_one_door(package: str) -> None:
    importing = {module for module in MODULES if package in imported(module)}

    assert {door_of(module, DOORS[package]) for module in importing} == set(DOORS[package])
