"""Time the functions on NumPy arrays beside a few lines of NumPy, PyTorch on one core, and another checkout.

    python benchmarks/numpy_arrays.py --json numpy-arrays.json [--before CHECKOUT] [--only softmax] [--quick]

Needs no GPU. Each contender is a process of its own, and they take turns: a sample of each, then the next of each, so
that whatever else the machine does treats all alike. The best sample counts, and ratios are what can be compared. NumPy
and PyTorch have one thread; with --threads 2, cupynorm is measured once more with two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import cupynorm
from cupynorm._dtypes import DTYPES, dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Array = np.ndarray[Any, Any]

SHAPES = ((8, 64), (1000, 1000), (10000, 128), (64, 65536), (4096, 4096))
SAMPLES, LEAST_SAMPLES = 15, 3
FEW = 10000  # elements up to which calls, not elements, take the time
SAMPLE_SECONDS = 0.01  # of one sample at least
LONGEST = 12.0  # seconds for a case, of which each contender has LEAST_SAMPLES all the same
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def composed_layer_norm(x: Array, gamma: Array, beta: Array) -> Array:
    """LayerNorm as one writes it in NumPy, in the dtype of x."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    y: Array = (x - mean) / np.sqrt(var + x.dtype.type(1e-5)) * gamma + beta
    return y


def composed_rms_norm(x: Array, gamma: Array, _: Array) -> Array:
    """RMSNorm likewise."""
    y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(1e-6)) * gamma
    return y


def composed_softmax(x: Array, *_: Array) -> Array:
    """Softmax likewise."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    y: Array = powers / powers.sum(-1, keepdims=True)
    return y


def composed_log_softmax(x: Array, *_: Array) -> Array:
    """log_softmax likewise."""
    below = x - x.max(-1, keepdims=True)
    y: Array = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return y


def composed_logsumexp(x: Array, *_: Array) -> Array:
    """Logsumexp likewise."""
    largest = x.max(-1, keepdims=True)
    y: Array = np.log(np.exp(x - largest).sum(-1)) + largest[..., 0]
    return y


def composed_softmax_backward(dy: Array, y: Array) -> Array:
    """Softmax's gradient likewise."""
    dx: Array = y * (dy - (dy * y).sum(-1, keepdims=True))
    return dx


def composed_log_softmax_backward(dy: Array, y: Array) -> Array:
    """log_softmax's gradient likewise."""
    dx: Array = dy - np.exp(y) * dy.sum(-1, keepdims=True)
    return dx


OURS: dict[str, Callable[..., Any]] = {
    "layer_norm": cupynorm.layer_norm,
    "rms_norm": lambda x, gamma, _: cupynorm.rms_norm(x, gamma),
    "softmax": lambda x, *_: cupynorm.softmax(x),
    "log_softmax": lambda x, *_: cupynorm.log_softmax(x),
    "logsumexp": lambda x, *_: cupynorm.logsumexp(x),
    "softmax_backward": cupynorm.softmax_backward,
    "log_softmax_backward": cupynorm.log_softmax_backward,
}
COMPOSED: dict[str, Callable[..., Any]] = {
    "layer_norm": composed_layer_norm,
    "rms_norm": composed_rms_norm,
    "softmax": composed_softmax,
    "log_softmax": composed_log_softmax,
    "logsumexp": composed_logsumexp,
    "softmax_backward": composed_softmax_backward,
    "log_softmax_backward": composed_log_softmax_backward,
}


def torchs(op: str) -> Callable[..., Any]:
    """Return PyTorch's function, on tensors over the same memory."""
    import torch  # noqa: PLC0415

    functional = torch.nn.functional
    torch.set_num_threads(1)
    calls: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, gamma, beta: functional.layer_norm(x, (x.shape[-1],), gamma, beta, 1e-5),
        "rms_norm": lambda x, gamma, _: functional.rms_norm(x, (x.shape[-1],), gamma, 1e-6),
        "softmax": lambda x, *_: functional.softmax(x, -1),
        "log_softmax": lambda x, *_: functional.log_softmax(x, -1),
        "logsumexp": lambda x, *_: torch.logsumexp(x, -1),
    }
    if op not in calls:
        raise NotImplementedError
    return calls[op]


class Case(NamedTuple):
    """What is timed."""

    op: str
    dtype: str
    rows: int
    cols: int


