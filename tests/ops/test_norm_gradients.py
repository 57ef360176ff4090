"""Gradients of norms on NumPy arrays: derivatives, formulas, sums over rows, layouts, and every error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import (
    add_layer_norm,
    add_layer_norm_backward,
    add_rms_norm,
    add_rms_norm_backward,
    dropout,
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_from_y,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_from_y,
)
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.host import reference
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

RANDOM = np.random.default_rng(20)
BACKWARD = {"layer_norm": layer_norm_backward, "rms_norm": rms_norm_backward}
FROM_Y = {"layer_norm": layer_norm_backward_from_y, "rms_norm": rms_norm_backward_from_y}
ADDING = {"layer_norm": add_layer_norm_backward, "rms_norm": add_rms_norm_backward}
FORWARD: dict[str, Any] = {
    "layer_norm": layer_norm,
    "rms_norm": lambda x, gamma=None, _=None, **how: rms_norm(x, gamma, **how),
}
ADD: dict[str, Any] = {
    "layer_norm": add_layer_norm,
    "rms_norm": lambda x, residual, gamma, _, **how: add_rms_norm(x, residual, gamma, **how),
}
NORMS = list(FORWARD)
every_norm = pytest.mark.parametrize("norm", NORMS)
SHAPES = [((3, 5), -1), ((2, 3, 4), -1), ((2, 3, 4), (1, 2)), ((6,), 0), ((2, 1, 3), (0, 1, 2)), ((4, 1), -1)]


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return np.asarray(RANDOM.standard_normal(shape)).astype(dtype)


def trailing(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    return shape[-len(axis) :] if isinstance(axis, tuple) else shape[-1:]


def slope(call: Any, x: Any, step: float = 1e-5) -> Any:
    """The derivative of a number by each element of x, by central differences."""
    found = np.empty_like(x)
    for at in np.ndindex(x.shape):
        aside = np.zeros_like(x)
        aside[at] = step
        found[at] = (call(x + aside) - call(x - aside)) / (2 * step)
    return found


def parameters_of(norm: str, results: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return dgamma and dbeta, or None."""
    return (results[1], results[2]) if norm == "layer_norm" else (results[1], None)


def stats_of(norm: str, x: Any, **how: Any) -> tuple[Any, ...]:
    return tuple(FORWARD[norm](x, return_stats=True, **how)[1:])


