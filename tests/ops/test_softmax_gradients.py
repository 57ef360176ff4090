"""Gradients of softmax and log_softmax on NumPy arrays: derivatives under every mask, a bias's gradient, and errors."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupynorm import dropout, log_softmax, log_softmax_backward, softmax, softmax_backward
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog import bounds
from cupynorm.host import reference
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

RANDOM = np.random.default_rng(21)
FORWARD: dict[str, Any] = {"softmax": softmax, "log_softmax": log_softmax}
BACKWARD: dict[str, Any] = {"softmax": softmax_backward, "log_softmax": log_softmax_backward}
every_op = pytest.mark.parametrize("op", FORWARD)
SHAPE = (2, 3, 5)
WHERE = RANDOM.random(SHAPE) < 0.6
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": -0.7},
    "where": {"where": WHERE},
    "where of bytes": {"where": WHERE[:, :1].astype(np.uint8)},
    "lengths": {"lengths": np.array([[5, 0, 3]])},
    "list of lengths": {"lengths": [1, 4, 2]},
    "left padded": {"lengths": np.array([[2], [4]], np.uint8), "left_padded": True},
    "causal": {"causal": True},
    "offset": {"causal_offset": 2},
    "rows before the diagonal": {"causal_offset": -2},
    "window": {"window": 1},
    "left window": {"window": (1, None), "causal_offset": 1},
    "all of them": {
        "scale": 1.5,
        "where": WHERE,
        "lengths": np.array([4, 5, 2]),
        "causal_offset": 2,
        "window": (2, 1),
        "bias": RANDOM.standard_normal((2, 1, 5)),
    },
}
every_mask = pytest.mark.parametrize("mask", MASKS)


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return np.asarray(RANDOM.standard_normal(shape)).astype(dtype)


def slope(call: Any, x: Any, step: float = 1e-5) -> Any:
    """The derivative of a number by each element of x, by central differences."""
    found = np.empty_like(x)
    for at in np.ndindex(x.shape):
        aside = np.zeros_like(x)
        aside[at] = step
        found[at] = (call(x + aside) - call(x - aside)) / (2 * step)
    return found


def kept_by(mask: dict[str, Any], shape: tuple[int, ...] = SHAPE, axis: Any = -1) -> Any:
    return np.isfinite(log_softmax(np.zeros(shape), axis, **{**mask, "bias": None}))


def weighted(op: str, dy: Any, kept: Any, x: Any, *more: Any, **mask: Any) -> Any:
    """The sum of dy * y over what is kept: a dropped log_softmax is -inf."""
    return (dy * np.where(kept, FORWARD[op](x, *more, **mask), 0)).sum()


@every_op
@every_mask
def test_gradients_are_numerical_derivatives_and_what_is_dropped_never_leaks(op: str, mask: str) -> None:
    options, x, dy = MASKS[mask], normal(*SHAPE), normal(*SHAPE)
    kept = kept_by(options)
    wanted = slope(lambda at: weighted(op, dy, kept, at, **options), x)
    y = FORWARD[op](x, **options)

    for rubbish in (np.nan, np.inf, -np.inf):
        dy[~kept] = rubbish
        np.testing.assert_allclose(BACKWARD[op](dy, y, **options), wanted, rtol=1e-6, atol=1e-9)
        y[~kept] = rubbish
    dx = BACKWARD[op](dy, y, **options)

    np.testing.assert_allclose(dx, wanted, rtol=1e-6, atol=1e-9)
    assert (dx[~kept] == 0).all()


@every_op
@pytest.mark.parametrize(
    ("shape", "axis"), [((6,), 0), ((2, 3, 4), (1, 2)), ((2, 1, 3), (0, 1, 2)), ((3, 1), -1)], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_any_trailing_axes(op: str, shape: tuple[int, ...], axis: Any, masked: bool) -> None:
    x, dy = normal(*shape), normal(*shape)
    options: dict[str, Any] = {"where": RANDOM.random(shape) < 0.7, "scale": 0.5} if masked else {}
    kept = kept_by(options, shape, axis)

    dx = BACKWARD[op](dy, FORWARD[op](x, axis, **options), axis, **options)

    wanted = slope(lambda at: weighted(op, dy, kept, at, axis, **options), x)
    np.testing.assert_allclose(dx, wanted, rtol=1e-6, atol=1e-9)


def allowed(op: str, dy: Any, y: Any, exact: Any, scale: float = 1.0, dtype: str = "float64") -> Any:
    """Return how far dx may be off in a dtype: the bound of docs/numerics.md."""
    line = bounds.bound(f"{op}_backward", "dx")
    arithmetic = "float64" if dtype == "float64" else "float32"
    sizes, found = np.abs(dy).astype(np.float64), np.asarray(y, np.float64)
    terms = found * (sizes + (sizes * found).sum(axis=-1, keepdims=True))
    if op == "log_softmax":
        terms = sizes + np.exp(found) * (1 + np.abs(found)) * sizes.sum(axis=-1, keepdims=True)
    least = float(ml_dtypes.finfo(dtype_of(dtype)).smallest_subnormal) / 2
    rounding = bounds.ROUNDING[dtype] * np.abs(exact)
    return rounding + scale * line.multiple * bounds.EPSILON[arithmetic] * terms + least


@every_op
@pytest.mark.parametrize(
    "shape", [(5,), (1,), (), (3, 1), (2, 1, 5), (1, 3, 5), (2, 1, 1), (2, 3, 5), (1, 1, 5)], ids=str
)
def test_the_gradient_of_a_bias_is_summed_over_what_was_broadcast(op: str, shape: tuple[int, ...]) -> None:
    x, dy, bias = normal(*SHAPE), normal(*SHAPE), normal(*shape)
    options: dict[str, Any] = {"scale": 1.5, "where": WHERE, "causal_offset": 2}
    kept = kept_by(options)
    y = FORWARD[op](x, **options, bias=bias)

    dx, dbias = BACKWARD[op](dy, y, **options, bias=bias, return_dbias=True)

    wanted = slope(lambda at: weighted(op, dy, kept, x, **options, bias=np.asarray(at)), bias)
    assert dbias.shape == shape
    np.testing.assert_allclose(dbias, wanted, rtol=1e-6, atol=1e-8)
    # Without dbias, rows are summed in another order: each is within its bound of what is exact.
    off = 2 * allowed(op, np.where(kept, dy, 0), np.where(kept, y, 0), dx, scale=1.5)
    for alone in (BACKWARD[op](dy, y, **options, bias=bias), BACKWARD[op](dy, y, **options)):
        assert (np.abs(dx - alone) <= off).all()
    total = np.full(shape, 100.0)
    assert BACKWARD[op](dy, y, **options, bias=bias, return_dbias=True, add_to=total)[1] is total
    np.testing.assert_allclose(total, 100 + dbias, rtol=1e-13)


@every_op
@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 1), (1,), (3, 1, 7)], ids=str)
def test_the_gradient_of_a_bias_does_not_depend_on_how_rows_are_cut_into_batches(
    op: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake known from others."""
    dy, y = normal(31, 3, 5, 7, dtype=np.float32), FORWARD[op](normal(31, 3, 5, 7, dtype=np.float32))

    def summed(cuts: list[int]) -> Any:
        total = np.zeros(shape)
        for part in zip(np.split(dy, cuts), np.split(y, cuts), strict=True):
            BACKWARD[op](*part, bias=np.zeros(shape), return_dbias=True, add_to=total)
        return total

    whole = summed([])
    for block, cuts in ((1 << 17, [1]), (1 << 17, [4, 30]), (16, []), (7, [2]), (200, [11])):
        monkeypatch.setattr(reference, "BLOCK", block)
        assert np.array_equal(summed(cuts), whole)


