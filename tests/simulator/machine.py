"""The pretended devices: which there are, which is current, and what each allows."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from cupynorm.plan import limits as known_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

STATIC_LIMIT = 49152  # shared bytes a block may use without opt-in
MAX_BLOCK = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
REGISTERS = 64  # of every kernel, or as many as its launch bounds leave: nothing here allocates registers


class Order:
    """What streams and the host have waited for: each does its own things in turn, and knows which others came before.

    done: what was noted, as (stream, what, the numbers of what surely came before).
    """

    def __init__(self) -> None:
        self.done: list[tuple[int, str, frozenset[int]]] = []
        self.streams: dict[int, frozenset[int]] = {}
        self.host: frozenset[int] = frozenset()

    def of(self, stream: int) -> frozenset[int]:
        """Return the numbers of what surely comes before anything new in a stream."""
        return self.streams.get(stream, frozenset()) | self.host

    def note(self, stream: int, what: str) -> None:
        """Note that a stream does something."""
        before = self.of(stream)
        self.streams[stream] = before | {len(self.done)}
        self.done.append((stream, what, before))

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.host = frozenset(range(len(self.done)))


class NoOrder(Order):
    """Notes nothing, which most tests do not look at."""

    def note(self, stream: int, what: str) -> None:
        """Note nothing."""


class Machine:
    """Devices by name of cupynorm.plan.limits.RECORDED; the current device and stream are each Python thread's own."""

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ("h200",)
        self.room = sys.maxsize  # bytes that cuda.Memory may take
        self.order: Order = NoOrder()
        self.share_refusal = (
            ""  # the error by which cooperative launches are refused, as in a share of a device
        )
        self.capturing = False  # what streams say of graphs; nothing is captured here
        self._own = threading.local()

    @property
    def current(self) -> int:
        """The number of the current device."""
        return getattr(self._own, "current", 0)

    @current.setter
    def current(self, device: int) -> None:
        self._own.current = device

    @property
    def stream(self) -> int:
        """The handle of the current stream."""
        return getattr(self._own, "stream", 0)

    @stream.setter
    def stream(self, handle: int) -> None:
        self._own.stream = handle

    @property
    def captured(self) -> Any:
        """The graph that this thread captures, or None."""
        return getattr(self._own, "captured", None)

    @captured.setter
    def captured(self, graph: Any) -> None:
        self._own.captured = graph

    def limits(self, device: int | None = None) -> known_limits.Limits:
        """Return the recorded limits of a device, the current one unless told."""
        return known_limits.RECORDED[self.devices[self.current if device is None else device]]

    def opt_in_bytes(self, device: int | None = None) -> int:
        """Return the shared bytes that a block may use with opt-in, static and dynamic together."""
        return self.limits(device).shared_bytes_per_block + known_limits.STATIC_SHARED_BYTES

    def start(self, devices: str | Sequence[str]) -> None:
        """Begin anew with these devices."""
        chosen = (devices,) if isinstance(devices, str) else tuple(devices)
        for name in chosen:
            if name not in known_limits.RECORDED:
                raise ValueError(
                    f"no limits are recorded for {name!r}: use {', '.join(known_limits.RECORDED)}"
                )
        self.devices, self.current, self.stream = chosen, 0, 0
        self.room, self.order, self.captured, self.share_refusal = sys.maxsize, NoOrder(), None, ""


machine = Machine()
