// warp, block, cluster: the row waits in registers, of 1 to 32 lanes of a warp, of 2 to 32 warps of a block, or of the
// blocks of a cluster. One kernel for all, of the pieces in row/: layout (which elements a thread has), columns (where
// gamma and beta wait), schedule (which rows a block computes), pipeline (rows that are prefetched), load and epilogue.
#pragma once
#include <row/choices.cuh>
#include <row/columns.cuh>
#include <row/epilogue.cuh>
#include <row/layout.cuh>
#include <row/load.cuh>
#include <row/pipeline.cuh>
#include <row/schedule.cuh>

namespace cupynorm {

constexpr int kTurns = 8;  // rows of a cluster that the dynamic scheduler's queue has room for

// Before rows are reduced over warps and blocks: empties slots that no warp has, makes the signals of a cluster, and
// puts its first rows into the scheduler's queue. Ends with a barrier over the cluster.
template <class Shape, bool kTwoSets, bool kScales, class Slots, class LargestSlots, class Mails, class LargestMail>
inline void begin_exchange(Slots& slots, Mails& mails, unsigned* coming, LargestSlots& largest_slots,
                           LargestMail& largest_mail) {
  constexpr int kParts = Shape::kParts, kStages = Shape::kStages;
  constexpr bool kClaims = Shape::kClaims;
  if constexpr (slots_for(Shape::kWarps) > Shape::kWarps && Shape::kWarps > 1) {
    clear_slots<Shape::kWarps>(slots[0]);
    if constexpr (kTwoSets) clear_slots<Shape::kWarps>(slots[1]);
    if constexpr (kScales) clear_slots<Shape::kWarps>(largest_slots);
  }
  if constexpr (kParts > 1) {
    if (threadIdx.x < 2) make_signal(&mails[threadIdx.x].signal);
    if (kClaims && int(threadIdx.x) <= kStages) coming[threadIdx.x] = (blockIdx.x + threadIdx.x * gridDim.x) / kParts;
    // as if it had come before
    if (kClaims && threadIdx.x == 0) mails[1].note.x = (blockIdx.x + kStages * gridDim.x) / kParts;
    if constexpr (kScales) {
      if (threadIdx.x == 0) make_signal(&largest_mail.signal);
    }
    if constexpr (kClaims) __syncthreads();  // of what this block has written itself the meeting says nothing
    cluster_meet();                          // all blocks have begun: they may write into one another
  }
}

// The threads of a block stay together, past the last row too, because shuffles and barriers name all of them. The function is
// longer than 150 lines because arrays and index closures that live elsewhere cost registers (docs/notes/kernel-comments).
template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident)
    row_registers(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Choice = Choices<Op, Load, Store, Shape>;
  constexpr int kGroup = Shape::kGroup, kRows = Shape::kRows, kParts = Shape::kParts, kWarps = Shape::kWarps;
  constexpr int kStages = Shape::kStages, kLone = Shape::kLone;
  constexpr bool kClaims = Shape::kClaims, kOneSet = Choice::kOneSet, kConverts = Shape::kHoist == 4;
  const int lane = Shape::kAll ? threadIdx.x : threadIdx.x % kGroup, group = Shape::kAll ? 0 : threadIdx.x / kGroup;
  const int part = kParts > 1 ? block_of_cluster() : 0;
  auto saves = [&] { return lane == 0 && part == 0; };
  const auto cols = [&] {
    if constexpr (Shape::kFull && kParts == 1) return Known<kGroup * Shape::kPacked>();
    else return int(a.cols);
  }();

  // What warps and blocks tell one another.
  constexpr int kSlots = slots_for(kWarps);
  constexpr bool kEvenly = Shape::kFull && kSlots == kWarps;  // every slot is of as many elements
  __shared__ Slot<Op> slots[kWarps > 1 && !kOneSet ? 2 : 1][kRows][Shape::kGroups][kSlots];
  __shared__ Mail<Op, kParts, kClaims> mails[kParts > 1 ? 2 : 1];
  // the row in work and those to come, by their turns: registers are scarce
  __shared__ unsigned coming[kClaims ? kTurns : 1];
  static_assert(kStages + 2 <= kTurns, "a place is taken again when its row has been written");
  // of the largest results: one of each will do, since the states' barrier and letters stand between two uses
  using Largest = Magnitude<Compute>;
  __shared__ Slot<Largest> largest_slots[kRows][Shape::kGroups][kSlots];
  __shared__ Mail<Largest, kParts> largest_mail;
  begin_exchange<Shape, !kOneSet, Store::kScales>(slots, mails, coming, largest_slots, largest_mail);
  unsigned turn = 0;  // of two sets of slots and mails; in clusters more: a signal's parity changes every other time
  unsigned largest_parity = 0;
  // The next kernel may begin at once, which is best for aligned rows. For unaligned rows it is better to let it begin
  // only when this kernel's loads have been issued (docs/notes/kernel-comments).
  await_kernel_before();
  if constexpr (kLone == 0) begin_next_of();

  // Which elements of which rows.
  constexpr int kAtOnce = Shape::kGroups * kRows;  // rows of a block
  constexpr int64 kApart = Shape::kPeel > 0 ? kRows * Shape::kPeriod : 1;
  const int64 limit = (a.rows + kApart - 1) / kApart * kApart;
  const int64 first = int64(blockIdx.x / kParts) * kAtOnce, step = int64(gridDim.x / kParts) * kAtOnce;
  auto row_of = [group](int64 base, int r) {  // each load instruction of a warp covers neighbouring rows
    if constexpr (Shape::kPeel == 0 || kRows == 1) return base + r * Shape::kGroups + group;
    const int64 number = base / kRows + group;
    return number / Shape::kPeriod * (Shape::kPeriod * kRows) + r * Shape::kPeriod + number % Shape::kPeriod;
  };
  auto share_at = [&](int64 row) {
    return share_of<Shape>(cols, a.store.at(row < a.rows ? row : 0).template head<Shape::kAligned>(), part);
  };
  Share share = kLone > 0 ? share_at(row_of(first, 0)) : share_of<Shape>(cols, 0, part);
  auto has = [&](int p) { return p < Shape::kSure || p * kGroup + lane < share.packs; };
  auto col = [&](int p) { return share.head + (share.before + p * kGroup + lane) * Shape::kPack; };
  // from a thread's first column on, where packs are whole: other packs are then at constants
  auto masked_from = [&](int p) { return kLone > 0 ? col(p) : p * (kGroup * Shape::kPack); };
  auto lone = [&] { return lane < share.heads ? lane : lane - share.heads + share.tail; };
  auto alone = [&] { return kLone > 0 && lane < share.heads + share.tails; };
  const ThreadTile tile = {has, col, lone, alone, masked_from, lane};

  ParameterCache<Store, Shape, Compute> parameters;
  if constexpr (kConverts) parameters.set_columns(share, part, int(cols));
  else parameters.load_once(a.store, tile);

  // Rows to come: prefetched, and those of a dynamic scheduler. What is prefetched of a row is that row's share.
  typename Load::template Loaded<1> around[kRows];  // elements of this thread that are in no pack
  auto load_edges_of = [&](int64 base) { load_edges<Op, Load,
      Shape>(a, around, [&](int r) { return row_of(base, r); }, tile); };
  auto prefetch = [&](int64 base, int stage) {
    prefetch_rows<Shape, Choice::kOneAddress>(a, stage, [&](int r) { return row_of(base, r); }, tile);
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
    if constexpr (kClaims) {
      const unsigned row = mails[(turn ^ 1) % 2].note.x;
      if (threadIdx.x == 0) coming[(turn + kStages) % kTurns] = row;
      return int64(row);
    }
    return base + kStages * step;
  };
  auto next = [&](int64 base) {
    if constexpr (kConverts && !Shape::kFixed) __syncthreads();  // the parameters have been read
    if constexpr (kClaims) return int64(kStages > 0 ? coming[turn] : mails[(turn ^ 1) % 2].note.x);
    if constexpr (kOneSet && !kConverts) {
      if (base + step < limit) __syncthreads();  // the slots have been read
    }
    return base + step;
  };
  if constexpr (kStages > 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) as_of(first + s * step, [&] { prefetch(first + s * step, s); });
    if constexpr (kLone > 0) load_edges_of(first);
  }
  if constexpr (Shape::kFixed) parameters.fetch(a.store), parameters.convert_all();
  if constexpr (kParts == 1) assume(first < limit);  // a grid has no more blocks than there are rows for

  for (int64 base = first; base < limit; base = next(base)) {
    auto row = [&](int r) { return row_of(base, r); };
    typename Load::template Loaded<Shape::kPack> loaded[kRows][Shape::kPacks];
    typename Load::Line lines[kRows];
    typename Store::Line targets[kRows];
    typename Store::template Ahead<Shape::kPack> ahead[kRows][Shape::kPacks];
    typename Store::template Ahead<1> ahead_alone[kRows];
    bool keeps_alone[kRows];
    unsigned keeps[kRows];
    bool some[kRows][Shape::kPacks], there[kRows];
    Compute origin[kRows], x[kRows][Shape::kElements];
    typename Op::State mine[kRows], total[kRows];
    ThreadRows<Op, Load, Store, Shape> rows = {loaded, lines, targets, ahead,  ahead_alone, keeps_alone, keeps,
                                               some,   there, origin,  x,      mine,        total};
    if constexpr (kStages > 0) wait_for_copies<(kStages > 0 ? kStages - 1 : 0)>();
    if constexpr (Shape::kAll) assume(base < a.rows);
    if constexpr (kLone > 0 && (kStages == 0 || Shape::kFixed)) {
      if constexpr (Shape::kHoist % 4 < 2) share = share_at(row_of(base, 0));
      if constexpr (kStages == 0) load_edges_of(base);
    }
    if constexpr (kConverts && !Shape::kFixed) parameters.fetch(a.store);
    load_rows(a, rows, around, stage, row, tile);
    if constexpr (!kConverts) parameters.load_with_rows(a.store, tile);
    if constexpr (kLone > 0) begin_next_of();
    if constexpr (kConverts && !Shape::kFixed) parameters.convert_all();

    const Counts counts = count_elements<Shape>(share, tile);
    const Valid<Shape::kSure * Shape::kPack, kLone, (kParts > 1 ? 2 : 1)> valid = {counts.thread, tile.alone()};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (Choice::kEarly) store_all_dropped(a, rows, r, parameters, tile);
      if constexpr (Choice::kSpans) {  // the branch stands here because in a function of its own it took registers
        if constexpr (kLone > 0) unpack_edge(a, rows, around[r], r, row(r), tile);
        const int last = Shape::kPacks - 1;
        if (all_lanes(has(last) && lines[r].keeps_all(masked_from(0), masked_from(last) + Shape::kPack))) {
          keeps[r] = ~0u;
          mine[r] = summarize_kept<Op, Shape>(lines[r], loaded[r], x[r], valid, tile);
        } else {
          keeps[r] = 0;
          mine[r] = summarize_interval<Op, Shape>(lines[r], loaded[r], x[r], some[r], keeps[r], valid, tile);
        }
        origin[r] = 0;
        total[r] = reduce_lanes<Op, false, Shape::kLanes>(mine[r]);
      } else {
        summarize_row(a, rows, around[r], r, row(r), valid, counts.warp, tile);
      }
    }
    if constexpr (kStages > 0) {  // the row has been read from shared memory: its place is free
      const int64 last = rows_ahead(base);
      if constexpr (Shape::kFixed) {
        const int64 next = kStages == 1 ? last : int64(coming[(turn + 1) % kTurns]);
        as_of(next, [&] { load_edges_of(next); });
      } else if constexpr (kLone > 0) {
        load_edges_of(base + step);
      }
      as_of(last, [&] { prefetch(last, stage); });
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if constexpr (kWarps > 1) {
      auto& own = slots[kParts > 1 ? turn % 2 : kOneSet ? 0 : turn];
      reduce_warps<Op, kEvenly, kSlots>(rows.total, rows.origin, own, group, lane / kWarp);
    }
    if constexpr (kParts > 1) {
      // what a branch decides here the compiler would carry through the reduction, twice
      reduce_blocks<Op, Shape::kFull>(rows.total[0], rows.origin[0], mails[turn % 2], part, turn / 2 % 2,
          dynamic.next());
      dynamic.claim(a.rows);
    }
    turn = kWarps == 1 ? 0 : kParts > 1 ? (turn + 1) % kTurns : turn ^ 1;

    if constexpr (!kConverts) parameters.hide();
    hide_ahead(rows);
    if constexpr (Store::kScales) {
      typename Largest::State largest[kRows];
      finish_scaled(a, rows, largest, parameters, row, cols, saves, tile);
      if constexpr (kWarps > 1) reduce_warps<Largest, false,
          kSlots>(largest, rows.origin, largest_slots, group, lane / kWarp);
      if constexpr (kParts > 1) {
        reduce_blocks<Largest, false>(largest[0], rows.origin[0], largest_mail, part, largest_parity);
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
