"""docs/ecosystem.md: its blocks run, and each line of its tables gives what the other package gives."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import cupynorm
from tests.pages import CHECKOUT, Block, blocks

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = CHECKOUT / "docs" / "ecosystem.md"
TEXT = PAGE.read_text("utf-8")
NEEDED = {"pywt": "PyWavelets", "sklearn": "scikit-learn"}  # packages that are installed by another name


class Line(NamedTuple):
    """A line of a table: its number, the package, and what both are called."""

    number: int
    package: str
    theirs: str
    ours: str


def lines() -> list[Line]:
    """Return the lines of all tables whose second column is `here`."""
    found, package = [], ""
    for number, line in enumerate(TEXT.splitlines(), 1):
        if (header := re.fullmatch(r"\| (\w\S*) \| here \| .* \|", line)) is not None:
            package = header[1]
        elif not line.startswith("|"):
            package = ""
        elif package and (cells := re.fullmatch(r"\| `([^`]*)` \| `([^`]*)` \|.*", line)) is not None:
            found.append(Line(number, package, cells[1], cells[2]))
        else:
            assert not package or set(line) <= set("|- "), line
    return found


LINES = lines()


def heading_of(number: int, least: str) -> int:
    """Return the line of the last heading above a line: of level 2, for least="## ", or of any below that."""
    above = TEXT.splitlines()[:number]
    return max(at for at, line in enumerate(above, 1) if line.startswith(least))


def chain(number: int) -> tuple[Block, ...]:
    """Return the blocks that a line goes on from, or that of the line: from the last that imports NumPy on.

    What stands under another heading of level 3 is left out.
    """
    section, own = heading_of(number, "## "), heading_of(number, "##")
    above = [
        block
        for block in blocks(PAGE)
        if section < block.line <= number and heading_of(block.line, "##") in (section, own)
    ]
    first = max(at for at, block in enumerate(above) if "import numpy as np\n" in block.text)
    return tuple(above[first:])


@functools.cache
def run(chosen: tuple[Block, ...]) -> dict[str, Any]:
    """Run blocks in one namespace, and return it. What they need and is not installed skips the test."""
    for block in chosen:
        for name in re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE):
            pytest.importorskip(name, reason=f"{NEEDED.get(name, name)} is not installed")
    module = types.ModuleType(f"block_of_line_{chosen[-1].line}")
    sys.modules[module.__name__] = module  # where pickle finds its classes
    for block in chosen:
        exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), module.__dict__)  # noqa: S102
    return module.__dict__


def as_arrays(found: Any) -> list[np.ndarray]:
    """Return one result or several as NumPy arrays."""
    return [np.asarray(each) for each in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("block", blocks(PAGE), ids=lambda block: block.name)
def test_block_runs(block: Block) -> None:
    assert block.language == "python"
    run(chain(block.line))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"line {line.number}: {line.theirs}")
def test_both_give_the_same(line: Line) -> None:
    names = run(chain(line.number))
    ours = eval(line.ours, names)  # noqa: S307
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nan
        theirs = eval(line.theirs, names)  # noqa: S307

    for found, wanted in zip(as_arrays(ours), as_arrays(theirs), strict=True):
        assert found.shape == wanted.shape
        single = wanted.dtype == np.float32
        np.testing.assert_allclose(
            found, wanted, rtol=1e-5 if single else 1e-9, atol=1e-5 if single else 1e-12
        )


def test_each_package_has_a_table() -> None:
    packages = ["NumPy", "SciPy", "scikit-learn", "astropy", "PyTorch", "xarray"]

    assert list(dict.fromkeys(line.package for line in LINES)) == packages
    assert all(sum(line.package == each for line in LINES) >= 4 for each in packages)


# ---- what the page says beside its tables

NAN, CONSTANT, ONE = np.full((2, 3), np.nan), np.full((2, 3), 5.0), np.array([[1.0], [2.0]])
ZEROS = np.zeros((1, 3))
INTEGERS = {dtype: np.arange(12).reshape(3, 4).astype(dtype) for dtype in ("bool", "uint8", "int16", "int32")}
HALF = np.ones((2, 3), np.float16)


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def default(function: Any, parameter: str) -> Any:
    return inspect.signature(function).parameters[parameter].default


def quiet(call: Callable[[], Any]) -> Any:
    """Return what a call gives that would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def test_what_holds_for_all_functions() -> None:
    of_rows = (
        cupynorm.layer_norm,
        cupynorm.softmax,
        cupynorm.standardize,
        cupynorm.normalize,
        cupynorm.rescale,
    )
    for function in (*of_rows, cupynorm.moments, cupynorm.logsumexp, cupynorm.sigma_clip):
        assert default(function, "axis") == -1
        for dtype, x in INTEGERS.items():
            found = as_arrays(function(x))[0]
            assert found.dtype == (np.float64 if dtype == "int32" else np.float32)
        with pytest.raises(TypeError, match='x.astype\\("float64"\\)'):
            function(np.arange(3, dtype=np.int64))
    assert all(default(function, "ddof") == 0 for function in (cupynorm.standardize, cupynorm.moments))
    assert all(function(HALF).dtype == np.float16 for function in of_rows)
    assert [each.dtype for each in (*cupynorm.moments(HALF), cupynorm.logsumexp(HALF))] == [np.float32] * 3
    for function in of_rows:
        assert np.isnan(function(NAN)).all()
    assert np.isnan(cupynorm.moments(NAN, nan="omit")).all()


