"""The NumPy road against hand-worked rows, SciPy, PyTorch and the definitions, over layouts and past a block."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm, log_softmax, rms_norm, softmax
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.host import reference
from cupynorm.tools.testing import TOLERANCES, assert_close, inputs
from tests.shapes import COLUMNS, ROWS

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))


@pytest.fixture
def little_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a block so small that rows of 40 columns are cut into pieces."""
    monkeypatch.setattr(reference, "BLOCK", 16)
    return 16


def test_hand_worked_rows() -> None:
    x = np.array([[1.0, 2.0, 3.0, 6.0]])  # mean 3, variance 3.5, mean square 12.5
    halves = np.log(np.array([[1.0, 1.0, 2.0]]))

    y, mean, rstd = layer_norm(x, np.full(4, 2.0), np.full(4, 1.0), eps=0.5, return_stats=True)
    scaled, by = rms_norm(x, eps=0, return_stats=True)

    assert y.tolist() == [[-1.0, 0.0, 1.0, 4.0]]
    assert (mean.tolist(), rstd.tolist()) == ([3.0], [0.5])
    assert scaled == pytest.approx(x / 12.5**0.5)
    assert by == pytest.approx(12.5**-0.5)
    assert softmax(halves) == pytest.approx(np.array([[0.25, 0.25, 0.5]]))
    assert log_softmax(halves) == pytest.approx(np.log(np.array([[0.25, 0.25, 0.5]])))


@every_op
@every_dtype
@pytest.mark.parametrize("cols", [cols for cols in COLUMNS if cols <= 16384])
def test_agrees_with_the_definition_at_the_edges(op: Op, dtype: str, cols: int) -> None:
    case = inputs(op, 15, cols, dtype)

    y = op.function(case.x, **case.parameters)

    assert (type(y), y.dtype) == (np.ndarray, dtype_of(dtype))
    assert_close(y, op.reference(case.x, **case.parameters)[0])


@every_op
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(op: Op, rows: int) -> None:
    case = inputs(op, rows, 12, "float32")

    assert_close(op.function(case.x, **case.parameters), op.reference(case.x, **case.parameters)[0])


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_rows_longer_than_a_block(op: Op, dtype: str) -> None:
    case = inputs(op, 7, 2 * reference.BLOCK + 5, dtype)

    assert_close(op.function(case.x, **case.parameters), op.reference(case.x, **case.parameters)[0])


CUTS = [(40,), (5, 3), (9, 40), (2, 3, 1, 5), (3, 2, 7, 11), (0, 40), (3, 0, 2), (40, 1, 1, 3)]


@pytest.mark.usefixtures("little_blocks")
@every_op
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        (shape, axes)
        for shape in CUTS
        for axes in range(1, len(shape) + 1)
        if 0 not in shape[len(shape) - axes :]
    ],
)
def test_every_cut_into_blocks_gives_the_same(op: Op, shape: tuple[int, ...], axes: int) -> None:
    trailing = shape[len(shape) - axes :]
    random = np.random.default_rng(7)
    x = random.standard_normal(shape)
    parameters = {name: random.standard_normal(trailing) for name in op.parameters}
    options: dict[str, Any] = {"axis": tuple(range(-axes, 0)), **({"return_stats": True} if op.stats else {})}

    results = op.function(x, **parameters, **options)

    expected = op.reference(x, **parameters, axes=axes)
    for got, want in zip(results if op.stats else (results,), expected, strict=True):
        assert got.shape == want.shape
        assert np.allclose(got, want, rtol=1e-12, atol=1e-13)


VIEWS = {
    "rows apart": lambda a: a[:, ::2, :9],
    "backwards": lambda a: a[::-1, :, ::-1],
    "swapped": lambda a: a.swapaxes(0, 2),
    "columns apart": lambda a: a[..., ::3],
    "one row for all": lambda a: np.broadcast_to(a[:1, :1], (4, 5, a.shape[2])),
}


