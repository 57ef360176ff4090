"""User's functions as values: what is traced, what it evaluates to, what it says in C++, and what is refused."""
# ruff: noqa: PLW0108  what is traced is the lambda, whose line errors name

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from typing import Any

import numpy as np
import pytest

from cupynorm import functions as f
from cupynorm.lower.expressions import DeviceFunction, Expression, Step, cpp_constant
from cupynorm.lower.operations import OPERATIONS, UFUNCS
from cupynorm.lower.tracing import LARGEST_POWER, MOST_STEPS, TraceError, trace
from cupynorm.runtime import compiler, nvrtc
from tests import structs
from tests.build_gate import spills
from tests.simulator import build

needs_compiler = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
needs_nvrtc = pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")

X = np.linspace(-3, 3, 61)
ARRAY = np.arange(3.0)


def traced(function: Any) -> Expression:
    return trace(function, "store")[0]


# each says the same to NumPy's arrays as to traced values
SAME: dict[str, Any] = {
    "+ - * /": lambda x, r: (x + r) * (x - r) / (r * r + 2),
    "numbers on either side": lambda x, r: 1 - x + 2 * r - 3 / (x * x + 1) + r / 4,
    "unary": lambda x, r: -x + +r,
    "abs": lambda x, r: abs(x) + f.abs(r),
    "powers": lambda x, r: (
        x**2 + r**3 - x**5 + (x * x + 1) ** 0.5 + (x * x + 1) ** -0.5 + (r + 9) ** -2 + x**0
    ),
    "every comparison": lambda x, r: (
        f.where(x < r, 1, 0)
        + f.where(x <= 0, 2, 0)
        + f.where(x > r, 4, 0)
        + f.where(x >= 0.5, 8, 0)
        + f.where(x == r, 16, 0)
        + f.where(x != r, 32, 0)
    ),
    # reversed on purpose
    "reversed comparisons": lambda x, r: f.where(0 < x, x, r) + f.where(np.float64(1) >= x, x, r),  # noqa: SIM300
    "conditions": lambda x, r: f.where((x > 0) & (r > 0) | ~(x > -1), x, r),
    "a condition counts as a number": lambda x, r: x * (r > 0) + (x > 0),
    "a number is where's condition": lambda x, r: f.where(x, r, 7.0),
    "numpy's scalars": lambda x, r: x * np.float32(0.5) + np.int8(3) * r + np.float64(2),
    "numpy's functions": lambda x, r: (
        np.exp(x)
        + np.tanh(r) * np.minimum(x, r)
        + np.maximum(x, 0)
        + np.where(x > r, x, 1)
        + np.clip(x, -1, 1)
    ),
    "numpy's operators": lambda x, r: np.add(x, r) * np.power(x, 2) + np.square(r) + np.reciprocal(r * r + 1),
    "numpy's conditions": lambda x, r: np.where(np.logical_and(x > 0, np.logical_not(r > 0)), x, np.fabs(r)),
    "clip with one bound": lambda x, r: f.clip(x, None, 1) + f.clip(r, -1, None),
    "in place": lambda x, r: functools.reduce(lambda a, b: a + b, [x, r, x, 1.0]),
    "inf": lambda x, r: f.where(x > 2, -np.inf, x) + f.maximum(r, -math.inf),
    "relu": lambda x, r: f.relu(x) - f.relu(-r),
    "unrolled loop": lambda x, r: sum(((x - r) * i for i in range(1, 4)), 0.5),
}


