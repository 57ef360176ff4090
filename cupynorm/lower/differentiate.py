"""Derivatives of a traced function: an Expression again, which NumPy evaluates and a kernel can be made of.

Conventions, where a function has no derivative or more than one:

- Comparisons, conditions and the choice that `where` makes have derivative 0: gradients go to what was chosen.
- abs has derivative 0 at 0.
- minimum and maximum give the gradient to the value that was taken. Where both are equal, each gets half; beside a
  constant, the other one gets 0. So relu has derivative 0 at 0, and clip 0 at its bounds.
- cast has derivative 1: rounding is taken as if it were none.
- What `where` does not choose gets exactly 0, also where its own derivative is inf or nan, as that of log at 0 is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from cupynorm.lower import tracing
from cupynorm.lower.expressions import Expression
from cupynorm.lower.tracing import Traced, apply, traced


@functools.lru_cache(maxsize=256)
def gradient(expression: Expression, wanted: tuple[int, ...]) -> Expression:
    """Return the gradient of an expression with respect to the operands `wanted`, by reverse accumulation.

    Its operands are those of the expression, then what arrives at each of its results; its results are the gradients of
    the wanted operands, in their order: sum over results k of (what arrives at k) * d result k / d operand.
    """
    inputs = expression.inputs

    def function(*given: Any) -> tuple[Any, ...]:
        values = _values(expression, given[:inputs])
        adjoints: list[Any] = [None] * len(values)  # None is 0
        needed = _depending(expression, wanted)
        chosen = _below_a_choice(expression)
        for result, arriving in zip(expression.results, given[inputs:], strict=True):
            if result in needed:
                adjoints[result] = _sum(adjoints[result], arriving)
        for index in range(len(values) - 1, inputs - 1, -1):
            step = expression.steps[index - inputs]
            if adjoints[index] is None:
                continue
            operands = [values[operand] for operand in step.operands]
            rule = _rule(expression, step.operation, step.operands)
            parts = rule(adjoints[index], values[index], *operands)
            # a derivative of what was not chosen may be inf or nan
            guarded = index in chosen and step.operation not in PASSING
            for operand, part in zip(step.operands, parts, strict=True):
                if operand in needed and part is not None:
                    kept = apply("where", adjoints[index] != 0, part, 0.0) if guarded else part
                    adjoints[operand] = _sum(adjoints[operand], kept)
        return tuple(0.0 if adjoints[index] is None else adjoints[index] for index in wanted)

    return traced(function, inputs + expression.outputs)


def repeated(expression: Expression, operands: Sequence[Traced]) -> tuple[Any, ...]:
    """Return the results of an expression of traced values."""
    values = _values(expression, operands)
    return tuple(values[index] for index in expression.results)


def _values(expression: Expression, operands: Sequence[Traced]) -> list[Any]:
    """Repeat the steps of an expression on traced values; return all of its values."""
    values: list[Any] = list(operands)
    for step in expression.steps:
        if step.operation == "constant":
            values.append(tracing.lift(operands[0]._trace, float.fromhex(step.constant)))  # noqa: SLF001
        else:
            values.append(apply(step.operation, *(values[index] for index in step.operands)))
    return values


def _depending(expression: Expression, wanted: Sequence[int]) -> set[int]:
    """Return the values that depend on the wanted operands."""
    found = set(wanted)
    for index, step in enumerate(expression.steps, expression.inputs):
        if not found.isdisjoint(step.operands):
            found.add(index)
    return found


def _below_a_choice(expression: Expression) -> set[int]:
    """Return the values that `where` may leave out: those that its two branches are made of."""
    found: set[int] = set()
    for index in range(len(expression.steps) - 1, -1, -1):
        operation, operands, _ = expression.steps[index]
        if operation == "where":
            found |= {*operands[1:]}
        if index + expression.inputs in found:
            found |= {*operands}
    return found


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a + b


def _rule(expression: Expression, operation: str, operands: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
    """Return the function that gives, for each operand of an operation, what arrives there; None is 0."""
    if operation in LIMITED:
        constants = [expression.is_constant(operand) for operand in operands]
        return functools.partial(_limited, operation, constants)
    if operation in FLAT:
        return lambda *_: (None,) * len(operands)
    return RULES[operation]


def _limited(operation: str, constants: list[bool], g: Any, _: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Minimum and maximum: what was not taken gets 0, and what is nan, or stands beside one, gets all."""
    lost = LIMITED[operation]
    if True in constants:
        at = constants.index(True)
        x, limit = (b, a) if at == 0 else (a, b)
        part = apply("where", apply(f"{lost}_equal", x, limit), 0.0, g)
        return (None, part) if at == 0 else (part, None)
    half = apply("where", apply("equal", a, b), 0.5 * g, g)
    return apply("where", apply(lost, a, b), 0.0, half), apply("where", apply(lost, b, a), 0.0, half)


