"""The operands of a fusion: what they may be, and which outputs may share memory with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynorm._dtypes import Dtype
from cupynorm._options import within
from cupynorm.call.arguments import Call, check_input, check_kind, check_kinds, check_places, sharing, view
from cupynorm.invoke.fusion_calls import Operand

NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


@functools.lru_cache(maxsize=256)
def is_kind_of_number(kind: type) -> bool:
    """Say whether a type is one of NUMBERS; remembered, because asking takes longer (docs/notes/004)."""
    return issubclass(kind, NUMBERS)


def checked_operand(name: str, value: Any, call: Call) -> Operand:
    """Check one operand, and say along which axes it varies."""
    if isinstance(value, NUMBERS):
        try:
            return Operand(name, "value", None, float(value))
        except OverflowError:
            raise ValueError(f"{name} is beyond what float64 holds: give a number below 1e308") from None
    try:
        check_kind(name, value)
    except TypeError as error:
        raise TypeError(f"{error}; or a Python number") from None
    on_device = check_kinds(call.x, {name: value})
    check_input(name, value, on_device=on_device, any_integer=True)
    shape = call.x.shape
    try:
        view(value).broadcast_to(shape)
    except ValueError:
        raise ValueError(
            f"{name} has shape {value.shape}, x has {shape}: it must have that shape or broadcast to it"
        ) from None
    if on_device:
        check_places(call.x, {name: value})
    at = len(shape) - call.axes
    own = (1,) * (len(shape) - value.ndim) + value.shape
    between, within = any(extent != 1 for extent in own[:at]), any(extent != 1 for extent in own[at:])
    if value.shape == shape:
        kind = "full"  # also where x has one row: the operand then has x's shape
    else:
        kind = {(True, True): "full", (False, True): "column", (True, False): "row"}.get(
            (between, within), "scalar"
        )
    return Operand(name, kind, value)


def check_numbers(operands: Sequence[Operand], compute: Dtype) -> None:
    """ValueError for a number that the type of arithmetic does not hold."""
    for each in operands:
        if each.array is None:
            within(compute, **{each.name: each.value})


def check_memory(outs: Sequence[Any], operands: Sequence[Operand]) -> None:
    """Refuse outputs that share memory, unless one is the very view that an operand is."""
    written = [view(each) for each in outs if each.size]
    for index, each in enumerate(written):
        if sharing(each, {str(at): other for at, other in enumerate(written[:index])}) is not None:
            raise ValueError("two outputs share memory")
        for given in operands:
            if given.array is None or not given.array.size:
                continue
            if sharing(each, {given.name: view(given.array)}, {given.name}) is not None:
                raise ValueError(
                    f"an output and {given.name} share memory: give {given.name} itself if it has x's shape and dtype, "
                    "or other memory"
                )