@pytest.mark.parametrize("how", SAME)
def test_a_traced_function_is_the_function(how: str) -> None:
    r = X[::-1] * 0.7

    (y,) = traced(SAME[how]).evaluate([X, r])

    assert np.allclose(y, SAME[how](X, r), rtol=1e-14, atol=1e-14)
    assert y.dtype == np.float64


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", SAME)
def test_the_struct_gives_numpys_numbers(how: str, dtype: str) -> None:
    x, r = X.astype(dtype), (X[::-1] * 0.7).astype(dtype)
    expression = traced(SAME[how])

    (y,) = structs.run_expression(expression, x, r)

    (expected,) = expression.evaluate([x, r])
    tolerance = 3e-6 if dtype == "float32" else 1e-13
    # a few of the terms are near 500, and cancel
    assert np.allclose(y, expected, rtol=tolerance, atol=100 * tolerance)


@needs_nvrtc
def test_every_struct_compiles_for_the_device() -> None:
    text = structs.HEADERS
    for index, how in enumerate(SAME):
        text += traced(SAME[how]).struct_text(f"S{index}")
        text += structs.KERNEL.format(inputs=2, outputs=1, name=f"S{index}").replace("apply_all", f"k{index}")
    kernels = [f"k{index}<{kind}>" for index in range(len(SAME)) for kind in ("float", "double")]

    compiled = nvrtc.compile_all(text, kernels, compiler.options(), "90")

    assert [spills(each) for each in compiled] == [[]] * len(kernels)


@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda ufunc: ufunc.__name__)
def test_numpys_function_is_the_one_of_its_name(ufunc: Any) -> None:
    conditions = UFUNCS[ufunc].startswith("logical")
    values = (X, X[::-1] + 0.05) if ufunc.nin == 2 else (np.abs(X) + 1,)

    if conditions:
        values = tuple(each > 0 for each in values)
        expression = traced(lambda x, r: ufunc(*(each > 0.5 for each in (x, r)[: ufunc.nin])))
    else:
        expression = traced(lambda x, r: ufunc(*(x, r)[: ufunc.nin]))
    (y,) = expression.evaluate([*values, 0][:2])

    assert np.array_equal(y, ufunc(*values))


@pytest.mark.parametrize("bits", [11, 24])
def test_cast_in_evaluate_rounds_once(bits: int) -> None:
    name = {11: "float16", 24: "float32"}[bits]

    (y,) = traced(lambda x: f.cast(x, name)).evaluate([1 + 2.0**-bits + 2.0**-52])

    assert y == 1 + 2.0 ** (1 - bits)


def test_cast_to_bfloat16_in_evaluate_is_not_rounded_twice() -> None:
    pytest.importorskip("ml_dtypes")

    (y,) = traced(lambda x: f.cast(x, "bfloat16")).evaluate([1 + 2.0**-8 + 2.0**-40])

    assert y == 1 + 2.0**-7


def test_scalars_and_shapes_broadcast_in_evaluate() -> None:
    expression = traced(lambda x, r, s: x * r + s)

    (y,) = expression.evaluate([np.ones((2, 3)), np.arange(3), 0.5])

    assert y.tolist() == [[0.5, 1.5, 2.5]] * 2


def test_evaluate_in_longdouble_when_asked() -> None:
    third = np.longdouble(1) / 3

    (y,) = traced(lambda x: x * 3 - 1 + f.exp(x)).evaluate([third], np.longdouble)

    assert y.dtype == np.longdouble
    assert y == third * 3 - 1 + np.exp(third)


# what a random function is made of: of moderate size, and smooth but for where
GROWTH: list[Any] = [
    lambda a, b, c: 0.5 * a + b,
    lambda a, b, c: f.tanh(a) * b,
    lambda a, b, c: a - 0.3 * b,
    lambda a, b, c: f.where((a > b) | ~(c < 0.1), b, c),
    lambda a, b, c: f.clip(a, -1, b),
    lambda a, b, c: a / (1 + f.abs(b)),
    lambda a, b, c: f.gelu(a) + f.silu(b),
    lambda a, b, c: f.exp(-abs(a)) * c,
    lambda a, b, c: f.tanh(c) ** 3 - f.erf(a) * f.sigmoid(b),
]


