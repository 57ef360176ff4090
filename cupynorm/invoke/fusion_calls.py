"""A checked call of a fusion, computed by NumPy here, or by kernels behind run()."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype
from cupynorm.call import asking
from cupynorm.call.arguments import view
from cupynorm.host import reference
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import Arrays, BoundCall
from cupynorm.lower.around import Around, Function
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.row import RowOp
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cupynorm.call.view import View

    Array = np.ndarray[Any, Any]


class Operand(NamedTuple):
    """What a call gave for one parameter of load or store.

    kind: "full" (it varies within rows and between them), "column" (only along the normalised axes), "row" (only
    along the others), "scalar" (an array of one element), or "value" (a Python number, which a kernel takes by
    value).
    """

    name: str
    kind: str
    array: Any  # as it was given; None for a value
    value: float = 0.0

    def stretched(self, shape: tuple[int, ...], role: str) -> View:
        """Describe the array broadcast to x's shape: stride 0 along the axes on which it does not vary."""
        return view(self.array, role).broadcast_to(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCall:
    """A call of a fusion in which nothing can fail any more, and nothing has been written yet.

    load and store are None where nothing is to be done. load takes x's element and load_operands, gives one value;
    store takes the op's result (with gamma and beta) and store_operands, gives one value for each of outs.
    Two arrays that are written, or written and read, either share no memory or are the same view.
    """

    op: RowOp
    load: Function | None
    store: Function | None
    on_device: bool
    device: int  # -1 on the host
    x: Any
    axes: int  # trailing axes that are normalised
    columns: Mapping[str, Any]  # gamma and beta, where given
    eps: float
    load_operands: tuple[Operand, ...]
    store_operands: tuple[Operand, ...]
    outs: tuple[Any, ...]
    loaded: Any  # where the load's value goes, rounded once; None if nobody asked
    stats: Mapping[str, Any]  # op.stats, or none
    compute: Dtype  # the type of arithmetic and of stats
    plan: str | Plan | None


def operand(index: int) -> str:
    """Return the role of an operand: those of load come first."""
    return f"operand {index}"


def result(index: int) -> str:
    """Return the role of a result: what was loaded comes last."""
    return f"result {index}"


def run(call: FusedCall, arrays: Arrays) -> BoundCall:
    """Run a call that has elements on its device: fill outs, loaded and stats. Return it as it is bound."""
    pointers = [view(each, name).pointer for name, each in call.stats.items()]
    return row_ops.launch(call.device, _lowered(call, pointers), call.plan, arrays)


def _lowered(call: FusedCall, stats: Sequence[int]) -> KernelSpec:
    shape, role = call.x.shape, map(operand, itertools.count())
    load, store = (
        tuple(
            each.value if each.array is None else each.stretched(shape, name)
            for each, name in zip(given, role, strict=False)
        )
        for given in (call.load_operands, call.store_operands)
    )
    outs = tuple(view(each, result(index)) for index, each in enumerate(call.outs))
    loaded = None if call.loaded is None else view(call.loaded, result(len(outs)))
    return fused_spec(
        call.op,
        view(call.x, "x"),
        call.axes,
        {name: view(array, name) for name, array in call.columns.items()},
        stats,
        call.eps,
        call.compute,
        Around(outs, call.load, load, None, loaded, call.store, store),
    )


@np.errstate(all="ignore")
def run_on_host(call: FusedCall) -> None:
    """Run a call with NumPy in float64, a block of rows of reference.py at a time; each result is rounded once."""
    asking.answer(lambda: _lowered(call, ()))
    shape = call.x.shape
    at = len(shape) - call.axes
    operands = [
        [each.value if each.array is None else np.broadcast_to(each.array, shape) for each in given]
        for given in (call.load_operands, call.store_operands)
    ]
    gamma, beta = call.columns.get("gamma"), call.columns.get("beta")
    for rows in reference._tiles(shape[:at], max(1, reference.BLOCK // math.prod(shape[at:]))):  # noqa: SLF001
        block = (*rows, ...)
        for_load, for_store = ([_part(each, block) for each in given] for given in operands)
        loaded = call.x[block].astype(np.float64)
        if call.load is not None:
            loaded = np.broadcast_to(call.load.evaluate((loaded, *for_load))[0], loaded.shape)
        normed = np.empty(loaded.shape)
        stats = (each[block] for each in call.stats.values())
        call.op.reference(loaded, gamma, beta, call.axes, call.eps, normed, *stats)
        results: tuple[Array, ...] = (normed,)
        if call.store is not None:
            results = call.store.evaluate((normed, *for_store))
        # only now, when everything of this block has been read: an output may be x or an operand
        _write(zip(call.outs, results, strict=True), block)
        if call.loaded is not None:
            _write(((call.loaded, loaded),), block)


def _part(operand: Any, block: Any) -> Any:
    """Return an operand's part in a block, each element once."""
    if not isinstance(operand, np.ndarray):
        return operand
    part = operand[block]
    return part[tuple(slice(1) if stride == 0 else slice(None) for stride in part.strides)]


def _write(results: Iterable[tuple[Array, Array]], block: Any) -> None:
    for out, values in results:
        out[block] = reference._round(values, out.dtype)  # noqa: SLF001
