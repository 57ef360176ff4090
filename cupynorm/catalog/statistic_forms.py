"""Forms of statistic ops: standardize, normalize, rescale and moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm.catalog.form import EVEN, LONG, Array, Arrays, Form, Given, wide
from cupynorm.ops import statistics
from cupynorm.ops.moments import moments

if TYPE_CHECKING:
    from collections.abc import Callable


def _elements(*, where: bool = False) -> Callable[[int, int, Any], dict[str, Given]]:
    """Return `given` of x, y and perhaps a mask of bytes."""

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = {"x": Given((rows, cols), dtype)}
        if where:
            found["where"] = Given((rows, cols), np.dtype(np.bool_), "mask")
        return found | {"y": Given((rows, cols), dtype, "result")}

    return given


@np.errstate(all="ignore")
def _standardized(a: Arrays) -> tuple[Array, ...]:
    """Return z-scores with ddof=1 of what is kept, and 0 elsewhere."""
    x = wide(a["x"])
    kept = np.broadcast_to(a.get("where", np.ones((), bool)), x.shape)
    count = kept.sum(-1, keepdims=True).astype(np.float64)
    mean = np.where(kept, x, 0).sum(-1, keepdims=True) / count
    squares = np.where(kept, (x - mean) ** 2, 0).sum(-1, keepdims=True)
    variance = squares / np.where(count > 1, count - 1, np.nan)
    return (np.where(kept, (x - mean) / np.sqrt(variance), 0),)


def _standardize(how: str) -> Form:
    options: dict[str, Any] = {"nan": "omit"} if how == "omit" else {}

    def torch(t: Any, a: Arrays) -> Any:
        x = a["x"]
        std, mean = t.std_mean(x, -1, keepdim=True)
        return (x - mean) / std

    return Form(
        "standardize" + f"/{how}" * bool(how),
        _elements(where=how == "where"),
        lambda a, **others: statistics.standardize(a["x"], ddof=1, where=a.get("where"), **options, **others),
        _standardized,
        None if how == "where" else torch,
        0.98 if not how else 0.97,
        "layer_norm" if how == "omit" else "",
        shapes=EVEN + LONG,
    )


def _rescaled(a: Arrays) -> tuple[Array, ...]:
    x = wide(a["x"])
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (np.where(high == low, 0, (x - low) / np.where(high == low, 1, high - low)),)


def _moments(a: Arrays) -> tuple[Array, ...]:
    x = wide(a["x"])
    return x.mean(-1), x.var(-1)


def _moments_given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
    # of one sign: the error of a mean is relative to the deviations, and a mean near 0 would be held to its own size
    found = {"x": Given((rows, cols), dtype, "divisors")}
    return found | {name: Given((rows,), compute_dtype(dtype), "result") for name in ("y", "variance")}


def _call_moments(a: Arrays, out: Any = None, **options: Any) -> tuple[Any, ...]:
    """Call moments; out: where the mean goes."""
    return moments(a["x"], out=(out, None), **options)


STATISTICS = (
    _standardize(""),
    _standardize("omit"),
    _standardize("where"),
    Form(
        "normalize",
        _elements(),
        lambda a, **options: statistics.normalize(a["x"], **options),
        lambda a: (wide(a["x"]) / np.sqrt((wide(a["x"]) ** 2).sum(-1, keepdims=True)),),
        lambda t, a: t.nn.functional.normalize(a["x"], dim=-1),
        0.98,
        shapes=EVEN + LONG,
    ),
    Form(
        "rescale",
        _elements(),
        lambda a, **options: statistics.rescale(a["x"], **options),
        _rescaled,
        None,
        0.98,
        shapes=EVEN + LONG,
    ),
    Form(
        "moments",
        _moments_given,
        _call_moments,
        _moments,
        lambda t, a: t.var_mean(a["x"], -1, correction=0)[::-1],
        0.97,
        shapes=EVEN + LONG,
    ),
)
