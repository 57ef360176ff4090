"""Tests. CUPYNORM_SLOW=1 runs the exhaustive ones."""

import inspect
import os

from click.testing import CliRunner

SLOW = os.environ.get("CUPYNORM_SLOW") == "1"


def command_runner() -> CliRunner:
    """Return click's runner with standard output and standard error apart, as click has it from 8.2 on."""
    if "mix_stderr" in inspect.signature(CliRunner).parameters:
        return CliRunner(mix_stderr=False)
    return CliRunner()
