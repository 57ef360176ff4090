// Mean, variance, skewness and kurtosis of what counts in a row, and what is made of them: z-scores.
#pragma once
#include <ops/keeping.cuh>

namespace cupynorm {

// The state of some elements. Sums are over those that count, each as often as its weight says. The mean is origin +
// mean, two numbers, so that a mean that is far larger than the deviations (1e7 and 1) costs no digits. m2: the sum of
// the squares of deviations from it. count: that of the weights. third, fourth: those of the powers of deviations /
// sqrt(m2), which neither overflow nor vanish: skewness is third * sqrt(count), kurtosis fourth * count.
template <typename T, bool kHigher>
struct Deviations {
  T origin, mean, m2, count;
};
template <typename T>
struct Deviations<T, true> {
  T origin, mean, m2, count, third, fourth;
};

template <class Op, typename T, int kCounts, bool kHigher>
struct OfDeviations : OfKept<Op, T, kCounts> {
  using State = Deviations<T, kHigher>;
  using Keep = Keeping<T, kCounts>;
  using Element = typename Keep::Element;
  static State identity() { return {}; }

  // 1 / sqrt(m2), or 0 where there are no deviations
  static T unit(T m2) { return m2 > 0 ? reciprocal_root(m2) : T(0); }

  // Squares without `count` times mean^2, as long as that is a number.
  static T without(T squares, T count, T mean) {
    const T left = multiply_add(-count * mean, mean, squares);
    return left == left ? left : squares;
  }

  // Of 16 bits: sums around an element that counts, which is within the deviation times the root of how many there are
  // of the mean, so that squares lose no more than as many units of their last place.
  static constexpr bool kAddsUp = !kHigher && kCounts >= kAllCount;
  static constexpr bool kCountsAllKept = !kHigher && kCounts == kMarkedCount;
  struct Sums {
    T origin, sum, squares, count;
  };
  template <int N, class Predicate>
  static bool counts(Predicate valid, int i, Element x) {
    return Keep::template weight<N>(valid, i, x) != 0;
  }
  template <int N, class Kept>
  static void add_up(Sums& s, const Element (&x)[N], Kept kept) {
    if (s.count == 0) {
      T first = 0;
#pragma unroll
      for (int i = N - 1; i >= 0; --i) first = kept(i) ? Keep::value(x[i]) : first;
      s.origin = magnitude(first) < infinity<T>() ? first : T(0);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T d = kept(i) ? Keep::value(x[i]) - s.origin : T(0);
      if constexpr (kCounts == kWeightsCount) {
        const T weighted = x[i].of[1] * d;
        s.sum += weighted;
        s.squares = multiply_add(weighted, d, s.squares);
        s.count += x[i].of[1];
      } else {
        s.sum += d;
        s.squares = multiply_add(d, d, s.squares);
      }
    }
    if constexpr (kCounts != kWeightsCount) s.count += T(kept.total());
  }
  static State state_of(const Sums& s) {
    const T mean = s.count == 0 ? T(0) : s.sum * reciprocal(s.count), m2 = multiply_add(-s.sum, mean, s.squares);
    return {s.origin, mean, m2 < 0 ? T(0) : m2, s.count};
  }

