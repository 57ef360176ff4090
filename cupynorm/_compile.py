"""Name expression -> kernel: the text, its options, and one loaded function per device."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm import _device
from cupynorm._device import CompileError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CompileError", "Kernel", "digest", "kernel", "kernels_dir", "options", "spell", "text"]

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


@functools.cache
def kernels_dir() -> Path:
    """Return the folder of CUDA sources: beside this file in a wheel, at the top of a checkout."""
    from pathlib import Path  # noqa: PLC0415  10 ms, which `import cupynorm` need not wait for

    packaged = Path(__file__).with_name("kernels")
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[1] / "kernels"


@functools.cache
def digest() -> str:
    """Hash every file of kernels/. CuPy's cache does not look into headers; the digest in the text makes it notice."""
    import hashlib  # noqa: PLC0415  4 ms, likewise

    folder = kernels_dir()
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        hashed.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def options() -> tuple[str, ...]:
    """Return the compiler's options, the same for every module. CuPy adds -ftz=true and -default-device to them."""
    return (f"-I{kernels_dir()}", "--std=c++17")


def spell(value: object) -> str:
    """Spell a template argument in C++."""
    if isinstance(value, bool):  # before int: True is an int too, and "True" is not C++
        return "true" if value else "false"
    return str(value)


def text(source: str, arguments: str, size: int) -> str:
    """Return the text of a module: the headers, and a guard against host and device layouts that differ."""
    return (
        f"// cupynorm {digest()}\n"
        f"#include <cupynorm/row.cuh>\n#include <{source}>\n"
        f'static_assert(sizeof({arguments}) == {size}, "Arguments: host and device layouts differ");\n'
    )


class Kernel(NamedTuple):
    """A loaded kernel: the driver's handle, and what the compiler made of it."""

    pointer: int
    registers: int
    local_bytes: int
    module: Any  # keeps the function loaded


_lock = threading.Lock()
_kernels: dict[tuple[int, str, str], Kernel] = {}
# A lock for each kernel: threads compile different ones at the same time, and none twice.
_compiling: dict[tuple[int, str, str], threading.Lock] = {}


def kernel(device: int, code: str, expression: str, shared_limit: int) -> Kernel:
    """Compile (or take from CuPy's disk cache) and load; remembered per device, safe to call from several threads.

    `device` must be current. Raises CompileError with the compiler's log, which names the kernel's file and line.
    """
    key = (device, code, expression)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        compiling = _compiling.setdefault(key, threading.Lock())
    with compiling:
        found = _kernels.get(key)
        if found is None:
            found = _kernels[key] = _load(code, expression, shared_limit)
    return found


def _load(code: str, expression: str, shared_limit: int) -> Kernel:
    module = _device.cupy().RawModule(code=code, options=options(), name_expressions=(expression,))
    try:
        function = module.get_function(expression)
        pointer = function.kernel.ptr
    except Exception as error:
        if type(error).__name__ != "CompileException":  # CuPy's; it cannot be named without CuPy
            raise
        raise CompileError(f"{expression}\n{error}") from error
    if shared_limit:  # per function and device, once; a launch that asks for less keeps its own figure
        _device.driver().funcSetAttribute(pointer, MAX_DYNAMIC_SHARED, shared_limit)
        _device.driver().funcSetAttribute(pointer, SHARED_CARVEOUT, 100)
    return Kernel(pointer, function.num_regs, function.local_size_bytes, module)


def forget() -> None:
    """Drop every remembered kernel."""
    with _lock:
        _kernels.clear()
        _compiling.clear()
