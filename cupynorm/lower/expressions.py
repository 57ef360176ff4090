"""A user's function as a value: evaluated with NumPy, written as a C++ struct. It was traced, or is C++ already."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupynorm._options import plainly, shown
from cupynorm._values import NamedTuple, dataclass
from cupynorm.lower.operations import LIMITS, OPERATIONS

Array = np.ndarray[Any, Any]

CHEAP = {"constant", "add", "subtract", "multiply", "negative"}  # an instruction at most
MOST_FEW_STEPS = 2


class Step(NamedTuple):
    """One value of an Expression: an operation on earlier values, or a constant, as float.hex() writes it."""

    operation: str
    operands: tuple[int, ...] = ()
    constant: str = ""


@dataclass(frozen=True)
class Expression:
    """A function of numbers. Values 0 to inputs - 1 are its operands; step i makes value inputs + i.

    Equal functions are equal values, whatever the user called them or in which order they were written: steps that
    give the same are one, steps that nothing needs are left out, and the others stand in the order of the results.
    """

    inputs: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # which values come out

    @property
    def outputs(self) -> int:
        """The number of results."""
        return len(self.results)

    @property
    def has_few_steps(self) -> bool:
        """Whether it costs so little that it may be computed twice: kFewSteps in io/fused_load.cuh."""
        return len(self.steps) <= MOST_FEW_STEPS * self.outputs and all(
            step.operation in CHEAP for step in self.steps
        )

    @property
    def key(self) -> str:
        """A name for the value: 16 hexadecimal digits, the same in every process."""
        return _digest(repr((self.inputs, [tuple(step) for step in self.steps], self.results)))

    @np.errstate(all="ignore")
    def evaluate(self, operands: Sequence[Any], dtype: Any = np.float64) -> tuple[Array, ...]:
        """Compute the results in `dtype`, float64 or longdouble; operands broadcast against each other.

        erf and gelu are computed in float64 always. No result shares memory with an operand.
        """
        kind = np.dtype(dtype)
        if len(operands) != self.inputs:
            raise ValueError(f"{len(operands)} operands for a function of {self.inputs}")
        values: list[Any] = [np.array(operand, kind) for operand in operands]
        for step in self.steps:
            if step.operation == "constant":
                values.append(kind.type(float.fromhex(step.constant)))
            else:
                compute = OPERATIONS[step.operation].compute
                values.append(compute(*(values[index] for index in step.operands)))
        return tuple(np.asarray(values[index], kind) for index in self.results)

    def struct_text(self, name: str) -> str:
        """Write `struct name { template <typename T> static void apply(const T (&in)[inputs], T (&out)[outputs]); };`.

        In namespace cupynorm, for T float and double, after <base/functions.cuh>. It is made of the steps alone.
        """
        used = {index for step in self.steps for index in step.operands} | set(self.results)
        lines = [f"const T v{index} = in[{index}];" for index in range(self.inputs) if index in used]
        for index, step in enumerate(self.steps, self.inputs):
            if step.operation == "constant":
                value = float.fromhex(step.constant)
                lines.append(f"const T v{index} = {cpp_constant(value)};  // {value!r}")
            else:
                kind = "T" if OPERATIONS[step.operation].gives == "n" else "bool"
                lines.append(f"const {kind} v{index} = {self._cpp(step)};")
        lines += [f"out[{at}] = v{index};" for at, index in enumerate(self.results)]
        facts = ["static constexpr bool kFewSteps = true;"] if self.has_few_steps else []
        if not self.steps and (self.inputs, self.results) == (1, (0,)):
            facts.append("static constexpr bool kIdentity = true;")
        return struct_of(name, self.inputs, self.outputs, lines, facts)

    def _cpp(self, step: Step) -> str:
        names = [f"v{operand}" for operand in step.operands]
        if step.operation in LIMITS:
            for operand, x, limit in zip(step.operands, reversed(names), names, strict=True):
                if self.is_constant(operand):
                    return f"{LIMITS[step.operation]}({x}, {limit})"
        return OPERATIONS[step.operation].cpp.format(*names)

    def is_constant(self, value: int) -> bool:
        """Say whether a value is a constant other than nan."""
        constant = "" if value < self.inputs else self.steps[value - self.inputs].constant
        return constant not in {"", "nan"}


IDENTITY = Expression(1, (), (0,))


def struct_of(name: str, inputs: int, outputs: int, lines: Sequence[str], facts: Sequence[str] = ()) -> str:
    """Write the struct around the lines of its apply, and of facts about it."""
    check_name(name)
    about = "".join(f"  {fact}\n" for fact in facts)
    body = "".join(f"    {line}\n" for line in lines)
    return (
        f"namespace cupynorm {{\nstruct {name} {{\n{about}  template <typename T>\n"
        f"  static void apply(const T (&in)[{inputs}], T (&out)[{outputs}]) {{\n{body}  }}\n}};\n"
        "}  // namespace cupynorm\n"
    )


def cpp_constant(value: float) -> str:
    """Write a number by its bits, as float and as double: exact for every compiler, inf, nan and -0.0 included."""
    with np.errstate(over="ignore"):
        single = int(np.float32(value).view(np.uint32))
    double = int(np.float64(value).view(np.uint64))
    return f"fn_constant<T>({single:#010x}u, {double & 0xFFFFFFFF:#010x}u, {double >> 32:#010x}u)"


def check_name(name: str) -> None:
    """Raise ValueError if `name` is no identifier of C++, TypeError if it is no str."""
    if not isinstance(name, str):
        raise TypeError(f"name is {shown(name)}: give a C++ identifier")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ValueError(f"name {name!r} is no C++ identifier: use letters, digits and _, a letter first")


def _digest(text: str) -> str:
    import hashlib  # noqa: PLC0415  4 ms, which `import cupynorm` need not wait for

    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DeviceFunction:
    """A CUDA struct with a host mirror, for what no expression says: for `load` and `store` of fuse.

    text: C++ that defines, in namespace cupynorm, struct `name` with
    `template <typename T> static void apply(const T (&in)[inputs], T (&out)[outputs])`, for T float and double, as
    Expression.struct_text writes it. It is compiled as it is, after <base/functions.cuh>, without CUDA's headers.
    host: computes the same on NumPy arrays of float64 that broadcast against each other, and returns an array, or a
    tuple of `outputs` arrays. inputs counts the first parameter (x or the op's result) too; in calls of the fusion the
    others are named load1, load2 ... or store1, store2 ...

    Raises ValueError for a name that is no identifier, a text without that struct, and counts below 1.
    """

    name: str
    text: str
    host: Callable[..., Any]
    inputs: int
    outputs: int = 1

    def __init__(self, name: str, text: str, host: Callable[..., Any], inputs: int, outputs: int = 1) -> None:
        check_name(name)
        if not isinstance(text, str):
            raise TypeError(f"text is {shown(text)}: give C++, the text of a struct")
        if not re.search(rf"\bstruct\s+{name}\b", text):
            raise ValueError(f"text does not define struct {name}")
        if not callable(host):
            raise TypeError(f"host is {shown(host)}: give a function of NumPy arrays")
        for what, count in (("inputs", inputs), ("outputs", outputs)):
            if type(count) is not int or count < 1:
                raise ValueError(f"{what} is {plainly(count)}: it must be an integer of 1 or more")
        values = {"name": name, "text": text, "host": host, "inputs": inputs, "outputs": outputs}
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def key(self) -> str:
        """A name for the compiled struct: 16 hexadecimal digits, the same in every process."""
        return _digest(repr((self.name, self.text, self.inputs, self.outputs)))

    @np.errstate(all="ignore")
    def evaluate(self, operands: Sequence[Any], dtype: Any = np.float64) -> tuple[Array, ...]:
        """Compute the results with `host`, as Expression.evaluate does."""
        returned = self.host(*(np.array(operand, dtype) for operand in operands))
        results = returned if isinstance(returned, tuple) else (returned,)
        if len(results) != self.outputs:
            raise ValueError(f"host of {self.name} returned {len(results)} arrays, outputs is {self.outputs}")
        return tuple(np.asarray(result, dtype) for result in results)

    def struct_text(self, name: str) -> str:
        """Return the text, and an alias of its struct in namespace cupynorm."""
        check_name(name)
        return f"{self.text}\nnamespace cupynorm {{\nusing {name} = {self.name};\n}}  // namespace cupynorm\n"
