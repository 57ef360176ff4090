"""The command `cupynorm`. A command parses, calls one function of the library, and prints."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupynorm.tools import documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from click.shell_completion import CompletionItem

    from cupynorm.tools.results import Measured, Report
    from cupynorm.tools.saved import Tables
    from cupynorm.tools.testing import Result

CHECK_FAILED, USAGE, NO_DEVICE, BAD_FILE, INTERRUPTED = 1, 2, 3, 4, 130
QUIET = "cupynorm.quiet"  # where a context keeps whether --quiet was given
OUTPUT_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG}
COLORS = {"ok": "green", "warning": "yellow", "fault": "red"}
COMPLETION = {
    "bash": ("~/.bashrc", 'eval "$(_CUPYNORM_COMPLETE=bash_source cupynorm)"'),
    "zsh": ("~/.zshrc", 'eval "$(_CUPYNORM_COMPLETE=zsh_source cupynorm)"'),
    "fish": ("~/.config/fish/completions/cupynorm.fish", "_CUPYNORM_COMPLETE=fish_source cupynorm | source"),
}


class Failure(click.ClickException):
    """A message for the user, and the exit status that goes with it."""

    def __init__(self, message: object, exit_code: int) -> None:
        super().__init__(str(message))
        self.exit_code = exit_code  # type: ignore[misc]


def _quiet_option() -> click.Option:
    """Return --quiet, which every command has, and which may stand before the command's name as well."""

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


def _is_quiet() -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.find_root().meta.get(QUIET))


def _note(text: str) -> None:
    """Print something beside the result on standard error, unless --quiet asks for nothing of the kind."""
    if not _is_quiet():
        click.echo(text, err=True)


class Command(click.Command):
    """A command with --quiet, whose help ends with the names that its options and arguments take."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(_quiet_option())

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


class BenchCommand(Command):
    """`cupynorm bench`, which says what became of an option that once took a file."""

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


class Commands(click.Group):
    """Commands whose expected errors become messages with an exit status; others keep their traceback."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        from cupynorm import CompileError, NoDeviceError  # noqa: PLC0415
        from cupynorm.tools.files import FileError  # noqa: PLC0415

        try:
            return super().invoke(ctx)
        except NoDeviceError as error:
            raise Failure(error, NO_DEVICE) from error
        except FileError as error:
            raise Failure(error, BAD_FILE) from error
        except CompileError as error:
            raise Failure(error, CHECK_FAILED) from error
        except MemoryError as error:  # CuPy's, too
            raise Failure(
                f"out of memory: {error or 'a block of rows does not fit'}", CHECK_FAILED
            ) from error
        except KeyboardInterrupt as error:
            raise Failure("interrupted", INTERRUPTED) from error


@contextlib.contextmanager
def _user_input() -> Iterator[None]:
    """Make usage errors of ValueError and TypeError: what the library refuses here came from the user."""
    from cupynorm._dtypes import MissingPackageError  # noqa: PLC0415

    try:
        yield
    except MissingPackageError as error:
        raise Failure(error, CHECK_FAILED) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise Failure(_with_option(str(error)), USAGE) from error


# How messages of the library begin that are about an option of another name.
ABOUT = {"variant": "plan", "rows": "shape", "truncated": "truncate", "bfloat16": "input_dtype"}


def _with_option(message: str) -> str:
    """Return a message that begins with the name of an option of the command, so that its reader knows what to mend."""
    word = re.split(r"[^\w]", message, maxsplit=1)[0]
    said = message.removeprefix(f"{word}: ")
    ctx = click.get_current_context(silent=True)
    for each in ctx.command.params if ctx else ():
        if each.name == ABOUT.get(word, word):
            name = max(each.opts, key=len) if isinstance(each, click.Option) else each.make_metavar(ctx)  # type: ignore[arg-type]
            return f"{name}: {said}"
    return message


class Name(click.ParamType):  # type: ignore[type-arg]
    """A name that the library knows, looked up when first needed: `--help` stays instant."""

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
            self.fail(f"{value!r} is not one of {', '.join(names)}", param, ctx)
        return str(value)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Return the names that begin like this."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]


