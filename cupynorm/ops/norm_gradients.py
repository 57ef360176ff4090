"""Gradients of layer_norm and rms_norm, from their input or their result."""

from __future__ import annotations

from typing import Any

from cupynorm.ops.norm_gradient_calls import run
from cupynorm.plan.config import Plan


def layer_norm_backward(
    dy: Any,
    x: Any,
    gamma: Any = None,
    mean: Any = None,
    rstd: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-5,
    parameters: bool = True,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of layer_norm with respect to x, gamma and beta.

    With z = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - mean(g) - z * mean(g * z)), where means are over the
    normalised axes; dgamma is the sum of dy * z over all rows, dbeta that of dy. It is the derivative of equations 3
    and 4 of Ba, Kiros and Hinton 2016, "Layer Normalization".

    Parameters
    ----------
    dy : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64, of x's shape: the gradient that arrives at the
        result.
    x : array
        The input of layer_norm.
    gamma : array or float, optional
        As in layer_norm. None: there was none, so g = dy.
    mean, rstd : array, optional
        What ``layer_norm(x, ..., return_stats=True)`` returned: of x's shape without the normalised axes, both or
        neither. Without them they are computed from x and eps.
    axis : int, tuple of int, or None, default -1
        As in layer_norm.
    eps : float, default 1e-5
        As in layer_norm; it matters only if mean and rstd are not given.
    parameters : bool, default True
        Compute dgamma and dbeta. With False they are None.
    out : array, optional
        Where dx is written, of x's shape and of any dtype; may be dy or x itself.
    dtype : dtype, optional
        That of dx; default: that of `out`, else x's.
    add_to : tuple of array or None, optional
        (dgamma, dbeta): arrays that the gradients of parameters are added to, and that are returned in their place.
        That of dgamma has gamma's shape; that of dbeta, and of dgamma without a gamma, has any shape that broadcasts to
        the normalised axes: beta's.
    plan : str or Plan, optional
        As in layer_norm, for the kernel that writes dx. Sums over rows and statistics that are not given have kernels
        of their own, which it does not concern.

    Returns
    -------
    tuple of array
        (dx, dgamma, dbeta). dgamma and dbeta have gamma's shape and dtype. Without a gamma they have the shape of the
        normalised axes, and with a number no axes; both are then of float32, or of float64 for an x of float64.

    Raises
    ------
    TypeError
        For arrays of another kind or dtype, and a plan that is none.
    ValueError
        For shapes, axes, eps, or an `out` or add_to that do not fit, and a plan that cannot hold the row, or for NumPy
        arrays.

    Notes
    -----
    Each element is rounded once; arithmetic is in float32, or in float64 if dy, x or dx is float64, and on the host for
    rows of more than 131072 columns. Given statistics are taken as they are: where |mean| is far larger than the
    deviations, a mean that was rounded to float32 costs digits that x alone would give.

    On the host dgamma and dbeta are summed in float64, one row after another in C order, from what add_to holds on. So
    with an add_to of float64, rows that are cut into several calls give the bits of one call. On a device they are
    summed in the type of arithmetic, in an order that follows from the shape and the plan: the bits are the same from
    run to run, however many blocks a device holds. They are sums, no means, and are also summed over all along which
    gamma or beta are broadcast.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import layer_norm_backward
    >>> x, dy = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 9.0]]), np.array([[0.0, 0.0, 6.0], [1.0, 1.0, 1.0]])
    >>> dx, dgamma, dbeta = layer_norm_backward(dy, x, np.ones(3), eps=0)
    >>> dx.round(4).tolist()
    [[1.2247, -2.4495, 1.2247], [0.0, 0.0, 0.0]]
    >>> dgamma.round(4).tolist(), dbeta.tolist()
    ([-1.019, -0.3397, 8.7072], [1.0, 1.0, 7.0])
    """
    return run(  # type: ignore[no-any-return]
        "layer_norm_backward",
        dy,
        ("x", x),
        centred=True,
        gamma=gamma,
        mean=mean,
        rstd=rstd,
        eps=eps,
        axis=axis,
        out=out,
        dtype=dtype,
        add_to=add_to,
        parameters=parameters,
        plan=plan,
    )


def rms_norm_backward(
    dy: Any,
    x: Any,
    gamma: Any = None,
    rstd: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-6,
    parameters: bool = True,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any]:
    """Return the gradients of rms_norm with respect to x and gamma.

    With z = x * rstd and g = dy * gamma: dx = rstd * (g - z * mean(g * z)), where the mean is over the normalised axes;
    dgamma is the sum of dy * z over all rows. It is the derivative of equation 4 of Zhang and Sennrich 2019, "Root Mean
    Square Layer Normalization".

    Parameters
    ----------
    dy, out, dtype, parameters, plan
        As in layer_norm_backward.
    x : array
        The input of rms_norm.
    gamma : array or float, optional
        As in rms_norm.
    rstd : array, optional
        What ``rms_norm(x, ..., return_stats=True)`` returned. Without it, it is computed from x and eps.
    axis : int, tuple of int, or None, default -1
        As in rms_norm.
    eps : float, default 1e-6
        As in rms_norm; it matters only if rstd is not given.
    add_to : array, optional
        An array of gamma's shape that dgamma is added to, and that is returned in its place.

    Returns
    -------
    tuple of array
        (dx, dgamma), of shapes and dtypes as in layer_norm_backward.

    Raises
    ------
    TypeError, ValueError
        As layer_norm_backward does.

    Notes
    -----
    As in layer_norm_backward.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import rms_norm_backward
    >>> dx, dgamma = rms_norm_backward(np.array([[5.0, 0.0]]), np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), eps=0)
    >>> dx.round(4).tolist(), dgamma.round(4).tolist()
    ([[0.9051, -0.6788]], [4.2426, 0.0])
    """
    return run(  # type: ignore[no-any-return]
        "rms_norm_backward",
        dy,
        ("x", x),
        centred=False,
        gamma=gamma,
        rstd=rstd,
        eps=eps,
        axis=axis,
        out=out,
        dtype=dtype,
        add_to=add_to,
        parameters=parameters,
        plan=plan,
    )


def layer_norm_backward_from_y(
    dy: Any,
    y: Any,
    gamma: Any = None,
    beta: Any = None,
    rstd: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    parameters: bool = True,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of layer_norm from its result instead of its input, which then need not be kept.

    As layer_norm_backward with z = (y - beta) / gamma: a network that goes on with y alone keeps one array less.

    Parameters
    ----------
    dy : array
        The gradient that arrives at y, of its shape.
    y : array
        The result of layer_norm, as it was returned.
    gamma, beta : array or float, optional
        As they were in layer_norm. No element of gamma is 0.
    rstd : array
        What ``layer_norm(x, ..., return_stats=True)`` returned; it does not follow from y.
    axis, parameters, plan
        As in layer_norm_backward.
    out : array, optional
        Where dx is written, of y's shape and of any dtype; may be dy or y itself.
    dtype : dtype, optional
        That of dx; default: that of `out`, else y's.
    add_to : tuple of array or None, optional
        As in layer_norm_backward; that of dbeta has beta's shape if there is a beta.

    Returns
    -------
    tuple of array
        (dx, dgamma, dbeta), as in layer_norm_backward; dbeta has the shape and dtype of beta if there is one.

    Raises
    ------
    TypeError
        As layer_norm_backward does, and without rstd.
    ValueError
        As layer_norm_backward does, and for a gamma with a zero: y does not depend on x there.

    Notes
    -----
    y was rounded, and z has that error relative to y / gamma, which is larger than z where |beta| is larger than
    |gamma|. In 16 bits, x is the better choice then.

    On a device gamma is not looked at: where it is 0, dgamma is nan or inf, and so is dx in all rows. The call is
    enqueued on the current stream, and nothing is synchronised. Until the call has finished on its stream, nobody else
    may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import layer_norm, layer_norm_backward, layer_norm_backward_from_y
    >>> x, dy, gamma, beta = np.array([[1.0, 2.0, 4.0]]), np.array([[1.0, 0.0, 0.0]]), np.full(3, 2.0), np.ones(3)
    >>> y, _, rstd = layer_norm(x, gamma, beta, return_stats=True)
    >>> dx, dgamma, dbeta = layer_norm_backward_from_y(dy, y, gamma, beta, rstd)
    >>> bool(np.allclose(dx, layer_norm_backward(dy, x, gamma)[0]))
    True
    """
    return run(  # type: ignore[no-any-return]
        "layer_norm_backward_from_y",
        dy,
        ("y", y),
        centred=True,
        from_y=True,
        gamma=gamma,
        beta=beta,
        rstd=rstd,
        axis=axis,
        out=out,
        dtype=dtype,
        add_to=add_to,
        parameters=parameters,
        plan=plan,
    )


