"""Runs the encoder's steps on a device by CUDA graphs.

One graph is kept per bucket: a number of sequences, their length, and a number of packed tokens. Inputs are copied to
the bucket's own arrays. Intermediate arrays are allocated from a pool while the graph is captured, and their memory is
reused as soon as it is freed; all graphs share it, because they never run at the same time. A graph that is used often
is captured again, with the fastest algorithm that cublasLt has for each large product (gemm_search.py).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype
from cupynorm.bert import gemm_search
from cupynorm.bert.buckets import Bucket, Numbers
from cupynorm.bert.device_steps import Steps, differ, upload
from cupynorm.bert.gemm import Blas, Product, faster
from cupynorm.bert.undisturbed import undisturbed
from cupynorm.invoke import row_ops
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


GRAPHS = 64  # graphs that an encoder keeps, the most recently used
CAPTURES = 3  # attempts to capture a graph, if memory runs short
# The call of a bucket at which products are measured: measuring takes as long as some calls, and must pay off.
MEASURED_AT = 5


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
            upload(made.whole, np.concatenate(numbers))
        if where is not None:
            upload(made.where, np.ascontiguousarray(where))
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
        steps = Steps(self.blas, self.dtype, self.device, bucket, made.numbers, made.where)
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


def _replay(graph: Any) -> None:
    graph.launch(devices.cupy().cuda.get_current_stream())


def _nothing() -> None:
    """Stand for a graph that is not captured yet."""
