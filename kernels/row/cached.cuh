// cached: the row waits in the level-1 cache. It is read twice, one row a block: the first time a cache is asked to
// keep it, the second time to drop it.
#pragma once
#include <io/affine.cuh>
#include <base/reduce.cuh>

namespace cupynorm {

// Vectors of kVector elements, 16 bytes of x each, of which a thread reduces kVectors at a time, 4 at most; every row
// begins at one. kBlock threads a block, and registers few enough for kMinBlocks blocks on a multiprocessor, whose
// cache holds that many rows.
template <int Vector_, int Vectors, int Block, int MinBlocks>
struct Cached {
  static constexpr int kVector = Vector_, kVectors = Vectors, kBlock = Block, kMinBlocks = MinBlocks;
  static_assert(Vectors <= 4, "what is left are fewer");
};

// The State of all that one thread has seen, a batch after the other.
template <class Op, bool kTwoPass = Op::kTwoPass>
struct Running {
  using Compute = typename Op::Compute;
  typename Op::State total = Op::identity();

  template <typename Precision, int N>
  void add(Compute (&x)[N]) {
    total = Op::template merge<false>(total, Op::summarize(x, Predicate<N>{N, false}, 0));
  }
  typename Op::State state(Compute& from) const {
    from = 0;
    return total;
  }
};

// Where an op takes two passes elsewhere, two sums suffice: around an element of the thread's own what they lose is at
// most its number of elements times the precision.
template <class Op>
struct Running<Op, true> {
  using Compute = typename Op::Compute;
  typename Op::Sums sums = {};
  Compute pivot = 0;
  int count = 0;

  template <typename Precision, int N>
  void add(Compute (&x)[N]) {
    if (count == 0) pivot = Op::pivot_of(x, Precision());
    const typename Op::Sums more = Op::one_pass(x, Predicate<N>{N, false}, pivot);
    sums = {sums.sum + more.sum, sums.squares + more.squares};
    count += N;
  }
  // Counted from the first lane's element.
  typename Op::State state(Compute& from) const {
    from = __shfl_sync(kAllLanes, pivot, 0);
    return Op::rebase(Op::state_of(sums, Compute(count)), pivot, from);
  }
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_cached(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  static_assert(Load::kDirect && !Store::kHasEpilogueOperands && !Store::kScales,
      "what else is loaded would want room in the cache, too");
  constexpr int kSlots = slots_for(kWarps);
  __shared__ Slot<Op> slots[2][1][1][kSlots];
  if constexpr (kSlots > kWarps) {
    for (auto& each : slots) clear_slots<kWarps>(each);
  }
  const int vectors = int(a.cols / kVector);
  int turn = 0;
  pdl_wait_and_trigger();
#pragma unroll 1
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    auto from = a.load.at(row);
    auto to = a.store.at(row);
    from.make_opaque();
    to.make_opaque();
    Running<Op> running;
    auto add = [&](int first, auto& loaded) {
      constexpr int kCount = int(sizeof(loaded) / sizeof(loaded[0]));
      Compute x[kCount * kVector];
#pragma unroll
      for (int p = 0; p < kCount; ++p)
        loaded[p] = from.template load_twice<kVector, false>((first + p * kBlock) * kVector);
#pragma unroll
      for (int p = 0; p < kCount; ++p) unpack<kVector>(loaded[p], x + p * kVector);
      running.template add<typename Load::Precision>(x);
    };
    int i = threadIdx.x;
#pragma unroll 1
    for (; i + (kVectors - 1) * kBlock < vectors; i += kVectors * kBlock) {
      Vector<typename Load::Type, kVector> loaded[kVectors];
      add(i, loaded);
    }
    // what is left of a thread is on its way at once, too: one after the other, 4608 columns of half took a quarter
    // longer
    const int left = kVectors < 3 ? i < vectors : i < vectors ? (vectors - 1 - i) / kBlock + 1 : 0;
    if (kVectors > 3 && left == 3) {
      Vector<typename Load::Type, kVector> loaded[3];
      add(i, loaded);
    }
    if (kVectors > 2 && left == 2) {
      Vector<typename Load::Type, kVector> loaded[2];
      add(i, loaded);
    }
    if (kVectors > 1 && left == 1) {
      Vector<typename Load::Type, kVector> loaded[1];
      add(i, loaded);
    }
    Compute pivot[1];
    typename Op::State total[1] = {running.state(pivot[0])};
    total[0] = reduce_lanes<Op, false, kWarp>(total[0]);
    if constexpr (kWarps > 1) reduce_warps<Op, false, kSlots>(total, pivot, slots[turn], 0, threadIdx.x / kWarp);
    turn ^= 1;
    const typename Op::Row whole = a.op.finish(total[0], total[0], a.cols, pivot[0]);
    if (threadIdx.x == 0) a.op.save(row, whole);
#pragma unroll(sizeof(Compute) == 8 ? 1 : 4)
    for (int number = vectors - 1 - threadIdx.x; number >= 0; number -= kBlock) {
      const int col = number * kVector;
      Compute y[kVector];
      unpack<kVector>(from.template load_twice<kVector, true>(col), y);
#pragma unroll
      for (int k = 0; k < kVector; ++k) y[k] = Op::map_raw(y[k], whole);
      to.template store<kVector, true>(y, a.store.template columns<kVector>(col), col);
    }
  }
}

}  // namespace cupynorm
