// Which columns of rows that are not whole (any_rows.cuh) a thread goes through, a round after the other: kElements of
// each row.
#pragma once
#include <io/masks.cuh>
#include <row/apart.cuh>

namespace cupynorm {

// Whether each thread has all elements of a round, and no interval drops any of them.
template <bool kWhole_, bool kKept_ = false>
struct Round {
  static constexpr bool kWhole = kWhole_, kKept = kKept_;
};

// The columns of a block.
template <class Choice, typename Index>
inline Bounds<Index> columns_of_block(Index cols, const TilePart& at) {
  if constexpr (Choice::kEven && !Choice::kFull) {
    const Shares shares = Shares::of(cols, at.parts);
    const Index begin = Index(shares.begin(at.part));
    return {begin, begin + Index(shares.held(at.part))};
  } else {
    constexpr Index kUnit = Choice::kWholeRounds ? 2 * Choice::kDown : 1;  // a block's part begins at whole sectors
    const Index each =
        Choice::kFull ? Choice::kRound : ((cols + (kUnit * at.parts - 1)) / (kUnit * at.parts)) * kUnit;
    const Index begin = at.part * each;
    return {begin, cols - begin < each ? cols : begin + each};
  }
}

// A thread's columns that no interval of a mask holds are passed over, given the pointers to its rows.
template <class Choice, typename Index, class Source>
inline void pass_over(const Source (&sources)[Choice::kVector], Index cols, Index& first, Index& end) {
  constexpr int kDown = Choice::kDown;
  Index from = cols, to = 0;
#pragma unroll
  for (int v = 0; v < Choice::kVector; ++v) {
    const auto& kept = sources[v].mask.interval;
    from = from < kept.begin ? from : kept.begin, to = to > kept.end ? to : kept.end;
  }
  if (!Choice::kWholeRounds && first < from) first += (from - first + (kDown - 1)) / kDown * kDown;
  end = end < to ? end : to;
}

// How many rounds at the begin lie within the intervals of all rows of the warp. end: 0 of a thread without rows.
template <class Choice, typename Index, class Source>
inline Index count_kept_rounds(const Source (&sources)[Choice::kVector], Index first, Index end) {
  Index to = end;
  bool begun = true;
#pragma unroll
  for (int v = 0; v < Choice::kVector; ++v) {
    const auto& kept = sources[v].mask.interval;
    to = to < kept.end ? to : kept.end, begun &= kept.begin <= first;
  }
  const unsigned mine =
      begun && to > first ? unsigned((to - first + (Choice::kDown - 1)) / Choice::kRound) : 0;
  return ~largest_of_warp(~mine);
}

// Calls body(column, round) for each round of rows that wait nowhere, of which so many are whole; or from the last one
// back, which may still be in the L2 cache.
template <class Choice, typename Index, class Body>
inline void go_through_columns(Index first, Index end, Index whole, Body&& body) {
  Index at = first;
  if constexpr (Choice::kWholeRounds || Choice::kKeepsRounds) {
#pragma unroll 1
    for (Index i = 0; i < whole; ++i, at += Choice::kRound) body(at, Round<true, Choice::kKeepsRounds>());
  }
#pragma unroll 1
  for (; at < end; at += Choice::kRound) body(at, Round<false>());
}
template <class Choice, typename Index, class Body>
inline void go_back_through_columns(Index first, Index end, Index whole, Body&& body) {
  Index at = first + whole * Choice::kRound;
  if (at < end) body(at, Round<false>());
#pragma unroll 1
  for (Index i = 0; i < whole; ++i) at -= Choice::kRound, body(at, Round<true>());
}

}  // namespace cupynorm
