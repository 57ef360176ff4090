"""Random numbers without a state: Philox4x32-10, and the dropout that is drawn from it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupynorm._options import integer, plainly

Array = np.ndarray[Any, Any]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of the words 0 and 2
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after a round: golden ratio, and sqrt(3) - 1
WORD = 0xFFFFFFFF
BITS = 32
SEEDS = 1 << 64  # that there are, and as many offsets
PROBABILITY = "the probability of being dropped is 0 to 1"


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Return the four 32-bit words of each counter of shape (..., 4), as uint32.

    Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. Also what cuRAND
    calls PHILOX4_32_10.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (second >> np.uint64(BITS)) ^ c1 ^ np.uint64(k0),
            second & np.uint64(WORD),
            (first >> np.uint64(BITS)) ^ c3 ^ np.uint64(k1),
            first & np.uint64(WORD),
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words(seed: int, offset: int, start: int, count: int) -> Array:
    """Return the words of the elements start, start + 1, ..., start + count - 1.

    Element i has word i % 4 of the block at offset + i // 4. A block's number, 64 bits that wrap around, is the
    counter's words 0 (low) and 1 (high), with 0 in its words 2 and 3; the seed's 64 bits are the key's words 0 (low)
    and 1 (high).
    """
    first = start // 4
    blocks = -(-(start + count) // 4) - first
    base = (offset + first) % SEEDS
    number = np.uint64(base) + np.arange(blocks, dtype=np.uint64)
    counter = np.zeros((blocks, 4), np.uint64)
    counter[:, 0], counter[:, 1] = number & np.uint64(WORD), number >> np.uint64(BITS)
    at = start - 4 * first
    return philox(counter, (seed & WORD, seed >> BITS)).reshape(-1)[at : at + count]


class Dropout(NamedTuple):
    """A checked dropout: drops elements, in C order, whose word is below `threshold`, and scales others by `factor`."""

    p: float
    seed: int
    offset: int

    @property
    def threshold(self) -> int:
        """floor(p * 2^32): 33 bits, since p = 1 drops every word."""
        return math.floor(self.p * 2.0**BITS)  # a multiplication by a power of two is exact

    @property
    def factor(self) -> float:
        """1 / (1 - p); 0 where nothing is kept."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def kept(self, start: int, count: int) -> Array:
        """Say of the elements from `start` on whether they are kept."""
        return words(self.seed, self.offset, start, count) >= self.threshold


def dropout(p: float, seed: int, offset: int, name: str = "p") -> Dropout:
    """Check and return a dropout; ValueError for a p outside 0 to 1, or numbers of more than 64 bits.

    name: the name of p in messages.
    """
    if (
        type(p) is float
        and type(seed) is type(offset) is int
        and 0 <= p <= 1
        and 0 <= seed < SEEDS
        and 0 <= offset < SEEDS
    ):  # the usual arguments, two microseconds sooner
        return Dropout(p, seed, offset)
    if not 0 <= p <= 1:
        raise ValueError(f"{name} is {p}: {PROBABILITY}")
    numbers = {}
    for which, given in (("seed", seed), ("offset", offset)):
        number = integer(which, given)
        if not 0 <= number < SEEDS:
            raise ValueError(f"{which} is {plainly(number)}: it must be 0 to 2^64 - 1")
        numbers[which] = number
    return Dropout(float(p), **numbers)
