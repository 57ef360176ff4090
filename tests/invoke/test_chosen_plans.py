"""Plans on disk: a later process takes the plan that an earlier one chose, and only where it would choose the same."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm.call.view import View
from cupynorm.invoke import row_ops
from cupynorm.lower.row import row_spec
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.plan import choose as planner
from cupynorm.plan.config import BOUNDS, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.runtime import cache_folder, chosen_plans, compiler, cubins, devices, tuned_plans
from tests import simulator
from tests.simulator.machine import machine

if TYPE_CHECKING:
    from cupynorm.lower.spec import KernelSpec

KEY = chosen_plans.key
H200, PROBLEM = RECORDED["h200"], Problem(4096, 1024, 8, 2, 4)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give each test a cache of its own, and a compiler of which all is known."""
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path / "cache"))
    for switch in compiler.CUPY_SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setattr(compiler, "what_compiles", lambda: ("NVRTC",))
    monkeypatch.setattr(devices, "driver_cuda", lambda: 13000)
    return tmp_path / "cache" / "cubins"


class Planner:
    """Counts the plans that are chosen by the rules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choose_plan, self._count = planner.choose, 0
        monkeypatch.setattr(planner, "choose", self)

    def __call__(self, *given: Any, **named: Any) -> Plan:
        self._count += 1
        return self.choose_plan(*given, **named)

    def asked(self) -> int:
        """Return the count since the last time."""
        count, self._count = self._count, 0
        return count


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Install the simulator, which keeps nothing on disk, and let it keep plans."""
    simulator.install(monkeypatch)
    monkeypatch.setattr(chosen_plans, "key", KEY)
    monkeypatch.setattr(devices, "driver_cuda", lambda: 13000)
    return Planner(monkeypatch)


def spec(rows: int = 64, cols: int = 1024) -> KernelSpec:
    half = np.dtype(np.float16)
    x = View(1 << 20, (rows, cols), (cols * 2, 2), half)
    return row_spec(LAYER_NORM, x, x._replace(pointer=1 << 40), 1, {})


CLUSTERS = 2000, 60001  # rows that blocks of a cluster share, on an H200


def plan_of_a_new_process(what: KernelSpec | None = None, wanted: Any = None) -> Plan:
    """Return the plan that a process launches that remembers nothing."""
    row_ops.forget()
    return row_ops.prepared(0, spec() if what is None else what, wanted).plan


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.plan"))


# ---- what is kept, and used again


def test_a_later_process_takes_the_plan_without_the_planner(asked: Planner, folder: Path) -> None:
    first = plan_of_a_new_process()
    assert asked.asked() == 1
    assert len(kept(folder)) == 1

    second = plan_of_a_new_process()

    assert asked.asked() == 0
    assert dataclasses.asdict(second) == dataclasses.asdict(first)  # type: ignore[call-overload]
    assert second.why
    assert second.why == first.why


@pytest.mark.parametrize("cols", [1, 33, 1024, 4096, 12288, 50257, 262144])
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_what_is_kept_is_what_would_be_chosen(asked: Planner, rows: int, cols: int) -> None:
    chosen = [dataclasses.asdict(plan_of_a_new_process(spec(rows, cols))) for _ in range(3)]  # type: ignore[call-overload]

    assert asked.asked() in (1, 3)  # 3: it is not kept, since clusters of another plan were counted
    assert chosen[0] == chosen[1] == chosen[2]


IMPORTED = """
import sys
import pytest
from cupynorm.invoke import row_ops
from cupynorm.runtime import chosen_plans, compiler
from tests import simulator
key = chosen_plans.key
patch = pytest.MonkeyPatch()
cupy = simulator.install(patch).cupy
patch.setattr(chosen_plans, "key", key)
patch.setattr(compiler, "what_compiles", lambda: ("NVRTC",))
import numpy, cupynorm
cupynorm.layer_norm(cupy.asarray(numpy.ones((6, 40), numpy.float32)))
print(sorted(name for name in sys.modules if name.startswith("cupynorm.plan.")))
"""


