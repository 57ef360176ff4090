"""Time copies that begin before the kernel before them has ended beside the copies that shares are of.

    python benchmarks/early_copy.py --json early_copy.json

Needs a GPU of compute capability 9.0 or later. Prints one line a shape: rows, columns of 2 bytes, the microseconds of
the best copy, and its time divided by that of each early copy.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.runtime import devices
from cupynorm.tools import results, timing
from cupynorm.tools.buffers import sets_for

if TYPE_CHECKING:
    from collections.abc import Sequence

EARLY = r"""
extern "C" __global__ void early(const uint4* x, uint4* y, long long vectors) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (gridDim.x - blockIdx.x <= 2048) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const uint4 vector = x[i];
  y[i] = vector;
}
"""
BLOCKS = (128, 256, 512)
SHAPES = (
    *((49152, cols) for cols in (32, 64, 128, 256, 512, 1024, 4096)),
    *((rows, 65536) for rows in (1, 16, 64)),
    *((8192, cols) for cols in (127, 1023)),
)


def early(kernel: Any, block: int, buffers: Sequence[tuple[Any, Any]], i: int) -> Any:
    """Copy as our kernels are launched."""
    x, y = buffers[i]
    words = np.array([x.data.ptr, y.data.ptr, x.nbytes // 16], np.int64)
    parameters = np.array([words.ctypes.data + 8 * each for each in range(3)], np.uint64)
    bind = devices.launch_of(kernel.kernel.ptr, (-(-x.nbytes // 16 // block), 1, 1), (block, 1, 1), 0)
    devices.launch_once(bind, parameters.ctypes.data)
    return y


def main() -> None:
    """Measure, print a line for each shape, and write all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    module = devices.cupy()
    kernel = module.RawKernel(EARLY, "early")
    kernel.compile()
    found = []
    for rows, cols in SHAPES:
        count = rows * cols * 2 // 16 * 16
        sets = sets_for(2 * count)
        buffers = [(module.zeros(count, np.uint8), module.empty(count, np.uint8)) for _ in range(sets)]
        runs = timing.copy_runs(buffers)
        runs |= {f"early {block}": functools.partial(early, kernel, block, buffers) for block in BLOCKS}
        times = timing.time_interleaved(runs, sets, calls=max(sets, 2 * sets * -(-20 // sets)), notes={})
        best = min(time.median for name, time in times.items() if name.startswith(results.COPY))
        ratios = {name: round(best / time.median, 3) for name, time in times.items()}
        found.append({"rows": rows, "cols": cols, "microseconds": best * 1e6, "ratios": ratios})
        print(json.dumps(found[-1]), flush=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
