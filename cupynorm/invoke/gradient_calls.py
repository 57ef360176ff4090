"""Gradients on a device: from checked calls to launches, with sums of parameters in a workspace."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm.call import asking
from cupynorm.call.arguments import allocate, view
from cupynorm.call.axes import is_array, transposition_of
from cupynorm.call.missing import OMIT
from cupynorm.call.view import View
from cupynorm.invoke import bound_calls, row_ops, several_kernels
from cupynorm.invoke.bound_calls import Arrays, axis_option
from cupynorm.invoke.row_ops import NeedsClustersError
from cupynorm.lower.backward import (
    LAYER_NORM_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    RMS_NORM_BACKWARD,
    SOFTMAX_BACKWARD,
)
from cupynorm.lower.gradients import (
    Added,
    Normed,
    ParameterSums,
    activation_sums,
    activation_sums_in_any_layout,
    axes_inside,
    cross_entropy_spec,
    logsumexp_spec,
    norm_gradient,
    norm_sums,
    norm_sums_inside,
    softmax_gradient,
    statistics_spec,
)
from cupynorm.lower.layouts import stretched
from cupynorm.lower.sums import (
    IDENTITY,
    Result,
    Sums,
    broadcast_sums,
    nowhere,
    partial_shape,
    row_groups,
    sum_specs,
    sums_of_groups,
)
from cupynorm.lower.tracing import Expression
from cupynorm.plan.choose import choose
from cupynorm.plan.config import DoesNotFitError, room_bytes
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from cupynorm._dtypes import Dtype
    from cupynorm.call.elementwise_gradients import ActivationGradientCall
    from cupynorm.call.gradients import GradientCall
    from cupynorm.call.losses import CrossEntropyCall, LogSumExpCall
    from cupynorm.call.masks import Mask
    from cupynorm.host.gradients import Sum
    from cupynorm.lower.row import RowOp
    from cupynorm.lower.spec import KernelSpec
    from cupynorm.plan.config import Plan


class Parameter(NamedTuple):
    """Where the gradient of a parameter goes. name: of its argument, or of the result. adds: to what is there."""

    array: Any
    name: str
    adds: bool

    @staticmethod
    def of(array: Any, name: str, *, adds: bool) -> Parameter | None:
        """Return that of an array; None if there is none."""
        return None if array is None else Parameter(array, name, adds)

    @staticmethod
    def of_sum(name: str, each: Sum | None) -> Parameter | None:
        """Return that of a sum; None if there is none."""
        return None if each is None else Parameter(each.out, name, each.adds)


class Steps:
    """The kernels of one call in their order, and the workspace that they need."""

    def __init__(self, device: int, compute: Dtype) -> None:
        """device: its number; -1 where kernels are asked about, and none is launched."""
        self.specs: list[KernelSpec] = []
        # gives the kernels for where the device runs no clusters, or not such large ones; and what they do differently
        self.otherwise: Callable[[], Steps] | None = None
        self.differently = "sums of parameters take a pass of their own"
        self.workspace: dict[str, Any] = {}
        self._device = device
        self._compute = compute
        self._later: list[Sums] = []
        self._rounded: list[tuple[View, View]] = []

    @property
    def told(self) -> tuple[KernelSpec, ...]:
        """The kernels as call/asking.py wants them: first the one that a plan is for, then others with variants."""
        first = several_kernels.row_kernel(self.specs)
        return tuple(
            sorted(self.specs, key=lambda each: (each is not first, not isinstance(each.problem, Problem)))
        )

    def room(self, name: str, shape: tuple[int, ...]) -> View:
        """Allocate an array of the type of arithmetic in the workspace."""
        name = f"{name} {len(self.workspace)}"
        self.workspace[name] = allocate(self._device >= 0, self._device, shape, self._compute)
        return view(self.workspace[name], name)

    def result(self, parameter: Parameter | None, shape: tuple[int, ...]) -> Result | None:
        """Return where the sum of each column goes. shape: that of the columns, to which the parameter broadcasts."""
        if parameter is None:
            return None
        array, name, adds = parameter
        whole = view(array, name)
        extra = max(0, len(whole.shape) - len(shape))  # leading axes of one element
        to = whole.split(len(whole.shape) - extra)[1].broadcast_to(shape)
        return self.sums_to(to, name, adds=adds)

    def sums_to(self, to: View, name: str, *, adds: bool) -> Result:
        """Return where the sum of each column goes. to: a parameter's gradient, stretched to the columns' shape."""
        shape = to.shape
        if all(step or extent == 1 for step, extent in zip(to.strides, shape, strict=True)):
            return Result(to, adds)
        columns = self.room(f"columns of {name}", shape)
        self._later.append(broadcast_sums(columns, Result(to, adds)))
        return Result(columns)

    def numbers(self, name: str, array: Any, rows: tuple[int, ...]) -> View:
        """Return where a kernel writes one number a row: to an array, or to room for what add_rounding() puts there."""
        place = view(array, name)
        if array.dtype == self._compute and place.is_contiguous():
            return place
        room = self.room(f"unrounded {name}", rows)
        waiting = self.workspace[next(reversed(self.workspace))].reshape(place.shape)
        shape = (*place.shape, 1)
        self._rounded.append(
            (
                View(room.pointer, shape, (*waiting.strides, 0), room.dtype),
                View(place.pointer, shape, (*place.strides, 0), place.dtype),
            )
        )
        return room

    def messages(self, shape: tuple[int, ...], axes: int) -> int:
        """Return the pointer of room for the messages of blocks that share a row, where nothing is stored; 0: none."""
        rows, cols = math.prod(shape[: len(shape) - axes]), math.prod(shape[len(shape) - axes :])
        count = room_bytes(rows, cols) // self._compute.itemsize
        return self.room("messages", (count,)).pointer if count else 0

    def add_rounding(self) -> None:
        """Write numbers of rows that wait in the workspace to where they belong."""
        for source, to in self._rounded:
            what = Sums(IDENTITY, (source,), source.shape, 1, (None,), (to,))
            self.specs += sum_specs(what, self._compute, ())

    def add(self, what: Sums) -> None:
        """Add sums over rows, and then those over what their parameters were broadcast along."""
        self._add(what)
        self.add_later()

    def add_later(self) -> None:
        """Add the sums over what parameters were broadcast along, when those over rows are there."""
        for each in self._later:
            self._add(each)
        self._later = []

    def _add(self, what: Sums) -> None:
        shape = partial_shape(what, self._compute)
        asked = [result for result in what.results if result is not None]
        partial = [] if shape is None else [self.room("partial sums", shape) for _ in asked]
        self.specs += sum_specs(what, self._compute, partial)

    def fits(self, problem: Problem, plan: str | Plan | None, *, clusters: bool = True) -> bool:
        """Say whether a kernel has a plan, or the one that is forced. clusters: whether the device runs them."""
        if self._device >= 0:
            limits = devices.limits_of(self._device)
        else:
            asked = asking.about()
            limits, plan = asked.limits or RECORDED["h200"], asked.plan
        try:
            choose(
                problem, limits, lambda each: each.min_blocks if clusters or each.cluster == 1 else 0, plan
            )
        except DoesNotFitError:
            return False
        return True

    def launch(self, signature: Any, arrays: Arrays, plan: str | Plan | None) -> None:
        """Launch the kernels, and keep the call. arrays: those of the call, without the workspace."""
        if not self.specs:
            return
        own = arrays._replace(workspace=self.workspace)
        try:
            bound = several_kernels.launch(self._device, self.specs, own, plan)
        except (DoesNotFitError, NeedsClustersError) as error:  # nothing but statistics was launched
            if self.otherwise is None:
                raise
            why = error.why if isinstance(error, NeedsClustersError) else str(error)
            row_ops.warn_of_refusal(f"{why}: {self.differently}")
            self.otherwise().launch(signature, arrays, plan)
        else:
            bound_calls.thread.calls.add(signature, bound, {**arrays.made, **self.workspace})


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
    was rounded. clusters: whether the device runs them.
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
    groups, rows_of_group = row_groups(math.prod(shape[: len(shape) - axes]), cols) if gradient else (0, 0)

    def summed(partial: dict[str, View]) -> KernelSpec:
        """Return the kernel of the gradient with sums in its pass. partial: where those of groups go."""
        places = ParameterSums(rows_of_group, *map(partial.get, sums))
        return norm_gradient(op, normed, dx, axes, call.compute, added, places)

    asked = dict.fromkeys(wanted, nowhere(groups, cols, call.compute))
    if gradient and wanted and steps.fits(summed(asked).problem, call.plan, clusters=clusters):
        if clusters:
            steps.otherwise = functools.partial(norm_steps, call, forward, clusters=False)
        partial = {name: steps.room(f"partial sums of {name}", (groups, cols)) for name in wanted}
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


def cross_entropy_steps(call: CrossEntropyCall) -> Steps:
    """Return the kernels of a checked call of cross_entropy."""
    steps = Steps(call.device, call.compute)
    if not call.logits.size:
        return steps
    logits, rows = view(call.logits, "logits"), call.labels.shape
    ignored, held = call.ignore_index, np.iinfo(call.labels.dtype)
    if ignored is not None and not held.min <= ignored <= held.max:
        ignored = None
    weight = None if call.weight is None else view(call.weight, "weight").broadcast_to(logits.shape)
    dloss = call.dloss
    if not isinstance(dloss, float):
        given = view(dloss, "dloss").broadcast_to(rows)
        dloss = View(given.pointer, logits.shape, (*given.strides, 0), given.dtype)
    loss = steps.numbers("out", call.loss, rows)
    steps.specs.append(
        cross_entropy_spec(
            logits,
            view(call.labels, "labels"),
            ignored,
            weight,
            call.label_smoothing,
            call.z_loss,
            loss.pointer,
            None if call.grad is None else view(call.grad, "grad"),
            dloss,
            call.compute,
            steps.messages(logits.shape, 1) if call.grad is None else 0,
        )
    )
    steps.add_rounding()
    return steps


def logsumexp_steps(call: LogSumExpCall) -> Steps:
    """Return the kernels of a checked call of logsumexp."""
    compute = compute_dtype(call.x.dtype, call.out.dtype)
    steps = Steps(call.device, compute)
    if call.x.size:
        x = view(call.x, "x")
        rows = x.shape[: len(x.shape) - call.axes]
        steps.specs.append(
            logsumexp_spec(
                x,
                call.axes,
                call.mask,
                steps.numbers("out", call.out, rows).pointer,
                compute,
                factor=None if call.b is None else view(call.b, "b").broadcast_to(x.shape),
                sign=0 if call.sign is None else steps.numbers("sign", call.sign, rows).pointer,
                omit=call.nan == OMIT,
                room=steps.messages(x.shape, call.axes),
            )
        )
        steps.add_rounding()
    return steps


def option_keys(*values: Any) -> tuple[Any, ...]:
    """Return options as a signature has them: with their types, because 1, 1.0 and True are equal, as 0.0 and -0.0."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is tuple:
            found += (value, *map(type, value))
        else:
            found += (repr(value) if kind is float and not value else value, kind)
    return (*found,)


