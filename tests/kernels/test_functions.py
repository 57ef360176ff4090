"""The table of functions: on NumPy arrays against SciPy and the definitions, in kernels against NumPy."""
# ruff: noqa: PLW0108  what is traced is a function of one parameter

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from cupynorm import functions
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.host import special as host_special
from cupynorm.lower import operations
from cupynorm.lower.tracing import trace
from cupynorm.runtime import compiler, nvrtc
from tests import structs
from tests.build_gate import disassemble, nvdisasm, spills
from tests.simulator import build

needs_compiler = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
needs_nvrtc = pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # all of them
SPREAD = np.concatenate(
    [
        np.linspace(-8, 8, 40001),
        np.geomspace(1e-30, 1e30, 4001),
        -np.geomspace(1e-30, 1e30, 4001),
        [0.0, -0.0, np.inf, -np.inf, np.nan],
    ]
)

# by the formula, in a wide type, on numbers where it loses nothing
FORMULAS: dict[str, Any] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "tanh": np.tanh,
    "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(x / 2),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def gelu_tanh(x: Any) -> Any:
    return functions.gelu(x, approximate="tanh")


def function_of(name: str) -> Any:
    return gelu_tanh if name == "gelu_tanh" else getattr(functions, name)


def test_erf_and_erfc_agree_with_the_c_library() -> None:
    x = np.concatenate(
        [np.linspace(-7, 7, 20001), np.geomspace(1e-300, 26, 2001), [0.46875, -0.46875, 4, -4, 0.0, -0.0]]
    )

    for ours, theirs in ((host_special.erf, math.erf), (host_special.erfc, math.erfc)):
        expected = np.array([theirs(value) for value in x])
        assert np.abs(ours(x) - expected).max() <= 5e-16
        assert (np.abs(ours(x) - expected) <= 1e-15 * np.abs(expected)).all()  # in the tail too


def test_erf_and_erfc_of_what_is_no_number() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 30.0, -0.0])

    assert np.array_equal(host_special.erf(x), [1, -1, np.nan, 1, 0], equal_nan=True)
    assert np.array_equal(host_special.erfc(x), [0, 2, np.nan, 0, 1], equal_nan=True)
    assert np.signbit(host_special.erf(x)[-1])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_function_is_its_formula(name: str) -> None:
    x = np.geomspace(0.01, 20, 1001)

    assert np.allclose(
        function_of(name)(x), FORMULAS[name](x.astype(np.longdouble)).astype(float), rtol=4e-16, atol=0
    )
    assert function_of(name)(2.0) == pytest.approx(float(FORMULAS[name](2.0)), rel=1e-15)


def test_gelu_is_exact_in_both_tails() -> None:
    special = pytest.importorskip("scipy.special")
    x = np.linspace(-37, 9, 4001)

    expected = x * special.ndtr(x)

    # the rounding of x / sqrt(2) grows with x^2
    assert (np.abs(functions.gelu(x) - expected) <= (4e-16 + 4e-16 * x * x) * np.abs(expected)).all()


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_at_infinity_are_pytorchs(name: str) -> None:
    y = function_of(name)(np.array([-np.inf, np.inf, np.nan, -300.0, -1e300]))

    assert np.array_equal(y[:3], [0 if name == "relu" else np.nan, np.inf, np.nan], equal_nan=True)
    assert np.abs(y[3:]).max() < 1e-100


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "silu", "gelu"])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@np.errstate(all="ignore")  # inf - inf
def test_an_array_keeps_its_dtype_and_is_rounded_once(name: str, dtype: str) -> None:
    kind = dtype_of(dtype)
    x = np.linspace(-4, 4, 999).astype(kind)

    y = function_of(name)(x)

    exact = function_of(name)(x.astype(np.float64))
    near = np.abs(y.astype(np.float64) - exact)
    other = np.abs(exact.astype(kind).astype(np.float64) - exact)
    assert y.dtype == kind
    assert np.array_equal(y[~np.isfinite(exact)], exact[~np.isfinite(exact)], equal_nan=True)
    assert (near <= other)[np.isfinite(exact)].all()


