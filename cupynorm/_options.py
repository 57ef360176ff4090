"""Checks of options that are no arrays. Each error names the option, its value, and the allowed values."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_FLOAT32 = float(np.finfo(np.float32).max)
LEAST_EPS = 2.0**-252  # its square root has an inverse that float32 holds
LONGEST = 60  # characters of a value in a message
VOWELS = ("a", "e", "i", "o")  # names of types that begin with one have "an" before them; a uint8 has not


def shown(value: object) -> str:
    """Say what came: short values as they are written, anything else by its type."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return repr(value)
    if isinstance(value, (int, float, complex, str, bytes, np.number, tuple, list, dict)):
        try:
            text = repr(value)
        except ValueError:  # an integer of too many digits
            text = ""
        if 0 < len(text) <= LONGEST:
            kind = type(value).__qualname__
            return f"{text} ({'an' if kind.startswith(VOWELS) else 'a'} {kind})"
    if isinstance(value, int):
        return f"an int of {value.bit_length()} bits"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def boolean(name: str, value: Any) -> bool:
    """Return an option that is on or off; TypeError for anything but Python's and NumPy's booleans."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {plainly(value)}: use True or False")


def integer(name: str, value: Any, advice: str = "give an integer") -> int:
    """Return an integer of Python's or NumPy's; TypeError for anything else, booleans included."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"{name} is {plainly(value)}: {advice}")


def finite(name: str, value: Any, advice: str = "it must be finite") -> float:
    """Return a number as a float.

    TypeError if it is no number, or is a boolean or an array; ValueError if it is not finite, or exceeds every float.
    """
    if type(value) is float and -math.inf < value < math.inf:  # as a rule, and half a microsecond sooner
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {shown(value)}: give a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} is {plainly(value)}: {advice}")
    return found


def eps_of(value: Any, name: str = "eps") -> float:
    """Return eps as a float; TypeError if it is no number, ValueError if it is negative or not finite."""
    allowed = "it must be 0 or a positive finite number"
    found = finite(name, value, allowed)
    if found < 0:
        raise ValueError(f"{name} is {value}: {allowed}")
    return found


def within(compute: np.dtype[Any], /, **numbers: float | None) -> None:
    """ValueError for a finite number that the type of arithmetic does not hold: as inf it would make nan of zeros."""
    for name, value in numbers.items():
        if value is not None and compute.itemsize < 8 and MOST_FLOAT32 < abs(value) < math.inf:  # noqa: PLR2004
            raise ValueError(f'{name} is {value}, beyond {compute}: give dtype="float64"')


def eps_within(compute: np.dtype[Any], eps: float, name: str = "eps") -> float:
    """Return eps for the type of arithmetic, where none but 0 may vanish: a row of zeros is divided by its root."""
    within(compute, **{name: eps})
    return max(eps, LEAST_EPS) if eps and compute.itemsize < 8 else eps  # noqa: PLR2004


def choice(name: str, value: Any, allowed: Sequence[str], advice: str) -> str:
    """Return one of the allowed names; TypeError if it is no str, ValueError for another name."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}: {advice}")
    if value not in allowed:
        raise ValueError(f"{name} is {plainly(value)}: {advice}")
    return value


def plainly(value: object) -> str:
    """Return a text for a value, without its type if the value is short."""
    said = shown(value)
    return said.rpartition(" (a")[0] or said
