// split, without shared memory. together: all blocks of the grid share each row; every row is reduced, the blocks meet
// once, and then rows are read again and written side by side, so that the columns' parameters are read once for all of
// them. spread: a row is in registers, so short that it all fits.
#pragma once
#include <base/grid.cuh>
#include <base/mailbox.cuh>
#include <base/pdl.cuh>
#include <base/reduce.cuh>
#include <io/affine.cuh>

namespace cupynorm {

// A thread reduces kVectors vectors of kVector elements of a row at a time, and writes those of kRows rows at once. The
// gridDim.y blocks of a cooperative launch share a row, kBlock threads each, registers few enough for kMinBlocks on a
// multiprocessor.
template <int Vector_, int Vectors, int Rows, int Block, int MinBlocks>
struct Together {
  static constexpr int kVector = Vector_, kVectors = Vectors, kRows = Rows, kBlock = Block, kMinBlocks = MinBlocks;
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_together(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Loaded = typename Load::template Loaded<Shape::kVector>;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kRows = Shape::kRows, kBlock = Shape::kBlock,
      kWarps = kBlock / kWarp;
  constexpr int kMost = 32;  // rows between two meetings
  constexpr int kMailboxBytes = Mailbox<Op>::kWords * 8, kVectorBytes = kVector * int(sizeof(typename Load::Type));
  // vectors whose place a block's messages take
  constexpr int kSaved = (kMailboxBytes + kVectorBytes - 1) / kVectorBytes;
  // a part begins at a line (docs/notes/048, "Parts of a row that begin at lines")
  constexpr int kUnit = 128 / kVectorBytes;
  static_assert(Load::kDirect && !Load::kDrops && !Store::kScales && !Store::kHasEpilogueOperands, "an op alone");
  static_assert(!Op::kOwnNumber, "messages lie where the number may be");
  __shared__ Slot<Op> slots[kMost][kWarps];
  __shared__ typename Op::Row wholes[kMost];
  __shared__ Loaded saved[kMost][kSaved];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = blockIdx.y, parts = gridDim.y;
  const int64 vectors = a.cols / kVector;
  const Shares units = Shares::of(vectors / kUnit, parts);
  auto begin_of = [&](int part) { return part == parts ? vectors : units.begin(part) * kUnit; };
  const int64 begin = begin_of(part), held = begin_of(part + 1) - begin;
  const bool in_place = static_cast<const void*>(a.store.at(0).address()) == a.load.at(0).address(0);
  auto mailbox = [&](int64 row, int part) {
    return mailbox_at(a.store.at(row).address() + units.begin(part) * (kUnit * kVector));
  };

  pdl_wait_and_trigger();
#pragma unroll 1
  for (int64 base = 0; base < a.rows; base += kMost) {
    const int count = a.rows - base < kMost ? int(a.rows - base) : kMost;
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      const auto from = a.load.at(base + r);
      State total = Op::identity();
      Compute pivot = 0;
#pragma unroll 1
      for (int64 offset = 0; offset < held; offset += kVectors * kBlock) {
        Loaded loaded[kVectors];
        ElementOf<Op> x[kVectors * kVector];
        int there = 0;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          const int64 number = offset + p * kBlock + threadIdx.x;
          there += number < held;
          if (number < held) loaded[p] = from.template load<kVector>((begin + number) * kVector);
          else loaded[p] = Load::template absent<kVector>(Op::padding());
        }
#pragma unroll
        for (int p = 0; p < kVectors; ++p)
          from.template unpack<kVector>(loaded[p], x + p * kVector, int64(0), Op::padding());
        if (offset == 0) pivot = pivot_of_warp<Op, typename Load::Precision>(x);
        total = Op::template merge<false>(total, Op::summarize(x, Predicate<0>{there * kVector, false}, pivot));
      }
      total = reduce_lanes<Op, false, kWarp>(total);
      if (lane == 0) slots[r][warp] = {total, pivot};
    }
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < count; r += kWarps) {
      const Slot<Op> own = slots[r][lane % kWarps];
      const Compute pivot = slots[r][0].pivot;
      const State sum = reduce_lanes<Op, false, kWarps, true>(Op::rebase(own.state, own.pivot, pivot));
      if (lane == 0) {
        if (in_place) {
#pragma unroll
          for (int i = 0; i < kSaved; ++i)
            saved[r][i] = a.load.at(base + r).template load<kVector>((begin + i) * kVector);
        }
        send_mailbox<Op>(mailbox(base + r, part), {sum, pivot});
      }
    }
    grid_wait(grid_arrive());
#pragma unroll 1
    for (int r = warp; r < count; r += kWarps) {
      const Compute pivot = slots[r][0].pivot;
      State sum = Op::identity();
#pragma unroll 1
      for (int other = lane; other < parts; other += kWarp) {
        Slot<Op> theirs;
        // the barrier has made all of them visible: one look is enough
        if (!await_mailbox<Op, 1>(mailbox(base + r, other), theirs)) {
          const int64 col = begin_of(other) * kVector, count = begin_of(other + 1) * kVector - col;
          theirs = {read_again<Op, 4, 128>(a.load.at(base + r), col, count, pivot, in_place), pivot};
        }
        sum = Op::template merge<false>(sum, Op::rebase(theirs.state, theirs.pivot, pivot));
      }
      sum = reduce_lanes<Op, false, kWarp, true>(sum);
      const typename Op::Row whole = a.op.finish(sum, sum, a.cols, pivot);
      if (lane == 0) wholes[r] = whole;
      if (lane == 0 && part == 0) a.op.save(base + r, whole);
    }
    grid_wait(grid_arrive());  // all messages are read: results may take their place

#pragma unroll 1
    for (int64 number = threadIdx.x; number < held; number += kBlock) {
      const int64 col = (begin + number) * kVector;
      const auto columns = a.store.template columns<kVector>(col);
#pragma unroll 1
      for (int r = 0; r < count; r += kRows) {
        Loaded loaded[kRows];
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (r + q >= count) continue;
          if (in_place && number < kSaved) loaded[q] = saved[r + q][number];
          else loaded[q] = a.load.at(base + r + q).template load<kVector>(col);
        }
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (r + q >= count) continue;
          ElementsOf<ElementOf<Op>, kVector> elements;
          Compute y[kVector];
          auto& x = elements.over(y);
          a.load.at(0).template unpack<kVector>(loaded[q], x, col, Op::padding());
#pragma unroll
          for (int i = 0; i < kVector; ++i) y[i] = Op::map_raw(x[i], wholes[r + q]);
          a.store.at(base + r + q).template store<kVector, true>(y, columns, col);
        }
      }
    }
    __syncthreads();  // slots and wholes are the next rows' from here on
  }
}

