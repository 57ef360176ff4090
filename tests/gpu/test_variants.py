"""Each variant, forced: right, alike, and the same bits whenever and beside whatever a row is computed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from cupynorm.catalog.op_table import OPS, Op
from cupynorm.plan.config import CONVERTED, PLAIN, Plan
from cupynorm.tools.testing import TOLERANCES, Case, assert_close, error, inputs
from tests.gpu.agree import DTYPES, VARIANTS, bits, check, run

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
wide = [
    pytest.param(cols, marks=pytest.mark.small if cols < 200 else ())
    for cols in (1, 33, 128, 1024, 1025, 8191, 16384, 20000, 50257, 65536, 131072)
]


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", wide)
@every_variant
def test_a_forced_variant_agrees_with_float64(xp: Any, op: Op, dtype: str, cols: int, variant: str) -> None:
    case = inputs(op, 29 if cols < 10000 else 7, cols, dtype)

    check(xp, op, case, plan=variant)


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [pytest.param(100, marks=pytest.mark.small), 5000, 40000])
def test_the_variants_agree_with_one_another(xp: Any, op: Op, dtype: str, cols: int) -> None:
    case = inputs(op, 7, cols, dtype)
    results = {}
    for variant in VARIANTS:
        try:
            results[variant] = xp.asnumpy(run(xp, op, case, plan=variant))
        except ValueError:
            continue

    last = results["uncached"].astype(np.float64)  # holds every row
    assert len(results) >= 2 or cols > 16384
    for variant, y in results.items():
        assert error(y, last) <= 2 * TOLERANCES[dtype], variant


@every_op
@pytest.mark.parametrize(
    ("dtype", "cols", "parameter_cache"),
    [
        pytest.param("float16", 303, 3, marks=pytest.mark.small),
        ("bfloat16", 1023, 2),
        ("float16", 5001, 2),
        ("float32", 5001, 3),
    ],
)
@pytest.mark.parametrize("stages", [0, 1, 2])
def test_a_group_goes_through_rows_that_begin_alike(
    xp: Any, op: Op, dtype: str, cols: int, parameter_cache: int, stages: int
) -> None:
    """Parameters kept for all of them, or rows on their way, or both: with a grid so small that each has many."""
    if not (op.parameters or stages):
        pytest.skip("nothing is kept for a group's next rows")
    case = inputs(op, 67, cols, dtype)
    vector = 16 // case.x.itemsize
    vectors = -(-(cols // vector) // 64)
    plan = dataclasses.replace(
        PLAIN,
        variant="block",
        vector=vector,
        vectors=vectors,
        group=64,
        parameter_cache=parameter_cache if op.parameters else 0,
        unaligned=1,
        block=128,
        stages=stages,
        waves=0.03,
    )

    check(xp, op, case, plan=plan)


@every_op
@pytest.mark.parametrize(
    ("parts", "stages", "parameter_cache", "rows_per_group", "rows"),
    [
        pytest.param(1, 0, 2, 1, 7, marks=pytest.mark.small),
        pytest.param(1, 1, 3, 1, 7, marks=pytest.mark.small),
        pytest.param(1, 2, 0, 2, 7, marks=pytest.mark.small),
        pytest.param(2, 1, 2, 1, 29, marks=pytest.mark.small),
        pytest.param(8, 3, 2, 1, 29, marks=pytest.mark.small),
        *(
            (parts, stages, 2, 1, rows)
            for parts, stages in ((2, 0), (2, 1), (8, 3))
            for rows in (1, 67, 5003)
        ),
        (1, 1, 2, 1, 5003),
        (4, 4, 0, 1, 5003),
    ],
)
def test_blocks_and_clusters_that_go_through_rows_take_each_once(
    xp: Any, op: Op, parts: int, stages: int, parameter_cache: int, rows_per_group: int, rows: int
) -> None:
    """A grid so small that each has many; clusters claim them, and the next launch finds no claim of the one before."""
    parameter_cache = parameter_cache if op.parameters else 0
    if not (parameter_cache or stages):
        pytest.skip("nothing is kept for a block's next rows")
    case = inputs(op, rows, 1024 * parts, "float16")
    plan = dataclasses.replace(
        PLAIN,
        variant="cluster" if parts > 1 else "block",
        vector=8,
        vectors=2,
        group=64,
        rows_per_group=rows_per_group,
        parameter_cache=parameter_cache,
        ctas_per_row=parts,
        stages=stages,
        block=64 if parts > 1 else 128,
        waves=0.0015 * parts,
    )
    assert plan.dynamic == (parts > 1)

    for _ in range(3):
        check(xp, op, case, plan=plan)


def rows_apart(xp: Any, case: Case, apart: int) -> tuple[Any, Any]:
    """Return x and a place for results, with so many elements between two rows."""
    rows, cols = case.x.shape
    x, out = (xp.asarray(np.zeros((rows, cols + apart), case.x.dtype))[:, :cols] for _ in range(2))
    x[...] = xp.asarray(case.x)
    return x, out


@pytest.mark.parametrize("op", [op for op in OPS if op.parameters], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("parts", "vectors", "stages", "rows", "cols"),
    [
        # a vector for each thread of the last block, only where a row begins early; and one more than threads' sure
        # ones
        pytest.param(2, 1, 1, 9, 4103, marks=pytest.mark.small),
        pytest.param(2, 2, 2, 19, 4096 + 31, marks=pytest.mark.small),
        pytest.param(4, 2, 1, 9, 4397, marks=pytest.mark.small),
        (2, 1, 1, 5003, 4103),
        (2, 2, 3, 67, 5001),
        (8, 3, 2, 67, 12287),
        (16, 2, 1, 67, 16385),
        (8, 2, 1, 67, 50257),
    ],
)
@pytest.mark.parametrize("apart", [0, 13], ids=["contiguous", "strided"])
def test_clusters_claim_rows_that_begin_anywhere(
    xp: Any, op: Op, dtype: str, parts: int, vectors: int, stages: int, rows: int, cols: int, apart: int
) -> None:
    """A block has numbers of all columns that its vectors, or what is around them, may hold."""
    case = inputs(op, rows, cols, dtype)
    vector = 16 // case.x.itemsize
    block = max(2, math.ceil(cols // vector / parts / vectors / 32)) * 32
    plan = dataclasses.replace(
        PLAIN,
        variant="cluster",
        vector=vector,
        vectors=math.ceil(cols // vector / parts / block),
        group=block,
        parameter_cache=CONVERTED,
        unaligned=1,
        ctas_per_row=parts,
        stages=stages,
        block=block,
        waves=0.2,
    )
    assert plan.dynamic
    x, out = rows_apart(xp, case, apart)
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}

    for _ in range(2):
        op.function(x, **parameters, out=out, plan=plan)

        assert_close(xp.asnumpy(out), op.reference(case.x, **case.parameters)[0])


@pytest.mark.small
@every_op
def test_a_crowded_block_goes_through_rows(xp: Any, op: Op) -> None:
    """Threads without a register to spare meet in one set of slots, which must have been read before the next row."""
    plan = dataclasses.replace(
        PLAIN,
        variant="block",
        vector=4,
        vectors=8,
        group=64,
        full=True,
        block=64,
        min_blocks=16,
        waves=0.0015,
    )

    check(xp, op, inputs(op, 29, 2048, "float32"), plan=plan)


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("parts", "kept_vectors", "block", "cols"),
    [
        pytest.param(1, 2000, 128, 4397, marks=pytest.mark.small),
        pytest.param(4, 2000, 96, 4397, marks=pytest.mark.small),
        pytest.param(2, 100, 128, 4111, marks=pytest.mark.small),  # what does not fit is read twice
        pytest.param(
            2, 2000, 64, 4103, marks=pytest.mark.small
        ),  # too few threads for what is before a row's first line
        (16, 2000, 128, 50257),
        (1, 3100, 256, 12001),
    ],
)
@pytest.mark.parametrize("apart", [0, 13], ids=["contiguous", "strided"])
def test_rows_that_begin_anywhere_wait_in_shared_memory(
    xp: Any, op: Op, dtype: str, parts: int, kept_vectors: int, block: int, cols: int, apart: int
) -> None:
    rows = 9
    case = inputs(op, rows, cols, dtype)
    plan = dataclasses.replace(
        PLAIN,
        variant="shared" if parts == 1 else "cluster",
        vector=16 // case.x.itemsize,
        vectors=1,
        unaligned=1,
        ctas_per_row=parts,
        block=block,
        row_shared_bytes=kept_vectors * 16,
    )
    x, out = rows_apart(xp, case, apart)
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}

    op.function(x, **parameters, out=out, plan=plan)

    assert_close(xp.asnumpy(out), op.reference(case.x, **case.parameters)[0])


SPREAD = dataclasses.replace(PLAIN, variant="split", ctas_per_row=5, group=64, block=64)
TOGETHER = dataclasses.replace(PLAIN, variant="split", vectors=2, ctas_per_row=5, rows_per_group=4, block=64)


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("plan", "rows", "cols"),
    [
        pytest.param(SPREAD, 1, 1000, marks=pytest.mark.small),
        pytest.param(SPREAD, 3, 4104, marks=pytest.mark.small),
        (SPREAD, 2, 5120),
        pytest.param(TOGETHER, 6, 1000, marks=pytest.mark.small),
        pytest.param(TOGETHER, 35, 1016, marks=pytest.mark.small),  # more than between two meetings
        (TOGETHER, 67, 20000),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_of_the_grid_share_a_row_without_shared_memory(
    xp: Any, op: Op, dtype: str, plan: Plan, rows: int, cols: int, in_place: bool
) -> None:
    """Old contents of `out` are no message, even if every second word is what a message once had."""
    case = inputs(op, rows, cols, dtype)
    vector = 16 // case.x.itemsize
    if vector == 2:
        pytest.skip("doubles wait in shared memory")

    x = xp.asarray(case.x.copy())
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}
    out = (
        x
        if in_place
        else xp.asarray(np.full(case.x.nbytes // 4, 1, np.uint32).view(case.x.dtype).reshape(case.x.shape))
    )

    y = op.function(x, **parameters, out=out, plan=dataclasses.replace(plan, vector=vector))

    assert y is out
    assert_close(xp.asnumpy(y), op.reference(case.x, **case.parameters)[0])


def messages(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return moderate floats that are valid messages, as kernels/base/mailbox.cuh defines them."""
    rng, found = np.random.default_rng(0), np.empty((0, 4), np.float32)
    while len(found) < count:
        a, b = rng.standard_normal((2, 1 << 16)).astype(np.float32).view(np.uint32)
        first = 0xFFB3FFE5 + a * np.uint32(0x85EBCA6B) + b * np.uint32(0xC2B2AE35)
        second = 0xFFA7FFD9 + b * np.uint32(0x27D4EB2F) + a * np.uint32(0x9E3779B1)
        four = np.stack([a, first.astype(np.uint32), b, second.astype(np.uint32)], 1).view(np.float32)
        moderate = np.isfinite(four) & (np.abs(four) > 1e-3) & (np.abs(four) < 1e3)
        found = np.concatenate([found, four[moderate.all(1)]])
    return found[:count].reshape(-1)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("plan", [dataclasses.replace(SPREAD, vector=4), "split"])
