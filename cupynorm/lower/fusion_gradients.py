"""Lowers the gradients of a fusion: its functions and their derivatives, composed into those of few kernels.

With l = load(x, operands) and y = op(l), where what arrives at store's results makes s arrive at y, a backward op is
given s and y (or, of a norm, s * gamma and z = (l - mean) * rstd); what it gives goes back through load's derivative.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.lower.differentiate import gradient, repeated
from cupynorm.lower.expressions import Expression
from cupynorm.lower.tracing import traced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cupynorm.call.view import View

Values = dict[str, Any]


class Fused(NamedTuple):
    """What is known of a fusion's functions.

    op: name of the row op. load, store: None where there is none. load_names, store_names: of their operands beside the
    first. arriving: names of what arrives at each of store's results, None for nothing; of the op's where there is no
    store. columns: "gamma" and "beta", where given. loaded: whether something arrives at what was loaded.
    """

    op: str
    load: Expression | None
    load_names: tuple[str, ...]
    store: Expression | None
    store_names: tuple[str, ...]
    arriving: tuple[str | None, ...]
    columns: tuple[str, ...]
    loaded: bool

    @property
    def is_norm(self) -> bool:
        """Whether its op is a norm, which has statistics and parameters."""
        return self.op.endswith("norm")

    def loaded_value(self, v: Values) -> Any:
        """Return what load gives."""
        if self.load is None:
            return v["x"]
        return repeated(self.load, (v["x"], *(v[name] for name in self.load_names)))[0]

    def normalised(self, v: Values) -> Any:
        """Return a norm's result before gamma and beta."""
        centred = self.loaded_value(v) - v["mean"] if "mean" in v else self.loaded_value(v)
        return centred * v["rstd"]

    def result(self, v: Values) -> Any:
        """Return the op's result."""
        if not self.is_norm:
            y = self.loaded_value(v) - v["lse"]
            return np.exp(y) if self.op == "softmax" else y
        y = self.normalised(v)
        y = y * v["gamma"] if "gamma" in self.columns else y
        return y + v["beta"] if "beta" in self.columns else y

    def behind(self, v: Values) -> tuple[Any, ...]:
        """Return what arrives at the op's result, then the gradients of store's operands."""
        there = [name for name in self.arriving if name is not None]
        if self.store is None:
            return (v[there[0]] if there else 0.0,)
        if not there:
            return (0.0,) * (1 + len(self.store_names))
        pairs = zip(self.store.results, self.arriving, strict=True)
        store = dataclasses.replace(self.store, results=tuple(at for at, name in pairs if name is not None))
        back = gradient(store, tuple(range(store.inputs)))
        return repeated(back, (self.result(v), *(v[name] for name in (*self.store_names, *there))))

    def fields(self, v: Values) -> tuple[Any, Any]:
        """Return what the backward op is given."""
        slope = self.behind(v)[0]
        if self.is_norm:
            return (slope * v["gamma"] if "gamma" in self.columns else slope), self.normalised(v)
        # what load made -inf is dropped
        return np.where(self.loaded_value(v) > -np.inf, slope, 0.0), self.result(v)

    def before(self, v: Values, count: int) -> tuple[Any, ...]:
        """Return the gradients of x and of load's first `count` operands, of what the backward op gave: v["d"]."""
        back = v["d"] * v["rstd"] if self.is_norm else v["d"]
        if self.loaded:
            back = back + v["arriving at loaded"]
        if self.load is None:
            return (back,)
        given = (v["x"], *(v[name] for name in self.load_names), back)
        return repeated(gradient(self.load, tuple(range(1 + count))), given)


def composed(
    function: Callable[[Values], Any], operands: Mapping[str, View | float], first: str | None = None
) -> tuple[Expression, tuple[View | float, ...]]:
    """Trace a function of named values; return its expression, and those of the operands that it takes.

    first: a name that is the first of them whether it is taken or not, and is not returned.
    """
    names = [name for name in operands if name != first]
    names = names if first is None else [first, *names]
    whole = traced(lambda *values: function(dict(zip(names, values, strict=True))), len(names))
    taken = {index for step in whole.steps for index in step.operands} | {*whole.results}
    used = [index for index in range(len(names)) if index in taken or names[index] == first]
    used = used or [0]  # a function has at least one
    moved = {old: new for new, old in enumerate(used)}
    moved |= {whole.inputs + at: len(used) + at for at in range(len(whole.steps))}

    def at_new(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(moved[index] for index in indices)

    steps = tuple(step._replace(operands=at_new(step.operands)) for step in whole.steps)
    expression = dataclasses.replace(whole, inputs=len(used), steps=steps, results=at_new(whole.results))
    return expression, tuple(operands[names[index]] for index in used if names[index] != first)
