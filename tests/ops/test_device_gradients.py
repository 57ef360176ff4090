"""Gradients of device arrays, on the simulator, beside those of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import functions, fuse, layer_norm, log_softmax, rms_norm, softmax
from cupynorm._dtypes import dtype_of
from tests import SLOW, simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


def assert_near(ours: Any, reference: Any, dtype: str, rows: int = 1) -> None:
    """Compare a device array, or None, with the host's."""
    assert (ours is None) == (reference is None)
    if ours is None:
        return
    assert ours.dtype == reference.dtype
    found, expected = (np.asarray(each, np.float64) for each in (ours.get(), reference))
    scale = float(np.sqrt(rows))
    np.testing.assert_allclose(found, expected, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale)


ACTIVATIONS = {
    "bias_gelu_backward": {},
    "bias_gelu_backward, tanh": {"approximate": "tanh"},
    "bias_silu_backward": {},
    "geglu_backward": {},
    "geglu_backward, second": {"gate": "second", "approximate": "tanh"},
    "swiglu_backward": {"gate": "second"},
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: str) -> None:
    function = getattr(cupynorm, name.partition(",")[0])
    gated = "glu" in name.partition(",")[0].replace("gelu", "")
    rows, cols = (40, 24) if dtype in {"float16", "float64"} else (37, 23)
    width = 2 * cols if gated else cols
    host = normal((rows, cols), dtype), 2 * normal((rows, width), dtype, 1), normal((width,), dtype, 2)
    # with a bias or without: each function and each dtype both ways, and all three with CUPYNORM_SLOW=1
    without = ([*ACTIVATIONS].index(name) + (dtype == "float32")) % 2
    for bias in (host[2], None) if SLOW else (None if without else host[2],):
        given = [None if each is None else cupy.asarray(each) for each in (*host[:2], bias)]

        dx, dbias = function(*given, **ACTIVATIONS[name])

        expected = function(*host[:2], bias, **ACTIVATIONS[name])
        assert_near(dx, expected[0], dtype)
        assert_near(dbias, expected[1], dtype, rows)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["bias_gelu_backward", "geglu_backward, second"])
def test_activations_of_rows_that_begin_anywhere(name: str, dtype: str) -> None:
    """Whole warps of vectors, part of one, and columns that are in none."""
    function = getattr(cupynorm, name.partition(",")[0])
    for cols in (501, 263, 258):
        width = 2 * cols if name.startswith("geglu") else cols
        host = normal((75, cols), dtype), 2 * normal((75, width), dtype, 1), normal((width,), dtype, 2)

        dx, dbias = function(*map(cupy.asarray, host), **ACTIVATIONS[name])

        expected = function(*host, **ACTIVATIONS[name])
        assert_near(dx, expected[0], dtype)
        assert_near(dbias, expected[1], dtype, 75)


def test_a_bias_that_is_broadcast_gets_the_sum_over_that_too() -> None:
    dy, x = normal((3, 5, 18), "float32"), normal((3, 5, 18), "float32", 1)
    for bias in (normal((1,), "float32"), normal((1, 1, 18), "float32"), np.float32(0.5)):
        on_device = cupy.asarray(bias) if isinstance(bias, np.ndarray) else bias

        dx, dbias = cupynorm.bias_gelu_backward(cupy.asarray(dy), cupy.asarray(x), on_device)

        expected = cupynorm.bias_gelu_backward(dy, x, bias)
        assert_near(dx, expected[0], "float32")
        assert_near(dbias, expected[1], "float32", 15)
        assert dbias.shape == expected[1].shape


def test_in_place_added_to_and_again() -> None:
    host = [normal((70, 16), "float16", seed) for seed in range(2)]
    bias = normal((8,), "float16", 3)
    given = [cupy.asarray(each) for each in (host[0][:, :8].copy(), host[1], bias)]
    total = normal((8,), "float32", 4)
    sums = cupy.asarray(total)
    wanted = cupynorm.bias_silu_backward(host[0][:, :8], host[1][:, 8:], bias)
    for turn in (1, 2, 3):
        x = cupy.asarray(host[1][:, 8:].copy())

        dx, dbias = cupynorm.bias_silu_backward(given[0], x, given[2], out=x, add_to=sums)

        assert dx is x
        assert dbias is sums
        assert_near(dx, wanted[0], "float16")
        np.testing.assert_allclose(sums.get(), total + turn * wanted[1], rtol=1e-2, atol=1e-2)


def test_no_rows_have_a_gradient_of_zero() -> None:
    dx, dbias = cupynorm.bias_gelu_backward(
        *(cupy.empty((0, 6), np.float32),) * 2, cupy.asarray(normal((6,), "float32"))
    )

    assert dx.shape == (0, 6)
    np.testing.assert_array_equal(dbias.get(), 0)


