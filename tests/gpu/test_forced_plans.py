"""Each variant, forced, on rows that fill no packs, with all that can be computed around an op: right, or refused.

What is expected is written from the formulas here, in float64. Memory beside a result must stay as it was.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from cupynorm import Quantize, add_layer_norm, add_rms_norm, fuse, layer_norm, log_softmax, rms_norm, softmax
from cupynorm import functions as f
from cupynorm._dtypes import DTYPES, device_dtype, quantized_dtype
from cupynorm.host.philox import words
from cupynorm.plan.config import VARIANTS, DoesNotFitError
from cupynorm.tools.testing import assert_close
from tests import SLOW
from tests.call.test_quantized import LARGEST, nearest
from tests.gpu.agree import SIMULATED

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
small = pytest.mark.small

# 16 bits first: their packs are the widest, so more widths fill none
TYPES = tuple(name for name in ("float16", "bfloat16", "float32", "float64") if name in DTYPES)
every_dtype = pytest.mark.parametrize("dtype", TYPES)


class Layout(NamedTuple):
    """Where arrays lie: elements before the first row and between two rows, of x, of `out`, and of other inputs.

    in_place: the first result of x's dtype replaces x.
    """

    x: tuple[int, int] = (0, 0)
    out: tuple[int, int] = (0, 0)
    beside: tuple[int, int] = (0, 0)
    in_place: bool = False


LAYOUTS = {
    "aligned": Layout(),
    "odd address": Layout((1, 0), (1, 0), (1, 0)),
    "rows apart": Layout((0, 13), (0, 13), (0, 13)),
    "rows apart alike": Layout((3, 8), (3, 8), (3, 0)),
    "out elsewhere": Layout((0, 0), (1, 0), (0, 0)),
    "out apart": Layout((5, 3), (0, 2), (3, 1)),
    "beside elsewhere": Layout((0, 0), (0, 0), (3, 5)),
    "in place": Layout((3, 2), (3, 2), (0, 0), in_place=True),
}


def laid(host: Array, place: tuple[int, int]) -> Array:
    """Return memory that holds `host` at such a place; the rest of it holds sevens."""
    before, between = place
    rows, cols = host.shape
    memory = np.full(before + rows * (cols + between), 7, host.dtype)
    seen(memory, host.shape, place)[...] = host
    return memory


def seen(memory: Any, shape: tuple[int, int], place: tuple[int, int]) -> Any:
    """Return the view of memory that lies so."""
    before, between = place
    return memory[before:].reshape(shape[0], shape[1] + between)[:, : shape[1]]


class Arrays:
    """One call's arrays on the device, in a layout; and the results that are expected of it."""

    def __init__(
        self, xp: Any, x: Array, layout: Layout, random: np.random.Generator, result: Any = None
    ) -> None:
        """Bring x there. result: the dtype of results, x's if it is None."""
        self.xp, self.host, self.layout, self.random = xp, x, layout, random
        self.result = np.dtype(x.dtype if result is None else result)
        self.memory = xp.asarray(laid(x, layout.x))
        self.x = seen(self.memory, x.shape, layout.x)
        self.wide = x.astype(np.float64)
        self.rows, self.cols = x.shape
        self.outs: list[Any] = []

    def beside(self, host: Array) -> Any:
        """Bring an array of x's shape, or of its columns, to where such ones lie."""
        if host.ndim == 1:
            before = self.layout.beside[0]
            return self.xp.asarray(np.concatenate([np.zeros(before, host.dtype), host]))[before:]
        return seen(self.xp.asarray(laid(host, self.layout.beside)), host.shape, self.layout.beside)

    def out(self, dtype: Any = None) -> Any:
        """Return where a result goes; it is looked at when the call has run."""
        wanted = self.result if dtype is None else np.dtype(dtype)
        if self.layout.in_place and not self.outs and wanted == self.host.dtype:
            self.outs.append(self.memory)
            return self.x
        memory = self.xp.asarray(laid(np.zeros(self.host.shape, wanted), self.layout.out))
        self.outs.append(memory)
        return seen(memory, self.host.shape, self.layout.out)

    def results(self) -> list[Array]:
        """Return what was written, in the order of out(); AssertionError if something beside it was."""
        found = []
        for memory in self.outs:
            after = self.xp.asnumpy(memory)
            view = seen(after, self.host.shape, self.layout.out)
            found.append(view.copy())
            view[...] = 7
            assert (after == np.full_like(after, 7)).all(), "something beside the result was written"
        return found

    def normal(self, *shape: int, dtype: Any = None) -> Array:
        """Return random numbers, which are what the dtype holds of them."""
        return self.random.standard_normal(shape or self.host.shape).astype(dtype or self.host.dtype)

    def lengths(self) -> Array:
        """Return a length for each row; the first keeps all, and with 3 rows or more one keeps nothing."""
        found = self.random.integers(1, self.cols + 1, self.rows).astype(np.int32)
        found[0] = self.cols
        if self.rows > 2:
            found[1] = 0
        return found

    def kept(self) -> Array:
        return self.random.random(self.host.shape) < 0.7


