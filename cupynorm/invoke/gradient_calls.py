"""Gradients on a device: from checked calls to their kernels, with sums of parameters in a workspace."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from cupynorm.call.arguments import view
from cupynorm.call.view import View
from cupynorm.invoke.step_calls import Parts, of_mask
from cupynorm.invoke.steps import Parameter, Steps
from cupynorm.lower.backward import (
    LAYER_NORM_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    RMS_NORM_BACKWARD,
    SOFTMAX_BACKWARD,
)
from cupynorm.lower.expressions import IDENTITY, Expression
from cupynorm.lower.fused import lies_apart
from cupynorm.lower.gradients import (
    Added,
    Normed,
    ParameterSums,
    activation_sums,
    activation_sums_in_any_layout,
    axes_inside,
    norm_gradient,
    norm_sums,
    norm_sums_inside,
    softmax_gradient,
    statistics_spec,
)
from cupynorm.lower.layouts import stretched
from cupynorm.lower.row_groups import RowGroups, row_groups, row_groups_apart
from cupynorm.lower.sums import (
    Result,
    Sums,
    broadcast_sums,
    nowhere,
    sums_of_groups,
)

if TYPE_CHECKING:
    from cupynorm.call.elementwise_gradients import ActivationGradientCall
    from cupynorm.call.gradients import GradientCall
    from cupynorm.lower.row import RowOp
    from cupynorm.lower.spec import KernelSpec


def activation_steps(call: ActivationGradientCall) -> Steps:
    """Return the kernels of a checked call of an activation's gradient."""
    steps = Steps(call.device, call.compute)
    cols = call.x.shape[-1]
    dy, x, dx = view(call.dy, "dy"), view(call.x, "x"), view(call.dx, "out")
    if not call.x.size:
        if call.dbias is not None and call.dbias.size and not call.adds:
            zeros = Sums(
                IDENTITY,
                (0.0,),
                (0, *call.dbias.shape),
                call.dbias.ndim,
                (Result(view(call.dbias, "dbias")),),
            )
            steps.add(zeros)
        return steps
    if call.axes > 1 or not all(each.split(1)[1].is_contiguous() for each in (dy, x, dx)):
        _add_in_any_layout(steps, call, dy, x, dx)
        return steps
    place = steps.result(Parameter.of(call.dbias, "dbias", adds=call.adds), (cols,))
    results = [place]
    if call.gate is not None:
        half = cols // 2
        firsts = (0, half) if call.gate == "first" else (half, 0)
        results = [None if place is None else place._replace(first=first) for first in firsts]
    bias = None if call.bias is None else view(call.bias, "bias").broadcast_to((cols,))
    steps.add(activation_sums(dy, x, bias, dx, call.activation, call.gate, results))
    return steps


def _add_in_any_layout(steps: Steps, call: ActivationGradientCall, dy: View, x: View, dx: View) -> None:
    """Add the kernels of an activation's gradient where the last axis does not lie in memory as the kernels have it."""

    def of(array: Any, name: str) -> View | None:
        return None if array is None else stretched(_short(view(array, name), call.axes), x.shape, call.axes)

    bias, dbias = of(call.bias, "bias"), of(call.dbias, "dbias")
    found = activation_sums_in_any_layout(dy, x, bias, dx, dbias, call.activation, call.gate)
    total: View | None = None
    for what, columns in found:
        if columns is None:
            steps.add(what)
            continue
        to, adds = columns, call.adds
        if len(found) > 1:  # added up in the type of arithmetic, and rounded once
            adds = total is not None
            if total is None:
                total = steps.room("both parts of dbias", columns.shape[:-1])
            to = View(total.pointer, columns.shape, (*total.strides, 0), total.dtype)
        place = steps.sums_to(to, "dbias", adds=adds)
        firsts = (0,) if call.gate is None else (0, what.cols) if call.gate == "first" else (what.cols, 0)
        steps.add(what._replace(results=tuple(place._replace(first=first) for first in firsts)))
    if total is not None and columns is not None:
        shape = (1, *total.shape)
        once = View(total.pointer, shape, (0, *total.strides), total.dtype)
        result = Result(View(columns.pointer, shape[1:], columns.strides[:-1], columns.dtype), call.adds)
        steps.add(Sums(IDENTITY, (once,), shape, len(shape) - 1, (result,)))


