"""Calls of row ops: those that a thread has made before by their shortcuts; others are checked, launched and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm._dtypes import is_integer
from cupynorm._options import boolean, eps_of, eps_within
from cupynorm._values import NamedTuple
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.call.axes import Transposition, transposition_of
from cupynorm.invoke import bound_calls, row_ops
from cupynorm.invoke.bound_calls import ALIGNMENT, NO_ARRAY, Arrays, axis_option, elsewhere
from cupynorm.invoke.shortcuts import OUT, Asked, Given
from cupynorm.lower.row import RowOp, row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import Plan
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Named(NamedTuple):
    """An op that is no row op, as run() knows it."""

    name: str


def run(  # noqa: C901, PLR0912, PLR0915  one function, as below
    op: RowOp | Named,
    x: Any,
    gamma: Any,
    beta: Any,
    axis: int | tuple[int, ...] | None,
    eps: float | None,
    out: Any,
    dtype: Any,
    return_stats: bool,  # noqa: FBT001
    plan: str | Plan | None,
    options_key: Any = (),
    operands: Sequence[Any] = (),
    scalars: Sequence[Any] = (),
    run_with_checks: Callable[[Given, Any], Any] | None = None,
    unchecked: Any = None,
) -> Any:
    """Run one call of a public function: arguments, result and errors are those of norm.layer_norm.

    A launch is on the arrays' device and that device's current stream; nothing is synchronised. A call that this thread
    made before is launched again with other addresses and without checks: all that checks and the choice of a kernel
    depend on is in `key`, or is compared with the shortcut. A call without a shortcut is looked up by its signature,
    and checked if it is not found.

    The last five are for calls with more than the arguments of norm.layer_norm: `options_key` says their further
    options, as in Calls.again; `operands` are their further arrays, in an order that follows from `options_key`;
    `scalars` are as in Arrays. run_with_checks(given, signature) runs such a call with all checks; `unchecked` is what
    else it needs, as the user gave it.
    """
    # everything is written out here: to call a function costs as much as to compare two shapes
    calls = bound_calls.thread.calls
    kind = calls.kind
    if kind is None and devices.is_device_array(x):
        kind = calls.begin()
    key: Any = None
    call = None
    sources: list[Any] = []
    if type(x) is kind:
        source = x.data.ptr
        # _c_contiguous, where true, says all that strides say, for a third of the time
        strides = x._c_contiguous or x.strides  # noqa: SLF001
        gamma_id = None if gamma is None else id(gamma)
        beta_id = None if beta is None else id(beta)
        key = (op.name, options_key, x.shape, strides, x.dtype, source & ALIGNMENT, gamma_id, beta_id)
        device = 0
        if calls.several:
            device = x.data.device_id
            key += (device,)
        if out is not None or operands:
            sources = [source, 0, 0, 0]  # the addresses of gamma and beta are in the words
            if type(out) is kind:
                sources[OUT] = pointer = out.data.ptr
                steps = out._c_contiguous or out.strides  # noqa: SLF001
                # out is x: calls in place and elsewhere are both kept
                key += ("out", out is x, out.shape, steps, out.dtype, pointer & ALIGNMENT)
            elif out is not None:
                key = None
            for each in operands if key is not None else ():
                if type(each) is kind:
                    pointer = each.data.ptr
                    sources.append(pointer)
                    steps = each._c_contiguous or each.strides  # noqa: SLF001
                    key += (each is x, each.shape, steps, each.dtype, pointer & ALIGNMENT)
                elif each is None:
                    key += NO_ARRAY
                    sources.append(0)
                else:
                    key = None
                    break
        try:
            call = calls.shortcuts.get(key)
        except TypeError:  # an option that does not hash
            key = None
    if (
        call is not None
        and call.axis is axis
        and call.eps is eps
        and call.dtype is dtype
        and call.return_stats is return_stats
        and call.plan is plan
        # one of one axis has but one shape; of a CuPy array nothing else can change
        and (
            gamma is None
            or (call.gamma() is gamma and (gamma.ndim == call.gamma_ndim or gamma.shape == call.gamma_shape))
        )
        and (
            beta is None
            or (call.beta() is beta and (beta.ndim == call.beta_ndim or beta.shape == call.beta_shape))
        )
        and not (calls.several and elsewhere(device, gamma, beta, out, *operands))
    ):
        fits = True
        if call.windows:  # as wherever an output was given: x is another array
            for written, other, low, high, apart in call.windows:
                if (
                    low < sources[written] - sources[other] < high
                    and sources[written] - sources[other] != apart
                ):
                    fits = False
            for written, low, high in call.columns_near:
                if low < sources[written] < high:
                    fits = False
        if out is None:
            y = calls.array(call.y_shape, call.y_code)
            target = y.data.ptr
            fits = fits and not target & ALIGNMENT
        else:
            y = out
            target = sources[OUT]
        results = y
        if call.argument_words:
            if not sources:
                sources = [source, 0, 0, 0]
            if out is None:
                sources.append(target)
            if call.made:
                results = (y,)
                for extent, code in call.made:
                    each = calls.array(extent, code)
                    pointer = each.data.ptr
                    sources.append(pointer)
                    fits = fits and not pointer & ALIGNMENT
                    results += (each,)
            if call.room is not None:
                room = calls.allocate(call.room)
                pointer = room.ptr
                sources.append(pointer)
                fits = fits and not pointer & ALIGNMENT
        if fits:
            words, launch = call.words, call.launches[calls.stream(device).ptr]
            if not call.argument_words:
                # from here to the launch: no call, loop or branch (devices.launch_of)
                words[call.x_at] = source
                words[call.y_at] = target
                status = launch()
            elif call.two_words:
                one, of_one, two, of_two = call.two_words
                # likewise
                words[call.x_at] = source
                words[call.y_at] = target
                words[one] = sources[of_one]
                words[two] = sources[of_two]
                status = launch()
            else:
                sources += scalars
                filled = words[:]
                for at, index in call.argument_words:
                    filled[at] = sources[index]
                # likewise
                words[:] = filled
                status = launch()
            if not status:
                return results
            error = devices.launch_error(status)
            if not devices.refuses_plan(error):
                raise error
    more = (options_key, operands, scalars, run_with_checks, unchecked, key)
    return _run_by_signature(Given(op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, *more))


def _run_by_signature(given: Given) -> Any:
    """Run one call that no shortcut is for, and make one: run() will look for it under given.key."""
    op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, *more = given
    options_key, operands, scalars, run_with_checks, *_ = more
    calls = bound_calls.thread.calls
    options = (
        op.name,
        axis_option(axis),
        eps,
        type(eps),
        dtype,
        return_stats,
        type(return_stats),
        plan,
        options_key,
    )
    found, made = calls.again((x, gamma, beta, out, *operands), options, scalars)
    if made is None:
        return (run_with_checks or run_alone)(given, found)
    given.keep_shortcut(found)
    results = (*made,) if out is None else (out, *made)
    return results if len(results) > 1 else results[0]


def transposition_for(given: Given) -> Transposition | None:
    """Return how x is to be transposed so that its normalised axes are the last; None if they are."""
    return None if given.axis == -1 else transposition_of(given.axis, given.x)


def run_transposed(
    given: Given, signature: Any, transposition: Transposition, operands: Sequence[bool] = (), **changes: Any
) -> Any:
    """Run a call along other axes than the last, which is not found under `signature`, on transposed arrays.

    operands: which of given.operands are of x's shape; these are transposed, too. changes: to what else is given.
    """
    out = transposition.apply(given.out)
    moved = zip(given.operands, operands or [False] * len(given.operands), strict=True)
    own = given._replace(
        x=transposition.apply(given.x),
        out=out,
        axis=transposition.axis,
        operands=[transposition.apply(each) if whole else each for each, whole in moved],
        key=Asked(given.key, signature, given.axis, transposition),
        **changes,
    )
    try:
        found = _run_by_signature(own)
    except ValueError as error:
        transposition.tell(error)
        raise
    several, ndim = isinstance(found, tuple), given.x.ndim
    first, *others = found if several else (found,)
    results = (
        transposition.undo(first) if given.out is None else given.out,
        *(transposition.undo(each) if each.ndim == ndim else each for each in others),
    )
    return results if several else results[0]


def run_alone(given: Given, signature: Any) -> Any:
    """Run one call of an op with nothing around it with all checks, and keep it. given.operands: None, all of them."""
    transposition = transposition_for(given)
    if transposition is not None:
        return run_transposed(given, signature, transposition)
    op, x, gamma, beta, axis, eps, out, dtype, return_stats, plan, *_ = given
    exact = eps_of(eps) if op.has_eps else 0.0
    return_stats = boolean("return_stats", return_stats)
    columns = {"gamma": gamma, "beta": beta} if op.columns else None
    call = check(x, axis=axis, out=out, dtype=dtype, plan=plan, columns=columns)
    exact = eps_within(call.compute, exact)
    checked_gamma, checked_beta = call.columns.get("gamma"), call.columns.get("beta")
    if call.on_device and (is_number(gamma) or is_number(beta)):
        return run(op, x, checked_gamma, checked_beta, axis, eps, call.out, dtype, return_stats, plan)
    stats = {name: call.empty_statistic() for name in op.stats} if return_stats else {}
    if not call.on_device:
        asking.answer(lambda: _lowered(op, call, {}, exact))
        if x.size:  # without rows there is nothing to do, however long they would be
            op.reference(x, checked_gamma, checked_beta, call.axes, exact, call.out, *stats.values())
    elif x.size:
        made = stats if out is not None else {"out": call.out, **stats}
        arrays = {"x": x, "gamma": gamma, "beta": beta, "out": out}
        arrays |= {f"operand {at}": None for at in range(len(given.operands))}
        bound = row_ops.launch(
            call.device, _lowered(op, call, stats, exact), plan, Arrays(arrays, ("out",), made)
        )
        given.keep(signature, bound, made)
    return (call.out, *stats.values()) if stats else call.out


def _lowered(op: RowOp, call: Call, stats: Mapping[str, Any], eps: float) -> KernelSpec:
    columns = {name: view(each, name) for name, each in call.columns.items()}
    pointers = [view(each, name).pointer for name, each in stats.items()]
    x, y = view(call.x, "x"), view(call.out, "out")
    if not is_integer(x.dtype) and all(each.split(call.axes)[1].is_contiguous() for each in (x, y)):
        return row_spec(op, x, y, call.axes, columns, pointers, eps)
    from cupynorm.lower.around import Around  # noqa: PLC0415  a call of contiguous rows need not wait for it
    from cupynorm.lower.fused import fused_spec  # noqa: PLC0415  a call of contiguous rows need not wait for it

    return fused_spec(op, x, call.axes, columns, pointers, eps, call.compute, Around((y,)))
