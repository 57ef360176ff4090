"""Plain ops on float32 and float64 rows of NumPy arrays, in loops that numba compiles, where CUPYNORM_NUMBA is 1.

run() returns False for all other calls, which then go through the blocks of blocks.py. The loop is chosen by dtype and
memory layout alone, so a row has the same bits whatever rows are computed with it. Nothing is checked here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import FLOAT32, FLOAT64
from cupynorm._install import pip_install
from cupynorm._values import NamedTuple
from cupynorm.host import threads as threading
from cupynorm.host.slabs import _inner, _laid, lie_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

TYPES = {FLOAT32, FLOAT64}
MIN_PER_THREAD = 1 << 17  # elements: a tenth of a millisecond of work, twice what it takes to wake a thread
PARTS = 4  # of each thread's share, so that one that is late leaves some to the others
MIN_PER_PART = 1 << 18  # elements
MAX_WIDTH = 4096  # neighbouring rows that are computed at once: long runs of memory (docs/notes/072)
MIN_WIDTH = 512  # where threads share them: shorter runs cost more than a second thread saves
LINE = 16  # float32 elements of a cache line, which no two threads write to


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


class Layout(NamedTuple):
    """How rows of `cols` elements lie: in groups of `inner` rows that are neighbours.

    strides: how many elements lie from a group to the next, and from an element of a row to the next, in x, the others
    and the result.
    """

    groups: int
    cols: int
    inner: int
    strides: tuple[tuple[int, int], ...]

    @property
    def side_by_side(self) -> bool:
        """Whether the elements of each row are neighbours, in all arrays."""
        return self.inner == 1 and (self.cols == 1 or all(step == 1 for _, step in self.strides))


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
    shared = [] if out is None else _that_share_memory(out, x, others, scale, shift)
    if out is not None and not all(_is_the_same(each, out) for each in shared):
        return False
    layout = _layout_of(arrays, axes)
    if layout is None:
        return False
    trailing = x.shape[x.ndim - axes :]
    columns = [_columns(each, trailing, x.dtype) for each in (scale, shift)]
    of_rows = np.empty((layout.groups * layout.inner, 2))
    result = np.empty(1, x.dtype) if out is None else _first(out)
    read = [_read_only(each) for each in (*map(_first, arrays[:2]), *columns)]
    _go_through(name, layout, (*read, result, of_rows), numbers, in_place=bool(shared))
    with np.errstate(all="ignore"):
        for column, statistic in enumerate(statistics):
            if statistic is not None:
                statistic[...] = of_rows[:, column].reshape(statistic.shape)
    return True


def _that_share_memory(out: Array, *arrays: Array | None) -> list[Array]:
    return [each for each in arrays if each is not None and np.may_share_memory(each, out)]


def _is_the_same(one: Array, out: Array) -> bool:
    """Say whether each element of `one` is at the place of the result that is computed from it."""
    return (one.ctypes.data, one.shape, one.strides) == (out.ctypes.data, out.shape, out.strides)


def _layout_of(arrays: Sequence[Array], axes: int) -> Layout | None:
    """Return how the rows of arrays of one shape lie; None if no loop knows it."""
    x = arrays[0]
    neighbours = _inner(x, axes) if lie_apart(x, axes) else 0
    found = [each for each in (_laid(array, neighbours, axes) for array in arrays) if each is not None]
    if len(found) < len(arrays) or any(step % x.itemsize for each in found for step in each.strides):
        return None
    strides = tuple((each.strides[0] // x.itemsize, each.strides[1] // x.itemsize) for each in found)
    groups, cols, inner = found[0].shape
    layout = Layout(groups, cols, inner, strides)
    return layout if neighbours or layout.side_by_side else None


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
    name: str, layout: Layout, arrays: tuple[Array, ...], numbers: Sequence[float], *, in_place: bool
) -> None:
    try:
        from cupynorm.host.compiled import loops  # noqa: PLC0415  numba takes half a second to import
    except ImportError as error:
        raise ImportError(
            f"CUPYNORM_NUMBA=1 needs numba: {pip_install('numba')}, or unset the variable"
        ) from error
    groups, cols, inner, strides = layout
    dtype = arrays[0].dtype
    three = tuple(float(each) for each in (*numbers, 0.0, 0.0, 0.0)[:3])
    size = groups * cols * inner
    count = max(1, min(threading.count(), size // MIN_PER_THREAD))
    how: tuple[Any, ...]
    if layout.side_by_side:
        loop, units = loops.side_by_side(name, dtype), groups
        how = cols, tuple(step for step, _ in strides)
    else:
        of_each = -(-inner // -(-count // groups))
        width = min(inner, MAX_WIDTH, max(MIN_WIDTH, -(-of_each // LINE) * LINE))
        loop, units = loops.apart(name, dtype), groups * -(-inner // width)
        how = cols, inner, width, strides
    several = max(1, min(PARTS, size // count // MIN_PER_PART)) if count > 1 else 1
    each = -(-units // min(units, count * several))
    parts = [(begin, min(begin + each, units)) for begin in range(0, units, each)]

    def work(some: Sequence[tuple[int, int]]) -> None:
        for begin, end in some:
            loop(*arrays, three, begin, end, in_place, *how)

    threading.spread(parts, count, work)
