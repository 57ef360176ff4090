// Further rounds over the elements of rows that are on the chip, of ops that have them (kRounds in ops/contract.cuh).
#pragma once
#include <base/reduce.cuh>

namespace cupynorm {

// Goes through the rounds of kCount rows behind the first one, which found `total`; leaves there what `finish` takes.
// own: the States of what this thread, its lanes or its warp hold of the rows, before they met with others'.
// summarize(progress, own): finds those of the next round; nothing is asked of rows that are through. reduce(total):
// makes them the rows' own. any(more): whether one of those who meet in reduce has another round to go: all of them do.
template <class Op, int kCount, class Summarize, class Reduce, class Any>
inline void go_through_rounds(const Op& op, typename Op::State (&own)[kCount], typename Op::State (&total)[kCount],
    const Summarize& summarize, const Reduce& reduce, const Any& any) {
  typename Op::Progress progress[kCount];
  bool more = false;
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    progress[r] = op.begin();
    more |= op.again(progress[r], total[r]);
  }
#pragma unroll 1
  while (any(more)) {
    summarize(progress, own);
#pragma unroll
    for (int r = 0; r < kCount; ++r) total[r] = own[r];
    reduce(total);
    more = false;
#pragma unroll
    for (int r = 0; r < kCount; ++r) more |= op.again(progress[r], total[r]);
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) total[r] = Op::closed(progress[r]);
}

// Whether it is so in any thread of the block, all of which must call. flags: one set for two calls that follow one
// another, since one barrier stands between them.
template <int kWarps>
inline bool any_of_block(bool so, bool (&flags)[kWarps]) {
  so = any_lane(so);
  if (threadIdx.x % kWarp == 0) flags[threadIdx.x / kWarp] = so;
  __syncthreads();
  return any_lane(flags[threadIdx.x % kWarp % kWarps]);
}

}  // namespace cupynorm
