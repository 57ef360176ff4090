"""Row ops from arrays to a launch: shortcuts to bound calls, and plans with their kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

from cupynorm._dtypes import is_integer
from cupynorm._options import boolean, eps_of, eps_within
from cupynorm._values import NamedTuple, dataclass
from cupynorm.call import asking
from cupynorm.call.arguments import Call, check, is_number, view
from cupynorm.call.axes import Transposition, transposition_of
from cupynorm.invoke import bound_calls
from cupynorm.invoke.bound_calls import (
    ALIGNMENT,
    NO_ARRAY,
    Arrays,
    BoundCall,
    Calls,
    Launch,
    add,
    axis_option,
    bound_call,
    elsewhere,
    launches_of,
)
from cupynorm.lower.row import RowOp, row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.plan.config import CONVERTED, DoesNotFitError, Plan, check_plan
from cupynorm.plan.limits import PLAIN_SHARED_BYTES, STATIC_SHARED_BYTES, Limits
from cupynorm.plan.problem import messages_bytes
from cupynorm.runtime import cache_folder, chosen_plans, compiler, devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cupynorm.plan.base import LocalBytes, Occupancy
    from cupynorm.runtime.devices import Binding
    from cupynorm.runtime.tuned_plans import Place


class Prepared(NamedTuple):
    """A loaded kernel, and the plan that it was compiled and is launched by."""

    kernel: compiler.Kernel
    plan: Plan


_lock = threading.RLock()  # a signal handler may run where it is held
_launches: dict[tuple[Any, ...], Prepared] = {}


@dataclass(slots=True, eq=False, repr=False)
class Shortcut:
    """A bound call of one kernel with the very options, gamma and beta of its callers: run() compares identities.

    words: hold the addresses of this gamma and beta. x_at, y_at: the words of the addresses of x and of the first
    result. argument_words: pairs of a word (or a slice of words) and the source that goes there; none where x and y are
    all. two_words: the same, one after the other, where there are up to two beside those of x and y; else none.
    windows: as in BoundCall. columns_near: outputs, as sources, with two addresses each; an output strictly between
    these may share memory with gamma or beta. y_shape, y_code: shape and dtype of the first result, where the call
    allocates it. made: those of the others. room: the shape of its workspace, in bytes, if it has one.
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
    room: tuple[int, ...]
    holds: tuple[Any, ...]  # what must stay alive: the kernel, and what the bound call holds


X, GAMMA, BETA, OUT, MADE = range(5)  # the sources of a row op's call; what it makes comes behind all arrays


class Named(NamedTuple):
    """An op that is no row op, as run() knows it."""

    name: str


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
        if self.key is None or len(bound.parts) > 1 or any(axes is not None for *_, axes in bound.allocated):
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
        y_shape=bound.allocated[0][0] if own else (),
        y_code=bound.allocated[0][1] if own else None,
        made=tuple((shape, code) for shape, code, _ in bound.allocated[own:]),
        room=bound.room if bound.parts else (),
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
            y = kind(call.y_shape, call.y_code)
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
                    each = kind(extent, code)
                    pointer = each.data.ptr
                    sources.append(pointer)
                    fits = fits and not pointer & ALIGNMENT
                    results += (each,)
            if call.room:
                room = kind(call.room, "B")
                pointer = room.data.ptr
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
        bound = launch(call.device, _lowered(op, call, stats, exact), plan, Arrays(arrays, ("out",), made))
        given.keep(signature, bound, made)
    return (call.out, *stats.values()) if stats else call.out


def _lowered(op: RowOp, call: Call, stats: Mapping[str, Any], eps: float) -> KernelSpec:
    columns = {name: view(each, name) for name, each in call.columns.items()}
    pointers = [view(each, name).pointer for name, each in stats.items()]
    x, y = view(call.x, "x"), view(call.out, "out")
    if not is_integer(x.dtype) and all(each.split(call.axes)[1].is_contiguous() for each in (x, y)):
        return row_spec(op, x, y, call.axes, columns, pointers, eps)
    from cupynorm.lower.fused import Around, fused_spec  # noqa: PLC0415  a call of contiguous rows need not wait for it

    return fused_spec(op, x, call.axes, columns, pointers, eps, call.compute, Around((y,)))


def launch(device: int, spec: KernelSpec, wanted: str | Plan | None, arrays: Arrays) -> BoundCall:
    """Launch a checked call of a row op on rows that there are; return it as it is bound."""
    calls = bound_calls.thread.calls
    with devices.cupy().cuda.Device(device):
        calls.prepare(device)

        def launched(found: Prepared) -> BoundCall:
            bound = bound_call(device, arrays, [launch_of(found, spec)])
            bound.once()
            calls.plans.append(found.plan)
            return bound

        return launch_what_fits(device, spec, wanted, launched)


def launch_of(found: Prepared, spec: KernelSpec) -> Launch:
    """Return the launch of what was prepared for a problem, as bound_call takes it."""
    binding = launcher(found.kernel.pointer, found.plan)
    return Launch(found.kernel, binding, spec.params, messages_bytes(spec.problem, found.plan))


