"""The encoder on a device gives what it gives on NumPy arrays.

The simulator has no graphs: there, each call computes anew; and steps without a kernel are the host's.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynorm import add_layer_norm, bias_gelu, softmax
from cupynorm._dtypes import dtype_of
from cupynorm.bert import device_steps, few_tokens, gemm, gemm_search, runner
from cupynorm.bert.buckets import Bucket, Numbers
from cupynorm.bert.gemm import Blas
from cupynorm.bert.runner import MEASURED_AT, Runner
from cupynorm.encoder import BertEncoder, EncoderConfig
from cupynorm.runtime import devices
from tests.gpu.conftest import SIMULATED

SIZES = {"hidden": 32, "heads": 4, "layers": 2, "ffn": 48, "vocabulary": 50, "positions": 40}
LENGTHS = [5, 1, 0, 9, 9, 3]


def weights(config: EncoderConfig) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        name: random.normal(name.endswith("LayerNorm.weight"), 0.3, shape).astype(np.float32)
        for name, shape in config.shapes().items()
    }


def on_host(xp: Any, function: Any) -> Any:
    """Return what a function of NumPy arrays does to those of the simulator."""

    def call(*arrays: Any, out: Any = None, **options: Any) -> Any:
        host = [each.get() if isinstance(each, xp.ndarray) else each for each in arrays]
        options = {
            name: each.get() if isinstance(each, xp.ndarray) else each for name, each in options.items()
        }
        made = function(*host, **options)
        if out is not None:
            out[...] = made
            return out
        return tuple(map(xp.asarray, made)) if isinstance(made, tuple) else xp.asarray(made)

    return call


def without_graph(run: Any, made: Any, bucket: Any, compute: Any, stream: Any) -> Any:
    steps = device_steps.Steps(run.blas, run.dtype, run.device, bucket, made.numbers, made.where)
    result = compute(steps, made.hidden)

    def launch() -> None:
        result[...] = compute(steps, made.hidden).get()

    return made._replace(launch=launch, result=result)


@pytest.fixture
def device(xp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy, with all that an encoder needs."""
    if SIMULATED:
        monkeypatch.setattr(Runner, "_capture", without_graph)
        for name, function in {
            "softmax": softmax,
            "add_layer_norm": add_layer_norm,
            "bias_gelu": bias_gelu,
        }.items():
            monkeypatch.setattr(device_steps, name, on_host(xp, function))
    return xp


def both(**options: Any) -> tuple[BertEncoder, BertEncoder]:
    """Return the same encoder on the host and on the device."""
    config = EncoderConfig(**{**SIZES, **options})
    made = weights(config)
    return BertEncoder(config, made), BertEncoder(config, made, device="gpu")


def assert_near(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    """Compare by the cosine of rows, and element by element."""
    tolerance = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}[dtype]
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)

    np.testing.assert_allclose(found, wanted, atol=tolerance * max(1.0, np.abs(wanted).max(initial=0)))


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_hidden_states_are_those_of_the_host(device: Any, norm: Any, dtype: str) -> None:
    host, there = both(norm=norm, dtype=dtype)
    hidden = np.random.default_rng(1).normal(size=(len(LENGTHS), 9, 32)).astype(dtype_of(dtype))

    for lengths in (None, LENGTHS, [9, 9, 9, 9, 9, 8], [8] * 6):
        y = there.forward(device.asarray(hidden), lengths=lengths)

        assert type(y) is device.ndarray
        assert y.dtype == dtype_of(dtype)
        assert_near(device.asnumpy(y), host.forward(hidden, lengths=lengths), dtype)


@pytest.mark.small
@pytest.mark.parametrize("most", [0, few_tokens.MOST])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_in_one_launch_gives_the_same(
    device: Any, monkeypatch: Any, dtype: str, norm: Any, most: int
) -> None:
    monkeypatch.setattr(few_tokens, "MOST", most)  # of tokens that have products of their own
    host, there = both(hidden=64, dtype=dtype, norm=norm)
    hidden = np.random.default_rng(1).normal(size=(len(LENGTHS), 9, 64)).astype(dtype_of(dtype))
    texts = [list(range(length)) for length in LENGTHS]

    for lengths in (LENGTHS, None):
        y = there.forward(device.asarray(hidden), lengths=lengths)

        assert_near(device.asnumpy(y), host.forward(hidden, lengths=lengths), dtype)
    assert_near(device.asnumpy(there.embed(texts)), host.embed(texts), dtype)


