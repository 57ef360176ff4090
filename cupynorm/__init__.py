"""cupynorm: LayerNorm, RMSNorm and softmax for CuPy and NumPy arrays, one kernel each, at the speed of memory."""

from typing import TYPE_CHECKING

from cupynorm._device import CompileError, NoDeviceError
from cupynorm._plan import Plan
from cupynorm._quantize import Quantize
from cupynorm.norm import layer_norm, rms_norm
from cupynorm.softmax import log_softmax, softmax

if TYPE_CHECKING:
    from cupynorm import functions as functions
    from cupynorm._expression import DeviceFunction, TraceError
    from cupynorm.add_norm import add_layer_norm, add_rms_norm
    from cupynorm.elementwise import bias_gelu, bias_silu, dropout, geglu, swiglu
    from cupynorm.fusion import Fusion, fuse
    from cupynorm.heads import add_qkv_bias, merge_heads, split_heads

__all__ = [
    "CompileError",
    "DeviceFunction",
    "Fusion",
    "NoDeviceError",
    "Plan",
    "Quantize",
    "TraceError",
    "add_layer_norm",
    "add_qkv_bias",
    "add_rms_norm",
    "bias_gelu",
    "bias_silu",
    "dropout",
    "fuse",
    "geglu",
    "layer_norm",
    "log_softmax",
    "merge_heads",
    "rms_norm",
    "softmax",
    "split_heads",
    "swiglu",
]

__version__ = "0.1.0"

# Modules that are imported when one of their names is first asked for: a call of a row op waits for none of them.
_LATER = {
    "_expression": ("DeviceFunction", "TraceError"),
    "add_norm": ("add_layer_norm", "add_rms_norm"),
    "elementwise": ("bias_gelu", "bias_silu", "dropout", "geglu", "swiglu"),
    "functions": (),
    "fusion": ("Fusion", "fuse"),
    "heads": ("add_qkv_bias", "merge_heads", "split_heads"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module  # noqa: PLC0415  likewise

    for module, names in _LATER.items():
        if name == module:
            return import_module(f"cupynorm.{module}")
        if name in names:
            found = globals()[name] = getattr(import_module(f"cupynorm.{module}"), name)
            return found
    raise AttributeError(f"module 'cupynorm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER})
