"""What the build gate compiles, and how it reads what the assembler made of it. Needs NVRTC, no device."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import math
import os
import pickle
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupynorm import functions
from cupynorm._dtypes import DTYPES, compute_dtype, dtype_of, quantized_dtype
from cupynorm.call.masks import Mask
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.lower import around as lower_around
from cupynorm.lower import backward
from cupynorm.lower.around import Around, Counted, Label, Labelled
from cupynorm.lower.fused import fused_spec
from cupynorm.lower.row import RowOp, row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.lower.tracing import trace, traced
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.ops.softmax import LOG_SOFTMAX, SOFTMAX
from cupynorm.plan.base import LocalBytes, none_known
from cupynorm.plan.choose import choose
from cupynorm.plan.config import ACCESS_BYTES, CONVERTED, VARIANTS, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED, Limits
from cupynorm.plan.problem import Problem
from cupynorm.runtime import compiler, nvrtc
from cupynorm.runtime.devices import EARLY_SINCE
from cupynorm.runtime.nvrtc import Cubin
from tests import SLOW
from tests.module_text import joined
from tests.sampling import covering

OPS = (LAYER_NORM, RMS_NORM, SOFTMAX, LOG_SOFTMAX)

# A module costs 50 ms and nvdisasm 300 ms before the first kernel: so many kernels share one.
KERNELS_PER_MODULE = 48


# --- which kernels there are ---------------------------------------------------------------------------------------


class Types(NamedTuple):
    """Names of the element types of one call; None where a parameter is not given."""

    x: str
    y: str
    gamma: str | None = None
    beta: str | None = None


class Instance(NamedTuple):
    """One kernel: a lowered call, a plan of it and the question that led to the plan, and the width of its accesses."""

    spec: KernelSpec
    types: Types
    plan: Plan
    problem: Problem  # the spec's, with the rows and columns for which the plan was chosen
    variant: str | None  # that was asked for
    load_bytes: int = ACCESS_BYTES  # of one vector, at most 16
    store_bytes: int = ACCESS_BYTES

    @property
    def text(self) -> str:
        """The source that the package writes."""
        return self.spec.text

    @property
    def expression(self) -> str:
        """The kernel's name expression."""
        return self.spec.expression(self.plan)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns for which the plan was chosen."""
        return self.problem.rows, self.problem.cols


def same_types(op: RowOp) -> list[Types]:
    """One call for each dtype, with every parameter that the op takes."""
    return [Types(name, name, *(name for _ in op.columns)) for name in DTYPES]


def mixed_types(op: RowOp) -> list[Types]:
    """Calls whose types differ, or that leave parameters out: one of each kind that the functors tell apart."""
    pairs = [("float16", "float32"), ("float32", "float16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
    pairs += [
        ("float16", "bfloat16"),
        ("float64", "float16"),
        ("float16", "float64"),
        ("float64", "bfloat16"),
    ]
    calls = [Types(x, y, *("float32" for _ in op.columns)) for x, y in pairs]
    if "gamma" in op.columns:
        calls += [Types("bfloat16", "bfloat16", "float32"), Types("float32", "float32", "float16")]
        calls += [
            Types("float16", "float16"),
            Types("float32", "float32"),
            Types("float64", "float64", "float16"),
        ]
    if "beta" in op.columns:
        calls += [
            Types("bfloat16", "bfloat16", "float32", "float32"),
            Types("float16", "float16", None, "float16"),
        ]
        calls += [Types("float16", "float16", "float32", "float16"), Types("float32", "float32", "float32")]
    return [call for call in calls if {name for name in call if name} <= set(DTYPES)]


# whose limits stand for an architecture: min_blocks follows from the threads that a multiprocessor holds
DEVICES = {"75": "t4", "86": "rtx4090", "89": "rtx4090", "120": "rtx4090", "90": "h200", "100": "h200"}


@functools.cache
def limits_of(arch: str) -> Limits:
    """Return the limits that stand for an architecture."""
    return dataclasses.replace(RECORDED[DEVICES.get(arch, "a100")], compute_capability=arch)


def first_choice(
    problem: Problem, arch: str, variant: str | None = None, local_bytes: LocalBytes = none_known
) -> Plan:
    """Return the plan that the package chooses; without local_bytes, before the compiler is asked."""
    return choose(problem, limits_of(arch), lambda plan: plan.min_blocks, variant, local_bytes=local_bytes)


@functools.cache
def edges() -> tuple[int, ...]:
    """Vectors of a row at which template arguments change: multiples of the powers of two, and one less."""
    found = {
        group * vectors - less
        for group in (1 << p for p in range(11))
        for vectors in range(1, 33)
        for less in (0, 1)
    }
    return tuple(sorted(found - {0}))


plans_folder: Path | None = None  # where the processes of a test run share plans


@functools.cache
def shapes(problem: Problem, arch: str) -> dict[Plan, tuple[int, int]]:
    """Every plan that `choose` can give for such a problem, one for each kernel, with its rows and columns."""
    if plans_folder is None:
        return _shapes(problem, arch)
    path = plans_folder / hashlib.sha256(f"{problem!r} {arch}".encode()).hexdigest()
    # processes ask in the same order: whoever comes second waits for what the first one finds
    with (plans_folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(_shapes(problem, arch)))
        found: dict[Plan, tuple[int, int]] = pickle.loads(path.read_bytes())  # noqa: S301  a process of this run's
    return found


def _with_plans_for_few_rows(problem: Problem) -> Sequence[str]:
    """Return variants that may have kernels for a single row which they have not for many: if fused only clusters.

    To ask the others as well takes a third longer, and found nothing of 88 fused calls (docs/notes/006).
    """
    return ("cluster",) if problem.fused and not problem.across and not SLOW else VARIANTS


def _shapes(problem: Problem, arch: str) -> dict[Plan, tuple[int, int]]:
    found: dict[tuple[object, ...], tuple[Plan, tuple[int, int]]] = {}
    cases = itertools.chain(
        itertools.product(VARIANTS, (1 << 24,), edges()),
        itertools.product(_with_plans_for_few_rows(problem), (1,), edges()),
        itertools.product(("split",), (1, 2, 4, 8), (1 << p for p in range(16, 23))),  # the whole grid's
        itertools.product(
            ("cluster",), (16, 64), (1 << p for p in range(10, 18))
        ),  # fewer rows than multiprocessors
    )
    for variant, rows, vectors in cases:
        cols = vectors * problem.vector
        with contextlib.suppress(DoesNotFitError):
            plan = first_choice(dataclasses.replace(problem, rows=rows, cols=cols), arch, variant)
            found.setdefault((variant, *plan.template), (plan, (rows, cols)))
    return dict(found.values())


def plans(problem: Problem, arch: str) -> tuple[Plan, ...]:
    """Every plan that `choose` can give for such a problem of any rows and columns, one for each kernel."""
    return tuple(shapes(problem, arch))


def problem_of(spec: KernelSpec, plan: Plan, arch: str) -> Problem:
    """Return a problem whose plan is one of plans(spec.problem, arch)."""
    rows, cols = shapes(spec.problem, arch)[plan]
    found: Problem = dataclasses.replace(spec.problem, rows=rows, cols=cols)
    return found


REGISTERS = 65536  # of a multiprocessor, on every architecture


def tightness(plan: Plan) -> tuple[float, int]:
    """How much a thread holds for each register that its launch bounds leave it."""
    threads = plan.block * plan.min_blocks
    held = plan.vectors * plan.vector * plan.rows_per_group * (2 if plan.parameter_cache else 1)
    return held * threads / REGISTERS, held


def registers(plan: Plan) -> int:
    """Say how many registers its launch bounds leave a thread: a multiple of 8, at most 255."""
    return min(255, REGISTERS // (plan.block * plan.min_blocks) // 8 * 8)


def extremes(candidates: Iterable[Plan]) -> list[Plan]:
    """Of plans that differ only in how much a thread holds, the one that holds most, for each bound on registers."""

    def kind(plan: Plan) -> Plan:
        held = {"vectors": 0, "group": 0, "ctas_per_row": 0}
        launch = {"grid": 0, "shared_bytes": 0, "resident_blocks": 0, "waves": 0.0}
        if plan.group:  # blocks of any size do the same with as many registers
            return dataclasses.replace(
                plan, **held, **launch, block=0, min_blocks=plan.block * plan.min_blocks
            )
        whole = {"block": 0, "row_shared_bytes": 0}
        if plan.variant == "cached":  # whose blocks on a multiprocessor follow from their size
            threads = plan.block * plan.min_blocks // 256
            return dataclasses.replace(plan, **launch, **whole, min_blocks=threads)
        return dataclasses.replace(plan, **held, **launch, **whole)

    found: dict[Plan, Plan] = {}
    for plan in candidates:
        found[kind(plan)] = max(
            found.get(kind(plan), plan), plan, key=lambda each: (each.vectors, each.block, each.group)
        )
    return list(found.values())


def tightest(candidates: Iterable[Plan]) -> list[Plan]:
    """The plan of each variant that strains the registers most: with full rows, ragged ones, and unaligned ones."""
    found: dict[tuple[str, str, bool, int], Plan] = {}
    for plan in candidates:
        kind = plan.variant, plan.kernel, plan.full, plan.unaligned
        found[kind] = max(found.get(kind, plan), plan, key=tightness)
    return list(found.values())


def widths(types: Types) -> list[int]:
    """Widths of vectors that occur, widest first."""
    widest = 16 // max(dtype_of(types.x).itemsize, dtype_of(types.y).itemsize)
    return [1 << p for p in reversed(range(widest.bit_length()))]


def instances(
    op: RowOp,
    types: Types,
    vector: int,
    arch: str,
    choice: Callable[[Iterable[Plan]], Iterable[Plan]] = tuple,
) -> Iterator[Instance]:
    """Lower every plan (or a choice of them) for one call, by the product's own functions."""
    x, y = dtype_of(types.x), dtype_of(types.y)
    cols = 3 * vector  # an odd number of vectors, so that this is the widest vector
    views = [View(0, (8, cols), (cols * each.itemsize, each.itemsize), each) for each in (x, y)]
    columns = {
        name: View(0, (cols,), (dtype_of(dtype).itemsize,), dtype_of(dtype))
        for name, dtype in zip(op.columns, types[2:], strict=False)
        if dtype is not None
    }
    what = row_spec(op, *views, 1, columns)
    assert what.problem.vector == vector
    for plan in choice(plans(what.problem, arch)):
        yield Instance(
            what,
            types,
            plan,
            problem_of(what, plan, arch),
            plan.variant,
            load_bytes=min(16, plan.vector * x.itemsize),
            store_bytes=min(16, plan.vector * y.itemsize),
        )


