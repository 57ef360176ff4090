"""The fast ops on NumPy arrays: as exact as promised at every kind of row, and the same bits beside any other rows."""

from __future__ import annotations

import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from cupynorm import add_layer_norm, layer_norm, log_softmax, rms_norm, softmax
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog.op_table import OPS, Op
from cupynorm.host import ops, reference, rows, threads
from cupynorm.tools.testing import assert_close, assert_statistics_close

FAST = [op for op in OPS if hasattr(ops, op.name)]  # others are computed by their formula in reference.py
every_op = pytest.mark.parametrize("op", FAST, ids=lambda op: op.name)
every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))

# How a row differs from normal numbers, and what it could spoil.
KINDS: dict[str, Any] = {
    "normal": lambda x: x,
    "far mean": lambda x: 1000 + 0.1 * x,
    "kelvin": lambda x: 290 + 10 * x,
    "constant": lambda x: 0 * x + 0.1,
    "outlier first": lambda x: np.concatenate([[3e4], x[1:]]),
    "outlier last": lambda x: np.concatenate([x[:-1], [-3e4]]),
    "steep": lambda x: 30 * x,  # one power has nearly all of the sum
    "low": lambda x: x - 50,  # the sum of powers without a pivot would be tiny
    "high": lambda x: x + 50,  # and here large: its logarithm has few digits behind the point
    "higher": lambda x: x + 300,  # and here infinite
    "first is far below": lambda x: np.concatenate([[-200.0], x[1:]]),
    "first is dropped": lambda x: np.concatenate([[-np.inf], x[1:]]) if len(x) > 1 else x,
    "low behind one that is dropped": lambda x: np.concatenate([[-np.inf], x[1:] - 95]) if len(x) > 1 else x,
    "all alike but one": lambda x: np.concatenate([[20.0], 0 * x[1:]]),
    "small": lambda x: 1e-3 * x,
}
NORM_KINDS = [name for name in KINDS if "dropped" not in name]


def kinds_of(op: Op) -> list[str]:
    """Return the kinds of rows of which an op makes numbers."""
    return NORM_KINDS if op.parameters else list(KINDS)


def mixed(op: Op, cols: int, dtype: Any, times: int = 2) -> Any:
    """Return rows of every kind in turn."""
    random = np.random.default_rng(cols)
    found = [KINDS[kind](random.standard_normal(cols)) for _ in range(times) for kind in kinds_of(op)]
    return np.stack(found).astype(dtype)


@every_op
@every_dtype
@pytest.mark.parametrize("cols", [1, 2, 3, 17, 128, 511, 512, 1023, 1024, 1025, 1537, 5000])
def test_every_kind_of_row_is_as_exact_as_promised(op: Op, dtype: str, cols: int) -> None:
    x = mixed(op, cols, dtype_of(dtype))

    results = op.function(x, **({"return_stats": True} if op.stats else {}))

    y, *stats = results if op.stats else (results,)
    expected, *wanted = op.reference(x)
    assert_close(y, expected)
    if cols > 1:  # a row of one element has no deviation, by which the error of a mean is measured
        assert_statistics_close(op, stats, wanted)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("block", [1 << 17, 64, 8])
