"""Numbers that lowering needs and that were measured, from data/lowering.json: the same for every device.

Sums over rows have the same bits on every device, so no architecture has numbers of its own.
"""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE = os.path.join(os.path.dirname(__file__), "data", "lowering.json")  # noqa: PTH118, PTH120  as in rule_file.py


class SumNumbers(NamedTuple):
    """How sums over rows are cut into blocks and groups (lower/sums.py).

    Attributes
    ----------
    blocks
        Blocks of a kernel of sums: enough to fill any device several times, but so few that partial sums, which are
        written and read once more, are a small part of what is read.
    blocks_with_elements
        The same of a kernel that writes elements, too. Where nothing is added up there are as many as there are rows
        for.
    min_batches
        Rounds of a group's rows whose loads are in flight at once, at least.
    bytes_in_flight
        Rows whose loads a thread issues before it waits for the first, times bytes of the compute type.
    short_bytes_in_flight, short_min_batches
        The same where nothing is added up, or several arrays are written and a block has whole rows.
    apart_lanes, lanes_in_use
        For unaligned rows of arrays that differ in alignment: threads side by side along a row, at most; and the share
        of a row's threads that must have columns where they are more than a warp.
    min_rows_at_lines, min_rows_at_vectors, min_rows_of_vectors, min_rows_summed
        Unaligned rows of the same alignment, at least: so that vectors are counted from lines of memory; so that they
        are counted from multiples of their size; from lines where rows begin at vectors; and those of a group, for one
        row of partial sums.
    halves_apart, halves_summed
        Three numbers for unaligned rows of 16 bits: rows in flight times bytes of float32; how often a group has so
        many rows, at least; and for how many blocks of a multiprocessor the compiler leaves registers. `halves_apart`:
        of arrays that differ in alignment, if nothing is added up and fewer than `apart_lanes` threads are side by
        side. `halves_summed`: of arrays that are aligned alike, if the only one that is written is added up.
    min_elements_apart
        Elements of an array, at least, for `halves_apart`: with fewer, blocks do not end at the same time.
    narrow_cols, narrow_rows, narrow_blocks, narrow_bytes_in_flight
        For rows of 16 bits where elements are written to one array and added up: from how many columns and rows on, and
        up to how many, there are so few blocks, which run at once, and so many rows in flight (times bytes of float32).
    min_inside
        Elements of a column that lie next to one another, where those of a row do not, from which on these are summed
        as rows are reduced.
    groups, max_groups, wide_groups
        Where sums are taken in the pass over rows (kernels/row/summed.cuh): pairs of the most columns and the groups of
        rows for that; groups at most, and those of rows of more columns. Each group adds one row of partial sums, and
        begins with a load that nothing overlaps; but short rows need many blocks at once. 528 fill a device of 132
        multiprocessors four times, 132 once; wider rows need clusters, which reach 120 of them, and fewer in whole
        turns.
    min_rows_of_group, min_elements_of_group
        Rows and elements of a group, at least.
    at_once
        For whole vectors of columns: from how many on and up to how many there are how many groups, which clusters go
        through at once, and from how many rows on and up to how many there are no more. At other columns clusters of
        16 and 32 bits differ in what they go through.
    few_rows
        From how many columns on, and up to how many, so few rows have groups of at least how many rows: clusters then
        go through all groups at once, of any number of columns.
    apart_groups, min_rows_apart
        As `groups`, of rows whose elements lie apart (kernels/row/summed_apart.cuh), the last one for all rows of more
        columns; and rows of a group, at least.
    last_lanes, min_last_lanes, last_in_flight
        For the sums of partial sums, whose rows are few: threads side by side along a row, at most, and the fewest,
        which take a sector of memory; rows of a thread in flight, at most.
    """

    blocks: int
    blocks_with_elements: int
    min_batches: int
    bytes_in_flight: int
    short_bytes_in_flight: int
    short_min_batches: int
    apart_lanes: int
    lanes_in_use: float
    min_rows_at_lines: int
    min_rows_at_vectors: int
    min_rows_of_vectors: int
    min_rows_summed: int
    halves_apart: tuple[int, int, int]
    halves_summed: tuple[int, int, int]
    min_elements_apart: int
    narrow_cols: Sequence[int]
    narrow_rows: Sequence[int]
    narrow_blocks: int
    narrow_bytes_in_flight: int
    min_inside: int
    groups: Sequence[tuple[int, int]]
    max_groups: int
    wide_groups: int
    min_rows_of_group: int
    at_once: Sequence[tuple[int, int, int, int, int]]
    few_rows: Sequence[int]
    min_elements_of_group: int
    apart_groups: Sequence[tuple[int, int]]
    min_rows_apart: int
    last_lanes: int
    min_last_lanes: int
    last_in_flight: int


class FusedNumbers(NamedTuple):
    """Registers that functions, masks and results around an op take (lower/fused.py), and how long rows are.

    Attributes
    ----------
    few_rows, long_bytes
        Fewer rows of x, of so many bytes at least, may be shared by blocks of the grid: their messages get room of
        their own, as those of rows in runs always do.
    forgotten_bytes
        That are read and written between two uses of an operand's row. Beyond that, L2 is taken to have lost the row,
        and rows that share it follow one another; below, C order is faster.
    dropout, label, ignored
        A dropout's random words while they are made; a label and the sums of its loss; a label alone that a mask may
        ignore.
    scales, result, loaded
        The search for a row's largest result; each further result; a sum that is stored as well.
    interval, interval_of_doubles
        An interval mask.
    function
        The arithmetic of a function on one vector, at most.
    """

    few_rows: int
    long_bytes: int
    forgotten_bytes: int
    dropout: int
    label: int
    ignored: int
    scales: int
    result: int
    loaded: int
    interval: int
    interval_of_doubles: int
    function: int


class Numbers(NamedTuple):
    """All of them."""

    sums: SumNumbers
    fused: FusedNumbers


@functools.cache
def numbers() -> Numbers:
    """Return the numbers of the file."""
    with open(FILE, encoding="utf-8") as file:  # noqa: PTH123
        told = json.load(file)
    return Numbers(SumNumbers(**told["sums"]), FusedNumbers(**told["fused"]))
