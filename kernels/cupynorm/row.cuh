// The variants: where a row waits between its two uses, its statistics and its map. Each is a loop over any op (a struct of
// kernels/*.cu) and any Load and Store (functors.cuh). The only file with blockIdx.
#pragma once
#include <cupynorm/functors.cuh>
#include <cupynorm/group.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// How a row lies in registers. A thread holds kPacks packs of kPack elements of each of kRows rows; pack p of a thread is number
// p * kGroup + lane of the row, so neighbouring threads move neighbouring packs.
//
// kFull: a row is exactly kGroup * kPacks * kPack columns; otherwise only the last of a thread's packs may be missing.
// kHoist: the columns' parameters are fetched together with the first row, and wait in registers too.
// kBlock threads a block, and registers few enough for kResident blocks on a multiprocessor.
// kStages: 0, or how many times over rows are on their way or in work: the block then goes through many rows, and each thread
// copies its packs of the rows to come into shared memory, where nobody else reads them. Packs of 16 bytes only.
template <int Pack_, int Packs, int Group, int Rows, bool Full, bool Hoist, int Block, int Resident, int Stages>
struct Registers {
  static constexpr int kPack = Pack_, kPacks = Packs, kGroup = Group, kRows = Rows, kBlock = Block, kResident = Resident;
  static constexpr int kStages = Stages;
  static constexpr bool kFull = Full, kHoist = Hoist;
};

// warp, block: the row waits in the registers of kGroup threads: 1 to 32 lanes of a warp, or 2 to 32 warps of a block. The
// threads of a block stay together, past the last row too, because shuffles and barriers name all of them.
template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident)
    row_registers(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Type = typename Load::Type;
  using Columns = typename Store::template Columns<Shape::kPack>;
  constexpr int kPack = Shape::kPack, kPacks = Shape::kPacks, kGroup = Shape::kGroup, kRows = Shape::kRows;
  constexpr int kWarps = kGroup / kWarp, kGroups = Shape::kBlock / kGroup;
  constexpr int kLanes = kGroup < kWarp ? kGroup : kWarp;
  constexpr bool kFull = Shape::kFull;
  const int lane = threadIdx.x % kGroup, group = threadIdx.x / kGroup;
  const int cols = int(a.cols), packs = cols / kPack;
  const int held = kFull || (kPacks - 1) * kGroup + lane < packs ? kPacks : kPacks - 1;
  __shared__ Slot<Op> slots[kWarps > 1 ? 2 : 1][kRows][kGroups][kWarps > 1 ? kWarps : 1];
  int turn = 0;

  // how many elements of a row this thread's warp holds, or its group if that is less
  const int last = packs - (kPacks - 1) * kGroup - lane / kLanes * kLanes;
  const int count = ((kPacks - 1) * kLanes + (last < 0 ? 0 : last < kLanes ? last : kLanes)) * kPack;

  auto col = [lane](int p) { return (p * kGroup + lane) * kPack; };
  auto parameters = [&](int p) { return kFull || p < held ? a.store.template columns<kPack>(col(p)) : Columns(); };

  // Row r of this group is base + r * kGroups + group: each load instruction of a warp covers neighbouring rows.
  const int64 step = int64(gridDim.x) * (kGroups * kRows);
  int stage = 0;
  auto waiting = [](int stage, int r, int p) {
    return shared_memory + int64((stage * kRows + r) * kPacks + p) * (Shape::kBlock * 16) + threadIdx.x * 16;
  };
  auto send = [&](int64 base, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = base + r * kGroups + group;
      if (row < a.rows) {
        const auto line = a.load.at(row);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (kFull || p < held) copy_ahead(waiting(stage, r, p), line.address(col(p)));
        }
      }
    }
    commit_copies();  // an empty group too: wait counts groups
  };
  if constexpr (Shape::kStages > 0) {
#pragma unroll
    for (int s = 0; s < Shape::kStages - 1; ++s) send(blockIdx.x * int64(kGroups * kRows) + s * step, s);
  }
  for (int64 base = blockIdx.x * int64(kGroups * kRows); base < a.rows; base += step) {
    if constexpr (Shape::kStages > 0) {
      send(base + (Shape::kStages - 1) * step, stage == 0 ? Shape::kStages - 1 : stage - 1);
      wait_for_copies<(Shape::kStages > 0 ? Shape::kStages - 1 : 0)>();
    }
    Pack<Type, kPack> loaded[kRows][kPacks];
    Compute origin[kRows], x[kRows][kPack * kPacks];
    State mine[kRows], total[kRows];
    Columns columns[kPacks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = base + r * kGroups + group;
      const bool here = row < a.rows;
      const auto line = a.load.at(here ? row : 0);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (here && (kFull || p < held)) {
          if constexpr (Shape::kStages > 0) loaded[r][p] = load_pack<Type, kPack>(reinterpret_cast<const Type*>(waiting(stage, r, p)));
          else loaded[r][p] = line.template load<kPack>(col(p));
        } else {
          loaded[r][p] = pack_filled<Type, kPack>(Op::padding());
        }
      }
    }
    if constexpr (Shape::kHoist) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) columns[p] = parameters(p);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) unpack<kPack>(loaded[r][p], x[r] + p * kPack);
      origin[r] = 0;
      if constexpr (Op::kHasOrigin) {  // each warp takes its own: the row's would be one more access to memory
        constexpr int kSure = kPacks > 1 ? (kPacks - 1) * kPack : kPack;  // a warp's first lane may miss its last pack
        Compute leading[kSure < 4 ? kSure : 4];
#pragma unroll
        for (int i = 0; i < (kSure < 4 ? kSure : 4); ++i) leading[i] = x[r][i];
        origin[r] = __shfl_sync(kAllLanes, Op::origin_of(leading, Type()), 0, kLanes);
      }
      total[r] = summarize_lanes<Op, kFull, kLanes>(x[r], (kFull ? kPacks : held) * kPack, count, origin[r], mine[r]);
    }
    if constexpr (kWarps > 1) {
      reduce_warps<Op, kFull, kWarps>(total, origin, slots[turn], group, lane / kWarp);
      turn ^= 1;
    }
    if constexpr (Shape::kHoist) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) columns[p].hide();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = base + r * kGroups + group;
      if (row >= a.rows) continue;
      const typename Op::Row whole = a.op.finish(mine[r], total[r], cols, origin[r]);
      if (lane == 0) a.op.save(row, whole);
      const auto line = a.store.at(row);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!kFull && p >= held) continue;
        Compute y[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i) y[i] = Op::map(x[r][p * kPack + i], whole);
        line.template store<kPack>(y, Shape::kHoist ? columns[p] : parameters(p), col(p));
      }
    }
    if constexpr (Shape::kStages > 0) stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
  }
}