def test_a_process_that_finds_its_plan_imports_no_planner() -> None:
    simulator.skip_if_missing()
    checkout = Path(cupynorm.__file__).parents[1]
    imported = [
        subprocess.run(
            [sys.executable, "-c", IMPORTED],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]

    assert "cupynorm.plan.choose" in imported[0]
    assert imported[1].split() == [
        "['cupynorm.plan.config',",
        "'cupynorm.plan.limits',",
        "'cupynorm.plan.problem']",
    ]


# ---- the key


def key(problem: Problem = PROBLEM, limits: Any = H200, **strings: str) -> str:
    texts = {"text": "text", "name": "row<{types}>", "types": "float", **strings}
    found = chosen_plans.key(**texts, problem=problem, limits=limits)
    assert found is not None
    return found


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Problem)])  # type: ignore[arg-type]
def test_every_number_of_a_problem_is_in_the_key(field: str) -> None:
    value = getattr(PROBLEM, field)
    other = (1,) if isinstance(value, tuple) else not value if isinstance(value, bool) else value + 1

    assert key(dataclasses.replace(PROBLEM, **{field: other})) != key()  # type: ignore[type-var]


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(H200)])  # type: ignore[arg-type]
def test_every_limit_of_a_device_is_in_the_key(field: str) -> None:
    value = getattr(H200, field)
    other = f"{value}0" if isinstance(value, str) else value - 1

    assert key(limits=dataclasses.replace(H200, **{field: other})) != key()  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["text", "name", "types"])
def test_what_is_compiled_is_in_the_key(name: str) -> None:
    assert key(**{name: "other"}) != key()


@pytest.mark.parametrize("change", ["planner", "driver", "compiler", "format"])
def test_what_chooses_and_compiles_is_in_the_key(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    before = key()
    if change == "planner":
        monkeypatch.setattr(chosen_plans, "planner_digest", lambda: "other")
    elif change == "driver":
        monkeypatch.setattr(devices, "driver_cuda", lambda: 13010)
    elif change == "compiler":
        monkeypatch.setattr(compiler, "what_compiles", lambda: ("a newer NVRTC",))
    else:
        monkeypatch.setattr(chosen_plans, "FORMAT", "other")

    assert key() != before


def test_the_digest_of_the_planner_is_of_its_code_and_its_rules(tmp_path: Path) -> None:
    source = Path(cupynorm.__file__).parent / "plan"
    copy = tmp_path / "plan"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    endings = (".py", ".json")
    assert chosen_plans.planner_digest() == compiler.digest_of(str(copy), endings)
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"choose.py", "registers.py", "sm_90.json"}

    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole + b" ")
        assert compiler.digest_of(str(copy), endings) != chosen_plans.planner_digest(), path
        path.write_bytes(whole)


@pytest.mark.parametrize("switch", compiler.CUPY_SWITCHES)
def test_where_no_kernel_is_kept_no_plan_is(
    asked: Planner, monkeypatch: pytest.MonkeyPatch, folder: Path, switch: str
) -> None:
    monkeypatch.setenv(switch, "1")
    for _ in range(2):
        plan_of_a_new_process()

    assert asked.asked() == 2
    assert kept(folder) == []


