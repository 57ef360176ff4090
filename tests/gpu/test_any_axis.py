"""Rows along the first and middle axes on the device, beside NumPy arrays in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.invoke import row_ops
from cupynorm.plan.config import NOWHERE
from cupynorm.plan.variants.across import VARIANTS_ACROSS
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import DTYPES, need_bytes

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def drawn(*shape: int, dtype: str = "float32") -> Any:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) + 1).astype(dtype_of(dtype))


def check(xp: Any, op: Op, shape: tuple[int, ...], axis: int, dtype: str, **options: Any) -> None:
    x = drawn(*shape, dtype=dtype)
    parameters = {name: drawn(shape[axis]) for name in op.parameters}

    on_device = {name: xp.asarray(each) for name, each in parameters.items()}
    y = op.function(xp.asarray(x), axis=axis, **on_device, **options)

    wanted = op.reference(np.moveaxis(x, axis, -1), **parameters)[0]
    size = np.sqrt((wanted * wanted).mean(axis=-1, keepdims=True)) + np.abs(parameters.get("beta", 0.0))
    assert_close(np.moveaxis(xp.asnumpy(y), axis, -1), wanted, scale=size)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("variant", [None, *VARIANTS_ACROSS])
@pytest.mark.parametrize(("shape", "axis"), [((129, 7), 0), ((2, 40, 9), 1), ((2, 300, 64), 1)], ids=str)
def test_small_rows(xp: Any, op: Op, variant: str | None, shape: tuple[int, ...], axis: int) -> None:
    check(xp, op, shape, axis, "float16" if shape[-1] == 64 else "float32", plan=variant)


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along", [1, 2, 31, 1000, 4099, 65536])
@pytest.mark.parametrize("across", [1, 2, 5, 32, 65])
def test_every_length(cuda: Any, op: Op, dtype: str, along: int, across: int) -> None:
    check(cuda, op, (along, across), 0, dtype)
    check(cuda, op, (3, along, across), 1, dtype)


@pytest.mark.parametrize("variant", VARIANTS_ACROSS)
@pytest.mark.parametrize(("along", "across"), [(5, 3), (777, 64), (4096, 17), (20_000, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forced_variants(cuda: Any, variant: str, along: int, across: int, dtype: str) -> None:
    for op in OPS:
        check(cuda, op, (2, along, across), 1, dtype, plan=variant)


@pytest.mark.parametrize("along", [10, 1000, 30_000])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_form(cuda: Any, along: int, axis: int) -> None:
    shape = (along, 6, 5) if axis == 0 else (3, along, 10)
    x, dy, gamma = drawn(*shape), drawn(*shape)[::-1].copy(), drawn(along)
    others = shape[:axis] + shape[axis + 1 :]
    where = np.random.default_rng(2).random(shape) < 0.8
    labels = np.random.default_rng(3).integers(0, along, others)
    gaps = np.where(where, x, np.float32(np.nan))
    y = cupynorm.softmax(x, axis=axis)
    fusion = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * t, store=lambda y, s: y + s)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (cupynorm.softmax, (x,), {"where": where, "bias": gamma[: shape[-1]] if axis else gamma[0:5]}),
        (cupynorm.softmax, (gaps,), {"nan": "omit"}),
        (cupynorm.layer_norm, (x, gamma), {"where": where}),
        (cupynorm.logsumexp, (x,), {"lengths": labels + 1}),
        (cupynorm.add_layer_norm, (x, dy, gamma), {"dropout": 0.2, "seed": 5}),
        (cupynorm.cross_entropy, (x, labels), {"return_grad": True}),
        (cupynorm.layer_norm_backward, (dy, x, gamma), {}),
        (cupynorm.rms_norm_backward, (dy, x, gamma), {}),
        (cupynorm.softmax_backward, (dy, y), {}),
        (fusion, (x, x[:1], x[..., :1]), {}),
    ]
    for function, arrays, options in calls:
        to = {
            name: cuda.asarray(each) if isinstance(each, np.ndarray) else each
            for name, each in options.items()
        }
        found = function(*map(cuda.asarray, arrays), axis=axis, **to)
        wide = [each.astype(np.float64) if each.dtype == np.float32 else each for each in arrays]
        wanted = function(*wide, axis=axis, **options)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
        for got, right in pairs:
            scale = float(
                np.abs(right[np.isfinite(right)]).max(initial=0)
            )  # sums cancel: errors are of their terms
            np.testing.assert_allclose(cuda.asnumpy(got), right, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("across", [2, 3, 8, 13, 30, 100, 500])
def test_tables(cuda: Any, across: int) -> None:
    """Long rows that blocks of the whole grid share: read again for their results, or once for statistics."""
    along = {2: 400_003, 3: 400_003, 500: 80_003}.get(across, 160_003)
    dtypes = ("float32", "float16", "uint8") if across in {30, 100} else ("float32",)
    for dtype in dtypes:
        wide = drawn(along, across) * 20 + 100
        host = wide.astype(dtype)
        x, exact = cuda.asarray(host), host.astype(np.float64)
        kept = np.random.default_rng(across).random(host.shape) < 0.9
        where = cuda.asarray(kept)

        with row_ops.observed() as plans:
            y = cupynorm.standardize(x, axis=0, dtype="float32")
            mean, variance, *_ = cupynorm.moments(x, axis=0, where=where)
            again = cupynorm.standardize(x, axis=0, dtype="float32")

        assert {(plan.variant, plan.waits) for plan in plans} == {("split", NOWHERE)}
        digits = 4e-3 if dtype == "float16" else 2e-5
        right = (exact - exact.mean(0)) / exact.std(0)
        np.testing.assert_allclose(cuda.asnumpy(y).astype(np.float64), right, rtol=digits, atol=digits)
        np.testing.assert_array_equal(cuda.asnumpy(y), cuda.asnumpy(again))
        some = np.ma.array(exact, mask=~kept)
        np.testing.assert_allclose(cuda.asnumpy(mean).astype(np.float64), some.mean(0), rtol=digits)
        np.testing.assert_allclose(cuda.asnumpy(variance).astype(np.float64), some.var(0), rtol=4 * digits)


@pytest.mark.parametrize("across", [24, 33])
def test_every_form_of_tables(cuda: Any, across: int) -> None:
    along = 150_001
    x, dy = drawn(along, across), drawn(across, along).T.copy()
    gamma, where = drawn(along), np.random.default_rng(2).random(x.shape) < 0.8
    lengths = np.random.default_rng(3).integers(1, along, across)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (cupynorm.softmax, (x,), {"where": where}),
        (cupynorm.log_softmax, (x,), {"lengths": lengths}),
        (cupynorm.logsumexp, (x,), {}),
        (cupynorm.layer_norm, (x, gamma, gamma), {"where": where, "return_stats": True}),
        (cupynorm.add_layer_norm, (x, dy, gamma), {"dropout": 0.2, "seed": 5}),
        (cupynorm.layer_norm_backward, (dy, x, gamma), {}),
        (cupynorm.moments, (np.where(where, x, np.float32(np.nan)),), {"nan": "omit", "order": 4}),
        (cupynorm.sigma_clip, (x,), {"iterations": 2}),
    ]
    for function, arrays, options in calls:
        to = {
            name: cuda.asarray(each) if isinstance(each, np.ndarray) else each
            for name, each in options.items()
        }
        found = function(*map(cuda.asarray, arrays), axis=0, **to)
        wide = [each.astype(np.float64) if each.dtype == np.float32 else each for each in arrays]
        wanted = function(*wide, axis=0, **options)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
        for got, right in pairs:
            # the kurtosis is what is left of 3, so errors are those of numbers of that size
            least = float(function is cupynorm.moments)
            scale = float(np.abs(right[np.isfinite(right)]).max(initial=least))
            np.testing.assert_allclose(cuda.asnumpy(got), right, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("along", [8, 1 << 16])
def test_more_than_2_31_elements(roomy: Any, along: int) -> None:
    """2^31 is no multiple of what repeats, so an index that has lost its high bits meets other numbers."""
    across = 2**31 // along + 5
    reason = need_bytes(roomy, 3 * 2 * along * across)
    if reason:
        pytest.skip(reason)
    tile = drawn(along, 7, dtype="float16")
    x = roomy.empty((along, across), np.float16)
    for at in range(7):
        x[:, at::7] = roomy.asarray(tile[:, at : at + 1])

    y = cupynorm.softmax(x, axis=0, out=x)

    first = y[:, :7].copy()
    assert_close(roomy.asnumpy(first).T, cupynorm.softmax(tile.T.astype(np.float64)))
    for at in range(7):
        # rows of a block's end may be reduced in another order: the last place may differ
        assert float(roomy.abs(y[:, at::7] - first[:, at : at + 1]).max()) <= 2**-11 * float(first.max()), at


def test_a_row_of_more_than_2_31_elements(roomy: Any) -> None:
    along = 2**31 + 2**20
    reason = need_bytes(roomy, 2 * 2 * 2 * along)
    if reason:
        pytest.skip(reason)
    tile = drawn(2**20, 2, dtype="float16")  # whole tiles: their statistics are the row's
    x = roomy.empty((along, 2), np.float16)
    x.reshape(-1, 2**20, 2)[...] = roomy.asarray(tile)

    y = cupynorm.layer_norm(x, axis=0, out=x).reshape(-1, 2**20, 2)

    assert_close(roomy.asnumpy(y[0]).T, cupynorm.layer_norm(tile.T.astype(np.float64)))
    for at in range(len(y)):
        assert float(roomy.abs(y[at] - y[0]).max()) <= 2**-8, at


@pytest.mark.parametrize("dtype", [*DTYPES, "uint8", "uint16"])
@pytest.mark.parametrize("along", [2, 3, 10, 21, 32, 33, 50, 64, 100, 113, 128, 365])
def test_short_rows(cuda: Any, along: int, dtype: str) -> None:
    whole = dtype.startswith("u")
    for across in (33, 1000, 4096 * 3 + 1):
        rng = np.random.default_rng(along * across)
        x = rng.integers(0, 200, (2, along, across)) if whole else rng.standard_normal((2, along, across))
        x = x.astype(dtype if whole else dtype_of(dtype))
        exact, near = (
            x.astype(np.float64),
            {"float16": 1e-2, "bfloat16": 8e-2, "float64": 1e-9}.get(dtype, 2e-4),
        )

        def agrees(call: Any, exact: Any = exact, x: Any = x, near: float = near) -> None:
            found, wanted = call(cuda.asarray(x)), call(exact)
            pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
            for got, right in pairs:
                np.testing.assert_allclose(cuda.asnumpy(got).astype(np.float64), right, rtol=near, atol=near)

        agrees(lambda a: cupynorm.standardize(a, axis=1, eps=1e-3))
        agrees(lambda a: cupynorm.moments(a, axis=1))
        agrees(lambda a: cupynorm.sigma_clip(a, 50, 3, axis=1, centre="mean"))
        if not whole:
            agrees(lambda a: cupynorm.softmax(a, axis=1))
            agrees(lambda a: cupynorm.layer_norm(a, axis=1, eps=1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((64, 5, 56, 56), (0, 2, 3)),
        ((256, 5, 56, 56), (0, 2, 3)),  # blocks of the grid share them
        ((300, 7, 7), (0, 2)),
        ((5, 1000, 96), (0, 2)),
        ((2000, 3, 512), (0, 2)),
    ],
    ids=str,
)
def test_rows_in_runs(cuda: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> None:
    x, other = drawn(*shape, dtype=dtype), drawn(*shape[::-1]).reshape(shape)
    g = drawn(*(shape[each] for each in axis))
    exact = x.astype(np.float64)
    where = np.random.default_rng(1).random(shape) < 0.8
    near = {"float16": 1e-2, "bfloat16": 8e-2, "float64": 1e-9}.get(dtype, 2e-4)

    def agrees(call: Any, *beside: Any) -> None:
        found, wanted = call(cuda.asarray(x), *map(cuda.asarray, beside)), call(exact, *beside)
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        for got, right in pairs:
            scale = float(np.abs(right).max())
            np.testing.assert_allclose(
                cuda.asnumpy(got).astype(np.float64), right, rtol=near, atol=near * scale
            )

    agrees(lambda a: cupynorm.standardize(a, axis=axis))
    agrees(lambda a, w: cupynorm.moments(a, axis=axis, where=w), where)
    agrees(lambda a, w: cupynorm.softmax(a, axis=axis, where=w), where)
    agrees(lambda a, r, g: cupynorm.add_layer_norm(a, r, g, axis=axis), other.astype(x.dtype), g)


def test_rows_in_runs_of_more_than_2_31_elements(roomy: Any) -> None:
    shape, tile = (5, 2, 1 << 28), drawn(1 << 14, dtype="float16")
    reason = need_bytes(roomy, 3 * 2 * 5 * (2 << 28))
    if reason:
        pytest.skip(reason)
    x = roomy.empty(shape, "float16")
    x.reshape(-1, tile.size)[:] = roomy.asarray(tile)

    mean, variance, *_ = cupynorm.moments(x, axis=(0, 2))
    y = cupynorm.standardize(x, axis=(0, 2), out=x)

    wide = tile.astype(np.float64)
    np.testing.assert_allclose(roomy.asnumpy(mean), wide.mean(), rtol=1e-3)
    np.testing.assert_allclose(roomy.asnumpy(variance), wide.var(), rtol=1e-3)
    right = roomy.asarray(((wide - wide.mean()) / wide.std()).astype(np.float16))
    for at in range(5):
        assert float(roomy.abs(y[at].reshape(-1, tile.size) - right).max()) <= 2**-8, at
