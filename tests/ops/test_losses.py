"""logsumexp and cross_entropy on NumPy arrays: definitions, derivatives, special values, layouts, and every error."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupynorm import cross_entropy, log_softmax, logsumexp, softmax
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog.bounds import TOLERANCES
from cupynorm.host import reference
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))
RANDOM = np.random.default_rng(20)
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_order_of_tests() -> None:
    RANDOM.bit_generator.state = START


LABELS = np.array([3, 0, 6, 6, 2])
IGNORED = np.array([3, -100, 6, -100, 2])
WEIGHT = RANDOM.random(7) * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.3},
    "ignore_index": {"ignore_index": 6},
    "all": {"weight": WEIGHT, "label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 0},
}


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


def defined(
    x: Any, labels: Any, weight: Any = None, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """The formula of the docstring, term by term in extended precision; labels in range."""
    x = np.asarray(x).astype(np.longdouble)
    classes = x.shape[-1]
    weights = np.ones(classes) if weight is None else np.asarray(weight, np.longdouble)
    q = weights * ((1 - label_smoothing) * np.eye(classes)[labels] + label_smoothing / classes)
    pivot = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - pivot).sum(-1, keepdims=True)) + pivot
    loss = (q * (lse - x)).sum(-1) + z_loss * lse[..., 0] ** 2
    gradient = (q.sum(-1, keepdims=True) + 2 * z_loss * lse) * np.exp(x - lse) - q
    return loss.astype(np.float64), gradient.astype(np.float64)


def close(actual: Any, expected: Any, dtype: str, size: float = 1.0) -> None:
    """Compare numbers that are differences of numbers of this size."""
    tolerance = 2 * TOLERANCES[dtype]
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=tolerance, atol=tolerance * size)


@every_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient_are_the_definitions(name: str, dtype: str) -> None:
    options = dict(OPTIONS[name])
    x = 3 * normal(5, 7, dtype=dtype_of(dtype))

    loss, gradient = cross_entropy(x, LABELS, return_grad=True, **options)

    counted = options.pop("ignore_index", None) != LABELS
    expected, slope = defined(x, LABELS, **options)
    assert (loss.dtype, gradient.dtype) == (np.float64 if dtype == "float64" else np.float32, x.dtype)
    close(loss, np.where(counted, expected, 0), str(loss.dtype), 4)
    close(gradient, np.where(counted[:, None], slope, 0), dtype)
    assert np.array_equal(cross_entropy(x, LABELS, **OPTIONS[name]), loss)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_is_the_losses_numerical_derivative(name: str) -> None:
    x, dloss, step = normal(5, 7), normal(5), 1e-5

    _, gradient = cross_entropy(x, LABELS, return_grad=True, dloss=dloss, **OPTIONS[name])

    slope = np.empty_like(x)
    for column in range(7):
        aside = np.zeros(7)
        aside[column] = step
        above, below = (cross_entropy(x + side, LABELS, **OPTIONS[name]) for side in (aside, -aside))
        slope[:, column] = dloss * (above - below) / (2 * step)
    np.testing.assert_allclose(gradient, slope, rtol=1e-7, atol=1e-9)


def test_a_row_worked_by_hand() -> None:
    x = np.log([[1.0, 1.0, 2.0]])

    loss, gradient = cross_entropy(
        x, np.array([2]), weight=np.array([1.0, 2.0, 4.0]), label_smoothing=0.5, z_loss=2.0, return_grad=True
    )

    q = np.array([1 / 6, 2 / 6, 4 * (0.5 + 1 / 6)])
    log4 = np.log(4)
    assert loss == pytest.approx([q[0] * log4 + q[1] * log4 + q[2] * np.log(2) + 2 * log4**2])
    assert gradient == pytest.approx(((q.sum() + 4 * log4) * np.array([1, 1, 2]) / 4 - q)[None])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pytorchs_loss_and_gradient(name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    options = {key: each for key, each in OPTIONS[name].items() if key != "z_loss"}
    x = normal(5, 7, dtype=dtype)
    given = torch.tensor(x, requires_grad=True)
    theirs = {**options, "ignore_index": options.get("ignore_index", -100)}
    if "weight" in options:
        theirs["weight"] = torch.tensor(WEIGHT.astype(dtype))

    loss, gradient = cross_entropy(x, LABELS, return_grad=True, **options)

    expected = torch.nn.functional.cross_entropy(given, torch.tensor(LABELS), reduction="none", **theirs)
    expected.sum().backward()
    close(loss, expected.detach().numpy(), dtype, 4)
    close(gradient, given.grad.numpy(), dtype)


@every_dtype
def test_logsumexp_is_the_definition(dtype: str) -> None:
    x = 5 * normal(4, 3, 33, dtype=dtype_of(dtype))

    y = logsumexp(x)

    expected = np.log(np.exp(x.astype(np.float64)).sum(-1))
    assert y.dtype == (np.float64 if dtype == "float64" else np.float32)
    close(y, expected, str(y.dtype))
    assert np.allclose(np.exp(x.astype(np.float64) - logsumexp(x, keepdims=True)).sum(-1), 1, atol=1e-5)
    assert logsumexp(x, axis=(-2, -1), keepdims=True).shape == (4, 1, 1)
    close(logsumexp(x, (1, 2)), np.log(np.exp(expected).sum(-1)), str(y.dtype))


MASKS: dict[str, dict[str, Any]] = {
    "where": {"where": RANDOM.random((3, 5, 6)) > 0.5},
    "lengths": {"lengths": np.array([0, 6, 3, 1, 2])},
    "left_padded": {"lengths": [[2], [0], [6]], "left_padded": True},
    "causal": {"causal": True},
    "causal_offset": {"causal_offset": -2},
    "window": {"window": (1, 0), "scale": -0.5},
    "bias": {"bias": normal(6), "scale": 0.25},
}


@pytest.mark.parametrize("name", MASKS)
def test_logsumexp_under_a_mask_is_what_softmax_divides_by(name: str) -> None:
    x, options = normal(3, 5, 6), MASKS[name]
    z = x * options.get("scale", 1.0) + options.get("bias", 0.0)

    y = logsumexp(x, **options)

    kept = log_softmax(x, **options) != -np.inf
    with np.errstate(divide="ignore"):
        expected = np.log(np.where(kept, np.exp(z), 0).sum(-1))
    np.testing.assert_allclose(y, expected, rtol=1e-13, atol=1e-13)
    assert name not in {"lengths", "causal_offset"} or (y == -np.inf).any()
    spoiled = np.where(kept, x, np.nan)
    assert np.array_equal(logsumexp(spoiled, **options), y)


def test_special_values_of_logsumexp() -> None:
    inf, nan = np.inf, np.nan
    rows = [[-inf, -inf], [-inf, 2], [inf, 2], [inf, -inf], [nan, 2], [nan, inf], [1e308, 1e308], [-1e308, 0]]

    y = logsumexp(np.array(rows))

    np.testing.assert_array_equal(y, [-inf, 2, inf, inf, nan, nan, 1e308, 0])


def test_what_is_minus_infinity_does_not_count_unless_it_is_wanted() -> None:
    x = np.array([[-np.inf, 0.0, 0.0], [-np.inf, 0.0, 0.0], [-np.inf] * 3, [np.nan, 1, 2], [np.inf, 1, 2]])
    labels = np.array([1, 0, 1, 1, 1])

    loss, gradient = cross_entropy(x, labels, return_grad=True)
    smooth = cross_entropy(x[:1], labels[:1], label_smoothing=0.1)
    without = cross_entropy(x[:1], labels[:1], label_smoothing=0.1, weight=np.array([0.0, 1, 1]))

    np.testing.assert_allclose(loss, [np.log(2), np.inf, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(gradient[:2], [[0, -0.5, 0.5], [-1, 0.5, 0.5]])
    assert np.isnan(gradient[2:]).all()
    assert smooth == np.inf
    assert without == pytest.approx([(0.9 + 0.2 / 3) * np.log(2)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_ignored_row_is_zero_whatever_it_holds(bad: float) -> None:
    x = normal(5, 7)
    options: dict[str, Any] = {
        "ignore_index": -100,
        "z_loss": 1.0,
        "label_smoothing": 0.1,
        "return_grad": True,
    }
    loss, gradient = cross_entropy(x, IGNORED, **options)
    x[IGNORED < 0] = bad

    spoiled = cross_entropy(x, IGNORED, dloss=np.where(IGNORED < 0, np.nan, 1.0), **options)

    assert (loss[IGNORED < 0] == 0).all()
    assert (gradient[IGNORED < 0] == 0).all()
    assert np.array_equal(spoiled[0], loss)
    assert np.array_equal(spoiled[1], gradient)


def test_the_mean_counts_the_rows_that_are_not_ignored() -> None:
    x = normal(5, 7)
    counted = IGNORED >= 0

    loss, gradient = cross_entropy(x, IGNORED, ignore_index=-100, return_grad=True, dloss=1 / counted.sum())

    alone, slope = cross_entropy(x[counted], IGNORED[counted], return_grad=True)
    assert loss.sum() / counted.sum() == pytest.approx(alone.mean())
    np.testing.assert_allclose(gradient[counted], slope / 3, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("batches", [(1, 1, 3), (4, 1)])
def test_rows_do_not_depend_on_how_they_are_cut_into_batches(name: str, batches: tuple[int, ...]) -> None:
    x = normal(5, 7, dtype=np.float32)
    loss, gradient = cross_entropy(x, LABELS, return_grad=True, **OPTIONS[name])

    at = [*np.cumsum(batches)[:-1]]
    parts = [
        cross_entropy(part, labels, return_grad=True, **OPTIONS[name])
        for part, labels in zip(np.split(x, at), np.split(LABELS, at), strict=True)
    ]

    assert np.array_equal(np.concatenate([part[0] for part in parts]), loss)
    assert np.array_equal(np.concatenate([part[1] for part in parts]), gradient)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("block", [1, 3, 16])
def test_rows_longer_than_a_block(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(5, 7)
    loss, gradient = cross_entropy(x, LABELS, return_grad=True, **OPTIONS[name])
    monkeypatch.setattr(reference, "BLOCK", block)
    total = logsumexp(x)
    expected = np.log(np.exp(x).sum(-1))

    cross_entropy(x, LABELS, return_grad=True, grad=x, out=(again := np.empty(5)), **OPTIONS[name])

    np.testing.assert_allclose(again, loss, rtol=1e-13)
    np.testing.assert_allclose(x, gradient, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(total, expected, rtol=1e-13)


@pytest.mark.parametrize("weight", [None, np.float16(1), "each"])
def test_many_classes(weight: Any) -> None:
    classes = (1 << 20) + 3  # rows of many blocks, of which the label is in the last
    x = np.zeros((1, classes), np.float16)
    x[0, -1] = 1
    if weight == "each":
        weight = np.ones(classes, np.float16)
    options: dict[str, Any] = {"weight": weight, "label_smoothing": 0.5}
    labels = np.array([classes - 1], np.uint32)

    loss, gradient = cross_entropy(x, labels, return_grad=True, grad=np.empty(x.shape), **options)
    in_place = cross_entropy(x, labels, return_grad=True, grad=x, **options)[1]

    p = np.e / (classes - 1 + np.e)
    assert loss[0] == pytest.approx(-np.log(p) + 0.5 * (1 - 1 / classes), rel=1e-6)
    assert gradient[0, -1] == pytest.approx(p - 0.5 - 0.5 / classes)
    assert gradient[0, 7] == pytest.approx(p / np.e - 0.5 / classes)
    assert in_place is x
    assert np.array_equal(x, gradient.astype(np.float16))


@pytest.mark.parametrize(
    "integer", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_labels_of_every_integer(integer: str) -> None:
    x = normal(5, 7)

    loss = cross_entropy(x, LABELS.astype(integer), ignore_index=-100)
    ignoring = cross_entropy(x, LABELS.astype(integer), ignore_index=6)

    swapped = LABELS.astype(np.dtype(integer).newbyteorder())
    assert np.array_equal(loss, cross_entropy(x, LABELS))
    assert np.array_equal(loss, cross_entropy(x, swapped))
    assert np.array_equal(ignoring == 0, LABELS == 6)


def test_layouts_and_outputs() -> None:
    wide = normal(4, 5, 14)
    x, labels = wide[::-1, :, ::2], RANDOM.integers(0, 7, (5, 4)).T
    loss, gradient = cross_entropy(np.ascontiguousarray(x), np.ascontiguousarray(labels), return_grad=True)
    out, grad = np.empty((5, 4), np.float32).T, np.empty((4, 5, 7, 2), np.float16)[..., 0]

    found = cross_entropy(x, labels, return_grad=True, out=out, grad=grad)
    in_place = cross_entropy(x, labels, return_grad=True, grad=x)

    assert found[0] is out
    assert found[1] is grad
    assert np.array_equal(out, loss.astype(np.float32))
    assert_close(grad, gradient)
    assert in_place[1] is x
    assert np.array_equal(wide[::-1, :, ::2], gradient)
    assert cross_entropy(x[0, 0], labels[0, 0:1].reshape(()), axis=0).shape == ()
    assert cross_entropy(x, labels, dtype="float16").dtype == np.float16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_of_16_bits_are_rounded_once(dtype: str) -> None:
    kind = dtype_of(dtype)
    bits = 10 if dtype == "float16" else 7
    above_half = np.array([[1 + 2.0 ** -(bits + 1) + 2.0**-40]])  # in float32 it would be half way
    assert logsumexp(above_half, dtype=kind) == 1 + 2.0**-bits
    x, labels = normal(200, 3), np.zeros(200, int)

    results = logsumexp(x, dtype=kind), cross_entropy(x, labels, dtype=kind)

    for result, exact in zip(results, (logsumexp(x), cross_entropy(x, labels)), strict=True):
        assert np.array_equal(result, reference._round(exact, kind).astype(kind))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 4), (0, 1 << 33)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, labels = np.empty(shape, np.float32), np.empty(shape[:-1], int)

    loss, gradient = cross_entropy(x, labels, return_grad=True, label_smoothing=0.1)

    assert (loss.shape, gradient.shape) == (shape[:-1], shape)
    assert logsumexp(x, keepdims=True).shape == (*shape[:-1], 1)


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
Y = np.array([[0, 3, 1], [2, 2, 0]])
NO_ARRAY = "give a NumPy or a CuPy array"
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "logits": (lambda: cross_entropy([[1.0]], Y), TypeError, f"logits is a builtins.list: {NO_ARRAY}"),
    "logits' dtype": (
        lambda: cross_entropy(Y, Y[0]),
        TypeError,
        r'logits: dtype int64 is not supported.*logits.astype\("float64"\)',
    ),
    "no class": (lambda: cross_entropy(X[..., :0], Y), ValueError, r"logits has shape \(2, 3, 0\)"),
    "labels": (lambda: cross_entropy(X, [0]), TypeError, f"labels is a builtins.list: {NO_ARRAY}"),
    "labels' dtype": (lambda: cross_entropy(X, Y > 1), TypeError, "labels has dtype bool: use an integer"),
    "floating labels": (lambda: cross_entropy(X, Y + 0.5), TypeError, "labels has dtype float64: use an int"),
    "labels' shape": (
        lambda: cross_entropy(X, Y[:1]),
        ValueError,
        r"labels has shape \(1, 3\), logits without its last axis has \(2, 3\)",
    ),
    "too large": (
        lambda: cross_entropy(X[..., :3], Y),
        ValueError,
        r"labels holds 3 at \(0, 1\): logits has 3 classes, use 0 to 2$",
    ),
    "negative": (
        lambda: cross_entropy(X, Y - 1, ignore_index=-2),
        ValueError,
        r"labels holds -1 at \(0, 0\): .* use 0 to 3, or ignore_index, -2",
    ),
    "weight's shape": (
        lambda: cross_entropy(X, Y, weight=np.ones(3)),
        ValueError,
        r"weight has shape \(3,\), the classes of logits have \(4,\)",
    ),
    "weight": (lambda: cross_entropy(X, Y, weight="x"), TypeError, f"weight is a builtins.str: {NO_ARRAY}"),
    "weight's dtype": (lambda: cross_entropy(X, Y, weight=np.ones(4, int)), TypeError, "weight: dtype int64"),
    "ignore_index": (
        lambda: cross_entropy(X, Y, ignore_index=1.0),
        TypeError,
        "ignore_index is 1.0: give an i",
    ),
    "label_smoothing": (
        lambda: cross_entropy(X, Y, label_smoothing="a"),
        TypeError,
        "label_smoothing is 'a'",
    ),
    "much smoothing": (
        lambda: cross_entropy(X, Y, label_smoothing=1.5),
        ValueError,
        "label_smoothing is 1.5: it must be 0 to 1",
    ),
    "z_loss": (lambda: cross_entropy(X, Y, z_loss=-1.0), ValueError, "z_loss is -1.0: it must be 0 or a pos"),
    "return_grad": (lambda: cross_entropy(X, Y, return_grad=1), TypeError, "return_grad is 1: use True or F"),  # type: ignore[call-overload]
    "grad alone": (
        lambda: cross_entropy(X, Y, grad=X),  # type: ignore[call-overload]
        ValueError,
        "grad is given, and return_grad is False",
    ),
    "dloss alone": (
        lambda: cross_entropy(X, Y, dloss=2.0),  # type: ignore[call-overload]
        ValueError,
        "dloss is given, and return_grad is False",
    ),
    "grad's shape": (
        lambda: cross_entropy(X, Y, return_grad=True, grad=X[0]),
        ValueError,
        r"grad has shape \(3, 4\), logits has \(2, 3, 4\)",
    ),
    "grad in part": (
        lambda: cross_entropy(X[:1], Y[:1], return_grad=True, grad=X.reshape(-1)[4:16].reshape(1, 3, 4)),
        ValueError,
        "grad and logits share memory in part: give logits itself, or other memory",
    ),
    "grad and out": (
        lambda: cross_entropy(X, Y, return_grad=True, grad=(a := X.copy()), out=a[..., 0]),
        ValueError,
        "out and grad share memory",
    ),
    "out and logits": (
        lambda: cross_entropy(X, Y, out=X[..., 0]),
        ValueError,
        "out and logits share memory$",
    ),
    "out's shape": (
        lambda: cross_entropy(X, Y, out=X),
        ValueError,
        r"out has shape \(2, 3, 4\), the result has",
    ),
    "out's dtype": (
        lambda: cross_entropy(X, Y, out=np.empty((2, 3)), dtype="float32"),
        ValueError,
        "out has dtype float64, dtype asks for float32",
    ),
    "dtype": (lambda: cross_entropy(X, Y, dtype="int8"), TypeError, "dtype int8 is not supported"),
    "dloss' shape": (
        lambda: cross_entropy(X, Y, return_grad=True, dloss=np.ones(2)),
        ValueError,
        r"dloss has shape \(2,\), the loss has \(2, 3\)",
    ),
    "dloss": (
        lambda: cross_entropy(X, Y, return_grad=True, dloss="x"),
        TypeError,
        f"dloss is a builtins.str: {NO_ARRAY}",
    ),
    "dloss, nan": (
        lambda: cross_entropy(X, Y, return_grad=True, dloss=np.nan),
        ValueError,
        "dloss is nan: it must be finite",
    ),
    "axis": (lambda: cross_entropy(X, Y, axis=(1, 2)), ValueError, r"axis \(1, 2\) names 2 axes of logits"),  # type: ignore[call-overload]
    "all axes": (lambda: cross_entropy(X, Y, axis=None), ValueError, "axis None names 3 axes of logits"),  # type: ignore[call-overload]
    "labels of another axis": (
        lambda: cross_entropy(X, Y, axis=0),
        ValueError,
        r"labels has shape \(2, 3\), logits without its",
    ),
    "axis out of range": (lambda: cross_entropy(X, Y, axis=3), ValueError, "logits has 3 axes"),
    "x": (lambda: logsumexp(3.0), TypeError, f"x is a builtins.float: {NO_ARRAY}"),
    "keepdims": (lambda: logsumexp(X, keepdims=1), TypeError, "keepdims is 1: use True or False"),  # type: ignore[arg-type]
    "no column": (
        lambda: logsumexp(X[..., :0]),
        ValueError,
        r"x has shape \(2, 3, 0\): the reduced axes are",
    ),
    "where": (lambda: logsumexp(X, where=X), TypeError, "where has dtype float32"),
    "lengths": (lambda: logsumexp(X, lengths=[5, 0, 0]), ValueError, "lengths holds 5"),
    "masked axes": (lambda: logsumexp(X, (1, 2), causal=True), ValueError, "causal goes along one axis"),
    "out": (lambda: logsumexp(X, out=X[..., 0]), ValueError, "out and x share memory"),
    "kept axes": (lambda: logsumexp(X, keepdims=True, out=np.empty((2, 3))), ValueError, "out has shape"),
    "read-only": (
        lambda: logsumexp(X, out=np.broadcast_to(np.float32(0), (2, 3))),
        ValueError,
        "out is read-only",
    ),
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
    x, labels = to(X), to(Y)

    with pytest.raises(TypeError, match="x is a CuPy array .* and where is a NumPy array"):
        logsumexp(x, where=X > 0)
    with pytest.raises(TypeError, match="logits is a CuPy array .* and labels is a NumPy array"):
        cross_entropy(x, Y)
    with pytest.raises(ValueError, match=re.escape("labels has shape (1, 3)")):
        cross_entropy(x, labels[:1])
    np.testing.assert_allclose(
        simulated.cupy.asnumpy(cross_entropy(x[..., ::2], to(Y // 2))),
        cross_entropy(X[..., ::2], Y // 2),
        rtol=1e-6,
    )


def test_the_loss_of_a_softmax_is_its_logarithm() -> None:
    x = normal(5, 7)

    loss = cross_entropy(x, LABELS)

    np.testing.assert_allclose(np.exp(-loss), softmax(x)[np.arange(5), LABELS], rtol=1e-14)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_logits_whose_square_is_beyond_float64_have_a_loss(weight: Any) -> None:
    loss = cross_entropy(np.array([[1e200, 0.0]]), np.array([1]), label_smoothing=0.5, weight=weight)

    np.testing.assert_allclose(loss, 0.75e200)
