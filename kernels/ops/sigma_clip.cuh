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

inline void count_up_to(double x, double to, double& count, double& most, double& least) {
  if (x <= to) count += 1, most = larger(most, x);
  else least = smaller(least, x);
}

// The state of some elements: the least and the largest of those that count, beside their Deviations.
template <typename T>
struct Clipped {
  Deviations<T, false> of;
  T least, most;
};

// Puts numbers in order: Batcher's merge sort by exchanges of the odd and the even ones (Knuth, volume 3, 5.2.2, M).
// Exchanges that nothing depends on which is used afterwards are left out by the compiler.
template <int kMerged = 1, int kApart = 1, typename T, int N>
inline void sort(T (&x)[N]) {
#pragma unroll
  for (int i = kApart % kMerged; i + kApart < N; ++i) {
    const bool first = (i - kApart % kMerged) % (2 * kApart) < kApart,
        together = i / (2 * kMerged) == (i + kApart) / (2 * kMerged);
    if (first && together) {
      const T less = smaller(x[i], x[i + kApart]);
      x[i + kApart] = larger(x[i], x[i + kApart]), x[i] = less;
    }
  }
  if constexpr (kApart > 1) sort<kMerged, kApart / 2>(x);
  else if constexpr (2 * kMerged < N) sort<2 * kMerged, 2 * kMerged>(x);
}

// The result of a search step: how many elements are no larger than a number, the largest of these, and the least of
// the others.
template <typename T>
struct UpTo : RowOp {
  using Compute = T;
  struct State {
    unsigned count;
    T most, least;
  };
  static State identity() { return {0, -infinity<T>(), infinity<T>()}; }
  template <int N>
  static State of(const T (&x)[N], T to) {
    T count = 0, most = -infinity<T>(), least = infinity<T>();
#pragma unroll
    for (int i = 0; i < N; ++i) count_up_to(x[i], to, count, most, least);
    return {unsigned(count), most, least};
  }
  // What the last step of a search for the middle of `count` elements finds; all others are nan. In place of these
  // there are as many -inf as inf, or one less: so the middle ones lie where they would if all counted.
  template <int N>
  static State of_middle(const T (&x)[N], T count) {
    T sorted[N], other = infinity<T>();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool counts = x[i] == x[i];
      sorted[i] = counts ? x[i] : other;
      other = counts ? other : -other;
    }
    sort(sorted);
    const unsigned half = (unsigned(count) + 1) / 2;
    if constexpr (N == 1) return {half, sorted[0], sorted[0]};
    else if constexpr (N % 2 == 0) return {half, sorted[N / 2 - 1], sorted[N / 2]};
    else return {half, unsigned(count) % 2 ? sorted[N / 2] : sorted[N / 2 - 1], sorted[N / 2]};
  }
  template <bool kEqual>
  static State merge(State a, State b) {
    return {a.count + b.count, larger(a.most, b.most), smaller(a.least, b.least)};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const auto most = lanes.max(order_of(s.most)), least = lanes.max(order_of(-s.least));
    return {lanes.sum(s.count), in_order(most), -in_order(least)};
  }
};

// A row's next pass over its elements: a round, or a step of the search for its median; or there is none.
constexpr int kStatistics = 0, kMiddle = 1, kThrough = 2;

// How far a row has come. The numbers are all of one type, because those of ClipPass lie in an array (PROGRESS in
// cupynorm/lower/statistics.py).
template <typename T>
struct ClipProgress {
  T low, high;  // bounds of what is kept
  T to;         // a step counts the elements up to this number; inf in a round
  T mean, std, least, most, count, centre;  // of what is kept; the centre of the last round
  T step, round;      // kStatistics, kMiddle or kThrough; rounds that are over
  T first, last;      // two elements: the median lies between them, or is one of them
  T before, reached;  // how many elements are less than `first`, and how many are no larger than `last`
  T slow, taken;      // steps in succession that have not halved the candidates; all steps of this search
};

