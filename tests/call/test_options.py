"""Every option of every public function: a bad value gets an error that names it, what came, and what is allowed."""

from __future__ import annotations

import contextlib
import linecache
import math
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import cupynorm
from cupynorm import (
    DeviceFunction,
    Quantize,
    add_layer_norm,
    add_layer_norm_backward,
    add_qkv_bias,
    add_rms_norm,
    add_rms_norm_backward,
    bias_gelu,
    bias_gelu_backward,
    bias_silu,
    bias_silu_backward,
    cross_entropy,
    dropout,
    functions,
    fuse,
    geglu,
    geglu_backward,
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_from_y,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    merge_heads,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_from_y,
    softmax,
    softmax_backward,
    split_heads,
    swiglu,
    swiglu_backward,
)
from cupynorm.encoder import BertEncoder, EncoderConfig
from tests.bert.test_encoder import weights_of
from tests.simulator import simulated

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["simulated"]  # a fixture

PACKAGE = Path(cupynorm.__file__).parent
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
HUGE = 10**400  # beyond every float

NO_NUMBER = [None, True, np.False_, "1e-5", b"1", 1j, [], {}, np.ones(2), float]
NO_INTEGER = [True, np.True_, 2.0, 4.5, "3", b"3", [], {}, math.nan, np.ones(2, int)]
NO_BOOLEAN = [None, 0, 1, "yes", b"", [], 1.0, np.ones(2, bool)]
NO_NAME = [None, True, 3, b"tanh", [], {}, np.ones(2)]
NO_DTYPE = ["bf16", b"f4", True, 3, [], {}, "f4,f4", "int8", np.int32, ">f4", object(), X, math.nan]
NO_AXIS = [True, np.True_, 1.0, "c", b"1", {}, math.nan, (-1, None), (True,), ("a",), (1.0,), ([],)]
NO_PLAN = [True, 3, b"warp", [], {}, ("warp",), np.ones(2)]


class Case(NamedTuple):
    """A call with one bad option. allowed: what the message says of what is allowed."""

    call: Callable[..., Any]
    name: str
    values: list[Any]
    allowed: str
    errors: tuple[type[Exception], ...] = (TypeError,)


def encoder(**options: Any) -> EncoderConfig:
    sizes = {"hidden": 8, "heads": 2, "layers": 1, "ffn": 8, "vocabulary": 10, "positions": 6}
    return EncoderConfig(**{**sizes, **options})


ENCODER = BertEncoder(encoder(), weights_of(encoder(), 0))
TOKENS = np.ones((2, 3), int)
FUSION = fuse(layer_norm, store=lambda y, r: y + r)

NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda **how: layer_norm(X, **how),
    "rms_norm": lambda **how: rms_norm(X, **how),
    "add_layer_norm": lambda **how: add_layer_norm(X, X, **how),
    "add_rms_norm": lambda **how: add_rms_norm(X, X, **how),
    "quantised layer_norm": lambda **how: layer_norm(X, **{"quantize": "int8", **how}),
    "fusion": lambda **how: FUSION(X, 1.0, **how),
}
ROWS = NORMS | {
    "softmax": lambda **how: softmax(X, **how),
    "log_softmax": lambda **how: log_softmax(X, **how),
    "masked softmax": lambda **how: softmax(X, scale=2.0, **how),
}
EACH: dict[str, Callable[..., Any]] = {
    "bias_gelu": lambda **how: bias_gelu(X, None, **how),
    "bias_silu": lambda **how: bias_silu(X, None, **how),
    "geglu": lambda **how: geglu(X, **how),
    "swiglu": lambda **how: swiglu(X, **how),
    "dropout": lambda **how: dropout(X, 0.5, seed=1, **how),
    "add_qkv_bias": lambda **how: add_qkv_bias(np.ones((2, 6), "f4"), heads=1, **how),
    "split_heads": lambda **how: split_heads(X, heads=2, **how),
    "merge_heads": lambda **how: merge_heads(X, **how),
}
RSTD, LABELS = np.ones((2, 3), "f4"), np.array([[0, 1, 2], [3, 2, 1]])
NORM_GRADIENTS: dict[str, Callable[..., Any]] = {
    "layer_norm_backward": lambda **how: layer_norm_backward(X, X, **how),
    "rms_norm_backward": lambda **how: rms_norm_backward(X, X, **how),
    "add_layer_norm_backward": lambda **how: add_layer_norm_backward(X, X, X, **how),
    "add_rms_norm_backward": lambda **how: add_rms_norm_backward(X, None, X, **how),
}
FROM_Y: dict[str, Callable[..., Any]] = {
    "layer_norm_backward_from_y": lambda **how: layer_norm_backward_from_y(X, X, rstd=RSTD, **how),
    "rms_norm_backward_from_y": lambda **how: rms_norm_backward_from_y(X, X, rstd=RSTD, **how),
}
SOFTMAX_GRADIENTS: dict[str, Callable[..., Any]] = {
    "softmax_backward": lambda **how: softmax_backward(X, X, **how),
    "log_softmax_backward": lambda **how: log_softmax_backward(X, X, **how),
}
LOSSES: dict[str, Callable[..., Any]] = {
    "logsumexp": lambda **how: logsumexp(X, **how),
    "cross_entropy": lambda **how: cross_entropy(X, LABELS, **how),
    "cross_entropy, gradient": lambda **how: cross_entropy(X, LABELS, **{"return_grad": True, **how}),
}
FUSED_GRADIENT: dict[str, Callable[..., Any]] = {
    "Fusion.backward": lambda **how: FUSION.backward(X, X, 1.0, **how)
}
GRADIENTS = NORM_GRADIENTS | FROM_Y | SOFTMAX_GRADIENTS | FUSED_GRADIENT | LOSSES
ACTIVATION_GRADIENTS: dict[str, Callable[..., Any]] = {
    "bias_gelu_backward": lambda **how: bias_gelu_backward(X, X, **how),
    "bias_silu_backward": lambda **how: bias_silu_backward(X, X, **how),
    "geglu_backward": lambda **how: geglu_backward(X[..., :2], X, **how),
    "swiglu_backward": lambda **how: swiglu_backward(X[..., :2], X, **how),
}
MASKED: dict[str, Callable[..., Any]] = {name: ROWS[name] for name in ("softmax", "log_softmax")}
ADDING: dict[str, Callable[..., Any]] = {name: NORMS[name] for name in ("add_layer_norm", "add_rms_norm")}
QUANTISING = {name: NORMS[name] for name in NORMS if name != "fusion"} | {"softmax": ROWS["softmax"]}


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(calls: dict[str, Any], name: str, values: list[Any], allowed: str, *errors: Any) -> None:
        for of, call in calls.items():
            key = f"{of}, {name}"
            while key in found:
                key += " again"
            found[key] = Case(call, name, values, allowed, errors or (TypeError,))

    boolean, number, integer = "use True or False", "give a .*number", "give an integer"
    add(ROWS, "axis", NO_AXIS, "integer")
    along = {name: EACH[name] for name in ("bias_gelu", "bias_silu", "geglu", "swiglu")}
    add(along, "axis", NO_AXIS, "integer")
    halves = ("geglu", "swiglu")
    add(
        {name: EACH[name] for name in halves},
        "axis",
        [None, (0, 1), (-1, -2)],
        "several axes: name the one",
        ValueError,
    )
    add(NORMS, "eps", [each for each in NO_NUMBER if each is not None], number)
    add({"layer_norm": NORMS["layer_norm"], "rms_norm": NORMS["rms_norm"]}, "eps", [None], number)
    add(NORMS, "eps", [-1.0, math.nan, math.inf, HUGE, -HUGE], "0 or a positive finite number", ValueError)
    add(NORMS, "return_stats", NO_BOOLEAN, boolean)
    add(ROWS | EACH, "out", [3, [0.0], "x", b"x", {}, True], "give a NumPy or a CuPy array", TypeError)
    plain = {name: call for name, call in (ROWS | EACH).items() if not name.startswith("quantised")}
    add(plain, "dtype", NO_DTYPE, "float32")
    add(ROWS, "plan", NO_PLAN, "name of a variant|cupynorm.Plan")
    add(QUANTISING, "quantize", [True, 3, [], {}, "int4", "f4", b"int8", X, float], "float8_e4m3fn")
    add(ADDING, "alpha", NO_NUMBER, number)
    add(ADDING, "alpha", [math.nan, -math.inf, HUGE], "finite", ValueError)
    add(ADDING, "dropout", NO_NUMBER, number)
    add(ADDING, "dropout", [-0.1, 1.5, math.nan, HUGE], "0 to 1|finite", ValueError)
    dropping = {
        name: lambda call=call, **how: call(dropout=0.5, **{"seed": 1, **how})
        for name, call in ADDING.items()
    }
    dropping["dropout"] = lambda **how: dropout(X, 0.5, **{"seed": 1, **how})
    for name in ("seed", "offset"):
        add(dropping, name, NO_INTEGER, integer)
        add(dropping, name, [-1, 1 << 64, HUGE], "0 to 2", ValueError)
    add({"dropout": lambda p: dropout(X, p, seed=1)}, "p", NO_NUMBER, number)
    add(
        {"dropout": lambda p: dropout(X, p, seed=1)},
        "p",
        [-0.1, 2, math.nan, HUGE],
        "0 to 1|finite",
        ValueError,
    )
    add(ADDING, "return_sum", NO_BOOLEAN, boolean)
    add(
        {
            name: lambda call=call, **how: call(lengths=np.ones(3, int), **how)
            for name, call in (MASKED | SOFTMAX_GRADIENTS | {"logsumexp": LOSSES["logsumexp"]}).items()
        },
        "left_padded",
        NO_BOOLEAN,
        boolean,
    )
    gradient_cases(add)
    masked = MASKED | SOFTMAX_GRADIENTS | {"logsumexp": LOSSES["logsumexp"]}
    add(masked, "causal", NO_BOOLEAN, boolean)
    add(masked, "causal_offset", NO_INTEGER, "use an integer")
    add(masked, "window", [each for each in NO_INTEGER if type(each) is not list], "use an integer")
    add(masked, "window", [[], (1,), (1, 2, 3)], "left, right", ValueError)
    add(masked, "scale", [each for each in NO_NUMBER if each is not None], number)
    add(masked, "scale", [math.nan, math.inf, HUGE], "finite", ValueError)
    for name in ("where", "bias"):
        add(masked, name, [True, 3, "x", [[1]], {}], "give a NumPy or a CuPy array")
    approximating = {
        "bias_gelu": EACH["bias_gelu"],
        "geglu": EACH["geglu"],
        "functions.gelu": lambda **how: functions.gelu(X, **how),
    }
    add(approximating, "approximate", NO_NAME, "'none' or 'tanh'")
    add(approximating, "approximate", ["", "sigmoid"], "'none' or 'tanh'", ValueError)
    gated = {"geglu": EACH["geglu"], "swiglu": EACH["swiglu"]}
    add(gated, "gate", NO_NAME, "'first' or 'second'")
    add(gated, "gate", ["left"], "'first' or 'second'", ValueError)
    split = {
        "split_heads": lambda heads: split_heads(X, heads=heads),
        "add_qkv_bias": lambda heads: add_qkv_bias(np.ones((2, 6), "f4"), heads=heads),
    }
    add(split, "heads", [None, *NO_INTEGER], integer)
    add(split, "heads", [0, -1, 7, HUGE], "multiple|of 1 or more", ValueError)
    fusing = {"fuse": lambda **how: fuse(layer_norm, load=lambda x: x + 1, **how)}
    add(fusing, "keep_loaded", NO_BOOLEAN, boolean)
    device_function = {
        "DeviceFunction": lambda **how: DeviceFunction(
            **{"name": "F", "text": "struct F {};", "host": abs, "inputs": 1, **how}
        )
    }
    add(device_function, "text", [None, 3, b"struct F {};", []], "text")
    add(device_function, "name", [None, 3, b"F", []], "identifier")
    add(device_function, "name", ["1F", "F G", ""], "identifier", ValueError)
    add(device_function, "host", [None, 3, "abs"], "give a function")
    for name in ("inputs", "outputs"):
        add(device_function, name, [0, -1, *NO_INTEGER], "integer", TypeError, ValueError)
    quantize = {"Quantize": lambda scale: Quantize("int8", scale)}
    add(
        quantize,
        "scale",
        [each for each in NO_NUMBER if each is not None and not isinstance(each, np.ndarray)],
        number,
    )
    add(quantize, "scale", [0, -1.0, math.nan, math.inf, HUGE], "positive and finite", ValueError)
    config = {"EncoderConfig": encoder}
    for name in ("hidden", "heads", "layers", "ffn", "vocabulary", "positions", "types"):
        add(config, name, [None, 0, -4, *NO_INTEGER], "integer, at least 1", TypeError, ValueError)
    for name in ("norm", "approximate"):
        add(config, name, [*NO_NAME, "other"], " or ", TypeError, ValueError)
    add(config, "eps", [*NO_NUMBER, -1.0, math.nan, HUGE], "number", TypeError, ValueError)
    add(config, "dtype", [None, *NO_DTYPE], "float32")
    add(
        {"BertEncoder": lambda device: BertEncoder(encoder(), {}, device=device)},
        "device",
        [*NO_NAME, "cuda"],
        "use auto, cpu or gpu",
        TypeError,
        ValueError,
    )
    embed = {"BertEncoder.embed": lambda **how: ENCODER.embed(TOKENS, **how)}
    add(embed, "pooling", [*NO_NAME, "max"], "use mean or cls", TypeError, ValueError)
    add(embed, "normalize", NO_BOOLEAN, boolean)
    add(
        embed,
        "lengths",
        [3, "12", [1.5, 2.0], ["a", "b"], [[1], [1, 2]], {}],
        "integers|NumPy array",
        TypeError,
    )
    add(embed, "mask", [3, "12", [[1, 1, 1]], {}], "NumPy array", TypeError)
    return found


