"""Masked softmax on the host: all combinations against the formula, other libraries' conventions, and bad masks."""

from __future__ import annotations

import itertools
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupynorm
from cupynorm import log_softmax, softmax
from cupynorm._dtypes import DTYPES
from cupynorm.call import asking
from cupynorm.call.masks import Asked, Mask, MaskOptions, mask_of
from cupynorm.host import reference
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

Array = np.ndarray[Any, Any]
DOCS = Path(__file__).parents[2] / "docs" / "masks.md"


def keeps(
    index: tuple[int, ...],
    cols: int,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    causal: Any = False,
    window: Any = None,
) -> bool:
    """Say whether one element is kept, by definition. where and lengths have x's shape; causal: an offset or False."""
    *row, j = index
    if where is not None and not where[index]:
        return False
    if lengths is not None:
        n = lengths[tuple(row)]
        if j < cols - n if left_padded else j >= n:
            return False
    offset = 0 if causal is True or causal is False else causal
    if causal is not False and j > row[-1] + offset:
        return False
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        if left is not None and j < row[-1] + offset - left:
            return False
        if right is not None and j > row[-1] + offset + right:
            return False
    return True


def defined(x: Array, kept: Array, scale: float = 1.0, bias: Any = None) -> tuple[Array, Array]:
    """Return softmax and log_softmax of the kept elements of every row, by sums over them alone."""
    y, log = np.zeros(x.shape), np.full(x.shape, -np.inf)
    added = np.zeros(x.shape) if bias is None else np.broadcast_to(bias, x.shape)
    for row in np.ndindex(x.shape[:-1]):
        at = [*row]
        z = {j: float(x[(*at, j)]) * scale + float(added[(*at, j)]) for j in np.flatnonzero(kept[row])}
        if not z:
            continue
        total = math.fsum(math.exp(each - max(z.values())) for each in z.values())
        for j, each in z.items():
            log[(*at, j)] = each - max(z.values()) - math.log(total)
            y[(*at, j)] = math.exp(each - max(z.values())) / total
    return y, log


SHAPES = [(2, 3, 5, 7), (3, 4), (4, 1), (1, 1), (0, 4, 3), (2, 0, 3), (6, 9)]
CAUSAL = [False, True, 2, -1]


def banded(causal: bool | int) -> dict[str, Any]:
    """Return the keyword for one of CAUSAL."""
    return {"causal" if isinstance(causal, bool) else "causal_offset": causal}