def launcher(function: int, plan: Plan) -> Binding:
    """Return a kernel's binding, as devices.launch_of does."""
    split = plan.variant == "split"
    grid = (plan.grid // plan.ctas_per_row, plan.ctas_per_row, 1) if split else (plan.grid, 1, 1)
    return devices.launch_of(
        function, grid, (plan.block, 1, 1), plan.shared_bytes, cooperative=plan.cooperative
    )


Launched = TypeVar("Launched")


class NeedsClustersError(RuntimeError):
    """Our part of the device runs no clusters, and no other plan fits. why: what it refuses."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: the plan that was asked for needs that")
        self.why = why


def launch_what_fits(
    device: int, spec: KernelSpec, wanted: str | Plan | None, launch: Callable[[Prepared], Launched]
) -> Launched:
    """Return launch(found) of what is prepared for a problem; of another plan if our part of the device refuses it.

    `device` must be current.
    """
    found = prepared(device, spec, wanted)
    while True:
        try:
            return launch(found)
        except Exception as error:  # noqa: BLE001  what is no refusal is raised again
            found = _replan_after_refusal(device, spec, wanted, found.plan, error)


def _replan_after_refusal(
    device: int, spec: KernelSpec, wanted: str | Plan | None, refused: Plan, error: Exception
) -> Prepared:
    """Return a launch without cooperative blocks, or without clusters, if our part of the device refuses them.

    It is the problem's from then on. Raises RuntimeError where what was asked for needs that, and any other error
    again.
    """
    at_once = refused.cooperative and devices.refuses_cooperation(error)
    if not at_once and not (refused.cluster > 1 and devices.refuses_clusters(error)):
        raise error
    blocks = refused.grid if at_once else refused.cluster
    why = f"the device does not run {blocks} blocks at once ({error}), as in a green context or with MPS"
    try:
        found = _prepare(device, spec, wanted, cooperative=False, clusters=at_once)
    except DoesNotFitError:
        if not at_once:
            raise NeedsClustersError(why) from error
        raise RuntimeError(f"{why}: the plan that was asked for needs that") from error
    with _lock:
        add(_launches, _key_of(device, spec, wanted), found)
    warn_of_refusal(
        f"{why}: variant {found.plan.variant} is used instead of {refused.variant}, without blocks that wait "
        "for one another"
    )
    return found


def warn_of_refusal(what: str) -> None:
    """Warn once that our part of the device refuses launches."""
    if not _refusal_told.is_set():
        _refusal_told.set()
        warnings.warn(
            f"{what}. Such calls may be slower, and round otherwise; this is said once", stacklevel=6
        )


_refusal_told = threading.Event()


@contextlib.contextmanager
def observed() -> Iterator[Sequence[Plan]]:
    """Yield a list that gets the plan of each row op that this thread launches meanwhile; warm calls add none."""
    thread = bound_calls.thread
    before, thread.calls = thread.calls, Calls()
    try:
        yield thread.calls.plans
    finally:
        thread.calls = before


def calls_of_thread() -> Calls:
    """Return the bound calls of this thread."""
    return bound_calls.thread.calls


def kernel_of(device: int, spec: KernelSpec, plan: Plan) -> compiler.Kernel:
    """Compile and load a plan's kernel, ready to be launched with its shared memory and in its clusters."""
    shared = plan.shared_bytes or plan.row_shared_bytes
    little = plan.parameter_cache == CONVERTED and shared <= PLAIN_SHARED_BYTES - STATIC_SHARED_BYTES
    # a larger part of L1 set aside for shared memory slows down kernels that want little of it (docs/notes/047)
    shared_limit = devices.limits_of(device).shared_bytes_per_block if shared and not little else 0
    return compiler.kernel(device, spec.text, spec.expression(plan), shared_limit, plan.cluster)


def _key_of(device: int, spec: KernelSpec, wanted: str | Plan | None) -> tuple[Any, ...]:
    return (device, spec.problem, spec.params.cpp, wanted, compiler.owner())


def prepared(device: int, spec: KernelSpec, wanted: str | Plan | None) -> Prepared:
    """Return what _prepare() gives, made once for each problem, spelling and wish, and for each owner of kernels."""
    check_plan(wanted)  # a key hashes
    key = _key_of(device, spec, wanted)
    found = _launches.get(key)
    if found is None:
        found = _prepare(device, spec, wanted)
        with _lock:
            add(_launches, key, found)
    return found


def _prepare(
    device: int,
    spec: KernelSpec,
    wanted: str | Plan | None,
    *,
    tuned: bool = True,
    cooperative: bool = True,
    clusters: bool = True,
) -> Prepared:
    """Compile and load the kernel of the plan for a problem.

    A plan that follows from the rules is kept on disk. One that was asked for, or tuned, or that our part of the device
    has forced, is not. cooperative, clusters: whether its blocks may have to run all at once, and may be in clusters.
    """
    limits = devices.limits_of(device)
    answers: list[tuple[Plan, int]] = []

    def load(plan: Plan) -> compiler.Kernel:
        return kernel_of(device, spec, plan)

    def occupancy(plan: Plan) -> int:
        if plan.cluster > 1 and not clusters:
            return 0
        found = _resident_blocks(load(plan), plan)
        answers.append((plan, found))
        return found

    def local_bytes(plan: Plan) -> int:
        return load(plan).local_bytes

    if not cooperative:
        from cupynorm.plan.choose import choose  # noqa: PLC0415  loaded by the first call that needs it

        plan = choose(spec.problem, limits, occupancy, wanted, cooperative=False, local_bytes=local_bytes)
        return Prepared(load(plan), plan)
    key = None
    if wanted is None and not (tuned and _tuned(spec, limits)):
        key = chosen_plans.key(spec.text, spec.name, spec.types, spec.problem, limits)
    found = None if key is None else _remembered(key, load)
    if found is not None:
        return found
    plan, _ = _choose(spec, limits, occupancy, local_bytes, wanted, tuned=tuned)
    if key is not None and _depends_on_key_alone(plan, answers):
        chosen_plans.store(key, plan)
    return Prepared(load(plan), plan)


def _resident_blocks(kernel: compiler.Kernel, plan: Plan) -> int:
    """Ask the driver how many blocks of a plan a multiprocessor holds at once, or of clusters, how many our device."""
    if plan.cluster > 1:
        return devices.active_clusters(kernel.pointer, plan.cluster, plan.block, plan.shared_bytes)
    driver = devices.driver()
    return int(
        driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.pointer, plan.block, plan.shared_bytes)
    )


