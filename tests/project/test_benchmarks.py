"""The programs of benchmarks/ need a GPU and are run by hand: that they import is tested here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(each.stem for each in FOLDER.glob("*.py"))


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(request.param)


@pytest.mark.parametrize("program", NAMES, indirect=True)
def test_it_imports(program: Any) -> None:
    assert callable(program.main)
