"""fuse: an op with a user's functions around it, in one kernel."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cupynorm._dtypes import compute_dtype
from cupynorm._options import boolean, eps_of, eps_within
from cupynorm.call.arguments import check, is_number
from cupynorm.invoke import fusion_calls, row_calls, step_calls
from cupynorm.invoke.bound_calls import Arrays
from cupynorm.invoke.fusion_calls import FusedCall, operand, result
from cupynorm.invoke.fusion_gradient_calls import FusionGradientCall
from cupynorm.lower.around import Function
from cupynorm.lower.expressions import DeviceFunction
from cupynorm.lower.row import RowOp
from cupynorm.lower.tracing import TraceError, trace
from cupynorm.ops import fusion_gradients
from cupynorm.ops.fusion_gradients import FusionGradients
from cupynorm.ops.fusion_operands import (
    NUMBERS,
    check_memory,
    check_numbers,
    checked_operand,
    is_kind_of_number,
)
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM, layer_norm, rms_norm
from cupynorm.ops.softmax import LOG_SOFTMAX, SOFTMAX, log_softmax, softmax

if TYPE_CHECKING:
    from cupynorm.call.axes import Transposition
    from cupynorm.invoke.bound_calls import Signature
    from cupynorm.invoke.shortcuts import Given

# an op's own arguments; eps of None is the op's default
OWN = {
    "gamma": None,
    "beta": None,
    "axis": -1,
    "eps": None,
    "out": None,
    "dtype": None,
    "return_stats": False,
    "plan": None,
}

OPS: dict[Any, RowOp] = {
    layer_norm: LAYER_NORM,
    rms_norm: RMS_NORM,
    softmax: SOFTMAX,
    log_softmax: LOG_SOFTMAX,
}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """An op with a load before it and a store behind it; fuse makes it. Equal ones run the same kernels.

    Call it as f(x, *load_operands, *store_operands, **arguments), see fuse; f.backward gives its gradients.
    """

    op: RowOp
    load: Function | None
    store: Function | None
    load_operands: tuple[str, ...]
    store_operands: tuple[str, ...]
    keep_loaded: bool
    eps: float  # the op's default

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The op's own arguments, all by keyword."""
        eps, stats = ("eps",) * self.op.has_eps, ("return_stats",) * bool(self.op.stats)
        return (*self.op.columns, "axis", *eps, "out", "dtype", *stats, "plan")

    @property
    def results(self) -> int:
        """The number of results, without statistics."""
        return (self.store.outputs if self.store is not None else 1) + self.keep_loaded

    def __call__(self, x: Any, /, *operands: Any, **arguments: Any) -> Any:
        """Run the fusion; arguments, results and errors are in fuse."""
        own: dict[str, Any] = OWN.copy()
        arrays: list[Any] = []
        options_key: list[Any] = [id(self)]
        of_op = self.arguments
        for index, each in enumerate(operands):
            if is_kind_of_number(type(each)):  # type: ignore[arg-type]  # every type hashes
                options_key += (index, repr(each), type(each))  # repr tells 0.0 and -0.0 apart
            else:
                arrays.append(each)
        for name, each in arguments.items():
            if name in of_op:
                own[name] = each
            elif is_kind_of_number(type(each)):  # type: ignore[arg-type]
                options_key += (name, repr(each), type(each))
            else:
                options_key.append(name)
                arrays.append(each)
        outs = own["out"]
        if isinstance(outs, tuple):
            options_key.append(len(outs))
            own["out"] = outs[0] if outs else None
            arrays += outs[1:]
        results = row_calls.run(
            self.op,
            x,
            own["gamma"],
            own["beta"],
            own["axis"],
            own["eps"],
            own["out"],
            own["dtype"],
            own["return_stats"],
            own["plan"],
            (*options_key,),
            arrays,
            (),
            self._run,
            (operands, arguments),
        )
        if isinstance(outs, tuple) and len(outs) > 1:
            first, *made = results if isinstance(results, tuple) else (results,)
            results = [first]
            for each in outs[1:]:
                results.append(made.pop(0) if each is None else each)
            results = (*results, *made)
        return results

    def backward(
        self, dy: Any, x: Any, /, *operands: Any, add_to: Mapping[str, Any] | None = None, **arguments: Any
    ) -> FusionGradients:
        """Return the gradients of a call of the fusion; what it computed is computed again, from x.

        load and store are differentiated as they were traced. Comparisons and conditions have derivative 0, as abs has
        at 0, relu at 0 and clip at its bounds; minimum and maximum of equal values give half to each; cast has
        derivative 1; what `where` does not choose gets exactly 0. What load makes -inf is dropped by softmax and
        log_softmax: nothing that arrives there counts, and nothing goes back.

        Parameters
        ----------
        dy : array or tuple of array
            The gradient that arrives at the result, of x's shape. A tuple where there are several results, None where
            nothing arrives: store's results in order, then with keep_loaded what was loaded.
        x, operands
            As in the call; operands by position or by name.
        add_to : dict, optional
            Arrays that gradients are added to and that are returned in their place, by the names of operands, "gamma"
            and "beta"; each has its operand's shape.
        arguments
            gamma, beta, axis and eps, as in the call; out and dtype are those of x's gradient. out may be x or one of
            dy. plan, as in layer_norm, is that of the kernel that writes x's gradient.

        Returns
        -------
        FusionGradients
            A named tuple (x, operands, gamma, beta). operands: the gradients of load's operands, then of store's, each
            in its operand's shape and dtype, summed over what was broadcast; None for numbers, integers and bool.
            gamma and beta: None where none was given.

        Raises
        ------
        TypeError
            As the call does, for a load or store that is a DeviceFunction.
        ValueError
            As the call does, and for an add_to that does not fit.

        Notes
        -----
        On NumPy arrays sums are in float64 and rounded once: first within a row, then row after row in C order, from
        what add_to holds on. So with an add_to of float64, rows that are cut into several calls give the bits of one
        call. On a device they are in the type of arithmetic, in an order that does not depend on how many blocks run.
        There x's gradient is one kernel behind one for the op's statistics. It also sums the gradients of gamma, beta
        and of operands that all rows share, where they and a row have a place in registers; others have one or two
        kernels of their own.

        On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished
        on its stream, nobody else may write to `out` or read from it.

        Examples
        --------
        >>> import numpy as np
        >>> from cupynorm import fuse, softmax
        >>> scaled = fuse(softmax, load=lambda x, t: x * t)
        >>> x, t = np.array([[0.0, 1.0], [0.0, 2.0]]), np.array([[1.0], [0.5]])
        >>> gradients = scaled.backward(np.array([[1.0, 0.0], [1.0, 0.0]]), x, t)
        >>> gradients.x.round(4).tolist(), gradients.operands[0].round(4).tolist()
        ([[0.1966, -0.1966], [0.0983, -0.0983]], [[-0.1966], [-0.3932]])
        """
        if "return_stats" in arguments:
            raise TypeError("backward takes no return_stats: it returns gradients alone")
        own = {name: each for name, each in arguments.items() if name in self.arguments}
        values = self._bind(operands, {name: each for name, each in arguments.items() if name not in own})
        names = (*self.load_operands, *self.store_operands)
        arriving = dy if isinstance(dy, tuple) else (dy,)
        given = {"x": x, "gamma": own.get("gamma"), "beta": own.get("beta"), "out": own.get("out")}
        given |= {f"arriving {at}": each for at, each in enumerate(arriving)}
        if self.keep_loaded and len(arriving) == self.results:
            given["arriving at loaded"] = given.pop(f"arriving {self.results - 1}")
        numbers = [each for each in values if isinstance(each, NUMBERS)]
        given |= {f"operand {at}": each for at, each in enumerate(values) if not isinstance(each, NUMBERS)}
        kinds = tuple(isinstance(each, NUMBERS) for each in values)
        places = {name: f"d operand {at}" for at, name in enumerate(names)}
        if isinstance(add_to, Mapping) and all(names.count(name) == 1 or name in own for name in add_to):
            added = {name: places.get(name, f"d {name}") for name in add_to}
            given |= {place: add_to[name] for name, place in added.items()}
        else:
            added = {}
            if add_to is not None:
                given["add_to"] = (add_to,)  # which no call is kept for

        def checked(arrays: Mapping[str, Any], axis: Any) -> FusionGradientCall:
            views = [arrays.get(f"operand {at}", each) for at, each in enumerate(values)]
            slopes = tuple(each for name, each in arrays.items() if name.startswith("arriving "))
            sums = {name: arrays[place] for name, place in added.items()} if added else add_to
            mine = {**own, "axis": axis, "out": arrays["out"]}
            return fusion_gradients.checked(self, slopes, arrays["x"], views, mine, sums)

        options = step_calls.option_keys(own.get("eps"), own.get("dtype"), kinds, (*added,), *numbers)
        plan, axis = own.get("plan"), own.get("axis", -1)
        return fusion_gradients.run(self, given, options, checked, plan, axis, self._whole)

    @functools.cached_property
    def _whole(self) -> dict[str, str]:
        """Names of a gradient's arrays that have x's shape or broadcast to it, as step_calls.run_checked takes them."""
        arriving = (*(f"arriving {at}" for at in range(self.results)), "arriving at loaded")
        operands = [f"operand {at}" for at in range(len(self.load_operands) + len(self.store_operands))]
        found = dict.fromkeys(("x", "out", *arriving, *operands), "x")
        return found | {f"d {name}": name for name in operands}

    def _run(self, given: Given, signature: Signature | None) -> Any:
        """Run a call with all checks; keep it. It returns the first result, and then the others that it allocates.

        given.unchecked: the operands and the arguments.
        """
        positional, arguments = given.unchecked
        x = given.x
        transposition = row_calls.transposition_for(given)
        if transposition is not None:
            unchecked = self._transposed(transposition, positional, arguments)
            whole = [True] * len(given.operands)
            return row_calls.run_transposed(given, signature, transposition, whole, unchecked=unchecked)
        own = {name: each for name, each in arguments.items() if name in self.arguments}
        operands = self._bind(positional, {name: each for name, each in arguments.items() if name not in own})
        outs = self._split(own.get("out"))
        call = self._check(x, operands, **own)
        if call.on_device and (is_number(own.get("gamma")) or is_number(own.get("beta"))):
            gamma, beta = (call.columns.get(name) for name in ("gamma", "beta"))
            again = given._replace(
                gamma=gamma, beta=beta, unchecked=(positional, {**arguments, **call.columns})
            )
            return row_calls.run(*again[:-1])
        written = (*call.outs, call.loaded) if self.keep_loaded else call.outs
        made = {result(index): each for index, each in enumerate(written) if outs[index] is None}
        made |= call.stats
        if call.x.size and call.on_device:
            each_given = {**dict(enumerate(positional)), **arguments}.items()
            keys = (key for key, each in each_given if key not in own and not isinstance(each, NUMBERS))
            names = (*map(self._role, keys), *map(result, range(1, len(outs))))
            # without a tuple of outs there are fewer
            arrays = dict(zip(names, given.operands, strict=False))
            roles = Arrays(
                given={"x": x, "gamma": given.gamma, "beta": given.beta, result(0): given.out, **arrays},
                written=tuple(map(result, range(len(written)))),
                made=made,
                holds=self,
            )
            bound = fusion_calls.run(call, roles)
            given.keep(signature, bound, made)
        elif call.x.size:
            fusion_calls.run_on_host(call)
        made.pop(result(0), None)
        return (written[0], *made.values()) if made else written[0]

    def _transposed(
        self, transposition: Transposition, positional: Sequence[Any], arguments: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return operands and arguments of a call on transposed arrays."""
        of_op = {*self.arguments} - {"out"}
        found = {
            name: each if name in of_op else transposition.apply(each) for name, each in arguments.items()
        }
        outs = found.get("out")
        if isinstance(outs, tuple):
            found["out"] = tuple(map(transposition.apply, outs))
        return tuple(map(transposition.apply, positional)), {**found, "axis": transposition.axis}

    def _role(self, key: int | str) -> str:
        """Return the role of an operand that was given by this position or name."""
        names = (*self.load_operands, *self.store_operands)
        if key in names:
            key = names.index(key)
        return operand(key) if isinstance(key, int) else key

    def _bind(self, operands: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return one operand for each parameter of load, then of store."""
        names = (*self.load_operands, *self.store_operands)
        if len(operands) > len(names):
            raise TypeError(f"{len(operands)} operands were given: {self._wanted()}")
        values = dict(enumerate(operands))
        for name, value in named.items():
            if names.count(name) > 1:
                raise TypeError(f"{name}= is a parameter of both load and store: give it by position")
            if name not in names:
                raise TypeError(
                    f"unexpected argument {name}=: {self._wanted()}, {self.op.name}'s own arguments are "
                    f"{', '.join(self.arguments)}"
                )
            if names.index(name) in values:
                raise TypeError(f"{name} was given twice, by position and by name")
            values[names.index(name)] = value
        missing = [name for index, name in enumerate(names) if index not in values]
        if missing:
            raise TypeError(f"no operand was given for {', '.join(missing)}: {self._wanted()}")
        return [values[index] for index in range(len(names))]

    def _wanted(self) -> str:
        parts = (
            f"{role} takes {', '.join(names) or 'none'}"
            for role, names, function in (
                ("load", self.load_operands, self.load),
                ("store", self.store_operands, self.store),
            )
            if function is not None
        )
        return f"after x, {' and '.join(parts)}"

    def _check(
        self,
        x: Any,
        given: Sequence[Any],
        *,
        gamma: Any = None,
        beta: Any = None,
        axis: int | tuple[int, ...] | None = -1,
        eps: float | None = None,
        out: Any = None,
        dtype: Any = None,
        return_stats: bool = False,
        plan: Any = None,
    ) -> FusedCall:
        return_stats = boolean("return_stats", return_stats)
        exact = eps_of(self.eps if eps is None else eps) if self.op.has_eps else 0.0
        columns = {"gamma": gamma, "beta": beta}
        outs = self._split(out)
        first = check(x, axis=axis, out=outs[0], dtype=dtype, plan=plan, columns=columns)
        names = (*self.load_operands, *self.store_operands)
        operands = [checked_operand(name, value, first) for name, value in zip(names, given, strict=True)]
        written = [first.out]
        for index, each in enumerate(outs[1:], 1):
            is_loaded = self.keep_loaded and index == len(outs) - 1
            asked = None if is_loaded else dtype
            written.append(check(x, axis=axis, out=each, dtype=asked, plan=plan, columns=columns).out)
        given_outs = [each for each, wanted in zip(written, outs, strict=True) if wanted is not None]
        check_memory(given_outs, operands)
        compute = compute_dtype(first.x.dtype, *(each.dtype for each in written))
        check_numbers(operands, compute)
        wide = next((each for each in written if each.dtype == compute), first.out)
        shaped = first._replace(out=wide)
        stats = {name: shaped.empty_statistic() for name in self.op.stats} if return_stats else {}
        at = len(self.load_operands)
        return FusedCall(
            op=self.op,
            load=self.load,
            store=self.store,
            on_device=first.on_device,
            device=first.device,
            x=first.x,
            axes=first.axes,
            columns=first.columns,
            eps=eps_within(compute, exact),
            load_operands=tuple(operands[:at]),
            store_operands=tuple(operands[at:]),
            outs=tuple(written[:-1] if self.keep_loaded else written),
            loaded=written[-1] if self.keep_loaded else None,
            stats=stats,
            compute=compute,
            plan=plan,
        )

    def _split(self, out: Any) -> tuple[Any, ...]:
        """Return one given output, or None, for each result."""
        if out is None:
            return (None,) * self.results
        outs = out if isinstance(out, tuple) else (out,)
        if len(outs) != self.results:
            order = "store's results in order" + (", then the loaded values" if self.keep_loaded else "")
            raise ValueError(
                f"out has {len(outs)} arrays, the fusion {self.results} results: give a tuple of {self.results} "
                f"({order}), None where one is to be allocated"
            )
        return outs


def fuse(
    op: Callable[..., Any],
    load: Callable[..., Any] | DeviceFunction | None = None,
    store: Callable[..., Any] | DeviceFunction | None = None,
    keep_loaded: bool = False,  # noqa: FBT001, FBT002  a switch, written by name
) -> Fusion:
    """Return store(op(load(x))) as one function: one kernel on CuPy arrays, NumPy on NumPy arrays.

    Parameters
    ----------
    op : callable
        cupynorm.layer_norm, rms_norm, softmax or log_softmax.
    load : callable or DeviceFunction, optional
        A function of an element of x and of operands.
    store : callable or DeviceFunction, optional
        A function of an element of the op's result (gamma and beta included) and of operands; it may return a tuple:
        several results.
    keep_loaded : bool, default False
        Return what load returned as well, rounded once to x's dtype. The op goes on with the unrounded value.

    Returns
    -------
    Fusion
        To be called as f(x, *operands of load, *operands of store, **the op's own arguments): gamma, beta, eps, axis,
        dtype, out, return_stats and plan, as far as the op has them. An operand can be given by its parameter's name
        unless both functions have it. It is an array of x's kind, on x's device, that broadcasts to x's shape (full,
        per column, per row, or one element), of float16, bfloat16, float32, float64, bool or integers; or a Python
        number.

        x may hold bool, (u)int8, (u)int16 or int32, too; a result that would have its dtype is float32 then, of int32
        float64. The results have x's shape: store's, in the dtype of `out`, else `dtype`, else x's, each rounded once;
        with keep_loaded, then load's result; with return_stats, then the op's statistics, of the loaded values.
        One array comes alone, several as a tuple; `out` is given likewise, None where an array is to be allocated. An
        output may be x or an operand itself, and share memory with nothing else that the call is given.

    Raises
    ------
    TraceError
        A TypeError, which names the line of the function, for branches on traced values, unknown functions, captured
        arrays, defaults and the like. The fusion raises TypeError and ValueError as the op does, for operands too.

    Notes
    -----
    load and store run once, here, on stand-ins for numbers; their operations become C++ and NumPy. They may use
    + - * /, ** (to integers from -16 to 16, 0.5 and -0.5), abs, comparisons, & | ~ between conditions, Python's and
    NumPy's numbers, the functions of cupynorm.functions, and those of NumPy with the same names. A condition counts as
    1 or 0. Numbers that they capture are part of the kernel: what changes from call to call should be an operand.
    Operands are converted to the type of arithmetic: float32, or float64 if x or a result is float64 (on NumPy arrays
    always float64).

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import fuse, layer_norm
    >>> skip_norm = fuse(layer_norm, load=lambda x, residual: x + residual, keep_loaded=True)
    >>> y, s = skip_norm(np.array([[1.0, 2.0, 3.0]]), np.array([[0.0, 0.0, 3.0]]), eps=0)
    >>> s.tolist(), y.round(4).tolist()
    ([[1.0, 2.0, 6.0]], [[-0.9258, -0.4629, 1.3887]])
    """
    if not callable(op) or inspect.isclass(op) or op not in OPS:
        allowed = ", ".join(f"cupynorm.{each.name}" for each in OPS.values())
        raise TypeError(f"op is {op!r}: use {allowed}")
    keep_loaded = boolean("keep_loaded", keep_loaded)
    if load is None and store is None:
        raise TypeError(f"there is nothing to fuse with {op.__name__}: give load, store or both")
    if keep_loaded and load is None:
        raise TypeError("keep_loaded=True without load: what is loaded is x itself")
    load_function, load_names = _function(load, "load")
    store_function, store_names = _function(store, "store")
    row_op = OPS[op]
    default = inspect.signature(op).parameters["eps"].default if row_op.has_eps else 0.0
    fusion = Fusion(row_op, load_function, store_function, load_names, store_names, keep_loaded, default)
    for role, names in (("load", load_names), ("store", store_names)):
        for name in names:
            if name in fusion.arguments:
                raise TraceError(
                    f"{name}, a parameter of {role}, is an argument of {row_op.name}: call it otherwise"
                )
    if load_function is not None and load_function.outputs != 1:
        raise TraceError(f"load returns {load_function.outputs} values: what the op takes is one")
    return fusion


def _function(what: Any, role: str) -> tuple[Function | None, tuple[str, ...]]:
    """Return a load or store as a value, and the names of its operands."""
    if what is None:
        return None, ()
    if isinstance(what, DeviceFunction):
        return what, tuple(f"{role}{index}" for index in range(1, what.inputs))
    expression, names = trace(what, role)
    return expression, names[1:]
