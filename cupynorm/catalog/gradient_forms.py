"""The gradients and losses among the forms. In their calls y is the gradient of x, as what `out` takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import compute_dtype
from cupynorm.catalog.bounds import Terms
from cupynorm.catalog.form import EVEN, LONG, Array, Arrays, Form, Given, Targets, wide
from cupynorm.ops import add_norm_gradients, elementwise_gradients, losses, norm_gradients, softmax_gradients

if TYPE_CHECKING:
    from collections.abc import Callable


NORM_TARGETS = Targets((0.85, 0.90), (0.95, 0.97), (0.90, 0.90), (0.88, 0.88))
SOFTMAX_TARGETS = Targets((1.05, 1.05), (1.03, 1.03), (1.02, 1.02), (0.95, 0.95))
LOSS_TARGETS = Targets((1.0, 1.0), (1.03, 1.03), (1.05, 1.05), (0.95, 0.95))
LOGSUMEXP_TARGETS = Targets((1.0, 1.0), (1.03, 1.03), (1.03, 1.03), (0.97, 0.97))
ACTIVATION_TARGETS = Targets((0.90, 0.90), (0.95, 0.95), (0.95, 0.95), (0.90, 0.90))


def _given(
    rows_and_cols: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    per_row: tuple[str, ...] = (),
    sums: int = 0,
) -> Callable[[int, int, Any], dict[str, Given]]:
    """Return `given` of dy, x, others of their shape, parameters, statistics, y, and so many sums of parameters."""

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = {name: Given((rows, cols), dtype) for name in ("dy", "x", *rows_and_cols)}
        found |= {name: Given((cols,), dtype) for name in columns}
        found |= {name: Given((rows,), compute_dtype(dtype)) for name in per_row}
        found["y"] = Given((rows, cols), dtype, "result")
        return found | {f"sum {number}": Given((cols,), dtype, "result") for number in range(sums)}

    return given


# ---- activations


def _gelu_slope(z: Array) -> Array:
    normal = np.vectorize(math.erfc, otypes=[float])(-z / math.sqrt(2)) / 2
    return np.asarray(normal + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def _silu(z: Array) -> Array:
    return np.asarray(z / (1 + np.exp(-z)))


def _silu_slope(z: Array) -> Array:
    p, q = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))  # 1 - p would lose its digits
    return np.asarray(p + z * p * q)


def _gelu(z: Array) -> Array:
    return np.asarray(z * np.vectorize(math.erfc, otypes=[float])(-z / math.sqrt(2)) / 2)


def _of_torch(t: Any, forward: Callable[[Any, Any, Any], Any], a: Arrays) -> Any:
    """Return PyTorch's gradients of x and bias, by its autograd."""
    leaves = [a[name].detach().requires_grad_() for name in ("x", "bias") if name in a]
    y = forward(t, leaves[0], leaves[1] if len(leaves) > 1 else 0)
    return t.autograd.grad(y, leaves, a["dy"])


def _activation(name: str, slope: Callable[[Array], Array], torch: str) -> Form:
    """Return the gradient of an activation with a bias."""
    function = getattr(elementwise_gradients, f"{name}_backward")

    def reference(a: Arrays) -> tuple[Array, ...]:
        dx = wide(a["dy"]) * slope(wide(a["x"]) + wide(a["bias"]))
        return dx, dx.sum(0)

    def terms(a: Arrays) -> tuple[Terms, ...]:
        dy = np.abs(wide(a["dy"]))
        return Terms("dx", dy), Terms("dbias", dy.sum(0))

    return Form(
        f"{name}_backward",
        _given(columns=("bias",), sums=1),
        lambda a, **options: function(a["dy"], a["x"], a["bias"], **options),
        reference,
        lambda t, a: _of_torch(t, lambda t, x, bias: getattr(t.nn.functional, torch)(x + bias), a),
        ACTIVATION_TARGETS,
        shapes=EVEN,
        terms=terms,
    )


