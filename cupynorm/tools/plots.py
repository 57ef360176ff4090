"""Plots of a benchmark: bandwidth, share of the copy rate, and time, against columns. Needs matplotlib."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import TYPE_CHECKING, Any

from cupynorm import _install
from cupynorm.catalog.forms import FORMS
from cupynorm.tools.results import COPY, OURS, Measured

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


class PlotError(RuntimeError):
    """Plots were asked for and cannot be drawn."""


def figure_class() -> Any:
    """Return matplotlib's Figure. Raises PlotError if matplotlib is not installed."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise PlotError(f"plots need matplotlib ({error}): {_install.pip_install('plot')}") from error


def check_plots(paths: Iterable[Path]) -> None:
    """Raise PlotError for plots that could not be drawn, before anything is measured."""
    figure_class()
    for path in paths:
        if path.suffix not in {".png", ".svg"}:
            raise PlotError(f"{path} is neither .png nor .svg")


@dataclasses.dataclass(frozen=True)
class Style:
    """The look of a contender's curve. No two differ in colour only."""

    label: str
    color: str
    line: Any
    marker: str

    def as_dict(self) -> dict[str, Any]:
        """Return keyword arguments of matplotlib's plot()."""
        return {
            "label": self.label,
            "color": self.color,
            "linestyle": self.line,
            "marker": self.marker,
            "markersize": 4,
            "linewidth": 1.3,
        }


# The colours of Okabe and Ito, which people with any kind of colour vision can distinguish.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, GREY = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999"),
)
STYLES = {
    OURS: Style(OURS, VERMILION, "-", "o"),
    "cupy": Style("CuPy", GREEN, "--", "s"),
    "torch": Style("PyTorch", BLUE, "-.", "^"),
    "compile": Style("torch.compile", PURPLE, ":", "v"),
    "triton": Style("Triton", ORANGE, (0, (6, 1, 1, 1, 1, 1)), "D"),
    COPY: Style(COPY, BLACK, (0, (3, 2)), ""),
}
# for other contenders, such as forced variants, in turn
FURTHER = (
    *((SKY, "-", "x"), (GREY, "-", "+"), (SKY, "-", "*"), (GREY, "-", "<")),
    *((SKY, "-", ">"), (GREY, "-", "P"), (SKY, "-", "X")),
)
PANELS = 4  # ops side by side
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.7  # inches
PLOTTED = ("bandwidth", "share", "time")
Y_LABELS = {"bandwidth": "effective bandwidth, TB/s", "share": "share of the copy rate", "time": "time, us"}


def plot(path: Path, points: Sequence[Measured], about: Mapping[str, Any]) -> list[Path]:
    """Draw results against columns, in one file per dtype, and return the files.

    Plain ops have three panels each: bandwidth, share of the copy rate, and time. Forms have one, their share. If both
    were measured, the forms' file ends with "-forms" before its suffix; if there are several dtypes, each file's name
    has its dtype before that. Points with odd, misaligned or few rows are not drawn: their rates depend on more than
    columns.
    """
    even = [each for each in points if each.point.kind == "even" and OURS in each.timings]
    if not even:
        raise PlotError("there is nothing to draw: no point with aligned rows was measured")
    dtypes = list(dict.fromkeys(each.point.dtype for each in even))
    files = []
    for dtype in dtypes:
        of_dtype = [each for each in even if each.point.dtype == dtype]
        forms = [each for each in of_dtype if each.point.op in FORMS and not FORMS[each.point.op].alone]
        alone = [each for each in of_dtype if each not in forms]
        for part, kinds, ending in ((alone, PLOTTED, ""), (forms, ("share",), "-forms" if alone else "")):
            if part:
                name = f"{path.stem}{f'-{dtype}' if len(dtypes) > 1 else ''}{ending}{path.suffix}"
                files.append(path.with_name(name))
                _draw(files[-1], part, kinds, f"{dtype} on {_place(about)}")
    return files


def _place(about: Mapping[str, Any]) -> str:
    device, date = about.get("device", {}).get("name", "?"), str(about.get("date", ""))[:10]
    return f"{device}, {date}" if date else device


