"""The state of this machine for cupynorm, and its faults. Needs no GPU, driver or CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cupynorm
from cupynorm import _install
from cupynorm.plan.limits import RECORDED
from cupynorm.runtime import compiler, cubins, devices, nvrtc, tuned_plans

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# Older versions do not cache kernels with name expressions: each process compiles them again.
CUPY_OLDEST = (14, 2)
CUPY_UNTRIED = (15,)
CAPABILITY_OLDEST = 70
OPTIONAL = ("ml_dtypes", "safetensors", "tokenizers")  # packages that cupynorm uses if they are installed
FOR_CUDA = "cupynorm's kernels are CUDA, for NVIDIA's"
VARIABLES = re.compile(r"(CUPY|CUDA|CUPYNORM|NVIDIA_VISIBLE|NVCC)(_\w+)?|NO_COLOR")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that doctor checked. fix: what to type or do next; empty if nothing needs doing."""

    check: str
    status: Literal["ok", "warning", "fault"]
    message: str
    fix: str = ""


def driver_cuda() -> int | None:
    """Return the newest CUDA version that the driver supports, 1000 x major + 10 x minor; None without a driver."""
    library = _driver_library()
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:  # a stub library returns 34
        return None
    return version.value


def driver_devices() -> int:
    """Return how many devices the driver shows to this process."""
    library = _driver_library()
    count = ctypes.c_int()
    if library is None or library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@functools.cache
def _driver_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None


def extra_for(cuda: int | None) -> str | None:
    """Return the extra for a driver: "cuda13" from driver 580 on, "cuda12" from 525 on, else None."""
    if cuda is None or cuda < 12000:  # noqa: PLR2004
        return None
    return "cuda13" if cuda >= 13000 else "cuda12"  # noqa: PLR2004


def cupy_distributions() -> dict[str, str]:
    """Return name and version of every installed distribution of CuPy."""
    found = {}
    for each in importlib.metadata.distributions():
        name = (each.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"cupy(-cuda\d+x?|-rocm[-\d]+)?", name):
            found[name] = each.version
    return found


def is_gpu_wanted() -> bool:
    """Return whether a GPU is expected here: CuPy is installed, or the driver shows a device."""
    return bool(cupy_distributions()) or driver_devices() > 0


