"""Time the functions on NumPy arrays beside a few lines of NumPy, PyTorch, and another checkout.

    python benchmarks/numpy_arrays.py --json numpy-arrays.json [--numba] [--threads 2] [--only softmax]

Needs no GPU. Each contender is a process of its own, and they take turns: a sample of each, then the next of each, so
that other load on the machine affects all of them alike. The best sample counts; compare ratios, not times. Each
contender has one thread. --threads 2 adds cupynorm and PyTorch with two threads, --numba adds cupynorm with
CUPYNORM_NUMBA=1, and --before CHECKOUT adds another checkout. --processor-time leaves out the time that other jobs had
the cores; what they do to the caches stays, so processes differ: repeat.
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
WIDTH = len("cupynorm x16")  # of a column of the table
SAMPLE_SECONDS = 0.01  # of one sample at least
LONGEST = 12.0  # seconds for a case, of which each contender has LEAST_SAMPLES all the same
PROCESSOR_TIME = "NUMPY_ARRAYS_PROCESSOR_TIME"  # a variable of contenders' environment
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def composed_layer_norm(x: Array, gamma: Array, beta: Array, axis: int) -> Array:
    """LayerNorm as one writes it in NumPy, in the dtype of x."""
    mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    y: Array = (x - mean) / np.sqrt(var + x.dtype.type(1e-5)) * gamma + beta
    return y


def composed_rms_norm(x: Array, gamma: Array, _: Array, axis: int) -> Array:
    """RMSNorm likewise."""
    y: Array = x / np.sqrt((x * x).mean(axis, keepdims=True) + x.dtype.type(1e-6)) * gamma
    return y


def composed_softmax(x: Array, *_: Array, axis: int) -> Array:
    """Softmax likewise."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    y: Array = powers / powers.sum(axis, keepdims=True)
    return y


def composed_log_softmax(x: Array, *_: Array, axis: int) -> Array:
    """log_softmax likewise."""
    below = x - x.max(axis, keepdims=True)
    y: Array = below - np.log(np.exp(below).sum(axis, keepdims=True))
    return y


def composed_logsumexp(x: Array, *_: Array, axis: int) -> Array:
    """Logsumexp likewise."""
    largest = x.max(axis, keepdims=True)
    y: Array = np.log(np.exp(x - largest).sum(axis)) + largest.squeeze(axis)
    return y


def composed_standardize(x: Array, *_: Array, axis: int) -> Array:
    """z-scores likewise."""
    y: Array = (x - x.mean(axis, keepdims=True)) / x.std(axis, keepdims=True)
    return y


def composed_softmax_backward(dy: Array, y: Array, axis: int) -> Array:
    """Softmax's gradient likewise."""
    dx: Array = y * (dy - (dy * y).sum(axis, keepdims=True))
    return dx


def composed_log_softmax_backward(dy: Array, y: Array, axis: int) -> Array:
    """log_softmax's gradient likewise."""
    dx: Array = dy - np.exp(y) * dy.sum(axis, keepdims=True)
    return dx


def composed_layer_norm_backward(dy: Array, x: Array, gamma: Array, axis: int) -> tuple[Array, ...]:
    """LayerNorm's gradients likewise."""
    mean = x.mean(axis, keepdims=True)
    rstd = 1 / np.sqrt(x.var(axis, keepdims=True) + x.dtype.type(1e-5))
    z, g = (x - mean) * rstd, dy * gamma
    dx = rstd * (g - g.mean(axis, keepdims=True) - z * (g * z).mean(axis, keepdims=True))
    others = tuple(each for each in range(x.ndim) if each != axis % x.ndim)
    return dx, (dy * z).sum(others), dy.sum(others)


def composed_rms_norm_backward(dy: Array, x: Array, gamma: Array, axis: int) -> tuple[Array, ...]:
    """RMSNorm's gradients likewise."""
    rstd = 1 / np.sqrt((x * x).mean(axis, keepdims=True) + x.dtype.type(1e-6))
    z, g = x * rstd, dy * gamma
    others = tuple(each for each in range(x.ndim) if each != axis % x.ndim)
    return rstd * (g - z * (g * z).mean(axis, keepdims=True)), (dy * z).sum(others)


def composed_cross_entropy(x: Array, labels: Array, axis: int) -> tuple[Array, ...]:
    """The cross entropy of labels and its gradient likewise."""
    largest, at = x.max(axis, keepdims=True), np.expand_dims(labels, axis)
    powers = np.exp(x - largest)
    total = powers.sum(axis, keepdims=True)
    loss = (np.log(total) + largest - np.take_along_axis(x, at, axis)).squeeze(axis)
    powers /= total
    np.put_along_axis(powers, at, np.take_along_axis(powers, at, axis) - 1, axis)
    return loss, powers