def rows_told(points: Sequence[Measured]) -> str:
    """Return how many rows were measured, such as "49152 rows, 4096 from 65536 columns on"."""
    by_cols: dict[int, set[int]] = {}
    for each in points:
        by_cols.setdefault(each.point.cols, set()).add(each.point.rows)
    runs: list[tuple[int, int]] = []  # rows, and the columns from which on there are that many
    for cols, rows in sorted(by_cols.items()):
        if len(rows) > 1:
            return f"{', '.join(map(str, sorted({each.point.rows for each in points})))} rows"
        (one,) = rows
        if not runs or runs[-1][0] != one:
            runs.append((one, cols))
    first, *others = runs
    return ", ".join([f"{first[0]} rows", *(f"{rows} from {cols} columns on" for rows, cols in others)])


def curves(points: Sequence[Measured]) -> dict[str, list[tuple[Measured, float]]]:
    """Return each contender's seconds at each point, or nan if it was not timed; ours first, the best copy last."""
    timed = {name: None for each in points for name in each.timings if not name.startswith(COPY)}
    names = {OURS: None, **{name: None for name in STYLES if name in timed}, **timed}
    found = {
        name: [(each, each.timings[name].median if name in each.timings else math.nan) for each in points]
        for name in names
    }
    return {**found, COPY: [(each, each.copy) for each in points]}


def _draw(file: Path, points: Sequence[Measured], kinds: Sequence[str], title: str) -> None:
    ops = list(dict.fromkeys(each.point.op for each in points))
    rows = {op: rows_told([each for each in points if each.point.op == op]) for op in ops}
    common = rows[ops[0]] if len(set(rows.values())) == 1 else ""
    across = min(len(ops), PANELS)
    down = -(-len(ops) // across)
    size = (PANEL_WIDTH * across + 1.6, PANEL_HEIGHT * len(kinds) * down + 0.8)
    figure = figure_class()(figsize=size, layout="constrained")
    figure.suptitle(f"{title}: {common}" if common else title)
    panels = figure.subplots(len(kinds) * down, across, squeeze=False, sharex=len(kinds) > 1)
    legend: dict[str, Any] = {}
    for number in range(across * down):
        top, column = len(kinds) * (number // across), number % across
        for below, kind in enumerate(kinds):
            panel = panels[top + below][column]
            if number >= len(ops):
                panel.remove()
                continue
            op = ops[number]
            _draw_panel(panel, kind, [each for each in points if each.point.op == op])
            if below == 0:
                panel.set_title(op if common else f"{op}\n{rows[op]}", fontsize=10)
            if column == 0:
                panel.set_ylabel(Y_LABELS[kind])
            if below == len(kinds) - 1:
                panel.set_xlabel("columns")
            handles, labels = panel.get_legend_handles_labels()
            legend.update(zip(labels, handles, strict=True))
    known = [style.label for style in STYLES.values()]
    labels = sorted(legend, key=lambda label: known.index(label) if label in known else len(known))
    figure.legend([legend[label] for label in labels], labels, loc="outside right upper")
    # no date and no random names, so that the same results give the same file
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": OURS}):
        figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_panel(panel: Any, kind: str, own: Sequence[Measured]) -> None:
    """Draw an op's curves. Points without a time are gaps, and each number of rows has a curve of its own."""
    own = sorted(own, key=lambda each: each.point.cols)
    further = iter(FURTHER * len(own))
    drawn: list[float] = []
    ambiguous = len({each.point.cols for each in own}) < len(own)
    for name, curve in curves(own).items():
        style = STYLES.get(name) or Style(name, *next(further))
        look = style.as_dict() | {"zorder": 3 if name == OURS else 2}
        # times jump where the number of rows changes; rates do not
        apart = ambiguous or kind == "time"
        groups = dict.fromkeys(each.point.rows for each, _ in curve) if apart else [None]
        for rows in groups:
            part = [pair for pair in curve if rows is None or pair[0].point.rows == rows]
            values = [_value(kind, each, seconds) for each, seconds in part]
            drawn += [value for value in values if not math.isnan(value)]
            panel.plot([each.point.cols for each, _ in part], values, **look)
            look["label"] = "_"  # only the first one is in the legend
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.tick_params(axis="x", labelrotation=45, labelsize=8)
    panel.grid(visible=True, alpha=0.3)
    if kind == "time":
        panel.set_yscale("log")
    else:
        panel.set_ylim(0, 1.08 * max(drawn, default=1))


def _value(kind: str, measured: Measured, seconds: float) -> float:
    if kind == "time":
        return seconds * 1e6
    return measured.bytes_moved / seconds / 1e12 if kind == "bandwidth" else measured.copy / seconds
