"""bias_gelu, geglu, their gradients and dropout along any axis and in any layout on the device, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.tools.testing import assert_close

pytestmark = pytest.mark.small

BIASED = {"gelu": cupynorm.bias_gelu, "silu": cupynorm.bias_silu}
GATED = {"geglu": cupynorm.geglu, "swiglu": cupynorm.swiglu}
GRADIENTS = {
    "gelu": cupynorm.bias_gelu_backward,
    "silu": cupynorm.bias_silu_backward,
    "geglu": cupynorm.geglu_backward,
    "swiglu": cupynorm.swiglu_backward,
}
FUNCTIONS = {**BIASED, **GATED}
AXES = (0, 1, 2, (0, 1), (0, 2), (2, 1), None)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def laid_out(xp: Any, array: Any, layout: str) -> Any:
    """Return a device array of the same elements in another layout."""
    if layout == "C":
        return xp.asarray(array)
    if layout == "Fortran":
        return xp.asarray(array.transpose().copy()).transpose()
    if layout == "turned":
        return xp.asarray(array.transpose(1, 2, 0).copy()).transpose(2, 0, 1)
    if layout == "steps":
        return xp.asarray(np.repeat(array, 2, axis=-1))[..., ::2]
    if layout == "backwards":
        return xp.asarray(array[::-1, :, ::-1].copy())[::-1, :, ::-1]
    return xp.asarray(np.pad(array, ((0, 0), (0, 0), (1, 2))))[..., 1:-2]  # "inside"


LAYOUTS = ("C", "Fortran", "turned", "steps", "backwards", "inside")


def bias_of(x: Any, axis: Any) -> tuple[Any, Any]:
    """Return a bias along axes, and as it is broadcast to x."""
    axes = range(x.ndim) if axis is None else sorted({at % x.ndim for at in np.atleast_1d(axis)})
    shape = [x.shape[at] for at in axes]
    bias = normal(*shape, dtype=x.dtype, seed=1)
    return bias, bias.reshape([x.shape[at] if at in axes else 1 for at in range(x.ndim)])


def check_forward(xp: Any, name: str, x: Any, bias: Any, axis: Any, **options: Any) -> Any:
    host = [xp.asnumpy(each).astype(np.float64) for each in (x, bias)]
    y = FUNCTIONS[name](x, bias, axis=axis, **options)
    assert_close(xp.asnumpy(y), FUNCTIONS[name](*host, axis=axis), scale=np.ones(y.shape))
    return y


def check_backward(xp: Any, name: str, dy: Any, x: Any, bias: Any, axis: Any, **options: Any) -> Any:
    host = [xp.asnumpy(each).astype(np.float64) for each in (dy, x, bias)]
    dx, dbias = GRADIENTS[name](dy, x, bias, axis=axis, **options)
    expected, of_bias = GRADIENTS[name](*host, axis=axis)
    assert_close(xp.asnumpy(dx), expected, scale=np.ones(x.shape))
    scale = np.full(of_bias.shape, 1 + np.sqrt(x.size / max(1, of_bias.size)))
    assert dbias.shape == bias.shape
    assert_close(np.atleast_1d(xp.asnumpy(dbias)), np.atleast_1d(of_bias), scale=np.atleast_1d(scale))
    return dx, dbias


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_along_any_axis(xp: Any, axis: Any, layout: str) -> None:
    for dtype, shape in ((np.float16, (3, 4, 16)), (np.float32, (2, 3, 5))):
        host = normal(*shape, dtype=dtype)
        bias, _ = bias_of(host, axis)
        x = laid_out(xp, host, layout)

        y = check_forward(xp, "gelu", x, xp.asarray(bias), axis)

        order = sorted(range(3), key=lambda at: -abs(x.strides[at]))
        assert sorted(range(3), key=lambda at: -abs(y.strides[at])) == order
        dy = laid_out(xp, normal(*shape, dtype=dtype, seed=2), layout)
        check_backward(xp, "silu", dy, x, xp.asarray(bias), axis)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", ["first", "second"])
def test_halves_along_any_axis(xp: Any, axis: int, layout: str, gate: str) -> None:
    for dtype, shape in ((np.float16, (4, 2, 16)), (np.float32, (2, 6, 10))):
        host = normal(*shape, dtype=dtype)
        bias = bias_of(host, axis)[0]
        x = laid_out(xp, host, layout)
        y = FUNCTIONS["swiglu"](x, xp.asarray(bias), axis=axis, gate=gate)
        expected = FUNCTIONS["swiglu"](host.astype(np.float64), bias.astype(np.float64), axis=axis, gate=gate)
        assert_close(xp.asnumpy(y), expected, scale=np.ones(y.shape))

        dy = laid_out(xp, normal(*y.shape, dtype=dtype, seed=2), layout)
        found = cupynorm.geglu_backward(dy, x, xp.asarray(bias), axis=axis, gate=gate)
        given_ = [xp.asnumpy(each).astype(np.float64) for each in (dy, x)]
        wanted = cupynorm.geglu_backward(*given_, bias.astype(np.float64), axis=axis, gate=gate)
        for one, other in zip(found, wanted, strict=True):
            assert_close(xp.asnumpy(one), other, scale=np.full(other.shape, 8.0))
