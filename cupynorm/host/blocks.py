"""The blocks of rows that an array is cut into, and the threads that go through them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.host import reference
from cupynorm.host import threads as threading
from cupynorm.host.conversions import FEW
from cupynorm.host.rows import WIDE, Rows, _cut, _whole
from cupynorm.host.slabs import Passing, Slab, lie_apart, slabs_of
from cupynorm.host.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynorm.host.reference import Index

Array = np.ndarray[Any, Any]

LEAST_THREADED = 1 << 16  # elements up to which a call, and a block, is not worth a thread of its own
# Elements of NumPy's buffers where what is broadcast has runs of WIDE and more: fewer, so that it does not fill them.
DIRECT = 256


def each_block(
    x: Array,
    axes: int,
    dtype: np.dtype[Any],
    work: Callable[[Rows], None],
    out: Array | None = None,
    reads: Sequence[Array | None] = (),
    *,
    alone: bool = False,
    in_order: bool = False,
    kept: bool = True,
) -> None:
    """Call work(rows) for blocks of x's rows, which have its last `axes` axes, in as many threads as may be used.

    dtype: that of arithmetic. out: where values may be computed if it has this dtype, and lies in one piece, and shares
    no memory with x or with what else is read. alone: whether rows are computed without masks and other arrays of x's
    shape, so that they may be those of a Slab. in_order: whether one block has to follow the other, by one thread.
    kept: whether what is made of the elements is looked at more than once.
    """
    if not x.size:
        return
    apart = alone and not x.flags.c_contiguous and lie_apart(x, axes)
    kind: type[Rows] = Slab if apart else Rows
    home = out if out is not None and _is_home(out, dtype, (x, *reads), anywhere=apart) else None
    limit = reference.BLOCK * 8 // dtype.itemsize
    if x.size <= min(limit, LEAST_THREADED):
        _go_through(kind, [_whole(x.ndim - axes)], x, [_whole(axes)], axes, dtype, work, home)
        return
    threads = 1 if in_order else threading.count()
    most = limit
    if threads > 1:  # two blocks a thread, if that makes no block too small
        most = min(limit, max(LEAST_THREADED, x.size // (2 * threads)))
    if apart:
        tiles, pieces = slabs_of(x, axes, limit, most, stays=home is not None or not kept)
        if not kept and len(pieces) > 1:
            kind = Passing
    else:
        leading, trailing = x.shape[: x.ndim - axes], x.shape[x.ndim - axes :]
        tiles, pieces = _cut(leading, max(1, most // math.prod(trailing))), _cut(trailing, limit)
    threading.spread(tiles, threads, lambda some: _go_through(kind, some, x, pieces, axes, dtype, work, home))


def _go_through(
    kind: type[Rows],
    tiles: Sequence[Index],
    x: Array,
    pieces: Sequence[Index],
    axes: int,
    dtype: np.dtype[Any],
    work: Callable[[Rows], None],
    home: Array | None,
) -> None:
    """Call work(rows) for some blocks; NumPy's settings are those of the thread."""
    free = _spaces.setdefault(dtype, [])
    try:
        space = free.pop()
    except IndexError:
        space = Space(dtype)
    with np.errstate(all="ignore"):
        direct = x.size > FEW and (kind is not Rows or x.shape[-1] >= WIDE)
        before = np.setbufsize(DIRECT) if direct else None
        try:
            for at in tiles:
                work(kind(x, at, pieces, axes, space, home))
        finally:
            if before is not None:
                np.setbufsize(before)
            space.forget_parameters()
            free.append(space)


# Spaces that nobody works in, by dtype: a few MiB for each thread that has ever computed. Else the C library may hand
# such memory back to the system after each call, which costs more than the arithmetic (docs/notes/060).
_spaces: dict[np.dtype[Any], list[Space]] = {}


def _is_home(
    out: Array, dtype: np.dtype[Any], others: Sequence[Array | None], *, anywhere: bool = False
) -> bool:
    if out.dtype != dtype or not (anywhere or out.flags.c_contiguous):
        return False
    given = [each for each in others if each is not None]
    return not any(map(np.may_share_memory, given, [out] * len(given)))
