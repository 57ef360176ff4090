"""Every variant of gradients and losses on the device, beside NumPy arrays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cupynorm.plan.config import VARIANTS
from tests.gradient_calls import NAMES, WIDTHS, assert_near, calls

every_variant = pytest.mark.parametrize(("name", "variant"), [*itertools.product(NAMES, VARIANTS)])


def check(xp: Any, name: str, variant: str, cols: int, dtype: str) -> None:
    function, arrays, options = calls(cols, dtype)[name]
    given = {key: xp.asarray(each) for key, each in arrays.items()}

    results = [function(**given, **options, plan=variant) for _ in range(2)]

    expected = function(**arrays, **options)
    for found in results:
        assert_near(name, found, expected)


@pytest.mark.small
@every_variant
def test_every_variant(xp: Any, name: str, variant: str) -> None:
    """Rows in whole vectors of halves, and rows of floats that begin anywhere."""
    for cols, dtype in zip(WIDTHS[variant], ("float16", "float32"), strict=True):
        check(xp, name, variant, cols, dtype)


@every_variant
@pytest.mark.parametrize(
    ("cols", "dtype"), [(1 << 15, "float32"), (1 << 18, "float16"), (100_003, "float16")]
)
def test_long_rows(cuda: Any, name: str, variant: str, cols: int, dtype: str) -> None:
    check(cuda, name, variant, cols, dtype)
