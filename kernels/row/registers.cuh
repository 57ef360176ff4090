// warp, block, cluster: the row waits in registers, of 1 to 32 lanes of a warp, of 2 to 32 warps of a block, or of the
// blocks of a cluster. One kernel for all, of the pieces in row/: layout (which elements a thread has), columns (where
// gamma and beta wait), schedule (which rows a block computes), pipeline (rows that are prefetched), load and epilogue.
#pragma once
#include <base/async_copy.cuh>
#include <base/cluster.cuh>
#include <base/pdl.cuh>
#include <row/choices.cuh>
#include <row/columns.cuh>
#include <row/epilogue.cuh>
#include <row/layout.cuh>
#include <row/load.cuh>
#include <row/pipeline.cuh>
#include <row/rounds.cuh>
#include <row/schedule.cuh>

namespace cupynorm {

constexpr int kQueue = 8;  // rows of a cluster that the dynamic scheduler's queue has room for

// Before rows are reduced over warps and blocks: empties slots that no warp has, makes the signals of a cluster, and
// puts its first rows into the scheduler's queue. Ends with a barrier over the cluster.
template <class Shape, bool kTwoSets, bool kScales, bool kDynamic, class Slots, class LargestSlots,
    class ClusterMailboxes, class LargestMailbox>
inline void begin_exchange(Slots& slots, ClusterMailboxes& cluster_mailboxes, unsigned* coming,
    LargestSlots& largest_slots,
                           LargestMailbox& largest_mailbox) {
  constexpr int kCtasPerRow = Shape::kCtasPerRow, kStages = Shape::kStages;
  if constexpr (slots_for(Shape::kWarps) > Shape::kWarps && Shape::kWarps > 1) {
    clear_slots<Shape::kWarps>(slots[0]);
    if constexpr (kTwoSets) clear_slots<Shape::kWarps>(slots[1]);
    if constexpr (kScales) clear_slots<Shape::kWarps>(largest_slots);
  }
  if constexpr (kCtasPerRow > 1) {
    constexpr unsigned kMailboxes = sizeof(cluster_mailboxes) / sizeof(cluster_mailboxes[0]);
    if (threadIdx.x < kMailboxes) init_mbarrier(&cluster_mailboxes[threadIdx.x].mbarrier);
    if (kDynamic && int(threadIdx.x) <= kStages)
      coming[threadIdx.x] = (blockIdx.x + threadIdx.x * gridDim.x) / kCtasPerRow;
    // as if it had come before
    if (kDynamic && threadIdx.x == 0) cluster_mailboxes[1].note.x = (blockIdx.x + kStages * gridDim.x) / kCtasPerRow;
    if constexpr (kScales) {
      if (threadIdx.x == 0) init_mbarrier(&largest_mailbox.mbarrier);
    }
    if constexpr (kDynamic) __syncthreads();  // of what this block has written itself the meeting says nothing
    cluster_sync();                          // all blocks have begun: they may write into one another
  }
}

// The threads of a block stay together, past the last row too, because shuffles and barriers name all of them. The
// function is longer than 150 lines because arrays and index closures that live elsewhere cost registers
// (docs/notes/048, "What `row_registers` keeps in its own body").
template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_registers(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Choice = Choices<Op, Load, Store, Shape>;
  constexpr int kGroup = Shape::kGroup, kRows = Shape::kRows, kCtasPerRow = Shape::kCtasPerRow, kWarps = Shape::kWarps;
  constexpr int kStages = Shape::kStages, kEdge = Shape::kEdge;
  constexpr bool kDynamic = Shape::kDynamic, kOneSet = Choice::kOneSet, kConverts = converts<Store, Shape>();
  const int lane = Shape::kAll ? threadIdx.x : threadIdx.x % kGroup, group = Shape::kAll ? 0 : threadIdx.x / kGroup;
  const int part = kCtasPerRow > 1 ? cluster_rank() : 0;
  auto saves = [&] { return lane == 0 && part == 0; };
  const auto cols = [&] {
    if constexpr (Shape::kFull && kCtasPerRow == 1) return Constant<kGroup * Shape::kInVectors>();
    else return int(a.cols);
  }();

  // What warps and blocks tell one another.
  constexpr int kSlots = slots_for(kWarps);
  constexpr bool kEvenly = Shape::kFull && kSlots == kWarps;  // every slot is of as many elements
  __shared__ Slot<Op> slots[kWarps > 1 && !kOneSet ? 2 : 1][kRows][Shape::kGroups][kSlots];
  __shared__ ClusterMailbox<Op, kCtasPerRow, kDynamic> cluster_mailboxes[kCtasPerRow > 1 ? 2 : 1];
  // the row in work and those to come, by their turns: registers are scarce
  __shared__ unsigned coming[kDynamic ? kQueue : 1];
  static_assert(kStages + 2 <= kQueue, "a place is taken again when its row has been written");
  // of the largest results: one of each will do, since the states' barrier and messages stand between two uses
  using Largest = Magnitude<Compute>;
  __shared__ Slot<Largest> largest_slots[kRows][Shape::kGroups][kSlots];
  __shared__ ClusterMailbox<Largest, kCtasPerRow> largest_mailbox;
  // of an op's further rounds, in two sets, too
  constexpr bool kRounds = Op::kRounds;
  __shared__ Slot<Op> round_slots[kRounds && kWarps > 1 ? 2 : 1][kRows][Shape::kGroups][kSlots];
  __shared__ ClusterMailbox<Op, kCtasPerRow> round_mailboxes[kRounds && kCtasPerRow > 1 ? 2 : 1];
  __shared__ unsigned char round_flags[2][Shape::kBlock / kWarp];
  using Search = typename SearchOf<Op>::Type;
  constexpr bool kSearches = Op::kSearches;
  __shared__ Slot<Search> step_slots[kSearches && kWarps > 1 ? 2 : 1][kRows][Shape::kGroups][kSlots];
  __shared__ ClusterMailbox<Search, kCtasPerRow> step_mailboxes[kSearches && kCtasPerRow > 1 ? 2 : 1];
  unsigned exchange = 0, steps = 0;  // counts the rounds, and the steps of searches
  if constexpr (kRounds) {
    if constexpr (kSlots > kWarps && kWarps > 1) {
      for (auto& each : round_slots) clear_slots<kWarps>(each);
      if constexpr (kSearches) {
        for (auto& each : step_slots) clear_slots<kWarps>(each);
      }
    }
    if constexpr (kCtasPerRow > 1) {
      if (threadIdx.x < 2) init_mbarrier(&round_mailboxes[threadIdx.x].mbarrier);
      if (kSearches && threadIdx.x < 2) init_mbarrier(&step_mailboxes[threadIdx.x].mbarrier);
    }
  }
  begin_exchange<Shape, !kOneSet, Store::kScales, kDynamic>(slots, cluster_mailboxes, coming, largest_slots,
      largest_mailbox);
  // of two sets of slots and mailboxes; in clusters more: a signal's parity changes every other time
  unsigned set = 0;
  unsigned largest_parity = 0;
  // The next kernel may begin at once, which is best for aligned rows. For unaligned rows it is better to let it begin
  // only when this kernel's loads have been issued (docs/notes/048, "When the next kernel may begin").
  pdl_wait();
  if constexpr (kEdge == 0) pdl_trigger_late();

  // Which elements of which rows.
  constexpr int kAtOnce = Shape::kGroups * kRows;  // rows of a block
  constexpr int64 kApart = Shape::kUnaligned > 0 ? kRows * Shape::kAlignmentPeriod : 1;
  const int64 limit = (a.rows + kApart - 1) / kApart * kApart;
  const int64 first = int64(blockIdx.x / kCtasPerRow) * kAtOnce, step = int64(gridDim.x / kCtasPerRow) * kAtOnce;
  auto row_of = [group](int64 base, int r) {  // each load instruction of a warp covers neighbouring rows
    if constexpr (Shape::kUnaligned == 0 || kRows == 1) return base + r * Shape::kGroups + group;
    const int64 number = base / kRows + group;
    return number / Shape::kAlignmentPeriod * (Shape::kAlignmentPeriod * kRows) + r * Shape::kAlignmentPeriod
        + number % Shape::kAlignmentPeriod;
  };
  auto share_at = [&](int64 row) {
    return share_of<Shape>(cols, a.store.at(row < a.rows ? row : 0).template head<Shape::kAligned>(), part);
  };
  Share share = kEdge > 0 ? share_at(row_of(first, 0)) : share_of<Shape>(cols, 0, part);
  auto has = [&](int p) { return p < Shape::kAlwaysValid || p * kGroup + lane < share.vectors; };
  auto col = [&](int p) { return share.head + (share.before + p * kGroup + lane) * Shape::kVector; };
  // from a thread's first column on, where vectors are whole: other vectors are then at constants
  auto masked_from = [&](int p) { return kEdge > 0 ? col(p) : p * (kGroup * Shape::kVector); };
  auto edge_col = [&] { return lane < share.heads ? lane : lane - share.heads + share.tail; };
  auto has_edge = [&] { return kEdge > 0 && lane < share.heads + share.tails; };
  const ThreadTile tile = {has, col, edge_col, has_edge, masked_from, lane};

  ParameterCache<Store, Shape, Compute, prefetch_bytes<Load, Shape>()> parameters;
  if constexpr (kConverts) parameters.set_columns(share, part, int(cols));
  else parameters.load_once(a.store, tile);

  // Rows to come: prefetched, and those of a dynamic scheduler. What is prefetched of a row is that row's share.
  typename Load::template Loaded<1> around[kRows];  // elements of this thread that are in no vector
  auto load_edges_of = [&](int64 base) { load_edges<Op, Load,
      Shape>(a, around, [&](int r) { return row_of(base, r); }, tile); };
  auto prefetch = [&](int64 base, int stage) {
    prefetch_rows<Load, Shape, Choice::kOneAddress>(a, stage, [&](int r) { return row_of(base, r); }, tile);
  };
  auto as_of = [&](int64 base, auto act) {
    const Share own = share;
    if constexpr (Shape::kFixed) share = share_at(base);
    act();
    if constexpr (Shape::kFixed) share = own;
  };
  int stage = 0;
  DynamicRows<Shape> dynamic = DynamicRows<Shape>::of(part);
  auto rows_ahead = [&](int64 base) {
    if constexpr (kDynamic) {
      const unsigned row = cluster_mailboxes[(set ^ 1) % 2].note.x;
      if (threadIdx.x == 0) coming[(set + kStages) % kQueue] = row;
      return int64(row);
    }
    return base + kStages * step;
  };
  auto next = [&](int64 base) {
    if constexpr (kConverts && !Shape::kFixed) __syncthreads();  // the parameters have been read
    if constexpr (kDynamic) return int64(kStages > 0 ? coming[set] : cluster_mailboxes[(set ^ 1) % 2].note.x);
    if constexpr (kOneSet && !kConverts) {
      if (base + step < limit) __syncthreads();  // the slots have been read
    }
    return base + step;
  };
  if constexpr (kStages > 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) as_of(first + s * step, [&] { prefetch(first + s * step, s); });
    if constexpr (kEdge > 0) load_edges_of(first);
  }
  if constexpr (kConverts && Shape::kFixed) parameters.fetch(a.store), parameters.convert_all();
  if constexpr (kCtasPerRow == 1) assume(first < limit);  // a grid has no more blocks than there are rows for