def test_a_bfloat16_is_not_rounded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    halfway = operations.OPERATIONS["exp"]._replace(compute=lambda x: x + 2.0**-8 + 2.0**-40)
    monkeypatch.setitem(operations.OPERATIONS, "exp", halfway)

    assert functions.exp(np.ones(1, ml_dtypes.bfloat16)).tolist() == [1 + 2.0**-7]


def test_integers_and_numbers_become_float64_and_longdouble_stays() -> None:
    assert functions.exp(np.arange(3)).dtype == np.float64
    assert functions.exp(np.array([1.5], np.longdouble)).dtype == np.longdouble
    assert functions.sigmoid(0) == 0.5
    assert [functions.erf(x) for x in (0.25, 1, -9.0)] == pytest.approx([math.erf(0.25), math.erf(1), -1])
    assert functions.gelu(np.ones((0, 2))).shape == (0, 2)
    assert functions.exp(True) == math.e
    assert functions.sqrt(np.float32(2)).dtype == np.float32


def test_what_chooses_keeps_numpys_dtype_and_passes_on_nan() -> None:
    x = np.array([-1, 0, 2], np.int8)
    nan = np.array([np.nan, 1.0])

    assert functions.maximum(x, x).dtype == functions.abs(x).dtype == np.int8
    assert functions.relu(x).tolist() == [0, 0, 2]
    assert functions.clip(x, None, 1).tolist() == [-1, 0, 1]
    assert functions.clip(x, 0, None).tolist() == [0, 0, 2]
    assert functions.clip(x, -0.5, 0.5).tolist() == [-0.5, 0, 0.5]
    assert np.array_equal(functions.maximum(nan, nan[::-1]), [np.nan, np.nan], equal_nan=True)
    assert np.array_equal(functions.minimum(nan, 0.0), [np.nan, 0], equal_nan=True)
    assert functions.where(x, 5, 6).tolist() == [5, 6, 5]


def test_cast_rounds_once_and_gives_the_dtype() -> None:
    x = np.array([1 + 2.0**-11 + 2.0**-40, 1e300, np.nan])

    for name, first in (("float16", 1 + 2.0**-10), ("float32", 1 + 2.0**-11), ("float64", x[0])):
        y = functions.cast(x, name)
        assert y.dtype == np.dtype(name)
        assert float(y[0]) == first


def test_cast_to_bfloat16_is_not_rounded_twice() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    y = functions.cast(np.array([1 + 2.0**-8 + 2.0**-40]), "bfloat16")

    assert y.dtype == ml_dtypes.bfloat16
    assert float(y[0]) == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: functions.exp("x"), TypeError, "exp was given str of dtype <U1: give real numbers"),
        (lambda: functions.maximum(1, 1j), TypeError, "maximum was given complex of dtype complex128"),
        (lambda: functions.where(None, 1, 2), TypeError, "where was given NoneType of dtype object"),
        (
            lambda: functions.gelu(1.0, approximate="sigmoid"),
            ValueError,
            "approximate is 'sigmoid': use 'none' or 'tanh'",
        ),
        (lambda: functions.cast(1.0, "int8"), TypeError, "dtype int8 is not supported: use"),
    ],
)
def test_bad_input_is_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_device_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions.devices, "is_device_array", lambda x: True)

    with pytest.raises(TypeError, match=r"exp was given a CuPy array: .* cupynorm\.fuse"):
        functions.exp(np.ones(2))


def test_all_is_sorted_and_the_errors_table_is_complete() -> None:
    written = [
        name
        for name, value in vars(functions).items()
        if inspect.isfunction(value) and value.__module__ == functions.__name__ and not name.startswith("_")
    ]

    assert functions.__all__ == sorted(written)
    assert f"cupynorm.functions has {', '.join(functions.__all__)}" == operations.THE_TABLE


def test_nothing_warns() -> None:
    with np.errstate(all="raise"):
        for name in functions.__all__:
            if name not in {"cast", "clip", "maximum", "minimum", "where"}:
                function_of(name)(SPREAD)
        functions.cast(SPREAD, "float16")


# --- in kernels -----------------------------------------------------------------------------------------------------

