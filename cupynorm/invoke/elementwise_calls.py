"""Ops on each element of device arrays: from a checked call to a launch, and launching it again."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm.call.arguments import Call, view
from cupynorm.host.philox import Dropout
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import (
    ALIGNMENT,
    add,
    code_of,
    elsewhere,
    layout,
    near_of,
    parameters_of,
    word_of,
)
from cupynorm.lower.elementwise import Each, elementwise_spec, round_keys
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from cupynorm.invoke.bound_calls import Calls


@functools.lru_cache(maxsize=256)
def _threshold_and_factor(p: float, compute: str) -> array[int]:
    """Return the last two words of Drop."""
    drop = Dropout(p, 0, 0)
    factor = np.zeros(8 // np.dtype(compute).itemsize, compute)
    factor[0] = drop.factor
    return array("Q", [drop.threshold, int(factor.view(np.uint64)[0])])


@dataclasses.dataclass(slots=True, eq=False, repr=False)  # its other methods would be written at import
class Known:
    """A call that was launched: it may be launched again with other pointers, and another dropout.

    `words` are the kernel's one parameter, the rest of it as in _remembered.Remembered. drop_at: where Drop begins, -1 for none.
    """

    words: array[int]
    parameters: array[int]
    launches: devices.Launches
    x_at: int
    y_at: int
    bias_at: int
    drop_at: int
    compute: str
    shape: tuple[int, ...]
    code: Any
    bits: int  # of y's pointer
    near: tuple[int, int]  # strictly between these distances from x, y may share memory with it ...
    distance: int  # ... and here it was found that it may
    bias_near: tuple[int, int]  # and with the bias


def again(each: Each, x: Any, out: Any, dtype: Any) -> Any:
    """Do what this thread has done before to arrays that lie alike; return the result, None if there was no such call.

    Nothing is checked but what a key does not hold: that `out` shares no memory with what is read.
    """
    calls = row_ops._thread.calls  # noqa: SLF001  the thread's, and what forget() drops with all else
    if calls.kind is None and devices.is_device_array(x):
        calls.begin()
    bias, drop = each.bias, each.dropout
    key = _key(calls, each, x, out, dtype)
    try:
        found: Known | None = calls.each.get(key)
    except TypeError:  # a dtype that does not hash
        return None
    if found is None or (calls.several and elsewhere(key[0], bias, out)):
        return None
    y = calls.kind(found.shape, found.code) if out is None else out
    source, target = x.data.ptr, y.data.ptr
    low, high = found.near
    distance = target - source
    fits = target & ALIGNMENT == found.bits
    fits = fits and (out is None or not low < distance < high or distance == found.distance)
    if bias is not None:
        shift = bias.data.ptr
        low, high = found.bias_near
        fits = fits and not low < target - shift < high
    if not fits:
        return None
    words, launch = found.words, found.launches[calls.stream(key[0]).ptr]
    filled = words[:]
    filled[found.x_at] = source
    filled[found.y_at] = target
    if bias is not None:
        filled[found.bias_at] = shift
    if drop is not None:
        at = found.drop_at
        filled[at] = drop.offset
        filled[at + 1 : at + 11] = round_keys(drop.seed)
        filled[at + 11 : at + 13] = _threshold_and_factor(drop.p, found.compute)
    # from here to the launch: no call, loop or branch (devices.launch_of)
    words[:] = filled
    status = launch()
    if status:
        raise devices.launch_error(status)
    return y


def _key(calls: Calls, each: Each, x: Any, out: Any, dtype: Any) -> Any:
    """Return all that the checks and the choice of a kernel look at, but for overlaps; None for what is not remembered."""
    kind, bias = calls.kind, each.bias
    if (
        kind is None
        or type(x) is not kind
        or (bias is not None and type(bias) is not kind)
        or (out is not None and type(out) is not kind)
    ):
        return None
    # of dropout, its numbers change from call to call
    what = each.activation, each.gate
    of_bias = of_out = None
    if bias is not None:
        of_bias = bias.shape, layout(bias), bias.dtype, bias.data.ptr & ALIGNMENT
    if out is not None:
        of_out = out.shape, layout(out), out.dtype, out.data.ptr & ALIGNMENT
    device = x.data.device_id if calls.several else 0
    return device, what, x.shape, layout(x), x.dtype, x.data.ptr & ALIGNMENT, of_bias, of_out, dtype


def launch(call: Call, each: Each, out: Any, dtype: Any) -> None:
    """Launch a checked call that has elements, and remember it. out, dtype: as the caller gave them."""
    module = devices.cupy()
    calls = row_ops._thread.calls  # noqa: SLF001
    x, y = view(call.x), view(call.out)
    bias = None if each.bias is None else view(call.columns["bias"])
    spec = elementwise_spec(each, x, y, bias)
    with module.cuda.Device(call.device):
        calls.prepare(call.device)
        chosen = spec.problem.plan(devices.limits_of(call.device))
        kernel = compiler.kernel(call.device, spec.text, spec.expression(chosen), 0)
        bind = devices.launch_of(kernel.pointer, chosen.grid, (*chosen.block, 1), 0)
        struct = spec.params.dtype
        known = Known(
            **parameters_of(array("Q", np.array([spec.params.values], dtype=struct).tobytes()), bind),
            x_at=word_of(struct, "load", "pointer"),
            y_at=word_of(struct, "store", "pointer"),
            bias_at=-1 if bias is None else word_of(struct, "op", "bias", "pointer"),
            drop_at=-1 if each.dropout is None else word_of(struct, "op", "offset"),
            compute=compute_dtype(x.dtype, y.dtype).char,
            shape=y.shape,
            code=code_of(y.dtype),
            bits=y.pointer & ALIGNMENT,
            near=near_of(y, x.shape, x.strides, x.dtype),
            distance=y.pointer - x.pointer,
            bias_near=(0, 0) if bias is None else near_of(y, bias.shape, bias.strides, bias.dtype),
        )
        known.launches.once()
    key = _key(calls, each, call.x, out, dtype)
    if key is not None:
        try:
            add(calls.each, key, known)
        except TypeError:  # a dtype that does not hash
            return
