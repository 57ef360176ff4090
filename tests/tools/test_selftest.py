"""The self-test: what it covers, what it finds, and how it compiles."""

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
from cupynorm.tools import selftest
from cupynorm.tools.selftest import Result
from tests import SLOW
from tests.simulator import simulated  # noqa: F401  a fixture


def test_the_self_test_of_numpy_covers_ops_and_dtypes_and_passes() -> None:
    results = list(selftest.run(cpu=True))

    assert [each for each in results if not each.ok] == []
    assert {each.op for each in results} == set(FORMS)
    assert {*DTYPES, "float16 -> float32", "float32 -> float16"} == {each.dtype for each in results}
    assert {each.variant for each in results} == {"numpy"}
    assert all(each.error <= each.tolerance for each in results)


def broken(name: str, function: Any) -> tuple[Op, ...]:
    """Return the catalog with one function replaced."""
    return tuple(dataclasses.replace(op, function=function) if op.name == name else op for op in OPS)


def results_with(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> list[Result]:
    monkeypatch.setattr(selftest, "OPS", broken(name, function))
    monkeypatch.setattr(selftest, "QUICK", {33: "few"})
    return [each for each in selftest.run(cpu=True) if each.op == name]


def test_the_self_test_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_with(monkeypatch, "softmax", lambda x, **_: np.full_like(x, 1 / 33))

    assert not any(each.ok for each in results)
    assert "differ in nan or inf, the worst at (6, 0)" in results[0].note


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
        next(iter(selftest.run()))


def test_the_self_test_of_a_device_tries_every_variant(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the simulator runs a launch in several orders, and compares all memory: other threads must not write meanwhile
    monkeypatch.setattr(selftest, "_processors", lambda: 1)
    monkeypatch.setattr(selftest, "QUICK", {3: "few", 2056: "more than a warp holds"})
    monkeypatch.setattr(selftest._dtypes, "DTYPES", {"float16": None}, raising=False)
    checks, names = selftest._checks, [*FORMS]

    def sampled(**how: Any) -> Any:
        """Leave out one width of a form, and another one of the next; with CUPYNORM_SLOW=1 nothing."""
        for each in checks(**how):
            of_form = isinstance(each, selftest._FormCheck)
            if SLOW or not of_form or each.cols == selftest.FORM_COLS[names.index(each.what.name) % 2]:
                yield each

    monkeypatch.setattr(selftest, "_checks", sampled)

    results = list(selftest.run())

    assert [each for each in results if not each.ok] == []
    ran = {each.variant for each in results if each.shape[1] == 3}
    assert ran == {"warp", "block", "cluster", "shared", "uncached"}
    wide = {each.variant for each in results if each.shape[1] == 2056}
    assert wide == {"block", "cached", "cluster", "split", "shared", "uncached"}
    assert {each.variant for each in results if "->" in each.dtype} == {"chosen"}
    assert {each.op for each in results} >= {
        name for name, each in FORMS.items() if not (each.alone or each.missing)
    }


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
    monkeypatch.setattr(selftest, "_processors", lambda: 4)
    monkeypatch.setattr(compiler, "keeps_on_disk", lambda: False)
    stages: list[tuple[str, int, int]] = []

    results = list(selftest.run(quick=quick, progress=lambda *stage: stages.append(stage)))

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

    monkeypatch.setattr(selftest, "_begin_thread", lambda device: None)
    for kind in (selftest._OpCheck, selftest._FormCheck):
        monkeypatch.setattr(kind, "prepare", prepare)
    every = list(selftest._checks(cpu=False, quick=quick))
    numbers = [at.to_bytes(2, "little") for at in range(len(selftest._groups(every)))]
    pipes = [iter([*numbers[start::3], b""]) for start in range(3)]

    for pipe in pipes:
        monkeypatch.setattr(os, "read", lambda _fd, _count, pipe=pipe: next(pipe))
        selftest.prepare_groups(3, quick=quick)

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

    for kind in (selftest._OpCheck, selftest._FormCheck):
        monkeypatch.setattr(kind, "prepare", prepare)
    checks = list(selftest._checks(cpu=False, quick=True))
    with selftest._threads(3, lambda: None) as pool:
        selftest._compile_with_processes(
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
    monkeypatch.setattr(selftest, "_processors", lambda: 2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(selftest.run(progress=interrupt))

    assert len(kernels.events) < 20


def test_a_kernel_that_does_not_compile_fails_its_own_checks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeKernels(monkeypatch)
    works = compiler.load_function

    def fails(code: str, expression: str, **more: Any) -> tuple[int, Any]:
        if "RmsNorm" in expression:
            raise RuntimeError("the compiler is broken")
        return works(code, expression, **more)

    monkeypatch.setattr(compiler, "load_function", fails)

    results = list(selftest.run(quick=True))

    assert {each.op for each in results} == set(FORMS)
    broken_ones = {each.op for each in results if "the compiler is broken" in each.note}
    assert "rms_norm" in broken_ones
    assert "softmax" not in broken_ones


def test_a_quick_self_test_covers_every_op_and_form_and_is_small() -> None:
    few, every = list(selftest.run(cpu=True, quick=True)), list(selftest.run(cpu=True))

    assert {each.op for each in few} == set(FORMS)
    assert len(few) < len(every) / 2
    assert all(each.ok for each in few)
