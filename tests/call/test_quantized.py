"""Quantised results: nearest values by enumeration, scales of rows and of all, saturation, and what is no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import Quantize, add_layer_norm, add_rms_norm, layer_norm, log_softmax, rms_norm, softmax
from cupynorm._dtypes import DTYPES, QUANTIZED, quantized_dtype
from cupynorm.host import reference
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

ml_dtypes = pytest.importorskip("ml_dtypes")

Array = np.ndarray[Any, Any]
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
every_dtype = pytest.mark.parametrize("name", QUANTIZED)


def ladder(name: str) -> tuple[Array, Array]:
    """Return all finite values of a dtype in their order, and whether the last bit of each is 0."""
    if name == "int8":
        return np.arange(-128.0, 128.0), np.arange(-128, 128) % 2 == 0
    bits = np.arange(256, dtype=np.uint8)
    values = bits.view(quantized_dtype(name)).astype(np.float64)
    known = {float(v): bool(b % 2 == 0) for v, b in zip(values, bits, strict=True) if np.isfinite(v)}
    ordered = sorted(known)
    return np.array(ordered), np.array([known[v] for v in ordered])


def nearest(values: Array, name: str) -> Array:
    """Round to the nearer of two neighbours on the ladder, ties to the even one; saturate at its ends."""
    rungs, even = ladder(name)
    clipped = np.clip(values, rungs[0], rungs[-1])
    above = np.clip(np.searchsorted(rungs, clipped), 1, len(rungs) - 1)
    low, high = rungs[above - 1], rungs[above]
    up = (high - clipped < clipped - low) | ((high - clipped == clipped - low) & even[above])
    return np.where(up, high, low)


def values_of(q: Array) -> Array:
    return q.astype(np.float64)


@every_dtype
def test_rounding_is_to_nearest_even_and_saturates(name: str) -> None:
    rungs, _ = ladder(name)
    middles = (rungs[1:] + rungs[:-1]) / 2
    near = np.concatenate([np.nextafter(middles, -np.inf), np.nextafter(middles, np.inf)])
    random = np.random.default_rng(1).standard_normal(2000) * 10.0 ** np.random.default_rng(2).uniform(
        -9, 6, 2000
    )
    values = np.concatenate([rungs, middles, near, random, [0.0, 1e300, -1e300, np.inf, -np.inf]])

    q = reference._nearest(values, quantized_dtype(name))

    assert q.dtype == quantized_dtype(name)
    np.testing.assert_array_equal(values_of(q), nearest(values, name))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_float8_is_pytorchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    rungs, _ = ladder(name)
    random = np.random.default_rng(3)
    values = np.concatenate([rungs, (rungs[1:] + rungs[:-1]) / 2, random.uniform(rungs[0], rungs[-1], 4000)])
    values = np.concatenate([values, random.standard_normal(4000)]).astype(np.float32)

    q = reference._nearest(values.astype(np.float64), quantized_dtype(name))

    expected = torch.from_numpy(values).to(getattr(torch, name)).to(torch.float64).numpy()
    np.testing.assert_array_equal(values_of(q), expected)


def test_an_int8_of_a_given_scale_is_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    x = 3 * np.random.default_rng(4).standard_normal((9, 64))
    expected = torch.round(torch.from_numpy(rms_norm(x)) * 64).clamp(-128, 127).to(torch.int8)

    q = rms_norm(x, quantize=Quantize("int8", 1 / 64))

    np.testing.assert_array_equal(q, expected.numpy())


@every_dtype
def test_nan_is_nan_in_a_float8_and_zero_in_int8(name: str) -> None:
    with np.errstate(all="raise"):
        q = values_of(softmax(np.array([[np.nan, 1.0]]), quantize=Quantize(name, 1.0)))

    assert q.tolist() == [[0, 0]] if name == "int8" else np.isnan(q).all()


CALLS: dict[str, Any] = {
    "layer_norm": lambda x, **options: layer_norm(
        x, np.linspace(-2, 2, x.shape[-1]), np.ones(x.shape[-1]), **options
    ),
    "rms_norm": lambda x, **options: rms_norm(x, np.linspace(-2, 2, x.shape[-1]), **options),
    "softmax": softmax,
    "masked softmax": lambda x, **options: softmax(x, causal=True, bias=np.ones(x.shape[-1]), **options),
    "add_layer_norm": lambda x, **options: add_layer_norm(
        x, x[::-1], alpha=-0.5, return_sum=False, **options
    ),
    "add_rms_norm": lambda x, **options: add_rms_norm(x, x[::-1], return_sum=False, **options),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
@every_dtype
@pytest.mark.parametrize("x_dtype", sorted(DTYPES))
def test_a_rows_scale_takes_its_largest_element_to_the_largest_number(
    call: Any, name: str, x_dtype: str
) -> None:
    x = np.random.default_rng(3).standard_normal((5, 13)).astype(DTYPES[x_dtype])
    y = call(x.astype(np.float64))  # the same to 1e-15: only what is stored differs

    q, scales = call(x, quantize=name)

    assert (q.dtype, q.shape, scales.shape) == (quantized_dtype(name), x.shape, (5,))
    assert scales.dtype == (np.float64 if x_dtype == "float64" else np.float32)
    np.testing.assert_allclose(scales, np.abs(y).max(axis=1) / LARGEST[name], rtol=1e-6)
    np.testing.assert_array_equal(values_of(q), nearest(y / scales.astype(np.float64)[:, None], name))
    assert np.abs(values_of(q)).max(axis=1).tolist() == [LARGEST[name]] * 5


@every_call
@every_dtype
def test_a_given_scale_is_for_all_and_what_is_too_large_saturates(call: Any, name: str) -> None:
    x = np.random.default_rng(4).standard_normal((6, 17)).astype(np.float32)
    y, scale = call(x.astype(np.float64)), 0.2 / LARGEST[name]

    q = call(x, quantize=Quantize(name, scale))

    np.testing.assert_array_equal(values_of(q), nearest(y / scale, name))
    assert np.abs(values_of(q)).max() >= LARGEST[name]


@every_call
@every_dtype
def test_rows_longer_than_a_block_are_quantised_alike(
    call: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(5).standard_normal((3, 50))
    whole, whole_scales = call(x, quantize=name)
    monkeypatch.setattr(reference, "BLOCK", 16)

    q, scales = call(x, quantize=name)

    np.testing.assert_allclose(scales, whole_scales, rtol=1e-13)
    assert (
        np.mean(values_of(q) == values_of(whole)) > 0.98
    )  # sums in another order may move one across a middle


def test_int8_reaches_its_least_number_by_a_given_scale_alone() -> None:
    x = np.array([[-3.0, 1.0, 2.0]])

    assert rms_norm(x, eps=0, quantize=Quantize("int8", 1e-9)).tolist() == [[-128, 127, 127]]
    assert rms_norm(x, eps=0, quantize="int8")[0].tolist() == [[-127, 42, 85]]


@every_dtype
def test_a_row_of_zeros_has_scale_zero(name: str) -> None:
    x = np.ones((2, 4))
    x[1] = [1, 2, 3, 4]

    q, scales = layer_norm(x, quantize=name)
    masked, none = softmax(x, causal_offset=-2, quantize=name)

    assert (values_of(q)[0].tolist(), scales[0]) == ([0] * 4, 0)
    assert scales[1] > 0
    assert (values_of(masked).tolist(), none.tolist()) == ([[0] * 4] * 2, [0, 0])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("size", [1e-300, 1e-305, 2e-307, 1e-310, 1e-318])
@every_dtype
def test_rows_of_tiny_doubles_keep_their_digits(
    simulated: Any, name: str, size: float, on_device: bool
) -> None:
    """Below 5.6e-309 a scale has no inverse among doubles."""
    x = np.random.default_rng(9).standard_normal((3, 400))
    gamma = np.full(400, size)
    expected = rms_norm(x, gamma)
    if on_device:
        module = simulated.cupy
        q, scales = (each.get() for each in rms_norm(*map(module.asarray, (x, gamma)), quantize=name))
        q = q.view(quantized_dtype(name))
    else:
        q, scales = rms_norm(x, gamma, quantize=name)

    largest = np.abs(expected).max(1)
    np.testing.assert_allclose(scales, largest / LARGEST[name], rtol=1e-12, atol=5e-324)
    # in steps: where a scale has few digits left, it may be off by half of the last one
    wanted = nearest(expected / scales[:, None], name)
    off = np.abs(values_of(q) - wanted) / np.maximum(1, np.abs(wanted))
    assert off.max() <= (0 if size > 1e-310 else 0.26)
    assert np.abs(values_of(q)).max() > 0.6 * LARGEST[name]


@every_dtype
def test_a_row_that_is_no_number_says_so_in_its_scale(name: str) -> None:
    x = np.ones((3, 4))
    x[0, 0] = np.nan
    gamma = np.array([1, 1, 1, np.inf])

    with np.errstate(all="raise"):
        _, by_nan = rms_norm(x, quantize=name)
        q, by_inf = rms_norm(x[1:], gamma, quantize=name)

    assert np.isnan(by_nan).tolist() == [True, False, False]
    assert by_inf.tolist() == [np.inf, np.inf]
    assert values_of(q)[:, :3].tolist() == [[0] * 3] * 2


def test_results_come_in_their_order() -> None:
    x = np.random.default_rng(6).standard_normal((2, 3, 4)).astype(np.float16)

    q, scales, mean, rstd = layer_norm(x, axis=(-2, -1), quantize="int8", return_stats=True)
    q2, scales2, total, rstd2 = add_rms_norm(x, x, quantize="float8_e5m2", return_stats=True)

    assert (q.dtype, scales.shape, mean.shape, rstd.shape) == (np.int8, (2,), (2,), (2,))
    assert (q2.dtype.name, scales2.shape, total.dtype, rstd2.shape) == (
        "float8_e5m2",
        (2, 3),
        np.float16,
        (2, 3),
    )
    np.testing.assert_array_equal(mean, layer_norm(x, axis=(-2, -1), return_stats=True)[1])
    np.testing.assert_array_equal(total, x + x)


def test_a_scale_may_be_an_array_of_one_element() -> None:
    x = np.random.default_rng(7).standard_normal((2, 8))
    expected = rms_norm(x, quantize=Quantize("int8", 0.25))

    for scale in (np.float32(0.25), np.array(0.25, np.float16), np.array([[0.25]])):
        np.testing.assert_array_equal(rms_norm(x, quantize=Quantize("int8", scale)), expected)


def test_dtypes_may_be_given_as_such() -> None:
    x = np.ones((1, 3), np.float32)

    for what in (np.int8, np.dtype("i1"), ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e5m2)):
        assert rms_norm(x, quantize=what)[0].dtype == np.dtype(what)
        assert Quantize(what) != Quantize(what, 1.0)


def test_out_is_written() -> None:
    x = np.ones((2, 6), np.float32)
    out = np.zeros((2, 12), np.int8)[:, ::2]

    q, scales = rms_norm(x, quantize="int8", out=out)

    assert q is out
    assert out.tolist() == [[127] * 6] * 2
    assert scales == pytest.approx(1 / 127, rel=1e-5)


def test_an_empty_batch_has_no_scales() -> None:
    q, scales = softmax(np.zeros((0, 3), np.float32), quantize="int8")

    assert (q.shape, q.dtype, scales.shape) == ((0, 3), np.int8, (0,))


X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize("op", [layer_norm, rms_norm, softmax])
class TestBadInput:
    @pytest.mark.parametrize(
        "what", ["uint8", "float16", np.int16, "bfloat16", "float8_e4m3", "e4m3", object]
    )
    def test_other_dtypes_are_named_with_those_allowed(self, op: Any, what: Any) -> None:
        with pytest.raises(TypeError, match="use int8, float8_e4m3fn, float8_e5m2"):
            op(X, quantize=what)

    @pytest.mark.parametrize("scale", [0, -1.0, np.nan, np.inf, np.array(0.0), np.array([np.nan])])
    def test_scales_out_of_range(self, op: Any, scale: Any) -> None:
        with pytest.raises(ValueError, match="scale is .*: it must be positive and finite"):
            op(X, quantize=Quantize("int8", scale))

    def test_scales_of_another_kind(self, op: Any) -> None:
        with pytest.raises(TypeError, match=r"scale is '1' \(a str\): give a number"):
            op(X, quantize=Quantize("int8", "1"))
        with pytest.raises(ValueError, match=r"scale has shape \(2,\): one for the whole result"):
            op(X, quantize=Quantize("int8", np.ones(2)))
        with pytest.raises(TypeError, match="scale: dtype int64 is not supported"):
            op(X, quantize=Quantize("int8", np.ones(1, int)))

    def test_two_dtypes(self, op: Any) -> None:
        with pytest.raises(ValueError, match="dtype='float16' and quantize name two dtypes"):
            op(X, quantize="int8", dtype="float16")

    @pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.float8_e5m2])
    def test_out_of_another_dtype(self, op: Any, dtype: Any) -> None:
        with pytest.raises(ValueError, match=f"out has dtype {np.dtype(dtype)}, quantize asks for int8"):
            op(X, quantize="int8", out=np.zeros((2, 4), dtype))

    def test_out_over_x_or_the_scale(self, op: Any) -> None:
        x = X.copy()
        with pytest.raises(ValueError, match="out and x share memory in part"):
            op(x, quantize="int8", out=x.view(np.int8)[:, ::4])
        out = np.ones((2, 4), np.int8)
        with pytest.raises(ValueError, match="out and quantize.scale share memory$"):
            op(X, quantize=Quantize("int8", np.frombuffer(out.data, np.float32)[:1]), out=out)

    def test_a_float8_is_no_input(self, op: Any) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        with pytest.raises(TypeError, match="x: dtype float8_e5m2 is not supported"):
            op(X.astype(ml_dtypes.float8_e5m2))

    def test_a_device_array_is_checked(self, op: Any, simulated: Any) -> None:
        x = simulated.cupy.asarray(X)
        with pytest.raises(TypeError, match="x is a CuPy array .* and quantize.scale is a NumPy array"):
            op(x, quantize=Quantize("int8", np.ones(1)))


def test_the_logarithm_of_softmax_is_not_quantised() -> None:
    with pytest.raises(TypeError, match="quantize"):
        log_softmax(X, quantize="int8")  # type: ignore[call-arg]
