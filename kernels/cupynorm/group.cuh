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

// The State of what kLanes neighbouring lanes hold, x[N] each, of which `valid` ones count; `count` is the sum of that over
// the lanes. `mine` is this lane's own State, where the op has one. In lanes two exchanges of one number are cheaper than one of
// a State (LayerNorm, half of 1000 columns on an H200: 0.88 of the copy rate before), so an op may take two passes.
template <class Op, bool kEqual, int kLanes, int N, class Valid>
inline typename Op::State summarize_lanes(typename Op::Compute (&x)[N], Valid valid, int count, typename Op::Compute origin,
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

// A slot in global memory, which other blocks read after a barrier of the grid: never from a cache of their own. `to` is aligned
// to 4 bytes.
template <class Op>
inline void write_slot(void* to, const Slot<Op>& slot) {
  const unsigned* word = reinterpret_cast<const unsigned*>(&slot);
#pragma unroll
  for (int i = 0; i < int(sizeof slot / 4); ++i) static_cast<volatile unsigned*>(to)[i] = word[i];
}
template <class Op>
inline Slot<Op> read_slot(const void* from) {
  Slot<Op> slot;
  unsigned* word = reinterpret_cast<unsigned*>(&slot);
#pragma unroll
  for (int i = 0; i < int(sizeof slot / 4); ++i) word[i] = static_cast<const volatile unsigned*>(from)[i];
  return slot;
}

// What the blocks of a cluster tell one another: a slot from each, and the signal that all have come.
template <class Op, int kParts>
struct alignas(16) Mail {
  static constexpr int kWords = int((sizeof(Slot<Op>) + 15) / 16);
  uint4 words[kParts][kWords];
  Signal signal;
};

// Over the blocks of a cluster, after each block has reduced its threads: every thread gets the row's state. `part` is this
// block's number. All blocks must have begun, their signals made. A caller in a loop takes two Mails in turn, and meets its own
// block (reduce_warps) between two calls; `parity` changes each time that a Mail is used.
template <class Op, bool kEqual, int kParts>
inline void reduce_blocks(typename Op::State& s, typename Op::Compute origin, Mail<Op, kParts>& mail, int part, unsigned parity) {
  constexpr int kWords = Mail<Op, kParts>::kWords;
  union {
    uint4 words[kWords];
    Slot<Op> slot;
  } own = {}, other;
  own.slot = {s, origin};
  if (threadIdx.x == 0) expect_bytes(&mail.signal, sizeof mail.words);
  if (int(threadIdx.x) < kParts) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) send_words(&mail.words[part][i], &mail.signal, threadIdx.x, own.words[i]);
  }
  await_words(&mail.signal, parity);
#pragma unroll
  for (int i = 0; i < kWords; ++i) other.words[i] = mail.words[threadIdx.x % kParts][i];
  s = reduce_lanes<Op, kEqual, kParts>(Op::rebase(other.slot.state, other.slot.origin, origin));
}

}  // namespace cupynorm