def test_numpy() -> None:
    assert default(np.mean, "axis") is None
    assert np.mean(HALF, axis=1).dtype == np.float16
    assert np.mean(INTEGERS["uint8"], axis=1).dtype == np.float64
    with pytest.warns(RuntimeWarning):
        assert np.isnan(np.nanmean(NAN, axis=1)).all()
    with pytest.warns(RuntimeWarning):
        assert np.isnan(np.var(ONE, axis=1, ddof=1)).all()
    with pytest.warns(RuntimeWarning):
        assert np.isinf(np.var([1.0, 2.0], ddof=2))
    with pytest.raises(ZeroDivisionError):
        np.average(CONSTANT, axis=1, weights=np.zeros(3))
    assert np.isnan(np.average([np.nan, 1], weights=[0, 1]))
    assert np.isnan(cupynorm.moments(CONSTANT, weights=np.zeros(3))[0]).all()
    assert cupynorm.moments(np.array([np.nan, 1]), weights=np.array([0.0, 1]))[0] == 1
    huge = np.full((1, 4), 1e200)
    assert cupynorm.normalize(huge, return_norms=True)[1] == 2e200
    assert np.isinf(quiet(lambda: np.linalg.norm(huge, axis=1)))


def test_scipy() -> None:
    stats, special = package("scipy.stats"), package("scipy.special")
    assert [default(each, "axis") for each in (stats.zscore, stats.skew)] == [0, 0]
    assert default(special.softmax, "axis") is default(cupynorm.scipy_special.softmax, "axis") is None
    assert default(stats.describe, "ddof") == 1
    assert stats.zscore(INTEGERS["int16"], axis=1).dtype == np.float64
    assert cupynorm.scipy_special.softmax(INTEGERS["int16"]).dtype == np.float64
    assert np.isnan(quiet(lambda: stats.zscore(NAN, axis=1, nan_policy="omit"))).all()
    for function in (stats.zscore, stats.skew):
        with pytest.warns(RuntimeWarning):
            assert np.isnan(function(CONSTANT, axis=1)).all()
    assert np.isnan(cupynorm.standardize(CONSTANT)).all()
    assert np.isnan(cupynorm.moments(CONSTANT, order=4)[2:]).all()


def test_scikit_learn() -> None:
    preprocessing = package("sklearn.preprocessing")
    assert preprocessing.scale(INTEGERS["int16"]).dtype == np.float64
    assert (preprocessing.scale(CONSTANT) == 0).all()
    assert (cupynorm.standardize(CONSTANT, axis=0, eps=1e-30) == 0).all()
    assert (preprocessing.normalize(ZEROS) == 0).all()
    assert (cupynorm.normalize(ZEROS) == 0).all()
    for low, high in ((0, 1), (-1, 1)):
        assert (preprocessing.minmax_scale(CONSTANT, (low, high)) == low).all()
        assert (cupynorm.rescale(CONSTANT, low, high, axis=0) == low).all()
    for function in (preprocessing.StandardScaler().fit_transform, preprocessing.minmax_scale):
        with pytest.warns(RuntimeWarning):
            assert np.isnan(function(NAN)).all()
    with pytest.raises(ValueError, match="NaN"):
        preprocessing.normalize(NAN)
    with pytest.raises(TypeError, match="same_kind"):
        package("sklearn.utils.extmath").softmax(INTEGERS["int16"])
    weights = np.array([1.0, 2, 3])
    theirs = preprocessing.StandardScaler().fit(INTEGERS["int16"], sample_weight=weights)
    mean, variance = cupynorm.moments(INTEGERS["int16"], axis=0, weights=weights[:, None])
    np.testing.assert_allclose(mean, theirs.mean_)
    np.testing.assert_allclose(variance, theirs.var_, rtol=1e-6)


