// Sigma clipping: in each round what is farther than some standard deviations from the centre of what the rounds before
// have left is left out. ClipOnChip goes through all rounds while the row is on the chip; ClipPass is one round, or one
// step of a search for a median, of rows that are read from memory for each.
#pragma once
#include <ops/moments.cuh>

namespace cupynorm {

inline double between_or_nan(double x, double low, double high) {
  return x >= low && x <= high ? x : not_a_number<double>();
}
inline double between_or_nan(double x, double low, double high, double& count) {
  count += x >= low && x <= high;
  return between_or_nan(x, low, high);
}

inline float largest_finite(float) { return as_float(0x7f7fffffu); }
inline double largest_finite(double) { return as_double(0xffffffffu, 0x7fefffffu); }

inline double finite_or_nan(double x, double& count) {
  return between_or_nan(x, -largest_finite(x), largest_finite(x), count);
}

// Numbers in their order, as integers (ordered_bits of base/math.cuh).
inline unsigned order_of(float x) { return ordered_bits(x); }
inline float in_order(unsigned place) { return from_ordered_bits(place); }
inline unsigned long long order_of(double x) {
  const unsigned long long bits = static_cast<unsigned long long>(high_word(x)) << 32 | low_word(x);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}
inline double in_order(unsigned long long place) {
  const unsigned long long bits = place >> 63 ? place & ~(1ull << 63) : ~place;
  return as_double(unsigned(bits), unsigned(bits >> 32));
}

// The state of some elements: the least and the largest of those that count, beside their Deviations.
template <typename T>
struct Clipped {
  Deviations<T, false> of;
  T least, most;
};

// What is being found out about a row: statistics of what is kept, the middle element, by bisection of the numbers in
// their order, or, of an even count, the one above it.
constexpr int kStatistics = 0, kMiddle = 1, kAboveMiddle = 2, kThrough = 3;

// The numbers of a row, all of one type, because those of ClipPass lie in an array (PROGRESS in
// cupynorm/lower/statistics.py). The next round looks at what is above `above` from `low` up to `to`.
template <typename T>
struct ClipProgress {
  T low, high;  // bounds of what is kept
  T to, above;
  T mean, std, least, most, count;  // of what is kept
  T step, round;                    // what is being found out; rounds that are over
  T first, last;                    // the middle element is one of these, or between them
  T reached;                        // how many elements are no larger than `last`
};

// kMedian: the centre is the median, or the mean of the two middle elements. Else the mean.
template <class Op, typename T, bool kMedian>
struct OfClipped : OfKept<Op, T, kNumbersCount> {
  using Compute = T;
  using Base = OfDeviations<OfClipped, T, kNumbersCount, false>;
  using State = Clipped<T>;
  using Progress = ClipProgress<T>;
  struct Row {
    T low, high, mean, std;
  };

  static T dropped() { return not_a_number<T>(); }
  template <class Any>
  static bool drops_padding(const Any&) {  // which is nan, and stays that
    return true;
  }
  static State identity() { return {{}, infinity<T>(), -infinity<T>()}; }

