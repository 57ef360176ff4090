"""Time forms along the first and a middle axis, as shares of the rate at which as many bytes are copied.

python benchmarks/other_axes.py --json FILE [--only softmax,moments/where] [--cols 1000,4096] [--plan uncached]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.runtime import devices
from cupynorm.tools import timing

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 300 << 20  # of x: several times what the level-2 cache holds
INNER = 1024  # neighbouring rows of a middle axis
LEAST_INNER = 64  # and of the first one
TILE = 1 << 20  # random numbers that arrays repeat
KEPT = 0.8  # of what a mask has, and of a row by its length, on average
COLS = (128, 365, 1000, 3000, 4096, 8192, 10000, 16384, 65536)

Arrays = dict[str, Any]


class Timed(NamedTuple):
    """A form: the call, how many arrays of x's size it must move, and how many bytes an element beside them."""

    call: Callable[..., Any]
    arrays: float
    bytes: float = 0


GIVEN = cupynorm.Quantize("int8", 0.05)
scaled_and_added = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * 0.5 + t)


def _columns(a: Arrays) -> tuple[Any, Any]:
    return a["columns"], a["columns"]


def _gradient(a: Arrays) -> tuple[Any, ...]:
    return a["other"], a["x"], a["columns"], a["mean"], a["rstd"]


FORMS: dict[str, Timed] = {
    "softmax": Timed(lambda a, **o: cupynorm.softmax(a["x"], out=a["y"], **o), 2),
    "layer_norm": Timed(lambda a, **o: cupynorm.layer_norm(a["x"], *_columns(a), out=a["y"], **o), 2),
    "softmax, where": Timed(
        lambda a, **o: cupynorm.softmax(a["x"], where=a["where"], out=a["y"], **o), 2, bytes=1
    ),
    "layer_norm, where": Timed(
        lambda a, **o: cupynorm.layer_norm(a["x"], *_columns(a), where=a["where"], out=a["y"], **o),
        2,
        bytes=1,
    ),
    "standardize, where": Timed(
        lambda a, **o: cupynorm.standardize(a["x"], where=a["where"], out=a["y"], **o), 2, bytes=1
    ),
    "standardize, omit": Timed(lambda a, **o: cupynorm.standardize(a["x"], nan="omit", out=a["y"], **o), 2),
    "add_layer_norm": Timed(
        lambda a, **o: cupynorm.add_layer_norm(
            a["x"], a["other"], *_columns(a), return_sum=False, out=a["y"], **o
        ),
        3,
    ),
    "add_layer_norm, sum": Timed(
        lambda a, **o: cupynorm.add_layer_norm(a["x"], a["other"], *_columns(a), out=a["y"], **o)[0], 4
    ),
    "softmax_backward": Timed(
        lambda a, **o: cupynorm.softmax_backward(a["other"], a["x"], out=a["y"], **o), 3
    ),
    "layer_norm_backward": Timed(
        lambda a, **o: cupynorm.layer_norm_backward(*_gradient(a), out=a["y"], **o)[0], 3
    ),
    "add_layer_norm_backward": Timed(
        lambda a, **o: cupynorm.add_layer_norm_backward(
            a["other"], a["ds"], *_gradient(a)[1:], out=a["y"], **o
        )[0],
        4,
    ),
    "add_layer_norm_backward, dropout": Timed(
        lambda a, **o: cupynorm.add_layer_norm_backward(
            a["other"], None, *_gradient(a)[1:], dropout=0.1, seed=7, out=a["y"], **o
        )[0],
        4,
    ),
    "a fusion": Timed(lambda a, **o: scaled_and_added(a["x"], a["other"], out=a["y"], **o), 3),
    "rescale": Timed(lambda a, **o: cupynorm.rescale(a["x"], out=a["y"], **o), 2),
    "normalize": Timed(lambda a, **o: cupynorm.normalize(a["x"], out=a["y"], **o), 2),
    "moments": Timed(lambda a, **o: cupynorm.moments(a["x"], **o)[0], 1),
    "moments, order 4": Timed(lambda a, **o: cupynorm.moments(a["x"], order=4, **o)[0], 1),
    "moments, where": Timed(lambda a, **o: cupynorm.moments(a["x"], where=a["where"], **o)[0], 1, bytes=1),
    "logsumexp": Timed(lambda a, **o: cupynorm.logsumexp(a["x"], **o), 1),
    "softmax, lengths": Timed(
        lambda a, **o: cupynorm.softmax(a["x"], lengths=a["lengths"], out=a["y"], **o), 1 + KEPT
    ),
    "layer_norm, lengths": Timed(
        lambda a, **o: cupynorm.layer_norm(a["x"], *_columns(a), lengths=a["lengths"], out=a["y"], **o),
        1 + KEPT,
    ),
    "standardize, lengths": Timed(
        lambda a, **o: cupynorm.standardize(a["x"], lengths=a["lengths"], out=a["y"], **o), 1 + KEPT
    ),
    "moments, lengths": Timed(lambda a, **o: cupynorm.moments(a["x"], lengths=a["lengths"], **o)[0], KEPT),
    "standardize, weights": Timed(
        lambda a, **o: cupynorm.standardize(a["x"], weights=a["weights"], out=a["y"], **o), 3
    ),
    "moments, weights": Timed(lambda a, **o: cupynorm.moments(a["x"], weights=a["weights"], **o)[0], 2),
    "cross_entropy": Timed(
        lambda a, **o: cupynorm.cross_entropy(a["x"], a["labels"], return_grad=True, grad=a["y"], **o)[1], 2
    ),
    "add_layer_norm, dropout": Timed(
        lambda a, **o: cupynorm.add_layer_norm(
            a["x"], a["other"], *_columns(a), dropout=0.1, seed=7, return_sum=False, out=a["y"], **o
        ),
        3,
    ),
    "layer_norm, int8": Timed(
        lambda a, **o: cupynorm.layer_norm(a["x"], *_columns(a), quantize=GIVEN, out=a["bytes"], **o),
        1,
        bytes=1,
    ),
    "layer_norm, int8 of rows": Timed(
        lambda a, **o: cupynorm.layer_norm(a["x"], *_columns(a), quantize="int8", out=a["bytes"], **o)[0],
        1,
        bytes=1,
    ),
}


