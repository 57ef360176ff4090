"""A handler on a timer calls the op that it interrupts: each call's result is its own."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.interrupted import COLS, ROADS, Call, host

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY, SECONDS = 3e-4, 1.0


@pytest.fixture
def timer() -> Iterator[None]:
    """Put back what stood on the alarm before."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ROADS)
def test_a_handler_on_a_timer_leaves_each_call_its_result(cuda: Any, timer: None, name: str) -> None:
    columns = cuda.asarray(host(COLS))
    mine, its = (Call(cuda, name, seed, columns) for seed in (1, 3))
    wrong: list[str] = []
    count = calls = 0
    busy = False

    def handler(*_: Any) -> None:
        nonlocal busy, count
        if not busy:
            busy = True
            try:
                count += 1
                if its() != its.expected:
                    wrong.append("the handler's")
            finally:
                busy = False

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        calls += 1
        if mine() != mine.expected:
            wrong.append("the interrupted one's")
    signal.setitimer(signal.ITIMER_REAL, 0)

    assert count > SECONDS / EVERY / 100
    assert not wrong, f"{len(wrong)} of {calls} calls and {count} signals"
