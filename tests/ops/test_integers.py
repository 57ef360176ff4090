"""Integers and other byte orders as input: converted as they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynorm import (
    add_layer_norm,
    layer_norm,
    log_softmax,
    logsumexp,
    moments,
    normalize,
    rescale,
    rms_norm,
    softmax,
    standardize,
)
from cupynorm._dtypes import INTEGERS
from tests.gradient_calls import WIDTHS
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

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


def test_other_integers_and_sums_are_refused_with_a_remedy() -> None:
    for dtype in (np.int64, np.uint32):
        with pytest.raises(
            TypeError, match=r"use .*uint16, int32; x.astype\(\"float32\"\) is a copy that is"
        ):
            standardize(np.zeros((2, 3), dtype))
    with pytest.raises(TypeError, match="x: dtype uint8 is not supported"):
        add_layer_norm(np.zeros((2, 3), np.uint8), np.zeros((2, 3), np.float32))
