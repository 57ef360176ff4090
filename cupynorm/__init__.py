"""cupynorm: LayerNorm, RMSNorm and softmax for CuPy and NumPy arrays, one kernel each, at the speed of memory."""

from cupynorm import functions as functions
from cupynorm._device import CompileError, NoDeviceError
from cupynorm._expression import DeviceFunction, TraceError
from cupynorm._extras import Quantize
from cupynorm._plan import Plan
from cupynorm.add_norm import add_layer_norm, add_rms_norm
from cupynorm.elementwise import bias_gelu, bias_silu, dropout, geglu, swiglu
from cupynorm.fuse import Fusion, fuse
from cupynorm.heads import add_qkv_bias, merge_heads, split_heads
from cupynorm.norm import layer_norm, rms_norm
from cupynorm.softmax import log_softmax, softmax

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
