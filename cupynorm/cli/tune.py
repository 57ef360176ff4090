"""`cupynorm tune`: finds and stores the fastest plans on this GPU, and makes the rules that ship of searches."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from cupynorm.cli.commands import Command
from cupynorm.cli.exits import user_files, user_input
from cupynorm.cli.options import DTYPE, DTYPES, FILE, Forms, Integers, Name, Names, forms, json_option, tuned
from cupynorm.cli.output import print_json, print_note, progress_bar


@click.command(cls=Command)
@click.argument("ops", type=Name("op", tuned), metavar="[OP ...]", nargs=-1)
@click.option("--dtypes", type=Names("dtype,...", lambda: DTYPES), help="Default: float16,bfloat16,float32.")
@click.option("--cols", type=Integers(least=1), help="Default: 32 to 65536, and some odd ones.")
@click.option("--rows", type=Integers(least=1), help="Default: 49152, and fewer where columns are many.")
@click.option(
    "--gamma-dtype", type=DTYPE, help="The dtype of gamma and beta of row ops; default: the input's."
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=math.inf, help="Start no new point after this time."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be measured.")
@click.option(
    "--clear", is_flag=True, help="Remove what was found before, for every device; measure nothing."
)
@click.option(
    "--search",
    "search_file",
    type=FILE,
    metavar="FILE",
    help="Measure what each rule that ships earns, and record it in FILE; an existing one is continued.",
)
@click.option(
    "--forms", "searched", type=Forms("form,...", forms), help="With --search: these ops and forms only."
)
@click.option(
    "--ship",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Make rules from the search in FILE; repeatable. Needs no GPU.",
)
@click.option(
    "--sweep",
    type=FILE,
    metavar="FILE",
    help="With --ship: a file of `cupynorm bench --save`, whose points may not fall either.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="With --ship: how much of the copy rate a point may lose. Default: 0.01.",
)
@click.option("--data", type=FILE, metavar="FILE", help="With --search or --ship: the rules to begin with.")
@click.option("--out", type=FILE, metavar="FILE", help="With --ship: the file to write, such as sm_90.json.")
@json_option
def tune(
    *,
    clear: bool,
    search_file: Path | None,
    searched: Any,
    ship: tuple[Path, ...],
    sweep: Path | None,
    tolerance: float | None,
    data: Path | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the fastest plans on this GPU.

    For each shape, candidates are compiled, timed in turns, and compared with float64. A plan that is faster than the
    built-in choice is stored in your cache folder, and calls of that kind use it from then on, for any number of rows
    that keeps the device as busy. CUPYNORM_TUNED=0 ignores such files. Results found before an interruption are kept.
    Without an OP, row ops alone are tuned. Gradients, losses and statistics are timed with all
    kernels of a call.

    --search and --ship are for those who make the rules that ship with the package: docs/add-gpu-data.md.

    Example: cupynorm tune layer_norm softmax --dtypes float16 --cols 768,50257
    """
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415

    if ship:
        _refuse("--ship", **options, clear=clear, search=search_file, forms=searched)
        _ship(ship, sweep, tolerance, data, out, as_json=as_json)
        return
    for name, value in (("--sweep", sweep), ("--tolerance", tolerance)):
        if value is not None:
            raise click.UsageError(f"{name} needs --ship")
    if search_file is not None:
        dtypes, seconds = options.pop("dtypes"), options.pop("seconds")
        _refuse("--search", **options, clear=clear, out=out)
        _search(search_file, data, searched, dtypes, seconds, as_json=as_json)
        return
    for name, value in (("--forms", searched), ("--data", data), ("--out", out)):
        if value:
            raise click.UsageError(f"{name} needs --search or --ship")

    if clear:
        with user_files():
            removed = tuned_plans.clear()
        entries = sum(each["entries"] for each in removed)
        if as_json:
            print_json({"schema": 1, "removed": removed})
        else:
            click.echo(f"removed {len(removed)} tables with {entries} plans from {tuned_plans.folder()}")
        return
    _tune(as_json=as_json, **options)