def _abs(g: Any, _: Any, x: Any) -> tuple[Any]:
    return (apply("where", x < 0, -g, apply("where", apply("equal", x, 0.0), 0.0, g)),)


def _divide(g: Any, y: Any, _: Any, b: Any) -> tuple[Any, Any]:
    part = g / b
    return part, -(part * y)


def _within(x: Any, bound: float) -> Any:
    """Limit an argument to where the derivative of an activation is still to be told from 0 or 1."""
    return tracing.clip(x, -bound, bound)


def _silu(g: Any, _: Any, x: Any) -> tuple[Any]:
    x = _within(x, 1e3)
    p = apply("sigmoid", x)
    return (g * (p + x * (p * apply("sigmoid", -x))),)


def _gelu(g: Any, _: Any, x: Any) -> tuple[Any]:
    x = _within(x, 1e2)
    phi = apply("exp", -0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return (g * (0.5 + 0.5 * apply("erf", x * math.sqrt(0.5)) + x * phi),)


def _silu_slope(g: Any, _: Any, x: Any) -> tuple[Any]:
    x = _within(x, 1e3)
    p, q = apply("sigmoid", x), apply("sigmoid", -x)
    return (g * (p * q * (2 + x * (q - p))),)


def _gelu_slope(g: Any, _: Any, x: Any) -> tuple[Any]:
    x = _within(x, 1e2)
    square = x * x
    return (g * (apply("exp", -0.5 * square) * (2 - square) * (1 / math.sqrt(2 * math.pi))),)


def _gelu_tanh(g: Any, _: Any, x: Any) -> tuple[Any]:
    x, scale = _within(x, 1e2), 2 * math.sqrt(2 / math.pi)
    square = x * x
    u = scale * (x + 0.044715 * (square * x))
    p = apply("sigmoid", u)
    return (g * (p + x * (p * apply("sigmoid", -u) * (scale + scale * 3 * 0.044715 * square))),)


LIMITED = {
    "minimum": "greater",
    "maximum": "less",
}  # how a value compares to the other one if it is not taken
# for each operation with a derivative: of what arrives at its value, that value, and its operands
RULES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "add": lambda g, _y, _a, _b: (g, g),
    "subtract": lambda g, _y, _a, _b: (g, -g),
    "multiply": lambda g, _y, a, b: (g * b, g * a),
    "divide": _divide,
    "half_reciprocal": lambda g, y, _x: (-g * (y * y),),
    "negative": lambda g, _y, _x: (-g,),
    "where": lambda g, _y, c, _a, _b: (
        None,
        apply("where", c, g, 0.0),
        apply("where", c, 0.0, g),
    ),
    "abs": _abs,
    "exp": lambda g, y, _x: (g * y,),
    "log": lambda g, _y, x: (g / x,),
    "sqrt": lambda g, y, _x: (0.5 * g / y,),
    "rsqrt": lambda g, y, _x: (-0.5 * g * (y * y * y),),
    "tanh": lambda g, y, _x: (g * ((1 - y) * (1 + y)),),
    "erf": lambda g, _y, x: (g * (2 / math.sqrt(math.pi) * apply("exp", -(x * x))),),
    "sigmoid": lambda g, y, x: (g * (y * apply("sigmoid", -x)),),
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu_slope": _silu_slope,
    "gelu_slope": _gelu_slope,
    "cast_float16": lambda g, _y, _x: (g,),
    "cast_bfloat16": lambda g, _y, _x: (g,),
    "cast_float32": lambda g, _y, _x: (g,),
}
# those whose operands get what arrives, or 0: no product that would make nan of 0 and inf
PASSING = frozenset(
    {"add", "subtract", "negative", "where", "abs", "cast_float16", "cast_bfloat16", "cast_float32", *LIMITED}
)
# what is constant between its jumps: comparisons, conditions, and a condition as a number
FLAT = frozenset(
    {
        *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
        *("logical_and", "logical_or", "logical_not", "number"),
    }
)