// The most threads of shared and uncached that the compiler makes room for; doubles are launched with 256 at most. And how
// often it may unroll a loop over a row. Both as the build gate wants them: exp of doubles, times four, would spill, and
// sm_70 splits stores and spills where the others do not.
#if __CUDA_ARCH__ >= 750
template <typename Compute>
constexpr int kWholeBlock = sizeof(Compute) == 8 ? 512 : 1024;
template <typename Compute>
constexpr int kUnroll = sizeof(Compute) == 8 ? 1 : 4;
#else
template <typename Compute>
constexpr int kWholeBlock = sizeof(Compute) == 8 ? 256 : 1024;
template <typename Compute>
constexpr int kUnroll = 1;
#endif

// Reads a row of which the block holds no more than kPacks packs a thread at a time, and gives the block's State of all of it.
// `keep(number, pack)` sees each pack as it was loaded.
template <class Op, int kPack, int kPacks, typename Type, class Line, class Keep>
inline typename Op::State summarize_row(const Line& line, int64 packs, typename Op::Compute origin, Keep keep,
                                        typename Op::State* slots, int turn) {
  using Compute = typename Op::Compute;
  typename Op::State mine = Op::identity();
#pragma unroll 1
  for (int64 start = threadIdx.x; start < packs; start += int64(blockDim.x) * kPacks) {
    Pack<Type, kPack> loaded[kPacks];
    int held = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64 number = start + p * int(blockDim.x);
      if (number < packs) {
        loaded[p] = line.template load<kPack>(number * kPack);
        ++held;
      } else {
        loaded[p] = pack_filled<Type, kPack>(Op::padding());
      }
    }
    Compute x[kPack * kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p < held) keep(start + p * int(blockDim.x), loaded[p]);
      unpack<kPack>(loaded[p], x + p * kPack);
    }
    mine = Op::template merge<false>(mine, Op::summarize(x, held * kPack, origin));
  }
  return reduce_block<Op>(mine, slots, turn);
}

