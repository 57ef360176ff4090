"""Asking what a call would launch: it is made on NumPy arrays, checked as ever, and answers instead of computing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class _Answer(Exception):  # noqa: N818  no error
    """Carries the KernelSpec of the call."""


class _Thread(threading.local):
    asks = False


_thread = _Thread()


def spec_of(call: Callable[[], Any]) -> Any:
    """Return the KernelSpec of a call of a public function on NumPy arrays that have elements; nothing is written."""
    _thread.asks = True
    try:
        call()
    except _Answer as answer:
        return answer.args[0]
    finally:
        _thread.asks = False
    raise RuntimeError("the call launches nothing")


def answer(lower: Callable[[], Any]) -> None:
    """Raise the result of `lower` as the answer if this thread asks. Called before any computation on the host."""
    if _thread.asks:
        raise _Answer(lower())
