// One round of sigma clipping: bounds around the mean of what is within the bounds of the round before.
#pragma once
#include <ops/moments.cuh>

namespace cupynorm {

// What is outside of the bounds comes as nan, and stays that where elements are stored.
template <typename T, int kCounts>
struct SigmaClip : OfDeviations<SigmaClip<T, kCounts>, T, kCounts, false> {
  using Base = OfDeviations<SigmaClip<T, kCounts>, T, kCounts, false>;
  using typename Base::Element;
  using typename Base::State;
  struct Row {
    T mean, std;
  };

  // One per row. The bounds of the round before, null in the first one; where this round's go, which are no wider, or
  // null in the last pass; where mean and standard deviation go, or null. Bounds go to other places than they come
  // from: another block may still read those.
  T* low_before;
  T* high_before;
  T* low;
  T* high;
  T* mean;
  T* std;
  T below;  // how many standard deviations
  T above;

  static T dropped() { return not_a_number<T>(); }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {Base::mean_of(row), root(Base::variance(row, 0))};
  }

  // Elements stay as they are: what is kept is stored to the last bit.
  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate valid, T pivot) {
    Element own[N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = x[i];
    return Base::summarize(own, valid, pivot);
  }

  static T map(Element e, Row) { return Base::Keep::value(e); }
  static T map_raw(Element e, Row) { return Base::Keep::value(e); }

  bool saves() const { return low || mean || std; }
  void save(int64 index, Row row) const {
    if (low) {
      const T least = row.mean - below * row.std, most = row.mean + above * row.std;
      low[index] = low_before ? larger(low_before[index], least) : least;
      high[index] = high_before ? smaller(high_before[index], most) : most;
    }
    if (mean) mean[index] = row.mean;
    if (std) std[index] = row.std;
  }
};

}  // namespace cupynorm
