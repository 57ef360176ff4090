"""Checks of a call of a norm's or a softmax's gradient: from a user's arrays to a checked call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype
from cupynorm._options import boolean, eps_of, eps_within, finite, shown, within
from cupynorm._values import NamedTuple
from cupynorm.call.arguments import (
    allocate,
    asked_dtype,
    check_columns,
    check_dtype,
    check_forced,
    check_kind,
    check_kinds,
    check_out,
    check_places,
    gradient_of,
    is_number,
    trailing_axes,
    with_arrays,
)
from cupynorm.call.extras import dropout_of
from cupynorm.call.masks import Mask, asked_of, mask_of, with_lengths
from cupynorm.host.gradients import AddGradient, NormGradient, SoftmaxGradient, Sum

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cupynorm.plan.config import Plan


class GradientCall(NamedTuple):
    """A checked call: nothing in it can fail any more, and nothing has been written yet.

    Results share no memory with what is read, but that dx and dresidual may be the arrays of x's shape themselves.
    """

    on_device: bool
    device: int  # -1 on the host
    what: Any  # a NormGradient or a SoftmaxGradient
    mask: Mask | None  # of softmax
    results: tuple[Any, ...]  # what the function returns, in this order
    plan: str | Plan | None  # that was asked for

    @property
    def compute(self) -> Dtype:
        """The type of arithmetic."""
        x = self.what.x if isinstance(self.what, NormGradient) else self.what.y
        return compute_dtype(self.what.dy.dtype, x.dtype, self.what.dx.dtype)


class Adding(NamedTuple):
    """The keywords of the gradient of a norm of a sum."""

    ds: Any
    bias: Any
    alpha: Any
    dropout: Any
    seed: Any
    offset: Any
    residual_out: Any


class _Rows(NamedTuple):
    """What is the same in all of these calls. x: the array called `name`, whose last `axes` axes are a row."""

    on_device: bool
    device: int
    name: str
    x: Any
    axes: int
    asked: Dtype | None
    read: Mapping[str, Any]  # x first

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        shape: tuple[int, ...] = self.x.shape
        return shape[len(shape) - self.axes :]

    def result(
        self, out: Any, name: str, written: Mapping[str, Any], asked: Dtype | None, dtype: Dtype
    ) -> Any:
        """Return where a result of x's shape goes: `out` if it fits, which may be an array of `read` of that shape."""
        if out is None:
            return allocate(self.on_device, self.device, self.x.shape, asked or dtype, like=self.x)
        may_be = [each for each in (self.name, "dy", "ds") if each in self.read]
        read = {**self.read, **written}
        check_out(out, self.x.shape, asked, read, self.on_device, name=name, may_be=may_be)
        return out

    def parameter_sum(
        self, label: str, add_to: Any, alike: tuple[str, Any] | None, like: Any, written: dict[str, Any]
    ) -> Sum:
        """Return where the gradient of a parameter goes.

        alike: the parameter's name, and the parameter, if it is known: then the gradient has its shape. like: None, or
        a parameter that otherwise says shape and dtype. written: what else is written; this is added to it.
        """
        if add_to is None:
            parameter = like if alike is None else alike[1]
            shape, dtype = self.shape, compute_dtype(self.x.dtype)
            if parameter is not None:
                shape, dtype = gradient_of(parameter, dtype)
            return Sum(allocate(self.on_device, self.device, shape, dtype), adds=False)
        read = {**self.read, **written}
        shape = add_to.shape
        if alike is not None:
            shape = () if is_number(alike[1]) else alike[1].shape
            # so that it is named in the message
            read = {alike[0]: np.empty(shape) if is_number(alike[1]) else alike[1], **read}
        check_out(add_to, shape, None, read, self.on_device, name=label, may_be=())
        if alike is None:
            check_columns({label: add_to}, self.shape, f"the normalised axes of {self.name} have")
        written[label] = add_to
        return Sum(add_to, adds=True)