@pytest.mark.small
@pytest.mark.parametrize("shape", [(8, 16), (3, 9), (1, 1)])
def test_a_graph_is_used_again_for_other_values(device: Any, shape: Any) -> None:
    host, there = both()

    for seed in range(3):
        hidden = np.random.default_rng(seed).normal(size=(*shape, 32)).astype(np.float32)
        first = there.forward(device.asarray(hidden))
        there.forward(device.asarray(-hidden))

        assert_near(device.asnumpy(first), host.forward(hidden), "float32")
    assert len(there._runner._graphs) == 1


@pytest.mark.small
def test_each_token_may_look_where_its_mask_says(device: Any) -> None:
    host, there = both()
    random = np.random.default_rng(3)
    hidden, mask = random.normal(size=(3, 7, 32)).astype(np.float32), random.random((3, 7, 7)) < 0.6

    holes = np.arange(10) % 5 != 2  # 8 of 10 in each
    wide = random.normal(size=(3, 10, 32)).astype(np.float32)
    for x, keep in ((hidden, mask), (hidden, mask[:, 0]), (wide, np.stack([holes] * 3))):
        y = there.forward(device.asarray(x), mask=keep)

        assert_near(device.asnumpy(y), host.forward(x, mask=keep), "float32")


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_products_are_row_major(device: Any, dtype: str) -> None:
    random, kind = np.random.default_rng(0), dtype_of(dtype)
    a, b, flat = (random.normal(size=shape).astype(kind) for shape in ((2, 3, 5, 8), (2, 3, 7, 8), (6, 8)))
    wide = np.float64 if dtype == "float64" else np.float32
    blas = Blas()
    blas.begin(device.cuda.get_current_stream().ptr)
    out, scores, values = (
        device.empty((6, 7), kind),
        device.empty((2, 3, 5, 7), wide),
        device.empty((2, 3, 5, 8), kind),
    )

    blas.linear(device.asarray(flat), device.asarray(b[0, 0]), out)
    blas.products(device.asarray(a), device.asarray(b), scores, transposed=True, alpha=0.5)
    blas.products(device.asarray(np.ascontiguousarray(a[..., :7])), device.asarray(b), values)

    left, right = a.astype(np.float64), b.astype(np.float64)
    assert_near(device.asnumpy(out), flat.astype(np.float64) @ right[0, 0].T, dtype)
    assert_near(
        device.asnumpy(scores),
        left @ right.swapaxes(-1, -2) / 2,
        "float64" if dtype == "float64" else "float32",
    )
    assert_near(device.asnumpy(values), left[..., :7] @ right, dtype)


