"""What counts as right: errors, tolerances, messages, inputs, and a self-test that finds what is wrong."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import DTYPES
from cupynorm.catalog.forms import FORMS
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.plan.config import DoesNotFitError
from cupynorm.runtime import compiler, devices
from cupynorm.tools import testing
from cupynorm.tools.testing import (
    TOLERANCES,
    Result,
    assert_close,
    assert_statistics_close,
    cases,
    error,
    inputs,
    selftest,
)

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def test_error_is_that_of_the_worst_row() -> None:
    expected = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]])
    actual = expected + np.array([[0, 0.5], [0.5, 0], [0, 0]])

    assert error(actual, expected) == pytest.approx(0.1)
    assert error(expected, expected) == 0
    assert error(actual[:0], expected[:0]) == 0


def test_error_takes_rows_of_several_axes() -> None:
    expected = np.array([[[3.0], [4.0]]])
    actual = np.array([[[3.0], [4.5]]])

    assert error(actual, expected, axes=2) == pytest.approx(0.1)
    assert error(actual, expected, axes=1) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (np.nan, 1.0),
        (np.nan, np.inf),
        (np.inf, np.nan),
        (np.inf, -np.inf),
        (-np.inf, 1.0),
        (1.0, np.nan),
        (1.0, np.inf),
    ],
)
def test_error_is_infinite_where_nan_or_infinity_differ(right: float, wrong: float) -> None:
    expected = np.array([[1.0, right], [1.0, 1.0]])
    actual = np.array([[1.0, wrong], [1.0, 1.0]])

    assert error(expected, expected) == 0
    assert error(actual, expected) == math.inf
    with pytest.raises(AssertionError, match=r"1 of 4 not nan or inf alike, the worst at \(0, 1\)"):
        assert_close(actual, expected)


def test_an_error_that_no_rounding_avoids_does_not_count() -> None:
    expected = np.full((1, 131072), 1 / 131070)
    nearest = expected.astype(np.float16)
    next_one = nearest + np.float16(2**-24)

    assert nearest[0, 0] != expected[0, 0]
    assert error(nearest, expected) == 0
    assert_close(nearest, expected)
    assert error(next_one, expected) > TOLERANCES["float16"]
    with pytest.raises(AssertionError, match="131072 of 131072 off by more than allowed"):
        assert_close(next_one, expected)


def test_what_the_dtype_cannot_hold_is_expected_to_be_infinite() -> None:
    expected = np.array([[7e4, 1.0]])

    assert error(np.array([[np.inf, 1]], np.float16), expected) == 0
    assert error(np.array([[65504, 1]], np.float16), expected) == math.inf


def test_a_row_that_ought_to_be_zero_must_be() -> None:
    assert error(np.array([[0.0, 0.0]]), np.zeros((1, 2))) == 0
    assert error(np.array([[0.0, 1e-30]]), np.zeros((1, 2))) == math.inf


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_tolerance_follows_the_dtype(dtype: str) -> None:
    expected = np.linspace(1, 2, 64).reshape(4, 16)
    kind = DTYPES[dtype]

    assert_close(expected.astype(kind), expected)
    with pytest.raises(AssertionError):
        assert_close((expected * (1 + 8 * TOLERANCES[dtype])).astype(kind), expected)


def test_a_looser_dtype_can_be_asked_for() -> None:
    expected = np.ones((2, 3))

    assert_close(expected * 1.0005, expected, dtype="float16")
    with pytest.raises(AssertionError):
        assert_close(expected * 1.0005, expected)


def test_the_message_names_the_worst_element() -> None:
    expected = np.ones((3, 4), np.float32)
    actual = expected.copy()
    actual[1, 2], actual[2, 0] = 1.5, 1.25

    with pytest.raises(
        AssertionError,
        match=r"2 of 12 off by more than allowed, the worst at \(1, 2\): 1.5, expected 1, allowed is 2e-06",
    ):
        assert_close(actual, expected)


def test_a_row_that_is_off_everywhere_is_found_though_no_element_is() -> None:
    expected = np.ones((3, 4), np.float32)
    actual = expected.copy()
    actual[2] *= 1 + 1.7e-6

    with pytest.raises(AssertionError, match=r"row 2 has relative error 1.\d+e-06, allowed is 1e-06"):
        assert_close(actual, expected)


def test_shapes_must_be_equal() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2, 3\), expected \(3, 2\)"):
        error(np.ones((2, 3)), np.ones((3, 2)))


def test_a_mean_near_zero_is_measured_by_its_rows_spread() -> None:
    expected = (np.ones((2, 2)), np.array([1e-9, 1000.0]), np.array([1.0, 10.0]))
    near = (np.array([1.5e-7, 1000.0], np.float32), np.array([1, 10], np.float32))

    assert_statistics_close(OPS[0], near, expected[1:])
    with pytest.raises(AssertionError, match=r"mean: 1 of 2 off by more than allowed, the worst at \(0,\)"):
        assert_statistics_close(OPS[0], (np.array([1e-5, 1000], np.float32), near[1]), expected[1:])
    with pytest.raises(AssertionError, match="rstd"):
        assert_statistics_close(OPS[0], (near[0], near[1] * np.float32(1.001)), expected[1:])
    assert_statistics_close(OPS[2], (), ())


@every_op
def test_inputs_are_the_same_at_each_call_and_hold_every_kind_of_row(op: Op) -> None:
    one, two = inputs(op, 30, 50, "float16"), inputs(op, 30, 50, "float16")

    assert np.array_equal(one.x, two.x)
    assert set(one.parameters) == set(op.parameters)
    assert all(np.array_equal(one.parameters[name], two.parameters[name]) for name in op.parameters)
    x = one.x.astype(np.float64)
    assert (x[1] > 990).all()
    assert (x[2] == 3).all()
    assert np.abs(x[3]).max() > 50
    lost = np.isneginf(x).sum(axis=1)
    assert lost[4:7].tolist() == ([0, 0, 0] if op.parameters else [25, 49, 50])
    assert not np.isnan(x).any()


@every_op
def test_every_case_has_its_reason(op: Op) -> None:
    few, all_of_them = list(cases(op, "float32", quick=True)), list(cases(op, "float32"))

    assert {case.x.shape for case in few} < {case.x.shape for case in all_of_them}
    assert all(case.reason for case in all_of_them)


def test_the_self_test_of_numpy_covers_ops_and_dtypes_and_passes() -> None:
    results = list(selftest(cpu=True))

    assert [each for each in results if not each.ok] == []
    assert {each.op for each in results} == set(FORMS)
    assert {*DTYPES, "float16 -> float32", "float32 -> float16"} == {each.dtype for each in results}
    assert {each.variant for each in results} == {"numpy"}
    assert all(each.error <= each.tolerance for each in results)


def broken(name: str, function: Any) -> tuple[Op, ...]:
    """Return the catalog with one function replaced."""
    return tuple(dataclasses.replace(op, function=function) if op.name == name else op for op in OPS)


def results_with(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> list[Result]:
    monkeypatch.setattr(testing, "OPS", broken(name, function))
    monkeypatch.setattr(testing, "QUICK", {33: "few"})
    return [each for each in selftest(cpu=True) if each.op == name]


def test_the_self_test_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_with(monkeypatch, "softmax", lambda x, **_: np.full_like(x, 1 / 33))

    assert not any(each.ok for each in results)
    assert "alike, the worst at (6, 0)" in results[0].note


def test_the_self_test_finds_a_wrong_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPS[1].function

    def wrong(*args: Any, **options: Any) -> Any:
        y, rstd = right(*args, **options)
        return y, rstd * 1.01

    results = results_with(monkeypatch, "rms_norm", wrong)

    assert not any(each.ok for each in results)
    assert all(each.note.startswith("rstd: ") for each in results)


def test_the_self_test_reports_what_is_raised_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the cache is full")

    results = results_with(monkeypatch, "softmax", fails)

    assert len(results) == len(DTYPES) + 2
    assert {(each.ok, each.note, each.error) for each in results} == {
        (False, "OSError: the cache is full", math.inf)
    }


def test_the_self_test_leaves_out_a_variant_that_cannot_hold_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise DoesNotFitError("too long")

    assert results_with(monkeypatch, "softmax", refuses) == []


def test_the_self_test_says_that_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise devices.NoDeviceError("no device")

    monkeypatch.setattr(devices, "cupy", nothing)

    with pytest.raises(devices.NoDeviceError):
        next(iter(selftest()))


def test_the_self_test_of_a_device_tries_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import simulator

    simulator.install(monkeypatch)
    # the simulator runs a launch in several orders, and compares all memory: other threads must not write meanwhile
    monkeypatch.setattr(testing, "_processors", lambda: 1)
    monkeypatch.setattr(testing, "QUICK", {3: "few", 2056: "more than a warp holds"})
    monkeypatch.setattr(testing._dtypes, "DTYPES", {"float16": None}, raising=False)

    results = list(selftest())

    assert [each for each in results if not each.ok] == []
    ran = {each.variant for each in results if each.shape[1] == 3}
    assert ran == {"warp", "block", "cluster", "shared", "uncached"}
    wide = {each.variant for each in results if each.shape[1] == 2056}
    assert wide == {"block", "cached", "cluster", "split", "shared", "uncached"}
    assert {each.variant for each in results if "->" in each.dtype} == {"chosen"}


class FakeKernels:
    """In place of the compiler: notes what is compiled and what is launched, in order, and computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tests import simulator

        simulator.install(monkeypatch)
        self.events: list[tuple[str, str]] = []
        self.at_once = self.most_at_once = 0
        self._lock, self._driver = threading.Lock(), simulator.driver
        monkeypatch.setattr(compiler, "load_function", self._load)
        for name in ("launchKernel", "launchCooperativeKernel"):
            monkeypatch.setattr(simulator.driver, name, lambda *_: self.events.append(("launch", "")))

    def _load(
        self, code: str, expression: str, *, accelerated: bool = False, preparation: str = ""
    ) -> tuple[int, Any]:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.events.append(("compile", f"{accelerated} {preparation} {expression} {hash(code)}"))
        time.sleep(0.002)
        with self._lock:
            self.at_once -= 1
            library = types.SimpleNamespace(max_threads=1024, static_shared_bytes=0, parameter_bytes=())
            return self._driver.load(library), library


