"""fuse on NumPy arrays: against the ops' definitions, with every form of operand and of output; and every error."""
# ruff: noqa: PLW0108  what is traced is the lambda

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import functions as f
from cupynorm import fuse, layer_norm, log_softmax, rms_norm, softmax
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog import op_table
from cupynorm.catalog.op_table import Op
from cupynorm.host import reference
from cupynorm.invoke import bound_calls, fusion_calls
from cupynorm.lower.expressions import DeviceFunction
from cupynorm.lower.tracing import TraceError
from cupynorm.tools.testing import assert_close
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

every_op = pytest.mark.parametrize("op", op_table.OPS, ids=lambda op: op.name)
RANDOM = np.random.default_rng(21)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


def wide(*arrays: Any) -> Any:
    return tuple(np.asarray(each).astype(np.float64) for each in arrays)


@every_op
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_load_op_store_agree_with_the_definitions(op: Op, dtype: str) -> None:
    kind = dtype_of(dtype)
    x, r, g = (RANDOM.standard_normal((7, 40)).astype(kind) for _ in range(3))
    b = RANDOM.standard_normal(40).astype(kind)
    parameters = {name: RANDOM.standard_normal(40).astype(kind) for name in op.parameters}
    fusion = fuse(op.function, load=lambda x, r, b: x + r * 0.5 + b, store=lambda y, g: f.gelu(y) * g)

    y = fusion(x, r, b, g, **parameters)

    x64, r64, b64, g64 = wide(x, r, b, g)
    normed = op.reference(x64 + r64 * 0.5 + b64, **parameters)[0]
    expected = f.gelu(normed) * g64
    assert y.dtype == kind
    assert_close(y, expected, scale=np.abs(g64))


@every_op
def test_only_a_load_and_only_a_store(op: Op) -> None:
    x = normal(6, 33)

    loaded = fuse(op.function, load=lambda x, t: x / t)(x, 0.5)
    stored = fuse(op.function, store=lambda y: 2 * y + 1)(x)

    assert_close(loaded, op.reference(x.astype(np.float64) * 2)[0])
    assert_close(stored, 2 * op.reference(x.astype(np.float64))[0] + 1)


def in_float64(function: Any, x: Any, **parameters: Any) -> Any:
    """Return what a function gives as a fusion computes it on NumPy arrays: in float64, rounded once."""
    return function(x, **parameters, dtype=np.float64).astype(x.dtype)


@every_op
def test_the_identity_is_the_op(op: Op) -> None:
    x, parameters = normal(5, 17), {name: normal(17) for name in op.parameters}

    y = fuse(op.function, load=lambda x: x, store=lambda y: y)(x, **parameters)

    assert np.array_equal(y, in_float64(op.function, x, **parameters))


def test_what_was_loaded_is_kept_rounded_and_the_norm_uses_the_unrounded() -> None:
    x, r = normal(4, 64, dtype=np.float16), normal(4, 64, dtype=np.float32) * 1e-4
    fusion = fuse(layer_norm, load=lambda x, r: x + r, keep_loaded=True)

    y, h = fusion(x, r, dtype="float64")

    exact = np.float64(x) + r
    assert (h.dtype, y.dtype) == (np.float16, np.float64)
    assert np.array_equal(h, exact.astype(np.float16))
    assert_close(y, op_table.op("layer_norm").reference(exact)[0])
    assert np.abs(y - layer_norm(h, dtype="float64")).max() > 1e-6  # or the test could not tell


