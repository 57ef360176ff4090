"""Problem -> Plan, with recorded devices and made-up occupancies: integers only."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import (
    COUNTER_BYTES,
    EVENLY,
    ROOM_BYTES,
    ROOM_ROWS,
    VARIANTS,
    DoesNotFitError,
    Plan,
    room_bytes,
)
from cupynorm.plan.limits import RECORDED, active_blocks
from cupynorm.plan.problem import Problem, messages_bytes
from cupynorm.plan.rules import rules_of
from cupynorm.tools import bench
from cupynorm.tools.results import Point

H200 = RECORDED["h200"]


def resident(plan: Plan) -> int:
    """What an H200 would answer for kernels of 64 registers."""
    blocks = active_blocks(H200, plan.block, 64, plan.shared_bytes)
    return H200.sm_count * blocks // plan.cluster if plan.cluster > 1 else blocks


def problem(
    rows: int = 49152, cols: int = 1024, vector: int = 8, load_bytes: int = 2, compute_bytes: int = 4
) -> Problem:
    return Problem(rows, cols, vector, load_bytes, compute_bytes)


def test_blocks_that_wait_for_one_another_are_no_more_than_the_device_runs() -> None:
    for rows in (1, 7, 64, 131):
        plan = choose(problem(rows=rows, cols=2**22), H200, resident, "split")

        assert plan.grid % plan.ctas_per_row == 0
        assert plan.grid <= H200.sm_count * plan.resident_blocks


@pytest.mark.parametrize("compute_bytes", [4, 8])
def test_blocks_that_share_a_row_keep_what_their_messages_replace(compute_bytes: int) -> None:
    """In place those lie where x was: what is not kept of it would be read again."""
    wide = problem(rows=64, cols=2**20, compute_bytes=compute_bytes)
    chosen = choose(wide, H200, resident, "split")

    taken = []
    for row_shared_bytes in range(0, 20 << 10, 16):
        with contextlib.suppress(DoesNotFitError):
            taken.append(
                choose(wide, H200, resident, dataclasses.replace(chosen, row_shared_bytes=row_shared_bytes))
            )

    assert taken
    assert all(plan.row_shared_bytes >= plan.ctas_per_row * 8 * compute_bytes + 16 for plan in taken)
    elsewhere = dataclasses.replace(
        wide, vector=1, widest_vector=8, unaligned=2, alignment_period=8
    )  # x is not where y is
    assert choose(elsewhere, H200, resident, "split").row_shared_bytes == 0


@pytest.mark.parametrize("cols", [95, 97, 1023, 1025, 5001, 16383])
@pytest.mark.parametrize("unaligned", [1, 2])
def test_unaligned_rows_have_the_widest_vectors(cols: int, unaligned: int) -> None:
    odd = dataclasses.replace(
        problem(cols=cols, vector=1), widest_vector=8, unaligned=unaligned, alignment_period=8
    )
    plan = choose(odd, H200, resident)

    assert plan.vector == (8 if cols >= 96 else 1)
    assert plan.unaligned == (unaligned if cols >= 96 else 0)
    if plan.unaligned:
        assert plan.group >= 14  # one for each element around the vectors
        assert plan.group * plan.vectors >= cols // 8
        assert (
            plan.group * (plan.vectors - 1) <= (cols - 7) // 8
        )  # only a thread's last vector may be missing


def test_parameters_stay_on_chip_where_clusters_go_through_rows() -> None:
    plan = choose(dataclasses.replace(problem(cols=65536), parameter_bytes=(2, 2)), H200, resident)

    assert (plan.variant, plan.parameter_cache, plan.stages, plan.dynamic) == ("cluster", 2, 1, True)
    assert plan.shared_bytes <= H200.shared_bytes_per_block
    assert plan.waves <= 1


@pytest.mark.parametrize(("cols", "period"), [(3501, 8), (4097, 8), (4002, 4)])
def test_rows_that_a_group_goes_through_have_one_alignment(cols: int, period: int) -> None:
    odd = dataclasses.replace(
        problem(rows=8192, cols=cols, vector=16 // 2 // period),
        widest_vector=8,
        unaligned=1,
        alignment_period=period,
        parameter_bytes=(2, 2),
    )
    plan = choose(odd, H200, resident)

    assert plan.persistent
    groups = plan.grid // plan.ctas_per_row * (1 if plan.ctas_per_row > 1 else plan.block // plan.group)
    assert groups % period == 0
    unknown = choose(dataclasses.replace(odd, alignment_period=0), H200, resident)
    assert not unknown.persistent
    with pytest.raises(DoesNotFitError):
        choose(dataclasses.replace(odd, alignment_period=0), H200, resident, plan)


@pytest.mark.parametrize(("cols", "parameters", "wide"), [(601, (2, 2), False), (203, (4, 4), True)])
def test_converted_parameters_take_room_behind_each_vector(
    cols: int, parameters: tuple[int, ...], wide: bool
) -> None:
    """A number of each parameter for every column, of 8 bytes in all, and as much behind each vector."""
    vector = 4 if wide else 8
    odd = dataclasses.replace(
        problem(rows=8192, cols=cols, vector=1),
        load_bytes=max(parameters),
        widest_vector=vector,
        unaligned=1,
        alignment_period=vector,
        parameter_bytes=parameters,
    )
    plan = choose(odd, H200, resident)

    assert (plan.parameter_cache, plan.persistent) == (4, False)
    assert plan.shared_bytes == math.ceil((cols + cols // vector) * 8 / 16) * 16
    beside = dataclasses.replace(odd, fused=True, direct_load=False, load_operands=(max(parameters),))
    assert choose(beside, H200, resident).parameter_cache != 4
    with pytest.raises(DoesNotFitError):
        choose(beside, H200, resident, plan)


def test_no_active_block_falls_to_the_next_variant() -> None:
    plan = choose(problem(cols=65536), H200, lambda plan: int(plan.variant == "uncached"))

    assert plan.variant == "uncached"


def test_grid_covers_the_rows() -> None:
    assert choose(problem(rows=10**9, cols=65536), H200, resident, "shared").grid == 10**9
    assert choose(problem(rows=2**40), H200, resident).grid == 2**31 - 1
    few = choose(problem(rows=7), H200, resident)
    assert few.grid == math.ceil(7 / (few.block // few.group * few.rows_per_group))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_can_be_forced(variant: str) -> None:
    assert choose(problem(cols=1024), H200, resident, variant).variant == variant


def test_a_plan_can_be_forced_and_keeps_its_template() -> None:
    wanted = dataclasses.replace(choose(problem(), H200, resident), rows_per_group=2, waves=1.0)

    plan = choose(problem(), H200, resident, wanted)

    assert plan.template == wanted.template
    assert plan.grid == H200.sm_count * plan.resident_blocks


@pytest.mark.parametrize(
    "change",
    [
        {"ctas_per_row": 2},
        {"variant": "cluster", "ctas_per_row": 3},
        {"variant": "cluster", "ctas_per_row": 2, "rows_per_group": 2},
        {"parameter_cache": 2},
        {"parameter_cache": 4},
        {"row_shared_bytes": 4096},
        {"variant": "uncached"},
    ],
    ids=str,
)
def test_a_plan_that_its_kernel_would_do_wrong_is_refused(change: dict[str, object]) -> None:
    wanted = dataclasses.replace(choose(problem(), H200, resident), **change)  # type: ignore[arg-type]

    with pytest.raises(DoesNotFitError, match="cannot hold a row"):
        choose(problem(), H200, resident, wanted)


def test_blocks_of_the_grid_that_share_a_row_have_a_power_of_two_of_warps() -> None:
    only = problem(rows=1, cols=2**20)
    plan = choose(only, H200, resident)

    assert plan.kernel == "row_spread"
    assert choose(only, H200, resident, dataclasses.replace(plan, block=256, group=256)).block == 256
    with pytest.raises(DoesNotFitError, match="cannot hold a row"):
        choose(only, H200, resident, dataclasses.replace(plan, block=384, group=384))


def test_a_forced_plan_for_another_width_is_refused() -> None:
    wanted = choose(problem(cols=1024), H200, resident)

    with pytest.raises(DoesNotFitError, match="cannot hold a row of 4096 columns"):
        choose(problem(cols=4096), H200, resident, wanted)


@pytest.mark.parametrize(
    ("variant", "cols"),
    [("warp", 1544), ("block", 32776), ("cluster", 2**24), ("split", 8), ("shared", 2**20)],
)
def test_a_forced_variant_that_cannot_hold_the_row_says_so(variant: str, cols: int) -> None:
    with pytest.raises(DoesNotFitError, match=f"'{variant}' cannot hold a row of {cols} columns"):
        choose(problem(cols=cols), H200, resident, variant)


def test_an_unknown_variant_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        ValueError,
        match="plan 'fast' is not a variant: use warp, block, cached, cluster, split, shared, uncached",
    ):
        choose(problem(), H200, resident, "fast")


def test_a_plan_is_a_value() -> None:
    plan = choose(problem(), H200, resident)

    assert plan == choose(problem(), H200, resident)
    assert plan.as_dict()["variant"] == "block"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.block = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("device", "block", "registers", "shared_bytes", "expected"),
    [
        ("h200", 256, 32, 16 << 10, 8),  # by threads
        ("h200", 256, 32, 64 << 10, 3),  # by shared memory, 1 KiB of each block the driver's
        ("h200", 128, 73, 0, 6),  # by registers: 80 of them a thread
        ("h200", 1024, 64, 0, 1),
        ("h200", 32, 16, 0, 32),  # by blocks
        ("t4", 1024, 32, 0, 1),
        ("t4", 128, 32, 0, 8),
        ("a100", 1024, 64, 0, 1),
        ("rtx4090", 512, 40, 0, 3),
    ],
)
def test_active_blocks_are_the_drivers(
    device: str, block: int, registers: int, shared_bytes: int, expected: int
) -> None:
    assert active_blocks(RECORDED[device], block, registers, shared_bytes) == expected


TO_BYTES = dataclasses.replace(problem(), fused=True, parameter_bytes=(2, 2), output_bytes=1)


def test_rows_to_bytes_go_through_blocks_unless_something_is_computed_on_the_way() -> None:
    plan = choose(TO_BYTES, H200, resident)
    added = dataclasses.replace(TO_BYTES, load_operands=(2,), direct_load=False)

    assert (plan.parameter_cache, plan.stages, plan.grid) == (3, 1, plan.resident_blocks * H200.sm_count)
    assert not choose(added, H200, resident).persistent
    assert choose(added, H200, resident, plan).stages == 1  # which whoever asks for it may have


MASKED = dataclasses.replace(problem(), fused=True, load_operands=(1,), direct_load=False, output_bytes=2)


@pytest.mark.parametrize("rows", [1, 3, 16, 131])
@pytest.mark.parametrize("cols", [2**20, 2**24])
def test_few_fused_rows_that_no_cluster_holds_are_shared_by_the_grid(rows: int, cols: int) -> None:
    plan = choose(dataclasses.replace(MASKED, rows=rows, cols=cols), H200, resident)

    assert (plan.variant, plan.kernel) == ("split", "row_reread")
    assert H200.sm_count <= plan.grid == plan.ctas_per_row <= H200.sm_count * plan.resident_blocks
    assert choose(dataclasses.replace(MASKED, rows=rows, cols=cols), H200, resident, plan).grid == plan.grid


IN_RUNS = dataclasses.replace(MASKED, room=True)


@pytest.mark.parametrize(
    ("rows", "cols", "groups"),
    [
        (1, 2**24, 1),
        (3, 2**26, 3),
        (5, 2**26, 3),
        (64, 2**21, 4),
        (7, 2**20, 7),
        (64, 2**20, 8),
        (130, 2**20, 5),
    ],
)
def test_groups_of_blocks_share_rows_where_their_messages_have_room(
    rows: int, cols: int, groups: int
) -> None:
    plan = choose(dataclasses.replace(IN_RUNS, rows=rows, cols=cols), H200, resident, "split")

    assert plan.kernel == "row_reread"
    assert plan.grid == groups * plan.ctas_per_row <= H200.sm_count * plan.resident_blocks
    assert choose(dataclasses.replace(IN_RUNS, rows=rows, cols=cols), H200, resident, plan).grid == plan.grid


@pytest.mark.parametrize("cols", [128, 4096, 2**20, 2**24])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 131, 4000])
@pytest.mark.parametrize("output_bytes", [0, 2])
def test_messages_of_blocks_fit_into_their_room(rows: int, cols: int, output_bytes: int) -> None:
    whole = dataclasses.replace(IN_RUNS, rows=rows, cols=cols, vector=1, output_bytes=output_bytes)
    try:
        plan = choose(whole, H200, resident, "split")
    except DoesNotFitError:
        assert cols == 128
        return

    # kernels/row/meeting.cuh: counters of all groups, then two sets of the messages of kMost rows of each block
    needed = plan.grid // plan.ctas_per_row * COUNTER_BYTES + 2 * plan.grid * ROOM_ROWS * ROOM_BYTES
    assert needed <= room_bytes(rows, cols)
    assert output_bytes == 0 or messages_bytes(whole, plan) == room_bytes(rows, cols)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (8, 1), (9, 2), (64, 8), (131, 17)])
def test_groups_of_blocks_meet_once_for_rows_that_are_only_read(rows: int, groups: int) -> None:
    only_read = dataclasses.replace(MASKED, rows=rows, cols=2**21, output_bytes=0)

    plan = choose(only_read, H200, resident, "split")

    assert plan.grid == groups * plan.ctas_per_row
    assert rows <= groups * ROOM_ROWS


def test_few_rows_in_runs_wait_in_shared_memory_of_the_grid_or_of_clusters() -> None:
    direct = dataclasses.replace(IN_RUNS, load_operands=(), direct_load=True)

    def chosen(rows: int, cols: int) -> tuple[str, str]:
        plan = choose(dataclasses.replace(direct, rows=rows, cols=cols), H200, resident)
        return plan.variant, plan.kernel

    assert chosen(64, 2**21) == ("split", "row_staged")
    assert chosen(64, 3 * 2**19) == ("cluster", "row_staged")
    assert chosen(9, 3 * 2**19) == ("split", "row_staged")
    assert chosen(3, 2**24) == ("split", "row_reread")  # no shared memory holds one


def test_rows_in_runs_of_short_vectors_lie_in_shared_memory_of_clusters() -> None:
    direct = dataclasses.replace(IN_RUNS, load_operands=(), direct_load=True, rows=2048, cols=2**17)

    plan = choose(dataclasses.replace(direct, vector=1), H200, resident)

    assert (plan.variant, plan.kernel) == ("cluster", "row_staged")
    assert choose(direct, H200, resident).kernel == "row_registers"


@pytest.mark.parametrize(("rows", "cols", "variant"), [(132, 2**20, "uncached"), (16, 2**18, "cluster")])
def test_other_fused_rows_are_not(rows: int, cols: int, variant: str) -> None:
    assert choose(dataclasses.replace(MASKED, rows=rows, cols=cols), H200, resident).variant == variant


def test_fused_rows_are_shared_only_where_more_threads_than_a_block_for_each_find_work() -> None:
    t4 = RECORDED["t4"]
    few, more = (dataclasses.replace(MASKED, rows=rows, cols=17408) for rows in (1, 39))

    assert choose(few, t4, lambda plan: plan.min_blocks).variant == "split"
    assert choose(more, t4, lambda plan: plan.min_blocks).variant == "uncached"
    assert choose(more, t4, lambda plan: plan.min_blocks, "split").variant == "split"


def test_a_fused_row_without_a_vector_for_each_thread_of_a_block_is_not_shared() -> None:
    with pytest.raises(DoesNotFitError, match="'split' cannot hold a row of 1016 columns"):
        choose(dataclasses.replace(MASKED, rows=1, cols=1016), H200, resident, "split")


def test_a_plan_of_an_op_alone_is_refused_where_something_is_fused() -> None:
    alone = choose(problem(rows=3, cols=2**20), H200, resident, "split")

    with pytest.raises(DoesNotFitError):
        choose(dataclasses.replace(MASKED, rows=3, cols=2**20), H200, resident, alone)


def test_a_plan_of_fused_rows_is_refused_where_nothing_is_fused() -> None:
    shared = choose(dataclasses.replace(MASKED, rows=3, cols=2**20), H200, resident, "split")

    with pytest.raises(DoesNotFitError):
        choose(problem(rows=3, cols=2**20), H200, resident, shared)


def test_the_cache_takes_no_more_columns_than_its_kernel_counts() -> None:
    assert choose(problem(cols=2**31 - 8), H200, resident, "cached").variant == "cached"
    with pytest.raises(DoesNotFitError, match="cannot hold a row of 2147483648 columns"):
        choose(problem(cols=2**31), H200, resident, "cached")


@pytest.mark.parametrize("period", [8, 0])
@pytest.mark.parametrize("parameters", [(2,), (2, 2), (4, 4)])
@pytest.mark.parametrize("cols", [20001, 50257, 100003])
def test_wide_unaligned_rows_have_a_dynamic_scheduler(
    cols: int, parameters: tuple[int, ...], period: int
) -> None:
    """A block converts its parameters for rows of any alignment; if that of x and y differs nothing is staged."""
    odd = dataclasses.replace(
        problem(rows=8192, cols=cols, vector=1),
        widest_vector=8,
        unaligned=1,
        alignment_period=period,
        parameter_bytes=parameters,
    )
    plan = choose(odd, H200, resident)

    assert (plan.variant, plan.parameter_cache, plan.dynamic) == ("cluster", 4, True)
    line, least = 64, (cols - 63) // 64 // plan.ctas_per_row * 8  # elements; vectors of the smallest part
    assert plan.group >= line - 1
    assert plan.group * (plan.vectors - 1) <= least
    assert not choose(dataclasses.replace(odd, unaligned=2), H200, resident).dynamic


def test_where_there_are_no_clusters_a_block_goes_through_wide_rows_of_one_alignment() -> None:
    odd = problem(rows=49152, cols=20375, vector=1)
    odd = dataclasses.replace(odd, widest_vector=8, unaligned=1, alignment_period=8, parameter_bytes=(2, 2))

    plan = choose(odd, RECORDED["a100"], resident)

    assert (plan.variant, plan.parameter_cache, plan.stages, plan.dynamic) == ("block", 2, 1, False)


@pytest.mark.parametrize("unaligned", [0, 1, 2])
def test_wide_rows_of_doubles_wait_in_registers_of_a_cluster(unaligned: int) -> None:
    doubles = problem(
        rows=8192, cols=20001 if unaligned else 20000, vector=1 if unaligned else 2, load_bytes=8
    )
    doubles = dataclasses.replace(doubles, compute_bytes=8, widest_vector=2, unaligned=unaligned)

    plan = choose(doubles, H200, resident)

    assert (plan.variant, plan.stages, plan.group) == ("cluster", 0, plan.block)


def test_more_rows_than_the_scheduler_counts_have_none() -> None:
    each = dataclasses.replace(problem(cols=65536), parameter_bytes=(2, 2))

    assert choose(each, H200, resident).dynamic
    assert not choose(dataclasses.replace(each, rows=2**30 + 1), H200, resident).dynamic


@pytest.mark.parametrize("unaligned", [0, 1])
@pytest.mark.parametrize(
    ("load_bytes", "shortest", "block"), [(2, 8192, 64), (2, 16384, 128), (4, 16384, 128)]
)
def test_long_rows_that_are_only_read_are_streams(
    load_bytes: int, shortest: int, block: int, unaligned: int
) -> None:
    vector = 16 // load_bytes
    read = Problem(
        rows=4096,
        cols=shortest + unaligned,
        vector=1 if unaligned else vector,
        load_bytes=load_bytes,
        compute_bytes=4,
        widest_vector=vector,
        unaligned=unaligned,
        fused=True,
    )

    def chosen(problem: Problem) -> Plan:
        return choose(problem, H200, lambda plan: max(1, plan.min_blocks))

    plan = chosen(read)
    assert (plan.variant, plan.block, plan.vector * plan.vectors) == ("uncached", block, 32)
    assert plan.block * plan.min_blocks == 1024
    many = chosen(dataclasses.replace(read, rows=2**20))
    assert dataclasses.replace(many, grid=plan.grid, waves=plan.waves) == plan
    few = [{"rows": 8}] * (shortest * load_bytes >= 32768)
    for other in ({"output_bytes": load_bytes}, {"cols": 2048}, {"direct_load": False}, *few):
        assert chosen(dataclasses.replace(read, **other)).variant != "uncached"


def fused(rows: int, cols: int, **others: Any) -> Plan:
    """Return the plan of a fused call of such rows of halves."""
    each = Problem(rows=rows, cols=cols, vector=8, load_bytes=2, compute_bytes=4, fused=True)
    return choose(dataclasses.replace(each, **others), H200, lambda plan: max(1, plan.min_blocks))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(64, 65536), (128, 16384), (64, 32768), (32, 32768), (16, 65536)])
def test_blocks_of_all_few_rows_run_at_once(rows: int, cols: int, pairs: bool) -> None:
    pair = {"fields": 2, "load_operands": (2,), "direct_load": False} if pairs else {}

    plan = fused(rows, cols, output_bytes=2, **pair)

    assert (plan.variant, plan.block, plan.min_blocks) == ("cluster", 256, 4)
    turns = 2 if pairs and rows == 64 and cols == 65536 else 1  # a thread may have no more elements
    assert H200.sm_count / 2 < rows * plan.ctas_per_row <= turns * 4 * H200.sm_count
    assert plan.vectors * plan.vector * (1 + pairs) >= 16


def test_few_rows_ask_for_no_more_threads_than_a_multiprocessor_has() -> None:
    limits = dataclasses.replace(RECORDED["rtx4090"], name="rtx5090", compute_capability="120")
    of_bytes: dict[str, Any] = {
        "load_operands": (1, 1),
        "epilogue_operands": (4,),
        "output_bytes": 1,
        "direct_load": False,
    }
    problem = Problem(rows=1, cols=16640, vector=8, load_bytes=2, compute_bytes=4, fused=True, **of_bytes)

    plan = choose(problem, limits, lambda plan: max(1, plan.min_blocks))

    assert (plan.variant, plan.block) == ("cluster", 512)
    assert plan.block * plan.min_blocks <= limits.threads_per_sm < plan.block * (plan.min_blocks + 1)


def test_few_long_rows_that_are_only_read_are_streams_of_whole_chunks() -> None:
    streams = fused(64, 65536), fused(128, 131072)

    assert {(each.kernel, each.ctas_per_row, each.block, each.vectors) for each in streams} == {
        ("row_staged", 2, 512, 4)
    }
    for other in (fused(64, 65536 + 8), fused(32, 65536), fused(64, 32768), fused(64, 65536, output_bytes=2)):
        assert other.kernel == "row_registers"


def test_short_rows_that_are_only_read_give_each_thread_four_vectors() -> None:
    read = Problem(rows=4096, cols=1024, vector=4, load_bytes=4, compute_bytes=4, fused=True)

    def chosen(problem: Problem) -> tuple[str, int, int]:
        plan = choose(problem, H200, lambda plan: max(1, plan.min_blocks))
        return plan.variant, plan.group, plan.vectors

    assert chosen(read) == ("block", 64, 4)
    assert chosen(dataclasses.replace(read, output_bytes=4)) == ("block", 128, 2)
    assert chosen(dataclasses.replace(read, cols=2048)) == ("block", 128, 4)
    assert chosen(dataclasses.replace(read, cols=128)) == ("warp", 8, 4)


@pytest.mark.parametrize(("cols", "block"), [(2048, 64), (4096, 128), (8192, 256)])
def test_pairs_that_wait_for_an_exponential_each_wait_in_the_cache(cols: int, block: int) -> None:
    pairs = Problem(
        rows=4096,
        cols=cols,
        vector=8,
        load_bytes=2,
        compute_bytes=4,
        fused=True,
        load_operands=(2,),
        output_bytes=2,
        direct_load=False,
        extra_registers=6,
        fields=2,
        late_exponential=True,
    )

    def chosen(problem: Problem) -> Plan:
        return choose(problem, H200, lambda plan: max(1, plan.min_blocks))

    plan = chosen(pairs)
    assert (plan.variant, plan.block, plan.min_blocks, plan.vectors) == ("cached", block, 1024 // block, 4)
    for other in (
        {"late_exponential": False},
        {"cols": 1024},
        {"cols": 16384},
        {"load_operands": (2, 1)},
        {"interval_mask": True},
        {"cols": cols + 1, "vector": 1, "widest_vector": 8, "unaligned": 1},
    ):
        assert chosen(dataclasses.replace(pairs, **other)).variant != "cached"


def sums_apart(size: int, cols: int, vector: int, *, more: bool) -> Problem:
    """Return a norm's gradient with sums over rows that lie apart. more: another gradient is added, and summed."""
    compute = max(size, 4)
    return Problem(
        1 << 16,
        cols,
        vector,
        size,
        compute,
        fused=True,
        load_operands=(size, size),
        epilogue_operands=(size,) * more,
        output_bytes=size,
        direct_load=False,
        fields=2,
        column_sums=2 + more,
        row_groups=528,
        across=4096,
        in_steps=True,
        room=True,
    )


