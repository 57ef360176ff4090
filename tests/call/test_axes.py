"""Any axis of arrays that lie in any way: NumPy's results against formulas along the axis, and a device's errors."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupynorm
from cupynorm.call.axes import axes_of, memory_order, transposition_of
from tests.simulator import cupy, simulated

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["simulated"]  # a fixture

FEW = settings(max_examples=30, deadline=None, derandomize=True)
EPS = 0.1


def laid_out(draw: Any, shape: tuple[int, ...], *, stretched: bool = True, dtype: Any = np.float64) -> Any:
    """Draw numbers in an array of a shape: axes in any order, with steps, backwards, from an offset, or stretched.

    Integers are about 50.
    """
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -2, *([0] if stretched else [])])) for _ in shape]
    start = draw(st.integers(0, 2))
    sizes = [1 if not step else abs(step) * extent for step, extent in zip(steps, shape, strict=True)]
    memory = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(
        start + int(np.prod(sizes, dtype=int))
    )
    if np.dtype(dtype).kind in "iu":
        memory = 50 + 20 * memory.clip(-2, 2)
    memory = (memory > 0).astype(dtype) if np.dtype(dtype).kind == "b" else memory.astype(dtype)
    whole = memory[start:].reshape([sizes[at] for at in order]).transpose(np.argsort(order))
    whole = whole[tuple(slice(None, None, step or 1) for step in steps)]
    return np.broadcast_to(whole, shape) if stretched else whole


@st.composite
def places(draw: Any) -> tuple[tuple[int, ...], Any, tuple[int, ...]]:
    """Draw a shape, an axis argument, and the axes that it names."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    ndim = len(shape)
    chosen = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
    named = tuple(each - ndim if draw(st.booleans()) else each for each in chosen)
    axis: Any = named[0] if len(named) == 1 and draw(st.booleans()) else named
    if len(named) == ndim and draw(st.booleans()):
        axis = None
    return shape, axis, tuple(sorted(chosen))


def written_to(draw: Any, shape: tuple[int, ...]) -> Any:
    """Draw where a result goes: nowhere, or an array that lies in any way."""
    return laid_out(draw, shape, stretched=False) if draw(st.booleans()) else None


def same(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-10)


def along(axes: tuple[int, ...], shape: tuple[int, ...], array: Any) -> Any:
    """Return parameters of the normalised axes as an array that broadcasts to x."""
    return array.reshape([extent if at in axes else 1 for at, extent in enumerate(shape)])


def over(axes: tuple[int, ...], shape: tuple[int, ...], array: Any) -> Any:
    """Return the sum over the axes that are not normalised, in the shape of parameters."""
    return array.sum(axis=tuple(at for at in range(len(shape)) if at not in axes))


def exponentials(z: Any, axes: tuple[int, ...]) -> Any:
    found = np.exp(z - z.max(axis=axes, keepdims=True))
    return found / found.sum(axis=axes, keepdims=True)


def normalised(x: Any, axes: tuple[int, ...], *, centred: bool) -> tuple[Any, Any, Any]:
    """Return z, mean and rstd, which have x's axes."""
    mean = x.mean(axis=axes, keepdims=True) if centred else np.zeros(1)
    rstd = 1 / np.sqrt(np.square(x - mean).mean(axis=axes, keepdims=True) + EPS)
    return (x - mean) * rstd, mean, rstd


def norm_gradients(dy: Any, x: Any, gamma: Any, axes: tuple[int, ...], *, centred: bool) -> tuple[Any, ...]:
    z, _, rstd = normalised(x, axes, centred=centred)
    g, mean = dy * along(axes, x.shape, gamma), functools.partial(np.mean, axis=axes, keepdims=True)
    dx = rstd * (g - z * mean(g * z) - (mean(g) if centred else 0))
    sums = over(axes, x.shape, dy * z), over(axes, x.shape, dy)
    return (dx, *sums) if centred else (dx, sums[0])