@pytest.mark.parametrize(("classes", "dtype"), [(10, "float16"), (77, "float32"), (2000, "float64")])
def test_cross_entropy(classes: int, dtype: str) -> None:
    rows = 6
    logits = 3 * normal((rows, classes), dtype)
    labels = np.random.default_rng(5).integers(0, classes, rows).astype(np.int32)
    labels[2] = -100
    logits[2, 1] = np.nan  # which is ignored
    logits[3, (labels[3] + 1) % classes] = -np.inf
    weight = np.abs(normal((classes,), dtype, 6)) + dtype_of(dtype).type(0.5)
    dloss = normal((rows,), "float32", 7)
    for options in (
        {},
        {"label_smoothing": 0.0, "z_loss": 1e-2, "weight": weight, "dloss": dloss},
        {"dloss": 0.25, "weight": weight},
    ):
        host = {"ignore_index": -100, "return_grad": True, **options}
        expected = cupynorm.cross_entropy(logits, labels, **host)
        on_device = {
            name: cupy.asarray(each) if isinstance(each, np.ndarray) else each for name, each in host.items()
        }
        for _ in range(2):
            given = cupy.asarray(logits)

            found = cupynorm.cross_entropy(given, cupy.asarray(labels), **on_device, grad=given)

            assert found[1] is given
            for ours, wanted in zip(found, expected, strict=True):
                assert_near(ours, wanted, dtype)
        on_device = {name: each for name, each in on_device.items() if name not in {"return_grad", "dloss"}}
        alone = cupynorm.cross_entropy(cupy.asarray(logits), cupy.asarray(labels), **on_device)
        assert_near(alone, expected[0], dtype)


def test_cross_entropy_with_smoothing_and_a_label_out_of_range() -> None:
    logits, labels = normal((4, 50), "float32"), np.array([3, 49, 0, 7])
    expected = cupynorm.cross_entropy(logits, labels, label_smoothing=0.1, return_grad=True)
    wrong = labels.copy()
    wrong[2] = 50
    out = cupy.empty((4,), np.float16)

    loss, grad = cupynorm.cross_entropy(
        cupy.asarray(logits), cupy.asarray(wrong), label_smoothing=0.1, return_grad=True, out=out
    )

    assert loss is out
    assert np.isnan(loss.get()[2])
    assert np.isnan(grad.get()[2]).all()
    one = cupynorm.cross_entropy(cupy.asarray(logits[0]), cupy.asarray(labels[:1].reshape(())))
    np.testing.assert_allclose(
        one.get(), cupynorm.cross_entropy(logits[0], labels[:1].reshape(())), rtol=1e-6
    )
    right = [0, 1, 3]
    np.testing.assert_allclose(loss.get()[right], expected[0][right], rtol=1e-3)
    np.testing.assert_allclose(grad.get()[right], expected[1][right], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.1, 1])
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "integer"),
    [
        ((6, 77), -1, "float16", "uint8"),
        ((6, 2000), -1, "bfloat16", "int16"),
        ((3, 130, 4), 1, "float32", "int64"),
        ((30, 8), 0, "float64", "int32"),
    ],
)
def test_cross_entropy_of_smooth_labels(
    shape: tuple[int, ...], axis: int, dtype: str, integer: str, smoothing: float
) -> None:
    logits, classes = 3 * normal(shape, dtype), shape[axis]
    others = np.delete(shape, axis)
    labels = np.random.default_rng(5).integers(0, min(classes, 127), others).astype(integer)
    ignored = int(labels.flat[1])
    dloss = normal(tuple(others), "float32", 7)
    weight = np.abs(normal((classes,), dtype, 6)) + dtype_of(dtype).type(0.5)
    for options in (
        {},
        {"z_loss": 1e-2, "dloss": dloss},
        {"ignore_index": ignored, "dloss": 0.25},
        {"weight": weight, "ignore_index": ignored, "z_loss": 1e-3},
    ):
        host = {"axis": axis, "label_smoothing": smoothing, **options}
        expected = cupynorm.cross_entropy(logits, labels, return_grad=True, **host)
        on_device = {
            name: cupy.asarray(each) if isinstance(each, np.ndarray) else each for name, each in host.items()
        }
        given = cupy.asarray(logits)
        on_device["return_grad"] = True

        found = cupynorm.cross_entropy(given, cupy.asarray(labels), **on_device, grad=given)

        assert found[1] is given
        for ours, wanted in zip(found, expected, strict=True):
            assert_near(ours, wanted, dtype)
        on_device = {name: each for name, each in on_device.items() if name not in {"return_grad", "dloss"}}
        alone = cupynorm.cross_entropy(cupy.asarray(logits), cupy.asarray(labels), **on_device)
        assert_near(alone, expected[0], dtype)


