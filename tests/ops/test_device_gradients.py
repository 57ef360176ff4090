"""Gradients of device arrays, on the simulator, beside those of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from tests import simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


def assert_near(ours: Any, reference: Any, dtype: str, rows: int = 1) -> None:
    """Compare a device array, or None, with the host's."""
    assert (ours is None) == (reference is None)
    if ours is None:
        return
    assert ours.dtype == reference.dtype
    found, expected = (np.asarray(each, np.float64) for each in (ours.get(), reference))
    scale = float(np.sqrt(rows))
    np.testing.assert_allclose(found, expected, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale)


ACTIVATIONS = {
    "bias_gelu_backward": {},
    "bias_gelu_backward, tanh": {"approximate": "tanh"},
    "bias_silu_backward": {},
    "geglu_backward": {},
    "geglu_backward, second": {"gate": "second", "approximate": "tanh"},
    "swiglu_backward": {"gate": "second"},
}


@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: str) -> None:
    function = getattr(cupynorm, name.partition(",")[0])
    gated = "glu" in name.partition(",")[0].replace("gelu", "")
    rows, cols = (40, 24) if dtype in {"float16", "float64"} else (37, 23)
    width = 2 * cols if gated else cols
    host = normal((rows, cols), dtype), 2 * normal((rows, width), dtype, 1), normal((width,), dtype, 2)
    for bias in (host[2], None):
        given = [None if each is None else cupy.asarray(each) for each in (*host[:2], bias)]

        dx, dbias = function(*given, **ACTIVATIONS[name])

        expected = function(*host[:2], bias, **ACTIVATIONS[name])
        assert_near(dx, expected[0], dtype)
        assert_near(dbias, expected[1], dtype, rows)


def test_a_bias_that_is_broadcast_gets_the_sum_over_that_too() -> None:
    dy, x = normal((3, 5, 18), "float32"), normal((3, 5, 18), "float32", 1)
    for bias in (normal((1,), "float32"), normal((1, 1, 18), "float32"), np.float32(0.5)):
        on_device = cupy.asarray(bias) if isinstance(bias, np.ndarray) else bias

        dx, dbias = cupynorm.bias_gelu_backward(cupy.asarray(dy), cupy.asarray(x), on_device)

        expected = cupynorm.bias_gelu_backward(dy, x, bias)
        assert_near(dx, expected[0], "float32")
        assert_near(dbias, expected[1], "float32", 15)
        assert dbias.shape == expected[1].shape


def test_in_place_added_to_and_again() -> None:
    host = [normal((70, 16), "float16", seed) for seed in range(2)]
    bias = normal((8,), "float16", 3)
    given = [cupy.asarray(each) for each in (host[0][:, :8].copy(), host[1], bias)]
    total = normal((8,), "float32", 4)
    sums = cupy.asarray(total)
    wanted = cupynorm.bias_silu_backward(host[0][:, :8], host[1][:, 8:], bias)
    for turn in (1, 2, 3):
        x = cupy.asarray(host[1][:, 8:].copy())

        dx, dbias = cupynorm.bias_silu_backward(given[0], x, given[2], out=x, add_to=sums)

        assert dx is x
        assert dbias is sums
        assert_near(dx, wanted[0], "float16")
        np.testing.assert_allclose(sums.get(), total + turn * wanted[1], rtol=1e-2, atol=1e-2)


def test_no_rows_have_a_gradient_of_zero() -> None:
    dx, dbias = cupynorm.bias_gelu_backward(
        *(cupy.empty((0, 6), np.float32),) * 2, cupy.asarray(normal((6,), "float32"))
    )

    assert dx.shape == (0, 6)
    np.testing.assert_array_equal(dbias.get(), 0)
