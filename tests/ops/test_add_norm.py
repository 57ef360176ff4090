"""Norms of sums, activations, gates and dropout on the host, against formulas, SciPy, PyTorch and published answers."""

from __future__ import annotations

import functools
import itertools
import math
import tracemalloc
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupynorm import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    bias_silu,
    dropout,
    geglu,
    layer_norm,
    rms_norm,
    swiglu,
)
from cupynorm._dtypes import DTYPES
from cupynorm.host import philox, reference
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

Array = np.ndarray[Any, Any]
every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def word(seed: int, offset: int, i: int) -> int:
    """Return the word of element i, with Python's integers: the second and slow way to Philox4x32-10."""
    block = (offset + i // 4) % 2**64
    c = [block % 2**32, block // 2**32, 0, 0]
    k = [seed % 2**32, seed // 2**32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b // 2**32 ^ c[1] ^ k[0], b % 2**32, a // 2**32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[i % 4]


def kept(shape: tuple[int, ...], p: float, seed: int, offset: int) -> Array:
    bound = math.floor(Fraction(p) * 2**32)
    flat = [word(seed, offset, i) >= bound for i in range(math.prod(shape))]
    return np.array(flat, bool).reshape(shape)


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "answer"),  # kat_vectors of Random123, the authors' library
        [
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_the_published_answers(self, counter: list[int], key: list[int], answer: list[int]) -> None:
        words = philox.philox(np.array(counter, np.uint64), (key[0], key[1]))

        assert (words.dtype, words.tolist()) == (np.uint32, answer)

    @pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
    @pytest.mark.parametrize("offset", [0, 3, 2**32 - 2, 2**64 - 2])
    @pytest.mark.parametrize(("start", "count"), [(0, 9), (1, 4), (7, 1), (2**34 - 3, 6), (4, 0)])
    def test_an_element_has_its_word_wherever_one_begins(
        self, seed: int, offset: int, start: int, count: int
    ) -> None:
        words = philox.words(seed, offset, start, count)

        assert words.tolist() == [word(seed, offset, i) for i in range(start, start + count)]


class TestDropout:
    @pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 1), (), (0, 4), (4, 0)])
    @pytest.mark.parametrize("p", [0.0, 0.25, 0.7])
    def test_what_is_kept_follows_from_seed_offset_and_place(self, shape: tuple[int, ...], p: float) -> None:
        x = normal(*shape)

        y = dropout(x, p, seed=2**40 + 7, offset=5)

        np.testing.assert_allclose(y, np.where(kept(shape, p, 2**40 + 7, 5), x / (1 - p), 0), rtol=1e-15)

    def test_neither_layout_nor_dtype_nor_blocks_change_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = normal(6, 5, 9)
        expected = dropout(x, 0.5, seed=3) != 0
        monkeypatch.setattr(reference, "BLOCK", 4)

        for view in (x.swapaxes(0, 2).copy().swapaxes(0, 2), x.astype(np.float16), np.asfortranarray(x)):
            np.testing.assert_array_equal(dropout(view, 0.5, seed=3) != 0, expected)
        np.testing.assert_array_equal(dropout(x.reshape(-1, 2), 0.5, seed=3) != 0, expected.reshape(-1, 2))

    def test_a_later_call_goes_on_behind_the_counters_of_the_first(self) -> None:
        x = np.ones((2, 8))

        both = dropout(x, 0.5, seed=4)

        np.testing.assert_array_equal(both[1], dropout(x[1], 0.5, seed=4, offset=2))

    def test_what_is_dropped_is_zero_whatever_stood_there(self) -> None:
        x = np.full(64, np.nan)
        keeps = kept((64,), 0.5, 0, 0)
        x[keeps] = np.inf

        with np.errstate(all="raise"):
            y = dropout(x, 0.5, seed=0)

        assert y.tolist() == np.where(keeps, np.inf, 0).tolist()

    def test_the_share_that_is_dropped_is_p(self) -> None:
        y = dropout(np.ones(1 << 20, np.float32), 0.1, seed=11)

        assert np.mean(y == 0) == pytest.approx(0.1, abs=2e-3)
        np.testing.assert_allclose(y[y != 0], 1 / 0.9, rtol=1e-6)
        assert y.mean() == pytest.approx(1, abs=2e-3)

    def test_all_and_nothing(self) -> None:
        x = normal(33)

        assert not dropout(x, 1, seed=1).any()
        np.testing.assert_array_equal(dropout(x, 0, seed=1), x)

    def test_the_threshold_is_exact(self) -> None:
        assert philox.dropout(2.0**-32, 0, 0).threshold == 1
        assert philox.dropout(np.nextafter(2.0**-32, 0), 0, 0).threshold == 0
        assert philox.dropout(0.1, 0, 0).threshold == 429496729
        assert philox.dropout(1, 0, 0).threshold == 2**32

    def test_the_gradient_is_the_same_call(self) -> None:
        x, dy = normal(50, seed=1), normal(50, seed=2)

        y, dx = dropout(x, 0.3, seed=9, offset=1), dropout(dy, 0.3, seed=9, offset=1)

        np.testing.assert_allclose(dx, dy * y / x, rtol=1e-14)

    @every_dtype
    def test_in_place_and_in_another_dtype(self, dtype: str) -> None:
        x = normal(40, dtype=DTYPES[dtype])
        expected = np.where(kept((40,), 0.5, 0, 0), x.astype(np.float64) * 2, 0)

        assert_close(dropout(x, 0.5, seed=0, dtype="float32"), expected)
        assert dropout(x, 0.5, seed=0, out=x) is x
        assert_close(x, expected)

    @pytest.mark.parametrize("p", [-0.1, 1.5])
    def test_p_out_of_range(self, p: float) -> None:
        with pytest.raises(ValueError, match=f"p is {p}: the probability of being dropped is 0 to 1"):
            dropout(np.ones(3), p, seed=0)

    @pytest.mark.parametrize(("name", "number"), [("seed", -1), ("seed", 2**64), ("offset", 2**64)])
    def test_numbers_of_more_than_64_bits(self, name: str, number: int) -> None:
        with pytest.raises(ValueError, match=f"{name} is {number}: it must be 0 to 2.64 - 1"):
            dropout(np.ones(3), 0.5, **{"seed": 0, name: number})

    @pytest.mark.parametrize("number", [1.0, "1", None])
    def test_a_seed_that_is_no_integer(self, number: Any) -> None:
        with pytest.raises(TypeError, match="seed is .*: give an integer"):
            dropout(np.ones(3), 0.5, seed=number)


