"""Layouts of rows: apart, off by one element, backwards, one for all; results in place and into views."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynorm import layer_norm
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.plan.config import PLAIN
from cupynorm.tools.testing import assert_close, inputs
from tests.gpu.agree import VARIANTS, as_strided

if TYPE_CHECKING:
    from collections.abc import Callable

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)

LEADING = (6, 5)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A view of shape (6, 5, cols): the shape of its memory, and how to look at it on host and device."""

    name: str
    memory: Callable[[int], tuple[int, ...]]
    view: Callable[[Any, int], Any]


LAYOUTS = (
    Layout("contiguous", lambda n: (6, 5, n), lambda a, _: a),
    Layout("rows a vector apart", lambda n: (6, 5, n + 8), lambda a, n: a[..., :n]),
    Layout("rows three elements apart", lambda n: (6, 5, n + 3), lambda a, n: a[..., :n]),
    Layout("off by one element", lambda n: (30 * n + 1,), lambda a, n: a[1:].reshape(6, 5, n)),
    Layout("axes that do not collapse", lambda n: (12, 7, n + 8), lambda a, n: a[::2, 1:6, :n]),
    Layout("backwards", lambda n: (6, 5, n), lambda a, _: a[::-1, ::-1]),
    Layout("swapped", lambda n: (5, 6, n), lambda a, _: a.swapaxes(0, 1)),
    Layout("single rows of a long axis", lambda n: (6, 1, 5, n + 8, 1), lambda a, n: a[:, 0, :, :n, 0]),
)
named = {"ids": lambda layout: layout.name.replace(" ", "-")}


