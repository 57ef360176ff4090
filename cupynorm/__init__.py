"""cupynorm: LayerNorm, RMSNorm and softmax for CuPy and NumPy arrays, one kernel each, at the speed of memory."""

from cupynorm._device import CompileError, NoDeviceError
from cupynorm._plan import Plan
from cupynorm.norm import layer_norm, rms_norm
from cupynorm.softmax import log_softmax, softmax

__all__ = [
    "CompileError",
    "NoDeviceError",
    "Plan",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "softmax",
]

__version__ = "0.1.0"
