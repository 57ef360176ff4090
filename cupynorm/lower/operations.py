"""The operations that a traced function is made of: with NumPy, and in C++."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cupynorm._dtypes import dtype_of
from cupynorm._values import NamedTuple
from cupynorm.host import special
from cupynorm.host.elementwise_gradients import DERIVATIVES
from cupynorm.host.reference import ACTIVATIONS, _round

Array = np.ndarray[Any, Any]


class Operation(NamedTuple):
    """An operation. takes, gives: a letter for each value that goes in or comes out: n a number, c a condition."""

    takes: str
    gives: str
    compute: Callable[..., Any]  # on NumPy arrays
    cpp: str


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _cast(x: Array, name: str) -> Array:
    dtype = dtype_of(name)
    return _round(x, dtype).astype(dtype).astype(x.dtype)


OPERATIONS = {
    "add": Operation("nn", "n", np.add, "{} + {}"),
    "subtract": Operation("nn", "n", np.subtract, "{} - {}"),
    "multiply": Operation("nn", "n", np.multiply, "{} * {}"),
    "divide": Operation("nn", "n", np.true_divide, "fn_divide({}, {})"),
    "half_reciprocal": Operation("n", "n", np.reciprocal, "fn_half_reciprocal({})"),  # of a float16's value
    "negative": Operation("n", "n", np.negative, "-{}"),
    "less": Operation("nn", "c", np.less, "{} < {}"),
    "less_equal": Operation("nn", "c", np.less_equal, "{} <= {}"),
    "greater": Operation("nn", "c", np.greater, "{} > {}"),
    "greater_equal": Operation("nn", "c", np.greater_equal, "{} >= {}"),
    "equal": Operation("nn", "c", np.equal, "{} == {}"),
    "not_equal": Operation("nn", "c", np.not_equal, "{} != {}"),
    "logical_and": Operation("cc", "c", np.logical_and, "{} && {}"),
    "logical_or": Operation("cc", "c", np.logical_or, "{} || {}"),
    "logical_not": Operation("c", "c", np.logical_not, "!{}"),
    "number": Operation("c", "n", lambda c: np.where(c, 1.0, 0.0), "T({})"),
    "where": Operation("cnn", "n", np.where, "{} ? {} : {}"),
    "abs": Operation("n", "n", np.abs, "fn_abs({})"),
    "minimum": Operation("nn", "n", np.minimum, "fn_minimum({}, {})"),
    "maximum": Operation("nn", "n", np.maximum, "fn_maximum({}, {})"),
    "exp": Operation("n", "n", np.exp, "fn_exp({})"),
    "log": Operation("n", "n", np.log, "fn_log({})"),
    "sqrt": Operation("n", "n", np.sqrt, "fn_sqrt({})"),
    "rsqrt": Operation("n", "n", lambda x: 1 / np.sqrt(x), "fn_rsqrt({})"),
    "tanh": Operation("n", "n", np.tanh, "fn_tanh({})"),
    "erf": Operation("n", "n", special.erf, "fn_erf({})"),
    "sigmoid": Operation("n", "n", _sigmoid, "fn_sigmoid({})"),
    "silu": Operation("n", "n", ACTIVATIONS["silu"], "fn_silu({})"),
    "gelu": Operation("n", "n", ACTIVATIONS["gelu"], "fn_gelu({})"),
    "gelu_tanh": Operation("n", "n", ACTIVATIONS["gelu_tanh"], "fn_gelu_tanh({})"),
    "silu_slope": Operation("n", "n", DERIVATIVES["silu"], "fn_silu_slope({})"),  # the derivative of silu
    "gelu_slope": Operation("n", "n", DERIVATIVES["gelu"], "fn_gelu_slope({})"),
    "cast_float16": Operation("n", "n", functools.partial(_cast, name="float16"), "fn_cast_float16({})"),
    "cast_bfloat16": Operation("n", "n", functools.partial(_cast, name="bfloat16"), "fn_cast_bfloat16({})"),
    "cast_float32": Operation("n", "n", functools.partial(_cast, name="float32"), "fn_cast_float32({})"),
}
LIMITS = {"minimum": "fn_at_most", "maximum": "fn_at_least"}  # where one side is a constant: cheaper
# NumPy's own functions, on a traced value, mean these.
UFUNCS = {
    np.add: "add",
    np.subtract: "subtract",
    np.multiply: "multiply",
    np.true_divide: "divide",
    np.negative: "negative",
    np.less: "less",
    np.less_equal: "less_equal",
    np.greater: "greater",
    np.greater_equal: "greater_equal",
    np.equal: "equal",
    np.not_equal: "not_equal",
    np.logical_and: "logical_and",
    np.logical_or: "logical_or",
    np.logical_not: "logical_not",
    np.bitwise_and: "logical_and",
    np.bitwise_or: "logical_or",
    np.invert: "logical_not",
    np.absolute: "abs",
    np.fabs: "abs",
    np.minimum: "minimum",
    np.maximum: "maximum",
    np.exp: "exp",
    np.log: "log",
    np.sqrt: "sqrt",
    np.tanh: "tanh",
}
THE_TABLE = (
    "cupynorm.functions has abs, cast, clip, erf, exp, gelu, log, maximum, minimum, relu, rsqrt, sigmoid, silu, sqrt, "
    "tanh, where"
)