@every_op
def test_statistics_come_last_and_are_of_what_was_loaded(op: Op) -> None:
    x, r = normal(3, 4, 20), normal(3, 4, 20)
    fusion = fuse(op.function, load=lambda x, r: x - r, store=lambda y: (y, -y), keep_loaded=True)
    options: dict[str, Any] = {"return_stats": True, "eps": 0.25} if op.stats else {}

    y, negative, h, *stats = fusion(x, r, axis=(-2, -1), **options)

    options.pop("return_stats", None)
    expected, *wanted = op.reference(np.float64(x) - r, axes=2, **options)
    assert_close(y, expected, axes=2)
    assert np.array_equal(negative, -y)
    assert np.array_equal(h, (np.float64(x) - r).astype(np.float32))
    assert [each.dtype for each in stats] == [np.float32] * len(op.stats)
    for got, want in zip(stats, wanted, strict=True):
        assert got.shape == (3,)
        assert np.allclose(got, want, rtol=1e-6, atol=1e-6)


FORMS = {
    "full": ((2, 3, 8), "full"),
    "column": ((8,), "column"),
    "column with axes of one": ((1, 1, 8), "column"),
    "row": ((2, 3, 1), "row"),
    "row of some axes": ((3, 1), "row"),
    "outer axis": ((2, 1, 1), "row"),
    "rows and columns": ((2, 1, 8), "full"),
    "one element": ((1,), "scalar"),
    "one element of all axes": ((1, 1, 1), "scalar"),
    "0-d": ((), "scalar"),
}


@pytest.mark.parametrize("role", ["load", "store"])
@pytest.mark.parametrize("form", FORMS)
def test_operands_broadcast_as_numpys(form: str, role: str) -> None:
    x, operand = normal(2, 3, 8), np.asarray(normal(*FORMS[form][0], 1)[..., 0])
    fusion = fuse(softmax, **{role: lambda x, o: x * 2 + o})

    y = fusion(x, operand)

    x64, o64 = wide(x, operand)
    reference_of = op_table.op("softmax").reference
    expected = reference_of(x64 * 2 + o64)[0] if role == "load" else reference_of(x64)[0] * 2 + o64
    assert_close(y, expected)


@pytest.mark.parametrize("form", FORMS)
def test_an_operands_kind_is_what_it_varies_with(form: str) -> None:
    shape, kind = FORMS[form]

    assert kinds(normal(2, 3, 8), np.zeros(shape, np.float32)) == [kind]


def kinds(x: Any, *operands: Any, axis: Any = -1) -> list[str]:
    names = ", ".join(f"o{index}" for index in range(len(operands)))
    function = eval(f"lambda x, {names}: x")  # noqa: S307  as many parameters as operands
    call = fuse(softmax, load=function)._check(x, operands, axis=axis)
    return [each.kind for each in call.load_operands]


def test_kinds_at_the_edges() -> None:
    assert kinds(np.zeros((1, 8)), np.zeros((1, 8))) == ["full"]  # x has one row; the operand has x's shape
    assert kinds(np.zeros(8), np.zeros(8)) == ["full"]
    assert kinds(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros(1)) == ["full", "scalar"]
    assert kinds(np.zeros((3, 1)), np.zeros((3, 1))) == ["full"]
    assert kinds(np.zeros((1, 8)), np.zeros(8)) == ["column"]
    assert kinds(np.zeros((2, 3, 8)), np.zeros((3, 8)), axis=(1, 2)) == ["column"]
    assert kinds(np.zeros((2, 3, 8)), np.zeros((2, 1, 1)), axis=(1, 2)) == ["row"]
    assert kinds(np.zeros((2, 8)), 2, 2.5, True, np.float32(1), np.int8(3)) == ["value"] * 5


def test_numbers_are_operands_of_the_call_not_of_the_fusion() -> None:
    x = normal(3, 9)
    fusion = fuse(softmax, load=lambda x, t: x * t)

    assert not np.array_equal(fusion(x, 1), fusion(x, 2.0))
    assert np.array_equal(fusion(x, 2), in_float64(softmax, x * 2))
    assert np.array_equal(fusion(x, np.float16(2)), fusion(x, np.array(2, np.float32)))
    assert np.array_equal(fusion(x, True), in_float64(softmax, x))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float64", "bfloat16"]
)
def test_operands_of_other_dtypes_are_numbers(dtype: str) -> None:
    kind = dtype_of(dtype) if dtype == "bfloat16" else np.dtype(dtype)
    x, mask = normal(4, 10), (np.arange(40).reshape(4, 10) % 3 == 0).astype(kind)
    fusion = fuse(softmax, load=lambda x, m: f.where(m, x, -np.inf))

    y = fusion(x, mask)

    assert np.array_equal(y != 0, mask.astype(bool))
    assert_close(y, op_table.op("softmax").reference(np.where(mask.astype(bool), np.float64(x), -np.inf))[0])


