"""Which tokens of a batch are computed, and the order in which they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupynorm.bert.buckets import Bucket, Numbers
from cupynorm.call.arguments import array_of_list
from cupynorm.call.subclasses import check_subclass
from cupynorm.runtime import devices

Array = np.ndarray[Any, Any]


class SameLength(NamedTuple):
    """Sequences of one length, which are adjacent among the packed tokens."""

    start: int  # the packed token at which the first one begins
    sequences: int
    length: int

    @property
    def stop(self) -> int:
        """The packed token after the last one."""
        return self.start + self.sequences * self.length


class Packed(NamedTuple):
    """The tokens that are computed: those that mask or lengths keep, the shortest sequences first."""

    shape: tuple[int, int]  # (batch, seq) of the input
    rows: Array  # the sequence of each packed token
    columns: Array  # the position of each packed token in its sequence
    order: Array  # the sequences in the order in which they are packed
    lengths: Array  # tokens of each packed sequence
    where: Array | None = None  # [batch, 1, seq, seq], for a mask of pairs; then all tokens are packed

    @property
    def starts(self) -> Array:
        """The first packed token of each packed sequence."""
        starts: Array = np.cumsum(self.lengths) - self.lengths
        return starts

    def groups(self) -> list[SameLength]:
        """Return the sequences grouped by length. Empty sequences are in no group."""
        found, start = [], 0
        for length, count in zip(*np.unique(self.lengths, return_counts=True), strict=True):
            if length:
                found.append(SameLength(start, int(count), int(length)))
                start = found[-1].stop
        return found

    def numbers(self, bucket: Bucket) -> Numbers:
        """Return the index tensors that a device's graph reads."""
        made = Numbers.of(bucket)
        made.lengths[: self.lengths.size], made.begin[: self.lengths.size] = self.lengths, self.starts
        made.start[self.order], made.count[self.order] = self.starts, self.lengths
        if not bucket.whole:
            at = np.arange(self.rows.size)
            sequences = np.repeat(np.arange(self.lengths.size), self.lengths)
            made.places[: at.size] = sequences * bucket.length + at - self.starts[sequences]
            made.rows[made.places[: at.size]] = at
        return made


def check_host_array(name: str, array: object) -> None:
    """Raise TypeError unless `array` is a NumPy array."""
    if devices.is_device_array(array):
        raise TypeError(f"{name} is a CuPy array, on a device: give a NumPy array (cupy.asnumpy makes one)")
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__module__}.{type(array).__qualname__}: give a NumPy array"
        )
    check_subclass(name, array, on_device=False)


def integers(name: str, array: object) -> Array:
    """Return an array of integers. Raises TypeError for anything else."""
    check_host_array(name, array)
    found: Array = array  # type: ignore[assignment]  # checked above
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {found.dtype}: give integers")
    return found


def _array_of(name: str, given: Any) -> Any:
    """Convert a list or tuple of integers to an array; return anything else as it is."""
    return array_of_list(name, given) if isinstance(given, (list, tuple)) else given


def padded(name: str, sequences: Sequence[Any]) -> tuple[Array, Array]:
    """Return sequences as an array [batch, longest], padded with 0, and their lengths."""
    arrays = [_array_of(f"{name}[{at}]", each) for at, each in enumerate(sequences)]
    for at, each in enumerate(arrays):
        if each.ndim != 1:
            raise ValueError(f"{name}[{at}] has shape {each.shape}: a list holds sequences of integers")
        if each.size and each.dtype.kind not in "iu":
            raise TypeError(f"{name}[{at}] has dtype {each.dtype}: give integers")
    lengths = np.array([each.size for each in arrays], np.intp)
    found = np.zeros((len(arrays), max(lengths, default=0)), np.int64)
    for row, each in zip(found, arrays, strict=True):
        row[: each.size] = each
    return found, lengths


def pack(shape: tuple[int, int], mask: Any, lengths: Any) -> Packed:
    """Check mask and lengths, and return which tokens are computed and in what order."""
    batch, seq = shape
    if mask is not None and lengths is not None:
        raise ValueError("mask and lengths were given: give one of them")
    keep, where = np.ones((batch, seq), np.bool_), None
    if lengths is not None:
        keep = np.arange(seq) < _check_lengths(lengths, batch, seq)[:, np.newaxis]
    elif mask is not None:
        kept = _check_mask(mask, batch, seq)
        if kept.ndim == 2:  # noqa: PLR2004  batch, seq
            keep = kept
        else:
            where = kept[:, np.newaxis]
    counts = keep.sum(axis=1)
    order = np.argsort(counts, kind="stable")
    places, columns = np.nonzero(keep[order])
    return Packed((batch, seq), order[places], columns, order, counts[order], where)


def _check_lengths(lengths: Any, batch: int, seq: int) -> Array:
    found = integers("lengths", _array_of("lengths", lengths))
    if found.shape != (batch,):
        raise ValueError(f"lengths has shape {found.shape}, the batch has {batch} sequences")
    if found.size and not 0 <= found.min() <= found.max() <= seq:
        wrong = int(np.argmax((found < 0) | (found > seq)))
        raise ValueError(f"lengths[{wrong}] is {found[wrong]}: sequences have 0 to {seq} tokens")
    return found


def _check_mask(mask: Any, batch: int, seq: int) -> Array:
    """Return a mask of either shape as bool."""
    check_host_array("mask", mask)
    allowed = (batch, seq), (batch, seq, seq)
    if mask.shape not in allowed:
        raise ValueError(f"mask has shape {mask.shape}: it must be {allowed[0]} or {allowed[1]}")
    if mask.dtype.kind not in "biu":
        raise TypeError(f"mask has dtype {mask.dtype}: give bool, or integers 0 and 1; True keeps")
    if mask.dtype.kind != "b" and mask.size and not 0 <= mask.min() <= mask.max() <= 1:
        raise ValueError(f"mask has values from {mask.min()} to {mask.max()}: give bool, or integers 0 and 1")
    kept: Array = mask.astype(np.bool_, copy=False)
    return kept


def check_range(name: str, values: Array, packed: Packed, count: int, has: str) -> None:
    """Raise ValueError, which names the first value out of range and its place in the input."""
    wrong = (values < 0) | (values >= count)
    if wrong.any():
        at = int(np.argmax(wrong))
        place = f"[{packed.rows[at]}, {packed.columns[at]}]"
        raise ValueError(f"{name} {values[at]} at {place}: {has} {count}, from 0 on")
