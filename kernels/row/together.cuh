// split, without shared memory. together: all blocks of the grid share each row; every row is reduced, the blocks meet once, and then rows are read again
// and written side by side, so that the columns' parameters are read once for all of them. spread: a row is in registers, so short that it all fits.
#pragma once
#include <io/affine.cuh>
#include <base/reduce.cuh>

namespace cupynorm {

// A thread reduces kPacks packs of kPack elements of a row at a time, and writes those of kRows rows at once. The gridDim.y blocks of a cooperative
// launch share a row, kBlock threads each, registers few enough for kResident on a multiprocessor.
template <int Pack_, int Packs, int Rows, int Block, int Resident>
struct Together {
  static constexpr int kPack = Pack_, kPacks = Packs, kRows = Rows, kBlock = Block, kResident = Resident;
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident) row_together(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Loaded = typename Load::template Loaded<Shape::kPack>;
  constexpr int kPack = Shape::kPack, kPacks = Shape::kPacks, kRows = Shape::kRows, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  constexpr int kMost = 32;  // rows between two meetings
  constexpr int kLetterBytes = Letters<Op>::kWords * 8, kPackBytes = kPack * int(sizeof(typename Load::Type));
  constexpr int kSaved = (kLetterBytes + kPackBytes - 1) / kPackBytes;  // packs whose place a block's letters take
  constexpr int kUnit = 128 / kPackBytes;  // a part begins at a line: else LayerNorm of 16 rows of 2^24 halves 0.53 instead of 0.57
  static_assert(Load::kDirect && !Load::kDrops && !Store::kScales && !Store::kAhead, "an op alone");
  __shared__ Slot<Op> slots[kMost][kWarps];
  __shared__ typename Op::Row wholes[kMost];
  __shared__ Loaded saved[kMost][kSaved];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = blockIdx.y, parts = gridDim.y;
  const int64 packs = a.cols / kPack;
  const Shares units = Shares::of(packs / kUnit, parts);
  auto begin_of = [&](int part) { return part == parts ? packs : units.begin(part) * kUnit; };
  const int64 begin = begin_of(part), held = begin_of(part + 1) - begin;
  const bool in_place = static_cast<const void*>(a.store.at(0).address()) == a.load.at(0).address(0);
  auto letters = [&](int64 row, int part) {
    return letters_at(a.store.at(row).address() + units.begin(part) * (kUnit * kPack));
  };

  take_turn();
#pragma unroll 1
  for (int64 base = 0; base < a.rows; base += kMost) {
    const int count = a.rows - base < kMost ? int(a.rows - base) : kMost;
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      const auto from = a.load.at(base + r);
      State total = Op::identity();
      Compute origin = 0;
#pragma unroll 1
      for (int64 turn = 0; turn < held; turn += kPacks * kBlock) {
        Loaded loaded[kPacks];
        Compute x[kPacks * kPack];
        int there = 0;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const int64 number = turn + p * kBlock + threadIdx.x;
          there += number < held;
          if (number < held) loaded[p] = from.template load<kPack>((begin + number) * kPack);
          else loaded[p] = Load::template absent<kPack>(Op::padding());
        }
#pragma unroll
        for (int p = 0; p < kPacks; ++p) from.template unpack<kPack>(loaded[p], x + p * kPack, int64(0), Op::padding());
        if (turn == 0) origin = origin_of_warp<Op, typename Load::Digits>(x);
        total = Op::template merge<false>(total, Op::summarize(x, Valid<0>{there * kPack, false}, origin));
      }
      total = reduce_lanes<Op, false, kWarp>(total);
      if (lane == 0) slots[r][warp] = {total, origin};
    }
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < count; r += kWarps) {
      const Slot<Op> own = slots[r][lane % kWarps];
      const Compute origin = slots[r][0].origin;
      const State sum = reduce_lanes<Op, false, kWarps, true>(Op::rebase(own.state, own.origin, origin));
      if (lane == 0) {
        if (in_place) {
#pragma unroll
          for (int i = 0; i < kSaved; ++i) saved[r][i] = a.load.at(base + r).template load<kPack>((begin + i) * kPack);
        }
        send_letters<Op>(letters(base + r, part), {sum, origin});
      }
    }
    grid_wait(grid_arrive());
#pragma unroll 1
    for (int r = warp; r < count; r += kWarps) {
      const Compute origin = slots[r][0].origin;
      State sum = Op::identity();
#pragma unroll 1
      for (int other = lane; other < parts; other += kWarp) {
        Slot<Op> theirs;
        // the barrier has made all of them visible: one look is enough
        if (!await_letters<Op, 1>(letters(base + r, other), theirs)) {
          const int64 col = begin_of(other) * kPack, count = begin_of(other + 1) * kPack - col;
          theirs = {read_again<Op, 4, 128>(a.load.at(base + r), col, count, origin, in_place), origin};
        }
        sum = Op::template merge<false>(sum, Op::rebase(theirs.state, theirs.origin, origin));
      }
      sum = reduce_lanes<Op, false, kWarp, true>(sum);
      const typename Op::Row whole = a.op.finish(sum, sum, a.cols, origin);
      if (lane == 0) wholes[r] = whole;
      if (lane == 0 && part == 0) a.op.save(base + r, whole);
    }
    grid_wait(grid_arrive());  // all letters are read: results may take their place

