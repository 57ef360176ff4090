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
    add_qkv_bias,
    add_rms_norm,
    bias_gelu,
    bias_silu,
    dropout,
    functions,
    fuse,
    geglu,
    layer_norm,
    log_softmax,
    merge_heads,
    rms_norm,
    softmax,
    split_heads,
    swiglu,
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
NO_AXIS = [None, True, np.True_, 1.0, "c", b"1", {}, math.nan, (-1, None), (True,), ("a",), (1.0,), ([],)]
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
MASKED: dict[str, Callable[..., Any]] = {name: ROWS[name] for name in ("softmax", "log_softmax")}
ADDING: dict[str, Callable[..., Any]] = {name: NORMS[name] for name in ("add_layer_norm", "add_rms_norm")}
QUANTISING = {name: NORMS[name] for name in NORMS if name != "fusion"} | {"softmax": ROWS["softmax"]}


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(calls: dict[str, Any], name: str, values: list[Any], allowed: str, *errors: Any) -> None:
        for of, call in calls.items():
            key = f"{of}, {name}"
            key += " again" * (key in found)
            found[key] = Case(call, name, values, allowed, errors or (TypeError,))

    boolean, number, integer = "use True or False", "give a .*number", "give an integer"
    add(ROWS, "axis", NO_AXIS, "integer")
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
            for name, call in MASKED.items()
        },
        "left_padded",
        NO_BOOLEAN,
        boolean,
    )
    add(MASKED, "causal", NO_BOOLEAN, boolean)
    add(MASKED, "causal_offset", NO_INTEGER, "use an integer")
    add(MASKED, "window", [each for each in NO_INTEGER if type(each) is not list], "use an integer")
    add(MASKED, "window", [[], (1,), (1, 2, 3)], "left, right", ValueError)
    add(MASKED, "scale", [each for each in NO_NUMBER if each is not None], number)
    add(MASKED, "scale", [math.nan, math.inf, HUGE], "finite", ValueError)
    for name in ("where", "bias"):
        add(MASKED, name, [True, 3, "x", [[1]], {}], "give a NumPy or a CuPy array")
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
    add(split, "heads", [0, -1, 7, HUGE], "multiple|at least 1", ValueError)
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
        (X.astype(np.int32), r'x.astype("float32")'),
        (X > 0, r'x.astype("float32")'),
        (X.astype(np.uint8), r'x.astype("float32")'),
        (X.astype(np.longdouble), r'x.astype("float64")'),
        (X.astype(X.dtype.newbyteorder()), r'x.astype("=f4")'),
        (X.astype(np.dtype("f8").newbyteorder()), r'x.astype("=f8")'),
    ],
    ids=lambda each: str(getattr(each, "dtype", "")),
)
def test_another_dtype_has_the_conversion_in_its_error(x: Any, advice: str) -> None:
    for call in (layer_norm, softmax, bias_gelu_alone, merge_heads):
        with pytest.raises(TypeError, match=re.escape(advice)):
            call(x)
    with pytest.raises(TypeError, match=re.escape(advice.replace("x.", "gamma."))):
        layer_norm(X, x[0, 0])


def bias_gelu_alone(x: Any) -> Any:
    return bias_gelu(x, None)


def test_device_arrays_have_the_same_errors(simulated: Any) -> None:
    x = simulated.cupy.asarray(X)
    softmax(x)
    for axis in (True, 1.0, None, [-1], "c"):
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
