"""Runs the shipped kernels on the CPU, called through stand-ins for CuPy and of its driver binding.

    from tests import simulator
    from tests.simulator import simulated       # a fixture; or simulator.install(monkeypatch, device="a100")

    def test_rows_sum_to_one(simulated):
        x = simulated.cupy.asarray(host)        # the stand-in for CuPy
        y = cupynorm.softmax(x)                 # dispatcher, launcher and kernel, as they ship

Every launch runs under each of `settings.schedules`, from the same memory, and raises a RuntimeError that says what and
where: a race (schedules leave different bits), a divergent barrier, a deadlock, lanes that never meet, a misaligned
access, an illegal address, a write outside an array or outside the shared memory asked for. Arrays and shared memory
hold nan until written.

Thread block clusters and a barrier of the grid run where a C++ stand-in calls simulator::cluster_arrive, of_block or
grid_arrive (simulator.h): the host sets a function's cluster width, or asks for a cooperative launch, as on a device.
Another block's shared memory, asked for before that block has surely begun or after it has exited, is a fault.

CUDA graphs hold launches (not cuBLAS's products), and know when a pool has given back memory that was allocated while
they were captured. machine.order, set to an Order, notes what streams do and what each has waited for. machine.room
bounds pools.

`settings.beside` is a write of another stream, repeated while a cooperative launch runs: a wait for a word in device
memory then gives up, as it does on a device after its bound.

Not modelled:
- asm, TMA, cooperative groups, atomics; other streams that overlap: a launch ends before it returns;
- clusters in more than one direction, and how many of them a device holds at once;
- that memory is late: what a block wrote is seen by blocks that run after it, with or without a fence;
- cp.async, unless its C++ stand-in calls simulator::copy_later (simulator.h): then a missing wait is a race;
- time, caches, registers (a guess) and spills;
- -ftz and fused multiply-adds: results are right to rounding, not to the bit;
- implicit warp synchrony: lanes run apart unless they meet;
- interleavings other than at barriers and at shuffles, of blocks at their common barriers; a kernel that never ends;
- writes from one static __shared__ array into the next; the exited lanes that CUDA lets a mask name are a fault here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import cublas_twin as cublas
from . import cupy_twin as cupy
from . import driver_twin as driver
from .build import compiler, prebuild, why_not
from .cupy_twin import place
from .engine import SimulatorError, allocate, settings
from .machine import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "SimulatorError",
    "allocate",
    "cublas",
    "cupy",
    "driver",
    "install",
    "machine",
    "place",
    "prebuild",
    "sanitized_environment",
    "settings",
    "simulated",
    "skip_if_missing",
    "why_not",
]


def skip_if_missing() -> None:
    """Skip the test, with the reason, where the simulator cannot run."""
    reason = why_not()
    if reason:
        pytest.skip(reason)


def install(monkeypatch: pytest.MonkeyPatch, device: str | Sequence[str] = "h200") -> Any:
    """Put the stand-ins in CuPy's place until the test ends; return this module. device: a name, or one for each."""
    from cupynorm.bert import gemm
    from cupynorm.call import uploads
    from cupynorm.invoke import bound_calls, row_ops
    from cupynorm.runtime import chosen_plans, devices
    from cupynorm.runtime import compiler as kernel_compiler

    skip_if_missing()
    monkeypatch.setattr(machine, "devices", machine.devices)  # what is set here is put back
    monkeypatch.setattr(machine, "current", 0)
    monkeypatch.setattr(machine, "stream", 0)
    machine.start(device)
    monkeypatch.setattr(devices, "cupy", lambda: cupy)
    monkeypatch.setattr(devices, "driver", lambda: driver)
    monkeypatch.setattr(devices, "cublas", lambda: cublas)
    monkeypatch.setattr(gemm, "library", lambda name: None)
    monkeypatch.setattr(devices, "active_clusters", driver.active_clusters)
    monkeypatch.setattr(devices, "name_of", lambda device: machine.limits(device).name)
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: driver.launch_kernel_ex)
    monkeypatch.setattr(devices, "driver_cuda", cupy.runtime.driverGetVersion)
    monkeypatch.setattr(devices, "box_map", driver.box_map)
    # what is remembered of devices, plans and kernels is the simulator's own while it is installed
    monkeypatch.setattr(devices, "limits_of", devices.functools.cache(devices.limits_of.__wrapped__))
    monkeypatch.setattr(uploads, "_kept", {})
    monkeypatch.setattr(uploads, "_kept_bytes", 0)
    monkeypatch.setattr(row_ops, "_launches", {})
    monkeypatch.setattr(row_ops, "_refusal_told", threading.Event())
    monkeypatch.setattr(bound_calls, "thread", bound_calls.PerThread())
    monkeypatch.setattr(kernel_compiler, "_kernels", kernel_compiler.Kernels())
    # the stand-in compiles with g++, and what it makes is no cubin: nothing is to be looked up or kept
    monkeypatch.setattr(kernel_compiler, "load_function", kernel_compiler.load_function_by_cupy)
    monkeypatch.setattr(chosen_plans, "key", lambda *_: None)
    return sys.modules[__name__]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give this module with its stand-ins installed, on one H200."""
    return install(monkeypatch)


def sanitized_environment(sanitize: str) -> dict[str, str]:
    """Return the environment of a new process whose kernels are built with a sanitizer: "address" or "undefined".

    "undefined" may as well be set in this process. "address" may not: libasan must be loaded before Python.
    """
    environment = {**os.environ, "CUPYNORM_SIMULATOR_SANITIZE": sanitize}
    if sanitize == "address":
        found = subprocess.run(
            [compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        )
        environment["LD_PRELOAD"] = str(Path(found.stdout.strip()).resolve())
        # Python leaks by design; the launch goes on after a report, and then raises it
        environment["ASAN_OPTIONS"] = "detect_leaks=0:halt_on_error=0:handle_segv=0"
    return environment
