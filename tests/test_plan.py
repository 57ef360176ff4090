"""Problem -> Plan, with recorded devices and made-up occupancies: integers only."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest

from cupynorm.plan.limits import RECORDED, active_blocks
from cupynorm.plan.planner import VARIANTS, DoesNotFitError, Plan, Problem, choose

H200 = RECORDED["h200"]


def resident(plan: Plan) -> int:
    """What an H200 would answer for kernels of 64 registers."""
    blocks = active_blocks(H200, plan.block, 64, plan.shared_bytes)
    return H200.sm_count * blocks // plan.cluster if plan.cluster > 1 else blocks


def problem(
    rows: int = 49152, cols: int = 1024, pack: int = 8, load_bytes: int = 2, compute_bytes: int = 4
) -> Problem:
    return Problem(rows, cols, pack, load_bytes, compute_bytes)


@pytest.mark.parametrize(
    ("cols", "variant"),
    [
        (8, "warp"),
        (512, "warp"),
        (768, "warp"),
        (776, "block"),
        (2040, "block"),
        (2048, "block"),
        (2304, "cached"),
        (32768, "cached"),
        (32776, "cluster"),
        (1802240, "cluster"),
        (1802248, "split"),
        (2**31 + 8, "split"),
    ],
)
def test_variant_changes_at_the_edge(cols: int, variant: str) -> None:
    plan = choose(problem(cols=cols), H200, resident)

    assert plan.variant == variant


@pytest.mark.parametrize(
    ("cols", "variant"),
    [
        (512, "warp"),
        (768, "warp"),
        (776, "block"),
        (32768, "cached"),
        (32776, "shared"),
        (82432, "shared"),
        (82440, "split"),
    ],
)
def test_without_clusters_shared_memory_is_next(cols: int, variant: str) -> None:
    plan = choose(problem(cols=cols), RECORDED["a100"], resident)

    assert plan.variant == variant


@pytest.mark.parametrize(
    ("rows", "cols", "variant"),
    [
        (1, 2040, "block"),
        (1, 16320, "block"),
        (1, 16384, "cluster"),
        (16, 65536, "cluster"),
        (1, 2**18, "cluster"),
        (1, 2**19, "split"),
        (2, 2**19, "cluster"),
        (131, 2**20, "split"),
        (132, 2**20, "cluster"),
    ],
)
def test_fewer_rows_than_multiprocessors_are_shared_out(rows: int, cols: int, variant: str) -> None:
    plan = choose(problem(rows=rows, cols=cols), H200, resident)

    assert plan.variant == variant
    assert plan.grid <= H200.sm_count * 16


@pytest.mark.parametrize(
    ("rows", "cols", "columns", "kernel"),
    [
        (1, 2**20, (2, 2), "row_spread"),
        (8, 2**20, (2, 2), "row_staged"),  # more than registers hold
        (4, 2**24, (2, 2), "row_together"),
        (3, 2**24, (2, 2), "row_staged"),
        (64, 2**24, (), "row_staged"),  # nothing is read for several rows
        (64, 2**23, (2, 2), "row_staged"),  # the chip holds a row
    ],
)
def test_where_a_row_waits_that_the_grid_shares(
    rows: int, cols: int, columns: tuple[int, ...], kernel: str
) -> None:
    plan = choose(dataclasses.replace(problem(rows, cols), columns=columns), H200, resident)

    assert (plan.variant, plan.kernel) == ("split", kernel)


@pytest.mark.parametrize(
    ("rows", "cols", "sizes", "columns", "expected"),
    [
        # parts, block, least_blocks, hoist
        (1, 1 << 16, {"load_bytes": 4, "pack": 4}, (4, 4), (16, 256, 3, 1)),
        (1, 1 << 16, {}, (2,), (16, 256, 4, 1)),
        (16, 1 << 16, {}, (2,), (16, 128, 6, 1)),
        (16, 1 << 16, {}, (), (16, 256, 4, 0)),
        (16, 1 << 17, {}, (2, 2), (16, 128, 5, 0)),  # with more threads not all rows would be in work at once
        (32, 1 << 15, {}, (2, 2), (8, 128, 5, 1)),
        (64, 1 << 16, {}, (2,), (8, 128, 5, 0)),
        (64, 1 << 16, {}, (2, 2), (8, 128, 5, 0)),
        (1, 1 << 17, {"load_bytes": 4, "pack": 4}, (4, 4), (16, 512, 1, 1)),
        # parameters would take a third of the threads
        (64, 1 << 17, {"load_bytes": 4, "pack": 4}, (4,), (16, 256, 3, 0)),
        (1, 1 << 20, {}, (2, 2), (132, 512, 2, 1)),  # the next kernel's blocks have room beside these
        (1, 1 << 20, {"load_bytes": 4, "pack": 4}, (4, 4), (132, 512, 1, 1)),
        (16, 1 << 20, {}, (2,), (8, 1024, 1, 0)),
        (16, 1 << 20, {}, (2, 2), (16, 512, 2, 0)),
        (16, 1 << 20, {"load_bytes": 4, "pack": 4}, (4, 4), (16, 1024, 1, 0)),
        (1, 1 << 24, {"load_bytes": 4, "pack": 4}, (4, 4), (264, 512, 2, 0)),
        (16, 1 << 24, {}, (2,), (132, 512, 1, 0)),
    ],
)
def test_few_rows_have_the_blocks_and_parameters_that_were_measured(
    rows: int, cols: int, sizes: dict[str, int], columns: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    kind = dataclasses.replace(problem(rows, cols, **sizes), columns=columns)
    plan = choose(kind, H200, lambda plan: H200.sm_count if plan.cluster > 1 else plan.least_blocks)

    assert (plan.parts, plan.block, plan.least_blocks, plan.hoist) == expected


def test_blocks_that_wait_for_one_another_are_no_more_than_the_device_runs() -> None:
    for rows in (1, 7, 64, 131):
        plan = choose(problem(rows=rows, cols=2**22), H200, resident, "split")

        assert plan.grid % plan.parts == 0
        assert plan.grid <= H200.sm_count * plan.resident_blocks


@pytest.mark.parametrize("compute_bytes", [4, 8])
def test_blocks_that_share_a_row_keep_what_their_letters_replace(compute_bytes: int) -> None:
    """In place those lie where x was: what is not kept of it would be read again."""
    wide = problem(rows=64, cols=2**20, compute_bytes=compute_bytes)
    chosen = choose(wide, H200, resident, "split")

    taken = []
    for kept_bytes in range(0, 20 << 10, 16):
        with contextlib.suppress(DoesNotFitError):
            taken.append(choose(wide, H200, resident, dataclasses.replace(chosen, kept_bytes=kept_bytes)))

    assert taken
    assert all(plan.kept_bytes >= plan.parts * 8 * compute_bytes + 16 for plan in taken)
    elsewhere = dataclasses.replace(wide, pack=1, widest=8, peel=2, period=8)  # x is not where y is
    assert choose(elsewhere, H200, resident, "split").kept_bytes == 0


@pytest.mark.parametrize("cols", [95, 97, 1023, 1025, 5001, 16383])
@pytest.mark.parametrize("peel", [1, 2])
def test_rows_that_begin_anywhere_have_the_widest_packs(cols: int, peel: int) -> None:
    odd = dataclasses.replace(problem(cols=cols, pack=1), widest=8, peel=peel, period=8)
    plan = choose(odd, H200, resident)

    assert plan.pack == (8 if cols >= 96 else 1)
    assert plan.peel == (peel if cols >= 96 else 0)
    if plan.peel:
        assert plan.group >= 14  # one for each element around the packs
        assert plan.group * plan.packs >= cols // 8
        assert plan.group * (plan.packs - 1) <= (cols - 7) // 8  # only a thread's last pack may be missing


@pytest.mark.parametrize(
    ("cols", "columns", "packs", "group"),
    [
        (264, (), 3, 16),
        (600, (), 3, 32),
        (600, (2,), 3, 32),
        (1000, (), 2, 64),
        (1000, (2, 2), 4, 32),
        (1000, (4, 4), 4, 32),
        (3000, (2, 2), 6, 64),
        (1024, (2, 2), 4, 32),
        (768, (2, 2), 3, 32),
    ],
)
def test_ragged_rows_leave_few_threads_without_a_pack(
    cols: int, columns: tuple[int, ...], packs: int, group: int
) -> None:
    plan = choose(dataclasses.replace(problem(cols=cols), columns=columns), H200, resident)

    assert (plan.packs, plan.group) == (packs, group)


@pytest.mark.parametrize(
    ("cols", "rows", "columns", "expected"),
    [
        (768, 8192, (2, 2), (3, 32, 1, 1)),
        (768, 8192, (4, 4), (3, 32, 1, 0)),
        (32, 49152, (2, 2), (2, 2, 1, 1)),
        (64, 49152, (2, 2), (1, 8, 4, 4)),
        (64, 1000, (2, 2), (2, 4, 1, 1)),
        (256, 49152, (2, 2), (2, 16, 2, 1)),
        (1024, 49152, (2, 2), (4, 32, 1, 1)),
        (1024, 49152, (4, 4), (2, 64, 1, 0)),
        (1024, 1000, (2, 2), (2, 64, 1, 1)),
        (1024, 49152, (2,), (2, 64, 1, 1)),
    ],
)
def test_full_rows_with_parameters_of_their_type(
    cols: int, rows: int, columns: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    plan = choose(dataclasses.replace(problem(cols=cols), rows=rows, columns=columns), H200, resident)

    assert (plan.packs, plan.group, plan.rows_per_group, plan.hoist) == expected


@pytest.mark.parametrize(
    ("cols", "columns", "pack"),
    [
        (255, (), 1),
        (257, (), 4),
        (4095, (4,), 1),
        (4097, (4,), 4),
        (2303, (4, 4), 1),
        (2305, (4, 4), 4),
        (50257, (4, 4), 4),
    ],
)
def test_accesses_of_4_bytes_are_kept_but_for_long_rows(
    cols: int, columns: tuple[int, ...], pack: int
) -> None:
    odd = dataclasses.replace(problem(cols=cols, pack=1, load_bytes=4), widest=4, peel=1, period=4)

    assert choose(dataclasses.replace(odd, columns=columns), H200, resident).pack == pack


@pytest.mark.parametrize(
    ("cols", "variant"),
    [(2816, "cached"), (2944, "block"), (3000, "block"), (28672, "cached")],
)
@pytest.mark.parametrize("columns", [(), (2,)])
def test_rows_that_fill_no_whole_warps_are_not_read_again(
    cols: int, variant: str, columns: tuple[int, ...]
) -> None:
    assert choose(dataclasses.replace(problem(cols=cols), columns=columns), H200, resident).variant == variant


@pytest.mark.parametrize("load_bytes", [2, 4])
@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("peel", [0, 1])
def test_of_what_a_cluster_holds_in_registers_the_last_pack_alone_is_missing(
    load_bytes: int, parameters: int, peel: int
) -> None:
    pack, seen = 16 // load_bytes, set()
    for cols in range(13000, 300000, 987):
        each = problem(cols=cols // pack * pack + peel, pack=1 if peel else pack, load_bytes=load_bytes)
        each = dataclasses.replace(each, columns=(load_bytes,) * parameters, peel=peel, widest=pack, period=1)
        plan = choose(each, H200, resident)
        if plan.variant != "cluster" or not plan.group:
            continue
        seen.add(plan.parts)
        packs, own = (cols // pack * pack + peel) // pack, plan.group * plan.packs
        assert plan.parts * own >= packs, cols
        assert (packs - peel) // plan.parts >= own - plan.group, cols
        assert plan.full == (plan.parts * own == packs and not peel), cols
    assert seen or not parameters


def test_clusters_fill_the_registers_and_the_shared_memory_of_a_multiprocessor() -> None:
    for cols, parameters in ((36864, 2), (50304, 2), (80000, 2), (128256, 2), (200000, 1)):
        each = dataclasses.replace(problem(cols=cols), columns=(2,) * parameters)
        plan = choose(each, H200, resident)
        assert plan.variant == "cluster", cols
        more = plan.shared_bytes * (plan.least_blocks + 1) > 0.9 * H200.shared_bytes_per_sm
        assert more or (plan.least_blocks + 1) * plan.block * 96 > H200.registers_per_sm, cols


def test_parameters_stay_on_chip_where_clusters_go_through_rows() -> None:
    plan = choose(dataclasses.replace(problem(cols=65536), columns=(2, 2)), H200, resident)

    assert (plan.variant, plan.hoist, plan.stages, plan.claims) == ("cluster", 2, 1, True)
    assert plan.shared_bytes <= H200.shared_bytes_per_block
    assert plan.waves <= 1


@pytest.mark.parametrize("compute_bytes", [4, 8])
@pytest.mark.parametrize("pack", [1, 2, 4])
def test_every_width_is_covered_exactly_once(pack: int, compute_bytes: int) -> None:
    for cols in range(pack, 4100 * pack, pack):
        plan = choose(problem(cols=cols, pack=pack, compute_bytes=compute_bytes), H200, resident)
        packs = cols // pack
        if plan.variant not in ("warp", "block"):
            assert cols * max(2, compute_bytes if compute_bytes == 8 else 2) > 32 << 10, (
                cols
            )  # registers have run out
            continue

        assert plan.group * plan.packs >= packs, cols
        assert plan.group * (plan.packs - 1) < packs, cols  # only the last pack of a thread may be missing
        assert plan.full == (plan.group * plan.packs == packs), cols
        assert plan.block % 32 == 0, cols
        assert plan.block % plan.group == 0, cols
        assert plan.packs * plan.pack <= (32 if compute_bytes == 4 else 16), cols


@pytest.mark.parametrize(("cols", "period"), [(1501, 8), (3001, 8), (3002, 4)])
def test_rows_that_a_group_goes_through_begin_alike(cols: int, period: int) -> None:
    odd = dataclasses.replace(
        problem(rows=8192, cols=cols, pack=16 // 2 // period), widest=8, peel=1, period=period, columns=(2, 2)
    )
    plan = choose(odd, H200, resident)

    assert plan.persistent
    groups = plan.grid // plan.parts * (1 if plan.parts > 1 else plan.block // plan.group)
    assert groups % period == 0
    unknown = choose(dataclasses.replace(odd, period=0), H200, resident)
    assert not unknown.persistent
    with pytest.raises(DoesNotFitError):
        choose(dataclasses.replace(odd, period=0), H200, resident, plan)


def test_where_rows_are_many_a_block_holds_few_of_those_that_begin_anywhere() -> None:
    odd = dataclasses.replace(problem(cols=1501, pack=1), widest=8, peel=1, period=8, columns=(2, 2))

    persistent = {
        rows: choose(dataclasses.replace(odd, rows=rows), H200, resident).persistent for rows in (8192, 49152)
    }

    assert persistent == {8192: True, 49152: False}


@pytest.mark.parametrize(("cols", "columns", "wide"), [(601, (2, 2), False), (203, (4, 4), True)])
def test_parameters_as_numbers_take_room_behind_each_pack(
    cols: int, columns: tuple[int, ...], wide: bool
) -> None:
    """A number of each parameter for every column, of 8 bytes in all, and as much behind each pack."""
    pack = 4 if wide else 8
    odd = dataclasses.replace(
        problem(rows=8192, cols=cols, pack=1),
        load_bytes=max(columns),
        widest=pack,
        peel=1,
        period=pack,
        columns=columns,
    )
    plan = choose(odd, H200, resident)

    assert (plan.hoist, plan.persistent) == (4, False)
    assert plan.shared_bytes == math.ceil((cols + cols // pack) * 8 / 16) * 16
    beside = dataclasses.replace(odd, fused=True, direct=False, beside=(max(columns),))
    assert choose(beside, H200, resident).hoist != 4
    with pytest.raises(DoesNotFitError):
        choose(beside, H200, resident, plan)


def test_shared_takes_threads_that_fill_the_multiprocessor_beside_its_rows() -> None:
    blocks = {
        cols: choose(problem(cols=cols), H200, resident, "shared").block for cols in (8192, 32768, 100000)
    }

    assert blocks == {8192: 128, 32768: 256, 100000: 1024}
    assert choose(problem(rows=132, cols=8192), H200, resident, "shared").block == 1024


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
        {"parts": 2},
        {"variant": "cluster", "parts": 3},
        {"variant": "cluster", "parts": 2, "rows_per_group": 2},
        {"hoist": 2},
        {"hoist": 4},
        {"kept_bytes": 4096},
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


MASKED = dataclasses.replace(problem(), fused=True, beside=(1,), direct=False, stored=2)
SUM = dataclasses.replace(problem(), fused=True, columns=(2, 2), beside=(2, 2), direct=False, stored=2)
TO_BYTES = dataclasses.replace(problem(), fused=True, columns=(2, 2), stored=1)


def test_what_is_loaded_with_a_row_leaves_a_thread_less_of_it() -> None:
    def held(**change: object) -> int:
        plan = choose(dataclasses.replace(MASKED, **change), H200, resident)  # type: ignore[arg-type]
        return plan.packs * plan.pack

    assert [held(beside=beside) for beside in ((), (1,), (2,), (2, 2))] == [32, 16, 16, 16]


@pytest.mark.parametrize(
    ("kind", "cols", "expected"),
    [
        (SUM, 1024, (8, 2, 64, True)),
        (SUM, 768, (8, 3, 32, True)),  # half the threads hold the row without a gap
        (SUM, 5120, (8, 4, 160, True)),  # nor do 5 warps leave one
        (SUM, 1000, (8, 4, 32, False)),  # of as many places those of the fewest threads
        (SUM, 3000, (8, 3, 128, False)),  # nor those, where a thread has three packs already
        (MASKED, 1000, (8, 4, 32, False)),
        (TO_BYTES, 5120, (8, 4, 160, True)),
        (TO_BYTES, 3072, (8, 4, 96, True)),  # nor do three, of more packs a thread
        # of parameters in 32 bits no access is left half to the next thread, but where they wait for all rows
        (dataclasses.replace(SUM, columns=(4, 4), beside=(2, 4)), 768, (4, 6, 32, True)),
        (dataclasses.replace(TO_BYTES, columns=(4, 4)), 768, (8, 3, 32, True)),
    ],
)
def test_a_fused_row_leaves_few_places_empty(
    kind: Problem, cols: int, expected: tuple[int, int, int, bool]
) -> None:
    plan = choose(dataclasses.replace(kind, cols=cols, rows=49152), H200, resident)

    assert (plan.pack, plan.packs, plan.group, plan.full) == expected


@pytest.mark.parametrize(
    ("change", "device", "threads"),
    [
        ({}, "h200", 1024),
        ({"others": 14}, "h200", 896),  # registers are then estimated
        ({"cols": 1008}, "h200", 640),
        ({}, "a100", 768),
    ],
)
def test_registers_follow_what_was_compiled_only_where_it_was(
    change: dict[str, Any], device: str, threads: int
) -> None:
    kind = dataclasses.replace(SUM, **{"cols": 1024, "rows": 49152, "others": 13, **change})
    plan = choose(kind, RECORDED[device], resident)

    assert plan.least_blocks * plan.block == threads


def test_a_sum_that_is_kept_is_held_otherwise() -> None:
    alone = choose(dataclasses.replace(SUM, cols=4096, rows=49152), H200, resident)
    kept = choose(dataclasses.replace(SUM, cols=4096, rows=49152, results=2), H200, resident)

    assert (alone.block, kept.block) == (128, 256)


@pytest.mark.parametrize(("results", "block"), [(1, 256), (2, 512)])
def test_a_scale_of_each_row_wants_more_threads(results: int, block: int) -> None:
    plan = choose(dataclasses.replace(TO_BYTES, cols=8192, rows=49152, results=results), H200, resident)

    assert (plan.block, plan.hoist, plan.stages) == (block, 2, 1)


def test_rows_to_bytes_go_through_blocks_unless_something_is_computed_on_the_way() -> None:
    plan = choose(TO_BYTES, H200, resident)
    added = dataclasses.replace(TO_BYTES, beside=(2,), direct=False)

    assert (plan.hoist, plan.stages, plan.grid) == (3, 1, plan.resident_blocks * H200.sm_count)
    assert not choose(added, H200, resident).persistent
    assert choose(added, H200, resident, plan).stages == 1  # which whoever asks for it may have


@pytest.mark.parametrize("kind", [MASKED, SUM, TO_BYTES], ids=["masked", "sum", "to bytes"])
@pytest.mark.parametrize(("load_bytes", "pack"), [(2, 8), (2, 1), (4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("device", ["h200", "t4"])
def test_fused_rows_are_covered_exactly_once(kind: Problem, load_bytes: int, pack: int, device: str) -> None:
    sizes = {"load_bytes": load_bytes, "compute_bytes": max(4, load_bytes), "pack": pack}
    for cols in (*range(pack, 600 * pack, pack), *(1 << power for power in range(10, 24))):
        plan = choose(
            dataclasses.replace(kind, cols=cols, **sizes), RECORDED[device], lambda plan: plan.least_blocks
        )
        if plan.group:
            assert plan.group * plan.packs * plan.parts >= cols // pack, cols
            assert plan.full == (plan.group * plan.packs * plan.parts == cols // pack), cols
            assert plan.packs * plan.pack * plan.rows_per_group <= 32, cols
            assert plan.block % plan.group == 0, cols
        assert plan.block * plan.least_blocks <= RECORDED[device].threads_per_sm, cols


def test_the_cache_takes_no_more_columns_than_its_kernel_counts() -> None:
    assert choose(problem(cols=2**31 - 8), H200, resident, "cached").variant == "cached"
    with pytest.raises(DoesNotFitError, match="cannot hold a row of 2147483648 columns"):
        choose(problem(cols=2**31), H200, resident, "cached")


@pytest.mark.parametrize("period", [8, 0])
@pytest.mark.parametrize("columns", [(2,), (2, 2), (4, 4)])
@pytest.mark.parametrize("cols", [20001, 50257, 100003])
def test_wide_rows_that_begin_anywhere_are_claimed(cols: int, columns: tuple[int, ...], period: int) -> None:
    """A block has numbers of its part's columns, wherever a row begins; where x begins elsewhere than y nothing is on its way."""
    odd = dataclasses.replace(
        problem(rows=8192, cols=cols, pack=1), widest=8, peel=1, period=period, columns=columns
    )
    plan = choose(odd, H200, resident)

    assert (plan.variant, plan.hoist, plan.claims) == ("cluster", 4, True)
    line, least = 64, (cols - 63) // 64 // plan.parts * 8  # elements; packs of the smallest part
    assert plan.group >= line - 1
    assert plan.group * (plan.packs - 1) <= least
    assert not choose(dataclasses.replace(odd, peel=2), H200, resident).claims


