"""The memory that blocks of rows are computed in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupynorm.host.conversions import scratch_of

Array = np.ndarray[Any, Any]


class Space:
    """The memory that the blocks of one call, and one thread, are computed in."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._others: dict[tuple[str, np.dtype[Any]], Space] = {}
        self._arrays: dict[str, Array] = {}
        self._scratch: Array | None = None
        self._repeated: dict[
            int, tuple[Array, Array]
        ] = {}  # by the identity of what is repeated, which is held

    def take(self, name: str, *shape: int) -> Array:
        """Return an array of this shape, with what it held before."""
        size = math.prod(shape)
        held = self._arrays.get(name)
        if held is None or held.size < size:
            held = self._arrays[name] = np.empty(size, self.dtype)
        return held[:size].reshape(shape)

    def scratch(self, size: int) -> Array:
        """Return what narrow() works in."""
        if self._scratch is None or self._scratch.shape[1] < size:
            self._scratch = scratch_of(size)
        return self._scratch

    def other(self, name: str, dtype: np.dtype[Any]) -> Space:
        """Return a space beside this one."""
        found = self._others.get((name, dtype))
        if found is None:
            found = self._others[name, dtype] = Space(dtype)
        return found

    def forget_parameters(self) -> None:
        """Forget what was repeated: another call has other parameters."""
        self._repeated.clear()

    def repeated(self, columns: Array, times: int) -> Array:
        """Return a parameter several times, made once."""
        held = self._repeated.get(id(columns))
        if held is None:
            held = self._repeated[id(columns)] = columns, np.tile(columns, times)
        return held[1]
