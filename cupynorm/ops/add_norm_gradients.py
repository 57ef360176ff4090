"""Gradients of add_layer_norm and add_rms_norm."""

from __future__ import annotations

from typing import Any

from cupynorm.ops.norm_gradient_calls import run
from cupynorm.plan.config import Plan


def add_layer_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    gamma: Any = None,
    mean: Any = None,
    rstd: Any = None,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-5,
    parameters: bool = True,
    out: Any = None,
    residual_out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the gradients of add_layer_norm with respect to x, residual, gamma, beta and bias, in one pass.

    Let h = ds + layer_norm_backward(dy, s, gamma)[0], the gradient of the sum s = dropout(x + bias) + alpha * residual.
    Then dresidual = alpha * h, dx = dropout(h), and dbias is the sum of dx over all rows.

    Parameters
    ----------
    dy : array
        CuPy or NumPy array of float16, bfloat16, float32 or float64: the gradient that arrives at y, of s's shape.
    ds : array or None
        The gradient that arrives at the returned sum, of s's shape; None: none.
    s : array
        The sum that add_layer_norm returned.
    gamma : array or float, optional
        As in add_layer_norm.
    mean, rstd : array, optional
        What ``add_layer_norm(..., return_stats=True)`` returned, both or neither. Without them they are computed from s
        and eps.
    bias : array or float, optional
        As in add_layer_norm. Its shape and dtype are those of dbias; its values do not matter.
    alpha, dropout, seed, offset
        As in add_layer_norm: the same numbers drop the same elements.
    axis, eps, plan
        As in layer_norm_backward.
    parameters : bool, default True
        Compute dgamma and dbeta. With False they are None. dbias depends on `bias` alone.
    out, residual_out : array, optional
        Where dx and dresidual are written, of s's shape; each may be dy, ds or s itself, and not the other.
    dtype : dtype, optional
        That of dx; default: that of `out`, else s's. dresidual has it, too, unless residual_out has another.
    add_to : tuple of array or None, optional
        (dgamma, dbeta, dbias): as in layer_norm_backward; dbias has the bias's shape.

    Returns
    -------
    tuple of array
        (dx, dresidual, dgamma, dbeta, dbias); dbias is None without a bias. If alpha is 1 and nothing is dropped, dx
        and dresidual are equal, and are the same array unless residual_out is given.

    Raises
    ------
    TypeError, ValueError
        As layer_norm_backward does, and for options that add_layer_norm refuses.

    Notes
    -----
    The returned s was rounded after it was normalised. With the statistics that the forward returned, z = (s - mean) *
    rstd has that error; without them, they fit the rounded s.

    Arithmetic is in float64 on the host, and as in layer_norm_backward on a device. Sums over rows are taken as there;
    dbias of rows whose sums have no place in the pass that gives dx is summed from dx as it was rounded. What was
    dropped has a dx of exactly 0.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import add_layer_norm_backward
    >>> dy, ds, s = np.array([[0.0, 0.0, 6.0]]), np.ones((1, 3)), np.array([[1.0, 2.0, 3.0]])
    >>> dx, dresidual, dgamma, dbeta, dbias = add_layer_norm_backward(dy, ds, s, bias=np.zeros(3), alpha=2.0, eps=0)
    >>> dx.round(4).tolist(), dresidual.round(4).tolist(), dbias.round(4).tolist()
    ([[2.2247, -1.4495, 2.2247]], [[4.4495, -2.899, 4.4495]], [2.2247, -1.4495, 2.2247])
    """
    return run(  # type: ignore[no-any-return]
        "add_layer_norm_backward",
        dy,
        ("s", s),
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
        adding=(ds, bias, alpha, dropout, seed, offset, residual_out),
    )


def add_rms_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    gamma: Any = None,
    rstd: Any = None,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    axis: int | tuple[int, ...] | None = -1,
    eps: float = 1e-6,
    parameters: bool = True,
    out: Any = None,
    residual_out: Any = None,
    dtype: Any = None,
    add_to: Any = None,
    plan: str | Plan | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Return the gradients of add_rms_norm with respect to x, residual, gamma and bias, in one pass.

    As add_layer_norm_backward with rms_norm_backward in place of layer_norm_backward.

    Parameters
    ----------
    dy, ds, bias, alpha, dropout, seed, offset, parameters, out, residual_out, dtype, plan
        As in add_layer_norm_backward.
    s : array
        The sum that add_rms_norm returned.
    gamma, rstd, axis, eps
        As in rms_norm_backward.
    add_to : tuple of array or None, optional
        (dgamma, dbias): as in add_layer_norm_backward.

    Returns
    -------
    tuple of array
        (dx, dresidual, dgamma, dbias), as in add_layer_norm_backward.

    Raises
    ------
    TypeError, ValueError
        As add_layer_norm_backward does.

    Notes
    -----
    As in add_layer_norm_backward.

    On a device the call is enqueued on the current stream, and nothing is synchronised. Until the call has finished on
    its stream, nobody else may write to `out` or read from it.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import add_rms_norm_backward
    >>> dy, s = np.array([[5.0, 0.0]]), np.array([[3.0, 4.0]])
    >>> dx, dresidual, dgamma, dbias = add_rms_norm_backward(dy, None, s, np.array([1.0, 2.0]), eps=0)
    >>> dx.round(4).tolist(), dresidual is dx, dgamma.round(4).tolist(), dbias
    ([[0.9051, -0.6788]], True, [4.2426, 0.0], None)
    """
    return run(  # type: ignore[no-any-return]
        "add_rms_norm_backward",
        dy,
        ("s", s),
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
        adding=(ds, bias, alpha, dropout, seed, offset, residual_out),
    )