class Integers(click.ParamType):  # type: ignore[type-arg]
    """Integers with commas between them; one alone is a tuple, too."""

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


class Names(Name):
    """Names with commas between them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the names if the library knows them all."""
        if isinstance(value, tuple):
            return value
        return tuple(super(Names, self).convert(each, param, ctx) for each in str(value).split(","))


class Forms(Names):
    """Names of ops and their forms; OP/ is all of those that an op has."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the names if the library knows them all."""
        if isinstance(value, tuple):
            return value
        found: list[str] = []
        for each in str(value).split(","):
            of_op = [name for name in self._names() if each.endswith("/") and name.startswith(each)]
            found += of_op or [Name.convert(self, each, param, ctx)]
        return tuple(dict.fromkeys(found))


def _ops() -> list[str]:
    from cupynorm.catalog.op_table import OPS  # noqa: PLC0415

    return [op.name for op in OPS]


def _forms() -> Iterable[str]:
    from cupynorm.catalog.forms import FORMS  # noqa: PLC0415

    return FORMS


def _variants() -> tuple[str, ...]:
    from cupynorm.plan.config import VARIANTS  # noqa: PLC0415

    return VARIANTS


def _peers() -> tuple[str, ...]:
    from cupynorm.tools.peers import PEERS  # noqa: PLC0415

    return ("default", "all", "none", *PEERS)


def _recorded() -> Iterable[str]:
    from cupynorm.plan.limits import RECORDED  # noqa: PLC0415

    return RECORDED


DTYPES = ("float16", "bfloat16", "float32", "float64")
DTYPE = click.Choice(DTYPES)
FILE = click.Path(
    path_type=Path, readable=False
)  # one that cannot be read is an unusable file, not wrong usage
VARIANT = Name("variant", _variants)

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
_plan_option = click.option(
    "--plan", type=VARIANT, help="Force a variant: warp, block, cached, cluster, split, shared, uncached."
)
_op_argument = click.argument("op", type=Name("op", _ops), metavar="OP")
_axis_option = click.option(
    "--axis",
    type=Integers(),
    callback=lambda _ctx, _param, axes: axes[0] if len(axes) == 1 else axes,
    default="-1",
    show_default=True,
    help="Trailing axis or axes to normalise: -1, or -2,-1.",
)


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value:
        import cupynorm  # noqa: PLC0415

        click.echo(f"cupynorm {cupynorm.__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """LayerNorm, RMSNorm and softmax for CuPy and NumPy arrays.

    Exit status: 0 well, 1 a check failed, 2 wrong usage, 3 no usable device, 4 an unusable file,
    130 interrupted.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


cli.params.append(_quiet_option())


@cli.command()
@_json_option
def info(*, as_json: bool) -> None:
    """Show what is installed and what is there.

    Versions, devices, recorded limits, kernel cache, tuned plans, extras and environment variables.

    Example: cupynorm info --json
    """
    from cupynorm.tools import environment  # noqa: PLC0415

    found = environment.info()
    if as_json:
        _print_json(found)
        return
    _print_fields("versions", {name: version or "-" for name, version in found["versions"].items()})
    for device in found["devices"]:
        _print_fields(f"device {device.pop('number')}", device)
    if not found["devices"]:
        _print_fields("devices", {"none": found["no_device"]})
    _print_fields("recorded limits", {"for explain --device": ", ".join(found["recorded"])})
    for title, name in (("kernel cache", "cubins"), ("CuPy's cache", "cache")):
        cache = found[name]
        size = f"{cache['bytes']} bytes in {cache['files']} files"
        _print_fields(title, {"folder": cache["folder"], "size": size})
    _print_fields("tuned plans", _tuned_fields(found["tuned"]))
    early = found["early_launches"]["used"]
    _print_fields(
        "early launches", {"used": "from compute capability 9.0 on" if early else "no: CUPYNORM_EARLY is 0"}
    )
    _print_fields("kernels", found["kernels"])
    _print_fields("extras", {name: "installed" if there else "-" for name, there in found["extras"].items()})
    _print_fields("environment", found["environment"])


def _tuned_fields(tuned: dict[str, Any]) -> dict[str, Any]:
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415

    why_not = tuned_plans.distrust() or "CUPYNORM_TUNED is 0"
    fields = {"folder": tuned["folder"], "used": "yes" if tuned["used"] else f"no: {why_not}"}
    for table in tuned["tables"]:
        fields[Path(table["file"]).name] = f"{table['entries']} plans"
    return fields


@cli.command()
@_json_option
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool) -> None:
    """Find faults and say what to type next.

    Exit status 1 if there is a fault. A machine without a GPU and without CuPy is none: NumPy arrays work.
    """
    from cupynorm.tools import environment  # noqa: PLC0415

    found = list(environment.findings())
    faults = sum(each.status == "fault" for each in found)
    if as_json:
        _print_json({"schema": 1, "faults": faults, "findings": [dataclasses.asdict(each) for each in found]})
    else:
        for each in found:
            click.echo(
                f"{click.style(f'{each.status:<7}', fg=COLORS[each.status])}  {each.check}: {each.message}"
            )
            if each.fix:
                click.echo(f"         -> {each.fix}")
    ctx.exit(CHECK_FAILED if faults else 0)