def all_instances(
    op: RowOp, calls: Iterable[Types], arch: str, choice: Callable[[Iterable[Plan]], Iterable[Plan]]
) -> list[Instance]:
    """For each call and each width of a vector that it can have, a choice of the plans."""
    found = {}
    for types in calls:
        for vector in widths(types):
            # rows that begin anywhere have the same kernel, whatever narrow accesses they would else have
            found.update({each.expression: each for each in instances(op, types, vector, arch, choice)})
    return list(found.values())


def widest_instances(
    op: RowOp,
    calls: Iterable[Types],
    arch: str,
    choice: Callable[[Iterable[Plan]], Iterable[Plan]] = tightest,
) -> list[Instance]:
    """For each call, at the widest vector, a choice of the plans."""
    return [each for types in calls for each in instances(op, types, widths(types)[0], arch, choice)]


class Called(NamedTuple):
    """A kernel and the call that it is for: an op's name or the name of what is fused."""

    name: str
    instance: Instance

    @property
    def properties(self) -> tuple[object, ...]:
        """What is called, the dtypes of x and y, and which code of the kernels its plan takes."""
        plan = self.instance.plan
        loop = plan.kernel, plan.full, plan.unaligned
        return self.name, self.instance.types.x, self.instance.types.y, plan.variant, loop


