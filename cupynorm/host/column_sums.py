"""Sums over rows in a fixed order, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

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