@pytest.mark.parametrize("quick", [False, True])
def test_the_self_test_of_a_device_compiles_everything_first_and_once_and_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    kernels = FakeKernels(monkeypatch)
    monkeypatch.setattr(testing, "_processors", lambda: 4)
    monkeypatch.setattr(compiler, "keeps_on_disk", lambda: False)
    stages: list[tuple[str, int, int]] = []

    results = list(selftest(quick=quick, progress=lambda *stage: stages.append(stage)))

    kinds = [kind for kind, _ in kernels.events]
    assert kinds == sorted(kinds), "a kernel was compiled after the first launch"
    compiled = [name for kind, name in kernels.events if kind == "compile"]
    assert len(compiled) == len(set(compiled))
    assert len(compiled) < 130 if quick else len(compiled) > 500
    assert kernels.most_at_once == 4
    assert {each.op for each in results} == set(FORMS)
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["compile", "compare"]
    for stage in ("compile", "compare"):
        counted = [(done, total) for name, done, total in stages if name == stage]
        assert counted == [(done, len(counted)) for done in range(1, len(counted) + 1)]


@pytest.mark.parametrize("quick", [False, True])
def test_other_processes_prepare_all_calls_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], quick: bool
) -> None:
    prepared: list[Any] = []

    def prepare(check: Any, device: int) -> None:
        prepared.append((device, check))
        if len(prepared) % 7 == 0:
            raise RuntimeError("left for the check to report")

    monkeypatch.setattr(testing, "_begin_thread", lambda device: None)
    for kind in (testing._OpCheck, testing._FormCheck):
        monkeypatch.setattr(kind, "prepare", prepare)
    every = list(testing._checks(cpu=False, quick=quick))
    numbers = [at.to_bytes(2, "little") for at in range(len(testing._groups(every)))]
    pipes = [iter([*numbers[start::3], b""]) for start in range(3)]

    for pipe in pipes:
        monkeypatch.setattr(os, "read", lambda _fd, _count, pipe=pipe: next(pipe))
        testing.prepare_groups(3, quick=quick)

    assert sorted(map(repr, prepared)) == sorted(repr((3, check)) for check in every)
    monkeypatch.undo()
    assert capfd.readouterr().out == "." * len(every)