WINDOW = [None, 1, (2, 0), (None, 1), (0, None)]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [None, "right", "left"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_combination_is_the_formula_and_what_is_dropped_never_leaks(
    shape: tuple[int, ...], lengths: Any, causal: Any
) -> None:
    random = np.random.default_rng(len(shape))
    cols = shape[-1]
    count = random.integers(0, cols + 1, shape[:-1])
    padding: dict[str, Any] = {}
    if lengths is not None:
        padding = {"lengths": count.astype(np.int16), "left_padded": lengths == "left"}
    wheres = [None, random.random(shape) < 0.6, random.integers(0, 3, (shape[-2], 1), dtype=np.uint8)]
    for where, window, biased in itertools.product(wheres, WINDOW, [False, True]):
        x = 3 * random.standard_normal(shape)
        bias = random.standard_normal(shape) if biased else None
        scale = 0.75 if biased else None
        full = None if where is None else np.broadcast_to(where, shape)
        kept = np.array(
            [
                keeps(index, cols, full, causal=causal, window=window, **padding)
                for index in np.ndindex(shape)
            ],
            dtype=bool,
        ).reshape(shape)
        y, log = defined(x, kept, scale or 1.0, bias)
        x[~kept] = random.choice([np.nan, np.inf, -np.inf], np.count_nonzero(~kept))
        if bias is not None:
            bias[~kept] = np.nan
        masks: dict[str, Any] = {
            "where": where,
            **banded(causal),
            "window": window,
            "bias": bias,
            "scale": scale,
        }

        got, got_log = softmax(x, **masks, **padding), log_softmax(x, **masks, **padding)

        np.testing.assert_allclose(got, y, rtol=1e-12, atol=0)
        np.testing.assert_allclose(got_log, log, rtol=1e-12, atol=1e-13)
        assert not got[~kept].any()
        assert np.isneginf(got_log[~kept]).all()


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 21), (40,), (2, 5, 7)])
def test_every_cut_into_blocks_gives_the_same(
    function: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    x, bias = random.standard_normal(shape), random.standard_normal(shape[-1:])
    options: dict[str, Any] = {
        "where": random.random(shape) < 0.7,
        "lengths": random.integers(0, shape[-1] + 1, shape[:-1]),
        "bias": bias,
        "scale": -0.5,
    }
    if len(shape) > 1:
        options |= {"causal_offset": shape[-1] // 2, "window": (9, None)}
    whole = function(x, **options)
    monkeypatch.setattr(reference, "BLOCK", 16)

    pieces = function(x, **options)
    inplace = function(x, **options, out=x)

    np.testing.assert_allclose(pieces, whole, rtol=1e-13)
    assert inplace is x
    np.testing.assert_array_equal(inplace, pieces)


@pytest.mark.parametrize("axis", [(-2, -1), (0, 1, 2), (1, 2)])
def test_where_bias_and_scale_go_over_several_axes(axis: tuple[int, ...]) -> None:
    random = np.random.default_rng(2)
    x, bias = random.standard_normal((3, 4, 5)), random.standard_normal((4, 1))
    where = random.random((3, 1, 5)) < 0.6
    flat = (*x.shape[: -len(axis)], -1)

    y = softmax(x, axis=axis, where=where, bias=bias, scale=2)

    expected, _ = defined((2 * x + bias).reshape(flat), np.broadcast_to(where, x.shape).reshape(flat))
    np.testing.assert_allclose(y.reshape(flat), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("bias_dtype", sorted(DTYPES))
def test_any_dtypes_and_one_rounding(dtype: str, bias_dtype: str) -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((9, 33)).astype(DTYPES[dtype])
    bias = random.standard_normal((9, 33)).astype(DTYPES[bias_dtype])

    y = softmax(x, bias=bias, causal=True, scale=0.125)

    assert y.dtype == DTYPES[dtype]
    kept = np.arange(33) <= np.arange(9)[:, None]
    assert_close(y, defined(x, kept, 0.125, bias)[0])


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_lengths_may_have_any_integer_dtype(code: str) -> None:
    x = np.random.default_rng(4).standard_normal((3, 5))
    lengths = np.array([0, 5, 2], dtype=code)

    y = softmax(x, lengths=lengths)

    np.testing.assert_allclose(y, defined(x, np.arange(5) < lengths[:, None])[0], rtol=1e-12)


def test_lengths_broadcast_over_heads_and_queries() -> None:
    x = np.random.default_rng(5).standard_normal((2, 3, 4, 6))
    lengths = np.array([2, 6])

    y = softmax(x, lengths=lengths[:, None, None])

    np.testing.assert_array_equal(y, softmax(x, lengths=np.broadcast_to(lengths[:, None, None], (2, 3, 4))))
    np.testing.assert_array_equal(y[..., 2:][0], 0)
    np.testing.assert_array_equal(y[1], softmax(x[1]))


@pytest.mark.parametrize(
    "nothing", [{"where": np.zeros((), bool)}, {"lengths": np.zeros((), int)}, {"causal_offset": -9}]
)
def test_a_row_with_nothing_kept_is_zero_and_minus_infinity(nothing: dict[str, Any]) -> None:
    x = np.full((3, 4), np.nan, np.float32)

    assert softmax(x, **nothing).tolist() == np.zeros((3, 4)).tolist()
    assert log_softmax(x, **nothing).tolist() == np.full((3, 4), -np.inf).tolist()


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_kept_nan_or_infinity_is_of_its_row_alone_and_leaves_what_is_dropped(
    function: Any, value: float
) -> None:
    x = np.zeros((2, 4))
    x[0, 1] = value
    where = np.array([True, True, True, False])

    with np.errstate(all="raise"):
        y = function(x, where=where)

    dropped = 0 if function is softmax else -np.inf
    assert np.isnan(y[0, :3]).all() if function is softmax or np.isnan(value) else np.isnan(y[0, 1])
    assert y[:, 3].tolist() == [dropped] * 2
    assert np.isfinite(y[1, :3]).all()


def test_a_row_that_keeps_only_minus_infinity_is_nan_where_it_is_kept() -> None:
    x = np.full((1, 3), -np.inf)

    y = softmax(x, where=np.array([True, True, False]))
    biased = softmax(np.zeros((1, 3)), bias=np.full(3, -np.inf))

    assert np.isnan(y).tolist() == [[True, True, False]]
    assert np.isnan(biased).all()


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize(
    "all_kept",
    [
        {"where": np.ones((), bool)},
        {"lengths": np.array([7])},
        {"causal_offset": 6},
        {"window": 10**30},
        {"window": (None, None)},
        {"scale": 1},
        {"bias": np.zeros(7, np.float16)},
    ],
    ids=str,
)
def test_a_mask_that_keeps_all_changes_no_bit(function: Any, all_kept: Any) -> None:
    x = np.random.default_rng(6).standard_normal((5, 7)).astype(np.float32)
    x[2] = -np.inf

    assert function(x, **all_kept).tobytes() == function(x).tobytes()


def test_causal_is_true_or_false_and_its_offset_has_a_name_of_its_own() -> None:
    x = np.zeros((2, 2))

    assert softmax(x, causal=True).tolist() == [[1, 0], [0.5, 0.5]]
    assert softmax(x, causal=np.True_).tolist() == [[1, 0], [0.5, 0.5]]
    assert softmax(x, causal=False).tolist() == softmax(x, causal=np.False_).tolist() == [[0.5, 0.5]] * 2
    assert softmax(x, causal_offset=0).tolist() == [[1, 0], [0.5, 0.5]]
    assert softmax(x, causal_offset=np.int8(-1)).tolist() == [[0, 0], [1, 0]]
    assert softmax(x, causal=True, causal_offset=-1).tolist() == [[0, 0], [1, 0]]
    assert softmax(x, causal_offset=1).tolist() == softmax(x, causal_offset=None).tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("causal", [0, 1, 3, -2, np.int64(1), np.uint8(0)])
def test_a_number_as_causal_is_refused_and_the_error_has_the_new_name(function: Any, causal: Any) -> None:
    message = (
        f"causal is {re.escape(repr(causal))}: use True or False; .*offset .* causal_offset={int(causal)}"
    )
    with pytest.raises(TypeError, match=message):
        function(X, causal=causal)


def test_no_mask_is_stretched() -> None:
    x = np.zeros((256, 64, 128), np.float16)  # as float64 16 MiB
    out = np.empty_like(x)
    where, bias = np.ones((64, 1), bool), np.zeros((256, 1, 1), np.float32)
    lengths = np.full((256, 1), 100)
    tracemalloc.start()

    softmax(x, where=where, bias=bias, lengths=lengths, causal=True, out=out)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * reference.BLOCK * 8


class TestMask:
    """The description that host and device share."""

    @staticmethod
    def of(shape: tuple[int, ...], **keywords: Any) -> Mask:
        return mask_of(Asked(**keywords), shape, 1)

    @pytest.mark.parametrize(("causal", "window"), list(itertools.product(CAUSAL, WINDOW)))
    @pytest.mark.parametrize("left_padded", [False, True])
    def test_the_interval_holds_what_is_kept_and_no_more(
        self, causal: Any, window: Any, left_padded: bool
    ) -> None:
        lengths = np.array([0])
        mask = self.of((9, 6), lengths=lengths, left_padded=left_padded, window=window, **banded(causal))

        for query, length in itertools.product(range(9), range(7)):
            begin, end = mask.interval(query, length)

            expected = [
                j
                for j in range(6)
                if keeps(
                    (query, j),
                    6,
                    lengths=np.full(9, length),
                    left_padded=left_padded,
                    causal=causal,
                    window=window,
                )
            ]
            assert list(range(begin, end)) == expected
            assert 0 <= begin <= end <= 6

    @pytest.mark.parametrize(("length", "taken"), [(-3, 0), (0, 0), (4, 4), (9, 6), (2**62, 6)])
    def test_lengths_that_nobody_checked_are_clamped(self, length: int, taken: int) -> None:
        lengths = np.array([0])

        assert self.of((1, 6), lengths=lengths).interval(0, length) == (0, taken)
        assert self.of((1, 6), lengths=lengths, left_padded=True).interval(0, length) == (6 - taken, 6)

    def test_any_offset_fits_into_small_integers(self) -> None:
        mask = self.of((5, 6), causal_offset=-(10**40), window=10**40)

        assert (mask.low, mask.high) == (-5, -5)

    def test_arrays_are_stretched_by_strides_of_zero(self) -> None:
        where, bias = np.ones((3, 1, 5), bool), np.zeros((4, 1), np.float16)
        lengths = np.zeros((3, 1), np.int32)

        views = self.of((2, 3, 4, 5), where=where, bias=bias, lengths=lengths).views()

        assert views["where"].strides == (0, 5, 0, 1)
        assert views["bias"].strides == (0, 0, 2, 0)
        assert (views["lengths"].shape, views["lengths"].strides) == ((2, 3, 4), (0, 4, 0))

    def test_structure_is_told_from_arrays(self) -> None:
        assert not self.of((3, 4), where=np.ones(4, bool), bias=np.zeros(4), scale=2).is_structural
        assert self.of((3, 4), lengths=np.array([1])).is_structural
        assert self.of((3, 4), window=(None, 0)).is_structural


X = np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize("function", [softmax, log_softmax])
class TestBadMasks:
    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32, np.float16])
    def test_where_of_another_dtype(self, function: Any, dtype: Any) -> None:
        with pytest.raises(TypeError, match=f"where has dtype {np.dtype(dtype)}: use bool or uint8"):
            function(X, where=np.ones(4, dtype))

    @pytest.mark.parametrize("name", ["where", "bias"])
    @pytest.mark.parametrize("shape", [(3,), (5,), (2, 1), (1, 2, 3, 4), (4, 3, 4)])
    def test_what_does_not_broadcast(self, function: Any, name: str, shape: Any) -> None:
        array = np.ones(shape, bool if name == "where" else np.float32)
        message = re.escape(
            f"{name} has shape {shape}, x has (2, 3, 4): it must have that shape or broadcast"
        )
        with pytest.raises(ValueError, match=message):
            function(X, **{name: array})

    @pytest.mark.parametrize("shape", [(2,), (4,), (2, 3, 1), (2, 3, 4)])
    def test_lengths_that_do_not_broadcast(self, function: Any, shape: Any) -> None:
        message = re.escape(f"lengths has shape {shape}, x without its last axis has (2, 3)")
        with pytest.raises(ValueError, match=message):
            function(X, lengths=np.ones(shape, int))

    @pytest.mark.parametrize("dtype", [np.float32, bool, np.complex64])
    def test_lengths_of_another_dtype(self, function: Any, dtype: Any) -> None:
        with pytest.raises(TypeError, match="lengths has dtype .*: use an integer dtype"):
            function(X, lengths=np.ones(3, dtype))

    def test_lengths_of_another_byte_order(self, function: Any) -> None:
        with pytest.raises(TypeError, match=r'lengths has dtype >i4 .*: lengths.astype\("=i4"\) is a copy'):
            function(X, lengths=np.ones(3, ">i4"))

    @pytest.mark.parametrize("wrong", [-1, 5, 2**40, -(2**40)])
    def test_lengths_out_of_range(self, function: Any, wrong: int) -> None:
        with pytest.raises(
            ValueError, match=f"lengths holds {wrong}: the last axis of x has 4 elements, use 0 to 4"
        ):
            function(X, lengths=np.array([0, wrong, 4]))

    def test_bias_of_another_dtype(self, function: Any) -> None:
        with pytest.raises(TypeError, match="bias: dtype int64 is not supported: use .*float32"):
            function(X, bias=np.ones(4, int))

    @pytest.mark.parametrize("name", ["where", "lengths", "bias"])
    @pytest.mark.parametrize("what", [[True] * 4, 3, "mask"])
    def test_what_is_no_array(self, function: Any, name: str, what: Any) -> None:
        if name == "lengths" and isinstance(what, list):
            pytest.skip("a list of lengths is an array: test_natural_arguments")
        with pytest.raises(TypeError, match=f"{name} is a builtins.*: give a NumPy or a CuPy array"):
            function(X, **{name: what})

    @pytest.mark.parametrize("name", ["lengths", "causal", "causal_offset", "window"])
    def test_structure_is_along_one_axis(self, function: Any, name: str) -> None:
        value = {"lengths": np.ones(3, int), "causal": True, "causal_offset": 0, "window": 1}[name]
        with pytest.raises(ValueError, match=f"{name} goes along one axis: axis names 2 axes"):
            function(X, axis=(-2, -1), **{name: value})

    @pytest.mark.parametrize("name", ["causal", "causal_offset", "window"])
    def test_a_band_needs_queries(self, function: Any, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} is over two axes, .*: x has 1 axis"):
            function(X[0, 0], **{name: True if name == "causal" else 1})

    @pytest.mark.parametrize("causal", [1.0, "yes", None, np.ones(2)])
    def test_causal_that_is_no_boolean(self, function: Any, causal: Any) -> None:
        with pytest.raises(TypeError, match="causal is .*: use True or False"):
            function(X, causal=causal)

    @pytest.mark.parametrize("offset", [True, np.False_, 1.0, "2", np.ones(2)])
    def test_causal_offset_that_is_no_integer(self, function: Any, offset: Any) -> None:
        with pytest.raises(TypeError, match="causal_offset is .*: use an integer"):
            function(X, causal_offset=offset)

    @pytest.mark.parametrize(
        ("window", "error", "message"),
        [
            (-1, ValueError, "window is -1: sizes are 0 or more, and None keeps all keys"),
            ((3, -1), ValueError, "sizes are 0 or more"),
            ((1, 2, 3), ValueError, r"use one number, or \(left, right\)"),
            (1.5, TypeError, "window is 1.5: use an integer"),
            (True, TypeError, "window is True: use an integer"),
            ((1, "2"), TypeError, "use an integer, or"),
        ],
    )
    def test_windows(self, function: Any, window: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            function(X, window=window)

    @pytest.mark.parametrize(
        ("scale", "error"),
        [(np.nan, ValueError), (np.inf, ValueError), ("1", TypeError), (np.ones(1), TypeError)],
    )
    def test_scale(self, function: Any, scale: Any, error: Any) -> None:
        with pytest.raises(error, match="scale is .*: (it must be finite|give a number)"):
            function(X, scale=scale)

    def test_left_padded_without_lengths(self, function: Any) -> None:
        with pytest.raises(ValueError, match="left_padded says .*: give lengths, too"):
            function(X, left_padded=True)

    def test_out_over_a_mask(self, function: Any) -> None:
        bias = np.zeros((2, 3, 4), np.float32)
        where = bias.view(np.uint8)[..., ::4]
        with pytest.raises(ValueError, match="out and bias share memory$"):
            function(X, bias=bias, out=bias)
        with pytest.raises(ValueError, match="out and where share memory$"):
            function(X, where=where, out=bias)

    def test_a_device_array_beside_a_host_array(self, function: Any, simulated: Any) -> None:
        x = simulated.cupy.asarray(X)
        with pytest.raises(TypeError, match="x is a CuPy array .* and where is a NumPy array"):
            function(x, where=np.ones(4, bool))

    def test_a_device_array_is_checked(self, function: Any, simulated: Any) -> None:
        x = simulated.cupy.asarray(X)
        with pytest.raises(ValueError, match="window is -1"):
            function(x, window=-1)

        assert function(simulated.cupy.asarray(X[:0]), causal=True).shape == (0, 3, 4)


def scores(*shape: int) -> Array:
    return 4 * np.random.default_rng(7).standard_normal(shape)


class TestConventions:
    """What others compute, written out as they do, and how docs/masks.md says to ask for it here."""

    def test_masked_softmax_operator_with_a_mask_tensor_where_zero_keeps(self) -> None:
        x = scores(2, 3, 4, 5)
        mask = (np.random.default_rng(8).random((2, 1, 1, 5)) < 0.5).astype(np.float64)
        mask[1] = 1
        powers = np.exp(x * 0.3) * (mask == 0)
        total = powers.sum(-1, keepdims=True)
        theirs = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)

        np.testing.assert_allclose(softmax(x, where=mask == 0, scale=0.3), theirs, rtol=1e-12)

    def test_masked_softmax_operator_with_lengths_by_batch_and_query(self) -> None:
        x = scores(2, 3, 4, 5)
        lengths = np.array([[0, 1, 5, 3], [2, 2, 4, 0]], np.int32)
        powers = np.exp(x * 0.3)
        for b, q in np.ndindex(2, 4):
            powers[b, :, q, lengths[b, q] :] = 0
        total = powers.sum(-1, keepdims=True)
        theirs = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)

        np.testing.assert_allclose(softmax(x, lengths=lengths[:, None, :], scale=0.3), theirs, rtol=1e-12)

    def test_faster_transformer(self) -> None:
        x = scores(2, 3, 4, 4)
        mask = (np.random.default_rng(9).random((2, 4, 4)) < 0.7).astype(np.float64)
        mask[..., 0] = 1
        z = x * 0.125 + (1 - mask[:, None]) * -10000
        powers = np.exp(z - z.max(-1, keepdims=True))
        theirs = powers / (powers.sum(-1, keepdims=True) + 1e-6)

        added = softmax(x, scale=0.125, bias=(1 - mask[:, None]) * -10000)
        dropped = softmax(x, scale=0.125, where=mask[:, None] != 0)

        np.testing.assert_allclose(added, theirs, rtol=1e-6)
        np.testing.assert_allclose(dropped, theirs, rtol=1e-6)

    def test_apex_scaled_masked_softmax_where_one_masks(self) -> None:
        x = scores(2, 3, 4, 5)
        mask = np.random.default_rng(10).integers(0, 2, (2, 1, 4, 5), dtype=np.uint8)
        mask[0, 0, 1] = 1
        z = np.where(mask == 1, -10000.0, x * 0.5)
        powers = np.exp(z - z.max(-1, keepdims=True))
        theirs = np.where(z.max(-1, keepdims=True) == -10000, 0, powers / powers.sum(-1, keepdims=True))

        np.testing.assert_allclose(softmax(x, where=mask != 1, scale=0.5), theirs, rtol=1e-12)

    def test_apex_scaled_upper_triang_masked_softmax(self) -> None:
        x = scores(3, 6, 6)
        powers = np.tril(np.exp(x * 0.5))

        np.testing.assert_allclose(
            softmax(x, causal=True, scale=0.5), powers / powers.sum(-1, keepdims=True), rtol=1e-12
        )

    def test_hugging_face_adds_the_least_number(self) -> None:
        x = scores(2, 1, 4, 4).astype(np.float32)
        kept = np.tril(np.ones((4, 4), bool))
        additive = np.where(kept, np.float32(0), np.finfo(np.float32).min)

        np.testing.assert_allclose(softmax(x, bias=additive), softmax(x, where=kept), rtol=1e-6)
        np.testing.assert_allclose(softmax(x, bias=additive), softmax(x, causal=True), rtol=1e-6)

    def test_a_sliding_window_of_so_many_keys(self) -> None:
        x, size = scores(7, 7), 3
        i, j = np.indices((7, 7))

        np.testing.assert_array_equal(
            softmax(x, causal=True, window=size - 1), softmax(x, where=(j <= i) & (i - j < size))
        )

    def test_causal_into_the_bottom_right(self) -> None:
        x = scores(3, 8)
        i, j = np.indices((3, 8))

        np.testing.assert_array_equal(softmax(x, causal_offset=8 - 3), softmax(x, where=j - 8 <= i - 3))

    @pytest.mark.parametrize("mask", ["bool", "added", "causal"])
    def test_pytorch_scaled_dot_product_attention(self, mask: str) -> None:
        torch = pytest.importorskip("torch")
        random = np.random.default_rng(11)
        query, key = random.standard_normal((2, 3, 4, 7)), random.standard_normal((2, 3, 7, 7))
        kept = random.random((2, 1, 4, 7)) < 0.6
        kept[1, 0, 2] = False
        bias = random.standard_normal((4, 7))
        theirs = {
            "bool": {"attn_mask": torch.from_numpy(kept)},
            "added": {"attn_mask": torch.from_numpy(bias)},
            "causal": {"is_causal": True},
        }[mask]
        ours: dict[str, Any] = {"bool": {"where": kept}, "added": {"bias": bias}, "causal": {"causal": True}}[
            mask
        ]
        value = torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7)
        expected = torch.nn.functional.scaled_dot_product_attention(
            torch.from_numpy(query), torch.from_numpy(key), value, **theirs
        )

        y = softmax(query @ key.swapaxes(-1, -2), scale=7**-0.5, **ours)

        np.testing.assert_allclose(y, expected.numpy(), rtol=1e-11, atol=1e-14)

    def test_pytorch_multi_head_attention_where_true_masks(self) -> None:
        torch = pytest.importorskip("torch")
        x = scores(2, 4, 6)
        padding = np.arange(6) >= np.array([3, 6])[:, None, None]
        filled = torch.from_numpy(x).masked_fill(torch.from_numpy(padding), -np.inf)

        np.testing.assert_allclose(softmax(x, where=~padding), filled.softmax(-1).numpy(), rtol=1e-12)
        np.testing.assert_allclose(
            log_softmax(x, lengths=np.array([[3], [6]])), filled.log_softmax(-1).numpy(), rtol=1e-12
        )

    @pytest.mark.parametrize("window", [1, (2, 0)])
    def test_jax_local_window(self, window: Any) -> None:
        jax = pytest.importorskip("jax")
        random = np.random.default_rng(12)
        query, key = (random.standard_normal((1, n, 1, 5)).astype(np.float32) for n in (4, 5))
        value = np.eye(5, dtype=np.float32)[None, :, None]
        theirs = jax.nn.dot_product_attention(query, key, value, local_window_size=window)

        x = query[0, :, 0] @ key[0, :, 0].T

        np.testing.assert_allclose(softmax(x, scale=5**-0.5, window=window), theirs[0, :, 0], rtol=1e-5)


