"""Gradients of fusions on NumPy arrays: numerical derivatives of the fusion itself, broadcasts, sums, and errors."""
# ruff: noqa: PLW0108  what is traced is the lambda

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm import DeviceFunction, Fusion, fuse, layer_norm, log_softmax, rms_norm, softmax
from cupynorm import functions as f
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.catalog import op_table
from cupynorm.catalog.op_table import Op
from cupynorm.host import reference
from cupynorm.ops import fusion_gradients
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

every_op = pytest.mark.parametrize("op", op_table.OPS, ids=lambda op: op.name)
RANDOM = np.random.default_rng(23)
STEP = 1e-5
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_order_of_tests() -> None:
    RANDOM.bit_generator.state = START


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


def slope(call: Any, at: Any) -> Any:
    """The derivative of a number by each element of an array, by central differences."""
    found = np.empty_like(at)
    for index in np.ndindex(at.shape):
        aside = np.zeros_like(at)
        aside[index] = STEP
        found[index] = (call(at + aside) - call(at - aside)) / (2 * STEP)
    return found


def total(results: Any, dys: Any) -> float:
    """What the gradients are of: the sum of all results, each times what arrives at it."""
    results = results if isinstance(results, tuple) else (results,)
    dys = dys if isinstance(dys, tuple) else (dys,)
    return sum(float((result * dy).sum()) for result, dy in zip(results, dys, strict=True) if dy is not None)


def check(fusion: Any, dy: Any, x: Any, *operands: Any, **arguments: Any) -> Any:
    """Compare all gradients with numerical derivatives of the fusion."""
    found = fusion.backward(dy, x, *operands, **arguments)

    def compare(got: Any, call: Any, at: Any) -> None:
        np.testing.assert_allclose(got, slope(call, at), rtol=1e-6, atol=1e-7)

    compare(found.x, lambda at: total(fusion(at, *operands, **arguments), dy), x)
    for index, (got, operand) in enumerate(zip(found.operands, operands, strict=True)):

        def replaced(at: Any, index: int = index) -> float:
            return total(fusion(x, *operands[:index], at, *operands[index + 1 :], **arguments), dy)

        if isinstance(operand, np.ndarray) and operand.dtype.kind == "f":
            assert (got.shape, got.dtype) == (operand.shape, operand.dtype)
            compare(got, replaced, operand)
        else:
            assert got is None
    for name in ("gamma", "beta"):
        given = arguments.get(name)
        if given is not None:
            replaced_column = lambda at, name=name: total(fusion(x, *operands, **{**arguments, name: at}), dy)  # noqa: E731
            compare(getattr(found, name), replaced_column, given)
        else:
            assert getattr(found, name) is None
    return found


@every_op
def test_gradients_are_numerical_derivatives(op: Op) -> None:
    x, r, g, dy = (normal(2, 3, 6) for _ in range(4))
    parameters = {name: normal(6) for name in op.parameters}
    fusion = fuse(
        op.function, load=lambda x, r, b: x * r + f.tanh(b), store=lambda y, g, s: f.gelu(y) * g / s
    )

    check(fusion, dy, x, r, normal(6), g, np.abs(normal(2, 1, 1)) + 0.5, **parameters)


@every_op
def test_only_a_load_and_only_a_store(op: Op) -> None:
    x, dy = normal(3, 5), normal(3, 5)
    parameters = {name: normal(5) for name in op.parameters}

    check(fuse(op.function, load=lambda x, t: f.silu(x) / t), dy, x, np.abs(normal(3, 1)) + 1, **parameters)
    check(fuse(op.function, store=lambda y, w: y * y + w), dy, x, normal(5), **parameters)
    check(fuse(op.function, load=lambda x: x), dy, x, **parameters)


