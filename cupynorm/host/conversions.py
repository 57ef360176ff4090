"""Conversions between 16 bits and float32 by integer arithmetic, which NumPy's own do one element at a time.

NumPy 2.4 takes 1.2 ns for a float16 on its way to float32 and 1.5 ns on its way back, 60 ns where it is subnormal;
these take 0.3 and 0.6 to 0.9 (docs/notes/060). A bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.host.reference import _FLOAT8, LARGEST, LEAST, _nearest, _round

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

FEW = 8192  # elements up to which NumPy's own conversion is done before ours has begun
_SPECIAL = 0x7C00  # from here on a float16 without its sign is infinite or no number
_REBIAS = np.float32(2.0**112)  # between the exponents of float16 and float32
_SIGN_AND_REST = -0x70002000  # the bits of a float16, sign extended, that belong into a float32: 0x8FFFE000
_LEAST_NORMAL = 113 << 23  # 2^-14 as float32: the unit of smaller float16 shrinks no more
_TOO_LARGE = 143 << 23  # 2^16 as float32


def widen(part: Array, out: Array) -> None:
    """Write a part of an array to out, C-contiguous float32 or float64 of as many elements in C order.

    A part of 2 bytes an element is float16, or else bfloat16.
    """
    target = out.reshape(part.shape)
    others = part.dtype.kind in "biu" or not part.dtype.isnative
    if others or part.size <= FEW or part.itemsize >= out.itemsize or out.dtype != np.float32:
        np.copyto(target, part, casting="unsafe")
    elif part.dtype != np.float16:
        bits = target.view(np.uint32)
        np.copyto(bits, part.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    elif not _has_special(part):
        words = target.view(np.int32)
        np.copyto(words, part.view(np.int16))
        np.left_shift(words, 13, out=words)
        np.bitwise_and(words, _SIGN_AND_REST, out=words)
        np.multiply(target, _REBIAS, out=target)  # exact, of subnormals too
    else:
        np.copyto(target, part, casting="unsafe")


def _has_special(part: Array) -> bool:
    return bool((part.view(np.uint16) & 0x7FFF).max(initial=0) >= _SPECIAL)


def narrow(values: Array, target: Array, scratch: Callable[[int], Array] | None = None) -> None:
    """Write values, C-contiguous float32 or float64, to target, rounded once to nearest even.

    scratch: gives what scratch_of() does, for at least as many elements. Values are left as they are.
    """
    if values.size > FEW and target.dtype == np.float16 and values.dtype == np.float32:
        halves = _float16_bits(values.reshape(-1).view(np.int32), (scratch or scratch_of)(values.size))
        if halves is not None:
            np.copyto(target.view(np.uint16), halves.reshape(target.shape), casting="unsafe")
            return
    if target.itemsize == 1 and values.dtype == np.float32 and target.dtype.name in _FLOAT8:
        np.copyto(
            target.view(np.uint8),
            _float8_bits(values, target.dtype.name).reshape(target.shape),
            casting="unsafe",
        )
        return
    shaped = values.reshape(target.shape)
    rounded = _round(shaped, target.dtype) if values.dtype == np.float64 else shaped
    np.copyto(target, rounded, casting="unsafe")


def _float8_bits(values: Array, name: str) -> Array:
    """Return the bits of float32 values that are numbers of a float8, in the lowest byte of each word.

    A float8 is the upper part of a float32 whose exponent has the float8's bias, subnormals included.
    """
    fraction_bits, least_exponent = _FLOAT8[name]
    words = np.multiply(values, np.float32(2.0 ** (1 - 127 - least_exponent))).view(np.int32)
    signs = np.right_shift(words, 24)
    np.bitwise_and(signs, 0x80, out=signs)
    np.right_shift(words, 23 - fraction_bits, out=words)
    np.bitwise_and(words, 0x7F, out=words)
    if np.isnan(values.max(initial=0)):
        np.copyto(words, 0x7F, where=np.isnan(values))
    return np.bitwise_or(words, signs, out=words)


def scratch_of(size: int) -> Array:
    """Return what narrow() works in; its last row is a constant, since NumPy's maximum with a number is slow."""
    scratch = np.empty((3, size), np.int32)
    scratch[2] = _LEAST_NORMAL
    return scratch


def _float16_bits(words: Array, scratch: Array) -> Array | None:
    """Return the nearest float16 of float32 bits, in the lower half of each word; None if any is 2^16 or more, or nan.

    A float is added whose last place is the float16's: the sum's fraction is what is looked for, in units of it, and
    carries over into the exponent as it must.
    """
    last: Array
    sums: Array
    last, sums, least = (each[: words.size] for each in scratch)
    size = words
    signed = int(words.min()) < 0
    if signed:
        size = np.bitwise_and(words, 0x7FFFFFFF, out=sums)
    if int(size.max()) >= _TOO_LARGE:
        return None
    np.bitwise_and(size, 0x7F800000, out=last)
    np.maximum(last, least, out=last)
    np.add(last, 13 << 23, out=last)
    np.add(size.view(np.float32), last.view(np.float32), out=sums.view(np.float32))
    np.subtract(sums, last, out=sums)
    np.right_shift(last, 13, out=last)
    np.subtract(last, 126 << 10, out=last)
    np.add(sums, last, out=sums)
    if signed:
        np.right_shift(words, 16, out=last)
        np.bitwise_and(last, 0x8000, out=last)
        np.bitwise_or(sums, last, out=sums)
    return sums


def round_quantized(values: Array, dtype: np.dtype[Any], out: Array, *, within: bool = False) -> None:
    """Write the nearest numbers of a quantised dtype, ties to even, saturated, to out; out may be values.

    nan stays nan in a float8 and is 0 in int8. A float8 of float32 comes from adding a number whose last place is that
    of the float8, and subtracting it again. within: whether no value is nan, nor rounded beyond the dtype's numbers.
    """
    name, wide = dtype.name, values.dtype.type
    if name in _FLOAT8 and values.dtype != np.float32:
        np.copyto(out, _nearest(values, dtype))
        return
    if not within:
        values = np.clip(values, wide(LEAST.get(name, -LARGEST[name])), wide(LARGEST[name]), out=out)
    if name not in _FLOAT8:
        np.rint(values, out=out)
        if not within and np.isnan(out.max()):
            np.copyto(out, 0, where=np.isnan(out))
        return
    if values is not out:
        np.copyto(out, values)
    fraction_bits, least_exponent = _FLOAT8[name]
    bits, size = out.view(np.int32), np.abs(out)
    np.clip(size, wide(2.0**least_exponent), None, out=size)
    other = size.view(np.int32)
    np.bitwise_and(other, 0x7F800000, out=other)
    np.add(other, (23 - fraction_bits) << 23, out=other)
    np.bitwise_or(other, np.bitwise_and(bits, -0x80000000), out=other)
    np.add(out, size, out=out)
    np.subtract(out, size, out=out)
