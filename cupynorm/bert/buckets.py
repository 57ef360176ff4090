"""The shapes that a graph of the encoder is captured for, and the numbers of tokens that it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    pass


FINE = 16  # steps to each doubling of packed tokens: at most 6 % are padding
COARSE = 8  # the same of lengths and sequences


def rounded_up(count: int, steps: int) -> int:
    """Return the next of the numbers that have `steps` steps to each doubling; no step is less than 1."""
    step = max(1, (1 << max(0, (count - 1).bit_length() - 1)) // steps)
    return -(-count // step) * step


class Bucket(NamedTuple):
    """The shapes that a graph is captured for.

    tokens: packed tokens, including the padding at their end. whole: each sequence has `length` tokens, so that the
    packed tokens are those of [sequences, length]. looks: there is a mask of pairs, [batch, seq, seq].
    """

    sequences: int
    length: int
    tokens: int
    whole: bool
    looks: bool = False


def bucket_of(lengths: np.ndarray[Any, Any], looks: bool) -> Bucket:  # noqa: FBT001
    """Return the bucket of packed sequences."""
    sequences, longest, tokens = len(lengths), int(lengths.max()), int(lengths.sum())
    if looks:
        return Bucket(sequences, longest, tokens, whole=True, looks=True)
    whole = whole_bucket(sequences, longest) if tokens == sequences * longest else None
    rounded = rounded_up(sequences, COARSE), rounded_up(-(-longest // 8) * 8, COARSE)
    return whole or Bucket(*rounded, rounded_up(max(tokens, 8), FINE), whole=False)


def whole_bucket(sequences: int, length: int) -> Bucket | None:
    """Return the bucket of sequences that all have this length; None where only a larger bucket holds them."""
    rounded = rounded_up(sequences, COARSE), rounded_up(-(-length // 8) * 8, COARSE)
    return (
        Bucket(sequences, length, sequences * length, whole=True) if rounded == (sequences, length) else None
    )


class Numbers(NamedTuple):
    """The index tensors that a bucket's graph reads: int32 arrays on the host or, as parts of one array, on the device.

    rows: the packed token at each place of [sequences, length], or -1; places: the inverse. begin and lengths: the
    packed tokens of each sequence; start and count: the tokens that each sequence of the batch is pooled from. token,
    place, type: rows of the three tables.
    """

    rows: Any
    places: Any
    lengths: Any
    begin: Any
    start: Any
    count: Any
    token: Any
    place: Any
    type: Any

    @classmethod
    def of(cls, bucket: Bucket) -> Numbers:
        """Return host arrays in which there is no token yet."""
        square, tokens, sequences = bucket.sequences * bucket.length, bucket.tokens, bucket.sequences
        return cls(
            np.full(square, -1, np.int32),
            np.full(tokens, -1, np.int32),
            *(np.zeros(sequences, np.int32) for _ in range(4)),
            *(np.zeros(tokens, np.int32) for _ in range(3)),
        )

    def parted(self, whole: Any) -> Numbers:
        """Return the parts of one array that are as long as these."""
        ends = np.cumsum([len(each) for each in self]).tolist()
        return Numbers(*(whole[end - len(each) : end] for each, end in zip(self, ends, strict=True)))
