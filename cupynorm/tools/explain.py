"""Explains which kernel a call would launch, and why. Nothing is launched, and no device is needed."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, dtype_of
from cupynorm._options import LONGEST
from cupynorm.call import asking
from cupynorm.call.axes import axes_of
from cupynorm.call.view import View
from cupynorm.catalog import op_table
from cupynorm.invoke import row_ops
from cupynorm.lower.row import row_spec
from cupynorm.plan import rule_file
from cupynorm.plan.choose import choose
from cupynorm.plan.config import DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED, Limits, active_blocks
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, devices
from cupynorm.tools.rule_plans import Content

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cupynorm.catalog.form import Arrays, Form
    from cupynorm.lower.row import RowOp
    from cupynorm.lower.spec import KernelSpec
    from cupynorm.plan.base import Occupancy
    from cupynorm.runtime.nvrtc import Cubin


@dataclasses.dataclass(frozen=True)
class DecidingRule:
    """The rule that decided. share: its share of the copy rate at the point `at`, if measured. source: of the rule."""

    id: str
    share: float | None
    at: str | None
    source: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Alternative:
    """The plan that would be chosen without a rule. share: its share at the rule's point, if that was measured."""

    plan: Plan
    why: str
    share: float | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernel and the plan that a call would launch, and why.

    problem, plan: those of plan/; for an op that is not a row op, the numbers of its one kernel.
    source: where the plan comes from: "rules" (of plan/data), "tuned" (by `cupynorm tune`) or "forced" (by plan=).
    why: the rule and its file, or what else decided. rule: the rule that decided, what it reaches and
    where it comes from; None where none did. without: what would be chosen without that rule, and its share at the same
    point.
    registers: None where there was no compiler to ask. further: other kernels of the call, which have no variants, such
    as the sums of parameters' gradients; bytes_moved is that of the whole call.
    """

    op: str
    device: str
    problem: Problem | Mapping[str, Any]
    plan: Plan | Mapping[str, Any]
    source: str
    why: str
    registers: int | None
    occupancy: float  # threads resident / threads that an SM can hold
    bytes_moved: int
    kernel: str
    note: str
    rule: DecidingRule | None = None
    without: Alternative | None = None
    further: tuple[Explanation, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dataclasses.asdict(self)


CLUSTER_GROUP = 16  # multiprocessors that a cluster stays within
MOST_BYTES = 2**63  # an array has fewer
REGISTER_BOUND = 64  # the most for a block of 1024 threads: the guess where there is no compiler to ask


def explain(
    op: RowOp,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    axis: int | tuple[int, ...] | None = -1,
    out_dtype: Any = None,
    gamma_dtype: Any = None,
    plan: str | Plan | None = None,
    device: str | None = None,
) -> Explanation:
    """Say what op(x) would launch for a contiguous, aligned x, on a device of RECORDED or the present one.

    Registers come from the compiler (NVRTC needs no device); without NVRTC the kernel's upper bound stands for them.
    Raises ValueError for an unknown device or a variant that cannot hold the row, NoDeviceError if there is no device
    to ask.
    """
    limits = _limits(device)
    x_dtype = dtype_of(dtype)
    y_dtype = dtype_of(out_dtype) if out_dtype is not None else x_dtype
    axes = axes_of(axis, shape)
    _check_shape(shape, x_dtype)
    weight = dtype_of(gamma_dtype) if gamma_dtype is not None else x_dtype
    row = tuple(shape[each] for each in axes)
    moved = math.prod(shape) * (x_dtype.itemsize + y_dtype.itemsize)
    moved += len(op.columns) * math.prod(row) * weight.itemsize
    if axes == tuple(range(len(shape) - len(axes), len(shape))):
        what = op_spec(op, shape, x_dtype, y_dtype, weight, len(axes))
    else:  # untouched pages take no memory
        function, parameters = (
            op_table.op(op.name).function,
            {name: np.empty(row, weight) for name in op.columns},
        )
        (what,) = asking.specs_of(
            lambda: function(np.empty(shape, x_dtype), axis=axes, dtype=y_dtype, **parameters), limits, plan
        )
    return _planned(op.name, what, limits, plan, moved, tuned=device is None)


def op_spec(
    op: RowOp, shape: tuple[int, ...], x_dtype: Dtype, y_dtype: Dtype, weight: Dtype, axes: int = 1
) -> KernelSpec:
    """Lower a call of an op alone on contiguous, aligned arrays. weight: the dtype of its parameters."""
    columns = {name: _imagined(shape[len(shape) - axes :], weight) for name in op.columns}
    return row_spec(op, _imagined(shape, x_dtype), _imagined(shape, y_dtype), axes, columns)


def explain_form(
    what: Form,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    plan: str | Plan | None = None,
    device: str | None = None,
) -> Explanation:
    """Say what a form's call would launch for contiguous, aligned arrays; all axes of `shape` but the last are rows."""
    limits = _limits(device)
    _check_shape(shape, dtype_of(dtype))
    rows, cols = math.prod(shape[:-1]), shape[-1]
    specs = form_specs(what, rows, cols, dtype, limits=limits, plan=plan)
    moved = what.bytes_moved(rows, cols, dtype)
    spec, *others = specs
    further = tuple(_one_kernel(what.name, each, limits, 0) for each in others)
    if isinstance(spec.problem, Problem):
        found = _planned(what.name, spec, limits, plan, moved, tuned=device is None)
    elif plan is not None:
        raise ValueError(f"{what.name} has no variants: plan={plan!r} chooses nothing")
    else:
        found = _one_kernel(what.name, spec, limits, moved)
    return dataclasses.replace(found, further=further)


