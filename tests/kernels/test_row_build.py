"""Every op x variant x dtype compiles for every architecture, without a device, and the assembler found it good.

Good is: nothing in local memory (no spill, no stack frame), and packs are moved by one instruction each, 16 bytes
wide where the vector is. A kernel that spills still gives right numbers, so nothing but this notices.

There are thousands of them, and a third of a second of the compiler's each. So each test compiles a sample in which all
ops, dtypes and kinds of plans meet in pairs (sampling.covering), and all of them with CUPYNORM_SLOW=1.
"""

from __future__ import annotations

import functools
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
    Called,
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
    registers,
    same_types,
    sampled,
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
FEW_OPS = OPS if SLOW else tuple(each for each in OPS if each is not LOG_SOFTMAX)

# Of what is fused bfloat16 differs from float16 in its conversions.
FUSED_DTYPES = [each for each in DTYPES if each != "bfloat16"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FUSED)
def kind(request: pytest.FixtureRequest) -> str:
    """Give a fused call. The module's, so that tests of one call follow each other: they share plans and kernels."""
    if (
        not SLOW
    ):  # all samples of it in one module: compiler and disassembler need as long to start as for two kernels
        samples = (
            rows_that_the_grid_shares(),
            all_that_is_fused(),
            clusters_of_unaligned_rows(),
            rows_that_are_sent_ahead("90"),
        )
        wanted = {each.instance for sample in samples for each in sample if each.name == request.param}
        for _ in compile_instances(sorted(wanted, key=lambda each: each.expression), "90", newest_major()):
            pass
    return str(request.param)


class Built(NamedTuple):
    """What one kernel came out as."""

    instance: Instance
    faults: tuple[str, ...]
    instructions: int

    def __str__(self) -> str:
        plan, types = self.instance.plan, self.instance.types
        return f"{plan.variant} {plan.template} {', '.join(filter(None, types))}: {'; '.join(self.faults)}"


def build(op: RowOp, sample: Iterable[Called], arch: str, major: int) -> list[Built]:
    """Compile those of a sample that are of one op."""
    if major not in nvrtc.majors():
        pytest.skip(f"NVRTC {major} is not installed")
    if arch not in nvrtc.supported_archs(major):
        pytest.skip(f"NVRTC {major} does not know sm_{arch}")
    instances = [each.instance for each in sample if each.name == op.name]
    assert instances
    built = []
    for instance, kernel in compile_instances(instances, arch, major):
        code = code_of(kernel, arch)
        faults = spills(kernel) + narrow_accesses(op, instance, code)
        faults += begins_too_soon(code, arch) + stalls_a_cluster(code, arch)
        # messages lie in `out`: who writes there meanwhile must not stop the device
        faults += endless_waits(kernel)
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


@functools.cache
def of_every_variant(arch: str) -> list[Called]:
    ops = OPS if arch in {"70", "75"} else FEW_OPS
    return sampled(Called(op.name, each) for op in ops for each in widest_instances(op, same_types(op), arch))


@pytest.mark.parametrize("op", OPS, ids=named)
@pytest.mark.parametrize(("major", "arch"), TARGETS)
def test_every_variant_and_dtype_neither_spills_nor_splits_vectors(op: RowOp, major: int, arch: str) -> None:
    if op is LOG_SOFTMAX and arch not in {"70", "75"} and not SLOW:
        pytest.skip("as softmax but for its last line: set CUPYNORM_SLOW=1")
    sample = of_every_variant(arch)
    variants = [each for each in VARIANTS if each != "cluster" or int(arch) >= HOPPER]
    assert {each.instance.plan.variant for each in sample if each.name == op.name} == set(variants)
    assert {(each.instance.plan.variant, each.instance.types.x) for each in sample} == set(
        itertools.product(variants, DTYPES)
    )
    assert {"row_spread", "row_staged"} <= kernels_of_split_rows(sample)

    built = build(op, sample, arch, major)

    assert_good(built)


def kernels_of_split_rows(sample: Iterable[Called]) -> set[str]:
    """Name the kernels whose blocks wait for messages in device memory."""
    return {each.instance.plan.kernel for each in sample if each.instance.plan.variant == "split"}


@functools.cache
def of_every_kind() -> list[Called]:
    found = []
    for op in FEW_OPS:
        # bfloat16 differs from float16 in how it is converted
        types = [each for each in same_types(op) if SLOW or each.x != "bfloat16"]
        widest = widest_instances(op, types, "90", extremes)
        others = [each for each in all_instances(op, types, "90", tightest) if each not in widest]
        found += [Called(op.name, each) for each in (*widest, *others)]
    return sampled(
        found,
        lambda each: each.plan.vector,
        lambda each: each.plan.parameter_cache,
        lambda each: each.plan.stages > 0,
        lambda each: registers(each.plan).bit_length(),
        lambda each: each.plan.rows_per_group,
        each=lambda instance: registers(instance.plan),
    )


@pytest.mark.parametrize("op", FEW_OPS, ids=named)
def test_every_kind_of_plan_and_every_vector_width_neither_spills_nor_splits_vectors(op: RowOp) -> None:
    sample = of_every_kind()
    assert {each.instance.plan.vector for each in sample if each.name == op.name} >= {1, 2, 4}
    assert {"row_spread", "row_staged"} <= kernels_of_split_rows(sample)

    built = build(op, sample, "90", newest_major())

    assert_good(built)


@functools.cache
def of_mixed_types() -> list[Called]:
    found = []
    for op in FEW_OPS:
        # every second pair of types, all that leave a parameter out
        calls = [each for i, each in enumerate(mixed_types(op)) if SLOW or each.x == each.y or i % 2 == 0]
        found += [Called(op.name, each) for each in widest_instances(op, calls, "90")]
    return sampled(found, lambda each: each.types[2:])


