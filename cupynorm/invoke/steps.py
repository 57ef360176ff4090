"""The kernels of one call in their order, and the workspace with sums and numbers that they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm.call import asking
from cupynorm.call.arguments import allocate, view
from cupynorm.call.view import View
from cupynorm.invoke import bound_calls, row_ops, several_kernels
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.invoke.row_ops import NeedsClustersError
from cupynorm.lower.expressions import IDENTITY
from cupynorm.lower.sums import Result, Sums, broadcast_sums, partial_shape, sum_specs
from cupynorm.plan.choose import choose
from cupynorm.plan.config import DoesNotFitError, room_bytes
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from cupynorm._dtypes import Dtype
    from cupynorm.host.gradients import Sum
    from cupynorm.lower.spec import KernelSpec
    from cupynorm.plan.config import Plan


class Parameter(NamedTuple):
    """Where the gradient of a parameter goes.

    name: that of its argument, or of the result. adds: whether it is added to what is there.
    """

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
        # gives the kernels for where the device runs no clusters, or not such large ones, nor so many blocks at once;
        # and what they do differently
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
        """Say whether a kernel has a plan, or the one that is forced.

        clusters: whether the device runs them, and blocks that wait for one another.
        """
        if self._device >= 0:
            limits = devices.limits_of(self._device)
        else:
            asked = asking.about()
            limits, plan = asked.limits or RECORDED["h200"], asked.plan
        try:
            choose(
                problem,
                limits,
                lambda each: each.min_blocks if clusters or each.cluster == 1 else 0,
                plan,
                cooperative=clusters,
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
