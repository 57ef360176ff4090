// LayerNorm: (x - mean) / sqrt(var + eps), biased variance.
#pragma once
#include <ops/contract.cuh>

namespace cupynorm {

template <typename T>
struct LayerNorm : RowOp {
  using Compute = T;
  // Statistics of x - pivot, where pivot is one element of the row: float differences of near numbers are exact, so a
  // row whose mean is far larger than its deviation (1000 and 0.1, say) keeps all its digits.
  struct State {
    T mean, m2, count;
  };
  struct Row {
    T pivot, mean, rstd, offset;
  };

  T* mean;  // one per row, or null if nobody asked
  T* rstd;
  T eps;

  static constexpr bool kHasArguments = true;
  static T padding() { return 0; }
  static constexpr bool kHasPivot = true;

  // Where to count from: of a few elements the one nearest to 0, since an outlier would cost digits. With a mean far
  // from 0 any element is near enough. 16 bits have fewer digits to lose: the middle one of three will do.
  template <int N, typename Loaded>
  static T pivot_of(const T (&x)[N], Loaded) {
    T nearest = x[0];
    if constexpr (sizeof(Loaded) > 2) {
#pragma unroll
      for (int i = 1; i < (N < 4 ? N : 4); ++i) nearest = magnitude(x[i]) < magnitude(nearest) ? x[i] : nearest;
    } else if constexpr (N > 2) {
      nearest = larger(smaller(x[0], x[1]), smaller(larger(x[0], x[1]), x[2]));
    }
    return nearest;
  }

  static State identity() { return {0, 0, 0}; }

  // Exact two-pass over what one thread holds. Elements that are not valid are padding. Leaves x - pivot in x.
  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate valid, T pivot) {
    T sum = first_pass(x, valid, pivot);
    T mean = valid.template all<N>() ? sum * (T(1) / N) : sum * reciprocal(larger(T(valid.total()), T(1)));
    T m2 = second_pass(x, valid, mean);
    return {mean, m2, T(valid.total())};
  }

  // The same in two steps, for threads that can afford to meet twice: the sum of x - pivot, then, given the mean of
  // all that they hold, the sum of squares around it.
  static constexpr bool kTwoPass = true;

  template <int N, class Predicate>
  static T first_pass(T (&x)[N], Predicate valid, T pivot) {
    T sum[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] -= pivot;
      if (valid.template has<N>(i)) sum[i % Predicate::kAccumulators] += x[i];
    }
    return sum_of(sum);
  }

  // Both sums at once, around the pivot, added to those of the elements before. What m2 loses grows with (mean /
  // deviation)^2, at most the number of elements, where the pivot is an outlier: harmless where those are few and x has
  // 16 bits.
  struct Sums {
    T sum, squares;
  };
  template <int N, class Predicate>
  static Sums one_pass(T (&x)[N], Predicate valid, T pivot, Sums before = {}) {
    T sum[Predicate::kAccumulators] = {before.sum}, squares[Predicate::kAccumulators] = {before.squares};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int chain = i % Predicate::kAccumulators;
      x[i] -= pivot;
      if (valid.template has<N>(i)) sum[chain] += x[i], squares[chain] = multiply_add(x[i], x[i], squares[chain]);
    }
    return {sum_of(sum), sum_of(squares)};
  }

  static State state_of(Sums sums, T count) {
    const T mean = sums.sum * reciprocal(larger(count, T(1)));
    const T m2 = multiply_add(-sums.sum, mean, sums.squares);
    return {mean, m2 < 0 ? T(0) : m2, count};
  }

  template <int N, class Predicate>
  static T second_pass(const T (&x)[N], Predicate valid, T mean) {
    T m2[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      T d = x[i] - mean;
      if (valid.template has<N>(i))
        m2[i % Predicate::kAccumulators] = multiply_add(d, d, m2[i % Predicate::kAccumulators]);
    }
    return sum_of(m2);
  }

  // Chan et al. 1979. kEqual: both sides hold the same number of elements. Symmetric in a and b to the last bit, so
  // that all lanes of a butterfly agree. Only the difference of the means is multiplied by what is rounded: it is
  // small.
  template <bool kEqual>
  static State merge(State a, State b) {
    T count = a.count + b.count, d = b.mean - a.mean, middle = T(0.5) * (a.mean + b.mean);
    if constexpr (kEqual) return {middle, a.m2 + b.m2 + d * d * (T(0.25) * count), count};
    if (a.count == 0) return b;
    if (b.count == 0) return a;
    T share = reciprocal(count);
    T lean = (T(0.5) * d) * ((b.count - a.count) * share);
    return {middle + lean, a.m2 + b.m2 + d * d * (a.count * b.count * share), count};
  }

  // What crosses between threads of equal counts: both sides know those.
  template <class Across>
  static State exchange(State s, Across across) {
    return {across(s.mean), across(s.m2), s.count};
  }

  // The State of all that several lanes hold, by sums around the mean of the first of them, which holds as much as any:
  // all sums are on their way at once, where merges step by step pass on three numbers and divide. That mean is off by
  // no more than the deviation times the root of how many lanes there are, so that squares lose no more than as many
  // units of their last place.
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const T first = lanes.first(s.mean), d = s.mean - first;
    const T count = lanes.sum(s.count), sum = lanes.sum(s.count * d), squares =
        lanes.sum(multiply_add(s.count * d, d, s.m2));
    const State around = state_of({sum, squares}, count);
    return {first + around.mean, around.m2, count};
  }

  // The same state, counted from another element.
  static State rebase(State s, T from, T to) { return {s.mean + (from - to), s.m2, s.count}; }

  template <typename Cols>
  Row finish(State, State row, Cols cols, T pivot) const {
    T rstd = reciprocal_root(row.m2 * one_of<T>(cols) + eps);
    return {pivot, row.mean, rstd, -row.mean * rstd};
  }

  // of what summarize left
  static T map(T x, Row row) { return multiply_add(x, row.rstd, row.offset); }
  static T map_raw(T x, Row row) { return multiply_add(x - row.pivot, row.rstd, row.offset); }  // of what was loaded

  bool saves() const { return mean || rstd; }
  void save(int64 index, Row row) const {
    if (mean) mean[index] = row.pivot + row.mean;
    if (rstd) rstd[index] = row.rstd;
  }
};

}  // namespace cupynorm