def sampled(
    candidates: Iterable[Called],
    *more: Callable[[Instance], object],
    each: Callable[[Instance], object] = lambda _: None,
    all_of_them: bool = SLOW,
) -> list[Called]:
    """Choose kernels so that properties and more factors meet in pairs, `each` occurs; all with CUPYNORM_SLOW=1."""
    found = list(candidates)
    if all_of_them:
        return found
    return covering(
        found,
        lambda called: (*called.properties, *(factor(called.instance) for factor in more)),
        lambda called: tightness(called.instance.plan),
        lambda called: each(called.instance),
    )


# --- compiling them ------------------------------------------------------------------------------------------------


# Several tests look at one kernel: the last ones that were compiled are kept. A kernel holds its whole module.
_KEPT = 32 * KERNELS_PER_MODULE
_Key = tuple[str, str, str, int | None]  # the text, the name expression, the architecture and NVRTC's major
_compiled: dict[_Key, Cubin] = {}


def compile_together(
    wanted: Sequence[tuple[str, str]], arch: str, major: int | None = None
) -> Iterator[Cubin]:
    """Compile kernels, each a text and a name expression, several to a module and on every core.

    NVRTC is called without the interpreter's lock.
    """
    batches = [wanted[i : i + KERNELS_PER_MODULE] for i in range(0, len(wanted), KERNELS_PER_MODULE)]

    def build(batch: Sequence[tuple[str, str]]) -> dict[_Key, Cubin]:
        found = {(*each, arch, major): _compiled.get((*each, arch, major)) for each in batch}
        new = [key for key, kernel in found.items() if kernel is None]
        if new:
            names = [name for _, name, *_ in new]
            text = joined(text for text, *_ in new)
            found |= zip(
                new, nvrtc.compile_all(text, names, compiler.options(), arch, major=major), strict=True
            )
        return {key: kernel for key, kernel in found.items() if kernel is not None}

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for batch, kernels in zip(batches, pool.map(build, batches), strict=True):
            _compiled.update(kernels)
            for oldest in list(_compiled)[:-_KEPT]:
                del _compiled[oldest]
            yield from (kernels[(*each, arch, major)] for each in batch)


def compile_instances(
    wanted: Sequence[Instance], arch: str, major: int | None = None
) -> Iterator[tuple[Instance, Cubin]]:
    """Compile all, several to a module. A kernel that spills gives way to the one that the package then launches."""
    kernels = compile_together([(each.text, each.expression) for each in wanted], arch, major)
    for instance, kernel in zip(wanted, kernels, strict=True):
        yield (launched_instead(instance, arch, major) if local_bytes_of(kernel) else (instance, kernel))


def local_bytes_of(kernel: Cubin) -> int:
    """Return what the driver says of a kernel when the package asks for its local memory: a thread's bytes."""
    return kernel.stack_bytes


def launched_instead(instance: Instance, arch: str, major: int | None = None) -> tuple[Instance, Cubin]:
    """Choose again, and let the planner ask the compiler, which no plan of `shapes` did: this is what is launched."""
    plan = first_choice(
        instance.problem,
        arch,
        instance.variant,
        lambda plan: local_bytes_of(compiled(instance.spec, plan, arch, major)),
    )
    return instance._replace(plan=plan), compiled(instance.spec, plan, arch, major)


def compiled(spec: KernelSpec, plan: Plan, arch: str, major: int | None = None) -> Cubin:
    """Return the kernel of a plan: as it was compiled with others, else compiled now."""
    (kernel,) = compile_together([(spec.text, spec.expression(plan))], arch, major)
    return kernel


