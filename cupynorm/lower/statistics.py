"""Statistic ops in the kernels' terms: ops of which one struct serves all that says which elements count."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import is_integer
from cupynorm._values import replace
from cupynorm.call.view import View
from cupynorm.lower.around import Around, masked
from cupynorm.lower.fused import fused_spec, lies_apart
from cupynorm.lower.row import RowOp, row_spec
from cupynorm.lower.tracing import traced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm._dtypes import Dtype
    from cupynorm.call.masks import Mask
    from cupynorm.lower.expressions import Expression
    from cupynorm.lower.spec import KernelSpec

STANDARDIZE = RowOp(
    "standardize",
    "ops/moments.cuh",
    "Standardize",
    stats=("mean", "std"),
    numbers=("eps", "ddof"),
)
NORMALIZE = RowOp("normalize", "ops/normalize.cuh", "Normalize", stats=("norm",))
RESCALE = RowOp(
    "rescale", "ops/rescale.cuh", "Rescale", stats=("smallest", "largest"), numbers=("low", "high")
)
MOMENTS = RowOp(
    "moments",
    "ops/moments.cuh",
    "Moments",
    stats=("mean", "variance", "skewness", "kurtosis"),
    numbers=("ddof",),
)


CLIP_ON_CHIP = RowOp(
    "sigma_clip",
    "ops/sigma_clip.cuh",
    "ClipOnChip",
    stats=("low", "high", "mean", "std"),
    numbers=("below", "above", "rounds"),
    rounds=True,
    registers=24,
)
CLIP_PASS = RowOp(
    "sigma_clip",
    "ops/sigma_clip.cuh",
    "ClipPass",
    stats=("before", "after", *CLIP_ON_CHIP.stats),
    numbers=CLIP_ON_CHIP.numbers,
)
# The numbers of a row between two passes, and the places of those that the next one needs: ClipProgress in
# kernels/ops/sigma_clip.cuh. And how many steps a search for a median may take beyond one for each bit of a number:
# kStepsOfPasses there.
PROGRESS = 17
PROGRESS_LOW, PROGRESS_HIGH, PROGRESS_TO = range(3)
SPARE_STEPS = 8
# Template arguments of Moments: two of them, of all elements; and of whole numbers of 8 bits, which add up exactly
# (kAllCount and kBytesCount in kernels/ops/keeping.cuh).
TWO_MOMENTS, TWO_MOMENTS_OF_BYTES = (0, 2), (-1, 2)
OF_TWO_MOMENTS = 5  # numbers of a row in their State and pivot, or in their Row
OF_Z_SCORES = 6  # the same of Standardize
OF_MASK = 16  # registers in which a thread finds out what a mask has dropped


@functools.cache
def _weighted(*, omit: bool) -> Expression:
    """Return x and its weight, which is 0 where x is nan if that is left out."""

    def of(x: Any, weight: Any) -> Any:
        return x, (np.where(x == x, weight, 0.0) if omit else weight)  # noqa: PLR0124  only nan is another

    return traced(of, 2)


def statistic_spec(
    op: RowOp,
    options: tuple[int, ...],
    x: View,
    y: View | None,
    axes: int,
    mask: Mask | None,
    weights: View | None,
    stats: Sequence[int],
    numbers: tuple[float, ...],
    compute: Dtype,
    *,
    omit: bool = False,
    room: int = 0,
) -> KernelSpec:
    """Lower a statistic op.

    options: the template arguments of its struct: which elements count, and its own. y: where the result of x's shape
    goes; None: there is none. stats: pointers of where the numbers of rows go. weights: stretched to x's shape. omit:
    whether nan has no weight. room: the pointer of where messages lie without a y.
    """
    op = replace(
        op, options=options, fields=1 if weights is None else 2, registers=OF_MASK * (mask is not None)
    )
    if op.name == MOMENTS.name and options[-1] == TWO_MOMENTS[-1]:
        op = replace(op, row_numbers=OF_TWO_MOMENTS)
    elif op.name == STANDARDIZE.name and weights is not None:
        op = replace(op, row_numbers=OF_Z_SCORES)
    if options == TWO_MOMENTS and is_integer(x.dtype) and x.dtype.itemsize == 1 and op.name == MOMENTS.name:
        op = replace(op, options=TWO_MOMENTS_OF_BYTES, sums_of_bytes=True)
    plain = y is not None and mask is None and weights is None and not is_integer(x.dtype)
    if y is not None and plain and not lies_apart(x, axes, y):
        return row_spec(op, x, y, axes, {}, stats, numbers)
    what = Around(() if y is None else (y,), room=room)
    if mask is not None:
        what = masked(what, mask)
    if weights is not None:
        what = what._replace(load=_weighted(omit=omit), load_operands=(weights,))
    return fused_spec(op, x, axes, {}, stats, numbers, compute, what)


def clip_on_chip_spec(
    x: View,
    y: View,
    axes: int,
    mask: Mask | None,
    stats: Sequence[int],
    numbers: tuple[float, float, float],
    compute: Dtype,
    *,
    median: bool,
) -> KernelSpec:
    """Lower sigma_clip with all its rounds in one kernel. stats: the pointers of CLIP_ON_CHIP's statistics."""
    registers = CLIP_ON_CHIP.registers + OF_MASK * (mask is not None)
    op = replace(CLIP_ON_CHIP, options=(int(median),), registers=registers)
    what = Around((y,))
    return fused_spec(op, x, axes, {}, stats, numbers, compute, what if mask is None else masked(what, mask))


@functools.cache
def _within(*, and_to: bool) -> Expression:
    """Return x, or nan where it is not from `low` to `high`, and with and_to `to`; of x, these, nan and `to`."""

    def of(x: Any, low: Any, high: Any, nan: Any, *to: Any) -> Any:
        kept = np.where(x >= low, np.where(x <= high, x, nan), nan)
        return (kept, *to) if to else kept

    return traced(of, 4 + and_to)


def clip_pass_spec(
    x: View,
    axes: int,
    mask: Mask | None,
    numbers: tuple[float, float, float],
    compute: Dtype,
    y: View | None,
    before: View | None,
    stats: Sequence[int],
    room: int = 0,
    *,
    median: bool,
) -> KernelSpec:
    """Lower one pass of sigma_clip over rows in memory, or, with a `y`, the last one, which writes what is kept.

    before: PROGRESS numbers of each row; None in the first pass, which drops nan and inf. stats: the pointers of
    CLIP_PASS's statistics.
    """
    most = float(np.finfo(compute).max)
    searches = median and y is None
    bounds: tuple[Any, ...] = (-most, most, np.inf)
    if before is not None:
        places = (PROGRESS_LOW, PROGRESS_HIGH, PROGRESS_TO)
        strides = before.strides[:-1] + (0,) * axes
        bounds = tuple(
            View(before.pointer + place * compute.itemsize, x.shape, strides, compute) for place in places
        )
    what = Around(() if y is None else (y,), room=room)
    if mask is not None:
        what = masked(what, mask)
    operands = (*bounds[:2], float("nan"), *bounds[2:][:searches])
    what = what._replace(load=_within(and_to=searches), load_operands=operands)
    op = replace(
        CLIP_PASS, options=(int(searches),), fields=1 + searches, registers=OF_MASK * (mask is not None)
    )
    return fused_spec(op, x, axes, {}, stats, numbers, compute, what)
