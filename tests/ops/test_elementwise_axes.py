"""Activations, gates and their gradients along any axis on NumPy arrays, against float64 formulas and differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import bound_calls
from cupynorm.lower.layouts import MOST_IN_PIECE
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

AXES = [-1, 0, 1, 2, -3, (0, 1), (0, 2), (2, 1), (1, 2), None]
SHAPE = (4, 6, 8)
LAYOUTS = {
    "C": lambda a: a,
    "Fortran": np.asfortranarray,
    "turned": lambda a: a.transpose(1, 2, 0).copy().transpose(2, 0, 1),
    "backwards": lambda a: a[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "steps": lambda a: np.repeat(a, 2, axis=2)[..., ::2],
}
phi = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))


def gelu(z: Any) -> Any:
    return z * phi(z)


def silu(z: Any) -> Any:
    return z / (1 + np.exp(-z))


BIASED = {
    "gelu": (cupynorm.bias_gelu, cupynorm.bias_gelu_backward, gelu),
    "silu": (cupynorm.bias_silu, cupynorm.bias_silu_backward, silu),
}
GATED = {
    "geglu": (cupynorm.geglu, cupynorm.geglu_backward, gelu),
    "swiglu": (cupynorm.swiglu, cupynorm.swiglu_backward, silu),
}


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def axes_of(axis: Any) -> list[int]:
    return list(range(3)) if axis is None else sorted({at % 3 for at in np.atleast_1d(axis)})


def bias_along(axis: Any) -> tuple[Any, Any]:
    """Return a bias, and the same as it is broadcast."""
    axes = axes_of(axis)
    bias = normal(*(SHAPE[at] for at in axes), seed=1)
    return bias, bias.reshape([SHAPE[at] if at in axes else 1 for at in range(3)])


def memory_order(array: Any) -> Any:
    return sorted(range(array.ndim), key=lambda at: -abs(array.strides[at]))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BIASED)
def test_a_bias_along_any_axis(name: str, axis: Any, layout: str) -> None:
    forward, backward, formula = BIASED[name]
    x = LAYOUTS[layout](normal(*SHAPE))
    bias, broadcast = bias_along(axis)

    y = forward(x, bias, axis=axis)

    np.testing.assert_allclose(y, formula(x + broadcast), rtol=1e-12, atol=1e-12)
    assert memory_order(y) == memory_order(x)

    dy, step = normal(*SHAPE, seed=2), 1e-6
    total = np.ones(bias.shape)
    dx, dbias = backward(dy, x, bias, axis=axis, add_to=total)
    slopes = dy * (formula(x + broadcast + step) - formula(x + broadcast - step)) / (2 * step)
    np.testing.assert_allclose(dx, slopes, rtol=1e-7, atol=1e-8)
    summed = slopes.sum(axis=tuple(at for at in range(3) if at not in axes_of(axis)))
    assert dbias is total
    np.testing.assert_allclose(dbias, 1 + summed, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("axis", [-1, 0, 1, (1,)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("gate", ["first", "second"])
def test_halves_along_any_axis(name: str, axis: Any, layout: str, gate: str) -> None:
    forward, backward, formula = GATED[name]
    (at,) = axes_of(axis)
    x = LAYOUTS[layout](normal(*SHAPE))
    bias, broadcast = bias_along(axis)

    def result(z: Any) -> Any:
        a, b = np.split(z, 2, axis=at)
        return formula(a) * b if gate == "first" else formula(b) * a

    y = forward(x, bias, axis=axis, gate=gate)

    np.testing.assert_allclose(y, result(x + broadcast), rtol=1e-12, atol=1e-12)
    assert memory_order(y) == memory_order(x)

    dy, z, step = normal(*y.shape, seed=2), x + broadcast, 1e-6
    dx, dbias = backward(dy, x, bias, axis=axis, gate=gate, out=np.empty(SHAPE))
    n = SHAPE[at] // 2
    first = np.moveaxis(np.zeros(SHAPE), at, 0)
    first[:n] = 1
    for part in (np.moveaxis(first, 0, at), 1 - np.moveaxis(first, 0, at)):
        slopes = dy * (result(z + step * part) - result(z - step * part)) / (2 * step)
        index = tuple(
            slice(None) if each != at else slice(n) if part.flat[0] else slice(n, None) for each in range(3)
        )
        np.testing.assert_allclose(dx[index], slopes, rtol=1e-7, atol=1e-8)
        others = tuple(each for each in range(3) if each != at)
        np.testing.assert_allclose(dbias[index[at]], slopes.sum(axis=others), rtol=1e-6, atol=1e-7)


def test_no_bias_and_a_number_need_no_axis() -> None:
    x = normal(*SHAPE)
    for axis in AXES:
        np.testing.assert_array_equal(cupynorm.bias_gelu(x, None, axis=axis), cupynorm.bias_gelu(x, None))
        _, dbias = cupynorm.bias_silu_backward(x, x, 0.5, axis=axis)
        expected = cupynorm.bias_silu_backward(x, x, 0.5)[1]
        np.testing.assert_allclose(dbias, expected, rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_counts_in_c_order(layout: str) -> None:
    x = normal(*SHAPE)
    laid_out = LAYOUTS[layout](x)

    y = cupynorm.dropout(laid_out, 0.5, seed=3)

    np.testing.assert_array_equal(y, cupynorm.dropout(x, 0.5, seed=3))
    assert memory_order(y) == memory_order(laid_out)


def test_errors_say_the_axes_that_were_given() -> None:
    x = normal(*SHAPE)
    for axis in (None, (0, 1)):
        with pytest.raises(ValueError, match="several axes"):
            cupynorm.geglu(x, axis=axis)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="several axes"):
            cupynorm.swiglu_backward(x, x, axis=axis)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"the last axis of x has \(4,\).*here x has its axes in the order \(1, 2, 0\)"
    ):
        cupynorm.bias_gelu(x, np.ones(6), axis=0)
    with pytest.raises(ValueError, match=r"it must be even"):
        cupynorm.geglu(x[:3], axis=0)
    with pytest.raises(ValueError, match=r"axis 3 is out of range"):
        cupynorm.bias_silu(x, None, axis=3)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_narrower_types_along_any_axis(axis: Any, dtype: Any) -> None:
    x, (bias, _) = normal(*SHAPE).astype(dtype), bias_along(axis)
    bias = bias.astype(dtype)
    wide = [each.astype(np.float64) for each in (x, x, bias)]
    forward, backward, _ = BIASED["gelu"]
    assert_close(forward(x, bias, axis=axis), forward(*wide[1:], axis=axis), scale=np.ones(SHAPE))
    for found, wanted in zip(backward(x, x, bias, axis=axis), backward(*wide, axis=axis), strict=True):
        assert_close(found, wanted, scale=np.full(wanted.shape, 10.0))
    if not isinstance(axis, int):
        return
    forward, backward, _ = GATED["swiglu"]
    y = forward(x, bias, axis=axis)
    assert_close(y, forward(*wide[1:], axis=axis), scale=np.ones(y.shape))
    dy = y.astype(np.float64)
    for found, wanted in zip(
        backward(y, x, bias, axis=axis), backward(dy, *wide[1:], axis=axis), strict=True
    ):
        assert_close(found, wanted, scale=np.full(wanted.shape, 10.0))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6), (2, 4, 0), (2, 0, 0)], ids=str)
def test_an_empty_x_has_gradients_of_zeros(simulated: Any, shape: tuple[int, ...], on_device: bool) -> None:
    asarray = simulated.cupy.asarray if on_device else np.asarray
    x = asarray(np.empty(shape, np.float32))

    for function, axis in itertools.product((cupynorm.bias_gelu_backward, cupynorm.swiglu_backward), AXES):
        gate = function is cupynorm.swiglu_backward
        if gate and not isinstance(axis, int):
            continue
        axes, of_dy = axes_of(axis), list(shape)
        if gate:
            of_dy[axes[0]] //= 2
        for of_bias in {(), (1,), (1,) * len(axes), tuple(shape[at] for at in axes)}:
            bias, total = (asarray(np.full(of_bias, start, np.float32)) for start in (5, 7))
            dy = asarray(np.empty(of_dy, np.float32))

            dx, dbias = function(dy, x, bias, axis=axis)

            assert (dx.shape, dbias.shape) == (shape, of_bias)
            assert not simulated.cupy.asnumpy(dbias).any()
            function(dy, x, bias, axis=axis, add_to=total)
            assert (simulated.cupy.asnumpy(total) == 7).all()


LONG = 8 * MOST_IN_PIECE + 5  # no piece divides it, nor this less 4


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("gelu", (3, LONG), 0),
        ("gelu", (2, 3, LONG), (0, 1)),
        ("gelu", (2, 3, LONG), 1),
        ("gelu", (3, LONG - 4), 0),
        ("geglu", (4, LONG), 0),
        ("swiglu", (2, 4, LONG), 1),
    ],
)
def test_sums_along_an_axis_that_no_piece_divides_take_little_room(
    simulated: Any, name: str, shape: tuple[int, ...], axis: Any, adds: bool
) -> None:
    _, backward, _ = (BIASED | GATED)[name]
    axes = [at % len(shape) for at in np.atleast_1d(axis)]
    bias = normal(*(shape[at] for at in axes), seed=1).astype(np.float16)
    x = normal(*shape).astype(np.float16)
    dy = normal(
        *(each // 2 if name in GATED and at in axes else each for at, each in enumerate(shape)), seed=2
    )
    dy = dy.astype(np.float16)
    start = normal(*bias.shape, seed=3).astype(np.float16) if adds else None
    expected = backward(dy, x, bias, axis=axis, add_to=None if start is None else start.copy())

    gpu = simulated.cupy
    total = None if start is None else gpu.asarray(start)
    found = backward(*map(gpu.asarray, (dy, x, bias)), axis=axis, add_to=total)

    for ours, host in zip(found, expected, strict=True):
        np.testing.assert_allclose(gpu.asnumpy(ours), host, rtol=2e-3, atol=2e-2)
    (bound,) = bound_calls.thread.calls.bound.values()
    assert bound.room <= 3 * MOST_IN_PIECE * bias.size * np.float32().nbytes
