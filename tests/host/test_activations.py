"""Activations and gates in float32 on NumPy arrays: as exact as promised at every kind of row, in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.catalog.bounds import EPSILON, EXPONENTIALS, ROUNDING, TOLERANCES
from cupynorm.host import reference
from cupynorm.host.elementwise_gradients import DERIVATIVES

Array = np.ndarray[Any, Any]

CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gelu": ("bias_gelu", "geglu", {}),
    "gelu_tanh": ("bias_gelu", "geglu", {"approximate": "tanh"}),
    "silu": ("bias_silu", "swiglu", {}),
}
# how inputs differ from normal numbers: their scale and mean
KINDS = (
    (1, 0),
    (3, 0),
    (1e-3, 0),
    (1, -3),
    (1, -10),
    (3, -60),
    (0.5, -20),
    (1, 3),
    (30, 0),
    (1e19, 0),
    (1e30, 0),
)
every_activation = pytest.mark.parametrize("name", CALLS)
columns = pytest.mark.parametrize("cols", [1, 2, 7, 16, 17, 40, 300, 1025])
LIMITS = [-np.inf, np.inf, np.nan, 0.0, -1e4, 1e4, -3e38, 3e38, -90.0, -20.0]


def inputs(cols: int) -> tuple[Array, Array, Array]:
    """Return rows of all kinds of twice so many columns, a bias, and gradients."""
    random = np.random.default_rng(cols)
    x = np.concatenate([random.standard_normal((50, 2 * cols)) * scale + mean for scale, mean in KINDS])
    x[::3, cols:] *= random.choice([1e-3, 1e3, 1e6], (len(x[::3]), 1))
    dy = random.standard_normal(x.shape)
    return tuple(each.astype(np.float32) for each in (x, random.standard_normal(2 * cols), dy))  # type: ignore[return-value]


def assert_within(found: Array, exact: Array, allowed: Array) -> None:
    """Compare where the result is a finite float32; half of the smallest subnormal is allowed besides."""
    held = np.abs(exact) < np.finfo(np.float32).max
    off = np.abs(found.astype(np.float64)[held] - exact[held])
    np.testing.assert_array_less(off, allowed[held] + 1e-45)


def forward(exact: Array) -> Array:
    size = np.sqrt(np.square(exact).mean(-1, keepdims=True))
    return np.asarray(TOLERANCES["float32"] * (np.abs(exact) + size))


@every_activation
@columns
@pytest.mark.parametrize("biased", [True, False])
def test_every_kind_of_row_is_as_exact_as_promised(name: str, cols: int, biased: bool) -> None:
    x, bias, _ = inputs(cols)
    one, gate, options = CALLS[name]
    given = bias if biased else None
    z = x.astype(np.float64) + (bias if biased else 0)

    y, gated = (getattr(cupynorm, each)(x, given, **options) for each in (one, gate))

    with np.errstate(all="ignore"):
        exact = reference.ACTIVATIONS[name](z)
        assert_within(y, exact, forward(exact))
        product = exact[:, :cols] * z[:, cols:]
        assert_within(gated, product, forward(product))


@every_activation
@columns
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_are_as_exact_as_promised(name: str, cols: int, biased: bool) -> None:
    x, bias, dy = inputs(cols)
    one, gate, options = CALLS[name]
    given = bias if biased else None
    z = x.astype(np.float64) + (bias if biased else 0)
    a, b = z[:, :cols], z[:, cols:]

    dx = getattr(cupynorm, f"{one}_backward")(dy, x, given, **options)[0]
    of_gate = getattr(cupynorm, f"{gate}_backward")(dy[:, :cols], x, given, **options)[0]

    def allowed(exact: Array, terms: Array) -> Array:
        return np.asarray(
            ROUNDING["float32"] * np.abs(exact) + EXPONENTIALS * EPSILON["float32"] * np.abs(terms)
        )

    with np.errstate(all="ignore"):
        exact = dy * DERIVATIVES[name](z)
        assert_within(dx, exact, allowed(exact, dy))
        slopes = [dy[:, :cols] * b * DERIVATIVES[name](a), dy[:, :cols] * reference.ACTIVATIONS[name](a)]
        exact = np.concatenate(slopes, axis=-1)
        terms = np.abs(dy[:, :cols]) * (np.abs(a) + np.abs(b))
        assert_within(of_gate, exact, allowed(exact, np.tile(terms, 2)))


@every_activation
@pytest.mark.parametrize("cols", [1, 400])
def test_limits_are_the_formulas(name: str, cols: int) -> None:
    x = np.ones((len(LIMITS), cols), np.float32)
    x[:, 0] = LIMITS
    one, _, options = CALLS[name]

    y = getattr(cupynorm, one)(x, None, **options)
    dx = getattr(cupynorm, f"{one}_backward")(np.ones_like(x), x, **options)[0]

    with np.errstate(all="ignore"):
        wanted = [each[name](x[:, 0].astype(np.float64)) for each in (reference.ACTIVATIONS, DERIVATIVES)]
        least = 1e-6 if cols > 1 else 1e-45
        for found, exact, atol in zip((y, dx), wanted, (least, 1e-6), strict=True):
            np.testing.assert_allclose(found[:, 0], exact.astype(np.float32), 2e-6, atol)


@pytest.mark.parametrize("function", ["bias_gelu", "geglu", "bias_silu_backward", "swiglu_backward"])
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(5)
    x = (random.standard_normal((900, 600)) * random.choice([0.1, 1, 9], (900, 1))).astype(np.float32)
    x[7, 3], x[8, 5] = np.nan, np.inf
    dy = x[::-1, :300] if function == "swiglu_backward" else x[::-1]
    call: Callable[..., Any] = getattr(cupynorm, function)

    def run(rows: slice) -> Array:
        if "backward" in function:
            return np.asarray(call(dy[rows], x[rows], None)[0])
        return np.asarray(call(x[rows], None))

    whole = run(slice(None))
    parts = [run(slice(begin, end)) for begin, end in ((0, 1), (1, 700), (700, 900))]

    assert np.array_equal(np.concatenate(parts), whole, equal_nan=True)
    for threads in ("2", "3", "8"):
        monkeypatch.setenv("CUPYNORM_THREADS", threads)
        assert np.array_equal(run(slice(None)), whole, equal_nan=True)


@every_activation
@pytest.mark.parametrize("block", [64, 1 << 17])
def test_in_place_in_pieces_and_with_steps(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(6)
    x, bias = (random.standard_normal(shape).astype(np.float32) for shape in ((5, 90, 400), 400))
    one, gate, options = CALLS[name]
    functions = getattr(cupynorm, one), getattr(cupynorm, gate), getattr(cupynorm, f"{one}_backward")
    wanted = [
        each(*given, bias, **options) for each, given in zip(functions, ((x,), (x,), (x, x)), strict=True)
    ]
    monkeypatch.setattr(reference, "BLOCK", block)
    wide = np.zeros((5, 90, 800), np.float32)[..., ::2]
    wide[...] = x

    assert np.allclose(functions[0](wide, bias, **options), wanted[0], 2e-6, 1e-7)
    assert np.allclose(functions[1](wide, bias, **options), wanted[1], 2e-6, 1e-7)
    dx, dbias = functions[2](wide, x, bias, out=x, **options)
    assert dx is x
    assert np.allclose(dx, wanted[2][0], 2e-6, 1e-6)
    np.testing.assert_allclose(dbias, wanted[2][1], 2e-6, 1e-4)
