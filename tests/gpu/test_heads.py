"""Heads on the device: what the NumPy path gives, for any layout, in vectors as wide as the layout allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import add_qkv_bias, merge_heads, split_heads
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import head_calls, row_ops
from cupynorm.lower import heads as lower_heads
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import DTYPES, as_strided, bits

# leading axes, heads, seq, head size: the real one, vectors of every width, odd, one of each, several leading axes,
# none
SHAPES = [
    ((2,), 12, 5, 64),
    ((3,), 2, 4, 4),
    ((2,), 3, 5, 7),
    ((), 2, 3, 10),
    ((1,), 1, 1, 1),
    ((2, 3), 2, 2, 24),
]
shapes = pytest.mark.parametrize(("leading", "heads", "seq", "size"), SHAPES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 3, shape).astype(dtype_of(dtype))


@pytest.mark.small
@shapes
def test_queries_keys_and_values_are_those_of_the_host(
    xp: Any, leading: Any, heads: int, seq: int, size: int
) -> None:
    qkv, bias = numbers(*leading, seq, 3 * heads * size), numbers(3 * heads * size, seed=1)

    y = add_qkv_bias(xp.asarray(qkv), xp.asarray(bias), heads=heads)

    np.testing.assert_array_equal(xp.asnumpy(y), add_qkv_bias(qkv, bias, heads=heads))


@pytest.mark.small
@by_dtype
def test_what_is_only_moved_keeps_its_bits(xp: Any, dtype: str) -> None:
    x = numbers(2, 5, 24, dtype=dtype)
    x[0, 0, :4] = [-0.0, np.nan, np.inf, -np.inf]

    y = split_heads(xp.asarray(x), heads=3)
    back = merge_heads(y)

    np.testing.assert_array_equal(bits(xp.asnumpy(y)), bits(split_heads(x, heads=3)))
    np.testing.assert_array_equal(bits(xp.asnumpy(back)), bits(x))


@pytest.mark.small
@pytest.mark.parametrize("of_y", DTYPES)
@by_dtype
def test_the_result_has_the_dtype_that_was_asked_for(xp: Any, dtype: str, of_y: str) -> None:
    x, bias = numbers(2, 5, 24, dtype=dtype), numbers(24, seed=1)

    y = split_heads(xp.asarray(x), xp.asarray(bias), heads=3, dtype=of_y)

    assert y.dtype == dtype_of(of_y)
    exact = split_heads(x.astype(np.float64), bias.astype(np.float64), heads=3)
    assert_close(xp.asnumpy(y), exact)


LAYOUTS = {
    "every other token": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1],
    "columns backwards": lambda x: x[..., ::-1],
    "transposed": lambda x: x.swapaxes(0, 1),
    "a slice of columns": lambda x: x[..., 4:20],
    "off by one": lambda x: x[..., 1:21],
}


@pytest.mark.small
@pytest.mark.parametrize("of", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides_will_do(xp: Any, of: Any) -> None:
    host = numbers(4, 6, 24, dtype="float16")
    x, expected = of(xp.asarray(host)), of(host)

    y = split_heads(x, heads=4)
    merged = merge_heads(as_strided(xp, x, (2, 2, 3, 4), (x.strides[0], x.strides[2], x.strides[1], 4)))

    np.testing.assert_array_equal(xp.asnumpy(y), split_heads(expected, heads=4))
    inner = np.lib.stride_tricks.as_strided(
        expected, (2, 2, 3, 4), (expected.strides[0], expected.strides[2], expected.strides[1], 4)
    )
    np.testing.assert_array_equal(xp.asnumpy(merged), merge_heads(inner))


@pytest.mark.small
@pytest.mark.parametrize("shape", [(), (1,), (24,)])
def test_a_bias_broadcasts(xp: Any, shape: Any) -> None:
    x, bias = numbers(2, 5, 24), numbers(*shape, seed=1)

    y = split_heads(xp.asarray(x), xp.asarray(bias), heads=3)

    np.testing.assert_array_equal(xp.asnumpy(y), split_heads(x, bias, heads=3))


@pytest.mark.small
def test_a_call_made_again_sees_its_own_arrays(xp: Any) -> None:
    for seed in range(4):
        x, bias = numbers(2, 5, 36, seed=seed), numbers(36, seed=seed + 9)
        out = xp.empty((3, 2, 3, 5, 4), np.float32)

        mine = add_qkv_bias(xp.asarray(x), xp.asarray(bias), heads=3)
        given = add_qkv_bias(xp.asarray(x), xp.asarray(bias), heads=3, out=out)

        assert given is out
        for y in (mine, given):
            np.testing.assert_array_equal(xp.asnumpy(y), add_qkv_bias(x, bias, heads=3))
    assert len(row_ops.calls_of_thread().bound) >= 1


@pytest.mark.small
def test_what_differs_from_a_call_made_before_is_checked(xp: Any) -> None:
    x, bias = xp.asarray(numbers(2, 5, 12)), xp.asarray(numbers(12))
    split_heads(x, bias, heads=3)

    for call, error, words in [
        (lambda: split_heads(x, bias, heads=5), ValueError, "heads is 5"),
        (lambda: split_heads(x, bias, heads=3.0), TypeError, "heads is 3.0: give an integer"),
        (lambda: split_heads(x, bias[:5], heads=3), ValueError, "bias has shape"),
        (lambda: split_heads(x, numbers(12), heads=3), TypeError, "bias is a NumPy array"),
        (lambda: split_heads(numbers(2, 5, 12), bias, heads=3), TypeError, "bias is a CuPy array"),
        (lambda: split_heads(x, heads=3, dtype="int8"), TypeError, "int8"),
        (lambda: split_heads(x, heads=3, out=xp.empty((2, 3, 5, 5))), ValueError, "out has shape"),
        (lambda: split_heads(x, heads=3, out=x.reshape(2, 3, 5, 4)), ValueError, "share memory"),
    ]:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.small
@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12), (2, 5, 0)])
def test_nothing_is_nothing(xp: Any, shape: Any) -> None:
    y = split_heads(xp.empty(shape, np.float32), heads=3)

    assert y.shape == split_heads(np.empty(shape, np.float32), heads=3).shape


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_packed_tokens_are_spread_and_gathered(xp: Any, dtype: str) -> None:
    lengths, heads, longest = np.array([3, 0, 4]), 2, 4
    rows = np.full((3, longest), -1, np.int32)
    rows[np.arange(longest) < lengths[:, np.newaxis]] = np.arange(7)
    places = np.append(np.flatnonzero(rows >= 0), -1).astype(np.int32)  # one token more than there are
    packed, bias = numbers(7, 48, dtype=dtype), numbers(48, seed=1)
    out, back = xp.empty((3, 3, heads, longest, 8), dtype), xp.empty((8, 16), dtype)

    head_calls.split_packed(xp.asarray(packed), xp.asarray(bias), xp.asarray(rows.reshape(-1)), heads, out)
    head_calls.merge_packed(out[2], xp.asarray(places), back)

    spread = np.where(rows[..., np.newaxis] >= 0, packed[rows] + bias, 0).astype(dtype)
    np.testing.assert_array_equal(xp.asnumpy(out), add_qkv_bias(spread, heads=heads))
    expected = np.append((packed + bias).astype(dtype)[:, 32:], np.zeros((1, 16), dtype), axis=0)
    np.testing.assert_array_equal(xp.asnumpy(back), expected)


@pytest.mark.small
def test_rows_are_gathered_by_their_numbers(xp: Any) -> None:
    x, rows = numbers(5, 12), np.array([4, -1, 0, 0], np.int32)

    for _ in range(2):
        out = head_calls.gather(xp.asarray(x), xp.asarray(rows), xp.empty((4, 12), np.float16))

        expected = np.where(rows[:, np.newaxis] >= 0, x[rows], 0).astype(np.float16)
        np.testing.assert_array_equal(xp.asnumpy(out), expected)


@pytest.mark.small
@pytest.mark.parametrize("seq", [1, 2, 7])
def test_a_thread_may_take_several_tokens(xp: Any, monkeypatch: Any, seq: int) -> None:
    monkeypatch.setattr(lower_heads, "tokens_of_a_thread", lambda *_: 2)
    qkv, bias = numbers(3, seq, 72), numbers(72, seed=1)

    y = add_qkv_bias(xp.asarray(qkv), xp.asarray(bias), heads=3)
    merged = merge_heads(y[2])

    expected = add_qkv_bias(qkv, bias, heads=3)
    np.testing.assert_array_equal(xp.asnumpy(y), expected)
    np.testing.assert_array_equal(xp.asnumpy(merged), merge_heads(expected[2]))


def test_large_tokens_take_several_a_thread(cuda: Any) -> None:
    qkv, bias = numbers(32, 128, 2304, dtype="float16"), numbers(2304, dtype="float32", seed=1)
    x, shift = cuda.asarray(qkv), cuda.asarray(bias)

    for _ in range(2):
        y = add_qkv_bias(x, shift, heads=12)
        merged = merge_heads(y[0])

        assert_close(cuda.asnumpy(y), add_qkv_bias(qkv.astype(np.float64), bias, heads=12))
        np.testing.assert_array_equal(cuda.asnumpy(merged), merge_heads(cuda.asnumpy(y[0])))


def test_a_call_can_be_captured(cuda: Any) -> None:
    host = numbers(2, 7, 96, dtype="float16")
    x, out = cuda.zeros(host.shape, np.float16), cuda.empty((3, 2, 4, 7, 8), np.float16)
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        add_qkv_bias(x, heads=4, out=out)
        stream.synchronize()
        stream.begin_capture()
        add_qkv_bias(x, heads=4, out=out)
        graph = stream.end_capture()
    x[...] = cuda.asarray(host)
    cuda.cuda.Device().synchronize()

    graph.launch(stream)
    stream.synchronize()

    np.testing.assert_array_equal(cuda.asnumpy(out), add_qkv_bias(host, heads=4))
