// How blocks of a grid that share rows tell one another what they found of them, in memory that the call allocates.
#pragma once
#include <base/grid.cuh>
#include <base/reduce.cuh>

namespace cupynorm {

// What a cluster's blocks tell one another of a row: a Slot from every block, in words of 16 bytes.
template <class Op>
struct SlotWords {
  static constexpr int kQuads = int((sizeof(Slot<Op>) + 15) / 16);
  union {
    uint4 words[kQuads];
    Slot<Op> slot;
  };
};

// Written to and read from global memory, in whole accesses.
template <class Op>
inline void leave_slot(SlotWords<Op>* to, const Slot<Op>& slot) {
  SlotWords<Op> own = {};
  own.slot = slot;
#pragma unroll
  for (int i = 0; i < SlotWords<Op>::kQuads; ++i) to->words[i] = own.words[i];
}
template <class Op>
inline Slot<Op> left_slot(const SlotWords<Op>* from) {
  SlotWords<Op> words;
#pragma unroll
  for (int i = 0; i < SlotWords<Op>::kQuads; ++i) words.words[i] = from->words[i];
  return words.slot;
}

// The State of a row of which `parts` Slots lie in global memory, kApart apart: merged by a warp, all of whose lanes
// get it, counted from the first one's pivot.
template <class Op, int kApart>
inline Slot<Op> merged_by_warp(const SlotWords<Op>* slots, int parts) {
  const int lane = threadIdx.x % kWarp;
  Slot<Op> all = lane < parts ? left_slot<Op>(slots + lane * kApart) : Slot<Op>{Op::identity(), 0};
#pragma unroll 4
  for (int i = lane + kWarp; i < parts; i += kWarp) {
    const Slot<Op> slot = left_slot<Op>(slots + i * kApart);
    all.state = Op::template merge<false>(all.state, Op::rebase(slot.state, slot.pivot, all.pivot));
  }
  const auto pivot = Lanes<kWarp>::first(all.pivot);
  if (lane < parts) all.state = Op::rebase(all.state, all.pivot, pivot);
  return {reduce_lanes<Op, false, kWarp>(all.state), pivot};
}

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
    if (threadIdx.x % kWarp == 0) leave_slot(messages + meeting.part * kMost + r, slot);
  }
  if (meeting.turn == 0) grid_wait(meeting.begun);  // the counters are 0
  meeting.meet(NothingMeanwhile());
  ++meeting.turn;
#pragma unroll 1
  for (int r = warp; r < count; r += kWarps) give(r, merged_by_warp<Op, kMost>(messages + r, gridDim.y));
  __syncthreads();
}

}  // namespace cupynorm
