"""Blocks of `split` exchange messages that lie in `out`: what happens if another stream writes there meanwhile?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.catalog.op_table import OPS
from cupynorm.plan.config import PLAIN, Plan
from cupynorm.runtime import compiler
from cupynorm.tools.testing import assert_close, inputs
from tests import simulator
from tests.simulator import simulated  # noqa: F401  a fixture

SPREAD = dataclasses.replace(PLAIN, variant="split", vector=4, ctas_per_row=5, group=64, block=64)
TOGETHER = dataclasses.replace(
    PLAIN, variant="split", vector=4, vectors=2, ctas_per_row=5, rows_per_group=4, block=64
)
CASES = [
    pytest.param(SPREAD, 2, 4104, id="row_spread"),
    pytest.param(TOGETHER, 6, 1000, id="row_together"),
    pytest.param("split", 3, 4096, id="row_staged"),
    pytest.param("split", 3, 4099, id="row_staged, rows that begin anywhere"),
]

every_op = pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
every_schedule = pytest.mark.parametrize("schedule", ["forward", "reverse", 0, 1])


class Call:
    """A call of `split`, while another stream writes the right results to `out`, as a second launch of it would."""

    def __init__(
        self, monkeypatch: Any, op: Any, rows: int, cols: int, schedule: str | int, *, in_place: bool
    ):
        module = simulator.cupy
        self.case = inputs(op, rows, cols, "float32")
        self.expected = op.reference(self.case.x, **self.case.parameters)[0]
        self.x = module.asarray(self.case.x)
        self.out = self.x if in_place else module.asarray(np.zeros_like(self.case.x))
        self.parameters = {name: module.asarray(array) for name, array in self.case.parameters.items()}
        self.op = op
        beside = self.out.reshape(-1).view(np.uint8), self.expected.astype(np.float32).tobytes()
        monkeypatch.setattr(simulator.settings, "beside", beside)
        monkeypatch.setattr(simulator.settings, "schedules", (schedule,))  # they may differ in the last place

    def run(self, plan: str | Plan) -> Any:
        self.op.function(self.x, **self.parameters, out=self.out, plan=plan)
        return self.out.get()


@every_schedule
@every_op
@pytest.mark.parametrize(("plan", "rows", "cols"), CASES)
def test_a_second_writer_of_the_same_results_does_no_harm(
    simulated: Any,
    monkeypatch: Any,
    op: Any,
    plan: Any,
    rows: int,
    cols: int,
    schedule: Any,
) -> None:
    call = Call(monkeypatch, op, rows, cols, schedule, in_place=False)

    y = call.run(plan)

    assert_close(y, call.expected)


@every_schedule
@every_op
@pytest.mark.parametrize(("plan", "rows", "cols"), CASES[:3])
def test_a_second_writer_where_x_itself_is_out_stops_the_call_and_is_named(
    simulated: Any,
    monkeypatch: Any,
    op: Any,
    plan: Any,
    rows: int,
    cols: int,
    schedule: Any,
) -> None:
    call = Call(monkeypatch, op, rows, cols, schedule, in_place=True)

    with pytest.raises(
        simulator.SimulatorError, match="nobody else writes to `out` until the call has finished should hold"
    ):
        call.run(plan)


FUSED_CASES = [
    pytest.param("softmax", (3, 4096), False, id="softmax, where"),
    pytest.param("softmax", (2, 4099), True, id="softmax to int8, rows that begin anywhere"),
    pytest.param("add_layer_norm", (10, 2053), False, id="add_layer_norm and the sum"),
    pytest.param("add_layer_norm", (3, 2048), True, id="add_layer_norm to int8"),
]


class FusedCall:
    """A fused call of `split`, and another stream that writes the right results to `out`; over: what out replaces."""

    def __init__(self, monkeypatch: Any, name: str, shape: tuple[int, int], *, to_int8: bool, over: str = ""):
        module, random = simulator.cupy, np.random.default_rng(3)
        x, residual = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
        kept = random.random(shape) < 0.7
        self.to_int8 = to_int8
        self.function = getattr(cupynorm, name)
        self.options: dict[str, Any] = {"quantize": "int8"} if to_int8 else {}
        given = {"where": kept} if name == "softmax" else {"residual": residual}
        self.wanted = self.parts(self.function(x, **given, **self.options))
        self.x = module.asarray(x)
        self.given = {each: module.asarray(array) for each, array in given.items()}
        out = {"x": self.x, "residual": self.given.get("residual")}.get(over)
        self.out = module.asarray(np.zeros_like(self.wanted[0])) if out is None else out
        beside = self.out.reshape(-1).view(np.uint8), self.wanted[0].tobytes()
        monkeypatch.setattr(simulator.settings, "beside", beside)

    @staticmethod
    def parts(results: Any) -> tuple[Any, ...]:
        return results if isinstance(results, tuple) else (results,)

    def run(self) -> list[Any]:
        results = self.function(self.x, **self.given, **self.options, out=self.out, plan="split")
        return [simulator.cupy.asnumpy(each) for each in self.parts(results)]


@every_schedule
@pytest.mark.parametrize(("name", "shape", "to_int8"), FUSED_CASES)
def test_a_second_writer_does_no_harm_to_fused_rows(
    simulated: Any, monkeypatch: Any, name: str, shape: tuple[int, int], to_int8: bool, schedule: Any
) -> None:
    """What blocks tell one another is computed again: of the statistics, and of the largest results."""
    call = FusedCall(monkeypatch, name, shape, to_int8=to_int8)
    monkeypatch.setattr(simulator.settings, "schedules", (schedule,))  # they may differ in the last place

    for got, wanted in zip(call.run(), call.wanted, strict=True):
        if got.dtype == np.int8:
            assert np.abs(got.astype(int) - wanted).max() <= 1  # scales differ in the last place
        else:
            assert_close(got, wanted, scale=np.asarray(2.0))


@every_schedule
@pytest.mark.parametrize(
    ("name", "over"), [("softmax", "x"), ("add_layer_norm", "x"), ("add_layer_norm", "residual")]
)
def test_a_second_writer_where_a_fused_call_replaces_what_it_reads_stops_it(
    simulated: Any, monkeypatch: Any, name: str, over: str, schedule: Any
) -> None:
    call = FusedCall(monkeypatch, name, (3, 2048), to_int8=False, over=over)
    monkeypatch.setattr(simulator.settings, "schedules", (schedule,))

    with pytest.raises(
        simulator.SimulatorError, match="nobody else writes to `out` until the call has finished should hold"
    ):
        call.run()


@pytest.mark.parametrize("over", ["x", "residual"])
@pytest.mark.parametrize("cols", [2048, 4099])
def test_messages_leave_no_trace_in_what_a_fused_call_replaces(simulated: Any, over: str, cols: int) -> None:
    """They lie in x or in the residual, which is read again; of more rows than blocks meet for at once."""
    random = np.random.default_rng(5)
    x, residual = (random.standard_normal((11, cols)).astype(np.float32) for _ in range(2))
    wanted, total = cupynorm.add_layer_norm(x, residual)
    on_device = {"x": simulator.cupy.asarray(x), "residual": simulator.cupy.asarray(residual)}

    y, added = cupynorm.add_layer_norm(**on_device, out=on_device[over], plan="split")

    assert_close(y.get(), wanted, scale=np.asarray(2.0))
    assert_close(added.get(), total, scale=np.asarray(2.0))


def test_a_message_that_nobody_sends_is_still_a_fault_of_the_kernel(
    simulated: Any,
    monkeypatch: Any,
    tmp_path: Any,
) -> None:
    folder = compiler.kernels_dir()
    sent = "send_mailbox(to + i, own.word[i], own.word[i + 1]);"
    assert (folder / "base" / "reduce.cuh").read_text().count(sent) == 1
    for path in folder.rglob("*.cu*"):
        copy = tmp_path / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace(sent, ";"))
    monkeypatch.setattr(compiler, "kernels_dir", lambda: tmp_path)

    with pytest.raises(simulator.SimulatorError, match="deadlock: .* wait in await_mailbox"):
        cupynorm.softmax(simulator.cupy.asarray(np.ones((3, 4096), np.float32)), plan="split")
