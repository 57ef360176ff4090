"""Moves that the encoder makes with packed tokens: from arrays that nobody checks to a launch.

rows says, for each token of the result, which of x's it is; below 0 none, and the result is 0 there.
"""

from __future__ import annotations

from typing import Any

from cupynorm.call.arguments import view
from cupynorm.invoke import bound_calls, one_kernel
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.lower.heads import Places, by_heads, by_rows, move_spec


def gather(x: Any, rows: Any, out: Any) -> Any:
    """Write x[rows] to out, or x itself where rows is None: rows of hidden states, with any axes before the last."""
    signature, made = bound_calls.thread.calls.again((x, rows, out), ("gather",))
    if made is None:
        places = by_rows(view(x, "x"), 1, 1), by_rows(view(out, "out"), 1, 1)
        _launch(*places, {"x": x, "rows": rows, "out": out}, signature)
    return out


def split_packed(qkv: Any, bias: Any, rows: Any, heads: int, out: Any) -> Any:
    """Write add_qkv_bias of packed tokens to out, [3, batch, heads, seq, head size]."""
    places = by_rows(view(qkv, "x"), 3, heads), by_heads(view(out, "out"), 3)
    _launch(*places, {"x": qkv, "bias": bias, "rows": rows, "out": out})
    return out


def merge_packed(x: Any, rows: Any, out: Any) -> Any:
    """Write merge_heads of [batch, heads, seq, head size] to packed tokens; rows count batch * seq."""
    places = by_heads(view(x, "x"), 1), by_rows(view(out, "out"), 1, x.shape[-3])
    _launch(*places, {"x": x, "rows": rows, "out": out})
    return out


def _launch(source: Places, target: Places, given: dict[str, Any], signature: Any = None) -> None:
    bias, rows = (None if given.get(name) is None else view(given[name], name) for name in ("bias", "rows"))
    spec = move_spec(source, target, bias, 0 if rows is None else rows.pointer)
    bound = one_kernel.launch(int(given["out"].device.id), spec, Arrays(given, ("out",)))
    bound_calls.thread.calls.add(signature, bound, {})