def chosen(
    spec: KernelSpec, device: str, arch: str, variant: str | None = None, major: int | None = None
) -> tuple[Plan, Cubin]:
    """Return the plan that is chosen when the compiler is asked what it keeps in local memory, and its kernel."""

    def local_bytes(plan: Plan) -> int:
        return local_bytes_of(compiled(spec, plan, arch, major))

    limits = RECORDED[device]
    plan = choose(spec.problem, limits, lambda plan: plan.min_blocks, variant, local_bytes=local_bytes)
    return plan, compiled(spec, plan, arch, major)


def compile_first_choices(
    calls: Iterable[tuple[KernelSpec, str, str | None]], arch: str, major: int | None = None
) -> None:
    """Compile what is chosen before the compiler is asked: of lowered calls, devices and variants, all together.

    Compiler and disassembler need as long to start as for a kernel or two, and compiled() finds what was compiled here.
    """
    wanted: dict[tuple[str, str], None] = {}
    for spec, device, variant in calls:
        with contextlib.suppress(DoesNotFitError):
            plan = choose(spec.problem, RECORDED[device], lambda plan: plan.min_blocks, variant)
            wanted[spec.text, spec.expression(plan)] = None
    for _ in compile_together([*wanted], arch, major):
        pass


# --- reading what came out -----------------------------------------------------------------------------------------


def spills(kernel: Cubin) -> list[str]:
    """Say what the kernel keeps in local memory, by the assembler's own report."""
    counts = {
        "a stack frame": kernel.stack_bytes,
        "spill stores": kernel.spill_store_bytes,
        "spill loads": kernel.spill_load_bytes,
    }
    return [f"{count} bytes of {what}" for what, count in counts.items() if count]


_GLOBAL = re.compile(r"LDG|STG|RED|ATOM|LD\b|ST\b|UBLKCP|UTMA")


def begins_too_soon(code: Code, arch: str) -> list[str]:
    """Say if a kernel that devices.launch_of launches touches memory before it has waited for the one before it."""
    if int(arch.rstrip("af")) < EARLY_SINCE:
        return []
    waits = next(
        (i for i, each in enumerate(code.instructions) if each.startswith("ACQBULK")), len(code.instructions)
    )
    early = [each for each in code.instructions[:waits] if _GLOBAL.match(each)]
    return [f"{early[0]} before the kernel before has ended"] if early else []


def stalls_a_cluster(code: Code, arch: str) -> list[str]:
    """Say if blocks of a cluster wait for all memory as they meet, or empty L1 when they have loaded something."""
    meets = next((i for i, each in enumerate(code.instructions) if each.startswith("UCGABAR_WAIT")), None)
    if meets is None or int(arch.rstrip("af")) < EARLY_SINCE:
        return []
    loads = next(
        (i for i, each in enumerate(code.instructions) if _GLOBAL.match(each)), len(code.instructions)
    )
    faults = [each for each in code.instructions if each.startswith("MEMBAR")]
    faults += [each for each in code.instructions[loads:] if each.startswith("CCTL.IVALL")]
    return [f"{each}, which all of a multiprocessor waits for" for each in faults[:1]]


_LABEL = re.compile(r"^\s*(\$L\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")
_POLL = re.compile(r"\bld\.(?:relaxed|acquire|volatile)\b[^\n]*\bglobal\.(\S+)")
_STEP = re.compile(r"\badd\.s32\s+(%r\d+), (%r\d+), -?\d+;")
GRID_COUNTER = "u32"  # how the barrier of the grid is read: it is the driver's, and nobody else writes there


def endless_waits(kernel: Cubin) -> list[str]:
    """Say which loops of a kernel wait for something in device memory without counting how often they looked."""
    body = kernel.ptx.split(f".entry {kernel.lowered_name}", 1)[1].split(".entry ", 1)[0]
    places = {found[1]: found.start() for found in _LABEL.finditer(body)}
    loops = [
        (places[found[1]], found.end())
        for found in _BRANCH.finditer(body)
        if places[found[1]] < found.start()
    ]
    faults = []
    for poll in _POLL.finditer(body):
        around = [(end - begin, begin, end) for begin, end in loops if begin < poll.start() < end]
        if not around or poll[1] == GRID_COUNTER:
            continue
        _, begin, end = min(around)
        loop = body[begin:end]
        counters = {name for step in _STEP.finditer(loop) for name in step.groups()}
        if not any(re.search(rf"\bsetp\.\w+\.[su]32\s[^\n]*{name}\b", loop) for name in counters):
            faults.append(f"{poll[0].strip()} in a loop without a bound")
    return faults


@functools.cache
def nvdisasm() -> str | None:
    """Find the disassembler: in NVIDIA's wheel, else on the path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    return shutil.which("nvdisasm")


OLDEST_DISASSEMBLED = 75  # by nvdisasm 13
NOT_GLOBAL = {
    "LDL",
    "STL",
    "LD",
    "ST",
}  # local, and generic: those that the compiler did not see to be global


class Code(NamedTuple):
    """One kernel's code: its instructions in order, as text without the predicate, and its bytes by (kind, width)."""

    instructions: tuple[str, ...]
    accesses: Counter[tuple[str, int]]  # ("LDG", 16) -> how many


