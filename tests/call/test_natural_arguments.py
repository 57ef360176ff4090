"""Arguments as users have them: parameters of shape (1, D) or numbers, lists of lengths, axis by position."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.call import uploads
from cupynorm.invoke import row_ops
from cupynorm.runtime import devices
from tests import simulator
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

ROWS, COLS = 6, 8


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, COLUMN, WIDE = numbers(ROWS, COLS), numbers(COLS, seed=1), numbers(12, seed=2)
FUSION = cupynorm.fuse(cupynorm.layer_norm, store=lambda y, s: y * s)

# a call for each parameter of columns
CALLS: dict[str, Any] = {
    "layer_norm, gamma": cupynorm.layer_norm,
    "layer_norm, beta": lambda x, p: cupynorm.layer_norm(x, None, p),
    "layer_norm, both": lambda x, p: cupynorm.layer_norm(x, p, p),
    "layer_norm, quantised": lambda x, p: cupynorm.layer_norm(x, p, p, quantize="int8"),
    "rms_norm": cupynorm.rms_norm,
    "add_layer_norm": lambda x, p: cupynorm.add_layer_norm(x, x, p, p, bias=p),
    "add_rms_norm": lambda x, p: cupynorm.add_rms_norm(x, x, p, bias=p),
    "fusion": lambda x, p: FUSION(x, 2.0, gamma=p, beta=p),
    "bias_gelu": cupynorm.bias_gelu,
    "bias_silu": cupynorm.bias_silu,
    "geglu": cupynorm.geglu,
    "swiglu": cupynorm.swiglu,
    "split_heads": lambda x, p: cupynorm.split_heads(x, p, heads=2),
}


def on_host(results: Any) -> list[Any]:
    found = results if isinstance(results, tuple) else (results,)
    return [simulator.cupy.asnumpy(each) for each in found]


def same(got: Any, expected: Any) -> None:
    for one, other in zip(on_host(got), on_host(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(1, COLS), (1, 1, COLS), (1, 1, 1, 1), (1, 1)])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("place", ["host", "device"])
def test_leading_axes_of_one_element_say_nothing(
    simulated: Any, name: str, shape: tuple[int, ...], place: str
) -> None:
    to = simulator.cupy.asarray if place == "device" else np.asarray
    parameter = COLUMN[: math.prod(shape)]
    x, plain, wide = to(X), to(parameter), to(parameter.reshape(shape))
    expected = CALLS[name](x, plain)

    for _ in range(3):  # the last call of a device array is a remembered one
        same(CALLS[name](x, wide), expected)


def test_leading_axes_of_more_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma has shape \(2, 8\), the normalised axes of x have \(8,\)"):
        cupynorm.layer_norm(X, numbers(2, COLS))
    with pytest.raises(ValueError, match=r"bias has shape \(2, 8\)"):
        cupynorm.split_heads(X, numbers(2, COLS), heads=2)
    with pytest.raises(ValueError, match=r"bias has shape \(2, 8\)"):
        cupynorm.bias_gelu(X, numbers(2, COLS))


SCALARS = [2.0, 3, np.float32(0.1), np.int8(-2), np.float64(1e-3), np.array(0.3), np.array(2), 0.0, -0.0]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_number_is_a_parameter_that_is_the_same_everywhere(
    simulated: Any, name: str, scalar: Any, dtype: Any
) -> None:
    x = X.astype(dtype)
    expected = CALLS[name](x, np.full(COLS, scalar, np.float64))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype != np.float16 else {"rtol": 2e-3, "atol": 2e-3}
    if "quantised" in name:
        tolerance = {"rtol": 1e-5, "atol": 1}

    same(CALLS[name](x, scalar), expected)
    device = simulator.cupy.asarray(x)
    for _ in range(2):
        for got, want in zip(on_host(CALLS[name](device, scalar)), on_host(expected), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got.astype(float), want.astype(float), **tolerance)


def test_a_number_as_gamma_launches_a_known_call_again(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = simulator.cupy.asarray(X)
    cupynorm.layer_norm(x, 0.5, 0.25)
    monkeypatch.setattr(row_ops, "launch", None)  # a first call would need it

    y = cupynorm.layer_norm(x, 0.5, 0.25)

    np.testing.assert_allclose(simulator.cupy.asnumpy(y), cupynorm.layer_norm(X, 0.5, 0.25), rtol=1e-5)


def test_a_number_of_a_device_call_is_uploaded_once_for_all_threads(simulated: Any) -> None:
    x = simulator.cupy.asarray(X)
    made: list[Any] = []

    def call() -> None:
        cupynorm.rms_norm(x, 0.37)
        made.append(uploads.filled(0.37, (COLS,), np.dtype(np.float32), 0))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert all(each is made[0] for each in made)
    assert simulator.cupy.asnumpy(made[0]).tolist() == [np.float32(0.37)] * COLS


def test_numbers_that_are_exact_in_xs_dtype_have_it_and_others_the_dtype_of_arithmetic(
    simulated: Any,
) -> None:
    x = simulator.cupy.asarray(X.astype(np.float16))
    same(
        cupynorm.rms_norm(x, 0.5),
        cupynorm.rms_norm(x, simulator.cupy.asarray(np.full(COLS, 0.5, np.float16))),
    )
    same(
        cupynorm.rms_norm(x, 0.1),
        cupynorm.rms_norm(x, simulator.cupy.asarray(np.full(COLS, 0.1, np.float32))),
    )


def test_beyond_what_is_kept_numbers_are_uploaded_for_each_call(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MOST_BYTES", 0)
    x = simulator.cupy.asarray(X)

    for _ in range(2):
        np.testing.assert_allclose(
            simulator.cupy.asnumpy(cupynorm.rms_norm(x, 0.77)), cupynorm.rms_norm(X, 0.77), rtol=1e-5
        )


@pytest.mark.parametrize("bad", [True, "1", 1j, [1.0], 10**400])
@pytest.mark.parametrize("name", ["layer_norm, gamma", "bias_gelu", "split_heads", "fusion"])
def test_what_is_no_number_and_no_array(name: str, bad: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match="(gamma|bias) is .*(give a NumPy or a CuPy array|float64)"
    ):
        CALLS[name](X, bad)


@pytest.mark.parametrize("function", [cupynorm.softmax, cupynorm.log_softmax])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.usefixtures("simulated")
class TestLengths:
    def test_a_list_is_an_array_of_its_numbers(self, function: Any, place: str) -> None:
        x = simulator.cupy.asarray(X) if place == "device" else X
        array = np.array([0, 1, 3, 8, 5, 2])
        expected = function(X, lengths=array)

        for given in ([0, 1, 3, 8, 5, 2], (0, 1, 3, 8, 5, 2), list(array), [np.int8(each) for each in array]):
            np.testing.assert_allclose(on_host(function(x, lengths=given))[0], expected, rtol=1e-5)
        # the same again with other numbers
        np.testing.assert_allclose(
            on_host(function(x, lengths=[4] * ROWS))[0], function(X, lengths=np.full(ROWS, 4)), rtol=1e-5
        )

    def test_a_list_broadcasts_as_an_array_does(self, function: Any, place: str) -> None:
        scores = numbers(2, 3, 4, COLS)
        x = simulator.cupy.asarray(scores) if place == "device" else scores

        got = function(x, lengths=[[[5]], [[2]]])

        expected = function(scores, lengths=np.array([5, 2])[:, None, None])
        np.testing.assert_allclose(on_host(got)[0], expected, rtol=1e-5)

    @pytest.mark.parametrize(
        ("lengths", "error", "message"),
        [
            ([1.5] * ROWS, TypeError, "lengths has dtype float64: use an integer dtype"),
            ([True] * ROWS, TypeError, "lengths has dtype bool: use an integer dtype"),
            (["a"] * ROWS, TypeError, "lengths has dtype <U1: use an integer dtype"),
            ([None] * ROWS, TypeError, "lengths has dtype object: use an integer dtype"),
            ([[1], [1, 2]], TypeError, r"lengths is \[\[1\], \[1, 2\]\] .*: its parts differ in length"),
            ([9] * ROWS, ValueError, "lengths holds 9: the last axis of x has 8 elements"),
            ([-1] * ROWS, ValueError, "lengths holds -1"),
            ([1, 2], ValueError, r"lengths has shape \(2,\)"),
            (3, TypeError, "lengths is a builtins.int: give a NumPy or a CuPy array"),
        ],
        ids=str,
    )
    def test_bad_lists(self, function: Any, place: str, lengths: Any, error: Any, message: str) -> None:
        x = simulator.cupy.asarray(X) if place == "device" else X
        with pytest.raises(error, match=message):
            function(x, lengths=lengths)


def test_a_list_of_lengths_is_refused_while_a_graph_is_captured(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = simulator.cupy.asarray(X)
    cupynorm.softmax(x, lengths=[3] * ROWS)
    monkeypatch.setattr(simulator.machine, "capturing", True)

    with pytest.raises(ValueError, match="lengths is a list, .* captured: give a CuPy array"):
        cupynorm.softmax(x, lengths=[3] * ROWS)


@pytest.mark.parametrize("function", [cupynorm.softmax, cupynorm.log_softmax])
def test_axis_may_stand_behind_x(simulated: Any, function: Any) -> None:
    same(function(X, -1), function(X, axis=-1))
    same(function(X, (-2, -1)), function(X, axis=(-2, -1)))
    x = simulator.cupy.asarray(X)
    for _ in range(2):
        same(function(x, -1), function(x))
    with pytest.raises(TypeError, match="positional argument"):
        function(X, -1, None)
    with pytest.raises(TypeError, match="axis is 'c'"):
        function(X, "c")


def test_a_signal_handler_may_make_the_call_whose_upload_it_interrupts(
    simulated: Any, monkeypatch: Any
) -> None:
    """It runs in the same thread, which holds the lock of what is kept; and both calls have to have the same array."""
    monkeypatch.setattr(uploads, "_kept", {})
    monkeypatch.setattr(uploads, "_kept_bytes", 0)
    x = simulated.cupy.asarray(X)
    empty, arrays = devices.empty, []

    def interrupted(*given: Any) -> Any:
        monkeypatch.setattr(devices, "empty", empty)
        arrays.append(uploads.filled(2.5, (COLS,), X.dtype, 0))
        return empty(*given)

    monkeypatch.setattr(devices, "empty", interrupted)
    thread = threading.Thread(
        target=lambda: arrays.append(uploads.filled(2.5, (COLS,), X.dtype, 0)), daemon=True
    )
    thread.start()
    thread.join(20)

    assert not thread.is_alive()
    assert arrays[0] is arrays[1]
    assert uploads._kept_bytes == arrays[0].nbytes
    same(cupynorm.rms_norm(x, 2.5), cupynorm.rms_norm(x, simulated.cupy.asarray(np.full(COLS, 2.5, "f4"))))
