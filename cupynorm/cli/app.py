"""The command with all its subcommands, and the entry point."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys

import click

from cupynorm.cli.bench import bench
from cupynorm.cli.commands import Group
from cupynorm.cli.completion import completion
from cupynorm.cli.exits import BAD_FILE
from cupynorm.cli.inspect import doctor, explain, info, selftest
from cupynorm.cli.run import embed, run
from cupynorm.cli.tune import tune

# Failures of standard output itself. One that is closed early, by `head` for example, is not among them.
OUTPUT_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG}


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value:
        import cupynorm  # noqa: PLC0415

        click.echo(f"cupynorm {cupynorm.__version__}")
        ctx.exit()


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """LayerNorm, RMSNorm and softmax for CuPy and NumPy arrays.

    Exit status: 0 well, 1 a check failed, 2 wrong usage, 3 no usable device, 4 an unusable file,
    130 interrupted.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


for _command in (info, doctor, selftest, explain, run, embed, bench, tune, completion):
    cli.add_command(_command)


def main() -> None:
    """Run the command. If a signal ends it, unfinished output is removed first."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        cli(prog_name="cupynorm")
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_FAULTS:
            raise
        with contextlib.suppress(OSError):
            click.echo(f"Error: standard output: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else flushing Python's buffer at exit would fail again
        sys.exit(BAD_FILE)
