"""cupynorm.tools.environment: what doctor finds on machines that are not this one, and what info says of any."""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupynorm import cli, softmax
from cupynorm.runtime import compiler
from cupynorm.runtime import devices as runtime_devices
from cupynorm.runtime import nvrtc as kernel_nvrtc
from cupynorm.tools import environment
from cupynorm.tools.environment import Finding

distributions = importlib.metadata.distributions
CUDA12 = (
    "pip install 'cupy-cuda12x>=14.2,<15' nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 'ml_dtypes>=0.5'"
)
CUDA13 = "pip install 'cupy-cuda13x>=14.2,<15' 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*' 'ml_dtypes>=0.5'"


def found(check, findings):
    """Return the one finding of a check."""
    (finding,) = [each for each in findings if each.check == check]
    return finding


class Driver:
    """libcuda.so.1, as far as it is asked."""

    def __init__(self, cuda, devices=1, status=0):
        self.cuda, self.devices, self.status = cuda, devices, status

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.cuda
        return self.status

    def cuInit(self, flags):  # noqa: N802
        return flags

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.devices
        return 0 if self.devices else 100


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with any driver, CuPys, cache folder and NVRTC."""

    def look(cuda=None, devices=1, cupy=(), nvrtc=(12, 9), capability="90", broken=None):
        driver = None if cuda is None else Driver(cuda, devices)
        monkeypatch.setattr(environment, "_driver_library", lambda: driver)
        site = tmp_path / "-".join(dict(cupy)) / "site"
        for name, version in dict(cupy).items():
            folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: distributions(path=[str(site)]))

        def version_of_nvrtc():
            if nvrtc is None:
                raise RuntimeError("libnvrtc.so.12 cannot be opened\nand more")
            return nvrtc

        limits = dataclasses.replace(runtime_devices.RECORDED["h200"], compute_capability=capability)
        module = types.SimpleNamespace(
            cuda=types.SimpleNamespace(
                nvrtc=types.SimpleNamespace(getVersion=version_of_nvrtc),
                runtime=types.SimpleNamespace(getDeviceCount=lambda: devices),
            )
        )

        def imported():
            if broken:
                raise broken
            return module

        def present():
            if not (cuda and devices):
                raise runtime_devices.NoDeviceError("no device")
            return 0

        monkeypatch.setattr(runtime_devices, "cupy", imported)
        monkeypatch.setattr(runtime_devices, "present_device", present)
        monkeypatch.setattr(runtime_devices, "limits_of", lambda _: limits)
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return list(environment.findings())

    return look


@pytest.mark.parametrize(
    ("cuda", "extra"),
    [(None, None), (11080, None), (12000, "cuda12"), (12090, "cuda12"), (13000, "cuda13"), (13020, "cuda13")],
)
def test_the_extra_follows_from_the_driver(cuda, extra):
    assert environment.extra_for(cuda) == extra


def test_the_driver_is_asked_without_cupy(monkeypatch):
    monkeypatch.setattr(environment, "_driver_library", lambda: Driver(12040, devices=2))
    assert (environment.driver_cuda(), environment.driver_devices()) == (12040, 2)

    monkeypatch.setattr(environment, "_driver_library", lambda: Driver(0, status=34))  # a stub library
    assert environment.driver_cuda() is None

    monkeypatch.setattr(environment, "_driver_library", lambda: None)
    assert (environment.driver_cuda(), environment.driver_devices()) == (None, 0)


def test_a_machine_without_the_driver_library_has_no_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)

    assert environment._driver_library.__wrapped__() is None


def test_a_plain_cpu_machine_has_no_fault_and_is_told_that_numpy_arrays_work(machine):
    findings = machine()

    assert "fault" not in {each.status for each in findings}
    assert "NumPy arrays work" in found("driver", findings).message
    assert found("cupy", findings) == Finding(
        "cupy", "ok", "CuPy is not installed, and not needed for NumPy arrays"
    )


@pytest.mark.parametrize(
    ("cuda", "cupy"), [(13000, "cupy-cuda13x"), (13000, "cupy-cuda12x"), (12040, "cupy-cuda12x")]
)
def test_a_machine_that_is_well_has_only_good_findings(machine, cuda, cupy):
    findings = machine(cuda, cupy={cupy: "14.2.0"}, nvrtc=(int(cupy[9:11]), 0))

    bad = {each.check for each in findings if each.status != "ok"}
    assert bad <= {"headers", "bfloat16"}  # of the machine that runs the tests
    assert "H200" in found("device", findings).message.upper()


@pytest.mark.parametrize(
    ("options", "check", "status", "words", "fix"),
    [
        ({"cuda": 13000}, "cupy", "fault", "not installed", CUDA13),
        ({"cuda": 12020}, "cupy", "fault", "not installed", CUDA12),
        ({"cuda": 11040}, "driver", "fault", "11.4, which is too old", "525 or newer"),
        ({"cupy": {"cupy-cuda12x": "14.2.0"}}, "driver", "fault", "no NVIDIA driver", "driver"),
        ({"cuda": 13000, "devices": 0}, "driver", "warning", "shows no device", "nvidia-smi"),
        (
            {"cuda": 13000, "devices": 0, "cupy": {"cupy-cuda13x": "14.2.0"}},
            "driver",
            "fault",
            "shows no device",
            "nvidia-smi",
        ),
        (
            {"cuda": 12040, "cupy": {"cupy-cuda13x": "14.2.0"}, "nvrtc": (13, 0)},
            "cuda",
            "fault",
            "made for CUDA 13, the driver speaks up to 12.4",
            f"pip uninstall -y cupy-cuda13x && {CUDA12}",
        ),
        (
            {"cuda": 13000, "cupy": {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}},
            "cupy",
            "fault",
            "several CuPys",
            f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {CUDA13}",
        ),
        (
            {"cuda": 13000, "cupy": {"cupy-cuda13x": "14.1.1"}, "nvrtc": (13, 0)},
            "cupy",
            "fault",
            "too old",
            CUDA13,
        ),
        ({"cuda": 13000, "cupy": {"cupy": "13.6.0"}}, "cupy", "fault", "too old", "pip install"),
        (
            {"cuda": 13000, "cupy": {"cupy-rocm-7-0": "14.2.0"}},
            "cupy",
            "fault",
            "cupy-rocm-7-0 14.2.0 is built for ROCm, AMD's GPUs",
            f"pip uninstall -y cupy-rocm-7-0 && {CUDA13}",
        ),
        (
            {
                "cuda": 12040,
                "cupy": {"cupy": "14.2.0"},
                "broken": runtime_devices.NoDeviceError("CuPy 14.2.0 is built for ROCm"),
            },
            "import",
            "fault",
            "built for ROCm",
            f"pip uninstall -y cupy && {CUDA12}",
        ),
        ({"cuda": 13000, "cupy": {"cupy-cuda13x": "15.0.0b1"}}, "cupy", "warning", "newer", "pip uninstall"),
        (
            {"cuda": 12040, "cupy": {"cupy-cuda12x": "14.2.0"}, "nvrtc": None},
            "nvrtc",
            "fault",
            "libnvrtc.so.12 cannot be opened",
            "pip install nvidia-cuda-nvrtc-cu12",
        ),
        (
            {"cuda": 13000, "cupy": {"cupy-cuda13x": "14.2.0"}, "nvrtc": None},
            "nvrtc",
            "fault",
            "does not load",
            "pip install 'nvidia-cuda-nvrtc==13.*'",
        ),
        (
            {"cuda": 13000, "cupy": {"cupy-cuda12x": "14.2.0"}, "nvrtc": (13, 1)},
            "nvrtc",
            "warning",
            "made for CUDA 12 and finds NVRTC 13.1",
            "pip install --force-reinstall nvidia-cuda-nvrtc-cu12",
        ),
        (
            {"cuda": 12040, "cupy": {"cupy-cuda12x": "14.2.0"}, "nvrtc": (13, 1)},
            "nvrtc",
            "fault",
            "cannot load what that compiles",
            "nvidia-cuda-nvrtc-cu12",
        ),
        (
            {"cuda": 12040, "cupy": {"cupy-cuda12x": "14.2.0"}, "capability": "61"},
            "device",
            "fault",
            "6.1 is too old",
            "CPU",
        ),
        (
            {
                "cuda": 12040,
                "cupy": {"cupy-cuda12x": "14.2.0"},
                "broken": runtime_devices.NoDeviceError("no module"),
            },
            "import",
            "fault",
            "no module",
            "pip install --force-reinstall --no-deps cupy-cuda12x",
        ),
    ],
)
def test_doctor_finds_it_and_says_what_to_type(machine, options, check, status, words, fix):
    finding = found(check, machine(**options))

    assert finding.status == status
    assert words in finding.message
    assert fix in finding.fix


def test_hidden_devices_are_named_as_the_cause(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    finding = environment._check_driver(13000, 0, wanted=True)

    assert finding.fix == "unset CUDA_VISIBLE_DEVICES"


def test_a_home_that_cannot_be_written_is_named_as_the_cause(machine):
    error = runtime_devices.NoDeviceError("CuPy does not import (Permission denied): set CUPY_CACHE_DIR")
    error.__cause__ = PermissionError("Permission denied")

    finding = found("import", machine(13000, cupy={"cupy-cuda13x": "14.2.0"}, broken=error))

    assert finding.fix.startswith("export CUPY_CACHE_DIR=")


@pytest.fixture
def private(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_private_cache_folder_is_well_whether_it_is_there_or_not(private):
    for each in (private, private / "not" / "yet"):
        assert [finding.status for finding in environment._check_cache(each)] == ["ok"]


def test_a_cache_kept_in_memory_says_so(private, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")

    (finding,) = environment._check_cache(private)

    assert finding.message.endswith("in memory only")


def test_a_cache_folder_that_cannot_be_written_is_a_fault(private, monkeypatch):
    (private / "file").touch()

    (finding,) = environment._check_cache(private / "file" / "cache")
    assert (finding.status, finding.fix) == ("fault", "export CUPY_CACHE_DIR=/a/folder/of/your/own")

    monkeypatch.setattr(os, "access", lambda *_: False)
    (finding,) = environment._check_cache(private)
    assert finding.status == "fault"
    assert "cannot be written" in finding.message


def test_a_cache_folder_that_anyone_can_write_is_a_warning(private):
    cache = private / "cache"
    cache.mkdir()
    cache.chmod(0o1777)

    (finding,) = environment._check_cache(cache)

    assert (finding.status, finding.fix) == ("warning", f"chmod o-w {cache}")


def test_a_parent_that_anyone_can_write_is_a_warning_unless_it_is_sticky(private):
    cache = private / "open" / "cache"
    cache.mkdir(parents=True)

    cache.parent.chmod(0o777)
    (finding,) = environment._check_cache(cache)
    assert (finding.status, finding.fix) == ("warning", f"chmod o-w {cache.parent}")

    cache.parent.chmod(0o1777)
    (finding,) = environment._check_cache(cache)
    assert finding.status == "ok"


def test_a_cache_folder_of_another_user_is_a_warning(private, monkeypatch):
    if os.geteuid() == 0:
        os.chown(private, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)

    (finding,) = environment._check_cache(private)

    assert finding.status == "warning"
    assert f"belongs to user {private.stat().st_uid}, who could replace kernels" in finding.message


def test_the_cache_folder_is_cupys(monkeypatch, tmp_path):
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / ".cupy" / "kernel_cache"

    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    assert environment.cache_folder() == Path("/elsewhere")


def test_missing_headers_are_a_warning(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("cuda"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    finding = environment._check_headers(12)

    assert (finding.status, finding.fix) == ("warning", "pip install nvidia-cuda-runtime-cu12")


def test_missing_sources_are_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "kernels_dir", lambda: tmp_path)

    assert environment._check_package().status == "fault"


def test_without_ml_dtypes_there_is_no_bfloat16(monkeypatch):
    monkeypatch.setattr(environment, "_version", lambda name: None)

    assert environment._check_bfloat16().fix == "pip install 'ml_dtypes>=0.5'"


def test_every_finding_that_is_not_well_says_what_to_do(machine):
    for options in ({}, {"cuda": 13000}, {"cuda": 12040, "cupy": {"cupy-cuda13x": "13.0"}, "nvrtc": None}):
        for finding in machine(**options):
            assert finding.status == "ok" or finding.fix


def test_info_is_complete_and_fit_for_json(machine, monkeypatch):
    machine(13000, devices=2, cupy={"cupy-cuda13x": "14.2.0"})
    cache = environment.cache_folder()
    cache.mkdir()
    (cache / "kernel.cubin").write_bytes(bytes(100))
    monkeypatch.setenv("CUPY_TF32", "1")
    monkeypatch.setenv("PASSWORD", "secret")
    monkeypatch.setattr(kernel_nvrtc, "available", lambda: (13, 2))

    info = json.loads(json.dumps(environment.info()))

    assert info["schema"] == 1
    assert info["versions"]["cupy"] == "14.2.0 (cupy-cuda13x)"
    assert info["versions"]["driver"] == "13.0"
    assert info["versions"]["nvrtc"] == "13.2"
    assert {"ml_dtypes", "safetensors", "tokenizers"} <= set(info["versions"])
    assert info["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert [device["number"] for device in info["devices"]] == [0, 1]
    assert info["no_device"] is None
    assert set(info["recorded"]) == set(runtime_devices.RECORDED)
    assert info["cache"] == {"folder": str(cache), "files": 1, "bytes": 100}
    assert info["kernels"]["digest"] == compiler.digest()
    assert info["environment"]["CUPY_TF32"] == "1"
    assert "PASSWORD" not in info["environment"]


def test_info_without_anything(machine, monkeypatch):
    machine()
    monkeypatch.setattr(kernel_nvrtc, "available", lambda: None)

    info = environment.info()

    assert info["devices"] == []
    assert info["no_device"] == "no GPU, no CuPy: NumPy arrays work, computed on the CPU"
    assert info["versions"]["cupy"] is info["versions"]["driver"] is info["versions"]["nvrtc"] is None
    assert info["cache"]["files"] == 0


def test_extras_are_those_declared_with_whether_they_are_complete(monkeypatch, tmp_path):
    folder = tmp_path / "cupynorm-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cupynorm\nVersion: 0.1.0\nProvides-Extra: whole\nProvides-Extra: part\n"
        "Requires-Dist: click>=8.1\n"
        "Requires-Dist: numpy>=2; sys_platform != 'darwin' and extra == 'whole'\n"
        'Requires-Dist: numpy>=2; extra == "part"\n'
        "Requires-Dist: no-such-thing-at-all==1.*; extra == 'part'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert environment._extras() == {"whole": True, "part": False}


def test_a_bare_checkout_declares_no_extras(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", missing)

    assert environment._extras() == {}


def rocm(monkeypatch):
    """Put a CuPy for AMD's GPUs in CuPy's place; return its array type."""
    module = types.ModuleType("cupy")
    module.__version__ = "14.2.0"
    module.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(is_hip=True))
    module.ndarray = type("ndarray", (), {"__module__": "cupy"})
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module.ndarray


def test_a_cupy_for_amds_gpus_is_refused_by_name_at_the_first_call(monkeypatch):
    array = rocm(monkeypatch)()
    runtime_devices.cupy.cache_clear()
    try:
        for call in (lambda: softmax(array), runtime_devices.present_device, runtime_devices.present_limits):
            with pytest.raises(
                runtime_devices.NoDeviceError, match=r"CuPy 14\.2\.0 is built for ROCm, AMD's GPUs"
            ):
                call()
    finally:
        runtime_devices.cupy.cache_clear()


def test_nobody_expects_a_gpu_without_cupy_and_without_a_device(machine):
    machine()
    assert not environment.is_gpu_wanted()
    machine(13000, devices=0)
    assert not environment.is_gpu_wanted()
    machine(13000)
    assert environment.is_gpu_wanted()
    machine(cupy={"cupy-cuda12x": "14.2.0"})
    assert environment.is_gpu_wanted()


@pytest.mark.parametrize(("value", "used"), [(None, True), ("1", True), ("0", False)])
def test_info_says_whether_kernels_may_begin_early(
    monkeypatch: pytest.MonkeyPatch, value: str | None, used: bool
) -> None:
    monkeypatch.delenv("CUPYNORM_EARLY", raising=False)
    if value is not None:
        monkeypatch.setenv("CUPYNORM_EARLY", value)

    assert environment.info()["early_launches"] == {"used": used}
    told = CliRunner().invoke(cli.cli, ["info"]).output
    assert ("no: CUPYNORM_EARLY is 0" in told) == (not used)


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
def test_info_says_why_tuned_plans_are_not_used(tuned_cache: Path) -> None:
    (tuned_cache / "tuned").mkdir(mode=0o700, parents=True, exist_ok=True)
    (tuned_cache / "tuned").chmod(0o777)

    told = CliRunner().invoke(cli.cli, ["info"]).output

    assert f"no: {tuned_cache / 'tuned'} can be written by others" in told
