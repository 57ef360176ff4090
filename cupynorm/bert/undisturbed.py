"""Calls that no signal handler interrupts."""

from __future__ import annotations

import _thread
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


HANDLERS_WAIT = 0.05  # seconds, at most, for a signal that came just before the main thread began to wait


def undisturbed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), called where no signal handler runs: in a thread that is not the main one.

    Handlers run in the main thread meanwhile, which waits. Their exceptions are raised when the function has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    call = _Undisturbed(function, arguments)
    raised: BaseException | None = None
    try:
        call.begin()
    except BaseException as error:
        if not call.begun:
            raise
        raised = error
    while True:
        try:
            while not call.over:
                call.ended.acquire(timeout=HANDLERS_WAIT)
            break
        except BaseException as error:  # noqa: BLE001  the function's arrays are kept until it ends
            raised = error
    failed, call.error = raised or call.error, None
    try:
        if failed is not None:
            raise failed
        return call.result
    finally:
        del call, raised, failed  # its traceback holds this frame, and would hold arrays in a cycle


class _Undisturbed:
    """A call in a thread of its own.

    Made of plain locks: a handler that raises inside threading's Event or Thread.start, which are Python functions,
    may leave them locked for ever.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._gate, self.ended = threading.Lock(), threading.Lock()
        self._gate.acquire()
        self.ended.acquire()
        self.begun = self.over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Start the thread. If a handler raises here, `begun` says whether the function is called all the same."""
        try:
            _thread.start_new_thread(self._run, ())
            self.begun = True
        finally:
            self._gate.release()

    def _run(self) -> None:
        self._gate.acquire()
        try:
            if self.begun:
                self.result = self._function(*self._arguments)
        except BaseException as error:  # noqa: BLE001  it is raised where the caller waits
            self.error = error
        self._arguments = ()  # else arrays would live until this thread has ended, which nobody waits for
        self.over = True
        self.ended.release()