def lay(xp: Any, layout: Layout, x: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return device memory whose view is x and nan elsewhere, and the same on the host."""
    host = np.full(layout.memory(x.shape[-1]), np.nan, x.dtype)
    layout.view(host, x.shape[-1])[...] = x
    return xp.asarray(host), host


def check_layouts(xp: Any, op: Op, dtype: str, cols: int, into: Layout, of: Layout, **options: Any) -> None:
    case = inputs(op, 30, cols, dtype)
    x = case.x.reshape(*LEADING, cols)
    source, _ = lay(xp, of, x)
    target, before = lay(xp, into, np.zeros_like(x))
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}
    out = into.view(target, cols)

    y = op.function(of.view(source, cols), **parameters, out=out, **options)

    assert y is out
    after = xp.asnumpy(target)
    assert_close(into.view(after, cols).copy(), op.reference(x, **case.parameters)[0])
    into.view(after, cols)[...] = 0
    assert np.array_equal(after, before, equal_nan=True), "something beside the result was written"


@pytest.mark.parametrize("into", LAYOUTS, **named)
@pytest.mark.parametrize("of", LAYOUTS, **named)
def test_rows_may_lie_anywhere_on_both_sides(xp: Any, into: Layout, of: Layout) -> None:
    check_layouts(xp, OPS[0], "float16", 40, into, of)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("layout", LAYOUTS, **named)
def test_every_op_takes_and_fills_any_rows(xp: Any, op: Op, layout: Layout) -> None:
    check_layouts(xp, op, "float32", 37, layout, layout)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_takes_rows_apart(xp: Any, op: Op, variant: str) -> None:
    check_layouts(xp, op, "float16", 64, LAYOUTS[4], LAYOUTS[3], plan=variant)


@pytest.mark.small
@every_op
def test_one_row_can_stand_for_many(xp: Any, op: Op) -> None:
    case = inputs(op, 1, 40, "float16")
    device = xp.asarray(case.x)
    x = as_strided(xp, device, (4, 3, 40), (0, 0, 2))

    y = op.function(x, **{name: xp.asarray(array) for name, array in case.parameters.items()})

    expected = np.broadcast_to(op.reference(case.x, **case.parameters)[0], (4, 3, 40))
    assert_close(xp.asnumpy(y), expected)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], **named)
def test_the_result_may_replace_the_input(xp: Any, op: Op, variant: str, layout: Layout) -> None:
    case = inputs(op, 30, 200, "float16")
    memory, _ = lay(xp, layout, case.x.reshape(*LEADING, 200))
    x = layout.view(memory, 200)
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}

    y = op.function(x, **parameters, out=x, plan=variant)

    assert y is x
    expected = op.reference(case.x, **case.parameters)[0].reshape(*LEADING, 200)
    assert_close(xp.asnumpy(y), expected)


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [pytest.param(3, 20000, marks=pytest.mark.small), (9, 100003), (64, 1 << 20), (140, 65536)],
)
@pytest.mark.parametrize("variant", ["split", "cluster", None])
def test_a_long_row_may_be_replaced(
    xp: Any, op: Op, dtype: str, rows: int, cols: int, variant: str | None
) -> None:
    """The blocks that share a row leave messages among the results, which are x here."""
    case = inputs(op, rows, cols, dtype)
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}
    x = xp.asarray(case.x)
    expected = xp.asnumpy(op.function(x, **parameters, plan=variant))

    op.function(x, **parameters, out=x, plan=variant)

    assert np.array_equal(xp.asnumpy(x).view(np.uint8), expected.view(np.uint8))
    assert_close(expected[:2], op.reference(case.x[:2], **case.parameters)[0])


@every_op
@pytest.mark.parametrize("rows", [3, 7])
def test_messages_may_fill_the_kept_part_of_a_row_in_place(xp: Any, op: Op, rows: int) -> None:
    """34 blocks keep 32 bytes each: with less, x would be read where messages are. Of 7 rows 4 are in work, then 3."""
    case = inputs(op, rows, 20000, "float16")
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}
    x = xp.asarray(case.x)
    plan = dataclasses.replace(
        PLAIN, variant="split", vector=8, vectors=2, block=64, row_shared_bytes=34 * 32 + 16
    )

    op.function(x, **parameters, out=x, plan=plan)

    assert_close(xp.asnumpy(x), op.reference(case.x, **case.parameters)[0])
    with pytest.raises(ValueError, match="cannot hold a row of 20000 columns"):
        op.function(x, **parameters, out=x, plan=dataclasses.replace(plan, row_shared_bytes=512))


@pytest.mark.small
@pytest.mark.parametrize("shape", [(40,), (1,), (1, 40), (4, 1), (4, 40), (1, 1)])
def test_parameters_broadcast_over_the_normalised_axes(xp: Any, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((7, 4, 40)).astype(np.float16)
    gamma, beta = (random.standard_normal(shape).astype(np.float32) for _ in range(2))

    y = layer_norm(xp.asarray(x), xp.asarray(gamma), xp.asarray(beta), axis=(-2, -1))

    assert_close(xp.asnumpy(y), OPS[0].reference(x, gamma, beta, axes=2)[0], axes=2)


STRIDED = {
    "every third": lambda a: a[::3],
    "backwards": lambda a: a[39::-1],
    "off by one element": lambda a: a[1:41],
}


@pytest.mark.small
@pytest.mark.parametrize("how", STRIDED)
def test_parameters_may_be_views(xp: Any, how: str) -> None:
    random = np.random.default_rng(2)
    x = random.standard_normal((7, 40)).astype(np.float32)
    base = random.standard_normal((2, 120)).astype(np.float16)
    view = STRIDED[how]
    device = xp.asarray(base)

    y = layer_norm(xp.asarray(x), view(device[0])[:40], view(device[1])[:40])

    assert_close(xp.asnumpy(y), OPS[0].reference(x, view(base[0])[:40], view(base[1])[:40])[0])


@pytest.mark.small
@every_op
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows_give_no_rows(xp: Any, op: Op, shape: tuple[int, ...]) -> None:
    x = xp.empty(shape, np.float32)

    y = op.function(x)

    assert (y.shape, y.dtype) == (shape, np.float32)
    if op.stats:
        assert [each.shape for each in op.function(x, return_stats=True)[1:]] == [shape[:-1]] * len(op.stats)


REFUSED = {
    "a host out": (TypeError, "NumPy array", lambda xp, x: {"out": np.zeros(x.shape, np.float32)}),
    "out of another shape": (ValueError, "shape", lambda xp, x: {"out": xp.zeros((4, 6, 9), np.float32)}),
    "out shifted": (
        ValueError,
        "share memory",
        lambda xp, x: {"out": as_strided(xp, x[:, 1:], x.shape, x.strides)},
    ),
    "out one row for many": (
        ValueError,
        "overlap",
        lambda xp, x: {"out": as_strided(xp, xp.zeros(8, np.float32), x.shape, (0, 0, 4))},
    ),
    "out and dtype differ": (
        ValueError,
        "dtype",
        lambda xp, x: {"out": xp.zeros(x.shape, np.float32), "dtype": np.float16},
    ),
    "integers out": (TypeError, "not supported", lambda *_: {"dtype": np.int32}),
    "an axis too many": (ValueError, "out of range", lambda *_: {"axis": 3}),
    "an axis twice": (ValueError, "twice", lambda *_: {"axis": (-1, 2)}),
    "an unknown variant": (ValueError, "not a variant", lambda *_: {"plan": "fast"}),
}


@pytest.mark.small
@every_op
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(xp: Any, op: Op, what: str) -> None:
    host = np.random.default_rng(3).standard_normal((5, 6, 8)).astype(np.float32)
    memory = xp.asarray(host)
    x = memory[:4]
    kind, message, options = REFUSED[what]

    with pytest.raises(kind, match=message):
        op.function(x, **options(xp, x))

    assert np.array_equal(xp.asnumpy(memory), host)


@pytest.mark.small
@every_op
def test_columns_that_are_apart_are_read_where_they_lie(xp: Any, op: Op) -> None:
    memory = xp.asarray(np.random.default_rng(4).standard_normal((4, 16)).astype(np.float32))
    before = xp.asnumpy(memory)

    y = xp.asnumpy(op.function(memory[:, ::2]))

    np.testing.assert_allclose(y, op.function(before[:, ::2]), rtol=1e-5, atol=1e-6)
    assert np.array_equal(xp.asnumpy(memory), before)
