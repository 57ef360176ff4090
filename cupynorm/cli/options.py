"""Types of parameters, and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupynorm.cli.output import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from click.shell_completion import CompletionItem


class Name(click.ParamType):  # type: ignore[type-arg]
    """A name that the library knows. It is looked up when it is needed, so that `--help` stays instant."""

    def __init__(self, name: str, names: Callable[[], Iterable[str]]) -> None:
        self.name = name
        self._names = names

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._names())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name if the library knows it."""
        names = self.names()
        if value not in names:
            import difflib  # noqa: PLC0415  a millisecond, which only a wrong name needs

            close = difflib.get_close_matches(str(value), names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            self.fail(f"{value!r} is not one of {', '.join(names)}{hint}", param, ctx)
        return str(value)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Return the names that begin with what was typed."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]


class Names(Name):
    """Names separated by commas."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the names if the library knows them all."""
        if isinstance(value, tuple):
            return value
        return tuple(super(Names, self).convert(each, param, ctx) for each in str(value).split(","))


class Forms(Names):
    """Names of ops and their forms; OP/ stands for all forms of an op."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the names if the library knows them all."""
        if isinstance(value, tuple):
            return value
        found: list[str] = []
        for each in str(value).split(","):
            of_op = [name for name in self._names() if each.endswith("/") and name.startswith(each)]
            found += of_op or [Name.convert(self, each, param, ctx)]
        return tuple(dict.fromkeys(found))


class Integers(click.ParamType):  # type: ignore[type-arg]
    """Integers separated by commas; a single one gives a tuple, too."""

    name = "n,n,..."

    def __init__(self, least: int | None = None) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the integers of a text."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(each) for each in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 1024 or 64,1024", param, ctx)
        if self._least is not None and min(numbers) < self._least:
            self.fail(f"{value!r} has a number below {self._least}", param, ctx)
        return numbers


def ops() -> list[str]:
    """Return the names of all row ops."""
    from cupynorm.catalog.op_table import OPS  # noqa: PLC0415

    return [op.name for op in OPS]


def tuned() -> Iterable[str]:
    """Return the names of what can be tuned."""
    from cupynorm.catalog.forms import TUNED  # noqa: PLC0415

    return TUNED


def forms() -> Iterable[str]:
    """Return the names of all ops and their forms."""
    from cupynorm.catalog.forms import FORMS  # noqa: PLC0415

    return FORMS


def _variants() -> tuple[str, ...]:
    from cupynorm.plan.config import VARIANTS  # noqa: PLC0415

    return VARIANTS


DTYPES = ("float16", "bfloat16", "float32", "float64")
DTYPE = click.Choice(DTYPES)
FILE = click.Path(path_type=Path, readable=False)  # a file that cannot be read is not a usage error
VARIANT = Name("variant", _variants)
VARIANTS = Names("variant,...", _variants)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
plan_option = click.option("--plan", type=VARIANT, help="Force a variant, one of those named below.")
op_argument = click.argument("op", type=Name("op", ops), metavar="OP")


class Axes(Integers):
    """Axes, or none for all of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a tuple of integers; an empty one for all axes."""
        if isinstance(value, str) and value.lower() == "none":
            return ()
        return super().convert(value, param, ctx)


axis_option = click.option(
    "--axis",
    type=Axes(),
    callback=lambda _ctx, _param, axes: None if not axes else axes[0] if len(axes) == 1 else axes,
    default="-1",
    show_default=True,
    help="The axis or axes to normalise, such as -1, 0 or 0,2; none: all.",
)


def quiet_option() -> click.Option:
    """Return --quiet. Every command has it, and it may stand before the command's name as well."""

    def keep(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
        if value:
            ctx.find_root().meta[QUIET] = True

    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=keep,
        help="Print results and errors only: no notes, no progress.",
    )
