"""A bound call is launched again for arrays that lie alike: every form, in place, several launches, few frames."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm._dtypes import dtype_of
from cupynorm.call.view import Argument
from cupynorm.catalog import forms
from cupynorm.invoke import bound_calls, row_ops
from cupynorm.invoke.bound_calls import Arrays, Launch, bound_call
from cupynorm.lower.mirrors import POINTER, Struct
from cupynorm.runtime import devices
from tests import simulator
from tests.frames import frames
from tests.interrupted import interrupted
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

ROWS, COLS = 6, 48


def host(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape or (ROWS, COLS)).astype(dtype)


def bits(results: Any) -> list[bytes]:
    every = results if isinstance(results, tuple) else (results,)
    return [simulator.cupy.asnumpy(each).tobytes() for each in every]


@pytest.fixture
def launched(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of each call that no shortcut is for whether a bound one was launched."""
    seen: list[bool] = []
    again = bound_calls.Calls.again

    def noted(*given: Any) -> Any:
        signature, made = again(*given)
        seen.append(made is not None)
        return signature, made

    monkeypatch.setattr(bound_calls.Calls, "again", noted)
    return seen


# ---- every form


def arrays_of(form: Any, seed: int) -> dict[str, Any]:
    """Return a form's arrays on the device, but for its results."""
    random, made = np.random.default_rng(seed), {}
    for name, (shape, kind, holds) in form.given(ROWS, COLS, dtype_of("float32")).items():
        if holds == "result":
            continue
        if holds in {"lengths", "ragged"}:
            made[name] = random.integers(1, COLS + 1, shape).astype(kind)
        elif np.dtype(kind).kind in "biu":
            made[name] = random.integers(0, 2, shape).astype(kind)
        else:
            made[name] = random.standard_normal(shape).astype(kind)
    return {name: simulator.cupy.asarray(each) for name, each in made.items()}


@pytest.mark.parametrize("name", sorted(forms.FORMS))
def test_a_form_is_launched_again_with_the_next_calls_arrays(launched: list[bool], name: str) -> None:
    form = forms.form(name)
    if form.missing:
        pytest.skip(str(form.missing))
    first, second = (arrays_of(form, seed) for seed in (1, 2))
    expected = bits(form.call(second))
    row_ops.forget()
    form.call(first)
    launched.clear()

    found = bits(form.call(second))

    assert found == expected
    assert launched in ([True], [])  # [] is a shortcut's


# ---- what is written in place


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_calls_in_place_and_elsewhere_are_both_kept(launched: list[bool], order: tuple[bool, bool]) -> None:
    cupy = simulator.cupy
    calls: dict[str, Any] = {
        "softmax": lambda x, r, out: cupynorm.softmax(x, scale=2.0, out=out),
        "add": lambda x, r, out: cupynorm.add_layer_norm(x, r, out=out, return_sum=False),
        "gelu": lambda x, r, out: cupynorm.bias_gelu(x, None, out=out),
    }
    for name, call in calls.items():
        expected = bits(call(cupy.asarray(host()), cupy.asarray(host(seed=1)), None))
        for turn in range(3):
            launched.clear()
            for in_place in order:
                x, r = cupy.asarray(host()), cupy.asarray(host(seed=1))
                out = x if in_place else cupy.empty((ROWS, COLS), np.float32)
                assert bits(call(x, r, out)) == expected, name
            assert (False not in launched) if turn else launched == [False] * 2, name


def test_an_operand_that_is_the_output_has_a_call_of_its_own(launched: list[bool]) -> None:
    cupy = simulator.cupy
    r = host(seed=1)
    expected = bits(cupynorm.add_layer_norm(cupy.asarray(host()), cupy.asarray(r), return_sum=False))
    for turn in range(2):
        for where in ("x", "residual", "neither"):
            given = {"x": cupy.asarray(host()), "residual": cupy.asarray(r)}
            out = given.get(where, cupy.empty((ROWS, COLS), np.float32))
            launched.clear()
            assert bits(cupynorm.add_layer_norm(**given, out=out, return_sum=False)) == expected
            assert (False not in launched) if turn else launched == [False], where