@FEW
@given(st.data(), places(), st.booleans())
def test_norms(data: Any, place: Any, centred: bool) -> None:
    shape, axis, axes = place
    x, own = laid_out(data.draw, shape), tuple(shape[at] for at in axes)
    parameters = [laid_out(data.draw, own) for _ in range(1 + centred)]
    out, function = written_to(data.draw, shape), cupynorm.layer_norm if centred else cupynorm.rms_norm

    y, *stats = function(x, *parameters, axis=axis, eps=EPS, return_stats=True, out=out)

    z, mean, rstd = normalised(x, axes, centred=centred)
    wanted = [*(along(axes, shape, each) for each in parameters), 0.0]
    same(y, z * wanted[0] + wanted[1])
    for got, right in zip(stats, [mean, rstd][not centred :], strict=True):
        same(got, right.squeeze(axes))
    assert out is None or y is out
    if out is None:
        lies_as(y, x)


@FEW
@given(st.data(), places(), st.booleans())
def test_norms_of_sums(data: Any, place: Any, centred: bool) -> None:
    shape, axis, axes = place
    x, residual = (laid_out(data.draw, shape) for _ in range(2))
    gamma = laid_out(data.draw, tuple(shape[at] for at in axes))
    function = cupynorm.add_layer_norm if centred else cupynorm.add_rms_norm

    y, total = function(x, residual, gamma, alpha=0.5, axis=axis, eps=EPS)

    same(total, x + 0.5 * residual)
    same(y, normalised(total, axes, centred=centred)[0] * along(axes, shape, gamma))


@FEW
@given(st.data(), places())
def test_softmax_under_masks(data: Any, place: Any) -> None:
    shape, axis, axes = place
    x, bias = laid_out(data.draw, shape), laid_out(data.draw, shape[data.draw(st.integers(0, len(shape))) :])
    where = laid_out(data.draw, shape) > data.draw(st.sampled_from([-9.0, -0.5]))
    out = written_to(data.draw, shape)
    how: dict[str, Any] = {"where": where, "bias": bias, "scale": 0.7, "axis": axis}

    y = cupynorm.softmax(x, out=out, **how)

    kept = np.where(where.any(axis=axes, keepdims=True), where, True)
    z = np.where(kept, x * 0.7 + bias, -np.inf)
    some = where.any(axis=axes, keepdims=True)
    wanted = np.where(where, exponentials(z, axes), 0)
    same(y, wanted)
    assert out is None or y is out
    if out is None:
        lies_as(y, x)
    with np.errstate(divide="ignore"):
        same(np.where(where, cupynorm.log_softmax(x, **how), 0), np.where(where, np.log(wanted), 0))
        top = z.max(axis=axes, keepdims=True)
        whole = np.where(some, top + np.log(np.exp(z - top).sum(axis=axes, keepdims=True)), -np.inf)
    same(cupynorm.logsumexp(x, keepdims=True, **how), whole)
    same(cupynorm.logsumexp(x, **how), whole.squeeze(axes))


@FEW
@given(st.data(), places())
def test_gradients_of_softmax(data: Any, place: Any) -> None:
    shape, axis, axes = place
    dy, x, out = laid_out(data.draw, shape), laid_out(data.draw, shape), written_to(data.draw, shape)
    at = data.draw(st.integers(0, len(shape)))
    bias = laid_out(data.draw, shape[at:])
    y = exponentials(x, axes)

    dx, dbias = cupynorm.softmax_backward(dy, y, axis=axis, bias=bias, return_dbias=True, out=out, scale=2.0)

    dz = y * (dy - (dy * y).sum(axis=axes, keepdims=True))
    same(dx, 2 * dz)
    same(dbias, dz.sum(axis=tuple(range(at))))
    assert out is None or dx is out
    same(cupynorm.log_softmax_backward(dy, np.log(y), axis=axis), dy - y * dy.sum(axis=axes, keepdims=True))