def cache_folder() -> Path:
    """Return the folder in which CuPy stores compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR", Path("~/.cupy/kernel_cache").expanduser()))


def info() -> dict[str, Any]:
    """Return versions, devices, recorded limits, cache, tuned plans, extras and environment variables, for JSON."""
    found, reason = _devices()
    folder = cache_folder()
    sizes = []
    with contextlib.suppress(OSError):
        sizes = [each.stat().st_size for each in folder.iterdir() if each.is_file()]
    cubin_count, cubin_bytes = cubins.usage()
    return {
        "schema": 1,
        "versions": {
            "cupynorm": cupynorm.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("numpy", "click", *OPTIONAL)},
            "cupy": ", ".join(f"{version} ({name})" for name, version in cupy_distributions().items())
            or None,
            "nvrtc": _nvrtc_version(),
            "driver": _dotted(driver_cuda()),
        },
        "platform": platform.platform(),
        "devices": found,
        "no_device": reason,
        "recorded": {name: dataclasses.asdict(limits) for name, limits in RECORDED.items()},
        "cache": {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)},
        "cubins": {"folder": str(cubins.folder()), "files": cubin_count, "bytes": cubin_bytes},
        "tuned": {
            "folder": str(tuned_plans.folder()),
            "used": tuned_plans.switched_on() and not tuned_plans.why_unusable(),
            "tables": tuned_plans.tables(),
        },
        "early_launches": {"used": devices.early_switched_on()},
        "kernels": {"folder": str(compiler.kernels_dir()), "digest": compiler.digest()},
        "extras": _extras(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if VARIABLES.fullmatch(name)},
    }


def findings() -> Iterator[Finding]:
    """Check everything that has to be right, the most basic first."""
    yield _check_package()
    cuda = driver_cuda()
    installed = cupy_distributions()
    yield _check_driver(cuda, driver_devices() if cuda else 0, wanted=bool(installed))
    yield from _check_cupy(installed, cuda)
    if installed:
        yield _check_cubins()
        yield from _check_tuned()
        yield from _check_cache(cache_folder())
        yield from _check_import(installed, cuda)
    yield _check_bfloat16()


def _check_package() -> Finding:
    where = f"cupynorm {cupynorm.__version__}, Python {platform.python_version()}, NumPy {_version('numpy')}"
    folder = compiler.kernels_dir()
    if any(folder.glob("ops/*.cuh")):
        return Finding("package", "ok", where)
    return Finding(
        "package",
        "fault",
        f"{where}: {folder} holds no CUDA sources",
        "install cupynorm again from its source or its wheel: pip install --force-reinstall --no-deps PATH",
    )


def _check_driver(cuda: int | None, count: int, *, wanted: bool) -> Finding:
    if cuda is None:
        return Finding(
            "driver",
            "fault" if wanted else "warning",
            "no NVIDIA driver here: NumPy arrays work, computed on the CPU"
            + ("; CuPy is installed, and cannot do anything" if wanted else ""),
            "for a GPU, install NVIDIA's driver, 525 or newer; without one nothing needs doing",
        )
    speaks = f"the driver speaks CUDA {_dotted(cuda)}"
    if extra_for(cuda) is None:
        return Finding(
            "driver", "fault", f"{speaks}, which is too old", "install NVIDIA's driver, 525 or newer"
        )
    if count == 0:
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        return Finding(
            "driver",
            "fault" if wanted else "warning",
            f"{speaks}, and shows no device: NumPy arrays work, computed on the CPU",
            "unset CUDA_VISIBLE_DEVICES"
            if hidden
            else "nvidia-smi  (a container needs the device given to it: --gpus all)",
        )
    return Finding("driver", "ok", f"{speaks} and shows {count} device{'s' * (count > 1)}")


def _check_cupy(installed: dict[str, str], cuda: int | None) -> Iterator[Finding]:
    extra = extra_for(cuda)
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    install = _install.pip_install(extra or "cuda12")
    if not installed:
        if extra:
            yield Finding("cupy", "fault", "CuPy is not installed: the GPU cannot be used", install)
        else:
            yield Finding("cupy", "ok", "CuPy is not installed, and not needed for NumPy arrays")
        return
    if len(installed) > 1:
        # they share one folder: uninstalling one removes files of the others, so all of them must be uninstalled first
        yield Finding(
            "cupy",
            "fault",
            f"several CuPys are installed, over one another: {named}",
            f"pip uninstall -y {' '.join(installed)} && {install}",
        )
        return
    (name, version), *_ = installed.items()
    remedy = f"pip uninstall -y {name} && {install}"
    if "rocm" in name:
        yield Finding("cupy", "fault", f"{named} is built for ROCm, AMD's GPUs: {FOR_CUDA}", remedy)
        return
    if _numbers(version) < CUPY_OLDEST:
        yield Finding(
            "cupy", "fault", f"{named} is too old: 14.2 is the first that caches our kernels", install
        )
    elif _numbers(version) >= CUPY_UNTRIED:
        yield Finding("cupy", "warning", f"{named} is newer than what cupynorm was tried with", remedy)
    else:
        yield Finding("cupy", "ok", named)
    major = _cuda_major(name)
    if major and cuda and major > cuda // 1000:
        yield Finding(
            "cuda",
            "fault",
            f"{name} is made for CUDA {major}, the driver speaks up to {_dotted(cuda)}",
            remedy,
        )


def _check_cache(folder: Path) -> Iterator[Finding]:
    elsewhere = "export CUPY_CACHE_DIR=/a/folder/of/your/own"
    if not _is_writable(_existing(folder)):
        yield Finding("cache", "fault", f"{folder} cannot be written: CuPy needs it", elsewhere)
        return
    intruder = _intruder(folder)
    if intruder:
        yield Finding("cache", "warning", intruder[0], intruder[1] or elsewhere)
        return
    kept = "in memory only" if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1" else f"in {folder}"
    yield Finding("cache", "ok", f"CuPy keeps compiled kernels {kept}")


def _existing(folder: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _intruder(folder: Path) -> tuple[str, str] | None:
    """Return who else could replace files in a folder, and what to type against it, if anything; or None."""
    if os.name != "posix":
        return None
    mine = {0, os.geteuid()}
    there = _existing(folder)
    for each in (there.resolve(), *there.resolve().parents):
        status = each.stat()
        if status.st_uid not in mine:
            return f"{each} belongs to user {status.st_uid}, who could replace kernels in {folder}", ""
        # with the sticky bit, others can add files but not replace them; in the cache itself, adding is too much
        if status.st_mode & stat.S_IWOTH and (each == folder.resolve() or not status.st_mode & stat.S_ISVTX):
            return (
                f"{each} can be written by anyone, who could then replace kernels in {folder}",
                f"chmod o-w {each}",
            )
    return None


def _check_cubins() -> Finding:
    folder = cubins.folder()
    elsewhere = "export CUPYNORM_CACHE_DIR=/a/folder/of/your/own"
    reason = cubins.why_unusable()
    if not reason:
        there = _existing(folder)
        if not _is_writable(there):
            reason = f"{there} cannot be written"
    if reason:
        message = f"{reason}: every process compiles anew, and loads NVRTC to do so"
        return Finding("cubins", "warning", message, elsewhere)
    intruder = _intruder(folder)
    if intruder:
        return Finding("cubins", "warning", intruder[0], intruder[1] or elsewhere)
    files, size = cubins.usage()
    return Finding("cubins", "ok", f"{files} compiled kernel{'s' * (files != 1)}, {size} bytes, in {folder}")


def _check_tuned() -> Iterator[Finding]:
    reason = tuned_plans.why_unusable()
    if reason and tuned_plans.folder().is_absolute():
        fix = f"chmod go-w {tuned_plans.folder()}, if it is yours"
        yield Finding("tuned", "warning", f"{reason}: the plans that were tuned are not used", fix)


def _check_import(installed: dict[str, str], cuda: int | None) -> Iterator[Finding]:
    name = next(iter(installed))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns of two installations, which is a finding already
            module = devices.cupy()
    except devices.NoDeviceError as error:
        if "ROCm" in str(error):
            fix = f"pip uninstall -y {name} && {_install.pip_install(extra_for(cuda) or 'cuda12')}"
        elif isinstance(error.__cause__, OSError):
            fix = "export CUPY_CACHE_DIR=/a/folder/of/your/own"
        else:
            fix = f"pip install --force-reinstall --no-deps {name}"
        yield Finding("import", "fault", str(error), fix)
        return
    yield _check_compiler(module, _cuda_major(name), cuda)
    yield _check_headers(_cuda_major(name))
    for limits in _devices()[0] if cuda else ():
        capability = int(limits["compute_capability"])
        what = f"device {limits['number']}: {limits['name']}, compute capability {capability / 10}"
        if capability < CAPABILITY_OLDEST:
            yield Finding(
                "device", "fault", f"{what} is too old: 7.0 is the oldest", "use NumPy arrays, on the CPU"
            )
        else:
            yield Finding("device", "ok", what)


def _check_compiler(module: ModuleType, major: int | None, cuda: int | None) -> Finding:
    wheel = _install.NVRTC.get(major or 12, _install.NVRTC[13])
    try:
        version = module.cuda.nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001  CuPy's loader has its own type of error
        why = str(error).partition("\n")[0]
        return Finding(
            "nvrtc",
            "fault",
            f"NVRTC, which compiles the kernels, does not load: {why}",
            _install.pip_install(wheel),
        )
    named = f"NVRTC {'.'.join(map(str, version))}"
    if major and version[0] != major:
        newer = cuda is not None and version[0] > cuda // 1000
        return Finding(
            "nvrtc",
            "fault" if newer else "warning",
            f"CuPy is made for CUDA {major} and finds {named}"
            + (f"; the driver, of CUDA {_dotted(cuda)}, cannot load what that compiles" if newer else ""),
            f"{_install.pip_install('--force-reinstall', wheel)}, and uninstall the other nvidia-cuda-nvrtc",
        )
    return Finding("nvrtc", "ok", named)


def _check_headers(major: int | None) -> Finding:
    try:
        from cuda.pathfinder import find_nvidia_header_directory  # noqa: PLC0415  CuPy depends on it

        folder = find_nvidia_header_directory("cudart")
    except Exception:  # noqa: BLE001  it reads other packages' folders
        folder = None
    if folder:
        return Finding("headers", "ok", f"CUDA's headers are in {folder}")
    return Finding(
        "headers",
        "warning",
        "CUDA's headers are not found: cupynorm's kernels do without, CuPy's own arithmetic does not",
        _install.pip_install(_install.HEADERS.get(major or 12, _install.HEADERS[13])),
    )


def _check_bfloat16() -> Finding:
    version = _version("ml_dtypes")
    if version:
        return Finding("bfloat16", "ok", f"ml_dtypes {version}")
    return Finding(
        "bfloat16",
        "warning",
        "ml_dtypes is not installed: no bfloat16",
        _install.pip_install(_install.ML_DTYPES),
    )


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """Return the devices with their limits, or the reason why there are none."""
    try:
        devices.present_device()
        count = devices.cupy().cuda.runtime.getDeviceCount()
        return [
            {"number": each, **dataclasses.asdict(devices.limits_of(each))} for each in range(count)
        ], None
    except devices.NoDeviceError as error:
        return [], str(
            error
        ) if is_gpu_wanted() else "no GPU, no CuPy: NumPy arrays work, computed on the CPU"


def _extras() -> dict[str, bool]:
    """Return the extras that cupynorm declares, and whether all packages of each are installed."""
    try:
        declared = importlib.metadata.metadata("cupynorm")
    except importlib.metadata.PackageNotFoundError:  # a bare checkout
        return {}
    extras: dict[str, bool] = {}
    for name in declared.get_all("Provides-Extra") or ():
        needs = [
            each
            for each in declared.get_all("Requires-Dist") or ()
            if re.search(rf"extra == ['\"]{name}['\"]", each)
        ]
        extras[name] = all(_version(re.match(r"[\w.-]+", each)[0]) for each in needs)  # type: ignore[index]
    return extras


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvrtc_version() -> str | None:
    version = nvrtc.available()
    return version and ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _cuda_major(distribution: str) -> int | None:
    found = re.fullmatch(r"cupy-cuda(\d+)x", distribution)
    return int(found[1]) if found else None


def _dotted(cuda: int | None) -> str | None:
    return None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
