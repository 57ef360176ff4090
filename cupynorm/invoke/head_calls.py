"""Moves between rows and attention's heads on a device: their launch, and calls that a thread has made before."""

from __future__ import annotations

import array
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm.call.arguments import view
from cupynorm.call.view import View
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import ALIGNMENT, _extent, add, code_of, elsewhere, parameters_of, word_of
from cupynorm.lower.heads import Places, by_heads, by_rows, move_spec
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from cupynorm.runtime.compiler import Kernel


class Again(NamedTuple):
    """A call that was checked and launched: it may be made again with other pointers."""

    kernel: Kernel  # stays loaded
    words: array.array[int]
    parameters: array.array[int]
    launches: devices.Launches
    bias_at: int
    shape: tuple[int, ...]
    code: Any
    bytes: int  # of the result
    reach: tuple[tuple[int, int], ...]  # of x and bias: their lowest byte, and the one behind their highest


def key_of(
    what: Any, x: Any, bias: Any, heads: int, out: Any, dtype: Any, rows: Any = None
) -> tuple[Any, ...] | None:
    """Return all that the checks and the choice of a kernel look at, but for shared memory; None for what is not remembered."""
    calls = row_ops._thread.calls  # noqa: SLF001
    kind = calls.kind
    if kind is None and devices.is_device_array(x):
        kind = calls.begin()
    if type(x) is not kind or type(heads) is not int:
        return None
    # _c_contiguous, where true, says all that strides say, for a third of the time; num, of a CuPy array, all that dtype says
    key: tuple[Any, ...] = (
        what,
        heads,
        x.shape,
        x._c_contiguous or x.strides,  # noqa: SLF001
        x.dtype.num,
        x.data.ptr & ALIGNMENT,
        dtype,
    )
    if bias is not None:
        if type(bias) is not kind:
            return None
        strides = bias._c_contiguous or bias.strides  # noqa: SLF001
        key += (bias.shape, strides, bias.dtype.num, bias.data.ptr & ALIGNMENT)
    if out is not None:
        if type(out) is not kind or not out._c_contiguous:  # noqa: SLF001
            return None
        key += (None, out.shape, out.dtype.num, out.data.ptr & ALIGNMENT)
    if rows is not None:
        key += (None, None, rows.shape)
    if calls.several:
        device = x.data.device_id
        if elsewhere(device, bias, out, rows):
            return None
        key += (device,)
    return key


def again(key: tuple[Any, ...], x: Any, bias: Any, out: Any, rows: Any = None) -> Any:
    """Make a remembered call; None if there is none, or its arrays must be looked at more closely."""
    calls = row_ops._thread.calls  # noqa: SLF001
    try:
        call: Again | None = calls.heads.get(key)
    except TypeError:  # a dtype that does not hash
        return None
    if call is None:
        return None
    y = calls.kind(call.shape, call.code) if out is None else out
    source, target = x.data.ptr, y.data.ptr
    shift = 0 if bias is None else bias.data.ptr
    if out is None:
        if target & ALIGNMENT:
            return None
    else:
        for pointer, (low, high) in zip((source, shift), call.reach, strict=False):
            if pointer + low < target + call.bytes and target < pointer + high:
                return None
    numbers = 0 if rows is None else rows.data.ptr
    words, launch = call.words, call.launches[calls.stream(x.data.device_id).ptr]
    # from the first word to the launch: no call, loop or branch (devices.launch_of)
    if bias is None:
        words[0] = source
        words[1] = target
        words[2] = numbers
        status = launch()
    else:
        words[0] = source
        words[1] = target
        words[2] = numbers
        words[call.bias_at] = shift
        status = launch()
    if status:
        raise devices.launch_error(status)
    return y


def launch(
    source: Places, target: Places, bias: View | None, y: Any, key: tuple[Any, ...] | None, rows: Any = None
) -> None:
    """Launch a checked move that has elements, on y's device and that device's current stream; remember it under `key`."""
    module = devices.cupy()
    spec = move_spec(source, target, bias, 0 if rows is None else rows.data.ptr)
    device, calls = int(y.device.id), row_ops.calls_of_thread()
    with module.cuda.Device(device):
        calls.prepare(device)
        plan = spec.problem.plan(devices.limits_of(device))
        kernel = compiler.kernel(device, spec.text, spec.expression(plan), 0)
        words = array.array("Q", np.array([spec.params.values], dtype=spec.params.dtype).tobytes())
        bind = devices.launch_of(kernel.pointer, plan.grid, (*plan.block, 1), 0)
        call = Again(
            kernel=kernel,
            **parameters_of(words, bind),
            bias_at=word_of(spec.params.dtype, "bias", "pointer"),
            shape=target.array.shape,
            code=code_of(target.array.dtype),
            bytes=math.prod(target.array.shape) * target.array.dtype.itemsize,
            reach=tuple(
                _extent(each.shape, each.strides, each.dtype) for each in (source.array, bias) if each
            ),
        )
        call.launches.once()
    if key is not None:
        try:
            hash(key)
        except TypeError:
            return
        add(calls.heads, key, call)


# What the encoder does with packed tokens: rows says, for each token of the result, which of x's it is; below 0 none, and the
# result is 0 there. Arguments are checked by nobody.


def gather(x: Any, rows: Any, out: Any) -> Any:
    """Write x[rows] to out, or x itself where rows is None: rows of hidden states, whatever the axes before the last."""
    key = key_of("gather", x, None, 1, out, None, rows)
    if key is None or again(key, x, None, out, rows) is None:
        launch(by_rows(view(x), 1, 1), by_rows(view(out), 1, 1), None, out, key, rows)
    return out


def split_packed(qkv: Any, bias: Any, rows: Any, heads: int, out: Any) -> Any:
    """Write add_qkv_bias of packed tokens to out, [3, batch, heads, seq, head size]."""
    launch(by_rows(view(qkv), 3, heads), by_heads(view(out), 3), view(bias), out, None, rows)
    return out


def merge_packed(x: Any, rows: Any, out: Any) -> Any:
    """Write merge_heads of [batch, heads, seq, head size] to packed tokens; rows count batch * seq."""
    launch(by_heads(view(x), 1), by_rows(view(out), 1, x.shape[-3]), None, out, None, rows)
    return out
