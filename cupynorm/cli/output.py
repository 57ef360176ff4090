"""The output of commands: results on standard output, notes and progress bars on standard error."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from cupynorm.tools import documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUIET = "cupynorm.quiet"  # the key of --quiet in a context's meta
COLORS = {"ok": "green", "warning": "yellow", "fault": "red"}


def is_quiet() -> bool:
    """Return whether --quiet was given."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.find_root().meta.get(QUIET))


def print_note(text: str) -> None:
    """Print a note on standard error, unless --quiet was given."""
    if not is_quiet():
        click.echo(text, err=True)


def print_json(value: dict[str, Any]) -> None:
    """Print a JSON document."""
    click.echo(documents.text(value, indent=2))


def print_fields(title: str, fields: dict[str, Any]) -> None:
    """Print a title, and a line for each field."""
    click.echo(click.style(title, bold=True))
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        click.echo(f"  {name:<{width}}  {value}")


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the finished part and the total, and moves a bar if standard error is a terminal."""
    with progress_bars() as show:
        yield lambda done, total: show(label, done, total)


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that takes a stage's name, its finished part and the total. Each stage has a bar."""
    with contextlib.ExitStack() as stack:
        bars: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                stack.close()  # ends the line of the previous bar
                bar = click.progressbar(length=total, label=stage, file=sys.stderr)
                bars[stage] = stack.enter_context(bar)
            bars[stage].update(done - bars[stage].pos)

        shown = sys.stderr.isatty() and not is_quiet()
        yield show if shown else lambda stage, done, total: None  # noqa: ARG005
