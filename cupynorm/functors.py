"""Host twins of kernels/cupynorm/functors.cuh and of the ops: how each struct is spelled, laid out and filled."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupynorm._dtypes import Dtype, cpp

POINTER = np.dtype(np.uint64)
EMPTY = np.dtype([("none", np.uint8)])  # C++ gives an empty struct one byte


class View(NamedTuple):
    """An array as a kernel sees it: pointer in bytes, strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype

    def split(self, axes: int) -> tuple[View, View]:
        """Return the leading axes and the `axes` trailing ones, as two views of the same first element."""
        at = len(self.shape) - axes
        leading = View(self.pointer, self.shape[:at], self.strides[:at], self.dtype)
        return leading, View(self.pointer, self.shape[at:], self.strides[at:], self.dtype)

    def collapsed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return extents and strides, in elements, with neighbouring axes that can be one made one; never none."""
        extents: list[int] = []
        strides: list[int] = []
        for extent, stride_bytes in zip(self.shape, self.strides, strict=True):
            if extent == 1:
                continue
            stride = stride_bytes // self.dtype.itemsize
            if extents and strides[-1] == stride * extent:
                extents[-1] *= extent
                strides[-1] = stride
            else:
                extents.append(extent)
                strides.append(stride)
        return (tuple(extents), tuple(strides)) if extents else ((1,), (0,))

    def is_contiguous(self) -> bool:
        """Say whether the elements lie next to each other in C order."""
        extents, strides = self.collapsed()
        return len(extents) == 1 and (extents[0] == 1 or strides[0] == 1)

    def broadcast_to(self, shape: tuple[int, ...]) -> View:
        """Return the view stretched to `shape`, as NumPy broadcasts; ValueError if it cannot be."""
        missing = len(shape) - len(self.shape)
        if missing < 0 or any(
            have not in (1, want) for have, want in zip(self.shape, shape[missing:], strict=True)
        ):
            raise ValueError(f"shape {self.shape} does not broadcast to {shape}")
        strides = tuple(
            0 if have != want else stride
            for have, want, stride in zip(self.shape, shape[missing:], self.strides, strict=True)
        )
        return View(self.pointer, shape, (0,) * missing + strides, self.dtype)


class Struct(NamedTuple):
    """A C++ struct passed by value: its spelling, its layout (align=True), and its values in order."""

    cpp: str
    dtype: Dtype
    values: tuple[Any, ...]


def strided(view: View) -> Struct:
    """Twin of Strided: where index i of the view's axes, flattened, lies."""
    extents, strides = view.collapsed()
    axes = len(extents)
    dtype = np.dtype([("extent", np.int64, (axes,)), ("stride", np.int64, (axes,))], align=True)
    return Struct(str(axes), dtype, (extents, strides))


def direct(name: str, rows: View) -> Struct:
    """Twin of DirectLoad and DirectStore."""
    index = strided(rows)
    dtype = np.dtype([("pointer", POINTER), ("rows", index.dtype)], align=True)
    return Struct(f"cupynorm::{name}<{cpp(rows.dtype)}, {index.cpp}>", dtype, (rows.pointer, index.values))


def column(parameter: View | None, shape: tuple[int, ...]) -> Struct:
    """Twin of NoColumn, Column and StridedColumn: a parameter of the normalised axes, which have `shape`."""
    if parameter is None:
        return Struct("cupynorm::NoColumn", EMPTY, (0,))
    stretched = parameter.broadcast_to(shape)
    if stretched.is_contiguous():
        width = aligned_elements(parameter.pointer, parameter.dtype)
        dtype = np.dtype([("pointer", POINTER)], align=True)
        return Struct(f"cupynorm::Column<{cpp(parameter.dtype)}, {width}>", dtype, (parameter.pointer,))
    index = strided(stretched)
    dtype = np.dtype([("pointer", POINTER), ("cols", index.dtype)], align=True)
    values = (parameter.pointer, index.values)
    return Struct(f"cupynorm::StridedColumn<{cpp(parameter.dtype)}, {index.cpp}>", dtype, values)


def affine_store(rows: View, gamma: Struct, beta: Struct) -> Struct:
    """Twin of AffineStore; of DirectStore if there is neither gamma nor beta."""
    to = direct("DirectStore", rows)
    if gamma.dtype == beta.dtype == EMPTY:
        return to
    dtype = np.dtype([("to", to.dtype), ("gamma", gamma.dtype), ("beta", beta.dtype)], align=True)
    spelling = f"cupynorm::AffineStore<{cpp(rows.dtype)}, {strided(rows).cpp}, {gamma.cpp}, {beta.cpp}>"
    return Struct(spelling, dtype, (to.values, gamma.values, beta.values))


def aligned_elements(pointer: int, dtype: Dtype) -> int:
    """Return how many elements, a power of two, one access of at most 16 bytes at this pointer may move."""
    return max(1, math.gcd(pointer, 16) // dtype.itemsize)


def pack_width(x: View, y: View, axes: int) -> int:
    """Return the widest pack, in elements, that columns, row strides and both pointers allow.

    A pack of the wider of the two types is at most 16 bytes: every access then fills whole sectors.
    """
    cols = math.prod(x.split(axes)[1].shape)
    return math.gcd(_widest(x, y), cols, *_starts(x, axes), *_starts(y, axes))


def _widest(x: View, y: View) -> int:
    return 16 // max(x.dtype.itemsize, y.dtype.itemsize)


def _starts(each: View, axes: int) -> tuple[int, ...]:
    """Return where the first row begins and how far the others are from one another, in elements."""
    extents, strides = each.split(axes)[0].collapsed()
    offset = each.pointer // each.dtype.itemsize if each.pointer % each.dtype.itemsize == 0 else 1
    return (offset, *(stride for extent, stride in zip(extents, strides, strict=True) if extent > 1))


class Lie(NamedTuple):
    """How rows lie in packs of the `widest` kind, as _plan.Problem has it."""

    widest: int
    peel: int
    period: int


def lie(x: View, y: View, axes: int) -> Lie:
    """Return how rows lie that begin at no such pack. Every pointer and stride is one of whole elements."""
    widest = _widest(x, y)
    of_x, of_y = (tuple(start % widest for start in _starts(each, axes)) for each in (x, y))
    steps = of_y[1:]
    period = 1 if not steps else widest // math.gcd(widest, steps[0]) if len(steps) == 1 else 0
    return Lie(widest, 1 if of_x == of_y else 2, period)


def arguments(op: Struct, load: Struct, store: Struct, rows: int, cols: int) -> Struct:
    """Twin of Arguments: the one argument of every row kernel."""
    dtype = np.dtype(
        [
            ("load", load.dtype),
            ("store", store.dtype),
            ("op", op.dtype),
            ("rows", np.int64),
            ("cols", np.int64),
        ],
        align=True,
    )
    spelling = f"cupynorm::Arguments<{op.cpp}, {load.cpp}, {store.cpp}>"
    return Struct(spelling, dtype, (load.values, store.values, op.values, rows, cols))
