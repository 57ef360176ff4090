// shared, cluster, split, uncached: the row waits in the shared memory of one block, of the blocks of a cluster, of as
// many blocks of the grid as it takes, or nowhere; what does not fit there is read twice.
#pragma once
#include <base/async_copy.cuh>
#include <base/cluster.cuh>
#include <base/mailbox.cuh>
#include <base/memory.cuh>
#include <base/pdl.cuh>
#include <base/reduce.cuh>
#include <io/affine.cuh>
#include <row/meeting.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// Vectors of kVector elements, of which a thread reduces kVectors at a time. A thread reads back only what it copied
// itself, so no barrier stands between.
// kUnaligned: as in Registers; with 2 nothing waits in shared memory.
// kCtasPerRow: blocks that share a row: one, the 2 to 16 of a cluster, or, 0, the gridDim.y blocks of a cooperative
// launch, in which gridDim.x rows are in work at a time. Their messages lie among results, or have room of their own.
// kInShared: bytes of shared memory that a block keeps of its row. kBlock threads a block, and registers few enough for
// kMinBlocks blocks on a multiprocessor.
template <int Vector_, int Vectors, int UnalignedMode, int CtasPerRow, int InShared, int Block, int MinBlocks>
struct Staged {
  static constexpr int kVector = Vector_, kVectors = Vectors, kUnaligned = UnalignedMode, kCtasPerRow = CtasPerRow,
      kInShared = InShared, kBlock = Block;
  static constexpr int kMinBlocks = MinBlocks;
  static_assert(InShared % 16 == 0, "in whole accesses");
  static_assert(UnalignedMode < 2 || InShared == 0, "what lies in other vectors than y is not copied in vectors");
  static_assert(CtasPerRow == 1 || Block > kWarp, "blocks that exchange states meet among their warps in between");
};