def test_operands_by_name_in_any_mixture() -> None:
    x, r, b, g = normal(4, 6), normal(4, 6) + 1, normal(6), normal(6) * 2
    fusion = fuse(rms_norm, load=lambda x, r, b: x + r * b, store=lambda y, g: y * g)
    expected = fusion(x, r, b, g)

    assert np.array_equal(fusion(x, r, b, g=g), expected)
    assert np.array_equal(fusion(x, r, g=g, b=b), expected)
    assert np.array_equal(fusion(x, g=g, b=b, r=r), expected)


def test_a_parameter_of_both_is_two_operands() -> None:
    x, b = normal(4, 6), normal(6)
    fusion = fuse(rms_norm, load=lambda x, b: x + b, store=lambda y, b: y * b)

    assert_close(fusion(x, b, 3.0), 3 * op_table.op("rms_norm").reference(np.float64(x) + b)[0])
    with pytest.raises(TypeError, match="b= is a parameter of both load and store: give it by position"):
        fusion(x, b, b=3.0)


@every_op
@pytest.mark.parametrize("block", [1, 16, 64, 1 << 17])
def test_every_cut_into_blocks_gives_the_same(op: Op, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, r, row, column = normal(3, 5, 12), normal(3, 5, 12)[:, ::-1], normal(5, 1), normal(12)[::-1]
    parameters = {name: normal(12) for name in op.parameters}
    fusion = fuse(
        op.function, load=lambda x, r, s: x * s + r, store=lambda y, c, s: (y * c, y + s), keep_loaded=True
    )
    options: dict[str, Any] = {"return_stats": True} if op.stats else {}
    expected = fusion(x, r, row, column, row, **parameters, **options)
    monkeypatch.setattr(reference, "BLOCK", block)

    results = fusion(x, r, row, column, row, **parameters, **options)

    for got, want in zip(results, expected, strict=True):
        assert np.allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(9,), (1, 9), (0, 9), (2, 0, 9), (2, 3, 4, 9)])
def test_any_number_of_axes_and_rows(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32) * np.arange(9)
    fusion = fuse(layer_norm, load=lambda x, b: x * b, store=lambda y: (y, y * y), keep_loaded=True)

    y, squared, h, mean, rstd = fusion(x, np.arange(9.0), return_stats=True)

    assert_close(y, op_table.op("layer_norm").reference(np.float64(x) * np.arange(9))[0])
    assert (squared.shape, h.shape, mean.shape, rstd.shape) == (shape, shape, shape[:-1], shape[:-1])
    assert np.array_equal(h, x * x)


def test_a_load_without_x_is_stretched() -> None:
    x, column = normal(3, 8), normal(8)

    y, h = fuse(softmax, load=lambda x, c: c, keep_loaded=True)(x, column)

    assert np.array_equal(h, np.broadcast_to(column, (3, 8)))
    assert np.array_equal(y, in_float64(softmax, h))


def test_a_result_of_a_condition_and_of_a_constant() -> None:
    x = normal(3, 8)

    positive, seven = fuse(layer_norm, store=lambda y: (y > 0, 7))(x)

    assert np.array_equal(positive, np.where(x > x.mean(-1, keepdims=True, dtype=float), 1, 0))
    assert np.array_equal(seven, np.full((3, 8), 7))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_once(dtype: str) -> None:
    kind = dtype_of(dtype)
    bits = {"float16": 11, "bfloat16": 8}[dtype]
    x = np.zeros((1, 4))

    # halfway between two numbers of the type but for what float32 loses
    y = fuse(rms_norm, store=lambda y, s: y + s)(x, 1 + 2.0**-bits + 2.0**-40, dtype=kind)

    assert y.astype(np.float64).tolist() == [[1 + 2.0 ** (1 - bits)] * 4]


