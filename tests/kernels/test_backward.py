"""Gradients and losses, run by the simulator: each op through every variant, against formulas in float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupynorm._dtypes import compute_dtype
from cupynorm.call.arguments import view
from cupynorm.call.masks import Mask
from cupynorm.invoke import row_ops
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.lower import backward
from cupynorm.lower.around import Around, Counted, Label, Labelled, Operand
from cupynorm.lower.expressions import Expression
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.row import RowOp
from cupynorm.lower.spec import KernelSpec
from cupynorm.lower.tracing import traced
from cupynorm.plan.choose import choose
from cupynorm.plan.config import CONVERTED, PLAIN, VARIANTS, Plan, room_bytes
from cupynorm.plan.limits import RECORDED
from cupynorm.tools.testing import assert_close
from tests import SLOW
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

Array = np.ndarray[Any, Any]


class Labels(NamedTuple):
    """An operand of a load: 1 in the column of a row's label, else 0."""

    labels: Array
    nan: bool = False


class Case(NamedTuple):
    """A call: its first array, the functions and operands of its load and its store, and what is expected.

    An operand broadcasts to x's shape. mask: arrays and numbers of a Mask. ignored: rows of that label do not count.
    wanted: the elements, and then what is saved of each row, None where it is not asked for.
    """

    op: RowOp
    x: Array
    load: Expression | None
    operands: tuple[Any, ...]
    wanted: tuple[Array | None, ...]
    mask: Mapping[str, Any] = MappingProxyType({})
    store: Expression | None = None
    store_operands: tuple[Any, ...] = ()
    number: float | tuple[float, ...] = 0.0
    ignored: tuple[Array, int] | None = None
    labels: Array | None = None  # the op is given the element in their columns
    part: float = 1.0  # of the target, that a label has