def test_the_page_about_masks_runs_and_names_every_keyword() -> None:
    text = DOCS.read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    for block in blocks:
        exec(compile(block, DOCS, "exec"), {"__name__": "__main__"})  # noqa: S102

    assert blocks
    assert tuple(MaskOptions.__annotations__) == Asked._fields
    for keyword in Asked._fields:
        assert f"`{keyword}=" in text, keyword


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_a_keyword_that_does_not_exist_is_named(function: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'wehre'"
    ):
        function(X, wehre=None)


def test_no_keyword_is_the_remembered_road(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynorm.invoke import fused_calls

    monkeypatch.setattr(fused_calls, "run_checked", lambda *_: pytest.fail("the long road"))

    assert cupynorm.softmax(X).sum() == pytest.approx(6)
    assert cupynorm.softmax(X, where=None, causal=False, quantize=None).sum() == pytest.approx(6)
    assert cupynorm.log_softmax(X).shape == cupynorm.layer_norm(X).shape == cupynorm.rms_norm(X).shape


@given(
    queries=st.integers(1, 40),
    cols=st.integers(1, 40),
    low=st.none() | st.integers(-60, 60),
    more=st.none() | st.integers(0, 60),
)
def test_the_columns_of_a_band_are_counted_as_they_are_kept(
    queries: int, cols: int, low: int | None, more: int | None
) -> None:
    high = None if more is None else (low or 0) + more
    mask = Mask((2, queries, cols), 1, low=low, high=high)

    begin, end = mask.interval(np.arange(queries))

    assert mask.band_cols == -(-int((end - begin).sum()) // queries)


def test_a_problem_knows_how_many_columns_lie_in_a_band() -> None:
    x = np.empty((3, 64, 128), np.float16)
    asked: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (7, 0)},
        "lengths": {"lengths": np.full((3, 1), 9)},
        "both": {"causal": True, "lengths": np.full((3, 1), 9)},
        "none": {"scale": 2.0},
    }

    found = {
        name: asking.spec_of(lambda options=options: cupynorm.softmax(x, **options)).problem.band_cols
        for name, options in asked.items()
    }

    assert found == {"causal": 33, "window": 8, "lengths": 0, "both": 33, "none": 0}
