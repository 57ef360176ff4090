"""The binding of NVRTC, and that the build gate's eyes are open: planted faults are seen."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections import Counter

import pytest

from cupynorm.ops.norm import LAYER_NORM
from cupynorm.plan.config import CONVERTED
from cupynorm.runtime import nvrtc
from tests.build_gate import (
    Code,
    disassemble,
    narrow_accesses,
    nvdisasm,
    read_ptx,
    same_types,
    spills,
    widest_instances,
    width_of,
)

pytestmark = pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
needs_nvdisasm = pytest.mark.skipif(
    nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)"
)

COPY = """
template <typename T>
__global__ void copy(const T* __restrict__ x, T* y) { y[threadIdx.x] = x[threadIdx.x]; }
"""

# 96 values, all needed after the barrier: they cannot wait in the 64 registers that 1024 threads leave each
SPILLING = """
__global__ void __launch_bounds__(1024) spilling(float* x, int n) {
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * n + 1] = a[95 - i] * a[i];
}
"""

INDEXED = """
__global__ void indexed(float* x, int n) {
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = x[i * n];
  for (int i = 0; i < n; ++i) a[i * n & 63] += a[i & 63];  // registers cannot be indexed
  x[0] = a[n & 63];
}
"""


def test_version_and_architectures_are_numbers_of_the_installed_majors() -> None:
    major, minor = nvrtc.available() or (0, 0)

    assert major == nvrtc.majors()[0]
    assert minor >= 0
    assert {"75", "90"} <= set(nvrtc.supported_archs())
    assert all(each.isdigit() for each in nvrtc.supported_archs(major))


def test_a_cubin_is_a_whole_elf_file() -> None:
    image = nvrtc.compile(COPY, "copy<float>").image

    assert image[:4] == b"\x7fELF"
    header_offset = int.from_bytes(
        image[40:48], "little"
    )  # e_shoff: the table of section headers may stand last
    header_size, headers = (int.from_bytes(image[at : at + 2], "little") for at in (58, 60))
    assert len(image) >= header_offset + header_size * headers
    program_offset = int.from_bytes(image[32:40], "little")
    program_size, programs = (int.from_bytes(image[at : at + 2], "little") for at in (54, 56))
    assert len(image) >= program_offset + program_size * programs


def test_each_kernel_of_a_module_has_its_own_report() -> None:
    text = (
        COPY
        + "__global__ void shares(float* x) { __shared__ float s[96]; s[threadIdx.x] = *x; __syncthreads(); "
        "*x = s[0]; }"
    )

    copied, shares, doubles = nvrtc.compile_all(text, ["copy<float>", "shares", "copy<double>"], arch="80")

    assert (copied.lowered_name, shares.lowered_name) == ("_Z4copyIfEvPKT_PS0_", "_Z6sharesPf")
    assert (copied.shared_bytes, shares.shared_bytes) == (0, 384)
    assert copied.image == shares.image == doubles.image
    assert 0 < copied.registers <= 32
    assert spills(copied) == spills(shares) == []


def test_a_kernel_is_a_value() -> None:
    kernel = nvrtc.compile(COPY, "copy<float>")

    assert kernel == nvrtc.compile(COPY, "copy<float>")
    assert len(repr(kernel)) < 300
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.registers = 1  # type: ignore[misc]


def test_an_error_names_file_and_line(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken.cuh").write_text("\n\ninline int broken() { return nothing; }\n")

    with pytest.raises(
        nvrtc.CompileError, match=r'broken\.cuh\(3\): error: identifier "nothing" is undefined'
    ):
        nvrtc.compile("#include <broken.cuh>\n" + COPY, "copy<float>", [f"-I{tmp_path}"])


def test_an_error_in_the_text_itself_has_its_line() -> None:
    text = COPY + 'static_assert(sizeof(int) == 3, "host and device layouts differ");\n'

    with pytest.raises(nvrtc.CompileError, match=r"\(4\): error: .*host and device layouts differ"):
        nvrtc.compile(text, "copy<float>")


def test_an_unknown_name_or_architecture_is_an_error_with_the_log() -> None:
    with pytest.raises(nvrtc.CompileError, match='identifier "cope" is undefined'):
        nvrtc.compile(COPY, "cope<float>")
    with pytest.raises(nvrtc.CompileError, match="gpu-architecture"):
        nvrtc.compile(COPY, "copy<float>", arch="30")


def test_a_major_that_is_not_there_says_what_to_install() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"NVRTC 11 is not installed: pip install nvidia-cuda-nvrtc"):
        nvrtc.compile(COPY, "copy<float>", major=11)
    assert nvrtc.available(11) is None


def test_without_any_library_there_is_no_version(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(nvrtc, "_library", lambda _: None)

    assert nvrtc.available() is None
    assert nvrtc.majors() == ()
    with pytest.raises(nvrtc.CompileError, match="is not installed"):
        nvrtc.compile(COPY, "copy<float>")


def test_both_majors_can_be_used_in_one_process() -> None:
    if len(nvrtc.majors()) < 2:
        pytest.skip("only one major of NVRTC is installed")

    names = {nvrtc.compile(COPY, "copy<float>", arch="80", major=major).lowered_name for major in (12, 13)}

    assert names == {"_Z4copyIfEvPKT_PS0_"}
    assert nvrtc.compile(COPY, "copy<float>", arch="70").registers > 0  # only the older one knows it


def test_functions_that_are_called_count_with_their_kernel() -> None:
    log = """
ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for __internal_trig
    40 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 48 bytes cumulative stack size, 256+16 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'g' for 'sm_90'
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
"""

    assert nvrtc._resources(log) == {"f": (32, 48, 4, 12, 256), "g": (10, 0, 0, 0, 0)}


def test_a_report_that_is_not_understood_is_no_clean_bill() -> None:
    with pytest.raises(RuntimeError, match="report on f is not understood"):
        nvrtc._resources("ptxas info : Compiling entry function 'f' for 'sm_999'\nptxas info : all is well\n")


@pytest.mark.parametrize("arch", ["75", "80", "90", "120"])
def test_a_planted_spill_is_seen(arch: str) -> None:
    kernel = nvrtc.compile(SPILLING, "spilling", arch=arch)

    assert kernel.spill_store_bytes > 0
    assert any("spill stores" in each for each in spills(kernel))


def test_a_planted_stack_frame_is_seen() -> None:
    assert spills(nvrtc.compile(INDEXED, "indexed")) == ["256 bytes of a stack frame"]


@needs_nvdisasm
def test_local_memory_is_seen_in_the_code() -> None:
    kernel = nvrtc.compile(SPILLING, "spilling")

    accesses = disassemble(kernel.image)["_Z8spillingPfi"].accesses

    assert any(kind in {"LDL", "STL"} for kind, _ in accesses)


WIDTHS = {"short": 2, "float": 4, "uint2": 8, "uint4": 16, "double": 8}


@functools.cache
def copies(arch: str) -> dict[str, nvrtc.Cubin]:
    """Compile a copy of each type, in one module: the disassembler needs as long to start as for many kernels."""
    return dict(
        zip(WIDTHS, nvrtc.compile_all(COPY, [f"copy<{cpp}>" for cpp in WIDTHS], arch=arch), strict=True)
    )


@needs_nvdisasm
@pytest.mark.parametrize("cpp", WIDTHS)
@pytest.mark.parametrize("arch", ["75", "90", "120"])
def test_the_width_of_an_access_is_read_from_the_code(cpp: str, arch: str) -> None:
    kernel = copies(arch)[cpp]

    accesses = disassemble(kernel.image)[kernel.lowered_name].accesses

    assert accesses == {("LDG", WIDTHS[cpp]): 1, ("STG", WIDTHS[cpp]): 1}


@pytest.mark.parametrize("cpp", WIDTHS)
def test_the_width_of_an_access_is_read_from_ptx(cpp: str) -> None:
    kernel = copies("75")[cpp]

    accesses = read_ptx(kernel.ptx)[kernel.lowered_name].accesses

    assert accesses == {("LDG", WIDTHS[cpp]): 1, ("STG", WIDTHS[cpp]): 1}


@pytest.mark.parametrize(
    ("accesses", "fault"),
    [
        ({("LDG", 16): 12, ("STG", 16): 4, ("STG", 4): 2}, ""),
        ({("LDGSTS", 16): 4, ("LDG", 16): 8, ("STG", 16): 4}, ""),
        ({("LDG", 16): 12, ("STG", 4): 18}, "0 stores of 16 bytes for 4 vectors"),
        ({("LDG", 16): 12, ("STG", 16): 4, ("STG", 4): 5}, "5 stores of 4 bytes, in vectors of 16"),
        ({("LDG", 2): 96, ("STG", 16): 4}, "0 loads of 16 bytes for 4 vectors"),
        ({("LDG", 16): 12, ("LDG", 2): 1, ("STG", 16): 4}, "1 loads of 2 bytes, in vectors of 16"),
        ({("LDG", 16): 12, ("STG", 16): 4, ("LDL", 4): 1}, "1 LDL of 4 bytes"),
        ({("LDG", 16): 12, ("STG", 16): 4, ("ST", 16): 1}, "1 ST of 16 bytes"),
    ],
)
def test_scalar_accesses_are_caught(accesses: dict[tuple[str, int], int], fault: str) -> None:
    plans = (
        each
        for each in widest_instances(LAYER_NORM, same_types(LAYER_NORM)[:1], "90")
        if each.plan.group and each.plan.parameter_cache < CONVERTED  # whose parameters come one by one
    )
    instance = next(plans)
    instance = instance._replace(plan=dataclasses.replace(instance.plan, vectors=4, rows_per_group=1))

    found = narrow_accesses(LAYER_NORM, instance, Code((), Counter(accesses)))

    assert (fault in found[0]) if fault else not found


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("LDG.E.128.CONSTANT", 16),
        ("LDG.E.EF.64", 8),
        ("STG.E", 4),
        ("LDG.E.U16", 2),
        ("LDGSTS.E.BYPASS.128", 16),
        ("STG.E.U8", 1),
    ],
)
def test_width_of_an_opcode(opcode: str, width: int) -> None:
    assert width_of(opcode) == width


@pytest.mark.parametrize(
    ("name", "major", "fits"),
    [
        ("/a/libnvrtc.so.12", 12, True),
        ("/a/libnvrtc.so.12.9.86", 12, True),
        ("/a/libnvrtc.so.13", 12, False),
        ("/a/libnvrtc.so.120", 12, False),
        ("/a/nvrtc64_120_0.dll", 12, True),
        ("/a/nvrtc64_130_0.dll", 12, False),
    ],
)
def test_the_name_of_a_library_has_its_major(name: str, major: int, fits: bool) -> None:
    assert nvrtc._is_of_major(name, major) is fits


def test_the_library_of_pathfinder_comes_first_for_its_major(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def load(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(abs_path=f"/somewhere/lib{name}.so.12")

    pathfinder = types.ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)

    assert next(nvrtc._candidates(12)) == "/somewhere/libnvrtc.so.12"
    assert "/somewhere/libnvrtc.so.12" not in list(nvrtc._candidates(13))
    assert "libnvrtc.so.12" in list(nvrtc._candidates(12))  # and then as without it


def test_without_a_library_of_pathfinder_the_search_goes_on(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    without = list(nvrtc._candidates(12))
    pathfinder = types.ModuleType("cuda.pathfinder")
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(
        sys.modules, "cuda.pathfinder", pathfinder
    )  # without the function, or with one that raises

    assert list(nvrtc._candidates(12)) == without
    assert "libnvrtc.so.12" in without