def gradient_cases(add: Callable[..., None]) -> None:
    """Add the cases of gradients and losses, but for masks."""
    boolean, number, integer, array = (
        "use True or False",
        "give a .*number",
        "give an integer",
        "give a NumPy or a CuPy array",
    )
    no_array = [3, [0.0], "x", b"x", {}, True]
    every, with_eps = GRADIENTS | ACTIVATION_GRADIENTS, NORM_GRADIENTS | FUSED_GRADIENT
    add(GRADIENTS | ACTIVATION_GRADIENTS, "axis", NO_AXIS, "integer")
    add(GRADIENTS, "plan", NO_PLAN, "name of a variant|cupynorm.Plan")
    add(every, "out", no_array, array)
    add(every, "dtype", NO_DTYPE, "float32")
    add(with_eps, "eps", [each for each in NO_NUMBER if each is not None], number)
    add(NORM_GRADIENTS, "eps", [None], number)
    add(with_eps, "eps", [-1.0, math.nan, math.inf, HUGE, -HUGE], "0 or a positive finite", ValueError)
    add(NORM_GRADIENTS | FROM_Y, "parameters", NO_BOOLEAN, boolean)
    add(NORM_GRADIENTS | FROM_Y, "gamma", ["x", b"x", {}, True, [1.0], 1j], array)
    add({"layer_norm_backward_from_y": FROM_Y["layer_norm_backward_from_y"]}, "beta", ["x", [1.0]], array)
    statistics = {
        "layer_norm_backward": lambda **how: layer_norm_backward(X, X, **{"mean": RSTD, "rstd": RSTD, **how}),
        "rms_norm_backward": lambda **how: rms_norm_backward(X, X, **how),
        "rms_norm_backward_from_y": lambda **how: rms_norm_backward_from_y(X, X, **how),
    }
    add(statistics, "rstd", no_array, array)
    add({"layer_norm_backward": statistics["layer_norm_backward"]}, "mean", no_array, array)
    one_sum = {name: (NORM_GRADIENTS | FROM_Y)[name] for name in ("rms_norm_backward", *list(FROM_Y)[1:])}
    one_sum |= {
        name: lambda call=call, **how: call(bias=np.ones(4, "f4"), return_dbias=True, **how)
        for name, call in SOFTMAX_GRADIENTS.items()
    }
    one_sum |= {
        name: lambda call=call, **how: call(bias=np.ones(4, "f4"), **how)
        for name, call in ACTIVATION_GRADIENTS.items()
        if "glu" not in name.replace("gelu", "")
    }
    add(one_sum, "add_to", no_array, array)
    several = {name: each for name, each in (NORM_GRADIENTS | FROM_Y).items() if name not in one_sum}
    add(several, "add_to", [3, "x", b"x", {}, True, X], "give a tuple of", TypeError)
    add(several, "add_to", [(), (None,), [None] * 9], "give a tuple of", ValueError)
    add(FUSED_GRADIENT, "add_to", [3, "x", [X], (X,), X], "give a dict")
    adding = {name: each for name, each in NORM_GRADIENTS.items() if name.startswith("add")}
    add(adding, "residual_out", no_array, array)
    add(adding, "bias", ["x", b"x", {}, True, [1.0]], array)
    add(adding, "alpha", NO_NUMBER, number)
    add(adding, "alpha", [math.nan, -math.inf, HUGE], "finite", ValueError)
    dropping = adding | {"softmax_backward": SOFTMAX_GRADIENTS["softmax_backward"]}
    add(dropping, "dropout", NO_NUMBER, number)
    add(dropping, "dropout", [-0.1, 1.5, math.nan, HUGE], "0 to 1|finite", ValueError)
    dropping = {
        name: lambda call=call, **how: call(dropout=0.5, **{"seed": 1, **how})
        for name, call in dropping.items()
    }
    for name in ("seed", "offset"):
        add(dropping, name, NO_INTEGER, integer)
        add(dropping, name, [-1, 1 << 64, HUGE], "0 to 2", ValueError)
    add(SOFTMAX_GRADIENTS, "return_dbias", NO_BOOLEAN, boolean)
    approximating = {name: ACTIVATION_GRADIENTS[name] for name in ("bias_gelu_backward", "geglu_backward")}
    add(approximating, "approximate", NO_NAME, "'none' or 'tanh'")
    add(approximating, "approximate", ["", "sigmoid"], "'none' or 'tanh'", ValueError)
    gated = {name: ACTIVATION_GRADIENTS[name] for name in ("geglu_backward", "swiglu_backward")}
    add(gated, "gate", NO_NAME, "'first' or 'second'")
    add(gated, "gate", ["left"], "'first' or 'second'", ValueError)
    add({"logsumexp": LOSSES["logsumexp"]}, "keepdims", NO_BOOLEAN, boolean)
    loss, gradient = (
        {name: LOSSES[name] for name in names}
        for names in (("cross_entropy", "cross_entropy, gradient"), ("cross_entropy, gradient",))
    )
    add(loss, "return_grad", NO_BOOLEAN, boolean)
    add(loss, "weight", ["x", b"x", {}, True, [1.0]], array)
    add(loss, "ignore_index", NO_INTEGER, integer)
    add(loss, "label_smoothing", NO_NUMBER, number)
    add(loss, "label_smoothing", [-0.1, 1.5, math.nan, HUGE], "0 to 1", ValueError)
    add(loss, "z_loss", NO_NUMBER, number)
    add(loss, "z_loss", [-1.0, math.nan, math.inf, HUGE], "0 or a positive finite", ValueError)
    add(gradient, "dloss", ["x", b"x", {}, True, [1.0], 1j], array)
    add(gradient, "dloss", [math.nan, math.inf, HUGE], "finite", ValueError)
    add(gradient, "grad", no_array, array)
    add({"cross_entropy": lambda labels: cross_entropy(X, labels)}, "labels", no_array, array)


