"""What a call launches does not depend on which calls came before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm.call.view import View
from cupynorm.invoke import row_ops
from cupynorm.lower.row import row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.runtime import compiler
from tests.simulator import simulated
from tests.simulator.driver_twin import MAX_DYNAMIC_SHARED_SIZE_BYTES, funcGetAttribute

__all__ = ["simulated"]  # a fixture

# LayerNorm of floats: rows that begin anywhere, of one kernel, which for one of them asks for more shared memory than
# needs no leave
LITTLE, MUCH = 24585, 27965


def spec(cols: int) -> KernelSpec:
    single = np.dtype(np.float32)
    x = View(1 << 20, (8192, cols), (cols * 4, 4), single)
    gamma = View(1 << 30, (cols,), (4,), single)
    columns = {"gamma": gamma, "beta": gamma._replace(pointer=1 << 31)}
    return row_spec(LAYER_NORM, x, x._replace(pointer=1 << 40), 1, columns)


@pytest.mark.parametrize("order", [(LITTLE, MUCH), (MUCH, LITTLE)], ids=str)
def test_widths_of_one_kernel_get_their_own_plans_in_any_order(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    alone = {}
    for cols in order:
        monkeypatch.setattr(compiler, "_kernels", compiler.Kernels())
        row_ops.forget()
        found = row_ops.prepared(0, spec(cols), None)
        alone[cols] = found.plan, funcGetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES, found.kernel.pointer)
    expressions = {spec(cols).expression(plan) for cols, (plan, _) in alone.items()}
    limits = {limit for _, limit in alone.values()}
    assert (len(expressions), len(limits)) == (1, 2)  # or this test says nothing

    monkeypatch.setattr(compiler, "_kernels", compiler.Kernels())
    row_ops.forget()
    found = {cols: row_ops.prepared(0, spec(cols), None) for cols in order}

    for cols, each in found.items():
        limit = funcGetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES, each.kernel.pointer)
        assert (each.plan, limit) == alone[cols]
        # and a plan may be asked for by name
        assert row_ops.prepared(0, spec(cols), each.plan).plan.template == each.plan.template