def test_a_loss_of_smooth_labels_keeps_its_digits_where_logits_are_large() -> None:
    logits, labels = np.float32(1000) + normal((4, 3000), "float32"), np.array([3, 49, 0, 2999])

    loss = cupynorm.cross_entropy(cupy.asarray(logits), cupy.asarray(labels), label_smoothing=0.5)

    exact = cupynorm.cross_entropy(logits.astype(np.float64), labels, label_smoothing=0.5)
    np.testing.assert_allclose(loss.get(), exact, rtol=2e-6)


def test_smoothing_takes_one_launch() -> None:
    given, labels = cupy.asarray(normal((4, 50), "float32")), cupy.asarray(np.array([3, 49, 0, 7]))
    for weight in (None, cupy.asarray(normal((50,), "float32"))):
        loss, grad = cupy.empty(4, np.float32), cupy.empty((4, 50), np.float32)
        options = {"weight": weight, "label_smoothing": 0.1, "return_grad": True, "grad": grad, "out": loss}
        cupynorm.cross_entropy(given, labels, **options)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()

            cupynorm.cross_entropy(given, labels, **options)

            assert len(stream.end_capture().launches) == 1


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_logsumexp(dtype: str) -> None:
    x = normal((2, 5, 70), dtype)
    x[0, 1] = -np.inf
    kept = np.random.default_rng(8).random(x.shape) < 0.7
    kept[1, 2] = False
    for options in (
        {},
        {"where": kept},
        {"scale": 0.5, "causal": True},
        {"lengths": [[3], [70]]},
        {"keepdims": True},
    ):
        on_device = {
            name: cupy.asarray(each) if isinstance(each, np.ndarray) else each
            for name, each in options.items()
        }
        for _ in range(2):
            ours = cupynorm.logsumexp(cupy.asarray(x), **on_device)

            assert_near(ours, cupynorm.logsumexp(x, **options), dtype)
    out = cupy.empty((5, 2), np.float16).T
    assert cupynorm.logsumexp(cupy.asarray(x), out=out) is out
    np.testing.assert_allclose(out.get(), cupynorm.logsumexp(x), rtol=2e-3)


