"""Asking what a call would launch: it is made on NumPy arrays, checked as ever, and answers instead of computing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynorm.plan.config import Plan
    from cupynorm.plan.limits import Limits


class _Answer(Exception):  # noqa: N818  no error
    """Carries the KernelSpecs of the call."""


class About(NamedTuple):
    """What may decide how many kernels a call has: the device that is asked about, and a plan that is forced.

    limits: of the device; None: of that which the rules were measured on.
    """

    limits: Limits | None
    plan: str | Plan | None


class _Thread(threading.local):
    asks = False
    about = About(None, None)


_thread = _Thread()


def spec_of(call: Callable[[], Any]) -> Any:
    """Return the KernelSpec of a call, as specs_of(); the one that has variants, of several."""
    return specs_of(call)[0]


def specs_of(
    call: Callable[[], Any], limits: Limits | None = None, plan: str | Plan | None = None
) -> tuple[Any, ...]:
    """Return the KernelSpecs of a call of a public function on NumPy arrays that have elements; nothing is written.

    Those that have variants come first. limits, plan: as those of About.
    """
    _thread.asks, _thread.about = True, About(limits, plan)
    try:
        call()
    except _Answer as answer:
        return answer.args
    finally:
        _thread.asks, _thread.about = False, About(None, None)
    raise RuntimeError("the call launches nothing")


def answer(lower: Callable[[], Any]) -> None:
    """Raise the result of `lower` as the answer if this thread asks. Called before any computation on the host.

    lower: returns a KernelSpec, or a tuple of several.
    """
    if _thread.asks:
        found = lower()
        raise _Answer(*(found if type(found) is tuple else (found,)))


def about() -> About:
    """Return what this thread asks about."""
    return _thread.about
