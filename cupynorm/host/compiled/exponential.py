"""e^x for loops that numba compiles: the C library's is called for each element, this one is not.

Nothing in it depends on a condition, so a compiler computes several at once.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
from numba.extending import overload, register_jitable

ROUNDED = {"contract", "nsz"}  # what a compiler may do where each rounding counts

piece = register_jitable(fastmath=ROUNDED, forceinline=True)


def exp(x):
    """Return e^x within two units of the last place; for compiled code."""
    raise NotImplementedError


def _exponential(kind: Any, word: Any, terms: int, digits: int) -> Any:
    """Return exp of one type: 2^n times the series of a rest of at most log(2) / 2.

    log(2) comes in two parts, the first of `digits` binary places, so that its products with n are exact. A number
    that has 1.5 times a power of two added to it has its whole part in its last bits.
    """
    info = np.finfo(kind)
    logarithm = Decimal(2).ln()
    first = math.floor(float(logarithm) * 2**digits) / 2**digits
    high, low = kind(first), kind(float(logarithm - Decimal(first)))
    per_two, to_bits, half = kind(1 / math.log(2)), kind(1.5 * 2.0**info.nmant), kind(0.5)
    least, most = (
        kind(2 * round(float(np.log(each)) / 2) + more) for each, more in ((info.tiny, -40), (info.max, 2))
    )
    bias, places = word(info.maxexp - 1), word(info.nmant)
    series = tuple(kind(1 / math.factorial(k)) for k in range(terms + 1))

    def of_one(x):
        x = least if x < least else x  # noqa: FURB136  nan stays
        x = most if x > most else x  # noqa: FURB136
        n = x * per_two + to_bits - to_bits
        rest = x - n * high - n * low
        power = series[terms]
        for k in range(terms - 1, -1, -1):
            power = power * rest + series[k]
        # 2^n in two factors, because one cannot be as small, or as large, as the result
        one = n * half + to_bits
        other = n - (one - to_bits) + to_bits
        scale = word((kind(one).view(word) + bias) << places).view(kind)
        return power * scale * word((kind(other).view(word) + bias) << places).view(kind)

    return of_one


EXPONENTIALS = {32: _exponential(np.float32, np.int32, 7, 15), 64: _exponential(np.float64, np.int64, 13, 32)}


@overload(exp, jit_options={"fastmath": ROUNDED, "forceinline": True})
def _exp_of_type(x):
    return EXPONENTIALS[x.bitwidth]
