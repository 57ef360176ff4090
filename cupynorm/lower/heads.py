"""Lowers moves between rows and attention's heads: host mirror of kernels/bert/heads.cuh, and its plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm.call.view import View
from cupynorm.lower.mirrors import POINTER, Struct, column, division
from cupynorm.lower.spec import KernelSpec
from cupynorm.runtime import compiler

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits

BLOCK = 256  # kHeadsBlock
# Tokens of a thread: two, if that leaves threads for half of the device (docs/notes/040).
TOKENS = (2, 1)
NARROW = 1 << 31  # threads, or largest offset in elements, from which on both are counted in 64 bits


class Index(NamedTuple):
    """The type of offsets: mirror of the template argument Index, and of its SignedOf."""

    cpp: str
    dtype: Dtype
    offset: Dtype

    @property
    def divisor(self) -> Dtype:
        """Layout of Divisor."""
        return np.dtype([("value", self.dtype), ("multiplier", np.uint32), ("shift", np.uint32)], align=True)


FEW = Index("unsigned", np.dtype(np.uint32), np.dtype(np.int32))
MANY = Index("unsigned long long", np.dtype(np.uint64), np.dtype(np.int64))


def divisor(value: int) -> tuple[int, int, int]:
    """Return the values of Divisor; with indices of 64 bits the first is enough."""
    return (value, *division(value))


class Places(NamedTuple):
    """A layout of elements: strides in bytes of parts, heads and columns, and the axes of tokens."""

    array: View
    parts: int
    heads: int
    size: int
    part: int
    head: int
    col: int
    tokens: View

    @property
    def token_count(self) -> int:
        """Tokens that there are."""
        return math.prod(self.tokens.shape)

    def reach(self) -> int:
        """Return how far apart, in elements, two of the places can be."""
        whole = zip(
            (self.parts, self.heads, self.size, *self.tokens.shape),
            (self.part, self.head, self.col, *self.tokens.strides),
            strict=True,
        )
        return sum((extent - 1) * abs(stride) for extent, stride in whole) // self.array.dtype.itemsize

    def struct(self, index: Index) -> Struct:
        """Return the mirror of Places."""
        item = self.array.dtype.itemsize
        extents, strides = self.tokens.collapsed()
        fields = [
            *((name, index.offset) for name in ("part", "head", "col")),
            ("stride", index.offset, (len(strides),)),
            ("extents", index.divisor, (max(1, len(extents) - 1),)),
        ]
        divisors = [divisor(max(1, each)) for each in extents[1:]] or [(1, 1, 0)]
        values = (self.part // item, self.head // item, self.col // item, strides, divisors)
        return Struct(str(len(extents)), np.dtype(fields, align=True), values)

    def steps(self) -> tuple[int, ...]:
        """Return what a vector's width must divide, in elements."""
        item = self.array.dtype.itemsize
        strides = [
            each for extent, each in zip(self.tokens.shape, self.tokens.strides, strict=True) if extent > 1
        ]
        strides += [self.part] * (self.parts > 1) + [self.head] * (self.heads > 1)
        whole = self.array.pointer // item if self.array.pointer % item == 0 else 1
        alone = 1 if self.col != item and self.size > 1 else 0  # columns that are not adjacent form no vector
        return (whole, self.size, *(each // item for each in strides), alone)


def by_heads(x: View, parts: int) -> Places:
    """Return the places of [parts, ..., heads, seq, head size]; without the first axis where there is one part."""
    part = x.strides[0] if parts > 1 else 0
    shape, strides = (x.shape[1:], x.strides[1:]) if parts > 1 else (x.shape, x.strides)
    *leading, heads, seq, size = shape
    *steps, head, token, col = strides
    tokens = View(x.pointer, (*leading, seq), (*steps, token), x.dtype)
    return Places(x, parts, heads, size, part, head, col, tokens)


def by_rows(x: View, parts: int, heads: int) -> Places:
    """Return the places of [..., seq, parts * heads * head size]."""
    size, col = x.shape[-1] // (parts * heads), x.strides[-1]
    tokens = View(x.pointer, x.shape[:-1], x.strides[:-1], x.dtype)
    return Places(x, parts, heads, size, heads * size * col, size * col, col, tokens)


class MovePlan(NamedTuple):
    """How a kernel's threads cover the tokens: `tokens` for each of them."""

    tokens: int
    vector: int
    grid: tuple[int, int, int]
    indexed: bool
    block: tuple[int, int] = (BLOCK, 1)

    @property
    def template(self) -> tuple[int, int, bool]:
        """The kernel's template arguments that are numbers."""
        return self.vector, self.tokens, self.indexed

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return BLOCK

    def summary(self) -> dict[str, Any]:
        """Return what explain shows of it."""
        return {"tokens": self.tokens, "vector": self.vector, "grid": self.grid[0], "block": BLOCK}


class MoveProblem(NamedTuple):
    """The problem of a move. threads: their number with one token each. indexed: rows of x are named by numbers."""

    tokens: int
    vector: int
    threads: int
    indexed: bool

    def plan(self, limits: Limits) -> MovePlan:
        """Choose how many tokens a thread takes on a device."""
        return self.with_tokens(tokens_of_a_thread(self.threads, limits.sm_count * limits.threads_per_sm))

    def with_tokens(self, tokens: int) -> MovePlan:
        """Return the plan of so many tokens a thread."""
        vectors = self.threads // self.tokens
        blocks = -(-vectors * -(-self.tokens // tokens) // BLOCK)
        return MovePlan(tokens, self.vector, (blocks, 1, 1), self.indexed)

    def summary(self) -> dict[str, int]:
        """Return what explain shows of it."""
        return {"tokens": self.tokens, "vector": self.vector}


def tokens_of_a_thread(threads: int, threads_of_device: int) -> int:
    """Return how many tokens a thread takes: more save reads of the bias, too many leave multiprocessors idle."""
    return next((n for n in TOKENS if 2 * (threads // n) >= threads_of_device), 1)


def move_spec(source: Places, target: Places, bias: View | None, rows: int = 0) -> KernelSpec:
    """Lower a move of elements between places. rows: the pointer of row numbers, 0 for none."""
    x, y = source.array, target.array
    vector = math.gcd(16 // max(x.dtype.itemsize, y.dtype.itemsize), *source.steps(), *target.steps())
    columns = source.parts * source.heads * source.size
    shift = column(bias, (columns,))
    vectors = columns // vector
    threads = vectors * target.token_count
    fits = max(threads + BLOCK, source.reach(), target.reach()) < NARROW
    index = FEW if fits else MANY
    begin, end = source.struct(index), target.struct(index)
    fields = [
        *((name, POINTER) for name in ("x", "y", "rows")),
        ("tokens", index.dtype),
        *((name, index.divisor) for name in ("vectors", "head_vectors", "heads")),
        ("from", begin.dtype),
        ("to", end.dtype),
        ("bias", shift.dtype),
    ]
    values = (
        *(x.pointer, y.pointer, rows),
        *(target.token_count, *(divisor(each) for each in (vectors, source.size // vector, source.heads))),
        *(begin.values, end.values, shift.values),
    )
    kind = f"{index.cpp}, {cpp(x.dtype)}, {cpp(y.dtype)}, {shift.cpp}, {begin.cpp}, {end.cpp}"
    whole = Struct(f"cupynorm::MovedHeads<{kind}>", np.dtype(fields, align=True), values)
    text = compiler.text("bert/heads.cuh", whole.cpp, whole.dtype.itemsize)
    compute = compute_dtype(x.dtype, y.dtype, *([bias.dtype] if bias else []))
    name = f"cupynorm::move_heads<{cpp(compute)}, {{numbers}}, {{types}}>"
    return KernelSpec(text, name, kind, whole, MoveProblem(target.token_count, vector, threads, bool(rows)))
