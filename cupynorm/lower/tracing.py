"""Tracing: a user's function runs once on stand-ins for numbers, and what it does with them becomes an Expression."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from cupynorm.lower.expressions import Expression, Step
from cupynorm.lower.operations import OPERATIONS, THE_TABLE, UFUNCS
from cupynorm.runtime import devices

LARGEST_POWER = 16
MOST_STEPS = 4096  # a loop of the function is unrolled: one that does not end must
# of whose frames a message names none; without pathlib, which takes 10 ms to import
OWN_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep  # noqa: PTH100, PTH120
    for path in (os.path.dirname(__file__), np.__file__)  # noqa: PTH120
)


class TraceError(TypeError):
    """A function given to fuse does what a kernel cannot do; the message names what, with file and line."""


COMMUTATIVE = {"add", "multiply", "equal", "not_equal", "logical_and", "logical_or"}


class _Trace:
    """The steps of a function that is running."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.open = True
        self._steps: list[Step] = []
        self._indices: dict[Step, int] = {}

    def input(self, index: int) -> Traced:
        return Traced(self, index, "n")

    def step(self, step: Step, kind: str) -> Traced:
        index = self._indices.get(step)
        if index is None:
            if len(self._steps) == MOST_STEPS:
                raise _unsupported(
                    f"a function of more than {MOST_STEPS} steps", "loops are unrolled: make it shorter"
                )
            index = self._indices[step] = self.inputs + len(self._steps)
            self._steps.append(step)
        return Traced(self, index, kind)

    def constant(self, value: float) -> Traced:
        return self.step(Step("constant", (), value.hex()), "n")

    def expression(self, results: Sequence[int]) -> Expression:
        """Return the steps that the results need, in that order, depth first."""
        numbers = {index: index for index in range(self.inputs)}
        steps: list[Step] = []
        waiting = list(reversed(results))
        while waiting:
            index = waiting[-1]
            if index in numbers:
                waiting.pop()
                continue
            step = self._steps[index - self.inputs]
            missing = [operand for operand in step.operands if operand not in numbers]
            if missing:
                waiting += reversed(missing)
                continue
            numbers[index] = self.inputs + len(steps)
            steps.append(step._replace(operands=tuple(numbers[operand] for operand in step.operands)))
            waiting.pop()
        return Expression(self.inputs, tuple(steps), tuple(numbers[index] for index in results))


def apply(name: str, *values: Any) -> Traced:
    """Add a step to the trace that the traced ones among `values` belong to."""
    operation = OPERATIONS[name]
    trace = next(value for value in values if isinstance(value, Traced))._trace  # noqa: SLF001
    taken = [_take(trace, value, kind, name) for value, kind in zip(values, operation.takes, strict=True)]
    operands = tuple(each._index for each in taken)  # noqa: SLF001
    if name in COMMUTATIVE:
        operands = tuple(sorted(operands))
    return trace.step(Step(name, operands), operation.gives)


def _take(trace: _Trace, value: Any, kind: str, name: str) -> Traced:
    """Make a value of the trace of what stands beside one, and a number of a condition or the other way round."""
    given = isinstance(value, (bool, np.bool_))
    lifted = lift(trace, value)
    if lifted._kind == kind:  # noqa: SLF001
        return lifted
    if kind == "n":
        return apply("number", lifted)
    if name == "where" or given:
        return apply("not_equal", lifted, 0.0)
    sign = {"logical_and": "&", "logical_or": "|", "logical_not": "~"}[name]
    raise _unsupported(f"the operator {sign} on numbers", "use it on conditions, such as (m != 0) & (x > 0)")


def lift(trace: _Trace, value: Any) -> Traced:
    """Return a traced value as it is, and a number as a constant of the trace; TraceError for anything else."""
    if isinstance(value, Traced):
        if value._trace is not trace or not trace.open:  # noqa: SLF001
            raise _unsupported(
                "a traced value of another call", "keep nothing from one call of the function to the next"
            )
        return value
    if isinstance(value, (bool, int, float)):
        try:
            return trace.constant(float(value))
        except OverflowError:
            raise _unsupported("an integer beyond 1e308", "use a number that float64 can hold") from None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]  # NumPy makes arrays of its scalars on their way to us
    if isinstance(value, np.generic) and (value.dtype.kind in "biuf" or value.dtype.name == "bfloat16"):
        return trace.constant(float(value))
    if isinstance(value, np.ndarray) or devices.is_device_array(value) or hasattr(value, "__dlpack__"):
        what = f"an array that the function has captured (shape {getattr(value, 'shape', '?')})"
        raise _unsupported(what, "make it a parameter of the function and an operand of the call")
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise _unsupported(
        f"{name} as an operand",
        "use traced values, Python's bool, int and float, and NumPy's scalars of those",
    )


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Traced):
        raise _unsupported("a power with a traced exponent", "use exp(exponent * log(base))")
    lift(base._trace, exponent)  # noqa: SLF001  for its errors: a constant that nothing needs is left out
    number = float(exponent)
    if number in {0.5, -0.5}:
        return apply("sqrt" if number > 0 else "rsqrt", base)
    if not (number.is_integer() and abs(number) <= LARGEST_POWER):
        raise _unsupported(
            f"a power with exponent {number:g}",
            f"use an integer from -{LARGEST_POWER} to {LARGEST_POWER}, 0.5 or -0.5, else exp({number:g} * log(x))",
        )
    result: Any = 1.0
    square, left = base, abs(int(number))
    while left:
        if left & 1:
            result = square if isinstance(result, float) else result * square
        left >>= 1
        if left:
            square = square * square
    if isinstance(result, float):
        return lift(base._trace, result)  # noqa: SLF001
    return 1.0 / result if number < 0 else result