def _gate(name: str, value: Callable[[Array], Array], slope: Callable[[Array], Array], torch: str) -> Form:
    """Return the gradient of a gate without a bias; columns are those of dy."""
    function = getattr(elementwise_gradients, f"{name}_backward")

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        wide = (rows, 2 * cols)
        return {"dy": Given((rows, cols), dtype), "x": Given(wide, dtype), "y": Given(wide, dtype, "result")}

    def reference(a: Arrays) -> tuple[Array, ...]:
        dy, (gate, other) = wide(a["dy"]), np.split(wide(a["x"]), 2, axis=-1)
        return (np.concatenate([dy * other * slope(gate), dy * value(gate)], axis=-1),)

    def terms(a: Arrays) -> tuple[Terms, ...]:
        dy, sizes = np.abs(wide(a["dy"])), sum(np.abs(half) for half in np.split(wide(a["x"]), 2, axis=-1))
        sums, factors = (np.tile(each, (1, 2)) for each in (dy * sizes, 1 + dy + sizes))
        return (Terms("dx", sums, factors=factors),)

    def forward(t: Any, x: Any, _: Any) -> Any:
        gate, other = x.chunk(2, dim=-1)
        return getattr(t.nn.functional, torch)(gate) * other

    return Form(
        f"{name}_backward",
        given,
        lambda a, **options: function(a["dy"], a["x"], **options)[0],
        reference,
        lambda t, a: _of_torch(t, forward, a),
        ACTIVATION_TARGETS,
        shapes=EVEN,
        terms=terms,
    )


# ---- norms

EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}  # the functions' defaults


def _statistics(x: Array, *, centred: bool) -> tuple[Array, Array]:
    """Return mean and rstd of rows; a mean of 0 for rms_norm."""
    mean = x.mean(-1) if centred else np.zeros(len(x))
    eps = EPS["layer_norm" if centred else "rms_norm"]
    return mean, 1 / np.sqrt(np.square(x - mean[:, None]).mean(-1) + eps)


def _of_statistics(names: tuple[str, ...]) -> Callable[[Arrays], Arrays]:
    """Return `natural` where mean and rstd are given beside x."""

    def natural(a: Arrays) -> Arrays:
        mean, rstd = _statistics(wide(a["x"]), centred="mean" in names)
        return {name: {"mean": mean, "rstd": rstd}[name] for name in names}

    return natural


def _norm_reference(a: Arrays, *, centred: bool) -> tuple[Array, ...]:
    """Return dx, dgamma and dbeta of layer_norm (centred), or dx and dgamma of rms_norm, of given statistics."""
    return _of_normalised(a, _normalised(a, centred=centred), centred=centred)


def _normalised(a: Arrays, *, centred: bool) -> Array:
    x = wide(a["x"])
    return np.asarray((x - wide(a["mean"])[:, None] if centred else x) * wide(a["rstd"])[:, None])


def _of_normalised(a: Arrays, normalised: Array, *, centred: bool) -> tuple[Array, ...]:
    """Return the same of normalised rows."""
    dy, rstd = wide(a["dy"]), wide(a["rstd"])[:, None]
    g = dy * wide(a["gamma"])
    level = g.mean(-1, keepdims=True) if centred else 0.0
    dx = rstd * (g - level - normalised * (g * normalised).mean(-1, keepdims=True))
    sums = ((dy * normalised).sum(0), dy.sum(0))
    return dx, *(sums if centred else sums[:1])


def _norm_terms(a: Arrays, normalised: Array, *, centred: bool) -> tuple[Terms, ...]:
    """Return the terms of what _of_normalised() gives."""
    dy, z, rstd = np.abs(wide(a["dy"])), np.abs(normalised), wide(a["rstd"])[:, None]
    g = dy * np.abs(wide(a["gamma"]))
    level = g.mean(-1, keepdims=True) if centred else 0.0
    dx = Terms("dx", rstd * (g + level + z * (g * z).mean(-1, keepdims=True)))
    sums = Terms("dgamma", (dy * z).sum(0)), Terms("dbeta", dy.sum(0))
    return dx, *(sums if centred else sums[:1])