  // The State of what `keep(x, count)` leaves, which adds 1 to count for each; the rest becomes nan. Elements minus the
  // least one are summed, then their squares around the mean, as summarize_marked in moments.cuh does: what was left
  // out is 0 there, and the mean^2 that the squares hold for it is taken away again, which costs no digits.
  template <int kChains, int N, class Keep>
  static State summarize_if(T (&x)[N], Keep keep) {
    T least = infinity<T>(), most = -infinity<T>(), sum[kChains] = {}, squares[kChains] = {};
    T counts[kChains] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = keep(x[i], counts[i % kChains]);
      least = smaller(least, x[i]);
      most = larger(most, x[i]);
    }
    const T count = sum_of(counts), origin = count == 0 ? T(0) : least;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i % kChains] += larger(x[i] - origin, T(0));  // nan is 0
    const T mean = count == 0 ? T(0) : sum_of(sum) * reciprocal(count);
    T again = origin;  // or as many registers as elements keep what is above it
    make_opaque(again);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T d = larger(x[i] - again, T(0)) - mean;
      squares[i % kChains] = multiply_add(d, d, squares[i % kChains]);
    }
    return {{origin, mean, Base::without(sum_of(squares), N - count, mean), count}, least, most};
  }

  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate, T) {
    return summarize_if<Predicate::kAccumulators>(x, [](T each, T& count) { return finite_or_nan(each, count); });
  }

  // Chan et al. 1979, as of Deviations.
  template <bool kEqual>
  static State merge(State a, State b) {
    return {Base::template merge<kEqual>(a.of, b.of), smaller(a.least, b.least), larger(a.most, b.most)};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const T least = -lanes.max(-s.least), most = lanes.max(s.most);
    const T origin = least < infinity<T>() ? least : T(0), own = (s.of.origin - origin) + s.of.mean;
    const T count = lanes.sum(s.of.count), sum = lanes.sum(s.of.count == 0 ? T(0) : s.of.count * own);
    const T mean = count == 0 ? T(0) : sum * reciprocal(count), d = s.of.count == 0 ? T(0) : own - mean;
    return {{origin, mean, lanes.sum(multiply_add(s.of.count * d, d, s.of.m2)), count}, least, most};
  }

  static T map(T x, Row row) { return between_or_nan(x, row.low, row.high); }
  static T map_raw(T x, Row row) { return map(x, row); }

  static Progress begin() {
    Progress p = {};
    p.low = -largest_finite(T()), p.to = p.high = largest_finite(T()), p.above = -infinity<T>();
    return p;
  }

  // Takes in the State of a round, and says whether there is another one. of_last: whether statistics of what the last
  // round leaves are asked for.
  static bool advance(Progress& p, const State& s, T below, T above, T rounds, bool of_last) {
    if (p.step == kThrough) return false;
    if constexpr (kMedian) {
      if (p.step == kMiddle) {
        if (s.of.count >= middle(p.count)) {
          p.last = s.most < p.to ? s.most : p.to, p.reached = s.of.count;
        } else {
          p.first = in_order(order_of(p.to) + 1);
        }
        return bisect(p, below, above, rounds, of_last);
      }
      if (p.step == kAboveMiddle) {
        const T centre = T(0.5) * p.last + T(0.5) * s.least;
        return bound(p, centre, below, above, rounds, of_last);
      }
    }
    p.mean = Base::mean_of(s.of), p.std = root(Base::variance(s.of, 0));
    p.least = s.least, p.most = s.most, p.count = s.of.count;
    if (p.round == rounds || p.count == 0) {
      if (p.round < rounds) p.low = p.high = not_a_number<T>();
      p.step = kThrough;
      return false;
    }
    if constexpr (kMedian) {
      p.first = p.least, p.last = p.most, p.reached = p.count;
      return bisect(p, below, above, rounds, of_last);
    }
    return bound(p, p.mean, below, above, rounds, of_last);
  }

  // The number of the middle element, from 1 on; of the lower one of two.
  static T middle(T count) { return T((static_cast<unsigned long long>(count) + 1) / 2); }

  static bool bisect(Progress& p, T below, T above, T rounds, bool of_last) {
    if (p.first < p.last) {
      const auto from = order_of(p.first);
      p.step = kMiddle, p.to = in_order(from + (order_of(p.last) - from) / 2);
      return true;
    }
    const T half = middle(p.count);
    if (p.count == half + half && p.reached == half) {
      p.step = kAboveMiddle, p.above = p.last, p.to = p.high;
      return true;
    }
    return bound(p, p.last, below, above, rounds, of_last);
  }

  static bool bound(Progress& p, T centre, T below, T above, T rounds, bool of_last) {
    p.low = larger(p.low, centre - below * p.std), p.high = smaller(p.high, centre + above * p.std);
    p.round += 1;
    const bool all = p.least >= p.low && p.most <= p.high;
    p.step = all || (p.round == rounds && !of_last) ? kThrough : kStatistics;
    p.to = p.high, p.above = -infinity<T>();
    return p.step == kStatistics;
  }
};

