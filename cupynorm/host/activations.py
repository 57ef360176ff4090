"""Activations, their gates and their gradients on NumPy arrays, in the type of arithmetic, in blocks of rows.

float32 where neither an array nor the result is float64; then reference.py and elementwise_gradients.py have the
formulas, which compute what float32 cannot compute as exactly as promised, too. The gradients of SiLU are exact enough
in either type. Nothing is checked here; floating warnings are off. A result may be one of the arrays that are read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import FLOAT32, FLOAT64
from cupynorm.host import elementwise_gradients, reference
from cupynorm.host.blocks import each_block
from cupynorm.host.conversions import FEW
from cupynorm.host.ops import type_of_arithmetic
from cupynorm.host.reference import ACTIVATIONS
from cupynorm.host.row_sums import row_sums
from cupynorm.host.rows import Rows, columns_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynorm.host.broadcast_sums import BroadcastSum
    from cupynorm.host.reference import Index
    from cupynorm.host.space import Space

Array = np.ndarray[Any, Any]

# Phi(-a) / exp(-a^2 / 2) of t = 1 / (1 + a / 4), highest power first, to 2e-8 up to a = 4, where Phi is normal.
_TAIL = (-0.09041312, 0.33253291, -0.24005261, 0.2395089, 0.06161687, 0.09345408, 0.10393027, -0.00057725911)
_TANH = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
# Below, an activation in float32 has a relative error of 1.5e-6 and more: the exponent's rounding is multiplied by it.
_LEAST = {"gelu": -3.5, "gelu_tanh": -3.0, "silu": -10.0}
_MOST = 1e18  # beyond, squares and products may overflow
# A row's root mean square is part of its bound. If it is at least so large, relative to that of the row's factors, the
# errors of such elements stay within the bound.
_ENOUGH = 0.004
_NARROW = 16  # columns up to which each element is looked at in place of each row
_FLAT = {"gelu": 8.0, "gelu_tanh": 8.0, "silu": 60.0}  # beyond, slopes are 0 or 1 to the last bit
_FLAT64 = 700.0  # the same of SiLU in float64, where exp() does not overflow yet


def bias_activation(x: Array, bias: Array | None, name: str, out: Array, axes: int = 1) -> None:
    """Write activation(x + bias) to out, as reference.bias_activation does, which has biases of several axes."""
    dtype = type_of_arithmetic(x, out)
    if dtype == FLOAT64 or axes > 1:
        reference.bias_activation(x, bias, name, out, axes)
    else:
        _activate(x, bias, None, None, name, out, dtype)


def gated(
    gate: Array, gate_bias: Array | None, value: Array, value_bias: Array | None, name: str, out: Array
) -> None:
    """Write activation(gate + gate_bias) * (value + value_bias) to out, as reference.gated does."""
    dtype = type_of_arithmetic(gate, out)
    if dtype == FLOAT64:
        reference.gated(gate, gate_bias, value, value_bias, name, out)
    else:
        _activate(gate, gate_bias, value, value_bias, name, out, dtype)


def _activate(
    x: Array,
    bias: Array | None,
    value: Array | None,
    value_bias: Array | None,
    name: str,
    out: Array,
    dtype: np.dtype[Any],
) -> None:
    shift, value_shift = (columns_of(each, x.shape, 1, dtype) for each in (bias, value_bias))

    def work(rows: Rows) -> None:
        values = None if value is None else beside(rows, value, "value")

        def step(given: Array, out: Array, piece: Index) -> None:
            z = _shifted(rows, given, shift, piece, out)
            at = _outside(name, z) if z.shape[1] <= _NARROW else None
            _ACTIVATIONS[name](z, out, rows.space)
            factor = None
            if values is not None:
                factor = values.source(piece)
                room = values.space.take("shifted", *factor.shape)
                factor = _shifted(values, factor, value_shift, piece, room)
                np.multiply(out, factor, out=out)
            if out.shape[1] > _NARROW:
                at = _inexact(name, rows, shift, piece, out, factor)
            if at is not None:
                exact = ACTIVATIONS[name](_exactly(rows, shift, piece, at))
                out[at] = exact if values is None else exact * _exactly(values, value_shift, piece, at)

        rows.then(step)
        rows.store(out)

    each_block(x, 1, dtype, work, out, (value, bias, value_bias))


def beside(rows: Rows, array: Array, name: str) -> Rows:
    """Return the same rows of another array of x's shape."""
    space = rows.space
    return Rows(array, rows.at, rows.pieces, rows.axes, space.other(name, space.dtype), None)