def _short(array: View, axes: int) -> View:
    """Return a parameter's view without the leading axes of one element that it has beyond `axes`."""
    return array.split(min(axes, len(array.shape)))[1]


def norm_steps(call: GradientCall, forward: RowOp, *, clusters: bool = True) -> Steps:
    """Return the kernels of a checked call of a norm's gradient. forward: the norm.

    Sums of parameters are taken in the pass that gives dx where a row and its sums have a place in registers. Else they
    come first, in a pass of their own: dx may be written over what they read; that of the bias comes last, of dx as it
    was rounded. clusters: whether the device runs them, and blocks that wait for one another.
    """
    what, steps = call.what, Steps(call.device, call.compute)
    shape, axes = what.x.shape, what.axes
    columns = shape[len(shape) - axes :]
    normed, added = _normed(call, forward, steps), _added(what.add)
    dx = view(what.dx, "out")
    op = LAYER_NORM_BACKWARD if what.centred else RMS_NORM_BACKWARD
    sums = {"dgamma": what.dgamma, "dbeta": what.dbeta, "dbias": what.add and what.add.dbias}
    wanted = {name: Parameter.of_sum(name, each) for name, each in sums.items() if each is not None}

    def result(name: str) -> Result | None:
        return steps.result(wanted.get(name), columns)

    gradient = norm_gradient(op, normed, dx, axes, call.compute, added) if what.x.size else None
    cols = math.prod(columns)
    cut = row_groups_apart if lies_apart(normed.dy, axes, dx) else row_groups
    groups = cut(math.prod(shape[: len(shape) - axes]), cols) if gradient else RowGroups(0, 0, 0)

    def summed(partial: dict[str, View]) -> KernelSpec:
        """Return the kernel of the gradient with sums in its pass. partial: where those of groups go."""
        places = ParameterSums(groups, *map(partial.get, sums))
        return norm_gradient(op, normed, dx, axes, call.compute, added, places)

    asked = dict.fromkeys(wanted, nowhere(groups.groups, cols, call.compute))
    if gradient and wanted and steps.fits(summed(asked).problem, call.plan, clusters=clusters):
        if clusters:
            steps.otherwise = functools.partial(norm_steps, call, forward, clusters=False)
        partial = {name: steps.room(f"partial sums of {name}", (groups.groups, cols)) for name in wanted}
        steps.specs.append(summed(partial))
        results = [each for each in map(result, wanted) if each is not None]
        steps.specs.append(sums_of_groups((*partial.values(),), results))
        steps.add_later()
        return steps
    of_load = result("dgamma"), result("dbeta")
    inside = axes_inside(normed.dy, axes) if gradient else 0
    if any(of_load) and inside:
        leading = len(shape) - axes
        rows = (*shape[: leading - inside], *columns)
        parts = [
            each and steps.room(f"parts of {name}", rows) for name, each in zip(sums, of_load, strict=False)
        ]
        room = steps.messages((*rows, *shape[leading - inside : leading]), inside)
        steps.specs.append(norm_sums_inside(normed, axes, inside, parts, call.compute, room))
        wanted_parts = tuple(each for each in parts if each is not None)
        to = tuple(each for each in of_load if each is not None)
        as_they_are = Expression(len(to), (), (*range(len(to)),))
        steps.add(Sums(as_they_are, wanted_parts, rows, axes, to))
    elif any(of_load):
        steps.add(norm_sums(normed, axes, *of_load))
    if gradient is not None:
        steps.specs.append(gradient)
    if "dbias" in wanted:
        steps.add(Sums(IDENTITY, (dx,), shape, axes, (result("dbias"),)))
    return steps


