// How blocks of a grid that share rows tell one another what they found of them, in memory that the call allocates.
#pragma once
#include <base/grid.cuh>
#include <base/reduce.cuh>

namespace cupynorm {

// Sums and maxima over the lanes of a warp that are kLanes apart, as Lanes has them over neighbouring ones.
template <int kLanes>
struct LanesApart {
  template <typename T>
  static T sum(T value) {
#pragma unroll
    for (int distance = kLanes; distance < kWarp; distance *= 2)
      value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
  }
  template <typename T>
  static T first(T value) {
    if constexpr (kLanes >= kWarp) return value;
    else return __shfl_sync(kAllLanes, value, threadIdx.x % kLanes);
  }
  template <typename T>
  static T max(T value) {
#pragma unroll
    for (int distance = kLanes; distance < kWarp; distance *= 2)
      value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
    return value;
  }
};

// What blocks that share rows tell one another of a row: a Slot from every block, in words of 16 bytes.
template <class Op>
struct SlotWords {
  static constexpr int kQuads = int((sizeof(Slot<Op>) + 15) / 16);
  union {
    uint4 words[kQuads];
    Slot<Op> slot;
  };
};

// To and from global memory, in whole accesses.
template <class Op>
inline void write_slot(SlotWords<Op>* to, const Slot<Op>& slot) {
  SlotWords<Op> own = {};
  own.slot = slot;
#pragma unroll
  for (int i = 0; i < SlotWords<Op>::kQuads; ++i) to->words[i] = own.words[i];
}
template <class Op>
inline Slot<Op> read_slot(const SlotWords<Op>* from) {
  SlotWords<Op> own;
#pragma unroll
  for (int i = 0; i < SlotWords<Op>::kQuads; ++i) own.words[i] = from->words[i];
  return own.slot;
}

// The State of a row, given its slots. kLanes lanes that are kWarp / kLanes apart call. Each merges slot_at(i) for all
// i from `first` on, kLanes apart, and before `end`, if it has any, and then with the others; all of them get it.
// kCount: of how many slots in all each lane has one at least; 0: of any number. slot_at is the caller's, because one
// way to compute addresses costs either kind of caller registers that it has not.
template <class Op, int kLanes, int kCount, class SlotAt>
inline Slot<Op> merge_slots(SlotAt slot_at, bool any, int first, int end) {
  using Lanes = LanesApart<kWarp / kLanes>;
  Slot<Op> all = any ? slot_at(first) : Slot<Op>{Op::identity(), 0};
#pragma unroll(kCount ? kCount : 4)
  for (int i = first + kLanes; i < (kCount ? first + kCount : end); i += kLanes) {
    if (kCount % kLanes && i >= end) continue;
    const Slot<Op> slot = slot_at(i);
    all.state = Op::template merge<false>(all.state, Op::rebase(slot.state, slot.pivot, all.pivot));
  }
  if constexpr (kLanes > 1) {
    const auto pivot = Lanes::first(all.pivot);
    if (any) all.state = Op::rebase(all.state, all.pivot, pivot);
    all = {Op::gather(all.state, Lanes()), pivot};
  }
  return all;
}

// Which blocks of the launch share rows: this block's group of them, of how many, and its part of how many.
struct Sharing {
  int group, groups, part, parts;
  // For a cooperative launch of gridDim.x groups, each of gridDim.y blocks with successive numbers. Blocks of one
  // multiprocessor then belong to different groups, and one works while another waits.
  static Sharing of_grid() {
    const int groups = gridDim.x, parts = gridDim.y, number = blockIdx.y * groups + blockIdx.x, group = number / parts;
    return {group, groups, number - group * parts, parts};
  }
};

// The counter of each group of blocks has a line of its own. How much room they all need is messages_bytes of
// cupynorm/plan/problem.py.
constexpr int kCounterBytes = 128;

// How the gridDim.y blocks of a group meet that share rows: each leaves its Slots in global memory, then all read what
// all have left. The next ones take another place, and the ones after that the first again: nobody leaves them before
// all have read these. Addresses are computed each time: a thread with 64 numbers has no registers for them.
struct GridMeeting {
  unsigned char* room;  // a counter of each group, then all messages
  int group, part;
  unsigned turn, begun;  // how often they have met, and what grid_wait takes
  int slot_bytes;        // of each message: as many for all ops whose reductions alternate, or groups would disagree

  template <class Op, int kRows>
  SlotWords<Op>* messages() const {  // [block][row]
    const unsigned groups = gridDim.x, first = ((turn & 1) * groups + group) * gridDim.y * kRows;
    unsigned char* messages = room + int64(groups) * kCounterBytes + int64(first) * slot_bytes;
    make_opaque(messages);  // of global memory
    return reinterpret_cast<SlotWords<Op>*>(messages);
  }
  // By all blocks of the launch, before any of them meets.
  void begin() {
    if (part == 0 && threadIdx.x == 0) *counter() = 0;
    begun = grid_arrive();
  }
  unsigned* counter() const { return reinterpret_cast<unsigned*>(room + group * kCounterBytes); }
  // meanwhile(): what a block does until the last one has come
  template <class Meanwhile>
  void meet(Meanwhile meanwhile) const {
    blocks_arrive(counter(), gridDim.y, part == 0);
    meanwhile();
    blocks_wait(counter(), turn);
  }
};
struct NothingMeanwhile {
  void operator()() const {}
};

// Merges what the blocks of a group have found of `count` rows, kMost at most: own(r) is what a warp of this block has
// to say of row r, the same in all lanes, and give(r, slot) gets the State of the whole row. Ends with a barrier.
template <class Op, int kMost, int kWarps, class Own, class Give>
inline void meet_in_room(GridMeeting& meeting, int count, Own own, Give give) {
  const int warp = threadIdx.x / kWarp;
  SlotWords<Op>* const messages = meeting.messages<Op, kMost>();
#pragma unroll 1
  for (int r = warp; r < count; r += kWarps) {
    const Slot<Op> slot = own(r);
    if (threadIdx.x % kWarp == 0) write_slot(messages + meeting.part * kMost + r, slot);
  }
  if (meeting.turn == 0) grid_wait(meeting.begun);  // the counters are 0
  meeting.meet(NothingMeanwhile());
  ++meeting.turn;
#pragma unroll 1
  for (int r = warp; r < count; r += kWarps) {
    const int lane = threadIdx.x % kWarp, parts = gridDim.y;
    give(r, merge_slots<Op, kWarp, 0>(
        [&](int i) { return read_slot(messages + i * kMost + r); }, lane < parts, lane, parts));
  }
  __syncthreads();
}

}  // namespace cupynorm
