"""Cubins on disk: what is kept, what is trusted, and that a kernel found there needs no compiler."""

from __future__ import annotations

import gc
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.runtime import cache_folder, compiler, cubins, devices, nvrtc
from cupynorm.tools import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

CUBIN = cubins.Cubin(b"\x7fELF" + bytes(range(256)), "_Z1fIfEvPT_", "NVRTC 13.0")
KEY = cubins.key("text", "f<float>")
OPTIONS = "-Ihere", "--std=c++17"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give each test a cache of its own."""
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", str(tmp_path / "cache"))
    for switch in compiler.CUPY_SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    return tmp_path / "cache" / "cubins"


def stored(folder: Path) -> Path:
    """Store the cubin and return its file."""
    assert cubins.store(KEY, CUBIN)
    return folder / f"{KEY}.cubin"


# ---- the folder


def test_the_folder_is_the_chosen_one_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("CUPYNORM_CACHE_DIR", "~/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder.folder() == Path("/home/somebody/chosen")

    monkeypatch.setenv("CUPYNORM_CACHE_DIR", "")
    assert cache_folder.folder() == Path("/xdg/cupynorm")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder.folder() == Path("/home/somebody/.cache/cupynorm")


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUPYNORM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)

    assert not cubins.store(KEY, CUBIN)
    assert cubins.load(KEY) is None
    assert list(tmp_path.iterdir()) == []
    assert "this user has no home" in cubins.why_unusable()


# ---- files


def test_what_was_stored_is_loaded() -> None:
    assert cubins.load(KEY) is None
    assert cubins.usage() == (0, 0)

    assert cubins.store(KEY, CUBIN)

    assert cubins.load(KEY) == CUBIN
    assert cubins.load(cubins.key("text", "f<double>")) is None
    files, size = cubins.usage()
    assert files == 1
    assert size > len(CUBIN.image)


def test_a_key_knows_where_its_parts_end() -> None:
    assert len({cubins.key("ab", "c"), cubins.key("a", "bc"), cubins.key("abc")}) == 3


def test_torn_files_of_every_length_are_misses(folder: Path) -> None:
    file = stored(folder)
    whole = file.read_bytes()

    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert cubins.load(KEY) is None, length


def test_a_flipped_bit_anywhere_is_a_miss(folder: Path) -> None:
    file = stored(folder)
    whole = file.read_bytes()

    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cubins.load(KEY) is None, place


@pytest.mark.parametrize("data", [b"", b"\x7fELF" * 100, b"\x93CUPYNE\x00" + bytes(100), b"\n" * 10000])
def test_foreign_files_are_misses_and_are_replaced(folder: Path, data: bytes) -> None:
    stored(folder).write_bytes(data)

    assert cubins.load(KEY) is None
    assert cubins.store(KEY, CUBIN)
    assert cubins.load(KEY) == CUBIN


def test_a_file_under_the_name_of_another_is_a_miss(folder: Path) -> None:
    other = cubins.key("other")
    stored(folder).rename(folder / f"{other}.cubin")

    assert cubins.load(other) is None


def test_a_folder_in_the_place_of_a_file_is_a_miss(folder: Path) -> None:
    (folder / f"{KEY}.cubin").mkdir(parents=True)
    folder.chmod(0o700)

    assert cubins.load(KEY) is None
    assert not cubins.store(KEY, CUBIN)
    assert [each.name for each in folder.iterdir()] == [f"{KEY}.cubin"]


def test_a_use_is_noted_once_a_day(folder: Path) -> None:
    file = stored(folder)
    for age, noted in ((3600, False), (2 * 86400, True)):
        before = int(time.time()) - age
        os.utime(file, (before, before))
        assert cubins.load(KEY) == CUBIN
        assert (file.stat().st_mtime > before) == noted


# ---- who is trusted


def test_only_the_owner_can_read_and_write(folder: Path) -> None:
    before = os.umask(0)
    try:
        file = stored(folder)
    finally:
        os.umask(before)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(folder: Path, mode: int) -> None:
    stored(folder)
    folder.chmod(mode)

    assert cubins.load(KEY) is None
    assert not cubins.store(KEY, CUBIN)
    assert cubins.why_unusable() == f"{folder} can be written by others"


def test_a_file_that_others_can_write_is_a_miss(folder: Path) -> None:
    stored(folder).chmod(0o620)

    assert cubins.load(KEY) is None


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    file = stored(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert cubins.load(KEY) is None

    folder.rename(tmp_path / "folder")
    folder.symlink_to(tmp_path / "folder")
    assert cubins.why_unusable() == f"{folder} is not a folder"


def test_what_belongs_to_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = stored(folder)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert cubins.load(KEY) is None
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)

    assert cubins.load(KEY) is None
    assert not cubins.store(KEY, CUBIN)
    assert cubins.why_unusable() == f"{folder} belongs to user {folder.stat().st_uid}"


def test_a_folder_that_cannot_be_made_keeps_nothing(folder: Path) -> None:
    folder.parent.write_text("a file")

    assert not cubins.store(KEY, CUBIN)
    assert cubins.load(KEY) is None
    assert "cannot be read" in cubins.why_unusable()


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(folder).unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)

    assert not cubins.store(KEY, CUBIN)
    assert list(folder.iterdir()) == []


# ---- how much is kept


def test_what_is_long_unused_goes_when_something_is_stored(folder: Path) -> None:
    file = stored(folder)
    ages = {"old.cubin": 91, "kept.cubin": 89, "dead.new": 1, "foreign": 1000}
    for name, days in ages.items():
        (folder / name).write_bytes(b"x")
        at = time.time() - days * 86400
        os.utime(folder / name, (at, at))
    (folder / "alive.new").write_bytes(b"x")

    stored(folder)

    assert {each.name for each in folder.iterdir()} == {file.name, "kept.cubin", "alive.new", "foreign"}


def test_the_longest_unused_go_until_the_rest_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = stored(folder).stat().st_size
    keys = [cubins.key(str(each)) for each in range(5)]
    for age, key in enumerate(keys, 1):
        cubins.store(key, CUBIN)
        at = time.time() - 1000 * age
        os.utime(folder / f"{key}.cubin", (at, at))
    monkeypatch.setattr(cubins, "MOST_BYTES", 3 * size)

    stored(folder)

    assert [cubins.load(key) is not None for key in keys] == [True, True, False, False, False]
    assert cubins.usage()[1] <= 3 * size


# ---- several at once

WRITE_AND_READ = """
from cupynorm.runtime import cubins
key, seen = cubins.key("shared"), 0
for turn in range(200):
    cubins.store(key, cubins.Cubin(b"\\x7fELF" + bytes([turn]) * 20000, "name", "NVRTC"))
    found = cubins.load(key)
    assert found is None or len(set(found.image[4:])) == 1 and len(found.image) == 20004
    seen += found is not None