def scalars_of(p: Any, seed: Any, offset: Any) -> tuple[int, ...]:
    """Return seed and offset of a dropout, which differ from call to call; nothing where there is none, or a fault."""
    whole = type(seed) is type(offset) is int and 0 <= seed < WORDS and 0 <= offset < WORDS
    return (seed, offset) if whole and type(p) in {float, int} and p != 0 else ()


WORDS = 1 << 64  # seeds and offsets that there are


X_ALONE = {"x": "x"}  # what is transposed, where that is nothing else


class Parts(NamedTuple):
    """The arrays of a checked call, by names; None for what there is not. results: what the function returns."""

    read: Mapping[str, Any]
    written: Mapping[str, Any]
    results: Sequence[Any]


class Implementation(NamedTuple):
    """What a function does with a checked call: its arrays, its kernels, and how it runs on NumPy arrays."""

    parts: Callable[[Any], Parts]
    steps: Callable[[Any], Steps]
    on_host: Callable[[Any], None]


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
        {"dy": what.dy, "y": what.y, **_of_mask(call.mask)}, {"out": what.dx, "dbias": dbias}, call.results
    )


def _of_mask(mask: Mask | None) -> dict[str, Any]:
    return {} if mask is None else {name: getattr(mask, name) for name in ("where", "lengths", "bias")}


