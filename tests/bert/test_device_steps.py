"""An encoder's graphs: whatever raises or interrupts, no freed memory is used, and no call overtakes another."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.bert import buckets, device_steps, runner, undisturbed
from cupynorm.bert.buckets import Bucket, Numbers
from cupynorm.bert.runner import Runner
from tests.interrupted import host, interrupted
from tests.simulator import simulated
from tests.simulator.machine import Order, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["simulated"]  # a fixture

HIDDEN = 32
SMALL, LARGE = Bucket(1, 8, 8, whole=True), Bucket(4, 8, 32, whole=True)
MODULES = tuple(each.__file__ for each in (buckets, device_steps, runner, undisturbed))


class BoomError(Exception):
    """What a test raises."""


class Calls:
    """Calls of a runner whose steps are two kernels, with memory between them."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.runner = Runner(dtype_of("float32"), HIDDEN)
        self._bias = xp.asarray(host(HIDDEN))
        self.hooks: dict[str, Callable[[], None]] = {}
        self.given: Any = None  # hidden states where they are read
        self.computed = 0  # how often: at first to compile, then into a graph

    def _at(self, place: str) -> None:
        self.hooks.get(place, lambda: None)()

    def _compute(self, _: Any, hidden: Any) -> Any:
        self.computed += 1
        between = cupynorm.bias_gelu(hidden, self._bias)
        y = cupynorm.bias_gelu(between, self._bias)
        del between
        self._at("compute" if self.computed == 1 else "capture")
        return y

    def __call__(self, x: Any, bucket: Bucket = SMALL) -> bytes:
        """Return the bits of the result."""
        y = self.xp.empty(x.shape, np.float32)

        def put_in(to: Any) -> None:
            self.given = device_steps.copied(x, to, None)
            self._at("put in")

        def take_out(made: Any) -> Any:
            self._at("take out")
            return device_steps.copied(made, y, None)

        self.computed = 0
        numbers = Numbers.of(bucket)
        return self.xp.asnumpy(
            self.runner.run("key", bucket, self._compute, numbers, None, put_in, take_out)
        ).tobytes()

    def wanted(self, x: Any) -> bytes:
        """Return the bits of the same without a runner."""
        return self.xp.asnumpy(cupynorm.bias_gelu(cupynorm.bias_gelu(x, self._bias), self._bias)).tobytes()


@pytest.fixture
def calls(simulated: Any) -> Iterator[Calls]:
    yield Calls(simulated.cupy)
    machine.start("h200")


def rows(calls: Calls, bucket: Bucket = SMALL, seed: int = 0) -> Any:
    return calls.xp.asarray(host(bucket.tokens, HIDDEN, seed=seed))


def test_a_graph_gives_what_its_steps_give(calls: Calls) -> None:
    for seed in range(3):
        x = rows(calls, seed=seed)
        assert calls(x) == calls.wanted(x)
    assert len(calls.runner._graphs) == 1


def test_no_graph_is_replayed_on_memory_that_the_pool_gave_back(calls: Calls) -> None:
    x = rows(calls)
    calls(x)
    machine.room = 0

    with pytest.raises(calls.xp.cuda.memory.OutOfMemoryError):
        calls(rows(calls, LARGE), LARGE)

    machine.room = 1 << 30
    assert not calls.runner._graphs
    assert calls(x) == calls.wanted(x)


def test_a_graph_during_whose_capture_the_pool_ran_short_is_captured_again(calls: Calls) -> None:
    x, large = rows(calls), rows(calls, LARGE)
    calls(x)

    def others_take_all() -> None:
        del calls.hooks["capture"]
        machine.room = 0
        calls.xp.empty(7, np.float32)  # for which the pool gives back what the first kernel wrote
        machine.room = 1 << 30

    calls.hooks["capture"] = others_take_all

    assert calls(large, LARGE) == calls.wanted(large)
    assert calls(large, LARGE) == calls.wanted(large)
    assert calls(x) == calls.wanted(x)


def test_a_pool_that_is_short_in_each_capture_is_told_of(calls: Calls) -> None:
    sizes = iter(range(1, 99))

    def others_take_all() -> None:
        machine.room = 0
        calls.xp.empty(next(sizes), np.float32)
        machine.room = 1 << 30

    calls.hooks["capture"] = others_take_all
    x = rows(calls)

    with pytest.raises(MemoryError, match="while a graph was captured"):
        calls(x)

    calls.hooks.clear()
    assert not calls.runner._graphs
    assert calls(x) == calls.wanted(x)