def test_an_output_that_is_refused_is_refused_after_a_good_one(simulated: Any) -> None:
    cupy = simulator.cupy
    memory = cupy.asarray(host(8 * ROWS, COLS))
    x, r = memory[:ROWS], memory[ROWS : 2 * ROWS]
    for _ in range(2):
        cupynorm.add_layer_norm(x, r, out=memory[2 * ROWS : 3 * ROWS], return_sum=False)
        cupynorm.bias_gelu(x, None, out=memory[2 * ROWS : 3 * ROWS])
        with pytest.raises(ValueError, match="out and residual share memory in part"):
            cupynorm.add_layer_norm(x, r, out=memory[ROWS + 1 : 2 * ROWS + 1], return_sum=False)
        with pytest.raises(ValueError, match="out and x share memory in part"):
            cupynorm.bias_gelu(x, None, out=memory[1 : ROWS + 1])


# ---- options


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal_offset": 1}, {"causal_offset": True}),
        ({"window": (1, 1)}, {"window": (1.0, 1)}),
        ({"scale": 1.0}, {"scale": True}),
        ({"where": True}, {"lengths": True}),
        ({"scale": 1.0}, {"scal": 1.0}),
    ],
)
def test_an_option_that_is_refused_is_refused_after_its_equal_was_not(
    simulated: Any, first: dict[str, Any], then: dict[str, Any]
) -> None:
    cupy = simulator.cupy
    x = cupy.asarray(host(3, ROWS, COLS))
    mask = cupy.asarray(np.ones((3, ROWS, COLS), np.uint8))
    of = {name: mask if name in {"where", "lengths"} else each for name, each in first.items()}
    refused = {name: mask if name in {"where", "lengths"} else each for name, each in then.items()}
    cupynorm.softmax(x, **of)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            cupynorm.softmax(x, **refused)


@pytest.mark.parametrize(
    ("call", "first", "then"),
    [
        ("layer_norm_backward", {"eps": 1.0}, {"eps": True}),
        ("layer_norm_backward", {}, {"parameters": 1}),
        ("softmax_backward", {}, {"causal": 0}),
        ("softmax_backward", {}, {"left_padded": 0}),
        ("softmax_backward", {}, {"return_dbias": 0}),
        ("softmax_backward", {}, {"dropout": False}),
        ("softmax_backward", {"dropout": 0.5, "seed": 1}, {"dropout": 0.5, "seed": True}),
        ("logsumexp", {}, {"keepdims": 0}),
        ("logsumexp", {}, {"return_sign": 0}),
        ("logsumexp", {}, {"causal": 0}),
        ("cross_entropy", {}, {"return_grad": 0}),
        ("cross_entropy", {"ignore_index": 1}, {"ignore_index": True}),
        ("cross_entropy", {"label_smoothing": 0.0}, {"label_smoothing": False}),
    ],
)
def test_an_option_of_a_gradient_or_loss_is_refused_after_its_equal_was_not(
    simulated: Any, call: str, first: dict[str, Any], then: dict[str, Any]
) -> None:
    x, labels = simulator.cupy.asarray(host()), simulator.cupy.asarray(np.ones(ROWS, np.int32))
    arrays = {"logsumexp": (x,), "cross_entropy": (x, labels)}.get(call, (x, x))
    getattr(cupynorm, call)(*arrays, **first)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            getattr(cupynorm, call)(*arrays, **then)


def test_the_zeros_of_both_signs_are_two_options(simulated: Any) -> None:
    cupy = simulator.cupy
    x, r = (
        cupy.asarray(np.full((ROWS, COLS), -0.0, np.float32)),
        cupy.asarray(np.ones((ROWS, COLS), np.float32)),
    )
    sums = [cupynorm.add_layer_norm(x, r, alpha=alpha)[1] for alpha in (0.0, -0.0, 0.0)]

    assert [bool(np.signbit(cupy.asnumpy(each)).all()) for each in sums] == [False, True, False]


@pytest.mark.parametrize("seed", [np.int64(7), np.uint64(7), 7])
def test_a_dropout_of_numpys_integers_is_launched_again(launched: list[bool], seed: Any) -> None:
    cupy = simulator.cupy
    x, r = cupy.asarray(host()), cupy.asarray(host(seed=1))
    expected = bits(cupynorm.add_layer_norm(x, r, dropout=0.5, seed=7))
    launched.clear()

    assert bits(cupynorm.add_layer_norm(x, r, dropout=0.5, seed=seed)) == expected
    assert launched == []  # a shortcut's


