// shared, split, uncached: the row waits in the shared memory of one block, or of as many blocks of the grid as it takes, or nowhere;
// what does not fit there is read twice.
#pragma once
#include <cupynorm/functors.cuh>
#include <cupynorm/group.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// Packs of kPack elements, of which a thread reduces kPacks at a time. A thread reads back only what it copied itself, so no
// barrier stands between.
// kPeel: as in Registers; with 2 nothing is kept.
// kSplit: gridDim.y blocks share a row, gridDim.x rows are in work at a time, and the launch is a cooperative one.
// kKept: bytes of shared memory that a block keeps of its row.
// kBlock threads a block, and registers few enough for kResident blocks on a multiprocessor.
template <int Pack_, int Packs, int Peel, bool Split, int Kept, int Block, int Resident>
struct Staged {
  static constexpr int kPack = Pack_, kPacks = Packs, kPeel = Peel, kKept = Kept, kBlock = Block, kResident = Resident;
  static constexpr bool kSplit = Split;
  static_assert(Kept % 16 == 0, "in whole accesses");
  static_assert(Peel < 2 || Kept == 0, "what lies in other packs than y is not copied in packs");
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident) row_staged(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Type = typename Load::Type;
  using Result = typename Store::Type;
  constexpr int kPack = Shape::kPack, kPacks = Shape::kPacks, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  constexpr int kPackBytes = kPack * int(sizeof(Type)), kRoom = Shape::kKept / kPackBytes;
  constexpr int kBatches = kRoom > 0 ? 4 : 1;  // that arrive one after the other: the first is reduced while others are on their way
  constexpr bool kPeeled = Shape::kPeel > 0, kSplit = Shape::kSplit;
  __shared__ Slot<Op> warps[2][1][1][kWarps];
  const int part = kSplit ? blockIdx.y : 0, parts = kSplit ? gridDim.y : 1, warp = threadIdx.x / kWarp;
  const int64 rows = kSplit ? (a.rows + gridDim.x - 1) / gridDim.x * gridDim.x : a.rows;  // blocks meet past the last row, too
  Type* const memory = reinterpret_cast<Type*>(shared_memory);
  int turn = 0;
#pragma unroll 1
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const bool here = !kSplit || row < a.rows;
    const auto from = a.load.at(here ? row : 0);
    const auto to = a.store.at(here ? row : 0);
    // this block's share: `held` packs from column `base` on, of which the first `kept` wait in shared memory
    const int64 aligned = kPeeled ? to.template head<kPack>() : 0, head = aligned < a.cols ? aligned : a.cols;
    const int64 packs = (a.cols - head) / kPack, each = (packs + parts - 1) / parts, tail = head + packs * kPack;
    const int last = each > 0 ? int((packs - 1) / each) : 0;  // of the blocks that have a part of the row
    const int64 before = part * each < packs ? part * each : packs, base = head + before * kPack;
    const int64 held = !here ? 0 : packs - before < each ? packs - before : each;
    const int kept = held < kRoom ? int(held) : kRoom;
    const int batch = ((kept + kBlock - 1) / kBlock + kBatches - 1) / kBatches * kBlock;
    if constexpr (kRoom > 0) {
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const int end = (b + 1) * batch < kept ? (b + 1) * batch : kept;
#pragma unroll 4
        for (int i = b * batch + threadIdx.x; i < end; i += kBlock) {
          if constexpr (kPackBytes >= 4) copy_ahead<kPackBytes>(memory + i * kPack, from.address(base + i * kPack));
          else memory[i] = *static_cast<const Type*>(from.address(base + i));
        }
        commit_copies();
      }
    }
    auto load = [&](int64 number) {
      if (number < kept) return load_pack<Type, kPack>(memory + int(number) * kPack);
      if constexpr (Shape::kPeel == 2) return from.template load_anywhere<kPack>(base + number * kPack);
      else return from.template load<kPack>(base + number * kPack);
    };
    auto map = [&](int64 number, typename Op::Row whole) {
      Compute y[kPack];
      unpack<kPack>(load(number), y);
#pragma unroll
      for (int i = 0; i < kPack; ++i) y[i] = Op::map_raw(y[i], whole);
      const int64 col = base + number * kPack;
      if constexpr (kPeeled) to.template store<kPack, true>(y, a.store.template columns_anywhere<kPack>(col), col);
      else to.template store<kPack, true>(y, a.store.template columns<kPack>(col), col);
    };
    // the elements around the packs: one for each of the first threads
    const int heads = kPeeled && here && part == 0 ? int(head) : 0, tails = kPeeled && here && part == last ? int(a.cols - tail) : 0;
    const bool alone = int(threadIdx.x) < heads + tails;
    const int64 lone = int(threadIdx.x) < heads ? threadIdx.x : threadIdx.x - heads + tail;
    Compute around[1] = {0};
    if constexpr (kPeeled) {
      if (alone) unpack<1>(from.template load<1>(lone), around);
    }

    Compute origin[1] = {0};
    State total[1] = {Op::identity()};