def in_streams(calls: Calls, first: Callable[[], None], then: Callable[[], None]) -> None:
    """Do something in one stream, then something in another; all of the second must come behind all of the first."""
    machine.order = order = Order()
    streams = [calls.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    with streams[0]:
        first()
    behind = len(order.done)
    with streams[1]:
        then()
    assert behind < len(order.done)
    for stream, what, before in order.done[behind:]:
        assert before >= set(range(behind)), f"{what} in stream {stream} does not wait for what was in flight"


def boom() -> None:
    raise BoomError


@pytest.mark.parametrize("place", ["put in", "compute", "capture", "take out"])
def test_the_next_call_is_behind_what_one_that_failed_has_launched(calls: Calls, place: str) -> None:
    x, large = rows(calls), rows(calls, LARGE)
    calls(x)

    def fail() -> None:
        calls.hooks[place] = boom
        with pytest.raises(BoomError):
            calls(large, LARGE)
        calls.hooks.clear()

    def succeed() -> None:
        assert calls(x) == wanted[0]
        assert calls(large, LARGE) == wanted[1]

    wanted = calls.wanted(x), calls.wanted(large)
    in_streams(calls, fail, succeed)
    assert machine.captured is None


@pytest.mark.parametrize("place", ["put in", "compute", "capture"])
def test_a_call_that_failed_holds_no_memory(calls: Calls, place: str) -> None:
    x, held = rows(calls), []

    def fail() -> None:
        held.append(weakref.ref(calls.given))
        raise BoomError

    calls.hooks[place] = fail
    gc.disable()  # a cycle would hold it until the next collection
    try:
        with contextlib.suppress(BoomError):
            calls(x)
        calls.given = None
        assert [each() for each in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("known", [True, False])
def test_a_handler_that_raises_anywhere_leaves_the_next_call_in_order(calls: Calls, known: bool) -> None:
    x = rows(calls)
    wanted, places = calls.wanted(x), 0

    def count() -> None:
        nonlocal places
        places += 1

    calls(x)
    if not known:
        calls.runner.release()
    with interrupted(count, MODULES):
        calls(x)
    assert places > 20
    for place in range(places):
        if not known:
            calls.runner.release()
        left = iter(range(place, -1, -1))

        def handler(left: Iterator[int] = left) -> None:
            if next(left, None) == 0:
                raise KeyboardInterrupt

        def fail(handler: Callable[[], None] = handler) -> None:
            with pytest.raises(KeyboardInterrupt), interrupted(handler, MODULES):
                calls(x)

        def succeed() -> None:
            assert calls(x) == wanted

        in_streams(calls, fail, succeed)


@pytest.mark.parametrize("known", [True, False])
def test_a_handler_may_call_the_encoder_that_it_interrupts(calls: Calls, known: bool) -> None:
    x, other = rows(calls), rows(calls, seed=1)
    wanted, its = calls.wanted(x), calls.wanted(other)
    if known:
        calls(x)
    gave: list[bytes] = []

    with interrupted(lambda: gave.append(calls(other)), MODULES):
        found = calls(x)

    assert found == wanted
    assert set(gave) == {its}
    assert calls(x) == wanted


def test_a_handler_may_release_the_encoder_that_it_interrupts(calls: Calls) -> None:
    x = rows(calls)
    wanted = calls.wanted(x)
    for _ in range(2):
        with interrupted(calls.runner.release, MODULES):
            assert calls(x) == wanted

    with interrupted(calls.runner.release, MODULES):
        calls(x)
    assert not calls.runner._graphs


def test_a_handler_may_call_the_encoder_that_is_being_released(calls: Calls) -> None:
    x = rows(calls)
    wanted, gave = calls(x), []

    with interrupted(lambda: gave.append(calls(x)), MODULES):
        calls.runner.release()

    assert set(gave) == {wanted}
    assert calls(x) == wanted


def test_what_a_handler_does_during_a_capture_is_not_captured(calls: Calls) -> None:
    x, other = rows(calls), rows(calls, seed=1)
    wanted, its = calls.wanted(x), calls.wanted(other)
    y, done, gave = calls.xp.empty(other.shape, np.float32), threading.Event(), []

    def handler(*_: Any) -> None:
        cupynorm.bias_gelu(other, calls._bias, out=y)
        gave.extend((calls.xp.asnumpy(y).tobytes(), cupynorm.bias_gelu(other.get(), calls._bias.get()).shape))
        done.set()

    def interrupt() -> None:
        calls.hooks.clear()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        assert done.wait(30)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        calls.hooks["capture"] = interrupt
        assert calls(x) == wanted
    finally:
        signal.signal(signal.SIGALRM, before)

    assert gave[0] == calls.xp.asnumpy(cupynorm.bias_gelu(other, calls._bias)).tobytes()
    y.data.memset_async(0, y.nbytes)
    assert calls(x) == wanted
    assert not np.any(calls.xp.asnumpy(y))  # no replay writes there
    assert calls(other) == its
