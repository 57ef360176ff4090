"""Loops that numba compiles: plain rows of float32 and float64, however they lie, give what NumPy's passes give."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.catalog.bounds import TOLERANCES
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.host import compiled, threads
from cupynorm.tools.testing import assert_close, assert_statistics_close
from tests import SLOW
from tests.host.test_ops import FAST, mixed
from tests.host.test_slabs import CALLS as STATISTICS

pytest.importorskip("numba", reason="numba is not installed")

CALLS: dict[str, Callable[..., Any]] = {
    **{name: call for name, call in STATISTICS.items() if name != "moments"},
    "normalize, 2": lambda x, _, **how: cupynorm.normalize(x, 2, return_norms=True, **how),
    "softmax_backward": lambda x, _, **how: (cupynorm.softmax_backward(slope(x), x, **how),),
    "log_softmax_backward": lambda x, _, **how: (cupynorm.log_softmax_backward(slope(x), x, **how),),
}


def slope(x: Any) -> Any:
    """Return a gradient to begin with, of x's memory order."""
    found = np.empty_like(x)
    found[...] = np.where(x > 0, 0.7, -0.2)
    return found


# Of float64 those whose loops are not made of the same functions: each takes seconds to compile.
OF_FLOAT64 = ["layer_norm", "softmax", "normalize", "normalize, 2", "normalize, largest", "rescale"]
CASES = [*((name, "float32") for name in CALLS), *((name, "float64") for name in OF_FLOAT64)]
every_case = pytest.mark.parametrize(("name", "dtype"), CASES, ids=[" of ".join(case) for case in CASES])

# How rows of 600 columns lie, and the axis along which they do.
LYING: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "side by side": (lambda normal: normal(40, 600), -1),
    "apart": (lambda normal: normal(600, 40), 0),
    "in the middle": (lambda normal: normal(3, 600, 40), 1),
    "one element to the next row": (lambda normal: normal(600, 1), 0),
    "parts of rows": (lambda normal: normal(40, 700)[:, 7:607], -1),
    "parts of columns": (lambda normal: normal(600, 80)[:, 9:49], 0),
    "one column of several": (lambda normal: normal(600, 80)[:, 9:10], 0),
    "backwards": (lambda normal: normal(80, 600)[::-2], -1),
    "columns backwards": (lambda normal: normal(1200, 40)[::-2], 0),
    "Fortran": (lambda normal: np.asfortranarray(normal(40, 600)), -1),
    "one row again and again": (lambda normal: np.broadcast_to(normal(1, 600), (40, 600)), -1),
    "two axes": (lambda normal: normal(5, 40, 15, 40), (1, 2)),
    "first and last axis": (lambda normal: normal(20, 8, 30), (0, 2)),
}
# which are neither side by side nor apart, or whose result is not, but for logsumexp
BY_NUMPY = {"first and last axis", "one row again and again"}


@pytest.fixture(autouse=True)
def numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYNORM_NUMBA", "1")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the ops that a compiled loop has computed."""
    names: list[str] = []
    original = compiled._go_through

    def note(name: str, *rest: Any, **how: Any) -> None:
        names.append(name)
        original(name, *rest, **how)

    monkeypatch.setattr(compiled, "_go_through", note)
    return names


def normal(dtype: str) -> Callable[..., Any]:
    return lambda *shape: np.random.default_rng(0).standard_normal(shape).astype(dtype_of(dtype))


