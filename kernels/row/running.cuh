// What a thread has seen of a row that it goes through, a batch after the other.
#pragma once
#include <base/math.cuh>

namespace cupynorm {

// The State of all that one thread has seen, a batch after the other.
template <class Op, bool kTwoPass = Op::kTwoPass>
struct Running {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  typename Op::State total = Op::identity();

  template <typename Precision, int N>
  void add(Element (&x)[N]) {
    add<Precision>(x, Predicate<N>{N, false});
  }
  // The same of the first elements of x, at least one; the others are padding.
  template <typename Precision, int N, class Predicate>
  void add(Element (&x)[N], Predicate valid) {
    total = Op::template merge<false>(total, Op::summarize(x, valid, 0));
  }
  typename Op::State state(Compute& from) const { return own_state(from); }
  typename Op::State own_state(Compute& from) const {
    from = 0;
    return total;
  }
};

// Where an op takes two passes elsewhere, two sums suffice: around an element of the thread's own what they lose is at
// most its number of elements times the precision.
template <class Op>
struct Running<Op, true> {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  typename Op::Sums sums = {};
  Compute pivot = 0;
  int count = 0;

  template <typename Precision, int N>
  void add(Element (&x)[N]) {
    add<Precision>(x, Predicate<N>{N, false});
  }
  template <typename Precision, int N, class Predicate>
  void add(Element (&x)[N], Predicate valid) {
    if (count == 0) pivot = Op::pivot_of(x, Precision());
    const typename Op::Sums more = Op::one_pass(x, valid, pivot);
    sums = {sums.sum + more.sum, sums.squares + more.squares};
    count += valid.total();
  }
  // Counted from the first lane's element.
  typename Op::State state(Compute& from) const {
    from = __shfl_sync(kAllLanes, pivot, 0);
    return Op::rebase(Op::state_of(sums, Compute(count)), pivot, from);
  }
  // The same around the thread's own pivot, which `from` becomes.
  typename Op::State own_state(Compute& from) const {
    from = pivot;
    return Op::state_of(sums, Compute(count));
  }
};

// How RunningRows knows them: by their State, or by sums of 16 bits, as Running does or as the op has them.
enum class RunningKind { kStates, kTwoPass, kAddsUp };
template <class Op, typename Precision>
inline constexpr RunningKind kRunningKind = Op::kTwoPass ? RunningKind::kTwoPass
    : Op::kAddsUp && sizeof(Precision) == 2 ? RunningKind::kAddsUp : RunningKind::kStates;

// The same of kRows rows, of which a thread always has the same columns.
template <class Op, int kRows, typename Precision, RunningKind = kRunningKind<Op, Precision>>
struct RunningRows {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  typename Op::State total[kRows];

  RunningRows() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r] = Op::identity();
  }
  template <int N, class Predicate>
  void add(Element (&x)[kRows][N], Predicate valid) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (Op::kExtends) total[r] = Op::extend(total[r], x[r], valid);
      else total[r] = Op::template merge<false>(total[r], Op::summarize(x[r], valid, 0));
    }
  }
  typename Op::State own_state(int r, Compute& from) const {
    from = 0;
    return total[r];
  }
};

template <class Op, int kRows, typename Precision>
struct RunningRows<Op, kRows, Precision, RunningKind::kTwoPass> {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  typename Op::Sums sums[kRows] = {};
  Compute pivot[kRows] = {};
  int count = 0;

  template <int N, class Predicate>
  void add(Element (&x)[kRows][N], Predicate valid) {
    if (count == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) pivot[r] = Op::pivot_of(x[r], Precision());
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = Op::one_pass(x[r], valid, pivot[r], sums[r]);
    count += valid.total();
  }
  typename Op::State own_state(int r, Compute& from) const {
    from = pivot[r];
    return Op::state_of(sums[r], Compute(count));
  }
};

// Which of a thread's elements count: those for which the op says so.
template <class Op, int N, class Predicate>
struct CountedElements {
  const ElementOf<Op> (&x)[N];
  Predicate valid;
  bool operator()(int i) const { return Op::template counts<N>(valid, i, x[i]); }
  int total() const {
    int total = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) total += (*this)(i);
    return total;
  }
};

template <class Op, int kRows, typename Precision>
struct RunningRows<Op, kRows, Precision, RunningKind::kAddsUp> {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  typename Op::Sums sums[kRows] = {};

  template <int N, class Predicate>
  void add(Element (&x)[kRows][N], Predicate valid) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) Op::add_up(sums[r], x[r], CountedElements<Op, N, Predicate>{x[r], valid});
  }
  // The same of those for which kept(r) says so.
  template <int N, class Kept>
  void add_kept(Element (&x)[kRows][N], Kept kept) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) Op::add_up(sums[r], x[r], kept(r));
  }
  typename Op::State own_state(int r, Compute& from) const {
    from = 0;
    return Op::state_of(sums[r]);
  }
};

// Whether such rows can be asked to add those elements that somebody else says to count: all that no mask drops.
template <class Rows>
inline constexpr bool kAddsKept = false;
template <class Op, int kRows, typename Precision>
inline constexpr bool kAddsKept<RunningRows<Op, kRows, Precision, RunningKind::kAddsUp>> = Op::kCountsAllKept;

}  // namespace cupynorm