@FEW
@given(st.data(), places(), st.booleans())
def test_gradients_of_norms(data: Any, place: Any, centred: bool) -> None:
    shape, axis, axes = place
    dy, x, out = laid_out(data.draw, shape), laid_out(data.draw, shape), written_to(data.draw, shape)
    gamma = laid_out(data.draw, tuple(shape[at] for at in axes))
    name = "layer_norm" if centred else "rms_norm"

    found = getattr(cupynorm, f"{name}_backward")(dy, x, gamma, axis=axis, eps=EPS, out=out)
    dx, residual, *sums, _ = getattr(cupynorm, f"add_{name}_backward")(dy, None, x, gamma, axis=axis, eps=EPS)

    wanted = norm_gradients(dy, x, gamma, axes, centred=centred)
    same(residual, dx)
    for got, again, right in zip(found, (dx, *sums), wanted, strict=True):
        same(got, right)
        same(again, right)
    assert out is None or found[0] is out
    if (np.abs(gamma) > 0.01).all():
        y, *_, rstd = getattr(cupynorm, name)(x, gamma, axis=axis, eps=EPS, return_stats=True)
        from_y = getattr(cupynorm, f"{name}_backward_from_y")(dy, y, gamma, rstd=rstd, axis=axis)
        for got, right in zip(from_y, wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-7)


@FEW
@given(st.data(), places())
def test_cross_entropy(data: Any, place: Any) -> None:
    shape, axis, _ = place
    axis = axis[0] if isinstance(axis, tuple) else axis or 0
    x, at = laid_out(data.draw, shape), axis % len(shape)
    others, grad = shape[:at] + shape[at + 1 :], written_to(data.draw, shape)
    labels = np.asarray((np.abs(laid_out(data.draw, others)) * 10).astype(int) % shape[at])

    loss, dx = cupynorm.cross_entropy(x, labels, axis=axis, return_grad=True, grad=grad)

    one = np.expand_dims(labels, at)
    p = exponentials(x, (at,))
    same(loss, -np.log(np.take_along_axis(p, one, at)).squeeze(at))
    same(dx, p - (one == np.arange(shape[at]).reshape([-1 if a == at else 1 for a in range(len(shape))])))
    assert grad is None or dx is grad


FUSION = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * t, store=lambda y, s: y + s)


@FEW
@given(st.data(), places())
def test_fusions(data: Any, place: Any) -> None:
    shape, axis, axes = place
    x, dy, t = (laid_out(data.draw, shape) for _ in range(3))
    at = data.draw(st.integers(0, len(shape)))
    s = laid_out(data.draw, shape[at:])

    same(FUSION(x, t, s, axis=axis), exponentials(x * t, axes) + s)
    found = FUSION.backward(dy, x, t, s, axis=axis)

    y = exponentials(x * t, axes)
    dz = y * (dy - (dy * y).sum(axis=axes, keepdims=True))
    same(found.x, dz * t)
    same(found.operands[0], dz * x)
    same(found.operands[1], dy.sum(axis=tuple(range(at))))


@FEW
@given(st.data(), places())
def test_quantised_results_and_statistics(data: Any, place: Any) -> None:
    shape, axis, axes = place
    x = laid_out(data.draw, shape)

    q, scales = cupynorm.rms_norm(x, axis=axis, eps=EPS, quantize="int8")
    mean, variance = cupynorm.moments(x, axis=axis)

    wide = np.expand_dims(scales, axes)
    exact = normalised(x, axes, centred=False)[0]
    assert (np.abs(q * wide - exact) <= 0.5001 * wide).all()
    same(mean, x.mean(axis=axes))
    same(variance, x.var(axis=axes))


