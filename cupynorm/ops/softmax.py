"""softmax and log_softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from cupynorm.call.quantize import Quantize
from cupynorm.invoke import row_ops
from cupynorm.plan.config import Plan

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Unpack

    from cupynorm.call.masks import MaskOptions

    P = ParamSpec("P")
    R = TypeVar("R")


def _on_host(x: Any, _gamma: Any, _beta: Any, axes: int, _eps: float, out: Any, **extras: Any) -> None:
    from cupynorm.host import reference  # noqa: PLC0415  which `import cupynorm` need not wait for

    reference.softmax(x, axes, out, **extras)


def _log_on_host(x: Any, _gamma: Any, _beta: Any, axes: int, _eps: float, out: Any, **extras: Any) -> None:
    from cupynorm.host import reference  # noqa: PLC0415

    reference.log_softmax(x, axes, out, **extras)


SOFTMAX = row_ops.RowOp("softmax", "softmax.cu", "Softmax", _on_host)
LOG_SOFTMAX = row_ops.RowOp("log_softmax", "softmax.cu", "LogSoftmax", _log_on_host)


def _spelled_out(spelled: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function that takes its rare keywords as **options the signature of one that spells them out.

    help() and type checkers see all keywords so, and calls that give none do not pay 15 ns for the default of each.
    """

    def made(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = inspect.signature(spelled)  # type: ignore[attr-defined]
        function.__annotations__ = spelled.__annotations__
        return function

    return made


def _log_softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    scale: float | None = None,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    causal: bool = False,
    causal_offset: int | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    bias: Any = None,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Spell the signature of log_softmax."""


def _softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    scale: float | None = None,
    where: Any = None,
    lengths: Any = None,
    left_padded: bool = False,
    causal: bool = False,
    causal_offset: int | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    bias: Any = None,
    quantize: str | Quantize | None = None,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
) -> Any:
    """Spell the signature of softmax."""


@overload
def softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    quantize: None = None,
    **mask: Unpack[MaskOptions],
) -> Any: ...


@overload
def softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    quantize: str,
    **mask: Unpack[MaskOptions],
) -> tuple[Any, Any]: ...


@overload
def softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    quantize: str | Quantize | None = None,
    **mask: Unpack[MaskOptions],
) -> Any: ...


@_spelled_out(_softmax)
def softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    **options: Any,
) -> Any:
    """Return exp(z - max) / sum(exp(z - max)) of z = x * scale + bias over the kept elements of the normalised axes.

    Arrays, dtypes, axes, `out`, `quantize`, `plan` and errors are as in layer_norm. An element that is dropped is exactly 0,
    whatever x and bias hold there, in a row with nothing kept too. A row of which only -inf is kept gives nan, as in
    NumPy; so does a row that keeps +inf or nan, and no other row.

    Options are scale, where, lengths, left_padded, causal, causal_offset, window, bias and quantize; each is None or
    False by default. An element is kept if all that is given keeps it:

    - where: bool or uint8 array that broadcasts to x's shape; True or non-zero keeps.
    - lengths: array of any integer dtype that broadcasts to x's shape without its last axis (lengths[:, None, None] for one
      a batch of (batch, head, query, key)): a row keeps its first `lengths` elements, with left_padded=True its last ones.
      A length below 0 or above the row's is a ValueError on the host, and is taken as 0 or all on a device. A list of
      integers is host data: it is checked as such, and each call on a device copies it there on the current stream, waiting
      for nothing; while a graph is captured that is a ValueError.
    - causal: True: on the last two axes, query i keeps the keys j <= i, the diagonal from the top left, as in PyTorch
      and JAX. Numbers are refused: a flag of 0 or 1 is no offset.
    - causal_offset: an integer: query i keeps the keys j <= i + causal_offset, without causal=True, too. keys - queries is
      the diagonal into the bottom right, as in FlashAttention.
    - window: (left, right): query i keeps i + offset - left <= j <= i + offset + right, where offset is causal_offset, else 0.
      None is no bound on that side; one number stands for both sides.

    scale (a finite number) and bias (an array that broadcasts to x's shape, of a dtype that x may have) need no mask.
    lengths, causal, causal_offset and window need one normalised axis, the last. docs/masks.md has the conventions of
    other libraries.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.

    TypeError for a mask or option of another dtype or kind; ValueError for one that does not broadcast, or is out of range.
    """
    if not options:
        return row_ops.run(SOFTMAX, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
    from cupynorm.invoke import fused_calls  # noqa: PLC0415

    quantize = options.pop("quantize", None)
    return fused_calls.run_masked(SOFTMAX, x, axis, out, dtype, plan, options, quantize)


@_spelled_out(_log_softmax)
def log_softmax(
    x: Any,
    axis: int | tuple[int, ...] = -1,
    *,
    out: Any = None,
    dtype: Any = None,
    plan: str | Plan | None = None,
    **options: Any,
) -> Any:
    """Return z - max - log(sum(exp(z - max))) over the kept elements: the logarithm of softmax, without its underflow.

    Arrays, dtypes, axes, masks, `out`, `plan`, errors and special values are as in softmax; what is dropped is exactly -inf.

    Until the call has finished on its stream, nobody else may write to `out` or read from it.
    """
    if not options:
        return row_ops.run(LOG_SOFTMAX, x, None, None, axis, 0.0, out, dtype, False, plan)  # noqa: FBT003
    from cupynorm.invoke import fused_calls  # noqa: PLC0415

    return fused_calls.run_masked(LOG_SOFTMAX, x, axis, out, dtype, plan, options, None)