def composed_moments(x: Array, *_: Array, axis: int) -> tuple[Array, ...]:
    """Mean, variance, skewness and kurtosis likewise."""
    mean = x.mean(axis, keepdims=True)
    apart = x - mean
    squares = apart * apart
    var = squares.mean(axis)
    return mean, var, (squares * apart).mean(axis) / var**1.5, (squares * squares).mean(axis) / var**2 - 3


def composed_normalize(x: Array, *_: Array, axis: int) -> Array:
    """L2 normalisation likewise."""
    y: Array = x / np.sqrt((x * x).sum(axis, keepdims=True))
    return y


def composed_rescale(x: Array, *_: Array, axis: int) -> Array:
    """Rescaling from 0 to 1 likewise."""
    least = x.min(axis, keepdims=True)
    y: Array = (x - least) / (x.max(axis, keepdims=True) - least)
    return y


def composed_quantized(x: Array, gamma: Array, _: Array, axis: int) -> tuple[Array, Array]:
    """RMSNorm in int8, with a scale a row, likewise."""
    y = composed_rms_norm(x, gamma, _, axis)
    scale = np.abs(y).max(axis, keepdims=True) / y.dtype.type(127)
    return np.rint(y / scale).astype(np.int8), scale


def silu(z: Array) -> Array:
    """SiLU likewise."""
    return np.asarray(z / (1 + np.exp(-z)))


def gelu(z: Array) -> Array:
    """GELU with tanh likewise."""
    kind = z.dtype.type
    return np.asarray(kind(0.5) * z * (1 + np.tanh(kind(0.7978846) * (z + kind(0.044715) * z * z * z))))


def silu_slope(z: Array) -> Array:
    """SiLU's derivative likewise."""
    s = 1 / (1 + np.exp(-z))
    return np.asarray(s * (1 + z * (1 - s)))


def gelu_slope(z: Array) -> Array:
    """The derivative of GELU with tanh likewise."""
    kind = z.dtype.type
    t = np.tanh(kind(0.7978846) * (z + kind(0.044715) * z * z * z))
    inner = kind(0.7978846) * (1 + kind(3 * 0.044715) * z * z)
    return np.asarray(kind(0.5) * (1 + t) + kind(0.5) * z * (1 - t * t) * inner)


def gated(activation: Callable[[Array], Array]) -> Callable[..., Array]:
    """Return a gate likewise."""

    def composed(x: Array, bias: Array, axis: int) -> Array:  # noqa: ARG001
        z = x + bias
        cols = z.shape[-1] // 2
        return np.asarray(activation(z[..., :cols]) * z[..., cols:])

    return composed


def sloped(slope: Callable[[Array], Array]) -> Callable[..., Any]:
    """Return an activation's gradients likewise."""

    def composed(dy: Array, x: Array, bias: Array, axis: int) -> tuple[Array, Array]:  # noqa: ARG001
        dx = dy * slope(x + bias)
        return dx, dx.sum(0)

    return composed


def composed_swiglu_backward(dy: Array, x: Array, bias: Array, axis: int) -> tuple[Array, Array]:  # noqa: ARG001
    """SwiGLU's gradients likewise."""
    z = x + bias
    cols = z.shape[-1] // 2
    of_gate = dy * z[..., cols:] * silu_slope(z[..., :cols])
    dx = np.concatenate([of_gate, dy * silu(z[..., :cols])], -1)
    return dx, dx.sum(0)