def lies_as(y: Any, x: Any) -> None:
    """Assert that y has x's order in memory and is packed; elements that are one in memory have no order."""
    if any(step == 0 and extent > 1 for step, extent in zip(x.strides, x.shape, strict=True)):
        return
    packed = y.transpose(memory_order(x))
    assert packed.flags.c_contiguous


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, (0, 2), None], ids=str)
def test_results_keep_the_order_in_memory(order: tuple[int, ...], axis: Any) -> None:
    x = np.ones((2, 3, 4)).transpose(order)

    for y in (
        cupynorm.softmax(x, axis=axis),
        cupynorm.rms_norm_backward(x, x, axis=axis, parameters=False)[0],
        cupynorm.add_layer_norm(x, x, axis=axis)[0],
    ):
        assert (y.shape, y.strides) == (x.shape, x.strides)


def test_dropout_counts_in_c_order_with_the_normalised_axes_moved_to_the_end() -> None:
    x, zero = np.random.default_rng(0).standard_normal((2, 3, 4)), np.zeros((2, 3, 4))
    moved = cupynorm.add_layer_norm(
        np.moveaxis(x, 0, -1).copy(), np.moveaxis(zero, 0, -1).copy(), dropout=0.5, seed=4, offset=7
    )

    found = cupynorm.add_layer_norm(x, zero, axis=0, dropout=0.5, seed=4, offset=7)

    for got, wanted in zip(found, moved, strict=True):
        np.testing.assert_array_equal(got, np.moveaxis(wanted, -1, 0))


def test_queries_are_the_last_of_the_other_axes() -> None:
    x = np.zeros((2, 3, 4))

    kept = [cupynorm.softmax(x, axis=axis, causal_offset=0) > 0 for axis in range(3)]

    i, j, k = np.indices(x.shape)
    for got, wanted in zip(kept, (i <= k, j <= k, k <= j), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("axis", "error", "message"),
    [
        (3, ValueError, "axis 3 is out of range: x has 3 axes, shape (2, 3, 4)"),
        (-4, ValueError, "axis -4 is out of range"),
        ((0, -3), ValueError, "axis (0, -3) names an axis of x twice; x has 3 axes"),
        ((), ValueError, "axis is empty: name at least one axis"),
        (
            1.0,
            TypeError,
            "axis is 1.0 (a float): give an integer, a tuple of integers such as (-2, -1), or None",
        ),
        (True, TypeError, "axis is True"),
        ([0], TypeError, "axis is [0]"),
        ((None,), TypeError, "axis is (None,)"),
    ],
    ids=str,
)
def test_axes_that_are_refused(axis: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as caught:
        axes_of(axis, (2, 3, 4))

    assert str(caught.value).startswith(message)


def test_axes_that_are_taken() -> None:
    assert axes_of(None, (2, 3)) == axes_of((-1, 0), (2, 3)) == (0, 1)
    assert axes_of(np.int8(-2), (2, 3)) == (0,)
    with pytest.raises(ValueError, match="axis is None, which is all axes: x has 0 axes"):
        axes_of(None, ())
    assert transposition_of((1, 2), np.ones((2, 3, 4))) is transposition_of(None, np.ones((2, 3))) is None
    assert transposition_of((2, 0), np.ones((2, 3, 4))).order == (1, 0, 2)  # type: ignore[union-attr]


X = np.random.default_rng(1).standard_normal((3, 4, 5)).astype(np.float32)
LABELS = np.ones((4, 5), int)
# each is taken along some axes and refused along others
CALLS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda to, axis: cupynorm.layer_norm(to(X), to(X[:, 0, 0]), axis=axis),
    "rms_norm": lambda to, axis: cupynorm.rms_norm(to(X).T, axis=axis, out=to(X.T.copy())),
    "softmax": lambda to, axis: cupynorm.softmax(to(X), axis, lengths=to(np.ones((4, 5), int))),
    "causal": lambda to, axis: cupynorm.softmax(to(X)[:, ::2], axis, causal=True),
    "log_softmax": lambda to, axis: cupynorm.log_softmax(to(X)[..., ::-2], axis),
    "logsumexp": lambda to, axis: cupynorm.logsumexp(to(X).transpose(1, 0, 2), axis),
    "cross_entropy": lambda to, axis: cupynorm.cross_entropy(to(X), to(LABELS), axis=axis),
    "add_rms_norm": lambda to, axis: cupynorm.add_rms_norm(to(X), to(X)[::-1], to(X[:, 0, 0]), axis=axis)[0],
    "layer_norm_backward": lambda to, axis: cupynorm.layer_norm_backward(
        to(X), to(X), to(X[:, 0, 0]), axis=axis
    )[1],
    "softmax_backward": lambda to, axis: cupynorm.softmax_backward(to(X)[:, ::-1], to(X), axis=axis),
    "fusion": lambda to, axis: FUSION(to(X), 2.0, to(X[0]), axis=axis),
    "fusion's gradient": lambda to, axis: FUSION.backward(to(X), to(X), 2.0, to(X[0]), axis=axis).x,
    "moments": lambda to, axis: cupynorm.moments(to(X), axis=axis)[0],
    "masked": lambda to, axis: cupynorm.softmax(to(X), axis, where=to(X[0] > 0), bias=to(X[:, :1])),
}
AXES = [0, 1, -1, (0, 1), (2, 0), None, (), 3, (0, -3), 1.5]


