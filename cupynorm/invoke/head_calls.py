"""The device's side of heads: twin of kernels/bert/heads.cuh, its launch, and calls that a thread has made before."""

from __future__ import annotations

import array
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm.call.arguments import view
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import ALIGNMENT, _extent, add, code_of, elsewhere, parameters_of, word_of
from cupynorm.lower.mirrors import POINTER, Struct, View, column, division
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from cupynorm.runtime.compiler import Kernel

BLOCK = 256  # kHeadsBlock
# Of a thread: two, if that leaves as many threads as half of the device holds (docs/notes/040).
TOKENS = (2, 1)
NARROW = 1 << 31  # threads, or elements between two places, from which on both are counted in 64 bits


class Index(NamedTuple):
    """How places are counted: twin of the template argument Index, and of its SignedOf."""

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
    """Where elements lie: strides in bytes of parts, heads and columns, and the axes of tokens."""

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
        """Twin of Places."""
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
        """Return what a pack's width must divide, in elements."""
        item = self.array.dtype.itemsize
        strides = [
            each for extent, each in zip(self.tokens.shape, self.tokens.strides, strict=True) if extent > 1
        ]
        strides += [self.part] * (self.parts > 1) + [self.head] * (self.heads > 1)
        whole = self.array.pointer // item if self.array.pointer % item == 0 else 1
        alone = 1 if self.col != item and self.size > 1 else 0  # columns apart are no pack
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


