"""How fused rows lie in threads: over any number of warps, anywhere in memory, in which order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.call import asking
from cupynorm.catalog import forms
from cupynorm.catalog.forms import FORMS
from cupynorm.lower import fused as lower_fused
from cupynorm.plan.choose import choose
from cupynorm.plan.config import PLAIN, VARIANTS, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.partition import in_registers
from cupynorm.tools import explain
from cupynorm.tools.testing import assert_close, assert_form_close
from tests import SLOW
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture


def planned(name: str, rows: int, cols: int, dtype: str) -> Plan:
    problem = explain.form_spec(FORMS[name], rows, cols, dtype).problem
    return choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks)


def check(device: Any, name: str, rows: int, cols: int, dtype: str, **options: Any) -> None:
    what, xp = FORMS[name], device.cupy
    given = forms.inputs(what, rows, cols, dtype)

    results = what.call({key: xp.asarray(each) for key, each in given.items()}, **options)

    results = results if isinstance(results, tuple) else (results,)
    assert_form_close(what, tuple(map(xp.asnumpy, results)), what.right(given))


def spread(name: str, rows: int, cols: int, dtype: str, group: int, block: int) -> Plan:
    """Return a plan whose rows lie in `group` threads."""
    problem = explain.form_spec(FORMS[name], rows, cols, dtype).problem
    plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks)
    return in_registers(
        problem, dataclasses.replace(plan, variant="block", group=group, block=block, min_blocks=1)
    )


# full rows and ragged ones, two groups of a block, and states of both kinds: merged, and of rows that hold nothing
@pytest.mark.parametrize(
    ("name", "rows", "cols", "dtype", "group", "block"),
    [
        ("add_layer_norm", 7, 768, "float16", 96, 192),
        ("add_layer_norm/sum", 5, 1240, "float32", 160, 160),
        ("add_rms_norm", 5, 768, "float32", 96, 96),
        ("layer_norm/int8", 5, 1536, "float16", 192, 192),
        ("softmax/int8", 5, 768, "float16", 96, 192),
        ("softmax/where", 5, 1792, "float16", 224, 224),
        ("softmax/ragged", 768, 768, "float16", 96, 192),
        ("log_softmax/causal", 800, 800, "float32", 224, 224),
        ("softmax/window", 768, 768, "float16", 96, 96),
    ],
)
def test_rows_lie_in_any_number_of_warps(
    name: str, rows: int, cols: int, dtype: str, group: int, block: int, simulated: Any
) -> None:
    check(simulated, name, rows, cols, dtype, plan=spread(name, rows, cols, dtype, group, block))


# blocks of a cluster, of which the last has less; warps that keep nothing, in rows that are long and in short ones
@pytest.mark.parametrize(
    ("name", "rows", "cols", "dtype"),
    [("softmax/lengths", 3, 8192, "float32"), ("log_softmax/ragged", 5, 5120, "float64")]
    + [("softmax/ragged", 256, cols, dtype) for cols, dtype in ((8192, "float16"), (1024, "float32"))],
)
def test_rows_of_which_an_interval_is_kept(
    name: str, rows: int, cols: int, dtype: str, simulated: Any
) -> None:
    check(simulated, name, rows, cols, dtype)


@pytest.mark.parametrize("group", [48, 24, 3])
def test_threads_that_are_neither_whole_warps_nor_a_power_of_two_are_refused(group: int) -> None:
    problem = explain.form_spec(FORMS["add_layer_norm"], 7, 768, "float16").problem
    plan = spread("add_layer_norm", 7, 768, "float16", 96, 96)

    with pytest.raises(DoesNotFitError):
        choose(
            problem,
            RECORDED["h200"],
            lambda plan: plan.min_blocks,
            in_registers(problem, dataclasses.replace(plan, group=group, block=96)),
        )


ODD = [
    ("softmax/where", 9, 197, "float16"),
    ("softmax/where", 3, 4099, "float32"),
    ("log_softmax/ragged", 9, 77, "float16"),
    ("softmax/causal", 77, 77, "bfloat16"),
    ("softmax/bias", 9, 197, "float16"),
    ("softmax/int8", 9, 197, "float16"),
    ("add_layer_norm", 9, 197, "float16"),
    ("add_layer_norm/sum", 9, 1001, "float16"),
    ("layer_norm/fuse", 9, 197, "float16"),
    ("layer_norm/int8", 19, 197, "float16"),
    ("layer_norm/int8/scale", 19, 197, "float16"),
]


@pytest.mark.parametrize(("name", "rows", "cols", "dtype"), ODD)
def test_rows_that_begin_anywhere_lie_in_wide_vectors(
    name: str, rows: int, cols: int, dtype: str, simulated: Any
) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    plan = planned(name, rows, cols, dtype)

    assert (plan.unaligned, plan.vector) == (1, 16 // np.dtype(forms.dtype_of(dtype)).itemsize)
    check(simulated, name, rows, cols, dtype)


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("masks", ["float32", "float16"])
def test_operands_lie_otherwise_than_rows(offset: int, masks: str, simulated: Any) -> None:
    """A residual and a mask that begin elsewhere than x and y do, and parameters of another type."""
    xp, random = simulated.cupy, np.random.default_rng(1)
    rows, cols = 9, 200

    def at(where: int, host: Any) -> Any:
        array = xp.empty(host.size + where, host.dtype)[where:].reshape(host.shape)
        array[...] = xp.asarray(host)
        return array

    x, r = (random.standard_normal((rows, cols)).astype(np.float16) for _ in range(2))
    gamma, beta, bias = (random.standard_normal(cols).astype(masks) for _ in range(3))
    keep = random.random((rows, cols)) < 0.8

    y = cupynorm.add_layer_norm(
        at(3, x),
        at(offset, r),
        *(at(1, each) for each in (gamma, beta)),
        bias=at(1, bias),
        out=at(3, x),
        return_sum=False,
    )
    z = cupynorm.softmax(at(3, x), where=at(offset, keep), bias=at(offset, r), out=at(3, x))

    wide = [each.astype(np.float64) for each in (x, r, gamma, beta, bias)]
    expected = cupynorm.add_layer_norm(*wide[:2], wide[2], wide[3], bias=wide[4], return_sum=False)
    assert_close(xp.asnumpy(y), expected, dtype="float16")
    assert_close(xp.asnumpy(z), cupynorm.softmax(wide[0], where=keep, bias=wide[1]), dtype="float16")


@pytest.mark.parametrize(("cols", "unaligned"), [(197, 1), (768, 0)])
def test_what_is_dropped_is_exact_in_rows_that_are_not_numbers(
    cols: int, unaligned: int, simulated: Any
) -> None:
    assert planned("softmax/ragged", 4, cols, "float16").unaligned == unaligned
    x = np.random.default_rng(3).standard_normal((4, cols)).astype(np.float16)
    x[0, 1], x[1, 2] = np.nan, np.inf
    lengths = np.array([cols - 9, cols - 9, 0, 1], np.int32)
    dropped = np.arange(cols) >= lengths[:, None]
    on_device = simulated.cupy.asarray(x), simulated.cupy.asarray(lengths)

    y, z = (
        function(on_device[0], lengths=on_device[1]) for function in (cupynorm.softmax, cupynorm.log_softmax)
    )

    assert (simulated.cupy.asnumpy(y)[dropped] == 0).all()
    assert (simulated.cupy.asnumpy(z)[dropped] == -np.inf).all()
    assert np.isnan(simulated.cupy.asnumpy(y)[:2, : cols - 9]).any(axis=1).all()


@pytest.mark.parametrize(
    ("cols", "dtype", "unaligned"),
    [(197, "float16", 1), (200, "float16", 0), (4099, "float32", 1), (33, "float64", 0)],
)
def test_a_dropout_keeps_the_same_elements_wherever_vectors_lie(
    cols: int, dtype: str, unaligned: int, simulated: Any
) -> None:
    """Which are kept follows from an element's number alone: rows begin at each of the four words of a block."""
    assert planned("add_layer_norm/dropout", 9, cols, dtype).unaligned == unaligned
    check(simulated, "add_layer_norm/dropout", 9, cols, dtype)


