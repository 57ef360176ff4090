"""Which attention kernel is launched: what each of them can count."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.bert import packed_attention
from cupynorm.plan.limits import RECORDED


@pytest.mark.parametrize("size", [32, 64])
def test_a_sequence_with_more_places_than_32_bits_count_goes_to_the_kernel_that_counts_in_64(
    size: int,
) -> None:
    heads = 16
    last = 2**32 // (3 * heads * size)  # tokens of one sequence whose places in qkv all fit 32 bits

    def chosen(length: int) -> str:
        plan = packed_attention.choose(
            np.dtype(np.float16), size, 1, heads, length, RECORDED["h200"], accelerated=True
        )
        return plan.expression.partition("<")[0]

    assert chosen(last) == f"cupynorm::attend_by_{'boxes' if size == 64 else 'group'}"
    assert chosen(last + 1) == "cupynorm::attend"
