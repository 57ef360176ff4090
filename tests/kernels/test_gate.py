"""The build gate finds what it looks for: spills that are launched, and accesses that are narrow."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from cupynorm.runtime.nvrtc import Cubin
from tests import build_gate
from tests.build_gate import GRADIENTS, WHOLE_COLS, Code, Instance, Types, first_choice, narrow_loads


def instance_of(kind: str, dtype: str = "float32") -> Instance:
    spec = GRADIENTS[kind].spec(dtype, WHOLE_COLS)
    return Instance(spec, Types(dtype, dtype), first_choice(spec.problem, "90"), spec.problem, None)


@pytest.mark.parametrize(
    ("kind", "accesses", "faults"),
    [
        ("softmax backward", {("STG", 16): 4}, []),
        ("softmax backward", {("STG", 16): 4, ("ST", 4): 1}, ["1 ST of 4 bytes"]),
        ("softmax backward", {("ST", 16): 4}, ["4 ST of 16 bytes"]),
        ("logsumexp", {("ST", 4): 1}, []),  # the one number of a row
        ("logsumexp", {("ST", 2): 1}, ["1 ST of 2 bytes"]),
        ("logsumexp", {("STL", 4): 2, ("LDL", 4): 1}, ["2 STL of 4 bytes", "1 LDL of 4 bytes"]),
        ("logsumexp", {("LD", 4): 1}, ["1 LD of 4 bytes"]),
    ],
)
def test_a_generic_access_is_a_fault_but_for_the_numbers_of_rows(
    kind: str, accesses: dict[tuple[str, int], int], faults: list[str]
) -> None:
    instance = instance_of(kind)
    loads = {("LDG", 16): 64}

    assert narrow_loads(instance, Code((), Counter(loads | accesses))) == faults
    narrow = narrow_loads(instance, Code((), Counter({("LDG", 4): 64} | accesses)))
    assert [each for each in narrow if "loads of 16 bytes" in each]


@pytest.mark.parametrize("most", [6, 2, 0])  # blocks at which nothing is spilled
def test_a_kernel_that_spills_gives_way_to_what_is_launched(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = instance_of("softmax backward")
    tried = [dataclasses.replace(first.plan, min_blocks=n + 1) for n in range(first.plan.min_blocks)]
    blocks = {first.spec.expression(plan): plan.min_blocks for plan in tried}

    def together(wanted: list[tuple[str, str]], arch: str, major: int | None = None) -> list[Cubin]:
        assert (arch, major) == ("90", 13)
        return [_kernel(8 * max(0, blocks[name] - most)) for _, name in wanted]

    monkeypatch.setattr(build_gate, "compile_together", together)
    ((found, kernel),) = build_gate.compile_instances([first], "90", 13)

    assert first.plan.min_blocks > 6
    assert found.plan.min_blocks == max(2, most)  # fewer leave a thread no register more
    assert bool(build_gate.spills(kernel)) == (most == 0)  # and that is looked at


def _kernel(local_bytes: int) -> Cubin:
    return Cubin(b"", "", "", "", 0, local_bytes, local_bytes, local_bytes, 0)
