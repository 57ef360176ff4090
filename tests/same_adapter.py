"""What scripts/same asks of a commit: which kernels it has, what the compiler makes of them, and what it plans.

Every commit answers for itself, so this file changes together with the modules that it imports. What it takes and
returns stays: calls, kernels and plans in terms that outlive a rename, which is what lets two commits be compared.
A commit from before this file is asked with the file of the tree that scripts/same runs from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import DTYPES, compute_dtype, cpp, dtype_of
from cupynorm.bert import device_steps, few_tokens, packed_attention
from cupynorm.call import asking
from cupynorm.catalog import axis_forms, forms
from cupynorm.catalog.form import Form
from cupynorm.lower import elementwise
from cupynorm.lower.row import RowOp
from cupynorm.plan.choose import choose
from cupynorm.plan.config import CONVERTED, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED, Limits, active_blocks
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler as kernel_compiler
from cupynorm.runtime import nvrtc
from cupynorm.tools import bench_points, explain
from tests import build_gate
from tests.build_gate import Instance
from tests.kernels import test_elementwise_build

ARCH = "90"
DEVICE = "h200"
DEVICES = tuple(RECORDED)


class Call(NamedTuple):
    """A call of a public function, described without our words for plans.

    form: an entry of forms.FORMS. parameters: the dtype of gamma and beta, None where they are not given. offset: how
    many elements behind an aligned address x and the result begin. gap: elements between two rows of both.
    apart: the result is aligned and contiguous all the same. transposed: rows are neighbours in memory, element by
    element, and the elements of a row lie as far apart as there are rows; offset and gap are 0. neighbours: so many
    rows are neighbours in memory, as along a middle axis; 0: none are.
    """

    form: str
    dtype: str
    parameters: str | None
    rows: int
    cols: int
    offset: int = 0
    gap: int = 0
    apart: bool = False
    transposed: bool = False
    neighbours: int = 0


class Kernel(NamedTuple):
    """One kernel to compile.

    label: the same in every commit that has this kernel. block, shared_bytes: the launch's threads a block and dynamic
    shared memory. plan: in the words of normal(). call: how to run the kernel, for timing it on a device.
    """

    label: str
    text: str
    expression: str
    block: int
    shared_bytes: int
    plan: dict[str, Any]
    call: dict[str, Any]
    arch: str = ARCH


class Compiled(NamedTuple):
    """What the compiler made of a kernel. local_bytes: the stack frame and both ways of what is spilled, a thread."""

    image: bytes
    name: str
    registers: int
    local_bytes: int
    shared_bytes: int  # static


# --- compiling -------------------------------------------------------------------------------------------------------


def sources() -> Path:
    """Return the folder that holds all CUDA sources and nothing else."""
    return kernel_compiler.kernels_dir()


def compiler() -> str:
    """Return what a kernel's machine code depends on beside its text and the sources: the compiler and its options."""
    folder = str(sources())
    options = [each.replace(folder, "KERNELS") for each in kernel_compiler.options()]
    version = nvrtc.available()
    return " ".join(
        map(str, (version, *nvrtc.AS_CUPY, *options, *kernel_compiler.time_saving_options(version or (0, 0))))
    )


def compile_together(text: str, expressions: Sequence[str], arch: str) -> list[Compiled]:
    """Compile kernels into one module. CompileError, a RuntimeError, if one of them does not compile."""
    made = nvrtc.compile_all(text, expressions, kernel_compiler.options(), arch)
    return [
        Compiled(
            each.image,
            each.lowered_name,
            each.registers,
            each.stack_bytes + each.spill_store_bytes + each.spill_load_bytes,
            each.shared_bytes,
        )
        for each in made
    ]


def resident_blocks(block: int, registers: int, shared_bytes: int) -> int:
    """Return how many blocks one multiprocessor holds; shared_bytes are static and dynamic together."""
    return active_blocks(RECORDED[DEVICE], block, registers, shared_bytes)


# --- plans -----------------------------------------------------------------------------------------------------------

