"""Number options that the type of arithmetic does not hold: what float32 would make inf of, or 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynorm import (
    Quantize,
    add_layer_norm,
    add_layer_norm_backward,
    bias_gelu_backward,
    cross_entropy,
    fuse,
    layer_norm,
    layer_norm_backward,
    log_softmax,
    logsumexp,
    rescale,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_from_y,
    sigma_clip,
    softmax,
    softmax_backward,
    standardize,
)
from cupynorm._dtypes import LEAST_NORMAL
from cupynorm.ops.norm import LAYER_NORM
from tests.simulator import simulated

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["simulated"]  # a fixture

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
LABELS = np.zeros((2, 3), np.int64)
SCALED = fuse(rms_norm, load=lambda x, factor: x * factor)

BEYOND: dict[str, tuple[Callable[..., Any], str]] = {
    "softmax": (lambda x, v: softmax(x, scale=v), "scale"),
    "softmax with a mask": (lambda x, v: softmax(x, scale=v, causal=True), "scale"),
    "log_softmax": (lambda x, v: log_softmax(x, scale=v), "scale"),
    "logsumexp": (lambda x, v: logsumexp(x, scale=v), "scale"),
    "softmax_backward": (lambda x, v: softmax_backward(x, x, scale=v), "scale"),
    "layer_norm": (lambda x, v: layer_norm(x, eps=v), "eps"),
    "layer_norm, quantised": (lambda x, v: layer_norm(x, eps=v, quantize="int8"), "eps"),
    "rms_norm": (lambda x, v: rms_norm(x, eps=v), "eps"),
    "layer_norm_backward": (lambda x, v: layer_norm_backward(x, x, eps=v), "eps"),
    "add_layer_norm": (lambda x, v: add_layer_norm(x, x, alpha=-v), "alpha"),
    "add_layer_norm, eps": (lambda x, v: add_layer_norm(x, x, eps=v), "eps"),
    "add_layer_norm_backward": (lambda x, v: add_layer_norm_backward(x, x, x, alpha=v), "alpha"),
    "Quantize": (lambda x, v: softmax(x, quantize=Quantize("int8", v)), "scale"),
    "standardize": (lambda x, v: standardize(x, eps=v), "eps"),
    "rescale": (lambda x, v: rescale(x, low=-v), "low"),
    "sigma_clip": (lambda x, v: sigma_clip(x, sigma=v), "sigma"),
    "sigma_clip, one side": (lambda x, v: sigma_clip(x, sigma_upper=v), "sigma_upper"),
    "a number of a fusion": (SCALED, "factor"),
    "eps of a fusion": (lambda x, v: SCALED(x, 1.0, eps=v), "eps"),
    "a number of a fusion's gradient": (lambda x, v: SCALED.backward(x, x, v), "factor"),
    "eps of a fusion's gradient": (lambda x, v: SCALED.backward(x, x, 1.0, eps=v), "eps"),
}


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_number_beyond_float32_is_refused_where_arithmetic_is_in_float32(name: str, dtype: Any) -> None:
    call, option = BEYOND[name]

    call(X.astype(dtype), 2.0)
    for value in (1e300, 3.5e38):
        with pytest.raises(
            ValueError, match=rf"^{option} is -?{value!r}".replace("+", r"\+") + ", beyond float32"
        ):
            call(X.astype(dtype), value)


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "a number of a fusion", "Quantize"])
def test_it_is_refused_on_a_device_as_on_the_host(simulated: Any, name: str) -> None:
    call, option = BEYOND[name]
    x = simulated.cupy.asarray(X)

    call(x, 2.0)
    with pytest.raises(ValueError, match=rf"^{option} is 1e\+300, beyond float32"):
        call(x, 1e300)


@pytest.mark.parametrize("name", BEYOND)
def test_float64_takes_every_finite_number(name: str) -> None:
    with np.errstate(all="ignore"):
        BEYOND[name][0](X.astype(np.float64), 1e300)


@pytest.mark.parametrize("option", ["z_loss", "dloss"])
def test_numbers_of_cross_entropy_are_checked_too(option: str) -> None:
    grad = option == "dloss"

    with pytest.raises(ValueError, match=rf"^{option} is 1e\+300, beyond float32: give dtype=\"float64\""):
        cross_entropy(X, LABELS, return_grad=grad, **{option: 1e300})  # type: ignore[call-overload]


def test_an_infinite_number_of_a_fusion_is_meant() -> None:
    y = fuse(softmax, load=lambda x, least: np.where(x > 0, x, least))(X[..., :3], -np.inf)

    assert np.allclose(y[1], softmax(X[1, :, :3]), rtol=1e-6)


ZEROS: dict[str, Callable[[Any, float], Any]] = {
    "layer_norm": lambda x, eps: layer_norm(x, eps=eps),
    "rms_norm": lambda x, eps: rms_norm(x, eps=eps),
    "add_layer_norm": lambda x, eps: add_layer_norm(x, x, eps=eps)[0],
    "standardize": lambda x, eps: standardize(x, eps=eps),
    "rms_norm_backward": lambda x, eps: rms_norm_backward(x, x, eps=eps)[0],
    "a fusion": lambda x, eps: SCALED(x, 1.0, eps=eps),
}


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("eps", [1e-300, 1e-44])
def test_an_eps_that_float32_rounds_to_zero_still_keeps_rows_of_zeros_finite(
    simulated: Any, name: str, eps: float
) -> None:
    x = np.zeros((2, 8), np.float32)

    assert not ZEROS[name](x, eps).any()
    assert not ZEROS[name](simulated.cupy.asarray(x), eps).get().any()


def test_a_device_that_flushes_subnormals_gets_a_normal_eps() -> None:
    single, double = np.dtype(np.float32), np.dtype(np.float64)

    assert LAYER_NORM.mirror(single, (), 1e-44).values[-1] == LEAST_NORMAL
    assert LAYER_NORM.mirror(single, (), 0.0).values[-1] == 0
    assert LAYER_NORM.mirror(double, (), 1e-44).values[-1] == 1e-44


# by the parameter: results in float64 of float32 rows and a number, where dy, or where the result goes, is float64
WIDE: dict[str, Callable[..., Any]] = {
    "gamma": lambda x, dy, one, labels, number: rms_norm_backward_from_y(
        dy, x, number, x[..., 0], add_to=one.reshape(())
    )[1],
    "bias": lambda x, dy, one, labels, number: bias_gelu_backward(dy, x, number, add_to=one.reshape(()))[1],
    "gamma of a fusion": lambda x, dy, one, labels, number: SCALED.backward(
        dy, x, one, gamma=number
    ).operands[0],
    "weight": lambda x, dy, one, labels, number: cross_entropy(x, labels, weight=number, out=dy[..., 0]),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_number_keeps_its_digits_on_a_device_where_arithmetic_is_in_float64(
    simulated: Any, name: str
) -> None:
    given = (X, X.astype(np.float64)[::-1].copy(), np.ones(1), LABELS)
    there = [simulated.cupy.asarray(each) for each in given]

    np.testing.assert_allclose(WIDE[name](*there, 0.1).get(), WIDE[name](*given, 0.1), rtol=1e-10)


NO_AXES: dict[str, Callable[[Any, Any], Any]] = {
    "gamma": lambda x, parameter: rms_norm_backward(x, x, parameter)[1],
    "dbeta like gamma": lambda x, parameter: layer_norm_backward(x, x, parameter)[2],
    "bias of a sum": lambda x, parameter: add_layer_norm_backward(x, None, x, bias=parameter)[4],
    "bias of an activation": lambda x, parameter: bias_gelu_backward(x, x, parameter)[1],
    "bias of softmax": lambda x, parameter: softmax_backward(x, x, bias=parameter, return_dbias=True)[1],
    "gamma of a fusion": lambda x, parameter: SCALED.backward(x, x, 1.0, gamma=parameter).gamma,
}


@pytest.mark.parametrize("name", NO_AXES)
def test_the_gradient_of_an_array_of_no_axes_has_its_dtype(name: str) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        found = NO_AXES[name](X, np.array(0.5, dtype))

        assert (found.shape, found.dtype) == ((), dtype)
    if name != "bias of softmax":  # where a number is no bias
        numbers = (0.5, np.float16(0.5), np.array(2))
        assert {NO_AXES[name](X, each).dtype for each in numbers} == {np.dtype(np.float32)}