def _shifted(rows: Rows, values: Array, shift: Array | None, piece: Index, room: Array) -> Array:
    """Return values, or values + shift in `room`."""
    if shift is None:
        return values
    rows.step_columns(np.add, values, rows.columns(shift, piece), room)
    return room


def _exactly(rows: Rows, shift: Array | None, piece: Index, at: tuple[Array, Array]) -> Array:
    """Return some elements of x + shift in float64."""
    found: Array = rows.source(piece)[at].astype(np.float64)
    return found if shift is None else found + rows.columns(shift, piece)[at[1]]


def _outside(name: str, z: Array) -> tuple[Array, Array] | None:
    """Return where the activation of z is less exact than promised; None: nowhere."""
    least, most = z.dtype.type(_LEAST[name]), z.dtype.type(_MOST)
    if np.minimum.reduce(z, axis=None) >= least and np.maximum.reduce(z, axis=None) <= most:
        return None
    row, column = np.nonzero(~((z >= least) & (z <= most)))
    return row, column


def _inexact(
    name: str, rows: Rows, shift: Array | None, piece: Index, out: Array, factor: Array | None
) -> tuple[Array, Array] | None:
    """Return likewise where elements of the result are, in rows whose other elements do not outweigh them."""
    count, cols = out.shape
    size = row_sums(out, out)
    least = _ENOUGH**2 * cols * (1.0 if factor is None else row_sums(factor, factor))
    good = (size >= least) & (size <= _MOST**2)
    if np.count_nonzero(good) == count:
        return None
    bad = np.flatnonzero(~good)
    source = rows.source(piece)
    found = _outside(name, _shifted(rows, source[bad], shift, piece, np.empty((len(bad), cols), out.dtype)))
    return None if found is None else (bad[found[0]], found[1])


def _polynomial(t: Array, coefficients: tuple[float, ...], out: Array) -> None:
    """Write a polynomial, highest power first, of two coefficients at least."""
    first, second, *others = (t.dtype.type(each) for each in coefficients)
    np.multiply(t, first, out=out)
    np.add(out, second, out=out)
    for each in others:
        np.multiply(out, t, out=out)
        np.add(out, each, out=out)


def _tail(z: Array, space: Space, density: Array | None = None) -> Array:
    """Return Phi(-|z|), and write exp(-z^2 / 2) to density."""
    one = z.dtype.type(1)
    t, found = (space.take(name, *z.shape) for name in ("t", "tail"))
    np.abs(z, out=t)
    np.multiply(t, z.dtype.type(0.25), out=t)
    np.add(t, one, out=t)
    np.divide(one, t, out=t)
    _polynomial(t, _TAIL, found)
    power = t if density is None else density
    np.multiply(z, z, out=power)
    np.multiply(power, z.dtype.type(-0.5), out=power)
    np.exp(power, out=power)
    np.multiply(found, power, out=found)
    return found


def _gelu(z: Array, out: Array, space: Space) -> None:
    """Write z * Phi(z) as max(z, 0) - |z| * Phi(-|z|), where nothing cancels."""
    tail = _tail(z, space)
    size = np.abs(z, out=space.take("t", *z.shape))
    np.multiply(tail, size, out=tail)
    np.add(size, z, out=size)
    np.multiply(size, z.dtype.type(0.5), out=size)
    np.subtract(size, tail, out=out)


