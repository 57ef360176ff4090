"""The encoder's steps on a device, by kernels, cuBLAS and CUDA graphs. host_steps.py has them for NumPy arrays.

One graph is kept per bucket: a number of sequences, their length, and a number of packed tokens. Inputs are copied to
the bucket's own arrays. Intermediate arrays are allocated from a pool while the graph is captured, and their memory is
reused as soon as it is freed; all graphs share it, because they never run at the same time. A graph that is used often
is captured again, with the fastest algorithm that cublasLt has for each large product (gemm_search.py).
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import functools
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, compute_dtype, cpp
from cupynorm.bert import few_tokens, gemm_search, packed_attention
from cupynorm.bert.gemm import Blas, Product, faster
from cupynorm.invoke import head_calls, row_ops
from cupynorm.lower.mirrors import POINTER, Struct, aligned_elements
from cupynorm.ops.add_norm import add_layer_norm
from cupynorm.ops.elementwise import bias_gelu
from cupynorm.ops.heads import add_qkv_bias, merge_heads
from cupynorm.ops.norm import layer_norm
from cupynorm.ops.softmax import softmax
from cupynorm.runtime import compiler, devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BLOCK = 256  # kEncoderBlock
MOST_BLOCKS = 2048  # blocks of a grid-stride loop
GRAPHS = 64  # graphs that an encoder keeps, the most recently used
HANDLERS_WAIT = 0.05  # seconds, at most, for a signal that came just before the main thread began to wait
CAPTURES = 3  # attempts to capture a graph, if memory runs short
# The call of a bucket at which products are measured: measuring takes as long as some calls, and must pay off.
MEASURED_AT = 5
# Attention computes so many bytes of scores at a time: they stay in an H200's L2 cache until they are read.
SCORE_BYTES = 32 << 20
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


class Steps:
    """The steps between packed tokens of one bucket; those of host_steps.HostSteps by name, and attention."""

    def __init__(self, run: Runner, bucket: Bucket, numbers: Numbers, where: Any) -> None:
        self._run, self._bucket, self._numbers, self._where = run, bucket, numbers, where

    def linear(self, x: Any, weight: Any) -> Any:
        """Return x weight^T."""
        y = devices.empty((x.shape[0], weight.shape[0]), x.dtype)
        self._run.blas.linear(x, weight, y)
        return y

    def layer_norm(self, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        """Return LayerNorm of the rows of x, in the encoder's dtype."""
        return layer_norm(x, gamma, beta, eps=eps, dtype=self._run.dtype)

    def add_layer_norm(
        self, x: Any, residual: Any, gamma: Any, beta: Any, *, bias: Any, eps: float, return_sum: bool
    ) -> tuple[Any, Any]:
        """Return LayerNorm(x + bias + residual) and, if it is asked for, x + bias + residual."""
        made = add_layer_norm(x, residual, gamma, beta, bias=bias, eps=eps, return_sum=return_sum)
        return made if return_sum else (made, None)

    def bias_gelu(self, x: Any, bias: Any, *, approximate: str) -> Any:
        """Return GELU(x + bias), in place."""
        return bias_gelu(x, bias, approximate=approximate, out=x)

    def attention(self, x: Any, weight: Any, bias: Any, heads: int) -> Any:
        """Return softmax(q k^T / sqrt(head size)) v, by heads and sequences, without the product that follows.

        One launch without padding where attention.cuh supports the shapes; otherwise two products, with the scores in
        memory between them.
        """
        bucket, blas = self._bucket, self._run.blas
        hidden = x.shape[1]
        shape = (bucket.sequences, heads, bucket.length, hidden // heads)
        qkv = self.linear(x, weight)
        if self._attends(heads, shape[3]):
            return self.attend(qkv, bias, heads)
        if bucket.whole:
            parts = add_qkv_bias(qkv.reshape(*shape[::2], 3 * hidden), bias, heads=heads)
        else:
            parts = devices.empty((3, *shape), x.dtype)
            head_calls.split_packed(qkv, bias, self._numbers.rows, heads, parts)
        del qkv
        q, k, v = parts
        context = devices.empty(shape, x.dtype)
        compute = compute_dtype(x.dtype)
        for sequences, of_heads, rows in pieces(*shape[:3], compute.itemsize):
            some = q[sequences, of_heads, rows]
            scores = devices.empty((*some.shape[:3], bucket.length), compute)
            blas.products(some, k[sequences, of_heads], scores, transposed=True, alpha=shape[3] ** -0.5)
            weights = softmax(scores, dtype=x.dtype, **self._masks(sequences, rows))
            blas.products(weights, v[sequences, of_heads], context[sequences, of_heads, rows])
        if bucket.whole:
            return merge_heads(context).reshape(-1, hidden)
        return head_calls.merge_packed(context, self._numbers.places, devices.empty(x.shape, x.dtype))

    def _attends(self, heads: int, head_size: int) -> bool:
        run, bucket = self._run, self._bucket
        limits = devices.limits_of(run.device)
        fits = packed_attention.fits(run.dtype, head_size, heads, bucket.sequences, limits)
        return fits and not bucket.looks

    def attend(self, qkv: Any, bias: Any, heads: int) -> Any:
        """Return attention in one launch."""
        bucket = self._bucket
        spans = None if bucket.whole else (self._numbers.begin, self._numbers.lengths)
        out = devices.empty((qkv.shape[0], qkv.shape[1] // 3), qkv.dtype)
        return packed_attention.attend(qkv, bias, heads, bucket.sequences, bucket.length, out, spans)

    def takes_few(self, hidden: int, wide: int, heads: int) -> bool:
        """Say whether there are so few tokens that `product` and `attend` are the fastest."""
        limits = devices.limits_of(self._run.device)
        fits = few_tokens.fits(self._run.dtype, self._bucket.tokens, hidden, wide, limits)
        return fits and self._attends(heads, hidden // heads)

    def product(self, x: Any, weight: Any, *, keep: bool = False, **options: Any) -> tuple[Any, Any]:
        """Return what few_tokens.multiply gives and, if it is to be kept, LayerNorm of x."""
        y = devices.empty((x.shape[0], weight.shape[0]), x.dtype)
        normed = devices.empty(x.shape, x.dtype) if keep else None
        return few_tokens.multiply(x, weight, y, normed=normed, **options), normed

    def _masks(self, sequences: slice, rows: slice) -> dict[str, Any]:
        if self._bucket.looks:
            return {"where": self._where[sequences, :, rows]}
        if self._bucket.whole:
            return {}
        return {"lengths": self._numbers.lengths[sequences].reshape(-1, 1, 1)}

    def look_up(self, tables: tuple[Any, Any, Any]) -> Any:
        """Return the sums of the packed tokens' embeddings, in float32 (float64)."""
        return look_up(tables, self._numbers.token, self._numbers.place, self._numbers.type)

    def pool(self, x: Any, least: float | None) -> Any:
        """Return the mean of each sequence's tokens, in float32 (float64), normalized unless `least` is None."""
        numbers = self._numbers
        out = devices.empty((self._bucket.sequences, x.shape[1]), compute_dtype(x.dtype))
        vector = math.gcd(_widest(x.dtype), x.shape[1], aligned_elements(x.data.ptr, x.dtype))
        fields = [(name, POINTER) for name in ("x", "y", "start", "count")]
        dtype = np.dtype([*fields, ("vectors", np.int64), ("most", out.dtype)], align=True)
        pointers = (x.data.ptr, out.data.ptr, numbers.start.data.ptr, numbers.count.data.ptr)
        kinds = f"{cpp(x.dtype)}, {cpp(out.dtype)}"
        whole = Struct(
            f"cupynorm::Pool<{kinds}>", dtype, (*pointers, x.shape[1] // vector, 1 / (least or 1.0))
        )
        _launch(
            f"cupynorm::pool<{vector}, {compiler.template_argument(least is not None)}, {kinds}>",
            whole,
            out.shape[0],
        )
        return out


def pieces(sequences: int, heads: int, length: int, itemsize: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut attention into sequences, heads and queries whose scores are in memory together."""
    of_one = length * length * itemsize
    if heads * of_one <= SCORE_BYTES:
        step = SCORE_BYTES // (heads * of_one)
        for first in range(0, sequences, step):
            yield slice(first, min(first + step, sequences)), slice(None), slice(None)
        return
    together = max(1, SCORE_BYTES // of_one)
    queries = min(length, max(1, SCORE_BYTES // (length * itemsize)))
    for sequence in range(sequences):
        for first in range(0, heads, together):
            for row in range(0, length, queries):
                end = slice(first, min(first + together, heads))
                yield slice(sequence, sequence + 1), end, slice(row, min(row + queries, length))


def look_up(tables: tuple[Any, Any, Any], token: Any, place: Any, type_: Any) -> Any:
    """Return words[token] + places[place] + types[type], in float32 (float64). Nothing is checked."""
    words = tables[0]
    compute = compute_dtype(words.dtype)
    cols = words.shape[1]
    y = devices.empty((len(token), cols), compute)
    aligned = (aligned_elements(each.data.ptr, each.dtype) for each in tables)
    vector = math.gcd(_widest(words.dtype), cols, *aligned)
    fields = [(name, POINTER) for name in ("words", "places", "types", "token", "place", "type", "y")]
    dtype = np.dtype([*fields, ("tokens", np.int64), ("vectors", np.int64)], align=True)
    pointers = tuple(each.data.ptr for each in (*tables, token, place, type_, y))
    kinds = f"{cpp(words.dtype)}, {cpp(compute)}"
    whole = Struct(f"cupynorm::LookUp<{kinds}>", dtype, (*pointers, len(token), cols // vector))
    _launch(f"cupynorm::look_up<{vector}, {kinds}>", whole, -(-len(token) * (cols // vector) // BLOCK))
    return y


def embeddings(
    tables: tuple[Any, Any, Any], numbers: tuple[np.ndarray[Any, Any], ...], norm: tuple[Any, Any], eps: float
) -> Any:
    """Return LayerNorm of the sums of the tables' rows of these numbers, in the tables' dtype."""
    total = look_up(tables, *(uploaded(each.astype(np.int32)) for each in numbers))
    return layer_norm(total, *norm, eps=eps, dtype=tables[0].dtype)


def differ(x: Any, y: Any) -> bool:
    """Say whether arrays of the same size differ in a bit, and wait for the answer.

    Bytes after the last whole vector of 16 bytes are not compared.
    """
    found = uploaded(np.zeros(1, np.int32))
    dtype = np.dtype([*((name, POINTER) for name in ("x", "y", "found")), ("vectors", np.int64)], align=True)
    vectors = x.nbytes // 16
    whole = Struct("cupynorm::Differ", dtype, (x.data.ptr, y.data.ptr, found.data.ptr, vectors))
    _launch("cupynorm::differ<4>", whole, min(-(-vectors // BLOCK), MOST_BLOCKS))
    return bool(devices.cupy().asnumpy(found)[0])


def _widest(dtype: Dtype) -> int:
    return 16 // dtype.itemsize


def _launch(expression: str, arguments: Struct, grid: int) -> None:
    """Launch a kernel of bert/encoder.cuh on the current device and stream."""
    device = devices.present_device()
    text = compiler.text("bert/encoder.cuh", arguments.cpp, arguments.dtype.itemsize)
    pointer = compiler.kernel(device, text, expression, 0).pointer
    held = np.array([arguments.values], dtype=arguments.dtype)
    parameters = np.array([held.ctypes.data], np.uintp)
    devices.launch_early(pointer, (grid, 1, 1), BLOCK, 0, parameters.ctypes.data)


class Captured(NamedTuple):
    """A bucket's graph with the arrays that it reads and writes."""

    launch: Callable[[], None]
    whole: Any  # the array that numbers are parts of
    numbers: Numbers
    where: Any
    hidden: Any  # what comes in, where there are no tokens to look up
    result: Any
    calls: Iterator[int]  # counts them, from 0
    products: frozenset[Product] = frozenset()  # that cuBLAS does by its own choice


class Runner:
    """An encoder's state on a device: its products, its graphs, and their memory.

    Calls of several threads wait for one another.
    Calls on several streams do, too, on the device: each waits for the end of the one before, also where that one has
    raised.

    A signal handler may call the encoder whose call it interrupts. The interrupted call's uploads must not be
    overwritten, so another runner makes the handler's call, with a workspace, graphs and memory of its own; it is kept
    for the next one. Steps are captured, and products measured, where no handler runs (`undisturbed`):
    it would find the capturing stream to be the current one, and whatever it launches would become part of the graph.
    """

    def __init__(self, dtype: Dtype, hidden: int) -> None:
        module = devices.cupy()
        self.dtype, self.hidden = dtype, hidden
        self.device = devices.present_device()
        self.blas = Blas()
        self._graphs: collections.OrderedDict[Any, Captured] = collections.OrderedDict()
        self._lock = threading.RLock()
        self._pool = module.cuda.MemoryPool(self._allocate)
        self._short_of_memory = False  # since then the pool may have given back what graphs use
        self._stream = module.cuda.Stream(non_blocking=True)
        self._done = module.cuda.Event(disable_timing=True)  # the end of the last call
        self._unmarked = False  # a call has begun whose end is not marked by _done
        self._running = False
        self._to_release = False  # when the call that runs has ended
        self._for_handlers: Runner | None = None

    def release(self) -> None:
        """Drop all graphs and their memory when the device no longer uses them; in a signal handler, after the call."""
        with self._lock:
            if self._running:
                self._to_release = True
                return
            self._running = True  # a handler's call makes its graphs elsewhere
            try:
                with self.on_device() as stream:
                    self._await_the_last(stream)
                    self._drop_graphs()
                    self._pool.free_all_blocks()
            finally:
                self._running = self._to_release = False
            if self._for_handlers is not None:
                self._for_handlers.release()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """Make the runner's device current; give the stream that the caller is on."""
        module = devices.cupy()
        with module.cuda.Device(self.device):
            yield module.cuda.get_current_stream()

    def run(
        self,
        key: Any,
        bucket: Bucket,
        compute: Callable[[Steps, Any], Any],
        numbers: Numbers | None,
        where: np.ndarray[Any, Any] | None,
        put_in: Callable[[Any], None] | None,
        take_out: Callable[[Any], Any],
    ) -> Any:
        """Return compute(steps, hidden), by a graph that is captured when the key first comes with the bucket.

        numbers may be None where compute reads none. put_in writes a call's hidden states to the graph's input;
        take_out copies the graph's output, which other calls overwrite.
        """
        with self._lock:
            if self._running:  # in this very thread, which a signal handler has interrupted
                return self._another().run(key, bucket, compute, numbers, where, put_in, take_out)
            self._running = True
            try:
                with self.on_device() as stream:
                    self._await_the_last(stream)
                    self._unmarked = True
                    try:
                        return self._run(key, bucket, compute, numbers, where, put_in, take_out, stream)
                    finally:
                        self._done.record(stream)
                        self._unmarked = False
            finally:
                self._running = False
                if self._to_release:
                    self.release()

    def _another(self) -> Runner:
        """Return the runner of signal handlers that interrupt this one's calls."""
        if self._for_handlers is None:
            with self.on_device():
                self._for_handlers = Runner(self.dtype, self.hidden)
        return self._for_handlers

    def _await_the_last(self, stream: Any) -> None:
        """Let a stream wait for the end of the last call."""
        if self._unmarked:  # a second handler raised while the first one's exception was on its way
            devices.cupy().cuda.runtime.deviceSynchronize()
        stream.wait_event(self._done)

    def _run(
        self,
        key: Any,
        bucket: Bucket,
        compute: Callable[[Steps, Any], Any],
        numbers: Numbers | None,
        where: np.ndarray[Any, Any] | None,
        put_in: Callable[[Any], None] | None,
        take_out: Callable[[Any], Any],
        stream: Any,
    ) -> Any:
        if self._short_of_memory:
            self._drop_graphs()
        found = self._graphs.get((key, bucket))
        made = found or self._prepare(bucket, hidden=put_in is not None)
        if numbers is not None:
            _upload(made.whole, np.concatenate(numbers))
        if where is not None:
            _upload(made.where, np.ascontiguousarray(where))
        if put_in is not None:
            put_in(made.hidden)
        if next(made.calls) == MEASURED_AT - 1 and self._measure(made.products, stream):
            del self._graphs[key, bucket], found
            made, found = made._replace(launch=_nothing, result=None), None
        if found is None:
            made = self._capture(made, bucket, compute, stream)
            while len(self._graphs) >= GRAPHS:
                self._done.synchronize()  # as _drop_graphs does
                self._graphs.popitem(last=False)
            self._graphs[key, bucket] = made
        self._graphs.move_to_end((key, bucket))
        made.launch()
        return take_out(made.result)

    def _drop_graphs(self) -> None:
        """Drop all graphs, once the device has done with them: their inputs go back to the callers' allocators."""
        self._done.synchronize()
        self._graphs.clear()
        self._short_of_memory = False

    def _prepare(self, bucket: Bucket, *, hidden: bool) -> Captured:
        numbers = Numbers.of(bucket)
        whole = devices.empty((sum(map(len, numbers)),), np.dtype(np.int32))
        square = (bucket.sequences, 1, bucket.length, bucket.length)
        return Captured(
            launch=_nothing,
            whole=whole,
            numbers=numbers.parted(whole),
            where=devices.empty(square, np.dtype(np.bool_)) if bucket.looks else None,
            hidden=devices.empty((bucket.tokens, self.hidden), self.dtype) if hidden else None,
            result=None,
            calls=itertools.count(),
        )

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[Any]:
        """Make the runner's stream current, for products, too, in a thread that may be new."""
        cuda = devices.cupy().cuda
        with cuda.Device(self.device), self._stream as own:
            row_ops.calls_of_thread().prepare(self.device)
            self.blas.begin(own.ptr)
            yield own

    def _measure(self, products: Iterable[Product], stream: Any) -> bool:
        """Find out how large products are done fastest; say whether cuBLAS's own choice is not, for any of these."""
        wanted = gemm_search.unmeasured(self.blas, products)
        if wanted:
            stream.synchronize()  # nothing else shall be on the device, as far as that is ours
            undisturbed(self._measure_each, wanted)
        return any(faster.get((self.device, each)) for each in products)

    def _measure_each(self, products: Iterable[Product]) -> None:
        with self._on_own_stream():
            for each in products:
                gemm_search.measure(self.blas, each, differ)

    def _capture(
        self, made: Captured, bucket: Bucket, compute: Callable[[Steps, Any], Any], stream: Any
    ) -> Captured:
        """Run once, which compiles and allocates, then capture the same."""
        ready = devices.cupy().cuda.Event(disable_timing=True)
        ready.record(stream)
        try:
            made = undisturbed(self._captured, made, bucket, compute, ready)
            stream.wait_event(ready)
        except BaseException:
            self._stream.synchronize()  # it reads arrays that are given up now
            if self._short_of_memory:
                self._drop_graphs()
            raise
        return made

    def _captured(
        self, made: Captured, bucket: Bucket, compute: Callable[[Steps, Any], Any], ready: Any
    ) -> Captured:
        """Do the work of _capture on the runner's own stream; it waits for `ready`, then records its end there."""
        module = devices.cupy()
        steps = Steps(self, bucket, made.numbers, made.where)
        with self._on_own_stream() as own, module.cuda.using_allocator(self._pool.malloc):
            own.wait_event(ready)
            compute(steps, made.hidden)
            for _ in range(CAPTURES):
                # a pool that ran short gave back what graphs use; in a capture, perhaps what its own graph does
                if self._short_of_memory:
                    self._drop_graphs()
                graph, result = _captured_from(own, functools.partial(compute, steps, made.hidden))
                if not self._short_of_memory:
                    break
            else:
                raise MemoryError(
                    f"device memory ran short each of {CAPTURES} times while a graph was captured for {bucket}: "
                    "give back what others hold, or give smaller batches"
                )
            ready.record(own)
        products = frozenset(self.blas.asked)
        return made._replace(launch=functools.partial(_replay, graph), result=result, products=products)

    def _allocate(self, size: int) -> Any:
        """Give the pool memory; where there is none, it gives back all that is free, and tries again."""
        cuda = devices.cupy().cuda
        try:
            return cuda.MemoryPointer(cuda.Memory(size), 0)
        except cuda.runtime.CUDARuntimeError:  # CuPy's OutOfMemoryError comes from its pools
            self._short_of_memory = True
            raise


def _captured_from(stream: Any, compute: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the graph of a computation on a stream, and the arrays that it writes."""
    stream.begin_capture()
    try:
        result = compute()
    except BaseException:
        with contextlib.suppress(Exception):  # the first exception says more
            stream.end_capture()
        raise
    return stream.end_capture(), result


def undisturbed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), called where no signal handler runs: in a thread that is not the main one.

    Handlers run in the main thread meanwhile, which waits. Their exceptions are raised when the function has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    call = _Undisturbed(function, arguments)
    raised: BaseException | None = None
    try:
        call.begin()
    except BaseException as error:
        if not call.begun:
            raise
        raised = error
    while True:
        try:
            while not call.over:
                call.ended.acquire(timeout=HANDLERS_WAIT)
            break
        except BaseException as error:  # noqa: BLE001  the function's arrays are kept until it ends
            raised = error
    failed, call.error = raised or call.error, None
    try:
        if failed is not None:
            raise failed
        return call.result
    finally:
        del call, raised, failed  # its traceback holds this frame, and would hold arrays in a cycle


class _Undisturbed:
    """A call in a thread of its own.

    Made of plain locks: a handler that raises inside threading's Event or Thread.start, which are Python functions,
    may leave them locked for ever.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._gate, self.ended = threading.Lock(), threading.Lock()
        self._gate.acquire()
        self.ended.acquire()
        self.begun = self.over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Start the thread. If a handler raises here, `begun` says whether the function is called all the same."""
        try:
            _thread.start_new_thread(self._run, ())
            self.begun = True
        finally:
            self._gate.release()

    def _run(self) -> None:
        self._gate.acquire()
        try:
            if self.begun:
                self.result = self._function(*self._arguments)
        except BaseException as error:  # noqa: BLE001  it is raised where the caller waits
            self.error = error
        self.over = True
        self.ended.release()


def _replay(graph: Any) -> None:
    graph.launch(devices.cupy().cuda.get_current_stream())


def _nothing() -> None:
    """Stand for a graph that is not captured yet."""


def _upload(to: Any, array: np.ndarray[Any, Any]) -> None:
    """Copy to a contiguous array on the device. The driver has read all of `array` when this returns."""
    if array.nbytes:
        to.data.copy_from_host_async(array.ctypes.data, array.nbytes)


def uploaded(array: np.ndarray[Any, Any]) -> Any:
    """Return a copy on the current device."""
    made = devices.empty(array.shape, array.dtype)
    _upload(made, np.ascontiguousarray(array))
    return made


def copied(x: Any, out: Any, rows: np.ndarray[Any, Any] | None) -> Any:
    """Write hidden states x, or the rows of x with these numbers, to out in out's dtype. -1 gives a row of zeros."""
    return head_calls.gather(x, None if rows is None else uploaded(rows), out) if out.size else out
