"""Sums of rows, in an order that depends on their columns alone."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CHAIN = 512  # elements that are summed up in the type of arithmetic; such sums are summed up in float64
_ONES = {np.dtype(kind): np.ones(2 * CHAIN, kind) for kind in (np.float32, np.float64)}


def row_sums(values: Array, others: Array | None = None) -> Array:
    """Return each row's sum, or the sum of its products with another row's elements, in float64.

    Products of up to 2 * CHAIN elements are summed up in their own type, by as many lanes as a BLAS has. Such sums are
    summed up in float64. So the order of summation, and the bits, depend on the columns alone.
    """
    rows, cols = values.shape
    ones = _ONES[values.dtype]
    chains = cols // CHAIN
    if chains <= 1:
        found: Array = np.vecdot(values, ones[:cols] if others is None else others)
        return found.astype(np.float64)
    whole = chains * CHAIN
    cut = (rows, chains, CHAIN)
    parts = np.vecdot(
        values[:, :whole].reshape(cut), ones[:CHAIN] if others is None else others[:, :whole].reshape(cut)
    )
    total: Array = np.einsum("ij->i", parts.astype(np.float64))
    if whole < cols:
        total += np.vecdot(values[:, whole:], ones[: cols - whole] if others is None else others[:, whole:])
    return total


def joined(combine: np.ufunc, parts: list[Array]) -> Array:
    """Return what pieces of rows come to: combine(... combine(first, second) ..., last)."""
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total