def _power(name: str, z: Array, space: Space) -> Array:
    """Return exp(-u), where z / (1 + exp(-u)) is the activation."""
    power = space.take("power", *z.shape)
    if name == "silu":
        np.negative(z, out=power)
    else:
        np.multiply(z, z, out=power)
        np.multiply(power, z.dtype.type(-_TANH[1]), out=power)
        np.subtract(power, z.dtype.type(_TANH[0]), out=power)
        np.multiply(power, z, out=power)
    np.exp(power, out=power)
    return power


def _logistic(name: str) -> Callable[[Array, Array, Space], None]:
    def activate(z: Array, out: Array, space: Space) -> None:
        power = _power(name, z, space)
        np.add(power, z.dtype.type(1), out=power)
        np.divide(z, power, out=out)

    return activate


_ACTIVATIONS = {"gelu": _gelu, "gelu_tanh": _logistic("gelu_tanh"), "silu": _logistic("silu")}


def bias_activation_backward(
    dy: Array,
    x: Array,
    bias: Array | None,
    name: str,
    dx: Array,
    dbias: BroadcastSum | None,
    *,
    axes: int = 1,
) -> None:
    """Write dy * activation'(x + bias) to dx, and add it to dbias. The bias lies along the last `axes` axes."""
    dtype = type_of_arithmetic(dy, x, dx)
    if axes > 1 or (dtype == FLOAT64 and name != "silu"):
        elementwise_gradients.bias_activation(dy, x, bias, name, dx, dbias, axes=axes)
        return
    shift = columns_of(bias, x.shape, 1, dtype)

    def work(rows: Rows) -> None:
        slope = beside(rows, dy, "slope")

        def step(given: Array, out: Array, piece: Index) -> None:
            z = _shifted(rows, given, shift, piece, out)
            _SLOPES[name](z, out, None, rows.space)
            np.multiply(out, slope.source(piece), out=out)

        rows.then(step)
        if dbias is not None:
            for piece, values in rows.each():
                _add(dbias, rows, x.shape, values, piece)
        rows.store(dx)

    each_block(x, 1, dtype, work, dx, (dy, bias), in_order=dbias is not None)


def gated_backward(
    dy: Array,
    x: Array,
    bias: Array | None,
    name: str,
    dx: Array,
    dbias: BroadcastSum | None,
    *,
    gate_first: bool,
) -> None:
    """Write the gradient of activation(a) * b to dx, and add it to dbias.

    a is the gate and b the other half of x + bias: a's gradient is dy * b * activation'(a), b's dy * activation(a).
    """
    dtype = type_of_arithmetic(dy, x, dx)
    if dtype == FLOAT64 and name != "silu":
        elementwise_gradients.gated(dy, x, bias, name, dx, dbias, gate_first=gate_first)
        return
    cols = dy.shape[-1]
    shift = None if bias is None else np.broadcast_to(bias, x.shape[-1:])
    halves = (np.s_[:cols], np.s_[cols:]) if gate_first else (np.s_[cols:], np.s_[:cols])
    shifts = [None if shift is None else columns_of(shift[half], dy.shape, 1, dtype) for half in halves]

    def work(rows: Rows) -> None:
        gate, value = (
            beside(rows, x[..., half], kind) for half, kind in zip(halves, ("gate", "value"), strict=True)
        )
        for piece in rows.pieces:
            given = rows.source(piece)
            a, b = (
                _shifted(each, each.source(piece), own, piece, each.space.take("shifted", *given.shape))
                for each, own in zip((gate, value), shifts, strict=True)
            )
            of_gate, of_value = (each.space.take("target", *given.shape) for each in (gate, value))
            _SLOPES[name](a, of_gate, of_value, rows.space)
            for each in (of_gate, of_value):
                np.multiply(each, given, out=each)
            np.multiply(of_gate, b, out=of_gate)
            for half, values in zip(halves, (of_gate, of_value), strict=True):
                rows.write(dx[..., half], piece, values)
            if dbias is not None:
                _add_halves(
                    dbias, rows, x.shape, (of_gate, of_value) if gate_first else (of_value, of_gate), piece
                )

    each_block(dy, 1, dtype, work, None, in_order=dbias is not None)


