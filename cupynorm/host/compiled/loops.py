"""The two ways through rows: elements that lie side by side, and rows that do while elements lie apart.

NumPy takes four to seven passes over memory for an op; these take two or three, over rows that a cache holds. numba
compiles a loop once for each op and type, and keeps it on disk. Nothing is checked here.
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from cupynorm._values import NamedTuple
from cupynorm.host.compiled.exponential import ROUNDED, piece
from cupynorm.host.compiled.steps import NONE, Steps, steps_of

CHAIN = 512  # elements side by side that are summed up in the type of arithmetic; such sums are summed up in float64
COLUMNS = 64  # the same of elements that lie apart

ANY_ORDER = {*ROUNDED, "reassoc"}  # what a compiler may do where terms are added up
# numba asks whether this file is as old as what it kept, and not whether the others are: a loop says what it is made of
SOURCES = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
UNSIGNED = np.uint64  # of places in memory: others might be counted from the end


@piece
def middle(one, two, three):
    """Return the middle one of three elements: an outlier, as origin, would cost the others their digits."""
    return max(min(one, two), min(max(one, two), three))


def in_order(kind: Any) -> tuple[Any, Any, Any]:
    """Return to_order(number), from_order(word), and the least word.

    Words have an order of which a compiler takes the largest in any type of registers, whatever they hold: nan of one
    sign is above all numbers, of the other below.
    """
    word = np.int64 if kind is np.float64 else np.int32
    sign, rest = word(np.iinfo(word).bits - 1), word(np.iinfo(word).max)

    @piece
    def to_order(number):
        bits = kind(number).view(word)
        return word(bits ^ ((bits >> sign) & rest))

    @piece
    def from_order(bits):
        return word(bits ^ ((bits >> sign) & rest)).view(kind)

    return to_order, from_order, word(np.iinfo(word).min)


def _compiled(loop: Any) -> Any:
    options: dict[str, Any] = {"nogil": True, "fastmath": ROUNDED, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(loop)
    except RuntimeError:  # nowhere to keep it
        return njit(**options)(loop)


class Pieces(NamedTuple):
    """The functions of an op, with a substitute for each that it lacks, and flags for those that it has."""

    first: Any
    one: Any
    second: Any
    two: Any
    result: Any
    told: Any
    has_first: bool
    has_second: bool
    has_result: bool


def pieces_of(steps: Steps) -> Pieces:
    """Return the functions of an op."""
    given = {name: getattr(steps, name) for name in ("first", "one", "second", "two", "result", "told")}
    found = {name: getattr(NONE, name) if each is None else each for name, each in given.items()}
    return Pieces(
        **found,
        **{f"has_{name}": given[name] is not None for name in ("first", "second", "result")},
    )


@functools.cache
def side_by_side(name: str, dtype: np.dtype[Any]) -> Any:  # noqa: C901, PLR0915  compiled into one loop
    """Return loop(x, others, scale, shift, out, told, numbers, begin, end, in_place, cols, strides).

    It computes the rows `begin` to `end`. x, others and out hold the first element of each array, strides how many
    elements lie from a row to the next in each. scale and shift have one number a column, or none, told two float64 a
    row. in_place: out is x, or others; then results wait in `room`, or no compiler would take several at once.
    """
    steps = steps_of(name, dtype)
    first, one, second, two, result, tell, has_first, has_second, has_result = pieces_of(steps)
    kind = np.float64 if steps.wide else dtype.type
    from_one, maxima, kept = steps.from_one, steps.maxima, steps.kept
    to_order, from_order, lowest = in_order(dtype.type)
    element, sources = dtype.type, SOURCES

    @piece
    def largest(x, others, at, at_others, cols, origin):
        most, of_others = lowest, lowest
        for j in range(cols):
            for_s, for_t = first(kind(x[at + j]) - origin, kind(others[at_others + j]))
            most = max(most, to_order(for_s))
            of_others = max(of_others, to_order(for_t))
        return np.float64(from_order(most)), np.float64(from_order(of_others))

    @register_jitable(fastmath=ANY_ORDER, forceinline=True)
    def sums(x, others, at, at_others, cols, origin):
        s, t = 0.0, 0.0
        for start in range(UNSIGNED(0), cols, UNSIGNED(CHAIN)):
            of_s, of_t = kind(0), kind(0)
            for j in range(start, min(start + UNSIGNED(CHAIN), cols)):
                for_s, for_t = first(kind(x[at + j]) - origin, kind(others[at_others + j]))
                of_s += for_s
                of_t += for_t
            s += np.float64(of_s)
            t += np.float64(of_t)
        return s, t

    @piece
    def keep(x, others, at, at_others, some, origin, a, target, at_target):
        for j in range(some):
            target[at_target + j] = second(kind(x[at + j]) - origin, kind(others[at_others + j]), a)

    @register_jitable(fastmath=ANY_ORDER, forceinline=True)
    def second_sum(x, others, at, at_others, some, origin, a, terms, at_terms):
        of_u = kind(0)
        for j in range(some):
            if kept:
                of_u += kind(terms[at_terms + j])
            else:
                of_u += second(kind(x[at + j]) - origin, kind(others[at_others + j]), a)
        return np.float64(of_u)

    def writer(scaled, shifted):
        @piece
        def write(x, others, at, at_others, some, how, scale, shift, first, target, at_target):
            origin, a, b, numbers = how
            for j in range(some):
                y = result(kind(x[at + j]) - origin, kind(others[at_others + j]), a, b, numbers)
                if scaled:
                    y *= kind(scale[first + j])
                if shifted:
                    y += kind(shift[first + j])
                target[at_target + j] = y

        return write

    plain, with_scale, with_shift, with_both = writer(0, 0), writer(1, 0), writer(0, 1), writer(1, 1)

    @piece
    def write_scaled(x, others, at, at_others, some, how, scale, shift, first, target, at_target):
        if scale.size and shift.size:
            with_both(x, others, at, at_others, some, how, scale, shift, first, target, at_target)
        elif scale.size:
            with_scale(x, others, at, at_others, some, how, scale, shift, first, target, at_target)
        elif shift.size:
            with_shift(x, others, at, at_others, some, how, scale, shift, first, target, at_target)
        else:
            plain(x, others, at, at_others, some, how, scale, shift, first, target, at_target)

    write = write_scaled if steps.scaled else plain  # each of the four takes half a second to compile

    @piece
    def finish(out, others, at, at_others, cols, how):
        _, a, b, numbers = how
        for j in range(cols):
            out[at + j] = result(kind(out[at + j]), kind(others[at_others + j]), a, b, numbers)

    def loop(x, others, scale, shift, out, told, numbers, begin, end, in_place, columns, strides):
        _ = sources
        zero, chain, cols = UNSIGNED(0), UNSIGNED(CHAIN), UNSIGNED(columns)
        room = np.empty(CHAIN, element)
        for i in range(begin, end):
            at, at_others, at_out = (
                UNSIGNED(i * strides[0]),
                UNSIGNED(i * strides[1]),
                UNSIGNED(i * strides[2]),
            )
            origin, s, t, u = kind(0), 0.0, 0.0, 0.0
            if from_one:
                last = cols - UNSIGNED(1)
                origin = middle(kind(x[at]), kind(x[at + cols // UNSIGNED(2)]), kind(x[at + last]))
            if has_first and maxima:
                s, t = largest(x, others, at, at_others, cols, origin)
            elif has_first:
                s, t = sums(x, others, at, at_others, cols, origin)
            a = kind(one(s, t, numbers))
            if has_second:
                for start in range(zero, cols, chain):
                    here, there, to = at + start, at_others + start, at_out + start
                    some = min(chain, cols - start)
                    if kept:
                        target, at_target = (room, zero) if in_place else (out, to)
                        keep(x, others, here, there, some, origin, a, target, at_target)
                        if in_place:
                            copy(room, out, to, some)
                    u += second_sum(x, others, here, there, some, origin, a, out, to)
            found = two(s, t, u, numbers)
            told[i, 0], told[i, 1] = tell(origin, s, t, u, found, numbers)
            b = kind(found)
            how = (origin, a, b, numbers)
            if has_result and kept:
                finish(out, others, at_out, at_others, cols, how)
            elif has_result:
                for start in range(zero, cols, chain):
                    here, there, to = at + start, at_others + start, at_out + start
                    some = min(chain, cols - start)
                    target, at_target = (room, zero) if in_place else (out, to)
                    write(x, others, here, there, some, how, scale, shift, start, target, at_target)
                    if in_place:
                        copy(room, out, to, some)

    return _compiled(loop)


@piece
def copy(room, out, at, count):
    for i in range(count):
        out[at + i] = room[i]


def _across_rows(name: str, dtype: np.dtype[Any]) -> tuple[Any, ...]:  # noqa: C901  seven functions
    """Return what is done with one element of each of `width` rows that lie side by side, in functions to compile."""
    steps = steps_of(name, dtype)
    pieces = pieces_of(steps)
    first, second, result = pieces.first, pieces.second, pieces.result
    kind = np.float64 if steps.wide else dtype.type
    from_one, pair, kept = steps.from_one, steps.pair, steps.kept
    to_order, _, _ = in_order(dtype.type)

    @piece
    def element(x, at, i, origin):
        return kind(x[at + i]) - origin[i] if from_one else kind(x[at + i])

    @piece
    def keep_largest(x, others, at, at_others, width, origin, largest, of_others):
        for i in range(width):
            for_s, for_t = first(element(x, at, i, origin), kind(others[at_others + i]))
            largest[i] = max(largest[i], to_order(for_s))
            if pair:
                of_others[i] = max(of_others[i], to_order(for_t))

    @piece
    def add_first(x, others, at, at_others, width, origin, of_s, of_t):
        for i in range(width):
            for_s, for_t = first(element(x, at, i, origin), kind(others[at_others + i]))
            of_s[i] += for_s
            if pair:
                of_t[i] += for_t

    @piece
    def add_second(x, others, at, at_others, width, origin, a, of_u, target, at_target):
        for i in range(width):
            term = second(element(x, at, i, origin), kind(others[at_others + i]), a[i])
            if kept:
                target[at_target + i] = term
            of_u[i] += term

    @piece
    def write(x, others, at, at_others, width, origin, a, b, numbers, by, more, target, at_target):
        for i in range(width):
            y = result(element(x, at, i, origin), kind(others[at_others + i]), a[i], b[i], numbers)
            target[at_target + i] = y * by + more

    @piece
    def finish(out, others, at, at_others, width, a, b, numbers):
        for i in range(width):
            out[at + i] = result(kind(out[at + i]), kind(others[at_others + i]), a[i], b[i], numbers)

    @piece
    def add_up(parts, total, width):
        for i in range(width):
            total[i] += parts[i]
            parts[i] = 0

    return keep_largest, add_first, add_second, write, finish, add_up


@functools.cache
def apart(name: str, dtype: np.dtype[Any]) -> Any:  # noqa: C901, PLR0915  compiled into one loop
    """Return loop(x, others, scale, shift, out, told, numbers, begin, end, in_place, cols, inner, most, strides).

    As above, but `inner` rows lie side by side, of which up to `most` are computed at once; so many are counted from
    `begin` to `end`. strides: how many elements lie from a group of `inner` rows to the next, and from an element of a
    row to the next, in x, others and out.
    """
    steps = steps_of(name, dtype)
    _, one, _, two, _, tell, has_first, has_second, has_result = pieces_of(steps)
    keep_largest, add_first, add_second, write, finish, add_up = _across_rows(name, dtype)
    kind = np.float64 if steps.wide else dtype.type
    from_one, maxima, pair, kept = steps.from_one, steps.maxima, steps.pair, steps.kept
    _, from_order, lowest = in_order(dtype.type)
    word, element, sources = type(lowest), dtype.type, SOURCES

    @piece
    def origins(x, at, along, cols, count, origin):
        half, last = at + cols // 2 * along, at + (cols - 1) * along
        for i in range(count):
            one_of, another, third = x[UNSIGNED(at + i)], x[UNSIGNED(half + i)], x[UNSIGNED(last + i)]
            origin[i] = middle(kind(one_of), kind(another), kind(third))

    def loop(x, others, scale, shift, out, told, numbers, begin, end, in_place, cols, inner, most, strides):  # noqa: C901
        _ = sources
        zero, together = UNSIGNED(0), -(-inner // most)
        rows, sums = np.empty((6, most), kind), np.empty((3, most), np.float64)
        words, room = np.empty((2, most), word), np.empty(most, element)
        origin, of_s, of_t, of_u, a, b = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5]
        s, t, u = sums[0], sums[1], sums[2]
        (from_x, along_x), (from_others, along_others), (from_out, along_out) = strides
        for unit in range(begin, end):
            outer, left = unit // together, unit % together * most
            count, row = min(most, inner - left), outer * inner + left
            width = UNSIGNED(count)
            at, at_others, at_out = outer * from_x + left, outer * from_others + left, outer * from_out + left
            rows[:] = 0
            sums[:] = 0
            words[:] = lowest
            if from_one:
                origins(x, at, along_x, cols, count, origin)
            for j in range(cols if has_first else 0):
                here, there = UNSIGNED(at + j * along_x), UNSIGNED(at_others + j * along_others)
                if maxima:
                    keep_largest(x, others, here, there, width, origin, words[0], words[1])
                    continue
                add_first(x, others, here, there, width, origin, of_s, of_t)
                if j % COLUMNS == COLUMNS - 1 or j == cols - 1:
                    add_up(of_s, s, width)
                    if pair:
                        add_up(of_t, t, width)
            for i in range(count):
                if maxima:
                    s[i], t[i] = from_order(words[0, i]), from_order(words[1, i])
                a[i] = one(s[i], t[i], numbers)
            for j in range(cols if has_second else 0):
                here, there = UNSIGNED(at + j * along_x), UNSIGNED(at_others + j * along_others)
                to = UNSIGNED(at_out + j * along_out)
                target, at_target = (room, zero) if in_place else (out, to)
                add_second(x, others, here, there, width, origin, a, of_u, target, at_target)
                if in_place and kept:
                    copy(room, out, to, width)
                if j % COLUMNS == COLUMNS - 1 or j == cols - 1:
                    add_up(of_u, u, width)
            for i in range(count):
                found = two(s[i], t[i], u[i], numbers)
                told[row + i, 0], told[row + i, 1] = tell(origin[i], s[i], t[i], u[i], found, numbers)
                b[i] = found
            for j in range(cols if has_result else 0):
                here, there = UNSIGNED(at + j * along_x), UNSIGNED(at_others + j * along_others)
                to = UNSIGNED(at_out + j * along_out)
                by = kind(scale[j]) if scale.size else kind(1)
                more = kind(shift[j]) if shift.size else kind(0)
                if kept:
                    finish(out, others, to, there, width, a, b, numbers)
                    continue
                target, at_target = (room, zero) if in_place else (out, to)
                write(x, others, here, there, width, origin, a, b, numbers, by, more, target, at_target)
                if in_place:
                    copy(room, out, to, width)

    return _compiled(loop)