def _norm(name: str, stats: tuple[str, ...], torch: Callable[[Any, Any, Any], Any]) -> Form:
    """Return the gradient of a norm whose statistics are given."""
    function = getattr(norm_gradients, f"{name}_backward")
    centred = "mean" in stats

    def torch_gradients(t: Any, a: Arrays) -> Any:
        leaves = [a[name].detach().requires_grad_() for name in ("x", "gamma")]
        leaves += [t.zeros_like(leaves[1]).requires_grad_()] if centred else []
        return t.autograd.grad(torch(t.nn.functional, leaves[0], leaves[1:]), leaves, a["dy"])

    return Form(
        f"{name}_backward",
        _given(columns=("gamma",), per_row=stats, sums=1 + centred),
        lambda a, **options: function(
            a["dy"], a["x"], a["gamma"], **{name: a[name] for name in stats}, **options
        ),
        lambda a: _norm_reference(a, centred=centred),
        torch_gradients,
        NORM_TARGETS,
        shapes=EVEN + LONG,
        terms=lambda a: _norm_terms(a, _normalised(a, centred=centred), centred=centred),
        natural=_of_statistics(stats),
    )


def _from_y(name: str, columns: tuple[str, ...]) -> Form:
    """Return the gradient of a norm from its result, which `x` holds here."""
    function = getattr(norm_gradients, f"{name}_backward_from_y")
    centred = "beta" in columns

    def normalised(a: Arrays) -> Array:
        return np.asarray((wide(a["x"]) - (wide(a["beta"]) if centred else 0)) / wide(a["gamma"]))

    def natural(a: Arrays) -> Arrays:
        x = wide(a["x"])
        mean, rstd = _statistics(x, centred=centred)
        z = (x - mean[:, None]) * rstd[:, None]
        return {"x": z * wide(a["gamma"]) + (wide(a["beta"]) if centred else 0), "rstd": rstd}

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = _given(columns=columns, per_row=("rstd",), sums=1 + centred)(rows, cols, dtype)
        return found | {"gamma": found["gamma"]._replace(holds="divisors")}

    return Form(
        f"{name}_backward_from_y",
        given,
        lambda a, **options: function(
            a["dy"], a["x"], **{name: a[name] for name in (*columns, "rstd")}, **options
        ),
        lambda a: _of_normalised(a, normalised(a), centred=centred),
        target=NORM_TARGETS,
        shapes=EVEN + LONG,
        terms=lambda a: _norm_terms(a, normalised(a), centred=centred),
        natural=natural,
    )


def _added(name: str, stats: tuple[str, ...]) -> Form:
    """Return the gradient of a norm of a sum, to which the sum's own gradient is added."""
    function = getattr(add_norm_gradients, f"{name}_backward")
    centred = "mean" in stats

    def reference(a: Arrays) -> tuple[Array, ...]:
        dx, *sums = _norm_reference(a, centred=centred)
        total = dx + wide(a["ds"])
        return total, *sums, total.sum(0)

    def terms(a: Arrays) -> tuple[Terms, ...]:
        dx, *sums = _norm_terms(a, _normalised(a, centred=centred), centred=centred)
        total = dx.sums + np.abs(wide(a["ds"]))
        # long rows: dbias is summed from dx as it was rounded
        rounded = np.abs(reference(a)[0]).sum(0)
        return Terms("dx", total), *sums, Terms("dbias", total.sum(0), rounded)

    def call(a: Arrays, **options: Any) -> Any:
        dx, _, *sums = function(
            a["dy"],
            a["ds"],
            a["x"],
            a["gamma"],
            **{name: a[name] for name in stats},
            bias=a["bias"],
            **options,
        )
        return dx, *sums

    return Form(
        f"{name}_backward",
        _given(("ds",), ("gamma", "bias"), stats, 2 + centred),
        call,
        reference,
        target=NORM_TARGETS,
        shapes=EVEN + LONG,
        terms=terms,
        natural=_of_statistics(stats),
    )


