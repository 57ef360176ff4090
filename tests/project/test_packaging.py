"""What ships: the wheel holds the package and its CUDA sources, and works where it is installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import cupynorm
from cupynorm import _install
from cupynorm.catalog import op_table
from cupynorm.runtime import compiler
from tests.pages import PAGES

CHECKOUT = Path(__file__).parents[2]
EXTRAS = ["cuda12", "cuda13"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    build = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=CHECKOUT, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"cupynorm-{cupynorm.__version__}.dist-info/METADATA").decode()
    message = Parser().parsestr(text)
    found = {name: [str(value) for value in message.get_all(name) or ()] for name in message.keys()}  # noqa: SIM118
    return {**found, "Description": [str(message.get_payload())]}


def under(folder: Path, pattern: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(pattern)}


def name_of(requirement: str) -> str:
    """Return "cupy-cuda12x" for "cupy-cuda12x<15,>=14.2; ..."."""
    return re.split(r"[^\w.-]", requirement)[0]


def test_catalog_names_sources_that_are_there() -> None:
    for op in op_table.OPS:
        assert (compiler.kernels_dir() / op.source).is_file()


def test_wheel_holds_the_package_its_kernels_and_the_licence_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    python = {f"cupynorm/{name}" for name in under(CHECKOUT / "cupynorm", "*.py")}
    kernels = {f"cupynorm/kernels/{name}" for name in under(CHECKOUT / "kernels", "*.cu*")}
    data = {f"cupynorm/{name}" for name in under(CHECKOUT / "cupynorm", "*.json")}
    typed = {"cupynorm/py.typed"}
    information = {name for name in names if ".dist-info/" in name}
    assert kernels
    assert data == {f"cupynorm/plan/data/{name}.json" for name in ("lowering", "sm_90")}
    assert names == python | kernels | data | typed | information
    assert any(name.endswith("/LICENSE") for name in information)


def test_what_the_simulator_alone_needs_does_not_ship() -> None:
    kernels = CHECKOUT / "kernels"

    assert [
        name for name in under(kernels, "*.cu*") if "simulator::" in (kernels / name).read_text("utf-8")
    ] == []


def test_the_source_distribution_is_typed_and_has_the_documents(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling, which builds it, is not installed")
    build = f"from hatchling.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=CHECKOUT, check=True)
    (path,) = tmp_path.glob("*.tar.gz")

    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "cupynorm/py.typed" in names
    assert {page.relative_to(CHECKOUT).as_posix() for page in PAGES} <= names  # with what they link to
    assert "benchmarks/h200/bandwidth-float16.svg" in names


def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)  # noqa: S202  a zip file that was just built
    code = """if True:
        import numpy, cupynorm
        from cupynorm.plan.rules import rules_of
        from cupynorm.runtime import compiler
        print(compiler.kernels_dir(), compiler.digest(), cupynorm.softmax(numpy.zeros((1, 2)))[0, 0])
        print(rules_of("90").file)
    """

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == [
        str(tmp_path / "cupynorm" / "kernels"),
        compiler.digest(),
        "0.5",
        "plan/data/sm_90.json",
    ]


def test_plain_install_needs_numpy_and_click_only(metadata: dict[str, list[str]]) -> None:
    plain = [need for need in metadata["Requires-Dist"] if "extra ==" not in need]

    assert sorted(map(name_of, plain)) == ["click", "numpy"]
    assert metadata["Requires-Python"] == [">=3.10"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_one_cupy_and_its_compiler(metadata: dict[str, list[str]], extra: str) -> None:
    needs = [need for need in metadata["Requires-Dist"] if f"extra == '{extra}'" in need]

    assert metadata["Provides-Extra"] == [*EXTRAS, "numba", "plot", "text"]
    assert [name_of(need) for need in needs if need.startswith("cupy")] == [f"cupy-{extra}x"]
    assert sum("nvrtc" in need for need in needs) == 1
    assert all("sys_platform != 'darwin'" in need for need in needs)


def test_what_texts_need_is_an_extra_that_brings_no_framework(metadata: dict[str, list[str]]) -> None:
    needs = [need for need in metadata["Requires-Dist"] if "extra == 'text'" in need]

    assert sorted(map(name_of, needs)) == ["safetensors", "tokenizers"]


@pytest.mark.parametrize("extra", [*EXTRAS, "numba", "plot", "text"])
def test_messages_name_what_an_extra_consists_of(metadata: dict[str, list[str]], extra: str) -> None:
    needs = [need.partition(";")[0] for need in metadata["Requires-Dist"] if f"extra == '{extra}'" in need]

    def parts(requirement: str) -> tuple[str, frozenset[str]]:
        name = name_of(requirement)
        return name.replace("_", "-"), frozenset(requirement[len(name) :].strip().split(",")) - {""}

    assert {*map(parts, needs)} == {*map(parts, _install.EXTRAS[extra])}
    command = shlex.split(_install.pip_install(extra))
    assert command == ["pip", "install", *_install.EXTRAS[extra]]


def test_no_message_installs_what_no_index_has() -> None:
    for path in (CHECKOUT / "cupynorm").glob("*.py"):
        assert "cupynorm[" not in path.read_text("utf-8"), path.name


def test_plots_and_bfloat16_have_their_packages_where_scripts_run(metadata: dict[str, list[str]]) -> None:
    text = (CHECKOUT / "pyproject.toml").read_text("utf-8")

    demo = re.search(r"^demo = \[(.*)\]", text, re.MULTILINE)
    assert demo
    assert {'"matplotlib>=3.9"', '"ml_dtypes>=0.5"'} <= set(demo[1].split(", "))
    assert '{ include-group = "demo" }' in text
    assert all(">=0.5" in need for need in metadata["Requires-Dist"] if re.match("ml.dtypes", need))


def test_the_description_of_the_package_stands_alone(metadata: dict[str, list[str]]) -> None:
    description = metadata["Description"][0]

    assert metadata["Description-Content-Type"] == ["text/markdown"]
    targets = re.findall(r"\]\(([^)\s]*)\)", description)
    assert [each for each in targets if not each.startswith(("https://", "http://"))] == []
    assert "# cupynorm\n" in description
    assert "Masks, and what other libraries call them: docs/masks.md" in re.sub(r"\s+", " ", description)
    assert "![" not in description or "](https://" in description


def test_classifiers_name_the_versions_of_python_and_the_types(metadata: dict[str, list[str]]) -> None:
    versions = [
        each.rpartition(" ")[2]
        for each in metadata["Classifier"]
        if each.startswith("Programming Language :: Python :: 3.")
    ]

    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    assert "Typing :: Typed" in metadata["Classifier"]


def test_editable_install_reads_the_checkout() -> None:
    try:
        files = importlib.metadata.files("cupynorm") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cupynorm is not installed: the bare checkout is what is tested")

    assert not any(str(path).endswith((".cu", ".cuh")) for path in files)
    assert compiler.kernels_dir() == CHECKOUT / "kernels"
