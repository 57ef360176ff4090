"""Functions along any axis of device arrays, on the simulator, against float64 arithmetic of NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from tests import simulator
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

if TYPE_CHECKING:
    from collections.abc import Callable

DIGITS = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
SHAPE = (3, 10, 12)
RANDOM = np.random.default_rng(31)


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def drawn(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(dtype_of(dtype))


def is_float(each: Any) -> bool:
    return isinstance(each, np.ndarray) and each.dtype not in (np.bool_, np.int64)


def agrees(call: Callable[..., Any], *arrays: Any, dtype: str = "float32", **options: Any) -> None:
    """Compare a call of device arrays with that of the same numbers in float64."""

    def mapped(of: Callable[[Any], Any]) -> Any:
        return call(*map(of, arrays), **{name: of(each) for name, each in options.items()})

    def device(each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple(map(device, each)) if any(isinstance(one, np.ndarray) for one in each) else each
        return cupy.asarray(each) if isinstance(each, np.ndarray) else each

    def exact(each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple(map(exact, each))
        return each.astype(np.float64) if is_float(each) else each

    wanted, found = mapped(exact), mapped(device)
    wanted, found = (each if isinstance(each, tuple) else (each,) for each in (wanted, found))
    for right, got in zip(wanted, found, strict=True):
        assert (right is None) == (got is None)
        if right is not None:
            numbers = cupy.asnumpy(got).astype(np.float64)
            assert numbers.shape == right.shape
            np.testing.assert_allclose(numbers, right, rtol=DIGITS[dtype], atol=DIGITS[dtype])


def of_axes(axis: Any) -> tuple[int, ...]:
    """Return the extents of the normalised axes, in their order."""
    axes = range(3) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(SHAPE[each] for each in sorted(each % 3 for each in axes))


@pytest.mark.parametrize(("axis", "dtype"), [(0, "float16"), (1, "float64"), ((0, 2), "bfloat16")], ids=str)
def test_ops(axis: Any, dtype: str) -> None:
    x, shape = drawn(*SHAPE, dtype=dtype), of_axes(axis)
    g, b = drawn(*shape), drawn(*shape, dtype=dtype)

    agrees(cupynorm.softmax, x, axis=axis, dtype=dtype)
    agrees(cupynorm.layer_norm, x, g, b, axis=axis, return_stats=True, dtype=dtype)


@pytest.mark.parametrize("axis", [0, (1, 0), None], ids=str)
def test_results_with_one_number_a_row(axis: Any) -> None:
    x = drawn(*SHAPE)

    agrees(cupynorm.logsumexp, x, axis=axis, keepdims=True)
    agrees(cupynorm.logsumexp, x, axis=axis)


@pytest.mark.parametrize("axis", [0, 1, (0, 2)], ids=str)
def test_masks(axis: Any) -> None:
    x, where = drawn(*SHAPE), RANDOM.random(SHAPE) < 0.7
    where[0, 0] = where[:, 0, 0] = True

    agrees(cupynorm.log_softmax, x, axis=axis, where=where, bias=drawn(10, 1), scale=0.5)


@pytest.mark.parametrize("axis", [0, 1])
def test_masks_of_rows_by_their_length_and_place(axis: int) -> None:
    others = tuple(extent for at, extent in enumerate(SHAPE) if at != axis)
    lengths = RANDOM.integers(1, SHAPE[axis] + 1, others)

    agrees(cupynorm.softmax, drawn(*SHAPE), axis=axis, lengths=lengths)
    agrees(cupynorm.softmax, drawn(*SHAPE), axis=axis, causal=True)


def test_sums_and_dropout() -> None:
    x, r, g, b = drawn(*SHAPE), drawn(*SHAPE), drawn(10), drawn(10)

    agrees(cupynorm.add_layer_norm, x, r, g, b, axis=1, return_stats=True)
    agrees(cupynorm.add_rms_norm, x, r, g, axis=1, dropout=0.3, seed=3)


@pytest.mark.parametrize("axis", [0, (0, 1)], ids=str)
def test_gradients_of_norms(axis: Any) -> None:
    x, dy, g = drawn(*SHAPE), drawn(*SHAPE), drawn(*of_axes(axis))

    agrees(cupynorm.layer_norm_backward, dy, x, g, axis=axis)
    agrees(cupynorm.rms_norm_backward, dy, x, g, axis=axis, add_to=drawn(*of_axes(axis)))
    agrees(cupynorm.add_rms_norm_backward, dy, drawn(*SHAPE), x, g, axis=axis)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_softmax_and_its_bias(axis: int) -> None:
    dy, bias, where = drawn(*SHAPE), drawn(10, 1), RANDOM.random(SHAPE) < 0.8
    y = cupynorm.softmax(drawn(*SHAPE), axis=axis, where=where, bias=bias)
    y = np.where(np.isnan(y), 0, y)

    agrees(cupynorm.softmax_backward, dy, y, axis=axis, where=where)
    agrees(cupynorm.softmax_backward, dy, y, axis=axis, bias=bias, where=where, return_dbias=True)
    agrees(
        cupynorm.softmax_backward,
        dy,
        y,
        axis=axis,
        bias=bias,
        return_dbias=True,
        add_to=drawn(10, 1),
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_a_loss_whose_gradient_takes_the_place_of_the_logits(axis: int) -> None:
    x = drawn(*SHAPE)
    labels = RANDOM.integers(0, SHAPE[axis], tuple(each for at, each in enumerate(SHAPE) if at != axis))

    def in_place(logits: Any, classes: Any) -> Any:
        loss, gradient = cupynorm.cross_entropy(logits, classes, axis=axis, return_grad=True, grad=logits)
        assert gradient is logits
        return loss, gradient

    agrees(in_place, x, labels)


@pytest.mark.parametrize("axis", [0, (0, 2)], ids=str)
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_quantised_results(axis: Any, kind: str) -> None:
    x = drawn(*SHAPE)

    y, scales = cupynorm.layer_norm(cupy.asarray(x), axis=axis, quantize=kind)

    exact, wanted = cupynorm.layer_norm(x, axis=axis), cupynorm.layer_norm(x, axis=axis, quantize=kind)[1]
    found, each = cupy.asnumpy(y), cupy.asnumpy(scales)
    np.testing.assert_allclose(each, wanted, rtol=1e-5)
    if kind != "int8":
        found = found.view(ml_dtypes.float8_e4m3fn)
    axes = tuple(at % 3 for at in (axis if isinstance(axis, tuple) else (axis,)))
    wide = np.expand_dims(each.astype(np.float64), axes)
    step = 0.5 * wide if kind == "int8" else 2.0**-4 * np.abs(exact) + 2.0**-10 * wide
    assert (np.abs(found.astype(np.float64) * wide - exact) <= step * 1.001 + 1e-5).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_fusions_and_their_gradients(axis: int) -> None:
    fusion = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * t, store=lambda y, s: y + s)
    x, t, s = drawn(*SHAPE), drawn(10, 1), drawn(12)

    def backward(*given: Any) -> Any:
        found = fusion.backward(*given, axis=axis)
        return found.x, *found.operands

    agrees(fusion, x, t, s, axis=axis)
    agrees(backward, drawn(*SHAPE), x, t, s)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "Fortran": lambda a: a.T,
    "exchanged": lambda a: a.transpose(1, 0, 2),
    "turned": lambda a: a.transpose(2, 0, 1),
    "steps": lambda a: a[:, :, ::3],
    "backwards": lambda a: a[::-1, :, ::-1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_x_and_out_may_lie_anywhere(name: str) -> None:
    x, of = drawn(4, 6, 8), VIEWS[name]
    for axis in (-1, 1, (0, 2)):
        wanted = cupynorm.softmax(of(x).astype(np.float64), axis=axis)
        memory = cupy.asarray(drawn(4, 6, 8))
        out = of(memory)
        for found in (
            cupynorm.softmax(of(cupy.asarray(x)), axis=axis),
            cupynorm.softmax(of(cupy.asarray(x)), axis=axis, out=out),
        ):
            np.testing.assert_allclose(cupy.asnumpy(found), wanted, rtol=1e-5, atol=1e-6)
        assert found is out


@pytest.mark.parametrize("axis", [0, (0, 2)], ids=str)
def test_what_does_not_count(axis: Any) -> None:
    x, where = drawn(*SHAPE), RANDOM.random(SHAPE) < 0.7
    where[0, 0] = where[:, 0, 0] = True
    g, b, factor = drawn(*of_axes(axis)), drawn(*of_axes(axis)), drawn(10, 1)

    agrees(cupynorm.layer_norm, x, g, b, axis=axis, where=where, return_stats=True)
    agrees(cupynorm.rms_norm, x, g, axis=axis, where=where)
    agrees(cupynorm.logsumexp, x, axis=axis, b=factor, return_sign=True)
    agrees(cupynorm.sigma_clip, x, sigma=1.3, iterations=2, axis=axis, where=where, return_bounds=True)
    x[1, 3, 4] = np.nan
    for call in (cupynorm.softmax, cupynorm.log_softmax, cupynorm.logsumexp, cupynorm.rms_norm):
        agrees(call, x, axis=axis, nan="omit")


@pytest.mark.parametrize(
    "call", [cupynorm.softmax, cupynorm.log_softmax, cupynorm.rms_norm, cupynorm.standardize]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_missing_halves_are_left_out(call: Any, dtype: str) -> None:
    # 16 bits wait two in a register, and are summed a part at a time; a row of nan alone stays nan
    x = RANDOM.standard_normal((2, 64, 64)).astype(dtype_of(dtype))
    x[RANDOM.random(x.shape) < 0.3] = np.nan
    x[1, :, 7] = np.nan
    agrees(call, x, axis=1, nan="omit", dtype=dtype)


@pytest.mark.parametrize("axis", [0, (0, 2)], ids=str)
@pytest.mark.parametrize("how", ["plain", "omit", "weights"])
def test_statistics(axis: Any, how: str) -> None:
    x = drawn(*SHAPE)
    options: dict[str, Any] = {"weights": RANDOM.random((10, 1))} if how == "weights" else {}
    if how == "omit":
        x[0, 0, 0] = np.nan
        options["nan"] = "omit"

    agrees(cupynorm.standardize, x, axis=axis, return_stats=True, **options)
    agrees(cupynorm.normalize, x, axis=axis, return_norms=True, **options)
    agrees(cupynorm.moments, x, axis=axis, order=4, **options)
    if how != "weights":
        agrees(cupynorm.rescale, x, axis=axis, return_range=True, **options)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32"])
def test_integers(dtype: str) -> None:
    x = RANDOM.integers(0, 2 if dtype == "bool" else 100, SHAPE).astype(dtype)
    for axis in (0, (2, 0)):
        for call in (cupynorm.softmax, cupynorm.layer_norm, cupynorm.standardize):
            wanted = call(x.astype(np.float64), axis=axis)
            np.testing.assert_allclose(
                cupy.asnumpy(call(cupy.asarray(x), axis=axis)), wanted, rtol=2e-5, atol=2e-5
            )
