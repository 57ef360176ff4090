// RMSNorm: x / sqrt(mean(x^2) + eps).
#pragma once
#include <base/memory.cuh>
#include <ops/contract.cuh>

namespace cupynorm {

template <typename T>
struct RmsNorm : RowOp {
  using Compute = T;
  struct State {
    T sum;  // of squares
  };
  struct Row {
    T rstd;
  };

  T* rstd;  // one per row, or null if nobody asked
  T eps;

  static constexpr bool kHasArguments = true;
  static T padding() { return 0; }
  static State identity() { return {0}; }

  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate, T) {
    T sum[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
      sum[i % Predicate::kAccumulators] = multiply_add(x[i], x[i], sum[i % Predicate::kAccumulators]);
    return {sum_of(sum)};
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    return {a.sum + b.sum};
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return {lanes.sum(s.sum)};
  }

  template <typename Cols>
  Row finish(State, State row, Cols cols, T) const {
    return {reciprocal_root(row.sum * one_of<T>(cols) + eps)};
  }

  static T map(T x, Row row) { return x * row.rstd; }
  static T map_raw(T x, Row row) { return x * row.rstd; }

  bool saves() const { return rstd; }
  void save(int64 index, Row row) const {
    if (rstd) store_number(rstd + index, row.rstd);
  }
};

}  // namespace cupynorm
