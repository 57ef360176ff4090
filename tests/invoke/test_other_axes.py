"""A warm call along any axes does no more on the host than along the last axis: every function that takes `axis`.

The calls are those of the catalog, and bare ones of functions that it does not have. Their kernels are neither compiled
nor run: whether results are right is told by tests/kernels/test_any_axis.py, and for warm calls by test_warm_calls.py.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm.catalog import forms
from cupynorm.catalog.forms import FORMS
from tests import simulator
from tests.frames import frames
from tests.simulator import build

if TYPE_CHECKING:
    from collections.abc import Callable

    Arrays = dict[str, Any]

ROWS, COLS = 12, 64
TAKING_AXIS = {
    name
    for name in cupynorm.__all__
    if inspect.isfunction(each := getattr(cupynorm, name)) and "axis" in inspect.signature(each).parameters
}
FUSION = cupynorm.fuse(cupynorm.layer_norm, load=lambda x, r: 0.5 * x + r, store=lambda y, r: y * r)


def normal(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(*names: str) -> Arrays:
    """Return arrays of x's shape, and parameters."""
    found = {name: normal(ROWS, COLS, seed=seed) for seed, name in enumerate(("x", *names))}
    return found | {"gamma": normal(COLS, seed=9)}


def of_catalog() -> dict[str, tuple[Callable[..., Any], Arrays]]:
    """Return the calls of forms along the last axis, with their arrays, by name."""
    found = {}
    for name, form in FORMS.items():
        if name.partition("/")[0] in TAKING_AXIS and form.axis == -1 and not form.missing:
            found[name] = form.call, forms.inputs(form, ROWS, COLS, "float32")
    return found


def alone(name: str, a: Arrays, **options: Any) -> Any:
    """Call a function that the catalog does not have."""
    return getattr(cupynorm, name)(a["x"], **options)


CALLS = of_catalog()
HAVING_FORMS = {name.partition("/")[0] for name in CALLS}
for each in sorted(TAKING_AXIS - HAVING_FORMS):
    CALLS[each] = functools.partial(alone, each), numbers()
CALLS |= {
    "a fusion": (
        lambda a, **options: FUSION(a["x"], a["r"], a["r"], gamma=a["gamma"], **options),
        numbers("r"),
    ),
    "a fusion's gradient": (
        lambda a, **options: FUSION.backward(a["dy"], a["x"], a["r"], a["r"], gamma=a["gamma"], **options),
        numbers("r", "dy"),
    ),
    "softmax, nan": (lambda a, **options: cupynorm.softmax(a["x"], nan="omit", **options), numbers()),
    "layer_norm, where": (
        lambda a, **options: cupynorm.layer_norm(a["x"], a["gamma"], where=a["where"], **options),
        numbers("where"),
    ),
    "softmax_backward, dbias": (
        lambda a, **options: cupynorm.softmax_backward(
            a["dy"], a["x"], bias=a["bias"], return_dbias=True, **options
        ),
        numbers("dy", "bias"),
    ),
}
CALLS["layer_norm, where"][1]["where"] = CALLS["layer_norm, where"][1]["where"] > 0


# ---- the same rows along other axes: the axis of the call that is compared, its arrays; another axis, its arrays


def first(given: Arrays) -> tuple[Any, Arrays, Any, Arrays]:
    """Rows along the first axis."""
    return -1, given, 0, moved(given, -1, 0)


def middle(given: Arrays) -> tuple[Any, Arrays, Any, Arrays]:
    """Rows along an axis between two others."""
    if given["x"].ndim == 2:
        given = {
            name: each.reshape(3, ROWS // 3, *each.shape[1:]) if each.shape[0] == ROWS else each
            for name, each in given.items()
        }
    return -1, given, 1, moved(given, -1, 1)


def two(given: Arrays) -> tuple[Any, Arrays, Any, Arrays]:
    """Rows along two axes, on both sides of the others."""
    given = {
        name: each.reshape(*each.shape[:-1], 8, COLS // 8) if each.shape[-1] == COLS else each
        for name, each in given.items()
    }
    return (-2, -1), given, (0, -1), moved(given, -2, 0)


def moved(given: Arrays, source: int, target: int) -> Arrays:
    """Return arrays of which those that lie along x's axes have one of them elsewhere."""
    x, found = given["x"], {}
    for name, each in given.items():
        own = each.shape[-1:] == x.shape[-1:] and each.ndim > -source
        whole = each[(None,) * (x.ndim - each.ndim)] if own else each
        found[name] = (
            np.ascontiguousarray(np.moveaxis(whole, source, target)) if whole.ndim == x.ndim else whole
        )
    return found


def takes_several(name: str) -> bool:
    """Say whether a call may be along several axes."""
    function, _, form = name.partition("/")
    one = (
        function in TAKING_AXIS
        and inspect.signature(getattr(cupynorm, function)).parameters["axis"].annotation
    )
    return one != "int" and form not in {"lengths", "ragged", "causal", "window"}


WAYS = [
    pytest.param(name, way, id=f"{name}, {way.__name__}")
    for name in CALLS
    for way in (first, middle, two)
    if way is not two or takes_several(name)
]
ways = pytest.mark.parametrize(("name", "way"), WAYS)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the stand-in for CuPy, with kernels that are not compiled and do nothing."""
    monkeypatch.setattr(build, "rehearsed", [])
    simulator.install(monkeypatch)
    return simulator.cupy


def several(results: Any) -> tuple[Any, ...]:
    """Return the arrays among the results of a call."""
    if not isinstance(results, tuple):
        return (results,)
    return tuple(array for each in results if each is not None for array in several(each))


def layout(array: Any) -> tuple[Any, ...]:
    """Return what is the same of results that lie alike; an axis of one element has any step."""
    steps = (step for step, extent in zip(array.strides, array.shape, strict=True) if extent > 1)
    return array.shape, array.dtype, (*steps,)


def test_every_function_that_takes_an_axis_is_called() -> None:
    assert {name.partition("/")[0] for name in CALLS} >= TAKING_AXIS


@ways
def test_a_warm_call_enters_no_more_functions_than_along_the_last_axis(
    cupy: Any, name: str, way: Any
) -> None:
    call, host = CALLS[name]
    axis, given, other, elsewhere = way(host)
    given, elsewhere = (
        {key: cupy.asarray(each) for key, each in every.items()} for every in (given, elsewhere)
    )

    along_the_last = frames(lambda: call(given, axis=axis))
    along_others = frames(lambda: call(elsewhere, axis=other))

    assert along_others <= along_the_last


@ways
def test_results_of_a_warm_call_are_new_and_lie_as_the_firsts(cupy: Any, name: str, way: Any) -> None:
    call, host = CALLS[name]
    *_, axis, elsewhere = way(host)
    given = {key: cupy.asarray(each) for key, each in elsewhere.items()}
    every = [several(call(given, axis=axis)) for _ in range(3)]

    for results in every[1:]:
        assert [*map(layout, results)] == [*map(layout, every[0])]
    together = [{each.data.ptr for each in results} for results in every]
    assert len(set().union(*together)) == sum(map(len, together))


@ways
def test_a_warm_call_writes_to_out(cupy: Any, name: str, way: Any) -> None:
    call, host = CALLS[name]
    *_, axis, elsewhere = way(host)
    given = {key: cupy.asarray(each) for key, each in elsewhere.items()}
    y, *others = several(call(given, axis=axis))
    outs = [cupy.empty_like(y) for _ in range(3)]

    for out in outs:
        results = several(call(given, axis=axis, out=out))

        assert results[0] is out
        assert [*map(layout, results)] == [*map(layout, (y, *others))]
