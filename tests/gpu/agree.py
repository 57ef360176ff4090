"""Runs an op on the device and compares with float64."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.plan.config import VARIANTS
from cupynorm.tools.testing import assert_close
from tests.sampling import in_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cupynorm.catalog.op_table import Op
    from cupynorm.tools.testing import Case

__all__ = [
    "DTYPES",
    "SIMULATED",
    "VARIANTS",
    "as_strided",
    "bits",
    "check",
    "need_bytes",
    "pairs_where_simulated",
    "run",
    "tiled",
]

SIMULATED = os.environ.get("CUPYNORM_TEST_DEVICE") == "simulator"
DTYPES = ("float16", "bfloat16", "float32", "float64")


def pairs_where_simulated(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations; on the simulator some, in which any two values meet, unless CUPYNORM_SLOW=1."""
    return in_pairs(*factors) if SIMULATED else [*itertools.product(*factors)]


def run(xp: Any, op: Op, case: Case, **options: Any) -> Any:
    """Call the op with the case on the device; what comes back stays there."""
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}
    return op.function(xp.asarray(case.x), **parameters, **options)


def check(xp: Any, op: Op, case: Case, **options: Any) -> None:
    """Compare what the op gives with float64."""
    y = run(xp, op, case, **options)

    assert type(y) is xp.ndarray
    assert_close(xp.asnumpy(y), op.reference(case.x, **case.parameters)[0])


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bytes of each element, to compare nan and -0 too."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def as_strided(xp: Any, base: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return a view with any strides, of CuPy's arrays or of the stand-in's."""
    if issubclass(xp.ndarray, np.ndarray):
        return np.lib.stride_tricks.as_strided(base, shape, strides, subok=True)
    return xp.lib.stride_tricks.as_strided(base, shape, strides)


def need_bytes(xp: Any, wanted: int) -> str:
    """Say why there is too little memory; "" if there is enough."""
    free = xp.cuda.runtime.memGetInfo()[0]
    return (
        ""
        if free > wanted * 1.05
        else f"needs {wanted / 2**30:.1f} GiB of device memory, {free / 2**30:.1f} are free"
    )


def tiled(xp: Any, tile: np.ndarray, shape: tuple[int, ...]) -> Any:
    """Return a device array of `shape` that repeats the tile."""
    whole = xp.empty(math.prod(shape), tile.dtype)
    count = whole.size // tile.size
    whole[: count * tile.size].reshape(count, tile.size)[...] = xp.asarray(tile).reshape(1, -1)
    whole[count * tile.size :] = xp.asarray(tile).reshape(-1)[: whole.size - count * tile.size]
    return whole.reshape(shape)