# ---- fusions


@pytest.mark.parametrize("given", [(), (0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_fusion_with_some_outputs_given_is_launched_again(
    launched: list[bool], given: tuple[int, ...], in_place: bool
) -> None:
    cupy = simulator.cupy
    fusion = cupynorm.fuse(
        cupynorm.layer_norm,
        load=lambda x, r, c: x + r * c,
        store=lambda y, s: (y * s, y + 1),
        keep_loaded=True,
    )
    expected = fusion(host(), host(seed=1), 2.0, 0.5, beta=0.25, return_stats=True)
    beta = cupy.asarray(np.full(COLS, 0.25, np.float32))
    for turn in range(3):
        x, r = cupy.asarray(host()), cupy.asarray(host(seed=1))
        places = iter((x, r) if in_place else ())
        outs = [
            next(places, cupy.empty((ROWS, COLS), np.float32)) if at in given else None for at in range(3)
        ]
        launched.clear()

        found = fusion(x, r, 2.0, s=0.5, beta=beta, return_stats=True, out=tuple(outs) if given else None)

        assert launched == ([] if turn else [False])  # [] is a shortcut's
        assert all(out is None or each is out for each, out in zip(found, outs, strict=False))
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(cupy.asnumpy(each), wanted, rtol=1e-4, atol=1e-5)


def test_an_operand_may_have_the_name_of_another_ops_argument(launched: list[bool]) -> None:
    cupy = simulator.cupy
    fusion = cupynorm.fuse(cupynorm.softmax, load=lambda x, gamma, eps: x * gamma + eps)
    expected = fusion(host(), host(COLS), host(seed=1))
    for turn in range(3):
        launched.clear()
        x, gamma, eps = (cupy.asarray(each) for each in (host(), host(COLS), host(seed=1)))
        np.testing.assert_allclose(
            cupy.asnumpy(fusion(x, eps=eps, gamma=gamma)), expected, rtol=1e-4, atol=1e-6
        )
        assert launched == ([] if turn else [False])


# ---- frames


def test_a_warm_call_enters_few_functions(simulated: Any) -> None:
    cupy = simulator.cupy
    x, r, g, out = (cupy.asarray(host(*shape)) for shape in ((), (), (COLS,), ()))
    fusion = cupynorm.fuse(cupynorm.layer_norm, load=lambda x, r, c: x + r + c)
    calls: dict[str, tuple[int, Any]] = {
        "row op": (2, lambda: cupynorm.layer_norm(x, g, g, out=out)),
        "mask": (3, lambda: cupynorm.softmax(x, causal=True, out=out)),
        "sum": (3, lambda: cupynorm.add_layer_norm(x, r, g, g, dropout=0.1, seed=1)),
        "quantised": (4, lambda: cupynorm.rms_norm(x, g, quantize="int8")),
        "fusion": (2, lambda: fusion(x, r, g, gamma=g)),
        "gelu": (4, lambda: cupynorm.bias_gelu(x, g)),
        "heads": (3, lambda: cupynorm.split_heads(x, g, heads=4)),
        # comprehensions are functions, too, before Python 3.12
        "gradient of a norm": (5, lambda: cupynorm.layer_norm_backward(x, r, g)),
        "gradient of softmax": (6, lambda: cupynorm.softmax_backward(x, r, causal=True)),
        "gradient of gelu": (6, lambda: cupynorm.bias_gelu_backward(x, r, g)),
        "loss": (4, lambda: cupynorm.logsumexp(x)),
    }

    found = {name: frames(call) for name, (_, call) in calls.items()}

    assert all(found[name] <= most for name, (most, _) in calls.items()), found


# ---- several launches, with a workspace between them


@pytest.mark.parametrize("small", [COLS * 4, 1 << 16], ids=["parameters", "all"])
def test_small_results_and_a_small_workspace_are_one_allocation(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    cupy = simulator.cupy
    monkeypatch.setattr(bound_calls, "SMALL", small)
    x, dy, gamma = (cupy.asarray(host(*shape)) for shape in ((), (), (COLS,)))
    expected = cupynorm.layer_norm_backward(dy, x, gamma)
    made: list[Any] = []
    new = cupy._new
    monkeypatch.setattr(cupy, "_new", lambda *given: made.append(given) or new(*given))

    dx, dgamma, dbeta = found = cupynorm.layer_norm_backward(dy, x, gamma)

    (bound,) = bound_calls.thread.calls.bound.values()
    assert len(bound.parts) == 4  # mean and rstd, and sums for gamma and beta
    columns, elements = 2 * bound_calls.PART, 3 * bound_calls.PART  # dgamma and dbeta; dx, of 1152 bytes
    apart = [(columns,), (ROWS, COLS), (bound.room,)]
    assert [given[0] for given in made] == (
        apart if small == COLS * 4 else [(columns + elements + bound.room,)]
    )
    assert dbeta.data.ptr - dgamma.data.ptr == bound_calls.PART
    for ours, first in zip(found, expected, strict=True):
        assert np.array_equal(cupy.asnumpy(ours), cupy.asnumpy(first))
    kept = cupy.asnumpy(dbeta).copy()
    del dx, dgamma, found
    cupynorm.layer_norm_backward(x, x, gamma)
    assert np.array_equal(cupy.asnumpy(dbeta), kept)  # whose memory is its own as long as it is kept


def test_an_array_is_made_by_cupys_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def _init(self, *given: Any) -> None:
            self.given = given

    class Array(Base):
        def __new__(cls, *_: Any) -> Any:
            raise AssertionError("which takes twice as long")

    monkeypatch.setattr(devices, "cupy", lambda: SimpleNamespace(ndarray=Array))

    made = devices.array_maker()((2, 3), "e")

    assert type(made) is Array
    assert made.given == ((2, 3), "e", None)


class Launches:
    """Two kernels that note the words that they are launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.kernels: list[Any] = []

    def bind(self, number: int) -> Any:
        def bind(stream: int, address: int) -> Any:
            import ctypes

            parameters = ctypes.c_uint64.from_address(address)

            def launch() -> int:
                words = (ctypes.c_uint64 * 3).from_address(parameters.value)
                self.seen.append((number, *words))
                return 0

            return launch

        return bind


def test_a_call_may_have_several_launches_and_a_workspace(simulated: Any) -> None:
    cupy = simulator.cupy
    launches = Launches()
    x, y, partial = (cupy.empty((ROWS, COLS), np.float32) for _ in range(3))

    def params(*names: str) -> Struct:
        arrays = {"x": x, "y": y, "partial": partial}
        values = tuple(Argument(arrays[name].data.ptr, name) if name in arrays else 5 for name in names)
        return Struct("", np.dtype([(f"word {at}", POINTER) for at in range(len(names))]), values)

    calls = bound_calls.thread.calls
    signature, made = calls.again((x,), ("backward",))
    assert made is None
    bound = bound_call(
        0,
        Arrays({"x": x}, made={"y": y}, workspace={"partial": partial}),
        [
            # a kernel that nobody unloads
            Launch(None, launches.bind(1), params("x", "", "partial")),  # type: ignore[arg-type]
            Launch(None, launches.bind(2), params("partial", "y", "")),  # type: ignore[arg-type]
        ],
    )
    bound.once()
    first = [(1, x.data.ptr, 5, partial.data.ptr), (2, partial.data.ptr, y.data.ptr, 5)]
    assert launches.seen == first
    assert calls.add(signature, bound, {"y": y})

    other = cupy.empty((ROWS, COLS), np.float32)
    launches.seen.clear()
    _, results = calls.again((other,), ("backward",))

    assert results is not None
    (result,) = results
    (_, given, five, between), (_, read, written, _) = launches.seen
    assert (given, five, read, written) == (other.data.ptr, 5, between, result.data.ptr)
    assert between not in {other.data.ptr, result.data.ptr, partial.data.ptr}

    # a handler between the two launches makes the same call: each pair of launches has arrays of its own
    mine, its = (cupy.empty((ROWS, COLS), np.float32) for _ in range(2))
    launches.seen.clear()
    with interrupted(lambda: calls.again((its,), ("backward",)), str(Path(bound_calls.__file__))):
        _, results = calls.again((mine,), ("backward",))
    assert results is not None
    of_mine = [each for each in launches.seen if each[:2] == (1, mine.data.ptr)]
    assert len(of_mine) == 1
    assert (2, of_mine[0][3], results[0].data.ptr, 5) in launches.seen
    assert all(each[1] in {mine.data.ptr, its.data.ptr} for each in launches.seen if each[0] == 1)
