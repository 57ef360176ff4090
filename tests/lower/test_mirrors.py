"""Host mirrors of the functors: axes collapsed, vectors from alignment, structs laid out as C++ lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynorm.call.arguments import view
from cupynorm.call.view import View
from cupynorm.lower import mirrors
from tests import structs
from tests.simulator import build

F4 = np.dtype(np.float32)
F2 = np.dtype(np.float16)


def leading(array: np.ndarray[Any, Any], axes: int = 1) -> View:
    return view(array).split(axes)[0]


@pytest.mark.parametrize(
    ("index", "collapsed"),
    [
        (np.s_[:], ((24,), (10,))),
        (np.s_[:, :, :, :7], ((24,), (10,))),
        (np.s_[::2], ((12,), (10,))),
        (np.s_[:, ::2], ((2, 2, 4), (120, 80, 10))),
        (np.s_[:, :, 1:], ((6, 3), (40, 10))),
        (np.s_[1, 1, 1], ((1,), (0,))),
        (np.s_[:, ::-1], ((2, 3, 4), (120, -40, 10))),
    ],
)
def test_leading_axes_collapse_as_far_as_strides_allow(index: Any, collapsed: Any) -> None:
    x = np.zeros((2, 3, 4, 10), np.float32)[index]

    assert leading(x).collapsed() == collapsed


def test_every_element_of_a_strided_view_is_found() -> None:
    x = np.arange(2 * 3 * 4 * 10, dtype=np.float32).reshape(2, 3, 4, 10)[:, ::-2, 1:]
    extents, strides = leading(x).collapsed()

    found = []
    for row in range(int(np.prod(extents))):
        index, offset = row, 0
        for extent, stride in list(zip(extents, strides, strict=True))[::-1]:
            offset, index = offset + index % extent * stride, index // extent
        found.append(offset)

    first = x.__array_interface__["data"][0]
    rows = [x[i].__array_interface__["data"][0] for i in np.ndindex(x.shape[:-1])]
    assert found == [(row - first) // 4 for row in rows]


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_divisions_are_exact() -> None:
    """With what the host finds for each divisor, around every multiple that may go wrong, and where 31 bits end."""
    random = np.random.default_rng(0)
    divisors = [1, 2, 3, 7, 12, 1000, 1023, 1024, 1025, 641, 6700417, 2**31 - 1, 2**31, 2**40]
    divisors += random.integers(1, 2**31, 300).tolist()
    numbers = []
    for divisor in divisors:
        most = max(1, (2**31 - 1) // divisor)
        multiples = [0, 1, most, *random.integers(0, most + 1, 10).tolist()]
        near = [multiple * divisor + more for multiple in multiples for more in (-1, 0, 1, divisor - 1)]
        numbers += [(n, divisor) for n in (*near, 2**31 - 1, 2**31, 2**45 + 12345) if n >= 0]
    indices, by = np.array(numbers, np.int64).T
    multiplier, shift = np.array([mirrors.division(int(each)) for each in by]).T
    text = """
struct Tested {
  static void apply(const double* in, double* out) {
    const cupynorm::int64 number = in[0], divisor = in[1];
    out[0] = double(cupynorm::quotient(number, divisor, unsigned(in[2]), unsigned(in[3])));
  }
  static void apply(const float*, float*) {}
};
"""
    given = [each.astype(np.float64) for each in (indices, by, multiplier, shift)]

    found = structs.run(f"namespace cupynorm {{{text}}}", "Tested", 4, 1, given, "#include <io/affine.cuh>\n")

    np.testing.assert_array_equal(found[0].astype(np.int64), indices // by)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_ordered_bits_are_in_the_order_of_the_numbers_and_lead_back() -> None:
    finite = np.float32([1e-45, 1.2e-38, 0.5, 1.0, 1.0000001, 65504.0, 3.4e38])
    numbers = np.concatenate([[-np.inf], -finite[::-1], [-0.0, 0.0], finite, [np.inf, np.nan]]).astype(
        np.float32
    )
    text = """
