// The reduction of rows that the blocks of a cluster share, where a block goes through many tiles: each block merges
// what all have found of some of the rows, which it owns, and tells all (docs/notes/096). If each were told of all rows
// by all, a block would get as many messages for each row as there are blocks, and each is a packet of its own.
#pragma once
#include <row/apart.cuh>

namespace cupynorm {

// Rows of a tile in the order in which threads side by side have them: first the first row of each, then the second.
// Then what they have of their rows is side by side, too, and meets in no bank of shared memory.
template <class Shape>
struct RowsSideBySide {
  static constexpr bool has(int) { return true; }
  static int slot(int v) { return v * Shape::kLanes + int(threadIdx.x) % Shape::kLanes; }
  static int place(int thread, int v) {
    return thread / Shape::kLanes * Shape::kRows + v * Shape::kLanes + thread % Shape::kLanes;
  }
};

// The shared memory of such reductions: a Slot of each row from each warp, of each row that the block owns from each
// block, and of each whole row.
template <class Op, class Shape>
struct OwnedPlaces {
  static constexpr int kRows = Shape::kRows, kCtas = Shape::kCtasPerRow, kOwn = kRows / kCtas;
  static constexpr int kSlots = Shape::kSlots * kRows, kMessages = kCtas > 1 ? kRows : 0;
  static constexpr int kBytes = (kSlots + kMessages + kRows) * int(sizeof(SlotWords<Op>));
  static_assert(kRows % kCtas == 0, "each block owns as many");
  SlotWords<Op>* slots;
  Mbarrier* mbarriers;  // two

  SlotWords<Op>* messages() const { return slots + kSlots; }  // [block][own row]
  SlotWords<Op>* whole() const { return messages() + kMessages; }
};
template <class Places, class Shape>
struct OwnedShape {
  static constexpr int kRows = Places::kOwn, kBlock = Shape::kBlock;
  static constexpr bool kOfGrid = false;
};

template <class Op>
inline void send_slot(SlotWords<Op>* to, Mbarrier* mbarrier, int block, const Slot<Op>& slot) {
  SlotWords<Op> own = {};
  own.slot = slot;
#pragma unroll
  for (int i = 0; i < SlotWords<Op>::kQuads; ++i) send_words(&to->words[i], mbarrier, block, own.words[i]);
}

// As reduce_apart (apart.cuh). One place for each message is enough. A block sends what it has of the next tile after
// it has got the whole rows of this one: then all owners have read what they were sent. Owners send the next whole rows
// after all blocks have sent what they have of them, each behind a barrier: then their threads have read these.
template <class Op, class Shape>
inline void reduce_owned(typename Op::State (&s)[Shape::kVector], const typename Op::Compute (&pivot)[Shape::kVector],
    const OwnedPlaces<Op, Shape>& places, int part, int turn) {
  using Places = OwnedPlaces<Op, Shape>;
  using OfWarps = GatheredSlots<Op, Shape, Shape::kSlots>;
  constexpr int kCtas = Places::kCtas, kOwn = Places::kOwn;
  constexpr RowsSideBySide<Shape> own;
  leave_slots<Op, Shape>(s, pivot, places.slots, own);
  if constexpr (kCtas == 1) {
    OfWarps::give_all(places.slots, [&](int row, int number, const Slot<Op>& all) {
      if (number == 0) places.whole()[row].slot = all;
    });
  } else {
    using OfBlocks = GatheredSlots<Op, OwnedShape<Places, Shape>, kCtas>;
    Mbarrier* const of_blocks = places.mbarriers;
    Mbarrier* const of_owners = places.mbarriers + 1;
    if (threadIdx.x == 0) {
      expect_bytes(of_blocks, unsigned(Places::kRows * sizeof(SlotWords<Op>)));
      expect_bytes(of_owners, unsigned(Places::kRows * sizeof(SlotWords<Op>)));
    }
    OfWarps::give_all(places.slots, [&](int row, int number, const Slot<Op>& all) {
      if (number == 0) send_slot<Op>(places.messages() + part * kOwn + row % kOwn, of_blocks, row / kOwn, all);
    });
    await_mbarrier(of_blocks, turn & 1);
    OfBlocks::give_all(places.messages(), [&](int row, int number, const Slot<Op>& all) {
#pragma unroll
      for (int block = 0; block < kCtas; block += OfBlocks::kLanes)
        send_slot<Op>(places.whole() + part * kOwn + row, of_owners, block + number, all);
    });
    await_mbarrier(of_owners, turn & 1);
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < Shape::kVector; ++v) {
    const Slot<Op> all = places.whole()[own.slot(v)].slot;
    s[v] = Op::rebase(all.state, all.pivot, pivot[v]);
  }
}

}  // namespace cupynorm
