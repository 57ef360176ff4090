"""Fused rows that wait in a block's shared memory as they were computed, or in the level-1 cache."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.call import asking
from cupynorm.catalog.axis_forms import ALONG_AXES
from cupynorm.catalog.forms import FORMS
from cupynorm.catalog.gradient_forms import GRADIENTS
from cupynorm.catalog.statistic_forms import STATISTICS
from cupynorm.plan.choose import choose
from cupynorm.plan.config import ONE_BLOCK_PER_ROW, PLAIN, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.partition import computed_bytes
from cupynorm.tools import explain
from cupynorm.tools.testing import assert_close
from tests import SLOW
from tests.invoke.test_fused_calls import AROUND, check
from tests.sampling import in_pairs
from tests.simulator import simulated  # noqa: F401  a fixture

# gradients take no plan: test_backward.py runs them in every variant
WITHOUT_PLAN = {each.name for each in (*GRADIENTS, *STATISTICS)}
HELD = [name for name in AROUND if not FORMS[name].missing and name not in WITHOUT_PLAN]
ON_CHIP = ("shared", "cached")
APART = {each.name for each in ALONG_AXES}  # which neither takes: test_across.py
ON_CHIP_BY_FORM = [(name, each) for each in ON_CHIP for name in HELD if name not in APART]


def planned(name: str, rows: int, cols: int, dtype: str, variant: str | Plan) -> Plan:
    problem = explain.form_spec(FORMS[name], rows, cols, dtype).problem
    return choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks, variant)


# rows that begin anywhere, and whole vectors
FORMS_ON_CHIP = in_pairs(
    [name for name in HELD if name not in APART], ON_CHIP, ("float16", "float32"), ((5, 1001), (3, 4096))
)


@pytest.mark.parametrize(("name", "variant", "dtype", "shape"), FORMS_ON_CHIP, ids=str)
def test_every_form_is_right(
    name: str, variant: str, dtype: str, shape: tuple[int, int], simulated: Any
) -> None:
    check(simulated, name, *shape, dtype, plan=variant)


@pytest.mark.parametrize("variant", ON_CHIP)
@pytest.mark.parametrize("name", ["softmax/where", "add_layer_norm/sum", "layer_norm/int8", "softmax/causal"])
def test_doubles_and_rows_shorter_than_a_vector(name: str, variant: str, simulated: Any) -> None:
    check(simulated, name, 3, 1030, "float64", plan=variant)
    for cols in (1, 3, 9):
        check(simulated, name, 5, cols, "float16", plan=variant)


# One block on each multiprocessor, so that its rows follow one another: what waits of one is replaced by the next.
@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("cols", [264, 269])
@pytest.mark.parametrize(
    "name",
    ["softmax/where", "softmax/lengths", "add_layer_norm/sum", "add_layer_norm/dropout", "softmax/int8"],
)
def test_a_block_goes_through_many_rows(name: str, cols: int, vectors: int, simulated: Any) -> None:
    rows = 3 * RECORDED["h200"].sm_count + 5
    plan = planned(name, rows, cols, "float16", "shared")
    plan = dataclasses.replace(plan, block=128, vectors=vectors, min_blocks=1, waves=0.1)

    check(simulated, name, rows, cols, "float16", plan=plan)


# A thread's first vector may lie before the row, and its second in it.
@pytest.mark.parametrize(("dtype", "cols"), [("float16", 2051), ("float32", 5001)])
@pytest.mark.parametrize("name", ["add_layer_norm/sum", "layer_norm/int8", "softmax/where", "add_rms_norm"])
def test_two_vectors_of_a_thread_and_unaligned_rows(name: str, dtype: str, cols: int, simulated: Any) -> None:
    plan = dataclasses.replace(planned(name, 5, cols, dtype, "shared"), block=128, vectors=2, min_blocks=1)

    check(simulated, name, 5, cols, dtype, plan=plan)


# Where x alone is loaded, a row may be copied to the shared memory of one block or of a cluster's blocks: all of it, or
# as much as has room.
@pytest.mark.parametrize("room", [512, 20480])
@pytest.mark.parametrize("ctas", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "cols"), [("float16", 1001), ("bfloat16", 1024), ("float32", 5001)])
def test_rows_that_are_copied(dtype: str, cols: int, ctas: int, room: int, simulated: Any) -> None:
    if ctas == 1 and room < cols * 4:
        pytest.skip("one block holds all of a row")
    vector = 16 // dtype_of(dtype).itemsize
    plan = dataclasses.replace(
        PLAIN,
        variant="cluster" if ctas > 1 else "shared",
        vector=vector,
        vectors=2,
        unaligned=int(cols % vector > 0),
        block=64,
        row_shared_bytes=room,
        ctas_per_row=ctas,
        min_blocks=2,
    )
    assert plan.kernel == "row_staged"

    check(simulated, "cross_entropy/grad", 7, cols, dtype, plan=plan)


@pytest.mark.parametrize("variant", ON_CHIP)
def test_rows_of_which_nothing_is_kept_or_that_are_not_numbers(variant: str, simulated: Any) -> None:
    xp, random = simulated.cupy, np.random.default_rng(4)
    for cols, dtype in itertools.product((1000, 1001), ("float16", "float32")):
        x = random.standard_normal((4, cols)).astype(dtype)
        keep = random.random((4, cols)) < 0.5
        keep[1], x[2, 7], keep[2, 7], x[3, 9], keep[3, 9] = False, np.nan, False, np.inf, True
        y = cupynorm.softmax(xp.asarray(x), where=xp.asarray(keep), plan=variant)
        z = cupynorm.log_softmax(xp.asarray(x), where=xp.asarray(keep), plan=variant)
        y, z = xp.asnumpy(y), xp.asnumpy(z)
        assert (y[~keep] == 0).all()
        assert (z[~keep] == -np.inf).all()
        assert np.isnan(y[3]).any()
        wanted = cupynorm.softmax(np.where(keep, x, 0).astype(np.float64), where=keep)
        assert_close(y[[0, 2]], wanted[[0, 2]], dtype=dtype)


@pytest.mark.parametrize("variant", ON_CHIP)
@pytest.mark.parametrize(("cols", "over"), [*itertools.product((520, 521), ("x", "residual"))])
def test_in_place(variant: str, cols: int, over: str, simulated: Any) -> None:
    xp, random = simulated.cupy, np.random.default_rng(6)
    x, residual = (random.standard_normal((140, cols)).astype(np.float32) for _ in range(2))
    given = {"x": xp.asarray(x), "residual": xp.asarray(residual)}

    y, total = cupynorm.add_layer_norm(**given, out=given[over], plan=variant)

    wanted, added = cupynorm.add_layer_norm(x.astype(np.float64), residual.astype(np.float64))
    assert_close(xp.asnumpy(y), wanted, dtype="float32")
    assert_close(xp.asnumpy(total), added, dtype="float32", scale=np.asarray(2.0))


# Intervals that begin and end within a vector and a round of the block's loads, that begin behind several rounds, that
# differ from row to row of a block, and that are empty. What they drop is written before the row is reduced.
INTERVALS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal in the last columns": {"causal_offset": 900},
    "window": {"window": (40, 3), "causal_offset": 5},
    "lengths": {"lengths": "random"},
    "lengths, left padded": {"lengths": "random", "left_padded": True},
    "lengths and bytes": {"lengths": "random", "where": "random"},
}


LONG_ENOUGH = [(1100, 1), (1096, 2), (2504, 1), (1101, 2)]
# quantised or not: each interval and each row both ways, and all three with CUPYNORM_SLOW=1
CUT = [
    (interval, *row, quantized)
    for (i, interval), (k, row), quantized in itertools.product(
        enumerate(INTERVALS), enumerate(LONG_ENOUGH), (False, True)
    )
    if SLOW or (i + k) % 2 == quantized
]


@pytest.mark.parametrize(("interval", "cols", "vectors", "quantized"), CUT)
def test_what_an_interval_drops_is_neither_read_nor_waited_for(
    interval: str, cols: int, vectors: int, quantized: bool, simulated: Any
) -> None:
    xp, random = simulated.cupy, np.random.default_rng(3)
    rows = 3 * RECORDED["h200"].sm_count + 7
    x = random.standard_normal((rows, cols)).astype(np.float16)
    options: dict[str, Any] = {"scale": 0.5, **INTERVALS[interval]}
    if "lengths" in options:
        options["lengths"] = random.integers(0, cols + 1, rows, np.int32)
        options["lengths"][5:9] = 0, 1, cols, 0
    if "where" in options:
        options["where"] = random.random((rows, cols)) < 0.6
    # what is dropped is nan, so that a result of it would be seen
    kept = cupynorm.softmax(np.ones((rows, cols)), **options) > 0
    read = np.broadcast_to(kept.any(axis=1, keepdims=True), kept.shape) if "where" in options else kept
    x = np.where(read, x, np.float16(np.nan))
    on_device = {
        name: xp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in options.items()
    }
    if quantized:
        on_device["quantize"] = options["quantize"] = "int8"

    def softmax(given: Any, plan: str | Plan) -> Any:
        return cupynorm.softmax(given, plan=plan, **on_device)

    problem = asking.spec_of(lambda: cupynorm.softmax(x, **options)).problem
    plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks, "shared")
    plan = dataclasses.replace(plan, block=128, vectors=vectors, min_blocks=1, waves=0.1)
    results = softmax(xp.asarray(x), plan)

    wanted = cupynorm.softmax(np.where(kept, x, 0).astype(np.float64), **{**options, "quantize": None})
    if quantized:
        values, scales = map(xp.asnumpy, results)
        assert np.abs(values * scales[:, None] - wanted).max() <= np.max(scales) * 0.51
        assert (values[~kept] == 0).all()
    else:
        y = xp.asnumpy(results)
        assert_close(y, wanted, dtype="float16")
        assert (y[~kept] == 0).all()


@pytest.mark.parametrize("cols", [8, 1096, 1101])
def test_a_mask_keeps_whole_rows(cols: int, simulated: Any) -> None:
    xp, random = simulated.cupy, np.random.default_rng(3)
    x = random.standard_normal((40, cols)).astype(np.float16)
    keep = random.random((40, 1)) < 0.5

    y = cupynorm.softmax(xp.asarray(x), where=xp.asarray(keep), plan="shared")

    assert_close(xp.asnumpy(y), cupynorm.softmax(x.astype(np.float64), where=keep), dtype="float16")


# rows of which a band keeps less than a block has room for, so that a block has several rows' places
@pytest.mark.parametrize(
    "band", [{"causal": True}, {"window": (3, 4)}, {"causal_offset": -30}, {"causal_offset": 2000}]
)
@pytest.mark.parametrize("cols", [1000, 1003])
def test_a_row_has_room_for_what_its_band_keeps_at_most(
    band: dict[str, Any], cols: int, simulated: Any
) -> None:
    xp, random = simulated.cupy, np.random.default_rng(3)
    x = random.standard_normal((4, 60, cols)).astype(np.float16)
    problem = asking.spec_of(lambda: cupynorm.softmax(x, **band)).problem
    kept = (cupynorm.softmax(np.ones((60, cols)), **band) > 0).sum(axis=1)

    y = cupynorm.softmax(xp.asarray(x), plan="shared", **band)

    assert kept.max() <= problem.most_kept <= max(1, min(cols, kept.max()))
    assert_close(xp.asnumpy(y), cupynorm.softmax(x.astype(np.float64), **band), dtype="float16")


@pytest.mark.parametrize("cols", [1096, 1101])
def test_what_is_dropped_is_minus_infinity_in_place_too(cols: int, simulated: Any) -> None:
    xp, random = simulated.cupy, np.random.default_rng(3)
    rows = 2 * RECORDED["h200"].sm_count + 7
    x = random.standard_normal((rows, cols)).astype(np.float32)
    options = {"causal_offset": 300, "bias": random.standard_normal((1, cols)).astype(np.float32)}
    wanted = cupynorm.log_softmax(x.astype(np.float64), **options)
    given = xp.asarray(x)
    on_device = {**options, "bias": xp.asarray(options["bias"])}

    y = xp.asnumpy(cupynorm.log_softmax(given, out=given, plan="shared", **on_device))

    assert (np.isinf(y) == np.isinf(wanted)).all()
    assert_close(np.where(np.isinf(y), 0, y), np.where(np.isinf(wanted), 0, wanted), dtype="float32")


def test_a_row_waits_in_as_few_bytes_as_hold_it_exactly() -> None:
    """x itself, with a bit for each element that a mask may drop, unless other arrays or many steps make it what it is.

    Then it waits in the compute type.
    """
    waits = {
        name: computed_bytes(explain.form_spec(FORMS[name], 3, 4096, "float16").problem, 8)
        for name in ("softmax/where", "softmax/bias", "add_layer_norm", "layer_norm/int8")
    }
    x = np.empty((3, 4096), np.float16)
    many = cupynorm.fuse(cupynorm.softmax, load=lambda x: np.tanh(x) * 2.0)
    bits = 4096 // 8

    assert waits == {
        "softmax/where": 2 * 4096 + bits,
        "softmax/bias": 4 * 4096 + bits,
        "add_layer_norm": 4 * 4096,
        "layer_norm/int8": 2 * 4096,
    }
    assert not asking.spec_of(lambda: many(x)).problem.waits_as_loaded
    assert planned("softmax/where", 4096, 50256, "float16", "shared").min_blocks == 2
    with pytest.raises(DoesNotFitError, match="cannot hold a row of 65536 columns"):
        planned("add_layer_norm", 4096, 65536, "float16", "shared")


@pytest.mark.parametrize("cols", [1000, 1001, 20480])
@pytest.mark.parametrize("name", ["softmax/where", "add_layer_norm", "layer_norm/int8"])
@pytest.mark.parametrize("variant", ON_CHIP)
def test_a_plan_that_was_chosen_is_accepted_when_it_is_asked_for(variant: str, name: str, cols: int) -> None:
    plan = planned(name, 300, cols, "float16", variant)

    assert planned(name, 300, cols, "float16", plan) == plan
    assert plan.kernel == {"shared": "row_computed", "cached": "row_cached"}[variant]


CLUSTER, SHARED = "cluster", "shared"


@pytest.mark.parametrize(
    ("name", "rows", "cols", "dtype", "variant"),
    [
        ("softmax/causal", 4096, 50257, "float16", SHARED),
        ("softmax/causal", 50257, 50257, "float16", SHARED),
        ("softmax/causal", 4096, 262144, "float32", SHARED),
        ("softmax/causal", 4096, 16384, "float16", "block"),
        ("softmax/causal", 32768, 32768, "float16", CLUSTER),  # half is kept
        ("softmax/causal", 4096, 17408, "float32", CLUSTER),
        ("softmax/causal", 4096, 22016, "float32", SHARED),
        ("softmax/lengths", 4096, 50257, "float16", CLUSTER),  # how much is kept is not known
        ("softmax/window", 65536, 65536, "float16", SHARED),
    ],
)
def test_a_band_that_keeps_little_of_long_rows_takes_shared_memory(
    name: str, rows: int, cols: int, dtype: str, variant: str
) -> None:
    problem = explain.form_spec(FORMS[name], rows, cols, dtype).problem

    plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks)

    assert plan.variant == variant
    assert ("its mask keeps" in plan.why) == (variant == SHARED)


# what is dropped lies on both sides of what is kept, or on one; a block has several rows, or one
@pytest.mark.parametrize(
    ("waves", "function", "of"),
    in_pairs(
        (0.1, ONE_BLOCK_PER_ROW),
        (cupynorm.softmax, cupynorm.log_softmax),
        ((20000, "float16"), (20001, "float16"), (9001, "float32")),
    ),
)
def test_what_is_dropped_of_long_rows_is_written(
    waves: float, function: Any, of: tuple[int, str], simulated: Any
) -> None:
    cols, dtype = of
    xp, random = simulated.cupy, np.random.default_rng(5)
    rows = RECORDED["h200"].sm_count + 3
    x = random.standard_normal((rows, cols)).astype(dtype)
    for band in ({"window": (40, 0), "causal_offset": cols // 2}, {"causal": True}, {"causal_offset": -rows}):
        problem = asking.spec_of(lambda band=band: function(x, **band)).problem
        plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks, "shared")
        plan = dataclasses.replace(plan, block=128, min_blocks=1, waves=waves)

        y = xp.asnumpy(function(xp.asarray(x), plan=plan, **band))

        wanted = function(x.astype(np.float64), **band)
        finite = np.isfinite(wanted)
        assert (np.isfinite(y) == finite).all()
        assert_close(np.where(finite, y, 0), np.where(finite, wanted, 0), dtype=dtype)


@pytest.mark.parametrize(
    ("name", "rows", "cols", "dtype", "block", "blocks", "grid"),
    [
        ("softmax/causal", 4096, 50257, "float16", 768, 2, 4096),
        ("softmax/causal", 4096, 20480, "float16", 512, 3, 4096),
        ("softmax/causal", 4096, 22016, "float16", 512, 2, 4096),
        ("softmax/causal", 4096, 100000, "float16", 1024, 1, 4096),  # it keeps memory busy alone
        ("softmax/causal", 4096, 262144, "float16", 768, 2, 4096),
        ("softmax/window", 4096, 50257, "float16", 768, 2, 4096),
        ("softmax/causal", 50257, 50257, "float16", 768, 2, 264),  # half is kept
        ("softmax/causal", 30000, 65536, "float32", 768, 1, 132),  # nothing runs beside a block
    ],
)
def test_a_block_has_one_row_where_little_of_it_is_kept(
    name: str, rows: int, cols: int, dtype: str, block: int, blocks: int, grid: int
) -> None:
    plan = planned(name, rows, cols, dtype, SHARED)

    assert (plan.block, plan.min_blocks, plan.grid) == (block, blocks, grid)


@pytest.mark.parametrize("device", ["h200", "a100", "t4"])
def test_blocks_of_a_band_are_no_more_than_a_multiprocessor_holds(device: str) -> None:
    problem = explain.form_spec(FORMS["softmax/causal"], 4096, 30001, "float16").problem

    plan = choose(problem, RECORDED[device], lambda plan: plan.min_blocks, SHARED)

    assert plan.block * plan.min_blocks <= RECORDED[device].threads_per_sm


def test_where_one_block_fits_it_goes_through_many_rows() -> None:
    problem = explain.form_spec(FORMS["softmax/causal"], 4096, 32768, "float16").problem

    plan = choose(problem, RECORDED["t4"], lambda plan: plan.min_blocks, SHARED)

    assert (plan.block, plan.min_blocks, plan.grid) == (768, 1, RECORDED["t4"].sm_count)