def test_special_values_stay_in_their_row_and_nothing_warns() -> None:
    x = normal(6, 8)
    x[1, 2], x[3, 0], x[5] = np.nan, np.inf, -np.inf
    fusion = fuse(softmax, load=lambda x: x * 1e30, store=lambda y: f.log(y) * 1e38)

    with np.errstate(all="raise"):
        y = fusion(x, dtype="float16")

    assert np.isnan(y[[1, 3, 5]]).all()
    assert not np.isnan(y[::2]).any()


def test_no_float64_copy_of_x_is_made() -> None:
    x = np.ones((1 << 14, 256), np.float16)
    out = np.empty_like(x)
    fusion = fuse(layer_norm, load=lambda x, b: x + b, store=lambda y: f.exp(y))
    tracemalloc.start()

    fusion(x, np.ones(256), out=out)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * reference.BLOCK * 8  # a float64 copy is 32 blocks


# --- out ------------------------------------------------------------------------------------------------------------


def test_outputs_are_filled_and_returned() -> None:
    x = normal(3, 8)
    fusion = fuse(softmax, load=lambda x: x * 2, store=lambda y: (y, 1 - y), keep_loaded=True)
    first, kept = np.empty((3, 8), np.float64), np.empty((8, 3), np.float16).T

    y, rest, h = fusion(x, out=(first, None, kept))

    assert y is first
    assert h is kept
    assert rest.dtype == np.float32
    assert_close(y, op_table.op("softmax").reference(np.float64(x) * 2)[0])
    assert np.array_equal(kept, (2 * np.float64(x)).astype(np.float16))


def test_dtype_is_of_the_results_and_not_of_what_was_loaded() -> None:
    y, z, h, mean, _ = fuse(layer_norm, load=lambda x: x, store=lambda y: (y, y), keep_loaded=True)(
        normal(3, 8, dtype=np.float16), dtype="float64", return_stats=True
    )

    assert [each.dtype for each in (y, z, h, mean)] == ["float64", "float64", "float16", "float64"]


@pytest.mark.parametrize("block", [16, 1 << 17])
def test_outputs_may_replace_x_and_operands(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    x, r, b = normal(5, 8), normal(5, 8) * 3, normal(8)
    fusion = fuse(layer_norm, load=lambda x, r, b: x + r + b, store=lambda y, r: (y * r, r), keep_loaded=True)
    expected = fusion(x, r, b, r)
    mine, residual = x.copy(), r.copy()

    y, same, h = fusion(mine, residual, b, residual, out=(None, mine, residual))

    assert same is mine
    assert h is residual
    for got, want in zip((y, same, h), expected, strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (
            np.zeros((4, 6)),
            ValueError,
            r"out has 1 arrays, the fusion 2 results: give a tuple of 2 .*None where",
        ),
        ((None,) * 3, ValueError, "out has 3 arrays, the fusion 2 results"),
        ((np.zeros((4, 5)), None), ValueError, r"out has shape \(4, 5\), x has \(4, 6\)"),
        ((None, np.zeros((4, 6), np.int32)), TypeError, "out: dtype int32 is not supported"),
        ((None, [0]), TypeError, "out is a builtins.list"),
    ],
)
def test_out_that_does_not_fit(out: Any, error: Any, message: str) -> None:
    fusion = fuse(softmax, load=lambda x: x + 1, keep_loaded=True)

    with pytest.raises(error, match=message):
        fusion(normal(4, 6), out=out)


