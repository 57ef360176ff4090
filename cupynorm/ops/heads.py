"""add_qkv_bias, split_heads and merge_heads: between rows of hidden elements and attention's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import dtype_of
from cupynorm._options import integer, plainly
from cupynorm.call import arguments, asking
from cupynorm.host.reference import _round
from cupynorm.invoke import one_kernel, row_calls
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.lower.heads import by_heads, by_rows, move_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from cupynorm.invoke.bound_calls import Signature
    from cupynorm.invoke.shortcuts import Given

SPLIT_HEADS, MERGE_HEADS = row_calls.Named("split_heads"), row_calls.Named("merge_heads")

# How split_heads moves one row of x, with heads = 3 and head size = 2; merge_heads moves it back:
#
#   x[b, s]        a a b b c c
#   y[b, 0, s]     a a            head 0 of all tokens is contiguous, so that attention's products
#   y[b, 1, s]         b b        read [seq, head size] matrices
#   y[b, 2, s]             c c


def add_qkv_bias(qkv: Any, bias: Any = None, *, heads: int, out: Any = None, dtype: Any = None) -> Any:
    """Return queries, keys and values by heads: qkv + bias, transposed to [3, ..., heads, seq, head size].

        y[p, ..., h, s, d] = qkv[..., s, (p * heads + h) * head size + d] + bias[(p * heads + h) * head size + d]

    The step is the one that FasterTransformer 1.0 names add_QKV_bias, without its limits on hidden and head size.

    Parameters
    ----------
    qkv : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, with any strides: what one product with the three
        weights beside one another gives, [..., seq, 3 * hidden]; the queries' hidden elements, the keys', the values';
        hidden = heads * head size, any of both.
    bias : array, optional
        3 * hidden elements in that order, or broadcasting to them.
    heads : int
        How many heads there are.
    out : array, optional
        Where the result is written; it shares no memory with qkv.
    dtype : dtype, optional
        The result's; default: that of `out`, else qkv's.

    Returns
    -------
    array
        Of qkv's kind; ``q, k, v = add_qkv_bias(...)`` takes it apart. Each element is rounded once, on a device from a
        sum in float32, or float64 where an array has it.

    Raises
    ------
    TypeError
        For arrays of another kind or dtype, or of both kinds in one call.
    ValueError
        For shapes, heads or an `out` that do not fit, an `out` that shares memory with an input, or arrays of several
        devices.

    Notes
    -----
    On a device it is one launch.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import add_qkv_bias
    >>> q, k, v = add_qkv_bias(np.arange(12.0).reshape(1, 12), heads=2)
    >>> q.shape, k.tolist()
    ((2, 1, 2), [[[4.0, 5.0]], [[6.0, 7.0]]])
    """
    return _split(qkv, bias, heads, 3, "qkv", out, dtype)


def split_heads(x: Any, bias: Any = None, *, heads: int, out: Any = None, dtype: Any = None) -> Any:
    """Return x + bias by heads: [..., seq, heads * head size] becomes [..., heads, seq, head size].

        y[..., h, s, d] = x[..., s, h * head size + d] + bias[h * head size + d]

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, with any strides.
    bias : array, optional
        heads * head size elements, or broadcasting to them.
    heads, out, dtype
        As in add_qkv_bias, of which this is the form for one array.

    Returns
    -------
    array
        Of x's kind.

    Raises
    ------
    TypeError, ValueError
        As add_qkv_bias does.

    Notes
    -----
    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import split_heads
    >>> split_heads(np.arange(4.0).reshape(1, 4), heads=2).tolist()
    [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    return _split(x, bias, heads, 1, "x", out, dtype)


def merge_heads(x: Any, *, out: Any = None, dtype: Any = None) -> Any:
    """Return heads side by side again: [..., heads, seq, head size] becomes [..., seq, heads * head size].

        y[..., s, h * head size + d] = x[..., h, s, d]

    It undoes split_heads.

    Parameters
    ----------
    x : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, with any strides.
    out, dtype
        As in add_qkv_bias.

    Returns
    -------
    array
        Of x's kind.

    Raises
    ------
    TypeError, ValueError
        As add_qkv_bias does.

    Notes
    -----
    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import merge_heads
    >>> merge_heads(np.arange(4.0).reshape(2, 1, 2)).tolist()
    [[0.0, 1.0, 2.0, 3.0]]
    """
    return row_calls.run(
        MERGE_HEADS,
        x,
        None,
        None,
        -1,
        None,
        out,
        dtype,
        False,  # noqa: FBT003
        None,
        (),
        (),
        (),
        _merge_checked,
    )


def _merge_checked(given: Given, signature: Signature | None) -> Any:
    """Run a call of merge_heads with all checks; keep it."""
    x, out, dtype = given.x, given.out, given.dtype
    on_device = _check("x", x, None, out)
    if x.ndim < 3:  # noqa: PLR2004  heads, seq, head size
        raise ValueError(f"x has shape {x.shape}: its last three axes must be heads, seq and head size")
    *leading, heads, seq, size = x.shape
    y = _output("x", x, None, (*leading, seq, heads * size), out, dtype)

    def spec() -> KernelSpec:
        source, target = arguments.view(x, "x"), arguments.view(y, "out")
        return move_spec(by_heads(source, 1), by_rows(target, 1, heads), None)

    if not on_device:
        asking.answer(spec)
        _write(x.swapaxes(-3, -2), None, y.reshape(*leading, seq, heads, size))
    elif x.size:
        _launch(spec(), given, y, signature)
    return y


def _split(x: Any, bias: Any, heads: int, parts: int, name: str, out: Any, dtype: Any) -> Any:
    options_key = (parts, heads, type(heads))
    return row_calls.run(
        SPLIT_HEADS,
        x,
        bias,
        None,
        -1,
        None,
        out,
        dtype,
        False,  # noqa: FBT003
        None,
        options_key,
        (),
        (),
        _split_checked,
        name,
    )


def _split_checked(given: Given, signature: Signature | None) -> Any:
    """Run a call of add_qkv_bias or split_heads with all checks; keep it. given.unchecked: what x is called there."""
    x, bias, out, dtype, name = given.x, given.gamma, given.out, given.dtype, given.unchecked
    parts, heads, _ = given.options_key
    on_device = _check(name, x, bias, out)
    if x.ndim < 2:  # noqa: PLR2004  seq, hidden
        raise ValueError(f"{name} has shape {x.shape}: its last two axes must be seq and hidden elements")
    count = integer("heads", heads)
    *leading, seq, columns = x.shape
    if count < 1:
        raise ValueError(f"heads is {plainly(count)}: give an integer of 1 or more")
    if columns % (parts * count):
        each = f"{parts} * {plainly(count)}" if parts > 1 else plainly(count)
        raise ValueError(
            f"heads is {plainly(count)}: the {columns} columns of {name} are no multiple of {each}"
        )
    size = columns // (parts * count)
    if bias is not None:
        asked = _dtype_of_result(out, dtype)
        bias = arguments.column(bias, x, asked, f"the last axis of {name} has")
        if on_device and arguments.is_number(given.gamma):
            return _split(x, bias, heads, parts, name, out, dtype)
    parted = (parts,) if parts > 1 else ()
    y = _output(name, x, bias, (*parted, *leading, count, seq, size), out, dtype)

    def spec() -> KernelSpec:
        source, target = arguments.view(x, "x"), arguments.view(y, "out")
        shift = None if bias is None else arguments.view(bias, "bias")
        return move_spec(by_rows(source, parts, count), by_heads(target, parts), shift)

    if on_device:
        if x.size:
            _launch(spec(), given, y, signature)
        return y
    asking.answer(spec)
    target = y if parted else y[np.newaxis]
    for part in range(parts):
        columns_of_part = slice(part * count * size, (part + 1) * count * size)
        source = x[..., columns_of_part].reshape(*leading, seq, count, size).swapaxes(-3, -2)
        shift = bias
        if bias is not None and bias.shape == (columns,):
            shift = bias[columns_of_part].reshape(count, 1, size)
        _write(source, shift, target[part])
    return y


def _launch(spec: KernelSpec, given: Given, y: Any, signature: Signature | None) -> None:
    """Launch a checked move that has elements, and keep it."""
    arrays = {"x": given.x, "bias": given.gamma, "beta": None, "out": given.out}
    made = {"out": y} if given.out is None else {}
    bound = one_kernel.launch(int(y.device.id), spec, Arrays(arrays, ("out",), made))
    given.keep(signature, bound, made)


def _check(name: str, x: Any, bias: Any, out: Any) -> bool:
    """Return whether the arrays are on a device; raise for other kinds, dtypes and places than can be computed."""
    arrays = {"bias": None if arguments.is_number(bias) else bias, "out": out}
    on_device = arguments.check_kinds(x, arrays, name_of_x=name, advice="")
    for other, array in {name: x, **arrays}.items():
        if array is not None:
            arguments.check_dtype(other, array)
    if on_device:
        arguments.check_places(x, arrays, name)
    return on_device


def _dtype_of_result(out: Any, dtype: Any) -> Any:
    """Return what `out` or `dtype` say of the result's dtype; None for x's."""
    if out is not None:
        return out.dtype
    return None if dtype is None else dtype_of(dtype)


def _output(name: str, x: Any, bias: Any, shape: tuple[int, ...], out: Any, dtype: Any) -> Any:
    """Return `out` if it fits, else a new array."""
    asked = None if dtype is None else dtype_of(dtype)
    on_device = devices.is_device_array(x)
    if out is None:
        return arguments.allocate(on_device, int(x.device.id) if on_device else -1, shape, asked or x.dtype)
    arguments.check_result(out, shape, asked, on_device)
    if not out.flags.c_contiguous:
        raise ValueError(f"out has shape {out.shape} and strides {out.strides}: it must be contiguous")
    read = {other: arguments.view(array) for other, array in ((name, x), ("bias", bias)) if array is not None}
    shared = arguments.sharing(arguments.view(out), read)
    if shared is not None:
        raise ValueError(f"out and {shared} share memory: elements move, so give other memory")
    return out


def _write(source: Any, shift: Any, target: Any) -> None:
    """Write source + shift to target, rounded once; the shapes are the target's, and the shift broadcasts."""
    if shift is None and source.dtype == target.dtype:
        target[...] = source
        return
    # one float32 sum is rounded once; others are made in float64, and what counts is the rounding to the target's dtype
    plain = target.dtype == source.dtype == np.float32 and (shift is None or shift.dtype == np.float32)
    compute = np.dtype(np.float32 if plain else np.float64)
    total = source.astype(compute, copy=False)
    if shift is not None:
        total = total + shift.astype(compute, copy=False)
    target[...] = _round(total, target.dtype)