@pytest.mark.small
@pytest.mark.parametrize("size", [1, 4 * 9 * 9 * 4, 9 * 9 * 4 * 2])
def test_scores_may_be_cut_into_pieces(device: Any, monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr(device_steps, "SCORE_BYTES", size)
    host, there = both()
    hidden = np.random.default_rng(1).normal(size=(3, 9, 32)).astype(np.float32)

    y = there.forward(device.asarray(hidden), lengths=[2, 9, 4])

    assert_near(device.asnumpy(y), host.forward(hidden, lengths=[2, 9, 4]), "float32")


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_those_of_the_host(device: Any, pooling: Any, normalize: bool, dtype: str) -> None:
    host, there = both(dtype=dtype)
    random = np.random.default_rng(5)
    texts = [random.integers(0, 50, length).tolist() for length in LENGTHS]
    types = [random.integers(0, 2, length).tolist() for length in LENGTHS]

    y = there.embed(texts, types=types, pooling=pooling, normalize=normalize)

    assert type(y) is device.ndarray
    wanted = host.embed(texts, types=types, pooling=pooling, normalize=normalize)
    assert y.dtype == wanted.dtype
    assert_near(device.asnumpy(y), wanted, dtype)


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_the_other_texts_say_changes_no_bit_of_a_row(device: Any, dtype: str) -> None:
    random = np.random.default_rng(5)
    texts, others = ([random.integers(0, 50, length).tolist() for length in LENGTHS] for _ in range(2))

    for encoder in both(dtype=dtype, hidden=64):
        first = encoder.embed(texts)
        second = encoder.embed([*others[:3], texts[3], *others[4:]])

        assert device.asnumpy(first[3]).tobytes() == device.asnumpy(second[3]).tobytes()
        assert device.asnumpy(first[4]).tobytes() != device.asnumpy(second[4]).tobytes()


@pytest.mark.small
def test_embeddings_of_tokens_are_looked_up(device: Any) -> None:
    host, there = both()
    tokens = np.random.default_rng(5).integers(0, 50, (3, 7))

    assert_near(device.asnumpy(there.look_up(tokens)), host.look_up(tokens), "float32")


@pytest.mark.small
def test_nothing_gives_zeros_or_no_rows(device: Any) -> None:
    _, there = both()

    assert device.asnumpy(there.embed([[], []])).tolist() == np.zeros((2, 32)).tolist()
    assert there.embed([]).shape == (0, 32)
    assert there.forward(device.empty((0, 5, 32), np.float32)).shape == (0, 5, 32)
    assert not device.asnumpy(there.forward(device.zeros((1, 5, 32), np.float32), lengths=[0])).any()
    assert there.look_up(np.zeros((2, 0), int)).shape == (2, 0, 32)


@pytest.mark.small
def test_arrays_of_the_wrong_place_are_refused(device: Any) -> None:
    host, there = both()

    with pytest.raises(TypeError, match="hidden is not a CuPy array, and the encoder is on a GPU"):
        there.forward(np.zeros((1, 2, 32), np.float32))
    with pytest.raises(TypeError, match="hidden is a CuPy array"):
        host.forward(device.zeros((1, 2, 32), np.float32))
    with pytest.raises(TypeError, match="tokens is a CuPy array"):
        there.embed(device.zeros((1, 2), np.int32))


@pytest.mark.small
def test_graphs_are_bounded_and_can_be_released(device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(runner, "GRAPHS", 2)
    host, there = both()
    texts = {count: [[1, 2, 3]] * count for count in (1, 2, 3)}

    for count in (1, 2, 3, 1):
        y = there.embed(texts[count])
        assert_near(device.asnumpy(y), host.embed(texts[count]), "float32")
    kept = len(there._runner._graphs)
    there.release()

    assert (kept, len(there._runner._graphs)) == (2, 0)
    assert_near(device.asnumpy(there.embed(texts[2])), host.embed(texts[2]), "float32")


@pytest.mark.small
@pytest.mark.parametrize("hidden", [32, 33, 2100])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_width_is_pooled(device: Any, dtype: str, hidden: int) -> None:
    x = np.random.default_rng(1).normal(size=(12, hidden)).astype(dtype)
    bucket = Bucket(4, 8, 12, whole=False)
    numbers = Numbers.of(bucket)
    numbers.start[:3], numbers.count[:3] = [0, 7, 7], [7, 0, 5]
    numbers = Numbers(*map(device_steps.uploaded, numbers))
    steps = device_steps.Steps(None, None, 0, bucket, numbers, None)

    y = device.asnumpy(steps.pool(device.asarray(x), 1e-12))

    wanted = np.zeros((4, hidden))
    for row, part in ((0, x[:7]), (2, x[7:])):
        mean = part.astype(np.float64).mean(axis=0)
        wanted[row] = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-6 if dtype != "float64" else 1e-14)


def test_two_streams_and_threads_do_not_mix(cuda: Any) -> None:
    host, there = both()
    hidden = [np.random.default_rng(seed).normal(size=(8, 16, 32)).astype(np.float32) for seed in range(4)]
    streams = [cuda.cuda.Stream(non_blocking=True) for _ in hidden]
    x = [cuda.asarray(each) for each in hidden]
    cuda.cuda.Device().synchronize()
    found = []
    for each, stream in zip(x, streams, strict=True):
        with stream:
            found.append(there.forward(each))
    cuda.cuda.Device().synchronize()

    for y, each in zip(found, hidden, strict=True):
        assert_near(cuda.asnumpy(y), host.forward(each), "float32")


def test_nothing_is_allocated_by_a_graph_that_is_there(cuda: Any) -> None:
    _, there = both()
    x = cuda.ones((8, 16, 32), np.float32)
    y = there.forward(x)
    del y
    total = cuda.get_default_memory_pool().total_bytes(), there._runner._pool.total_bytes()

    for _ in range(3):
        there.forward(x)

    assert (cuda.get_default_memory_pool().total_bytes(), there._runner._pool.total_bytes()) == total


@pytest.mark.small
@pytest.mark.parametrize("faster", [True, False])
def test_a_graph_that_is_used_often_is_captured_again_if_that_is_faster(
    device: Any, monkeypatch: Any, faster: bool
) -> None:
    host, there = both()
    hidden = np.random.default_rng(0).normal(size=(8, 16, 32)).astype(np.float32)
    events: list[str] = []
    capture = Runner._capture

    def measure(*_: Any) -> bool:
        events.append("measured")
        return faster

    def count(*arguments: Any) -> Any:
        events.append("captured")
        return capture(*arguments)

    monkeypatch.setattr(Runner, "_measure", measure)
    monkeypatch.setattr(Runner, "_capture", count)
    for _ in range(2 * MEASURED_AT):
        events.append("called")
        assert_near(device.asnumpy(there.forward(device.asarray(hidden))), host.forward(hidden), "float32")

    before = ["called", "captured", *["called"] * (MEASURED_AT - 1)]
    after = [*["captured"] * faster, *["called"] * MEASURED_AT]
    assert events == [*before, "measured", *after]
    assert len(there._runner._graphs) == 1


@pytest.mark.small
@pytest.mark.parametrize("count", [1, 100, 4099])
def test_arrays_that_differ_in_a_bit_are_told_apart(device: Any, count: int) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 4 * count, np.uint32)

    assert not device_steps.differ(device.asarray(x), device.asarray(x.copy()))
    for at in {0, 2 * count, 4 * count - 1}:
        y = x.copy()
        y[at] ^= 1 << at % 32
        assert device_steps.differ(device.asarray(x), device.asarray(y))


