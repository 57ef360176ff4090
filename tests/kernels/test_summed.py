"""Sums over rows in the pass that gives a norm's gradient, on the simulator: every way that a row and its sums lie."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.call import asking
from cupynorm.call.arguments import view
from cupynorm.call.view import View
from cupynorm.invoke import bound_calls, one_kernel, row_ops
from cupynorm.lower import row_groups
from cupynorm.lower.backward import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cupynorm.lower.gradients import Added, Normed, ParameterSums, norm_gradient
from cupynorm.lower.sums import Result, sums_of_groups
from cupynorm.plan.choose import choose
from cupynorm.plan.config import CUT, IN_REGISTERS, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.rules import rules_of
from cupynorm.runtime import nvrtc
from cupynorm.tools import bench
from cupynorm.tools.results import Point
from tests import SLOW, simulator
from tests.build_gate import (
    begins_too_soon,
    code_of,
    compile_together,
    endless_waits,
    spills,
    stalls_a_cluster,
)
from tests.sampling import in_pairs, sample
from tests.simulator import build, cupy, simulated  # noqa: F401  a fixture

ARCHS = (("90", "h200"), *((("80", "a100"), ("75", "t4")) if SLOW else ()))
GATE_COLS = (7, 128, 257, 1024, 3000, 8191, 32768) if SLOW else (128, 1001, 8192)


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut few rows into several groups of several rows; of more than 512 columns, only 8 of them lie interleaved."""
    few = {"max_groups": 16, "min_rows_of_group": 1, "min_elements_of_group": 1, "groups": ((512, 528),)}
    monkeypatch.setattr(row_groups, "NUMBERS", row_groups.NUMBERS._replace(**few))


class Found(NamedTuple):
    """What the kernels gave, as float64, and the plan of the first."""

    dx: Any
    dgamma: Any
    dbeta: Any
    dbias: Any
    plan: Plan


class Given(NamedTuple):
    """What a gradient is taken of."""

    dy: Any
    x: Any
    gamma: Any
    mean: Any
    rstd: Any
    ds: Any

    @staticmethod
    def of(rows: int, cols: int, dtype: str, skip: int = 0) -> Given:
        """Draw arrays whose rows begin `skip` elements behind those of wider ones."""
        rng, kind = np.random.default_rng(rows * cols), dtype_of(dtype)
        compute = compute_dtype(kind, kind)
        dy, x, ds = (rng.standard_normal((rows, cols + skip)).astype(kind)[:, skip:] for _ in range(3))
        gamma = rng.uniform(0.5, 2, cols).astype(kind)
        wide = x.astype(np.float64)
        mean = wide.mean(-1).astype(compute)
        return Given(dy, x, gamma, mean, (1 / np.sqrt(wide.var(-1) + 1e-5)).astype(compute), ds)


def expected(given: Given, *, rms: bool, ds: bool) -> tuple[Any, Any, Any]:
    """Return dx, dgamma and dbeta by the formula."""
    dy, x, gamma, mean, rstd, more = (each.astype(np.float64) for each in given)
    h = (x if rms else x - mean[:, None]) * rstd[:, None]
    g = dy * gamma
    dx = rstd[:, None] * (g - (0 if rms else g.mean(-1, keepdims=True)) - h * (g * h).mean(-1, keepdims=True))
    return dx + (more if ds else 0), (dy * h).sum(0), dy.sum(0)


