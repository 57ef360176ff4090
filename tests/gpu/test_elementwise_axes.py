"""bias_gelu, geglu, their gradients and dropout along any axis and in any layout on the device, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import pairs_where_simulated

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


@pytest.mark.parametrize(
    ("axis", "layout", "dtype", "direction"),
    pairs_where_simulated(AXES, LAYOUTS, ("float16", "float32"), ("forward", "backward")),
)
def test_a_bias_along_any_axis(xp: Any, axis: Any, layout: str, dtype: str, direction: str) -> None:
    shape = {"float16": (3, 4, 16), "float32": (2, 3, 5)}[dtype]
    host = normal(*shape, dtype=dtype)
    bias, _ = bias_of(host, axis)
    x = laid_out(xp, host, layout)

    if direction == "backward":
        dy = laid_out(xp, normal(*shape, dtype=dtype, seed=2), layout)
        check_backward(xp, "silu", dy, x, xp.asarray(bias), axis)
        return
    y = check_forward(xp, "gelu", x, xp.asarray(bias), axis)

    order = sorted(range(3), key=lambda at: -abs(x.strides[at]))
    assert sorted(range(3), key=lambda at: -abs(y.strides[at])) == order


@pytest.mark.parametrize(
    ("axis", "layout", "gate", "dtype", "direction"),
    pairs_where_simulated(
        (0, 1, -1), LAYOUTS, ("first", "second"), ("float16", "float32"), ("forward", "backward")
    ),
)
def test_halves_along_any_axis(
    xp: Any, axis: int, layout: str, gate: str, dtype: str, direction: str
) -> None:
    host = normal(*{"float16": (4, 2, 16), "float32": (2, 6, 10)}[dtype], dtype=dtype)
    bias = bias_of(host, axis)[0]
    x = laid_out(xp, host, layout)
    expected = FUNCTIONS["swiglu"](host.astype(np.float64), bias.astype(np.float64), axis=axis, gate=gate)
    if direction == "forward":
        y = FUNCTIONS["swiglu"](x, xp.asarray(bias), axis=axis, gate=gate)
        assert_close(xp.asnumpy(y), expected, scale=np.ones(y.shape))
        return

    dy = laid_out(xp, normal(*expected.shape, dtype=dtype, seed=2), layout)
    found = cupynorm.geglu_backward(dy, x, xp.asarray(bias), axis=axis, gate=gate)
    host_of = [xp.asnumpy(each).astype(np.float64) for each in (dy, x)]
    wanted = cupynorm.geglu_backward(*host_of, bias.astype(np.float64), axis=axis, gate=gate)
    for one, other in zip(found, wanted, strict=True):
        assert_close(xp.asnumpy(one), other, scale=np.full(other.shape, 8.0))


@pytest.mark.parametrize(
    ("layout", "of_out", "call"),
    pairs_where_simulated(LAYOUTS, LAYOUTS, ("forward", "backward", "dropout")),
)
def test_an_out_of_another_layout(xp: Any, layout: str, of_out: str, call: str) -> None:
    host = normal(3, 4, 8, dtype=np.float16)
    x, bias = laid_out(xp, host, layout), xp.asarray(bias_of(host, 1)[0])
    out = laid_out(xp, np.zeros_like(host), of_out)

    if call == "forward":
        y = check_forward(xp, "silu", x, bias, 1, out=out)
        assert y is out
    elif call == "backward":
        dx, _ = check_backward(xp, "gelu", x, x, bias, 1, out=out)
        assert dx is out
    else:
        kept = np.asarray(cupynorm.dropout(np.ones(host.shape), 0.5, seed=3)) != 0
        y = cupynorm.dropout(x, 0.5, seed=3, out=out)
        assert y is out
        assert np.array_equal(xp.asnumpy(y), np.where(kept, xp.asnumpy(x) * np.float16(2), 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place(xp: Any, layout: str) -> None:
    host = normal(4, 6, 8, dtype=np.float16)
    bias = bias_of(host, 0)[0]
    x = laid_out(xp, host, layout)
    expected = cupynorm.bias_gelu(host.astype(np.float64), bias.astype(np.float64), axis=0)
    assert cupynorm.bias_gelu(x, xp.asarray(bias), axis=0, out=x) is x
    assert_close(xp.asnumpy(x), expected, scale=np.ones(x.shape))

    for function, dy in (("silu", host), ("geglu", host[:2])):
        x = laid_out(xp, host, layout)
        wanted = GRADIENTS[function](dy.astype(np.float64), host.astype(np.float64), axis=0)[0]
        dx, _ = GRADIENTS[function](laid_out(xp, dy, layout), x, axis=0, out=x)
        assert dx is x
        assert_close(xp.asnumpy(dx), wanted, scale=np.ones(x.shape))


@pytest.mark.parametrize("layout", ["C", "Fortran", "steps"])
@pytest.mark.parametrize("number", [None, "one"])
def test_calls_that_are_made_again_with_other_arrays(xp: Any, layout: str, number: str | None) -> None:
    for seed in range(3):
        host = normal(4, 6, 8, dtype=np.float32, seed=seed)
        x = laid_out(xp, host, layout)
        bias = normal(1 if number else 6, seed=seed + 9)
        found = cupynorm.swiglu(x, xp.asarray(bias), axis=1)
        wanted = cupynorm.swiglu(host.astype(np.float64), bias.astype(np.float64), axis=1)
        assert_close(xp.asnumpy(found), wanted, scale=np.ones(wanted.shape))

        for axis in (1, -1):
            short = normal(1 if number else host.shape[axis], seed=seed + 5)
            total = xp.asarray(normal(*short.shape, seed=seed + 20))
            start = xp.asnumpy(total).astype(np.float64)
            dy = laid_out(xp, host[:, :3] if axis == 1 else host[..., :4], layout)
            dx, dbias = cupynorm.geglu_backward(dy, x, xp.asarray(short), axis=axis, add_to=total)
            given = [each.astype(np.float64) for each in (xp.asnumpy(dy), host, short)]
            of_x, of_bias = cupynorm.geglu_backward(*given, axis=axis)
            assert dbias is total
            assert_close(xp.asnumpy(dx), of_x, scale=np.ones(of_x.shape))
            assert_close(xp.asnumpy(dbias), start + of_bias, scale=np.full(of_bias.shape, 15.0))


def test_sums_of_long_axes(xp: Any) -> None:
    for shape, axis in (((2, 3, 4096), 1), ((2, 3, 1031), 1), ((5, 2, 640), 0), ((1, 1, 3000), 0)):
        host = normal(*shape, dtype=np.float16)
        check_backward(
            xp, "gelu", xp.asarray(host), xp.asarray(host), xp.asarray(bias_of(host, axis)[0]), axis
        )


@pytest.mark.parametrize("seed", range(40))
def test_any_strides(xp: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    ndim = int(random.integers(1, 5))
    shape = tuple(int(each) for each in random.integers(1, 5, ndim) * 2)
    axis = int(random.integers(-ndim, ndim))

    def made(*of: int) -> Any:
        """Return a device array with its axes in any order, with steps of any sign."""
        order = random.permutation(len(of))
        steps = [int(each) for each in random.choice([1, 1, 1, 2, -1], len(of))]
        whole = tuple(of[at] * abs(steps[at]) for at in order)
        array = xp.asarray(random.standard_normal(whole).astype(np.float32))
        index = tuple(np.s_[:: steps[at]] for at in order)
        return array[index].transpose(np.argsort(order).tolist())

    x, bias = made(*shape), made(shape[axis])
    y = check_forward(xp, "gelu", x, bias, axis)
    check_backward(xp, "silu", made(*y.shape), x, bias, axis, out=made(*shape))
    y = check_forward(xp, "swiglu", x, bias, axis)
    check_backward(xp, "geglu", made(*y.shape), x, bias, axis)
    dropped = cupynorm.dropout(x, 0.5, seed=seed)
    expected = cupynorm.dropout(xp.asnumpy(x), 0.5, seed=seed)
    assert np.array_equal(xp.asnumpy(dropped), expected)
