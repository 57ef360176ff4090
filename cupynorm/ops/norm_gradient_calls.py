"""How a call of a norm's gradient runs, from its arguments on; that of a norm of a sum, too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cupynorm.call.gradients import Adding, GradientCall, check_norm_gradient
from cupynorm.host import gradients
from cupynorm.invoke import gradient_calls, step_calls
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping


def run(
    function: str,
    dy: Any,
    x: tuple[str, Any],
    *,
    centred: bool,
    from_y: bool = False,
    gamma: Any,
    beta: Any = None,
    mean: Any = None,
    rstd: Any,
    eps: float = 0.0,
    axis: int | tuple[int, ...] | None,
    out: Any,
    dtype: Any,
    add_to: Any,
    parameters: bool,
    plan: str | Plan | None,
    adding: tuple[Any, ...] | None = None,
) -> Any:
    """Run one call. x: with its name in the call. adding: the fields of Adding, which takes longer to make."""
    given = {
        "dy": dy,
        "x": x[1],
        "gamma": gamma,
        "beta": beta,
        "mean": mean,
        "rstd": rstd,
        "out": out,
        "dgamma": None,
    }
    if centred:
        given["dbeta"] = None
    numbers: tuple[Any, ...] = ()
    scalars: tuple[int, ...] = ()
    if adding is not None:
        ds, bias, alpha, p, seed, offset, residual_out = adding
        given |= {"dbias": None, "ds": ds, "bias": bias, "residual_out": residual_out}
        scalars = step_calls.scalars_of(p, seed, offset)
        numbers = (alpha, p, *(() if scalars else (seed, offset)))
    if add_to is not None:
        sums = [name for name in ("dgamma", "dbeta", "dbias") if name in given]
        if len(sums) == 1:
            given["dgamma"] = add_to
        elif type(add_to) in {tuple, list} and len(add_to) == len(sums):
            given |= zip(sums, add_to, strict=True)
        else:
            given["add_to"] = (add_to,)  # which no call is kept for

    def check(own: Mapping[str, Any], axis: Any) -> GradientCall:
        added = None
        if adding is not None:
            added = Adding(*adding)._replace(ds=own["ds"], residual_out=own["residual_out"])
        return check_norm_gradient(
            own["dy"],
            (x[0], own["x"]),
            centred=centred,
            from_y=from_y,
            gamma=gamma,
            beta=beta,
            mean=mean,
            rstd=rstd,
            eps=eps,
            axis=axis,
            out=own["out"],
            dtype=dtype,
            add_to=add_to,
            parameters=parameters,
            plan=plan,
            adding=added,
        )

    return step_calls.run(
        function,
        given,
        step_calls.option_keys(eps, parameters, dtype, *numbers),
        check,
        OF_LAYER_NORM if centred else OF_RMS_NORM,
        axis,
        WHOLE,
        x[0],
        scalars,
        plan,
    )


def _on_host(call: GradientCall) -> None:
    """Compute a checked call on NumPy arrays."""
    gradients.norm(call.what)


WHOLE = dict.fromkeys(("x", "dy", "ds", "out", "residual_out"), "x")


OF_LAYER_NORM, OF_RMS_NORM = (
    step_calls.Implementation(
        gradient_calls.norm_parts, functools.partial(gradient_calls.norm_steps, forward=forward), _on_host
    )
    for forward in (LAYER_NORM, RMS_NORM)
)
