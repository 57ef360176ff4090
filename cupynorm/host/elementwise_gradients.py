"""Gradients of activations on NumPy arrays: float64 arithmetic in blocks, each result rounded once.

Nothing is checked here; floating warnings are off. dx may be dy or x itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupynorm.host import reference, special
from cupynorm.host.broadcast_sums import BroadcastSum
from cupynorm.host.reference import ACTIVATIONS, _columns, _round, _tiles

Array = np.ndarray[Any, Any]


@np.errstate(all="ignore")
def bias_activation(
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
    shift = _columns(bias, x.shape, axes)
    for tile in _tiles(x.shape, reference.BLOCK):
        shifted = _shifted(x, shift, _of_all(tile, x.ndim), axes)
        values = dy[tile].astype(np.float64) * DERIVATIVES[name](shifted)
        dx[tile] = _round(values, dx.dtype)
        if dbias is not None:
            dbias.add(values, tile)


@np.errstate(all="ignore")
def gated(
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
    cols = dy.shape[-1]
    shift = _columns(bias, x.shape, 1)
    for rows_and_columns in _tiles(dy.shape, reference.BLOCK):
        *rows, columns = rows_and_columns
        first, stop, _ = columns.indices(cols)
        tiles = [(*rows, slice(first, stop)), (*rows, slice(cols + first, cols + stop))]
        given = dy[rows_and_columns].astype(np.float64)
        a, b = (_shifted(x, shift, tile) for tile in (tiles if gate_first else tiles[::-1]))
        slopes = [given * b * DERIVATIVES[name](a), given * ACTIVATIONS[name](a)]
        slopes = slopes if gate_first else slopes[::-1]
        for tile, values in zip(tiles, slopes, strict=True):
            dx[tile] = _round(values, dx.dtype)
        if dbias is None:
            continue
        if stop - first == cols:  # a sum over the columns, too, takes one row after another
            tiles, slopes = [(*rows, slice(None))], [np.concatenate(slopes, axis=-1)]
        for tile, values in zip(tiles, slopes, strict=True):
            dbias.add(values, tile)


def _of_all(tile: tuple[slice, ...], axes: int) -> tuple[slice, ...]:
    """Return the slices of all axes."""
    return (*tile, *(slice(None),) * (axes - len(tile)))


def _shifted(x: Array, shift: Array | None, tile: tuple[slice, ...], axes: int = 1) -> Array:
    """Return a tile of x + shift in float64. tile: the slices of all axes, of which shift has the last `axes`."""
    values: Array = x[tile].astype(np.float64)
    return values if shift is None else values + shift[tile[-axes:]].astype(np.float64, copy=False)


def _gelu_slope(x: Array) -> Array:
    """Return Phi(x) + x * phi(x), where phi is the normal distribution's density."""
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return np.asarray(0.5 * special.erfc(x * -math.sqrt(0.5)) + x * density)


def _gelu_tanh_slope(x: Array) -> Array:
    """Return s + x * s * (1 - s) * u' with s = 1 / (1 + exp(-u)) and u = 2 * sqrt(2 / pi) * (x + 0.044715 x^3)."""
    scale = 2 * math.sqrt(2 / math.pi)
    # beyond, s is 0 or 1 to the last bit, and u' might overflow
    inner = np.clip(x, -1e3, 1e3)
    exponent = scale * (inner + 0.044715 * inner * inner * inner)
    left, right = 1 / (1 + np.exp(-exponent)), 1 / (1 + np.exp(exponent))
    return np.asarray(left + x * (left * right * (scale * (1 + 3 * 0.044715 * inner * inner))))


def _silu_slope(x: Array) -> Array:
    """Return s + x * s * (1 - s) with s = 1 / (1 + exp(-x))."""
    left, right = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(x))
    return np.asarray(left + x * (left * right))


DERIVATIVES = {"gelu": _gelu_slope, "gelu_tanh": _gelu_tanh_slope, "silu": _silu_slope}  # of ACTIVATIONS