ADD = {"layer_norm": (add_layer_norm, layer_norm), "rms_norm": (add_rms_norm, rms_norm)}
every_add = pytest.mark.parametrize(("add", "norm"), ADD.values(), ids=ADD)


def norm_of(s: Array, add: Any, gamma: Any, beta: Any, eps: float, axes: int = 1) -> Array:
    """Return the norm from its formula, in long double."""
    over = tuple(range(-axes, 0))
    s = s.astype(np.longdouble)
    if add is add_layer_norm:
        s = s - s.mean(over, keepdims=True)
    y = s / np.sqrt((s * s).mean(over, keepdims=True) + eps)
    y = y if gamma is None else y * gamma
    return (y if beta is None else y + beta).astype(np.float64)


@every_add
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7), (1, 1), (4, 1), (0, 6), (9,)])
def test_every_part_of_the_sum_may_be_there_or_not(add: Any, norm: Any, shape: tuple[int, ...]) -> None:
    x, residual, (gamma, beta, bias) = normal(*shape), normal(*shape, seed=1), normal(3, shape[-1], seed=2)
    for with_bias, alpha, with_gamma, p in itertools.product(
        [False, True], [1.0, -0.25], [False, True], [0.0, 0.4]
    ):
        inner = x + bias if with_bias else x
        inner = np.where(kept(shape, p, 6, 2), inner / (1 - p), 0) if p else inner
        s = inner + alpha * residual
        parameters = [gamma, beta][: 2 if add is add_layer_norm else 1] if with_gamma else []
        options: dict[str, Any] = {"bias": bias if with_bias else None, "alpha": alpha, "dropout": p}
        if p:
            options |= {"seed": 6, "offset": 2}

        y, total = add(x, residual, *parameters, eps=1e-3, **options)
        alone = add(x, residual, *parameters, eps=1e-3, return_sum=False, **options)

        expected = norm_of(
            s, add, gamma if with_gamma else None, beta if with_gamma and len(parameters) > 1 else None, 1e-3
        )
        np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(total, s, rtol=1e-15, atol=1e-15)
        np.testing.assert_array_equal(alone, y)


