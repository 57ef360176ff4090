"""Gradients of a fusion: of x, of every array operand, of gamma and beta, by derivatives of the traced functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm._options import eps_of, eps_within, shown
from cupynorm.call.arguments import (
    Call,
    allocate,
    check,
    check_dtype,
    check_kind,
    check_kinds,
    check_out,
    check_places,
    gradient_of,
    is_number,
    sharing,
    view,
)
from cupynorm.host import gradients, reference
from cupynorm.host.broadcast_sums import BroadcastSum
from cupynorm.host.gradients import NormGradient, SoftmaxGradient, Sum
from cupynorm.invoke import fusion_gradient_calls, step_calls
from cupynorm.invoke.fusion_calls import Operand, _part
from cupynorm.invoke.fusion_gradient_calls import FusionGradientCall, Target
from cupynorm.lower.around import Function
from cupynorm.lower.differentiate import gradient
from cupynorm.lower.expressions import DeviceFunction, Expression
from cupynorm.ops.fusion_operands import check_numbers, checked_operand
from cupynorm.plan.config import Plan

Array = np.ndarray[Any, Any]


class FusionGradients(NamedTuple):
    """What Fusion.backward returns."""

    x: Any
    operands: tuple[Any, ...]  # of load's, then of store's; None for a number, and for integers and bool
    gamma: Any  # None where there is none
    beta: Any


def differentiable(role: str, function: Function | None) -> Expression | None:
    """Return a load or store that was traced; TypeError for a DeviceFunction."""
    if isinstance(function, DeviceFunction):
        raise TypeError(
            f"{role} is the DeviceFunction {function.name}, whose derivative nobody knows: "
            "give fuse a function that it can trace, or write the gradient as a fusion of your own"
        )
    return function


def check_arriving(
    x: Any, dy: Any, results: int, *, out: Any, dtype: Any, axis: Any, plan: Any, columns: Mapping[str, Any]
) -> tuple[Call, tuple[Any, ...]]:
    """Check x, gamma, beta and what arrives at each result; allocate dx if it was not given."""
    given = dy if isinstance(dy, tuple) else (dy,)
    if len(given) != results:
        raise ValueError(
            f"dy has {len(given)} arrays, the fusion {results} results: give one for each, in a tuple, "
            "None where nothing arrives"
        )
    named = {f"dy[{at}]" if results > 1 else "dy": each for at, each in enumerate(given)}
    named = {name: each for name, each in named.items() if each is not None}
    if not named:
        raise ValueError("dy is None for every result: there is nothing to go back from")
    call = check(
        x,
        axis=axis,
        out=out,
        dtype=dtype,
        plan=plan,
        columns=columns,
        others=named,
        may_be=("x", *named),
        wide=tuple(named.values()),
    )
    for name, each in named.items():
        check_dtype(name, each)
        if each.shape != x.shape:
            raise ValueError(f"{name} has shape {each.shape}, x has {x.shape}")
    return call, given


def targets_of(
    call: Call, operands: Sequence[Operand], columns: Mapping[str, Any], add_to: Any, arriving: Sequence[Any]
) -> tuple[tuple[Target | None, ...], dict[str, Target]]:
    """Return where the gradients of operands, and of gamma and beta as they were given, are written."""
    if add_to is not None and not isinstance(add_to, Mapping):
        raise TypeError(
            f"add_to is {shown(add_to)}: give a dict of arrays by the names of operands, gamma and beta"
        )
    sums = dict(add_to or {})
    names = [each.name for each in operands]
    floating = {each.name: each.array for each in operands if _has_gradient(each)}
    known = {**floating, **columns}
    for name, each in sums.items():
        if names.count(name) > 1:
            raise ValueError(f"add_to has {name!r}, a parameter of both load and store: rename one of them")
        if name not in known:
            raise ValueError(f"add_to has {name!r}: there are gradients of {', '.join(known) or 'x alone'}")
        check_kind(f"add_to[{name!r}]", each)
    read = {"x": call.x, **{f"dy[{at}]": each for at, each in enumerate(arriving) if each is not None}}
    read |= {name: each for name, each in known.items() if not is_number(each)}
    for name, each in sums.items():
        _check_sum(call, f"add_to[{name!r}]", each, known[name], {**read, "out": call.out})
        read[f"add_to[{name!r}]"] = each

    def target(name: str, given: Any) -> Target:
        if name in sums:
            return Target(sums[name], adds=True)
        like = gradient_of(given, compute_dtype(call.x.dtype))
        return Target(allocate(call.on_device, call.device, *like), adds=False)

    found = tuple(target(each.name, each.array) if _has_gradient(each) else None for each in operands)
    return found, {name: target(name, each) for name, each in columns.items()}


def _has_gradient(operand: Operand) -> bool:
    return operand.array is not None and operand.array.dtype.kind not in "biu"


def _check_sum(call: Call, name: str, array: Any, given: Any, read: Mapping[str, Any]) -> None:
    """Check an array that a gradient is added to. given: what it is the gradient of."""
    check_kinds(call.x, {name: array})
    if call.on_device:
        check_places(call.x, {name: array})
    of = np.empty(()) if is_number(given) else given
    check_out(array, of.shape, None, {"its operand": of, **read}, call.on_device, name=name, may_be=())


def check_dx(dx: Any, operands: Sequence[Operand]) -> None:
    """ValueError if dx shares memory with an operand."""
    others = {each.name: view(each.array) for each in operands if each.array is not None and each.array.size}
    if dx.size:
        shared = sharing(view(dx), others)
        if shared is not None:
            raise ValueError(f"out and {shared} share memory")


def checked(
    fusion: Any, dy: Any, x: Any, values: Sequence[Any], own: Mapping[str, Any], add_to: Any
) -> FusionGradientCall:
    """Check a call of backward, and allocate its results. values: of all operands. own: its other arguments."""
    load = differentiable("load", fusion.load)
    store = differentiable("store", fusion.store)
    eps = own.get("eps")
    exact = eps_of(fusion.eps if eps is None else eps) if fusion.op.has_eps else 0.0
    columns = {name: own[name] for name in fusion.op.columns if own.get(name) is not None}
    call, arriving = check_arriving(
        x,
        dy,
        fusion.results,
        out=own.get("out"),
        dtype=own.get("dtype"),
        axis=own.get("axis", -1),
        plan=own.get("plan"),
        columns=columns,
    )
    names = (*fusion.load_operands, *fusion.store_operands)
    found = [checked_operand(name, value, call) for name, value in zip(names, values, strict=True)]
    if own.get("out") is not None:
        check_dx(call.out, found)
    targets, column_targets = targets_of(call, found, columns, add_to, arriving)
    at = len(fusion.load_operands)
    made = FusionGradientCall(
        op=fusion.op,
        load=load,
        store=store,
        on_device=call.on_device,
        device=call.device,
        x=call.x,
        axes=call.axes,
        columns=call.columns,
        eps=exact,
        load_operands=tuple(found[:at]),
        store_operands=tuple(found[at:]),
        arriving=arriving[:-1] if fusion.keep_loaded else arriving,
        arriving_loaded=arriving[-1] if fusion.keep_loaded else None,
        dx=call.out,
        targets=targets,
        column_targets=column_targets,
        plan=own.get("plan"),
    )
    check_numbers(found, made.compute)
    return dataclasses.replace(made, eps=eps_within(made.compute, exact))


def run(
    fusion: Any,
    given: Mapping[str, Any],
    options: tuple[Any, ...],
    check: Callable[[Mapping[str, Any], Any], FusionGradientCall],
    plan: str | Plan | None,
    axis: Any,
    whole: Mapping[str, str],
) -> FusionGradients:
    """Run a call of a fusion's backward. given to whole: as in step_calls.run_checked; options: as in again."""
    function = ("Fusion.backward", fusion)
    results, signature = step_calls.again(function, (*given.values(),), axis, (plan, *options))
    if results is None:
        results = step_calls.run_checked(signature, given, check, IMPLEMENTATION, axis, whole, plan=plan)
    dx, *operands, gamma, beta = results
    return FusionGradients(dx, tuple(operands), gamma, beta)