#pragma unroll 1
    for (int64 number = threadIdx.x; number < held; number += kBlock) {
      const int64 col = (begin + number) * kPack;
      const auto columns = a.store.template columns<kPack>(col);
#pragma unroll 1
      for (int r = 0; r < count; r += kRows) {
        Loaded loaded[kRows];
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (r + q >= count) continue;
          if (in_place && number < kSaved) loaded[q] = saved[r + q][number];
          else loaded[q] = a.load.at(base + r + q).template load<kPack>(col);
        }
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (r + q >= count) continue;
          Compute y[kPack];
          a.load.at(0).template unpack<kPack>(loaded[q], y, col, Op::padding());
#pragma unroll
          for (int i = 0; i < kPack; ++i) y[i] = Op::map_raw(y[i], wholes[r + q]);
          a.store.at(base + r + q).template store<kPack, true>(y, columns, col);
        }
      }
    }
    __syncthreads();  // slots and wholes are the next rows' from here on
  }
}

// The gridDim.y blocks of a cooperative launch hold row blockIdx.x: a thread kPacks packs of kPack elements, and, with kHoist, their parameters.
// They tell one another by letters.
template <int Pack_, int Packs, int Hoist, int Block, int Resident>
struct Spread {
  static constexpr int kPack = Pack_, kPacks = Packs, kHoist = Hoist, kBlock = Block, kResident = Resident;
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident) row_spread(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Loaded = typename Load::template Loaded<Shape::kPack>;
  using Columns = typename Store::template Columns<Shape::kPack>;
  constexpr int kPack = Shape::kPack, kPacks = Shape::kPacks, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  __shared__ Slot<Op> slots[2][1][1][kWarps];
  const int warp = threadIdx.x / kWarp, part = blockIdx.y, parts = gridDim.y;
  const int64 row = blockIdx.x;
  const auto from = a.load.at(row);
  const auto to = a.store.at(row);
  const bool in_place = static_cast<const void*>(to.address()) == from.address(0);
  const Shares shares = Shares::of(a.cols / kPack, parts);
  const int begin = int(shares.begin(part)), held = int(shares.held(part));
  auto letters = [&](int part) { return letters_at(to.address() + shares.begin(part) * kPack); };
  auto has = [&](int p) { return p * kBlock + int(threadIdx.x) < held; };
  auto col = [&](int p) { return int64(begin + p * kBlock + threadIdx.x) * kPack; };

  take_turn();
  Loaded loaded[kPacks];
  Columns columns[kPacks];
  int there = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    there += has(p);
    if (has(p)) loaded[p] = from.template load<kPack>(col(p));
    else loaded[p] = Load::template absent<kPack>(Op::padding());
  }
  if constexpr (Shape::kHoist == 1) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) columns[p] = has(p) ? a.store.template columns<kPack>(col(p)) : Columns();
  }
  Compute x[kPacks * kPack], origin[1] = {0};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) from.template unpack<kPack>(loaded[p], x + p * kPack, 0, Op::padding());
  origin[0] = origin_of_warp<Op, typename Load::Digits>(x);
  const State mine = Op::summarize(x, Valid<0>{there * kPack, false}, origin[0]);
  State total[1] = {reduce_lanes<Op, false, kWarp>(mine)};
  reduce_warps<Op, false, kWarps>(total, origin, slots[0], 0, warp);
  if (in_place) {  // x itself is there until all of it has been read, and might look like letters
#pragma unroll 1
    for (int i = threadIdx.x; i < parts * Letters<Op>::kWords / 2; i += kBlock) clear_letters(letters(part) + 2 * i);
    grid_wait(grid_arrive());
  }
#pragma unroll 1
  for (int other = threadIdx.x; other < parts; other += kBlock)
    send_letters<Op>(letters(other) + part * Letters<Op>::kWords, Slot<Op>{total[0], origin[0]});
  // Letters say themselves that they have come. But looked for too early they are asked for in memory, which holds them up: 1 x 2^20 halves
  // 0.45 of the copy rate without this barrier, 0.63 with it, 0.59 with one that orders memory.
  grid_wait<false>(grid_arrive<false>());
  total[0] = Op::identity();
#pragma unroll 1
  for (int other = threadIdx.x; other < parts; other += kBlock) {
    Slot<Op> theirs;
    if (!await_letters<Op, kLooks>(letters(part) + other * Letters<Op>::kWords, theirs)) {
      const int count = int(shares.held(other)) * kPack;
      theirs = {read_again<Op, 4, 0>(from, shares.begin(other) * kPack, count, origin[0], in_place), origin[0]};
    }
    total[0] = Op::template merge<false>(total[0], Op::rebase(theirs.state, theirs.origin, origin[0]));
  }
  total[0] = reduce_lanes<Op, false, kWarp, true>(total[0]);
  reduce_warps<Op, false, kWarps>(total, origin, slots[1], 0, warp);  // all are read: results may take their place
  const typename Op::Row whole = a.op.finish(mine, total[0], a.cols, origin[0]);
  if (part == 0 && threadIdx.x == 0) a.op.save(row, whole);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!has(p)) continue;
    Compute y[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) y[i] = Op::map(x[p * kPack + i], whole);
    if constexpr (Shape::kHoist == 1) to.template store<kPack, true>(y, columns[p], col(p));
    else to.template store<kPack, true>(y, a.store.template columns<kPack>(col(p)), col(p));
  }
}

}  // namespace cupynorm
