"""The lines of docs/ecosystem.md's tables, given device arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.project.test_ecosystem import LINES, Line, as_arrays, chain, run

ON_DEVICE = [line for line in LINES if line.package != "xarray" and "median" not in line.ours]
ARRAYS = ("x", "gaps", "where", "weights", "X", "gaps_in_X")


@pytest.mark.parametrize("line", ON_DEVICE, ids=lambda line: f"line {line.number}: {line.ours}")
def test_a_device_gives_the_same(xp: Any, line: Line) -> None:
    names = run(chain(line.number)[:1])  # none of the other packages
    wanted = as_arrays(eval(line.ours, names))  # noqa: S307

    found = eval(line.ours, {**names, **{name: xp.asarray(names[name]) for name in ARRAYS}})  # noqa: S307

    for ours, right in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
        np.testing.assert_allclose(xp.asnumpy(ours), right, rtol=1e-10, atol=1e-12)