@every_op
@pytest.mark.parametrize("axis", [-1, (-2, -1), (0, 1, 2)], ids=str)
def test_several_axes_and_several_results(op: Op, axis: Any) -> None:
    x, r = normal(2, 3, 4), normal(3, 1)
    count = 1 if axis == -1 else len(axis)
    parameters = {name: normal(*x.shape[3 - count :]) for name in op.parameters}
    options = {"eps": 0.1} if op.stats else {}
    fusion = fuse(
        op.function, load=lambda x, r: x + r, store=lambda y, w: (y * w, f.exp(y)), keep_loaded=True
    )
    dys = tuple(normal(2, 3, 4) for _ in range(3))

    found = check(fusion, dys, x, r, normal(4), axis=axis, **parameters, **options)

    for given in ((dys[0], None, None), (None, dys[1], None), (None, None, dys[2])):
        check(fusion, given, x, r, normal(4), axis=axis, **parameters, **options)
    with_zeros = fusion.backward(
        (dys[0], 0 * dys[1], None), x, r, normal(4), axis=axis, **parameters, **options
    )
    assert np.isfinite(with_zeros.x).all()
    assert len(found.operands) == 2


SHAPES = [(2, 3, 5), (5,), (1, 1, 5), (3, 1), (2, 1, 1), (2, 1, 5), (1,), (), (1, 3, 1), (2, 3, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("role", ["load", "store"])
def test_the_gradient_of_what_was_broadcast_is_summed(shape: tuple[int, ...], role: str) -> None:
    x, dy, operand = normal(2, 3, 5), normal(2, 3, 5), np.asarray(normal(*shape))

    check(fuse(softmax, **{role: lambda x, o: x * f.sigmoid(o)}), dy, x, operand)
    check(fuse(layer_norm, **{role: lambda x, o: x * o}), dy, x, operand, axis=(1, 2))


@pytest.mark.parametrize("shape", [(3, 5), (5,), (2, 1, 1), (1,), (1, 1, 5)], ids=str)
@pytest.mark.parametrize("block", [15, 40, 1 << 17])
@pytest.mark.parametrize("axis", [-1, (-2, -1)], ids=str)
def test_sums_do_not_depend_on_how_rows_are_cut(
    shape: tuple[int, ...], block: int, axis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake known from others. An operand along the first axis is cut, too; others have one sum for all batches."""
    x, dy, operand = normal(40, 3, 5), normal(40, 3, 5), normal(*shape)
    operand = operand if operand.shape != (2, 1, 1) else normal(40, 1, 1)
    gamma, beta = normal(5), normal(1)
    fusion = fuse(layer_norm, load=lambda x, o: x * o, store=lambda y: f.tanh(y))
    options: dict[str, Any] = {"gamma": gamma, "beta": beta, "axis": axis}
    whole = fusion.backward(dy, x, operand, **options)
    monkeypatch.setattr(reference, "BLOCK", block)

    sums = {"o": np.zeros(operand.shape), "gamma": np.zeros(5), "beta": np.zeros(1)}
    parts = []
    for at in (slice(0, 1), slice(1, 30), slice(30, 40)):
        own = operand[at] if operand.shape[0] == 40 else operand
        adding = {**sums, "o": sums["o"][at] if operand.shape[0] == 40 else sums["o"]}
        parts.append(fusion.backward(dy[at], x[at], own, add_to=adding, **options).x)

    assert np.array_equal(sums["o"], whole.operands[0])
    assert np.array_equal(sums["gamma"], whole.gamma)
    assert np.array_equal(sums["beta"], whole.beta)
    assert np.array_equal(np.concatenate(parts), whole.x)


def test_a_sum_of_rows_is_no_mean() -> None:
    """A mistake known from others: a mean over another number of rows than there are."""
    x, dy, w = normal(4, 6), normal(4, 6), normal(6)
    fusion = fuse(rms_norm, load=lambda x, w: x * w)

    once, thrice = fusion.backward(dy, x, w, gamma=w), fusion.backward(*np.tile([dy, x], (3, 1)), w, gamma=w)

    np.testing.assert_allclose(thrice.operands[0], 3 * once.operands[0], rtol=1e-13)
    np.testing.assert_allclose(thrice.gamma, 3 * once.gamma, rtol=1e-13)


@pytest.mark.parametrize("op", [softmax, log_softmax])
def test_what_arrives_where_load_dropped_counts_nowhere(op: Any) -> None:
    fusion = fuse(op, load=lambda x, kept: f.where(kept > 0, x, -np.inf))
    x, dy, kept = normal(5, 8), normal(5, 8), RANDOM.random((5, 8)) < 0.6
    backward = {softmax: cupynorm.softmax_backward, log_softmax: cupynorm.log_softmax_backward}[op]
    wanted = backward(dy, op(x, where=kept), where=kept)

    for there in (1e3, np.nan, np.inf):
        found = fusion.backward(np.where(kept, dy, there), x, kept)

        np.testing.assert_allclose(found.x, wanted, rtol=1e-12, atol=1e-15)
        assert (found.x[~kept] == 0).all()


@pytest.mark.parametrize("op", [softmax, log_softmax], ids=lambda op: op.__name__)
def test_what_load_drops_gets_nothing_and_gives_nothing(op: Any) -> None:
    x, dy, t = normal(4, 6), normal(4, 6), np.array([[0.5], [0.2], [-0.1], [9.0]])
    fusion = fuse(op, load=lambda x, t, s: f.where(x > t, f.log(x - t) * s, -np.inf))
    dropped = x <= t
    s = np.array(0.7)

    found = fusion.backward(dy, x, t, s)

    assert dropped[3].all()
    assert (found.x[dropped] == 0).all()
    spoiled = fusion.backward(np.where(dropped, np.nan, dy), x, t, s)
    assert np.array_equal(spoiled.x, found.x)
    assert np.array_equal(spoiled.operands[1], found.operands[1])
    # a row of which nothing is kept is nan in forward
    kept = fusion.backward(dy[:3], x[:3], t[:3], s).operands[1]
    by_s = slope(
        lambda at: float((np.where(dropped, 0, fusion(x, t, at))[:3] * dy[:3])[~dropped[:3]].sum()), s
    )
    np.testing.assert_allclose(found.operands[1], kept, atol=1e-12)
    assert found.operands[1] == pytest.approx(float(by_s), rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_random_fusions(seed: int) -> None:
    from tests.lower.test_tracing import grow

    made = {"grow": grow, "seed": seed}
    ahead = eval("lambda x, r: grow(seed, x, r) + x", made)  # noqa: S307  no parameter may have a default
    behind = eval("lambda y, c: grow(seed + 50, y, c)", made)  # noqa: S307
    fusion = fuse([layer_norm, rms_norm, softmax, log_softmax][seed % 4], load=ahead, store=behind)
    x, dy, r, c = normal(2, 5), normal(2, 5), normal(5), normal(2, 1)

    check(fusion, dy, x, r, c)


@every_op
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_rounded_once(op: Op, dtype: str) -> None:
    kind = dtype_of(dtype)
    x, dy, w = (normal(5, 7, dtype=kind) for _ in range(3))
    parameters = {name: normal(7, dtype=kind) for name in op.parameters}
    fusion = fuse(op.function, load=lambda x, w: x * w)

    found = fusion.backward(dy, x, w, **parameters)

    wide = {name: each.astype(np.float64) for name, each in parameters.items()}
    exact = fusion.backward(*(each.astype(np.float64) for each in (dy, x, w)), **wide)
    for got, want in (
        (found.x, exact.x),
        (found.operands[0], exact.operands[0]),
        *((getattr(found, name), getattr(exact, name)) for name in parameters),
    ):
        assert got.dtype == kind
        assert np.array_equal(got, reference._round(want, kind).astype(kind))
    assert fusion.backward(dy, x, w, dtype="float32").x.dtype == np.float32


def test_operands_that_nothing_depends_on_have_gradient_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fusion_gradients, "allocate", lambda _on, _device, shape, dtype: np.full(shape, 7, dtype)
    )
    x, dy = normal(2, 4), normal(2, 4)
    fusion = fuse(rms_norm, load=lambda x, r: x * 2, store=lambda y, w, v: y * w * v, keep_loaded=True)

    found = fusion.backward((None, dy), x, x + 1, x - 1, normal(4), gamma=normal(4))

    assert not any(each.any() for each in found.operands)
    assert not found.gamma.any()
    np.testing.assert_allclose(found.x, 2 * dy)


def test_numbers_and_integers_have_no_gradient() -> None:
    x, dy, mask = normal(3, 4), normal(3, 4), np.array([1, 0, 1, 1])
    fusion = fuse(softmax, load=lambda x, t, m, b: f.where(m, x / t + b, -np.inf))

    bias = normal(4)
    found = check(fusion, dy, x, 0.5, mask, bias)

    assert found.operands[:2] == (None, None)
    assert fusion.backward(dy, x, b=bias, m=mask, t=0.5).x.tolist() == found.x.tolist()


def test_gamma_and_beta_may_be_numbers_or_have_leading_axes() -> None:
    x, dy = normal(3, 4), normal(3, 4)
    fusion = fuse(layer_norm, store=lambda y: y * y)

    numbers = fusion.backward(dy, x, gamma=2.0, beta=0.5)
    arrays = fusion.backward(dy, x, gamma=np.full((1, 1, 4), 2.0), beta=np.full(4, 0.5))

    np.testing.assert_allclose(numbers.x, arrays.x, rtol=1e-14)
    assert (numbers.gamma.shape, arrays.gamma.shape) == ((), (1, 1, 4))
    assert numbers.gamma == pytest.approx(arrays.gamma.sum())
    assert numbers.beta == pytest.approx(arrays.beta.sum())


def test_results_may_be_given() -> None:
    x, dy, r = normal(4, 6), normal(4, 6), normal(4, 6)
    fusion = fuse(layer_norm, load=lambda x, r: x * r)
    expected = fusion.backward(dy, x, r)
    sums = np.full((4, 6), 10.0)

    found = fusion.backward(dy, x, r, add_to={"r": sums}, out=(out := np.empty((6, 4)).T))
    over_x, over_dy = x.copy(), dy.copy()

    assert found.x is out
    assert found.operands[0] is sums
    assert np.array_equal(sums, 10 + expected.operands[0])
    for got in (
        out,
        fusion.backward(dy, over_x, r, out=over_x).x,
        fusion.backward(over_dy, x, r, out=over_dy).x,
    ):
        assert np.array_equal(got, expected.x)


def test_no_rows() -> None:
    fusion = fuse(layer_norm, load=lambda x, r: x * r)
    x = np.empty((0, 6), np.float32)

    found = fusion.backward(x, x, normal(6), gamma=normal(6), add_to={"gamma": np.ones(6)})

    assert found.x.shape == (0, 6)
    assert (found.operands[0].tolist(), found.gamma.tolist()) == ([0.0] * 6, [1.0] * 6)


X, DY, R = normal(3, 4), normal(3, 4), normal(4)
ONE = fuse(layer_norm, load=lambda x, r: x + r)
TWO = fuse(rms_norm, load=lambda x, r: x + r, store=lambda y, r: (y, y * r))
TEXT = (
    "struct F { template <typename T> static void apply(const T (&in)[1], T (&out)[1]) { out[0] = in[0]; } };"
)
OPAQUE = fuse(softmax, load=DeviceFunction("F", f"namespace cupynorm {{ {TEXT} }}", lambda x: x, 1))
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a DeviceFunction": (
        lambda: OPAQUE.backward(DY, X),
        TypeError,
        "load is the DeviceFunction F, whose derivative nobody knows",
    ),
    "dy": (lambda: ONE.backward(1.0, X, R), TypeError, "dy is a builtins.float: give a NumPy or"),
    "dy's shape": (lambda: ONE.backward(DY[0], X, R), ValueError, r"dy has shape \(4,\), x has \(3, 4\)"),
    "dy's dtype": (lambda: ONE.backward(DY.astype(int), X, R), TypeError, "dy: dtype int64"),
    "one dy of two": (lambda: TWO.backward(DY, X, R, R), ValueError, "dy has 1 arrays, the fusion 2 results"),
    "no dy": (lambda: TWO.backward((None, None), X, R, R), ValueError, "dy is None for every result"),
    "a second dy's shape": (
        lambda: TWO.backward((None, DY[0]), X, R, R),
        ValueError,
        r"dy\[1\] has shape \(4,\)",
    ),
    "x": (lambda: ONE.backward(DY, [1.0], R), TypeError, "x is a builtins.list"),
    "an operand": (lambda: ONE.backward(DY, X, "r"), TypeError, "r is a builtins.str"),
    "an operand's shape": (lambda: ONE.backward(DY, X, np.ones(3)), ValueError, r"r has shape \(3,\)"),
    "too few": (lambda: ONE.backward(DY, X), TypeError, "no operand was given for r"),
    "another name": (lambda: ONE.backward(DY, X, R, q=1), TypeError, "unexpected argument q="),
    "plan": (lambda: ONE.backward(DY, X, R, plan="warp"), ValueError, "plan='warp' chooses a kernel: x is"),
    "no plan": (
        lambda: ONE.backward(DY, X, R, plan=3),
        TypeError,
        "plan is 3 .*: give the name of a variant",
    ),
    "return_stats": (
        lambda: ONE.backward(DY, X, R, return_stats=True),
        TypeError,
        "backward takes no return_s",
    ),
    "eps": (lambda: ONE.backward(DY, X, R, eps=-1.0), ValueError, "eps is -1.0"),
    "gamma": (lambda: ONE.backward(DY, X, R, gamma=np.ones(3)), ValueError, "gamma has shape"),
    "out and an operand": (
        lambda: ONE.backward(DY, X, (a := np.ones((3, 4))), out=a),
        ValueError,
        "out and r share memory",
    ),
    "out in part": (
        lambda: ONE.backward(DY[:2], X[:2], R, out=X[1:]),
        ValueError,
        "out and x share memory in part",
    ),
    "add_to": (lambda: ONE.backward(DY, X, R, add_to=R), TypeError, "add_to is a numpy.ndarray: give a dict"),
    "add_to of another": (
        lambda: ONE.backward(DY, X, R, add_to={"q": R}),
        ValueError,
        "add_to has 'q': there are gradients of r",
    ),
    "add_to of two": (
        lambda: TWO.backward((DY, DY), X, R, R, add_to={"r": R}),
        ValueError,
        "add_to has 'r', a parameter of both load and store",
    ),
    "add_to's shape": (
        lambda: ONE.backward(DY, X, R, add_to={"r": np.ones(3)}),
        ValueError,
        r"add_to\['r'\] has shape \(3,\), its operand has \(4,\)",
    ),
    "add_to's kind": (
        lambda: ONE.backward(DY, X, R, add_to={"r": 1.0}),
        TypeError,
        r"add_to\['r'\] is a builtins",
    ),
    "add_to and its operand": (
        lambda: ONE.backward(DY, X, R, add_to={"r": R}),
        ValueError,
        r"add_to\['r'\] and its operand share memory",
    ),
    "add_to twice": (
        lambda: ONE.backward(DY, X, R, gamma=X[0].copy(), add_to=dict.fromkeys(("r", "gamma"), np.ones(4))),
        ValueError,
        r"add_to\['gamma'\] and add_to\['r'\] share memory",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, message = BAD[name]

    with pytest.raises(error, match=message) as caught:
        call()

    assert type(caught.value) is error
    assert len(str(caught.value)) < 300


def test_device_arrays_are_checked(simulated: Any) -> None:
    to = simulated.cupy.asarray
    x, dy, r = to(X), to(DY), to(R)

    with pytest.raises(TypeError, match="x is a CuPy array .* and dy is a NumPy array"):
        ONE.backward(DY, x, r)
    with pytest.raises(ValueError, match="dy has shape"):
        ONE.backward(dy[:1], x, r)


def test_the_example_runs() -> None:
    runner = doctest.DocTestRunner()
    (example,) = doctest.DocTestFinder(recurse=False).find(Fusion.backward, "backward", globs={})

    assert runner.run(example) == (0, 6)