# ---- formulas, in float64


def softmaxed(z: Array, kept: Any = True) -> Array:
    z = np.where(kept, z, -np.inf)
    largest = z.max(axis=-1, keepdims=True)
    powers = np.exp(z - np.where(np.isneginf(largest), 0, largest))
    total = powers.sum(axis=-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(z), where=total > 0)


def log_softmaxed(z: Array, kept: Any = True) -> Array:
    z = np.where(kept, z, -np.inf)
    largest = z.max(axis=-1, keepdims=True)
    largest = np.where(np.isneginf(largest), 0, largest)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(z - largest).sum(axis=-1, keepdims=True))
    return np.where(np.isneginf(z), z, z - largest - np.where(np.isneginf(total), 0, total))


def layer_normed(z: Array, gamma: Any = 1.0, beta: Any = 0.0) -> Array:
    off = z - z.mean(axis=-1, keepdims=True)
    return np.asarray(off / np.sqrt((off * off).mean(axis=-1, keepdims=True) + 1e-5) * gamma + beta)


def rms_normed(z: Array, gamma: Any = 1.0) -> Array:
    return np.asarray(z / np.sqrt((z * z).mean(axis=-1, keepdims=True) + 1e-6) * gamma)


def wide(*each: Array) -> list[Array]:
    return [one.astype(np.float64) for one in each]


# ---- calls. Each returns what is expected of every result: of what went to out() first.


class Rounded(NamedTuple):
    """A result and what it should be, rounded to its dtype; where it is not among those of out(), `got`."""

    wanted: Array
    got: Any = None


class Quantised(NamedTuple):
    """The same of a result in 8 bits; scales: of the rows, as they came from the device, or one number."""

    wanted: Array
    name: str
    scales: Any


def masked_by_bytes(a: Arrays, **how: Any) -> list[Any]:
    kept = a.kept()
    softmax(a.x, where=a.beside(kept), out=a.out(), **how)
    return [Rounded(softmaxed(a.wide, kept))]


def masked_by_lengths(a: Arrays, **how: Any) -> list[Any]:
    lengths = a.lengths()
    log_softmax(a.x, lengths=a.xp.asarray(lengths), out=a.out(), **how)
    return [Rounded(log_softmaxed(a.wide, np.arange(a.cols) < lengths[:, None]))]


def masked_by_lengths_from_the_right(a: Arrays, **how: Any) -> list[Any]:
    lengths = a.lengths()
    softmax(a.x, lengths=a.xp.asarray(lengths), left_padded=True, out=a.out(), **how)
    return [Rounded(softmaxed(a.wide, np.arange(a.cols) >= a.cols - lengths[:, None]))]


def causal(a: Arrays, **how: Any) -> list[Any]:
    softmax(a.x, causal=True, out=a.out(), **how)
    return [Rounded(softmaxed(a.wide, np.arange(a.cols) <= np.arange(a.rows)[:, None]))]


def window(a: Arrays, **how: Any) -> list[Any]:
    """All columns of the first rows but the last few."""
    right = a.cols - 3
    log_softmax(a.x, window=(2, right), out=a.out(), **how)
    apart = np.arange(a.cols) - np.arange(a.rows)[:, None]
    return [Rounded(log_softmaxed(a.wide, (apart >= -2) & (apart <= right)))]


def biased(a: Arrays, **how: Any) -> list[Any]:
    bias = a.normal()
    softmax(a.x, bias=a.beside(bias), scale=0.5, out=a.out(), **how)
    return [Rounded(softmaxed(a.wide * 0.5 + bias.astype(np.float64)))]


def biased_and_masked(a: Arrays, **how: Any) -> list[Any]:
    bias, kept, lengths = a.normal(a.cols, dtype=np.float32), a.kept(), a.lengths()
    softmax(
        a.x,
        bias=a.beside(bias),
        where=a.beside(kept.astype(np.uint8)),
        lengths=a.xp.asarray(lengths),
        window=(None, a.cols),
        out=a.out(),
        **how,
    )
    return [Rounded(softmaxed(a.wide + bias, kept & (np.arange(a.cols) < lengths[:, None])))]