def test_a_cupy_that_we_do_not_know_keeps_no_plan(asked: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise AttributeError("get_build_version")

    monkeypatch.setattr(compiler, "what_compiles", unknown)

    assert plan_of_a_new_process() == plan_of_a_new_process()
    assert asked.asked() == 2


# ---- what is asked again


def test_another_share_of_the_device_chooses_anew(asked: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    what = spec(*CLUSTERS)
    whole = plan_of_a_new_process(what)
    assert whole.cluster > 1
    assert asked.asked() == 1
    plan_of_a_new_process(what)
    assert asked.asked() == 0
    clusters = devices.active_clusters

    monkeypatch.setattr(devices, "active_clusters", lambda *given: clusters(*given) // 2)
    share = plan_of_a_new_process(what)

    assert asked.asked() == 1
    assert share.resident_blocks == whole.resident_blocks // 2
    monkeypatch.setattr(devices, "active_clusters", clusters)
    assert plan_of_a_new_process(what) == whole


def test_a_share_without_clusters_leaves_nothing_for_the_whole_device(
    asked: Planner, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    what, clusters = spec(*CLUSTERS), devices.active_clusters
    monkeypatch.setattr(devices, "active_clusters", lambda *_: 0)
    assert plan_of_a_new_process(what).cluster == 1
    assert kept(folder) == []

    monkeypatch.setattr(devices, "active_clusters", clusters)

    assert plan_of_a_new_process(what).cluster > 1


def test_a_plan_that_was_refused_at_its_launch_is_replaced_for_this_process_only(
    asked: Planner, folder: Path
) -> None:
    cupy = simulator.cupy
    x, gamma = (cupy.asarray(np.ones(shape, np.float16)) for shape in ((7, 8193), 8193))
    cupynorm.layer_norm(x, gamma, gamma)
    (usual,) = [found.plan for found in row_ops._launches.values()]
    assert usual.cooperative
    before = kept(folder)
    row_ops.forget()
    machine.share_refusal = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"

    with pytest.warns(UserWarning, match="at once"):
        cupynorm.layer_norm(x, gamma, gamma)
    assert [found.plan.cooperative for found in row_ops._launches.values()] == [False]
    assert kept(folder) == before

    machine.share_refusal = ""
    row_ops.forget()
    cupynorm.layer_norm(x, gamma, gamma)
    assert [found.plan for found in row_ops._launches.values()] == [usual]


# ---- plans that do not follow from the rules


def test_a_plan_that_is_asked_for_is_neither_kept_nor_replaced(asked: Planner, folder: Path) -> None:
    usual = plan_of_a_new_process()
    before = kept(folder)

    named = plan_of_a_new_process(wanted="uncached")
    forced = plan_of_a_new_process(wanted=named)

    assert named.variant == forced.variant == "uncached" != usual.variant
    assert kept(folder) == before
    assert plan_of_a_new_process() == usual


def test_a_tuned_plan_comes_before_one_that_is_kept(asked: Planner) -> None:
    what = spec()
    usual, named = plan_of_a_new_process(what), plan_of_a_new_process(what, "uncached")
    limits = devices.present_limits()
    place = tuned_plans.place(limits, devices.driver_version())
    entry = tuned_plans.Entry(tuned_plans.portable(named), 0.97, "2026-01-01T00:00:00+00:00")
    tuned_plans.store(place, {tuned_plans.key_of(what.types, what.problem, limits): entry})

    assert plan_of_a_new_process(what).variant == "uncached"
    tuned_plans.clear()
    assert plan_of_a_new_process(what) == usual


# ---- files


@pytest.fixture
def plan(asked: Planner) -> Plan:
    """Give a plan."""
    return plan_of_a_new_process()


def file_of(folder: Path) -> Path:
    (name,) = kept(folder)
    return folder / name


def test_torn_files_and_files_of_another_key_are_misses(plan: Plan, folder: Path) -> None:
    file = file_of(folder)
    name, whole = file.stem, file.read_bytes()
    assert chosen_plans.load(name) == plan
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert chosen_plans.load(name) is None, length
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert chosen_plans.load(name) is None, place
    other = cubins.key("other")
    (folder / f"{other}.plan").write_bytes(whole)
    assert chosen_plans.load(other) is None


@pytest.mark.parametrize(
    "change",
    [
        *({name: most + 1} for name, (_, most) in BOUNDS.items()),
        *({name: least - 1} for name, (least, _) in BOUNDS.items()),
        *({"variant": each} for each in ("nowhere", "", 1, None)),
        *({"vector": each} for each in ("8", 8.0, True, None)),
        *({"full": each} for each in (1, "true")),
        *({name: each} for name in ("rule", "why") for each in (None, 3)),
        {"waves": "1"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_whose_fields_are_no_plans_is_a_miss(plan: Plan, folder: Path, change: dict[str, Any]) -> None:
    name = file_of(folder).stem

    def stored(fields: Any) -> Plan | None:
        cubins.store_body(name, cubins.PLAN_SUFFIX, chosen_plans.MAGIC, json.dumps(fields).encode())
        return chosen_plans.load(name)

    assert stored(plan.as_dict()) == plan
    assert stored(plan.as_dict() | change) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"3", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_plan_is_a_miss(body: bytes) -> None:
    cubins.store_body(key(), cubins.PLAN_SUFFIX, chosen_plans.MAGIC, body)

    assert chosen_plans.load(key()) is None


def test_a_missing_field_is_a_miss(plan: Plan, folder: Path) -> None:
    name, fields = file_of(folder).stem, plan.as_dict()
    for field in fields:
        rest = {each: value for each, value in fields.items() if each != field}
        cubins.store_body(name, cubins.PLAN_SUFFIX, chosen_plans.MAGIC, json.dumps(rest).encode())
        found = chosen_plans.load(name)
        assert found is None, field


def test_a_kernel_and_a_plan_are_told_apart(plan: Plan, folder: Path) -> None:
    name = file_of(folder).stem
    file_of(folder).rename(folder / f"{name}{cubins.SUFFIX}")

    assert cubins.load(name) is None
    assert cubins.usage()[0] == 1


def test_plans_go_when_they_are_long_unused_as_kernels_do(plan: Plan, folder: Path) -> None:
    file = file_of(folder)
    os.utime(file, (0, 0))
    assert cubins.usage()[0] == 0  # of compiled kernels

    cubins.store(cubins.key("text"), cubins.Cubin(b"\x7fELF", "name", "NVRTC"))

    assert not file.exists()


def test_a_folder_that_others_can_write_is_not_used(asked: Planner, folder: Path) -> None:
    plan_of_a_new_process()
    folder.chmod(0o770)

    plan_of_a_new_process()

    assert asked.asked() == 2
    assert cache_folder.why_unusable(folder)