# --- what the function holds while it runs --------------------------------------------------------------------------


def _operator(name: str) -> Callable[[Traced, Any], Traced]:
    return lambda self, other: apply(name, self, other)


def _swapped(name: str) -> Callable[[Traced, Any], Traced]:
    return lambda self, other: apply(name, other, self)


def _refused(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise _unsupported(what, instead)

    return refuse


_ELEMENT = "a traced value stands for one element: operands broadcast by their shapes in the call"
_NUMBER = f"write it with what can be traced: {THE_TABLE}"
_ROUNDING = f"nothing rounds to integers: {THE_TABLE}"
_REDUCTION = "a traced value is one element: reductions over rows are the op's work"


class Traced:
    """A number (or a condition) that is not known yet."""

    __slots__ = ("_index", "_kind", "_trace")

    def __init__(self, trace: _Trace, index: int, kind: str) -> None:
        self._trace = trace
        self._index = index
        self._kind = kind

    def __repr__(self) -> str:
        return f"<traced {'number' if self._kind == 'n' else 'condition'}>"

    __add__, __radd__ = _operator("add"), _swapped("add")
    __sub__, __rsub__ = _operator("subtract"), _swapped("subtract")
    __mul__, __rmul__ = _operator("multiply"), _swapped("multiply")
    __truediv__, __rtruediv__ = _operator("divide"), _swapped("divide")
    __and__, __rand__ = _operator("logical_and"), _swapped("logical_and")
    __or__, __ror__ = _operator("logical_or"), _swapped("logical_or")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")  # type: ignore[assignment]

    def __pow__(self, exponent: Any, modulus: Any = None) -> Any:
        if modulus is not None:
            raise _unsupported("a power with a modulus", _NUMBER)
        return _power(self, exponent)

    __rpow__ = _refused("a power with a traced exponent", "use exp(exponent * log(base))")

    def __neg__(self) -> Traced:
        return apply("negative", self)

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        return apply("abs", self)

    def __invert__(self) -> Traced:
        return apply("logical_not", self)

    __hash__ = _refused("a traced value in a set, as a key, or in a cache", "its value is not known here")
    __bool__ = _refused(
        "a branch on a traced value (if, while, and, or, not, in, min, max, or a chained comparison)",
        "use where(condition, a, b), minimum, maximum, and & | ~ between conditions",
    )
    __float__ = _refused("float() or a function of math", _NUMBER)
    __int__ = _refused("int()", _NUMBER)
    __complex__ = _refused("complex() or a function of cmath", _NUMBER)
    __index__ = _refused("a traced value as an index or a count", _ELEMENT)
    __len__ = _refused("len()", _ELEMENT)
    __iter__ = _refused("iteration", _ELEMENT)
    __reversed__ = _refused("iteration", _ELEMENT)
    __contains__ = _refused("the operator in", _ELEMENT)
    __getitem__ = _refused("indexing", _ELEMENT)
    __setitem__ = _refused("assignment to an element", "return a new value")
    __delitem__ = _refused("deletion of an element", "return a new value")
    __floordiv__ = __rfloordiv__ = _refused("the operator //", _ROUNDING)
    __mod__ = __rmod__ = _refused("the operator %", _ROUNDING)
    __divmod__ = __rdivmod__ = _refused("divmod()", _ROUNDING)
    __matmul__ = __rmatmul__ = _refused("the operator @", _ELEMENT)
    __xor__ = __rxor__ = _refused("the operator ^", "use a != b between conditions")
    __lshift__ = __rlshift__ = _refused("the operator <<", "multiply by a power of two")
    __rshift__ = __rrshift__ = _refused("the operator >>", "multiply by a power of two")
    __round__ = _refused("round()", _ROUNDING)
    __floor__ = _refused("math.floor", _ROUNDING)
    __ceil__ = _refused("math.ceil", _ROUNDING)
    __trunc__ = _refused("math.trunc", _ROUNDING)
    __call__ = _refused("a call of a traced value", "it is a number")
    __array__ = _refused("conversion to an array", _NUMBER)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols are looked for, and are not there
        raise _unsupported(f"the attribute .{name}", f"{_ELEMENT}; {THE_TABLE}")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *values: Any, **options: Any) -> Any:
        name = ufunc.__name__ if getattr(np, ufunc.__name__, None) is not ufunc else f"numpy.{ufunc.__name__}"
        if method != "__call__":
            raise _unsupported(f"{name}.{method}", _REDUCTION)
        if options:
            raise _unsupported(
                f"{name} with {', '.join(sorted(options))}=", "give it values only, and return new values"
            )
        if ufunc is np.power:
            return _power(*values) if isinstance(values[0], Traced) else values[1].__rpow__(values[0])
        if ufunc is np.square:
            return values[0] * values[0]
        if ufunc is np.reciprocal:
            return 1.0 / values[0]
        if ufunc is np.positive:
            return values[0]
        if ufunc not in UFUNCS:
            raise _unsupported(f"the function {name}", _NUMBER)
        return apply(UFUNCS[ufunc], *values)

    def __array_function__(self, function: Any, _types: Any, values: Any, options: Any) -> Any:
        if function is np.where and len(values) == 3 and not options:  # noqa: PLR2004  condition, a, b
            return apply("where", *values)
        if function is np.clip and len(values) == 3 and not options:  # noqa: PLR2004  x, low, high
            return clip(*values)
        name = f"{function.__module__}.{function.__name__}"
        raise _unsupported(f"the function {name}", f"{_REDUCTION}; {THE_TABLE}")


