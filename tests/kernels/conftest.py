"""What tests of kernels have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import build_gate


@pytest.fixture(scope="session", autouse=True)
def _plans_are_chosen_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each process of pytest-xdist needs all candidates of a sample, and a quarter of a second for each problem."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = tmp_path_factory.getbasetemp().parent / "plans"
            folder.mkdir(exist_ok=True)
            patch.setattr(build_gate, "plans_folder", folder)
        yield
