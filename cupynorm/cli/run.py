"""`cupynorm run` and `cupynorm embed`: files in, files out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupynorm.cli.commands import Command
from cupynorm.cli.exits import CHECK_FAILED, Failure, user_input
from cupynorm.cli.options import DTYPE, FILE, axis_option, json_option, op_argument, plan_option
from cupynorm.cli.output import print_json, print_note, progress_bar


@click.command(cls=Command)
@op_argument
@click.argument("source", type=FILE, metavar="IN.NPY")
@click.option(
    "-o", "--output", type=FILE, required=True, help="The .npy file to write; - is standard output."
)
@axis_option
@click.option(
    "--dtype",
    type=DTYPE,
    help="The output's dtype; default: the input's; of integers float32, of int32 float64. bfloat16 is stored as V2.",
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
@plan_option
@json_option
def run(
    *, op: str, source: Path, output: Path, input_dtype: str | None, as_json: bool, **options: Any
) -> None:
    """Apply OP to the rows of a .npy file.

    Rows are read, computed and written block by block, so the file may be larger than memory, unless --axis names other
    axes than the last. It may hold bool, integers of 8 and 16 bits or int32, and be big-endian or in Fortran order. The
    output appears under its name only when it is complete. - is standard input or output.

    Example: cupynorm run layer_norm in.npy -o out.npy --gamma gamma.npy --dtype float32
    """
    from cupynorm.catalog import op_table  # noqa: PLC0415
    from cupynorm.tools import files  # noqa: PLC0415

    with user_input(), progress_bar(op) as show:
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
        print_json({"schema": 1, **report.as_dict()})
        return
    if report.note:
        print_note(f"no usable GPU, so this ran on the CPU: {report.note}")
    where = f"{report.device}, variant {report.plan['variant']}" if report.plan else report.device
    dtypes = f"{report.input_dtype} -> {report.dtype}"
    rate = f"{report.seconds:.3f} s, {report.bytes_per_second / 1e9:.3g} GB/s of files"
    print_note(f"{op}: {report.rows} x {report.cols}, {dtypes}, on {where}: {rate}")
    print_note(f"wrote {', '.join(report.outputs)}")


@click.command(cls=Command)
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
    "--normalize/--no-normalize",
    default=None,
    help="Scale embeddings to length 1. Default: as the model does, else yes.",
)
@click.option(
    "--truncate", is_flag=True, help="Truncate texts that are too long, which are errors otherwise."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="The most tokens of a text; default: the model's positions."
)
@click.option(
    "--empty",
    type=click.Choice(["error", "zeros"]),
    default="error",
    show_default=True,
    help="Whether a text without words is an error, or gives a row of zeros.",
)
@click.option(
    "--dtype", type=DTYPE, default="float32", show_default=True, help="The dtype of the model's weights."
)
@click.option("--force", is_flag=True, help="Replace an existing output, and another run's unfinished one.")
@click.option("--device", type=click.Choice(["auto", "gpu", "cpu"]), default="auto", show_default=True)
@json_option
def embed(*, source: Path, output: Path, model: Path, as_json: bool, **options: Any) -> None:
    """Turn texts into a .npy file of embeddings.

    A BERT sentence encoder gives one row per text, in their order, on a GPU if there is one. TEXTS is a UTF-8 file of
    lines, .jsonl, .ndjson or .csv, or - for lines of standard input. All texts are checked first. An interrupted run
    leaves its finished rows in OUTPUT.part, and the same command continues from there; the output appears under its
    name only when it is complete.

    Example: cupynorm embed texts.txt -o embeddings.npy --model all-MiniLM-L6-v2
    """
    from cupynorm import embedding  # noqa: PLC0415

    try:
        with user_input(), progress_bar("embed") as show:
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
        print_json({"schema": 1, **report.as_dict()})
        return
    done = f"{report.texts} texts" + (f", {report.resumed} of an earlier run" if report.resumed else "")
    cut = f", {report.truncated} truncated" if report.truncated else ""
    rate = f"{report.seconds:.3f} s, {report.texts_per_second:.3g} texts/s"
    print_note(f"{done}{cut}, {report.tokens} tokens -> {report.columns} columns on {report.device}: {rate}")
    print_note(f"wrote {report.output}")


def _check_json(output: Path, *, as_json: bool) -> None:
    from cupynorm.npy.paths import STANDARD  # noqa: PLC0415

    if as_json and output == STANDARD:
        raise ValueError(
            "output: - and --json both want standard output: give the output a name, or omit --json"
        )