PARAMETERS = (
    "as stored",
    "registers",
    "shared memory",
    "registers, all rows",
    "shared memory, converted",
    "both",
)


def normal(plan: Plan) -> dict[str, Any]:
    """Return a plan in terms that every commit uses, whatever its fields are called."""
    return {
        "variant": plan.variant,
        "vector": plan.vector,
        "vectors": plan.vectors,
        "threads_per_row": plan.group,
        "rows_per_group": plan.rows_per_group,
        "full": plan.full,
        "parameters": PARAMETERS[plan.parameter_cache],
        "unaligned": plan.unaligned,
        "alignment_period": plan.alignment_period,
        "blocks_per_row": plan.ctas_per_row,
        "stages": plan.stages,
        "grid": plan.grid,
        "block": plan.block,
        "row_bytes_in_shared": plan.row_shared_bytes,
        "shared_bytes": plan.shared_bytes,
        "min_blocks": plan.min_blocks,
        "resident_blocks": plan.resident_blocks,
        "waves": round(plan.waves, 6),
        **({"rows_side_by_side": plan.across, "waits": plan.waits} if plan.across else {}),
    }


LAUNCH = {"grid", "resident_blocks", "waves"}  # of normal(): what says nothing of the kernel
CLUSTER_GROUP = 16  # multiprocessors that a cluster stays within


