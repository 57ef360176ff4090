// flat: rows whose bytes are no whole number of accesses, or that begin anywhere. A block moves a tile of rows that lie one behind
// the other in accesses of 16 bytes, through shared memory, and each row is held, an element at a time, by some threads' registers.
#pragma once
#include <cupynorm/functors.cuh>
#include <cupynorm/group.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// A thread holds kElements of one row: those numbered lane, lane + kGroup, ...; only the last of them may be missing.
// kHoist: the columns' parameters are fetched before the row is reduced, and wait in registers too.
// kBlock threads a block, one row for each kGroup of them, and registers few enough for kResident blocks on a multiprocessor.
template <int Elements, int Group, bool Hoist, int Block, int Resident>
struct Flat {
  static constexpr int kElements = Elements, kGroup = Group, kBlock = Block, kResident = Resident;
  static constexpr bool kHoist = Hoist;
};

// How many elements lie between an address and the 16 bytes before it.
template <typename T>
inline int phase(const T* p) {
  return int(reinterpret_cast<unsigned long long>(p) % 16 / sizeof(T));
}

// Sends `length` elements to shared memory, where they begin at `to`, of the same phase. No byte around them is read. For the
// whole block; they have arrived when each thread has waited for its copies and the block has met.
template <int kBlock, typename T>
inline void fetch_tile(T* to, const T* from, int length) {
  constexpr int kPer = 16 / int(sizeof(T));
  int head = (kPer - phase(from)) % kPer;
  if (head > length) head = length;
  const int pieces = (length - head) / kPer, tail = head + pieces * kPer;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kBlock) copy_ahead<16>(to + head + i * kPer, from + head + i * kPer);
  const int lone = int(threadIdx.x) < head ? threadIdx.x : threadIdx.x - head + tail;  // 14 of 2 bytes at most
  if (lone < length) store_pack(to + lone, load_pack<T, 1>(from + lone));
  commit_copies();
}

// The way back.
template <int kBlock, typename T>
inline void flush_tile(T* to, const T* from, int length) {
  constexpr int kPer = 16 / int(sizeof(T));
  int head = (kPer - phase(to)) % kPer;
  if (head > length) head = length;
  const int pieces = (length - head) / kPer, tail = head + pieces * kPer;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kBlock) {
    store_pack(to + head + i * kPer, load_pack<T, kPer>(from + head + i * kPer));
  }
  const int lone = int(threadIdx.x) < head ? threadIdx.x : threadIdx.x - head + tail;
  if (lone < length) store_pack(to + lone, load_pack<T, 1>(from + lone));
}

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident) row_flat(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Type = typename Load::Type;
  using Result = typename Store::Type;
  using Columns = typename Store::template Columns<1>;
  constexpr int kElements = Shape::kElements, kGroup = Shape::kGroup, kGroups = Shape::kBlock / kGroup;
  constexpr int kLanes = kGroup < kWarp ? kGroup : kWarp, kWarps = kGroup / kWarp;
  __shared__ Slot<Op> slots[1][kGroups][kWarps > 1 ? kWarps : 1];
  const int lane = threadIdx.x % kGroup, group = threadIdx.x / kGroup, cols = int(a.cols);
  const int held = (kElements - 1) * kGroup + lane < cols ? kElements : kElements - 1;
  const int last = cols - (kElements - 1) * kGroup - lane / kLanes * kLanes;
  const int count = (kElements - 1) * kLanes + (last < 0 ? 0 : last < kLanes ? last : kLanes);

  const int64 first = int64(blockIdx.x) * kGroups, row = first + group;
  const int rows = a.rows - first < kGroups ? int(a.rows - first) : kGroups;
  const bool here = group < rows;
  const Type* from = static_cast<const Type*>(a.load.at(first).address(0));
  const Type* tile = reinterpret_cast<Type*>(shared_memory) + phase(from);
  fetch_tile<Shape::kBlock>(const_cast<Type*>(tile), from, rows * cols);
  Columns columns[kElements];
  if constexpr (Shape::kHoist) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      columns[i] = i < kElements - 1 || i < held ? a.store.template columns<1>(i * kGroup + lane) : Columns();
    }
  }
  wait_for_copies<0>();
  __syncthreads();

  Compute x[kElements];
  tile += group * cols + lane;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const bool valid = here && (i < kElements - 1 || i < held);
    unpack<1>(valid ? load_pack<Type, 1>(tile + i * kGroup) : pack_filled<Type, 1>(Op::padding()), x + i);
  }
  __syncthreads();  // the tile is read: results may take its place
  Compute origin[1] = {0};
  if constexpr (Op::kHasOrigin) {
    constexpr int kSure = kElements > 1 ? (kElements - 1 < 4 ? kElements - 1 : 4) : 1;
    Compute leading[kSure];
#pragma unroll
    for (int i = 0; i < kSure; ++i) leading[i] = x[i];
    origin[0] = __shfl_sync(kAllLanes, Op::origin_of(leading, Type()), 0, kLanes);
  }
  State mine, total[1] = {summarize_lanes<Op, false, kLanes>(x, Valid<kElements - 1>{held, false}, count, origin[0], mine)};
  if constexpr (kWarps > 1) reduce_warps<Op, false, kWarps>(total, origin, slots, group, lane / kWarp);

  Result* const to = static_cast<Result*>(a.store.at(first).address());
  Result* const results = reinterpret_cast<Result*>(shared_memory) + phase(to);
  if (here) {
    const typename Op::Row whole = a.op.finish(mine, total[0], cols, origin[0]);
    if (lane == 0) a.op.save(row, whole);
    const auto line = Store::on(results + group * cols);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i == kElements - 1 && i >= held) continue;
      const Compute y[1] = {Op::map(x[i], whole)};
      const int col = i * kGroup + lane;
      line.template store<1>(y, Shape::kHoist ? columns[i] : a.store.template columns<1>(col), col);
    }
  }
  __syncthreads();
  flush_tile<Shape::kBlock>(to, results, rows * cols);
}

}  // namespace cupynorm