@pytest.mark.parametrize(("cols", "dtype"), [(200, "float16"), (197, "float16"), (4098, "float32")])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_dropout_keeps_the_same_elements_of_an_array_that_begins_anywhere(
    cols: int, dtype: str, offset: int, simulated: Any
) -> None:
    """Vectors are then at any word of a block of four: rows aligned in memory are not at multiples of them in x."""
    xp, random = simulated.cupy, np.random.default_rng(5)
    x, r = (random.standard_normal((7, cols)).astype(dtype) for _ in range(2))

    def moved(host: Any) -> Any:
        array = xp.empty(host.size + offset, host.dtype)[offset:].reshape(host.shape)
        array[...] = xp.asarray(host)
        return array

    options = {"dropout": 0.4, "seed": 11, "return_sum": False}
    y = cupynorm.add_rms_norm(moved(x), moved(r), out=moved(x), **options)

    wide = cupynorm.add_rms_norm(x.astype(np.float64), r.astype(np.float64), **options)
    assert_close(xp.asnumpy(y), wide, dtype=dtype)


@pytest.mark.parametrize("beside", [1, 3, 4, 8])
def test_a_dropout_keeps_the_same_elements_of_rows_that_lie_apart(beside: int, simulated: Any) -> None:
    """A vector that is aligned in memory then begins at any word, though the array begins at a vector."""
    xp, random = simulated.cupy, np.random.default_rng(5)
    x, r = (random.standard_normal((7, 197)).astype(np.float16) for _ in range(2))

    def apart(host: Any) -> Any:
        array = xp.empty((host.shape[0], host.shape[1] + beside), host.dtype)[:, : host.shape[1]]
        array[...] = xp.asarray(host)
        return array

    options = {"dropout": 0.4, "seed": 11, "return_sum": False}
    y = cupynorm.add_rms_norm(apart(x), apart(r), out=apart(x), **options)

    wide = cupynorm.add_rms_norm(x.astype(np.float64), r.astype(np.float64), **options)
    assert_close(xp.asnumpy(y), wide, dtype="float16")


