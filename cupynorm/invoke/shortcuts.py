"""Shortcuts to the bound calls of row ops, and what a call is given, by which the next one finds its shortcut."""

from __future__ import annotations

import weakref
from array import array
from typing import TYPE_CHECKING, Any

from cupynorm._values import NamedTuple, dataclass
from cupynorm.call.axes import Transposition
from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import BoundCall, add, launches_of
from cupynorm.plan.config import Plan
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(slots=True, eq=False, repr=False)
class Shortcut:
    """A bound call of one kernel with the very options, gamma and beta of its callers: run() compares identities.

    words: hold the addresses of this gamma and beta. x_at, y_at: the words of the addresses of x and of the first
    result. argument_words: pairs of a word (or a slice of words) and the source that goes there; none where x and y are
    all. two_words: the same, one after the other, where there are up to two beside those of x and y; else none.
    windows: as in BoundCall. columns_near: outputs, as sources, with two addresses each; an output strictly between
    these may share memory with gamma or beta. y_shape, y_code: shape and dtype of the first result, where the call
    allocates it. made: those of the others. room: the bytes of its workspace, if it has one.
    """

    axis: int | tuple[int, ...] | None
    eps: float | None
    dtype: Any
    return_stats: bool
    plan: str | Plan | None
    gamma: Callable[[], Any]
    gamma_ndim: int  # 1 or, for several axes, -1
    gamma_shape: tuple[int, ...]
    beta: Callable[[], Any]
    beta_ndim: int
    beta_shape: tuple[int, ...]
    words: array[int]
    parameters: array[int]
    launches: devices.Launches
    x_at: int
    y_at: int
    argument_words: tuple[tuple[Any, int], ...]
    two_words: tuple[int, ...]
    windows: tuple[tuple[int, int, int, int, int], ...]
    columns_near: tuple[tuple[int, int, int], ...]
    y_shape: tuple[int, ...]
    y_code: Any
    made: tuple[tuple[tuple[int, ...], Any], ...]
    room: int | None
    holds: tuple[Any, ...]  # what must stay alive: the kernel, and what the bound call holds


X, GAMMA, BETA, OUT, MADE = range(5)  # the sources of a row op's call; what it makes comes behind all arrays


class Asked(NamedTuple):
    """Key, signature and axis of the caller's own arrays, and how these have been transposed for a call."""

    key: Any
    signature: Any
    axis: Any
    transposition: Transposition


class Given(NamedTuple):
    """The arguments of run(), and the key under which it looks for a shortcut; None where there can be none.

    Where x and out have been transposed, the key is an Asked.
    """

    op: Any  # a RowOp, or Named
    x: Any
    gamma: Any
    beta: Any
    axis: int | tuple[int, ...] | None
    eps: float | None
    out: Any
    dtype: Any
    return_stats: bool
    plan: str | Plan | None
    options_key: Any
    operands: Sequence[Any]
    scalars: Sequence[Any]
    run_with_checks: Callable[[Given, Any], Any] | None
    unchecked: Any
    key: Any

    def keep(self, signature: Any, bound: BoundCall, made: Mapping[str, Any]) -> None:
        """Keep a call that was checked and launched: under its signature, and a shortcut to it under the key.

        One on transposed arrays is also kept as the call on the caller's own: these lie at the same addresses.
        """
        calls, given = bound_calls.thread.calls, self
        if isinstance(self.key, Asked):
            calls.add(signature, bound, made)
            key, signature, axis, transposition = self.key
            whole = len(transposition.order)
            own = [transposition.undo(each) if each.ndim == whole else each for each in made.values()]
            bound, given = bound.making(own), self._replace(key=key, axis=axis)
        if calls.add(signature, bound, made):
            given.keep_shortcut(bound)

    def keep_shortcut(self, bound: BoundCall) -> None:
        """Keep a shortcut to a bound call under the key, unless other calls are unlikely to be found by it.

        That is so where the last one's gamma or beta is gone, as a view that is made for one call, and where one is
        kept under this key already: what is compared by identity differs, as an eps that is computed for each call.
        Then only every so often, for what is made for many calls after all.
        """
        last, known = bound.shortcut, bound_calls.thread.calls.shortcuts
        if self.key is None or len(bound.parts) > 1 or any(made.axes is not None for made in bound.allocated):
            return
        if last is not None and (
            self.key in known
            or (self.gamma is not None and last.gamma() is None)
            or (self.beta is not None and last.beta() is None)
        ):
            bound.gone += 1
            if bound.gone & (bound.gone - 1):  # no power of two
                return
        bound.shortcut = shortcut_to(bound, self)
        add(known, self.key, bound.shortcut)


def shortcut_to(bound: BoundCall, given: Given) -> Shortcut:
    """Return the shortcut to a bound call. Weak references: no array is kept alive, nor taken for a later one."""
    kernel, slots = bound.kernels[0], bound.kernels[0].argument_words
    spare = len(kernel.words)  # a word that the kernel does not read, for run() to write
    words, parameters, launches = launches_of(kernel.words + array("Q", [0]), kernel.bind)
    known: dict[str, Any] = {}
    address = {GAMMA: 0, BETA: 0}
    for source, (name, each) in enumerate((("gamma", given.gamma), ("beta", given.beta)), GAMMA):
        known |= {name: _nothing, f"{name}_ndim": -1, f"{name}_shape": ()}
        if each is not None:
            ndim, address[source] = 1 if each.ndim == 1 else -1, each.data.ptr
            known |= {name: weakref.ref(each), f"{name}_ndim": ndim, f"{name}_shape": each.shape}
    for at, source in slots:
        if source in address:
            words[at] = address[source]
    near = [each for each in bound.windows if each[1] in address]
    own = given.out is None
    moving = tuple(slot for slot in slots if slot[1] not in address)
    y = MADE + len(given.operands) if own else OUT
    x, first = (bound.word_of(X), X), (bound.word_of(y), y)
    return Shortcut(
        axis=given.axis,
        eps=given.eps,
        dtype=given.dtype,
        return_stats=given.return_stats,
        plan=given.plan,
        **known,
        words=words,
        parameters=parameters,
        launches=launches,
        x_at=x[0],
        y_at=first[0],
        argument_words=moving if {source for _, source in moving} - {X, y} else (),
        two_words=() if given.scalars else _two_words(moving, (x, first), spare),
        windows=tuple(each for each in bound.windows if each not in near),
        columns_near=tuple(
            (each[0], address[each[1]] + each[2], address[each[1]] + each[3]) for each in near
        ),
        y_shape=bound.allocated[0].shape if own else (),
        y_code=bound.allocated[0].code if own else None,
        made=tuple((made.shape, made.code) for made in bound.allocated[own:]),
        room=bound.room if bound.parts else None,
        holds=(kernel.kernel, bound.holds),
    )


def _two_words(
    slots: Sequence[tuple[Any, int]], others: Sequence[tuple[Any, int]], spare: int
) -> tuple[int, ...]:
    """Return two words and their sources, beside the others that run() writes; nothing for more, and for slices.

    It writes them one by one, for which it needs neither a loop nor a copy of all words. spare: is written where there
    are fewer.
    """
    rest = [slot for slot in slots if slot not in others]
    if len(rest) > 2 or any(isinstance(at, slice) for at, _ in slots):  # noqa: PLR2004
        return ()
    (one, of_one), (two, of_two) = (*rest, (spare, X), (spare, X))[:2]
    return one, of_one, two, of_two


def _nothing() -> None:
    """Stand for a reference to no array."""