@cli.command()
@click.option(
    "--gpu/--cpu", "gpu", default=None, help="Demand a GPU, or use the CPU. Default: a GPU if there is one."
)
@click.option("--quick", is_flag=True, help="A few shapes and dtypes, in the variants that calls choose.")
@_json_option
@click.pass_context
def selftest(ctx: click.Context, *, gpu: bool | None, quick: bool, as_json: bool) -> None:
    """Compare every op with float64.

    Over dtypes, variants and shapes; first all kernels are compiled, several at once. Exit status 1 if an error is larger
    than the dtype's tolerance.
    """
    from cupynorm.tools import testing  # noqa: PLC0415
    from cupynorm.tools.files import choose_device  # noqa: PLC0415

    device, note = choose_device("auto" if gpu is None else "gpu" if gpu else "cpu")
    if note:
        _note(f"no usable GPU, so this tests the CPU: {note}")
    with _stages() as progress:
        results = list(testing.selftest(cpu=device == "cpu", quick=quick, progress=progress))
    faults = [each for each in results if not each.ok]
    if as_json:
        every = [dataclasses.asdict(each) for each in results]
        counts = {"cases": len(results), "faults": len(faults)}
        _print_json({"schema": 1, "device": device, "quick": quick, **counts, "results": every})
    else:
        _print_results(results)
        for each in faults:
            case = f"{each.op} {each.variant} {each.dtype} {each.shape}"
            click.echo(f"{click.style('fault', fg='red')}  {case}: {each.note}")
        click.echo(f"{device}: {len(results)} cases, {len(faults)} faults")
    ctx.exit(CHECK_FAILED if faults or not results else 0)


@cli.command()
@click.argument("op", type=Name("op", _forms), metavar="OP[/FORM]")
@click.option("--shape", type=Integers(least=0), required=True, help="Such as 49152,1024.")
@click.option("--dtype", type=DTYPE, required=True, help="Of the input.")
@click.option("--out-dtype", type=DTYPE, help="Default: that of the input.")
@click.option("--gamma-dtype", type=DTYPE, help="Of gamma and beta; default: that of the input.")
@_axis_option
@_plan_option
@click.option(
    "--device", type=Name("device", _recorded), help="Recorded limits instead of the present device's."
)
@_json_option
def explain(*, op: str, as_json: bool, **options: Any) -> None:
    """Show what a call would launch.

    The plan, the kernel, its registers, its occupancy, the bytes that it moves. Nothing is launched.
    OP is an op, alone or in one of the forms that `cupynorm bench` times: softmax/causal, add_layer_norm/sum, layer_norm/int8.

    Example: cupynorm explain layer_norm --shape 49152,1024 --dtype float16 --device h200
    """
    from cupynorm.catalog.forms import form  # noqa: PLC0415
    from cupynorm.tools import explain as explaining  # noqa: PLC0415

    what, shape, dtype = form(op), options.pop("shape"), options.pop("dtype")
    with _user_input():
        if what.alone:
            explanation = explaining.explain(what.row, shape, dtype, **options)
        else:
            explanation = explaining.explain_form(what, shape, dtype, **_of_a_form(what.name, **options))
    fields = explanation.as_dict()
    if as_json:
        _print_json({"schema": 1, **fields})
        return
    fields["occupancy"] = f"{fields['occupancy']:.0%}"
    fields["plan"].pop("why", None)  # the launch tells it
    for name in ("problem", "plan"):
        _print_fields(name, fields.pop(name))
    _print_fields(
        "launch", {name: "-" if value is None else value for name, value in fields.items() if value != ""}
    )