#pragma unroll
    for (int b = 0; b < kBatches + (kRoom > 0 && kSplit ? 1 : 0); ++b) {
      if (kRoom > 0 && b == 0) wait_for_copies<kBatches - 1>();
      if (kRoom > 0 && b == 1) wait_for_copies<(kBatches > 1 ? kBatches - 2 : 0)>();
      if (kRoom > 0 && b == 2) wait_for_copies<(kBatches > 2 ? kBatches - 3 : 0)>();
      if (kRoom > 0 && b == 3) wait_for_copies<0>();
      if constexpr (Op::kHasOrigin) {
        if (b == 0 && warp * kWarp < held) {  // each warp takes its own: it has waited for no other's
          constexpr int kWidth = sizeof(Type) == 2 ? 1 : kPack < 4 ? kPack : 4;
          Compute leading[kPack];
          unpack<kPack>(load(warp * kWarp), leading);
          Compute first[kWidth];
#pragma unroll
          for (int i = 0; i < kWidth; ++i) first[i] = leading[i];
          origin[0] = __shfl_sync(kAllLanes, Op::origin_of(first, Type()), 0);
        }
      }
      const int64 begin = kRoom == 0 ? 0 : b < kBatches ? b * batch : kept;
      const int64 end = kRoom == 0 || b == kBatches ? held : (b + 1) * batch < kept ? (b + 1) * batch : kept;
#pragma unroll 1
      for (int64 start = begin + threadIdx.x; start < end; start += kBlock * kPacks) {
        Pack<Type, kPack> loaded[kPacks];
        int count = 0;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const bool valid = start + p * kBlock < end;
          loaded[p] = valid ? load(start + p * kBlock) : pack_filled<Type, kPack>(Op::padding());
          count += valid;
        }
        Compute x[kPack * kPacks];
#pragma unroll
        for (int p = 0; p < kPacks; ++p) unpack<kPack>(loaded[p], x + p * kPack);
        total[0] = Op::template merge<false>(total[0], Op::summarize(x, Valid<kPack>{count * kPack, false}, origin[0]));
      }
    }
    if constexpr (kPeeled) {
      if (alone) {
        Compute x[1] = {around[0]};
        total[0] = Op::template merge<false>(total[0], Op::summarize(x, Valid<1>{1, false}, origin[0]));
      }
    }
    total[0] = reduce_lanes<Op, false, kWarp>(total[0]);
    if constexpr (kWarps > 1) reduce_warps<Op, false, kWarps>(total, origin, warps[turn], 0, warp);

    // Each block leaves its state where its first results will be, once all have read it.
    constexpr int kSlotPacks = kSplit ? int((sizeof(Slot<Op>) + kPack * sizeof(Result) - 1) / (kPack * sizeof(Result))) : 0;
    unsigned met = 0;
    if constexpr (kSplit) {
      if (held > 0 && threadIdx.x == 0) write_slot(to.address() + base, Slot<Op>{total[0], origin[0]});
      grid_wait(grid_arrive());
      total[0] = Op::identity();
      if (here) {
        for (int other = threadIdx.x; other <= last; other += kBlock) {
          const Slot<Op> theirs = read_slot<Op>(to.address() + head + other * each * kPack);
          total[0] = Op::template merge<false>(total[0], Op::rebase(theirs.state, theirs.origin, origin[0]));
        }
      }
      total[0] = reduce_lanes<Op, false, kWarp>(total[0]);
      if constexpr (kWarps > 1) reduce_warps<Op, false, kWarps>(total, origin, warps[turn ^ 1], 0, warp);
      met = grid_arrive();
    }

    const typename Op::Row whole = a.op.finish(total[0], total[0], a.cols, origin[0]);
    if (here && part == 0 && threadIdx.x == 0) a.op.save(row, whole);
#pragma unroll(sizeof(Compute) == 8 ? 1 : 4)
    for (int64 number = threadIdx.x; number < held; number += kBlock) {
      if (number >= kSlotPacks) map(number, whole);
    }
    if constexpr (kPeeled) {
      if (alone) {
        const Compute y[1] = {Op::map_raw(around[0], whole)};
        to.template store<1>(y, a.store.template columns<1>(lone), lone);
      }
    }
    if constexpr (kSplit) {
      grid_wait(met);
      if (int(threadIdx.x) < kSlotPacks && int(threadIdx.x) < held) map(threadIdx.x, whole);
    }
  }
}

}  // namespace cupynorm