def usual_numbers(explanation: Explanation) -> dict[str, Any]:
    """Return the numbers of a problem that most have, and that are not worth a line."""
    if not isinstance(explanation.problem, Problem):
        return {}
    return {each.name: each.default for each in dataclasses.fields(Problem)}


def _one_kernel(name: str, spec: KernelSpec, limits: Limits, moved: int) -> Explanation:
    """Explain a kernel that has no variants."""
    kernel = _kernel_of(spec, limits)
    ask = _Compiled(spec.text, limits)
    resident = ask.resident_blocks(kernel.expression, kernel.block, 0)
    return Explanation(
        op=name,
        device=limits.name,
        problem=kernel.problem,
        plan=kernel.numbers,
        source="rules",
        why="one kernel, which has no variants",
        registers=ask.registers(kernel.expression),
        occupancy=resident * kernel.block / limits.threads_per_sm,
        bytes_moved=moved,
        kernel=kernel.expression,
        note=ask.note,
    )


def form_spec(
    what: Form,
    rows: int,
    cols: int,
    dtype: Any,
    *,
    limits: Limits | None = None,
    plan: str | Plan | None = None,
) -> Any:
    """Lower a form's call, as form_specs(); the kernel that has variants, of several."""
    return form_specs(what, rows, cols, dtype, limits=limits, plan=plan)[0]


def form_specs(
    what: Form,
    rows: int,
    cols: int,
    dtype: Any,
    offset: int = 0,
    *,
    limits: Limits | None = None,
    plan: str | Plan | None = None,
) -> tuple[Any, ...]:
    """Lower a form's call on contiguous, aligned arrays that begin `offset` elements behind an aligned address.

    Kernels that have variants come first. limits, plan: as those of asking.specs_of().
    """
    given: Arrays = {}
    for name, (each, kind, holds) in what.given(rows, cols, dtype_of(dtype)).items():
        if holds == "result":
            continue
        # those which are looked at
        if holds in {"lengths", "ragged", "labels"} or (holds == "divisors" and len(each) == 1):
            given[name] = np.full(each, {"labels": 0, "divisors": 1}.get(holds, cols), kind)
        else:  # untouched pages take no memory
            given[name] = np.empty(math.prod(each) + offset, kind)[offset:].reshape(each)
    return asking.specs_of(lambda: what.call(given), limits, plan)


class _Kernel(NamedTuple):
    """The one kernel of an op that is no row op. block: its threads."""

    expression: str
    block: int
    problem: Mapping[str, Any]
    numbers: Mapping[str, Any]


def _kernel_of(spec: KernelSpec, limits: Limits) -> _Kernel:
    plan = spec.problem.plan(limits)
    return _Kernel(spec.expression(plan), plan.threads, spec.problem.summary(), plan.summary())


def load(what: Any, device: int) -> dict[str, Any]:
    """Compile and load the one kernel of an op that is no row op; return its numbers."""
    kernel = _kernel_of(what, devices.limits_of(device))
    compiler.kernel(device, what.text, kernel.expression, 0)
    return dict(kernel.numbers)