@pytest.mark.parametrize("into", ["new", "x", "strided"])
def test_every_road_through_a_block_is_as_exact(
    op: Op, dtype: str, block: int, into: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = mixed(op, 40, dtype)
    expected = op.reference(x)[0]
    out = {"new": None, "x": x, "strided": np.empty((*x.shape, 2), dtype)[..., 1]}[into]
    monkeypatch.setattr(reference, "BLOCK", block)

    y = op.function(x, out=out)

    assert_close(y, expected)


@every_op
def test_the_formula_agrees(op: Op) -> None:
    x = mixed(op, 300, "float64")
    parameters = {name: np.random.default_rng(1).standard_normal(300) for name in op.parameters}
    y = np.empty_like(x)
    arguments = {
        "layer_norm": (*parameters.values(), 1, 1e-5, y),
        "rms_norm": (*parameters.values(), 1, 1e-6, y),
        "softmax": (1, y),
        "log_softmax": (1, y),
    }[op.name]

    getattr(reference, op.name)(x, *arguments)

    assert_close(y, op.reference(x, **parameters)[0])
    assert_close(op.function(x, **parameters), y)


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("cols", [40, 700])
def test_a_row_has_the_same_bits_in_any_company(op: Op, dtype: str, cols: int) -> None:
    x = mixed(op, cols, dtype)
    many = np.tile(x, (20, 1))

    alone = np.concatenate([op.function(row[None]) for row in x])

    assert np.array_equal(op.function(x), alone, equal_nan=True)
    assert np.array_equal(op.function(many), np.tile(alone, (20, 1)), equal_nan=True)


@every_op
@pytest.mark.parametrize(("rows_and_columns"), [(300, 700), (9000, 31), (3, 1 << 18), (1, 1 << 18)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_number_of_threads_gives_the_same_bits(
    op: Op, rows_and_columns: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(3).standard_normal(rows_and_columns).astype(dtype)
    x[::7] += 100
    used: set[int] = set()
    original = rows.Rows.store

    def store(self: rows.Rows, out: Any) -> None:
        used.add(threading.get_ident())
        original(self, out)

    monkeypatch.setattr(rows.Rows, "store", store)
    monkeypatch.delenv("CUPYNORM_THREADS", raising=False)
    once = op.function(x)
    assert used == {threading.get_ident()}

    for count in (2, 3, 8):
        used.clear()
        monkeypatch.setenv("CUPYNORM_THREADS", str(count))
        assert np.array_equal(op.function(x), once)
        assert len(used) > 1 or len(x) == 1


def test_statistics_and_masks_are_the_same_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(4).standard_normal((500, 300)).astype(np.float32)
    where = np.random.default_rng(5).random((500, 300)) < 0.5
    lengths = np.random.default_rng(6).integers(0, 301, 500)
    found = []

    for count in ("1", "4"):
        monkeypatch.setenv("CUPYNORM_THREADS", count)
        found.append((*layer_norm(x, return_stats=True), softmax(x, where=where, lengths=lengths)))

    for one, four in zip(*found, strict=True):
        assert np.array_equal(one, four)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1025", "²"])
def test_a_wrong_number_of_threads_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYNORM_THREADS", text)

    with pytest.raises(
        ValueError, match=f"CUPYNORM_THREADS is '{text}': use a whole number of threads, 1 to 1024"
    ):
        softmax(np.ones((300, 300)))


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_fault_in_one_thread_arrives_when_all_have_ended(faulty: int) -> None:
    done = []

    def work(items: Any) -> None:
        if faulty in items:
            raise MemoryError("no room")
        time.sleep(0.05)
        done.extend(items)

    with pytest.raises(MemoryError, match="no room"):
        threads.spread(range(6), 3, work)

    assert sorted(done) == [each for each in range(6) if each % 3 != faulty]


def test_numpys_settings_are_left_as_they_were() -> None:
    with np.errstate(over="raise", divide="warn"):
        before = np.geterr(), np.getbufsize()

        softmax(np.full((4, 2000), 500, np.float32))

        assert (np.geterr(), np.getbufsize()) == before


@pytest.mark.parametrize("scale", [1e-25, 1e25, 3e38, 1e-38])
@pytest.mark.parametrize("cols", [7, 600])
def test_squares_that_float32_does_not_hold_are_no_trouble(scale: float, cols: int) -> None:
    x = np.random.default_rng(7).uniform(-1, 1, (6, cols))
    x[0], x[5, 0] = 0, np.nan
    x = (x * scale).astype(np.float32)
    x[3] = np.random.default_rng(8).standard_normal(cols)

    for op in FAST[:2]:
        y, *stats = op.function(x, eps=0, return_stats=True)

        expected, *wanted = op.reference(x, eps=0)
        assert_close(y, expected)
        assert_statistics_close(op, [each[1:5] for each in stats], [each[1:5] for each in wanted])


def test_rows_with_a_nan_or_an_infinity_are_as_the_formula_says() -> None:
    for value in (np.nan, np.inf, -np.inf):
        for place in (0, 5, 10):
            x = np.random.default_rng(9).standard_normal((3, 11)).astype(np.float32)
            x[1, place] = value
            for op in FAST:
                assert_close(op.function(x), op.reference(x)[0])


def test_what_overflows_float16_is_infinite_and_subnormals_are_right() -> None:
    x = np.ones((3, 9000), np.float32)
    gamma = np.linspace(-1e6, 1e6, 9000, dtype=np.float32)

    y, p = rms_norm(x, gamma, dtype=np.float16), softmax(x, dtype=np.float16)

    with np.errstate(over="ignore"):
        assert np.array_equal(y, (OPS[1].reference(x, gamma)[0]).astype(np.float16))
    assert np.isinf(y).any()
    assert np.array_equal(p, np.full((3, 9000), 1 / 9000).astype(np.float16))
    wide = softmax(np.ones((2, 1 << 17), np.float16))
    assert wide.tolist() == np.full(wide.shape, np.float16(2.0**-17)).tolist()


def test_log_softmax_of_one_kept_element_is_exactly_zero() -> None:
    x = np.random.default_rng(10).standard_normal((50, 9)).astype(np.float32) * 20
    alone = np.arange(9) == np.arange(50)[:, None] % 9

    y = log_softmax(x, where=alone)

    assert np.array_equal(y, np.where(alone, 0, -np.inf))
    assert np.array_equal(softmax(x, where=alone), alone)
    assert not log_softmax(x[:, :1]).any()


@pytest.mark.parametrize("cols", [5, 9, 600])
def test_log_softmax_loses_nothing_by_the_rounding_of_a_large_logarithm(cols: int) -> None:
    x = (
        np.linspace(5, 43, 500)[:, None] + 0.1 * np.random.default_rng(14).standard_normal((500, cols))
    ).astype("f4")

    assert_close(log_softmax(x), OPS[3].reference(x)[0])


@pytest.mark.parametrize("cols", [60, 2000])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_masks_of_every_kind_agree_with_the_formula(cols: int, dtype: str) -> None:
    random = np.random.default_rng(11)
    x = (3 * random.standard_normal((2, 3, 5, cols))).astype(dtype)
    x[0, 0, 0], x[1, 1, 1, 3], x[1, 2, 1, -1] = -np.inf, np.nan, np.inf
    given: list[dict[str, Any]] = [
        {"scale": 0.125},
        {"where": random.random((5, cols)) < 0.5},
        {"where": random.integers(0, 2, (2, 1, 1, cols)).astype(np.uint8), "scale": -2.0},
        {"bias": random.standard_normal((3, 1, cols)).astype(np.float16)},
        {"bias": random.standard_normal((2, 3, 5, cols))},
        {
            "lengths": random.integers(0, cols + 1, (2, 3, 5)),
            "bias": random.standard_normal((cols,)).astype(dtype),
        },
        {"causal": True, "causal_offset": cols - 5, "window": cols // 2},
    ]
    for options in given:
        for function in (softmax, log_softmax):
            y = function(x, **options)

            assert_close(y, function(x.astype(np.float64), **options))


def test_a_sum_keeps_the_digits_of_its_deviations() -> None:
    random = np.random.default_rng(12)
    x = (1000 + random.standard_normal((9, 700))).astype(np.float32)
    residual = random.standard_normal((9, 700)).astype(np.float32)

    y, total = add_layer_norm(x, residual)

    exact = x.astype(np.float64) + residual
    assert_close(y, OPS[0].reference(exact)[0])
    assert np.array_equal(total, exact.astype(np.float32))


@every_op
def test_memory_does_not_grow_with_x(op: Op) -> None:
    for shape in ((1 << 14, 1 << 9), (1, 1 << 23)):
        for kind in (np.float16, np.float32):
            x = np.ones(shape, kind)
            out = np.empty_like(x)
            tracemalloc.start()

            op.function(x, out=out)

            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 8 * reference.BLOCK * 8  # x has 16 and 32 MiB


def test_a_second_call_uses_the_memory_of_the_first() -> None:
    x = np.ones((4096, 512), np.float16)
    out = np.empty_like(x)
    softmax(x, out=out)
    tracemalloc.start()

    softmax(x, out=out)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20  # the blocks have 1 MiB each, and conversions 3


def test_a_call_within_a_call_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(15).standard_normal((600, 700)).astype(np.float16)
    expected, inner = softmax(x), []
    original = rows.Rows.store

    def store(self: rows.Rows, out: Any) -> None:
        if not inner:  # as a signal handler may
            inner.append(None)
            inner.append(softmax(x[::-1]))
        original(self, out)

    monkeypatch.setattr(rows.Rows, "store", store)

    assert np.array_equal(softmax(x), expected)
    assert np.array_equal(inner[1], expected[::-1])


def test_nothing_else_of_x_is_read_or_written() -> None:
    x = np.random.default_rng(13).standard_normal((6, 2, 50)).astype(np.float32)
    x.flags.writeable = False
    wide = np.zeros((6, 2, 60), np.float32)

    for op in FAST:
        op.function(x, out=wide[..., 5:55])

        assert_close(wide[..., 5:55], op.reference(x)[0])
        assert not wide[..., :5].any()
        assert not wide[..., 55:].any()


def test_calls_take_the_fast_road(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for op in FAST:
        monkeypatch.setattr(ops, op.name, lambda *_, name=op.name, **__: called.append(name))

    for op in FAST:
        op.function(np.ones((2, 3)))

    assert called == ["layer_norm", "rms_norm", "softmax", "log_softmax"]