def run(
    given: Given,
    variant: str | Plan | None,
    *,
    rms: bool = False,
    wanted: str = "dgamma dbeta dbias",
    ds: bool = True,
) -> Found:
    """Launch the gradient with sums of what is wanted, and the sums of all groups."""
    (rows, cols), kind = given.x.shape, given.x.dtype
    compute, kept = compute_dtype(kind, kind), []

    def on_device(host: Any) -> View:
        skip = (host.base.shape[-1] if host.base is not None else cols) - cols if host.ndim > 1 else 0
        wide = cupy.asarray(host if not skip else host.base)
        kept.append(wide)
        return view(wide[:, skip:] if skip else wide)

    def per_row(host: Any) -> View:
        each = on_device(host)
        return View(each.pointer, (rows, cols), (*each.strides, 0), each.dtype)

    dx = cupy.empty(given.x.base.shape if given.x.base is not None else (rows, cols), kind)[:, -cols:]
    groups = row_groups.row_groups(rows, cols)
    names = wanted.split()
    partial = {name: cupy.empty((groups.groups, cols), compute) for name in names}
    for each in partial.values():
        each[...] = np.nan  # what nobody wrote
    results = {name: cupy.empty((cols,), compute) for name in names}
    what = Normed(
        on_device(given.dy),
        on_device(given.x),
        on_device(given.gamma).broadcast_to((rows, cols)),
        None,
        None if rms else per_row(given.mean),
        per_row(given.rstd),
    )
    places = {name: view(each) for name, each in partial.items()}
    of = ParameterSums(groups, *map(places.get, ("dgamma", "dbeta", "dbias")))
    added = Added(on_device(given.ds), 1.0, None, None) if ds else None
    op = RMS_NORM_BACKWARD if rms else LAYER_NORM_BACKWARD
    spec = norm_gradient(op, what, view(dx), 1, compute, added, of)
    plans = []

    def launch(found: Any) -> None:
        plans.append(found.plan)
        once = row_ops.launch_of(found, spec)
        bound_calls.bound_call(0, bound_calls.Arrays({}), [once]).once()

    row_ops.launch_what_fits(0, spec, variant, launch)
    last = sums_of_groups([*places.values()], [Result(view(each)) for each in results.values()])
    one_kernel.bound_call(0, one_kernel.Arrays({}), [one_kernel.prepared(0, last)]).once()
    numbers = {name: each.get().astype(np.float64) for name, each in results.items()}
    found = (numbers.get(name) for name in ("dgamma", "dbeta", "dbias"))
    return Found(dx.get().astype(np.float64), *found, plans[0])


MOST_IN_REGISTERS = 16  # elements of a thread
DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}
SHAPES = [
    (1, 1),
    (3, 7),
    (40, 8),
    (70, 24),
    (33, 77),
    (129, 128),
    (45, 250),
    (50, 257),
    (30, 1000),
    (23, 1001),
    (9, 3000),
]


def assert_right(given: Given, found: Found, dtype: str, *, rms: bool = False, ds: bool = True) -> None:
    dx, dgamma, dbeta = expected(given, rms=rms, ds=ds)
    digits, rows = DIGITS[dtype], float(np.sqrt(len(dx)))
    np.testing.assert_allclose(found.dx, dx, rtol=digits, atol=digits)
    exact = 1e-12 if dtype == "float64" else 2e-5
    for ours, reference in ((found.dgamma, dgamma), (found.dbeta, dbeta), (found.dbias, dx.sum(0))):
        if ours is not None:  # of float16, too: it is added up before it is rounded
            np.testing.assert_allclose(ours, reference, rtol=exact, atol=exact * rows * 4)


WIDTHS = in_pairs(
    SHAPES,
    [*DIGITS] if SLOW else [each for each in DIGITS if each != "bfloat16"],
    (0, 1),
    (None, "warp", "block", "cluster"),
)


@pytest.mark.parametrize("dtype", [each for each in DIGITS if SLOW or each != "bfloat16"])
@pytest.mark.usefixtures("small_groups")
def test_every_width_in_every_variant(dtype: str) -> None:
    seen = set()
    for (rows, cols), _, skip, variant in (each for each in WIDTHS if each[1] == dtype):
        given = Given.of(rows, cols, dtype, skip)
        try:
            found = run(given, variant)
        except DoesNotFitError:
            assert (variant, cols > 200) == ("warp", True) or (variant, dtype, cols) == (
                "block",
                "float64",
                3000,
            )
            continue
        assert_right(given, found, dtype)
        seen.add((found.plan.variant, found.plan.block > found.plan.group))
    assert seen >= {("warp", True), ("block", True), ("cluster", False)}


@functools.cache
def plan_of(rows: int, cols: int, dtype: str, variant: str, ds: bool, really: bool) -> Plan:
    """Return the plan of a call that is launched, unless in a rehearsal; once for all tests, which change it."""
    return run(Given.of(rows, cols, dtype), variant, ds=ds).plan


