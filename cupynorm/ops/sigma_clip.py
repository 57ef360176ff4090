"""sigma_clip, in one kernel or in one for each round."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cupynorm._options import boolean, choice, eps_of, integer, plainly, within
from cupynorm.call.arguments import view
from cupynorm.call.missing import OMIT, PROPAGATE
from cupynorm.call.statistics import Missing, StatisticCall, check_elements_result
from cupynorm.host import statistics
from cupynorm.invoke import statistic_calls
from cupynorm.invoke.step_calls import Implementation
from cupynorm.invoke.steps import Steps
from cupynorm.lower.statistics import CLIP_ON_CHIP, PROGRESS, SPARE_STEPS, clip_on_chip_spec, clip_pass_spec
from cupynorm.plan.config import BYTE_BITS, Plan

if TYPE_CHECKING:
    from cupynorm.call.view import View


def sigma_clip(
    x: Any,
    sigma: float = 3.0,
    iterations: int = 10,
    axis: int | tuple[int, ...] | None = -1,
    *,
    sigma_lower: float | None = None,
    sigma_upper: float | None = None,
    centre: str = "mean",
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    return_bounds: bool = False,
    return_stats: bool = False,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return x with nan in place of outliers: of what is farther than sigma standard deviations from its row's centre.

    In each round, mean (or median) and standard deviation are those of what the rounds before have left.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, or of bool, (u)int8, (u)int16 or int32, of any
        shape.
    sigma : float, default 3.0
        How many standard deviations from the centre an element may be.
    iterations : int, default 10
        How many rounds at most; 1 or more.
    axis : int, tuple of int, or None, default -1
        As in standardize.
    sigma_lower, sigma_upper : float, optional
        The same for elements below and above the centre; default: sigma.
    centre : {"mean", "median"}, default "mean"
        What deviations are taken from: the mean, or the middle element, or the mean of the two middle ones.
    where, lengths, left_padded
        As in standardize; what they drop is nan in the result.
    return_bounds : bool, default False
        Return the bounds of each row as well: what lies between them, these included, is kept.
    return_stats : bool, default False
        Return mean and standard deviation of what is kept as well.
    out, dtype, plan
        As in layer_norm. Where each round is a kernel, the plan is that of the one that writes the result; a row is not
        kept for several rounds by the variants "cached", "split" and "uncached".

    Returns
    -------
    array or tuple of array
        y, of x's shape; or the tuple of those that are asked for of (y, low, high, mean, std), which have x's shape
        without the axes of a row, in the type of arithmetic.

    Raises
    ------
    TypeError, ValueError, CompileError, NoDeviceError
        As layer_norm does.

    Notes
    -----
    nan and infinities never count, and are nan in the result. Bounds never widen from round to round, so that what is
    kept is what lies between the last ones, these included. In a row of which nothing counts bounds, mean and std are
    nan. Rounds end when nothing was left out. On a device a row is read once where the chip holds it; longer rows, of
    hundreds of thousands of elements, are read by a kernel for each round, and for each of up to 40 steps (72 in
    float64) of a search for a median; kernels for which nothing is left to do read nothing.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import sigma_clip
    >>> x = np.array([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 90.0])
    >>> y, mean, std = sigma_clip(x, sigma=2, return_stats=True)
    >>> y.tolist(), float(mean), float(std)
    ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, nan], 1.5, 0.5)
    """
    missing = Missing(where, lengths, left_padded, None, PROPAGATE)
    below = sigma if sigma_lower is None else sigma_lower
    above = sigma if sigma_upper is None else sigma_upper
    optional = {"sigma_lower": sigma_lower, "sigma_upper": sigma_upper}

    def check(given: statistic_calls.Given) -> StatisticCall:
        names = ("sigma" if each is None else name for name, each in optional.items())
        limits = [(name, eps_of(each, name)) for name, each in zip(names, (below, above), strict=True)]
        rounds = integer("iterations", iterations, "give an integer of 1 or more")
        if rounds < 1:
            raise ValueError(f"iterations is {plainly(iterations)}: give an integer of 1 or more")
        middle = choice("centre", centre, ("mean", "median"), 'use "mean" or "median"')
        rows = (("low", "high") if boolean("return_bounds", return_bounds) else ()) + (
            ("mean", "std") if boolean("return_stats", return_stats) else ()
        )
        call = check_elements_result(
            *given[:2],
            axis=given.axis,
            rows=rows,
            **given.outs,
            dtype=dtype,
            plan=plan,
            numbers=(*(each for _, each in limits), float(rounds), float(middle == "median")),
        )
        for name, each in limits:
            within(call.compute, **{name: each})
        return call._replace(nan=OMIT, plan=plan)

    options = (below, above, iterations, centre, return_bounds, return_stats, dtype)
    return statistic_calls.run("sigma_clip", x, missing, axis, {"out": out}, options, check, CLIPPED, plan)