def recorded_occupancy(limits: Limits, plan: Plan) -> int:
    """Stand in for the driver: 64 registers a thread, or fewer where the launch bounds leave fewer."""
    registers = min(64, limits.registers_per_sm // (plan.block * max(1, plan.min_blocks)) // 8 * 8)
    resident = active_blocks(limits, plan.block, registers, plan.shared_bytes)
    if plan.cluster == 1:
        return resident
    return limits.sm_count // CLUSTER_GROUP * (CLUSTER_GROUP * resident // plan.cluster)


def plans(call: Call) -> dict[str, dict[str, Any]]:
    """Return what is launched for a call on each recorded device. What is refused says so under "error"."""
    try:
        lowered = _lowered(call)
    except Exception as error:  # noqa: BLE001  whatever a commit answers is compared
        return {device: {"error": f"{type(error).__name__}: {error}"} for device in DEVICES}
    return {device: _planned(lowered, device)[1] for device in DEVICES}


def _planned(lowered: Any, device: str) -> tuple[Plan | None, dict[str, Any]]:
    """Return what is launched, as a Plan where it is a row op's."""
    limits = RECORDED[device]
    if not isinstance(lowered.problem, Problem):
        kernel = explain._kernel_of(lowered, limits)
        return None, {**kernel.problem, **kernel.numbers, "threads": kernel.block}
    try:
        plan = choose(lowered.problem, limits, lambda plan: recorded_occupancy(limits, plan))
    except DoesNotFitError as error:
        return None, {"error": str(error)}
    return plan, normal(plan)


class _Layout:
    """The interface of an array at an invented address. Its shape, strides and alignment are read, its elements not."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": shape,
            "strides": strides,
            "data": (address, False),
        }


def _array(
    number: int,
    shape: tuple[int, ...],
    dtype: Any,
    offset: int = 0,
    gap: int = 0,
    *,
    transposed: bool = False,
    neighbours: bool = False,
) -> np.ndarray:
    """Return an array that must not be read; each number has addresses of its own, 16 TiB apart."""
    size = dtype.itemsize
    if transposed:
        return _array(number, shape[::-1], dtype).T
    if neighbours and len(shape) > 2:  # of numbers for each row, rows lie where they are
        return _array(number, (shape[0], shape[2], shape[1]), dtype).swapaxes(1, 2)
    strides = [size]
    for extent in reversed(shape[1:]):
        strides.append(extent * strides[-1] + (gap * size if len(strides) == 1 else 0))
    address = (number + 1 << 44) + offset * size
    layout = _Layout(address, shape, tuple(reversed(strides[: len(shape)])), size)
    return np.asarray(layout).view(dtype)


def _lowered(call: Call) -> Any:
    """Return what a public function makes of a call before it chooses a plan."""
    form, dtype = forms.form(call.form), dtype_of(call.dtype)
    arrays: dict[str, Any] = {}
    order = {"transposed": call.transposed, "neighbours": bool(call.neighbours)}
    for number, (name, given) in enumerate(form.given(call.rows, call.cols, dtype).items()):
        shape, kind, holds = _of_neighbours(given.shape, call), given.dtype, given.holds
        if holds in {"lengths", "ragged"}:  # checked to be at most cols
            arrays[name] = np.full(shape, call.cols, kind)
        elif holds == "labels" or (holds == "divisors" and len(given.shape) == 1):  # looked at as well
            arrays[name] = np.full(shape, holds == "divisors", kind)
        elif name in {"gamma", "beta"}:
            parameters = call.parameters
            arrays[name] = None if parameters is None else _array(number, shape, dtype_of(parameters))
        elif holds == "result":
            if name == "y":
                placed = {} if call.apart else {"offset": call.offset, "gap": call.gap}
                arrays[name] = _array(number, shape, _quantized(form, kind), **placed, **order)
        elif holds == "divisors":  # gigabytes that nobody looks at
            arrays[name] = _array(number, shape, kind, **order)
        elif name == "x" or len(shape) > 1:
            placed = {"offset": call.offset, "gap": call.gap if name == "x" else 0}
            arrays[name] = _array(number, shape, kind, **placed, **order)
        else:
            arrays[name] = _array(number, shape, kind)
    out = arrays.pop("y")
    return asking.spec_of(lambda: form.call(arrays, out=out))


def _of_neighbours(shape: tuple[int, ...], call: Call) -> tuple[int, ...]:
    """Return the shape of an array of rows, or of a number for each, with an axis for rows that are neighbours."""
    shape = shape[1:] if call.neighbours and shape[:2] == (1, call.rows) else shape
    if not call.neighbours or shape[0] != call.rows:
        return shape
    return (call.rows // call.neighbours, call.neighbours, *shape[1:])


def _quantized(form: Form, kind: Any) -> Any:
    """Return the result's dtype on the host, where float8 has one."""
    return build_gate.quantized_dtype(form.quantized) if form.quantized else kind


# --- kernels ---------------------------------------------------------------------------------------------------------


def parts() -> tuple[str, ...]:
    """Return the names of what kernels() takes, so that several processes can share the work."""
    gate = tuple(f"gate {op.name}" for op in build_gate.OPS)
    fused = tuple(f"gate fused {kind}" for kind in (*build_gate.FUSED, *BY_TURNS))
    return (*gate, *fused, "gate others", "sweep", "axes")


def kernels(part: str) -> Iterator[Kernel]:
    """List the kernels of the build gate for sm_90, of the benchmark's calls, or of calls along other axes."""
    kind, _, name = part.partition(" ")
    if kind == "sweep":
        yield from _of_calls(kind, _sweep())
    elif kind == "axes":
        yield from _of_calls(kind, _along_other_axes())
    elif name == "others":
        yield from _of_elementwise_gate()
        yield from _of_encoder()
    elif name.startswith("fused "):
        yield from _of_fused_gate(name.removeprefix("fused "))
    else:
        yield from _of_gate(next(op for op in build_gate.OPS if op.name == name))


def _of_gate(op: RowOp) -> Iterator[Kernel]:
    same = build_gate.same_types(op)
    halves = [types for types in same if types.x in {"float16", "bfloat16"}]
    mixed = [types for i, types in enumerate(build_gate.mixed_types(op)) if types.x == types.y or i % 2 == 0]
    found: list[Instance] = []
    if op is not build_gate.LOG_SOFTMAX:
        found += build_gate.widest_instances(op, same, ARCH, build_gate.extremes)
        found += build_gate.all_instances(op, same, ARCH, build_gate.tightest)
        found += build_gate.widest_instances(op, mixed, ARCH)
    for converted in (False, True):
        found += build_gate.widest_instances(
            op,
            halves,
            ARCH,
            lambda each, converted=converted: build_gate.tightest(
                plan
                for plan in each
                if plan.variant == "warp" and plan.full and (plan.parameter_cache == CONVERTED) == converted
            ),
        )
    yield from _of_instances(op.name, found)
    if op is build_gate.LAYER_NORM:
        # for each width LayerNorm, LayerNorm of a sum, and that with dropout
        for number, each in enumerate(build_gate.crowded_instances(ARCH)):
            what = ("layer_norm", "add_layer_norm, bias", "add_layer_norm, bias, dropout")[number % 3]
            yield from _of_instances(f"{what}, all registers", [each])


# Kinds of the build gate of which each has one dtype, the next one another.
BY_TURNS = {**build_gate.IN_RUNS, **build_gate.GRADIENTS}


def _of_fused_gate(kind: str) -> Iterator[Kernel]:
    number = list(BY_TURNS).index(kind) if kind in BY_TURNS else None
    for at, dtype in enumerate(("float16", "float32", "float64")):
        if number is None or number % 3 == at:
            chosen = build_gate.fused_instances(kind, dtype, ARCH, build_gate.tightest)
            yield from _of_instances(f"fused {kind}", chosen)


def _of_instances(what: str, instances: Sequence[Instance]) -> Iterator[Kernel]:
    """Label instances by what is called, its types, and those numbers of the plan that the kernel depends on."""
    for (text, expression), each in {(each.text, each.expression): each for each in instances}.items():
        plan = {name: value for name, value in normal(each.plan).items() if name not in LAUNCH}
        types = each.types._asdict()
        label = f"gate: {what}: {_named(types)}: {_named(plan)}"
        # an older gate does not say for which shape it chose the plan
        rows, cols = getattr(each, "shape", (None, None))
        call = {"what": what, **types, "rows": rows, "cols": cols, "forced_plan": each.plan.as_dict()}
        yield Kernel(label, text, expression, each.plan.block, each.plan.shared_bytes, plan, call)


def _named(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _of_elementwise_gate() -> Iterator[Kernel]:
    for case in test_elementwise_build.WHOLE + test_elementwise_build.OTHERS:
        text, expression, vector = test_elementwise_build.kernel(case)
        call = {"what": "elementwise", **case._asdict()}
        label = f"gate: elementwise: {_named(case._asdict())}"
        yield Kernel(label, text, expression, elementwise.THREADS, 0, {"vector": vector}, call)


def _of_encoder() -> Iterator[Kernel]:
    """List the encoder's kernels, as tests/kernels/test_encoder_build.py compiles them."""
    for dtype in sorted({"float16", "bfloat16"} & set(DTYPES)):
        kind = cpp(dtype_of(dtype))
        text = kernel_compiler.text("bert/attention.cuh", f"cupynorm::Attention<{kind}>", 56)
        attention = [packed_attention.by_warps(dtype_of(dtype), size, 1) for size in range(16, 129, 16)]
        attention += [packed_attention.by_warps(dtype_of(dtype), size, 2) for size in (16, 32, 48, 64)]
        attention += [packed_attention.by_group(dtype_of(dtype), size) for size in packed_attention.GROUPED]
        attention.append(packed_attention.by_group(dtype_of(dtype), 64, boxed=True))
        for plan in attention:
            arch = ARCH + "a" * plan.accelerated
            label = f"encoder: {_without_namespaces(plan.expression)}"
            call = {"what": "attention", "dtype": dtype}
            yield Kernel(label, text, plan.expression, plan.block, plan.shared_bytes, {}, call, arch)
        text = kernel_compiler.text("bert/few.cuh", f"cupynorm::Few<{kind}>", 80)
        few = [
            (rows, 24, 1, 3, "true", end) for rows in few_tokens.ROWS for end in few_tokens.FINISHES.values()
        ]
        few += [(rows, 24, 1, 3, "false", few_tokens.ADD_RESIDUAL) for rows in few_tokens.ROWS]
        few += [(rows, 32, 4, 3, "false", few_tokens.ADD_RESIDUAL) for rows in few_tokens.ROWS]
        for numbers in few:
            expression = f"cupynorm::multiply_few<{kind}, {', '.join(map(str, numbers))}>"
            shared = few_tokens.Plan(*numbers[:3]).shared_bytes(768 * numbers[2], norm=numbers[4] == "true")
            label = f"encoder: {_without_namespaces(expression)}"
            yield Kernel(
                label, text, expression, few_tokens.BLOCK, shared, {}, {"what": "few tokens", "dtype": dtype}
            )
    text = "#include <row/variants.cuh>\n#include <bert/encoder.cuh>\n"
    names = ["differ<4>"]
    for dtype in DTYPES:
        kinds = f"{cpp(dtype_of(dtype))}, {cpp(compute_dtype(dtype_of(dtype)))}"
        for vector in (1, 16 // dtype_of(dtype).itemsize):
            names += [
                f"look_up<{vector}, {kinds}>",
                *(f"pool<{vector}, {each}, {kinds}>" for each in ("true", "false")),
            ]
    for name in names:
        label, call = f"encoder: {_without_namespaces(name)}", {"what": "encoder"}
        yield Kernel(label, text, f"cupynorm::{name}", device_steps.BLOCK, 0, {}, call)


def _without_namespaces(expression: str) -> str:
    return expression.replace("cupynorm::", "")


FEW_ROWS, FEW_COLS = 8, 1 << 20  # of forms, which the benchmark has no few long rows of
# Along other axes: rows, columns and neighbours; with 0, all rows are neighbours, as along the first axis.
BESIDE = (
    (49152, 128, 64),
    (49152, 1000, 64),
    (49152, 4096, 0),
    (4096, 16384, 64),
    (33 * 512, 512, 33),
    (30, 300000, 0),
)
UNALIGNED_SUMS = Call("bias_gelu_backward", "float16", "float16", 8192, 1023)


def _sweep() -> Iterator[Call]:
    """Give the benchmark's default points, and few long rows of each form."""
    points = bench_points.points(tuple(forms.FORMS), ())
    yield from (Call(each.op, each.dtype, each.dtype, each.rows, each.cols, each.offset) for each in points)
    for number, form in enumerate(_row_forms()):
        dtype = ("float16", "float32")[number % 2]
        yield Call(form, dtype, dtype, FEW_ROWS, FEW_COLS)
    yield UNALIGNED_SUMS


def _along_other_axes() -> Iterator[Call]:
    """Give each form of a row op along other axes, at every second of the places, in two dtypes by turns."""
    for i, form in enumerate(_row_forms()):
        for j, (rows, cols, neighbours) in enumerate(BESIDE[i % 2 :: 2]):
            dtype = ("float16", "float32")[(i // 2 + j) % 2]
            yield Call(form, dtype, dtype, rows, cols, transposed=not neighbours, neighbours=neighbours)


def _row_forms() -> list[str]:
    """Return the forms of row ops, but those that have an axis of their own."""
    along = {each.name for each in axis_forms.ALONG_AXES}
    asked = [
        Call(name, "float16", "float16", 8, 16) for name, form in forms.FORMS.items() if not form.missing
    ]
    return [
        each.form for each in asked if each.form not in along and isinstance(_lowered(each).problem, Problem)
    ]


def _of_calls(part: str, calls: Iterable[Call]) -> Iterator[Kernel]:
    """List what calls launch on the recorded H200."""
    for call in calls:
        if forms.form(call.form).missing:
            continue
        lowered = _lowered(call)
        plan, numbers = _planned(lowered, DEVICE)
        if plan is not None:
            launch = (lowered.expression(plan), plan.block, plan.shared_bytes)
        else:
            kernel = explain._kernel_of(lowered, RECORDED[DEVICE])
            launch = (kernel.expression, kernel.block, 0)
        place = f" of {call.neighbours or 'all'} neighbours" if part == "axes" else f" + {call.offset}"
        label = f"{part}: {call.form} {call.dtype} {call.rows} x {call.cols}{place}"
        yield Kernel(label, lowered.text, *launch, numbers, call._asdict())