def _add(
    total: BroadcastSum, rows: Rows, shape: tuple[int, ...], values: Array, piece: Index, begin: int = 0
) -> None:
    """Add a piece of an array of this shape, or of its columns from `begin` on, to a sum."""
    first = begin + (piece[-1].start or 0)
    columns = slice(first, first + values.shape[1])
    tile = (*rows.at, *(slice(None),) * (len(shape) - len(rows.at) - 1), columns)
    total.add(values.reshape(*rows.extents, values.shape[1]), tile, rows.space)


def _add_halves(
    total: BroadcastSum, rows: Rows, shape: tuple[int, ...], halves: tuple[Array, Array], piece: Index
) -> None:
    """Add a piece of both halves of x."""
    if rows.whole and (total.sums_columns or halves[0].size <= FEW):  # it takes one row after another
        _add(total, rows, shape, np.concatenate(halves, axis=1), piece)
        return
    for begin, values in zip((0, shape[-1] // 2), halves, strict=True):
        _add(total, rows, shape, values, piece, begin)


def _gelu_slope(z: Array, out: Array, activation: Array | None, space: Space) -> None:
    """Write Phi(z) + z * phi(z), and z * Phi(z) to `activation`; phi is the normal distribution's density.

    It is 1/2 more than an odd function, of which |z| is the argument here.
    """
    half, density = z.dtype.type(0.5), space.take("power", *z.shape)
    tail = _tail(z, space, density)
    size = np.abs(z, out=space.take("t", *z.shape))
    if activation is not None:
        np.add(size, z, out=activation)
        np.multiply(activation, half, out=activation)
        np.subtract(activation, np.multiply(tail, size, out=space.take("product", *z.shape)), out=activation)
    np.multiply(size, density, out=size)
    np.multiply(size, z.dtype.type(1 / math.sqrt(2 * math.pi)), out=size)
    np.subtract(tail, size, out=tail)
    np.subtract(half, tail, out=tail)
    signs, bits = size.view(np.uint32), tail.view(np.uint32)
    np.bitwise_and(z.view(np.uint32), 0x80000000, out=signs)
    np.bitwise_xor(bits, signs, out=out.view(np.uint32))
    np.add(out, half, out=out)


def _logistic_slope(name: str) -> Callable[[Array, Array, Array | None, Space], None]:
    def slope(z: Array, out: Array, activation: Array | None, space: Space) -> None:
        """Write s + z * s * (1 - s) * u' with s = 1 / (1 + exp(-u)), and z * s to `activation`."""
        one, flat = z.dtype.type(1), z.dtype.type(_FLAT[name] if z.dtype == FLOAT32 else _FLAT64)
        # in SiLU's slope, exp(-z) vanishes by itself beyond, and where z is infinite there is a nan
        highest = None if name == "silu" else flat
        least = np.minimum.reduce(z, axis=None)
        most = flat if highest is None else np.maximum.reduce(z, axis=None)
        near = z
        if not (least >= -flat and most <= flat):
            near = np.clip(z, -flat, highest, out=space.take("near", *z.shape))
        power = _power(name, near, space)
        s = np.add(power, one, out=space.take("s", *z.shape))
        np.divide(one, s, out=s)
        np.multiply(power, s, out=power)
        np.multiply(power, near, out=power)
        if name == "gelu_tanh":
            inner = np.multiply(near, near, out=space.take("t", *z.shape))
            np.multiply(inner, z.dtype.type(3 * _TANH[1]), out=inner)
            np.add(inner, z.dtype.type(_TANH[0]), out=inner)
            np.multiply(power, inner, out=power)
        np.add(power, one, out=power)
        if activation is not None:
            np.multiply(z, s, out=activation)
        infinite = None if np.isfinite(least) and np.isfinite(most) else np.isinf(z)
        np.multiply(power, s, out=out)
        if infinite is not None:
            np.copyto(out, np.nan, where=infinite)

    return slope


_SLOPES = {"gelu": _gelu_slope, "gelu_tanh": _logistic_slope("gelu_tanh"), "silu": _logistic_slope("silu")}
