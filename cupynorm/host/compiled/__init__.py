"""Which rows of NumPy arrays go through loops that numba has compiled: where CUPYNORM_NUMBA says so, plain ones.

Who calls run() asks NumPy where it says False. Which loop takes a row depends on types and on how rows lie, so a row
has the same bits in any company. Nothing is checked here.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._install import pip_install
from cupynorm._values import NamedTuple
from cupynorm.host import threads as threading
from cupynorm.host.slabs import _inner, _laid, _reshaped, lie_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

TYPES = {np.dtype(np.float32), np.dtype(np.float64)}
LEAST_OF_A_THREAD = 1 << 17  # elements, a tenth of a millisecond: to wake one takes half as long
PARTS, LEAST_OF_A_PART = 4, 1 << 18  # of a thread's rows: who is late leaves some to the others
WIDTH = 4096  # rows side by side that are computed at once, at most: long steps along memory (docs/notes/072)
NARROW = 512  # the same for more threads: shorter steps cost more than a second thread wins
LINE = 16  # elements of float32: threads do not write to one line of a cache


def wanted() -> bool:
    """Say whether compiled loops may be used; ValueError says what the variable holds if it is neither 0 nor 1."""
    text = os.environ.get("CUPYNORM_NUMBA", "").strip()
    if text in {"", "0"}:
        return False
    if text != "1":
        raise ValueError(
            f"CUPYNORM_NUMBA is {text!r}: use 1 for loops that numba compiles, 0 or nothing for NumPy"
        )
    return True


class Lying(NamedTuple):
    """How rows lie: groups of `inner` rows side by side, or rows whose elements are (inner 1); cols elements each.

    strides: how many elements lie from a group to the next, and from an element of a row to the next, in x, the others
    and the result.
    """

    groups: int
    cols: int
    inner: int
    strides: tuple[tuple[int, int], ...]


def run(
    name: str,
    x: Array,
    axes: int,
    out: Array | None,
    numbers: Sequence[float] = (),
    *,
    others: Array | None = None,
    scale: Array | None = None,
    shift: Array | None = None,
    statistics: Sequence[Array | None] = (),
) -> bool:
    """Compute an op over the last `axes` axes, and say so; False: these are not arrays for a compiled loop.

    name: one of steps.STEPS. numbers: what its functions take. others: a second array of x's shape. scale, shift: gamma
    and beta. statistics: where the op's two numbers a row go. ImportError says what to install.
    """
    if not wanted() or not x.size:
        return False
    arrays = (x, x if others is None else others, x if out is None else out)
    if x.dtype not in TYPES or any(each.dtype != x.dtype or not each.flags.aligned for each in arrays):
        return False
    if out is not None and not all(_apart_or_same(each, out) for each in (x, others, scale, shift)):
        return False
    lying = _lying(arrays, axes)
    if lying is None:
        return False
    trailing = x.shape[x.ndim - axes :]
    columns = [_columns(each, trailing, x.dtype) for each in (scale, shift)]
    told = np.empty((lying.groups * lying.inner, 2))
    given = [_first(each) for each in arrays[:2]]
    result = np.empty(1, x.dtype) if out is None else _first(out)
    in_place = out is not None and any(np.may_share_memory(each, out) for each in arrays[:2])
    _go_through(
        name,
        lying,
        (*map(_read_only, given), *map(_read_only, columns), result, told),
        numbers,
        in_place=in_place,
    )
    for column, statistic in enumerate(statistics):
        if statistic is not None:
            statistic[...] = told[:, column].reshape(statistic.shape)
    return True


def _apart_or_same(one: Array | None, out: Array) -> bool:
    """Say whether writing to `out` changes nothing of an array that is still to be read."""
    if one is None or not np.may_share_memory(one, out):
        return True
    return (one.ctypes.data, one.shape, one.strides) == (out.ctypes.data, out.shape, out.strides)


def _lying(arrays: Sequence[Array], axes: int) -> Lying | None:
    """Return how the rows of arrays of one shape lie; None if no loop knows it."""
    x = arrays[0]
    before = x.ndim - axes
    inner = _inner(x, axes) if lie_apart(x, axes) else 0
    blocks: list[Array | None]
    if inner:
        blocks = [_laid(each, inner, axes) for each in arrays]
    else:
        rows = (math.prod(x.shape[:before]), 1, math.prod(x.shape[before:]))
        blocks = [_viewed(each, rows) for each in arrays]
    found = [each for each in blocks if each is not None]
    if len(found) < len(arrays) or any(each.shape[2] > 1 and each.strides[2] != x.itemsize for each in found):
        return None
    if any(step % x.itemsize for each in found for step in each.strides):
        return None
    strides = tuple((each.strides[0] // x.itemsize, each.strides[1] // x.itemsize) for each in found)
    groups, cols, width = found[0].shape
    return Lying(groups, cols, width, strides) if inner else Lying(groups, width, 1, strides)


def _viewed(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return a view of another shape; None where only a copy has it."""
    try:
        return _reshaped(array, shape)
    except (ValueError, AttributeError):
        return None


def _columns(parameter: Array | None, trailing: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return gamma or beta as one element a column; none of them where there is no such parameter."""
    if parameter is None:
        return np.empty(0, dtype)
    return np.ascontiguousarray(np.broadcast_to(parameter, trailing), dtype).reshape(-1)


def _first(array: Array) -> Array:
    """Return the first element, which is where loops count places from."""
    return array[(slice(1),) * array.ndim].reshape(1)


def _read_only(array: Array) -> Array:
    """Return a view that cannot be written: numba compiles anew for arrays that can."""
    view = array.view()
    view.flags.writeable = False
    return view


def _go_through(
    name: str, lying: Lying, arrays: tuple[Array, ...], numbers: Sequence[float], *, in_place: bool
) -> None:
    try:
        from cupynorm.host.compiled import loops  # noqa: PLC0415  numba takes half a second to import
    except ImportError as error:
        raise ImportError(
            f"CUPYNORM_NUMBA=1 needs numba: {pip_install('numba')}, or unset the variable"
        ) from error
    groups, cols, inner, strides = lying
    dtype = arrays[0].dtype
    three = tuple(float(each) for each in (*numbers, 0.0, 0.0, 0.0)[:3])
    size = groups * cols * inner
    count = max(1, min(threading.count(), size // LEAST_OF_A_THREAD))
    how: tuple[Any, ...]
    if inner == 1:
        loop, units = loops.side_by_side(name, dtype), groups
        how = cols, tuple(step for step, _ in strides)
    else:
        of_each = -(-inner // -(-count // groups))
        width = min(inner, WIDTH, max(NARROW, -(-of_each // LINE) * LINE))
        loop, units = loops.apart(name, dtype), groups * -(-inner // width)
        how = cols, inner, width, strides
    several = max(1, min(PARTS, size // count // LEAST_OF_A_PART)) if count > 1 else 1
    each = -(-units // min(units, count * several))
    parts = [(begin, min(begin + each, units)) for begin in range(0, units, each)]

    def work(some: Sequence[tuple[int, int]]) -> None:
        for begin, end in some:
            loop(*arrays, three, begin, end, in_place, *how)

    threading.spread(parts, count, work)
