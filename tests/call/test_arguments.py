"""Bad input gets a clear error before anything runs; good input of every layout gets through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm import layer_norm, log_softmax, rms_norm, softmax

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("op", [layer_norm, rms_norm, softmax, log_softmax])
class TestEveryOp:
    @pytest.mark.parametrize(
        "x",
        [
            X.astype(np.int64),
            X.astype(np.complex64),
            X.astype(np.longdouble),
            X.astype(np.uint32),
            np.zeros(3, dtype=[("a", "f4")]),
            np.array([None, 1.0]),
        ],
        ids=lambda x: str(x.dtype),
    )
    def test_other_dtypes_are_named_with_those_allowed(self, op: Any, x: Any) -> None:
        with pytest.raises(TypeError, match=r"x: dtype .* is not supported: use .*float16, float32, float64"):
            op(x)

    @pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, None, "x", memoryview(b"abcd")])
    def test_other_kinds_are_named_with_those_allowed(self, op: Any, x: Any) -> None:
        with pytest.raises(TypeError, match="x is a .*: give a NumPy or a CuPy array"):
            op(x)

    def test_a_masked_array_is_refused(self, op: Any) -> None:
        with pytest.raises(TypeError, match="x is a masked array"):
            op(np.ma.masked_array(X, X > 0))

    @pytest.mark.parametrize("axis", [3, -4, (0, 5)])
    def test_axis_out_of_range(self, op: Any, axis: Any) -> None:
        with pytest.raises(ValueError, match=r"axis -?\d is out of range: x has 3 axes"):
            op(X, axis=axis)

    def test_axis_repeated(self, op: Any) -> None:
        with pytest.raises(ValueError, match="names an axis of x twice"):
            op(X, axis=(-1, 2))

    @pytest.mark.parametrize("axis", [0, 1, (0, 2), (1, 0), (0, 1, 2), None], ids=str)
    def test_any_axes(self, op: Any, axis: Any) -> None:
        axes = tuple(range(3)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        order = (*(at for at in range(3) if at not in axes), *sorted(axes))
        turned = np.ascontiguousarray(X.transpose(order))

        wanted = op(turned, axis=tuple(range(-len(axes), 0))).transpose(np.argsort(order))

        # rows whose elements lie apart are added up in another order
        np.testing.assert_allclose(op(X, axis=axis), wanted, rtol=1e-6, atol=1e-6)

    def test_no_axis(self, op: Any) -> None:
        with pytest.raises(ValueError, match="axis is empty"):
            op(X, axis=())

    def test_axis_that_is_no_integer(self, op: Any) -> None:
        with pytest.raises(TypeError):
            op(X, axis=1.0)

    def test_no_axes_at_all(self, op: Any) -> None:
        with pytest.raises(ValueError, match="x has 0 axes"):
            op(np.zeros((), np.float32))

    def test_an_empty_axis_is_refused_and_an_empty_batch_is_not(self, op: Any) -> None:
        with pytest.raises(ValueError, match="the normalised axes are empty"):
            op(np.zeros((3, 0), np.float32))

        assert op(np.zeros((0, 3), np.float32)).shape == (0, 3)

    @pytest.mark.parametrize(
        ("out", "error", "message"),
        [
            (np.zeros((2, 3, 5), np.float32), ValueError, r"out has shape \(2, 3, 5\), x has \(2, 3, 4\)"),
            (np.zeros((2, 3, 4), np.int32), TypeError, "out: dtype int32 is not supported"),
            ([0.0], TypeError, "out is a builtins.list"),
            (np.broadcast_to(np.zeros(4, np.float32), (2, 3, 4)), ValueError, "out is read-only"),
        ],
    )
    def test_out_that_does_not_fit(self, op: Any, out: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            op(X, out=out)

    def test_out_whose_elements_overlap(self, op: Any) -> None:
        out = np.lib.stride_tricks.as_strided(np.zeros(24, np.float32), (2, 3, 4), (16, 8, 4))
        with pytest.raises(ValueError, match="its elements overlap one another"):
            op(X, out=out)

    def test_out_and_dtype_that_differ(self, op: Any) -> None:
        with pytest.raises(ValueError, match="out has dtype float32, dtype asks for float16"):
            op(X, out=np.empty_like(X), dtype=np.float16)

    def test_out_partly_over_x(self, op: Any) -> None:
        memory = np.zeros(30, np.float32)
        with pytest.raises(ValueError, match="out and x share memory in part"):
            op(memory[:24].reshape(6, 4), out=memory[4:28].reshape(6, 4))

    def test_out_between_the_rows_of_x_shares_nothing(self, op: Any) -> None:
        memory = np.ones((6, 8), np.float32)
        out = memory[:, 4:]

        assert op(memory[:, :4], out=out) is out

    def test_out_may_be_x(self, op: Any) -> None:
        expected = op(X)
        x = X.copy()

        assert op(x, out=x) is x
        np.testing.assert_array_equal(expected, x)

    def test_plan_is_for_devices(self, op: Any) -> None:
        with pytest.raises(ValueError, match="plan='warp' chooses a kernel: x is a NumPy array"):
            op(X, plan="warp")

    @pytest.mark.parametrize("dtype", ["float16", np.float64, np.dtype("f4")])
    def test_dtype_is_the_results(self, op: Any, dtype: Any) -> None:
        assert op(X, dtype=dtype).dtype == np.dtype(dtype)

    def test_an_unknown_dtype_is_refused(self, op: Any) -> None:
        with pytest.raises(TypeError, match="dtype int8 is not supported"):
            op(X, dtype=np.int8)


@pytest.mark.parametrize("op", [layer_norm, rms_norm])
class TestNorms:
    @pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
    def test_eps_out_of_range(self, op: Any, eps: float) -> None:
        with pytest.raises(ValueError, match="eps is .*: it must be 0 or a positive finite number"):
            op(X, eps=eps)

    @pytest.mark.parametrize("shape", [(3,), (5,), (3, 4), (1, 3), (2, 1, 4), (2, 3, 4)])
    def test_gamma_that_does_not_fit(self, op: Any, shape: Any) -> None:
        with pytest.raises(ValueError, match=r"gamma has shape .*, the normalised axes of x have \(4,\)"):
            op(X, np.ones(shape, np.float32))

    def test_gamma_of_another_dtype_than_the_allowed(self, op: Any) -> None:
        with pytest.raises(TypeError, match="gamma: dtype int64 is not supported"):
            op(X, np.ones(4, np.int64))

    def test_out_over_gamma(self, op: Any) -> None:
        memory = np.ones((7, 4), np.float32)
        with pytest.raises(ValueError, match="out and gamma share memory"):
            op(np.ones((6, 4), np.float32), memory[0], out=memory[:6])

    @pytest.mark.parametrize("shape", [(4,), (1,), (), (3, 4), (3, 1), (1, 4)])
    def test_gamma_broadcasts_over_two_axes(self, op: Any, shape: Any) -> None:
        gamma = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

        expected = op(X, np.ascontiguousarray(np.broadcast_to(gamma, (3, 4))), axis=(-2, -1))

        np.testing.assert_array_equal(expected, op(X, gamma, axis=(-2, -1)))


def test_beta_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"beta has shape \(3,\)"):
        layer_norm(X, None, np.ones(3, np.float32))


def test_statistics_have_xs_shape_without_the_normalised_axes() -> None:
    y, mean, rstd = layer_norm(X.astype(np.float16), axis=(1, 2), return_stats=True)

    assert (y.shape, mean.shape, rstd.shape) == ((2, 3, 4), (2,), (2,))
    assert (y.dtype, mean.dtype, rstd.dtype) == (np.float16, np.float32, np.float32)
    assert layer_norm(X.astype(np.float64), return_stats=True)[1].dtype == np.float64
