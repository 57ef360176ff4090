"""Masks of softmax: which elements it keeps (a band, a length, an array `where`), and their scale and bias."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from cupynorm._options import boolean, finite, integer, plainly, shown
from cupynorm._values import NamedTuple, dataclass
from cupynorm.call import uploads
from cupynorm.call.arguments import array_of_list, check_dtype, check_kind, view
from cupynorm.call.view import View
from cupynorm.host import reference
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Mapping


class MaskOptions(TypedDict, total=False):
    """The keywords of softmax that say which elements are kept, and scale and bias them."""

    scale: float | None
    where: Any
    lengths: Any
    left_padded: bool
    causal: bool
    causal_offset: int | None
    window: int | tuple[int | None, int | None] | None
    bias: Any


class Asked(NamedTuple):
    """The keywords of one call, as the caller gave them."""

    scale: Any = None
    where: Any = None
    lengths: Any = None
    left_padded: Any = False
    causal: Any = False
    causal_offset: Any = None
    window: Any = None
    bias: Any = None

    @property
    def says_nothing(self) -> bool:
        """Whether every keyword has the value that it has when it is not given."""
        return (
            self.where is None
            and self.lengths is None
            and self.scale is None
            and self.causal is False
            and self.causal_offset is None
            and self.window is None
            and self.bias is None
            and self.left_padded is False
        )

    def arrays(self) -> dict[str, Any]:
        """Return the arrays among them by name: of x's kind and device, and never written."""
        named = {"where": self.where, "lengths": self.lengths, "bias": self.bias}
        return {name: each for name, each in named.items() if each is not None}


def asked_of(function: str, options: Mapping[str, Any]) -> Asked | None:
    """Return the keywords of a call of `function`, None if they say nothing; TypeError for one that does not exist."""
    for name in options:
        if name not in Asked._fields:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    asked = Asked(**options)
    return None if asked.says_nothing else asked


def with_lengths(asked: Asked, x: Any, name: str = "x") -> Asked:
    """Return the keywords with an array for a list of lengths, where the array x called `name` is.

    A list is host data: its numbers are looked at, and a call on a device copies them there, on the current stream.
    """
    given = asked.lengths
    if not isinstance(given, (list, tuple)):
        return asked
    on_device = check_kind(name, x)
    host = array_of_list("lengths", given)
    if x.ndim:
        _check_lengths(host, x.shape, name)
    if on_device:
        host = uploads.uploaded(host, int(x.device.id), "lengths", "list")
    return asked._replace(lengths=host)


