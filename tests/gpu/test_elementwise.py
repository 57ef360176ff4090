"""bias_gelu, bias_silu, geglu, swiglu and dropout on the device, against NumPy in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynorm import bias_gelu, bias_silu, dropout, geglu, swiglu
from cupynorm._dtypes import DTYPES as INSTALLED
from cupynorm._dtypes import dtype_of
from cupynorm.host import reference
from cupynorm.invoke import row_ops
from cupynorm.lower import elementwise
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import DTYPES, as_strided, bits, need_bytes, tiled

Function = Callable[..., Any]

BIASED: dict[str, Function] = {
    "bias_gelu": bias_gelu,
    "bias_gelu tanh": functools.partial(bias_gelu, approximate="tanh"),
    "bias_silu": bias_silu,
}
GATED: dict[str, Function] = {
    "geglu": geglu,
    "geglu tanh": functools.partial(geglu, approximate="tanh", gate="second"),
    "swiglu": swiglu,
    "swiglu second": functools.partial(swiglu, gate="second"),
}
ALL = {**BIASED, **GATED}

every_dtype = pytest.mark.parametrize("dtype", [each for each in DTYPES if each in INSTALLED])
every_op = pytest.mark.parametrize("op", ALL)


def normal(*shape: int, dtype: Any = np.float64, seed: int = 0) -> Any:
    return (3 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype_of(dtype))


def wide(name: str, cols: int) -> int:
    """Return the columns of x that give so many of results."""
    return 2 * cols if name in GATED else cols


def check(xp: Any, name: str, x: Any, bias: Any, y: Any = None, **options: Any) -> None:
    """Compare with float64. x and bias are on the device; y: the result, if it is not to be computed here."""
    function = ALL[name]
    host = [None if each is None else xp.asnumpy(each).astype(np.float64) for each in (x, bias)]
    expected = function(*host)

    if y is None:
        y = function(x, bias, **options)

    assert type(y) is xp.ndarray
    # in float, the tail's relative error grows to 1e-5
    scale = np.ones(y.shape) if y.dtype == np.float32 else None
    assert_close(xp.asnumpy(y), expected, scale=scale)


# --- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.small
@every_op
@every_dtype
def test_whole_vectors(xp: Any, op: str, dtype: str) -> None:
    for shape in ((3, 64), (2, 3, 1040), (1, 8)):
        cols = wide(op, shape[-1])
        x, bias = normal(*shape[:-1], cols, dtype=dtype), normal(cols, dtype=dtype)
        check(xp, op, xp.asarray(x), xp.asarray(bias))


@pytest.mark.small
@every_op
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_begin_anywhere(xp: Any, op: str, dtype: str) -> None:
    for cols in (1, 7, 33, 257):
        x, bias = normal(5, wide(op, cols), dtype=dtype), normal(wide(op, cols), dtype=dtype)
        check(xp, op, xp.asarray(x), xp.asarray(bias))


@pytest.mark.small
@pytest.mark.parametrize("op", ["bias_gelu", "swiglu"])
@pytest.mark.parametrize("x_off", [0, 1, 3])
@pytest.mark.parametrize("y_off", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_misaligned_bases(xp: Any, op: str, x_off: int, y_off: int, with_bias: bool) -> None:
    rows, cols = 4, 48
    memory = xp.asarray(normal(rows * wide(op, cols) + 8, dtype="float16"))
    x = memory[x_off : x_off + rows * wide(op, cols)].reshape(rows, wide(op, cols))
    bias = xp.asarray(normal(wide(op, cols) + 1, dtype="float16"))[1:] if with_bias else None
    around = xp.asarray(np.full(rows * cols + 16, 77, np.float16))
    out = around[y_off : y_off + rows * cols].reshape(rows, cols)

    y = ALL[op](x, bias, out=out)

    assert y is out
    check(xp, op, x, bias, y)
    untouched = np.ones(around.size, bool)
    untouched[y_off : y_off + rows * cols] = False
    assert (xp.asnumpy(around)[untouched] == 77).all()


@pytest.mark.small
@pytest.mark.parametrize("op", ["bias_gelu", "geglu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        ((6, 4, 40), np.s_[::2, :3]),
        ((6, 4, 40), np.s_[::-1, 1:]),
        ((6, 5, 33), np.s_[1::2, :, 1:]),
        ((6, 33), np.s_[::3, :10]),
        ((2, 3, 4, 24), np.s_[:, ::2, :3]),
    ],
)
def test_strided_rows(xp: Any, op: str, with_bias: bool, shape: tuple[int, ...], steps: Any) -> None:
    whole = xp.asarray(normal(*shape[:-1], wide(op, shape[-1]), dtype="float16"))
    x = whole[steps]
    x = x[..., : x.shape[-1] // 2 * 2]
    bias = xp.asarray(normal(x.shape[-1], dtype="float16")) if with_bias else None
    check(xp, op, x, bias)

    shape = (*x.shape[:-1], x.shape[-1] // wide(op, 1))
    out = xp.zeros((*shape[:-1], shape[-1] + 3), np.float16)[..., 2 : 2 + shape[-1]]
    check(xp, op, x, bias, ALL[op](x, bias, out=out))


@pytest.mark.small
@pytest.mark.parametrize("op", ["bias_silu", "swiglu second"])
@pytest.mark.parametrize("cols", [32, 33])
@pytest.mark.parametrize("kind", ["float64", "float32", "scalar", "one", "strided", "reversed"])
def test_any_bias_that_broadcasts(xp: Any, op: str, cols: int, kind: str) -> None:
    width = wide(op, cols)
    x = xp.asarray(normal(3, width, dtype="float16"))
    made = {
        "float64": lambda: xp.asarray(normal(width, dtype="float64")),
        "float32": lambda: xp.asarray(normal(width + 1, dtype="float32"))[1:],
        "scalar": lambda: xp.asarray(normal(dtype="float32")),
        "one": lambda: xp.asarray(normal(1, dtype="float16")),
        "strided": lambda: xp.asarray(normal(3 * width, dtype="float16"))[::3],
        "reversed": lambda: xp.asarray(normal(width, dtype="float16"))[::-1],
    }

    check(xp, op, x, made[kind]())


@pytest.mark.small
@pytest.mark.parametrize("op", ["bias_gelu", "geglu"])
@pytest.mark.parametrize("cols", [40, 41])
@pytest.mark.parametrize(
    ("of_x", "of_y"),
    [
        ("float16", "float32"),
        ("float32", "float16"),
        ("bfloat16", "float16"),
        ("float16", "float64"),
        ("float64", "bfloat16"),
        ("float32", "float64"),
    ],
)
def test_a_result_of_another_dtype(xp: Any, op: str, cols: int, of_x: str, of_y: str) -> None:
    if not {of_x, of_y} <= set(INSTALLED):
        pytest.skip("needs ml_dtypes")
    x = xp.asarray(normal(3, wide(op, cols), dtype=of_x))
    bias = xp.asarray(normal(wide(op, cols), dtype=of_x))

    y = ALL[op](x, bias, dtype=of_y)

    assert y.dtype == dtype_of(of_y)
    check(xp, op, x, bias, y)


@pytest.mark.small
@pytest.mark.parametrize("shape", [(4, 64), (5, 33), (3, 257), (1025,)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_in_place(xp: Any, shape: tuple[int, ...], with_bias: bool) -> None:
    x = normal(*shape, dtype="float16")
    bias = normal(shape[-1], dtype="float16") if with_bias else None
    given = xp.asarray(x)

    y = bias_gelu(given, None if bias is None else xp.asarray(bias), out=given)

    assert y is given
    assert_close(
        xp.asnumpy(y),
        bias_gelu(x.astype(np.float64), None if bias is None else bias.astype(np.float64)),
    )


@pytest.mark.small
def test_nothing_is_launched_for_no_elements(xp: Any) -> None:
    for shape in ((0, 4), (4, 0), (0,)):
        assert bias_gelu(xp.empty(shape, np.float16), None).shape == shape
        assert geglu(xp.empty(shape, np.float16)).shape == (*shape[:-1], shape[-1] // 2)
        assert dropout(xp.empty(shape, np.float16), 0.5, seed=0).shape == shape


@pytest.mark.small
@every_op
@every_dtype
@np.errstate(all="ignore")
def test_infinities_and_nan_are_numpys(xp: Any, op: str, dtype: str) -> None:
    values = [np.inf, -np.inf, np.nan, 0, 1, -1, 200, -200]
    pairs = np.array([(a, b) for a in values for b in values])
    x = pairs.T.reshape(1, -1).astype(dtype_of(dtype))
    if op not in GATED:
        x = x[:, :64]

    y = xp.asnumpy(ALL[op](xp.asarray(x), None)).astype(np.float64)

    expected = ALL[op](x.astype(np.float64), None)
    # a sigmoid that is flushed to 0 makes nan of inf, where its limit would have made inf
    tiny = (expected != 0) & (np.abs(expected) < 1e-30)
    odd = np.isinf(expected) & np.isnan(y)
    assert np.array_equal(np.isnan(y)[~odd], np.isnan(expected)[~odd])
    plain = np.isfinite(expected) & ~tiny
    assert (np.abs(y - expected)[plain] <= 0.01 * np.abs(expected)[plain]).all()
    assert np.array_equal(y[np.isinf(expected) & ~odd], expected[np.isinf(expected) & ~odd])
    assert np.count_nonzero(odd) <= 2 * np.count_nonzero(np.isinf(x))


@pytest.mark.small
def test_gelu_of_every_float16_is_within_two_units(xp: Any) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]

    y = xp.asnumpy(bias_gelu(xp.asarray(x), None)).astype(np.float64)

    exact = reference._gelu(x.astype(np.float64))
    exponent = np.maximum(np.frexp(exact)[1] - 1, -14)
    assert (np.abs(y - exact) / np.ldexp(1.0, exponent - 10)).max() < 1


def test_gelu_of_sums_is_within_two_units(cuda: Any) -> None:
    x = np.linspace(-9, 5, 1 << 20).astype(np.float16).reshape(1024, 1024)
    bias = np.random.default_rng(0).uniform(-0.01, 0.01, 1024).astype(np.float32)

    y = cuda.asnumpy(bias_gelu(cuda.asarray(x), cuda.asarray(bias))).astype(np.float64)

    exact = reference._gelu(x.astype(np.float32).astype(np.float64) + bias)
    exponent = np.maximum(np.frexp(exact)[1] - 1, -14)
    assert (np.abs(y - exact) / np.ldexp(1.0, exponent - 10)).max() < 1.01


@pytest.mark.small
@pytest.mark.parametrize(
    "limits",
    [
        {"INT": 1},  # every kernel counts with 64 bits
        {"MOST_BLOCKS": 3},  # groups of rows are along z as well
        {"THREADS": 64},  # rows of several blocks, the last of them not full
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["bias_gelu", "geglu"])
@pytest.mark.parametrize("cols", [1064, 1063])
def test_launches_that_only_large_arrays_need(
    xp: Any, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], op: str, cols: int
) -> None:
    row_ops.forget()  # a launch that was chosen before
    for name, value in limits.items():
        monkeypatch.setattr(elementwise, name, value)
    for x in (normal(11, wide(op, cols), dtype="float16"), normal(3, 7, wide(op, cols), dtype="float16")):
        given = xp.asarray(x)
        check(xp, op, given[..., ::2, :], xp.asarray(normal(x.shape[-1], dtype="float16")))
    check_dropout(xp, xp.asarray(np.ones((5, 3, cols + 1), np.float16))[:, ::2, 1:], 0.5, 3, 2**64 - 7)
    row_ops.forget()


# --- dropout ---------------------------------------------------------------------------------------------------------


def check_dropout(xp: Any, x: Any, p: float, seed: int, offset: int, **options: Any) -> None:
    """Compare with NumPy: what is kept exactly, its values to rounding."""
    host = xp.asnumpy(x)

    y = xp.asnumpy(dropout(x, p, seed=seed, offset=offset, **options))

    expected = dropout(host.astype(np.float64), p, seed=seed, offset=offset)
    assert np.array_equal(y == 0, expected == 0)
    assert not np.signbit(y[expected == 0]).any()
    assert_close(np.atleast_1d(y), np.atleast_1d(expected))


NUMBERS = [(0, 0), (2**64 - 1, 2**64 - 2), (2**33 + 5, 2**32 - 3)]


@pytest.mark.small
@every_dtype
@pytest.mark.parametrize("shape", [(5, 64), (7, 33), (), (3,), (2, 3, 5)])
def test_dropout_keeps_what_numpy_keeps(xp: Any, dtype: str, shape: tuple[int, ...]) -> None:
    x = xp.asarray(np.abs(normal(*shape, dtype=dtype)) + dtype_of(dtype).type(1))
    for p in (0.0, 0.3, 1.0):
        for seed, offset in NUMBERS:
            check_dropout(xp, x, p, seed, offset)


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("off", [1, 2, 3])
def test_dropout_of_what_begins_anywhere(xp: Any, dtype: str, off: int) -> None:
    memory = xp.asarray(np.abs(normal(6, 70, dtype=dtype)) + dtype_of(dtype).type(1))
    for x in (memory[:, off:], memory[:, off : off + 32], memory[::2, off:-1], memory.reshape(-1)[off:]):
        check_dropout(xp, x, 0.4, 11, 2**32 - 5)


@pytest.mark.small
@pytest.mark.parametrize(
    ("of_x", "of_y"), [("float16", "float64"), ("float64", "float16"), ("float16", "float32")]
)
@pytest.mark.parametrize("cols", [24, 25])
@pytest.mark.parametrize("off", [0, 2])
def test_dropout_into_another_dtype(xp: Any, of_x: str, of_y: str, cols: int, off: int) -> None:
    x = xp.asarray(np.abs(normal(3, cols + off, dtype=of_x)) + dtype_of(of_x).type(1))[:, off:]
    check_dropout(xp, x, 0.4, 12, 3, dtype=of_y)

    out = xp.zeros(3 * cols + off, dtype_of(of_y))[off:].reshape(3, cols)
    check_dropout(xp, x, 0.4, 12, 3, out=out)


@pytest.mark.small
@pytest.mark.parametrize("off", [0, 1])  # in pairs, and one by one
def test_results_are_rounded_to_the_nearest_bfloat16_to_even_in_the_middle(xp: Any, off: int) -> None:
    pytest.importorskip("ml_dtypes")
    upper = np.arange(0, 1 << 16, 37, dtype=np.uint32)[:, None] << 16
    words = (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)
    words = words[words << 1 >= 1 << 24]  # smaller ones may become zero
    out = xp.zeros(words.size + off, dtype_of("bfloat16"))[off:]

    y = xp.asnumpy(dropout(xp.asarray(words.view(np.float32)), 0.0, seed=1, out=out))

    number = words << 1 <= 0xFF << 24
    assert (bits(y)[number] == (words + 0x7FFF + (words >> 16 & 1) >> 16)[number]).all()
    assert np.isnan(y[~number].astype(np.float32)).all()


@pytest.mark.small
def test_what_is_dropped_is_zero_whatever_stood_there(xp: Any) -> None:
    x = np.full(1000, np.nan, np.float16)
    kept = dropout(np.ones(1000), 0.5, seed=3) != 0

    y = xp.asnumpy(dropout(xp.asarray(x), 0.5, seed=3))

    assert np.isnan(y[kept]).all()
    assert (bits(y[~kept]) == 0).all()
    assert (bits(xp.asnumpy(dropout(xp.asarray(x), 1.0, seed=3))) == 0).all()


@pytest.mark.small
def test_dropout_in_place(xp: Any) -> None:
    x = xp.asarray(np.ones((5, 33), np.float16))

    y = dropout(x, 0.5, seed=9, out=x)

    assert y is x
    assert np.array_equal(xp.asnumpy(x), dropout(np.ones((5, 33), np.float16), 0.5, seed=9))


# --- large ---------------------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(4096, 1024), (70_001, 24), (1000, 5001), (3, 300_000), (200_000, 3)])
def test_large_arrays(cuda: Any, op: str, dtype: str, shape: tuple[int, int]) -> None:
    if dtype not in INSTALLED:
        pytest.skip("needs ml_dtypes")
    x = cuda.asarray(normal(shape[0], wide(op, shape[1]), dtype=dtype))
    check(cuda, op, x, cuda.asarray(normal(x.shape[1], dtype=dtype)))


@pytest.mark.parametrize("shape", [(4096, 1024), (1000, 5001)])
def test_dropout_of_large_arrays(cuda: Any, shape: tuple[int, int]) -> None:
    check_dropout(cuda, cuda.asarray(np.ones(shape, np.float16)), 0.1, 1, 2**32 - 1000)


PAST = (1 << 31) + 24


@pytest.mark.parametrize("shape", [(PAST,), (PAST // 8, 8), (PAST // 3, 3), (3, PAST // 3 + 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_more_than_2_31_elements(roomy: Any, shape: tuple[int, ...], with_bias: bool) -> None:
    reason = need_bytes(roomy, 5 * math.prod(shape))
    if reason:
        pytest.skip(reason)
    tile = (
        normal(24, dtype="float16") if len(shape) == 1 else normal(8 * min(shape[-1], 1000), dtype="float16")
    )
    x = tiled(roomy, tile, shape)
    bias = roomy.asarray(np.float16([0.5])) if with_bias else None

    y = bias_gelu(x, bias, out=x)

    ends = [
        roomy.asnumpy(y.reshape(-1)[at : at + tile.size]) for at in (0, (1 << 31) // tile.size * tile.size)
    ]
    expected = bias_gelu(tile.astype(np.float64), 0.5 * np.ones(1) if with_bias else None)
    for each in ends:
        assert_close(each, expected[: each.size])


def test_dropout_of_more_than_2_31_elements(roomy: Any) -> None:
    reason = need_bytes(roomy, 5 * PAST)
    if reason:
        pytest.skip(reason)
    x = tiled(roomy, np.ones(8, np.float16), (PAST,))

    dropout(x, 0.5, seed=1, out=x)

    at = PAST - 4096
    last = dropout(np.ones(4096, np.float16), 0.5, seed=1, offset=at // 4)
    assert at % 4 == 0
    assert np.array_equal(roomy.asnumpy(x[at:]), last)


def test_a_stride_of_more_than_2_31_elements(roomy: Any) -> None:
    reason = need_bytes(roomy, 4 * (PAST + 1000))
    if reason:
        pytest.skip(reason)
    x = as_strided(roomy, roomy.empty(2 * PAST, np.float16), (2, 704), (2 * PAST, 2))
    rows = normal(2, 704, dtype="float16")
    x[...] = roomy.asarray(rows)
    check(roomy, "bias_gelu", x, roomy.asarray(normal(704, dtype="float16")))