# ---- softmax


def _softmax_reference(a: Arrays, kept: Any, *, log: bool) -> tuple[Array, ...]:
    dy, y = np.where(kept, wide(a["dy"]), 0), wide(a["x"])
    if log:
        return (np.where(kept, dy - np.exp(y) * dy.sum(-1, keepdims=True), 0),)
    return (np.where(kept, y * (dy - np.where(kept, dy * y, 0).sum(-1, keepdims=True)), 0),)


def _softmax_terms(a: Arrays, kept: Any, *, log: bool) -> tuple[Terms, ...]:
    dy, y = np.where(kept, np.abs(wide(a["dy"])), 0), np.where(kept, wide(a["x"]), 0)
    if log:
        powers = np.where(kept, np.exp(y), 0)
        return (Terms("dx", dy + powers * (1 + np.abs(y)) * dy.sum(-1, keepdims=True)),)
    return (Terms("dx", np.abs(y) * (dy + (dy * np.abs(y)).sum(-1, keepdims=True))),)


def _probabilities(x: Array, kept: Any, *, log: bool) -> Array:
    """Return softmax or log_softmax of what is kept. What is dropped gets similar numbers, which must not count."""
    kept = np.broadcast_to(kept, x.shape)
    counted = kept | ~kept.any(-1, keepdims=True)
    top = x.max(-1, keepdims=True)
    y: Array = x - top - np.log(np.where(counted, np.exp(x - top), 0).sum(-1, keepdims=True))
    return y if log else np.exp(y)


def _softmax(name: str, how: str) -> Form:
    """Return the gradient of softmax or log_softmax: without a mask, with one of bytes, or with lengths."""
    function = getattr(softmax_gradients, f"{name}_backward")
    log = name == "log_softmax"

    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = _given()(rows, cols, dtype)
        if how == "where":
            found["where"] = Given((rows, cols), np.dtype(np.bool_), "mask")
        if how == "lengths":
            found["lengths"] = Given((rows,), np.dtype(np.int32), "lengths")
        return found

    def kept(a: Arrays) -> Any:
        if how == "lengths":
            return np.arange(a["x"].shape[-1]) < a["lengths"][:, None]
        return a.get("where", np.ones((), bool))

    def torch(t: Any, a: Arrays) -> Any:
        backward = t._log_softmax_backward_data if log else t._softmax_backward_data  # noqa: SLF001
        return backward(a["dy"], a["x"], -1, a["x"].dtype)

    return Form(
        f"{name}_backward" + f"/{how}" * bool(how),
        given,
        lambda a, **options: function(
            a["dy"], a["x"], **{name: a[name] for name in ("where", "lengths") if name in a}, **options
        ),
        lambda a: _softmax_reference(a, kept(a), log=log),
        None if how else torch,
        SOFTMAX_TARGETS,
        shapes=EVEN + LONG,
        terms=lambda a: _softmax_terms(a, kept(a), log=log),
        natural=lambda a: {"x": _probabilities(wide(a["x"]), kept(a), log=log)},
    )


# ---- losses


def _loss_given(*, grad: bool) -> Callable[[int, int, Any], dict[str, Given]]:
    def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
        found = {"x": Given((rows, cols), dtype), "labels": Given((rows,), np.dtype(np.int64), "labels")}
        found["y"] = Given((rows,), compute_dtype(dtype), "result")
        return found | ({"grad": Given((rows, cols), dtype, "result")} if grad else {})

    return given


