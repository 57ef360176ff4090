"""The points of the benchmark: which ops, dtypes and shapes it measures by default."""

from __future__ import annotations

from collections.abc import Sequence

from cupynorm._dtypes import dtype_of
from cupynorm.catalog import forms
from cupynorm.catalog.form import EVEN, LONG
from cupynorm.tools.results import Point

LARGEST_BYTES = 6 << 30  # of x and y together: the default sweep halves its rows until they fit


COLS = (32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
WIDE = 65536  # columns from which on there are WIDE_ROWS rows
ROWS, WIDE_ROWS = 49152, 4096
ODD_COLS = (33, 127, 1000, 1023, 5001, 50257)
ODD = (*((8192, cols, 0) for cols in ODD_COLS), (8192, 1024, 1))
FEW = tuple((rows, cols, 0) for cols in (1 << 16, 1 << 20, 1 << 24) for rows in (1, 16, 64))
FEW_DTYPES = ("float16", "float32")
ALL_DTYPES = ("float16", "bfloat16", "float32")
QUICK_COLS = 1024  # of forms in a quick sweep
QUICK = (
    (ROWS, 64, 0),
    (ROWS, 1024, 0),
    (ROWS, 8192, 0),
    (WIDE_ROWS, 65536, 0),
    (8192, 1023, 0),
    (1, 1 << 20, 0),
)

# torch.compile takes seconds to compile, so it is measured by default at these points only.
COMPILED_DTYPES = ("float16", "float32")
COMPILED_FEW = ((1, 1 << 20), (1, 1 << 24), (16, 1 << 20), (64, 1 << 20), (64, 65536))
COMPILED_WIDE = (64, 256, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, *ODD_COLS)
COMPILED_COLS = {
    "layer_norm": COMPILED_WIDE,
    "rms_norm": (128, 768, 1024, 4096, 8192),
    "softmax": COMPILED_WIDE,
    "log_softmax": (128, 768, 1024, 4096, 8192),
}


def is_compiled_by_default(point: Point) -> bool:
    """Return whether torch.compile is measured at a point by default."""
    if point.dtype not in COMPILED_DTYPES or point.offset:
        return False
    if point.kind == "few":
        return point.op == "softmax" and (point.rows, point.cols) in COMPILED_FEW
    return point.cols in COMPILED_COLS.get(point.op, ())


def points(
    ops: Sequence[str],
    dtypes: Sequence[str],
    rows: Sequence[int] = (),
    cols: Sequence[int] = (),
    *,
    offset: int = 0,
    quick: bool = False,
) -> list[Point]:
    """Return the points to measure: every combination of rows and cols if either is given, else the default sweep.

    The default number of rows is 49152, or 4096 from 65536 columns on, halved until x and y have 6 GiB at most. Forms
    of ops have a few shapes of their own, and the baseline of a form is measured with it. The default dtypes of plain
    ops are those of 2 and 4 bytes; those of forms, and of a quick sweep, are float16 and float32.
    """
    found = []
    besides = [forms.form(op).beside for op in ops]
    for op in (*(each for each in besides if each and each not in ops), *ops):
        what = forms.form(op)
        for dtype in dtypes or (FEW_DTYPES if quick or not what.alone else ALL_DTYPES):
            size = dtype_of(dtype).itemsize
            if rows or cols or offset:
                shapes = [
                    (each or _rows_for(width, size), width, offset)
                    for width in cols or COLS
                    for each in rows or (0,)
                ]
            elif not (what.alone and op in ops):
                own = EVEN + LONG if what.alone else what.shapes
                shapes = [(_halved(rows, width, size), width, 0) for rows, width in own]
                shapes = [each for each in shapes if len(shapes) == 1 or each[1] == QUICK_COLS or not quick]
            elif quick:
                shapes = list(QUICK)
            else:
                shapes = [(_rows_for(width, size), width, 0) for width in COLS]
                shapes += ODD + (FEW if dtype in FEW_DTYPES else ())
                shapes = [(_halved(each, width, size), width, off) for each, width, off in shapes]
            found += [Point(op, dtype, *shape) for shape in shapes]
    return list(dict.fromkeys(found))


def _rows_for(cols: int, size: int) -> int:
    return _halved(WIDE_ROWS if cols >= WIDE else ROWS, cols, size)


def _halved(rows: int, cols: int, size: int) -> int:
    while rows > 1 and 2 * rows * cols * size > LARGEST_BYTES:
        rows //= 2
    return rows
