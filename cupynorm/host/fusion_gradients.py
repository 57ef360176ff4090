"""Gradients of the row ops in a block of rows that is held in float64, for what fusions are made of.

Each function returns the gradient of x. x, y and what arrives have one shape, of which the last `axes` axes are a row.
Nothing is checked here; floating warnings are off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.host import reference

if TYPE_CHECKING:
    from cupynorm.host.broadcast_sums import BroadcastSum

Array = np.ndarray[Any, Any]
Rows = tuple[slice, ...]


@np.errstate(all="ignore")
def norm(
    arriving: Array,
    x: Array,
    gamma: Array | None,
    axes: int,
    eps: float,
    rows: Rows,
    dgamma: BroadcastSum | None,
    dbeta: BroadcastSum | None,
    *,
    centred: bool,
) -> Array:
    """Return rstd * (g - mean(g) - z * mean(g * z)) with g = arriving * gamma and the normalised x, z.

    mean(g) counts in layer_norm only (centred). Where gamma and beta are wanted, the rows' part of their gradients is
    added: arriving * z and arriving.
    """
    z = np.empty(x.shape)
    rstd = np.empty(x.shape[: x.ndim - axes])
    if centred:
        reference.layer_norm(x, None, None, axes, eps, z, None, rstd)
    else:
        reference.rms_norm(x, None, axes, eps, z, rstd)
    if dgamma is not None:
        dgamma.add(arriving * z, rows)
    if dbeta is not None:
        dbeta.add(arriving, rows)
    g, z = (_flat(each, axes) for each in (arriving if gamma is None else arriving * gamma, z))
    found = g - z * (g * z).mean(axis=1, keepdims=True)
    if centred:
        found -= g.mean(axis=1, keepdims=True)
    return np.asarray(found * rstd.reshape(-1, 1)).reshape(x.shape)


@np.errstate(all="ignore")
def softmax(arriving: Array, x: Array, y: Array, axes: int, *, log: bool) -> Array:
    """Return y * (arriving - sum(arriving * y)); of log_softmax arriving - exp(y) * sum(arriving).

    An element of -inf is dropped: it is 0, and what arrives there does not count.
    """
    kept = _flat(x, axes) != -np.inf
    g, p = (np.where(kept, _flat(each, axes), 0.0) for each in (arriving, np.exp(y) if log else y))
    total = (g if log else g * p).sum(axis=1, keepdims=True)
    found = g - p * total if log else p * (g - total)
    return np.where(kept, found, 0.0).reshape(x.shape)


def _flat(values: Array, axes: int) -> Array:
    """Return rows x columns."""
    at = values.ndim - axes
    return values.reshape(math.prod(values.shape[:at]), math.prod(values.shape[at:]))