print(seen)
"""


def test_processes_that_write_the_same_kernel_see_whole_ones_only(folder: Path) -> None:
    checkout = Path(cupynorm.__file__).parents[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE_AND_READ], cwd=checkout, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]

    said = [each.communicate()[0].strip() for each in started]

    assert said == ["200"] * 3
    assert [each.suffix for each in folder.iterdir()] == [".cubin"]


# ---- on the way to a kernel


class CompileException(Exception):  # noqa: N818  CuPy's name
    """As CuPy raises it."""


class Machine:
    """A CuPy and a driver that note what is asked of them. `refuses`: images that the driver does not load."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refuses: set[bytes] = set()
        self.attributes: dict[int, dict[int, int]] = {}  # of each function
        self.texts: list[str] = []
        self.pointers: Iterator[int] = itertools.repeat(5)
        self.image = CUBIN.image
        self.version = (13, 0)
        self.build = 13000
        self.static_shared = 1024
        self.cuda = types.SimpleNamespace(
            compiler=types.SimpleNamespace(compile_using_nvrtc=self.compile),
            nvrtc=types.SimpleNamespace(getVersion=lambda: self.version),
            function=types.SimpleNamespace(Module=lambda: Module(self)),
        )

    def compile(
        self, source: str, options: tuple[str, ...], *, name_expressions: tuple[str], cache_in_memory: bool
    ) -> tuple[bytes, dict[str, str]]:
        assert options == (*OPTIONS, "-ftz=true", *compiler.time_saving_options(self.version))
        assert cache_in_memory
        self.asked.append("compile")
        if "nonsense" in source:
            raise CompileException("row.cuh(3): error: nonsense")
        return self.image, {each: f"_Z{each}" for each in name_expressions}

    def RawModule(self, *, code: str, **_: Any) -> Any:  # noqa: N802
        self.asked.append("RawModule")
        self.texts.append(code)
        return types.SimpleNamespace(
            get_function=lambda _: types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=77))
        )

    def get_build_version(self) -> int:
        return self.build

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        self.attributes.setdefault(function, {})[attribute] = value

    def funcGetAttribute(self, attribute: int, _: int) -> int:  # noqa: N802
        return {1: self.static_shared, 3: 16, 4: 40}[attribute]


