"""Every op x variant x dtype compiles for every architecture, without a device, and the assembler found it good.

Good is: nothing in local memory (no spill, no stack frame), and packs are moved by one instruction each, 16 bytes
wide where the vector is. A kernel that spills still gives right numbers, so nothing but this notices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pytest

from cupynorm._dtypes import DTYPES
from cupynorm.lower.row import RowOp
from cupynorm.ops.softmax import LOG_SOFTMAX
from cupynorm.plan.config import CONVERTED, HOPPER, VARIANTS, Plan
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.runtime import nvrtc
from tests import SLOW
from tests.build_gate import (
    FUSED,
    OPS,
    Instance,
    ahead_instances,
    all_instances,
    begins_too_soon,
    code_of,
    compile_instances,
    crowded_instances,
    endless_waits,
    extremes,
    fused_instances,
    mixed_types,
    narrow_accesses,
    narrow_clusters,
    narrow_loads,
    nvdisasm,
    same_types,
    spills,
    stalls_a_cluster,
    tightest,
    widest_instances,
)

# NVRTC's major and architecture. CUDA 13 has dropped sm_70; most of those who call have a 12, so it builds the common
# ones too. sm_90's plans are all in the tests behind the first. Log-softmax differs from softmax in its last line:
# the rest of it, and architectures beside these, with CUPYNORM_SLOW=1.
TARGETS = (
    *((13, arch) for arch in ("80", "120", *(("75", "86", "89", "90", "100") if SLOW else ()))),
    *((12, arch) for arch in ("70", *(("80", "90") if SLOW else ()))),
)

# Of what is fused bfloat16 differs from float16 in its conversions.
FUSED_DTYPES = [each for each in DTYPES if each != "bfloat16"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FUSED)
def kind(request: pytest.FixtureRequest) -> str:
    """Give a fused call. The module's, so that tests of one call follow each other: they share plans and kernels."""
    return str(request.param)


class Built(NamedTuple):
    """What one kernel came out as."""

    instance: Instance
    faults: tuple[str, ...]
    instructions: int

    def __str__(self) -> str:
        plan, types = self.instance.plan, self.instance.types
        return f"{plan.variant} {plan.template} {', '.join(filter(None, types))}: {'; '.join(self.faults)}"


def build(op: RowOp, instances: Sequence[Instance], arch: str, major: int) -> list[Built]:
    if major not in nvrtc.majors():
        pytest.skip(f"NVRTC {major} is not installed")
    if arch not in nvrtc.supported_archs(major):
        pytest.skip(f"NVRTC {major} does not know sm_{arch}")
    built = []
    for instance, kernel in compile_instances(instances, arch, major):
        code = code_of(kernel, arch)
        faults = spills(kernel) + narrow_accesses(op, instance, code)
        faults += begins_too_soon(code, arch) + stalls_a_cluster(code, arch)
        built.append(Built(instance, tuple(faults), len(code.instructions)))
    return built


def assert_good(built: Sequence[Built]) -> None:
    faulty = [str(each) for each in built if each.faults]
    assert not faulty, f"{len(faulty)} of {len(built)} kernels:\n" + "\n".join(faulty)


def named(op: RowOp) -> str:
    return op.name


def newest_major() -> int:
    if not nvrtc.majors():
        pytest.skip("NVRTC is not installed")
    return nvrtc.majors()[0]


def elements(instance: Instance) -> int:
    """What a thread works on in one turn."""
    return instance.plan.vector * instance.plan.vectors * instance.plan.rows_per_group


@pytest.mark.parametrize("op", OPS, ids=named)
@pytest.mark.parametrize(("major", "arch"), TARGETS)
def test_every_variant_and_dtype_neither_spills_nor_splits_vectors(op: RowOp, major: int, arch: str) -> None:
    if op is LOG_SOFTMAX and arch not in {"70", "75"} and not SLOW:
        pytest.skip("as softmax but for its last line: set CUPYNORM_SLOW=1")
    instances = widest_instances(op, same_types(op), arch)
    variants = [each for each in VARIANTS if each != "cluster" or int(arch) >= HOPPER]
    assert {(each.plan.variant, each.types.x) for each in instances} == set(
        itertools.product(variants, DTYPES)
    )

    built = build(op, instances, arch, major)

    assert_good(built)


