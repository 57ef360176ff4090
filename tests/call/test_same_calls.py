"""A device takes exactly the calls that NumPy arrays are taken for: the shape, dtype and layout of results, and errors.

Kernels are blank, so that ten thousand calls need no compiler. Where the two do differ, other tests say how: plan= and
values that a device does not look at (nan="raise", labels, lengths in an array), and medians.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cupynorm
from cupynorm.runtime import compiler
from tests.simulator import cupy, driver, engine, simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["simulated"]  # a fixture

SHAPE = (3, 4, 5)
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal(SHAPE).astype(np.float32)


@pytest.fixture
def blank(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give kernels that do nothing."""
    kernel = SimpleNamespace(static_shared_bytes=0, max_threads=1024, parameter_bytes=())
    monkeypatch.setattr(compiler, "load_function", lambda *_, **__: (driver.load(kernel), None))
    monkeypatch.setattr(engine, "launch", lambda *_, **__: None)


class Case(NamedTuple):
    """A call: what it is told by, its arrays of x's shape, and its options, in which ITSELF stands for the first."""

    name: str
    arrays: tuple[Any, ...]
    options: Mapping[str, Any]


ITSELF = object()
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": lambda a: a,
    "Fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.transpose(1, 2, 0)).transpose(2, 0, 1),
    "steps": lambda a: np.repeat(np.repeat(a, 2, axis=0), 3, axis=2)[::2, :, ::3],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, :, ::-1])[::-1, :, ::-1],
    "stretched": lambda a: np.broadcast_to(a[:, :1], a.shape),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "no axes": (),
    "one axis": (5,),
    "no rows": (0, 4, 5),
    "rows of nothing": (3, 4, 0),
    "nothing in the middle": (3, 0, 5),
    "one element": (1, 1, 1),
    "four axes": (2, 3, 4, 5),
}
AXES: list[Any] = [
    -1,
    0,
    1,
    -3,
    (1, 2),
    (2, 0),
    (0, 1),
    None,
    (),
    3,
    -4,
    (0, -3),
    1.0,
    True,
    "1",
    [0],
    np.int8(1),
]
DTYPES: list[Any] = [
    *("float16", "float64", "bool", "int8", "uint8", "int16", "uint16", "int32"),
    *("uint32", "int64", "uint64", "complex64", "datetime64[s]", "S4"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
]


def outs(dtype: Any = np.float32) -> list[Any]:
    """Return what may be given as `out` of x's shape, and what may not."""
    return [
        np.empty(SHAPE, dtype),
        np.empty(SHAPE, np.float16),
        np.empty(SHAPE, dtype).T.copy().T,
        np.empty((*SHAPE, 2), dtype)[..., 0],
        np.empty(SHAPE, dtype)[::-1, :, ::-1],
        np.lib.stride_tricks.as_strided(np.empty(SHAPE, dtype), SHAPE, (16, 4, 4)),
        np.empty((3, 4), dtype),
        np.empty(SHAPE, np.int32),
        np.empty(SHAPE, np.complex64),
        ITSELF,
        5,
        [],
    ]


MISSING: dict[str, list[Any]] = {
    "where": [
        np.ones(SHAPE, bool),
        np.ones(SHAPE, np.uint8),
        np.ones(5, bool),
        np.ones((4, 1), bool),
        np.ones((1, *SHAPE), bool),
        np.ones((3, 4), bool),
        np.ones(SHAPE, np.int32),
        np.ones(SHAPE, np.float32),
        np.ones(SHAPE, bool).T.copy().T,
        True,
        [True],
    ],
    "lengths": [
        np.full((3, 4), 2),
        np.full((3, 4), 2, np.int32),
        np.full((3, 4), 2, np.uint8),
        np.full(4, 2),
        np.full((3, 1), 2),
        np.full((4, 5), 2),
        np.full((3, 4, 1), 2),
        np.full((3, 4), 2.0),
        np.array(2),
        2,
        2.0,
        [1, 2, 3, 2],
        [[1], [2], [3]],
        [1, 9, 3, 2],
        [-1, 2, 3, 2],
        [1, [2]],
        "2",
    ],
    "left_padded": [True, 1, None],
    "nan": ["omit", "propagate", "skip", None, True],
}
STATISTIC: dict[str, list[Any]] = {
    **MISSING,
    "weights": [
        np.ones(SHAPE, np.float32),
        np.ones(SHAPE),
        np.ones(5, np.float16),
        np.ones((3, 1, 1), np.float32),
        np.ones((3, 4), np.float32),
        np.ones((1, *SHAPE)),
        np.ones(5, np.int64),
        np.ones(5, np.uint8),
        2.0,
    ],
}
RESULT: dict[str, list[Any]] = {
    "dtype": ["float16", np.float32, float, "bfloat16", "int8", "int32", "complex64", "nonsense", 3, None],
    "out": outs(),
}
EPS: dict[str, list[Any]] = {
    "eps": [0, 1, 1e-3, np.float32(1e-3), -1, np.nan, np.inf, "1", None, True, 1j, [1]]
}
FLAG = [True, False, 1, None, "yes"]
MASKS: dict[str, list[Any]] = {
    **MISSING,
    "scale": [2, 0.5, np.float32(2), 0, -1, np.inf, np.nan, "2", True, None],
    "bias": [
        np.ones(SHAPE, np.float32),
        np.ones(5, np.float16),
        np.ones((3, 1, 1)),
        np.ones((3, 4), np.float32),
        np.ones((1, *SHAPE), np.float32),
        np.ones(5, int),
        1.0,
    ],
    "causal": FLAG,
    "causal_offset": [0, -2, 3, np.int64(1), 1.0, True, "1"],
    "window": [2, (1, None), (None, None), (1, 2), (1,), (-1, 2), -1, 1.0, "1", (1.0, 2)],
}
PARAMETER = [
    np.ones(5, np.float32),
    np.ones(5),
    np.ones((1, 5), np.float16),
    np.ones((2, 5), np.float32),
    np.ones(1, np.float32),
    np.ones(3, np.float32),
    np.ones((3, 5), np.float32),
    np.ones((5, 3), np.float32),
    np.ones(SHAPE, np.float32),
    np.ones(5, int),
    np.ones(10, np.float32)[::2],
    2,
    2.5,
    1e300,
    10**400,
    np.float32(3),
    True,
    "1",
    [1.0] * 5,
]
QUANTIZE = {
    "quantize": ["int8", "float8_e4m3fn", "float8_e5m2", "int4", 8, cupynorm.Quantize("int8", scale=0.1)]
}
GAMMA = {"gamma": PARAMETER}
NORM = {**GAMMA, "return_stats": FLAG, **EPS, **MISSING, **RESULT, **QUANTIZE}
DROPOUT: dict[str, list[Any]] = {
    "dropout": [0, 0.5, 1, -0.1, 1.5, np.nan, "0.5", True],
    "seed": [1, -1, 1.0, "1", 2**64],
    "offset": [4, -1, 1.0, "1", 2**70],
}
SUM = {**GAMMA, "bias": PARAMETER, "alpha": EPS["eps"], "return_stats": FLAG, "return_sum": FLAG, **DROPOUT}
GRADIENT = {**GAMMA, "parameters": FLAG, **EPS, **RESULT}
KEPT = {name: each for name, each in MASKS.items() if name != "nan"}
ROWS = [
    np.ones((3, 4), np.float32),
    np.ones((4, 5)),
    np.ones(4, np.float16),
    np.ones(SHAPE, np.float32),
    np.ones((3, 4), int),
    2.0,
]
LABELS = [
    np.ones((3, 4), int),
    np.ones((3, 4), np.uint8),
    np.ones((4, 5), np.int32),
    np.ones((3, 4)),
    np.ones(4, int),
    [[1] * 4] * 3,
    1,
    None,
]
FUSION = cupynorm.fuse(cupynorm.softmax, load=lambda x, t: x * t, store=lambda y, s: y + s)
OPERAND = [*PARAMETER, np.ones((3, 1, 1), np.float32), np.ones((1, *SHAPE), np.float32), None]

APPROXIMATE = ["tanh", "none", "other", 1, None]
GATES = ["first", "second", "third", 1, None]
OF_HALVES = [*PARAMETER, np.ones(4, np.float32), np.ones(2), np.ones(4)[::2], np.ones((1, 4), np.float16)]
HALF_OUTS = [
    np.empty((2, 4, 2), np.float32),
    np.empty((1, 4, 4), np.float16),
    np.empty((4, 2, 2)).transpose(2, 0, 1),
    np.empty((2, 4, 4))[..., ::2],
    np.empty((2, 4, 2), int),
    np.lib.stride_tricks.as_strided(np.empty(8), (2, 4, 2), (16, 8, 8)),
]


def even(x: Any) -> Any:
    """Return a view with an even number of elements along each axis: two halves."""
    shape = getattr(x, "shape", None)
    return x if shape is None else x[tuple(slice(extent // 2 * 2) for extent in shape)]


def half(x: Any, axis: Any) -> Any:
    """Return the first half of even(x) along an axis, if it names one."""
    whole = even(x)
    ndim = getattr(whole, "ndim", 0)
    if not isinstance(axis, (int, np.integer)) or not -ndim <= axis < ndim:
        return whole
    index = [slice(None)] * ndim
    index[axis] = slice(whole.shape[axis] // 2)
    return whole[tuple(index)]


# what a call cannot do without
NEEDED = {"cross_entropy": {"labels": LABELS[0]}, "layer_norm_backward_from_y": {"rstd": ROWS[0]}}
# A function, how many arrays of x's shape it takes first, and options, whose values are tried one by one.
OPS: dict[str, tuple[Callable[..., Any], int, dict[str, list[Any]]]] = {
    "layer_norm": (cupynorm.layer_norm, 1, {**NORM, "beta": PARAMETER}),
    "rms_norm": (cupynorm.rms_norm, 1, NORM),
    "softmax": (cupynorm.softmax, 1, {**MASKS, **RESULT, **QUANTIZE}),
    "log_softmax": (cupynorm.log_softmax, 1, {**MASKS, **RESULT}),
    "logsumexp": (
        cupynorm.logsumexp,
        1,
        {
            **MASKS,
            "b": MASKS["bias"],
            "return_sign": FLAG,
            "keepdims": FLAG,
            "out": [np.empty((3, 4), np.float32), np.empty((3, 4), np.float16), np.empty(SHAPE), ITSELF],
            "dtype": RESULT["dtype"],
        },
    ),
    "cross_entropy": (
        cupynorm.cross_entropy,
        1,
        {
            "labels": LABELS,
            "weight": PARAMETER,
            "label_smoothing": EPS["eps"],
            "z_loss": EPS["eps"],
            "return_grad": FLAG,
            "dloss": ROWS,
            "grad": outs(),
            "ignore_index": [1, -100, 1.0, "1", True, 2**70],
            "out": ROWS,
            "dtype": RESULT["dtype"],
        },
    ),
    "standardize": (
        cupynorm.standardize,
        1,
        {"ddof": EPS["eps"], "return_stats": FLAG, **EPS, **STATISTIC, **RESULT},
    ),
    "normalize": (
        cupynorm.normalize,
        1,
        {"ord": [1, 2, 2.0, np.inf, 3, "2", True, None], "return_norms": FLAG, **STATISTIC, **RESULT},
    ),
    "rescale": (
        cupynorm.rescale,
        1,
        {"low": EPS["eps"], "high": EPS["eps"], "return_range": FLAG, **MISSING, **RESULT},
    ),
    "moments": (
        cupynorm.moments,
        1,
        {
            "order": [2, 3, 4, 5, 1, 2.0, "2", True],
            "ddof": EPS["eps"],
            "keepdims": FLAG,
            **STATISTIC,
            "dtype": RESULT["dtype"],
            "out": [
                (np.empty((3, 4), np.float32), None),
                (None, np.empty((3, 4))),
                [np.empty((3, 4)), None],
                (None,),
                np.empty((3, 4)),
                (ITSELF, None),
                (None, 5),
            ],
        },
    ),
    "sigma_clip": (
        functools.partial(cupynorm.sigma_clip, iterations=2),
        1,
        {
            **dict.fromkeys(("sigma", "sigma_lower", "sigma_upper"), EPS["eps"]),
            "iterations": [1, 3, 0, -1, 2.0, "1", True, np.int64(2)],
            "centre": ["mean", "mode", None, 1],
            **{name: MISSING[name] for name in ("where", "lengths", "left_padded")},
            "return_bounds": FLAG,
            "return_stats": FLAG,
            **RESULT,
        },
    ),
    "add_layer_norm": (
        cupynorm.add_layer_norm,
        2,
        {**SUM, "beta": PARAMETER, **EPS, **RESULT, **QUANTIZE},
    ),
    "add_rms_norm": (
        functools.partial(cupynorm.add_rms_norm, seed=3),
        2,
        {**SUM, **EPS, **RESULT, **QUANTIZE},
    ),
    "softmax_backward": (
        cupynorm.softmax_backward,
        2,
        {**KEPT, **DROPOUT, "return_dbias": FLAG, "add_to": [*ROWS, None], **RESULT},
    ),
    "log_softmax_backward": (cupynorm.log_softmax_backward, 2, {**KEPT, **RESULT}),
    "layer_norm_backward": (
        cupynorm.layer_norm_backward,
        2,
        {**GRADIENT, "mean": ROWS, "add_to": [*ROWS, (np.ones(5), None), (None, None)]},
    ),
    "rms_norm_backward": (cupynorm.rms_norm_backward, 2, {**GRADIENT, "rstd": ROWS, "add_to": ROWS}),
    "layer_norm_backward_from_y": (
        cupynorm.layer_norm_backward_from_y,
        2,
        {**GAMMA, "beta": PARAMETER, "rstd": ROWS, **RESULT},
    ),
    "add_layer_norm_backward": (
        lambda dy, s, **options: cupynorm.add_layer_norm_backward(dy, None, s, **options),
        2,
        {**GRADIENT, "bias": PARAMETER, "alpha": EPS["eps"], **DROPOUT},
    ),
    "fusion": (
        lambda x, t=2.0, s=1.0, **options: FUSION(x, t, s, **options),
        1,
        {"t": OPERAND, "s": OPERAND, **RESULT},
    ),
    "bias_gelu": (
        lambda x, bias=None, **options: cupynorm.bias_gelu(x, bias, **options),
        1,
        {"bias": PARAMETER, "approximate": APPROXIMATE, **RESULT},
    ),
    "bias_silu": (
        lambda x, bias=2.0, **options: cupynorm.bias_silu(x, bias, **options),
        1,
        {"bias": PARAMETER, **RESULT},
    ),
    "geglu": (
        lambda x, **options: cupynorm.geglu(even(x), **options),
        1,
        {
            "bias": OF_HALVES,
            "gate": GATES,
            "approximate": APPROXIMATE,
            "dtype": RESULT["dtype"],
            "out": HALF_OUTS,
        },
    ),
    "swiglu": (
        lambda x, bias=2.0, **options: cupynorm.swiglu(even(x), bias, **options),
        1,
        {"bias": OF_HALVES, "gate": GATES, "out": HALF_OUTS},
    ),
    "dropout": (
        lambda x, p=0.5, axis=-1, seed=3, **options: cupynorm.dropout(x, p, seed=seed, **options),
        1,
        {"p": DROPOUT["dropout"], "seed": DROPOUT["seed"], "offset": DROPOUT["offset"], **RESULT},
    ),
    "bias_gelu_backward": (
        cupynorm.bias_gelu_backward,
        2,
        {"bias": PARAMETER, "approximate": APPROXIMATE, **RESULT},
    ),
    "bias_silu_backward": (
        lambda dy, x, bias=1.0, **options: cupynorm.bias_silu_backward(dy, x, bias, **options),
        2,
        {"bias": PARAMETER, "add_to": [np.zeros(()), np.zeros((), np.float32), *PARAMETER, None], **RESULT},
    ),
    "geglu_backward": (
        lambda x, axis=-1, **options: cupynorm.geglu_backward(half(x, axis), even(x), axis=axis, **options),
        1,
        {
            "bias": OF_HALVES,
            "gate": GATES,
            "dtype": RESULT["dtype"],
            "out": [np.empty((2, 4, 4), np.float32)],
        },
    ),
    "swiglu_backward": (
        lambda x, axis=-1, bias=1.0, **options: cupynorm.swiglu_backward(
            half(x, axis), even(x), bias, axis=axis, **options
        ),
        1,
        {
            "bias": OF_HALVES,
            "add_to": [np.zeros(()), np.zeros(4), None],
            "out": [np.empty((2, 4, 4)), ITSELF],
        },
    ),
    "fusion's gradient": (
        lambda dy, x, t=2.0, s=1.0, **options: FUSION.backward(dy, x, t, s, **options).x,
        2,
        {"t": OPERAND, "s": OPERAND},
    ),
}


def cases(name: str) -> Iterator[Case]:
    """Yield the calls of a function: with each axis and layout, and with each value of each option."""
    _, count, options = OPS[name]
    for case in bare_cases(count, options):
        yield case._replace(options={**NEEDED.get(name, {}), **case.options})


def bare_cases(count: int, options: dict[str, list[Any]]) -> Iterator[Case]:
    for axis in AXES:
        for layout, laid_out in LAYOUTS.items():
            yield Case(f"axis={axis!r}, {layout}", (laid_out(X),) * count, {"axis": axis})
        for name, shape in SHAPES.items():
            yield Case(f"axis={axis!r}, {name}", (np.zeros(shape, np.float32),) * count, {"axis": axis})
    for dtype in DTYPES:
        for axis in (-1, 0):
            yield Case(f"{dtype}, axis={axis}", (np.ones(SHAPE).astype(dtype),) * count, {"axis": axis})
    for given in (None, 3.0, "x", [1.0, 2.0]):
        yield Case(f"x={given!r}", (given,) * count, {})
    yield Case("unknown", (X,) * count, {"nonsense": 1})
    for name, values in options.items():
        for number, value in enumerate(values):
            for axis in (-1, 0, (0, 2)):
                told = f"{name}, {number}: {getattr(value, 'shape', value)!r}, axis={axis}"
                yield Case(told, (X,) * count, {name: value, "axis": axis})


def told(found: Any, out: Any) -> Any:
    """Return all of a result but its numbers."""
    if isinstance(found, tuple):
        return tuple(told(each, out) for each in found)
    if not is_array(found):
        return type(found)
    # a step along one element, or none at all, says nothing
    steps = [step for step, extent in zip(found.strides, found.shape, strict=True) if extent > 1]
    name = "uint8" if found.dtype.name.startswith("float8") else found.dtype.name  # which CuPy does not have
    return found.shape, name, steps if found.size else None, found is out


def is_array(given: Any) -> bool:
    return isinstance(given, np.ndarray)


def answer(function: Callable[..., Any], case: Case, move: Callable[[Any], Any]) -> Any:
    """Call a function with a case's arrays, moved to where they are computed."""
    arrays = [move(each) for each in case.arrays]

    def placed(each: Any) -> Any:
        if each is ITSELF:
            return arrays[0]
        several = isinstance(each, tuple) or (isinstance(each, list) and any(map(is_array, each)))
        return type(each)(map(placed, each)) if several else move(each)

    options = {name: placed(each) for name, each in case.options.items()}
    try:
        found = function(*arrays, **options)
    except (TypeError, ValueError) as error:
        return type(error), str(error).replace("cupy.ndarray", "numpy.ndarray")
    return told(found, options.get("out"))


def on_device(host: Any) -> Any:
    """Return a device array of the same bytes in the same layout; what is no array as it is."""
    if not is_array(host):
        return host
    owner = host
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    memory = cupy.asarray(np.frombuffer(owner.tobytes("A"), np.uint8))
    if not host.size:
        return cupy.empty(host.shape, host.dtype)
    offset = host.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    made = np.ndarray(host.shape, host.dtype, memory.view(np.ndarray), offset, host.strides)
    return made.view(cupy.ndarray)


@pytest.mark.parametrize("name", OPS)
def test_a_device_takes_the_calls_of_numpy_arrays(name: str, blank: None) -> None:
    function, faults, taken, refused = OPS[name][0], [], 0, 0
    for case in cases(name):
        with np.errstate(all="ignore"):
            host = answer(function, case, lambda each: each)
            device = answer(function, case, on_device)
        if host != device:
            faults.append(f"{case.name}:\n  NumPy  {host}\n  device {device}")
        was_refused = isinstance(host[0], type)
        taken, refused = taken + (not was_refused), refused + was_refused

    assert not faults, f"{len(faults)} calls differ, such as\n" + "\n".join(faults[:8])
    assert min(taken, refused) > 30
