"""Quantize: how a result is quantised."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm._dtypes import quantized_dtype
from cupynorm._options import finite
from cupynorm._values import dataclass
from cupynorm.call.arguments import check_dtype, check_kind
from cupynorm.runtime import devices


@dataclass(frozen=True, eq=False)
class Quantize:
    """How a result is quantised: q = y / scale, rounded to nearest even and saturated.

    Micikevicius et al. 2022, "FP8 formats for deep learning". y is not rounded before it is divided.

    Parameters
    ----------
    dtype : str or dtype
        "int8" (-128 to 127), "float8_e4m3fn" (up to 448) or "float8_e5m2" (up to 57344), or NumPy's or ml_dtypes'
        dtype of that name.
    scale : float or array, optional
        One positive number for the whole result, or an array of one element and of x's kind, float16 to float64; then
        the call returns q. None: each row has its own, max |y| / largest with largest 127, 448 or 57344, found in the
        same pass; then the call returns (q, scales), with one scale a row, in float32 (float64 where arithmetic is),
        and y is about q * scale.

    Raises
    ------
    TypeError, ValueError
        For a dtype or scale that is none of these.

    Notes
    -----
    A row of zeros has scale 0; one with nan or inf has that as its scale. nan stays nan in a float8, and is 0 in int8.
    CuPy has no float8: on a device their bits come as uint8, and `out` is uint8.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import Quantize, rms_norm
    >>> rms_norm(np.array([[3.0, 4.0]]), eps=0, quantize=Quantize("int8", 0.01)).tolist()
    [[85, 113]]
    """

    dtype: Any
    scale: Any = None

    def __init__(self, dtype: Any, scale: Any = None) -> None:
        object.__setattr__(self, "dtype", quantized_dtype(dtype))
        object.__setattr__(self, "scale", scale)
        if self.scale is None:
            return
        if isinstance(self.scale, np.ndarray) or devices.is_device_array(self.scale):
            check_kind("scale", self.scale)
            check_dtype("scale", self.scale)
            if self.scale.size != 1:
                raise ValueError(
                    f"scale has shape {self.scale.shape}: one for the whole result, or none for one for each row"
                )
        else:
            finite("scale", self.scale, "it must be positive and finite")
        if not devices.is_device_array(self.scale) and not 0 < self.host_scale < np.inf:
            raise ValueError(f"scale is {self.scale}: it must be positive and finite")

    @property
    def per_row(self) -> bool:
        """Whether each row has a scale of its own, which is returned."""
        return self.scale is None

    @property
    def host_scale(self) -> float:
        """The scale that was given, as a number; of a device array it would have to be waited for."""
        given = self.scale
        return float(given.reshape(())[()] if isinstance(given, np.ndarray) else given)


def quantize_option(quantize: Any) -> tuple[Any, Any]:
    """Return what a signature has of quantize=, and the array that it holds, None if there is none."""
    if not isinstance(quantize, Quantize):
        return (quantize, type(quantize)), None
    scale = quantize.scale
    if type(scale) is not float and (isinstance(scale, np.ndarray) or devices.is_device_array(scale)):
        return quantize.dtype, scale
    return (quantize.dtype, scale), None
