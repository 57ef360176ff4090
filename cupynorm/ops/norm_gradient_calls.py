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
    arrays: tuple[Any, ...] = (dy, x[1], gamma, beta, mean, rstd, out)
    names: tuple[str, ...] = ARRAYS
    options: tuple[Any, ...] = (plan, dtype, eps, type(eps), parameters, type(parameters))
    scalars: tuple[int, ...] = ()
    if adding is not None:
        ds, bias, alpha, p, seed, offset, residual_out = adding
        arrays += (ds, bias, residual_out)
        names += ADDED
        scalars = step_calls.scalars_of(p, seed, offset)
        options += (p, type(p), *step_calls.option_keys(alpha))
        if not scalars:
            options += (seed, type(seed), offset, type(offset))
    if add_to is not None:
        sums = SUMS[centred, adding is not None]
        several = (add_to,) if len(sums) == 1 else add_to
        fits = type(several) in {tuple, list} and len(several) == len(sums)
        arrays += (*several,) if fits else (NO_TUPLE,)
        names += sums
    results, signature = step_calls.again(function, arrays, axis, options, scalars)
    if results is not None:
        return results

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

    return step_calls.run_checked(
        signature,
        dict(zip(names, arrays, strict=False)),  # an add_to that is none is refused
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


ARRAYS = ("dy", "x", "gamma", "beta", "mean", "rstd", "out")
ADDED = ("ds", "bias", "residual_out")
# what add_to is for, by whether the norm is centred, and of a sum
SUMS = {
    (False, False): ("dgamma",),
    (True, False): ("dgamma", "dbeta"),
    (False, True): ("dgamma", "dbias"),
    (True, True): ("dgamma", "dbeta", "dbias"),
}
NO_TUPLE = ()  # in place of an array: no call is kept for it
WHOLE = dict.fromkeys(("x", "dy", "ds", "out", "residual_out"), "x")


OF_LAYER_NORM, OF_RMS_NORM = (
    step_calls.Implementation(
        gradient_calls.norm_parts, functools.partial(gradient_calls.norm_steps, forward=forward), _on_host
    )
    for forward in (LAYER_NORM, RMS_NORM)
)