WIDE = {"hidden": 768, "heads": 12, "layers": 1, "ffn": 3072, "vocabulary": 1, "positions": 1}
SHAPE = (32, 128)


@pytest.fixture
def unknown() -> Any:
    """Give the ways in which products are faster: none is known yet."""
    before = dict(gemm.faster)
    gemm.faster.clear()
    yield gemm.faster
    gemm.faster.clear()
    gemm.faster.update(before)


def of_calls(dtype: str) -> list[str]:
    """Return a digest of each of so many calls that products are measured between two of them."""
    module = devices.cupy()
    encoder = BertEncoder(config := EncoderConfig(**WIDE, dtype=dtype), weights(config), device="gpu")
    hidden = np.random.default_rng(7).normal(size=(*SHAPE, 768)).astype(dtype_of(dtype))
    x = module.asarray(hidden)
    return [
        hashlib.sha256(module.asnumpy(encoder.forward(x)).tobytes()).hexdigest()
        for _ in range(MEASURED_AT + 2)
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_measured_products_leave_every_bit(cuda: Any, unknown: Any, monkeypatch: Any, dtype: str) -> None:
    monkeypatch.setattr(gemm_search, "WORTH", 10.0)  # any algorithm is better than cuBLAS's choice
    monkeypatch.setattr(gemm_search, "LEAST_OPERATIONS", 1)
    monkeypatch.setattr(gemm_search, "DTYPES", [dtype])

    digests = of_calls(dtype)

    assert len(set(digests)) == 1
    assert len(unknown) == 4  # qkv, attention's, ffn's two
    assert any(unknown.values())


def test_another_process_gives_the_same_bits(cuda: Any) -> None:
    code = "from tests.gpu.test_encoder import of_calls; print(*of_calls('float16'))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)

    assert set(done.stdout.split()) == set(of_calls("float16"))


def test_measuring_keeps_no_memory(cuda: Any, unknown: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(gemm_search, "LEAST_OPERATIONS", 1)
    monkeypatch.setattr(gemm_search, "WORTH", 10.0)
    config = EncoderConfig(**WIDE, dtype="float16")
    encoder = BertEncoder(config, weights(config), device="gpu")
    x = cuda.ones((8, 104, 768), np.float16)
    pools, found = (cuda.get_default_memory_pool(), encoder._runner._pool), []

    for _ in range(MEASURED_AT + 2):
        encoder.forward(x)
        found.append([pool.total_bytes() for pool in pools])

    assert any(unknown.values())
    assert found[-1] == found[1]


def test_no_memory_to_measure_in_leaves_the_product_to_cublas(cuda: Any, unknown: Any) -> None:
    blas = Blas()
    blas.begin(cuda.cuda.get_current_stream().ptr)
    product = gemm.Product(1 << 28, 1 << 12, 1 << 12, "float16", gemm.ALIGNED)  # 2 TB

    gemm_search.measure(blas, product, device_steps.differ)

    assert unknown == {(blas.device, product): None}


def test_a_pool_that_is_short_of_memory_is_noticed(cuda: Any) -> None:
    _, there = both()

    with pytest.raises(cuda.cuda.memory.OutOfMemoryError):
        there._runner._pool.malloc(1 << 46)

    assert there._runner._short_of_memory


def test_no_graph_is_replayed_on_memory_that_was_given_back(cuda: Any, monkeypatch: Any) -> None:
    config = EncoderConfig(**{**SIZES, "hidden": 256, "ffn": 1024}, dtype="float16")
    encoder = BertEncoder(config, weights(config), device="gpu")
    small = cuda.asarray(np.random.default_rng(0).normal(size=(8, 128, 256)).astype(np.float16))
    large = cuda.zeros((64, 512, 256), np.float16)
    wanted = [cuda.asnumpy(encoder.forward(small)) for _ in range(3)][-1]
    graphs, pool = dict(encoder._runner._graphs), encoder._runner._pool
    before, memory = pool.total_bytes(), cuda.cuda.Memory

    def little(size: int) -> Any:
        if size > 4 << 20:
            raise cuda.cuda.runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation
        return memory(size)

    monkeypatch.setattr(cuda.cuda, "Memory", little)
    with pytest.raises(cuda.cuda.memory.OutOfMemoryError):
        encoder.forward(large)
    monkeypatch.undo()
    assert pool.total_bytes() < before  # else nothing is shown
    guards = [memory(1 << 19) for _ in range(64)]
    views = [cuda.ndarray((1 << 19,), np.uint8, cuda.cuda.MemoryPointer(each, 0)) for each in guards]
    for each in views:
        each.fill(0xAB)
    cuda.cuda.Device().synchronize()

    found = cuda.asnumpy(encoder.forward(small))

    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))
    assert all(bool((each == 0xAB).all()) for each in views)
    assert not any(encoder._runner._graphs.get(key) is each for key, each in graphs.items())
    assert cuda.asnumpy(encoder.forward(large)).shape == large.shape