class Function:
    """As cupy.cuda.function.Function."""

    def __init__(self, ptr: int, module: Module) -> None:
        self.ptr, self.module = ptr, module


class Module:
    """As cupy.cuda.function.Module."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def load(self, image: bytes) -> None:
        self.machine.asked.append("load")
        if image in self.machine.refuses:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    def get_function(self, name: str) -> Any:
        self.machine.asked.append(name)
        return Function(next(self.machine.pointers), self)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Put a fake CuPy and driver in place."""
    found = Machine()
    monkeypatch.setattr(devices, "cupy", lambda: found)
    monkeypatch.setattr(devices, "driver", lambda: found)
    monkeypatch.setattr(devices, "present_limits", lambda: devices.RECORDED["h200"])
    monkeypatch.setattr(devices, "limits_of", lambda _: devices.RECORDED["h200"])
    monkeypatch.setattr(compiler, "options", lambda: OPTIONS)
    monkeypatch.setattr(compiler, "_kernels", compiler.Kernels())
    return found


def kernel_of_a_new_process(
    code: str = "text", shared_limit: int = 0, expression: str = "f<float>"
) -> compiler.Kernel:
    """Load a kernel as a process does that remembers nothing."""
    with compiler.Kernels():
        return compiler.kernel(0, code, expression, shared_limit)


