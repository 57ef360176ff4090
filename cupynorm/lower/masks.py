"""Host mirrors of a mask: Mask, Interval and their members, in kernels/io/masks.cuh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupynorm._dtypes import cpp_of_element
from cupynorm.call.masks import Mask
from cupynorm.lower.mirrors import EMPTY, Struct, division, operand, per_row
from cupynorm.lower.vectors import Vectors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.call.view import View

# By bytes of an index: a bound beyond every column, small enough that adding a query's number does not overflow.
NO_BOUND = {4: 1 << 30, 8: 1 << 61}
NARROW = 1 << 29  # up to so many columns and queries, indices have 4 bytes


def mask_struct(mask: Mask | None, vectors: Vectors, order: Sequence[int]) -> Struct:
    """Return the mirror of NoMask and Mask. order: that of x's leading axes."""
    if mask is None or not (mask.is_structural or mask.where is not None):
        return Struct("cupynorm::NoMask", EMPTY, (0,))
    views = {name: each.reordered(order) for name, each in mask.views().items()}
    where = Struct("cupynorm::NoWhere", EMPTY, (0,))
    if "where" in views:
        of = operand(views["where"], mask.axes, vectors, constant=True)
        where = Struct(
            f"cupynorm::Where<{of.cpp}>", np.dtype([("bytes", of.dtype)], align=True), (of.values,)
        )
    structure = _structure(mask, views.get("lengths"))
    dtype = np.dtype([("structure", structure.dtype), ("where", where.dtype), ("cols", np.int64)], align=True)
    type_name = f"cupynorm::Mask<{structure.cpp}, {where.cpp}>"
    return Struct(type_name, dtype, (structure.values, where.values, mask.cols))


def _structure(mask: Mask, lengths: View | None) -> Struct:
    """Return the mirror of AllColumns and Interval."""
    if not mask.is_structural:
        return Struct("cupynorm::AllColumns", EMPTY, (0,))
    of = Struct("cupynorm::NoLengths", EMPTY, (0,))
    if lengths is not None:
        of = per_row(lengths)
    index = np.dtype(np.int32 if max(mask.cols, mask.queries) <= NARROW else np.int64)
    none = NO_BOUND[index.itemsize]
    low, high = -none if mask.low is None else mask.low, none if mask.high is None else mask.high
    fields = [("lengths", of.dtype), *((name, index) for name in ("cols", "queries", "low", "high"))]
    dtype = np.dtype([*fields, ("multiplier", np.uint32), ("shift", np.uint32)], align=True)
    flags = ", ".join("true" if each else "false" for each in (mask.left_padded, mask.has_band))
    values = (of.values, mask.cols, mask.queries, low, high, *division(mask.queries))
    type_name = f"cupynorm::Interval<{of.cpp}, {flags}, {cpp_of_element(index)}>"
    return Struct(type_name, dtype, values)
