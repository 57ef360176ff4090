"""scipy_special: SciPy's signatures, what its own tests ask of these functions, and install()."""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import pytest

from cupynorm import install, scipy_special
from cupynorm.scipy_special import log_softmax, logsumexp, softmax
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture

A = np.array([[[1.0, 2.0], [3.0, -1.0]], [[0.5, 7.0], [0.0, 4.0]], [[2.0, 2.0], [-5.0, 1.0]]])
AXES: list[Any] = [None, 0, 1, 2, -1, (0, 1), (0, 2), (2, 1), (0, 1, 2)]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=1e-300)


def naive(x: Any, axis: Any) -> Any:
    powers = np.exp(x)
    return powers / powers.sum(axis, keepdims=True)


def test_signatures_are_scipys() -> None:
    special = pytest.importorskip("scipy.special", reason="scipy is not installed")
    for name in ("softmax", "log_softmax", "logsumexp"):
        ours, theirs = (
            [(each.name, each.default) for each in inspect.signature(getattr(of, name)).parameters.values()]
            for of in (scipy_special, special)
        )
        assert ours == [(name, default) for name, default in theirs if name != "kwargs"]


@pytest.mark.parametrize("axis", AXES)
def test_any_axes(axis: Any) -> None:
    total = np.log(np.exp(A).sum(axis))

    close(softmax(A, axis=axis), naive(A, axis))
    np.testing.assert_allclose(log_softmax(A, axis=axis), np.log(naive(A, axis)), rtol=1e-13, atol=1e-15)
    close(logsumexp(A, axis=axis), total)
    close(logsumexp(A, axis=axis, keepdims=True), np.log(np.exp(A).sum(axis, keepdims=True)))
    assert type(logsumexp(A)) is np.float64


@pytest.mark.parametrize("axis", [None, 0, (0, 2), -1])
def test_any_axes_on_a_device(axis: Any, simulated: Any) -> None:
    cupy = simulated.cupy
    x = cupy.asarray(A)

    for function in (softmax, log_softmax, logsumexp):
        np.testing.assert_allclose(function(x, axis=axis).get(), function(A, axis=axis), rtol=1e-12)
    found = logsumexp(x, axis, cupy.asarray(A - 1), return_sign=True)
    for ours, wanted in zip(found, logsumexp(A, axis, A - 1, return_sign=True), strict=True):
        np.testing.assert_allclose(ours.get(), wanted, rtol=1e-12)


def test_softmax_of_small_cases() -> None:
    close(softmax([1000, 0, 0, 0]), [1, 0, 0, 0])
    close(softmax([1, 1]), [0.5, 0.5])
    close(softmax([0, 1]), np.array([1, np.e]) / (1 + np.e))
    close(softmax(np.arange(4)), softmax(np.arange(4) + 100.0))
    close(softmax([[1, 0], [0, 1]]), naive(np.eye(2), None))
    close(softmax(1000), 1.0)
    close(softmax(np.array(3, dtype=int)), 1.0)
    assert softmax(np.array([1, 2, 3])).dtype == np.float64
    assert softmax(np.array([1, 2], np.float32)).dtype == np.float32
    assert softmax(np.empty((0, 3)), axis=0).shape == (0, 3)


def test_log_softmax_of_small_cases() -> None:
    close(log_softmax([1000, 1]), [0, -999])
    close(log_softmax(0.0), 0.0)
    x = np.arange(4.0)
    close(log_softmax(x), x - np.log(np.exp(x).sum()))
    close(log_softmax(x + 100), log_softmax(x))
    close(log_softmax(np.stack([x, x + 1]), axis=1), np.stack([log_softmax(x)] * 2))


def test_logsumexp_of_small_cases() -> None:
    close(logsumexp(np.arange(200)), np.log(np.exp(np.arange(200.0)).sum()))
    close(logsumexp([1000.0, 1000.0]), 1000.0 + np.log(2.0))
    close(logsumexp([1e4] * 1000), 1e4 + np.log(1000.0))
    close(logsumexp([[1e4, 1e-4], [1e-4, 1e4]], axis=-1), [1e4, 1e4])
    close(logsumexp(np.full(2, -np.inf)), -np.inf)
    close(logsumexp([np.inf, 1.0]), np.inf)
    assert np.isnan(logsumexp([np.inf, np.nan]))
    close(logsumexp([]), -np.inf)
    close(logsumexp(np.empty((2, 0)), axis=1), [-np.inf] * 2)
    close(logsumexp(5.0), 5.0)


