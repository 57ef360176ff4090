"""Attention in one launch, beside its formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import dtype_of
from cupynorm.bert import packed_attention

PLANS = {
    "one tile": lambda dtype, size: packed_attention.by_warps(dtype, size, 1),
    "two tiles": lambda dtype, size: packed_attention.by_warps(dtype, size, 2),
    "a group": packed_attention.by_group,
    "boxes": lambda dtype, size: packed_attention.by_group(dtype, size, boxed=size == 64),
}


def by_formula(qkv: Any, bias: Any, heads: int, spans: Any) -> Any:
    hidden = qkv.shape[1] // 3
    y = np.zeros((qkv.shape[0], hidden))
    for start, length in spans:
        if not length:
            continue
        whole = (qkv[start : start + length].astype(np.float64) + bias).reshape(length, 3, heads, -1)
        q, k, v = whole.transpose(1, 2, 0, 3)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        y[start : start + length] = (weights @ v).transpose(1, 0, 2).reshape(length, hidden)
    return y


def inputs(tokens: int, heads: int, size: int, dtype: str) -> tuple[Any, Any]:
    random = np.random.default_rng(tokens + size)
    qkv = random.normal(0, 1, (tokens, 3 * heads * size)).astype(dtype_of(dtype))
    return qkv, random.normal(0, 1, 3 * heads * size).astype(np.float32)


def assert_near(found: Any, wanted: Any, dtype: str) -> None:
    # weights and queries are rounded to the dtype before they are multiplied
    atol = {"float16": 4e-3, "bfloat16": 3e-2}[dtype] * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0, atol=atol)


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [16, 32, 64, 80])
def test_packed_sequences_of_any_length_are_attended(xp: Any, size: int, dtype: str) -> None:
    spans, heads = [(0, 1), (1, 17), (18, 0), (18, 33), (51, 70)], 2
    qkv, bias = inputs(122, heads, size, dtype)
    out = xp.zeros((122, heads * size), qkv.dtype)
    begin, lengths = (xp.asarray(np.array(each, np.int32)) for each in zip(*spans, strict=True))

    packed_attention.attend(xp.asarray(qkv), xp.asarray(bias), heads, len(spans), 70, out, (begin, lengths))

    y = xp.asnumpy(out)
    assert_near(y, by_formula(qkv, bias, heads, spans), dtype)
    assert not y[121].any()  # no sequence's


@pytest.mark.small
@pytest.mark.parametrize("plan", PLANS)
def test_sequences_side_by_side_need_no_spans(xp: Any, monkeypatch: Any, plan: str) -> None:
    monkeypatch.setattr(packed_attention, "choose", lambda dtype, size, *_, **__: PLANS[plan](dtype, size))
    qkv, bias = inputs(2 * 200, 2, 32, "float16")
    out = xp.empty((2 * 200, 64), np.float16)

    packed_attention.attend(xp.asarray(qkv), xp.asarray(bias), 2, 2, 200, out)

    assert_near(xp.asnumpy(out), by_formula(qkv, bias, 2, [(0, 200), (200, 200)]), "float16")


@pytest.mark.small
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("plan", PLANS)
def test_sequences_do_not_see_one_another(xp: Any, monkeypatch: Any, plan: str, size: int) -> None:
    monkeypatch.setattr(packed_attention, "choose", lambda dtype, size, *_, **__: PLANS[plan](dtype, size))
    spans = [(0, 150), (150, 64), (214, 1), (215, 90)]
    qkv, bias = inputs(310, 2, size, "float16")
    qkv[150:214] = qkv[305:] = np.nan
    out = xp.zeros((310, 2 * size), qkv.dtype)
    begin, lengths = (xp.asarray(np.array(each, np.int32)) for each in zip(*spans, strict=True))

    packed_attention.attend(xp.asarray(qkv), xp.asarray(bias), 2, len(spans), 150, out, (begin, lengths))

    y, wanted = xp.asnumpy(out), by_formula(qkv, bias, 2, spans)
    assert np.isnan(y[150:214]).all()
    for start, length in (spans[0], *spans[2:]):
        assert_near(y[start : start + length], wanted[start : start + length], "float16")
    assert not y[305:].any()


@pytest.mark.small
def test_large_scores_do_not_overflow(xp: Any) -> None:
    qkv, bias = inputs(40, 1, 16, "float16")
    qkv[:, :32] *= 30
    out = xp.empty((40, 16), np.float16)

    packed_attention.attend(xp.asarray(qkv), xp.asarray(0 * bias), 1, 1, 40, out)

    assert_near(xp.asnumpy(out), by_formula(qkv, 0 * bias, 1, [(0, 40)]), "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 512, 1000])
def test_real_sizes(cuda: Any, length: int, size: int, dtype: str) -> None:
    sequences, heads = 40, 12
    qkv, bias = inputs(sequences * length, heads, size, dtype)
    out = cuda.empty((sequences * length, heads * size), qkv.dtype)

    packed_attention.attend(cuda.asarray(qkv), cuda.asarray(bias), heads, sequences, length, out)

    few = [(0, length), ((sequences - 1) * length, length)]
    wanted = by_formula(qkv, bias, heads, few)
    for start, count in few:
        rows = slice(start, start + count)
        assert_near(cuda.asnumpy(out)[rows], wanted[rows], dtype)
