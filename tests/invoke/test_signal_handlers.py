"""A signal handler may call the op that it interrupts: each call launches with its own arrays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from cupynorm.invoke import bound_calls, row_ops
from cupynorm.runtime import compiler, tuned_plans
from tests import simulator
from tests.interrupted import COLS, ROADS, Call, host, interrupted
from tests.simulator import simulated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["simulated"]  # a fixture

road = pytest.mark.parametrize("name", ROADS)
devices = pytest.mark.parametrize("device", ["h200", "a100"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> tuple[Call, Call]:
    """Give two calls that are launched with the same words; both were made before."""
    xp = simulator.install(monkeypatch, device).cupy
    columns = xp.asarray(host(COLS))
    return Call(xp, name, 1, columns), Call(xp, name, 3, columns)


@road
@devices
def test_a_call_that_is_interrupted_by_its_like_launches_with_its_own_arrays(
    calls: tuple[Call, Call],
) -> None:
    mine, its = calls
    gave: list[list[bytes]] = []

    with interrupted(lambda: gave.append(its())):
        found = mine()

    assert found == mine.expected
    assert gave
    assert all(each == its.expected for each in gave)


@road
@devices
def test_a_handler_that_raises_leaves_nothing_behind(calls: tuple[Call, Call]) -> None:
    mine, its = calls
    places = 0

    def count() -> None:
        nonlocal places
        places += 1

    with interrupted(count):
        mine()
    for place in range(places):
        left = iter(range(place, -1, -1))

        def handler(left: Iterator[int] = left) -> None:
            if next(left, None) == 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), interrupted(handler):
            mine()

        assert its() == its.expected
        assert mine() == mine.expected


def test_a_handler_may_add_to_what_is_remembered_while_room_is_made_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_calls, "MOST", 2)
    known: dict[Any, Any] = {}

    for key in range(5):
        with interrupted(lambda: bound_calls.add(known, object(), None)):
            bound_calls.add(known, key, "value")
        assert known[key] == "value"

    bound_calls.add(known, "last", None)
    assert len(known) == 2


@pytest.mark.parametrize(
    "where", [compiler._kernels, row_ops, tuned_plans], ids=["_compile", "_row", "_tuned"]
)
def test_no_lock_stops_its_own_thread(where: Any) -> None:
    with where._lock:
        assert where._lock.acquire(blocking=False)
        where._lock.release()


def test_a_handler_may_call_the_op_whose_kernel_is_being_compiled(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = simulated.cupy.asarray(host(COLS))
    mine, its = (Call(simulated.cupy, "softmax", seed, columns) for seed in (1, 3))
    monkeypatch.setattr(compiler, "_kernels", compiler.Kernels())
    row_ops.forget()
    load, found = compiler._load, []

    def compile_interrupted(*given: Any, **more: Any) -> Any:
        assert all(
            lock.acquire(blocking=False) for lock in compiler._kernels._loading.values()
        )  # else it would wait for ever
        if not found:
            found.append(None)
            found[0] = its()
        return load(*given, **more)

    monkeypatch.setattr(compiler, "_load", compile_interrupted)

    assert mine() == mine.expected
    assert found == [its.expected]
    kernels = {each.pointer for each in compiler._kernels}
    assert {
        launched.kernel.pointer for launched in row_ops._launches.values()
    } == kernels  # the other one is gone


def test_a_thread_that_an_interrupted_one_waits_for_compiles_its_kernel_itself(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "PATIENCE", 0.05)
    columns = simulated.cupy.asarray(host(COLS))
    call = Call(simulated.cupy, "softmax", 1, columns)
    locks = list(compiler._kernels._loading.values())
    compiler._kernels._found.clear()
    row_ops._launches.clear()
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(call()))  # another thread remembers no call

    for lock in locks:
        lock.acquire()
    thread.start()
    thread.join(60)
    for lock in locks:
        lock.release()

    assert locks
    assert found == [call.expected]
