// Rescale: a row moved and scaled so that its smallest element becomes `low`, its largest one `high`.
#pragma once
#include <ops/keeping.cuh>

namespace cupynorm {

template <typename T, int kCounts>
struct Rescale : OfKept<Rescale<T, kCounts>, T, kCounts> {
  using Keep = Keeping<T, kCounts>;
  using Element = typename Keep::Element;
  // The largest of -x and of x; nan where an element that counts is.
  struct State {
    T negated, largest;
  };
  struct Row {
    T half_smallest, range, factor, low, high, smallest, largest;
  };

  T* smallest;  // one per row, or null if nobody asked
  T* largest;
  T low;
  T high;

  static State identity() { return {-infinity<T>(), -infinity<T>()}; }

  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate valid, T) {
    State all = identity();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool counts = Keep::template weight<N>(valid, i, x[i]) != 0;
      const T value = Keep::value(x[i]);
      all.negated = counts ? larger_or_nan(all.negated, -value) : all.negated;
      all.largest = counts ? larger_or_nan(all.largest, value) : all.largest;
    }
    return all;
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    return {larger_or_nan(a.negated, b.negated), larger_or_nan(a.largest, b.largest)};
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const bool nan = lanes.max(unsigned(s.largest != s.largest)) != 0;
    const T negated = lanes.max(s.negated), largest = lanes.max(s.largest);
    return {nan ? not_a_number<T>() : negated, nan ? not_a_number<T>() : largest};
  }

  // Halves, whose difference does not overflow. Nothing that counts: nan. A constant row becomes `low`.
  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    const bool nothing = row.negated == -infinity<T>() && row.largest == -infinity<T>();
    const T smallest = nothing ? not_a_number<T>() : -row.negated, largest = nothing ? smallest : row.largest;
    const T half = T(0.5) * smallest, range = multiply_add(T(0.5), largest, -half);
    const bool finite = magnitude(range) < infinity<T>(), none = range == 0;
    const T factor = none ? T(0) : finite ? reciprocal(range) : range != range ? range : T(0);
    return {half, none || !finite ? T(0) : range, factor, low, high, smallest, largest};
  }

  // low + (high - low) * share, which is `low` at 0 and `high` at 1 to the last bit.
  static T map(Element e, Row row) {
    const T above = multiply_add(T(0.5), Keep::value(e), -row.half_smallest);
    const T share = quotient_of(above, row.range, row.factor);
    return multiply_add(share, row.high, multiply_add(-share, row.low, row.low));
  }
  static T map_raw(Element e, Row row) { return map(e, row); }

  bool saves() const { return smallest || largest; }
  void save(int64 index, Row row) const {
    if (smallest) smallest[index] = row.smallest;
    if (largest) largest[index] = row.largest;
  }
};

}  // namespace cupynorm
