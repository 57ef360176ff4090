"""Masked softmax on the device: every kind of mask, and combinations, against NumPy in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupynorm import log_softmax, softmax
from cupynorm._dtypes import DTYPES
from cupynorm.plan.config import VARIANTS
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import DTYPES as NAMES

small = pytest.mark.small
RANDOM = np.random.default_rng(7)


def normal(*shape: int, dtype: str = "float32") -> Any:
    return (2 * RANDOM.standard_normal(shape)).astype(DTYPES[dtype])


def to(xp: Any, value: Any) -> Any:
    return xp.asarray(value) if isinstance(value, np.ndarray) else value


def check(xp: Any, x: np.ndarray, masks: dict[str, Any], *, plan: Any = None, place: Any = None) -> None:
    """Compare both ops with NumPy's float64, and what is dropped bit for bit."""
    for function in (softmax, log_softmax):
        wide = {n: v.astype(np.float64) if n == "bias" and v is not None else v for n, v in masks.items()}
        expected = function(x.astype(np.float64), **wide)
        given = (place or xp.asarray)(x)

        y = xp.asnumpy(function(given, **{n: to(xp, v) for n, v in masks.items()}, plan=plan))

        assert y.dtype == x.dtype
        assert_close(y, expected)
        dropped = expected == (0 if function is softmax else -np.inf)
        if function is log_softmax:
            assert np.isneginf(y[dropped].astype(np.float64)).all()
        elif np.isfinite(expected).all() and "bias" not in masks:
            assert not y[dropped].astype(np.float64).any()


