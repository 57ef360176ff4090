"""Forms along other axes than the last. The columns of a point lie along the axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.catalog import op_table
from cupynorm.catalog.form import EVEN, Array, Arrays, Form, Given
from cupynorm.ops.norm import layer_norm
from cupynorm.ops.softmax import softmax

if TYPE_CHECKING:
    from collections.abc import Callable

ACROSS = 64  # neighbouring rows along a middle axis, or as many of them as rows are a multiple of
SHAPES = (*EVEN[:-1], (4096, 16384), (1024, 65536))


def _given(*, middle: bool, columns: tuple[str, ...]) -> Callable[[int, int, Any], dict[str, Given]]:
    """Return `given` of x, parameters and y. middle: the axis is one of three, else the first of two."""

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        across = math.gcd(rows, ACROSS)
        shape = (rows // across, cols, across) if middle else (cols, rows)
        found = {"x": Given(shape, dtype), **{name: Given((cols,), dtype) for name in columns}}
        return found | {"y": Given(shape, dtype, "result")}

    return given


def _along(op: op_table.Op, *, middle: bool) -> Form:
    axis = 1 if middle else 0

    def reference(a: Arrays) -> tuple[Array, ...]:
        rows = np.moveaxis(a["x"], axis, -1)
        y, *_ = op.reference(rows, *(a[name] for name in op.parameters))
        return (np.moveaxis(y, -1, axis),)

    def torch(t: Any, a: Arrays) -> Any:
        if op.function is softmax:
            return t.softmax(a["x"], axis, out=a.get("y"))
        rows = a["x"].movedim(axis, -1)
        y = t.nn.functional.layer_norm(rows, rows.shape[-1:], a["gamma"], a["beta"], 1e-5)
        return y.movedim(-1, axis).contiguous()

    return Form(
        f"{op.name}/{'middle' if middle else 'first'}",
        _given(middle=middle, columns=op.parameters),
        lambda a, **options: op.function(
            a["x"], axis=axis, **{name: a[name] for name in op.parameters}, **options
        ),
        reference,
        torch,
        0.95,
        shapes=SHAPES,
        axis=axis,
    )


ALONG_AXES = tuple(
    _along(op, middle=middle)
    for op in op_table.OPS
    if op.function in {layer_norm, softmax}
    for middle in (False, True)
)