@pytest.mark.skipif(os.name != "posix", reason="starts a shell")
@pytest.mark.parametrize("each", ["cat >/dev/null; printf ....", "printf ..; exit 1", "exit 3"])
@pytest.mark.parametrize("device", [0, None], ids=["threads work", "threads fail"])
def test_processes_that_compile_are_counted_and_may_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, each: str, device: int | None
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{each}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    stages: list[tuple[str, int, int]] = []

    done = []

    def prepare(check: Any, device: int | None) -> None:
        if device is None:
            raise MemoryError
        done.append(check)

    for kind in (testing._OpCheck, testing._FormCheck):
        monkeypatch.setattr(kind, "prepare", prepare)
    checks = list(testing._checks(cpu=False, quick=True))
    with testing._threads(3, lambda: None) as pool:
        testing._compile_with_processes(
            pool, checks, device, lambda *stage: stages.append(stage), quick=True, count=3
        )

    assert {(name, total) for name, _, total in stages} == {("compile", len(checks))}
    counted = [done for _, done, _ in stages]
    assert counted == sorted(counted)
    if not each.startswith("cat"):  # which takes groups away, and says nothing of them
        assert counted[-1] == len(checks) - 1
        assert sorted(map(repr, done)) == sorted(map(repr, checks if device is not None else []))


def test_an_interrupted_self_test_compiles_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FakeKernels(monkeypatch)
    monkeypatch.setattr(testing, "_processors", lambda: 2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(selftest(progress=interrupt))

    assert len(kernels.events) < 20


def test_a_kernel_that_does_not_compile_fails_its_own_checks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeKernels(monkeypatch)
    works = compiler.load_function

    def fails(code: str, expression: str, **more: Any) -> tuple[int, Any]:
        if "RmsNorm" in expression:
            raise RuntimeError("the compiler is broken")
        return works(code, expression, **more)

    monkeypatch.setattr(compiler, "load_function", fails)

    results = list(selftest(quick=True))

    assert {each.op for each in results} == set(FORMS)
    broken_ones = {each.op for each in results if "the compiler is broken" in each.note}
    assert "rms_norm" in broken_ones
    assert "softmax" not in broken_ones


def test_a_quick_self_test_covers_every_op_and_form_and_is_small() -> None:
    few, every = list(selftest(cpu=True, quick=True)), list(selftest(cpu=True))

    assert {each.op for each in few} == set(FORMS)
    assert len(few) < len(every) / 2
    assert all(each.ok for each in few)
