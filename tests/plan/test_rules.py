"""The rules of plan/data: what they say is valid, each of them decides something, and what they lead to compiles."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from cupynorm.call.view import View
from cupynorm.lower.row import row_spec
from cupynorm.lower.spec import KernelSpec
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.plan.choose import choose
from cupynorm.plan.config import ACCESS_BYTES, DOUBLE_BYTES, MAX_BLOCK, WARP, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED, Limits
from cupynorm.plan.problem import Problem
from cupynorm.plan.rule_file import DATA, kinds_of
from cupynorm.plan.rule_types import CROSSOVERS
from cupynorm.plan.rules import parse, rules_of
from cupynorm.plan.sections import SECTIONS
from cupynorm.runtime import nvrtc
from tests import build_gate

CHECKOUT = Path(__file__).parents[2]
FILES = sorted(Path(DATA).glob("sm_*.json"))
SLOW = bool(os.environ.get("CUPYNORM_SLOW"))
DEVICE_OF = {"90": "h200"}  # what stands for an architecture that has data
FUSED = ("masked", "interval", "affine", "affine with outputs", "quantized", "quantized, one output")
TABLES = {
    "registers": (
        "aligned",
        "narrow",
        "unaligned",
        "only read",
        "masked statistics",
        "sums of bytes",
        *FUSED,
    ),
    "fixed": ("ragged", "full", "unaligned"),
}


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return read(file)["rules"]


def of_one_kind(file: Path) -> list[dict[str, Any]]:
    """The rules, with one for each kind, and each number of vectors, of those that are for several."""
    return [
        {**row, "parameters": parameters, "bytes": size, **({} if vectors is None else {"vectors": vectors})}
        for row in rows_of(file)
        for parameters, size in kinds_of(row)
        for vectors in (row["vectors"] if isinstance(row.get("vectors"), list) else [row.get("vectors")])
    ]


def name_of(row: Mapping[str, Any]) -> str:
    """The name of a rule of one kind and number of vectors, which is no other's."""
    return f"{row['id']} {row['parameters']} {row['bytes']} {row.get('vectors', '')}"


each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
each_rule = pytest.mark.parametrize(
    ("file", "row"),
    [pytest.param(file, row, id=name_of(row)) for file in FILES for row in of_one_kind(file)],
)

# ---- what a file may say


@each_file
def test_a_file_is_read_whole_and_for_its_own_architecture(file: Path) -> None:
    rules = rules_of(file.stem.removeprefix("sm_"))

    assert file.stem == f"sm_{rules.architecture}"
    assert sorted(each.id for each in rules.every_rule()) == sorted(row["id"] for row in of_one_kind(file))


@each_file
def test_every_row_says_where_it_was_measured(file: Path) -> None:
    told = read(file)

    for source in told["sources"].values():
        assert set(source) == {"device", "date", "file", "note", "what"}
        assert (CHECKOUT / source["file"]).is_file(), source["file"]
        assert (CHECKOUT / source["note"]).is_file(), source["note"]
    used = {row["source"] for row in (*told["rules"], *told["crossovers"])}.union(*told["sections"].values())
    assert used == set(told["sources"])
    assert set(told["sections"]) == set(SECTIONS)


@each_file
def test_a_rule_for_many_or_few_rows_says_what_it_earns(file: Path) -> None:
    assert not [
        row["id"] for row in rows_of(file) if ("many" in row or "min_rows" in row) and not row.get("note")
    ]


@each_file
def test_rows_have_names_of_their_own(file: Path) -> None:
    names = [row["id"] for row in rows_of(file)]

    assert len(names) == len(set(names))


@each_file
def test_crossovers_are_of_known_kinds_and_in_order(file: Path) -> None:
    seen = set()
    for row in read(file)["crossovers"]:
        key = (row["what"], row.get("parameters"), row.get("bytes"), row.get("access_bytes"))
        assert key not in seen, key
        seen.add(key)
        assert row["what"].removesuffix(", fused").removesuffix(", unaligned") in CROSSOVERS
        assert ("from" in row) != ("above" in row)
        assert row.get("from", 1) > 0
        assert row.get("up_to", math.inf) >= row.get("from", 0)


@each_file
def test_a_table_goes_from_short_rows_to_long_ones(file: Path) -> None:
    """The first rule that is long enough holds a row: one no longer than the one before would never be asked."""
    tables = collections.defaultdict(list)
    for row in of_one_kind(file):
        if row["rule"] in {"registers", "cached"}:
            tables[row["rule"], row.get("table"), row["parameters"], row["bytes"]].append(row["row_bytes"])

    for name, longest in tables.items():
        assert longest == sorted(set(longest)), name