def test_astropy() -> None:
    stats = package("astropy.stats")
    assert [default(stats.sigma_clip, name) for name in ("axis", "maxiters", "cenfunc")] == [
        None,
        5,
        "median",
    ]
    assert [default(cupynorm.sigma_clip, name) for name in ("iterations", "centre")] == [10, "mean"]
    assert stats.sigma_clip(np.array([[1.0, 2, 1, 2, 1, 2, 1, 2, 99]]), sigma=2, masked=False).shape == (8,)
    with pytest.warns(package("astropy.utils.exceptions").AstropyUserWarning):
        stats.sigma_clip(np.array([[np.nan, 1.0]]), axis=1)
    assert np.isnan(quiet(lambda: stats.sigma_clipped_stats(NAN, axis=1))).all()
    assert np.isnan(cupynorm.sigma_clip(NAN, return_stats=True)[1:]).all()
    assert (package("astropy.visualization").MinMaxInterval()(CONSTANT) == 0).all()


def test_pytorch() -> None:
    torch = package("torch")
    functional, tensor = torch.nn.functional, torch.from_numpy
    assert default(functional.normalize, "dim") == 1
    assert tensor(HALF).mean(dim=1).dtype == torch.float16
    for function in (functional.normalize, lambda t: functional.softmax(t, dim=1)):
        with pytest.raises(RuntimeError):
            function(tensor(INTEGERS["int16"]))
    with pytest.warns(UserWarning, match="degrees of freedom"):
        assert torch.isnan(torch.var(tensor(ONE), dim=1)).all()
    tiny = np.full((1, 4), 1e-20)
    assert functional.normalize(tensor(tiny)).sum() < 1e-7
    np.testing.assert_allclose(cupynorm.normalize(tiny), 0.5)
    eps = np.finfo(np.float64).eps
    x = np.arange(4.0)[None] * 1e-8
    np.testing.assert_allclose(cupynorm.rms_norm(x, eps=eps), functional.rms_norm(tensor(x), (4,)).numpy())


def test_xarray() -> None:
    xarray = package("xarray")
    gaps = xarray.DataArray([[1.0, np.nan], [np.nan, np.nan]], dims=("a", "b"))
    assert gaps.mean().item() == 1
    assert np.isnan(gaps.mean("b")[1])
    along = names_of("def along(")["along"]
    data = xarray.Dataset({"one": gaps, "other": 2 * gaps})
    assert data.map(lambda each: along(cupynorm.standardize, each, "b", nan="omit"))["other"].shape == (2, 2)
    assert np.isnan(along(cupynorm.moments, gaps, "b", whole=0, rows=2, nan="omit")[0][1])


def names_of(text: str) -> dict[str, Any]:
    """Return what the block that holds a text defines, and those that it goes on from."""
    return run(chain(next(block.line for block in blocks(PAGE) if text in block.text)))


def test_a_dimension_of_a_row_in_chunks_is_an_error() -> None:
    xarray, dask = package("xarray"), package("dask.array")
    along = names_of("def along(")["along"]
    x = xarray.DataArray(dask.ones((4, 6), chunks=(2, 6)), dims=("a", "b"))

    assert (along(cupynorm.softmax, x, "b") == 1 / 6).all()
    with pytest.raises(ValueError, match="consists of multiple chunks"):
        along(cupynorm.softmax, x, "a")


def test_operands_of_a_data_array_are_views() -> None:
    xarray = package("xarray")
    along, met = names_of("def along(")["along"], []
    x = xarray.DataArray(np.ones((3, 4, 5)), dims=("a", "b", "c"))

    def function(x: Any, axis: Any, weights: Any) -> Any:
        met.append((x.strides, weights.strides, axis))
        return x

    found = along(function, x, "b", weights=xarray.DataArray(np.ones(4), dims=("b",)))

    assert met == [((160, 8, 40), (0, 0, 8), (-1,))]
    assert found.dims == x.dims
    assert np.shares_memory(found.to_numpy(), x.to_numpy())


@pytest.mark.parametrize("kind", ["standardize", "normalize", "rescale"])
@pytest.mark.parametrize("missing", [False, True])
def test_the_transformer_passes_scikit_learns_checks(kind: str, missing: bool) -> None:
    checks = package("sklearn.utils.estimator_checks")
    scaler = names_of("class RowScaler")["RowScaler"](kind, missing)

    results = checks.check_estimator(scaler, on_skip=None)

    assert len(results) > 30
    assert {each["status"] for each in results} <= {"passed", "skipped"}
