"""Finds out which kernels the next tests need, so that g++ compiles them together: each for half or a third.

A pytest plugin. Before a test that uses the simulator, this test and the next ones of its file are rehearsed: run with
kernels that do nothing, up to the first thing that fails. Nothing is reported of a rehearsal, and nothing that it made
is seen by the test, which then runs as it would have, and finds its kernels compiled. A kernel that no rehearsal found
is compiled alone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
from typing import Any

import numpy as np
import pytest
from _pytest import tmpdir

from cupynorm.runtime import nvrtc

from . import build

AT_ONCE = 96  # tests that are rehearsed before one of them runs
# so many cases of a function in turn wanted nothing: the others will not either, until one of them does
IN_VAIN = 24
WORTH_A_CASE = 0.02  # seconds that count for one more of them
# fixtures that install the simulator
FIXTURES = {"simulated", *(["xp"] if os.environ.get("CUPYNORM_TEST_DEVICE") == "simulator" else [])}
UNFIT = {"cuda"}  # needs a real device
# whose fixtures of a whole session hold no kernel's results: pytest's folders, and each conftest.py
KEPT_BY = ("tmpdir", "conftest")
# numpy.testing's, whose failure would end a rehearsal before all kernels are known
COMPARISONS = ("assert_allclose", "assert_array_equal", "assert_equal", "assert_array_less")

# functions of a file that compute and compare, several of them in a test
CHECKS = ("assert_close", "assert_form_close", "check")

_done: set[pytest.Item] = set()
_left_out: dict[str, set[pytest.Item]] = collections.defaultdict(
    set
)  # by function, those behind IN_VAIN others
_in_vain: dict[str, float] = collections.defaultdict(float)


def _can_be_rehearsed(item: pytest.Item) -> bool:
    """Say whether a test runs on the simulator, and leaves nothing behind that outlives it."""
    if not isinstance(item, pytest.Function) or not FIXTURES & set(item.fixturenames):
        return False
    if (
        hasattr(item.obj, "hypothesis")
        or UNFIT & set(item.fixturenames)
        or item.get_closest_marker("unrehearsed")
    ):
        return False
    defined = [each for some in item._fixtureinfo.name2fixturedefs.values() for each in some]
    return all(each.scope == "function" or each.func.__module__.endswith(KEPT_BY) for each in defined)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _run(item: Any) -> None:
    """Run a test as pytest does, but report nothing: what a failure looks like takes longer to write than the rest."""
    if not item._request:
        item._initrequest()  # as pytest does before it runs a test again
    item.stash[
        tmpdir.tmppath_result_key
    ] = {}  # where tmp_path looks, when it ends, for how its test came out
    try:
        item.ihook.pytest_runtest_setup(item=item)
        item.ihook.pytest_runtest_call(item=item)
    except (Exception, pytest.skip.Exception, pytest.fail.Exception):  # noqa: BLE001, S110  as far as it gets
        pass
    with contextlib.suppress(Exception):
        item.ihook.pytest_runtest_teardown(item=item, nextitem=item.parent)
    item._request, item.funcargs = False, None
    item._report_sections.clear()  # what it printed


def _going_on(check: Any) -> Any:
    """Return the same function, behind which a rehearsal goes on."""

    @functools.wraps(check)
    def checked(*args: Any, **options: Any) -> None:
        with contextlib.suppress(Exception):
            check(*args, **options)

    return checked


def _refused(*_: Any, **__: Any) -> None:
    raise build.CompileError("in a rehearsal")


def _rehearse(items: list[pytest.Item]) -> None:
    found: dict[str, build.Wanted] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "compile_all", _refused)  # takes longer than g++, and is not needed twice
        for name in COMPARISONS:
            patch.setattr(np.testing, name, lambda *_, **__: None)
        for name in {*CHECKS} & {*vars(items[0].module)}:
            patch.setattr(items[0].module, name, _going_on(getattr(items[0].module, name)))
        for item in items:
            _done.add(item)
            if _in_vain[_function(item)] >= IN_VAIN:
                _left_out[_function(item)].add(item)
                continue
            patch.setattr(build, "rehearsed", [])
            began = time.process_time()
            _run(item)
            new = {
                each.key: each
                for each in build.rehearsed or ()
                if each.parts and each.key not in found and not each.path.exists()
            }
            cost = 1 + (time.process_time() - began) / WORTH_A_CASE
            _in_vain[_function(item)] = 0 if new else _in_vain[_function(item)] + cost
            found |= new
    build.together(list(found.values()))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Rehearse a function's other cases again where one that was left out has compiled a kernel alone."""
    if build.alone:
        function = nodeid.partition("[")[0]
        _in_vain[function] = 0
        _done.difference_update(_left_out.pop(function, ()))
        build.alone.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: Any) -> None:
    """Rehearse a test and those behind it."""
    if item in _done or build.sanitizer() or build.why_not() or not _can_be_rehearsed(item):
        return
    at = item.session.items.index(item)
    following = [
        each
        for each in item.session.items[at : at + AT_ONCE]
        if each.path == item.path and each not in _done and _can_be_rehearsed(each)
    ]
    _rehearse(following)
