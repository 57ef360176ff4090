// A row divided by its norm: the sum of magnitudes (1), the root of the sum of squares (2), or the largest magnitude.
#pragma once
#include <ops/keeping.cuh>

namespace cupynorm {

// Powers of two near a magnitude, and their reciprocals: such products are exact, and sums of x / unit, or of its
// squares, neither overflow nor vanish.
inline float unit_near(float x) {
  const unsigned bits = magnitude_bits(x) & 0x7f800000u;
  return as_float(bits < 0x00800000u ? 0x00800000u : bits > 0x7e800000u ? 0x7e800000u : bits);
}
inline float one_over_unit(float unit) { return as_float(0x7f000000u - as_bits(unit)); }
inline double unit_near(double x) {
  const unsigned bits = high_word(x) & 0x7ff00000u;
  return as_double(0, bits < 0x00100000u ? 0x00100000u : bits > 0x7fd00000u ? 0x7fd00000u : bits);
}
inline double one_over_unit(double unit) { return as_double(0, 0x7fe00000u - high_word(unit)); }

constexpr int kLargest = 0;  // the order of the norm that is the largest magnitude

// What a mask drops is 0, which adds nothing to a norm: nobody needs to know.
template <typename T, int kCounts, int kOrder>
struct Normalize : OfKept<Normalize<T, kCounts, kOrder>, T, kCounts, (kCounts < kNumbersCount)> {
  using Keep = Keeping<T, kCounts, (kCounts < kNumbersCount)>;
  using Element = typename Keep::Element;
  // unit: near the largest magnitude; of kLargest that magnitude itself, nan where there is one. sum: of (x / unit) to
  // the power of kOrder.
  struct State {
    T unit, sum;
  };
  struct Row {
    T inverse, divisor, factor, norm;
  };

  T* norm;  // one per row, or null if nobody asked

  static State identity() { return {kOrder == kLargest ? T(0) : unit_near(T(0)), 0}; }

  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate valid, T) {
    T largest = 0, sum[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T size = Keep::template weight<N>(valid, i, x[i]) == 0 ? T(0) : magnitude(Keep::value(x[i]));
      largest = kOrder == kLargest ? larger_or_nan(largest, size) : larger(largest, size);
    }
    if constexpr (kOrder == kLargest) return {largest, 0};
    const T unit = unit_near(largest), inverse = one_over_unit(unit);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T weight = Keep::template weight<N>(valid, i, x[i]);
      const T size = weight == 0 ? T(0) : magnitude(Keep::value(x[i])) * inverse;
      const T power = kOrder == 1 ? T(1) : size;
      sum[i % Predicate::kAccumulators] = multiply_add(weight * size, power, sum[i % Predicate::kAccumulators]);
    }
    return {unit, sum_of(sum)};
  }

  // A sum in units of another, larger one.
  static T in_units(State s, T unit) {
    const T ratio = s.unit * one_over_unit(unit);
    return s.sum * (kOrder == 1 ? ratio : ratio * ratio);
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    if constexpr (kOrder == kLargest) return {larger_or_nan(a.unit, b.unit), 0};
    const T unit = larger(a.unit, b.unit);
    return {unit, in_units(a, unit) + in_units(b, unit)};
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    if constexpr (kOrder == kLargest) return {from_bits(lanes.max(magnitude_bits(s.unit))), 0};
    const T unit = lanes.max(s.unit);
    return {unit, lanes.sum(in_units(s, unit))};
  }

  // A row of zeros stays what it is. What is not infinite, divided by infinity, is 0.
  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    const T unit = kOrder == kLargest ? unit_near(row.unit) : row.unit, inverse = one_over_unit(unit);
    const T size = kOrder == kLargest ? row.unit * inverse : kOrder == 1 ? row.sum : root(row.sum);
    const bool finite = magnitude(size) < infinity<T>(), none = size == 0;
    const T factor = none ? T(1) : finite ? reciprocal(size) : size != size ? size : T(0);
    // elements of weight 0 are not multiplied there, either
    const T by = kCounts == kWeightsCount && none ? T(1) : inverse;
    return {by, none ? T(1) : finite ? size : T(0), factor, kOrder == kLargest ? row.unit : unit * size};
  }

  // An element of weight 0 may be so much larger than the norm that the quotient overflows: it is infinite, or nan, and
  // has no digits that quotient_of could make exact.
  static T map(Element e, Row row) {
    const T x = Keep::value(e) * row.inverse;
    if (kCounts == kWeightsCount && !(magnitude(x * row.factor) < infinity<T>())) return x * row.factor;
    return quotient_of(x, row.divisor, row.factor);
  }
  static T map_raw(Element e, Row row) { return map(e, row); }

  bool saves() const { return norm; }
  void save(int64 index, Row row) const {
    if (norm) norm[index] = row.norm;
  }
};

}  // namespace cupynorm
