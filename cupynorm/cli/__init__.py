"""The command `cupynorm`. A command parses its options, calls one function of the library, and prints the result."""

from __future__ import annotations

from cupynorm.cli.app import cli, main

__all__ = ["cli", "main"]
