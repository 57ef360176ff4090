"""How many registers a kernel wants, as far as that was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class RegisterModel(NamedTuple):
    """How many registers a thread wants beside its values, as the compiler was seen to want them (registers.py).

    Attributes
    ----------
    at_use, cached
        With parameters fetched at use, and cached in registers, by bytes of the compute type.
    ragged, unaligned
        More, where a thread's last vector may be missing, and for unaligned rows.
    step
        What one more thing to keep takes.
    mixed_types, before_ampere, converted, edge
        More: where parameters have another type than x; on older devices; for where converted parameters lie; for an
        element that is in no vector, and for each operand.
    addresses, many_addresses
        More where a thread has many vectors: as a rule, and with much arithmetic.
    passing_words
        Words of a vector of parameters: more pass through registers of their own.
    loaded_bytes
        Bytes of x and its operands on their way, for each register; the rest of it has their addresses.
    narrow, few
        Extra registers up to which arithmetic is cheap.
    crowded_elements, crowded_floats
        Elements of a thread from which on the compiler wants more.
    few_values
        Up to which it wants less.
    full_block, loaded_words
        Registers for a block of all threads, and registers on their way with which they do.
    cluster
        More of a cluster, elsewhere than where the rules were measured.
    cluster_rows, cluster_rows_few, cluster_small, cluster_small_more, cluster_large
        Registers for rows in the registers of clusters; up to how many values they want so many more, and from how many
        on more.
    staged, staged_arithmetic, staged_alone, staged_scaled, staged_both
        Registers for fused rows on their way through shared memory, with arithmetic that takes so many; where nothing
        is loaded beside x, but a mask keeps an interval or each row has a scale; where 16 bits become bytes with a
        scale a row, and nothing else (docs/notes/088); beside values and parameters, where these wait in shared memory
        and in registers.
    small_batch, small_batch_fused, one_row
        Registers for small batches, and for one row in the registers of the grid.
    computed, computed_beside, computed_at_most
        All registers of a thread of fused rows that wait as they were computed: where x alone is loaded, with operands
        or parameters, and where more is computed, of unaligned rows, or of doubles.
    function_at_once
        Registers in use at once by a function whose steps take more than `few`: in 16 bits.
    """

    at_use: Mapping[int, int]
    cached: Mapping[int, int]
    ragged: Mapping[int, int]
    unaligned: Mapping[int, int]
    step: int
    mixed_types: int
    before_ampere: int
    converted: int
    edge: int
    addresses: int
    many_addresses: int
    passing_words: int
    loaded_bytes: int
    narrow: int
    few: int
    crowded_elements: int
    crowded_floats: int
    few_values: int
    full_block: int
    loaded_words: int
    cluster: int
    cluster_rows: int
    cluster_rows_few: int
    cluster_small: int
    cluster_small_more: int
    cluster_large: int
    staged: int
    staged_arithmetic: int
    small_batch: int
    small_batch_fused: int
    one_row: int
    staged_alone: int
    staged_scaled: int
    staged_both: int
    computed: int
    computed_beside: int
    computed_at_most: int
    function_at_once: int
