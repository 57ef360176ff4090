"""Long fused rows: shared by the blocks of a cluster, with the next rows prefetched through shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cupynorm.catalog.forms import FORMS
from cupynorm.plan.choose import choose, effective
from cupynorm.plan.config import (
    AT_USE,
    BOTH,
    CONVERTED,
    PLAIN,
    SHARED,
    SHARED_OF_VECTORS,
    DoesNotFitError,
    Plan,
)
from cupynorm.plan.limits import RECORDED
from cupynorm.tools import explain
from tests.invoke.test_fused_calls import check
from tests.sampling import sample
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture


def held(name: str, rows: int, cols: int, dtype: str, **numbers: Any) -> Plan:
    """Return a cluster's plan of these numbers, with as many vectors of a thread as it then takes."""
    problem = explain.form_spec(FORMS[name], rows, cols, dtype).problem
    if not numbers.get("unaligned"):
        problem = dataclasses.replace(problem, unaligned=0)
    vector = effective(problem).vector
    plan = dataclasses.replace(
        PLAIN, **{"variant": "cluster", "vector": vector, "ctas_per_row": 2, "block": 64} | numbers
    )
    plan = dataclasses.replace(plan, group=plan.block)
    for vectors in range(1, 32 // vector + 1):
        try:
            return choose(
                explain.form_spec(FORMS[name], rows, cols, dtype).problem,
                RECORDED["h200"],
                lambda _: 64,  # clusters at once
                dataclasses.replace(plan, vectors=vectors),
            )
        except DoesNotFitError as error:
            refused = error
    raise refused


CASE = ("name", "rows", "cols", "dtype")
MASKS = {"where": "bytes", "bias": "numbers", "int8": "none"}


def ways(numbers: list[Any], cases: list[tuple[str, int, int, str]]) -> list[tuple[Any, ...]]:
    """Give each case one of the numbers of a plan at least; each op, each kind of mask and each dtype meets all."""

    def factors(case: tuple[Any, ...]) -> tuple[object, ...]:
        op, _, form = case[0].partition("/")
        mask = MASKS.get(form, "interval") if "softmax" in op else ""
        return op, mask, case[3], case[2] % 8 > 0, str(case[4])

    return sample(((*case, each) for case in cases for each in numbers), factors, lambda case: case[:4])


# (what a plan keeps for a block's next rows: parameters, rows on their way)
AHEAD = [
    {"stages": 0, "parameter_cache": 2},
    {"stages": 1, "parameter_cache": 2},
    {"stages": 2, "parameter_cache": 0},
]


@pytest.mark.parametrize(
    (*CASE, "numbers"),
    ways(
        AHEAD,
        [
            ("add_layer_norm", 11, 1024, "float16"),
            ("add_layer_norm/sum", 11, 1000, "float16"),
            ("add_layer_norm/sum", 7, 520, "float32"),
            ("add_rms_norm/dropout", 7, 1032, "float16"),
            ("layer_norm/fuse", 7, 1000, "float32"),
            ("layer_norm/int8", 7, 1032, "float16"),
        ],
    ),
    ids=str,
)
def test_rows_that_begin_at_vectors(
    name: str, rows: int, cols: int, dtype: str, numbers: dict[str, int], simulated: Any
) -> None:
    plan = held(name, rows, cols, dtype, **numbers)

    check(simulated, name, rows, cols, dtype, plan=plan)


@pytest.mark.parametrize(
    ("name", "cols", "dtype", "stages"),
    [
        (
            "add_layer_norm/sum",
            2 * 64 * 4 * 5 - 12,
            "float32",
            1,
        ),  # the last of five vectors is missing in places
        ("layer_norm/fuse", 2 * 64 * 4 * 8, "float32", 1),
        ("add_rms_norm", 2 * 64 * 8 * 4 - 24, "float16", 1),
        ("layer_norm/int8", 2 * 64 * 8 * 4, "float16", 0),
    ],
)
def test_parameters_wait_in_shared_memory_and_in_registers(
    name: str, cols: int, dtype: str, stages: int, simulated: Any
) -> None:
    plan = held(name, 7, cols, dtype, parameter_cache=BOTH, stages=stages)
    assert plan.vectors >= SHARED_OF_VECTORS
    in_shared = held(name, 7, cols, dtype, parameter_cache=SHARED, stages=stages)
    at_use = held(name, 7, cols, dtype, parameter_cache=AT_USE, stages=stages)
    of_shared = in_shared.shared_bytes - at_use.shared_bytes
    of_vector = of_shared // plan.vectors
    assert plan.shared_bytes - at_use.shared_bytes == plan.vectors // SHARED_OF_VECTORS * of_vector

    check(simulated, name, 7, cols, dtype, plan=plan)


def test_parameters_wait_in_both_where_neither_holds_all() -> None:
    """Of two arrays in float32 the next row and both parameters take more than a block's shared memory."""
    plans = {
        name: choose(
            explain.form_spec(FORMS[name], 4096, 262144, "float32").problem,
            RECORDED["h200"],
            lambda plan: plan.min_blocks,
        )
        for name in ("add_layer_norm/sum", "layer_norm/fuse", "add_rms_norm", "layer_norm/int8")
    }

    assert {name: (plan.parameter_cache, plan.block, plan.stages) for name, plan in plans.items()} == {
        "add_layer_norm/sum": (BOTH, 512, 1),
        "layer_norm/fuse": (BOTH, 512, 1),
        "add_rms_norm": (BOTH, 512, 1),
        "layer_norm/int8": (SHARED, 512, 1),
    }


@pytest.mark.parametrize(("parameter_cache", "stages"), [(2, 1), (3, 2), (3, 0)])
@pytest.mark.parametrize(
    ("name", "rows", "cols", "dtype"),
    [
        ("add_layer_norm/sum", 37, 1000, "float16"),
        ("layer_norm/fuse", 37, 520, "float32"),
        ("add_rms_norm", 41, 1021, "float16"),
    ],
)
def test_blocks_send_their_rows_ahead_too(
    name: str, rows: int, cols: int, dtype: str, parameter_cache: int, stages: int, simulated: Any
) -> None:
    """Two groups of a block, the second of which has no last row."""
    numbers = {
        "variant": "block",
        "ctas_per_row": 1,
        "parameter_cache": parameter_cache,
        "stages": stages,
        "unaligned": cols % 2,
    }
    plan = dataclasses.replace(held(name, rows, cols, dtype, **numbers), block=128, waves=0.1)

    check(simulated, name, rows, cols, dtype, plan=plan)


@pytest.mark.parametrize(
    (*CASE, "stages"),
    ways(
        [0, 1, 2],
        [
            ("softmax/where", 11, 1024, "float16"),
            ("log_softmax/where", 7, 1000, "float32"),
            ("softmax/where", 5, 1001, "float16"),
            ("softmax/bias", 7, 1000, "float16"),
            ("softmax/bias", 7, 4101, "float32"),
            ("softmax/int8", 7, 1000, "float16"),
            ("softmax/lengths", 7, 1000, "float16"),
            ("softmax/causal", 264, 264, "float32"),
            ("log_softmax/window", 328, 328, "float16"),
            ("softmax/ragged", 272, 136, "float16"),
            ("softmax/ragged", 402, 201, "float16"),
        ],
    ),
    ids=str,
)
def test_masks_go_with_their_rows(
    name: str, rows: int, cols: int, dtype: str, stages: int, simulated: Any
) -> None:
    plan = held(name, rows, cols, dtype, stages=stages, unaligned=cols % 2, ctas_per_row=4, block=128)

    check(simulated, name, rows, cols, dtype, plan=plan)


@pytest.mark.parametrize(
    (*CASE, "numbers"),
    ways(
        [{"parameter_cache": CONVERTED, "stages": 1}, {"parameter_cache": 2, "stages": 1}, {}],
        [
            ("add_layer_norm", 19, 1001, "float16"),
            ("add_layer_norm/sum", 35, 1517, "float16"),
            ("add_layer_norm/sum", 11, 4805, "float32"),
            ("add_rms_norm/sum", 19, 1015, "float16"),
            ("layer_norm/fuse", 19, 1021, "float16"),
            ("add_layer_norm/dropout", 19, 1003, "float16"),
            ("add_rms_norm/dropout", 11, 4807, "float32"),
            ("layer_norm/int8", 19, 1511, "float16"),
            ("layer_norm/int8/scale", 11, 4803, "float32"),
            ("rms_norm/int8", 19, 1503, "float16"),
        ],
    ),
    ids=str,
)
def test_rows_that_begin_anywhere(
    name: str, rows: int, cols: int, dtype: str, numbers: dict[str, int], simulated: Any
) -> None:
    plan = held(name, rows, cols, dtype, unaligned=1, block=128 if dtype == "float16" else 256, **numbers)
    assert plan.unaligned == 1

    check(simulated, name, rows, cols, dtype, plan=plan)


@pytest.mark.parametrize(
    (*CASE, "stages"),
    ways(
        [1, 2],
        [
            ("softmax/where", 19, 1501, "float16"),
            ("log_softmax/where", 11, 4801, "float32"),
            ("softmax/bias", 19, 1003, "float16"),
            ("softmax/lengths", 19, 1505, "float16"),
            ("softmax/causal", 25, 1505, "float16"),
            ("softmax/int8", 19, 1503, "float16"),
        ],
    ),
    ids=str,
)
def test_clusters_claim_rows_that_have_no_parameters(
    name: str, rows: int, cols: int, dtype: str, stages: int, simulated: Any
) -> None:
    """Rows are cut in lines as those are whose parameters a block keeps, though there is nothing to keep."""
    block = 128 if dtype == "float16" else 256
    plan = held(name, rows, cols, dtype, unaligned=1, block=block, parameter_cache=CONVERTED, stages=stages)
    assert plan.dynamic

    check(simulated, name, rows, cols, dtype, plan=plan)


@pytest.mark.parametrize(
    ("name", "rows", "cols", "dtype", "ctas", "block", "vectors", "blocks"),
    [
        ("layer_norm/int8", 4096, 65536, "float16", 8, 128, 8, 4),
        ("layer_norm/int8", 4096, 262144, "float16", 8, 512, 8, 1),
        ("layer_norm/int8", 4096, 50257, "float16", 8, 128, 7, 5),
        ("layer_norm/int8", 4096, 65536, "float32", 8, 256, 8, 2),
        ("layer_norm/int8/scale", 4096, 131072, "float16", 4, 512, 8, 1),
        ("softmax/int8", 4096, 262144, "float16", 16, 512, 4, 2),
        ("softmax/int8", 4096, 100003, "float16", 8, 320, 5, 3),
        ("softmax/int8", 4096, 100000, "float32", 8, 416, 8, 2),
        ("softmax_backward", 4096, 262144, "float32", 16, 512, 8, 1),
        ("add_layer_norm", 4096, 50257, "float16", 8, 160, 5, 4),
        ("add_layer_norm/dropout", 4096, 131072, "float32", 16, 512, 4, 1),
        ("add_layer_norm/dropout", 49152, 8192, "float16", 1, 256, 4, 3),
        ("add_layer_norm/dropout", 49152, 4096, "float16", 1, 128, 4, 6),
        ("add_layer_norm/sum", 49152, 8192, "float16", 1, 256, 4, 2),
    ],
)
def test_tilings_that_were_measured(
    name: str, rows: int, cols: int, dtype: str, ctas: int, block: int, vectors: int, blocks: int
) -> None:
    problem = explain.form_spec(FORMS[name], rows, cols, dtype).problem

    plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks)

    assert (plan.ctas_per_row, plan.block, plan.vectors, plan.min_blocks) == (ctas, block, vectors, blocks)


@pytest.mark.parametrize(
    ("name", "cols", "fewer"),
    [("layer_norm/int8", 16384, 40), ("rms_norm/int8", 14333, 40), ("softmax/int8", 20001, 32)],
)
def test_a_thread_holds_many_halves_of_rows_that_have_scales(
    name: str, cols: int, fewer: int, simulated: Any
) -> None:
    problem = explain.form_spec(FORMS[name], 4096, cols, "float16").problem
    plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks, "cluster")
    assert plan.vector * plan.vectors > fewer

    check(simulated, name, 7, cols, "float16", plan=plan)