@pytest.mark.parametrize("name", CALLS)
def test_a_device_takes_what_numpy_arrays_are_taken_for(simulated: Any, name: str) -> None:
    """The same results, or the same error."""
    call = CALLS[name]
    for axis in AXES:
        answers: list[Any] = []
        for to in (np.asarray, cupy.asarray):
            try:
                answers.append(call(to, axis))
            except (TypeError, ValueError) as error:
                answers.append(error)
        host, device = answers
        if isinstance(host, Exception):
            assert type(device) is type(host), (axis, host, device)
            assert str(device) == str(host), axis
        else:
            assert not isinstance(device, Exception), (axis, device)
            np.testing.assert_allclose(cupy.asnumpy(device), host, rtol=1e-4, atol=1e-5, err_msg=str(axis))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: cupynorm.softmax(x, axis=0, where=np.ones(3, bool)),
            "where has shape (3, 1), x has (4, 3)",
        ),
        (
            lambda x: cupynorm.layer_norm(x, axis=0, out=np.empty((4, 3))),
            "out has shape (3, 4), x has (4, 3)",
        ),
        (lambda x: cupynorm.standardize(x[:0], axis=0), "x has shape (4, 0): the normalised axes are empty"),
        (
            lambda x: cupynorm.cross_entropy(x, np.arange(3), axis=0),
            "labels has shape (3,), logits without its last axis has (4,)",
        ),
        (lambda x: cupynorm.rms_norm_backward(x[:2], x, axis=0), "dy has shape (4, 2), x has (4, 3)"),
        (
            lambda x: cupynorm.fuse(cupynorm.softmax, load=lambda x, b: x + b)(x, np.ones(3), axis=0),
            "b has shape (3, 1), x has (4, 3)",
        ),
    ],
)
def test_errors_about_shapes_say_in_which_order_the_axes_are(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match="shape") as caught:
        call(np.ones((3, 4)))

    assert str(caught.value).startswith(message)
    assert "has its axes in the order (1, 0), the normalised ones last" in str(caught.value)


def test_other_errors_say_nothing_about_the_order_of_axes() -> None:
    with pytest.raises(ValueError, match="eps is -1: it must be 0 or a positive finite number$"):
        cupynorm.layer_norm(np.ones((3, 4)), axis=0, eps=-1)


def test_keepdims_may_be_numpys_boolean() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    total, mean, variance = np.empty((2, 1, 4)), np.empty((2, 1, 4)), np.empty((2, 1, 4))

    cupynorm.logsumexp(x, axis=1, keepdims=np.True_, out=total)
    cupynorm.moments(x, axis=1, keepdims=np.True_, out=(mean, variance))

    np.testing.assert_allclose(np.exp(total), np.exp(x).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(mean, x.mean(axis=1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(variance, x.var(axis=1, keepdims=True))
