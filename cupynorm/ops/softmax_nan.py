"""softmax and log_softmax with a keyword nan=."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm._options import plainly
from cupynorm._values import replace
from cupynorm.call.masks import asked_of
from cupynorm.call.missing import OMIT, PROPAGATE, nan_policy
from cupynorm.host import ops
from cupynorm.host.keeping import refusing
from cupynorm.lower.row import RowOp
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cupynorm.plan.config import Plan


def _on_host(x: Any, _gamma: Any, _beta: Any, axes: int, _eps: float, out: Any, **extras: Any) -> None:
    ops.softmax(x, axes, out, **extras, omit=True)


def _log_on_host(x: Any, _gamma: Any, _beta: Any, axes: int, _eps: float, out: Any, **extras: Any) -> None:
    ops.log_softmax(x, axes, out, **extras, omit=True)


OMITTING = {  # what leaves out nan
    "softmax": RowOp("softmax, nan omitted", "ops/omitting.cuh", "OmittingSoftmax", _on_host),
    "log_softmax": RowOp("log_softmax, nan omitted", "ops/omitting.cuh", "OmittingLogSoftmax", _log_on_host),
}


def run(
    run_with_options: Callable[..., Any],
    op: RowOp,
    x: Any,
    axis: int | tuple[int, ...] | None,
    out: Any,
    dtype: Any,
    plan: str | Plan | None,
    options: Mapping[str, Any],
) -> Any:
    """Run a call that says what becomes of nan. run_with_options: runs one that does not."""
    others = {name: each for name, each in options.items() if name != "nan"}
    nan = nan_policy(options["nan"], on_device=devices.is_device_array(x))
    if nan != PROPAGATE and others.get("quantize") is not None:
        raise ValueError(
            f'quantize={plainly(others["quantize"])} and nan="{nan}": nan has no quantised result'
        )
    if nan == PROPAGATE:
        return run_with_options(op, x, axis, out, dtype, plan, others)
    if op.name == "softmax":
        others.pop("quantize", None)
    asked_of(op.name, others)  # whose errors name the function
    wanted = OMITTING[op.name] if nan == OMIT else replace(op, reference=refusing(op.reference))
    return run_with_options(wanted, x, axis, out, dtype, plan, others)
