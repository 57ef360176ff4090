"""A row has the same bits however many rows there are, where these fill the device or are short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import dtype_of
from cupynorm.catalog import op_table
from cupynorm.plan.config import WARP

# Widths at which the planner takes another launch for many rows than for few.
COLS = {
    "layer_norm": (128, 127, 197, 448, 512, 640, 4000, 4097, 5001),
    "rms_norm": (33, 64, 127, 128, 256, 1000, 5001),
    "softmax": (64, 128, 256, 384, 1023, 4096),
}
MOST = 40_000  # more than 192 for each multiprocessor of an H200


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("name", "cols"), [(name, cols) for name in COLS for cols in COLS[name]])
def test_a_row_has_the_same_bits_among_many_rows_and_among_few(
    xp: Any, name: str, cols: int, dtype: str, offset: int
) -> None:
    op, kind = op_table.op(name), dtype_of(dtype)
    random = np.random.default_rng(cols)
    host = random.normal(1, 2, MOST * cols + offset).astype(kind)
    x = xp.asarray(host)[offset:].reshape(MOST, cols)
    parameters = {each: xp.asarray(random.normal(0, 1, cols).astype(kind)) for each in op.row.columns}
    out = xp.zeros(MOST * cols + offset, kind)[offset:].reshape(MOST, cols)
    whole = xp.asnumpy(op.function(x, **parameters, out=out))

    for rows in (1, WARP, 1000, 4096, 8192):
        y = xp.zeros(rows * cols + offset, kind)[offset:].reshape(rows, cols)
        op.function(x[:rows], **parameters, out=y)
        assert xp.asnumpy(y).tobytes() == whole[:rows].tobytes(), rows
