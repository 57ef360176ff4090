"""Gradients of activations and gates on NumPy arrays: derivatives, sums over rows, layouts, and every error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import dropout
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog.bounds import TOLERANCES
from cupynorm.host import reference
from cupynorm.host.elementwise_gradients import DERIVATIVES
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

RANDOM = np.random.default_rng(22)
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_order_of_tests() -> None:
    RANDOM.bit_generator.state = START


# the function, its options, and how many columns its result has for each of x's
CALLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gelu": ("bias_gelu", {}, 1),
    "gelu_tanh": ("bias_gelu", {"approximate": "tanh"}, 1),
    "silu": ("bias_silu", {}, 1),
    "geglu": ("geglu", {}, 2),
    "geglu, tanh, second": ("geglu", {"approximate": "tanh", "gate": "second"}, 2),
    "swiglu": ("swiglu", {}, 2),
    "swiglu, second": ("swiglu", {"gate": "second"}, 2),
}
every_call = pytest.mark.parametrize("name", CALLS)


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


def forward(name: str, x: Any, bias: Any) -> Any:
    function, options, _ = CALLS[name]
    return getattr(cupynorm, function)(x, bias, **options)


def backward(name: str, dy: Any, x: Any, bias: Any = None, **more: Any) -> Any:
    function, options, _ = CALLS[name]
    return getattr(cupynorm, f"{function}_backward")(dy, x, bias, **options, **more)


def arrays(name: str, *leading: int, cols: int = 6, dtype: Any = np.float64) -> tuple[Any, Any, Any]:
    dy = normal(*leading, cols // CALLS[name][2], dtype=dtype)
    return dy, normal(*leading, cols, dtype=dtype), normal(cols, dtype=dtype)


def slope(call: Any, x: Any, step: float = 1e-5) -> Any:
    """The derivative of a number by each element of x, by central differences."""
    found = np.empty_like(x)
    for at in np.ndindex(x.shape):
        aside = np.zeros_like(x)
        aside[at] = step
        found[at] = (call(x + aside) - call(x - aside)) / (2 * step)
    return found


@every_call
@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1), (1,), ()], ids=str)
def test_gradients_are_numerical_derivatives(name: str, shape: tuple[int, ...]) -> None:
    dy, x, _ = arrays(name, 2, 3) if shape != (6, 1) else arrays(name, 6, cols=2)
    bias = normal(*shape) if shape != (6, 1) else normal(1, 2)

    dx, dbias = backward(name, dy, x, np.asarray(bias))

    assert dx.dtype == dbias.dtype == np.float64
    expected = slope(lambda at: (dy * forward(name, at, np.asarray(bias))).sum(), x)
    np.testing.assert_allclose(dx, expected, rtol=1e-7, atol=1e-9)
    assert dbias.shape == np.shape(bias)
    by_bias = slope(lambda at: (dy * forward(name, x, at)).sum(), np.asarray(bias))
    np.testing.assert_allclose(dbias, by_bias, rtol=1e-7, atol=1e-8)


@every_call
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_rounded_once(name: str, dtype: str) -> None:
    """16 bits hold float32's errors, which are less than a sixteenth of their last place."""
    kind = dtype_of(dtype)
    dy, x, bias = arrays(name, 40, dtype=kind)

    dx, dbias = backward(name, dy, x, bias)

    exact, total = backward(name, *(each.astype(np.float64) for each in (dy, x, bias)))
    assert (dx.dtype, dbias.dtype) == (kind, kind)
    if dtype == "float32":
        np.testing.assert_allclose(dx, exact, 1e-6, 1e-6 * np.abs(dy).max() * np.abs(x).max())
        np.testing.assert_allclose(dbias, total, 1e-6, 1e-6 * np.abs(dy).sum(0).max() * np.abs(x).max())
    else:
        assert np.array_equal(dx, reference._round(exact, kind).astype(kind))
        assert np.array_equal(dbias, reference._round(total, kind).astype(kind))
    assert backward(name, dy, x, bias, dtype="float32")[0].dtype == np.float32