def sum_kept(a: Arrays, **how: Any) -> list[Any]:
    residual, gamma, beta, bias = a.normal(), a.normal(a.cols), a.normal(a.cols), a.normal(a.cols)
    given = [a.beside(each) for each in (residual, gamma, beta)]
    _, total = add_layer_norm(a.x, *given, bias=a.beside(bias), alpha=0.5, out=a.out(), **how)
    residual, gamma, beta, bias = wide(residual, gamma, beta, bias)
    added = a.wide + bias + 0.5 * residual
    return [Rounded(layer_normed(added, gamma, beta)), Rounded(added, total)]


def sum_alone(a: Arrays, **how: Any) -> list[Any]:
    residual, gamma = a.normal(), a.normal(a.cols)
    add_rms_norm(a.x, a.beside(residual), a.beside(gamma), return_sum=False, out=a.out(), **how)
    residual, gamma = wide(residual, gamma)
    return [Rounded(rms_normed(a.wide + residual, gamma))]


def sum_dropped(a: Arrays, **how: Any) -> list[Any]:
    residual, seed, p = a.normal(), 3 + 2**40, 0.25
    options = {"dropout": p, "seed": seed, "offset": 5}
    _, total = add_layer_norm(a.x, a.beside(residual), out=a.out(), **options, **how)
    keeps = (words(seed, 5, 0, a.host.size) >= p * 2**32).reshape(a.host.shape)
    added = np.where(keeps, a.wide / (1 - p), 0) + residual.astype(np.float64)
    return [Rounded(layer_normed(added)), Rounded(added, total)]


def to_int8(a: Arrays, **how: Any) -> list[Any]:
    gamma, beta = a.normal(a.cols), a.normal(a.cols)
    out = a.out(np.int8)
    _, scales = layer_norm(a.x, a.beside(gamma), a.beside(beta), out=out, quantize="int8", **how)
    return [Quantised(layer_normed(a.wide, *wide(gamma, beta)), "int8", scales)]


def to_float8(a: Arrays, **how: Any) -> list[Any]:
    name = "float8_e4m3fn"
    gamma = a.normal(a.cols)
    out = a.out(device_dtype(quantized_dtype(name)))
    rms_norm(a.x, a.beside(gamma), out=out, quantize=Quantize(name, 0.02), **how)
    return [Quantised(rms_normed(a.wide, *wide(gamma)), name, 0.02)]


def masked_to_int8(a: Arrays, **how: Any) -> list[Any]:
    kept = a.kept()
    kept[:, 0] = True  # a row that keeps nothing has a scale of 0
    _, scales = softmax(a.x, where=a.beside(kept), out=a.out(np.int8), quantize="int8", **how)
    return [Quantised(softmaxed(a.wide, kept), "int8", scales)]


def sum_to_int8(a: Arrays, **how: Any) -> list[Any]:
    residual = a.normal()
    _, scales, total = add_rms_norm(a.x, a.beside(residual), out=a.out(np.int8), quantize="int8", **how)
    added = a.wide + residual.astype(np.float64)
    return [Quantised(rms_normed(added), "int8", scales), Rounded(added, total)]


AROUND_NORM = fuse(
    layer_norm,
    load=lambda x, r, c: x * c + r,
    store=lambda y, g, b: (f.maximum(y * g, b), y),
    keep_loaded=True,
)


def fused_norm(a: Arrays, **how: Any) -> list[Any]:
    """What is loaded and two results are written; operands of each element, of the columns and of the rows."""
    r, c, g = a.normal(), a.normal(a.cols), a.normal(a.rows, 1)
    outs = (a.out(), a.out(), a.out(a.host.dtype))
    AROUND_NORM(a.x, a.beside(r), a.beside(c), a.xp.asarray(g), -0.5, out=outs, **how)
    r, c, g = wide(r, c, g)
    loaded = a.wide * c + r
    y = layer_normed(loaded)
    return [Rounded(np.maximum(y * g, -0.5)), Rounded(y), Rounded(loaded)]


WEIGHTED = fuse(softmax, store=lambda y, w: y * w)


def fused_softmax(a: Arrays, **how: Any) -> list[Any]:
    """Nothing is computed of x: what is needed beside the results is loaded with it."""
    w = a.normal(dtype=np.float32)
    WEIGHTED(a.x, a.beside(w), out=a.out(), **how)
    return [Rounded(softmaxed(a.wide) * w)]


