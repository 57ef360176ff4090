"""Gradients of a fusion: a checked call, and its kernels on a device."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm._dtypes import Dtype, compute_dtype
from cupynorm.call.arguments import view
from cupynorm.call.view import View
from cupynorm.invoke.step_calls import Parts
from cupynorm.invoke.steps import Parameter, Steps
from cupynorm.lower.around import Around, RowSums
from cupynorm.lower.backward import (
    LAYER_NORM_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    LOGSUMEXP,
    RMS_NORM_BACKWARD,
    SOFTMAX_BACKWARD,
)
from cupynorm.lower.expressions import Expression
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.fusion_gradients import Fused, composed
from cupynorm.lower.row_groups import RowGroups, row_groups
from cupynorm.lower.sums import Result, Sums, broadcast_sums, nowhere, sums_of_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cupynorm.invoke.fusion_calls import Operand
    from cupynorm.lower.row import RowOp
    from cupynorm.lower.spec import KernelSpec
    from cupynorm.plan.config import Plan

BACKWARD = {
    "layer_norm": LAYER_NORM_BACKWARD,
    "rms_norm": RMS_NORM_BACKWARD,
    "softmax": SOFTMAX_BACKWARD,
    "log_softmax": LOG_SOFTMAX_BACKWARD,
}


class Target(NamedTuple):
    """Where a gradient is written. adds: to what stands there."""

    array: Any
    adds: bool


@dataclasses.dataclass(frozen=True, eq=False)
class FusionGradientCall:
    """A call of Fusion.backward in which nothing can fail any more, and nothing has been written yet.

    dx may be x or one of what arrives; no other array that is written shares memory with one that is read.
    """

    op: RowOp
    load: Expression | None
    store: Expression | None
    on_device: bool
    device: int  # -1 on the host
    x: Any
    axes: int  # trailing axes that are normalised
    columns: Mapping[str, Any]  # gamma and beta, where given
    eps: float
    load_operands: tuple[Operand, ...]
    store_operands: tuple[Operand, ...]
    arriving: tuple[Any, ...]  # at each of store's results; None: nothing
    arriving_loaded: Any  # at what was loaded; None: nothing
    dx: Any
    targets: tuple[Target | None, ...]  # for each operand of load, then of store
    column_targets: Mapping[str, Target]  # for each of columns
    plan: str | Plan | None  # that was asked for

    @property
    def compute(self) -> Dtype:
        """The type of arithmetic."""
        arriving = [each.dtype for each in self.arriving if each is not None]
        return compute_dtype(self.x.dtype, self.dx.dtype, *arriving)

    @property
    def named_operands(self) -> dict[str, Operand]:
        """The operands of load, then of store, by names that say their places."""
        return {f"operand {at}": each for at, each in enumerate((*self.load_operands, *self.store_operands))}

    @property
    def named_targets(self) -> dict[str, Target]:
        """Where gradients of operands and parameters go, by names; those that there are."""
        found = {f"d operand {at}": each for at, each in enumerate(self.targets) if each is not None}
        return found | {f"d {name}": each for name, each in self.column_targets.items()}


def parts(call: FusionGradientCall) -> Parts:
    """Return the arrays of a checked call. Its results: dx, of each operand, of gamma and of beta; None for none."""
    read = {"x": call.x, **call.columns, "arriving at loaded": call.arriving_loaded}
    read |= {f"arriving {at}": each for at, each in enumerate(call.arriving)}
    read |= {name: each.array for name, each in call.named_operands.items()}
    written = {"out": call.dx, **{name: each.array for name, each in call.named_targets.items()}}
    names = [f"d operand {at}" for at in range(len(call.targets))]
    return Parts(read, written, [call.dx, *(written.get(name) for name in (*names, "d gamma", "d beta"))])


def steps(call: FusionGradientCall, *, clusters: bool = True) -> Steps:
    """Return the kernels of a checked call. clusters: whether the device runs them."""
    made = _Made(call)
    if not call.x.size:
        made.add_zeros()
        return made.steps
    made.add_statistics()
    in_pass = made.sums_in_the_pass(clusters=clusters)
    if in_pass.names and clusters:
        made.steps.otherwise = functools.partial(steps, call, clusters=False)
    made.add_behind(in_pass)
    made.add_before(in_pass)
    return made.steps


def _number(function: Callable[[dict[str, Any]], tuple[Any, ...]], at: int, v: dict[str, Any]) -> Any:
    """Return number `at` of what a function gives."""
    return function(v)[at]


class _Before(NamedTuple):
    """What is done with the backward op's result. later: sums of what is written to the workspace."""

    outs: tuple[View, ...]
    store: Expression
    operands: tuple[View | float, ...]
    later: list[tuple[View, Result]]


