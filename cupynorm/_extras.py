"""What a call wants beside a row op: a mask or a sum on the way in, quantisation on the way out."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from cupynorm import _device, reference
from cupynorm._arguments import Call, check_dtype, check_kind
from cupynorm._dtypes import Dtype, quantized_dtype
from cupynorm._mask import Asked, Mask, mask_of
from cupynorm._options import finite
from cupynorm._philox import Dropout


@dataclasses.dataclass(frozen=True, eq=False)
class Quantize:
    """How a result is quantised: q = y / scale, rounded to nearest even and saturated, of `dtype`.

    dtype: "int8" (-128 to 127), "float8_e4m3fn" (up to 448) or "float8_e5m2" (up to 57344), or NumPy's or ml_dtypes' dtype of
    that name; Micikevicius et al. 2022, "FP8 formats for deep learning". y is not rounded before it is divided.

    scale: one positive number for the whole result, or an array of one element and of x's kind, float16 to float64; then the
    call returns q. None: each row has its own, max |y| / largest with largest 127, 448 or 57344, found in the same pass; then
    the call returns (q, scales), with one scale a row, in float32 (float64 where arithmetic is), and y is about q * scale.
    A row of zeros has scale 0; one with nan or inf has that as its scale.

    nan stays nan in a float8, and is 0 in int8. CuPy has no float8: on a device their bits come as uint8, and `out` is uint8.
    """

    dtype: Any
    scale: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", quantized_dtype(self.dtype))
        if self.scale is None:
            return
        if isinstance(self.scale, np.ndarray) or _device.is_device_array(self.scale):
            check_kind("scale", self.scale)
            check_dtype("scale", self.scale)
            if self.scale.size != 1:
                raise ValueError(
                    f"scale has shape {self.scale.shape}: one for the whole result, or none for one for each row"
                )
        else:
            finite("scale", self.scale, "it must be positive and finite")
        if not _device.is_device_array(self.scale) and not 0 < self.host_scale < np.inf:
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


def quantize_of(given: Any) -> Quantize | None:
    """Return what quantize= means: a Quantize, or the dtype of one with a scale for each row."""
    if given is None or isinstance(given, Quantize):
        return given
    return Quantize(quantized_dtype(given, "quantize"))


def _is_number(scale: Any) -> bool:
    """Say whether a scale is given as a number, not as an array or not at all."""
    if type(scale) is float or scale is None:
        return scale is not None
    return not isinstance(scale, np.ndarray) and not _device.is_device_array(scale)


class Add(NamedTuple):
    """What a norm is taken of: dropout(x + bias) + alpha * residual.

    residual has x's shape, bias is a column like gamma. wants_sum: return that, too, in x's dtype.
    """

    residual: Any
    bias: Any
    alpha: float
    dropout: Dropout | None
    wants_sum: bool


class Extras(NamedTuple):
    """What a call of a row op has fused around it: at most one of a mask and an add, and what becomes of the result."""

    masked: Asked | None = None
    add: Add | None = None
    quantize: Quantize | None = None

    @property
    def dtype(self) -> Dtype | None:
        """The result's dtype, where this says it."""
        return None if self.quantize is None else self.quantize.dtype

    def given(self) -> tuple[Any, ...]:
        """Return everything that may be an array, in a fixed order; None where there is none."""
        masked, adds = self.masked or Asked(), self.add
        scale = None if self.quantize is None or _is_number(self.quantize.scale) else self.quantize.scale
        added = (None, None) if adds is None else (adds.residual, adds.bias)
        return (masked.where, masked.bias, masked.lengths, *added, scale)

    def options(self) -> tuple[Any, ...]:
        """Return what else it says, but for the seed and the offset of a dropout: calls alike in it run alike."""
        masked, adds, quantize = self.masked or Asked(), self.add, self.quantize
        given = (masked.causal, masked.causal_offset, masked.window)
        band = (*given, *map(type, given))
        mask = (masked.scale, type(masked.scale), masked.left_padded, *band)
        add = None if adds is None else (adds.alpha, adds.dropout and adds.dropout.p, adds.wants_sum)
        scale = None if quantize is None or not _is_number(quantize.scale) else quantize.scale
        return (mask, add, None if quantize is None else (quantize.dtype, quantize.scale is None, scale))

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by name that are no columns."""
        found = {} if self.masked is None else self.masked.arrays()
        if self.add is not None:
            found["residual"] = self.add.residual
        scale = None if self.quantize is None else self.quantize.scale
        if isinstance(scale, np.ndarray) or _device.is_device_array(scale):
            found["quantize.scale"] = scale
        return found

    def with_bias(self, bias: Any) -> Extras:
        """Return the same with the bias of a sum as it was checked."""
        return self if self.add is None else self._replace(add=self.add._replace(bias=bias))

    def checked(self, call: Call) -> CheckedExtras:
        """Check what depends on x, and allocate the further results of a call that is checked otherwise."""
        x = call.x
        mask = None if self.masked is None else mask_of(self.masked, x.shape, call.axes)
        total = scales = None
        if self.add is not None:
            check_dtype("residual", self.add.residual)
            if self.add.residual.shape != x.shape:
                raise ValueError(f"residual has shape {self.add.residual.shape}, x has {x.shape}")
            if self.add.wants_sum:
                total = call.empty(x.shape, x.dtype)
        if self.quantize is not None and self.quantize.per_row:
            scales = call.empty_statistic()
        return CheckedExtras(mask, self.add, self.quantize, scales, total)


class CheckedExtras(NamedTuple):
    """Checked extras, with the results that it adds to the op's, in their order."""

    mask: Mask | None
    add: Add | None
    quantize: Quantize | None
    scales: Any
    total: Any

    @property
    def results(self) -> tuple[Any, ...]:
        """The results that it adds: scales, then the sum."""
        return tuple(each for each in (self.scales, self.total) if each is not None)

    def on_host(self) -> reference.Extras:
        """Return it for NumPy arrays."""
        add = quantize = None
        if self.add is not None:
            residual, bias, alpha, dropout, _ = self.add
            add = reference.Adding(residual, bias, alpha, dropout, self.total)
        if self.quantize is not None:
            scale = None if self.quantize.per_row else self.quantize.host_scale
            quantize = reference.Quantizing(scale, self.scales)
        return reference.Extras(None if self.mask is None else self.mask.on_host(), add, quantize)
