"""Row ops in the kernels' terms, with nothing fused around them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import LEAST_NORMAL, Dtype, compute_dtype, cpp
from cupynorm._values import dataclass
from cupynorm.lower.mirrors import EMPTY, POINTER, Struct, affine_store, arguments, column, direct
from cupynorm.lower.spec import KernelSpec
from cupynorm.lower.vectors import adjoining, row_alignment, vector_width
from cupynorm.plan.config import DOUBLE_BYTES, MOST_ROW_NUMBERS
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cupynorm.call.view import View

ROW_KERNEL = "cupynorm::{plan.kernel}<{types}, cupynorm::{plan.shape}<{numbers}>>"
SUMMED_KERNEL = "cupynorm::row_summed<{types}, cupynorm::{plan.shape}<{numbers}>>"  # of plans in registers
SUMMED_APART_KERNEL = "cupynorm::row_summed_apart<{types}, cupynorm::{plan.shape}<{numbers}>>"


def _elsewhere(*_: Any, **__: Any) -> None:
    raise NotImplementedError("what this op computes on the host is called by itself")


@dataclass(frozen=True)
class RowOp:
    """An op as the kernels know it: kernels/<source> holds struct <struct>.

    reference(x, gamma, beta, axes, eps, out, *stats) does the same on the host; extras= has the fused steps around it.
    columns: the affine parameters that it takes. stats: statistics that it can save. has_eps: whether it takes eps, or
    another number in its place. fields: how many numbers an element has (Element in kernels/ops/contract.cuh). numbers:
    those that the struct holds behind eps. options: the struct's template arguments behind the type of arithmetic.
    registers: what it takes beyond others where something is fused around it. late_exponential, early_exponential,
    rounds, sums_of_bytes, row_numbers: as in Problem. of_sums: kOfSums in kernels/ops/contract.cuh.
    """

    name: str
    source: str
    struct: str
    reference: Callable[..., None] = _elsewhere
    columns: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    has_eps: bool = False
    fields: int = 1
    numbers: tuple[str, ...] = ()
    options: tuple[int, ...] = ()
    registers: int = 0
    late_exponential: bool = False
    early_exponential: bool = False
    rounds: bool = False
    sums_of_bytes: bool = False
    row_numbers: int = MOST_ROW_NUMBERS
    of_sums: bool = False

    def mirror(self, compute: Dtype, stats: Sequence[int], eps: float | tuple[float, ...]) -> Struct:
        """Return the mirror of the op's struct: a pointer for each statistic (0: not wanted), then eps and `numbers`.

        eps: a tuple of all these where there are others than eps.
        """
        fields: list[tuple[str, Any]] = [(name, POINTER) for name in self.stats]
        values: list[Any] = list(stats) or [0] * len(self.stats)
        names = ("eps",) * self.has_eps + self.numbers
        fields += [(name, compute) for name in names]
        numbers = eps if isinstance(eps, tuple) else (eps,)
        values += (
            max(each, LEAST_NORMAL) if name == "eps" and each and compute.itemsize < DOUBLE_BYTES else each
            for name, each in zip(names, numbers, strict=False)
        )
        type_name = f"cupynorm::{self.struct}<{', '.join((cpp(compute), *map(str, self.options)))}>"
        if not fields:
            return Struct(type_name, EMPTY, (0,))
        return Struct(type_name, np.dtype(fields, align=True), tuple(values))


def row_spec(
    op: RowOp,
    x: View,
    y: View,
    axes: int,
    columns: Mapping[str, View],
    stats: Sequence[int] = (),
    eps: float | tuple[float, ...] = 0.0,
) -> KernelSpec:
    """Lower a row op with nothing fused around it, whose rows are contiguous in x and y."""
    shape = x.shape[len(x.shape) - axes :]
    rows, cols = math.prod(x.shape[: len(x.shape) - axes]), math.prod(shape)
    compute = compute_dtype(x.dtype, y.dtype)
    mirror = op.mirror(compute, stats, eps)
    load = direct("DirectLoad", x.split(axes)[0])
    gamma, beta = (column(columns.get(name), shape) for name in ("gamma", "beta"))
    store = affine_store(y.split(axes)[0], gamma, beta)
    whole = arguments(mirror, load, store, rows, cols)
    vector, alignment = vector_width(x, y, axes), row_alignment(x, y, axes)
    problem = Problem(
        rows,
        cols,
        vector,
        x.dtype.itemsize,
        compute.itemsize,
        tuple(each.dtype.itemsize for each in columns.values()),
        *(alignment if vector < alignment.widest else (vector, 0, 1)),
        adjoining=adjoining(x, y, axes),
    )
    text = compiler.text(op.source, whole.cpp, whole.dtype.itemsize)
    return KernelSpec(text, ROW_KERNEL, types_of(mirror, load, store), whole, problem)


def types_of(op: Struct, load: Struct, store: Struct) -> str:
    """Return what a row kernel is made for, in C++, without a plan's numbers."""
    return f"{op.cpp}, {load.cpp}, {store.cpp}"
