"""The ops that exist, once: tests, selftest, bench and the command line go by this table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM, layer_norm, rms_norm
from cupynorm.ops.softmax import LOG_SOFTMAX, SOFTMAX, log_softmax, softmax

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynorm.lower.row import RowOp

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """An op for those who run, test or list all of them.

    row: how the kernels know it. function: the public one. reference: the expected results, written from the
    definition, in float64 (longer for float64 input): reference(x, gamma, beta, axes=1, eps=...) -> (y, *stats),
    without the arguments that the op does not take.
    """

    row: RowOp
    function: Callable[..., Any]
    reference: Callable[..., tuple[Array, ...]]

    @property
    def name(self) -> str:
        """The public function's name."""
        return self.row.name

    @property
    def source(self) -> str:
        """The file of kernels/ that holds its struct."""
        return self.row.source

    @property
    def struct(self) -> str:
        """Its struct in namespace cupynorm, a template of the compute type."""
        return self.row.struct

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters of the normalised axes that the function takes."""
        return self.row.columns

    @property
    def stats(self) -> tuple[str, ...]:
        """The names of the statistics that return_stats=True adds to the result."""
        return self.row.stats

    def bytes_moved(
        self,
        rows: int,
        cols: int,
        x_dtype: Any,
        y_dtype: Any = None,
        *,
        parameter_dtype: Any = None,
        return_stats: bool = False,
    ) -> int:
        """Return the bytes that any implementation moves: x in, y out, parameters in once, statistics out.

        y_dtype: None is x's. parameter_dtype: None is a call without gamma and beta.
        """
        x, y = dtype_of(x_dtype), dtype_of(x_dtype if y_dtype is None else y_dtype)
        moved = rows * cols * (x.itemsize + y.itemsize)
        if parameter_dtype is not None:
            moved += len(self.parameters) * cols * dtype_of(parameter_dtype).itemsize
        if return_stats:
            moved += len(self.stats) * rows * compute_dtype(x, y).itemsize
        return moved


def _wide(x: Array, axes: int) -> tuple[Array, tuple[int, ...]]:
    """Return x in a wider type, and the axes by number."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    return x.astype(wide), tuple(range(-axes, 0))


def _affine(y: Array, gamma: Array | None, beta: Array | None = None) -> Array:
    y = y if gamma is None else y * gamma.astype(np.float64)
    return (y if beta is None else y + beta.astype(np.float64)).astype(np.float64)


@np.errstate(all="ignore")
def _layer_norm(
    x: Array, gamma: Array | None = None, beta: Array | None = None, *, axes: int = 1, eps: float = 1e-5
) -> tuple[Array, ...]:
    x, over = _wide(x, axes)
    origin: tuple[Any, ...] = (..., *(slice(1),) * axes)
    first: Array = x[origin]  # so that a constant row has no deviation at all
    rest = (x - first).mean(over, keepdims=True)
    deviation = x - first - rest
    rstd = 1 / np.sqrt((deviation * deviation).mean(over, keepdims=True) + x.dtype.type(eps))
    return _affine(deviation * rstd, gamma, beta), (first + rest).squeeze(over), rstd.squeeze(over)


@np.errstate(all="ignore")
def _rms_norm(x: Array, gamma: Array | None = None, *, axes: int = 1, eps: float = 1e-6) -> tuple[Array, ...]:
    x, over = _wide(x, axes)
    rstd = 1 / np.sqrt((x * x).mean(over, keepdims=True) + x.dtype.type(eps))
    return _affine(x * rstd, gamma), rstd.squeeze(over)


@np.errstate(all="ignore")
def _softmax(x: Array, *, axes: int = 1) -> tuple[Array, ...]:
    x, over = _wide(x, axes)
    powers = np.exp(x - x.max(over, keepdims=True))
    return ((powers / powers.sum(over, keepdims=True)).astype(np.float64),)


@np.errstate(all="ignore")
def _log_softmax(x: Array, *, axes: int = 1) -> tuple[Array, ...]:
    x, over = _wide(x, axes)
    below = x - x.max(over, keepdims=True)
    return ((below - np.log(np.exp(below).sum(over, keepdims=True))).astype(np.float64),)


OPS = (
    Op(LAYER_NORM, layer_norm, _layer_norm),
    Op(RMS_NORM, rms_norm, _rms_norm),
    Op(SOFTMAX, softmax, _softmax),
    Op(LOG_SOFTMAX, log_softmax, _log_softmax),
)


def op(name: str) -> Op:
    """Return the op of this name; ValueError says which there are."""
    for each in OPS:
        if each.name == name:
            return each
    raise ValueError(f"op {name!r} does not exist: use {', '.join(each.name for each in OPS)}")
