"""Blocks of rows, spread over threads: as many as CUPYNORM_THREADS says, one where it is not set.

One, because NumPy's own functions take one, and because what calls us is often one of several workers itself (Dask,
joblib, MPI), which would fight for the cores. A row is computed by one thread, and in the same way however many there
are, so results have the same bits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    T = TypeVar("T")

MOST = 1024

_pools: dict[int, ThreadPoolExecutor] = {}  # by their numbers of threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a child has no threads but its own


def count() -> int:
    """Return how many threads a call may use; ValueError says what the variable holds if that is no such number."""
    text = os.environ.get("CUPYNORM_THREADS", "").strip()
    if not text:
        return 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise ValueError(f"CUPYNORM_THREADS is {text!r}: use a whole number of threads, 1 to {MOST}")
    return int(text)


def spread(items: Sequence[T], threads: int, work: Callable[[Sequence[T]], None]) -> None:
    """Call work(some of the items) in each of up to `threads` threads, ours among them; return when all is done."""
    threads = min(threads, len(items))
    if threads <= 1:
        work(items)
        return
    from concurrent.futures import ThreadPoolExecutor, wait  # noqa: PLC0415  who has one thread need not wait for it

    pool = _pools.get(threads)
    # two threads that come here at once make two, of which one is dropped when its work is done
    if pool is None:
        pool = _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="cupynorm")
    others = [pool.submit(work, items[first::threads]) for first in range(1, threads)]
    try:
        work(items[::threads])
    finally:
        wait(others)  # they write into the caller's arrays
    for each in others:
        each.result()
