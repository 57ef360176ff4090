"""Time calls whose kernels spill, or could have more blocks, by blocks a multiprocessor.

python benchmarks/fewer_blocks.py --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from cupynorm._dtypes import dtype_of
from cupynorm.catalog import forms
from cupynorm.invoke import row_ops
from cupynorm.runtime import devices
from cupynorm.tools import timing

BYTES = 256 << 20  # of x: several times what the level-2 cache holds
# form, dtype, parameters, columns, elements that x begins behind an aligned address, blocks to try
CASES: tuple[tuple[str, str, str | None, int, int, tuple[int, ...]], ...] = (
    ("layer_norm", "float16", None, 128, 0, (20, 18, 16)),
    ("softmax/where", "float16", "float16", 4096, 1, (7, 6, 5)),
    ("layer_norm", "float16", "float32", 3000, 1, (6, 5)),
    ("add_layer_norm", "float16", "float16", 848, 1, (6, 5)),
    ("layer_norm", "float16", "float16", 320, 1, (8, 7)),
    ("layer_norm", "float16", "float32", 2048, 0, (12, 16)),
    ("softmax", "float16", None, 984, 0, (9, 12)),
    ("softmax/where", "float16", None, 8192, 0, (3, 4)),
    ("softmax/where", "float32", None, 1023, 0, (8, 16)),
    ("add_layer_norm/sum", "float16", "float16", 8192, 0, (2, 4)),
    ("add_rms_norm/sum", "float16", "float16", 513, 0, (4, 8)),
    ("rms_norm", "float16", "float32", 1000, 0, (6, 7)),
    ("layer_norm/int8", "float32", "float32", 848, 0, (4, 5)),
    ("softmax/bias", "float32", None, 128, 0, (10, 12)),
    ("add_layer_norm", "float32", "float32", 255, 0, (6, 7)),
    ("rms_norm/int8", "float16", "float16", 8193, 0, (2, 3)),
)


def arrays_of(form: forms.Form, rows: int, cols: int, dtype: str, parameters: str | None, offset: int) -> Any:
    """Return a call's arrays on the device, x and what is read with it behind an aligned address."""
    module = devices.cupy()
    found: dict[str, Any] = {}
    for name, (shape, kind, holds) in form.given(rows, cols, dtype_of(dtype)).items():
        if name in {"gamma", "beta"}:
            found[name] = None if parameters is None else module.ones(shape, parameters)
        elif holds in {"lengths", "ragged"}:
            found[name] = module.full(shape, cols, kind)
        else:
            size = np.dtype(kind).itemsize
            count = math.prod(shape)
            at = 0 if name == "y" or len(shape) == 1 else offset
            memory = module.ones(count + 16 // size, kind)
            found[name] = memory[at : at + count].reshape(shape)
    return found


def measured(case: tuple[str, str, str | None, int, int, tuple[int, ...]]) -> dict[str, Any]:
    """Time one call by the plan that is chosen, and by the same with other numbers of blocks."""
    name, dtype, parameters, cols, offset, blocks = case
    form = forms.form(name)
    rows = BYTES // (cols * dtype_of(dtype).itemsize) // 8 * 8
    arrays = arrays_of(form, rows, cols, dtype, parameters, offset)
    y = arrays.pop("y")
    start = time.perf_counter()
    with row_ops.observed() as plans:
        form.call(arrays, out=y)
        chosen = plans[-1]
    first = time.perf_counter() - start
    runs: dict[str, Any] = {"chosen": lambda _: form.call(arrays, out=y)}
    for each in blocks:
        plan = dataclasses.replace(chosen, min_blocks=each, waves=0.0)
        runs[str(each)] = lambda _, plan=plan: form.call(arrays, out=y, plan=plan)
    notes: dict[str, str] = {}
    times = timing.time_interleaved(runs, 1, calls=10, seconds=1.0, notes=notes)
    return {
        "call": case[:5],
        "rows": rows,
        "variant": chosen.variant,
        "blocks": chosen.min_blocks,
        "why": chosen.why,
        "first_call_seconds": round(first, 3),
        "microseconds": {each: round(found.median * 1e6, 2) for each, found in times.items()},
        "notes": notes,
    }


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    found = []
    for case in CASES:
        try:
            found.append(measured(case))
        except Exception as error:  # noqa: BLE001  the other cases are timed all the same
            found.append({"call": case[:5], "error": f"{type(error).__name__}: {error}"})
        print(json.dumps(found[-1]), flush=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