def _cross_entropy_reference(a: Arrays, *, grad: bool) -> tuple[Array, ...]:
    x, rows = wide(a["x"]), np.arange(len(a["labels"]))
    top = x.max(-1, keepdims=True)
    powers = np.exp(x - top)
    total = powers.sum(-1, keepdims=True)
    loss = (np.log(total) + top)[:, 0] - x[rows, a["labels"]]
    p = powers / total
    p[rows, a["labels"]] -= 1
    return (loss, p) if grad else (loss,)


def _loss_terms(x: Array) -> Terms:
    return Terms("result", 1 + np.abs(x).max(-1))


def _cross_entropy_terms(a: Arrays, *, grad: bool) -> tuple[Terms, ...]:
    x = wide(a["x"])
    if not grad:
        return (_loss_terms(x),)
    below = x.max(-1, keepdims=True) - x
    powers = np.exp(-below)
    gradient = powers / powers.sum(-1, keepdims=True) * (1 + below)
    gradient[np.arange(len(x)), a["labels"]] += 1
    return _loss_terms(x), Terms("gradient", gradient)


def _cross_entropy(*, grad: bool) -> Form:
    """Return cross_entropy, with its gradient or without."""
    function: Any = losses.cross_entropy

    def torch(t: Any, a: Arrays) -> Any:
        x = a["x"].detach().requires_grad_() if grad else a["x"]
        loss = t.nn.functional.cross_entropy(x, a["labels"], reduction="none")
        return (loss.detach(), *t.autograd.grad(loss.sum(), x)) if grad else loss

    return Form(
        "cross_entropy" + "/grad" * grad,
        _loss_given(grad=grad),
        lambda a, **options: function(a["x"], a["labels"], return_grad=grad, **options),
        lambda a: _cross_entropy_reference(a, grad=grad),
        torch,
        LOSS_TARGETS,
        shapes=EVEN + LONG,
        terms=lambda a: _cross_entropy_terms(a, grad=grad),
    )


LOGSUMEXP = Form(
    "logsumexp",
    lambda rows, cols, dtype: {
        "x": Given((rows, cols), dtype),
        "y": Given((rows,), compute_dtype(dtype), "result"),
    },
    lambda a, **options: losses.logsumexp(a["x"], **options),
    lambda a: (np.log(np.exp(wide(a["x"])).sum(-1)),),
    lambda t, a: t.logsumexp(a["x"], -1),
    LOGSUMEXP_TARGETS,
    shapes=EVEN + LONG,
    terms=lambda a: (_loss_terms(wide(a["x"])),),
)


def _torch_layer_norm(f: Any, x: Any, parameters: Any) -> Any:
    return f.layer_norm(x, x.shape[-1:], *parameters, 1e-5)


def _torch_rms_norm(f: Any, x: Any, parameters: Any) -> Any:
    return f.rms_norm(x, x.shape[-1:], *parameters, 1e-6)


OF_ROW_OPS = (
    _norm("layer_norm", ("mean", "rstd"), _torch_layer_norm),
    _norm("rms_norm", ("rstd",), _torch_rms_norm),
    _from_y("layer_norm", ("gamma", "beta")),
    _from_y("rms_norm", ("gamma",)),
    _added("add_layer_norm", ("mean", "rstd")),
    _added("add_rms_norm", ("rstd",)),
    *(_softmax(name, how) for name in ("softmax", "log_softmax") for how in ("", "where", "lengths")),
)
OF_ACTIVATIONS = (
    _activation("bias_gelu", _gelu_slope, "gelu"),
    _activation("bias_silu", _silu_slope, "silu"),
    _gate("geglu", _gelu, _gelu_slope, "gelu"),
    _gate("swiglu", _silu, _silu_slope, "silu"),
)
LOSSES = (_cross_entropy(grad=False), _cross_entropy(grad=True), LOGSUMEXP)
GRADIENTS = (*OF_ROW_OPS, *OF_ACTIVATIONS, *LOSSES)
