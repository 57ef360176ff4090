"""Rows that are neighbours in memory, along other axes than the last: as rows of their own, and in the same bits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog.bounds import TOLERANCES
from cupynorm.host import reference, slabs
from cupynorm.host.rows import rows_of
from cupynorm.host.space import Space

CALLS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, g, **how: cupynorm.layer_norm(x, g, 0.5, return_stats=True, **how),
    "rms_norm": lambda x, g, **how: cupynorm.rms_norm(x, g, return_stats=True, **how),
    "softmax": lambda x, _, **how: (cupynorm.softmax(x, **how),),
    "log_softmax": lambda x, _, **how: (cupynorm.log_softmax(x, **how),),
    "logsumexp": lambda x, _, **how: (cupynorm.logsumexp(x, **how),),
    "standardize": lambda x, _, **how: cupynorm.standardize(x, return_stats=True, **how),
    "normalize": lambda x, _, **how: cupynorm.normalize(x, 1, return_norms=True, **how),
    "normalize, largest": lambda x, _, **how: cupynorm.normalize(x, np.inf, return_norms=True, **how),
    "rescale": lambda x, _, **how: (cupynorm.rescale(x, -1.0, 3.0, **how),),
    "moments": lambda x, _, **how: tuple(cupynorm.moments(x, order=4, **how)),
}
SHAPES = {  # and the normalised axes: one, the middle one, one with two inner axes, two
    "columns": ((130, 70), 0),
    "narrow": ((700, 3), 0),
    "wide": ((5, 600), 0),
    "middle": ((3, 77, 40), 1),
    "two inner": ((90, 4, 5), 0),
    "two": ((6, 50, 9), (0, 1)),
    "two apart": ((6, 4, 50, 9), (0, 2)),
}
BLOCKS = (64, 1 << 12, 1 << 17)


def normal(*shape: int, dtype: str = "float64", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CALLS)
def test_they_give_what_rows_of_their_own_give(
    name: str, shape: str, dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    extents, axis = SHAPES[shape]
    x = normal(*extents, dtype=dtype)
    axes = axis if isinstance(axis, tuple) else (axis,)
    gamma = normal(*(extents[each] for each in axes), dtype=dtype, seed=1)
    last = np.ascontiguousarray(np.moveaxis(x, axes, range(-len(axes), 0)))

    found = CALLS[name](x, gamma, axis=axis)

    expected = CALLS[name](last, gamma, axis=tuple(range(-len(axes), 0)))
    for each, want in zip(found, expected, strict=True):
        got = np.moveaxis(each, axes, range(-len(axes), 0)) if each.ndim == x.ndim else each
        assert got.dtype == want.dtype
        tolerance = 4 * TOLERANCES[got.dtype.name]
        np.testing.assert_allclose(got.astype(float), want.astype(float), tolerance, tolerance)


@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, gamma = normal(300, 700, dtype="float32"), normal(300, dtype="float32")
    whole = CALLS[name](x, gamma, axis=0)

    monkeypatch.setenv("CUPYNORM_THREADS", "3")
    with_threads = CALLS[name](x, gamma, axis=0)
    monkeypatch.delenv("CUPYNORM_THREADS")
    parts = [CALLS[name](x[:, at], gamma, axis=0) for at in (slice(0, 5), slice(5, 650), slice(650, 700))]

    for number, each in enumerate(whole):
        assert np.array_equal(with_threads[number], each)
        assert np.array_equal(np.concatenate([part[number] for part in parts], axis=-1), each)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["layer_norm", "softmax", "log_softmax", "standardize", "rescale"])
def test_in_place(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    x, gamma = normal(200, 90, dtype="float32"), normal(200, dtype="float32")
    expected = CALLS[name](x, gamma, axis=0)[0]

    found = CALLS[name](x, gamma, axis=0, out=x)[0]

    assert found is x
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", [each for each in CALLS if each != "moments"])
def test_rows_that_are_computed_once_more(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    x, gamma = normal(2, 90, 40, dtype="float32"), np.ones(90, np.float32)
    x[0, :, 3] *= np.float32(1e30)
    x[1, :, 7] *= np.float32(1e-30)
    x[1, 5, 8], x[0, 5, 9], x[:, :, 11] = np.nan, np.inf, 1000

    found = CALLS[name](x, gamma, axis=1)

    expected = CALLS[name](np.ascontiguousarray(x.transpose(0, 2, 1)), gamma)
    for each, want in zip(found, expected, strict=True):
        got = each.transpose(0, 2, 1) if each.ndim == want.ndim == x.ndim else each
        np.testing.assert_allclose(got, want, 4e-6, 4e-6 * (np.abs(want) < 1e20).max())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [cupynorm.softmax_backward, cupynorm.log_softmax_backward])
def test_gradients_of_softmax(function: Any, shape: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    extents, axis = SHAPES[shape]
    dy, y = (normal(*extents, dtype="float32", seed=seed) for seed in (1, 2))
    wanted = function(dy.astype(np.float64), y.astype(np.float64), axis=axis)

    dx = function(dy, y, axis=axis)
    in_place = function(dy, y.copy(), axis=axis, out=dy)

    np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(in_place, dx, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert isinstance(axis, tuple) or np.array_equal(in_place, dx)


@pytest.mark.parametrize("cols", [1, 7, 8, 63, 64, 71, 127, 128, 135, 200, 1024, 1100])
@pytest.mark.parametrize("rows", [1, 3, 600])
def test_sums_are_those_of_rows(rows: int, cols: int) -> None:
    values = normal(2, cols, rows, dtype="float32")

    space = Space(values.dtype)
    found = tuple(slabs.column_sums(values, each, None, space) for each in (None, values))

    wide = values.astype(np.float64)
    scale = np.abs(wide).sum(1).reshape(-1)
    np.testing.assert_array_less(np.abs(found[0] - wide.sum(1).reshape(-1)), 4e-7 * scale)
    np.testing.assert_allclose(found[1], np.square(wide).sum(1).reshape(-1), 5e-7)
    again = rows_of(np.ascontiguousarray(values[0].T), np.dtype(np.float32)).sum()
    np.testing.assert_allclose(found[0][:rows], again, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("outer", "cols", "row", "together"),
    [
        (1, 1000, 4000, 2),
        (4, 1000, 1000, 8),
        (4, 1000, 1200, 5),
        (4, 7, 3000, 2),
        (1, 3, 100, 3),
        (4, 9, 9000, 1),
    ],
)
def test_runs_are_as_long_as_a_cache_holds(outer: int, cols: int, row: int, together: int) -> None:
    assert slabs._together(outer, cols, row) == together


def test_what_is_looked_at_more_than_once_is_kept_where_rows_are_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    step_rows = slabs.Slab.step_rows
    monkeypatch.setattr(slabs.Slab, "step_rows", lambda *given: (steps.append(1), step_rows(*given))[1])
    x = normal(200, 400, dtype="float32")  # more than is computed without a look at its blocks

    kept = cupynorm.moments(x, axis=0, order=4)
    of_one_piece = len(steps)
    monkeypatch.setattr(reference, "BLOCK", 1 << 8)
    passed = cupynorm.moments(x, axis=0, order=4)

    assert of_one_piece == 2  # an element, and what is left of the mean, subtracted once each
    for one, other in zip(kept, passed, strict=True):
        assert np.array_equal(one, other)


def test_what_lies_apart_is_seen() -> None:
    x = normal(4, 5, 6)

    assert slabs.lie_apart(x.transpose(1, 2, 0), 1)
    assert slabs.lie_apart(x.transpose(0, 2, 1), 1)
    assert not slabs.lie_apart(x, 1)
    assert not slabs.lie_apart(x[:, :, ::2].transpose(0, 2, 1), 1)
    assert not slabs.lie_apart(np.broadcast_to(x[:, :, :1], x.shape).transpose(0, 2, 1), 1)


def test_logsumexp_of_low_rows_and_moments_keep_no_copy() -> None:
    x = normal(2000, 1500, dtype="float32") - np.float32(900)

    cupynorm.logsumexp(x, axis=0)
    cupynorm.moments(x, axis=0)
    tracemalloc.start()
    y = cupynorm.logsumexp(x, axis=0)
    cupynorm.moments(x, axis=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    np.testing.assert_allclose(y, np.log(np.exp(x.astype(np.float64) + 900).sum(0)) - 900, 1e-6)
    assert peak < x.nbytes / 4


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1e-12), ("float32", 1e16), ("float64", 1e-180), ("float64", 1e120)]
)
def test_skewness_and_kurtosis_of_powers_that_vanish_or_overflow(dtype: str, scale: float, axis: int) -> None:
    x = normal(3, 90, 70, dtype="float64")
    x[1] += 5.0
    wanted = cupynorm.moments(x, axis=axis, order=4)

    found = cupynorm.moments((x * scale).astype(dtype), axis=axis, order=4)

    for each, exact in zip(found[2:], wanted[2:], strict=True):
        np.testing.assert_allclose(each, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_scale_that_has_lost_digits_does_not_turn_signs(axis: int) -> None:
    y = np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(2e-43)
    x = np.ascontiguousarray(np.stack([y, -y, y]) if axis == -1 else np.stack([y, -y, y], axis=1))

    found, scales = cupynorm.rms_norm(x, eps=1.0, axis=axis, quantize="int8")

    assert (scales > 0).all()
    assert (scales < 1e-44).all()
    assert np.array_equal(np.sign(found.astype(int)) * np.sign(x), np.abs(np.sign(found)))
    assert (found.min(), found.max()) == (-128, 127)
