"""Sets of arrays that timed calls rotate among, so that none is in the L2 cache when its turn comes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupynorm._dtypes import Dtype, dtype_of
from cupynorm.catalog import forms
from cupynorm.catalog.form import Arrays, Form, Given
from cupynorm.runtime import devices
from cupynorm.tools.results import Point

ROTATION_BYTES = 512 << 20  # all sets together: several times any L2 cache
GRAPH_BYTES = 3 << 29  # a graph with large buffers moves at least this much: 0.4 ms on an H200
MOST_SETS, MOST_CALLS = 512, 1024  # of a graph: capturing more takes longer than measuring them
ALIGNMENT = 256  # of every buffer, in bytes
# Parameters that are a larger share of the bytes rotate as x does. Smaller ones stay in L2, as in real use.
ROTATED_SHARE = 0.01
PATTERN = 1 << 20  # different numbers in x


def sets_for(bytes_of_one: int) -> int:
    """Return how many sets of this size to rotate among, so that none is still in L2 when its turn comes."""
    return max(2, min(MOST_SETS, math.ceil(ROTATION_BYTES / max(1, bytes_of_one))))


def calls_for(bytes_of_one: int, sets: int) -> int:
    """Return how many calls a graph holds: whole rotations, so many that launching it takes negligible time."""
    turns = math.ceil(GRAPH_BYTES / max(1, bytes_of_one * sets))
    return sets * max(1, min(turns, MOST_CALLS // sets))


@dataclasses.dataclass(frozen=True)
class Set:
    """The arrays of one call, and a source and target of as many bytes to copy, in the memory of x and y."""

    arrays: Arrays
    copy: tuple[Any, Any]


def allocate(point: Point, bytes_moved: int, weights: Dtype | None = None) -> list[Set]:
    """Allocate the sets to rotate among, and fill the inputs. weights: the dtype of gamma and beta; default: x's.

    Each set has one block of memory: inputs at its start, outputs behind them. The copy goes from the first part to the
    second, so that inputs stay as they are.
    """
    module = devices.cupy()
    dtype = dtype_of(point.dtype)
    given = forms.form(point.op).given(point.rows, point.cols, dtype)
    columns = {
        name: each._replace(dtype=weights or each.dtype)
        for name, each in given.items()
        if each.holds != "result" and len(each.shape) == 1
    }
    read = {name: each for name, each in given.items() if each.holds != "result" and name not in columns}
    written = {"y": given["y"]}  # calls allocate further results
    shift = point.offset * dtype.itemsize
    half = _aligned(bytes_moved // 2 + shift)
    behind = max(half, _extent(read, shift))
    one = behind + max(half, _extent(written, shift))
    count = sets_for(bytes_moved)
    column_bytes = _extent(columns, 0)
    rotated = sum(each.bytes for each in columns.values()) > ROTATED_SHARE * bytes_moved
    arena = module.empty(count * one, np.uint8)
    apart = module.empty((count if rotated else 1) * column_bytes, np.uint8)
    patterns = _patterns(forms.form(point.op), point, read | columns)
    found = []
    for i in range(count):
        own = column_bytes * (i if rotated else 0)
        arrays = {
            **_placed(read, arena, one * i, shift, patterns),
            **_placed(columns, apart, own, 0, patterns if i == 0 or rotated else {}),
            **_placed(written, arena, one * i + behind, shift, {}),
        }
        ends = (
            module.ndarray((half,), np.dtype(np.uint8), memptr=arena.data + one * i + at)
            for at in (0, behind)
        )
        source, target = ends
        found.append(Set({name: arrays[name] for name in given if name in arrays}, (source, target)))
    module.cuda.get_current_stream().synchronize()  # they are used on another stream
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _extent(given: Mapping[str, Given], shift: int) -> int:
    """Return the bytes that arrays take one after the other."""
    return sum(_aligned(each.bytes + shift) for each in given.values())


def _placed(
    given: Mapping[str, Given], memory: Any, at: int, shift: int, patterns: Mapping[str, Any]
) -> Arrays:
    """Return arrays filled with their patterns, in the memory from `at` on, `shift` bytes after aligned addresses."""
    found: Arrays = {}
    for name, each in given.items():
        array = devices.cupy().ndarray(each.shape, each.dtype, memptr=memory.data + at + shift)
        if name in patterns:
            _fill(array, patterns[name])
        found[name] = array
        at += _aligned(each.bytes + shift)
    return found


def _patterns(what: Form, point: Point, given: Mapping[str, Given]) -> Arrays:
    """Return the bytes to fill arrays with, by name, on the device. Zeros would need less power than real data.

    Where arrays follow from others, as statistics do, patterns are whole rows, whose numbers belong together.
    """
    if what.natural is None:
        numbers = {name: _numbers(each, point.cols, PATTERN) for name, each in given.items()}
    else:
        rows = max(1, min(point.rows, PATTERN // point.cols))
        few = what.given(rows, point.cols, dtype_of(point.dtype))
        numbers = {
            name: np.roll(np.resize(_numbers(each, point.cols, rows * point.cols), few[name].shape), number)
            for number, (name, each) in enumerate(given.items())  # dy is not x
        }
    cast = {name: each.astype(given[name].dtype) for name, each in numbers.items()}
    cast |= forms.naturals(what, cast)
    return {name: devices.cupy().asarray(each.reshape(-1).view(np.uint8)) for name, each in cast.items()}


def _numbers(given: Given, cols: int, count: int) -> Any:
    """Return so many numbers for an array; what repeats itself may be fewer."""
    if given.holds == "lengths":
        return np.full(count, cols)
    if given.holds == "ragged":
        return forms.ragged(given.shape[0], cols).reshape(-1)
    if given.holds == "labels":
        return np.random.default_rng(0).integers(0, cols, count)
    if given.holds == "divisors":
        return 1 + np.random.default_rng(0).random(count)
    if given.holds == "mask":
        return np.random.default_rng(0).random(count) < forms.KEPT
    return _normal(count)


@functools.cache
def _normal(count: int) -> Any:
    return np.random.default_rng(0).standard_normal(count)


def _fill(array: Any, pattern: Any) -> None:
    """Repeat the pattern by copies that double the filled part. Every version of CuPy can do that, in every dtype."""
    done = min(array.nbytes, pattern.nbytes)
    array.data.copy_from_device_async(pattern.data, done)
    while done < array.nbytes:
        more = min(done, array.nbytes - done)
        (array.data + done).copy_from_device_async(array.data, more)
        done += more