OURS: dict[str, Callable[..., Any]] = {
    "layer_norm": cupynorm.layer_norm,
    "rms_norm": lambda x, gamma, _, axis: cupynorm.rms_norm(x, gamma, axis=axis),
    "softmax": lambda x, *_, axis: cupynorm.softmax(x, axis=axis),
    "log_softmax": lambda x, *_, axis: cupynorm.log_softmax(x, axis=axis),
    "logsumexp": lambda x, *_, axis: cupynorm.logsumexp(x, axis=axis),
    "standardize": lambda x, *_, axis: cupynorm.standardize(x, axis=axis),
    "softmax_backward": cupynorm.softmax_backward,
    "log_softmax_backward": cupynorm.log_softmax_backward,
    "layer_norm_backward": cupynorm.layer_norm_backward,
    "rms_norm_backward": cupynorm.rms_norm_backward,
    "cross_entropy": lambda x, labels, axis: cupynorm.cross_entropy(x, labels, axis=axis, return_grad=True),
    "moments": lambda x, *_, axis: cupynorm.moments(x, axis=axis, order=4),
    "normalize": lambda x, *_, axis: cupynorm.normalize(x, axis=axis),
    "rescale": lambda x, *_, axis: cupynorm.rescale(x, axis=axis),
    "rms_norm in int8": lambda x, gamma, _, axis: cupynorm.rms_norm(x, gamma, axis=axis, quantize="int8"),
    "bias_silu": lambda x, bias, axis: cupynorm.bias_silu(x, bias),  # noqa: ARG005
    "bias_gelu": lambda x, bias, axis: cupynorm.bias_gelu(x, bias, approximate="tanh"),  # noqa: ARG005
    "swiglu": lambda x, bias, axis: cupynorm.swiglu(x, bias),  # noqa: ARG005
    "geglu": lambda x, bias, axis: cupynorm.geglu(x, bias, approximate="tanh"),  # noqa: ARG005
    "bias_silu_backward": lambda dy, x, bias, axis: cupynorm.bias_silu_backward(dy, x, bias),  # noqa: ARG005
    "bias_gelu_backward": lambda dy, x, bias, axis: cupynorm.bias_gelu_backward(  # noqa: ARG005
        dy, x, bias, approximate="tanh"
    ),
    "swiglu_backward": lambda dy, x, bias, axis: cupynorm.swiglu_backward(dy, x, bias),  # noqa: ARG005
}
COMPOSED: dict[str, Callable[..., Any]] = {
    "layer_norm": composed_layer_norm,
    "rms_norm": composed_rms_norm,
    "softmax": composed_softmax,
    "log_softmax": composed_log_softmax,
    "logsumexp": composed_logsumexp,
    "standardize": composed_standardize,
    "softmax_backward": composed_softmax_backward,
    "log_softmax_backward": composed_log_softmax_backward,
    "layer_norm_backward": composed_layer_norm_backward,
    "rms_norm_backward": composed_rms_norm_backward,
    "cross_entropy": composed_cross_entropy,
    "moments": composed_moments,
    "normalize": composed_normalize,
    "rescale": composed_rescale,
    "rms_norm in int8": composed_quantized,
    "bias_silu": lambda x, bias, axis: silu(x + bias),  # noqa: ARG005
    "bias_gelu": lambda x, bias, axis: gelu(x + bias),  # noqa: ARG005
    "swiglu": gated(silu),
    "geglu": gated(gelu),
    "bias_silu_backward": sloped(silu_slope),
    "bias_gelu_backward": sloped(gelu_slope),
    "swiglu_backward": composed_swiglu_backward,
}
ELEMENTWISE = tuple(op for op in OURS if op.startswith(("bias", "swiglu", "geglu")))  # which have no axis
OUTER = 4  # where the axis is the middle one, arrays are OUTER x columns x rows / OUTER


def torchs(op: str) -> Callable[..., Any]:
    """Return PyTorch's function, on tensors over the same memory."""
    import torch  # noqa: PLC0415

    functional = torch.nn.functional
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    calls: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, gamma, beta, axis: functional.layer_norm(
            x, x.shape[axis:], gamma, beta, 1e-5
        ),
        "rms_norm": lambda x, gamma, _, axis: functional.rms_norm(x, x.shape[axis:], gamma, 1e-6),
        "softmax": lambda x, *_, axis: functional.softmax(x, axis),
        "log_softmax": lambda x, *_, axis: functional.log_softmax(x, axis),
        "logsumexp": lambda x, *_, axis: torch.logsumexp(x, axis),
    }
    if op not in calls:
        raise NotImplementedError
    return calls[op]


class Case(NamedTuple):
    """What is timed. axis: along which the rows lie: the last, -1; the first, 0; or the middle one of three, 1."""

    op: str
    dtype: str
    rows: int
    cols: int
    axis: int = -1