template <class Op, int kPack, typename Type, class Line>
inline typename Op::Compute origin_of(const Line& line, int64 packs) {
  if constexpr (Op::kHasOrigin) {
    // as few elements as it looks at: the first of 16 bits, else four
    constexpr int kWidth = sizeof(Type) == 2 ? 1 : kPack < 4 ? kPack : 4, kCount = sizeof(Type) == 2 ? 1 : 4 / kWidth;
    typename Op::Compute leading[kCount * kWidth];
#pragma unroll
    for (int i = 0; i < kCount; ++i) unpack<kWidth>(line.template load<kWidth>((i < packs ? i : 0) * kWidth), leading + i * kWidth);
    return Op::origin_of(leading, Type());
  }
  return 0;
}

// shared: the row waits in the block's shared memory, in the load type. A thread reads back only what it wrote itself, so
// no barrier stands between, and neighbouring threads touch neighbouring packs, so no bank is asked twice.
template <class Op, class Load, class Store, int kPack, int kPacks>
__global__ void __launch_bounds__(kWholeBlock<typename Op::Compute>) row_shared(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  __shared__ typename Op::State slots[2 * kWarp];
  Type* kept = reinterpret_cast<Type*>(shared_memory);
  const int packs = int(a.cols) / kPack;
  int turn = 0;
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const auto from = a.load.at(row);
    const Compute origin = origin_of<Op, kPack, Type>(from, packs);
    const auto total = summarize_row<Op, kPack, kPacks, Type>(
        from, packs, origin, [kept](int64 number, const Pack<Type, kPack>& pack) { store_pack(kept + number * kPack, pack); },
        slots, turn);
    const typename Op::Row whole = a.op.finish(total, total, int(a.cols), origin);
    if (threadIdx.x == 0) a.op.save(row, whole);
    const auto to = a.store.at(row);
    // a 64-bit counter: with 32 bits the compiler splits the stores into words
#pragma unroll(kUnroll<Compute>)
    for (int64 number = threadIdx.x; number < packs; number += blockDim.x) {
      Compute y[kPack];
      unpack<kPack>(load_pack<Type, kPack>(kept + number * kPack), y);
#pragma unroll
      for (int i = 0; i < kPack; ++i) y[i] = Op::map_raw(y[i], whole);
      to.template store<kPack>(y, a.store.template columns<kPack>(number * kPack), number * kPack);
    }
  }
}

// uncached: the row waits nowhere and is read twice. Any number of columns. Every thread reads in the second pass what it
// read in the first, before it writes there: in place is safe.
template <class Op, class Load, class Store, int kPack, int kPacks>
__global__ void __launch_bounds__(kWholeBlock<typename Op::Compute>) row_uncached(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  __shared__ typename Op::State slots[2 * kWarp];
  const int64 packs = a.cols / kPack;
  int turn = 0;
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const auto from = a.load.at(row);
    const Compute origin = origin_of<Op, kPack, Type>(from, packs);
    const auto total = summarize_row<Op, kPack, kPacks, Type>(
        from, packs, origin, [](int64, const Pack<Type, kPack>&) {}, slots, turn);
    const typename Op::Row whole = a.op.finish(total, total, a.cols, origin);
    if (threadIdx.x == 0) a.op.save(row, whole);
    const auto to = a.store.at(row);
#pragma unroll 1
    for (int64 start = threadIdx.x; start < packs; start += int64(blockDim.x) * kPacks) {
      Pack<Type, kPack> loaded[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int64 number = start + p * int(blockDim.x);
        if (number < packs) loaded[p] = from.template load<kPack>(number * kPack);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int64 number = start + p * int(blockDim.x);
        if (number >= packs) break;
        Compute y[kPack];
        unpack<kPack>(loaded[p], y);
#pragma unroll
        for (int i = 0; i < kPack; ++i) y[i] = Op::map_raw(y[i], whole);
        to.template store<kPack>(y, a.store.template columns<kPack>(number * kPack), number * kPack);
      }
    }
  }
}

}  // namespace cupynorm