def _tune(
    *,
    ops: Any,
    dtypes: Any,
    cols: Any,
    rows: Any,
    gamma_dtype: str | None,
    seconds: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Tune, and print what was found even if the run is interrupted."""
    from cupynorm.tools import tune as tuning  # noqa: PLC0415

    place = tuning.here()
    with user_input():
        points = tuning.points(ops, dtypes or (), cols or (), rows or (), weights=gamma_dtype)
    width = max((len(point.op) for point in points), default=0)
    about = {"schema": 1, "file": str(place.file), **dataclasses.asdict(place)}
    if dry_run:
        tried = [tuning.most_candidates(point, gamma_dtype) for point in points]
        if as_json:
            every = [
                {**dataclasses.asdict(point), "candidates": count}
                for point, count in zip(points, tried, strict=True)
            ]
            print_json({**about, "points": every})
            return
        for point, count in zip(points, tried, strict=True):
            click.echo(f"{point}: {count} candidates")
        click.echo(f"{len(points)} points; what is found would be kept in {place.file}")
        return
    print_note(f"{len(points)} points, {place.device}")
    found: list[Any] = []
    # a bar and lines would overwrite each other: on a terminal, the lines come at the end
    on_terminal = sys.stderr.isatty()
    ended = False
    try:
        with user_files(), progress_bar("tune") as show_progress:
            for result in tuning.tune(points, weights=gamma_dtype, seconds=seconds):
                found.append(result)
                show_progress(len(found), len(points))
                if not as_json and not on_terminal:
                    click.echo("\n".join(tuning.lines([result], width)[len(found) > 1 :]))
        ended = True
    finally:
        left_out = len(points) - len(found)
        if as_json and (found or ended):
            print_json({**about, "results": [each.as_dict() for each in found], "left_out": left_out})
        elif found or ended:
            if on_terminal:
                click.echo("\n".join(tuning.lines(found, width)))
            _print_tuned(place.file, sum(each.changed for each in found), len(found), left_out)


def _print_tuned(file: Path, changed: int, measured: int, left_out: int) -> None:
    from cupynorm.tools import tune as tuning  # noqa: PLC0415

    click.echo(tuning.LEGEND)
    if left_out:
        click.echo(f"left out: {left_out} points")
    click.echo(f"{changed} of {measured} plans are better than the built-in ones, and kept in {file}")


def _refuse(action: str, **options: Any) -> None:
    """Raise a usage error if any of these options was given, which an action does not take."""
    refused = [name for name, value in options.items() if value and value != math.inf]
    if refused:
        name = "OP" if refused[0] == "ops" else f"--{refused[0].replace('_', '-')}"
        raise click.UsageError(f"{name} cannot be given with {action}")


def _content(data: Path | None, architecture: str) -> Any:
    from cupynorm.plan.rule_file import content_of, file_of  # noqa: PLC0415
    from cupynorm.tools import rule_plans  # noqa: PLC0415

    if data is None:  # as if they were the architecture's own
        told = {**content_of(architecture), "architecture": architecture}
        return rule_plans.read(told, file_of(architecture))
    with user_files():
        text = data.read_text("utf-8")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{data} is not JSON: {error}") from error
    return rule_plans.read(told, data.as_posix())


def _search(
    file: Path, data: Path | None, searched: Any, dtypes: Any, seconds: float, *, as_json: bool
) -> None:
    """Record a search, and say how far it came even if it is interrupted."""
    from cupynorm.runtime import devices  # noqa: PLC0415
    from cupynorm.tools import search  # noqa: PLC0415

    limits = devices.present_limits()
    done, every = 0, 0
    begun = False
    try:
        with user_input():
            content = _content(data, limits.compute_capability)
            print_note(f"{len(content.rows)} rules of {content.file}, {limits.name}")
            with user_files(), progress_bar("search") as show_progress:
                for done, every in search.search(
                    file, content, searched or (), dtypes or (), seconds=seconds
                ):
                    begun = True
                    show_progress(done, every)
    finally:
        if begun and as_json:
            print_json({"schema": 1, "file": str(file), "points": done, "left_out": every - done})
        elif begun:
            click.echo(f"{done} of {every} points are in {file}")


def _ship(
    searches: tuple[Path, ...],
    sweep: Path | None,
    tolerance: float | None,
    data: Path | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Make a file of rules of searches, and say what has become of each rule."""
    if out is None:
        raise click.UsageError("--ship needs --out, such as --out cupynorm/plan/data/sm_90.json")
    from cupynorm.tools import saved, search, ship  # noqa: PLC0415
    from cupynorm.tools.results import NOISE  # noqa: PLC0415

    with user_input():
        with user_files():
            found = [search.read(each) for each in searches]
            report = saved.read(sweep) if sweep else None
        if isinstance(report, saved.Tables):
            raise click.UsageError(f"{sweep} holds no points of cupynorm bench")
        content = _content(data, found[0].limits.compute_capability)
        with progress_bar("ship") as show_progress:
            allowed = NOISE if tolerance is None else tolerance
            shipped = ship.ship(content, found, show_progress, sweep=report, tolerance=allowed)
    with user_files():
        out.write_text(shipped.text, "utf-8")
    if as_json:
        print_json({"schema": 1, "file": str(out), **shipped.summary()})
        return
    for line in shipped.lines():
        click.echo(line)
    click.echo(f"written: {out}")
