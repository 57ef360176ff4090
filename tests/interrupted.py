"""Calls by each road to a launch, and a handler that interrupts them wherever CPython may run one.

CPython runs signal handlers when a Python function is entered, after a call has returned, and at jumps. A trace
function stands at each of these places inside the package, and does there what a handler would do.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cupynorm
from cupynorm.invoke import head_calls
from tests import simulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

PACKAGE, STAND_INS = str(Path(cupynorm.__file__).parent), str(Path(simulator.__file__).parent)
ROWS, COLS = 6, 40


@functools.cache
def _may_be_interrupted_after(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions after which CPython may run a handler: calls and jumps."""
    return frozenset(
        each.offset
        for each in dis.get_instructions(code)
        # PRECALL, of 3.11, comes right before its CALL
        if ("CALL" in each.opname and each.opname != "PRECALL") or "JUMP" in each.opname
    )


def _within_stand_ins(frame: FrameType | None) -> bool:
    """Say whether the simulator calls the package: where it stands, there is C on a device."""
    while frame is not None and not frame.f_code.co_filename.startswith(STAND_INS):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def interrupted(handler: Callable[[], None], where: str | tuple[str, ...] = PACKAGE) -> Iterator[None]:
    """Call `handler` wherever a signal handler could run in the package's code. It is not interrupted itself.

    where: the file or folder of that code, or several.
    """
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(where) or _within_stand_ins(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = last.get(id(frame), -1)
        last[id(frame)] = frame.f_lasti
        entered = (
            event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR
        )  # as a closed one is, too
        if entered or (event == "opcode" and before in _may_be_interrupted_after(frame.f_code)):
            handler()
        elif event == "return":
            last.pop(id(frame), None)
        return trace

    before = sys.gettrace()  # that of a coverage tool
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def host(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape or (ROWS, COLS)).astype(np.float32)


SCALED = cupynorm.fuse(cupynorm.softmax, load=lambda x, bias: 2 * x + bias)
# what is called, on an array, another array of its shape and gamma-like columns; results go to `out` where there is one
ROADS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "softmax": lambda x, other, columns, out: cupynorm.softmax(x, out=out),
    "own result": lambda x, other, columns, out: cupynorm.log_softmax(x),
    "gamma and beta": lambda x, other, columns, out: cupynorm.layer_norm(x, columns, columns, out=out),
    "two statistics": lambda x, other, columns, out: cupynorm.layer_norm(x, columns, return_stats=True),
    "one statistic": lambda x, other, columns, out: cupynorm.rms_norm(x, out=out, return_stats=True),
    "cooperative": lambda x, other, columns, out: cupynorm.softmax(x, out=out, plan="split"),
    "masked, out": lambda x, other, columns, out: cupynorm.softmax(x, bias=other, out=out),
    "masked": lambda x, other, columns, out: cupynorm.softmax(x, bias=other),
    "sum": lambda x, other, columns, out: cupynorm.add_layer_norm(x, other, columns, columns, out=out),
    "sum and dropout": lambda x, other, columns, out: cupynorm.add_layer_norm(
        x, other, columns, dropout=0.25, seed=x.data.ptr, offset=x.data.ptr, return_sum=True
    ),
    "user's function": lambda x, other, columns, out: SCALED(x, other),
    "bias": lambda x, other, columns, out: cupynorm.bias_gelu(x, columns, out=out),
    "gate": lambda x, other, columns, out: cupynorm.swiglu(x),
    "dropout": lambda x, other, columns, out: cupynorm.dropout(x, 0.25, seed=x.data.ptr, out=out),
    "heads with a bias": lambda x, other, columns, out: cupynorm.split_heads(x, columns, heads=2),
    "heads without one": lambda x, other, columns, out: cupynorm.split_heads(x, heads=2),
    "rows of an encoder": lambda x, other, columns, out: head_calls.gather(x, None, out),
}


class Call:
    """A call on arrays of its own, and what it gives when nothing comes between."""

    def __init__(self, xp: Any, name: str, seed: int, columns: Any) -> None:
        shape = (1, 64 * COLS) if name == "cooperative" else (ROWS, COLS)
        self.x, self.other = (xp.asarray(host(*shape, seed=seed + each)) for each in range(2))
        self.columns = columns
        self.out = xp.empty(shape, np.float32)
        self._road = ROADS[name]
        self._xp = xp
        self.expected = self()
        assert self() == self.expected

    def __call__(self) -> list[bytes]:
        """Return the bits of what it gives."""
        self.out.data.memset_async(0xFF, self.out.nbytes)
        made = self._road(self.x, self.other, self.columns, self.out)
        return [self._xp.asnumpy(each).tobytes() for each in (made if isinstance(made, tuple) else (made,))]
