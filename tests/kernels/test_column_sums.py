"""Sums over rows, on the simulator: every way that rows and columns lie, and the bits that no device changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.call.arguments import view
from cupynorm.call.view import View
from cupynorm.invoke import one_kernel
from cupynorm.lower import sums
from cupynorm.lower.gradients import activation_sums
from cupynorm.lower.sums import (
    LINE_BYTES,
    Further,
    Result,
    Sums,
    first_tiles,
    partial_shape,
    sum_specs,
    tiles_of,
)
from cupynorm.lower.tracing import traced
from cupynorm.lower.vectors import ACCESS_BYTES
from cupynorm.runtime import devices, nvrtc
from cupynorm.tools import bench
from cupynorm.tools.results import Point
from tests import SLOW, simulator
from tests.build_gate import begins_too_soon, code_of, compile_together, nvdisasm, spills
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

ARCHS = ("75", "80", "86", "89", "90", "100", "120") if SLOW else ("90",)
PRODUCTS = traced(lambda dy, x, mean, rstd: (dy * ((x - mean) * rstd), dy), 4)


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def run(what: Sums, compute: Any) -> None:
    """Launch what is lowered, with partial sums in memory of its own."""
    shape = partial_shape(what, compute)
    asked = sum(each is not None for each in what.results)
    partial = [] if shape is None else [cupy.empty(shape, compute) for _ in range(asked)]
    for spec in sum_specs(what, compute, [view(each) for each in partial]):
        one_kernel.bound_call(0, one_kernel.Arrays({}), [one_kernel.prepared(0, spec)]).once()


def by_hand(dy: Any, x: Any, mean: Any, rstd: Any) -> tuple[Any, Any]:
    dy, x, mean, rstd = (np.asarray(each, np.float64) for each in (dy, x, mean, rstd))
    return (dy * ((x - mean[:, None]) * rstd[:, None])).sum(0), dy.sum(0)


SHAPES = [
    (rows, cols, skip)
    for rows, cols in [(1, 1), (3, 7), (5, 8), (33, 77), (129, 128), (1100, 40), (600, 257), (40, 1000)]
    for skip in (0, 1)
] + [(2000, 3, 0), (7, 3001, 0)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_sums_of_products(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "NUMBERS", sums.NUMBERS._replace(blocks=16, min_batches=1))
    rng = np.random.default_rng(1)
    kind = dtype_of(dtype)
    compute = compute_dtype(kind, kind)
    for rows, cols, skip in SHAPES:
        wide = [rng.standard_normal((rows, cols + skip)).astype(kind) for _ in range(2)]
        host = [each[:, skip:] for each in wide]
        dy, x = (cupy.asarray(each)[:, skip:] for each in wide)
        mean, rstd = (rng.uniform(0.5, 1, rows).astype(compute) for _ in range(2))
        stats = [cupy.asarray(each)[:, None] for each in (mean, rstd)]
        per_row = [view(each).broadcast_to((rows, cols)) for each in stats]
        before = rng.standard_normal(cols).astype(np.float32)
        dgamma, dbeta = cupy.asarray(before), cupy.empty(cols, kind)
        results = (Result(view(dgamma), adds=True), Result(view(dbeta)))

        run(Sums(PRODUCTS, (view(dy), view(x), *per_row), (rows, cols), 1, results), compute)

        expected = by_hand(*host, mean, rstd)
        scale = max(1.0, float(np.sqrt(rows)))
        np.testing.assert_allclose(dgamma.get(), expected[0] + before, atol=2e-5 * scale, rtol=1e-5)
        digits = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-5)
        np.testing.assert_allclose(
            dbeta.get().astype(np.float64), expected[1], atol=2e-5 * scale, rtol=digits
        )


def test_any_axes_are_added_up_and_one_sum_may_be_left_out() -> None:
    host = np.random.default_rng(2).standard_normal((3, 5, 4, 6)).astype(np.float32)
    x = cupy.asarray(host)
    moved = view(x.transpose(0, 2, 1, 3))  # the columns: axes 1 and 3, which are no neighbours in memory
    total = cupy.empty((5, 6), np.float32)
    twice = traced(lambda x: (2 * x, x), 1)

    run(Sums(twice, (moved,), moved.shape, 2, (None, Result(view(total)))), np.dtype(np.float32))

    np.testing.assert_allclose(total.get(), host.sum((0, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("cols", "skip"), [(64, 0), (50, 0), (51, 3)])
def test_elements_are_written_beside_their_sums_in_place(cols: int, skip: int) -> None:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((70, cols + skip)).astype(np.float16)
    x = cupy.asarray(wide)[:, skip:]
    square = traced(lambda x: x * x, 1)
    total = cupy.empty(cols, np.float32)

    run(Sums(square, (view(x),), x.shape, 1, (Result(view(total)),), (view(x),)), np.dtype(np.float32))

    expected = wide[:, skip:].astype(np.float32) ** 2
    np.testing.assert_array_equal(x.get(), expected.astype(np.float16))
    np.testing.assert_allclose(total.get(), expected.sum(0), rtol=1e-5)


HALVES = traced(lambda dy, a, b, shift: (dy * (a + shift), dy * b), 4)
UNALIGNED = [(33, 21), (70, 50), (150, 77), (40, 257), (37, 1001), (9, 2100), (130, 1100)]


def placed(host: Any, skip: int, gap: int) -> tuple[Any, Any]:
    """Return an array and the view of it whose rows are `gap` apart and begin `skip` elements behind its first."""
    rows, cols = host.shape
    whole = cupy.asarray(np.full(skip + rows * (cols + gap), np.nan, host.dtype))
    own = whole[skip:].reshape(rows, cols + gap)[:, :cols]
    own[...] = cupy.asarray(host)
    return whole, own


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rows_that_begin_anywhere(dtype: str, lines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a gate, of which each half has its own place in dx: the arrays differ in alignment."""
    few = {"min_rows_at_vectors": 1, "min_rows_at_lines": 1 if lines else 1000, "min_rows_summed": 1}
    monkeypatch.setattr(sums, "NUMBERS", sums.NUMBERS._replace(**few))
    kind = dtype_of(dtype)
    compute = compute_dtype(kind, kind)
    rng = np.random.default_rng(5)
    units = set()
    for number, (rows, cols) in enumerate(UNALIGNED):
        host = [rng.standard_normal((rows, width)).astype(kind) for width in (cols, 2 * cols)]
        (_, dy), (_, x) = (placed(each, number % 3, 3 * (number % 2)) for each in host)
        given, dx = placed(np.zeros_like(host[1]), number, number % 2)
        shift = cupy.asarray(rng.standard_normal(cols).astype(kind))
        total = cupy.empty(2 * cols, compute)
        a, b = view(x[:, :cols]), Further(view(x[:, :cols]), cols)
        to = view(dx[:, :cols])
        results = tuple(Result(view(total), first=first) for first in (0, cols))
        operands = (view(dy), a, b, view(shift).broadcast_to((rows, cols)))
        what = Sums(HALVES, operands, (rows, cols), 1, results, (to, Further(to, cols)))
        units.add(first_tiles(what, compute).unit)

        run(what, compute)

        exact = [np.asarray(each, np.float64) for each in (host[0], host[1], shift.get())]
        expected = np.hstack([exact[0] * (exact[1][:, :cols] + exact[2]), exact[0] * exact[1][:, cols:]])
        digits = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}.get(dtype, 1e-14)
        np.testing.assert_allclose(dx.get().astype(np.float64), expected, rtol=digits, atol=digits)
        np.testing.assert_allclose(total.get(), expected.sum(0), rtol=1e-4, atol=1e-4)
        written = np.isnan(given.get().astype(np.float64))
        assert written.sum() == given.size - dx.size  # nothing was written beside the rows
    assert units <= {0, LINE_BYTES // kind.itemsize, ACCESS_BYTES // kind.itemsize}
    assert (LINE_BYTES // kind.itemsize in units) == lines


@pytest.mark.parametrize("dtypes", [("float32", "float16", "float16"), ("float16", "float32", "bfloat16")])
def test_rows_of_several_dtypes_that_begin_anywhere(
    dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of 8 bytes beside those of 16."""
    monkeypatch.setattr(sums, "NUMBERS", sums.NUMBERS._replace(min_rows_at_vectors=1))
    rng = np.random.default_rng(7)
    for rows, cols in UNALIGNED[:4]:
        host = [rng.standard_normal((rows, width)) for width in (cols, 2 * cols)]
        dy, x = (
            placed(each.astype(dtype_of(kind)), 1, 0)[1] for each, kind in zip(host, dtypes[:2], strict=True)
        )
        _, dx = placed(np.zeros_like(host[1], dtype_of(dtypes[2])), 3, 0)
        a, to = view(x[:, :cols]), view(dx[:, :cols])
        total = cupy.empty(2 * cols, np.float32)
        results = tuple(Result(view(total), first=first) for first in (0, cols))
        products = traced(lambda dy, a, b: (dy * b, dy * a), 3)
        what = Sums(
            products,
            (view(dy), a, Further(a, cols)),
            (rows, cols),
            1,
            results,
            (to, Further(to, cols)),
        )
        assert first_tiles(what, np.dtype(np.float32)).unit

        run(what, np.dtype(np.float32))

        exact = [each.get().astype(np.float64) for each in (dy, x)]
        expected = np.hstack([exact[0] * exact[1][:, cols:], exact[0] * exact[1][:, :cols]])
        np.testing.assert_allclose(dx.get().astype(np.float64), expected, rtol=8e-3, atol=1e-6)
        np.testing.assert_allclose(total.get(), expected.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skip", [0, 1])
def test_elements_may_be_written_in_place_where_rows_begin_anywhere(
    skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "NUMBERS", sums.NUMBERS._replace(min_rows_at_vectors=1))
    host = np.random.default_rng(6).standard_normal((50, 2 * 333)).astype(np.float16)
    _, x = placed(host, skip, 0)
    total, halves = cupy.empty(2 * 333, np.float32), view(x[:, :333])
    both = (halves, Further(halves, 333))
    results = tuple(Result(view(total), first=first) for first in (0, 333))
    swapped = traced(lambda a, b: (b * b, a), 2)

    run(Sums(swapped, both, (50, 333), 1, results, both), np.dtype(np.float32))

    exact = host.astype(np.float32)
    expected = np.hstack([exact[:, 333:] ** 2, exact[:, :333]])
    np.testing.assert_array_equal(x.get(), expected.astype(np.float16))
    np.testing.assert_allclose(total.get(), expected.sum(0), rtol=1e-4, atol=1e-4)


def test_no_rows_give_zero() -> None:
    total = cupy.empty(9, np.float32)
    x = cupy.empty((0, 9), np.float32)

    run(Sums(traced(lambda x: x, 1), (view(x),), (0, 9), 1, (Result(view(total)),)), np.dtype(np.float32))

    np.testing.assert_array_equal(total.get(), 0)


@pytest.mark.parametrize("rows", [0, 1, 31, 4096, 49152, 1_000_000, 1 << 33])
@pytest.mark.parametrize("cols", [1, 3, 128, 1023, 65536, 1 << 24])
def test_groups_cover_all_rows_once_and_fit_a_grid(rows: int, cols: int) -> None:
    for vector in (1, 2, 4, 8):
        if vector > cols:
            continue
        found = tiles_of(rows, cols, vector, 1, np.dtype(np.float32), sums.LANES, sums.NUMBERS.blocks)
        assert (
            found.groups * found.rows_of_group
            >= rows
            > (found.groups - 1) * found.rows_of_group - (rows == 0)
        )
        assert found.tiles * found.lanes * vector >= cols
        assert found.groups <= 65535
        assert found.tiles < 1 << 31
        assert sums.THREADS % found.lanes == 0
        assert found.groups * found.tiles <= 2 * max(sums.NUMBERS.blocks, found.tiles)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "in_flight", "groups"),
    [
        (49152, 128, "float16", 3, 256),
        (49152, 64, "bfloat16", 3, 256),
        (100_000, 128, "float16", 3, 261),
        (49152, 256, "float16", 4, 768),
        (49152, 128, "float32", 4, 768),
        (8192, 128, "float16", 4, 64),
        (1_000_000, 128, "float16", 4, 5209),
        (49152, 512, "float16", 4, 768),
    ],
)
def test_all_blocks_of_narrow_rows_that_are_written_and_summed_run_at_once(
    rows: int, cols: int, dtype: str, in_flight: int, groups: int
) -> None:
    kind = dtype_of(dtype)
    x = View(0, (rows, cols), (kind.itemsize * cols, kind.itemsize), kind)
    what = Sums(traced(lambda x: x, 1), (x,), x.shape, 1, (Result(View(0, (cols,), (2,), kind)),), (x,))

    found = first_tiles(what, np.dtype(np.float32))

    assert (found.rows_in_flight, found.groups) == (in_flight, groups)


@pytest.mark.parametrize("rows", [255, 256, 4096, 49153, 1_000_000])
@pytest.mark.parametrize("cols", [9, 77, 1001, 50257, (1 << 24) + 1])
def test_groups_of_rows_of_one_alignment_cover_all_rows_once(rows: int, cols: int) -> None:
    half = dtype_of("float16")
    x = View(0, (rows, cols), (2 * cols, 2), half)
    for result in (None, Result(View(0, (cols,), (2,), half))):
        what = Sums(traced(lambda x: x, 1), (x,), x.shape, 1, (result,), (x,))
        found = first_tiles(what, np.dtype(np.float32))
        if rows < 8 * sums.NUMBERS.min_rows_at_vectors:
            assert not found.unit
            continue
        assert found.unit in {8, 64}
        assert found.period * cols % found.unit == 0
        groups, rest = divmod(found.groups, found.period)
        of_one = -(-rows // found.period)
        assert rest == 0
        assert groups * found.rows_of_group >= of_one > (groups - 1) * found.rows_of_group
        assert found.groups <= 65535
        assert found.tiles * found.lanes * found.vector >= cols + found.unit - 1
        most = sums.NUMBERS.blocks_with_elements
        assert result is None or found.groups * found.tiles <= 2 * max(most, found.period * found.tiles)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_begin_at_vectors_are_cut_at_lines_where_they_are_summed(dtype: str) -> None:
    """Pieces of 512 bytes then share no line with other blocks; but no more threads may be idle for that."""
    kind = dtype_of(dtype)
    line, float32 = 128 // kind.itemsize, np.dtype(np.float32)

    def tiles(rows: int, cols: int, *, summed: bool) -> sums.SumTiles:
        x = View(0, (rows, cols), (cols * kind.itemsize, kind.itemsize), kind)
        result = Result(View(0, (cols,), (kind.itemsize,), kind)) if summed else None
        return first_tiles(Sums(traced(lambda x: x, 1), (x,), x.shape, 1, (result,), (x,)), float32)

    assert tiles(49152, 5000, summed=True).unit == line
    for rows, cols, summed in (
        (49152, 5000, False),
        (49152, 5120, True),
        (49152, 1000, True),
        (1000, 5000, True),
    ):
        assert not tiles(rows, cols, summed=summed).unit


@pytest.mark.parametrize("cols", [128, 1001, 5000])
def test_where_nothing_is_added_up_a_block_has_as_few_rows_as_a_grid_allows(cols: int) -> None:
    """Blocks that run at once are then near one another in memory."""
    half = dtype_of("float16")
    for rows in (1 << 16, 1 << 28):
        x = View(0, (rows, cols), (2 * cols, 2), half)
        found = first_tiles(
            Sums(traced(lambda x: x, 1), (x,), x.shape, 1, (None,), (x,)), np.dtype(np.float32)
        )
        batch = sums.THREADS // found.lanes * found.rows_in_flight
        assert found.rows_of_group <= 2 * batch or found.groups > sums.MAX_GROUPS // 2
        assert found.groups <= sums.MAX_GROUPS


def test_the_order_of_summation_depends_on_the_shape_alone() -> None:
    """The two mistakes that others made: sums that depend on how rows come in batches, or on the device."""
    x = np.random.default_rng(4).standard_normal((3000, 24)).astype(np.float32)
    bits = []
    for device, batches in (("h200", (3000,)), ("t4", (30, 100)), ("a100", (2, 3, 500))):
        with pytest.MonkeyPatch.context() as patch:
            simulator.install(patch, device)
            given = cupy.asarray(x.reshape(*batches, 24))
            total = cupy.empty(24, np.float32)
            what = Sums(traced(lambda x: x, 1), (view(given),), given.shape, 1, (Result(view(total)),))
            assert first_tiles(what, np.dtype(np.float32)).groups > 1
            run(what, np.dtype(np.float32))
            bits.append(total.get().tobytes())
    assert len({*bits}) == 1


@pytest.mark.skipif(nvrtc.available() is None or nvdisasm() is None, reason="needs NVRTC and nvdisasm")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("op", "cols", "rows", "accesses"),
    [
        ("bias_gelu_backward", 1024, (4, 4), 2),
        ("bias_gelu_backward", 1023, (2, 4), 2),
        ("swiglu_backward", 1024, (2, 2), 3),
        ("swiglu_backward", 1023, (1, 2), 5),  # dy and half of x are not aligned as the results' first half
    ],
)
def test_all_loads_of_a_batch_are_issued_before_the_first_row_is_computed(
    op: str, cols: int, rows: tuple[int, int], accesses: int, dtype: str
) -> None:
    """ptxas moves loads behind arithmetic that does not need them: then fewer rows are in flight."""
    in_flight = rows[dtype == "float32"]
    limits = devices.present_limits()
    what = bench.lowered(Point(op, dtype, 49152, cols, 0), limits=limits)
    tiles = what.problem.tiles
    (cubin,) = compile_together([(what.text, what.expression(tiles))], "90")

    longest = run_of_loads = 0
    for line in code_of(cubin, "90").instructions:
        run_of_loads += "LDG.E.128" in line
        run_of_loads *= "MUFU" not in line
        longest = max(longest, run_of_loads)

    assert (tiles.rows_in_flight, tiles.blocks > 0) == (in_flight, (dtype, cols) == ("float16", 1023))
    assert longest >= in_flight * accesses
    assert cubin.registers * sums.THREADS * (tiles.blocks or 3) <= limits.registers_per_sm


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_kernels_compile_without_spills(dtype: str, arch: str) -> None:
    kind = dtype_of(dtype)
    compute, wanted = compute_dtype(kind, kind), []
    for cols in (1024, 1023):
        size = kind.itemsize

        def along(pointer: int, cols: int = cols, size: int = size) -> View:
            return View(pointer, (49152, cols), (cols * size, size), kind)

        def per_row(pointer: int, cols: int = cols) -> View:
            return View(pointer, (49152, cols), (compute.itemsize, 0), compute)

        results = tuple(Result(View(place, (cols,), (size,), kind)) for place in (0, 1 << 20))
        operands = (along(0), along(1 << 30), per_row(0), per_row(1 << 20))
        what = Sums(PRODUCTS, operands, (49152, cols), 1, results)
        shape = partial_shape(what, compute)
        assert shape is not None
        step = compute.itemsize
        partial = [View(place << 40, shape, (shape[1] * step, step), compute) for place in (1, 2)]
        wanted += [
            (spec.text, spec.expression(spec.problem.tiles)) for spec in sum_specs(what, compute, partial)
        ]
    for (_, name), cubin in zip(wanted, compile_together(wanted, arch), strict=True):
        assert not spills(cubin), name
        assert not begins_too_soon(code_of(cubin, arch), arch), name


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("gate", [None, "first"])
def test_gradients_of_activations_compile_without_spills(gate: str | None, dtype: str, arch: str) -> None:
    kind = dtype_of(dtype)
    compute, size = compute_dtype(kind, kind), kind.itemsize
    wanted = []
    # aligned float64 spills on compute capability 12.0: 80 registers for two rows with erfc
    for cols in (1024, 1001) if arch != "120" else (1001,):
        width = cols if gate is None else 2 * cols
        dy = View(0, (49152, cols), (cols * size, size), kind)
        x, dx = (View(place << 40, (49152, width), (width * size, size), kind) for place in (1, 2))
        bias, dbias = (View(place << 40, (width,), (size,), kind) for place in (3, 4))
        results = [Result(dbias, first=first) for first in range(0, width, cols)]
        what = activation_sums(dy, x, bias, dx, "gelu", gate, results)
        shape, step = partial_shape(what, compute), compute.itemsize
        assert shape is not None
        strides = (shape[1] * step, step)
        partial = [View(place << 40, shape, strides, compute) for place in range(5, 5 + len(results))]
        spec = sum_specs(what, compute, partial)[0]
        assert (spec.problem.tiles.unit > 0) == (cols == 1001)
        wanted.append((spec.text, spec.expression(spec.problem.tiles)))
    for (_, name), cubin in zip(wanted, compile_together(wanted, arch), strict=True):
        assert not spills(cubin), name
        assert not begins_too_soon(code_of(cubin, arch), arch), name
        if arch == "90":  # two blocks of a multiprocessor at least, without both halves' sums three
            assert cubin.registers <= (128 if gate else 80), name
