// Further rounds over the elements of rows that are on the chip, of ops that have them (kRounds in ops/contract.cuh).
#pragma once
#include <base/reduce.cuh>
#include <ops/contract.cuh>

namespace cupynorm {

// Goes through the rounds of kCount rows behind the first one, which found `total`; leaves there what `finish` takes.
// own: the States of what this thread, its lanes or its warp hold of the rows, before they met with others'.
// summarize(progress, own): finds those of the next round; nothing is asked of rows that are through. reduce(total):
// makes them the rows' own. step(progress, found): finds what the next step finds of whole rows. any(next): what is
// next for those who meet in reduce, as any_next says it.
template <class Op, int kCount, class Summarize, class Reduce, class Step, class Any>
inline void go_through_rounds(const Op& op, typename Op::State (&own)[kCount], typename Op::State (&total)[kCount],
    const Summarize& summarize, const Reduce& reduce, const Step& step, const Any& any) {
  typename Op::Progress progress[kCount];
  unsigned next = 0;
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    progress[r] = op.begin();
    next |= op.again(progress[r], total[r]);
  }
#pragma unroll 1
  while ((next = any(next)) != 0) {
    if constexpr (Op::kSearches) {
      if (next == kStepNext) {
        typename Op::Search::State found[kCount];
        step(progress, found);
        next = 0;
#pragma unroll
        for (int r = 0; r < kCount; ++r) next |= op.step(progress[r], found[r]);
        continue;
      }
    }
    summarize(progress, own);
#pragma unroll
    for (int r = 0; r < kCount; ++r) total[r] = own[r];
    reduce(total);
    next = 0;
#pragma unroll
    for (int r = 0; r < kCount; ++r) next |= op.again(progress[r], total[r]);
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) total[r] = Op::closed(progress[r]);
}

// Whether a kernel of an op that says so has nothing to do. All threads of the block must call, behind the wait for the
// kernel before; all blocks get the same answer.
template <class Op>
inline bool has_ended(const Op& op, int64 rows) {
  if constexpr (Op::kMayEnd) {
    __shared__ bool busy;
    if (threadIdx.x == 0) busy = false;
    __syncthreads();
    for (int64 row = threadIdx.x; row < rows; row += blockDim.x) {
      if (!op.ended(row)) {
        busy = true;
        break;
      }
    }
    __syncthreads();
    if (busy) return false;
    if (blockIdx.x == 0 && blockIdx.y == 0) {
      for (int64 row = threadIdx.x; row < rows; row += blockDim.x) op.hand_on(row);
    }
    return true;
  }
  return false;
}

// The Search of an op that has one.
template <class Op, bool kSearches = Op::kSearches>
struct SearchOf {
  using Type = typename Op::Search;
};
template <class Op>
struct SearchOf<Op, false> {
  using Type = Op;
};

// What a warp does next: steps until no lane has one left, then a round, or nothing. All lanes must call.
template <class Op>
inline unsigned any_next(unsigned next) {
  if constexpr (Op::kSearches) {
    if (any_lane(next & kStepNext)) return kStepNext;
  }
  return any_lane(next) ? kRoundNext : 0;
}
// The same in a block, all of whose threads must call. flags: one set for two calls that follow one another, since one
// barrier stands between them.
template <class Op, int kWarps>
inline unsigned any_next_of_block(unsigned next, unsigned char (&flags)[kWarps]) {
  next = any_next<Op>(next);
  if (threadIdx.x % kWarp == 0) flags[threadIdx.x / kWarp] = next;
  __syncthreads();
  return any_next<Op>(flags[threadIdx.x % kWarp % kWarps]);
}

}  // namespace cupynorm