_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][^;]*?)\s*;")
_WIDTH = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def width_of(opcode: str) -> int:
    """Return the bytes that a memory instruction moves for one thread: LDG.E.128.CONSTANT moves 16."""
    return next((_WIDTH[part] for part in opcode.split(".") if part in _WIDTH), 4)


@functools.lru_cache(maxsize=16)
def disassemble(image: bytes) -> dict[str, Code]:
    """Disassemble a module: its kernels by lowered name."""
    tool = nvdisasm()
    assert tool is not None, "nvdisasm is not installed"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([tool, "-c", "-ndf", file.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, *parts = _FUNCTION.split(done.stdout)
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        instructions = tuple(line for line in _INSTRUCTION.findall(body) if not line.startswith("NOP"))
        opcodes = (line.split()[0] for line in instructions)
        memory = Counter(
            (opcode.split(".")[0], width_of(opcode))
            for opcode in opcodes
            if opcode.split(".")[0] in {"LDG", "STG", "LDGSTS", "LDL", "STL", "LDS", "STS", "LD", "ST"}
        )
        found[name] = Code(instructions, memory)
    return found


_PTX_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* +\[[^]]+\], *\[[^]]+\], *(\d+)")
_PTX_ACCESS = re.compile(r"\b(ld|st)\.(?:\w+\.)*?(global|local)\.(?:\w+\.)*?(?:v(\d)\.)?[a-z](\d+)\s")


def read_ptx(ptx: str) -> dict[str, Code]:
    """Read accesses from PTX: for architectures that the disassembler does not know."""
    _, *parts = _PTX_ENTRY.split(ptx)
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        memory = Counter(
            (("LD" if way == "ld" else "ST") + space[0].upper(), int(count or 1) * int(bits) // 8)
            for way, space, count, bits in _PTX_ACCESS.findall(body)
        )
        memory.update(("LDGSTS", int(width)) for width in _PTX_COPY.findall(body))
        found[name] = Code((), memory)
    return found


def code_of(kernel: Cubin, arch: str) -> Code:
    """Read one kernel's accesses: from its machine code if a disassembler is there for `arch`, else from PTX."""
    if nvdisasm() is None or int(arch.rstrip("a")) < OLDEST_DISASSEMBLED:
        return read_ptx(kernel.ptx)[kernel.lowered_name]
    return disassemble(kernel.image)[kernel.lowered_name]


def narrow_accesses(op: RowOp, instance: Instance, code: Code) -> list[str]:
    """Say which of the kernel's accesses to global memory are narrower than a vector, and which are to local memory.

    Rows and columns' parameters must be moved in whole vectors. What remains may be narrower: the load of the element
    that an op counts from, of whose vector the compiler takes no more than it needs, and stores of the statistics.
    """
    types, plan = instance.types, instance.plan
    compute = compute_dtype(dtype_of(types.x), dtype_of(types.y))
    columns = {min(16, plan.vector * dtype_of(each).itemsize) for each in types[2:] if each is not None}
    vectors = plan.vectors * plan.rows_per_group if plan.group else 1
    copies = 2 * plan.rows_per_group  # the compiler may peel a turn off a loop
    origins = dict.fromkeys((2, 4, 8), copies) if "mean" in op.stats and not plan.group else {}
    statistics = Counter({compute.itemsize: copies * len(op.stats)})
    if plan.unaligned:  # the elements around the vectors, one by one, and their parameters
        origins = Counter(origins)
        for each in types:
            origins[dtype_of(each or types.x).itemsize] += copies
        statistics[dtype_of(types.y).itemsize] += copies
        # put together from accesses of so many; of the last, where it brings one float, the compiler takes that half
        columns |= {8}
        floats = sum(dtype_of(each).itemsize == 4 for each in types[2:] if each is not None)
        origins[4] += copies * plan.vectors * floats
    if plan.parameter_cache == CONVERTED:  # one by one, to be numbers
        columns |= {dtype_of(each).itemsize for each in types[2:] if each is not None}
    if plan.variant == "split":  # letters: cleared, sent and awaited
        origins = Counter(origins)
        origins[16] += compute.itemsize * copies
        origins[4] += 2 * copies  # the grid's barrier
        origins[dtype_of(types.x).itemsize] += 4 * copies  # x again, where a message was overwritten
        statistics[16] += compute.itemsize * copies
    loaded, stored = instance.load_bytes, instance.store_bytes
    if plan.kernel == "row_tiled":  # all of a block's rows at once, but for what is less than an access
        size = dtype_of(types.x).itemsize
        loaded = stored = 16
        vectors = plan.vectors * plan.vector * size // 16
        columns |= {dtype_of(each).itemsize for each in types[2:] if each is not None}
        origins = Counter(origins) + Counter({size: 1})
        statistics[size] += 1
    directions = (
        ("loads", {"LDG", "LDGSTS"}, loaded, columns, origins),
        ("stores", {"STG"}, stored, set(), statistics),
    )
    found = []
    for what, kinds, vector_bytes, others, allowed in directions:
        counts: Counter[int] = Counter()
        for (kind, width), count in code.accesses.items():
            counts[width] += count if kind in kinds else 0
        if counts[vector_bytes] < vectors:
            found.append(
                f"{counts[vector_bytes]} {what} of {vector_bytes} bytes for {vectors} vectors of so many"
            )
        found += [
            f"{counts[width]} {what} of {width} bytes, in vectors of {vector_bytes}"
            for width in set(+counts) - {vector_bytes} - others
            if counts[width] > allowed.get(width, 0)
        ]
    found += [
        f"{count} {kind} of {width} bytes"
        for (kind, width), count in code.accesses.items()
        if kind in NOT_GLOBAL
    ]
    return found


# --- what is fused ---------------------------------------------------------------------------------------------------


def _rows_of(dtype: str, cols: int, rows: int = 8) -> View:
    size = dtype_of(dtype).itemsize
    return View(0, (rows, cols), (cols * size, size), dtype_of(dtype))


def _in_runs(dtype: str, cols: int) -> View:
    """Return rows whose columns are in three runs, at most one element fewer than `cols`."""
    size, run = dtype_of(dtype).itemsize, cols // 3
    return View(0, (8, 3, run), (run * size, 8 * run * size, size), dtype_of(dtype))


def _mask(cols: int, **given: object) -> Mask:
    return Mask((8, cols), 1, **given)  # type: ignore[arg-type]


def _host(*shape: int, dtype: object = np.uint8) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, [0] * len(shape))