  // MARKED: values minus the least that counts are summed, which needs no look at which do, then their squares around
  // the mean. What is missing is 0 there, so that the squares hold mean^2 for each missing element, which is taken away
  // again. That costs no digits: with two elements or more the squares are no less than mean^2, since the least is 0;
  // with one element both are 0. Leaves x - origin in x, and 0 where something is missing.
  template <int kAccumulators, int kKept, int N>
  static State summarize_marked(T (&x)[N]) {
    T least = infinity<T>(), sum[kAccumulators] = {}, squares[kAccumulators] = {};
    int counts[kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) least = smaller(least, x[i]);  // which is not nan
    const T origin = least < infinity<T>() ? least : T(0);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool counted = i < kKept || !is_missing(x[i]);
      counts[i % kAccumulators] += counted;
      x[i] = counted ? x[i] - origin : T(0);
      sum[i % kAccumulators] += x[i];
    }
    const int count = sum_of(counts);
    const T mean = count == 0 ? T(0) : sum_of(sum) * reciprocal(T(count));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T d = x[i] - mean;
      squares[i % kAccumulators] = multiply_add(d, d, squares[i % kAccumulators]);
    }
    return {origin, mean, without(sum_of(squares), T(N - count), mean), T(count)};
  }

  // BYTES: the sums of up to 128 elements and of their squares are exact, and so is count^2 times the variance.
  template <int kAccumulators, int N>
  static State summarize_bytes(const T (&x)[N], int count) {
    static_assert(N <= 128, "sums have 24 bits, their squares 31");
    T sum[kAccumulators] = {}, squares[kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {  // padding is 0
      sum[i % kAccumulators] += x[i];
      squares[i % kAccumulators] = multiply_add(x[i], x[i], squares[i % kAccumulators]);
    }
    const int whole = int(sum_of(sum)), spread = count * int(sum_of(squares)) - whole * whole;
    const T share = count == 0 ? T(0) : reciprocal(T(count)), origin = T(int(T(whole) * share));
    return {origin, (T(whole) - origin * T(count)) * share, T(spread) * share, T(count)};
  }

  // Counted from the first element that counts, then around their mean: nothing is lost. Leaves x - origin in x, but
  // what is missing as it is.
  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate valid, T) {
    constexpr int kAccumulators = Predicate::kAccumulators;
    if constexpr (!kHigher && kCounts == kMarkedCount) return summarize_marked<kAccumulators, Predicate::kKept>(x);
    if constexpr (!kHigher && kCounts == kBytesCount)
      return summarize_bytes<kAccumulators>(x, valid.template all<N>() ? N : valid.total());
    T origin = 0, sum[kAccumulators] = {}, counts[kAccumulators] = {}, squares[kAccumulators] = {};
#pragma unroll
    for (int i = N - 1; i >= 0; --i)
      origin = Keep::template weight<N>(valid, i, x[i]) == 0 ? origin : Keep::value(x[i]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T weight = Keep::template weight<N>(valid, i, x[i]);
      Keep::subtract(x[i], origin);
      counts[i % kAccumulators] += weight;
      sum[i % kAccumulators] = weight == 0 ? sum[i % kAccumulators]
          : multiply_add(weight, Keep::value(x[i]), sum[i % kAccumulators]);
    }
    const T count = sum_of(counts), mean = count == 0 ? T(0) : sum_of(sum) * reciprocal(count);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T weight = Keep::template weight<N>(valid, i, x[i]), d = Keep::value(x[i]) - mean;
      squares[i % kAccumulators] = weight == 0 ? squares[i % kAccumulators]
          : multiply_add(weight * d, d, squares[i % kAccumulators]);
    }
    const T m2 = sum_of(squares);
    if constexpr (!kHigher) {
      return {origin, mean, m2, count};
    } else {
      T third[kAccumulators] = {}, fourth[kAccumulators] = {};
      const T inverse = unit(m2);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const T weight = Keep::template weight<N>(valid, i, x[i]), d = (Keep::value(x[i]) - mean) * inverse,
                cube = weight == 0 ? T(0) : weight * d * d * d;
        third[i % kAccumulators] += cube;
        fourth[i % kAccumulators] = weight == 0 ? fourth[i % kAccumulators]
            : multiply_add(cube, d, fourth[i % kAccumulators]);
      }
      return {origin, mean, m2, count, sum_of(third), sum_of(fourth)};
    }
  }

  // The same State with its mean as origin, and what the rounding of their sum loses.
  static State centred(State s) {
    const T mean = s.origin + s.mean;
    s.mean -= mean - s.origin;
    s.origin = mean;
    return s;
  }

  // third and fourth of s as they are around another mean, `away` from its own, in units of another m2 of which 1 /
  // sqrt is `inverse`: the binomial theorem, since first powers add up to 0.
  struct Powers {
    T third, fourth;
  };
  static Powers moved(const State& s, T away, T inverse) {
    const T d = away * inverse, scale = inverse * (s.m2 > 0 ? s.m2 * reciprocal_root(s.m2) : T(0)),
            square = scale * scale, third = s.third * square * scale, counted = s.count * d * d;
    return {third + d * (3 * square + counted),
            s.fourth * square * square + d * (4 * third) + d * d * (6 * square + counted)};
  }

  // Chan et al. 1979. Symmetric in a and b to the last bit. The origin of both is the middle of theirs, and what its
  // rounding loses (Knuth's two-sum) goes into the mean.
  template <bool kEqual>
  static State merge(State a, State b) {
    a = centred(a), b = centred(b);
    const T half_a = T(0.5) * a.origin, half_b = T(0.5) * b.origin, origin = half_a + half_b, back = origin - half_a;
    const T lost = (half_a - (origin - back)) + (half_b - back);
    const T d = (b.origin - a.origin) + (b.mean - a.mean), count = a.count + b.count;
    if (a.count == 0) return b;
    if (b.count == 0) return a;
    const T share = reciprocal(count), lean = (T(0.5) * d) * ((b.count - a.count) * share);
    const T mean = multiply_add(T(0.5), a.mean + b.mean, lean) + lost;
    const T m2 = a.m2 + b.m2 + d * d * (a.count * b.count * share);
    if constexpr (!kHigher) {
      return {origin, mean, m2, count};
    } else {
      const T inverse = unit(m2);
      const Powers of_a = moved(a, -d * (b.count * share), inverse), of_b = moved(b, d * (a.count * share), inverse);
      return {origin, mean, m2, count, of_a.third + of_b.third, of_a.fourth + of_b.fourth};
    }
  }

  // Two rounds of sums: the mean of all, counted from the mean of a lane that has something, then what is around it.
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    s = centred(s);
    const T largest = lanes.max(s.count == 0 ? -infinity<T>() : s.origin);
    const T origin = magnitude(largest) < infinity<T>() ? largest : T(0), own = (s.origin - origin) + s.mean;
    const T count = lanes.sum(s.count), sum = lanes.sum(s.count == 0 ? T(0) : s.count * own);
    const T mean = count == 0 ? T(0) : sum * reciprocal(count), d = s.count == 0 ? T(0) : own - mean;
    const T m2 = lanes.sum(multiply_add(s.count * d, d, s.m2));
    if constexpr (!kHigher) {
      return {origin, mean, m2, count};
    } else {
      const Powers powers = moved(s, d, unit(m2));
      return {origin, mean, m2, count, lanes.sum(powers.third), lanes.sum(powers.fourth)};
    }
  }

  static T variance(const State& s, T ddof) {
    const T freedom = s.count - ddof;
    return freedom > 0 ? s.m2 * reciprocal(freedom) : not_a_number<T>();
  }
  // 0, or nan if nothing counts, and wherever an infinity or nan does: an infinity less itself is nan. No branch.
  static T undefined(const State& s) {
    const T mean = s.count == 0 ? not_a_number<T>() : s.origin + s.mean;
    return mean - mean;
  }
  static T mean_of(const State& s) { return s.origin + s.mean + undefined(s); }
  // A lone infinity has no deviation where nan does not count: 0 would be its variance.
  static T variance_of(const State& s, T ddof) { return variance(s, ddof) + undefined(s); }

  // The way of a thread's elements to their deviations from a row's mean. One of which nothing counts has left them as
  // they are, and they may be far larger than their deviations: row.origin is taken away first there.
  struct Way {
    T origin, rest;
  };
  static Way way_of(const State& mine, const State& row) {
    const bool left = kCounts == kWeightsCount && mine.count == 0;
    return {left ? row.origin : T(0), left ? -row.mean : (mine.origin - row.origin) - row.mean};
  }
  static T deviation(Element e, Way way) {
    const T x = Keep::value(e);
    return (kCounts == kWeightsCount ? x - way.origin : x) + way.rest;
  }
};