  for (int64 base = first; base < limit; base = next(base)) {
    auto row = [&](int r) { return row_of(base, r); };
    typename Load::template Loaded<Shape::kVector> loaded[kRows][Shape::kVectors];
    typename Load::RowPointer sources[kRows];
    typename Store::RowPointer targets[kRows];
    typename Store::template EpilogueOperands<Shape::kVector> epilogue_operands[kRows][Shape::kVectors];
    typename Store::template EpilogueOperands<1> epilogue_operands_edge[kRows];
    bool keeps_edge[kRows];
    unsigned keeps[kRows];
    bool some[kRows][Shape::kVectors], there[kRows];
    Compute pivot[kRows];
    ElementOf<Op> x[kRows][Shape::kElements];
    typename Op::State mine[kRows], total[kRows];
    ThreadRows<Op, Load, Store, Shape> rows =
        {loaded, sources, targets, epilogue_operands,  epilogue_operands_edge, keeps_edge, keeps,
                                               some,   there, pivot,  x,      mine,        total};
    if constexpr (kStages > 0) wait_for_copies<(kStages > 0 ? kStages - 1 : 0)>();
    if constexpr (Shape::kAll) assume(base < a.rows);
    if constexpr (kEdge > 0 && (kStages == 0 || Shape::kFixed)) {
      if constexpr (Shape::kParameterMode % 4 < 2) share = share_at(row_of(base, 0));
      if constexpr (kStages == 0) load_edges_of(base);
    }
    if constexpr (kConverts && !Shape::kFixed) parameters.fetch(a.store);
    load_rows(a, rows, around, stage, row, tile);
    if constexpr (!kConverts) parameters.load_with_rows(a.store, tile);
    if constexpr (kEdge > 0) pdl_trigger_late();
    if constexpr (kConverts && !Shape::kFixed) parameters.convert_all();

    const Counts counts = count_elements<Shape>(share, tile);
    const Predicate<Shape::kAlwaysValid * Shape::kVector, kEdge, (kCtasPerRow > 1 ? 2 : 1)> valid =
        {counts.thread, tile.has_edge()};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (Choice::kEarly) store_all_dropped(a, rows, r, parameters, tile);
      if constexpr (Choice::kInterval) {  // the branch stands here because in a function of its own it took registers
        if constexpr (kEdge > 0) unpack_edge(a, rows, around[r], r, row(r), tile);
        const int last = Shape::kVectors - 1;
        if (all_lanes(has(last) && sources[r].keeps_all(masked_from(0), masked_from(last) + Shape::kVector))) {
          keeps[r] = ~0u;
          mine[r] = summarize_kept<Op, Shape>(sources[r], loaded[r], x[r], valid, tile);
        } else {
          keeps[r] = 0;
          mine[r] = summarize_interval<Op, Shape>(sources[r], loaded[r], x[r], some[r], keeps[r], valid, tile);
        }
        if constexpr (!Op::kOwnNumber) pivot[r] = 0;
        mine[r] = with_own<Op>(mine[r], pivot[r]);
        total[r] = reduce_lanes<Op, false, Shape::kLanes>(mine[r]);
      } else {
        summarize_row(a, rows, around[r], r, row(r), stage, valid, counts.warp, tile);
      }
    }
    if constexpr (kStages > 0) {  // the row has been read from shared memory: its place is free
      const int64 last = rows_ahead(base);
      if constexpr (Shape::kFixed) {
        const int64 next = kStages == 1 ? last : int64(coming[(set + 1) % kQueue]);
        as_of(next, [&] { load_edges_of(next); });
      } else if constexpr (kEdge > 0) {
        load_edges_of(base + step);
      }
      as_of(last, [&] { prefetch(last, stage); });
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if constexpr (kRounds) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) mine[r] = total[r];  // of the warp, or of the group if that is less
    }
    if constexpr (kWarps > 1) {
      auto& own = slots[kCtasPerRow > 1 ? set % 2 : kOneSet ? 0 : set];
      reduce_warps<Op, kEvenly, kSlots>(rows.total, rows.pivot, own, group, lane / kWarp);
    }
    if constexpr (kCtasPerRow > 1) {
      // what a branch decides here the compiler would carry through the reduction, twice
      reduce_blocks<Op, Shape::kFull>(rows.total[0], rows.pivot[0], cluster_mailboxes[set % 2], part, set / 2 % 2,
          dynamic.next());
      dynamic.claim(a.rows);
    }
    set = kWarps == 1 ? 0 : kCtasPerRow > 1 ? (set + 1) % kQueue : set ^ 1;
    if constexpr (kRounds) {
      auto summarize = [&](const typename Op::Progress (&progress)[kRows], typename Op::State (&own)[kRows]) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (any_lane(!Op::settled(own[r], progress[r])))
            own[r] = reduce_lanes<Op, false, Shape::kLanes>(Op::summarize_again(x[r], valid, progress[r]));
        }
      };
      auto reduce = [&](typename Op::State (&states)[kRows]) {
        if constexpr (kWarps > 1)
          reduce_warps<Op, false, kSlots>(states, rows.pivot, round_slots[exchange % 2], group, lane / kWarp);
        if constexpr (kCtasPerRow > 1)
          reduce_blocks<Op, false>(states[0], rows.pivot[0], round_mailboxes[exchange % 2], part, exchange / 2 % 2);
        ++exchange;
      };
      auto step = [&](const typename Op::Progress (&progress)[kRows], typename Search::State (&found)[kRows]) {
        if constexpr (kSearches) {
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            found[r] = reduce_lanes<Search, false, Shape::kLanes>(Op::summarize_step(x[r], progress[r]));
          if constexpr (kWarps > 1)
            reduce_warps<Search, false, kSlots>(found, rows.pivot, step_slots[steps % 2], group, lane / kWarp);
          if constexpr (kCtasPerRow > 1)
            reduce_blocks<Search, false>(found[0], rows.pivot[0], step_mailboxes[steps % 2], part, steps / 2 % 2);
          ++steps;
        }
      };
      auto any = [&](unsigned next) {
        if constexpr (kWarps == 1) return any_next<Op>(next);
        else if constexpr (Shape::kGroups == 1) return next;
        else return any_next_of_block<Op>(next, round_flags[(exchange + steps) % 2]);
      };
      go_through_rounds<Op, kRows>(a.op, mine, total, summarize, reduce, step, any);
    }

    if constexpr (!kConverts) parameters.make_opaque();
    make_operands_opaque(rows);
    if constexpr (Store::kScales) {
      if constexpr (kConverts) parameters.find(share, lane);
      typename Largest::State largest[kRows];
      finish_scaled(a, rows, largest, parameters, row, cols, saves, tile);
      if constexpr (kWarps > 1) reduce_warps<Largest, false,
          kSlots>(largest, rows.pivot, largest_slots, group, lane / kWarp);
      if constexpr (kCtasPerRow > 1) {
        reduce_blocks<Largest, false>(largest[0], rows.pivot[0], largest_mailbox, part, largest_parity);
        largest_parity ^= 1;
      }
      store_scaled(a, rows, largest, row, saves, tile);
    } else {
      if constexpr (kConverts) parameters.find(share, lane);
      store_rows(a, rows, parameters, row, cols, saves, tile);
    }
  }
}

}  // namespace cupynorm