FUSED: dict[str, Callable[..., list[Any]]] = {
    call.__name__: call
    for call in (
        masked_by_bytes,
        masked_by_lengths,
        masked_by_lengths_from_the_right,
        causal,
        window,
        biased,
        biased_and_masked,
        sum_kept,
        sum_alone,
        sum_dropped,
        to_int8,
        to_float8,
        masked_to_int8,
        sum_to_int8,
        fused_norm,
        fused_softmax,
    )
}


def plain_layer_norm(a: Arrays, **how: Any) -> list[Any]:
    gamma, beta = a.normal(a.cols), a.normal(a.cols)
    layer_norm(a.x, a.beside(gamma), a.beside(beta), out=a.out(), **how)
    return [Rounded(layer_normed(a.wide, *wide(gamma, beta)))]


def plain_rms_norm(a: Arrays, **how: Any) -> list[Any]:
    gamma = a.normal(a.cols, dtype=np.float32)
    rms_norm(a.x, a.beside(gamma), out=a.out(), **how)
    return [Rounded(rms_normed(a.wide, *wide(gamma)))]


def plain_softmax(a: Arrays, **how: Any) -> list[Any]:
    softmax(a.x, out=a.out(), **how)
    return [Rounded(softmaxed(a.wide))]


PLAIN = {call.__name__: call for call in (plain_layer_norm, plain_rms_norm, plain_softmax)}
every_fused_call = pytest.mark.parametrize("call", FUSED.values(), ids=FUSED)
every_plain_call = pytest.mark.parametrize("call", PLAIN.values(), ids=PLAIN)


def assert_nearest(q: Array, wanted: Array, name: str) -> None:
    """No number of the dtype is nearer, but for what float32 cannot tell."""
    best = np.abs(nearest(wanted, name) - wanted)
    off = np.abs(q.astype(np.float64) - wanted)
    assert (off <= best + 2e-5 * np.abs(wanted) + 1e-5 * LARGEST[name]).all(), (off - best).max()


def check(
    xp: Any,
    call: Callable[..., list[Any]],
    shape: tuple[int, int],
    dtype: str,
    layout: str,
    plan: str | None,
    result: str | None = None,
) -> None:
    """Run a call and compare all that it wrote. DoesNotFitError where the variant cannot hold the row."""
    random = np.random.default_rng(zlib.crc32(repr((call.__name__, shape, dtype)).encode()))
    x = random.standard_normal(shape).astype(DTYPES[dtype])
    a = Arrays(xp, x, LAYOUTS[layout], random, DTYPES[result or dtype])

    expected = call(a, plan=plan)

    written = iter(a.results())
    for each in expected:
        if isinstance(each, Quantised):
            q, y = next(written), each.wanted
            scales = each.scales
            if not isinstance(scales, float):
                scales = xp.asnumpy(scales).astype(np.float64)[:, None]
                largest = np.abs(y).max(axis=1, keepdims=True)
                np.testing.assert_allclose(scales, largest / LARGEST[each.name], rtol=4e-6)
            assert_nearest(q.view(quantized_dtype(each.name)), y / scales, each.name)
            continue
        got = next(written) if each.got is None else xp.asnumpy(each.got)
        # what is dropped is exactly that
        dropped = np.isneginf(each.wanted)
        dropped = dropped if dropped.any() else each.wanted == 0
        assert np.array_equal(got[dropped].astype(np.float64), each.wanted[dropped])
        # where summands cancel, their size rules
        added = call is fused_norm or each.got is not None
        assert_close(got, each.wanted, scale=np.asarray(2.0) if added else None)


# Columns that a variant must hold whatever is computed around an op, by bytes of an element. They are odd, so that no
# two elements are moved together where rows must begin at packs; and where a variant holds as many, they are so many
# that rows may begin anywhere ("unaligned" crossovers of fused calls in plan/data).
HELD = {
    "warp": {2: 257, 4: 333, 8: 101},
    "block": {2: 1001, 4: 5121, 8: 1001},
    "cluster": {2: 1001, 4: 5121, 8: 2611},
    "split": {2: 5121, 4: 5121, 8: 2611},
    "shared": {2: 1001, 4: 5121, 8: 2611},
    "cached": {2: 1001, 4: 5121, 8: 2611},
    "uncached": {2: 1001, 4: 5121, 8: 2611},
}


def widths(variant: str, dtype: str) -> int:
    return HELD[variant][np.dtype(DTYPES[dtype]).itemsize]


