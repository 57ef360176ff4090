"""The classes of the command and its subcommands."""

from __future__ import annotations

from typing import Any

import click

from cupynorm.cli.exits import library_errors
from cupynorm.cli.options import Name, quiet_option


class Command(click.Command):
    """A command with --quiet, whose help ends with the names that its options and arguments take."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(quiet_option())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the names."""
        super().format_options(ctx, formatter)
        names = {
            each.type.name.partition(",")[0]: ", ".join(each.type.names())
            for each in self.params
            if isinstance(each.type, Name)
        }
        if names:
            with formatter.section("Names"):
                formatter.write_dl(list(names.items()))


class Group(click.Group):
    """The command itself, with --quiet."""

    command_class = Command

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(quiet_option())

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. The library's expected errors become messages with an exit status."""
        with library_errors():
            return super().invoke(ctx)