def test_where_there_are_no_clusters_a_block_goes_through_wide_rows_that_begin_alike() -> None:
    odd = problem(rows=49152, cols=20375, pack=1)
    odd = dataclasses.replace(odd, widest=8, peel=1, period=8, columns=(2, 2))

    plan = choose(odd, RECORDED["a100"], resident)

    assert (plan.variant, plan.hoist, plan.stages, plan.claims) == ("block", 2, 1, False)


@pytest.mark.parametrize(("rows", "block"), [(2111, 128), (2112, 512)])
def test_blocks_of_many_rows_are_for_rows_that_fill_the_device(rows: int, block: int) -> None:
    odd = dataclasses.replace(
        problem(rows=rows, cols=1023, pack=1), widest=8, peel=1, period=8, columns=(2, 2)
    )

    assert choose(odd, H200, resident).block == block


@pytest.mark.parametrize("peel", [0, 1, 2])
def test_wide_rows_of_doubles_wait_in_registers_of_a_cluster_wherever_they_begin(peel: int) -> None:
    doubles = problem(rows=8192, cols=20001 if peel else 20000, pack=1 if peel else 2, load_bytes=8)
    doubles = dataclasses.replace(doubles, compute_bytes=8, widest=2, peel=peel)

    plan = choose(doubles, H200, resident)

    assert (plan.variant, plan.stages, plan.group) == ("cluster", 0, plan.block)


def test_more_rows_than_can_be_counted_are_not_claimed() -> None:
    each = dataclasses.replace(problem(cols=65536), columns=(2, 2))

    assert choose(each, H200, resident).claims
    assert not choose(dataclasses.replace(each, rows=2**30 + 1), H200, resident).claims
