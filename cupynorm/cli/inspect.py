"""`cupynorm info`, `doctor`, `selftest` and `explain`: what is installed, whether it works, and what calls launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupynorm.cli.commands import Command
from cupynorm.cli.exits import CHECK_FAILED, user_input
from cupynorm.cli.options import DTYPE, Integers, Name, axis_option, forms, json_option, plan_option
from cupynorm.cli.output import COLORS, print_fields, print_json, print_note, progress_bars

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cupynorm.tools.explain import Explanation
    from cupynorm.tools.selftest import Result


def _recorded() -> Iterable[str]:
    from cupynorm.plan.limits import RECORDED  # noqa: PLC0415

    return RECORDED


@click.command(cls=Command)
@json_option
def info(*, as_json: bool) -> None:
    """Show what is installed and what this machine has.

    That is: versions, devices, recorded limits, kernel cache, tuned plans, extras and environment variables.

    Example: cupynorm info --json
    """
    from cupynorm.tools import environment  # noqa: PLC0415

    found = environment.info()
    if as_json:
        print_json(found)
        return
    print_fields("versions", {name: version or "-" for name, version in found["versions"].items()})
    for device in found["devices"]:
        print_fields(f"device {device.pop('number')}", device)
    if not found["devices"]:
        print_fields("devices", {"none": found["no_device"]})
    print_fields("recorded limits", {"for explain --device": ", ".join(found["recorded"])})
    for title, name in (("kernel cache", "cubins"), ("CuPy's cache", "cache")):
        cache = found[name]
        size = f"{cache['bytes']} bytes in {cache['files']} files"
        print_fields(title, {"folder": cache["folder"], "size": size})
    print_fields("tuned plans", _tuned_fields(found["tuned"]))
    early = found["early_launches"]["used"]
    print_fields(
        "early launches", {"used": "from compute capability 9.0 on" if early else "no: CUPYNORM_EARLY is 0"}
    )
    print_fields("kernels", found["kernels"])
    print_fields("extras", {name: "installed" if there else "-" for name, there in found["extras"].items()})
    print_fields("environment", found["environment"])


def _tuned_fields(tuned: dict[str, Any]) -> dict[str, Any]:
    from cupynorm.runtime import tuned_plans  # noqa: PLC0415

    why_not = tuned_plans.why_unusable() or "CUPYNORM_TUNED is 0"
    fields = {"folder": tuned["folder"], "used": "yes" if tuned["used"] else f"no: {why_not}"}
    for table in tuned["tables"]:
        fields[Path(table["file"]).name] = f"{table['entries']} plans"
    return fields


@click.command(cls=Command)
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool) -> None:
    """Find faults and say what to type next.

    The exit status is 1 if there is a fault. A machine without GPU and CuPy has none: NumPy arrays work.
    """
    from cupynorm.tools import environment  # noqa: PLC0415

    found = list(environment.findings())
    faults = sum(each.status == "fault" for each in found)
    if as_json:
        print_json({"schema": 1, "faults": faults, "findings": [dataclasses.asdict(each) for each in found]})
    else:
        for each in found:
            click.echo(
                f"{click.style(f'{each.status:<7}', fg=COLORS[each.status])}  {each.check}: {each.message}"
            )
            if each.fix:
                click.echo(f"         -> {each.fix}")
    ctx.exit(CHECK_FAILED if faults else 0)


@click.command(cls=Command)
@click.option(
    "--gpu/--cpu", "gpu", default=None, help="Demand a GPU, or use the CPU. Default: a GPU if there is one."
)
@click.option(
    "--quick", is_flag=True, help="Test a few shapes and dtypes, in the variants that calls choose."
)
@json_option
@click.pass_context
def selftest(ctx: click.Context, *, gpu: bool | None, quick: bool, as_json: bool) -> None:
    """Compare every op with float64.

    All kernels are compiled first, several at once; then ops run over dtypes, variants and shapes. The exit status is 1
    if an error is larger than the dtype's tolerance.
    """
    from cupynorm.tools import selftest as testing  # noqa: PLC0415
    from cupynorm.tools.files import choose_device  # noqa: PLC0415

    device, reason = choose_device("auto" if gpu is None else "gpu" if gpu else "cpu")
    if reason:
        print_note(f"no usable GPU, so this tests the CPU: {reason}")
    with progress_bars() as progress:
        results = list(testing.run(cpu=device == "cpu", quick=quick, progress=progress))
    faults = [each for each in results if not each.ok]
    if as_json:
        every = [dataclasses.asdict(each) for each in results]
        counts = {"cases": len(results), "faults": len(faults)}
        print_json({"schema": 1, "device": device, "quick": quick, **counts, "results": every})
    else:
        _print_results(results)
        for each in faults:
            case = f"{each.op} {each.variant} {each.dtype} {each.shape}"
            click.echo(f"{click.style('fault', fg='red')}  {case}: {each.note}")
        click.echo(f"{device}: {len(results)} cases, {len(faults)} faults")
    ctx.exit(CHECK_FAILED if faults or not results else 0)


@click.command(cls=Command)
@click.argument("op", type=Name("op", forms), metavar="OP[/FORM]")
@click.option("--shape", type=Integers(least=0), required=True, help="The input's shape, such as 49152,1024.")
@click.option("--dtype", type=DTYPE, required=True, help="The input's dtype.")
@click.option("--out-dtype", type=DTYPE, help="The output's dtype; default: the input's.")
@click.option("--gamma-dtype", type=DTYPE, help="The dtype of gamma and beta; default: the input's.")
@axis_option
@plan_option
@click.option(
    "--device", type=Name("device", _recorded), help="Use recorded limits instead of the current device's."
)
@click.option(
    "--without",
    multiple=True,
    help="Leave out an array that OP may go without, such as bias in add_layer_norm/sum.",
)
@json_option
def explain(*, op: str, as_json: bool, without: tuple[str, ...], **options: Any) -> None:
    """Show what a call would launch.

    That is: the plan, the kernel, its registers, its occupancy, and the bytes that it moves. Nothing is launched. OP is
    a plain op, or one of the forms that `cupynorm bench` times: softmax/causal, add_layer_norm/sum, layer_norm/int8.
    Numbers of the problem that most calls have are left out; --json tells all.

    Example: cupynorm explain layer_norm --shape 49152,1024 --dtype float16 --device h200
    """
    from cupynorm.catalog.forms import form  # noqa: PLC0415
    from cupynorm.tools import explain as explaining  # noqa: PLC0415

    what, shape, dtype = form(op), options.pop("shape"), options.pop("dtype")
    with user_input():
        if what.alone:
            what.without(without)  # raises ValueError
            explanation = explaining.explain(what.row, shape, dtype, **options)
        else:
            what = what.without(without)
            explanation = explaining.explain_form(what, shape, dtype, **_form_options(what.name, **options))
    fields = explanation.as_dict()
    if as_json:
        print_json({"schema": 1, **fields})
        return
    fields["occupancy"] = f"{fields['occupancy']:.0%}"
    for name in ("rule", "why"):  # the launch tells them
        fields["plan"].pop(name, None)
    further = fields.pop("further")
    del fields["rule"], fields["without"]
    fields |= _earned(explanation)
    for number, each in enumerate(further, 2):
        numbers = ", ".join(f"{name} {value}" for name, value in each["plan"].items())
        fields[f"kernel {number}"] = f"{each['kernel']} ({numbers}; {each['registers'] or '-'} registers)"
    usual = explaining.usual_numbers(explanation)
    problem = fields.pop("problem")
    print_fields("problem", {name: value for name, value in problem.items() if usual.get(name, ...) != value})
    plan = fields.pop("plan")
    print_fields(
        "plan", {name: f"{each:.4g}" if isinstance(each, float) else each for name, each in plan.items()}
    )
    print_fields(
        "launch", {name: "-" if value is None else value for name, value in fields.items() if value != ""}
    )


def _earned(explanation: Explanation) -> dict[str, str]:
    """Return in words what the rule that decided reaches, and what the planner would do without it."""
    rule, without = explanation.rule, explanation.without
    if rule is None:
        return {}
    share = (
        "its share was not measured alone" if rule.share is None else f"share {rule.share:.3f} at {rule.at}"
    )
    source = ", ".join(rule.source[name] for name in ("device", "date", "file"))
    found = {"rule": f"{rule.id}: {share} ({source})"}
    if without is not None:
        reached = "" if without.share is None else f"share {without.share:.3f} there; "
        plan = without.plan
        threads = f"{plan.vectors} vectors of {plan.vector} in each of a block's {plan.block} threads"
        found["without it"] = f"{plan.variant}, {threads} ({reached}{without.why})"
    return found


def _form_options(name: str, *, plan: Any, device: Any, **others: Any) -> dict[str, Any]:
    """Return the options that explain a form. The others are for plain ops, and must have their defaults."""
    for option, value in others.items():
        if value not in (None, -1):
            raise ValueError(f"--{option.replace('_', '-')} is for plain ops: {name} does not take it")
    return {"plan": plan, "device": device}


def _print_results(results: list[Result]) -> None:
    """Print a line for each op, variant and dtype, with its worst case."""
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
