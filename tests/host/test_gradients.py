"""How gradients are computed on NumPy arrays: the order in which sums over rows are taken, and the memory it takes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm_backward, log_softmax_backward, logsumexp, softmax_backward
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