# Relative errors in float: a few units of 6e-8; sigmoid and its kin multiply the rounding of x log2(e)
# by its size. In double only the host's C library and NumPy differ.
KERNEL_ERRORS = {
    **dict.fromkeys(("exp", "log", "sqrt", "rsqrt", "tanh", "erf"), 3e-7),
    **dict.fromkeys(("sigmoid", "silu"), 4e-6),
    **dict.fromkeys(("gelu", "gelu_tanh"), 1e-5),
    "relu": 0.0,
    "abs": 0.0,
}


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", KERNEL_ERRORS)
@np.errstate(all="ignore")  # inf - inf
def test_a_kernels_function_gives_numpys_numbers(name: str, dtype: str) -> None:
    x = SPREAD.astype(dtype)
    function = trace(lambda x: function_of(name)(x), "store")[0]

    (y,) = structs.run_expression(function, x)

    (expected,) = function.evaluate([x])
    relative = KERNEL_ERRORS[name] if dtype == "float32" else 1e-14
    held = expected.astype(dtype)
    error = np.abs(y.astype(np.float64) - expected)
    flushed = 100 * np.finfo(dtype).tiny  # x times a sigmoid that is
    # the exponent's rounding
    slope = 1 + np.minimum(x.astype(np.float64) ** 2, 1e4) if "gelu" in name and dtype == "float64" else 1
    assert np.array_equal(np.isnan(y), np.isnan(expected))
    assert np.array_equal(y[np.isinf(held)], held[np.isinf(held)])
    assert (error <= relative * slope * np.abs(expected) + flushed)[np.isfinite(held)].all()


# The hardware's 2^x and 1/x have errors, where g++ stands in with exact ones. Here both are at their worst (PTX ISA:
# 2^-22.5 and 1 ulp), each way, and 1/x is flushed.
WORST = """
#include <base/arithmetic.cuh>
namespace cupynorm {{
inline float worst_exp2(float x) {{ return float(std::exp2(double(x)) * (1.0 + {sign} * 0x1p-22)); }}
inline float worst_reciprocal(float x) {{
  const float y = float(1.0 / double(x) * (1.0 + {sign} * 0x1p-23));
  return std::fabs(y) < 0x1p-126f ? 0.0f * y : y;
}}
}}
#define exp2_approx worst_exp2
#define reciprocal_approx worst_reciprocal
#include <base/functions.cuh>
"""


def ulps_apart(a: Any, b: Any) -> Any:
    """Count the float16 between two arrays of them; 0 between nan and nan, and between 0 and -0."""

    def place(x: Any) -> Any:
        bits = x.view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    both = np.isnan(a) & np.isnan(b)
    return np.where(both, 0, np.abs(place(a) - place(b)) + 100_000 * (np.isnan(a) != np.isnan(b)))


@needs_compiler
@pytest.mark.parametrize("sign", [-1, 0, 1])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid"])
def test_an_activation_is_within_an_ulp_for_every_half(name: str, sign: int) -> None:
    function = trace(lambda x: function_of(name)(x), "store")[0]
    x = HALVES.astype(np.float32)

    text, headers = function.struct_text("Tested"), WORST.format(sign=sign)
    (y,) = structs.run(text, "Tested", 1, 1, [x], headers)

    (exact,) = function.evaluate([x])
    with np.errstate(all="ignore"):
        apart = ulps_apart(y.astype(np.float16), exact.astype(np.float16))
    assert apart.max() <= 1
    assert np.count_nonzero(apart) < 70  # 0.1 %: where the exact result is all but halfway


@needs_compiler
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_gelu_in_float_is_as_exact_as_it_says(sign: int) -> None:
    function = trace(lambda x: functions.gelu(x), "store")[0]
    x = np.concatenate([-np.geomspace(1e-6, 13, 50000), np.geomspace(1e-6, 30, 20000)]).astype(np.float32)

    text, headers = function.struct_text("Tested"), WORST.format(sign=sign)
    (y,) = structs.run(text, "Tested", 1, 1, [x], headers)

    (exact,) = function.evaluate([x])
    error = np.abs(y - exact) / np.abs(exact)
    assert error[x > -2].max() < 1e-6
    assert error[x > -5.5].max() < 2.2e-6
    assert error.max() < 1e-5


