"""What several tests of the command need."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.runtime import devices, nvrtc
from cupynorm.tools import environment


@pytest.fixture
def no_device(monkeypatch):
    def none(*_):
        raise devices.NoDeviceError("there is none")

    for name in ("cupy", "present_device", "present_limits"):
        monkeypatch.setattr(devices, name, none)
    monkeypatch.setattr(environment, "is_gpu_wanted", lambda: True)


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=(64, 32)).astype("f4"))
    return tmp_path / "in.npy"


@pytest.fixture
def no_compiler(monkeypatch):
    """Recorded limits and bounds are enough for a plan, and a test of the command needs no compiler."""
    monkeypatch.setattr(nvrtc, "available", lambda: None)