def _rows(
    name: str,
    x: Any,
    alike: Mapping[str, Any],
    others: Mapping[str, Any],
    columns: Collection[str],
    written: Mapping[str, Any],
    axis: Any,
    dtype: Any,
    plan: Any,
) -> _Rows:
    """Check what all of these calls have in common.

    alike: arrays of x's shape, dy among them. others: further arrays that are read, of which `columns` may be numbers.
    written: arrays that are given for results. None in any of them is no array.
    """
    check_kind("dy", alike["dy"])
    alike, others, written = (
        {key: each for key, each in named.items() if each is not None} for named in (alike, others, written)
    )
    arrays = {**alike, **others, **written}
    on_device = check_kinds(x, arrays, columns, name_of_x=name)
    check_forced(plan, name, on_device=on_device)
    for key, each in {name: x, **alike}.items():
        check_dtype(key, each)
    axes = trailing_axes(axis, x.shape, name)
    if 0 in x.shape[x.ndim - axes :]:
        raise ValueError(f"{name} has shape {x.shape}: the normalised axes are empty")
    for key, each in alike.items():
        if each.shape != x.shape:
            raise ValueError(f"{key} has shape {each.shape}, {name} has {x.shape}")
    asked = asked_dtype(dtype, None)
    device = check_places(x, arrays, name) if on_device else -1
    read = {name: x, **alike, **{key: each for key, each in others.items() if not is_number(each)}}
    return _Rows(on_device, device, name, x, axes, asked, read)


def check_norm_gradient(
    dy: Any,
    x: tuple[str, Any],
    *,
    centred: bool,
    from_y: bool = False,
    gamma: Any,
    beta: Any = None,
    mean: Any = None,
    rstd: Any,
    eps: Any = 0.0,
    axis: Any,
    out: Any,
    dtype: Any,
    add_to: Any,
    parameters: Any,
    plan: Any,
    adding: Adding | None = None,
) -> GradientCall:
    """Check a call of the gradient of a norm, and allocate its results if they were not given. x: with its name."""
    name, given = x
    if from_y and rstd is None:
        raise TypeError(
            "rstd is None: give the one that return_stats=True returns, it does not follow from y"
        )
    if centred and not from_y and (mean is None) != (rstd is None):
        missing, there = ("mean", "rstd") if mean is None else ("rstd", "mean")
        raise ValueError(f"{missing} is None and {there} is given: give both, or neither")
    computed = boolean("parameters", parameters)
    names = ["dgamma", "dbeta"] if centred else ["dgamma"]
    alike = {"dy": dy}
    columns = {"gamma": gamma, "beta": beta}
    residual_out = None
    if adding is not None:
        alike["ds"] = adding.ds
        columns["bias"] = adding.bias
        residual_out = adding.residual_out
        names.append("dbias")
    totals = _add_to(add_to, names)
    statistics = {"mean": mean, "rstd": rstd}
    written = {"out": out, "residual_out": residual_out, **dict(totals.values())}
    rows = _rows(name, given, alike, {**columns, **statistics}, columns, written, axis, dtype, plan)
    found = check_columns(
        {key: each for key, each in columns.items() if each is not None},
        rows.shape,
        f"the normalised axes of {name} have",
    )
    for key, each in statistics.items():
        if each is not None:
            _check_statistic(key, each, rows)
    exact = eps_of(eps)
    add = None
    if adding is not None:
        drop = dropout_of(adding.dropout, adding.seed, adding.offset)
        add = AddGradient(adding.ds, finite("alpha", adding.alpha), drop, None, None)
    if from_y and not rows.on_device:
        _check_no_zero(found.get("gamma"))
    found = with_arrays(
        found, given, rows.shape, (dy.dtype, rows.asked, getattr(out, "dtype", None)), rows.device
    )
    made: dict[str, Any] = {}
    known = {"dgamma": gamma, "dbeta": beta, "dbias": None if adding is None else adding.bias}
    wanted = {"dgamma": computed, "dbeta": computed, "dbias": known["dbias"] is not None}
    sums = _sums(rows, totals, known, wanted, made)
    dx = rows.result(out, "out", made, rows.asked, given.dtype)
    results: tuple[Any, ...] = (dx,)
    compute = compute_dtype(dy.dtype, given.dtype, dx.dtype)
    within(compute, alpha=None if add is None else add.alpha)
    if add is not None:
        if residual_out is not None or add.alpha != 1 or add.dropout is not None:
            dresidual = rows.result(residual_out, "residual_out", {**made, "out": dx}, None, dx.dtype)
            add = add._replace(dresidual=dresidual)
            results += (dresidual,)
        else:
            results += (dx,)
        add = add._replace(dbias=sums.get("dbias"))
    results += tuple(None if (each := sums.get(key)) is None else each.out for key in names)
    what = NormGradient(
        dy,
        given,
        rows.axes,
        centred,
        from_y,
        found.get("gamma"),
        found.get("beta"),
        mean,
        rstd,
        eps_within(compute, exact),
        dx,
        sums.get("dgamma"),
        sums.get("dbeta"),
        add,
    )
    return GradientCall(rows.on_device, rows.device, what, None, results, plan)


