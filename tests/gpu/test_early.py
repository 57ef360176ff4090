"""Kernels that begin before the one before them has ended: which do, and how that is switched off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.runtime import compiler, devices
from cupynorm.tools.testing import assert_close


@pytest.fixture
def own(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give CuPy, with no kernels and no calls remembered."""
    monkeypatch.setattr(compiler, "_kernels", compiler.Kernels())
    row_ops.forget()
    yield cuda
    cuda.cuda.Device().synchronize()
    row_ops.forget()


def is_early() -> bool:
    (kernel,) = compiler._kernels
    bind = devices.launch_of(kernel.pointer, (1, 1, 1), (32, 1, 1), 0)
    return "_early" in bind.__qualname__  # type: ignore[attr-defined]


def can_be_early() -> bool:
    return (
        int(devices.present_limits().compute_capability) >= devices.EARLY_SINCE
        and devices.driver_cuda() >= devices.EARLY_CUDA
    )


@pytest.mark.parametrize("variable", [None, "CUPY_COMPILE_WITH_PTX"])
@pytest.mark.parametrize("off", [False, True])
def test_kernels_compiled_for_this_device_begin_early_unless_that_is_switched_off(
    own: Any, monkeypatch: pytest.MonkeyPatch, off: bool, variable: str | None
) -> None:
    monkeypatch.setenv("CUPYNORM_EARLY", "0" if off else "1")
    if variable:
        monkeypatch.setenv(variable, "1")
    host = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)
    x = own.asarray(host)

    y = x
    for _ in range(20):  # each reads what the one before it writes
        y = cupynorm.softmax(y)

    (kernel,) = compiler._kernels
    ask = devices.driver().funcGetAttribute
    versions = [ask(each, kernel.pointer) for each in (devices.PTX_VERSION, devices.BINARY_VERSION)]
    capability = int(devices.present_limits().compute_capability)
    assert versions == [capability, capability]
    assert is_early() == (can_be_early() and not off)
    expected = host.astype(np.float64)
    for _ in range(20):
        expected = cupynorm.softmax(expected)
    assert_close(own.asnumpy(y), expected)


def test_a_kernel_for_an_older_architecture_begins_in_turn(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver translates its PTX for this device; the instruction to wait is not in it."""
    nvrtc = own.cuda.nvrtc

    def load_function(code: str, expression: str, **_: Any) -> tuple[int, Any]:
        program = nvrtc.createProgram(code, "older.cu", (), ())
        nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(
            program, (*compiler.options(), *compiler.CUPY_OPTIONS, "--gpu-architecture=compute_80")
        )
        module = own.cuda.function.Module()
        module.load(nvrtc.getPTX(program))
        function = module.get_function(nvrtc.getLoweredName(program, expression))
        return function.ptr, function

    if int(devices.present_limits().compute_capability) <= 80:
        pytest.skip("the device is no newer")
    monkeypatch.setattr(compiler, "load_function", load_function)
    host = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)

    y = cupynorm.softmax(own.asarray(host))

    (kernel,) = compiler._kernels
    assert devices.driver().funcGetAttribute(devices.PTX_VERSION, kernel.pointer) == 80
    assert not is_early()
    assert_close(own.asnumpy(y), cupynorm.softmax(host.astype(np.float64)))
