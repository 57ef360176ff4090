"""Time BERT-base beside PyTorch's encoder, its six kernels beside a copy, and MiniLM beside sentence-transformers.

    python benchmarks/encoder.py --json encoder.json [--quick] [--compile] [--model FOLDER --texts texts.txt]

Needs a GPU and PyTorch; --model needs the extra `text`, and sentence-transformers for its peer. The file is complete
after each point. With --compile, each shape has a process of its own: all compile at the same time, and measure one
after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import cupynorm
from cupynorm.encoder import BertEncoder, EncoderConfig
from cupynorm.runtime import devices
from cupynorm.tools import bench
from cupynorm.tools.buffers import sets_for
from cupynorm.tools.results import OURS
from cupynorm.tools.timing import REPLAY_SECONDS, copy_runs, time_interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    # input shapes, output shape, call(inputs, output)
    Case = tuple[list[tuple[int, ...]], tuple[int, ...], Callable[..., Any]]

BASE = {
    "hidden": 768,
    "heads": 12,
    "layers": 12,
    "ffn": 3072,
    "vocabulary": 1,
    "positions": 1,
    "dtype": "float16",
}
BATCHES, LENGTHS = (1, 8, 32, 128), (32, 128, 384, 512)
QUICK = ((1, 32), (8, 128), (32, 128), (32, 512))
# Modes of torch.compile. Without its layers' fast path it sees their operations, and fuses what it can; with it, none.
COMPILED = (("default", True), ("reduce-overhead", True), ("reduce-overhead", False))
SAMPLE_SECONDS, SAMPLES = 0.02, 11  # of one sample at least; each contender has so many
WARM_CALLS = 8  # the encoder measures its products at a shape's fifth call
COMPILE_SECONDS = 300.0  # for all shapes at the same time


def random_weights(config: EncoderConfig) -> dict[str, Any]:
    """Weights as they are before training, in float16: both sides get the same bits."""
    random = np.random.default_rng(0)
    made = {}
    for name, shape in config.shapes().items():
        ones = name.endswith("LayerNorm.weight")
        values = random.standard_normal(shape, np.float32) * (0.1 if len(shape) == 1 else 0.03) + ones
        made[name] = values.astype(np.float16)
    return made


def torch_encoder(config: EncoderConfig, weights: dict[str, Any]) -> Any:
    """Return torch.nn.TransformerEncoder with the same weights, in half precision on the GPU."""
    import torch  # noqa: PLC0415  optional

    layer = torch.nn.TransformerEncoderLayer(
        config.hidden,
        config.heads,
        config.ffn,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=config.eps,
        batch_first=True,
    )
    encoder = torch.nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
    for number, each in enumerate(encoder.layers):
        at = f"encoder.layer.{number}"
        parts = [f"{at}.attention.self.{name}" for name in ("query", "key", "value")]
        pairs = {
            "self_attn.out_proj": f"{at}.attention.output.dense",
            "norm1": f"{at}.attention.output.LayerNorm",
            "linear1": f"{at}.intermediate.dense",
            "linear2": f"{at}.output.dense",
            "norm2": f"{at}.output.LayerNorm",
        }
        state = {
            f"{to}.{kind}": weights[f"{of}.{kind}"] for to, of in pairs.items() for kind in ("weight", "bias")
        }
        state["self_attn.in_proj_weight"] = np.concatenate([weights[f"{part}.weight"] for part in parts])
        state["self_attn.in_proj_bias"] = np.concatenate([weights[f"{part}.bias"] for part in parts])
        each.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return encoder.half().cuda().eval()


def torch_calls(
    encoder: Any, x: Any, notes: dict[str, str], *, compiled: bool
) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's ways to run the encoder on x."""
    import torch  # noqa: PLC0415  optional

    stream = torch.cuda.current_stream()

    def eager() -> Any:
        with torch.inference_mode():
            return encoder(x)

    calls: dict[str, Callable[[], Any]] = {"torch eager": eager}
    try:
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(3):
                eager()
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = eager()

        def replay() -> Any:
            graph.replay()
            return held

        calls["torch graph"] = replay
    except Exception as error:  # noqa: BLE001  a peer's faults are its own
        notes["torch graph"] = f"{type(error).__name__}: {error}"[:200]
    for mode, fast in COMPILED if compiled else ():
        name = f"torch compile {mode}" + ("" if fast else ", no fast path")
        try:
            calls[name] = torch_compiled(encoder, x, mode, fast=fast)
        except Exception as error:  # noqa: BLE001  a peer's faults are its own
            notes[name] = f"{type(error).__name__}: {error}"[:200]
    return calls