@every_call
def test_pytorchs_gradients(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dy, x, bias = arrays(name, 4, 3)
    at, shift = (torch.tensor(each, requires_grad=True) for each in (x, bias))
    _, options, halves = CALLS[name]
    z = at + shift

    def activation(z: Any) -> Any:
        if "gelu" in name or "geglu" in name:
            return torch.nn.functional.gelu(z, approximate=options.get("approximate", "none"))
        return torch.nn.functional.silu(z)

    if halves == 1:
        y = activation(z)
    else:
        a, b = z.chunk(2, -1) if "second" not in name else z.chunk(2, -1)[::-1]
        y = activation(a) * b
    y.backward(torch.tensor(dy))

    dx, dbias = backward(name, dy, x, bias)

    np.testing.assert_allclose(dx, at.grad.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dbias, shift.grad.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", DERIVATIVES)
@np.errstate(all="ignore")
def test_derivatives_keep_their_digits_and_have_limits(name: str) -> None:
    special = pytest.importorskip("scipy.special", reason="scipy is not installed")
    z = np.array([-30.0, -12.0, -5.5, -1.0, -1e-3, 0.0, 1e-9, 0.7, 3.0, 9.0, 40.0])
    u = 2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)
    exact = {
        "gelu": special.ndtr(z) + z * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi),
        "gelu_tanh": special.expit(u)
        + z * special.expit(u) * special.expit(-u) * 2 * np.sqrt(2 / np.pi) * (1 + 0.134145 * z**2),
        "silu": special.expit(z) * (1 + z * special.expit(-z)),
    }[name]

    np.testing.assert_allclose(DERIVATIVES[name](z), exact, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", DERIVATIVES)
@np.errstate(all="ignore")
def test_derivatives_of_what_is_large(name: str) -> None:
    found = DERIVATIVES[name](np.array([-1e300, -1e30, -800.0, 800.0, 1e30, 1e300, np.inf, -np.inf, np.nan]))

    np.testing.assert_array_equal(found, [0, 0, 0, 1, 1, 1, np.nan, np.nan, np.nan])


@every_call
@pytest.mark.parametrize("cols", [2, 6, 34])
@pytest.mark.parametrize("one", [False, True])
def test_the_gradient_of_a_bias_does_not_depend_on_how_rows_are_cut_into_batches(
    name: str, cols: int, one: bool
) -> None:
    """A mistake known from others."""
    dy, x, bias = arrays(name, 157, cols=cols, dtype=np.float32)
    bias = bias[:1] if one else bias
    dx, dbias = backward(name, dy, x, bias, add_to=np.zeros(bias.shape))

    for at in ([1], [100], [3, 4, 99]):
        total = np.zeros(bias.shape)
        parts = [
            backward(name, *part, bias, add_to=total)
            for part in zip(np.split(dy, at), np.split(x, at), strict=True)
        ]
        assert np.array_equal(total, dbias)
        assert np.array_equal(np.concatenate([part[0] for part in parts]), dx)


@pytest.mark.parametrize("cols", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("block", [1, 5, 64, 1 << 17])
def test_rows_are_summed_one_after_another(cols: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    dy, x, bias = normal(3, 41, cols), normal(3, 41, cols), normal(cols)

    dx, dbias = backward("silu", dy, x, bias)

    total = np.zeros(cols)
    for row in dx.reshape(-1, cols):
        total = total + row
    assert np.array_equal(dbias, total)


def test_a_sum_of_rows_is_no_mean() -> None:
    """A mistake known from others: a mean over another number of rows than there are."""
    dy, x, bias = arrays("silu", 5, 4)

    many = backward("silu", np.tile(dy, (3, 1, 1)), np.tile(x, (3, 1, 1)), bias)[1]

    np.testing.assert_allclose(many, 3 * backward("silu", dy, x, bias)[1], rtol=1e-13)


@every_call
def test_results_may_be_given(name: str) -> None:
    dy, x, bias = arrays(name, 5, 4)
    dx, dbias = backward(name, dy, x, bias)
    total = np.full((1, 6), 100.0)

    again = backward(name, dy, x, bias[None], add_to=total, out=(out := np.empty((4, 5, 6)).swapaxes(0, 1)))
    in_place = backward(name, dy, x.copy(), bias, out=None)
    at = x.copy()
    over = backward(name, dy, at, bias, out=at)

    assert again[0] is out
    assert again[1] is total
    assert over[0] is at
    for got in (again, in_place, over):
        assert np.array_equal(got[0], dx)
    np.testing.assert_allclose(total[0], 100 + dbias, rtol=1e-14)
    assert backward(name, dy, x)[1] is None
    if CALLS[name][2] == 1:
        assert np.array_equal(backward(name, dy, x, bias, out=dy)[0], dx)


def test_a_number_as_bias_has_a_gradient_without_axes() -> None:
    dy, x, _ = arrays("silu", 5, dtype=np.float32)

    dx, dbias = backward("silu", dy, x, 0.5)
    added = backward("silu", dy, x, 0.5, add_to=np.array(7.0))[1]

    assert (dbias.shape, dbias.dtype) == ((), np.float32)
    assert_close(dx, backward("silu", dy, x, np.full(6, 0.5))[0])
    assert dbias == pytest.approx(dx.astype(np.float64).sum(), rel=TOLERANCES["float32"])
    assert added == pytest.approx(7 + dbias, rel=1e-6)


@every_call
def test_rows_may_lie_anywhere(name: str) -> None:
    dy, x, bias = arrays(name, 6, 8, cols=12)
    some = np.s_[::-2, 1::3]
    dx, dbias = backward(name, np.ascontiguousarray(dy[some]), np.ascontiguousarray(x[some]), bias)

    found = backward(name, dy[some], x[some], bias)

    assert np.array_equal(found[0], dx)
    assert np.array_equal(found[1], dbias)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0, 4), (0, 1 << 34)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, bias = np.empty(shape, np.float32), np.ones(1, np.float32)

    dx, dbias = backward("silu", x, x, bias)
    kept = backward("silu", x, x, bias, add_to=np.full(1, 3.0))[1]

    assert (dx.shape, dbias.tolist(), kept.tolist()) == (shape, [0.0], [3.0])


def test_dropout_is_its_own_gradient() -> None:
    x, dy = normal(7, 5), normal(7, 5)

    dx = dropout(dy, 0.4, seed=3, offset=9)

    # dropout is linear: its gradient is what it multiplies with
    kept = dropout(np.ones_like(x), 0.4, seed=3, offset=9)
    np.testing.assert_allclose(dx, dy * kept, rtol=1e-15)
    np.testing.assert_allclose(dropout(x, 0.4, seed=3, offset=9), x * kept, rtol=1e-15)


X, DY, BIAS = normal(3, 4), normal(3, 4), normal(4)
NO_ARRAY = "give a NumPy or a CuPy array"
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "dy": (lambda: backward("gelu", [1.0], X), TypeError, f"dy is a builtins.list: {NO_ARRAY}"),
    "no dy": (lambda: backward("gelu", None, X), TypeError, f"dy is a builtins.NoneType: {NO_ARRAY}"),
    "dy's dtype": (lambda: backward("gelu", DY.astype(int), X), TypeError, r"dy: dtype int64.*dy.astype"),
    "dy's shape": (
        lambda: backward("gelu", DY[:1], X),
        ValueError,
        r"dy has shape \(1, 4\), the result of an x of shape \(3, 4\) has \(3, 4\)",
    ),
    "dy of a gate": (lambda: backward("geglu", DY, X), ValueError, r"the result of .* has \(3, 2\)"),
    "x": (lambda: backward("gelu", DY, 3.0), TypeError, f"x is a builtins.float: {NO_ARRAY}"),
    "no axes": (lambda: backward("gelu", DY, np.ones(())), ValueError, "x has 0 axes"),
    "odd": (lambda: backward("swiglu", DY[:, :1], X[:, :3]), ValueError, "its last axis holds two halves"),
    "bias": (lambda: backward("gelu", DY, X, "b"), TypeError, f"bias is a builtins.str: {NO_ARRAY}"),
    "bias's shape": (lambda: backward("gelu", DY, X, np.ones(3)), ValueError, r"bias has shape \(3,\)"),
    "out": (lambda: backward("gelu", DY, X, out=np.ones(3)), ValueError, r"out has shape \(3,\), x has"),
    "out of x in part": (
        lambda: backward("gelu", DY[:2], X[:2], out=X[1:]),
        ValueError,
        "out and x share memory in part: give x itself",
    ),
    "out of a gate and dy": (
        lambda: backward("geglu", X[:, :2], normal(3, 4), out=X),
        ValueError,
        "out and dy share memory$",
    ),
    "add_to": (lambda: backward("gelu", DY, X, BIAS, add_to=1.0), TypeError, f"add_to is .*: {NO_ARRAY}"),
    "add_to's shape": (
        lambda: backward("gelu", DY, X, BIAS, add_to=np.ones(3)),
        ValueError,
        r"add_to has shape \(3,\), bias has \(4,\)",
    ),
    "add_to's dtype": (
        lambda: backward("gelu", DY, X, BIAS, add_to=np.ones(4, int)),
        TypeError,
        "add_to: dtype int64",
    ),
    "add_to without a bias": (
        lambda: backward("gelu", DY, X, add_to=np.ones(4)),
        ValueError,
        "add_to is given without a bias",
    ),
    "add_to and x": (
        lambda: backward("gelu", DY, X, BIAS, add_to=X[0]),
        ValueError,
        "add_to and x share memory",
    ),
    "add_to and out": (
        lambda: backward("gelu", DY, X, BIAS, out=(a := np.ones((3, 4))), add_to=a[0]),
        ValueError,
        "out and add_to share memory",
    ),
    "approximate": (
        lambda: cupynorm.bias_gelu_backward(DY, X, approximate="erf"),
        ValueError,
        "approximate is 'erf': use 'none' or 'tanh'",
    ),
    "gate": (lambda: cupynorm.swiglu_backward(DY, X, gate=1), TypeError, "gate is 1 .*: use 'first'"),  # type: ignore[arg-type]
    "dtype": (lambda: backward("silu", DY, X, dtype="int8"), TypeError, "dtype int8 is not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, message = BAD[name]

    with pytest.raises(error, match=message) as caught:
        call()

    assert type(caught.value) is error
    assert len(str(caught.value)) < 300


def test_device_arrays_are_checked(simulated: Any) -> None:
    to = simulated.cupy.asarray
    x, dy = to(X), to(DY)

    with pytest.raises(TypeError, match="x is a CuPy array .* and dy is a NumPy array"):
        backward("gelu", DY, x)
    with pytest.raises(ValueError, match="dy has shape"):
        backward("geglu", dy, x)
