"""Statistic ops: what they are given, from checked calls to their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm.call.arguments import view
from cupynorm.call.missing import OMIT
from cupynorm.call.statistics import Missing, StatisticCall
from cupynorm.invoke import step_calls
from cupynorm.invoke.step_calls import Implementation, Parts, of_mask
from cupynorm.invoke.steps import Steps
from cupynorm.lower.statistics import MOMENTS, statistic_spec
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cupynorm.lower.row import RowOp


# what lies along the axes of x; results with one number a row do so only where these axes are kept
ELEMENTS = dict.fromkeys(("x", "where", "weights", "out"), "x")
ROWS_KEPT = ELEMENTS | dict.fromkeys(MOMENTS.stats, "x")


def statistic_parts(call: StatisticCall) -> Parts:
    """Return the arrays of a call."""
    read = {"x": call.x, "weights": call.weights, **of_mask(call.mask)}
    written = {} if call.out is None else {"out": call.out}
    return Parts(read, {**written, **call.rows}, call.results)


def statistic_steps(op: RowOp, own: tuple[int, ...], call: StatisticCall) -> Steps:
    """Return the kernels of a call. own: the struct's template arguments behind that which says what counts."""
    steps = Steps(call.device, call.compute)
    if not call.x.size:
        return steps
    x = view(call.x, "x")
    rows = x.shape[: len(x.shape) - call.axes]
    places = {name: steps.numbers(name, each, rows).pointer for name, each in call.rows.items()}
    steps.specs.append(
        statistic_spec(
            op,
            (call.counts, *own),
            x,
            None if call.out is None else view(call.out, "out"),
            call.axes,
            call.mask,
            None if call.weights is None else view(call.weights, "weights").broadcast_to(x.shape),
            [places.get(name, 0) for name in op.stats],
            call.numbers,
            call.compute,
            omit=call.nan == OMIT,
            room=steps.messages(x.shape, call.axes) if call.out is None else 0,
        )
    )
    steps.add_rounding()
    return steps


class Given(NamedTuple):
    """The arrays of a call, and its axes, as they are checked: transposed where these were others than the last."""

    x: Any
    missing: Missing
    axis: Any
    outs: Mapping[str, Any]


def run(
    function: str,
    x: Any,
    missing: Missing,
    axis: Any,
    outs: Mapping[str, Any],
    options: tuple[Any, ...],
    check: Callable[[Given], StatisticCall],
    implementation: Implementation,
    plan: str | Plan | None,
    whole: Mapping[str, str] = ELEMENTS,
) -> Any:
    """Run a call. outs: where results go, by their names. whole: names of what lies along x's axes."""
    where, lengths, left_padded, weights, nan = missing
    arrays = (x, where, lengths, weights, *outs.values())
    key = (plan, nan, *step_calls.option_keys(*options, left_padded))
    results, signature = step_calls.again(function, arrays, axis, key)
    if results is not None:
        return results

    def checked(arrays: Mapping[str, Any], axis: Any) -> StatisticCall:
        counts = missing._replace(where=arrays["where"], weights=arrays["weights"])
        return check(Given(arrays["x"], counts, axis, {name: arrays[name] for name in outs}))

    given = dict(zip(("x", "where", "lengths", "weights", *outs), arrays, strict=True))
    return step_calls.run_checked(signature, given, checked, implementation, axis, whole, plan=plan)