def rms_norm_backward_from_y(
    dy: Any,
    y: Any,
    gamma: Any = None,
    rstd: Any = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    parameters: bool = True,
    out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any]:
    """Return the gradients of rms_norm from its result instead of its input, which then need not be kept.

    As rms_norm_backward with z = y / gamma.

    Parameters
    ----------
    dy, y, gamma, out, dtype
        As in layer_norm_backward_from_y.
    rstd : array
        What ``rms_norm(x, ..., return_stats=True)`` returned; it does not follow from y.
    axis, parameters, plan
        As in layer_norm_backward.
    add_to : array, optional
        As in rms_norm_backward.

    Returns
    -------
    tuple of array
        (dx, dgamma), as in rms_norm_backward.

    Raises
    ------
    TypeError, ValueError
        As layer_norm_backward_from_y does.

    Notes
    -----
    As in layer_norm_backward_from_y; without a beta, z has no larger relative error than y.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import rms_norm, rms_norm_backward_from_y
    >>> y, rstd = rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), eps=0, return_stats=True)
    >>> dx, dgamma = rms_norm_backward_from_y(np.array([[5.0, 0.0]]), y, np.array([1.0, 2.0]), rstd)
    >>> dx.round(4).tolist(), dgamma.round(4).tolist()
    ([[0.9051, -0.6788]], [4.2426, 0.0])
    """
    return run(  # type: ignore[no-any-return]
        "rms_norm_backward_from_y",
        dy,
        ("y", y),
        centred=False,
        from_y=True,
        gamma=gamma,
        rstd=rstd,
        axis=axis,
        out=out,
        dtype=dtype,
        add_to=add_to,
        parameters=parameters,
        plan=plan,
    )
