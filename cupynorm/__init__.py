"""cupynorm: LayerNorm, RMSNorm and softmax for CuPy and NumPy arrays, one kernel each, at the speed of memory."""

from typing import TYPE_CHECKING

from cupynorm.call.quantize import Quantize
from cupynorm.ops.norm import layer_norm, rms_norm
from cupynorm.ops.softmax import log_softmax, softmax
from cupynorm.plan.config import Plan
from cupynorm.runtime.devices import CompileError, NoDeviceError

if TYPE_CHECKING:
    from cupynorm import functions as functions
    from cupynorm.lower.expressions import DeviceFunction
    from cupynorm.lower.tracing import TraceError
    from cupynorm.ops.add_norm import add_layer_norm, add_rms_norm
    from cupynorm.ops.add_norm_gradients import add_layer_norm_backward, add_rms_norm_backward
    from cupynorm.ops.elementwise import bias_gelu, bias_silu, dropout, geglu, swiglu
    from cupynorm.ops.elementwise_gradients import (
        bias_gelu_backward,
        bias_silu_backward,
        geglu_backward,
        swiglu_backward,
    )
    from cupynorm.ops.fusion import Fusion, fuse
    from cupynorm.ops.heads import add_qkv_bias, merge_heads, split_heads
    from cupynorm.ops.losses import cross_entropy, logsumexp
    from cupynorm.ops.moments import moments
    from cupynorm.ops.norm_gradients import (
        layer_norm_backward,
        layer_norm_backward_from_y,
        rms_norm_backward,
        rms_norm_backward_from_y,
    )
    from cupynorm.ops.sigma_clip import sigma_clip
    from cupynorm.ops.softmax_gradients import log_softmax_backward, softmax_backward
    from cupynorm.ops.statistics import normalize, rescale, standardize
    from cupynorm.scipy_special import install

__all__ = [
    "CompileError",
    "DeviceFunction",
    "Fusion",
    "NoDeviceError",
    "Plan",
    "Quantize",
    "TraceError",
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_qkv_bias",
    "add_rms_norm",
    "add_rms_norm_backward",
    "bias_gelu",
    "bias_gelu_backward",
    "bias_silu",
    "bias_silu_backward",
    "cross_entropy",
    "dropout",
    "fuse",
    "geglu",
    "geglu_backward",
    "install",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_backward_from_y",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "merge_heads",
    "moments",
    "normalize",
    "rescale",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_from_y",
    "sigma_clip",
    "softmax",
    "softmax_backward",
    "split_heads",
    "standardize",
    "swiglu",
    "swiglu_backward",
]

__version__ = "0.1.0"

# Modules that are imported when one of their names is first asked for: a call of a row op waits for none of them.
_LATER = {
    "functions": (),
    "lower.expressions": ("DeviceFunction",),
    "lower.tracing": ("TraceError",),
    "ops.add_norm": ("add_layer_norm", "add_rms_norm"),
    "ops.add_norm_gradients": ("add_layer_norm_backward", "add_rms_norm_backward"),
    "ops.elementwise": ("bias_gelu", "bias_silu", "dropout", "geglu", "swiglu"),
    "ops.elementwise_gradients": (
        "bias_gelu_backward",
        "bias_silu_backward",
        "geglu_backward",
        "swiglu_backward",
    ),
    "ops.fusion": ("Fusion", "fuse"),
    "ops.heads": ("add_qkv_bias", "merge_heads", "split_heads"),
    "ops.losses": ("cross_entropy", "logsumexp"),
    "ops.moments": ("moments",),
    "ops.norm_gradients": (
        "layer_norm_backward",
        "layer_norm_backward_from_y",
        "rms_norm_backward",
        "rms_norm_backward_from_y",
    ),
    "ops.sigma_clip": ("sigma_clip",),
    "ops.softmax_gradients": ("log_softmax_backward", "softmax_backward"),
    "ops.statistics": ("normalize", "rescale", "standardize"),
    "scipy_special": ("install",),
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
    return sorted({*globals(), *__all__, "functions"})
