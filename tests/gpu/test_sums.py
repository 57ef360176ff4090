"""Gradients of a norm's parameters, sums over rows: right, and of the same bits every time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupynorm import add_layer_norm_backward, layer_norm_backward, rms_norm_backward
from cupynorm.catalog import forms
from cupynorm.catalog.forms import FORMS
from cupynorm.tools.testing import assert_form_close, assert_right

MANY = [(100_003, 128), (30_000, 1000), (9_999, 1001), (2_000, 8192), (700, 50257), (64, 65536), (9, 200_000)]
NORMS = {
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_backward": rms_norm_backward,
    "add_layer_norm_backward": add_layer_norm_backward,
}
IN_THE_PASS = 8192  # columns up to which sums are taken of numbers that are not rounded, on every device


def check(xp: Any, rows: int, cols: int, dtype: str) -> None:
    """Compare with float64 by the table of bounds, with statistics that are given and that are computed."""
    for name, function in NORMS.items():
        what = FORMS[name]
        host = forms.inputs(what, rows, cols, dtype)
        given = {key: xp.asarray(each) for key, each in host.items()}
        right = what.right(host)
        if cols <= IN_THE_PASS:
            right = [each._replace(terms=each.terms and each.terms._replace(rounded=0.0)) for each in right]
        named = {"s" if key == "x" and "ds" in given else key: each for key, each in given.items()}
        alone = {key: each for key, each in named.items() if key not in ("mean", "rstd")}

        first, second, computed = (
            [xp.asnumpy(each) for each in results]
            for results in (what.call(given), what.call(given), without_dresidual(function(**alone)))
        )

        assert [each.tobytes() for each in first] == [each.tobytes() for each in second]
        assert_form_close(what, first, right)
        assert_form_close(what, computed, right)


def without_dresidual(results: tuple[Any, ...]) -> list[Any]:
    """Return those that a form's call has: dx and dresidual are the same array here."""
    return [each for at, each in enumerate(results) if not any(each is before for before in results[:at])]


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "cols"), [(700, 24), (90, 77), (40, 513)])
def test_a_few_rows(xp: Any, rows: int, cols: int, dtype: str) -> None:
    check(xp, rows, cols, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), MANY)
def test_many_rows(cuda: Any, rows: int, cols: int, dtype: str) -> None:
    check(cuda, rows, cols, dtype)


def of_a_middle_axis(each: Any, outer: int, cols: int, inner: int) -> Any:
    """Return an array of rows with its columns along the second of three axes; one number a row; or one of columns."""
    if each.shape == (outer * inner, cols):
        return each.reshape(outer, inner, cols).swapaxes(1, 2).copy()
    return each.reshape(outer, inner) if len(each) == outer * inner else each


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("outer", "cols", "inner"),
    [
        (40, 21, 1024),
        (16, 96, 3136),
        (5, 96, 1001),
        (2, 130, 2050),
        (64, 768, 196),
        (1, 1500, 2048),
        (1, 4000, 96),
        (3, 700, 181),
        (2, 17_000, 72),
    ],
)
def test_columns_along_a_middle_axis(cuda: Any, outer: int, cols: int, inner: int, dtype: str) -> None:
    for name, function in NORMS.items():
        what = FORMS[name]
        host = forms.inputs(what, outer * inner, cols, dtype)
        given = {key: cuda.asarray(of_a_middle_axis(each, outer, cols, inner)) for key, each in host.items()}
        named = {"s" if key == "x" and "ds" in given else key: each for key, each in given.items()}

        first, second = (
            [cuda.asnumpy(each) for each in without_dresidual(function(**named, axis=1))] for _ in range(2)
        )

        assert [each.tobytes() for each in first] == [each.tobytes() for each in second]
        first[0] = first[0].swapaxes(1, 2).reshape(outer * inner, cols)
        assert_form_close(what, first, what.right(host))


@pytest.mark.small
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_parameters_do_not_depend_on_how_rows_are_cut_into_batches(
    xp: Any, name: str, dtype: str
) -> None:
    """A mistake known from others. On a device the last bits may differ, and no more."""
    what, rows = FORMS[name], 90
    given = {key: xp.asarray(each) for key, each in forms.inputs(what, rows, 77, dtype).items()}
    host = {key: xp.asnumpy(each) for key, each in given.items()}
    right = what.right(host)

    for cuts in ([0, 1, rows], [0, 13, 14, 60, rows], [0, 45, rows]):
        totals = [xp.zeros(77, "float32") for _ in right[1:]]
        parts = []
        for begin, end in itertools.pairwise(cuts):
            rows_of = {key: each[begin:end] if len(each) == rows else each for key, each in given.items()}
            parts.append(
                xp.asnumpy(what.call(rows_of, add_to=(*totals,) if len(totals) > 1 else totals[0])[0])
            )

        assert_right(np.concatenate(parts), right[0])
        for total, wanted in zip(totals, right[1:], strict=True):
            assert_right(
                xp.asnumpy(total), wanted._replace(terms=wanted.terms and wanted.terms._replace(rounded=0.0))
            )
