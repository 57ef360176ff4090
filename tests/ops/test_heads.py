"""Heads: each element where its definition says, with its bias, rounded once."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from cupynorm import add_qkv_bias, merge_heads, split_heads
from cupynorm.runtime import devices

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
# leading axes, heads, seq, head size: ones, odd, no multiple of a vector, a batch of 1, no batch, several axes, empty
SHAPES = [
    ((1,), 1, 1, 1),
    ((2,), 3, 5, 7),
    ((1,), 12, 4, 64),
    ((), 2, 3, 33),
    ((2, 3), 4, 1, 5),
    ((2,), 3, 0, 4),
    ((0,), 3, 2, 4),
]
shapes = pytest.mark.parametrize(("leading", "heads", "seq", "size"), SHAPES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(0, 3, shape).astype(dtype)


def by_definition(x, heads):
    """One element after the other, as the docstring says."""
    *leading, seq, hidden = x.shape
    size = hidden // heads
    y = np.empty((*leading, heads, seq, size), x.dtype)
    for index in itertools.product(*map(range, leading)):
        for h, s, d in itertools.product(range(heads), range(seq), range(size)):
            y[(*index, h, s, d)] = x[(*index, s, h * size + d)]
    return y


@shapes
def test_every_element_finds_its_head(leading, heads, seq, size):
    x = numbers(*leading, seq, heads * size)

    np.testing.assert_array_equal(split_heads(x, heads=heads), by_definition(x, heads))


@shapes
def test_queries_keys_and_values_are_split_together(leading, heads, seq, size):
    qkv, bias = numbers(*leading, seq, 3 * heads * size), numbers(3 * heads * size, seed=1)

    together = add_qkv_bias(qkv, bias, heads=heads)

    assert together.shape == (3, *leading, heads, seq, size)
    parts = zip(np.split(qkv, 3, axis=-1), np.split(bias, 3), strict=True)
    for got, (part, shift) in zip(together, parts, strict=True):
        np.testing.assert_array_equal(got, by_definition(part + shift, heads))


@shapes
def test_merging_undoes_splitting(leading, heads, seq, size):
    x = numbers(*leading, seq, heads * size)

    np.testing.assert_array_equal(merge_heads(split_heads(x, heads=heads)), x)


@by_dtype
@pytest.mark.parametrize("of_bias", DTYPES, ids=str)
def test_a_sum_is_rounded_once(dtype, of_bias):
    x, bias = numbers(50, 64, dtype=dtype), (numbers(64, seed=1) * 1e-3).astype(of_bias)

    y = split_heads(x, bias, heads=4)

    exact = x.astype(np.longdouble) + bias.astype(np.longdouble)
    assert y.dtype == dtype
    got = merge_heads(y)
    for step in (-np.inf, np.inf):  # no neighbour is nearer
        beside = np.nextafter(got, np.array(step, dtype))
        assert (
            np.abs(got.astype(np.longdouble) - exact) <= np.abs(beside.astype(np.longdouble) - exact)
        ).all()


@by_dtype
def test_the_result_has_the_dtype_that_was_asked_for(dtype):
    x, bias = numbers(2, 5, 12), numbers(12, seed=1)

    for y in (split_heads(x, bias, heads=3, dtype=dtype), split_heads(x, bias, heads=3, dtype=dtype.name)):
        assert y.dtype == dtype
        expected = by_definition(x.astype(np.float64) + bias, 3).astype(dtype)
        np.testing.assert_array_equal(y.astype(np.float64), expected.astype(np.float64))
    assert merge_heads(y, dtype=np.float64).dtype == np.float64


def test_what_is_only_moved_keeps_its_bits():
    x = np.array([[-0.0, np.nan, np.inf, 1e-45]], np.float32)

    assert split_heads(x, heads=2).tobytes() == x.tobytes()
    assert np.signbit(split_heads(x, heads=2, dtype=np.float16)[0, 0, 0])


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x[:, ::2],
        lambda x: x[::-1],
        lambda x: x[..., ::-1],
        np.asfortranarray,
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: x.swapaxes(0, 1),
    ],
    ids=["every other", "backwards", "columns backwards", "fortran", "broadcast", "transposed"],
)
def test_any_strides_will_do(of):
    x, bias = of(numbers(4, 6, 12)), numbers(12, seed=1)

    np.testing.assert_array_equal(
        split_heads(x, bias, heads=3), split_heads(np.ascontiguousarray(x), bias, heads=3)
    )
    np.testing.assert_array_equal(
        merge_heads(x.reshape(*x.shape, 1)), merge_heads(np.ascontiguousarray(x).reshape(*x.shape, 1))
    )


@pytest.mark.parametrize("shape", [(), (1,), (36,)])
def test_a_bias_broadcasts(shape):
    qkv, bias = numbers(2, 5, 36), numbers(*shape, seed=1)

    y = add_qkv_bias(qkv, bias, heads=3)

    np.testing.assert_array_equal(y, add_qkv_bias(qkv + bias, heads=3))


def test_the_result_may_be_written_where_it_is_wanted():
    qkv, bias = numbers(2, 5, 36), numbers(36, seed=1)
    out, whole = np.empty((3, 2, 3, 5, 4), np.float16), np.empty((10, 12))

    assert add_qkv_bias(qkv, bias, heads=3, out=out) is out
    np.testing.assert_array_equal(out, add_qkv_bias(qkv, bias, heads=3, dtype=np.float16))
    merge_heads(out[0], out=whole.reshape(2, 5, 12))
    np.testing.assert_array_equal(whole.reshape(2, 5, 12), merge_heads(out[0]))


X, ALL = numbers(2, 5, 12), numbers(2, 5, 36)
MEMORY = numbers(240)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: split_heads(X, heads=0), ValueError, "heads is 0: give an integer of 1 or more"),
        (lambda: split_heads(X, heads=5), ValueError, "heads is 5: the 12 columns of x are no multiple of 5"),
        (lambda: split_heads(X, heads=0), ValueError, "heads is 0"),
        (lambda: split_heads(X, heads=-3), ValueError, "heads is -3"),
        (lambda: split_heads(X, heads=2.0), TypeError, "heads is 2.0: give an integer"),
        (lambda: add_qkv_bias(X, heads=3), ValueError, r"12 columns of qkv are no multiple of 3 \* 3"),
        (lambda: split_heads(X[0, 0], heads=1), ValueError, r"x has shape \(12,\)"),
        (lambda: merge_heads(X[0]), ValueError, r"x has shape \(5, 12\): its last three axes"),
        (
            lambda: split_heads(X, X[0, 0, :5], heads=3),
            ValueError,
            r"bias has shape \(5,\), the last axis of x",
        ),
        (lambda: add_qkv_bias(ALL, X[0, 0], heads=3), ValueError, r"last axis of qkv has \(36,\)"),
        (lambda: split_heads(X, X[0], heads=3), ValueError, "bias has shape"),
        (lambda: split_heads(X.astype(int), heads=3), TypeError, "x: dtype int64 is not supported"),
        (lambda: split_heads(X, np.ones(12, int), heads=3), TypeError, "bias: dtype int64"),
        (lambda: split_heads(X, heads=3, dtype="int8"), TypeError, "int8 is not supported"),
        (lambda: split_heads(X.tolist(), heads=3), TypeError, "x is a builtins.list"),
        (lambda: split_heads(X, [0] * 12, heads=3), TypeError, "bias is a builtins.list"),
        (lambda: merge_heads(np.ma.masked_array(X)), TypeError, "masked"),
        (lambda: split_heads(X, heads=3, out=np.empty_like(X)), ValueError, "out has shape"),
        (
            lambda: split_heads(X, heads=3, out=np.empty((2, 3, 5, 4)), dtype="float32"),
            ValueError,
            "out has dtype float64, dtype asks for float32",
        ),
        (
            lambda: split_heads(X, heads=3, out=np.empty((2, 3, 4, 5), np.float32).swapaxes(2, 3)),
            ValueError,
            "must be contiguous",
        ),
        (
            lambda: split_heads(
                MEMORY[:120].reshape(2, 5, 12), heads=3, out=MEMORY[60:180].reshape(2, 3, 5, 4)
            ),
            ValueError,
            "out and x share memory",
        ),
        (
            lambda: split_heads(X, MEMORY[:12], heads=3, out=MEMORY[:120].reshape(2, 3, 5, 4)),
            ValueError,
            "out and bias share memory",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_an_out_that_nobody_may_write_is_refused():
    out = np.empty((2, 3, 5, 4), np.float32)
    out.flags.writeable = False

    with pytest.raises(ValueError, match="read-only"):
        split_heads(X, heads=3, out=out)


def test_arrays_of_both_kinds_are_refused_in_words(monkeypatch):
    on_device = types.SimpleNamespace(shape=(12,))
    monkeypatch.setattr(devices, "is_device_array", lambda array: array is on_device)

    with pytest.raises(TypeError, match="x is a NumPy array .* and bias is a CuPy array"):
        split_heads(X, on_device, heads=3)
