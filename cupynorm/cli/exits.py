"""Exit statuses, and the errors that become messages with one of them."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECK_FAILED = 1
USAGE = 2
NO_DEVICE = 3
BAD_FILE = 4
INTERRUPTED = 130

# The first word of a library message, and the name of the command's option that it is about, where they differ.
OPTION_OF = {"variant": "plan", "rows": "shape", "truncated": "truncate", "bfloat16": "input_dtype"}


class Failure(click.ClickException):
    """A message for the user, with an exit status."""

    def __init__(self, message: object, exit_code: int) -> None:
        super().__init__(str(message))
        self.exit_code = exit_code  # type: ignore[misc]


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Turn the library's errors that users can expect into messages; others keep their traceback."""
    from cupynorm import CompileError, NoDeviceError  # noqa: PLC0415
    from cupynorm.npy.paths import FileError  # noqa: PLC0415

    try:
        yield
    except NoDeviceError as error:
        raise Failure(error, NO_DEVICE) from error
    except FileError as error:
        raise Failure(error, BAD_FILE) from error
    except CompileError as error:
        raise Failure(error, CHECK_FAILED) from error
    except MemoryError as error:  # CuPy's OutOfMemoryError is one
        raise Failure(f"out of memory: {error or 'a block of rows does not fit'}", CHECK_FAILED) from error
    except KeyboardInterrupt as error:
        raise Failure("interrupted", INTERRUPTED) from error


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Turn ValueError and TypeError into usage errors: what the library refuses here came from the user."""
    from cupynorm._dtypes import MissingPackageError  # noqa: PLC0415

    try:
        yield
    except MissingPackageError as error:
        raise Failure(error, CHECK_FAILED) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise Failure(_with_option(str(error)), USAGE) from error


def _with_option(message: str) -> str:
    """Begin a message with the command's option that it is about, if its first word names one."""
    word = re.split(r"[^\w]", message, maxsplit=1)[0]
    rest = message.removeprefix(f"{word}: ")
    ctx = click.get_current_context(silent=True)
    for each in ctx.command.params if ctx else ():
        if each.name == OPTION_OF.get(word, word):
            is_option = isinstance(each, click.Option)
            name = max(each.opts, key=len) if is_option else each.make_metavar(ctx)  # type: ignore[arg-type]
            return f"{name}: {rest}"
    return message


@contextlib.contextmanager
def user_files() -> Iterator[None]:
    """Turn an OSError into a message that names the file."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error
        raise Failure(message, BAD_FILE) from error