@needs_compiler
@pytest.mark.parametrize("sign", [-1, 0, 1])
@np.errstate(all="ignore")  # inf - inf
def test_division_holds_over_the_whole_range(sign: int) -> None:
    function = trace(lambda a, b: a / b, "store")[0]
    random = np.random.default_rng(3)
    sizes = 2.0 ** random.uniform(-125, 127.9, (2, 20000))
    a, b = (sizes * random.choice([-1, 1], sizes.shape)).astype(np.float32)
    edges = np.array([0, -0.0, 1, np.inf, -np.inf, np.nan, 2.0**126, 3e38], np.float32)
    a, b = (
        np.concatenate([each, more.ravel()])
        for each, more in zip((a, b), np.meshgrid(edges, edges), strict=True)
    )

    text, headers = function.struct_text("Tested"), WORST.format(sign=sign)
    (y,) = structs.run(text, "Tested", 2, 1, [a, b], headers)

    expected = a / b
    normal = np.isfinite(expected) & (np.abs(expected) >= 2.0**-126)
    below_overflow = normal & (np.abs(expected) < 3.4e38)
    assert np.array_equal(np.isnan(y), np.isnan(expected))
    assert (np.abs(y - expected) <= 3e-7 * np.abs(expected))[below_overflow].all()
    assert np.array_equal(y[np.isinf(b)], expected[np.isinf(b)], equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_kernels_cast_rounds_as_numpys(name: str, dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(4)
    fraction = 1 << (7 if name == "bfloat16" else 10)
    halfway = 1 + (random.integers(0, fraction, 5000) + 0.5) / fraction
    halfway *= 2.0 ** random.integers(-20, 15, 5000)
    tiny = halfway * random.choice([0, 2.0**-24, -(2.0**-24), 2.0**-40], 5000)
    x = np.concatenate(
        [halfway, halfway + tiny, [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.9, 65520]]
    ).astype(dtype)
    function = trace(lambda x: functions.cast(x, name), "store")[0]

    (y,) = structs.run_expression(function, x)

    expected = functions.cast(x, name).astype(dtype)
    assert np.array_equal(y, expected, equal_nan=True)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["70", "75", "90", "120"])
def test_every_function_compiles_for_the_device_and_keeps_to_registers(arch: str) -> None:
    if arch not in nvrtc.supported_archs():
        pytest.skip(f"no NVRTC for sm_{arch}")
    names = [*KERNEL_ERRORS, "cast"]
    text = structs.HEADERS
    for name in names:
        store = (lambda x: functions.cast(x, "bfloat16")) if name == "cast" else function_of(name)
        function = trace(store, "store")[0]
        text += function.struct_text(f"Of_{name}") + structs.KERNEL.format(
            inputs=1, outputs=1, name=f"Of_{name}"
        ).replace("apply_all", f"apply_{name}")
    kernels = [f"apply_{name}<{kind}>" for name in names for kind in ("float", "double")]

    compiled = nvrtc.compile_all(text, kernels, compiler.options(), arch)

    found = {kernel: spills(each) for kernel, each in zip(kernels, compiled, strict=True)}
    assert {kernel: each for kernel, each in found.items() if each} == {}


# instructions for sm_90 beyond those of a kernel that only copies; constants that a loop would keep in registers count
COSTS = {"gelu": 19, "gelu_tanh": 10, "silu": 8, "sigmoid": 5, "relu": 3, "exp": 12, "sqrt": 8}


@needs_nvrtc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("name", COSTS)
def test_what_16_bit_kernels_use_leaves_them_their_bandwidth(name: str) -> None:
    def instructions(store: Any) -> int:
        function = trace(store, "store")[0]
        text = structs.kernel_text(function)
        kernel = nvrtc.compile(text, "apply_all<float>", compiler.options(), "90")
        return len(disassemble(kernel.image)[kernel.lowered_name].instructions)

    assert instructions(lambda x: function_of(name)(x)) - instructions(lambda x: x) <= COSTS[name]