AROUND = [name for name, each in FORMS.items() if ("softmax" in name or "norm" in name) and not each.alone]
DTYPES_ASKED = ("float16", "float32", "float64")
ASKED = [("h200", each) for each in (None, *VARIANTS)] + [("a100", None)]
EDGES = (1, 7, 63, 64, 65, 127, 257, 513, 1001, 1002, 1004, 2611, 4097, 5121, 8191, 20001, 50257, 65538)


@pytest.mark.parametrize("dtype", DTYPES_ASKED)
@pytest.mark.parametrize(("device", "variant"), ASKED)
def test_vectors_are_no_wider_than_rows_allow(device: str, variant: str | None, dtype: str) -> None:
    """Where no element is held apart from the vectors, each row that is chosen begins at one and is whole vectors."""
    # every twelfth of dtypes and variants for a form and a width, the next ones for the next; all with CUPYNORM_SLOW=1
    turn = DTYPES_ASKED.index(dtype) + ASKED.index((device, variant))
    for (i, name), (j, cols) in itertools.product(enumerate(AROUND), enumerate(EDGES)):
        what = FORMS[name]
        if what.missing or (not SLOW and (turn + i + j) % 12):
            continue
        problem = explain.form_spec(what, 3, cols, dtype, limits=RECORDED[device], plan=variant).problem
        if problem.across or not problem.fused:  # rows that lie apart, and ops alone, have other plans
            continue
        for rows in (1, 3, 100, 131, 1 << 20):
            try:
                plan = choose(
                    dataclasses.replace(problem, rows=rows),
                    RECORDED[device],
                    lambda plan: plan.min_blocks,
                    variant,
                )
            except DoesNotFitError:
                # of a cluster the registers run out last
                may = variant in {"warp", "block"} or (
                    variant == "cluster" and cols * problem.fields > 1 << 15
                )
                may = may or (variant == "shared" and cols > 1 << 14)  # of a block's shared memory
                may = may or bool(problem.column_sums)  # the call then takes its sums in a pass of their own
                assert may or (variant == "split" and cols < 1 << 11), (name, cols)  # of a block's threads
                continue
            if plan.unaligned:
                assert plan.vector == problem.widest_vector, (name, cols, rows)
                assert plan.variant in {"warp", "block", "cluster", "split", "shared"}, (name, cols, rows)
            else:
                assert problem.vector % plan.vector == 0, (name, cols, rows)
                places = plan.ctas_per_row * plan.group * plan.vectors * plan.vector
                assert places >= cols or not plan.group, (name, cols, rows)
            assert plan.row_shared_bytes == 0, (name, cols, rows)
            assert plan.shared_bytes == 0 or plan.persistent or plan.variant == "shared", (name, cols, rows)