// The function is longer than 150 lines: with its parts in structs and functions of their own, 20 of its kernels took 2
// to 10 more registers.
template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_staged(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using State = typename Op::State;
  using Type = typename Load::Type;
  using Precision = typename Load::Precision;
  using Loaded = typename Load::template Loaded<Shape::kVector>;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  constexpr int kVectorBytes = kVector * int(sizeof(Type)), kRoom = Shape::kInShared / kVectorBytes;
  // that arrive one after the other: the first is reduced while others are on their way
  constexpr int kBatches = kRoom > 0 ? 4 : 0;
  constexpr bool kIsUnaligned = Shape::kUnaligned > 0, kGrid = Shape::kCtasPerRow == 0,
      kCluster = Shape::kCtasPerRow > 1, kInRoom = kGrid && kHasRoom<Store>, kAmongResults = kGrid && !kInRoom;
  // Vectors are counted from a row's first line of 128 bytes, and parts begin at lines, where there are threads for
  // what is before: accesses of a warp then meet four lines, not five
  // (docs/notes/048, "Parts of a row that begin at lines").
  constexpr int kUnit = kIsUnaligned && !kGrid && kBlock >= 9 * kVector ? 8 : 1;  // vectors
  // 40 registers, and the op has numbers of its own
  constexpr bool kTight = kBlock * Shape::kMinBlocks > 1280 && Op::kHasArguments;
  // of vectors on their way to y: more would spill
  constexpr int kUnroll = sizeof(Compute) == 8 ? 1 : kIsUnaligned || kGrid || kTight ? 2 : 4;
  constexpr int kClusterMailboxes = kCluster ? Shape::kCtasPerRow : 1;
  constexpr int kSlots = slots_for(kWarps);
  __shared__ Slot<Op> warps[2][1][1][kSlots];
  __shared__ ClusterMailbox<Op, kClusterMailboxes> cluster_mailboxes[kCluster ? 2 : 1];
  static_assert(Load::kDirect || (Shape::kUnaligned == 0 && Shape::kInShared == 0),
      "what is computed from several arrays is read twice");
  static_assert(!Store::kScales || (Shape::kCtasPerRow == 1 && Shape::kInShared == 0),
      "one block finds the largest of a row's results");
  using Largest = Magnitude<Compute>;
  __shared__ Slot<Largest> largest_slots[1][1][kSlots];
  if constexpr (kSlots > kWarps) {
    clear_slots<kWarps>(warps[0]), clear_slots<kWarps>(warps[1]);
    if constexpr (Store::kScales) clear_slots<kWarps>(largest_slots);
  }
  const Sharing sharing = kInRoom ? Sharing::of_grid() : Sharing{};
  const int group = sharing.group,
      part = kInRoom ? sharing.part : kGrid ? int(blockIdx.y) : kCluster ? cluster_rank() : 0,
      parts = kGrid ? gridDim.y : Shape::kCtasPerRow;
  const int warp = threadIdx.x / kWarp;
  const int64 first = kInRoom ? group : kCluster ? blockIdx.x / kClusterMailboxes : blockIdx.x,
      step = kCluster ? gridDim.x / kClusterMailboxes : gridDim.x;
  // blocks of a grid meet past the last row, too, where their messages lie among results
  const int64 limit = kAmongResults ? (a.rows + step - 1) / step * step : a.rows;
  Type* const memory = reinterpret_cast<Type*>(shared_memory);
  int slot_set = 0;
  unsigned parity = 0;
  if constexpr (kCluster) {
    if (threadIdx.x < 2) init_mbarrier(&cluster_mailboxes[threadIdx.x].mbarrier);
    cluster_sync();  // all blocks have begun: they may write into one another
  }
  pdl_wait_and_trigger();
  auto meeting = [&] {
    if constexpr (kInRoom) return GridMeeting{a.store.room, group, part, 0, 0, int(sizeof(SlotWords<Op>))};
    else return NoColumns();
  }();
  if constexpr (kInRoom) meeting.begin();

  // This block's part of a row: `held` vectors from column `base` on, of which the first `in_shared` wait in shared
  // memory. All parts together have `vectors` from column `head` on.
  struct Part {
    // of all parts, the first `more` hold `each` + 1 times kUnit vectors, the last what is left
    int64 row, head, each, base, held;
    int more, in_shared;
  };
  auto begin_of = [](const Part& p, int part) { return (part * p.each + (part < p.more ? part : p.more)) * kUnit; };
  auto part_of = [&](int64 row) {
    Part p = {0, 0, 0, 0, 0, 0, 0};
    if (row >= a.rows) return p;
    p.row = row;
    const int64 aligned = kIsUnaligned ? a.store.at(row).template head<kUnit * kVector>() : 0;
    p.head = aligned < a.cols ? aligned : a.cols;
    const int64 vectors = (a.cols - p.head) / kVector;
    if constexpr (kGrid) {  // not for all: it costs registers
      const Shares shares = Shares::of(vectors, parts);
      p.each = shares.each, p.more = shares.more;
    } else {
      p.each = vectors / kUnit / parts;
      p.more = int(vectors / kUnit - p.each * parts);
    }
    p.base = p.head + begin_of(p, part) * kVector;
    p.held = kUnit > 1 && part == parts - 1 ? vectors - begin_of(p, part) : (p.each + (part < p.more)) * kUnit;
    p.in_shared = p.held < kRoom ? int(p.held) : kRoom;
    return p;
  };
  // the same for every row, so that a batch of the next row takes the place of this row's; of a grid in whole turns of
  // the block
  constexpr int kTurn = kGrid ? kBlock * kVectors : kBlock;
  const int64 most = kGrid ? Shares::of(a.cols / kVector, parts).each + 1
                     : kUnit > 1 ? (a.cols / kVector / kUnit / parts + 1) * kUnit
                                 : (a.cols / kVector + parts - 1) / parts;
  const int batch = ((int(most < kRoom ? most : kRoom) + kTurn - 1) / kTurn + 3) / 4 * kTurn;
  auto send = [&](const Part& p, int b) {
    if constexpr (kRoom > 0) {
      const auto from = a.load.at(p.row);
      const int end = (b + 1) * batch < p.in_shared ? (b + 1) * batch : p.in_shared;
#pragma unroll 4
      for (int i = b * batch + threadIdx.x; i < end; i += kBlock) {
        if constexpr (kVectorBytes >= 4)
          copy_async<kVectorBytes>(memory + i * kVector, from.address(p.base + i * kVector));
        else memory[i] = *static_cast<const Type*>(from.address(p.base + i));
      }
      commit_copies();
    }
  };
  auto columns_from = [&](int64 col) {
    if constexpr (kIsUnaligned) {
      auto columns = a.store.columns_from(col);
      columns.make_opaque();
      return columns;
    } else {
      return NoColumns();
    }
  };
  Part now = part_of(first);
#pragma unroll 1
  for (int b = 0; b < kBatches; ++b) send(now, b);

  // Where the other blocks leave their messages for this one: where its first results will be. Where y is x itself that
  // is read first, and all blocks of the grid meet for each row; else they never do.
  constexpr int kWords = Mailbox<Op>::kWords;
  auto mailbox = [&](const Part& p, int part) {
    return mailbox_at(a.store.at(p.row).address() + p.head + begin_of(p, part) * kVector);
  };
  auto clear = [&](const Part& p) {
#pragma unroll 1
    for (int i = threadIdx.x; i < parts * kWords / 2; i += kBlock) clear_mailbox(mailbox(p, part) + 2 * i);
  };
  const bool in_place = kAmongResults && static_cast<const void*>(a.store.at(0).address()) == a.load.at(0).address(0);
  if constexpr (kAmongResults) {
#pragma unroll 1
    for (int64 row = first; row < a.rows; row += step) {
#pragma unroll 1
      for (int i = threadIdx.x * 16; i < parts * kWords; i += kBlock * 16)
        prefetch_to_l2(mailbox(part_of(row), part) + i);
    }
  }

#pragma unroll 1
  for (int64 row = first; row < limit; row += step) {
    const bool here = !kAmongResults || row < a.rows;
    const auto from = a.load.at(now.row);
    const auto to = a.store.at(now.row);
    const auto columns = columns_from(now.base);
    auto load = [&](int64 number) {
      if constexpr (Shape::kUnaligned == 2) return from.template load_unaligned<kVector>(now.base + number * kVector);
      else return from.template load<kVector>(now.base + number * kVector);
    };
    auto load_kept = [&](int number) {
      if constexpr (kRoom > 0) return load_vector<Type, kVector>(memory + number * kVector);
      else return Load::template absent<kVector>(Op::padding());
    };
    auto col_of = [&](int64 number) { return now.base + number * kVector; };
    auto map_loaded = [&](int64 number, const Loaded& loaded, typename Op::Row whole, Compute (&y)[kVector]) {
      ElementsOf<Element, kVector> elements;
      auto& x = elements.over(y);
      const unsigned keeps = from.template unpack<kVector>(loaded, x, col_of(number), Op::padding());
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        y[i] = Op::map_raw(x[i], whole);
        if constexpr (Load::kDrops) y[i] = keeps >> i & 1 ? y[i] : Op::dropped();
      }
    };
    auto map = [&](int64 number, const Loaded& loaded, typename Op::Row whole) {
      Compute y[kVector];
      const int64 col = col_of(number);
      typename Store::template EpilogueOperands<kVector> epilogue_operands;
      if constexpr (Store::kHasEpilogueOperands) epilogue_operands = to.template epilogue_operands<kVector>(col);
      if constexpr (Load::kStoresComputed) {
        Element x[kVector];
        from.template unpack<kVector>(loaded, x, col, Op::padding());
        from.template store_computed<kVector, true>(x, col);
      }
      map_loaded(number, loaded, whole, y);
      if constexpr (Store::kHasEpilogueOperands)
        to.template store<kVector, true>(y, a.store.template columns<kVector>(col), epilogue_operands, col);
      else if constexpr (kIsUnaligned)
        to.template store<kVector, true>(y,
            Store::template realign_columns<kVector>(a.store.template columns_split<kVector>(columns,
            number * kVector)), col);
      else if constexpr (!Store::kScales)
        to.template store<kVector, true>(y, a.store.template columns<kVector>(col), col);
    };
    // the elements around the vectors: one for each of the first threads
    const int64 tail = now.head + (kUnit > 1 ? (a.cols - now.head) / kVector : begin_of(now, parts)) * kVector;
    const int heads = kIsUnaligned && here && part == 0 ? int(now.head) : 0;
    const int tails = kIsUnaligned && here && part == parts - 1 ? int(a.cols - tail) : 0;
    const bool has_edge = int(threadIdx.x) < heads + tails;
    const int64 edge_col = int(threadIdx.x) < heads ? threadIdx.x : threadIdx.x - heads + tail;
    Element around[1] = {};
    if constexpr (kIsUnaligned) {
      if (has_edge) unpack<1>(from.template load<1>(edge_col), around);
    }

    Compute pivot[1] = {0};
    static_assert(!Op::kOwnNumber || !kAmongResults, "messages lie where the number may be");
    if constexpr (Op::kOwnNumber) pivot[0] = from.own_number();
    State total[1] = {Op::identity()};
    auto add = [&](const auto& loaded, auto begin) {
      constexpr int kCount = int(sizeof(loaded) / sizeof(loaded[0]));
      Element x[kVector * kCount];
#pragma unroll
      for (int p = 0; p < kCount; ++p)
        from.template unpack<kVector>(loaded[p], x + p * kVector, col_of(begin + p * kBlock), Op::padding());
      total[0] = Op::template merge<false>(total[0],
          Op::summarize(x, Predicate<kVector * kCount>{kVector * kCount, false}, pivot[0]));
    };
    auto add_all = [&](auto begin, auto end, auto load_one) {
#pragma unroll 1
      for (; begin + (kVectors - 1) * kBlock < end; begin += kVectors * kBlock) {
        Loaded loaded[kVectors];
#pragma unroll
        for (int p = 0; p < kVectors; ++p) loaded[p] = load_one(begin + p * kBlock);
        add(loaded, begin);
      }
      if constexpr (kVectors > 1) {
#pragma unroll 1
        for (; begin < end; begin += kBlock) {
          const Loaded loaded[1] = {load_one(begin)};
          add(loaded, begin);
        }
      }
    };
    // Each warp takes that of its first lane, each lane's from what it holds itself: it has waited for no other's.
    // Vectors of one or two elements are not enough to choose from: then memory is asked.
    constexpr bool kEnough = kVector >= 4 && kRoom > 0;
    auto find_pivot = [&](auto load_one) {
      if constexpr (Op::kHasPivot) {
        constexpr int kLeading = kVector < 4 ? 4 / kVector : 1;
        Compute leading[kLeading * kVector] = {};
        const int own = threadIdx.x;
        if (own < (kEnough ? now.in_shared : now.held)) {
#pragma unroll
          for (int i = 0; i < kLeading; ++i) {
            const int number = kEnough || own + i < now.held ? own + i : own;
            from.template unpack<kVector>(load_one(number), leading + i * kVector, col_of(number), Op::padding());
          }
        }
        pivot[0] = pivot_of_warp<Op, Precision>(leading);
      }
    };
    if constexpr (!kEnough) find_pivot(load);
#pragma unroll 1
    for (int b = 0; b < kBatches; ++b) {
      if (b == 0) {
        wait_for_copies<3>();
        if constexpr (kEnough) find_pivot(load_kept);
      } else if (b == 1) wait_for_copies<2>();
      else if (b == 2) wait_for_copies<1>();
      else wait_for_copies<0>();
      const int end = (b + 1) * batch < now.in_shared ? (b + 1) * batch : now.in_shared;
      add_all(b * batch + int(threadIdx.x), end, load_kept);
    }
    add_all(now.in_shared + int64(threadIdx.x), now.held, load);
    if constexpr (kIsUnaligned) {
      if (has_edge) {
        Element x[1] = {around[0]};
        total[0] = Op::template merge<false>(total[0], Op::summarize(x, Predicate<1>{1, false}, pivot[0]));
      }
    }
    total[0] = reduce_lanes<Op, false, kWarp>(with_own<Op>(total[0], pivot[0]));
    if constexpr (kWarps > 1) reduce_warps<Op, false, kSlots>(total, pivot, warps[kGrid ? 0 : slot_set], 0, warp);
    if constexpr (kCluster) {
      reduce_blocks<Op, false>(total[0], pivot[0], cluster_mailboxes[slot_set], part, parity);
      parity ^= slot_set;
    }
    slot_set ^= 1;
    if constexpr (kInRoom) {
      Slot<Op>& all = warps[1][0][0][0];
      meet_in_room<Op, 1, kWarps>(meeting, 1, [&](int) { return Slot<Op>{total[0], pivot[0]}; },
          [&](int, const Slot<Op>& found) { all = found; });
      total[0] = Op::rebase(all.state, all.pivot, pivot[0]);
    } else if constexpr (kGrid) {
      if (in_place) {  // x might look like messages
        if (here) clear(now);
        grid_wait(grid_arrive());
      }
      if (here) {
#pragma unroll 1
        for (int other = threadIdx.x; other < parts; other += kBlock)
          send_mailbox<Op>(mailbox(now, other) + part * kWords, Slot<Op>{total[0], pivot[0]});
        total[0] = Op::identity();
#pragma unroll 1
        for (int other = threadIdx.x; other < parts; other += kBlock) {
          Slot<Op> theirs;
          if (!await_mailbox<Op, kMaxPolls>(mailbox(now, part) + other * kWords, theirs)) {
            constexpr int kFew = sizeof(Compute) == 8 ? 2 : 4;
            const int64 begin = other == 0 ? 0 : now.head + begin_of(now, other) * kVector;
            const int64 end = other == parts - 1 ? a.cols : now.head + begin_of(now, other + 1) * kVector;
            theirs = {read_again<Op, kFew, 128>(from, begin, end - begin, pivot[0], in_place), pivot[0]};
          }
          total[0] = Op::template merge<false>(total[0], Op::rebase(theirs.state, theirs.pivot, pivot[0]));
        }
      }
      total[0] = reduce_lanes<Op, false, kWarp, true>(total[0]);
      // all messages are read: results may take their place
      reduce_warps<Op, false, kSlots>(total, pivot, warps[1], 0, warp);
    }

    const typename Op::Row whole = a.op.finish(total[0], total[0], a.cols, pivot[0]);
    if (here && part == 0 && threadIdx.x == 0) a.op.save(row, whole);
    if constexpr (Store::kScales) {
      typename Largest::State largest[1] = {Largest::identity()};
      auto finish = [&](int64 number, Compute (&z)[kVector]) {
        Compute y[kVector];
        map_loaded(number, load(number), whole, y);
        Store::template finish<kVector>(y, a.store.template columns<kVector>(col_of(number)), z);
      };
#pragma unroll 2
      for (int64 number = now.held - 1 - threadIdx.x; number >= 0; number -= kBlock) {
        Compute z[kVector];
        finish(number, z);
        largest[0] = Largest::template merge<false>(largest[0], Largest::of(z));
      }
      largest[0] = reduce_lanes<Largest, false, kWarp>(largest[0]);
      if constexpr (kWarps > 1) reduce_warps<Largest, false, kSlots>(largest, pivot, largest_slots, 0, warp);
      const auto scale = a.store.scale_of(largest[0].max);
      if (threadIdx.x == 0) a.store.save(row, scale);
#pragma unroll 2
      for (int64 number = threadIdx.x; number < now.held; number += kBlock) {
        Compute z[kVector];
        if constexpr (Load::kStoresComputed) {
          ElementsOf<Element, kVector> elements;
          auto& x = elements.over(z);
          from.template unpack<kVector>(load(number), x, col_of(number), Op::padding());
          from.template store_computed<kVector, true>(x, col_of(number));
        }
        finish(number, z);
        to.template store_scaled<kVector, true>(z, scale, col_of(number));
      }
      now = part_of(row + step);
    } else {
      // backwards: what was read last L2 still has
#pragma unroll(kUnroll)
      for (int64 number = now.held - 1 - threadIdx.x; number >= now.in_shared; number -= kBlock)
        map(number, load(number), whole);
      if constexpr (kIsUnaligned) {
        if (has_edge) {
          const Compute y[1] = {Op::map_raw(around[0], whole)};
          if constexpr (Store::kHasEpilogueOperands)
            to.template store<1>(y, a.store.template columns<1>(edge_col), to.template epilogue_operands<1>(edge_col),
                edge_col);
          else to.template store<1>(y, a.store.template columns<1>(edge_col), edge_col);
        }
      }
      const Part next = part_of(row + step);
#pragma unroll 1
      for (int b = 0; b < kBatches; ++b) {
        const int end = (b + 1) * batch < now.in_shared ? (b + 1) * batch : now.in_shared;
#pragma unroll(kUnroll)
        for (int i = b * batch + threadIdx.x; i < end; i += kBlock) map(i, load_kept(i), whole);
        send(next, b);
      }
      now = next;
    }
  }
}

}  // namespace cupynorm