# Groups may have fewer rows than there are stages, and rows may begin between vectors; with another gradient that is
# added or without. A warp holds no long rows, and copies are of whole vectors.
STAGED = [
    (stages, waits, dtype, shape, variant, ds)
    for (stages, waits), dtype, shape, variant, ds in itertools.product(
        [(1, 0), (2, 0), (3, 0), (1, IN_REGISTERS), (3, IN_REGISTERS)],
        ("float16", "float32"),
        [(3, 8), (129, 128), (50, 257), (60, 1000), (40, 1001)],
        ("warp", "block", "cluster"),
        (True, False),
    )
    if (variant != "warp" or shape[1] < 200) and (dtype == "float16" or shape[1] % 2 == 0)
]
STAGED_CASES = sample(STAGED, lambda each: (each[:2], *each[2:]), lambda each: (each[:2], each[2], each[4]))


@pytest.mark.parametrize(("stages", "waits", "dtype", "shape", "variant", "ds"), STAGED_CASES)
@pytest.mark.usefixtures("small_groups")
def test_rows_on_their_way_in_shared_memory(
    stages: int, waits: int, dtype: str, shape: tuple[int, int], variant: str, ds: bool
) -> None:
    """Rows wait in shared memory, or come through it and wait in registers."""
    given = Given.of(*shape, dtype)
    plan = plan_of(*shape, dtype, variant, ds, build.rehearsed is None)
    assert plan.vector * given.x.itemsize == 16
    assert plan.unaligned == (0 if shape[1] % 2 == 0 else 1)
    if waits and plan.vectors * plan.vector > MOST_IN_REGISTERS:
        plan = dataclasses.replace(plan, vectors=plan.vectors // 2, group=plan.group * 2)
    block = max(plan.group, 128 // plan.group * plan.group)  # several rows of a block, still

    found = run(given, dataclasses.replace(plan, stages=stages, block=block, waits=waits), ds=ds)

    assert_right(given, found, dtype, ds=ds)
    assert (found.plan.stages, found.plan.waits) == (stages, waits)
    assert found.plan.shared_bytes > 0


@pytest.mark.parametrize("wanted", ["dgamma", "dbeta", "dbias", "dgamma dbeta", "dgamma dbias"])
@pytest.mark.usefixtures("small_groups")
def test_any_of_the_sums_is_wanted(wanted: str) -> None:
    for (rows, cols), rms in (((70, 24), True), ((23, 1001), False)):
        given = Given.of(rows, cols, "float16")

        found = run(given, None, rms=rms, wanted=wanted, ds=False)

        assert_right(given, found, "float16", rms=rms, ds=False)
        assert {name for name in ("dgamma", "dbeta", "dbias") if getattr(found, name) is not None} == {
            *wanted.split()
        }


def test_the_bits_do_not_depend_on_how_many_blocks_a_device_holds() -> None:
    bits = set()
    for (rows, cols), sms in itertools.product([(900, 64), (300, 257)], (1, 3, 132)):
        with pytest.MonkeyPatch.context() as patch:
            few = {"max_groups": 40, "min_elements_of_group": 1}
            patch.setattr(row_groups, "NUMBERS", row_groups.NUMBERS._replace(**few))
            patch.setitem(RECORDED, "few", dataclasses.replace(RECORDED["h200"], sm_count=sms))
            simulator.install(patch, "few")
            found = run(Given.of(rows, cols, "float32"), None)
            assert found.plan.grid < row_groups.row_groups(rows, cols).groups or sms > 3
            bits.add(tuple(each.tobytes() for each in found[:4]))
    assert len(bits) == 2  # of two shapes


MEASURED_OPS = [
    "layer_norm_backward",
    "rms_norm_backward",
    "add_layer_norm_backward",
    "layer_norm_backward_from_y",
]


def test_tilings_that_were_measured_as_the_best_are_taken() -> None:
    """By the widest rows of each; a kind of row has one, and one more where a device's memory is fast."""
    taken = set()
    measured = [tuple(each) for each in rules_of("90").column_sums.measured]
    for device, op, dtype in itertools.product(("h100", "h200"), MEASURED_OPS, ("float16", "float32")):
        limits = RECORDED[device]
        for cols in sorted({each[6] - each[4] for each in measured}):
            problem = bench.lowered(Point(op, dtype, 49152, cols), limits=limits).problem
            operands = len(problem.load_operands), len(problem.epilogue_operands)
            kind = problem.load_bytes, problem.column_sums, *operands, problem.unaligned
            of_kind = [
                each
                for each in measured
                if each[:5] == kind and each[5] <= cols <= each[6] and each[-1] << 20 <= limits.l2_bytes
            ]
            if of_kind:
                assert len(of_kind) <= 1 + (of_kind[0][-1] > 0)
                plan = choose(problem, limits, lambda each: each.min_blocks)
                vectors, block, *how, _ = of_kind[0][7:]
                assert (plan.vectors, max(plan.block, block)) == (vectors, block)
                waits = IN_REGISTERS if plan.waits == CUT else plan.waits
                assert [plan.ctas_per_row, plan.stages, plan.min_blocks, waits] == how
                taken.add(of_kind[0])
    assert taken == {*measured}


@pytest.mark.parametrize("rows", [1, 5, 528, 4096, 49152, 1_000_000, 1 << 33])
@pytest.mark.parametrize("cols", [1, 3, 128, 1023, 65535, 65536, 1 << 24])
def test_groups_cover_all_rows(rows: int, cols: int) -> None:
    groups, each, interleaved = row_groups.row_groups(rows, cols)
    unit = (
        row_groups.INTERLEAVED if cols % row_groups.INTERLEAVED or groups % row_groups.INTERLEAVED == 0 else 1
    )
    assert groups % interleaved == interleaved % unit == 0
    assert groups * each >= rows > (groups - unit) * each
    assert interleaved in {groups, row_groups.INTERLEAVED}
    assert groups <= row_groups.NUMBERS.max_groups
    assert each * cols >= min(rows * cols, row_groups.NUMBERS.min_elements_of_group / 2)


def test_few_rows_of_many_columns_have_as_many_groups_as_clusters_go_through_at_once() -> None:
    assert row_groups.row_groups(32, 65536) == (8, 8, 8)
    assert row_groups.row_groups(64, 65536) == (13, 5, 13)
    assert row_groups.row_groups(256, 65536) == (15, 18, 15)
    assert row_groups.row_groups(64, 65535) == (8, 8, 8)
    assert row_groups.row_groups(256, 65535) == (64, 4, 8)
    assert row_groups.row_groups(256, 32768) == (29, 9, 29)
    assert row_groups.row_groups(4096, 40960) == (30, 137, 30)
    assert row_groups.row_groups(4096, 20480) == (120, 35, 8)
    assert row_groups.row_groups(256, 16384) == (64, 4, 8)
    assert row_groups.row_groups(64, 131072) == (16, 4, 8)
    assert row_groups.row_groups(24576, 65536) == (120, 205, 8)


@pytest.mark.parametrize("skip", [0, 3])
def test_rows_of_any_number_of_groups_may_lie_at_an_odd_distance(
    skip: int, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = row_groups.NUMBERS._replace(
        groups=((32, 528),), at_once=((33, 64, 9, 1, 45),), min_elements_of_group=1
    )
    monkeypatch.setattr(row_groups, "NUMBERS", few)
    assert row_groups.row_groups(45, 64) == (9, 5, 9)
    given = Given.of(45, 64, "float16", skip)

    found = run(given, None)

    assert found.plan.vector == (1 if skip else 8)
    assert_right(given, found, "float16")


@pytest.mark.parametrize(("cols", "vector"), [(1001, 1), (2049, 4)])
def test_long_unaligned_rows_of_floats_are_moved_in_vectors(cols: int, vector: int) -> None:
    problem = bench.lowered(
        Point("layer_norm_backward", "float32", 4096, cols), limits=RECORDED["h200"]
    ).problem

    plan = choose(problem, RECORDED["h200"], lambda each: each.min_blocks)

    assert (plan.vector, plan.unaligned) == (vector, int(vector > 1))


GATE_DTYPES = ("float16", "float32", "float64")


@functools.cache
def gate(device: str) -> list[tuple[str, int, bool, Plan, Any]]:
    """Choose calls and their plans: dtype, columns, with one sum or all, the plan, and what is lowered."""
    found = []
    for dtype, cols, rms in itertools.product(GATE_DTYPES, GATE_COLS, (False, True)):
        kind = dtype_of(dtype)
        spec = imagined(49152, cols, kind, compute_dtype(kind, kind), rms=rms)
        for variant in (None, "warp", "block", "cluster"):
            with contextlib.suppress(DoesNotFitError):
                plan = choose(spec.problem, RECORDED[device], lambda each: each.min_blocks, variant)
                found.append((dtype, cols, rms, plan, spec))
    return sample(found, lambda each: (*each[:3], each[3].variant))


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("dtype", GATE_DTYPES)
@pytest.mark.parametrize(("arch", "device"), ARCHS)
def test_kernels_compile_without_spills(arch: str, device: str, dtype: str) -> None:
    """Of every variant that holds a row, with all sums that a norm of a sum has and with one."""
    taken = [each for each in gate(device) if each[0] == dtype]
    wanted = {spec.expression(plan): spec.text for *_, plan, spec in taken}
    for name, cubin in zip(
        wanted, compile_together([(wanted[name], name) for name in wanted], arch), strict=True
    ):
        code = code_of(cubin, arch)
        found = (
            spills(cubin) + begins_too_soon(code, arch) + stalls_a_cluster(code, arch) + endless_waits(cubin)
        )
        assert not found, name
    assert {plan.variant for *_, plan, _ in taken} >= {"warp", "block"}


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", MEASURED_OPS)
def test_chosen_plans_have_registers_enough(op: str, dtype: str) -> None:
    """Of every form at the widths of the benchmark: no fewer blocks than planned, because of spills, are resident."""
    wanted = []
    short = (128, 129, 768, 1001, 1024, 3000, 4097, 5000)
    widths = (*short, 8191, 8192, 16384, 20480, 30001, 32768, 50257, 65536)
    # of two kinds of rows: each op and each dtype have all of them
    odd = (MEASURED_OPS.index(op) + (dtype == "float16")) % 2
    for cols in widths if SLOW else ((1000, 50257), (8191, 8192))[odd]:
        what = bench.lowered(Point(op, dtype, 49152, cols, 0), limits=RECORDED["h200"])
        plan = choose(what.problem, RECORDED["h200"], lambda each: each.min_blocks)
        wanted.append((what.text, what.expression(plan)))
    built = zip(wanted, compile_together(wanted, "90"), strict=True)
    faults = {name: found for (_, name), cubin in built if (found := spills(cubin))}
    assert not faults


def imagined(rows: int, cols: int, kind: Any, compute: Any, *, rms: bool) -> Any:
    """Lower a gradient of arrays that are not there: of RMSNorm with one sum, of LayerNorm with three."""

    def along(pointer: int, dtype: Any = kind, extent: int = rows) -> View:
        return View(pointer << 40, (extent, cols), (cols * dtype.itemsize, dtype.itemsize), dtype)

    def per_row(pointer: int) -> View:
        return View(pointer << 40, (rows, cols), (compute.itemsize, 0), compute)

    groups = row_groups.row_groups(rows, cols)
    partial = [along(8 + at, compute, groups.groups) for at in range(3)]
    gamma = View(3 << 40, (rows, cols), (0, kind.itemsize), kind)
    what = Normed(along(1), along(2), gamma, None, None if rms else per_row(4), per_row(5))
    if rms:
        places = ParameterSums(groups, partial[0], None, None)
        return norm_gradient(RMS_NORM_BACKWARD, what, along(6), 1, compute, None, places)
    added = Added(along(7), 1.0, None, None)
    return norm_gradient(
        LAYER_NORM_BACKWARD, what, along(6), 1, compute, added, ParameterSums(groups, *partial)
    )


def kernels_of(call: Any, device: str = "h200") -> list[str]:
    """Return the kernels of a call on NumPy arrays, on such a device; that of dx first."""
    specs = asking.specs_of(call, RECORDED[device])
    return [each.name.partition("<")[0].removeprefix("cupynorm::") for each in specs]


def kernels(cols: int, device: str, dtype: str = "float16") -> list[str]:
    """Return the kernels of LayerNorm's gradient."""
    dy, x = np.empty((64, cols), dtype), np.empty((64, cols), dtype)
    gamma, stats = np.empty(cols, dtype), np.empty(64, np.float32)
    return kernels_of(lambda: cupynorm.layer_norm_backward(dy, x, gamma, stats, stats), device)


def test_each_array_is_read_once_where_a_row_and_its_sums_have_room() -> None:
    once, twice = ["row_summed", "sum_columns"], ["{plan.kernel}", "sum_columns", "sum_columns"]
    assert kernels(1, "h200") == kernels(128, "t4") == kernels(4096, "a100") == once
    assert kernels(32768, "h200") == kernels(65536, "h200") == kernels(65536, "h200", "float32") == once
    assert kernels(32768, "a100")[:2] == kernels(1 << 24, "h200")[:2] == twice[:2]


@pytest.mark.parametrize("later", [False, True])
def test_where_clusters_are_refused_sums_are_a_pass_of_their_own(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a green context, from the first call on, or after calls that ran. Nothing is added twice."""
    refuses, launcher = [not later], row_ops.launcher

    def refusing(function: int, plan: Plan) -> Any:
        binding = launcher(function, plan)

        def bind(stream: int, parameters: int) -> Any:
            launch = binding(stream, parameters)
            return lambda: 912 if plan.cluster > 1 and refuses[0] else launch()

        return bind

    monkeypatch.setattr(row_ops, "launcher", refusing)
    given = Given.of(3, 40960, "float16")
    arrays = [cupy.asarray(each) for each in given[:5]]
    expected_dx, dgamma, dbeta = expected(given, rms=False, ds=False)
    sums_before = [np.ones(40960, np.float32), np.ones(40960, np.float32)]

    for calls in range(3):
        add_to = tuple(cupy.asarray(each) for each in sums_before)
        warns = refuses[0] and calls == later
        with (
            pytest.warns(UserWarning, match="912.*take a pass of their own")
            if warns
            else contextlib.nullcontext()
        ):
            found = cupynorm.layer_norm_backward(*arrays, add_to=add_to)
        np.testing.assert_allclose(found[0].get().astype(np.float64), expected_dx, rtol=2e-3, atol=2e-3)
        for ours, reference in zip(found[1:], (dgamma, dbeta), strict=True):
            np.testing.assert_allclose(ours.get(), reference + 1, rtol=1e-3, atol=1e-3)
        refuses[0] = refuses[0] or calls == 0


@pytest.mark.parametrize("op", ["layer_norm", "softmax"])
@pytest.mark.usefixtures("small_groups")
def test_a_fusion_sums_what_stands_behind_its_op_in_the_same_pass(op: str) -> None:
    """Operands that every row shares, gamma and beta; one of each batch is summed on its own."""
    rng = np.random.default_rng(3)
    x, dy, residual = (rng.standard_normal((3, 43, 70)).astype(np.float32) for _ in range(3))
    scale, shift, of_batch, bias, factor = (
        rng.standard_normal(n).astype(np.float32) for n in ((70,), (1,), (3, 1, 70), (70,), (3, 1, 1))
    )
    columns = {"gamma": 1 + scale**2, "beta": shift * scale} if op == "layer_norm" else {}
    fused = cupynorm.fuse(
        getattr(cupynorm, op),
        load=lambda x, residual, bias, factor: (x + bias) * factor + residual,
        store=lambda y, scale, shift, of_batch: (y * scale + shift) * of_batch,
    )
    operands = {"residual": residual, "bias": bias, "factor": factor}
    operands |= {"scale": scale, "shift": shift, "of_batch": of_batch}
    wanted = fused.backward(dy, x, **operands, **columns)

    on_device = {name: cupy.asarray(each) for name, each in {**operands, **columns}.items()}
    found = fused.backward(cupy.asarray(dy), cupy.asarray(x), **on_device)

    pairs = [*zip(found.operands, wanted.operands, strict=True), (found.x, wanted.x)]
    pairs += [(found.gamma, wanted.gamma), (found.beta, wanted.beta)] if columns else []
    for ours, reference in pairs:
        assert ours.shape == reference.shape
        np.testing.assert_allclose(ours.get(), reference, rtol=2e-4, atol=2e-4)
    launched = kernels_of(lambda: fused.backward(dy, x, **operands, **columns))
    assert launched[:2] == ["row_summed", "{plan.kernel}"]  # and statistics
    # of_batch's sums; the sums of all groups; shift's over columns; factor's, whose gradients were written, twice
    assert launched[2:] == ["sum_columns"] * 5
