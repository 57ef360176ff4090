"""Subclasses of arrays: taken where they compute as a plain array does, otherwise refused with what to do instead."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm import functions
from cupynorm.encoder import BertEncoder, EncoderConfig
from tests import SLOW, simulator
from tests.bert.test_encoder import weights_of
from tests.simulator import simulated

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["simulated"]  # a fixture

ROWS, COLS = 6, 8


class Masked(np.ndarray):
    """Works as astropy.utils.masked.Masked: the mask is kept beside the values, and ufuncs use both."""

    mask: Any = False

    @property
    def unmasked(self) -> Any:
        return self.view(np.ndarray)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        raise NotImplementedError


class Quantity(np.ndarray):
    """Has a unit, which its results keep, as those of the package quantities."""

    unit = "m"

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array.view(Quantity)


class Reversed(np.ndarray):
    """Another array at each index."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)[::-1]


class WithOperators(np.lib.mixins.NDArrayOperatorsMixin, np.ndarray):
    """Operators that are not the array's."""


class Named(np.ndarray):
    """Adds a name and methods, and overrides nothing."""

    def __new__(cls, given: Any, name: str = "") -> Any:
        made = np.asarray(given).view(cls)
        made.name = name
        return made

    def __array_finalize__(self, source: Any) -> None:
        self.name = getattr(source, "name", "")

    def __repr__(self) -> str:
        return self.name

    def total(self) -> Any:
        return self.sum()


def masked_array(array: Any) -> Any:
    return np.ma.MaskedArray(array, mask=np.zeros(array.shape, bool))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "masked array": (masked_array, r"{0} is a masked array: .*{0}\.data"),
    "Masked": (
        lambda array: array.view(Masked),
        r"{0} is a tests\.call\.test_subclasses\.Masked.*{0}\.unmasked",
    ),
    "matrix": (lambda array: array.view(np.matrix), r"{0} is a numpy\.matrix.*numpy\.asarray\({0}\)"),
    "Quantity": (
        lambda array: array.view(Quantity),
        r"{0} is a .*Quantity, whose __array_wrap__ .*asarray\({0}\)",
    ),
    "Reversed": (lambda array: array.view(Reversed), r"{0} is a .*Reversed, whose __getitem__ "),
    "operators": (lambda array: array.view(WithOperators), r"{0} is a .*WithOperators, whose __"),
}
TAKEN: dict[str, Callable[[Any], Any]] = {
    "memmap": lambda array: array.view(np.memmap),
    "recarray": lambda array: array.view(np.recarray),
    "nothing overridden": Named,
}