template <typename T, bool kMedian>
struct ClipOnChip : OfClipped<ClipOnChip<T, kMedian>, T, kMedian> {
  using Base = OfClipped<ClipOnChip<T, kMedian>, T, kMedian>;
  using typename Base::Progress;
  using typename Base::Row;
  using typename Base::State;
  static constexpr bool kRounds = true;

  T* low;  // one per row, or null if nobody asked
  T* high;
  T* mean;
  T* std;
  T below;  // how many standard deviations
  T above;
  T rounds;

  bool again(Progress& p, const State& s) const { return Base::advance(p, s, below, above, rounds, mean || std); }

  // Bounds only become narrower: of elements that are all within the new ones there is nothing new to know.
  static bool settled(const State& s, const Progress& p) {
    return !kMedian && s.least >= p.low && s.most <= p.high;
  }

  template <int N, class Predicate>
  static State summarize_again(T (&x)[N], Predicate, const Progress& p) {
    if constexpr (kMedian) {
      if (p.step != kStatistics) return counted<Predicate::kAccumulators>(x, p);
    }
    return Base::template summarize_if<Predicate::kAccumulators>(
        x, [&](T each, T& count) { return between_or_nan(each, p.low, p.high, count); });
  }

  // How many there are in the interval of a search, the least and the largest of them. x stays as it is.
  template <int kChains, int N>
  static State counted(const T (&x)[N], const Progress& p) {
    T least = infinity<T>(), most = -infinity<T>();
    int counts[kChains] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool here = x[i] >= p.low && x[i] <= p.to && x[i] > p.above;
      least = here ? smaller(least, x[i]) : least;
      most = here ? larger(most, x[i]) : most;
      counts[i % kChains] += here;
    }
    return {{T(0), T(0), T(0), T(sum_of(counts))}, least, most};
  }

  // Bounds lie where those of elements do.
  static State closed(const Progress& p) { return {{p.mean, T(0), p.std, p.count}, p.low, p.high}; }
  template <typename Cols>
  static Row finish(State, State row, Cols, T) {
    return {row.least, row.most, row.of.origin, row.of.m2};
  }

  bool saves() const { return low || mean; }
  void save(int64 index, Row row) const {
    if (low) low[index] = row.low, high[index] = row.high;
    if (mean) mean[index] = row.mean, std[index] = row.std;
  }
};

// What is outside of the interval that a round looks at comes as nan.
template <typename T, bool kMedian>
struct ClipPass : OfClipped<ClipPass<T, kMedian>, T, kMedian> {
  using Base = OfClipped<ClipPass<T, kMedian>, T, kMedian>;
  using typename Base::Progress;
  using typename Base::State;
  using Row = State;

  // One Progress for each row. Before this round, null in the first one; behind it, null in the pass that writes what
  // is kept. The two are not the same array: another block may still read.
  const T* before;
  T* after;
  T* low;  // one per row, or null if nobody asked
  T* high;
  T* mean;
  T* std;
  T below;
  T above;
  T rounds;

  // A thread's elements stay as they are.
  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate valid, T pivot) {
    T own[N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = x[i];
    return Base::summarize(own, valid, pivot);
  }

  template <typename Cols>
  static Row finish(State, State row, Cols, T) {
    return row;
  }
  static T map(T x, const Row&) { return x; }
  static T map_raw(T x, const Row&) { return x; }

  bool saves() const { return after || low || mean; }
  void save(int64 index, const Row& row) const {
    Progress p = before ? reinterpret_cast<const Progress*>(before)[index] : Base::begin();
    if (after) {
      Base::advance(p, row, below, above, rounds, false);
      reinterpret_cast<Progress*>(after)[index] = p;
    }
    if (low) low[index] = p.low, high[index] = p.high;
    if (mean) mean[index] = Base::Base::mean_of(row.of), std[index] = root(Base::Base::variance(row.of, 0));
  }
};

}  // namespace cupynorm