// kMedian: the centre is the median, or the mean of the two middle elements. Else the mean.
// kMostSteps: of a search, at least as many as a number has bits; 0: it does not matter.
template <class Op, typename T, bool kMedian, int kMostSteps>
struct OfClipped : OfKept<Op, T, kNumbersCount> {
  using Compute = T;
  using Base = OfDeviations<OfClipped, T, kNumbersCount, false>;
  using State = Clipped<T>;
  using Progress = ClipProgress<T>;
  using Search = UpTo<T>;
  using Found = typename Search::State;
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
  template <int kAccumulators, int N, class Keep>
  static State summarize_if(T (&x)[N], Keep keep) {
    T least = infinity<T>(), most = -infinity<T>(), sum[kAccumulators] = {}, squares[kAccumulators] = {};
    T counts[kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = keep(x[i], counts[i % kAccumulators]);
      least = smaller(least, x[i]);
      most = larger(most, x[i]);
    }
    const T count = sum_of(counts), origin = count == 0 ? T(0) : least;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i % kAccumulators] += larger(x[i] - origin, T(0));  // nan is 0
    const T mean = count == 0 ? T(0) : sum_of(sum) * reciprocal(count);
    T again = origin;  // or as many registers as elements keep what is above it
    make_opaque(again);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T d = larger(x[i] - again, T(0)) - mean;
      squares[i % kAccumulators] = multiply_add(d, d, squares[i % kAccumulators]);
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
    p.low = -largest_finite(T()), p.high = largest_finite(T()), p.to = infinity<T>();
    return p;
  }

  // Takes in the State of a round, and says what is next: a round, a step or nothing. of_last: whether statistics of
  // what the last round leaves are asked for.
  static unsigned advance(Progress& p, const State& s, T below, T above, T rounds, bool of_last) {
    if (p.step == kThrough) return 0;
    p.mean = Base::mean_of(s.of), p.std = root(Base::variance(s.of, 0));
    p.least = s.least, p.most = s.most, p.count = s.of.count;
    if (p.round == rounds || p.count == 0) {
      if (p.round < rounds) p.low = p.high = not_a_number<T>();
      p.step = kThrough;
      return 0;
    }
    if constexpr (kMedian) {
      p.first = p.least, p.last = p.most, p.before = 0, p.reached = p.count, p.slow = p.taken = 0;
      // the first one is near the mean; the others move little
      if (p.first < p.last) return look_up_to(p, p.round == 0 ? p.mean : p.centre);
    }
    return bound(p, kMedian ? p.first : p.mean, below, above, rounds, of_last);
  }

  // The search for the median, which is element number place(p), counted from 1, or the mean of those beside. Both ends
  // of where it may be are elements, so each step leaves out some, however it is chosen: where the number would be if
  // the elements lay at even distances, or, where that has not halved how many are left, or as many steps are needed as
  // there may be, in the middle of the numbers in their order. docs/notes/075 counts the steps.
  static constexpr int kSlow = 2;
  static bool is_slow(const Progress& p) {
    if (p.slow >= kSlow) return true;
    if constexpr (kMostSteps == 0) return false;
    const auto apart = static_cast<unsigned long long>(order_of(p.last) - order_of(p.first));
    const int left = kMostSteps - int(p.taken);
    return left <= 64 && apart >> (left - 1) != 0;
  }
  static T place(const Progress& p) { return T(0.5) * p.count + T(0.5); }
  static unsigned advance(Progress& p, const Found& s, T below, T above, T rounds, bool of_last) {
    if (p.step != kMiddle) return p.step == kStatistics ? kRoundNext : 0;
    const T count = T(s.count), away = place(p) - count;
    bool found = away >= 0 && away <= 1;
    T centre = away == 0 ? s.most : away == 1 ? s.least : T(0.5) * s.most + T(0.5) * s.least;
    if (!found) {
      const T had = p.reached - p.before;
      if (away < 0) p.last = s.most, p.reached = count;
      else p.first = s.least, p.before = count;
      p.slow = T(2) * (p.reached - p.before) <= had ? T(0) : p.slow + 1;
      p.taken += 1;
      if (!(p.first < p.last)) found = true, centre = p.first;
    }
    if (found) return bound(p, centre, below, above, rounds, of_last);
    const T share = (place(p) - 1 - p.before) * reciprocal(p.reached - 1 - p.before);
    return look_up_to(p, is_slow(p) ? not_a_number<T>() : multiply_add(p.last - p.first, share, p.first));
  }
  static unsigned look_up_to(Progress& p, T to) {
    const auto splits = [&] { return to >= p.first && to < p.last; };
    if (!splits()) {
      const auto from = order_of(p.first);
      to = in_order(from + (order_of(p.last) - from) / 2), p.slow = 0;
      if (!splits()) to = larger(p.first, T(-1.17549435e-38f));  // from subnormal numbers, which count as 0
    }
    p.step = kMiddle, p.to = to;
    return kStepNext;
  }

  static unsigned bound(Progress& p, T centre, T below, T above, T rounds, bool of_last) {
    p.low = larger(p.low, centre - below * p.std), p.high = smaller(p.high, centre + above * p.std);
    p.round += 1;
    const bool all = p.least >= p.low && p.most <= p.high;
    p.step = all || (p.round == rounds && !of_last) ? kThrough : kStatistics;
    p.to = infinity<T>(), p.centre = centre;
    return p.step == kStatistics ? kRoundNext : 0;
  }
};