@dataclass(frozen=True, eq=False)
class Mask:
    """A checked mask of an x of `shape` whose last `axes` axes are normalised, independent of the kind of arrays.

    An element becomes x * scale + bias if it is kept, and is kept if all of these hold, where given:
    where: its element is not 0. lengths: column < its row's length, or column >= cols - length if left_padded.
    low, high: query + low <= column < query + high (None: no bound); query is the index on the axis before the last.

    lengths, low and high are the structure: with them axes is 1, and each row keeps columns begin to end - 1 of
    interval(). The arrays are the caller's, not broadcast: views() returns them broadcast to x.
    """

    shape: tuple[int, ...]
    axes: int
    scale: float = 1.0
    where: Any = None  # bool or uint8, broadcasts to shape
    bias: Any = None  # a supported dtype, broadcasts to shape
    lengths: Any = None  # an integer dtype, broadcasts to shape without its last axis
    left_padded: bool = False
    low: int | None = None
    high: int | None = None

    @property
    def cols(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[len(self.shape) - self.axes :])

    @property
    def queries(self) -> int:
        """Rows after which the band begins anew: a row's query is row % queries."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def has_band(self) -> bool:
        """Whether what a row keeps depends on its query."""
        return self.low is not None or self.high is not None

    @property
    def is_structural(self) -> bool:
        """Whether each row keeps an interval of its columns: columns outside of it need not be read."""
        return self.lengths is not None or self.has_band

    def interval(self, query: Any, length: Any = None) -> tuple[Any, Any]:
        """Return the interval that a row keeps: 0 <= begin <= end <= cols, and begin == end if it keeps nothing.

        query and length (None where there are no lengths) are integers, or arrays of int64. A device computes the same
        for each row, so that unchecked lengths do no harm there.
        """
        cols = self.cols
        begin, end = np.zeros_like(query), np.full_like(query, cols)
        if length is not None:
            length = np.clip(length, 0, cols)
            begin, end = (cols - length, end) if self.left_padded else (begin, length)
        if self.low is not None:
            begin = np.maximum(begin, query + self.low)
        if self.high is not None:
            end = np.minimum(end, query + self.high)
        begin = np.clip(begin, 0, cols)
        return begin, np.clip(end, begin, cols)

    @property
    def band_cols(self) -> int:
        """Columns of a row between low and high, on average over the queries and rounded up.

        That many, or fewer where there are lengths, a row keeps: a causal mask of as many queries as keys drops half.
        """
        begin = 0 if self.low is None else _sum_of_columns(self.queries, self.low, self.cols)
        all_of_them = self.queries * self.cols
        end = all_of_them if self.high is None else _sum_of_columns(self.queries, self.high, self.cols)
        return math.ceil(max(0, end - begin) / max(1, self.queries))

    @property
    def most_band_cols(self) -> int:
        """The most columns of a row between low and high, no fewer: most_kept in kernels/io/masks.cuh."""
        most = self.cols
        if self.high is not None:
            most = min(most, self.queries - 1 + self.high)
        if self.low is not None:
            most = min(most, self.cols - self.low)
        if self.low is not None and self.high is not None:
            most = min(most, self.high - self.low)
        return max(0, most)

    def views(self) -> dict[str, View]:
        """Return the arrays by name, broadcast by strides of 0; nothing is copied."""
        targets = {"where": self.shape, "bias": self.shape, "lengths": self.shape[:-1]}
        return {
            name: view(getattr(self, name), name).broadcast_to(target)
            for name, target in targets.items()
            if getattr(self, name) is not None
        }

    def on_host(self) -> reference.Masking:
        """Return the mask for NumPy arrays; only begin and end are made, of one element a row or fewer."""
        begin = end = None
        if self.is_structural:
            query = np.arange(self.queries, dtype=np.int64) if len(self.shape) > 1 else np.int64(0)
            length = None if self.lengths is None else self.lengths.astype(np.int64)
            begin, end = (np.broadcast_to(each, self.shape[:-1]) for each in self.interval(query, length))
        where, bias = (
            None if each is None else np.broadcast_to(each, self.shape) for each in (self.where, self.bias)
        )
        return reference.Masking(self.scale, bias, where, begin, end)


def _sum_of_columns(queries: int, beyond: int, cols: int) -> int:
    """Return the sum of query + beyond, within 0 to cols, of queries 0 to queries - 1: a band's bound of all rows."""
    first = min(queries, max(0, -beyond))
    last = min(queries, max(first, cols - beyond))  # from there on it is cols
    return (last - first) * (first + last - 1 + 2 * beyond) // 2 + (queries - last) * cols


