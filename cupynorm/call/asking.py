"""Asking what a call would launch: it is made on NumPy arrays, checked as ever, and answers instead of computing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynorm.plan.limits import Limits


class _Answer(Exception):  # noqa: N818  no error
    """Carries the KernelSpecs of the call."""


class _Thread(threading.local):
    asks = False
    limits: Limits | None = None


_thread = _Thread()


def spec_of(call: Callable[[], Any]) -> Any:
    """Return the KernelSpec of a call, as specs_of(); the one that has variants, of several."""
    return specs_of(call)[0]


def specs_of(call: Callable[[], Any], limits: Limits | None = None) -> tuple[Any, ...]:
    """Return the KernelSpecs of a call of a public function on NumPy arrays that have elements; nothing is written.

    Those that have variants come first. limits: of the device that is asked about, which may decide how many kernels a
    call has; default: of that which the rules were measured on.
    """
    _thread.asks, _thread.limits = True, limits
    try:
        call()
    except _Answer as answer:
        return answer.args
    finally:
        _thread.asks, _thread.limits = False, None
    raise RuntimeError("the call launches nothing")


def answer(lower: Callable[[], Any]) -> None:
    """Raise the result of `lower` as the answer if this thread asks. Called before any computation on the host.

    lower: returns a KernelSpec, or a tuple of several.
    """
    if _thread.asks:
        found = lower()
        raise _Answer(*(found if type(found) is tuple else (found,)))


def limits() -> Limits | None:
    """Return the limits of the device that this thread asks about; None if it does not say."""
    return _thread.limits