template <typename T, bool kMedian>
struct ClipOnChip : OfClipped<ClipOnChip<T, kMedian>, T, kMedian, 0> {
  using Base = OfClipped<ClipOnChip<T, kMedian>, T, kMedian, 0>;
  using typename Base::Progress;
  using typename Base::Row;
  using typename Base::State;
  using typename Base::Search;
  using typename Base::Found;
  static constexpr bool kRounds = true, kSearches = kMedian;

  T* low;  // one per row, or null if nobody asked
  T* high;
  T* mean;
  T* std;
  T below;  // how many standard deviations
  T above;
  T rounds;

  unsigned again(Progress& p, const State& s) const {
    return Base::advance(p, s, below, above, rounds, mean || std);
  }
  unsigned step(Progress& p, const Found& found) const {
    return Base::advance(p, found, below, above, rounds, mean || std);
  }

  // Bounds only become narrower: of elements that are all within the new ones there is nothing new to know.
  static bool settled(const State& s, const Progress& p) { return s.least >= p.low && s.most <= p.high; }

  template <int N, class Predicate>
  static State summarize_again(T (&x)[N], Predicate, const Progress& p) {
    return Base::template summarize_if<Predicate::kAccumulators>(
        x, [&](T each, T& count) { return between_or_nan(each, p.low, p.high, count); });
  }
  template <int N>
  static void leave(T (&x)[N], const Progress& p) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = between_or_nan(x[i], p.low, p.high);
  }
  template <int N>
  static Found summarize_step(const T (&x)[N], const Progress& p) {
    return Search::of(x, p.to);
  }
  template <int N>
  static Found summarize_all_steps(const T (&x)[N], const Progress& p) {
    return Search::of_middle(x, p.count);
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

// Steps of a search for which there are kernels: one for each bit of a number, and SPARE_STEPS of
// cupynorm/lower/statistics.py.
template <typename T>
constexpr int kStepsOfPasses = 8 * sizeof(T) + 8;

// What is not kept comes as nan. kMedian: with each element comes the number up to which it is looked at.
template <typename T, bool kMedian>
struct ClipPass : OfClipped<ClipPass<T, kMedian>, T, kMedian, kStepsOfPasses<T>> {
  using Base = OfClipped<ClipPass<T, kMedian>, T, kMedian, kStepsOfPasses<T>>;
  using typename Base::Found;
  using typename Base::Progress;
  using Element = typename Conditional<kMedian, Fields<T, 2>, T>::Type;
  // In a step, only what it looks at is in there, but `least` is the least of the others.
  using typename Base::State;
  using Row = State;
  static constexpr bool kMayEnd = true;

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

  static Element padding() {
    if constexpr (kMedian) return {not_a_number<T>(), infinity<T>()};
    else return not_a_number<T>();
  }
  // A thread's elements stay as they are.
  template <int N, class Predicate>
  static State summarize(const Element (&x)[N], Predicate valid, T pivot) {
    T own[N], above = infinity<T>(), to = infinity<T>();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kMedian) {
        const T each = x[i].of[0];
        const bool looked_at = each <= x[i].of[1];
        own[i] = looked_at ? each : not_a_number<T>();
        above = looked_at ? above : smaller(above, each);  // which may be nan
        to = smaller(to, x[i].of[1]);
      } else {
        own[i] = x[i];
      }
    }
    State s = Base::summarize(own, valid, pivot);
    if (to < infinity<T>()) s.least = above;
    return s;
  }

  template <typename Cols>
  static Row finish(State, State row, Cols, T) {
    return row;
  }
  static T map(Element e, const Row&) {
    if constexpr (kMedian) return e.of[0];
    else return e;
  }
  static T map_raw(Element e, const Row& row) { return map(e, row); }

  bool saves() const { return after || low || mean; }
  void save(int64 index, const Row& row) const {
    Progress p = before ? reinterpret_cast<const Progress*>(before)[index] : Base::begin();
    if (after) {
      if (p.step == kMiddle)
        Base::advance(p, Found{unsigned(row.of.count), row.most, row.least}, below, above, rounds, false);
      else
        Base::advance(p, row, below, above, rounds, false);
      reinterpret_cast<Progress*>(after)[index] = p;
    }
    if (low) low[index] = p.low, high[index] = p.high;
    if (mean) mean[index] = Base::Base::mean_of(row.of), std[index] = root(Base::Base::variance(row.of, 0));
  }

  bool ended(int64 index) const {
    return before && after && reinterpret_cast<const Progress*>(before)[index].step == kThrough;
  }
  void hand_on(int64 index) const {
    reinterpret_cast<Progress*>(after)[index] = reinterpret_cast<const Progress*>(before)[index];
  }
};

}  // namespace cupynorm