class _OperandGradient:
    """The gradient of one operand: written element by element where it has x's shape, else summed."""

    def __init__(self, target: Target, shape: tuple[int, ...], axes: int) -> None:
        self._target = target
        start = target.array if target.adds else None
        whole = target.array.shape == shape
        self._sum = None if whole else BroadcastSum(target.array.shape, shape, axes, start)
        self._is_zero = True

    def add(self, values: Array, rows: tuple[slice, ...]) -> None:
        """Take the gradient in a block of rows."""
        if self._sum is not None:
            self._sum.add(values, rows)
            return
        self._is_zero = False
        out, adds = self._target
        block = (*rows, ...)
        out[block] = reference._round(out[block].astype(np.float64) + values if adds else values, out.dtype)  # noqa: SLF001

    def finish(self) -> None:
        """Write the sum, or that there was nothing."""
        if self._sum is not None:
            self._sum.store(self._target.array)
        elif self._is_zero and not self._target.adds:
            self._target.array[...] = 0


class _Step(NamedTuple):
    """The gradient of load or store: an expression, and the operands whose gradients it gives beside the first one's.

    operands: all of them, stretched to x's shape; numbers as they are.
    """

    gradient: Expression
    operands: list[Any]
    wanted: list[_OperandGradient]

    def back(self, first: Array, arriving: Sequence[Array], rows: tuple[slice, ...]) -> Array:
        """Return the gradient of the first operand in a block of rows, and take those of the others."""
        block = (*rows, ...)
        given = [_part(each, block) for each in self.operands]
        found, *others = (
            np.broadcast_to(each, first.shape) for each in self.gradient.evaluate([first, *given, *arriving])
        )
        for each, values in zip(self.wanted, others, strict=True):
            each.add(values, rows)
        return found