template <typename T, int kCounts>
struct Standardize : OfDeviations<Standardize<T, kCounts>, T, kCounts, false> {
  using Base = OfDeviations<Standardize<T, kCounts>, T, kCounts, false>;
  using typename Base::Element;
  using typename Base::State;
  struct Row {
    T origin;
    typename Base::Way way;  // of the thread's own elements
    T mean, factor, whole, std;
  };

  T* mean;  // one per row, or null if nobody asked
  T* std;
  T eps;
  T ddof;

  template <typename Cols>
  Row finish(State mine, State row, Cols, T) const {
    const T variance = Base::variance_of(row, ddof);
    return {row.origin, Base::way_of(mine, row), row.mean, reciprocal_root(variance + eps), Base::mean_of(row),
            root(variance)};
  }

  static T map(Element e, Row row) { return Base::deviation(e, row.way) * row.factor; }
  static T map_raw(Element e, Row row) {
    return multiply_add(Base::Keep::value(e) - row.origin, row.factor, -row.mean * row.factor);
  }

  bool saves() const { return mean || std; }
  void save(int64 index, Row row) const {
    if (mean) mean[index] = row.whole;
    if (std) std[index] = row.std;
  }
};

// LayerNorm of what counts.
template <typename T, int kCounts>
struct KeptLayerNorm : OfDeviations<KeptLayerNorm<T, kCounts>, T, kCounts, false> {
  using Base = OfDeviations<KeptLayerNorm<T, kCounts>, T, kCounts, false>;
  using typename Base::Element;
  using typename Base::State;
  struct Row {
    T origin;
    typename Base::Way way;
    T mean, rstd, whole;
  };