def clip(x: Any, low: Any, high: Any) -> Any:
    """Return minimum(maximum(x, low), high); a bound that is None is none."""
    if low is not None:
        x = apply("maximum", x, low)
    return x if high is None else apply("minimum", x, high)


# --- tracing --------------------------------------------------------------------------------------------------------


def trace(function: Any, role: str) -> tuple[Expression, tuple[str, ...]]:
    """Run `function` once on traced values; return its expression, and its parameters' names.

    role: its name in errors. Raises TraceError, with the function's file and line.
    """
    names = _parameters(function, role)
    record = _Trace(len(names))
    try:
        returned = function(*map(record.input, range(len(names))))
        given = returned if isinstance(returned, tuple) else (returned,)
        if not given:
            raise TraceError(_returned(role, "an empty tuple"))
        results = []
        for each in given:
            if not isinstance(each, (Traced, bool, int, float, np.generic)):
                raise TraceError(_returned(role, "None" if each is None else f"a {type(each).__qualname__}"))
            results.append(_take(record, each, "n", "number")._index)  # noqa: SLF001
    except TraceError as error:
        raise TraceError(f"{_place_in(error, function)}: {error}") from error.__cause__
    except (TypeError, AttributeError) as error:  # of code that asks a number for what arrays have
        place = _place_in(error, function)
        raise TraceError(f"{place}: {role} cannot be traced ({error}); {THE_TABLE}") from error
    finally:
        record.open = False
    return record.expression(results), names


def traced(function: Callable[..., Any], inputs: int) -> Expression:
    """Return the expression of a function of our own, whose `inputs` parameters need no names.

    It returns one result or a tuple of them.
    """
    record = _Trace(inputs)
    returned = function(*map(record.input, range(inputs)))
    results = returned if isinstance(returned, tuple) else (returned,)
    return record.expression([_take(record, each, "n", "number")._index for each in results])  # noqa: SLF001


def _parameters(function: Any, role: str) -> tuple[str, ...]:
    """Return the names of a function's parameters, all positional and without defaults.

    Parameters with a default that only a keyword can set are none of the operands' business, and left alone.
    """
    if not callable(function):
        raise TraceError(
            f"{role} is of type {type(function).__qualname__}: give a function, such as lambda x, r: x + r"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise TraceError(
            f"{role} is {function!r}, which does not tell its parameters: wrap it, as in lambda x: f(x)"
        ) from None
    place = _place_of(function)
    parameters = [
        each for each in parameters if each.kind is not each.KEYWORD_ONLY or each.default is each.empty
    ]
    for each in parameters:
        if each.kind not in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}:
            raise TraceError(
                f"{place}: the parameter {str(each).partition('=')[0]} of {role} is not positional: how many operands "
                "there are must be known, so name each of them"
            )
        if each.default is not each.empty:
            raise TraceError(
                f"{place}: the parameter {each.name} of {role} has a default: each operand is given in the call; "
                "a number that never changes can stand in the function itself"
            )
    names = tuple(each.name for each in parameters)
    if not names:
        first = "the loaded value" if role == "load" else "the op's result"
        raise TraceError(f"{place}: {role} has no parameter: the first one is {first}")
    return names


def _returned(role: str, what: str) -> str:
    allowed = "a traced value" + (", or a tuple of them" if role == "store" else "")
    return f"{role} returns {what}: return {allowed}"


def _unsupported(what: str, instead: str) -> TraceError:
    return TraceError(f"{what} is not supported; {instead}")


def _place_in(error: BaseException, function: Any) -> str:
    """Return the line of the function's file that an error passed last; in another file, if it passed none of those."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = other = ""
    trail = error.__traceback__
    while trail is not None:
        here = trail.tb_frame.f_code
        place = f"{here.co_filename}:{trail.tb_lineno}, in {here.co_name}"
        if code is not None and here.co_filename == code.co_filename:
            own = place
        elif not here.co_filename.startswith(OWN_FOLDERS):
            other = place
        trail = trail.tb_next
    return own or other or _place_of(function)


def _place_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