def both(function: Any, arrays: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Call a function twice with device arrays, which are new each time, and once with NumPy arrays."""
    found = None
    for _ in range(2):
        on_device = {
            name: cupy.asarray(each) if isinstance(each, np.ndarray) else each
            for name, each in arrays.items()
        }
        found = function(**on_device, **options)
    return found, function(**arrays, **options)


def assert_all_near(found: tuple[Any, Any], dtype: str, rows: int) -> None:
    ours, expected = (each if isinstance(each, tuple) else (each,) for each in found)
    assert len(ours) == len(expected)
    for one, wanted in zip(ours, expected, strict=True):
        assert_near(one, wanted, dtype, 4 * rows)


def statistics_of(x: Any, axes: tuple[int, ...] = (-1,)) -> tuple[Any, Any]:
    compute = np.float64 if x.dtype == np.float64 else np.float32
    wide = x.astype(np.float64)
    return wide.mean(axes).astype(compute), (1 / np.sqrt(wide.var(axes) + 1e-5)).astype(compute)


@pytest.mark.parametrize(
    ("cols", "dtype"), [(64, "float16"), (77, "float32"), (77, "bfloat16"), (3000, "float64")]
)
def test_norms(cols: int, dtype: str) -> None:
    dy, x = normal((6, cols), dtype), normal((6, cols), dtype, 1)
    gamma, beta = normal((cols,), dtype, 2) + dtype_of(dtype).type(3), normal((cols,), dtype, 3)
    mean, rstd = statistics_of(x)
    rms = (1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-6)).astype(rstd.dtype)
    near = {"dtype": dtype, "rows": 6}

    given = {"dy": dy, "x": x, "gamma": gamma}
    assert_all_near(both(cupynorm.layer_norm_backward, {**given, "mean": mean, "rstd": rstd}), **near)
    assert_all_near(both(cupynorm.layer_norm_backward, given), **near)
    assert_all_near(both(cupynorm.layer_norm_backward, {"dy": dy, "x": x}, parameters=False), **near)
    assert_all_near(both(cupynorm.rms_norm_backward, {**given, "rstd": rms}), **near)
    assert_all_near(both(cupynorm.rms_norm_backward, given), **near)
    of_y = {"dy": dy, "y": x, "gamma": gamma, "rstd": rstd}
    assert_all_near(both(cupynorm.layer_norm_backward_from_y, {**of_y, "beta": beta}), **near)
    assert_all_near(both(cupynorm.rms_norm_backward_from_y, of_y), **near)


def test_a_norm_over_several_axes_with_a_gamma_that_is_broadcast() -> None:
    dy, x = normal((3, 4, 5, 6), "float32"), normal((3, 4, 5, 6), "float32", 1)
    for gamma in (normal((6,), "float32", 2), normal((5, 1), "float32", 2), normal((1,), "float16", 2), 1.5):
        found = both(cupynorm.layer_norm_backward, {"dy": dy, "x": x, "gamma": gamma}, axis=(-2, -1))
        assert_all_near(found, "float32" if isinstance(gamma, float) else str(gamma.dtype), 60)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["add_layer_norm_backward", "add_rms_norm_backward"])
def test_norms_of_sums(name: str, dtype: str) -> None:
    dy, ds, s = (normal((7, 120), dtype, seed) for seed in range(3))
    gamma, bias = normal((120,), dtype, 3), normal((120,), dtype, 4)
    function = getattr(cupynorm, name)
    given = {"dy": dy, "ds": ds, "s": s, "gamma": gamma}
    for arrays, options in (
        (given, {}),
        ({**given, "bias": bias}, {"alpha": 0.5}),
        ({**given, "ds": None, "bias": bias}, {"dropout": 0.3, "seed": 5, "offset": 8}),
    ):
        assert_all_near(both(function, arrays, **options), dtype, 7)
    for seed in (1, 2):  # of a call that is launched again
        drop = {"dropout": 0.5, "seed": seed}
        assert_all_near(both(function, given, **drop), dtype, 7)


@pytest.mark.parametrize(("log", "dtype"), [(False, "float16"), (False, "float64"), (True, "float32")])
def test_softmax(log: bool, dtype: str) -> None:
    function = cupynorm.log_softmax_backward if log else cupynorm.softmax_backward
    forward = cupynorm.log_softmax if log else cupynorm.softmax
    dy, x = normal((2, 9, 50), dtype), normal((2, 9, 50), dtype, 1)
    kept = np.random.default_rng(2).random(x.shape) < 0.7
    kept[1, 2] = False
    bias = normal((9, 50), dtype, 3)
    masks: list[dict[str, Any]] = [
        {},
        {"scale": 0.25},
        {"where": kept},
        {"causal": True},
        {"window": (3, 1), "scale": 2.0},
        {"lengths": np.array([[7], [50]], np.int32)},
    ]
    for mask in masks:
        y = forward(x, **mask)
        slope = np.where(kept, dy, dtype_of(dtype).type(np.nan)) if "where" in mask else dy
        arrays = {name: each for name, each in mask.items() if isinstance(each, np.ndarray)}
        options = {name: each for name, each in mask.items() if name not in arrays}
        assert_all_near(both(function, {"dy": slope, "y": y, **arrays}, **options), dtype, 1)
    y = forward(x, scale=0.5, bias=bias)
    found = both(function, {"dy": dy, "y": y, "bias": bias}, scale=0.5, return_dbias=True)
    assert_all_near(found, dtype, 2)
    if not log:
        assert_all_near(both(function, {"dy": dy, "y": y}, dropout=0.4, seed=3), dtype, 1)


def test_gradients_of_no_rows() -> None:
    empty, gamma = cupy.empty((0, 8), np.float32), cupy.asarray(normal((8,), "float32"))

    dx, dgamma, dbeta = cupynorm.layer_norm_backward(empty, empty, gamma)

    assert dx.shape == (0, 8)
    np.testing.assert_array_equal(dgamma.get(), 0)
    np.testing.assert_array_equal(dbeta.get(), 0)
    assert cupynorm.softmax_backward(empty, empty).shape == (0, 8)
    assert cupynorm.logsumexp(empty).shape == (0,)


def test_in_place_of_what_is_read() -> None:
    dy, x, gamma = (normal(shape, "float16", 1) for shape in ((5, 96), (5, 96), (96,)))
    expected = cupynorm.layer_norm_backward(dy, x, gamma)
    for place in ("dy", "x"):
        given = {"dy": cupy.asarray(dy), "x": cupy.asarray(x), "gamma": cupy.asarray(gamma)}

        found = cupynorm.layer_norm_backward(**given, out=given[place])

        assert found[0] is given[place]
        assert_all_near((found, expected), "float16", 5)


SCALED = fuse(
    layer_norm, load=lambda x, r, t: functions.silu(x * 0.5 + r) * t, store=lambda y, g: functions.gelu(y) * g
)
PAIRED = fuse(
    softmax,
    load=lambda x, m: np.where(m > 0, x, -np.inf),
    store=lambda y, c: (y * c, y + c),
    keep_loaded=True,
)
PLAIN = fuse(rms_norm, store=lambda y, b: functions.tanh(y + b))
LOGS = fuse(log_softmax, load=lambda x, s: x * s)


def test_fusions() -> None:
    shape = (4, 6, 40)
    x, dy, g = (normal(shape, "float32", seed) for seed in range(3))
    gamma, beta = normal((40,), "float32", 3), normal((40,), "float32", 4)
    row, column = normal((4, 6, 1), "float32", 5), normal((40,), "float32", 6)
    kept = normal(shape, "float32", 7) + np.float32(1)
    cases: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
        (SCALED, dy, (x, column, row, g), {"gamma": gamma, "beta": beta}),
        (SCALED, dy, (x, g, 2.0, row), {"gamma": gamma}),
        (PAIRED, (dy, None, None), (x, kept, column), {}),
        (PAIRED, (dy, g, None), (x, kept, row), {}),
        (PLAIN, dy, (x, column), {"gamma": gamma}),
        (LOGS, dy, (x, row), {}),
        (LOGS, dy, (x, normal((1,), "float32", 8)), {"axis": (1, 2)}),
    ]

    def moved(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(moved, given))
        return cupy.asarray(given) if isinstance(given, np.ndarray) else given

    for fusion, arriving, arrays, options in cases:
        expected = fusion.backward(arriving, *arrays, **options)
        for _ in range(2):
            on_device = {name: moved(each) for name, each in options.items()}

            found = fusion.backward(moved(arriving), *moved(arrays), **on_device)

            assert_near(found.x, expected.x, "float32", 4)
            for ours, wanted in zip(
                (*found.operands, found.gamma, found.beta),
                (*expected.operands, expected.gamma, expected.beta),
                strict=True,
            ):
                assert_near(ours, wanted, "float32", 200)


def test_a_fusion_adds_to_what_is_there_in_place_of_x() -> None:
    x, dy, g = (normal((5, 24), "float32", seed) for seed in range(3))
    before = normal((24,), "float32", 3), normal((5, 24), "float32", 4)
    gates = fuse(rms_norm, load=lambda x, b: x + b, store=lambda y, g: y * g)
    bias = normal((24,), "float32", 5)
    expected = gates.backward(dy, x, bias, g)
    place, sums = cupy.asarray(x), [cupy.asarray(each) for each in before]

    found = gates.backward(
        cupy.asarray(dy),
        place,
        cupy.asarray(bias),
        cupy.asarray(g),
        out=place,
        add_to={"b": sums[0], "g": sums[1]},
    )

    assert found.x is place
    assert_near(found.x, expected.x, "float32", 4)
    for ours, there, wanted, start in zip(found.operands, sums, expected.operands, before, strict=True):
        assert ours is there
        assert_near(ours, start + wanted, "float32", 20)
    empty = cupy.empty((0, 24), np.float32)
    assert not gates.backward(empty, empty, cupy.asarray(bias), empty).operands[0].get().any()


@pytest.mark.parametrize("name", ["geglu_backward", "swiglu_backward"])
def test_a_gate_that_closes_keeps_products_finite_that_would_overflow_without_it(name: str) -> None:
    dy, x = np.full((1, 3), 1e30, np.float32), np.array([[-60, -25, -200, 1e30, 1e15, 1e30]], np.float32)
    function = getattr(cupynorm, name)

    ours, _ = function(cupy.asarray(dy), cupy.asarray(x))

    expected, _ = function(dy.astype(np.float64), x.astype(np.float64))
    assert np.isfinite(ours.get()).all()
    np.testing.assert_allclose(ours.get()[0, :2], expected[0, :2].astype(np.float32), rtol=1e-4)


def test_a_row_of_nan_has_nan_as_its_loss_also_where_the_label_has_no_weight() -> None:
    logits = normal((3, 40), "float32")
    logits[1] = np.nan
    labels, weight = np.array([1, 0, -1]), np.ones(40, np.float32)
    weight[0] = 0

    loss = cupynorm.cross_entropy(
        *map(cupy.asarray, (logits, labels)), weight=cupy.asarray(weight), ignore_index=-1
    )

    np.testing.assert_allclose(
        loss.get(), cupynorm.cross_entropy(logits, labels, weight=weight, ignore_index=-1), rtol=1e-5
    )
    assert np.isnan(loss.get()).tolist() == [False, True, False]