struct Tested {
  static void apply(const float* in, float* out) {
    const unsigned bits = cupynorm::ordered_bits(in[0]);
    out[0] = cupynorm::from_ordered_bits(bits);
    out[1] = cupynorm::as_float(bits);
  }
  static void apply(const double*, double*) {}
};
"""
    back, bits = structs.run(
        f"namespace cupynorm {{{text}}}", "Tested", 1, 2, [numbers], "#include <base/math.cuh>\n"
    )

    np.testing.assert_array_equal(back.view(np.uint32), numbers.view(np.uint32))
    assert (np.diff(bits.view(np.uint32).astype(np.int64)) > 0).all()


BATCHES = np.zeros((32, 1, 1), np.int32)
CUBE = np.zeros((6, 10, 7, 3), np.float32)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize(
    ("array", "shape", "cpp"),
    [
        (BATCHES, (32, 12, 128), "<2, true>"),  # a length for all queries of all heads
        (BATCHES[::-1], (32, 12, 128), "<2, true>"),
        (np.zeros((5, 1, 9), np.int8), (5, 4, 9), "<3, false>"),
        (CUBE[::2, ::-3, :, 0], (3, 4, 7), "<3, false>"),
        (np.zeros((), np.int64), (4, 3), "<1, false>"),
    ],
)
def test_places_in_32_bits_are_those_of_numpy(array: Any, shape: tuple[int, ...], cpp: str) -> None:
    stretched = np.broadcast_to(array, shape)
    places = np.array(stretched.strides) @ np.indices(shape).reshape(len(shape), -1)
    mirror = mirrors.strided32(view(array).broadcast_to(shape))
    values = ", ".join("{" + ", ".join(map(str, each)) + "}" for each in mirror.values)
    text = f"""
struct Tested {{
  static void apply(const double* in, double* out) {{
    constexpr {mirror.cpp} places = {{{values}}};
    static_assert(sizeof(places) == {mirror.dtype.itemsize}, "host and device layouts differ");
    out[0] = double(places.offset(cupynorm::int64(in[0])));
  }}
  static void apply(const float*, float*) {{}}
}};
"""
    rows = np.arange(len(places), dtype=np.float64)

    found = structs.run(
        f"namespace cupynorm {{{text}}}", "Tested", 1, 1, [rows], "#include <io/affine.cuh>\n"
    )

    assert mirror.cpp == f"cupynorm::Strided32{cpp}"
    np.testing.assert_array_equal(found[0] * array.itemsize, places)


@pytest.mark.parametrize(("rows", "stride"), [(2**31, 1), (2, 2**31), (2**16, 2**16)])
def test_places_that_32_bits_do_not_count_are_found_in_64(rows: int, stride: int) -> None:
    rows_of_halves = View(0, (rows,), (2 * stride,), F2)

    assert mirrors.strided32(rows_of_halves).cpp == "cupynorm::Strided<1>"
    assert mirrors.strided32(View(0, (2,), (2 * (stride - 1),), F2)).cpp == "cupynorm::Strided32<1, false>"


@pytest.mark.parametrize(
    ("shape", "normalised", "cpp"),
    [
        ((6,), (6,), "cupynorm::Column<float, 4>"),
        ((2, 3), (2, 3), "cupynorm::Column<float, 4>"),
        ((3,), (2, 3), "cupynorm::StridedColumn<float, 2>"),
        ((2, 1), (2, 3), "cupynorm::StridedColumn<float, 2>"),
        ((1,), (6,), "cupynorm::StridedColumn<float, 1>"),
        ((), (6,), "cupynorm::StridedColumn<float, 1>"),
    ],
)
def test_a_column_is_contiguous_or_strided(
    shape: tuple[int, ...], normalised: tuple[int, ...], cpp: str
) -> None:
    strides = tuple(int(np.prod(shape[i + 1 :])) * 4 for i in range(len(shape)))
    parameter = View(1 << 20, shape, strides, F4)

    assert mirrors.column(parameter, normalised).cpp == cpp


def test_a_misaligned_column_is_read_in_narrower_accesses() -> None:
    assert mirrors.column(View(1 << 20 | 8, (6,), (4,), F4), (6,)).cpp == "cupynorm::Column<float, 2>"
    assert (
        mirrors.column(View(1 << 20 | 2, (6,), (2,), F2), (6,)).cpp == "cupynorm::Column<cupynorm::half, 1>"
    )


def test_a_column_that_does_not_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\) does not broadcast to \(6,\)"):
        mirrors.column(View(0, (5,), (4,), F4), (6,))
