"""`cupynorm bench`: times ops beside their peers, or shows the results of an earlier run."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupynorm.cli.commands import Command
from cupynorm.cli.exits import BAD_FILE, USAGE, Failure, user_files, user_input
from cupynorm.cli.options import DTYPES, FILE, VARIANTS, Forms, Integers, Names, forms, json_option
from cupynorm.cli.output import print_fields, print_json, print_note, progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cupynorm.tools.results import Measured, Report
    from cupynorm.tools.saved import Tables


class BenchCommand(Command):
    """`cupynorm bench`, whose --json once took a file: it says what does now."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse `--json FILE`."""
        for option, following in zip(args, [*args[1:], "-"], strict=False):
            name, _, file = option.partition("=")
            file = file or ("" if following.startswith("-") else following)
            if name == "--json" and file:
                raise click.UsageError(
                    f"--json prints on standard output and takes no file: --save {file} writes one", ctx
                )
        return super().parse_args(ctx, args)


def _peers() -> tuple[str, ...]:
    from cupynorm.tools.peers import PEERS  # noqa: PLC0415

    return ("default", "all", "none", *PEERS)


@click.command(cls=BenchCommand)
@click.option("--ops", type=Forms("op,...", forms), help="Default: all. OP/ stands for all forms of OP.")
@click.option(
    "--dtypes",
    type=Names("dtype,...", lambda: DTYPES),
    help="Default: float16,bfloat16,float32; for forms float16,float32.",
)
@click.option("--rows", type=Integers(least=1), help="Default: 49152, and fewer where columns are many.")
@click.option(
    "--cols", type=Integers(least=1), help="Default: 32 to 262144, odd ones, and few rows up to 16M."
)
@click.option(
    "--offset",
    type=click.IntRange(0),
    default=0,
    help="Elements by which x and y are away from an aligned address.",
)
@click.option("--quick", is_flag=True, help="Measure a few shapes, in float16 and float32.")
@click.option(
    "--peers",
    type=Names("peer,...", _peers),
    default="default",
    show_default=True,
    help="cupy,torch,compile,triton, all, or none. default: all, but torch.compile at some shapes only.",
)
@click.option("--only-ours", is_flag=True, help="The same as --peers none.")
@click.option("--variants", type=VARIANTS, help="Time these forced variants, too.")
@click.option("--host", is_flag=True, help="Print a table of the host's microseconds per call, too.")
@click.option("--host-only", is_flag=True, help="Print only that table.")
@click.option("--targets", is_flag=True, help="Print the table of targets.")
@click.option(
    "--recorded", type=FILE, help="A JSON list of peers' rates measured elsewhere, to compare with."
)
@click.option("--save", type=FILE, help="Write what --json prints to a file, after each point.")
@click.option("--csv", "csv_file", type=FILE, help="Write one line for each point and contender.")
@click.option(
    "--plot",
    "plots",
    type=FILE,
    multiple=True,
    metavar="FILE.png|svg",
    help="Draw bandwidth, share and time against columns; needs matplotlib. Repeatable.",
)
@click.option("--from", "source", type=FILE, help="Measure nothing: show the results of a --save file.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=math.inf, help="Start no new point after this time."
)
@json_option
def bench(*, source: Path | None, as_json: bool, **options: Any) -> None:
    """Time the ops beside their peers and a copy of the same bytes.

    Prints the device time of one call, measured with CUDA graphs over buffers larger than the L2 cache, in turns with
    each installed peer and with copies. The share is the fraction of the best copy's rate. There is a line for each
    point, and the worst point at the end.

    Example: cupynorm bench --ops softmax --dtypes float16 --cols 1024,4096 --save results.json
    """
    from cupynorm.tools import plots, results, saved  # noqa: PLC0415

    try:
        if options["plots"]:
            plots.check_plots(options["plots"])
        with user_files():
            recorded = _read(results.read_recorded, options["recorded"])
            report = _read(saved.read, source)
        if source and isinstance(report, saved.Tables):
            _show_tables(source, report, as_json=as_json, **options)
            return
        show_point = (lambda _: None) if as_json else _point_printer(recorded)
        if report:
            report = _chosen(report, **options)
            _save(report, **options)
            for measured in report.points:
                show_point(measured)
        else:
            report = _measured(show_point, **options)
        with user_files():
            for path in options["plots"]:
                for file in plots.plot(path, report.points, report.about):
                    print_note(f"wrote {file}")
    except plots.PlotError as error:
        raise Failure(error, USAGE) from error
    if as_json:
        click.echo(results.json_of(report), nl=False)
        return
    if report.host:
        click.echo("\n" + "\n".join(results.host_table(report.host)))
    if options["targets"]:
        click.echo("\n" + "\n".join(results.target_table(report.points, recorded)))
    if report.left_out:
        click.echo(f"\nleft out: {report.left_out} points")
    if report.points or not report.host:
        click.echo("\n" + "\n".join(results.last_lines(report.points, recorded)))


def _read(reader: Callable[[Path], Any], path: Path | None) -> Any:
    """Return what a file holds; None without a file. A file that cannot be parsed is an unusable one."""
    if path is None:
        return None
    try:
        return reader(path)
    except ValueError as error:
        raise Failure(error, BAD_FILE) from error


NEED_POINTS = {  # options that need points, and their parameters
    "--save": "save",
    "--csv": "csv_file",
    "--plot": "plots",
    "--targets": "targets",
    "--recorded": "recorded",
}


