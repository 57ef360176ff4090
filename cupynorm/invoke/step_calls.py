"""Calls of several kernels: those that a thread has made before, and others from checks to their launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm.call import asking
from cupynorm.call.axes import is_array, transposition_of
from cupynorm.host.philox import SEEDS
from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import Arrays, axis_option
from cupynorm.invoke.steps import Steps

if TYPE_CHECKING:
    from cupynorm.call.masks import Mask
    from cupynorm.plan.config import Plan


def option_keys(*values: Any) -> tuple[Any, ...]:
    """Return options as a signature has them: with their types, because 1, 1.0 and True are equal, as 0.0 and -0.0."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is tuple:
            found += (value, *map(type, value))
        else:
            found += (repr(value) if kind is float and not value else value, kind)
    return (*found,)


def scalars_of(p: Any, seed: Any, offset: Any) -> tuple[int, ...]:
    """Return seed and offset of a dropout, which differ from call to call; nothing where there is none, or a fault."""
    whole = type(seed) is type(offset) is int and 0 <= seed < SEEDS and 0 <= offset < SEEDS
    return (seed, offset) if whole and type(p) in {float, int} and p != 0 else ()


class Parts(NamedTuple):
    """The arrays of a checked call, by names; None for what there is not. results: what the function returns."""

    read: Mapping[str, Any]
    written: Mapping[str, Any]
    results: Sequence[Any]


def of_mask(mask: Mask | None) -> dict[str, Any]:
    """Return the arrays of a mask, as Parts has them."""
    return {} if mask is None else {name: getattr(mask, name) for name in ("where", "lengths", "bias")}


class Implementation(NamedTuple):
    """What a function does with a checked call: its arrays, its kernels, and how it runs on NumPy arrays."""

    parts: Callable[[Any], Parts]
    steps: Callable[[Any], Steps]
    on_host: Callable[[Any], None]


def again(
    function: Any, arrays: tuple[Any, ...], axis: Any, options: tuple[Any, ...], scalars: Sequence[int] = ()
) -> tuple[Any, Any]:
    """Launch a call that this thread has made before. Return its results, or the only one; and its signature.

    The results are None if nothing was launched: run_checked() then runs the call.

    function: what a signature knows it by. arrays: those that the caller passed, and where results shall go, in the
    order of run_checked's `given`. options: all else that the call depends on. scalars: seed and offset of a dropout.
    """
    key = (function, axis if type(axis) is int else axis_option(axis), *options)
    found, made = bound_calls.thread.calls.again(arrays, key, scalars)
    return (None, found) if made is None else (found.results((*arrays, *made, None)), None)


def run_checked(
    signature: Any,
    given: Mapping[str, Any],
    check: Callable[[Mapping[str, Any], Any], Any],
    implementation: Implementation,
    axis: Any,
    whole: Mapping[str, str],
    called: str = "x",
    scalars: Sequence[int] = (),
    plan: str | Plan | None = None,
) -> Any:
    """Run a call with all checks, and keep it under its signature; return its results, or the only one.

    given: the arrays that the caller passed, by the names of its parts; a result's name for where it shall go.
    axis: what the caller named, of the array that `whole` names first, and that messages call `called`. Along other
    axes than the last, check(given, axis) gets transposed views. What is launched is kept as a call on the caller's own
    arrays, which lie at the same addresses.
    whole: names of what is transposed: arrays and results that have x's shape or broadcast to it. Each with the name
    of the array that has as many axes.
    scalars: seed and offset of a dropout, if there is one. plan: of the row kernel, which `check` looks at, too.
    """
    first = given[next(iter(whole))]
    turned = None if type(axis) is int and axis == -1 else transposition_of(axis, first, called)
    if turned is None:
        return _run(signature, given, check(given, axis), implementation, scalars, plan)
    try:
        views = {name: turned.apply(each) if name in whole else each for name, each in given.items()}
        call = check(views, turned.axis)

        def own(name: str, array: Any) -> Any:
            """Return a result as the caller shall have it."""
            if name not in whole or array.ndim != len(turned.order):
                return array
            return turned.undo(array, given[whole[name]])

        return _run(signature, given, call, implementation, scalars, plan, own)
    except ValueError as error:
        turned.tell(error)
        raise


def _run(
    signature: Any,
    given: Mapping[str, Any],
    call: Any,
    implementation: Implementation,
    scalars: Sequence[int],
    plan: str | Plan | None,
    own: Callable[[str, Any], Any] = lambda _, array: array,
) -> Any:
    """Run a checked call, and keep it under `signature`. own: gives a result that it allocates to the caller."""
    parts = implementation.parts(call)
    # a number is an array by now, and so is a list
    passed = {
        name: each if each is None or is_array(each) else parts.read.get(name) for name, each in given.items()
    }
    made = {
        name: own(name, each)
        for name, each in parts.written.items()
        if each is not None and passed.get(name) is None
    }
    names = {id(each): name for name, each in parts.written.items()}
    results = [None if each is None else names[id(each)] for each in parts.results]
    if call.on_device:
        places = [*(None if each is None else name for name, each in passed.items()), *made]
        picked = itemgetter(*(-1 if each is None else places.index(each) for each in results))
        of_dropout = ("seed", "offset") if scalars else ()
        arrays = Arrays(passed, (*parts.written,), made, scalars=of_dropout, results=picked)
        implementation.steps(call).launch(signature, arrays, plan)
    else:
        asking.answer(lambda: implementation.steps(call).told)
        implementation.on_host(call)
    own_arrays = {**passed, **made}
    return _several([None if each is None else own_arrays[each] for each in results])


def _several(results: Sequence[Any]) -> Any:
    return tuple(results) if len(results) > 1 else results[0]
