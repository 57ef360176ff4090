"""Integers and other byte orders as input: converted as they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynorm import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    cross_entropy,
    fuse,
    layer_norm,
    log_softmax,
    logsumexp,
    moments,
    normalize,
    rescale,
    rms_norm,
    softmax,
    softmax_backward,
    standardize,
)
from cupynorm._dtypes import INTEGERS
from tests.gradient_calls import WIDTHS
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

MULTIPLIED = fuse(layer_norm, load=lambda x, r: x * 0.5 + r, store=lambda y, s: (y * s, y), keep_loaded=True)
SCALED = fuse(softmax, store=lambda y, s: y * s)

CALLS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, **options: layer_norm(x, 2.0, **options),
    "rms_norm": rms_norm,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "standardize": standardize,
    "normalize": normalize,
    "rescale": rescale,
    "moments": lambda x, **options: moments(x, order=4, **options)[3],
}


def integers(dtype: str, rows: int, cols: int) -> Any:
    most = 2 if dtype == "bool" else min(20000, np.iinfo(dtype).max)
    return np.random.default_rng(cols).integers(0, most, (rows, cols)).astype(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", CALLS)
def test_integers_give_what_their_numbers_give(name: str, dtype: str) -> None:
    x, call = integers(dtype, 3, 5000), CALLS[name]
    kind = np.float64 if dtype == "int32" else np.float32

    y = call(x)

    assert y.dtype == kind
    np.testing.assert_array_equal(y, call(x.astype(kind)))
    assert call(x, dtype=np.float16).dtype == np.float16


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i2", "i4"])
@pytest.mark.parametrize("name", CALLS)
def test_other_byte_orders(name: str, dtype: str) -> None:
    native = integers("int16", 3, 5000).astype(dtype)
    other = native.astype(native.dtype.newbyteorder())

    y = CALLS[name](other)

    assert y.dtype.isnative
    np.testing.assert_array_equal(y, CALLS[name](native))


@pytest.mark.parametrize(
    ("name", "dtype", "variant"),
    [
        ("layer_norm", "uint8", "block"),
        ("softmax", "uint8", "warp"),
        ("log_softmax", "int8", "cluster"),
        ("logsumexp", "uint16", "split"),
        ("standardize", "uint8", "uncached"),
        ("rescale", "int32", "block"),
        ("moments", "uint8", "cluster"),
    ],
)
def test_a_device_converts_what_it_loads(name: str, dtype: str, variant: str, simulated: Any) -> None:
    cols = WIDTHS[variant][0] // (2 if dtype == "int32" else 1)
    x = integers(dtype, 3, cols)

    y = CALLS[name](simulated.cupy.asarray(x), plan=variant)

    expected = CALLS[name](x)
    assert y.dtype == expected.dtype
    np.testing.assert_allclose(y.get(), expected, 2e-5, 2e-5)


@pytest.mark.parametrize("name", ["softmax", "standardize", "moments"])
def test_masks_of_integers(name: str, simulated: Any) -> None:
    x, lengths = integers("uint8", 3, 77), np.array([2, 77, 40])
    cupy = simulated.cupy

    y = CALLS[name](cupy.asarray(x), lengths=cupy.asarray(lengths)).get()

    np.testing.assert_allclose(y, CALLS[name](x, lengths=lengths), 2e-5, 2e-5)
    np.testing.assert_allclose(y, CALLS[name](x.astype(np.float32), lengths=lengths), 2e-5, 2e-5)


def test_int32_is_exact() -> None:
    x = 2**30 + np.arange(4, dtype=np.int32)

    assert standardize(x).tolist() == standardize(np.arange(4.0)).tolist()


def test_other_integers_and_ops_refuse_with_a_remedy() -> None:
    for dtype in (np.int64, np.uint32):
        with pytest.raises(
            TypeError, match=r"use .*uint16, int32; x.astype\(\"float64\"\) is a copy that is"
        ):
            standardize(np.zeros((2, 3), dtype))
        with pytest.raises(TypeError, match=r"residual: dtype .*residual.astype\(\"float64\"\) is a copy"):
            add_rms_norm(np.zeros((2, 3), np.uint8), np.zeros((2, 3), dtype))
    for other, remedy in (("O", "x.astype"), ("m8[s]", "x.astype"), ("M8[s]", "x.astype"), ("c8", "x.real")):
        with pytest.raises(TypeError, match=rf"is not supported: use .*; {remedy}"):
            standardize(np.zeros((2, 3), other))
    x = np.zeros((2, 3), np.uint8)
    for call in (lambda x: bias_gelu(x, 1.0), lambda x: softmax_backward(np.zeros((2, 3)), x)):
        with pytest.raises(
            TypeError, match=r"dtype uint8 is not supported: .*\.astype\(\"float32\"\) is a copy that is"
        ):
            call(x)


ALIKE = np.random.default_rng(3).integers(0, 100, (3, 77), np.uint8)
LABELS = np.array([76, 0, 5])
SEVERAL: dict[str, Callable[..., Any]] = {  # x, an array of its shape, labels
    "fuse": lambda x, r, _: MULTIPLIED(x, r, 2.0),
    "fuse, an operand": lambda x, r, _: SCALED(x, r),
    "add_layer_norm": lambda x, r, _: add_layer_norm(x, r, 2.0, return_stats=True),
    "add_rms_norm": lambda x, r, _: add_rms_norm(x, r, alpha=0.5, dropout=0.25, seed=3),
    "cross_entropy": lambda x, _, labels: cross_entropy(x, labels),
    "cross_entropy, gradient": lambda x, _, labels: cross_entropy(
        x, labels, label_smoothing=0.25, ignore_index=0, return_grad=True
    ),
    "logsumexp, b": lambda x, r, _: logsumexp(x, b=r, return_sign=True),
    "standardize, weights": lambda x, r, _: standardize(x, weights=r),
}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", SEVERAL)
def test_calls_of_several_arrays(name: str, dtype: str, simulated: Any) -> None:
    x, call, to = integers(dtype, 3, 77), SEVERAL[name], simulated.cupy.asarray
    kind = np.float64 if dtype == "int32" else np.float32

    found, device = call(x, ALIKE, LABELS), call(to(x), to(ALIKE), to(LABELS))

    expected = call(x.astype(kind), ALIKE, LABELS)
    swapped = call(x.astype(x.dtype.newbyteorder()), ALIKE.astype(">i2"), LABELS.astype(">i4"))
    for each in zip(
        *(one if isinstance(one, tuple) else (one,) for one in (expected, found, swapped, device)),
        strict=True,
    ):
        wanted, ours, other, there = each
        assert ours.dtype == there.dtype == wanted.dtype
        np.testing.assert_array_equal(ours, wanted)
        np.testing.assert_array_equal(other, wanted)
        np.testing.assert_allclose(there.get(), wanted, 2e-5, 2e-5)


def test_a_label_finds_its_int32_exactly(simulated: Any) -> None:
    x = 2**30 + np.array([[3, 1, 2], [1, 3, 1]], np.int32)
    labels = np.array([0, 0])

    loss = cross_entropy(simulated.cupy.asarray(x), simulated.cupy.asarray(labels)).get()

    np.testing.assert_allclose(loss, cross_entropy(x - 2**30, labels), rtol=1e-12)


def test_operands_may_be_any_integers(simulated: Any) -> None:
    x = np.log(np.arange(1.0, 9.0)).reshape(2, 4)
    for dtype in (np.int64, np.uint32, bool):
        b = np.array([1, 0, 1, 1]).astype(dtype)
        expected = np.log((np.exp(x) * b).sum(1))
        to = simulated.cupy.asarray

        np.testing.assert_allclose(logsumexp(x, b=b), expected, rtol=1e-12)
        np.testing.assert_allclose(logsumexp(to(x), b=to(b)).get(), expected, rtol=1e-12)
        np.testing.assert_allclose(
            standardize(to(x), weights=to(b)).get(), standardize(x, weights=b), rtol=1e-12, atol=1e-12
        )


def test_the_gradient_of_a_fusion_of_integers(simulated: Any) -> None:
    x, to = integers("uint8", 3, 77), simulated.cupy.asarray
    dy = np.random.default_rng(0).standard_normal((3, 77)).astype(np.float32)

    dx = SCALED.backward(dy, x, ALIKE).x

    np.testing.assert_array_equal(dx, SCALED.backward(dy, x.astype(np.float32), ALIKE).x)
    np.testing.assert_allclose(SCALED.backward(to(dy), to(x), to(ALIKE)).x.get(), dx, 2e-4, 2e-4)
