"""The structs that expressions write: run on this CPU through g++, or in a kernel for NVRTC."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm.runtime import compiler
from tests.simulator import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.lower.expressions import Expression

    Array = np.ndarray[Any, Any]

HEADERS = "#include <base/functions.cuh>\n"

LOOP = """
template <typename T>
void loop(const T* in, T* out, long count) {{
  for (long i = 0; i < count; ++i) {{
    T x[{inputs}], y[{outputs}];
    for (int k = 0; k < {inputs}; ++k) x[k] = in[k * count + i];
    cupynorm::{name}::apply(x, y);
    for (int k = 0; k < {outputs}; ++k) out[k * count + i] = y[k];
  }}
}}
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void run_float32(const float* in, float* out, long n) {{ loop(in, out, n); }}
EXPORT void run_float64(const double* in, double* out, long n) {{ loop(in, out, n); }}
"""

KERNEL = """
template <typename T>
__global__ void __launch_bounds__(256) apply_all(const T* in, T* out, int count) {{
  const int i = int(blockIdx.x) * 256 + int(threadIdx.x);
  if (i >= count) return;
  T x[{inputs}], y[{outputs}];
#pragma unroll
  for (int k = 0; k < {inputs}; ++k) x[k] = in[k * count + i];
  cupynorm::{name}::apply(x, y);
#pragma unroll
  for (int k = 0; k < {outputs}; ++k) out[k * count + i] = y[k];
}}
"""


def run(
    text: str, name: str, inputs: int, outputs: int, operands: Sequence[Array], headers: str = HEADERS
) -> list[Array]:
    """Apply the struct to every element of the operands, which have one length and are float32 or float64 all."""
    code = (
        '#include "simulator.h"\n' + headers + text + LOOP.format(inputs=inputs, outputs=outputs, name=name)
    )
    flags = ["-std=c++17", *build._flags(""), f"-I{build.HERE}", *_include()]
    used = [*flags, *(part for pair in build._headers(_include()) for part in pair)]
    engine = build.engine("")
    link = [f"-L{engine.parent}", f"-l:{engine.name}", "-Wl,-rpath,$ORIGIN"]
    path = build._compile(code, flags, "struct-" + build._key(code, engine.name, *used), link)
    library = ctypes.CDLL(str(path))
    given = np.ascontiguousarray(np.stack(operands))
    out = np.full((outputs, given.shape[1]), 77, given.dtype)
    entry = getattr(library, f"run_{given.dtype}")
    entry(ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_long(given.shape[1]))
    return list(out)


def run_expression(expression: Expression, *operands: Array) -> list[Array]:
    """Apply what the expression writes."""
    text = expression.struct_text("Tested")
    return run(text, "Tested", expression.inputs, expression.outputs, operands)


def kernel_text(expression: Expression) -> str:
    """Write a kernel template apply_all<T> that applies what the expression writes."""
    numbers = {"inputs": expression.inputs, "outputs": expression.outputs, "name": "Tested"}
    return HEADERS + expression.struct_text("Tested") + KERNEL.format(**numbers)


def _include() -> list[str]:
    return [f"-I{compiler.kernels_dir()}"]
