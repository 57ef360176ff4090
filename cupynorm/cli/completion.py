"""`cupynorm completion`: how to switch on completion in a shell."""

from __future__ import annotations

import click

from cupynorm.cli.commands import Command

# The file of each shell, and the line to add to it.
COMPLETION = {
    "bash": ("~/.bashrc", 'eval "$(_CUPYNORM_COMPLETE=bash_source cupynorm)"'),
    "zsh": ("~/.zshrc", 'eval "$(_CUPYNORM_COMPLETE=zsh_source cupynorm)"'),
    "fish": ("~/.config/fish/completions/cupynorm.fish", "_CUPYNORM_COMPLETE=fish_source cupynorm | source"),
}


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(list(COMPLETION)))
def completion(shell: str) -> None:
    """Say how to switch on completion."""
    file, line = COMPLETION[shell]
    click.echo(f"# put this line into {file}, then start a new shell\n{line}")