def by_numpy(call: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """Return what a call gives without compiled loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUPYNORM_NUMBA")
        return call(*given, **how)


# Rows side by side and apart have loops of their own, a second each to compile. Of float64 each op takes the ways that
# have one of them, ops in turn; all with CUPYNORM_SLOW=1.
SIDE_BY_SIDE = {
    "side by side",
    "one element to the next row",
    "parts of rows",
    "backwards",
    "one row again and again",
}
LYING_CASES = [
    (name, dtype, lying)
    for (name, dtype), lying in itertools.product(CASES, LYING)
    if SLOW or dtype == "float32" or (lying in SIDE_BY_SIDE) == (OF_FLOAT64.index(name) % 2 == 0)
]


@pytest.mark.parametrize(("name", "dtype", "lying"), LYING_CASES)
def test_however_rows_lie_they_give_what_numpy_gives(
    name: str, dtype: str, lying: str, ran: list[str]
) -> None:
    made, axis = LYING[lying]
    x = made(normal(dtype))
    gamma = normal(dtype)(*(x.shape[each] for each in np.atleast_1d(axis)))

    found = CALLS[name](x, gamma, axis=axis)

    assert len(ran) == (lying not in BY_NUMPY or (name, lying) == ("logsumexp", "one row again and again"))
    wanted = by_numpy(CALLS[name], x.astype(np.float64), gamma.astype(np.float64), axis=axis)
    tolerance = 8 * TOLERANCES[dtype]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", FAST, ids=lambda op: op.name)
@pytest.mark.parametrize("cols", [1, 2, 3, 17, 63, 64, 65, 128, 511, 512, 513, 1025, 5000])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_kind_of_row_is_as_exact_as_promised(op: Op, cols: int, axis: int) -> None:
    x = np.repeat(mixed(op, cols, np.float32), 3, axis=0)
    given = x if axis else np.ascontiguousarray(x.T)

    results = op.function(given, axis=axis, **({"return_stats": True} if op.stats else {}))

    y, *stats = results if op.stats else (results,)
    expected, *wanted = op.reference(x)
    assert_close(y if axis else y.T, expected)
    if cols > 1:
        assert_statistics_close(op, stats, wanted)


def rows_beyond(dtype: str) -> Any:
    """Return rows of numbers that are not finite, of one number, and of the largest and the least."""
    info, random = np.finfo(dtype), np.random.default_rng(0)
    x = random.standard_normal((14, 70))
    x[0, 5] = np.nan
    x[1, 5] = -np.nan
    x[2, 69], x[3, 0] = np.inf, -np.inf
    x[4, 1:3] = np.inf, -np.inf
    x[5, 1:3] = np.inf, np.nan
    x[6], x[7], x[8] = -np.inf, 0.1, 0.0
    x[9] *= float(info.max) / 8
    x[10] *= float(info.tiny)
    x[11, 3] = float(info.max) / 2
    x[12] = np.nan
    return x.astype(dtype)


@every_case
@pytest.mark.parametrize("axis", [0, 1])
def test_special_values_stay_in_their_row_and_are_those_of_numpy(name: str, dtype: str, axis: int) -> None:
    x = rows_beyond(dtype)
    if name == "layer_norm":
        x[6] = 0.3  # of -inf alone the mean is -inf here, as in NumPy
    x = x if axis else np.ascontiguousarray(x.T)

    found = CALLS[name](x, None, axis=axis)

    for got, want in zip(found, by_numpy(CALLS[name], x, None, axis=axis), strict=True):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@every_case
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(
    name: str, dtype: str, axis: int, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    x = normal(dtype)(300, 700)
    across = 1 - axis
    gamma = normal(dtype)(x.shape[axis])
    whole = CALLS[name](x, gamma, axis=axis)

    monkeypatch.setattr(compiled, "MIN_PER_THREAD", 64)
    monkeypatch.setattr(compiled, "MIN_PER_PART", 64)
    monkeypatch.setattr(compiled, "MIN_WIDTH", 64)
    monkeypatch.setenv("CUPYNORM_THREADS", "3")
    parts = []
    original = threads.spread
    monkeypatch.setattr(
        threads, "spread", lambda items, *rest: (parts.append(len(items)), original(items, *rest))
    )
    with_threads = CALLS[name](x, gamma, axis=axis)
    monkeypatch.delenv("CUPYNORM_THREADS")
    assert parts[0] >= 3
    cuts = np.split(x, [5, 250], axis=across)
    found = [CALLS[name](part, gamma, axis=axis) for part in cuts]

    assert len(ran) == 5
    for number, each in enumerate(whole):
        assert np.array_equal(with_threads[number], each)
        together = np.concatenate([part[number] for part in found], axis=across if each.ndim == 2 else 0)
        assert np.array_equal(together, each)


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "rescale"])
@pytest.mark.parametrize("axis", [0, 1])
def test_in_place(name: str, axis: int, ran: list[str]) -> None:
    x = normal("float32")(90, 200)
    gamma = np.ones(x.shape[axis], np.float32)
    expected = CALLS[name](x, gamma, axis=axis)[0]

    found = CALLS[name](x, gamma, axis=axis, out=x)[0]

    assert found is x
    assert len(ran) == 2
    assert np.array_equal(x, expected)


def test_a_result_may_lie_otherwise(ran: list[str]) -> None:
    x, room = normal("float32")(90, 200), np.zeros((180, 400), np.float32)

    cupynorm.softmax(x, out=room[::2, :200])

    assert ran == ["softmax"]
    assert np.array_equal(room[::2, :200], cupynorm.softmax(x))
    assert not room[1::2].any()
    assert not room[:, 200:].any()


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "rescale"])
def test_a_column_may_be_written_among_others(name: str) -> None:
    x, room = normal("float32")(90, 1), np.zeros((90, 3), np.float32)
    gamma = np.ones(90, np.float32)

    CALLS[name](x, gamma, axis=0, out=room[:, 1:2])

    np.testing.assert_allclose(room[:, 1:2], by_numpy(CALLS[name], x, gamma, axis=0)[0], rtol=1e-5, atol=1e-6)
    assert not room[:, ::2].any()


def test_statistics_beyond_the_type_warn_of_nothing() -> None:
    x = np.full((2, 8), 1e-44, np.float32)

    assert np.isposinf(cupynorm.rms_norm(x, eps=0, return_stats=True)[1]).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: cupynorm.softmax(x, scale=0.5),
        lambda x: cupynorm.softmax(x, lengths=np.full(40, 9)),
        lambda x: cupynorm.layer_norm(x, quantize=cupynorm.Quantize("int8", 0.1)),
        lambda x: cupynorm.add_layer_norm(x, x),
        lambda x: cupynorm.standardize(x, nan="omit"),
        lambda x: cupynorm.softmax(x.astype(np.float16)),
        lambda x: cupynorm.softmax(x, dtype="float64"),
        lambda x: cupynorm.softmax(x, out=np.zeros((40, 120), np.float32)[:, ::2]),
        lambda x: cupynorm.softmax(np.zeros((0, 60), np.float32)),
    ],
    ids=["scale", "lengths", "quantize", "sum", "omit", "float16", "another dtype", "strided out", "empty"],
)
def test_other_calls_are_numpys_to_the_bit(call: Callable[[Any], Any], ran: list[str]) -> None:
    x = normal("float32")(40, 60)

    found, wanted = call(x), by_numpy(call, x)

    assert not ran
    for got, want in zip(np.atleast_1d(found), np.atleast_1d(wanted), strict=True):
        assert np.array_equal(got, want)


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYNORM_NUMBA", "yes")

    with pytest.raises(
        ValueError, match="CUPYNORM_NUMBA is 'yes': use 1 for loops that numba compiles, 0 or nothing"
    ):
        cupynorm.softmax(np.ones((2, 3)))


@pytest.mark.parametrize("text", ["", "0", " "])
def test_without_it_nothing_is_compiled(text: str, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    monkeypatch.setenv("CUPYNORM_NUMBA", text)

    cupynorm.softmax(np.ones((2, 3)))

    assert not ran


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupynorm.host.compiled.loops", None)
    monkeypatch.delattr(compiled, "loops", raising=False)

    with pytest.raises(
        ImportError, match=r"CUPYNORM_NUMBA=1 needs numba: pip install 'numba>=0.61', or unset"
    ):
        cupynorm.softmax(np.ones((2, 3)))


AGAIN = """
import numpy as np, cupynorm
from cupynorm.host.compiled import loops
x = np.ones((3, 5), np.float32)
cupynorm.rms_norm(x)
cupynorm.rms_norm(x, axis=0)
for loop in (loops.side_by_side, loops.apart):
    found = loop("rms_norm", x.dtype)
    print(sum(found.stats.cache_hits.values()), sum(found.stats.cache_misses.values()))
"""


def test_another_process_finds_what_was_compiled(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(cupynorm.__file__).parents[1]),
    }
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", AGAIN], env=environment, capture_output=True, text=True, check=True
        )
        told.append(done.stdout.split())

    assert told == [["0", "1", "0", "1"], ["1", "0", "1", "0"]]


def test_what_is_kept_says_what_it_is_made_of() -> None:
    from cupynorm.host.compiled import loops

    for loop in (loops.side_by_side, loops.apart):
        cells = loop("rms_norm", np.dtype(np.float32)).py_func.__closure__
        assert loops.SOURCES in [cell.cell_contents for cell in cells]


def test_every_op_of_the_catalog_that_could_be_compiled_is() -> None:
    from cupynorm.host.compiled.steps import STEPS

    assert {op.name for op in OPS if not op.name.endswith("backward")} - set(STEPS) <= {
        "moments",
        "sigma_clip",
    }
