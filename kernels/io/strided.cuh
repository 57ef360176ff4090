// Where a row begins in an array of any strides.
#pragma once
#include <base/arithmetic.cuh>

namespace cupynorm {

// A division by what is known at the launch: of less than 2^31 two instructions instead of twenty (Granlund and
// Montgomery 1994). multiplier and shift: cupynorm/lower/mirrors.py, division.
inline int64 quotient(int64 index, int64 divisor, unsigned multiplier, unsigned shift) {
  if ((index | divisor) >> 31) return static_cast<unsigned long long>(index) / static_cast<unsigned long long>(divisor);
  return (multiply_high(unsigned(index), multiplier) + unsigned(index)) >> shift;
}

// A column, counted in steps of kApart columns from the one at which the pointers to its rows begin. kShifted: of a
// thread that has two neighbouring rows, or one (ShiftedRows in row/own_rows.cuh); `both` says which.
template <int kApart, bool kShifted = false>
struct Step {
  int number;
};
template <int kApart>
struct Step<kApart, true> {
  int number;
  bool both;
};
// The same of a column by its number.
template <typename Index>
struct ShiftedColumn {
  Index number;
  bool both;
  operator Index() const { return number; }
};
template <typename Index>
inline constexpr bool kIsStep = false;
template <int kApart, bool kShifted>
inline constexpr bool kIsStep<Step<kApart, kShifted>> = true;
template <typename Index>
inline constexpr bool kIsShifted = false;
template <int kApart>
inline constexpr bool kIsShifted<Step<kApart, true>> = true;
template <typename Index>
inline constexpr bool kIsShifted<ShiftedColumn<Index>> = true;
// How many columns behind the one that pointers begin at.
template <typename Index>
inline Index column_of(Index col) {
  return col;
}
template <typename Index>
inline Index column_of(ShiftedColumn<Index> col) {
  return col.number;
}
template <int kApart, bool kShifted>
inline int column_of(Step<kApart, kShifted> step) {
  return kApart * step.number;
}
// Whether columns that lie so are at one distance from one another, so that Steps say where they are.
template <class Cols>
inline constexpr bool kEvenlyApart = false;

// Where index i of some flattened axes lies: in elements, outermost axis first; neighbours that can be one axis are
// one. Where the innermost axis has steps of 1 and a multiple of N elements, as the other steps are, so do the next N
// from a multiple of N on: rows in runs are loaded and stored in vectors.
template <int kAxes>
struct Strided {
  int64 extent[kAxes];  // extent[0] is not used
  int64 stride[kAxes];
  unsigned multiplier[kAxes], shift[kAxes];

  int64 offset(int64 index) const {
    int64 sum = 0;
#pragma unroll
    for (int axis = kAxes - 1; axis > 0; --axis) {
      const int64 outer = quotient(index, extent[axis], multiplier[axis], shift[axis]);
      sum += (index - outer * extent[axis]) * stride[axis];
      index = outer;
    }
    return sum + index * stride[0];
  }
};

// One axis: a kernel's arguments come in lines of 64 bytes, and fewer then do.
template <>
struct Strided<1> {
  int64 stride[1];
  int64 offset(int64 index) const { return index * stride[0]; }
  template <int kApart, bool kShifted>
  int64 offset(Step<kApart, kShifted> step) const {
    return stride[0] * (kApart * step.number);
  }
};
template <>
inline constexpr bool kEvenlyApart<Strided<1>> = true;

// How many of all indices are along the innermost axis.
template <int kAxes>
inline int64 innermost_extent(const Strided<kAxes>& index, int64 all) {
  if constexpr (kAxes == 1) return all;
  else return index.extent[kAxes - 1];
}

// The same of operands, in 32 bits: fewer than 2^31 indices, and places within 2^31 of the first. kRepeats: all of the
// innermost axis lie at one place, as one length does for all of a batch's queries.
template <int kAxes, bool kRepeats>
struct Strided32 {
  unsigned extent[kAxes];
  int stride[kAxes];
  unsigned multiplier[kAxes], shift[kAxes];

  int64 offset(int64 row) const {
    unsigned index = unsigned(row);
    int sum = 0;
#pragma unroll
    for (int axis = kAxes - 1; axis > 0; --axis) {
      const unsigned outer = (multiply_high(index, multiplier[axis]) + index) >> shift[axis];
      if (!kRepeats || axis < kAxes - 1) sum += int(index - outer * extent[axis]) * stride[axis];
      index = outer;
    }
    return sum + int(index) * stride[0];
  }
  // one instruction, with the addition to a pointer, where the number of the step is known
  template <int kApart, bool kShifted>
  int64 offset(Step<kApart, kShifted> step) const {
    static_assert(kAxes == 1, "the others lie at several distances");
    return int64(stride[0]) * (kApart * step.number);
  }
};
template <bool kRepeats>
inline constexpr bool kEvenlyApart<Strided32<1, kRepeats>> = true;

// Where a column of a row lies.
template <typename T, class Cols, typename Index>
inline const T* place_in_row(const T* row, const Cols& cols, Index col) {
  return row + cols.offset(col);
}
template <typename T, bool kRepeats, int kApart, bool kShifted>
inline const T* place_in_row(const T* row, const Strided32<1, kRepeats>& cols, Step<kApart, kShifted> step) {
  return behind(row, cols.stride[0], kApart * int(sizeof(T)) * step.number);
}

// The same of columns that lie next to one another.
struct Adjacent {
  template <typename Index>
  static auto offset(Index col) {
    return column_of(col);
  }
};
template <class Cols>
inline constexpr bool kIsAdjacent = false;
template <>
inline constexpr bool kIsAdjacent<Adjacent> = true;

}  // namespace cupynorm