@every_norm
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_gradients_are_numerical_derivatives(norm: str, shape: tuple[int, ...], axis: Any) -> None:
    dy, x = normal(*shape), normal(*shape)
    gamma, beta = normal(*trailing(shape, axis)), normal(*trailing(shape, axis))
    how = {"axis": axis, "eps": 0.3}

    dx, dgamma, dbeta = (*BACKWARD[norm](dy, x, gamma, **how), None)[:3]

    def loss(x: Any = x, gamma: Any = gamma, beta: Any = beta) -> Any:
        return (dy * FORWARD[norm](x, gamma, beta, **how)).sum()

    np.testing.assert_allclose(dx, slope(lambda at: loss(x=at), x), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(dgamma, slope(lambda at: loss(gamma=at), gamma), rtol=1e-6, atol=1e-9)
    if dbeta is not None:
        np.testing.assert_allclose(dbeta, slope(lambda at: loss(beta=at), beta), rtol=1e-6, atol=1e-9)


def formula(norm: str, dy: Any, x: Any, gamma: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return dx, dgamma and dbeta of rows, by the whole Jacobian of each row rather than its product with dy."""
    rows, cols = x.shape
    dx = np.empty_like(x)
    z = np.empty_like(x)
    for at in range(rows):
        row = x[at] - x[at].mean() if norm == "layer_norm" else x[at]
        rstd = 1 / np.sqrt((row * row).mean() + eps)
        centre = np.eye(cols) - (1 / cols if norm == "layer_norm" else 0)
        jacobian = rstd * centre - rstd**3 / cols * np.outer(row, row)
        dx[at], z[at] = jacobian @ (dy[at] * gamma), row * rstd
    return dx, (dy * z).sum(axis=0), dy.sum(axis=0)


@every_norm
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("cols", [1, 2, 33, 200])
def test_every_dtype_agrees_with_the_jacobian(norm: str, dtype: str, cols: int) -> None:
    kind = dtype_of(dtype)
    dy, x, gamma = (normal(*shape, dtype=kind) for shape in ((9, cols), (9, cols), (cols,)))
    x[3] = 3  # a constant row
    exact = [each.astype(np.float64) for each in (dy, x, gamma)]
    wanted = formula(norm, *exact, eps=1e-3)

    results = BACKWARD[norm](dy, x, gamma, eps=1e-3)

    rstd = stats_of(norm, exact[1], eps=1e-3)[-1][:, None]
    scale = rstd * np.sqrt(np.square(exact[0] * exact[2]).mean(axis=1, keepdims=True))
    assert_close(results[0], wanted[0], scale=scale)
    for got, expected in zip(results[1:], wanted[1:], strict=False):
        assert got.dtype == kind
        assert_close(got, expected, scale=np.abs(exact[0]).sum(axis=0))


@every_norm
def test_every_element_is_rounded_once(norm: str) -> None:
    dy, x, gamma = (normal(*shape, dtype=np.float16) for shape in ((7, 30), (7, 30), (30,)))
    exact = BACKWARD[norm](*(each.astype(np.float64) for each in (dy, x, gamma)))

    for got, wide in zip(BACKWARD[norm](dy, x, gamma), exact, strict=True):
        off = np.abs(got.astype(np.float64) - wide)
        of_arithmetic = 1e-6 * np.abs(wide).max()
        assert (off <= np.maximum(np.abs(wide) * 2.0**-11, 2.0**-25) + of_arithmetic).all()


@every_norm
@pytest.mark.parametrize("axis", [-1, (1, 2)], ids=str)
def test_statistics_may_be_given(norm: str, axis: Any) -> None:
    dy, x = normal(2, 3, 4), normal(2, 3, 4)

    given = BACKWARD[norm](dy, x, None, *stats_of(norm, x, axis=axis), axis=axis)
    halves = BACKWARD[norm](dy, x, None, *(2 * each for each in stats_of(norm, x, axis=axis)), axis=axis)

    for got, wanted in zip(given, BACKWARD[norm](dy, x, axis=axis), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)
    assert not np.allclose(halves[0], given[0])  # they are not computed again


@every_norm
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_gradients_from_the_result(norm: str, shape: tuple[int, ...], axis: Any) -> None:
    dy, x = normal(*shape), normal(*shape)
    gamma, beta = normal(*trailing(shape, axis)), normal(*trailing(shape, axis)[-1:])
    y, *_, rstd = FORWARD[norm](x, gamma, beta, axis=axis, eps=0.3, return_stats=True)
    betas = {"beta": beta} if norm == "layer_norm" else {}

    found = FROM_Y[norm](dy, y, gamma, **betas, rstd=rstd, axis=axis)

    wanted = list(BACKWARD[norm](dy, x, gamma, axis=axis, eps=0.3))
    if norm == "layer_norm":
        assert found[2].shape == beta.shape
        wanted[2] = wanted[2].reshape(-1, beta.size).sum(axis=0)
    for got, each in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-10, atol=1e-11)
    alone = FROM_Y[norm](dy, FORWARD[norm](x, axis=axis, eps=0.3), rstd=rstd, axis=axis)[0]
    np.testing.assert_allclose(alone, BACKWARD[norm](dy, x, axis=axis, eps=0.3)[0], rtol=1e-10, atol=1e-11)


@every_norm
@pytest.mark.parametrize("shape", [(5,), (1,), (4, 1), (1, 5), (), (1, 1, 4, 5)], ids=str)
def test_gradients_of_parameters_are_summed_over_what_was_broadcast(
    norm: str, shape: tuple[int, ...]
) -> None:
    dy, x, gamma = normal(3, 4, 5), normal(3, 4, 5), normal(*shape)
    whole = parameters_of(
        norm,
        BACKWARD[norm](
            dy, x, np.broadcast_to(gamma, (4, 5)) + 0 if len(shape) < 4 else gamma[0, 0], axis=(1, 2)
        ),
    )

    found = parameters_of(norm, BACKWARD[norm](dy, x, gamma, axis=(1, 2)))

    over = tuple(axis for axis, extent in enumerate((*(1,) * (2 - len(shape)), *shape)[-2:]) if extent == 1)
    for got, wanted in zip(found, whole, strict=True):
        if got is not None:
            assert got.shape == shape
            np.testing.assert_allclose(got, wanted.sum(axis=over).reshape(shape), rtol=1e-12, atol=1e-13)


@every_norm
def test_what_the_gradients_of_absent_parameters_look_like(norm: str) -> None:
    dy, x = normal(6, 4, dtype=np.float16), normal(6, 4, dtype=np.float16)

    without = parameters_of(norm, BACKWARD[norm](dy, x))
    number = parameters_of(norm, BACKWARD[norm](dy, x, 2.0))
    ones = parameters_of(norm, BACKWARD[norm](dy, x, np.ones(4)))
    off = BACKWARD[norm](dy, x, np.ones(4), parameters=False)

    for got, total, wanted in zip(without, number, ones, strict=True):
        if got is not None:
            assert (got.dtype, got.shape) == (np.float32, (4,))
            assert (total.dtype, total.shape) == (np.float32, ())
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
            np.testing.assert_allclose(total, wanted.sum(), rtol=1e-5)
    assert off[1:] == (None,) * (len(off) - 1)
    assert np.array_equal(off[0], BACKWARD[norm](dy, x, np.ones(4))[0])


def in_batches(norm: str, dy: Any, x: Any, gamma: Any, cuts: Any, dtype: Any = np.float64) -> tuple[Any, ...]:
    totals = tuple(np.zeros(gamma.shape, dtype) for _ in range(2 if norm == "layer_norm" else 1))
    add_to: Any = totals if norm == "layer_norm" else totals[0]
    parts = [
        BACKWARD[norm](*each, gamma, add_to=add_to)
        for each in zip(np.split(dy, cuts), np.split(x, cuts), strict=True)
    ]
    assert all(part[1] is totals[0] for part in parts)
    return np.concatenate([part[0] for part in parts]), *totals


@every_norm
@pytest.mark.parametrize("shape", [(5,), (1,)], ids=str)
def test_the_gradient_of_a_parameter_does_not_depend_on_how_rows_are_cut_into_batches(
    norm: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake known from others."""
    dy, x, gamma = normal(157, 5, dtype=np.float32), normal(157, 5, dtype=np.float32), normal(*shape)
    whole = in_batches(norm, dy, x, gamma, [])

    for block, cuts in ((1 << 17, [1]), (1 << 17, [100]), (64, [3, 4, 99]), (64, []), (5, [156])):
        monkeypatch.setattr(reference, "BLOCK", block)
        for got, wanted in zip(in_batches(norm, dy, x, gamma, cuts), whole, strict=True):
            assert np.array_equal(got, wanted)


@every_norm
def test_means_are_over_the_columns_and_sums_over_the_rows(norm: str) -> None:
    """A mistake known from others: a mean over the wrong number of rows."""
    dy, x, gamma = normal(5, 4), normal(5, 4), normal(4)
    once = BACKWARD[norm](dy, x, gamma)

    many = BACKWARD[norm](np.tile(dy, (3, 1)), np.tile(x, (3, 1)), gamma)

    assert np.array_equal(many[0], np.tile(once[0], (3, 1)))
    for got, wanted in zip(many[1:], once[1:], strict=True):
        np.testing.assert_allclose(got, 3 * wanted, rtol=1e-12, atol=1e-14)


@every_norm
@pytest.mark.parametrize("block", [1 << 17, 16])
@pytest.mark.parametrize("place", ["dy", "x", "other", "strided"])
def test_where_results_go(norm: str, block: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dy, x, gamma = normal(2, 9, 40), normal(2, 9, 40), normal(40)
    wanted = BACKWARD[norm](dy, x, gamma)
    monkeypatch.setattr(reference, "BLOCK", block)
    places = {"dy": dy, "x": x, "other": np.empty_like(x), "strided": np.empty((40, 9, 2)).T}

    found = BACKWARD[norm](dy, x, gamma, out=places[place])

    assert found[0] is places[place]
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@every_norm
def test_rows_may_lie_anywhere_and_dtypes_mix(norm: str) -> None:
    dy, x = normal(6, 8, 12, dtype=np.float16)[::-2, 1::3], normal(6, 8, 12)[::-2, 1::3]
    gamma = normal(24, dtype=np.float32)[::2]
    packed = [np.ascontiguousarray(each) for each in (dy, x, gamma)]

    found = BACKWARD[norm](dy, x, gamma, dtype="float32")

    assert (found[0].dtype, found[1].dtype) == (np.float32, np.float32)
    for got, wanted in zip(found, BACKWARD[norm](*packed, dtype="float32"), strict=True):
        assert np.array_equal(got, wanted)


@every_norm
@pytest.mark.parametrize("shape", [(0, 6), (3, 0, 6)], ids=str)
def test_no_rows(norm: str, shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.float16)

    dx, *totals = BACKWARD[norm](x, x, np.ones(6, np.float16))
    add_to: Any = np.full(6, 3.0)
    kept = BACKWARD[norm](x, x, add_to=(add_to, None) if norm == "layer_norm" else add_to)[1]

    assert dx.shape == shape
    assert all(each.tolist() == [0.0] * 6 for each in totals)
    assert kept.tolist() == [3.0] * 6


@every_norm
def test_special_values_stay_in_their_row(norm: str) -> None:
    dy, x = normal(4, 6), normal(4, 6)
    x[1, 2], dy[2, 3] = np.nan, np.inf

    dx, dgamma, *_ = BACKWARD[norm](dy, x)

    assert np.isfinite(dx[[0, 3]]).all()
    assert np.isnan(dx[1]).all()
    assert not np.isfinite(dx[2]).any()
    assert np.isnan(dgamma).any()


def test_a_large_mean_costs_no_digits_without_statistics() -> None:
    deviation, dy = normal(4, 64), normal(4, 64)
    x = 2.0**20 + np.round(deviation * 64) / 64

    dx = layer_norm_backward(dy, x)[0]

    np.testing.assert_allclose(dx, layer_norm_backward(dy, x - 2.0**20)[0], rtol=1e-12, atol=1e-13)


@every_norm
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("with_sum", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((3, 5), -1), ((2, 3, 4), (1, 2))], ids=str)
def test_gradients_of_a_sum_are_numerical_derivatives(
    norm: str, p: float, alpha: float, with_sum: bool, shape: tuple[int, ...], axis: Any
) -> None:
    own = trailing(shape, axis)
    dy, ds, x, residual = (normal(*shape) for _ in range(4))
    given = {
        "gamma": normal(*own),
        "beta": normal(*own),
        "bias": normal(*own[-1:]),
        "x": x,
        "residual": residual,
    }
    how: dict[str, Any] = {"axis": axis, "eps": 0.3, "alpha": alpha, "dropout": p, "seed": 5, "offset": 3}

    def forward(x: Any, residual: Any, gamma: Any, beta: Any, bias: Any) -> Any:
        return ADD[norm](x, residual, gamma, beta, bias=bias, **how)

    def loss(name: str) -> Any:
        def changed(at: Any) -> Any:
            y, s = forward(**{**given, name: at})
            return (dy * y).sum() + with_sum * (ds * s).sum()

        return slope(changed, given[name])

    s = forward(**given)[1]
    results = ADDING[norm](dy, ds if with_sum else None, s, given["gamma"], bias=given["bias"], **how)

    names = ["x", "residual", "gamma", "beta", "bias"]
    if norm == "rms_norm":
        names.remove("beta")
    for name, got in zip(names, results, strict=True):
        np.testing.assert_allclose(got, loss(name), rtol=1e-6, atol=1e-8, err_msg=name)
    assert (results[0] is results[1]) == (p == 0 and alpha == 1)


@every_norm
@pytest.mark.parametrize("block", [1 << 17, 16])
def test_both_gradients_of_a_sum_may_replace_inputs(
    norm: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dy, ds, s, gamma = normal(9, 40), normal(9, 40), normal(9, 40), normal(40)
    how: dict[str, Any] = {"bias": np.zeros(40), "alpha": 0.5, "dropout": 0.3, "seed": 1}
    wanted = ADDING[norm](dy, ds, s, gamma, **how)
    monkeypatch.setattr(reference, "BLOCK", block)

    for first, second in ((0, 1), (1, 2), (2, 0)):
        given = [dy.copy(), ds.copy(), s.copy()]
        found = ADDING[norm](*given, gamma, **how, out=given[first], residual_out=given[second])
        assert found[0] is given[first]
        assert found[1] is given[second]
        for got, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)
    apart = ADDING[norm](dy, ds, s, residual_out=(other := np.empty((9, 40), np.float32)))
    assert apart[1] is other
    assert_close(other, apart[0])


@every_norm
def test_what_was_dropped_has_no_gradient_and_dbias_is_added(norm: str) -> None:
    dy, s = normal(8, 6, dtype=np.float32), normal(8, 6, dtype=np.float32)
    dy[2] = np.nan
    total = np.full(6, 10.0)
    none = (None,) * (1 if norm == "rms_norm" else 2)

    dx, dresidual, *_, dbias = ADDING[norm](
        dy, None, s, bias=np.ones(6), dropout=0.5, seed=2, add_to=(*none, total)
    )

    dropped = dropout(np.ones((8, 6)), 0.5, seed=2) == 0
    assert (dx[dropped] == 0).all()
    assert np.isnan(dresidual[2]).all()
    assert dbias is total
    rows = [0, 1, 3, 4, 5, 6, 7]
    part = ADDING[norm](dy[rows], None, s[rows])[0]
    assert dropped.any(axis=0).all()
    np.testing.assert_allclose(dresidual[rows], part, rtol=1e-6)


@every_norm
def test_pytorchs_gradients(norm: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dy, x, gamma = normal(6, 3, 8), normal(6, 3, 8), normal(3, 8)
    at, scale, shift = (torch.tensor(each, requires_grad=True) for each in (x, gamma, np.zeros((3, 8))))
    if norm == "layer_norm":
        y = torch.nn.functional.layer_norm(at, (3, 8), scale, shift, eps=1e-5)
    else:
        y = at * torch.rsqrt((at * at).mean((1, 2), keepdim=True) + 1e-6) * scale + shift
    y.backward(torch.tensor(dy))

    found = BACKWARD[norm](dy, x, gamma, axis=(1, 2))

    for got, wanted in zip(found, (at.grad, scale.grad, shift.grad), strict=False):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-10, atol=1e-12)


X, DY, GAMMA, STAT = normal(3, 4), normal(3, 4), normal(4), np.ones(3)
NO_ARRAY = "give a NumPy or a CuPy array"
# the call, the error, and what the message says
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "dy": (lambda: layer_norm_backward([1.0], X), TypeError, f"dy is a builtins.list: {NO_ARRAY}"),
    "no dy": (lambda: layer_norm_backward(None, X), TypeError, f"dy is a builtins.NoneType: {NO_ARRAY}"),
    "dy's dtype": (lambda: rms_norm_backward(DY.astype(int), X), TypeError, r"dy: dtype int64.*dy.astype"),
    "dy's shape": (
        lambda: layer_norm_backward(DY[:1], X),
        ValueError,
        r"dy has shape \(1, 4\), x has \(3, 4\)",
    ),
    "dy of y": (
        lambda: rms_norm_backward_from_y(DY[:1], X, rstd=STAT),
        ValueError,
        r"dy has shape \(1, 4\), y has",
    ),
    "x": (lambda: layer_norm_backward(DY, 3.0), TypeError, f"x is a builtins.float: {NO_ARRAY}"),
    "y": (lambda: rms_norm_backward_from_y(DY, 3.0, rstd=STAT), TypeError, "y is a builtins.float"),
    "s": (lambda: add_rms_norm_backward(DY, None, 3.0), TypeError, "s is a builtins.float"),
    "ds": (lambda: add_rms_norm_backward(DY, 1.0, X), TypeError, "ds is a builtins.float"),
    "ds's shape": (lambda: add_layer_norm_backward(DY, DY[0], X), ValueError, r"ds has shape \(4,\), s has"),
    "masked": (lambda: layer_norm_backward(DY, np.ma.array(X)), TypeError, "x is a masked array"),
    "no axes": (lambda: layer_norm_backward(np.ones(()), np.ones(())), ValueError, "x has 0 axes"),
    "empty rows": (
        lambda: rms_norm_backward(DY[:, :0], X[:, :0]),
        ValueError,
        "the normalised axes are empty",
    ),
    "axis": (lambda: layer_norm_backward(DY, X, axis=2), ValueError, "axis 2 is out of range: x has 2 axes"),
    "axis's kind": (lambda: layer_norm_backward(DY, X, axis="c"), TypeError, "axis is 'c'"),  # type: ignore[arg-type]
    "gamma of another axis": (
        lambda: layer_norm_backward(DY, X, X[0], axis=0),
        ValueError,
        "gamma has shape",
    ),
    "gamma": (lambda: layer_norm_backward(DY, X, "g"), TypeError, f"gamma is a builtins.str: {NO_ARRAY}"),
    "gamma's shape": (
        lambda: layer_norm_backward(DY, X, np.ones(3)),
        ValueError,
        r"gamma has shape \(3,\), the normalised axes of x have \(4,\)",
    ),
    "beta": (
        lambda: layer_norm_backward_from_y(DY, X, GAMMA, np.ones(3), STAT),
        ValueError,
        r"beta has shape \(3,\), the normalised axes of y have",
    ),
    "bias": (
        lambda: add_rms_norm_backward(DY, None, X, bias=np.ones(3)),
        ValueError,
        r"bias has shape \(3,\), the normalised axes of s have",
    ),
    "mean without rstd": (
        lambda: layer_norm_backward(DY, X, None, STAT),
        ValueError,
        "rstd is None and mean is given: give both, or neither",
    ),
    "rstd without mean": (
        lambda: add_layer_norm_backward(DY, None, X, rstd=STAT),
        ValueError,
        "mean is None and rstd is given",
    ),
    "rstd's shape": (
        lambda: rms_norm_backward(DY, X, None, STAT[:, None]),
        ValueError,
        r"rstd has shape \(3, 1\), x without its normalised axes has \(3,\)",
    ),
    "mean's dtype": (
        lambda: layer_norm_backward(DY, X, None, STAT.astype(int), STAT),
        TypeError,
        "mean: dtype int64 is not supported",
    ),
    "no rstd": (
        lambda: layer_norm_backward_from_y(DY, X, GAMMA),
        TypeError,
        "rstd is None: .* does not follow from y",
    ),
    "gamma of 0": (
        lambda: layer_norm_backward_from_y(DY, X, np.array([1.0, 2.0, 0.0, 1.0]), None, STAT),
        ValueError,
        r"gamma is 0 at \(2,\): y does not depend on x there",
    ),
    "gamma a 0": (lambda: rms_norm_backward_from_y(DY, X, 0, STAT), ValueError, "gamma is 0: y does not"),
    "eps": (lambda: layer_norm_backward(DY, X, eps=-1), ValueError, "eps is -1: it must be 0 or a positive"),
    "eps's kind": (lambda: rms_norm_backward(DY, X, eps="1"), TypeError, "eps is '1'.*give a number"),  # type: ignore[arg-type]
    "parameters": (
        lambda: rms_norm_backward(DY, X, parameters=1),
        TypeError,
        "parameters is 1: use True or False",
    ),  # type: ignore[arg-type]
    "alpha": (
        lambda: add_rms_norm_backward(DY, None, X, alpha=np.inf),
        ValueError,
        "alpha is inf: it must be finite",
    ),
    "dropout": (
        lambda: add_rms_norm_backward(DY, None, X, dropout=0.5),
        ValueError,
        "dropout=0.5 needs a seed",
    ),
    "seed": (
        lambda: add_rms_norm_backward(DY, None, X, dropout=0.5, seed=-1),
        ValueError,
        "seed is -1: it must be 0",
    ),
    "dtype": (lambda: rms_norm_backward(DY, X, dtype="int8"), TypeError, "dtype int8 is not supported"),
    "out": (lambda: rms_norm_backward(DY, X, out=np.ones(3)), ValueError, r"out has shape \(3,\), x has"),
    "out's dtype": (
        lambda: rms_norm_backward(DY, X, out=np.ones((3, 4)), dtype="float32"),
        ValueError,
        "out has dtype float64, dtype asks for float32",
    ),
    "out of x in part": (
        lambda: rms_norm_backward(DY[:2], X[:2], out=X[1:]),
        ValueError,
        "out and x share memory in part: give x itself",
    ),
    "out and gamma": (
        lambda: rms_norm_backward(DY[:1], X[:1], GAMMA, out=GAMMA[None]),
        ValueError,
        "out and gamma share memory$",
    ),
    "out and rstd": (
        lambda: rms_norm_backward(DY[:1], X[:1], None, (a := np.ones((1, 4)))[:, 0], out=a),
        ValueError,
        "out and rstd share memory$",
    ),
    "residual_out and out": (
        lambda: add_rms_norm_backward(DY, None, X, out=(a := np.ones((3, 4))), residual_out=a),
        ValueError,
        "residual_out and out share memory$",
    ),
    "residual_out": (
        lambda: add_rms_norm_backward(DY, None, X, residual_out=np.ones(4)),
        ValueError,
        r"residual_out has shape \(4,\), s has",
    ),
    "add_to": (
        lambda: layer_norm_backward(DY, X, add_to=GAMMA),
        TypeError,
        r"add_to is .*: give a tuple of 2, \(dgamma, dbeta\), None where nothing is added",
    ),
    "add_to's entries": (
        lambda: add_layer_norm_backward(DY, None, X, add_to=(None, None)),
        ValueError,
        r"add_to has 2 entries: give a tuple of 3, \(dgamma, dbeta, dbias\)",
    ),
    "add_to's kind": (
        lambda: layer_norm_backward(DY, X, add_to=(None, 1.0)),
        TypeError,
        rf"add_to\[1\] is a builtins.float: {NO_ARRAY}",
    ),
    "add_to's shape": (
        lambda: rms_norm_backward(DY, X, GAMMA, add_to=np.ones(1)),
        ValueError,
        r"add_to has shape \(1,\), gamma has \(4,\)",
    ),
    "add_to's free shape": (
        lambda: layer_norm_backward(DY, X, GAMMA, add_to=(None, np.ones(3))),
        ValueError,
        r"add_to\[1\] has shape \(3,\), the normalised axes of x have \(4,\)",
    ),
    "add_to's dtype": (
        lambda: rms_norm_backward(DY, X, add_to=np.ones(4, int)),
        TypeError,
        "add_to: dtype int64 is not supported",
    ),
    "one add_to for both": (
        lambda: layer_norm_backward(DY, X, add_to=(a := np.ones(4), a)),
        ValueError,
        r"add_to\[1\] and add_to\[0\] share memory",
    ),
    "add_to and x": (lambda: rms_norm_backward(DY, X, add_to=X[0]), ValueError, "add_to and x share memory$"),
    "add_to and out": (
        lambda: rms_norm_backward(DY, X, out=(a := np.ones((3, 4))), add_to=a[0]),
        ValueError,
        "out and add_to share memory$",
    ),
    "add_to and residual_out": (
        lambda: add_rms_norm_backward(DY, None, X, residual_out=(a := np.ones((3, 4))), add_to=(a[0], None)),
        ValueError,
        r"residual_out and add_to\[0\] share memory$",
    ),
    "add_to without parameters": (
        lambda: layer_norm_backward(DY, X, parameters=False, add_to=(None, np.ones(4))),
        ValueError,
        r"add_to\[1\] is given, and parameters is False",
    ),
    "add_to without a bias": (
        lambda: add_rms_norm_backward(DY, None, X, add_to=(None, np.ones(4))),
        ValueError,
        r"add_to\[1\] is given, and there is no bias",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, message = BAD[name]
    before = [each.copy() for each in (X, DY, GAMMA)]

    with pytest.raises(error, match=message) as caught:
        call()

    assert type(caught.value) is error
    assert len(str(caught.value)) < 300
    assert all(np.array_equal(now, then) for now, then in zip((X, DY, GAMMA), before, strict=True))


def test_device_arrays_are_checked(simulated: Any) -> None:
    x, dy = (simulated.cupy.asarray(each) for each in (X, DY))

    with pytest.raises(TypeError, match="x is a CuPy array .* and dy is a NumPy array"):
        layer_norm_backward(DY, x)
    with pytest.raises(ValueError, match="dy has shape"):
        rms_norm_backward(dy[:2], x)
    dx, dgamma = rms_norm_backward(simulated.cupy.asarray(DY.T.copy()).T, x, x[0])
    for got, wanted in zip((dx, dgamma), rms_norm_backward(DY, X, X[0]), strict=True):
        np.testing.assert_allclose(simulated.cupy.asnumpy(got), wanted, rtol=1e-12, atol=1e-13)