@each_rule
def test_a_rule_is_in_the_range_of_what_a_kernel_can_do(file: Path, row: Mapping[str, Any]) -> None:
    size = row["bytes"]

    assert row["parameters"] in {0, 1, 2}
    assert size in {2, 4, 8}
    assert row["row_bytes"] is None or row.get("above", 0) < row["row_bytes"]
    assert row.get("table") in TABLES.get(row["rule"], (None,))
    assert 1 <= row.get("vectors", 1) <= 32
    assert row.get("ctas", 1) in {1, 2, 4, 8, 16}
    assert row.get("stages", 0) in {0, 1, 2}
    assert 0 <= row.get("parameter_cache", 0) <= 4
    assert row["parameters"] or not row.get("parameter_cache") or size == 8
    assert len(row.get("worths", [])) in {0, 4}
    assert row.get("registers_beside", 0) in range(128)
    assert row.get("rows", 1) in {1, 2, 4}
    block = row.get("block", WARP)
    assert block % WARP == 0
    assert WARP <= block <= MAX_BLOCK
    assert row.get("few_block", 0) in range(0, block, WARP)
    assert row.get("resident_threads", block) >= block
    assert row.get("thread_bytes", size) >= size


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema": 2}, ValueError),
        ({"tile": {}}, TypeError),
        ({"split": {"blocks": 2, "speed": 7}}, TypeError),
        ({"rules": [{"rule": "fixed", "parameters": 0, "bytes": 2, "row_bytes": 9, "lanes": 3}]}, TypeError),
    ],
    ids=str,
)
def test_a_file_of_another_schema_or_with_other_names_is_refused(
    change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        list(parse({**read(FILES[0]), **change}, "changed").every_rule())


HOLDS_NUMBERS = {
    "config.py",
    "limits.py",
}  # facts of hardware and kernels, with their names, and nothing else


def test_what_was_measured_stands_in_no_code() -> None:
    found = [
        f"{path.name}:{node.lineno}: {node.value}"
        for path in (CHECKOUT / "cupynorm" / "plan").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if path.name not in HOLDS_NUMBERS and isinstance(node, ast.Constant)
        if type(node.value) in {int, float} and node.value not in {0, 1, 2}
    ]

    assert not found


# ---- what rules decide


def occupancy(plan: Plan) -> int:
    return plan.min_blocks if plan.cluster == 1 else max(1, 132 * plan.min_blocks // plan.ctas_per_row)


class Layout(NamedTuple):
    """How rows lie. unaligned: as in Problem, where they are. period: whether it is known. vector: at most."""

    unaligned: int = 1
    period: bool = True
    vector: int = 8


LAYOUTS = (Layout(), Layout(vector=1), Layout(2), Layout(period=False), Layout(2, period=False))
ROWS = (49152, 8192, 1000, 132, 4_000_000)


def widths(row: Mapping[str, Any]) -> Iterator[int]:
    """Widths that a rule may hold, the longest first: of any number of elements, of whole vectors, of powers of two."""
    size = row["bytes"]
    longest = (row["row_bytes"] or 1 << 24) // size
    least = max(1, row.get("above", 0) // size)
    steps = sorted({max(1, (longest - least) // 80), 1})
    for unit in (1, ACCESS_BYTES // size, 64, 256, 1024):
        for step in steps:
            for number in range(80):
                cols = (longest - number * step) // unit * unit
                if cols >= least:
                    yield cols
    yield from (1 << power for power in range(24) if least <= 1 << power <= longest)
    yield from (each for each in range(1, 400) if least <= each <= longest)


Case = TypeVar("Case")


def coarse_to_fine(cases: Sequence[Case]) -> Iterator[Case]:
    """Each case once: a few from all over first, since neighbours are decided alike."""
    given: set[int] = set()
    for step in (97, 13, 1):
        for i in range(0, len(cases), step):
            if i not in given:
                given.add(i)
                yield cases[i]


def problems(row: Mapping[str, Any], own: Limits) -> Iterator[tuple[Limits, Problem, str | None]]:
    """Devices and problems for which a rule may decide, and the variant that is asked for."""
    size, table = row["bytes"], row.get("table", "")
    load_bytes, around = size, dict[str, Any]()
    unaligned = (
        table == "unaligned" or row.get("unaligned", False) is not False or row.get("aligned") is False
    )
    if (
        size == DOUBLE_BYTES and unaligned and row["rule"] == "registers"
    ):  # shorter ones go in narrow accesses
        load_bytes, around = 2, {"fused": True, "output_bytes": 2}
    if table in FUSED:
        quantized = table.startswith("quantized")
        outputs = 2 if table in {"affine with outputs", "quantized"} else 1
        around = {"fused": True, "output_bytes": 1 if quantized else size, "outputs": outputs}
        around |= {"interval_mask": table == "interval", "extra_registers": row.get("extra_registers", 8)}
    if table == "only read":
        around = {"fused": True}
    if table == "sums of bytes":
        around, load_bytes = {"fused": True, "direct_load": False, "sums_of_bytes": True}, 1
    if table == "masked statistics":
        around = {"fused": True, "output_bytes": size, "load_operands": (1,), "direct_load": False}
        around["extra_registers"] = row["extra_registers"]
    types = (load_bytes, max(4, size), (load_bytes,) * row["parameters"])
    widest = ACCESS_BYTES // max(load_bytes, size if table == "sums of bytes" else 1)
    named = {"registers": "block", "fixed": "block"}.get(row["rule"], row["rule"].partition(" ")[0])
    asked = [(None, rows) for rows in ROWS] + [(named, ROWS[0])]
    devices = (own, RECORDED["a100"], RECORDED["t4"])
    cases = list(itertools.product(devices, LAYOUTS, asked, dict.fromkeys(widths(row))))
    for limits, layout, (variant, rows), cols in coarse_to_fine(cases):
        vector = math.gcd(cols, widest, layout.vector)
        lies: dict[str, int] = {"widest_vector": vector}
        if unaligned and vector < widest:
            period = widest // vector if layout.period else 0
            lies = {"widest_vector": widest, "unaligned": layout.unaligned, "alignment_period": period}
        yield limits, Problem(rows, cols, vector, *types, **lies, **around), variant


def decided_by(file: Path, row: Mapping[str, Any]) -> Iterator[Plan]:
    """Give plans that a rule decides."""
    own = RECORDED[DEVICE_OF[file.stem.removeprefix("sm_")]]
    for limits, problem, variant in problems(row, own):
        with contextlib.suppress(DoesNotFitError):
            plan = choose(problem, limits, occupancy, variant)
            exact = row["rule"] != "fixed" or plan.vectors == row["vectors"]  # of several that it may list
            if row["id"] == plan.rule and exact:
                yield plan


@each_rule
def test_every_rule_decides_some_plan(file: Path, row: Mapping[str, Any]) -> None:
    assert next(decided_by(file, row), None) is not None


# ---- what they lead to compiles

DTYPE_OF = {2: "float16", 4: "float32", 8: "float64"}
OP_WITH = {0: SOFTMAX, 1: RMS_NORM, 2: LAYER_NORM}  # by the number of affine parameters
SUMS = [
    build_gate.Fused(
        op, lambda d, n, keep=keep: build_gate._adds(d, n, bias=False, drop=False, keep=keep), len(op.columns)
    )
    for op in (LAYER_NORM, RMS_NORM)
    for keep in (False, True)
]
SAMPLE = 16  # every so many rules are compiled in an ordinary run


def calls(row: Mapping[str, Any], cols: int) -> Iterator[KernelSpec]:
    """Give calls of public functions whose rows a rule may hold."""
    dtype, parameters = DTYPE_OF[row["bytes"]], row["parameters"]
    if row.get("table") in FUSED:
        for each in (*build_gate.FUSED.values(), *SUMS):
            if each.columns == parameters:
                yield each.spec(dtype, cols)
        return
    x = build_gate._rows_of(dtype, cols)
    column = View(0, (cols,), x.strides[1:], x.dtype)
    op = OP_WITH[parameters]
    yield row_spec(op, x, x, 1, dict.fromkeys(op.columns, column))


def instance_of(file: Path, row: Mapping[str, Any]) -> build_gate.Instance | None:
    """Return the tightest of the first kernels that a rule decides for such calls; None where it decides none."""
    arch = file.stem.removeprefix("sm_")
    named = {"registers": "block", "fixed": "block"}.get(row["rule"], row["rule"].partition(" ")[0])
    found: list[build_gate.Instance] = []
    dtype = DTYPE_OF[row["bytes"]]
    for variant, rows in ((None, 49152), (None, 1000), (None, 4_000_000), (named, 49152)):
        for cols in dict.fromkeys(itertools.islice(widths(row), 0, None, 3)):
            for what in calls(row, cols):
                problem = dataclasses.replace(what.problem, rows=rows)
                with contextlib.suppress(DoesNotFitError):
                    plan = build_gate.first_choice(problem, arch, variant)
                    if row["id"] == plan.rule:
                        types = build_gate.Types(dtype, dtype)
                        found.append(build_gate.Instance(what, types, plan, problem, variant))
            if len(found) >= 4:
                return max(found, key=lambda each: build_gate.tightness(each.plan))
    return max(found, key=lambda each: build_gate.tightness(each.plan), default=None)


@each_file
def test_what_a_rule_decides_compiles_without_a_spill(file: Path) -> None:
    arch = file.stem.removeprefix("sm_")
    if not nvrtc.majors() or arch not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip(f"no NVRTC for sm_{arch} is installed")
    rows = of_one_kind(file)[:: 1 if SLOW else SAMPLE]
    instances = {name_of(row): instance_of(file, row) for row in rows}
    whole = {name: each for name, each in instances.items() if each is not None}
    timed_with_spills = {name for name, row in zip(instances, rows, strict=True) if row.get("spills")}

    built = build_gate.compile_instances(list(whole.values()), arch)
    faults = [
        f"{name}: {', '.join(build_gate.spills(kernel))}"
        for name, (_, kernel) in zip(whole, built, strict=True)
        if build_gate.spills(kernel) and name not in timed_with_spills
    ]

    assert not faults, "\n".join(faults)
    # the others are for calls that only other devices, or mixed types, have
    assert len(whole) >= 0.85 * len(rows), sorted(set(instances) - set(whole))
