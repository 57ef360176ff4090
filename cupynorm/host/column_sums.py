"""Sums over rows in a fixed order: the gradients of parameters that all rows share, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm.host.reference import _round

Array = np.ndarray[Any, Any]


def add_rows(total: Array, values: Array) -> None:
    """Add the rows of `values`, one after another, to `total`, which has their columns. `values` is overwritten.

    Each column is summed in the order of the rows alone. So it has the same bits however the rows are cut into calls.
    """
    if not values.size:
        return
    values[0] += total
    if values.shape[1] == 1:  # np.add.reduce would sum pairs of neighbours first, for it sees one long axis
        total[...] = np.add.accumulate(values[:, 0])[-1]
    else:
        total[...] = np.add.reduce(values, axis=0)


def store_sum(total: Array, out: Array, *, adds: bool) -> None:
    """Write a sum of columns to `out`, rounded once, or add it to what stands there.

    out: has total's shape beside leading axes of one element, or one element, for which the columns are summed.
    """
    values = total if out.size == total.size else total.sum(keepdims=True)
    if adds:
        values = out.astype(np.float64).reshape(-1) + values
    out[...] = _round(values, out.dtype).reshape(out.shape)
