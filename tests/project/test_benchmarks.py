"""The programs of benchmarks/ need a GPU and are run by hand: they import, and their kernels are what they think."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from cupynorm.runtime import nvrtc
from cupynorm.tools.results import Point

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(each.stem for each in FOLDER.glob("*.py"))


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(request.param)


@pytest.mark.parametrize("program", NAMES, indirect=True)
def test_it_imports(program: Any) -> None:
    assert callable(program.main)


POINTS = [
    Point("layer_norm_backward", "float16", 49152, 128),
    Point("rms_norm_backward", "float32", 12288, 32768),
    Point("layer_norm_backward", "float16", 6144, 50257),
    Point("bias_gelu_backward", "float16", 49152, 1001),
    Point("softmax_backward", "float32", 64, 1001),
    Point("geglu_backward", "float16", 100, 1024),
]


@pytest.mark.parametrize("program", ["limits_of_gradients"], indirect=True)
@pytest.mark.parametrize("point", POINTS, ids=lambda each: f"{each.op}-{each.cols}")
def test_limits_move_each_row_and_each_vector_once(program: Any, point: Point) -> None:
    kinds = set()
    for way in program.ways_at(point):
        kinds.add(way.kind.partition(",")[0])
        if way.kind == "stream":
            continue
        n = dict(way.numbers)
        side, together = way.block // n["group"], n["rows_of_group"] * n["interleaved"]
        firsts = [
            row
            for group in range(n["groups"])
            for row in range(
                group // n["interleaved"] * together + group % n["interleaved"] * side,
                min(point.rows, (group // n["interleaved"] + 1) * together),
                side * n["interleaved"],
            )
        ]
        ends = [(n["groups"] - 1) // n["interleaved"] * together + together]
        rows = {first + slot for first in firsts for slot in range(side)} & {*range(point.rows)}

        assert len(firsts) == len({*firsts})
        assert rows == {*range(point.rows)}
        assert ends[0] >= point.rows
        assert n["tiles"] * n["tile_vectors"] >= n["row_vectors"]
        assert way.grid % n["tiles"] == 0
    wanted = {"two launches", "no second launch", "one launch"} if program.OPS[point.op].sums else {"rows"}
    assert kinds == {"stream", *wanted}


@pytest.mark.skipif(nvrtc.available() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("program", ["limits_of_gradients"], indirect=True)
def test_kernels_of_limits_compile(program: Any) -> None:
    ways = {way.kind: way for point in POINTS[:3:2] for way in program.ways_at(point)}

    for each in (ways["no second launch"].expression, ways["one launch"].expression, program.FINISH):
        made = program.limits.build((program.kernel_text(), each))
        assert not isinstance(made, str), made