def shape_of(cols: int, axis: int, size: int) -> tuple[int, ...]:
    """Return x's shape: `cols` elements along its first axis, or along the middle one of three."""
    count = BYTES // size
    if axis == 0:
        return cols, max(LEAST_INNER, count // cols // LEAST_INNER * LEAST_INNER)
    return max(1, count // cols // INNER), cols, INNER


def arrays_of(shape: tuple[int, ...], axis: int, dtype: str) -> Arrays:
    """Return what calls take: normal numbers, of which a mask keeps four fifths."""
    cupy, kind = devices.cupy(), dtype_of(dtype)
    random = cupy.random.default_rng(0)
    numbers = random.standard_normal(TILE, dtype=cupy.float32).astype(kind)
    kept = random.random(TILE) < KEPT

    def repeated(tile: Any) -> Any:
        found = cupy.empty(math.prod(shape), tile.dtype)
        for at in range(0, found.size, TILE):
            found[at : at + TILE] = tile[: found.size - at]
        return found.reshape(shape)

    cols, rows = shape[axis], shape[:axis] + shape[axis + 1 :]
    shortest = round((2 * KEPT - 1) * cols)
    lengths = cupy.asarray(random.integers(shortest, cols + 1, (*rows[:-1], 1 if axis else rows[-1])), "i4")
    found = {"x": repeated(numbers), "other": repeated(numbers), "where": repeated(kept)}
    found |= {
        "y": cupy.empty(shape, kind),
        "columns": cupy.ones(cols, kind),
        "bytes": cupy.empty(shape, "i1"),
    }
    found |= {"lengths": lengths, "weights": repeated(abs(numbers)), "ds": repeated(numbers)}
    found |= {"mean": cupy.zeros(rows, "f4"), "rstd": cupy.ones(rows, "f4")}
    return found | {"labels": cupy.asarray(random.integers(0, cols, rows), "i4")}


def copy_seconds(count: int) -> float:
    """Return how long it takes to copy arrays that are read and written with so many bytes in all."""
    cupy = devices.cupy()
    words = count // 2 // 16 * 4
    buffers = [(cupy.empty(words, cupy.uint32), cupy.empty(words, cupy.uint32))]
    times = timing.time_interleaved(timing.copy_runs(buffers), 1, calls=2, replays=7)
    return min(each.median for each in times.values())


def measured(name: str, arrays: Arrays, axis: int, plan: str | None) -> dict[str, Any]:
    """Time one form; its share is the copy's time / its own."""
    form, x = FORMS[name], arrays["x"]
    moved = round(form.arrays * x.nbytes + form.bytes * x.size)
    with row_ops.observed() as plans:
        form.call(arrays, axis=axis, plan=plan)
    chosen = plans[-1]
    run = {"form": lambda _: form.call(arrays, axis=axis, plan=plan)}
    found = timing.time_interleaved(run, 1, calls=2, replays=7)["form"]
    tiling = ("variant", "vector", "vectors", "across", "block", "ctas_per_row", "min_blocks", "waits")
    return {
        "form": name,
        "dtype": x.dtype.name,
        "shape": x.shape,
        "axis": axis,
        "microseconds": round(found.median * 1e6, 2),
        "share": round(copy_seconds(moved) / found.median, 3),
        "plan": {each: getattr(chosen, each) for each in tiling},
    }


def main() -> None:
    """Time the forms that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default=",".join(each.replace(", ", "/") for each in FORMS))
    parser.add_argument("--cols", default=",".join(map(str, COLS)))
    parser.add_argument("--plan", help="a variant, in place of the plan that is chosen")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no point after so long")
    options = parser.parse_args()
    names = [each.replace("/", ", ") for each in options.only.split(",")]
    about = {
        "device": devices.limits_of(0).name,
        "date": time.strftime("%Y-%m-%d"),
        "what": __doc__.splitlines()[0],
    }
    found: list[dict[str, Any]] = []
    end = time.monotonic() + options.seconds
    for dtype in ("float16", "float32"):
        for cols in map(int, options.cols.split(",")):
            for axis in (0, 1):
                arrays = arrays_of(shape_of(cols, axis, dtype_of(dtype).itemsize), axis, dtype)
                for name in names:
                    if time.monotonic() > end:
                        return
                    try:
                        found.append(measured(name, arrays, axis, options.plan))
                    except Exception as error:  # noqa: BLE001  the other forms are timed all the same
                        found.append(
                            {"form": name, "dtype": dtype, "error": f"{type(error).__name__}: {error}"}
                        )
                    print(json.dumps(found[-1]), flush=True)
                    options.json.write_text(
                        json.dumps({"about": about, "forms": found}, indent=1) + "\n", "utf-8"
                    )
                del arrays
                devices.cupy().get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
