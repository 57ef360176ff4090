"""Gradients of a norm's parameters, sums over rows: right, and of the same bits every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import add_layer_norm_backward, layer_norm_backward, rms_norm_backward
from cupynorm._dtypes import dtype_of

MANY = [(100_003, 128), (30_000, 1000), (9_999, 1001), (2_000, 8192), (700, 50257), (64, 65536), (9, 200_000)]


def arrays(rows: int, cols: int, dtype: str) -> dict[str, Any]:
    rng, kind = np.random.default_rng(rows), dtype_of(dtype)
    dy, x, ds = (rng.standard_normal((rows, cols), np.float32).astype(kind) for _ in range(3))
    return {"dy": dy, "x": x, "ds": ds, "gamma": rng.uniform(0.5, 2, cols).astype(kind)}


def check(xp: Any, rows: int, cols: int, dtype: str) -> None:
    host = arrays(rows, cols, dtype)
    given = {name: xp.asarray(each) for name, each in host.items()}
    ds, gamma = host["ds"].astype(np.float64), host["gamma"]
    dy, x = (host[name].astype(np.float64) for name in ("dy", "x"))

    def same_every_time(call: Any) -> list[Any]:
        first, second = ([xp.asnumpy(each) for each in call()] for _ in range(2))
        assert [each.tobytes() for each in first] == [each.tobytes() for each in second]
        return [each.astype(np.float64) for each in first]

    def near(found: Any, expected: Any) -> None:
        """Compare sums, of which rounding the largest numbers on the way is the least that can be off."""
        digits = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-14}[dtype] * 4
        np.testing.assert_allclose(
            found, expected, rtol=digits, atol=2e-6 * rows**0.5 * (dtype != "float64") + 1e-11
        )

    z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    _, dgamma, dbeta = same_every_time(lambda: layer_norm_backward(given["dy"], given["x"], given["gamma"]))
    near(dgamma, (dy * z).sum(0))
    near(dbeta, dy.sum(0))
    _, dgamma = same_every_time(lambda: rms_norm_backward(given["dy"], given["x"], given["gamma"]))
    near(dgamma, (dy * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)).sum(0))
    bias = xp.zeros(cols, given["x"].dtype)
    dx, *_, dbias = same_every_time(
        lambda: [
            each
            for each in add_layer_norm_backward(
                given["dy"], given["ds"], given["x"], given["gamma"], bias=bias
            )
            if each is not None
        ]
    )
    g = dy * gamma.astype(np.float64)
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    exact = ds + rstd * (g - g.mean(-1, keepdims=True) - z * (g * z).mean(-1, keepdims=True))
    near(dbias, exact.sum(0))
    assert np.abs(dx - exact).max() < 0.02  # rounded to the dtype


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "cols"), [(700, 24), (90, 77), (40, 513)])
def test_a_few_rows(xp: Any, rows: int, cols: int, dtype: str) -> None:
    check(xp, rows, cols, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), MANY)
def test_many_rows(cuda: Any, rows: int, cols: int, dtype: str) -> None:
    check(cuda, rows, cols, dtype)
