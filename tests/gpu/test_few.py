"""Products of a few tokens, with the norm before them and what follows them, beside their formula in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import dtype_of
from cupynorm.bert import few_tokens


def normalized(x: Any, gamma: Any, beta: Any) -> Any:
    mean = x.mean(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * gamma + beta


def gelu(x: Any, how: str) -> Any:
    if how == "tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def assert_near(found: Any, wanted: Any, dtype: str) -> None:
    atol = {"float16": 2e-3, "bfloat16": 1.6e-2}[dtype] * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0, atol=atol)


class Case:
    """Operands on the host, and the same on the device."""

    def __init__(self, xp: Any, tokens: int, deep: int, out: int, dtype: str) -> None:
        random, kind = np.random.default_rng(tokens + deep), dtype_of(dtype)
        self.x = random.normal(0.3, 1, (tokens, deep)).astype(kind)
        self.weight = random.normal(0, deep**-0.5, (out, deep)).astype(kind)
        self.residual = random.normal(0, 1, (tokens, out)).astype(kind)
        self.bias = random.normal(0, 1, out).astype(np.float32)
        self.gamma, self.beta = (random.normal(each, 0.3, deep).astype(np.float32) for each in (1, 0))
        names = ("x", "weight", "residual", "bias", "gamma", "beta")
        self.there = {name: xp.asarray(getattr(self, name)) for name in names}

    def product(self, x: Any) -> Any:
        return x.astype(np.float64) @ self.weight.astype(np.float64).T


SHAPES = [(1, 32, 16), (32, 80, 40), (33, 48, 64), (5, 128, 96), (35, 800, 8)]


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "deep", "out"), SHAPES)
def test_a_product_takes_its_norm_and_what_follows_along(
    xp: Any, tokens: int, deep: int, out: int, dtype: str
) -> None:
    case = Case(xp, tokens, deep, out, dtype)
    there, y = case.there, xp.empty((tokens, out), dtype_of(dtype))
    normed = xp.empty((tokens, deep), dtype_of(dtype))
    norm = there["gamma"], there["beta"]

    few_tokens.multiply(there["x"], there["weight"], y, norm=norm, eps=1e-5, normed=normed)
    kept = normalized(case.x.astype(np.float64), case.gamma, case.beta)
    assert_near(xp.asnumpy(normed), kept, dtype)
    assert_near(xp.asnumpy(y), case.product(kept), dtype)

    for how in ("none", "tanh"):
        few_tokens.multiply(there["x"], there["weight"], y, bias=there["bias"], gelu=how)
        assert_near(xp.asnumpy(y), gelu(case.product(case.x) + case.bias, how), dtype)

    few_tokens.multiply(there["x"], there["weight"], y, bias=there["bias"], residual=there["residual"])
    wanted = case.product(case.x) + case.bias + case.residual.astype(np.float64)
    assert_near(xp.asnumpy(y), wanted, dtype)


@pytest.mark.small
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_blocks_of_a_cluster_share_a_sum(xp: Any, rows: int, parts: int) -> None:
    case = Case(xp, rows + 3, 128, 48, "float16")
    there, y = case.there, xp.empty((rows + 3, 48), np.float16)

    few_tokens.multiply(
        *(there["x"], there["weight"], y),
        bias=there["bias"],
        residual=there["residual"],
        plan=few_tokens.Plan(rows, 24, parts),
    )

    assert_near(xp.asnumpy(y), case.product(case.x) + case.bias + case.residual.astype(float), "float16")


@pytest.mark.small
def test_a_tokens_result_does_not_depend_on_the_others(xp: Any) -> None:
    case = Case(xp, 30, 128, 48, "float16")
    there = case.there
    alone, all_of_them = xp.empty((1, 48), np.float16), xp.empty((30, 48), np.float16)

    for first in (0, 29):
        part = there["x"][first : first + 1]
        few_tokens.multiply(part, there["weight"], alone, norm=(there["gamma"], there["beta"]), eps=1e-5)
        few_tokens.multiply(
            there["x"], there["weight"], all_of_them, norm=(there["gamma"], there["beta"]), eps=1e-5
        )

        assert xp.asnumpy(alone).tolist() == xp.asnumpy(all_of_them)[first : first + 1].tolist()


@pytest.mark.parametrize("tokens", [1, 16, 31, 32, 64])
@pytest.mark.parametrize("hidden", [384, 768, 1024])
def test_real_sizes(cuda: Any, hidden: int, tokens: int) -> None:
    for deep, out, norm in ((hidden, 3 * hidden, True), (hidden, hidden, False), (4 * hidden, hidden, False)):
        case = Case(cuda, tokens, deep, out, "float16")
        there, y = case.there, cuda.empty((tokens, out), np.float16)
        given = (there["gamma"], there["beta"]) if norm else None

        few_tokens.multiply(there["x"], there["weight"], y, norm=given, eps=1e-5)

        x = case.x.astype(np.float64)
        wanted = case.product(normalized(x, case.gamma, case.beta) if norm else x)
        assert_near(cuda.asnumpy(y), wanted, "float16")