def test_x_in_place_is_not_taken_for_messages(xp: Any, op: Op, plan: Any) -> None:
    case = inputs(op, 1, 4096, "float32")
    host = messages(1024).reshape(1, 4096)
    x = xp.asarray(host)
    parameters = {name: xp.asarray(array) for name, array in case.parameters.items()}

    y = op.function(x, **parameters, out=x, plan=plan)

    assert_close(xp.asnumpy(y), op.reference(host, **case.parameters)[0])


@every_op
@pytest.mark.parametrize("vectors", [2, 3, 4])
@pytest.mark.parametrize("cols", [pytest.param(1272, marks=pytest.mark.small), 1528, 1800, 2040])
def test_what_a_block_s_last_turn_leaves_a_thread_is_taken(xp: Any, op: Op, cols: int, vectors: int) -> None:
    """159 to 255 vectors of half by 64 threads: one to three are left, of some threads one less."""
    plan = dataclasses.replace(PLAIN, variant="cached", vector=8, vectors=vectors, block=64, waves=math.inf)

    check(xp, op, inputs(op, 5, cols, "float16"), plan=plan)


@every_op
@pytest.mark.parametrize(
    ("dtype", "cols", "parameter_cache"),
    [pytest.param("float16", 303, 0, marks=pytest.mark.small), ("bfloat16", 1021, 1), ("float32", 4099, 0)],
)
def test_two_rows_that_begin_alike_share_their_parameters(
    xp: Any, op: Op, dtype: str, cols: int, parameter_cache: int
) -> None:
    """The second of a pair is a period further; 67 rows leave some without."""
    case = inputs(op, 67, cols, dtype)
    vector = 16 // case.x.itemsize
    plan = dataclasses.replace(
        PLAIN,
        variant="block",
        vector=vector,
        vectors=-(-(cols // vector) // 64),
        group=64,
        rows_per_group=2,
        parameter_cache=parameter_cache if op.parameters else 0,
        unaligned=1,
        alignment_period=vector,
        block=128,
    )

    check(xp, op, case, plan=plan)


@every_op
@pytest.mark.parametrize(
    ("dtype", "cols", "unaligned", "vector", "group", "rows"),
    [
        pytest.param("float16", 64, 0, 8, 4, 2, marks=pytest.mark.small),
        pytest.param("float16", 303, 1, 8, 16, 2, marks=pytest.mark.small),
        pytest.param("bfloat16", 303, 1, 8, 64, 1, marks=pytest.mark.small),
        pytest.param("float32", 4101, 1, 4, 256, 1, marks=pytest.mark.small),
        pytest.param("float32", 54, 0, 2, 16, 1, marks=pytest.mark.small),
        pytest.param("float64", 66, 0, 2, 32, 1, marks=pytest.mark.small),
        ("float16", 1000, 0, 8, 32, 1),
        ("bfloat16", 1023, 1, 8, 32, 1),
        ("float64", 2051, 1, 2, 256, 1),
    ],
)
@pytest.mark.parametrize("waves", [0.01, math.inf])
def test_every_row_of_a_block_finds_its_parameters_as_numbers(
    xp: Any, op: Op, dtype: str, cols: int, unaligned: int, vector: int, group: int, rows: int, waves: float
) -> None:
    """Unaligned rows each begin at other columns of the vectors; a small grid gives a block several rows."""
    if not op.parameters:
        pytest.skip("there are none")
    case = inputs(op, 67, cols, dtype)
    plan = dataclasses.replace(
        PLAIN,
        variant="warp" if group <= 32 else "block",
        vector=vector,
        vectors=-(-(cols // vector) // group),
        group=group,
        rows_per_group=rows,
        parameter_cache=4,
        unaligned=unaligned,
        alignment_period=vector if unaligned and rows > 1 else 1,
        block=max(128, group),
        waves=waves,
    )

    check(xp, op, case, plan=plan)


@pytest.mark.small
@every_op
@pytest.mark.parametrize(("cols", "group", "rows", "parameter_cache"), [(768, 32, 1, 1), (1024, 64, 2, 0)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_fill_every_place(
    xp: Any, op: Op, dtype: str, cols: int, group: int, rows: int, parameter_cache: int
) -> None:
    """Five rows leave the last pair without its second."""
    plan = dataclasses.replace(
        PLAIN,
        variant="warp" if group == 32 else "block",
        vector=8,
        vectors=cols // 8 // group,
        group=group,
        rows_per_group=rows,
        full=True,
        parameter_cache=parameter_cache if op.parameters else 0,
        block=64,
    )

    check(xp, op, inputs(op, 5, cols, dtype), plan=plan)


@pytest.mark.small
@every_op
@pytest.mark.parametrize("block", [96, 160, 352])
@pytest.mark.parametrize(
    ("variant", "parts", "row_shared_bytes"),
    [("shared", 1, 16 << 10), ("cluster", 2, 8 << 10), ("uncached", 1, 0)],
)
def test_a_row_in_shared_memory_is_read_by_any_number_of_warps(
    xp: Any, op: Op, block: int, variant: str, parts: int, row_shared_bytes: int
) -> None:
    plan = dataclasses.replace(
        PLAIN,
        variant=variant,
        vector=8,
        vectors=2,
        ctas_per_row=parts,
        block=block,
        row_shared_bytes=row_shared_bytes,
    )

    check(xp, op, inputs(op, 5, 8000, "float16"), plan=plan)


@every_op
@pytest.mark.parametrize("cols", [pytest.param(33, marks=pytest.mark.small), 1024, 5000, 20000])
@every_variant
def test_bits_are_the_same_from_run_to_run(xp: Any, op: Op, cols: int, variant: str) -> None:
    case = inputs(op, 64, cols, "float16")

    first = xp.asnumpy(run(xp, op, case, plan=variant))

    for _ in range(5):
        assert np.array_equal(bits(first), bits(xp.asnumpy(run(xp, op, case, plan=variant))))


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cols", [pytest.param(8, marks=pytest.mark.small), 33, 1024, 5000, 20000, 40000])
@pytest.mark.parametrize("variant", [*VARIANTS, None])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    xp: Any, op: Op, dtype: str, cols: int, variant: str | None
) -> None:
    many = 150 if issubclass(xp.ndarray, np.ndarray) else 1000  # more than there are multiprocessors
    case = inputs(op, many, cols, dtype)
    among = xp.asnumpy(run(xp, op, case, plan=variant))
    # Other rows in another order and number, but enough for the same plan, which depends on their number. Each row
    # keeps its distance from a multiple of 16 bytes: its elements are added up from there.
    alike = [np.random.default_rng(phase).permutation(np.arange(phase, many - 8, 8)) for phase in range(8)]
    keep = np.stack([each[: min(map(len, alike))] for each in alike], axis=1).reshape(-1)
    x = case.x[keep]
    x[::2] = 7

    other = xp.asnumpy(run(xp, op, Case("", x, case.parameters), plan=variant))

    assert np.array_equal(bits(other[1::2]), bits(among[keep[1::2]]))


@pytest.mark.small
@every_op
def test_an_unknown_variant_is_refused(xp: Any, op: Op) -> None:
    with pytest.raises(ValueError, match="use warp, block, cached, cluster, split, shared, uncached"):
        run(xp, op, inputs(op, 2, 8, "float32"), plan="fast")


@every_op
def test_a_variant_that_cannot_hold_the_row_is_refused(xp: Any, op: Op) -> None:
    with pytest.raises(ValueError, match="variant 'warp' cannot hold a row of 5000 columns"):
        run(xp, op, inputs(op, 2, 5000, "float32"), plan="warp")
