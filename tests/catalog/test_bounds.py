"""The table of error bounds: every gradient has its lines, faults are found by them, and the docs show them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupynorm._dtypes import DTYPES, LEAST_NORMAL
from cupynorm.catalog import bounds, forms
from cupynorm.catalog.bounds import BOUNDS, EPSILON, ROUNDING, TOLERANCES, Right
from cupynorm.catalog.form import Form
from cupynorm.catalog.forms import FORMS
from cupynorm.catalog.gradient_forms import GRADIENTS
from cupynorm.tools.testing import assert_form_close, assert_right, excess
from tests.pages import CHECKOUT

every_gradient = pytest.mark.parametrize("what", GRADIENTS, ids=lambda what: what.name)
every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))
ROWS, COLS = 64, 257


def rounded(what: Form, exact: Any, dtype: str) -> list[Any]:
    """Return results as a kernel would that makes no error but the last rounding."""
    given = what.given(ROWS, COLS, DTYPES[dtype])
    kinds = [each.dtype for each in given.values() if each.holds == "result"]
    return [each.astype(kind) for each, kind in zip(exact, kinds, strict=True)]


def assert_found(what: Form, right: list[Right], wrong: list[Any], *, but: tuple[str, ...] = ()) -> None:
    """Each wrong result is found, though all others are right."""
    for number, (each, bad) in enumerate(zip(right, wrong, strict=True)):
        assert each.terms is not None
        if each.terms.result in but:
            continue
        results = [one.exact.astype(got.dtype) for one, got in zip(right, wrong, strict=True)]
        assert_form_close(what, results, right)
        results[number] = bad
        with pytest.raises(AssertionError, match="off by more than allowed"):
            assert_form_close(what, results, right)
        assert excess(bad, each) > 1


def masked(what: Form, given: dict[str, Any]) -> Any:
    """Return the kept elements of a form's arrays."""
    if "lengths" in given:
        return np.arange(COLS) < given["lengths"][:, None]
    return given.get("where", np.ones((ROWS, COLS), bool))


@every_gradient
def test_every_result_has_a_line(what: Form) -> None:
    given = forms.inputs(what, 5, 7, "float32")

    for right in what.right(given):
        assert right.terms is not None
        assert right.terms.sums.shape == right.exact.shape
        assert (
            right.terms.sums >= np.abs(right.exact) / 8
        ).all()  # of the size of the result at least, by and large
        assert bounds.bound(what.name.partition("/")[0], right.terms.result).multiple == right.multiple
        assert (np.asarray(right.terms.rounded) != 0).any() == bool(
            bounds.bound(what.name.partition("/")[0], right.terms.result).rounded
        )


def test_every_line_is_of_results() -> None:
    used = set()
    for what in GRADIENTS:
        for right in what.right(forms.inputs(what, 2, 2, "float32")):
            assert right.terms is not None
            used.add(bounds.bound(what.name.partition("/")[0], right.terms.result))

    assert used == {*BOUNDS}
    assert {name for each in BOUNDS for name in each.functions} == {
        each.name.partition("/")[0] for each in GRADIENTS
    }


@every_gradient
@every_dtype
def test_a_term_that_is_left_out_is_found(what: Form, dtype: str) -> None:
    """One column short, or one row: an element that arrives is missing in all sums that it belongs to."""
    given = forms.inputs(what, ROWS, COLS, dtype)
    right, changed = what.right(given), dict(given)
    name, size = ("x", None) if "labels" in given or "dy" not in given else ("dy", given["dy"])
    if size is None:
        size = given["x"].astype(np.float64)
        if "labels" in given:
            size[np.arange(ROWS), given["labels"]] = -np.inf
    else:
        kept = masked(what, given)
        size = np.where(kept, np.abs(size.astype(np.float64)), 0)
        size[kept.sum(-1) < 2] = 0
        if what.name.startswith("softmax"):
            size *= given["x"].astype(np.float64)
    row, col = np.unravel_index(np.argmax(size), size.shape)
    changed[name] = given[name].copy()
    changed[name][row, col] = 0 if name == "dy" else -np.inf
    wrong = [np.array(each) for each in what.reference(changed)]
    for at, each in enumerate(wrong):  # only what is added up is wrong
        if each.shape == given["x"].shape:
            each[row, col] = right[at].exact[row, col]

    elementwise = what.name.startswith(("bias_", "geglu", "swiglu"))
    assert_found(what, right, rounded(what, wrong, dtype), but=("dx",) * elementwise)


@every_gradient
def test_terms_in_16_bits_are_found(what: Form) -> None:
    """Each row's sums are of terms that were rounded; its first element is computed from exact ones."""
    given = forms.inputs(what, ROWS, COLS, "float32")
    right, changed = what.right(given), dict(given)
    for name in ("dy", "x"):
        if name in given:
            changed[name] = given[name].astype(np.float16).astype(np.float32)
            changed[name][:, 0] = given[name][:, 0]
    wrong = rounded(what, what.reference(changed), "float32")
    for at, each in enumerate(wrong):
        if each.shape == given["x"].shape:
            each[:, 1:] = right[at].exact[:, 1:]

    elementwise = what.name.startswith(("bias_", "geglu", "swiglu"))
    assert_found(what, right, wrong, but=("dx",) * elementwise)


