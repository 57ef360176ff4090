"""Tests that need a device: CUDA's, or the simulator's where CUPYNORM_TEST_DEVICE=simulator.

Without a usable device each function is skipped by name, with the reason. CUPYNORM_SLOW=1 runs the exhaustive ones.
`-m small` picks the shapes that compute-sanitizer and the simulator can afford. g++ takes seconds for each kernel, so
where kernels are many the simulator runs only every twelfth or fourth case of a test, and CUPYNORM_SLOW=1 runs all.
"""

from __future__ import annotations

import collections
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cupynorm.plan.config import DoesNotFitError
from cupynorm.runtime import devices
from tests import SLOW
from tests.gpu.agree import SIMULATED

HERE = Path(__file__).parent
SAMPLED = (
    {
        f"test_{name}.py": 12
        for name in (
            *(
                "attention",
                "elementwise",
                "encoder",
                "forms",
                "fusion",
                "gradient_variants",
                "heads",
                "masks",
            ),
            "quantized",
        )
    }
    | {"test_statistics.py": 60}
    | {f"test_{name}.py": 4 for name in ("layout", "ops", "variants")}
    # their parameters still meet in pairs
    | {"test_special_values.py::test_special_values_are_those_of_float64_and_stay_in_their_row": 3}
    | {"test_special_values.py::test_constant_rows_are_beta_to_the_bit": 5}
    | {"test_elementwise_axes.py::test_any_strides": 3}  # drawn at random
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SIMULATED and not SLOW:
        _sample(config, items)
    reason = _why_no_device()
    if reason:
        _one_of_each_function(config, items)
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker("gpu")
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("slow") and not SLOW:
            item.add_marker(pytest.mark.skip(reason="exhaustive: set CUPYNORM_SLOW=1"))


def _one_of_each_function(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all but one case of each function: to report of 14,000 that they are skipped takes half a minute."""
    seen: set[str] = set()
    left_out = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.path.parent == HERE and name in seen:
            left_out.append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: collections.Counter[str] = collections.Counter()
    left_out = []
    for item in items:
        if item.path.parent != HERE or not item.get_closest_marker("small"):
            continue
        name = item.nodeid.partition("[")[0]
        every = SAMPLED.get(name.rpartition("/")[2], SAMPLED.get(item.path.name, 1))
        if seen[name] % every:
            left_out.append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Skip what forces a variant on a row that it cannot hold."""
    try:
        return (yield)
    except DoesNotFitError as error:
        if "variant" not in item.callspec.params:
            raise
        pytest.skip(str(error))


@functools.cache
def _why_no_device() -> str:
    if SIMULATED:
        from tests import simulator

        return str(simulator.why_not() or "")
    try:
        devices.present_device()
    except devices.NoDeviceError as error:
        return f"no usable CUDA device: {error}"
    return ""


@pytest.fixture
def xp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy, or its stand-in."""
    if not SIMULATED:
        return devices.cupy()
    from tests import simulator

    return simulator.install(monkeypatch).cupy


@pytest.fixture
def cuda(xp: Any) -> Any:
    """CuPy on a real device, for what the simulator does not model."""
    if SIMULATED:
        pytest.skip("needs a real device: streams, graphs, threads or much memory")
    return xp


@pytest.fixture
def roomy(cuda: Any) -> Any:
    """Give CuPy to a test that asks for much memory, to one process at a time, and clear the pool before and after."""
    fcntl = pytest.importorskip("fcntl")
    # without the lock, two processes may each see room that only one of them can have
    with (Path(tempfile.gettempdir()) / "cupynorm-much-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cuda.get_default_memory_pool().free_all_blocks()
        yield cuda
        cuda.get_default_memory_pool().free_all_blocks()