class Worker:
    """A contender in a process of its own, which answers a case with the seconds of one call."""

    def __init__(self, kind: str, checkout: Path, threads: int = 1, *, numba: bool = False) -> None:
        environment = {
            **os.environ,
            **(dict.fromkeys(ONE_THREAD, str(threads)) if kind == "torch" else ONE_THREAD),
            "CUPYNORM_THREADS": str(threads),
            "CUPYNORM_NUMBA": str(int(numba)),
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
        print(json.dumps(least_seconds(made[1], made[2])), flush=True)


def least_seconds(call: Callable[[], Any], times: int) -> float:
    """Return the seconds of the fastest of so many calls: other load on the machine interrupts some of them."""
    clock = time.process_time if os.environ.get(PROCESSOR_TIME) else time.perf_counter
    found = []
    for _ in range(times):
        begin = clock()
        call()
        found.append(clock() - begin)
    return min(found)


def call_of(kind: str, case: Case) -> Callable[[], Any]:
    """Return a contender's call, on the same numbers for all."""
    random = np.random.default_rng(0)
    dtype = dtype_of(case.dtype)
    shapes = {
        -1: (case.rows, case.cols),
        0: (case.cols, case.rows),
        1: (OUTER, case.cols, case.rows // OUTER),
    }
    halves = case.op.startswith(("swiglu", "geglu"))
    shape = (case.rows, case.cols * (2 if halves else 1)) if case.op in ELEMENTWISE else shapes[case.axis]
    x = random.standard_normal(shape, np.float32).astype(dtype)
    along = (shape[case.axis],) if case.axis == -1 or kind == "cupynorm" else (case.cols, 1)
    given: tuple[Any, ...] = (x, np.ones(along, dtype), np.zeros(along, dtype))
    if case.op in ELEMENTWISE:
        dy = x[::-1, : case.cols].copy()
        given = (dy, x, given[2]) if case.op.endswith("_backward") else (x, given[2])
    elif case.op.endswith("softmax_backward"):
        given = x, OURS[case.op.removesuffix("_backward")](x, axis=case.axis)
    elif case.op.endswith("_backward"):
        given = x, x[::-1].copy(), given[1]
    elif case.op == "cross_entropy":
        rows = [extent for axis, extent in enumerate(shape) if axis != case.axis % len(shape)]
        given = x, random.integers(0, case.cols, rows)
    if kind == "torch":
        if case.axis != -1 and "norm" in case.op:
            raise NotImplementedError
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
            return function(*given, axis=case.axis)

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
    shown = [f"{best[name] * scale:{WIDTH}.2f}" if name in best else f"{'-':>{WIDTH}}" for name in names]
    spread = max(np.quantile(each, 0.75) / min(each) for each in seconds.values())
    ratio = best["numpy"] / best["cupynorm"]
    op = found["op"] + ("" if found["axis"] == -1 else f", axis {found['axis']}")
    label = f"{op:28} {found['dtype']:9} {found['rows']:6} x {found['cols']:<6}"
    return f"{label} {' '.join(shown)} {unit}  numpy / cupynorm {ratio:5.2f}  spread {spread:4.2f}"


def cases(
    ops: list[str], dtypes: list[str], axes: list[int], shapes: list[tuple[int, int]]
) -> Iterator[Case]:
    """Yield what is timed."""
    for dtype in dtypes:
        for rows, cols in shapes:
            for op in ops:
                for axis in axes:
                    if axis == -1 or op not in ELEMENTWISE:
                        yield Case(op, dtype, rows, cols, axis)


def main() -> None:
    """Measure, print a line for each case, and keep the file complete after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the samples go")
    parser.add_argument("--before", type=Path, help="another checkout, that is measured, too")
    parser.add_argument("--numba", action="store_true", help="measure with loops that numba compiles, too")
    parser.add_argument("--threads", type=int, default=1, help="measure with so many threads, too")
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS), help="ops")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--axes", nargs="+", type=int, choices=(-1, 0, 1), default=[-1, 0, 1], help="along which rows go"
    )
    shape: Any = lambda text: tuple(map(int, text.split("x")))  # noqa: E731
    parser.add_argument(
        "--shapes", nargs="+", type=shape, default=SHAPES, help="rows x columns: 1000x1000 ..."
    )
    parser.add_argument("--processor-time", action="store_true", help="not wall time; of one thread")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    if options.processor_time:
        os.environ[PROCESSOR_TIME] = "1"
    here = Path(__file__).resolve().parents[1]
    workers = {"cupynorm": Worker("cupynorm", here)}
    if options.numba:
        workers["numba"] = Worker("cupynorm", here, numba=True)
    if options.before:
        workers["before"] = Worker("cupynorm", options.before.resolve())
    workers |= {name: Worker(name, here) for name in ("numpy", "torch")}
    if options.threads > 1:
        for name in ("cupynorm", *(["numba"] if options.numba else []), "torch"):
            kind = "torch" if name == "torch" else "cupynorm"
            workers[f"{name} x{options.threads}"] = Worker(kind, here, options.threads, numba=name == "numba")
    about = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    report: dict[str, Any] = {"about": about, "date": time.strftime("%Y-%m-%d"), "cases": []}
    names = list(workers)
    print(f"{'':55} {' '.join(f'{name:>{WIDTH}}' for name in names)}")
    try:
        for case in cases(options.only, options.dtypes, options.axes, options.shapes):
            report["cases"].append(measured(case, workers))
            print(row_of(report["cases"][-1], names), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    finally:
        for worker in workers.values():
            worker.end()


if __name__ == "__main__":
    main()
