"""Plots of what a benchmark found: what is drawn, how it can be told apart, and under which names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupynorm.catalog import forms
from cupynorm.tools import plots, saved
from cupynorm.tools.results import Measured, Point, Timing

RESULTS = Path(__file__).parents[2] / "benchmarks"
ABOUT = {"date": "2026-01-02T03:04:05+00:00", "device": {"name": "a device"}}
MATPLOTLIB = "matplotlib, which draws plots, is not installed"


def measured(op: str, cols: int, dtype: str = "float16", rows: int = 49152, **peers: float) -> Measured:
    """Return a point with ours at 0.9 of the copy rate, and peers at a share each."""
    seconds = {"cupynorm": 1 / 0.9, "copy (driver)": 1.0} | {name: 1 / share for name, share in peers.items()}
    timings = {name: Timing(each, each, each) for name, each in seconds.items()}
    return Measured(Point(op, dtype, rows, cols), 10**12, timings)


OPS = [
    measured("softmax", 64, torch=0.5),
    measured("softmax", 128),
    measured("softmax", 256, torch=0.6, cupy=0.2),
    measured("softmax", 65536, rows=4096),
    measured("layer_norm", 64, cupy=0.1),
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The figures that were drawn."""
    drawn: list[Any] = []
    figure = pytest.importorskip("matplotlib.figure", reason=MATPLOTLIB).Figure

    def make(**options: Any) -> Any:
        drawn.append(figure(**options))
        return drawn[-1]

    monkeypatch.setattr(plots, "figure_class", lambda: make)
    return drawn


def panel(figure: Any, title: str, ylabel: str) -> Any:
    """Return a panel of the first column by the op above it, which the first panel of a column has, and its axis."""
    columns = [each.get_subplotspec().colspan.start for each in figure.axes if each.get_title() == title]
    rows = [each.get_subplotspec().rowspan.start for each in figure.axes if each.get_ylabel() == ylabel]
    (found,) = [
        each
        for each in figure.axes
        if (each.get_subplotspec().colspan.start, each.get_subplotspec().rowspan.start)
        == (columns[0], rows[0])
    ]
    return found


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_for_each_dtype(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason=MATPLOTLIB)

    files = plots.plot(tmp_path / f"h200{suffix}", [*OPS, measured("softmax", 64, "float32")], ABOUT)

    assert [each.name for each in files] == [f"h200-float16{suffix}", f"h200-float32{suffix}"]
    assert all(each.stat().st_size > 10_000 for each in files)


def test_forms_have_a_file_of_their_own(tmp_path: Path, figures: list[Any]) -> None:
    mixed = [
        measured("softmax", 64),
        measured("softmax/causal", 128),
        measured("split_heads", 768, rows=4096),
    ]

    assert [each.name for each in plots.plot(tmp_path / "a.svg", mixed, ABOUT)] == ["a.svg", "a-forms.svg"]
    assert [each.name for each in plots.plot(tmp_path / "b.svg", mixed[1:], ABOUT)] == ["b.svg"]
    titles = {each.get_title() for each in figures[1].axes}
    assert titles == {"softmax/causal\n49152 rows", "split_heads\n4096 rows"}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_results_give_the_same_file(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason=MATPLOTLIB)

    first, second = (plots.plot(tmp_path / f"{name}{suffix}", OPS, ABOUT)[0] for name in "ab")

    assert first.read_bytes() == second.read_bytes()


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(plots.PlotError, match="nothing to draw"):
        plots.plot(tmp_path / "a.svg", [], {})


def test_the_title_says_device_date_and_rows(tmp_path: Path, figures: list[Any]) -> None:
    plots.plot(tmp_path / "a.svg", OPS[:4], ABOUT)
    plots.plot(tmp_path / "b.svg", OPS, ABOUT)

    told = "float16 on a device, 2026-01-02"
    assert figures[0].get_suptitle() == f"{told}: 49152 rows, 4096 from 65536 columns on"
    assert figures[1].get_suptitle() == told
    assert "layer_norm\n49152 rows" in {each.get_title() for each in figures[1].axes}


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ([(64, 1)], "64 rows"),
        ([(64, 1), (64, 2), (8, 4)], "64 rows, 8 from 4 columns on"),
        ([(64, 1), (8, 4), (64, 8)], "64 rows, 8 from 4 columns on, 64 from 8 columns on"),
        ([(64, 1), (8, 1), (8, 4)], "8, 64 rows"),
    ],
)
def test_rows_are_told_in_few_words(shapes: list[tuple[int, int]], told: str) -> None:
    assert plots.rows_told([measured("softmax", cols, rows=rows) for rows, cols in shapes]) == told


def test_there_is_a_panel_of_bandwidth_of_the_share_and_of_time(tmp_path: Path, figures: list[Any]) -> None:
    plots.plot(tmp_path / "a.svg", OPS[:4], ABOUT)

    found = {}
    for name, label in plots.Y_LABELS.items():
        lines = {
            each.get_label(): each.get_ydata() for each in panel(figures[0], "softmax", label).get_lines()
        }
        found[name] = lines["cupynorm"][0]
    assert found == {
        "bandwidth": pytest.approx(0.9),
        "share": pytest.approx(0.9),
        "time": pytest.approx(1e6 / 0.9),
    }