def grow(seed: int, x: Any, r: Any) -> Any:
    """Return what 12 random steps make of two numbers: the same steps for a seed, whatever the numbers are."""
    random = np.random.default_rng(seed)
    values = [x, r, x * r, float(random.normal()) - x]
    for _ in range(12):
        step = GROWTH[random.integers(0, len(GROWTH))]
        values.append(step(*(values[index] for index in random.integers(0, len(values), 3))))
    return values[-1]


@needs_compiler
def test_random_functions_are_the_same_everywhere() -> None:
    x, r = np.random.default_rng(5).standard_normal((2, 300))
    direct = [grow(seed, x, r) for seed in range(40)]
    expression = traced(lambda x, r: tuple(grow(seed, x, r) for seed in range(40)))

    results = structs.run_expression(expression, x, r)

    for got, evaluated, want in zip(results, expression.evaluate([x, r]), direct, strict=True):
        assert np.allclose(evaluated, want, rtol=1e-12, atol=1e-12)
        assert np.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_results_share_no_memory_with_operands_and_nothing_warns() -> None:
    x = np.array([-1.0, 0.0, np.inf])

    with np.errstate(all="raise"):
        same, root = traced(lambda x: (x, f.sqrt(x) / 0)).evaluate([x])

    assert not np.shares_memory(same, x)
    assert np.isnan(root[:2]).all()


def test_several_results_in_order() -> None:
    expression = traced(lambda y, g: (y * g, y, 2.0, g > 0))

    a, b, c, d = expression.evaluate([X, 3.0])

    assert expression.outputs == 4
    assert (a.tolist(), b.tolist(), c, d) == ((X * 3).tolist(), X.tolist(), 2.0, 1.0)


def test_wrong_number_of_operands() -> None:
    with pytest.raises(ValueError, match="1 operands for a function of 2"):
        traced(lambda x, r: x).evaluate([X])


# --- the tree is a value --------------------------------------------------------------------------------------------


def test_common_subexpressions_are_one_step() -> None:
    def swish(x: Any) -> Any:
        return x * f.sigmoid(x)

    expression = traced(lambda x: swish(x) + swish(x) * f.exp(swish(x)))

    assert [step.operation for step in expression.steps] == ["sigmoid", "multiply", "exp", "multiply", "add"]


def test_sharing_keeps_a_chain_of_squares_short() -> None:
    expression = traced(lambda x: functools.reduce(lambda a, _: a * a, range(60), x))

    assert len(expression.steps) == 60


def test_the_value_does_not_depend_on_names_or_on_what_is_not_needed() -> None:
    def one(value: Any, other: Any) -> Any:
        unused = f.exp(value)  # noqa: F841
        product = other * value
        return f.where(value > 0.5, product, value + other)

    def two(a: Any, b: Any) -> Any:
        total = b + a
        return f.where(a > 0.5, a * b, total)

    assert traced(one) == traced(two)
    assert hash(traced(one)) == hash(traced(two))
    assert traced(one).key == traced(two).key
    assert traced(one).struct_text("S") == traced(two).struct_text("S")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (lambda x: x - 1, lambda x: 1 - x),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x + 0.1, lambda x: x + np.float32(0.1)),
        (lambda x: x, lambda x, r: x),
        (lambda x, r: (x, r), lambda x, r: (r, x)),
        (lambda x: f.gelu(x), lambda x: f.gelu(x, approximate="tanh")),
    ],
)
def test_what_differs_differs(one: Any, two: Any) -> None:
    assert traced(one) != traced(two)
    assert traced(one).key != traced(two).key
    assert traced(one).struct_text("S") != traced(two).struct_text("S")


def test_nan_is_equal_to_itself_as_a_constant() -> None:
    assert traced(lambda x: x + math.nan) == traced(lambda x: x + np.nan)


