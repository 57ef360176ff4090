"""Normalises every patch of three photographs: from the command line, from Python, on the CPU or on a GPU."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pywt.data

import cupynorm
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.runtime import devices
from cupynorm.tools.buffers import sets_for
from cupynorm.tools.testing import error
from cupynorm.tools.timing import time_interleaved

PATCH, STEP = 32, 8  # patches overlap: 32 x 32 pixels, one every 8


def patches() -> np.ndarray[Any, Any]:
    """Return the photographs that PyWavelets ships as rows of patches, one row of 1024 pixels each."""
    photographs = np.stack([pywt.data.aero(), pywt.data.ascent(), pywt.data.camera()])
    windows = np.lib.stride_tricks.sliding_window_view(photographs, (PATCH, PATCH), axis=(1, 2))
    return windows[:, ::STEP, ::STEP].reshape(-1, PATCH * PATCH).astype(np.float32) / 255


def command(*arguments: object) -> None:
    """Run cupynorm as a shell would."""
    line = ["cupynorm", *map(str, arguments)]
    print("$", *line, flush=True)
    subprocess.run([sys.executable, "-m", *line], check=True)


def from_the_shell(x: np.ndarray[Any, Any], *, device: bool) -> None:
    """Put a file through `cupynorm run`, and compare what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "patches.npy"), Path(folder, "normalised.npy")
        np.save(source, x)
        command("run", "layer_norm", source, "-o", target)
        (expected,) = OPS[0].reference(x)[:1]
        print(f"error against float64: {error(np.load(target), expected):.1e}\n")
    where = () if device else ("--device", "h200")
    command("explain", "layer_norm", "--shape", ",".join(map(str, x.shape)), "--dtype", "float16", *where)


def from_python(op: Op, host: np.ndarray[Any, Any], *, device: bool) -> str:
    """Call an op, and return its error, its time and the bandwidth that comes to."""
    (expected,) = op.reference(host)[:1]
    bytes_moved = op.bytes_moved(*host.shape, host.dtype)
    if device:
        xp = devices.cupy()
        off = error(xp.asnumpy(op.function(xp.asarray(host))), expected)
        # so many arrays in turn that none is in the L2 cache when it is read
        arrays = [(x, xp.empty_like(x)) for x in (xp.asarray(host) for _ in range(sets_for(bytes_moved)))]
        runs = {"op": lambda i: op.function(arrays[i][0], out=arrays[i][1])}
        seconds = time_interleaved(runs, len(arrays))["op"].median
    else:
        off = error(op.function(host), expected)
        begin = time.perf_counter()
        op.function(host)
        seconds = time.perf_counter() - begin
    return f"error {off:.1e}  {seconds * 1e6:>9.1f} us  {bytes_moved / seconds / 1e9:>7.1f} GB/s"


def main() -> None:
    """Say what is here, then show both ways in."""
    try:
        name = f"on {devices.present_limits().name} with CuPy {devices.cupy().__version__}"
        device = True
    except devices.NoDeviceError:  # `cupynorm run` will say why
        name = "on the CPU: no GPU can be used"
        device = False
    print(
        f"cupynorm {cupynorm.__version__}, Python {platform.python_version()}, NumPy {np.__version__}, {name}"
    )
    x = patches()
    print(f"{x.shape[0]} patches of {PATCH} x {PATCH} pixels from three photographs\n")
    from_the_shell(x, device=device)
    print("\nfrom Python, compared with float64:")
    for op in OPS:
        for dtype in (np.float32, np.float16):
            print(
                f"  {op.name:<12} {np.dtype(dtype).name:<8}  {from_python(op, x.astype(dtype), device=device)}"
            )


if __name__ == "__main__":
    main()
