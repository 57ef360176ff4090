"""cupynorm.tools.files: results are those of the op; a bad file gives an error message and leaves nothing behind."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from cupynorm.catalog import op_table
from cupynorm.npy import target as target_files
from cupynorm.npy.paths import FileError
from cupynorm.runtime import devices
from cupynorm.tools import environment, files
from tests.simulator import simulated  # noqa: F401  a fixture

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OPS = [op.name for op in op_table.OPS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, and blocks so small that every file takes several."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 10)
    return tmp_path


def python(command, folder):
    return subprocess.run(
        [sys.executable, "-c", command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )


def numbers(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(1, 2, shape).astype(dtype)


def run(op, folder, x, target="out.npy", **options):
    """Save x, run it on the CPU, and return what np.load finds."""
    np.save(folder / "in.npy", x)
    files.run(op_table.op(op), folder / "in.npy", folder / target, **{"device": "cpu", **options})
    return np.load(folder / target)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_a_file_gets_the_bits_of_the_function(folder, op, dtype):
    x = numbers(100, 33, dtype=dtype)

    y = run(op, folder, x)

    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, op_table.op(op).function(x))
    assert names(folder) == ["in.npy", "out.npy"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_output_has_the_dtype_asked_for(folder, dtype):
    x = numbers(50, 20)

    y = run("softmax", folder, x, dtype=dtype)

    assert y.dtype == dtype
    np.testing.assert_array_equal(y, op_table.op("softmax").function(x, dtype=dtype))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((600,), -1),
        ((600,), 0),
        ((7, 5, 11), -1),
        ((7, 5, 11), (-2, -1)),
        ((7, 5, 11), (0, 1, 2)),
        ((3, 1), 1),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_axes_and_orders(folder, shape, axis, order):
    x = numbers(*shape)

    y = run("layer_norm", folder, np.asarray(x, order=order), axis=axis)

    np.testing.assert_array_equal(y, op_table.op("layer_norm").function(x, axis=axis))


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_a_big_endian_file_is_swapped(folder, dtype):
    x = numbers(100, 33, dtype=dtype)

    y = run("softmax", folder, x)

    assert y.dtype.isnative
    np.testing.assert_array_equal(y, op_table.op("softmax").function(x.astype(dtype[1:])))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", ">i2", "uint16", "int32", ">i4"])
@pytest.mark.parametrize("op", ["layer_norm", "softmax"])
def test_integers_are_converted_as_the_function_does(folder, op, dtype):
    x = numbers(100, 33, dtype="float64")
    x = (x * 50 % 100).astype(dtype)

    y = run(op, folder, x)

    native = x.astype(x.dtype.newbyteorder("="))
    assert y.dtype == ("float64" if native.dtype == np.int32 else "float32")
    np.testing.assert_array_equal(y, op_table.op(op).function(native))
    assert run(op, folder, x, dtype="float16", force=True).dtype == "float16"


def test_gamma_of_integers_is_refused(folder):
    np.save(folder / "gamma.npy", np.ones(33, np.int32))

    with pytest.raises(FileError, match=r"gamma\.npy: dtype int32 is not supported: use bfloat16, float16"):
        run("layer_norm", folder, numbers(4, 33), gamma=folder / "gamma.npy")


def test_bfloat16_is_read_from_raw_elements_and_written_as_numpy_does(folder):
    x = numbers(100, 33).astype(BFLOAT16)

    y = run("rms_norm", folder, x, bfloat16=True)

    expected = op_table.op("rms_norm").function(x)
    assert y.dtype.str == "|V2"
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))
    np.save(folder / "numpy.npy", expected)
    assert (folder / "out.npy").read_bytes() == (folder / "numpy.npy").read_bytes()


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_bfloat16_may_be_kept_as_uint16(folder, dtype):
    x = numbers(100, 33).astype(BFLOAT16)

    y = run("softmax", folder, x.view(np.uint16).astype(dtype), bfloat16=True, dtype="float32")

    np.testing.assert_array_equal(y, op_table.op("softmax").function(x, dtype="float32"))


def test_gamma_beta_eps_and_statistics(folder):
    x, gamma, beta = numbers(100, 33), numbers(33, dtype=">f8", seed=1), numbers(33, seed=2).astype(BFLOAT16)
    np.save(folder / "gamma.npy", gamma)
    np.save(folder / "beta.npy", beta.view(np.uint16))

    y = run(
        "layer_norm",
        folder,
        x,
        gamma=folder / "gamma.npy",
        beta=folder / "beta.npy",
        bfloat16=True,
        eps=0.5,
        stats=True,
    )

    expected = op_table.op("layer_norm").function(x, gamma.astype("f8"), beta, eps=0.5, return_stats=True)
    saved = (y, np.load(folder / "out.mean.npy"), np.load(folder / "out.rstd.npy"))
    for got, want in zip(saved, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_statistics_of_one_row_are_single_numbers(folder):
    run("rms_norm", folder, numbers(700), stats=True)

    assert np.load(folder / "out.rstd.npy").shape == ()


@pytest.mark.parametrize("order", ["C", "F"])
def test_no_rows_give_a_file_without_rows(folder, order):
    assert run("layer_norm", folder, np.empty((0, 3, 8), "f4", order), stats=True).shape == (0, 3, 8)
    assert np.load(folder / "out.mean.npy").shape == (0, 3)


def test_the_report_says_what_was_done(folder):
    np.save(folder / "in.npy", numbers(100, 33))
    seen = []

    report = files.run(
        op_table.op("softmax"),
        folder / "in.npy",
        folder / "out.npy",
        device="cpu",
        dtype="float16",
        progress=lambda done, rows: seen.append((done, rows)),
    )

    assert (report.op, report.device, report.plan, report.note) == ("softmax", "cpu", None, "")
    assert (report.rows, report.cols, report.input_dtype, report.dtype) == (100, 33, "float32", "float16")
    assert report.outputs == (str(folder / "out.npy"),)
    assert report.bytes_moved == 100 * 33 * (4 + 2)
    assert report.as_dict()["bytes_per_second"] == pytest.approx(report.bytes_moved / report.seconds)
    assert len(seen) > 1
    assert seen[-1] == (100, 100)


def npy(header, data=b"", version=b"\x01\x00"):
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + data


def header(shape="(4, 4)", descr="'<f4'", fortran="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


BAD_FILES = {
    "empty": (b"", "not a .npy file"),
    "text": (b"1.0, 2.0\n", "not a .npy file"),
    "magic alone": (b"\x93NUMPY", "not a .npy file"),
    "unknown version": (npy(header(), bytes(64), b"\x09\x00"), "not a .npy file"),
    "half a header": (npy(header())[:30], "not a .npy file"),
    "no dictionary": (npy("1, 2"), "not a .npy file"),
    "code in the header": (npy("__import__('os').getpid()"), "not a .npy file"),
    "endless brackets": (npy("(" * 5000), "not a .npy file"),
    "an archive": (b"PK\x03\x04" + bytes(60), "zip archive"),
    "a pickle": (npy(header(descr="'|O'"), b"cos\nsystem\n"), "pickled"),
    "objects in fields": (npy(header(descr="[('a', '|O')]"), bytes(64)), "pickled"),
    "truncated": (npy(header(), bytes(63)), "truncated"),
    "far too large": (npy(header(f"({2**62}, {2**62})"), bytes(64)), "truncated"),
    "negative": (npy(header("(-4, 4)"), bytes(64)), "damaged"),
    "one number": (npy(header("()"), bytes(4)), "0-d"),
    "wide integers": (npy(header(descr="'<i8'"), bytes(128)), "int64 is not supported"),
    "complex": (npy(header(descr="'<c8'"), bytes(128)), "complex64 is not supported"),
    "structured": (npy(header(descr="[('a', '<f4')]"), bytes(64)), "is not supported"),
    "longdouble": (npy(header(descr="'<f16'"), bytes(256)), "is not supported"),
    "raw": (npy(header(descr="'<V2'"), bytes(32)), "--input-dtype bfloat16"),
    "unsigned": (npy(header(descr="'<u4'"), bytes(64)), "uint32 is not supported"),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("role", ["x", "gamma"])
def test_a_bad_file_is_named_and_nothing_is_left(folder, case, role):
    content, words = BAD_FILES[case]
    np.save(folder / "good.npy", numbers(4, 4))
    bad = folder / "bad.npy"
    bad.write_bytes(content)
    source, gamma = (bad, None) if role == "x" else (folder / "good.npy", bad)

    with pytest.raises(FileError) as raised:
        files.run(op_table.op("layer_norm"), source, folder / "out.npy", gamma=gamma, device="cpu")

    assert str(raised.value).startswith(f"{bad}: ")
    assert words in str(raised.value)
    assert names(folder) == ["bad.npy", "good.npy"]


def test_a_missing_file_a_folder_and_a_pipe_are_named(folder):
    os.mkfifo(folder / "pipe")
    for name, words in {
        "missing.npy": "No such file",
        ".": "not a regular file",
        "pipe": "not a regular file",
    }.items():
        with pytest.raises(FileError, match=words) as raised:
            files.run(op_table.op("softmax"), folder / name, folder / "out.npy")
        assert str(folder / name) in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(folder):
    np.save(folder / "in.npy", numbers(2, 2))
    (folder / "in.npy").chmod(0)

    with pytest.raises(FileError, match=r"in.npy: Permission denied"):
        files.run(op_table.op("softmax"), folder / "in.npy", folder / "out.npy")


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder, order):
    np.save(folder / "in.npy", np.asarray(numbers(100, 33), order=order))

    def shrink(done, rows):
        os.truncate(folder / "in.npy", 5000)

    with pytest.raises(FileError, match=r"in.npy: became shorter"):
        files.run(
            op_table.op("softmax"), folder / "in.npy", folder / "out.npy", device="cpu", progress=shrink
        )

    assert names(folder) == ["in.npy"]


def test_an_existing_output_needs_force(folder):
    (folder / "out.npy").write_bytes(b"precious")

    with pytest.raises(FileError, match=r"out.npy: exists already: --force"):
        run("softmax", folder, numbers(4, 4))
    assert (folder / "out.npy").read_bytes() == b"precious"

    assert run("softmax", folder, numbers(4, 4), force=True).shape == (4, 4)


def test_existing_statistics_need_force_too(folder):
    (folder / "out.rstd.npy").write_bytes(b"precious")

    with pytest.raises(FileError, match=r"out.rstd.npy: exists already"):
        run("rms_norm", folder, numbers(4, 4), stats=True)

    assert names(folder) == ["in.npy", "out.rstd.npy"]


@pytest.mark.parametrize("link", [True, False])
def test_an_output_made_meanwhile_is_left_alone(folder, monkeypatch, link):
    if not link:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))

    with pytest.raises(FileError, match=r"out.npy: .*(was created by another process|File exists)"):
        run(
            "softmax",
            folder,
            numbers(4, 4),
            progress=lambda *_: (folder / "out.npy").write_bytes(b"precious"),
        )

    assert (folder / "out.npy").read_bytes() == b"precious"
    assert names(folder) == ["in.npy", "out.npy"]


def test_a_file_system_without_links_will_do(folder, monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))

    assert run("softmax", folder, numbers(4, 4)).shape == (4, 4)
    assert names(folder) == ["in.npy", "out.npy"]


@pytest.mark.parametrize("force", [True, False])
def test_the_output_may_not_be_an_input(folder, force):
    np.save(folder / "in.npy", numbers(4, 4))
    (folder / "link.npy").symlink_to("in.npy")
    os.link(folder / "in.npy", folder / "twin.npy")

    for target in ("in.npy", "link.npy", "twin.npy", "../" + folder.name + "/in.npy"):
        with pytest.raises(FileError, match="is the input as well"):
            files.run(op_table.op("softmax"), folder / "in.npy", folder / target, force=force, device="cpu")
    np.testing.assert_array_equal(np.load(folder / "in.npy"), numbers(4, 4))


def test_force_replaces_a_link_and_never_what_it_leads_to(folder):
    (folder / "other").write_bytes(b"precious")
    (folder / "out.npy").symlink_to("other")

    with pytest.raises(FileError, match="exists already"):
        run("softmax", folder, numbers(4, 4))
    run("softmax", folder, numbers(4, 4), force=True)

    assert not (folder / "out.npy").is_symlink()
    assert (folder / "other").read_bytes() == b"precious"


def test_force_does_not_replace_what_is_no_file(folder):
    (folder / "out.npy").mkdir()

    with pytest.raises(FileError, match="not a regular file"):
        run("softmax", folder, numbers(4, 4), force=True)
    with pytest.raises(FileError, match="not a regular file"):
        files.run(op_table.op("softmax"), folder / "in.npy", Path(os.devnull), force=True, device="cpu")


def test_a_folder_that_is_not_there_is_named(folder):
    with pytest.raises(FileError, match=r"nowhere/out.npy: No such file"):
        run("softmax", folder, numbers(4, 4), target="nowhere/out.npy")


def test_the_output_has_the_rights_of_any_new_file(folder):
    before = os.umask(0o027)
    try:
        run("softmax", folder, numbers(4, 4))
    finally:
        os.umask(before)

    assert (folder / "out.npy").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("op", "options", "words"),
    [
        ("softmax", {"gamma": "in.npy"}, "softmax takes no gamma"),
        ("rms_norm", {"beta": "in.npy"}, "rms_norm takes no beta"),
        ("softmax", {"eps": 1e-5}, "softmax takes no eps"),
        ("log_softmax", {"stats": True}, "log_softmax has no statistics"),
        ("layer_norm", {"eps": -1.0}, "eps"),
        ("layer_norm", {"eps": float("nan")}, "eps"),
        ("layer_norm", {"axis": 5}, "axis 5"),
        ("layer_norm", {"axis": (-1, 1)}, "twice"),
        ("layer_norm", {"gamma": "gamma.npy"}, "gamma has shape"),
        ("layer_norm", {"plan": "warp"}, "plan"),
        ("layer_norm", {"bfloat16": True}, "no raw two-byte elements"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(folder, op, options, words):
    np.save(folder / "gamma.npy", numbers(5))
    paths = {
        name: folder / value if isinstance(value, str) and name != "plan" else value
        for name, value in options.items()
    }

    with pytest.raises((ValueError, TypeError), match=words):
        run(op, folder, numbers(4, 4), **paths)

    assert names(folder) == ["gamma.npy", "in.npy"]


def test_rows_without_elements_are_refused(folder):
    with pytest.raises(FileError, match=r"in.npy: has shape \(4, 0\): its rows are empty"):
        run("softmax", folder, np.empty((4, 0), "f4"))


def test_a_file_of_long_rows_without_any_takes_no_time(folder):
    header = {"descr": "<f4", "fortran_order": False, "shape": (0, 2**40)}
    with (folder / "in.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    begin = time.perf_counter()

    files.run(op_table.op("layer_norm"), folder / "in.npy", folder / "out.npy", device="cpu", stats=True)

    assert time.perf_counter() - begin < 2
    assert np.load(folder / "out.npy").shape == (0, 2**40)
    assert np.load(folder / "out.mean.npy").shape == (0,)


def written_header(folder, shape):
    """Write a file whose header says anything."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).ljust(1000) + "\n"
    (folder / "in.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(64)
    )
    return folder / "in.npy"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1,) * 70, "has 70 axes, the most possible is 64"),
        ((True, 4), "damaged"),
        ((4, False), "damaged"),
        ((-1, 4), "damaged"),
        ((2.0, 4), "damaged"),
        ((0, 2**70), "damaged"),
        ((2**40, 2**40), "truncated"),
        ((10**400, 0), "damaged"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_a_shape_that_no_array_can_have_is_refused(folder, shape, words):
    source = written_header(folder, shape)

    with pytest.raises(FileError, match=words):
        files.run(op_table.op("softmax"), source, folder / "out.npy", device="cpu")


def piped(folder, *arguments, data, module="cupynorm"):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])},
        input=data,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_pipe_in_and_a_pipe_out_give_the_bits_of_files(folder, order):
    x = np.asarray(numbers(300, 70), order=order)
    data = io.BytesIO()
    np.save(data, x)

    done = piped(folder, "run", "layer_norm", "-", "-o", "-", "--device", "cpu", data=data.getvalue())

    assert done.returncode == 0, done.stderr
    y = np.load(io.BytesIO(done.stdout))
    assert b"wrote" in done.stderr
    assert names(folder) == []
    np.testing.assert_array_equal(y, run("layer_norm", folder, x))
    np.testing.assert_allclose(
        y, op_table.op("layer_norm").function(x), rtol=1e-6, atol=1e-6
    )  # sums in x's own order