def mask_of(asked: Asked, shape: tuple[int, ...], axes: int, x: str = "x") -> Mask:
    """Check the keywords of a call on an array called x, of this shape, and return what they mean.

    Kinds and devices of the arrays have been checked. Raises TypeError for dtypes and kinds of options, ValueError for
    shapes, numbers out of range, and structure along several axes or without queries.
    """
    scale = 1.0 if asked.scale is None else finite("scale", asked.scale)
    if asked.where is not None:
        _check_where(asked.where)
        _check_broadcast("where", asked.where, shape, x)
    if asked.bias is not None:
        check_dtype("bias", asked.bias)
        _check_broadcast("bias", asked.bias, shape, x)
    left_padded = boolean("left_padded", asked.left_padded)
    offset, band = _offset(asked.causal, asked.causal_offset), _window(asked.window)
    structural = {
        "lengths": asked.lengths is not None,
        "causal" if asked.causal_offset is None else "causal_offset": offset is not None,
        "window": band is not None,
    }
    for name in (name for name, given in structural.items() if given):
        if axes != 1:
            raise ValueError(f"{name} goes along one axis: axis names {axes} axes of {x}")
        if name != "lengths" and len(shape) < 2:  # noqa: PLR2004
            raise ValueError(f"{name} is over two axes, queries and keys: {x} has 1 axis, shape {shape}")
    if asked.lengths is not None:
        _check_lengths(asked.lengths, shape, x)
    elif left_padded:
        raise ValueError("left_padded says at which end of a row lengths count: give lengths, too")
    low, high = (None, None) if band is None else band
    diagonal = offset or 0
    low = None if low is None else diagonal - low
    high = None if high is None else diagonal + high + 1
    if offset is not None:
        high = diagonal + 1 if high is None else min(high, diagonal + 1)
    if (
        len(shape) > 1
    ):  # beyond these bounds all or nothing is kept: whatever number was given, sums stay in 64 bits
        low, high = (
            None if bound is None else max(-shape[-2], min(bound, shape[-1])) for bound in (low, high)
        )
    return Mask(
        shape,
        axes,
        scale,
        asked.where,
        asked.bias,
        asked.lengths,
        left_padded,
        low,
        high,
    )


def _check_where(where: Any) -> None:
    if where.dtype not in (np.bool_, np.uint8):
        raise TypeError(
            f"where has dtype {where.dtype}: use bool or uint8, where True or non-zero keeps; "
            "numbers that are added to x are a bias"
        )


def _check_broadcast(name: str, array: Any, shape: tuple[int, ...], of: str) -> None:
    try:
        view(array).broadcast_to(shape)
    except ValueError:
        raise ValueError(
            f"{name} has shape {array.shape}, {of} has {shape}: it must have that shape or broadcast to it"
        ) from None


def _check_lengths(lengths: Any, shape: tuple[int, ...], x: str) -> None:
    dtype = lengths.dtype
    if dtype.kind not in "iu":
        raise TypeError(f"lengths has dtype {dtype}: use an integer dtype")
    if not dtype.isnative:
        raise TypeError(
            f'lengths has dtype {dtype.str} (byte-swapped): lengths.astype("={dtype.str[1:]}") is a copy in the '
            "native byte order"
        )
    _check_broadcast("lengths", lengths, shape[:-1], f"{x} without its last axis")
    if devices.is_device_array(lengths) or not lengths.size:
        return  # a look at them would wait for the device
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > shape[-1]:
        raise ValueError(
            f"lengths holds {low if low < 0 else high}: the last axis of {x} has {shape[-1]} elements, "
            f"use 0 to {shape[-1]}"
        )


def _offset(causal: Any, offset: Any) -> int | None:
    """Return the diagonal's offset, None without a diagonal.

    causal takes no numbers: as an offset, the 1 of a flag that is 0 or 1 would keep one key too many.
    """
    if not isinstance(causal, (bool, np.bool_)):
        advice = "use True or False"
        if isinstance(causal, (int, np.integer)):
            advice += f"; the diagonal's offset has a name of its own, causal_offset={plainly(int(causal))}"
        raise TypeError(f"causal is {plainly(causal)}: {advice}")
    if offset is None:
        return 0 if causal else None
    return integer("causal_offset", offset, "use an integer; causal=True is the diagonal of offset 0")


def _window(window: Any) -> tuple[int | None, int | None] | None:
    """Return how many keys before and behind the diagonal's are kept; None for all."""
    if window is None:
        return None
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2:  # noqa: PLR2004
        raise ValueError(f"window is {shown(window)}: use one number, or (left, right)")
    found: list[int | None] = []
    for each in pair:
        if isinstance(each, (bool, np.bool_)) or not (each is None or isinstance(each, (int, np.integer))):
            raise TypeError(
                f"window is {plainly(window)}: use an integer, or (left, right) of integers and None"
            )
        found.append(None if each is None else int(each))
    if any(each is not None and each < 0 for each in found):
        raise ValueError(
            f"window is {plainly(window)}: sizes are 0 or more, and None keeps all keys of that side"
        )
    return found[0], found[1]
