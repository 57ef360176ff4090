"""Every form of every op on the device, against its definition in float64; and the bench's arrays for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import DTYPES
from cupynorm.catalog import forms
from cupynorm.catalog.form import Form
from cupynorm.catalog.forms import FORMS
from cupynorm.tools import bench, buffers
from cupynorm.tools.results import OURS, Point
from cupynorm.tools.testing import assert_form_close
from tests.gpu.agree import DTYPES as NAMES

AROUND = {name: each for name, each in FORMS.items() if not each.alone}
every_form = pytest.mark.parametrize("what", AROUND.values(), ids=AROUND)
every_dtype = pytest.mark.parametrize("dtype", NAMES)

# rows, columns: one element; odd; as many queries as keys; wide unaligned vectors; rows of 3 and 5 times a power of two
# vectors, or nearly so, where a thread or a block holds more of a row
SMALL = [(1, 1), (5, 33), (48, 16), (9, 77)]
SHAPES = [(29, 1024), (1024, 512), (7, 5001), (3, 8192), (768, 768), (29, 1000), (5, 5120), (197, 197)]
# Forms of each kind with long rows that several blocks share, and with more such rows than a device runs at a time:
# rows that fill all threads and rows that do not, aligned and unaligned.
LONG_FORMS = (
    "softmax/where",
    "log_softmax/lengths",
    "softmax/ragged",
    "softmax/bias",
    "softmax/int8",
    "add_layer_norm",
    "add_layer_norm/sum",
    "add_rms_norm/sum",
    "add_rms_norm/dropout",
    "layer_norm/int8",
    "layer_norm/int8/scale",
    "layer_norm/fuse",
    "layer_norm_backward",
    "rms_norm_backward",
    "add_layer_norm_backward",
    "softmax_backward/where",
    "log_softmax_backward",
    "cross_entropy/grad",
)
LONG = [(700, 12288), (500, 16384), (500, 16385), (300, 20001), (300, 20480), (200, 50257), (150, 131072)]


def check(xp: Any, what: Form, rows: int, cols: int, dtype: str) -> None:
    if what.missing or dtype not in DTYPES:
        pytest.skip("ml_dtypes is not installed")
    given = forms.inputs(what, rows, cols, dtype)

    results = what.call({name: xp.asarray(each) for name, each in given.items()})

    results = results if isinstance(results, tuple) else (results,)
    assert all(type(each) is xp.ndarray for each in results)
    assert_form_close(what, tuple(map(xp.asnumpy, results)), what.right(given))


@pytest.mark.small
@every_form
@every_dtype
@pytest.mark.parametrize(("rows", "cols"), SMALL)
def test_small_arrays(xp: Any, what: Form, dtype: str, rows: int, cols: int) -> None:
    check(xp, what, rows, cols, dtype)


@every_form
@every_dtype
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_larger_arrays(cuda: Any, what: Form, dtype: str, rows: int, cols: int) -> None:
    check(cuda, what, rows, cols, dtype)


@pytest.mark.parametrize("name", LONG_FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), LONG)
def test_long_rows(cuda: Any, name: str, dtype: str, rows: int, cols: int) -> None:
    check(cuda, FORMS[name], rows, cols, dtype)


@every_form
def test_the_bench_measures_what_it_should(cuda: Any, what: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    if what.missing:
        pytest.skip("ml_dtypes is not installed")
    monkeypatch.setattr(buffers, "ROTATION_BYTES", 1 << 20)
    point = Point(what.name, "float16", 256, 128)

    found = bench.measure(point, replays=3)

    assert OURS in found.timings, found.notes
    assert found.copy > 0
    assert not found.notes
    assert found.plan == bench.planned(point)
    assert np.isfinite(found.share())