  T* mean;  // one per row, or null if nobody asked
  T* rstd;
  T eps;

  template <typename Cols>
  Row finish(State mine, State row, Cols, T) const {
    return {row.origin, Base::way_of(mine, row), row.mean, reciprocal_root(Base::variance_of(row, 0) + eps),
            Base::mean_of(row)};
  }

  static T map(Element e, Row row) { return Base::deviation(e, row.way) * row.rstd; }
  static T map_raw(Element e, Row row) {
    return multiply_add(Base::Keep::value(e) - row.origin, row.rstd, -row.mean * row.rstd);
  }

  bool saves() const { return mean || rstd; }
  void save(int64 index, Row row) const {
    if (mean) mean[index] = row.whole;
    if (rstd) rstd[index] = row.rstd;
  }
};

// kOrder: 2 to 4 of them.
template <typename T, int kCounts, int kOrder>
struct Moments : OfDeviations<Moments<T, kCounts, kOrder>, T, kCounts, (kOrder > 2)> {
  using Base = OfDeviations<Moments<T, kCounts, kOrder>, T, kCounts, (kOrder > 2)>;
  using typename Base::Element;
  using typename Base::State;
  struct Row {
    State state;
    T ddof;
  };

  T* mean;  // one per row
  T* variance;
  T* skewness;  // null where kOrder is less
  T* kurtosis;
  T ddof;

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {row, ddof};
  }

  static T map(Element e, Row) { return Base::Keep::value(e); }  // nothing is stored
  static T map_raw(Element e, Row) { return Base::Keep::value(e); }

  bool saves() const { return mean; }
  void save(int64 index, Row row) const {
    const State& s = row.state;
    if (!mean) return;
    mean[index] = Base::mean_of(s);
    variance[index] = Base::variance_of(s, row.ddof);
    if constexpr (kOrder > 2) {
      const bool none = !(s.m2 > 0);
      skewness[index] = none ? not_a_number<T>() : s.third * root(s.count);
      if constexpr (kOrder > 3)
        kurtosis[index] = none ? not_a_number<T>() : multiply_add(s.fourth, s.count, T(-3));
    }
  }
};

}  // namespace cupynorm