def _remembered(key: str, load: Callable[[Plan], compiler.Kernel]) -> Prepared | None:
    """Return what an earlier process chose, if the driver still holds as many blocks of it at once; else None.

    So clusters are counted anew: a green context, which the limits do not show, may hold fewer of them, or more.
    """
    plan = chosen_plans.load(key)
    if plan is None:
        return None
    kernel = load(plan)
    return Prepared(kernel, plan) if _resident_blocks(kernel, plan) == plan.resident_blocks else None


def _depends_on_key_alone(plan: Plan, answers: Sequence[tuple[Plan, int]]) -> bool:
    """Say whether a plan is what any process would choose that holds as many blocks of it at once.

    answers: how many blocks of each plan that was tried there are at once. It is not so where clusters of another one
    were counted, since they may be more elsewhere.
    """

    def launch(each: Plan) -> tuple[Any, ...]:
        return each.kernel, each.template, each.block, each.shared_bytes, each.cluster

    own = [found for tried, found in answers if launch(tried) == launch(plan)]
    others = [tried for tried, _ in answers if launch(tried) != launch(plan)]
    return own[-1:] == [plan.resident_blocks] and all(tried.cluster == 1 for tried in others)


def _choose(
    spec: KernelSpec,
    limits: Limits,
    occupancy: Occupancy,
    local_bytes: LocalBytes,
    wanted: str | Plan | None,
    *,
    tuned: bool = True,
) -> tuple[Plan, str]:
    """Return the plan and its source: "wanted", "tuned" (`cupynorm tune` found it) or "table" (rules of plan/data).

    tuned: whether what was found may be taken; the limits are then those of a device that is here.
    """
    from cupynorm.plan.choose import choose  # noqa: PLC0415  as in _prepare()

    if wanted is not None:
        return choose(spec.problem, limits, occupancy, wanted, local_bytes=local_bytes), "wanted"
    known = _tuned(spec, limits) if tuned else None
    if known is not None:
        found, place = known
        try:
            plan = choose(spec.problem, limits, occupancy, found)
            return dataclasses.replace(plan, why="`cupynorm tune` found it on this device"), "tuned"
        except Exception as error:  # noqa: BLE001  whatever a file holds, it makes no call fail
            warnings.warn(f"{place.file}: a tuned plan is not used: {error}", stacklevel=2)
    return choose(spec.problem, limits, occupancy, local_bytes=local_bytes), "table"


def _tuned(spec: KernelSpec, limits: Limits) -> tuple[Plan, Place] | None:
    """Return the plan that `cupynorm tune` found for a problem, and where; None if there is none."""
    if not cache_folder.holds("tuned"):
        return None
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415  only who has tuned waits for it

    if not tuned_plans.switched_on():
        return None
    place = tuned_plans.place(limits, devices.driver_version())
    found = tuned_plans.find(place, limits, spec.types, spec.problem)
    return None if found is None else (found, place)


def forget() -> None:
    """Drop every bound call, plan and table of tuned plans, of all threads.

    Kernels stay loaded, since a CUDA graph may hold them: a call that is made again finds them.
    """
    with _lock:
        bound_calls.forget()
        _launches.clear()
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415  as in _tuned()

    tuned_plans.forget()