@pytest.mark.parametrize("row", rules_of("90").apart.summed, ids=str)
def test_each_tiling_of_sums_beside_rows_that_lie_apart_is_for_some_rows(row: tuple[int, ...]) -> None:
    size, fewest, most, vector, block, width, elements, blocks, most_ctas, more = row
    for cols in {max(fewest, 4), most}:
        problem = sums_apart(size, cols, vector, more=bool(more))
        plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks)
        assert (plan.vector, plan.block, plan.min_blocks) == (vector, block, blocks)
        assert plan.across * vector * size == width
        assert plan.vectors <= elements
        assert plan.cluster <= most_ctas
        assert plan.grid <= 528 * plan.ctas_per_row
        assert plan.waits == EVENLY


def test_rows_with_sums_beside_them_that_lie_apart_take_a_cluster_then_the_grid() -> None:
    found = [
        choose(sums_apart(2, cols, 4, more=False), RECORDED["h200"], lambda plan: plan.min_blocks)
        for cols in (96, 1536, 3000, 3073, 16384, 50257)
    ]
    assert [plan.variant for plan in found] == ["block", "cluster", "cluster", "split", "split", "split"]
    for plan in found:
        assert plan.vectors * plan.group * plan.ctas_per_row >= 96
        assert plan.variant != "split" or plan.grid <= 132
    few = sums_apart(2, 3000, 4, more=False)
    together = choose(few, RECORDED["a100"], lambda plan: plan.min_blocks)  # without clusters
    assert together.variant == "split"
    with pytest.raises(DoesNotFitError):
        choose(few, RECORDED["a100"], lambda plan: plan.min_blocks, cooperative=False)