def test_rows_of_a_bias_are_summed_one_after_another() -> None:
    dy, y = normal(40, 6), softmax(normal(40, 6))

    dz, dbias = softmax_backward(dy, y, bias=np.zeros(6), return_dbias=True)

    total = np.zeros(6)
    for row in dz:
        total = total + row
    assert np.array_equal(dbias, total)


@every_op
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("cols", [1, 2, 33, 1000])
def test_every_dtype_is_rounded_once(op: str, dtype: str, cols: int) -> None:
    kind = dtype_of(dtype)
    dy, y = normal(6, cols, dtype=kind), FORWARD[op](normal(6, cols), dtype=kind)
    g, wide = (each.astype(np.float64).astype(np.longdouble) for each in (dy, y))
    if op == "softmax":
        exact = wide * (g - (g * wide).sum(axis=1, keepdims=True))
    else:
        exact = g - np.exp(wide) * g.sum(axis=1, keepdims=True)

    dx = BACKWARD[op](dy, y)

    assert dx.dtype == kind
    # nearly half a step in 16 bits, so that a second rounding is found
    assert (np.abs(dx.astype(np.longdouble) - exact) <= allowed(op, dy, y, exact, dtype=dtype)).all()


@every_op
@pytest.mark.parametrize("block", [1 << 17, 16])
@pytest.mark.parametrize("place", ["dy", "y", "other", "strided"])
def test_where_the_result_goes(op: str, block: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dy, mask = normal(2, 9, 40), {"where": RANDOM.random((9, 40)) < 0.5, "lengths": RANDOM.integers(0, 41, 9)}
    mask |= {"bias": normal(9, 1), "return_dbias": True}
    y = FORWARD[op](normal(2, 9, 40), where=mask["where"], lengths=mask["lengths"])
    wanted = BACKWARD[op](dy, y, **mask)
    monkeypatch.setattr(reference, "BLOCK", block)
    places = {"dy": dy, "y": y, "other": np.empty_like(y), "strided": np.empty((40, 9, 2)).T}

    found = BACKWARD[op](dy, y, **mask, out=places[place])

    assert found[0] is places[place]
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


@every_op
def test_special_values_of_what_is_kept_stay_in_their_row(op: str) -> None:
    x = normal(5, 6)
    x[1] = -np.inf
    x[2, :5] = -np.inf
    x[3, 1] = np.nan
    dy = normal(5, 6)
    dy[4, 2] = np.nan
    where = np.array([True, True, True, True, True, False])
    y = FORWARD[op](x, where=where)
    rows = FORWARD[op](x[[0, 2]], where=where)

    dx = BACKWARD[op](dy, y, where=where)

    assert np.isnan(dx[[1, 3, 4], :5]).all()
    assert (dx[:, 5] == 0).all()
    np.testing.assert_array_equal(dx[[0, 2]], BACKWARD[op](dy[[0, 2]], rows, where=where))
    assert np.isfinite(dx[0]).all()


def test_a_logit_of_minus_infinity_has_a_gradient() -> None:
    x, dy = np.array([[0.0, -np.inf, 0.0]]), np.array([[1.0, 2.0, 3.0]])

    assert softmax_backward(dy, softmax(x)).tolist() == [[-0.5, 0.0, 0.5]]
    np.testing.assert_allclose(log_softmax_backward(dy, log_softmax(x)), [[-2.0, 2.0, 0.0]], atol=1e-15)


def test_a_mask_may_be_left_out_of_softmax_where_dy_is_finite() -> None:
    x, dy = normal(*SHAPE), normal(*SHAPE)

    for options in (MASKS["where"], MASKS["causal"], MASKS["lengths"]):
        y = softmax(x, **options)
        np.testing.assert_allclose(softmax_backward(dy, y), softmax_backward(dy, y, **options), atol=1e-16)


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_a_dropout_behind_softmax_is_part_of_its_gradient(p: float, masked: bool) -> None:
    x, dy = normal(*SHAPE), normal(*SHAPE)
    how: dict[str, Any] = {"seed": 8, "offset": 2}
    mask: dict[str, Any] = {"causal": True, "scale": 0.5} if masked else {}

    dx = softmax_backward(dy, softmax(x, **mask), **mask, dropout=p, **how)

    wanted = slope(lambda at: (dy * dropout(softmax(at, **mask), p, **how)).sum(), x)
    np.testing.assert_allclose(dx, wanted, rtol=1e-6, atol=1e-9)


@every_op
@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)], ids=str)
def test_no_rows(op: str, shape: tuple[int, ...]) -> None:
    y = np.empty(shape, np.float32)

    dx, dbias = BACKWARD[op](y, y, lengths=np.ones(shape[:-1], int), bias=np.ones((1, 6)), return_dbias=True)

    assert (dx.shape, dbias.tolist()) == (shape, [[0.0] * 6])