@pytest.mark.parametrize("op", OPS if SLOW else [each for each in OPS if each is not LOG_SOFTMAX], ids=named)
def test_every_kind_of_plan_and_every_vector_width_neither_spills_nor_splits_vectors(op: RowOp) -> None:
    # bfloat16 differs from float16 in how it is converted
    types = [each for each in same_types(op) if SLOW or each.x != "bfloat16"]
    widest = widest_instances(op, types, "90", extremes)
    others = [each for each in all_instances(op, types, "90", tightest) if each not in widest]
    assert {each.plan.vector for each in others} >= {1, 2, 4}

    built = build(op, [*widest, *others], "90", newest_major())

    assert_good(built)


@pytest.mark.parametrize("op", OPS if SLOW else [each for each in OPS if each is not LOG_SOFTMAX], ids=named)
def test_mixed_types_and_absent_parameters_neither_spill_nor_split_vectors(op: RowOp) -> None:
    # every second pair of types, all that leave a parameter out
    calls = [each for i, each in enumerate(mixed_types(op)) if SLOW or each.x == each.y or i % 2 == 0]
    built = build(op, widest_instances(op, calls, "90"), "90", newest_major())

    assert_good(built)


# Converted parameters are put into shared memory once for all rows of a block, which this counts for one.
@pytest.mark.parametrize(
    ("converted", "most"), [(False, 19), (True, 21)], ids=["own parameters", "converted parameters"]
)
@pytest.mark.parametrize("op", OPS, ids=named)
def test_16_bit_rows_leave_the_copy_rate_in_reach(op: RowOp, converted: bool, most: int) -> None:
    # an H200 issues 31 instructions an element while 4 bytes of it pass at copy rate; 60 % of that is a fair aim
    halves = [types for types in same_types(op) if types.x in {"float16", "bfloat16"}]
    if nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    if converted and len(op.columns) < 2:
        pytest.skip("holds no full rows so")

    def full_rows(found: Iterable[Plan]) -> list[Plan]:
        return tightest(
            each
            for each in found
            if each.variant == "warp" and each.full and (each.parameter_cache == CONVERTED) == converted
        )

    wide = widest_instances(op, halves, "90", full_rows)

    built = build(op, wide, "90", newest_major())

    assert {each.instance.types.x for each in built} == {types.x for types in halves}
    per_element = {each.instance.types.x: each.instructions / elements(each.instance) for each in built}
    assert max(per_element.values()) <= most, per_element


@pytest.mark.parametrize("major", nvrtc.MAJORS)
def test_where_registers_are_fewest_no_nvrtc_spills(major: int) -> None:
    # what one version of the compiler just finds a register for, another does not
    if major not in nvrtc.majors():
        pytest.skip(f"NVRTC {major} is not installed")
    crowded = crowded_instances("90")
    assert {each.plan.block * each.plan.min_blocks for each in crowded} == {1024}

    built = [
        Built(instance, tuple(spills(kernel)), 0)
        for instance, kernel in compile_instances(crowded, "90", major)
    ]

    assert_good(built)


def build_fused(kind: str, arch: str, choice: Callable[[Iterable[Plan]], Iterable[Plan]]) -> list[Built]:
    names = DTYPES if SLOW else FUSED_DTYPES
    instances = [each for name in names for each in fused_instances(kind, name, arch, choice)]
    built = []
    for instance, kernel in compile_instances(instances, arch, newest_major()):
        code = code_of(kernel, arch)
        faults = spills(kernel) + narrow_loads(instance, code)
        faults += begins_too_soon(code, arch) + stalls_a_cluster(code, arch)
        built.append(Built(instance, tuple(faults), len(code.instructions)))
    return built