def test_few_neighbours_of_rows_with_sums_beside_them_are_whole_tiles() -> None:
    for across, lanes in ((64, 16), (32, 8), (16, 4)):
        problem = dataclasses.replace(sums_apart(2, 768, 4, more=False), across=across)
        assert choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks).across == lanes
    fewer = dataclasses.replace(sums_apart(2, 768, 4, more=False), across=12)
    with pytest.raises(DoesNotFitError):
        choose(fewer, RECORDED["h200"], lambda plan: plan.min_blocks)


def test_sums_beside_rows_that_lie_apart_have_no_other_plan() -> None:
    limits = RECORDED["h200"]
    for size, cols, vector in ((2, 70000, 4), (4, 70000, 2), (8, 40000, 1)):
        with pytest.raises(DoesNotFitError):
            choose(sums_apart(size, cols, vector, more=False), limits, lambda plan: plan.min_blocks)
    problem = sums_apart(4, 96, 2, more=False)
    with pytest.raises(DoesNotFitError):
        choose(problem, limits, lambda plan: plan.min_blocks, "uncached")
    uneven = dataclasses.replace(problem, in_steps=False)  # as where columns are those of two axes
    with pytest.raises(DoesNotFitError):
        choose(uneven, limits, lambda plan: plan.min_blocks)


def test_a_few_spilled_bytes_cost_sums_of_rows_that_lie_apart_no_block() -> None:
    problem, few = sums_apart(2, 96, 4, more=False), rules_of("90").apart.few_local_bytes
    for spilled, blocks in ((few, 4), (few + 1, 3)):

        def local_bytes(plan: Plan, spilled: int = spilled) -> int:
            return spilled if plan.min_blocks == 4 else 0

        plan = choose(problem, RECORDED["h200"], lambda plan: plan.min_blocks, local_bytes=local_bytes)
        assert plan.min_blocks == blocks


@pytest.mark.parametrize(("cols", "aligned"), [(1001, 1024), (2001, 2048), (4001, 4096)])
def test_a_loss_of_unaligned_rows_of_16_bits_has_as_many_threads_as_of_aligned_ones(
    cols: int, aligned: int
) -> None:
    """Its kernel does with 64 registers, though an estimate of its parts is 88."""
    plans = [
        choose(
            bench.lowered(Point("cross_entropy/grad", "float16", 49152, each), limits=H200).problem,
            H200,
            lambda plan: plan.min_blocks,
        )
        for each in (cols, aligned)
    ]

    assert len({plan.block * plan.min_blocks for plan in plans}) == 1
