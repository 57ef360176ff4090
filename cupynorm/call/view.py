"""View: an array as a kernel sees it, on a device or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm._dtypes import Dtype
from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self


class Argument(int):
    """An integer that is another one in the next call: an array's address, or a number such as a seed.

    `argument` names the argument of the call. It is kept wherever the integer is passed on unchanged. So a bound call
    knows which words of a kernel's parameter to overwrite in the next call.
    """

    argument: str

    def __new__(cls, value: int, argument: str) -> Self:
        """Name an integer."""
        made = super().__new__(cls, value)
        made.argument = argument
        return made


ROOM = "room"  # the argument of memory where blocks of a kernel that share rows leave messages, if its plan needs any


class View(NamedTuple):
    """An array as a kernel sees it: pointer in bytes, strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype

    def split(self, axes: int) -> tuple[View, View]:
        """Return the leading axes and the `axes` trailing ones, as two views of the same first element."""
        at = len(self.shape) - axes
        leading = View(self.pointer, self.shape[:at], self.strides[:at], self.dtype)
        return leading, View(self.pointer, self.shape[at:], self.strides[at:], self.dtype)

    def reordered(self, order: Sequence[int]) -> View:
        """Return the view with its leading axes in this order."""
        rest = range(len(order), len(self.shape))
        shape, strides = (
            tuple(each[axis] for axis in (*order, *rest)) for each in (self.shape, self.strides)
        )
        return View(self.pointer, shape, strides, self.dtype)

    def collapsed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return extents and strides, in elements, with neighbouring axes that can be one made one; never none."""
        extents: list[int] = []
        strides: list[int] = []
        for extent, stride_bytes in zip(self.shape, self.strides, strict=True):
            if extent == 1:
                continue
            stride = stride_bytes // self.dtype.itemsize
            if extents and strides[-1] == stride * extent:
                extents[-1] *= extent
                strides[-1] = stride
            else:
                extents.append(extent)
                strides.append(stride)
        return (tuple(extents), tuple(strides)) if extents else ((1,), (0,))

    def is_contiguous(self) -> bool:
        """Say whether the elements are adjacent in C order."""
        extents, strides = self.collapsed()
        return len(extents) == 1 and (extents[0] == 1 or strides[0] == 1)

    def broadcast_to(self, shape: tuple[int, ...]) -> View:
        """Return the view stretched to `shape`, as NumPy broadcasts; ValueError if it cannot be."""
        missing = len(shape) - len(self.shape)
        if missing < 0 or any(
            have not in (1, want) for have, want in zip(self.shape, shape[missing:], strict=True)
        ):
            raise ValueError(f"shape {self.shape} does not broadcast to {shape}")
        strides = tuple(
            0 if have != want else stride
            for have, want, stride in zip(self.shape, shape[missing:], self.strides, strict=True)
        )
        return View(self.pointer, shape, (0,) * missing + strides, self.dtype)