def test_a_plan_of_vectors_that_rows_do_not_begin_at_is_refused() -> None:
    """Of as many vectors a thread: the width alone is what the plan was not made for."""
    aligned, ragged = (
        explain.form_spec(FORMS["softmax/where"], 3, cols, "float16").problem for cols in (1000, 1001)
    )
    plan = choose(aligned, RECORDED["h200"], lambda plan: plan.min_blocks, "cluster")
    assert (plan.vector, plan.unaligned, plan.vectors) == (8, 0, 1)

    with pytest.raises(DoesNotFitError, match="cannot hold a row of 1001 columns"):
        choose(ragged, RECORDED["h200"], lambda plan: plan.min_blocks, plan)


def test_a_cluster_that_reads_rows_twice_finds_no_scale_of_each(simulated: Any) -> None:
    """The largest of a row's results is known to one block only; a cluster that holds rows in registers does tell."""
    twice = dataclasses.replace(PLAIN, variant="cluster", vectors=2, ctas_per_row=2, block=64)
    held = dataclasses.replace(twice, group=64, vectors=8)

    with pytest.raises(DoesNotFitError, match="cannot hold a row of 1001 columns"):
        check(simulated, "layer_norm/int8", 3, 1001, "float16", plan=twice)
    check(simulated, "layer_norm/int8", 3, 1001, "float16", plan=held)
    check(simulated, "layer_norm/int8/scale", 3, 1001, "float16", plan=twice)
    check(simulated, "softmax/where", 3, 1001, "float16", plan=twice)


# ---- the order of rows


def order_of(shape: tuple[int, ...], function: Any = cupynorm.softmax, **options: Any) -> tuple[int, ...]:
    """Return the axes of a call's rows, outermost first, by x's strides."""
    found = {}

    def spy(x: Any, *given: Any, _order: Any = lower_fused._order) -> Any:
        found["order"] = _order(x, *given)
        return found["order"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_fused, "_order", spy)
        asking.spec_of(lambda: function(of(*shape), **options))
    return found["order"]


def of(*shape: int, dtype: Any = np.float16) -> Any:
    return np.empty(shape, dtype)


def test_rows_that_share_an_operand_follow_one_another_where_it_would_be_forgotten() -> None:
    assert order_of((12, 4096, 4096), bias=of(4096, 4096)) == (1, 0)
    assert order_of((12, 512, 512), bias=of(512, 512)) == (0, 1)
    assert order_of((4, 16, 2048, 2048), bias=of(16, 2048, 2048)) == (1, 2, 0)
    assert order_of((4, 16, 4096, 4096), where=of(4, 1, 4096, 4096, dtype=np.bool_)) == (0, 2, 1)
    assert order_of((4, 16, 2048, 2048), where=of(4, 1, 1, 2048, dtype=np.bool_)) == (0, 1, 2)
    assert order_of((12, 4096, 4096), lengths=np.ones((12, 1), np.int32)) == (0, 1)


def test_rows_whose_number_counts_keep_their_places() -> None:
    assert order_of((12, 4096, 4096), bias=of(4096, 4096), causal=True) == (0, 1)
    assert order_of((12, 4096, 4096), bias=of(4096, 4096), quantize="int8") == (0, 1)


@pytest.mark.parametrize("strided", [False, True])
def test_another_order_of_rows_gives_the_same(
    strided: bool, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_fused, "NUMBERS", lower_fused.NUMBERS._replace(forgotten_bytes=0))
    xp, random = simulated.cupy, np.random.default_rng(2)
    x = random.standard_normal((3, 2, 5, 64)).astype(np.float32)
    bias = random.standard_normal((2, 5, 64)).astype(np.float32)
    where = random.random((3, 1, 5, 64)) < 0.8
    lengths = np.array([[[64]], [[7]], [[0]]], np.int32)
    out = xp.empty((3, 2, 5, 128), np.float32)[..., :64] if strided else None

    y = cupynorm.softmax(xp.asarray(x), bias=xp.asarray(bias), lengths=xp.asarray(lengths), out=out)
    z = cupynorm.log_softmax(xp.asarray(x), where=xp.asarray(where), bias=xp.asarray(bias))

    assert_close(xp.asnumpy(y), cupynorm.softmax(x, bias=bias, lengths=lengths), dtype="float32")
    assert_close(xp.asnumpy(z), cupynorm.log_softmax(x, where=where, bias=bias), dtype="float32")
