"""The table of ops: complete, true to the kernels, and right about bytes."""

from __future__ import annotations

import dataclasses
import inspect
import re

import numpy as np
import pytest

import cupynorm
from cupynorm.catalog.op_table import OPS, Op, op
from cupynorm.runtime import compiler

every_op = pytest.mark.parametrize("each", OPS, ids=lambda op: op.name)


def test_names_are_unique_and_found() -> None:
    assert len({each.name for each in OPS}) == len(OPS)
    assert [op(each.name) for each in OPS] == list(OPS)


def test_an_unknown_op_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        ValueError, match="op 'gelu' does not exist: use layer_norm, rms_norm, softmax, log_softmax"
    ):
        op("gelu")


@every_op
def test_the_function_is_the_public_one_and_takes_the_parameters(each: Op) -> None:
    takes = inspect.signature(each.function).parameters

    assert getattr(cupynorm, each.name) is each.function
    assert [name for name in takes if name in {"gamma", "beta"}] == list(each.parameters)
    assert ("return_stats" in takes) == bool(each.stats)
    assert ("eps" in takes) == each.row.has_eps


@every_op
def test_the_reference_has_the_functions_eps(each: Op) -> None:
    ours, theirs = (inspect.signature(what).parameters for what in (each.function, each.reference))

    assert ("eps" in ours) == ("eps" in theirs)
    assert "eps" not in ours or ours["eps"].default == theirs["eps"].default


@every_op
def test_the_source_holds_the_struct(each: Op) -> None:
    text = (compiler.kernels_dir() / each.source).read_text()

    assert re.search(rf"\bstruct {each.struct} [:{{]", text)


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_reference_gives_the_result_and_statistics_in_a_wide_type(each: Op, dtype: str) -> None:
    x = np.arange(24, dtype=dtype).reshape(2, 3, 4)

    y, *stats = each.reference(x, axes=2)

    assert (y.shape, y.dtype) == (x.shape, np.float64)
    assert [stat.shape for stat in stats] == [(2,)] * len(each.stats)


def test_bytes_are_counted_once() -> None:
    layer_norm, softmax = op("layer_norm"), op("softmax")

    assert softmax.bytes_moved(3, 5, "float16") == 3 * 5 * 4
    assert softmax.bytes_moved(3, 5, "float16", "float32") == 3 * 5 * 6
    assert layer_norm.bytes_moved(3, 5, "float32") == 3 * 5 * 8
    assert layer_norm.bytes_moved(3, 5, "float32", parameter_dtype="float16") == 3 * 5 * 8 + 2 * 5 * 2
    assert layer_norm.bytes_moved(3, 5, np.float32, return_stats=True) == 3 * 5 * 8 + 2 * 3 * 4
    assert layer_norm.bytes_moved(3, 5, "float32", "float64", return_stats=True) == 3 * 5 * 12 + 2 * 3 * 8
    assert op("rms_norm").bytes_moved(3, 5, "float64", parameter_dtype="float32") == 3 * 5 * 16 + 5 * 4


def test_an_entry_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPS[0].row = OPS[1].row  # type: ignore[misc]