def torch_compiled(encoder: Any, x: Any, mode: str, *, fast: bool) -> Callable[[], Any]:
    """Return the encoder on x as torch.compile makes it, compiled and, where the mode does so, captured."""
    import torch  # noqa: PLC0415  optional

    made = torch.compile(encoder, mode=mode, dynamic=False)

    def run() -> Any:
        torch.backends.mha.set_fastpath_enabled(fast)  # dynamo's guards look at it
        with torch.inference_mode():
            return made(x)

    try:
        for _ in range(3):
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return run


def elapsed(call: Callable[[], Any], count: int) -> float:
    """Return milliseconds of one of so many calls, by events of the current stream."""
    cuda = devices.cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(begin, end)) / count


def time_in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Time all, sample by sample in turns, so that clocks and neighbours treat all alike. In milliseconds a call."""
    counts = {}
    for name, call in calls.items():
        elapsed(call, WARM_CALLS)
        counts[name] = max(2, int(SAMPLE_SECONDS * 1e3 / max(1e-3, elapsed(call, 3))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            samples[name].append(elapsed(call, counts[name]))
    return {name: _spread(found) for name, found in samples.items()}


def _spread(samples: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(samples, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def host_microseconds(call: Callable[[], Any], count: int = 20) -> float:
    """Return the host's time of one call, the queue empty before."""
    device = devices.cupy().cuda.Device()
    found = []
    for _ in range(5):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(found)


@contextlib.contextmanager
def pair() -> Iterator[tuple[BertEncoder, Any]]:
    """Give both encoders, on one stream: the legacy default one cannot be captured."""
    import torch  # noqa: PLC0415  optional

    config = EncoderConfig(**BASE)
    weights = random_weights(config)
    both = BertEncoder(config, weights, device="gpu"), torch_encoder(config, weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), devices.cupy().cuda.ExternalStream(stream.cuda_stream):
        yield both


class Ready(NamedTuple):
    """A shape whose contenders are compiled, captured and compared."""

    calls: dict[str, Callable[[], Any]]
    found: dict[str, Any]

    def measure(self) -> dict[str, Any]:
        """Time them."""
        return {
            **self.found,
            "milliseconds": time_in_turns(self.calls),
            "host_microseconds": host_microseconds(self.calls[OURS]),
        }


def prepare(ours: BertEncoder, theirs: Any, batch: int, length: int, *, compiled: bool) -> Ready:
    """Make one shape's contenders, and compare the outputs."""
    import torch  # noqa: PLC0415  optional

    random = np.random.default_rng(batch * 1000 + length)
    host = random.standard_normal((batch, length, ours.config.hidden), np.float32).astype(np.float16)
    x, tensor = devices.cupy().asarray(host), torch.from_numpy(host).cuda()
    notes: dict[str, str] = {}
    own = functools.partial(ours.forward, x)
    calls = {OURS: own, **torch_calls(theirs, tensor, notes, compiled=compiled)}
    with torch.inference_mode():
        wanted = theirs(tensor).float().cpu().numpy()
    apart = np.abs(devices.cupy().asnumpy(own()).astype(np.float32) - wanted)
    most, mean = float(apart.max()), float(apart.mean())
    found = {"batch": batch, "length": length, "most_apart": most, "mean_apart": mean, "notes": notes}
    return Ready(calls, found)


def in_this_process(shapes: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Measure shapes, torch.compile left out."""
    with pair() as both:
        for shape in shapes:
            yield prepare(*both, *shape, compiled=False).measure()


def in_processes(shapes: Iterable[tuple[int, int]], seconds: float) -> Iterator[dict[str, Any]]:
    """Measure shapes, with torch.compile, each in a process of its own, whose compiling may take `seconds`."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each process
    context = multiprocessing.get_context("spawn")
    workers = {}
    for shape in shapes:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(*shape, there), daemon=True)
        process.start()
        there.close()  # so that its end is seen here
        workers[shape] = process, here
    end = time.monotonic() + seconds
    for process, pipe in workers.values():  # nothing is measured while others compile
        if not pipe.poll(max(0, end - time.monotonic())):
            process.terminate()
    for (batch, length), (process, pipe) in workers.items():
        try:
            pipe.recv()
            pipe.send(None)
            yield pipe.recv()
        except (EOFError, OSError):
            print(f"{batch} x {length}: its process has ended", flush=True)
        process.join()


