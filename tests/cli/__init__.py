"""Ways to run the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cupynorm
from cupynorm import cli
from tests import command_runner


def invoke(*arguments, **options):
    return command_runner().invoke(cli.cli, [str(each) for each in arguments], **options)


def start(*arguments, program=("-m", "cupynorm"), stderr=subprocess.PIPE, cwd=None, env=None):
    """Run a Python process."""
    root = str(Path(cupynorm.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


def shell(line, folder, **env):
    """Run a line of bash in which `cupynorm` is the command."""
    root = str(Path(cupynorm.__file__).parents[1])
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line.replace('cupynorm', f'{sys.executable} -m cupynorm')}"],
        env={**os.environ, "PYTHONPATH": root, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