@every_op
@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("block", [1 << 17, 4])
def test_rows_and_columns_may_lie_anywhere(
    op: Op, how: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    x = VIEWS[how](np.random.default_rng(8).standard_normal((6, 5, 11)))
    out = np.zeros((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]

    y = op.function(x, out=out)

    assert y is out
    assert_close(out, op.reference(x)[0])


@every_op
@pytest.mark.parametrize("block", [1 << 17, 16])
def test_the_result_may_replace_the_input(op: Op, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    case = inputs(op, 9, 40, "float32")
    x = case.x.copy()

    assert op.function(x, **case.parameters, out=x) is x

    assert_close(x, op.reference(case.x, **case.parameters)[0])


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 5), (4, 1), (4, 5)])
def test_parameters_broadcast_over_the_normalised_axes(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(9)
    x, gamma, beta = (
        random.standard_normal((3, 4, 5)),
        random.standard_normal(shape),
        random.standard_normal(shape),
    )

    y = layer_norm(x, gamma, beta, axis=(-1, -2))

    assert_close(y, OPS[0].reference(x, gamma, beta, axes=2)[0], axes=2)


@every_op
@pytest.mark.parametrize("y_dtype", sorted(DTYPES))
@every_dtype
def test_any_dtype_goes_in_and_any_comes_out(op: Op, dtype: str, y_dtype: str) -> None:
    case = inputs(op, 11, 24, dtype, parameter_dtype="bfloat16" if "bfloat16" in DTYPES else "float16")

    y = op.function(case.x, **case.parameters, dtype=dtype_of(y_dtype))

    assert y.dtype == dtype_of(y_dtype)
    assert_close(y, op.reference(case.x, **case.parameters)[0])


def nearest(value: Fraction, fraction_bits: int, least_exponent: int) -> Fraction:
    """Round to nearest even with integers alone."""
    if value == 0:
        return value
    size, exponent = abs(value), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    unit = Fraction(2) ** (max(exponent, least_exponent) - fraction_bits)
    return round(value / unit) * unit


@pytest.mark.parametrize(
    ("dtype", "fraction_bits", "least_exponent"), [("float16", 10, -14), ("bfloat16", 7, -126)]
)
def test_a_result_is_rounded_once(dtype: str, fraction_bits: int, least_exponent: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    random = np.random.default_rng(10)
    halfway = (
        1 + (random.integers(0, 2**fraction_bits, 300) + 0.5) / 2**fraction_bits
    ) * 2.0 ** random.integers(-20, 15, 300)
    tiny = halfway * random.choice([0, 2.0**-27, -(2.0**-27), 2.0**-40, -(2.0**-40)], 300)  # lost in float32
    values = np.concatenate(
        [halfway + tiny, -halfway - tiny, random.standard_normal(300), halfway * 2.0**-120]
    )

    rounded = reference._round(values, kind).astype(kind).astype(np.float64)

    expected = [float(nearest(Fraction(float(value)), fraction_bits, least_exponent)) for value in values]
    assert rounded.tolist() == expected


def test_rounding_keeps_what_is_no_number_and_overflows_to_infinity() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e300, -1e300, 1e-300, 3.39e38])

    with np.errstate(all="ignore"):
        rounded = reference._round(values, np.dtype(ml_dtypes.bfloat16)).astype(ml_dtypes.bfloat16)

    largest = float.fromhex("0x1.fep127")  # 3.39e38 is less than half a unit above it
    expected = [np.nan, np.inf, -np.inf, -0.0, 0.0, np.inf, -np.inf, 0.0, largest]
    assert np.array_equal(rounded.astype(np.float64), expected, equal_nan=True)
    assert np.signbit(rounded[[3, 4]].astype(float)).tolist() == [True, False]


@every_op
def test_special_values_stay_in_their_row_and_nothing_warns(op: Op) -> None:
    x = np.random.default_rng(11).standard_normal((9, 6)).astype(np.float32)
    x[1, 2], x[3, 0], x[5, 5], x[7] = np.nan, np.inf, -np.inf, -np.inf

    with np.errstate(all="raise"):
        y = op.function(x)

    assert_close(y, op.reference(x)[0])
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[::2]).all()


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_a_row_of_only_minus_infinity_is_nan(function: Any) -> None:
    assert np.isnan(function(np.full((2, 3), -np.inf))).all()


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = 1e6 + 1e-3 * np.random.default_rng(12).standard_normal((5, 4096))

    y = layer_norm(x, eps=0)

    assert_close(y, OPS[0].reference(x, eps=0)[0])
    assert y.std(axis=1) == pytest.approx(np.ones(5), rel=1e-12)


def test_constant_rows_are_beta_and_without_eps_nan() -> None:
    x = np.full((2, 7), 0.1, np.float32)
    beta = np.arange(7, dtype=np.float32)

    assert layer_norm(x, None, beta).tolist() == [beta.tolist()] * 2
    assert np.isnan(layer_norm(x, eps=0)).all()
    assert np.isnan(rms_norm(np.zeros((2, 7)), eps=0)).all()


@every_op
def test_no_float64_copy_of_x_is_made(op: Op) -> None:
    for shape in ((16384, 512), (1, 1 << 23)):
        x = np.ones(shape, np.float16)
        out = np.empty_like(x)
        tracemalloc.start()

        op.function(x, out=out)

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * reference.BLOCK * 8  # a float64 copy is 64 blocks


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@every_dtype
def test_agrees_with_scipy(function: str, dtype: str) -> None:
    special = pytest.importorskip("scipy.special")
    case = inputs(OPS[2], 8, 100, dtype)
    x = case.x[[0, 1, 2, 3]]  # SciPy has its own mind about rows of -inf

    y = {"softmax": softmax, "log_softmax": log_softmax}[function](x)

    assert_close(y, getattr(special, function)(x.astype(np.float64), axis=-1))


@every_op
@every_dtype
def test_agrees_with_torch(op: Op, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    case = inputs(op, 14, 100, dtype)
    x = torch.from_numpy(case.x.astype(np.float64))
    parameters = {name: torch.from_numpy(array.astype(np.float64)) for name, array in case.parameters.items()}
    expected = {
        "layer_norm": lambda: functional.layer_norm(x, (100,), *parameters.values(), eps=1e-5),
        "rms_norm": lambda: functional.rms_norm(x, (100,), *parameters.values(), eps=1e-6),
        "softmax": lambda: functional.softmax(x, -1),
        "log_softmax": lambda: functional.log_softmax(x, -1),
    }[op.name]()

    y = op.function(case.x, **case.parameters)

    assert_close(y, expected.numpy(), dtype=dtype)
    assert TOLERANCES[dtype] < 0.01