@pytest.mark.parametrize("name", ["layer_norm_backward", "bias_silu_backward"])
def test_sums_over_rows_in_16_bits_are_found(name: str) -> None:
    given = forms.inputs(FORMS[name], ROWS, COLS, "float16")
    *_, right = FORMS[name].right(given)  # dbeta or dbias
    terms = given["dy"] if name.startswith("layer") else FORMS[name].reference(given)[0].astype(np.float16)

    assert_right(
        terms.sum(0, dtype=np.float64).astype(np.float16), right._replace(exact=terms.sum(0, np.float64))
    )
    with pytest.raises(AssertionError, match="off by more than allowed"):
        assert_right(np.add.accumulate(terms, 0, np.float16)[-1], right)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@every_dtype
def test_a_mean_over_the_wrong_number_of_columns_or_rows_is_found(name: str, dtype: str) -> None:
    """A mistake known from others: of sums over rows no mean is taken, and means of a row are over its columns."""
    what = FORMS[f"{name}_backward"]
    given = forms.inputs(what, ROWS, COLS, dtype)
    given["dy"] = (given["dy"] + 0.5 * given["x"]).astype(given["x"].dtype)  # so that the means count
    dy, gamma, rstd = (given[each].astype(np.float64) for each in ("dy", "gamma", "rstd"))
    right, rstd = what.right(given), rstd[:, None]
    mean = given["mean"].astype(np.float64)[:, None] if "mean" in given else 0.0
    z, g = (given["x"].astype(np.float64) - mean) * rstd, dy * gamma
    share = COLS / (COLS - 1)
    level = g.mean(-1, keepdims=True) if "mean" in given else 0.0
    dx = rstd * (g - share * (level + z * (g * z).mean(-1, keepdims=True)))
    sums = (dy * z).sum(0), dy.sum(0)
    found = (dx, *(each * share for each in sums))[: len(right)]

    assert_found(what, right, rounded(what, found, dtype))
    assert_found(what, right, rounded(what, (dx, *(each / ROWS for each in sums))[: len(right)], dtype))


@every_dtype
def test_a_bound_is_rounding_and_the_terms_errors(dtype: str) -> None:
    what = FORMS["log_softmax_backward"]
    given = forms.inputs(what, 3, 5, dtype)
    (right,) = what.right(given)
    assert right.terms is not None
    arithmetic = "float64" if dtype == "float64" else "float32"

    allowed = right.allowed(DTYPES[dtype])

    assert ROUNDING[dtype] == (1 - float(np.nextafter(DTYPES[dtype].type(1), DTYPES[dtype].type(0))))
    wanted = ROUNDING[dtype] * abs(right.exact) + 8 * EPSILON[arithmetic] * right.terms.sums
    np.testing.assert_allclose(allowed, wanted * (1 + (dtype == "float64")))
    assert right._replace(terms=None).allowed(DTYPES[dtype]) is None


# ---- docs


def rows_of(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table of a page with this header."""
    text = (CHECKOUT / "docs" / page).read_text("utf-8")
    table = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table
    ]


def test_docs_show_the_table() -> None:
    lines = [
        [each.shown, each.result, f"{each.multiple:g}", each.terms, each.rounded or "—"] for each in BOUNDS
    ]

    assert rows_of("numerics.md", "| of | result | multiple | terms | rounded |") == lines


def test_docs_show_the_numbers_of_each_dtype() -> None:
    lines = [
        [name, f"{TOLERANCES[name]:g}".replace("e-0", "e-"), f"2^{int(np.log2(ROUNDING[name]))}"]
        for name in ("float64", "float32", "float16", "bfloat16")
    ]

    assert rows_of("numerics.md", "| dtype | tolerance | rounding |") == lines


def flushed(values: Any) -> Any:
    """Return float32 numbers as a device takes them: subnormals are 0."""
    values = np.asarray(values, np.float32)
    return np.where(np.abs(values) < LEAST_NORMAL, np.float32(0), values)


EDGES = [1e-44, 1e-40, 1e-38, 1.5e-38, 1e-20, 0.3, 1.0, 9.0, 60.0, 1e18, 1e37]


@pytest.mark.parametrize("name", ["geglu_backward", "swiglu_backward"])
@np.errstate(all="ignore")
def test_gates_may_lose_what_a_device_flushes_and_what_it_is_multiplied_with(name: str) -> None:
    edges = np.array([sign * each for each in EDGES for sign in (1, -1)], np.float32)
    dy, gate, value = (each.reshape(1, -1) for each in np.meshgrid(edges, edges, edges, indexing="ij"))
    (right,) = FORMS[name].right({"dy": dy, "x": np.concatenate([gate, value], axis=1)})
    # slope and activation are the gradients of a dy and a value of 1
    ones = {"dy": np.ones_like(dy), "x": np.concatenate([flushed(gate), np.ones_like(dy)], axis=1)}
    slope, activation = np.split(flushed(FORMS[name].reference(ones)[0]), 2, axis=1)

    of_gate = flushed(flushed(flushed(dy) * slope) * flushed(value))
    found = np.concatenate([of_gate, flushed(flushed(dy) * activation)], axis=1)

    assert_right(found, right)


@every_gradient
def test_what_is_lost_below_normal_numbers_hides_no_fault(what: Form) -> None:
    (right, *_) = what.right(forms.inputs(what, 5, 7, "float32"))
    assert right.terms is not None

    lost = 2 * LEAST_NORMAL * np.max(right.terms.factors)

    assert lost < 1e-30 * np.median(np.abs(right.exact))
