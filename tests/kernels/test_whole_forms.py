"""Rows apart that are whole, with masks and operands beside x, on the simulator: against float64 of NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.invoke import row_ops
from cupynorm.plan.config import EVENLY, IN_REGISTERS, NOWHERE, Plan
from tests import SLOW, simulator
from tests.sampling import in_pairs
from tests.simulator import cupy, simulated  # noqa: F401  a fixture
from tests.tilings_apart import tiling_apart

DIGITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
# neighbouring rows and elements of a thread, threads side by side, threads of a block, blocks of a row (0: of the grid)
TILINGS = {
    "one row, one element": (8, (1, 1, 8, 64, 1)),
    "a part that is shorter": (90, (2, 24, 8, 32, 1)),
    "words of several parts": (500, (2, 64, 32, 256, 1)),
    "four rows": (250, (4, 32, 8, 64, 1)),
    "a cluster": (250, (4, 16, 16, 128, 2)),
    "a cluster, one row": (120, (1, 32, 16, 64, 1)),
    "the grid": (400, (2, 28, 16, 64, 0)),
}

# of these, what differs most where a mask keeps an interval or results are stored otherwise
SOME = TILINGS if SLOW else ("words of several parts", "a cluster", "the grid")
TYPES = DIGITS if SLOW else ("float16", "float32")


@pytest.fixture(autouse=True)
def twins(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


def tiling(cols: int, numbers: tuple[int, ...], most: int) -> Plan:
    """Return a plan; most: how many numbers a thread may hold."""
    vector, elements, lanes, block, ctas = numbers
    group = block // lanes
    elements = min(elements, most // vector)
    ctas = ctas and max(ctas, -(-cols // (elements * group)))
    share = -(-cols // (ctas or 4))
    variant = "split" if ctas == 0 else ""
    return tiling_apart(vector, max(1, -(-share // group)), lanes, block, max(1, ctas), variant=variant)


def on_device(each: Any) -> Any:
    return cupy.asarray(each) if isinstance(each, np.ndarray) else each


def exact(each: Any) -> Any:
    return each.astype(np.float64) if isinstance(each, np.ndarray) and each.dtype.kind in "fV" else each


def compare(call: Any, arrays: tuple[Any, ...], dtype: str, numbers: tuple[int, ...], **options: Any) -> None:
    """Compare a call along the middle axis by a forced plan with that of the same numbers in float64."""
    most = 64 if len(arrays) > 1 or dtype in {"float32", "float64"} else 128
    plan = tiling(arrays[0].shape[1], numbers, most if dtype != "float64" else 32)
    if dtype == "float64":
        plan = dataclasses.replace(plan, vector=1)
    with row_ops.observed() as plans:
        given = {name: on_device(each) for name, each in options.items()}
        found = call(*map(on_device, arrays), axis=1, plan=plan, **given)
    assert [each.waits for each in plans] == [EVENLY], plans
    wanted = call(*map(exact, arrays), axis=1, **{name: exact(each) for name, each in options.items()})
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
    for got, right in pairs:
        scale = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0)))
        np.testing.assert_allclose(
            cupy.asnumpy(got).astype(np.float64), right, rtol=DIGITS[dtype], atol=DIGITS[dtype] * scale
        )


def drawn(cols: int, numbers: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    inner = numbers[0] * numbers[2] + 4  # the last tile has rows for some of its threads only
    return (np.random.default_rng(seed + cols).standard_normal((2, cols, inner)) + 1).astype(dtype_of(dtype))


def mask_of(x: Any) -> Any:
    """Draw a mask: some rows keep nothing, one element, or all; bytes that keep are any but 0."""
    rng = np.random.default_rng(7)
    kept = rng.random(x.shape) < 0.6
    kept[0, :, 0] = False
    kept[0, :, 1] = np.arange(x.shape[1]) == x.shape[1] // 2
    kept[0, :, 2] = True
    kept[1, :-1, 3] = False
    return (kept * rng.choice([1, 2, 0x80, 0xFF], x.shape)).astype(np.uint8).view(np.bool_)


@pytest.mark.parametrize(
    "case", in_pairs(TILINGS, DIGITS, ("softmax", "layer_norm", "standardize", "rms_norm")), ids=" ".join
)
def test_masks(case: tuple[str, str, str]) -> None:
    name, dtype, call = case
    cols, numbers = TILINGS[name]
    x = drawn(cols, numbers, dtype)
    compare(getattr(cupynorm, call), (x,), dtype, numbers, where=mask_of(x))


def lengths_of(x: Any, rows: tuple[int, ...]) -> Any:
    """Draw lengths: nothing of a row, and all of another."""
    found = np.random.default_rng(7).integers(0, x.shape[1] + 1, rows).astype(np.int32)
    found.reshape(-1)[:2] = 0, x.shape[1]
    return found


@pytest.mark.parametrize(
    "case", in_pairs(SOME, TYPES, ("softmax", "layer_norm", "standardize", "left padded")), ids=" ".join
)
def test_lengths(case: tuple[str, str, str]) -> None:
    name, dtype, call = case
    cols, numbers = TILINGS[name]
    x = drawn(cols, numbers, dtype)
    lengths = lengths_of(x, (2, 1) if call == "layer_norm" else (2, x.shape[2]))
    outside = np.arange(cols)[None, :, None] >= lengths[:, None]
    if call == "left padded":
        outside = outside[:, ::-1]
        call, options = "softmax", {"lengths": lengths, "left_padded": True}
    else:
        options = {"lengths": lengths}
    x[np.broadcast_to(outside, x.shape)] = np.nan  # what lies outside may hold anything
    compare(getattr(cupynorm, call), (x,), dtype, numbers, **options)


# A warp runs other code where its rows' lengths keep all its elements: where these are computed in parts, where they
# wait as numbers, where blocks of the grid share rows, and where rows wait nowhere and are gone through in rounds.
KEEP_ALL = [
    ("words of several parts", "float16", "layer_norm"),
    ("a cluster", "float32", "standardize"),
    ("the grid", "float32", "layer_norm"),
    ("the grid", "float16", "standardize"),
    ("nowhere", "float16", "moments"),
    ("nowhere", "float32", "moments"),
]


@pytest.mark.parametrize("case", KEEP_ALL, ids=" ".join)
def test_bits_of_a_row_do_not_depend_on_its_neighbours_lengths(case: tuple[str, str, str]) -> None:
    name, dtype, call = case
    cols, numbers = TILINGS.get(name, (200, (2, 4, 16, 64, 1)))
    plan = tiling(cols, numbers, 128 if dtype == "float16" else 64)
    if name == "nowhere":
        plan = tiling_apart(*numbers, variant="uncached", waits=NOWHERE)
    x = drawn(cols, numbers, dtype)
    lengths = lengths_of(x, (2, x.shape[2]))
    lengths[:, ::3], lengths[0, :16] = cols, cols
    given = {"axis": 1, "plan": plan}

    def results(lengths: Any) -> list[Any]:
        found = getattr(cupynorm, call)(cupy.asarray(x), lengths=cupy.asarray(lengths), **given)
        return [cupy.asnumpy(each) for each in (found if isinstance(found, tuple) else (found,))]

    whole, some = results(np.full_like(lengths, cols)), results(lengths)

    wanted = getattr(cupynorm, call)(exact(x), axis=1, lengths=lengths)
    for all_kept, found, right in zip(
        whole, some, wanted if isinstance(wanted, tuple) else (wanted,), strict=True
    ):
        np.testing.assert_array_equal(all_kept[..., ::3], found[..., ::3])
        np.testing.assert_allclose(found, right, rtol=DIGITS[dtype], atol=4 * DIGITS[dtype])


@pytest.mark.parametrize("name", SOME if SLOW else ["a cluster"])
def test_bands_and_lengths_beside_masks_and_operands(name: str) -> None:
    cols, numbers = TILINGS[name]
    x, bias = (drawn(cols, numbers, "float32", seed) for seed in (0, 1))
    lengths = lengths_of(x, (2, 1))
    few = (*numbers[:1], min(16, numbers[1]), *numbers[2:])
    compare(cupynorm.softmax, (x,), "float32", few, causal=True, causal_offset=cols // 2, window=(50, 9))
    compare(cupynorm.softmax, (x,), "float32", few, bias=bias[:1], lengths=lengths, where=mask_of(x))
    where = np.arange(x.shape[2]) % 3 != 0  # of whole rows
    compare(cupynorm.log_softmax, (x,), "float32", numbers, where=where, lengths=lengths)


@pytest.mark.parametrize(
    "case", in_pairs(SOME, TYPES, ("labels", "ignored labels", "smooth labels")), ids=" ".join
)
def test_labels(case: tuple[str, str, str]) -> None:
    name, dtype, kind = case
    cols, numbers = TILINGS[name]
    x = drawn(cols, numbers, dtype)
    labels = np.random.default_rng(7).integers(0, cols, (2, x.shape[2])).astype(np.int32)
    options = {"labels": labels, "return_grad": True}
    if kind == "ignored labels":
        labels[0, ::3] = 100000
        options["ignore_index"] = 100000
    options |= {"label_smoothing": 0.125} if kind == "smooth labels" else {}
    compare(cupynorm.cross_entropy, (x,), dtype, numbers, **options)


SCALED = in_pairs(SOME, TYPES, ("int8", "float8_e5m2"), (False, True))
# whose State takes more room in a message than the largest result: places of both overlapped once
SCALED += [("the grid", "float64", "int8", True)] * (not SLOW)


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_a_scale_for_each_row(case: tuple[str, str, str, bool]) -> None:
    name, dtype, kind, masked = case
    cols, numbers = TILINGS[name]
    x = drawn(cols, numbers, dtype)
    x[0, :, 5] = 0
    x[1, cols // 2, 6] = np.nan
    plan = tiling(cols, numbers, 32 if dtype == "float64" else 64)
    plan = dataclasses.replace(plan, vector=1) if dtype == "float64" else plan
    options = (
        {"where": mask_of(x)} if masked else {"gamma": np.linspace(0.5, 2, cols).astype(dtype_of(dtype))}
    )
    call = cupynorm.softmax if masked else cupynorm.rms_norm
    given = {option: on_device(each) for option, each in options.items()}
    with row_ops.observed() as plans, np.errstate(invalid="ignore"):
        found, scales = call(on_device(x), axis=1, quantize=kind, plan=plan, **given)
        right = {option: exact(each) for option, each in options.items()}
        wanted = call(exact(x), axis=1, **right)
        wanted_scales = call(exact(x), axis=1, quantize=kind, **right)[1]
    assert [each.waits for each in plans] == [EVENLY]
    scales, steps = (
        cupy.asnumpy(scales).astype(np.float64)[:, None],
        {"int8": (0, 0.51), "float8_e5m2": (0.126, 0)},
    )
    np.testing.assert_allclose(scales[:, 0], wanted_scales, rtol=4 * DIGITS[dtype])
    number = cupy.asnumpy(found).view(kind if kind == "int8" else getattr(ml_dtypes, kind)).astype(np.float64)
    relative, absolute = steps[kind]
    relative += 4 * DIGITS[dtype]
    good = np.broadcast_to(np.isfinite(scales), x.shape)
    np.testing.assert_allclose(
        (number * scales)[good], wanted[good], rtol=relative, atol=np.nanmax(scales) * (absolute + 1e-3)
    )
    if kind == "int8":
        assert not number[~good].any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "call", [cupynorm.softmax, cupynorm.log_softmax, cupynorm.standardize], ids=lambda f: f.__name__
)
def test_what_is_no_number(call: Any, dtype: str) -> None:
    cols, numbers = TILINGS["four rows"]
    x = drawn(cols, numbers, dtype)
    where = mask_of(x)
    where[:, 5] = True
    where[:, 6] = False
    x[0, 5, 4] = np.nan  # kept: the row is nan, and what is dropped is not
    x[0, 6, 5] = np.nan  # dropped
    x[0, 5, 6] = -np.inf
    x[0, :, 7] = -np.inf
    if call is not cupynorm.standardize:
        x[0, 5, 8] = np.inf
    with np.errstate(invalid="ignore"):
        compare(call, (x,), dtype, numbers, where=where)


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_halves_far_from_zero_keep_their_deviation(mean: float) -> None:
    # threads of which the first elements are dropped count from an element that is kept
    cols, numbers = TILINGS["words of several parts"]
    rng = np.random.default_rng(3)
    x = (mean + rng.integers(-2, 3, (2, cols, 68))).astype(np.float16)
    where = np.zeros(x.shape, np.bool_)
    where[:, cols // 2 :] = rng.random((2, cols - cols // 2, 68)) < 0.2
    x[~where] = 60000
    compare(cupynorm.standardize, (x,), "float16", numbers, where=where)
    x = np.where(where, x, np.float16(np.nan))
    compare(cupynorm.standardize, (x,), "float16", numbers, nan="omit")


@pytest.mark.parametrize("case", in_pairs(TILINGS, DIGITS, ("add_layer_norm", "softmax")), ids=" ".join)
def test_sums_and_other_operands(case: tuple[str, str, str]) -> None:
    name, dtype, call = case
    cols, numbers = TILINGS[name]
    x, other = (drawn(cols, numbers, dtype, seed) for seed in (0, 1))
    gamma, bias = (np.linspace(0.5, 2, cols).astype(dtype_of(dtype)) for _ in range(2))
    if call == "add_layer_norm":
        compare(cupynorm.add_layer_norm, (x, other, gamma, bias), dtype, numbers, bias=bias)
        return
    compare(
        cupynorm.softmax,
        (x,),
        dtype,
        (*numbers[:1], min(16, numbers[1]), *numbers[2:]),
        bias=other[:1],
        where=mask_of(x),
    )


# those of which one thread, or two, have all columns of a row, too; and columns of all places in a block of words
DROPPING = {
    **TILINGS,
    "a thread for each row": (21, (2, 21, 32, 32, 1)),
    "two threads": (43, (1, 22, 16, 32, 1)),
    "whole blocks of words": (64, (2, 16, 8, 32, 1)),
    "a word more": (65, (2, 17, 8, 32, 1)),
    "clusters and a word more": (257, (2, 16, 8, 64, 3)),
}


@pytest.mark.parametrize(
    "case", in_pairs(DROPPING, TYPES, ("add_layer_norm", "softmax_backward")), ids=" ".join
)
def test_dropouts(case: tuple[str, str, str]) -> None:
    name, dtype, call = case
    cols, numbers = DROPPING[name]
    arrays = tuple(drawn(cols, numbers, dtype, seed) for seed in (0, 1))
    # offsets past 32 bits, which wrap around 64
    options = {"dropout": 0.3, "seed": 1 << 63 | 5, "offset": (1 << 64) - 2 - cols}
    compare(getattr(cupynorm, call), arrays, dtype, numbers, **options)


def test_operands_of_other_orders_and_shapes() -> None:
    cols, numbers = TILINGS["four rows"]
    x, other = (drawn(cols, numbers, "float32", seed) for seed in (0, 1))
    fusion = cupynorm.fuse(cupynorm.softmax, load=lambda x, t, u, v: x * t + u - v)
    turned = other.transpose(0, 2, 1).copy().transpose(0, 2, 1)  # its elements are neighbours along the row
    compare(fusion, (x, turned, other[:, :, :1], other[:, :1]), "float32", (4, 16, *numbers[2:]))
    wide = np.zeros((*x.shape[:2], 2 * x.shape[2]), np.float32)
    wide[:, :, ::2] = other
    compare(cupynorm.add_rms_norm, (x, wide[:, :, ::2]), "float32", (4, 16, *numbers[2:]))
    mask = mask_of(x)
    for where in (mask[:, :, :1], mask[:1], mask.transpose(2, 0, 1).copy().transpose(1, 2, 0)):
        compare(cupynorm.softmax, (x,), "float32", (4, 16, *numbers[2:]), where=where)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["four rows", "the grid"])
def test_results_in_the_place_of_what_they_are_computed_from(name: str, place: int) -> None:
    cols, numbers = TILINGS[name]
    # without the rows of a last tile: what threads that have none leave in messages is nobody's
    x, other = (drawn(cols, numbers, "float32", seed)[:, :, :-4].copy() for seed in (0, 1))
    wanted, total = cupynorm.add_layer_norm(exact(x), exact(other), axis=1)
    arrays = cupy.asarray(x), cupy.asarray(other)
    found, added = cupynorm.add_layer_norm(*arrays, axis=1, out=arrays[place], plan=tiling(cols, numbers, 64))
    assert found is arrays[place]
    np.testing.assert_allclose(found.get(), wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(added.get(), total, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_labels_and_scales_where_threads_have_unequal_shares(dtype: str) -> None:
    x = drawn(40, (4, 16, 8), dtype)
    labels, gamma = np.arange(72).reshape(2, 36) % 40, np.linspace(0.5, 2, 40).astype(dtype_of(dtype))
    plan = tiling_apart(4, 16, 8, 32)
    with row_ops.observed() as plans:
        loss, gradient = cupynorm.cross_entropy(
            on_device(x), on_device(labels), axis=1, return_grad=True, plan=plan
        )
        number, scales = cupynorm.rms_norm(on_device(x), on_device(gamma), axis=1, quantize="int8", plan=plan)
    assert [each.waits for each in plans] == [IN_REGISTERS] * 2
    wanted = cupynorm.cross_entropy(exact(x), labels, axis=1, return_grad=True)
    for got, right in zip((loss, gradient), wanted, strict=True):
        np.testing.assert_allclose(cupy.asnumpy(got), right, rtol=DIGITS[dtype], atol=DIGITS[dtype])
    quantized, of_rows = cupynorm.rms_norm(exact(x), exact(gamma), axis=1, quantize="int8")
    np.testing.assert_allclose(cupy.asnumpy(scales), of_rows, rtol=DIGITS[dtype])
    np.testing.assert_allclose(cupy.asnumpy(number).astype(int), quantized.astype(int), atol=1)


@pytest.mark.parametrize(
    ("variant", "dtype", "padded"), [("uncached", "float16", True), ("split", "float32", False)]
)
def test_rows_that_are_only_read_pass_over_what_lies_outside(variant: str, dtype: str, padded: bool) -> None:
    x = drawn(700, (4, 16, 8), dtype)
    lengths = lengths_of(x, (2, x.shape[2]))
    outside = np.arange(700)[None, :, None] >= lengths[:, None]
    x[np.broadcast_to(outside[:, ::-1] if padded else outside, x.shape)] = np.nan
    options = {"left_padded": padded, "axis": 1}
    with row_ops.observed() as plans, np.errstate(invalid="ignore"):
        found = cupynorm.moments(on_device(x), lengths=on_device(lengths), plan=variant, **options)
        wanted = cupynorm.moments(exact(x), lengths=lengths, **options)
    assert [(each.variant, each.waits) for each in plans] == [(variant, NOWHERE)]
    for got, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(cupy.asnumpy(got), right, rtol=DIGITS[dtype], atol=DIGITS[dtype])