def poisoned(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Put nan and infinities where nothing is kept."""
    x = x.copy()
    x[~kept] = RANDOM.choice([np.nan, np.inf, -np.inf], np.count_nonzero(~kept)).astype(x.dtype)
    return x


def kept_by(shape: tuple[int, ...], masks: dict[str, Any]) -> np.ndarray:
    """What is kept, by the host's own road: log_softmax of zeros is -inf elsewhere."""
    masks = {name: each for name, each in masks.items() if name not in {"bias", "scale"}}
    return np.asarray(~np.isneginf(log_softmax(np.zeros(shape), **masks)))


STRUCTURES: dict[str, Any] = {
    "none": {},
    "causal": {"causal": True},
    "offset": {"causal_offset": -2},
    "window": {"window": (3, 1)},
    "left window": {"window": (None, 0), "causal_offset": 2},
    "right": {"lengths": "right"},
    "left": {"lengths": "left"},
    "all": {"lengths": "left", "causal_offset": 9, "window": (20, 4)},
}


def made(shape: tuple[int, ...], structure: dict[str, Any], where: str, *, biased: bool) -> dict[str, Any]:
    masks = dict(structure)
    if masks.get("lengths") is not None:
        masks["left_padded"] = masks["lengths"] == "left"
        dtype = RANDOM.choice(["int8", "uint16", "int32", "int64", "uint64"])
        masks["lengths"] = RANDOM.integers(0, min(shape[-1], 120) + 1, (*shape[:-2], 1)).astype(dtype)
    if where == "full":
        masks["where"] = RANDOM.random(shape) < 0.7
    elif where == "keys":
        masks["where"] = RANDOM.integers(0, 3, (shape[0], *(1,) * (len(shape) - 2), shape[-1])).astype(
            np.uint8
        )
    elif where == "queries":
        masks["where"] = RANDOM.random((*shape[:-1], 1)) < 0.7
    if biased:
        masks |= {"bias": normal(*shape[1:], dtype="float16"), "scale": 0.25}
    return masks


@small
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("cols", [7, 40])
def test_every_combination_on_odd_shapes(xp: Any, structure: str, cols: int) -> None:
    for where, biased in itertools.product(("none", "full", "keys", "queries"), (False, True)):
        masks = made((2, 3, 9, cols), STRUCTURES[structure], where, biased=biased)
        if masks:
            x = normal(2, 3, 9, cols, dtype="float16" if biased else "float32")
            check(xp, poisoned(x, kept_by(x.shape, masks)), masks)


@small
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("cols", [33, 64])
def test_every_dtype(xp: Any, dtype: str, cols: int) -> None:
    x = normal(3, 5, cols, dtype=dtype)
    masks: dict[str, Any] = {"where": RANDOM.random((3, 1, cols)) < 0.5, "causal_offset": 20, "scale": 0.5}

    check(xp, poisoned(x, kept_by(x.shape, masks)), masks)


@small
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cols", [48, 257, 1000])
def test_every_variant(xp: Any, variant: str, cols: int) -> None:
    x = normal(2, 6, cols)
    masks = made(x.shape, {"lengths": "left", "causal_offset": cols - 3}, "full", biased=True)
    masks["bias"] = masks["bias"].astype(np.float32)

    check(xp, poisoned(x, kept_by(x.shape, masks)), masks, plan=variant)


@small
def test_rows_of_which_nearly_all_is_kept(xp: Any) -> None:
    """Whole warps are within what the structure keeps; the bytes still drop, and other blocks hold other columns."""
    for variant, cols in (
        ("warp", 64),
        ("warp", 1001),
        ("block", 1000),
        ("cluster", 1000),
        ("cluster", 1001),
    ):
        x = normal(3, 7, cols)
        for where, left in itertools.product(({}, {"where": RANDOM.random((3, 1, cols)) < 0.7}), (0, 5)):
            masks = {"lengths": np.full((3, 1), cols - left), "causal_offset": cols, **where}
            check(xp, poisoned(x, kept_by(x.shape, masks)), masks, plan=variant)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "cols",
    [
        pytest.param(each, marks=small) if each < 3000 else each
        for each in (1023, 1025, 2056, 8192, 16392, 32768, 65536, 100003, 262144, 1 << 20)
    ],
)
@pytest.mark.parametrize("rows", [3, 400])
def test_rows_around_the_edges_of_variants(xp: Any, dtype: str, cols: int, rows: int) -> None:
    rows = min(rows, (1 << 24) // cols + 1) if cols > 3000 else min(rows, 5)
    x = normal(rows, cols, dtype=dtype)
    masks: dict[str, Any] = {
        "where": RANDOM.random((1, cols)) < 0.9,
        "lengths": RANDOM.integers(cols // 2, cols + 1, rows),
    }

    check(xp, poisoned(x, kept_by(x.shape, masks)), masks)


@small
@pytest.mark.parametrize("cols", [40, 37])
def test_rows_and_masks_may_lie_anywhere(xp: Any, cols: int) -> None:
    memory = normal(5, 4, cols + 3)
    x = memory[::-1, 1:, 1 : cols + 1]
    where = np.asfortranarray(RANDOM.random((5, 3, cols + 1)) < 0.6)[..., 1:]
    bias = normal(cols, 5, 1, dtype="float64").T[:, :, ::-1].reshape(1, 5, cols).swapaxes(0, 1)
    device = xp.asarray(memory)[::-1, 1:, 1 : cols + 1]
    # asarray of what is not contiguous keeps its order on the device; the stand-in's own views do, too
    masks = {"where": where, "bias": bias}

    check(xp, x, masks, place=lambda _: device)


@small
def test_masks_that_are_misaligned_are_read_in_narrower_pieces(xp: Any) -> None:
    x, where = normal(6, 64), RANDOM.random(6 * 64 + 1) < 0.6
    off = xp.asarray(where)[1:].reshape(6, 64)

    y = xp.asnumpy(softmax(xp.asarray(x), where=off))

    assert_close(y, softmax(x.astype(np.float64), where=where[1:].reshape(6, 64)))


@small
@pytest.mark.parametrize("variant", [None, "uncached"])
def test_nothing_kept_and_special_values(xp: Any, variant: str | None) -> None:
    x = normal(6, 40)
    x[0, 3], x[1, 3], x[2] = np.nan, np.inf, -np.inf
    where = RANDOM.random((6, 40)) < 0.5
    where[:2, 3], where[2, :2], where[3:5] = True, True, False

    check(xp, x, {"where": where}, plan=variant)


@small
def test_lengths_that_nobody_could_check_are_clamped(xp: Any) -> None:
    x = normal(4, 24)
    lengths = np.array([-5, 0, 25, 1 << 40])

    y = xp.asnumpy(softmax(xp.asarray(x), lengths=xp.asarray(lengths)))

    assert_close(y, softmax(x.astype(np.float64), lengths=np.array([0, 0, 24, 24])))


@small
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_result_may_replace_the_input(xp: Any, variant: str) -> None:
    x = normal(5, 6, 300, dtype="float16")
    device = xp.asarray(x)

    y = softmax(device, causal_offset=100, out=device, plan=variant)

    assert y is device
    assert_close(xp.asnumpy(y), softmax(x.astype(np.float64), causal_offset=100))


@small
def test_several_axes(xp: Any) -> None:
    x, where = normal(3, 4, 5), RANDOM.random((3, 4, 1)) < 0.5

    y = xp.asnumpy(softmax(xp.asarray(x), axis=(-2, -1), where=xp.asarray(where)))

    assert_close(y, softmax(x.astype(np.float64), axis=(-2, -1), where=where), axes=2)
