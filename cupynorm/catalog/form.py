"""Form: a call that is measured, tested and explained; forms.py has all that exist."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupynorm import _dtypes
from cupynorm._dtypes import compute_dtype, dtype_name, dtype_of
from cupynorm.catalog import bounds, op_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cupynorm.lower.row import RowOp

Array = np.ndarray[Any, Any]
Arrays = dict[str, Any]

# rows x columns that are measured by default
EVEN = tuple((49152, cols) for cols in (128, 512, 1024, 2048, 4096, 8192))
LONG = tuple((4096, cols) for cols in (16384, 20480, 32768, 50257, 131072))  # rows that several blocks share
TOKENS = ((4096, 768),)  # 32 texts of 128 tokens, BERT-base


class Given(NamedTuple):
    """An array of a form's call.

    holds: "numbers", "divisors" (numbers that are not 0), "mask" (bytes), "lengths" (all columns), "ragged" (lengths),
    "labels" (columns) or "result" (it is written).
    """

    shape: tuple[int, ...]
    dtype: Any
    holds: str = "numbers"

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)


class Targets(NamedTuple):
    """Shares of the copy rate by a row's columns, each for elements of two bytes and for those of four.

    narrow: below 512 columns. medium: 512 to 16384. long: more. odd: from 1000 columns on, where a point is odd.
    """

    narrow: tuple[float, float]
    medium: tuple[float, float]
    long: tuple[float, float]
    odd: tuple[float, float]

    def at(self, cols: int, dtype: Any, *, odd: bool) -> float:
        """Return the share that is wanted at such a point."""
        of_width = self.narrow if cols < 512 else self.medium if cols <= 16384 else self.long  # noqa: PLR2004
        wanted = self.odd if odd and cols >= 1000 else of_width  # noqa: PLR2004
        return wanted[dtype_of(dtype).itemsize > 2]  # noqa: PLR2004

    def __str__(self) -> str:
        """Return it as a cell of a table: of narrow, medium, long and odd rows."""
        return ", ".join(str(two) if two == four else f"{two}/{four}" for two, four in self)


@dataclasses.dataclass(frozen=True)
class Form:
    """A call that is measured, tested and explained.

    given: returns the arrays that are read or written, from rows, columns and dtype; "y" is the one that out= takes.
    call: the public function, given arrays by name and options. reference: the expected results, from the definition,
    in float64. torch: the same in PyTorch, given its module and tensors; None where it has none. target: the share of
    the copy rate that is wanted on an H200, one or by columns; with `beside`, the share of that form's rate instead.
    unread: returns how many elements of x need not be read, from the shape of x. axis: of a row, in its results.
    optional: arrays that the call may go without.
    """

    name: str
    given: Callable[[int, int, Any], dict[str, Given]]
    call: Callable[..., Any]
    reference: Callable[[Arrays], tuple[Array, ...]]
    torch: Callable[[Any, Arrays], Any] | None = None
    target: float | Targets | None = None
    beside: str = ""
    unread: Callable[[tuple[int, ...]], int] | None = None
    shapes: tuple[tuple[int, int], ...] = EVEN
    random: bool = False  # peers draw other numbers: results are not compared
    quantized: str = ""
    axis: int = -1
    terms: Callable[[Arrays], tuple[bounds.Terms, ...]] | None = None
    natural: Callable[[Arrays], Arrays] | None = None
    optional: tuple[str, ...] = ()

    def without(self, names: Collection[str]) -> Form:
        """Return the same without some of its optional arrays, of which `reference` and `torch` know nothing."""
        for name in names:
            if name not in self.optional:
                others = ", ".join(self.optional) or "none of its arrays"
                raise ValueError(f"{self.name} cannot go without {name!r}: it may leave out {others}")

        def given(rows: int, cols: int, dtype: Any) -> dict[str, Given]:
            return {name: each for name, each in self.given(rows, cols, dtype).items() if name not in names}

        return dataclasses.replace(self, given=given) if names else self

    @property
    def alone(self) -> bool:
        """Whether it is a row op with nothing around it: one of op_table.OPS."""
        return any(self.name == op.name for op in op_table.OPS)

    @property
    def row(self) -> RowOp:
        """The row op that is alone."""
        return op_table.op(self.name).row

    @property
    def missing(self) -> str:
        """The package that must be installed before it can be called; empty as a rule."""
        return "ml_dtypes" if self.quantized.startswith("float8") and "bfloat16" not in _dtypes.DTYPES else ""

    def right(self, given: Arrays) -> list[bounds.Right]:
        """Return the expected results of a call, with what their errors are measured by."""
        exact = self.reference(given)
        if self.terms is None:
            return [bounds.Right(each, axis=self.axis) for each in exact]
        function, x = self.name.partition("/")[0], dtype_of(given["x"].dtype)
        return [
            bounds.Right(
                each,
                terms,
                bounds.bound(function, terms.result).multiple,
                dtype_name(compute_dtype(x)),
                dtype_name(x),
            )
            for each, terms in zip(exact, self.terms(given), strict=True)
        ]

    def bytes_moved(self, rows: int, cols: int, dtype: Any) -> int:
        """Return the bytes that any implementation moves: each input is read once, each output is written once."""
        given = self.given(rows, cols, dtype_of(dtype))
        unread = 0 if self.unread is None else self.unread(given["x"].shape) * given["x"].dtype.itemsize
        return sum(each.bytes for each in given.values()) - unread


def wide(x: Any) -> Array:
    """Return an array in float64."""
    return np.asarray(x, np.float64)
