"""Launches of bert/few.cuh: products of so few tokens that launches and latency take most of their time."""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import cpp, dtype_name
from cupynorm.lower.mirrors import POINTER, Struct
from cupynorm.plan.limits import Limits
from cupynorm.runtime import compiler, devices

BLOCK = 256  # kFewBlock
WARPS = 8  # kFewWarps
OLDEST = 90  # compute capability: clusters, and launches that begin early
MOST = 64  # tokens
ROWS = (16, 32, 64)  # of a block
PARTS = (1, 2, 4, 8)
DEEPEST = 1024  # columns of a part: a block keeps its weights and tokens in shared memory
FINISHES = {None: "cupynorm::kAsItIs", "none": "cupynorm::kGelu", "tanh": "cupynorm::kGeluTanh"}
ADD_RESIDUAL = "cupynorm::kAddResidual"
# Few of bert/few.cuh
POINTERS = ("x", "weight", "bias", "gamma", "beta", "residual", "normed", "y")
FEW = np.dtype(
    [
        *((name, POINTER) for name in POINTERS),
        *((name, np.int32) for name in ("rows", "in", "out")),
        ("eps", np.float32),
    ],
    align=True,
)
CONSTANTS = {"weight", "gamma", "beta"}  # which are read before the kernel before has ended
PAD = 8  # elements between rows in shared memory
MESSAGE_BYTES = ROWS[-1] * 32 * 4  # static shared memory for the sums of other parts


class Plan(NamedTuple):
    """The blocks of a product: tokens and rows of the weight of each, and how many blocks share a sum."""

    rows: int
    cols: int
    parts: int

    def shared_bytes(self, deep: int, *, norm: bool) -> int:
        """Return what a block takes: its operands, gamma and beta; and later its warps' sums in their place."""
        operands = (self.rows + self.cols) * (deep // self.parts + PAD) * 2
        return max(operands + norm * 2 * deep * 4, WARPS * self.rows * self.cols * 4)


def choose(tokens: int, deep: int, out: int, limits: Limits, *, norm: bool) -> Plan | None:
    """Return the plan; None if none fits. The sizes are the fastest of all on an H200, for 384 and 768 columns.

    Blocks are small, so that the next kernel's blocks can start and load their weights before these end. A sum in parts
    has fewer and larger blocks where there are many tokens, because its parts are added at the end.
    """
    if int(limits.compute_capability) < OLDEST or tokens > MOST:
        return None
    parts = next((each for each in PARTS if deep % (16 * each) == 0 and deep // each <= DEEPEST), None)
    if parts is None or (norm and parts > 1):
        return None
    enough = ROWS[bisect.bisect_left(ROWS, tokens)]
    large = parts > 1 and enough == ROWS[-1]
    rows = enough if large else max(ROWS[0], enough // 2)
    widths = (32, 24, 16, 8) if large else (24, 16, 32, 8)
    cols = next((each for each in widths if out % each == 0), None)
    if cols is None:
        return None
    plan = Plan(rows, cols, parts)
    return (
        plan if plan.shared_bytes(deep, norm=norm) <= limits.shared_bytes_per_block - MESSAGE_BYTES else None
    )


def fits(dtype: Any, tokens: int, hidden: int, wide: int, limits: Limits) -> bool:
    """Say whether all products of a layer can be done so."""
    of_layer = [
        (hidden, 3 * hidden, True),
        (hidden, hidden, False),
        (hidden, wide, True),
        (wide, hidden, False),
    ]
    return dtype_name(dtype) in {"float16", "bfloat16"} and all(
        choose(tokens, deep, out, limits, norm=norm) for deep, out, norm in of_layer
    )


def multiply(
    x: Any,
    weight: Any,
    out: Any,
    *,
    norm: tuple[Any, Any] | None = None,
    eps: float = 0.0,
    normed: Any = None,
    bias: Any = None,
    gelu: str | None = None,
    residual: Any = None,
    plan: Plan | None = None,
) -> Any:
    """Write finish(LayerNorm(x) weight^T) to out; nothing is checked.

    weight and norm are constants: they are read before the kernels before this one in the stream have ended, so none of
    these may write them; copies may. What this call is given besides may be what those kernels write.

    norm: gamma and beta in float32; without them, x itself is multiplied. normed: the array that LayerNorm(x) is
    written to. With a bias, in float32, finish is GELU of the sum and the bias ("none" or "tanh"), or adds both the
    bias and the residual.
    """
    device = devices.present_device()
    limits = devices.limits_of(device)
    tokens, deep = x.shape
    plan = plan or choose(tokens, deep, out.shape[1], limits, norm=norm is not None)
    assert plan is not None  # noqa: S101  fits() said so
    gamma, beta = norm or (None, None)
    arrays = (x, weight, bias, gamma, beta, residual, normed, out)
    pointers = tuple(0 if each is None else each.data.ptr for each in arrays)
    kind = cpp(x.dtype)
    whole = Struct(f"cupynorm::Few<{kind}>", FEW, (*pointers, tokens, deep, out.shape[1], eps))
    finish = ADD_RESIDUAL if residual is not None else FINISHES[gelu]
    vectors = -(-deep // plan.parts // (8 * 32))
    normalize = compiler.template_argument(norm is not None)
    numbers = f"{plan.rows}, {plan.cols}, {plan.parts}, {vectors}, {normalize}, {finish}"
    text = compiler.text("bert/few.cuh", whole.cpp, whole.dtype.itemsize)
    kernel = compiler.kernel(
        device,
        text,
        f"cupynorm::multiply_few<{kind}, {numbers}>",
        limits.shared_bytes_per_block - MESSAGE_BYTES,
        plan.parts,
    )
    grid = (out.shape[1] // plan.cols * plan.parts, -(-tokens // plan.rows), 1)
    shared_bytes = plan.shared_bytes(deep, norm=norm is not None)
    held = np.array([whole.values], dtype=whole.dtype)
    parameters = np.array([held.ctypes.data], np.uintp)
    devices.launch_early(kernel.pointer, grid, BLOCK, shared_bytes, parameters.ctypes.data)
    return out