def test_out_that_shares_memory() -> None:
    memory = np.zeros((2, 5, 6), np.float32)
    x, r, out = normal(4, 6), memory[0, :4], memory[1, :4]
    fusion = fuse(softmax, load=lambda x, r: x + r, store=lambda y, c: (y, y * c))

    with pytest.raises(ValueError, match="two outputs share memory"):
        fusion(x, r, 1, out=(out, out))
    with pytest.raises(ValueError, match="an output and r share memory: give r itself"):
        fusion(x, r, 1, out=(memory[0, 1:], None))
    with pytest.raises(ValueError, match="an output and c share memory"):
        fusion(x, r, out[0], out=(out, None))
    with pytest.raises(ValueError, match="out and x share memory in part"):
        fusion(memory[0, :4], 1, 1, out=(None, memory[0, 1:]))
    assert not memory.any()


# --- what is refused ------------------------------------------------------------------------------------------------

ADD = fuse(layer_norm, load=lambda x, r, b: x + r + b, store=lambda y, g: y * g)
X, R, B, G = normal(4, 6), normal(4, 6), normal(6), normal(4, 1)
OWN = "gamma, beta, axis, eps, out, dtype, return_stats, plan"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ADD(X, R, B), TypeError, "no operand was given for g: after x, load takes r, b and store takes g"),
        (lambda: ADD(X), TypeError, "no operand was given for r, b, g"),
        (lambda: ADD(X, R, B, G, G), TypeError, "4 operands were given: after x, load takes r, b and store takes g"),
        (lambda: ADD(X, R, B, r=R, g=G), TypeError, "r was given twice, by position and by name"),
        (lambda: ADD(X, R, B, G, k=1), TypeError, f"unexpected argument k=: .*layer_norm's own arguments are {OWN}"),
        (lambda: ADD(X, None, B, G), TypeError, "r is a builtins.NoneType: give a NumPy .*; or a Python number"),
        (lambda: ADD(X, [1.0], B, G), TypeError, "r is a builtins.list"),
        (lambda: ADD(X, R, 1j, G), TypeError, "b is a builtins.complex"),
        (lambda: ADD(X, R, 10**400, G), ValueError, "b is beyond what float64 holds"),
        (lambda: ADD(X, R, "b", G), TypeError, "b is a builtins.str"),
        (lambda: ADD(X, R, np.ma.masked_array(B), G), TypeError, "b is a masked array"),
        (lambda: ADD(X, R, B.astype(complex), G),
         TypeError, "b: dtype complex128 is not supported: use .*, bool, integers"),
        (lambda: ADD(X, R, B.astype(np.longdouble), G), TypeError, "b: dtype .* is not supported"),
        (lambda: ADD(X, R, B[:5], G), ValueError, r"b has shape \(5,\), x has \(4, 6\): it must .* broadcast to it"),
        (lambda: ADD(X, R[None], B, G), ValueError, r"r has shape \(1, 4, 6\), x has \(4, 6\)"),
        (lambda: ADD(B, R, B, 1), ValueError, r"r has shape \(4, 6\), x has \(6,\)"),
        (lambda: ADD([1.0], R, B, G), TypeError, "x is a builtins.list"),
        (lambda: ADD(X.astype(int), R, B, G), TypeError, "x: dtype int64 is not supported"),
        (lambda: ADD(X, R, B, G, axis=2), ValueError, "axis 2 is out of range: x has 2 axes"),
        (lambda: ADD(X, R, B, G, axis=(0, -2)), ValueError, "names an axis of x twice"),
        (lambda: ADD(X, R, B, G, eps=-1), ValueError, "eps is -1"),
        (lambda: ADD(X, R, B, G, gamma=B[:5]), ValueError, r"gamma has shape \(5,\)"),
        (lambda: ADD(X, R, B, G, dtype="int8"), TypeError, "dtype int8 is not supported"),
        (lambda: ADD(X, R, B, G, plan="warp"), ValueError, "plan='warp' chooses a kernel: x is a NumPy array"),
        (lambda: fuse(softmax, store=lambda y: y)(X, eps=1),
         TypeError, "unexpected argument eps=: after x, store takes none"),
        (lambda: fuse(softmax, store=lambda y: y)(X, gamma=B), TypeError, "unexpected argument gamma="),
        (lambda: fuse(rms_norm, store=lambda y: y)(X, beta=B), TypeError, "unexpected argument beta="),
        (lambda: fuse(softmax, store=lambda y: y)(X, return_stats=True), TypeError, "argument return_stats"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_is_refused(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fuse(np.exp, load=lambda x: x),
         TypeError, "op is <ufunc 'exp'>: use cupynorm.layer_norm, .*log_softmax"),
        (lambda: fuse("softmax", load=lambda x: x), TypeError, "op is 'softmax': use cupynorm"),
        (lambda: fuse([], load=lambda x: x), TypeError, "op is .*: use cupynorm"),
        (lambda: fuse(softmax), TypeError, "there is nothing to fuse with softmax: give load, store or both"),
        (lambda: fuse(softmax, store=lambda y: y, keep_loaded=True), TypeError, "keep_loaded=True without load"),
        (lambda: fuse(softmax, load=3), TraceError, "load is of type int: give a function"),
        (lambda: fuse(softmax, load=lambda: 1), TraceError, "load has no parameter: the first one is the loaded value"),
        (lambda: fuse(softmax, load=lambda x: None), TraceError, "load returns None: return a traced value$"),
        (lambda: fuse(softmax, load=lambda x: (x, x)), TraceError, "load returns 2 values: what the op takes is one"),
        (lambda: fuse(softmax, load=lambda x, axis: x),
         TraceError, "axis, a parameter of load, is an argument of softmax"),
        (lambda: fuse(rms_norm, store=lambda y, gamma: y),
         TraceError, "gamma, a parameter of store, is an argument of rms_norm"),
        (lambda: fuse(softmax, load=lambda x: x if x > 0 else -x),
         TraceError, r"test_fusion\.py:\d+, in <lambda>: a branch"),
        (lambda: fuse(softmax, store=lambda y: y + X),
         TraceError, r"_fusion\.py:\d+, in <lambda>: an array that .* captured"),
    ],
)  # fmt: skip
def test_a_fusion_that_cannot_be_is_refused_when_it_is_made(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_parameter_may_have_the_name_of_another_ops_argument() -> None:
    x = normal(3, 8)

    found = fuse(softmax, store=lambda y, gamma: y * gamma)(x, gamma=1)

    assert np.array_equal(found, in_float64(softmax, x))


# --- the fusion as a value, and its two roads -----------------------------------------------------------------------


def test_fusions_of_the_same_functions_are_equal() -> None:
    def shifted(value: Any, by: Any) -> Any:
        return by + value

    assert fuse(softmax, load=lambda x, b: x + b).load == fuse(log_softmax, load=shifted).load
    assert fuse(softmax, load=lambda x, b: x + b) == fuse(softmax, lambda x, b: b + x)
    assert hash(fuse(softmax, load=lambda x, b: x + b)) == hash(fuse(softmax, lambda x, b: b + x))
    assert fuse(softmax, load=lambda x, b: x + b) != fuse(softmax, load=lambda x, b: x - b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ADD.keep_loaded = True  # type: ignore[misc]


def test_functions_run_once_when_the_fusion_is_made() -> None:
    runs: list[int] = []
    fusion = fuse(softmax, load=lambda x: runs.append(1) or x)

    fusion(X)
    fusion(X)

    assert runs == [1]


def softplus_pair(y: Any, g: Any) -> Any:
    return np.log1p(np.exp(y)) * g, y


SOFTPLUS = DeviceFunction(
    "Softplus",
    "namespace cupynorm { struct Softplus { template <typename T> static void apply(const T (&in)[2], T (&out)[2]) "
    "{ out[0] = fn_log(T(1) + fn_exp(in[0])) * in[1]; out[1] = in[0]; } }; }",
    softplus_pair,
    inputs=2,
    outputs=2,
)


def test_a_device_functions_mirror_runs_on_the_host() -> None:
    x, g = normal(4, 6), normal(6)
    fusion = fuse(layer_norm, load=lambda x: x * 2, store=SOFTPLUS)

    soft, y = fusion(x, g)

    normed = op_table.op("layer_norm").reference(np.float64(x) * 2)[0]
    assert_close(soft, np.log1p(np.exp(normed)) * g, scale=np.broadcast_to(np.abs(g), x.shape))
    assert_close(y, normed)
    assert np.array_equal(fusion(x, store1=g)[0], soft)
    with pytest.raises(TypeError, match="no operand was given for store1"):
        fusion(x)
    with pytest.raises(TraceError, match="load returns 2 values"):
        fuse(layer_norm, load=SOFTPLUS)


def test_device_arrays_reach_the_seam_checked(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[fusion_calls.FusedCall] = []
    monkeypatch.setattr(fusion_calls, "run", lambda call, _: calls.append(call))
    monkeypatch.setattr(bound_calls.Calls, "add", lambda *_: None)
    x, r, b, g = (simulated.cupy.asarray(each) for each in (X, R, B, G))
    fusion = fuse(
        layer_norm, load=lambda x, r, b, s: x + r * s + b, store=lambda y, g: (y, y * g), keep_loaded=True
    )

    results = fusion(x, r, b, 0.5, g, gamma=b, dtype="float16", return_stats=True, eps=0.25, plan="block")

    (call,) = calls
    assert (call.op.name, call.axes, call.eps, call.plan, call.device) == ("layer_norm", 1, 0.25, "block", 0)
    assert (call.load, call.store) == (fusion.load, fusion.store)
    assert [(each.name, each.kind, each.value) for each in call.load_operands] == [
        ("r", "full", 0), ("b", "column", 0), ("s", "value", 0.5)
    ]  # fmt: skip
    assert [(each.name, each.kind) for each in call.store_operands] == [("g", "row")]
    assert call.store_operands[0].stretched(x.shape, "store's").strides == (4, 0)
    assert call.load_operands[0].array is r
    assert call.columns == {"gamma": b}
    assert [id(each) for each in results] == [
        id(each) for each in (*call.outs, call.loaded, *call.stats.values())
    ]
    assert [each.dtype for each in results] == ["float16", "float16", "float32", "float32", "float32"]
    assert all(type(each) is simulated.cupy.ndarray for each in results)
    assert call.compute == np.float32


def test_host_and_device_arrays_do_not_mix(simulated: Any) -> None:
    device = simulated.cupy.asarray
    fusion = fuse(softmax, load=lambda x, r: x + r)

    with pytest.raises(TypeError, match=r"x is a CuPy array .* and r is a NumPy array"):
        fusion(device(X), R)
    with pytest.raises(TypeError, match=r"x is a NumPy array .* and r is a CuPy array"):
        fusion(X, device(R))
    with pytest.raises(TypeError, match=r"x is a NumPy array .* and out is a CuPy array"):
        fusion(X, R, out=device(X))
    with pytest.raises(TraceError, match="an array that the function has captured"):
        fuse(softmax, load=lambda x: x + device(B))


def test_device_arrays_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import simulator

    two = simulator.install(monkeypatch, ["h200", "a100"])
    fusion = fuse(softmax, load=lambda x, r: x + r)
    x = two.cupy.asarray(X)
    with two.cupy.cuda.Device(1):
        r = two.cupy.asarray(R)

    with pytest.raises(ValueError, match="x is on device 0 and r on device 1"):
        fusion(x, r)
    with pytest.raises(ValueError, match="r starts at an address that is no multiple of its 4 bytes"):
        fusion(x, two.cupy.place(R, 2))
    with pytest.raises(ValueError, match="an output and r share memory"):
        fusion(x, x[:1], out=x)


def test_public_names() -> None:
    assert isinstance(ADD, cupynorm.Fusion)
    assert issubclass(cupynorm.TraceError, TypeError)
