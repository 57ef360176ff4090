"""Every op in every form, once: selftest, explain, bench and tests go by this table.

A form is one call on given arrays: a row op alone, masked, of a sum, quantised or fused with a function, or another op.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm._dtypes import compute_dtype, device_dtype, dtype_of, quantized_dtype
from cupynorm.call.quantize import Quantize
from cupynorm.catalog import op_table
from cupynorm.catalog.axis_forms import ALONG_AXES
from cupynorm.catalog.form import EVEN, LONG, TOKENS, Array, Arrays, Form, Given, wide
from cupynorm.catalog.gradient_forms import GRADIENTS, LOSSES, OF_ROW_OPS
from cupynorm.catalog.statistic_forms import STATISTICS
from cupynorm.host.philox import Dropout
from cupynorm.ops import add_norm, elementwise, heads
from cupynorm.ops.fusion import fuse
from cupynorm.ops.norm import layer_norm
from cupynorm.ops.softmax import log_softmax, softmax

if TYPE_CHECKING:
    from collections.abc import Callable


KEPT = 0.8  # of a mask of bytes
P, SEED = 0.1, 7  # of a dropout
SCALE = 0.125  # of attention's scores, for heads of 64
SCALES = {"int8": 0.5, "float8_e4m3fn": 0.2, "float8_e5m2": 0.01}  # of a whole result: nothing saturates
HEAD, SEQ = 64, 128


def _rows(
    beside: tuple[str, ...] = (), columns: tuple[str, ...] = (), results: tuple[str, ...] = ()
) -> Callable[[int, int, Any], dict[str, Given]]:
    """Return `given` of x and other inputs of its shape, affine parameters, y and other results of its shape."""

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = {name: Given((rows, cols), dtype) for name in ("x", *beside)}
        found |= {name: Given((cols,), dtype) for name in columns}
        return found | {name: Given((rows, cols), dtype, "result") for name in ("y", *results)}

    return given


# ---- row ops alone

TORCH: dict[str, Callable[[Any, Arrays], Any]] = {
    "layer_norm": lambda t, a: t.nn.functional.layer_norm(
        a["x"], a["x"].shape[-1:], a["gamma"], a["beta"], 1e-5
    ),
    "rms_norm": lambda t, a: t.nn.functional.rms_norm(a["x"], a["x"].shape[-1:], a["gamma"], 1e-6),
    "softmax": lambda t, a: t.softmax(a["x"], -1, out=a.get("y")),
    "log_softmax": lambda t, a: t.log_softmax(a["x"], -1, out=a.get("y")),
}


def _alone(op: op_table.Op) -> Form:
    return Form(
        op.name,
        _rows(columns=op.parameters),
        lambda a, **options: op.function(a["x"], *(a[name] for name in op.parameters), **options),
        lambda a: op.reference(a["x"], *(a[name] for name in op.parameters))[:1],
        TORCH.get(op.name),
    )


# ---- masked


def _scores(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
    """Return x and y of shape [batch, queries, keys], with queries = keys if rows is a multiple of keys."""
    queries = cols if rows % cols == 0 else rows
    shape = (rows // queries, queries, cols)
    return {"x": Given(shape, dtype), "y": Given(shape, dtype, "result")}


class _Mask(NamedTuple):
    """A mask: the arrays that it adds to the given ones, the options of a call, and the kept elements, of x's shape.

    read: how many elements of x of such a shape; None for all.
    """

    given: Callable[[tuple[int, ...], Any], dict[str, Given]]
    options: Callable[[Arrays], dict[str, Any]]
    kept: Callable[[Arrays], Any]
    read: Callable[[tuple[int, ...]], int] | None = None
    target: float | None = None


WINDOW = 255  # keys before a query that it sees


def _diagonal(a: Arrays) -> Any:
    """Return query - key."""
    queries, keys = a["x"].shape[-2:]
    return np.arange(queries)[:, None] - np.arange(keys)


def _band(shape: tuple[int, ...], before: int) -> int:
    """Return how many keys are kept in all, if each query keeps its own position and `before` earlier ones."""
    query = np.arange(shape[-2])
    kept = np.minimum(query + 1, shape[-1]) - np.maximum(query - before, 0)
    return int(np.maximum(kept, 0).sum()) * math.prod(shape[:-2])


def ragged(batch: int, cols: int) -> Array:
    """Return a length for each of a batch; the same at each call."""
    return np.random.default_rng(1).integers(1, cols + 1, (batch, 1), np.int32)


def _by_lengths(holds: str, read: Callable[[tuple[int, ...]], int] | None) -> _Mask:
    return _Mask(
        lambda shape, _: {"lengths": Given((shape[0], 1), np.dtype(np.int32), holds)},
        lambda a: {"lengths": a["lengths"]},
        lambda a: np.arange(a["x"].shape[-1]) < a["lengths"][..., None],
        read,
        0.95,
    )


MASKS = {
    "where": _Mask(
        lambda shape, _: {"where": Given(shape, np.dtype(np.bool_), "mask")},
        lambda a: {"where": a["where"]},
        lambda a: a["where"],
        target=0.95,
    ),
    "lengths": _by_lengths("lengths", None),
    "ragged": _by_lengths("ragged", lambda shape: int(ragged(shape[0], shape[2]).sum()) * shape[1]),
    "causal": _Mask(
        lambda _, __: {},
        lambda _: {"causal": True},
        lambda a: _diagonal(a) >= 0,
        lambda shape: _band(shape, max(shape)),
        0.95,
    ),
    "window": _Mask(
        lambda _, __: {},
        lambda _: {"window": (WINDOW, 0)},
        lambda a: (_diagonal(a) >= 0) & (_diagonal(a) <= WINDOW),
        lambda shape: _band(shape, WINDOW),
    ),
    "bias": _Mask(
        lambda shape, dtype: {"bias": Given(shape[1:], dtype)},
        lambda a: {"bias": a["bias"]},
        lambda _: np.ones((), bool),
    ),
}


def _masked(op: Any, what: str) -> Form:
    mask = MASKS[what]

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = _scores(rows, cols, dtype)
        return found | mask.given(found["x"].shape, dtype)

    def reference(a: Arrays) -> tuple[Array, ...]:
        z = wide(a["x"]) * SCALE + wide(a.get("bias", 0))
        kept = np.broadcast_to(mask.kept(a), z.shape)
        y = op_table.op(op.__name__).reference(np.where(kept, z, -np.inf))[0]
        return (np.where(kept, y, 0 if op is softmax else -np.inf),)

    def torch(t: Any, a: Arrays) -> Any:
        z = a["x"] * SCALE
        if "bias" in a:
            return getattr(t, op.__name__)(z + a["bias"], -1)
        if "where" in a:
            dropped = ~a["where"]
        elif "lengths" in a:
            dropped = t.arange(z.shape[-1], device=z.device) >= a["lengths"][..., None]
        else:
            one = t.ones(z.shape[-2:], dtype=t.bool, device=z.device)
            dropped = one.triu(1) | one.tril(-WINDOW - 1) if what == "window" else one.triu(1)
        return getattr(t, op.__name__)(z.masked_fill(dropped, -math.inf), -1)

    read = mask.read
    return Form(
        f"{op.__name__}/{what}",
        given,
        lambda a, **options: op(a["x"], scale=SCALE, **mask.options(a), **options),
        reference,
        torch,
        mask.target,
        unread=None if read is None else lambda shape: math.prod(shape) - read(shape),
        shapes=EVEN + LONG,
    )


# ---- norms of sums


def _added(op: op_table.Op, how: str) -> Form:
    """Return add_layer_norm or add_rms_norm: alone, with the sum, or with a dropout."""
    function = getattr(add_norm, f"add_{op.name}")
    drop = {"dropout": P, "seed": SEED} if how == "dropout" else {}

    def total(a: Arrays) -> Array:
        s = wide(a["x"]) + wide(a["bias"])
        if drop:
            s = _dropped(s)
        return np.asarray(s + wide(a["residual"]))

    def reference(a: Arrays) -> tuple[Array, ...]:
        s = total(a)
        y = op.reference(s, *(a[name] for name in op.parameters))[0]
        return (y, s) if how == "sum" else (y,)

    def torch(t: Any, a: Arrays) -> Any:
        x = a["x"] + a["bias"]
        x = (t.nn.functional.dropout(x, P) if drop else x) + a["residual"]
        y = TORCH[op.name](t, {**a, "x": x})
        return (y, x) if how == "sum" else y

    return Form(
        f"add_{op.name}" + f"/{how}" * bool(how),
        _rows(("residual",), ("bias", *op.parameters), ("sum",) if how == "sum" else ()),
        lambda a, **options: function(
            a["x"],
            a["residual"],
            *(a[name] for name in op.parameters),
            bias=a.get("bias"),
            return_sum=how == "sum",
            **drop,
            **options,
        ),
        reference,
        torch,
        None if drop else 0.98,
        shapes=EVEN + LONG,
        random=bool(drop),
        optional=("bias",),
    )


def _dropped(x: Array) -> Array:
    """Return x's dropout by Philox's words, which have tests of their own."""
    drop = Dropout(P, SEED, 0)
    return np.where(drop.kept(0, x.size).reshape(x.shape), x / (1 - P), 0.0)


# ---- quantised


def _quantised(op: op_table.Op, dtype: str, *, per_row: bool) -> Form:
    """Return an op whose results are stored in 8 bits, with a scale for each row or one for all."""
    scale = None if per_row else SCALES[dtype]

    def given(rows: int, cols: int, x_dtype: Any) -> dict[str, Given]:
        found = _rows(columns=op.parameters)(rows, cols, x_dtype)
        found["y"] = Given((rows, cols), device_dtype(quantized_dtype(dtype)), "result")
        if per_row:
            found["scales"] = Given((rows,), compute_dtype(x_dtype), "result")
        return found

    def reference(a: Arrays) -> tuple[Array, ...]:
        return op.reference(a["x"], *(a[name] for name in op.parameters))[:1]

    return Form(
        f"{op.name}/{dtype}" + "/scale" * (not per_row),
        given,
        lambda a, **options: op.function(
            a["x"], *(a[name] for name in op.parameters), quantize=Quantize(dtype, scale), **options
        ),
        reference,
        None,
        0.93,
        shapes=EVEN + LONG,
        quantized=dtype,
    )


# ---- no row ops


def _gelu(z: Array) -> Array:
    return np.asarray(z * np.vectorize(math.erfc, otypes=[float])(-z / math.sqrt(2)) / 2)


def _gelu_tanh(z: Array) -> Array:
    return np.asarray(z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))))


def _silu(z: Array) -> Array:
    return np.asarray(z / (1 + np.exp(-z)))


class _Activation(NamedTuple):
    """An activation: the public function's keywords, its formula and PyTorch's."""

    options: dict[str, Any]
    formula: Callable[[Array], Array]
    torch: Callable[[Any, Any], Any]


GELU = _Activation({}, _gelu, lambda f, z: f.gelu(z))
TANH = _Activation({"approximate": "tanh"}, _gelu_tanh, lambda f, z: f.gelu(z, approximate="tanh"))
SILU = _Activation({}, _silu, lambda f, z: f.silu(z))


def _biased(name: str, function: Any, of: _Activation, target: float | None = None) -> Form:
    return Form(
        name,
        _rows(columns=("bias",)),
        lambda a, **options: function(a["x"], a["bias"], **of.options, **options),
        lambda a: (of.formula(wide(a["x"]) + wide(a["bias"])),),
        lambda t, a: of.torch(t.nn.functional, a["x"] + a["bias"]),
        target,
    )


def _gated(name: str, function: Any, of: _Activation, *, biased: bool) -> Form:
    """Return a gated activation; columns are those of the result."""

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = {"x": Given((rows, 2 * cols), dtype), "y": Given((rows, cols), dtype, "result")}
        return found | ({"bias": Given((2 * cols,), dtype)} if biased else {})

    def reference(a: Arrays) -> tuple[Array, ...]:
        gate, value = np.split(wide(a["x"]) + wide(a.get("bias", 0)), 2, axis=-1)
        return (of.formula(gate) * value,)

    def torch(t: Any, a: Arrays) -> Any:
        gate, value = (a["x"] + a["bias"] if biased else a["x"]).chunk(2, dim=-1)
        return of.torch(t.nn.functional, gate) * value

    return Form(
        name,
        given,
        lambda a, **options: function(a["x"], a.get("bias"), **options),
        reference,
        torch,
    )


DROPOUT = Form(
    "dropout",
    _rows(),
    lambda a, **options: elementwise.dropout(a["x"], P, seed=SEED, **options),
    lambda a: (_dropped(wide(a["x"])),),
    lambda t, a: t.nn.functional.dropout(a["x"], P),
    random=True,
)


# ---- a user's own

SCALED_SUM = fuse(layer_norm, load=lambda x, r: x * 0.5 + r)

FUSED = Form(
    "layer_norm/fuse",
    _rows(("residual",), ("gamma", "beta")),
    lambda a, **options: SCALED_SUM(a["x"], a["residual"], gamma=a["gamma"], beta=a["beta"], **options),
    lambda a: op_table.op("layer_norm").reference(
        wide(a["x"]) * 0.5 + wide(a["residual"]), a["gamma"], a["beta"]
    )[:1],
    lambda t, a: TORCH["layer_norm"](t, {**a, "x": a["x"] * 0.5 + a["residual"]}),
    0.98,
    "layer_norm",
    shapes=EVEN + LONG,
)


# ---- heads


def _tokens(parts: int, *, merged: bool) -> Callable[[int, int, Any], dict[str, Given]]:
    """Return `given` for a move of `rows` tokens, `parts` times `cols` columns each, to heads; if merged, back."""

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        seq, size = (
            length if count % length == 0 else count for count, length in ((rows, SEQ), (cols, HEAD))
        )
        side_by_side = (rows // seq, seq, parts * cols)
        by_heads = (parts,) * (parts > 1) + (rows // seq, cols // size, seq, size)
        x, y = (by_heads, side_by_side) if merged else (side_by_side, by_heads)
        found = {"x": Given(x, dtype), "y": Given(y, dtype, "result")}
        return found if merged else found | {"bias": Given((parts * cols,), dtype)}

    return given


def _count(columns: int) -> int:
    return columns // HEAD if columns % HEAD == 0 else 1


def _split(name: str, parts: int) -> Form:
    function = getattr(heads, name)

    def taken_apart(z: Any) -> Any:
        """Return [parts, batch, heads, seq, size] of [batch, seq, columns]; without the first axis for one part."""
        batch, seq, columns = z.shape
        count = _count(columns // parts)
        z = z.reshape(batch, seq, parts, count, columns // parts // count).swapaxes(1, 3)
        return z.swapaxes(0, 2).swapaxes(1, 2) if parts > 1 else z[:, :, 0]

    return Form(
        name,
        _tokens(parts, merged=False),
        lambda a, **options: function(a["x"], a["bias"], heads=_count(a["x"].shape[-1] // parts), **options),
        lambda a: (taken_apart(wide(a["x"]) + wide(a["bias"])),),
        lambda _, a: taken_apart(a["x"] + a["bias"]).contiguous(),
        0.95,
        shapes=TOKENS,
    )


def _merge(a: Arrays) -> Any:
    batch, count, seq, size = a["x"].shape
    return a["x"].swapaxes(1, 2).reshape(batch, seq, count * size)


MERGED = Form(
    "merge_heads",
    _tokens(1, merged=True),
    lambda a, **options: heads.merge_heads(a["x"], **options),
    lambda a: (wide(_merge(a)),),
    lambda _, a: _merge(a),
    target=0.95,
    shapes=TOKENS,
)


FORMS: dict[str, Form] = {
    each.name: each
    for each in (
        *map(_alone, op_table.OPS),
        *(_masked(op, what) for op in (softmax, log_softmax) for what in MASKS),
        *(
            _added(op_table.op(name), how)
            for name in ("layer_norm", "rms_norm")
            for how in ("", "sum", "dropout")
        ),
        *(
            _quantised(op_table.op("layer_norm"), dtype, per_row=each)
            for dtype in SCALES
            for each in (True, False)
        ),
        _quantised(op_table.op("rms_norm"), "int8", per_row=True),
        _quantised(op_table.op("softmax"), "int8", per_row=True),
        FUSED,
        _biased("bias_gelu", elementwise.bias_gelu, GELU, 0.95),
        _biased("bias_gelu/tanh", elementwise.bias_gelu, TANH),
        _biased("bias_silu", elementwise.bias_silu, SILU),
        _gated("geglu", elementwise.geglu, GELU, biased=True),
        _gated("swiglu", elementwise.swiglu, SILU, biased=False),
        DROPOUT,
        *ALONG_AXES,
        *GRADIENTS,
        *STATISTICS,
        _split("add_qkv_bias", 3),
        _split("split_heads", 1),
        MERGED,
    )
}

# What `cupynorm tune` measures: row ops alone, and gradients, losses and statistics that have a kernel with variants.
TUNED = (*(op.name for op in op_table.OPS), *(each.name for each in (*OF_ROW_OPS, *LOSSES, *STATISTICS)))


def form(name: str) -> Form:
    """Return the form of this name; ValueError says which there are."""
    if name not in FORMS:
        raise ValueError(f"{name!r} is no op and no form of one: use {', '.join(FORMS)}")
    return FORMS[name]


def inputs(what: Form, rows: int, cols: int, dtype: Any) -> Arrays:
    """Return NumPy arrays for a call without its results; the same at each call. Lengths are of all kinds.

    Statistics, and results that gradients are computed from, are those of the arrays.
    """
    random = np.random.default_rng([rows, cols])
    found: Arrays = {}
    for name, (shape, kind, holds) in what.given(rows, cols, dtype_of(dtype)).items():
        if holds == "numbers":
            found[name] = (2 * random.standard_normal(shape)).astype(kind)
        elif holds == "divisors":
            found[name] = (1 + random.random(shape)).astype(kind)
        elif holds == "mask":
            found[name] = random.random(shape) < KEPT
        elif holds in {"lengths", "ragged"}:
            found[name] = random.integers(0, cols + 1, shape).astype(kind)
        elif holds == "labels":
            found[name] = random.integers(0, cols, shape).astype(kind)
    return found | naturals(what, found)


def naturals(what: Form, given: Arrays) -> Arrays:
    """Return those arrays of a call that follow from others, in the dtypes of the random numbers in their place."""
    made = {} if what.natural is None else what.natural(given)
    return {name: each.astype(given[name].dtype) for name, each in made.items()}
