"""Gradients of traced functions: against central differences, and at the places where there is a convention instead."""
# ruff: noqa: PLW0108  what is traced is the lambda

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cupynorm import functions as f
from cupynorm.lower.differentiate import FLAT, LIMITED, RULES, gradient
from cupynorm.lower.expressions import Expression
from cupynorm.lower.operations import OPERATIONS
from cupynorm.lower.tracing import TraceError, apply, trace
from tests import structs
from tests.lower.test_tracing import grow, needs_compiler

RANDOM = np.random.default_rng(24)
STEP = 1e-5
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_order_of_tests() -> None:
    RANDOM.bit_generator.state = START


def traced(function: Any) -> Expression:
    return trace(function, "store")[0]


def slopes(function: Any, *operands: Any, arriving: Any = None) -> tuple[Any, ...]:
    """The gradients of a function of numbers with respect to all of its operands."""
    expression = traced(function)
    given = arriving if arriving is not None else [1.0] * expression.outputs
    return gradient(expression, tuple(range(expression.inputs))).evaluate([*operands, *given])


def differences(function: Any, *operands: Any) -> list[Any]:
    expression = traced(function)
    found = []
    for at in range(len(operands)):
        above, below = (
            expression.evaluate([each + side * (index == at) for index, each in enumerate(operands)])[0]
            for side in (STEP, -STEP)
        )
        found.append((above - below) / (2 * STEP))
    return found


# each function of cupynorm.functions and each operator, with operands of which some are above and some below 0
SMOOTH: dict[str, Any] = {
    "+ - *": lambda x, r: (x + r) * (x - 2 * r) - r * x,
    "/": lambda x, r: x / (r * r + 1) + 3 / (x - 7) - r / 4,
    "1 / a float16": lambda x, r: apply("half_reciprocal", x * x + 1) * r,
    "unary": lambda x, r: -x * +r,
    "powers": lambda x, r: x**5 + (x * x + 1) ** 0.5 + (r * r + 1) ** -0.5 + (r + 9) ** -3,
    "abs": lambda x, r: abs(x) * r + f.abs(r),
    "exp, log": lambda x, r: f.exp(x * r) + f.log(x * x + 0.5),
    "sqrt, rsqrt": lambda x, r: f.sqrt(x * x + 0.1) + f.rsqrt(r * r + 0.1),
    "tanh, erf, sigmoid": lambda x, r: f.tanh(x) * f.erf(r) + f.sigmoid(x * r),
    "silu": lambda x, r: f.silu(3 * x) * r,
    "gelu": lambda x, r: f.gelu(3 * x) * r,
    "gelu, tanh": lambda x, r: f.gelu(3 * x, approximate="tanh") * r,
    "slopes": lambda x, r: apply("silu_slope", x * r) + apply("gelu_slope", x + r),
    "minimum, maximum": lambda x, r: f.minimum(x, r) * 2 + f.maximum(x * r, x - r),
    "limits": lambda x, r: f.maximum(x, 0.3) + f.minimum(0.2, r * x) + f.relu(r) + f.clip(x, -1, 0.5),
    "where": lambda x, r: f.where((x > r) & ~(x < 0.1), x * r, f.where(r > 0, r * r, -x)),
    "a number of a condition": lambda x, r: x * (r > 0) + (x >= r),
    "used often": lambda x, r: functools.reduce(lambda a, _: a * x + r, range(6), x),
    "a constant": lambda x, r: 2.0,
    "one operand only": lambda x, r: x * x,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_numerical_derivatives(name: str) -> None:
    x, r = RANDOM.standard_normal((2, 200))

    found = slopes(SMOOTH[name], x, r)

    for got, want in zip(found, differences(SMOOTH[name], x, r), strict=True):
        np.testing.assert_allclose(np.broadcast_to(got, x.shape), want, rtol=1e-6, atol=1e-8)


def test_gradients_of_random_functions() -> None:
    x, r = np.random.default_rng(6).standard_normal((2, 100))
    for seed in range(40):
        function = functools.partial(lambda x, r, seed: grow(seed, x, r), seed=seed)
        wrapped = eval("lambda x, r: function(x, r)", {"function": function})  # noqa: S307  no default operand

        found = slopes(wrapped, x, r)

        for got, want in zip(found, differences(wrapped, x, r), strict=True):
            off = np.abs(np.broadcast_to(got, x.shape) - want) > 1e-6 * (1 + np.abs(want))
            assert off.sum() <= 1, seed  # where a step goes over a jump


def test_several_results_are_added_up() -> None:
    x, r, g, h = RANDOM.standard_normal((4, 50))

    by_x, by_r = slopes(lambda x, r: (x * r, x, 3.0, x * x), x, r, arriving=[g, h, 7.0, 0.5])

    np.testing.assert_allclose(by_x, g * r + h + x, rtol=1e-14)
    np.testing.assert_allclose(by_r, g * x, rtol=1e-14)


def test_one_result_twice() -> None:
    (by_x,) = slopes(lambda x: (x, x), 3.0, arriving=[2.0, 5.0])

    assert by_x == 7


def test_only_what_is_wanted_is_computed() -> None:
    expression = traced(lambda x, r: f.exp(x) * r)

    by_r = gradient(expression, (1,))

    assert (by_r.inputs, by_r.outputs) == (3, 1)
    assert [step.operation for step in by_r.steps] == ["exp", "multiply"]
    assert gradient(expression, (1, 0)).evaluate([0.5, 2.0, 1.0]) == pytest.approx(
        (np.exp(0.5), 2 * np.exp(0.5))
    )


def test_every_operation_has_a_rule() -> None:
    assert RULES.keys() | FLAT | LIMITED.keys() == OPERATIONS.keys()
    assert not RULES.keys() & (FLAT | LIMITED.keys())


# what arrives is 1: function, operand, its gradient
CONVENTIONS: dict[str, tuple[Any, float, float]] = {
    "relu at 0": (lambda x: f.relu(x), 0.0, 0.0),
    "clip at its lower bound": (lambda x: f.clip(x, -1, 1), -1.0, 0.0),
    "clip at its upper bound": (lambda x: f.clip(x, -1, 1), 1.0, 0.0),
    "clip within": (lambda x: f.clip(x, -1, 1), 0.99, 1.0),
    "abs at 0": (lambda x: abs(x), 0.0, 0.0),
    "abs of nan": (lambda x: abs(x), np.nan, 1.0),
    "relu of nan": (lambda x: f.relu(x), np.nan, 1.0),
    "minimum of equals": (lambda x: f.minimum(3 * x, x + 4), 2.0, 2.0),
    "maximum of equals": (lambda x: f.maximum(3 * x, x + 4), 2.0, 2.0),
    "a value and itself": (lambda x: f.maximum(x, x), 2.0, 1.0),
    "comparisons": (lambda x: x * 0.0 + (x > 1) + (x == 1) + ~(x != 2), 1.0, 0.0),
    "where at its edge": (lambda x: f.where(x > 1, 5 * x, 2 * x), 1.0, 2.0),
    "where's condition": (lambda x: f.where(x, 1.0, 2.0), 0.0, 0.0),
    "float16": (lambda x: f.cast(x, "float16"), 1 / 3, 1.0),
    "bfloat16": (lambda x: f.cast(x, "bfloat16") + f.cast(x, "float32"), 1 / 3, 2.0),
    "sqrt at 0": (lambda x: f.sqrt(x), 0.0, np.inf),
    "log at 0": (lambda x: f.log(x), 0.0, np.inf),
    "gelu far out": (lambda x: f.gelu(x), np.inf, 1.0),
    "gelu far below": (lambda x: f.gelu(x), -1e30, 0.0),
    "gelu, tanh, far out": (lambda x: f.gelu(x, approximate="tanh"), 1e300, 1.0),
    "silu far below": (lambda x: f.silu(x), -np.inf, 0.0),
    "silu far out": (lambda x: f.silu(x), 1e300, 1.0),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions(name: str) -> None:
    function, x, expected = CONVENTIONS[name]

    (found,) = slopes(function, x)

    assert found == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x: f.where(x > 0, f.log(x), 0.0),
        lambda x: f.where(x <= 0, 0.0, f.sqrt(x)),
        lambda x: f.where(x > 0, f.rsqrt(x) * 2, x),
        lambda x: f.where(x > 0, 3 / x, x),
        lambda x: f.where(x > 0, x * f.exp(1e3 * (1 - x)), x),
        lambda x: f.where(x > 0, f.where(x > 1, x, f.log(f.abs(x) - 0.0) + x), x),
    ],
)
def test_what_where_leaves_out_gets_zero_whatever_its_derivative(function: Any) -> None:
    x = np.array([0.0, -1.0])

    (found,) = slopes(function, x)

    assert np.isfinite(found).all()


