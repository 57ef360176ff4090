"""How far results may be off, by op and dtype: the table that tests, the self-test, tuning and the docs read.

An element may be off by its rounding and by the errors of the terms that it is made of. Large terms may cancel: then
errors are small next to the terms, and not next to the element, whatever the order of summation. There are two rules:

- Functions of FORWARD: TOLERANCES[dtype of the result] * (|element| + root mean square of its row). Where a beta may
  cancel what it is added to, |beta| is added, too.
- Gradients and losses: ROUNDING[dtype of the result] * |element| + multiple * EPSILON[dtype of arithmetic] * terms.
  What the terms are is in BOUNDS, and a form has them for given arrays: catalog/gradient_forms.py. Numbers below
  LEAST_NORMAL may be lost besides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import LEAST_NORMAL, Dtype, dtype_name

Array = np.ndarray[Any, Any]

# Relative errors of forward functions by the result's dtype: a few roundings.
TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
# Errors of quantised results: half a step, relative to the largest number in int8 and to the number itself in a float8.
STEPS = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}

# The distance of 1 from the next larger number, and half of it: what rounding to the nearest number may change.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDING = {name: each / 2 for name, each in EPSILON.items()}


class Bound(NamedTuple):
    """A line of the table.

    shown: the functions, and terms: the terms, as docs write them. multiple: of the epsilon of the arithmetic, which is
    float32, or float64 for arrays of that. rounded: what was rounded to the dtype of dx before it was added up, with an
    error of ROUNDING each; "" for nothing.
    """

    shown: str
    functions: tuple[str, ...]
    result: str
    multiple: float
    terms: str
    rounded: str = ""


# A sum of n numbers takes log2(n) to n roundings, most of which cancel; products and factors take a few more.
SUMS = 4.0
# Besides, a device's exp2 and reciprocal are off by 2 epsilon, and so is the number that exp2 is given.
EXPONENTIALS = 8.0
_LAYER_NORM = ("layer_norm_backward", "layer_norm_backward_from_y")
_RMS_NORM = ("rms_norm_backward", "rms_norm_backward_from_y")
_ADDED = ("add_layer_norm_backward", "add_rms_norm_backward")
_ACTIVATIONS = ("bias_gelu_backward", "bias_silu_backward")
_GATES = ("geglu_backward", "swiglu_backward")
_CENTRED = "rstd · (|g| + mean|g| + |z| · mean|g · z|)"
_PLAIN = "rstd · (|g| + |z| · mean|g · z|)"
BOUNDS = (
    Bound("`layer_norm_backward`, `..._from_y`", _LAYER_NORM, "dx", SUMS, _CENTRED),
    Bound("`rms_norm_backward`, `..._from_y`", _RMS_NORM, "dx", SUMS, _PLAIN),
    Bound("`add_layer_norm_backward`", _ADDED[:1], "dx", SUMS, f"|ds| + {_CENTRED}"),
    Bound("`add_rms_norm_backward`", _ADDED[1:], "dx", SUMS, f"|ds| + {_PLAIN}"),
    Bound("of all norms", (*_LAYER_NORM, *_RMS_NORM, *_ADDED), "dgamma", SUMS, "Σ |dy · z|"),
    Bound("of LayerNorm", (*_LAYER_NORM, *_ADDED[:1]), "dbeta", SUMS, "Σ |dy|"),
    Bound("`add_..._norm_backward`", _ADDED, "dbias", SUMS, "Σ of the terms of dx", "Σ |dx|"),
    Bound("`softmax_backward`", ("softmax_backward",), "dx", SUMS, "y · (|dy| + sum|dy · y|)"),
    Bound(
        "`log_softmax_backward`",
        ("log_softmax_backward",),
        "dx",
        EXPONENTIALS,
        "|dy| + exp(y) · (1 + |y|) · sum|dy|",
    ),
    Bound("of activations", _ACTIVATIONS, "dx", EXPONENTIALS, "|dy|"),
    Bound("of activations", _ACTIVATIONS, "dbias", EXPONENTIALS, "Σ |dy|"),
    Bound("of gates", _GATES, "dx", EXPONENTIALS, "|dy| · (|gate| + |value|)"),
    Bound(
        "`cross_entropy`, `logsumexp`", ("cross_entropy", "logsumexp"), "result", EXPONENTIALS, "1 + max|x|"
    ),
    Bound("`cross_entropy`", ("cross_entropy",), "gradient", EXPONENTIALS, "p · (1 + max(x) - x) + q"),
)


def bound(function: str, result: str) -> Bound:
    """Return the line of a result."""
    return next(each for each in BOUNDS if function in each.functions and each.result == result)


class Terms(NamedTuple):
    """The magnitudes of what a result's elements are made of, added up, in float64; rounded: as in Bound.

    factors: what may be multiplied with a number below LEAST_NORMAL, 1 for the result itself, added up.
    """

    result: str
    sums: Array
    rounded: Array | float = 0.0
    factors: Array | float = 1.0


class Right(NamedTuple):
    """A result by the definition, in float64, with what its errors are measured by. terms: None as in FORWARD.

    multiple: of epsilon of the arithmetic. x: the dtype of what was rounded on the way. axis: of a row.
    """

    exact: Array
    terms: Terms | None = None
    multiple: float = 0.0
    arithmetic: str = ""
    x: str = ""
    axis: int = -1

    def allowed(self, dtype: Dtype) -> Array | None:
        """Return how far each element of a result of this dtype may be off; None where it follows from its row."""
        if self.terms is None:
            return None
        off = ROUNDING[dtype_name(dtype)] * np.abs(self.exact) + ROUNDING[self.x] * self.terms.rounded
        off += self.multiple * EPSILON[self.arithmetic] * self.terms.sums
        if self.arithmetic == "float32":
            off += 2 * LEAST_NORMAL * self.terms.factors
        # `exact` was computed in float64, too, and may be as far off
        return np.asarray(2 * off if self.arithmetic == "float64" else off)