def test_a_pipe_that_ends_too_soon_is_an_error_and_leaves_nothing(folder):
    data = io.BytesIO()
    np.save(data, numbers(300, 70))

    done = piped(folder, "run", "softmax", "-", "-o", "out.npy", "--device", "cpu", data=data.getvalue()[:-9])

    assert done.returncode == 4
    assert b"-: ends too soon" in done.stderr
    assert names(folder) == []


def test_standard_output_takes_no_statistics_and_no_json_beside_it(folder):
    np.save(folder / "in.npy", numbers(3, 4))
    for option, words in (
        ("--stats", b"no name to derive the statistics' files"),
        ("--json", b"standard output"),
    ):
        done = piped(folder, "run", "layer_norm", "in.npy", "-o", "-", "--device", "cpu", option, data=b"")
        assert (done.returncode, done.stdout) == (2, b"")
        assert words in done.stderr


def test_what_a_killed_run_has_left_is_removed_by_the_next_and_nothing_else(folder):
    old = folder / ".cupynorm-0123456789abcdef.tmp"
    alive, young, foreign = (folder / f".cupynorm-{word}.tmp" for word in ("f" * 16, "a" * 16, "notes"))
    for path in (old, alive, young, foreign):
        path.write_bytes(b"x")
        if path is not young:
            os.utime(path, (1, 1))
    fcntl = pytest.importorskip("fcntl")
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run("softmax", folder, numbers(3, 4))

    assert names(folder) == sorted([alive.name, young.name, foreign.name, "in.npy", "out.npy"])