@every_op
def test_arrays_may_lie_anywhere(op: str) -> None:
    some = np.s_[::-2, 1::3]
    dy, y = normal(6, 12, dtype=np.float16)[some], FORWARD[op](normal(6, 4))[::-1][::2]
    packed = [np.ascontiguousarray(each) for each in (dy, y)]

    for where, out in itertools.product([None, np.eye(6, 4)[::2] > 0], [None, np.empty((4, 3)).T]):
        found = BACKWARD[op](dy, y, where=where, out=out)
        assert np.array_equal(found, BACKWARD[op](*packed, where=where))


@every_op
def test_pytorchs_gradients(op: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, dy = normal(*SHAPE), normal(*SHAPE)
    at = torch.tensor(x, requires_grad=True)
    getattr(torch, op)(at, dim=-1).backward(torch.tensor(dy))

    np.testing.assert_allclose(BACKWARD[op](dy, FORWARD[op](x)), at.grad.numpy(), rtol=1e-10, atol=1e-13)


Y, DY, BIAS = softmax(normal(3, 4)), normal(3, 4), normal(4)
# the call, the error, and what the message says
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "dy": (
        lambda: softmax_backward([1.0], Y),
        TypeError,
        "dy is a builtins.list: give a NumPy or a CuPy array",
    ),
    "no dy": (lambda: softmax_backward(None, Y), TypeError, "dy is a builtins.NoneType: give a NumPy"),
    "dy's shape": (lambda: softmax_backward(DY[:1], Y), ValueError, r"dy has shape \(1, 4\), y has \(3, 4\)"),
    "y": (lambda: log_softmax_backward(DY, 1.0), TypeError, "y is a builtins.float"),
    "y with lengths": (lambda: softmax_backward(DY, 1.0, lengths=[1]), TypeError, "y is a builtins.float"),
    "y's dtype": (lambda: softmax_backward(DY, Y.astype(int)), TypeError, "y: dtype int64 is not supported"),
    "empty rows": (
        lambda: softmax_backward(DY[:, :0], Y[:, :0]),
        ValueError,
        "the normalised axes are empty",
    ),
    "axis": (lambda: softmax_backward(DY, Y, 2), ValueError, "axis 2 is out of range: y has 2 axes"),
    "scale": (lambda: softmax_backward(DY, Y, scale=np.inf), ValueError, "scale is inf: it must be finite"),
    "where": (
        lambda: softmax_backward(DY, Y, where=DY),
        TypeError,
        "where has dtype float64: use bool or uint8",
    ),
    "where's shape": (
        lambda: softmax_backward(DY, Y, where=np.ones(3, bool)),
        ValueError,
        r"where has shape \(3,\), y has \(3, 4\)",
    ),
    "lengths": (
        lambda: softmax_backward(DY, Y, lengths=[5, 1, 1]),
        ValueError,
        "lengths holds 5: the last axis of y has 4",
    ),
    "lengths of axes": (
        lambda: softmax_backward(DY, Y, (0, 1), lengths=[1]),
        ValueError,
        "lengths goes along one axis: axis names 2 axes of y",
    ),
    "left_padded": (lambda: softmax_backward(DY, Y, left_padded=True), ValueError, "give lengths, too"),
    "causal": (lambda: softmax_backward(DY, Y, causal=1), TypeError, "causal is 1: use True or False"),  # type: ignore[arg-type]
    "one axis": (
        lambda: softmax_backward(DY[0], Y[0], causal=True),
        ValueError,
        "queries and keys: y has 1 axis",
    ),
    "window": (lambda: softmax_backward(DY, Y, window=-1), ValueError, "window is -1: sizes are 0 or more"),
    "bias's shape": (
        lambda: softmax_backward(DY, Y, bias=np.ones(3)),
        ValueError,
        r"bias has shape \(3,\), y has",
    ),
    "bias": (lambda: softmax_backward(DY, Y, bias=1.0), TypeError, "bias is a builtins.float"),
    "dbias without a bias": (
        lambda: softmax_backward(DY, Y, scale=2.0, return_dbias=True),
        ValueError,
        "return_dbias is True, and there is no bias: give the bias of the forward call",
    ),
    "return_dbias": (
        lambda: softmax_backward(DY, Y, bias=BIAS, return_dbias=1),  # type: ignore[arg-type]
        TypeError,
        "return_dbias is 1: use True or False",
    ),
    "add_to without dbias": (
        lambda: softmax_backward(DY, Y, bias=BIAS, add_to=BIAS.copy()),
        ValueError,
        "add_to is given, and return_dbias is False",
    ),
    "add_to's shape": (
        lambda: softmax_backward(DY, Y, bias=BIAS, return_dbias=True, add_to=np.ones(1)),
        ValueError,
        r"add_to has shape \(1,\), bias has \(4,\)",
    ),
    "add_to and out": (
        lambda: softmax_backward(DY, Y, bias=BIAS, return_dbias=True, out=(a := Y.copy()), add_to=a[0]),
        ValueError,
        "out and add_to share memory$",
    ),
    "dropout": (lambda: softmax_backward(DY, Y, dropout=0.5), ValueError, "dropout=0.5 needs a seed"),
    "dropout's range": (
        lambda: softmax_backward(DY, Y, dropout=1.5, seed=1),
        ValueError,
        "dropout is 1.5: .* 0 to 1",
    ),
    "out": (
        lambda: softmax_backward(DY, Y, out=np.ones(3)),
        ValueError,
        r"out has shape \(3,\), y has \(3, 4\)",
    ),
    "out of y in part": (
        lambda: softmax_backward(DY[:2], Y[:2], out=Y[1:]),
        ValueError,
        "out and y share memory in part: give y itself",
    ),
    "out and bias": (
        lambda: softmax_backward(DY, Y, bias=(a := np.ones((3, 4))), out=a),
        ValueError,
        "out and bias share memory$",
    ),
    "dtype": (lambda: softmax_backward(DY, Y, dtype="int8"), TypeError, "dtype int8 is not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, message = BAD[name]
    before = [each.copy() for each in (Y, DY, BIAS)]

    with pytest.raises(error, match=message) as caught:
        call()

    assert type(caught.value) is error
    assert len(str(caught.value)) < 300
    assert all(np.array_equal(now, then) for now, then in zip((Y, DY, BIAS), before, strict=True))


def test_device_arrays_are_checked(simulated: Any) -> None:
    y, dy = (simulated.cupy.asarray(each) for each in (Y, DY))

    with pytest.raises(TypeError, match="y is a CuPy array .* and dy is a NumPy array"):
        softmax_backward(DY, y)
    with pytest.raises(TypeError, match="y is a CuPy array .* and where is a NumPy array"):
        softmax_backward(dy, y, where=np.ones(4, bool))