class Worker:
    """A contender in a process of its own, which answers a case with the seconds of one call."""

    def __init__(self, kind: str, checkout: Path, threads: int = 1) -> None:
        environment = {
            **os.environ,
            **ONE_THREAD,
            "CUPYNORM_THREADS": str(threads),
            "PYTHONPATH": str(checkout),
        }
        self._process: Any = subprocess.Popen(  # noqa: S603  this file
            [sys.executable, __file__, "--worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def sample(self, case: Case) -> float | None:
        """Return the seconds of one call; None if the contender cannot."""
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a contender has ended with status {self._process.wait()}: see above")
        found: float | None = json.loads(answer)
        return found

    def end(self) -> None:
        """Let the process end."""
        self._process.stdin.close()
        self._process.wait()


def work(kind: str) -> None:
    """Answer cases, a line each, until there are no more."""
    made: tuple[Case, Callable[[], Any], int] | None = None
    for line in sys.stdin:
        case = Case(*json.loads(line))
        if made is None or made[0] != case:
            try:
                call = call_of(kind, case)
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
            except (ImportError, NotImplementedError, RuntimeError):
                print("null", flush=True)
                continue
            made = case, call, max(1, int(SAMPLE_SECONDS / seconds))
        begin = time.perf_counter()
        for _ in range(made[2]):
            made[1]()
        print(json.dumps((time.perf_counter() - begin) / made[2]), flush=True)


def call_of(kind: str, case: Case) -> Callable[[], Any]:
    """Return a contender's call, on the same numbers for all."""
    random = np.random.default_rng(0)
    dtype = dtype_of(case.dtype)
    x = random.standard_normal((case.rows, case.cols), np.float32).astype(dtype)
    given: tuple[Any, ...] = (x, np.ones(case.cols, dtype), np.zeros(case.cols, dtype))
    if case.op.endswith("_backward"):
        given = x, OURS[case.op.removesuffix("_backward")](x)
    if kind == "torch":
        function = torchs(case.op)
        import torch  # noqa: PLC0415

        kinds = {"bfloat16": torch.bfloat16}
        given = tuple(
            torch.from_numpy(each.view(np.int16)).view(kinds[case.dtype])
            if case.dtype in kinds
            else torch.from_numpy(each)
            for each in given
        )
    else:
        function = (COMPOSED if kind == "numpy" else OURS)[case.op]

    def call() -> Any:
        with np.errstate(all="ignore"):
            return function(*given)

    return call


def measured(case: Case, workers: Mapping[str, Worker]) -> dict[str, Any]:
    """Return each contender's samples of a case, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in workers}
    begin = time.perf_counter()
    for turn in range(SAMPLES):
        for name, worker in workers.items():
            found = worker.sample(case)
            if found is not None:
                samples[name].append(found)
        if turn + 1 >= LEAST_SAMPLES and time.perf_counter() - begin > LONGEST:
            break
    return {**case._asdict(), "seconds": {name: each for name, each in samples.items() if each}}


def row_of(found: Mapping[str, Any], names: list[str]) -> str:
    """Return a line of the table: nanoseconds an element, or microseconds a call, of each; NumPy's time / ours."""
    seconds = found["seconds"]
    size = found["rows"] * found["cols"]
    best = {name: min(each) for name, each in seconds.items()}
    scale, unit = (1e6, "us") if size < FEW else (1e9 / size, "ns")
    shown = [f"{best[name] * scale:8.2f}" if name in best else "       -" for name in names]
    spread = max(np.quantile(each, 0.75) / min(each) for each in seconds.values())
    ratio = best["numpy"] / best["cupynorm"]
    label = f"{found['op']:20} {found['dtype']:9} {found['rows']:6} x {found['cols']:<6}"
    return f"{label} {' '.join(shown)} {unit}  numpy / cupynorm {ratio:5.2f}  spread {spread:4.2f}"


def cases(ops: list[str], dtypes: list[str], *, quick: bool) -> Iterator[Case]:
    """Yield what is timed."""
    for dtype in dtypes:
        for rows, cols in SHAPES[: 3 if quick else None]:
            for op in ops:
                yield Case(op, dtype, rows, cols)


def main() -> None:
    """Measure, print a line for each case, and keep the file complete after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the samples go")
    parser.add_argument("--before", type=Path, help="another checkout, that is measured, too")
    parser.add_argument("--threads", type=int, default=1, help="measure with so many threads, too")
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS), help="ops")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--quick", action="store_true", help="no large arrays")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    here = Path(__file__).resolve().parents[1]
    workers = {"cupynorm": Worker("cupynorm", here)}
    if options.threads > 1:
        workers[f"{options.threads} threads"] = Worker("cupynorm", here, options.threads)
    if options.before:
        workers["before"] = Worker("cupynorm", options.before.resolve())
    workers |= {name: Worker(name, here) for name in ("numpy", "torch")}
    about = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    report: dict[str, Any] = {"about": about, "date": time.strftime("%Y-%m-%d"), "cases": []}
    names = list(workers)
    print(f"{'':47} {' '.join(f'{name:>8}' for name in names)}")
    try:
        for case in cases(options.only, options.dtypes, quick=options.quick):
            report["cases"].append(measured(case, workers))
            print(row_of(report["cases"][-1], names), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    finally:
        for worker in workers.values():
            worker.end()


if __name__ == "__main__":
    main()
