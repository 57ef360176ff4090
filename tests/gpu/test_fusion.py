"""Norms of sums, and user fusions, on the device: against NumPy in float64."""
# ruff: noqa: PLW0108  what is traced is the lambda

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import add_layer_norm, add_rms_norm, fuse, layer_norm, rms_norm, softmax
from cupynorm import functions as f
from cupynorm._dtypes import DTYPES
from cupynorm.catalog import op_table
from cupynorm.lower.expressions import DeviceFunction
from cupynorm.plan.config import VARIANTS
from cupynorm.tools.testing import assert_close
from tests.gpu.agree import DTYPES as NAMES
from tests.gpu.agree import as_strided

small = pytest.mark.small
RANDOM = np.random.default_rng(8)
every_op = pytest.mark.parametrize("op", op_table.OPS, ids=lambda op: op.name)


def normal(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(DTYPES[dtype])


def wide(value: Any) -> Any:
    floating = isinstance(value, np.ndarray) and value.dtype.kind not in "biu"
    return value.astype(np.float64) if floating else value


def to(xp: Any, value: Any) -> Any:
    return xp.asarray(value) if isinstance(value, np.ndarray) else value


def check(xp: Any, function: Any, *given: Any, device: Any = None, scale: Any = None, **options: Any) -> Any:
    """Compare each result with the same call on float64; return what came from the device."""
    arrays = {name: each for name, each in options.items() if isinstance(each, np.ndarray)}
    rest = {name: each for name, each in options.items() if name not in arrays}
    plan = rest.pop("plan", None)
    expected = function(*map(wide, given), **{n: wide(each) for n, each in arrays.items()}, **rest)
    on_device = (to(xp, each) for each in given) if device is None else device

    got = function(*on_device, **{n: to(xp, each) for n, each in arrays.items()}, **rest, plan=plan)

    several = isinstance(got, tuple)
    results = tuple(xp.asnumpy(each) for each in (got if several else (got,)))
    for result, want in zip(results, expected if several else (expected,), strict=True):
        if result.ndim == given[0].ndim:
            assert_close(result, want, scale=scale)
        else:
            np.testing.assert_allclose(result, want, rtol=2e-6, atol=2e-6)
    return results if several else results[0]


def parameters(op: Any, cols: int, dtype: str = "float32") -> dict[str, Any]:
    return {name: normal(cols, dtype=dtype) for name in op.parameters}


@small
@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("cols", [1, 37, 64, 200])
def test_norms_of_sums(xp: Any, function: Any, dtype: str, cols: int) -> None:
    x, r, gamma = normal(5, cols, dtype=dtype), normal(5, cols, dtype=dtype), normal(cols, dtype=dtype)
    options: dict[str, Any] = {"gamma": gamma} | (
        {"beta": normal(cols)} if function is add_layer_norm else {}
    )
    tolerable = 1.0

    check(xp, function, x, r, scale=tolerable, **options)
    check(xp, function, x, r, scale=tolerable, **options, bias=normal(cols), alpha=-0.5, return_sum=False)
    check(xp, function, x, r.astype(np.float32), scale=tolerable, return_stats=cols > 1)


@small
@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("cols", [96, 1000, 333])
def test_every_variant(xp: Any, variant: str | None, cols: int) -> None:
    x, r = normal(7, cols), normal(7, cols)

    check(
        xp,
        add_layer_norm,
        x,
        r,
        normal(cols),
        normal(cols),
        bias=normal(cols),
        plan=variant,
        return_stats=True,
    )


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("cols", [1024, 1025, 4096, 8192, 16384, 32768, 65536, 100003, 262144, 1 << 20])
def test_rows_around_the_edges_of_variants(xp: Any, function: Any, dtype: str, rows: int, cols: int) -> None:
    rows = min(rows, (1 << 24) // cols + 1)

    check(
        xp,
        function,
        normal(rows, cols, dtype=dtype),
        normal(rows, cols, dtype=dtype),
        normal(cols, dtype=dtype),
    )


@small
@pytest.mark.parametrize("shape", [(4, 64), (3, 37), (2, 3, 50), (5, 1)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("variant", [None, "uncached"])
def test_dropout_keeps_what_numpy_keeps(
    xp: Any, shape: tuple[int, ...], dtype: str, variant: str | None
) -> None:
    x, r = np.ones(shape, dtype), np.zeros(shape, dtype)
    options: dict[str, Any] = {"dropout": 0.4, "seed": 2**40 + 3, "offset": 2**64 - 5}
    _, expected = add_rms_norm(x, r, **options)

    _, total = add_rms_norm(xp.asarray(x), xp.asarray(r), **options, plan=variant)

    assert np.array_equal(xp.asnumpy(total) == 0, expected == 0)
    assert np.array_equal(xp.asnumpy(total), expected)


@small
def test_what_is_dropped_may_be_nan(xp: Any) -> None:
    x, r = np.full((3, 40), np.nan, np.float32), normal(3, 40)

    check(xp, add_layer_norm, x, r, dropout=1.0, seed=1)


@small
@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("which", ["x", "residual"])
def test_the_result_may_replace_what_is_added(xp: Any, which: str, variant: str | None) -> None:
    x, r = normal(6, 320, dtype="float16"), normal(6, 320, dtype="float16")
    device = {"x": xp.asarray(x), "residual": xp.asarray(r)}

    y, total = add_layer_norm(**device, out=device[which], plan=variant)

    expected = add_layer_norm(wide(x), wide(r))
    assert y is device[which]
    assert_close(xp.asnumpy(y), expected[0])
    assert_close(xp.asnumpy(total), expected[1], scale=1.0)


@small
@every_op
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("cols", [40, 33])
def test_load_op_store_and_what_was_loaded(xp: Any, op: Any, dtype: str, cols: int) -> None:
    fusion = fuse(
        op.function,
        load=lambda x, r, b: x + r * 0.5 + b,
        store=lambda y, g, t: (f.gelu(y) * g, y - t),
        keep_loaded=True,
    )
    x, r, g = (normal(3, 4, cols, dtype=dtype) for _ in range(3))

    check(xp, fusion, x, r, normal(cols), g, 0.25, scale=2.0, **parameters(op, cols))


OPERANDS: dict[str, Any] = {
    "full": lambda n: normal(3, 4, n),
    "column": lambda n: normal(n),
    "row": lambda n: normal(3, 4, 1),
    "outer": lambda n: normal(3, 1, 1),
    "mixed": lambda n: normal(3, 1, n),
    "one": lambda n: normal(1),
    "value": lambda n: 0.75,
    "bool": lambda n: RANDOM.random((4, n)) < 0.5,
    "uint8": lambda n: RANDOM.integers(0, 255, (3, 4, n), dtype=np.uint8),
    "int8": lambda n: RANDOM.integers(-128, 127, (3, 4, n), dtype=np.int8),
    "int16": lambda n: RANDOM.integers(-500, 500, (n,), dtype=np.int16),
    "uint16": lambda n: RANDOM.integers(0, 500, (3, 4, n), dtype=np.uint16),
    "int32": lambda n: RANDOM.integers(-500, 500, (3, 4, n), dtype=np.int32),
    "uint32": lambda n: RANDOM.integers(0, 500, (3, 4, 1), dtype=np.uint32),
    "int64": lambda n: RANDOM.integers(-500, 500, (3, 4, n), dtype=np.int64),
    "uint64": lambda n: RANDOM.integers(0, 500, (3, 4, n), dtype=np.uint64),
    "float64": lambda n: normal(3, 4, n, dtype="float64"),
    "bfloat16": lambda n: normal(3, 4, n, dtype="bfloat16"),
}


@small
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("cols", [16, 7])
def test_every_kind_of_operand_on_both_sides(xp: Any, name: str, cols: int) -> None:
    fusion = fuse(rms_norm, load=lambda x, a: x + a, store=lambda y, b: y * b)

    check(xp, fusion, normal(3, 4, cols), OPERANDS[name](cols), OPERANDS[name](cols), scale=600.0)


@small
@pytest.mark.parametrize("variant", [None, "uncached"])
def test_operands_may_lie_anywhere(xp: Any, variant: str | None) -> None:
    x, flat, turned = normal(6, 64), normal(6 * 64 + 1), normal(64, 6)
    fusion = fuse(layer_norm, load=lambda x, a, b: x + a - b, store=lambda y, c: y * c)
    host = (x, flat[1:].reshape(6, 64), turned.T, turned.T[::-1])
    on_device = xp.asarray(turned)
    device = (xp.asarray(x), xp.asarray(flat)[1:].reshape(6, 64), on_device.T, on_device.T[::-1])

    check(xp, fusion, *host, device=device, plan=variant)


@small
def test_one_row_can_stand_for_many(xp: Any) -> None:
    x, r = normal(40), normal(5, 40)
    device = as_strided(xp, xp.asarray(x), (5, 40), (0, 4))
    host = np.broadcast_to(x, (5, 40)).copy()

    check(xp, fuse(softmax, load=lambda x, r: x * r), host, r, device=(device, xp.asarray(r)))


@small
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_results_may_replace_operands(xp: Any, variant: str | None) -> None:
    fusion = fuse(rms_norm, load=lambda x, r: x + r, store=lambda y, g: (y * g, y + g), keep_loaded=True)
    host = [normal(5, 512) for _ in range(3)]
    x, r, g = map(xp.asarray, host)

    fusion(x, r, g, out=(g, r, x), plan=variant)

    for got, want in zip((g, r, x), fusion(*map(wide, host)), strict=True):
        assert_close(xp.asnumpy(got), want, scale=2.0)


@small
def test_a_struct_of_the_caller(xp: Any) -> None:
    text = (
        "namespace cupynorm {\nstruct Cubed {\n  template <typename T>\n"
        "  static void apply(const T (&in)[1], T (&out)[1]) {\n"
        "    out[0] = in[0] * in[0] * in[0];\n  }\n};\n}\n"
    )
    cubed = DeviceFunction("Cubed", text, lambda x: x**3, 1)

    check(xp, fuse(layer_norm, load=cubed, store=cubed), normal(4, 40), scale=20.0)


@small
def test_several_axes_and_results_of_other_dtypes(xp: Any) -> None:
    fusion = fuse(layer_norm, load=lambda x, b: x + b, store=lambda y: (y, 2 * y), keep_loaded=True)
    x, b = normal(3, 4, 10, dtype="float16"), normal(10)
    outs = tuple(xp.empty(x.shape, np.float32) for _ in range(2))

    fusion(xp.asarray(x), xp.asarray(b), axis=(-2, -1), out=(*outs, None))

    expected = fusion(wide(x), wide(b), axis=(-2, -1))
    for got, want in zip(outs, expected, strict=False):
        assert_close(xp.asnumpy(got), want, axes=2)


@pytest.mark.parametrize("cols", [1024, 8192, 20000, 65536, 100003, 300000])
@every_op
def test_long_rows(xp: Any, op: Any, cols: int) -> None:
    fusion = fuse(op.function, load=lambda x, r: x + r, store=lambda y, g: y * g, keep_loaded=True)

    check(xp, fusion, normal(5, cols), normal(5, cols), normal(cols), scale=1.0)


@small
def test_calls_alike_are_launched_again_with_their_own_arrays(xp: Any) -> None:
    fusion = fuse(layer_norm, load=lambda x, r, t: x + r * t, store=lambda y, g: (y * g, y), keep_loaded=True)
    for turn in range(4):
        x, r, g, gamma = normal(5, 40), normal(5, 40), normal(5, 1), normal(40)
        t = -0.0 if turn == 1 else 0.5 if turn == 2 else 0.0

        check(xp, fusion, x, r, t, g, gamma=gamma, return_stats=True, scale=2.0)
        check(xp, add_layer_norm, x, r, gamma, bias=gamma, dropout=0.5, seed=turn, offset=turn, scale=2.0)
        check(xp, softmax, x, where=r > 0, scale=1.0) if turn else None


@small
def test_another_place_of_the_result_is_checked_again(xp: Any) -> None:
    fusion = fuse(rms_norm, load=lambda x, r: x + r)
    x, r = xp.asarray(normal(4, 40)), xp.asarray(normal(4, 40))
    memory = xp.asarray(normal(9, 40))
    for function in (fusion, lambda *a, **o: add_rms_norm(*a, **o, return_sum=False)):
        for _ in range(2):
            function(memory[:4], r, out=memory[4:8])
            assert function(x, r, out=x) is x
        with pytest.raises(ValueError, match="share memory"):
            function(memory[:4], r, out=memory[1:5])
