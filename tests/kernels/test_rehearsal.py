"""Tests of kernels are rehearsed: else g++ compiles each kernel alone, which takes it two to three times as long."""

from __future__ import annotations

from typing import Any

from tests.simulator import rehearsal, simulated  # noqa: F401  a fixture


def test_a_test_of_kernels_is_rehearsed(simulated: Any, request: Any) -> None:
    assert rehearsal._can_be_rehearsed(request.node)  # whatever fixtures conftest.py gives each test


def test_a_test_whose_file_keeps_something_is_not(simulated: Any, request: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(rehearsal, "KEPT_BY", ("tmpdir",))

    assert not rehearsal._can_be_rehearsed(request.node)
