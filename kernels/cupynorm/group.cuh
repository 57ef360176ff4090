// All-reduces of an op's State over the threads that share a row. The only file with shuffles and barriers.
#pragma once
#include <cupynorm/math.cuh>

namespace cupynorm {

// Over kLanes neighbouring lanes (a power of two): every lane gets the result, and all get the same bits, because merge is
// symmetric. All 32 lanes of the warp must call. kEqual: every lane holds the same number of elements.
template <class Op, bool kEqual, int kLanes>
inline typename Op::State reduce_lanes(typename Op::State s) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    auto across = [distance](auto value) { return __shfl_xor_sync(kAllLanes, value, distance); };
    s = Op::template merge<kEqual>(s, Op::template exchange<kEqual>(s, across));
  }
  return s;
}

// The sum over kLanes neighbouring lanes, as reduce_lanes.
template <int kLanes, typename T>
inline T sum_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// The State of what kLanes neighbouring lanes hold, x[N] each, of which `valid` elements count; `count` is the sum of valid over
// the lanes. `mine` is this lane's own State, where the op has one. In lanes two exchanges of one number are cheaper than one of
// a State (LayerNorm, half of 1000 columns on an H200: 0.88 of the copy rate before), so an op may take two passes.
template <class Op, bool kEqual, int kLanes, int N>
inline typename Op::State summarize_lanes(typename Op::Compute (&x)[N], int valid, int count, typename Op::Compute origin,
                                          typename Op::State& mine) {
  using Compute = typename Op::Compute;
  if constexpr (Op::kTwoPass && kLanes > 1) {
    const Compute sum = sum_lanes<kLanes>(Op::first_pass(x, valid, origin));
    const Compute mean = kEqual ? sum * (Compute(1) / (kLanes * N)) : sum * reciprocal(larger(Compute(count), Compute(1)));
    const Compute m2 = sum_lanes<kLanes>(Op::second_pass(x, valid, mean));
    return {mean, m2, kEqual ? Compute(kLanes * N) : Compute(count)};
  } else {
    mine = Op::summarize(x, valid, origin);
    return reduce_lanes<Op, kEqual, kLanes>(mine);
  }
}

// A warp's state in shared memory, and the value that it counts from.
template <class Op>
struct Slot {
  typename Op::State state;
  typename Op::Compute origin;
};

// Over the kWarps neighbouring warps (a power of two, 32 at most) of each group of a block, after each warp has reduced its
// lanes; kRows states at once. Every thread gets its group's results. `warp` counts within the group. All threads of the
// block must call. `origin` is what each warp's states count from; every warp ends with its own. One barrier: a caller in a
// loop must take other slots the next time, so that nobody overwrites what a slow warp still reads.
template <class Op, bool kEqual, int kWarps, int kRows, int kGroups>
inline void reduce_warps(typename Op::State (&s)[kRows], const typename Op::Compute (&origin)[kRows],
                         Slot<Op> (&slots)[kRows][kGroups][kWarps], int group, int warp) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) slots[r][group][warp] = {s[r], origin[r]};
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Slot<Op> slot = slots[r][group][lane % kWarps];
    s[r] = reduce_lanes<Op, kEqual, kWarps>(Op::rebase(slot.state, slot.origin, origin[r]));
  }
}

// Over the whole block, whatever its size in warps. `slots` is for 2 x 32 states; `turn` alternates between calls.
template <class Op>
inline typename Op::State reduce_block(typename Op::State s, typename Op::State* slots, int turn) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  slots += turn * kWarp;
  s = reduce_lanes<Op, false, kWarp>(s);
  if (lane == 0) slots[threadIdx.x / kWarp] = s;
  __syncthreads();
  return reduce_lanes<Op, false, kWarp>(lane < warps ? slots[lane] : Op::identity());
}

}  // namespace cupynorm