def test_logsumexp_with_factors() -> None:
    a, b = np.arange(200.0), np.arange(200.0, 0, -1)
    close(logsumexp(a, b=b), np.log((b * np.exp(a)).sum()))
    close(logsumexp([1000.0, 1000.0], b=[1.2, 1.2]), 1000 + np.log(2.4))
    close(logsumexp([1.0, 10000.0], b=[1.0, 0.0]), 1.0)
    assert [float(each) for each in logsumexp([1, 1], b=[1, -1], return_sign=True)] == [-np.inf, 0]
    assert [float(each) for each in logsumexp([1, 1, 1], b=[1, -1, -1], return_sign=True)] == [1.0, -1.0]
    assert np.isnan(logsumexp([1, 1, 1], b=[1, -1, -1]))
    assert logsumexp(np.zeros((4, 1, 2, 1)), b=np.ones((3, 1, 5))).shape == ()
    assert logsumexp(np.ones((1, 3, 4)), axis=2, b=np.ones((1, 3, 4)), return_sign=True)[1].shape == (1, 3)
    a = np.ones((1, 2, 3, 4))
    assert logsumexp(a, axis=(1, 3), b=a, keepdims=True, return_sign=True)[1].shape == (1, 1, 3, 1)


def test_results_have_scipys_dtypes() -> None:
    special = pytest.importorskip("scipy.special", reason="scipy is not installed")
    factors = [
        2.0,
        2,
        True,
        [1, 2],
        np.float64(2),
        *(np.array([1, 2], kind) for kind in ("u1", "i2", "i4", "f2", "f8")),
    ]
    for dtype in ("float16", "float32", "float64", "uint8"):
        a = np.array([1, 2], dtype)
        for b in factors:
            ours, theirs = logsumexp(a, b=b), special.logsumexp(a, b=b)
            assert ours.dtype == theirs.dtype, (dtype, b)
            np.testing.assert_allclose(ours, theirs, rtol=1e-3)


def test_integers_on_a_device(simulated: Any) -> None:
    x = np.arange(12).reshape(3, 4)
    for dtype, result in (("uint8", "float32"), ("int32", "float64")):
        for function in (softmax, log_softmax, logsumexp):
            found = function(simulated.cupy.asarray(x.astype(dtype)), axis=0).get()
            assert found.dtype == result
            np.testing.assert_allclose(found, function(x, axis=0), rtol=1e-5)


def test_what_is_near_to_zero_keeps_its_digits() -> None:
    close(logsumexp([0.0, -40.0]), np.log1p(np.exp(-40.0)))
    close(logsumexp([[0.0, -100.0], [1.0, -100.0]], axis=1), [np.exp(-100.0), 1.0])


def test_errors() -> None:
    for function in (softmax, log_softmax, logsumexp):
        with pytest.raises(np.exceptions.AxisError):
            function(A, axis=3)
        with pytest.raises(ValueError, match="names an axis twice"):
            function(A, axis=(0, -3))
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            function(A, axis=[0, 1])
        for axis in (True, (0, np.True_)):
            with pytest.raises(TypeError, match="give an integer"):
                function(A, axis=axis)
        with pytest.raises(TypeError, match="[ax]: dtype complex128 is not supported"):
            function(A + 1j)
    with pytest.raises(TypeError, match="b: dtype complex128 is not supported"):
        logsumexp(A, b=1j)
    with pytest.raises(ValueError, match=r"b has shape \(5,\), a has \(3, 2, 2\): they must broadcast"):
        logsumexp(A, b=np.ones(5))


def test_bytes_may_be_swapped() -> None:
    for function in (softmax, log_softmax, logsumexp):
        np.testing.assert_array_equal(function(A.astype(">f8")), function(A))
    close(logsumexp(A.astype(">f4"), b=A.astype(">f8")), logsumexp(A.astype(np.float32), b=A))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (5, r"module is 5 \(an int\), without softmax, log_softmax, logsumexp: give a module that has"),
        (inspect, "module is the module inspect, without softmax"),
    ],
)
def test_install_says_which_modules_it_takes(module: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        install(module)


def test_install_replaces_and_puts_back(simulated: Any) -> None:
    def theirs(*_: Any, **__: Any) -> str:
        return "theirs"

    names = ("softmax", "log_softmax", "logsumexp")
    module = types.SimpleNamespace(**dict.fromkeys(names, theirs))
    x = simulated.cupy.asarray(A.astype(np.float32))

    with install(module):
        for name in names:
            function = getattr(module, name)
            expected = getattr(scipy_special, name)(A.astype(np.float32))
            np.testing.assert_allclose(np.asarray(function(x).get()), expected, rtol=1e-5)
            assert function(simulated.cupy.asarray(np.arange(3))) == "theirs"
            assert function(A) == "theirs"
        assert np.isclose(module.logsumexp(a=x, axis=None).get(), logsumexp(A))  # CuPy's name for it
        assert module.logsumexp(a=A) == "theirs"
    assert all(getattr(module, name) is theirs for name in names)
    installed = install(module)
    installed.undo()
    installed.undo()
    assert module.softmax is theirs


def test_nested_calls_and_errors_put_back() -> None:
    module = types.SimpleNamespace(softmax="theirs", log_softmax="theirs", logsumexp="theirs")

    def fail() -> None:
        with install(module):
            first = module.softmax
            with install(module):
                assert module.softmax is not first
            assert module.softmax is first
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert vars(module) == dict.fromkeys(vars(module), "theirs")


def test_without_cupy_there_is_nothing_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupyx.scipy.special", None)

    with pytest.raises(ImportError):
        install()