def test_a_call_that_failed_leaves_the_next_one_right_on_another_stream(cuda: Any, monkeypatch: Any) -> None:
    host, there = both()
    hidden = np.random.default_rng(1).normal(size=(8, 16, 32)).astype(np.float32)
    x = cuda.asarray(hidden)
    there.forward(x)
    cuda.cuda.Device().synchronize()
    copied = device_steps.copied

    def fail_at_the_end(given: Any, out: Any, rows: Any) -> Any:
        if given is not x:
            raise InterruptedError
        return copied(given, out, rows)

    streams = [cuda.cuda.Stream(non_blocking=True) for _ in range(2)]
    for _ in range(20):
        monkeypatch.setattr(device_steps, "copied", fail_at_the_end)
        with streams[0], pytest.raises(InterruptedError):
            there.forward(x)
        monkeypatch.undo()
        with streams[1]:
            y = there.forward(x)
            streams[1].synchronize()
        assert_near(cuda.asnumpy(y), host.forward(hidden), "float32")


def test_a_signal_handler_may_call_the_encoder_that_it_interrupts(cuda: Any, monkeypatch: Any) -> None:
    config = EncoderConfig(**{**SIZES, "hidden": 64}, dtype="float16")
    encoder = BertEncoder(config, weights(config), device="gpu")
    random = np.random.default_rng(1)
    x, other = (cuda.asarray(random.normal(size=(8, 16, 64)).astype(np.float16)) for _ in range(2))
    wanted, its = (cuda.asnumpy(encoder.forward(each)).tobytes() for each in (x, other))
    wrong, count, busy = [], 0, False

    def handler(*_: Any) -> None:
        nonlocal count, busy
        if not busy:
            busy = True
            try:
                count += 1
                if cuda.asnumpy(encoder.forward(other)).tobytes() != its:
                    wrong.append("the handler's")
            finally:
                busy = False

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        end, calls = time.monotonic() + 3, 0
        while time.monotonic() < end:
            calls += 1
            if calls % 50 == 0:
                encoder.release()
            if cuda.asnumpy(encoder.forward(x)).tobytes() != wanted:
                wrong.append("the interrupted one's")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert count > 20
    assert not wrong, f"{len(wrong)} of {calls} calls and {count} signals: {set(wrong)}"