def _of_a_form(name: str, *, plan: Any, device: Any, **others: Any) -> dict[str, Any]:
    """Return the options that explain a form; others are of an op alone, and have their defaults."""
    for option, value in others.items():
        if value not in (None, -1):
            raise ValueError(f"--{option.replace('_', '-')} is of an op alone: {name} has it not")
    return {"plan": plan, "device": device}


@cli.command()
@_op_argument
@click.argument("source", type=FILE, metavar="IN.NPY")
@click.option(
    "-o", "--output", type=FILE, required=True, help="The .npy file to write; - is standard output."
)
@_axis_option
@click.option(
    "--dtype", type=DTYPE, help="Of the output; default: that of the input. bfloat16 is stored as raw V2."
)
@click.option(
    "--input-dtype", type=click.Choice(["bfloat16"]), help="Read raw two-byte (V2, uint16) files as bfloat16."
)
@click.option("--gamma", type=FILE, help="A .npy file.")
@click.option("--beta", type=FILE, help="A .npy file.")
@click.option("--eps", type=float, help="Default: 1e-5 for layer_norm, 1e-6 for rms_norm.")
@click.option(
    "--stats", is_flag=True, help="Write mean and rstd as well, to OUTPUT with .mean.npy and .rstd.npy."
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--device", type=click.Choice(["auto", "gpu", "cpu"]), default="auto", show_default=True)
@_plan_option
@_json_option
def run(
    *, op: str, source: Path, output: Path, input_dtype: str | None, as_json: bool, **options: Any
) -> None:
    """Put a .npy file through OP.

    Its rows are read, computed and written block by block, so that it may be larger than memory. It may be
    big-endian or in Fortran order. The output appears under its name only when it is complete. - is standard
    input or output.

    Example: cupynorm run layer_norm in.npy -o out.npy --gamma gamma.npy --dtype float32
    """
    from cupynorm.catalog import op_table  # noqa: PLC0415
    from cupynorm.tools import files  # noqa: PLC0415

    with _user_input(), _progress(op) as show:
        _check_json(output, as_json=as_json)
        report = files.run(
            op_table.op(op),
            source,
            output,
            bfloat16=input_dtype == "bfloat16",
            progress=show,
            **options,
        )
    if as_json:
        _print_json({"schema": 1, **report.as_dict()})
        return
    if report.note:
        _note(f"no usable GPU, so this ran on the CPU: {report.note}")
    where = f"{report.device}, variant {report.plan['variant']}" if report.plan else report.device
    dtypes = f"{report.input_dtype} -> {report.dtype}"
    rate = f"{report.seconds:.3f} s, {report.bytes_per_second / 1e9:.3g} GB/s of files"
    _note(f"{op}: {report.rows} x {report.cols}, {dtypes}, on {where}: {rate}")
    _note(f"wrote {', '.join(report.outputs)}")


@cli.command()
@click.argument("source", type=FILE, metavar="TEXTS")
@click.option(
    "-o", "--output", type=FILE, required=True, help="The .npy file to write; - is standard output."
)
@click.option(
    "--model",
    type=FILE,
    required=True,
    help="A folder with config.json, model.safetensors and tokenizer.json.",
)
@click.option("--field", help="The field of .jsonl, the column of .csv; default: text.")
@click.option("--pooling", type=click.Choice(["mean", "cls"]), help="Default: the model's, else mean.")
@click.option(
    "--normalize/--no-normalize", default=None, help="To length 1. Default: as the model does, else yes."
)
@click.option("--truncate", is_flag=True, help="Cut texts that are too long, which is an error otherwise.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Of a text; default: the model's table of positions."
)
@click.option(
    "--empty",
    type=click.Choice(["error", "zeros"]),
    default="error",
    show_default=True,
    help="What a text without words is, or gives.",
)
@click.option("--dtype", type=DTYPE, default="float32", show_default=True, help="Of the model's weights.")
@click.option("--force", is_flag=True, help="Replace an existing output, and another run's unfinished one.")
@click.option("--device", type=click.Choice(["auto", "gpu", "cpu"]), default="auto", show_default=True)
@_json_option
def embed(*, source: Path, output: Path, model: Path, as_json: bool, **options: Any) -> None:
    """Turn texts into a .npy file of embeddings.

    One row a text, in their order, by a BERT sentence encoder, on a GPU where there is one. TEXTS is a file of lines,
    .jsonl, .ndjson or .csv, in UTF-8, or - for lines of standard input. All texts are checked first. A run that is ended
    leaves what is done in OUTPUT.part, and the same command goes on from there; the output appears under its name only when
    it is complete.

    Example: cupynorm embed texts.txt -o embeddings.npy --model all-MiniLM-L6-v2
    """
    from cupynorm import embedding  # noqa: PLC0415

    try:
        with _user_input(), _progress("embed") as show:
            _check_json(output, as_json=as_json)
            report = embedding.embed_file(model, source, output, progress=show, **options)
    except ImportError as error:
        raise Failure(error, CHECK_FAILED) from error
    except (KeyboardInterrupt, SystemExit, MemoryError):
        left = embedding.unfinished(output)
        if left:
            click.echo(
                f"{left[0]} of {left[1]} texts are kept in {output}.part: the same command goes on from there",
                err=True,
            )
        raise
    if as_json:
        _print_json({"schema": 1, **report.as_dict()})
        return
    done = f"{report.texts} texts" + (f", {report.resumed} of an earlier run" if report.resumed else "")
    cut = f", {report.truncated} truncated" if report.truncated else ""
    rate = f"{report.seconds:.3f} s, {report.texts_per_second:.3g} texts/s"
    _note(f"{done}{cut}, {report.tokens} tokens -> {report.columns} columns on {report.device}: {rate}")
    _note(f"wrote {report.output}")


@cli.command(cls=BenchCommand)
@click.option("--ops", type=Forms("op,...", _forms), help="Default: all. OP/ is each of its forms.")
@click.option(
    "--dtypes",
    type=Names("dtype,...", lambda: DTYPES),
    help="Default: float16,bfloat16,float32; of forms float16,float32.",
)
@click.option("--rows", type=Integers(least=1), help="Default: 49152, and fewer where columns are many.")
@click.option(
    "--cols", type=Integers(least=1), help="Default: 32 to 262144, odd ones, and few rows up to 16M."
)
@click.option(
    "--offset",
    type=click.IntRange(0),
    default=0,
    help="Elements by which x and y are off an aligned address.",
)
@click.option("--quick", is_flag=True, help="A few shapes, float16 and float32.")
@click.option(
    "--peers",
    type=Names("peer,...", _peers),
    default="default",
    show_default=True,
    help="cupy,torch,compile,triton, all, or none. default: all, but torch.compile at some shapes only.",
)
@click.option("--only-ours", is_flag=True, help="The same as --peers none.")
@click.option("--variants", type=Names("variant,...", _variants), help="Time these forced variants, too.")
@click.option("--host", is_flag=True, help="Microseconds of the host a call as well, in a table of its own.")
@click.option("--host-only", is_flag=True, help="That table only.")
@click.option("--targets", is_flag=True, help="Print the table of targets.")
@click.option("--recorded", type=FILE, help="JSON list of peers' rates from elsewhere, to be compared with.")
@click.option("--save", type=FILE, help="Write what --json prints to a file, after each point anew.")
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
@click.option("--seconds", type=click.FloatRange(1), default=math.inf, help="Start no point after so long.")
@_json_option
def bench(*, source: Path | None, as_json: bool, **options: Any) -> None:
    """Time the ops beside their peers and a copy of the same bytes.

    Device time of one call, from CUDA graphs over buffers larger than the L2 cache, in turns with each installed
    peer and with copies. The share is that of the best copy's rate. A line for each point, then the worst of them.

    Example: cupynorm bench --ops softmax --dtypes float16 --cols 1024,4096 --save results.json
    """
    from cupynorm.tools import plots, results, saved  # noqa: PLC0415

    try:
        if options["plots"]:
            plots.check_plots(options["plots"])
        with _user_files():
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
        with _user_files():
            for path in options["plots"]:
                for file in plots.plot(path, report.points, report.about):
                    _note(f"wrote {file}")
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
    """Return what a file holds; None without one. What is not understood is an unusable file."""
    if path is None:
        return None
    try:
        return reader(path)
    except ValueError as error:
        raise Failure(error, BAD_FILE) from error


NEED_POINTS = {  # options that make something of points, by their parameters' names
    "--save": "save",
    "--csv": "csv_file",
    "--plot": "plots",
    "--targets": "targets",
    "--recorded": "recorded",
}


def _show_tables(source: Path, tables: Tables, *, as_json: bool, **options: Any) -> None:
    """Print a file of other measurements than the sweep's. They have no contenders, so that nothing else can be made of them."""
    for option, name in NEED_POINTS.items():
        if options[name]:
            raise Failure(f"{source} holds no points of cupynorm bench: there is nothing for {option}", USAGE)
    tables = tables.chosen(_wanted(**options))
    if as_json:
        _print_json({"schema": 1, **tables.about, "lists": tables.lists})
        return
    _note(f"{source} holds no points of cupynorm bench; its entries as they are")
    about = {name: value for name, value in tables.about.items() if isinstance(value, str)}
    if about:
        _print_fields("measured", about)
    click.echo("\n".join(tables.lines()))


def _wanted(*, ops: Any, dtypes: Any, cols: Any, rows: Any, **_: Any) -> dict[str, Any]:
    """Return what options want of points, by the points' fields."""
    return {"op": ops, "dtype": dtypes, "cols": cols, "rows": rows}


def _chosen(report: Report, **options: Any) -> Report:
    """Return a report without the points that options leave out."""
    wanted = _wanted(**options)
    points = [
        each
        for each in report.points
        if all(not names or getattr(each.point, field) in names for field, names in wanted.items())
    ]
    return dataclasses.replace(report, points=points)


def _save(report: Report, *, save: Path | None, csv_file: Path | None, **_: Any) -> None:
    from cupynorm.tools import results  # noqa: PLC0415

    with _user_files():
        if save:
            results.write_json(save, report)
        if csv_file:
            results.write_csv(csv_file, report.points)


def _measured(show_point: Callable[[Measured], None], **options: Any) -> Report:
    """Measure, show each point, and keep the files up to date, whatever ends it."""
    from cupynorm.tools import bench as measuring  # noqa: PLC0415

    quick, asked = options["quick"], options["peers"]
    report = measuring.new_report()
    with _user_input():
        points = measuring.points(
            options["ops"] or tuple(_forms()),
            options["dtypes"] or (),
            options["rows"] or (),
            options["cols"] or (),
            offset=options["offset"],
            quick=quick,
        )
    peers = _peers_asked(("none",) if options["only_ours"] else asked)
    everywhere = "all" in asked or "compile" in asked
    about = f"{len(points)} points, {report.about['device']['name']}, {_spelled(report.about['versions'])}"
    _note(about)
    if "compile" in peers and not everywhere:
        _note("torch.compile at some shapes only, for it compiles long: --peers all for all")
    report.left_out = 0 if options["host_only"] else len(points)

    save = functools.partial(_save, report, **options)
    save()  # a folder that is not there is better known now
    on_terminal = sys.stderr.isatty()  # where a bar stands in the way of lines, they come at the end
    try:
        if options["host"] or options["host_only"]:
            notes: dict[str, str] = {}
            report.host.extend(measuring.host_times(peers, notes))
            for name, note in notes.items():
                _note(f"  {name}: {note}")
        if not options["host_only"]:
            measuring.compile_ahead(points)
            found = measuring.sweep(
                points,
                peers,
                options["variants"] or (),
                everywhere=everywhere,
                replays=measuring.REPLAYS // 2 if quick else measuring.REPLAYS,
                seconds=options["seconds"],
            )
            with _progress("bench") as progress:
                for measured in found:
                    report.points.append(measured)
                    report.left_out -= 1
                    save()
                    progress(len(report.points), len(points))
                    if not on_terminal:
                        show_point(measured)
            if on_terminal:
                for measured in report.points:
                    show_point(measured)
    finally:
        save()
    return report


def _peers_asked(asked: tuple[str, ...]) -> list[str]:
    """Return the peers to measure. One that was asked for by name must be installed."""
    from cupynorm.tools import peers  # noqa: PLC0415

    if asked == ("none",):
        return []
    absent = peers.missing()
    for name in asked:
        if name in absent:
            raise Failure(f"{name} cannot be measured: {absent[name]}", USAGE)
    wanted = peers.PEERS if {"default", "all"} & set(asked) else asked
    for name in set(wanted) & set(absent):
        _note(f"without {name}: {absent[name]}")
    return [name for name in peers.PEERS if name in wanted and name not in absent]


def _spelled(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _point_printer(recorded: Any) -> Callable[[Measured], None]:
    """Return a function that prints a point: the first under a header, and a note only where it is new."""
    from cupynorm.tools import results  # noqa: PLC0415

    printed: set[str] = set()

    def show(measured: Measured) -> None:
        if not printed:
            click.echo(results.HEADER)
        printed.add("")
        click.echo(results.line(measured, recorded))
        for name, note in measured.notes.items():
            if f"{name}: {note}" not in printed:
                _note(f"  from here on, {name}: {note}")
            printed.add(f"{name}: {note}")

    return show


@contextlib.contextmanager
def _user_files() -> Iterator[None]:
    """Make a message of a file that cannot be read or written."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error
        raise Failure(message, BAD_FILE) from error


@cli.command()
@click.argument("ops", type=Name("op", _ops), metavar="[OP ...]", nargs=-1)
@click.option("--dtypes", type=Names("dtype,...", lambda: DTYPES), help="Default: float16,bfloat16,float32.")
@click.option("--cols", type=Integers(least=1), help="Default: 32 to 65536, and some odd ones.")
@click.option("--rows", type=Integers(least=1), help="Default: 49152, and fewer where columns are many.")
@click.option("--gamma-dtype", type=DTYPE, help="Of gamma and beta; default: that of the input.")
@click.option("--seconds", type=click.FloatRange(1), default=math.inf, help="Start no point after so long.")
@click.option("--dry-run", is_flag=True, help="Only say what would be measured.")
@click.option(
    "--clear", is_flag=True, help="Remove what was found before, for every device; measure nothing."
)
@_json_option
def tune(*, clear: bool, as_json: bool, **options: Any) -> None:
    """Find the fastest plans on this GPU.

    For each shape, candidates are compiled, timed in turns, and compared with float64. A plan that is faster than the
    built-in choice is kept in a file of your cache folder, and calls of that kind use it from then on, for any number of
    rows that keeps the device as busy. CUPYNORM_TUNED=0 leaves such files alone. What was found before an interruption
    is kept.

    Example: cupynorm tune layer_norm softmax --dtypes float16 --cols 768,50257
    """
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415

    if clear:
        with _user_files():
            removed = tuned_plans.clear()
        entries = sum(each["entries"] for each in removed)
        if as_json:
            _print_json({"schema": 1, "removed": removed})
        else:
            click.echo(f"removed {len(removed)} tables with {entries} plans from {tuned_plans.folder()}")
        return
    _tune(as_json=as_json, **options)


def _tune(
    *,
    ops: Any,
    dtypes: Any,
    cols: Any,
    rows: Any,
    gamma_dtype: str | None,
    seconds: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Tune, and print what was found, whatever ends it."""
    from cupynorm.tools import tune as tuning  # noqa: PLC0415

    place = tuning.here()
    with _user_input():
        points = tuning.points(ops, dtypes or (), cols or (), rows or ())
    about = {"schema": 1, "file": str(place.file), **dataclasses.asdict(place)}
    if dry_run:
        tried = [tuning.most_candidates(point, gamma_dtype) for point in points]
        if as_json:
            every = [
                {**dataclasses.asdict(point), "candidates": count}
                for point, count in zip(points, tried, strict=True)
            ]
            _print_json({**about, "points": every})
            return
        for point, count in zip(points, tried, strict=True):
            click.echo(f"{point}: {count} candidates")
        click.echo(f"{len(points)} points; what is found would be kept in {place.file}")
        return
    _note(f"{len(points)} points, {place.device}")
    found: list[Any] = []
    on_terminal = sys.stderr.isatty()  # where a bar stands in the way of lines, they come at the end
    ended = False
    try:
        with _user_files(), _progress("tune") as progress:
            for result in tuning.tune(points, weights=gamma_dtype, seconds=seconds):
                found.append(result)
                progress(len(found), len(points))
                if not as_json and not on_terminal:
                    click.echo(
                        f"{tuning.HEADER}\n{tuning.line(result)}" if len(found) == 1 else tuning.line(result)
                    )
        ended = True
    finally:
        left_out = len(points) - len(found)
        if as_json and (found or ended):
            _print_json({**about, "results": [each.as_dict() for each in found], "left_out": left_out})
        elif found or ended:
            if on_terminal:
                click.echo("\n".join([tuning.HEADER, *map(tuning.line, found)]))
            _print_tuned(place.file, sum(each.changed for each in found), len(found), left_out)


def _print_tuned(file: Path, changed: int, measured: int, left_out: int) -> None:
    from cupynorm.tools import tune as tuning  # noqa: PLC0415

    click.echo(tuning.LEGEND)
    if left_out:
        click.echo(f"left out: {left_out} points")
    click.echo(f"{changed} of {measured} plans are better than the built-in ones, and kept in {file}")


@cli.command()
@click.argument("shell", type=click.Choice(list(COMPLETION)))
def completion(shell: str) -> None:
    """Say how to switch on completion."""
    file, line = COMPLETION[shell]
    click.echo(f"# put this line into {file}, then start a new shell\n{line}")


def _check_json(output: Path, *, as_json: bool) -> None:
    from cupynorm.tools.files import STANDARD  # noqa: PLC0415

    if as_json and output == STANDARD:
        raise ValueError(
            "output: - and --json both want standard output: give the output a name, or leave --json out"
        )


def _print_json(value: dict[str, Any]) -> None:
    click.echo(documents.text(value, indent=2))


def _print_fields(title: str, fields: dict[str, Any]) -> None:
    click.echo(click.style(title, bold=True))
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        click.echo(f"  {name:<{width}}  {value}")


def _print_results(results: list[Result]) -> None:
    """One line for each op, variant and dtype, with its worst case."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for each in results:
        groups.setdefault((each.op, each.variant, each.dtype), []).append(each)
    numbers = f"{'cases':>5} {'error':>9} {'tolerance':>9}"
    click.echo(f"       {'op':<12} {'variant':<9} {'dtype':<18} {numbers}  worst shape")
    for (op, variant, dtype), group in groups.items():
        worst = max(group, key=lambda each: (not each.ok, each.error))
        status = "ok" if worst.ok else "fault"
        shape = " x ".join(map(str, worst.shape))
        numbers = f"{len(group):>5} {worst.error:>9.2e} {worst.tolerance:>9.2e}"
        label = click.style(f"{status:<5}", fg=COLORS[status])
        click.echo(f"{label}  {op:<12} {variant:<9} {dtype:<18} {numbers}  {shape}")


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function to call with what is done and what there is, which moves a bar; on a terminal only."""
    with _stages() as show:
        yield lambda done, total: show(label, done, total)


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function to call with a stage's name, what is done and what there is: a bar for each stage, one after the other."""
    with contextlib.ExitStack() as stack:
        bars: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                stack.close()  # the bar of the stage before ends its line
                bar = click.progressbar(length=total, label=stage, file=sys.stderr)
                bars[stage] = stack.enter_context(bar)
            bars[stage].update(done - bars[stage].pos)

        shown = sys.stderr.isatty() and not _is_quiet()
        yield show if shown else lambda stage, done, total: None  # noqa: ARG005


def main() -> None:
    """Run the command. A signal that ends it lets it remove its unfinished output first."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one of them
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        cli(prog_name="cupynorm")
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_FAULTS:
            raise
        with contextlib.suppress(OSError):
            click.echo(f"Error: standard output: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still holds is not to fail again
        sys.exit(BAD_FILE)