def _work(batch: int, length: int, pipe: Connection) -> None:
    """Prepare a shape, say so, and measure when told to."""
    with pair() as both:
        ready = prepare(*both, batch, length, compiled=True)
        pipe.send(None)
        pipe.recv()
        pipe.send(ready.measure())


def measure_ragged(ours: BertEncoder, batch: int, longest: int) -> dict[str, Any]:
    """Time lengths from 1/4 of the longest to all of it beside the same batch without padding."""
    random = np.random.default_rng(1)
    host = random.standard_normal((batch, longest, ours.config.hidden), np.float32).astype(np.float16)
    x, lengths = devices.cupy().asarray(host), np.linspace(longest / 4, longest, batch).astype(int)
    calls = {
        "packed": functools.partial(ours.forward, x, lengths=lengths),
        "all of it": functools.partial(ours.forward, x),
    }
    return {
        "batch": batch,
        "longest": longest,
        "tokens": int(lengths.sum()),
        "milliseconds": time_in_turns(calls),
        "host_microseconds": host_microseconds(calls["packed"]),
    }


HALF = np.dtype(np.float16)


def kernel_cases(full: Callable[..., Any], batch: int, length: int, heads: int, size: int) -> dict[str, Case]:
    """Return how the six kernels are called, by their names. full: makes an array of a shape, of random numbers."""
    tokens, hidden = batch * length, heads * size
    split, square = (batch, heads, length, size), (batch, heads, length, length)
    gamma, beta, bias, wide = (
        full(count, dtype=np.float32) for count in (hidden, hidden, hidden, 4 * hidden)
    )
    bias3 = full(3 * hidden, dtype=np.float32)
    lengths = devices.cupy().full((batch, 1, 1), length, np.int32)
    return {
        "add_qkv_bias": (
            [(batch, length, 3 * hidden)],
            (3, *split),
            lambda x, y: cupynorm.add_qkv_bias(x, bias3, heads=heads, out=y),
        ),
        "split_heads": (
            [(batch, length, hidden)],
            split,
            lambda x, y: cupynorm.split_heads(x, bias, heads=heads, out=y),
        ),
        "merge_heads": ([split], (batch, length, hidden), lambda x, y: cupynorm.merge_heads(x, out=y)),
        "masked softmax": (
            [square],
            square,
            lambda x, y: cupynorm.softmax(x, scale=size**-0.5, lengths=lengths, out=y),
        ),
        "add_layer_norm": (
            [(tokens, hidden), (tokens, hidden)],
            (tokens, hidden),
            lambda x, r, y: cupynorm.add_layer_norm(x, r, gamma, beta, bias=bias, return_sum=False, out=y),
        ),
        "bias_gelu": (
            [(tokens, 4 * hidden)],
            (tokens, 4 * hidden),
            lambda x, y: cupynorm.bias_gelu(x, wide, out=y),
        ),
    }