def _clip_steps(call: StatisticCall, *, clusters: bool = True) -> Steps:
    """Return the kernel of sigma_clip, or several where rows do not fit on the chip.

    clusters: whether the device runs them.
    """
    below, above, rounds, median = call.numbers
    steps = Steps(call.device, call.compute)
    if not call.x.size:
        return steps
    x = view(call.x, "x")
    rows = x.shape[: len(x.shape) - call.axes]
    places = {name: steps.numbers(name, each, rows).pointer for name, each in call.rows.items()}
    stats = tuple(places.get(name, 0) for name in CLIP_ON_CHIP.stats)
    spec = clip_on_chip_spec(
        x,
        view(call.out, "out"),
        call.axes,
        call.mask,
        stats,
        (below, above, rounds),
        call.compute,
        median=bool(median),
    )
    if steps.fits(spec.problem, call.plan, clusters=clusters):
        steps.specs.append(spec)
        if clusters:
            steps.otherwise = functools.partial(_clip_steps, call, clusters=False)
            steps.differently = "sigma_clip reads such rows in each round"
    else:
        _add_clip_passes(steps, call, x, stats)
    steps.add_rounding()
    return steps


def _add_clip_passes(steps: Steps, call: StatisticCall, x: View, stats: tuple[int, ...]) -> None:
    """Add a kernel for each round, or for each step of a search for medians, and one that writes what is kept."""
    *numbers, median = call.numbers
    limits = (numbers[0], numbers[1], numbers[2])
    rows = x.shape[: len(x.shape) - call.axes]
    messages = steps.messages(x.shape, call.axes)
    rooms = [steps.room(f"progress {at}", (*rows, PROGRESS)) for at in range(2)]
    common = (x, call.axes, call.mask, limits, call.compute)
    # of each round the statistics, and the steps of a search; kernels that nothing is left to do for end at once
    steps_of_round = BYTE_BITS * call.compute.itemsize + SPARE_STEPS if median else 0
    passes = int(limits[2]) * (1 + steps_of_round)
    before: View | None = None
    for at in range(passes):
        after = rooms[at % 2]
        pointers = (0 if before is None else before.pointer, after.pointer, 0, 0, 0, 0)
        steps.specs.append(clip_pass_spec(*common, None, before, pointers, messages, median=bool(median)))
        before = after
    last = (0 if before is None else before.pointer, 0, *stats)
    steps.specs.append(clip_pass_spec(*common, view(call.out, "out"), before, last, median=bool(median)))


def _clip(call: StatisticCall) -> None:
    below, above, rounds, median = call.numbers
    centre = "median" if median else "mean"
    statistics.sigma_clip(
        call.x, call.axes, (below, above), int(rounds), centre, call.out, call.rows, call.keeping()
    )


CLIPPED = Implementation(statistic_calls.statistic_parts, _clip_steps, _clip)
