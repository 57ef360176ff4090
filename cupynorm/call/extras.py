"""Steps that a call fuses with a row op: a mask or a sum before it, quantisation after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm._dtypes import Dtype, quantized_dtype, result_dtype
from cupynorm._options import finite, within
from cupynorm._values import NamedTuple
from cupynorm.call.arguments import Call, check_input
from cupynorm.call.masks import Asked, Mask, mask_of
from cupynorm.call.quantize import Quantize
from cupynorm.host import reference
from cupynorm.host.philox import PROBABILITY, Dropout
from cupynorm.host.philox import dropout as checked_dropout
from cupynorm.runtime import devices


def quantize_of(given: Any) -> Quantize | None:
    """Return what quantize= means: a Quantize, or the dtype of one with a scale for each row."""
    if given is None or isinstance(given, Quantize):
        return given
    return Quantize(quantized_dtype(given, "quantize"))


def dropout_of(p: Any, seed: Any, offset: Any) -> Dropout | None:
    """Check the options of a dropout around an op: None if nothing is dropped."""
    if finite("dropout", p, PROBABILITY) == 0:
        return None
    if seed is None and 0 < p <= 1:
        raise ValueError(f"dropout={p} needs a seed: what is dropped follows from seed and offset alone")
    return checked_dropout(p, 0 if seed is None else seed, offset, "dropout")


class Add(NamedTuple):
    """The input of a norm: dropout(x + bias) + alpha * residual.

    residual has x's shape, bias is a column like gamma. wants_sum: return that, too, in x's dtype.
    """

    residual: Any
    bias: Any
    alpha: float
    dropout: Dropout | None
    wants_sum: bool


class Extras(NamedTuple):
    """The steps fused with a call of a row op: at most one of a mask and an add, and the quantisation of the result."""

    masked: Asked | None = None
    add: Add | None = None
    quantize: Quantize | None = None

    @property
    def dtype(self) -> Dtype | None:
        """The result's dtype, where this says it."""
        return None if self.quantize is None else self.quantize.dtype

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by name that are no columns."""
        found = {} if self.masked is None else self.masked.arrays()
        if self.add is not None:
            found["residual"] = self.add.residual
        scale = None if self.quantize is None else self.quantize.scale
        if isinstance(scale, np.ndarray) or devices.is_device_array(scale):
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
        if mask is not None:
            within(call.compute, scale=mask.scale)
        if self.add is not None:
            within(call.compute, alpha=self.add.alpha)
            check_input("residual", self.add.residual, on_device=call.on_device)
            if self.add.residual.shape != x.shape:
                raise ValueError(f"residual has shape {self.add.residual.shape}, x has {x.shape}")
            if self.add.wants_sum:
                total = call.empty_like_x(result_dtype(x.dtype))
        if self.quantize is not None:
            if self.quantize.per_row:
                scales = call.empty_statistic()
            elif "quantize.scale" not in self.arrays():
                within(call.compute, scale=self.quantize.host_scale)
        return CheckedExtras(mask, self.add, self.quantize, scales, total)


class CheckedExtras(NamedTuple):
    """Checked extras, with the results that it adds to the op's, in their order."""

    mask: Mask | None
    add: Add | None
    quantize: Quantize | None
    scales: Any
    total: Any

    @property
    def results(self) -> dict[str, Any]:
        """The results that it adds, by name: scales, then the sum."""
        named = {"scales": self.scales, "sum": self.total}
        return {name: each for name, each in named.items() if each is not None}

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
