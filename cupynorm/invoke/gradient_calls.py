"""Gradients on a device: from checked calls to launches, with sums of parameters in a workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm.call.arguments import allocate, view
from cupynorm.invoke import bound_calls, several_kernels
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.lower.gradients import activation_sums
from cupynorm.lower.sums import Result, Sums, broadcast_sums, partial_shape, sum_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupynorm._dtypes import Dtype
    from cupynorm.call.elementwise_gradients import ActivationGradientCall
    from cupynorm.call.view import View
    from cupynorm.lower.spec import KernelSpec


class Parameter(NamedTuple):
    """Where the gradient of a parameter goes. name: of its argument, or of the result. adds: to what is there."""

    array: Any
    name: str
    adds: bool

    @staticmethod
    def of(array: Any, name: str, *, adds: bool) -> Parameter | None:
        """Return that of an array; None if there is none."""
        return None if array is None else Parameter(array, name, adds)


class Steps:
    """The kernels of one call in their order, and the workspace that they need."""

    def __init__(self, device: int, compute: Dtype) -> None:
        self.specs: list[KernelSpec] = []
        self.workspace: dict[str, Any] = {}
        self._device = device
        self._compute = compute
        self._later: list[Sums] = []

    def room(self, name: str, shape: tuple[int, ...]) -> View:
        """Allocate an array of the type of arithmetic in the workspace."""
        name = f"{name} {len(self.workspace)}"
        self.workspace[name] = allocate(True, self._device, shape, self._compute)  # noqa: FBT003
        return view(self.workspace[name], name)

    def result(self, parameter: Parameter | None, shape: tuple[int, ...]) -> Result | None:
        """Return where the sum of each column goes. shape: that of the columns, to which the parameter broadcasts."""
        if parameter is None:
            return None
        array, name, adds = parameter
        whole = view(array, name)
        extra = max(0, len(whole.shape) - len(shape))  # leading axes of one element
        to = whole.split(len(whole.shape) - extra)[1].broadcast_to(shape)
        if all(step or extent == 1 for step, extent in zip(to.strides, shape, strict=True)):
            return Result(to, adds)
        columns = self.room(f"columns of {name}", shape)
        self._later.append(broadcast_sums(columns, Result(to, adds)))
        return Result(columns)

    def add(self, what: Sums) -> None:
        """Add sums over rows, and then those over what their parameters were broadcast along."""
        for each in (what, *self._later):
            shape = partial_shape(each, self._compute)
            asked = [result for result in each.results if result is not None]
            partial = [] if shape is None else [self.room("partial sums", shape) for _ in asked]
            self.specs += sum_specs(each, self._compute, partial)
        self._later = []

    def launch(
        self, signature: Any, given: Mapping[str, Any], written: tuple[str, ...], made: Mapping[str, Any]
    ) -> None:
        """Launch the kernels, and keep the call. given, written, made: as in Arrays."""
        arrays = Arrays(given, written, made, self.workspace)
        bound = several_kernels.launch(self._device, self.specs, arrays)
        bound_calls.thread.calls.add(signature, bound, {**made, **self.workspace})


def again(arrays: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, list[Any] | None]:
    """Launch a call again if one of its signature is bound: Calls.again."""
    return bound_calls.thread.calls.again(arrays, options)


def run_activation(call: ActivationGradientCall, given: Mapping[str, Any], signature: Any) -> None:
    """Run a checked call of an activation's gradient. given: the arrays of the call, out and add_to among them."""
    made = {} if given["out"] is not None else {"dx": call.dx}
    if call.dbias is not None and not call.adds:
        made["dbias"] = call.dbias
    cols = call.x.shape[-1]
    if not cols:
        return
    steps = Steps(call.device, call.compute)
    place = steps.result(
        Parameter.of(call.dbias, "add_to" if call.adds else "dbias", adds=call.adds), (cols,)
    )
    results = [place]
    if call.gate is not None:
        half = cols // 2
        firsts = (0, half) if call.gate == "first" else (half, 0)
        results = [None if place is None else place._replace(first=first) for first in firsts]
    bias = None if call.bias is None else view(call.bias, "bias").broadcast_to((cols,))
    dx = view(call.dx, "out" if given["out"] is not None else "dx")
    what = activation_sums(
        view(call.dy, "dy"), view(call.x, "x"), bias, dx, call.activation, call.gate, results
    )
    steps.add(what)
    steps.launch(signature, given, ("out", "add_to"), made)