def _sums(
    rows: _Rows,
    totals: Mapping[str, tuple[str, Any]],
    known: Mapping[str, Any],
    wanted: Mapping[str, bool],
    made: dict[str, Any],
) -> dict[str, Sum | None]:
    """Return where the gradients of parameters go.

    totals: what each is added to, with its name. known: the parameters, as far as the call has them; without one, its
    gradient is like gamma's. made: gets those that are added to.
    """
    sums: dict[str, Sum | None] = {}
    for key, (label, total) in totals.items():
        if wanted[key]:
            exactly = None if known[key] is None else (key[1:], known[key])
            sums[key] = rows.parameter_sum(label, total, exactly, known["dgamma"], made)
        elif total is not None:
            why = "there is no bias" if key == "dbias" else "parameters is False"
            raise ValueError(f"{label} is given, and {why}: nothing is added to it")
    return sums


def check_softmax_gradient(
    function: str,
    dy: Any,
    y: Any,
    options: Mapping[str, Any],
    *,
    log: bool,
    dropout: Any = 0.0,
    seed: Any = None,
    offset: Any = 0,
    return_dbias: Any,
    axis: Any,
    out: Any,
    dtype: Any,
    add_to: Any,
    plan: Any,
) -> GradientCall:
    """Check a call of the gradient of softmax, and allocate its results if they were not given.

    options: the keywords of the mask.
    """
    asked = asked_of(function, options)
    if asked is not None:
        asked = with_lengths(asked, y, "y")
    others = {} if asked is None else asked.arrays()
    wanted = boolean("return_dbias", return_dbias)
    written = {"out": out, "add_to": add_to}
    rows = _rows("y", y, {"dy": dy}, others, (), written, axis, dtype, plan)
    mask = None if asked is None else mask_of(asked, y.shape, rows.axes, "y")
    drop = dropout_of(dropout, seed, offset)
    made: dict[str, Any] = {}
    dbias = None
    if wanted:
        if mask is None or mask.bias is None:
            raise ValueError("return_dbias is True, and there is no bias: give the bias of the forward call")
        dbias = rows.parameter_sum("add_to", add_to, ("bias", mask.bias), None, made)
    elif add_to is not None:
        raise ValueError("add_to is given, and return_dbias is False: give return_dbias=True as well")
    dx = rows.result(out, "out", made, rows.asked, y.dtype)
    within(compute_dtype(dy.dtype, y.dtype, dx.dtype), scale=None if mask is None else mask.scale)
    what = SoftmaxGradient(dy, y, rows.axes, log, drop, dx, dbias)
    results = (dx,) if dbias is None else (dx, dbias.out)
    return GradientCall(rows.on_device, rows.device, what, mask, results, plan)


def _add_to(add_to: Any, names: list[str]) -> dict[str, tuple[str, Any]]:
    """Return the array that each of these gradients is added to, None for none, with its name in messages."""
    if len(names) == 1:
        return {names[0]: ("add_to", add_to)}
    if add_to is None:
        add_to = (None,) * len(names)
    allowed = f"give a tuple of {len(names)}, ({', '.join(names)}), None where nothing is added"
    if not isinstance(add_to, (tuple, list)):
        raise TypeError(f"add_to is {shown(add_to)}: {allowed}")
    if len(add_to) != len(names):
        raise ValueError(f"add_to has {len(add_to)} entries: {allowed}")
    return {name: (f"add_to[{at}]", each) for at, (name, each) in enumerate(zip(names, add_to, strict=True))}


def _check_statistic(name: str, array: Any, rows: _Rows) -> None:
    check_dtype(name, array)
    shape = rows.x.shape[: rows.x.ndim - rows.axes]
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, {rows.name} without its normalised axes has {shape}: "
            "give what return_stats=True returns"
        )


def _check_no_zero(gamma: Any) -> None:
    """ValueError if a gamma of the host has a zero: y says nothing about x there."""
    if gamma is None:
        return
    values = np.asarray(gamma)
    if (values == 0).any():
        at = tuple(int(index) for index in np.argwhere(values == 0)[0])
        where = f" at {at}" if at else ""
        raise ValueError(
            f"gamma is 0{where}: y does not depend on x there, so x does not follow from y; "
            "give x to the function without _from_y"
        )
