"""Into which groups rows are cut whose sums are taken in the pass over rows (row/summed.cuh, row/summed_apart.cuh)."""

from __future__ import annotations

from cupynorm._values import NamedTuple
from cupynorm.plan.lowering import numbers

NUMBERS = numbers().sums
# Where the number of groups is a multiple of this, all rows of a group have the same alignment, whatever their width.
# Where the number of columns is one, all rows have.
INTERLEAVED = 8


class RowGroups(NamedTuple):
    """How rows are cut into groups where their sums are taken in the pass over rows; no device has a say in it.

    interleaved: of so many groups one row after the other, or as many as a block has side by side, goes to the next.
    """

    groups: int
    rows_of_group: int
    interleaved: int


def row_groups(rows: int, cols: int) -> RowGroups:
    """Return the groups of rows: those that were measured as the best where there are rows enough.

    Fewer rows of many columns are cut into as many groups as are in work at once: more would take another turn.
    """
    first_cols, last_cols, few, rows_of_few = NUMBERS.few_rows
    are_few = first_cols <= cols <= last_cols and rows <= few
    least = rows_of_few if are_few else NUMBERS.min_rows_of_group
    least = max(least, NUMBERS.min_elements_of_group // cols)
    if cols % INTERLEAVED == 0:
        turns = (each for each in NUMBERS.at_once if each[0] <= cols <= each[1])
        _, _, at_once, fewest, most = next(turns, (0, 0, 0, 1, 0))
        if fewest <= rows <= most:
            each = max(NUMBERS.min_rows_of_group, -(-rows // at_once))
            groups = -(-rows // each)
            return RowGroups(groups, each, groups)
    of_cols = next((groups for up_to, groups in NUMBERS.groups if cols <= up_to), NUMBERS.wide_groups)
    wanted = max(1, min(NUMBERS.max_groups, of_cols) // INTERLEAVED) * INTERLEAVED
    each = max(least, -(-rows // wanted))
    groups = -(-rows // (each * INTERLEAVED)) * INTERLEAVED
    return RowGroups(groups, each, groups if cols <= NUMBERS.groups[-1][0] else INTERLEAVED)


def row_groups_apart(rows: int, cols: int) -> RowGroups:
    """Return the same of rows whose elements lie apart: groups are cut at the tiles of a plan (summed_apart.cuh)."""
    wanted = next(
        (groups for up_to, groups in NUMBERS.apart_groups if cols <= up_to), NUMBERS.apart_groups[-1][1]
    )
    return RowGroups(max(1, min(wanted, rows // NUMBERS.min_rows_apart)), 0, 1)