def test_a_miss_compiles_and_a_hit_does_not(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel_of_a_new_process()
    assert machine.asked == ["compile", "load", "_Zf<float>"]

    machine.asked.clear()
    monkeypatch.delattr(machine.cuda, "nvrtc")  # whoever asks for NVRTC now would load it
    monkeypatch.delattr(machine.cuda, "compiler")
    second = kernel_of_a_new_process(shared_limit=1000)

    assert machine.asked == ["load", "_Zf<float>"]
    assert first[:3] == second[:3] == (5, 40, 16)
    assert second.module.module is not None
    assert machine.attributes == {5: {8: 1000, 9: 100}}


@pytest.mark.parametrize("static", [0, STATIC_SHARED_BYTES, STATIC_SHARED_BYTES + 160])
def test_static_shared_memory_beyond_what_is_kept_back_lessens_the_limit(
    machine: Machine, static: int
) -> None:
    """The driver refuses a limit that, with a kernel's static shared memory, is more than a block may have."""
    machine.static_shared = static
    most = devices.RECORDED["h200"].shared_bytes_per_block
    limits = []
    for asked in (most, 10_000):
        kernel_of_a_new_process(shared_limit=asked)
        limits.append(machine.attributes[5][8])

    assert limits == [most - max(0, static - STATIC_SHARED_BYTES), 10_000]


def test_the_file_says_who_compiled_it(machine: Machine, folder: Path) -> None:
    kernel_of_a_new_process()

    (file,) = folder.iterdir()

    assert b"NVRTC 13.0" in file.read_bytes()


@pytest.mark.parametrize("change", ["text", "options", "device", "cupy", "build", "wheel", "toolkit"])
def test_whatever_changes_the_code_is_compiled_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    kernel_of_a_new_process()
    machine.asked.clear()

    if change == "options":
        monkeypatch.setattr(compiler, "options", lambda: ("-Ithere",))
        monkeypatch.setattr(sys.modules[__name__], "OPTIONS", ("-Ithere",))
    elif change == "device":
        monkeypatch.setattr(devices, "present_limits", lambda: devices.RECORDED["a100"])
    elif change == "cupy":
        monkeypatch.setattr(Machine, "__version__", "14.3.0")
    elif change == "build":
        machine.build = 12090
    elif change == "wheel":
        monkeypatch.setattr(compiler, "_nvrtc_wheel", lambda major: "Version: 1")
    elif change == "toolkit":
        monkeypatch.setenv("CUDA_PATH", "/another")
    kernel_of_a_new_process("other" if change == "text" else "text")

    assert machine.asked[0] == "compile"


def test_a_cubin_that_the_driver_refuses_is_compiled_anew_and_replaced(machine: Machine) -> None:
    kernel_of_a_new_process()
    machine.asked.clear()
    machine.refuses.add(machine.image)
    machine.image = b"\x7fELF of an older compiler"

    kernel_of_a_new_process()
    assert machine.asked == ["load", "compile", "load", "_Zf<float>"]

    machine.asked.clear()
    kernel_of_a_new_process()
    assert machine.asked == ["load", "_Zf<float>"]


def test_ptx_is_loaded_and_not_kept(machine: Machine) -> None:
    machine.image = b".version 9.0\n"

    kernel_of_a_new_process()

    assert machine.asked == ["compile", "load", "_Zf<float>"]
    assert cubins.usage() == (0, 0)


def test_a_cache_that_cannot_be_written_changes_nothing_else(machine: Machine, folder: Path) -> None:
    folder.parent.write_text("a file")

    assert kernel_of_a_new_process().pointer == kernel_of_a_new_process().pointer == 5
    assert machine.asked == ["compile", "load", "_Zf<float>"] * 2


@pytest.mark.parametrize("switch", compiler.CUPY_SWITCHES)
def test_what_cupy_is_told_to_do_otherwise_is_left_to_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(switch, "1")

    assert kernel_of_a_new_process().pointer == 77
    assert machine.asked == ["RawModule"]
    assert cubins.usage() == (0, 0)


def test_a_cupy_that_we_do_not_know_compiles_by_itself(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(machine.cuda, "compiler")

    assert kernel_of_a_new_process().pointer == 77
    assert machine.asked == ["RawModule"]


@pytest.mark.parametrize(
    ("version", "asked"), [((12, 0), ()), ((12, 3), ()), ((12, 4), ("--minimal",)), ((13, 0), ("--minimal",))]
)
def test_the_compiler_is_asked_for_no_option_that_it_does_not_know(
    machine: Machine, version: tuple[int, int], asked: tuple[str, ...]
) -> None:
    machine.version = version

    assert compiler.time_saving_options(version) == asked
    kernel_of_a_new_process("text")
    assert machine.asked[0] == "compile"  # which looks at the options


def test_a_compiler_error_is_told_once_with_its_log(machine: Machine) -> None:
    with pytest.raises(compiler.CompileError, match=r"(?s)f<float>.*row\.cuh\(3\): error: nonsense"):
        kernel_of_a_new_process("nonsense")

    assert machine.asked == ["compile"]
    assert cubins.usage() == (0, 0)


def test_different_kernels_compile_at_once_and_each_only_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=20)
    original = machine.compile

    def compile_together(*given: Any, **named: Any) -> Any:
        together.wait()  # passes only if another kernel is being compiled meanwhile
        return original(*given, **named)

    monkeypatch.setattr(machine.cuda.compiler, "compile_using_nvrtc", compile_together)
    found = []
    threads = [
        threading.Thread(target=lambda code=code: found.append(compiler.kernel(0, code, "f<float>", 0)))
        for code in ("one", "two") * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    assert machine.asked.count("compile") == 2


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Make a folder of two sources that nobody has written to for a while, and another file."""
    (tmp_path / "sources" / "row").mkdir(parents=True)
    for name in ("row/a.cuh", "b.cu", "c.txt"):
        (tmp_path / "sources" / name).write_text(name)
    return tmp_path / "sources"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """List the files whose contents are hashed. What was written here is settled at once."""
    found: list[list[str]] = []
    whole = compiler._digest_of_contents

    def counted(folder: str, names: Any) -> str:
        found.append(list(names))
        return whole(folder, names)

    monkeypatch.setattr(compiler, "_digest_of_contents", counted)
    monkeypatch.setattr(compiler, "SETTLED_NS", 0)
    return found


ENDINGS = (".cu", ".cuh")


@pytest.mark.skipif(os.name != "posix", reason="digests are kept where a file has a number")
def test_sources_that_have_not_changed_are_hashed_once(sources: Path, reads: list[list[str]]) -> None:
    first = compiler.digest_of(str(sources), ENDINGS)

    assert compiler.digest_of(str(sources), ENDINGS) == first
    assert reads == [["/b.cu", "/row/a.cuh"]]
    (sources / "c.txt").write_text("of no concern")
    assert compiler.digest_of(str(sources), ENDINGS) == first
    assert len(reads) == 1
    assert cubins.usage()[0] == 0  # of compiled kernels


@pytest.mark.parametrize("change", ["contents", "in place, at the same time", "name", "another file", "gone"])
def test_sources_that_have_changed_have_another_digest(
    sources: Path, reads: list[list[str]], change: str
) -> None:
    before = compiler.digest_of(str(sources), ENDINGS)
    file = sources / "row" / "a.cuh"
    about = file.stat()
    time.sleep(0.02)  # a file system's clock may tick every 10 ms
    if change == "contents":
        file.write_text("row/a.cu2")
    elif change == "in place, at the same time":
        file.write_text("row/a.cu2")
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif change == "name":
        file.rename(file.with_name("d.cuh"))
    elif change == "another file":
        (sources / "d.cu").write_text("")
    else:
        file.unlink()

    assert compiler.digest_of(str(sources), ENDINGS) != before
    assert len(reads) == 2


@pytest.mark.parametrize("why", ["just written", "the folder", "CuPy's switches"])
def test_digests_are_kept_only_where_they_may_be(
    sources: Path, reads: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "just written":
        monkeypatch.setattr(compiler, "SETTLED_NS", 10**12)
    elif why == "the folder":
        monkeypatch.setenv("CUPYNORM_CACHE_DIR", os.devnull)
    else:
        monkeypatch.setenv(compiler.CUPY_SWITCHES[0], "1")

    same = {compiler.digest_of(str(sources), ENDINGS) for _ in range(2)}

    assert len(same) == 1
    assert len(reads) == 2
    assert not folder.exists()


def test_a_damaged_digest_is_found_anew(sources: Path, reads: list[list[str]], folder: Path) -> None:
    first = compiler.digest_of(str(sources), ENDINGS)
    (file,) = folder.glob("*.digest")
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    assert compiler.digest_of(str(sources), ENDINGS) == first
    assert len(reads) == 2


def test_the_wheel_of_nvrtc_is_found_by_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    info = tmp_path / "nvidia_cuda_nvrtc-13.1.2.dist-info"
    info.mkdir()
    (tmp_path / "nvidia_cuda_nvrtc_more-1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(tmp_path)])

    assert [compiler._nvrtc_wheel.__wrapped__(major) for major in (12, 13, 14)] == ["", "Version: 13.1.2", ""]


@pytest.mark.skipif(
    "90" not in nvrtc.supported_archs(), reason="NVRTC, which compiles for sm_90, is not installed"
)
def test_a_real_cubin_comes_back_with_the_name_that_it_holds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "namespace n { template <class T> __global__ void f(T* y) { *y = 1; } }"
    loaded = []

    def compile_by_nvrtc(source: str, options: Any, *, name_expressions: Any, **_: Any) -> Any:
        (expression,) = name_expressions
        added = ("-ftz=true", *compiler.time_saving_options(machine.version))  # which _nvrtc adds itself
        cubin = nvrtc.compile(source, expression, [each for each in options if each not in added])
        return cubin.image, {expression: cubin.lowered_name}

    monkeypatch.setattr(compiler, "options", lambda: ("--std=c++17",))
    monkeypatch.setattr(machine.cuda.compiler, "compile_using_nvrtc", compile_by_nvrtc)
    monkeypatch.setattr(Module, "load", lambda _, image: loaded.append(image))
    for _ in range(2):
        kernel_of_a_new_process(code, expression="n::f<float>")

    name = "_ZN1n1fIfEEvPT_"
    assert machine.asked == [name, name]
    assert loaded[0] == loaded[1]
    assert loaded[0].startswith(b"\x7fELF")
    assert f".text.{name}".encode() in loaded[0]


# ---- what doctor and info say


def test_doctor_says_where_the_kernels_are(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = stored(folder)

    finding = environment._check_cubins()

    assert finding.message == f"1 compiled kernel, {file.stat().st_size} bytes, in {folder}"
    assert environment.info()["cubins"] == {
        "folder": str(folder),
        "files": 1,
        "bytes": file.stat().st_size,
    }


def test_doctor_warns_of_a_folder_that_is_not_used(folder: Path) -> None:
    stored(folder)
    folder.chmod(0o777)

    finding = environment._check_cubins()

    assert finding.status == "warning"
    assert finding.message.startswith(f"{folder} can be written by others: every process compiles anew")
    assert finding.fix.startswith("export CUPYNORM_CACHE_DIR=")


def test_doctor_warns_of_a_folder_that_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)

    finding = environment._check_cubins()

    assert finding.status == "warning"
    assert f"{folder.parents[1]} cannot be written" in finding.message


# ---- what a kernel is prepared with


LIMIT, CLUSTER_WIDTH = 8, 11  # CU_FUNC_ATTRIBUTE_*


def test_a_kernel_that_wants_other_shared_memory_or_clusters_is_another_function(machine: Machine) -> None:
    machine.pointers = itertools.count(5)

    little, much, clustered = (
        compiler.kernel(0, "text", "f<float>", limit, cluster)
        for limit, cluster in ((0, 1), (60000, 1), (60000, 4))
    )

    assert len({little.pointer, much.pointer, clustered.pointer}) == 3
    assert LIMIT not in machine.attributes.get(little.pointer, {})
    assert machine.attributes[much.pointer][LIMIT] == 60000
    assert CLUSTER_WIDTH not in machine.attributes[much.pointer]
    assert machine.attributes[clustered.pointer][CLUSTER_WIDTH] == 4
    assert machine.asked.count("compile") == 1  # the code is the same


def test_kernels_that_cupy_compiles_do_not_share_a_module_either(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_COMPILE_WITH_PTX", "1")

    for limit, cluster in ((0, 1), (60000, 1), (60000, 4)):
        compiler.kernel(0, "text", "f<float>", limit, cluster)

    assert len(set(machine.texts)) == 3  # CuPy knows modules by their texts


def test_an_option_of_the_compiler_is_part_of_the_key_on_disk(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_of_a_new_process()
    monkeypatch.setattr(compiler, "TIME_SAVING_OPTIONS", ())

    kernel_of_a_new_process()

    assert machine.asked.count("compile") == 2


# ---- what stays loaded


def test_forgetting_leaves_kernels_loaded_for_the_graphs_that_hold_them(machine: Machine) -> None:
    kernel = compiler.kernel(0, "text", "f<float>", 0)
    unloaded = weakref.ref(kernel.module)
    del kernel

    row_ops.forget()
    gc.collect()

    assert unloaded() is not None
    assert compiler.kernel(0, "text", "f<float>", 0).module is unloaded()


def test_what_an_owner_of_kernels_loads_is_his_alone_and_goes_with_him(machine: Machine) -> None:
    everyones = compiler.kernel(0, "text", "f<float>", 0)
    own = compiler.Kernels()
    with own:
        assert compiler.kernel(0, "text", "f<float>", 0) is everyones
        his = compiler.kernel(0, "text", "g<float>", 0)
        assert compiler.kernel(0, "text", "g<float>", 0) is his
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(compiler.kernel, 0, "text", "g<float>", 0).result() is not his
    unloaded = weakref.ref(his.module)

    del own, his
    gc.collect()

    assert unloaded() is None
    assert compiler.kernel(0, "text", "f<float>", 0) is everyones