def is_small(call: int, dtype: int, variant: int) -> bool:
    """Whether the simulator takes a case, by its place in each list.

    Calls, dtypes and variants meet in pairs, and all calls of halves are taken in clusters; with CUPYNORM_SLOW=1 all of
    halves, all of clusters, and every seventh of the others.
    """
    halves, clusters = [*TYPES][dtype] == "float16", VARIANTS[variant] == "cluster"
    number = (call * len(TYPES) + dtype) * len(VARIANTS) + variant
    if SLOW and (halves or clusters or number % 7 == 0):
        return True
    return (call + variant) % len(TYPES) == dtype or (halves and clusters)


ROWS = (1, 3, 10)


def rows_of(call: int, variant: int) -> tuple[int, ...]:
    """Return how many rows there are: on the simulator one of ROWS in turn; all with CUPYNORM_SLOW=1."""
    return (ROWS[(call + 2 * variant) % len(ROWS)],) if SIMULATED and not SLOW else ROWS


CASES = [
    pytest.param(
        FUSED[name],
        dtype,
        variant,
        rows_of(i, v),
        id=f"{variant}-{name}-{dtype}",
        marks=small if is_small(i, k, v) else (),
    )
    for (i, name), (k, dtype), (v, variant) in itertools.product(
        enumerate(FUSED), enumerate(TYPES), enumerate(VARIANTS)
    )
]


@pytest.mark.parametrize(("call", "dtype", "plan", "numbers"), CASES)
def test_a_forced_variant_is_right_where_rows_fill_no_vectors(
    xp: Any, call: Any, dtype: str, plan: str, numbers: tuple[int, ...]
) -> None:
    for rows in numbers:
        check(xp, call, (rows, widths(plan, dtype)), dtype, "aligned", plan)


SOME = (masked_by_bytes, sum_kept, to_int8)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "aligned"])
@pytest.mark.parametrize(
    ("call", "plan"),
    [
        pytest.param(
            call,
            variant,
            id=f"{variant}-{call.__name__}",
            marks=small if variant == "cluster" and call is not to_int8 else (),
        )
        for call, variant in itertools.product(SOME, VARIANTS)
    ],
)
def test_arrays_of_a_forced_plan_lie_anywhere(xp: Any, call: Any, plan: str, layout: str) -> None:
    """Rows of whole packs, too, which begin at none."""
    for cols in (widths(plan, "float16"), 2048 if plan == "split" else 256):
        check(xp, call, (5, cols), "float16", layout, plan)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=small if (layout, dtype) == ("rows apart", "float16") else ())
        for layout, dtype in itertools.product(("rows apart", "out apart"), TYPES)
    ],
)
@every_plain_call
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forced_variant_of_an_op_alone_is_right_wherever_rows_begin(
    xp: Any, call: Any, dtype: str, variant: str, layout: str
) -> None:
    check(xp, call, (5, {"warp": 257, "block": 1001}.get(variant, 5121)), dtype, layout, variant)


# Drawn at random, for devices: each draw is a call, a dtype, a layout and a shape, of which every variant is right,
# and the dispatcher's own plan; warp and block may say that a row is too long for them.
DRAWS = 4


@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(n, marks=pytest.mark.slow) for n in range(16, 128))]
)
def test_every_plan_of_random_rows_is_right(xp: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(DRAWS):
        # most are as wide as what variants hold, few so wide that blocks share them
        cols = int(2 ** random.uniform(4, 13 if random.random() < 0.8 else 17))
        cols = max(1, cols + int(random.integers(-9, 10)))
        rows = int(random.choice([1, 2, 3, 5, 9, 33, 150, 1000]))
        rows = max(1, min(rows, (1 << 19) // cols))
        dtype = str(random.choice([*TYPES, *TYPES[:2]]))  # 16 bits twice as often
        layout = str(random.choice(list(LAYOUTS)))
        result = str(random.choice(TYPES)) if random.random() < 0.25 else dtype
        calls = {**FUSED, **PLAIN}
        name = str(random.choice(list(calls)))
        what = f"{name} of {rows} x {cols}, {dtype} to {result}, {layout}"
        plans = (None, *VARIANTS)
        for plan in plans:
            try:
                check(xp, calls[name], (rows, cols), dtype, layout, plan, result)
            except DoesNotFitError:
                # of a cluster the registers run out last
                may = name in PLAIN or plan in {"warp", "block"} or (plan == "cluster" and cols > 1 << 15)
                may = may or (plan == "shared" and cols > 1 << 14)  # of a block's shared memory
                may = may or (plan == "split" and cols < 1 << 11)  # no vector for each thread of a block
                assert may, f"{plan} refuses {what}"
            except Exception as fault:
                raise AssertionError(f"{plan}: {what}") from fault