// The gridDim.y blocks of a cooperative launch hold row blockIdx.x: a thread kVectors vectors of kVector elements, and,
// with kParameterMode, their parameters. They tell one another by messages.
template <int Vector_, int Vectors, int ParameterMode, int Block, int MinBlocks>
struct Spread {
  static constexpr int kVector = Vector_, kVectors = Vectors, kParameterMode = ParameterMode, kBlock = Block,
      kMinBlocks = MinBlocks;
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_spread(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Loaded = typename Load::template Loaded<Shape::kVector>;
  using Columns = typename Store::template Columns<Shape::kVector>;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  __shared__ Slot<Op> slots[2][1][1][kWarps];
  const int warp = threadIdx.x / kWarp, part = blockIdx.y, parts = gridDim.y;
  const int64 row = blockIdx.x;
  const auto from = a.load.at(row);
  const auto to = a.store.at(row);
  const bool in_place = static_cast<const void*>(to.address()) == from.address(0);
  const Shares shares = Shares::of(a.cols / kVector, parts);
  const int begin = int(shares.begin(part)), held = int(shares.held(part));
  auto mailbox = [&](int part) { return mailbox_at(to.address() + shares.begin(part) * kVector); };
  auto has = [&](int p) { return p * kBlock + int(threadIdx.x) < held; };
  auto col = [&](int p) { return int64(begin + p * kBlock + threadIdx.x) * kVector; };

  pdl_wait_and_trigger();
  Loaded loaded[kVectors];
  Columns columns[kVectors];
  int there = 0;
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    there += has(p);
    if (has(p)) loaded[p] = from.template load<kVector>(col(p));
    else loaded[p] = Load::template absent<kVector>(Op::padding());
  }
  if constexpr (Shape::kParameterMode == 1) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) columns[p] = has(p) ? a.store.template columns<kVector>(col(p)) : Columns();
  }
  ElementOf<Op> x[kVectors * kVector];
  Compute pivot[1] = {0};
#pragma unroll
  for (int p = 0; p < kVectors; ++p) from.template unpack<kVector>(loaded[p], x + p * kVector, 0, Op::padding());
  pivot[0] = pivot_of_warp<Op, typename Load::Precision>(x);
  const State mine = Op::summarize(x, Predicate<0>{there * kVector, false}, pivot[0]);
  State total[1] = {reduce_lanes<Op, false, kWarp>(mine)};
  reduce_warps<Op, false, kWarps>(total, pivot, slots[0], 0, warp);
  if (in_place) {  // x itself is there until all of it has been read, and might look like messages
#pragma unroll 1
    for (int i = threadIdx.x; i < parts * Mailbox<Op>::kWords / 2; i += kBlock) clear_mailbox(mailbox(part) + 2 * i);
    grid_wait(grid_arrive());
  }
#pragma unroll 1
  for (int other = threadIdx.x; other < parts; other += kBlock)
    send_mailbox<Op>(mailbox(other) + part * Mailbox<Op>::kWords, Slot<Op>{total[0], pivot[0]});
  // The tags of messages say that they have come. But reads that are too early fetch them from memory, which delays
  // them: hence this barrier, which orders nothing
  // (docs/notes/048, "A barrier before messages are looked for").
  grid_wait<false>(grid_arrive<false>());
  total[0] = Op::identity();
#pragma unroll 1
  for (int other = threadIdx.x; other < parts; other += kBlock) {
    Slot<Op> theirs;
    if (!await_mailbox<Op, kMaxPolls>(mailbox(part) + other * Mailbox<Op>::kWords, theirs)) {
      const int count = int(shares.held(other)) * kVector;
      theirs = {read_again<Op, 4, 0>(from, shares.begin(other) * kVector, count, pivot[0], in_place), pivot[0]};
    }
    total[0] = Op::template merge<false>(total[0], Op::rebase(theirs.state, theirs.pivot, pivot[0]));
  }
  total[0] = reduce_lanes<Op, false, kWarp, true>(total[0]);
  reduce_warps<Op, false, kWarps>(total, pivot, slots[1], 0, warp);  // all are read: results may take their place
  const typename Op::Row whole = a.op.finish(mine, total[0], a.cols, pivot[0]);
  if (part == 0 && threadIdx.x == 0) a.op.save(row, whole);
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    if (!has(p)) continue;
    Compute y[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = Op::map(x[p * kVector + i], whole);
    if constexpr (Shape::kParameterMode == 1) to.template store<kVector, true>(y, columns[p], col(p));
    else to.template store<kVector, true>(y, a.store.template columns<kVector>(col(p)), col(p));
  }
}

}  // namespace cupynorm
