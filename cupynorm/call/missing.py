"""What becomes of nan in rows that are reduced: the keyword nan=."""

from __future__ import annotations

from typing import Any

from cupynorm._options import choice

PROPAGATE, OMIT, RAISE = NAN_POLICIES = ("propagate", "omit", "raise")


def nan_policy(given: Any, *, on_device: bool) -> str:
    """Return what nan= means; TypeError or ValueError for what is none, or that a device does not do."""
    nan = choice("nan", given, NAN_POLICIES, 'use "propagate", "omit" or "raise"')
    if nan == RAISE and on_device:
        raise ValueError(
            'nan="raise" is for NumPy arrays: to look at x on a device would wait for the device'
        )
    return nan