def test_a_running_runs_file_is_not_taken_for_abandoned(folder, monkeypatch):
    monkeypatch.setattr(target_files, "YOUNG_SECONDS", -1.0)
    seen = []

    def progress(done, rows):
        target_files._remove_abandoned(folder)
        seen.append([name for name in names(folder) if name.endswith(".tmp")])

    run("softmax", folder, numbers(100, 32), progress=progress)

    assert all(len(each) == 1 for each in seen)


def test_a_finished_file_is_not_taken_for_abandoned_before_it_has_its_name(folder, monkeypatch):
    monkeypatch.setattr(target_files, "YOUNG_SECONDS", -1.0)
    target = target_files.Target(folder / "out.npy", (4,), np.dtype("f4"), force=False)
    target.write(numbers(4))
    target.sync()

    target_files._remove_abandoned(folder)
    target.publish()
    target.discard()

    np.testing.assert_array_equal(np.load(folder / "out.npy"), numbers(4))
    assert names(folder) == ["out.npy"]


def test_the_file_of_a_run_that_was_really_killed_is_removed(folder):
    np.save(folder / "in.npy", numbers(100, 33))
    command = (
        "import os, signal, sys; from cupynorm import cli; from cupynorm.tools import files\n"
        "files.Target.sync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.argv = ['cupynorm', 'run', 'softmax', 'in.npy', '-o', 'out.npy', '--device', 'cpu']\n"
        "cli.main()"
    )
    assert python(command, folder).returncode == -signal.SIGKILL
    (left,) = folder.glob(".cupynorm-*.tmp")
    os.utime(left, (1, 1))

    run("softmax", folder, numbers(3, 4))

    assert names(folder) == ["in.npy", "out.npy"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_no_more_of_a_pipe_is_awaited_than_the_array(folder, order):
    data = io.BytesIO()
    np.save(data, np.asarray(numbers(30, 70), order=order))

    with subprocess.Popen(
        [sys.executable, "-m", "cupynorm", "run", "softmax", "-", "-o", "out.npy", "--device", "cpu"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as done:
        done.stdin.write(data.getvalue())
        done.stdin.flush()  # and it stays open
        try:
            assert done.wait(30) == 0
        finally:
            done.kill()

    assert names(folder) == ["out.npy"]


def test_a_header_from_a_pipe_that_no_array_can_have_is_refused_before_its_data(folder):
    said = npy(header(f"({2**40}, {2**40})", fortran="True"), bytes(64))

    done = piped(folder, "run", "softmax", "-", "-o", "out.npy", "--device", "cpu", data=said)

    assert done.returncode == 4
    assert b"-: is damaged: its header says shape" in done.stderr


def test_a_temporary_file_that_is_gone_leaves_no_empty_output(folder):
    with pytest.raises(FileError, match=r"out.npy: No such file"):
        run(
            "softmax",
            folder,
            numbers(4, 4),
            progress=lambda *_: [path.unlink() for path in folder.glob(".cupynorm-*.tmp")],
        )

    assert names(folder) == ["in.npy"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400])
def test_what_replaces_a_private_file_is_private_while_it_is_written(folder, mode):
    (folder / "out.npy").write_bytes(b"")
    (folder / "out.npy").chmod(mode)
    seen, before = [], os.umask(0)

    def look(done, rows):
        seen.extend(stat.S_IMODE(path.stat().st_mode) for path in folder.glob(".cupynorm-*.tmp"))

    try:
        run("softmax", folder, numbers(100, 32), force=True, progress=look)
    finally:
        os.umask(before)

    assert set(seen) == {mode | 0o600}  # its owner may always write it
    assert stat.S_IMODE((folder / "out.npy").stat().st_mode) == mode


def test_a_link_to_what_is_no_file_is_not_replaced(folder):
    (folder / "out.npy").symlink_to(os.devnull)

    with pytest.raises(FileError, match="out.npy: is not a regular file"):
        run("softmax", folder, numbers(4, 4), force=True)

    assert (folder / "out.npy").is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_force_keeps_the_outputs_mode(folder, mode):
    (folder / "out.npy").write_bytes(b"")
    (folder / "out.npy").chmod(mode)

    run("softmax", folder, numbers(3, 4), force=True)

    assert stat.S_IMODE((folder / "out.npy").stat().st_mode) == mode


def refuse(number):
    def call(*args, **keywords):
        raise OSError(number, os.strerror(number))

    return call


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10))

    with pytest.raises(FileError, match=r"out.npy: needs 64 bytes, its disk has 10 left"):
        run("softmax", folder, numbers(4, 4))

    assert names(folder) == ["in.npy"]


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_disk_that_fills_up_leaves_nothing(folder, monkeypatch, call):
    monkeypatch.setattr(os, call, refuse(errno.ENOSPC))

    with pytest.raises(FileError, match=r"out.npy: No space left on device"):
        run("softmax", folder, numbers(4, 4))

    assert names(folder) == ["in.npy"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_take_space_up_front_will_do(folder, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", refuse(number))

    assert run("softmax", folder, numbers(4, 4)).shape == (4, 4)


def test_a_system_that_cannot_take_space_up_front_will_do(folder, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")

    assert run("softmax", folder, numbers(4, 4)).shape == (4, 4)


def test_writes_that_fail_half_way_leave_nothing(folder):
    np.save(folder / "in.npy", numbers(2000, 33))
    command = (
        "import os, resource, sys; del os.posix_fallocate\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))\n"
        "sys.argv = ['cupynorm', 'run', 'softmax', 'in.npy', '-o', 'out.npy', '--device', 'cpu']\n"
        "from cupynorm.cli import main; main()"
    )

    done = python(command, folder)

    assert done.returncode == 4
    assert "out.npy: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(folder) == ["in.npy"]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KiB."""
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("checks", [(), ("disk_usage",), ("disk_usage", "posix_fallocate")])
def test_a_really_full_disk_is_named_and_left_empty(folder, small_disk, monkeypatch, checks):
    if "disk_usage" in checks:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 40))
    if "posix_fallocate" in checks:
        monkeypatch.delattr(os, "posix_fallocate")
    np.save(folder / "in.npy", numbers(1000, 33))

    with pytest.raises(FileError, match=r"disk/out.npy: (needs|No space left)"):
        files.run(op_table.op("softmax"), folder / "in.npy", small_disk / "out.npy", device="cpu")

    assert names(small_disk) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_whatever_goes_wrong_half_way_leaves_nothing(folder, error):
    def stop(done, rows):
        raise error

    with pytest.raises(error):
        run("layer_norm", folder, numbers(100, 33), stats=True, progress=stop)

    assert names(folder) == ["in.npy"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_half_way_leaves_nothing(folder, number, status):
    np.save(folder / "in.npy", numbers(100, 33))
    command = (
        "import os, signal, sys; from cupynorm import cli; from cupynorm.tools import files; files.BLOCK_BYTES = 1000\n"
        # a job in a shell's background ignores the first, one under nohup the second, and so would what they start
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"files.Target.write = lambda *_: os.kill(os.getpid(), {int(number)})\n"
        "sys.argv = ['cupynorm', 'run', 'softmax', 'in.npy', '-o', 'out.npy', '--device', 'cpu']\n"
        "cli.main()"
    )

    done = python(command, folder)

    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert names(folder) == ["in.npy"]


@pytest.fixture
def device(monkeypatch):
    """A device of which only its copies are seen: they are counted, and host arrays stand for its own."""
    moved = []

    def asarray(array):
        moved.append(array.shape)
        return array

    monkeypatch.setattr(devices, "cupy", lambda: types.SimpleNamespace(asarray=asarray, asnumpy=np.asarray))
    monkeypatch.setattr(devices, "present_limits", lambda: devices.RECORDED["h200"])
    return moved


@pytest.mark.parametrize("asked", ["auto", "gpu"])
def test_a_device_gets_blocks_and_weights_once(folder, device, asked):
    np.save(folder / "gamma.npy", numbers(32, seed=1))
    x = numbers(100, 32)

    y = run("rms_norm", folder, x, gamma=folder / "gamma.npy", device=asked)

    np.testing.assert_array_equal(y, op_table.op("rms_norm").function(x, numbers(32, seed=1)))
    assert device.count((32,)) == 1
    assert max(shape[0] for shape in device if len(shape) == 2) == 1024 // (32 * 4)


def test_the_whole_road_of_a_device(folder, simulated):
    x = numbers(100, 32)
    np.save(folder / "in.npy", x)

    report = files.run(
        op_table.op("layer_norm"), folder / "in.npy", folder / "out.npy", stats=True, plan="shared"
    )

    assert report.plan["variant"] == "shared"
    for name, want in zip(
        ("out", "out.mean", "out.rstd"), op_table.op("layer_norm").function(x, return_stats=True), strict=True
    ):
        np.testing.assert_allclose(np.load(folder / f"{name}.npy"), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [None, "uncached"])
def test_the_report_has_the_plan_of_this_run_whatever_ran_before(folder, simulated, plan):
    np.save(folder / "in.npy", numbers(100, 32))

    def report():
        return files.run(
            op_table.op("softmax"), folder / "in.npy", folder / "out.npy", plan=plan, force=True
        ).plan

    alone = report()
    for other in ("shared", "warp"):  # newer in every cache than what the next run finds there
        op_table.op("softmax").function(simulated.cupy.asarray(numbers(7, 300)), plan=other)

    assert report() == alone
    assert alone["variant"] == (plan or "warp")
    assert alone["grid"] <= 32  # of this file's blocks


def test_no_device_is_an_error_only_where_one_is_demanded(folder, monkeypatch):
    def none():
        raise devices.NoDeviceError("there is none")

    monkeypatch.setattr(devices, "present_limits", none)

    monkeypatch.setattr(environment, "is_gpu_wanted", lambda: True)
    assert files.choose_device("auto") == ("cpu", "there is none")
    monkeypatch.setattr(environment, "is_gpu_wanted", lambda: False)  # nobody misses a GPU: nothing is said
    assert files.choose_device("auto") == ("cpu", "")
    assert files.choose_device("cpu") == ("cpu", "")
    for options in ({"device": "gpu"}, {"device": "auto", "plan": "warp"}):
        with pytest.raises(devices.NoDeviceError, match="there is none"):
            run("softmax", folder, numbers(4, 4), **options)
    assert names(folder) == ["in.npy"]
