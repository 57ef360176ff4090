"""The training example: its gradients are those of its loss, and the loss falls."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from typing import Any

import numpy as np
import pytest

from scripts import train
from tests import simulator
from tests.pages import CHECKOUT, blocks
from tests.simulator import cupy, simulated  # noqa: F401  a fixture

TINY = train.Size(levels=3, positions=5, width=4, heads=2, inner=6)
MANY = train.Size(levels=5, positions=9, width=16, heads=2, inner=24)
STEP = 1e-5


def tiny(size: train.Size = TINY) -> tuple[dict[str, Any], Any]:
    """Return parameters, none of them 0 or 1 throughout, and three windows."""
    random = np.random.default_rng(0)
    parameters = train.initialise(size, random, np.float64)
    moved = {name: each + 0.1 * random.standard_normal(each.shape) for name, each in parameters.items()}
    return moved, random.integers(0, size.levels, (3, size.positions))


def test_gradients_of_all_parameters_are_those_of_numerical_differentiation() -> None:
    parameters, windows = tiny()

    def loss() -> float:
        return float(train.forward_and_backward(parameters, windows, TINY, np, gradients=False)[0].mean())

    def slope(values: Any, place: tuple[int, ...]) -> float:
        middle = values[place]
        values[place] = middle + STEP
        above = loss()
        values[place] = middle - STEP
        below = loss()
        values[place] = middle
        return (above - below) / (2 * STEP)

    _, gradients = train.forward_and_backward(parameters, windows, TINY, np)

    assert gradients.keys() == parameters.keys()
    for name, values in parameters.items():
        numerical = np.array([slope(values, place) for place in np.ndindex(values.shape)])
        assert gradients[name].shape == values.shape, name
        assert np.abs(numerical).max() > 1e-4, name
        np.testing.assert_allclose(gradients[name].ravel(), numerical, rtol=1e-6, atol=1e-9, err_msg=name)


def test_a_pixel_is_guessed_from_those_before_it_alone() -> None:
    parameters, windows = tiny()
    changed = windows.copy()
    changed[:, 3] = (changed[:, 3] + 1) % TINY.levels

    before, after = (
        train.forward_and_backward(parameters, each, TINY, np, gradients=False)[0]
        for each in (windows, changed)
    )

    assert np.array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).all()


def test_the_loss_falls_on_what_is_trained_on_and_on_what_is_not(monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("pywt", reason="PyWavelets, which ships the photographs, is not installed")

    monkeypatch.setattr(train, "HELD_OUT", 16)
    size = train.Size(width=16, heads=2, inner=32)

    history = train.train(argparse.Namespace(seed=0, steps=16, batch=4, every=16), size, np)

    assert [step for step, _, _ in history] == [0, 16]
    (_, *first), (_, *last) = history
    assert first[1] > np.log2(train.LEVELS)
    assert last[1] < 0.9 * first[1]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_steps_on_arrays_of_one_pattern_learn_it() -> None:
    random = np.random.default_rng(1)
    parameters = train.initialise(MANY, random)
    windows = (random.integers(0, MANY.levels, (16, 1)) + np.arange(MANY.positions)) % MANY.levels
    adam = train.Adam(parameters, np, steps=40)

    losses = []
    for _ in range(40):
        loss, gradients = train.forward_and_backward(parameters, windows, MANY, np)
        losses.append(loss[:, 1:].mean())  # nothing says what the first one is
        adam.step(gradients)

    assert losses[0] > 1
    assert losses[-1] < 0.1


def test_the_page_shows_the_backward_pass_as_it_is() -> None:
    (shown,) = (each.text for each in blocks(CHECKOUT / "docs" / "training.md") if "split_heads" in each.text)

    assert textwrap.indent(shown, "    ") in inspect.getsource(train.forward_and_backward)


def test_each_call_of_a_step_gives_the_same_on_a_device(simulated: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(simulator.settings, "schedules", ("forward",))
    compared = []

    def there(value: Any) -> Any:
        return cupy.asarray(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value

    def on_both(name: str, function: Any) -> Any:
        def call(*arrays: Any, **options: Any) -> Any:
            # before the call on the host, which may write over its input
            given = [there(each) for each in arrays], {key: there(each) for key, each in options.items()}
            results = function(*given[0], **given[1]), function(*arrays, **options)
            for ours, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
                assert (ours is None) == (expected is None), name
                if ours is not None:
                    np.testing.assert_allclose(ours.get(), expected, rtol=1e-9, atol=1e-12, err_msg=name)
            compared.append(name)
            return results[1]

        return call

    for name, function in list(vars(train).items()):
        if getattr(function, "__module__", "").startswith("cupynorm.ops"):
            monkeypatch.setattr(train, name, on_both(name, function))
    train.forward_and_backward(*tiny(MANY), MANY, np)

    assert len(set(compared)) == 11
    assert {name for name in compared if "backward" in name} == {
        "add_layer_norm_backward",
        "bias_gelu_backward",
        "layer_norm_backward",
        "softmax_backward",
    }


@pytest.mark.gpu
def test_a_device_gives_the_same_gradients(device: Any) -> None:
    parameters, windows = tiny(MANY)
    there = {name: device.asarray(each) for name, each in parameters.items()}

    loss, gradients = train.forward_and_backward(parameters, windows, MANY, np)
    loss_there, gradients_there = train.forward_and_backward(there, device.asarray(windows), MANY, device)

    np.testing.assert_allclose(device.asnumpy(loss_there), loss, rtol=1e-10)
    for name, expected in gradients.items():
        np.testing.assert_allclose(
            device.asnumpy(gradients_there[name]), expected, rtol=1e-9, atol=1e-12, err_msg=name
        )
