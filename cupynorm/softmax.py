"""softmax and log_softmax."""

from __future__ import annotations

from typing import Any

from cupynorm import _row, reference
from cupynorm._plan import Plan

SOFTMAX = _row.RowOp(
    "softmax",
    "softmax.cu",
    "Softmax",
    lambda x, _gamma, _beta, axes, _eps, out: reference.softmax(x, axes, out),
)
LOG_SOFTMAX = _row.RowOp(
    "log_softmax",
    "softmax.cu",
    "LogSoftmax",
    lambda x, _gamma, _beta, axes, _eps, out: reference.log_softmax(x, axes, out),
)


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
    return _row.run(SOFTMAX, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003


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
    return _row.run(LOG_SOFTMAX, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