def _show_tables(source: Path, tables: Tables, *, as_json: bool, **options: Any) -> None:
    """Print a file of other measurements than the sweep's. They have no contenders to make files or plots of."""
    for option, name in NEED_POINTS.items():
        if options[name]:
            raise Failure(f"{source} holds no points of cupynorm bench: {option} needs them", USAGE)
    tables = tables.chosen(_wanted(**options))
    if as_json:
        print_json({"schema": 1, **tables.about, "lists": tables.lists})
        return
    print_note(f"{source} holds no points of cupynorm bench; these are its entries")
    about = {name: value for name, value in tables.about.items() if isinstance(value, str)}
    if about:
        print_fields("measured", about)
    click.echo("\n".join(tables.lines()))


def _wanted(*, ops: Any, dtypes: Any, cols: Any, rows: Any, **_: Any) -> dict[str, Any]:
    """Return the values that options ask for, by the points' fields."""
    return {"op": ops, "dtype": dtypes, "cols": cols, "rows": rows}


def _chosen(report: Report, **options: Any) -> Report:
    """Return a report with only the points that options ask for."""
    wanted = _wanted(**options)
    points = [
        each
        for each in report.points
        if all(not names or getattr(each.point, field) in names for field, names in wanted.items())
    ]
    return dataclasses.replace(report, points=points)


def _save(report: Report, *, save: Path | None, csv_file: Path | None, **_: Any) -> None:
    from cupynorm.tools import results  # noqa: PLC0415

    with user_files():
        if save:
            results.write_json(save, report)
        if csv_file:
            results.write_csv(csv_file, report.points)


def _measured(show_point: Callable[[Measured], None], **options: Any) -> Report:
    """Measure, show each point, and keep the files up to date even if the run is interrupted."""
    from cupynorm.tools import bench as measuring  # noqa: PLC0415
    from cupynorm.tools import host_calls, timing  # noqa: PLC0415
    from cupynorm.tools.bench_points import points as points_of  # noqa: PLC0415

    quick, asked = options["quick"], options["peers"]
    report = measuring.new_report()
    with user_input():
        points = points_of(
            options["ops"] or tuple(forms()),
            options["dtypes"] or (),
            options["rows"] or (),
            options["cols"] or (),
            offset=options["offset"],
            quick=quick,
        )
    peers = _peers_asked(("none",) if options["only_ours"] else asked)
    everywhere = "all" in asked or "compile" in asked
    about = f"{len(points)} points, {report.about['device']['name']}, {_listed(report.about['versions'])}"
    print_note(about)
    if "compile" in peers and not everywhere:
        print_note(
            "torch.compile is measured at some shapes only, because compiling takes long: --peers all for all"
        )
    report.left_out = 0 if options["host_only"] else len(points)

    save = functools.partial(_save, report, **options)
    save()  # a missing folder should be noticed now
    try:
        if options["host"] or options["host_only"]:
            notes: dict[str, str] = {}
            report.host.extend(host_calls.host_times(peers, notes))
            for name, text in notes.items():
                print_note(f"  {name}: {text}")
        if not options["host_only"]:
            measuring.compile_ahead(points)
            found = measuring.sweep(
                points,
                peers,
                options["variants"] or (),
                everywhere=everywhere,
                replays=timing.REPLAYS // 2 if quick else timing.REPLAYS,
                seconds=options["seconds"],
            )
            _collect(found, len(points), report, save, show_point)
    finally:
        save()
    return report


def _collect(
    found: Iterable[Measured],
    count: int,
    report: Report,
    save: Callable[[], None],
    show_point: Callable[[Measured], None],
) -> None:
    """Add each point to the report as soon as it has been measured, save the report and show the point."""
    # a bar and lines would overwrite each other: on a terminal, the lines come at the end
    on_terminal = sys.stderr.isatty()
    with progress_bar("bench") as show_progress:
        for measured in found:
            report.points.append(measured)
            report.left_out -= 1
            save()
            show_progress(len(report.points), count)
            if not on_terminal:
                show_point(measured)
    if on_terminal:
        for measured in report.points:
            show_point(measured)


def _peers_asked(asked: tuple[str, ...]) -> list[str]:
    """Return the peers to measure. A peer that was asked for by name must be installed."""
    from cupynorm.tools import peers  # noqa: PLC0415

    if asked == ("none",):
        return []
    absent = peers.missing()
    for name in asked:
        if name in absent:
            raise Failure(f"{name} cannot be measured: {absent[name]}", USAGE)
    wanted = peers.PEERS if {"default", "all"} & set(asked) else asked
    for name in set(wanted) & set(absent):
        print_note(f"without {name}: {absent[name]}")
    return [name for name in peers.PEERS if name in wanted and name not in absent]


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _point_printer(recorded: Any) -> Callable[[Measured], None]:
    """Return a function that prints points under a header, with each note where it first applies."""
    from cupynorm.tools import results  # noqa: PLC0415

    printed: set[str] = set()

    def show(measured: Measured) -> None:
        if not printed:
            click.echo(results.HEADER)
        printed.add("")
        click.echo(results.line(measured, recorded))
        for name, text in measured.notes.items():
            if f"{name}: {text}" not in printed:
                print_note(f"  from here on, {name}: {text}")
            printed.add(f"{name}: {text}")

    return show