@pytest.mark.parametrize("op", FEW_OPS, ids=named)
def test_mixed_types_and_absent_parameters_neither_spill_nor_split_vectors(op: RowOp) -> None:
    built = build(op, of_mixed_types(), "90", newest_major())

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

    wide = [Called(op.name, each) for each in widest_instances(op, halves, "90", full_rows)]

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


def fused_candidates(
    instances: Callable[[str, str], Iterable[Instance]], kinds: Iterable[str], dtypes: Sequence[str]
) -> Iterable[Called]:
    """Lower fused calls of each kind and dtype."""
    return (
        Called(kind, each)
        for kind, dtype in itertools.product(kinds, dtypes)
        for each in instances(kind, dtype)
    )


def build_fused(
    kind: str, arch: str, sample: Iterable[Called], *, splits: bool = True, shared_bytes: int | None = None
) -> list[Built]:
    """Compile those of a sample that are of one kind; `splits`: look for vectors that are not moved at once."""
    instances = [each.instance for each in sample if each.name == kind]
    assert instances
    built = []
    for instance, kernel in compile_instances(instances, arch, newest_major()):
        code = code_of(kernel, arch)
        faults = spills(kernel) + (narrow_loads(instance, code) if splits else [])
        faults += begins_too_soon(code, arch) + stalls_a_cluster(code, arch) + endless_waits(kernel)
        if shared_bytes is not None and kernel.shared_bytes > shared_bytes:
            faults.append(f"{kernel.shared_bytes} bytes of static shared memory")
        built.append(Built(instance, tuple(faults), len(code.instructions)))
    return built


def of_shared_rows(plans: Iterable[Plan]) -> list[Plan]:
    return extremes(each for each in plans if each.variant == "split")


@functools.cache
def rows_that_the_grid_shares() -> list[Called]:
    return sampled(
        fused_candidates(
            lambda kind, dtype: fused_instances(kind, dtype, "90", of_shared_rows), FUSED, FUSED_DTYPES
        ),
        lambda each: registers(each.plan),
        each=lambda instance: (instance.plan.block, instance.plan.min_blocks),
    )


def test_fused_rows_that_the_grid_shares_neither_spill_nor_wait_without_end(kind: str) -> None:
    """Messages lie in `out`, here too; rows that begin at vectors, and rows that begin anywhere."""
    sample = rows_that_the_grid_shares()
    met = {(each.name, each.instance.plan.kernel, each.instance.plan.unaligned) for each in sample}
    assert {each[1:] for each in met if each[0] == kind} == {("row_reread", 0), ("row_reread", 1)}

    built = build_fused(kind, "90", sample, splits=False)

    assert_good(built)


@functools.cache
def all_that_is_fused() -> list[Called]:
    choice = extremes if SLOW else tightest
    dtypes = DTYPES if SLOW else FUSED_DTYPES
    return sampled(
        fused_candidates(lambda kind, dtype: fused_instances(kind, dtype, "90", choice), FUSED, dtypes)
    )


def test_what_is_fused_neither_spills_nor_splits_vectors(kind: str) -> None:
    built = build_fused(kind, "90", all_that_is_fused())

    assert {each.instance.plan.variant for each in built} == set(VARIANTS)
    assert_good(built)


@functools.cache
def clusters_of_unaligned_rows() -> list[Called]:
    return sampled(
        fused_candidates(
            lambda kind, dtype: narrow_clusters(kind, dtype, "90", tightest), FUSED, FUSED_DTYPES
        )
    )


def test_fused_clusters_of_rows_that_fill_no_vectors_do_not_spill(kind: str) -> None:
    sample = clusters_of_unaligned_rows()
    plans = [each.instance.plan for each in sample if each.name == kind]
    assert {each.variant for each in plans} == {"cluster"}
    assert all(each.unaligned or each.vector == 1 for each in plans)

    built = build_fused(kind, "90", sample, splits=False)

    assert_good(built)


@functools.cache
def rows_that_are_sent_ahead(arch: str) -> list[Called]:
    # rows of float64 are not sent ahead
    dtypes = [each for each in FUSED_DTYPES if each != "float64"]
    found = [
        each
        for i, kind in enumerate(FUSED)
        for each in fused_candidates(
            lambda kind, dtype: ahead_instances(kind, dtype, arch),
            [kind],
            dtypes if SLOW else [dtypes[i % 2]],
        )
    ]
    return sampled(found, lambda each: each.plan.vectors)


@pytest.mark.parametrize("arch", ["90", *(["100", "120"] if SLOW else [])])
def test_fused_rows_that_are_sent_ahead_neither_spill_nor_take_more_shared_memory_than_is_kept_for_it(
    kind: str, arch: str
) -> None:
    sample = rows_that_are_sent_ahead(arch)
    assert {each.instance.plan.unaligned for each in sample if each.name == kind} == {0, 1}

    built = build_fused(kind, arch, sample, splits=False, shared_bytes=STATIC_SHARED_BYTES)

    assert_good(built)


@pytest.mark.skipif(not SLOW, reason="minutes for each architecture: set CUPYNORM_SLOW=1")
@pytest.mark.parametrize("arch", ["75", "80", "89", "120"])
def test_what_is_fused_neither_spills_nor_splits_vectors_elsewhere(kind: str, arch: str) -> None:
    sample = fused_candidates(
        lambda kind, dtype: fused_instances(kind, dtype, arch, tightest), [kind], DTYPES
    )
    assert_good(build_fused(kind, arch, sample))
