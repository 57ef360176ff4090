"""Narrow rows with something fused: how many threads share one, by what was measured (docs/notes/093)."""

from __future__ import annotations

import dataclasses

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import Plan
from cupynorm.plan.limits import RECORDED
from tests.build_gate import FUSED, GRADIENTS


def planned(kind: str, dtype: str, cols: int) -> Plan:
    spec = (FUSED | GRADIENTS)[kind].spec(dtype, cols)
    problem = dataclasses.replace(spec.problem, rows=49152)
    return choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks)


@pytest.mark.parametrize(
    "kind", ["add_layer_norm, bias, dropout", "softmax, where, scale", "layer_norm to int8"]
)
@pytest.mark.parametrize(
    ("dtype", "cols", "vector", "group", "vectors"),
    [
        ("float16", 13, 1, 4, 4),
        ("float16", 25, 1, 4, 7),
        ("float16", 45, 1, 8, 6),
        ("float16", 34, 2, 4, 5),
        ("float16", 102, 2, 8, 7),
        ("float32", 17, 1, 4, 5),
        ("float32", 77, 1, 16, 5),
        ("float32", 95, 1, 16, 6),
    ],
)
def test_a_thread_has_at_most_seven_accesses(
    kind: str, dtype: str, cols: int, vector: int, group: int, vectors: int
) -> None:
    plan = planned(kind, dtype, cols)

    assert not plan.unaligned
    assert (plan.vector, plan.group, plan.vectors) == (vector, group, vectors)


@pytest.mark.parametrize(
    ("kind", "dtype", "cols"),
    [
        ("softmax, where, scale", "float16", 12),  # fewer accesses than were measured
        ("softmax, where, scale", "float32", 129),  # more
        ("softmax, where, scale", "float16", 200),  # in vectors of 16 bytes
        ("softmax backward", "float16", 25),  # two arrays, whose rules are for such rows
    ],
)
def test_other_rows_are_held_as_their_rules_say(
    kind: str, dtype: str, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(kind, dtype, cols)

    monkeypatch.setattr("cupynorm.plan.variants.registers._group_of_narrow_fused", lambda _: 0)
    assert planned(kind, dtype, cols) == plan
    assert planned("softmax, where, scale", "float16", 13).group == 1