@every_add
@every_dtype
@pytest.mark.parametrize("residual_dtype", sorted(DTYPES))
def test_the_norm_is_of_the_unrounded_sum_and_the_sum_is_rounded_once(
    add: Any, norm: Any, dtype: str, residual_dtype: str
) -> None:
    x = 1000 + normal(7, 65, dtype=DTYPES[dtype])  # rounding the sum would cost float16 most of its deviation
    x = x.astype(DTYPES[dtype])
    residual = normal(7, 65, seed=1, dtype=DTYPES[residual_dtype])
    s = x.astype(np.float64) + residual.astype(np.float64)

    y, total, *stats = add(x, residual, return_stats=True)

    assert (y.dtype, total.dtype) == (DTYPES[dtype], DTYPES[dtype])
    assert_close(y, norm_of(s, add, None, None, 1e-5 if add is add_layer_norm else 1e-6))
    np.testing.assert_array_equal(total, reference._round(s, total.dtype).astype(total.dtype))
    expected = norm(s, return_stats=True)[1:]
    for got, want in zip(stats, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == (np.float64 if dtype == "float64" else np.float32)


@every_add
@pytest.mark.parametrize(("shape", "axes"), [((3, 40), 1), ((2, 3, 21), 2), ((50,), 1), ((6, 5, 3), 1)])
def test_every_cut_into_blocks_gives_the_same(
    add: Any, norm: Any, shape: tuple[int, ...], axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, residual, bias = normal(*shape), normal(*shape, seed=1), normal(*shape[-axes:], seed=2)
    axis = tuple(range(-axes, 0))
    options: dict[str, Any] = {"bias": bias, "dropout": 0.5, "seed": 1, "axis": axis, "return_stats": True}
    whole = add(x, residual, **options)
    monkeypatch.setattr(reference, "BLOCK", 16)

    pieces = add(x, residual, **options)
    over_residual = residual.copy()
    inplace = add(x, over_residual, **options, out=over_residual)
    over_x = add(x, residual, **options, out=x)

    for got, also, third, want in zip(pieces, inplace, over_x, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)
        np.testing.assert_array_equal(also, got)
        np.testing.assert_array_equal(third, got)
    assert inplace[0] is over_residual
    assert over_x[0] is x


@every_add
def test_dropout_there_is_dropout_alone(add: Any, norm: Any) -> None:
    x, residual, bias = normal(6, 10), normal(6, 10, seed=1), normal(10, seed=2)

    _, total = add(x, residual, bias=bias, dropout=0.3, seed=5, offset=8)

    np.testing.assert_allclose(total, dropout(x + bias, 0.3, seed=5, offset=8) + residual, rtol=1e-15)


def test_faster_transformers_add_bias_input_layer_norm() -> None:
    torch = pytest.importorskip("torch")
    x, residual, (gamma, beta, bias) = normal(6, 64), normal(6, 64, seed=1), normal(3, 64, seed=2)
    expected = torch.nn.functional.layer_norm(
        torch.from_numpy(x + bias + residual), (64,), torch.from_numpy(gamma), torch.from_numpy(beta), 1e-6
    )

    y = add_layer_norm(x, residual, gamma, beta, bias=bias, eps=1e-6, return_sum=False)

    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("add", [add_layer_norm, add_rms_norm])
class TestBadSums:
    def test_residual(self, add: Any) -> None:
        x = np.ones((2, 4), np.float32)
        with pytest.raises(ValueError, match=r"residual has shape \(4,\), x has \(2, 4\)"):
            add(x, x[0])
        with pytest.raises(TypeError, match="residual: dtype int64 is not supported"):
            add(x, x.astype(np.int64))
        with pytest.raises(TypeError, match="residual is a builtins.list"):
            add(x, [[1.0] * 4] * 2)
        with pytest.raises(TypeError, match="residual is None: give the array that is added"):
            add(x, None)

    def test_bias_and_alpha(self, add: Any) -> None:
        x = np.ones((2, 4), np.float32)
        with pytest.raises(ValueError, match=r"bias has shape \(2,\), the normalised axes of x have \(4,\)"):
            add(x, x, bias=np.ones(2))
        with pytest.raises(ValueError, match="alpha is inf: it must be finite"):
            add(x, x, alpha=np.inf)
        with pytest.raises(TypeError, match="alpha is '1' .a str.: give a number"):
            add(x, x, alpha="1")

    def test_dropout(self, add: Any) -> None:
        x = np.ones((2, 4), np.float32)
        with pytest.raises(ValueError, match="dropout=0.5 needs a seed"):
            add(x, x, dropout=0.5)
        with pytest.raises(ValueError, match="dropout is 2: the probability"):
            add(x, x, dropout=2, seed=0)

    def test_out_over_a_part_of_the_residual(self, add: Any) -> None:
        memory = np.ones((3, 4), np.float32)
        with pytest.raises(ValueError, match="out and residual share memory in part: give residual itself"):
            add(np.ones((2, 4), np.float32), memory[:2], out=memory[1:])

    def test_a_device_array_is_checked(self, add: Any, simulated: Any) -> None:
        host = np.ones((2, 4), np.float32)
        x = simulated.cupy.asarray(host)
        with pytest.raises(TypeError, match="x is a CuPy array .* and residual is a NumPy array"):
            add(x, host)

        assert [each.shape for each in add(x[:0], x[:0])] == [(0, 4), (0, 4)]


def gelu(z: float) -> float:
    return z * math.erfc(-z / math.sqrt(2)) / 2


def gelu_tanh(z: float) -> float:
    u = np.longdouble(math.sqrt(2 / math.pi)) * (np.longdouble(z) + np.longdouble(0.044715) * z**3)
    return float(z / (1 + np.exp(-2 * u)))


def silu(z: float) -> float:
    return z / (1 + math.exp(-z))


class Activation(NamedTuple):
    """An activation with its two public functions."""

    biased: Any
    gated: Any
    formula: Any


ACTIVATIONS = {
    "gelu": Activation(bias_gelu, geglu, gelu),
    "gelu tanh": Activation(
        functools.partial(bias_gelu, approximate="tanh"),
        functools.partial(geglu, approximate="tanh"),
        gelu_tanh,
    ),
    "silu": Activation(bias_silu, swiglu, silu),
}
every_activation = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)


@every_activation
class TestActivations:
    @pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 1), (0, 4), (4, 0)])
    def test_a_bias_and_the_formula(self, act: Activation, shape: tuple[int, ...]) -> None:
        x, bias = 4 * normal(*shape), normal(shape[-1], seed=1)

        y, bare = act.biased(x, bias), act.biased(x, None)

        np.testing.assert_allclose(y, np.vectorize(act.formula, otypes=[float])(x + bias), rtol=1e-13)
        np.testing.assert_allclose(bare, np.vectorize(act.formula, otypes=[float])(x), rtol=1e-13)

    def test_far_out_the_digits_stay(self, act: Activation) -> None:
        x = np.array([-30.0, -20, -10, -8.5, -5, -1e-300, 0, 1e-300, 9, 40, 1e5])

        np.testing.assert_allclose(
            act.biased(x, None), [act.formula(each) if each > -700 else 0 for each in x], rtol=1e-11
        )

    def test_no_number_and_infinity(self, act: Activation) -> None:
        with np.errstate(all="raise"):
            y = act.biased(np.array([np.nan, np.inf, -np.inf, -1e4]), None)

        assert np.isnan(y).tolist() == [True, False, True, False]
        assert (y[1], y[3]) == (np.inf, 0)

    @pytest.mark.parametrize("gate", ["first", "second"])
    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("shape", [(3, 10), (2,), (2, 3, 4), (0, 6), (4, 0)])
    def test_a_gate(self, act: Activation, gate: str, with_bias: bool, shape: Any) -> None:
        x, bias = 3 * normal(*shape), normal(shape[-1], seed=1) if with_bias else None
        n = shape[-1] // 2

        y = act.gated(x, bias, gate=gate)

        z = x if bias is None else x + bias
        a, b = (z[..., :n], z[..., n:]) if gate == "first" else (z[..., n:], z[..., :n])
        np.testing.assert_allclose(y, np.vectorize(act.formula, otypes=[float])(a) * b, rtol=1e-13)

    @every_dtype
    def test_dtypes_and_one_rounding(self, act: Activation, dtype: str) -> None:
        x, bias = normal(9, 34, dtype=DTYPES[dtype]), normal(34, seed=1, dtype=np.float16)
        exact = np.vectorize(act.formula)(x.astype(np.float64) + bias)
        half = act.biased(x, bias, dtype="float16")

        assert_close(act.biased(x, bias), exact)
        np.testing.assert_array_equal(half, exact.astype(np.float16))
        assert_close(act.gated(x, bias), exact[:, :17] * (x[:, 17:].astype(np.float64) + bias[17:]))

    def test_views_blocks_and_in_place(self, act: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
        x, bias = normal(4, 6, 10), normal(10, seed=1)
        y, z = act.biased(x, bias), act.gated(x, bias)
        monkeypatch.setattr(reference, "BLOCK", 4)
        out = np.zeros((4, 6, 10))[:, :, ::2]
        turned = x.transpose(2, 0, 1).copy().transpose(1, 2, 0)

        assert act.gated(turned, bias, out=out) is out
        np.testing.assert_array_equal(out, z)
        assert act.biased(turned, bias, out=turned) is turned
        np.testing.assert_array_equal(turned, y)

    @pytest.mark.parametrize("shape", [(1,), ()])
    def test_a_bias_broadcasts(self, act: Activation, shape: Any) -> None:
        x, bias = normal(3, 4), np.full(shape, 0.5)

        np.testing.assert_array_equal(act.biased(x, bias), act.biased(x, np.full(4, 0.5)))
        np.testing.assert_array_equal(act.gated(x, bias), act.gated(x, np.full(4, 0.5)))

    def test_bad_input(self, act: Activation) -> None:
        x = np.ones((2, 4), np.float32)
        with pytest.raises(ValueError, match=r"bias has shape \(2,\), the last axis of x has \(4,\)"):
            act.biased(x, np.ones(2))
        with pytest.raises(TypeError, match="bias: dtype int64 is not supported"):
            act.biased(x, np.ones(4, int))
        with pytest.raises(TypeError, match="x: dtype int32 is not supported"):
            act.biased(x.astype(np.int32), None)
        with pytest.raises(TypeError, match="bias is a builtins.list"):
            act.gated(x, [1.0] * 4)
        with pytest.raises(ValueError, match="x has 0 axes"):
            act.biased(x[0, 0, ...], None)
        with pytest.raises(ValueError, match=r"x has shape \(2, 3\): its last axis holds two halves"):
            act.gated(x[:, :3])
        with pytest.raises(ValueError, match="gate is 'left': use 'first' or 'second'"):
            act.gated(x, gate="left")
        with pytest.raises(ValueError, match=r"out has shape \(2, 4\), the result has \(2, 2\)"):
            act.gated(x, out=np.ones((2, 4), np.float32))
        with pytest.raises(ValueError, match="out and x share memory$"):
            act.gated(x, out=x[:, :2])
        with pytest.raises(ValueError, match="out and x share memory in part"):
            act.biased(x, None, out=x[::-1])
        with pytest.raises(ValueError, match="out and bias share memory$"):
            act.biased(x[:1].copy(), x[0], out=x[:1])

    def test_a_device_array_is_checked_and_gives_what_numpy_gives(
        self, act: Activation, simulated: Any
    ) -> None:
        host = normal(2, 4, dtype=np.float32)
        x = simulated.cupy.asarray(host)
        with pytest.raises(TypeError, match="x is a CuPy array .* and bias is a NumPy array"):
            act.biased(x, np.ones(4))

        for function in (act.biased, act.gated):
            expected = function(host, None)
            np.testing.assert_allclose(simulated.cupy.asnumpy(function(x, None)), expected, rtol=1e-5)
        assert act.gated(x[:0], None).shape == (0, 2)


def test_other_approximations_are_refused() -> None:
    for function in (bias_gelu, geglu):
        with pytest.raises(ValueError, match="approximate is 'sigmoid': use 'none' or 'tanh'"):
            function(np.ones(4), None, approximate="sigmoid")


def test_gelu_agrees_with_scipy() -> None:
    special = pytest.importorskip("scipy.special")
    x = np.linspace(-12, 12, 1001)

    np.testing.assert_allclose(bias_gelu(x, None), x * special.ndtr(x), rtol=1e-12)


@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu", "glu order"])
def test_agrees_with_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x, bias = 3 * normal(5, 12), normal(12, seed=1)
    z = torch.from_numpy(x + bias)
    ours, theirs = {
        "gelu": (bias_gelu(x, bias), functional.gelu(z)),
        "gelu tanh": (bias_gelu(x, bias, approximate="tanh"), functional.gelu(z, approximate="tanh")),
        "silu": (bias_silu(x, bias), functional.silu(z)),
        # its sigmoid takes the second half: z * sigmoid(z) is silu
        "glu order": (swiglu(x, bias, gate="second"), functional.glu(z) * z[:, 6:]),
    }[name]

    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: bias_gelu(x, x[0], approximate="tanh", out=out),
        lambda x, out: swiglu(x, out=out[:, : x.shape[1] // 2]),
        lambda x, out: dropout(x, 0.5, seed=0, out=out),
        lambda x, out: add_layer_norm(x, x, out=out, return_sum=False, dropout=0.1, seed=0),
    ],
    ids=["bias_gelu", "swiglu", "dropout", "add_layer_norm"],
)
def test_no_float64_copy_of_x_is_made(call: Any) -> None:
    x = np.ones((4096, 512), np.float16)
    out = np.empty_like(x)
    tracemalloc.start()

    call(x, out)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * reference.BLOCK * 8  # a float64 copy is 16 blocks
