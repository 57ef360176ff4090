"""The ops on NumPy arrays: float64 arithmetic in blocks that fit into a cache, each result rounded once.

x and out have one shape and any strides; the last `axes` axes are normalised. gamma and beta broadcast to them, mean
and rstd have x's shape without them. out may be x itself. Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    Array = np.ndarray[Any, Any]
    Index = tuple[slice, ...]

BLOCK = 1 << 17  # elements of a block: 1 MiB of float64, which a core's L2 cache holds


@np.errstate(all="ignore")
def layer_norm(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    axes: int,
    eps: float,
    out: Array,
    mean: Array | None = None,
    rstd: Array | None = None,
) -> None:
    """Write (x - mean) / sqrt(var + eps) * gamma + beta to out, with the biased variance.

    Ba, Kiros and Hinton 2016, "Layer Normalization", equations 3 and 4, in two passes.
    """
    cols = math.prod(x.shape[x.ndim - axes :])
    scale, shift = _columns(gamma, x.shape, axes), _columns(beta, x.shape, axes)
    for rows in _blocks(x, axes):
        # differences of near numbers are exact, so a mean far larger than the deviations costs no digits
        first = rows.first()
        rows.apply(np.subtract, first)
        rest = rows.sum() / cols
        rows.apply(np.subtract, rest)
        factor = 1 / np.sqrt(rows.sum(np.square) / cols + eps)
        rows.apply(np.multiply, factor)
        rows.store(out, scale, shift)
        rows.store_statistic(mean, first + rest)
        rows.store_statistic(rstd, factor)


@np.errstate(all="ignore")
def rms_norm(
    x: Array, gamma: Array | None, axes: int, eps: float, out: Array, rstd: Array | None = None
) -> None:
    """Write x / sqrt(mean(x^2) + eps) * gamma to out.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4, with eps under the root.
    """
    cols = math.prod(x.shape[x.ndim - axes :])
    scale = _columns(gamma, x.shape, axes)
    for rows in _blocks(x, axes):
        factor = 1 / np.sqrt(rows.sum(np.square) / cols + eps)
        rows.apply(np.multiply, factor)
        rows.store(out, scale)
        rows.store_statistic(rstd, factor)


@np.errstate(all="ignore")
def softmax(x: Array, axes: int, out: Array) -> None:
    """Write exp(x - max) / sum(exp(x - max)) to out. A row of only -inf, or with nan or +inf, gives nan."""
    for rows in _blocks(x, axes):
        rows.apply(np.subtract, rows.max())
        rows.apply(np.exp)
        rows.apply(np.divide, rows.sum())
        rows.store(out)


@np.errstate(all="ignore")
def log_softmax(x: Array, axes: int, out: Array) -> None:
    """Write x - max - log(sum(exp(x - max))) to out: finite where the logarithm of softmax would be -inf."""
    for rows in _blocks(x, axes):
        rows.apply(np.subtract, rows.max())
        rows.apply(np.subtract, np.log(rows.sum(np.exp)))
        rows.store(out)


class _Rows:
    """Some rows of x in float64: held if they fit into a block, else loaded by pieces in every pass."""

    def __init__(self, x: Array, rows: Index, pieces: list[Index], axes: int) -> None:
        self._x = x
        self._rows = rows
        self._pieces = pieces
        self._axes = axes
        self._steps: list[tuple[np.ufunc, tuple[Array, ...]]] = []  # what a piece goes through when loaded
        self._held = self._load(pieces[0]) if len(pieces) == 1 else None

    def _index(self, piece: Index) -> tuple[Any, ...]:
        return (*self._rows, ..., *piece)

    def _load(self, piece: Index) -> Array:
        """Return a piece as rows x columns."""
        part = self._x[self._index(piece)]
        at = part.ndim - self._axes
        flat = (math.prod(part.shape[:at]), math.prod(part.shape[at:]))
        values: Array = part.astype(np.float64, order="C").reshape(flat)
        for step, operand in self._steps:
            step(values, *operand, out=values)
        return values

    def _each(self) -> Iterator[Array]:
        return (self._load(piece) for piece in self._pieces) if self._held is None else iter((self._held,))

    def apply(self, step: np.ufunc, operand: Array | None = None) -> None:
        """Replace every element by step(element), or by step(element, its row's operand)."""
        operands = () if operand is None else (operand[:, None],)
        if self._held is None:
            self._steps.append((step, operands))
        else:
            step(self._held, *operands, out=self._held)

    def first(self) -> Array:
        """Return the first element of each row."""
        first: Array = self._x[self._index((slice(1),) * self._axes)]
        return first.astype(np.float64).reshape(-1)

    def max(self) -> Array:
        """Return the maximum of each row; nan where the row has one."""
        return self._total(np.maximum, (each.max(axis=1) for each in self._each()))

    def sum(self, of: np.ufunc | None = None) -> Array:
        """Return the sum of the elements of each row, or of a function of them."""
        return self._total(np.add, ((each if of is None else of(each)).sum(axis=1) for each in self._each()))

    @staticmethod
    def _total(combine: np.ufunc, parts: Iterator[Array]) -> Array:
        total = next(parts)
        for part in parts:
            total = combine(total, part)
        return total

    def store(self, out: Array, scale: Array | None = None, shift: Array | None = None) -> None:
        """Write the elements * scale + shift, each column with its own, rounded once."""
        for piece, values in zip(self._pieces, self._each(), strict=True):
            for step, operand in ((np.multiply, scale), (np.add, shift)):
                if operand is not None:
                    step(values, operand[piece].astype(np.float64, copy=False).reshape(-1), out=values)
            target = out[self._index(piece)]
            target[...] = _round(values, out.dtype).reshape(target.shape)

    def store_statistic(self, out: Array | None, values: Array) -> None:
        """Write one value a row, if anybody asked for it."""
        if out is not None:
            out[self._rows] = values.reshape(out[self._rows].shape)


def _blocks(x: Array, axes: int) -> Iterator[_Rows]:
    """Yield the rows of x: as many as fit into a block, or one row in several pieces."""
    leading, trailing = x.shape[: x.ndim - axes], x.shape[x.ndim - axes :]
    pieces = list(_tiles(trailing, BLOCK))
    for rows in _tiles(leading, max(1, BLOCK // math.prod(trailing))):
        yield _Rows(x, rows, pieces, axes)


def _tiles(shape: tuple[int, ...], limit: int) -> Iterator[Index]:
    """Cut an array of this shape, in C order, into tiles of at most `limit` elements; yield their slices.

    Slices, not reshape: that would copy where the strides of neighbouring axes do not fit together.
    """
    inner, axis = 1, len(shape)
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    whole = (slice(None),) * (len(shape) - axis)
    if axis == 0:
        yield whole
        return
    steps = (1,) * (axis - 1) + (limit // inner,)
    ranges = (
        [slice(start, start + step) for start in range(0, extent, step)]
        for extent, step in zip(shape, steps, strict=False)
    )
    for tile in itertools.product(*ranges):
        yield (*tile, *whole)


def _columns(parameter: Array | None, shape: tuple[int, ...], axes: int) -> Array | None:
    """Return gamma or beta with one element per column, in float64 if that is no larger than a block."""
    if parameter is None:
        return None
    stretched = np.broadcast_to(parameter, shape[len(shape) - axes :])
    return stretched.astype(np.float64) if stretched.size <= BLOCK else stretched


def _round(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return float64 values in a form whose conversion to `dtype` rounds them once, to nearest even.

    NumPy's own conversions do. That to bfloat16 goes by way of float32, where a value may be rounded onto the
    middle of two bfloat16, and then to the wrong one: so the float32 is rounded to odd (Boldo and Melquiond
    2008), and an odd one is no such middle.
    """
    if dtype.name != "bfloat16":
        return values
    near = values.astype(np.float32)
    bits = near.view(np.int32)
    even_and_inexact = (bits & 1 == 0) & (near != values) & ~np.isnan(values)
    bits += np.where(even_and_inexact, np.where(np.abs(values) > np.abs(near), 1, -1), 0).astype(np.int32)
    return near