def numbers(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


FUSION = cupynorm.fuse(cupynorm.layer_norm, load=lambda x, r: x + r, store=lambda y, s: y * s)
CONFIG = EncoderConfig(hidden=8, heads=2, layers=1, ffn=8, vocabulary=10, positions=6)
ENCODER = BertEncoder(CONFIG, weights_of(CONFIG, 0))
WEIGHT = "embeddings.word_embeddings.weight"
X, COLUMN, LENGTHS = numbers(ROWS, COLS), numbers(COLS), np.full(ROWS, 5)
WHERE = np.arange(COLS) % 3 != 0
MEAN, RSTD, LABELS = numbers(ROWS), np.full(ROWS, 0.5, np.float32), np.arange(ROWS)
STATS = {"mean": MEAN, "rstd": RSTD}


def fused(x: Any, **others: Any) -> Any:
    return FUSION(x, **others)


def fused_backward(dy: Any, x: Any, **others: Any) -> Any:
    return (*FUSION.backward(dy, x, **others),)


def out(*shape: int) -> Any:
    return np.empty(shape or (ROWS, COLS), np.float32)


# function, the arrays that it is called with, and options that are none
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "layer_norm": (cupynorm.layer_norm, {"x": X, "gamma": COLUMN, "beta": COLUMN, "out": out()}, {}),
    "rms_norm": (cupynorm.rms_norm, {"x": X, "gamma": COLUMN, "out": out()}, {}),
    "softmax": (
        cupynorm.softmax,
        {"x": X, "where": WHERE, "lengths": LENGTHS, "bias": COLUMN, "out": out()},
        {},
    ),
    "log_softmax": (
        cupynorm.log_softmax,
        {"x": X, "where": WHERE, "lengths": LENGTHS, "bias": COLUMN, "out": out()},
        {},
    ),
    "add_layer_norm": (
        cupynorm.add_layer_norm,
        {"x": X, "residual": X, "gamma": COLUMN, "beta": COLUMN, "bias": COLUMN, "out": out()},
        {},
    ),
    "add_rms_norm": (
        cupynorm.add_rms_norm,
        {"x": X, "residual": X, "gamma": COLUMN, "bias": COLUMN, "out": out()},
        {},
    ),
    "bias_gelu": (cupynorm.bias_gelu, {"x": X, "bias": COLUMN, "out": out()}, {}),
    "bias_silu": (cupynorm.bias_silu, {"x": X, "bias": COLUMN, "out": out()}, {}),
    "geglu": (cupynorm.geglu, {"x": X, "bias": COLUMN, "out": out(ROWS, COLS // 2)}, {}),
    "swiglu": (cupynorm.swiglu, {"x": X, "bias": COLUMN, "out": out(ROWS, COLS // 2)}, {}),
    "dropout": (cupynorm.dropout, {"x": X, "out": out()}, {"p": 0.5, "seed": 1}),
    "add_qkv_bias": (
        cupynorm.add_qkv_bias,
        {"qkv": numbers(ROWS, 12), "bias": numbers(12), "out": out(3, 2, ROWS, 2)},
        {"heads": 2},
    ),
    "split_heads": (
        cupynorm.split_heads,
        {"x": X, "bias": COLUMN, "out": out(2, ROWS, 4)},
        {"heads": 2},
    ),
    "fusion": (
        fused,
        {"x": X, "r": X, "s": COLUMN, "gamma": COLUMN, "beta": COLUMN, "out": out()},
        {},
    ),
    "layer_norm_backward": (
        cupynorm.layer_norm_backward,
        {"dy": X, "x": X, "gamma": COLUMN, **STATS, "out": out()},
        {},
    ),
    "rms_norm_backward": (
        cupynorm.rms_norm_backward,
        {"dy": X, "x": X, "gamma": COLUMN, "rstd": RSTD, "out": out(), "add_to": COLUMN},
        {},
    ),
    "layer_norm_backward_from_y": (
        cupynorm.layer_norm_backward_from_y,
        {"dy": X, "y": X, "gamma": COLUMN, "beta": COLUMN, "rstd": RSTD, "out": out()},
        {},
    ),
    "rms_norm_backward_from_y": (
        cupynorm.rms_norm_backward_from_y,
        {"dy": X, "y": X, "gamma": COLUMN, "rstd": RSTD, "out": out(), "add_to": COLUMN},
        {},
    ),
    "add_layer_norm_backward": (
        cupynorm.add_layer_norm_backward,
        {**dict.fromkeys(("dy", "ds", "s"), X), **dict.fromkeys(("gamma", "bias"), COLUMN), **STATS}
        | {"out": out(), "residual_out": out()},
        {"alpha": 2.0},
    ),
    "add_rms_norm_backward": (
        cupynorm.add_rms_norm_backward,
        {**dict.fromkeys(("dy", "ds", "s"), X), **dict.fromkeys(("gamma", "bias"), COLUMN), "rstd": RSTD}
        | {"out": out(), "residual_out": out()},
        {},
    ),
    "softmax_backward": (
        cupynorm.softmax_backward,
        {"dy": X, "y": X, "where": WHERE, "lengths": LENGTHS, "bias": COLUMN, "out": out(), "add_to": COLUMN},
        {"return_dbias": True},
    ),
    "log_softmax_backward": (
        cupynorm.log_softmax_backward,
        {"dy": X, "y": X, "where": WHERE, "lengths": LENGTHS, "bias": COLUMN, "out": out()},
        {},
    ),
    "bias_gelu_backward": (
        cupynorm.bias_gelu_backward,
        {"dy": X, "x": X, "bias": COLUMN, "out": out(), "add_to": COLUMN},
        {},
    ),
    "bias_silu_backward": (
        cupynorm.bias_silu_backward,
        {"dy": X, "x": X, "bias": COLUMN, "out": out(), "add_to": COLUMN},
        {},
    ),
    "geglu_backward": (
        cupynorm.geglu_backward,
        {"dy": numbers(ROWS, COLS // 2), "x": X, "bias": COLUMN, "out": out(), "add_to": COLUMN},
        {},
    ),
    "swiglu_backward": (
        cupynorm.swiglu_backward,
        {"dy": numbers(ROWS, COLS // 2), "x": X, "bias": COLUMN, "out": out(), "add_to": COLUMN},
        {},
    ),
    "Fusion.backward": (
        fused_backward,
        {"dy": X, "x": X, "r": X, "s": COLUMN, "gamma": COLUMN, "beta": COLUMN, "out": out()},
        {},
    ),
    "logsumexp": (
        cupynorm.logsumexp,
        {"x": X, "where": WHERE, "lengths": LENGTHS, "bias": COLUMN, "out": out(ROWS)},
        {},
    ),
    "cross_entropy": (
        cupynorm.cross_entropy,
        {"logits": X, "labels": LABELS, "weight": COLUMN, "dloss": MEAN, "out": out(ROWS), "grad": out()},
        {"return_grad": True},
    ),
    "Quantize": (
        lambda x, scale: cupynorm.rms_norm(x, quantize=cupynorm.Quantize("int8", scale)),
        {"x": X, "scale": np.full((1, 1), 0.5, np.float32)},
        {},
    ),
}
ON_HOST_ONLY: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "functions.exp": (functions.exp, {"x": X}, {}),
    "functions.where": (functions.where, {"condition": WHERE, "a": X, "b": X}, {}),
    "functions.clip": (functions.clip, {"x": X, "low": COLUMN, "high": COLUMN}, {}),
    "functions.abs": (functions.abs, {"x": X}, {}),
    "functions.maximum": (functions.maximum, {"a": X, "b": COLUMN}, {}),
    "functions.cast": (functions.cast, {"x": X}, {"dtype": "float16"}),
    "BertEncoder": (
        lambda **weights: BertEncoder(CONFIG, weights_of(CONFIG, 0) | weights),
        {WEIGHT: weights_of(CONFIG, 0)[WEIGHT]},
        {},
    ),
    "forward": (ENCODER.forward, {"hidden": numbers(2, 3, 8), "lengths": np.array([[3, 2]])[0]}, {}),
    "forward, masked": (ENCODER.forward, {"hidden": numbers(2, 3, 8), "mask": np.ones((2, 3), bool)}, {}),
    "look_up": (ENCODER.look_up, {"tokens": np.ones((2, 3), int), "types": np.zeros((2, 3), int)}, {}),
    "embed": (ENCODER.embed, {"tokens": np.ones((2, 3), int), "types": np.zeros((2, 3), int)}, {}),
}
ARGUMENTS = [(name, each) for name, (_, arrays, _) in (CALLS | ON_HOST_ONLY).items() for each in arrays]


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda each: each)
def test_what_would_lose_something_is_refused_with_the_cure(name: str, argument: str, kind: str) -> None:
    call, arrays, options = (CALLS | ON_HOST_ONLY)[name]
    make, message = REFUSED[kind]
    given = dict(arrays)
    if kind == "matrix" and given[argument].ndim != 2:
        given[argument] = given[argument].reshape(-1, given[argument].shape[-1])

    with pytest.raises((TypeError, ValueError) if argument == WEIGHT else TypeError) as caught:
        call(**{**given, argument: make(given[argument])}, **options)

    said = str(caught.value).removeprefix("quantize.")
    assert re.search(message.format(re.escape(argument)), said), said


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda each: each)
def test_what_computes_as_an_array_does_is_taken(name: str, argument: str, kind: str) -> None:
    call, arrays, options = (CALLS | ON_HOST_ONLY)[name]
    arrays = {each: array.copy() for each, array in arrays.items()}
    expected = call(**arrays, **options)
    given = TAKEN[kind](arrays[argument].copy())

    got = call(**{**arrays, argument: given}, **options)

    if isinstance(expected, BertEncoder):
        return
    np.testing.assert_array_equal(np.asarray(first(got)), np.asarray(first(expected)))
    if argument == "out":
        assert first(got) is given
    else:
        assert type(first(got)) is type(first(expected))


ON_DEVICE = [(name, each) for name, each in ARGUMENTS if name in CALLS]
KINDS = ("operators", "kernels", "nothing overridden")


# what overrides something is the one or the other in turn; all with CUPYNORM_SLOW=1
@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        (*given, kind)
        for (i, given), (k, kind) in itertools.product(enumerate(ON_DEVICE), enumerate(KINDS))
        if SLOW or k in {i % 2, 2}
    ],
    ids=lambda each: each,
)
def test_subclasses_of_device_arrays_follow_the_same_rule(
    simulated: Any, kind: str, name: str, argument: str
) -> None:
    class Units(simulator.cupy.ndarray):
        def __mul__(self, other: Any) -> Any:
            raise NotImplementedError

    class Distributed(simulator.cupy.ndarray):
        """Has what CuPy's arrays over several devices have: no memory of its own, and kernels of its own."""

        def __cupy_override_elementwise_kernel__(self, *_: Any) -> Any:
            raise NotImplementedError

    class Plain(simulator.cupy.ndarray):
        def total(self) -> Any:
            raise NotImplementedError

    made = {"operators": Units, "kernels": Distributed, "nothing overridden": Plain}[kind]
    call, arrays, options = CALLS[name]
    on_device = {each: simulator.cupy.asarray(array) for each, array in arrays.items()}
    given = {**on_device, argument: on_device[argument].view(made)}

    if made is Plain:
        expected = simulator.cupy.asnumpy(first(call(**on_device, **options)))
        np.testing.assert_array_equal(simulator.cupy.asnumpy(first(call(**given, **options))), expected)
    else:
        hook = {"operators": "__mul__", "kernels": "__cupy_override_elementwise_kernel__"}[kind]
        for _ in range(2):
            with pytest.raises(
                TypeError, match=rf"{argument} is a .*{made.__name__}, whose {hook} .*view\(cupy.ndarray\)"
            ):
                call(**given, **options)
            call(**on_device, **options)


def test_a_matrix_is_never_multiplied_as_one() -> None:
    matrix = np.eye(4, dtype=np.float32).view(np.matrix)
    for call in (cupynorm.bias_gelu, cupynorm.geglu):
        with pytest.raises(TypeError, match="x is a numpy.matrix"):
            call(matrix, None)


def packed_field(array: Any) -> Any:
    """Return the same numbers as a field of records without padding: elements of n bytes are n + 1 bytes apart."""
    records = np.zeros(array.shape, [("value", array.dtype), ("note", "u1")])
    records["value"] = array
    return records["value"]


STRIDED = [
    (name, each)
    for name, (_, arrays, _) in CALLS.items()
    for each, array in arrays.items()
    if array.dtype.itemsize > 1 and array.size > 1
]


@pytest.mark.parametrize(("name", "argument"), STRIDED, ids=lambda each: each)
def test_fields_of_packed_records_are_read_and_written_on_the_host(name: str, argument: str) -> None:
    call, arrays, options = CALLS[name]
    arrays = {each: array.copy() for each, array in arrays.items()}
    expected = np.array(first(call(**arrays, **options)))
    given = {**arrays, argument: packed_field(arrays[argument])}

    if argument == "out" and "heads" in options:
        with pytest.raises(ValueError, match="it must be contiguous"):
            call(**given, **options)
    else:
        np.testing.assert_array_equal(first(call(**given, **options)), expected)


@pytest.mark.parametrize(("name", "argument"), STRIDED, ids=lambda each: each)
def test_fields_of_packed_records_are_refused_on_a_device(simulated: Any, name: str, argument: str) -> None:
    call, arrays, options = CALLS[name]
    on_device = {each: simulator.cupy.asarray(array) for each, array in arrays.items()}
    array = on_device[argument]
    memory = simulator.cupy.zeros((2 * array.size,), array.dtype)
    steps = packed_field(arrays[argument]).strides
    given = simulator.cupy.lib.stride_tricks.as_strided(memory, array.shape, steps)

    for _ in range(2):  # before and after a call that is remembered
        with pytest.raises(
            ValueError, match=rf"{argument} has strides .*, no multiple of .*ascontiguousarray"
        ):
            call(**{**on_device, argument: given}, **options)
        call(**on_device, **options)


def test_an_output_whose_elements_overlap_by_bytes_is_refused_on_the_host() -> None:
    memory = np.zeros(100, np.uint8)
    for step, overlaps in ((39, False), (38, True)):
        into = np.ndarray((2, 8), np.float32, memory, strides=(step, 5))
        if overlaps:
            with pytest.raises(ValueError, match="its elements overlap one another"):
                cupynorm.softmax(numbers(2, 8), out=into)
        else:
            np.testing.assert_array_equal(
                cupynorm.softmax(numbers(2, 8), out=into), cupynorm.softmax(numbers(2, 8))
            )


@pytest.mark.parametrize("make", [masked_array, REFUSED["Masked"][0]])
@pytest.mark.parametrize("argument", ["x", "where", "out"])
def test_the_cure_for_a_mask_fits_the_argument(argument: str, make: Callable[[Any], Any]) -> None:
    """where= says what of x is kept; a filled copy of `out` would be written instead of the caller's array."""
    _, arrays, _ = CALLS["softmax"]

    with pytest.raises(TypeError, match=rf"^{argument} is a") as caught:
        cupynorm.softmax(**{**arrays, argument: make(arrays[argument])})

    said = str(caught.value)
    assert ("where=~" in said) is (argument == "x")
    assert ("filled" in said) is (make is masked_array and argument != "out")
    assert re.search(rf"{argument}\.(data|unmasked)\b", said), said
