"""Numbers and lists of a call on device arrays: host data that a kernel reads as an array."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from cupynorm.runtime import devices

MOST_BYTES = 64 << 20  # of arrays of one number that are kept

_lock = threading.RLock()  # a signal handler may run where it is held
_kept: dict[Any, Any] = {}
_kept_bytes = 0


def filled(value: float, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, name: str = "") -> Any:
    """Return a device array that holds one number everywhere. The same array comes back for the same number.

    It is written on a stream of its own, which alone is waited for, and once: so any stream may read it, and
    nothing waits for the caller's streams. It is never freed, since a graph that the caller captured may
    read it; once MOST_BYTES are kept, arrays of further numbers are made for one call.
    """
    global _kept_bytes  # noqa: PLW0603
    key = (repr(value), shape, dtype, device)  # repr tells 0.0 and -0.0 apart
    found = _kept.get(key)
    if found is not None:
        return found
    host = np.full(shape, value, dtype)
    with _lock:
        found = _kept.get(key)
        if found is not None:
            return found
        if _kept_bytes + host.nbytes <= MOST_BYTES:
            module = devices.cupy()
            with module.cuda.Device(device):
                stream = module.cuda.Stream(non_blocking=True)
                with stream:
                    made = devices.empty(shape, dtype)
                    made.data.copy_from_host_async(host.ctypes.data, host.nbytes)
                stream.synchronize()
            # a signal handler may have kept one meanwhile, and a graph may hold that one
            kept = _kept.setdefault(key, made)
            if kept is made:
                _kept_bytes += host.nbytes
            return kept
    return uploaded(host, device, name, "number")


def uploaded(host: np.ndarray[Any, Any], device: int, name: str, kind: str) -> Any:
    """Copy host data to a device, in the order of its current stream; nothing is synchronised.

    ValueError while that stream is captured into a graph: the copy would be replayed from memory that is gone.
    """
    module = devices.cupy()
    with module.cuda.Device(device):
        stream = module.cuda.get_current_stream()
        if stream.is_capturing():
            raise ValueError(
                f"{name} is a {kind}, which is copied to the device for one call, and a graph is captured: "
                "give a CuPy array"
            )
        host = np.ascontiguousarray(host)
        made = devices.empty(host.shape, host.dtype)
        if math.prod(host.shape):
            # memory that is not pinned is read before this returns
            made.data.copy_from_host_async(host.ctypes.data, host.nbytes)
    return made