@pytest.mark.parametrize("op", OPS if SLOW else [each for each in OPS if each is not LOG_SOFTMAX], ids=named)
@pytest.mark.parametrize("arch", ["80", "90"])
def test_whatever_waits_for_a_message_in_device_memory_gives_up_some_time(op: RowOp, arch: str) -> None:
    """Messages lie in `out`: who writes there meanwhile must not stop the device."""
    major = newest_major()

    def waiting(plans: Iterable[Plan]) -> list[Plan]:
        return tightest(each for each in plans if each.variant == "split")

    wanted = [each for each in same_types(op) for each in widest_instances(op, [each], arch, waiting)]
    built = list(compile_instances(wanted, arch, major))
    kernels = {instance.plan.kernel for instance, _ in built}
    faults = {instance.expression: endless_waits(kernel) for instance, kernel in built}

    assert {"row_spread", "row_staged"} <= kernels
    assert not {name: found for name, found in faults.items() if found}


def test_fused_rows_that_the_grid_shares_neither_spill_nor_wait_without_end(kind: str) -> None:
    """Messages lie in `out`, here too; rows that begin at vectors, and rows that begin anywhere."""

    def shared(plans: Iterable[Plan]) -> list[Plan]:
        return extremes(each for each in plans if each.variant == "split")

    instances = []
    for name in FUSED_DTYPES:
        of_dtype = fused_instances(kind, name, "90", shared)
        assert {(each.plan.kernel, each.plan.unaligned) for each in of_dtype} == {
            ("row_reread", 0),
            ("row_reread", 1),
        }
        instances += of_dtype

    built = [
        Built(instance, tuple(spills(kernel) + endless_waits(kernel)), 0)
        for instance, kernel in compile_instances(instances, "90", newest_major())
    ]

    assert_good(built)


def test_what_is_fused_neither_spills_nor_splits_vectors(kind: str) -> None:
    built = build_fused(kind, "90", extremes if SLOW else tightest)

    assert {each.instance.plan.variant for each in built} <= set(VARIANTS)
    assert_good(built)


def test_fused_clusters_of_rows_that_fill_no_vectors_do_not_spill(kind: str) -> None:
    instances = []
    for name in FUSED_DTYPES:
        clusters = narrow_clusters(kind, name, "90", tightest)
        assert {each.plan.variant for each in clusters} == {"cluster"}
        assert all(each.plan.unaligned or each.plan.vector == 1 for each in clusters)
        instances += clusters

    built = [
        Built(instance, tuple(spills(kernel)), 0)
        for instance, kernel in compile_instances(instances, "90", newest_major())
    ]

    assert_good(built)


@pytest.mark.parametrize("arch", ["90", *(["100", "120"] if SLOW else [])])
def test_fused_rows_that_are_sent_ahead_neither_spill_nor_take_more_shared_memory_than_is_kept_for_it(
    kind: str, arch: str
) -> None:
    instances, built = [], []
    sampled = ("float16", "float32")[list(FUSED).index(kind) % 2]
    # rows of float64 are not sent ahead
    for name in [each for each in FUSED_DTYPES if each != "float64"] if SLOW else (sampled,):
        of_dtype = ahead_instances(kind, name, arch)
        assert {each.plan.unaligned for each in of_dtype} == {0, 1}
        instances += of_dtype
    for instance, kernel in compile_instances(instances, arch, newest_major()):
        faults = spills(kernel)
        if kernel.shared_bytes > STATIC_SHARED_BYTES:
            faults.append(f"{kernel.shared_bytes} bytes of static shared memory")
        code = code_of(kernel, arch)
        faults += begins_too_soon(code, arch) + stalls_a_cluster(code, arch)
        built.append(Built(instance, tuple(faults), 0))

    assert_good(built)


@pytest.mark.skipif(not SLOW, reason="minutes for each architecture: set CUPYNORM_SLOW=1")
@pytest.mark.parametrize("arch", ["75", "80", "89", "120"])
def test_what_is_fused_neither_spills_nor_splits_vectors_elsewhere(kind: str, arch: str) -> None:
    assert_good(build_fused(kind, arch, tightest))