def lowered(case: Case, out: Any, saved: tuple[Any, ...], place: Callable[[Any], Any]) -> KernelSpec:
    """Lower a call. place(array): the same on the device."""
    x, shape = place(case.x), case.x.shape

    def of(each: Any) -> Operand:
        if isinstance(each, Labels):
            return Label(view(place(each.labels)), each.nan)
        return view(place(each)).broadcast_to(shape) if isinstance(each, np.ndarray) else each

    arrays = {name: place(each) if isinstance(each, np.ndarray) else each for name, each in case.mask.items()}
    around = Around(
        () if out is None else (view(out),),
        case.load,
        tuple(map(of, case.operands)),
        Mask(shape, 1, **arrays) if arrays else None,
        store=case.store,
        store_operands=tuple(map(of, case.store_operands)),
        counted=None if case.ignored is None else Counted(view(place(case.ignored[0])), case.ignored[1]),
        labelled=None
        if case.labels is None
        else Labelled(view(place(case.labels)), None if case.ignored is None else case.ignored[1], case.part),
        room=0 if out is not None else view(place(np.zeros(room_bytes(*shape) // 8))).pointer,
    )
    pointers = tuple(0 if each is None else view(each).pointer for each in saved)
    compute = compute_dtype(case.x.dtype)
    return fused_spec(case.op, view(x), 1, {}, pointers, case.number, compute, around)


def check(device: Any, case: Case, plan: str | Plan | None, *, in_place: bool = False) -> None:
    """Run a call on the simulator, and compare its results."""
    xp, placed = device.cupy, {}

    def place(array: Array) -> Any:
        return placed.setdefault(id(array), xp.asarray(array))

    stores = case.wanted[0] is not None
    out = place(case.x) if in_place else xp.empty(case.x.shape, case.x.dtype) if stores else None
    compute = compute_dtype(case.x.dtype)
    saved = tuple(None if each is None else xp.empty(each.shape, compute) for each in case.wanted[1:])
    spec = lowered(case, out, saved, place)

    masks = {name: place(each) for name, each in case.mask.items() if isinstance(each, np.ndarray)}
    row_ops.launch(0, spec, plan, Arrays(masks))

    for got, want in zip((out, *saved), case.wanted, strict=True):
        if want is not None:
            # results may be differences of numbers of size 1, and so are losses
            finite = np.where(np.isfinite(want), want, 0.0).reshape(len(want), -1)
            scale = np.sqrt(np.square(finite).mean(axis=1, keepdims=True)) + (got is not out)
            assert_close(
                xp.asnumpy(got).reshape(finite.shape),
                want.reshape(finite.shape),
                dtype=got.dtype.name,
                scale=scale,
            )


# --- the calls, with their formulas ----------------------------------------------------------------------------------


def kept_of(rows: int, cols: int, mask: dict[str, Any]) -> Array:
    """Return which elements a mask keeps."""
    column, query = np.arange(cols), np.arange(rows)[:, None]
    kept = np.ones((rows, cols), bool)
    if "where" in mask:
        kept &= mask["where"] != 0
    if "lengths" in mask:
        kept &= column < mask["lengths"][:, None]
    if "high" in mask:
        kept &= column < query + mask["high"]
    return kept


def exact(array: Array, kept: Array, other: float = 0.0) -> Array:
    """Return what the device is given in float64, and another number in place of what is dropped."""
    return np.where(kept, array.astype(np.float64), other)


def poisoned(array: Array, kept: Array) -> Array:
    """Return the same array with nan where elements are dropped."""
    return np.where(kept, array, np.array(np.nan, array.dtype))


def softmax(rows: int, cols: int, dtype: str, **mask: Any) -> Case:
    random, kept = np.random.default_rng(cols), kept_of(rows, cols, mask)
    dy = random.standard_normal((rows, cols)).astype(dtype)
    y = (random.random((rows, cols)) * 4 / cols).astype(dtype)
    g, p = exact(dy, kept), exact(y, kept)
    scale = 0.5
    wanted = scale * p * (g - (g * p).sum(axis=1, keepdims=True))
    store = traced(lambda dx, scale: dx * scale, 2)
    operands = (poisoned(y, kept),)
    return Case(
        backward.SOFTMAX_BACKWARD,
        poisoned(dy, kept),
        backward.PAIR,
        operands,
        (wanted,),
        mask,
        store,
        (scale,),
    )


def log_softmax(rows: int, cols: int, dtype: str, **mask: Any) -> Case:
    random, kept = np.random.default_rng(cols), kept_of(rows, cols, mask)
    dy = random.standard_normal((rows, cols)).astype(dtype)
    y = (random.standard_normal((rows, cols)) - np.log(cols)).astype(dtype)
    g, p = exact(dy, kept), np.exp(exact(y, kept, -np.inf))
    wanted = g - p * g.sum(axis=1, keepdims=True)
    operands = (poisoned(y, kept),)
    return Case(backward.LOG_SOFTMAX_BACKWARD, poisoned(dy, kept), backward.PAIR, operands, (wanted,), mask)


def norm(op: RowOp, rows: int, cols: int, dtype: str) -> Case:
    """Return dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + another gradient, of rows with a mean far from 0."""
    random, centred = np.random.default_rng(cols), op is backward.LAYER_NORM_BACKWARD
    dy, other = (random.standard_normal((rows, cols)).astype(dtype) for _ in range(2))
    x = (random.standard_normal((rows, cols)) * 2 + 3 * centred).astype(dtype)
    gamma = (1 + random.random(cols)).astype(dtype)
    compute = compute_dtype(np.dtype(dtype))
    mean = (x.astype(np.float64).mean(axis=1, keepdims=True) * centred).astype(compute)
    rstd = (1 / np.sqrt(np.square(x.astype(np.float64) - mean).mean(axis=1, keepdims=True) + 1e-5)).astype(
        compute
    )
    g = dy.astype(np.float64) * gamma
    xhat = (x.astype(np.float64) - mean) * rstd
    dx = g - xhat * (g * xhat).mean(axis=1, keepdims=True) - g.mean(axis=1, keepdims=True) * centred
    load = traced(lambda dy, x, gamma, mean, rstd: (dy * gamma, (x - mean) * rstd), 5)
    store = traced(lambda dx, rstd, other: dx * rstd + other, 3)
    wanted = rstd * dx + other.astype(np.float64)
    return Case(op, dy, load, (x, gamma, mean, rstd), (wanted,), {}, store, (rstd, other))


def layer_norm(rows: int, cols: int, dtype: str) -> Case:
    return norm(backward.LAYER_NORM_BACKWARD, rows, cols, dtype)


def rms_norm(rows: int, cols: int, dtype: str) -> Case:
    return norm(backward.RMS_NORM_BACKWARD, rows, cols, dtype)


def entropy_of(x: Array, q: Array, z: float) -> tuple[Array, Array, Array]:
    """Return gradient, loss and lse in float64."""
    with np.errstate(all="ignore"):
        largest = x.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(x - largest).sum(axis=1, keepdims=True))
        lse, total = largest + log_sum, q.sum(axis=1, keepdims=True)
        terms = np.where(q == 0, 0.0, q * (x - largest - log_sum))
        grad = (total + 2 * z * lse) * np.exp(x - lse) - q
        return grad, z * lse[:, 0] ** 2 - terms.sum(axis=1), lse[:, 0]


def cross_entropy(rows: int, cols: int, dtype: str, **mask: Any) -> Case:
    """Return a call with class weights, smoothed labels, z and large logits."""
    random, kept = np.random.default_rng(cols), kept_of(rows, cols, mask)
    x = (random.standard_normal((rows, cols)) * 3 + 30).astype(dtype)
    labels = random.integers(0, cols, rows).astype(np.int32 if cols % 2 else np.int64)
    weight = random.random(cols).astype(np.float32)
    smoothing, z = 0.125, 2.0**-10
    q = weight * ((1 - smoothing) * (np.arange(cols) == labels[:, None]) + np.float32(smoothing / cols))
    load = traced(lambda x, label, weight, most, each: (x, weight * (label * most + each)), 5)
    grad, loss, lse = entropy_of(exact(x, kept, -np.inf), np.where(kept, q, 0.0), z)
    nothing = ~kept.any(axis=1)
    grad[nothing], loss[nothing], lse[nothing] = 0, 0, -np.inf
    grad[~kept] = 0
    operands = (Labels(labels), weight, 1 - smoothing, float(np.float32(smoothing / cols)))
    return Case(backward.CROSS_ENTROPY, poisoned(x, kept), load, operands, (grad, loss, lse), mask, number=z)


def label_cross_entropy(rows: int, cols: int, dtype: str) -> Case:
    """Return a call with labels alone, the last of them in the last column, z, a factor and large logits."""
    random = np.random.default_rng(cols)
    x = (random.standard_normal((rows, cols)) * 3 + 30).astype(dtype)
    labels = random.integers(0, cols, rows).astype(np.int32 if cols % 2 else np.int64)
    labels[-2:] = 0, cols - 1
    z, factor = 2.0**-10, np.float32(0.75)
    q = (np.arange(cols) == labels[:, None]).astype(np.float64)
    grad, loss, lse = entropy_of(x.astype(np.float64), q, z)
    store = traced(lambda y, factor: y * factor, 2)
    return Case(
        backward.LABEL_CROSS_ENTROPY,
        x,
        None,
        (),
        (grad * factor, loss, lse),
        store=store,
        store_operands=(float(factor),),
        number=z,
        labels=labels,
    )


def smooth_cross_entropy(rows: int, cols: int, dtype: str) -> Case:
    """Return the same with smoothed labels."""
    case = label_cross_entropy(rows, cols, dtype)
    assert case.labels is not None
    smoothing, z, (factor,) = 0.125, 2.0**-10, case.store_operands
    q = (1 - smoothing) * (np.arange(cols) == case.labels[:, None]) + smoothing / cols
    grad, loss, lse = entropy_of(case.x.astype(np.float64), q, z)
    return case._replace(
        op=backward.SMOOTH_CROSS_ENTROPY,
        wanted=(grad * factor, loss, lse),
        number=(z, smoothing, smoothing / cols),
        part=1 - smoothing,
    )


def loss_of_labels(rows: int, cols: int, dtype: str) -> Case:
    return without_gradient(label_cross_entropy(rows, cols, dtype))


def without_gradient(case: Case) -> Case:
    return case._replace(wanted=(None, *case.wanted[1:]), store=None, store_operands=())


def logsumexp(rows: int, cols: int, dtype: str, **mask: Any) -> Case:
    random, kept = np.random.default_rng(cols), kept_of(rows, cols, mask)
    x = (random.standard_normal((rows, cols)) * 3 + 20).astype(dtype)
    with np.errstate(all="ignore"):
        wanted = np.log(np.exp(exact(x, kept, -np.inf) - 20).sum(axis=1)) + 20
    return Case(backward.LOGSUMEXP, poisoned(x, kept), None, (), (None, wanted), mask)


CALLS: dict[str, Callable[..., Case]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "cross_entropy": cross_entropy,
    "label_cross_entropy": label_cross_entropy,
    "smooth_cross_entropy": smooth_cross_entropy,
    "smooth_loss": lambda rows, cols, dtype: without_gradient(smooth_cross_entropy(rows, cols, dtype)),
    "loss_of_labels": loss_of_labels,
    "logsumexp": logsumexp,
}
MASKED = {
    "softmax": ("bytes", "intervals"),
    "log_softmax": ("intervals",),
    "cross_entropy": ("bytes", "intervals"),
    "logsumexp": ("intervals",),
}

# Columns of rows that each variant holds: whole vectors, and rows that begin anywhere.
WIDTHS = {
    "warp": (64, 77),
    "block": (1000, 1001),
    "cached": (1000, 1001),
    "cluster": (4096, 4101),
    "split": (4096, 4101),
    "shared": (1000, 1001),
    "uncached": (1000, 1001),
}
HELD = list(itertools.product(CALLS, VARIANTS))
# Rows that begin anywhere, and rows in vectors; more types of those ops whose States are the smallest and the largest,
# and of LayerNorm.
DTYPES = [("float16", 1), ("float32", 0), ("float64", 0)]
IN = {
    "float16": tuple(CALLS),
    "float32": (
        "softmax",
        "layer_norm",
        "cross_entropy",
        "label_cross_entropy",
        "smooth_cross_entropy",
        "logsumexp",
    ),
    "float64": ("softmax", "cross_entropy", "label_cross_entropy"),
}
MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "bytes": lambda rows, cols: {"where": where_of(rows, cols)},
    "intervals": lambda rows, cols: {"lengths": lengths_of(rows, cols), "high": cols // 2},
}


def where_of(rows: int, cols: int) -> Array:
    """Return bytes of which a row has none, and another all."""
    where = np.random.default_rng(rows).random((rows, cols)) < 0.5
    where[1], where[2] = False, True
    return where


def lengths_of(rows: int, cols: int) -> Array:
    """Return lengths within a vector, of nothing and of all."""
    return np.resize(np.array([cols // 3, 0, cols, 1], np.int32), rows)


@pytest.mark.parametrize(
    ("name", "variant", "dtype", "which"),
    [
        (*held, *of)
        for i, held in enumerate(HELD)
        for k, of in enumerate(DTYPES)
        # the wider types with every second variant: variants are seven, so each op has others than the one before
        if held[0] in IN[of[0]] and (SLOW or k == 0 or (i + k) % 2)
    ],
)
def test_every_variant_and_dtype(name: str, variant: str, dtype: str, which: int, simulated: Any) -> None:
    check(simulated, CALLS[name](3, WIDTHS[variant][which], dtype), variant)


@pytest.mark.parametrize(
    ("name", "variant", "mask"),
    [(*held, mask) for held in HELD for mask in MASKED.get(held[0], ())],
)
def test_what_a_mask_drops_is_0_and_its_nan_stays_there(
    name: str, variant: str, mask: str, simulated: Any
) -> None:
    # bytes of rows that begin anywhere, intervals of rows in vectors, or the other way round for every second variant
    which = (VARIANTS.index(variant) + (mask == "bytes")) % 2
    cols, dtype = WIDTHS[variant][which], ("float16", "float32")[which]

    check(simulated, CALLS[name](5, cols, dtype, **MASKS[mask](5, cols)), variant)


@pytest.mark.parametrize(
    "name",
    ["softmax", "layer_norm", "cross_entropy", "label_cross_entropy", "smooth_cross_entropy", "logsumexp"],
)
def test_a_block_goes_through_many_rows(name: str, simulated: Any) -> None:
    """One block on each multiprocessor, so that its rows follow one another."""
    rows = 2 * RECORDED["h200"].sm_count + 5
    for cols, variant, dtype in ((264, "block", "float32"), (269, "shared", "float16")):
        case = CALLS[name](rows, cols, dtype)
        plan = planned(case, variant)
        plan = dataclasses.replace(plan, min_blocks=1, waves=0.1)
        check(simulated, case, plan)


def planned(case: Case, variant: str | Plan) -> Plan:
    """Return the plan of a call on an H200."""
    out = np.empty_like(case.x) if case.wanted[0] is not None else None
    problem = lowered(case, out, tuple(None for _ in case.wanted[1:]), lambda array: array).problem
    return choose(problem, RECORDED["h200"], lambda plan: max(1, plan.min_blocks), variant)


@pytest.mark.parametrize(
    ("name", "cols"),
    [
        ("layer_norm", 1024),
        ("softmax", 1505),
        ("cross_entropy", 1000),
        ("label_cross_entropy", 1000),
        ("label_cross_entropy", 1505),
        ("smooth_cross_entropy", 1505),
    ],
)
def test_a_cluster_prefetches_rows_with_all_that_their_elements_are_made_of(
    name: str, cols: int, simulated: Any
) -> None:
    case = CALLS[name](19, cols, "float16")
    numbers: dict[str, Any] = {
        "variant": "cluster",
        "vector": 8,
        "vectors": 1,
        "stages": 1,
        "ctas_per_row": 2,
        "block": 128,
        "group": 128,
    }
    numbers |= {"unaligned": 1, "parameter_cache": CONVERTED} if cols % 2 else {}

    check(simulated, case, planned(case, dataclasses.replace(PLAIN, **numbers)))


@pytest.mark.parametrize(
    ("name", "cols", "dtype"),
    [
        ("loss_of_labels", 4096, "float16"),
        ("loss_of_labels", 4101, "float16"),
        ("smooth_loss", 4096, "float32"),
        ("logsumexp", 4101, "float32"),
    ],
)
def test_blocks_of_a_cluster_stream_rows_that_are_only_read(
    name: str, cols: int, dtype: str, simulated: Any
) -> None:
    case = CALLS[name](5, cols, dtype)
    vector = 16 // np.dtype(dtype).itemsize
    numbers = {"variant": "cluster", "vector": vector, "vectors": 2, "ctas_per_row": 2, "block": 64}

    check(simulated, case, planned(case, dataclasses.replace(PLAIN, **numbers, unaligned=cols % 2)))


@pytest.mark.parametrize(
    ("name", "cols", "variant"),
    [
        ("softmax", 1001, "block"),
        ("cross_entropy", 4096, "split"),
        *(("label_cross_entropy", WIDTHS[variant][0], variant) for variant in VARIANTS),
        ("smooth_cross_entropy", 1000, "cached"),
        ("smooth_cross_entropy", 4096, "split"),
    ],
)
def test_in_place(name: str, cols: int, variant: str, simulated: Any) -> None:
    check(simulated, CALLS[name](3, cols, "float16"), variant, in_place=True)


def test_each_label_is_in_one_blocks_part_of_its_row(simulated: Any) -> None:
    """Parts begin at lines: so do these labels, but for the last of some lines."""
    rows, cols, line = 64, 4096, 64
    case = loss_of_labels(rows, cols, "float16")
    labels = np.arange(rows) * line + (np.arange(rows) % 4 == 3) * (line - 1)
    x = case.x.astype(np.float64)
    _, loss, lse = entropy_of(x, (np.arange(cols) == labels[:, None]).astype(np.float64), case.number)

    check(simulated, case._replace(labels=labels, wanted=(None, loss, lse)), "split")


@pytest.mark.parametrize("variant", ["block", "shared", "uncached"])
def test_rows_that_are_ignored_count_for_nothing_and_labels_that_are_none_give_nan(
    variant: str, simulated: Any
) -> None:
    case = cross_entropy(6, 1000, "float32")
    labels = case.operands[0].labels.copy()
    labels[1], labels[4] = -100, 1000
    x = case.x.copy()
    x[1] = np.nan
    grad, loss, _ = case.wanted
    assert grad is not None
    assert loss is not None
    grad, loss = grad.copy(), loss.copy()
    grad[1], loss[1], grad[4], loss[4] = 0, 0, np.nan, np.nan
    case = case._replace(
        x=x,
        operands=(Labels(labels, nan=True), *case.operands[1:]),
        wanted=(grad, loss, None),
        ignored=(labels, -100),
    )

    check(simulated, case, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("name", ["label_cross_entropy", "smooth_cross_entropy"])
def test_rows_of_labels_that_are_ignored_or_none(
    name: str, variant: str, stores: bool, simulated: Any
) -> None:
    case = CALLS[name](9, WIDTHS[variant][0], "float32")
    assert case.labels is not None
    labels, x = case.labels.astype(np.int64), case.x.copy()
    labels[1], labels[4], labels[5], labels[6] = -100, case.x.shape[1], -1, 2**32
    x[1], x[2] = np.nan, -np.inf
    grad, loss, _ = (np.copy(each) for each in case.wanted if each is not None)
    for each, value in ((1, 0.0), (2, np.nan), (4, np.nan), (5, np.nan), (6, np.nan)):
        grad[each], loss[each] = value, value
    case = case._replace(
        x=x,
        load=traced(lambda x: x, 1),
        wanted=(grad if stores else None, loss, None),
        ignored=(labels, -100),
        labels=labels,
        **({} if stores else {"store": None, "store_operands": ()}),
    )

    check(simulated, case, variant)


@pytest.mark.parametrize("variant", ["warp", "uncached"])
def test_infinite_logits(variant: str, simulated: Any) -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    labels = np.array([1, 2, 3, 4, 5], np.int8)
    x[0, 7], x[1, 2], x[2], x[3, 9], x[4, 9] = -np.inf, -np.inf, -np.inf, np.inf, np.nan
    q = (np.arange(64) == labels[:, None]).astype(np.float64)
    load = traced(lambda x, label: (x, label), 2)
    grad, loss, lse = entropy_of(x.astype(np.float64), q, 0.0)
    assert np.isfinite(loss[0])
    assert loss[1] == np.inf
    assert np.isnan(loss[2:]).all()
    check(simulated, Case(backward.CROSS_ENTROPY, x, load, (Labels(labels),), (grad, loss, None)), variant)
    alone = Case(backward.LABEL_CROSS_ENTROPY, x, None, (), (grad, loss, None), labels=labels)
    check(simulated, alone, variant)

    smoothing = 0.125
    smooth = smooth_cross_entropy(5, 64, "float32")
    grad, _, _ = entropy_of(x.astype(np.float64), (1 - smoothing) * q + smoothing / 64, 0.0)
    for ignored in (None, (labels, -1)):  # with a mask and without
        case = smooth._replace(
            x=x,
            wanted=(grad, np.array([np.inf, np.inf, np.nan, np.nan, np.nan]), None),
            number=(0.0, smoothing, smoothing / 64),
            ignored=ignored,
            load=None if ignored is None else traced(lambda x: x, 1),
            labels=labels,
            store=None,
            store_operands=(),
        )
        check(simulated, case, variant)

    lse[2:] = -np.inf, np.inf, np.nan
    check(simulated, Case(backward.LOGSUMEXP, x, None, (), (None, lse)), variant)
