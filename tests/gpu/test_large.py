"""More than 2^31 elements, columns or rows, and more rows than a grid has blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import cross_entropy, layer_norm_backward, softmax, softmax_backward
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import need_bytes, tiled

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
PAST = 2**31


def check_repeats(xp: Any, y: Any, expected: np.ndarray) -> None:
    """Compare the first repetition with float64, and every other with the first."""
    flat = y.reshape(-1)
    first = flat[: expected.size]
    assert_close(xp.asnumpy(first).reshape(expected.shape), expected)
    for start in range(0, flat.size, 2**28 // expected.size * expected.size):
        part = flat[start : start + 2**28 // expected.size * expected.size]
        whole = part.size // expected.size * expected.size
        same = part[:whole].view(np.uint16).reshape(-1, expected.size) == first.view(np.uint16)
        assert bool(same.all()), f"elements from {start} on"
        assert bool((part[whole:].view(np.uint16) == first[: part.size - whole].view(np.uint16)).all())


def skip_if_short(xp: Any, wanted: int) -> None:
    reason = need_bytes(xp, wanted)
    if reason:
        pytest.skip(reason)


@every_op
@pytest.mark.parametrize("cols", [8, 1000])
def test_more_than_2_31_elements(roomy: Any, op: Op, cols: int) -> None:
    rows = PAST // cols + 5
    skip_if_short(roomy, 3 * 2 * rows * cols)
    tile = np.random.default_rng(cols).standard_normal((64, cols)).astype(np.float16)
    x = tiled(roomy, tile, (rows, cols))

    y = op.function(x)

    check_repeats(roomy, y, op.reference(tile)[0])


@every_op
def test_more_than_2_31_rows(roomy: Any, op: Op) -> None:
    rows = PAST + 5
    skip_if_short(roomy, 6 * rows)
    x = tiled(roomy, np.arange(-32, 32, dtype=np.float16).reshape(64, 1), (rows, 1))

    y = op.function(x, out=x)

    check_repeats(roomy, y, op.reference(np.arange(-32, 32, dtype=np.float16).reshape(64, 1))[0])


@pytest.mark.parametrize("op", [OPS[0], OPS[1]], ids=lambda op: op.name)
def test_a_row_of_more_than_2_31_columns(roomy: Any, op: Op) -> None:
    cols = PAST + 2**20  # whole tiles: their statistics are the row's
    skip_if_short(roomy, 6 * cols)
    tile = np.random.default_rng(4).standard_normal((1, 2**20)).astype(np.float16)
    x = tiled(roomy, tile, (1, cols))

    y = op.function(x).reshape(-1)

    first = y[: tile.size]
    assert_close(roomy.asnumpy(first).reshape(tile.shape), op.reference(tile)[0])
    for start in range(
        0, cols, tile.size
    ):  # each warp counts from an element of its own: the last place may differ
        assert float(roomy.abs(y[start : start + tile.size] - first).max()) <= 2**-8, start


# Of gradients and losses: rows that repeat. 2^31 is no multiple of their elements, so an index that has lost its high
# bits meets other numbers.
REPEATED = 67


def past(rows: int, cols: int) -> slice:
    """Return rows whose elements lie around the one with index 2^31."""
    return slice(PAST // cols - 3, min(rows, PAST // cols + 4))


def in_double(array: Any) -> np.ndarray:
    return array.astype(np.float64)


@pytest.mark.parametrize("cols", [8, 1000])
def test_layer_norm_backward_of_more_than_2_31_elements(roomy: Any, cols: int) -> None:
    rows = PAST // cols + 5
    skip_if_short(roomy, 3 * 2 * rows * cols + 2 * 4 * rows)
    random = np.random.default_rng(cols)
    tiles = random.standard_normal((2, REPEATED, cols)).astype(np.float16)
    gamma = (2 + random.standard_normal(cols)).astype(np.float32)
    dy, x = (tiled(roomy, tile, (rows, cols)) for tile in tiles)

    dx, dgamma, dbeta = layer_norm_backward(dy, x, roomy.asarray(gamma))

    expected, *sums = layer_norm_backward(*map(in_double, tiles), in_double(gamma))
    check_repeats(roomy, dx, expected)
    there = past(rows, cols)
    given = (in_double(roomy.asnumpy(each[there])) for each in (dy, x))
    assert_close(roomy.asnumpy(dx[there]), layer_norm_backward(*given, in_double(gamma))[0])
    whole, rest = divmod(rows, REPEATED)
    some = layer_norm_backward(*(in_double(tile[:rest]) for tile in tiles), in_double(gamma))[1:]
    for ours, of_tile, of_rest in zip((dgamma, dbeta), sums, some, strict=True):
        np.testing.assert_allclose(
            roomy.asnumpy(ours), whole * of_tile + of_rest, rtol=1e-4, atol=1e-5 * rows
        )


@pytest.mark.parametrize("cols", [8, 1000])
def test_softmax_backward_of_more_than_2_31_elements(roomy: Any, cols: int) -> None:
    rows = PAST // cols + 5
    skip_if_short(roomy, 3 * 2 * rows * cols)
    tiles = np.random.default_rng(cols).standard_normal((2, REPEATED, cols)).astype(np.float16)
    tiles[1] = softmax(tiles[1])
    dy, y = (tiled(roomy, tile, (rows, cols)) for tile in tiles)

    dx = softmax_backward(dy, y, scale=4.0)

    check_repeats(roomy, dx, softmax_backward(*map(in_double, tiles), scale=4.0))
    there = past(rows, cols)
    given = (in_double(roomy.asnumpy(each[there])) for each in (dy, y))
    assert_close(roomy.asnumpy(dx[there]), softmax_backward(*given, scale=4.0))


@pytest.mark.parametrize("cols", [8, 1000])
def test_cross_entropy_of_more_than_2_31_logits(roomy: Any, cols: int) -> None:
    """In place, with a label for each row, of which one in a tile does not count."""
    rows = PAST // cols + 5
    skip_if_short(roomy, 2 * 2 * rows * cols + (8 + 4) * rows)
    random = np.random.default_rng(cols)
    tile = (3 * random.standard_normal((REPEATED, cols))).astype(np.float16)
    labels = random.integers(0, cols, REPEATED)
    labels[5] = -100
    logits, of_rows = tiled(roomy, tile, (rows, cols)), tiled(roomy, labels, (rows,))
    there = past(rows, cols)
    given = in_double(roomy.asnumpy(logits[there])), roomy.asnumpy(of_rows[there])

    loss, grad = cross_entropy(logits, of_rows, ignore_index=-100, return_grad=True, grad=logits)

    assert grad is logits
    of_tile = cross_entropy(in_double(tile), labels, ignore_index=-100, return_grad=True)
    check_repeats(roomy, grad, of_tile[1])
    assert_close(roomy.asnumpy(loss[:REPEATED]), of_tile[0])
    repeated = loss[: rows // REPEATED * REPEATED].reshape(-1, REPEATED)
    assert bool((repeated == loss[:REPEATED]).all())
    near = cross_entropy(*given, ignore_index=-100, return_grad=True)
    assert_close(roomy.asnumpy(loss[there]), near[0])
    assert_close(roomy.asnumpy(grad[there]), near[1])


@every_op
@pytest.mark.parametrize("variant", ["warp", "block", "shared", "uncached"])
def test_more_rows_than_a_grid_has_blocks(roomy: Any, op: Op, variant: str) -> None:
    shape = (2_000_003, 24)
    skip_if_short(roomy, 3 * 2 * shape[0] * shape[1])
    tile = np.random.default_rng(5).standard_normal((64, 24)).astype(np.float16)
    x = tiled(roomy, tile, shape)

    y = op.function(x, plan=variant)

    check_repeats(roomy, y, op.reference(tile)[0])


def test_a_stride_of_more_than_2_31_elements(roomy: Any) -> None:
    op = OPS[2]
    skip_if_short(roomy, 4 * (PAST + 1000))
    memory = roomy.empty((2, PAST + 1000), np.float16)
    rows = np.random.default_rng(6).standard_normal((2, 700)).astype(np.float16)
    x = memory[:, -700:]
    x[...] = roomy.asarray(rows)

    assert_close(roomy.asnumpy(op.function(x)), op.reference(rows)[0])