def kernels(batch: int = 32, length: int = 128, heads: int = 12, size: int = 64) -> dict[str, Any]:
    """Time the six kernels beside copies of the bytes that each must move."""
    module = devices.cupy()
    random = np.random.default_rng(0)

    def full(*shape: int, dtype: Any = HALF) -> Any:
        return module.asarray(random.standard_normal(shape, np.float32).astype(dtype))

    found = {}
    for name, (inputs, output, call) in kernel_cases(full, batch, length, heads, size).items():
        moved = sum(int(np.prod(shape)) for shape in [*inputs, output]) * HALF.itemsize
        sets = sets_for(moved)
        buffers = [([full(*shape) for shape in inputs], module.empty(output, HALF)) for _ in range(sets)]
        pairs = [
            (module.zeros(moved // 2, np.uint8), module.empty(moved // 2, np.uint8)) for _ in range(sets)
        ]
        notes: dict[str, str] = {}

        def run(i: int, call: Any = call, buffers: Any = buffers) -> None:
            xs, y = buffers[i]
            call(*xs, y)

        calls = max(sets, 2 * sets * -(-20 // sets))
        times = time_interleaved(
            {OURS: run, **copy_runs(pairs)},
            sets,
            calls=calls,
            seconds=REPLAY_SECONDS,
            notes=notes,
        )
        copy = min(each.median for each_name, each in times.items() if each_name != OURS)
        found[name] = {"bytes": moved, "copy_microseconds": copy * 1e6, "notes": notes}
        if OURS in times:
            own = times[OURS].median
            found[name] |= {"microseconds": own * 1e6, "share": copy / own, "host_microseconds": 0.0}
            found[name]["host_microseconds"] = host_microseconds(functools.partial(run, 0), 200)
        del buffers, pairs
        module.get_default_memory_pool().free_all_blocks()
    return found


def sentences(folder: Path, texts: Path | None) -> dict[str, Any]:
    """Time a model from texts to embeddings on the host, beside sentence-transformers."""
    from cupynorm.embedding import TextEncoder  # noqa: PLC0415  optional

    if texts is None:
        texts = Path(__file__).parents[1] / "tests" / "data" / "sentences.txt"
    lines = [line for line in texts.read_text("utf-8").splitlines() if line.strip()]
    lines = list(itertools.islice(itertools.cycle(lines), max(len(lines), 8_000)))
    found: dict[str, Any] = {"texts": len(lines)}

    def add(name: str, encode: Callable[[], Any]) -> None:
        found[name] = _rate(encode, len(lines))
        print(f"{name}: {found[name]:.0f} texts a second", flush=True)

    for dtype in ("float32", "float16", "bfloat16"):
        model = TextEncoder.load(folder, dtype=dtype, device="gpu")
        add(f"{OURS} {dtype}", functools.partial(model.embed, lines, truncate=True, max_tokens=256))
    if importlib.util.find_spec("sentence_transformers"):
        import torch  # noqa: PLC0415  optional
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  optional

        for dtype in (torch.float32, torch.float16):
            theirs = SentenceTransformer(str(folder), device="cuda", model_kwargs={"dtype": dtype})
            for size in (32, 256, 1024):
                encode = functools.partial(theirs.encode, lines, batch_size=size, show_progress_bar=False)
                add(f"sentence-transformers {str(dtype)[6:]} batch {size}", encode)
    else:
        found["notes"] = "sentence-transformers is not installed"
    return found


def _rate(encode: Callable[[], Any], texts: int) -> float:
    """Return texts a second, the best of two after one that compiles."""
    encode()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        encode()
        seconds.append(time.perf_counter() - begin)
    return texts / min(seconds)


def main() -> None:
    """Measure, print a line for each point, and write all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="four shapes only")
    parser.add_argument(
        "--compile",
        nargs="?",
        type=float,
        const=COMPILE_SECONDS,
        metavar="SECONDS",
        help=f"torch.compile as well, so long at most: {COMPILE_SECONDS:.0f} s",
    )
    parser.add_argument("--only", choices=["points", "kernels", "sentences"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=Path)
    options = parser.parse_args()
    about = bench.new_report().about
    report: dict[str, Any] = {
        "schema": 1,
        "about": about,
        "points": [],
        "ragged": [],
        "kernels": {},
        "sentences": {},
    }

    def write() -> None:
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n", "utf-8")

    if options.only in (None, "kernels"):
        report["kernels"] = kernels()
        for name, each in report["kernels"].items():
            print(name, json.dumps(each))
        write()
    points = options.only in (None, "points")
    if points:
        shapes = QUICK if options.quick else tuple(itertools.product(BATCHES, LENGTHS))
        compiled = options.compile is not None
        for point in in_processes(shapes, options.compile) if compiled else in_this_process(shapes):
            report["points"].append(point)
            print(json.dumps(point), flush=True)
            write()
        with pair() as (ours, _):
            for batch, length in ((32, 128), (32, 512)):
                report["ragged"].append(measure_ragged(ours, batch, length))
                print(json.dumps(report["ragged"][-1]), flush=True)
        write()
    if options.model and options.only in (None, "sentences"):
        report["sentences"] = sentences(options.model, options.texts)
        write()


if __name__ == "__main__":
    main()