def test_a_tree_is_frozen() -> None:
    expression = traced(lambda x: x + 1)

    assert expression == Expression(
        1, (Step("constant", (), "0x1.0000000000000p+0"), Step("add", (0, 1))), (2,)
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        expression.inputs = 2  # type: ignore[misc]


def test_the_key_is_the_same_in_every_process() -> None:
    assert traced(lambda x, r: x + r * 0.5).key == "20dd6506979c16e8"


# --- the text -------------------------------------------------------------------------------------------------------


def test_the_text_is_steps_alone() -> None:
    assert traced(lambda x, unused, g: (f.gelu(x) * g + 0.1, x > 0)).struct_text("Store") == (
        """namespace cupynorm {
struct Store {
  template <typename T>
  static void apply(const T (&in)[3], T (&out)[2]) {
    const T v0 = in[0];
    const T v2 = in[2];
    const T v3 = fn_gelu(v0);
    const T v4 = v2 * v3;
    const T v5 = fn_constant<T>(0x3dcccccdu, 0x9999999au, 0x3fb99999u);  // 0.1
    const T v6 = v4 + v5;
    const T v7 = fn_constant<T>(0x00000000u, 0x00000000u, 0x00000000u);  // 0.0
    const bool v8 = v0 > v7;
    const T v9 = T(v8);
    out[0] = v6;
    out[1] = v9;
  }
};
}  // namespace cupynorm
"""
    )


CONSTANTS = [
    0.1,
    -0.0,
    1e300,
    -5e-324,
    2.0**-1074,
    1 / 3,
    math.pi,
    math.inf,
    -math.inf,
    math.nan,
    2.0**53 + 2,
    65504,
]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constants_arrive_exactly(dtype: str) -> None:
    expression = traced(lambda x: tuple(CONSTANTS))

    results = structs.run_expression(expression, np.zeros(1, dtype))

    with np.errstate(all="ignore"):
        expected = np.array(CONSTANTS).astype(dtype)
    bits = {"float32": np.uint32, "float64": np.uint64}[dtype]
    actual = np.concatenate(results)
    assert (
        actual[~np.isnan(expected)].view(bits).tolist() == expected[~np.isnan(expected)].view(bits).tolist()
    )
    assert np.isnan(actual[np.isnan(expected)]).all()


@needs_nvrtc
def test_constants_cost_no_conversion_on_the_device() -> None:
    text = structs.kernel_text(traced(lambda x: (x * 0.1 + math.pi, f.where(x > 1e30, -math.inf, math.nan))))

    ptx = nvrtc.compile(text, "apply_all<float>", compiler.options(), "90").ptx

    assert "0f3DCCCCCD" in ptx  # 0.1 as a float
    assert ".f64" not in ptx


@pytest.mark.parametrize("value", CONSTANTS)
def test_a_constants_text_holds_its_bits(value: float) -> None:
    single, low, high = (int(part, 16) for part in re.findall("0x[0-9a-f]{8}", cpp_constant(value)))

    with np.errstate(over="ignore"):
        assert single.to_bytes(4, "little") == np.float32(value).tobytes()
    assert (high << 32 | low).to_bytes(8, "little") == np.float64(value).tobytes()


@pytest.mark.parametrize("name", ["", "1st", "a b", "x;y", "S{}", "é", "a::b", "S\n", "_S"])
def test_names_that_are_no_identifiers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no C.. identifier"):
        traced(lambda x: x).struct_text(name)


def test_no_name_of_the_users_reaches_the_text() -> None:
    def evil_function(evil_x: Any, evil_r: Any) -> Any:
        evil_local = evil_x * evil_r
        return evil_local + 1

    assert "evil" not in traced(evil_function).struct_text("S")


@needs_compiler
def test_nan_passes_through_minimum_maximum_and_clip() -> None:
    nan, one = np.array([np.nan, 1, np.nan, 2]), np.array([1, np.nan, np.nan, 1])
    expression = traced(
        lambda a, b: (
            f.minimum(a, b),
            f.maximum(a, b),
            f.clip(a, -1, 1),
            f.relu(a),
            f.minimum(1.5, a),
            f.maximum(a, math.nan),
        )
    )

    results = structs.run_expression(expression, nan, one)

    for got, want in zip(results, expression.evaluate([nan, one]), strict=True):
        assert np.array_equal(got, np.broadcast_to(want, got.shape), equal_nan=True)


def test_a_limit_that_is_a_constant_costs_one_comparison() -> None:
    text = traced(lambda x, r: f.clip(x, 0, 1) + f.minimum(2.0, r) + f.maximum(x, r)).struct_text("S")

    assert (text.count("fn_at_least("), text.count("fn_at_most("), text.count("fn_maximum(")) == (1, 2, 1)


def test_every_operation_is_tried_here_or_among_the_functions() -> None:
    tried = {step.operation for function in SAME.values() for step in traced(function).steps} - {"constant"}
    alone = {
        "half_reciprocal",
        "log",
        "erf",
        "silu",
        "sigmoid",
        "gelu",
        "gelu_tanh",
        "silu_slope",
        "gelu_slope",
        "cast_float16",
        "cast_bfloat16",
        "cast_float32",
    }

    assert tried | alone == set(OPERATIONS)


# --- what is refused ------------------------------------------------------------------------------------------------


def endless(x: Any) -> Any:
    while True:
        x = x + 1


def grown(x: Any) -> Any:
    x[0] = 1
    return x


def marked(x: Any) -> Any:
    x.mark = 1
    return x


KEPT: list[Any] = []
traced(lambda x: KEPT.append(x) or x)

REFUSED: list[tuple[Any, str]] = [
    (lambda x: x if x > 0 else -x, r"a branch on a traced value .* use where\(condition, a, b\)"),
    (lambda x: 0 < x < 1, "chained comparison"),
    (lambda x: x > 0 and x, "a branch on a traced value"),
    (lambda x: not x, "a branch on a traced value"),
    (lambda x: max(x, 0), "min, max.* minimum, maximum"),
    (lambda x: x in (1, 2), "a branch on a traced value"),
    (lambda x: 1 in x, "the operator in is not supported"),
    (
        lambda x: math.exp(x),
        r"float\(\) or a function of math is not supported; .*cupynorm.functions has .*exp",
    ),
    (lambda x: float(x), r"float\(\)"),
    (lambda x: int(x), r"int\(\)"),
    (lambda x: complex(x), r"complex\(\)"),
    (lambda x: round(x), r"round\(\) is not supported; nothing rounds"),
    (lambda x: math.floor(x), "math.floor"),
    (lambda x: math.ceil(x), "math.ceil"),
    (lambda x: math.trunc(x), "math.trunc"),
    (lambda x: x // 2, "the operator //"),
    (lambda x: 5 % x, "the operator %"),
    (lambda x: divmod(x, 2), "divmod"),
    (lambda x: x @ x, "the operator @"),
    (lambda x: (x > 0) ^ (x < 1), r"the operator \^ is not supported; use a != b"),
    (lambda x: x << 1, "the operator <<"),
    (lambda x: 1 >> x, "the operator >>"),
    (lambda x: list(x), "iteration"),
    (lambda x: reversed(x), "iteration"),
    (lambda x: sum(x), "iteration"),
    (lambda x: range(x), "as an index or a count"),
    (lambda x: x[0], "indexing is not supported; a traced value stands for one element"),
    (grown, "assignment to an element"),
    (marked, "store cannot be traced .*mark"),
    (lambda x: x.__delitem__(0), "deletion"),
    (lambda x: len(x), r"len\(\)"),
    (lambda x: x.shape, "the attribute .shape"),
    (lambda x: x.sum(), "the attribute .sum"),
    (lambda x: x(1), "a call of a traced value"),
    (lambda x: {x: 1}, "in a set, as a key"),
    (lambda x: functools.cache(lambda y: y)(x), "in a cache"),
    (lambda x: f"{x:.2f}", "store cannot be traced"),
    (lambda x: x + ARRAY, r"an array that the function has captured \(shape \(3,\)\) .* make it a parameter"),
    (lambda x: ARRAY * x, "an array that the function has captured"),
    (lambda x: np.array([2.0]) * x, "an array that the function has captured"),
    (lambda x: x**ARRAY, "an array that the function has captured"),
    (lambda x: f.where(ARRAY > 0, x, 0), "an array that the function has captured"),
    (lambda x: np.asarray(x), "conversion to an array"),
    (lambda x: np.array([x, 1]), "conversion to an array"),
    (lambda x: np.sin(x), "the function numpy.sin is not supported; .*sigmoid"),
    (
        lambda x: np.sum(x),
        "the function numpy.sum is not supported; .*reductions over rows are the op's work",
    ),
    (lambda x: np.clip(x, 0, 1, out=ARRAY), "the function numpy.clip"),
    (lambda x: np.add.reduce(x), "numpy.add.reduce is not supported; .*reductions"),
    (lambda x: np.add(x, 1, out=ARRAY), "numpy.add with out="),
    (lambda x: np.exp(x, where=False), "numpy.exp with where="),
    (lambda x: np.power(2.0, x), "a power with a traced exponent"),
    (lambda x: 2**x, r"a power with a traced exponent is not supported; use exp\(exponent \* log\(base\)\)"),
    (lambda x: x**x, "a power with a traced exponent"),
    (lambda x: x**1.7, r"a power with exponent 1.7 .*exp\(1.7 \* log\(x\)\)"),
    (lambda x: x ** (LARGEST_POWER + 1), "a power with exponent 17"),
    (lambda x: pow(x, 2, 3), "a power with a modulus"),
    (lambda x: x ** "2", "str as an operand"),
    (lambda x: x + "1", "str as an operand"),
    (lambda x: None * x, "NoneType as an operand"),
    (lambda x: x + 1j, "complex as an operand"),
    (lambda x: x < [1], "list as an operand"),
    (lambda x: x + 10**400, "an integer beyond 1e308"),
    (lambda x: x & 1, r"the operator & on numbers is not supported; .*\(m != 0\)"),
    (lambda x: (x > 0) | x, r"the operator \| on numbers"),
    (lambda x: ~x, "the operator ~ on numbers"),
    (lambda x: x + KEPT[0], "a traced value of another call"),
    (endless, f"a function of more than {MOST_STEPS} steps"),
    (lambda x: None, "store returns None: return a traced value, or a tuple of them"),
    (lambda x: (), "store returns an empty tuple"),
    (lambda x: [x, x], "store returns a list"),
    (lambda x: (x, "y"), "store returns a str"),
    (lambda x: (x, (x, x)), "store returns a tuple"),
    (lambda: 1, "store has no parameter: the first one is the op's result"),
    (lambda x, *rest: x, r"the parameter \*rest of store is not positional"),
    (lambda x, **rest: x, r"the parameter \*\*rest of store is not positional"),
    (lambda x, *, g: x, "the parameter g of store is not positional"),
    (lambda x, g=1: x, "the parameter g of store has a default"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_supported_is_named_with_its_line(function: Any, message: str) -> None:
    first = function.__code__.co_firstlineno
    last = first + len(inspect.getsource(function).splitlines()) - 1

    with pytest.raises(TraceError, match=message) as caught:
        traced(function)

    place, line = str(caught.value).split(", in ")[0].rsplit(":", 1)
    assert place == __file__
    assert first <= int(line) <= last


def test_the_line_is_that_of_the_function_though_the_fault_is_in_a_package_that_it_calls() -> None:
    special = pytest.importorskip("scipy.special")

    for function in (lambda x: special.erf(x), lambda x: special.logsumexp(x)):
        with pytest.raises(TraceError) as caught:
            traced(function)
        assert str(caught.value).startswith(f"{__file__}:{function.__code__.co_firstlineno}, in <lambda>")


def test_a_traced_value_is_of_no_use_afterwards() -> None:
    with pytest.raises(TraceError, match="a traced value of another call"):
        KEPT[0] + 1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (3, "store is of type int: give a function"),
        ("lambda x: x", "store is of type str"),
        (max, "does not tell its parameters: wrap it"),
        (np.add, "the parameter out of store has a default|does not tell its parameters"),
    ],
)
def test_what_is_no_function_of_python_is_refused(what: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(what)


def test_a_fault_of_the_users_own_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        traced(lambda x: x + 1 / 0)


def test_traced_values_show_what_they_are() -> None:
    shown: list[str] = []

    traced(lambda x: shown.append(f"{x!r} {x > 0!r}") or x)

    assert shown == ["<traced number> <traced condition>"]


def test_methods_and_partials_are_functions_too() -> None:
    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Any) -> Any:
            return x * self.by

        def plus(self, x: Any, r: Any) -> Any:
            return x * self.by + r

    assert traced(f.gelu) == traced(lambda x: f.gelu(x))
    assert traced(Scaled(2)) == traced(lambda x: x * 2)
    assert traced(Scaled(2).plus) == traced(lambda x, r: x * 2 + r)
    assert traced(functools.partial(lambda by, x: x * by, 3)) == traced(lambda x: x * 3)
    with pytest.raises(TraceError, match="a branch"):
        traced(functools.partial(lambda by, x: by if x else x, 3))


# --- the expert's form ----------------------------------------------------------------------------------------------

SOFTSIGN = """
namespace cupynorm {
struct Softsign {
  template <typename T>
  static void apply(const T (&in)[2], T (&out)[2]) {
    out[0] = in[0] * in[1] * reciprocal(T(1) + magnitude(in[0]));
    out[1] = in[1];
  }
};
}
"""


def softsign(x: Any, g: Any) -> Any:
    return x * g / (1 + abs(x)), g


@needs_compiler
def test_a_device_function_is_its_struct_and_its_mirror() -> None:
    function = DeviceFunction("Softsign", SOFTSIGN, softsign, inputs=2, outputs=2)

    results = structs.run(function.struct_text("Store"), "Store", 2, 2, [X, X[::-1]])

    for got, want in zip(results, function.evaluate([X, X[::-1]]), strict=True):
        assert np.allclose(got, want, rtol=1e-15)


def test_a_device_functions_key_is_its_text() -> None:
    one, two = (DeviceFunction("Softsign", text, softsign, 2, 2) for text in (SOFTSIGN, SOFTSIGN + " "))

    assert one.key == DeviceFunction("Softsign", SOFTSIGN, lambda x, g: x, 2, 2).key
    assert one.key != two.key


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "Soft sign"}, ValueError, "name 'Soft sign' is no C.. identifier"),
        ({"name": "Soft"}, ValueError, "text does not define struct Soft"),
        ({"host": None}, TypeError, "host is None: give a function"),
        ({"inputs": 0}, ValueError, "inputs is 0: it must be an integer of 1 or more"),
        ({"outputs": True}, ValueError, "outputs is True"),
    ],
)
def test_a_device_function_that_cannot_be_is_refused(change: Any, error: Any, message: str) -> None:
    given = {"name": "Softsign", "text": SOFTSIGN, "host": softsign, "inputs": 2, "outputs": 2, **change}

    with pytest.raises(error, match=message):
        DeviceFunction(**given)


def test_a_mirror_that_returns_another_number_of_arrays_is_named() -> None:
    function = DeviceFunction("Softsign", SOFTSIGN, lambda x, g: x, 2, 2)

    with pytest.raises(ValueError, match="host of Softsign returned 1 arrays, outputs is 2"):
        function.evaluate([X, X])