def activation_parts(call: ActivationGradientCall) -> Parts:
    """Return the arrays of an activation's gradient."""
    read = {name: getattr(call, name) for name in ("dy", "x", "bias")}
    return Parts(read, {"out": call.dx, "dbias": call.dbias}, (call.dx, call.dbias))


def cross_entropy_parts(call: CrossEntropyCall) -> Parts:
    """Return the arrays of cross_entropy."""
    read = {name: getattr(call, name) for name in ("logits", "labels", "weight")}
    read["dloss"] = None if isinstance(call.dloss, float) else call.dloss
    results = (call.loss,) if call.grad is None else (call.loss, call.grad)
    return Parts(read, {"out": call.loss, "grad": call.grad}, results)


def logsumexp_parts(call: LogSumExpCall) -> Parts:
    """Return the arrays of logsumexp."""
    results = (call.out,) if call.sign is None else (call.out, call.sign)
    read = {"x": call.x, "b": call.b, **_of_mask(call.mask)}
    return Parts(read, {"out": call.out, "sign": call.sign}, results)


def run(
    function: Any,
    given: Mapping[str, Any],
    options: tuple[Any, ...],
    check: Callable[[Mapping[str, Any], Any], Any],
    implementation: Implementation,
    scalars: Sequence[int] = (),
    plan: str | Plan | None = None,
    axis: Any = -1,
    whole: Mapping[str, str] = X_ALONE,
    called: str = "x",
) -> Any:
    """Run a call; return its results, or the only one.

    A call that this thread has made before is launched again; another is checked.

    function: what a signature knows it by. given: the arrays that the caller passed, by the names of its parts; a
    result's name for where it shall go.
    options: all else that the call depends on. scalars: seed and offset of a dropout, if there is one.
    plan: of its row kernel, which `check` looks at, too.
    axis: what the caller named, of the array that `whole` names first, and that messages call `called`. Along other
    axes than the last, check(given, axis) gets transposed views. What is launched is kept as a call on the caller's own
    arrays, which lie at the same addresses.
    whole: names of what is transposed: arrays and results that have x's shape or broadcast to it. Each with the name
    of the array that has as many axes.
    """
    arrays, calls = (*given.values(),), bound_calls.thread.calls
    key = (function, plan, axis if type(axis) is int else axis_option(axis), *options)
    found, made = calls.again(arrays, key, scalars)
    if made is not None:
        arrays += (*made,)
        return _several([None if at is None else arrays[at] for at in found.holds])
    first = given[next(iter(whole))]
    turned = None if type(axis) is int and axis == -1 else transposition_of(axis, first, called)
    if turned is None:
        return _run_checked(found, given, check(given, axis), implementation, scalars, plan)
    try:
        views = {name: turned.apply(each) if name in whole else each for name, each in given.items()}
        call = check(views, turned.axis)

        def own(name: str, array: Any) -> Any:
            """Return a result as the caller shall have it."""
            if name not in whole or array.ndim != len(turned.order):
                return array
            return turned.undo(array, given[whole[name]])

        return _run_checked(found, given, call, implementation, scalars, plan, own)
    except ValueError as error:
        turned.tell(error)
        raise