def test_nan_that_arrives_is_kept() -> None:
    (found,) = slopes(lambda x: f.where(x > 0, f.log(x), 0.0), np.array([2.0, -1.0]), arriving=[np.nan])

    np.testing.assert_array_equal(found, [np.nan, 0.0])


def test_the_gradient_can_be_differentiated_again() -> None:
    x = RANDOM.standard_normal(50)
    first = gradient(traced(lambda x: f.tanh(x) * x), (0,))

    second = gradient(first, (0,)).evaluate([x, 1.0, 1.0])[0]

    np.testing.assert_allclose(
        second, 2 * (1 - np.tanh(x) ** 2) * (1 - x * np.tanh(x)), rtol=1e-9, atol=1e-12
    )


def test_a_gradient_of_too_many_steps_says_so() -> None:
    expression = traced(lambda x: functools.reduce(lambda a, _: f.exp(a) * x, range(1500), x))

    with pytest.raises(TraceError, match="a function of more than 4096 steps is not supported"):
        gradient(expression, (0,))


@needs_compiler
def test_gradients_in_cpp_are_numpys() -> None:
    x, r, g = RANDOM.standard_normal((3, 300))
    functions = [each for name, each in SMOOTH.items() if name != "a constant"]
    whole = traced(lambda x, r: tuple(function(x, r) for function in functions))
    expression = gradient(whole, (0, 1))
    operands = [x, r, *[g] * whole.outputs]

    results = structs.run_expression(expression, *operands)

    for got, want in zip(results, expression.evaluate(operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
