"""Counts the functions that a warm call enters: what takes time before its launch, whatever else the machine does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupynorm

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = str(Path(cupynorm.__file__).parent)


def frames(call: Callable[[], Any]) -> int:
    """Return how many Python functions of the package a warm call enters."""
    call()
    call()
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count
