"""Problem: what is to be launched, in numbers."""

from __future__ import annotations

from cupynorm._values import dataclass
from cupynorm.plan.config import (
    COUNTER_BYTES,
    DOUBLE_BYTES,
    HALF_BYTES,
    MESSAGE_NUMBERS,
    MOST_ROW_NUMBERS,
    Plan,
    in_accesses,
    room_bytes,
)


@dataclass(frozen=True)
class Problem:
    """What is to be launched, in numbers: no array and no device.

    Attributes
    ----------
    rows, cols
        Rows, and elements a row.
    vector
        Neighbouring elements that one access can move: columns, strides and every pointer's alignment allow it.
    load_bytes, compute_bytes
        Bytes of an element of x, and of the type that the arithmetic is in.
    parameter_bytes
        Bytes of an element of each affine parameter, such as gamma.
    widest_vector, unaligned, alignment_period
        Where rows do not begin at 16-byte vectors: elements of such a vector; 1 if x is aligned as y is, else 2;
        after how many rows a row has the same alignment again, 0 if that cannot be said.
    fused
        Something is fused around the op. Rows then wait in registers, and at most go through shared memory first.
    load_operands, epilogue_operands
        Bytes of an element of each array that is loaded with x, and of each that the results need.
    output_bytes, outputs
        Bytes of an element of the results, and how many arrays are written.
    direct_load
        Nothing is loaded but x, as it is.
    waits_as_loaded
        What the op is given takes few steps, of x and numbers of its row: x itself may wait, and they are taken again.
    holds_operands
        For rows whose elements lie apart, in steps: what the op is given takes few steps, of x and of operands of each
        element, which may wait beside x as they were loaded, and it takes sums of that (kernels/row/whole.cuh).
    extra_registers
        Registers that the fused arithmetic needs.
    interval_mask, band_cols
        A mask keeps an interval of each row's columns. How many columns lie in its band (causal, window), on average;
        0: it has none.
    most_kept
        How many columns a row keeps at most, as far as that follows from the band, where a mask keeps an interval or
        the whole row; 0: it keeps neither.
    rounds
        The op goes through a row several times while it is on the chip: it waits in registers or in shared memory.
    sums_of_bytes
        Rows of bytes, of which only sums are taken, each element once: none waits in registers as a number.
    masked
        A mask drops elements where there are affine parameters; without these, what is fused is taken to be masked.
    staged_operand_bytes
        Bytes of an element, beside x's, that go through shared memory where rows are on their way there.
    fields
        How many numbers of the compute type an element has once it is loaded: 2 for the backward ops.
    late_exponential
        Each result takes an exponential, which nothing before it took.
    early_exponential
        An element's exponential waits in its place, which is taken again where x waits as it was loaded.
    column_sums, row_groups
        How many sums over rows are taken in the same pass, for each column, and in how many groups of rows. Rows then
        wait in registers, in warp, block or cluster, and so do the sums; those that lie apart in split, too, and their
        sums in shared memory.
    across
        For rows whose elements lie apart from one another: how many rows are neighbours in memory, element by element;
        1 if none are. 0: rows are contiguous.
    shifted
        For rows whose elements lie apart and whose neighbours do not come in whole vectors, as of an odd number: a
        thread may have two neighbouring rows all the same, those that are aligned together in its columns
        (kernels/row/own_rows.cuh).
    stretches, adjoining_stretches
        For rows whose elements lie apart: those that are neighbours are one stretch of memory, in x, in what is loaded
        beside it for each element, and in what is written (kernels/row/stretch.cuh). Bytes of an element of each array
        of which a stretch waits in shared memory: x, whose places results of its size take, and others; none where
        some array has no stretches. And whether stretches lie next to one another, so that several are one.
    in_steps
        For rows whose elements lie apart: they are at even distances, and so is what they are computed from. Where all
        threads have as many of them, nothing is asked for each (kernels/row/whole.cuh), and a mask waits as a bit for
        each; its bytes are then none of load_operands.
    room
        There may be room for the messages of blocks of the grid that share rows: few long ones, or those whose elements
        lie apart, or in runs.
    row_numbers
        Numbers of the compute type, at most, in the state of a part of a row (State and pivot) or of a row (Row).
    adjoining
        Rows lie next to one another without a gap, in both x and y, and both begin at a multiple of 16 bytes.
    """

    rows: int
    cols: int
    vector: int
    load_bytes: int
    compute_bytes: int
    parameter_bytes: tuple[int, ...] = ()
    widest_vector: int = 0
    unaligned: int = 0
    alignment_period: int = 1
    fused: bool = False
    load_operands: tuple[int, ...] = ()
    epilogue_operands: tuple[int, ...] = ()
    output_bytes: int = 0
    outputs: int = 1
    direct_load: bool = True
    waits_as_loaded: bool = False
    holds_operands: bool = False
    extra_registers: int = 0
    interval_mask: bool = False
    band_cols: int = 0
    most_kept: int = 0
    staged_operand_bytes: int = 0
    fields: int = 1
    late_exponential: bool = False
    early_exponential: bool = False
    column_sums: int = 0
    row_groups: int = 0
    across: int = 0
    masked: bool = False
    rounds: bool = False
    sums_of_bytes: bool = False
    in_steps: bool = False
    shifted: bool = False
    stretches: tuple[int, ...] = ()
    adjoining_stretches: bool = False
    room: bool = False
    row_numbers: int = MOST_ROW_NUMBERS
    adjoining: bool = False

    @property
    def message_numbers(self) -> int:
        """Numbers that blocks tell one another of a row; in further rounds that is no part of row_numbers."""
        return MESSAGE_NUMBERS if self.rounds else self.row_numbers

    @property
    def slot_bytes(self) -> int:
        """Bytes of what threads or blocks that share a row tell one another of it (SlotWords in row/meeting.cuh)."""
        return in_accesses(self.message_numbers * self.compute_bytes)

    @property
    def may_drop(self) -> bool:
        """Say whether a mask may drop elements; whether one is kept then waits beside it."""
        return self.masked or not (self.direct_load or self.parameter_bytes)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element as the rules count it: as loaded, 2 at least, or of a double if it becomes that."""
        return max(
            self.load_bytes, HALF_BYTES, self.compute_bytes if self.compute_bytes == DOUBLE_BYTES else 0
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as the rules count them."""
        return self.cols * self.element_bytes

    @property
    def kind(self) -> tuple[int, int]:
        """What the rules are sorted by: affine parameters (0, 1, 2 or more) and bytes of an element."""
        return min(2, len(self.parameter_bytes)), self.element_bytes

    @property
    def fusion(self) -> str:
        """What is computed on the way, in the words of the rules: masked, interval, affine or quantized."""
        if not self.parameter_bytes:
            return "interval" if self.interval_mask else "masked"
        return "quantized" if self.output_bytes == 1 else "affine"

    @property
    def masked_statistics(self) -> bool:
        """Whether a mask with a byte for each element drops some of a row of which many numbers are found out."""
        masked = self.fusion == "masked" and self.load_operands == (1,) and self.fields == 1
        return masked and bool(self.output_bytes) and self.row_numbers == MOST_ROW_NUMBERS and not self.rounds

    @property
    def is_of_pairs(self) -> bool:
        """Whether an element is two numbers, each loaded, and nothing is added to the result: softmax's gradients."""
        return self.fields > 1 and bool(self.load_operands) and not self.epilogue_operands

    @property
    def is_weighted(self) -> bool:
        """Whether elements of rows that lie apart come with weights, for statistics of which results are made."""
        apart = self.in_steps and bool(self.load_operands) and self.fields > 1
        return apart and self.output_bytes > 0 and self.row_numbers < MOST_ROW_NUMBERS

    @property
    def band_share(self) -> float:
        """The share of the elements that a mask keeps at most, as far as that follows from shapes."""
        return self.band_cols / self.cols if self.band_cols else 1.0

    @property
    def has_scales(self) -> bool:
        """Whether rows have a scale of each, found by a second reduction and stored beside their bytes."""
        return self.output_bytes == 1 and self.outputs > 1

    @property
    def only_scaled(self) -> bool:
        """Whether halves become bytes with a scale of each row, and nothing is masked, or loaded beside x."""
        beside = self.masked or self.parameter_bytes or self.load_operands or self.epilogue_operands
        return self.has_scales and self.element_bytes == HALF_BYTES and not beside

    @property
    def only_reads(self) -> bool:
        """Whether rows are read as they are, and nothing of their length is written."""
        return self.fused and self.direct_load and self.output_bytes == 0

    @property
    def copies_rows(self) -> bool:
        """Whether fused rows may be copied to shared memory as those of an op alone are: of what is loaded as it is.

        Results are of x's size, so that vectors of both begin at the same columns.
        """
        as_alone = self.direct_load and self.output_bytes == self.load_bytes
        return self.fused and as_alone and not (self.rounds or self.column_sums or self.across)

    @property
    def value_bytes(self) -> int:
        """Bytes of an element as the op is given it: all its fields."""
        return self.compute_bytes * self.fields

    @property
    def vectors(self) -> int:
        """Whole vectors of a row."""
        return self.cols // self.vector

    @property
    def vector_bytes(self) -> int:
        """Bytes that one access to x moves."""
        return self.vector * self.load_bytes

    @property
    def doubles(self) -> bool:
        """Whether the arithmetic is in float64."""
        return self.compute_bytes == DOUBLE_BYTES

    @property
    def same_types(self) -> bool:
        """Whether the affine parameters have x's type, as they had when the rules were measured."""
        return all(size == self.load_bytes for size in self.parameter_bytes)

    @property
    def wide_parameters(self) -> bool:
        """Whether an affine parameter's element takes more registers than one of x."""
        return any(size > self.load_bytes for size in self.parameter_bytes)


def messages_bytes(problem: Problem, plan: Plan) -> int:
    """Return how much memory blocks of the grid need that share rows whose elements lie apart; 0 where none do."""
    if not problem.room or plan.variant != "split":
        return 0
    if not plan.across:
        return room_bytes(problem.rows, problem.cols)
    groups, rows = plan.grid // plan.ctas_per_row, plan.across * plan.vector
    return groups * COUNTER_BYTES + 2 * plan.grid * rows * problem.slot_bytes
