"""In which vectors rows are accessed: what columns, strides and pointers allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm.call.view import View
from cupynorm.lower.vectors import row_alignment, vector_width

F4 = np.dtype(np.float32)
F2 = np.dtype(np.float16)


@pytest.mark.parametrize(
    ("dtype", "cols", "row_stride", "offset", "vector"),
    [
        (F2, 1024, 1024, 0, 8),
        (F4, 1024, 1024, 0, 4),
        (F2, 1020, 1020, 0, 4),
        (F2, 1023, 1023, 0, 1),
        (F2, 1024, 1025, 0, 1),  # rows start at odd elements
        (F2, 1024, 1028, 0, 4),
        (F2, 1024, 1024, 2, 1),  # the base is off by one element
        (F2, 1024, 1024, 8, 4),
        (np.dtype(np.float64), 6, 6, 0, 2),
        (F4, 1, 1, 0, 1),
    ],
)
def test_vector_width_follows_columns_strides_and_alignment(
    dtype: Any, cols: int, row_stride: int, offset: int, vector: int
) -> None:
    x = View(1 << 20 | offset, (8, cols), (row_stride * dtype.itemsize, dtype.itemsize), dtype)
    y = View(1 << 21, (8, cols), (cols * dtype.itemsize, dtype.itemsize), dtype)

    assert vector_width(x, y, 1) == vector
    assert vector_width(y, x, 1) == vector


def test_the_wider_type_bounds_the_vector() -> None:
    x = View(1 << 20, (8, 64), (128, 2), F2)
    y = View(1 << 21, (8, 64), (256, 4), F4)

    assert vector_width(x, y, 1) == 4


def test_rows_lie_alike_only_if_they_do_axis_by_axis() -> None:
    # both collapse to two axes, of 10 * 33 and 33 elements modulo 4: x to (6, 5), y to (2, 15)
    shape, line = (2, 3, 5, 33), 33 * 4
    x = View(1 << 20, shape, (3 * 10 * line, 10 * line, line, 4), F4)
    y = View(1 << 21, shape, (30 * line, 5 * line, line, 4), F4)

    assert [len(each.split(1)[0].collapsed()[0]) for each in (x, y)] == [2, 2]
    assert row_alignment(x, y, 1).unaligned == 2
    assert row_alignment(x, x, 1).unaligned == 1
