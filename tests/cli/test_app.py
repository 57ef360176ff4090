"""The command as a whole: its help, its entry point, and what it imports."""

from __future__ import annotations

import pytest

import cupynorm
from cupynorm import cli
from cupynorm.catalog import forms, op_table
from cupynorm.cli import app
from cupynorm.plan import config
from cupynorm.runtime import devices
from tests.cli import invoke, start


def test_help_names_every_command_and_what_the_exit_status_means():
    result = invoke("--help")

    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in ("info", "doctor", "selftest", "explain", "run"))
    assert "Exit status: 0 well" in result.stdout
    assert "..." not in result.stdout.partition("\n")[2]  # no summary is cut off


@pytest.mark.parametrize("name", list(cli.cli.commands))
def test_every_command_has_help(name):
    result = invoke(name, "--help")

    assert result.exit_code == 0
    assert all(
        option.help
        for option in cli.cli.commands[name].params
        if option.param_type_name == "option" and option.name != "device"
    )


def test_version():
    assert invoke("--version").stdout == f"cupynorm {cupynorm.__version__}\n"


@pytest.mark.parametrize("what", ["import cupynorm", "from cupynorm import cli; cli.main()"])
def test_neither_the_import_nor_help_imports_cupy(what):
    check = (
        "import atexit, sys; sys.argv = ['cupynorm', '--help']\n"
        "atexit.register(lambda: print([name for name in sys.modules if name.partition('.')[0] == 'cupy']))\n"
    )

    done = start(program=("-c", check + what))

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", [name for name in cli.cli.commands if name != "completion"])
def test_every_command_that_tells_something_has_quiet_and_json(name):
    text = invoke(name, "--help").stdout

    assert "-q, --quiet" in text
    assert "  --json " in text


@pytest.mark.parametrize(
    ("name", "label", "names"),
    [
        ("run", "op", [op.name for op in op_table.OPS]),
        ("explain", "op", list(forms.FORMS)),
        ("explain", "device", list(devices.RECORDED)),
        ("explain", "variant", config.VARIANTS),
        ("tune", "op", list(forms.TUNED)),
        ("bench", "op", list(forms.FORMS)),
        ("bench", "peer", ["cupy", "torch", "compile", "triton"]),
    ],
)
def test_help_names_ops_devices_variants_and_peers(name, label, names):
    section = invoke(name, "--help").stdout.partition("\nNames:\n")[2]

    words = " ".join(section.split())
    assert ", ".join(names) in words
    assert f"  {label} " in section


def test_main_leaves_signals_alone_that_somebody_handles(monkeypatch):
    import signal

    handled = []
    monkeypatch.setattr(app, "cli", lambda **_: handled.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        app.main()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    assert handled == [signal.SIG_IGN]