def _normed(call: GradientCall, forward: RowOp, steps: Steps) -> Normed:
    """Return what the gradient of a norm is given; statistics that are not are a kernel of their own."""
    what = call.what
    shape, axes = what.x.shape, what.axes
    x = view(what.x, "x")

    def per_row(each: View) -> View:
        return View(each.pointer, shape, each.strides + (0,) * axes, each.dtype)

    def column(array: Any, name: str) -> View | None:
        return None if array is None else view(array, name).broadcast_to(shape)

    given = {name: getattr(what, name) for name in ("mean", "rstd")}
    if what.rstd is not None:
        stats = {name: view(each, name) for name, each in given.items() if each is not None}
    else:
        stats = {name: steps.room(name, shape[: len(shape) - axes]) for name in forward.stats}
        if what.x.size:
            room = steps.messages(what.x.shape, what.axes)
            spec = statistics_spec(forward, x, axes, (*stats.values(),), what.eps, call.compute, room)
            steps.specs.append(spec)
    mean = per_row(stats["mean"]) if "mean" in stats else None
    gamma, beta = column(what.gamma, "gamma"), column(what.beta, "beta")
    return Normed(view(what.dy, "dy"), x, gamma, beta, mean, per_row(stats["rstd"]), what.from_y)


def _added(add: Any) -> Added | None:
    if add is None:
        return None
    ds = None if add.ds is None else view(add.ds, "ds")
    dresidual = None if add.dresidual is None else view(add.dresidual, "residual_out")
    return Added(ds, add.alpha, add.dropout, dresidual)


def softmax_steps(call: GradientCall) -> Steps:
    """Return the kernels of a checked call of a softmax's gradient."""
    what = call.what
    steps = Steps(call.device, call.compute)
    outs: tuple[View, ...] = (view(what.dx, "out"),)
    if what.dbias is not None:
        outs += (steps.room("gradient", what.y.shape),)
    op = LOG_SOFTMAX_BACKWARD if what.log else SOFTMAX_BACKWARD
    dy, y = view(what.dy, "dy"), view(what.y, "y")
    if what.y.size:
        steps.specs.append(
            softmax_gradient(op, dy, y, outs, what.axes, call.compute, call.mask, what.dropout)
        )
    if what.dbias is not None:
        to = view(what.dbias.out, "dbias").broadcast_to(what.y.shape)
        steps.add(broadcast_sums(outs[1], Result(to, what.dbias.adds)))
    return steps


def norm_parts(call: GradientCall) -> Parts:
    """Return the arrays of a norm's gradient."""
    what = call.what
    read = {name: getattr(what, name) for name in ("dy", "x", "gamma", "beta", "mean", "rstd")}
    written, sums = {"out": what.dx}, {"dgamma": what.dgamma, "dbeta": what.dbeta}
    if what.add is not None:
        read["ds"] = what.add.ds
        written["residual_out"] = what.add.dresidual
        sums["dbias"] = what.add.dbias
    written |= {name: None if each is None else each.out for name, each in sums.items()}
    return Parts(read, written, call.results)


def softmax_parts(call: GradientCall) -> Parts:
    """Return the arrays of a softmax's gradient."""
    what = call.what
    dbias = None if what.dbias is None else what.dbias.out
    return Parts(
        {"dy": what.dy, "y": what.y, **of_mask(call.mask)}, {"out": what.dx, "dbias": dbias}, call.results
    )


def activation_parts(call: ActivationGradientCall) -> Parts:
    """Return the arrays of an activation's gradient."""
    read = {name: getattr(call, name) for name in ("dy", "x", "bias")}
    return Parts(read, {"out": call.dx, "dbias": call.dbias}, (call.dx, call.dbias))
