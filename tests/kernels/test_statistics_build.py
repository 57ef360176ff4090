"""Statistics of every kind of call compile, and with the plans that the package chooses none of them spills."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from cupynorm import moments, normalize, rescale, sigma_clip, standardize
from cupynorm._dtypes import DTYPES, dtype_of
from cupynorm.call import asking, statistics
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.rules import rules_of
from cupynorm.runtime import nvrtc
from tests import SLOW
from tests.build_gate import (
    begins_too_soon,
    chosen,
    code_of,
    compile_first_choices,
    endless_waits,
    local_bytes_of,
    spills,
    stalls_a_cluster,
)

pytestmark = pytest.mark.slow

OPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "standardize": (standardize, {}),
    "normalize": (normalize, {}),
    "normalize, inf": (normalize, {"ord": np.inf}),
    "rescale": (rescale, {}),
    "moments": (moments, {}),
    "moments, 4": (moments, {"order": 4}),
    "sigma_clip": (sigma_clip, {"return_stats": True}),
    "sigma_clip, median": (sigma_clip, {"centre": "median", "return_bounds": True}),
}
KINDS = ("plain", "omit", "where", "lengths", "weights")
# the shape of x and the axis: rows of a warp or a few, of a block, of clusters; and rows apart
SHAPES = [((49152, 1024), -1), ((49152, 4100), -1), ((49152, 16384), -1), ((64, 1024, 512), 1)]
DEVICES = {"90": "h200", "80": "a100", "75": "t4"}
INTEGERS = ("uint8", "int16", "int32")
# Bytes of a thread in local memory that the planner leaves to rows apart, by op, kind and architecture: another tiling
# takes longer (few_local_bytes of plan/data; docs/notes/065 and 073).
LEFT = {
    ("standardize", "omit", "90"): 8,
    ("moments, 4", "where", "90"): 16,
    ("sigma_clip", "where", "90"): 24,
    ("standardize", "plain", "80"): 8,
    ("standardize", "where", "80"): 8,
    ("normalize", "lengths", "80"): 40,
    ("normalize, inf", "lengths", "80"): 32,
    ("rescale", "plain", "80"): 8,
    ("rescale", "where", "80"): 8,
    ("rescale", "lengths", "80"): 48,
    ("moments, 4", "omit", "80"): 16,
    ("moments, 4", "where", "80"): 16,
    ("moments, 4", "lengths", "80"): 8,
    ("sigma_clip", "plain", "80"): 32,
    ("sigma_clip", "where", "80"): 40,
    ("sigma_clip", "lengths", "80"): 16,
    ("sigma_clip, median", "where", "80"): 40,
    ("standardize", "where", "75"): 8,
    ("normalize", "lengths", "75"): 40,
    ("normalize, inf", "lengths", "75"): 40,
    ("rescale", "lengths", "75"): 48,
    ("moments, 4", "omit", "75"): 16,
    ("moments, 4", "where", "75"): 24,
    ("moments, 4", "lengths", "75"): 8,
    ("sigma_clip", "plain", "75"): 32,
    ("sigma_clip", "where", "75"): 40,
    ("sigma_clip", "lengths", "75"): 16,
    ("sigma_clip, median", "where", "75"): 40,
}


class Case(NamedTuple):
    """A call whose kernel is compiled."""

    op: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    arch: str = "90"

    @property
    def is_one(self) -> bool:
        """Whether there is such a call."""
        if self.op.startswith("sigma_clip"):
            return self.kind not in {"omit", "weights"}
        return self.op != "rescale" or self.kind != "weights"


# One of each op, kind, dtype and shape; all with CUPYNORM_SLOW=1.
SAMPLED = [
    Case("standardize", "where", "float16", *SHAPES[2]),
    Case("standardize", "lengths", "float32", *SHAPES[3]),
    Case("normalize", "omit", "float16", *SHAPES[2]),
    Case("normalize, inf", "plain", "uint8", *SHAPES[0]),
    Case("rescale", "where", "bfloat16", *SHAPES[3]),
    Case("moments", "weights", "float32", *SHAPES[1]),
    Case("moments, 4", "weights", "float64", *SHAPES[3]),
    Case("sigma_clip", "plain", "float16", *SHAPES[0]),
    Case("sigma_clip", "where", "float32", *SHAPES[2]),
    Case("sigma_clip", "plain", "int16", *SHAPES[3]),
    Case("sigma_clip, median", "lengths", "float64", *SHAPES[1]),
    Case("sigma_clip, median", "plain", "float32", *SHAPES[1], "80"),
    Case("sigma_clip, median", "plain", "float32", (16, 3200, 1024), 0),
    Case("sigma_clip, median", "plain", "int16", (30, 1706, 1024), 0, "80"),
    Case("sigma_clip, median", "lengths", "float16", (32, 1600, 1024), 0),
    Case("sigma_clip, median", "where", "float32", (100, 512, 1024), 0),
    Case("sigma_clip, median", "plain", "float32", (300, 170, 1024), 0),
    Case("sigma_clip", "plain", "float32", (512, 100, 1024), 0, "80"),
    Case("sigma_clip", "where", "float16", *SHAPES[2], "75"),
]


def every() -> Iterator[Case]:
    for arch in DEVICES:
        for op in OPS:
            for kind in KINDS:
                for dtype in (*DTYPES, *INTEGERS):
                    for shape in SHAPES:
                        case = Case(op, kind, dtype, *shape, arch)
                        if case.is_one:
                            yield case


def placed(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of any size that takes a few bytes, as aligned as a device's."""
    memory = np.zeros(64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 16
    one = memory[start : start + 8].view(dtype)[:1]
    steps = np.cumprod((1, *shape[:0:-1]))[::-1] * one.itemsize
    return np.lib.stride_tricks.as_strided(one, shape, steps)


def lowered(case: Case) -> Any:
    """Lower a call by the product's own functions."""
    function, options = OPS[case.op]
    x = placed(case.shape, dtype_of(case.dtype) if case.dtype in DTYPES else np.dtype(case.dtype))
    rows = tuple(extent for at, extent in enumerate(case.shape) if at != case.axis % len(case.shape))
    given: dict[str, Any] = {
        "plain": {},
        "omit": {"nan": "omit"},
        "where": {"where": placed(case.shape, np.bool_)},
        "lengths": {"lengths": np.ones(rows, np.int32)},
        "weights": {"weights": x if case.dtype in DTYPES else placed(case.shape, np.float32)},
    }[case.kind]
    limits = RECORDED[DEVICES[case.arch]]
    with mock.patch.object(statistics, "_check_not_negative"):  # most elements of what is placed are nowhere
        return asking.specs_of(lambda: function(x, axis=case.axis, **options, **given), limits)[0]


@functools.cache
def compile_sampled(arch: str) -> None:
    compile_first_choices(
        ((lowered(case), DEVICES[arch], None) for case in SAMPLED if case.arch == arch), arch
    )


@pytest.mark.parametrize("case", [*every()] if SLOW else SAMPLED, ids=lambda case: " ".join(map(str, case)))
def test_statistics_do_not_spill(case: Case) -> None:
    if not nvrtc.majors():
        pytest.skip("NVRTC is not installed")
    if not SLOW:
        compile_sampled(case.arch)
    plan, kernel = chosen(lowered(case), DEVICES[case.arch], case.arch)
    code = code_of(kernel, case.arch)

    faults = begins_too_soon(code, case.arch) + stalls_a_cluster(code, case.arch) + endless_waits(kernel)
    left = LEFT.get((case.op, case.kind, case.arch), 0) if plan.across else 0
    if local_bytes_of(kernel) > left:
        faults += spills(kernel)
    assert not faults, f"{plan}: {faults}"


def test_what_is_left_is_less_than_another_tiling_costs() -> None:
    assert all(left <= rules_of(arch).apart.few_local_bytes for (*_, arch), left in LEFT.items())


def test_all_that_is_sampled_differs() -> None:
    assert {case.op for case in SAMPLED} == set(OPS)
    assert {case.kind for case in SAMPLED} == set(KINDS)
    assert {case.arch for case in SAMPLED} == set(DEVICES)
    assert all(case.is_one for case in SAMPLED)
