"""scripts/same sees what changes between two commits, and judges it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import struct
import subprocess
from pathlib import Path

import pytest

from cupynorm.runtime import nvrtc
from scripts import same, same_answers
from tests import same_adapter

CHECKOUT = Path(__file__).parents[2]
KERNELS = ("--kernels", "--part=sweep", "--only=sweep: rms_norm float16 49152 x (4096|8192) ")
PLANS = ("--plans", "--only=^rms_norm float(16|32) 8192 x (512|1024) ")
CALLS = 2 * 3  # for each width in halves, also with parameters in float, and in floats

needs_compiler = pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def copy(tmp_path):
    """Make a copy of the checkout, or of what matters here."""
    for name in ("cupynorm", "kernels", "tests"):
        others = () if name == "cupynorm" else ("data",)  # the planner's rules are data of the package
        ignored = shutil.ignore_patterns(
            "gpu", "simulator", *others
        )  # what is compiled of Python is as good there
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=ignored)
    return tmp_path


@pytest.fixture
def compare(copy, cache, capfd):
    """Compare the checkout with the copy: return the exit status and what was printed."""

    def run(*options):
        status = same.main([".", f"{copy}/", f"--cache={cache}", *map(str, options)])
        return status, capfd.readouterr().out

    return run


def count(cache):
    """Count what was compiled."""
    with contextlib.closing(sqlite3.connect(cache / "kernels.sqlite")) as file:
        return file.execute("SELECT count(*) FROM kernels").fetchone()[0]


def plant(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


IN_FINISH = "    return {reciprocal_root(row.sum * one_of<T>(cols) + eps)};\n"
ONE_INSTRUCTION = '    asm volatile("nanosleep.u32 1;");\n'
LOCAL_MEMORY = (
    "    volatile T planted[64];\n    planted[int(cols) & 63] = row.sum;\n"
    "    row.sum = planted[int(cols) & 31];\n"
)


@needs_compiler
def test_identical_trees_pass_and_a_comment_compiles_nothing_again(copy, compare, cache):
    status, told = compare(*KERNELS)

    assert status == 0
    assert "kernels: 2 in both, 2 identical" in told

    known = count(cache)
    plant(copy / "kernels" / "ops" / "rms_norm.cuh", IN_FINISH, "    // a comment\n" + IN_FINISH)

    status, told = compare(*KERNELS)

    assert (status, count(cache)) == (0, known)
    assert "kernels: 2 in both, 2 identical" in told


@needs_compiler
def test_one_instruction_more_is_seen_allowed_and_listed(copy, compare, tmp_path):
    plant(copy / "kernels" / "ops" / "rms_norm.cuh", IN_FINISH, ONE_INSTRUCTION + IN_FINISH)

    status, told = compare(*KERNELS, "--json", tmp_path / "changed.json")

    changed = json.loads((tmp_path / "changed.json").read_text())["changed"]
    assert status == 0
    assert "2 allowed" in told
    assert "to be timed on a device" in told
    assert [each["verdict"] for each in changed] == ["allowed"] * 2
    assert all(each["after"]["instructions"] == each["before"]["instructions"] + 1 for each in changed)
    assert {(call["form"], call["rows"], call["cols"]) for each in changed for call in each["calls"]} == {
        ("rms_norm", 49152, 4096),
        ("rms_norm", 49152, 8192),
    }


@needs_compiler
def test_local_memory_is_refused(copy, compare):
    plant(copy / "kernels" / "ops" / "rms_norm.cuh", IN_FINISH, LOCAL_MEMORY + IN_FINISH)

    status, told = compare(*KERNELS)

    assert status == 1
    assert "2 refused" in told
    assert "local bytes 0 -> 256" in told
    assert "keeps more in local memory" in told


@needs_compiler
def test_what_does_not_compile_is_refused_and_the_others_are_not(copy, compare):
    plant(
        copy / "kernels" / "ops" / "rms_norm.cuh",
        IN_FINISH,
        '    static_assert(sizeof(Cols) == 0, "no");\n' + IN_FINISH,
    )

    status, told = compare(
        "--kernels", "--part=sweep", "--only=sweep: (rms_norm|softmax) float16 49152 x 512 "
    )

    assert status == 1
    assert "1 identical" in told
    assert "1 refused" in told
    assert "does not compile" in told


@needs_compiler
def test_kernels_that_are_gone_are_refused_unless_plans_may_differ(copy, compare):
    plant(
        copy / "tests" / "same_adapter.py",
        "{call.cols}{place}",
        "{call.cols if call.cols != 512 else 0}{place}",
    )

    given = ("--kernels", "--part=sweep", "--only=sweep: rms_norm float16 49152 x (0|512|8192) ")
    status, told = compare(*given)

    assert status == 1
    assert "1 in both, 1 identical" in told
    assert "1 labels before only, 1 after only" in told
    assert compare(*given, "--allow-plans")[0] == 0


def test_the_same_plans_pass(compare):
    status, told = compare(*PLANS)

    assert status == 0
    assert "differ in" not in told
    assert f"plans: {CALLS * len(same_adapter.DEVICES)} compared, 0 differ" in told


PLANTED = """

