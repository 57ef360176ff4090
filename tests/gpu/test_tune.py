"""`cupynorm tune` on a device: plans are really compiled, timed and checked, and a call takes what was kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.runtime import tuned_plans
from cupynorm.tools import tune
from cupynorm.tools.results import Point


@pytest.mark.parametrize(
    "point",
    [Point("softmax", "float16", 4096, 1000), Point("layer_norm", "float32", 3, 70000)],
    ids=str,
)
def test_a_point_is_tuned_and_the_result_is_used(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, point: Point
) -> None:
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "MOST_CANDIDATES", 12)
    monkeypatch.setattr(
        tune, "NOISE", -0.9
    )  # whatever is fastest is kept, be it slower than the table's plan
    row_ops.forget()

    (result,) = tune.tune([point])

    assert 0 < result.share < 3
    assert 0 < result.before_share < 3
    assert result.tried > 2
    assert len(tuned_plans.read(tune.here())) == result.changed
    host = np.random.default_rng(0).standard_normal((point.rows, point.cols)).astype(point.dtype)
    parameters = [cuda.ones(point.cols, point.dtype), cuda.zeros(point.cols, point.dtype)]
    parameters = parameters if point.op == "layer_norm" else []
    y = getattr(cupynorm, point.op)(cuda.asarray(host), *parameters)
    (launch,) = row_ops._launches.values()
    assert launch.plan == result.after
    expected = getattr(cupynorm, point.op)(host)
    np.testing.assert_allclose(cuda.asnumpy(y), expected, rtol=1e-2, atol=1e-3)
    row_ops.forget()
