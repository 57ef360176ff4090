"""How gradients are computed on NumPy arrays: the order in which sums over rows are taken, and the memory it takes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import layer_norm_backward, log_softmax_backward, logsumexp, softmax_backward
from cupynorm.catalog.bounds import EPSILON, ROUNDING, SUMS
from cupynorm.host import gradients, reference

RANDOM = np.random.default_rng(23)


def one_after_another(values: Any, shape: tuple[int, ...], start: Any, columns: tuple[int, ...]) -> Any:
    """Sum `values` to `shape`, by definition: columns first, then rows in C order."""
    rows = values.sum(axis=columns, keepdims=True)
    total = start.reshape((1,) * (values.ndim - len(shape)) + shape)
    for index in np.ndindex(rows.shape):
        at = tuple(i if extent > 1 else 0 for i, extent in zip(index, total.shape, strict=True))
        total[at] += rows[index]
    return total.reshape(shape)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("block", [1 << 17, 40, 6])
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (6,),
        (5, 1),
        (5, 6),
        (3, 1, 6),
        (3, 5, 1),
        (1, 1, 6),
        (4, 1, 1, 1),
        (4, 3, 5, 6),
        (4, 1, 5, 1),
    ],
    ids=str,
)
def test_sums_are_taken_row_by_row_in_c_order(
    axes: int, block: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, start = RANDOM.standard_normal((4, 3, 5, 6)), np.asarray(RANDOM.standard_normal(shape))
    monkeypatch.setattr(reference, "BLOCK", block)
    extents = ((1,) * 4 + shape)[-4:]
    columns = tuple(axis for axis in range(4 - axes, 4) if extents[axis] == 1)
    out = start.copy()

    target = gradients.Sum(out, adds=True)
    total = gradients._total(target, values.shape, axes)
    for rows in reference._blocks(values, axes):
        for each, piece in zip(rows._each(), rows._pieces, strict=True):
            gradients._add(total, rows, piece, each)
    gradients._store(total, target)

    wanted = one_after_another(values, shape, start.copy(), columns)
    if block >= 6 * 5 ** (axes - 1):  # no row is longer than a block
        assert np.array_equal(out, wanted)
    else:
        np.testing.assert_allclose(out, wanted, rtol=1e-13, atol=1e-13)


def test_what_is_summed_is_not_overwritten() -> None:
    values = RANDOM.standard_normal((3, 4))
    before = values.copy()

    total = gradients._total(gradients.Sum(np.ones(4), adds=True), values.shape, 1)
    for rows in reference._blocks(values, 1):
        gradients._add(total, rows, (slice(None),), rows._held)  # type: ignore[arg-type]
        assert np.array_equal(rows._held, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["norm", "softmax"])
def test_memory_does_not_grow_with_the_rows(name: str) -> None:
    dy, x = np.ones((3000, 1024), np.float16), np.ones((3000, 1024), np.float16)
    out = np.empty_like(x)

    tracemalloc.start()
    if name == "norm":
        layer_norm_backward(dy, x, out=out)
    else:
        softmax_backward(dy, x, bias=np.ones(1024), return_dbias=True, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 10 * 8 * reference.BLOCK  # blocks of float64; in float64, x has 23


@pytest.mark.parametrize("block", [1 << 17, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("function", [softmax_backward, log_softmax_backward])
def test_dx_may_replace_what_it_is_made_of(
    function: Any, dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dy, y = RANDOM.standard_normal((2, 9, 40)).astype(dtype)
    expected = function(dy, y)
    monkeypatch.setattr(reference, "BLOCK", block)

    for place in (0, 1):
        given = dy.copy(), y.copy()
        assert function(*given, out=given[place]) is given[place]
        np.testing.assert_allclose(
            given[place], expected, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("function", [softmax_backward, log_softmax_backward])
def test_any_number_of_threads_gives_the_same_gradient(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dy, y = RANDOM.standard_normal((2, 700, 300)).astype(np.float32)
    lengths = RANDOM.integers(0, 301, 700)
    found = []

    for count in ("1", "3"):
        monkeypatch.setenv("CUPYNORM_THREADS", count)
        found.append((function(dy, y), function(dy, y, lengths=lengths), logsumexp(y, lengths=lengths)))

    for one, three in zip(*found, strict=True):
        assert np.array_equal(one, three)


ROWS = {  # how a row differs from normal numbers
    "normal": lambda x: x,
    "far mean": lambda x: 1000 + 0.1 * x,
    "outlier": lambda x: np.concatenate([[3e4], x[1:]]),
    "two levels": lambda x: np.where(x > 0, 1.0, -1.0) + 1e-6 * x,
    "large": lambda x: 1e25 * x,
    "small": lambda x: 1e-25 * x,
}


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("cols", [2, 3, 64, 700, 5000])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_gradients_of_few_rows_are_as_exact_as_promised(
    norm: str, kind: str, cols: int, given: bool, axis: int
) -> None:
    random = np.random.default_rng(cols)
    eps = 0.0 if kind == "small" else 1e-5
    x = np.stack([ROWS[kind](random.standard_normal(cols)) for _ in range(2)]).astype(np.float32)
    dy, gamma = random.standard_normal(x.shape).astype(np.float32), random.standard_normal(cols).astype("f4")
    wide = x.astype(np.float64)
    mean = wide.mean(1, keepdims=True) if norm == "layer_norm" else np.zeros((2, 1))
    rstd = 1 / np.sqrt(np.square(wide - mean).mean(1, keepdims=True) + eps)
    z, g = (wide - mean) * rstd, dy.astype(np.float64) * gamma
    level = g.mean(1, keepdims=True) if norm == "layer_norm" else 0.0
    statistics: dict[str, Any] = {"rstd": rstd[:, 0]} if given else {}
    if given and norm == "layer_norm":
        statistics["mean"] = mean[:, 0]
    arrays = (dy, x) if axis else (np.ascontiguousarray(dy.T), np.ascontiguousarray(x.T))

    function = getattr(cupynorm, f"{norm}_backward")
    dx, dgamma = function(*arrays, gamma, axis=axis, eps=eps, **statistics)[:2]

    exact = rstd * (g - level - z * (g * z).mean(1, keepdims=True))
    terms = rstd * (
        np.abs(g) + np.abs(g).mean(1, keepdims=True) + np.abs(z) * np.abs(g * z).mean(1, keepdims=True)
    )
    for found, wanted, scale in (
        (dx if axis else dx.T, exact, terms),
        (dgamma, (dy * z).sum(0), np.abs(dy * z).sum(0)),
    ):
        allowed = ROUNDING["float32"] * np.abs(wanted) + SUMS * EPSILON["float32"] * scale
        np.testing.assert_array_less(np.abs(found.astype(np.float64) - wanted), allowed + 1e-44)


@pytest.mark.parametrize("shape", [(3, 50, 40), (400, 21, 4), (3, 300, 250)], ids=str)
@pytest.mark.parametrize("block", [500, 1 << 17])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_gradients_along_the_middle_axis_are_those_of_rows_of_their_own(
    norm: str, block: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(7)
    dy, x = (
        random.standard_normal(shape).astype(np.float32)[: 20 if block < 1000 else None] for _ in range(2)
    )
    gamma = random.standard_normal(shape[1]).astype(np.float32)
    function = getattr(cupynorm, f"{norm}_backward")
    wanted = function(*(np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (dy, x)), gamma)
    monkeypatch.setattr(reference, "BLOCK", block)

    found = function(dy, x, gamma, axis=1)

    np.testing.assert_allclose(np.moveaxis(found[0], 1, -1), wanted[0], 1e-5, 2e-6)
    for sums, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(sums, expected, 1e-5, 1e-5 * np.abs(expected).max())
