"""`cupynorm tune`: finds and stores the fastest plans on this GPU."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import click

from cupynorm.cli.commands import Command
from cupynorm.cli.exits import user_files, user_input
from cupynorm.cli.options import DTYPE, DTYPES, Integers, Name, Names, json_option, ops
from cupynorm.cli.output import print_json, print_note, progress_bar


@click.command(cls=Command)
@click.argument("ops", type=Name("op", ops), metavar="[OP ...]", nargs=-1)
@click.option("--dtypes", type=Names("dtype,...", lambda: DTYPES), help="Default: float16,bfloat16,float32.")
@click.option("--cols", type=Integers(least=1), help="Default: 32 to 65536, and some odd ones.")
@click.option("--rows", type=Integers(least=1), help="Default: 49152, and fewer where columns are many.")
@click.option("--gamma-dtype", type=DTYPE, help="The dtype of gamma and beta; default: the input's.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=math.inf, help="Start no new point after this time."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be measured.")
@click.option(
    "--clear", is_flag=True, help="Remove what was found before, for every device; measure nothing."
)
@json_option
def tune(*, clear: bool, as_json: bool, **options: Any) -> None:
    """Find the fastest plans on this GPU.

    For each shape, candidates are compiled, timed in turns, and compared with float64. A plan that is faster than the
    built-in choice is stored in your cache folder, and calls of that kind use it from then on, for any number of rows
    that keeps the device as busy. CUPYNORM_TUNED=0 ignores such files. Results found before an interruption are kept.

    Example: cupynorm tune layer_norm softmax --dtypes float16 --cols 768,50257
    """
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415

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
        points = tuning.points(ops, dtypes or (), cols or (), rows or ())
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
                    click.echo(
                        f"{tuning.HEADER}\n{tuning.line(result)}" if len(found) == 1 else tuning.line(result)
                    )
        ended = True
    finally:
        left_out = len(points) - len(found)
        if as_json and (found or ended):
            print_json({**about, "results": [each.as_dict() for each in found], "left_out": left_out})
        elif found or ended:
            if on_terminal:
                click.echo("\n".join([tuning.HEADER, *map(tuning.line, found)]))
            _print_tuned(place.file, sum(each.changed for each in found), len(found), left_out)


def _print_tuned(file: Path, changed: int, measured: int, left_out: int) -> None:
    from cupynorm.tools import tune as tuning  # noqa: PLC0415

    click.echo(tuning.LEGEND)
    if left_out:
        click.echo(f"left out: {left_out} points")
    click.echo(f"{changed} of {measured} plans are better than the built-in ones, and kept in {file}")