import dataclasses

_as_before = choose


def choose(problem, limits, occupancy, forced=None):
    plan = _as_before(problem, limits, occupancy, forced)
    return dataclasses.replace(plan, block=2 * plan.block) if problem.cols == 512 else plan
"""


def test_another_plan_is_seen_and_allowed_only_when_asked_for(copy, compare):
    with (copy / "cupynorm" / "plan" / "choose.py").open("a") as file:
        file.write(PLANTED)

    status, told = compare(*PLANS)

    count = CALLS // 2 * len(same_adapter.DEVICES)
    assert status == 1
    assert f"{count} plans differ in block\n" in told
    assert "form=rms_norm" in told
    assert compare(*PLANS, "--allow-plans")[0] == 0


def test_the_sweep_of_plans_holds_every_variant_and_no_call_that_fails():
    seen = set()
    for call in same_answers.calls(" float16 (1|8192) x (100|768|5001|[0-9]{5,}) "):
        for plan in same_adapter.plans(same_adapter.Call(**call)).values():
            assert "error" not in plan, (call, plan)
            seen.add(plan.get("variant"))

    assert seen >= {"warp", "block", "cached", "cluster", "split", "shared"}


def test_the_sweep_of_plans_is_as_large_as_is_said():
    each = [json.dumps(call) for call in same_answers.calls()]

    assert len(each) == len(set(each))
    text = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8")
    (said,) = re.findall(r"\*\*Plans\*\*: about ([\d,]+), of ([\d,]+) calls", text)
    plans, calls = (int(number.replace(",", "")) for number in said)
    assert len(each) == pytest.approx(calls, rel=0.05)
    assert len(each) * len(same_adapter.DEVICES) == pytest.approx(plans, rel=0.05)


@needs_compiler
def test_labels_of_kernels_are_unique():
    for part in ("gate log_softmax", "gate fused add_layer_norm", "gate fused logsumexp", "gate others"):
        kernels = list(same_adapter.kernels(part))
        assert kernels
        assert len({kernel.label for kernel in kernels}) == len(kernels), part


def test_what_calls_launch_has_labels_of_its_own_and_every_kernel_of_rows():
    kernels = [kernel for part in ("sweep", "axes") for kernel in same_adapter.kernels(part)]

    assert len({kernel.label for kernel in kernels}) == len(kernels)
    text = "".join(path.read_text("utf-8") for path in sorted((CHECKOUT / "kernels" / "row").glob("*.cuh")))
    functions = set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", text))
    assert "row_across" in functions
    assert text.count("__global__ void") == len(functions)
    listed = {kernel.expression.partition("<")[0].removeprefix("cupynorm::") for kernel in kernels}
    assert functions <= listed


def test_calls_that_a_commit_cannot_describe_are_not_compared():
    def side(plans):
        return iter([f'{{"rows": 1}}\t{json.dumps(plans)}\n', '{"rows": 2}\t{"h200": {"block": 128}}\n'])

    unknown = {"none": {"error": "this commit does not know such calls"}}
    known = {"h200": {"block": 256}}

    for before, after in ((unknown, known), (known, unknown), (unknown, unknown)):
        assert same.compare_plans(side(before), side(after)) == (1, [])
    assert same.compare_plans(side(known), side(known)) == (2, [])


def record(**changes):
    numbers = {"code": "a", "instructions": 1000, "registers": 32, "local_bytes": 0}
    return {**numbers, "shared_bytes": 0, "resident_blocks": 4, "block": 256, "plan": {}, **changes}


@pytest.mark.parametrize(
    ("changes", "what", "reason"),
    [
        ({}, "identical", ""),
        ({"plan": {"waves": 2}}, "identical", ""),  # of the launch alone
        ({"code": "b"}, "allowed", ""),
        ({"code": "b", "instructions": 1015}, "allowed", ""),
        ({"code": "b", "instructions": 1016}, "refused", "more instructions"),
        ({"code": "b", "instructions": 500}, "allowed", ""),
        ({"code": "b", "registers": 40}, "allowed", ""),
        ({"code": "b", "registers": 72, "resident_blocks": 3}, "refused", "fewer blocks"),
        ({"shared_bytes": 1024}, "allowed", ""),
        ({"code": "b", "local_bytes": 8}, "refused", "local memory"),
        ({"code": "b", "plan": {"vectors": 2}}, "planned otherwise", "vectors None -> 2"),
        ({"error": "line 1"}, "refused", "line 1"),
    ],
)
def test_what_is_allowed(changes, what, reason):
    verdict = same.judge(record(), record(**changes))

    assert verdict.what == what
    assert reason in "; ".join(verdict.reasons)


def test_instructions_are_counted_without_what_fills_the_end():
    nop, other = struct.pack("<QQ", 0x7918, 0xFC0), struct.pack("<QQ", 0x794D, 0)

    assert same_answers.instructions(other * 5 + nop * 3) == 5


def test_kernels_share_a_module_only_where_their_texts_may():
    def kernel(text, arch="90"):
        return {"text": text, "arch": arch}

    plain = "#include <a.cuh>\nstatic_assert(true);\n"
    own = "#include <a.cuh>\nstruct Function_1 {};\n"
    each = [kernel(plain + " "), kernel(plain), kernel(own), kernel(own + "\n"), kernel(plain, "90a")]

    found = same_answers.batches(each * 20)

    assert all(len({one["arch"] for one in batch}) == 1 for batch in found)
    assert all(len({one["text"] for one in batch if "Function" in one["text"]}) <= 1 for batch in found)
    assert sum(map(len, found)) == 100


def test_a_change_in_a_header_concerns_who_includes_it(tmp_path):
    (tmp_path / "a.cu").write_text("#include <b.cuh>\nint a;")
    (tmp_path / "b.cuh").write_text("int b; // comment\n")
    (tmp_path / "c.cuh").write_text("int c;\n")
    texts = ("#include <a.cu>\n", "#include <c.cuh>\n")
    before = [same_answers.Sources(tmp_path).digest(text) for text in texts]

    (tmp_path / "b.cuh").write_text("int b = 1;\n")
    after = [same_answers.Sources(tmp_path).digest(text) for text in texts]

    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.parametrize(
    ("before", "after", "alike"),
    [
        ("int a; // one", "int a; /* another */", True),
        ("int a;", "int  a ;", False),
        ("#pragma unroll\nint a;", "int a;", False),
        ("#pragma once\nint a;", "int a;", False),
        ("#ifdef A\nint a;\n#endif", "#ifdef A\nint b;\n#endif", False),
        ("#if 0\nint a;\n#endif", "#if 0\nint b;\n#endif", False),
        ("#define A 1", "#define A 2", False),
        ('char a[] = "// 1";', 'char a[] = "// 2";', False),
        ("int a = __LINE__; // 1", "int a = __LINE__; // 2", False),
    ],
)
def test_only_comments_are_left_out_of_what_is_compared(tmp_path, before, after, alike):
    if shutil.which("g++") is None:
        pytest.skip("g++, which finds comments, is not installed")
    digests = []
    for text in (before, after):
        (tmp_path / "a.cuh").write_text(text)
        digests.append(same_answers.Sources(tmp_path).digest("#include <a.cuh>\n"))

    assert (digests[0] == digests[1]) == alike


def in_git() -> bool:
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    return (
        shutil.which("git") is not None and not subprocess.run(command, cwd=CHECKOUT, check=False).returncode
    )


@pytest.mark.skipif(not in_git(), reason="this is no checkout of git")
def test_a_revision_is_copied_and_gets_an_adapter_if_it_has_none():
    with same.tree("HEAD") as folder:
        assert folder != CHECKOUT
        assert (folder / "cupynorm" / "__init__.py").is_file()
        assert (folder / same.ADAPTER).is_file()
    assert not folder.exists()


@pytest.mark.skipif(not in_git(), reason="this is no checkout of git")
def test_an_unknown_revision_is_named():
    with pytest.raises(SystemExit, match="no-such-thing is no revision"), same.tree("no-such-thing"):
        pass
