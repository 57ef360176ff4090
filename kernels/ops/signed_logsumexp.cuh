// log(|sum(b * exp(x))|) and the sign of the sum: an element is (x, b).
#pragma once
#include <ops/softmax.cuh>

namespace cupynorm {

// kOmit: nan is left out. What has b = 0 counts for nothing, whatever x is.
template <typename T, int kOmit>
struct SignedLogSumExp : RowOp {
  using Compute = T;
  using Element = Fields<T, 2>;
  using State = Exponentials<T, true>;  // of those with b != 0; the sum is of b * exp(x - max)
  struct Row {
    T lse, sign;
  };

  T* lse;   // one per row
  T* sign;  // one per row, or null: then the logarithm of a negative sum is nan

  static constexpr bool kHasArguments = true, kMaskable = true;
  static Element padding() { return {-infinity<T>(), 0}; }
  static State identity() { return State::identity(); }
  static T dropped() { return 0; }
  static bool drops_padding(Row) { return true; }  // nothing is stored

  static bool counts(Element e) { return e.of[1] != 0 && !(kOmit && e.of[0] != e.of[0]); }

  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate, T) {
    T max = -infinity<T>(), sum[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) max = counts(x[i]) ? larger(max, x[i].of[0]) : max;
    const T pivot = State::pivot_of(max);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      T& chain = sum[i % Predicate::kAccumulators];
      chain = counts(x[i]) ? multiply_add(x[i].of[1], exponential(x[i].of[0] - pivot), chain) : chain;
    }
    return {max, sum_of(sum)};
  }

  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(Element (&x)[N], const bool (&some)[kVectors], Fill fill) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = padding();
      }
    }
    return summarize(x, Predicate<N>{N, false}, T(0));
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    return State::merge(a, b);
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return State::gather(s, lanes);
  }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    const T size = sign ? magnitude(row.sum) : row.sum, one = row.sum > 0 ? T(1) : row.sum < 0 ? T(-1) : row.sum;
    return {State::pivot_of(row.max) + logarithm(size), one};
  }

  static T map(Element e, Row) { return e.of[0]; }  // nothing is stored
  static T map_raw(Element e, Row) { return e.of[0]; }

  bool saves() const { return lse; }
  void save(int64 index, Row row) const {
    if (lse) lse[index] = row.lse;
    if (sign) sign[index] = row.sign;
  }
};

}  // namespace cupynorm
