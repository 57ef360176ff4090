"""Trains a transformer block that guesses the next pixel of a photograph, with cupynorm and an array module alone.

A window of 8 x 8 pixels is read row by row. From the pixels that have been read, the block guesses the grey level of
the next one, out of 16. Two photographs are for training; the loss is also taken on a third, which is never trained on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupynorm import (
    add_layer_norm,
    add_layer_norm_backward,
    bias_gelu,
    bias_gelu_backward,
    cross_entropy,
    layer_norm,
    layer_norm_backward,
    merge_heads,
    softmax,
    softmax_backward,
    split_heads,
)
from cupynorm.runtime import devices

Array = Any  # NumPy's or CuPy's
Arrays = dict[str, Array]
History = list[tuple[int, float, float]]

WINDOW, LEVELS = 8, 16  # a window is 8 x 8 pixels; a pixel is one of 16 grey levels
QKV = ("queries", "keys", "values")
HELD_OUT = 256  # windows of the held-out photograph


class Size(NamedTuple):
    """How large the model is. Tokens are the grey levels, and one that opens each window."""

    levels: int = LEVELS
    positions: int = WINDOW * WINDOW
    width: int = 64
    heads: int = 4
    inner: int = 256

    @property
    def masks(self) -> dict[str, Any]:
        """What softmax and its gradient are told: a pixel sees itself and those before it."""
        return {"causal": True, "scale": (self.width // self.heads) ** -0.5}


def photographs() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return windows for training and held-out ones: rows of grey levels, from photographs that PyWavelets ships."""
    import pywt.data  # noqa: PLC0415  of the group demo: all else here works without it

    def windows(*pictures: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        views = np.lib.stride_tricks.sliding_window_view(np.stack(pictures), (WINDOW, WINDOW), axis=(1, 2))
        return views.reshape(-1, WINDOW * WINDOW) // (256 // LEVELS)

    held_out = windows(pywt.data.camera())
    return windows(pywt.data.aero(), pywt.data.ascent()), held_out[:: len(held_out) // HELD_OUT][:HELD_OUT]


def initialise(size: Size, random: np.random.Generator, dtype: Any = np.float32) -> Arrays:
    """Return the parameters by name, as NumPy arrays: weights are [in, out]."""
    width, inner = size.width, size.inner
    weights = {
        "embedding": (size.levels + 1, width),
        "positions": (size.positions, width),
        **dict.fromkeys(("queries", "keys", "values", "mixed"), (width, width)),
        "up": (width, inner),
        "down": (inner, width),
        "head": (width, size.levels),
    }
    parameters = {name: random.standard_normal(shape) * shape[0] ** -0.5 for name, shape in weights.items()}
    for norm in ("norm1", "norm2", "norm3"):
        parameters |= {f"{norm}.gamma": np.ones(width), f"{norm}.beta": np.zeros(width)}
    parameters |= {"mixed.bias": np.zeros(width), "up.bias": np.zeros(inner), "down.bias": np.zeros(width)}
    return {name: values.astype(dtype) for name, values in parameters.items()}


def turned(x: Array) -> Array:
    """Transpose the last two axes."""
    return x.swapaxes(-1, -2)


def of_weight(x: Array, dy: Array) -> Array:
    """Return the gradient of w in y = x @ w, which is summed over all rows."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def forward_and_backward(
    p: Arrays, windows: Array, size: Size, xp: Any, *, gradients: bool = True
) -> tuple[Array, Arrays]:
    """Return the loss of each pixel of some windows, and the gradients of the mean loss by the parameters' names."""
    opening = xp.full((len(windows), 1), size.levels, windows.dtype)
    tokens = xp.concatenate((opening, windows[:, :-1]), axis=1)
    one_hot = (tokens[..., None] == xp.arange(size.levels + 1)).astype(p["embedding"].dtype)
    x = one_hot @ p["embedding"] + p["positions"]

    a, mean1, rstd1 = layer_norm(x, p["norm1.gamma"], p["norm1.beta"], return_stats=True)
    q, k, v = (split_heads(a @ p[name], heads=size.heads) for name in QKV)
    share = softmax(q @ turned(k), **size.masks)
    mixed = merge_heads(share @ v)
    norm2 = {"gamma": p["norm2.gamma"], "bias": p["mixed.bias"]}
    b, sum2, mean2, rstd2 = add_layer_norm(
        mixed @ p["mixed"], x, beta=p["norm2.beta"], **norm2, return_stats=True
    )
    u = b @ p["up"]
    active = bias_gelu(u, p["up.bias"])
    norm3 = {"gamma": p["norm3.gamma"], "bias": p["down.bias"]}
    c, sum3, mean3, rstd3 = add_layer_norm(
        active @ p["down"], sum2, beta=p["norm3.beta"], **norm3, return_stats=True
    )
    logits = c @ p["head"]
    if not gradients:
        return cross_entropy(logits, windows), {}
    loss, d = cross_entropy(logits, windows, return_grad=True, dloss=1 / windows.size, grad=logits)

    # backward: each line undoes one above, from the last to the first; d is what arrives there
    g = {"head": of_weight(c, d)}
    d, dsum2, g["norm3.gamma"], g["norm3.beta"], g["down.bias"] = add_layer_norm_backward(
        d @ p["head"].T, None, sum3, mean=mean3, rstd=rstd3, **norm3
    )
    g["down"] = of_weight(active, d)
    d, g["up.bias"] = bias_gelu_backward(d @ p["down"].T, u, p["up.bias"])
    g["up"] = of_weight(b, d)
    d, dx, g["norm2.gamma"], g["norm2.beta"], g["mixed.bias"] = add_layer_norm_backward(
        d @ p["up"].T, dsum2, sum2, mean=mean2, rstd=rstd2, **norm2
    )
    g["mixed"] = of_weight(mixed, d)
    d = split_heads(d @ p["mixed"].T, heads=size.heads)
    dscores = softmax_backward(d @ turned(v), share, **size.masks)
    dqkv = [merge_heads(each) for each in (dscores @ k, turned(dscores) @ q, turned(share) @ d)]
    g |= {name: of_weight(a, each) for name, each in zip(QKV, dqkv, strict=True)}
    d = sum(each @ p[name].T for name, each in zip(QKV, dqkv, strict=True))
    d, g["norm1.gamma"], g["norm1.beta"] = layer_norm_backward(d, x, p["norm1.gamma"], mean1, rstd1)
    dx += d
    return loss, g | {"embedding": of_weight(one_hot, dx), "positions": dx.sum(axis=0)}


class Adam:
    """Adam (Kingma and Ba, 2014), with a rate that falls to 0 along a line."""

    def __init__(self, parameters: Arrays, xp: Any, *, steps: int, rate: float = 8e-3) -> None:
        self.parameters, self.xp, self.steps, self.rate, self.done = parameters, xp, steps, rate, 0
        self.moments = {name: (xp.zeros_like(each), xp.zeros_like(each)) for name, each in parameters.items()}

    def step(self, gradients: Arrays) -> None:
        """Change the parameters in place."""
        rate = self.rate * max(0, 1 - self.done / self.steps)
        self.done += 1
        for name, gradient in gradients.items():
            mean, square = self.moments[name]
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            unbiased = mean / (1 - 0.9**self.done), square / (1 - 0.99**self.done)
            self.parameters[name] -= rate * unbiased[0] / (self.xp.sqrt(unbiased[1]) + 1e-8)


def train(options: argparse.Namespace, size: Size, xp: Any) -> History:
    """Train and print as it goes; return (step, training loss, held-out loss) of each line, in bits a pixel."""
    random = np.random.default_rng(options.seed)
    parameters = {name: xp.asarray(each) for name, each in initialise(size, random).items()}
    windows, held_out = photographs()
    adam = Adam(parameters, xp, steps=options.steps)
    history, recent, begin = [], [], time.perf_counter()
    print("  step   training   held out      time   (losses in bits a pixel)")
    for step in range(options.steps + 1):
        chosen = xp.asarray(windows[random.integers(0, len(windows), options.batch)])
        loss, gradients = forward_and_backward(parameters, chosen, size, xp)
        recent.append(loss.mean())
        if step % options.every == 0 or step == options.steps:
            unseen, _ = forward_and_backward(parameters, xp.asarray(held_out), size, xp, gradients=False)
            bits = [float(each) / np.log(2) for each in (sum(recent) / len(recent), unseen.mean())]
            print(
                f"{step:>6} {bits[0]:>10.3f} {bits[1]:>10.3f} {time.perf_counter() - begin:>7.1f} s",
                flush=True,
            )
            history.append((step, *bits))
            recent = []
        adam.step(gradients)
    return history


def from_the_pixel_before() -> float:
    """Return the held-out loss of what needs no network: how often each level follows each other level, counted."""
    windows, held_out = photographs()
    counts = np.full((LEVELS, LEVELS), 0.1)
    np.add.at(counts, (windows[:, :-1], windows[:, 1:]), 1)
    share = counts / counts.sum(axis=1, keepdims=True)
    return -float(np.log2(share[held_out[:, :-1], held_out[:, 1:]]).mean())


def plot(history: History, before: float, target: Path) -> None:
    """Draw the losses, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  it may be missing
    except ImportError:
        print("no plot: matplotlib, which draws it, is not installed (pip install '.[plot]')")
        return
    steps, training, unseen = zip(*history, strict=True)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="step", ylabel="loss, bits a pixel", title="the next pixel of a photograph"
    )
    axes.plot(steps, training, label="training, mean since the last point")
    axes.plot(steps, unseen, label="a photograph that is not trained on")
    axes.axhline(before, color="0.5", linestyle="--", label="from the pixel before alone")
    axes.legend()
    figure.savefig(target)
    print(f"{target}: the losses as a plot")


def main() -> None:
    """Say what is trained where, train, and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses: .svg, .png or .pdf")
    parser.add_argument("--steps", type=int, default=240, help="steps of Adam (240)")
    parser.add_argument("--batch", type=int, default=16, help="windows a step (16)")
    parser.add_argument("--every", type=int, default=40, help="steps between two lines (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and of the windows (0)")
    options = parser.parse_args()
    try:
        where, xp = devices.present_limits().name, devices.cupy()
    except devices.NoDeviceError:
        where, xp = "the CPU: no GPU can be used", np
    count = sum(each.size for each in initialise(Size(), np.random.default_rng()).values())
    print(
        f"{count} parameters, {options.steps} steps of {options.batch} windows of {WINDOW} x {WINDOW}, on {where}\n"
    )
    history = train(options, Size(), xp)
    before = from_the_pixel_before()
    print(f"\nheld out, guessed from the pixel before alone: {before:.3f}")
    if options.plot:
        plot(history, before, options.plot)


if __name__ == "__main__":
    main()
