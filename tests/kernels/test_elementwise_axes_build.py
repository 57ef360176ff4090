"""Kernels of activations and gates along other axes compile without spills, and move 16 bytes at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from cupynorm._dtypes import DTYPES, compute_dtype, dtype_of
from cupynorm.call.view import View
from cupynorm.invoke.steps import Steps
from cupynorm.lower.elementwise import Each, elementwise_spec
from cupynorm.lower.gradients import activation_sums_in_any_layout
from cupynorm.lower.layouts import stretched
from cupynorm.lower.sums import Sums, sum_specs
from cupynorm.plan.limits import RECORDED
from cupynorm.runtime import nvrtc
from tests import SLOW
from tests.build_gate import begins_too_soon, code_of, compile_together, nvdisasm, spills
from tests.sampling import covering

ARCHS = ("75", "80", "86", "89", "90", "100", "120") if SLOW else ("90",)
SHAPE = (64, 256, 3136)  # images, channels, pixels

pytestmark = pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")


def array(shape: tuple[int, ...], dtype: Any, order: tuple[int, ...] = (0, 1, 2), step: int = 1) -> View:
    """Return an array at 0 with its axes in an order in memory, the last of them with a step."""
    strides, reach = [0] * len(shape), dtype.itemsize * step
    for at in reversed(order):
        strides[at] = reach
        reach *= shape[at]
    return View(0, shape, tuple(strides), dtype)


def channels_last(each: View) -> View:
    """Return a view with the channels as its last axis, as a call along them is lowered."""
    return each.reordered((0, 2, 1)[: len(each.shape)])


def forward(dtype: Any, gate: str | None, step: int) -> Any:
    n = SHAPE[1] * (2 if gate else 1)
    x = channels_last(array((SHAPE[0], n, SHAPE[2]), dtype, step=step))
    y = channels_last(array(SHAPE, dtype, step=step))
    return elementwise_spec(Each("gelu", None, gate), x, y, View(0, (n,), (dtype.itemsize,), dtype))


def backward(dtype: Any, gate: str | None, step: int) -> Any:
    n = SHAPE[1] * (2 if gate else 1)
    x, dx = (channels_last(array((SHAPE[0], n, SHAPE[2]), dtype, step=step)) for _ in range(2))
    dy = channels_last(array(SHAPE, dtype, step=step))
    bias = stretched(View(0, (n,), (dtype.itemsize,), dtype), x.shape, 1)
    ((what, columns),) = activation_sums_in_any_layout(dy, x, bias, dx, bias, "silu", gate)
    assert columns is not None
    compute = compute_dtype(dtype, dtype)
    steps = Steps(-1, compute)
    place = steps.sums_to(columns, "dbias", adds=False)
    firsts = (0,) if gate is None else (0, what.cols)
    what = what._replace(results=tuple(place._replace(first=first) for first in firsts))
    return first_of(what, compute)


def first_of(what: Sums, compute: Any) -> Any:
    """Return what is launched first; the partial sums go to address 0."""
    rooms = [View(0, (4, what.cols), (what.cols * compute.itemsize, compute.itemsize), compute)] * 2
    return sum_specs(what, compute, rooms[: len(what.results)])[0]


class Case(NamedTuple):
    """A call: a gate or an activation alone, its result or its gradient, the dtype, and how far elements are apart."""

    lowered: Callable[..., Any]
    gate: str | None
    dtype: str
    step: int


ALL = [Case(*each) for each in itertools.product((forward, backward), (None, "second"), DTYPES, (1, 2))]
# one and a half seconds of the compiler's each: any two of a case's properties meet
SAMPLED = ALL if SLOW else covering(ALL, lambda each: each, lambda each: dtype_of(each.dtype).itemsize)


@pytest.mark.parametrize("gate", [None, "second"])
@pytest.mark.parametrize("lowered", [forward, backward])
def test_kernels(lowered: Any, gate: str | None) -> None:
    if nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    wanted = {}
    for _, _, dtype, step in (each for each in SAMPLED if each[:2] == (lowered, gate)):
        spec = lowered(dtype_of(dtype), gate, step)
        plan = spec.problem.plan(RECORDED["h200"])
        assert plan.vector * dtype_of(dtype).itemsize == (16 if step == 1 else dtype_of(dtype).itemsize)
        wanted[dtype, step] = spec.text, spec.expression(plan)
    assert wanted
    for arch in (each for each in ARCHS if each in nvrtc.supported_archs()):
        for (dtype, step), cubin in zip(wanted, compile_together([*wanted.values()], arch), strict=True):
            code = code_of(cubin, arch)
            found = spills(cubin) + begins_too_soon(code, arch)
            if step == 1:
                found += (
                    [] if code.accesses["LDG", 16] and code.accesses["STG", 16] else ["no access of 16 bytes"]
                )
            assert not found, (dtype, step, arch, found)