def test_what_was_not_measured_is_a_gap(tmp_path: Path, figures: list[Any]) -> None:
    plots.plot(tmp_path / "a.svg", OPS[:4], ABOUT)

    for kind in ("bandwidth", "share"):
        lines = {
            each.get_label(): each for each in panel(figures[0], "softmax", plots.Y_LABELS[kind]).get_lines()
        }
        torch = lines["PyTorch"]
        assert list(torch.get_xdata()) == [64, 128, 256, 65536]
        assert [math.isnan(y) for y in torch.get_ydata()] == [False, True, False, True]
        assert not any(math.isnan(y) for y in lines["cupynorm"].get_ydata())


def test_other_rows_of_the_same_columns_are_another_curve(tmp_path: Path, figures: list[Any]) -> None:
    twice = [measured("softmax", cols, rows=rows) for rows in (64, 4096) for cols in (64, 128)]

    plots.plot(tmp_path / "a.svg", twice, ABOUT)

    lines = panel(figures[0], "softmax", plots.Y_LABELS["share"]).get_lines()
    assert [list(each.get_xdata()) for each in lines] == [
        [64, 128]
    ] * 4  # ours and the copy, for each number of rows


def test_the_legend_names_every_contender_of_any_op_once_and_ours_first(
    tmp_path: Path, figures: list[Any]
) -> None:
    plots.plot(tmp_path / "a.svg", [OPS[4], *OPS[:4]], ABOUT)

    (legend,) = figures[0].legends
    assert [each.get_text() for each in legend.get_texts()] == ["cupynorm", "CuPy", "PyTorch", "copy"]


OKABE_ITO = {
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
}


def test_contenders_differ_in_more_than_colour() -> None:
    styles = list(plots.STYLES.values())

    assert {each.color for each in styles} <= OKABE_ITO
    for field in ("color", "line", "marker", "label"):
        assert len({str(getattr(each, field)) for each in styles}) == len(styles), field
    assert len(set(plots.FURTHER)) == len(plots.FURTHER)


def test_the_forms_of_a_whole_run_can_be_read(tmp_path: Path, figures: list[Any]) -> None:
    every = [measured(name, cols) for name in forms.FORMS if "/" in name for cols in (128, 1024)]

    plots.plot(tmp_path / "a.svg", every, ABOUT)

    width, height = figures[0].get_size_inches()
    assert width < 20
    assert height < 30
    figures[0].draw_without_rendering()
    boxes = [each.get_position() for each in figures[0].axes]
    assert min(box.width for box in boxes) * width > 2  # inches of each panel
    assert min(box.height for box in boxes) * height > 1.3
    assert all(each.title.get_fontsize() >= 9 for each in figures[0].axes)


# ---- files of measurements


@pytest.mark.parametrize("path", sorted(RESULTS.glob("h*00/*.json")), ids=lambda path: path.name)
def test_every_file_of_results_can_be_shown(path: Path) -> None:
    told = saved.read(path)

    if isinstance(told, saved.Tables):
        lines = told.lines()
        content = json.loads(path.read_text("utf-8"))
        name = "entries" if isinstance(content, list) else next(iter(told.lists))
        count = len(content if isinstance(content, list) else content[name])
        assert lines[0] == f"{name}: {count}"
        assert re.fullmatch(r"\S.*\S", lines[1])
        assert all(any(sign.isdigit() for sign in line) for line in lines[2 : 2 + count])
    else:
        assert told.points


def test_tables_have_a_column_for_each_number_and_the_best_of_several() -> None:
    entry = {
        "op": "softmax",
        "share": 0.25,
        "times": {"a": {"median": 1.5, "low": 1}, "b": {"median": 2.5}},
        "plan": {"variant": "warp", "vector": 8},
        "best": [["warp 8x2", 1.111], ["block", 1.0]],
        "tried": [{"share": 0.5, "variant": "split"}, {"share": 0.25, "variant": "warp"}],
        "notes": {"a": "nobody needs to read this here"},
    }

    title, names, cells = saved.Tables({}, {"": [entry]}).lines()

    assert title == "entries: 1"
    assert re.split(r"\s{2,}", names) == [
        *("op", "share", "times: a", "times: b", "plan", "best", "tried"),
    ]
    assert re.split(r"\s{2,}", cells) == [
        *("softmax", "0.25", "1.5", "2.5", "warp", "warp 8x2 1.111", "0.5 split"),
    ]


def test_tables_are_chosen_from_by_their_fields() -> None:
    tables = saved.Tables({}, {"": [{"op": "softmax", "cols": 8}, {"op": "softmax", "cols": 9}, {"cols": 8}]})

    assert tables.chosen({"op": ("softmax",), "cols": (8,), "dtype": None}).lists == {
        "": [{"op": "softmax", "cols": 8}]
    }
