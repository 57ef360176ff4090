"""Names and counts what was skipped, one line a test function, so that a green run says what it left out."""

from __future__ import annotations

import collections
import gc
from typing import Any

import pytest

from cupynorm.runtime import compiler, devices, tuned_plans

pytest_plugins = ["tests.simulator.rehearsal"]

LONG = (
    "_build.py",
    "test_summed.py",
    "test_selftest.py",
    "test_same.py",
    "test_add_an_op.py",
    "test_tune.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files first whose tests take up to a minute each: at the end other processes would wait for them."""
    items.sort(key=lambda item: not item.path.name.endswith(LONG))


def pytest_collection_finish() -> None:
    """Let garbage be looked for seldom, and among what tests make: it would be among all tests that there are."""
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reports = terminalreporter.stats.get("skipped", ())
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")][report.nodeid.partition("[")[0]] += 1
    if reports:
        terminalreporter.section(f"{len(reports)} skipped")
    for reason, functions in reasons.items():
        terminalreporter.line(f"{functions.total()} tests: {reason}")
        for name, count in functions.items():
            terminalreporter.line(f"{count:>5}  {name}")


@pytest.fixture(scope="session")
def device() -> Any:
    """CuPy, where there is a device; else the test is skipped."""
    try:
        devices.present_device()
    except devices.NoDeviceError as error:
        pytest.skip(f"no usable CUDA device: {error}")
    return devices.cupy()


@pytest.fixture
def tuned_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Give a folder for tables of tuned plans, which nobody has written to."""
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path))
    tuned_plans.forget()
    yield tmp_path
    tuned_plans.forget()


@pytest.fixture(scope="session", autouse=True)
def _kernels_as_they_are() -> None:
    """Note the digest of kernels/ once: the first test would else leave that of an edited copy to those behind it.

    It is part of every text, so processes would compile for the simulator what others have compiled.
    """
    compiler.digest()


@pytest.fixture(scope="session", autouse=True)
def _no_tuned_plans(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tests see the plans of plan/, whatever was tuned on this machine; what they start sees them, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("CUPYNORM_TUNED", raising=False)
        yield
