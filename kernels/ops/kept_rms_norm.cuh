// RMSNorm of what counts in a row.
#pragma once
#include <base/memory.cuh>
#include <ops/keeping.cuh>

namespace cupynorm {

template <typename T, int kCounts>
struct KeptRmsNorm : OfKept<KeptRmsNorm<T, kCounts>, T, kCounts> {
  using Keep = Keeping<T, kCounts>;
  using Element = typename Keep::Element;
  struct State {
    T sum, count;  // of squares, and of weights
  };
  struct Row {
    T rstd;
  };

  T* rstd;  // one per row, or null if nobody asked
  T eps;

  static State identity() { return {0, 0}; }

  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate valid, T) {
    constexpr int kAccumulators = Predicate::kAccumulators;
    T sum[kAccumulators] = {}, count[kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T weight = Keep::template weight<N>(valid, i, x[i]), value = Keep::value(x[i]);
      count[i % kAccumulators] += weight;
      sum[i % kAccumulators] = weight == 0 ? sum[i % kAccumulators]
          : multiply_add(weight * value, value, sum[i % kAccumulators]);
    }
    return {sum_of(sum), sum_of(count)};
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    return {a.sum + b.sum, a.count + b.count};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return {lanes.sum(s.sum), lanes.sum(s.count)};
  }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {row.count == 0 ? not_a_number<T>() : reciprocal_root(row.sum * reciprocal(row.count) + eps)};
  }

  static T map(Element e, Row row) { return Keep::value(e) * row.rstd; }
  static T map_raw(Element e, Row row) { return map(e, row); }

  bool saves() const { return rstd; }
  void save(int64 index, Row row) const {
    if (rstd) store_number(rstd + index, row.rstd);
  }
};

}  // namespace cupynorm