class Move(NamedTuple):
    """A move with the kernel that does it."""

    arguments: Struct
    text: str
    pack: int
    threads: int  # for one token a thread
    tokens: int
    kind: str  # template arguments of types
    compute: Dtype
    indexed: bool
    counted: Index

    def expression(self, tokens: int) -> str:
        """Write the kernel's name for so many tokens a thread."""
        numbers = f"{self.pack}, {tokens}, {compiler.spell(self.indexed)}"
        return f"cupynorm::move_heads<{cpp(self.compute)}, {numbers}, {self.kind}>"

    def grid(self, tokens: int) -> int:
        """Return the blocks that it takes with so many tokens a thread."""
        packs = self.threads // self.tokens
        return -(-packs * -(-self.tokens // tokens) // BLOCK)


def spelled(source: Places, target: Places, bias: View | None, rows: int = 0) -> Move:
    """Turn places into the kernel's argument. rows: the pointer of row numbers, 0 for none."""
    x, y = source.array, target.array
    pack = math.gcd(16 // max(x.dtype.itemsize, y.dtype.itemsize), *source.steps(), *target.steps())
    columns = source.parts * source.heads * source.size
    shift = column(bias, (columns,))
    packs = columns // pack
    threads = packs * target.token_count
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
        *(target.token_count, *(divisor(each) for each in (packs, source.size // pack, source.heads))),
        *(begin.values, end.values, shift.values),
    )
    kind = f"{index.cpp}, {cpp(x.dtype)}, {cpp(y.dtype)}, {shift.cpp}, {begin.cpp}, {end.cpp}"
    whole = Struct(f"cupynorm::Moved<{kind}>", np.dtype(fields, align=True), values)
    text = compiler.text("bert/heads.cuh", whole.cpp, whole.dtype.itemsize)
    compute = compute_dtype(x.dtype, y.dtype, *([bias.dtype] if bias else []))
    return Move(whole, text, pack, threads, target.token_count, kind, compute, bool(rows), index)


def tokens_of_a_thread(move: Move, threads_of_device: int) -> int:
    """Return how many tokens a thread takes: more are fewer reads of the bias, and too many leave multiprocessors idle."""
    return next((n for n in TOKENS if 2 * (move.threads // n) >= threads_of_device), 1)


class Again(NamedTuple):
    """A call that was checked and launched: it may be made again with other pointers."""

    kernel: Kernel  # stays loaded
    words: array.array[int]
    parameters: array.array[int]
    launches: devices.Launches
    bias_at: int
    shape: tuple[int, ...]
    code: Any
    bytes: int  # of the result
    reach: tuple[tuple[int, int], ...]  # of x and bias: their lowest byte, and the one behind their highest


def key_of(
    what: Any, x: Any, bias: Any, heads: int, out: Any, dtype: Any, rows: Any = None
) -> tuple[Any, ...] | None:
    """Return all that the checks and the choice of a kernel look at, but for shared memory; None for what is not remembered."""
    calls = row_ops._thread.calls  # noqa: SLF001
    kind = calls.kind
    if kind is None and devices.is_device_array(x):
        kind = calls.begin()
    if type(x) is not kind or type(heads) is not int:
        return None
    # _c_contiguous, where true, says all that strides say, for a third of the time; num, of a CuPy array, all that dtype says
    key: tuple[Any, ...] = (
        what,
        heads,
        x.shape,
        x._c_contiguous or x.strides,  # noqa: SLF001
        x.dtype.num,
        x.data.ptr & ALIGNMENT,
        dtype,
    )
    if bias is not None:
        if type(bias) is not kind:
            return None
        strides = bias._c_contiguous or bias.strides  # noqa: SLF001
        key += (bias.shape, strides, bias.dtype.num, bias.data.ptr & ALIGNMENT)
    if out is not None:
        if type(out) is not kind or not out._c_contiguous:  # noqa: SLF001
            return None
        key += (None, out.shape, out.dtype.num, out.data.ptr & ALIGNMENT)
    if rows is not None:
        key += (None, None, rows.shape)
    if calls.several:
        device = x.data.device_id
        if elsewhere(device, bias, out, rows):
            return None
        key += (device,)
    return key


def again(key: tuple[Any, ...], x: Any, bias: Any, out: Any, rows: Any = None) -> Any:
    """Make a remembered call; None if there is none, or its arrays must be looked at more closely."""
    calls = row_ops._thread.calls  # noqa: SLF001
    try:
        call: Again | None = calls.heads.get(key)
    except TypeError:  # a dtype that does not hash
        return None
    if call is None:
        return None
    y = calls.kind(call.shape, call.code) if out is None else out
    source, target = x.data.ptr, y.data.ptr
    shift = 0 if bias is None else bias.data.ptr
    if out is None:
        if target & ALIGNMENT:
            return None
    else:
        for pointer, (low, high) in zip((source, shift), call.reach, strict=False):
            if pointer + low < target + call.bytes and target < pointer + high:
                return None
    numbers = 0 if rows is None else rows.data.ptr
    words, launch = call.words, call.launches[calls.stream(x.data.device_id).ptr]
    # from the first word to the launch: no call, loop or branch (devices.launch_of)
    if bias is None:
        words[0] = source
        words[1] = target
        words[2] = numbers
        status = launch()
    else:
        words[0] = source
        words[1] = target
        words[2] = numbers
        words[call.bias_at] = shift
        status = launch()
    if status:
        raise devices.launch_error(status)
    return y


def launch(
    source: Places, target: Places, bias: View | None, y: Any, key: tuple[Any, ...] | None, rows: Any = None
) -> None:
    """Launch a checked move that has elements, on y's device and that device's current stream; remember it under `key`."""
    module = devices.cupy()
    move = spelled(source, target, bias, 0 if rows is None else rows.data.ptr)
    device, calls = int(y.device.id), row_ops.calls_of_thread()
    with module.cuda.Device(device):
        calls.prepare(device)
        limits = devices.limits_of(device)
        tokens = tokens_of_a_thread(move, limits.sm_count * limits.threads_per_sm)
        kernel = compiler.kernel(device, move.text, move.expression(tokens), 0)
        words = array.array("Q", np.array([move.arguments.values], dtype=move.arguments.dtype).tobytes())
        bind = devices.launch_of(kernel.pointer, (move.grid(tokens), 1, 1), (BLOCK, 1, 1), 0)
        call = Again(
            kernel=kernel,
            **parameters_of(words, bind),
            bias_at=word_of(move.arguments.dtype, "bias", "pointer"),
            shape=target.array.shape,
            code=code_of(target.array.dtype),
            bytes=math.prod(target.array.shape) * target.array.dtype.itemsize,
            reach=tuple(
                _extent(each.shape, each.strides, each.dtype) for each in (source.array, bias) if each
            ),
        )
        call.launches.once()
    if key is not None:
        try:
            hash(key)
        except TypeError:
            return
        add(calls.heads, key, call)


# What the encoder does with packed tokens: rows says, for each token of the result, which of x's it is; below 0 none, and the
# result is 0 there. Arguments are checked by nobody.


def gather(x: Any, rows: Any, out: Any) -> Any:
    """Write x[rows] to out, or x itself where rows is None: rows of hidden states, whatever the axes before the last."""
    key = key_of("gather", x, None, 1, out, None, rows)
    if key is None or again(key, x, None, out, rows) is None:
        launch(by_rows(view(x), 1, 1), by_rows(view(out), 1, 1), None, out, key, rows)
    return out


def split_packed(qkv: Any, bias: Any, rows: Any, heads: int, out: Any) -> Any:
    """Write add_qkv_bias of packed tokens to out, [3, batch, heads, seq, head size]."""
    launch(by_rows(view(qkv), 3, heads), by_heads(view(out), 3), view(bias), out, None, rows)
    return out


def merge_packed(x: Any, rows: Any, out: Any) -> Any:
    """Write merge_heads of [batch, heads, seq, head size] to packed tokens; rows count batch * seq."""
    launch(by_heads(view(x), 1), by_rows(view(out), 1, x.shape[-3]), None, out, None, rows)
    return out