def _run_checked(
    signature: Any,
    given: Mapping[str, Any],
    call: Any,
    implementation: Implementation,
    scalars: Sequence[int],
    plan: str | Plan | None,
    own: Callable[[str, Any], Any] = lambda _, array: array,
) -> Any:
    """Run a checked call, and keep it under `signature`. own: gives a result that it allocates to the caller."""
    parts = implementation.parts(call)
    # a number is an array by now, and so is a list
    passed = {
        name: each if each is None or is_array(each) else parts.read.get(name) for name, each in given.items()
    }
    made = {
        name: own(name, each)
        for name, each in parts.written.items()
        if each is not None and passed.get(name) is None
    }
    names = {id(each): name for name, each in parts.written.items()}
    results = [None if each is None else names[id(each)] for each in parts.results]
    if call.on_device:
        places = [*(None if each is None else name for name, each in passed.items()), *made]
        order = tuple(None if each is None else places.index(each) for each in results)
        of_dropout = ("seed", "offset") if scalars else ()
        arrays = Arrays(passed, (*parts.written,), made, scalars=of_dropout, holds=order)
        implementation.steps(call).launch(signature, arrays, plan)
    else:
        asking.answer(lambda: implementation.steps(call).told)
        implementation.on_host(call)
    own_arrays = {**passed, **made}
    return _several([None if each is None else own_arrays[each] for each in results])


def _several(results: Sequence[Any]) -> Any:
    return tuple(results) if len(results) > 1 else results[0]