def _planned(
    name: str, what: KernelSpec, limits: Limits, plan: str | Plan | None, moved: int, *, tuned: bool
) -> Explanation:
    ask = _Compiled(what.text, limits)

    def occupancy(plan: Plan) -> int:
        resident = ask.resident_blocks(what.expression(plan), plan.block, plan.shared_bytes)
        if plan.cluster == 1:
            return resident
        # a cluster stays within a group of multiprocessors
        groups = limits.sm_count // CLUSTER_GROUP
        return groups * (CLUSTER_GROUP * resident // plan.cluster)

    def local_bytes(plan: Plan) -> int:
        return ask.local_bytes(what.expression(plan))

    # run() without its launch
    chosen, source = row_ops.choose_plan(what, limits, occupancy, local_bytes, plan, tuned=tuned)
    rule, without = _rule(chosen, what.problem, limits, occupancy) if source == "rules" else (None, None)
    return Explanation(
        op=name,
        device=limits.name,
        problem=what.problem,
        plan=chosen,
        source=source,
        why=chosen.why,
        registers=ask.registers(what.expression(chosen)),
        occupancy=_resident_blocks(chosen, limits) * chosen.block / limits.threads_per_sm,
        bytes_moved=moved,
        kernel=what.expression(chosen),
        note=ask.note,
        rule=rule,
        without=without,
    )


def _rule(
    chosen: Plan, problem: Problem, limits: Limits, occupancy: Occupancy
) -> tuple[DecidingRule | None, Alternative | None]:
    """Return the rule that decided, and what would be chosen without it; None where there is no such thing."""
    if not chosen.rule:
        return None, None
    architecture = limits.compute_capability
    content = Content(rule_file.content_of(architecture), rule_file.file_of(architecture))
    row = content.by_name[chosen.rule]
    rule = DecidingRule(row["id"], row.get("share"), row.get("at"), content.told["sources"][row["source"]])
    try:
        plan = choose(problem, limits, occupancy, rules=content.but([row["id"]]).rules)
    except (DoesNotFitError, KeyError, IndexError):  # the last of a list
        return rule, None
    return rule, Alternative(plan, plan.why, row.get("share_without"))


def _limits(device: str | None) -> Limits:
    if device is not None and device not in RECORDED:
        raise ValueError(f"device {device!r} is not recorded: use {', '.join(RECORDED)}")
    return devices.present_limits() if device is None else RECORDED[device]


def _check_shape(shape: tuple[int, ...], dtype: Dtype) -> None:
    if 0 in shape:
        raise ValueError(f"shape {shape} is empty: nothing would be launched")
    if math.prod(shape) * dtype.itemsize >= MOST_BYTES:
        text = str(shape)
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise ValueError(f"shape {text} of {dtype} has 2**63 bytes or more, which no array can have")


def _resident_blocks(plan: Plan, limits: Limits) -> float:
    return plan.resident_blocks * (plan.cluster / limits.sm_count if plan.cluster > 1 else 1)


def _imagined(shape: tuple[int, ...], dtype: Dtype) -> View:
    strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
    return View(0, shape, strides, dtype)


class _Compiled:
    """Occupancy without a device: registers by NVRTC, blocks by the occupancy calculator."""

    def __init__(self, text: str, limits: Limits) -> None:
        from cupynorm.runtime import nvrtc  # noqa: PLC0415  18 ms, which only a compiler's user needs

        self._nvrtc = nvrtc
        self._text = text
        self._limits = limits
        self._images: dict[str, Cubin] = {}
        version = nvrtc.available()
        self.note = (
            ""
            if version
            else "NVRTC is not installed: registers are not known, and their bound is taken for occupancy"
        )

    def _image(self, expression: str) -> Cubin | None:
        if self.note:
            return None
        if expression not in self._images:
            self._images[expression] = self._nvrtc.compile(
                self._text, expression, compiler.options(), arch=self._limits.compute_capability
            )
        return self._images[expression]

    def registers(self, expression: str) -> int | None:
        image = self._image(expression)
        return None if image is None else image.registers

    def local_bytes(self, expression: str) -> int:
        """Return a thread's local memory; 0 where no compiler can be asked."""
        image = self._image(expression)
        return 0 if image is None else image.stack_bytes

    def resident_blocks(self, expression: str, block: int, shared_bytes: int) -> int:
        """Return how many blocks a multiprocessor holds."""
        image = self._image(expression)
        registers, static = (image.registers, image.shared_bytes) if image else (REGISTER_BOUND, 0)
        return active_blocks(self._limits, block, registers, shared_bytes + static)
