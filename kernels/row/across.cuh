// block, cluster, shared, uncached of rows whose elements lie apart from one another in memory, as along an axis that is
// not the last. Neighbouring threads have neighbouring rows, so that what a warp accesses lies side by side: a block is
// blockDim.x rows wide, and blockDim.y threads share each row, every blockDim.y-th element of it. Elements are accessed
// one by one: any Load, Store and mask will do. With a width of 1 the lanes of a warp go along the row instead.
#pragma once
#include <base/reduce.cuh>
#include <row/running.cuh>
#include <row/waiting.cuh>

namespace cupynorm {

constexpr int kInRegisters = 1, kInSharedMemory = 2;  // where a row waits; 0: nowhere, it is read again

// A thread loads kElements elements at a time, which are all that it has where a row waits in registers. kCtasPerRow:
// blocks of a cluster that share each row. kBlock, kMinBlocks: as in Registers.
template <int Elements, int Waits, int CtasPerRow, int Block, int MinBlocks>
struct Across {
  static constexpr int kElements = Elements, kWaits = Waits, kCtasPerRow = CtasPerRow, kBlock = Block,
      kMinBlocks = MinBlocks;
  static_assert(Elements <= 32, "a bit for each element");
};

// The State of each row of a block from those of the threads that share it: every thread gets its row's, counted from
// its own pivot. All threads must call; `slots` must not be in use, nor be used again before a barrier. Threads merge
// in two steps, of about as many States each, in an order that follows from blockDim.y alone.
template <class Op>
inline void reduce_down(typename Op::State& s, typename Op::Compute pivot, Slot<Op>* slots) {
  const int across = blockDim.x, down = blockDim.y, lane = threadIdx.x, turn = threadIdx.y;
  if (down == 1) return;
  int first = 1;  // threads of the first step
  while (first * first < down) first *= 2;
  slots[turn * across + lane] = {s, pivot};
  __syncthreads();
  if (turn < first) {
    for (int other = turn + first; other < down; other += first) {
      const Slot<Op> slot = slots[other * across + lane];
      s = Op::template merge<false>(s, Op::rebase(slot.state, slot.pivot, pivot));
    }
    slots[turn * across + lane].state = s;
  }
  __syncthreads();
  const Slot<Op> begin = slots[lane];
  s = begin.state;
  for (int other = 1; other < first && other < down; ++other) {
    const Slot<Op> slot = slots[other * across + lane];
    s = Op::template merge<false>(s, Op::rebase(slot.state, slot.pivot, begin.pivot));
  }
  s = Op::rebase(s, begin.pivot, pivot);
}

// What a cluster's blocks tell one another of each of their rows: a Slot from every block, in words of 16 bytes.
template <class Op>
struct SlotWords {
  static constexpr int kQuads = int((sizeof(Slot<Op>) + 15) / 16);
  union {
    uint4 words[kQuads];
    Slot<Op> slot;
  };
};

// The same over the blocks of a cluster, after reduce_down. mailbox: kCtasPerRow * blockDim.x SlotWords of this block,
// used once; its mbarrier has been made, and all blocks have met since.
template <class Op, int kCtasPerRow>
inline void reduce_cluster(typename Op::State& s, typename Op::Compute pivot, SlotWords<Op>* mailbox,
    Mbarrier* mbarrier, int part) {
  constexpr int kQuads = SlotWords<Op>::kQuads;
  const int across = blockDim.x, lane = threadIdx.x;
  if (threadIdx.x + threadIdx.y == 0) expect_bytes(mbarrier, unsigned(kCtasPerRow * across * kQuads * 16));
  SlotWords<Op> own = {};
  own.slot = {s, pivot};
  for (int block = threadIdx.y; block < kCtasPerRow; block += blockDim.y) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) send_words(&mailbox[part * across + lane].words[i], mbarrier, block, own.words[i]);
  }
  await_mbarrier(mbarrier, 0);
  const Slot<Op> begin = mailbox[lane].slot;
  s = begin.state;
  for (int block = 1; block < kCtasPerRow; ++block) {
    const Slot<Op> slot = mailbox[block * across + lane].slot;
    s = Op::template merge<false>(s, Op::rebase(slot.state, slot.pivot, begin.pivot));
  }
  s = Op::rebase(s, begin.pivot, pivot);
}

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_across(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Largest = Magnitude<Compute>;
  using Index = typename Conditional<Shape::kWaits == 0, int64, int>::Type;  // what waits is of few columns
  constexpr int kElements = Shape::kElements, kCtasPerRow = Shape::kCtasPerRow;
  constexpr bool kHolds = Shape::kWaits == kInRegisters, kKeeps = Shape::kWaits == kInSharedMemory;
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || !Load::kStoresComputed, "nothing of what is dropped is kept");
  __shared__ Mbarrier mbarriers[2];

  // this block's columns, and this thread's: every step-th from `first` on, before `end`
  const int part = kCtasPerRow > 1 ? cluster_rank() : 0, step = blockDim.y;
  const Index cols = Index(a.cols), each = (cols + (kCtasPerRow - 1)) / kCtasPerRow;
  const Index begin = part * each, end = cols - begin < each ? cols : begin + each, first = begin + threadIdx.y;
  const int64 row = int64(blockIdx.x / kCtasPerRow) * blockDim.x + threadIdx.x;
  const bool here = row < a.rows;
  // shared memory: what waits, mailboxes, slots; the latter also of the largest results
  const int across = blockDim.x, threads = across * step;
  const WaitingRow<Load, Element, 1> waiting = {kKeeps ? int((each + step - 1) / step) * threads : 0};
  auto* const mailbox = reinterpret_cast<SlotWords<Op>*>(shared_memory + (waiting.bytes() + 15) / 16 * 16);
  auto* const largest_mailbox =
      reinterpret_cast<SlotWords<Largest>*>(mailbox + (kCtasPerRow > 1 ? kCtasPerRow * across : 0));
  auto* const slots = reinterpret_cast<Slot<Op>*>(
      largest_mailbox + (kCtasPerRow > 1 && Store::kScales ? kCtasPerRow * across : 0));
  auto* const largest_slots = reinterpret_cast<Slot<Largest>*>(slots + threads);
  if constexpr (kCtasPerRow > 1) {
    if (threadIdx.x == 0 && threadIdx.y == 0) init_mbarrier(&mbarriers[0]), init_mbarrier(&mbarriers[1]);
    cluster_sync();  // all blocks have begun: they may write into one another
  }
  pdl_wait_and_trigger();
  const auto source = a.load.at(here ? row : 0);
  const auto target = a.store.at(here ? row : 0);

  typename Load::template Loaded<1> loaded[kElements];
  typename Store::template EpilogueOperands<1> operands[kElements];
  Element x[kElements];
  unsigned keeps = 0;
  // Loads the thread's elements from column `at` on, as many as there are. kAgain: for their results.
  auto fetch = [&](Index at, bool results) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const Index col = at + j * step;
      if (!here || col >= end) continue;
      if (!kKeeps || !results) loaded[j] = source.template load<1>(col);
      if constexpr (Store::kHasEpilogueOperands) {
        if (kHolds || results) operands[j] = target.template epilogue_operands<1>(col);
      }
    }
  };
  // Computes them, the others are padding; counts those that there are.
  auto take = [&](Index at) {
    int there = 0;
    keeps = 0;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const Index col = at + j * step;
      x[j] = Op::padding();
      if (!here || col >= end) continue;
      Element own[1];
      keeps |= (source.template unpack<1>(loaded[j], own, col, Op::padding()) & 1) << j;
      x[j] = own[0];
      ++there;
    }
    return there;
  };
  auto result = [&](int j, const typename Op::Row& whole, Compute (&y)[1]) {
    y[0] = kHolds ? Op::map(x[j], whole) : Op::map_raw(x[j], whole);
    if constexpr (Load::kDrops) y[0] = keeps >> j & 1 ? y[0] : Op::dropped();
  };
  // The number of element j's place, where it waits in shared memory.
  auto place = [&](Index at, int j) { return int(at - first) * across + threadIdx.y * across + threadIdx.x + j * threads; };

  // ---- the row's State
  Compute pivot = 0;
  typename Op::State mine = Op::identity();
  if constexpr (kHolds) {
    fetch(first, false);
    const int there = take(first);
    if constexpr (Op::kHasPivot) pivot = Op::pivot_of(x, Precision());
    if constexpr (Load::kStoresComputed) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (here && first + j * step < end) source.template store_computed<1>(x + j, first + j * step);
      }
    }
    mine = Op::summarize(x, Predicate<0>{there, false}, pivot);
  } else {
    Running<Op> running;
#pragma unroll 1
    for (Index at = first; at < end; at += kElements * step) {
      fetch(at, false);
      const int there = take(at);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const Index col = at + j * step;
        if (!here || col >= end) continue;
        const Element own[1] = {x[j]};
        if constexpr (Load::kStoresComputed) source.template store_computed<1>(own, col);
        if constexpr (kKeeps) waiting.put(place(at, j), loaded[j], own, keeps >> j & 1);
      }
      if (there > 0) running.template add<Precision>(x, Predicate<0>{there, false});
    }
    mine = running.own_state(pivot);
  }
  typename Op::State total = mine;
  reduce_down<Op>(total, pivot, slots);
  if constexpr (kCtasPerRow > 1) reduce_cluster<Op, kCtasPerRow>(total, pivot, mailbox, &mbarriers[0], part);
  const typename Op::Row whole = a.op.finish(kHolds ? mine : total, total, a.cols, pivot);
  const bool saves = here && part == 0 && threadIdx.y == 0;
  if (saves) a.op.save(row, whole);

  // ---- its results
  // Brings the elements from column `at` on back, for their results.
  auto bring = [&](Index at) {
    if constexpr (!kHolds) fetch(at, true);
    if constexpr (kKeeps) {
      keeps = 0;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (!here || at + j * step >= end) continue;
        Element own[1];
        keeps |= (waiting.get(place(at, j), source, own) & 1) << j;
        x[j] = own[0];
      }
    } else if constexpr (!kHolds) {
      take(at);
    }
  };
  auto store = [&](const Compute (&y)[1], int j, Index col) {
    const auto columns = a.store.template columns<1>(col);
    if constexpr (Store::kHasEpilogueOperands) target.template store<1>(y, columns, operands[j], col);
    else target.template store<1>(y, columns, col);
  };
  // All that the thread has: at once where it holds the row, else kElements at a time.
  auto each_round = [&](auto&& body) {
    if constexpr (kHolds) {
      body(first);
    } else {
#pragma unroll 1
      for (Index at = first; at < end; at += kElements * step) body(at);
    }
  };
  auto each_element = [&](Index at, auto&& body) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      if (here && at + j * step < end) body(j, at + j * step);
    }
  };
  if constexpr (Store::kScales) {
    typename Largest::State largest = Largest::identity();
    auto finish = [&](int j, Index col, Compute (&z)[1]) {
      Compute y[1];
      result(j, whole, y);
      Store::template finish<1>(y, a.store.template columns<1>(col), z);
    };
    each_round([&](Index at) {
      bring(at);
      each_element(at, [&](int j, Index col) {
        Compute z[1];
        finish(j, col, z);
        largest = Largest::template merge<false>(largest, Largest::of(z));
        if constexpr (kHolds) field(x[j], 0) = z[0];
      });
    });
    reduce_down<Largest>(largest, 0, largest_slots);
    if constexpr (kCtasPerRow > 1)
      reduce_cluster<Largest, kCtasPerRow>(largest, 0, largest_mailbox, &mbarriers[1], part);
    const auto scale = a.store.scale_of(largest.max);
    if (saves) a.store.save(row, scale);
    each_round([&](Index at) {
      bring(at);
      each_element(at, [&](int j, Index col) {
        Compute z[1];
        if constexpr (kHolds) z[0] = field(x[j], 0);
        else finish(j, col, z);
        target.template store_scaled<1>(z, scale, col);
      });
    });
  } else {
    each_round([&](Index at) {
      bring(at);
      each_element(at, [&](int j, Index col) {
        Compute y[1];
        result(j, whole, y);
        store(y, j, col);
      });
    });
  }
}

}  // namespace cupynorm