class Fused(NamedTuple):
    """A call with something fused around its op: what is around it, for an x of so many columns."""

    op: RowOp
    around: Callable[[str, int], Around]
    columns: int = 0  # of gamma and beta, how many are given
    rows: Callable[[str, int], View] = _rows_of

    def spec(self, dtype: str, cols: int) -> KernelSpec:
        """Lower it by the product's own functions."""
        x = self.rows(dtype, cols)
        of_row, size = x.shape[1:], x.dtype.itemsize
        steps = tuple(math.prod(of_row[at + 1 :]) * size for at in range(len(of_row)))
        columns = {name: View(0, of_row, steps, x.dtype) for name in self.op.columns[: self.columns]}
        what = self.around(dtype, cols)
        compute = compute_dtype(x.dtype, *(each.dtype for each in what.outs))
        eps = (0.0,) * (1 + len(self.op.numbers))
        return fused_spec(self.op, x, len(of_row), columns, (), eps, compute, what)


def _full_where(cols: int) -> Mask:
    where = np.lib.stride_tricks.as_strided(np.zeros(16 * 64, np.uint8)[:1], (8, cols), (cols, 1))
    return _mask(cols, where=_placed(where))


def _placed(array: np.ndarray) -> np.ndarray:
    """Return an array of the same shape and strides whose pointer is as aligned as a device's."""
    memory = np.zeros(64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 16
    return np.lib.stride_tricks.as_strided(memory[start:].view(array.dtype)[:1], array.shape, array.strides)


def _adds(dtype: str, cols: int, *, bias: bool, drop: bool, keep: bool, scales: bool = False) -> Around:
    x = _rows_of(dtype, cols)
    dropout = Dropout(0.25, 1, 0)
    operands = (x._replace(pointer=1 << 20), 0.5)
    operands += (View(0, (cols,), x.strides[1:], x.dtype).broadcast_to(x.shape),) if bias else ()
    operands += (dropout, dropout.factor) if drop else ()
    out = View(0, x.shape, (cols, 1), np.dtype(np.int8)) if scales else x
    return Around(
        (out,),
        lower_around._adding(bias=bias, dropout=drop),
        operands,
        loaded=x if keep else None,
        scales=int(scales),
    )


def _sum_in_runs(dtype: str, cols: int) -> Around:
    x = _in_runs(dtype, cols)
    load, _ = trace(lambda x, r: x + r, "load")
    return Around((x,), load, (x._replace(pointer=1 << 20),), loaded=x._replace(pointer=1 << 21))


def _stores(dtype: str, cols: int, name: str) -> Around:
    out = View(0, (8, cols), (cols, 1), quantized_dtype(name))
    return Around((out,), store=lower_around._dividing(), store_operands=(0.5,))


def _users(dtype: str, cols: int) -> Around:
    """A user's fusion: several operands and results, with a long function."""
    x = _rows_of(dtype, cols)
    load, _ = trace(lambda x, r, b: x + r * b, "load")
    store, _ = trace(lambda y, g: (functions.gelu(y) * g, y), "store")
    column = View(0, (cols,), x.strides[1:], x.dtype).broadcast_to(x.shape)
    return Around(
        (x, x), load, (x._replace(pointer=1 << 20), column), None, x, store, (x._replace(pointer=1 << 21),)
    )


FUSED = {
    "softmax, causal and lengths": Fused(
        SOFTMAX,
        lambda d, n: Around((_rows_of(d, n),), None, (), _mask(n, lengths=_host(8, dtype=np.int32), high=1)),
    ),
    "softmax, where, scale": Fused(
        SOFTMAX,
        lambda d, n: Around(
            (_rows_of(d, n),), lower_around.scaling(scale=True, bias=False), (0.5,), _full_where(n)
        ),
    ),
    "log_softmax, causal, bias": Fused(
        LOG_SOFTMAX,
        lambda d, n: Around(
            (_rows_of(d, n),),
            lower_around.scaling(scale=False, bias=True),
            (_rows_of(d, n)._replace(pointer=1 << 20),),
            _mask(n, high=1),
        ),
    ),
    "add_layer_norm": Fused(LAYER_NORM, lambda d, n: _adds(d, n, bias=False, drop=False, keep=True), 2),
    "add_layer_norm, bias, dropout": Fused(
        LAYER_NORM, lambda d, n: _adds(d, n, bias=True, drop=True, keep=True), 2
    ),
    "add_rms_norm, scales": Fused(
        RMS_NORM, lambda d, n: _adds(d, n, bias=False, drop=False, keep=True, scales=True), 1
    ),
    "layer_norm to int8": Fused(LAYER_NORM, lambda d, n: _stores(d, n, "int8"), 2),
    "rms_norm to float8": Fused(RMS_NORM, lambda d, n: _stores(d, n, "float8_e4m3fn"), 1),
    "layer_norm, scales": Fused(
        LAYER_NORM,
        lambda d, n: _stores(d, n, "float8_e5m2")._replace(store=None, store_operands=(), scales=1),
        2,
    ),
    "layer_norm of a user's": Fused(LAYER_NORM, _users, 2),
    "softmax of a user's": Fused(SOFTMAX, _users),
}

# Rows in runs, none of which are unaligned.
IN_RUNS = {
    "layer_norm in runs": Fused(LAYER_NORM, lambda d, n: Around((_in_runs(d, n),)), 2, _in_runs),
    "a sum and its softmax in runs": Fused(SOFTMAX, _sum_in_runs, rows=_in_runs),
}


def _pairs(dtype: str, cols: int, mask: Mask | None = None) -> Around:
    x = _rows_of(dtype, cols)
    return Around((x,), backward.PAIR, (x._replace(pointer=1 << 20),), mask)


def _norm(dtype: str, cols: int) -> Around:
    """Return dx = Op(dy * gamma, (x - mean) * rstd) * rstd + what is added to it."""
    x, compute = _rows_of(dtype, cols), compute_dtype(dtype_of(dtype))
    row = View(0, (8, 1), (compute.itemsize, compute.itemsize), compute).broadcast_to(x.shape)
    column = View(0, (cols,), x.strides[1:], x.dtype).broadcast_to(x.shape)
    load = traced(lambda dy, x, gamma, mean, rstd: (dy * gamma, (x - mean) * rstd), 5)
    store = traced(lambda dx, rstd, other: dx * rstd + other, 3)
    operands = (x._replace(pointer=1 << 20), column, row, row)
    return Around((x,), load, operands, store=store, store_operands=(row, x._replace(pointer=1 << 21)))


def _of_labels(dtype: str, cols: int) -> Around:
    x, labels = _rows_of(dtype, cols), View(0, (8,), (8,), np.dtype(np.int64))
    load = traced(lambda x, label, most, each: (x, label * most + each), 4)
    return Around((x,), load, (Label(labels, nan=True), 0.875, 0.001), counted=Counted(labels, -100))


def _of_labels_alone(dtype: str, cols: int, ignored: int | None = None, *, smooth: bool = False) -> Around:
    labels = View(0, (8,), (8,), np.dtype(np.int64))
    counted = None if ignored is None else Counted(labels, ignored)
    part = 0.875 if smooth else 1.0
    return Around((_rows_of(dtype, cols),), counted=counted, labelled=Labelled(labels, ignored, part))


# Gradients and losses, whose elements are two numbers, and what stores nothing.
GRADIENTS = {
    "softmax backward": Fused(backward.SOFTMAX_BACKWARD, _pairs),
    "softmax backward, causal": Fused(
        backward.SOFTMAX_BACKWARD,
        lambda d, n: _pairs(d, n, _mask(n, lengths=_host(8, dtype=np.int32), high=1)),
    ),
    "log_softmax backward, where": Fused(
        backward.LOG_SOFTMAX_BACKWARD, lambda d, n: _pairs(d, n, _full_where(n))
    ),
    "layer_norm backward": Fused(backward.LAYER_NORM_BACKWARD, _norm),
    "rms_norm backward": Fused(backward.RMS_NORM_BACKWARD, _norm),
    "cross_entropy": Fused(backward.CROSS_ENTROPY, _of_labels),
    "cross_entropy, loss alone": Fused(
        backward.CROSS_ENTROPY, lambda d, n: _of_labels(d, n)._replace(outs=(), room=256)
    ),
    "cross_entropy of labels": Fused(backward.LABEL_CROSS_ENTROPY, _of_labels_alone),
    "cross_entropy of labels, some ignored": Fused(
        backward.LABEL_CROSS_ENTROPY, lambda d, n: _of_labels_alone(d, n, -100)
    ),
    "cross_entropy of labels, loss alone": Fused(
        backward.LABEL_CROSS_ENTROPY, lambda d, n: _of_labels_alone(d, n)._replace(outs=(), room=256)
    ),
    "cross_entropy of smooth labels": Fused(
        backward.SMOOTH_CROSS_ENTROPY, lambda d, n: _of_labels_alone(d, n, smooth=True)
    ),
    "cross_entropy of smooth labels, some ignored": Fused(
        backward.SMOOTH_CROSS_ENTROPY, lambda d, n: _of_labels_alone(d, n, -100, smooth=True)
    ),
    "cross_entropy of smooth labels, loss alone": Fused(
        backward.SMOOTH_CROSS_ENTROPY, lambda d, n: _of_labels_alone(d, n)._replace(outs=(), room=256)
    ),
    "logsumexp": Fused(backward.LOGSUMEXP, lambda *_: Around((), room=256)),
}


WHOLE_COLS, ODD_COLS = 48, 12289  # vectors of 16 bytes in every type, and of 16 elements of one byte; none


def fused_instances(
    kind: str, dtype: str, arch: str, choice: Callable[[Iterable[Plan]], Iterable[Plan]] = extremes
) -> list[Instance]:
    """Write the kernels of some plans of one fused call, at the widest vector and, where it can, of unaligned rows."""
    found = []
    for cols in (WHOLE_COLS, ODD_COLS):
        what = (FUSED | IN_RUNS | GRADIENTS)[kind].spec(dtype, cols)
        chosen = choice(plans(what.problem, arch))
        found += [
            Instance(what, Types(dtype, dtype), plan, problem_of(what, plan, arch), plan.variant)
            for plan in chosen
            if cols == WHOLE_COLS or plan.unaligned
        ]
    return found


def narrow_clusters(
    kind: str, dtype: str, arch: str, choice: Callable[[Iterable[Plan]], Iterable[Plan]]
) -> list[Instance]:
    """Write the kernels of some clusters that hold unaligned rows, few and many, with something fused around the op."""
    what = FUSED[kind].spec(dtype, ODD_COLS)
    found: dict[tuple[int | bool, ...], tuple[Plan, Problem]] = {}
    for cols, rows in itertools.product((1001, 2611, 5121, 20001, 50257), (3, 1 << 20)):
        with contextlib.suppress(DoesNotFitError):
            problem = dataclasses.replace(what.problem, rows=rows, cols=cols)
            plan = first_choice(problem, arch, "cluster")
            found.setdefault(plan.template, (plan, problem))
    size, problems = dtype_of(dtype).itemsize, dict(found.values())
    return [
        Instance(what, Types(dtype, dtype), plan, problems[plan], "cluster", size, size)
        for plan in choice(problems)
    ]


LONG_COLS = (10240, 12288, 16384, 17408, 20480, 24576, 32768, 49152, 65536, 98304, 131072, 196608, 262144)


def ahead_instances(kind: str, dtype: str, arch: str) -> list[Instance]:
    """Lower the clusters of one fused call whose rows are sent ahead: of each size of a thread's share the tightest."""
    found: dict[tuple[int, int], Instance] = {}
    for base, less in ((WHOLE_COLS, 0), (ODD_COLS, -1)):
        what = FUSED[kind].spec(dtype, base)
        for cols in (each + less for each in LONG_COLS):
            problem = dataclasses.replace(what.problem, rows=1 << 20, cols=cols)
            plan, variant = first_choice(problem, arch), None
            if plan.variant == "shared":  # a band: clusters take what a mask keeps more of
                variant = "cluster"
                with contextlib.suppress(DoesNotFitError):
                    plan = first_choice(problem, arch, variant)
            if plan.variant == "shared":
                continue
            held = plan.unaligned, plan.vectors
            if plan.stages and (held not in found or tightness(plan) > tightness(found[held].plan)):
                found[held] = Instance(what, Types(dtype, dtype), plan, problem, variant)
    return list(found.values())


def crowded_instances(arch: str) -> list[Instance]:
    """Lower calls in float of which a thread's values take all registers that 1024 threads of a multiprocessor have."""
    found = []
    for cols in (8192, 16384):
        x = _rows_of("float32", cols)
        column = View(0, (cols,), x.strides[1:], x.dtype)
        calls = [row_spec(LAYER_NORM, x, x, 1, dict.fromkeys(LAYER_NORM.columns, column))]
        for drop in (False, True):
            around = _adds("float32", cols, bias=True, drop=drop, keep=False)
            calls.append(Fused(LAYER_NORM, lambda *_, around=around: around, 2).spec("float32", cols))
        for what in calls:
            problem = dataclasses.replace(what.problem, rows=1 << 24)
            plan = first_choice(problem, arch, "block")
            found.append(Instance(what, Types("float32", "float32"), plan, problem, "block"))
    return found


def narrow_loads(instance: Instance, code: Code) -> list[str]:
    """Say if x is not loaded in vectors of 16 bytes, or anything goes through local memory.

    A call without a result of x's shape stores numbers of rows alone: not all compilers see that those are global.
    """
    plan, problem = instance.plan, instance.problem
    vectors = plan.vectors * plan.rows_per_group if plan.group else 1
    wide = code.accesses["LDGSTS" if plan.stages else "LDG", 16]
    found = [f"{wide} loads of 16 bytes for {vectors} vectors"] if wide < vectors else []
    of_rows = set() if problem.output_bytes else {("ST", problem.compute_bytes)}
    return found + [
        f"{count} {kind} of {width} bytes"
        for (kind, width), count in code.accesses.items()
        if kind in NOT_GLOBAL and (kind, width) not in of_rows
    ]
