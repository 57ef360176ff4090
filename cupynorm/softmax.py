"""softmax and log_softmax."""

from __future__ import annotations

from typing import Any

from cupynorm import _row, reference
from cupynorm._arguments import check
from cupynorm._plan import Plan

SOFTMAX = _row.RowOp("softmax", "softmax.cu", "Softmax")
LOG_SOFTMAX = _row.RowOp("log_softmax", "softmax.cu", "LogSoftmax")


def softmax(
    x: Any,
    *,
    axis: int | tuple[int, ...] = -1,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return exp(x - max) / sum(exp(x - max)) over the normalised axes.

    Arrays, dtypes, axes, `out`, `plan` and errors are as in layer_norm. A row of only -inf gives nan, as in NumPy;
    so does a row with +inf or nan, and no other row.
    """
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan)
    if call.on_device:
        _row.run(SOFTMAX, call, plan=plan)
    else:
        reference.softmax(x, call.axes, call.out)
    return call.out


def log_softmax(
    x: Any,
    *,
    axis: int | tuple[int, ...] = -1,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Return x - max - log(sum(exp(x - max))) over the normalised axes: the logarithm of softmax, without its underflow.

    Arrays, dtypes, axes, `out`, `plan`, errors and special values are as in softmax.
    """
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan)
    if call.on_device:
        _row.run(LOG_SOFTMAX, call, plan=plan)
    else:
        reference.log_softmax(x, call.axes, call.out)
    return call.out
