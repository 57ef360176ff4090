// Ops of exponentials that leave out nan: it adds nothing to their sums, and stays nan where elements are stored.
#pragma once
#include <ops/losses.cuh>

namespace cupynorm {

// Op: what it does to elements that are numbers. The exponential of nan counts as 0, and the maximum is not nan.
template <template <typename> class Op, typename T, bool kInfinite = false>
struct Omitting : Op<T> {
  using State = Exponentials<T, kInfinite>;
  static constexpr bool kMapsPadding = false;
  struct OfHalves;  // Op's, if it has one, leaves out nothing: there is none here

  static T exponent(T& x, T pivot) {
    const T power = Op<T>::exponent(x, pivot);
    return power == power ? power : T(0);
  }

  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate, T) {
    const T max = larger(maximum(x), -infinity<T>()), pivot = State::pivot_of(max);
    T sum[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i % Predicate::kAccumulators] += exponent(x[i], pivot);
    return {max, sum_of(sum)};
  }

  template <int N, class Predicate>
  static State extend(State s, T (&x)[N], Predicate) {
    const T max = larger(s.max, maximum(x)), pivot = State::pivot_of(max);
    T sum = s.sum * exponential(s.max - pivot);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exponent(x[i], pivot);
    return {max, sum};
  }

  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(T (&x)[N], const bool (&some)[kVectors], Fill fill) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = -infinity<T>();
      }
    }
    return summarize(x, Predicate<N>{N, false}, T(0));
  }

  template <class Row>
  static bool drops_padding(const Row&) {
    return false;
  }
};

template <typename T>
struct OmittingSoftmax : Omitting<Softmax, T> {};
template <typename T>
struct OmittingLogSoftmax : Omitting<LogSoftmax, T> {};
template <typename T>
struct OmittingLogSumExp : Omitting<LogSumExp, T, true> {};

}  // namespace cupynorm
