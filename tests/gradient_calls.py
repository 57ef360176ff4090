"""Calls of gradients and losses of each kind, for tests of what must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupynorm
from cupynorm import functions, fuse, layer_norm
from cupynorm.catalog.bounds import ROUNDING, TOLERANCES

ROWS = 3
# Columns of rows that each variant holds: in whole vectors, and from anywhere on.
WIDTHS = {
    "warp": (64, 77),
    "block": (1000, 1001),
    "cached": (1000, 1001),
    "cluster": (4096, 4101),
    "split": (4096, 4101),
    "shared": (1000, 1001),
    "uncached": (1000, 1001),
}
FUSION = fuse(layer_norm, load=lambda x, r: x * 0.5 + r, store=lambda y, g: functions.gelu(y) * g)

Call = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]


def fusion_backward(dy: Any, x: Any, r: Any, g: Any, **others: Any) -> Any:
    return FUSION.backward(dy, x, r, g, **others)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def calls(cols: int, dtype: str) -> dict[str, Call]:
    """Return functions with their arrays and options, by name."""
    dy, ds, x = (normal(ROWS, cols, seed=seed).astype(dtype) for seed in range(3))
    gamma, beta = normal(cols, seed=3), normal(cols, seed=4).astype(dtype)
    gamma = (gamma + np.copysign(0.5, gamma)).astype(dtype)  # y is divided by it
    mean, rstd = x.mean(-1, dtype=np.float32), 1 / x.std(-1, dtype=np.float32)
    labels = np.random.default_rng(5).integers(0, cols, ROWS)
    given = {"dy": dy, "x": x, "gamma": gamma}
    of_y = {"dy": dy, "y": x, "gamma": gamma, "rstd": rstd}
    of_sum = {"dy": dy, "ds": ds, "s": x, "gamma": gamma, "bias": beta}
    y = cupynorm.softmax(x, scale=2.0)
    return {
        "layer_norm_backward": (
            cupynorm.layer_norm_backward,
            {**given, "mean": mean, "rstd": rstd},
            {},
        ),
        "layer_norm_backward, statistics": (cupynorm.layer_norm_backward, given, {}),
        "rms_norm_backward": (cupynorm.rms_norm_backward, given, {}),
        "layer_norm_backward_from_y": (cupynorm.layer_norm_backward_from_y, {**of_y, "beta": beta}, {}),
        "rms_norm_backward_from_y": (cupynorm.rms_norm_backward_from_y, of_y, {}),
        "add_layer_norm_backward": (cupynorm.add_layer_norm_backward, of_sum, {"dropout": 0.3, "seed": 1}),
        "add_rms_norm_backward": (cupynorm.add_rms_norm_backward, of_sum, {"alpha": 0.5}),
        "softmax_backward": (cupynorm.softmax_backward, {"dy": dy, "y": y}, {"scale": 2.0}),
        "softmax_backward, mask": (
            cupynorm.softmax_backward,
            {"dy": dy, "y": y, "lengths": np.array([cols // 3, 0, cols]), "bias": beta},
            {"return_dbias": True},
        ),
        "log_softmax_backward": (cupynorm.log_softmax_backward, {"dy": dy, "y": cupynorm.log_softmax(x)}, {}),
        "logsumexp": (cupynorm.logsumexp, {"x": x}, {"scale": 0.5}),
        "cross_entropy": (cupynorm.cross_entropy, {"logits": x, "labels": labels}, {}),
        "cross_entropy, gradient": (
            cupynorm.cross_entropy,
            {"logits": x, "labels": labels, "dloss": mean},
            {"return_grad": True, "label_smoothing": 0.1},
        ),
        "Fusion.backward": (
            fusion_backward,
            {"dy": dy, "x": x, "r": ds, "g": beta, "gamma": gamma},
            {},
        ),
    }


NAMES = tuple(calls(8, "float32"))


def flat(results: Any) -> list[Any]:
    if not isinstance(results, tuple):
        return [results]
    return [one for each in results for one in flat(each)]


def assert_near(name: str, found: Any, expected: Any) -> None:
    """Compare results of a call with NumPy's, which were rounded, too.

    An element may be off by some roundings of itself, and of what its row holds, as the root of its mean square
    tells; a sum over rows by those of its terms, which may be a few times that. dbias of a norm of a sum is added up
    from dx as it was rounded, where sums have no place in the pass over rows.
    """
    wide = [None if each is None else each.astype(np.float64) for each in flat(expected)]
    for number, (ours, wanted) in enumerate(zip(flat(found), flat(expected), strict=True)):
        assert (ours is None) == (wanted is None)
        if ours is None:
            continue
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        exact, digits = wide[number], 4 * TOLERANCES[wanted.dtype.name]
        size = np.sqrt(np.square(exact).mean(-1, keepdims=True))
        allowed = digits * (np.abs(exact) + size * (1 if exact.ndim > 1 else 4))
        if name.startswith("add_") and number == len(wide) - 1:
            allowed += ROUNDING[wanted.dtype.name] * np.abs(wide[0]).sum(0)
        off = np.abs(ours.get().astype(np.float64) - exact)
        least = float(np.finfo(wanted.dtype).smallest_subnormal)
        worst = int(np.argmax(off - allowed))
        assert (off <= allowed + least).all(), (
            f"result {number}, element {worst}: {exact.flat[worst]} expected, off by {off.flat[worst]}, "
            f"allowed is {allowed.flat[worst]}"
        )