class _InPass(NamedTuple):
    """Names of the gradients that are summed in the pass of the backward op: of what stands behind it, and before."""

    behind: list[str]
    before: list[str]

    @property
    def names(self) -> list[str]:
        """All of them, as the kernel has them."""
        return [*self.behind, *self.before]


class _Made:
    """The kernels of one call, while they are made."""

    def __init__(self, call: FusionGradientCall) -> None:
        self.call = call
        self.steps = Steps(call.device, call.compute)
        self._shape, self._axes = call.x.shape, call.axes
        self._rooms: dict[str, View] = {}  # of gradients that are summed when they have been written
        count = len(call.load_operands)
        names = [*call.named_operands]
        arriving = tuple(None if each is None else f"arriving {at}" for at, each in enumerate(call.arriving))
        self._fused = Fused(
            call.op.name,
            call.load,
            tuple(names[:count]),
            call.store,
            tuple(names[count:]),
            arriving,
            (*call.columns,),
            call.arriving_loaded is not None,
        )
        arrays = {"x": call.x, **call.columns, "arriving at loaded": call.arriving_loaded}
        arrays |= {f"arriving {at}": each for at, each in enumerate(call.arriving)}
        arrays |= {name: each.array for name, each in call.named_operands.items()}
        self._known: dict[str, View | float] = {
            name: view(each, name).broadcast_to(self._shape)
            for name, each in arrays.items()
            if each is not None
        }
        self._known |= {name: each.value for name, each in call.named_operands.items() if each.array is None}

    def add_statistics(self) -> None:
        """Add the kernel that computes statistics of what load gives: mean and rstd, or log(sum(exp))."""
        call, leading = self.call, self._shape[: len(self._shape) - self._axes]
        op: RowOp = call.op if call.op.stats else LOGSUMEXP
        rooms = {name: self.steps.room(name, leading) for name in op.stats}
        around = Around(
            (),
            load=call.load,
            load_operands=tuple(self._known[name] for name in self._fused.load_names),
            room=self.steps.messages(self._shape, self._axes),
        )
        pointers = [each.pointer for each in rooms.values()]
        x = view(call.x, "x")
        self.steps.specs.append(fused_spec(op, x, self._axes, {}, pointers, call.eps, call.compute, around))
        for name, each in rooms.items():
            strides = each.strides + (0,) * self._axes
            self._known[name] = View(each.pointer, self._shape, strides, each.dtype)

    def _functions_behind(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Return the gradients of what stands behind the op, of each element: of store's operands, gamma and beta."""
        form, targets = self._fused, self.call.named_targets
        found: dict[str, Callable[[dict[str, Any]], Any]] = {
            f"d {name}": functools.partial(_number, form.behind, at)
            for at, name in enumerate(form.store_names, 1)
        }
        found["d gamma"] = lambda v: form.behind(v)[0] * form.normalised(v)
        found["d beta"] = lambda v: form.behind(v)[0]
        return {name: each for name, each in found.items() if name in targets}

    def sums_in_the_pass(self, *, clusters: bool) -> _InPass:
        """Return which gradients are summed over all rows in the pass of the backward op; none if there is no room."""
        targets, leading = self.call.named_targets, len(self._shape) - self._axes

        def over_rows(names: Iterable[str]) -> list[str]:
            """Return those of names whose array all rows share."""
            found = []
            for name in names:
                whole = view(targets[name].array, name)
                rows = zip(self._stretched(whole).strides[:leading], self._shape, strict=False)
                if whole.shape != self._shape and all(not step or extent == 1 for step, extent in rows):
                    found.append(name)
            return found

        loaded = (f"d {name}" for name in self._fused.load_names)
        found = _InPass(
            over_rows(self._functions_behind()), over_rows(name for name in loaded if name in targets)
        )
        if not found.names:
            return found
        cols, groups = self._groups()
        sums = [nowhere(groups.groups, cols, self.call.compute)] * len(found.names)
        problem = self._row_kernel(found, sums).problem
        return found if self.steps.fits(problem, self.call.plan, clusters=clusters) else _InPass([], [])

    def _groups(self) -> tuple[int, RowGroups]:
        """Return the columns, and the groups of rows whose sums are taken in the pass."""
        cols = math.prod(self._shape[len(self._shape) - self._axes :])
        return cols, row_groups(math.prod(self._shape) // cols, cols)

    def add_behind(self, in_pass: _InPass) -> None:
        """Add the gradients of what stands behind the op but for those, each in a pass of its own."""
        for name, function in self._functions_behind().items():
            if name not in in_pass.behind:
                self._add(name, function)

    def _add(self, name: str, function: Callable[[dict[str, Any]], Any]) -> None:
        """Add one gradient: of each element, or summed over all along which its operand is broadcast."""
        target = self.call.named_targets[name]
        whole = view(target.array, name)
        if whole.shape == self._shape:
            known = dict(self._known)
            if target.adds:
                known[name] = whole
            expression, operands = composed(
                lambda v: function(v) + v[name] if target.adds else function(v), known
            )
            self.steps.add(Sums(expression, operands, self._shape, self._axes, (None,), (whole,)))
            return
        to = self._stretched(whole)
        summed = [at for at, step in enumerate(to.strides) if not step and self._shape[at] > 1]
        kept = [at for at in range(len(self._shape)) if at not in summed]
        order = (*summed, *kept)
        expression, operands = composed(function, self._known)
        moved = tuple(each.reordered(order) if isinstance(each, View) else each for each in operands)
        result = Result(to.reordered(order).split(len(kept))[1], target.adds)
        shape = tuple(self._shape[at] for at in order)
        self.steps.add(Sums(expression, moved, shape, len(kept), (result,)))

    def _stretched(self, target: View) -> View:
        extra = max(0, len(target.shape) - len(self._shape))  # leading axes of one element
        return target.split(len(target.shape) - extra)[1].broadcast_to(self._shape)

    def add_before(self, in_pass: _InPass) -> None:
        """Add the backward op, which writes the gradients of x and of load's operands; then those that are sums."""
        names, targets = in_pass.names, self.call.named_targets
        if names:
            shape = self._shape[len(self._shape) - self._axes :]
            cols, groups = self._groups()
            partial = [self.steps.room(f"partial sums of {name}", (groups.groups, cols)) for name in names]
            self.steps.specs.append(self._row_kernel(in_pass, partial))
            parameters = (Parameter(targets[name].array, name, targets[name].adds) for name in names)
            results = [self.steps.result(each, shape) for each in parameters]
            self.steps.specs.append(sums_of_groups(partial, [each for each in results if each is not None]))
            self.steps.add_later()
        else:
            self.steps.specs.append(self._row_kernel(in_pass))
        for columns, result in self._before(in_pass).later:
            self.steps.add(broadcast_sums(columns, result))

    def _before(self, in_pass: _InPass) -> _Before:
        """Return where the gradients of x and of load's operands go, and the function that gives them."""
        form, targets, summed = self._fused, self.call.named_targets, in_pass.before
        wanted = [f"d {name}" for name in form.load_names]
        outs = [view(self.call.dx, "out")]
        later: list[tuple[View, Result]] = []
        known = dict(self._known)
        for name in wanted:
            if name not in targets or name in summed:
                continue
            whole = view(targets[name].array, name)
            if whole.shape == self._shape:
                outs.append(whole)
                if targets[name].adds:
                    known[name] = whole
            else:
                if name not in self._rooms:
                    self._rooms[name] = self.steps.room(name, self._shape)
                outs.append(self._rooms[name])
                later.append((outs[-1], Result(self._stretched(whole), targets[name].adds)))

        def before(v: dict[str, Any]) -> tuple[Any, ...]:
            dx, *others = form.before(v, len(wanted))
            found = dict(zip(wanted, others, strict=False))
            stored = [name for name in found if name in targets and name not in summed]
            gradients = (found[name] + v[name] if name in known else found[name] for name in stored)
            return dx, *gradients, *(found[name] for name in summed)

        store, operands = composed(before, {"d": 0.0, **known}, "d")
        return _Before(tuple(outs), store, operands, later)

    def _row_kernel(self, in_pass: _InPass, partial: Sequence[View] = ()) -> KernelSpec:
        """Lower the backward op, whose functions also give what is summed in its pass; partial: where that goes."""
        call, behind = self.call, self._functions_behind()
        of_each = len(in_pass.behind), len(in_pass.before)
        sums = RowSums((*partial,), self._groups()[1], *of_each) if partial else None
        fields, operands = composed(
            lambda v: (*self._fused.fields(v), *(behind[name](v) for name in in_pass.behind)),
            self._known,
            "x",
        )
        outs, store, beside, _ = self._before(in_pass)
        around = Around(
            outs, load=fields, load_operands=operands, store=store, store_operands=beside, sums=sums
        )
        op, x = BACKWARD[call.op.name], view(call.x, "x")
        return fused_spec(op, x, self._axes, {}, (), 0.0, call.compute, around)

    def add_zeros(self) -> None:
        """Add what writes 0 to the gradients of operands where x has no rows."""
        for name, target in self.call.named_targets.items():
            whole = view(target.array, name)
            if not target.adds and target.array.size:
                zero = Expression(1, (), (0,))
                self.steps.add(Sums(zero, (0.0,), (0, *whole.shape), len(whole.shape), (Result(whole),)))