def _step(
    function: Expression | None,
    operands: Sequence[Operand],
    targets: Sequence[Target | None],
    shape: tuple[int, ...],
    axes: int,
) -> _Step | None:
    if function is None:
        return None
    indices = [index for index, target in enumerate(targets, 1) if target is not None]
    return _Step(
        gradient(function, (0, *indices)),
        [each.value if each.array is None else np.broadcast_to(each.array, shape) for each in operands],
        [_OperandGradient(target, shape, axes) for target in targets if target is not None],
    )


@np.errstate(all="ignore")
def _on_host(call: FusionGradientCall) -> None:
    """Run a call with NumPy in float64, a block of rows of reference.py at a time; each result is rounded once."""
    if not call.x.size:
        for target in (*call.targets, *call.column_targets.values()):
            if target is not None and not target.adds:
                target.array[...] = 0
        return
    shape, axes = call.x.shape, call.axes
    at, first_of_store = len(shape) - axes, len(call.load_operands)
    load = _step(call.load, call.load_operands, call.targets[:first_of_store], shape, axes)
    arriving = [each for each in call.arriving if each is not None]
    store = call.store
    if store is not None:  # a result at which nothing arrives is none
        results = zip(store.results, call.arriving, strict=True)
        store = dataclasses.replace(
            store, results=tuple(index for index, each in results if each is not None)
        )
    behind = _step(store, call.store_operands, call.targets[first_of_store:], shape, axes)
    sums = {
        name: target.array.astype(np.float64) if target.adds else np.zeros(target.array.shape)
        for name, target in call.column_targets.items()
    }
    for rows in reference._tiles(shape[:at], max(1, reference.BLOCK // math.prod(shape[at:]))):  # noqa: SLF001
        block = (*rows, ...)
        given = call.x[block].astype(np.float64)
        loaded = given
        if load is not None and call.load is not None:
            operands = [_part(each, block) for each in load.operands]
            loaded = np.broadcast_to(call.load.evaluate([given, *operands])[0], given.shape)
        back: Array = np.zeros(given.shape)
        if arriving:
            slopes = [each[block].astype(np.float64) for each in arriving]
            back = _op_back(call, np.asarray(loaded), slopes, behind, rows, sums)
        if call.arriving_loaded is not None:
            back += call.arriving_loaded[block].astype(np.float64)
        if load is not None:
            back = load.back(given, [back], rows)
        # only now, when everything of this block has been read: dx may be x or what arrives
        call.dx[block] = reference._round(back, call.dx.dtype)  # noqa: SLF001
    for step in (load, behind):
        for each in step.wanted if step is not None else ():
            each.finish()
    for name, total in sums.items():
        to = call.column_targets[name].array
        to[...] = reference._round(total, to.dtype)  # noqa: SLF001


def _op_back(
    call: FusionGradientCall,
    loaded: Array,
    slopes: list[Array],
    behind: _Step | None,
    rows: tuple[slice, ...],
    sums: Mapping[str, Array],
) -> Array:
    """Return the gradient of what was loaded in some rows, and add those of gamma and beta to their sums."""
    op, axes, gamma, beta = call.op, call.axes, call.columns.get("gamma"), call.columns.get("beta")
    y, found = np.empty(loaded.shape), np.empty(loaded.shape)
    slope = slopes[0]
    if behind is not None or not op.columns:
        op.reference(loaded, gamma, beta, axes, call.eps, y)
    if behind is not None:
        slope = behind.back(y, slopes, rows)
    if not op.columns:
        # what load makes -inf is dropped
        kept = reference.Masking(1.0, None, loaded != -np.inf, None, None)
        log = op.name == "log_softmax"
        gradients.softmax(SoftmaxGradient(slope, y, axes, log, None, found, None), kept)
        return found
    dgamma, dbeta = (None if name not in sums else Sum(sums[name], adds=True) for name in ("gamma", "beta"))
    gradients.norm(
        NormGradient(
            dy=slope,
            x=loaded,
            axes=axes,
            centred="mean" in op.stats,
            from_y=False,
            gamma=gamma,
            beta=None,
            mean=None,
            rstd=None,
            eps=call.eps,
            dx=found,
            dgamma=dgamma,
            dbeta=dbeta,
            add=None,
        )
    )
    return found


IMPLEMENTATION = step_calls.Implementation(fusion_gradient_calls.parts, fusion_gradient_calls.steps, _on_host)
