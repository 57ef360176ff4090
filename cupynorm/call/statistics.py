"""Checks of a call of a statistic op, such as standardize or moments: from a user's arrays to a checked call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, dtype_of
from cupynorm._options import boolean, finite, shown
from cupynorm._values import NamedTuple
from cupynorm.call.arguments import (
    check,
    check_forced,
    check_input,
    check_kinds,
    check_out,
    check_places,
    sharing,
    trailing_axes,
    view,
)
from cupynorm.call.losses import _result
from cupynorm.call.masks import Asked, Mask, _check_broadcast, mask_of, with_lengths
from cupynorm.call.missing import OMIT, PROPAGATE, RAISE, nan_policy
from cupynorm.host.keeping import ALL, Keeping
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupynorm.plan.config import Plan

# Which elements count: all, those that no mask drops, those that are not nan either, or as often as their weights say
# (Keeping in kernels/ops/keeping.cuh).
ALL_COUNT, MARKED_COUNT, NUMBERS_COUNT, WEIGHTS_COUNT = range(4)


class Missing(NamedTuple):
    """The keywords of a call that say which elements count, as the caller gave them."""

    where: Any = None
    lengths: Any = None
    left_padded: Any = False
    weights: Any = None
    nan: Any = PROPAGATE


class StatisticCall(NamedTuple):
    """A checked call of a statistic op.

    out: the result of x's shape; None where there is none. rows: results with one number a row, by name; each has as
    many elements as there are rows. mask, weights, nan: which elements count. numbers: what else the op is given.
    plan: the one that the caller asks for, where the kernels of a call depend on it.
    """

    on_device: bool
    device: int  # -1 on the host
    x: Any
    axes: int  # trailing axes that a row has
    out: Any
    rows: Mapping[str, Any]
    mask: Mask | None
    weights: Any
    nan: str
    compute: Dtype
    numbers: tuple[float, ...]
    plan: str | Plan | None = None

    @property
    def counts(self) -> int:
        """Which elements count: one of the constants above."""
        if self.weights is not None:
            return WEIGHTS_COUNT
        if self.nan == OMIT:
            return NUMBERS_COUNT
        return ALL_COUNT if self.mask is None else MARKED_COUNT

    @property
    def results(self) -> tuple[Any, ...]:
        """What the function returns."""
        return (*(() if self.out is None else (self.out,)), *self.rows.values())

    def keeping(self) -> Keeping:
        """Return which elements count, for NumPy arrays."""
        if self.counts == ALL_COUNT and self.nan == PROPAGATE:
            return ALL
        weights = None if self.weights is None else np.broadcast_to(self.weights, self.x.shape)
        return Keeping(
            None if self.mask is None else self.mask.on_host(),
            weights,
            omit=self.nan == OMIT,
            refuse=self.nan == RAISE,
        )


def number(name: str, value: Any) -> float:
    """Return a finite number as a float."""
    return finite(name, value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value)


def check_elements_result(
    x: Any,
    missing: Missing,
    *,
    axis: Any,
    rows: Sequence[str],
    out: Any,
    dtype: Any,
    plan: Any,
    numbers: tuple[float, ...] = (),
) -> StatisticCall:
    """Check a call whose result has x's shape, and allocate what it writes. rows: the further results, one a row."""
    asked, nan, others = _asked(x, missing)
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan, others=others, may_be=("x",))
    mask = _checked_missing(asked, missing, x, call.axes, on_device=call.on_device)
    made = {name: call.empty_statistic() for name in rows}
    return StatisticCall(
        call.on_device,
        call.device,
        x,
        call.axes,
        call.out,
        made,
        mask,
        missing.weights,
        nan,
        call.compute,
        numbers,
    )


def check_rows_results(
    x: Any,
    missing: Missing,
    *,
    axis: Any,
    rows: Sequence[str],
    keepdims: Any,
    out: Any,
    dtype: Any,
    plan: Any,
    numbers: tuple[float, ...] = (),
) -> StatisticCall:
    """Check a call whose results have one number a row, and allocate them. out: None, or a tuple of arrays."""
    asked, nan, others = _asked(x, missing)
    given = (None,) * len(rows) if out is None else out
    allowed = f"give a tuple of {len(rows)}, ({', '.join(rows)}), None where one is to be allocated"
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"out is {shown(out)}: {allowed}")
    if len(given) != len(rows):
        raise ValueError(f"out has {len(given)} entries: {allowed}")
    outs = {f"out of {name}": each for name, each in zip(rows, given, strict=True)}
    on_device = check_kinds(x, {**outs, **others})
    check_forced(plan, "x", on_device=on_device)
    check_input("x", x, on_device=on_device)
    axes = trailing_axes(axis, x.shape)
    at = x.ndim - axes
    if 0 in x.shape[at:]:
        raise ValueError(f"x has shape {x.shape}: the reduced axes are empty")
    wanted = None if dtype is None else dtype_of(dtype)
    shape = x.shape[:at] + (1,) * (axes if boolean("keepdims", keepdims) else 0)
    device = check_places(x, {**outs, **others}) if on_device else -1
    mask = _checked_missing(asked, missing, x, axes, on_device=on_device)
    read, made = {"x": x, **others}, dict[str, Any]()
    for name, each in zip(rows, given, strict=True):
        if each is not None:
            check_out(each, shape, wanted, read, on_device, name=f"out of {name}", may_be=())
            written = {f"out of {other}": view(array) for other, array in made.items()}
            shared = sharing(view(each), written) if each.size else None
            if shared is not None:
                raise ValueError(f"out of {name} and {shared} share memory")
        made[name] = each if each is not None else _result(None, shape, wanted, read, on_device, device)
    compute = compute_dtype(x.dtype, *(each.dtype for each in made.values()))
    return StatisticCall(on_device, device, x, axes, None, made, mask, missing.weights, nan, compute, numbers)


def _asked(x: Any, missing: Missing) -> tuple[Asked, str, dict[str, Any]]:
    """Return the keywords of the mask, with an array for a list of lengths, what becomes of nan, and the arrays."""
    nan = nan_policy(missing.nan, on_device=devices.is_device_array(x))
    asked = Asked(where=missing.where, lengths=missing.lengths, left_padded=missing.left_padded)
    asked = with_lengths(asked, x)
    return asked, nan, asked.arrays() | ({} if missing.weights is None else {"weights": missing.weights})


def _checked_missing(asked: Asked, missing: Missing, x: Any, axes: int, *, on_device: bool) -> Mask | None:
    if missing.weights is not None:
        check_input("weights", missing.weights, on_device=on_device, any_integer=True)
        _check_broadcast("weights", missing.weights, x.shape, "x")
        if not on_device:
            _check_not_negative(missing.weights)
    return None if asked.says_nothing else mask_of(asked, x.shape, axes)


def _check_not_negative(weights: Any) -> None:
    """ValueError for a negative weight of the host; on a device a look at them would wait for the device."""
    if weights.dtype.kind not in "bu" and (negative := weights < 0).any():
        raise ValueError(f"weights holds {weights[negative].flat[0]}: use numbers of 0 or more")
