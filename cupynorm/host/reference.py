"""The ops on NumPy arrays: float64 arithmetic in blocks that fit into a cache, each result rounded once.

x and out have one shape and any strides; the last `axes` axes are normalised. gamma and beta broadcast to them, mean
and rstd have x's shape without them. out may be x itself. Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._values import NamedTuple
from cupynorm.host import special

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cupynorm.host.philox import Dropout

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]

BLOCK = 1 << 17  # elements of a block: 1 MiB of float64, which a core's L2 cache holds


class Masking(NamedTuple):
    """The input of softmax: x * scale + bias, and only where `where` holds and begin <= column < end.

    where and bias are stretched to x's shape, begin and end to its shape without the last axis.
    """

    scale: float
    bias: Array | None
    where: Array | None
    begin: Array | None
    end: Array | None


class Adding(NamedTuple):
    """The input of a norm: dropout(x + bias) + alpha * residual. bias broadcasts to the normalised axes.

    sum_out: where that is written, rounded once; None: nowhere.
    """

    residual: Array
    bias: Array | None
    alpha: float
    dropout: Dropout | None
    sum_out: Array | None


class Quantizing(NamedTuple):
    """The quantisation of a result to out's dtype, one of LARGEST: y / scale.

    scale: one for all rows; None: each row has its own. scales: the array that the rows' scales are written to.
    """

    scale: float | None
    scales: Array | None


class Extras(NamedTuple):
    """Steps on the elements of a row before its op, and after it."""

    mask: Masking | None = None
    add: Adding | None = None
    quantize: Quantizing | None = None


ALONE = Extras()


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
    extras: Extras = ALONE,
) -> None:
    """Write (x - mean) / sqrt(var + eps) * gamma + beta to out, with the biased variance.

    Ba, Kiros and Hinton 2016, "Layer Normalization", equations 3 and 4, in two passes.
    """
    cols = math.prod(x.shape[x.ndim - axes :])
    scale, shift = _columns(gamma, x.shape, axes), _columns(beta, x.shape, axes)
    for rows in _blocks(x, axes):
        rows.add(extras.add)
        mean_of_rows, factor = _standardise(rows, cols, eps, centred=True)
        rows.apply_columns(np.multiply, scale)
        rows.apply_columns(np.add, shift)
        rows.store(out, extras.quantize)
        rows.store_statistic(mean, mean_of_rows)
        rows.store_statistic(rstd, factor)


@np.errstate(all="ignore")
def rms_norm(
    x: Array,
    gamma: Array | None,
    axes: int,
    eps: float,
    out: Array,
    rstd: Array | None = None,
    extras: Extras = ALONE,
) -> None:
    """Write x / sqrt(mean(x^2) + eps) * gamma to out.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4, with eps under the root.
    """
    cols = math.prod(x.shape[x.ndim - axes :])
    scale = _columns(gamma, x.shape, axes)
    for rows in _blocks(x, axes):
        rows.add(extras.add)
        _, factor = _standardise(rows, cols, eps, centred=False)
        rows.apply_columns(np.multiply, scale)
        rows.store(out, extras.quantize)
        rows.store_statistic(rstd, factor)


@np.errstate(all="ignore")
def softmax(x: Array, axes: int, out: Array, extras: Extras = ALONE) -> None:
    """Write exp(x - max) / sum(exp(x - max)) to out, and 0 where a mask drops.

    A row of which only -inf is kept, or nan or +inf, gives nan where it is kept.
    """
    for rows in _blocks(x, axes):
        rows.mask(extras.mask)
        rows.apply(np.subtract, rows.max())
        rows.apply(np.exp)
        rows.apply(np.divide, rows.sum())
        rows.drop(extras.mask, 0.0)
        rows.store(out, extras.quantize)


@np.errstate(all="ignore")
def log_softmax(x: Array, axes: int, out: Array, extras: Extras = ALONE) -> None:
    """Write x - max - log(sum(exp(x - max))) to out: finite where the logarithm of softmax would be -inf.

    -inf where a mask drops.
    """
    for rows in _blocks(x, axes):
        rows.mask(extras.mask)
        rows.apply(np.subtract, rows.max())
        rows.apply(np.subtract, np.log(rows.sum(np.exp)))
        rows.drop(extras.mask, -np.inf)
        rows.store(out)


class _Rows:
    """Some rows of x in float64: held if they fit into a block, else loaded by pieces in every pass.

    There is only one row at a time where rows have several pieces, so a piece is always a stretch of x in C order.
    """

    def __init__(self, x: Array, rows: Index, pieces: list[Index], axes: int) -> None:
        self._x = x
        self._rows = rows
        self._pieces = pieces
        self._axes = axes
        self._steps: list[Callable[[Array, Index], Any]] = []  # what a piece goes through when loaded
        self._held = self._load(pieces[0]) if len(pieces) == 1 else None

    def _index(self, piece: Index) -> tuple[Any, ...]:
        return (*self._rows, ..., *piece)

    def _load(self, piece: Index) -> Array:
        """Return a piece as rows x columns."""
        part = self._x[self._index(piece)]
        at = part.ndim - self._axes
        flat = (math.prod(part.shape[:at]), math.prod(part.shape[at:]))
        values: Array = part.astype(np.float64, order="C").reshape(flat)
        for step in self._steps:
            step(values, piece)
        return values

    def _each(self) -> Iterator[Array]:
        return (self._load(piece) for piece in self._pieces) if self._held is None else iter((self._held,))

    def _then(self, step: Callable[[Array, Index], Any]) -> None:
        """Let every piece go through a step that works in place."""
        if self._held is None:
            self._steps.append(step)
        else:
            step(self._held, self._pieces[0])

    def apply(self, step: np.ufunc, operand: Array | None = None) -> None:
        """Replace every element by step(element), or by step(element, its row's operand)."""
        operands = () if operand is None else (operand[:, None],)
        self._then(lambda values, _: step(values, *operands, out=values))

    def apply_columns(self, step: np.ufunc, operand: Array | None) -> None:
        """Replace every element by step(element, the column's operand); None: leave them."""
        if operand is not None:
            self._then(lambda values, piece: step(values, _of_columns(operand, piece), out=values))

    def mask(self, mask: Masking | None) -> None:
        """Scale, add the bias, and put -inf where elements are dropped, whatever stood there."""
        if mask is None:
            return

        def step(values: Array, piece: Index) -> None:
            values *= mask.scale
            if mask.bias is not None:
                values += mask.bias[self._index(piece)].astype(np.float64).reshape(values.shape)
            self._put(values, piece, mask, -np.inf)

        self._then(step)

    def drop(self, mask: Masking | None, fill: float) -> None:
        """Put `fill` where elements are dropped: in a row with nothing kept, or with a nan, there is something else."""
        if mask is not None:
            self._then(lambda values, piece: self._put(values, piece, mask, fill))

    def _put(self, values: Array, piece: Index, mask: Masking, fill: float) -> None:
        if mask.where is not None:
            np.copyto(values, fill, where=mask.where[self._index(piece)].reshape(values.shape) == 0)
        if mask.begin is not None and mask.end is not None:
            column = np.arange(self._x.shape[-1])[piece[-1]]
            begin, end = (bound[self._rows].reshape(-1, 1) for bound in (mask.begin, mask.end))
            np.copyto(values, fill, where=(column < begin) | (column >= end))

    def add(self, add: Adding | None) -> None:
        """Replace every element by dropout(element + the column's bias) + alpha * residual; write that to sum_out."""
        if add is None:
            return

        def residual(values: Array, piece: Index) -> None:
            values += add.alpha * add.residual[self._index(piece)].astype(np.float64).reshape(values.shape)

        self.apply_columns(np.add, _columns(add.bias, self._x.shape, self._axes))
        if add.dropout is not None:
            self.drop_out(add.dropout)
        self._then(residual)
        if add.sum_out is not None:
            self.store(add.sum_out)

    def apply_activation(self, name: str) -> None:
        """Replace every element by a function of it, of ACTIVATIONS."""
        self._then(lambda values, _: np.copyto(values, ACTIVATIONS[name](values)))

    def apply_elements(self, step: np.ufunc, operand: Array, shift: Array | None) -> None:
        """Replace every element by step(element, the operand's element + the column's shift)."""

        def elements(values: Array, piece: Index) -> None:
            other = operand[self._index(piece)].astype(np.float64).reshape(values.shape)
            step(values, other if shift is None else other + _of_columns(shift, piece), out=values)

        self._then(elements)

    def drop_out(self, drop: Dropout) -> None:
        """Multiply kept elements by the dropout's factor, and set the others to 0."""

        def step(values: Array, piece: Index) -> None:
            values *= drop.factor
            kept = drop.kept(self._start(piece), values.size).reshape(values.shape)
            np.copyto(values, 0.0, where=~kept)

        self._then(step)

    def _start(self, piece: Index) -> int:
        """Return the place of a piece's first element in x's C order."""
        at = [each.start or 0 for each in self._rows]
        at += [0] * (self._x.ndim - len(at))
        for axis, each in zip(range(-len(piece), 0), piece, strict=True):
            at[axis] = each.start or at[axis]
        place = 0
        for index, extent in zip(at, self._x.shape, strict=True):
            place = place * extent + index
        return place

    def first(self) -> Array:
        """Return the first element of each row."""
        piece = (slice(1),) * self._axes
        return self._load(piece)[:, 0] if self._held is None else self._held[:, 0].copy()

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

    def store(self, out: Array, how: Quantizing | None = None) -> None:
        """Write the elements, rounded once."""
        scale: Any = None if how is None else how.scale
        if how is not None and scale is None:
            largest = self._total(np.maximum, (np.abs(each).max(axis=1) for each in self._each()))
            self.store_statistic(how.scales, largest / LARGEST[out.dtype.name])
            # elements are divided by the stored scale, by which the caller will multiply them
            scale = how.scales[self._rows].astype(np.float64).reshape(-1, 1)  # type: ignore[index]
        for piece, values in zip(self._pieces, self._each(), strict=True):
            target = out[self._index(piece)]
            rounded = (
                _round(values, out.dtype) if how is None else _nearest(_divide(values, scale), out.dtype)
            )
            target[...] = rounded.reshape(target.shape)

    def store_statistic(self, out: Array | None, values: Array) -> None:
        """Write one value a row, if anybody asked for it."""
        if out is not None:
            out[self._rows] = values.reshape(out[self._rows].shape)


def _standardise(rows: _Rows, cols: int, eps: float, *, centred: bool) -> tuple[Array, Array]:
    """Replace rows by (x - mean) / sqrt(var + eps); return mean and 1 / sqrt(var + eps). The mean is 0 if not centred.

    Differences of near numbers are exact, so a mean far larger than the deviations costs no digits.
    """
    mean = np.zeros(1)
    if centred:
        first = rows.first()
        rows.apply(np.subtract, first)
        rest = rows.sum() / cols
        rows.apply(np.subtract, rest)
        mean = first + rest
    factor = 1 / np.sqrt(rows.sum(np.square) / cols + eps)
    rows.apply(np.multiply, factor)
    return mean, factor


def _blocks(x: Array, axes: int) -> Iterator[_Rows]:
    """Yield the rows of x: as many as fit into a block, or one row in several pieces."""
    leading, trailing = x.shape[: x.ndim - axes], x.shape[x.ndim - axes :]
    if not math.prod(leading):
        return  # or the pieces of rows that are not there would be counted out
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
    if dtype.kind == "f" or dtype.name != "bfloat16":  # NumPy makes a name anew whenever it is asked for
        return values
    near = values.astype(np.float32)
    bits = near.view(np.int32)
    even_and_inexact = (bits & 1 == 0) & (near != values) & ~np.isnan(values)
    bits += np.where(even_and_inexact, np.where(np.abs(values) > np.abs(near), 1, -1), 0).astype(np.int32)
    return near


def _of_columns(operand: Array, piece: Index) -> Array:
    """Return a parameter's elements for the columns of a piece."""
    columns: Array = operand[piece].astype(np.float64, copy=False).reshape(-1)
    return columns


LARGEST = {
    "int8": 127.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}  # what a row's largest element becomes
LEAST = {"int8": -128.0}  # where that is not -LARGEST: a given scale may reach it
_FLOAT8 = {
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
}  # bits of the fraction, least exponent of a normal number


def _divide(values: Array, scale: Any) -> Array:
    """Return values / scale, and 0 for a scale of 0: that of a row of zeros."""
    return np.where(scale == 0, 0.0, values / scale)


def _nearest(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round float64 values to the nearest ones of a quantised dtype, ties to even, and saturate at its largest.

    nan stays nan in a float8 and is 0 in int8. The rounding is computed in float64, where every step is exact:
    ml_dtypes' own conversion neither saturates nor promises to round only once.
    """
    name = dtype.name
    values = np.clip(values, LEAST.get(name, -LARGEST[name]), LARGEST[name])
    if name not in _FLOAT8:
        return np.where(np.isnan(values), 0.0, np.rint(values)).astype(dtype)
    fraction_bits, least_exponent = _FLOAT8[name]
    exponent = np.maximum(np.frexp(values)[1] - 1, least_exponent)
    unit = np.ldexp(1.0, exponent - fraction_bits)
    rounded: Array = np.rint(values / unit) * unit
    return rounded.astype(dtype)


@np.errstate(all="ignore")
def bias_activation(x: Array, bias: Array | None, name: str, out: Array, axes: int = 1) -> None:
    """Write activation(x + bias) to out; bias broadcasts to the last `axes` axes."""
    columns = _columns(bias, x.shape, axes)
    for rows in _blocks(x, axes):
        rows.apply_columns(np.add, columns)
        rows.apply_activation(name)
        rows.store(out)


@np.errstate(all="ignore")
def gated(
    gate: Array, gate_bias: Array | None, value: Array, value_bias: Array | None, name: str, out: Array
) -> None:
    """Write activation(gate + gate_bias) * (value + value_bias) to out.

    gate and value have out's shape, a bias the shape of the last axis.
    """
    columns, shift = _columns(gate_bias, gate.shape, 1), _columns(value_bias, gate.shape, 1)
    for rows in _blocks(gate, 1):
        rows.apply_columns(np.add, columns)
        rows.apply_activation(name)
        rows.apply_elements(np.multiply, value, shift)
        rows.store(out)


@np.errstate(all="ignore")
def dropout(x: Array, drop: Dropout, out: Array) -> None:
    """Write x / (1 - p) to out where x is kept, and 0 where it is dropped, whatever stands there."""
    x, out = np.atleast_1d(x), np.atleast_1d(out)
    for rows in _blocks(x, 1):
        rows.drop_out(drop)
        rows.store(out)


def _gelu(values: Array) -> Array:
    """Return x * Phi(x), where Phi is the normal distribution (Hendrycks and Gimpel 2016).

    Phi is computed by erfc, which keeps the digits of its tail.
    """
    return np.asarray(values * (0.5 * special.erfc(values * -math.sqrt(0.5))))


def _gelu_tanh(values: Array) -> Array:
    """Return x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3).

    It is computed as x / (1 + exp(-2u)), which has no cancellation.
    """
    inner = values + 0.044715 * values * values * values
    return np.asarray(values / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * inner)))


def _silu(values: Array) -> Array:
    """Return x / (1 + exp(-x)) (Elfwing, Uchibe and Doya 2017)."""
    return np.asarray(values / (1 + np.exp(-values)))


ACTIVATIONS = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}