CASES = cases()


def assert_clear(error: Exception, name: str, value: Any, allowed: str) -> None:
    """The package itself raised it, and it says which argument it is about, what came, and what is allowed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    assert PACKAGE in Path(frame.filename).parents
    assert linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise ")
    said = str(error)
    assert re.match(rf"{name}\b", said), said
    came = {type(value).__qualname__, repr(value)[:40], str(value)[:40]}
    parts = value if isinstance(value, (tuple, list)) else ()
    with contextlib.suppress(TypeError, ValueError):
        came |= {np.dtype(value).name, str(np.dtype(value))}
    with contextlib.suppress(TypeError, ValueError):
        came |= {str(np.asarray(value).dtype)}
    came |= {type(each).__qualname__ for each in parts} | {repr(each) for each in parts}
    assert any(each in said for each in came), said
    assert re.search(allowed, said), said
    assert len(said) < 300


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error")
def test_bad_values(name: str) -> None:
    case = CASES[name]
    for value in case.values:
        with pytest.raises((TypeError, ValueError)) as caught:
            case.call(**{case.name: value})
        assert type(caught.value) in case.errors, value
        assert_clear(caught.value, case.name, value, case.allowed)


def test_integers_of_numpy_and_true_numbers_of_every_kind_are_taken() -> None:
    expected = layer_norm(X, axis=-1, eps=1.0)

    for axis in (np.int64(-1), np.int8(2), (np.int64(-1),), 2):
        for eps in (1, np.float16(1), np.float64(1), np.int32(1)):
            np.testing.assert_array_equal(layer_norm(X, axis=axis, eps=eps), expected)  # type: ignore[arg-type]
    assert len(layer_norm(X, return_stats=np.True_)) == 3  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("x", "advice"),
    [
        (X.astype(np.int32), r'x.astype("float64")'),
        (X > 0, r'x.astype("float32")'),
        (X.astype(np.uint8), r'x.astype("float32")'),
        (X.astype(np.longdouble), r'x.astype("float64")'),
        (X.astype(X.dtype.newbyteorder()), r'x.astype("=f4")'),
        (X.astype(np.dtype("f8").newbyteorder()), r'x.astype("=f8")'),
    ],
    ids=lambda each: str(getattr(each, "dtype", "")),
)
def test_another_dtype_has_the_conversion_in_its_error(x: Any, advice: str) -> None:
    for call in (bias_gelu_alone, merge_heads):
        with pytest.raises(TypeError, match=re.escape(advice)):
            call(x)
    for name, gradient in {
        "dy": lambda: layer_norm_backward(x, X),
        "y": lambda: softmax_backward(X, x),
        "ds": lambda: add_rms_norm_backward(X, x, X),
        "rstd": lambda: rms_norm_backward(X, X, rstd=x[..., 0]),
        "bias": lambda: add_layer_norm_backward(X, None, X, bias=x[0, 0]),
        "weight": lambda: cross_entropy(X, LABELS, weight=x[0, 0]),
        "dloss": lambda: cross_entropy(X, LABELS, dloss=x[..., 0], return_grad=True),
        "add_to": lambda: rms_norm_backward(X, X, add_to=x[0, 0]),
        r"add_to[1]": lambda: layer_norm_backward(X, X, add_to=(None, x[0, 0])),
    }.items():
        with pytest.raises(TypeError, match=re.escape(advice.replace("x.", f"{name}."))):
            gradient()
    with pytest.raises(TypeError, match=re.escape(advice.replace("x.", "gamma."))):
        layer_norm(X, x[0, 0])


def bias_gelu_alone(x: Any) -> Any:
    return bias_gelu(x, None)


def test_device_arrays_have_the_same_errors(simulated: Any) -> None:
    x = simulated.cupy.asarray(X)
    softmax(x)
    for axis in (True, 1.0, [-1], "c", (None,)):
        with pytest.raises(TypeError, match="axis"):
            softmax(x, axis=axis)  # type: ignore[arg-type]
    layer_norm(x, return_stats=True)
    with pytest.raises(TypeError, match="return_stats is 1: use True or False"):
        layer_norm(x, return_stats=1)  # type: ignore[call-overload]
    for plan in NO_PLAN:
        with pytest.raises(TypeError, match="plan is .*name of a variant"):
            layer_norm(x, plan=plan)
    with pytest.raises(ValueError, match="plan 'warps' is not a variant: use warp"):
        layer_norm(x, plan="warps")


ALIKE: dict[str, tuple[Callable[..., Any], str, Any, list[Any]]] = {
    "left_padded": (softmax, "left_padded", True, [1, 1.0]),
    "window": (softmax, "window", (1, 1), [(1.0, 1.0), (True, 1), (1, np.True_)]),
    "window, one number": (softmax, "window", 1, [1.0, True]),
    "causal": (softmax, "causal", True, [1, 1.0]),
    "causal_offset": (softmax, "causal_offset", 1, [1.0, True]),
    "axis of a fusion": (lambda x, axis: FUSION(x, 1.0, axis=axis), "axis", (1, 2), [(True, 2), (1.0, 2)]),
    "axis, quantised": (
        lambda x, axis: layer_norm(x, axis=axis, quantize="int8"),
        "axis",
        (1, 2),
        [(True, 2), (1.0, 2)],
    ),
    "axis": (layer_norm, "axis", (1, 2), [(True, 2), (1.0, 2)]),
    "return_sum": (lambda x, **how: add_layer_norm(x, x, **how), "return_sum", True, [1, 1.0]),
    "seed": (lambda x, **how: dropout(x, 0.5, **how), "seed", 1, [1.0, True]),
    "axis of a norm's gradient": (
        lambda x, axis: layer_norm_backward(x, x, axis=axis),
        "axis",
        (1, 2),
        [(True, 2), (1.0, 2)],
    ),
    "parameters": (lambda x, **how: rms_norm_backward(x, x, **how), "parameters", True, [1, 1.0]),
    "eps of a norm's gradient": (lambda x, **how: rms_norm_backward(x, x, **how), "eps", 1.0, [True]),
    "alpha": (lambda x, **how: add_rms_norm_backward(x, x, x, **how), "alpha", 1.0, [True]),
    "causal, gradient": (lambda x, **how: softmax_backward(x, x, **how), "causal", True, [1, 1.0]),
    "window, gradient": (
        lambda x, **how: log_softmax_backward(x, x, **how),
        "window",
        (1, 1),
        [(1.0, 1.0), (True, 1)],
    ),
    "seed of a gradient": (
        lambda x, **how: softmax_backward(x, x, dropout=0.5, **how),
        "seed",
        1,
        [1.0, True],
    ),
    "keepdims": (logsumexp, "keepdims", True, [1, 1.0]),
    "axis of a fusion's gradient": (
        lambda x, axis: FUSION.backward(x, x, 1.0, axis=axis),
        "axis",
        (1, 2),
        [(True, 2), (1.0, 2)],
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_equals_an_allowed_value_is_refused_behind_a_call_with_that_value(
    simulated: Any, name: str
) -> None:
    """1 == 1.0 == True, and they hash alike: a call that is remembered must not answer for them."""
    call, option, allowed, values = ALIKE[name]
    x = simulated.cupy.asarray(X)
    others = {"lengths": simulated.cupy.asarray(np.array([4, 2, 1]))} if option == "left_padded" else {}

    for value in values:
        for _ in range(2):
            call(x, **{option: allowed}, **others)
        with pytest.raises(TypeError, match=rf"{option} is "):
            call(x, **{option: value}, **others)
