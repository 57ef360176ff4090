"""Every form of every op: its entry is complete; NumPy, PyTorch and the simulated device agree with its reference."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import cli
from cupynorm._dtypes import DTYPES, quantized_dtype
from cupynorm.call import asking
from cupynorm.catalog import forms, op_table
from cupynorm.catalog.form import Form
from cupynorm.catalog.forms import FORMS
from cupynorm.plan.config import VARIANTS, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.runtime import devices, nvrtc
from cupynorm.tools import bench, explain, selftest
from cupynorm.tools.results import Point
from cupynorm.tools.testing import assert_close, assert_form_close, form_error
from tests import command_runner
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

every_form = pytest.mark.parametrize("what", FORMS.values(), ids=FORMS)
AROUND = {name: each for name, each in FORMS.items() if not each.alone}
fused = pytest.mark.parametrize("what", AROUND.values(), ids=AROUND)


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    what = request.node.callspec.params.get("what") if hasattr(request.node, "callspec") else None
    if isinstance(what, Form) and what.missing:
        pytest.skip(f"{what.missing} is not installed")


def results_of(what: Form, given: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    results = what.call(given, **options)
    return results if isinstance(results, tuple) else (results,)


@every_form
def test_an_entry_has_a_public_name_and_the_arrays_of_its_call(what: Form) -> None:
    given = what.given(24, 16, np.dtype(np.float16))
    inputs = forms.inputs(what, 24, 16, "float16")
    results = results_of(what, inputs)

    assert hasattr(cupynorm, what.name.partition("/")[0])
    assert forms.form(what.name) is what
    assert set(inputs) == {name for name, each in given.items() if each.holds != "result"}
    written = [each for each in given.values() if each.holds == "result"]
    assert [each.shape for each in results] == [each.shape for each in written]
    assert sum(each.nbytes for each in results) == sum(each.bytes for each in written)
    assert not what.beside or FORMS[what.beside].alone


def test_a_name_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(
        ValueError, match="'softmax/all' is no op and no form of one: use layer_norm, rms_norm"
    ):
        forms.form("softmax/all")


@fused
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("rows", "cols"), [(29, 33), (1, 1), (256, 128), (7, 1032)])
def test_numpy_gives_what_the_definition_gives(what: Form, dtype: str, rows: int, cols: int) -> None:
    given = forms.inputs(what, rows, cols, dtype)

    results, expected = results_of(what, given), what.right(given)

    assert_form_close(what, results, expected)
    error, tolerance = form_error(what, results, expected)
    assert error <= tolerance
    if not what.quantized:
        asked = [
            each.dtype for each in what.given(rows, cols, DTYPES[dtype]).values() if each.holds == "result"
        ]
        assert [each.dtype for each in results] == asked


@every_form
def test_pytorch_gives_what_the_definition_gives(what: Form) -> None:
    torch = pytest.importorskip("torch")
    if what.torch is None or what.random:
        pytest.skip("PyTorch has none, or draws other numbers")
    given = forms.inputs(what, 256, 64, "float64")
    if "lengths" in given:
        given["lengths"][...] = np.maximum(given["lengths"], 1)  # a row with nothing kept is nan in PyTorch

    results = what.torch(torch, {name: torch.from_numpy(each) for name, each in given.items()})

    results = results if isinstance(results, tuple) else (results,)
    for got, wanted in zip(results, what.reference(given), strict=True):
        assert_close(got.numpy(), wanted, dtype="float32")
        assert got.numpy().shape == wanted.shape


@fused
def test_the_simulated_device_gives_what_the_definition_gives(what: Form, simulated: Any) -> None:
    given = forms.inputs(what, 24, 24, "float16")
    on_device = {name: simulated.cupy.asarray(each) for name, each in given.items()}
    y = what.given(24, 24, np.dtype(np.float16))["y"]
    out = simulated.cupy.empty(y.shape, y.dtype)

    results = results_of(what, on_device, out=out)

    assert results[0] is out
    assert_form_close(what, tuple(map(simulated.cupy.asnumpy, results)), what.right(given))


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("per_row", [True, False])
def test_half_a_step_is_allowed_and_two_are_not(name: str, per_row: bool) -> None:
    pytest.importorskip("ml_dtypes")
    what = FORMS[f"layer_norm/{name}" + "/scale" * (not per_row)]
    given = forms.inputs(what, 8, 64, "float32")
    expected = what.right(given)
    q, *scales = results_of(what, given)
    nearer = q.view(np.int8).copy()
    nearer[3, 5] -= 2 if nearer[3, 5] > 1 or name != "int8" else -2
    wrong = (nearer.view(quantized_dtype(name)), *scales)

    assert_form_close(what, (q, *scales), expected)
    with pytest.raises(AssertionError, match="1 of 512 off by more than allowed"):
        assert_form_close(what, wrong, expected)
    error, tolerance = form_error(what, wrong, expected)
    assert error > tolerance
    if per_row:
        with pytest.raises(AssertionError):
            assert_form_close(what, (q, scales[0] * np.float32(1.001)), expected)


SIZES = {  # bytes for each row and column, and for each column, of float16 at 49152 x 1024
    "softmax/where": (5, 0),
    "softmax/bias": (4, 2 * 1024),
    "add_layer_norm": (6, 6),
    "add_layer_norm/sum": (8, 6),
    "add_rms_norm": (6, 4),
    "layer_norm/fuse": (6, 4),
    "layer_norm/int8/scale": (3, 4),
    "bias_gelu": (4, 2),
    "geglu": (6, 4),
    "swiglu": (6, 0),
    "dropout": (4, 0),
    "add_qkv_bias": (12, 6),
    "merge_heads": (4, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_byte_counts_once(name: str) -> None:
    of_each, of_a_column = SIZES[name]

    assert FORMS[name].bytes_moved(49152, 1024, "float16") == (of_each * 49152 + of_a_column) * 1024


def test_what_a_mask_by_structure_drops_is_not_read() -> None:
    kept = np.tril(np.ones((64, 64)))
    window = kept - np.tril(np.ones((64, 64)), -forms.WINDOW - 1)

    for name, what in (("causal", kept), ("window", window)):
        moved = FORMS[f"softmax/{name}"].bytes_moved(128, 64, "float32")
        assert moved == 2 * 4 * (64 * 64 + int(what.sum()))
    assert FORMS["softmax/lengths"].bytes_moved(128, 64, "float16") == 2 * 64 * 64 * 4 + 2 * 4
    kept = int(forms.ragged(2, 64).sum()) * 64
    assert FORMS["softmax/ragged"].bytes_moved(128, 64, "float16") == (2 * 64 * 64 + kept) * 2 + 2 * 4
    assert FORMS["layer_norm/int8"].bytes_moved(3, 5, "float16") == 3 * 5 * 3 + 3 * 4 + 2 * 5 * 2


@every_form
def test_bytes_of_an_op_alone_are_those_of_the_catalog(what: Form) -> None:
    if not what.alone:
        return
    op = op_table.op(what.name)
    weights = "float16" if op.parameters else None

    assert what.bytes_moved(7, 33, "float16") == op.bytes_moved(7, 33, "float16", parameter_dtype=weights)


@fused
def test_explain_shows_what_a_form_would_launch(what: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: None)
    arguments = [
        "explain",
        what.name,
        "--shape",
        "4096,1024",
        "--dtype",
        "float16",
        "--device",
        "h200",
        "--json",
    ]

    told = json.loads(command_runner().invoke(cli.cli, arguments).stdout)

    assert told["op"] == what.name
    assert told["bytes_moved"] == what.bytes_moved(4096, 1024, "float16")
    assert told["kernel"].startswith("cupynorm::")
    assert told["plan"].get("variant") in (VARIANTS if "rows_per_group" in told["plan"] else (None,))
    assert 0 < told["occupancy"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bias_gelu", "--plan", "warp"], "bias_gelu has no variants"),
        (["softmax/causal", "--gamma-dtype", "float32"], "--gamma-dtype is for plain ops"),
        (["softmax/causal", "--axis", "-2,-1"], "--axis is for plain ops"),
        (["softmax/all"], "'softmax/all' is not one of layer_norm"),
    ],
)
def test_options_that_a_form_has_not(arguments: list[str], message: str) -> None:
    shape = ["--shape", "8,64", "--dtype", "float32", "--device", "h200"]

    result = command_runner().invoke(cli.cli, ["explain", *arguments, *shape])

    assert result.exit_code == 2
    assert message in result.stderr


@fused
def test_the_plan_is_that_of_a_call(what: Form, simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynorm.runtime import compiler

    loaded: list[str] = []
    monkeypatch.setattr(compiler, "kernel", lambda *given: loaded.append(given[2]) or 1 / 0)
    given = forms.inputs(what, 24, 24, "float16")

    point = Point(what.name, "float16", 24, 24)
    _, *others = bench.kernels_at(point)  # such as the sums of a gradient, which are launched first
    further = [each.expression(each.problem.plan(RECORDED["h200"])) for each in others]
    for call in (
        lambda: bench.planned(point),
        lambda: what.call({name: simulated.cupy.asarray(each) for name, each in given.items()}),
    ):
        with pytest.raises(ZeroDivisionError):
            call()

    assert loaded[1] in (loaded[0], *further[:1])


def test_nothing_is_asked_of_a_call_that_launches_nothing() -> None:
    with pytest.raises(RuntimeError, match="the call launches nothing"):
        asking.spec_of(lambda: None)
    assert cupynorm.softmax(np.zeros((1, 2))).tolist() == [[0.5, 0.5]]


def test_the_self_test_reports_a_form_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FORMS["geglu"]
    wrong = dataclasses.replace(right, call=lambda a, **_: right.call(a) * np.float32(1.01))
    raises = dataclasses.replace(right, name="raises", call=lambda a, **_: 1 / 0)
    monkeypatch.setattr(selftest, "OPS", ())
    monkeypatch.setattr(selftest.forms, "FORMS", {"geglu": wrong, "raises": raises})

    found = list(selftest.run(cpu=True))

    assert len(found) == 2 * len(DTYPES) * len(selftest.FORM_COLS)
    assert not any(each.ok for each in found if each.dtype != "bfloat16")
    assert {each.note for each in found if each.op == "raises"} == {"ZeroDivisionError: division by zero"}
    assert all(math.isinf(each.error) for each in found if each.op == "raises")


def test_without_a_device_the_self_test_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise devices.NoDeviceError("no device")

    monkeypatch.setattr(devices, "cupy", nothing)

    with pytest.raises(devices.NoDeviceError):
        selftest._compare_form(FORMS["dropout"], 8, "float32", on_device=True)


@every_form
def test_a_call_is_lowered_without_memory_for_its_elements(
    what: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = np.full

    def small(shape: tuple[int, ...], *args: Any) -> Any:
        assert math.prod(shape) <= 300
        return full(shape, *args)

    monkeypatch.setattr(np, "full", small)
    monkeypatch.setattr(np, "ones", None)

    assert explain.form_specs(what, 300, 200, "float32", limits=RECORDED["h200"])


def test_explain_gives_values() -> None:
    found = explain.explain_form(FORMS["softmax/where"], (8, 64), "float16", device="h200")

    assert isinstance(found.plan, Plan)
    assert found.plan.variant in VARIANTS
    assert found.as_dict()["problem"]["load_operands"] == (1,)
